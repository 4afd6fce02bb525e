//! Writes under way: two at once, so that the next run is planned while the disk takes the last one.
//!
//! ```text
//! buffer 0   plan │ write (second thread) ····· │ complete, plan │ write ····
//! buffer 1        │ plan │ write ······· │ complete, plan │ ···
//! ```
//! The writing thread lets a second thread write, and goes on planning; when the second thread is busy it writes by itself. The
//! second thread is started when several runs came one after the other, so a process that writes only now and then has none.
//!
//! Both wait in the system call. The story: writes went by io_uring. At the end of a write to new room a file system must note in
//! its tables that the room is written, and io_uring leaves that to a kernel thread. Where a process that faults competes for its
//! CPU, such threads get no CPU for up to 15 seconds (kernel 6.18, in a group of tasks: see ARCHITECTURE.md). Nothing left the
//! pool meanwhile, and of two builds on two CPUs every other one took twice as long. A thread that waits in the call does that
//! work itself.
//!
//! A buffer belongs to the second thread from `begin_write` to the end of that write. Until then its objects stay in the pool and
//! in the books. So two runs never cover the same block, and where a read of a neighbour meets a run that is half written, nobody
//! has those pages on disk yet.
//!
//! Used by the writing thread alone.

use super::io::WRITE;
use super::writeback::{Block, RUN_BYTES, blocks, bytes_of};
use crate::pager::Pager;
use crate::ticker::pager;
use core::sync::atomic::Ordering::*;
use uzswap_sys::raw::Errno;
use uzswap_sys::thread;
use uzswap_sys::transfer::Transfer;

/// Most writes under way at once.
pub(super) const DEPTH: usize = crate::pool::object::WRITING_BY.len();

/// After this many runs in a row a second thread writes.
const IN_A_ROW: u32 = 3;
/// Index of its stack: after that of a handler that relieved another.
const STACK: usize = 12;

/// The outcome of a write; None while the second thread makes it.
type Write = Option<Result<(), Errno>>;

/// The slot of a write that has ended, and whether all of it is in the file.
pub(super) type Ended = (usize, Result<(), Errno>);

/// The writes under way and their buffers.
pub(super) struct Writes {
    /// All but the first are empty where only one write may be under way.
    buffers: [Vec<Block>; DEPTH],
    writes: [Option<Write>; DEPTH],
    /// Runs written without a rest between them.
    in_a_row: u32,
    /// How long a free buffer was waited for since this was last read (nanoseconds).
    waited_ns: u64,
}

impl Writes {
    /// No writes under way. Call it with the lock held, as for everything that allocates.
    pub(super) fn new(pager: &Pager) -> Self {
        // There is only one connection to a server.
        let pairs = pager.clusters.is_some_and(|map| !map.is_remote());
        let size = |i| if i == 0 || pairs { RUN_BYTES } else { 0 };
        let buffers = core::array::from_fn(|i| blocks(size(i)));
        Self { buffers, writes: [None; DEPTH], in_a_row: 0, waited_ns: 0 }
    }

    /// The index of a free buffer.
    pub(super) fn free(&self) -> Option<usize> {
        self.writes.iter().zip(&self.buffers).position(|(write, buffer)| write.is_none() && !buffer.is_empty())
    }

    /// Notes that there is nothing to write for now.
    pub(super) fn rest(&mut self) {
        self.in_a_row = 0;
    }

    /// Whether two writes may be under way at once.
    fn may_pair(&self) -> bool {
        self.buffers.iter().all(|buffer| !buffer.is_empty())
    }

    /// Whether a write is under way.
    pub(super) fn under_way(&self) -> bool {
        self.writes.iter().any(Option::is_some)
    }

    /// How long a free buffer was waited for since the last call (nanoseconds).
    pub(super) fn take_waited_ns(&mut self) -> u64 {
        core::mem::take(&mut self.waited_ns)
    }

    /// The bytes of a free buffer.
    pub(super) fn buffer(&mut self, slot: usize) -> &mut [u8] {
        debug_assert!(self.writes[slot].is_none(), "it is being written");
        bytes_of(&mut self.buffers[slot])
    }
}

impl Pager {
    /// Begins to write the first `len` bytes of a buffer.
    pub(super) fn begin_write(&'static self, writes: &mut Writes, slot: usize, at: u64, len: usize) {
        if !writes.under_way() {
            self.tier.began[WRITE].store(thread::now_ns(), Relaxed);
        }
        writes.in_a_row += 1;
        self.note_writing(slot, Some(at));
        let has_second = writes.in_a_row >= IN_A_ROW && writes.may_pair() && self.has_second();
        let bytes = &mut bytes_of(&mut writes.buffers[slot])[..len];
        if has_second {
            let what = Transfer { at, bytes: bytes.as_mut_ptr(), len, last: false };
            if self.tier.second.job.post(what) {
                writes.writes[slot] = Some(None);
                return;
            }
        }
        let began = thread::now_ns();
        let done = self.swap_write(at, bytes);
        writes.waited_ns += thread::now_ns() - began;
        self.note_writing(slot, None);
        writes.writes[slot] = Some(Some(done));
    }

    /// Starts the second thread unless it runs; returns whether it runs.
    fn has_second(&'static self) -> bool {
        let tid = &self.tier.second.tid;
        // The tests' pagers have no stacks for threads of their own.
        if tid.load(Relaxed) == 0 && self.writer.load(Relaxed) > 0 {
            tid.store(self.spawn_on(STACK, false, run).unwrap_or(-1), Relaxed);
        }
        tid.load(Relaxed) > 0
    }

    /// The second thread's loop, until it is to end.
    fn write_for_another(&self) {
        while let Some(what) = self.tier.second.job.next() {
            // SAFETY: the writing thread has lent these bytes until it takes the result.
            let bytes = unsafe { core::slice::from_raw_parts(what.bytes, what.len) };
            self.tier.second.job.done(self.swap_write(what.at, bytes));
        }
    }

    /// Call this once the books know the outcome of a write that has ended.
    pub(super) fn one_write_less(&self, writes: &Writes) {
        let now = if writes.under_way() { thread::now_ns() } else { 0 };
        self.tier.began[WRITE].store(now, Relaxed);
    }

    /// Publishes where this process writes to, or that it no longer does: a thread in the middle of a write ends later than its
    /// process seems to have ended.
    fn note_writing(&self, slot: usize, at: Option<u64>) {
        if let (Some(map), Some(row)) = (self.clusters, self.own_row_if_any())
            && let Some(geometry) = map.geometry()
            && map.direct.load(Relaxed) != 0
            && map.plain.load(Relaxed) == 0
        {
            map.note_writing(row, slot, at.map(|at| (at >> geometry.cluster_shift) as u32));
        }
    }

    /// A write that has ended, if that is how to get a buffer; None if one is free and no write has ended.
    pub(super) fn ended_or_free(&self, writes: &mut Writes) -> Option<Ended> {
        if writes.free().is_some() {
            return self.next_ended(writes, false);
        }
        let began = thread::now_ns();
        let ended = self.next_ended(writes, true);
        writes.waited_ns += thread::now_ns() - began;
        ended
    }

    /// A write that has ended. With `wait` there is one if any is under way.
    pub(super) fn next_ended(&self, writes: &mut Writes, wait: bool) -> Option<Ended> {
        if let Some(slot) = writes.writes.iter().position(|write| write.is_some_and(|done| done.is_some())) {
            let ended = writes.writes[slot].take()??;
            return Some((slot, ended));
        }
        let slot = writes.writes.iter().position(Option::is_some)?;
        let job = &self.tier.second.job;
        if wait {
            job.wait();
        }
        let ended = job.take()?;
        self.note_writing(slot, None);
        writes.writes[slot] = None;
        self.counters().swap_side_writes.fetch_add(1, Relaxed);
        Some((slot, ended))
    }
}

extern "C" fn run(arg: usize) -> ! {
    pager(arg).write_for_another();
    thread::exit()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use std::os::fd::AsRawFd;
    use uzswap_sys::{blockio, memfd};

    /// A pager with a writing thread and a file.
    fn scene() -> &'static Pager {
        let p = testing::pager_with_swap(8 << 20);
        let file = Box::leak(Box::new(memfd::create(c"swap", 16 * RUN_BYTES as u64).unwrap()));
        p.tier.file.store(file.as_raw_fd(), Relaxed);
        p.writer.store(1, Relaxed);
        p
    }

    /// Begins a write of blocks filled with `byte`.
    fn begin(p: &'static Pager, writes: &mut Writes, byte: u8, at: u64) -> usize {
        let slot = writes.free().expect("one is free");
        writes.buffer(slot)[..RUN_BYTES].fill(byte);
        p.begin_write(writes, slot, at, RUN_BYTES);
        slot
    }

    fn is_in_file(p: &Pager, byte: u8, at: u64) -> bool {
        let mut room = blocks(RUN_BYTES);
        let bytes = bytes_of(&mut room);
        blockio::read_full(p.tier.file.load(Acquire), bytes, at).unwrap();
        bytes.iter().all(|found| *found == byte)
    }

    #[test]
    fn a_second_thread_writes_when_several_follow_each_other() {
        let p = scene();
        p.tier.second.tid.store(1, Relaxed);
        let mut writes = Writes::new(p);
        let mut ended = Vec::new();
        for i in 0..u64::from(IN_A_ROW) - 1 {
            let slot = begin(p, &mut writes, 7, i * RUN_BYTES as u64);
            assert_eq!(p.next_ended(&mut writes, false), Some((slot, Ok(()))), "it wrote that itself");
        }
        // No thread is there to make it, so it is under way until there is one.
        let first = begin(p, &mut writes, 8, 8 * RUN_BYTES as u64);
        assert_eq!(p.next_ended(&mut writes, false), None);
        let second = begin(p, &mut writes, 9, 9 * RUN_BYTES as u64);
        assert_eq!(writes.free(), None);
        std::thread::scope(|threads| {
            threads.spawn(|| p.write_for_another());
            ended.push(p.next_ended(&mut writes, true).expect("the one it wrote itself"));
            ended.push(p.next_ended(&mut writes, true).expect("the other one is waited for"));
            p.tier.second.job.end();
        });
        assert_eq!(ended, [(second, Ok(())), (first, Ok(()))]);
        assert!(
            !writes.under_way() && is_in_file(p, 8, 8 * RUN_BYTES as u64) && is_in_file(p, 9, 9 * RUN_BYTES as u64)
        );
        assert_eq!(p.counters().swap_side_writes.load(Relaxed), 1);
    }

    #[test]
    fn where_no_second_thread_is_to_be_had_one_writes() {
        let p = scene();
        p.group.faults.set("thread=1/1", 0).unwrap();
        let mut writes = Writes::new(p);
        for i in 0..2 * u64::from(IN_A_ROW) {
            let slot = begin(p, &mut writes, i as u8, i * RUN_BYTES as u64);
            assert_eq!(p.next_ended(&mut writes, true), Some((slot, Ok(()))));
            assert!(is_in_file(p, i as u8, i * RUN_BYTES as u64));
        }
        assert_eq!(p.counters().swap_side_writes.load(Relaxed), 0);
    }
}

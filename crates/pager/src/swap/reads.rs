//! Reads of the swap file under way: several at once, and only the faults that need one wait for it.
//!
//! ```text
//! slot 0   planned │ under way ··············│ ended, installed     planned  with the lock: what is to be read
//! slot 1           planned │ under way ···········│ ended           begun    without it
//! slot 2                     planned │ ...                          ended    found by the handler, which polls
//! ```
//! Reads go by io_uring where it may be used: one system call begins a read, and the ring's descriptor is readable when one has
//! ended. Elsewhere, and where the other end is a server, up to [`READERS`] threads (`readers`) each make one read at a time;
//! they are started when that many reads are wanted at once. If a thread cannot be started, or cannot reach the server, its slot
//! is closed: the read is given up and asked for again. Only the first slot's reads are then made on the spot, and the handler
//! waits for them; it makes no other slot's, as it does not have that connection.
//!
//! A slot's buffer belongs to the kernel (or the thread) from when its read is begun until the read is found ended. Used by the
//! handler alone; a forked child has none of its parent's reads.

use super::io::{STANDS_NS, some_blocks};
use super::readers::READERS;
use super::writeback::{Block, bytes_of};
use crate::frames::arena;
use crate::inject::Site;
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::swapfile::{BLOCK, Place};
use uzswap_sys::raw::Errno;
use uzswap_sys::uring::Uring;
use uzswap_sys::{eventfd, thread};

/// Most reads under way at once.
pub(super) const DEPTH: usize = 8;
/// Bytes of a buffer: what is read ahead at once, which is more than the largest object with the blocks in which it begins and
/// ends.
pub(super) const BUFFER: usize = uzswap_mm::readahead::STREAM_BYTES;
/// After so long without a read the buffers are given back (nanoseconds).
const REST_NS: u64 = 10_000_000_000;
/// After this many transfers in a row of less than a block the read has failed.
const MOST_FRUITLESS: u32 = 8;
/// Result of a read that was not made: its thread could not reach the server, but another may.
pub(super) const NOT_TRIED: Errno = libc::ENOLINK;
/// For tests: how long a read is withheld at most (nanoseconds), and for how many messages.
const HOLD_NS: u64 = 3_000_000;
const HOLD_MESSAGES: u64 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Planned,
    /// For tests: under way, but not begun before this time (monotonic nanoseconds).
    Stalled(u64),
    UnderWay,
    Ended(Result<(), Errno>),
}

/// A read of a range of the file, in whole blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    /// Where the range begins.
    pub at: u64,
    /// Length in bytes.
    pub len: usize,
    /// The object that it was begun for; None if it is read ahead of all faults.
    pub place: Option<Place>,
    /// The stream for which it is then read ahead (see `uzswap_mm::readahead`).
    pub stream: u32,
    stage: Stage,
    /// Bytes that have arrived.
    done: usize,
    fruitless: u32,
    /// For tests: it is to fail, and how (see [`Pager::swap_read`]).
    injected: Option<u64>,
    /// For tests: it is not found ended before this many messages were read, or this time (monotonic nanoseconds).
    held: Option<(u64, u64)>,
    /// It has stood still.
    stalled: bool,
    /// If it fails, the page that it is for is lost.
    last: bool,
}

impl Read {
    /// A read to be begun for an object.
    pub(super) fn new(at: u64, len: usize, place: Place) -> Self {
        Self { place: Some(place), ..Self::ahead(at, len, 0) }
    }

    /// The same, as the last try or not.
    pub(super) fn tried(self, last: bool) -> Self {
        Self { last, ..self }
    }

    /// Whether the longest waiting fault has waited as long as it should, and loses the page if this read fails.
    ///
    /// The story: a signal makes a thread that waits for the disk fault again. That fault began a read at once, and each one that
    /// failed counted for the earlier fault as well. So its last two tries, which should come after pauses, came without, and a
    /// page was lost in no time.
    pub(super) fn lasts(&self) -> bool {
        self.last
    }

    /// A read to be begun ahead of all faults.
    pub(super) fn ahead(at: u64, len: usize, stream: u32) -> Self {
        let stage = Stage::Planned;
        Self {
            at,
            len,
            place: None,
            stream,
            stage,
            done: 0,
            fruitless: 0,
            injected: None,
            held: None,
            stalled: false,
            last: false,
        }
    }

    /// Where the range ends.
    pub(super) fn end(&self) -> u64 {
        self.at + self.len as u64
    }

    /// Whether it reads the whole of a range.
    pub(super) fn covers(&self, at: u64, len: usize) -> bool {
        self.at <= at && at + len as u64 <= self.at + self.len as u64
    }

    /// Bytes to transfer next.
    fn part(&self) -> usize {
        match self.injected {
            // A read that fails, or comes in two transfers, first comes in part.
            Some(bits) if bits % 2 == 1 && self.done == 0 => some_blocks(bits, self.len).max(BLOCK),
            _ => self.len - self.done,
        }
    }

    /// A transfer has ended: returns the stage that the read is in now.
    fn transferred(&mut self, ended: Result<usize, Errno>, bytes: &mut [u8]) -> Stage {
        match ended {
            _ if self.injected.is_some_and(|bits| bits % 4 == 1) => return Stage::Ended(Err(libc::EIO)),
            Ok(0) => return Stage::Ended(Err(libc::EIO)),
            Ok(n) => {
                self.fruitless = if n < BLOCK { self.fruitless + 1 } else { 0 };
                self.done += n / BLOCK * BLOCK;
            }
            // The last two are not the disk's: the thread that began the read ended before the kernel was done with it, as a
            // relieved handler does. Nearly all reads through the page cache that are under way end like that then.
            Err(libc::EINTR | libc::EAGAIN | libc::EFAULT | libc::ECANCELED) => self.fruitless += 1,
            Err(e) => return Stage::Ended(Err(e)),
        }
        if self.done >= self.len {
            if let Some(bits) = self.injected.filter(|bits| bits % 4 == 2) {
                bytes[(bits >> 8) as usize % self.len] ^= 1 << ((bits >> 2) % 8);
            }
            return Stage::Ended(Ok(()));
        }
        if self.fruitless > MOST_FRUITLESS { Stage::Ended(Err(libc::EIO)) } else { Stage::Planned }
    }
}

#[derive(Default)]
struct Slot {
    buffer: Vec<Block>,
    read: Option<Read>,
    /// Its thread cannot reach the server, or does not exist; the slot is not used any more.
    closed: bool,
}

/// A buffer of zeros.
fn zeroed() -> Vec<Block> {
    // SAFETY: zeros are blocks. (They are not written to: what is never read into takes no memory.)
    unsafe { Box::<[Block]>::new_zeroed_slice(BUFFER / BLOCK).assume_init() }.into_vec()
}

/// The reads, and the means by which they are made.
#[derive(Default)]
pub(crate) struct Reads {
    slots: [Slot; DEPTH],
    ring: Option<Uring>,
    /// The event that threads raise when a read has ended.
    event: Option<i32>,
    /// Messages that the handler has read.
    messages: u64,
    /// Whether a read was given up, whose end will never be reported: faults that need it must ask again.
    given_up: bool,
    /// When a read was last taken (monotonic nanoseconds); 0 once the buffers were given back.
    used_at: u64,
}

impl Reads {
    /// No reads under way. Call it with the lock held, as for everything that allocates.
    pub(crate) fn new(pager: &Pager) -> Self {
        let map = pager.clusters.filter(|_| pager.tier.file.load(Acquire) >= 0);
        let may = map.is_some_and(|map| map.plain.load(Relaxed) == 0 && !map.is_remote());
        let ring = if may { Uring::new(DEPTH as u32).ok() } else { None };
        let event = if map.is_some() && ring.is_none() { eventfd::create().ok() } else { None };
        pager.tier.readers.event.store(event.unwrap_or(-1), Release);
        let reads = Self { ring, event, ..Self::default() };
        pager.tier.reads_fd.store(reads.fd(), Release);
        reads
    }

    /// A descriptor that is readable when a read has ended; -1 if nothing can be under way.
    pub(crate) fn fd(&self) -> i32 {
        self.ring.as_ref().map(Uring::fd).or(self.event).unwrap_or(-1)
    }

    /// Most reads that may be under way.
    fn depth(&self) -> usize {
        match (&self.ring, self.event) {
            (Some(_), _) => DEPTH,
            (None, Some(_)) => READERS,
            _ => 1,
        }
    }

    /// The reads that are planned, under way, or ended and not taken.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Read> {
        self.slots.iter().filter_map(|slot| slot.read.as_ref())
    }

    /// Number of free slots.
    pub(super) fn free(&self) -> usize {
        self.slots[..self.depth()].iter().filter(|slot| slot.read.is_none() && !slot.closed).count()
    }

    /// Takes a slot for a read, with the lock held; false if there is none.
    pub(super) fn plan(&mut self, pager: &Pager, s: &State, read: Read) -> bool {
        let depth = self.depth();
        let Some(i) = self.slots[..depth].iter().position(|slot| slot.read.is_none() && !slot.closed) else {
            return false;
        };
        let slot = &mut self.slots[i];
        if slot.buffer.is_empty() {
            slot.buffer = zeroed();
        }
        if self.event.is_some() {
            pager.start_reader(s, i);
        }
        slot.read = Some(read);
        true
    }

    /// Whether there are reads to begin.
    pub(crate) fn any_planned(&self) -> bool {
        self.iter().any(|read| read.stage == Stage::Planned)
    }

    /// Whether a read has ended and may be taken.
    pub(crate) fn any_ended(&self) -> bool {
        self.iter().any(|read| matches!(read.stage, Stage::Ended(_)) && !self.is_held(read))
    }

    /// When to look again, for reads that are withheld or for buffers to give back (monotonic nanoseconds).
    pub(crate) fn look_at(&self) -> Option<u64> {
        let stalled = |read: &Read| if let Stage::Stalled(until) = read.stage { Some(until) } else { None };
        let withheld = self.iter().filter_map(|read| stalled(read).or(read.held.map(|(_, until)| until)));
        withheld.chain(self.give_back_at()).min()
    }

    fn is_held(&self, read: &Read) -> bool {
        read.held.is_some_and(|(messages, until)| self.messages < messages && thread::now_ns() < until)
    }

    /// Counts a message that was read.
    pub(crate) fn count_message(&mut self) {
        self.messages += 1;
    }

    /// Begins what is planned. Call it without the lock.
    pub(crate) fn begin(&mut self, pager: &Pager) {
        for i in 0..DEPTH {
            if self.slots[i].read.is_some_and(|read| read.stage == Stage::Planned) {
                self.begin_one(pager, i);
            }
        }
    }

    fn begin_one(&mut self, pager: &Pager, i: usize) {
        let Slot { buffer, read: Some(read), .. } = &mut self.slots[i] else { return };
        let bytes = &mut bytes_of(buffer)[..read.len];
        if pager.tier.began[super::io::READ].load(Relaxed) == 0 {
            pager.tier.began[super::io::READ].store(thread::now_ns(), Relaxed);
        }
        if read.done == 0
            && read.fruitless == 0
            && let Some(bits) = pager.inject(Site::SwapHold)
        {
            read.held = Some((self.messages + 1 + bits % HOLD_MESSAGES, thread::now_ns() + HOLD_NS));
        }
        if !core::mem::replace(&mut read.stalled, true) && pager.inject(Site::SwapStall).is_some() {
            read.stage = Stage::Stalled(thread::now_ns() + STANDS_NS);
            return;
        }
        read.stage = Stage::UnderWay;
        if let Some(ring) = &mut self.ring {
            if read.done == 0 && read.fruitless == 0 {
                read.injected = pager.inject_read(read.last);
            }
            if read.injected.is_some_and(|bits| bits % 4 == 0) {
                return self.end(pager, i, Err(libc::EIO));
            }
            let (fd, from, part) = (pager.tier.file.load(Acquire), read.done, read.part());
            // SAFETY: the buffer is neither touched nor freed until the read is found ended.
            let begun =
                unsafe { ring.read(fd, bytes[from..].as_mut_ptr(), part, read.at + from as u64, i as u64) }.is_ok();
            if begun {
                return;
            }
            // The kernel has no memory for it just now.
            read.injected = None;
        } else if self.event.is_some() && pager.tier.readers.post(i, read.at, bytes, read.last) {
            return;
        } else if i > 0 {
            // Not on the spot: the first thread may be in the middle of a request on the connection that this would use.
            return self.close(pager, i);
        }
        let result = pager.swap_read(0, read.at, bytes, read.last);
        self.finish(pager, i, result);
    }

    /// Closes a slot that is of no use, and gives its read up.
    fn close(&mut self, pager: &Pager, i: usize) {
        (self.slots[i].closed, self.slots[i].read, self.given_up) = (true, None, true);
        self.goes_on(pager);
    }

    /// The caller ensures that everything waited for is asked for again.
    pub(crate) fn forget_given_up(&mut self) {
        self.given_up = false;
    }

    /// Whether something must be asked for again.
    pub(crate) fn any_given_up(&self) -> bool {
        self.given_up
    }

    /// Finds which reads have ended.
    pub(crate) fn look(&mut self, pager: &Pager) {
        for read in self.slots.iter_mut().filter_map(|slot| slot.read.as_mut()) {
            if matches!(read.stage, Stage::Stalled(until) if thread::now_ns() >= until) {
                read.stage = Stage::Planned;
                pager.tier.began[super::io::READ].store(thread::now_ns(), Relaxed);
            }
        }
        while let Some(ring) = &mut self.ring {
            let Ok(Some((tag, ended))) = ring.next(false) else { break };
            let i = tag as usize;
            let Slot { buffer, read: Some(read), .. } = &mut self.slots[i] else { continue };
            pager.counters().swap_uring_reads.fetch_add(1, Relaxed);
            match read.transferred(ended, bytes_of(buffer)) {
                Stage::Ended(result) => self.end(pager, i, result),
                stage => read.stage = stage,
            }
        }
        let Some(event) = self.event.filter(|_| self.any_under_way()) else { return };
        if !eventfd::take(event) {
            return;
        }
        for i in 0..READERS {
            match pager.tier.readers.take(i) {
                Some(Err(NOT_TRIED)) => self.close(pager, i),
                Some(result) => self.finish(pager, i, result),
                None => {}
            }
        }
    }

    /// The handler has slept: takes an event for which no read is left, as that would keep it from sleeping again. (A thread
    /// stores its result before it raises the event, so another thread's event may take the result, and this thread's event then
    /// comes late.)
    pub(crate) fn slept(&self) {
        if let Some(event) = self.event.filter(|_| !self.any_under_way()) {
            eventfd::take(event);
        }
    }

    fn any_under_way(&self) -> bool {
        self.iter().any(|read| matches!(read.stage, Stage::UnderWay | Stage::Stalled(_)))
    }

    /// Counts a read through the ring that has ended.
    fn end(&mut self, pager: &Pager, i: usize, result: Result<(), Errno>) {
        let len = self.slots[i].read.map_or(0, |read| read.len);
        pager.count_swap_read(len, result);
        self.finish(pager, i, result);
    }

    fn finish(&mut self, pager: &Pager, i: usize, result: Result<(), Errno>) {
        if let Some(read) = &mut self.slots[i].read {
            read.stage = Stage::Ended(result);
        }
        self.goes_on(pager);
    }

    /// One read fewer is under way.
    fn goes_on(&self, pager: &Pager) {
        let more = self.any_under_way();
        pager.tier.began[super::io::READ].store(if more { thread::now_ns() } else { 0 }, Relaxed);
    }

    /// Passes a read that has ended, its bytes and its result to `take`; false if there is none.
    pub(super) fn take(&mut self, take: impl FnOnce(&Read, &mut [u8], Result<(), Errno>)) -> bool {
        let ended = |slot: &Slot| {
            slot.read.as_ref().is_some_and(|read| matches!(read.stage, Stage::Ended(_)) && !self.is_held(read))
        };
        let Some(i) = self.slots.iter().position(ended) else { return false };
        let slot = &mut self.slots[i];
        let Some(read) = slot.read.take() else { return false };
        let Stage::Ended(result) = read.stage else { return false };
        take(&read, &mut bytes_of(&mut slot.buffer)[..read.len], result);
        self.used_at = thread::now_ns();
        true
    }

    /// When to give back the buffers' memory (monotonic nanoseconds); None if that was done, or there are reads.
    fn give_back_at(&self) -> Option<u64> {
        (self.used_at != 0 && self.iter().next().is_none()).then_some(self.used_at + REST_NS)
    }

    /// Gives the buffers' memory back to the kernel if it is time to: in all 1.6 MiB, which count against the limit.
    pub(crate) fn give_back(&mut self) {
        if self.give_back_at().is_some_and(|at| thread::now_ns() >= at) {
            self.slots.iter_mut().for_each(|slot| arena::vacate(bytes_of(&mut slot.buffer)));
            self.used_at = 0;
        }
    }
}

#[cfg(test)]
impl Reads {
    /// For tests: makes no transfers; the test says what was read.
    pub(super) fn by_hand() -> Self {
        Self { event: Some(-1), ..Self::default() }
    }

    /// For tests: the same where threads raise `event`.
    pub(crate) fn by_threads(event: i32) -> Self {
        Self { event: Some(event), ..Self::default() }
    }

    /// For tests: a read is under way by thread 1, which cannot reach the server and has just said so.
    pub(crate) fn be_refused(&mut self, pager: &Pager) {
        self.slots[1].read = Some(Read { stage: Stage::UnderWay, ..Read::new(0, BLOCK, 0) });
        pager.tier.began[super::io::READ].store(thread::now_ns(), Relaxed);
        pager.tier.readers.end_by_hand(1, NOT_TRIED);
        self.event.into_iter().for_each(eventfd::raise);
    }

    /// For tests: what is planned is under way now; oldest slot first.
    pub(super) fn begin_by_hand(&mut self) -> Vec<Read> {
        let planned = self.slots.iter_mut().filter_map(|slot| slot.read.as_mut());
        let planned = planned.filter(|read| read.stage == Stage::Planned);
        planned
            .map(|read| {
                read.stage = Stage::UnderWay;
                *read
            })
            .collect()
    }

    /// For tests: the read at an offset has ended.
    pub(super) fn end_by_hand(&mut self, at: u64, from: &[u8], result: Result<(), Errno>) {
        let of = |slot: &&mut Slot| slot.read.is_some_and(|read| read.at == at && read.stage == Stage::UnderWay);
        let slot = self.slots.iter_mut().find(of).expect("it is under way");
        let read = slot.read.as_mut().expect("it is under way");
        bytes_of(&mut slot.buffer)[..read.len].copy_from_slice(&from[at as usize..][..read.len]);
        read.stage = Stage::Ended(result);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Buffers go ten seconds after the last read was taken, and stay while there is a read.
    #[test]
    fn buffers_are_given_back() {
        let mut reads = Reads::by_hand();
        assert_eq!(reads.look_at(), None);
        for slot in &mut reads.slots[..2] {
            slot.buffer = zeroed();
            bytes_of(&mut slot.buffer).fill(7);
            slot.read = Some(Read { stage: Stage::Ended(Ok(())), ..Read::new(0, BLOCK, 0) });
        }
        // What was given back reads as zeros.
        let buffers = |reads: &mut Reads| {
            reads
                .slots
                .iter_mut()
                .map(|slot| bytes_of(&mut slot.buffer).get(BUFFER / 2) == Some(&7))
                .filter(|full| *full)
                .count()
        };
        assert!(reads.take(|_, _, _| ()));
        reads.used_at -= REST_NS;
        reads.give_back();
        assert_eq!((buffers(&mut reads), reads.look_at()), (2, None), "one is read into");
        let before = thread::now_ns();
        assert!(reads.take(|_, _, _| ()));
        let at = reads.look_at().expect("a time");
        assert!((before..=thread::now_ns()).contains(&(at - REST_NS)));
        reads.give_back();
        assert_eq!(buffers(&mut reads), 2);
        reads.used_at -= REST_NS;
        reads.give_back();
        assert_eq!((buffers(&mut reads), reads.look_at()), (0, None));
    }

    /// The result of each transfer → the read's stage after it, for a read of 16 KiB.
    #[test]
    fn transfers_cut_short_are_gone_on_with_from_a_block() {
        let mut bytes = vec![0; 16384];
        for (gives, want) in [
            (&[Ok(16384)][..], Stage::Ended(Ok(()))),
            (&[Ok(4096), Ok(12288)], Stage::Ended(Ok(()))),
            (&[Ok(5000), Ok(100), Err(libc::EINTR), Ok(12288)], Stage::Ended(Ok(()))),
            (&[Ok(5000)], Stage::Planned),
            (&[Ok(8192), Ok(0)], Stage::Ended(Err(libc::EIO))),
            (&[Err(libc::ENXIO)], Stage::Ended(Err(libc::ENXIO))),
            (&[Err(libc::EFAULT), Ok(4096), Err(libc::ECANCELED), Ok(12288)], Stage::Ended(Ok(()))),
            (&[Ok(512); 9], Stage::Ended(Err(libc::EIO))),
            (&[Err(libc::EAGAIN); 9], Stage::Ended(Err(libc::EIO))),
        ] {
            let mut read = Read::new(0, 16384, 0);
            let stages: Vec<_> = gives.iter().map(|n| read.transferred(*n, &mut bytes)).collect();
            assert_eq!(*stages.last().unwrap(), want, "{gives:?}");
            assert!(stages[..stages.len() - 1].iter().all(|s| *s == Stage::Planned), "{gives:?}: {stages:?}");
            if want == Stage::Planned {
                assert_eq!((read.done, read.part()), (4096, 12288));
            }
        }
    }
}

//! Writes under way: two at once by io_uring, so that the next run is planned while the disk has the last one; where
//! io_uring is refused, one after the other.
//!
//! ```text
//! buffer 0   plan │ write ·················· │ complete, plan │ write ····
//! buffer 1        │ plan │ write ················· │ complete, plan │ ···
//! ```
//! A buffer is the kernel's from `begin_write` to the end of that write, and its objects stay in the pool and in the
//! books as long: so two runs never cover the same block, and a read of a neighbour meets a run that is half written only
//! in pages that nobody has on disk yet.
//!
//! Used by the writing thread alone.

use super::io::{WRITE, some_blocks};
use super::writeback::{Block, RUN_BYTES, blocks, bytes_of};
use crate::inject::Site;
use crate::pager::Pager;
use core::sync::atomic::Ordering::*;
use uzswap_mm::swapfile::BLOCK;
use uzswap_sys::raw::Errno;
use uzswap_sys::uring::Uring;
use uzswap_sys::{blockio, thread};

/// Writes under way at once, at most.
pub(super) const DEPTH: usize = crate::object::WRITING_BY.len();

/// A write that was begun.
#[derive(Clone, Copy)]
struct Write {
    at: u64,
    len: usize,
    /// It was done at once: what became of it.
    done: Option<Result<(), Errno>>,
    /// It is to fail, and how (see [`Pager::swap_write`]).
    injected: Option<u64>,
}

/// A write that has ended, and whether all of it is in the file.
pub(super) type Ended = (usize, Result<(), Errno>);

/// The writes under way and their buffers.
pub(super) struct Writes {
    ring: Option<Uring>,
    buffers: [Vec<Block>; DEPTH],
    writes: [Option<Write>; DEPTH],
    /// For how long a free buffer was waited for since this was last taken (nanoseconds).
    waited_ns: u64,
}

impl Writes {
    /// None under way; to be called with the lock held, as all that allocates.
    pub(super) fn new(pager: &Pager) -> Self {
        let may = pager.clusters.is_some_and(|map| map.plain.load(Relaxed) == 0 && !map.is_remote());
        let ring = if may { Uring::new(DEPTH as u32).ok() } else { None };
        // (Without a ring the first buffer is always free again.)
        let size = |i| if i == 0 || ring.is_some() { RUN_BYTES } else { 0 };
        let buffers = core::array::from_fn(|i| blocks(size(i)));
        Self { ring, buffers, writes: [None; DEPTH], waited_ns: 0 }
    }

    /// A buffer that is free.
    pub(super) fn free(&self) -> Option<usize> {
        self.writes.iter().position(Option::is_none)
    }

    /// Whether a write is under way.
    pub(super) fn under_way(&self) -> bool {
        self.writes.iter().any(Option::is_some)
    }

    /// For how long a free buffer was waited for since this was last asked (nanoseconds).
    pub(super) fn take_waited_ns(&mut self) -> u64 {
        core::mem::take(&mut self.waited_ns)
    }

    /// A free buffer's bytes.
    pub(super) fn buffer(&mut self, slot: usize) -> &mut [u8] {
        debug_assert!(self.writes[slot].is_none(), "the kernel has it");
        bytes_of(&mut self.buffers[slot])
    }
}

impl Pager {
    /// Begins to write `len` bytes of a buffer.
    pub(super) fn begin_write(&self, writes: &mut Writes, slot: usize, at: u64, len: usize) {
        if !writes.under_way() {
            self.tier.began[WRITE].store(thread::now_ns(), Relaxed);
        }
        let bytes = &bytes_of(&mut writes.buffers[slot])[..len];
        // (One that is to be slow is made by this thread.)
        if let Some(ring) = writes.ring.as_mut().filter(|_| !self.is_injected(Site::SwapSlow)) {
            let injected = self.inject(Site::SwapWrite);
            // What fails has reached the disk in part.
            let part = injected.map_or(len, |bits| some_blocks(bits, len).max(BLOCK));
            let fd = self.tier.file.load(Acquire);
            self.note_writing(slot, Some(at));
            // SAFETY: the buffer is not touched, and not freed, until the write is found ended.
            if unsafe { ring.write(fd, bytes.as_ptr(), part, at, slot as u64) }.is_ok() {
                writes.writes[slot] = Some(Write { at, len, done: None, injected });
                return;
            }
            self.note_writing(slot, None);
        }
        let began = thread::now_ns();
        let done = Some(self.swap_write(at, bytes));
        writes.waited_ns += thread::now_ns() - began;
        writes.writes[slot] = Some(Write { at, len, done, injected: None });
    }

    /// The books have been told of a write that had ended.
    pub(super) fn one_write_less(&self, writes: &Writes) {
        let now = if writes.under_way() { thread::now_ns() } else { 0 };
        self.tier.began[WRITE].store(now, Relaxed);
    }

    /// The others are to know where the kernel has a write of this process, or that it has none any more. (One through the page cache
    /// is done by threads of the process.)
    fn note_writing(&self, slot: usize, at: Option<u64>) {
        if let (Some(map), Some(row)) = (self.clusters, self.own_row_if_any())
            && let Some(geometry) = map.geometry()
            && map.direct.load(Relaxed) != 0
        {
            map.note_writing(row, slot, at.map(|at| (at >> geometry.cluster_shift) as u32));
        }
    }

    /// A write that has ended, if a buffer is to be had by it; None when one is free and none has ended.
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
        if let Some(slot) = writes.writes.iter().position(|w| w.is_some_and(|w| w.done.is_some())) {
            let ended = writes.writes[slot].take()?.done?;
            return Some((slot, ended));
        }
        let ring = writes.ring.as_mut()?;
        let (slot, ended) = loop {
            match ring.next(wait) {
                Ok(found) => break found?,
                // (The kernel has no memory for it just now: the buffers stay its own.)
                Err(_) => thread::sleep_ns(1_000_000),
            }
        };
        let slot = slot as usize;
        self.note_writing(slot, None);
        let write = writes.writes[slot].take()?;
        let result = self.settle(write, ended, &bytes_of(&mut writes.buffers[slot])[..write.len]);
        self.counters().swap_uring_writes.fetch_add(1, Relaxed);
        self.wrote(write.len, result);
        Some((slot, result))
    }

    /// What became of a write: one that was cut short is gone on with.
    fn settle(&self, write: Write, ended: Result<usize, Errno>, bytes: &[u8]) -> Result<(), Errno> {
        let ended = match write.injected.map(|bits| bits % 4) {
            Some(0) => Err(libc::EIO),
            Some(1) => Err(libc::ENOSPC),
            _ => ended,
        };
        let done = match ended {
            Ok(n) if n == write.len => return Ok(()),
            Ok(0) => return Err(libc::EIO),
            Ok(n) => n / BLOCK * BLOCK,
            Err(libc::EINTR | libc::EAGAIN) => 0,
            Err(e) => return Err(e),
        };
        if write.injected.is_some_and(|bits| bits % 4 == 2) {
            return Err(libc::EIO);
        }
        blockio::write_all(self.tier.file.load(Acquire), &bytes[done..], write.at + done as u64)
    }
}

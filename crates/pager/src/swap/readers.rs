//! Threads that read from the swap file where io_uring is refused, or where the other end is a server.
//!
//! Thread *i* makes the reads of slot *i* (`reads`), one at a time, on a connection of its own if there is a server. The handler
//! posts a read and goes on; the thread raises an event that the handler polls along with its messages. A thread is started when
//! its slot is first used, so a program with one faulting thread has one.
//!
//! `sys`'s `transfer` defines how a read is handed over. A forked child has no such threads: [`Readers::forget`].

use super::reads::NOT_TRIED;
use super::worker::Worker;
use crate::pager::Pager;
use crate::state::State;
use crate::ticker;
use core::sync::atomic::{AtomicI32, Ordering::*};
use uzswap_sys::raw::Errno;
use uzswap_sys::transfer::Transfer;
use uzswap_sys::{eventfd, thread};

/// Most reading threads.
pub const READERS: usize = 4;
/// Index of the first one's stack: after those of `compress`.
const FIRST_STACK: usize = 7;

/// All reading threads.
pub struct Readers {
    all: [Worker; READERS],
    /// The event that they raise; -1 for none.
    pub event: AtomicI32,
    /// Their connections to the command, if there is a server, except for the first one's; -1 for none.
    pub links: [AtomicI32; READERS - 1],
}

impl Default for Readers {
    fn default() -> Self {
        Self { all: Default::default(), event: AtomicI32::new(-1), links: [const { AtomicI32::new(-1) }; READERS - 1] }
    }
}

impl Readers {
    /// Makes thread `i` fill `bytes`, which belong to it until the result was taken; `last` if this is the last try; false if
    /// there is no such thread.
    pub(super) fn post(&self, i: usize, at: u64, bytes: &mut [u8], last: bool) -> bool {
        let reader = &self.all[i];
        reader.tid.load(Relaxed) > 0
            && reader.job.post(Transfer { at, bytes: bytes.as_mut_ptr(), len: bytes.len(), last })
    }

    /// The outcome of thread `i`'s read, if it has ended.
    pub(super) fn take(&self, i: usize) -> Option<Result<(), Errno>> {
        self.all[i].job.take()
    }

    /// Ends the threads that run. The caller ensures that they get no more work.
    pub(super) fn end(&self) {
        self.all.iter().for_each(Worker::end);
    }

    /// In a forked child, which has none of them.
    pub(crate) fn forget(&self) {
        self.all.iter().for_each(Worker::forget);
        self.event.store(-1, Relaxed);
    }
}

#[cfg(test)]
impl Readers {
    /// For tests: sets the id of thread `i`, or that it could not be started.
    pub(super) fn set_tid(&self, i: usize, tid: i32) {
        self.all[i].tid.store(tid, Relaxed);
    }

    /// For tests: ends the read of thread `i`.
    pub(super) fn end_by_hand(&self, i: usize, result: Errno) {
        self.all[i].job.done(if result == 0 { Ok(()) } else { Err(result) });
    }
}

impl Pager {
    /// Starts reader `i` if it does not run, with the lock held.
    pub(super) fn start_reader(&self, s: &State, i: usize) {
        const RUN: [extern "C" fn(usize) -> !; READERS] = [run::<0>, run::<1>, run::<2>, run::<3>];
        let tid = &self.tier.readers.all[i].tid;
        // The tests' pagers have no stacks for threads of their own: none runs there.
        if tid.load(Relaxed) != 0 || self.tier.readers.event.load(Relaxed) < 0 {
            return;
        }
        let started = self.spawn_on(FIRST_STACK + i, false, RUN[i]);
        tid.store(started.unwrap_or(-1), Relaxed);
        if let Ok(tid) = started {
            // It inherits the handler's idle policy and its one CPU, and would run only when nobody else wants that CPU.
            thread::set_idle_policy(tid, false);
            s.placement.set_free(tid);
        }
    }

    fn read_for_ever(&self, i: usize) -> ! {
        let job = &self.tier.readers.all[i].job;
        while let Some(what) = job.next() {
            // SAFETY: the handler has lent these bytes until it takes the result.
            let bytes = unsafe { core::slice::from_raw_parts_mut(what.bytes, what.len) };
            let result = if self.can_read(i) { self.swap_read(i, what.at, bytes, what.last) } else { Err(NOT_TRIED) };
            job.done(result);
            eventfd::raise(self.tier.readers.event.load(Acquire));
        }
        thread::exit()
    }
}

extern "C" fn run<const I: usize>(pager: usize) -> ! {
    ticker::pager(pager).read_for_ever(I)
}

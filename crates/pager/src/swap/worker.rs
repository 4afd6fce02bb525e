//! A thread that makes transfers for another thread, one at a time: the readers (`readers`), and the second writing thread
//! (`pipeline`).

use crate::discover::letgo::await_end;
use core::sync::atomic::{AtomicI32, Ordering::Relaxed};
use uzswap_sys::transfer::Job;

/// Such a thread.
#[derive(Default)]
pub struct Worker {
    pub(super) job: Job,
    /// Its thread id; 0 until it is started, -1 if it could not be.
    pub(super) tid: AtomicI32,
}

impl Worker {
    /// Ends the thread, if it runs. The caller ensures that it gets no more work.
    pub(super) fn end(&self) {
        self.job.end();
        await_end(self.tid.load(Relaxed));
    }

    /// In a forked child, which does not have it.
    pub(super) fn forget(&self) {
        self.tid.store(0, Relaxed);
        self.job.forget();
    }
}

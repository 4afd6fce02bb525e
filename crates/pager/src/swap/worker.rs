//! A thread that makes transfers for another, one at a time: those that read (`readers`), and the second one that writes (`pipeline`).

use crate::discover::letgo::await_end;
use core::sync::atomic::{AtomicI32, Ordering::Relaxed};
use uzswap_sys::transfer::Job;

/// One of them.
#[derive(Default)]
pub struct Worker {
    pub(super) job: Job,
    /// The thread's id, 0 until it is started, -1 if it could not be.
    pub(super) tid: AtomicI32,
}

impl Worker {
    /// Ends it, if it runs; for who has seen to it that nothing more is asked of it.
    pub(super) fn end(&self) {
        self.job.end();
        await_end(self.tid.load(Relaxed));
    }

    /// In a forked child: there is none.
    pub(super) fn forget(&self) {
        self.tid.store(0, Relaxed);
        self.job.forget();
    }
}

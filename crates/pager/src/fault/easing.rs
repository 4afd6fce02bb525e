//! Makes idle-policy threads normal again before the process ends, so that it does not end late.
//!
//! When a process ends, or executes another program, the kernel ends its threads, and each needs a CPU for that. The last one
//! also tears down the memory, some milliseconds of work for 50 MiB. On a busy machine that is an idle-policy thread, which gets
//! 0.1 % of a CPU that four others want. So idle policy lasts only while it is useful:
//!
//! | the process | its handler is normal |
//! |---|---|
//! | has not faulted for a while (it may be killed then) | until the next fault |
//! | is about to end | from then on |
//! | makes a call that starts another program, which may take its place | from then on, or until the call returns |
//!
//! Where threads may not leave the idle policy, the handler is relieved (`watch`) in the first two cases. The thread that ends the
//! process waits for that. The old handler needs the CPU either way, but handing over takes it a hundredth of the work that it
//! would have as the last thread.

use crate::pager::Pager;
use core::sync::atomic::Ordering::*;
use uzswap_sys::thread;

/// How long a thread that ends the process waits at most for the handler to be relieved (nanoseconds).
const ENDING_NS: u64 = 3_000_000_000;
/// The time between its checks: the first, and the longest.
const LOOKS_NS: (u64, u64) = (50_000, 2_000_000);

impl Pager {
    /// The program is about to end the process.
    pub fn ends(&self) {
        if !self.all_normal() || self.may_leave_idle.load(Relaxed) {
            return;
        }
        let (until, mut nap) = (thread::now_ns() + ENDING_NS, LOOKS_NS.0);
        let has_idle = || thread::has_idle_policy(self.handler.load(Acquire)) || self.has_idle_former();
        while has_idle() && thread::now_ns() < until {
            // Each time: it may take more than one relief.
            self.poke_ticker();
            thread::sleep_ns(nap);
            nap = (nap * 2).min(LOOKS_NS.1);
        }
    }

    /// Makes all threads of uzswap normal if that is allowed. False if there is nothing to do: another thread does it already,
    /// memory is not managed, or the caller is a vfork child, which has its parent's memory.
    pub(crate) fn all_normal(&self) -> bool {
        if !self.engaged.load(Acquire) || !self.is_of_this_process() || self.ending.swap(true, SeqCst) {
            return false;
        }
        if self.may_leave_idle.load(Relaxed) {
            self.set_all_normal();
        }
        true
    }

    fn set_all_normal(&self) {
        for tid in [self.handler.load(Acquire), self.reclaimer.load(Acquire)] {
            if tid > 0 {
                thread::set_idle_policy(tid, false);
            }
        }
        self.signs.normal.store(true, SeqCst);
    }

    /// A call that started another program has returned: that has not taken this one's place.
    pub(crate) fn does_not_end(&self) {
        if self.ending.load(SeqCst) && self.is_of_this_process() {
            // The ticker makes the handler idle again.
            self.ending.store(false, SeqCst);
        }
    }

    /// Makes the handler a normal thread, or starts another one in its place. Called by the ticker.
    pub(crate) fn ease_handler(&self) {
        if self.signs.normal.load(Relaxed) {
            return;
        }
        let handler = self.handler.load(Relaxed);
        if self.may_leave_idle.load(Relaxed) {
            thread::set_idle_policy(handler, false);
        } else {
            if self.files.signals.load(Relaxed) < 0 {
                return;
            }
            let relieved = self.is_relieved(handler);
            self.wake_former_handler();
            if !relieved {
                return;
            }
        }
        self.signs.normal.store(true, SeqCst);
    }

    /// Gives the handler idle policy again. Called by the ticker.
    pub(crate) fn lower_handler(&self) {
        if !self.signs.normal.load(Relaxed) || self.ending.load(SeqCst) {
            return;
        }
        self.signs.normal.store(false, SeqCst);
        thread::set_idle_policy(self.handler.load(Relaxed), true);
        self.stays_normal_if_ending();
    }

    /// Called after a thread was given idle policy: the process may have begun to end meanwhile.
    pub(crate) fn stays_normal_if_ending(&self) {
        if self.ending.load(SeqCst) && self.may_leave_idle.load(Relaxed) {
            self.set_all_normal();
        }
    }
}

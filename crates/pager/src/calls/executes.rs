//! Keeps a process's membership right while it executes another program, and if that call fails.
//!
//! Invariant: a vfork child has this memory too, so what is noted here says of which process it is: by the slot's owner, or by a
//! number that a forked child does not take for its own either.

use crate::pager::Pager;
use core::sync::atomic::Ordering::*;
use uzswap_sys::thread;

impl Pager {
    /// This process is about to execute a program that will not be a member: returns its charges.
    ///
    /// The story: a process that had filled 47 MiB executed a statically linked program, and was charged for them as long as that
    /// program ran.
    pub fn executes(&self) {
        if self.is_of_caller() && !self.left.load(SeqCst) {
            self.executing.store(true, SeqCst);
            self.leave();
        }
    }

    /// A thread of the calling process is about to make a call that starts another program.
    pub fn starts_program(&self) {
        self.starting.store(thread::getpid(), Relaxed);
        self.all_normal();
    }

    /// Whether a thread of this process is starting another program.
    pub(crate) fn is_starting_program(&self) -> bool {
        self.starting.load(Relaxed) == thread::getpid()
    }

    /// The program could not be executed.
    pub fn goes_on(&self) {
        self.starting.store(0, Relaxed);
        self.does_not_end();
        if self.executing.load(SeqCst) && self.is_of_caller() && self.executing.swap(false, SeqCst) {
            self.me().ticker.store(self.ticker.load(Relaxed) as u32, Relaxed);
            self.me().engaged.store(u32::from(self.engaged.load(Relaxed)), Relaxed);
            self.left.store(false, SeqCst);
            // The ticker publishes the charges again.
            self.poke_ticker();
        }
    }
}

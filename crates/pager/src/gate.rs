//! Forks and the calls that change mappings, one after the other.
//!
//! A thread in munmap, mremap or madvise has changed the mappings before the pager reads the event that says so. A fork
//! between the two would give the child mappings of after the call and tables of before it: pages that mremap moved would
//! read as zeros. So libc's calls are counted while they are under way, and a fork waits until there are none and
//! keeps new ones waiting at the gate. (When a call has returned its event has been read, and what is read is done under the lock
//! that the fork then takes.) Calls that a program makes without libc are not seen.
//!
//! The handler closes the gate too, for a moment, when a thread that makes one such call after the other keeps it from
//! serving faults: nothing can be moved in while an event is unread, and there always is one.

use core::sync::atomic::{AtomicU32, Ordering::*};
use uzswap_sys::{lock, thread};

/// Calls that change mappings, now.
pub static UNDER_WAY: AtomicU32 = AtomicU32::new(0);
/// Who keeps them waiting, now: threads that fork, and the handler (a futex word).
pub static CLOSED: AtomicU32 = AtomicU32::new(0);

/// A fork waits no longer than this: a signal handler may fork in a thread that it interrupted within a counted call.
const PATIENCE_NS: u64 = 200_000_000;

/// Closes the gate, before the pager's lock is taken for a fork, and waits until nobody is behind it.
pub fn close_for_fork() {
    CLOSED.fetch_add(1, SeqCst);
    let start = thread::now_ns();
    // (Signed: in a child, a call that its parent's signal handler interrupted to fork ends without having begun.)
    while UNDER_WAY.load(SeqCst).cast_signed() > 0 && thread::now_ns() - start < PATIENCE_NS {
        thread::sleep_ns(10_000);
    }
}

/// Opens it, in the parent.
pub fn open() {
    CLOSED.fetch_sub(1, SeqCst);
    lock::futex_wake(&CLOSED, u32::MAX >> 1, false);
}

/// Opens it in the child, which has one thread.
pub fn open_in_child() {
    UNDER_WAY.store(0, SeqCst);
    CLOSED.store(0, SeqCst);
}

/// Called by the thunks of counted calls.
pub extern "C" fn wait() {
    loop {
        let closed = CLOSED.load(SeqCst);
        if closed == 0 {
            return;
        }
        lock::futex_wait(&CLOSED, closed, Some(10_000_000), false);
    }
}

/// What the handler knows of its own starvation.
#[derive(Default)]
pub struct Starved {
    tries: u32,
    closed: bool,
}

impl Starved {
    /// Tries in vain before the gate is closed.
    const TRIES: u32 = 3;

    /// After each round of the handler; `waiting`: whether faults could not be served because of an event.
    pub fn round(&mut self, waiting: bool) {
        self.tries = if waiting { self.tries + 1 } else { 0 };
        if waiting && self.tries >= Self::TRIES && !self.closed {
            self.closed = true;
            CLOSED.fetch_add(1, SeqCst);
        } else if !waiting && self.closed {
            self.closed = false;
            open();
        }
    }
}

//! How long the program's threads wait for their faults (`stall_ns`).
//!
//! One fault in eight, chosen at random, is timed for all of them: from when it was read until its page is mapped, which wakes
//! the thread. The end is taken *before* the call that maps the page. The woken thread preempts the handler, which shares its CPU
//! and has idle policy, so that call returns only when the program faults again.
//!
//! The story: the time ran from when there was room for the page until that call returned. A compiler whose faults took 0.1 ms
//! each was said to have stalled for 7 of 10 s, of which it computed for 8.6.
//!
//! Faults are served under the pager's lock, so only one is timed at a time. Waits for the disk are timed separately
//! (`swap::swapin`).

use crate::chance::mix;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use uzswap_sys::thread;

/// One fault in this many is timed.
const ONE_IN: u64 = 8;
/// No page.
const NONE: u64 = u64::MAX;

/// The fault that is being timed.
pub struct Stall {
    /// Its page, until that is about to be mapped.
    page: AtomicU64,
    /// When the fault was read, and when its page was about to be mapped (monotonic nanoseconds).
    began: AtomicU64,
    ended: AtomicU64,
}

impl Stall {
    /// No fault is timed yet.
    pub const fn new() -> Self {
        Self { page: AtomicU64::new(NONE), began: AtomicU64::new(0), ended: AtomicU64::new(0) }
    }

    /// A fault on `page` was read, after `count` others. Decides whether it is timed.
    pub fn begin(&self, page: u64, count: u64) {
        let timed = mix(count).is_multiple_of(ONE_IN);
        self.page.store(if timed { page } else { NONE }, Relaxed);
        if timed {
            self.began.store(thread::now_ns(), Relaxed);
            self.ended.store(0, Relaxed);
        }
    }

    /// `n` pages from `page` on are about to be mapped.
    pub fn mapping(&self, page: u64, n: usize) {
        let timed = self.page.load(Relaxed);
        if timed != NONE && (page..page + n as u64).contains(&timed) && self.ended.load(Relaxed) == 0 {
            self.ended.store(thread::now_ns(), Relaxed);
        }
    }

    /// The fault was dealt with. Returns how long it and all that were read meanwhile waited (nanoseconds), without the `slept`
    /// that is counted separately; 0 if it was not timed. If nothing was mapped and it still `waits` for the disk or an event,
    /// also 0.
    pub fn end(&self, slept: u64, waits: bool) -> u64 {
        if self.page.swap(NONE, Relaxed) == NONE {
            return 0;
        }
        let ended = match self.ended.load(Relaxed) {
            0 if waits => return 0,
            0 => thread::now_ns(),
            at => at,
        };
        ended.saturating_sub(self.began.load(Relaxed) + slept) * ONE_IN
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// A count whose fault is timed, or is not.
    fn count(timed: bool) -> u64 {
        (0..).find(|n| mix(*n).is_multiple_of(ONE_IN) == timed).unwrap()
    }

    /// The story at the head: time after the mapping is the program's own. (The test asserts only which moment came first.)
    #[test]
    fn what_the_program_does_once_it_is_woken_is_no_stall() {
        let stall = Stall::new();
        stall.begin(10, count(true));
        stall.mapping(12, 4);
        let before = thread::now_ns();
        stall.mapping(8, 4);
        let mapped = stall.ended.load(Relaxed);
        assert!(mapped >= before, "the call that maps the page ends it");
        std::thread::sleep(Duration::from_millis(2));
        stall.mapping(8, 4);
        assert_eq!(stall.end(0, false), (mapped - stall.began.load(Relaxed)) * ONE_IN);
        assert_eq!(stall.end(0, false), 0, "once");
    }

    #[test]
    fn what_is_not_timed_or_waits_still_counts_nothing() {
        let stall = Stall::new();
        stall.begin(10, count(false));
        stall.mapping(10, 1);
        assert_eq!(stall.end(0, false), 0);
        stall.begin(10, count(true));
        assert_eq!(stall.end(0, true), 0, "for the disk");
        stall.begin(10, count(true));
        assert_eq!(stall.end(u64::MAX / 2, false), 0, "no more than it was");
        stall.begin(10, count(true));
        assert!(stall.end(0, false) > 0, "what is served in another way ends when that is done");
        // About one in so many.
        let timed = (0..80_000).filter(|n| mix(*n).is_multiple_of(ONE_IN)).count();
        assert!((9_000..11_000).contains(&timed), "{timed}");
    }
}

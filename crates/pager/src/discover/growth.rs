//! Counts what the program has mapped and may fill before its memory is managed.
//!
//! A process engages only near its limit, and until then the ticker looks from time to time how much is resident. Between two
//! looks a program can map and fill more than there is room for. So its mapping calls report what they map:
//!
//! - Mapped memory is *planned* until it is filled, or has long not been filled. If all plans together would not fit, the process
//!   engages at once (`limits::headroom`), and other members are told.
//! - A thread that maps more than half of the room since the last look makes the ticker look, and waits for it.
//!
//! Once engaged, the calls also report where they map, so that nobody needs to read all mappings to find the new ones
//! (`discover`). The handler looks there: it runs on the program's CPU, where it is not in the program's way, and has the
//! descriptors. (The ticker runs elsewhere: an interrupt of the other CPU wakes it, it wakes the program by another, and the
//! kernel moves the program between the CPUs. Mapping 2 MiB, touching 64 KiB and unmapping took a millisecond.) The ticker looks
//! where the handler gets no CPU, or cannot stop the calls.
//!
//! Owner: atomics, each by itself; an old value costs a look.

use crate::group::member::SIGNAL;
use crate::pager::Pager;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use uzswap_sys::noted::Noted;
use uzswap_sys::{lock, thread};

/// CPU time (nanoseconds) in which a program that means to fill its mappings fills some of them: tens of MiB.
const PLAN_NS: u64 = 8_000_000;

/// How long a thread waits for the handler before it asks the ticker (nanoseconds).
const HANDLER_LOOKS_NS: u64 = 1_000_000;
/// Ranges noted between two looks. A look is requested at each MiB mapped, which may consist of mappings of 16 KiB.
const NOTED: usize = 64;

/// What was mapped, and how much of that the ticker knows.
pub struct Growth {
    /// Bytes mapped since the ticker last looked, before engaging.
    pub mapped: AtomicUsize,
    /// How far the process could grow at the last look, before it was managed (bytes).
    pub room: AtomicUsize,
    /// The process's CPU time (nanoseconds) when the plans were last halved, or last seen to be filled.
    plans_halved: AtomicU64,
    /// Bytes filled since.
    filled: AtomicUsize,
    /// Number of looks that program threads have requested after mapping much memory.
    pub looks_wanted: AtomicU32,
    /// The last request that was answered by a complete look (a futex word): what was mapped before it is found.
    pub looks_done: AtomicU32,
    /// The last request that the handler left to the ticker.
    left_to_ticker: AtomicU32,
    /// Where the program mapped memory since this was last taken. It is noted before engaging too: registering all memory may
    /// miss what is mapped meanwhile.
    pub noted: Noted<NOTED>,
}

impl Growth {
    /// Nothing mapped, no look made.
    pub(crate) fn new() -> Self {
        Self {
            mapped: AtomicUsize::new(0),
            room: AtomicUsize::new(usize::MAX),
            plans_halved: AtomicU64::new(0),
            filled: AtomicUsize::new(0),
            looks_wanted: AtomicU32::new(0),
            looks_done: AtomicU32::new(0),
            left_to_ticker: AtomicU32::new(0),
            noted: Noted::default(),
        }
    }
}

impl Pager {
    /// Notes that the program has mapped `len` bytes, which it may fill.
    ///
    /// The story: in a process alone in its group only the largest mapping counted, as the ticker looks often enough at what one
    /// thread fills. Three threads had both CPUs, and filled 42 MiB under a limit of 24 before the ticker looked.
    pub fn plan(&self, len: usize) {
        if !self.engaged.load(Relaxed) && self.me().planned.fetch_add(len as u64, Relaxed) == 0 {
            self.growth.plans_halved.store(thread::process_cpu_ns(), Relaxed);
        }
    }

    /// Notes that `bytes` were mapped. Returns whether more than half of the room found at the ticker's last look has been mapped
    /// since, so that it must look before more is mapped.
    ///
    /// The story: on a busy machine the ticker waits for a CPU like any other thread. Meanwhile several threads filled as much as
    /// the limit, unmanaged.
    pub fn outruns_looks(&self, bytes: usize) -> bool {
        self.growth.mapped.fetch_add(bytes, Relaxed) + bytes > self.growth.room.load(Relaxed) / 2
    }

    /// Takes what was filled since the last look, by which RSS has grown, off the plans. For each period of CPU time in which
    /// less than a quarter of the rest is filled, it halves the rest.
    ///
    /// The story: a program that filled 35 MiB used 20 ms of CPU time for it, so next to nothing was planned any more when the
    /// last 8 MiB were still to come.
    pub fn forget_plans(&self, grown: usize) {
        let (me, growth) = (self.me(), &self.growth);
        let planned = me.planned.load(Relaxed);
        let mut left = planned.saturating_sub(grown as u64);
        let filled = growth.filled.fetch_add(grown, Relaxed) + grown;
        let used = thread::process_cpu_ns();
        if used.saturating_sub(growth.plans_halved.load(Relaxed)) > PLAN_NS {
            growth.plans_halved.store(used, Relaxed);
            growth.filled.store(0, Relaxed);
            if left < 1 << 20 {
                left = 0;
            } else if (filled as u64) < left / 4 {
                left /= 2;
            }
        }
        let goes = if self.engaged.load(Relaxed) { u64::MAX } else { planned - left };
        // What another thread plans meanwhile stays.
        let _ = me.planned.fetch_update(Relaxed, Relaxed, |planned| Some(planned.saturating_sub(goes)));
    }

    /// Requests a look at what was mapped. With `wait`, returns once it is done, or after 200 ms.
    pub fn ask_look(&self, wait: bool) {
        let ticket = self.growth.looks_wanted.fetch_add(1, AcqRel) + 1;
        if wait && self.handler_looks(ticket) {
            return;
        }
        self.poke_ticker();
        for _ in 0..4 {
            let done = self.growth.looks_done.load(Acquire);
            if !wait || (done.wrapping_sub(ticket) as i32) >= 0 {
                return;
            }
            lock::futex_wait(&self.growth.looks_done, done, Some(50_000_000), false);
        }
    }

    /// Asks the handler to look, and waits a moment for it; returns whether it has looked.
    fn handler_looks(&self, ticket: u32) -> bool {
        if !self.engaged.load(Acquire) || self.files.signals.load(Relaxed) < 0 {
            return false;
        }
        let done = self.growth.looks_done.load(Acquire);
        thread::kill_thread(thread::getpid(), self.handler.load(Acquire), SIGNAL);
        lock::futex_wait(&self.growth.looks_done, done, Some(HANDLER_LOOKS_NS), false);
        self.growth.is_looked(ticket)
    }

    /// In the handler: looks at what was mapped, if a look is requested.
    pub(crate) fn look_if_asked(&self) {
        let growth = &self.growth;
        let ticket = growth.looks_wanted.load(Acquire);
        if growth.is_looked(ticket) || growth.left_to_ticker.load(Relaxed) == ticket {
            return;
        }
        if self.scan_noted_now() {
            return growth.looked(ticket);
        }
        growth.left_to_ticker.store(ticket, Relaxed);
        self.poke_ticker();
    }
}

impl Growth {
    /// A look has answered request `ticket` and all before it: wakes the threads that wait for it.
    pub(crate) fn looked(&self, ticket: u32) {
        // Handler and ticker may both have looked; the later request counts.
        let newer = |done: u32| (ticket.wrapping_sub(done) as i32 > 0).then_some(ticket);
        if self.looks_done.fetch_update(AcqRel, Relaxed, newer).is_ok() {
            lock::futex_wake(&self.looks_done, u32::MAX >> 1, false);
        }
    }

    fn is_looked(&self, ticket: u32) -> bool {
        self.looks_done.load(Acquire).wrapping_sub(ticket) as i32 >= 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    /// The story: on a busy machine the ticker waited for a CPU while several threads mapped and filled as much as the limit.
    #[test]
    fn who_maps_more_than_half_of_the_room_waits_for_a_look() {
        let p = testing::pager(64 << 20);
        assert!(!p.outruns_looks(1 << 40), "no look has said yet how much room there is");
        p.growth.mapped.store(0, Relaxed);
        p.growth.room.store(16 << 20, Relaxed);
        let waits = [0; 10].map(|_| p.outruns_looks(1 << 20));
        assert_eq!(waits.iter().position(|waits| *waits), Some(8));
        // A look begins.
        p.growth.mapped.store(0, Relaxed);
        assert!(!p.outruns_looks(1 << 20));
    }

    /// The handler answers a request, or the ticker while a mapping call is under way; each request is left to the ticker once.
    #[test]
    fn the_handler_looks_unless_a_call_is_under_way() {
        let p = testing::pager(64 << 20);
        let growth = &p.growth;
        p.look_if_asked();
        assert_eq!(growth.looks_done.load(Acquire), 0, "nobody asks");
        let done = |ticket: u32| {
            growth.looks_wanted.store(ticket, Release);
            p.look_if_asked();
            (growth.looks_done.load(Acquire), growth.left_to_ticker.load(Acquire))
        };
        let held = p.calls.begin(false);
        growth.noted.note(1 << 20, 4096);
        assert_eq!(done(1), (0, 1), "a call is under way");
        p.calls.end(held);
        p.look_if_asked();
        assert_eq!(growth.looks_done.load(Acquire), 0, "the ticker does");
        assert_eq!(growth.noted.take(), Some(vec![(1 << 20, (1 << 20) + 4096)]), "which finds what was noted");
        let mut name = [0; uzswap_sys::maps::NAME_BYTES];
        let known = uzswap_sys::maps::mapping_from(p.files.maps.load(Relaxed), 0, &mut name).is_ok();
        if !known {
            return testing::skip("this kernel cannot be asked about single mappings (before 6.11)");
        }
        growth.noted.note(1 << 20, 4096);
        assert_eq!(done(2), (2, 1));
        // If not all could be noted, the ticker looks everywhere.
        growth.noted.lose();
        assert_eq!(done(3), (2, 3));
        assert_eq!(growth.noted.take(), None, "which is told");
        // An older request that completes late takes nothing back.
        growth.looked(3);
        growth.looked(2);
        assert_eq!(growth.looks_done.load(Acquire), 3);
    }

    /// Mapped memory counts as planned while the process has had no time to fill it; then less and less of it does.
    #[test]
    fn plans_are_forgotten_as_time_passes_without() {
        let p = testing::pager(256 << 20);
        p.plan(32 << 20);
        let planned = || p.me().planned.load(Relaxed) >> 20;
        // The clock is the whole process's, in which other tests run too: act as if it stood still, and as if much time had
        // passed.
        p.growth.plans_halved.store(u64::MAX, Relaxed);
        p.forget_plans(8 << 20);
        assert_eq!(planned(), 24, "what was filled is no plan any more");
        while thread::process_cpu_ns() < 10_000_000 {}
        for (grown, left) in [(1, 23), (0, 11), (3, 8), (0, 4), (0, 2), (0, 1), (0, 0)] {
            p.growth.plans_halved.store(0, Relaxed);
            p.forget_plans(grown << 20);
            assert_eq!(planned(), left);
        }
    }
}

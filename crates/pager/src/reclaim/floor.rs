//! The floor: what reclaim leaves a program, however much is to leave, as it would do nothing but fault.
//!
//! - Where the pool crowds the program out: an eighth of the limit (of a member's share, where several share it).
//! - Where memory that cannot be evicted fills the limit together with the pool: a few MiB.
//! - Where other members fill it, whatever they hold: 1 MiB at most.
//!
//! The floor is for who works. In a member that has hardly faulted lately it sinks, an eighth or two at a time, and it rises again at
//! once with the faults that this makes. So a member that sleeps gives the others all it has, and one that works on little keeps that.
//!
//! ```text
//! at each look (reclaim thread, the limit exceeded, others there)      no faults: 2 eighths less · few: 1 less · many, or
//!                                                                        threads wait: whole
//! between looks                                                          many faults since the last one: whole
//! ```
//! While it sinks the member is not at its end, and its group not full (`group::full`).
//!
//! The story: a Python process slept with 8 MiB of the group's 40 in memory for minutes, which was its floor. Another worked beside
//! it on 1.4, did nothing but fault, and the group exceeded its limit by 11 MiB.
//!
//! Where a process is alone the floor does not sink: nobody else would have what it loses.

use crate::frames::arena::PAGE;
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use uzswap_mm::zone::Kind;
use uzswap_sys::thread;

/// How much managed memory a program keeps where other things fill the limit: this, or a quarter of the limit if that is less.
const LEAST_BYTES: usize = 8 << 20;
/// The same where other members fill it: this, or an eighth of the member's share if that is less. It is little, as they may have
/// some to give.
const LEAST_BESIDE_OTHERS: usize = 1 << 20;

/// Least time between two looks at how much a member faults, and the time after which the last one says nothing (nanoseconds).
const LOOK_NS: u64 = 50_000_000;
const STALE_NS: u64 = 500_000_000;
/// Faults since the last look that show that the member works, and those up to which it hardly does.
const MANY_FAULTS: u64 = 64;
const FEW_FAULTS: u64 = 16;
/// It works, too, if its threads were stalled for one part in so many of the time (by `memory.high`, say), whatever they did.
const STALLED_PART: u64 = 8;
/// The parts in which the floor sinks, and how many of them at once in a member that does not fault at all.
const PARTS: u32 = 8;
const PARTS_AT_ONCE: u32 = 2;

/// How far a member's floor has sunk; whole to begin with.
#[derive(Default)]
pub struct Floor {
    /// Parts of it that are gone.
    sunk: AtomicU32,
    /// Whether it goes on sinking, as far as is known.
    sinks: AtomicBool,
    /// When it was last looked at (monotonic nanoseconds), and the counts of faults and of stalled time then.
    looked: AtomicU64,
    faults: AtomicU64,
    stalled: AtomicU64,
}

impl Pager {
    /// Whether the program has so little left that evicting more would only make it fault.
    pub fn at_floor(&self, s: &State) -> bool {
        // A library region's limit is hard: its owner chose it.
        if self.own_frames {
            return false;
        }
        let left = (PARTS - self.floor_sunk()) as usize;
        let (limit, managed) = (self.limit(), (s.evictable() + s.staged) * PAGE);
        let is_below = |floor: usize| managed < floor * left / PARTS as usize;
        let own = || is_below(limit / 8) && s.pool.held_bytes() > limit / 2;
        let crowded = self.pool_takes(s, limit / 2) && (is_below(self.share() / 8) || own());
        // What cannot be evicted at all: code made at run time, stacks, read-only and locked memory, what does not compress, and
        // the tables.
        let fixed = || self.charged(s).saturating_sub(managed + s.zone.free_slots(Kind::Frame) * PAGE);
        // Others may evict what they hold, but this process cannot. The story: a program's child had locked more than the limit.
        // All but the last pages of its parent were evicted again and again, so that eight threads, each of which needed four
        // pages at once, did nothing but fault: 526,000 times in 30 s.
        let beside = || {
            let least = (self.share() / 8).min(LEAST_BESIDE_OTHERS);
            is_below(least) && fixed() + self.others_held.load(Relaxed) > limit / 2
        };
        crowded || is_below((limit / 4).min(LEAST_BYTES)) && fixed() > limit / 2 || beside()
    }

    /// Parts of the floor that are gone. None as soon as the member faults much.
    fn floor_sunk(&self) -> u32 {
        let sunk = self.floor.sunk.load(Relaxed);
        if sunk > 0
            && self.counters().pgfault.load(Relaxed).wrapping_sub(self.floor.faults.load(Relaxed)) >= MANY_FAULTS
        {
            self.floor.sunk.store(0, Relaxed);
            return 0;
        }
        sunk
    }

    /// Looks at how much the member has faulted. Called by the reclaim thread while memory is short.
    pub(crate) fn look_at_floor(&self) {
        self.look_at_floor_at(thread::now_ns());
    }

    fn look_at_floor_at(&self, now: u64) {
        let f = &self.floor;
        let since = now.saturating_sub(f.looked.load(Relaxed));
        if since < LOOK_NS {
            return;
        }
        f.looked.store(now, Relaxed);
        let counts = self.counters();
        let new = |count: &AtomicU64, last: &AtomicU64| {
            let count = count.load(Relaxed);
            count.wrapping_sub(last.swap(count, Relaxed))
        };
        let (faults, stalled) = (new(&counts.pgfault, &f.faults), new(&counts.stall_ns, &f.stalled));
        let (stale, alone) = (since > STALE_NS, self.sharers.load(Relaxed) < 2);
        let waits = self.signs.owes.load(Relaxed) || self.waits.load(Relaxed) || stalled > since / STALLED_PART;
        let less = match faults {
            _ if alone || waits || faults >= MANY_FAULTS => None,
            _ if stale => Some(0),
            0 => Some(PARTS_AT_ONCE),
            1..FEW_FAULTS => Some(1),
            _ => Some(0),
        };
        let sunk = less.map_or(0, |less| (f.sunk.load(Relaxed) + less).min(PARTS));
        f.sunk.store(sunk, Relaxed);
        f.sinks.store(!alone && sunk < PARTS && (stale || less.is_some_and(|less| less > 0)), Relaxed);
    }

    /// Whether this member will have more to give, as its floor is sinking: it is not at its end yet.
    pub(crate) fn floor_sinks(&self) -> bool {
        self.floor.sinks.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    /// Looks until the floor has sunk as far as it does, with so many faults before each look; returns the looks that it took,
    /// and what is left of the floor then, in parts.
    fn sink(p: &Pager, now: &mut u64, faults: u64) -> (u32, u32) {
        let mut looks = 0;
        loop {
            p.counters().pgfault.fetch_add(faults, Relaxed);
            *now += LOOK_NS;
            p.look_at_floor_at(*now);
            looks += 1;
            if !p.floor_sinks() {
                return (looks, PARTS - p.floor_sunk());
            }
        }
    }

    fn pager_beside_another() -> &'static Pager {
        let p = testing::pager(32 << 20);
        p.sharers.store(2, Relaxed);
        p
    }

    /// The first look only learns what there is to compare with.
    #[test]
    fn who_sleeps_gives_all_and_who_faults_keeps_the_floor() {
        let p = pager_beside_another();
        let mut s = p.state.lock();
        // 18 MiB that cannot be evicted, and 4 that can: half of the floor.
        s.rss = 22 << 20;
        testing::seem_resident(&mut s, (4 << 20) / PAGE);
        let mut now = 10 * STALE_NS;
        assert!(p.at_floor(&s));
        p.look_at_floor_at(now);
        assert!(p.floor_sinks() && p.at_floor(&s));
        assert_eq!(sink(p, &mut now, 0), (4, 0));
        assert!(!p.at_floor(&s));
        // Pages that it wants back.
        p.counters().pgfault.fetch_add(MANY_FAULTS - 1, Relaxed);
        assert!(!p.at_floor(&s));
        p.counters().pgfault.fetch_add(1, Relaxed);
        assert!(p.at_floor(&s), "at once, before anybody looks");
        assert_eq!(sink(p, &mut now, MANY_FAULTS), (1, PARTS));
        assert_eq!(sink(p, &mut now, FEW_FAULTS - 1), (PARTS, 0));
        p.floor.sunk.store(3, Relaxed);
        assert_eq!(sink(p, &mut now, FEW_FAULTS), (1, PARTS - 3), "some faults: it stays where it is");
        testing::seem_resident(&mut s, 0);
    }

    #[test]
    fn looks_that_come_too_soon_or_too_late_change_nothing() {
        let p = pager_beside_another();
        let mut now = 10 * STALE_NS;
        p.look_at_floor_at(now);
        for _ in 0..100 {
            now += LOOK_NS / 1000;
            p.look_at_floor_at(now);
        }
        assert_eq!(p.floor_sunk(), 0);
        for _ in 0..10 {
            now += STALE_NS + 1;
            p.look_at_floor_at(now);
            assert!(p.floor_sinks() && p.floor_sunk() == 0, "what it does now is not known");
        }
    }

    /// Nor does that of a member whose threads would fault if they were let.
    #[test]
    fn the_floor_of_who_is_alone_or_waits_does_not_sink() {
        let p = pager_beside_another();
        let mut now = 10 * STALE_NS;
        p.look_at_floor_at(now);
        let mut whole = |what: &str| assert_eq!(sink(p, &mut now, 0), (1, PARTS), "{what}");
        p.sharers.store(1, Relaxed);
        whole("alone");
        p.sharers.store(2, Relaxed);
        p.signs.owes.store(true, Relaxed);
        whole("a fault is to be served");
        p.signs.owes.store(false, Relaxed);
        p.waits.store(true, Relaxed);
        whole("waits for room");
        p.waits.store(false, Relaxed);
        p.counters().stall_ns.fetch_add(LOOK_NS / STALLED_PART + 1, Relaxed);
        whole("held back");
        assert_eq!(sink(p, &mut now, 0), (4, 0));
    }
}

//! TLB shootdowns: measures what it costs to take a mapping away, and decides where few such calls are worth more than the best
//! order of eviction.
//!
//! A moved page is flushed from the TLB of every CPU on which a thread of the process runs at the moment: by an interrupt there,
//! for whose answer the mover waits. On a virtual machine that is 10 us a call, whatever the call moves, where a page alone takes
//! 1.3. Elsewhere it may be next to nothing, and it is nothing while the other CPUs are idle. A random fault made two such calls,
//! one for the page that leaves and one for the one that comes. So
//!
//! - pages leave by windows of 64 KiB: all that are old enough, in one call (`window`);
//! - a fault that brings little brings it by COPY, as a missing page is in no TLB; the frame that it was filled in stays;
//! - such left-over frames go back to the kernel many at a time, by whole page blocks (`Pager::give_back`).
//!
//! Without other CPUs that still saves a few percent (calls). The price is that pages leave before their turn. A program notices
//! that where next to nothing of it is resident, so where the pool crowds it out this is done only while calls take long. That is
//! measured as calls happen: the time of those that move a few pages out is averaged.
//!
//! Owner: atomics, which are hints; whoever moves pages out has the pager's lock anyway.

use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::{AtomicU32, Ordering::*};

/// Flushes are expensive from this average on: of a call's time, less what its pages take. It is 1.1 us where no other CPU is
/// interrupted and 11 where one is, so this is about where every fifth call interrupts one.
const DEAR_NS: u32 = 3_000;
/// What a page takes that is moved together with others (nanoseconds).
const PAGE_NS: u64 = 150;
/// What one call counts at most (nanoseconds): a mover that was preempted says nothing.
const MOST_NS: u64 = 20_000;
/// One call in this many is timed.
const EVERY: u32 = 4;
/// The weight of one timed call in the average, as a power of two.
const WEIGHT: u32 = 3;
/// How many pages a timed call moves at most.
const FEW: usize = 16;
/// How many pages come by COPY at most: each costs 1.7 us, where a MOVE of four costs 2.3 and a flush.
const COPY_MOST: usize = 4;

/// The average time of a call, and when to time the next.
#[derive(Default)]
pub struct Shootdowns {
    average_ns: AtomicU32,
    calls: AtomicU32,
}

impl Shootdowns {
    /// Whether a call that moves `n` pages out is to be timed.
    pub(crate) fn due(&self, n: usize) -> bool {
        n <= FEW && {
            let calls = self.calls.load(Relaxed).wrapping_add(1);
            self.calls.store(calls, Relaxed);
            calls.is_multiple_of(EVERY)
        }
    }

    /// Notes the time of a call that moved up to `n` pages out.
    pub(crate) fn note(&self, n: usize, ns: u64) {
        let ns = ns.saturating_sub(n as u64 * PAGE_NS).min(MOST_NS) as u32;
        let average = self.average_ns.load(Relaxed);
        self.average_ns.store(average - (average >> WEIGHT) + (ns >> WEIGHT), Relaxed);
    }

    fn are_dear(&self) -> bool {
        self.average_ns.load(Relaxed) >= DEAR_NS
    }
}

impl Pager {
    /// Whether taking a mapping away interrupts other CPUs at the moment: such calls took long lately, or faults come from
    /// several CPUs.
    pub(crate) fn interrupts_others(&self, s: &State) -> bool {
        self.shootdowns.are_dear() || !s.placement.alone() || self.group.faults.dear_flushes.load(Relaxed) != 0
    }

    /// Whether few calls are worth more than evicting just the oldest pages.
    pub(crate) fn saves_flushes(&self, s: &State) -> bool {
        !self.without_move && (!self.crowded(s) || self.interrupts_others(s))
    }

    /// Whether a delivery of `n` pages comes by COPY although its frames could be moved. (Not where the program makes guard
    /// pages: COPY takes those for missing.)
    pub(crate) fn comes_by_copy(&self, s: &State, n: usize) -> bool {
        let most = if self.interrupts_others(s) { COPY_MOST } else { 1 };
        n <= most && self.saves_flushes(s) && self.guards.load(Relaxed) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(s: &Shootdowns, calls: &[(usize, u64)]) -> bool {
        calls.iter().for_each(|(n, ns)| s.note(*n, *ns));
        s.are_dear()
    }

    #[test]
    fn saves_flushes_while_calls_take_long() {
        let s = Shootdowns::default();
        assert!(!after(&s, &[(1, 1_300); 100]), "nobody is interrupted");
        assert!(!after(&s, &[(16, 3_400); 100]), "a window");
        assert!(!after(&s, &[(1, 10_000)]), "once");
        assert!(after(&s, &[(16, 13_000); 16]), "another CPU is interrupted");
        assert!(!after(&s, &[(16, 3_400); 32]), "no longer");
        assert!(after(&s, &[(1, u64::MAX); 100]));
        assert!(!after(&s, &[(1, 0); 100]));
    }

    #[test]
    fn few_calls_are_timed_and_large_ones_never() {
        let s = Shootdowns::default();
        assert_eq!((0..100).filter(|_| s.due(1)).count(), 25);
        assert!((0..100).all(|_| !s.due(FEW + 1)));
    }
}

//! Compacts the arena: moves staged folios and free frames together, so that holes lie side by side.
//!
//! A folio moves out of the program in one call only where there are as many holes in a row, and a folio of 2 MiB needs a whole
//! page block of them. The arena is mostly holes, but every fault scatters the frames in it. The engine's `compaction` chooses
//! what goes where, by one of three rules (`uzswap run --compaction`). This module moves the frame within the arena by
//! UFFDIO_MOVE, and updates the page-table entry of the staged page, both under the pager's lock, which whoever reads an entry
//! holds.
//!
//! A slot's page is found through a note made when it was staged (`Zone::set_user`). The note is a hint: it counts only if the
//! page's entry says Staged and names the slot. Pages being compressed (Busy), frames in the hands of a fault, and everything
//! after a fork (frames are shared then and cannot be moved) stay where they are.

use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::compaction::counters::Counters;
use uzswap_mm::compaction::policy::Policy;
use uzswap_mm::compaction::rule::Chosen;
use uzswap_mm::compaction::{Compactor, Goal, Migrate, Outcome};
use uzswap_mm::pagetable::{ADDRESS_SPACE_PAGES, PageTable, Pte, Tag};
use uzswap_mm::zone::{Kind, MAX_ORDER, Zone};

/// The smallest order worth compacting for: a huge page, which is split (375 µs, and it stays split) where there is no run for
/// it. Moving one page takes 2 µs; for smaller runs, allocating in two or three parts is cheaper.
const LEAST_ORDER: u8 = MAX_ORDER;
/// How many frames are looked at under one hold of the lock: at most some 300 µs. (At the beginning of a pass also all page
/// blocks.)
const BUDGET: u64 = 256;
/// What percentage of the holes may lie outside runs of 2 MiB before background compaction starts.
const SCORE: u32 = 50;

/// The compactor's counts when the member's counters were last updated.
#[derive(Clone, Copy, Default)]
pub struct Counted {
    counters: Counters,
    pivot_moved: u64,
}

impl Counted {
    fn by(compactor: &Compactor<Chosen>) -> Self {
        Self { counters: compactor.counters, pivot_moved: compactor.policy.pivot().map_or(0, |(_, moved)| moved) }
    }
}

struct Arena<'a> {
    pager: &'a Pager,
    pt: &'a mut PageTable,
}

impl Arena<'_> {
    /// The staged page whose frame a slot holds.
    fn staged(&self, zone: &Zone, slot: u32) -> Option<(u64, Pte)> {
        let vpn = zone.user(slot);
        // The zone's own notes are no page numbers at all.
        let pte = if vpn < ADDRESS_SPACE_PAGES { self.pt.get(vpn) } else { Pte::NONE };
        (pte.tag() == Tag::Staged && pte.aux() == slot).then_some((vpn, pte))
    }
}

impl Migrate for Arena<'_> {
    fn isolate(&mut self, zone: &Zone, slot: u32) -> bool {
        self.staged(zone, slot).is_some()
    }

    fn migrate(&mut self, zone: &mut Zone, from: u32, to: u32) -> bool {
        let page = self.staged(zone, from);
        if !self.pager.move_within(from, to) {
            return false;
        }
        // Without a page it is a free frame, and nothing refers to it.
        if let Some((vpn, pte)) = page {
            let moved = Pte::new(Tag::Staged, to);
            self.pt.set(vpn, pte.copy().map_or(moved, |handle| moved.with_copy(handle)));
            zone.set_user(to, vpn);
        }
        true
    }

    fn putback(&mut self, _slot: u32) {}
}

impl Pager {
    /// Takes a run of holes of an order. If there is none, compacts first; failing that, takes the largest run there is.
    pub fn take_holes(&self, s: &mut State, order: u8) -> Option<(u32, u8)> {
        let order = order.min(MAX_ORDER);
        if order >= LEAST_ORDER && !s.zone.has_run(Kind::Hole, order) && !self.has_kin() {
            let goal = Goal { kind: Kind::Hole, order, score: None, budget: BUDGET };
            let State { zone, compactor, pt, .. } = s;
            let outcome = compactor.direct(zone, goal, &mut Arena { pager: self, pt });
            if outcome == Outcome::Success {
                compactor.allocated(order);
            }
            s.runs_wanted = outcome != Outcome::Success;
            self.count_compaction(s);
        }
        s.zone.alloc_up_to(Kind::Hole, order)
    }

    /// Compacts a little in the background, if a run was wanted in vain since compaction last ended; true when there is more to
    /// do.
    pub fn compact_behind(&self, s: &mut State) -> bool {
        if !s.runs_wanted || self.has_kin() {
            return false;
        }
        s.runs_wanted = self.compact_towards(s, SCORE, BUDGET) == Outcome::Partial;
        s.runs_wanted
    }

    /// Compacts until at most `score` percent of the holes lie outside of runs of 2 MiB, or nothing more can be done, or
    /// `budget` frames have been looked at.
    pub fn compact_towards(&self, s: &mut State, score: u32, budget: u64) -> Outcome {
        let goal = Goal { kind: Kind::Hole, order: MAX_ORDER, score: Some(score), budget };
        let State { zone, compactor, pt, .. } = s;
        let outcome = compactor.background(zone, goal, &mut Arena { pager: self, pt });
        self.count_compaction(s);
        outcome
    }

    /// Adds what was counted since the last time. (A forked child starts from its parent's counts, which are the parent's.)
    fn count_compaction(&self, s: &mut State) {
        let now = Counted::by(&s.compactor);
        let before = core::mem::replace(&mut s.compacted, now);
        let (c, new) = (self.counters(), now.counters.since(&before.counters));
        c.compact_stall.fetch_add(new.compact_stall, Relaxed);
        c.compact_success.fetch_add(new.compact_success, Relaxed);
        c.compact_fail.fetch_add(new.compact_fail, Relaxed);
        c.compact_migrate_scanned.fetch_add(new.compact_migrate_scanned, Relaxed);
        c.compact_free_scanned.fetch_add(new.compact_free_scanned, Relaxed);
        c.compact_isolated.fetch_add(new.compact_isolated, Relaxed);
        c.pgmigrate_success.fetch_add(new.pgmigrate_success, Relaxed);
        c.pgmigrate_fail.fetch_add(new.pgmigrate_fail, Relaxed);
        c.migrated_twice.fetch_add(new.migrated_twice, Relaxed);
        c.migrated_again.fetch_add(new.migrated_again, Relaxed);
        c.pivot_moved.fetch_add(now.pivot_moved - before.pivot_moved, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::arena::PAGE;
    use crate::testing;
    use uzswap_mm::compaction::rule::Rule;

    /// Takes all holes of the arena, except those that `free` names by their place in a block. Returns the number of blocks.
    fn break_up(p: &Pager, s: &mut State, free: impl Fn(u32) -> bool) -> usize {
        let blocks: Vec<u32> = core::iter::from_fn(|| s.zone.alloc(Kind::Hole, MAX_ORDER)).collect();
        assert_eq!(blocks.len() << MAX_ORDER, p.layout.slots);
        for block in &blocks {
            (0..1 << MAX_ORDER).filter(|at| free(*at)).for_each(|at| s.zone.free(Kind::Hole, block + at, 0));
        }
        blocks.len()
    }

    /// The story: a forked child began with its parent's counts, and reported them once more.
    #[test]
    fn what_a_parent_has_counted_is_not_its_childs() {
        let p = testing::pager(64 << 20);
        let mut s = p.state.lock();
        break_up(p, &mut s, |at| at % 2 == 0);
        p.take_holes(&mut s, MAX_ORDER).expect("single ones");
        let stalls = &p.counters().compact_stall;
        assert_eq!(stalls.swap(0, Relaxed), 1, "the counters of a child begin at 0");
        p.reset_inherited();
        while s.compactor.counters.compact_stall == 1 {
            p.take_holes(&mut s, MAX_ORDER).expect("single ones");
        }
        assert_eq!(stalls.load(Relaxed), 1);
    }

    /// The story: after every compaction in vain the pager reported that nothing could be allocated, and that report ended the
    /// deferral of its order. Where nothing could be moved, every folio of 2 MiB that left paid for a whole pass.
    #[test]
    fn compaction_in_vain_is_deferred() {
        let p = testing::pager(64 << 20);
        let mut s = p.state.lock();
        // Nobody who holds the slots between could be asked to move them.
        break_up(p, &mut s, |at| at % 2 == 0);
        let stalls: Vec<u64> = (0..8)
            .map(|_| {
                let (slot, order) = p.take_holes(&mut s, MAX_ORDER).expect("single ones");
                s.zone.free(Kind::Hole, slot, order);
                s.compactor.counters.compact_stall
            })
            .collect();
        assert_eq!(stalls, [1, 1, 2, 2, 2, 2, 3, 3], "after one failure the second, after two the fourth");
    }

    /// The member's counters show what the compactor counts, and how often the pivot moves, each under its own name.
    #[test]
    fn what_compaction_counts_is_told_under_its_name() {
        for (rule, can) in Rule::ALL.into_iter().flat_map(|rule| [(rule, false), (rule, true)]) {
            let p = testing::pager(64 << 20);
            let mut s = p.state.lock();
            s.compactor = Compactor::new(rule.policy());
            // In each block one frame can be moved, or each second slot cannot.
            let blocks = break_up(p, &mut s, |at| if can { at != 7 } else { at % 2 == 0 });
            for slot in (0..blocks as u32).filter(|_| can).map(|block| block << MAX_ORDER | 7) {
                testing::put(p, p.layout.slot(slot), &[1; PAGE]);
                s.zone.free(Kind::Frame, slot, 0);
            }
            for _ in 0..400 {
                let (slot, order) = p.take_holes(&mut s, MAX_ORDER).expect("single ones");
                s.zone.free(Kind::Hole, slot, order);
            }
            let (c, own, pivot) = (p.counters(), s.compactor.counters, Counted::by(&s.compactor).pivot_moved);
            let said = [
                (&c.compact_stall, own.compact_stall),
                (&c.compact_success, own.compact_success),
                (&c.compact_fail, own.compact_fail),
                (&c.compact_migrate_scanned, own.compact_migrate_scanned),
                (&c.compact_free_scanned, own.compact_free_scanned),
                (&c.compact_isolated, own.compact_isolated),
                (&c.pgmigrate_success, own.pgmigrate_success),
                (&c.pgmigrate_fail, own.pgmigrate_fail),
                (&c.migrated_twice, own.migrated_twice),
                (&c.migrated_again, own.migrated_again),
                (&c.pivot_moved, pivot),
            ];
            let said = said.map(|(told, own)| (told.load(Relaxed), own));
            assert!(said.iter().all(|(told, own)| told == own), "{rule:?}: {said:?}");
            assert_eq!(own.compact_stall, own.compact_success + own.compact_fail, "{rule:?}");
            // After the longest deferral, the sixth doubling, a run starts over, with a pivot that has moved.
            let met = (
                own.compact_success,
                own.compact_isolated > 0,
                own.pgmigrate_success > 0,
                own.compact_fail > 3,
                pivot > 0,
            );
            assert_eq!(met, (u64::from(can), can, can, !can, !can && rule == Rule::Pivot), "{rule:?}: {own:?}");
        }
    }

    /// The story: from a limit of 448 MiB on the arena has more blocks than a step looks at frames. No step moved anything, and
    /// the reclaim thread, which each time had more to do, never slept.
    #[test]
    fn a_large_arena_is_compacted_behind_and_that_ends() {
        Rule::ALL.into_iter().for_each(ends_under);
    }

    fn ends_under(rule: Rule) {
        let p = testing::pager(512 << 20);
        let mut s = p.state.lock();
        s.compactor = Compactor::new(rule.policy());
        let blocks = break_up(p, &mut s, |at| at != 7);
        assert!(blocks as u64 > BUDGET, "{blocks}");
        for block in 0..blocks as u32 {
            let slot = block << MAX_ORDER | 7;
            testing::put(p, p.layout.slot(slot), &[1; PAGE]);
            s.zone.free(Kind::Frame, slot, 0);
        }
        // One block is emptied in the step itself.
        let (slot, order) = p.take_holes(&mut s, MAX_ORDER).expect("holes");
        assert_eq!(order, MAX_ORDER, "{rule:?}");
        s.zone.free(Kind::Hole, slot, order);
        s.runs_wanted = true;
        let mut steps = 0;
        while p.compact_behind(&mut s) {
            steps += 1;
            assert!(steps < 10 * blocks, "it does not end: {rule:?}");
        }
        assert!(s.zone.fragmentation(Kind::Hole, MAX_ORDER) <= SCORE, "{rule:?}");
        assert_eq!(s.zone.free_slots(Kind::Frame), blocks);
        let c = p.counters();
        assert_eq!(c.pgmigrate_success.load(Relaxed), s.compactor.counters.pgmigrate_success, "{rule:?}");
        assert_eq!(c.migrated_twice.load(Relaxed), 0, "{rule:?}");
    }
}

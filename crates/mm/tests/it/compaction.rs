//! Compaction of a zone in memory, rule by rule (acceptance E2 to E5).

use proptest::prelude::*;
use uzswap_mm::compaction::deferral::{Deferral, MAX_SHIFT};
use uzswap_mm::compaction::pivot::Cached;
use uzswap_mm::compaction::policy::{Emptiest, Linear, Pivot, Policy, ZoneEnds};
use uzswap_mm::compaction::scanner::{Position, Scanners};
use uzswap_mm::compaction::{Compactor, Goal, Migrate, Outcome};
use uzswap_mm::zone::{BLOCK_FRAMES, Kind, MigrateType, Zone};

pub const BLOCK: u32 = BLOCK_FRAMES;

/// Memory in which each frame in use holds the number of the page that it was allocated for.
pub struct Memory {
    start: u32,
    pub frames: Vec<Option<u64>>,
    pub pinned: Vec<bool>,
    isolated: Vec<bool>,
    /// Every so many moves one fails; 0: none.
    pub fail_every: usize,
    pub moves: Vec<(u32, u32)>,
    asked: usize,
}

impl Memory {
    fn new(zone: &Zone) -> Self {
        let n = (zone.end() - zone.start()) as usize;
        let (start, fail_every) = (zone.start(), 0);
        let (frames, pinned, isolated) = (vec![None; n], vec![false; n], vec![false; n]);
        Self { start, frames, pinned, isolated, fail_every, moves: vec![], asked: 0 }
    }
    pub fn at(&self, frame: u32) -> usize {
        (frame - self.start) as usize
    }
    fn used(&self) -> Vec<u64> {
        let mut pages: Vec<_> = self.frames.iter().flatten().copied().collect();
        pages.sort_unstable();
        pages
    }
    /// The program goes on between two runs: some pages go, others come. Returns those present afterwards.
    pub fn churn(&mut self, zone: &mut Zone, round: u32) -> Vec<u64> {
        let n = self.frames.len();
        for i in 0..n as u32 / 16 {
            let at = (i.wrapping_add(round * 977).wrapping_mul(0x9e37_79b9) >> 4) as usize % n;
            let frame = self.start + at as u32;
            if self.frames[at].is_none() {
                assert!(zone.take_frame(Kind::Frame, frame));
                self.frames[at] = Some(u64::from(frame) << 32 | u64::from(round));
            } else if !self.pinned[at] {
                self.frames[at] = None;
                zone.free(Kind::Frame, frame, 0);
            }
        }
        self.used()
    }
}

impl Migrate for Memory {
    fn isolate(&mut self, _: &Zone, frame: u32) -> bool {
        let at = self.at(frame);
        assert!(self.frames[at].is_some(), "{frame} is neither free nor in use");
        assert!(!self.isolated[at], "{frame} isolated twice");
        self.isolated[at] = !self.pinned[at];
        self.isolated[at]
    }
    fn migrate(&mut self, _: &mut Zone, from: u32, to: u32) -> bool {
        let (from_at, to_at) = (self.at(from), self.at(to));
        assert!(std::mem::replace(&mut self.isolated[from_at], true), "moved without being isolated");
        assert!(self.frames[to_at].is_none(), "{to} is in use");
        self.asked += 1;
        if self.fail_every > 0 && self.asked.is_multiple_of(self.fail_every) {
            return false;
        }
        self.isolated[from_at] = false;
        self.frames[to_at] = self.frames[from_at].take();
        self.moves.push((from, to));
        true
    }
    fn putback(&mut self, frame: u32) {
        let at = self.at(frame);
        assert!(std::mem::replace(&mut self.isolated[at], false), "put back what was not isolated");
    }
}

/// A zone in which exactly the frames for which `used` is true are taken.
pub fn zone_with(start: u32, end: u32, used: impl Fn(u32) -> bool) -> (Zone, Memory) {
    let mut zone = Zone::spanning(start, end, Kind::Frame);
    let mut memory = Memory::new(&zone);
    for frame in (start..end).filter(|f| used(*f)) {
        assert!(zone.take_frame(Kind::Frame, frame));
        let at = memory.at(frame);
        memory.frames[at] = Some(u64::from(frame));
    }
    (zone, memory)
}

pub fn goal(order: u8) -> Goal {
    Goal { kind: Kind::Frame, order, score: None, budget: u64::MAX }
}

fn position(block: usize, wrapped: bool) -> Position {
    Position { block, done: 0, wrapped }
}

/// E2: neither wrapped: no; exactly one: free block ≤ migrate block; both: yes. By page block, wherever the scanners are inside.
#[test]
fn scanners_meet_as_the_table_says() {
    for (migrate, free, wrapped, met) in [
        (5, 4, (false, false), false),
        (5, 5, (false, false), false),
        (7, 0, (false, false), false),
        (0, 3, (true, false), false),
        (2, 3, (true, false), false),
        (3, 3, (true, false), true),
        (4, 3, (true, false), true),
        (5, 9, (false, true), false),
        (8, 9, (false, true), false),
        (9, 9, (false, true), true),
        (9, 6, (false, true), true),
        (0, 9, (true, true), true),
        (9, 0, (true, true), true),
    ] {
        for (m, f) in [(0, 0), (511, 1), (1, 511)] {
            let scanners = Scanners {
                migrate: Position { done: m, ..position(migrate, wrapped.0) },
                free: Position { done: f, ..position(free, wrapped.1) },
            };
            assert_eq!(scanners.met(), met, "{scanners:?}");
        }
    }
}

/// E2: from any pivot, including one at either end, the scanners keep their direction, wrap once each, never leave the zone, and
/// meet when together they have been everywhere once.
#[test]
fn scanners_see_every_block_once_from_every_pivot() {
    for blocks in 1..8 {
        for pivot in 0..blocks {
            for free_steps in 0..3 {
                let mut s = Scanners::at(pivot, blocks);
                let (mut migrated, mut freed) = (vec![], vec![]);
                while !s.met() {
                    migrated.push(s.migrate.block);
                    s.advance_migrate(blocks);
                    for _ in 0..free_steps {
                        if !s.met() {
                            freed.push(s.free.block);
                            s.advance_free(blocks);
                        }
                    }
                }
                let up: Vec<_> = (pivot..blocks).chain(0..pivot).take(migrated.len()).collect();
                let down: Vec<_> = (0..pivot).rev().chain((pivot..blocks).rev()).take(freed.len()).collect();
                assert_eq!((&migrated, &freed), (&up, &down), "{blocks} blocks, pivot {pivot}");
                assert!(migrated.iter().all(|b| !freed.contains(b)), "a block seen by both");
            }
        }
    }
    // The old rule: upwards from the start, downwards from the end.
    let ends = Scanners { migrate: position(0, false), free: position(7, true) };
    assert_eq!(Scanners::at(0, 8), ends);
    assert_eq!(Scanners::at(7, 8), Scanners { migrate: position(7, false), free: position(6, false) });
}

/// E2: a cached pivot or position outside the zone is re-initialised.
#[test]
fn an_invalid_cached_pivot_is_reinitialised() {
    let zone = Zone::spanning(0, 4 * BLOCK, Kind::Frame);
    for pivot in [4, 5, usize::MAX] {
        let mut cached = Cached::new(pivot);
        assert_eq!(*cached.resume(&zone), Scanners::at(0, 4));
        assert_eq!(cached.pivot, 0);
    }
    for (migrate, free) in [(9, 1), (3, 9), (4, 3), (3, 4)] {
        let mut cached = Cached::new(2);
        cached.scanners = Some(Scanners { migrate: position(migrate, true), free: position(free, false) });
        assert_eq!(*cached.resume(&zone), Scanners::at(2, 4), "{migrate} and {free}");
    }
}

/// E3: a restart discards positions in the middle of a pass.
#[test]
fn positions_are_reset_on_a_restart() {
    for moves in [true, false] {
        let mut zone = Zone::spanning(0, 4 * BLOCK, Kind::Frame);
        let mut policy = Linear::starting_at(2, moves);
        policy.begin(&mut zone, Kind::Frame, false);
        policy.cached.scanners = Some(Scanners { migrate: position(3, false), free: position(0, false) });
        policy.restart(&mut zone);
        assert_eq!((policy.cached.scanners, policy.cached.pivot), (None, 2), "they have not met: the pivot stays");
    }
}

/// E2: in a zone that starts at frame 1, the first block is a frame short, and there is no block below it.
#[test]
fn a_zone_that_starts_at_frame_one_does_not_underflow() {
    for end in [2, 3, 511, 512, 513, 1025, 4 * BLOCK, 4 * BLOCK + 77] {
        for pivot in 0..=(end.div_ceil(BLOCK) as usize) {
            let (mut zone, mut memory) = zone_with(1, end, |f| f % 3 == 0);
            let pages = memory.used();
            let mut compactor = Compactor::new(Linear::starting_at(pivot, true));
            for _ in 0..5 {
                compactor.direct(&mut zone, goal(9), &mut memory);
                compactor.policy.restart(&mut zone);
            }
            assert_eq!(memory.used(), pages);
            assert_eq!(zone.free_slots(Kind::Frame), (end - 1) as usize - pages.len());
        }
    }
}

/// E2: with the pivot in the middle and nothing free below it, the free scanner wraps and goes on at once: the first compaction
/// already moves pages.
#[test]
fn a_free_scanner_that_wraps_empty_handed_goes_on_at_once() {
    // Blocks 0 to 3 are full, 4 and 5 hold a few pages, 6 and 7 have room.
    let (mut zone, mut memory) = zone_with(0, 8 * BLOCK, |f| f < 4 * BLOCK || f % 8 == 0);
    let mut compactor = Compactor::new(Linear::starting_at(4, true));
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Success);
    assert_eq!(memory.moves.len(), 64);
    assert!(memory.moves.iter().all(|(from, to)| *from / BLOCK == 4 && *to / BLOCK == 7), "{:?}", memory.moves);
}

/// E3: if the free scanner stops inside a block it goes on there; at a block's end only the block is noted.
#[test]
fn the_free_scanner_notes_its_place_only_inside_a_block() {
    // In the last two blocks only odd frames are free; in the others 40 pages are in use.
    let (mut zone, mut memory) = zone_with(0, 8 * BLOCK, |f| if f < 6 * BLOCK { f % BLOCK < 40 } else { f % 2 == 0 });
    let mut compactor = Compactor::new(ZoneEnds::new());
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Success);
    let free = compactor.policy.cached.scanners.unwrap().free;
    assert_eq!(free.block, 7);
    // 32 of the first cluster and 8 of the second; the rest of that went back.
    assert_eq!(memory.moves.len(), 40);
    assert_eq!(free.done, 64, "goes on behind what was used up, not behind what was given back");
    // A block used up to its end leaves no position inside, nor does one whose targets all go back.
    let (mut zone, mut memory) = zone_with(0, 4 * BLOCK, |f| f % BLOCK < 40 || (f >= 3 * BLOCK && f % 16 != 0));
    let mut compactor = Compactor::new(ZoneEnds::new());
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Success);
    let free = compactor.policy.cached.scanners.unwrap().free;
    assert_eq!((free.block, free.done), (2, 0), "{free:?}");
    assert!(memory.moves.iter().take(29).all(|(_, to)| *to / BLOCK == 3));
}

/// E3: cached positions are kept between runs, and reset when the scanners meet.
#[test]
fn positions_are_kept_until_the_scanners_meet() {
    let (mut zone, mut memory) = zone_with(0, 8 * BLOCK, |f| f % 2 == 0);
    let mut compactor = Compactor::new(ZoneEnds::new());
    let small = Goal { budget: 200, ..goal(9) };
    assert_eq!(compactor.direct(&mut zone, small, &mut memory), Outcome::Partial);
    let first = compactor.policy.cached.scanners.unwrap();
    assert!(first.migrate.done > 0);
    assert_eq!(compactor.direct(&mut zone, small, &mut memory), Outcome::Partial);
    assert!(compactor.policy.cached.scanners.unwrap().migrate.done > first.migrate.done);
    // Pinned pages everywhere: no block can come free, and the scanners meet.
    let (mut zone, mut memory) = zone_with(0, 8 * BLOCK, |f| f % 2 == 0);
    (0..8 * BLOCK).step_by(512).for_each(|f| memory.pinned[f as usize] = true);
    let mut compactor = Compactor::new(ZoneEnds::new());
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Complete);
    assert!(compactor.policy.cached.scanners.is_none());
    assert_eq!(compactor.policy.cached.met_at, Some(4));
}

/// E3: a whole pass of background compaction resets the positions, and forgets which blocks to skip.
#[test]
fn a_whole_background_pass_resets_positions_and_skip_bits() {
    let (mut zone, mut memory) = zone_with(0, 8 * BLOCK, |f| f % 2 == 0);
    memory.pinned.fill(true);
    let mut compactor = Compactor::new(ZoneEnds::new());
    let aim = Goal { score: Some(10), ..goal(9) };
    assert_eq!(compactor.background(&mut zone, aim, &mut memory), Outcome::Complete);
    assert!(compactor.policy.cached.scanners.is_none());
    let scanned = compactor.counters.compact_migrate_scanned;
    assert!(scanned >= 7 * 512, "{scanned}");
    // Nothing is skipped the second time.
    assert_eq!(compactor.background(&mut zone, aim, &mut memory), Outcome::Complete);
    assert_eq!(compactor.counters.compact_migrate_scanned, 2 * scanned);
    // Direct compaction does not clear the skip bits: blocks found useless are passed over.
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Complete);
    let before = compactor.counters.compact_migrate_scanned;
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Deferred);
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Complete);
    assert_eq!(compactor.counters.compact_migrate_scanned, before, "skip bits were not looked at");
}

/// An attempt without room does not count against the next one, for which reclaim has made some. (Once it was deferred.)
#[test]
fn without_room_compaction_is_skipped_and_not_deferred() {
    // 64 frames of each of 15 blocks are free, one less than twice the run and the reserve.
    let (mut zone, mut memory) = zone_with(0, 16 * BLOCK, |f| f >= 15 * BLOCK || f % 8 != 0);
    zone.watermarks.min = 15 * 64 - 2 * 8 + 1;
    let mut compactor = Compactor::new(ZoneEnds::new());
    let small = goal(3);
    for _ in 0..3 {
        assert_eq!(compactor.direct(&mut zone, small, &mut memory), Outcome::Skipped);
    }
    assert_eq!(compactor.counters.compact_stall, 0);
    zone.watermarks.min -= 1;
    assert_eq!(compactor.direct(&mut zone, small, &mut memory), Outcome::Success);
    assert!(zone.has_run(Kind::Frame, 3));
}

/// Background compaction stops when it reaches its score.
#[test]
fn background_compaction_goes_for_a_score() {
    for score in [80, 50, 10] {
        let (mut zone, mut memory) = zone_with(0, 16 * BLOCK, |f| f % 4 == 0);
        let mut compactor = Compactor::new(Emptiest::new());
        assert_eq!(zone.fragmentation(Kind::Frame, 9), 100);
        let aim = Goal { score: Some(score), ..goal(9) };
        assert_eq!(compactor.background(&mut zone, aim, &mut memory), Outcome::Success);
        let reached = zone.fragmentation(Kind::Frame, 9);
        assert!(reached <= score && reached + 10 > score, "{reached} for {score}");
    }
}

/// E4: after a failure 1 << shift attempts are skipped before the next, with a shift of at most 6; success ends that.
#[test]
fn deferral_doubles_up_to_64_attempts() {
    let mut deferral = Deferral::default();
    assert!(!deferral.is_deferred(9));
    for failures in 1..10u32 {
        deferral.defer(9);
        let shift = failures.min(MAX_SHIFT);
        assert_eq!(deferral.shift(), shift);
        assert!(!deferral.is_restarting(9));
        for attempt in 1..1 << shift {
            assert!(deferral.is_deferred(9), "attempt {attempt} after failure {failures}");
            assert!(!deferral.is_restarting(9));
        }
        assert!(!deferral.is_deferred(9), "attempt {} after failure {failures}", 1 << shift);
        assert_eq!(deferral.is_restarting(9), shift == MAX_SHIFT);
        // A smaller order that never failed is not deferred.
        assert!(!deferral.is_deferred(8) && !deferral.is_restarting(8));
    }
    deferral.reset(9, true);
    assert_eq!(deferral.shift(), 0);
    assert!(!deferral.is_deferred(9));
    // The smallest order that failed defers all orders as large.
    for order in [7, 5, 9] {
        deferral.defer(order);
    }
    assert!(deferral.is_deferred(5) && !deferral.is_deferred(4));
}

/// E4 (and the last of E3): the pivot moves to where the scanners last met only on a restart after the longest deferral, when
/// skip bits and positions are also reset. The old rule never moves it.
#[test]
fn the_pivot_moves_only_on_a_restart_after_the_longest_deferral() {
    for moves in [true, false] {
        let (mut zone, mut memory) = zone_with(0, 8 * BLOCK, |f| f % 2 == 0);
        memory.pinned.fill(true);
        let mut compactor = Compactor::new(if moves { Pivot::new(0) } else { ZoneEnds::new() });
        let mut complete = 0;
        while compactor.deferral.shift() < MAX_SHIFT || complete < 7 {
            let met_before = compactor.policy.cached.met_at;
            match compactor.direct(&mut zone, goal(9), &mut memory) {
                Outcome::Complete => complete += 1,
                Outcome::Deferred => assert_eq!(compactor.policy.cached.met_at, met_before),
                other => panic!("{other:?}"),
            }
            if complete < 7 {
                assert_eq!(compactor.policy.cached.pivot, 0, "moved after {complete} failures");
            }
        }
        // The seventh came after 64 refusals: it was a restart.
        let scanned = compactor.counters.compact_migrate_scanned;
        assert_eq!(compactor.policy.cached.pivot != 0, moves);
        assert_eq!(compactor.policy.pivot(), moves.then_some((compactor.policy.cached.pivot, 1)));
        assert!(scanned >= 2 * 7 * 512 - 512, "the skip bits were not cleared: {scanned}");
    }
}

/// E4: a run that was found ends the deferral of its order (smaller orders had none), whoever then gets it. The following
/// attempts are no restarts.
#[test]
fn a_run_that_is_found_ends_deferral() {
    let (mut zone, mut memory) = zone_with(0, 8 * BLOCK, |f| f % 2 == 0);
    memory.pinned.fill(true);
    let mut compactor = Compactor::new(ZoneEnds::new());
    while compactor.deferral.shift() < MAX_SHIFT {
        compactor.direct(&mut zone, goal(9), &mut memory);
    }
    memory.pinned.fill(false);
    while compactor.direct(&mut zone, goal(9), &mut memory) == Outcome::Deferred {
        assert!(!zone.has_run(Kind::Frame, 9));
    }
    assert!(zone.has_run(Kind::Frame, 9));
    assert!(!compactor.deferral.is_deferred(9) && !compactor.deferral.is_restarting(9));
    assert_eq!(compactor.deferral.shift(), MAX_SHIFT, "nobody has allocated it yet");
    compactor.allocated(9);
    assert_eq!(compactor.deferral.shift(), 0);
}

/// The scanners meet inside one block: neither looks at a frame of the other's, and what was isolated goes back.
#[test]
fn meeting_inside_one_block_loses_nothing() {
    // The last block takes 99 pages of block 0, whose first stays, and 51 of block 1; the free scanner is there then.
    let used = |f: u32| if f < 2 * BLOCK { f % BLOCK < 100 } else { f % BLOCK >= 150 };
    let (mut zone, mut memory) = zone_with(0, 3 * BLOCK, used);
    memory.pinned[0] = true;
    let pages = memory.used();
    let free = zone.free_slots(Kind::Frame);
    let mut compactor = Compactor::new(ZoneEnds::new());
    // There is too little room for direct compaction.
    let aim = Goal { score: Some(0), ..goal(9) };
    assert_eq!(compactor.background(&mut zone, aim, &mut memory), Outcome::Complete);
    assert_eq!((memory.used(), memory.moves.len()), (pages, 150));
    assert!(memory.moves.iter().all(|(from, to)| *from < 2 * BLOCK && *to >= 2 * BLOCK));
    assert!(memory.isolated.iter().all(|i| !i));
    assert_eq!(zone.free_slots(Kind::Frame), free);
}

/// E5: every counter by name, on a case small enough to count by hand.
#[test]
fn counters_count_what_they_say() {
    // Between the two blocks is one that stays: without its room there would be no attempt.
    let used = |f: u32| f < 8 || f >= BLOCK && f.is_multiple_of(if f < 2 * BLOCK { 4 } else { 2 });
    let (mut zone, mut memory) = zone_with(0, 3 * BLOCK, used);
    memory.pinned[BLOCK as usize..2 * BLOCK as usize].fill(true);
    memory.fail_every = 5;
    let mut compactor = Compactor::new(ZoneEnds::new());
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Complete);
    let c = compactor.counters;
    assert_eq!((c.compact_stall, c.compact_success, c.compact_fail), (1, 0, 1));
    assert_eq!((c.pgmigrate_success, c.pgmigrate_fail), (7, 1));
    // Eight pages, and six free runs of 8 to 256 frames behind them; then 128 pages that stay, each with a frame and a run of two
    // behind it.
    assert_eq!(c.compact_migrate_scanned, 14 + 128 * 3);
    assert_eq!(c.compact_free_scanned, 64);
    assert_eq!(c.compact_isolated, 8 + 32);
    assert_eq!((c.migrated_twice, c.migrated_again), (0, 0));
}

/// Free slots of the other kind move like pages in use, and keep their kind.
#[test]
fn frames_are_moved_out_of_the_way_of_holes() {
    struct Arena(Vec<(u32, u32)>);
    impl Migrate for Arena {
        fn isolate(&mut self, _: &Zone, _: u32) -> bool {
            unreachable!("nothing is in use")
        }
        fn migrate(&mut self, _: &mut Zone, from: u32, to: u32) -> bool {
            self.0.push((from, to));
            true
        }
        fn putback(&mut self, _: u32) {}
    }
    let mut zone = Zone::new(4 * BLOCK as usize);
    for slot in (0..4 * BLOCK).step_by(16) {
        assert!(zone.take_frame(Kind::Hole, slot));
        zone.free(Kind::Frame, slot, 0);
    }
    let mut arena = Arena(vec![]);
    let mut compactor = Compactor::new(Emptiest::new());
    let goal = Goal { kind: Kind::Hole, ..goal(9) };
    assert_eq!(compactor.direct(&mut zone, goal, &mut arena), Outcome::Success);
    assert_eq!(arena.0.len(), 32);
    assert_eq!(zone.free_slots(Kind::Frame), 128);
    assert!(zone.alloc(Kind::Hole, 9).is_some());
}

/// The story: [`Emptiest`] looks at all page blocks to choose, and that was charged to the budget. From as many blocks on (the
/// pager's arena above a limit of 448 MiB) each run ended before it took a page, and there was always more to do.
#[test]
fn every_run_gets_on_however_many_blocks_there_are() {
    let (mut zone, mut memory) = zone_with(0, 600 * BLOCK, |f| f % 64 == 0);
    let mut compactor = Compactor::new(Emptiest::new());
    let aim = Goal { score: Some(50), budget: 256, ..goal(9) };
    loop {
        let moved = memory.moves.len();
        let outcome = compactor.background(&mut zone, aim, &mut memory);
        assert!(memory.moves.len() > moved, "{outcome:?} without a move after {moved}");
        if outcome != Outcome::Partial {
            break assert_eq!(outcome, Outcome::Success);
        }
    }
    assert!(zone.fragmentation(Kind::Frame, 9) <= 50);
    assert_eq!(compactor.counters.migrated_twice, 0);
}

/// A pass in parts looks at as much as one in one piece, and no part at much more than its budget. (Once, if nothing could be
/// moved, a run went on through all blocks, and each run chose among all of them anew.)
fn parts_of_a_pass_are_as_large_as_their_budget<P: Policy>(policy: impl Fn() -> P) {
    const BLOCKS: u64 = 600;
    let looks = |budget| {
        let (mut zone, mut memory) = zone_with(0, BLOCKS as u32 * BLOCK, |f| f % 64 == 0);
        memory.pinned.fill(true);
        let mut compactor = Compactor::new(policy());
        let aim = Goal { score: Some(0), budget, ..goal(9) };
        let mut most = 0;
        loop {
            let before = compactor.counters.scanned();
            let outcome = compactor.background(&mut zone, aim, &mut memory);
            most = most.max(compactor.counters.scanned() - before);
            match outcome {
                Outcome::Partial => continue,
                _ => assert_eq!(outcome, Outcome::Complete),
            }
            return (compactor.counters.scanned(), most);
        }
    };
    let (at_once, _) = looks(u64::MAX);
    let (in_parts, most) = looks(256);
    assert_eq!(in_parts, at_once);
    // The first part looks at every block to choose.
    assert!(most <= BLOCKS + 256 + u64::from(BLOCK), "{most} at once");
}

#[test]
fn a_run_looks_at_its_budget_and_goes_on_where_the_last_one_stopped() {
    parts_of_a_pass_are_as_large_as_their_budget(ZoneEnds::new);
    parts_of_a_pass_are_as_large_as_their_budget(|| Linear::starting_at(300, true));
    parts_of_a_pass_are_as_large_as_their_budget(Emptiest::new);
}

/// The second objection: pages migrated back and forth. The bound: no page moves twice in a pass.
fn no_page_moves_twice_in_a_pass<P: Policy>(policy: P, used: &[bool], pins: &[usize], fail_every: usize) {
    let end = used.len() as u32 + 1;
    let (mut zone, mut memory) = zone_with(1, end, |f| used[f as usize - 1]);
    pins.iter().for_each(|p| memory.pinned[p % used.len()] = used[p % used.len()]);
    memory.fail_every = fail_every;
    let mut pages = memory.used();
    let mut free = zone.free_slots(Kind::Frame);
    let mut compactor = Compactor::new(policy);
    for round in 0..20 {
        let budget = if round % 3 == 0 { 300 } else { u64::MAX };
        let had = zone.has_run(Kind::Frame, 9);
        let outcome = compactor.direct(&mut zone, Goal { budget, ..goal(9) }, &mut memory);
        assert_eq!(outcome == Outcome::Success, zone.has_run(Kind::Frame, 9), "{outcome:?}");
        assert!(!had || zone.has_run(Kind::Frame, 9), "compaction broke a run up");
        assert_eq!(memory.used(), pages);
        assert_eq!(zone.free_slots(Kind::Frame), free);
        assert!(memory.isolated.iter().all(|i| !i));
        for (at, page) in memory.frames.iter().enumerate().filter(|(at, _)| memory.pinned[*at]) {
            assert!(*page == Some(at as u64 + 1), "a pinned page moved");
        }
        let c = compactor.counters;
        assert_eq!(c.migrated_twice, 0);
        assert_eq!(c.pgmigrate_success, memory.moves.len() as u64);
        if let Some(frame) = zone.alloc(Kind::Frame, 9) {
            compactor.allocated(9);
            zone.free(Kind::Frame, frame, 9);
        }
        pages = memory.churn(&mut zone, round);
        free = zone.free_slots(Kind::Frame);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_iters: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pages_are_kept_and_none_moves_twice_in_a_pass(
        used in (1..6usize, 1..95u32).prop_flat_map(|(blocks, percent)| {
            proptest::collection::vec((0..100u32).prop_map(move |n| n < percent), blocks * 512 - 100)
        }),
        pins in proptest::collection::vec(any::<usize>(), 0..6),
        fail_every in 0..7usize,
        pivot in 0..6usize,
    ) {
        no_page_moves_twice_in_a_pass(ZoneEnds::new(), &used, &pins, fail_every);
        no_page_moves_twice_in_a_pass(Linear::starting_at(pivot, true), &used, &pins, fail_every);
        no_page_moves_twice_in_a_pass(Emptiest::new(), &used, &pins, fail_every);
    }
}

/// Our own rule frees a block with the fewest moves possible, and never leaves out a block that could be emptied.
#[test]
fn the_emptiest_block_is_emptied_into_the_fullest() {
    // Pages per block: 300, 10, 500, 200.
    let counts = [300, 10, 500, 200];
    let (mut zone, mut memory) = zone_with(0, 4 * BLOCK, |f| f % BLOCK < counts[(f / BLOCK) as usize]);
    let mut compactor = Compactor::new(Emptiest::new());
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Success);
    assert_eq!(memory.moves.len(), 10);
    let c = compactor.counters;
    assert_eq!((c.compact_stall, c.compact_success, c.compact_fail), (1, 1, 0));
    assert!(memory.moves.iter().all(|(from, to)| from / BLOCK == 1 && to / BLOCK == 2), "{:?}", memory.moves);
}

/// Blocks of tables are neither emptied nor filled.
#[test]
fn unmovable_blocks_are_left_alone() {
    let (mut zone, mut memory) = zone_with(0, 4 * BLOCK, |f| f % 2 == 0);
    zone.set_block_type(0, MigrateType::Unmovable);
    zone.set_block_type(3, MigrateType::Unmovable);
    for _ in 0..2 {
        let mut compactor = Compactor::new(ZoneEnds::new());
        compactor.direct(&mut zone, goal(9), &mut memory);
        let mut compactor = Compactor::new(Emptiest::new());
        compactor.direct(&mut zone, goal(9), &mut memory);
    }
    assert!(!memory.moves.is_empty());
    let inside = |f: u32| (BLOCK..3 * BLOCK).contains(&f);
    assert!(memory.moves.iter().all(|(from, to)| inside(*from) && inside(*to)));
}

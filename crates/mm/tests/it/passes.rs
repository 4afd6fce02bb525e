//! Compaction from one run to the next: what is remembered, counted and forgotten (acceptance E4 and E5); choice of a rule by
//! name; and slots of two kinds.

use crate::compaction::{BLOCK, Memory, goal, zone_with};
use uzswap_mm::compaction::deferral::MAX_SHIFT;
use uzswap_mm::compaction::policy::{Emptiest, Pivot, Policy, ZoneEnds};
use uzswap_mm::compaction::rule::Rule;
use uzswap_mm::compaction::{Compactor, Counters, Goal, Migrate, Outcome};
use uzswap_mm::zone::{Kind, MigrateType, Zone};

/// E4: background compaction that reaches its score ends the deferral of its order, too.
#[test]
fn what_the_background_reached_is_not_deferred() {
    let (mut zone, mut memory) = zone_with(0, 8 * BLOCK, |f| f % 2 == 0);
    memory.pinned.fill(true);
    let mut compactor = Compactor::new(ZoneEnds::new());
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Complete);
    let mut deferral = compactor.deferral;
    assert!(deferral.is_deferred(9));
    memory.pinned.fill(false);
    compactor.reclaim_rests(&mut zone);
    let aim = Goal { score: Some(80), ..goal(9) };
    assert_eq!(compactor.background(&mut zone, aim, &mut memory), Outcome::Success);
    let mut deferral = compactor.deferral;
    assert!(!deferral.is_deferred(9));
}

/// E4, for our own rule: blocks known to be useless are passed over until the restart after the longest deferral, and looked at
/// then.
#[test]
fn emptiest_passes_over_what_refused_until_a_restart() {
    let (mut zone, mut memory) = zone_with(0, 8 * BLOCK, |f| f % 2 == 0);
    memory.pinned.fill(true);
    let mut compactor = Compactor::new(Emptiest::new());
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Complete);
    // Eight blocks to choose from, and a look into each.
    let first = compactor.counters.compact_migrate_scanned;
    assert!(first >= 16, "{first}");
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Deferred);
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Complete);
    assert_eq!(compactor.counters.compact_migrate_scanned, first + 8, "none is looked into again");
    while compactor.deferral.shift() < MAX_SHIFT {
        compactor.direct(&mut zone, goal(9), &mut memory);
    }
    memory.pinned.fill(false);
    while compactor.direct(&mut zone, goal(9), &mut memory) == Outcome::Deferred {}
    assert!(zone.has_run(Kind::Frame, 9), "a restart looks at all anew");
}

/// E5: pages that belong together and do not move are one look, whatever their number.
#[test]
fn a_huge_page_is_looked_at_once() {
    struct Huge(Memory);
    impl Migrate for Huge {
        fn isolate(&mut self, zone: &Zone, frame: u32) -> bool {
            self.0.isolate(zone, frame)
        }
        fn extent(&self, frame: u32) -> u32 {
            if (BLOCK..2 * BLOCK).contains(&frame) { 2 * BLOCK - frame } else { 1 }
        }
        fn migrate(&mut self, zone: &mut Zone, from: u32, to: u32) -> bool {
            self.0.migrate(zone, from, to)
        }
        fn putback(&mut self, frame: u32) {
            self.0.putback(frame);
        }
    }
    let (mut zone, mut memory) = zone_with(0, 6 * BLOCK, |f| (BLOCK..2 * BLOCK).contains(&f) || f % 256 == 0);
    memory.pinned.fill(true);
    let mut compactor = Compactor::new(ZoneEnds::new());
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut Huge(memory)), Outcome::Complete);
    // A block of two pages is looked at 18 times: the pages, and runs of 1 to 128 frames behind each. (The last one is not
    // reached.)
    assert_eq!(compactor.counters.compact_migrate_scanned, 5 * 18 - 18 + 1);
}

/// E5: pages moved that were also moved by the pass before are counted; not those of a pass long ago whose number has come again.
#[test]
fn pages_moved_in_two_passes_in_succession_are_counted() {
    for (idle, again) in [(0, 1), (1, 0), (253, 0), (254, 0), (255, 0), (509, 0)] {
        // Block 0 has one page.
        let (mut zone, mut memory) = zone_with(0, 4 * BLOCK, |f| f == 0 || f >= BLOCK && f % 2 == 0);
        let mut compactor = Compactor::new(Emptiest::new());
        assert_eq!(compactor.background(&mut zone, goal(9), &mut memory), Outcome::Success);
        let [(0, to)] = memory.moves[..] else { panic!("{:?}", memory.moves) };
        // Passes in which nothing can move.
        memory.pinned.fill(true);
        for _ in 0..idle {
            let aim = Goal { score: Some(0), ..goal(9) };
            assert_eq!(compactor.background(&mut zone, aim, &mut memory), Outcome::Complete);
        }
        memory.pinned.fill(false);
        // The others of its block go, so this one is to move on. (What has come free is taken.)
        for frame in (to / BLOCK * BLOCK..(to / BLOCK + 1) * BLOCK).filter(|frame| *frame != to) {
            let at = memory.at(frame);
            if memory.frames[at].take().is_some() {
                zone.free(Kind::Frame, frame, 0);
            }
        }
        let taken = zone.alloc(Kind::Frame, 9).expect("the block that came free");
        assert_eq!(compactor.background(&mut zone, goal(9), &mut memory), Outcome::Success);
        assert_eq!((memory.moves.len(), memory.moves[1].0, taken), (2, to, 0));
        let c = compactor.counters;
        assert_eq!((c.migrated_again, c.migrated_twice), (again, 0), "{idle} passes between");
    }
}

/// A pass that stopped goes on with what was found when it began, except for a block that has been filled since. If what was
/// wanted has come free by other means, the next run chooses anew.
#[test]
fn what_changed_between_two_runs_of_a_pass_is_seen() {
    const BLOCKS: u32 = 400;
    // Two blocks with little room; the others are nearly empty.
    let used = |f: u32| if f / BLOCK < 2 { !f.is_multiple_of(4) } else { f.is_multiple_of(16) };
    let aim = Goal { score: Some(0), budget: 20, ..goal(9) };
    let begin = || {
        let (mut zone, mut memory) = zone_with(0, BLOCKS * BLOCK, used);
        let mut compactor = Compactor::new(Emptiest::new());
        assert_eq!(compactor.background(&mut zone, aim, &mut memory), Outcome::Partial);
        (zone, memory, compactor)
    };
    let (mut zone, mut memory, mut compactor) = begin();
    let before = compactor.counters.compact_migrate_scanned;
    assert_eq!(compactor.background(&mut zone, Goal { score: Some(100), ..aim }, &mut memory), Outcome::Success);
    assert_eq!(compactor.counters.compact_migrate_scanned, before);
    assert_eq!(compactor.background(&mut zone, aim, &mut memory), Outcome::Partial);
    let chose = compactor.counters.compact_migrate_scanned - before;
    assert!(chose >= u64::from(BLOCKS), "it did not choose anew: {chose} looks");
    // The block that was to be next is filled: it is no longer one of the emptiest.
    let (mut zone, mut memory, mut compactor) = begin();
    let filled = memory.moves.iter().map(|(from, _)| from / BLOCK).max().expect("it has begun") + 1;
    for frame in filled * BLOCK..filled * BLOCK + 300 {
        let at = memory.at(frame);
        if memory.frames[at].is_none() {
            assert!(zone.take_frame(Kind::Frame, frame));
            memory.frames[at] = Some(u64::from(frame) << 32);
        }
    }
    for _ in 0..20 {
        assert_eq!(compactor.background(&mut zone, aim, &mut memory), Outcome::Partial);
    }
    let from = |block| memory.moves.iter().filter(|(from, _)| from / BLOCK == block).count();
    assert!(from(filled) == 0 && from(filled + 1) > 0, "{} pages of {filled}", from(filled));
}

/// Frames that pages moved from and to.
type Moves = Vec<(u32, u32)>;

/// Compacts a zone in which pages stay and moves fail, in parts and at once, and then one in which nothing moves until long after
/// it was given up. Returns what moved, what was counted, and where the pivot is.
fn compacted(policy: impl Policy) -> (Moves, Counters, Option<(usize, u64)>) {
    let used = |f: u32| f.wrapping_mul(0x9e37_79b9) >> 27 < f / BLOCK * 7 % 31 + 1;
    let (mut zone, mut memory) = zone_with(0, 24 * BLOCK, used);
    let mut compactor = Compactor::new(policy);
    memory.fail_every = 50;
    (0..24).step_by(5).for_each(|block| memory.pinned[(block * BLOCK + 300) as usize] = true);
    for budget in [700, 700, 2000, u64::MAX, u64::MAX] {
        let aim = Goal { score: Some(0), budget, ..goal(9) };
        compactor.background(&mut zone, aim, &mut memory);
    }
    memory.churn(&mut zone, 1);
    memory.pinned.fill(true);
    for attempt in 0..400 {
        if attempt == 350 {
            memory.pinned.fill(false);
        }
        // Nobody takes what has come free, so fill it again.
        while let Some(frame) = zone.alloc(Kind::Frame, 9) {
            (frame..frame + BLOCK).step_by(2).for_each(|free| zone.free(Kind::Frame, free, 0));
            (frame..frame + BLOCK).skip(1).step_by(2).for_each(|used| {
                let at = memory.at(used);
                memory.frames[at] = Some(u64::from(used) << 32);
            });
        }
        compactor.direct(&mut zone, goal(9), &mut memory);
    }
    (memory.moves, compactor.counters, compactor.policy.pivot())
}

/// Naming a rule gives the policy of that name: move for move and look for look.
#[test]
fn a_rule_compacts_as_its_policy_does() {
    let alone = [compacted(Emptiest::new()), compacted(Pivot::in_the_middle()), compacted(ZoneEnds::new())];
    let named = [Rule::Emptiest, Rule::Pivot, Rule::ZoneEnds].map(|rule| compacted(rule.policy()));
    for (alone, named) in alone.iter().zip(&named) {
        assert_eq!((alone.1, alone.2), (named.1, named.2));
        assert!(alone.0 == named.0 && !alone.0.is_empty());
    }
    // They differ, or this would prove nothing.
    assert!(alone[0].0 != alone[1].0 && alone[1].0 != alone[2].0 && alone[0].0 != alone[2].0);
}

/// E5: what was counted since is the difference, for each counter.
#[test]
fn what_was_counted_since_an_earlier_reading() {
    let times = |n: u64| Counters {
        compact_stall: 2 * n,
        compact_success: 3 * n,
        compact_fail: 5 * n,
        compact_migrate_scanned: 7 * n,
        compact_free_scanned: 11 * n,
        compact_isolated: 13 * n,
        pgmigrate_success: 17 * n,
        pgmigrate_fail: 19 * n,
        migrated_twice: 23 * n,
        migrated_again: 29 * n,
    };
    assert_eq!(times(7).since(&times(3)), times(4));
    assert_eq!(times(5).scanned(), 5 * (7 + 11));
}

/// A7: compaction's tables are charged: room for what is taken at a time, and a mark for each frame once a page has moved.
#[test]
fn the_marks_of_compaction_are_a_byte_a_frame() {
    let (mut zone, mut memory) =
        zone_with(8 * BLOCK, 12 * BLOCK, |f| f < 8 * BLOCK + 10 || f >= 9 * BLOCK && f % 2 == 0);
    let mut compactor = Compactor::new(Emptiest::new());
    let before = compactor.metadata_bytes();
    assert!((4 * (32 + 512)..8 * (32 + 512)).contains(&before), "{before}");
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Success);
    let marks = compactor.metadata_bytes() - before;
    assert!((4 * 512..8 * 512).contains(&marks), "{marks} bytes for {} frames", 4 * 512);
}

/// What could not be moved in its turn is tried again in the same run, as long as anything moves: at the end no partly free block
/// is left that could be emptied into another.
#[test]
fn a_run_goes_on_while_anything_moves() {
    for fail_every in [0, 2, 7] {
        let (mut zone, mut memory) = zone_with(0, 16 * BLOCK, |f| f % 16 <= f / BLOCK);
        memory.fail_every = fail_every;
        let mut compactor = Compactor::new(Emptiest::new());
        let aim = Goal { score: Some(0), ..goal(9) };
        assert_eq!(compactor.background(&mut zone, aim, &mut memory), Outcome::Complete);
        let free = zone.free_slots(Kind::Frame);
        assert_eq!(zone.runs(Kind::Frame, 9), free / BLOCK as usize, "one move of {fail_every} fails");
        assert_eq!(compactor.counters.migrated_twice, 0);
    }
}

/// If the score is reached already, nothing is looked at.
#[test]
fn background_compaction_looks_at_nothing_where_its_score_is_reached() {
    let (mut zone, mut memory) = zone_with(0, 4 * BLOCK, |f| f % 4 == 0);
    let score = zone.fragmentation(Kind::Frame, 9);
    let mut compactor = Compactor::new(Emptiest::new());
    let aim = Goal { score: Some(score), ..goal(9) };
    assert_eq!((score, compactor.background(&mut zone, aim, &mut memory)), (100, Outcome::Success));
    assert_eq!(compactor.counters, Counters::default());
}

/// A slot of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Hole,
    Frame,
    Page(u32),
}

/// An arena with slots of two kinds, in which one page may stay.
struct Arena {
    slots: Vec<Slot>,
    pinned: Option<u32>,
    isolated: usize,
}

impl Arena {
    fn with(blocks: u32, slot: impl Fn(u32) -> Slot) -> (Zone, Self) {
        let slots: Vec<_> = (0..blocks * BLOCK).map(slot).collect();
        let mut zone = Zone::new(slots.len());
        for (at, slot) in (0..).zip(&slots) {
            assert!(*slot == Slot::Hole || zone.take_frame(Kind::Hole, at));
        }
        let frames = (0..).zip(&slots).filter(|(_, slot)| **slot == Slot::Frame);
        frames.for_each(|(at, _)| zone.free(Kind::Frame, at, 0));
        (zone, Self { slots, pinned: None, isolated: 0 })
    }

    /// The zone describes each slot correctly, and nothing is lost.
    fn check(&self, zone: &Zone, before: &[Slot]) {
        for (at, slot) in (0..).zip(&self.slots) {
            let kind = zone.free_run_around(at).map(|(kind, ..)| kind);
            let want = [(Slot::Hole, Kind::Hole), (Slot::Frame, Kind::Frame)].into_iter().find(|(s, _)| s == slot);
            assert_eq!(kind, want.map(|(_, kind)| kind), "slot {at}: {slot:?}");
        }
        let sorted = |slots: &[Slot]| {
            let page = |slot: &Slot| if let Slot::Page(page) = slot { Some(*page) } else { None };
            let mut pages: Vec<u32> = slots.iter().filter_map(page).collect();
            pages.sort_unstable();
            (slots.iter().filter(|slot| **slot == Slot::Frame).count(), pages)
        };
        assert_eq!((sorted(&self.slots), self.isolated), (sorted(before), 0));
    }
}

impl Migrate for Arena {
    fn isolate(&mut self, _: &Zone, slot: u32) -> bool {
        assert!(matches!(self.slots[slot as usize], Slot::Page(_)));
        let moves = self.pinned != Some(slot);
        self.isolated += usize::from(moves);
        moves
    }
    fn migrate(&mut self, _: &mut Zone, from: u32, to: u32) -> bool {
        assert_eq!(self.slots[to as usize], Slot::Hole, "moved onto {to}");
        self.isolated -= usize::from(self.slots[from as usize] != Slot::Frame);
        self.slots.swap(from as usize, to as usize);
        true
    }
    fn putback(&mut self, slot: u32) {
        assert!(matches!(self.slots[slot as usize], Slot::Page(_)));
        self.isolated -= 1;
    }
}

/// With slots of two kinds, free slots of the other kind move like pages and keep their kind, and nothing is moved onto them:
/// under every rule, and whichever kind is gathered.
#[test]
fn no_rule_moves_anything_onto_what_is_free_of_the_other_kind() {
    let slot = |at: u32| match at {
        _ if at % 64 < 8 + at / BLOCK => Slot::Frame,
        _ if at.wrapping_mul(0x9e37_79b9) >> 29 == 0 => Slot::Page(at),
        _ => Slot::Hole,
    };
    for rule in Rule::ALL {
        let (mut zone, mut arena) = Arena::with(8, slot);
        let before = arena.slots.clone();
        let mut compactor = Compactor::new(rule.policy());
        let aim = Goal { kind: Kind::Hole, score: Some(20), ..goal(9) };
        compactor.background(&mut zone, aim, &mut arena);
        assert!(compactor.counters.pgmigrate_success > u64::from(BLOCK), "{rule:?}");
        arena.check(&zone, &before);
    }
    // One page to move, and one hole for it, behind a run of frames and a page.
    let slot = |at: u32| match at {
        0 | 516..=610 | 612.. => Slot::Page(at),
        512..=515 => Slot::Frame,
        _ => Slot::Hole,
    };
    for rule in Rule::ALL {
        let (mut zone, mut arena) = Arena::with(2, slot);
        let aim = Goal { kind: Kind::Hole, score: Some(0), ..goal(9) };
        let mut compactor = Compactor::new(rule.policy());
        // From the middle, the first pass goes the other way.
        compactor.background(&mut zone, aim, &mut arena);
        let moved = arena.slots[611] == Slot::Page(0);
        assert!(moved || rule == Rule::Pivot, "{rule:?}");
    }
}

/// One page that stays keeps its block: under our own rule everything else in it stays, too, including free frames.
#[test]
fn a_block_in_which_a_page_stays_is_left_as_it_was() {
    let slot = |at: u32| match at {
        3..=6 | 20 | 700..=710 => Slot::Frame,
        10 | 15 | 300 | 400 | 512..=900 => Slot::Page(at),
        _ => Slot::Hole,
    };
    let (mut zone, mut arena) = Arena::with(2, slot);
    let before = arena.slots.clone();
    arena.pinned = Some(300);
    let mut compactor = Compactor::new(Emptiest::new());
    let aim = Goal { kind: Kind::Hole, score: Some(0), ..goal(9) };
    assert_eq!(compactor.background(&mut zone, aim, &mut arena), Outcome::Complete);
    assert!(arena.slots == before && compactor.counters.pgmigrate_success == 0);
    arena.check(&zone, &before);
}

/// The free scanner does not skip a block in which it found something: what comes free there later is found.
#[test]
fn a_block_that_has_been_filled_is_looked_at_again() {
    // A hundred pages, and room for forty of them; and free memory that cannot be a target, so that there is enough to try.
    let used = |f: u32| match f / BLOCK {
        0 => f < 100,
        3 => f % BLOCK >= 40,
        block => block < 3 || f.is_multiple_of(2),
    };
    let (mut zone, mut memory) = zone_with(0, 8 * BLOCK, used);
    (4..8).for_each(|block| zone.set_block_type(block, MigrateType::Unmovable));
    let mut compactor = Compactor::new(ZoneEnds::new());
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Complete);
    assert_eq!(memory.moves.len(), 40);
    for frame in 4 * BLOCK - 60..4 * BLOCK {
        let at = memory.at(frame);
        memory.frames[at] = None;
        zone.free(Kind::Frame, frame, 0);
    }
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Deferred);
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Success);
    assert_eq!(zone.alloc(Kind::Frame, 9), Some(0));
}

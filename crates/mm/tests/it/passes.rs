//! Compaction from one run to the next: what is remembered, counted and forgotten (acceptance E4 and E5).

use crate::compaction::{BLOCK, Memory, goal, zone_with};
use uzswap_mm::compaction::deferral::MAX_SHIFT;
use uzswap_mm::compaction::policy::{Emptiest, ZoneEnds};
use uzswap_mm::compaction::{Compactor, Goal, Migrate, Outcome};
use uzswap_mm::zone::{Kind, Zone};

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

/// E4, by the rule of our own: what is known to be useless is passed over until the restart after the longest deferral, and looked at then.
#[test]
fn emptiest_passes_over_what_refused_until_a_restart() {
    let (mut zone, mut memory) = zone_with(0, 8 * BLOCK, |f| f % 2 == 0);
    memory.pinned.fill(true);
    let mut compactor = Compactor::new(Emptiest::new());
    assert_eq!(compactor.direct(&mut zone, goal(9), &mut memory), Outcome::Complete);
    // (Eight blocks to choose from, and a look into each.)
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

/// E5: what belongs together and does not move is one look, whatever its size.
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
    // A block of two pages is looked at 18 times: they and the runs of 1 to 128 frames behind each. (The last is not come to.)
    assert_eq!(compactor.counters.compact_migrate_scanned, 5 * 18 - 18 + 1);
}

/// E5: pages moved that the pass before had moved are counted; not those of a pass long ago whose number has come again.
#[test]
fn pages_moved_in_two_passes_in_succession_are_counted() {
    for (idle, again) in [(0, 1), (1, 0), (253, 0), (254, 0), (255, 0), (509, 0)] {
        // Block 0 has one page.
        let (mut zone, mut memory) = zone_with(0, 4 * BLOCK, |f| f == 0 || f >= BLOCK && f % 2 == 0);
        let mut compactor = Compactor::new(Emptiest::new());
        assert_eq!(compactor.background(&mut zone, goal(9), &mut memory), Outcome::Success);
        let [(0, to)] = memory.moves[..] else { panic!("{:?}", memory.moves) };
        // Passes in which nothing can be moved.
        memory.pinned.fill(true);
        for _ in 0..idle {
            let aim = Goal { score: Some(0), ..goal(9) };
            assert_eq!(compactor.background(&mut zone, aim, &mut memory), Outcome::Complete);
        }
        memory.pinned.fill(false);
        // The others of its block go, so it is to go on. (What has come free is taken.)
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

/// A pass that stopped goes on by what was found when it began, but for a block that has been filled since; and where what was wanted
/// has come without it, the next run chooses anew.
#[test]
fn what_changed_between_two_runs_of_a_pass_is_seen() {
    const BLOCKS: u32 = 400;
    // Two blocks with little room, the others nearly empty.
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
    assert!(chose >= u64::from(BLOCKS), "it goes on by what is out of date: {chose} looks");
    // The block that was to be next is filled: it is none of the emptiest any more.
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

//! The zone, compared with a map of single slots (acceptance E1: a buddy allocator, and page blocks with a migrate type).

use proptest::prelude::*;
use uzswap_mm::zone::{Kind, MAX_ORDER, MigrateType, Watermarks, Zone};

const SLOTS: usize = 2048;

#[derive(Clone, Debug)]
enum Step {
    Alloc(Kind, u8),
    AllocUpTo(Kind, u8),
    AllocTyped(Kind, MigrateType, u8),
    /// Takes that frame, whatever run it is in.
    TakeFrame(Kind, usize),
    /// The wholly free block with the most frames, between these numbers.
    TakeIdle(u32, u32),
    /// Up to so many frames of the block with the most free.
    TakeOfBlock(usize),
    /// Closes the block of that frame.
    Close(usize),
    /// Changes the type of that frame's block.
    SetType(usize, MigrateType),
    /// Frees the run at that index (modulo how many are held), which is of that kind now.
    Free(usize, Kind),
    /// The same, in two consecutive parts of arbitrary length.
    FreeRun(usize, usize, Kind, Kind),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let kind = || prop_oneof![Just(Kind::Frame), Just(Kind::Hole)];
    // Small runs are the common case; large ones alone would empty the zone at once.
    let order = || prop_oneof![4 => 0..=3u8, 1 => 0..=MAX_ORDER];
    let step = prop_oneof![
        3 => (kind(), order()).prop_map(|(k, o)| Step::Alloc(k, o)),
        3 => (kind(), order()).prop_map(|(k, o)| Step::AllocUpTo(k, o)),
        3 => (kind(), 0..3usize, order()).prop_map(|(k, t, o)| Step::AllocTyped(k, MigrateType::ALL[t], o)),
        1 => (kind(), any::<usize>()).prop_map(|(k, f)| Step::TakeFrame(k, f)),
        1 => (1..40u32, 1..600u32).prop_map(|(least, most)| Step::TakeIdle(least, most)),
        1 => (1..700usize).prop_map(Step::TakeOfBlock),
        1 => (0..SLOTS * 8).prop_map(Step::Close),
        1 => (any::<usize>(), 0..3usize).prop_map(|(f, t)| Step::SetType(f, MigrateType::ALL[t])),
        3 => (any::<usize>(), kind()).prop_map(|(i, k)| Step::Free(i, k)),
        2 => (any::<usize>(), any::<usize>(), kind(), kind()).prop_map(|(i, n, a, b)| Step::FreeRun(i, n, a, b)),
    ];
    proptest::collection::vec(step, 1..400)
}

struct Model {
    zone: Zone,
    /// The kind of each slot if it is free; None while it is held.
    free: Vec<Option<Kind>>,
    held: Vec<(u32, u8)>,
    /// The blocks that were closed.
    closed: [bool; SLOTS >> MAX_ORDER],
}

impl Model {
    /// A zone from `start` to [`SLOTS`]; slots before it are never free. Without a start, one from 0 that makes its tables as
    /// needed.
    fn new(start: Option<usize>) -> Self {
        let mut free = vec![Some(Kind::Hole); SLOTS];
        free[..start.unwrap_or(0)].fill(None);
        let zone = match start {
            Some(start) => Zone::spanning(start as u32, SLOTS as u32, Kind::Hole),
            None => Zone::growing(SLOTS as u32),
        };
        Self { zone, free, held: vec![], closed: Default::default() }
    }

    /// Compares the zone's and the map's free slots and runs of each block.
    fn check(&self) {
        for (i, block) in self.zone.blocks().iter().enumerate() {
            let (from, to) = self.zone.block_range(i);
            for kind in [Kind::Frame, Kind::Hole] {
                let free = self.free[from as usize..to as usize].iter().filter(|f| **f == Some(kind)).count();
                assert_eq!(block.free(kind) as usize, free, "block {i}");
            }
        }
        for frame in self.zone.start()..self.zone.end() {
            let around = self.zone.free_run_around(frame);
            assert_eq!(around.map(|(kind, ..)| kind), self.free[frame as usize], "frame {frame}");
        }
        let (start, end) = (self.zone.start(), self.zone.end());
        let parts =
            [(Kind::Frame, start, end), (Kind::Hole, start + 7, end.saturating_sub(99)), (Kind::Hole, 700, 701)];
        for (kind, from, to) in parts.into_iter().filter(|(_, from, to)| from < to && *to <= end) {
            let mut found = vec![];
            let (at, looks) = self.zone.free_frames(kind, from, to, usize::MAX, &mut found);
            let words = to.div_ceil(64) - from / 64;
            let all = self.free[from as usize..to as usize].iter().flatten().count();
            assert_eq!(looks, u64::from(words) + all as u64, "a look for 64 frames, and one for each that is free");
            // Read a few at a time, they are the same.
            let (mut few, mut next) = (vec![], from);
            while next < to {
                let (before, had) = (next, few.len());
                (next, _) = self.zone.free_frames(kind, before, to, had + 3, &mut few);
                assert!(next > before && next <= to && few.len() <= had + 3);
            }
            assert_eq!(few, found);
            let free = (from..to).filter(|f| self.free[*f as usize] == Some(kind));
            assert_eq!((at, found), (to, free.collect::<Vec<_>>()), "the map of free frames");
        }
        for kind in [Kind::Frame, Kind::Hole] {
            let all: usize = (0..=MAX_ORDER).map(|o| self.zone.runs(kind, o) << o).sum();
            assert_eq!((all, self.zone.free_slots(kind)), (self.count(kind), self.count(kind)));
        }
    }

    /// Checks that everything that could merge has merged.
    fn check_merged(&self) {
        let zone = &self.zone;
        for frame in zone.start()..zone.end() {
            let Some((kind, order)) = zone.free_run_at(frame).filter(|(_, order)| *order < MAX_ORDER) else { continue };
            let buddy = frame ^ (1 << order);
            let there = (zone.start()..zone.end()).contains(&buddy);
            assert!(!there || zone.free_run_at(buddy) != Some((kind, order)), "{frame} and {buddy}, order {order}");
        }
    }

    fn count(&self, kind: Kind) -> usize {
        self.free.iter().filter(|slot| **slot == Some(kind)).count()
    }

    /// Whether there is a naturally aligned free run of the order, of one kind. With full merging that, and only that, can be
    /// allocated.
    fn has_run(&self, kind: Kind, order: u8) -> bool {
        self.free.chunks(1 << order).any(|run| run.iter().all(|slot| *slot == Some(kind)))
    }

    fn took(&mut self, kind: Kind, slot: u32, order: u8) {
        assert!(slot.is_multiple_of(1 << order));
        for at in slot as usize..slot as usize + (1 << order) {
            assert_eq!(self.free[at].take(), Some(kind), "slot {at} was held, or of the other kind");
        }
        self.held.push((slot, order));
    }

    fn gave(&mut self, kind: Kind, slot: u32, n: usize) {
        for at in slot as usize..slot as usize + n {
            let free = self.is_open(at) || kind == Kind::Frame;
            assert!(core::mem::replace(&mut self.free[at], free.then_some(kind)).is_none());
        }
    }

    fn is_open(&self, slot: usize) -> bool {
        !self.closed[slot >> MAX_ORDER]
    }

    fn take_held(&mut self, index: usize) -> Option<(u32, u8)> {
        (!self.held.is_empty()).then(|| self.held.swap_remove(index % self.held.len()))
    }

    fn take_idle(&mut self, least: u32, most: u32) {
        let wanted = least..=most;
        let frames = |block: &[Option<Kind>]| block.iter().filter(|s| **s == Some(Kind::Frame)).count() as u32;
        let idle = self.free.chunks(1 << MAX_ORDER).filter(|block| block.iter().all(Option::is_some));
        let expected = idle.map(frames).filter(|frames| wanted.contains(frames)).max();
        let found = self.zone.idle_block(wanted);
        let taken = found.map(|block| (block, self.zone.blocks()[block].free(Kind::Frame)));
        assert_eq!(taken.map(|(_, frames)| frames), expected);
        if let Some((block, n)) = taken {
            let first = self.zone.take_idle_block(block);
            let block = &mut self.free[first as usize..][..1 << MAX_ORDER];
            assert_eq!(frames(block), n);
            block.fill(None);
            self.held.push((first, MAX_ORDER));
        }
    }

    fn take_of_block(&mut self, most: usize) {
        let frames = |block: &[Option<Kind>]| block.iter().filter(|s| **s == Some(Kind::Frame)).count();
        let there = self.free.chunks(1 << MAX_ORDER).map(frames).max().unwrap_or(0);
        let mut runs = vec![];
        let found = self.zone.fullest_block();
        assert_eq!(found.is_some(), there > 0);
        let Some(block) = found else { return };
        assert_eq!(self.zone.take_block_frames(block, most, &mut runs), there.min(most));
        assert_eq!(runs.iter().map(|(_, order)| 1 << order).sum::<usize>(), there.min(most));
        assert!(runs.iter().all(|(slot, _)| self.zone.block_of(*slot) == block));
        runs.into_iter().for_each(|(slot, order)| self.took(Kind::Frame, slot, order));
    }

    /// Closes the block of a frame, if there is one yet (seldom).
    fn close(&mut self, frame: usize) {
        if !(self.zone.start() as usize..self.zone.end() as usize).contains(&frame) {
            return;
        }
        let block = self.zone.block_of(frame as u32);
        self.zone.close_block(block);
        assert!(self.zone.blocks()[block].is_closed());
        self.closed[frame >> MAX_ORDER] = true;
        let (from, to) = self.zone.block_range(block);
        let slots = &mut self.free[from as usize..to as usize];
        slots.iter_mut().filter(|slot| **slot == Some(Kind::Hole)).for_each(|slot| *slot = None);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Alloc(kind, order) => {
                let there = self.has_run(kind, order);
                let got = self.zone.alloc(kind, order);
                assert_eq!(got.is_some(), there, "order {order}");
                if let Some(slot) = got {
                    self.took(kind, slot, order);
                }
            }
            Step::AllocUpTo(kind, order) => {
                let best = (0..=order).rev().find(|o| self.has_run(kind, *o));
                let got = self.zone.alloc_up_to(kind, order);
                assert_eq!(got.map(|(_, o)| o), best);
                if let Some((slot, order)) = got {
                    self.took(kind, slot, order);
                }
            }
            Step::AllocTyped(kind, mt, order) => {
                let there = self.has_run(kind, order);
                let got = self.zone.alloc_typed(kind, mt, order);
                assert_eq!(got.is_some(), there, "a fallback to other blocks failed");
                if let Some(slot) = got {
                    self.took(kind, slot, order);
                }
            }
            Step::TakeFrame(kind, frame) => {
                let frame = self.zone.start() as usize + frame % (SLOTS - self.zone.start() as usize);
                let there = self.free[frame] == Some(kind);
                assert_eq!(self.zone.take_frame(kind, frame as u32), there);
                if there {
                    self.took(kind, frame as u32, 0);
                }
            }
            Step::TakeIdle(least, most) => self.take_idle(least, most),
            Step::TakeOfBlock(most) => self.take_of_block(most),
            Step::Close(frame) => self.close(frame),
            Step::SetType(frame, mt) => {
                let Some(block) = frame.checked_rem(self.zone.blocks().len()) else { return };
                self.zone.set_block_type(block, mt);
                assert_eq!(self.zone.blocks()[block].migrate_type(), mt);
            }
            Step::Free(index, kind) => {
                let Some((slot, order)) = self.take_held(index) else { return };
                self.zone.free(kind, slot, order);
                self.gave(kind, slot, 1 << order);
            }
            Step::FreeRun(index, part, first, second) => {
                let Some((slot, order)) = self.take_held(index) else { return };
                let pages = 1usize << order;
                let part = part % (pages + 1);
                self.zone.free_run(first, slot, part);
                self.gave(first, slot, part);
                self.zone.free_run(second, slot + part as u32, pages - part);
                self.gave(second, slot + part as u32, pages - part);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_a_map_of_slots(
        steps in steps(),
        start in prop_oneof![Just(None), Just(Some(0)), Just(Some(1)), (0..600usize).prop_map(Some)],
        ready in prop_oneof![Just(0), Just(1), Just(8), Just(64)],
    ) {
        let mut model = Model::new(start);
        model.zone.keep_ready(ready);
        let start = start.unwrap_or(0);
        for step in steps {
            model.step(step);
            for kind in [Kind::Frame, Kind::Hole] {
                prop_assert_eq!(model.zone.free_slots(kind), model.count(kind));
            }
            prop_assert!(model.zone.ready() <= ready);
        }
        model.check();
        model.zone.coalesce();
        prop_assert_eq!(model.zone.ready(), 0);
        model.check();
        model.check_merged();
        // Everything held comes back as holes and every frame becomes one: whole blocks of 2 MiB are left, except for those that
        // were closed.
        while let Some((slot, order)) = model.take_held(0) {
            model.zone.free(Kind::Hole, slot, order);
        }
        while let Some((slot, order)) = model.zone.alloc_up_to(Kind::Frame, MAX_ORDER) {
            model.zone.free(Kind::Hole, slot, order);
        }
        prop_assert_eq!(model.zone.free_slots(Kind::Hole), (start..SLOTS).filter(|slot| model.is_open(*slot)).count());
        prop_assert_eq!(model.zone.free_slots(Kind::Frame), 0);
        let mut blocks: Vec<_> = core::iter::from_fn(|| model.zone.alloc(Kind::Hole, MAX_ORDER)).collect();
        blocks.sort_unstable();
        let first = (start as u32).next_multiple_of(512);
        let whole = (first..SLOTS as u32).step_by(512).filter(|slot| model.is_open(*slot as usize));
        prop_assert_eq!(blocks, whole.collect::<Vec<_>>());
        let rest = (start..first as usize).filter(|slot| model.is_open(*slot)).count();
        prop_assert_eq!(model.zone.free_slots(Kind::Hole), rest);
    }
}

/// Single frames that come and go are neither split off nor merged; a larger run that needs them can still be allocated.
#[test]
fn single_frames_are_kept_ready() {
    let mut zone = Zone::spanning(0, 512, Kind::Frame);
    zone.keep_ready(16);
    let four: Vec<u32> = (0..4).map(|_| zone.alloc(Kind::Frame, 0).unwrap()).collect();
    four.iter().for_each(|frame| zone.free(Kind::Frame, *frame, 0));
    assert_eq!((zone.ready(), zone.runs(Kind::Frame, 0), zone.free_slots(Kind::Frame)), (4, 4, 512));
    // The frame freed last comes first, as its memory is warm.
    assert_eq!(zone.alloc(Kind::Frame, 0), four.last().copied());
    zone.free(Kind::Frame, four[3], 0);
    let ready = zone.ready();
    assert_eq!((zone.alloc_up_to(Kind::Frame, 0), zone.ready()), (Some((four[3], 0)), ready));
    zone.free(Kind::Frame, four[3], 0);
    let block = zone.alloc(Kind::Frame, 2).unwrap();
    zone.free(Kind::Frame, block, 2);
    assert_eq!(zone.free_run_at(block), Some((Kind::Frame, 2)), "it has not merged");
    assert_eq!(zone.alloc(Kind::Frame, MAX_ORDER), Some(0));
    assert_eq!((zone.ready(), zone.free_slots(Kind::Frame)), (0, 0));
}

#[test]
#[should_panic(expected = "freed twice")]
fn freeing_twice_is_noticed() {
    let mut zone = Zone::new(512);
    let slot = zone.alloc(Kind::Hole, 0).unwrap();
    // Its buddy is kept, so that the first free does not merge the block away.
    assert_eq!(zone.alloc(Kind::Hole, 0), Some(slot ^ 1));
    zone.free(Kind::Frame, slot, 0);
    zone.free(Kind::Frame, slot, 0);
}

/// An unmovable page spoils a block: the next ones go beside it, and movable pages stay away.
#[test]
fn unmovable_frames_share_a_block() {
    let mut zone = Zone::spanning(1, 8 * 512, Kind::Frame);
    let mut tables = vec![];
    for _ in 0..300 {
        tables.push(zone.alloc_typed(Kind::Frame, MigrateType::Unmovable, 0).unwrap());
        let pages: Vec<_> = (0..4).map(|_| zone.alloc(Kind::Frame, 0).unwrap()).collect();
        zone.free(Kind::Frame, pages[0], 0);
    }
    let block = zone.block_of(tables[0]);
    assert_eq!(zone.blocks()[block].migrate_type(), MigrateType::Unmovable);
    assert!(tables.iter().all(|t| zone.block_of(*t) == block), "{tables:?}");
    assert_eq!(zone.blocks().iter().filter(|b| b.migrate_type() == MigrateType::Unmovable).count(), 1);
    assert_eq!(zone.blocks()[block].free(Kind::Frame), 212);
}

/// A block in which little is free is not taken over, only taken from.
#[test]
fn a_block_that_is_mostly_others_keeps_its_type() {
    let mut zone = Zone::spanning(0, 512, Kind::Frame);
    let pages: Vec<_> = (0..300).map(|_| zone.alloc(Kind::Frame, 0).unwrap()).collect();
    let copy = zone.alloc_typed(Kind::Frame, MigrateType::Reclaimable, 0).unwrap();
    assert_eq!(zone.blocks()[0].migrate_type(), MigrateType::Movable);
    zone.free(Kind::Frame, copy, 0);
    pages.iter().for_each(|p| zone.free(Kind::Frame, *p, 0));
    assert!(zone.alloc_typed(Kind::Frame, MigrateType::Reclaimable, 0).is_some());
    assert_eq!(zone.blocks()[0].migrate_type(), MigrateType::Reclaimable);
    // An unmovable frame takes it over, whatever is in it.
    let mut zone = Zone::spanning(0, 512, Kind::Frame);
    (0..500).for_each(|_| assert!(zone.alloc(Kind::Frame, 0).is_some()));
    assert!(zone.alloc_typed(Kind::Frame, MigrateType::Unmovable, 0).is_some());
    assert_eq!(zone.blocks()[0].migrate_type(), MigrateType::Unmovable);
}

#[test]
fn watermarks_are_kept_for_the_order_asked() {
    let mut zone = Zone::spanning(0, 1024, Kind::Frame);
    zone.watermarks = Watermarks { min: 100, low: 200, high: 300 };
    assert!(zone.watermark_ok(Kind::Frame, 9, zone.watermarks.high));
    let first = zone.alloc(Kind::Frame, 9).unwrap();
    // 512 are free: one run of 512 would leave none.
    assert!(!zone.watermark_ok(Kind::Frame, 9, zone.watermarks.min));
    assert!(zone.watermark_ok(Kind::Frame, 7, zone.watermarks.high));
    assert!(zone.watermark_ok(Kind::Frame, 0, 511) && !zone.watermark_ok(Kind::Frame, 0, 512));
    // Enough frames, but none side by side.
    zone.free_run(Kind::Frame, first, 512);
    (0..1024).step_by(2).for_each(|f| assert!(zone.take_frame(Kind::Frame, f)));
    assert!(zone.watermark_ok(Kind::Frame, 0, 300) && !zone.watermark_ok(Kind::Frame, 1, 0));
    assert_eq!((zone.fragmentation(Kind::Frame, 1), zone.fragmentation(Kind::Frame, 0)), (100, 0));
}

/// If several types have an equally large run, the preferred type's is taken. (The story: the last one's was, so movable pages
/// went among unmovable ones.)
#[test]
fn what_can_be_moved_goes_beside_what_can_be_dropped_first() {
    let mut zone = Zone::spanning(0, 3 * 512, Kind::Frame);
    zone.set_block_type(0, MigrateType::Reclaimable);
    zone.set_block_type(1, MigrateType::Unmovable);
    assert_eq!(zone.alloc(Kind::Frame, MAX_ORDER), Some(2 * 512));
    let page = zone.alloc(Kind::Frame, 0).unwrap();
    assert_eq!((zone.block_of(page), zone.blocks()[1].migrate_type()), (0, MigrateType::Unmovable));
}

/// A7: tables are charged. Blocks not begun yet have none; the list of ready frames has its full size from the start.
#[test]
fn tables_are_of_what_was_begun() {
    let mut zone = Zone::growing(4 * 512);
    assert_eq!((zone.metadata_bytes(), zone.free_slots(Kind::Hole)), (0, 4 * 512));
    assert!(zone.alloc(Kind::Hole, 0).is_some());
    // Nine bytes and a bit for each slot, and eight for the block.
    let block = zone.metadata_bytes();
    assert_eq!(block, 512 * 9 + 512 / 8 + 8);
    assert!(zone.alloc(Kind::Hole, 5).is_some());
    assert_eq!(zone.metadata_bytes(), block, "there is room in the first");
    let mut taken = 0;
    for blocks in 2..=4 {
        taken = zone.alloc(Kind::Hole, MAX_ORDER).unwrap();
        assert_eq!(zone.metadata_bytes(), blocks * block);
    }
    zone.keep_ready(100);
    let ready = zone.metadata_bytes() - 4 * block;
    assert!((101 * 8..202 * 8).contains(&ready), "{ready} bytes for 100 frames");
    for n in 0..512 {
        zone.free(Kind::Frame, taken + n as u32, 0);
        // If there are too many, half of them go at once.
        let kept = if n < 100 { n + 1 } else { 50 + (n - 100) % 51 };
        assert_eq!((zone.ready(), zone.metadata_bytes()), (kept, 4 * block + ready), "after {n} frames");
    }
}

/// A frame's user is found from the frame.
#[test]
fn a_user_is_told_by_its_frame() {
    let mut zone = Zone::spanning(1, 512, Kind::Frame);
    let user = |frame: u32| u64::from(frame).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let frames: Vec<_> = (0..100).map(|_| zone.alloc(Kind::Frame, 0).unwrap()).collect();
    frames.iter().for_each(|frame| zone.set_user(*frame, user(*frame)));
    assert!(frames.iter().all(|frame| zone.user(*frame) == user(*frame)));
}

/// Of the runs of a kind, type and order, the one freed last is allocated first.
#[test]
fn the_run_freed_last_comes_first() {
    let mut zone = Zone::spanning(1, 1024, Kind::Frame);
    while zone.alloc(Kind::Frame, 0).is_some() {}
    [8, 600, 4, 1000].into_iter().for_each(|frame| zone.free(Kind::Frame, frame, 2));
    zone.free(Kind::Frame, 100, 1);
    let list = |zone: &Zone, order| zone.list(Kind::Frame, MigrateType::Movable, order).collect::<Vec<_>>();
    assert_eq!((list(&zone, 2), list(&zone, 1), list(&zone, 0)), (vec![1000, 4, 600, 8], vec![100], vec![]));
    assert_eq!(zone.alloc(Kind::Frame, 2), Some(1000));
    assert_eq!(list(&zone, 2), [4, 600, 8]);
}

/// A zone may begin and end anywhere: it has tables for its own frames only, the lowest is allocated first, and no run reaches
/// beyond its end.
#[test]
fn a_zone_may_begin_and_end_inside_a_block() {
    let mut zone = Zone::spanning(1000, 2100, Kind::Frame);
    // Words of 64 frames from 960 to 2112, and four blocks.
    assert_eq!(zone.metadata_bytes(), 1100 * 9 + (2112 - 960) / 8 + 4 * 8);
    assert_eq!([9, 3].map(|order| zone.alloc(Kind::Frame, order)), [Some(1024), Some(1000)]);
    let mut zone = Zone::growing(512 + 100);
    assert_eq!(zone.alloc(Kind::Hole, 9), Some(0));
    assert!(zone.has_run(Kind::Hole, 6) && !zone.has_run(Kind::Hole, 7));
    assert_eq!([9, 7, 6].map(|order| zone.alloc(Kind::Hole, order)), [None, None, Some(512)]);
}

/// Droppable memory takes over a block if half of it is free, and not if less is.
#[test]
fn a_block_is_taken_over_when_half_of_it_is_free() {
    for (pages, taken_over) in [(256, true), (257, false)] {
        let mut zone = Zone::spanning(512, 1024, Kind::Frame);
        (0..pages).for_each(|_| assert!(zone.alloc(Kind::Frame, 0).is_some()));
        assert!(zone.alloc_typed(Kind::Frame, MigrateType::Reclaimable, 0).is_some());
        assert_eq!(zone.blocks()[0].migrate_type() == MigrateType::Reclaimable, taken_over, "{pages} pages");
    }
}

//! The zone against a map of single slots.

use proptest::prelude::*;
use uzswap_mm::zone::{Kind, MAX_ORDER, Zone};

const SLOTS: usize = 2048;

#[derive(Clone, Debug)]
enum Step {
    Alloc(Kind, u8),
    AllocUpTo(Kind, u8),
    /// The run at that index (modulo how many are held), as being of that kind now.
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
        3 => (any::<usize>(), kind()).prop_map(|(i, k)| Step::Free(i, k)),
        2 => (any::<usize>(), any::<usize>(), kind(), kind()).prop_map(|(i, n, a, b)| Step::FreeRun(i, n, a, b)),
    ];
    proptest::collection::vec(step, 1..400)
}

struct Model {
    zone: Zone,
    /// What each slot is when free; None while it is held.
    free: Vec<Option<Kind>>,
    held: Vec<(u32, u8)>,
}

impl Model {
    fn new() -> Self {
        Self { zone: Zone::new(SLOTS), free: vec![Some(Kind::Hole); SLOTS], held: vec![] }
    }

    fn count(&self, kind: Kind) -> usize {
        self.free.iter().filter(|slot| **slot == Some(kind)).count()
    }

    /// Whether a naturally aligned run of the order is free and of one kind. With full merging that, and only that,
    /// can be allocated.
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
            assert!(self.free[at].replace(kind).is_none());
        }
    }

    fn take_held(&mut self, index: usize) -> Option<(u32, u8)> {
        (!self.held.is_empty()).then(|| self.held.swap_remove(index % self.held.len()))
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
    fn agrees_with_a_map_of_slots(steps in steps()) {
        let mut model = Model::new();
        for step in steps {
            model.step(step);
            for kind in [Kind::Frame, Kind::Hole] {
                prop_assert_eq!(model.zone.free_slots(kind), model.count(kind));
            }
        }
        // Everything held comes back as holes, every frame becomes one: what is left is whole blocks of 2 MiB.
        while let Some((slot, order)) = model.take_held(0) {
            model.zone.free(Kind::Hole, slot, order);
        }
        while let Some((slot, order)) = model.zone.alloc_up_to(Kind::Frame, MAX_ORDER) {
            model.zone.free(Kind::Hole, slot, order);
        }
        prop_assert_eq!(model.zone.free_slots(Kind::Hole), SLOTS);
        prop_assert_eq!(model.zone.free_slots(Kind::Frame), 0);
        let mut blocks: Vec<_> = core::iter::from_fn(|| model.zone.alloc(Kind::Hole, MAX_ORDER)).collect();
        blocks.sort_unstable();
        prop_assert_eq!(blocks, (0..SLOTS as u32).step_by(512).collect::<Vec<_>>());
        prop_assert_eq!(model.zone.alloc(Kind::Hole, 0), None);
    }
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

//! The pool's allocator, compared with a model that knows nothing of slabs: a map of ranges.

mod compaction;

use proptest::prelude::*;
use std::collections::BTreeMap;
use uzswap_mm::zone::{BLOCK_FRAMES, Zone};
use uzswap_mm::zsmalloc::{Compacted, Freed, Handle, MAX_OBJECT, Relocate, ZsPool, class_sizes};

/// A step: allocate that many bytes, free the live object at that index (modulo how many there are), or compact slabs or empty
/// page blocks with that budget, while one object in so many (0: none) refuses to move.
#[derive(Clone, Debug)]
enum Step {
    Alloc(usize),
    Free(usize),
    Compact(usize, usize),
    Evacuate(usize, usize),
}

fn len() -> impl Strategy<Value = usize> {
    // From 68 KiB on an object has a slab of its own.
    prop_oneof![4 => 1..=4096usize, 2 => 1..=70_000usize, 1 => 1..=MAX_OBJECT, 2 => 1..=128usize, 1 => Just(4096), 1 => Just(65_536)]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Three kinds of phase: growing, shrinking, even.
    let phase = (1..=3u32, 1..=3u32).prop_flat_map(|(allocs, frees)| {
        let step = prop_oneof![
            allocs => len().prop_map(Step::Alloc),
            frees => any::<usize>().prop_map(Step::Free),
            1 => (0..200usize, 0..6usize).prop_map(|(budget, every)| Step::Compact(budget, every / 2)),
            1 => (0..400usize, 0..6usize).prop_map(|(budget, every)| Step::Evacuate(budget, every / 2)),
        ];
        proptest::collection::vec(step, 1..200)
    });
    proptest::collection::vec(phase, 1..6).prop_map(|phases| phases.concat())
}

/// The pool, and what it should report.
struct Model {
    pool: ZsPool,
    capacity: usize,
    /// Live objects: start to (usable length, handle).
    live: BTreeMap<usize, (usize, Handle)>,
    handles: Vec<Handle>,
    /// For each page, how many live objects touch it.
    pages: Vec<u32>,
    used: usize,
    /// Pages that were handed out and not given back.
    held: std::collections::BTreeSet<usize>,
}

impl Model {
    fn new(capacity: usize) -> Self {
        let pool = ZsPool::new(capacity);
        let pages = vec![0; capacity / 4096];
        Self { pool, capacity, live: BTreeMap::new(), handles: vec![], pages, used: 0, held: Default::default() }
    }

    fn alloc(&mut self, len: usize) -> bool {
        let held_before = self.pool.held_bytes();
        let Some(handle) = self.pool.alloc(len) else {
            assert_eq!(self.pool.held_bytes(), held_before);
            return false;
        };
        assert_eq!(Handle::from_raw(handle.raw()), handle);
        let (start, usable) = (handle.offset(), self.pool.usable(handle));
        assert!(usable >= len && start.is_multiple_of(32) && start + usable <= self.capacity);
        let class = class_sizes().find(|&size| size >= len);
        let fitting = class.unwrap_or(len.next_multiple_of(4096));
        let in_small_pool = held_before < 8 << 20 && class_sizes().any(|size| size == usable && size <= len + len / 2);
        assert!(usable == fitting || in_small_pool, "{usable} bytes for {len}");
        let before = self.live.range(..start + usable).next_back();
        assert!(before.is_none_or(|(&other, &(len, _))| other + len <= start), "objects overlap");
        self.live.insert(start, (usable, handle));
        self.handles.push(handle);
        for page in start / 4096..(start + usable).div_ceil(4096) {
            self.pages[page] += 1;
            self.held.insert(page);
        }
        self.used += usable;
        self.check();
        true
    }

    fn free(&mut self, index: usize) {
        let handle = self.handles.swap_remove(index);
        let (usable, _) = self.live.remove(&handle.offset()).unwrap();
        let start = handle.offset();
        for page in start / 4096..(start + usable).div_ceil(4096) {
            self.pages[page] -= 1;
        }
        self.used -= usable;
        let (held, slab) = (self.pool.held_bytes(), self.pool.slab_of(handle));
        assert!(slab.offset <= start && start + usable <= slab.offset + slab.len);
        match self.pool.free(handle) {
            Some(Freed { offset, len }) => {
                assert_eq!(slab, Freed { offset, len }, "what goes with the last object");
                assert!(offset.is_multiple_of(4096) && len.is_multiple_of(4096) && len > 0);
                assert!((offset..offset + len).contains(&start) && start + usable <= offset + len);
                for page in offset / 4096..(offset + len) / 4096 {
                    assert_eq!(self.pages[page], 0, "gave back a page in use");
                    self.held.remove(&page);
                }
                assert_eq!(self.pool.held_bytes(), held - len);
            }
            None => assert_eq!(self.pool.held_bytes(), held),
        }
        self.check();
    }

    fn compact(&mut self, budget: usize, every: usize) {
        let could = self.pool.compactable_bytes();
        let mut mover = Mover { events: vec![], every, asked: 0 };
        let held = self.pool.held_bytes();
        let done = self.pool.compact(budget, &mut mover);
        assert_eq!(self.pool.held_bytes(), held - done.freed);
        self.follow(budget, &done, mover);
        if every == 0 && done.moved < budget {
            assert_eq!(self.pool.compactable_bytes(), 0, "stopped early, with {could} to gain");
        }
    }

    fn evacuate(&mut self, budget: usize, every: usize) -> Compacted {
        let mut mover = Mover { events: vec![], every, asked: 0 };
        let (before, _) = self.pool.page_blocks();
        let done = self.pool.evacuate(budget, &mut mover);
        let (blocks, _) = self.pool.page_blocks();
        assert_eq!(blocks, before - done.blocks, "a block is emptied and none is begun");
        self.follow(budget, &done, mover);
        done
    }

    /// Repeats what the pool did, step by step: an object may move twice, if the slab it moved to is drained later, and pages
    /// that were given back may be taken again.
    fn follow(&mut self, budget: usize, done: &Compacted, mover: Mover) {
        let moved = mover.events.iter().filter(|e| matches!(e, Event::Moved(..))).count();
        assert_eq!((done.moved, done.refused), (moved, mover.asked - moved));
        assert!(mover.asked <= budget + 127, "{} objects for a budget of {budget}", mover.asked);
        for event in mover.events {
            match event {
                Event::Moved(from, to, len) => self.moved(from, to, len),
                Event::Freed(Freed { offset, len }) => {
                    for page in offset / 4096..(offset + len) / 4096 {
                        assert_eq!(self.pages[page], 0, "gave back a page in use");
                        self.held.remove(&page);
                    }
                }
            }
        }
        assert!(self.live.values().all(|(len, handle)| self.pool.usable(*handle) == *len));
        self.check();
    }

    fn moved(&mut self, from: Handle, to: Handle, len: usize) {
        let (usable, _) = self.live.remove(&from.offset()).expect("what moved was live");
        assert_eq!(usable, len);
        assert!(self.live.range(..to.offset() + len).next_back().is_none_or(|(at, (n, _))| at + n <= to.offset()));
        self.live.insert(to.offset(), (len, to));
        *self.handles.iter_mut().find(|h| **h == from).unwrap() = to;
        for page in to.offset() / 4096..(to.offset() + len).div_ceil(4096) {
            self.pages[page] += 1;
            self.held.insert(page);
        }
        for page in from.offset() / 4096..(from.offset() + len).div_ceil(4096) {
            self.pages[page] -= 1;
        }
    }

    fn check(&self) {
        assert_eq!(self.pool.used_bytes(), self.used);
        // A slab may hold pages that no object has touched yet, but not the other way round.
        assert!(self.pool.held_bytes() >= self.held.len() * 4096);
        assert!(self.pool.held_bytes() <= self.capacity && self.pool.held_bytes() >= self.used);
    }
}

enum Event {
    Moved(Handle, Handle, usize),
    Freed(Freed),
}

struct Mover {
    events: Vec<Event>,
    every: usize,
    asked: usize,
}

impl Relocate for Mover {
    fn relocate(&mut self, from: Handle, to: Handle, len: usize) -> bool {
        assert!(from != to && from.offset().abs_diff(to.offset()) >= len, "source and target overlap");
        self.asked += 1;
        if self.every > 0 && self.asked.is_multiple_of(self.every) {
            return false;
        }
        self.events.push(Event::Moved(from, to, len));
        true
    }

    fn freed(&mut self, pages: Freed) {
        self.events.push(Event::Freed(pages));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_a_map_of_ranges(steps in steps(), capacity in prop_oneof![Just(1 << 20), Just(64 << 20)]) {
        let mut model = Model::new(capacity);
        for step in steps {
            match step {
                Step::Alloc(len) => { model.alloc(len); }
                Step::Free(_) if model.handles.is_empty() => {}
                Step::Free(which) => model.free(which % model.handles.len()),
                Step::Compact(budget, every) => model.compact(budget, every),
                Step::Evacuate(budget, every) => drop(model.evacuate(budget, every)),
            }
        }
        while !model.handles.is_empty() {
            model.free(model.handles.len() / 2);
        }
        prop_assert_eq!(model.pool.held_bytes(), 0);
        prop_assert_eq!(model.pool.used_bytes(), 0);
    }
}

#[test]
fn classes_are_close_and_end_at_raw_sizes() {
    let sizes: Vec<_> = class_sizes().collect();
    assert!(sizes.len() < 140, "{} classes", sizes.len());
    assert_eq!((sizes[0], *sizes.last().unwrap()), (32, 69_632));
    for raw in [4096, 8192, 16_384, 32_768, 65_536] {
        assert!(sizes.contains(&raw), "{raw}");
    }
    for pair in sizes.windows(2) {
        // Widening a class to divide its slab moves it up a little, never far.
        assert!(pair[1] > pair[0] && (pair[1] <= pair[0] + 32 || pair[1] * 100 <= pair[0] * 110), "{pair:?}");
    }
}

#[test]
fn little_is_lost_in_tails_and_books() {
    for len in
        [40, 100, 700, 1300, 2000, 3000, 4096, 9000, 21_000, 40_000, 65_536, 69_632, 200_000, 700_000, MAX_OBJECT]
    {
        let mut pool = ZsPool::new(1 << 30);
        let count = (64 << 20) / len;
        for _ in 0..count {
            pool.alloc(len).unwrap();
        }
        let (held, used) = (pool.held_bytes(), pool.used_bytes());
        assert!(held * 100 <= used * 104, "{len}: {held} for {used}");
        assert!(pool.metadata_bytes() * 100 <= held * 3, "{len}: books of {}", pool.metadata_bytes());
        // A7: at least nine bytes of each page are charged, and 32 of each slab, which has 32 pages or one object.
        let slabs = if len > 69_632 { count } else { held / 4096 / 32 };
        assert!(pool.metadata_bytes() >= held / 4096 * 9 + slabs * 32, "{len}: books of {}", pool.metadata_bytes());
    }
}

/// A7: an empty pool is charged for its lookup tables. Slabs that go leave their entries to later ones. The entries of slabs are
/// most of the books, so they grow by an eighth at a time.
#[test]
fn books_are_no_larger_than_they_must_be() {
    let mut pool = ZsPool::new(1 << 30);
    let empty = pool.metadata_bytes();
    // Itself, its zone, and for each class four list heads and its counters.
    let (zone, classes) = (Zone::growing(1 << 18).metadata_bytes(), class_sizes().count());
    let least = size_of::<ZsPool>() + zone + classes * 24;
    assert!((least..least + 64).contains(&empty), "{empty} bytes, {zone} of the zone");
    for _ in 0..100_000 {
        let handle = pool.alloc(4096).unwrap();
        pool.free(handle).unwrap();
    }
    let churned = pool.metadata_bytes();
    assert!(churned - empty < 16 << 10, "{churned} bytes of books after churn, {empty} before");
    // The same number of pages, in many slabs and in few.
    let books = |len: usize| {
        let mut pool = ZsPool::new(1 << 30);
        assert!((0..17 * MAX_OBJECT / len).all(|_| pool.alloc(len).is_some()));
        pool.metadata_bytes()
    };
    let (slabs, differ) = (17 * MAX_OBJECT / 4096, books(4096) - books(MAX_OBJECT));
    assert!((slabs * 32 - 4096..slabs * 36 + 4096).contains(&differ), "{differ} bytes for {slabs} slabs");
}

/// A size above what can be addressed is cut down. (2^32 pages would be none, in 32 bits.)
#[test]
fn a_pool_may_be_asked_to_be_larger_than_it_can_be() {
    assert!(ZsPool::new(1 << 44).alloc(100).is_some());
}

#[test]
#[should_panic(expected = "object of 0 bytes")]
fn nothing_has_no_place() {
    ZsPool::new(1 << 20).alloc(0);
}

#[test]
#[should_panic(expected = "object of 2097153 bytes")]
fn what_is_larger_than_a_page_block_has_no_place() {
    ZsPool::new(1 << 30).alloc(MAX_OBJECT + 1);
}

#[test]
fn from_the_largest_class_on_objects_take_whole_pages() {
    for (len, usable) in [(69_631, 69_632), (69_632, 69_632), (69_633, 73_728), (73_729, 77_824)] {
        let mut pool = ZsPool::new(1 << 20);
        let handle = pool.alloc(len).unwrap();
        assert_eq!((pool.usable(handle), pool.slab_of(handle).len), (usable, usable), "{len}");
    }
}

/// A small pool uses a free place of another class that is up to half as large again as needed.
#[test]
fn a_small_pool_takes_places_of_the_next_class() {
    for (len, usable) in [(64, 96), (63, 64)] {
        let mut pool = ZsPool::new(1 << 20);
        pool.alloc(96).unwrap();
        let handle = pool.alloc(len).unwrap();
        assert_eq!(pool.usable(handle), usable, "{len} bytes");
    }
}

#[test]
fn a_full_pool_refuses_and_goes_on_after_a_free() {
    let mut model = Model::new(1 << 20);
    while model.alloc(65_536) {}
    assert_eq!(model.handles.len(), 16);
    assert!(!model.alloc(1));
    let hole = model.handles[7].offset();
    model.free(7);
    assert!(model.alloc(1));
    assert_eq!(model.handles.last().unwrap().offset(), hole, "the lowest free run is used first");
}

#[test]
fn buddies_merge_and_the_rest_of_a_run_is_free() {
    let mut model = Model::new(1 << 20);
    for _ in 0..256 {
        assert!(model.alloc(4096));
    }
    // Eight aligned pages, in an order that merges to the right, to the left and on both sides.
    for page in [100, 101, 99, 103, 102, 96, 98, 97] {
        let index = model.handles.iter().position(|handle| handle.offset() == page * 4096).unwrap();
        model.free(index);
    }
    assert!(model.alloc(5 * 4096));
    assert_eq!(model.handles.last().unwrap().offset(), 96 * 4096);
    for _ in 0..3 {
        assert!(model.alloc(4096), "three pages are left of the eight");
    }
    assert!(!model.alloc(4096));
}

#[test]
fn the_fullest_slab_is_filled_first() {
    let mut pool = ZsPool::new(1 << 20);
    let handles: Vec<_> = (0..256).map(|_| pool.alloc(32).unwrap()).collect();
    // Two slabs of 128: leave 100 in the first and 10 in the second.
    for handle in handles[..28].iter().chain(&handles[128..246]) {
        assert_eq!(pool.free(*handle), None);
    }
    assert!((0..28).all(|_| pool.alloc(32).unwrap().offset() < 4096));
    assert!(pool.alloc(32).unwrap().offset() >= 4096);
}

/// Fullness is known by quarters of a slab; the fuller slab is filled first.
#[test]
fn slabs_that_differ_by_a_quarter_are_told_apart() {
    for quarter in 1..4 {
        let mut pool = ZsPool::new(1 << 20);
        let handles: Vec<_> = (0..256).map(|_| pool.alloc(32).unwrap()).collect();
        let (more, fewer) = (32 * quarter + 1, 32 * quarter - 1);
        for handle in handles[more..128].iter().chain(&handles[128 + fewer..]) {
            assert_eq!(pool.free(*handle), None);
        }
        assert!(pool.alloc(32).unwrap().offset() < 4096, "{more} in the first slab, {fewer} in the second");
    }
}

/// The story: each of thirty small processes had a pool that was half empty. A pool of 0.6 MiB has objects of a hundred sizes,
/// and each size had a slab of its own.
#[test]
fn a_small_pool_is_dense() {
    let mut seed = 7u64;
    let mut random = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) as usize
    };
    for (objects, percent) in [(200, 55), (500, 65), (2000, 75)] {
        let mut model = Model::new(64 << 20);
        let mut lens = Vec::new();
        for i in 0..objects * 4 {
            if i >= objects {
                let index = random() % objects;
                model.free(index);
                lens.swap_remove(index);
            }
            // Three of five are pages, the others four pages compressed as one.
            let len = if random() % 5 < 3 { 200 + random() % 2600 } else { 2000 + random() % 6000 };
            assert!(model.alloc(len));
            lens.push(len);
        }
        let (len, held) = (lens.iter().sum::<usize>(), model.pool.held_bytes());
        assert!(len * 100 >= held * percent, "{objects}: {len} bytes in {held}");
    }
}

/// The story: slabs kept all their pages until their last object went, so a pool from which nine of ten objects had been freed
/// still held nearly everything.
#[test]
fn after_churn_compaction_leaves_a_dense_pool() {
    let mut model = Model::new(256 << 20);
    let mut seed = 7u64;
    let mut random = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) as usize
    };
    for _ in 0..60_000 {
        model.alloc(200 + random() % 3900);
    }
    for _ in 0..54_000 {
        model.free(random() % model.handles.len());
    }
    let (used, held) = (model.pool.used_bytes(), model.pool.held_bytes());
    assert!(used * 100 < held * 50, "no churn to speak of: {used} of {held}");
    let could = model.pool.compactable_bytes();
    while model.pool.compactable_bytes() > 0 {
        model.compact(100, 0);
    }
    let after = model.pool.held_bytes();
    assert_eq!(held - after, could);
    assert!(used * 100 >= after * 90, "{used} bytes used of {after} held");
    assert_eq!(model.pool.used_bytes(), used);
}

/// The story: full slabs stayed where they were, however few, so a pool that had once been large stayed in all its page blocks.
#[test]
fn page_blocks_are_emptied_until_half_is_in_use() {
    let mut model = Model::new(256 << 20);
    for _ in 0..16_384 {
        assert!(model.alloc(4096));
    }
    assert!(!model.pool.may_be_sparse());
    // Each slab is one page and one object: nothing for `compact` to do.
    let mut index = 0;
    model.handles.clone().into_iter().filter(|handle| handle.offset() / 4096 % 7 != 0).for_each(|handle| {
        index = model.handles.iter().position(|h| *h == handle).unwrap_or(index);
        model.free(index);
    });
    assert_eq!((model.pool.compactable_bytes(), model.pool.page_blocks().0), (0, 32));
    assert!(model.pool.may_be_sparse(), "else nobody would look");
    let held = model.pool.held_bytes();
    let (mut emptied, mut calls) = (0, 0);
    loop {
        let done = model.evacuate(100, 0);
        if done.moved == 0 {
            break;
        }
        (emptied, calls) = (emptied + done.blocks, calls + 1);
    }
    let (blocks, free) = model.pool.page_blocks();
    assert!(blocks <= 10 && free * 2 <= blocks * BLOCK_FRAMES as usize, "{free} pages are free in {blocks} blocks");
    assert_eq!((emptied + blocks, model.pool.held_bytes()), (32, held));
    assert!(calls > emptied / 2, "a call is bounded by its budget");
}

// Panics abort in this workspace's profiles, so a bad handle is tried in a child: the same binary, one test.
#[test]
fn a_handle_that_is_not_allocated_panics() {
    const WHICH: &str = "UZSWAP_TEST_BAD_HANDLE";
    if let Ok(which) = std::env::var(WHICH) {
        let mut pool = ZsPool::new(1 << 20);
        let handle = pool.alloc(64).unwrap();
        pool.alloc(64).unwrap();
        match which.as_str() {
            "none" => return,
            "twice" => drop((pool.free(handle), pool.free(handle))),
            "inside" => drop(pool.free(Handle::from_raw(handle.raw() + 1))),
            "beyond" => drop(pool.free(Handle::from_raw(u32::MAX))),
            other => unreachable!("{other}"),
        }
        return;
    }
    for (which, passes) in [("none", true), ("twice", false), ("inside", false), ("beyond", false)] {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "zsmalloc::a_handle_that_is_not_allocated_panics"])
            .env(WHICH, which)
            .output()
            .unwrap();
        assert_eq!(child.status.success(), passes, "{which}");
    }
}

//! The page table, compared with an ordered map; and the packing of its entries.

use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use uzswap_mm::pagemap::{PageMap, PageMapWriter, PageState, SOFT_DIRTY, Tier, WRITE_PROTECTED};
use uzswap_mm::pagetable::{
    HINT_RANDOM, HINT_SEQUENTIAL, HINT_WRITTEN, LEAF_PAGES, PageTable, Pte, STRETCH_PAGES, Tag, next_eviction,
};

/// Pages of a lower node (64 leaves), and of an upper one.
const LOWER_PAGES: u64 = 64 * LEAF_PAGES;
const UPPER_PAGES: u64 = 64 * 64 * LOWER_PAGES;
/// Pages of the address space.
const END: u64 = 1 << 35;

#[derive(Clone, Debug)]
enum Step {
    Set(u64, Pte),
    SetRun(u64, usize, Pte),
    Clear(u64, u64),
    Hint(u64, u8, u8),
    Clean(u64, bool),
    Protect(u64, bool),
}

/// Pages around the borders of leaves and directories, and at both ends.
fn vpn() -> impl Strategy<Value = u64> {
    let near = prop_oneof![
        Just(1200),
        Just(LEAF_PAGES),
        Just(LOWER_PAGES),
        Just(3 * LOWER_PAGES + 7 * LEAF_PAGES),
        Just(UPPER_PAGES),
        Just(5 * UPPER_PAGES + 2 * LOWER_PAGES),
        Just(END - UPPER_PAGES),
        Just(END - 1200)
    ];
    (near, 0..1200u64, any::<bool>())
        .prop_map(|(at, by, up)| if up { at + by } else { at.saturating_sub(by) })
        .prop_map(|vpn| vpn.min(END - 1))
}

fn tag() -> impl Strategy<Value = Tag> {
    prop_oneof![
        Just(Tag::Resident),
        Just(Tag::Staged),
        Just(Tag::Compressed),
        Just(Tag::Zero),
        Just(Tag::Busy),
        Just(Tag::Poisoned)
    ]
}

fn pte() -> impl Strategy<Value = Pte> {
    prop_oneof![
        6 => (tag(), any::<u32>()).prop_map(|(tag, aux)| Pte::new(tag, aux)),
        2 => (tag(), any::<u32>(), any::<u32>()).prop_map(|(tag, aux, copy)| Pte::new(tag, aux).with_copy(copy)),
        2 => (any::<u32>(), 0..512usize, tier()).prop_map(|(handle, i, tier)| Pte::compressed(handle, i, 0).packed(tier)),
        1 => Just(Pte::NONE),
    ]
}

fn tier() -> impl Strategy<Value = Tier> {
    prop_oneof![Just(Tier::Warm), Just(Tier::Dense), Just(Tier::Raw)]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let range = prop_oneof![
        4 => (vpn(), 0..2000u64).prop_map(|(from, len)| (from, (from + len).min(END))),
        1 => (vpn(), vpn()).prop_map(|(a, b)| (a.min(b), a.max(b))),
        1 => Just((0, END)),
    ];
    let step = prop_oneof![
        10 => (vpn(), pte()).prop_map(|(vpn, pte)| Step::Set(vpn, pte)),
        2 => (vpn(), 1..600usize, (tag(), any::<u32>(), tier())).prop_map(|(vpn, n, (tag, aux, tier))| {
            let pte = Pte::new(tag, aux);
            Step::SetRun(vpn, n.min((END - vpn) as usize), if tag == Tag::Compressed { pte.packed(tier) } else { pte })
        }),
        1 => range.prop_map(|(from, to)| Step::Clear(from, to)),
        1 => (vpn(), 0..8u8, 0..8u8).prop_map(|(vpn, set, clear)| Step::Hint(vpn, set, clear)),
        5 => (vpn(), any::<bool>()).prop_map(|(vpn, clean)| Step::Clean(vpn, clean)),
        5 => (vpn(), any::<bool>()).prop_map(|(vpn, protected)| Step::Protect(vpn, protected)),
    ];
    proptest::collection::vec(step, 1..200)
}

/// The first published page: only pages from here on are.
const FIRST: u64 = 1000;

/// What the table should hold.
#[derive(Default)]
struct Model {
    entries: BTreeMap<u64, Pte>,
    clean: BTreeSet<u64>,
    protected: BTreeSet<u64>,
}

impl Model {
    fn get(&self, vpn: u64) -> Pte {
        self.entries.get(&vpn).copied().unwrap_or(Pte::NONE)
    }

    /// Does a step with both, and compares the table's answer.
    fn step(&mut self, table: &mut PageTable, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Set(vpn, pte) => {
                table.set(vpn, pte);
                if pte == Pte::NONE {
                    self.entries.remove(&vpn);
                    self.clean.remove(&vpn);
                    self.protected.remove(&vpn);
                } else {
                    self.entries.insert(vpn, pte);
                }
                prop_assert_eq!(table.get(vpn), pte);
            }
            Step::SetRun(vpn, n, pte) => {
                let entry = |i: usize| if i.is_multiple_of(3) { pte } else { Pte::new(Tag::Resident, i as u32) };
                table.set_run(vpn, n, entry);
                self.entries.extend((0..n).map(|i| (vpn + i as u64, entry(i))));
            }
            Step::Clear(from, to) => {
                let mut gone = vec![];
                table.clear(from, to, |vpn, pte| gone.push((vpn, pte)));
                let want: Vec<_> = self.entries.range(from..to).map(|(vpn, pte)| (*vpn, *pte)).collect();
                prop_assert_eq!(gone, want, "clear of {}..{}", from, to);
                self.entries.retain(|vpn, _| !(from..to).contains(vpn));
                self.clean.retain(|vpn| !(from..to).contains(vpn));
                self.protected.retain(|vpn| !(from..to).contains(vpn));
            }
            Step::Clean(vpn, is) => {
                table.set_clean(vpn, is);
                if is {
                    self.clean.insert(vpn)
                } else {
                    self.clean.remove(&vpn)
                };
            }
            Step::Protect(vpn, is) => {
                table.set_protected(vpn, is);
                if is {
                    self.protected.insert(vpn)
                } else {
                    self.protected.remove(&vpn)
                };
            }
            Step::Hint(vpn, set, clear) => {
                let before = table.hints(vpn);
                table.hint(vpn, set, clear);
                // One byte for the block of 64 KiB; entries are untouched, as the final comparison shows.
                for page in [vpn & !15, vpn | 15] {
                    prop_assert_eq!(table.hints(page), (before & !clear) | set);
                }
            }
        }
        Ok(())
    }

    /// Compares everything in the table and in its page map.
    fn agrees(&self, table: &PageTable, map: &PageMap<'_>, soft_dirty: bool) -> Result<(), TestCaseError> {
        let mut all = vec![];
        table.for_each(|vpn, pte| all.push((vpn, pte)));
        prop_assert_eq!(all, self.entries.iter().map(|(vpn, pte)| (*vpn, *pte)).collect::<Vec<_>>());
        let raw = self.entries.values().filter(|pte| pte.state().tier() == Tier::Raw).count();
        prop_assert_eq!(table.raw_pages(), raw);
        for page in 0..map.pages() {
            let pte = self.get(FIRST + page);
            let written = soft_dirty && pte != Pte::NONE && !self.clean.contains(&(FIRST + page));
            let protects = self.protected.contains(&(FIRST + page));
            let bits = if written { SOFT_DIRTY } else { 0 } | if protects { WRITE_PROTECTED } else { 0 };
            let state = PageState(pte.state().0 | bits);
            prop_assert_eq!(map.get(page), state, "page {} of the map", page);
        }
        prop_assert!(map.sequence().is_multiple_of(2));
        prop_assert!(self.clean.iter().all(|vpn| table.is_clean(*vpn)));
        let (mut found, mut at) = (Vec::new(), 0);
        while let Some(vpn) = table.next_protected(at) {
            found.push(vpn);
            at = vpn + 1;
        }
        prop_assert_eq!(found, self.protected.iter().copied().collect::<Vec<_>>());
        let (mut used, mut at) = (Vec::new(), 0);
        while let Some(vpn) = table.next_used(at) {
            prop_assert!(table.next_known(at).is_some_and(|known| (at..=vpn).contains(&known)));
            used.push(vpn);
            at = vpn + 1;
        }
        prop_assert_eq!(used, self.entries.keys().copied().collect::<Vec<_>>());
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_a_map(steps in steps(), probes in proptest::collection::vec(vpn(), 20), soft_dirty in any::<bool>()) {
        let (mut table, mut model) = (PageTable::new(), Model::default());
        let words: &'static [AtomicU64] = Box::leak((0..128).map(|_| AtomicU64::new(0)).collect());
        let map = PageMapWriter::new(Box::leak(Box::new(AtomicU64::new(0))), words, 1021);
        table.publish(map, FIRST);
        if soft_dirty {
            table.publish_soft_dirty();
        }
        for step in steps {
            model.step(&mut table, step)?;
        }
        model.agrees(&table, &map, soft_dirty)?;
        for vpn in probes {
            prop_assert_eq!(table.get(vpn), model.get(vpn));
            prop_assert_eq!(table.is_clean(vpn), model.clean.contains(&vpn));
        }
    }

    #[test]
    fn entries_keep_their_parts(tag in tag(), aux in 0..1u32 << 26, handle in any::<u32>()) {
        let plain = Pte::new(tag, aux);
        prop_assert_eq!((plain.tag(), plain.aux(), plain.copy()), (tag, aux, None));
        let kept = plain.with_copy(handle);
        prop_assert_eq!((kept.tag(), kept.aux(), kept.copy()), (tag, aux, Some(handle)));
        // The last copy named counts.
        prop_assert_eq!(kept.with_copy(!handle).copy(), Some(!handle));
    }

    #[test]
    fn compressed_entries_keep_their_parts(handle in any::<u32>(), index in 0..512usize, at in 0..1u32 << 21) {
        // The time of eviction is kept to 16 pages.
        let pte = Pte::compressed(handle, index, at);
        prop_assert_eq!(pte.tag(), Tag::Compressed);
        let at = at & !15;
        prop_assert_eq!((pte.handle(), pte.index(), pte.evicted_at(), pte.copy()), (handle, index, at, None));
        for tier in [Tier::Warm, Tier::Dense, Tier::Raw] {
            let packed = pte.packed(Tier::Dense).packed(tier);
            prop_assert_eq!(packed.state().tier(), tier);
            let disk = packed.on_disk(!handle);
            prop_assert_eq!((disk.tag(), disk.handle(), disk.state().tier()), (Tag::Disk, !handle, Tier::Disk));
            let back = disk.back_in_pool(handle);
            prop_assert_eq!(back, packed);
            prop_assert_eq!((back.handle(), back.index(), back.evicted_at(), back.copy()), (handle, index, at, None));
        }
    }

    #[test]
    fn aux_is_cut_to_its_bits(tag in tag(), aux in any::<u32>()) {
        let pte = Pte::new(tag, aux);
        prop_assert_eq!((pte.tag(), pte.aux(), pte.copy()), (tag, aux & ((1 << 26) - 1), None));
    }
}

/// Bytes of a table that has its root but no page.
fn with_root(table: &mut PageTable) -> usize {
    table.set(1, Pte::new(Tag::Zero, 0));
    table.clear(1, 2, |_, _| ());
    table.metadata_bytes()
}

/// A7: everything that the table takes is counted: its root of 2048 nodes, and for a page three nodes of 64 places and a leaf.
#[test]
fn the_root_the_nodes_and_the_leaves_are_counted() {
    let mut table = PageTable::new();
    let none = table.metadata_bytes();
    let root = with_root(&mut table) - none;
    assert!((2048 * 8..2048 * 8 + 256).contains(&root), "{root}");
    table.set(5, Pte::new(Tag::Zero, 0));
    let page = table.metadata_bytes() - none - root;
    assert!((4 * 64 * 8..4 * 64 * 8 + 64).contains(&page), "{page}");
}

/// Pages known before the table is published are published too, but none beyond the map.
#[test]
fn what_is_known_already_is_published_too() {
    let words: &'static [AtomicU64] = Box::leak((0..2).map(|_| AtomicU64::new(0)).collect());
    let map = PageMapWriter::new(Box::leak(Box::new(AtomicU64::new(0))), words, 16);
    let mut table = PageTable::new();
    let resident = Pte::new(Tag::Resident, 1);
    let beyond = [FIRST - 1, FIRST + 16];
    [FIRST, FIRST + 15].into_iter().chain(beyond).for_each(|vpn| table.set(vpn, resident));
    table.set_clean(FIRST + 15, true);
    table.publish(map, FIRST);
    let states = || [0, 1, 15].map(|page| map.get(page));
    let plain = resident.state();
    assert_eq!(states(), [plain, PageState(0), plain]);
    table.publish_soft_dirty();
    assert_eq!(states(), [PageState(plain.0 | SOFT_DIRTY), PageState(0), plain]);
    beyond.into_iter().for_each(|vpn| table.clear(vpn, vpn + 1, |_, _| ()));
    assert_eq!(states(), [PageState(plain.0 | SOFT_DIRTY), PageState(0), plain]);
}

#[test]
fn memory_is_used_where_there_are_pages_only() {
    let mut table = PageTable::new();
    assert!(table.metadata_bytes() < 256);
    table.set(LOWER_PAGES * 5, Pte::NONE);
    assert!(table.metadata_bytes() < 256, "nothing was stored");
    let empty = with_root(&mut table);
    for vpn in LOWER_PAGES - LEAF_PAGES..LOWER_PAGES + LEAF_PAGES {
        table.set(vpn, Pte::new(Tag::Zero, 0));
    }
    assert!(table.metadata_bytes() > empty);
    table.clear(LOWER_PAGES - LEAF_PAGES, LOWER_PAGES + LEAF_PAGES, |_, _| ());
    assert_eq!(table.metadata_bytes(), empty, "both leaves are gone, and the nodes");
    assert_eq!(table.get(END + 1), Pte::NONE);
}

/// The story: V8 maps its heap in pieces of 256 KiB at scattered addresses, and unmaps them again. Each left a leaf and an inner
/// node behind, as only whole leaves were freed, and nodes never.
#[test]
fn pieces_that_come_and_go_leave_nothing_behind() {
    let mut table = PageTable::new();
    let empty = with_root(&mut table);
    for i in 0..2_000u64 {
        let first = i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (END / 64) * 64;
        (first..first + 64).for_each(|vpn| table.set(vpn, Pte::new(Tag::Resident, 7)));
        table.set_clean(first + 1, true);
        table.set_protected(first + 2, true);
        // In two parts.
        table.clear(first.saturating_sub(3), first + 40, |_, _| ());
        assert!(table.metadata_bytes() > empty);
        table.clear(first + 40, first + 64, |_, _| ());
        assert_eq!(table.metadata_bytes(), empty, "piece {i}");
    }
}

/// A leaf is freed only when nothing is left in it. (Random ranges hardly ever leave exactly one page.)
#[test]
fn clearing_stops_at_its_borders() {
    for base in [LEAF_PAGES, LOWER_PAGES - LEAF_PAGES, LOWER_PAGES] {
        for (from, to) in [(1, 0), (0, 1), (1, 1), (0, 0)] {
            let mut table = PageTable::new();
            let all = base - 2..base + LEAF_PAGES + 2;
            all.clone().for_each(|vpn| table.set(vpn, Pte::new(Tag::Resident, vpn as u32)));
            let cleared = base + from..base + LEAF_PAGES - to;
            let mut gone = 0;
            table.clear(cleared.start, cleared.end, |_, _| gone += 1);
            assert_eq!(gone, LEAF_PAGES - from - to);
            for vpn in all {
                let want = if cleared.contains(&vpn) { Pte::NONE } else { Pte::new(Tag::Resident, vpn as u32) };
                assert_eq!(table.get(vpn), want, "page {vpn} of {cleared:?}");
            }
        }
    }
}

#[test]
fn hints_are_bits() {
    assert_eq!(HINT_SEQUENTIAL | HINT_WRITTEN | HINT_RANDOM, 7);
}

/// The refault distance is the number of pages evicted since, to the 16 pages that stamps are kept to. It wraps where stamps do.
#[test]
fn the_refault_distance_is_what_was_evicted_since() {
    for at in [0, 16, 1 << 20, (1 << 21) - 16] {
        for since in [0, 1, 15, 16, 1000, 1 << 20, (1 << 21) - 1] {
            let now = next_eviction(at, since);
            assert!(now < 1 << 21);
            assert_eq!(Pte::compressed(7, 3, at).refault_distance(now), since, "{since} after {at}");
            let on_disk = Pte::compressed(7, 3, at + 9).on_disk(5);
            assert_eq!(
                on_disk.refault_distance(next_eviction(now, 9)),
                (since + 9) % (1 << 21),
                "{since} after {at} and 9"
            );
        }
    }
}

/// What an entry says of its page: in the program since it was listed, incompressible, and where its copy is.
#[test]
fn entries_say_what_their_page_is() {
    for tag in [Tag::Resident, Tag::Staged, Tag::Compressed, Tag::Zero, Tag::Busy, Tag::Poisoned, Tag::Disk] {
        for tier in [Tier::Warm, Tier::Dense, Tier::Raw] {
            let pte = Pte::new(tag, 5).packed(tier);
            assert_eq!((pte.is_listed_as(5), pte.is_listed_as(4)), (tag == Tag::Resident, false), "{tag:?}");
            let raw = [pte.is_raw(), pte.is_incompressible()];
            assert_eq!(
                raw,
                [Tag::Compressed, Tag::Resident].map(|t| t == tag && tier == Tier::Raw),
                "{tag:?} {tier:?}"
            );
        }
        let busy = Pte::new(tag, 5).with_copy(77).tagged(Tag::Busy);
        assert_eq!((busy.tag(), busy.aux(), busy.copy()), (Tag::Busy, 5, Some(77)));
        assert_eq!(Pte::new(tag, 5).tagged(Tag::Busy).copy(), None);
    }
}

/// A7: a stretch of which nothing is known any more is reported, once, so that its part of the published map takes no memory.
/// (D3: not if something of it is known again.)
#[test]
fn stretches_of_which_nothing_is_known_are_told_once() {
    let mut table = PageTable::new();
    let fill = |table: &mut PageTable, n: u64| {
        [3, STRETCH_PAGES - 1].iter().for_each(|at| table.set(n * STRETCH_PAGES + at, Pte::new(Tag::Resident, 1)));
    };
    let clear = |table: &mut PageTable, n: u64| table.clear(n * STRETCH_PAGES, (n + 1) * STRETCH_PAGES, |_, _| ());
    fill(&mut table, 4);
    clear(&mut table, 4);
    assert!(table.take_emptied().is_empty(), "nobody has asked for it");
    table.note_emptied();
    (5..8).for_each(|n| fill(&mut table, n));
    table.clear(5 * STRETCH_PAGES, 6 * STRETCH_PAGES - 1, |_, _| ());
    assert!(table.take_emptied().is_empty(), "a page is left");
    [7, 5].into_iter().for_each(|n| clear(&mut table, n));
    assert_eq!((table.take_emptied(), table.take_emptied()), (vec![7, 5], vec![]));
    // Asking again does not lose what was noted.
    clear(&mut table, 6);
    table.note_emptied();
    assert_eq!(table.take_emptied(), [6]);
    // Nothing is reported once its first or its last page is known again.
    for at in [0, STRETCH_PAGES - 1] {
        fill(&mut table, 6);
        clear(&mut table, 6);
        table.set(6 * STRETCH_PAGES + at, Pte::new(Tag::Resident, 1));
        assert!(table.take_emptied().is_empty(), "page {at}");
        clear(&mut table, 6);
        table.set(7 * STRETCH_PAGES, Pte::new(Tag::Resident, 1));
        assert_eq!(table.take_emptied(), [6], "its neighbour is another");
    }
    table.unpublish();
    clear(&mut table, 7);
    assert!(table.take_emptied().is_empty());
}

/// A disk that is a server is shown as a server, for single pages and for runs; and what is no longer published stays as it was.
#[test]
fn the_disk_may_be_a_server() {
    let words: &'static [AtomicU64] = Box::leak((0..2).map(|_| AtomicU64::new(0)).collect());
    let map = PageMapWriter::new(Box::leak(Box::new(AtomicU64::new(0))), words, 16);
    let mut table = PageTable::new();
    table.publish(map, FIRST);
    let (out, tiers) = (Pte::compressed(1, 0, 0).on_disk(9), |n: u64| map.get(n).tier());
    table.set(FIRST, out);
    table.disk_is_remote();
    table.set(FIRST + 1, out);
    table.set_run(FIRST + 2, 2, |i| if i == 0 { out } else { out.back_in_pool(1) });
    assert_eq!([0, 1, 2, 3].map(tiers), [Tier::Disk, Tier::Remote, Tier::Remote, Tier::Warm]);
    table.unpublish();
    table.set(FIRST + 4, out);
    table.clear(FIRST, FIRST + 2, |_, _| ());
    assert_eq!([0, 1, 4].map(tiers), [Tier::Disk, Tier::Remote, Tier::None]);
}

/// D1: the page map's entry for a page in each state: present, swapped or zero, and the tier in the upper three bits.
#[test]
fn the_page_map_says_where_a_page_is() {
    let states = [
        (Pte::NONE, 0),
        (Pte::new(Tag::Resident, 7), 0b001),
        (Pte::new(Tag::Resident, 7).packed(Tier::Raw), 0b001),
        (Pte::new(Tag::Staged, 7), 0b010 | 1 << 5),
        (Pte::new(Tag::Busy, 7), 0b010 | 1 << 5),
        (Pte::compressed(7, 0, 0), 0b010 | 2 << 5),
        (Pte::compressed(7, 0, 0).packed(Tier::Dense), 0b010 | 3 << 5),
        (Pte::compressed(7, 0, 0).packed(Tier::Raw), 0b010 | 4 << 5),
        (Pte::compressed(7, 0, 0).on_disk(7), 0b010 | 5 << 5),
        (Pte::new(Tag::Zero, 0), 0b110),
        (Pte::new(Tag::Poisoned, 0), 0b010 | 7 << 5),
    ];
    for (pte, byte) in states {
        assert_eq!(pte.state(), PageState(byte), "{:?}", pte.tag());
    }
}

/// Hints of blocks that are gone as a whole go with them, even if other pages of their leaf stay.
#[test]
fn hints_go_with_their_blocks() {
    let (mut table, first) = (PageTable::new(), 9 * LEAF_PAGES);
    (first..first + LEAF_PAGES).for_each(|vpn| table.set(vpn, Pte::new(Tag::Resident, 1)));
    (0..4).for_each(|block| table.hint(first + 16 * block, HINT_RANDOM, 0));
    let hints = |table: &PageTable| [0, 1, 2, 3].map(|block| table.hints(first + 16 * block));
    table.clear(first + 8, first + 40, |_, _| ());
    assert_eq!(hints(&table), [HINT_RANDOM, 0, HINT_RANDOM, HINT_RANDOM]);
    table.clear(first + 48, first + 64, |_, _| ());
    assert_eq!(hints(&table), [HINT_RANDOM, 0, HINT_RANDOM, 0]);
}

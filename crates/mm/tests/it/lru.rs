//! The lists, compared with plain queues.

use proptest::prelude::*;
use std::collections::VecDeque;
use uzswap_mm::lru::{Entry, List, Lru, Ring, age, next_stamp};

/// A folio: first page, order, stamp.
type Folio = (u64, u8, u32);

fn folio() -> impl Strategy<Value = Folio> {
    (0..1u64 << 35, 0..=9u8, 0..1u32 << 25)
}

fn entry((vpn, order, stamp): Folio) -> Entry {
    Entry::new(vpn, order, stamp)
}

fn pages<'a>(folios: impl IntoIterator<Item = &'a Folio>) -> usize {
    folios.into_iter().map(|(_, order, _)| 1 << order).sum()
}

#[derive(Clone, Debug)]
enum Step {
    Push(Folio),
    PushFront(Folio),
    Pop,
    /// Keeps the folios whose stamp has this bit.
    Retain(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => folio().prop_map(Step::Push),
        1 => folio().prop_map(Step::PushFront),
        3 => Just(Step::Pop),
        1 => (0..25u32).prop_map(Step::Retain),
    ];
    proptest::collection::vec(step, 1..300)
}

#[derive(Clone, Debug)]
enum Move {
    Inactive(Folio),
    Active(Folio),
    Passing(Folio),
    Unevictable(Folio),
    Rescue,
    Victim,
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let step = prop_oneof![
        4 => folio().prop_map(Move::Inactive),
        4 => folio().prop_map(Move::Active),
        3 => folio().prop_map(Move::Passing),
        2 => folio().prop_map(Move::Unevictable),
        4 => Just(Move::Victim),
        1 => Just(Move::Rescue),
    ];
    proptest::collection::vec(step, 1..300)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn entries_keep_their_parts(folio in folio()) {
        let e = entry(folio);
        prop_assert_eq!((e.vpn(), e.order(), e.stamp()), folio);
    }

    #[test]
    fn stamps_are_cut_to_25_bits(vpn in 0..1u64 << 35, order in any::<u8>(), stamp in any::<u32>()) {
        let e = Entry::new(vpn, order, stamp);
        // And orders are kept to four bits.
        prop_assert_eq!((e.vpn(), e.order(), e.stamp()), (vpn, order & 15, stamp & ((1 << 25) - 1)));
    }

    #[test]
    fn a_ring_is_a_queue(steps in steps()) {
        let (mut ring, mut model) = (Ring::default(), VecDeque::new());
        for step in steps {
            match step {
                Step::Push(folio) => {
                    ring.push(entry(folio));
                    model.push_back(folio);
                }
                Step::PushFront(folio) => {
                    ring.push_front(entry(folio));
                    model.push_front(folio);
                }
                Step::Pop => prop_assert_eq!(ring.pop(), model.pop_front().map(entry)),
                Step::Retain(bit) => {
                    ring.retain(|e| e.stamp() >> bit & 1 == 1);
                    model.retain(|(_, _, stamp)| stamp >> bit & 1 == 1);
                }
            }
            prop_assert_eq!(ring.peek(), model.front().copied().map(entry));
            prop_assert_eq!((ring.len(), ring.is_empty()), (model.len(), model.is_empty()));
            prop_assert_eq!(ring.pages(), pages(&model));
            prop_assert!(ring.metadata_bytes() >= model.len() * 8);
        }
    }

    #[test]
    fn victims_are_what_passes_then_what_is_inactive_to_which_active_ages(moves in moves()) {
        let mut lru = Lru::default();
        let (mut inactive, mut active, mut unevictable) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        let mut passing = VecDeque::new();
        for step in moves {
            match step {
                Move::Inactive(folio) => {
                    lru.push(List::Inactive, entry(folio));
                    inactive.push_back(folio);
                }
                Move::Active(folio) => {
                    lru.push(List::Active, entry(folio));
                    active.push_back(folio);
                }
                Move::Passing(folio) => {
                    lru.push(List::Passing, entry(folio));
                    passing.push_back(folio);
                }
                Move::Unevictable(folio) => {
                    lru.push(List::Unevictable, entry(folio));
                    unevictable.push_back(folio);
                }
                Move::Rescue => {
                    prop_assert_eq!(lru.rescue(), pages(&unevictable));
                    inactive.append(&mut unevictable);
                }
                Move::Victim => {
                    // Two MiB of passing pages stay, or an eighth of the others.
                    let passes = pages(&passing) > ((pages(&active) + pages(&inactive)) / 8).min(512);
                    while !passes && pages(&active) > 3 * pages(&inactive) {
                        inactive.extend(active.pop_front());
                    }
                    let want = if passes { &mut passing } else { &mut inactive }.pop_front();
                    prop_assert_eq!(lru.peek_victim(), want.map(entry));
                    prop_assert_eq!(lru.pop_victim(), want.map(entry));
                }
            }
            prop_assert_eq!((lru.inactive.pages(), lru.active.pages()), (pages(&inactive), pages(&active)));
            prop_assert_eq!((lru.passing.pages(), lru.unevictable.pages()), (pages(&passing), pages(&unevictable)));
            prop_assert!(lru.staged.is_empty());
            prop_assert_eq!(lru.evictable(), pages(&inactive) + pages(&active) + pages(&passing));
        }
    }

    #[test]
    fn nothing_is_left_behind(inactive in proptest::collection::vec(folio(), 0..50),
                              active in proptest::collection::vec(folio(), 0..50),
                              passing in proptest::collection::vec(folio(), 0..50)) {
        let mut lru = Lru::default();
        inactive.iter().for_each(|f| lru.inactive.push(entry(*f)));
        active.iter().for_each(|f| lru.active.push(entry(*f)));
        passing.iter().for_each(|f| lru.passing.push(entry(*f)));
        let mut taken = 0;
        while let Some(next) = lru.peek_victim() {
            prop_assert_eq!(lru.pop_victim(), Some(next));
            taken += 1;
        }
        prop_assert_eq!(taken, inactive.len() + active.len() + passing.len());
        prop_assert_eq!((lru.pop_victim(), lru.inactive.pages(), lru.active.pages(), lru.passing.pages()), (None, 0, 0, 0));
    }
}

/// Passing pages that were just faulted on wait while there is anything else, and no longer.
#[test]
fn what_passes_can_wait() {
    let mut lru = Lru::default();
    let [passes, other] = [1, 2].map(|vpn| Entry::new(vpn, 0, 7));
    lru.push(List::Passing, passes);
    lru.push(List::Active, other);
    assert_eq!((lru.victim_passes(), lru.peek_victim()), (true, Some(passes)));
    lru.passing_waits = true;
    assert_eq!((lru.victim_passes(), lru.pop_victim()), (false, Some(other)));
    assert_eq!((lru.victim_passes(), lru.pop_victim(), lru.pop_victim()), (true, Some(passes), None));
}

/// Ages are exact while fewer folios have been listed since than stamps can count.
#[test]
fn ages_are_what_was_listed_since() {
    let first = 0u32.wrapping_sub(3) & ((1 << 25) - 1);
    let mut now = first;
    for since in 0..200_000 {
        assert_eq!((age(now, first), Entry::new(5, 9, now).stamp()), (since, now));
        now = next_stamp(now);
    }
}

/// Stale entries are dropped when there are many more of them than pages; nothing else is dropped.
#[test]
fn what_is_stale_does_not_pile_up() {
    let mut lru = Lru::default();
    // Page 8 is listed once, the others over and over.
    lru.push(List::Inactive, Entry::new(8, 3, 1));
    // Right before it. None of its own pages is fresh, and the one behind it must not count.
    lru.push(List::Inactive, Entry::new(4, 2, 1));
    let is_fresh = |now: u32| move |page: u64, stamp: u32| if page < 16 { page == 8 } else { stamp == now };
    for round in 2..100 {
        for page in 0..1_000 {
            lru.push([List::Active, List::Inactive][page as usize % 2], Entry::new(16 + page, 0, round));
            lru.tidy(1_001, is_fresh(round));
        }
        assert!(lru.inactive.len() + lru.active.len() <= 2 * (2 * 1_001 + 4096), "round {round}");
    }
    let mut left = Vec::new();
    while let Some(e) = lru.pop_victim() {
        left.push(e);
    }
    let fresh = left.iter().filter(|e| e.stamp() == 99).count();
    let stale = |vpn: u64| left.iter().filter(|e| e.vpn() == vpn).count();
    assert_eq!((fresh, stale(8), stale(4)), (1_000, 1, 0), "one page of a folio is enough, and it must be its own");
}

/// A list does not keep the memory that it needed when it was long: that counts against the limit.
#[test]
fn what_leaves_a_list_leaves_its_memory() {
    let mut lru = Lru::default();
    for page in 0..10_000 {
        lru.push(List::Active, Entry::new(page, 0, 1));
        lru.push(List::Unevictable, Entry::new(1 << 20 | page, 0, 1));
    }
    assert_eq!((lru.rescue(), lru.unevictable.metadata_bytes()), (10_000, 0));
    lru.tidy(100, |page, _| page < 100);
    assert!(lru.active.len() == 100 && lru.metadata_bytes() <= 2 * 100 * 8);
}

/// A list is tidied when it has more than twice as many entries as there are pages and another 4096, and not before. Each takes
/// memory, which counts against the limit (A7).
#[test]
fn a_list_is_tidied_when_it_is_mostly_stale() {
    let all = [List::Inactive, List::Active, List::Passing, List::Unevictable, List::Incompressible];
    for list in all {
        let mut lru = Lru::default();
        let entries = |lru: &Lru| {
            [&lru.inactive, &lru.active, &lru.passing, &lru.unevictable, &lru.incompressible].map(Ring::len)
        };
        let most = 2 * 100 + 4096;
        (0..most as u64).for_each(|page| lru.push(list, Entry::new(page, 0, 1)));
        lru.tidy(100, |_, _| false);
        assert_eq!(entries(&lru), all.map(|l| if l == list { most } else { 0 }));
        assert!(lru.metadata_bytes() >= most * 8, "{list:?}");
        lru.push(list, Entry::new(7, 0, 2));
        lru.tidy(100, |page, stamp| (page, stamp) == (7, 2));
        assert_eq!(entries(&lru), all.map(|l| usize::from(l == list)));
    }
    let mut lru = Lru::default();
    lru.staged.push(Entry::new(1, 0, 1));
    assert!(lru.metadata_bytes() >= 8);
}

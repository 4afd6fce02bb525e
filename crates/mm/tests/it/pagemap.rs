//! The page map, compared with a plain array; and its promises to readers in every interleaving (loom).

use loom::sync::Arc;
use proptest::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};
use uzswap_mm::pagemap::{
    PRESENT, PageMap, PageMapWriter, PageState, Query, Run, SOFT_DIRTY, SWAPPED, Summary, TIERS, Tier, WRITE_PROTECTED,
    Word,
};

struct Loomed(loom::sync::atomic::AtomicU64);

impl Word for Loomed {
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }
}

fn loomed(n: usize) -> Arc<Vec<Loomed>> {
    Arc::new((0..n).map(|_| Loomed(loom::sync::atomic::AtomicU64::new(0))).collect())
}

/// The first word is the sequence number.
fn over(words: &[Loomed], pages: u64) -> PageMapWriter<'_, Loomed> {
    PageMapWriter::new(&words[0], &words[1..], pages)
}

const IN: PageState = PageState(PRESENT);
const OUT: PageState = PageState(SWAPPED | Tier::Warm.bits());

#[test]
fn a_page_is_never_in_two_states_nor_goes_back_in_time() {
    loom::model(|| {
        let words = loomed(2);
        let theirs = words.clone();
        let writer = loom::thread::spawn(move || {
            let map = over(&theirs, 2);
            map.set(0, IN);
            map.set(1, IN);
            map.set(0, OUT);
        });
        let map = over(&words, 2);
        let order = |s: PageState| [PageState(0), IN, OUT].iter().position(|x| *x == s).expect("a state it was in");
        let first = order(map.get(0));
        let neighbour = map.get(1);
        let second = order(map.get(0));
        assert!(second >= first);
        // Acquire and release: a reader that sees the second store sees the first.
        assert!(neighbour != IN || second >= 1);
        writer.join().unwrap();
        assert_eq!((map.get(0), map.get(1)), (OUT, IN), "a neighbour's store was lost");
    });
}

#[test]
fn a_snapshot_is_of_one_moment() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let words = loomed(3);
        let theirs = words.clone();
        let writer = loom::thread::spawn(move || {
            let map = over(&theirs, 16);
            // Pages 0 and 8 (in two words) change together.
            map.begin();
            map.set(0, OUT);
            map.publish(8, OUT);
            map.end();
            // A run is one change, too.
            map.publish_run(7, 3, |i| if i == 1 { OUT } else { IN });
            // By itself it is a change of its own.
            map.publish(1, IN);
        });
        let map = over(&words, 16);
        let before = map.sequence();
        if before.is_multiple_of(2) {
            let seen = (map.get(0), map.get(8));
            let run = (map.get(7), map.get(9));
            if map.sequence() == before {
                assert_eq!(seen.0, seen.1, "half of a change seen");
                assert_eq!(run.0, run.1, "half of a run seen");
            }
        }
        writer.join().unwrap();
        let mut out = [PageState(0); 9];
        assert!(map.snapshot(0, &mut out));
        assert_eq!((out[0], out[8]), (OUT, OUT));
    });
}

/// Plain words with these bytes, for a map.
fn words_of(bytes: &[u8]) -> Vec<AtomicU64> {
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len().next_multiple_of(8), 0);
    padded.chunks(8).map(|c| AtomicU64::new(u64::from_le_bytes(c.try_into().unwrap()))).collect()
}

fn runs_by_model(bytes: &[u8], from: usize, to: usize, q: Query) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (i, byte) in bytes.iter().enumerate().take(to).skip(from) {
        let turned = byte ^ q.inverted;
        if turned & q.all != q.all || (q.any != 0 && turned & q.any == 0) {
            continue;
        }
        let state = PageState(turned & q.report);
        match runs.last_mut() {
            Some(last) if last.to == i as u64 && last.state == state => last.to += 1,
            _ => runs.push(Run { from: i as u64, to: i as u64 + 1, state }),
        }
    }
    runs
}

fn stretches() -> impl Strategy<Value = Vec<u8>> {
    let state = prop_oneof![Just(0u8), Just(PRESENT), Just(OUT.0), any::<u8>()];
    prop::collection::vec((state, 1usize..40), 1..20)
        .prop_map(|v| v.into_iter().flat_map(|(b, n)| std::iter::repeat_n(b, n)).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn scans_and_sums_are_those_of_an_array(
        bytes in stretches(), a in 0usize..900, b in 0usize..900, inverted: u8, all in 0u8..8, any_of: u8, report: u8,
    ) {
        let words = words_of(&bytes);
        let sequence = AtomicU64::new(0);
        let map = PageMap::new(&sequence, &words, bytes.len() as u64);
        let (from, to) = (a.min(b).min(bytes.len()), a.max(b).min(bytes.len()));
        for q in [Query { inverted, all, any: any_of, report }, Query::EVERYTHING, Query::having(PRESENT)] {
            let mut runs = Vec::new();
            map.scan(from as u64, to as u64, q, |r| runs.push(r));
            prop_assert_eq!(runs, runs_by_model(&bytes, from, to, q));
        }
        let mut sum = Summary::default();
        bytes[from..to].iter().for_each(|b| sum.add(PageState(*b), 1));
        prop_assert_eq!(map.summary(from as u64, to as u64), sum);
    }

    #[test]
    fn what_is_set_is_read(changes in prop::collection::vec((0u64..100, any::<u8>(), any::<u8>()), 1..200)) {
        let words: Vec<AtomicU64> = (0..13).map(|_| AtomicU64::new(0)).collect();
        let sequence = AtomicU64::new(0);
        let map = PageMapWriter::new(&sequence, &words, 100);
        let mut model = [0u8; 100];
        for (page, set, clear) in changes {
            map.change(page, set, clear);
            model[page as usize] = model[page as usize] & !clear | set;
            prop_assert!((0..100).all(|i| map.get(i).0 == model[i as usize]));
        }
        prop_assert_eq!((map.pages(), map.get(100)), (100, PageState(0)));
    }
}

#[test]
fn a_views_own_bits_are_read_with_the_others() {
    let (words, own) = (words_of(&[PRESENT, 0, OUT.0]), words_of(&[0, SOFT_DIRTY, WRITE_PROTECTED]));
    let sequence = AtomicU64::new(0);
    let map = PageMap::new(&sequence, &words, 3);
    let view = map.with_markers(PageMap::new(&sequence, &own, 3), false);
    let read = |m: &PageMap| [m.get(0).0, m.get(1).0, m.get(2).0];
    assert_eq!(read(&view), [PRESENT, SOFT_DIRTY, OUT.0 | WRITE_PROTECTED]);
    // Only known pages can have been written to.
    let none = words_of(&[0; 3]);
    let dirty = map.with_markers(PageMap::new(&sequence, &none, 3), true);
    assert_eq!(read(&dirty), [PRESENT | SOFT_DIRTY, 0, OUT.0 | SOFT_DIRTY]);
    assert_eq!(dirty.summary(0, 3).soft_dirty, 2);
}

/// D1: each of a page's bits is counted for itself.
#[test]
fn a_summary_counts_each_bit_for_itself() {
    let counted = |byte: u8, n: u64| {
        let mut sum = Summary::default();
        sum.add(PageState(byte), n);
        assert_eq!(sum.tiers.iter().sum::<u64>(), sum.pages);
        assert_eq!(sum.tiers[usize::from(byte >> 5)], n);
        [sum.pages, sum.present, sum.swapped, sum.zero, sum.soft_dirty, sum.write_protected]
    };
    for bit in 0..5 {
        let mut want = [7, 0, 0, 0, 0, 0];
        want[bit + 1] = 7;
        assert_eq!((counted(1 << bit, 7), counted(0, 5)), (want, [5, 0, 0, 0, 0, 0]), "bit {bit}");
        let all = PageState(0x1f ^ 1 << bit);
        let is = [all.present(), all.swapped(), all.zero(), all.soft_dirty(), all.write_protected()];
        assert!(is.iter().enumerate().all(|(i, is)| *is == (i != bit)), "bit {bit}");
    }
    // Bytes of the words beyond the last page belong to no page.
    let words = words_of(&[PRESENT; 8]);
    let sequence = AtomicU64::new(0);
    let map = PageMap::new(&sequence, &words, 3);
    assert_eq!(([2, 3, 7, 8].map(|page| map.get(page).0), map.summary(0, 8).present), ([PRESENT, 0, 0, 0], 3));
    // Stretches add up.
    let words = words_of(&[PRESENT, PRESENT, OUT.0, OUT.0, OUT.0]);
    let sum = PageMap::new(&AtomicU64::new(0), &words, 5).summary(1, 5);
    assert_eq!((sum.pages, sum.present, sum.swapped, sum.tiers), (4, 1, 3, [1, 0, 3, 0, 0, 0, 0, 0]));
}

/// While a change is under way, there is no single moment that could be read.
#[test]
fn there_is_no_snapshot_of_half_a_change() {
    let words = words_of(&[PRESENT, 0, OUT.0]);
    let sequence = AtomicU64::new(0);
    let map = PageMapWriter::new(&sequence, &words, 3);
    let mut out = [PageState(0); 2];
    map.begin();
    assert!(!map.snapshot(1, &mut out));
    map.end();
    assert!(map.snapshot(1, &mut out));
    assert_eq!(out, [PageState(0), OUT]);
}

#[test]
fn tiers_have_their_numbers() {
    for (i, tier) in TIERS.iter().enumerate() {
        assert_eq!(*tier as usize, i);
        assert_eq!(tier.name(), format!("{tier:?}").to_lowercase());
        assert_eq!(PageState(tier.bits() | SWAPPED).tier(), *tier);
        assert!(PageState(tier.bits() | SWAPPED).swapped() && !PageState(tier.bits()).present());
    }
}

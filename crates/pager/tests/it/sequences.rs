//! Pages read in sequence pass through memory: see `List::Passing`.

use crate::region::{Rng, alone, seed};
use std::sync::atomic::Ordering::Relaxed;
use uzswap_pager::region::{Options, Region};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
const LIMIT: usize = 16 * MIB;

/// A region with `size` bytes of numbered pages, which take next to no room in the pool.
fn filled(size: usize) -> Region {
    let mut region = Region::new(size, &Options::new(LIMIT)).unwrap();
    // SAFETY: nobody else uses the region.
    let memory = unsafe { region.as_slice_mut() };
    memory.chunks_mut(PAGE).enumerate().for_each(|(i, page)| page[..8].copy_from_slice(&(i as u64 + 1).to_le_bytes()));
    region
}

/// Reads pages; returns how many of them came from the pool.
fn read(region: &Region, pages: impl IntoIterator<Item = usize>) -> usize {
    let count = || region.group().slots[0].counters.zswpin.load(Relaxed) as usize;
    let before = count();
    for page in pages {
        // SAFETY: inside the region, and aligned.
        let word = unsafe { region.as_mut_ptr().add(page * PAGE).cast::<u64>().read_volatile() };
        assert_eq!(word, page as u64 + 1);
    }
    count() - before
}

/// The story: of memory that was read over and over and was a bit too large, each page was evicted just before it was read.
#[test]
fn of_what_is_read_over_and_over_a_part_stays() {
    let _one = alone();
    for tenths in [12, 16, 24] {
        let pages = LIMIT / PAGE * tenths / 10;
        let region = filled(pages * PAGE);
        (0..4).for_each(|_| _ = read(&region, 0..pages));
        let rounds = (0..8).map(|_| read(&region, 0..pages)).collect::<Vec<_>>();
        let came: usize = rounds.iter().sum();
        println!("{pages} pages: {rounds:?} came; {:?}", region.stats());
        // A fifth of so small a limit is not the program's, and pages evicted by chance are missed.
        assert!(came <= 8 * (pages - LIMIT / PAGE * 45 / 100), "{pages} pages: {rounds:?}");
    }
}

/// Pages that filled memory before and are never used again do not stay forever beside others that are read over and over and
/// fit.
#[test]
fn what_is_read_over_and_over_and_fits_comes_to_stay() {
    let _one = alone();
    for (tenths, rounds) in [(3, 30), (6, 60)] {
        let pages = LIMIT / PAGE * tenths / 10;
        let region = filled(4 * LIMIT);
        let came = (0..rounds).map(|_| read(&region, 0..pages)).collect::<Vec<_>>();
        println!("{pages} pages: {came:?} came; {:?}", region.stats());
        assert!(came[0] > pages / 2, "it was out");
        assert!(came[rounds - 3..].iter().all(|n| *n <= pages / 10), "{pages} pages: {came:?}");
    }
}

/// Pages used at random keep their place beside others that are read once in sequence.
#[test]
fn what_passes_puts_nothing_out() {
    let _one = alone();
    let used = LIMIT / PAGE * 6 / 10;
    let pages = 8 * LIMIT / PAGE;
    let region = filled(pages * PAGE);
    let mut random = Rng::new(seed());
    let mut some = |n: usize| (0..n).map(|_| random.below(used)).collect::<Vec<_>>();
    read(&region, some(20 * used));
    let mut missed = 0;
    for page in used..pages {
        read(&region, [page]);
        missed += read(&region, some(2));
    }
    println!("{missed} of {} uses came from the pool; {:?}", 2 * (pages - used), region.stats());
    // It was three in ten once.
    assert!(missed * 7 <= 2 * (pages - used), "{missed} of {}", 2 * (pages - used));
}

/// The story: a program that filled memory downwards (as GNU sort fills its lines) took a fault for each page.
#[test]
fn who_fills_memory_faults_once_for_many_pages_upwards_and_downwards() {
    let _one = alone();
    let pages = 4 * LIMIT / PAGE;
    for (down, at_once) in [(false, 32), (true, 12)] {
        let region = Region::new(pages * PAGE, &Options::new(LIMIT)).unwrap();
        for i in 0..pages {
            let page = if down { pages - 1 - i } else { i };
            // SAFETY: inside the region, and aligned.
            unsafe { region.as_mut_ptr().add(page * PAGE).cast::<u64>().write_volatile(page as u64 + 1) };
        }
        let faults = region.stats().faults as usize;
        println!("{faults} faults for {pages} pages, downwards: {down}; {:?}", region.stats());
        // 128 pages at a time or 16, except for the first few, and pages that left early.
        assert!(faults < pages / at_once, "{faults} faults for {pages} pages, downwards: {down}");
        read(&region, 0..pages);
    }
}

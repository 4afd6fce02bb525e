//! A region's page map: exact at every step, and in agreement with the region's own figures.

use crate::region::{MIB, PAGE, Rng, against_model, alone, seed};
use std::sync::atomic::Ordering::*;
use uzswap_mm::pagemap::Tier;
use uzswap_pager::region::{Compressor, Options, Region};

#[test]
fn the_page_map_is_exact_at_every_step() {
    let region = Region::new(4 * MIB, &Options::new(16 * MIB)).unwrap();
    let map = region.page_map().unwrap();
    // SAFETY: within the region, whose only user this is.
    let word = |page: usize| unsafe { &*region.as_mut_ptr().add(page * PAGE).cast::<std::sync::atomic::AtomicU64>() };
    let check = |step: &str, present: bool, swapped: bool| {
        let state = map.get(5);
        assert_eq!((state.present(), state.swapped()), (present, swapped), "{step}: {state:?}");
    };
    check("nothing", false, false);
    word(5).store(1, Relaxed);
    check("FAULT1", true, false);
    assert_eq!(region.page_out(5 * PAGE..6 * PAGE), 1);
    check("PAGEOUT", false, true);
    assert_eq!(word(5).load(Relaxed), 1);
    check("FAULT2", true, false);
    region.remove(5 * PAGE..6 * PAGE);
    check("REMOVE", false, false);
    word(5).store(2, Relaxed);
    region.page_out(0..4 * MIB);
    check("PAGEOUT", false, true);
    region.remove(0..4 * MIB);
    check("REMOVE", false, false);
    assert_eq!(word(5).load(Relaxed), 0);
}

#[test]
fn the_page_map_tells_how_a_page_is_packed() {
    for (compressor, packed) in
        [(Compressor::Lz4, Tier::Warm), (Compressor::Zstd(0), Tier::Dense), (Compressor::Deflate(0), Tier::Dense)]
    {
        let mut region = Region::new(4 * MIB, &Options { compressor, ..Options::new(16 * MIB) }).unwrap();
        let mut rng = Rng::new(seed());
        // SAFETY: this test's own region, and no system call is given a pointer into it.
        let bytes = unsafe { region.as_slice_mut() };
        // Runs of each kind (text, noise, zeros), each with as many pages as the largest unit. (From the last one down, so faults
        // bring no neighbours.)
        for (i, page) in bytes.chunks_mut(PAGE).enumerate().take(192).collect::<Vec<_>>().into_iter().rev() {
            match i / 16 % 3 {
                0 => page.fill(i as u8 + 1),
                1 => page.chunks_mut(8).for_each(|c| c.copy_from_slice(&rng.next().to_le_bytes())),
                _ => page.fill(0),
            }
        }
        region.page_out(0..4 * MIB);
        let map = region.page_map().unwrap();
        let check = || {
            for i in 0..192 {
                let expected = [packed, Tier::Raw, Tier::None][i as usize / 16 % 3];
                let state = map.get(i);
                assert!(state.swapped() && state.tier() == expected, "{compressor:?}, page {i}: {state:?}");
            }
        };
        check();
        // Read and paged out again: clean pages leave with their kept copies.
        region.page_in(0..4 * MIB);
        region.page_out(0..4 * MIB);
        check();
    }
}

#[test]
fn the_page_map_says_what_the_region_says() {
    let _one = alone();
    let mut region = Region::new(32 * MIB, &Options::new(14 * MIB)).unwrap();
    against_model(&mut region, 2, seed(), 3000);
    region.page_out(0..MIB);
    // Reclaim goes on for a moment by itself: read until both are of the same moment.
    for _ in 0..1000 {
        let (before, sum, after) = (region.stats(), region.page_map().unwrap().summary(), region.stats());
        if before == after {
            assert_eq!(sum.present as usize * PAGE, after.resident, "{sum:?} {after:?}");
            assert_eq!(sum.swapped as usize * PAGE, after.staged + after.stored + after.zeros, "{sum:?} {after:?}");
            return;
        }
    }
    panic!("the region never rests");
}

//! Changes of limits while a region is in use.

use crate::region::{MIB, PAGE, Rng, alone, seed, work};
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering::*};
use uzswap_pager::region::{Error, LEAST_LIMIT, Options, Region};
use uzswap_pager::shared::{SharedOptions, SharedRegion};

/// How much more may be charged at the moment of looking, as other threads fault.
const SLACK: usize = 2 * MIB;
/// The lowest limit, in MiB.
const LEAST: usize = 32;

/// Changes a limit while `goes_on`. A quarter of the contents does not compress; it fits into the lowest limit with some room to
/// spare.
fn change(set_limit: impl Fn(usize) -> usize, shown: impl Fn() -> u64, goes_on: &AtomicBool, rng: &mut Rng) -> u32 {
    let mut changes = 0;
    while goes_on.load(Relaxed) || changes == 0 {
        let limit = (LEAST + rng.below(60)) * MIB;
        let charged = set_limit(limit);
        assert!(charged <= limit + SLACK, "{charged} of {limit}");
        assert_eq!(shown(), limit as u64);
        changes += 1;
    }
    changes
}

#[test]
fn a_region_keeps_each_limit_it_is_given() {
    let _alone = alone();
    let seed = seed();
    let region = Region::new(64 * MIB, &Options::new(64 * MIB)).unwrap();
    // SAFETY: only one thread uses the memory, and no system call gets it.
    let memory = unsafe { std::slice::from_raw_parts_mut(region.as_mut_ptr(), region.len()) };
    let goes_on = AtomicBool::new(true);
    let map = region.page_map().unwrap();
    std::thread::scope(|scope| {
        let goes_on = &goes_on;
        let worker = scope.spawn(move || {
            work(memory, &mut vec![0; 64 * MIB], &mut Rng::new(seed), 40_000);
            goes_on.store(false, Relaxed);
        });
        let set = |limit| region.set_limit(limit).unwrap();
        println!("{} changes", change(set, || map.limit(), goes_on, &mut Rng::new(seed + 1)));
        worker.join().unwrap();
    });
    // When nobody touches anything, the usage is exact.
    assert!(region.set_limit(LEAST * MIB).unwrap() <= LEAST * MIB);
    assert_eq!(region.stats().over_limit, 0);
}

#[test]
fn a_shared_region_keeps_each_limit_it_is_given() {
    let _alone = alone();
    let seed = seed();
    let region = SharedRegion::create(64 * MIB, &SharedOptions::new(64 * MIB)).unwrap();
    let (m, goes_on) = (region.map().unwrap(), AtomicBool::new(true));
    std::thread::scope(|scope| {
        let goes_on = &goes_on;
        let worker = scope.spawn(|| {
            // SAFETY: the memory is mapped as long as `m` is, only one thread uses it, and no system call gets it.
            let memory = unsafe { std::slice::from_raw_parts_mut(m.as_mut_ptr(), m.len()) };
            work(memory, &mut vec![0; 64 * MIB], &mut Rng::new(seed), 40_000);
            goes_on.store(false, Relaxed);
        });
        let set = |limit| region.set_limit(limit).unwrap();
        let shown = || region.control().page_map().limit();
        println!("{} changes", change(set, shown, goes_on, &mut Rng::new(seed + 1)));
        worker.join().unwrap();
    });
    let (charged, stats) = (region.set_limit(LEAST * MIB).unwrap(), region.control().stats().unwrap());
    assert!(charged <= LEAST * MIB && stats.poisoned == 0, "{charged}, {stats:?}");
}

/// Nobody is killed for it either, although the group is set to kill.
#[test]
fn what_does_not_compress_into_a_smaller_limit_is_told_and_kept() {
    let _alone = alone();
    let mut rng = Rng::new(seed());
    let words: Vec<u64> = (0..20 * MIB / 8).map(|_| rng.next()).collect();
    let mut region = Region::new(24 * MIB, &Options::new(32 * MIB)).unwrap();
    region.set_kill_when_full(true);
    // SAFETY: the only user.
    let memory = unsafe { region.as_slice_mut() };
    memory.chunks_mut(8).zip(&words).for_each(|(to, word)| to.copy_from_slice(&word.to_ne_bytes()));
    let shared = SharedRegion::create(24 * MIB, &SharedOptions::new(32 * MIB)).unwrap();
    let mapping = shared.map().unwrap();
    // SAFETY: the only user, and `mapping` lives longer.
    let also = unsafe { std::slice::from_raw_parts_mut(mapping.as_mut_ptr(), mapping.len()) };
    also.chunks_mut(8).zip(&words).for_each(|(to, word)| to.copy_from_slice(&word.to_ne_bytes()));
    for charged in [region.set_limit(LEAST_LIMIT).unwrap(), shared.set_limit(LEAST_LIMIT).unwrap()] {
        assert!((20 * MIB..24 * MIB).contains(&charged), "{charged}");
    }
    assert!(region.set_limit(32 * MIB).unwrap() < 32 * MIB && shared.set_limit(32 * MIB).unwrap() < 32 * MIB);
    // SAFETY: as above.
    for memory in [unsafe { region.as_slice() }, also] {
        let found = memory.chunks(8).zip(&words);
        assert_eq!(found.filter(|(bytes, word)| **bytes != word.to_ne_bytes()).count(), 0);
    }
}

/// A lower limit does not end a pin either.
#[test]
fn what_is_pinned_stays_under_a_smaller_limit() {
    let _alone = alone();
    let shared = SharedRegion::create(32 * MIB, &SharedOptions::new(32 * MIB)).unwrap();
    let mapping = shared.map().unwrap();
    let pin = mapping.pin(0..16 * MIB).unwrap();
    let charged = shared.set_limit(LEAST_LIMIT).unwrap();
    assert!(charged >= 16 * MIB, "{charged}");
    let present = || shared.control().page_map().map().summary(0, (16 * MIB / PAGE) as u64).present;
    assert_eq!(present(), (16 * MIB / PAGE) as u64);
    let refused = mapping.pin(16 * MIB..16 * MIB + PAGE).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::OutOfMemory, "{refused}");
    drop(pin);
    assert!(shared.set_limit(LEAST_LIMIT).unwrap() <= LEAST_LIMIT && present() < (16 * MIB / PAGE) as u64);
    // After an owner has ended nothing can be asked of it.
    drop(shared);
    let gone = mapping.page_out(0..MIB).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::UnexpectedEof);
    assert_eq!(gone.to_string(), "the owner of the shared region has ended");
}

/// The story: a region with a limit near `usize::MAX` was paged out at once, as if the limit were negative; a debug build
/// panicked when it was created.
#[test]
fn a_limit_beyond_all_memory_is_none() {
    let _alone = alone();
    const PAGES: usize = 2048;
    for limit in [isize::MAX as usize, isize::MAX as usize + 1, usize::MAX - (64 * MIB), usize::MAX] {
        let region = Region::new(PAGES * PAGE, &Options::new(limit)).unwrap();
        let shared = SharedRegion::create(PAGES * PAGE, &SharedOptions::new(limit)).unwrap();
        let mapping = shared.map().unwrap();
        let writes = |base: *mut u8| {
            // SAFETY: within the region, and the mapping, which nobody else uses.
            (0..PAGES).for_each(|page| unsafe { base.add(page * PAGE).write_volatile(page as u8 | 1) });
        };
        writes(region.as_mut_ptr());
        writes(mapping.as_mut_ptr());
        // If any room is to be made, the calling thread makes it here.
        for charged in [region.set_limit(limit).unwrap(), shared.set_limit(limit).unwrap()] {
            assert!(charged >= PAGES * PAGE, "{charged} of {limit}");
        }
        assert_eq!(region.stats().resident, PAGES * PAGE, "{limit}: {:?}", region.stats());
        assert_eq!(shared.control().stats().unwrap().resident, PAGES * PAGE, "{limit}");
    }
}

#[test]
fn a_limit_that_is_too_small_is_refused_and_changes_nothing() {
    let region = Region::new(PAGE, &Options::new(LEAST_LIMIT)).unwrap();
    let shared = SharedRegion::create(PAGE, &SharedOptions::new(LEAST_LIMIT)).unwrap();
    assert_eq!(region.set_limit(LEAST_LIMIT - 1), Err(Error::Size));
    let error = shared.set_limit(LEAST_LIMIT - 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert_eq!(region.page_map().unwrap().limit(), LEAST_LIMIT as u64);
    assert_eq!(shared.control().page_map().limit(), LEAST_LIMIT as u64);
}

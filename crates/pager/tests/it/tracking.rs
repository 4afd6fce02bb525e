//! Soft-dirty and write-protected pages of a region, across page-out and page-in.

use crate::region::{Rng, seed};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::time::Duration;
use uzswap_mm::pagemap::{PRESENT, Query, SOFT_DIRTY};
use uzswap_pager::region::{Error, Options, Region};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;

fn region(size: usize, limit: usize) -> Region {
    Region::new(size, &Options { track_writes: true, ..Options::new(limit) }).unwrap()
}

fn word(region: &Region, page: usize) -> &AtomicU64 {
    assert!(page * PAGE < region.len());
    // SAFETY: within the region, and only used as an atomic.
    unsafe { &*region.as_mut_ptr().add(page * PAGE + 64).cast::<AtomicU64>() }
}

fn at(page: usize) -> std::ops::Range<usize> {
    page * PAGE..(page + 1) * PAGE
}

fn dirty(region: &Region) -> Vec<u64> {
    let map = region.page_map().unwrap();
    (0..16).filter(|p| map.get(*p).soft_dirty()).collect()
}

#[test]
fn soft_dirty_bits_survive_page_out_and_page_in() {
    let region = region(4 * MIB, 8 * MIB);
    // Downwards, here and below: sequential accesses bring neighbours along.
    for page in (0..8).rev() {
        word(&region, page).store(1, Relaxed);
    }
    // Nothing was cleared yet: all known pages count as written, unknown ones do not.
    assert_eq!(dirty(&region), (0..8).collect::<Vec<_>>());
    assert_eq!(region.take_soft_dirty(0..region.len()).unwrap(), (0..8).collect::<Vec<_>>());
    assert!(dirty(&region).is_empty());
    // Reading does not write.
    assert_eq!(word(&region, 1).load(Relaxed), 1);
    assert_eq!(word(&region, 9).load(Relaxed), 0);
    word(&region, 2).store(2, Relaxed);
    assert_eq!(dirty(&region), [2]);
    // Staged, stored, and stored again unchanged; brought in by a fault and on request.
    for round in 0..4 {
        match round {
            0 => assert!(region.age() > 0),
            _ => assert_eq!(region.page_out(0..16 * PAGE), 10, "round {round}"),
        }
        assert_eq!(dirty(&region), [2], "lost on the way out, round {round}");
        if round == 2 {
            assert_eq!(region.page_in(0..16 * PAGE), 10);
        }
        for page in (0..10).rev() {
            word(&region, page).load(Relaxed);
        }
        assert_eq!(dirty(&region), [2], "lost on the way in, or made up, round {round}");
    }
    // Writes to a page that is out, to one that is clean in memory, and to one never touched.
    region.page_out(at(5));
    word(&region, 5).store(5, Relaxed);
    word(&region, 6).store(6, Relaxed);
    word(&region, 12).store(12, Relaxed);
    assert_eq!(region.take_soft_dirty(0..16 * PAGE).unwrap(), [2, 5, 6, 12]);
    assert!(region.take_soft_dirty(0..16 * PAGE).unwrap().is_empty());
    assert!((0..8).rev().all(|p| word(&region, p).load(Relaxed) == [1, 1, 2, 1, 1, 5, 6, 1][p]));
    // Dropped contents lose their marker.
    word(&region, 3).store(3, Relaxed);
    region.remove(at(3));
    assert!(!region.page_map().unwrap().get(3).soft_dirty());
    assert_eq!(word(&region, 3).load(Relaxed), 0);
}

/// The story: if the bits of some pages were cleared first, untouched pages became dirty in the page map.
#[test]
fn what_nobody_has_touched_is_not_dirty() {
    let region = region(4 * MIB, 8 * MIB);
    // Not side by side, which would bring their neighbours along.
    for page in [9, 5] {
        word(&region, page).store(1, Relaxed);
    }
    region.clear_soft_dirty(at(5)).unwrap();
    assert_eq!((dirty(&region), region.page_map().unwrap().summary().soft_dirty), (vec![9], 1));
    assert_eq!(word(&region, 14).load(Relaxed), 0);
    word(&region, 12).store(1, Relaxed);
    assert_eq!(dirty(&region), [9, 12]);
    region.page_out(0..region.len());
    word(&region, 14).store(1, Relaxed);
    assert_eq!(region.take_soft_dirty(0..region.len()).unwrap(), [9, 12, 14]);
}

/// What a live migration does, on memory twice its limit: copy, then copy again what was written meanwhile, until nobody writes
/// any more. A missed write is a page that differs at the end.
#[test]
fn no_write_is_missed_under_pressure() {
    const PAGES: usize = 4096;
    let region = region(PAGES * PAGE, 8 * MIB);
    let (stop, writes) = (AtomicBool::new(false), AtomicU64::new(0));
    (0..PAGES).for_each(|page| word(&region, page).store(page as u64, Relaxed));
    let mut copy = vec![0u64; PAGES];
    let seed = seed();
    let take = |copy: &mut [u64]| {
        for page in region.take_soft_dirty(0..PAGES * PAGE).unwrap() {
            copy[page as usize] = word(&region, page as usize).load(Relaxed);
        }
    };
    std::thread::scope(|scope| {
        for writer in 0..2 {
            let (region, stop, writes) = (&region, &stop, &writes);
            scope.spawn(move || {
                let mut rng = Rng::new(seed + writer);
                let mut n = 1;
                while !stop.load(Relaxed) {
                    // Each writer has pages of its own; the words beside make them compress badly.
                    let page = rng.below(PAGES / 2) * 2 + writer as usize;
                    word(region, page).store(n << 1 | writer, Relaxed);
                    // SAFETY: within the page, whose only writer this is.
                    unsafe { region.as_mut_ptr().add(page * PAGE + 256).cast::<u64>().write_volatile(rng.next()) };
                    writes.fetch_add(1, Relaxed);
                    n += 1;
                }
            });
        }
        for round in 1..=60 {
            while writes.load(Relaxed) < round * 500 {
                std::thread::yield_now();
            }
            take(&mut copy);
            region.page_out(0..PAGES / 4 * PAGE);
        }
        stop.store(true, Relaxed);
    });
    take(&mut copy);
    assert!(region.stats().stored > 0);
    for (page, value) in copy.into_iter().enumerate() {
        assert_eq!(value, word(&region, page).load(Relaxed), "page {page}: a write was missed");
    }
}

#[test]
fn writers_wait_until_a_snapshot_has_the_page() {
    const PAGES: usize = 64;
    let region = region(4 * MIB, 8 * MIB);
    for page in 0..PAGES {
        word(&region, page).store(100 + page as u64, Relaxed);
    }
    region.take_soft_dirty(0..PAGES * PAGE).unwrap();
    region.protect(0..PAGES * PAGE).unwrap();
    region.page_out(0..PAGES / 2 * PAGE);
    let map = region.page_map().unwrap();
    assert!((0..PAGES as u64).all(|p| map.get(p).write_protected()) && !map.get(PAGES as u64).write_protected());
    assert_eq!(word(&region, 3).load(Relaxed), 103, "reading is allowed");
    region.page_in(0..PAGES / 4 * PAGE);
    region.age();
    let mut seen = [0; PAGES];
    std::thread::scope(|scope| {
        for writer in 0..3 {
            let region = &region;
            scope.spawn(move || (0..PAGES).filter(|p| p % 3 == writer).for_each(|p| word(region, p).store(1, Relaxed)));
        }
        for i in 0..PAGES {
            let byte = region.next_write(Duration::from_secs(20)).unwrap().expect("a write to each protected page");
            let page = byte / PAGE;
            seen[page] = word(&region, page).load(Relaxed);
            if i % 2 == 0 {
                // Paged out while the writer waits.
                region.page_out(at(page));
            }
            region.unprotect(at(page)).unwrap();
        }
    });
    assert!((0..PAGES).all(|p| seen[p] == 100 + p as u64), "{seen:?}");
    assert!((0..PAGES).all(|p| word(&region, p).load(Relaxed) == 1));
    assert_eq!(region.next_write(Duration::ZERO).unwrap(), None);
    // And each of these writes was noted.
    assert_eq!(region.take_soft_dirty(0..PAGES * PAGE).unwrap().len(), PAGES);
    let runs = region.page_map().unwrap().runs(Query {
        inverted: SOFT_DIRTY,
        all: PRESENT | SOFT_DIRTY,
        any: 0,
        report: PRESENT,
    });
    assert_eq!(runs.iter().map(|r| r.to - r.from).sum::<u64>(), PAGES as u64, "{runs:?}");
}

/// The story: the thread that was to answer writers panicked, and they waited forever.
#[test]
fn nobody_waits_for_a_thread_that_is_gone() {
    let region = region(4 * MIB, 8 * MIB);
    (0..8).rev().for_each(|page| word(&region, page).store(1, Relaxed));
    let told = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        let (say, hear) = std::sync::mpsc::channel();
        let (region, told) = (&region, &told);
        let client = scope.spawn(move || {
            let watch = region.watch_writes().unwrap();
            watch.protect(0..8 * PAGE).unwrap();
            assert_eq!(region.watch_writes().map(drop), Err(Error::Watched));
            watch.unprotect(at(7)).unwrap();
            say.send(()).unwrap();
            assert_eq!(watch.next_write(Duration::from_secs(20)).unwrap(), Some(3 * PAGE));
            told.wait();
            // Without a panic message, which would look like a failure.
            std::panic::resume_unwind(Box::new("the thread that answers has ended"));
        });
        hear.recv().unwrap();
        word(region, 7).store(2, Relaxed);
        let writer = scope.spawn(|| word(region, 3).store(2, Relaxed));
        told.wait();
        assert!(client.join().is_err());
        writer.join().unwrap();
    });
    word(&region, 4).store(2, Relaxed);
    let map = region.page_map().unwrap();
    assert!((0..8).all(|page| !map.get(page).write_protected()));
    assert!(region.watch_writes().is_ok());
    assert_eq!([3, 4, 5, 7].map(|page| word(&region, page).load(Relaxed)), [2, 2, 1, 2]);
}

#[test]
fn a_region_that_does_not_track_says_so() {
    let region = Region::new(MIB, &Options::new(8 * MIB)).unwrap();
    assert_eq!(region.take_soft_dirty(0..PAGE), Err(Error::NotTracked));
    assert_eq!(region.protect(0..PAGE), Err(Error::NotTracked));
    assert_eq!(region.next_write(Duration::ZERO), Err(Error::NotTracked));
    assert_eq!(region.watch_writes().map(drop), Err(Error::NotTracked));
    word(&region, 0).store(1, Relaxed);
    let state = region.page_map().unwrap().get(0);
    assert!(state.present() && !state.soft_dirty());
}

#[test]
fn idle_pages_of_a_region_go_and_used_ones_stay() {
    let region = Region::new(4 * MIB, &Options::new(8 * MIB)).unwrap();
    (0..256).rev().for_each(|page| word(&region, page).store(page as u64 + 1, Relaxed));
    assert_eq!(region.age(), 256);
    for page in (0..256).rev().filter(|page| page % 4 == 0) {
        assert_eq!(word(&region, page).load(Relaxed), page as u64 + 1);
    }
    let back = region.page_map().unwrap().summary().present;
    assert!((64..256).contains(&back), "{back}");
    assert_eq!(region.page_out_idle() as u64, 256 - back);
    let sum = region.page_map().unwrap().summary();
    assert_eq!((sum.present, sum.swapped, sum.tiers[1]), (back, 256 - back, 0), "{sum:?}");
    assert_eq!(region.page_in(0..4 * MIB) as u64, 256 - back);
    assert!((0..256).all(|page| word(&region, page).load(Relaxed) == page as u64 + 1));
}

/// Memory that the maps of a region of that many pages take (bytes).
fn maps_take(pages: usize) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir("/proc/self/fd").unwrap().flatten().map(|e| e.path());
    let maps = entries
        .filter(|path| std::fs::read_link(path).is_ok_and(|to| to.starts_with("/memfd:uzswap-pagemap (deleted)")));
    let of_region = maps.filter_map(|path| std::fs::metadata(path).ok()).filter(|m| m.len() == (PAGE + pages) as u64);
    of_region.map(|m| m.blocks() * 512).sum()
}

/// The story: who asked for the states of a large region's pages, cleared its bits or ended a watch read the map of all its pages,
/// touched or not, and each part that was read took memory from then on. The lock was held for seconds meanwhile.
#[test]
fn pages_that_nobody_has_touched_take_no_memory_in_the_map() {
    const PAGES: usize = 7 << 26;
    let region = region(PAGES * PAGE, 8 * MIB);
    let touched = [3, PAGES / 2 + 1, PAGES - 1];
    touched.iter().for_each(|page| word(&region, *page).store(1, Relaxed));
    let map = region.page_map().unwrap();
    assert_eq!((map.summary().present, map.summary().soft_dirty, map.summary().pages), (3, 3, PAGES as u64));
    let all = 0..region.len();
    let as_numbers: Vec<u64> = touched.iter().map(|page| *page as u64).collect();
    assert_eq!(region.take_soft_dirty(all.clone()).unwrap(), as_numbers);
    word(&region, PAGES - 1).store(2, Relaxed);
    assert_eq!(region.take_soft_dirty(all.clone()).unwrap(), as_numbers[2..]);
    drop(region.watch_writes().unwrap());
    let unknown = Query { inverted: PRESENT, all: PRESENT, any: 0, report: PRESENT };
    let runs: Vec<_> = map.runs(unknown).into_iter().map(|r| (r.from, r.to)).collect();
    assert_eq!(runs, [(0, 3), (4, as_numbers[1]), (as_numbers[1] + 1, as_numbers[2])]);
    assert_eq!(map.runs(Query::having(PRESENT)).len(), 3);
    region.remove(all);
    assert_eq!(map.summary().present, 0);
    assert!(maps_take(PAGES) < MIB as u64, "{}", maps_take(PAGES));
}

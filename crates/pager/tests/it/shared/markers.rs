//! Page state: the answers of each mapping, and that they are exact.

use super::removes::{bytes, remove};
use super::*;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use uzswap_mm::pagemap::{PRESENT, Query, SWAPPED};

/// The sequence of acceptance D: the questions after each step, and the mapping that is asked.
fn sequence(markers: bool, by_kernel: bool) {
    let options = SharedOptions { markers, ..SharedOptions::new(16 * MIB) };
    let region = SharedRegion::create(4 * MIB, &options).unwrap();
    let control = region.control();
    let (a, b) = (region.map().unwrap(), region.map().unwrap());
    let remove = |m: &SharedMapping| match by_kernel {
        true => super::removes::remove(m, 5..6),
        false => m.remove(at(5)).unwrap(),
    };
    let check = |step: &str, present: bool, swapped: bool| {
        // A mapping made now gives the same answers.
        let later = region.map().unwrap();
        for (who, m) in [("A", &a), ("B", &b), ("later", &later)] {
            assert_eq!(state(m.page_map().get(5)), (present, swapped && markers), "{step}: {who}");
        }
        assert_eq!(state(control.page_map().get(5)), (present, swapped && markers), "{step}: control");
        assert_eq!(state(a.page_map().get(6)), (false, false), "{step}: a neighbour nobody touched");
    };
    check("nothing", false, false);
    write(&a, 5, 1);
    check("FAULT1", true, false);
    a.page_out(at(5)).unwrap();
    check("PAGEOUT", false, true);
    assert_eq!(touch(&b, 5), 0);
    check("FAULT2, in the other process", true, false);
    remove(&b);
    check("REMOVE", false, false);
    assert_eq!(a.page_out(at(5)).unwrap(), 0);
    check("PAGEOUT of nothing", false, false);
    write(&b, 5, 2);
    a.page_out(at(5)).unwrap();
    check("PAGEOUT", false, true);
    remove(&a);
    check("REMOVE", false, false);
    assert_eq!(words(&b, 5)[7].load(Relaxed), 0, "removed contents came back");
}

#[test]
fn every_mapping_answers_the_same_at_every_step() {
    sequence(true, false);
    sequence(true, true);
}

#[test]
fn without_markers_nothing_is_ever_swapped() {
    sequence(false, false);
    sequence(false, true);
}

#[test]
fn unmapping_one_mapping_leaves_the_others_answers() {
    // The original was best effort: dropping an entry in one process dropped the marker, for that process and for all that mapped
    // the page later.
    let region = region(4 * MIB, 8 * MIB);
    let (a, b) = (region.map().unwrap(), region.map().unwrap());
    write(&a, 3, 9);
    b.page_out(at(3)).unwrap();
    // The page-table entries of A (and the kernel's own markers) go.
    // SAFETY: shared memory: no contents are dropped.
    unsafe { libc::madvise(a.as_mut_ptr().cast(), a.len(), libc::MADV_DONTNEED) };
    // It is in memory again: the owner cannot tell this call from MADV_REMOVE before it has acted, and watches the page.
    assert_eq!(state(a.page_map().get(3)), state(b.page_map().get(3)));
    assert_eq!(words(&a, 3)[7].load(Relaxed), 9);
    drop(a);
    let end = std::time::Instant::now() + Duration::from_secs(20);
    while region.control().stats().unwrap().mappings > 1 {
        assert!(std::time::Instant::now() < end, "a mapping that was dropped stays");
        std::thread::yield_now();
    }
    region.control().page_out(at(3)).unwrap();
    assert_eq!(state(b.page_map().get(3)), (false, true));
    let c = region.map().unwrap();
    assert_eq!(state(c.page_map().get(3)), (false, true));
    assert_eq!(words(&c, 3)[7].load(Relaxed), 9);
}

#[test]
fn soft_dirty_is_each_mappings_own_and_survives_paging() {
    let region = region(4 * MIB, 8 * MIB);
    let (a, b) = (region.map().unwrap(), region.map().unwrap());
    for page in 0..8 {
        write(&a, page, 1);
    }
    // Nothing was cleared yet: all known pages count as written, unknown ones do not.
    assert!(a.page_map().get(0).soft_dirty() && b.page_map().get(7).soft_dirty() && !a.page_map().get(8).soft_dirty());
    assert_eq!(a.take_soft_dirty(0..16 * PAGE).unwrap(), (0..8).collect::<Vec<_>>());
    b.clear_soft_dirty(0..b.len()).unwrap();
    let dirty = |m: &SharedMapping| -> Vec<u64> { (0..16).filter(|p| m.page_map().get(*p).soft_dirty()).collect() };
    assert!(dirty(&a).is_empty() && dirty(&b).is_empty());
    // A read is no write; a write counts in the mapping where it happens.
    assert_eq!(touch(&a, 1), 0);
    write(&a, 2, 2);
    write(&b, 3, 3);
    assert_eq!((dirty(&a), dirty(&b)), (vec![2], vec![3]));
    region.control().page_out(0..8 * PAGE).unwrap();
    assert_eq!((dirty(&a), dirty(&b)), (vec![2], vec![3]), "lost on the way out");
    for page in 0..8 {
        touch(&a, page);
        touch(&b, page);
    }
    assert_eq!((dirty(&a), dirty(&b)), (vec![2], vec![3]), "lost on the way in, or made up");
    // A write to a page that is out is one write.
    region.control().page_out(0..8 * PAGE).unwrap();
    write(&a, 5, 5);
    write(&a, 12, 1);
    assert_eq!(a.take_soft_dirty(0..16 * PAGE).unwrap(), [2, 5, 12]);
    assert!(a.take_soft_dirty(0..16 * PAGE).unwrap().is_empty());
    assert!((0..8).all(|p| words(&a, p)[7].load(Relaxed) == [1, 1, 2, 3, 1, 5, 1, 1][p]));
}

#[test]
fn no_write_is_missed_by_who_takes_soft_dirty_bits() {
    // What a live migration does: copy, then copy again what was written meanwhile, until little is.
    let region = region(4 * MIB, 8 * MIB);
    let (a, stop) = (region.map().unwrap(), AtomicBool::new(false));
    let pages = 64;
    let copy = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut rng = crate::region::Rng::new(crate::region::seed());
            let mut n = 0;
            while !stop.load(Relaxed) {
                n += 1;
                write(&a, rng.below(pages), n);
            }
        });
        let mut copy = vec![0; pages];
        for round in 0..200 {
            let dirty = a.take_soft_dirty(0..pages * PAGE).unwrap();
            for page in dirty {
                copy[page as usize] = words(&a, page as usize)[7].load(Relaxed);
            }
            if round % 10 == 0 {
                region.control().page_out(0..pages * PAGE).unwrap();
            }
        }
        stop.store(true, Relaxed);
        writer.join().unwrap();
        for page in a.take_soft_dirty(0..pages * PAGE).unwrap() {
            copy[page as usize] = words(&a, page as usize)[7].load(Relaxed);
        }
        copy
    });
    for (page, value) in copy.into_iter().enumerate() {
        assert_eq!(value, words(&a, page)[7].load(Relaxed), "page {page}: a write was missed");
    }
}

#[test]
fn writers_wait_until_a_snapshot_has_the_page() {
    let region = region(4 * MIB, 8 * MIB);
    let (a, b) = (region.map().unwrap(), region.map().unwrap());
    for page in 0..32 {
        write(&a, page, 100 + page as u64);
    }
    let control = region.control();
    let path = socket_path("snapshot");
    region.serve(&path).unwrap();
    let snapshot = uzswap_pager::shared::SharedControl::connect(&path).unwrap();
    snapshot.protect(0..32 * PAGE, None).unwrap();
    assert_eq!(control.protect(0..PAGE, None).unwrap_err().kind(), std::io::ErrorKind::ResourceBusy);
    // The protection survives paging, and holds for mappings made later.
    control.page_out(0..16 * PAGE).unwrap();
    let later = region.map().unwrap();
    for m in [&a, &b, &later] {
        assert!((0..32).all(|p| m.page_map().get(p).write_protected()) && !m.page_map().get(32).write_protected());
    }
    assert_eq!(words(&later, 3)[7].load(Relaxed), 103, "reading is allowed");
    let seen = std::thread::scope(|scope| {
        for (i, m) in [&a, &b, &later].into_iter().enumerate() {
            scope.spawn(move || (0..32).filter(|p| p % 3 == i).for_each(|p| write(m, p, 1)));
        }
        let mut seen = [0; 32];
        for _ in 0..32 {
            let byte = snapshot.next_write(Duration::from_secs(20)).unwrap().expect("32 writes to 32 protected pages");
            let page = byte / PAGE;
            seen[page] = words(&later, page)[7].load(Relaxed);
            snapshot.unprotect(at(page), None).unwrap();
        }
        seen
    });
    assert!((0..32).all(|p| seen[p] == 100 + p as u64), "{seen:?}");
    assert!((0..32).all(|p| words(&a, p)[7].load(Relaxed) == 1));
    // A client that protects pages and goes away holds nobody up.
    snapshot.protect(at(0), Some(b.id())).unwrap();
    assert!(b.page_map().get(0).write_protected() && !a.page_map().get(0).write_protected());
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| write(&b, 0, 2));
        assert_eq!(snapshot.next_write(Duration::from_secs(20)).unwrap(), Some(0));
        assert!(!writer.is_finished());
        drop(snapshot);
    });
    assert_eq!(words(&a, 0)[7].load(Relaxed), 2);
}

/// The story: ending the protection of one mapping discarded the notifications of writes through others. Their writers waited,
/// and nobody was told.
#[test]
fn who_writes_through_another_mapping_is_told_of_after_one_is_unprotected() {
    let region = region(MIB, 8 * MIB);
    let (a, b) = (region.map().unwrap(), region.map().unwrap());
    let control = region.control();
    write(&b, 3, 1);
    control.protect(at(3), Some(a.id())).unwrap();
    control.protect(at(3), Some(b.id())).unwrap();
    let begun = std::time::Instant::now();
    let (told, waits) = std::thread::scope(|scope| {
        let writer = scope.spawn(|| write(&b, 3, 2));
        while control.stats().unwrap().wp_faults == 0 && begun.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
        control.unprotect(at(3), Some(a.id())).unwrap();
        let told = control.next_write(Duration::from_secs(5)).unwrap();
        let waits = !writer.is_finished();
        control.unprotect(at(3), Some(b.id())).unwrap();
        (told, waits)
    });
    assert_eq!((told, waits), (Some(3 * PAGE), true));
    assert_eq!(words(&a, 3)[7].load(Relaxed), 2);
}

/// The story: a client that asked for protection in a mapping that did not exist got an error, and kept everybody else from
/// protecting anything.
#[test]
fn who_protects_nothing_keeps_nobody_from_it() {
    let path = socket_path("protects-nothing");
    let region = region(MIB, 8 * MIB);
    region.serve(&path).unwrap();
    let other = uzswap_pager::shared::SharedControl::connect(&path).unwrap();
    let error = region.control().protect(at(0), Some(u64::MAX - 1)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    other.protect(at(0), None).unwrap();
}

/// The story: pages that a madvise call had removed were protected before their removal was seen. Then the protection went with
/// them, and nobody was told of writes there.
#[test]
fn what_was_just_removed_is_protected_as_well() {
    let region = region(4 * MIB, 8 * MIB);
    let a = region.map().unwrap();
    assert!(a.sees_removes(), "this needs a userfaultfd for the kernel's faults");
    (0..16).for_each(|page| write(&a, page, 1));
    region.control().page_out(bytes(4..12)).unwrap();
    remove(&a, 0..16);
    region.control().protect(bytes(0..16), None).unwrap();
    let later = region.map().unwrap();
    for m in [&a, &later] {
        assert!((0..16).all(|p| m.page_map().get(p).write_protected()));
    }
    tells_of_a_write(&region, &a, 3);
    tells_of_a_write(&region, &later, 15);
}

/// A write to a protected page is reported, and waits.
fn tells_of_a_write(region: &SharedRegion, m: &SharedMapping, page: usize) {
    let control = region.control();
    let told = std::thread::scope(|scope| {
        scope.spawn(|| write(m, page, 2));
        let told = control.next_write(Duration::from_secs(10)).unwrap();
        control.unprotect(at(page), None).unwrap();
        told
    });
    assert_eq!(told, Some(page * PAGE));
}

/// The same if the owner does not see what the call removes.
pub fn what_was_removed_unseen_is_protected_as_well(region: &SharedRegion, m: &SharedMapping) {
    (0..4).for_each(|page| write(m, page, 5));
    remove(m, 0..4);
    region.control().protect(bytes(0..4), None).unwrap();
    tells_of_a_write(region, m, 2);
    region.control().unprotect(bytes(0..4), None).unwrap();
}

/// The story: if the bits of some pages were cleared first, untouched pages became dirty in the page map.
#[test]
fn what_nobody_has_touched_is_not_dirty() {
    let region = region(4 * MIB, 8 * MIB);
    let (a, b) = (region.map().unwrap(), region.map().unwrap());
    write(&a, 5, 1);
    write(&a, 6, 1);
    a.clear_soft_dirty(at(5)).unwrap();
    let dirty = |m: &SharedMapping| (0..1024).filter(|p| m.page_map().get(*p).soft_dirty()).collect::<Vec<_>>();
    assert_eq!((dirty(&a), a.page_map().summary().soft_dirty), (vec![6], 1));
    // Read, written by another, written.
    assert_eq!(touch(&a, 20), 0);
    write(&b, 30, 1);
    assert_eq!(touch(&a, 30), 0);
    write(&a, 40, 1);
    assert_eq!(dirty(&a), [6, 40]);
    assert_eq!(dirty(&b), [5, 6, 20, 30, 40], "there nobody has cleared anything");
    region.control().page_out(0..a.len()).unwrap();
    assert_eq!(a.take_soft_dirty(0..a.len()).unwrap(), [6, 40]);
}

#[test]
fn runs_and_sums_are_of_what_happened() {
    let region = region(4 * MIB, 8 * MIB);
    let a = region.map().unwrap();
    for page in [0, 1, 2, 10, 11, 20] {
        write(&a, page, 7);
    }
    touch(&a, 30);
    a.page_out(10 * PAGE..31 * PAGE).unwrap();
    let runs: Vec<_> = a.page_map().runs(Query::having(SWAPPED)).into_iter().map(|r| (r.from, r.to)).collect();
    assert_eq!(runs, [(10, 12), (20, 21), (30, 31)]);
    let runs: Vec<_> = a.page_map().runs(Query::having(PRESENT)).into_iter().map(|r| (r.from, r.to)).collect();
    assert_eq!(runs, [(0, 3)]);
    let sum = a.page_map().summary();
    assert_eq!((sum.pages, sum.present, sum.swapped, sum.zero), (1024, 3, 4, 1));
    assert_eq!(region.control().page_in(0..a.len()).unwrap(), 4);
    assert_eq!(a.page_map().summary().present, 7);
    assert!(a.page_in(0..a.len() + 1).is_err());
}

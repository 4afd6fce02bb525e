//! Faults that are served beside the faulting thread.

use super::removes::{NEAR, bytes, sequence_of_calls};
use super::*;

/// More arguments of [`SharedControl::inject`](uzswap_pager::shared::SharedControl::inject), and the places where threads stop.
const STARVE: u64 = 8;
const BEFORE_READING: u64 = 1;
const BEFORE_WAKING: u64 = 2;

/// A region whose faults are all served in this way, except for a mapping's first.
fn region_near(size: usize, limit: usize) -> SharedRegion {
    let region = region(size, limit);
    region.control().inject(NEAR, 1).unwrap();
    region
}

fn near_faults(region: &SharedRegion) -> (u64, u64) {
    let stats = region.control().stats().unwrap();
    (stats.near_faults, stats.faults)
}

#[test]
fn what_is_served_beside_who_faults_is_right() {
    let region = region_near(64 * MIB, 24 * MIB);
    reads_what_it_wrote(&region);
    let (near, all) = near_faults(&region);
    // Faults are served in the other way if others want this thread's CPU.
    assert!(near > 0 && near <= all, "{near} of {all}");
}

#[test]
fn any_sequence_of_calls_does_what_it_says_beside_who_faults() {
    sequence_of_calls(true);
}

/// Pages that are out are read, and protected ones written to, while the thread that should serve stops; afterwards everything is
/// right.
fn is_relieved(place: u64) {
    let region = region_near(8 * MIB, 16 * MIB);
    let control = region.control();
    let m = region.map().unwrap();
    let mut model: Vec<u64> = (1..=64).collect();
    let read = |page: usize| words(&m, page)[7].load(Relaxed);
    let all = bytes(0..model.len());
    // On a busy machine it may take a while to serve.
    while near_faults(&region).0 == 0 {
        control.page_out(all.clone()).unwrap();
        model.iter().enumerate().for_each(|(page, value)| write(&m, page, *value));
    }
    for round in 1..4u64 {
        // Half of them are out, all are write-protected.
        m.clear_soft_dirty(all.clone()).unwrap();
        assert_eq!(control.page_out(bytes(0..32)).unwrap(), 32);
        control.inject(STARVE, place).unwrap();
        // Each of these faults waits until the guard sees that nobody serves it.
        for page in (0..64).step_by(7) {
            assert_eq!(read(page), model[page], "round {round}");
            model[page] += 1000 * round;
            write(&m, page, model[page]);
        }
        control.inject(STARVE, 0).unwrap();
        for (page, value) in model.iter().enumerate() {
            assert_eq!(read(page), *value, "round {round}");
            assert_eq!(m.page_map().get(page as u64).soft_dirty(), page % 7 == 0, "round {round}, page {page}");
        }
    }
}

#[test]
fn who_does_not_read_is_relieved() {
    is_relieved(BEFORE_READING);
}

#[test]
fn who_does_not_wake_is_relieved() {
    is_relieved(BEFORE_WAKING);
}

#[test]
fn a_region_ends_whose_thread_stops() {
    let region = region_near(8 * MIB, 16 * MIB);
    let control = region.control();
    let m = region.map().unwrap();
    (0..64).for_each(|page| write(&m, page, 1));
    for place in [BEFORE_READING, BEFORE_WAKING] {
        control.inject(STARVE, place).unwrap();
        (64..72).for_each(|page| assert_eq!(touch(&m, page), 0));
        // Unmap it, and map it again.
        let other = region.map().unwrap();
        write(&other, 3, 2);
    }
    drop((m, region));
}

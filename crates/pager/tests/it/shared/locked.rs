//! Shared regions in processes that lock their memory.

use super::processes::{Lines, say, wait_within, worker};
use super::*;
use std::time::Duration;

const PAGES: usize = 4 * MIB / PAGE;

/// This file's worker, which locks all its present and future mappings; returns false for other roles.
pub fn be(role: &str, path: &std::path::Path, number: usize) -> bool {
    if role != "lock" {
        return false;
    }
    // SAFETY: a plain call, in a process of a few MiB.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) } != 0 {
        say("refused");
        return true;
    }
    let m = match SharedMapping::attach(path) {
        Ok(m) => m,
        // Without the privilege little may be locked, and no more mapped.
        Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => {
            say("refused");
            return true;
        }
        Err(e) => panic!("{e}"),
    };
    let expected = |page: usize| if number == 0 { 0 } else { (page + number) as u64 };
    let wrong = (0..PAGES).filter(|page| words(&m, *page)[7].load(Relaxed) != expected(*page)).count();
    (0..PAGES).for_each(|page| write(&m, page, page as u64 + 1000));
    say(&format!("{wrong} wrong"));
    true
}

/// The story: the kernel filled the object's holes with zeros as it was mapped, before anybody was told of faults there. Programs
/// read these instead of pages that were out, and nobody else saw what they wrote there.
#[test]
fn a_process_that_locks_its_memory_reads_what_is_there_and_is_seen_to_write() {
    for number in [0, 5] {
        let path = socket_path("locked");
        let region = region(PAGES * PAGE, 8 * MIB);
        region.serve(&path).unwrap();
        let m = region.map().unwrap();
        if number != 0 {
            (0..PAGES).for_each(|page| write(&m, page, (page + number) as u64));
            // Some stay.
            assert_eq!(m.page_out(0..3 * MIB).unwrap(), 3 * MIB as u64 / PAGE as u64);
        }
        let mut child = worker("lock", &path, number).spawn().unwrap();
        let mut lines = Lines::of(&mut child);
        let said = lines.next();
        assert!(wait_within(&mut child, Duration::from_secs(60)).success());
        if said.as_deref() == Some("refused") {
            return crate::alone::skip("the process may not lock its memory");
        }
        assert_eq!(said.as_deref(), Some("0 wrong"));
        for _ in 0..2 {
            let wrong = (0..PAGES).filter(|page| words(&m, *page)[7].load(Relaxed) != *page as u64 + 1000).count();
            assert_eq!(wrong, 0);
            m.page_out(0..m.len()).unwrap();
        }
    }
}

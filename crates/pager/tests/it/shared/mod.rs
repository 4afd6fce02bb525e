//! Shared regions: several mappings, several processes.
mod errors;
mod forks;
mod locked;
mod markers;
mod near;
mod pins;
mod processes;
mod removes;
mod removes_stress;
mod ring;
mod scarce;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::*};
use uzswap_mm::pagemap::PageState;
use uzswap_pager::shared::{SharedMapping, SharedOptions, SharedRegion};

pub const PAGE: usize = 4096;
pub const MIB: usize = 1 << 20;

/// The words of a page in a mapping.
pub fn words(m: &SharedMapping, page: usize) -> &[AtomicU64] {
    assert!((page + 1) * PAGE <= m.len());
    // SAFETY: within the mapping, aligned, alive as long as it; others also use it as atomics.
    unsafe { std::slice::from_raw_parts(m.as_mut_ptr().add(page * PAGE).cast(), PAGE / 8) }
}

pub fn touch(m: &SharedMapping, page: usize) -> u64 {
    words(m, page)[0].load(Relaxed)
}

pub fn write(m: &SharedMapping, page: usize, value: u64) {
    words(m, page)[7].store(value, Relaxed);
}

pub fn at(page: usize) -> std::ops::Range<usize> {
    page * PAGE..(page + 1) * PAGE
}

pub fn region(size: usize, limit: usize) -> SharedRegion {
    SharedRegion::create(size, &SharedOptions { injectable: true, ..SharedOptions::new(limit) }).unwrap()
}

/// (present, swapped) of a page.
pub fn state(s: PageState) -> (bool, bool) {
    (s.present(), s.swapped())
}

pub fn socket_path(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("uzswap-test-{}-{name}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    path
}

#[test]
fn one_mapping_reads_what_it_wrote_and_the_limit_holds() {
    reads_what_it_wrote(&region(64 * MIB, 24 * MIB));
}

fn reads_what_it_wrote(region: &SharedRegion) {
    let _one = crate::region::alone();
    let seed = crate::region::seed();
    let mut rng = crate::region::Rng::new(seed);
    let m = region.map().unwrap();
    let pages = m.len() / PAGE;
    let mut model = vec![0u64; pages];
    for step in 0..60_000usize {
        let page = if step < pages { step } else { rng.below(pages) };
        let all = words(&m, page);
        // One word in 64 is noise, so the pool has something to hold.
        let value = |v: u64, i: usize| if i % 64 != 1 { v } else { (v ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) };
        for i in [0, 1, 255, 511] {
            let expected = if model[page] == 0 { 0 } else { value(model[page], i) };
            assert_eq!(all[i].load(Relaxed), expected, "step {step}, page {page}, word {i}");
        }
        if step < pages || rng.below(3) == 0 {
            model[page] = 1 + rng.next() % 1000;
            all.iter().enumerate().for_each(|(i, w)| w.store(value(model[page], i), Relaxed));
        }
    }
    let stats = region.control().stats().unwrap();
    println!("{stats:?}");
    assert!(stats.charged <= 24 * MIB && stats.over_limit == 0, "{stats:?}");
    assert!(stats.swpout > 10_000 && stats.major_faults > 1000, "{stats:?}");
}

#[test]
fn mappings_see_each_others_writes_while_pages_go_out() {
    let region = region(16 * MIB, 8 * MIB);
    let (a, b) = (region.map().unwrap(), region.map().unwrap());
    let control = region.control();
    for round in 1..20u64 {
        for page in 0..256usize {
            write(if page.is_multiple_of(2) { &a } else { &b }, page, round * 1000 + page as u64);
        }
        let gone = control.page_out(0..256 * PAGE).unwrap();
        assert_eq!(gone, 256);
        for page in 0..256usize {
            let other = if page.is_multiple_of(2) { &b } else { &a };
            assert_eq!(words(other, page)[7].load(Relaxed), round * 1000 + page as u64);
        }
    }
}

#[test]
fn the_kernel_reads_and_writes_pages_that_are_out() {
    use std::io::{Read, Seek, Write};
    use std::os::fd::AsRawFd;
    let region = region(8 * MIB, 8 * MIB);
    let m = region.map().unwrap();
    if !m.kernel_faults() {
        return crate::alone::skip("the kernel's own faults may not be served here");
    }
    for page in 0..64 {
        words(&m, page).iter().for_each(|w| w.store(page as u64 + 1, Relaxed));
    }
    assert_eq!(region.control().page_out(0..64 * PAGE).unwrap(), 64);
    let mut file = tempfile();
    // SAFETY: the memory is mapped and has the length given; the kernel only copies from it.
    let wrote = unsafe { libc::write(file.as_raw_fd(), m.as_mut_ptr().cast(), 64 * PAGE) };
    assert_eq!(wrote, 64 * PAGE as isize);
    file.rewind().unwrap();
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).unwrap();
    assert!(bytes.chunks(PAGE).enumerate().all(|(i, p)| p.chunks(8).all(|w| w == (i as u64 + 1).to_le_bytes())));
    // And back: into memory that is out.
    bytes.iter_mut().for_each(|b| *b = b.wrapping_add(1));
    file.rewind().unwrap();
    file.write_all(&bytes).unwrap();
    file.rewind().unwrap();
    assert_eq!(region.control().page_out(0..64 * PAGE).unwrap(), 64);
    // SAFETY: as above.
    let read = unsafe { libc::read(file.as_raw_fd(), m.as_mut_ptr().cast(), 64 * PAGE) };
    assert_eq!(read, 64 * PAGE as isize);
    for page in 0..64 {
        let expected = u64::from_le_bytes(bytes[page * PAGE..page * PAGE + 8].try_into().unwrap());
        assert!(words(&m, page).iter().all(|w| w.load(Relaxed) == expected), "page {page}");
    }
}

/// The story: an empty range in the middle of a page was taken for that page, and removed it; one at a page's beginning was
/// refused.
#[test]
fn a_range_of_no_bytes_is_of_no_pages() {
    let region = region(MIB, 8 * MIB);
    let (m, control) = (region.map().unwrap(), region.control());
    (0..4).for_each(|page| write(&m, page, 7));
    for nothing in [5..5, 0..0, PAGE..PAGE, PAGE + 1..PAGE + 1, MIB..MIB] {
        control.remove(nothing.clone()).unwrap();
        m.remove(nothing.clone()).unwrap();
        assert_eq!((control.page_out(nothing.clone()).unwrap(), m.page_in(nothing.clone()).unwrap()), (0, 0));
        assert!(m.take_soft_dirty(nothing.clone()).unwrap().is_empty());
        m.clear_soft_dirty(nothing.clone()).unwrap();
        control.protect(nothing.clone(), None).unwrap();
        let _pins = (m.pin(nothing.clone()).unwrap(), control.pin(nothing).unwrap());
        assert_eq!((control.page_out(at(0)).unwrap(), control.page_out(at(1)).unwrap()), (1, 1), "there are no pins");
        assert!((0..4).all(|page| words(&m, page)[7].load(Relaxed) == 7));
    }
    let sum = m.page_map().summary();
    assert_eq!((sum.present, sum.soft_dirty, sum.write_protected), (4, 4, 0));
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = control.remove(6..5);
    assert_eq!(backwards.unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
}

fn tempfile() -> std::fs::File {
    let path = socket_path("file");
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

#[test]
fn what_is_not_touched_goes_out_when_idle() {
    let region = region(8 * MIB, 16 * MIB);
    let m = region.map().unwrap();
    for page in 0..512 {
        write(&m, page, 1);
    }
    let control = region.control();
    // Before the first round nothing is known to be idle.
    assert_eq!(control.page_out_idle(std::time::Duration::ZERO).unwrap(), 0);
    assert_eq!(control.working_set(std::time::Duration::ZERO).unwrap(), 512);
    control.age().unwrap();
    // The watcher does its part of the round when it gets to it. Until then a page counts as in use.
    let zero = std::time::Duration::ZERO;
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while control.working_set(zero).unwrap() == 512 {
        assert!(std::time::Instant::now() < deadline, "the watcher never answered");
        std::thread::yield_now();
    }
    for page in 100..120 {
        assert_eq!(words(&m, page)[7].load(Relaxed), 1);
    }
    let used = control.working_set(zero).unwrap();
    // Neighbours come with a touched page, up to 64 KiB.
    assert!((20..=48).contains(&used), "{used} pages in use");
    assert_eq!(control.page_out_idle(zero).unwrap(), 512 - used);
    let map = m.page_map();
    assert!((100..120).all(|p| map.get(p).present()) && map.get(0).swapped() && map.get(500).swapped());
    assert!((0..512).all(|p| words(&m, p)[7].load(Relaxed) == 1));
}

/// The story: pages that left on request, or were removed, left their entries behind in lists that only reclaim looked through.
/// In a region with room whose clients paged it out again and again, the tables grew without end (8 MB were seen).
#[test]
fn what_leaves_on_request_leaves_no_entries_behind() {
    const PAGES: usize = 1024;
    const MOST_GROWTH: usize = 256 << 10;
    let region = region(8 * MIB, 16 * MIB);
    let m = region.map().unwrap();
    let control = region.control();
    let fill = |round: usize| (0..PAGES).for_each(|page| write(&m, 2 * page, round as u64 + 1));
    fill(0);
    let before = control.stats().unwrap().metadata;
    for round in 1..100 {
        fill(round);
        assert_eq!(control.page_out(0..8 * MIB).unwrap(), PAGES as u64);
    }
    let after = control.stats().unwrap().metadata;
    assert!(after < before + MOST_GROWTH, "{before} -> {after} bytes by page-outs");
    for round in 1..100 {
        fill(round);
        control.remove(0..8 * MIB).unwrap();
    }
    let after = control.stats().unwrap().metadata;
    assert!(after < before + MOST_GROWTH, "{before} -> {after} bytes by removes");
}

/// The story: a path that was too long for a socket gave "Invalid argument", and one of 5,000 bytes "Input/output error".
#[test]
fn a_path_that_cannot_be_a_socket_s_is_said_to_be_that() {
    let region = region(4 * MIB, 16 * MIB);
    for (path, why) in [("x".repeat(200), "too long"), ("x".repeat(5000), "too long"), ("a\0b".into(), "zero byte")] {
        let refused = [
            region.serve(path.as_ref()).unwrap_err(),
            SharedMapping::attach(path.as_ref()).expect_err("nobody is there"),
        ];
        for e in refused {
            assert!(e.kind() == std::io::ErrorKind::InvalidInput && e.to_string().contains(why), "{e}");
        }
    }
}

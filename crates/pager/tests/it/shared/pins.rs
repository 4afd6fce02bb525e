//! Pages that devices write to without using page tables: they stay while they are pinned.

use super::ring::Ring;
use super::*;
use std::io::{ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::AtomicBool;

const OP_READ_FIXED: u8 = 4;
const PAGES: usize = 32;

fn content(page: usize, i: usize, version: u64) -> u64 {
    version << 48 | ((page as u64) << 20) | i as u64
}

fn has(m: &SharedMapping, page: usize, version: u64) -> bool {
    words(m, page).iter().enumerate().all(|(i, w)| w.load(Relaxed) == content(page, i, version))
}

fn fill(m: &SharedMapping, version: u64) {
    for page in 0..PAGES {
        words(m, page).iter().enumerate().for_each(|(i, w)| w.store(content(page, i, version), Relaxed));
    }
}

/// The contents of the pages in a version, as bytes of a file.
fn bytes(version: u64) -> Vec<u8> {
    (0..PAGES).flat_map(|page| (0..PAGE / 8).flat_map(move |i| content(page, i, version).to_ne_bytes())).collect()
}

/// The story: when a connection with many pins ended, each was looked up in the list of all, and each of its pages in all the
/// others.
#[test]
fn many_pins_of_the_same_pages_end_together() {
    const PINS: usize = 2000;
    let region = region(32 * MIB, 8 * MIB);
    let (m, other) = (region.map().unwrap(), region.map().unwrap());
    fill(&m, 1);
    let one = other.pin(3 * PAGE..4 * PAGE).unwrap();
    let pins: Vec<_> = (0..PINS).map(|_| m.pin(2 * PAGE..6 * PAGE).unwrap()).collect();
    assert_eq!(region.control().page_out(2 * PAGE..6 * PAGE).unwrap(), 0);
    pins.into_iter().for_each(core::mem::forget);
    let began = std::time::Instant::now();
    drop(m);
    // Its connection ends: all its pins go, the other client's stay.
    while region.control().page_out(2 * PAGE..6 * PAGE).unwrap() == 0 {
        std::thread::yield_now();
    }
    region.control().page_out(2 * PAGE..6 * PAGE).unwrap();
    println!("{:?}", began.elapsed());
    let present = || region.control().page_map().map().summary(2, 6).present;
    assert_eq!(present(), 1);
    drop(one);
    region.control().page_out(2 * PAGE..6 * PAGE).unwrap();
    assert_eq!(present(), 0);
    assert!(has(&other, 3, 1));
}

/// The story: what a device wrote into a page that was evicted under it was lost.
#[test]
fn what_comes_through_a_registered_buffer_is_there() {
    let mut file = tempfile();
    file.write_all(&bytes(2)).unwrap();
    for pinned in [true, false] {
        let Some(ring) = Ring::new() else { return };
        let region = region(32 * MIB, 8 * MIB);
        let (m, other) = (region.map().unwrap(), region.map().unwrap());
        fill(&m, 1);
        let pin = pinned.then(|| m.pin(0..PAGES * PAGE).unwrap());
        ring.register(m.as_mut_ptr(), PAGES * PAGE);
        let gone = region.control().page_out(0..PAGES * PAGE).unwrap();
        assert_eq!(gone, if pinned { 0 } else { PAGES as u64 });
        // More than the limit, so everything else goes.
        (1024..32 * MIB / PAGE).for_each(|page| write(&other, page, page as u64));
        let read = (OP_READ_FIXED, 0, file.as_raw_fd(), 0, m.as_mut_ptr() as usize, PAGES * PAGE);
        assert_eq!(ring.run(&[read]), [(PAGES * PAGE) as i32]);
        // Without a pin, the kernel wrote to pages that the region no longer has: that is what pins are for.
        let version = if pinned { 2 } else { 1 };
        assert!((0..PAGES).all(|p| has(&other, p, version) && has(&m, p, version)), "pinned: {pinned}");
        drop((ring, pin));
        region.control().page_out(0..PAGES * PAGE).unwrap();
        assert_eq!(region.control().page_map().map().summary(0, PAGES as u64).present, 0, "it stays pinned");
        assert!((0..PAGES).all(|p| has(&m, p, version)));
    }
}

#[test]
fn direct_reads_into_pinned_pages_while_everything_goes_out() {
    // On the file system of the sources: the one for temporary files may have no direct I/O.
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("direct-{}", std::process::id()));
    let mut open = std::fs::File::options();
    open.read(true).write(true).create(true).truncate(true);
    open.open(&path).unwrap().write_all(&[bytes(1), bytes(2)].concat()).unwrap();
    let direct = std::fs::File::options().read(true).custom_flags(libc::O_DIRECT).open(&path);
    std::fs::remove_file(&path).unwrap();
    let direct = match direct {
        Ok(file) => file,
        Err(e) => return crate::alone::skip(&format!("no direct I/O in {}: {e}", path.display())),
    };
    let region = region(8 * MIB, 8 * MIB);
    let (m, other) = (region.map().unwrap(), region.map().unwrap());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                region.control().page_out(0..PAGES * PAGE).unwrap();
            }
        });
        let wrong = (0..200u64).find(|round| {
            let version = 1 + round % 2;
            let pin = m.pin(0..PAGES * PAGE).unwrap();
            let at = ((version - 1) as usize * PAGES * PAGE) as i64;
            // SAFETY: the memory is mapped and has the length given; others use it as atomics.
            let n = unsafe { libc::pread(direct.as_raw_fd(), m.as_mut_ptr().cast(), PAGES * PAGE, at) };
            drop(pin);
            n != (PAGES * PAGE) as isize || !(0..PAGES).all(|p| has(&other, p, version))
        });
        stop.store(true, Relaxed);
        assert_eq!(wrong, None, "{}", std::io::Error::last_os_error());
    });
}

#[test]
fn pins_add_up_and_the_limit_bounds_them() {
    let region = region(16 * MIB, 8 * MIB);
    let (m, control) = (region.map().unwrap(), region.control());
    write(&m, 5, 7);
    let out = |range: std::ops::Range<usize>| control.page_out(range.start * PAGE..range.end * PAGE).unwrap();
    assert_eq!(out(0..16), 1);
    let first = m.pin(0..8 * PAGE).unwrap();
    // All of it is in memory and mapped, including untouched pages.
    assert_eq!(control.page_map().map().summary(0, 16).present, 8);
    assert_eq!(words(&m, 5)[7].load(Relaxed), 7);
    let second = control.pin(4 * PAGE..12 * PAGE).unwrap();
    assert_eq!(out(0..16), 0);
    assert_eq!(m.remove(0..PAGE).unwrap_err().kind(), ErrorKind::ResourceBusy);
    drop(first);
    assert_eq!(out(0..16), 4);
    let fill = m.pin(16 * PAGE..6 * MIB).unwrap();
    let refused = m.pin(8 * MIB..14 * MIB).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::OutOfMemory);
    assert!(refused.to_string().contains("limit has no room"), "{refused}");
    assert_eq!(m.pin(15 * MIB..17 * MIB).unwrap_err().kind(), ErrorKind::InvalidInput);
    // The rest works in what is left.
    (6 * MIB / PAGE..16 * MIB / PAGE).for_each(|page| write(&m, page, page as u64));
    assert!((6 * MIB / PAGE..16 * MIB / PAGE).all(|page| words(&m, page)[7].load(Relaxed) == page as u64));
    let stats = control.stats().unwrap();
    assert!(stats.charged <= 8 * MIB && stats.over_limit == 0, "{stats:?}");
    drop((fill, second));
    out(0..16 * MIB / PAGE);
    assert_eq!(control.page_map().summary().present, 0);
}

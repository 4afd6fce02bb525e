//! The page-fault handler for monitors, asked by a client that is written from the protocol's description alone.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use uzswap::handover::{self, Image, parse_regions};
use uzswap_sys::uffd::{FEATURE_EVENT_REMOVE, Uffd};

const PAGE: usize = 4096;

/// What page `i` of the guest holds.
fn contents(i: usize) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    for (k, word) in page.chunks_mut(8).enumerate() {
        // Every fourth page is zero, the others half noise.
        let value = if i % 4 == 3 { 0 } else { (i as u64 * 512 + k as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) };
        word.copy_from_slice(&(if k.is_multiple_of(2) { value } else { value >> 60 }).to_le_bytes());
    }
    page
}

fn snapshot(dir: &TempDir, pages: usize) -> Arc<Image> {
    let path = dir.path().join("memory");
    let mut file = File::create(&path).unwrap();
    (0..pages).for_each(|i| file.write_all(&contents(i)).unwrap());
    Arc::new(Image::read(&File::open(path).unwrap()).unwrap())
}

fn map(pages: usize) -> *mut u8 {
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, prot, flags, -1, 0) };
    assert!(at != libc::MAP_FAILED);
    at.cast()
}

fn is_there(base: *mut u8, i: usize) -> bool {
    let mut byte = 0u8;
    // SAFETY: a page of a mapping of ours, and a byte for it.
    assert_eq!(unsafe { libc::mincore(base.add(i * PAGE).cast(), PAGE, &raw mut byte) }, 0);
    byte & 1 != 0
}

#[test]
fn a_guest_finds_its_snapshot_and_zeros_where_its_balloon_was() {
    let dir = TempDir::new().unwrap();
    let image = snapshot(&dir, 300);
    assert!(image.held() < 300 * PAGE, "{} bytes held", image.held());
    let path = dir.path().join("handler");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || handover::serve(&listener, &image));
    // The monitor: two regions, the second of which comes first in the file, and a block of which each has a part.
    let (low, high) = (map(99), map(201));
    let (uffd, _) = Uffd::open(FEATURE_EVENT_REMOVE).unwrap();
    uffd.register(low as usize, 99 * PAGE).unwrap();
    uffd.register(high as usize, 201 * PAGE).unwrap();
    let json = format!(
        r#"[{{"base_host_virt_addr":{},"size":{},"offset":{},"page_size":4096}},
            {{"base_host_virt_addr":{},"size":{},"offset":0,"page_size_kib":4096}}]"#,
        low as usize,
        99 * PAGE,
        201 * PAGE,
        high as usize,
        201 * PAGE
    );
    let socket = OwnedFd::from(UnixStream::connect(&path).unwrap());
    uzswap_sys::socket::send(&socket, json.as_bytes(), &[uffd.fd()]).unwrap();
    let read = |base: *mut u8, i: usize| {
        let mut page = [0; PAGE];
        // SAFETY: a page of one of the mappings, which nobody writes to meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(base.add(i * PAGE), page.as_mut_ptr(), PAGE) };
        page
    };
    // What is in the block of a page that is touched comes with it, and no more.
    for (i, block) in [(6, 4..8), (0, 0..4), (200, 200..201)] {
        assert!(read(high, i) == contents(i));
        let begun = Instant::now();
        while !block.clone().all(|i| is_there(high, i)) {
            assert!(begun.elapsed() < Duration::from_secs(20), "the block of page {i} does not come");
            std::thread::yield_now();
        }
    }
    assert!(read(low, 1) == contents(202) && read(low, 0) == contents(201));
    assert!((0..201).filter(|i| is_there(high, *i)).eq((0..8).chain([200])) && (3..99).all(|i| !is_there(low, i)));
    // A page that was given back first does not: it is zeros.
    // SAFETY: memory of ours.
    assert_eq!(unsafe { libc::madvise(high.add(105 * PAGE).cast(), PAGE, libc::MADV_DONTNEED) }, 0);
    assert!([104, 107, 106].iter().all(|i| read(high, *i) == contents(*i)));
    assert!(!is_there(high, 105) && read(high, 105) == [0; PAGE]);
    // From several virtual CPUs, in no order.
    std::thread::scope(|scope| {
        for cpu in 0..4 {
            let (low, high) = (low as usize, high as usize);
            scope.spawn(move || {
                for i in (0..300).map(|n| (n * 77 + cpu * 31) % 300).filter(|i| *i != 105) {
                    let found = if i < 201 { read(high as *mut u8, i) } else { read(low as *mut u8, i - 201) };
                    assert!(found == contents(i), "page {i}");
                }
            });
        }
    });
    // The balloon gives ten pages back.
    // SAFETY: memory of ours.
    assert_eq!(unsafe { libc::madvise(high.add(50 * PAGE).cast(), 10 * PAGE, libc::MADV_DONTNEED) }, 0);
    for i in 45..65 {
        let expected = if (50..60).contains(&i) { [0; PAGE] } else { contents(i) };
        assert!(read(high, i) == expected, "page {i} after the balloon");
    }
    uzswap_sys::raw::close(uffd.fd());
}

#[test]
fn nonsense_is_refused_in_a_sentence() {
    let dir = TempDir::new().unwrap();
    let image = snapshot(&dir, 4);
    let (uffd, _) = Uffd::open(0).unwrap();
    let one = |base: u64, size: u64, offset: u64, page: u64| {
        format!(r#"[{{"base_host_virt_addr":{base},"size":{size},"offset":{offset},"page_size":{page}}}]"#)
    };
    for (json, fd, part) in [
        ("hello".to_owned(), uffd.fd(), "not a description"),
        ("[]".to_owned(), uffd.fd(), "without regions"),
        (one(4096, 4096, 0, 2 << 20), uffd.fd(), "pages of 2097152 bytes"),
        (one(4097, 4096, 0, 4096), uffd.fd(), "not of whole pages"),
        (one(!4095, 8192, 0, 4096), uffd.fd(), "not of whole pages"),
        (one(4096, 4096, 1 << 40, 4096), uffd.fd(), "of a memory file"),
        (one(4096, 4096, 0, 4096), 0, "no userfaultfd"),
    ] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        uzswap_sys::socket::send(&OwnedFd::from(ours), json.as_bytes(), &[fd]).unwrap();
        let refused = handover::serve_guest(theirs, &image).unwrap_err();
        assert!(refused.contains(part), "{json}: {refused}");
    }
    assert!(parse_regions(one(4096, 4096, 0, 4096).as_bytes()).is_ok());
    uzswap_sys::raw::close(uffd.fd());
}

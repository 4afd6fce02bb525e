//! The page-fault handler for monitors, tested by a client written from the protocol's description alone.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use uzswap::handover::{self, Image, parse_regions};
use uzswap_sys::uffd::{FEATURE_EVENT_REMOVE, Uffd};

const PAGE: usize = 4096;

/// The contents of page `i` of the guest.
fn contents(i: usize) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    for (k, word) in page.chunks_mut(8).enumerate() {
        // Every fourth page is zero; the others are half noise.
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
    // The monitor: two regions, of which the second is first in the file, and one block that both have a part of.
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
    // With a touched page comes the rest of its block, and no more.
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
    // But not a page that was given back before: that reads as zeros.
    // SAFETY: the page is in our mapping, and nothing refers to it.
    assert_eq!(unsafe { libc::madvise(high.add(105 * PAGE).cast(), PAGE, libc::MADV_DONTNEED) }, 0);
    assert!([104, 107, 106].iter().all(|i| read(high, *i) == contents(*i)));
    assert!(!is_there(high, 105) && read(high, 105) == [0; PAGE]);
    // From several virtual CPUs, in random order.
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
    // SAFETY: the pages are in our mapping, and nothing refers to them.
    assert_eq!(unsafe { libc::madvise(high.add(50 * PAGE).cast(), 10 * PAGE, libc::MADV_DONTNEED) }, 0);
    for i in 45..65 {
        let expected = if (50..60).contains(&i) { [0; PAGE] } else { contents(i) };
        assert!(read(high, i) == expected, "page {i} after the balloon");
    }
    uzswap_sys::raw::close(uffd.fd());
}

/// A page of a mapping.
fn read(base: *mut u8, i: usize) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    // SAFETY: a page of one of the mappings, which nobody writes to meanwhile.
    unsafe { std::ptr::copy_nonoverlapping(base.add(i * PAGE), page.as_mut_ptr(), PAGE) };
    page
}

fn region(base: *mut u8, pages: usize, offset: usize) -> String {
    let (base, size) = (base as usize, pages * PAGE);
    format!(r#"{{"base_host_virt_addr":{base},"size":{size},"offset":{offset},"page_size":4096}}"#)
}

/// The story: a monitor that closed its connection, or said anything else there, was taken for one that had ended. Its guest was
/// no longer served: it stood still, or read zeros if nobody else had the userfaultfd.
#[test]
fn a_guest_is_served_as_long_as_its_process_lives() {
    const PAGES: usize = 400;
    let dir = TempDir::new().unwrap();
    let image = snapshot(&dir, PAGES);
    let memory = map(PAGES);
    let json = format!("[{}]", region(memory, PAGES, 0));
    for hangs_up in [false, true] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let ours = OwnedFd::from(ours);
        // SAFETY: the child makes system calls, reads memory and leaves.
        let monitor = unsafe { libc::fork() };
        assert!(monitor >= 0);
        if monitor == 0 {
            drop(theirs);
            // SAFETY: no memory is involved. (It ends a child that nobody serves.)
            unsafe { libc::alarm(60) };
            let (uffd, _) = Uffd::open(0).unwrap();
            uffd.register(memory as usize, PAGES * PAGE).unwrap();
            uzswap_sys::socket::send(&ours, json.as_bytes(), &[uffd.fd()]).unwrap();
            let mut well = read(memory, 0) == contents(0);
            uzswap_sys::raw::close(uffd.fd());
            if hangs_up {
                drop(ours);
            } else {
                uzswap_sys::socket::send(&ours, b"hello", &[0]).unwrap();
                std::mem::forget(ours);
            }
            for i in (0..PAGES).step_by(4) {
                std::thread::yield_now();
                well &= read(memory, i) == contents(i);
            }
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(if well { 0 } else { 1 }) };
        }
        drop(ours);
        // It ends with the monitor.
        handover::serve_guest(theirs, &image).unwrap();
        let mut status = 0;
        // SAFETY: a child of ours.
        unsafe { libc::waitpid(monitor, &raw mut status, 0) };
        assert_eq!(status, 0, "hangs up: {hangs_up}");
    }
}

/// The story: of a long description, only the first piece that the kernel delivered was read.
#[test]
fn a_guest_may_be_of_many_regions() {
    const PAGES: usize = 2000;
    let dir = TempDir::new().unwrap();
    let image = snapshot(&dir, PAGES);
    let memory = map(PAGES);
    let (uffd, _) = Uffd::open(0).unwrap();
    uffd.register(memory as usize, PAGES * PAGE).unwrap();
    // SAFETY: within the mapping.
    let all = (0..PAGES).map(|i| region(unsafe { memory.add(i * PAGE) }, 1, (PAGES - 1 - i) * PAGE));
    let json = format!("[{}]", all.collect::<Vec<_>>().join(","));
    let (ours, theirs) = UnixStream::pair().unwrap();
    let served = std::thread::spawn(move || handover::serve_guest(theirs, &image));
    uzswap_sys::socket::send(&OwnedFd::from(ours.try_clone().unwrap()), json.as_bytes(), &[uffd.fd()]).unwrap();
    // The thread that reads the page is not joined, in case the page does not come.
    let (at, begun) = (memory as usize, Instant::now());
    std::thread::spawn(move || read(at as *mut u8, PAGES - 1));
    while !served.is_finished() && !is_there(memory, PAGES - 1) {
        assert!(begun.elapsed() < Duration::from_secs(60), "nobody answers");
        std::thread::yield_now();
    }
    assert!(!served.is_finished(), "{:?}", served.join());
    assert!((0..PAGES).rev().all(|i| read(memory, i) == contents(PAGES - 1 - i)));
    uzswap_sys::raw::close(uffd.fd());
}

/// The story: a handler that had no descriptor for another monitor ended, and nobody served its guests any more.
#[test]
fn a_handler_with_no_descriptor_left_goes_on() {
    const DESCRIPTORS: u64 = 12;
    let dir = TempDir::new().unwrap();
    drop(snapshot(&dir, 4));
    let path = dir.path().join("handler");
    let mut command = Command::new(env!("CARGO_BIN_EXE_uzswap"));
    command.arg("handover").arg(&path).arg(dir.path().join("memory")).stderr(Stdio::null());
    // SAFETY: a plain call before the command is executed.
    unsafe {
        command.pre_exec(|| {
            let few = libc::rlimit { rlim_cur: DESCRIPTORS, rlim_max: DESCRIPTORS };
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const few), 0);
            Ok(())
        })
    };
    let mut handler = command.spawn().unwrap();
    let begun = Instant::now();
    let connect = || loop {
        match UnixStream::connect(&path) {
            Ok(stream) => return stream,
            Err(e) => assert!(begun.elapsed() < Duration::from_secs(60), "{e}"),
        }
        std::thread::yield_now();
    };
    let monitors: Vec<_> = (0..2 * DESCRIPTORS).map(|_| connect()).collect();
    let open = || std::fs::read_dir(format!("/proc/{}/fd", handler.id())).map_or(0, Iterator::count) as u64;
    while open() < DESCRIPTORS && !handler_has_ended(&handler) {
        assert!(begun.elapsed() < Duration::from_secs(60), "it does not take them");
        std::thread::yield_now();
    }
    drop(monitors);
    let memory = map(4);
    let (uffd, _) = Uffd::open(0).unwrap();
    uffd.register(memory as usize, 4 * PAGE).unwrap();
    let socket = OwnedFd::from(connect());
    let json = format!("[{}]", region(memory, 4, 0));
    uzswap_sys::socket::send(&socket, json.as_bytes(), &[uffd.fd()]).unwrap();
    assert!((0..4).all(|i| read(memory, i) == contents(i)));
    handler.kill().unwrap();
    handler.wait().unwrap();
    uzswap_sys::raw::close(uffd.fd());
}

/// Whether a child has ended; it is a zombie until it is waited for.
fn handler_has_ended(child: &Child) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
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

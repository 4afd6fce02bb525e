//! Pages that raise an error when touched: those with unknown markers, and lost ones.

use super::processes::{Lines, say, wait_for_word, wait_within, worker};
use super::removes::{BLIND, HELD, HOLD, NONE, REFUSE, bytes, unmap, value};
use super::*;
use std::io::Read;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use uzswap_pager::shared::SharedControl;

/// An invalid marker.
const UNKNOWN: u8 = 0x80;
/// The bad page, its contents, and what is written to it.
const BAD: usize = 9;
const BEFORE: u64 = 5;
const AFTER: u64 = 6;
/// The longest wait for anything.
const LONGEST: Duration = Duration::from_secs(20);

/// Plays a role of this file's workers; returns false if there is no such role here.
pub fn be(role: &str, path: &Path, _number: usize) -> bool {
    match role {
        "marked-write" => marked_write(path),
        "unread" => unread(),
        "writes-out" => writes_out(),
        _ => return false,
    }
    true
}

fn marked_write(path: &Path) {
    let m = SharedMapping::attach(path).unwrap();
    write(&m, BAD, BEFORE);
    m.inject_marker(BAD as u64, UNKNOWN).unwrap();
    say("marked");
    wait_for_word();
    write(&m, BAD, AFTER);
    say("written");
}

/// Loses some of the first sixteen pages, which the owner reports, and drops them.
fn loses_pages(m: &SharedMapping, control: &SharedControl) {
    control.page_out(bytes(4..12)).unwrap();
    control.inject(REFUSE, u64::MAX).unwrap();
    unmap(m, 0..16);
    assert!(control.stats().unwrap().unvouched > 0);
    control.inject(REFUSE, 0).unwrap();
    control.remove(bytes(0..16)).unwrap();
}

fn unread() {
    // SAFETY: the calls read one byte of memory only; nobody else writes to standard error.
    unsafe {
        let flags = libc::fcntl(2, libc::F_GETFL);
        libc::fcntl(2, libc::F_SETFL, flags | libc::O_NONBLOCK);
        while libc::write(2, c".".as_ptr().cast(), 1) == 1 {}
        libc::fcntl(2, libc::F_SETFL, flags);
    }
    let region = region(4 * MIB, 8 * MIB);
    let (m, control) = (region.map().unwrap(), region.control());
    for _ in 0..2 {
        (0..16).for_each(|page| write(&m, page, 1));
        loses_pages(&m, control);
    }
    say("served");
    wait_for_word();
}

fn writes_out() {
    static ENOUGH: AtomicBool = AtomicBool::new(false);
    const TEXT: Range<usize> = 16..272;
    let region = region(4 * MIB, 8 * MIB);
    let (m, control) = (region.map().unwrap(), region.control());
    TEXT.for_each(|page| write(&m, page, 1));
    let text = m.as_mut_ptr() as usize + TEXT.start * PAGE;
    let writes = std::thread::spawn(move || {
        while !ENOUGH.load(SeqCst) {
            // SAFETY: memory of the region, which exists until this thread has ended.
            unsafe { libc::write(2, text as *const libc::c_void, TEXT.len() * PAGE) };
        }
    });
    for _ in 0..20 {
        (0..16).for_each(|page| write(&m, page, 1));
        control.page_out(bytes(TEXT)).unwrap();
        loses_pages(&m, control);
    }
    ENOUGH.store(true, SeqCst);
    writes.join().unwrap();
    say("written");
    wait_for_word();
}

/// The story: a thread wrote memory of the region that was out to standard error, and so held the file's lock until the owner
/// served it. The owner printed a message there with its own lock held: both hung.
#[test]
fn what_is_said_where_what_is_out_is_written() {
    // SAFETY: a new descriptor, ours alone.
    let file = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"said".as_ptr(), libc::MFD_CLOEXEC)) };
    let mut child = worker("writes-out", &socket_path("writes-out"), 0).stderr(Stdio::from(file)).spawn().unwrap();
    let mut lines = Lines::of(&mut child);
    let (say, said) = channel();
    std::thread::spawn(move || say.send(lines.next()));
    let written = said.recv_timeout(LONGEST);
    let _ = child.kill();
    child.wait().unwrap();
    assert_eq!(written.unwrap().as_deref(), Some("written"));
}

/// The story: if there was no memory for the tables of a region's pages, the owner ended the whole process.
#[test]
fn a_region_too_large_for_its_tables_is_refused() {
    for size in [1 << 45, 1 << 46, 1 << 62, usize::MAX] {
        match SharedRegion::create(size, &SharedOptions::new(8 * MIB)) {
            // Some systems promise memory to anybody.
            Ok(_) => assert!(size < 1 << 46),
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::OutOfMemory, "{e}"),
        }
    }
}

/// The story: the message about lost pages was printed with the region's lock held. If standard error was a pipe that nobody
/// read, all users of the region waited.
#[test]
fn who_does_not_read_what_is_said_holds_nobody_up() {
    let mut child = worker("unread", &socket_path("unread"), 0).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = Lines::of(&mut child);
    let (say, said) = channel();
    std::thread::spawn(move || say.send(lines.next()));
    let served = said.recv_timeout(LONGEST);
    // A reader gets the message.
    let (mut read, (say, said)) = (child.stderr.take().unwrap(), channel());
    std::thread::spawn(move || {
        let (mut error, mut some) = (String::new(), [0; 4096]);
        while let Ok(n @ 1..) = read.read(&mut some) {
            error.push_str(std::str::from_utf8(&some[..n]).unwrap());
            if error.contains("it could not be seen whether") {
                return say.send(()).unwrap();
            }
        }
    });
    let read = served.is_ok().then(|| said.recv_timeout(LONGEST));
    let _ = child.kill();
    child.wait().unwrap();
    assert_eq!(served.unwrap().as_deref(), Some("served"));
    assert_eq!(read, Some(Ok(())));
}

/// Page-outs that are held back until they are let go.
struct Holding<'a>(&'a SharedRegion, &'a Receiver<u64>);

impl Holding<'_> {
    fn let_go(self) {
        let out = self.1;
        drop(self);
        out.recv_timeout(LONGEST).expect("the page-out ends");
    }
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        let _ = self.0.control().inject(HOLD, 0);
    }
}

/// A worker has mapped a page with an unknown marker, that page is on its way out, and the worker writes to it when its input
/// ends.
fn write_to_unknown(name: &str, work: impl FnOnce(&SharedRegion, &mut Child, Holding<'_>)) {
    let path = socket_path(name);
    let region = region(4 * MIB, 8 * MIB);
    region.serve(&path).unwrap();
    let mine = region.map().unwrap();
    let mut child = worker("marked-write", &path, BAD).spawn().unwrap();
    let mut lines = Lines::of(&mut child);
    assert_eq!(lines.next().as_deref(), Some("marked"));
    region.control().inject(HOLD, 1).unwrap();
    let (done, out) = channel();
    std::thread::scope(|scope| {
        let holding = Holding(&region, &out);
        let mine = &mine;
        scope.spawn(move || done.send(mine.page_out(at(BAD)).unwrap()));
        region.control().inject(HELD, 0).unwrap();
        work(&region, &mut child, holding);
    });
    let status = wait_within(&mut child, LONGEST);
    assert_eq!((status.signal(), lines.next()), (Some(libc::SIGBUS), None));
    assert_eq!(value(&mine, BAD), BEFORE);
}

/// The story: a page with an unknown marker was being paged out. A writer was let through, and what it wrote was lost for
/// everybody.
#[test]
fn an_unknown_marker_is_an_error_on_the_way_out_too() {
    write_to_unknown("marked-busy", |_, child, holding| {
        drop(child.stdin.take());
        let begun = Instant::now();
        while child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < LONGEST, "a writer waits");
            std::thread::yield_now();
        }
        holding.let_go();
    });
}

/// The story: writers to a pinned page, which could not be paged out, were let through as if nothing were wrong.
#[test]
fn who_writes_to_a_pinned_page_with_an_unknown_marker_waits_for_the_error() {
    write_to_unknown("marked-pinned", |region, child, holding| {
        // It keeps the write-protection of the page-out that it is taken from.
        let pin = region.control().pin(at(BAD)).unwrap();
        holding.let_go();
        let faults = || region.control().stats().unwrap().faults;
        let (before, begun) = (faults(), Instant::now());
        drop(child.stdin.take());
        // The writer faults more than once, so it waits.
        while faults() < before + 2 && child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < LONGEST, "the writer never faulted twice");
            std::thread::yield_now();
        }
        assert_eq!(child.try_wait().unwrap(), None);
        assert!(region.control().page_map().get(BAD as u64).present());
        drop(pin);
    });
}

#[test]
fn unknown_markers_are_set_in_regions_for_tests_only() {
    let region = SharedRegion::create(MIB, &SharedOptions::new(8 * MIB)).unwrap();
    let m = region.map().unwrap();
    let error = m.inject_marker(BAD as u64, UNKNOWN).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
}

/// Has the kernel read a word of a page, which gives an error without a signal.
fn read_by_kernel(m: &SharedMapping, page: usize, file: &std::fs::File) -> Option<u64> {
    let mut word = [0u8; 8];
    // SAFETY: within the mapping; the kernel only copies from it.
    let wrote = unsafe { libc::pwrite(file.as_raw_fd(), words(m, page)[7..].as_ptr().cast(), word.len(), 0) };
    if wrote < 0 {
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
        return None;
    }
    std::os::unix::fs::FileExt::read_exact_at(file, &mut word, 0).unwrap();
    Some(u64::from_ne_bytes(word))
}

/// The story: a process that had touched a bad page kept getting the error there, as the kernel keeps it through a punched hole.
/// So it was even after the page had been removed, and was zeros for everybody else.
#[test]
fn what_is_removed_is_no_error_any_more() {
    let region = region(4 * MIB, 8 * MIB);
    let (a, b) = (region.map().unwrap(), region.map().unwrap());
    if !a.kernel_faults() || !region.control().sees_removes() {
        return crate::alone::skip("the kernel's own faults may not be served here");
    }
    let (control, file) = (region.control(), super::tempfile());
    let read = |m: &SharedMapping, page| read_by_kernel(m, page, &file);
    // One process's own error, by an unknown marker; and a page lost for all, as it could not be seen whether it was removed.
    (0..16).for_each(|page| write(&a, page, BEFORE));
    a.inject_marker(BAD as u64, UNKNOWN).unwrap();
    control.page_out(bytes(0..16)).unwrap();
    assert_eq!((read(&a, BAD), value(&b, BAD)), (None, BEFORE));
    control.inject(BLIND, 1).unwrap();
    unmap(&a, 2..6);
    assert_eq!([&a, &b].map(|m| (read(m, 3), read(m, 4))), [(None, None); 2]);
    for remove_again in [false, true] {
        control.remove(bytes(0..16)).unwrap();
        let states: Vec<_> = (0..16).map(|p| state(a.page_map().get(p))).collect();
        assert_eq!(states, [NONE; 16], "{remove_again}");
    }
    assert_eq!(control.stats().unwrap().resident, 0);
    for page in 0..16 {
        assert_eq!((read(&a, page), read(&b, page)), (Some(0), Some(0)), "page {page}");
        write(&a, page, AFTER);
    }
    assert_eq!(control.page_out(bytes(0..16)).unwrap(), 16);
    assert!((0..16).all(|page| value(&a, page) == AFTER && value(&b, page) == AFTER));
}

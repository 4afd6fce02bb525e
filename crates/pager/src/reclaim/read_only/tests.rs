//! Tests of read-only memory that leaves: by a thread that serves faults, beside one that copies and drops.

use super::*;
use crate::fault::Request;
use crate::fault::handler::Handler;
use crate::pool::batch::Batch;
use crate::testing;
use uzswap_mm::pagetable::Pte;
use uzswap_sys::uffd::Message;

const N: usize = 2 * PIECE + 32;

/// A program's memory that it has filled and made read-only, and that was refused as such; returns its first page.
fn refused(p: &'static Pager) -> u64 {
    let at = testing::memory(p, N);
    (0..N).for_each(|page| testing::put(p, at + page * PAGE, &testing::words(page as u64)));
    protect(at, libc::PROT_READ);
    let first = (at / PAGE) as u64;
    let s = &mut *p.state.lock();
    s.leaving.refill();
    s.managed.push((at, at + N * PAGE));
    s.list_resident(first, N, List::Inactive, |_| None);
    assert_eq!((p.stage(s, 2 * N).ok(), s.lru.unevictable.pages()), (Some(0), N));
    first
}

fn protect(at: usize, prot: i32) {
    // SAFETY: memory of the test's own.
    unsafe { sys!(libc::SYS_mprotect, at, N * PAGE, prot) }.expect("mprotect");
}

/// Serves faults and events, as the handler does, until `done`.
fn serve_until(p: &'static Pager, done: impl Fn() -> bool) {
    while !done() {
        let mut s = p.state.lock();
        match p.uffd().read().expect("messages are read") {
            Some(Message::Fault { address, write, protected, .. }) => {
                // A thread that gets no answer faults again.
                if p.serve(&mut s, Request::at(address, write, protected)).is_err() {
                    p.uffd().wake(address, PAGE);
                }
            }
            Some(event) => p.event(&mut s, event),
            None => {
                drop(s);
                std::thread::yield_now();
            }
        }
    }
}

/// The same while another thread runs `act`.
fn serving<T: Send>(p: &'static Pager, act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let acts = scope.spawn(act);
        serve_until(p, || acts.is_finished());
        acts.join().unwrap()
    })
}

/// The first piece that was noted, on its way out.
fn begun(p: &Pager) -> Piece {
    let s = &mut *p.state.lock();
    let (vpn, n) = s.leaving.noted.pop_front().expect("it was noted");
    p.begin_copy(s, vpn, n).expect("it may leave")
}

fn count(p: &Pager, first: u64, is: fn(Tag) -> bool) -> usize {
    let s = p.state.lock();
    (first..first + N as u64).filter(|vpn| is(s.pt.get(*vpn).tag())).count()
}

/// The pages that are there, as the kernel says.
fn there(p: &Pager, first: u64) -> usize {
    let (at, mut n) = (first as usize * PAGE, 0);
    let note = |a, b| n += (b - a) / PAGE;
    pagemap::present_runs(p.files.pagemap.load(Relaxed), at, at + N * PAGE, note).expect("the kernel can say");
    n
}

fn take_all(p: &'static Pager) {
    p.state.lock().leaving.refill();
    serving(p, || while p.take_read_only() {});
}

/// Reads all pages, as a program does, and compares them, except those `written` to.
fn is_right(p: &'static Pager, first: u64, written: &[(u64, u8)]) {
    serving(p, || {
        for page in 0..N as u64 {
            // SAFETY: the test's own memory, which nobody writes to now.
            let content = unsafe { core::slice::from_raw_parts(((first + page) as usize * PAGE) as *const u8, PAGE) };
            let mut wanted = testing::words(page);
            if let Some((_, byte)) = written.iter().find(|(at, _)| *at == page) {
                wanted[7] = *byte;
            }
            assert!(content == wanted, "page {page}");
        }
    });
}

#[test]
fn what_is_read_only_leaves_by_a_copy_and_comes_back() {
    let p = testing::pager_told_of_moves(16 << 20);
    let first = refused(p);
    for round in 0..3 {
        take_all(p);
        assert_eq!((count(p, first, |t| t == Tag::Staged), there(p, first)), (N, 0), "round {round}");
        let mut s = p.state.lock();
        assert!(!s.leaving.has(first) && !s.leaving.drops && s.resident == 0);
        let mut batch = Batch::new(s.new_compressor());
        if round > 0 {
            p.prepare(&mut s, &mut batch, N, 0);
            p.store_now(&mut s, &mut batch);
        }
        drop(s);
        is_right(p, first, &[]);
        assert_eq!((count(p, first, |t| t == Tag::Resident), there(p, first)), (N, N), "round {round}");
        // All of it, whatever was used last.
        assert_eq!(p.stage_range(&mut p.state.lock(), first, first + N as u64).0, 0);
    }
    // What is written once that is allowed is the program's.
    take_all(p);
    protect(first as usize * PAGE, libc::PROT_READ | libc::PROT_WRITE);
    let at = (first as usize + 3) * PAGE + 7;
    // SAFETY: the test's own memory.
    serving(p, || unsafe { (at as *mut u8).write(1) });
    is_right(p, first, &[(3, 1)]);
}

/// The program's own advice is not taken for uzswap's: what it drops becomes zeros.
#[test]
fn what_the_program_drops_is_gone() {
    let p = testing::pager_told_of_moves(16 << 20);
    let first = refused(p);
    take_all(p);
    let dropped = serving(p, || drop_pages(first as usize * PAGE, PIECE));
    assert_eq!((dropped, count(p, first, |t| t == Tag::None)), (Ok(()), PIECE));
    let mut leaving = Leaving { pages: 8..16, drops: true, ..Leaving::default() };
    let own = |leaving: &Leaving| {
        [(8, 10), (8, 16), (7, 11), (15, 17), (3, 4)].map(|(a, b)| leaving.is_own(a * PAGE, b * PAGE))
    };
    assert_eq!(own(&leaving), [true, true, false, false, false]);
    leaving.drops = false;
    assert_eq!(own(&leaving), [false; 5]);
}

/// The memory was made writable while it was being copied: the copy may hold half of a write.
#[test]
fn what_is_written_to_while_it_is_copied_stays() {
    let p = testing::pager_told_of_moves(16 << 20);
    let first = refused(p);
    let (at, free) = (first as usize * PAGE, || p.state.lock().zone.free_slots(Kind::Frame));
    let piece = begun(p);
    let (pages, page, before) = (piece.n, piece.vpn - first, free());
    let place = piece.address() + 7;
    protect(at, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: the test's own memory.
    serving(p, || unsafe { (place as *mut u8).write(9) });
    assert!(p.state.lock().leaving.written);
    assert_eq!(serving(p, || p.copy_and_drop(piece)), 0);
    assert_eq!((count(p, first, |t| t == Tag::Resident), there(p, first), free()), (N, N, before + pages));
    is_right(p, first, &[(page, 9)]);
}

/// The story: a program made part of the memory writable while it was being dropped. The kernel lets go of the mappings while it
/// reports the drop; it then finds two, and reports what is left of them once more. That was taken for the program's own advice,
/// and the copy was forgotten: the memory read as zeros.
#[test]
fn what_is_made_two_mappings_while_it_is_dropped_is_not_forgotten() {
    let p = testing::pager_told_of_moves(16 << 20);
    let first = refused(p);
    let large = p.state.lock().leaving.noted.iter().copied().find(|(_, n)| *n >= PIECE / 2);
    let (vpn, n) = large.expect("more than a little was noted");
    let piece = p.begin_copy(&mut p.state.lock(), vpn, n).expect("it may leave");
    let (pages, half) = (piece.n, piece.address() + piece.n / 2 * PAGE);
    std::thread::scope(|scope| {
        let drops = scope.spawn(|| p.copy_and_drop(piece));
        // Its event is there, but unread.
        while !p.state.lock().leaving.drops || !p.uffd().wait(0) {
            std::thread::yield_now();
        }
        // SAFETY: memory of the test's own.
        unsafe { sys!(libc::SYS_mprotect, half, pages / 4 * PAGE, libc::PROT_READ | libc::PROT_WRITE) }
            .expect("mprotect");
        serve_until(p, || drops.is_finished());
        assert_eq!(drops.join().unwrap(), pages);
    });
    assert_eq!((count(p, first, |t| t == Tag::Staged), there(p, first)), (pages, N - pages));
    is_right(p, first, &[]);
}

/// The memory was made writable after it was copied: a thread that writes waits, and writes to what comes back.
#[test]
fn who_writes_to_what_is_dropped_writes_to_what_comes_back() {
    let p = testing::pager_told_of_moves(16 << 20);
    let first = refused(p);
    let at = first as usize * PAGE;
    let piece = begun(p);
    let (pages, page) = (piece.n, piece.vpn - first);
    let place = piece.address() + 7;
    std::thread::scope(|scope| {
        // It waits until its event is read.
        let drops = scope.spawn(|| p.copy_and_drop(piece));
        while !p.state.lock().leaving.drops {
            std::thread::yield_now();
        }
        protect(at, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: the test's own memory.
        let writes = scope.spawn(move || unsafe { (place as *mut u8).write(9) });
        while !p.uffd().wait(-1) {}
        serve_until(p, || drops.is_finished() && writes.is_finished());
        assert_eq!(drops.join().unwrap(), pages);
    });
    is_right(p, first, &[(page, 9)]);
}

/// See [`Pager::write_to_leaving`].
#[test]
fn who_writes_to_what_is_dropped_is_not_woken_before_it_is() {
    let p = testing::pager_told_of_moves(16 << 20);
    let first = refused(p);
    let piece = begun(p);
    let (place, page) = (piece.address() + 7, piece.vpn - first);
    let is_one = |what: &str| {
        let said = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", p.uffd().fd())).expect("fdinfo");
        said.contains(&format!("{what}:\t1\n"))
    };
    std::thread::scope(|scope| {
        let drops = scope.spawn(|| p.copy_and_drop(piece));
        // Its event is there, but unread.
        while !p.state.lock().leaving.drops || !p.uffd().wait(0) {
            std::thread::yield_now();
        }
        protect(first as usize * PAGE, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: the test's own memory.
        let writes = scope.spawn(move || unsafe { (place as *mut u8).write(9) });
        while !is_one("pending") {
            std::thread::yield_now();
        }
        // The kernel hands out the fault first.
        let Ok(Some(Message::Fault { address, write, protected, .. })) = p.uffd().read() else { panic!("no fault") };
        let served = p.serve(&mut p.state.lock(), Request::at(address, write, protected));
        let waits = is_one("total") && !is_one("pending");
        serve_until(p, || drops.is_finished() && writes.is_finished());
        assert!(served.is_ok() && waits, "it faults again and again, before the event is read");
    });
    is_right(p, first, &[(page, 9)]);
}

/// See [`Leaving::note_left`].
#[test]
fn what_has_left_and_come_back_while_it_was_copied_stays() {
    let p = testing::pager_told_of_moves(16 << 20);
    let first = refused(p);
    let piece = begun(p);
    protect(first as usize * PAGE, libc::PROT_READ | libc::PROT_WRITE);
    let (vpn, pages, slot, place) = (piece.vpn, piece.n, piece.slot, piece.address() + 7);
    std::thread::scope(|scope| {
        let mut s = p.state.lock();
        let copies = scope.spawn(|| p.copy_and_drop(piece));
        while p.leading(slot, pages, true) < pages {
            std::thread::yield_now();
        }
        assert_eq!(p.stage_range(&mut s, vpn, vpn + 1), (1, vpn + 1));
        assert!(p.serve(&mut s, Request { vpn, write: true, protected: false }).is_ok(), "no event is unread");
        // SAFETY: the test's own memory, which is there.
        unsafe { (place as *mut u8).write(9) };
        drop(s);
        serve_until(p, || copies.is_finished());
        assert_eq!(copies.join().unwrap(), 0);
    });
    is_right(p, first, &[(vpn - first, 9)]);
}

/// See `window`: a page that is being dropped, of which only the copy is known, is present until then.
#[test]
fn what_is_dropped_does_not_leave_with_what_is_around_it() {
    let p = testing::pager(16 << 20);
    let first = (testing::filled(p, 2 * BLOCK_PAGES) / PAGE).next_multiple_of(BLOCK_PAGES) as u64;
    let s = &mut *p.state.lock();
    s.list_resident(first + 4, 1, List::Inactive, |_| None);
    s.list_resident(first + 2, 1, List::Inactive, |_| None);
    s.pt.set(first + 3, Pte::new(Tag::Zero, 0));
    s.zeros += 1;
    (s.leaving.pages, s.leaving.drops) = (first + 3..first + 4, true);
    let victim = s.lru.pop_victim().expect("the first that came");
    assert_eq!(p.stage_window(s, victim).ok(), Some(1));
    assert_eq!([2, 3, 4].map(|page| s.pt.get(first + page).tag()), [Tag::Resident, Tag::Zero, Tag::Staged]);
}

/// Pages that cannot be dropped are the program's; those that were dropped are not.
#[test]
fn what_cannot_be_dropped_stays() {
    let p = testing::pager_told_of_moves(16 << 20);
    let first = refused(p);
    p.group.faults.set("seed=3,drop=1/1", 3).unwrap();
    for round in 0..20 {
        take_all(p);
        let [staged, resident] = [Tag::Staged, Tag::Resident].map(|tag| {
            let s = p.state.lock();
            (first..first + N as u64).filter(|vpn| s.pt.get(*vpn).tag() == tag).count()
        });
        assert_eq!((staged + resident, there(p, first)), (N, resident), "round {round}");
        assert!(resident > 0 && p.state.lock().staged == staged);
        is_right(p, first, &[]);
        let mut s = p.state.lock();
        s.leaving.noted.clear();
        s.lru.rescue();
        let _ = p.stage(&mut s, 2 * N);
    }
    // And what cannot be copied.
    p.group.faults.set("drop=0/1,copy=1/1", 3).unwrap();
    assert!(!serving(p, || p.take_read_only()));
    p.group.faults.set("copy=0/1", 3).unwrap();
    assert_eq!((count(p, first, |t| t == Tag::Resident), there(p, first)), (N, N));
    is_right(p, first, &[]);
}

/// Read-only memory may have been pinned before it became so.
#[test]
fn what_may_be_pinned_stays() {
    let p = testing::pager_told_of_moves(16 << 20);
    let first = refused(p);
    let (_, n) = p.state.lock().leaving.noted[0];
    p.may_pin();
    assert!(!serving(p, || p.take_read_only()) && p.begin_copy(&mut p.state.lock(), first, n).is_none());
    assert_eq!((count(p, first, |t| t == Tag::Resident), there(p, first)), (N, N));
    // Nor is it noted again.
    let mut s = p.state.lock();
    s.leaving.noted.clear();
    p.note_read_only(&mut s, first, n);
    assert!(!s.leaving.waits());
}

/// Locked memory is not touched.
#[test]
fn what_is_locked_as_well_stays() {
    let p = testing::pager_told_of_moves(16 << 20);
    let first = refused(p);
    // SAFETY: the test's own memory.
    if unsafe { sys!(libc::SYS_mlock, first as usize * PAGE, N * PAGE) }.is_err() {
        return testing::skip("no memory may be locked");
    }
    assert!(!serving(p, || p.take_read_only()));
    assert_eq!((count(p, first, |t| t == Tag::Resident), there(p, first)), (N, N));
}

/// See `Handler::read`. The story: a thread got two signals on a stack that had been read-only and was just being dropped. It faulted
/// again and again, and the kernel hands out faults before events, so each turn met another fault instead of the event of the drop,
/// which all waited for. A program stood still for up to eleven seconds.
#[test]
fn the_event_of_a_drop_is_reached_behind_faults_that_wait_for_it() {
    let p = testing::pager_told_of_moves(16 << 20);
    let first = refused(p);
    let (piece, at) = (begun(p), first as usize * PAGE);
    p.signs.watched.store(true, Relaxed);
    p.state.lock().leaving.drops = true;
    protect(at, libc::PROT_READ | libc::PROT_WRITE);
    let ends = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let drops = scope.spawn(|| drop_pages(at + PAGE, 1).expect("the drop"));
        assert!(p.uffd().wait(-1), "its event");
        let writes = scope.spawn(|| {
            // SAFETY: memory of the test's own.
            unsafe { (at as *mut u8).write_volatile(9) };
            ends.store(1, SeqCst);
        });
        let queued = || std::fs::read_to_string(format!("/proc/self/fdinfo/{}", p.uffd().fd())).expect("fdinfo");
        while queued().contains("pending:\t0\n") {
            std::thread::yield_now();
        }
        let mut handler = Handler::default();
        handler.turn(p);
        assert_eq!(p.uffd().read(), Ok(None), "all is read in the first turn");
        drops.join().expect("its call ends");
        assert_eq!(ends.load(SeqCst), 0, "it waits still");
        p.end_copy(&mut p.state.lock(), &piece);
        writes.join().expect("it goes on");
    });
}

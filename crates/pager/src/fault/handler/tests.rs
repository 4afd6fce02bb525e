//! Tests of the handler, turn by turn.

use super::*;
use crate::testing;
use std::thread::JoinHandle;
use uzswap_mm::pagetable::Pte;
use uzswap_sys::uffd::Uffd;
use uzswap_sys::{eventfd, pagemap, sys, uffd};

fn handler(p: &Pager) -> (Handler, i32) {
    let event = eventfd::create().unwrap();
    p.signs.watched.store(true, Relaxed);
    (Handler { reads: Reads::by_threads(event), ..Handler::default() }, event)
}

/// The story: a reading thread had stored its result but not yet raised its event when the handler took both results, on the
/// event of another reading thread. Nobody took the event that was raised then, as no read was under way. The handler looked for
/// messages forever, with all of a CPU, until the next read.
#[test]
fn an_event_that_comes_late_keeps_nobody_awake() {
    let p = testing::pager_with_swap(8 << 20);
    let (mut handler, event) = handler(p);
    eventfd::raise(event);
    handler.turn(p);
    assert!(!uffd::is_readable(event));
}

/// See `drop_gone`. Two pages are asked for; the first is dropped, or unmapped and mapped anew for another userfaultfd.
#[test]
fn what_is_gone_is_not_brought() {
    for anew in [false, true] {
        let p = testing::pager_told_of_moves(16 << 20);
        let (at, (theirs, _)) = (testing::memory(p, 2), Uffd::open(0).expect("access to userfaultfd"));
        let first = (at / PAGE) as u64;
        let (mut handler, _) = handler(p);
        for vpn in [first, first + 1] {
            let s = &mut *p.state.lock();
            (s.zeros, handler.retry) = (s.zeros + 1, true);
            s.pt.set(vpn, Pte::new(Tag::Zero, 0));
            handler.waiting.push(Waiting::new(Request { vpn, write: false, protected: false }));
        }
        let program = std::thread::spawn(move || {
            if !anew {
                // SAFETY: memory of the test's own, of which nothing is needed.
                return unsafe { sys!(libc::SYS_madvise, at, PAGE, libc::MADV_DONTNEED) }.map(drop).expect("madvise");
            }
            let (rw, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: as above.
            unsafe { sys!(libc::SYS_mmap, at, PAGE, rw, flags | libc::MAP_FIXED, -1isize, 0) }.expect("mmap");
            theirs.register(at, PAGE).expect("it is nobody's");
        });
        assert!(p.uffd().wait(-1), "the event");
        handler.turn(p);
        program.join().expect("its call ends");
        while !handler.waiting.is_empty() {
            handler.turn(p);
        }
        let tags = [first, first + 1].map(|vpn| p.state.lock().pt.get(vpn).tag());
        assert_eq!(tags, [Tag::None, Tag::Resident], "mapped anew: {anew}");
        let mut there = Vec::new();
        let note = |from, to| there.push((from, to));
        pagemap::present_runs_read(p.files.pagemap.load(Relaxed), at, at + 2 * PAGE, note).expect("pagemap");
        assert_eq!(there, [(at + PAGE, at + 2 * PAGE)], "mapped anew: {anew}");
    }
}

/// See `Handler::read`: a fault that waits already, which the kernel hands out first, keeps no event from being read.
#[test]
fn an_event_is_reached_behind_faults_that_wait_for_it() {
    let p = testing::pager_told_of_moves(16 << 20);
    let at = testing::memory(p, 2);
    let first = (at / PAGE) as u64;
    let (mut handler, _) = handler(p);
    for vpn in [first, first + 1] {
        let s = &mut *p.state.lock();
        s.zeros += 1;
        s.pt.set(vpn, Pte::new(Tag::Zero, 0));
    }
    handler.waiting.push(Waiting::new(Request { vpn: first, write: false, protected: false }));
    handler.retry = true;
    let (drops, touches) = drop_one_and_touch_another(p, at + PAGE, at);
    handler.turn(p);
    assert_eq!(p.state.lock().pt.get(first + 1).tag(), Tag::None, "what was dropped is forgotten in the first turn");
    assert_eq!(p.signs.faulted.load(Relaxed), 0, "the fault was read before");
    while !handler.waiting.is_empty() {
        handler.turn(p);
    }
    drops.join().expect("its call ends");
    assert_eq!(touches.join().expect("its page comes"), 0);
    assert!(!p.calls.are_waited_for(Waits::Fault));
}

/// While an event is unread no fault is served, and no call that would make another event may begin.
#[test]
fn calls_are_held_back_while_a_fault_waits_for_one() {
    let p = testing::pager_told_of_moves(16 << 20);
    let at = testing::memory(p, 2);
    let (mut handler, _) = handler(p);
    p.state.lock().zeros += 1;
    p.state.lock().pt.set((at / PAGE) as u64, Pte::new(Tag::Zero, 0));
    let (drops, touches) = drop_one_and_touch_another(p, at + PAGE, at);
    // The kernel hands out the fault first.
    handler.turn(p);
    assert!(!handler.waiting.is_empty() && p.calls.are_waited_for(Waits::Fault));
    while !handler.waiting.is_empty() {
        handler.turn(p);
    }
    drops.join().expect("its call ends");
    assert_eq!(touches.join().expect("its page comes"), 0);
    assert!(!p.calls.are_waited_for(Waits::Fault));
}

/// Starts two threads, one that drops a page and one that touches one; returns when both wait for messages to be read: the event
/// and the fault.
fn drop_one_and_touch_another(p: &Pager, dropped: usize, touched: usize) -> (JoinHandle<()>, JoinHandle<u8>) {
    let drops = std::thread::spawn(move || {
        // SAFETY: memory of the test's own, of which nothing is needed.
        unsafe { sys!(libc::SYS_madvise, dropped, PAGE, libc::MADV_DONTNEED) }.map(drop).expect("madvise")
    });
    assert!(p.uffd().wait(-1), "the event");
    // SAFETY: as above.
    let touches = std::thread::spawn(move || unsafe { (touched as *const u8).read_volatile() });
    let queued = || std::fs::read_to_string(format!("/proc/self/fdinfo/{}", p.uffd().fd())).expect("fdinfo");
    while queued().contains("pending:\t0\n") {
        std::thread::yield_now();
    }
    (drops, touches)
}

/// A pager with 400 pages in its pool, from the returned page on, which may go to disk; beside a member that holds 2 MiB and has
/// nothing to give.
fn pool_of_400() -> (&'static Pager, u64) {
    let (p, vpn) = (testing::pager_with_swap(8 << 20), 1 << 20);
    let mut s = p.state.lock();
    (0..100).for_each(|i| _ = testing::store(&mut s, vpn + 4 * i, 2, 0, testing::half_noise));
    p.tier.file.store(0, Relaxed);
    let other = &p.group.slots[7];
    p.group.used.store(8, Relaxed);
    other.owner.store(uzswap_sys::process::Identity::own().raw(), Relaxed);
    other.rss.store(2 << 20, Relaxed);
    (p, vpn)
}

/// Makes its limit exceeded, or not.
fn set_full(p: &Pager, is: bool) {
    p.group.nodes[0].max.store(if is { 1 << 20 } else { 1 << 40 }, Relaxed);
}

/// Drops those pages, so that nothing is left.
fn forget(p: &Pager, vpn: u64) {
    set_full(p, false);
    p.tier.file.store(-1, Relaxed);
    crate::calls::events::forget_range(&mut p.state.lock(), vpn, vpn + 400);
}

/// See [`Handler::wait_for_writer`].
#[test]
fn who_waits_for_the_writer_waits_for_as_long_as_it_takes() {
    let (p, vpn) = pool_of_400();
    let (mut handler, _) = handler(p);
    let full = |is: bool| set_full(p, is);
    // (events of the writer's, how often it has written, whether it makes room): whether the disk helps
    for (events, writes, room, helps) in [(true, 0, true, true), (true, 1, false, true), (false, 0, false, false)] {
        full(true);
        assert!(p.waits_for_disk(&p.state.lock()));
        let (begin, begun) = std::sync::mpsc::channel();
        let progress = move || {
            p.tier.progress.fetch_add(1, Release);
            lock::futex_wake(&p.tier.progress, 1, false);
        };
        let writer = std::thread::spawn(move || {
            begun.recv().unwrap();
            let began = thread::now_ns();
            while events && thread::now_ns() - began < DISK_WAIT_NS / 4 && p.tier.helps.load(Relaxed) {
                progress();
                std::thread::yield_now();
            }
            p.tier.writes.fetch_add(writes, Relaxed);
            full(!room);
            progress();
        });
        let s = p.state.lock();
        begin.send(()).unwrap();
        drop(handler.wait_for_writer(p, s, vpn));
        writer.join().unwrap();
        assert_eq!(p.tier.helps.load(Relaxed), helps, "{events} {writes} {room}");
    }
    forget(p, vpn);
}

/// See [`Handler::waits_for_slow_disk`]. The wait ends when the write succeeds, there is room without it, it fails, or it stands
/// still.
#[test]
fn who_waits_for_a_slow_disk_waits_for_its_write() {
    let (p, vpn) = pool_of_400();
    let (mut handler, _) = handler(p);
    let full = |is: bool| set_full(p, is);
    let began = &p.tier.began[1];
    for end in 0..4 {
        full(true);
        p.tier.helps.store(true, Relaxed);
        began.store(thread::now_ns(), Relaxed);
        let s = handler.wait_for_writer(p, p.state.lock(), vpn);
        assert!(p.tier.helps.load(Relaxed) && p.waits_for_disk(&s), "it is at work");
        let stalled = p.counters().stall_ns.load(Relaxed);
        for _ in 0..3 {
            assert!(handler.waits_for_slow_disk(p, &s), "for as long as it takes");
        }
        assert!(p.me().disk_at.load(Relaxed) != 0, "the others know");
        match end {
            0 => _ = p.tier.writes.fetch_add(1, Relaxed),
            1 => full(false),
            2 => began.store(0, Relaxed),
            // Longer than any disk is waited for.
            _ => began.store(thread::now_ns() - 11_000_000_000, Relaxed),
        }
        assert!(!handler.waits_for_slow_disk(p, &s), "end {end}");
        assert!(p.counters().stall_ns.load(Relaxed) > stalled, "the stall is counted");
        assert_eq!(p.disk_takes_over(&s), end < 3, "a disk that stands still makes no room");
    }
    began.store(0, Relaxed);
    forget(p, vpn);
}

/// The story: the last read under way was one that its thread could not make. The handler slept until some other message came,
/// while the fault that needed the read waited; and the disk was said not to have answered for 10 seconds.
#[test]
fn what_could_not_be_tried_is_asked_for_again() {
    let p = testing::pager_with_swap(8 << 20);
    let (mut handler, _) = handler(p);
    handler.reads.be_refused(p);
    handler.reads.look(p);
    assert!(!handler.is_idle(), "the waiting fault asks again");
    assert!(p.tier.began.iter().all(|began| began.load(Relaxed) == 0), "nothing is under way");
    handler.serve_waiting(p, &mut p.state.lock());
    assert!(handler.is_idle());
}

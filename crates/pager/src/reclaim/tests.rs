//! Tests of when reclaim works, and how much it evicts.

use super::*;
use crate::group::folio::MAX_ORDER;
use crate::testing;
use uzswap_mm::lru::List;

/// The story: Java at half of its memory was left with 125 pages, as its code and stacks and the pool filled the limit, and did
/// nothing but fault. The pool alone took less than half of the limit, so nothing had to stay.
#[test]
fn a_few_mib_stay_whatever_fills_the_limit() {
    let p = testing::pager(16 << 20);
    let mut s = p.state.lock();
    for (rss, resident, floor) in [(17, 1, true), (17, 5, false), (8, 1, false)] {
        s.rss = rss << 20;
        testing::seem_resident(&mut s, (resident << 20) / PAGE);
        assert_eq!(p.at_floor(&s), floor, "{resident} of {rss} MiB");
    }
    testing::seem_resident(&mut s, 0);
}

/// The story: a process at its floor reported that it finds nothing to evict while its pool was still shrinking.
#[test]
fn whose_pool_shrinks_gets_on_at_its_floor() {
    let p = testing::pager(8 << 20);
    p.group.used.store(2, Relaxed);
    let other = &p.group.slots[1];
    other.owner.store(uzswap_sys::process::Identity::own().raw(), Relaxed);
    other.rss.store(9 << 20, Relaxed);
    let mut s = p.state.lock();
    let mut vpn = 0x1000;
    while s.pool.held_bytes() <= p.limit() / 2 {
        testing::store(&mut s, vpn, 0, 0, testing::words);
        vpn += 1;
    }
    assert!(p.at_floor(&s));
    let stuck = |s: &mut State| {
        let _ = p.make_room(s, 1);
        p.me().stuck.load(Relaxed) != 0
    };
    let (mut dense, recompressed) = (0, || p.counters().recompressed_pages.load(Relaxed));
    while p.at_floor(&s) {
        let is_stuck = stuck(&mut s);
        let did = recompressed() > dense;
        assert!(did != is_stuck, "{} pages are dense, stuck: {is_stuck}", recompressed());
        if is_stuck {
            break;
        }
        dense = recompressed();
    }
    assert!(dense > 0);
}

/// See [`Pager::at_floor`]: the process's threads must be able to have several pages each at once.
#[test]
fn a_little_stays_where_other_members_fill_the_limit() {
    const KIB: usize = 1 << 10;
    let p = testing::pager(32 << 20);
    p.group.used.store(2, Relaxed);
    let other = &p.group.slots[1];
    other.owner.store(uzswap_sys::process::Identity::own().raw(), Relaxed);
    let mut s = p.state.lock();
    for (others, engaged, resident, floor) in [
        (40 << 10, 0, 600, true),
        (40 << 10, 0, 1200, false),
        (15 << 10, 0, 600, false),
        (40 << 10, 15, 200, true),
        (40 << 10, 15, 300, false),
    ] {
        other.rss.store((others * KIB) as u64, Relaxed);
        p.count_sharers();
        p.sharers.store(1 + engaged, Relaxed);
        s.rss = resident * KIB;
        testing::seem_resident(&mut s, resident * KIB / PAGE);
        assert_eq!(
            p.at_floor(&s),
            floor,
            "{resident} KiB, beside {others} KiB of others, of which {engaged} are engaged"
        );
    }
    testing::seem_resident(&mut s, 0);
}

/// See [`Pager::make_room`]: a dead member's charge is returned even if the limit is kept.
#[test]
fn who_reclaims_for_what_a_dead_member_charges_returns_that() {
    for by_handler in [false, true] {
        let p = testing::pager(64 << 20);
        let dead = testing::dead_process();
        let other = &p.group.slots[7];
        p.group.used.store(8, Relaxed);
        // Just below the limit, and just in reach of it.
        let own = p.rss_now(&p.state.lock());
        let (limit, near) = (p.limit(), p.margin() / 4);
        other.owner.store(dead.raw(), Relaxed);
        other.rss.store(limit.saturating_sub(own + near) as u64, Relaxed);
        if by_handler {
            let mut s = p.state.lock();
            (0..8).for_each(|_| s.placement.fault_on(0, 1, crate::fault::placement::Helpers::default(), false));
            s.rss = own;
            let _ = p.make_room(&mut s, 1);
        } else {
            p.wants_reclaim();
        }
        assert_eq!((other.owner.load(Relaxed), other.rss.load(Relaxed)), (0, 0), "by the handler: {by_handler}");
    }
}

/// See the file's head: neither an exceeded limit nor few frames are a reason to take the last of a program's memory.
#[test]
fn a_floor_is_left_though_the_limit_is_exceeded_and_frames_are_few() {
    const PAGES: usize = 4096;
    let p = testing::pager(16 << 20);
    let at = testing::memory(p, PAGES);
    let mut page = [0u8; PAGE];
    let mut batch = {
        let s = &mut *p.state.lock();
        for i in 0..PAGES {
            // Nothing that compresses, as the pool is to grow.
            (0..PAGE / 8).for_each(|k| {
                page[k * 8..][..8].copy_from_slice(&crate::chance::mix((i * PAGE + k) as u64).to_le_bytes());
            });
            testing::put(p, at + i * PAGE, &page);
            s.list_resident((at / PAGE + i) as u64, 1, List::Inactive, |_| None);
        }
        s.rss = 64 << 20;
        Batch::new(s.new_compressor())
    };
    let left = |p: &Pager| {
        let s = p.state.lock();
        (s.resident + s.staged, s.pool.held_bytes() > p.limit() / 2, p.at_floor(&s))
    };
    let mut steps = 0;
    while !left(p).2 {
        p.state.lock().rss = 64 << 20;
        p.reclaim_step(&mut batch);
        steps += 1;
        assert!(steps < 1000, "{:?}", left(p));
    }
    let floor = left(p);
    assert!(floor.1 && floor.0 >= PAGES / 4 - 2 * BATCH_PAGES, "{floor:?}");
    for _ in 0..50 {
        p.state.lock().rss = 64 << 20;
        p.reclaim_step(&mut batch);
    }
    assert_eq!(left(p).0, floor.0, "of {PAGES}, and nothing more was taken");
}

/// See `shootdown`: few calls take mappings away. An excess that free frames would make up for is not given back until it is
/// large.
#[test]
fn frames_are_given_back_many_at_a_time() {
    let p = testing::pager(64 << 20);
    let mut s = p.state.lock();
    let margin = p.margin();
    let over = |s: &mut State, pages: usize| {
        s.rss = (64 << 20) - margin + pages * PAGE;
        p.over(s, margin as isize, true)
    };
    assert_eq!([0, 10, 500].map(|pages| over(&mut s, pages)), [0, 10, 500], "there are none");
    let first = s.zone.alloc(Kind::Hole, MAX_ORDER).expect("holes");
    s.zone.free(Kind::Frame, first, MAX_ORDER);
    assert_eq!([10, 127, 128, 500].map(|pages| over(&mut s, pages)), [0, 0, 128, 500]);
    assert!(MANY_MOST * PAGE < margin / 2, "the limit is kept meanwhile");
    // (They were none.)
    let taken = s.zone.alloc(Kind::Frame, MAX_ORDER).expect("it is free");
    s.zone.free(Kind::Hole, taken, MAX_ORDER);
    s.rss = 0;
}

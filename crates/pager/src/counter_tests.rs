//! Counters that no other test checks exactly: each is provoked by hand, and must match.

use crate::calls::events;
use crate::fault::Request;
use crate::frames::arena::PAGE;
use crate::group::counters::Counters;
use crate::pager::Pager;
use crate::pool::batch::Batch;
use crate::reclaim::stage::PINNED_PAGES;
use crate::state::State;
use crate::testing;
use core::sync::atomic::{AtomicU64, Ordering::*};
use uzswap_mm::lru::{Entry, List};
use uzswap_mm::pagetable::Tag;

const LIMIT: usize = 16 << 20;
/// Number of pages in each test's folio, and its order.
const N: usize = 16;
const ORDER: usize = 4;

fn count(p: &Pager, what: impl Fn(&Counters) -> &AtomicU64) -> u64 {
    what(p.counters()).load(Relaxed)
}

/// Makes resident pages that lie like one folio; returns the first.
fn resident(p: &Pager, s: &mut State, pages: usize) -> u64 {
    let at = testing::memory(p, 2 * pages).next_multiple_of(pages * PAGE);
    (0..pages).for_each(|page| testing::put(p, at + page * PAGE, &testing::words(page as u64)));
    let first = (at / PAGE) as u64;
    s.list_resident(first, pages, List::Inactive, |_| None);
    first
}

/// A refused store is counted once for its folio, and its pages once each time they could go nowhere; whatever refuses it.
#[test]
fn a4_a_refused_folio_is_counted_by_what_refused_it() {
    for (site, by_limit, no_room) in [("limit", 1, N), ("pool", 0, N), ("index", 0, 0)] {
        let p = testing::pager(LIMIT);
        let s = &mut *p.state.lock();
        let first = resident(p, s, N);
        assert_eq!(p.stage(s, N).ok(), Some(N));
        let mut batch = Batch::new(s.new_compressor());
        let counts = || {
            let [hit, failed] = [count(p, |c| &c.folios.pool_limit_hit), count(p, |c| &c.folios.block_failed)];
            let split = count(p, |c| &c.folios.orders[ORDER - 2].swpout_fallback);
            let nowhere = p.group.nodes[0].events.swap_fail.load(Relaxed);
            (hit, count(p, |c| &c.reject_alloc_fail), failed, split, nowhere)
        };
        p.group.faults.set(&format!("{site}=1/1"), 1).unwrap();
        p.prepare(s, &mut batch, N, 0);
        assert_eq!(p.store_now(s, &mut batch), 0, "{site}");
        assert_eq!(counts(), (by_limit, 1 - by_limit, 1, 1 - by_limit, no_room as u64), "{site}");
        assert_eq!((s.staged, count(p, |c| &c.zswpout), count(p, |c| &c.folios.block_write)), (N, 0, 0), "{site}");
        // When it is let in, none of that is counted again.
        p.group.faults.set(&format!("{site}=0/1"), 1).unwrap();
        p.prepare(s, &mut batch, N, 0);
        assert_eq!(p.store_now(s, &mut batch), N, "{site}");
        assert_eq!(counts(), (by_limit, 1 - by_limit, 1, 1 - by_limit, no_room as u64), "{site}");
        assert_eq!(count(p, |c| &c.zswpout), N as u64);
        assert_eq!(count(p, |c| &c.folios.orders[ORDER - 2].zswpout), by_limit, "{site}: once split, it is no folio");
        assert!((first..first + N as u64).all(|vpn| s.pt.get(vpn).tag() == Tag::Compressed));
    }
}

/// Pages that the program drops while they are being compressed; and one that it takes back, which is not dropped.
#[test]
fn what_is_dropped_while_it_is_compressed_is_a_free_that_was_missed() {
    let p = testing::pager(LIMIT);
    let s = &mut *p.state.lock();
    let first = resident(p, s, N);
    assert_eq!(p.stage(s, N).ok(), Some(N));
    let mut batch = Batch::new(s.new_compressor());
    assert!(p.prepare(s, &mut batch, N, 0) && s.busy == N);
    events::forget_range(s, first + 5, first + 8);
    assert_eq!(p.bring_busy(s, first).ok(), Some(1));
    batch.compress(p);
    p.commit(s, &mut batch);
    assert_eq!((count(p, |c| &c.folios.block_missed_free), count(p, |c| &c.zswpout)), (3, N as u64 - 4));
    // Pages dropped before or afterwards do not count.
    events::forget_range(s, first, first + N as u64);
    p.commit(s, &mut batch);
    assert_eq!(count(p, |c| &c.folios.block_missed_free), 3);
}

/// How often the kernel refuses to move pages. A process that shares them passes over all that lie together; one that does not,
/// over as many as are pinned together at most.
#[test]
fn a_move_that_is_refused_is_counted_for_what_is_passed_over() {
    const ALL: usize = 2 * PINNED_PAGES as usize;
    for (shares, refusals) in [(true, 1), (false, 2)] {
        let p = testing::pager(LIMIT);
        let s = &mut *p.state.lock();
        let first = resident(p, s, ALL);
        testing::let_inherit(first as usize * PAGE, ALL);
        testing::beside_a_child(|| {
            if shares {
                p.kin.gained();
            }
            assert_eq!(p.stage_range(s, first, first + ALL as u64).0, 0);
        });
        assert_eq!((count(p, |c| &c.move_refused), s.resident, s.staged), (refusals, ALL, 0), "shares: {shares}");
    }
}

/// A fault that finds neither a frame nor room makes room itself; one that finds either does not.
#[test]
fn a_fault_without_frames_or_room_reclaims_directly() {
    let p = testing::pager(LIMIT);
    let s = &mut *p.state.lock();
    let first = resident(p, s, 2 * N);
    let vpn = (testing::memory(p, 4) / PAGE) as u64;
    let serve = |s: &mut State, vpn| p.serve(s, Request { vpn, write: true, protected: false }).is_ok();
    assert!(serve(s, vpn));
    assert_eq!(count(p, |c| &c.direct_reclaim), 0, "there is room");
    // Enough is resident for some of it to be evicted.
    let (rss, other) = (s.rss, (8 << 20) / PAGE);
    while s.zone.alloc(uzswap_mm::zone::Kind::Frame, 0).is_some() {}
    s.rss = LIMIT + (1 << 20);
    s.resident += other;
    (0..other as u64).for_each(|i| s.lru.inactive.push(Entry::new(1 << 30 | i, 0, 0)));
    assert!(serve(s, vpn + 2));
    assert_eq!(count(p, |c| &c.direct_reclaim), 1);
    assert!((first..first + 2 * N as u64).any(|vpn| s.pt.get(vpn).tag() != Tag::Resident), "it took something");
    s.resident -= other;
    s.rss = rss;
}

/// The story: a block that came whole, but as a copy because no frame was free, counted as one that had fallen back, and so did its
/// folio. Far below its limit that was every fault of a program: 36 of 36 that read 16 MiB.
#[test]
fn b2_a_block_that_comes_whole_has_not_fallen_back() {
    let p = testing::pager(LIMIT);
    let s = &mut *p.state.lock();
    // Of two faults in the same 64 KiB the second would count as random, and want one page.
    let first = (testing::memory(p, 64) / PAGE) as u64 / 16 * 16 + 16;
    let counts = |p: &Pager| {
        let f = &p.counters().folios;
        let order = &f.orders[0];
        [&order.anon_fault_alloc, &order.anon_fault_fallback, &f.block_fallback, &f.block_fallback_single]
            .map(|c| c.load(Relaxed))
    };
    let serve = |s: &mut State, vpn| {
        testing::store(s, vpn, 2, 0, testing::words);
        assert!(p.serve(s, Request { vpn, write: false, protected: false }).is_ok());
        (vpn..vpn + 4).filter(|vpn| s.pt.get(*vpn).tag() == Tag::Resident).count()
    };
    assert_eq!(s.zone.free_slots(uzswap_mm::zone::Kind::Frame), 0);
    assert_eq!((serve(s, first), counts(p)), (4, [1, 0, 0, 0]));
    // Without room for four pages at once it falls back.
    p.group.faults.set("charge=1/1", 1).unwrap();
    assert_eq!((serve(s, first + 16), counts(p)), (1, [1, 1, 1, 1]));
}

/// Reclaims count for the limit that asked for them, in its group and in all above: `memory.high` is exceeded, or `memory.max` is
/// about to be.
#[test]
fn reclaims_count_for_the_limit_that_asks_for_them() {
    let group = testing::group();
    let child = group.make_child(0, b"worker").unwrap();
    let p: &'static Pager = Box::leak(Box::new(testing::member(group, child, 64 << 20)));
    group.nodes[0].max.store(64 << 20, Relaxed);
    group.nodes[child].high.store(32 << 20, Relaxed);
    let mut s = p.state.lock();
    let mut counted = |rss: usize, margin: usize| {
        s.rss = rss << 20;
        p.count_excess(&s, margin << 20);
        [0, child].map(|node| {
            let e = &group.nodes[node].events;
            (e.high.load(Relaxed), e.max.load(Relaxed))
        })
    };
    assert_eq!(counted(32, 0), [(0, 0), (0, 0)], "nothing is exceeded");
    assert_eq!(counted(40, 0), [(1, 0), (1, 0)], "the child's high");
    assert_eq!(counted(64, 0), [(2, 0), (2, 0)], "a charge equal to the limit does not exceed it");
    assert_eq!(counted(65, 0), [(3, 1), (3, 0)], "the root's max, too");
    assert_eq!(counted(30, 40), [(3, 2), (3, 0)], "about to be exceeded");
    assert_eq!(counted(30, 34), [(3, 2), (3, 0)]);
    group.nodes[child].max.store(48 << 20, Relaxed);
    assert_eq!(counted(40, 20), [(4, 2), (4, 0)], "a high limit asks before the max");
    assert_eq!(counted(49, 0), [(4, 3), (4, 1)], "the child's max counts in the root");
    s.rss = 0;
}

//! Tests of folios that go to disk whole, step by step as the writing thread takes them: no thread, no disk.

use super::tests::{FIRST, Scene, end};
use super::*;
use crate::fault::deliver::decode;
use crate::pool::batch::Batch;
use crate::testing::{self, half_noise, words};
use core::ops::Range;
use uzswap_mm::lru::List;
use uzswap_mm::pagetable::Pte;
use uzswap_mm::swapfile::GRAIN;
use uzswap_mm::zone::Kind;

/// A process whose large folios may not enter the pool, and that has a disk.
fn scene() -> Scene {
    let scene = Scene::new();
    scene.pager.tier.file.store(0, Relaxed);
    scene.pager.group.folios.large_off.store(u32::MAX << 2, Relaxed);
    scene
}

fn by_order(scene: &Scene, order: u8) -> (u64, u64, u64) {
    let c = scene.pager.counters().folios.order(order).unwrap();
    (c.swpout.load(Relaxed), c.swpout_fallback.load(Relaxed), c.zswpout.load(Relaxed))
}

fn pages(vpn: u64, order: u8) -> Range<u64> {
    vpn..vpn + (1 << order)
}

/// Stores a folio in units of 64 KiB at most, and lets it wait.
fn wait_whole(scene: &Scene, s: &mut State, vpn: u64, order: u8) {
    let unit = order.min(4);
    let entries: Vec<(u64, u32)> =
        pages(vpn, order).step_by(1 << unit).map(|at| (at, testing::store(s, at, unit, 0, half_noise))).collect();
    entries.iter().for_each(|(_, handle)| object::set_flags(s.object(*handle), object::WAITING, 0));
    while s.swap.as_mut().unwrap().shrinker.pop().is_some() {}
    scene.pager.goes_whole(s, order, entries.into_iter());
}

/// Writes everything there is to write, with two writes under way where there is enough, and `result` for each; returns the
/// places in their order.
fn write_all(scene: &mut Scene, s: &mut State, mut result: impl FnMut() -> Result<(), i32>) -> Vec<(Place, u64)> {
    let (mut places, mut under_way) = (Vec::new(), [false; 2]);
    loop {
        for (slot, busy) in under_way.iter_mut().enumerate() {
            *busy = scene.plan(s, slot).is_some();
            let flights = &s.swap.as_ref().unwrap().flights[slot];
            places.extend(flights.iter().map(|flight| (flight.place, flight.entry.vpn)));
        }
        if under_way == [false; 2] {
            return places;
        }
        (0..2).filter(|slot| under_way[*slot]).for_each(|slot| scene.pager.complete(s, slot, result()));
    }
}

/// Checks that the pages are in the pool, unchanged, in objects of this order at most, none of which is held.
fn in_pool(s: &mut State, pages: Range<u64>, most: u8) {
    for vpn in pages {
        let pte = s.pt.get(vpn);
        assert_eq!(pte.tag(), Tag::Compressed, "page {vpn:x}");
        let head = Header::read(s.object(pte.handle()));
        assert!(head.order <= most && head.flags & object::HELD == 0, "page {vpn:x}: {} {}", head.order, head.flags);
        let mut out = vec![0; PAGE << head.order];
        assert!(decode(s, pte.handle(), &mut out) && out[pte.index() * PAGE..][..PAGE] == half_noise(vpn));
    }
}

/// A5: a folio is written whole and in one place, whatever its size, and counted as what it is.
#[test]
fn a5_a_folio_goes_to_disk_whole_and_side_by_side() {
    for order in [2, 4, 6, 9] {
        let mut scene = scene();
        let p = scene.pager;
        let s = &mut *p.state.lock();
        (0..3).for_each(|i| wait_whole(&scene, s, FIRST + (i << order), order));
        let places = write_all(&mut scene, s, || Ok(()));
        assert_eq!(places.len(), 3 << order.saturating_sub(4), "order {order}");
        assert!(places.is_sorted(), "in their order");
        let (swap, all) = (s.swap.as_ref().unwrap(), FIRST..FIRST + (3 << order));
        for folio in places.chunks(1 << order.saturating_sub(4)) {
            for two in folio.windows(2) {
                let end = two[0].0 as usize + swap.books.get(two[0].0).unwrap().len / GRAIN;
                // Where it goes on in the next run, or cluster, there may be room for less than an object.
                let between = (two[1].0 as usize - end) * GRAIN;
                assert!(between <= 64 << 10 && two[1].1 == two[0].1 + 16, "order {order}: {between} bytes between");
            }
        }
        assert!(all.clone().all(|vpn| s.pt.get(vpn).tag() == Tag::Disk), "order {order}");
        assert_eq!(by_order(&scene, order), (3, 0, 0), "order {order}");
        let others = (2..=9).filter(|other| *other != order).all(|other| by_order(&scene, other) == (0, 0, 0));
        assert!(others, "order {order}: counted once, as what it is");
        let (out, from_pool) = (scene.count(|c| &c.pswpout), scene.count(|c| &c.zswpwb));
        assert_eq!((out, from_pool, scene.count(|c| &c.zswpout)), (3 << order, 0, 0));
        end(s, all);
    }
}

/// Several small folios go in one write.
#[test]
fn folios_share_a_write() {
    let mut scene = scene();
    let s = &mut *scene.pager.state.lock();
    (0..20).for_each(|i| wait_whole(&scene, s, FIRST + (i << 2), 2));
    assert!(scene.plan(s, 0).is_some());
    assert_eq!(s.swap.as_ref().unwrap().flights[0].len(), 20);
    scene.pager.complete(s, 0, Ok(()));
    assert_eq!(by_order(&scene, 2), (20, 0, 0));
    end(s, pages(FIRST, 7));
}

/// A5: without adjacent room a folio enters the pool in parts that may, and is counted; a smaller one goes whole.
#[test]
fn a5_without_room_side_by_side_it_is_split_and_counted() {
    let mut scene = scene();
    let p = scene.pager;
    let s = &mut *p.state.lock();
    // Every other cluster belongs to another process.
    let map = s.swap.as_ref().unwrap().map;
    let other = map.take_row(uzswap_sys::process::Identity::from_raw(1).unwrap()).unwrap();
    while map.claim_cluster(other).is_some() {}
    (0..256).step_by(2).for_each(|c| map.release_cluster(other, c));
    let before = map.clusters_used();
    wait_whole(&scene, s, FIRST, 9);
    wait_whole(&scene, s, FIRST + 512, 4);
    assert!(scene.plan(s, 0).is_some(), "the small one");
    assert!(!p.may_go_whole(s, 9) && p.may_go_whole(s, 4), "not tried again at once");
    in_pool(s, pages(FIRST, 9), 0);
    assert_eq!((by_order(&scene, 9), scene.count(|c| &c.zswpout)), ((0, 1, 0), 512));
    scene.pager.complete(s, 0, Ok(()));
    assert_eq!(by_order(&scene, 4), (1, 0, 0));
    assert!(pages(FIRST + 512, 4).all(|vpn| s.pt.get(vpn).tag() == Tag::Disk));
    // What is in the pool is written like anything else.
    scene.pager.group.folios.large_off.store(0, Relaxed);
    end(s, FIRST..FIRST + 512 + 16);
    assert_eq!(map.clusters_used(), before, "nothing stays claimed");
}

/// A5: a write that fails loses nothing: what it had aboard and what was to follow are in the pool, in parts that may be there.
#[test]
fn a5_when_a_write_fails_every_page_is_kept() {
    for (fails, most) in [(0, 0), (1, 2), (2, 0)] {
        let mut scene = scene();
        let p = scene.pager;
        let s = &mut *p.state.lock();
        // Folios up to 16 KiB may enter, or only pages.
        p.group.folios.large_off.store(if most == 2 { u32::MAX << 3 } else { u32::MAX << 2 }, Relaxed);
        wait_whole(&scene, s, FIRST, 9);
        wait_whole(&scene, s, FIRST + 512, 4);
        for write in 0..=fails {
            assert!(scene.plan(s, 0).is_some());
            p.complete(s, 0, if write == fails { Err(libc::EIO) } else { Ok(()) });
        }
        assert!(!p.may_go_whole(s, 4), "while it fails none is tried");
        // The rest learns of it when it is planned.
        let _ = p.plan_round(s, 0, super::writeback::bytes_of(&mut scene.buffers[0]));
        assert!(s.swap.as_ref().unwrap().whole.is_empty());
        let on_disk: Vec<u64> = (FIRST..FIRST + 528).filter(|vpn| s.pt.get(*vpn).tag() == Tag::Disk).collect();
        assert!(on_disk.is_empty() == (fails == 0) && on_disk.iter().copied().eq(FIRST..FIRST + on_disk.len() as u64));
        in_pool(s, FIRST + on_disk.len() as u64..FIRST + 528, most);
        assert_eq!((by_order(&scene, 9).0, by_order(&scene, 9).1), (0, 1));
        assert_eq!((by_order(&scene, 4).0, by_order(&scene, 4).1), (0, 1));
        assert!(!s.swap.as_ref().unwrap().shrinker.is_empty(), "they are met as anything in the pool");
        end(s, FIRST..FIRST + 528);
    }
}

/// Clusters in which writes have failed are passed over: a folio is written whole beyond them, as is one after it.
///
/// The story: see `Pager::room_for`.
#[test]
fn a_folio_is_not_put_where_writes_have_failed() {
    for bad in [&[0u32][..], &[1], &[0, 2, 5]] {
        let mut scene = scene();
        let p = scene.pager;
        let s = &mut *p.state.lock();
        s.swap.as_mut().unwrap().bad.extend(bad);
        // Each takes several clusters.
        (0..3).for_each(|i| wait_whole(&scene, s, FIRST + (i << 9), 9));
        let places = write_all(&mut scene, s, || Ok(()));
        let swap = s.swap.as_ref().unwrap();
        let cluster = |place: Place| (offset(place) / swap.books.cluster_bytes() as u64) as u32;
        assert!(places.iter().all(|(place, _)| !bad.contains(&cluster(*place))), "{bad:?}");
        assert!(places.is_sorted() && places.len() == 3 * 32, "{bad:?}: in their order");
        assert!((FIRST..FIRST + (3 << 9)).all(|vpn| s.pt.get(vpn).tag() == Tag::Disk), "{bad:?}");
        assert_eq!(by_order(&scene, 9), (3, 0, 0), "{bad:?}");
        end(s, FIRST..FIRST + (3 << 9));
    }
}

/// A forked child has all pages of what its parent was writing, in its own pool.
#[test]
fn a5_a_child_has_what_waited_in_its_parent() {
    let mut scene = scene();
    let s = &mut *scene.pager.state.lock();
    wait_whole(&scene, s, FIRST, 9);
    assert!(scene.plan(s, 0).is_some());
    s.end_flights();
    in_pool(s, pages(FIRST, 9), 4);
    let swap = s.swap.as_ref().unwrap();
    assert!(swap.whole.is_empty() && swap.shrinker.len() == 32 && swap.clusters() == 0);
    end(s, pages(FIRST, 9));
}

/// A fault wins: what the program took back is not written, the rest is, and it does not count as a whole folio.
#[test]
fn a5_what_is_faulted_on_meanwhile_stays_in_the_program() {
    for when in 0..3 {
        let mut scene = scene();
        let p = scene.pager;
        let s = &mut *p.state.lock();
        wait_whole(&scene, s, FIRST, 4);
        wait_whole(&scene, s, FIRST + 16, 4);
        let take = |s: &mut State, vpn: u64, keeps: bool| {
            let pte = s.pt.get(vpn);
            let copy = Pte::new(Tag::Resident, 0);
            s.pt.set(vpn, if keeps { copy.with_copy(pte.handle()) } else { copy });
            (s.swapped, s.resident) = (s.swapped - 1, s.resident + 1);
            if !keeps {
                s.release(pte.handle(), pte.index());
            }
        };
        let taken = match when {
            0 => FIRST + 3..FIRST + 5,
            1 => FIRST..FIRST + 16,
            _ => FIRST + 3..FIRST + 5,
        };
        if when == 2 {
            assert!(scene.plan(s, 0).is_some());
        }
        taken.clone().for_each(|vpn| take(s, vpn, when != 0));
        if when != 2 {
            assert!(scene.plan(s, 0).is_some());
        }
        p.complete(s, 0, Ok(()));
        assert!((FIRST..FIRST + 32).all(|vpn| (s.pt.get(vpn).tag() == Tag::Resident) == taken.contains(&vpn)));
        assert_eq!(by_order(&scene, 4), (1, 0, 0), "the other one");
        assert!(s.swap.as_ref().unwrap().whole.is_empty());
        end(s, FIRST..FIRST + 32);
    }
}

/// An object that mremap moves becomes the pool's, and is listed as such.
#[test]
fn what_is_moved_while_it_waits_is_written_later() {
    let mut scene = scene();
    let p = scene.pager;
    let s = &mut *p.state.lock();
    wait_whole(&scene, s, FIRST, 4);
    let (from, to, len) = (FIRST as usize * PAGE, (FIRST as usize + 0x1000) * PAGE, PAGE << 4);
    p.event(s, uzswap_sys::uffd::Message::Remap { from, to, len });
    assert!(scene.plan(s, 0).is_some());
    p.complete(s, 0, Ok(()));
    assert!(pages(FIRST + 0x1000, 4).all(|vpn| s.pt.get(vpn).tag() == Tag::Disk));
    assert!(s.swap.as_ref().unwrap().whole.is_empty());
    end(s, pages(FIRST + 0x1000, 4));
}

/// A5: none goes where it is forbidden, where `memory.swap.max` leaves no room, or while as much waits as may; and what waited
/// when it became forbidden is split.
#[test]
fn a5_what_may_not_be_written_is_split() {
    let mut scene = scene();
    let p = scene.pager;
    let s = &mut *p.state.lock();
    let node = &p.group.nodes[0];
    assert!(p.may_go_whole(s, 4));
    node.swap_max.store(32 << 10, Relaxed);
    assert!(!p.may_go_whole(s, 4));
    assert_eq!(node.events.swap_max.load(Relaxed), 1);
    node.swap_max.store(u64::MAX, Relaxed);
    p.tier.file.store(-1, Relaxed);
    assert!(!p.may_go_whole(s, 4), "it cannot open the file");
    p.tier.file.store(0, Relaxed);
    let map = s.swap.as_ref().unwrap().map;
    map.remote.store(1, Relaxed);
    assert!(!p.may_go_whole(s, 4), "a server");
    // The story: with a server, where nothing may be in the pool, nothing but zeros left.
    node.zswap_max.store(0, Relaxed);
    assert!(p.may_go_whole(s, 9) && p.goes_directly(s));
    node.zswap_max.store(u64::MAX, Relaxed);
    map.remote.store(0, Relaxed);
    wait_whole(&scene, s, FIRST, 9);
    assert!(!p.may_go_whole(s, 4), "a megabyte waits");
    assert!(p.enough_waits(s.swap.as_ref().unwrap()));
    node.zswap_writeback.store(0, Relaxed);
    assert!(!p.may_go_whole(s, 4));
    assert!(scene.plan(s, 0).is_none());
    in_pool(s, pages(FIRST, 9), 0);
    assert_eq!(by_order(&scene, 9), (0, 1, 0));
    node.zswap_writeback.store(1, Relaxed);
    end(s, pages(FIRST, 9));
}

/// A5: from the program to the disk: a staged folio is compressed in blocks that one read brings, and only waits in the pool.
#[test]
fn a5_a_staged_folio_waits_to_be_written_and_is_not_counted_as_stored() {
    let mut scene = scene();
    let p = scene.pager;
    let at = testing::memory(p, 48).next_multiple_of(16 * PAGE);
    let first = (at / PAGE) as u64;
    (0..16).for_each(|i| testing::put(p, at + i * PAGE, &words(first + i as u64)));
    let s = &mut *p.state.lock();
    s.list_resident(first, 16, List::Inactive, |_| None);
    let frames = s.zone.free_slots(Kind::Frame);
    assert!(p.stage(s, 16).is_ok_and(|n| n == 16));
    let mut batch = Batch::new(s.new_compressor());
    assert!(p.prepare(s, &mut batch, 16, 0));
    assert_eq!(p.store_now(s, &mut batch), 16);
    assert_eq!(s.zone.free_slots(Kind::Frame), frames + 16);
    let head = Header::read(s.object(s.pt.get(first).handle()));
    assert_eq!((head.order, head.flags & object::WAITING), (4, object::WAITING));
    assert_eq!((scene.count(|c| &c.zswpout), by_order(&scene, 4)), (0, (0, 0, 0)));
    assert!(scene.plan(s, 0).is_some());
    p.complete(s, 0, Ok(()));
    assert_eq!((scene.count(|c| &c.pswpout), by_order(&scene, 4)), (16, (1, 0, 0)));
    // Without a disk it is split, and counted, as ever.
    p.tier.file.store(-1, Relaxed);
    end(s, first..first + 16);
}

/// An object that waits is not taken for one being recompressed whose place it came to lie at: it would have got the page's
/// former contents.
#[test]
fn what_waits_is_not_taken_for_what_is_being_recompressed() {
    let mut scene = scene();
    let p = scene.pager;
    let s = &mut *p.state.lock();
    let old = testing::store(s, FIRST, 2, 0, words);
    s.swap.as_mut().unwrap().aside.push(Entry { vpn: FIRST, handle: old });
    while s.swap.as_mut().unwrap().shrinker.pop().is_some() {}
    let unit = scene.pack_with(s, |s| {
        for vpn in pages(FIRST, 2) {
            let pte = s.pt.get(vpn);
            s.pt.set(vpn, Pte::NONE);
            s.forget(vpn, pte);
        }
        let new = testing::store(s, FIRST, 2, 0, |vpn| words(vpn ^ 0xff00));
        assert_eq!(new, old, "the test wants the same place");
        object::set_flags(s.object(new), object::WAITING, 0);
        while s.swap.as_mut().unwrap().shrinker.pop().is_some() {}
        p.goes_whole(s, 2, [(FIRST, new)].into_iter());
    });
    assert!(unit);
    let mut out = vec![0; PAGE << 2];
    assert!(decode(s, s.pt.get(FIRST).handle(), &mut out) && out[..PAGE] == words(FIRST ^ 0xff00));
    end(s, pages(FIRST, 2));
}

/// Clusters claimed for a folio have room on disk before any of it is written; where there is none they are given up. If a child
/// comes to share them half way, the rest is the pool's.
#[test]
fn a5_room_is_made_for_all_of_a_folio_or_it_is_split() {
    for makes_room in [true, false] {
        let mut scene = scene();
        let p = scene.pager;
        let s = &mut *p.state.lock();
        let map = s.swap.as_ref().unwrap().map;
        map.allocated.store(300 << 10, Relaxed);
        wait_whole(&scene, s, FIRST, 9);
        let mut plan = |s: &mut State| p.plan_round(s, 0, super::writeback::bytes_of(&mut scene.buffers[0]));
        let super::writeback::Round::Extend(last) = plan(s) else { panic!("it needs more than a cluster") };
        assert!(last >= 4 && map.clusters_used() == last as usize + 1);
        if !makes_room {
            // As `extend` does when it fails.
            let swap = s.swap.as_mut().unwrap();
            (swap.failures, swap.full_until) = (1, u64::MAX);
            swap.drop_cluster(last);
            plan(s);
            assert_eq!(by_order_of(p, 9), (0, 1));
            in_pool(s, pages(FIRST, 9), 0);
            end(s, pages(FIRST, 9));
            continue;
        }
        map.allocated.store(64 << 20, Relaxed);
        assert!(matches!(plan(s), super::writeback::Round::Write(0, _)));
        p.complete(s, 0, Ok(()));
        // A child's row refers to the next cluster.
        let child = map.take_row(uzswap_sys::process::Identity::from_raw(1).unwrap()).unwrap();
        while map.claim_cluster(child).is_some() {}
        map.share_for_test(child, 1..=last);
        plan(s);
        let on_disk = (FIRST..FIRST + 512).filter(|vpn| s.pt.get(*vpn).tag() == Tag::Disk).count() as u64;
        assert!(on_disk > 0 && on_disk < 512);
        in_pool(s, FIRST + on_disk..FIRST + 512, 0);
        assert_eq!(by_order_of(p, 9), (0, 1));
        end(s, pages(FIRST, 9));
    }
}

fn by_order_of(p: &Pager, order: u8) -> (u64, u64) {
    let c = p.counters().folios.order(order).unwrap();
    (c.swpout.load(Relaxed), c.swpout_fallback.load(Relaxed))
}

/// The story: where nothing may be in the pool (`memory.zswap.max` of 0) nothing but zeros left, as if there were no disk.
#[test]
fn where_nothing_may_be_in_the_pool_all_goes_to_disk() {
    let mut scene = scene();
    let p = scene.pager;
    p.group.folios.large_off.store(0, Relaxed);
    let node = &p.group.nodes[0];
    node.zswap_max.store(0, Relaxed);
    let at = testing::memory(p, 64).next_multiple_of(16 * PAGE);
    let first = (at / PAGE) as u64;
    (0..33).for_each(|i| testing::put(p, at + i * PAGE, &words(first + i as u64)));
    let s = &mut *p.state.lock();
    let store = |s: &mut State, pages: Range<u64>| {
        let n = (pages.end - pages.start) as usize;
        s.list_resident(pages.start, n, List::Inactive, |_| None);
        assert!(p.stage(s, n).is_ok_and(|staged| staged == n));
        let mut batch = Batch::new(s.new_compressor());
        p.prepare(s, &mut batch, n, 0);
        p.store_now(s, &mut batch)
    };
    // A folio, which may enter pools, and a single page.
    assert_eq!((store(s, first..first + 16), store(s, first + 16..first + 17)), (16, 1));
    assert!(!p.zswap_is_full(s));
    write_all(&mut scene, s, || Ok(()));
    assert_eq!((scene.count(|c| &c.pswpout), by_order(&scene, 4)), (17, (1, 0, 0)));
    assert_eq!((scene.count(|c| &c.zswpout), s.pt.get(first + 16).tag()), (0, Tag::Disk));
    // What may not be written stays in the program.
    node.zswap_writeback.store(0, Relaxed);
    assert_eq!(store(s, first + 17..first + 33), 0);
    assert!(p.zswap_is_full(s) && s.pool.held_bytes() == 0);
    node.zswap_writeback.store(1, Relaxed);
    node.zswap_max.store(u64::MAX, Relaxed);
    p.tier.file.store(-1, Relaxed);
    end(s, first..first + 33);
}

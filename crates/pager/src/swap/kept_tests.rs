//! Tests of kept places, with reads and writes made by hand.

use super::read_tests::{FIRST, Scene, check, end};
use super::*;
use crate::calls::events;
use crate::fault::Request;
use crate::fault::deliver::decode;
use crate::testing::{self, half_noise, noise};
use crate::trace::{Recorder, Rings};
use uzswap_mm::pagetable::{HINT_RANDOM, HINT_WRITTEN, Pte};
use uzswap_mm::trace::{Kind, Record};
use uzswap_sys::process::Identity;

impl Scene {
    /// Uses a page of the program's memory: brings it from disk, and into the program.
    fn page(&mut self, s: &mut State, vpn: u64) -> &'static mut [u8] {
        self.read(s, vpn);
        let r = Request { vpn, write: false, protected: false };
        assert!(s.pt.get(vpn).tag() == Tag::Resident || self.pager.serve(s, r).is_ok());
        // SAFETY: the page is there, as it was just brought, and the test lets go of it before it asks for it again.
        unsafe { core::slice::from_raw_parts_mut((vpn as usize * PAGE) as *mut u8, PAGE) }
    }

    /// Makes all of the program's memory leave.
    fn put_all_out(&self, s: &mut State) {
        // Touch something else, or the last pages would stay.
        (0..16).for_each(|i| s.touch(u64::MAX - 1 - i));
        while s.resident + s.staged > 0 {
            assert!(self.pager.direct_round(s, 16, 0, None).0 > 0);
        }
    }
}

fn record(s: &mut State) -> &'static Rings {
    let rings = testing::rings();
    s.recorder = Some(Recorder::new(rings, 0));
    rings
}

/// Pages that were recorded as written to disk.
///
/// The story: pages that left for the disk without being written were recorded too. `uzswap replay` reported more than twice the
/// write-back that the run's own report had.
fn written_back(rings: &Rings) -> u64 {
    let mut words = Vec::new();
    assert_eq!(rings.of(0).drain(&mut words), 0);
    let written = words.into_iter().filter_map(Record::unpack).filter(|r| r.kind == Kind::WriteBack);
    written.map(|r| r.count() as u64).sum()
}

/// Pages that were read back and that the shrinker meets unchanged are on disk again: nothing is written, and the data is still
/// there.
#[test]
fn what_was_read_back_leaves_the_pool_without_a_write() {
    let mut scene = Scene::new(8);
    let s = &mut *scene.pager.state.lock();
    let used = s.swap.as_ref().unwrap().books.used_bytes();
    let rings = record(s);
    for round in 1..=3 {
        assert_eq!(scene.read(s, FIRST + 2), 1);
        (0..8).for_each(|i| check(s, FIRST + i, FIRST + i));
        assert_eq!((s.swap.as_ref().unwrap().on_disk(), s.swap.as_ref().unwrap().books.used_bytes()), (0, used));
        // What is in memory is not read again along with its neighbours.
        assert_eq!(s.swap.as_ref().unwrap().books.next_object(0, |o| o.live & !o.kept != 0), None);
        scene.write_out(s);
        assert!((0..8).all(|i| s.pt.get(FIRST + i).tag() == Tag::Disk), "round {round}");
        let counts = (scene.count(|c| &c.pswpout_clean), scene.count(|c| &c.pswpout), s.pool.used_bytes(), s.swapped);
        assert_eq!(counts, (8 * round, 8, 0, 0), "round {round}");
    }
    assert_eq!(written_back(rings), 0);
    // If pages go their places go too, whether they are in memory or not.
    events::forget_range(s, FIRST, FIRST + 1);
    assert_eq!(scene.read(s, FIRST + 2), 1);
    events::forget_range(s, FIRST + 1, FIRST + 2);
    assert_eq!(s.swap.as_ref().unwrap().books.used_bytes(), used / 8 * 6);
    s.end_flights();
    end(s, FIRST + 2..FIRST + 8);
}

/// See [`State::does_without_disk`].
#[test]
fn who_cannot_open_the_file_keeps_no_place_there() {
    let mut scene = Scene::new(8);
    let s = &mut *scene.pager.state.lock();
    assert_eq!(scene.read(s, FIRST), 1);
    assert!(s.swap.as_ref().unwrap().books.used_bytes() > 0 && s.does_without_disk());
    assert_eq!(s.swap.as_ref().unwrap().books.used_bytes(), 0);
    (0..8).for_each(|i| check(s, FIRST + i, FIRST + i));
    (0..8).for_each(|i| object::set_flags(s.object(s.pt.get(FIRST + i).handle()), object::TRIED, 0));
    scene.write_out(s);
    assert!(!s.does_without_disk(), "it cannot go on");
    end(s, FIRST..FIRST + 8);
}

/// The places of pages in memory are given up when there is no room left for what must be written.
#[test]
fn without_room_on_disk_no_place_is_kept() {
    let mut scene = Scene::new(8);
    let s = &mut *scene.pager.state.lock();
    assert_eq!(scene.read(s, FIRST), 1);
    let mut swap = s.swap.take().unwrap();
    assert!(swap.books.used_bytes() > 0 && s.give_up_kept(&mut swap));
    assert!(swap.books.used_bytes() == 0 && !s.give_up_kept(&mut swap));
    s.swap = Some(swap);
    (0..8).for_each(|i| object::set_flags(s.object(s.pt.get(FIRST + i).handle()), object::TRIED, 0));
    scene.write_out(s);
    assert_eq!((scene.count(|c| &c.pswpout_clean), scene.count(|c| &c.pswpout)), (0, 16));
    // Nor are places kept beyond 7/8 of `memory.swap.max`.
    let used = s.swap.as_ref().unwrap().books.used_bytes();
    for (max, keeps) in [(used * 8 / 7 + 64, true), (used * 8 / 7 - 64, false)] {
        scene.pager.group.nodes[0].swap_max.store(max as u64, Relaxed);
        s.swap.as_mut().unwrap().until_look = 0;
        assert_eq!(scene.read(s, FIRST), 1);
        (0..8).for_each(|i| check(s, FIRST + i, FIRST + i));
        assert_eq!(s.swap.as_ref().unwrap().books.used_bytes(), if keeps { used } else { 0 }, "{max} of {used}");
        scene.pager.group.nodes[0].swap_max.store(u64::MAX, Relaxed);
        scene.write_out(s);
    }
    end(s, FIRST..FIRST + 8);
}

/// What is only kept is no reason to write nothing where `memory.swap.max` is reached.
///
/// The story: see `Pager::gives_way_to_itself`.
#[test]
fn what_is_only_kept_gives_way_where_no_more_may_be_on_disk() {
    let mut scene = Scene::new(8);
    scene.pager.tier.file.store(0, Relaxed);
    let s = &mut *scene.pager.state.lock();
    assert_eq!(scene.read(s, FIRST), 1);
    while s.swap.as_mut().unwrap().shrinker.pop().is_some() {}
    scene.pager.group.nodes[0].swap_max.store(writeback::RUN_BYTES as u64 + 4096, Relaxed);
    assert!(s.swap.as_ref().unwrap().books.used_bytes() > 4096);
    (8..12).for_each(|i| scene.store(s, FIRST + i, half_noise));
    assert!(scene.pager.disk_may_take(s) && scene.pager.disk_takes_over(s), "there will be room");
    assert!(matches!(scene.plan_with_little_room(s), writeback::Round::Again));
    scene.write_out(s);
    assert!((8..12).all(|i| s.pt.get(FIRST + i).tag() == Tag::Disk));
    assert_eq!(s.swap.as_ref().unwrap().books.kept_pages(), 0);
    (0..8).for_each(|i| check(s, FIRST + i, FIRST + i));
    end(s, FIRST..FIRST + 12);
}

/// A program that goes round in what takes more than half of the file writes it once. From 7/8 on nothing is kept.
///
/// The story: see [`kept::KEEP_UNTIL`].
#[test]
fn places_are_kept_until_most_of_the_file_is_in_use() {
    for (clusters, keeps) in [(223, true), (225, false)] {
        let mut scene = Scene::new(8);
        let s = &mut *scene.pager.state.lock();
        let map = s.swap.as_ref().unwrap().map;
        // Another process, which lives, has the rest. (Of 256, and one is this process's.)
        map.set_row(9, Identity::of(1), 0);
        (1..clusters).for_each(|_| assert!(map.claim_cluster(9).is_some()));
        assert_eq!((map.clusters_used(), map.has_filled(7)), (clusters, !keeps));
        for round in 1..=3 {
            s.swap.as_mut().unwrap().until_look = 0;
            assert_eq!(scene.read(s, FIRST), 1);
            (0..8).for_each(|i| check(s, FIRST + i, FIRST + i));
            let on_list = (0..8).map(|i| s.pt.get(FIRST + i).handle());
            on_list.for_each(|handle| object::set_flags(s.object(handle), object::TRIED, 0));
            scene.write_out(s);
            assert!((0..8).all(|i| s.pt.get(FIRST + i).tag() == Tag::Disk), "round {round}");
            let (clean, written) = if keeps { (8 * round, 8) } else { (0, 8 * (1 + round)) };
            assert_eq!((scene.count(|c| &c.pswpout_clean), scene.count(|c| &c.pswpout)), (clean, written));
        }
        end(s, FIRST..FIRST + 8);
    }
}

/// From half of the file on, a block from which pages have gone keeps no place, and while much is gaps none does.
///
/// The story: see [`kept::MOST_WASTE`].
#[test]
fn where_half_of_the_file_is_in_use_no_place_with_gaps_is_kept() {
    // (clusters in use, blocks that have lost a page, whether those keep their places, whether the others do)
    for (clusters, with_gaps, keep, others_keep) in
        [(100, 1, true, true), (140, 1, false, true), (140, 8, false, false)]
    {
        let mut scene = Scene::new(0);
        let s = &mut *scene.pager.state.lock();
        let blocks: Vec<u64> = (0..8).map(|i| FIRST + 4 * i).collect();
        for vpn in &blocks {
            let handle = testing::store(s, *vpn, 2, 0, half_noise);
            object::set_flags(s.object(handle), object::TRIED, 0);
        }
        let whole = FIRST + 64;
        let handle = testing::store(s, whole, 2, 0, half_noise);
        object::set_flags(s.object(handle), object::TRIED, 0);
        scene.write_out(s);
        let map = s.swap.as_ref().unwrap().map;
        map.set_row(9, Identity::of(1), 0);
        (1..clusters).for_each(|_| assert!(map.claim_cluster(9).is_some()));
        blocks[..with_gaps].iter().for_each(|vpn| events::forget_range(s, *vpn, *vpn + 1));
        for vpn in [FIRST + 1, whole] {
            s.swap.as_mut().unwrap().until_look = 0;
            // Another's read may have brought it along.
            scene.read(s, vpn);
            check_block(s, vpn);
        }
        let keeps = |vpn: u64| s.on_disk(s.pt.get(vpn).handle()).is_some();
        assert_eq!((keeps(FIRST + 1), keeps(whole)), (keep, others_keep), "{clusters} clusters, {with_gaps} with gaps");
        assert_eq!(s.swap.as_ref().unwrap().books.get(0).is_some(), keep);
        end(s, FIRST..FIRST + 68);
    }
}

/// Checks that a page is in the pool and what it was.
fn check_block(s: &mut State, vpn: u64) {
    let (pte, mut out) = (s.pt.get(vpn), vec![0; PAGE << 2]);
    assert_eq!(pte.tag(), Tag::Compressed, "page {vpn:x}");
    assert!(decode(s, pte.handle(), &mut out) && out[pte.index() * PAGE..][..PAGE] == half_noise(vpn));
}

/// See [`Swap::is_short_without_the_dead`].
#[test]
fn what_the_dead_have_on_disk_is_no_reason_to_keep_no_place() {
    let mut scene = Scene::new(8);
    let s = &mut *scene.pager.state.lock();
    let map = s.swap.as_ref().unwrap().map;
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    map.set_row(9, Identity::from_raw(child.id().into()).unwrap(), 0);
    (0..230).for_each(|_| assert!(map.claim_cluster(9).is_some()));
    assert!(map.has_filled(7));
    scene.store(s, FIRST + 8, half_noise);
    scene.write_out(s);
    assert_eq!(map.clusters_used(), 1);
    assert_eq!(scene.read(s, FIRST), 1);
    scene.write_out(s);
    assert_eq!((scene.count(|c| &c.pswpout_clean), scene.count(|c| &c.pswpout)), (9, 9));
    end(s, FIRST..FIRST + 9);
}

/// Incompressible pages of a program, read back through real faults: an unchanged one is on disk again when it leaves; a changed
/// one is stored anew, and its place is free.
#[test]
fn a_page_of_the_program_that_did_not_change_is_not_written_again() {
    let mut scene = Scene::new(0);
    // A file, so that pages may come to be there; nothing is read from it.
    scene.pager.tier.file.store(0, Relaxed);
    let pages = 16;
    let at = testing::memory(scene.pager, pages);
    let first = (at / PAGE) as u64;
    let s = &mut *scene.pager.state.lock();
    let rings = record(s);
    (0..pages as u64).for_each(|i| scene.store(s, first + i, noise));
    scene.write_out(s);
    let (written, changed) = (scene.count(|c| &c.pswpout), 5);
    assert_eq!(written, 16);
    for round in 0..2 {
        for i in 0..pages as u64 {
            let page = scene.page(s, first + i);
            let mut want = noise(first + i);
            want[9] ^= u8::from(round == 1 && i == changed);
            assert!(page == want, "page {i} in round {round}");
            if round == 0 && i == changed {
                page[9] ^= 1;
            }
        }
        assert!((0..pages as u64).all(|i| s.pt.get(first + i).copy().is_some() == (round == 0 || i != changed)));
        assert!(s.pool.used_bytes() < pages * 128, "what did not compress is not kept: {}", s.pool.used_bytes());
        scene.put_all_out(s);
        if round == 0 {
            let tag = |i: u64| if i == changed { Tag::Compressed } else { Tag::Disk };
            assert!((0..pages as u64).all(|i| s.pt.get(first + i).tag() == tag(i)));
            assert_eq!((scene.count(|c| &c.pswpout_clean), scene.count(|c| &c.pswpout)), (15, written));
        }
    }
    assert_eq!(scene.count(|c| &c.pswpout_clean), 30);
    assert_eq!(written_back(rings), written);
    end(s, first..first + pages as u64);
}

/// Compressible pages of a program, of whose objects the pool gives up the bytes (their block is known to be written to). Those
/// that did not change have their turn in the pool again, and leave it without being written, in the units that they are in on
/// disk.
#[test]
fn a_page_that_compresses_and_did_not_change_is_not_written_again_either() {
    for order in [0u8, 2] {
        let mut scene = Scene::new(0);
        scene.pager.tier.file.store(0, Relaxed);
        let pages = 16u64;
        let at = testing::memory(scene.pager, 2 * pages as usize).next_multiple_of(pages as usize * PAGE);
        let first = (at / PAGE) as u64;
        let s = &mut *scene.pager.state.lock();
        for vpn in (first..first + pages).step_by(1 << order) {
            let handle = testing::store(s, vpn, order, 0, half_noise);
            object::set_flags(s.object(handle), object::TRIED, 0);
        }
        scene.write_out(s);
        let (written, changed) = (scene.count(|c| &c.pswpout), 5);
        assert_eq!(written, pages);
        let mut expected = written;
        for round in 1..=3u64 {
            for i in 0..pages {
                // Nor is it read at random, whatever the first faults look like.
                s.pt.hint(first, HINT_WRITTEN, HINT_RANDOM);
                let page = scene.page(s, first + i);
                let mut want = half_noise(first + i);
                want[9] ^= u8::from(round > 2 && i == changed);
                assert!(page == want, "page {i} in round {round}");
                if round == 2 && i == changed {
                    page[9] ^= 1;
                }
            }
            // Pages that came alone, like one far from the others, have no stub: they are to be stored by themselves.
            let kept = |i: u64| s.pt.get(first + i).copy().is_some() && (round, i) != (2, changed);
            let unit = |i: u64| i >> order << order..(i >> order << order) + (1 << order);
            expected += (0..pages).filter(|i| !unit(*i).all(kept)).count() as u64;
            let stubs = (0..pages).filter_map(|i| s.pt.get(first + i).copy()).filter(|h| s.is_packed_stub(*h)).count();
            assert!(stubs >= if round == 1 { 4 } else { 1 }, "round {round}: {stubs} stubs");
            scene.put_all_out(s);
            assert!(
                (0..pages).all(|i| s.pt.get(first + i).tag() == Tag::Compressed),
                "all have their turn in the pool"
            );
            (first..first + pages)
                .for_each(|vpn| object::set_flags(s.object(s.pt.get(vpn).handle()), object::TRIED, 0));
            scene.write_out(s);
            assert!((0..pages).all(|i| s.pt.get(first + i).tag() == Tag::Disk));
            assert_eq!(scene.count(|c| &c.pswpout), expected, "order {order}, round {round}");
        }
        assert!(
            expected <= written + 3 * pages / 2,
            "half of those that left again and more were not written: {expected}"
        );
        end(s, first..first + pages);
    }
}

/// The story: incompressible pages were counted each time they were stored, and never subtracted. The more often they came and
/// went, the more were said to be in the pool, in the end more than there were pages.
#[test]
fn what_did_not_compress_is_counted_while_it_is_in_the_pool() {
    let mut scene = Scene::new(0);
    // Without a file they would stay in the program: see `incompressible`.
    scene.pager.tier.file.store(0, Relaxed);
    let pages = 16;
    let at = testing::memory(scene.pager, pages);
    let first = (at / PAGE) as u64;
    let s = &mut *scene.pager.state.lock();
    (0..pages).for_each(|i| testing::put(scene.pager, at + i * PAGE, &noise(first + i as u64)));
    s.list_resident(first, pages, uzswap_mm::lru::List::Inactive, |_| None);
    let counts = |scene: &Scene, s: &State| {
        scene.pager.publish(s);
        let now = scene.pager.me().incompressible.load(Relaxed) as usize / PAGE;
        (now, scene.count(|c| &c.stored_incompressible_pages), scene.count(|c| &c.stored_pages))
    };
    for _ in 0..3 {
        scene.put_all_out(s);
        assert_eq!(counts(&scene, s), (pages, 16, 16));
        (0..pages as u64).for_each(|i| _ = scene.page(s, first + i));
        assert_eq!(counts(&scene, s), (0, 16, 16), "as it was when most was stored");
    }
    scene.put_all_out(s);
    scene.write_out(s);
    assert_eq!((counts(&scene, s).0, scene.count(|c| &c.pswpout)), (0, 16), "on disk it is not in the pool");
    end(s, first..first + pages as u64);
}

/// A child that cannot open the swap file must not come to need it: pages in memory and on disk are stored when they leave,
/// changed or not.
#[test]
fn without_the_file_nothing_goes_back_to_its_place() {
    let mut scene = Scene::new(0);
    scene.pager.tier.file.store(0, Relaxed);
    let at = testing::memory(scene.pager, 16);
    let all = (at / PAGE) as u64..(at / PAGE) as u64 + 16;
    let s = &mut *scene.pager.state.lock();
    all.clone().for_each(|vpn| scene.store(s, vpn, noise));
    scene.write_out(s);
    all.clone().for_each(|vpn| assert!(*scene.page(s, vpn) == noise(vpn)));
    assert!(all.clone().all(|vpn| s.pt.get(vpn).copy().is_some()));
    scene.pager.tier.file.store(-1, Relaxed);
    scene.put_all_out(s);
    assert!(all.clone().all(|vpn| s.pt.get(vpn).tag() == Tag::Compressed));
    assert_eq!(scene.count(|c| &c.pswpout_clean), 0);
    end(s, all);
}

/// C1: however an object enters the pool's list, its reference bit is set: stored, left by its clean pages, or read from disk.
#[test]
fn c1_what_enters_the_list_has_its_second_chance() {
    let mut scene = Scene::new(0);
    scene.pager.tier.file.store(0, Relaxed);
    let pages = 16u64;
    let at = testing::memory(scene.pager, 32).next_multiple_of(16 * PAGE);
    let first = (at / PAGE) as u64;
    let all = first..first + pages;
    all.clone().for_each(|vpn| testing::put(scene.pager, vpn as usize * PAGE, &half_noise(vpn)));
    let s = &mut *scene.pager.state.lock();
    s.list_resident(first, pages as usize, uzswap_mm::lru::List::Inactive, |_| None);
    // Each object has its bit, which is spent here as if the object had been met.
    let spend = |s: &mut State, how: &str| {
        let handles: std::collections::BTreeSet<u32> = all
            .clone()
            .map(|vpn| {
                assert_eq!(s.pt.get(vpn).tag(), Tag::Compressed, "{how}");
                s.pt.get(vpn).handle()
            })
            .collect();
        for handle in handles {
            assert_ne!(Header::read(s.object(handle)).flags & object::REFERENCED, 0, "{how}");
            object::set_flags(s.object(handle), object::TRIED, object::REFERENCED);
        }
    };
    scene.put_all_out(s);
    spend(s, "stored");
    let clean = scene.count(|c| &c.swpout_clean);
    all.clone().for_each(|vpn| assert!(*scene.page(s, vpn) == half_noise(vpn)));
    scene.put_all_out(s);
    // A page that was first read at random has kept none.
    assert!(scene.count(|c| &c.swpout_clean) > clean);
    spend(s, "clean");
    scene.write_out(s);
    for vpn in all.clone() {
        assert_eq!(s.pt.get(vpn).tag() == Tag::Disk, scene.read(s, vpn) > 0);
    }
    spend(s, "read");
    end(s, all);
}

/// Pages each of which is where its stub says, some in one place and some in another (they left in two units, of which pages had
/// gone by then), are not in one place: an object stored for all of them must not be said to be in the first.
#[test]
fn pages_that_are_in_two_places_are_not_in_one() {
    let mut scene = Scene::new(0);
    let s = &mut *scene.pager.state.lock();
    let all = FIRST..FIRST + 4;
    // Four pages in one place, which the program has unchanged.
    let mut in_a_place = |s: &mut State| {
        let handle = testing::store(s, FIRST, 2, 0, half_noise);
        object::set_flags(s.object(handle), object::TRIED, 0);
        scene.write_out(s);
        assert_eq!(scene.read(s, FIRST), 1);
        all.clone().for_each(|vpn| {
            let pte = s.pt.get(vpn);
            let stub = s.release_or_stub(vpn, pte, true).expect("it is on disk");
            s.pt.set(vpn, Pte::new(Tag::Resident, 0).with_copy(stub));
            s.swapped -= 1;
            s.resident += 1;
        });
    };
    let forget = |s: &mut State, vpn: u64| {
        let pte = s.pt.get(vpn);
        s.pt.set(vpn, Pte::NONE);
        s.forget(vpn, pte);
    };
    in_a_place(s);
    let first_two = [FIRST, FIRST + 1].map(|vpn| s.pt.get(vpn));
    (FIRST + 2..FIRST + 4).for_each(|vpn| forget(s, vpn));
    (FIRST..FIRST + 2).for_each(|vpn| s.pt.set(vpn, Pte::NONE));
    in_a_place(s);
    let hashes: Vec<u128> = all.clone().map(|vpn| object::hash(&half_noise(vpn))).collect();
    let place = |s: &State, pages: core::ops::Range<usize>| {
        let pages = pages.map(|i| (i, FIRST + i as u64));
        s.kept_place(pages, &hashes)
    };
    let second = place(s, 0..4).expect("all are in the second place");
    // The first two are in the first place again.
    for (vpn, pte) in (FIRST..).zip(first_two) {
        forget(s, vpn);
        s.pt.set(vpn, pte);
    }
    let first = place(s, 0..2).expect("both are in the first place");
    assert_ne!(first.place, second.place);
    assert_eq!((place(s, 2..4), place(s, 0..4)), (Some(second), None));
    assert_eq!(s.kept_place([(0, FIRST)].into_iter(), &[hashes[1]]), None, "it has changed");
    all.for_each(|vpn| forget(s, vpn));
    s.resident = 0;
    end(s, FIRST..FIRST);
}

/// The program has dropped a page of a block that was read back, and has another page of it. The rest leaves without a write,
/// page by page counted, and is found again.
#[test]
fn what_is_left_of_a_block_leaves_without_a_write() {
    let mut scene = Scene::new(0);
    let s = &mut *scene.pager.state.lock();
    let handle = testing::store(s, FIRST, 2, 0, half_noise);
    object::set_flags(s.object(handle), object::TRIED, 0);
    scene.write_out(s);
    assert_eq!((scene.read(s, FIRST), scene.count(|c| &c.pswpout)), (1, 4));
    let gone = s.pt.get(FIRST + 1);
    s.pt.set(FIRST + 1, Pte::NONE);
    s.forget(FIRST + 1, gone);
    // The program has it, and the pool keeps a copy.
    let copy = s.pt.get(FIRST + 3).handle();
    s.pt.set(FIRST + 3, Pte::new(Tag::Resident, 0).with_copy(copy));
    s.swapped -= 1;
    s.resident += 1;
    scene.write_out(s);
    assert_eq!((scene.count(|c| &c.pswpout_clean), scene.count(|c| &c.pswpout)), (2, 4));
    // Of the copy its place on disk is still known.
    let stub = s.pt.get(FIRST + 3).copy().expect("a stub");
    assert!(s.is_packed_stub(stub) && s.on_disk(stub).is_some_and(|at| at.first == 3));
    assert_eq!(s.kept_place([(0, FIRST + 3)].into_iter(), &[object::hash(&half_noise(FIRST + 3))]), s.on_disk(stub));
    for vpn in [FIRST, FIRST + 2] {
        assert_eq!(s.pt.get(vpn).tag() == Tag::Disk, scene.read(s, vpn) > 0);
        let (pte, mut out) = (s.pt.get(vpn), vec![0; PAGE << 2]);
        assert!(decode(s, pte.handle(), &mut out));
        assert_eq!(out[pte.index() * PAGE..][..PAGE], half_noise(vpn), "page {vpn:x}");
    }
    end(s, FIRST..FIRST + 4);
}

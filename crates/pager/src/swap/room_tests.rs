//! Tests of where runs are written that the disk has no room to extend the file for: the file has one cluster and cannot grow.

use super::io::Trouble;
use super::read_tests::{FIRST, Scene, check, check_contents, end};
use super::writeback::Round;
use super::*;
use crate::calls::events;
use crate::testing::{self, half_noise, mostly_noise, noise};
use std::os::fd::AsRawFd;
use uzswap_sys::memfd;
use uzswap_sys::process::Identity;

/// Bytes of the file's only cluster, and pages that fill it.
const CLUSTER: u64 = 256 << 10;
const PAGES: u64 = 110;

/// Outcome of a round.
#[derive(Debug, PartialEq, Eq)]
enum Came {
    /// This cluster was written to.
    Wrote(u64),
    /// The file should have been extended, and could not be.
    Extended,
    Nothing,
}

fn round(scene: &mut Scene) -> Came {
    let pager = scene.pager;
    let cluster = {
        let s = &mut *pager.state.lock();
        match scene.plan_with_little_room(s) {
            Round::Write(at, len) => {
                scene.write(s, at, len);
                return Came::Wrote(at / CLUSTER);
            }
            Round::Extend(cluster) => cluster,
            Round::Compact(_) => panic!("it has no gaps to speak of"),
            Round::Rest(_) | Round::NotYet | Round::Again => return Came::Nothing,
        }
    };
    pager.extend(cluster);
    Came::Extended
}

/// Makes rounds until these pages are on disk, at most so many; returns the outcomes.
fn write_out(scene: &mut Scene, pages: core::ops::Range<u64>, most: usize) -> Vec<Came> {
    let mut came = Vec::new();
    while pages.clone().any(|vpn| scene.pager.state.lock().pt.get(vpn).tag() != Tag::Disk) {
        assert!(came.len() < most, "{came:?}");
        came.push(round(scene));
    }
    came
}

/// A file whose only cluster is full.
fn scene() -> Scene {
    let mut scene = Scene::new(0);
    scene.pager.clusters.unwrap().allocated.store(CLUSTER, Relaxed);
    scene.pager.group.faults.set("swap_space=1/1", 1).unwrap();
    store(&scene, FIRST..FIRST + PAGES);
    let came = write_out(&mut scene, FIRST..FIRST + PAGES, 8);
    assert!(came.iter().all(|came| matches!(came, Came::Wrote(0) | Came::Nothing)), "{came:?}");
    scene
}

fn store(scene: &Scene, pages: core::ops::Range<u64>) {
    let s = &mut *scene.pager.state.lock();
    pages.for_each(|vpn| scene.store(s, vpn, half_noise));
}

/// Ends with ten pages from `new` on written beside those of [`scene`]; the first comes back as it was.
fn ends_with(scene: &mut Scene, new: u64) {
    let pager = scene.pager;
    let s = &mut *pager.state.lock();
    scene.read(s, new);
    check(s, new, new);
    events::forget_range(s, new, new + 10);
    end(s, FIRST..FIRST + PAGES);
}

fn extensions(came: &[Came]) -> usize {
    came.iter().filter(|came| **came == Came::Extended).count()
}

/// The story: the file system was full before `--swap` was used up. There was always a free cluster, beyond the end of the file,
/// and once a second the file could not be extended for it. What the program had freed in its own clusters was never written to
/// again.
#[test]
fn on_a_full_disk_holes_are_written_to() {
    let mut scene = scene();
    events::forget_range(&mut scene.pager.state.lock(), FIRST, FIRST + PAGES / 2);
    let new = FIRST + 0x1000;
    store(&scene, new..new + 10);
    let came = write_out(&mut scene, new..new + 10, 4);
    assert_eq!((extensions(&came), came.last()), (1, Some(&Came::Wrote(0))), "{came:?}");
    assert_eq!(scene.pager.state.lock().swap.as_ref().unwrap().failures, 0, "the disk can make room");
    // It is not tried again for each run.
    store(&scene, new + 10..new + 20);
    assert_eq!(extensions(&write_out(&mut scene, new + 10..new + 20, 4)), 0);
    let s = &mut *scene.pager.state.lock();
    for vpn in [new, new + 15, FIRST + PAGES - 1] {
        scene.read(s, vpn);
        check(s, vpn, vpn);
    }
    assert_eq!(scene.pager.clusters.unwrap().clusters_used(), 1);
    events::forget_range(s, new, new + 20);
    end(s, FIRST..FIRST + PAGES);
}

/// The story: see [`Swap::failed`].
#[test]
fn where_nothing_can_be_preallocated_a_full_disk_shows_in_writes() {
    let mut scene = scene();
    scene.pager.clusters.unwrap().allocated.store(64 << 20, Relaxed);
    events::forget_range(&mut scene.pager.state.lock(), FIRST, FIRST + PAGES / 2);
    let new = FIRST + 0x1000;
    store(&scene, new..new + 10);
    let mut failed = 0;
    let s = &mut *scene.pager.state.lock();
    loop {
        match scene.plan_with_little_room(s) {
            Round::Write(at, len) if at < CLUSTER => break scene.write(s, at, len),
            Round::Write(..) => {
                scene.pager.complete(s, 0, Err(libc::ENOSPC));
                failed += 1;
                assert!(failed < 3, "the disk has no room there");
                s.swap.as_mut().unwrap().rest_until = 0;
            }
            Round::Extend(_) | Round::Compact(_) => panic!("all of it is taken to be there"),
            Round::Again | Round::NotYet | Round::Rest(_) => {}
        }
    }
    assert_eq!((failed, s.swap.as_ref().unwrap().failures), (1, 0));
    assert!((new..new + 10).all(|vpn| s.pt.get(vpn).tag() == Tag::Disk));
    assert!(s.swap.as_ref().unwrap().bad.is_empty(), "the cluster is not at fault");
    assert_eq!(scene.pager.clusters.unwrap().clusters_used(), 1);
    events::forget_range(s, new, new + 10);
    end(s, FIRST..FIRST + PAGES);
}

/// The story: the file was said to be full when half of it was free, as no hole had room for the largest possible object.
#[test]
fn a_full_file_has_its_small_holes_written_to() {
    let mut scene = scene();
    let map = scene.pager.clusters.unwrap();
    map.bytes.store(CLUSTER, Relaxed);
    // As where nothing can be compacted.
    scene.pager.state.lock().swap.as_mut().unwrap().compact_at = u64::MAX;
    // One page in ten stays: nine objects of some 2 KiB leave three blocks or four.
    let stays = |vpn: &u64| (vpn - FIRST).is_multiple_of(10);
    (FIRST..FIRST + PAGES)
        .filter(|vpn| !stays(vpn))
        .for_each(|vpn| events::forget_range(&mut scene.pager.state.lock(), vpn, vpn + 1));
    let new = FIRST + 0x1000;
    // An object too large for all holes stays, and is not in the way of the others.
    let large = new + 0x100;
    scene.store_block(&mut scene.pager.state.lock(), large, 4, mostly_noise);
    store(&scene, new..new + 40);
    // It rests behind each write.
    let rested = |scene: &mut Scene| {
        scene.pager.state.lock().swap.as_mut().unwrap().rest_until = 0;
        round(scene)
    };
    let is_out = |scene: &Scene| (new..new + 40).all(|vpn| scene.pager.state.lock().pt.get(vpn).tag() == Tag::Disk);
    let mut rounds = 0;
    while !is_out(&scene) {
        rested(&mut scene);
        rounds += 1;
        assert!(rounds < 40);
    }
    assert_eq!(map.told.load(Relaxed) & 1 << Trouble::Full as u32, 0);
    for _ in 0..40 {
        rested(&mut scene);
    }
    let s = &mut *scene.pager.state.lock();
    assert_eq!(s.pt.get(large).tag(), Tag::Compressed);
    assert_ne!(map.told.load(Relaxed) & 1 << Trouble::Full as u32, 0, "it waits for a larger one");
    for vpn in [new, new + 39, FIRST + PAGES - 10] {
        scene.read(s, vpn);
        check(s, vpn, vpn);
    }
    events::forget_range(s, new, large + 16);
    end(s, FIRST..FIRST + PAGES);
}

/// See `Swap::has_room_for_parts`: three blocks of 64 KiB and three parts of a fourth fill the cluster.
#[test]
fn a_block_that_does_not_compress_is_cut_for_the_last_hole() {
    for encrypted in [false, true] {
        let mut scene = Scene::new(0);
        if encrypted {
            scene.pager.state.lock().swap.as_mut().unwrap().seal = Seal::new();
        }
        scene.pager.clusters.unwrap().bytes.store(CLUSTER, Relaxed);
        let pages = FIRST..FIRST + 5 * 16;
        let on_disk = |scene: &Scene| {
            let s = scene.pager.state.lock();
            pages.clone().filter(|vpn| s.pt.get(*vpn).tag() == Tag::Disk).count()
        };
        pages.clone().step_by(16).for_each(|vpn| _ = testing::store(&mut scene.pager.state.lock(), vpn, 4, 0, noise));
        for _ in 0..40 {
            scene.pager.state.lock().swap.as_mut().unwrap().rest_until = 0;
            round(&mut scene);
        }
        assert_eq!(on_disk(&scene), 3 * 16 + 3 * 4);
        let s = &mut *scene.pager.state.lock();
        for vpn in pages.clone() {
            if s.pt.get(vpn).tag() == Tag::Disk {
                scene.read(s, vpn);
            }
            check_contents(s, vpn, &noise(vpn));
        }
        end(s, pages);
    }
}

/// Pages that only keep their places give them up.
#[test]
fn on_a_full_disk_no_place_is_kept() {
    let mut scene = scene();
    {
        let s = &mut *scene.pager.state.lock();
        (FIRST..FIRST + PAGES).for_each(|vpn| _ = scene.read(s, vpn));
        // As if the program used all of them.
        while s.swap.as_mut().unwrap().shrinker.pop().is_some() {}
        assert_eq!(s.swap.as_ref().unwrap().on_disk(), 0);
    }
    let new = FIRST + 0x1000;
    store(&scene, new..new + 10);
    let came = write_out(&mut scene, new..new + 10, 6);
    assert_eq!((extensions(&came), came.last()), (1, Some(&Came::Wrote(0))), "{came:?}");
    let s = &mut *scene.pager.state.lock();
    events::forget_range(s, new, new + 10);
    end(s, FIRST..FIRST + PAGES);
}

/// See [`Pager::find_run`].
#[test]
fn on_a_full_disk_the_room_of_ended_processes_is_used() {
    let mut scene = scene();
    let map = scene.pager.clusters.unwrap();
    map.allocated.store(2 * CLUSTER, Relaxed);
    let mut process = std::process::Command::new("sleep").arg("600").spawn().expect("a process");
    let row = map.take_row(Identity::of(process.id())).expect("a row");
    assert_eq!(map.claim_cluster(row), Some(1));
    process.kill().and_then(|()| process.wait()).expect("a child");
    let new = FIRST + 0x1000;
    store(&scene, new..new + 10);
    let came = write_out(&mut scene, new..new + 10, 4);
    assert_eq!((extensions(&came), came.last()), (1, Some(&Came::Wrote(1))), "{came:?}");
    ends_with(&mut scene, new);
}

/// Where a write failed it is tried again once there is no other room, in the file or on the disk.
///
/// The story: one failure that passed made a program exceed its limit for good, with a cluster that was nearly empty.
#[test]
fn without_other_room_it_is_tried_again_where_a_write_failed() {
    for bytes in [CLUSTER, 64 << 20] {
        let mut scene = scene();
        let map = scene.pager.clusters.unwrap();
        map.bytes.store(bytes, Relaxed);
        events::forget_range(&mut scene.pager.state.lock(), FIRST, FIRST + PAGES / 2);
        scene.pager.state.lock().swap.as_mut().unwrap().bad.push(0);
        let new = FIRST + 0x1000;
        store(&scene, new..new + 10);
        let mut came = Vec::new();
        while came.len() < 8 && !matches!(came.last(), Some(Came::Wrote(_))) {
            came.push(round(&mut scene));
            // It rests after it has searched everything.
            scene.pager.state.lock().swap.as_mut().unwrap().rest_until = 0;
        }
        assert_eq!(came.last(), Some(&Came::Wrote(0)), "{came:?}");
        assert!((new..new + 10).all(|vpn| scene.pager.state.lock().pt.get(vpn).tag() == Tag::Disk));
        assert_eq!(
            (extensions(&came), map.told.load(Relaxed) & 1 << Trouble::Full as u32),
            ((bytes > CLUSTER).into(), 0)
        );
        ends_with(&mut scene, new);
    }
}

/// A member without room asks the others for what they only keep, before it says that the file is full.
///
/// The story: see [`Pager::ask_for_room`].
#[test]
fn who_has_no_room_asks_the_others_for_theirs() {
    let mut scene = scene();
    let map = scene.pager.clusters.unwrap();
    map.bytes.store(CLUSTER, Relaxed);
    // Another member, which lives.
    map.set_row(9, Identity::of(1), 0);
    // It is larger than what is left.
    let new = FIRST + 0x1000;
    scene.store_block(&mut scene.pager.state.lock(), new, 4, mostly_noise);
    let told = || map.told.load(Relaxed) & 1 << Trouble::Full as u32 != 0;
    let mut asked = Vec::new();
    for _ in 0..4 {
        assert_eq!(round(&mut scene), Came::Nothing);
        asked.push((map.asked.load(Relaxed), told()));
        // A second later.
        scene.pager.state.lock().swap.as_mut().unwrap().rest_until = 0;
        map.asked_at.store(0, Relaxed);
    }
    assert_eq!(asked, [(1, false), (1, true), (2, true), (2, true)]);
    let s = &mut *scene.pager.state.lock();
    events::forget_range(s, new, new + 16);
    end(s, FIRST..FIRST + PAGES);
}

/// See [`who_has_no_room_asks_the_others_for_theirs`].
#[test]
fn who_is_asked_for_room_gives_up_what_it_only_keeps() {
    let mut scene = Scene::new(8);
    let map = scene.pager.clusters.unwrap();
    let s = &mut *scene.pager.state.lock();
    assert_eq!(scene.read(s, FIRST), 1);
    while s.swap.as_mut().unwrap().shrinker.pop().is_some() {}
    let mut kept_when_asked = |by: u32| {
        map.asked.fetch_add(by, Relaxed);
        assert!(matches!(scene.plan_with_little_room(s), Round::Rest(_)));
        let books = &s.swap.as_ref().unwrap().books;
        (books.kept_pages(), books.used_bytes() > 0)
    };
    assert_eq!([0, 1, 0].map(&mut kept_when_asked), [(8, true), (0, false), (0, false)]);
    (FIRST..FIRST + 8).for_each(|vpn| check(s, vpn, vpn));
    end(s, FIRST..FIRST + 8);
}

/// Without holes, extending the file is tried again now and then.
#[test]
fn on_a_full_disk_without_holes_it_is_tried_again() {
    let mut scene = scene();
    let new = FIRST + 0x1000;
    store(&scene, new..new + 10);
    let came: Vec<Came> = (0..6).map(|_| round(&mut scene)).collect();
    assert!((1..=2).contains(&extensions(&came)), "{came:?}");
    assert!(!came.iter().any(|came| matches!(came, Came::Wrote(_))) && came.last() == Some(&Came::Nothing), "{came:?}");
    scene.pager.group.faults.set("swap_space=0/1", 1).unwrap();
    // There is room again, and the second is over.
    scene.pager.clusters.unwrap().allocated.store(64 << 20, Relaxed);
    scene.pager.state.lock().swap.as_mut().unwrap().rest_until = 0;
    let came = write_out(&mut scene, new..new + 10, 4);
    assert_eq!(came.last(), Some(&Came::Wrote(1)), "{came:?}");
    let s = &mut *scene.pager.state.lock();
    events::forget_range(s, new, new + 10);
    end(s, FIRST..FIRST + PAGES);
}

/// See [`Pager::await_late`].
#[test]
fn where_a_dead_process_may_be_writing_that_is_waited_for_first() {
    let file = memfd::create(c"swap", 1 << 20).unwrap();
    for (fd, can) in [(-1, false), (file.as_raw_fd(), true)] {
        let mut scene = Scene::new(0);
        let map = scene.pager.clusters.unwrap();
        map.bytes.store(CLUSTER, Relaxed);
        // It has claimed one, and found nothing to write.
        scene.pager.state.lock().swap.as_mut().unwrap().drop_cluster(0);
        scene.pager.tier.file.store(fd, Relaxed);
        let mut process = std::process::Command::new("sleep").arg("600").spawn().expect("a process");
        let row = map.take_row(Identity::of(process.id())).expect("a row");
        let late = map.claim_cluster(row).expect("the only cluster");
        map.note_writing(row, 0, Some(late));
        process.kill().and_then(|()| process.wait()).expect("a child");
        store(&scene, FIRST..FIRST + 10);
        let came: Vec<Came> = (0..4).map(|_| round(&mut scene)).collect();
        // If it cannot wait for those writes, nothing is written there.
        let wrote = came.iter().any(|came| matches!(came, Came::Wrote(_)));
        assert_eq!((extensions(&came), wrote, map.is_late(late)), (1, can, !can), "{came:?}");
        let s = &mut *scene.pager.state.lock();
        assert_eq!(s.pt.get(FIRST).tag() == Tag::Disk, can);
        end(s, FIRST..FIRST + 10);
    }
}

/// See [`Pager::poke_writer`].
#[test]
fn a_writer_that_rests_is_not_woken_for_nothing() {
    let scene = Scene::new(0);
    let s = &mut *scene.pager.state.lock();
    (FIRST..FIRST + 200).for_each(|vpn| scene.store(s, vpn, half_noise));
    s.swap.as_mut().unwrap().shrinker.press(1 << 20, 1, 1 << 20, 1 << 20, &DiskReads::new());
    let woken = |s: &mut State, rest_until: u64| {
        s.swap.as_mut().unwrap().rest_until = rest_until;
        let before = scene.pager.me().swap_wake.load(Relaxed);
        scene.pager.poke_writer(s);
        scene.pager.me().swap_wake.load(Relaxed) != before
    };
    assert_eq!([0, u64::MAX, 1].map(|rest_until| woken(s, rest_until)), [true, false, true]);
    s.swap.as_mut().unwrap().rest_until = 0;
    end(s, FIRST..FIRST + 200);
}

/// See [`Pager::ask_for_room`].
#[test]
fn members_are_asked_for_room_once_whoever_asks() {
    let scene = Scene::new(0);
    let p = scene.pager;
    let (other, map) = (&p.group.slots[3], p.clusters.unwrap());
    other.owner.store(Identity::own().raw(), Relaxed);
    p.group.used.store(4, Relaxed);
    let s = &mut *p.state.lock();
    let mut asks = |last: u64| {
        map.asked_at.store(last, Relaxed);
        let before = (other.swap_wake.load(Relaxed), map.asked.load(Relaxed));
        p.ask_for_room(s.swap.as_mut().unwrap());
        (other.swap_wake.load(Relaxed) - before.0, map.asked.load(Relaxed) - before.1)
    };
    let now = thread::now_ns();
    // Long ago, just now, and at a time that has not come: nobody who asked can have said that.
    assert_eq!([0, now, u64::MAX].map(&mut asks), [(1, 1), (0, 0), (1, 1)]);
    assert!(thread::now_ns().abs_diff(map.asked_at.load(Relaxed)) < 60_000_000_000, "it is noted");
    other.owner.store(0, Relaxed);
}

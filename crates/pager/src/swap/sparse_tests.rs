//! Tests of compaction of the swap file: a file of a few clusters, full, of which much was freed.

use super::io::Trouble;
use super::read_tests::{EIO, FIRST, Scene, check, check_contents, end};
use super::references::References;
use super::writeback::{Round, bytes_of};
use super::*;
use crate::calls::events;
use crate::testing::{self, half_noise, mostly_noise, noise};
use uzswap_mm::pagetable::Pte;
use uzswap_mm::swapfile::{GRAIN, LEAST_CLUSTER, Sparse};
use uzswap_sys::process::Identity;

/// Clusters of the file; single pages that fill one of them, and all; and where what comes later begins.
const CLUSTERS: u64 = 4;
const EACH: u64 = 108;
const PAGES: u64 = CLUSTERS * EACH;
const NEW: u64 = FIRST + 0x1000;

/// Where the file stands when a round has been planned and made.
#[derive(Debug, PartialEq, Eq)]
enum Came {
    Wrote,
    Compacted,
    Nothing,
}

/// A file that is full: `fill` stores something at a page and says how many pages it took; until no more is written.
fn full(sealed: bool, fill: impl Fn(&Scene, &mut State, u64) -> u64) -> (Scene, u64) {
    let mut scene = Scene::new(0);
    if sealed {
        scene.pager.state.lock().swap.as_mut().unwrap().seal = Seal::new();
    }
    scene.pager.clusters.unwrap().bytes.store(CLUSTERS * LEAST_CLUSTER as u64, Relaxed);
    let mut next = FIRST;
    while scene.pager.clusters.unwrap().told.load(Relaxed) & 1 << Trouble::Full as u32 == 0 {
        next += fill(&scene, &mut scene.pager.state.lock(), next);
        round(&mut scene, Ok(()));
        assert!(next < FIRST + 0x1000);
    }
    // What found no room goes.
    let s = &mut *scene.pager.state.lock();
    let in_pool: Vec<u64> = (FIRST..next).filter(|vpn| s.pt.get(*vpn).tag() == Tag::Compressed).collect();
    in_pool.into_iter().for_each(|vpn| events::forget_range(s, vpn, vpn + 1));
    s.swap.as_mut().unwrap().failures = 0;
    scene.pager.clusters.unwrap().told.store(0, Relaxed);
    (scene, next)
}

/// The same, of single pages of some 2 KiB.
fn full_of_pages(sealed: bool) -> Scene {
    let (scene, end) = full(sealed, |scene, s, vpn| {
        (0..EACH).for_each(|i| scene.store(s, vpn + i, half_noise));
        EACH
    });
    let s = &mut *scene.pager.state.lock();
    events::forget_range(s, FIRST + PAGES, end);
    scene
}

/// One round, in which every read ends with `result`.
fn round(scene: &mut Scene, result: Result<(), i32>) -> Came {
    let planned = plan(scene);
    carry_out(scene, planned, result)
}

fn plan(scene: &mut Scene) -> Round {
    let s = &mut *scene.pager.state.lock();
    s.swap.as_mut().unwrap().rest_until = 0;
    scene.plan_with_little_room(s)
}

fn carry_out(scene: &mut Scene, planned: Round, result: Result<(), i32>) -> Came {
    match planned {
        Round::Write(at, len) => {
            scene.write(&mut scene.pager.state.lock(), at, len);
            Came::Wrote
        }
        Round::Compact(sparse) => {
            land(scene, sparse, result);
            Came::Compacted
        }
        Round::Extend(_) => panic!("the file has all its room"),
        Round::Rest(_) | Round::NotYet | Round::Again => Came::Nothing,
    }
}

/// The read of a range to be compacted ends.
fn land(scene: &mut Scene, sparse: Sparse, result: Result<(), i32>) {
    let Scene { pager, disk, buffer, .. } = scene;
    let bytes = &mut bytes_of(buffer)[..sparse.len];
    bytes.copy_from_slice(&disk[sparse.at as usize..][..sparse.len]);
    pager.compacted(sparse, bytes, result);
}

/// Makes rounds until a range is to be compacted.
fn to_compact(scene: &mut Scene) -> Sparse {
    for _ in 0..40 {
        match plan(scene) {
            Round::Compact(sparse) => return sparse,
            other => _ = carry_out(scene, other, Ok(())),
        }
    }
    panic!("nothing is to be compacted");
}

fn free_each_second(scene: &Scene) {
    let s = &mut *scene.pager.state.lock();
    (FIRST..FIRST + PAGES).step_by(2).for_each(|vpn| events::forget_range(s, vpn, vpn + 1));
}

fn kept() -> impl Iterator<Item = u64> {
    (FIRST + 1..FIRST + PAGES).step_by(2)
}

fn store_new(scene: &Scene, pages: u64) {
    let s = &mut *scene.pager.state.lock();
    (NEW..NEW + pages).for_each(|vpn| scene.store(s, vpn, half_noise));
}

fn is_out(scene: &Scene, pages: impl IntoIterator<Item = u64>) -> bool {
    let s = scene.pager.state.lock();
    pages.into_iter().all(|vpn| s.pt.get(vpn).tag() == Tag::Disk)
}

fn is_told(scene: &Scene, trouble: Trouble) -> bool {
    scene.pager.clusters.unwrap().told.load(Relaxed) & 1 << trouble as u32 != 0
}

/// Reads back all of these pages, which must be what they were, and ends.
fn ends(mut scene: Scene, pages: impl IntoIterator<Item = u64>) {
    let s = &mut *scene.pager.state.lock();
    for vpn in pages {
        if s.pt.get(vpn).tag() == Tag::Disk {
            assert_eq!(scene.read(s, vpn), 1, "page {vpn:x}");
        }
        check(s, vpn, vpn);
    }
    assert_eq!(scene.count(|c| &c.poisoned), 0);
    events::forget_range(s, NEW, NEW + 0x1000);
    end(s, FIRST..FIRST + PAGES);
}

/// The story: free room between objects was used in whole blocks only. A program that freed each second page had a file that was
/// full, and half of it free.
#[test]
fn half_of_a_file_freed_page_by_page_takes_as_much_again() {
    for sealed in [false, true] {
        let mut scene = full_of_pages(sealed);
        free_each_second(&scene);
        let new = PAGES / 2 - 20;
        store_new(&scene, new);
        let mut compacted = 0;
        for _ in 0..40 {
            compacted += u32::from(round(&mut scene, Ok(())) == Came::Compacted);
        }
        assert!(is_out(&scene, NEW..NEW + new) && is_out(&scene, kept()), "sealed: {sealed}");
        assert!(!is_told(&scene, Trouble::Full) && compacted as u64 <= CLUSTERS, "{compacted}");
        let moved = scene.count(|c| &c.swap_compacted);
        assert!((PAGES / 4..=PAGES / 2).contains(&moved), "{moved}");
        ends(scene, kept().chain(NEW..NEW + new));
    }
}

/// A full file that has no gaps is left alone, and so is one whose gaps are too small to be worth it.
#[test]
fn what_is_dense_is_not_moved() {
    for freed in [0, LEAST_CLUSTER / 8 - GRAIN] {
        let mut scene = full_of_pages(false);
        {
            let s = &mut *scene.pager.state.lock();
            // What the filling left does not count.
            (0..CLUSTERS as u32).for_each(|cluster| s.swap.as_mut().unwrap().books.forget_gaps(cluster));
            for vpn in FIRST..FIRST + PAGES {
                let (place, books) = (s.pt.get(vpn).handle(), &s.swap.as_ref().unwrap().books);
                let cluster = (offset(place) / LEAST_CLUSTER as u64) as u32;
                if books.gaps_bytes(cluster) + books.get(place).unwrap().len <= freed {
                    events::forget_range(s, vpn, vpn + 1);
                }
            }
        }
        // No small hole takes it.
        scene.store_block(&mut scene.pager.state.lock(), NEW, 4, mostly_noise);
        let came: Vec<Came> = (0..10).map(|_| round(&mut scene, Ok(()))).collect();
        assert!(came.iter().all(|came| *came == Came::Nothing) && is_told(&scene, Trouble::Full), "{came:?}");
        let s = &mut *scene.pager.state.lock();
        assert_eq!(scene.count(|c| &c.swap_compacted), 0);
        events::forget_range(s, NEW, NEW + 16);
        end(s, FIRST..FIRST + PAGES);
    }
}

/// Blocks that do not compress are cut: what was written for pages that have gone is room again.
#[test]
fn blocks_that_lost_pages_are_cut() {
    let (mut scene, last) = full(false, |_, s, vpn| {
        _ = testing::store(s, vpn, 4, 0, noise);
        16
    });
    let there: Vec<u64> = (FIRST..last).filter(|vpn| !vpn.is_multiple_of(4) && is_out(&scene, [*vpn])).collect();
    assert!(there.len() as u64 >= CLUSTERS * 3 * 12);
    {
        let s = &mut *scene.pager.state.lock();
        (FIRST..last).step_by(4).for_each(|vpn| events::forget_range(s, vpn, vpn + 1));
        assert!(s.swap.as_ref().unwrap().books.wasted_bytes() >= 3 * 4 * CLUSTERS as usize * PAGE);
        (0..2).for_each(|i| _ = testing::store(s, NEW + 16 * i, 4, 0, noise));
    }
    for _ in 0..400 {
        round(&mut scene, Ok(()));
    }
    let all = || there.iter().copied().chain(NEW..NEW + 32);
    assert!(is_out(&scene, all()) && !is_told(&scene, Trouble::Full));
    assert!(scene.count(|c| &c.folios.block_cut) > 0);
    let s = &mut *scene.pager.state.lock();
    for vpn in all() {
        scene.read(s, vpn);
        check_contents(s, vpn, &noise(vpn));
    }
    events::forget_range(s, NEW, NEW + 32);
    end(s, FIRST..last);
}

/// What happens to a page while its cluster is read wins.
#[test]
fn a_page_that_is_used_meanwhile_wins() {
    for used in ["faulted", "freed", "moved", "inherited", "kept"] {
        let mut scene = full_of_pages(false);
        free_each_second(&scene);
        store_new(&scene, 40);
        let sparse = to_compact(&mut scene);
        let inside: Vec<u64> = {
            let s = scene.pager.state.lock();
            let range = sparse.at..sparse.at + sparse.len as u64;
            kept()
                .filter(|vpn| s.pt.get(*vpn).tag() == Tag::Disk && range.contains(&offset(s.pt.get(*vpn).handle())))
                .collect()
        };
        let vpn = inside[7];
        let elsewhere = NEW + 0x800;
        let map = scene.pager.clusters.unwrap();
        {
            let s = &mut *scene.pager.state.lock();
            match used {
                "faulted" => assert_eq!(scene.read(s, vpn), 1),
                "kept" => {
                    s.swap.as_mut().unwrap().keeps = true;
                    (s.swap.as_mut().unwrap().is_spare, s.swap.as_mut().unwrap().until_look) = (true, 9);
                    assert_eq!(scene.read(s, vpn), 1);
                    assert!(s.swap.as_ref().unwrap().books.kept_pages() > 0);
                }
                "freed" => events::forget_range(s, vpn, vpn + 1),
                "moved" => {
                    let pte = s.pt.get(vpn);
                    s.pt.set(vpn, Pte::NONE);
                    s.pt.set(elsewhere, pte);
                }
                _ => {
                    map.set_row(9, Identity::of(1), 0);
                    map.refer(9, sparse.cluster);
                }
            }
        }
        let before = scene.count(|c| &c.swap_compacted);
        land(&mut scene, sparse, Ok(()));
        let moved = scene.count(|c| &c.swap_compacted) - before;
        let mut guard = scene.pager.state.lock();
        let s = &mut *guard;
        let books = &s.swap.as_ref().unwrap().books;
        let left = books.objects_within(sparse.at, sparse.len).count();
        assert_eq!(
            left,
            [0, 1, inside.len()][if used == "inherited" { 2 } else { usize::from(used == "moved") }],
            "{used}"
        );
        assert_eq!(moved > 0, used != "inherited", "{used}");
        match used {
            "freed" => assert_eq!(s.pt.get(vpn), Pte::NONE),
            "moved" => {
                assert_eq!((s.pt.get(vpn), scene.read(s, elsewhere)), (Pte::NONE, 1));
                check(s, elsewhere, vpn);
            }
            _ => {}
        }
        assert_eq!(s.swap.as_ref().unwrap().books.kept_pages(), 0, "{used}");
        drop(guard);
        ends(scene, kept().filter(|at| *at != vpn || !matches!(used, "freed" | "moved")));
    }
}

/// What cannot be read or is damaged stays where it is, and is not tried again and again.
#[test]
fn what_cannot_be_read_stays_where_it_is() {
    for damaged in [false, true] {
        let mut scene = full_of_pages(false);
        free_each_second(&scene);
        // More than the small holes take.
        store_new(&scene, PAGES / 2 - 20);
        let right = scene.disk.clone();
        if damaged {
            scene.disk.fill(0x55);
        }
        let result = if damaged { Ok(()) } else { Err(EIO) };
        let came: Vec<Came> = (0..60).map(|_| round(&mut scene, result)).collect();
        let tries = came.iter().filter(|came| **came == Came::Compacted).count();
        assert!((1..=CLUSTERS as usize).contains(&tries), "damaged: {damaged}, {came:?}");
        assert!(is_told(&scene, Trouble::Read) && is_told(&scene, Trouble::Full));
        assert_eq!((scene.count(|c| &c.swap_compacted), is_out(&scene, kept())), (0, true));
        assert_eq!(scene.count(|c| &c.swap_read_errors) > 0, damaged, "a read that fails is counted where it is made");
        // What was written since is in the file; of the rest nothing has changed there.
        let s = scene.pager.state.lock();
        for vpn in kept() {
            let place = s.pt.get(vpn).handle();
            let len = s.swap.as_ref().unwrap().books.get(place).unwrap().len;
            let at = offset(place) as usize;
            scene.disk[at..at + len].copy_from_slice(&right[at..at + len]);
        }
        drop(s);
        ends(scene, kept());
    }
}

/// One damaged object does not keep the others.
#[test]
fn beside_a_damaged_object_all_are_moved() {
    let mut scene = full_of_pages(false);
    free_each_second(&scene);
    store_new(&scene, 40);
    let sparse = to_compact(&mut scene);
    let at = {
        let s = scene.pager.state.lock();
        let objects = s.swap.as_ref().unwrap().books.objects_within(sparse.at, sparse.len);
        let place = objects.map(|(place, _)| place).nth(5).unwrap();
        offset(place) as usize + 99
    };
    scene.disk[at] ^= 4;
    land(&mut scene, sparse, Ok(()));
    scene.disk[at] ^= 4;
    {
        let s = scene.pager.state.lock();
        assert_eq!(s.swap.as_ref().unwrap().books.objects_within(sparse.at, sparse.len).count(), 1);
        assert!(scene.count(|c| &c.swap_compacted) > 40 && scene.count(|c| &c.swap_read_errors) == 1);
    }
    (0..20).for_each(|_| _ = round(&mut scene, Ok(())));
    assert!(is_out(&scene, NEW..NEW + 40));
    ends(scene, kept().chain(NEW..NEW + 40));
}

/// While the pool has no room nothing leaves its place, and it is tried again after a rest.
#[test]
fn without_room_in_the_pool_it_rests() {
    let mut scene = full_of_pages(false);
    free_each_second(&scene);
    store_new(&scene, PAGES / 2 - 20);
    scene.pager.group.faults.set("pool=1/1", 1).unwrap();
    let came: Vec<Came> = (0..60).map(|_| round(&mut scene, Ok(()))).collect();
    assert_eq!(came.iter().filter(|came| **came == Came::Compacted).count(), 1, "{came:?}");
    assert!(scene.count(|c| &c.swap_compacted) == 0 && is_out(&scene, kept()));
    scene.pager.group.faults.set("pool=0/1", 1).unwrap();
    scene.pager.state.lock().swap.as_mut().unwrap().compact_at = 0;
    (0..400).for_each(|_| _ = round(&mut scene, Ok(())));
    assert!(is_out(&scene, NEW..NEW + PAGES / 2 - 20));
    ends(scene, kept().chain(NEW..NEW + PAGES / 2 - 20));
}

/// What was read to be moved is in the pool while writes fail.
#[test]
fn a_write_that_fails_loses_nothing() {
    let mut scene = full_of_pages(false);
    free_each_second(&scene);
    store_new(&scene, 100);
    let sparse = to_compact(&mut scene);
    land(&mut scene, sparse, Ok(()));
    for _ in 0..4 {
        if let Round::Write(..) = plan(&mut scene) {
            scene.pager.complete(&mut scene.pager.state.lock(), 0, Err(EIO));
        }
    }
    assert!(scene.count(|c| &c.reject_reclaim_fail) > 0);
    ends(scene, kept().chain(NEW..NEW + 100));
}

/// Nothing is compacted with a server, where another process refers to all clusters, or where nothing may be written.
#[test]
fn what_may_not_be_compacted_is_not() {
    for why in ["server", "shared", "bad", "forbidden", "nothing"] {
        let mut scene = full_of_pages(false);
        free_each_second(&scene);
        store_new(&scene, PAGES / 2);
        let map = scene.pager.clusters.unwrap();
        let all = 0..CLUSTERS as u32;
        match why {
            "server" => map.remote.store(1, Relaxed),
            "shared" => {
                map.set_row(9, Identity::of(1), 0);
                all.for_each(|cluster| map.refer(9, cluster));
            }
            "bad" => scene.pager.state.lock().swap.as_mut().unwrap().bad.extend(all),
            "forbidden" => scene.pager.group.nodes[0].zswap_writeback.store(0, Relaxed),
            _ => {}
        }
        let found = {
            let swap = &mut *scene.pager.state.lock();
            let swap = swap.swap.as_ref().unwrap();
            swap.sparsest(swap.row, &swap.bad, super::sparse::SOME).is_some()
        };
        assert_eq!(found, matches!(why, "forbidden" | "nothing"), "{why}");
        let came: Vec<Came> =
            (0..40).map(|_| if why == "bad" { Came::Nothing } else { round(&mut scene, Ok(())) }).collect();
        assert_eq!(came.contains(&Came::Compacted), why == "nothing", "{why}: {came:?}");
        map.remote.store(0, Relaxed);
        ends(scene, kept());
    }
}

//! Tests of the writing thread's steps, one by one and in the order a test wants them: no thread, no disk, no time.

use super::dense::Packer;
use super::fill::Filled;
use super::turns::{Task, Wanted};
use super::writeback::{Block, RUN_BYTES, Round, blocks, bytes_of};
use super::*;
use crate::calls::events;
use crate::fault::deliver::decode;
use crate::frames::arena::PAGE;
use crate::testing::{self, half_noise, words};
use uzswap_mm::codec::Encoding;
use uzswap_mm::pagetable::{HINT_RANDOM, HINT_SEQUENTIAL, Pte};
use uzswap_sys::uffd::Message;

const LIMIT: usize = 8 << 20;
pub(super) const FIRST: u64 = 0x1_0000;

type Content = fn(u64) -> [u8; PAGE];

/// A process with some of its memory in the pool, and its writing thread's state.
pub(super) struct Scene {
    pub(super) pager: &'static Pager,
    packer: Packer,
    pub(super) buffers: [Vec<Block>; 2],
}

impl Scene {
    pub(super) fn new() -> Self {
        let pager = testing::pager_with_swap(LIMIT);
        Self { pager, packer: Packer::default(), buffers: [blocks(RUN_BYTES), blocks(RUN_BYTES)] }
    }

    pub(super) fn count(
        &self,
        what: impl Fn(&crate::group::counters::Counters) -> &core::sync::atomic::AtomicU64,
    ) -> u64 {
        what(self.pager.counters()).load(Relaxed)
    }

    /// Makes everything in the pool due to be met, as if reclaim had taken as much from the program.
    fn press(&self, s: &mut State) {
        let swap = s.swap.as_mut().unwrap();
        swap.shrinker.press(1 << 20, 1, 1 << 20, 1 << 20, &DiskReads::new());
    }

    /// Plans a write; returns its length if there is something to write.
    pub(super) fn plan(&mut self, s: &mut State, slot: usize) -> Option<usize> {
        self.press(s);
        match self.pager.plan_round(s, slot, bytes_of(&mut self.buffers[slot])) {
            Round::Write(_, len) => Some(len),
            Round::Extend(_) | Round::Compact(_) => panic!("the file has all its room"),
            Round::Again | Round::NotYet | Round::Rest(_) => None,
        }
    }

    /// Recompresses what was set aside, and does something meanwhile; returns whether there was any.
    pub(super) fn pack_with(&mut self, s: &mut State, meanwhile: impl FnOnce(&mut State)) -> bool {
        let begun = self.pager.begin_dense(s, &mut self.packer);
        self.packer.compress();
        meanwhile(s);
        self.pager.end_dense(s, &mut self.packer);
        begun
    }

    /// Recompresses some units of what was set aside; returns the first one.
    fn pack(&mut self, s: &mut State) -> Option<super::dense::Unit> {
        let begun = self.pager.begin_dense(s, &mut self.packer);
        let unit = self.packer.units().next().map(|(unit, _)| *unit);
        assert_eq!(begun, unit.is_some());
        self.packer.compress();
        self.pager.end_dense(s, &mut self.packer);
        unit
    }
}

/// Checks that the page is out, in the pool, and unchanged; returns how its object is compressed, and its order.
fn check(s: &mut State, vpn: u64, content: Content) -> (Encoding, u8) {
    let pte = s.pt.get(vpn);
    assert_eq!((pte.tag(), pte.evicted_at()), (Tag::Compressed, testing::EVICTED_AT), "page {vpn:x}");
    let head = Header::read(s.object(pte.handle()));
    assert_eq!(head.vpn + pte.index() as u64, vpn);
    assert_eq!(pte.state().tier(), object::tier(head.encoding));
    let mut out = vec![0; PAGE << head.order];
    assert!(decode(s, pte.handle(), &mut out), "page {vpn:x}");
    assert_eq!(out[pte.index() * PAGE..][..PAGE], content(vpn), "page {vpn:x}");
    (head.encoding, head.order)
}

fn check_all(s: &mut State, pages: core::ops::Range<u64>, content: Content, encoding: Encoding, order: u8) {
    for vpn in pages {
        let (e, o) = check(s, vpn, content);
        assert_eq!((e as u8, o), (encoding as u8, order), "page {vpn:x}");
    }
}

/// Checks that nothing is left over once all pages have gone.
pub(super) fn end(s: &mut State, pages: core::ops::Range<u64>) {
    for vpn in pages {
        let pte = s.pt.get(vpn);
        s.pt.set(vpn, Pte::NONE);
        s.forget(vpn, pte);
    }
    assert_eq!((s.pool.used_bytes(), s.swapped, s.swap.as_ref().unwrap().on_disk()), (0, 0, 0));
    assert_eq!(s.swap.as_ref().unwrap().books.used_bytes(), 0);
}

#[test]
fn idle_objects_are_made_dense_and_written_when_met_again() {
    let mut scene = Scene::new();
    let s = &mut *scene.pager.state.lock();
    // Blocks used in sequence become one; elsewhere four single pages do; randomly read pages stay as they are cut.
    let hints = [(0, HINT_SEQUENTIAL, 4), (16, 0, 2), (32, HINT_RANDOM, 0)];
    for (at, hint, _) in hints {
        s.pt.hint(FIRST + at, hint, 0);
        (0..16).for_each(|i| _ = testing::store(s, FIRST + at + i, 0, 0, words));
    }
    let used = s.pool.used_bytes();
    let mut rounds = 0;
    while rounds < 100 && scene.plan(s, 0).is_none() {
        while scene.pack(s).is_some() {}
        rounds += 1;
    }
    for (at, _, order) in hints {
        let pages = FIRST + at..FIRST + at + 16;
        check_all(s, pages, words, Encoding::Zstd, order);
    }
    assert!(s.pool.used_bytes() < used / 4 * 3, "{} of {used} bytes", s.pool.used_bytes());
    assert_eq!(scene.count(|c| &c.recompressed_idle_pages), 48);
    assert_eq!(scene.count(|c| &c.recompressed_pages), 48);
    // That round of the list is over. Objects met now are written, as they are stored.
    scene.pager.complete(s, 0, Ok(()));
    while scene.plan(s, 0).is_some() {
        scene.pager.complete(s, 0, Ok(()));
    }
    assert!((FIRST..FIRST + 48).all(|vpn| s.pt.get(vpn).tag() == Tag::Disk));
    assert_eq!((scene.count(|c| &c.zswpwb), s.pool.used_bytes()), (48, 0));
    end(s, FIRST..FIRST + 48);
}

/// Blocks on disk are 64 KiB at most: a larger one is cut when its turn comes, after its second chance.
#[test]
fn large_blocks_are_cut_and_their_parts_written() {
    let mut scene = Scene::new();
    let s = &mut *scene.pager.state.lock();
    // A block that only backs copies just goes.
    let copies = testing::store(s, FIRST + 512, 5, 0xffff, half_noise);
    for vpn in FIRST + 512 + 16..FIRST + 512 + 32 {
        s.pt.set(vpn, Pte::new(Tag::Resident, 0).with_copy(copies));
        (s.swapped, s.resident) = (s.swapped - 1, s.resident + 1);
    }
    let handle = testing::store(s, FIRST, 9, 0, half_noise);
    object::set_flags(s.object(handle), object::REFERENCED, 0);
    let all = FIRST..FIRST + 512;
    let is_bare = |s: &State| (FIRST + 512..FIRST + 544).all(|vpn| s.pt.get(vpn) == Pte::new(Tag::Resident, 0));
    // While there is no place for the parts the block stays, and nothing is written.
    scene.pager.group.faults.set("pool=1/1", 1).unwrap();
    assert!((0..4).all(|_| scene.plan(s, 0).is_none()));
    assert!(is_bare(s));
    assert_eq!((s.pt.get(FIRST).handle(), s.swap.as_ref().unwrap().shrinker.len()), (handle, 1));
    scene.pager.group.faults.set("pool=0/1", 1).unwrap();
    let mut rounds = 0;
    while all.clone().any(|vpn| s.pt.get(vpn).tag() != Tag::Disk) {
        if scene.plan(s, 0).is_some() {
            scene.pager.complete(s, 0, Ok(()));
        }
        while scene.pack(s).is_some() {}
        rounds += 1;
        assert!(rounds < 1000, "it is written in the end");
        let pool = all.clone().filter(|vpn| s.pt.get(*vpn).tag() == Tag::Compressed).collect::<Vec<_>>();
        pool.into_iter().step_by(37).for_each(|vpn| assert!(check(s, vpn, half_noise).1 <= 4));
    }
    assert_eq!((scene.count(|c| &c.folios.block_cut), scene.count(|c| &c.zswpwb)), (1, 512));
    assert_eq!(s.pool.used_bytes(), 0);
    end(s, FIRST..FIRST + 544);
}

/// See [`Pager::has_disk_make_room`]: no group is full while its disk can take more.
#[test]
fn a_program_with_nothing_left_has_the_disk_take_some_of_the_pool() {
    let scene = Scene::new();
    let p = scene.pager;
    let s = &mut *p.state.lock();
    (0..100).for_each(|i| _ = testing::store(s, FIRST + 4 * i, 2, 0, half_noise));
    p.tier.file.store(0, Relaxed);
    p.tier.helps.store(true, Relaxed);
    // What another member holds, which has nothing to give.
    let other = &p.group.slots[7];
    p.group.used.store(8, Relaxed);
    other.owner.store(uzswap_sys::process::Identity::own().raw(), Relaxed);
    other.rss.store(2 << 20, Relaxed);
    other.stuck.store(u64::MAX, Relaxed);
    p.group.nodes[0].max.store(1 << 20, Relaxed);
    let mut full = |may_write: bool| {
        p.group.nodes[0].zswap_writeback.store(u32::from(may_write), Relaxed);
        assert!(p.at_floor(s) && p.excess(s) > 0);
        let _ = p.make_room(s, FIRST);
        (p.group.nodes[0].events.oom.load(Relaxed), s.swap.as_ref().unwrap().shrinker.due())
    };
    let due = full(true).1;
    assert!(due >= 16, "{due}");
    assert_eq!(full(true), (0, due), "it is not more for being asked twice");
    assert_eq!(full(false), (1, due), "forbidden");
    p.group.nodes[0].zswap_writeback.store(1, Relaxed);
    end(s, FIRST..FIRST + 400);
}

/// C1: an object met with its bit set goes to the tail with the bit clear, and is not written.
#[test]
fn what_is_not_idle_is_given_its_second_chance_only() {
    let mut scene = Scene::new();
    let s = &mut *scene.pager.state.lock();
    let handle = testing::store(s, FIRST, 2, 0, words);
    object::set_flags(s.object(handle), object::REFERENCED, 0);
    // The bit is cleared, and within the same call the list comes round to the object again.
    let swap = s.swap.as_mut().unwrap();
    swap.shrinker.press(1, 1, 4, 4, &DiskReads::new());
    swap.shrinker.met(swap.shrinker.due() - 4);
    let mut run = scene.pager.find_run(s.swap.as_mut().unwrap()).expect("an empty file");
    let mut swap = s.swap.take().unwrap();
    let task = Task { due: true, ..Task::default() };
    let met = scene.pager.fill_run(s, &mut swap, 0, &mut run, bytes_of(&mut scene.buffers[0]), task);
    assert_eq!((met, swap.aside.len(), swap.shrinker.len()), (Filled::default(), 0, 1));
    s.swap = Some(swap);
    assert!(scene.pack(s).is_none());
    assert_eq!(Header::read(s.object(handle)).flags, 0);
    check_all(s, FIRST..FIRST + 4, words, Encoding::Lz4, 2);
    // A neighbour that is not idle is no part of a larger unit.
    for i in 0..4 {
        let handle = testing::store(s, FIRST + 16 + i, 0, 0, words);
        object::set_flags(s.object(handle), if i == 2 { object::REFERENCED } else { 0 }, 0);
        if i == 0 {
            s.swap.as_mut().unwrap().aside.push(Entry { vpn: FIRST + 16, handle });
        }
    }
    assert!(scene.pack(s).is_some());
    check_all(s, FIRST + 16..FIRST + 17, words, Encoding::Zstd, 0);
    check_all(s, FIRST + 17..FIRST + 20, words, Encoding::Lz4, 0);
}

#[test]
fn what_gains_little_is_written_as_it_is() {
    let mut scene = Scene::new();
    let s = &mut *scene.pager.state.lock();
    let handle = testing::store(s, FIRST, 2, 0, half_noise);
    assert!(scene.plan(s, 0).is_none(), "set aside, not written");
    assert!(scene.pack(s).is_some());
    assert_eq!((s.pt.get(FIRST).handle(), scene.count(|c| &c.reject_recompress_poor)), (handle, 4));
    check_all(s, FIRST..FIRST + 4, half_noise, Encoding::Lz4, 2);
    // It is the next to be met, and is not tried again.
    assert!(scene.plan(s, 0).is_some() && scene.pack(s).is_none());
    scene.pager.complete(s, 0, Ok(()));
    assert_eq!((s.pt.get(FIRST).tag(), scene.count(|c| &c.recompressed_pages)), (Tag::Disk, 0));
    end(s, FIRST..FIRST + 4);
}

#[test]
fn without_room_or_with_damage_the_old_object_stays() {
    let mut scene = Scene::new();
    let s = &mut *scene.pager.state.lock();
    let old = testing::store(s, FIRST, 2, 0, words);
    scene.pager.group.faults.set("pool=1/1", 1).unwrap();
    assert!(scene.plan(s, 0).is_none() && scene.pack(s).is_some());
    assert_eq!(s.pt.get(FIRST).handle(), old);
    check_all(s, FIRST..FIRST + 4, words, Encoding::Lz4, 2);
    scene.pager.group.faults.set("pool=0/1", 1).unwrap();
    // One of four that should become one is damaged: they stay apart, so that the others are not lost with it.
    for i in 4..8 {
        testing::store(s, FIRST + i, 0, 0, words);
    }
    let bad = s.pt.get(FIRST + 5).handle();
    s.object(bad)[object::head_bytes(0)] ^= 1;
    let entry = Entry { vpn: FIRST + 4, handle: s.pt.get(FIRST + 4).handle() };
    s.swap.as_mut().unwrap().aside.push(entry);
    assert!(scene.pack(s).is_none());
    for i in [4, 6, 7] {
        check_all(s, FIRST + i..FIRST + i + 1, words, Encoding::Lz4, 0);
    }
    assert_eq!(Header::read(s.object(entry.handle)).flags, object::TRIED);
    assert_eq!(Header::read(s.object(bad)).flags, 0);
}

#[test]
fn what_is_being_written_is_not_recompressed_nor_the_other_way_round() {
    let mut scene = Scene::new();
    let s = &mut *scene.pager.state.lock();
    let handles: Vec<u32> = (0..4).map(|i| testing::store(s, FIRST + i, 0, 0, words)).collect();
    let entry = |i: usize| Entry { vpn: FIRST + i as u64, handle: handles[i] };
    // One is being written: neither it nor the neighbours that would become one with it are recompressed.
    object::set_flags(s.object(handles[1]), object::WRITING_BY[0], 0);
    s.swap.as_mut().unwrap().aside.extend([entry(1), entry(0)]);
    assert!(scene.pager.begin_dense(s, &mut scene.packer));
    assert_eq!(Header::read(s.object(handles[0])).flags, object::PACKING);
    assert_eq!(Header::read(s.object(handles[1])).flags, object::WRITING_BY[0]);
    // If met while it is being recompressed it is not written; nor would compaction of the pool move it.
    object::set_flags(s.object(handles[1]), 0, object::WRITING_BY[0]);
    assert!(scene.plan(s, 1).is_none() && s.swap.as_ref().unwrap().flights[1].is_empty());
    scene.packer.compress();
    scene.pager.end_dense(s, &mut scene.packer);
    check_all(s, FIRST..FIRST + 1, words, Encoding::Zstd, 0);
    check_all(s, FIRST + 1..FIRST + 4, words, Encoding::Lz4, 0);
    assert!(handles[1..].iter().all(|h| Header::read(s.object(*h)).flags & object::HELD == 0));
}

/// Whatever happens to a page while its unit is compressed wins.
#[test]
fn a_page_that_is_used_meanwhile_wins() {
    for used in 0..3 {
        let mut scene = Scene::new();
        let s = &mut *scene.pager.state.lock();
        let handles: Vec<u32> = (0..4).map(|i| testing::store(s, FIRST + i, 0, 0, words)).collect();
        s.swap.as_mut().unwrap().aside.push(Entry { vpn: FIRST, handle: handles[0] });
        assert!(scene.pager.begin_dense(s, &mut scene.packer));
        let at = FIRST + 2;
        match used {
            // It came back and kept its copy.
            0 => {
                s.swapped -= 1;
                s.resident += 1;
                s.pt.set(at, Pte::new(Tag::Resident, 0).with_copy(handles[2]));
            }
            // It has gone, and another object lies at the same place, for the same page.
            _ => {
                let pte = s.pt.get(at);
                s.pt.set(at, Pte::NONE);
                s.forget(at, pte);
                if used == 2 {
                    let new = testing::store(s, at, 0, 0, |vpn| words(vpn ^ 0xff00));
                    assert_eq!(new, handles[2], "the test wants the same place");
                }
            }
        }
        scene.packer.compress();
        assert!(scene.packer.units().all(|(_, packed)| packed));
        scene.pager.end_dense(s, &mut scene.packer);
        for vpn in [FIRST, FIRST + 1, FIRST + 3] {
            check_all(s, vpn..vpn + 1, words, Encoding::Lz4, 0);
            assert_eq!(Header::read(s.object(s.pt.get(vpn).handle())).flags, 0);
        }
        assert_eq!(scene.count(|c| &c.recompressed_pages), 0);
        match used {
            0 => assert_eq!(Header::read(s.object(handles[2])).flags, 0),
            1 => assert_eq!(s.pt.get(at), Pte::NONE),
            _ => check_all(s, at..at + 1, |vpn| words(vpn ^ 0xff00), Encoding::Lz4, 0),
        }
    }
}

/// A forked child has the whole list, and no object that is held by a thread that it does not have.
#[test]
fn a_child_gives_up_what_its_parent_was_recompressing() {
    let mut scene = Scene::new();
    let s = &mut *scene.pager.state.lock();
    for i in 0..2 {
        testing::store(s, FIRST + 4 * i, 2, 0, words);
    }
    assert!(scene.plan(s, 0).is_none());
    assert!(scene.pager.begin_dense(s, &mut scene.packer));
    assert_eq!((s.swap.as_ref().unwrap().shrinker.len(), s.swap.as_ref().unwrap().packing.len()), (0, 2));
    s.end_flights();
    let swap = s.swap.as_ref().unwrap();
    assert!(swap.packing.is_empty() && swap.aside.is_empty());
    let listed: Vec<Entry> = swap.shrinker.entries().collect();
    assert_eq!(listed.len(), 2);
    assert!(listed.iter().all(|e| s.header_of(*e).flags == 0));
}

/// Two writes are under way, and the second has an object that lies where the first one's was. When the first ends, the page must
/// not get the first one's place: it would read its former contents. (With one mark for both writes it did.)
#[test]
fn a_write_does_not_end_for_what_the_next_one_has_aboard() {
    let mut scene = Scene::new();
    let s = &mut *scene.pager.state.lock();
    let old = testing::store(s, FIRST, 0, 0, half_noise);
    object::set_flags(s.object(old), object::TRIED, 0);
    assert!(scene.plan(s, 0).is_some());
    // The page comes back, is changed, and leaves again.
    let pte = s.pt.get(FIRST);
    s.pt.set(FIRST, Pte::NONE);
    s.forget(FIRST, pte);
    let new = testing::store(s, FIRST, 0, 0, |vpn| half_noise(vpn ^ 0xff00));
    assert_eq!(new, old, "the test wants the same place");
    object::set_flags(s.object(new), object::TRIED, 0);
    assert!(scene.plan(s, 1).is_some());
    let place = s.swap.as_ref().unwrap().flights[1][0].place;
    assert_ne!(place, s.swap.as_ref().unwrap().flights[0][0].place);

    scene.pager.complete(s, 0, Ok(()));
    check(s, FIRST, |vpn| half_noise(vpn ^ 0xff00));
    scene.pager.complete(s, 1, Ok(()));
    let pte = s.pt.get(FIRST);
    assert_eq!((pte.tag(), pte.handle(), scene.count(|c| &c.zswpwb)), (Tag::Disk, place, 1));
    end(s, FIRST..FIRST + 1);
}

/// C3: an object that is being written keeps its place on the list. When the list came round to it before its write failed it was
/// dropped, and stayed in the pool for good.
#[test]
fn an_object_whose_write_fails_is_met_again() {
    let mut scene = Scene::new();
    let s = &mut *scene.pager.state.lock();
    let handle = testing::store(s, FIRST, 2, 0, half_noise);
    object::set_flags(s.object(handle), object::TRIED, 0);
    assert!(scene.plan(s, 0).is_some());
    assert!(scene.plan(s, 1).is_none(), "it is written once");
    scene.pager.complete(s, 0, Err(libc::EIO));
    assert_eq!(scene.count(|c| &c.reject_reclaim_fail), 4);
    check_all(s, FIRST..FIRST + 4, half_noise, Encoding::Lz4, 2);
    assert!(scene.plan(s, 1).is_some());
    scene.pager.complete(s, 1, Ok(()));
    assert_eq!((s.pt.get(FIRST).tag(), scene.count(|c| &c.zswpwb)), (Tag::Disk, 4));
    end(s, FIRST..FIRST + 4);
}

/// mremap moves `pages` pages.
fn remap(scene: &Scene, s: &mut State, from: u64, to: u64, pages: u64) {
    let (from, to, len) = (from as usize * PAGE, to as usize * PAGE, pages as usize * PAGE);
    scene.pager.event(s, Message::Remap { from, to, len });
}

/// The story: an object that mremap moved while it was being written, or recompressed, was not found when that ended, and kept
/// its mark forever. Whatever met it took it to be under way in a write: it was on no list, and never written again.
#[test]
fn what_is_moved_while_it_is_written_is_written_later() {
    let mut scene = Scene::new();
    let s = &mut *scene.pager.state.lock();
    let (to, back) = (FIRST + 0x1000, FIRST + 0x2000);
    let handle = testing::store(s, FIRST, 2, 0, half_noise);
    object::set_flags(s.object(handle), object::TRIED, 0);
    assert!(scene.plan(s, 0).is_some());
    remap(&scene, s, FIRST, to, 4);
    // It may board the next write before that one ends, and be moved again.
    assert!(scene.plan(s, 1).is_some());
    remap(&scene, s, to, back, 4);
    remap(&scene, s, back, FIRST, 4);
    [0, 1].iter().for_each(|slot| scene.pager.complete(s, *slot, Ok(())));
    assert_eq!(Header::read(s.object(handle)).flags & object::HELD, 0);
    check_all(s, FIRST..FIRST + 4, half_noise, Encoding::Lz4, 2);
    assert_eq!(s.swap.as_ref().unwrap().books.used_bytes(), 0, "the places are given up");
    assert!(scene.plan(s, 0).is_some());
    // A forked child has none of its parent's marks either.
    remap(&scene, s, FIRST, to, 4);
    s.end_flights();
    assert_eq!(Header::read(s.object(handle)).flags & object::HELD, 0);
    assert!(scene.plan(s, 0).is_some());
    scene.pager.complete(s, 0, Ok(()));
    assert!((to..to + 4).all(|vpn| s.pt.get(vpn).tag() == Tag::Disk));
    end(s, to..to + 4);
}

#[test]
fn what_is_moved_while_it_is_recompressed_is_met_again() {
    let mut scene = Scene::new();
    let s = &mut *scene.pager.state.lock();
    let (to, handle) = (FIRST + 0x1000, testing::store(s, FIRST, 2, 0, words));
    assert!(scene.plan(s, 0).is_none());
    assert!(scene.pager.begin_dense(s, &mut scene.packer));
    remap(&scene, s, FIRST, to, 4);
    scene.packer.compress();
    scene.pager.end_dense(s, &mut scene.packer);
    assert_eq!((s.pt.get(to).handle(), Header::read(s.object(handle)).flags & object::HELD), (handle, 0));
    assert!(scene.plan(s, 0).is_none() && scene.pack(s).is_some());
    (to..to + 4).for_each(|vpn| _ = check(s, vpn, |vpn| words(vpn - 0x1000)));
    assert!(scene.plan(s, 0).is_some());
    scene.pager.complete(s, 0, Ok(()));
    end(s, to..to + 4);
}

/// The story: mremap moved a block, which was then listed at its first page. If the program had that page the block was on no
/// list.
#[test]
fn a_block_without_its_first_page_is_met_after_a_move() {
    let mut scene = Scene::new();
    let s = &mut *scene.pager.state.lock();
    let to = FIRST + 0x1000;
    for i in 0..2 {
        let handle = testing::store(s, FIRST + 4 * i, 2, 0, half_noise);
        object::set_flags(s.object(handle), object::TRIED, 0);
    }
    events::forget_range(s, FIRST, FIRST + 1);
    while s.swap.as_mut().unwrap().shrinker.pop().is_some() {}
    remap(&scene, s, FIRST, to, 8);
    assert_eq!(s.swap.as_ref().unwrap().shrinker.len(), 2, "each is listed once");
    assert!(scene.plan(s, 0).is_some());
    scene.pager.complete(s, 0, Ok(()));
    assert!((to + 1..to + 8).all(|vpn| s.pt.get(vpn).tag() == Tag::Disk));
    end(s, to + 1..to + 8);
}

/// C4: the pools of a group are full, and another member is behind: it is woken and waited for, then passed over. All stop when
/// the pools are down to where stores are accepted again, not before.
#[test]
fn a_full_pool_is_written_back_in_turns() {
    let scene = Scene::new();
    let s = &mut *scene.pager.state.lock();
    let page = scene.pager.group;
    let (most, mut vpn) = (LIMIT / 100 * 60, FIRST);
    while s.pool.held_bytes() <= most / 2 {
        testing::store(s, vpn, 0, 0, half_noise);
        vpn += 1;
    }
    let (me, other) = (scene.pager.me(), &page.slots[1]);
    page.used.store(2, Relaxed);
    other.owner.store(uzswap_sys::process::Identity::own().raw(), Relaxed);
    other.writer.store(turns::WRITER_READY, Relaxed);
    let full = || page.nodes[0].pool_full.load(Relaxed) == 1;
    let wanted = |s: &mut State| {
        let mut swap = s.swap.take().unwrap();
        let wanted = scene.pager.write_back_wanted(s, &mut swap);
        s.swap = Some(swap);
        wanted
    };
    let others_pool = |bytes: usize| other.pool.store(bytes as u64, Relaxed);
    others_pool(most - s.pool.held_bytes());
    assert!(matches!(wanted(s), Wanted::Nothing) && !full());
    others_pool(most / 2 + (64 << 10));
    let Wanted::Work(task) = wanted(s) else { panic!("both are as far") };
    assert!(full() && task.bytes > 0 && task.pages > 0 && !task.due, "{task:?}");

    // A turn ahead.
    me.turn.store(10_000, Relaxed);
    other.turn.store(10_000 - 512, Relaxed);
    let woken = other.swap_wake.load(Relaxed);
    assert!(matches!(wanted(s), Wanted::NotYet) && other.swap_wake.load(Relaxed) != woken);
    assert_eq!(other.writer.load(Relaxed), turns::WRITER_READY);
    s.swap.as_mut().unwrap().waits_for.1 = 0;
    assert!(matches!(wanted(s), Wanted::NotYet));
    assert_eq!(other.writer.load(Relaxed), turns::WRITER_PASSES);
    assert!(matches!(wanted(s), Wanted::Work(task) if task.pages == usize::MAX));

    let accept = most / 100 * 90;
    others_pool(accept - s.pool.held_bytes() + (32 << 10));
    assert!(!matches!(wanted(s), Wanted::Nothing) && full(), "between the two it goes on");
    others_pool(accept - s.pool.held_bytes());
    assert!(matches!(wanted(s), Wanted::Nothing) && !full());
    // The slot belongs to nobody.
    other.owner.store(0, Relaxed);
}

/// What is on a server is not said to be on disk.
#[test]
fn what_is_on_a_server_is_said_to_be_there() {
    use core::sync::atomic::AtomicU64;
    use uzswap_mm::pagemap::{PageMapWriter, Tier};
    for (remote, tier) in [(0, Tier::Disk), (1, Tier::Remote)] {
        let mut pager = testing::member(testing::group(), 0, LIMIT);
        let books = testing::books();
        books.remote.store(remote, Relaxed);
        pager.swap_to(books);
        let words: &'static [AtomicU64] = Box::leak((0..4).map(|_| AtomicU64::new(0)).collect());
        let map = PageMapWriter::new(Box::leak(Box::new(AtomicU64::new(0))), words, 32);
        let mut s = pager.state.lock();
        s.pt.publish(map, FIRST);
        s.pt.set(FIRST, Pte::new(Tag::Disk, 0));
        s.pt.set_run(FIRST + 7, 9, |_| Pte::new(Tag::Disk, 0));
        s.pt.set(FIRST + 1, Pte::compressed(8, 0, 0));
        assert_eq!([0, 7, 15, 1].map(|page| map.get(page).tier()), [tier, tier, tier, Tier::Warm]);
        drop(s);
        Box::leak(Box::new(pager));
    }
}

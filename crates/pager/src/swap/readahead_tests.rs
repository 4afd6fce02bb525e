//! Tests of reads for which no fault waits: ahead of faults in sequence, or on request. They are made by hand, as the reads that
//! faults wait for.

use super::read_tests::{EIO, FIRST, LIMIT, Scene, check, end, narrow};
use super::swapin::Waiting;
use super::*;
use crate::fault::Request;
use crate::testing;

/// Sequential faults have the next ranges read before anybody asks, after three windows, forwards and backwards. So do several
/// sequences at once.
#[test]
fn sequences_are_read_ahead() {
    let (ahead, back) = (FIRST..FIRST + 256, (FIRST..FIRST + 256).rev());
    let both = (0..128).flat_map(|i| [FIRST + i, FIRST + 255 - i]);
    let orders: [(Box<dyn Iterator<Item = u64>>, usize); 3] =
        [(Box::new(ahead), 1), (Box::new(back), 1), (Box::new(both), 2)];
    for (pages, streams) in orders {
        let mut scene = Scene::new(256);
        let s = &mut *scene.pager.state.lock();
        let asked = scene.walk(s, pages, |_| Ok(()));
        assert!((2 * streams + 1..=4 * streams).contains(&asked), "{asked} faults waited for the disk");
        end(s, FIRST..FIRST + 256);
    }
}

/// The story: incompressible memory that went to disk in blocks of 64 KiB (folios kept out of the pool) was read one block at a
/// time, as two blocks are a little more than was read ahead at once: half as fast as it could be.
#[test]
fn large_blocks_are_read_ahead_several_at_once() {
    let mut scene = Scene::new(0);
    let s = &mut *scene.pager.state.lock();
    let pages = FIRST..FIRST + 12 * 16;
    for vpn in pages.clone().step_by(16) {
        let handle = testing::store(s, vpn, 4, 0, testing::noise);
        object::set_flags(s.object(handle), object::TRIED, 0);
        scene.write_out(s);
    }
    let (mut ahead, mut blocks) = (0, 0);
    for vpn in pages.clone().step_by(16) {
        scene.waiting.clear();
        if s.pt.get(vpn).tag() == Tag::Disk {
            scene.fault(s, vpn);
        }
        scene.pager.read_ahead(s, &mut scene.reads);
        for read in scene.begin() {
            let before = s.swapped;
            scene.end(s, &read, Ok(()));
            if read.place.is_none() {
                (ahead, blocks) = (ahead + 1, blocks + (s.swapped - before) / 16);
            }
        }
        let handle = s.pt.get(vpn).handle();
        if Header::read(s.object(handle)).flags & object::AHEAD != 0 {
            s.wanted_ahead(handle);
        }
    }
    assert!(ahead > 0 && blocks > 2 * ahead, "{blocks} blocks in {ahead} reads");
    end(s, pages);
}

/// Nothing is read ahead of all faults while they wait for the disk to make room, which it would take.
#[test]
fn nothing_is_read_ahead_while_room_is_waited_for() {
    let mut scene = Scene::new(440);
    let p = scene.pager;
    let s = &mut *p.state.lock();
    scene.walk(s, FIRST..FIRST + 100, |_| Ok(()));
    let ahead = |scene: &mut Scene, s: &mut State| {
        p.read_ahead(s, &mut scene.reads);
        let begun = scene.begin();
        begun.iter().for_each(|read| scene.end(s, read, Ok(())));
        begun.len()
    };
    // Everything that is there is wanted.
    let use_up = |s: &mut State| (0..200).for_each(|_| s.swap.as_mut().unwrap().readahead.wanted(None));
    use_up(s);
    p.tier.file.store(0, Relaxed);
    p.group.nodes[0].max.store(64 << 10, Relaxed);
    s.rss = LIMIT;
    assert!(p.waits_for_disk(s));
    assert_eq!(ahead(&mut scene, s), 0);
    p.group.nodes[0].max.store(u64::MAX >> 1, Relaxed);
    assert!(!p.waits_for_disk(s));
    assert!(ahead(&mut scene, s) > 0);
    p.tier.file.store(-1, Relaxed);
    end(s, FIRST..FIRST + 440);
}

/// A read ahead that fails ends its stream and does nothing else: the pages are read when they are wanted.
#[test]
fn a_read_ahead_that_fails_loses_nothing() {
    let mut scene = Scene::new(256);
    let s = &mut *scene.pager.state.lock();
    scene.walk(s, FIRST..FIRST + 96, |_| Ok(()));
    let mut failed = 0;
    scene.walk(s, FIRST + 96..FIRST + 256, |read| {
        let ahead = read.place.is_none();
        failed += usize::from(ahead);
        if ahead { Err(EIO) } else { Ok(()) }
    });
    assert!(failed > 0, "nothing was read ahead");
    end(s, FIRST..FIRST + 256);
}

/// See [`Waiting::asked`].
#[test]
fn nobody_stalls_for_what_nobody_touched() {
    let mut scene = Scene::new(64);
    let s = &mut *scene.pager.state.lock();
    narrow(s);
    for (vpn, waiting) in [
        (FIRST, Waiting::asked(FIRST)),
        (FIRST + 20, Waiting::new(Request { vpn: FIRST + 20, write: false, protected: false })),
    ] {
        let before = scene.count(|c| &c.stall_ns);
        scene.waiting.push(waiting);
        scene.ask(s);
        scene.begin().iter().for_each(|read| scene.end(s, read, Ok(())));
        check(s, vpn, vpn);
        assert_eq!(scene.count(|c| &c.stall_ns) > before, vpn != FIRST);
    }
}

//! Tests of what a write has aboard and what it has not, by hand, like the writing thread's other steps.

use super::tests::{FIRST, Scene, end};
use super::writeback::bytes_of;
use super::*;
use crate::testing::{self, half_noise};
use uzswap_mm::pagetable::Pte;

/// C3: nothing is met, let alone written, where a group forbids writing back or has as much on disk as it may.
#[test]
fn c3_nothing_is_written_where_it_is_forbidden() {
    let mut scene = Scene::new();
    let s = &mut *scene.pager.state.lock();
    let node = &scene.pager.group.nodes[0];
    let handle = testing::store(s, FIRST, 2, 0, half_noise);
    object::set_flags(s.object(handle), object::TRIED | object::REFERENCED, 0);
    let most = node.swap_max.load(Relaxed);
    for (writeback, room) in [(0, most), (1, 4096)] {
        node.zswap_writeback.store(writeback, Relaxed);
        node.swap_max.store(room, Relaxed);
        assert!(scene.plan(s, 0).is_none() && s.swap.as_ref().unwrap().flights[0].is_empty());
        assert_eq!(Header::read(s.object(handle)).flags, object::TRIED | object::REFERENCED, "it was not met");
    }
    assert_eq!(node.events.swap_max.load(Relaxed), 1, "what the disk has no room for is counted");
    node.swap_max.store(most, Relaxed);
    assert!(scene.plan(s, 0).is_some());
    scene.pager.complete(s, 0, Ok(()));
    end(s, FIRST..FIRST + 4);
}

/// C3: a page that is faulted on while its object is being written wins. It is in the program, whatever became of the write, and
/// the others are where the write left them.
#[test]
fn c3_a_page_that_is_faulted_on_while_it_is_written_wins() {
    for (kept, result) in [(false, Ok(())), (true, Ok(())), (false, Err(libc::EIO)), (true, Err(libc::EIO))] {
        let mut scene = Scene::new();
        let s = &mut *scene.pager.state.lock();
        let handle = testing::store(s, FIRST, 2, 0, half_noise);
        object::set_flags(s.object(handle), object::TRIED, 0);
        assert!(scene.plan(s, 0).is_some());
        // It comes back, with or without keeping its copy.
        s.swapped -= 1;
        s.resident += 1;
        let resident = Pte::new(Tag::Resident, 7);
        s.pt.set(FIRST + 1, if kept { resident.with_copy(handle) } else { resident });
        if !kept {
            s.release(handle, 1);
        }
        scene.pager.complete(s, 0, result);
        let pte = s.pt.get(FIRST + 1);
        assert_eq!((pte.tag(), pte.aux(), pte.copy()), (Tag::Resident, 7, kept.then_some(handle)));
        let others = if result.is_ok() { Tag::Disk } else { Tag::Compressed };
        assert!([0, 2, 3].iter().all(|i| s.pt.get(FIRST + i).tag() == others));
        assert_eq!(s.swap.as_ref().unwrap().on_disk(), if result.is_ok() { 3 } else { 0 });
        end(s, FIRST..FIRST + 4);
    }
}

/// An object that only backs copies of the program's pages is no use on disk. It goes when it is met; so does the part of a block
/// that is only copies.
#[test]
fn copies_of_what_is_in_the_program_are_dropped_not_written() {
    let mut scene = Scene::new();
    let s = &mut *scene.pager.state.lock();
    for (i, copies) in [(0, 0b0110), (1, 0b1111)] {
        let handle = testing::store(s, FIRST + 4 * i, 2, copies, half_noise);
        object::set_flags(s.object(handle), object::TRIED, 0);
    }
    assert!(scene.plan(s, 0).is_some());
    assert_eq!(s.swap.as_ref().unwrap().flights[0].len(), 1);
    assert!((0..8).all(|i| s.pt.get(FIRST + i).copy().is_none()));
    scene.pager.complete(s, 0, Ok(()));
    let tags: Vec<Tag> = (0..8).map(|i| s.pt.get(FIRST + i).tag()).collect();
    assert_eq!(
        tags.iter().map(|tag| *tag == Tag::Disk).collect::<Vec<_>>(),
        [true, false, false, true, false, false, false, false]
    );
    assert!([1, 2, 4, 5, 6, 7].iter().all(|i| tags[*i] == Tag::Resident));
    assert_eq!((s.pool.used_bytes(), scene.count(|c| &c.pswpout)), (0, 2));
    end(s, FIRST..FIRST + 8);
}

/// C5: many objects go in one write, one behind the other, as they are stored, and each has a checksum of its own.
#[test]
fn c5_many_objects_go_in_one_write_as_they_are_stored() {
    const N: u64 = 64;
    let mut scene = Scene::new();
    let s = &mut *scene.pager.state.lock();
    let stored: Vec<Vec<u8>> = (0..N)
        .map(|i| {
            let handle = testing::store(s, FIRST + i, 0, 0, half_noise);
            object::set_flags(s.object(handle), object::TRIED, 0);
            s.object(handle).to_vec()
        })
        .collect();
    let (len, all) =
        (scene.plan(s, 0).expect("there is something to write"), stored.iter().map(Vec::len).sum::<usize>());
    let (swap, bytes) = (s.swap.as_ref().unwrap(), bytes_of(&mut scene.buffers[0]));
    assert_eq!(swap.flights[0].len(), N as usize);
    assert!((all..all * 11 / 10).contains(&len), "{len} bytes for {all}");
    let mut checks = std::collections::BTreeSet::new();
    for (flight, object) in swap.flights[0].iter().zip(&stored) {
        let known = swap.books.get(flight.place).expect("it has a place");
        let written = &bytes[(offset(flight.place) - swap.writing[0].0) as usize..][..known.len];
        // The header's last byte holds flags: the object is being written.
        assert_eq!(written[FRONT..][object::HEADER_BYTES..object.len()], object[object::HEADER_BYTES..]);
        assert_eq!(checksum(written), known.check);
        checks.insert(known.check);
    }
    assert_eq!(checks.len(), N as usize);
    scene.pager.complete(s, 0, Ok(()));
    assert_eq!((scene.count(|c| &c.pswpout), s.pool.used_bytes()), (N, 0));
    end(s, FIRST..FIRST + N);
}

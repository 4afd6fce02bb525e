//! Compaction and evacuation, with pools made by hand: which slabs and page blocks go, how many, and what stays.

use super::*;

/// Refuses to move objects of one length.
struct Except(usize);

impl Relocate for Except {
    fn relocate(&mut self, _: Handle, _: Handle, len: usize) -> bool {
        len != self.0
    }

    fn freed(&mut self, _: Freed) {}
}

/// Fills slabs of one page with objects of `len` bytes, and then frees all but the last object of each.
fn one_in_each(pool: &mut ZsPool, len: usize, slabs: usize) {
    let objects = 4096 / len;
    let handles: Vec<_> = (0..slabs * objects).map(|_| pool.alloc(len).unwrap()).collect();
    let gone = handles.iter().enumerate().filter(|(i, _)| (i + 1) % objects != 0);
    gone.for_each(|(_, handle)| assert_eq!(pool.free(*handle), None));
}

#[test]
fn one_call_compacts_every_class_wherever_it_begins() {
    let mut pool = ZsPool::new(1 << 20);
    let all = &mut Except(0);
    one_in_each(&mut pool, 64, 2);
    assert_eq!((pool.compact(0, all), pool.compactable_bytes()), (Compacted::default(), 4096), "no budget");
    // The next call begins behind this class, which is the first of all, and must come round to it.
    one_in_each(&mut pool, 32, 2);
    assert_eq!(pool.compactable_bytes(), 8192);
    let done = pool.compact(1000, all);
    assert_eq!((done.moved, done.freed, pool.compactable_bytes()), (2, 8192, 0));
}

#[test]
fn compaction_ends_with_its_budget() {
    let mut pool = ZsPool::new(1 << 20);
    one_in_each(&mut pool, 64, 4);
    let freed = [1; 4].map(|budget| pool.compact(budget, &mut Except(0)).freed);
    assert_eq!(freed, [4096, 4096, 4096, 0], "one slab per call");
}

/// An object that refuses to move is asked once per call, and does not keep other classes from their turn.
#[test]
fn who_refuses_does_not_stop_the_others() {
    let mut pool = ZsPool::new(1 << 20);
    [32, 64].into_iter().for_each(|len| one_in_each(&mut pool, len, 2));
    let done = pool.compact(100, &mut Except(32));
    assert_eq!(done, Compacted { moved: 1, refused: 1, freed: 4096, blocks: 0 });
}

/// A model of page blocks in which the first `pages` pages each hold an object of a page, and the others are free.
fn sparse(blocks: usize, pages: usize) -> Model {
    let mut model = Model::new(64 << 20);
    (0..blocks * 512).for_each(|_| assert!(model.alloc(4096)));
    let gone = |model: &Model, i: usize| model.handles[i].offset() / 4096 % 512 >= pages;
    (0..blocks * 512).rev().for_each(|i| {
        if gone(&model, i) {
            model.free(i);
        }
    });
    assert_eq!(model.pool.page_blocks(), (blocks, blocks * (512 - pages)));
    model
}

/// One call with enough budget empties blocks until at most half of the pages are free, and not one block more.
#[test]
fn no_more_blocks_are_emptied_than_must_be() {
    for (blocks, pages, emptied) in [(6, 100, 4), (4, 200, 1), (2, 255, 1), (2, 256, 0), (1, 10, 0), (0, 0, 0)] {
        let mut model = sparse(blocks, pages);
        let books = model.pool.metadata_bytes();
        assert_eq!(model.pool.may_be_sparse(), blocks > 0 && pages < 256, "{blocks} blocks of {pages} pages");
        assert_eq!(model.evacuate(100_000, 0).blocks, emptied, "{blocks} blocks of {pages} pages");
        // Emptied blocks are used again before another block is begun.
        assert!((0..emptied * 512).all(|_| model.alloc(4096)));
        assert_eq!(model.pool.metadata_bytes(), books, "{blocks} blocks of {pages} pages");
    }
}

#[test]
fn evacuation_ends_with_its_budget() {
    let mut model = sparse(4, 100);
    let moved = Compacted { moved: 10, freed: 10 * 4096, ..Compacted::default() };
    assert_eq!(model.evacuate(10, 0), moved);
    assert_eq!(model.evacuate(10, 1), Compacted { refused: 10, ..Compacted::default() });
    // (It was begun before, so it is the emptiest.)
    assert_eq!(model.evacuate(90, 0), Compacted { moved: 90, freed: 90 * 4096, blocks: 1, refused: 0 });
}

/// What is moved out of a block goes to slabs that have room.
#[test]
fn evacuation_fills_the_slabs_that_there_are() {
    let mut pool = ZsPool::new(64 << 20);
    let objects = 4096 / 64;
    let handles: Vec<_> = (0..1024 * objects).map(|_| pool.alloc(64).unwrap()).collect();
    // One object is left in each of the first 200 pages of both blocks.
    let stays = |handle: &Handle| handle.offset().is_multiple_of(4096) && handle.offset() / 4096 % 512 < 200;
    handles.iter().filter(|handle| !stays(handle)).for_each(|handle| _ = pool.free(*handle));
    assert_eq!((pool.page_blocks(), pool.held_bytes()), ((2, 624), 400 * 4096));
    let done = pool.evacuate(1000, &mut Except(0));
    assert_eq!(done, Compacted { moved: 200, refused: 0, freed: 200 * 4096, blocks: 1 });
    assert_eq!(pool.held_bytes(), 200 * 4096);
}

/// Pages that were taken for an object which then refuses to move are given back to the kernel, as some of it may have been
/// copied there.
#[test]
fn what_was_taken_for_an_object_that_refuses_is_given_back() {
    let mut model = sparse(2, 100);
    let mut mover = Mover { events: vec![], every: 1, asked: 0 };
    assert_eq!(model.pool.evacuate(10, &mut mover).refused, 10);
    let freed = |event: &Event| matches!(event, Event::Freed(Freed { len: 4096, .. }));
    assert!(mover.events.len() == 10 && mover.events.iter().all(freed));
    model.check();
}

/// A block is not emptied into itself if no other block has a run that is long enough.
#[test]
fn a_block_whose_objects_fit_nowhere_else_stays() {
    let mut model = Model::new(4 << 20);
    (0..1024).for_each(|_| assert!(model.alloc(4096)));
    // In one block every sixteenth page is left; the other gets an object of 17 pages.
    let stays = |handle: &Handle| handle.offset() >= 2 << 20 && (handle.offset() / 4096).is_multiple_of(16);
    (0..1024).rev().for_each(|i| {
        if !stays(&model.handles[i]) {
            model.free(i);
        }
    });
    assert!(model.alloc(69_632));
    assert_eq!(model.pool.page_blocks(), (2, 1024 - 32 - 17));
    assert_eq!(model.evacuate(1000, 0), Compacted::default());
}

//! What goes to disk and comes back: how much, where it lies, and what that costs.

use super::*;

/// Stores a page that takes `bytes` in the pool, header included.
fn page(vpn: u64, bytes: usize) -> Record {
    Record::of_object(Kind::Store, vpn, 0, bytes - head_bytes(1))
}

fn replay_of(settings: Settings, records: &[Record]) -> Replay {
    let mut replay = Replay::new(settings);
    records.iter().for_each(|r| replay.record(0, *r));
    replay
}

/// The share of the pool that is met is twice the share of the resident set that was taken (for Balanced a quarter of
/// that). An object whose bit is set is met, but stays.
#[test]
fn pressure_is_in_proportion_to_what_is_resident() {
    for (policy, written, rotated) in [(Policy::Fifo, 20, 0), (Policy::SecondChance, 0, 20), (Policy::Balanced, 0, 5)] {
        // Of the limit of 1,100 pages the pool takes 100, so 1,000 are resident.
        let settings = Settings { limit: 1100 * PAGE, ..settings(policy, 10 << 20) };
        let mut replay = replay_of(settings, &(0..100).map(|i| page(16 * i, PAGE)).collect::<Vec<_>>());
        replay.record(0, Record::pages(Kind::Evict, 5000, 100));
        assert_eq!((replay.out.written_back, replay.out.rotated), (written, rotated), "{policy:?}");
    }
}

/// A full pool is shrunk exactly to the accepted size, and can then grow to its maximum again.
#[test]
fn a_full_pool_is_shrunk_to_what_is_accepted() {
    let settings = Settings { accept_percent: 50, ..settings(Policy::Fifo, 10_000) };
    let mut replay = replay_of(settings, &[0, 16, 32, 48].map(|vpn| page(vpn, 2500)));
    assert_eq!(replay.out.written_back, 0, "it may take that");
    replay.record(0, page(64, 2500));
    assert_eq!((replay.out.written_back, replay.in_pools()), (3, 5000));
    replay.record(0, page(80, 2500));
    assert_eq!((replay.out.written_back, replay.in_pools()), (3, 7500));
}

/// A page in the program loses its copy when its object is written to disk. When it leaves again it is stored alone, in
/// a page at most.
#[test]
fn a_page_whose_copy_was_given_up_is_stored_alone() {
    for (order, bytes, alone) in [(2, 8000, 2000), (0, 6000, 4096)] {
        let settings = Settings { accept_percent: 50, ..settings(Policy::Fifo, 10_000) };
        let object = Record::of_object(Kind::Store, 0, order, bytes);
        let mut replay = replay_of(settings, &[object, Record::load(0, 1, false, 1), page(100, 4500)]);
        assert_eq!(replay.out.written_back, if order == 0 { 0 } else { 3 });
        assert_eq!(replay.in_pools(), 4500);
        replay.record(0, Record::pages(Kind::Clean, 0, 1));
        check(&replay);
        assert_eq!(replay.in_pools(), 4500 + head_bytes(1) + alone);
    }
}

/// Objects written together lie packed, from a block boundary on. However many writes that takes, no byte is written
/// twice.
#[test]
fn writes_begin_with_a_block() {
    let cost = Cost { read_ns: 7, bytes_per_second: 4096 };
    let settings = Settings { accept_percent: 50, cost, ..settings(Policy::Fifo, 10_000) };
    // The first goes alone, then three together, in two blocks.
    let mut replay = replay_of(settings, &[page(0, 6000), page(16, 2500), page(32, 2500)]);
    assert_eq!(replay.out.written_back, 1);
    [48, 64, 80].into_iter().for_each(|vpn| replay.record(0, page(vpn, 2500)));
    assert_eq!((replay.out.written_back, replay.out.bytes_written), (4, 4 * 4096));
    // To read the second takes one block.
    replay.record(0, Record::load(16, 1, true, 0));
    assert_eq!((replay.out.reads, replay.out.bytes_read, replay.out.wait_ns), (1, 4096, 1_000_000_007));
    // More than one write holds: objects that take a block each, with the 8 bytes more that they have on disk.
    let settings = Settings { accept_percent: 50, ..super::settings(Policy::Fifo, 1 << 20) };
    let blocks = replay_of(settings, &(0..300).map(|i| page(16 * i, 4088)).collect::<Vec<_>>());
    let written = blocks.out.written_back;
    assert!(written > 64 && blocks.out.bytes_written == written * 4096, "{written} pages: {:?}", blocks.out);
}

/// A disk with a bandwidth of 0 counts as one of a byte a second.
#[test]
fn a_disk_that_moves_nothing_is_no_division_by_zero() {
    let cost = Cost { read_ns: 0, bytes_per_second: 0 };
    let settings = Settings { cost, ..settings(Policy::Fifo, 10_000) };
    let mut replay = replay_of(settings, &[page(0, 4000), page(16, 4000), page(32, 4000)]);
    replay.record(0, Record::load(0, 1, true, 0));
    assert_eq!((replay.out.write_ns, replay.out.wait_ns), (4096 * 1_000_000_000, 4096 * 1_000_000_000));
}

/// Each page that is read back is counted once, in the count that the policies go by.
#[test]
fn what_is_read_back_is_counted_once() {
    let settings = Settings { accept_percent: 50, ..settings(Policy::Fifo, 100_000) };
    let mut replay = replay_of(settings, &(0..100).map(|i| page(16 * i, 4000)).collect::<Vec<_>>());
    (0..20).for_each(|i| replay.record(0, Record::load(16 * i, 1, true, 0)));
    assert!(replay.out.reads > 10);
    assert_eq!(replay.disk_reads.get(), replay.out.disk_swapins);
}

/// A page that is stored again and again does not fill the shrinker's list with stale entries.
#[test]
fn stale_entries_are_pruned() {
    let mut replay = replay_of(settings(Policy::Fifo, NO_DISK), &vec![page(5, 1000); 20_000]);
    let listed = replay.worlds.get_mut(&0).unwrap().shrinker.len();
    assert!(listed < 10_000, "{listed} entries for one object");
    check(&replay);
}

/// A range is forgotten exactly to its end, even if it names more pages than are known.
#[test]
fn what_is_named_is_forgotten_to_its_last_page() {
    let mut replay = replay_of(settings(Policy::Fifo, 1 << 20), &[page(5, 1000), page(6, 1000)]);
    replay.record(0, Record::pages(Kind::Free, 0, 6));
    assert_eq!(replay.worlds[&0].pages.keys().collect::<Vec<_>>(), [&6]);
    // A record about a forgotten page does not change its neighbour's object.
    let before = replay.in_pools();
    replay.record(0, Record::of_object(Kind::Resize, 5, 0, 100));
    assert_eq!(replay.in_pools(), before);
    // The largest folio that fits into one object is stored as one.
    let whole = replay_of(settings(Policy::Fifo, 1 << 20), &[Record::of_object(Kind::Store, 0, 4, 20_000)]);
    assert_eq!((whole.worlds[&0].objects.len(), whole.in_pools()), (1, head_bytes(16) + 20_000));
}

/// A child that waits keeps its records if others of its slot are lost (except half a move: see `half_a_move_is_none`).
#[test]
fn what_waits_is_kept_where_records_were_lost() {
    let mut replay = Replay::new(settings(Policy::Fifo, 1 << 20));
    play(&mut replay, 9, 0, &[Record::number(Kind::Born, 7), Record::load(5, 1, false, 0)]);
    play(&mut replay, 9, 3, &[Record::load(6, 1, false, 0)]);
    play(&mut replay, 1, 0, &[page(5, 1000), page(6, 1000), Record::number(Kind::Fork, 7)]);
    assert_eq!((replay.out.loads, replay.out.unknown), (2, 0));
}

//! Replays of made-up traces, compared with a flat model or worked out by hand.

mod disk;

use super::world::{NONE, Object, Page};
use super::*;
use crate::shrinker::Policy;

const LIMIT: usize = 1 << 20;

fn settings(policy: Policy, pool: usize) -> Settings {
    Settings { policy, pool, accept_percent: 90, limit: LIMIT, cost: Cost::default() }
}

fn check(replay: &Replay) {
    for w in replay.worlds.values() {
        let live = |o: &&Object| o.birth != 0;
        let in_pool: usize = w.objects.iter().filter(live).filter(|o| o.at.is_none()).map(|o| o.bytes as usize).sum();
        assert_eq!(w.in_pool, in_pool);
        let out = w.pages.values().filter(|p| p.out && w.objects[p.object as usize].at.is_none()).count();
        assert_eq!(w.stored, out);
        assert_eq!(w.disk.len(), w.objects.iter().filter(live).filter(|o| o.at.is_some()).count());
        // (Not of moved pages: an object does not know where they went, so the replay does not give up their copies
        // when it writes the object.)
        let is_copy = |(at, p): &(&u64, &Page)| {
            !p.out && p.object != NONE && {
                let o = &w.objects[p.object as usize];
                (o.vpn..o.vpn + u64::from(o.pages)).contains(*at)
            }
        };
        let mut copies = w.pages.iter().filter(is_copy);
        assert!(copies.all(|(_, p)| w.objects[p.object as usize].at.is_none()), "a copy is in the pool or nowhere");
        let live_pages: usize = w.objects.iter().filter(live).map(|o| o.live as usize).sum();
        assert_eq!(live_pages, w.pages.values().filter(|p| p.object != NONE).count());
    }
    assert_eq!(replay.forked_size, replay.forked.values().map(World::size).sum::<usize>());
}

/// An xorshift generator.
struct Random(u64);
impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Moves `n` pages of the flat model to another address. Pages in the program are forgotten.
fn move_in(out: &mut BTreeMap<u64, bool>, from: u64, to: u64, n: u64) {
    for (at, is_out) in out.extract_if(from..from + n, |_, _| true).collect::<Vec<_>>() {
        if is_out {
            out.insert(at - from + to, true);
        }
    }
}

/// In any order of events, the sums are right, the pools keep to their size, and stored pages are found when wanted.
#[test]
fn books_balance_under_every_policy() {
    for policy in Policy::ALL {
        for seed in 1..6 {
            println!("{policy:?} {seed}");
            let mut random = Random(u64::wrapping_mul(seed, 0x9e37_79b9_7f4a_7c15));
            let mut replay = Replay::new(settings(policy, 100_000));
            // The flat model: the known pages, and whether each is out.
            let mut out: BTreeMap<u64, bool> = BTreeMap::new();
            for step in 0..20_000 {
                let vpn = random.below(400);
                let unknown = replay.out.unknown;
                match random.below(12) {
                    0..=3 => {
                        let order = if random.below(3) == 0 { 2 } else { 0 };
                        let base = vpn >> order << order;
                        let len = 1 + random.below(4000 << order) as usize;
                        replay.record(0, Record::of_object(Kind::Store, base, order, len));
                        out.extend((base..base + (1 << order)).map(|at| (at, true)));
                    }
                    4..=6 => {
                        let n = 1 + random.below(16);
                        let kept = random.below(1 << 16) as u16;
                        replay.record(0, Record::load(vpn, n as usize, false, kept));
                        let known = (vpn..vpn + n).any(|at| out.get(&at) == Some(&true));
                        assert_eq!(replay.out.unknown - unknown, u64::from(!known), "step {step}");
                        for at in vpn..vpn + n {
                            if out.get(&at) == Some(&true) {
                                if kept & (1 << (at - vpn)) != 0 {
                                    out.insert(at, false)
                                } else {
                                    out.remove(&at)
                                };
                            }
                        }
                    }
                    7 => {
                        replay.record(0, Record::pages(Kind::Clean, vpn, 1));
                        if let Some(page) = out.get_mut(&vpn) {
                            *page = true;
                        }
                    }
                    8 => {
                        let n = 1 + random.below(40);
                        replay.record(0, Record::pages(Kind::Free, vpn, n as usize));
                        out.retain(|at, _| !(vpn..vpn + n).contains(at));
                    }
                    9 => {
                        let (n, to) = (1 + random.below(20), random.below(400));
                        replay.record(0, Record::pages(Kind::MoveFrom, vpn, n as usize));
                        replay.record(0, Record::pages(Kind::MoveTo, to, n as usize));
                        if to.abs_diff(vpn) >= n {
                            move_in(&mut out, vpn, to, n);
                        }
                    }
                    10 => {
                        let order = if random.below(3) == 0 { 2 } else { 0 };
                        // (The smallest size, so that the pool does not grow.)
                        replay.record(0, Record::of_object(Kind::Resize, vpn >> order << order, order, 1));
                    }
                    _ => replay.record(0, Record::pages(Kind::Evict, vpn, 16)),
                }
                assert!(replay.in_pools() <= 100_000, "step {step}: {}", replay.in_pools());
                if step % 500 == 0 {
                    check(&replay);
                }
            }
            check(&replay);
            let done = replay.finish();
            assert!(done.written_back > 0 && done.disk_swapins > 0);
            assert!(done.bytes_written >= done.bytes_read / 64 && done.wait_ns >= done.reads * 100_000);
        }
    }
}

fn store(replay: &mut Replay, vpn: u64) {
    replay.record(0, Record::of_object(Kind::Store, vpn, 0, 1000));
}

/// S3-FIFO keeps pages that come back again and again while pages used once stream by; policies that go by age alone
/// write them to disk each time.
#[test]
fn s3_fifo_keeps_what_comes_back() {
    let reads = |policy| {
        let mut replay = Replay::new(settings(policy, 50_000));
        for round in 0..100u64 {
            for hot in 0..10 {
                store(&mut replay, hot * 16);
            }
            for cold in 0..60 {
                store(&mut replay, 10_000 + (round * 60 + cold) * 16);
            }
            for hot in 0..10 {
                replay.record(0, Record::load(hot * 16, 1, true, 0));
            }
        }
        replay.finish().reads
    };
    let [second, fifo, s3] = [Policy::SecondChance, Policy::Fifo, Policy::S3Fifo].map(reads);
    assert!(s3 * 10 < second && s3 * 10 < fifo, "second chance {second}, fifo {fifo}, s3-fifo {s3}");
}

#[test]
fn a_pool_that_is_large_enough_needs_no_disk() {
    for policy in Policy::ALL {
        // (With pressure or without: pages that reclaim takes from the program press the pool too.)
        for (evicted, written) in [(0, false), (1000, true)] {
            let mut replay = Replay::new(settings(policy, 10 << 20));
            (0..1000).for_each(|vpn| store(&mut replay, vpn));
            // (More than once: in the first round every object has its second chance.)
            (0..20).filter(|_| evicted > 0).for_each(|_| replay.record(0, Record::pages(Kind::Evict, 0, evicted)));
            let done = replay.finish();
            assert_eq!(done.written_back > 0, written, "{policy:?}, {evicted} evicted: {}", done.written_back);
        }
    }
}

/// A page that leaves again unchanged sets its object's reference bit.
#[test]
fn what_leaves_unchanged_is_referenced() {
    let mut replay = Replay::new(settings(Policy::SecondChance, 1 << 20));
    store(&mut replay, 7);
    let referenced = |replay: &mut Replay, set: Option<bool>| {
        let object = &mut replay.worlds.get_mut(&0).unwrap().objects[0];
        object.referenced = set.unwrap_or(object.referenced);
        object.referenced
    };
    replay.record(0, Record::load(7, 1, false, 1));
    referenced(&mut replay, Some(false));
    replay.record(0, Record::pages(Kind::Clean, 7, 1));
    assert!(referenced(&mut replay, None));
    check(&replay);
}

/// A child inherits what its parent had out before the fork, whichever of the two blocks was drained first.
#[test]
fn children_inherit() {
    for child_first in [false, true] {
        let mut replay = Replay::new(settings(Policy::SecondChance, 1 << 20));
        let parent = vec![
            Record::of_object(Kind::Store, 5, 0, 1000),
            Record::number(Kind::Fork, 1),
            Record::pages(Kind::Free, 5, 1),
        ];
        let child = vec![Record::number(Kind::Born, 1), Record::load(5, 1, false, 0)];
        let order = if child_first { [(9, child), (2, parent)] } else { [(2, parent), (9, child)] };
        for (slot, records) in order {
            let words: Vec<u64> = records.iter().map(Record::pack).collect();
            let mut bytes = crate::trace::Header { limit: 1, codec: 0 }.write().to_vec();
            let head = crate::trace::BlockHead { slot, time_ns: 0, lost: 0 };
            crate::trace::write_block(&mut bytes, head, &words);
            let trace = crate::trace::Trace::parse(&bytes).unwrap();
            trace.blocks().for_each(|b| replay.block(&b.unwrap()));
        }
        check(&replay);
        let done = replay.finish();
        assert_eq!((done.loads, done.unknown), (1, 0));
    }
}

#[test]
fn moved_pages_are_found_where_they_went() {
    let mut replay = Replay::new(settings(Policy::Fifo, 1 << 20));
    (0..4).for_each(|vpn| store(&mut replay, vpn));
    replay.record(0, Record::pages(Kind::MoveFrom, 0, 4));
    replay.record(0, Record::pages(Kind::MoveTo, 100, 4));
    replay.record(0, Record::load(100, 4, false, 0));
    replay.record(0, Record::load(0, 4, false, 0));
    check(&replay);
    assert_eq!(replay.finish().unknown, 1);
}

fn play(replay: &mut Replay, slot: u32, lost: u64, records: &[Record]) {
    play_at(replay, slot, 0, lost, records);
}

fn play_at(replay: &mut Replay, slot: u32, time_ns: u64, lost: u64, records: &[Record]) {
    let words: Vec<u64> = records.iter().map(Record::pack).collect();
    let mut bytes = crate::trace::Header { limit: 1, codec: 0 }.write().to_vec();
    crate::trace::write_block(&mut bytes, crate::trace::BlockHead { slot, time_ns, lost }, &words);
    crate::trace::Trace::parse(&bytes).unwrap().blocks().for_each(|b| replay.block(&b.unwrap()));
}

/// The story: the records of one move's target and of the next move's source were lost. The first source was then moved
/// to the second target; where the two ranges were the same, the books named an object that was gone.
#[test]
fn half_a_move_is_none() {
    let [from, other] = [Record::pages(Kind::MoveFrom, 0, 4), Record::pages(Kind::Evict, 0, 4)];
    let to = Record::pages(Kind::MoveTo, 100, 4);
    for (first, lost, second) in [
        (vec![from], 1, vec![to]),
        (vec![from, other], 0, vec![to]),
        (vec![from], 0, vec![Record::pages(Kind::MoveTo, 100, 3)]),
        (vec![Record::number(Kind::Start, 1)], 0, vec![to]),
    ] {
        for lost_first in [false, true] {
            for waits in [false, true] {
                let mut replay = Replay::new(settings(Policy::Fifo, 1 << 20));
                if waits {
                    play(&mut replay, 0, 0, &[Record::number(Kind::Born, 5)]);
                }
                let stored: Vec<_> = (0..4).map(|vpn| Record::of_object(Kind::Store, vpn, 0, 1000)).collect();
                play(&mut replay, 0, 0, &stored);
                let (before, after) = if lost_first { (lost, 0) } else { (0, lost) };
                play(&mut replay, 0, before, &first);
                play(&mut replay, 0, after, &second);
                play(&mut replay, 0, 0, &[Record::load(100, 4, false, 0)]);
                assert_eq!(replay.finish().unknown, 1, "{first:?} {second:?}");
            }
        }
    }
}

/// A file may contain anything.
#[test]
fn a_move_onto_itself_is_none() {
    for to in 0..5 {
        let mut replay = Replay::new(settings(Policy::Fifo, 6000));
        (0..4).for_each(|vpn| store(&mut replay, vpn));
        replay.record(0, Record::pages(Kind::MoveFrom, 0, 4));
        replay.record(0, Record::pages(Kind::MoveTo, to, 4));
        // (The oldest objects go to disk.)
        (100..104).for_each(|vpn| store(&mut replay, vpn));
        check(&replay);
        (0..9).for_each(|vpn| replay.record(0, Record::load(vpn, 1, false, 0)));
        check(&replay);
        assert_eq!((replay.out.loads, replay.out.unknown), (9, 5), "moved to {to}");
    }
}

/// The story: if the block in which a parent forked was lost, its child waited until the end of the trace, and so did
/// every later owner of the child's slot.
#[test]
fn a_slot_is_free_when_its_next_owner_starts() {
    let mut replay = Replay::new(settings(Policy::Fifo, 1 << 20));
    play(&mut replay, 9, 0, &[Record::number(Kind::Born, 7), Record::load(5, 1, false, 0)]);
    assert_eq!(replay.out.loads, 0, "it waits for its parent");
    let next = [Record::of_object(Kind::Store, 6, 0, 1000), Record::load(6, 1, false, 0)];
    play(&mut replay, 9, 0, &[&[Record::load(5, 1, false, 0), Record::number(Kind::Start, 2)], &next[..]].concat());
    assert_eq!((replay.out.loads, replay.out.unknown), (3, 2));
    check(&replay);
    // Likewise if the next owner was forked, and its fork is known.
    play(&mut replay, 9, 0, &[Record::number(Kind::Born, 7), Record::load(5, 1, false, 0)]);
    assert_eq!(replay.out.loads, 3);
    play(&mut replay, 1, 0, &[Record::of_object(Kind::Store, 5, 0, 1000), Record::number(Kind::Fork, 8)]);
    play(&mut replay, 9, 0, &[Record::number(Kind::Born, 8), Record::load(5, 1, false, 0)]);
    assert_eq!((replay.out.loads, replay.out.unknown), (5, 3));
    assert_eq!(replay.finish().records, 12);
}

/// A child that waits may itself be a parent that others wait for.
#[test]
fn children_of_a_child_that_waits_inherit_too() {
    let mut replay = Replay::new(settings(Policy::Fifo, 1 << 20));
    let load = Record::load(5, 1, false, 0);
    play(&mut replay, 3, 0, &[Record::number(Kind::Born, 2), load]);
    play(&mut replay, 2, 0, &[Record::number(Kind::Born, 1), Record::number(Kind::Fork, 2)]);
    play(&mut replay, 2, 0, &[load]);
    assert_eq!(replay.out.loads, 0);
    play(&mut replay, 1, 0, &[Record::of_object(Kind::Store, 5, 0, 1000), Record::number(Kind::Fork, 1), load]);
    assert_eq!((replay.out.loads, replay.out.unknown), (3, 0));
    assert!(replay.forked.is_empty() && replay.waiting.is_empty());
}

/// What is kept for forks whose child never shows up, and for children whose fork never does, is bounded.
#[test]
fn what_is_kept_for_children_is_bounded() {
    let mut replay = Replay::new(settings(Policy::Fifo, 1 << 30));
    for vpn in 0..1000 {
        store(&mut replay, vpn);
    }
    let forks = 2 * MOST_FORKED / 1000;
    (0..forks as u64).for_each(|fork| replay.record(0, Record::number(Kind::Fork, fork)));
    assert!(replay.forked.len() < forks);
    assert!(replay.forked.contains_key(&(forks as u64 - 1)) && !replay.forked.contains_key(&0), "the oldest go first");
    play(&mut replay, 1, 0, &[Record::number(Kind::Born, 1 << 30)]);
    let many = vec![Record::load(5, 1, false, 0); MOST_WAITING / 4];
    (0..5).for_each(|_| play(&mut replay, 1, 0, &many));
    assert!(replay.waiting.is_empty() && replay.out.loads == many.len() as u64 * 5);
}

/// The story: the object to replace was looked up by its first page alone. If the program had written to that page
/// since, and it had been stored alone, that page's object got the new size. And of a large block, which the replay
/// keeps as several objects, the first got the size of the whole.
#[test]
fn an_object_is_replaced_by_a_denser_one_wherever_its_pages_are() {
    let in_pool = |records: &[Record]| {
        let mut replay = Replay::new(settings(Policy::Fifo, 1 << 30));
        records.iter().for_each(|r| replay.record(0, *r));
        check(&replay);
        replay.in_pools()
    };
    let block = Record::of_object(Kind::Store, 0, 2, 8000);
    let anew = [Record::load(0, 1, true, 0), Record::of_object(Kind::Store, 0, 0, 3000)];
    let resized = Record::of_object(Kind::Resize, 0, 2, 5000);
    let parts = [block, anew[0], anew[1]];
    assert_eq!(in_pool(&parts) - in_pool(&[&parts[..], &[resized]].concat()), 3000);
    // All of its pages have moved: it is found there, and not at the old place.
    let moved = [Record::pages(Kind::MoveFrom, 0, 4), Record::pages(Kind::MoveTo, 64, 4)];
    let there = Record::of_object(Kind::Resize, 64, 2, 5000);
    assert_eq!(in_pool(&[block]) - in_pool(&[block, moved[0], moved[1], there]), 3000);
    assert_eq!(in_pool(&[block]), in_pool(&[block, moved[0], moved[1], resized]));
    // A block of 2 MiB, replaced as a whole and in parts.
    let huge = |kind, len| Record::of_object(kind, 512, 9, len);
    let before = in_pool(&[huge(Kind::Store, 1 << 20)]);
    assert_eq!(before - in_pool(&[huge(Kind::Store, 1 << 20), huge(Kind::Resize, 1 << 19)]), 1 << 19);
    let part = Record::of_object(Kind::Resize, 528, 4, 20_000);
    assert_eq!(before - in_pool(&[huge(Kind::Store, 1 << 20), part]), 32_768 - 20_000);
}

/// The story: even without a disk, what reclaim took from the program pressed the pool, so pools were said to have
/// taken a third less than they had. By default, `uzswap replay` gives the pools half of that figure.
#[test]
fn how_much_the_pools_took_is_without_a_disk() {
    for policy in Policy::ALL {
        let mut replay = Replay::new(settings(policy, NO_DISK));
        for vpn in 0..1000 {
            store(&mut replay, vpn);
            replay.record(0, Record::pages(Kind::Evict, 0, 100));
        }
        let taken = replay.in_pools() as u64;
        let done = replay.finish();
        assert_eq!((done.written_back, done.pool_peak), (0, taken), "{policy:?}");
    }
}

/// All fields of an outcome, for a trace whose every step can be worked out by hand.
#[test]
fn an_outcome_says_what_was_done() {
    // The disk takes a millisecond for a block, and a microsecond more for a read.
    let cost = Cost { read_ns: 1000, bytes_per_second: 4_096_000 };
    let settings = Settings { policy: Policy::Fifo, pool: 10_000, accept_percent: 50, limit: LIMIT, cost };
    let mut replay = Replay::new(settings);
    // Three objects of 3,996 bytes with headers of 28 bytes: the third makes it 12,072 bytes, so two are written to get
    // down to 5,000. On disk each takes 4,032 bytes, so the first lies in the first block, and the second in both.
    let store = |vpn| Record::of_object(Kind::Store, vpn, 0, 3996);
    play_at(&mut replay, 0, 5000, 2, &[store(0), store(16), store(32)]);
    assert_eq!((replay.in_pools(), replay.out.written_back), (4024, 2));
    // The first page is read, and nothing along with it; another page is unknown; two records say what the recorded run
    // did itself.
    let own = [Record::of_object(Kind::WriteBack, 0, 2, 1), Record::of_object(Kind::DiskRead, 0, 1, 1)];
    play_at(&mut replay, 0, 3000, 3, &[Record::load(0, 1, true, 0), Record::load(77, 1, false, 0), own[0], own[1]]);
    check(&replay);
    let mut want = Outcome {
        disk_swapins: 1,
        reads: 1,
        written_back: 2,
        bytes_read: 4096,
        bytes_written: 8192,
        rotated: 0,
        stored: 3,
        loads: 2,
        unknown: 1,
        pool_peak: 12_072,
        wait_ns: 1_001_000,
        write_ns: 2_000_000,
        records: 7,
        lost: 5,
        end_ns: 5000 + 1_001_000,
        recorded_written_back: 4,
        recorded_swapins: 2,
    };
    assert_eq!(replay.finish(), want);
    // A policy with second chances meets each object once more, to clear its bit.
    let mut replay = Replay::new(Settings { policy: Policy::SecondChance, ..settings });
    play_at(&mut replay, 0, u64::MAX, u64::MAX, &[store(0), store(16), store(32)]);
    play_at(&mut replay, 0, 1, 1, &[Record::load(0, 1, true, 0)]);
    want = Outcome { rotated: 3, loads: 1, unknown: 0, records: 4, lost: u64::MAX, end_ns: u64::MAX, ..want };
    assert_eq!(replay.finish(), Outcome { recorded_written_back: 0, recorded_swapins: 0, ..want });
}

/// Objects of several pages lie packed on disk, and reading one brings the others that are in the same blocks.
#[test]
fn objects_of_several_pages_share_blocks() {
    let mut replay = Replay::new(Settings { accept_percent: 50, ..settings(Policy::Fifo, 10_000) });
    // With headers of 76 bytes in the pool, and 8 bytes more on disk, they take 4,096, 1,024 and 1,984 bytes there. The
    // fourth makes it 11,116 bytes in the pool.
    let store = |vpn, bytes| Record::of_object(Kind::Store, vpn, 2, bytes);
    [store(0, 3996), store(16, 924), store(32, 1896)].into_iter().for_each(|r| replay.record(0, r));
    replay.worlds.get_mut(&0).unwrap().reused.insert(0);
    replay.record(0, store(48, 3996));
    assert_eq!((replay.in_pools(), replay.out.written_back, replay.out.bytes_written), (4072, 12, 8192));
    let world = replay.worlds.get_mut(&0).unwrap();
    assert!(!world.reused.contains(&0), "it was not read back since");
    world.objects.iter_mut().for_each(|o| o.referenced = false);
    replay.record(0, Record::load(33, 1, true, 0));
    assert_eq!((replay.out.reads, replay.out.bytes_read, replay.out.disk_swapins), (1, 4096, 8));
    assert_eq!(replay.worlds[&0].objects.iter().map(|o| o.referenced).collect::<Vec<_>>(), [false, true, true, false]);
    check(&replay);
}

/// Meeting an object counts as meeting all its pages, so no more is met than is due.
#[test]
fn pressure_meets_as_many_pages_as_it_asks_for() {
    let mut replay = Replay::new(settings(Policy::Fifo, 10 << 20));
    (0..100).for_each(|i| replay.record(0, Record::of_object(Kind::Store, 16 * i, 2, 1000)));
    (0..8).for_each(|_| replay.record(0, Record::pages(Kind::Evict, 0, 16)));
    let written = replay.out.written_back;
    println!("{written} of 400 pages");
    assert!(written > 0 && written < 200, "{written} of 400 pages");
    assert_eq!(replay.worlds[&0].shrinker.due(), 0);
    check(&replay);
}

/// The halves of a move may be in two successive blocks of the trace, if nothing was lost in between.
#[test]
fn a_move_may_be_in_two_blocks() {
    let mut replay = Replay::new(settings(Policy::Fifo, 1 << 20));
    (0..4).for_each(|vpn| store(&mut replay, vpn));
    play(&mut replay, 0, 0, &[Record::pages(Kind::MoveFrom, 0, 4)]);
    play(&mut replay, 0, 0, &[Record::pages(Kind::MoveTo, 100, 4)]);
    play(&mut replay, 0, 0, &[Record::load(100, 4, false, 0)]);
    assert_eq!(replay.finish().unknown, 0);
}

/// A fork that its child has taken over, and one whose number is used again, make room for others.
#[test]
fn what_is_kept_for_children_is_given_up_with_them() {
    let mut replay = Replay::new(settings(Policy::Fifo, 1 << 20));
    let mut size = 0;
    for round in 0..3 {
        store(&mut replay, round);
        play(&mut replay, 0, 0, &[Record::number(Kind::Fork, 1), Record::number(Kind::Fork, 2)]);
        check(&replay);
        // (Each counts its pages, its objects, and one.)
        size = 2 * (2 * (round as usize + 1) + 1);
        assert_eq!((replay.forked_size, replay.forked.len()), (size, 2), "the later of two with one number");
    }
    play(&mut replay, 1, 0, &[Record::number(Kind::Born, 2)]);
    check(&replay);
    assert_eq!((replay.forked_size, replay.forked.len()), (size / 2, 1));
}

/// At the end of a trace, parents are played before the children that wait for them, whatever their slots: one whose
/// own parent was lost starts with nothing, and its children start with what it had.
#[test]
fn who_waits_at_the_end_begins_with_what_its_parent_had() {
    let mut replay = Replay::new(settings(Policy::Fifo, 1 << 20));
    let stored = Record::of_object(Kind::Store, 5, 0, 1000);
    play(&mut replay, 3, 0, &[Record::number(Kind::Born, 2), Record::load(5, 1, false, 0)]);
    play(&mut replay, 5, 0, &[Record::number(Kind::Born, 1), Record::number(Kind::Fork, 2)]);
    play(&mut replay, 1, 0, &[Record::number(Kind::Born, 100), stored, Record::number(Kind::Fork, 1)]);
    assert_eq!(replay.waiting.len(), 3);
    let done = replay.finish();
    assert_eq!((done.loads, done.unknown), (1, 0));
}

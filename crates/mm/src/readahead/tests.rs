//! The window and the streams, with reads made by hand.

use super::*;

const CLUSTER: usize = 256 << 10;
const STEP: u64 = 64 << 10;

fn only(r: &Readahead) -> Option<(u64, usize, bool)> {
    let all: Vec<_> = r.ahead().collect();
    assert!(all.len() < 2, "{all:?}");
    all.first().map(|a| (a.from, a.len, a.backwards))
}

#[test]
fn what_is_wanted_widens_it_and_what_is_not_narrows_it() {
    let mut r = Readahead::default();
    let mut place = 0;
    let mut far = |r: &mut Readahead, brought| {
        place += 10 << 20;
        r.read(place, r.window, brought);
    };
    (0..64).for_each(|_| far(&mut r, 7));
    assert_eq!(r.window(), LEAST, "nothing that came along was wanted");
    (0..64).for_each(|_| far(&mut r, 0));
    assert_eq!(r.window(), LEAST, "and nothing comes along any more");
    for _ in 0..64 {
        (0..7).for_each(|_| r.wanted(None));
        far(&mut r, 14);
    }
    assert_eq!(r.window(), MOST, "half of it wanted");
    for _ in 0..EPOCH {
        (0..4).for_each(|_| r.wanted(None));
        far(&mut r, 14);
    }
    assert_eq!(r.window(), MOST, "less than half, and more than a quarter: as it was");
}

/// Reads near each other get a window of their own, however narrow random reads have made the general one.
#[test]
fn reads_near_each_other_have_a_window_of_their_own() {
    let mut r = Readahead::default();
    (1..200u64).for_each(|i| r.read(i << 24, 4096, 7));
    let len = |r: &Readahead, at| r.range(at, 4096, 128 << 10).1;
    assert_eq!((r.window(), len(&r, 1 << 40)), (LEAST, LEAST));
    r.read(1 << 40, 4096, 0);
    assert_eq!(len(&r, (1 << 40) + 4096), LEAST);
    r.read((1 << 40) + 4096, 4096, 0);
    assert_eq!(len(&r, (1 << 40) + 8192), MOST);
    assert_eq!((r.window(), len(&r, 1 << 41)), (LEAST, LEAST));
}

#[test]
fn a_stream_is_read_ahead_as_fast_as_it_is_used() {
    for backwards in [false, true] {
        let mut r = Readahead::default();
        let far = 64 << 20;
        let at = |i: u64| if backwards { far - i * STEP } else { far + i * STEP };
        for i in 0..2 {
            r.read(at(i), STEP as usize, 7);
            assert_eq!(only(&r), None, "no stream yet");
            (0..7).for_each(|_| r.wanted(Some(at(i))));
        }
        r.read(at(2), STEP as usize, 7);
        let mut front = if backwards { at(2) } else { at(3) };
        assert_eq!(only(&r), Some((front, STREAM_BYTES, backwards)));
        let stream = r.ahead().next().unwrap().stream;
        let bytes = STREAM_BYTES as u64;
        for _ in 0..10 {
            let range = if backwards { front - bytes } else { front };
            r.read_ahead(stream, range, STREAM_BYTES, 14);
            front = if backwards { front - bytes } else { front + bytes };
            assert_eq!(only(&r), None, "more than a range is in stock");
            while only(&r).is_none() {
                r.wanted(Some(range));
            }
            assert_eq!(only(&r), Some((front, STREAM_BYTES, backwards)));
        }
        assert_eq!(
            r.wanted, 7,
            "what streams bring does not count for the window, except with the first read, which was no stream yet"
        );
        // A range that brings nothing ends the stream.
        r.read_ahead(stream, front, STREAM_BYTES, 0);
        (0..100).for_each(|_| r.wanted(Some(front)));
        assert_eq!(only(&r), None);
    }
}

/// Several streams at once, one of them backwards, with random reads in between.
#[test]
fn streams_do_not_disturb_each_other_nor_does_what_is_read_at_random() {
    let mut r = Readahead::default();
    let starts = [(1u64 << 30, false), (2 << 30, true), (3 << 30, false)];
    let mut random = 0;
    for i in 0..20 {
        for (start, backwards) in starts {
            let at = if backwards { start - i * STEP } else { start + i * STEP };
            r.read(at, STEP as usize, 15);
            (0..15).for_each(|k| r.wanted(Some(at + k * 4096)));
            for _ in 0..3 {
                random += 1;
                r.read((random << 25) | 1 << 45, 4096, 0);
            }
        }
        let ahead: Vec<_> = r.ahead().map(|a| a.backwards).collect();
        assert_eq!(ahead.len(), if i < 2 { 0 } else { 3 }, "round {i}");
        assert_eq!(ahead.iter().filter(|b| **b).count(), usize::from(i >= 2));
    }
    // A stream only goes on once what it brought is used.
    let ahead: Vec<_> = r.ahead().collect();
    for a in &ahead {
        let at = if a.backwards { a.from - STREAM_BYTES as u64 } else { a.from };
        r.read_ahead(a.stream, at, STREAM_BYTES, 30);
        r.read_ahead(
            a.stream,
            if a.backwards { at - STREAM_BYTES as u64 } else { a.from + STREAM_BYTES as u64 },
            STREAM_BYTES,
            30,
        );
    }
    assert_eq!(r.ahead().count(), 0);
    let back = ahead.iter().find(|a| a.backwards).unwrap();
    (0..30).for_each(|k| r.wanted(Some(back.from - 1 - k * 4096)));
    assert_eq!(r.ahead().map(|a| a.stream).collect::<Vec<_>>(), [back.stream]);
    // Streams that are no longer read make room in the end.
    (1..200u64).for_each(|i| r.read(i << 26 | 1 << 46, 4096, 0));
    assert_eq!(r.ahead().count(), 0);
}

/// Memory is so short that what is read ahead leaves again before it is wanted: then little is read ahead.
#[test]
fn a_stream_that_brings_what_is_not_used_ends() {
    let mut r = Readahead::default();
    let mut bytes = 0;
    for i in 0..200u64 {
        let (at, len) = r.range(i * 4160, 4160, 128 << 10);
        let brought = len / 4160;
        r.read(at, len, brought);
        bytes += len;
        for a in r.ahead().collect::<Vec<_>>() {
            r.read_ahead(a.stream, a.from, a.len, 30);
            bytes += a.len;
        }
    }
    assert!(bytes < 200 * 30_000, "{bytes} bytes for 200 pages");
    assert!(r.window() < FIRST);
}

#[test]
fn a_turn_ends_a_stream_and_begins_another() {
    let mut r = Readahead::default();
    let mut read = |i: u64| {
        r.read(i * STEP, STEP as usize, 1);
        r.wanted(Some(i * STEP));
        only(&r).map(|(_, _, backwards)| backwards)
    };
    (100..102).for_each(|i| assert_eq!(read(i), None));
    assert_eq!([102, 101, 100, 101, 102].map(&mut read), [Some(false), None, Some(true), None, Some(false)]);
    assert_eq!(r.ahead().map(|a| a.from).collect::<Vec<_>>(), [103 * STEP]);
}

#[test]
fn the_range_has_the_object_and_stays_in_its_cluster() {
    for window in [LEAST, 8 << 10, FIRST, MOST] {
        let r = Readahead { window, ..Readahead::default() };
        for at in (0..2 * CLUSTER as u64).step_by(1984) {
            for len in [64, 4160, 20_000, 66_000] {
                let cluster = at / CLUSTER as u64 * CLUSTER as u64;
                if at + len as u64 > cluster + CLUSTER as u64 {
                    continue;
                }
                let (from, n) = r.range(at, len, 128 << 10);
                assert!(from % BLOCK as u64 == 0 && n % BLOCK == 0 && n <= 128 << 10);
                assert!(from <= at && at + len as u64 <= from + n as u64, "{at} {len}: {from} {n}");
                assert!(from >= cluster && from + n as u64 <= cluster + CLUSTER as u64);
            }
        }
    }
}

/// An epoch has 8 reads, and each epoch is judged by itself.
#[test]
fn the_window_changes_by_what_was_wanted_of_an_epoch() {
    let epoch = |r: &mut Readahead, brought: usize, wanted: u32| {
        let before = r.window();
        for i in 0..u64::from(EPOCH) {
            assert_eq!(r.window(), before, "read {i}");
            // (In the middle of the epoch: objects may be wanted at any time.)
            (0..wanted).filter(|_| i == 3).for_each(|_| r.wanted(None));
            r.read((u64::from(r.clock) + 1) << 24, 4096, brought);
        }
        (before, r.window())
    };
    let mut r = Readahead::default();
    assert_eq!(epoch(&mut r, 4, 15), (32 << 10, 32 << 10), "less than half of 32");
    assert_eq!(epoch(&mut r, 4, 7), (32 << 10, 16 << 10), "less than a quarter");
    assert_eq!(epoch(&mut r, 4, 8), (16 << 10, 16 << 10));
    assert_eq!(epoch(&mut r, 4, 0), (16 << 10, 8 << 10));
    assert_eq!(epoch(&mut r, 4, 16), (8 << 10, 16 << 10), "half");
    assert_eq!(epoch(&mut r, 0, 1), (16 << 10, 16 << 10), "nothing came along");
    assert_eq!(epoch(&mut r, 1, 8), (16 << 10, 32 << 10));
    assert_eq!(epoch(&mut r, 1, 8), (32 << 10, 64 << 10));
    assert_eq!(epoch(&mut r, 1, 8), (64 << 10, 64 << 10), "the most");
    let mut least = Readahead { window: LEAST, ..Readahead::default() };
    assert_eq!(epoch(&mut least, 4, 0), (4096, 4096));
}

/// What came along or ahead in a stream is behind its front, but no further than its stock can reach, in both
/// directions.
#[test]
fn what_a_stream_has_passed_is_behind_its_front() {
    let (front, reach) = (10 << 20, 3 * STREAM_BYTES as u64);
    let passed = |s: &Stream, all: [u64; 4]| all.map(|at| s.has_passed(at));
    let forward = Stream { number: 1, from: front - 4096, to: front, ..Stream::default() };
    let edges = [front, front - 1, front - reach, front - reach - 1];
    assert_eq!(passed(&forward, edges), [false, true, true, false]);
    let backwards = Stream { number: 1, backwards: true, from: front, to: front + 4096, ..Stream::default() };
    let edges = [front - 1, front, front + reach - 1, front + reach];
    assert_eq!(passed(&backwards, edges), [false, true, true, false]);
    // A wanted object counts for a stream that has passed it; of two, for the one with the longer run. If its place is
    // not known, it counts for the stream with most in stock.
    let mut r = Readahead::default();
    r.streams[3] = Stream { run: 2, stock: 2, ..backwards };
    r.streams[5] = Stream { number: 2, run: 3, stock: 9, ..forward };
    r.streams[6] = Stream { number: 3, run: 4, stock: 1, ..backwards };
    let mut stocks = |at| {
        r.wanted(at);
        [3, 5, 6].map(|i| r.streams[i].stock)
    };
    let orders = [Some(front), Some(front), Some(front - 1), None].map(&mut stocks);
    assert_eq!(orders, [[2, 9, 0], [1, 9, 0], [1, 8, 0], [1, 7, 0]]);
    assert_eq!([Some(front), Some(front)].map(stocks), [[0, 7, 0]; 2], "the last is no stream's");
    assert_eq!(r.wanted, 1);
}

/// Reads up to 16 KiB apart are near each other. A read near two streams continues the one used last.
#[test]
fn a_read_between_two_goes_on_with_the_later_one() {
    let mut r = Readahead::default();
    let (len, far) = (4096, (16 << 10) + 4096 + (16 << 10));
    r.read(0, len, 0);
    r.read(4096 + far, len, 0);
    let spans = |r: &Readahead| {
        let mut all: Vec<_> = r.streams.iter().filter(|s| s.number != 0).map(|s| (s.number, s.from, s.run)).collect();
        all.sort_unstable();
        all
    };
    assert_eq!(spans(&r), [(1, 0, 0), (2, 4096 + far, 0)]);
    let between = 4096 + (16 << 10);
    r.read(between, len, 0);
    assert_eq!(spans(&r), [(1, 0, 0), (2, between, 1)], "near both");
    assert_eq!(r.range(between - (16 << 10) - 4096, len, 128 << 10).1, MOST, "a read whose end is near counts as near");
    // Reads of the same place count as going forward.
    let mut again = Readahead::default();
    (0..3).for_each(|_| again.read(1 << 20, len, 0));
    assert_eq!(only(&again), Some(((1 << 20) + 4096, STREAM_BYTES, false)));
    // A byte further away, it is a read of its own.
    for (at, near) in [(20 << 10, true), ((20 << 10) + 1, false)] {
        let mut r = Readahead::default();
        r.read(0, len, 0);
        r.read(at, len, 0);
        assert_eq!(spans(&r).len() == 1, near, "{at}");
        let mut r = Readahead::default();
        r.read(at, len, 0);
        r.read(0, len, 0);
        assert_eq!(spans(&r).len() == 1, near, "{at} backwards");
    }
}

/// How a stream begins, is given up and begins again.
#[test]
fn a_stream_is_two_reads_in_its_direction_and_ten_after_one_in_vain() {
    let play = |r: &mut Readahead, reads: &[(u64, usize, usize)]| -> Vec<bool> {
        let one = |(i, brought, wanted): &(u64, usize, usize)| {
            r.read((1000 + i) * STEP, STEP as usize, *brought);
            (0..*wanted).for_each(|_| r.wanted(Some((1000 + i) * STEP)));
            only(r).is_some()
        };
        reads.iter().map(one).collect()
    };
    // A turn counts as the first read in the other direction.
    let turns = [(0, 0, 0), (1, 0, 0), (0, 0, 0), (1, 0, 0), (2, 0, 0)];
    assert_eq!(play(&mut Readahead::default(), &turns), [false, false, false, false, true]);
    // Half of what came was wanted, or less.
    for (wanted, in_vain) in [(2, false), (1, true)] {
        let mut r = Readahead::default();
        let start = play(&mut r, &[(0, 0, 0), (1, 4, wanted), (2, 0, 0)]);
        assert_eq!(start, [false, false, !in_vain], "{wanted} of 4");
        let next: Vec<_> = (3..=12).map(|i| (i, 0, 0)).collect();
        let goes_on = play(&mut r, &next);
        assert_eq!(goes_on.iter().position(|on| *on), Some(if in_vain { 9 } else { 0 }), "{wanted} of 4");
        assert_eq!(
            (r.reads, r.brought),
            (if in_vain { 2 } else { 1 }, 0),
            "besides the first read, only one in vain counts for the window"
        );
    }
    // After a range that could not be read, a stream begins anew.
    let mut r = Readahead::default();
    play(&mut r, &[(0, 0, 0), (1, 0, 0), (2, 0, 0)]);
    let stream = r.ahead().next().unwrap().stream;
    r.read_ahead(stream, 1003 * STEP, STREAM_BYTES, 0);
    assert_eq!(play(&mut r, &[(5, 0, 0), (6, 0, 0)]), [false, true]);
}

/// A turn does not shorten the time for which a stream that was read in vain does not count.
#[test]
fn what_was_in_vain_is_none_for_a_while_in_either_direction() {
    let mut r = Readahead::default();
    let mut read = |i: u64, brought| {
        r.read(i * STEP, STEP as usize, brought);
        r.ahead().count()
    };
    [(100, 0), (101, 0), (102, 9)].into_iter().for_each(|(i, brought)| _ = read(i, brought));
    // None of the nine is wanted, so read 103 counts as in vain; then the direction turns.
    let streams = (0..13).map(|i| read(103 - i, 0)).collect::<Vec<_>>();
    assert_eq!(streams.iter().position(|n| *n > 0), Some(10), "{streams:?}");
}

/// A single object that came along in eight reads, and was wanted, is more than half of what came.
#[test]
fn a_single_object_that_was_wanted_widens_the_window() {
    let mut r = Readahead::default();
    r.wanted(None);
    (1..=u64::from(EPOCH)).for_each(|i| r.read(i << 24, 4096, usize::from(i == 1)));
    assert_eq!(r.window(), MOST);
}

/// A range that was read ahead does not count for a stream that has turned meanwhile, and never moves a front back.
#[test]
fn what_is_read_ahead_too_late_changes_nothing() {
    for backwards in [false, true] {
        let mut r = Readahead::default();
        let at = |i: u64| if backwards { (1000 - i) * STEP } else { (1000 + i) * STEP };
        (0..3).for_each(|i| r.read(at(i), STEP as usize, 0));
        let (stream, before) = (r.ahead().next().unwrap().stream, only(&r));
        r.read_ahead(stream, at(0), STEP as usize, 5);
        assert_eq!(only(&r), before, "behind the front: backwards {backwards}");
        (0..5).for_each(|_| r.wanted(Some(at(0))));
        r.read(at(1), STEP as usize, 2);
        r.read_ahead(stream, at(3), STEP as usize, 9);
        let s = r.streams.iter().find(|s| s.number == stream).unwrap();
        assert_eq!((s.run, s.stock, s.from), (1, 2, at(1)), "turned: backwards {backwards}");
    }
}

/// The numbers of streams wrap around, and skip 0, which means none.
#[test]
fn no_stream_has_the_number_of_none() {
    let mut r = Readahead { numbers: u32::MAX, ..Readahead::default() };
    (0..3).for_each(|i| r.read(i * STEP, STEP as usize, 0));
    assert_eq!(only(&r), Some((3 * STEP, STREAM_BYTES, false)));
}

/// Reading ahead counts as use of a stream, as the stream's own faults may find everything in the pool.
#[test]
fn a_stream_that_is_read_ahead_is_not_idle() {
    let mut r = Readahead::default();
    let random = |r: &mut Readahead| r.read((u64::from(r.clock) + 1) << 24 | 1 << 50, 4096, 0);
    (0..3).for_each(|i| r.read(i * STEP, STEP as usize, 0));
    for _ in 0..4 {
        (0..40).for_each(|_| random(&mut r));
        let ahead = r.ahead().next().expect("it goes on");
        r.read_ahead(ahead.stream, ahead.from, ahead.len, 7);
        (0..7).for_each(|_| r.wanted(Some(ahead.from)));
    }
}

/// A read that is no stream makes room first, or a stream that had none of the last 64 reads; if there is neither, the
/// stream idle for longest.
#[test]
fn a_stream_makes_room_when_it_is_idle() {
    let random = |r: &mut Readahead| r.read((u64::from(r.clock) + 1) << 24 | 1 << 50, 4096, 0);
    let stream = |r: &mut Readahead, at: u64| (0..3).for_each(|i| r.read(at + i * STEP, STEP as usize, 0));
    let mut r = Readahead::default();
    stream(&mut r, 1 << 40);
    (0..64).for_each(|_| random(&mut r));
    assert_eq!(r.ahead().count(), 1);
    random(&mut r);
    assert_eq!(r.ahead().count(), 0);
    // Sixteen streams, and one more read.
    let mut r = Readahead::default();
    (1..=16).for_each(|i| stream(&mut r, i << 40));
    assert_eq!(r.ahead().count(), 16);
    random(&mut r);
    let left: Vec<u64> = r.ahead().map(|a| a.from >> 40).collect();
    assert!(left.len() == 15 && !left.contains(&1), "the one idle for longest goes: {left:?}");
    random(&mut r);
    assert_eq!(r.ahead().count(), 15, "what is no stream makes room");
}

/// A window exactly as large as the most that may be read is used in full.
#[test]
fn a_window_may_be_as_large_as_the_most() {
    let r = Readahead::default();
    assert_eq!(r.range(20 << 10, 4096, 32 << 10), (0, 32 << 10));
    assert_eq!(r.range(20 << 10, 4096, 28 << 10), (20 << 10, 12 << 10));
    assert_eq!(r.range(0, 4096, 28 << 10), (0, 28 << 10), "no more of the window than may be read");
}

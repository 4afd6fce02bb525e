//! Swap-file readahead: how much is read around the object that a fault wants, and ahead of it.
//!
//! Objects written together tend to be wanted together, as neighbours in the file left the program one after the other,
//! and a disk takes little longer for 64 KiB than for 4. But an object that nobody wants takes room in the pool from
//! one that somebody does, and is written a second time when it leaves. So the window of a read that is near no other
//! depends on what became of the objects that such reads brought along:
//!
//! ```text
//! epoch of 8 reads ─┬─ half of what came along was wanted: twice as much
//!                   ├─ less than a quarter was: half as much
//!                   └─ otherwise as before
//! ```
//! With the smallest window hardly anything comes along, and only reads near each other bring more than they need: a
//! read that follows two others has the widest window.
//!
//! Three reads that follow each other in one direction are a *stream*: the next range in that direction is then read
//! ahead of all faults, so that the disk works while the program does. Several streams exist at once, as several
//! threads read or one walks several arrays; random reads in between disturb none. A stream never has more in *stock*
//! (objects brought ahead and not wanted yet) than its last two ranges brought. So a program that turns elsewhere has
//! had that much read in vain, once.
//!
//! A stream ends when a range brings nothing. It also ends at a fault while half of what was brought last is still in
//! stock: either this is not what the program wants, or memory is so short that it left again before it was wanted.
//!
//! Ownership: one owner, `&mut self` (the pager's lock).

use crate::swapfile::BLOCK;

/// The window in bytes: the largest, the first, and the smallest, which is no more than the object's own blocks.
pub const MOST: usize = 64 << 10;
const FIRST: usize = 32 << 10;
const LEAST: usize = BLOCK;
/// Reads after which the window is reconsidered.
const EPOCH: u32 = 8;
/// Reads in one direction, after the first, that make a stream.
const STREAM: i32 = 2;
/// After a read ahead in vain, this many reads do not make a stream.
const IN_VAIN: i32 = 8;
/// Bytes that a stream reads ahead at a time; by then a disk has done most of what a read costs. This holds three
/// objects of the largest size (64 KiB that did not compress, with their headers), as many as a cluster of the smallest
/// size. (At 128 KiB nearly half was not read, as two such objects are a little more.)
pub const STREAM_BYTES: usize = 208 << 10;
/// Two reads are near each other if no more bytes than this are between them.
const NEAR: u64 = 16 << 10;
/// How many streams, and reads that may become one, are remembered.
const STREAMS: usize = 16;
/// A stream that had none of this many reads may be forgotten for a read that is no stream yet.
const IDLE: u32 = 64;

/// Reads that follow each other.
#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    /// Its number; 0 for none.
    number: u32,
    backwards: bool,
    /// Reads in a row that followed the one before in this direction. Negative while reads must not count yet.
    run: i32,
    /// Where the last read began and ended, including what was read ahead behind it.
    from: u64,
    to: u64,
    /// Objects that came along or ahead and were not wanted yet, and how many came with the last range.
    stock: usize,
    batch: usize,
    /// The clock at its last read.
    used: u32,
}

impl Stream {
    fn is_near(&self, at: u64, end: u64) -> bool {
        self.number != 0 && at <= self.to.saturating_add(NEAR) && end.saturating_add(NEAR) >= self.from
    }

    /// Whether an object at a byte offset came along or ahead in this stream.
    fn has_passed(&self, at: u64) -> bool {
        let reach = 3 * STREAM_BYTES as u64;
        match self.backwards {
            false => at < self.to && at + reach >= self.to,
            true => at >= self.from && at < self.from + reach,
        }
    }
}

/// Where a stream continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ahead {
    /// Number of the stream.
    pub stream: u32,
    /// Where the range to read begins or, if it is read backwards, ends.
    pub from: u64,
    /// Bytes to read at once.
    pub len: usize,
    /// Whether the stream runs towards the start of the file.
    pub backwards: bool,
}

/// The window and the streams, with what they are derived from.
#[derive(Debug)]
pub struct Readahead {
    window: usize,
    /// Counts of this epoch: reads near no other, objects that came along with them, and objects of this kind that were
    /// wanted (which may have come in an earlier epoch).
    reads: u32,
    brought: u32,
    wanted: u32,
    streams: [Stream; STREAMS],
    /// Number of reads so far, and of streams.
    clock: u32,
    numbers: u32,
}

impl Default for Readahead {
    fn default() -> Self {
        Self { window: FIRST, reads: 0, brought: 0, wanted: 0, streams: Default::default(), clock: 0, numbers: 0 }
    }
}

impl Readahead {
    /// The range to read for an object of `len` bytes at `at`: whole blocks, at least the object's own, within one
    /// cluster and at most `most` bytes.
    pub fn range(&self, at: u64, len: usize, cluster_bytes: usize, most: usize) -> (u64, usize) {
        let run = self.near(at, at + len as u64).map(|i| self.streams[i].run);
        let window = match run {
            None | Some(..1) => self.window,
            Some(_) => MOST,
        } as u64;
        let block = BLOCK as u64;
        let (own, own_end) = (at / block * block, (at + len as u64).next_multiple_of(block));
        let cluster = at / cluster_bytes as u64 * cluster_bytes as u64;
        let from = (own / window * window).max(cluster);
        let to = own_end.max(from + window).min(cluster + cluster_bytes as u64);
        let from = if to - from > most as u64 { own } else { from };
        (from, (to - from).min(most as u64) as usize)
    }

    /// The stream that a read is near; of several, the one used last.
    fn near(&self, at: u64, end: u64) -> Option<usize> {
        let near = self.streams.iter().enumerate().filter(|(_, s)| s.is_near(at, end));
        near.min_by_key(|(_, s)| self.clock.wrapping_sub(s.used)).map(|(i, _)| i)
    }

    /// Notes a read of a range. `brought` objects came along with the one that was wanted.
    pub fn read(&mut self, at: u64, len: usize, brought: usize) {
        let end = at + len as u64;
        self.clock = self.clock.wrapping_add(1);
        match self.near(at, end) {
            Some(i) => {
                let s = &mut self.streams[i];
                let backwards = at < s.from;
                let turned = s.run > 0 && backwards != s.backwards;
                let in_vain = s.run > 0 && s.stock * 2 > s.batch;
                s.run = match (turned, in_vain) {
                    (_, true) => -IN_VAIN,
                    (true, _) => 1,
                    _ => s.run + 1,
                };
                s.backwards = backwards;
                (s.from, s.to, s.used) = (at, end, self.clock);
                (s.stock, s.batch) = (brought, brought);
                if in_vain {
                    self.think_over(brought);
                }
            }
            None => {
                self.begin(at, end, brought);
                self.think_over(brought);
            }
        }
    }

    /// Remembers a read near no other as the possible start of a stream. It replaces an unused entry, else one that is
    /// no stream or a stream idle for long, else the one idle for longest.
    fn begin(&mut self, from: u64, to: u64, brought: usize) {
        let clock = self.clock;
        let idle = |s: &Stream| clock.wrapping_sub(s.used);
        let spare = |s: &Stream| s.number == 0 || s.run < STREAM || idle(s) > IDLE;
        let gone = (0..STREAMS).max_by_key(|i| {
            let s = &self.streams[*i];
            (s.number == 0, spare(s), idle(s))
        });
        self.numbers = self.numbers.wrapping_add(1).max(1);
        let new =
            Stream { number: self.numbers, from, to, stock: brought, batch: brought, used: clock, ..Stream::default() };
        self.streams[gone.unwrap_or(0)] = new;
    }

    /// Reconsiders the window by what became of the objects that came along.
    fn think_over(&mut self, brought: usize) {
        self.reads += 1;
        self.brought += brought as u32;
        if self.reads < EPOCH {
            return;
        }
        if self.brought > 0 && self.wanted * 2 >= self.brought {
            self.window = (self.window * 2).min(MOST);
        } else if self.wanted * 4 < self.brought {
            self.window = (self.window / 2).max(LEAST);
        }
        (self.reads, self.brought, self.wanted) = (0, 0, 0);
    }

    /// An object that came along or ahead was wanted. `at` is its offset in the file, if that is still known.
    pub fn wanted(&mut self, at: Option<u64>) {
        let streams = self.streams.iter_mut().filter(|s| s.number != 0 && s.run > 0 && s.stock > 0);
        let of = match at {
            Some(at) => streams.filter(|s| s.has_passed(at)).max_by_key(|s| s.run),
            None => streams.max_by_key(|s| s.stock),
        };
        match of {
            Some(stream) => stream.stock -= 1,
            None => self.wanted += 1,
        }
    }

    /// Where the streams continue, except for those with more in stock than is used soon.
    pub fn ahead(&self) -> impl Iterator<Item = Ahead> + '_ {
        let goes_on = |s: &&Stream| s.number != 0 && s.run >= STREAM && s.stock <= s.batch;
        self.streams.iter().filter(goes_on).map(|s| Ahead {
            stream: s.number,
            from: if s.backwards { s.from } else { s.to },
            len: STREAM_BYTES,
            backwards: s.backwards,
        })
    }

    /// A range was read ahead in a stream and brought `brought` objects; 0 if it could not be read.
    pub fn read_ahead(&mut self, stream: u32, at: u64, len: usize, brought: usize) {
        let Some(s) = self.streams.iter_mut().find(|s| s.number == stream && s.run >= STREAM) else { return };
        if brought == 0 {
            s.run = 0;
        }
        match s.backwards {
            false => s.to = s.to.max(at + len as u64),
            true => s.from = s.from.min(at),
        }
        (s.stock, s.batch, s.used) = (s.stock + brought, brought, self.clock);
    }

    /// Bytes that are now read around an object that is near no other read.
    pub fn window(&self) -> usize {
        self.window
    }
}

#[cfg(test)]
mod tests {
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

    /// Reads near each other bring what is around them, whatever reads at random have made of the window.
    #[test]
    fn reads_near_each_other_have_a_window_of_their_own() {
        let mut r = Readahead::default();
        (1..200u64).for_each(|i| r.read(i << 24, 4096, 7));
        let len = |r: &Readahead, at| r.range(at, 4096, CLUSTER, 128 << 10).1;
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
                "what streams bring says nothing of the window, but for the first read, which was none yet"
            );
            // Nothing there ends it.
            r.read_ahead(stream, front, STREAM_BYTES, 0);
            (0..100).for_each(|_| r.wanted(Some(front)));
            assert_eq!(only(&r), None);
        }
    }

    /// Several at once, one of them backwards, and between any two of their reads some at random.
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
        // What only some of them use goes on only there.
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
        // A stream that nobody reads any more makes room in the end.
        (1..200u64).for_each(|i| r.read(i << 26 | 1 << 46, 4096, 0));
        assert_eq!(r.ahead().count(), 0);
    }

    /// What is read ahead goes again before it is wanted, as memory is too short: no more than is needed is read then.
    #[test]
    fn a_stream_that_brings_what_is_not_used_ends() {
        let mut r = Readahead::default();
        let mut bytes = 0;
        for i in 0..200u64 {
            let (at, len) = r.range(i * 4160, 4160, CLUSTER, 128 << 10);
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
                    let (from, n) = r.range(at, len, CLUSTER, 128 << 10);
                    assert!(from % BLOCK as u64 == 0 && n % BLOCK == 0 && n <= 128 << 10);
                    assert!(from <= at && at + len as u64 <= from + n as u64, "{at} {len}: {from} {n}");
                    assert!(from >= cluster && from + n as u64 <= cluster + CLUSTER as u64);
                }
            }
        }
    }

    /// An epoch is of 8 reads, and each is weighed by itself.
    #[test]
    fn the_window_changes_by_what_was_wanted_of_an_epoch() {
        let epoch = |r: &mut Readahead, brought: usize, wanted: u32| {
            let before = r.window();
            for i in 0..u64::from(EPOCH) {
                assert_eq!(r.window(), before, "read {i}");
                // (What is wanted may come before the last read of the epoch, or in the midst of it.)
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

    /// What came along or ahead in a stream is behind its front, and not further than it may be in stock: in both directions.
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
        // And what is wanted is booked there, in that of two streams that has gone on longer; where nothing is known of it, in the one
        // that has most in stock.
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
        assert_eq!([Some(front), Some(front)].map(stocks), [[0, 7, 0]; 2], "the last was nobody's");
        assert_eq!(r.wanted, 1);
    }

    /// Reads are near each other with up to 16 KiB between them; of two streams the one goes on that was used last.
    #[test]
    fn a_read_between_two_goes_on_with_the_later_one() {
        let mut r = Readahead::default();
        let (len, far) = (4096, (16 << 10) + 4096 + (16 << 10));
        r.read(0, len, 0);
        r.read(4096 + far, len, 0);
        let spans = |r: &Readahead| {
            let mut all: Vec<_> =
                r.streams.iter().filter(|s| s.number != 0).map(|s| (s.number, s.from, s.run)).collect();
            all.sort_unstable();
            all
        };
        assert_eq!(spans(&r), [(1, 0, 0), (2, 4096 + far, 0)]);
        let between = 4096 + (16 << 10);
        r.read(between, len, 0);
        assert_eq!(spans(&r), [(1, 0, 0), (2, between, 1)], "near both");
        assert_eq!(
            r.range(between - (16 << 10) - 4096, len, CLUSTER, 128 << 10).1,
            MOST,
            "what ends near one is near it"
        );
        // The same once more is a read onwards.
        let mut again = Readahead::default();
        (0..3).for_each(|_| again.read(1 << 20, len, 0));
        assert_eq!(only(&again), Some(((1 << 20) + 4096, STREAM_BYTES, false)));
        // One that is a byte too far away is another.
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
        // Turned after one read, it is that one read in the other direction.
        let turns = [(0, 0, 0), (1, 0, 0), (0, 0, 0), (1, 0, 0), (2, 0, 0)];
        assert_eq!(play(&mut Readahead::default(), &turns), [false, false, false, false, true]);
        // Half of what came was wanted, or a bit less.
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
                "only what was in vain says something of the window"
            );
        }
        // Where nothing could be read ahead it has to begin anew.
        let mut r = Readahead::default();
        play(&mut r, &[(0, 0, 0), (1, 0, 0), (2, 0, 0)]);
        let stream = r.ahead().next().unwrap().stream;
        r.read_ahead(stream, 1003 * STEP, STREAM_BYTES, 0);
        assert_eq!(play(&mut r, &[(5, 0, 0), (6, 0, 0)]), [false, true]);
    }

    /// What is no stream goes first, and a stream when it has had none of the last 64 reads; or all are streams.
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
        // Sixteen at once, and one more read.
        let mut r = Readahead::default();
        (1..=16).for_each(|i| stream(&mut r, i << 40));
        assert_eq!(r.ahead().count(), 16);
        random(&mut r);
        let left: Vec<u64> = r.ahead().map(|a| a.from >> 40).collect();
        assert!(left.len() == 15 && !left.contains(&1), "the one longest idle: {left:?}");
        random(&mut r);
        assert_eq!(r.ahead().count(), 15, "what is no stream goes");
    }

    /// What may be read at most is not less than a window that is as large.
    #[test]
    fn a_window_may_be_as_large_as_the_most() {
        let r = Readahead::default();
        assert_eq!(r.range(20 << 10, 4096, CLUSTER, 32 << 10), (0, 32 << 10));
        assert_eq!(r.range(20 << 10, 4096, CLUSTER, 28 << 10), (20 << 10, 12 << 10));
    }
}

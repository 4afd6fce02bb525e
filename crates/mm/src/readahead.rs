//! How much is read from the swap file around the object that is wanted, and ahead of it.
//!
//! What was written together tends to be wanted together: neighbours in the file left the program one after the other. A
//! disk takes little longer for 64 KiB than for 4. But what nobody wants takes room in the pool from what somebody does,
//! and is written a second time when it leaves. So the window of a read that is near no other follows what became of what
//! such reads brought:
//!
//! ```text
//! epoch of 8 reads ─┬─ half of what came along was wanted: twice as much
//!                   ├─ less than a quarter was: half as much
//!                   └─ otherwise as before
//! ```
//! With the smallest window hardly anything comes along, and only reads near each other bring more than they need: one that
//! follows two others has the widest window. Three that follow each other in one
//! direction are a *stream*: then the next range in that direction is read ahead of all faults, so that the
//! disk works while the program does. There are several at once, as several threads read, or one walks several arrays;
//! what is read at random between them disturbs none. Of each there is never more in *stock* (brought ahead, and
//! not wanted yet) than the last two ranges brought, so a program that turns elsewhere has had that much read in vain, once;
//! and a range that brings nothing ends the stream. So does a fault while half of what was brought last is in stock: either
//! it is not what is wanted, or memory is so short that it has gone again before it was.
//!
//! Ownership: one owner, `&mut self` (the pager's lock).

use crate::swapfile::BLOCK;

/// Largest window (bytes), what it is at first, and the smallest: no more than the object's own blocks.
pub const MOST: usize = 64 << 10;
const FIRST: usize = 32 << 10;
const LEAST: usize = BLOCK;
/// Reads after which the window is thought over.
const EPOCH: u32 = 8;
/// Reads in one direction, after the first, from which on they are a stream.
const STREAM: i32 = 2;
/// Reads after one that was in vain for which it is none.
const IN_VAIN: i32 = 8;
/// Bytes read ahead in a stream at once: a disk has done most of what a read costs by then. Three objects of the largest size, of which
/// a cluster of the least size has as many: 64 KiB that did not compress, with what they are known by. (Of 128 KiB nearly half was not
/// read, as two of them are a little more.)
pub const STREAM_BYTES: usize = 208 << 10;
/// A read is near another when no more bytes are between them.
const NEAR: u64 = 16 << 10;
/// Streams, and reads that may become one, that are remembered.
const STREAMS: usize = 16;
/// Reads after which a stream that had none of them may be forgotten for one that is no stream yet.
const IDLE: u32 = 64;

/// Reads that follow each other.
#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    /// Its number; 0 for none.
    number: u32,
    backwards: bool,
    /// Reads in a row that followed the one before in this direction; negative when they are not to count yet.
    run: i32,
    /// Where the last read began and ended, with what was read ahead behind it.
    from: u64,
    to: u64,
    /// Objects that came along or ahead in it and were not wanted yet, and those of the last range.
    stock: usize,
    batch: usize,
    /// When it had its last read.
    used: u32,
}

impl Stream {
    fn is_near(&self, at: u64, end: u64) -> bool {
        self.number != 0 && at <= self.to.saturating_add(NEAR) && end.saturating_add(NEAR) >= self.from
    }

    /// Whether what is at a byte came along or ahead in it.
    fn has_passed(&self, at: u64) -> bool {
        let reach = 3 * STREAM_BYTES as u64;
        match self.backwards {
            false => at < self.to && at + reach >= self.to,
            true => at >= self.from && at < self.from + reach,
        }
    }
}

/// Where a stream goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ahead {
    /// Which stream it is.
    pub stream: u32,
    /// What is read begins here; backwards, it ends here.
    pub from: u64,
    /// Bytes to be read at once.
    pub len: usize,
    /// Towards the start of the file.
    pub backwards: bool,
}

/// The window, the streams, and what they go by.
#[derive(Debug)]
pub struct Readahead {
    window: usize,
    /// Since the epoch began: reads near no other, objects that came along with them, and those that were wanted
    /// (which may have come in an earlier epoch).
    reads: u32,
    brought: u32,
    wanted: u32,
    streams: [Stream; STREAMS],
    /// Reads so far, and streams.
    clock: u32,
    numbers: u32,
}

impl Default for Readahead {
    fn default() -> Self {
        Self { window: FIRST, reads: 0, brought: 0, wanted: 0, streams: Default::default(), clock: 0, numbers: 0 }
    }
}

impl Readahead {
    /// The range to read for an object of `len` bytes at `at`: whole blocks, at least the object's own, in one cluster and
    /// of at most `most` bytes.
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

    /// The stream that a read is near: of several the one last used.
    fn near(&self, at: u64, end: u64) -> Option<usize> {
        let near = self.streams.iter().enumerate().filter(|(_, s)| s.is_near(at, end));
        near.min_by_key(|(_, s)| self.clock.wrapping_sub(s.used)).map(|(i, _)| i)
    }

    /// A range was read and `brought` objects came along with the one that was wanted.
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

    /// A read near no other may be the first of a stream. It takes the place of what is none, or of a stream long idle, or
    /// of that which is longest so.
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

    /// The window follows what became of what came along.
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

    /// An object that came along or ahead was wanted; `at` is its place in the file, if that is known still.
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

    /// Where the streams go on, of which no more is in stock than is used soon.
    pub fn ahead(&self) -> impl Iterator<Item = Ahead> + '_ {
        let goes_on = |s: &&Stream| s.number != 0 && s.run >= STREAM && s.stock <= s.batch;
        self.streams.iter().filter(goes_on).map(|s| Ahead {
            stream: s.number,
            from: if s.backwards { s.from } else { s.to },
            len: STREAM_BYTES,
            backwards: s.backwards,
        })
    }

    /// A range was read ahead in a stream and brought so many objects; none if it could not be read.
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

    /// Bytes read around an object that is near no other read now.
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
}

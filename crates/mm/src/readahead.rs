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

use crate::swapfile::{BLOCK, LEAST_CLUSTER};

/// The window in bytes: the largest, the first, and the smallest, which is no more than the object's own blocks.
pub const MOST: usize = 64 << 10;
const FIRST: usize = 32 << 10;
const LEAST: usize = BLOCK;
// Windows are aligned powers of two between LEAST and MOST, so none crosses the end of a cluster.
const _: () = assert!(LEAST_CLUSTER.is_multiple_of(MOST));
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
        self.number != 0 && at <= self.to + NEAR && end + NEAR >= self.from
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
    pub fn range(&self, at: u64, len: usize, most: usize) -> (u64, usize) {
        let run = self.near(at, at + len as u64).map(|i| self.streams[i].run);
        let window = match run {
            None | Some(..1) => self.window,
            Some(_) => MOST,
        } as u64;
        let block = BLOCK as u64;
        let (own, own_end) = (at / block * block, (at + len as u64).next_multiple_of(block));
        let from = own / window * window;
        let to = own_end.max(from + window);
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
        let spare = |s: &Stream| s.run < STREAM || idle(s) > IDLE;
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
        let streams = self.streams.iter_mut().filter(|s| s.run > 0 && s.stock > 0);
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
        let goes_on = |s: &&Stream| s.run >= STREAM && s.stock <= s.batch;
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
mod tests;

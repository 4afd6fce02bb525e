//! How much is read from the swap file around the object that is wanted.
//!
//! What was written together tends to be wanted together: neighbours in the file left the program one after the other. A
//! disk takes little longer for 64 KiB than for 4. But what nobody wants takes room in the pool from what somebody does,
//! and is written a second time when it leaves. So the window follows what became of what was brought:
//!
//! ```text
//! epoch of 8 reads ─┬─ half of what came along was wanted, or half of the reads were near the one before: twice as much
//!                   ├─ less than a quarter was: half as much
//!                   └─ otherwise as before
//! ```
//! With the smallest window hardly anything comes along, and only reads near each other make it grow again.
//!
//! Reads that follow each other in the file are a *stream*: then the next range is read ahead of all faults, so that the
//! disk works while the program does. There is never more in *stock* (brought ahead, and not wanted yet) than the last two
//! ranges brought, so a program that turns elsewhere has had that much read in vain, once; and a range that
//! brings nothing ends the stream, as does a read elsewhere.
//!
//! Ownership: one owner, `&mut self` (the pager's lock).

use crate::swapfile::BLOCK;

/// Largest window (bytes), what it is at first, and the smallest: no more than the object's own blocks.
pub const MOST: usize = 64 << 10;
const FIRST: usize = 32 << 10;
const LEAST: usize = BLOCK;
/// Reads after which the window is thought over.
const EPOCH: u32 = 8;
/// Reads that follow each other from which on they are a stream.
const STREAM: u32 = 2;
/// Bytes read ahead in a stream at once: a disk has done most of what a read costs by then.
const STREAM_BYTES: usize = 128 << 10;
/// A read is near the one before when no more bytes are between them.
const NEAR: u64 = 16 << 10;

/// The window, and what it goes by.
#[derive(Debug)]
pub struct Readahead {
    window: usize,
    /// Since the epoch began: reads, those near the one before, objects that came along, and those that were wanted
    /// (which may have come in an earlier epoch).
    reads: u32,
    near: u32,
    brought: u32,
    wanted: u32,
    /// Where the last read began and ended.
    last: (u64, u64),
    /// Reads in a row that followed the one before.
    run: u32,
    /// Where the stream has come to.
    end: u64,
    /// Objects that came along or ahead in it and were not wanted yet, and those of the last range.
    stock: usize,
    batch: usize,
}

impl Default for Readahead {
    fn default() -> Self {
        Self {
            window: FIRST,
            reads: 0,
            near: 0,
            brought: 0,
            wanted: 0,
            last: (u64::MAX, u64::MAX),
            run: 0,
            end: 0,
            stock: 0,
            batch: 0,
        }
    }
}

impl Readahead {
    /// The range to read for an object of `len` bytes at `at`: whole blocks, at least the object's own, in one cluster and
    /// of at most `most` bytes.
    pub fn range(&self, at: u64, len: usize, cluster_bytes: usize, most: usize) -> (u64, usize) {
        let (block, window) = (BLOCK as u64, self.window as u64);
        let (own, own_end) = (at / block * block, (at + len as u64).next_multiple_of(block));
        let cluster = at / cluster_bytes as u64 * cluster_bytes as u64;
        let from = (own / window * window).max(cluster);
        let to = own_end.max(from + window).min(cluster + cluster_bytes as u64);
        let from = if to - from > most as u64 { own } else { from };
        (from, (to - from).min(most as u64) as usize)
    }

    /// A range was read and `brought` objects came along with the one that was wanted.
    pub fn read(&mut self, at: u64, len: usize, brought: usize) {
        let (start, end) = self.last;
        let near = start != u64::MAX && at <= end.saturating_add(NEAR) && at + len as u64 + NEAR >= start;
        let follows = near && at >= start;
        self.run = if follows { self.run + 1 } else { 0 };
        (self.end, self.stock, self.batch) = (at + len as u64, brought, brought);
        self.last = (at, at + len as u64);
        self.reads += 1;
        self.near += u32::from(near);
        self.brought += brought as u32;
        if self.reads < EPOCH {
            return;
        }
        if self.near * 2 >= self.reads || (self.brought > 0 && self.wanted * 2 >= self.brought) {
            self.window = (self.window * 2).min(MOST);
        } else if self.wanted * 4 < self.brought {
            self.window = (self.window / 2).max(LEAST);
        }
        (self.reads, self.near, self.brought, self.wanted) = (0, 0, 0, 0);
    }

    /// An object that came along or ahead was wanted.
    pub fn wanted(&mut self) {
        self.wanted += 1;
        self.stock = self.stock.saturating_sub(1);
    }

    /// What is to be read ahead, where reads under way reach to `under_way`: from where on and how many bytes.
    pub fn ahead(&self, under_way: u64) -> Option<(u64, usize)> {
        let goes_on = self.run >= STREAM && self.stock <= self.batch;
        goes_on.then(|| (self.end.max(under_way), STREAM_BYTES))
    }

    /// A range was read ahead and brought so many objects.
    pub fn read_ahead(&mut self, at: u64, len: usize, brought: usize) {
        if self.run < STREAM {
            return;
        }
        if brought == 0 {
            self.run = 0;
        }
        self.end = self.end.max(at + len as u64);
        self.last = (self.last.0, self.end);
        (self.stock, self.batch) = (self.stock + brought, brought);
    }

    /// Bytes read around an object now.
    pub fn window(&self) -> usize {
        self.window
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: usize = 256 << 10;

    #[test]
    fn what_is_wanted_widens_it_and_what_is_not_narrows_it() {
        let mut r = Readahead::default();
        let far = |i: u64| i * (10 << 20);
        for i in 0..64 {
            r.read(far(i), r.window, 7);
        }
        assert_eq!(r.window(), LEAST, "nothing that came along was wanted");
        for i in 0..64 {
            r.read(far(i), r.window, 0);
        }
        assert_eq!(r.window(), LEAST, "and nothing comes along any more");
        for i in 0..64 {
            r.read(i * 4096, r.window, 0);
        }
        assert_eq!(r.window(), MOST, "reads in a row");
        for i in 0..64 {
            (0..7).for_each(|_| r.wanted());
            r.read(far(i), r.window, 14);
        }
        assert_eq!(r.window(), MOST, "half of it wanted");
        for i in 0..EPOCH {
            (0..4).for_each(|_| r.wanted());
            r.read(far(u64::from(i)), r.window, 14);
        }
        assert_eq!(r.window(), MOST, "less than half, and more than a quarter: as it was");
    }

    #[test]
    fn a_stream_is_read_ahead_as_fast_as_it_is_used() {
        let mut r = Readahead::default();
        let far = 64 << 20;
        let step = 64 << 10;
        for i in 0..2 {
            r.read(far + i * step, step as usize, 7);
            assert_eq!(r.ahead(0), None, "no stream yet");
        }
        r.read(far + 2 * step, step as usize, 7);
        let mut end = far + 3 * step;
        assert_eq!(r.ahead(0), Some((end, STREAM_BYTES)));
        // (What is under way is not asked for again.)
        assert_eq!(r.ahead(end + 5), Some((end + 5, STREAM_BYTES)));
        for _ in 0..10 {
            r.read_ahead(end, STREAM_BYTES, 14);
            end += STREAM_BYTES as u64;
            assert_eq!(r.ahead(0), None, "more than a range is in stock");
            while r.ahead(0).is_none() {
                r.wanted();
            }
            assert_eq!(r.ahead(0), Some((end, STREAM_BYTES)));
        }
        // Nothing there ends it.
        let mut ended = r;
        ended.read_ahead(end, STREAM_BYTES, 0);
        (0..100).for_each(|_| ended.wanted());
        assert_eq!(ended.ahead(0), None);
    }

    #[test]
    fn a_read_elsewhere_ends_a_stream() {
        let mut r = Readahead::default();
        (0..5).for_each(|i| r.read(i << 16, 1 << 16, 1));
        assert!(r.ahead(0).is_some());
        r.read(1 << 30, 1 << 16, 1);
        assert_eq!(r.ahead(0), None);
        // Backwards is near, and no stream.
        (0..5u64).rev().for_each(|i| r.read(i << 16, 1 << 16, 1));
        assert_eq!(r.ahead(0), None);
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

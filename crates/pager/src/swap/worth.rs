//! Decides whether to make objects dense before they are written (`dense`).
//!
//! Making them dense takes the writing thread time, more of it on a busy machine, and saves bytes on disk. The price of a byte is
//! how long the thread waits for the disk because both of its buffers are being written. If it never waits the disk has time to
//! spare, and writing the same bytes sooner is worth more than writing fewer.
//!
//! ```text
//! worth while:   gained bytes × (time waited for the disk / bytes written)  ≥  time it took to gain them
//! ```
//! All are sums over recent history, so the decision follows the disk, the data and the machine's other work. While objects are
//! made dense the disk is waited for less; so for a disk that is a little too slow some of what is written is made dense. Until
//! the cost is known everything is made dense; and where it is not worthwhile something is now and then, so that the cost stays
//! known. Where room on disk is short it always is worthwhile.
//!
//! Owner: [`super::Swap`], so the pager's lock.

/// Pages made dense before the first decision; and pages after which the sums about them are halved.
const LEARN: u64 = 128;
const FORGET: u64 = 2048;
/// Bytes written after which the sums about them are halved.
const FORGET_BYTES: u64 = 32 << 20;
/// Where it is not worthwhile, one object in this many is tried all the same.
const AGAIN: u32 = 128;

/// What is known about both sides.
#[derive(Debug, Default)]
pub(super) struct Worth {
    /// Pages that were tried, the time this took (nanoseconds), and the bytes it gained.
    pages: u64,
    ns: u64,
    gained: u64,
    /// Bytes written, and the time for which the disk was waited for (nanoseconds).
    written: u64,
    waited_ns: u64,
    /// Objects for which it was not worthwhile.
    passed: u32,
}

impl Worth {
    /// Whether an object about to be written is first to be made dense.
    pub(super) fn is_dense(&mut self) -> bool {
        let (saved, spent) =
            (u128::from(self.gained) * u128::from(self.waited_ns), u128::from(self.ns) * u128::from(self.written));
        if self.pages < LEARN || (saved >= spent && saved > 0) {
            return true;
        }
        self.passed = self.passed.wrapping_add(1);
        self.passed.is_multiple_of(AGAIN)
    }

    /// Notes that trying `pages` pages took `ns` nanoseconds and gained `gained` bytes.
    pub(super) fn tried(&mut self, pages: usize, gained: usize, ns: u64) {
        if self.pages > FORGET {
            (self.pages, self.ns, self.gained) = (self.pages / 2, self.ns / 2, self.gained / 2);
        }
        self.pages += pages as u64;
        self.ns += ns;
        self.gained += gained as u64;
    }

    /// Notes that `bytes` were written, and that the thread has waited `waited_ns` nanoseconds for that, or for room for them.
    pub(super) fn wrote(&mut self, bytes: u64, waited_ns: u64) {
        if self.written > FORGET_BYTES {
            (self.written, self.waited_ns) = (self.written / 2, self.waited_ns / 2);
        }
        self.written += bytes;
        self.waited_ns += waited_ns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 600 bytes of a page are gained in 10 µs.
    fn known() -> Worth {
        let mut worth = Worth::default();
        worth.tried(LEARN as usize, 600 * LEARN as usize, 10_000 * LEARN);
        worth
    }

    #[test]
    fn a_disk_that_is_waited_for_makes_it_worth_while() {
        // Nanoseconds waited for a mebibyte: none, 1 GB/s, 50 MB/s.
        for (waited, dense) in [(0, false), (1_000_000, false), (20_000_000, true)] {
            let mut worth = known();
            (0..100).for_each(|_| worth.wrote(1 << 20, waited));
            assert_eq!(worth.is_dense(), dense, "{waited}");
            // A CPU that others want too makes it more expensive.
            (0..100).for_each(|_| worth.tried(1000, 600_000, 100_000_000));
            assert!(!worth.is_dense(), "{waited}");
        }
    }

    #[test]
    fn it_is_tried_until_it_is_known_and_now_and_then() {
        let mut worth = Worth::default();
        worth.wrote(1 << 20, 0);
        assert!((0..1000).all(|_| worth.is_dense()), "what it takes is not known");
        worth.tried(LEARN as usize, 0, 1);
        assert_eq!((0..10 * AGAIN).filter(|_| worth.is_dense()).count(), 10);
    }

    #[test]
    fn it_follows_a_disk_that_becomes_slow() {
        let mut worth = known();
        (0..1000).for_each(|_| worth.wrote(1 << 20, 0));
        assert!(!worth.is_dense());
        let slow = (1..1000).find(|_| {
            worth.wrote(1 << 20, 20_000_000);
            worth.is_dense()
        });
        assert!(slow.is_some_and(|mebibytes| mebibytes < 200), "{slow:?}");
    }
}

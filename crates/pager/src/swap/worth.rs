//! Whether it is worth while to make dense what is about to be written (`dense`).
//!
//! It takes the writing thread time, and a busy machine more of it; it saves the disk bytes. What a byte costs is seen by how long
//! the thread waits for the disk because both of its buffers are being written: where it never waits the disk has time to spare, and
//! the same bytes sooner are worth more than fewer of them.
//!
//! ```text
//! worth while:   gained bytes × (time waited for the disk / bytes written)  ≥  time it took to gain them
//! ```
//! All are sums over the last while, so it follows the disk, the data and what else the machine does: while things are made dense the
//! disk is waited for less, so that of a disk that is a little too slow some of what is written is made dense. Until it is
//! known what it takes it is done, and where it is not worth while now and then, so that this stays known.
//! Where room on disk is short it always is.
//!
//! Owner: [`super::Swap`], so the pager's lock.

/// Pages that are made dense before it is judged, and in how many the sums about them are halved.
const LEARN: u64 = 128;
const FORGET: u64 = 2048;
/// Bytes written after which the sums about them are halved.
const FORGET_BYTES: u64 = 32 << 20;
/// Of so many objects for which it is not worth while one is tried all the same.
const AGAIN: u32 = 128;

/// What is known of both.
#[derive(Debug, Default)]
pub(super) struct Worth {
    /// Pages that were tried, the time that took (nanoseconds), and the bytes it gained.
    pages: u64,
    ns: u64,
    gained: u64,
    /// Bytes that were written, and the time for which the disk was waited for (nanoseconds).
    written: u64,
    waited_ns: u64,
    /// Objects for which it was not worth while.
    passed: u32,
}

impl Worth {
    /// Whether an object that is about to be written is to be made dense first.
    pub(super) fn is_dense(&mut self) -> bool {
        let (saved, spent) =
            (u128::from(self.gained) * u128::from(self.waited_ns), u128::from(self.ns) * u128::from(self.written));
        if self.pages < LEARN || (saved >= spent && saved > 0) {
            return true;
        }
        self.passed = self.passed.wrapping_add(1);
        self.passed.is_multiple_of(AGAIN)
    }

    /// Pages were tried, which took so long (nanoseconds), and are smaller by so many bytes.
    pub(super) fn tried(&mut self, pages: usize, gained: usize, ns: u64) {
        if self.pages > FORGET {
            (self.pages, self.ns, self.gained) = (self.pages / 2, self.ns / 2, self.gained / 2);
        }
        self.pages += pages as u64;
        self.ns += ns;
        self.gained += gained as u64;
    }

    /// So many bytes were written, for which, or for room for them, the thread has waited so long (nanoseconds).
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

    /// 600 bytes of a page are gained in 10 us.
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
            // A CPU that others want makes it dearer.
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

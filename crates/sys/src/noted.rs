//! Address ranges that many threads note and one thread takes, without a lock, so that a signal handler can note.
//!
//! A counter hands out a few slots. If there were more ranges than slots, or a thread got its slot but has not filled
//! it yet, the taker is told that some are missing, and must look for itself.
//!
//! Invariant: once noting a range has begun, the next [`Noted::take`] either returns the range or reports that some are
//! missing. (A slot filled late, after a take that missed it, is found by a later take. If the slot was handed out
//! again meanwhile, the new noter finds it filled and reports missing ranges, too. Modelled with loom below.)

use core::sync::atomic::Ordering::*;
#[cfg(not(loom))]
use core::sync::atomic::{AtomicU64, AtomicUsize};
#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, AtomicUsize};

const PAGE_SHIFT: u32 = 12;
/// Bits of a slot that hold the number of pages; the others hold the first page, of 48 bits of addresses.
const LEN_BITS: u32 = 28;

/// Ranges noted since the last take.
pub struct Noted<const SLOTS: usize> {
    /// Slots handed out, plus those asked for in vain.
    next: AtomicUsize,
    /// First page and number of pages, packed; 0 if empty.
    slots: [AtomicU64; SLOTS],
}

impl<const SLOTS: usize> Default for Noted<SLOTS> {
    fn default() -> Self {
        Self { next: AtomicUsize::new(0), slots: core::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

impl<const SLOTS: usize> Noted<SLOTS> {
    /// Notes a range of `len` bytes at `start`, rounded out to whole pages.
    pub fn note(&self, start: usize, len: usize) {
        let slot = self.next.fetch_add(1, AcqRel);
        let (first, end) = (start >> PAGE_SHIFT, start.saturating_add(len).div_ceil(1 << PAGE_SHIFT));
        let (first, pages) = (first as u64, end.saturating_sub(first) as u64);
        // A range that does not fit a slot is left out, as if the slot were still to be filled.
        let Some(slot) = self.slots.get(slot) else { return };
        let fits = pages < 1 << LEN_BITS && first < 1 << (64 - LEN_BITS);
        if fits && slot.compare_exchange(0, first << LEN_BITS | pages, Release, Relaxed).is_err() {
            self.next.fetch_add(SLOTS, AcqRel);
        }
    }

    /// The caller could not act on what it took: the next take reports missing ranges.
    pub fn lose(&self) {
        self.next.fetch_add(SLOTS + 1, AcqRel);
    }

    /// Takes the ranges noted since the last call, as `(start, end)` in bytes, in any order; `None` when some are
    /// missing. Only one thread may call it at a time.
    pub fn take(&self) -> Option<Vec<(usize, usize)>> {
        let n = self.next.swap(0, AcqRel);
        let mut ranges = Vec::with_capacity(n.min(SLOTS));
        for slot in &self.slots[..n.min(SLOTS)] {
            let packed = slot.swap(0, Acquire);
            let (first, pages) = ((packed >> LEN_BITS) as usize, packed as usize & ((1 << LEN_BITS) - 1));
            if pages != 0 {
                ranges.push((first << PAGE_SHIFT, (first + pages) << PAGE_SHIFT));
            }
        }
        (ranges.len() == n).then_some(ranges)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_was_noted_is_taken_once() {
        let noted = Noted::<3>::default();
        assert_eq!(noted.take(), Some(vec![]));
        noted.note(0x7fff_ffff_e000, 0x2000);
        noted.note(0x1800, 0x1000);
        assert_eq!(noted.take(), Some(vec![(0x7fff_ffff_e000, 0x8000_0000_0000), (0x1000, 0x3000)]));
        assert_eq!(noted.take(), Some(vec![]));
    }

    #[test]
    fn who_takes_is_told_when_some_are_missing() {
        let noted = Noted::<3>::default();
        (1..=4).for_each(|i| noted.note(i << PAGE_SHIFT, 1));
        assert_eq!(noted.take(), None, "more than there are slots");
        assert_eq!(noted.take(), Some(vec![]));
        noted.lose();
        assert_eq!(noted.take(), None);
        assert_eq!(noted.take(), Some(vec![]));
        for (start, len) in [(0x1000, 1 << 40), (1 << 48, 0x1000), (usize::MAX - 1, 0x1000), (0x1000, 0)] {
            noted.note(start, len);
            assert_eq!(noted.take(), None, "{len:#x} bytes at {start:#x} cannot be said");
            assert_eq!(noted.take(), Some(vec![]));
        }
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::sync::Arc;

    /// Two threads note, and one takes meanwhile and afterwards.
    #[test]
    fn nothing_is_missing_unsaid() {
        loom::model(|| {
            let noted = Arc::new(Noted::<2>::default());
            let begun = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
            let threads = [0, 1].map(|i| {
                let (noted, begun) = (noted.clone(), begun.clone());
                loom::thread::spawn(move || {
                    begun[i].store(1, SeqCst);
                    noted.note((i + 1) << PAGE_SHIFT, 1);
                })
            });
            let during = noted.take();
            let begun = [0, 1].map(|i| begun[i].load(SeqCst) == 1);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            let after = noted.take();
            for (i, begun) in begun.into_iter().enumerate() {
                let range = ((i + 1) << PAGE_SHIFT, (i + 2) << PAGE_SHIFT);
                let said = |taken: &Option<Vec<_>>| taken.as_ref().is_none_or(|ranges| ranges.contains(&range));
                // A range whose noting had begun by then may have been missing in the first take.
                assert!(said(&after) || begun && said(&during), "{i}: {during:?}, {after:?}");
            }
        });
    }
}

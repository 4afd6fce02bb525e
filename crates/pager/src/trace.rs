//! Recording: each member of a group writes what happens to its pages to a ring of its own, which the command drains.
//!
//! The rings lie behind the group's page in the same memory object. A ring has one writer, since every event is noted under the
//! pager's lock, and one reader, the command. A record is one word (see [`uzswap_mm::trace`]). The writer stores it, then
//! advances `head`, so a member killed at any instruction leaves whole records, and the slot's next owner goes on where it
//! stopped. The writer never waits: a record that finds the ring full is counted in `lost`.
//!
//! The reader trusts nothing: members are other people's programs, and could write anything here.

use crate::group::{GroupPage, SLOTS};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use uzswap_mm::trace::{Kind, Record};
use uzswap_sys::lock;

/// How many records a ring holds: at ten million pages a second the command may still be some milliseconds late.
pub const RING_RECORDS: usize = 1 << 15;
/// The command is woken after every so many records.
const WAKE_EVERY: u64 = RING_RECORDS as u64 / 4;

/// The ring of one slot. Zero bytes are an empty ring.
#[repr(C, align(4096))]
pub struct Ring {
    /// Records written (cumulative).
    head: AtomicU64,
    /// Records read (cumulative).
    tail: AtomicU64,
    /// Records that found the ring full (cumulative).
    lost: AtomicU64,
    /// How many of those the reader knows of.
    lost_told: AtomicU64,
    /// The records; a record's place is its number modulo the ring's size.
    words: Page<[AtomicU64; RING_RECORDS]>,
}

#[repr(C, align(4096))]
struct Page<T>(T);

/// All rings, and what their owners share. Zero bytes are empty rings.
#[repr(C, align(4096))]
pub struct Rings {
    /// Bumped to wake the command (a futex word).
    pub wake: AtomicU32,
    /// Forks so far, to number them.
    forks: AtomicU64,
    rings: Page<[Ring; SLOTS]>,
}

/// Where the rings begin in the group's memory object (bytes).
pub const RINGS_AT: usize = size_of::<GroupPage>().next_multiple_of(4096);
/// Bytes of the memory object of a group that records. (A ring takes memory only when it is used.)
pub const OBJECT_BYTES: usize = RINGS_AT + size_of::<Rings>();

impl Rings {
    /// The ring of a slot.
    pub fn of(&self, slot: usize) -> &Ring {
        &self.rings.0[slot]
    }

    /// The number of a new fork.
    pub fn fork_number(&self) -> u64 {
        self.forks.fetch_add(1, Relaxed).wrapping_add(1)
    }

    /// Wakes the command.
    pub fn wake_reader(&self) {
        self.wake.fetch_add(1, Release);
        lock::futex_wake(&self.wake, 1, true);
    }
}

impl Ring {
    /// Adds a record; true when the reader should be woken.
    fn push(&self, word: u64) -> bool {
        let head = self.head.load(Relaxed);
        if head.wrapping_sub(self.tail.load(Acquire)) >= RING_RECORDS as u64 {
            self.lost.fetch_add(1, Relaxed);
            return false;
        }
        self.words.0[head as usize % RING_RECORDS].store(word, Relaxed);
        self.head.store(head.wrapping_add(1), Release);
        head.wrapping_add(1).is_multiple_of(WAKE_EVERY)
    }

    /// Appends what was written since the last call to `out`, and returns how many records were lost meanwhile. Words that are no
    /// records, and a head that is impossible, count as lost.
    pub fn drain(&self, out: &mut Vec<u64>) -> u64 {
        let (head, tail) = (self.head.load(Acquire), self.tail.load(Relaxed));
        let lost_now = self.lost.load(Relaxed);
        let mut lost = lost_now.wrapping_sub(self.lost_told.swap(lost_now, Relaxed));
        let n = head.wrapping_sub(tail);
        if n > RING_RECORDS as u64 {
            self.tail.store(head, Release);
            return lost.saturating_add(1);
        }
        for i in 0..n {
            let word = self.words.0[tail.wrapping_add(i) as usize % RING_RECORDS].load(Relaxed);
            match Record::unpack(word) {
                Some(_) => out.push(word),
                None => lost = lost.saturating_add(1),
            }
        }
        self.tail.store(head, Release);
        lost
    }
}

/// The writing end of one process.
#[derive(Clone, Copy)]
pub struct Recorder {
    rings: &'static Rings,
    ring: &'static Ring,
}

impl Recorder {
    /// Writes to a slot's ring; the slot must be the caller's own.
    pub fn new(rings: &'static Rings, slot: usize) -> Self {
        Self { rings, ring: rings.of(slot) }
    }

    /// Records an event. The caller holds the pager's lock, as a ring has one writer.
    pub fn note(&self, record: Record) {
        if self.ring.push(record.pack()) {
            self.rings.wake_reader();
        }
    }

    /// Records an event about `n` pages, in as many records as that takes.
    pub fn note_pages(&self, kind: Kind, vpn: u64, n: usize) {
        for from in (0..n).step_by(0xffff) {
            self.note(Record::pages(kind, vpn + from as u64, (n - from).min(0xffff)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn a_full_ring_loses_and_says_how_many() {
        let rings = testing::rings();
        let recorder = Recorder::new(rings, 3);
        (0..RING_RECORDS as u64 + 10).for_each(|i| recorder.note(Record::pages(Kind::Evict, i, 1)));
        let mut out = Vec::new();
        assert_eq!(rings.of(3).drain(&mut out), 10);
        assert_eq!(out.len(), RING_RECORDS);
        assert_eq!(Record::unpack(out[RING_RECORDS - 1]).unwrap().vpn, RING_RECORDS as u64 - 1);
        recorder.note_pages(Kind::Free, 7, 0x1_0000);
        out.clear();
        assert_eq!(rings.of(3).drain(&mut out), 0);
        let counts: Vec<_> = out.iter().map(|w| Record::unpack(*w).unwrap().count()).collect();
        assert_eq!(counts, [0xffff, 1]);
        assert_eq!(rings.of(4).drain(&mut out), 0, "other slots have rings of their own");
    }

    #[test]
    fn the_reader_survives_a_member_that_scribbles() {
        let rings = testing::rings();
        let (ring, recorder) = (rings.of(0), Recorder::new(rings, 0));
        recorder.note(Record::pages(Kind::Evict, 1, 1));
        ring.words.0[0].store(!0, Relaxed);
        let mut out = Vec::new();
        assert_eq!(ring.drain(&mut out), 1);
        ring.head.store(u64::MAX / 2, Relaxed);
        assert_eq!(ring.drain(&mut out), 1);
        assert!(out.is_empty());
        recorder.note(Record::pages(Kind::Evict, 2, 1));
        assert_eq!(ring.drain(&mut out), 0);
        assert_eq!(out.len(), 1);
    }

    /// A writer and a reader at once: every record arrives once and in order, or is counted as lost.
    #[test]
    fn nothing_is_read_twice_or_out_of_order() {
        const N: u64 = 400_000;
        let rings = testing::rings();
        let writer = std::thread::spawn(move || {
            let recorder = Recorder::new(rings, 0);
            (1..=N).for_each(|i| recorder.note(Record::pages(Kind::Evict, i, 1)));
        });
        let (mut last, mut seen, mut lost, mut out) = (0, 0, 0, Vec::new());
        loop {
            let done = writer.is_finished();
            out.clear();
            lost += rings.of(0).drain(&mut out);
            for word in &out {
                let at = Record::unpack(*word).unwrap().vpn;
                assert!(at > last);
                last = at;
                seen += 1;
            }
            if done {
                break;
            }
        }
        writer.join().unwrap();
        assert_eq!(seen + lost, N);
    }
}

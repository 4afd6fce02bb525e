//! The shrinker: which objects of the pool go to disk, and how many may.
//!
//! Objects stand in a list in the order they were stored. The default policy is the *second chance*: an object's
//! reference bit is set when it enters the list; the shrinker that meets a set bit clears it and rotates the object to
//! the tail, and one that meets a clear bit writes the object back. So objects age with memory pressure and with
//! nothing else. Reads from disk say that too much was written: they are counted and *consumed* when it is asked how
//! much is freeable, which is then scaled by how well the pool compresses (an object that compresses well is cheap to
//! keep and dear to read back).
//!
//! Two other policies are kept for comparison: the kernel's older one, which protects a number of objects that grows
//! with each store and load and is halved whenever it exceeds a quarter of the list, and plain first-in first-out.
//!
//! The reference bits live in the objects' headers, where whoever owns the pool sets and clears them; zero pages have no
//! object and so are in none of these counts.
//!
//! Invariant: entries are hints, as in `lru`: one whose page no longer refers to its object is stale and skipped. They
//! are pruned when they could be more than half of the list. Owner: the pager's lock.

use std::collections::VecDeque;

/// Entries from which on stale ones are worth looking for.
const LEAST_PRUNE: usize = 4096;

/// Which objects are written back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Those that memory pressure has met twice since they were stored.
    #[default]
    SecondChance,
    /// The oldest beyond a protected number that each store and load raises, and that decays.
    Decaying,
    /// The oldest.
    Fifo,
}

impl Policy {
    /// The policy of a number, as a group's page holds it; an unknown one is the default.
    pub fn from_number(n: u32) -> Self {
        match n {
            1 => Self::Decaying,
            2 => Self::Fifo,
            _ => Self::SecondChance,
        }
    }
}

/// What to do with the object met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Clear its reference bit and put it at the tail.
    Rotate,
    /// Write it back.
    WriteBack,
}

/// An entry: the object, and the first of its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// First page of the object's range.
    pub vpn: u64,
    /// The object.
    pub handle: u32,
}

type Packed = [u32; 3];

fn pack(e: Entry) -> Packed {
    [e.vpn as u32, (e.vpn >> 32) as u32, e.handle]
}

fn unpack(p: Packed) -> Entry {
    Entry { vpn: u64::from(p[0]) | u64::from(p[1]) << 32, handle: p[2] }
}

/// The list and what the policies count.
pub struct Shrinker {
    policy: Policy,
    queue: VecDeque<Packed>,
    prune_at: usize,
    /// Pages read from disk that have not been weighed yet (4 KiB pages).
    nr_disk_swapins: usize,
    /// Objects the old policy protects.
    protected: usize,
}

impl Shrinker {
    /// An empty list.
    pub fn new(policy: Policy) -> Self {
        Self { policy, queue: VecDeque::new(), prune_at: LEAST_PRUNE, nr_disk_swapins: 0, protected: 0 }
    }

    /// An object was stored, its reference bit set.
    pub fn stored(&mut self, e: Entry) {
        self.queue.push_back(pack(e));
        self.protected += 1;
        if self.protected > self.queue.len() / 4 {
            self.protected /= 2;
        }
    }

    /// An object was read from the pool, or from disk.
    pub fn loaded(&mut self) {
        self.protected = (self.protected + 1).min(self.queue.len());
    }

    /// `pages` were read from disk, readahead included.
    pub fn read_from_disk(&mut self, pages: usize) {
        self.nr_disk_swapins += pages;
    }

    /// Disk reads not weighed yet (pages).
    pub fn nr_disk_swapins(&self) -> usize {
        self.nr_disk_swapins
    }

    /// How many pages may be written back, where `stored` pages take `pool` pages of memory. Consumes the disk reads.
    pub fn freeable(&mut self, stored: usize, pool: usize) -> usize {
        let lru = match self.policy {
            Policy::SecondChance => {
                let consumed = self.nr_disk_swapins.min(stored);
                self.nr_disk_swapins -= consumed;
                stored - consumed
            }
            Policy::Decaying => stored.saturating_sub(self.protected),
            Policy::Fifo => stored,
        };
        if stored == 0 { 0 } else { (lru as u128 * pool.min(stored) as u128 / stored as u128) as usize }
    }

    /// What is to be done with an object whose reference bit is `referenced`.
    pub fn verdict(&self, referenced: bool) -> Verdict {
        match self.policy {
            Policy::SecondChance if referenced => Verdict::Rotate,
            _ => Verdict::WriteBack,
        }
    }

    /// Takes the next entry to be met.
    pub fn pop(&mut self) -> Option<Entry> {
        self.queue.pop_front().map(unpack)
    }

    /// Puts an entry at the tail.
    pub fn rotate(&mut self, e: Entry) {
        self.queue.push_back(pack(e));
    }

    /// Entries, stale ones included.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether so many entries have come since the last [`Shrinker::prune`] that half may be stale.
    pub fn wants_prune(&self) -> bool {
        self.queue.len() >= self.prune_at
    }

    /// Drops the entries `keep` refuses.
    pub fn prune(&mut self, mut keep: impl FnMut(Entry) -> bool) {
        self.queue.retain(|p| keep(unpack(*p)));
        self.queue.shrink_to(self.queue.len() + LEAST_PRUNE);
        self.prune_at = (self.queue.len() * 2).max(LEAST_PRUNE);
    }

    /// Bytes of the list.
    pub fn metadata_bytes(&self) -> usize {
        self.queue.capacity() * size_of::<Packed>()
    }
}

/// The pool-full path: from the moment the pool exceeds its most until it is down to where stores are accepted again.
/// Between the two it goes on with what it was doing, so that write-back comes in long stretches.
#[derive(Clone, Copy, Debug, Default)]
pub struct PoolFull {
    full: bool,
}

impl PoolFull {
    /// Bytes to write back, where the pools take `held` bytes, may take `most`, and are to go down to `accept`.
    pub fn excess(&mut self, held: usize, most: usize, accept: usize) -> usize {
        self.full = if self.full { held > accept } else { held > most };
        if self.full { held.saturating_sub(accept) } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(policy: Policy, n: usize) -> Shrinker {
        let mut s = Shrinker::new(policy);
        (0..n).for_each(|i| s.stored(Entry { vpn: (i as u64) << 33 | 5, handle: i as u32 }));
        s
    }

    #[test]
    fn verdicts() {
        use Policy::*;
        for (policy, referenced, want) in [
            (SecondChance, true, Verdict::Rotate),
            (SecondChance, false, Verdict::WriteBack),
            (Decaying, true, Verdict::WriteBack),
            (Decaying, false, Verdict::WriteBack),
            (Fifo, true, Verdict::WriteBack),
        ] {
            assert_eq!(filled(policy, 1).verdict(referenced), want, "{policy:?}");
        }
    }

    #[test]
    fn entries_keep_their_order() {
        let mut s = filled(Policy::SecondChance, 3);
        let first = s.pop().unwrap();
        assert_eq!((first.vpn, first.handle), (5, 0));
        s.rotate(first);
        assert_eq!([s.pop(), s.pop(), s.pop()].map(|e| e.unwrap().handle), [1, 2, 0]);
        assert!(s.pop().is_none());
    }

    #[test]
    fn disk_reads_are_consumed_once() {
        // (disk reads, stored, pool pages) -> freeable, then what is left of the reads
        for (reads, stored, pool, want, left) in [
            (0, 1000, 1000, 1000, 0),
            (0, 1000, 250, 250, 0), // compresses 4 to 1: a quarter
            (400, 1000, 1000, 600, 0),
            (400, 1000, 500, 300, 0),
            (1000, 1000, 500, 0, 0),
            (2500, 1000, 500, 0, 1500),
            (7, 0, 0, 0, 7),
            (0, 100, 130, 100, 0), // headers make it larger than what it holds: never more than there is
        ] {
            let mut s = filled(Policy::SecondChance, 10);
            s.read_from_disk(reads);
            assert_eq!(s.freeable(stored, pool), want, "{reads} {stored} {pool}");
            assert_eq!(s.nr_disk_swapins(), left);
        }
    }

    #[test]
    fn old_policy_protects_and_decays() {
        let mut s = filled(Policy::Decaying, 1000);
        let protected = 1000 - s.freeable(1000, 1000);
        assert!(protected <= 250, "more than a quarter of the list is protected: {protected}");
        (0..500).for_each(|_| s.loaded());
        assert_eq!(1000 - s.freeable(1000, 1000), protected + 500);
        s.stored(Entry { vpn: 0, handle: 0 });
        assert!(1000 - s.freeable(1000, 1000) <= (protected + 501) / 2 + 1, "one store halves it");
        // Disk reads mean nothing to it.
        let before = s.freeable(1000, 1000);
        s.read_from_disk(900);
        assert_eq!(s.freeable(1000, 1000), before);
    }

    #[test]
    fn full_until_accepted_again() {
        let mut pool = PoolFull::default();
        for (held, want) in
            [(50, 0), (95, 0), (100, 0), (101, 11), (95, 5), (91, 1), (90, 0), (95, 0), (100, 0), (120, 30)]
        {
            assert_eq!(pool.excess(held, 100, 90), want, "{held}");
        }
        // A threshold above the most (both changed at run time) asks for nothing rather than for less than nothing.
        assert_eq!(PoolFull::default().excess(110, 100, 120), 0);
    }

    #[test]
    fn stale_entries_go() {
        let mut s = filled(Policy::Fifo, LEAST_PRUNE);
        assert!(s.wants_prune());
        s.prune(|e| e.handle % 8 == 0);
        assert_eq!(s.len(), LEAST_PRUNE / 8);
        assert!(!s.wants_prune());
        assert_eq!(s.pop().unwrap().handle, 0);
        assert_eq!(s.pop().unwrap().handle, 8);
    }
}

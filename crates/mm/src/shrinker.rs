//! The shrinker: which objects of the pool go to disk, and how many may.
//!
//! Objects stand in a list in the order they were stored. The policy that the others are compared with is the *second chance*: an object's
//! reference bit is set when it enters the list; the shrinker that meets a set bit clears it and rotates the object to
//! the tail, and one that meets a clear bit writes the object back. So objects age with memory pressure and with
//! nothing else. Reads from disk say that too much was written: they are counted and *consumed* when it is asked how
//! much is freeable, which is then scaled by how well the pool compresses (an object that compresses well is cheap to
//! keep and dear to read back). The count is one for a group ([`DiskReads`]): a page that any member reads back says
//! that the group's shrinkers took too much, and whichever member is asked next consumes it.
//!
//! Memory pressure meets objects in two ways. When the pool is full it is shrunk until it is not ([`PoolFull`]). And
//! whatever reclaim takes from the program presses the pool too ([`Shrinker::press`]): of what is freeable twice the
//! share that was taken of the resident set is met, the weight the kernel gives its shrinkers (`DEFAULT_SEEKS`). (Policies of our own
//! waited for the pool to be full once, as a page on disk that would have fitted into memory is a read too many. Replayed
//! traces bore that out; but what is in the pool is not in the program, and real programs then did nothing but fault:
//! a build took minutes that takes seconds.)
//!
//! *Balanced*, the default, is the second chance with a quarter of that weight. The kernel's says that what is taken from the pool costs as
//! much to bring back as what is taken from the program, and makes the two come to about as much memory, whatever they are worth. Here a page
//! of the pool is there in some 15 µs, and one on disk takes ten times as long. With a quarter about half as much of a build is read back; with
//! less still nothing more is gained, as the pool-full path bounds it. Where nothing but the resident set is of use (a sort that is far
//! below what it works on) it loses some percent. (Figures in MEASUREMENTS.md.)
//!
//! *S3-FIFO* is a policy of our own. A page that leaves the pool enters it again as a new object, so what has been of
//! use cannot be told by the object; it is told by its block of 64 KiB, which is marked when one of its pages is read
//! back. Objects enter a *young* list, which is met first while it is more than a tenth of all; one whose block is
//! marked moves to the *main* list (and takes the mark away), any other goes to disk at its first turn. On the main
//! list there is the second chance. So what is used once goes without pushing out what comes back. It wins where much is
//! used once, and loses where all comes back in turn: then a tenth is too little for what is young.
//!
//! *Reuse* is the careful form of it, also our own: one list and the second chance, and for an object whose block is
//! marked a third.
//!
//! Two other policies are kept for comparison: the kernel's older one, which protects a number of objects that grows
//! with each store and load and is halved whenever it exceeds a quarter of the list, and plain first-in first-out.
//!
//! The reference bits live in the objects' headers, where whoever owns the pool sets and clears them; zero pages have no
//! object and so are in none of these counts.
//!
//! Invariant: entries are hints, as in `lru`: one whose page no longer refers to its object is stale and skipped. They
//! are pruned when they could be more than half of the list. Owner: the pager's lock.

mod policy;

pub use policy::Policy;

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::collections::VecDeque;

/// Parts of a page that is to be met: what is due for a few pages taken from the program may be less than one.
const PART: u64 = 256;
/// Entries from which on stale ones are worth looking for.
const LEAST_PRUNE: usize = 4096;

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

/// Pages read back from disk that no shrinker has weighed yet (4 KiB pages): the count of a group, which its members share.
///
/// A plain counter. A member that is killed between reading pages and counting them, or between consuming and shrinking
/// less for it, leaves a count that is a little off, which says only that a few objects age sooner or later.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct DiskReads(AtomicU64);

impl DiskReads {
    /// None.
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// `pages` were read from disk, readahead included.
    pub fn add(&self, pages: usize) {
        self.0.fetch_add(pages as u64, Relaxed);
    }

    /// What was not weighed yet (pages).
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// What of a list of `lru` pages is left when the reads are taken off it, which consumes them.
    fn consume(&self, lru: usize) -> usize {
        // (Nearly always there are none: then nothing is written to memory that others look at.)
        let mut swapins = self.get();
        while swapins > 0 {
            let remain = swapins.saturating_sub(lru as u64);
            match self.0.compare_exchange(swapins, remain, Relaxed, Relaxed) {
                Ok(_) => return lru - (swapins - remain) as usize,
                Err(now) => swapins = now,
            }
        }
        lru
    }
}

/// The list and what the policies count.
#[derive(Clone)]
pub struct Shrinker {
    policy: Policy,
    queue: VecDeque<Packed>,
    /// S3-FIFO's main list; the others have one list.
    main: VecDeque<Packed>,
    /// Whether the entry last taken was on it.
    from_main: bool,
    /// Pages to be met for what reclaim has taken from the program, in parts of one ([`PART`]).
    due: u64,
    prune_at: usize,
    /// Objects the old policy protects.
    protected: usize,
}

impl Shrinker {
    /// An empty list.
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            queue: VecDeque::new(),
            main: VecDeque::new(),
            from_main: false,
            due: 0,
            prune_at: LEAST_PRUNE,
            protected: 0,
        }
    }

    /// The policy.
    pub fn policy(&self) -> Policy {
        self.policy
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

    /// How many pages may be written back, where `stored` pages take `pool` pages of memory. Consumes the group's disk
    /// reads.
    pub fn freeable(&self, stored: usize, pool: usize, reads: &DiskReads) -> usize {
        let lru = match self.policy {
            Policy::Balanced | Policy::SecondChance | Policy::S3Fifo | Policy::Reuse => reads.consume(stored),
            // (As large a part of the pages as of the objects, which may have several each.)
            Policy::Decaying => stored - stored * self.protected / self.queue.len().max(1),
            Policy::Fifo => stored,
        };
        if stored == 0 { 0 } else { (lru as u128 * pool.min(stored) as u128 / stored as u128) as usize }
    }

    /// Reclaim has taken `evicted` pages from the program, in which `resident` remain: as large a part of the pool is to
    /// be met, times two, or half of it ([`Policy::Balanced`]). `stored` pages take `pool` pages of memory.
    pub fn press(&mut self, evicted: usize, resident: usize, stored: usize, pool: usize, reads: &DiskReads) {
        let freeable = self.freeable(stored, pool, reads);
        let share = u128::from(PART / 8 * self.policy.weight()) * freeable as u128 * evicted as u128;
        let share = share / resident.max(evicted).max(1) as u128;
        self.due = (self.due + share as u64).min(PART * freeable as u64);
    }

    /// So many pages, at least, are to be met: there is nothing left to take from the program.
    pub fn owe(&mut self, pages: usize) {
        self.due = self.due.max(PART * pages as u64);
    }

    /// Pages that are to be met because of [`Shrinker::press`] and [`Shrinker::owe`].
    pub fn due(&self) -> usize {
        (self.due / PART) as usize
    }

    /// An object of `pages` pages was met.
    pub fn met(&mut self, pages: usize) {
        self.due = self.due.saturating_sub(PART * pages as u64);
    }

    /// What is to be done with the object just taken, whose reference bit is `referenced`, and of whose block a page was
    /// read back since it was last written back if `reused`. (Whoever rotates it
    /// clears the reference bit, or if that is clear the mark of the block.)
    pub fn verdict(&self, referenced: bool, reused: bool) -> Verdict {
        let chance = match self.policy {
            Policy::Balanced | Policy::SecondChance => referenced,
            Policy::Decaying | Policy::Fifo => false,
            Policy::Reuse => referenced || reused,
            Policy::S3Fifo if self.from_main => referenced || reused,
            Policy::S3Fifo => reused,
        };
        if chance { Verdict::Rotate } else { Verdict::WriteBack }
    }

    /// Takes the next entry to be met.
    pub fn pop(&mut self) -> Option<Entry> {
        self.from_main = !self.main.is_empty() && self.queue.len() * 10 <= self.len();
        let list = if self.from_main { &mut self.main } else { &mut self.queue };
        list.pop_front().map(unpack)
    }

    /// Gives back the entry just taken: it is the next to be met.
    pub fn put_back(&mut self, e: Entry) {
        let list = if self.from_main { &mut self.main } else { &mut self.queue };
        list.push_front(pack(e));
    }

    /// Puts an entry at the tail.
    pub fn rotate(&mut self, e: Entry) {
        let list = if self.policy == Policy::S3Fifo { &mut self.main } else { &mut self.queue };
        list.push_back(pack(e));
    }

    /// Entries, stale ones included.
    pub fn len(&self) -> usize {
        self.queue.len() + self.main.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether so many entries have come since the last [`Shrinker::prune`] that half may be stale.
    pub fn wants_prune(&self) -> bool {
        self.len() >= self.prune_at
    }

    /// Drops the entries `keep` refuses, which is asked from the newest to the oldest.
    pub fn prune(&mut self, mut keep: impl FnMut(Entry) -> bool) {
        for list in [&mut self.queue, &mut self.main] {
            let mut kept = list.len();
            for i in (0..list.len()).rev() {
                if keep(unpack(list[i])) {
                    kept -= 1;
                    list[kept] = list[i];
                }
            }
            list.drain(..kept);
            list.shrink_to(list.len() + LEAST_PRUNE);
        }
        self.prune_at = (self.len() * 2).max(LEAST_PRUNE);
    }

    /// The entries, stale ones included.
    pub fn entries(&self) -> impl Iterator<Item = Entry> + '_ {
        self.queue.iter().chain(&self.main).map(|p| unpack(*p))
    }

    /// Bytes of the list.
    pub fn metadata_bytes(&self) -> usize {
        (self.queue.capacity() + self.main.capacity()) * size_of::<Packed>()
    }
}

/// The pool-full path: from the moment the pool exceeds its most until it is down to where stores are accepted again.
/// Between the two it goes on with what it was doing, so that write-back comes in long stretches.
#[derive(Clone, Copy, Debug, Default)]
pub struct PoolFull {
    full: bool,
}

impl PoolFull {
    /// As it was left, `full` or not, where that is kept elsewhere.
    pub fn new(full: bool) -> Self {
        Self { full }
    }

    /// Whether it is between the two, on the way down.
    pub fn is_full(&self) -> bool {
        self.full
    }

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

    /// C1: who is met with a clear bit is written back, who has a set one is not.
    #[test]
    fn verdicts() {
        use Policy::*;
        for (policy, referenced, reused, want) in [
            (SecondChance, true, false, Verdict::Rotate),
            (SecondChance, false, false, Verdict::WriteBack),
            (SecondChance, false, true, Verdict::WriteBack),
            (Balanced, true, false, Verdict::Rotate),
            (Balanced, false, true, Verdict::WriteBack),
            (Decaying, true, true, Verdict::WriteBack),
            (Decaying, false, false, Verdict::WriteBack),
            (Fifo, true, true, Verdict::WriteBack),
            (S3Fifo, true, false, Verdict::WriteBack),
            (S3Fifo, true, true, Verdict::Rotate),
            (Reuse, true, false, Verdict::Rotate),
            (Reuse, false, true, Verdict::Rotate),
            (Reuse, false, false, Verdict::WriteBack),
        ] {
            assert_eq!(filled(policy, 1).verdict(referenced, reused), want, "{policy:?}");
        }
    }

    #[test]
    fn s3_fifo_meets_the_main_list_when_young_is_a_tenth() {
        let mut s = filled(Policy::S3Fifo, 20);
        // All young: met in order; what was reused goes to main, where it has the second chance.
        for i in 0..18 {
            let e = s.pop().unwrap();
            assert_eq!((e.handle, s.verdict(true, true)), (i, Verdict::Rotate));
            s.rotate(e);
        }
        // 2 of 20 are young: now main's oldest is met, and put back it is the next again.
        let e = s.pop().unwrap();
        assert_eq!(e.handle, 0);
        assert_eq!((s.verdict(true, false), s.verdict(false, false)), (Verdict::Rotate, Verdict::WriteBack));
        s.put_back(e);
        assert_eq!(s.pop(), Some(e));
        (20..30).for_each(|i| s.stored(Entry { vpn: 0, handle: i }));
        assert_eq!(s.pop().unwrap().handle, 18, "young again, the oldest first");
        assert_eq!(s.verdict(true, false), Verdict::WriteBack);
    }

    #[test]
    fn pressure_is_in_proportion() {
        // (evicted, resident, stored, pool) -> pages to be met
        for (policy, evicted, resident, stored, pool, want) in [
            (Policy::SecondChance, 100, 1000, 1000, 500, 100),
            (Policy::Fifo, 100, 1000, 1000, 1000, 200),
            (Policy::SecondChance, 1000, 1000, 1000, 500, 500),
            (Policy::SecondChance, 1000, 10, 1000, 500, 500),
            (Policy::SecondChance, 0, 0, 1000, 500, 0),
            (Policy::S3Fifo, 100, 1000, 1000, 500, 100),
            (Policy::Reuse, 100, 1000, 1000, 500, 100),
            (Policy::Balanced, 100, 1000, 1000, 500, 25),
            (Policy::Balanced, 1000, 1000, 1000, 500, 250),
        ] {
            let mut s = filled(policy, 10);
            s.press(evicted, resident, stored, pool, &DiskReads::new());
            assert_eq!(s.due(), want, "{policy:?} {evicted} of {resident}, {pool} of {stored}");
            s.met(want / 2);
            assert_eq!(s.due(), want - want / 2);
        }
        // Reads from disk hold it back, once.
        let mut s = filled(Policy::SecondChance, 10);
        let reads = DiskReads::new();
        reads.add(1000);
        s.press(100, 1000, 1000, 1000, &reads);
        assert_eq!(s.due(), 0);
        s.press(100, 1000, 1000, 1000, &reads);
        assert_eq!(s.due(), 200);
        // What is less than a page is not forgotten.
        let mut s = filled(Policy::Balanced, 10);
        (0..100).for_each(|_| s.press(1, 1000, 1000, 500, &reads));
        assert_eq!(s.due(), 25);
        // What is owed is not added up.
        (0..2).for_each(|_| s.owe(20));
        assert_eq!(s.due(), 25);
        (0..2).for_each(|_| s.owe(30));
        assert_eq!(s.due(), 30);
    }

    #[test]
    fn entries_keep_their_order() {
        let mut s = filled(Policy::SecondChance, 3);
        let first = s.pop().unwrap();
        assert_eq!((first.vpn, first.handle), (5, 0));
        s.put_back(first);
        assert_eq!(s.pop(), Some(first));
        s.rotate(first);
        let rest = [s.pop(), s.pop(), s.pop()].map(|e| e.unwrap());
        assert_eq!(rest.map(|e| (e.vpn, e.handle)), [(1 << 33 | 5, 1), (2 << 33 | 5, 2), (5, 0)]);
        assert!(s.pop().is_none());
    }

    /// C2: what is freeable is less the reads from disk, which are consumed, and in proportion to how badly the pool compresses.
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
            let (s, count) = (filled(Policy::SecondChance, 10), DiskReads::new());
            count.add(reads);
            assert_eq!(s.freeable(stored, pool, &count), want, "{reads} {stored} {pool}");
            assert_eq!(count.get(), left);
        }
    }

    /// What one member reads back holds the shrinker of another back, and is consumed once, by whoever is asked.
    #[test]
    fn disk_reads_of_a_group_are_consumed_by_any_member() {
        let (a, b, reads) = (filled(Policy::SecondChance, 10), filled(Policy::SecondChance, 10), DiskReads::new());
        reads.add(700);
        reads.add(800);
        assert_eq!(b.freeable(1000, 1000, &reads), 0, "all of its list is spoken for");
        assert_eq!(reads.get(), 500);
        assert_eq!(a.freeable(2000, 1000, &reads), 750, "the rest is the other's, scaled by how it compresses");
        assert_eq!((reads.get(), b.freeable(1000, 1000, &reads)), (0, 1000));
    }

    /// Whoever counts and consumes at once: no read is consumed twice, none is forgotten.
    #[test]
    fn nothing_is_consumed_twice_by_two() {
        let reads = DiskReads::new();
        let consumed = std::thread::scope(|scope| {
            let consume = || (0..20_000).map(|_| 5 - reads.consume(5)).sum::<usize>();
            scope.spawn(|| (0..20_000).for_each(|_| reads.add(3)));
            let others = [scope.spawn(consume), scope.spawn(consume)];
            others.map(|other| other.join().unwrap()).iter().sum::<usize>()
        });
        assert_eq!(consumed + reads.get() as usize, 60_000);
    }

    #[test]
    fn old_policy_protects_and_decays() {
        let mut s = filled(Policy::Decaying, 1000);
        let reads = DiskReads::new();
        let protected = 1000 - s.freeable(1000, 1000, &reads);
        assert!(protected <= 250, "more than a quarter of the list is protected: {protected}");
        (0..500).for_each(|_| s.loaded());
        assert_eq!(1000 - s.freeable(1000, 1000, &reads), protected + 500);
        s.stored(Entry { vpn: 0, handle: 0 });
        assert!(1000 - s.freeable(1000, 1000, &reads) <= (protected + 501) / 2 + 1, "one store halves it");
        // Disk reads mean nothing to it.
        let before = s.freeable(1000, 1000, &reads);
        reads.add(900);
        assert_eq!((s.freeable(1000, 1000, &reads), reads.get()), (before, 900));
    }

    /// The story: objects were taken for pages, so that of blocks of four a quarter of what is to be was protected, and the policies that
    /// are compared with this one looked the better for it.
    #[test]
    fn old_policy_protects_as_large_a_part_of_large_objects() {
        let s = filled(Policy::Decaying, 1000);
        let protects = |s: &Shrinker, stored| stored - s.freeable(stored, stored, &DiskReads::new());
        let objects = protects(&s, 1000);
        assert!(objects > 100 && protects(&s, 4000) == 4 * objects, "{objects}");
        assert_eq!(protects(&Shrinker::new(Policy::Decaying), 4000), 0);
    }

    /// The old heuristic to the number: each store and load protects one more, up to a quarter of the list, beyond which a store halves it.
    #[test]
    fn old_policy_protects_as_many_as_the_kernel_did() {
        let (mut s, reads) = (Shrinker::new(Policy::Decaying), DiskReads::new());
        let (mut protected, mut listed) = (0usize, 0);
        for step in 0..5000u32 {
            // (Many stores, then many loads, and so on.)
            if step % 700 < 500 {
                s.stored(Entry { vpn: 5, handle: step });
                listed += 1;
                protected += 1;
                protected = if protected > listed / 4 { protected / 2 } else { protected };
            } else {
                s.loaded();
                protected = listed.min(protected + 1);
            }
            assert_eq!(listed - s.freeable(listed, listed, &reads), protected, "step {step}");
        }
    }

    /// C4: between the most and where stores are accepted again it goes on with what it was doing.
    #[test]
    fn full_until_accepted_again() {
        let mut pool = PoolFull::default();
        for (held, want) in
            [(50, 0), (95, 0), (100, 0), (101, 11), (95, 5), (91, 1), (90, 0), (95, 0), (100, 0), (120, 30)]
        {
            assert_eq!(pool.excess(held, 100, 90), want, "{held}");
        }
        // And where that is kept elsewhere, it goes on as it was left.
        for (full, want) in [(false, 0), (true, 5)] {
            let mut pool = PoolFull::new(full);
            assert_eq!((pool.is_full(), pool.excess(95, 100, 90), pool.is_full()), (full, want, full));
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

    /// A list is looked through again only when as many have come as stayed; and what it had when it was long it does not keep, as that
    /// counts against the limit (A7).
    #[test]
    fn a_list_is_pruned_again_when_it_has_doubled() {
        for policy in [Policy::SecondChance, Policy::S3Fifo] {
            let mut s = filled(policy, 4 * LEAST_PRUNE);
            // (Half of them are on the main list, where there is one.)
            (0..2 * LEAST_PRUNE).for_each(|_| {
                let e = s.pop().unwrap();
                s.rotate(e);
            });
            let bytes = |entries: usize| entries * size_of::<Packed>();
            assert!(s.metadata_bytes() >= bytes(s.len()));
            s.prune(|e| e.handle % 2 == 0);
            assert_eq!((s.policy(), s.len()), (policy, 2 * LEAST_PRUNE));
            // (Room for as many as come until it is asked again, in each list.)
            assert!(s.metadata_bytes() <= bytes(4 * LEAST_PRUNE), "{policy:?}: {} bytes", s.metadata_bytes());
            while !s.wants_prune() {
                s.stored(Entry { vpn: 5, handle: 0 });
            }
            assert_eq!(s.len(), 4 * LEAST_PRUNE);
            assert!(!s.is_empty());
            s.prune(|_| false);
            assert!(s.is_empty() && s.pop().is_none());
            assert!(s.metadata_bytes() <= bytes(2 * LEAST_PRUNE), "{policy:?}: {} bytes", s.metadata_bytes());
        }
    }

    /// An object that is stored again at its old place once made all its earlier entries valid, and the list grew by one
    /// for each store: 26 MiB under a limit of 16.
    #[test]
    fn of_entries_that_are_the_same_the_newest_stays() {
        let mut s = filled(Policy::SecondChance, 3);
        (0..LEAST_PRUNE).for_each(|_| s.stored(Entry { vpn: 5, handle: 0 }));
        let mut seen = std::collections::BTreeSet::new();
        s.prune(|e| seen.insert(e.handle));
        assert_eq!(s.entries().map(|e| e.handle).collect::<Vec<_>>(), [1, 2, 0]);
    }
}

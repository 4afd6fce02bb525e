//! The shrinker: which objects of the pool go to disk, and how many may.
//!
//! Objects stand in a list in the order in which they were stored. The reference policy, with which the others are
//! compared, is the *second chance*. An object enters the list with its reference bit set. When the shrinker meets a
//! set bit, it clears the bit and rotates the object to the tail; when it meets a clear one, it writes the object back.
//! So objects age with memory pressure and with nothing else. Reads from disk show that too much was written. They are
//! counted, and *consumed* when the shrinker is asked how much is freeable. The result is then scaled by how well the
//! pool compresses: an object that compresses well is cheap to keep and expensive to read back. The count is one for
//! the whole group ([`DiskReads`]): a page that any member reads back shows that the group's shrinkers took too much,
//! and the next member that is asked consumes it.
//!
//! Memory pressure meets objects in two ways:
//!
//! - When the pool is full, it is shrunk until it is not ([`PoolFull`]).
//! - Whatever reclaim takes from the program presses the pool, too ([`Shrinker::press`]). The share of the freeable
//!   objects that is met is twice the share of the resident set that was taken, the weight that the kernel gives its
//!   shrinkers (`DEFAULT_SEEKS`). (Our own policies once waited for the pool to be full, since each page on disk that
//!   would have fitted into memory costs a read. Replayed traces bore that out. But what is in the pool is not in the
//!   program: real programs then did nothing but fault, and a build that takes seconds took minutes.)
//!
//! *Balanced*, the default, is the second chance with a quarter of that weight. The kernel's weight assumes that a page
//! taken from the pool costs as much to bring back as one taken from the program, and so makes the two about equally
//! large in memory, whatever they are worth. Here a page comes from the pool in some 15 µs, and from disk in ten times
//! that. With a quarter, a build reads back about half as much; still less gains nothing more, as the pool-full path
//! bounds it. Where only the resident set is of use (a sort far below the memory it works on), Balanced loses some
//! percent. (Figures in MEASUREMENTS.md.)
//!
//! *S3-FIFO* is a policy of our own. A page that leaves the pool enters it again as a new object, so the object cannot
//! tell whether it was of use. Its block of 64 KiB tells: the block is marked when one of its pages is read back.
//! Objects enter a *young* list, which is met first while it is more than a tenth of all objects. An object whose block
//! is marked moves to the *main* list and clears the mark; any other goes to disk at its first turn. The main list has
//! the second chance. So objects used once pass through without pushing out those that come back. It wins where much is
//! used once, and loses where everything comes back in turn, as a tenth is then too little for the young.
//!
//! *Reuse*, also our own, is its cautious form: one list with the second chance, and a third chance for an object whose
//! block is marked.
//!
//! Two more policies are kept for comparison. One is the kernel's older heuristic: it protects a number of objects that
//! grows with each store and load, and is halved whenever it exceeds a quarter of the list. The other is plain first-in
//! first-out.
//!
//! The owner of the pool sets and clears the reference bits, which are in the objects' headers. Zero pages have no
//! object, so none of these counts includes them.
//!
//! Invariant: entries are hints, as in `lru`. An entry whose page no longer refers to its object is stale and skipped.
//! Entries are pruned when more than half of the list could be stale. Owner: the pager's lock.

mod policy;

pub use policy::Policy;

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::collections::VecDeque;

/// Parts of a page in which [`Shrinker::due`] is accumulated: a few pages taken from the program may be worth less than
/// one page of the pool.
const PART: u64 = 256;
/// Smallest list that is worth searching for stale entries.
const LEAST_PRUNE: usize = 4096;

/// What to do with the object that was met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Clear its reference bit and put it at the tail.
    Rotate,
    /// Write it back.
    WriteBack,
}

/// An entry of the list: an object, and its first page.
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

/// Pages (4 KiB) read back from disk that no shrinker has weighed yet. The members of a group share one count.
///
/// It is a plain counter. A member that is killed between reading pages and counting them, or between consuming reads
/// and shrinking less for them, leaves the count slightly off; then a few objects age sooner or later.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct DiskReads(AtomicU64);

impl DiskReads {
    /// A count of zero.
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Counts `pages` read from disk, readahead included.
    pub fn add(&self, pages: usize) {
        self.0.fetch_add(pages as u64, Relaxed);
    }

    /// Pages not weighed yet.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Subtracts the reads from a list of `lru` pages, which consumes them; returns what is left of the list.
    fn consume(&self, lru: usize) -> usize {
        // Nearly always there are none; then this writes nothing to memory that other members read.
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

/// The list, and the counts of the policies.
#[derive(Clone)]
pub struct Shrinker {
    policy: Policy,
    queue: VecDeque<Packed>,
    /// S3-FIFO's main list. The other policies have one list.
    main: VecDeque<Packed>,
    /// Whether the entry taken last was on the main list.
    from_main: bool,
    /// Pages to be met for what reclaim took from the program, in 1/[`PART`] of a page.
    due: u64,
    prune_at: usize,
    /// Objects that the old policy protects.
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

    /// Enters an object that was stored; its reference bit is set.
    pub fn stored(&mut self, e: Entry) {
        self.queue.push_back(pack(e));
        self.protected += 1;
        if self.protected > self.queue.len() / 4 {
            self.protected /= 2;
        }
    }

    /// Notes that an object was read, from the pool or from disk.
    pub fn loaded(&mut self) {
        self.protected = (self.protected + 1).min(self.queue.len());
    }

    /// How many pages may be written back, where `stored` pages take `pool` pages of memory. Consumes the group's disk
    /// reads.
    pub fn freeable(&self, stored: usize, pool: usize, reads: &DiskReads) -> usize {
        let lru = match self.policy {
            Policy::Balanced | Policy::SecondChance | Policy::S3Fifo | Policy::Reuse => reads.consume(stored),
            // The same part of the pages as of the objects, since an object may have several pages. (Objects leave the
            // list without a store or load, so that more may be protected than there are.)
            Policy::Decaying => stored - stored * self.protected.min(self.queue.len()) / self.queue.len().max(1),
            Policy::Fifo => stored,
        };
        if stored == 0 { 0 } else { (lru as u128 * pool.min(stored) as u128 / stored as u128) as usize }
    }

    /// Notes that reclaim took `evicted` pages from the program and left `resident`. Twice that share of the pool is to
    /// be met, or half of it ([`Policy::Balanced`]). `stored` pages take `pool` pages of memory.
    pub fn press(&mut self, evicted: usize, resident: usize, stored: usize, pool: usize, reads: &DiskReads) {
        let freeable = self.freeable(stored, pool, reads);
        let share = u128::from(PART / 8 * self.policy.weight()) * freeable as u128 * evicted as u128;
        let share = share / resident.max(evicted).max(1) as u128;
        self.due = (self.due + share as u64).min(PART * freeable as u64);
    }

    /// At least `pages` are to be met, as nothing is left to take from the program.
    pub fn owe(&mut self, pages: usize) {
        self.due = self.due.max(PART * pages as u64);
    }

    /// Pages to be met because of [`Shrinker::press`] and [`Shrinker::owe`].
    pub fn due(&self) -> usize {
        (self.due / PART) as usize
    }

    /// Notes that an object of `pages` pages was met.
    pub fn met(&mut self, pages: usize) {
        self.due = self.due.saturating_sub(PART * pages as u64);
    }

    /// What to do with the object just taken. `referenced` is its reference bit; `reused` says whether a page of its
    /// block was read back since the block was last written back. A caller that rotates the object clears the reference
    /// bit or, if that is clear, the mark of the block.
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

    /// Takes the next entry to meet.
    pub fn pop(&mut self) -> Option<Entry> {
        self.from_main = !self.main.is_empty() && self.queue.len() * 10 <= self.len();
        let list = if self.from_main { &mut self.main } else { &mut self.queue };
        list.pop_front().map(unpack)
    }

    /// Returns the entry just taken: it is the next to be met again.
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

    /// Whether so many entries were added since the last [`Shrinker::prune`] that half may be stale.
    pub fn wants_prune(&self) -> bool {
        self.len() >= self.prune_at
    }

    /// Drops the entries that `keep` refuses. `keep` sees them from the newest to the oldest.
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

    /// Bytes that the lists take.
    pub fn metadata_bytes(&self) -> usize {
        (self.queue.capacity() + self.main.capacity()) * size_of::<Packed>()
    }
}

/// The state of the pool-full path. The pool is full from the moment it exceeds its maximum until it has shrunk to the
/// size at which it accepts stores again. In between it continues what it was doing, so write-back comes in long
/// stretches.
#[derive(Clone, Copy, Debug, Default)]
pub struct PoolFull {
    full: bool,
}

impl PoolFull {
    /// The state `full`, as the caller stored it elsewhere.
    pub fn new(full: bool) -> Self {
        Self { full }
    }

    /// Whether the pool is being shrunk.
    pub fn is_full(&self) -> bool {
        self.full
    }

    /// Bytes to write back, where the pools hold `held` bytes, may hold `most`, and shrink down to `accept`.
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

    /// C1: an object with a clear bit is written back, one with a set bit is not.
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
        // All are young, so they are met in order; reused ones go to main, where they have the second chance.
        for i in 0..18 {
            let e = s.pop().unwrap();
            assert_eq!((e.handle, s.verdict(true, true)), (i, Verdict::Rotate));
            s.rotate(e);
        }
        // 2 of 20 are young: now the oldest of main is met, and after `put_back` it is the next again.
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
        // Fractions of a page are not lost.
        let mut s = filled(Policy::Balanced, 10);
        (0..100).for_each(|_| s.press(1, 1000, 1000, 500, &reads));
        assert_eq!(s.due(), 25);
        // Debts do not add up.
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

    /// C2: the freeable pages are reduced by the reads from disk, which are consumed, and scaled by how badly the pool
    /// compresses.
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
            (0, 100, 130, 100, 0), // headers make the pool larger than what it holds: never more than what is stored
        ] {
            let (s, count) = (filled(Policy::SecondChance, 10), DiskReads::new());
            count.add(reads);
            assert_eq!(s.freeable(stored, pool, &count), want, "{reads} {stored} {pool}");
            assert_eq!(count.get(), left);
        }
    }

    /// What one member reads back holds back another's shrinker. The reads are consumed once, by any member that is
    /// asked.
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

    /// However counting and consuming interleave: no read is consumed twice, none is forgotten.
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

    /// The story: the policy counted objects as if they were pages. With blocks of four it protected a quarter of what
    /// it should, and the policies compared with it looked the better for it.
    #[test]
    fn old_policy_protects_as_large_a_part_of_large_objects() {
        let s = filled(Policy::Decaying, 1000);
        let protects = |s: &Shrinker, stored| stored - s.freeable(stored, stored, &DiskReads::new());
        let objects = protects(&s, 1000);
        assert!(objects > 100 && protects(&s, 4000) == 4 * objects, "{objects}");
        assert_eq!(protects(&Shrinker::new(Policy::Decaying), 4000), 0);
    }

    /// The story: a program dropped nearly all that was out, and its stale entries left the list. More objects were
    /// protected than were left, and what was freeable fell below zero: to nearly 2^64 pages in a release build.
    #[test]
    fn old_policy_protects_no_more_than_there_is() {
        let (mut s, reads) = (filled(Policy::Decaying, LEAST_PRUNE), DiskReads::new());
        (0..LEAST_PRUNE / 2).for_each(|_| s.loaded());
        s.prune(|e| e.handle % 8 == 0);
        let left = s.len();
        assert_eq!((left, s.freeable(left, left, &reads)), (LEAST_PRUNE / 8, 0));
        s.press(100, 1000, left, left, &reads);
        assert_eq!(s.due(), 0);
        // Each store lets it decay.
        (0..64).for_each(|_| s.stored(Entry { vpn: 0, handle: 0 }));
        assert!(s.freeable(s.len(), s.len(), &reads) >= s.len() / 4 * 3);
    }

    /// The old heuristic exactly: each store and load protects one more, up to a quarter of the list; beyond that a
    /// store halves it.
    #[test]
    fn old_policy_protects_as_many_as_the_kernel_did() {
        let (mut s, reads) = (Shrinker::new(Policy::Decaying), DiskReads::new());
        let (mut protected, mut listed) = (0usize, 0);
        for step in 0..5000u32 {
            // Many stores, then many loads, and so on.
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

    /// C4: between the maximum and the size at which stores are accepted again, it continues what it was doing.
    #[test]
    fn full_until_accepted_again() {
        let mut pool = PoolFull::default();
        for (held, want) in
            [(50, 0), (95, 0), (100, 0), (101, 11), (95, 5), (91, 1), (90, 0), (95, 0), (100, 0), (120, 30)]
        {
            assert_eq!(pool.excess(held, 100, 90), want, "{held}");
        }
        // The same where the state is stored elsewhere.
        for (full, want) in [(false, 0), (true, 5)] {
            let mut pool = PoolFull::new(full);
            assert_eq!((pool.is_full(), pool.excess(95, 100, 90), pool.is_full()), (full, want, full));
        }
        // A threshold above the maximum (both changed at run time) asks for nothing, not for a negative number.
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

    /// A list is searched again only when it has doubled. It gives up the memory that it had when it was long, since
    /// that counts against the limit (A7).
    #[test]
    fn a_list_is_pruned_again_when_it_has_doubled() {
        for policy in [Policy::SecondChance, Policy::S3Fifo] {
            let mut s = filled(policy, 4 * LEAST_PRUNE);
            // Half of them are on the main list, if there is one.
            (0..2 * LEAST_PRUNE).for_each(|_| {
                let e = s.pop().unwrap();
                s.rotate(e);
            });
            let bytes = |entries: usize| entries * size_of::<Packed>();
            assert!(s.metadata_bytes() >= bytes(s.len()));
            s.prune(|e| e.handle % 2 == 0);
            assert_eq!((s.policy(), s.len()), (policy, 2 * LEAST_PRUNE));
            // Each list has room for what comes until the next search.
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

    /// Storing an object again at its old place once made all its earlier entries valid, and the list grew by one for
    /// each store: 26 MiB under a limit of 16.
    #[test]
    fn of_entries_that_are_the_same_the_newest_stays() {
        let mut s = filled(Policy::SecondChance, 3);
        (0..LEAST_PRUNE).for_each(|_| s.stored(Entry { vpn: 5, handle: 0 }));
        let mut seen = std::collections::BTreeSet::new();
        s.prune(|e| seen.insert(e.handle));
        assert_eq!(s.entries().map(|e| e.handle).collect::<Vec<_>>(), [1, 2, 0]);
    }
}

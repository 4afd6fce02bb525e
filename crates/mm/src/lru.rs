//! The lists of the resident set: rings of folios in the order they came.
//!
//! User space has no accessed bits, so the second chance is the staged list: a folio leaves the program (its frame is
//! moved out, uncompressed) and waits; a fault on it meanwhile moves it back cheaply and proves that it is in use. So
//! a folio comes to the tail of *inactive*; from its head it is staged; refaulted it comes to the tail of *active*. What is
//! oldest there is listed as inactive again while active is more than three times as large: so all leave by inactive, what
//! was in use too when it is not any more, and what came once has a quarter of memory to pass through. (The rule of the
//! kernel's inactive_is_low, but for the ratio, which there is 1:1 at these sizes; as in 2Q, Johnson and Shasha, VLDB 1994.) A
//! folio read back from the pool whose refault distance (evictions since it left) is within the size of active goes to
//! active at once, as in the kernel's workingset.
//!
//! What is read in sequence is on *passing*, of which all but the last few windows leave before anything else does: so it
//! drives nothing out, and of what is read over and over, and is larger than memory, a part stays, instead of nothing. What
//! cannot be moved out as it is mapped (read-only, locked) waits on *unevictable*, where nobody meets it, and is tried
//! again now and then. What nothing is gained by moving out, as it does not compress, is on *incompressible*, of which now and then a
//! little is tried again.
//!
//! Invariant: entries are hints. An entry whose page-table entry has gone on (another stamp) is stale and skipped, so
//! nothing has to be unlinked when memory is unmapped; stale ones are dropped when they outnumber the others (`Lru::tidy`).
//! Owner: the pager's lock.

use std::collections::VecDeque;

/// Pages that came in sequence that stay for a while: some windows of read-ahead, which were not reached yet.
const PASSING_PAGES: usize = 512;
/// Of the others, one in so many is as much at most.
const PASSING_PART: usize = 8;
/// Active is so many times as large as inactive at most.
const ACTIVE_RATIO: usize = 3;

/// Bits of a stamp: what is left of an entry beside 35 for a page of 47 bits of addresses, and 4 for the order. Ages are told
/// from stamps, so more folios than these count must not be listed while one waits: 2^25 are 128 GiB of single pages.
///
/// The story: they were of 16 bits. Where more than 256 MiB of single pages were resident ages were what they are modulo that: young
/// pages left with an old neighbour as if they had been older still.
const STAMP_BITS: u32 = 25;
const ORDER_BITS: u32 = 4;

/// The stamp of what is listed after something of `stamp`.
pub fn next_stamp(stamp: u32) -> u32 {
    stamp.wrapping_add(1) & ((1 << STAMP_BITS) - 1)
}

/// How many folios were listed after one of `stamp`, where `now` is the stamp given last.
pub fn age(now: u32, stamp: u32) -> u32 {
    now.wrapping_sub(stamp) & ((1 << STAMP_BITS) - 1)
}

/// A folio in a list: first page, order, and the stamp its pages carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry(u64);

impl Entry {
    /// Packs an entry: a page of 35 bits, an order of 4, a stamp of 25 (what is above is lost).
    pub fn new(vpn: u64, order: u8, stamp: u32) -> Self {
        let order = u64::from(order) & ((1 << ORDER_BITS) - 1);
        let stamp = u64::from(stamp) & ((1 << STAMP_BITS) - 1);
        Self(vpn << (ORDER_BITS + STAMP_BITS) | order << STAMP_BITS | stamp)
    }
    /// First page number.
    pub fn vpn(self) -> u64 {
        self.0 >> (ORDER_BITS + STAMP_BITS)
    }
    /// Pages as a power of two.
    pub fn order(self) -> u8 {
        (self.0 >> STAMP_BITS) as u8 & ((1 << ORDER_BITS) - 1)
    }
    /// The stamp.
    pub fn stamp(self) -> u32 {
        self.0 as u32 & ((1 << STAMP_BITS) - 1)
    }
}

/// A first-in first-out list of folios.
#[derive(Default)]
pub struct Ring {
    queue: VecDeque<Entry>,
    /// Pages in it when all entries were fresh; stale ones are subtracted as they are met.
    pages: usize,
}

impl Ring {
    /// Adds at the tail.
    pub fn push(&mut self, e: Entry) {
        self.pages += 1 << e.order();
        self.queue.push_back(e);
    }
    /// Adds at the head.
    pub fn push_front(&mut self, e: Entry) {
        self.pages += 1 << e.order();
        self.queue.push_front(e);
    }
    /// Takes from the head.
    pub fn pop(&mut self) -> Option<Entry> {
        let e = self.queue.pop_front()?;
        self.pages -= 1 << e.order();
        Some(e)
    }
    /// The head.
    pub fn peek(&self) -> Option<Entry> {
        self.queue.front().copied()
    }
    /// Pages, stale ones included.
    pub fn pages(&self) -> usize {
        self.pages
    }
    /// Entries, stale ones included.
    pub fn len(&self) -> usize {
        self.queue.len()
    }
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
    /// Drops the entries `keep` refuses.
    pub fn retain(&mut self, mut keep: impl FnMut(Entry) -> bool) {
        self.queue.retain(|e| keep(*e));
        self.pages = self.queue.iter().map(|e| 1usize << e.order()).sum();
        self.queue.shrink_to_fit();
    }
    /// Bytes of the list itself.
    pub fn metadata_bytes(&self) -> usize {
        self.queue.capacity() * 8
    }
}

/// The lists.
#[derive(Default)]
pub struct Lru {
    /// Came in once.
    pub inactive: Ring,
    /// Proved to be in use.
    pub active: Ring,
    /// Came in sequence, and is not expected to be used again soon.
    pub passing: Ring,
    /// Moved out, not yet compressed.
    pub staged: Ring,
    /// Cannot be moved out as it is mapped now.
    pub unevictable: Ring,
    /// Did not compress when it was out.
    pub incompressible: Ring,
    /// Whether what passes is to wait, while there is anything else to move out: all of it was faulted on just now.
    pub passing_waits: bool,
}

/// A list of the resident set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    /// [`Lru::inactive`].
    Inactive,
    /// [`Lru::active`].
    Active,
    /// [`Lru::passing`].
    Passing,
    /// [`Lru::unevictable`].
    Unevictable,
    /// [`Lru::incompressible`].
    Incompressible,
}

impl Lru {
    /// Adds a folio at the tail of a list.
    pub fn push(&mut self, list: List, e: Entry) {
        match list {
            List::Inactive => self.inactive.push(e),
            List::Active => self.active.push(e),
            List::Passing => self.passing.push(e),
            List::Unevictable => self.unevictable.push(e),
            List::Incompressible => self.incompressible.push(e),
        }
    }

    /// What was unevictable may have changed: it is inactive again. Returns the pages.
    pub fn rescue(&mut self) -> usize {
        let pages = self.unevictable.pages();
        while let Some(e) = self.unevictable.pop() {
            self.inactive.push(e);
        }
        self.unevictable = Ring::default();
        pages
    }

    /// Drops stale entries of each list of the resident set where they outnumber the others: where it has more than twice as many as
    /// there are `resident` pages, and 4096 besides. `is_fresh` says whether a page is resident under a stamp. (Each entry that
    /// stays has a page of its own, so this is not done again before as many have come as there are pages.)
    ///
    /// The story: they went only as victims were taken. A program that is managed and stays below its limit, and uses memory
    /// and drops it again, left an entry for each page it ever touched: eight bytes of its limit, for good; and when it came to its limit after
    /// all, so many stale ones stood before what could leave that nothing was found, its group was called full, and with
    /// `--on-full=kill` it was killed.
    pub fn tidy(&mut self, resident: usize, is_fresh: impl Fn(u64, u32) -> bool) {
        let Self { inactive, active, passing, unevictable, incompressible, .. } = self;
        for ring in [inactive, active, passing, unevictable, incompressible] {
            if ring.len() > 2 * resident + 4096 {
                ring.retain(|e| (e.vpn()..e.vpn() + (1 << e.order())).any(|page| is_fresh(page, e.stamp())));
            }
        }
    }

    /// Bytes of the lists themselves.
    pub fn metadata_bytes(&self) -> usize {
        let Self { inactive, active, passing, staged, unevictable, incompressible, .. } = self;
        let rings = [inactive, active, passing, staged, unevictable, incompressible];
        rings.map(Ring::metadata_bytes).iter().sum()
    }

    /// Whether the next folio to move out is one that passes.
    pub fn victim_passes(&self) -> bool {
        let used = self.inactive.pages() + self.active.pages();
        self.passing.pages() > PASSING_PAGES.min(used / PASSING_PART) && (used == 0 || !self.passing_waits)
    }

    /// Pages that nothing keeps from being moved out, stale entries included.
    pub fn evictable(&self) -> usize {
        [&self.inactive, &self.active, &self.passing].map(Ring::pages).iter().sum()
    }

    fn oldest(&mut self) -> &mut Ring {
        if self.victim_passes() {
            return &mut self.passing;
        }
        while self.active.pages() > ACTIVE_RATIO * self.inactive.pages() {
            let Some(e) = self.active.pop() else { break };
            self.inactive.push(e);
        }
        &mut self.inactive
    }

    /// Takes the next folio to move out: of what came in sequence, but for the last of it; then what has been inactive longest.
    pub fn pop_victim(&mut self) -> Option<Entry> {
        self.oldest().pop()
    }

    /// What [`Lru::pop_victim`] would take.
    pub fn peek_victim(&mut self) -> Option<Entry> {
        self.oldest().peek()
    }
}

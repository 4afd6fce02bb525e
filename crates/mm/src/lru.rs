//! The lists of the resident set: rings of folios, in the order in which the folios came.
//!
//! User space sees no accessed bits, so the staged list is the second chance. A folio is staged when its frame is moved
//! out of the program, uncompressed. A fault on it while it waits there moves it back cheaply, and proves that it is in
//! use.
//!
//! - *Inactive*: a folio enters at the tail, and is staged from the head.
//! - *Active*: a folio that refaults enters at the tail. While active is more than three times as large as inactive,
//!   its oldest folios return to inactive. So all pages leave through inactive, including those that were once in use,
//!   and pages used only once have a quarter of memory to pass through. This is the kernel's inactive_is_low rule
//!   except for the ratio, which the kernel has at 1:1 for these sizes; 2Q (Johnson and Shasha, VLDB 1994) does the
//!   same. A folio read back from the pool becomes active at once if its refault distance (evictions since it left) is
//!   within the size of active, as in the kernel's workingset.
//! - *Passing*: folios read in sequence. All but the last few windows of it leave before anything else, so a sequential
//!   read drives nothing out, and data that is read over and over but is larger than memory stays resident in part
//!   instead of not at all.
//! - *Unevictable*: folios that cannot be moved out as they are mapped now (read-only, locked). No scan meets them
//!   here; they are tried again now and then.
//! - *Incompressible*: folios that did not compress, so moving them out gains nothing. A few of them are tried again
//!   now and then.
//!
//! Invariant: entries are hints. An entry is stale, and skipped, once its page-table entry has another stamp. So
//! unmapping memory need not unlink anything; stale entries are dropped when they outnumber the others (`Lru::tidy`).
//! Owner: the pager's lock.

use std::collections::VecDeque;

/// Pages that came in sequence and stay for a while: some windows of read-ahead that the program has not reached yet.
const PASSING_PAGES: usize = 512;
/// The passing pages that stay are at most this part (one in so many) of inactive and active together.
const PASSING_PART: usize = 8;
/// Entries for which a list that is cleared keeps room.
const LEAST_KEPT: usize = 512;
/// Active is at most this many times as large as inactive.
const ACTIVE_RATIO: usize = 3;

/// Bits of a stamp: what an entry has left beside 35 for a page (47 bits of addresses) and 4 for the order. Ages are
/// differences of stamps, so no more folios than a stamp can count may be listed while one waits: 2^25 are 128 GiB of
/// single pages.
///
/// The story: stamps had 16 bits. With more than 256 MiB of single pages resident, ages wrapped, and young pages left
/// along with an old neighbour as if they were older still.
const STAMP_BITS: u32 = 25;
const ORDER_BITS: u32 = 4;

/// The stamp that follows `stamp`.
pub fn next_stamp(stamp: u32) -> u32 {
    stamp.wrapping_add(1) & ((1 << STAMP_BITS) - 1)
}

/// How many folios were listed after one with `stamp`, where `now` is the latest stamp.
pub fn age(now: u32, stamp: u32) -> u32 {
    now.wrapping_sub(stamp) & ((1 << STAMP_BITS) - 1)
}

/// A folio in a list: its first page, its order, and the stamp that its pages carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry(u64);

impl Entry {
    /// Packs an entry: 35 bits of page, 4 of order, 25 of stamp. Higher bits are lost.
    pub fn new(vpn: u64, order: u8, stamp: u32) -> Self {
        let order = u64::from(order) & ((1 << ORDER_BITS) - 1);
        let stamp = u64::from(stamp) & ((1 << STAMP_BITS) - 1);
        Self(vpn << (ORDER_BITS + STAMP_BITS) | order << STAMP_BITS | stamp)
    }
    /// First page number.
    pub fn vpn(self) -> u64 {
        self.0 >> (ORDER_BITS + STAMP_BITS)
    }
    /// Order: the folio has `1 << order` pages.
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
    /// Pages of all entries, stale ones included, until those are popped.
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
    /// Drops the entries that `keep` refuses.
    pub fn retain(&mut self, mut keep: impl FnMut(Entry) -> bool) {
        self.queue.retain(|e| keep(*e));
        self.pages = self.queue.iter().map(|e| 1usize << e.order()).sum();
        self.queue.shrink_to_fit();
    }
    /// Drops all entries, and most of the memory that many of them took.
    pub fn clear(&mut self) {
        self.queue.clear();
        self.queue.shrink_to(LEAST_KEPT);
        self.pages = 0;
    }
    /// Bytes that the list itself takes.
    pub fn metadata_bytes(&self) -> usize {
        self.queue.capacity() * 8
    }
}

/// The lists of the resident set, and the staged list.
#[derive(Default)]
pub struct Lru {
    /// Folios that came in once.
    pub inactive: Ring,
    /// Folios that proved to be in use.
    pub active: Ring,
    /// Folios that came in sequence, not expected to be used again soon.
    pub passing: Ring,
    /// Folios moved out but not compressed yet.
    pub staged: Ring,
    /// Folios that cannot be moved out as they are mapped now.
    pub unevictable: Ring,
    /// Folios that did not compress when they were out.
    pub incompressible: Ring,
    /// Passing folios wait as long as anything else can be moved out, because all of them were faulted on just now.
    pub passing_waits: bool,
}

/// Names a list of the resident set.
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

    /// Makes all unevictable folios inactive again, as their mappings may have changed. Returns their pages.
    pub fn rescue(&mut self) -> usize {
        let pages = self.unevictable.pages();
        while let Some(e) = self.unevictable.pop() {
            self.inactive.push(e);
        }
        self.unevictable = Ring::default();
        pages
    }

    /// Drops the stale entries of each list of the resident set that has too many: more than twice as many entries as
    /// there are `resident` pages, plus 4096. `is_fresh` says whether a page is resident under a stamp. Each entry that
    /// stays has a page of its own, so the next pass comes only after as many entries were added as there are pages.
    ///
    /// The story: only the search for victims dropped stale entries. A program that was managed, stayed below its
    /// limit, and used memory and dropped it again left an entry for each page it ever touched: eight bytes of its
    /// limit, for good. When it did reach its limit, so many stale entries stood before the evictable ones that the
    /// search found nothing. Its group was called full, and with `--on-full=kill` it was killed.
    pub fn tidy(&mut self, resident: usize, is_fresh: impl Fn(u64, u32) -> bool) {
        let Self { inactive, active, passing, unevictable, incompressible, .. } = self;
        for ring in [inactive, active, passing, unevictable, incompressible] {
            if ring.len() > 2 * resident + 4096 {
                ring.retain(|e| (e.vpn()..e.vpn() + (1 << e.order())).any(|page| is_fresh(page, e.stamp())));
            }
        }
    }

    /// Bytes that the lists themselves take.
    pub fn metadata_bytes(&self) -> usize {
        let Self { inactive, active, passing, staged, unevictable, incompressible, .. } = self;
        let rings = [inactive, active, passing, staged, unevictable, incompressible];
        rings.map(Ring::metadata_bytes).iter().sum()
    }

    /// Whether the next victim comes from passing.
    pub fn victim_passes(&self) -> bool {
        let used = self.inactive.pages() + self.active.pages();
        self.passing.pages() > PASSING_PAGES.min(used / PASSING_PART) && (used == 0 || !self.passing_waits)
    }

    /// Pages on the lists that victims are taken from, stale entries included.
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

    /// Takes the next folio to move out: the oldest passing one, except for the last of them; then the oldest inactive
    /// one.
    pub fn pop_victim(&mut self) -> Option<Entry> {
        self.oldest().pop()
    }

    /// The folio that [`Lru::pop_victim`] would take.
    pub fn peek_victim(&mut self) -> Option<Entry> {
        self.oldest().peek()
    }
}

//! The page map: the state of each page in one byte, which anybody may read while it changes.
//!
//! The owner of a table publishes each change of a page's state as it makes it. Readers, in the process or outside it
//! (the words lie in shared memory), look without asking, without a lock and without searching the page table. At a
//! byte a page, scanning a gigabyte is a read of 256 KiB.
//!
//! ```text
//! bit    0        1        2      3           4                5..7
//!        present  swapped  zero   soft-dirty  write-protected  tier
//! ```
//! What a reader may rely on:
//! - *One page*: the byte is one state that the page was in, never a mixture of two. What a thread reads of a page
//!   never goes back in time.
//! - *Several pages*: [`PageMap::get`] and the scans read them one after the other, so they may be of different
//!   moments. [`PageMap::snapshot`] reads a range as it was at one moment. For this the writer brackets each change of
//!   several pages with [`PageMapWriter::begin`] and [`PageMapWriter::end`], which advance [`PageMap::sequence`] (odd
//!   while a change is under way), and the reader tries again when that has moved.
//!
//! There is one writer at a time (the owner's lock), and any number of readers. Bytes are packed eight to a word, the
//! lowest page in the lowest byte. The writer loads, changes and stores a word, which is correct with a single writer.
//! The words are behind the trait [`Word`], so that `tests/it/pagemap.rs` runs this very code under loom, over every
//! interleaving.

use core::ops::Deref;
use core::sync::atomic::{AtomicU64, Ordering};

/// The page is in memory.
pub const PRESENT: u8 = 1;
/// The page is out: its contents are kept elsewhere. A page never touched is neither present nor swapped.
pub const SWAPPED: u8 = 1 << 1;
/// The page is out and known to be all zeros.
pub const ZERO: u8 = 1 << 2;
/// Written to since the bit was last cleared.
pub const SOFT_DIRTY: u8 = 1 << 3;
/// Somebody is told of a write to the page before it happens.
pub const WRITE_PROTECTED: u8 = 1 << 4;
const TIER_SHIFT: u32 = 5;

/// Where the contents are of a page that is out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Tier {
    /// In memory, or nowhere (never touched, or all zeros).
    None = 0,
    /// Out of the program but still in a frame: cheap to take back.
    Staged = 1,
    /// Compressed by a fast codec.
    Warm = 2,
    /// Compressed by a dense codec.
    Dense = 3,
    /// In the pool uncompressed: it does not compress.
    Raw = 4,
    /// In the swap file.
    Disk = 5,
    /// On a swap server.
    Remote = 6,
    /// Nowhere any more: touching the page is an error.
    Lost = 7,
}

/// All tiers, by number.
pub const TIERS: [Tier; 8] =
    [Tier::None, Tier::Staged, Tier::Warm, Tier::Dense, Tier::Raw, Tier::Disk, Tier::Remote, Tier::Lost];

impl Tier {
    /// The tier's bits in a page's byte.
    #[must_use]
    pub const fn bits(self) -> u8 {
        (self as u8) << TIER_SHIFT
    }

    /// Its name, as `uzswap pagemap` prints it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Staged => "staged",
            Self::Warm => "warm",
            Self::Dense => "dense",
            Self::Raw => "raw",
            Self::Disk => "disk",
            Self::Remote => "remote",
            Self::Lost => "lost",
        }
    }
}

/// The state of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PageState(pub u8);

impl PageState {
    /// Whether all of `bits` are set.
    #[must_use]
    pub const fn has(self, bits: u8) -> bool {
        self.0 & bits == bits
    }
    /// In memory.
    #[must_use]
    pub const fn present(self) -> bool {
        self.has(PRESENT)
    }
    /// Out.
    #[must_use]
    pub const fn swapped(self) -> bool {
        self.has(SWAPPED)
    }
    /// Out, and all zeros.
    #[must_use]
    pub const fn zero(self) -> bool {
        self.has(ZERO)
    }
    /// Written to since the bit was cleared.
    #[must_use]
    pub const fn soft_dirty(self) -> bool {
        self.has(SOFT_DIRTY)
    }
    /// Somebody is told of writes first.
    #[must_use]
    pub const fn write_protected(self) -> bool {
        self.has(WRITE_PROTECTED)
    }
    /// The tier that the contents are on.
    #[must_use]
    pub const fn tier(self) -> Tier {
        TIERS[(self.0 >> TIER_SHIFT) as usize]
    }
}

/// The bytes of eight pages, which may change while they are read.
pub trait Word {
    /// Reads all eight.
    fn load(&self, order: Ordering) -> u64;
    /// Writes all eight.
    fn store(&self, value: u64, order: Ordering);
}

impl Word for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }
}

/// Pages in a word.
const LANES: u64 = 8;
const ONES: u64 = 0x0101_0101_0101_0101;
/// How often [`PageMap::snapshot`] tries.
const TRIES: usize = 1000;

/// A reader's view of a page map. The words lie elsewhere.
pub struct PageMap<'a, W: Word = AtomicU64> {
    sequence: &'a W,
    words: &'a [W],
    pages: u64,
    /// Words with the view's own bits: see [`PageMap::with_markers`].
    markers: &'a [W],
    /// Whether every known page counts as written.
    all_dirty: bool,
}

impl<W: Word> Clone for PageMap<'_, W> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<W: Word> Copy for PageMap<'_, W> {}

/// What a scan searches for, as in the kernel's PAGEMAP_SCAN. Bits are those of a page's byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    /// Bits to invert before the masks are applied: "not present" is PRESENT here and in `all`.
    pub inverted: u8,
    /// A page must have all of these to be found,
    pub all: u8,
    /// and at least one of these, if there are any.
    pub any: u8,
    /// Adjacent pages that agree in these bits form one run; the run carries the bits.
    pub report: u8,
}

impl Query {
    /// Finds every known page, by state.
    pub const EVERYTHING: Self = Self { inverted: 0, all: 0, any: 0xff, report: 0xff };

    /// Finds pages that have all of `bits`, whatever else they are.
    #[must_use]
    pub const fn having(bits: u8) -> Self {
        Self { inverted: 0, all: bits, any: 0, report: bits }
    }

    /// Which pages of a word are found, a bit each. `word` is inverted already.
    fn lanes(&self, word: u64) -> u32 {
        let all = u64::from(self.all) * ONES;
        let missing = nonzero(word & all ^ all);
        let some = if self.any == 0 { 0xff } else { nonzero(word & (u64::from(self.any) * ONES)) };
        some & !missing
    }

    /// Whether a page with this byte is found.
    #[must_use]
    pub const fn finds(&self, byte: u8) -> bool {
        let byte = byte ^ self.inverted;
        byte & self.all == self.all && (self.any == 0 || byte & self.any != 0)
    }
}

/// Which bytes of a word are not zero, a bit each.
fn nonzero(word: u64) -> u32 {
    const LOW: u64 = 0x7f * ONES;
    let tops = (((word & LOW) + LOW) | word) >> 7 & ONES;
    // Moves bit 8i to bit 56 + i.
    (tops.wrapping_mul(0x0102_0408_1020_4080) >> 56) as u32
}

/// Extends the open run if `run` continues it in the same state; otherwise reports the open run and opens this one.
fn join(open: &mut Option<Run>, run: Run, found: &mut impl FnMut(Run)) {
    match open {
        Some(before) if before.to == run.from && before.state == run.state => before.to = run.to,
        _ => {
            if let Some(before) = open.replace(run) {
                found(before);
            }
        }
    }
}

/// Adjacent pages in the same state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First page.
    pub from: u64,
    /// One past the last.
    pub to: u64,
    /// Their state, reduced to the bits asked for.
    pub state: PageState,
}

/// Counts of pages by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Pages looked at.
    pub pages: u64,
    /// Pages in memory.
    pub present: u64,
    /// Pages that are out.
    pub swapped: u64,
    /// Pages that are out as zeros.
    pub zero: u64,
    /// Pages written to since the bit was cleared.
    pub soft_dirty: u64,
    /// Write-protected pages.
    pub write_protected: u64,
    /// Pages by tier.
    pub tiers: [u64; 8],
}

impl Summary {
    /// Counts `n` pages in one state.
    pub fn add(&mut self, state: PageState, n: u64) {
        self.pages += n;
        let count = |to: &mut u64, is: bool| *to += if is { n } else { 0 };
        count(&mut self.present, state.present());
        count(&mut self.swapped, state.swapped());
        count(&mut self.zero, state.zero());
        count(&mut self.soft_dirty, state.soft_dirty());
        count(&mut self.write_protected, state.write_protected());
        self.tiers[state.tier() as usize] += n;
    }
}

impl<'a, W: Word> PageMap<'a, W> {
    /// A map of `pages` pages.
    ///
    /// # Panics
    /// When there are too few words.
    #[must_use]
    pub fn new(sequence: &'a W, words: &'a [W], pages: u64) -> Self {
        assert!(words.len() as u64 >= pages.div_ceil(LANES));
        Self { sequence, words, pages, markers: &[], all_dirty: false }
    }

    /// The same map for a view with bits of its own: a mapping's soft-dirty and write-protected bits, which lie in
    /// another map. The two are read one after the other, so they may be of different moments. With `all_dirty` every
    /// page that is present or swapped counts as written, as nobody has cleared the bits yet.
    ///
    /// # Panics
    /// When `markers` has fewer pages.
    #[must_use]
    pub fn with_markers(mut self, markers: Self, all_dirty: bool) -> Self {
        assert!(markers.pages >= self.pages);
        (self.markers, self.all_dirty) = (markers.words, all_dirty);
        self
    }

    fn word(&self, index: usize) -> u64 {
        let word = self.words[index].load(Ordering::Acquire);
        let own = self.markers.get(index).map_or(0, |m| m.load(Ordering::Acquire));
        let known = (word | word >> 1) & ONES;
        word | own | if self.all_dirty { known << SOFT_DIRTY.trailing_zeros() } else { 0 }
    }

    /// Words needed for `pages` pages.
    #[must_use]
    pub const fn words_for(pages: u64) -> usize {
        pages.div_ceil(LANES) as usize
    }

    /// Number of pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The state of a page; empty for a page beyond the last.
    #[must_use]
    pub fn get(&self, page: u64) -> PageState {
        if page >= self.pages {
            return PageState::default();
        }
        PageState((self.word((page / LANES) as usize) >> (8 * (page % LANES))) as u8)
    }

    /// The counter of [`PageMapWriter::begin`] and [`PageMapWriter::end`]: odd while a change is under way.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence.load(Ordering::Acquire)
    }

    /// Reads the pages from `from` on into `out` as they were at one moment. False if the writer never rested during
    /// all tries.
    ///
    /// Why it is correct: a word that this reads with Acquire was stored with Release, after `begin` stored the odd
    /// count in the writer's order. So if it sees any such word, its second look at the count sees at least that odd
    /// number, which differs from the first.
    #[must_use]
    pub fn snapshot(&self, from: u64, out: &mut [PageState]) -> bool {
        for _ in 0..TRIES {
            let before = self.sequence();
            if before.is_multiple_of(2) {
                for (i, state) in out.iter_mut().enumerate() {
                    *state = self.get(from + i as u64);
                }
                if self.sequence() == before {
                    return true;
                }
            }
            core::hint::spin_loop();
        }
        false
    }

    /// Calls `found` for each run in `[from, to)` that the query finds, in order. It compares eight pages at a time.
    pub fn scan(&self, from: u64, to: u64, query: Query, mut found: impl FnMut(Run)) {
        let to = to.min(self.pages);
        // The query reports only bits that every page found has, so states need not be compared.
        let all_alike = query.report & !query.all == 0;
        let mut open: Option<Run> = None;
        let mut at = from;
        while at < to {
            let index = (at / LANES) as usize;
            let word = self.word(index);
            let looked = word ^ (u64::from(query.inverted) * ONES);
            let states = looked & (u64::from(query.report) * ONES);
            let end = ((at / LANES + 1) * LANES).min(to);
            let (first, n) = (at % LANES, end - at);
            let lanes = query.lanes(looked) & (0xff >> (LANES - n)) << first;
            let state = PageState((states >> (8 * u64::from(lanes.trailing_zeros() & 7))) as u8);
            if lanes == 0 || lanes == 0xff && states == u64::from(state.0) * ONES {
                // All of the word is found, or nothing: the same holds for the following words if they are equal.
                let (mut next, last) = (index + 1, (to / LANES) as usize);
                while n == LANES && next < last && self.word(next) == word {
                    next += 1;
                }
                let end = (next as u64 * LANES).min(to);
                if lanes != 0 {
                    join(&mut open, Run { from: at, to: end, state }, &mut found);
                } else if let Some(run) = open.take() {
                    found(run);
                }
                at = end;
                continue;
            }
            let base = at - first;
            let mut left = lanes;
            while left != 0 {
                let from = left.trailing_zeros();
                let state = PageState((states >> (8 * from)) as u8);
                // As far as found pages are adjacent and in the same state.
                let other = if all_alike { 0 } else { nonzero(states ^ (u64::from(state.0) * ONES)) };
                let n = (!(left & !other) >> from).trailing_zeros();
                let run = Run { from: base + u64::from(from), to: base + u64::from(from + n), state };
                join(&mut open, run, &mut found);
                left &= u32::MAX << (from + n);
            }
            at = end;
        }
        if let Some(run) = open {
            found(run);
        }
    }

    /// Counts the pages of `[from, to)` by state.
    #[must_use]
    pub fn summary(&self, from: u64, to: u64) -> Summary {
        let mut sum = Summary::default();
        self.for_each_stretch(from, to.min(self.pages), |at, end, byte| sum.add(PageState(byte), end - at));
        sum
    }

    /// Calls `f(first, end, byte)` for stretches of equal bytes. They are not the longest possible, but a word of equal
    /// bytes is never split.
    fn for_each_stretch(&self, from: u64, to: u64, mut f: impl FnMut(u64, u64, u8)) {
        let mut at = from;
        while at < to {
            let index = (at / LANES) as usize;
            let word = self.word(index);
            let end = ((at / LANES + 1) * LANES).min(to);
            let byte = (word >> (8 * (at % LANES))) as u8;
            if word == u64::from(byte) * ONES {
                // As far as the words are equal.
                let last = (to / LANES) as usize;
                let mut next = index + 1;
                while next < last && self.word(next) == word {
                    next += 1;
                }
                let end = (next as u64 * LANES).min(to).max(end);
                f(at, end, byte);
                at = end;
                continue;
            }
            while at < end {
                let byte = (word >> (8 * (at % LANES))) as u8;
                let mut stop = at + 1;
                while stop < end && (word >> (8 * (stop % LANES))) as u8 == byte {
                    stop += 1;
                }
                f(at, stop, byte);
                at = stop;
            }
        }
    }
}

/// A page map for its only writer, which owns the words: it can be read like any other, and written.
pub struct PageMapWriter<'a, W: Word = AtomicU64>(PageMap<'a, W>);

impl<W: Word> Clone for PageMapWriter<'_, W> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<W: Word> Copy for PageMapWriter<'_, W> {}

impl<'a, W: Word> Deref for PageMapWriter<'a, W> {
    type Target = PageMap<'a, W>;
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<'a, W: Word> PageMapWriter<'a, W> {
    /// A map of `pages` pages that has no other writer.
    ///
    /// # Panics
    /// When there are too few words.
    #[must_use]
    pub fn new(sequence: &'a W, words: &'a [W], pages: u64) -> Self {
        Self(PageMap::new(sequence, words, pages))
    }

    /// Sets the state of a page.
    ///
    /// # Panics
    /// When the page is beyond the last.
    pub fn set(&self, page: u64, state: PageState) {
        assert!(page < self.pages);
        let (word, shift) = (&self.words[(page / LANES) as usize], 8 * (page % LANES));
        let old = word.load(Ordering::Relaxed);
        word.store(old & !(0xff << shift) | u64::from(state.0) << shift, Ordering::Release);
    }

    /// Sets the state of a page, as a change of its own or as part of the one under way.
    ///
    /// # Panics
    /// When the page is beyond the last.
    pub fn publish(&self, page: u64, state: PageState) {
        let alone = self.sequence.load(Ordering::Relaxed).is_multiple_of(2);
        if alone {
            self.begin();
        }
        self.set(page, state);
        if alone {
            self.end();
        }
    }

    /// As [`PageMapWriter::publish`] for `n` pages from `from` on, with `state(i)` for the i-th: one store for eight
    /// pages.
    ///
    /// # Panics
    /// When a page is beyond the last.
    pub fn publish_run(&self, from: u64, n: u64, state: impl Fn(u64) -> PageState) {
        assert!(from + n <= self.pages);
        let alone = self.sequence.load(Ordering::Relaxed).is_multiple_of(2);
        if alone {
            self.begin();
        }
        let (mut at, end) = (from, from + n);
        while at < end {
            let word = &self.words[(at / LANES) as usize];
            let stop = ((at / LANES + 1) * LANES).min(end);
            let (mut new, mut mask) = (0, 0);
            for page in at..stop {
                let shift = 8 * (page % LANES);
                new |= u64::from(state(page - from).0) << shift;
                mask |= 0xff << shift;
            }
            let old = if stop - at == LANES { 0 } else { word.load(Ordering::Relaxed) };
            word.store(old & !mask | new, Ordering::Release);
            at = stop;
        }
        if alone {
            self.end();
        }
    }

    /// Sets and clears bits of a page.
    ///
    /// # Panics
    /// When the page is beyond the last.
    pub fn change(&self, page: u64, set: u8, clear: u8) {
        self.set(page, PageState(self.get(page).0 & !clear | set));
    }

    /// Begins a change of several pages that a snapshot must see as one.
    pub fn begin(&self) {
        let at = self.sequence.load(Ordering::Relaxed);
        // The stores of the words, which come after, release it: see `snapshot`.
        self.sequence.store(at | 1, Ordering::Release);
    }

    /// Ends such a change.
    pub fn end(&self) {
        let at = self.sequence.load(Ordering::Relaxed);
        self.sequence.store((at | 1) + 1, Ordering::Release);
    }
}

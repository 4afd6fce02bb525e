//! The page table: one word for each 4 KiB page of the program that was ever evicted, staged or brought in.
//!
//! It is a radix tree over the 47-bit address space (`tree`), so it takes memory only where the program has some: 8.5
//! bytes a page. Address ranges need not be known beforehand, as a page never seen is [`Tag::None`]. Owner: the pager's
//! lock.

mod tree;

use crate::pagemap::{PRESENT, PageMapWriter, PageState, SOFT_DIRTY, SWAPPED, Tier, WRITE_PROTECTED, ZERO};
pub use tree::STRETCH_PAGES;
use tree::{Leaf, Tree, in_leaf};

/// The state of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Tag {
    /// Never seen, or dropped by the program. If the page is missing, it reads as zeros.
    None = 0,
    /// In the program; aux: its stamp.
    Resident = 1,
    /// Moved out to a slot of the arena; aux: the slot.
    Staged = 2,
    /// In the pool; handle: the object; aux: the page's index in it (low 9 bits) and the eviction stamp above.
    Compressed = 3,
    /// Evicted, and known to be all zeros.
    Zero = 4,
    /// Staged and being compressed, so its frame must not move; aux: the slot.
    Busy = 5,
    /// Lost: its data could not be brought back, and the program gets SIGBUS on access.
    Poisoned = 6,
    /// In the swap file; handle: the place; aux: as for Compressed.
    Disk = 7,
}

/// A page-table entry: tag 3 bits, tier 2 bits (how a page in the pool or on disk is packed), `copy` 1 bit (the pool
/// still holds what was read), aux 26 bits, handle 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Pte(u64);

const AUX_SHIFT: u32 = 6;
const AUX_MASK: u64 = (1 << 26) - 1;
const COPY: u64 = 1 << 5;
const TIER_SHIFT: u32 = 3;
/// Bits of a page's index in its object. The largest object, of 2 MiB, has 512 pages.
const INDEX_BITS: u32 = 9;
/// Unit of eviction stamps, as a power of two of pages. At this grain 17 bits hold 2^21 pages. (The kernel's
/// `bucket_order`.)
const STAMP_SHIFT: u32 = 4;
const TIER_MASK: u64 = 3 << TIER_SHIFT;

/// Eviction stamps have 21 bits.
const STAMP_MASK: u32 = 0x1f_ffff;

/// The eviction stamp after `n` more evictions.
#[must_use]
pub fn next_eviction(stamp: u32, n: usize) -> u32 {
    (stamp + n as u32) & STAMP_MASK
}

impl Pte {
    /// A page that was never seen.
    pub const NONE: Self = Self(0);
    /// Packs an entry without a kept copy.
    pub fn new(tag: Tag, aux: u32) -> Self {
        Self(tag as u64 | ((u64::from(aux) & AUX_MASK) << AUX_SHIFT))
    }
    /// A page in the pool. The eviction stamp is kept to 16 pages.
    pub fn compressed(handle: u32, index: usize, evicted_at: u32) -> Self {
        let index = index as u32 & ((1 << INDEX_BITS) - 1);
        Self::new(Tag::Compressed, index | evicted_at >> STAMP_SHIFT << INDEX_BITS).with_handle(handle)
    }
    /// The same entry, packed as `tier` says: [`Tier::Warm`] (the default), [`Tier::Dense`] or [`Tier::Raw`].
    pub fn packed(self, tier: Tier) -> Self {
        let tier = match tier {
            Tier::Dense => 1,
            Tier::Raw => 2,
            _ => 0,
        };
        Self(self.0 & !TIER_MASK | tier << TIER_SHIFT)
    }
    /// The same page moved from the pool to `place` in the swap file.
    pub fn on_disk(self, place: u32) -> Self {
        Self(Self::new(Tag::Disk, self.aux()).with_handle(place).0 | self.0 & TIER_MASK)
    }
    /// The same page back from the swap file in the pool, packed as it was.
    pub fn back_in_pool(self, handle: u32) -> Self {
        Self(Self::new(Tag::Compressed, self.aux()).with_handle(handle).0 | self.0 & TIER_MASK)
    }
    /// Whether the page is in the pool uncompressed, as it did not compress.
    pub fn is_raw(self) -> bool {
        self.tag() == Tag::Compressed && self.pool_tier() == Tier::Raw
    }
    /// Whether the page is in the program and marked as one that did not compress ([`Pte::packed`] as [`Tier::Raw`]).
    pub fn is_incompressible(self) -> bool {
        self.tag() == Tag::Resident && self.pool_tier() == Tier::Raw
    }
    fn pool_tier(self) -> Tier {
        match (self.0 & TIER_MASK) >> TIER_SHIFT {
            0 => Tier::Warm,
            1 => Tier::Dense,
            _ => Tier::Raw,
        }
    }
    fn with_handle(self, handle: u32) -> Self {
        Self((self.0 & 0xffff_ffff) | (u64::from(handle) << 32))
    }
    /// The same entry with a kept copy in the pool.
    pub fn with_copy(self, handle: u32) -> Self {
        Self(self.with_handle(handle).0 | COPY)
    }
    /// The same entry under another tag; it keeps its copy.
    pub fn tagged(self, tag: Tag) -> Self {
        let new = Self::new(tag, self.aux());
        self.copy().map_or(new, |handle| new.with_copy(handle))
    }
    /// The tag.
    pub fn tag(self) -> Tag {
        match self.0 & 7 {
            0 => Tag::None,
            1 => Tag::Resident,
            2 => Tag::Staged,
            3 => Tag::Compressed,
            4 => Tag::Zero,
            5 => Tag::Busy,
            6 => Tag::Poisoned,
            _ => Tag::Disk,
        }
    }
    /// The state that the page map shows. The entry of a page on a server says disk: see [`PageTable::disk_is_remote`].
    pub fn state(self) -> PageState {
        PageState(match self.tag() {
            Tag::None => 0,
            Tag::Resident => PRESENT,
            Tag::Staged | Tag::Busy => SWAPPED | Tier::Staged.bits(),
            Tag::Compressed => SWAPPED | self.pool_tier().bits(),
            Tag::Zero => SWAPPED | ZERO,
            Tag::Disk => SWAPPED | Tier::Disk.bits(),
            Tag::Poisoned => SWAPPED | Tier::Lost.bits(),
        })
    }
    /// Slot or stamp, or index and eviction stamp (26 bits).
    pub fn aux(self) -> u32 {
        ((self.0 >> AUX_SHIFT) & AUX_MASK) as u32
    }
    /// Whether the page has been in the program since it was listed with `stamp`.
    pub fn is_listed_as(self, stamp: u32) -> bool {
        self.tag() == Tag::Resident && self.aux() == stamp
    }
    /// The kept copy, if there is one.
    pub fn copy(self) -> Option<u32> {
        (self.0 & COPY != 0).then_some((self.0 >> 32) as u32)
    }
    /// The object of a compressed page, or the place of a page on disk.
    pub fn handle(self) -> u32 {
        (self.0 >> 32) as u32
    }
    /// The index of a compressed page in its object.
    pub fn index(self) -> usize {
        (self.aux() & ((1 << INDEX_BITS) - 1)) as usize
    }
    /// The eviction stamp of a compressed page (21 bits, the low 4 of them clear).
    pub fn evicted_at(self) -> u32 {
        self.aux() >> INDEX_BITS << STAMP_SHIFT
    }
    /// The refault distance of a compressed page, as in the kernel's workingset: the pages evicted after it, where
    /// `evictions` is the stamp of the latest eviction.
    pub fn refault_distance(self, evictions: u32) -> usize {
        (evictions.wrapping_sub(self.evicted_at()) & STAMP_MASK) as usize
    }
}

/// Pages in a leaf.
pub const LEAF_PAGES: u64 = 64;
/// Pages in a block that has hints of its own.
const BLOCK_PAGES: u64 = 16;

/// Hint of a 64 KiB block: it was last faulted on in sequence.
pub const HINT_SEQUENTIAL: u8 = 1;
/// The block is written to: its kept copies turned out to be stale. Cleared when a page of it leaves clean.
pub const HINT_WRITTEN: u8 = 2;
/// The block was last faulted on at random.
pub const HINT_RANDOM: u8 = 4;
/// A page of the block was read back since one was last written to disk: see [`crate::shrinker`].
pub const HINT_REUSED: u8 = 8;

/// The block is part of a folio that left as a huge page.
pub const HINT_HUGE: u8 = 16;
/// How recently pages of the block were in use: a two-bit number at [`HEAT_SHIFT`].
pub const HINT_HEAT: u8 = 3 << HEAT_SHIFT;
/// See [`HINT_HEAT`].
pub const HEAT_SHIFT: u32 = 5;
// Two hints once shared a bit: with a swap file, each block read back was taken for part of a huge page.
const _: () = assert!(
    HINT_SEQUENTIAL + HINT_WRITTEN + HINT_RANDOM + HINT_REUSED + HINT_HUGE + HINT_HEAT
        == HINT_SEQUENTIAL | HINT_WRITTEN | HINT_RANDOM | HINT_REUSED | HINT_HUGE | HINT_HEAT
);

/// Pages of the address space that the table covers: the 47 bits that the kernel hands out unless a program asks for
/// more.
pub const ADDRESS_SPACE_PAGES: u64 = 1 << 35;
const _: () = assert!(tree::LEAVES * LEAF_PAGES == ADDRESS_SPACE_PAGES);

/// The state to publish for a page, where pages on disk are on tier `disk`.
fn state_of(pte: Pte, disk: Tier) -> PageState {
    if pte.tag() == Tag::Disk { PageState(SWAPPED | disk.bits()) } else { pte.state() }
}

/// The state of a page with its soft-dirty and write-protected bits.
fn with_bits(state: PageState, written: bool, protected: bool) -> PageState {
    PageState(state.0 | if written { SOFT_DIRTY } else { 0 } | if protected { WRITE_PROTECTED } else { 0 })
}

/// The table.
pub struct PageTable {
    tree: Tree,
    /// The published map, and the page at its start.
    published: Option<(PageMapWriter<'static>, u64)>,
    /// Whether soft-dirty bits are published too.
    soft_dirty: bool,
    /// The tier to publish for pages on disk.
    disk: Tier,
    /// Stretches that became empty, if the caller asked for them.
    emptied: Option<Vec<u64>>,
    /// Pages in the pool that did not compress.
    raw: usize,
}

impl Default for PageTable {
    fn default() -> Self {
        Self::new()
    }
}

impl PageTable {
    /// An empty table.
    pub fn new() -> Self {
        Self { tree: Tree::default(), published: None, soft_dirty: false, disk: Tier::Disk, emptied: None, raw: 0 }
    }

    /// The swap file is on a server: pages on disk are published as [`Tier::Remote`] from now on.
    pub fn disk_is_remote(&mut self) {
        self.disk = Tier::Remote;
    }

    /// Publishes soft-dirty bits from now on, for all known pages: a page is soft-dirty unless it is clean.
    pub fn publish_soft_dirty(&mut self) {
        self.soft_dirty = true;
        self.for_each(|vpn, pte| self.tell(vpn, pte));
    }

    /// Publishes the state of every page, now and from now on, in a map whose first page is `first`. Pages beyond the
    /// map are left out.
    pub fn publish(&mut self, map: PageMapWriter<'static>, first: u64) {
        self.published = Some((map, first));
        self.for_each(|vpn, pte| self.tell(vpn, pte));
    }

    /// Stops publishing; the map may go.
    pub fn unpublish(&mut self) {
        (self.published, self.emptied) = (None, None);
    }

    /// Records from now on which stretches become empty: see [`PageTable::take_emptied`].
    pub fn note_emptied(&mut self) {
        self.emptied.get_or_insert_default();
    }

    /// The stretches ([`STRETCH_PAGES`] long, by number) that became empty since the last call. All that is published
    /// of them is zeros.
    pub fn take_emptied(&mut self) -> Vec<u64> {
        let mut emptied = self.emptied.as_mut().map(core::mem::take).unwrap_or_default();
        // Something may have come there since.
        emptied.retain(|n| self.next_known(n * STRETCH_PAGES).is_none_or(|vpn| vpn >= (n + 1) * STRETCH_PAGES));
        emptied
    }

    #[inline]
    fn tell(&self, vpn: u64, pte: Pte) {
        if let Some((map, first)) = &self.published {
            let page = vpn.wrapping_sub(*first);
            if page < map.pages() {
                let written = self.soft_dirty && pte.tag() != Tag::None && !self.is_clean(vpn);
                map.publish(page, with_bits(state_of(pte, self.disk), written, self.is_protected(vpn)));
            }
        }
    }

    /// Whether the page is known not to have been written to: see [`PageTable::set_clean`].
    pub fn is_clean(&self, vpn: u64) -> bool {
        self.leaf(vpn).is_some_and(|l| l.clean.has(vpn))
    }

    /// Whether a thread that writes to the page must wait: see [`PageTable::set_protected`].
    pub fn is_protected(&self, vpn: u64) -> bool {
        self.leaf(vpn).is_some_and(|l| l.protected.has(vpn))
    }

    /// Sets whether a thread that writes to the page must wait until a client was told. Changes of the page's entry
    /// leave this as it is, except that a page set to [`Pte::NONE`] is no longer protected.
    ///
    /// # Panics
    /// When the page is beyond the 47-bit address space.
    pub fn set_protected(&mut self, vpn: u64, protected: bool) {
        if self.is_protected(vpn) != protected {
            self.leaf_mut(vpn).protected.put(vpn, protected);
            self.tell(vpn, self.get(vpn));
        }
    }

    /// The first protected page at or after `from`.
    pub fn next_protected(&self, from: u64) -> Option<u64> {
        self.next(from, |leaf, vpn| leaf.protected.has(vpn))
    }

    /// Sets whether the page is clean: not written to since this call. Changes of the page's entry leave this as it is,
    /// except that a page set to [`Pte::NONE`] is no longer clean.
    ///
    /// # Panics
    /// When the page is beyond the 47-bit address space.
    pub fn set_clean(&mut self, vpn: u64, clean: bool) {
        if self.is_clean(vpn) != clean {
            self.leaf_mut(vpn).clean.put(vpn, clean);
            self.tell(vpn, self.get(vpn));
        }
    }

    fn leaf(&self, vpn: u64) -> Option<&Leaf> {
        self.tree.leaf(vpn / LEAF_PAGES)
    }

    fn leaf_mut(&mut self, vpn: u64) -> &mut Leaf {
        self.tree.leaf_mut(vpn / LEAF_PAGES)
    }

    /// The entry of a page.
    pub fn get(&self, vpn: u64) -> Pte {
        self.leaf(vpn).map_or(Pte::NONE, |l| l.ptes[in_leaf(vpn)])
    }

    /// Sets the entry of a page.
    ///
    /// # Panics
    /// When the page is beyond the 47-bit address space.
    pub fn set(&mut self, vpn: u64, pte: Pte) {
        if pte == Pte::NONE && self.leaf(vpn).is_none() {
            return;
        }
        let leaf = self.leaf_mut(vpn);
        let old = core::mem::replace(&mut leaf.ptes[in_leaf(vpn)], pte);
        if pte == Pte::NONE {
            leaf.forget(vpn);
        }
        self.raw = self.raw + usize::from(pte.is_raw()) - usize::from(old.is_raw());
        self.tell(vpn, pte);
    }

    /// Sets the entries of `n` pages; `pte(i)` is that of the i-th, and must not be [`Pte::NONE`].
    ///
    /// # Panics
    /// As [`PageTable::set`].
    pub fn set_run(&mut self, vpn: u64, n: usize, mut pte: impl FnMut(usize) -> Pte) {
        let (mut at, end, published) = (vpn, vpn + n as u64, self.published);
        let (soft_dirty, disk) = (self.soft_dirty, self.disk);
        while at < end {
            let stop = end.min((at / LEAF_PAGES + 1) * LEAF_PAGES);
            let first = (at % LEAF_PAGES) as usize;
            let leaf = self.leaf_mut(at);
            let (clean, protected) = (leaf.clean, leaf.protected);
            let entries = &mut leaf.ptes[first..first + (stop - at) as usize];
            let (mut more, mut fewer) = (0, 0);
            for (i, entry) in entries.iter_mut().enumerate() {
                fewer += usize::from(entry.is_raw());
                *entry = pte((at - vpn) as usize + i);
                more += usize::from(entry.is_raw());
            }
            if let Some((map, origin)) = published {
                let (from, to) = (at.max(origin), stop.min(origin + map.pages()));
                if from < to {
                    let state = |i: u64| {
                        let page = from + i;
                        let state = state_of(entries[(page - at) as usize], disk);
                        with_bits(state, soft_dirty && !clean.has(page), protected.has(page))
                    };
                    map.publish_run(from - origin, to - from, state);
                }
            }
            self.raw = self.raw + more - fewer;
            at = stop;
        }
    }

    /// The hints of the 64 KiB block of a page.
    pub fn hints(&self, vpn: u64) -> u8 {
        self.leaf(vpn).map_or(0, |l| l.hints[(vpn % LEAF_PAGES / BLOCK_PAGES) as usize])
    }

    /// Sets and clears hints of the 64 KiB block of a page.
    ///
    /// # Panics
    /// When the page is beyond the 47-bit address space.
    pub fn hint(&mut self, vpn: u64, set: u8, clear: u8) {
        let h = &mut self.leaf_mut(vpn).hints[(vpn % LEAF_PAGES / BLOCK_PAGES) as usize];
        *h = (*h & !clear) | set;
    }

    /// Empties the entries of `[from, to)`, and passes those that were not empty to `gone`. Clears the hints of blocks
    /// that lie entirely inside, and frees leaves and inner nodes that became empty.
    ///
    /// The story: a leaf was freed only if one call emptied it, and inner nodes never were. V8 maps its heap in pieces
    /// of 256 KiB at random addresses of its own choice, and each that came and went left some 8 KiB behind.
    pub fn clear(&mut self, from: u64, to: u64, mut gone: impl FnMut(u64, Pte)) {
        let mut at = from;
        while let Some(start) = self.next_known(at).filter(|vpn| *vpn < to) {
            at = to.min((start / LEAF_PAGES + 1) * LEAF_PAGES);
            self.clear_in_leaf(start, at, &mut gone);
        }
    }

    /// Empties `[from, end)`, which lies in one leaf.
    fn clear_in_leaf(&mut self, from: u64, end: u64, gone: &mut impl FnMut(u64, Pte)) {
        let Some(leaf) = self.tree.existing(from / LEAF_PAGES) else { return };
        for v in from..end {
            let protected = leaf.protected.has(v);
            leaf.forget(v);
            let pte = core::mem::take(&mut leaf.ptes[in_leaf(v)]);
            self.raw -= usize::from(pte.is_raw());
            if (pte != Pte::NONE || protected)
                && let Some((map, first)) = &self.published
                && v.wrapping_sub(*first) < map.pages()
            {
                map.publish(v - first, PageState(0));
            }
            if pte != Pte::NONE {
                gone(v, pte);
            }
        }
        if leaf.is_empty() {
            if self.tree.remove(from / LEAF_PAGES)
                && let Some(emptied) = &mut self.emptied
            {
                emptied.push(from / STRETCH_PAGES);
            }
            return;
        }
        // How the old memory was used says nothing about what replaces it.
        let blocks = (from % LEAF_PAGES).div_ceil(BLOCK_PAGES)..(from % LEAF_PAGES + (end - from)) / BLOCK_PAGES;
        blocks.for_each(|block| leaf.hints[block as usize] = 0);
    }

    /// The first page at or after `from` that has a leaf, so something may be known of it.
    pub fn next_known(&self, from: u64) -> Option<u64> {
        let (leaf, _) = self.tree.next(from / LEAF_PAGES)?;
        Some(from.max(leaf * LEAF_PAGES))
    }

    /// The first page at or after `from` whose entry is not empty.
    pub fn next_used(&self, from: u64) -> Option<u64> {
        self.next(from, |leaf, vpn| leaf.ptes[in_leaf(vpn)] != Pte::NONE)
    }

    /// The first page at or after `from`, among those that have a leaf, for which `is` holds.
    fn next(&self, from: u64, is: impl Fn(&Leaf, u64) -> bool) -> Option<u64> {
        let mut at = from;
        while let Some((n, leaf)) = self.tree.next(at / LEAF_PAGES) {
            let end = (n + 1) * LEAF_PAGES;
            let found = (at.max(n * LEAF_PAGES)..end).find(|vpn| is(leaf, *vpn));
            if found.is_some() {
                return found;
            }
            at = end;
        }
        None
    }

    /// Calls `f` for every page that is not [`Tag::None`].
    pub fn for_each(&self, mut f: impl FnMut(u64, Pte)) {
        let mut at = 0;
        while let Some((n, leaf)) = self.tree.next(at) {
            for (i, pte) in leaf.ptes.iter().enumerate().filter(|(_, pte)| **pte != Pte::NONE) {
                f(n * LEAF_PAGES + i as u64, *pte);
            }
            at = n + 1;
        }
    }

    /// Pages in the pool that did not compress ([`Tier::Raw`]).
    pub fn raw_pages(&self) -> usize {
        self.raw
    }

    /// Bytes of the table.
    pub fn metadata_bytes(&self) -> usize {
        self.tree.metadata_bytes() + size_of::<Self>()
    }
}

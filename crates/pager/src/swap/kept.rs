//! Places on disk that are kept: what was read back and not changed leaves again without being written.
//!
//! ```text
//!              read back                       taken by the program, unchanged            leaves, hash unchanged
//! Disk ──────────────────────▶ object + place ─────────────────────────────────▶ copy ──────────────────────▶ object + place
//!   ▲                             │    │                                          │                                │
//!   │                             │    └─ no copy is kept ─▶ stub: hash + place ──┴─ leaves, hash unchanged ─┐     │
//!   └── the shrinker meets it ◀───┘                                                                          │     │
//!   ├───────── did not compress: the page is on disk at once ◀───────────────────────────────────────────────┤     │
//!   │         compresses: stored anew, object + place ◀──────────────────────────────────────────────────────┘     │
//!   └──────────────────────────── the shrinker meets it ◀──────────────────────────────────────────────────────────┘
//! ```
//! As in the kernel's swap cache. Behind the bytes of an object that was read from disk stand its *place* and the index there
//! of its first page ([`object::ON_DISK`]); the books (`mm::swapfile`) say of each page of a place whether it is *kept*: in
//! memory too. When the shrinker meets such an object its pages become *Disk* again and nothing is written. What did not
//! compress is not kept in the pool next to the program's page, as that would be memory twice; a *stub* is, an object
//! without bytes: when the page leaves and its hash is that of the stub, it is on disk. What compresses, and whose copy the pool
//! does not keep (its block is written to, or memory is short), has a stub too, but is compressed again when it
//! leaves, as it may be wanted soon: the object then takes the place over, if the page is what it was, and units are cut as
//! they are on disk ([`State::kept_place`]).
//!
//! A kept place is given up page by page, with the page's reference to the object ([`State::release`]): when the page is
//! found changed, freed, moved (a copy) or stored anew. And it is not kept where room on disk is short: not from the moment
//! on when half of the file is in use, or of what the group may have there (the kernel's `vm_swap_full`), and when there is
//! no room left at all those that are kept are given up ([`State::give_up_kept`]). A forked child has its parent's kept
//! places as it has its places: both refer to the clusters, and nobody writes into what another refers to.

use super::{MOST_PAGES, Swap};
use crate::pager::Pager;
use crate::pool::object::{self, Header};
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::codec::Encoding;
use uzswap_mm::pageset::PageSet;
use uzswap_mm::pagetable::{HINT_RANDOM, HINT_REUSED, Pte, Tag};
use uzswap_mm::shrinker::Entry;
use uzswap_mm::swapfile::Place;
use uzswap_sys::process::Identity;
use uzswap_sys::thread;

/// Reads after which it is looked again whether room on disk is short.
const LOOK_EVERY: u32 = 64;
/// How often at most what the dead have there is looked for (nanoseconds); and of the time that has one part in so many.
const BURY_NS: u64 = 1_000_000_000;
const BURY_PART: u64 = 100;

/// Where on disk the pages of an object are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnDisk {
    /// The place.
    pub place: Place,
    /// The index there of the object's first page.
    pub first: u8,
}

impl OnDisk {
    /// Bytes behind those of an object.
    pub const BYTES: usize = 5;

    /// As it stands there.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let [a, b, c, d] = self.place.to_le_bytes();
        [a, b, c, d, self.first]
    }

    /// What stands there.
    pub fn from_bytes([a, b, c, d, first]: [u8; Self::BYTES]) -> Self {
        Self { place: Place::from_le_bytes([a, b, c, d]), first }
    }

    /// A page of the object as a bit of the place.
    pub fn bit(self, index: usize) -> u16 {
        1 << (self.first as usize + index)
    }
}

impl Swap {
    /// Whether what is read back now keeps its place; asked once for each read.
    pub(super) fn look_for_room(&mut self, pager: &Pager) {
        if self.until_look > 0 {
            self.until_look -= 1;
            return;
        }
        self.until_look = LOOK_EVERY;
        self.keeps = !self.is_short_of_room(pager);
    }

    /// Whether half of the file is in use, or of what the group may have there.
    pub(super) fn is_short_of_room(&self, pager: &Pager) -> bool {
        let used = self.books.used_bytes();
        self.map.is_half_full() || !pager.has_swap_room(used, used)
    }

    /// The same, after what is there of processes that have ended was freed, now and then; for the thread that writes.
    ///
    /// The story: that was done only where no room was found. A child that had ended left the file half full, so its parent kept no place
    /// any more, and wrote to disk again what it had only read: 363 MiB in all, for 130.
    pub(super) fn is_short_without_the_dead(&mut self, pager: &Pager) -> bool {
        let (short, now) = (self.is_short_of_room(pager), thread::now_ns());
        if !short || now < self.bury_at {
            return short;
        }
        self.map.bury_the_dead(Identity::own());
        let ended = thread::now_ns();
        self.bury_at = ended + BURY_NS.max((ended - now) * BURY_PART);
        self.is_short_of_room(pager)
    }

    /// The places of pages are kept: they are in memory too.
    pub(super) fn keep(&mut self, place: Place, pages: u16) {
        self.books.keep(place, pages);
        self.on_disk -= pages.count_ones() as usize;
    }

    /// Pages whose places were kept are on disk only.
    fn put_out(&mut self, place: Place, pages: u16) {
        self.books.put_out(place, pages);
        self.on_disk += pages.count_ones() as usize;
    }
}

impl State {
    /// Where on disk an object is too.
    pub fn on_disk(&self, handle: u32) -> Option<OnDisk> {
        (self.object(handle)[11] & object::ON_DISK != 0).then(|| OnDisk::from_bytes(self.behind_object(handle)))
    }

    /// Whether it is the stub of a page that compresses.
    pub fn is_packed_stub(&self, handle: u32) -> bool {
        self.is_stub(handle) && !matches!(Header::read(self.object(handle)).encoding, Encoding::Raw)
    }

    /// Where on disk a unit is of which this page, which has a stub, would be page `index`.
    pub(crate) fn stub_place(&self, vpn: u64, index: usize) -> Option<OnDisk> {
        let stub = self.pt.get(vpn).copy().filter(|handle| self.is_packed_stub(*handle))?;
        let at = self.on_disk(stub)?;
        Some(OnDisk { place: at.place, first: at.first.checked_sub(index as u8)? })
    }

    /// Of pages that were compressed, each with its index in the unit, and with hashes by that: where on disk they are, if
    /// none has changed and all lie side by side in one place. Their stubs say so.
    pub(crate) fn kept_place(&self, pages: impl Iterator<Item = (usize, u64)>, hashes: &[u128]) -> Option<OnDisk> {
        let mut found = None;
        for (i, vpn) in pages {
            let stub = self.pt.get(vpn).copy()?;
            let place = self.stub_place(vpn, i)?;
            let same = object::stored_hash(self.object(stub), 0) == hashes[i];
            if !same || *found.get_or_insert(place) != place {
                return None;
            }
        }
        found
    }

    /// An object that was stored has the place of a page's stub, which goes.
    pub(crate) fn hand_over_place(&mut self, vpn: u64) {
        let pte = self.pt.get(vpn);
        if let Some(stub) = pte.copy() {
            self.pt.set(vpn, Pte::new(pte.tag(), pte.aux()));
            self.release_object(stub, 0);
        }
    }

    /// Whether an object has no bytes, only a hash and a place.
    pub fn is_stub(&self, handle: u32) -> bool {
        Header::read(self.object(handle)).len == 0
    }

    /// Gives up the kept place of a page.
    pub(crate) fn release_kept(&mut self, at: OnDisk, index: usize) {
        if let Some(swap) = self.swap.as_mut() {
            swap.release(at.place, at.bit(index));
        }
    }

    /// A page that the program has taken, and that keeps no copy: if its object is on disk too and the page was not written
    /// to, a stub, which takes over its place there. The page's reference to the object is ended in any case.
    pub(crate) fn release_or_stub(&mut self, vpn: u64, pte: Pte, may: bool) -> Option<u32> {
        let (handle, index) = (pte.handle(), pte.index());
        let head = Header::read(self.object(handle));
        // (What compresses and is read at random is to be stored anew page by page, on disk too.)
        let anew = head.order > 0 && !matches!(head.encoding, Encoding::Raw) && self.pt.hints(vpn) & HINT_RANDOM != 0;
        let worth = may && !anew;
        let stub = self.on_disk(handle).filter(|_| worth).and_then(|at| self.put_stub(vpn, &head, at, handle, index));
        if stub.is_some() {
            self.release_object(handle, index);
        } else {
            self.release(handle, index);
        }
        stub
    }

    fn put_stub(&mut self, vpn: u64, of: &Header, at: OnDisk, handle: u32, index: usize) -> Option<u32> {
        let hash = object::stored_hash(self.object(handle), index);
        let head = Header { len: 0, order: 0, vpn, flags: 0, ..*of };
        let at = OnDisk { place: at.place, first: at.first + index as u8 };
        let set = |to: &mut [u8]| object::set_hash(to, 0, hash);
        self.put_object_on_disk(head, PageSet::first(1), set, &[], Some(at)).map(|handle| handle.raw())
    }

    /// A staged page is what its stub says it was: its entry is that of a page on disk. Its frame is the caller's to free.
    pub(crate) fn stub_to_disk(&mut self, vpn: u64, stub: u32) {
        let head = Header::read(self.object(stub));
        let Some(at) = self.on_disk(stub) else { return };
        self.release_object(stub, 0);
        let pte = head.entry(0, at.first as usize, self.evictions).on_disk(at.place);
        self.pt.set(vpn, pte);
        if let Some(swap) = self.swap.as_mut() {
            swap.put_out(at.place, at.bit(0));
        }
    }

    /// In a process that cannot open the file: false when it has pages that are only there. Places that are only kept it gives up.
    ///
    /// The story: a page that left as its stub said was on disk again, where nobody could read it.
    pub(crate) fn does_without_disk(&mut self) -> bool {
        let Some(mut swap) = self.swap.take() else { return true };
        let none = swap.on_disk == 0;
        if none {
            self.give_up_kept(&mut swap);
        }
        self.swap = Some(swap);
        none
    }

    /// Gives up the places of all that is in memory too; whether there were any. For when the file has no room left.
    pub(super) fn give_up_kept(&mut self, swap: &mut Swap) -> bool {
        let mut found = Vec::new();
        self.pt.for_each(|vpn, pte| {
            let handle = if pte.tag() == Tag::Compressed { Some(pte.handle()) } else { pte.copy() };
            if let Some(handle) = handle.filter(|handle| self.on_disk(*handle).is_some()) {
                found.push((vpn, handle));
            }
        });
        for (vpn, handle) in &found {
            // (Several pages may name one object, of which the first to be met ends the place.)
            let Some(at) = self.on_disk(*handle) else { continue };
            let object = self.object(*handle);
            let head = Header::read(object);
            object::live(object).iter().for_each(|i| swap.release(at.place, at.bit(i)));
            object::set_flags(self.object(*handle), 0, object::ON_DISK);
            if head.len == 0 {
                let pte = self.pt.get(*vpn);
                self.pt.set(*vpn, Pte::new(pte.tag(), pte.aux()));
                self.release_object(*handle, 0);
            }
        }
        !found.is_empty()
    }
}

impl Pager {
    /// The shrinker gives up an object that is on disk too, of which the pages `out` are out and `copies` have a copy: it
    /// leaves the pool, and nothing is written. The bytes that it freed.
    pub(super) fn put_out_kept(&self, s: &mut State, swap: &mut Swap, entry: Entry, out: u16, copies: u16) -> usize {
        let Some(at) = s.on_disk(entry.handle) else { return 0 };
        let (head, bytes) = (s.header_of(entry), s.object(entry.handle).len());
        if head.len == 0 {
            return 0;
        }
        for i in (0..MOST_PAGES).filter(|i| (out | copies) & (1 << i) != 0) {
            let vpn = entry.vpn + i as u64;
            let pte = s.pt.get(vpn);
            if out & (1 << i) != 0 {
                s.release_object(entry.handle, i);
                let index = at.first as u32 + i as u32;
                let gone = Pte::compressed(0, index as usize, pte.evicted_at()).packed(object::tier(head.encoding));
                s.pt.set(vpn, gone.on_disk(at.place));
                s.swapped -= 1;
                swap.put_out(at.place, at.bit(i));
                continue;
            }
            // The program has the page: what is kept of the copy is that it is on disk.
            let stub = s.put_stub(vpn, &head, at, entry.handle, i);
            s.release_object(entry.handle, i);
            let bare = Pte::new(pte.tag(), pte.aux());
            s.pt.set(vpn, stub.map_or(bare, |stub| bare.with_copy(stub)));
            if stub.is_none() {
                swap.release(at.place, at.bit(i));
            }
        }
        if out != 0 {
            s.pt.hint(entry.vpn, 0, HINT_REUSED);
        }
        self.counters().pswpout_clean.fetch_add(u64::from(out.count_ones()), Relaxed);
        bytes
    }
}

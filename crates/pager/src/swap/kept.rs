//! Kept places on disk: an object that was read back and has not changed leaves again without a write.
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
//! This works as in the kernel's swap cache. Behind the bytes of an object that was read from disk stand its *place* and the
//! index there of its first page ([`object::ON_DISK`]). The books (`mm::swapfile`) say for each page of a place whether it is
//! *kept*, that is, in memory too. When the shrinker meets such an object its pages become *Disk* again, and nothing is written.
//!
//! The pool keeps no copy of an incompressible page that the program has, as that would be memory twice. It keeps a *stub*, an
//! object without bytes: if the page leaves and its hash is the stub's, it is on disk. A page that compresses and whose copy the
//! pool does not keep (its block is written to, or memory is short) has a stub too. When it leaves it is compressed again, as it
//! may be wanted soon; the object then takes the place over, if the page is unchanged, and units are cut as they are on disk
//! ([`State::kept_place`]).
//!
//! A kept place is given up page by page, with the page's reference to the object ([`State::release`]): when the page is found
//! changed, freed, moved (a copy) or stored anew. Places are not kept while room on disk is short. From the moment at which 7/8
//! of the file, or of what the group may have there, are in use, no new ones are kept (see [`KEEP_UNTIL`]); when there is
//! no room left, all kept ones are given up ([`State::give_up_kept`]). A forked child has its parent's kept places as it has its
//! places: both processes refer to the clusters, and nobody writes into what another refers to.

use super::references::References;
use super::turns::wake_writer;
use super::writeback::RUN_BYTES;
use super::{MOST_PAGES, Swap};
use crate::pager::Pager;
use crate::pool::object::{self, Header};
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::codec::Encoding;
use uzswap_mm::pageset::PageSet;
use uzswap_mm::pagetable::{HINT_RANDOM, HINT_REUSED, Pte, Tag};
use uzswap_mm::shrinker::Entry;
use uzswap_mm::swapfile::{Object, Place};
use uzswap_sys::process::Identity;
use uzswap_sys::thread;

/// Eighths of the file, or of what the group may have there, from which on no new places are kept.
///
/// The story: the kernel's `vm_swap_full` says half, and so did this. But a program has little use for a file in which it may
/// fill half. One that read 192 MiB round and round with 300 MiB wrote all of it again in each round, and each round took five
/// times as long as with a larger file. The last eighth is for what is written while kept places are given up one by one.
const KEEP_UNTIL: usize = 7;
/// From half of the file on, none are kept either while more than one part in so many of what this process has there was written
/// for pages that have gone from it.
///
/// The story: of each block of four pages that was read back the program changed one. It was written elsewhere, and the others
/// went back to their place, which stayed as large as it was. After some rounds the file was full, though two thirds of it would
/// have been enough. A block of which no place is kept is written anew, without its gaps.
const MOST_WASTE: usize = 5;
/// Eighths from which on what goes to disk is to take less room there, and what dead processes have there is freed.
const SPARE_FROM: usize = 4;
/// Reads after which it is checked again whether room on disk is short. In a large file, which they fill less of, it is a read for
/// so many clusters, as all of them are looked at.
const LOOK_EVERY: u32 = 16;
const CLUSTERS_PER_READ: u32 = 256;
/// Members are asked to give up what they keep at most once in this time, whoever asks (nanoseconds). Nobody keeps anything new
/// while the file is as good as full, so who was asked has nothing by then.
const ASK_EVERY_NS: u64 = 900_000_000;
/// Least time between searches for what dead processes have on disk (nanoseconds); a search takes at most one part in so many of
/// the time.
const BURY_NS: u64 = 1_000_000_000;
const BURY_PART: u64 = 100;

/// Where on disk the pages of an object are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnDisk {
    /// The place.
    pub place: Place,
    /// Index there of the object's first page.
    pub first: u8,
}

impl OnDisk {
    /// Bytes that this takes behind an object.
    pub const BYTES: usize = 5;

    /// As stored behind an object.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let [a, b, c, d] = self.place.to_le_bytes();
        [a, b, c, d, self.first]
    }

    /// Reads what is stored there.
    pub fn from_bytes([a, b, c, d, first]: [u8; Self::BYTES]) -> Self {
        Self { place: Place::from_le_bytes([a, b, c, d]), first }
    }

    /// The bit in the place for page `index` of the object.
    pub fn bit(self, index: usize) -> u16 {
        1 << (self.first as usize + index)
    }
}

impl Swap {
    /// Decides whether objects read back now keep their places; called once for each read.
    pub(super) fn look_for_room(&mut self, pager: &Pager) {
        if self.until_look > 0 {
            self.until_look -= 1;
            return;
        }
        self.until_look = LOOK_EVERY.max(self.map.clusters() / CLUSTERS_PER_READ);
        let full = self.disk_is_full();
        self.is_spare = !full && !self.has_filled(pager, SPARE_FROM);
        let wastes = self.books.wasted_bytes() * MOST_WASTE > self.books.used_bytes();
        self.keeps = self.is_spare || !full && !wastes && !self.has_filled(pager, KEEP_UNTIL);
    }

    /// Whether an object that is read back keeps its place: from half of the file on, only one without gaps.
    pub(super) fn keeps(&self, place: Place) -> bool {
        let has_gaps = |object: Object| (object.live.count_ones() as usize) < object.pages;
        self.keeps && (self.is_spare || !self.books.get(place).is_some_and(has_gaps))
    }

    /// Whether so many eighths of the file are in use, or of what the group may have there.
    fn has_filled(&self, pager: &Pager, eighths: usize) -> bool {
        let used = self.books.used_bytes();
        self.map.has_filled(eighths) || !pager.has_swap_room(used, used / eighths * (8 - eighths))
    }

    /// For the writing thread: whether half of that is in use, after freeing now and then what ended processes have there.
    ///
    /// The story: that was freed only when no room was found. A child that had ended left the file half full. So its parent kept
    /// no places any more, and wrote to disk again what it had only read: 363 MiB in all, for 130.
    pub(super) fn is_short_without_the_dead(&mut self, pager: &Pager) -> bool {
        let (short, now) = (self.has_filled(pager, SPARE_FROM), thread::now_ns());
        if !short || now < self.bury_at {
            return short;
        }
        self.map.bury_the_dead(Identity::own());
        let ended = thread::now_ns();
        self.bury_at = ended + BURY_NS.max((ended - now) * BURY_PART);
        self.has_filled(pager, SPARE_FROM)
    }

    /// Marks the places of pages as kept: the pages are in memory too.
    pub(super) fn keep(&mut self, place: Place, pages: u16) {
        self.books.keep(place, pages);
        self.on_disk -= pages.count_ones() as usize;
    }

    /// Marks pages whose places were kept as on disk only.
    fn put_out(&mut self, place: Place, pages: u16) {
        self.books.put_out(place, pages);
        self.on_disk += pages.count_ones() as usize;
    }
}

impl State {
    /// Where on disk an object is too, if it is.
    pub fn on_disk(&self, handle: u32) -> Option<OnDisk> {
        (self.object(handle)[11] & object::ON_DISK != 0).then(|| OnDisk::from_bytes(self.behind_object(handle)))
    }

    /// Whether the object is the stub of a page that compresses.
    pub fn is_packed_stub(&self, handle: u32) -> bool {
        self.is_stub(handle) && !matches!(Header::read(self.object(handle)).encoding, Encoding::Raw)
    }

    /// Where on disk the unit begins in which this page, which has a stub, would be page `index`.
    pub(crate) fn stub_place(&self, vpn: u64, index: usize) -> Option<OnDisk> {
        let stub = self.pt.get(vpn).copy().filter(|handle| self.is_packed_stub(*handle))?;
        let at = self.on_disk(stub)?;
        Some(OnDisk { place: at.place, first: at.first.checked_sub(index as u8)? })
    }

    /// For pages that were compressed, each with its index in the unit and its hash at that index in `hashes`: where they are on
    /// disk, if none has changed and they all lie side by side in one place. Their stubs tell.
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

    /// A stored object takes the place of a page's stub over; the stub goes.
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

    /// Ends the reference to its object of a page that the program has taken and that keeps no copy. If the object is on disk too
    /// and the page was not written to, leaves a stub that takes over its place there.
    pub(crate) fn release_or_stub(&mut self, vpn: u64, pte: Pte, may: bool) -> Option<u32> {
        let (handle, index) = (pte.handle(), pte.index());
        let head = Header::read(self.object(handle));
        // A page that compresses and is read at random is to be stored anew by itself, on disk too.
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

    /// A staged page turns out to be what its stub says: makes its entry that of a page on disk. The caller frees its frame.
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

    /// In a process that cannot open the file: returns false if it has pages that are only there. Gives up places that are only
    /// kept.
    ///
    /// The story: a page that left with its stub's contents was on disk again, where nobody could read it.
    pub(crate) fn does_without_disk(&mut self) -> bool {
        let Some(mut swap) = self.swap.take() else { return true };
        let none = swap.on_disk == 0;
        if none {
            self.give_up_kept(&mut swap);
        }
        self.swap = Some(swap);
        none
    }

    /// Gives up the places of everything that is in memory too, because the file has no room left; returns whether there were
    /// any.
    pub(super) fn give_up_kept(&mut self, swap: &mut Swap) -> bool {
        if swap.books.kept_pages() == 0 {
            return false;
        }
        let mut found = Vec::new();
        self.pt.for_each(|vpn, pte| {
            let handle = if pte.tag() == Tag::Compressed { Some(pte.handle()) } else { pte.copy() };
            if let Some(handle) = handle.filter(|handle| self.on_disk(*handle).is_some()) {
                found.push((vpn, handle));
            }
        });
        found.iter().for_each(|(vpn, handle)| self.end_place(swap, *vpn, *handle));
        !found.is_empty()
    }

    /// Page `vpn`'s object gives up its place on disk, if it still has one: several pages may name one object, and the first one
    /// met ends the place.
    fn end_place(&mut self, swap: &mut Swap, vpn: u64, handle: u32) {
        let Some(at) = self.on_disk(handle) else { return };
        let object = self.object(handle);
        let head = Header::read(object);
        object::live(object).iter().for_each(|i| swap.release(at.place, at.bit(i)));
        object::set_flags(self.object(handle), 0, object::ON_DISK);
        if head.len == 0 {
            let pte = self.pt.get(vpn);
            self.pt.set(vpn, Pte::new(pte.tag(), pte.aux()));
            self.release_object(handle, 0);
        }
    }

    /// Gives up what is kept at one place, of pages that are where the place says: from `base` on.
    pub(super) fn give_up_place(&mut self, base: u64, place: Place) {
        let Some(mut swap) = self.swap.take() else { return };
        for i in 0..MOST_PAGES as u64 {
            let vpn = base.wrapping_add(i);
            let pte = self.pt.get(vpn);
            let handle = if pte.tag() == Tag::Compressed { Some(pte.handle()) } else { pte.copy() };
            let is_there = |handle: &u32| self.on_disk(*handle).is_some_and(|at| at.place == place);
            if let Some(handle) = handle.filter(is_there) {
                self.end_place(&mut swap, vpn, handle);
            }
        }
        self.swap = Some(swap);
    }

    /// Gives up what is only kept if another member has found no room since.
    pub(super) fn give_way(&mut self, swap: &mut Swap) {
        let asked = swap.map.asked.load(Acquire);
        if core::mem::replace(&mut swap.asked, asked) != asked {
            self.give_up_kept(swap);
        }
    }
}

impl Pager {
    /// Asks the other members to give up what they only keep, as there is no room left.
    ///
    /// The story: each gave up its own, and only when it wrote. An idle member kept most of the file, of pages that it had in memory
    /// as well, and the others exceeded the limit.
    ///
    /// Another story: each member without room asked all others, once a second. Of 17 sleeping members each was woken 16 times a
    /// second, to find that it kept nothing.
    pub(super) fn ask_for_room(&self, swap: &mut Swap) {
        // (In a time namespace the clock may be another.)
        let (now, all) = (thread::now_ns(), &swap.map.asked_at);
        if now.abs_diff(all.load(Relaxed)) < ASK_EVERY_NS {
            return;
        }
        all.store(now, Relaxed);
        // It has nothing itself by now.
        swap.asked = swap.map.asked.fetch_add(1, AcqRel).wrapping_add(1);
        let slots = self.group.used().iter().filter(|slot| slot.owner.load(Relaxed) != 0);
        slots.filter(|slot| !core::ptr::eq(*slot, self.me())).for_each(wake_writer);
    }

    /// Whether nothing may be written only because of what this process keeps (`memory.swap.max`), which it has given up now.
    ///
    /// The story: a process that had come to its `memory.swap.max` wrote nothing more, though much of that was of pages that it had
    /// in memory as well.
    pub(super) fn gives_way_to_itself(&self, s: &mut State, swap: &mut Swap) -> bool {
        self.may_write_back() && !self.has_swap_room(swap.books.used_bytes(), RUN_BYTES) && s.give_up_kept(swap)
    }

    /// The shrinker gives up an object that is on disk too. Its pages `out` are out, and `copies` have a copy. It leaves the pool
    /// without a write; returns the bytes that it freed.
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
            // The program has the page: of the copy only its place on disk is kept.
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

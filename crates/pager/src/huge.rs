//! Huge pages: folios of 2 MiB that the kernel maps with one entry.
//!
//! A huge page moves as one when source and destination are aligned alike and the destination has no page table. That
//! costs 15 µs where 512 pages cost 50, and where the first 4 KiB taken from a huge page costs 375 µs; and the program
//! keeps its huge pages across a swap cycle (the kernel's own swap-in splits them).
//!
//! ```text
//! program: huge page ──MOVE──▶ a free 2 MiB block of the arena, made *flat* ──▶ compressed as one folio of order 9
//!    ▲                              │ a fault before that: the whole moves back
//!    └── MOVE ── filled again ◀── a fault on the folio's first page, a free block that is *huge*
//! ```
//! The arena's 2 MiB blocks therefore have two marks. A block is *torn* when single pages were moved into or out of it:
//! it may have a page table. A torn hole is flattened before a huge page moves in: unregistered, mapped anew, registered
//! again. A block is *huge* while it holds a huge page that nobody has split.
//!
//! For the way back a block of frames is needed that is one huge page: that of a victim, or, when reclaim has made room
//! for it, a new one of the kernel's.
//!
//! Only a fault on a folio's first page brings it whole: who reads through memory meets it there, and who reads at random
//! does so once in 512 times. Marks are hints: what the kernel splits after all still moves, page by page, in the same
//! call.
//!
//! Owner: the pager's lock, though the marks are atomics (a MOVE has no access to the tables).

use crate::arena::{self, PAGE};
use crate::batch::BATCH_PAGES;
use crate::fault::EventPending;
use crate::folio::MAX_ORDER;
use crate::inject::Site;
use crate::pager::Pager;
use crate::state::{FOLIO_PAGES, State};
use core::sync::atomic::{AtomicU8, Ordering::*};
use uzswap_mm::pagetable::{HINT_HUGE, Tag};
use uzswap_mm::zone::Kind;
use uzswap_sys::pagemap;

/// Bytes of a huge page.
const HUGE_BYTES: usize = FOLIO_PAGES * PAGE;

const TORN: u8 = 1;
const HUGE: u8 = 2;

/// Marks of the arena's 2 MiB blocks.
pub struct Blocks(Vec<AtomicU8>);

impl Blocks {
    /// A new arena: nothing is torn.
    pub fn new(slots: usize) -> Self {
        Self((0..slots.div_ceil(FOLIO_PAGES)).map(|_| AtomicU8::new(0)).collect())
    }

    fn of(&self, slot: u32) -> &AtomicU8 {
        &self.0[slot as usize / FOLIO_PAGES]
    }

    /// Slots of a block were moved to or from: with single pages, unless all of a huge block was.
    pub fn moved(&self, slot: u32, n: usize) {
        let mark = self.of(slot);
        if n == FOLIO_PAGES && mark.load(Relaxed) & TORN == 0 {
            return;
        }
        for at in (slot as usize / FOLIO_PAGES)..=((slot as usize + n - 1) / FOLIO_PAGES) {
            if self.0[at].load(Relaxed) != TORN {
                self.0[at].store(TORN, Relaxed);
            }
        }
    }

    /// Whether the block of a slot holds a huge page.
    pub fn is_huge(&self, slot: u32) -> bool {
        self.of(slot).load(Relaxed) == HUGE
    }

    /// The memory of an aligned run was given back.
    pub fn given_back(&self, slot: u32, n: usize) {
        if n == FOLIO_PAGES {
            self.of(slot).fetch_and(!HUGE, Relaxed);
        } else {
            self.moved(slot, n);
        }
    }
}

impl Pager {
    /// Makes an aligned hole of 2 MiB ready for the huge page at `vpn`, where there is one. False when the hole is lost: it
    /// is no target of a MOVE any more, and must stay allocated.
    pub(crate) fn ready_for_huge(&self, vpn: u64, slot: u32) -> bool {
        let at = vpn as usize * PAGE;
        let fd = self.files.pagemap.load(Relaxed);
        if !pagemap::is_huge(fd, at) || self.blocks.of(slot).load(Relaxed) & TORN == 0 {
            return true;
        }
        let (hole, len) = (self.layout.slot(slot), FOLIO_PAGES * PAGE);
        // (Unmapping what is registered would raise an event to ourselves.)
        if !self.unregister_frames(hole, len) {
            return true;
        }
        // SAFETY: a hole holds nothing, and nobody else touches it.
        let fresh = unsafe { arena::remap(hole, len) };
        if !self.register_frames(hole, len) {
            return false;
        }
        if fresh {
            self.blocks.of(slot).store(0, Relaxed);
        }
        true
    }

    /// Marks a block into which a whole aligned folio was moved, when it is one huge page there.
    pub(crate) fn note_huge(&self, s: &mut State, vpn: u64, slot: u32) {
        if self.blocks.of(slot).load(Relaxed) & TORN == 0
            && pagemap::is_huge(self.files.pagemap.load(Relaxed), self.layout.slot(slot))
        {
            self.blocks.of(slot).store(HUGE, Relaxed);
            s.pt.hint(vpn, HINT_HUGE, 0);
            self.counters().folios.thp_move_out.fetch_add(1, Relaxed);
        } else {
            self.blocks.of(slot).store(TORN, Relaxed);
        }
    }

    /// Moves a staged huge page back whole, for a fault anywhere in it; None when the page is not of one.
    pub(crate) fn bring_staged_huge(&self, s: &mut State, vpn: u64) -> Result<Option<usize>, EventPending> {
        let slot = s.pt.get(vpn).aux();
        let into = vpn % FOLIO_PAGES as u64;
        if !self.blocks.is_huge(slot) || u64::from(slot) % FOLIO_PAGES as u64 != into {
            return Ok(None);
        }
        let (first, base) = (slot - into as u32, vpn - into);
        let whole = (0..FOLIO_PAGES as u32).all(|i| {
            let pte = s.pt.get(base + u64::from(i));
            pte.tag() == Tag::Staged && pte.aux() == first + i
        });
        if !whole {
            return Ok(None);
        }
        match self.move_in(s, base, first, FOLIO_PAGES) {
            Ok(()) => {
                self.free_slots_of(s, base, first, FOLIO_PAGES);
                self.blocks.of(first).fetch_and(!HUGE, Relaxed);
                self.counters().folios.thp_move_in.fetch_add(1, Relaxed);
                self.staged_became_resident(s, base, FOLIO_PAGES);
                Ok(Some(FOLIO_PAGES - into as usize))
            }
            Err((0, libc::EAGAIN)) => Err(EventPending),
            Err((done, _)) => {
                let n = done / PAGE;
                self.free_slots_of(s, base, first, n);
                if n > 0 {
                    self.staged_became_resident(s, base, n);
                }
                Ok((n as u64 > into).then(|| n - into as usize))
            }
        }
    }

    /// Whether a fault on a page is to bring a huge page whole: it is the first of a folio that left as one, all of which
    /// is in the pool.
    pub(crate) fn wants_huge(&self, s: &State, vpn: u64) -> bool {
        vpn.is_multiple_of(FOLIO_PAGES as u64)
            && s.pt.hints(vpn) & HINT_HUGE != 0
            && (0..FOLIO_PAGES as u64).all(|i| {
                // (What is clean or protected is copied, page by page.)
                let plain = !s.pt.is_clean(vpn + i) && !s.pt.is_protected(vpn + i);
                matches!(s.pt.get(vpn + i).tag(), Tag::Compressed | Tag::Zero) && plain
            })
    }

    /// A whole aligned folio came in from a block.
    pub(crate) fn brought_huge(&self, s: &mut State, vpn: u64, slot: u32) {
        if self.blocks.of(slot).fetch_and(!HUGE, Relaxed) == HUGE {
            self.counters().folios.thp_move_in.fetch_add(1, Relaxed);
        } else {
            s.pt.hint(vpn, 0, HINT_HUGE);
        }
    }

    /// Whether there is a block of frames for a huge page, once one was made where there was none.
    pub(crate) fn huge_frames(&self, s: &mut State) -> Result<bool, EventPending> {
        let found = self.inject(Site::Frames).is_none()
            && (self.has_huge_frames(s) || (self.room_for_huge(s)? && self.new_huge(s)));
        if !found {
            self.counters().folios.count(MAX_ORDER, |c| &c.anon_fault_fallback);
        }
        Ok(found)
    }

    /// Reclaims until a huge page may be taken from the kernel; false when that is not to be had.
    fn room_for_huge(&self, s: &mut State) -> Result<bool, EventPending> {
        for _ in 0..2 * FOLIO_PAGES / BATCH_PAGES {
            let over = self.excess(s) + HUGE_BYTES as isize;
            if over <= 0 || s.zone.free_slots(Kind::Frame) >= FOLIO_PAGES && self.has_huge_frames(s) {
                return Ok(true);
            }
            if self.at_floor(s) {
                break;
            }
            let (left, staged) = self.direct_round(s, BATCH_PAGES, 0, None);
            if left == 0 {
                staged?;
                break;
            }
            if !self.has_huge_frames(s) {
                self.give_back(s, (over as usize / PAGE).min(s.zone.free_slots(Kind::Frame)));
            }
        }
        Ok(self.excess(s) + HUGE_BYTES as isize <= 0)
    }

    /// Whether the block of frames that is given next is one huge page. (Others are 512 small pages that lie together.)
    fn has_huge_frames(&self, s: &mut State) -> bool {
        let Some(slot) = s.zone.alloc(Kind::Frame, MAX_ORDER) else { return false };
        s.zone.free(Kind::Frame, slot, MAX_ORDER);
        self.blocks.of(slot).load(Relaxed) == HUGE
    }

    /// Takes a huge page from the kernel as a free block of frames; true too where a victim's has become one.
    fn new_huge(&self, s: &mut State) -> bool {
        if self.has_huge_frames(s) {
            return true;
        }
        let Some(slot) = s.zone.alloc(Kind::Hole, MAX_ORDER) else { return false };
        let (at, len) = (self.layout.slot(slot), HUGE_BYTES);
        if !self.unregister_frames(at, len) {
            s.zone.free(Kind::Hole, slot, MAX_ORDER);
            return false;
        }
        // SAFETY: a hole holds nothing, nobody else touches it, and it is not registered.
        let huge = unsafe {
            let flat = self.blocks.of(slot).load(Relaxed) & TORN == 0 || arena::remap(at, len);
            let huge = flat && arena::touch_huge(at, len) && pagemap::is_huge(self.files.pagemap.load(Relaxed), at);
            if !huge {
                arena::discard(at, len);
            }
            self.blocks.of(slot).store(if huge { HUGE } else { TORN }, Relaxed);
            huge
        };
        if !self.register_frames(at, len) {
            // No target of a MOVE any more: the slots stay allocated for good, and nobody uses them.
            // SAFETY: as above.
            unsafe { arena::discard(at, len) };
            return false;
        }
        if huge {
            s.rss += len;
        }
        s.zone.free(if huge { Kind::Frame } else { Kind::Hole }, slot, MAX_ORDER);
        huge
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const N: u32 = FOLIO_PAGES as u32;

    fn marks(blocks: &Blocks) -> Vec<u8> {
        blocks.0.iter().map(|mark| mark.load(Relaxed)).collect()
    }

    #[test]
    fn single_pages_tear_the_blocks_they_touch_and_whole_folios_do_not() {
        let blocks = Blocks::new(4 * FOLIO_PAGES);
        blocks.moved(0, FOLIO_PAGES);
        assert_eq!(marks(&blocks), [0; 4], "a whole folio");
        blocks.moved(2 * N + 5, 1);
        assert_eq!(marks(&blocks), [0, 0, TORN, 0]);
        blocks.moved(N - 1, 2);
        assert_eq!(marks(&blocks), [TORN, TORN, TORN, 0], "two pages in two blocks");
        blocks.moved(2 * N, FOLIO_PAGES);
        assert_eq!(marks(&blocks), [TORN, TORN, TORN, 0], "what is torn stays so");
    }

    #[test]
    fn a_huge_block_is_one_until_it_is_touched_in_part_or_given_back() {
        let blocks = Blocks::new(2 * FOLIO_PAGES);
        for slot in [0, N] {
            blocks.of(slot).store(HUGE, Relaxed);
        }
        blocks.moved(N, FOLIO_PAGES);
        assert!(blocks.is_huge(N + 7), "moved as one");
        blocks.moved(N + 3, 1);
        assert!(!blocks.is_huge(N) && blocks.is_huge(0));
        blocks.given_back(0, FOLIO_PAGES);
        assert_eq!(marks(&blocks), [0, TORN], "what was given back whole is flat");
    }
}

//! Huge pages: folios of 2 MiB that the kernel maps with one entry.
//!
//! A huge page moves as one when source and destination are aligned alike and the destination has no page table. That costs 15
//! µs, where 512 pages cost 50, and taking the first 4 KiB out of a huge page costs 375. And the program keeps its huge pages
//! across a swap cycle, where the kernel's own swap-in splits them.
//!
//! ```text
//! program: huge page ──MOVE──▶ a free 2 MiB block of the arena, made *flat* ──▶ compressed as one folio of order 9
//!    ▲                              │ a fault before that: the whole moves back
//!    └── MOVE ── filled again ◀── a fault on the folio's first page, a free block that is *huge*
//! ```
//! So the arena's 2 MiB blocks have two marks. A block is *torn* when single pages were moved into or out of it: it may have a
//! page table. A torn hole is flattened before a huge page moves in: unregistered, mapped anew, registered again. A block is
//! *huge* while it holds a huge page that nobody has split.
//!
//! The way back needs a block of frames that is one huge page: a victim's, or a new one from the kernel once reclaim has made
//! room for it.
//!
//! Only a fault on a folio's first page brings it whole: a program that reads through memory faults there, and one that reads at
//! random does so once in 512 times. The marks are hints: what the kernel splits after all still moves, page by page, in the same
//! call.
//!
//! New memory comes as huge pages, too, where a stream continues into one that was never touched, the kernel would have given one
//! (`thp`), and there is room for it: 300 µs for 2 MiB, where four times 512 KiB of small pages take 800. Nothing is reclaimed
//! for that: small pages do as well, and evicted ones may be wanted.
//!
//! Owner: the pager's lock, although the marks are atomics (a MOVE has no access to the tables).

use crate::fault::deliver::Delivery;
use crate::fault::streams::{WINDOW_PAGES, Way, Window};
use crate::fault::{EventPending, Request};
use crate::frames::arena::{self, PAGE};
use crate::group::folio::MAX_ORDER;
use crate::inject::Site;
use crate::pager::Pager;
use crate::pool::batch::BATCH_PAGES;
use crate::state::{FOLIO_PAGES, State};
use core::sync::atomic::{AtomicU8, Ordering::*};
use uzswap_mm::pagetable::{HINT_HUGE, Tag};
use uzswap_mm::zone::Kind;
use uzswap_sys::{maps, pagemap};

/// Bytes in a huge page.
const HUGE_BYTES: usize = FOLIO_PAGES * PAGE;

/// A fault brings at most one new huge page for each `OF_SHARE` of them that a member's part of the limit has room for, as they
/// come ahead of need. Members that are not engaged count too: of eight that begin at once under 160 MiB, the first would take
/// what the others fill unmanaged (MEASUREMENTS.md).
const OF_SHARE: usize = 16;
/// How many new huge pages one fault brings at most. (Before the kernel asks userfaultfd it takes a huge page and clears it, for
/// nothing: 100 µs a fault. Where it is told not to, it makes a page table first, and what is moved there is split.)
const NEW_MOST: usize = 4;
/// How many faults to wait before the kernel is asked again for a huge page that it did not have.
const ASK_EVERY: u64 = 256;

const TORN: u8 = 1;
const HUGE: u8 = 2;

/// The marks of the arena's 2 MiB blocks.
pub struct Blocks(Vec<AtomicU8>);

impl Blocks {
    /// The marks of a new arena: nothing is torn.
    pub fn new(slots: usize) -> Self {
        Self((0..slots.div_ceil(FOLIO_PAGES)).map(|_| AtomicU8::new(0)).collect())
    }

    fn of(&self, slot: u32) -> &AtomicU8 {
        &self.0[slot as usize / FOLIO_PAGES]
    }

    /// Notes that slots were moved to or from. That tears their blocks, unless it was all of a block that is not torn.
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

    /// Whether a slot's block holds a huge page.
    pub fn is_huge(&self, slot: u32) -> bool {
        self.of(slot).load(Relaxed) == HUGE
    }

    /// Notes that the memory of an aligned run was given back.
    pub fn given_back(&self, slot: u32, n: usize) {
        if n == FOLIO_PAGES {
            self.of(slot).fetch_and(!HUGE, Relaxed);
        } else {
            self.moved(slot, n);
        }
    }
}

impl Pager {
    /// Whether parts of the arena may be mapped anew. (In a region they would no longer be kept from children, and so would not
    /// be one mapping with the rest.)
    fn may_remap(&self) -> bool {
        !self.own_frames
    }

    /// Makes an aligned hole of 2 MiB ready for the huge page at `vpn`, if there is one. False when the hole is lost: it is no
    /// target of a MOVE any more, and must stay allocated.
    pub(crate) fn ready_for_huge(&self, vpn: u64, slot: u32) -> bool {
        let at = vpn as usize * PAGE;
        let fd = self.files.pagemap.load(Relaxed);
        if !self.may_remap() || !pagemap::is_huge(fd, at) || self.blocks.of(slot).load(Relaxed) & TORN == 0 {
            return true;
        }
        let (hole, len) = (self.layout.slot(slot), FOLIO_PAGES * PAGE);
        // Unmapping registered memory would raise an event to ourselves.
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

    /// Marks a block into which a whole aligned folio was moved, if it is one huge page there.
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

    /// Moves a staged huge page back whole, for a fault anywhere in it; None when the page is not part of one.
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

    /// Whether a fault on a page is to bring a huge page whole: the page is the first of a folio that left as one, and all of the
    /// folio is in the pool.
    pub(crate) fn wants_huge(&self, s: &State, vpn: u64) -> bool {
        vpn.is_multiple_of(FOLIO_PAGES as u64)
            && s.pt.hints(vpn) & HINT_HUGE != 0
            && (0..FOLIO_PAGES as u64).all(|i| {
                // A page that is clean or protected is copied by itself.
                let plain = !s.pt.is_clean(vpn + i) && !s.pt.is_protected(vpn + i);
                matches!(s.pt.get(vpn + i).tag(), Tag::Compressed | Tag::Zero) && plain
            })
    }

    /// Notes that a whole aligned folio came in from a block.
    pub(crate) fn brought_huge(&self, s: &mut State, vpn: u64, slot: u32) {
        if self.blocks.of(slot).fetch_and(!HUGE, Relaxed) == HUGE {
            self.counters().folios.thp_move_in.fetch_add(1, Relaxed);
        } else {
            s.pt.hint(vpn, 0, HINT_HUGE);
        }
    }

    /// Whether there is a block of frames for a huge page; tries to make one if there is none.
    pub(crate) fn huge_frames(&self, s: &mut State) -> Result<bool, EventPending> {
        let found = self.inject(Site::Frames).is_none()
            && (self.has_huge_frames(s) || (self.may_ask_for_huge(s) && self.room_for_huge(s)? && self.new_huge(s)));
        if !found {
            self.counters().folios.count(MAX_ORDER, |c| &c.anon_fault_fallback);
        }
        Ok(found)
    }

    /// Reclaims until a huge page may be taken from the kernel; false when that cannot be had.
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

    /// Whether the next block of frames to be allocated is one huge page. (Others are 512 small pages that lie together.)
    fn has_huge_frames(&self, s: &mut State) -> bool {
        let Some(slot) = s.zone.alloc(Kind::Frame, MAX_ORDER) else { return false };
        s.zone.free(Kind::Frame, slot, MAX_ORDER);
        self.blocks.of(slot).load(Relaxed) == HUGE
    }

    /// Takes a huge page from the kernel as a free block of frames; true also where a victim's has become one.
    fn new_huge(&self, s: &mut State) -> bool {
        self.has_huge_frames(s)
            || self.ask_for_huge(s).is_some_and(|slot| {
                s.zone.free(Kind::Frame, slot, MAX_ORDER);
                true
            })
    }

    /// Brings huge pages of zeros for a fault on new memory, and counts them; false where that cannot be done.
    ///
    /// # Errors
    /// [`EventPending`], as [`Pager::serve`].
    pub(crate) fn bring_new_huge(&self, s: &mut State, r: Request, window: Window) -> Result<bool, EventPending> {
        let goes_on = window.way == Way::Up && !window.known_only && window.pages == WINDOW_PAGES;
        if !goes_on || !self.may_ask_for_huge(s) {
            return Ok(false);
        }
        let mut d = Delivery::of(r, false);
        let n =
            self.all_at_once(true, || self.bring_new_huge_pages(s, r.vpn, self.new_huge_pages(s, r.vpn), &mut d))?;
        if n > 0 {
            s.streams.brought(window.stream, r.vpn, r.vpn + n as u64, |vpn| s.pt.get(vpn).tag() == Tag::Resident);
            self.count_delivery(s, &d);
        }
        Ok(n > 0)
    }

    /// Brings up to `most` new huge pages, as far as it gets; returns how many small pages that is.
    fn bring_new_huge_pages(
        &self,
        s: &mut State,
        vpn: u64,
        most: usize,
        d: &mut Delivery,
    ) -> Result<usize, EventPending> {
        let mut n = 0;
        while n < most * FOLIO_PAGES && self.wants_new_huge(s, vpn + n as u64) {
            let Some(slot) = self.huge_of_zeros(s) else { break };
            let (moved, pending) = self.move_in_huge(s, vpn + n as u64, slot);
            self.brought_out::<FOLIO_PAGES>(s, vpn + n as u64, moved, d);
            n += moved;
            if pending && n == 0 {
                return Err(EventPending);
            }
            if moved < FOLIO_PAGES {
                break;
            }
        }
        Ok(n)
    }

    /// How many huge pages a fault on new memory brings: one, or several where the stream just came through another.
    fn new_huge_pages(&self, s: &State, vpn: u64) -> usize {
        let is_there = |pages: u64| vpn.checked_sub(pages).is_some_and(|at| s.pt.get(at).tag() == Tag::Resident);
        let each = self.limit() / (1 + self.others_count());
        let most = (each / (OF_SHARE * HUGE_BYTES)).min(NEW_MOST);
        if is_there(1) && is_there(FOLIO_PAGES as u64) { most } else { most.min(1) }
    }

    /// Moves in an allocated block of frames, as far as it gets. Returns how many pages came, and whether an event must be read
    /// first.
    fn move_in_huge(&self, s: &mut State, vpn: u64, slot: u32) -> (usize, bool) {
        let (moved, pending) = match self.move_in(s, vpn, slot, FOLIO_PAGES) {
            Ok(()) => (FOLIO_PAGES, false),
            Err((done, e)) => (done / PAGE, e == libc::EAGAIN),
        };
        self.free_slots_of(s, vpn, slot, moved);
        s.zone.free_run(Kind::Frame, slot + moved as u32, FOLIO_PAGES - moved);
        match moved {
            0 => {}
            FOLIO_PAGES => self.blocks.of(slot).store(0, Relaxed),
            _ => self.blocks.of(slot).store(TORN, Relaxed),
        }
        (moved, pending)
    }

    /// Whether new memory at a page may come as a huge page: see the file's head.
    fn wants_new_huge(&self, s: &State, vpn: u64) -> bool {
        let (end, at) = (vpn + FOLIO_PAGES as u64, vpn as usize * PAGE);
        vpn.is_multiple_of(FOLIO_PAGES as u64)
            && !self.without_move
            && self.brings_new(s)
            && self.may_be_huge(s, at, at + HUGE_BYTES)
            && s.pt.next_used(vpn).is_none_or(|used| used >= end)
            && !s.remapping.is_under_way()
            && s.before_ceded(vpn, end) == end
            && self.is_one_mapping(s, at, at + HUGE_BYTES)
    }

    /// Whether a range is in one mapping, which a MOVE must not leave.
    fn is_one_mapping(&self, s: &State, start: usize, end: usize) -> bool {
        match self.files.maps.load(Relaxed) {
            // A region's memory is one.
            -1 => s.managed.covers(start, end),
            maps => maps::mapping_at(maps, start).is_some_and(|(_, to, _)| to >= end),
        }
    }

    /// Allocates a block of frames that is a huge page of zeros: one that is there, or a new one from the kernel where the limit
    /// allows it.
    fn huge_of_zeros(&self, s: &mut State) -> Option<u32> {
        if self.inject(Site::Frames).is_some() {
            return None;
        }
        if self.has_huge_frames(s) {
            let slot = s.zone.alloc(Kind::Frame, MAX_ORDER)?;
            // SAFETY: the frames were just allocated, so nothing else uses them.
            unsafe { self.layout.frames_mut(slot, FOLIO_PAGES) }.fill(0);
            return Some(slot);
        }
        // Each of the other members may take one at this moment.
        let taken = HUGE_BYTES * (1 + self.others_count());
        if self.excess(s) + (taken + self.margin() / 2) as isize > 0 {
            return None;
        }
        self.ask_for_huge(s)
    }

    /// Whether the kernel may have a huge page by now, where it had none.
    fn may_ask_for_huge(&self, s: &State) -> bool {
        self.counters().pgfault.load(Relaxed) >= s.huge_due
    }

    /// As [`Pager::take_huge`]; if the kernel has none, it is not asked again for a while.
    fn ask_for_huge(&self, s: &mut State) -> Option<u32> {
        let slot = self.take_huge(s);
        if slot.is_none() {
            s.huge_due = self.counters().pgfault.load(Relaxed) + ASK_EVERY;
        }
        slot
    }

    /// Takes a huge page from the kernel: an allocated block of the arena that is all zeros.
    fn take_huge(&self, s: &mut State) -> Option<u32> {
        let slot = s.zone.alloc(Kind::Hole, MAX_ORDER)?;
        let (at, len) = (self.layout.slot(slot), HUGE_BYTES);
        if !self.unregister_frames(at, len) {
            s.zone.free(Kind::Hole, slot, MAX_ORDER);
            return None;
        }
        // SAFETY: a hole holds nothing, nobody else touches it, and it is not registered.
        let huge = unsafe {
            let flat = self.blocks.of(slot).load(Relaxed) & TORN == 0 || self.may_remap() && arena::remap(at, len);
            let huge = flat && arena::touch_huge(at, len) && pagemap::is_huge(self.files.pagemap.load(Relaxed), at);
            if !huge {
                arena::discard(at, len);
            }
            self.blocks.of(slot).store(if huge { HUGE } else { TORN }, Relaxed);
            huge
        };
        if !self.register_frames(at, len) {
            // The block is no target of a MOVE any more: its slots stay allocated for good, and nobody uses them.
            // SAFETY: as above.
            unsafe { arena::discard(at, len) };
            return None;
        }
        if huge {
            s.rss += len;
            self.charge_growth(s);
            return Some(slot);
        }
        s.zone.free(Kind::Hole, slot, MAX_ORDER);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use uzswap_sys::thp::Policy;

    const N: u32 = FOLIO_PAGES as u32;

    /// New memory comes as a huge page where a stream continues into one, it is allowed, and there is room. All of it is zeros,
    /// also where the huge page was used before. Whatever is missing or fails, small pages come.
    #[test]
    fn a_stream_goes_on_to_huge_pages_of_zeros() {
        const PAGES: usize = 4 * FOLIO_PAGES;
        let p = testing::pager(256 << 20);
        p.thp.set(Policy::Always);
        // Where the kernel maps nothing by itself.
        let first = (testing::memory_at(p, 0x2200_0000_0000, PAGES + FOLIO_PAGES - 1) / PAGE) as u64;
        let window = |pages: usize| Window { pages, way: Way::Up, known_only: false, stream: 1 };
        let come = |s: &mut State, at: u64, window: Window| {
            let r = Request { vpn: at, write: true, protected: false };
            s.huge_due = 0;
            p.bring_new_huge(s, r, window).unwrap_or_else(|_| panic!("no event is unread"))
        };
        let is_huge = |at: u64| pagemap::is_huge(p.files.pagemap.load(Relaxed), at as usize * PAGE);
        let s = &mut *p.state.lock();
        let full = window(WINDOW_PAGES);
        for refused in [Window { way: Way::Down, ..full }, Window { known_only: true, ..full }, window(64)] {
            assert!(!come(s, first, refused), "{refused:?}");
        }
        assert!(!come(s, first + 128, full), "not the first page");
        p.thp.set(Policy::Advised);
        assert!(!come(s, first, full), "nobody advised it");
        p.thp.set(Policy::Always);
        s.rss = 256 << 20;
        assert!(!come(s, first, full), "no room");
        s.rss = 0;
        p.group.faults.set("unregister=1/1", 1).unwrap();
        assert!(!come(s, first, full), "the arena stays as it is");
        p.group.faults.set("unregister=0/1,frames=1/1", 1).unwrap();
        assert!(!come(s, first, full), "no frames");
        p.group.faults.set("frames=0/1", 1).unwrap();
        assert_eq!((s.resident, s.rss, s.zone.free_slots(Kind::Frame)), (0, 0, 0), "nothing is lost meanwhile");
        if !come(s, first, full) {
            return testing::skip("the kernel has no huge page to give");
        }
        assert!(is_huge(first) && (s.resident, s.rss) == (FOLIO_PAGES, HUGE_BYTES));
        assert!(!come(s, first, full), "it is there");
        // SAFETY: just brought, and nobody else's.
        let bytes = |at: u64| unsafe { core::slice::from_raw_parts_mut((at as usize * PAGE) as *mut u8, HUGE_BYTES) };
        assert!(bytes(first).iter().all(|b| *b == 0));
        // Written to, evicted, and its frames used again.
        bytes(first).fill(7);
        let slot = s.zone.alloc(Kind::Hole, MAX_ORDER).expect("holes");
        assert!(p.ready_for_huge(first, slot));
        p.move_out(first, slot, FOLIO_PAGES).expect("it is there");
        p.note_huge(s, first, slot);
        s.zone.free(Kind::Frame, slot, MAX_ORDER);
        let second = first + FOLIO_PAGES as u64;
        s.rss = 256 << 20;
        assert!(come(s, second, full), "there are frames, whatever the limit");
        assert!(is_huge(second) && bytes(second).iter().all(|b| *b == 0));
        // Part of the next was touched before, and the one behind extends beyond the mapping.
        s.rss = 0;
        let third = second + FOLIO_PAGES as u64;
        testing::put(p, (third + 7) as usize * PAGE, &[1; PAGE]);
        s.list_resident(third + 7, 1, uzswap_mm::lru::List::Inactive, |_| None);
        assert!(!come(s, third, full) && !come(s, first + PAGES as u64, full));
        // What the kernel refuses to move comes small, and the frames stay.
        let fourth = third + FOLIO_PAGES as u64;
        p.group.faults.set("move_in=1/1", 1).unwrap();
        for _ in 0..20 {
            let (frames, resident) = (s.zone.free_slots(Kind::Frame), s.resident);
            let r = Request { vpn: fourth, write: true, protected: false };
            let came = p.bring_new_huge(s, r, full);
            let moved = s.resident - resident;
            assert_eq!(matches!(came, Ok(true)), moved > 0);
            let there =
                (fourth..fourth + FOLIO_PAGES as u64).filter(|vpn| s.pt.get(*vpn).tag() == Tag::Resident).count();
            assert_eq!(there, moved);
            let given = if frames == 0 { FOLIO_PAGES } else { frames };
            assert_eq!(s.zone.free_slots(Kind::Frame), given - moved, "no frame is lost");
            if moved > 0 {
                break;
            }
        }
    }

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

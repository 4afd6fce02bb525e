//! Staging by windows: the old pages around a single victim leave with it, so that one TLB flush serves all (see `shootdown`).
//!
//! Randomly used memory is listed page by page, and one MOVE takes only pages that follow each other. But MOVE can be told to
//! pass over missing pages, and half of the pages around a victim are missing. So one call, and one flush, takes all that are
//! there of 64 KiB, each to its own place in a run of holes, of which some stay holes.
//!
//! ```text
//! program   │ r │ - │ V │ - │ y │ r │ - │ r │     r: old as the victim is, - : known to be out, y: young
//!           └──────────────┘                      one MOVE, up to what must stay or is not known
//! holes     │ F │ · │ F │ · │
//! ```
//! The victim is the oldest page there is. A page that is not three quarters as old (half where each call interrupts other CPUs)
//! has far to go on its list, and ends the window. So does a page of which nothing is known, as it may be there; and a read-only
//! page that is being dropped (`read_only`): if taken, it would come back, be written to, and be dropped then.
//!
//! Invariant: what the holes hold afterwards was moved, whatever the kernel says and whatever was believed to be there. A page
//! that was not expected there is the program's own, and newer than what is known of it.
//!
//! Nobody unlinks the other pages from their lists: their entries become stale, like those of unmapped pages. All of this module
//! runs with the pager's lock held.

use crate::fault::EventPending;
use crate::group::folio::MAX_ORDER;
use crate::pager::Pager;
use crate::state::{BLOCK_PAGES, State};
use core::ops::Range;
use uzswap_mm::lru::{self, Entry};
use uzswap_mm::pagetable::{Pte, Tag};
use uzswap_mm::zone::Kind;

/// Slots of a window.
const SLOTS: u32 = BLOCK_PAGES as u32;

impl Pager {
    /// Whether a victim, a single page, is to leave with the pages around it. (Not where memory is shared after a fork: pages
    /// that cannot be moved would end each window.)
    pub(crate) fn goes_by_window(&self, s: &State, victim: Entry) -> bool {
        victim.order() == 0 && self.saves_flushes(s) && !self.has_kin() && !self.lets_go()
    }

    /// Moves out a page that is on no list, and the old pages around it. Returns how many left.
    ///
    /// # Errors
    /// [`EventPending`] when an unread event stopped it before anything moved.
    pub(crate) fn stage_window(&self, s: &mut State, victim: Entry) -> Result<usize, EventPending> {
        let vpn = victim.vpn();
        let (pages, go) = window(s, victim, self.interrupts_others(s));
        let len = (pages.end - pages.start) as usize;
        if len == 1 {
            return self.stage_run(s, vpn, 1);
        }
        let Some(slot) = self.take_window(s) else { return self.stage_run(s, vpn, 1) };
        let (there, result) = self.move_out_present(pages.start, slot, len, go);
        let moved = self.take_moved(s, pages.start, slot, there, go);
        free_holes(s, slot, there);
        if s.pt.get(vpn).tag() != Tag::Resident {
            return Ok(moved);
        }
        // The other pages that stay are still on their lists.
        let alone = if result == Err(libc::EAGAIN) {
            self.requeue(s, vpn, 1);
            Err(EventPending)
        } else {
            self.stage_run(s, vpn, 1)
        };
        match alone {
            Err(EventPending) if moved > 0 => Ok(moved),
            alone => alone.map(|n| n + moved),
        }
    }

    /// Takes holes for a window, behind those of the last one: pages staged together leave together, and their frames can then be
    /// given back in few calls.
    fn take_window(&self, s: &mut State) -> Option<u32> {
        if s.windows.is_empty() {
            let (slot, order) = self.take_holes(s, MAX_ORDER)?;
            s.windows = slot..slot + (1 << order);
        }
        // Fewer holes than a window needs are no use.
        if s.windows.end - s.windows.start < SLOTS {
            let few = core::mem::take(&mut s.windows);
            s.zone.free_run(Kind::Hole, few.start, few.len());
            return None;
        }
        let slot = s.windows.start;
        s.windows.start += SLOTS;
        Some(slot)
    }

    /// Notes the pages, from `first` on, that now are in the slots from `slot` on: those in the set `there`, of which those in
    /// `go` were to go.
    fn take_moved(&self, s: &mut State, first: u64, slot: u32, there: u64, go: u64) -> usize {
        for i in bits(there & !go) {
            let old = s.pt.get(first + i);
            s.pt.set(first + i, Pte::new(Tag::Resident, 0));
            s.forget(first + i, old);
            s.resident += 1;
        }
        for run in runs(there) {
            let n = (run.end - run.start) as usize;
            self.became_staged(s, first + run.start, n, slot + run.start as u32);
        }
        there.count_ones() as usize
    }
}

/// The pages that may go with a victim in one call, from the first to behind the last that go, and the set of those that go.
/// `dear`: calls interrupt other CPUs.
fn window(s: &State, victim: Entry, dear: bool) -> (Range<u64>, u64) {
    const PAGES: u64 = BLOCK_PAGES as u64;
    let base = victim.vpn() / PAGES * PAGES;
    let age = |stamp: u32| lru::age(s.stamp, stamp);
    let least = age(victim.stamp()) / 4 * if dear { 2 } else { 3 };
    // Whether a page goes; None ends the window.
    let goes = |i: u64| {
        let (vpn, pte) = (base + i, s.pt.get(base + i));
        match pte.tag() {
            _ if vpn == victim.vpn() => Some(true),
            // A page that is being dropped is still there.
            _ if s.leaving.has(vpn) => None,
            Tag::Resident if pte.is_incompressible() => None,
            Tag::Resident if age(pte.aux()) >= least && !s.was_touched(vpn) => Some(true),
            Tag::Compressed | Tag::Zero | Tag::Disk | Tag::Staged | Tag::Busy => Some(false),
            Tag::None | Tag::Resident | Tag::Poisoned => None,
        }
    };
    let at = victim.vpn() - base;
    let (mut from, mut to, mut go) = (at, at + 1, 1u64 << at);
    let mut look = |i: u64| goes(i).map(|goes| go |= u64::from(goes) << i).is_some();
    while from > 0 && look(from - 1) {
        from -= 1;
    }
    while to < PAGES && look(to) {
        to += 1;
    }
    let (from, to) = (u64::from(go.trailing_zeros()), u64::from(go.ilog2()) + 1);
    (base + from..base + to, go >> from)
}

/// Frees those slots of a window that are not in the set `there`, as holes.
fn free_holes(s: &mut State, slot: u32, there: u64) {
    for run in runs(!there & ((1 << SLOTS) - 1)) {
        s.zone.free_run(Kind::Hole, slot + run.start as u32, (run.end - run.start) as usize);
    }
}

/// The indices of a set's bits.
fn bits(mut set: u64) -> impl Iterator<Item = u64> {
    core::iter::from_fn(move || {
        let next = (set != 0).then(|| u64::from(set.trailing_zeros()))?;
        set &= set - 1;
        Some(next)
    })
}

/// The runs of consecutive bits of a set.
fn runs(mut set: u64) -> impl Iterator<Item = Range<u64>> {
    core::iter::from_fn(move || {
        let from = (set != 0).then(|| set.trailing_zeros())?;
        let to = from + (!(set >> from)).trailing_zeros();
        set &= u64::MAX.checked_shl(to).unwrap_or(0);
        Some(u64::from(from)..u64::from(to))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::mix;
    use crate::frames::arena::PAGE;
    use crate::testing;
    use core::sync::atomic::Ordering::Relaxed;
    use uzswap_mm::lru::List;

    const N: u64 = BLOCK_PAGES as u64;

    /// A window of memory whose pages are all known to be zeros; returns its first page.
    fn memory(p: &Pager) -> u64 {
        let at = testing::memory(p, 3 * BLOCK_PAGES).next_multiple_of(BLOCK_PAGES * PAGE) / PAGE;
        let mut s = p.state.lock();
        (at as u64..at as u64 + N).for_each(|vpn| s.pt.set(vpn, Pte::new(Tag::Zero, 0)));
        s.zeros += BLOCK_PAGES;
        at as u64
    }

    /// Brings a page filled with `content`, and lists it by itself.
    fn comes(p: &Pager, s: &mut State, vpn: u64, content: u8) {
        testing::put(p, vpn as usize * PAGE, &[content; PAGE]);
        let old = s.pt.get(vpn);
        s.list_resident(vpn, 1, List::Inactive, |_| None);
        s.forget(vpn, old);
    }

    /// The contents of a staged page.
    fn staged(p: &Pager, s: &State, vpn: u64) -> Vec<u8> {
        let pte = s.pt.get(vpn);
        assert_eq!(pte.tag(), Tag::Staged);
        // SAFETY: the slot of a staged page holds its frame, and the lock is held.
        unsafe { p.layout.frames(pte.aux(), 1) }.to_vec()
    }

    /// One call takes all that is old; pages that are young or unknown stay, and so do those behind them.
    #[test]
    fn a_window_takes_what_is_old_up_to_what_must_stay() {
        let p = testing::pager(16 << 20);
        let first = memory(p);
        let mut s = p.state.lock();
        for i in [9, 5, 4, 12, 2] {
            comes(p, &mut s, first + i, i as u8);
        }
        // Other pages come meanwhile, elsewhere.
        s.stamp += 100;
        comes(p, &mut s, first + 11, 11);
        // In memory, but unknown to the pager.
        testing::put(p, (first + 3) as usize * PAGE, &[3; PAGE]);
        s.pt.set(first + 3, Pte::NONE);
        let victim = s.lru.pop_victim().expect("a victim");
        assert_eq!(victim.vpn(), first + 9);
        let (pages, go) = window(&s, victim, true);
        assert_eq!((pages, go), (first + 4..first + 10, 0b100011));
        assert_eq!(p.stage_window(&mut s, victim).ok(), Some(3));
        for i in [4, 5, 9] {
            assert!(staged(p, &s, first + i).iter().all(|b| *b == i as u8), "page {i}");
        }
        let tags = [2, 3, 6, 11, 12].map(|i| s.pt.get(first + i).tag());
        assert_eq!(tags, [Tag::Resident, Tag::None, Tag::Zero, Tag::Resident, Tag::Resident]);
        assert_eq!((s.resident, s.staged), (3, 3));
        // SAFETY: memory of the test's own, and there.
        assert_eq!(unsafe { *(((first + 3) as usize * PAGE) as *const [u8; PAGE]) }, [3; PAGE]);
        // The neighbours' entries are stale: the next victims are others, young ones last.
        assert_eq!(p.stage(&mut s, 16).ok(), Some(3));
        assert_eq!((s.resident, s.staged), (0, 6));
    }

    /// The story: stamps had 16 bits. With more pages than that listed one by one, young pages left with an old neighbour, as
    /// their age seemed greater.
    #[test]
    fn what_is_young_stays_however_old_its_neighbour_is() {
        let p = testing::pager(16 << 20);
        let first = memory(p);
        let mut s = p.state.lock();
        comes(p, &mut s, first + 4, 4);
        for _ in 0..(1 << 16) + 100 {
            s.stamp = lru::next_stamp(s.stamp);
        }
        comes(p, &mut s, first + 5, 5);
        s.touched.fill(u64::MAX);
        let victim = s.lru.pop_victim().expect("a victim");
        assert_eq!(window(&s, victim, false), (first + 4..first + 5, 1));
    }

    /// A page that was not expected there is the program's, and newer than what is known of it.
    #[test]
    fn a_page_that_was_not_to_be_there_is_kept() {
        let p = testing::pager(16 << 20);
        let first = memory(p);
        let mut s = p.state.lock();
        comes(p, &mut s, first, 1);
        comes(p, &mut s, first + 2, 3);
        testing::put(p, (first + 1) as usize * PAGE, &[2; PAGE]);
        let (zeros, victim) = (s.zeros, s.lru.pop_victim().expect("a victim"));
        assert_eq!(p.stage_window(&mut s, victim).ok(), Some(3));
        for i in 0..3 {
            assert!(staged(p, &s, first + i).iter().all(|b| *b == i as u8 + 1), "page {i}");
        }
        assert_eq!((s.resident, s.staged, s.zeros), (0, 3, zeros - 1));
    }

    /// Where nobody can look which pages were moved, as the kernel has no memory for that, the kernel's answer counts.
    #[test]
    fn what_nobody_can_look_at_is_what_the_kernel_says() {
        let p = testing::pager(16 << 20);
        let first = memory(p);
        let mut s = p.state.lock();
        [2, 3, 7].into_iter().for_each(|i| comes(p, &mut s, first + i, i as u8));
        let pagemap = p.files.pagemap.swap(-1, Relaxed);
        let victim = s.lru.pop_victim().expect("a victim");
        assert_eq!(p.stage_window(&mut s, victim).ok(), Some(3));
        p.files.pagemap.store(pagemap, Relaxed);
        for i in [2, 3, 7] {
            assert!(staged(p, &s, first + i).iter().all(|b| *b == i as u8), "page {i}");
        }
        assert_eq!((s.resident, s.staged), (0, 3));
    }

    /// Whatever the kernel answers, and whatever it has done: the state of each page says where it is, with every byte.
    #[test]
    fn where_pages_are_is_known_whatever_the_kernel_says() {
        let p = testing::pager(16 << 20);
        p.group.faults.set("seed=5,move_out=1/2", 0).unwrap();
        let first = memory(p);
        let mut s = p.state.lock();
        let (mut left, mut stayed) = (0, 0);
        for round in 0..400u64 {
            let wanted = mix(round) as u16;
            for i in (0..N).filter(|i| wanted >> i & 1 != 0) {
                if s.pt.get(first + i).tag() == Tag::Zero {
                    comes(p, &mut s, first + i, i as u8 + 1);
                }
            }
            while let Some(victim) = s.lru.pop_victim() {
                let (at, pte) = (victim.vpn(), s.pt.get(victim.vpn()));
                if pte.tag() != Tag::Resident || pte.aux() != victim.stamp() {
                    continue;
                }
                let before = s.resident;
                let moved = p.stage_window(&mut s, victim).unwrap_or(0);
                assert_eq!(before - s.resident, moved, "round {round}, page {}", at - first);
                left += moved;
                stayed += usize::from(s.pt.get(at).tag() == Tag::Resident);
                if moved == 0 {
                    break;
                }
            }
            let all = |tag| (0..N).filter(|i| s.pt.get(first + i).tag() == tag).count();
            assert_eq!((s.resident, s.staged), (all(Tag::Resident), all(Tag::Staged)), "round {round}");
            // All that left comes back, so that both can be looked at in the program.
            for i in 0..N {
                if s.pt.get(first + i).tag() == Tag::Staged {
                    assert!(p.bring_staged(&mut s, first + i, 1).is_ok());
                }
                if s.pt.get(first + i).tag() == Tag::Resident {
                    // SAFETY: the page is the test's own, and there.
                    let page = unsafe { core::slice::from_raw_parts(((first + i) as usize * PAGE) as *const u8, PAGE) };
                    assert!(page.iter().all(|b| *b == i as u8 + 1), "round {round}, page {i}");
                }
            }
        }
        assert!(left > 1000 && stayed > 50, "{left} left, {stayed} stayed");
    }

    #[test]
    fn runs_are_those_of_the_bits() {
        let sets = (0..1000).map(mix).chain([0, 1, u64::MAX, 1 << 63, 0xffff]);
        for set in sets {
            let mut again = 0u64;
            let mut end = 0;
            for run in runs(set) {
                assert!(run.start < run.end && (run.start > end || end == 0), "{set:x}");
                end = run.end;
                again |= run.fold(0, |all, i| all | 1 << i);
            }
            assert_eq!(again, set);
            assert_eq!(bits(set).fold(0, |all, i| all | 1 << i), set);
        }
    }
}

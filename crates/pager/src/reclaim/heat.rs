//! Which blocks of 64 KiB are in use, as shown by pages that came back while they were staged.
//!
//! ```text
//! staged page is wanted back ─▶ its block's heat is 3 (and if it had any, what is staged around it comes along)
//! victim in a block with heat ─▶ listed as active once more, and with one chance in 16 the block is a degree cooler
//! ```
//! User space has no accessed bits: the staged pages are the only sample of what is in use, and a small one. A program that uses
//! its memory at random hardly refaults any page in the short time that it is staged, so hot pages leave with cold ones, turn by
//! turn. (Staging more finds more, at a fault for each page found; GNU sort in half of its memory lost by it.) But pages that lie
//! together are mostly used by the same part of a program. So a page that comes back speaks for its block: the block's 16 pages
//! are passed over, each some three times, before one is tried again. (That regions speak for their pages is DAMON's idea, Park
//! et al., Middleware 2019.) Pages that came in sequence leave whatever their block's heat.
//!
//! Invariants: heat is a hint; no more than [`PASSED_OVER`] pages are passed over for each that is wanted, so that a victim is
//! found although all are hot. Owner: the pager's lock.

use crate::chance::mix;
use crate::state::{BLOCK_PAGES, State};
use uzswap_mm::lru::{Entry, List};
use uzswap_mm::pagetable::{HEAT_SHIFT, HINT_HEAT, Tag};

/// How many pages are passed over at most for each that must leave.
pub(crate) const PASSED_OVER: usize = 16;

impl State {
    /// Notes that staged pages came back: their blocks are in use.
    pub(crate) fn heat(&mut self, vpn: u64, n: usize) {
        blocks(vpn, n).for_each(|block| self.pt.hint(block, HINT_HEAT, 0));
    }

    /// The pages that come with a staged one: at first it alone; if another page of its block came back lately, all that is
    /// staged around it in the block.
    pub(crate) fn staged_around(&self, vpn: u64) -> (u64, u64) {
        if self.pt.hints(vpn) & HINT_HEAT == 0 {
            return (vpn, vpn + 1);
        }
        let block = vpn / BLOCK_PAGES as u64 * BLOCK_PAGES as u64;
        let is_staged = |page: &u64| self.pt.get(*page).tag() == Tag::Staged;
        let before = (block..vpn).rev().take_while(is_staged).count() as u64;
        let behind = (vpn + 1..block + BLOCK_PAGES as u64).take_while(is_staged).count() as u64;
        (vpn - before, vpn + 1 + behind)
    }

    /// Takes the next folio to evict; also returns whether it passes. Folios in blocks that are in use are passed over, up to
    /// `left` pages.
    pub(crate) fn pop_victim(&mut self, left: &mut usize) -> Option<(Entry, bool)> {
        loop {
            let passes = self.lru.victim_passes();
            let e = self.lru.pop_victim()?;
            let pages = 1 << e.order();
            if passes || pages > *left || !self.is_hot(e) || !self.is_whole(e) {
                return Some((e, passes));
            }
            *left -= pages;
            self.cool(e);
            self.lru.push(List::Active, e);
        }
    }

    /// Whether a folio is in a block that is in use.
    pub(crate) fn is_hot(&self, e: Entry) -> bool {
        blocks(e.vpn(), 1 << e.order()).any(|block| self.pt.hints(block) & HINT_HEAT != 0)
    }

    /// A folio was passed over. Its blocks get a degree cooler for about each time that all their pages were.
    fn cool(&mut self, e: Entry) {
        self.passed_over += 1;
        let pages = 1u64 << e.order();
        if mix(self.passed_over) % BLOCK_PAGES as u64 >= pages {
            return;
        }
        for block in blocks(e.vpn(), pages as usize) {
            let heat = (self.pt.hints(block) & HINT_HEAT) >> HEAT_SHIFT;
            self.pt.hint(block, heat.saturating_sub(1) << HEAT_SHIFT, HINT_HEAT);
        }
    }
}

/// The first page of each block that `n` pages from `vpn` on are in.
pub(crate) fn blocks(vpn: u64, n: usize) -> impl Iterator<Item = u64> {
    let block = BLOCK_PAGES as u64;
    (vpn / block..(vpn + n as u64).div_ceil(block)).map(move |i| i * block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use uzswap_mm::pagetable::Pte;

    /// The first block of a test's memory, at a boundary.
    const FIRST: u64 = 1 << 20;

    /// Lists each page of `n` blocks by itself, in order.
    fn list(s: &mut State, n: u64) {
        (FIRST..FIRST + n * BLOCK_PAGES as u64).for_each(|vpn| s.list_resident(vpn, 1, List::Inactive, |_| None));
    }

    /// The block of the next victim, from 0.
    fn next(s: &mut State, left: &mut usize) -> Option<u64> {
        s.pop_victim(left).map(|(e, _)| (e.vpn() - FIRST) / BLOCK_PAGES as u64)
    }

    /// The story: GNU sort in half of its memory faulted on its text at random. Lines that it had used before, and nobody used
    /// any more, left no sooner than the text, turn by turn: 40,000 pages were decompressed where 20,000 are now.
    #[test]
    fn what_is_in_use_is_passed_over_until_it_is_cool() {
        let p = testing::pager(16 << 20);
        let mut s = p.state.lock();
        list(&mut s, 8);
        // One page of the first block was wanted back.
        s.heat(FIRST + 5, 1);
        let mut left = usize::MAX;
        let cold = (0..4 * BLOCK_PAGES).map(|_| next(&mut s, &mut left)).collect::<Vec<_>>();
        assert!(cold.iter().all(|block| matches!(block, Some(1..=4))), "{cold:?}");
        assert_eq!(usize::MAX - left, BLOCK_PAGES, "its pages were passed over, once so far");
        assert_eq!(s.lru.active.pages(), BLOCK_PAGES);
        // The others leave, and the block is passed over a few times more; then it leaves, too.
        let last = (0..4 * BLOCK_PAGES).filter_map(|_| next(&mut s, &mut left)).collect::<Vec<_>>();
        assert_eq!(last.iter().filter(|block| **block == 0).count(), BLOCK_PAGES, "{last:?}");
        let passed = usize::MAX - left;
        println!("passed over: {passed} of {BLOCK_PAGES}");
        assert!((2 * BLOCK_PAGES..8 * BLOCK_PAGES).contains(&passed), "{passed}");
        assert_eq!((next(&mut s, &mut left), s.pt.hints(FIRST) & HINT_HEAT), (None, 0));
        s.resident = 0;
    }

    /// A victim is found even if nothing is cold.
    #[test]
    fn one_is_found_although_all_are_hot() {
        let p = testing::pager(16 << 20);
        let mut s = p.state.lock();
        list(&mut s, 2);
        s.heat(FIRST, 2 * BLOCK_PAGES);
        let mut left = 4;
        assert_eq!((next(&mut s, &mut left), left), (Some(0), 0));
        assert_eq!((next(&mut s, &mut left), left), (Some(0), 0));
        s.resident = 0;
    }

    /// Entries of pages that have moved on are not listed again, or they would pile up; and pages that are gone say nothing about
    /// those that come next.
    #[test]
    fn what_is_stale_is_not_passed_over() {
        let p = testing::pager(16 << 20);
        let mut s = p.state.lock();
        list(&mut s, 1);
        s.heat(FIRST, 1);
        let (vpn, mut left) = (FIRST, usize::MAX);
        s.list_resident(vpn, 1, List::Inactive, |_| None);
        let (stale, _) = s.pop_victim(&mut left).expect("it is listed");
        assert_eq!((stale.vpn(), left), (vpn, usize::MAX));
        assert!(!s.is_whole(stale));
        s.pt.clear(FIRST, FIRST + BLOCK_PAGES as u64, |_, _| ());
        assert!(!s.is_hot(stale));
        s.resident = 0;
    }

    /// The first page of a block that comes back comes alone, as the others may no longer be in use; those after it do not.
    #[test]
    fn what_is_staged_in_a_block_in_use_comes_together() {
        let p = testing::pager(16 << 20);
        let mut s = p.state.lock();
        let block = BLOCK_PAGES as u64;
        // A block's neighbours do not belong to it.
        for (vpn, slot) in (FIRST - 1..FIRST + block + 1).zip(0..).filter(|(vpn, _)| *vpn != FIRST + 9) {
            s.pt.set(vpn, Pte::new(Tag::Staged, slot));
        }
        assert_eq!(s.staged_around(FIRST + 5), (FIRST + 5, FIRST + 6));
        s.heat(FIRST + 5, 1);
        assert_eq!(s.staged_around(FIRST + 4), (FIRST, FIRST + 9));
        assert_eq!(s.staged_around(FIRST + 12), (FIRST + 10, FIRST + block));
        assert_eq!(s.staged_around(FIRST + block), (FIRST + block, FIRST + block + 1), "another block");
        (FIRST - 1..FIRST + block + 1).for_each(|vpn| s.pt.set(vpn, Pte::NONE));
    }

    /// A folio of several blocks is in use if one of them is.
    #[test]
    fn large_folios_are_as_hot_as_their_hottest_block() {
        let p = testing::pager(16 << 20);
        let mut s = p.state.lock();
        let e = Entry::new(FIRST, 6, 0);
        assert!(!s.is_hot(e));
        s.heat(FIRST + 3 * BLOCK_PAGES as u64, 1);
        assert!(s.is_hot(e) && !s.is_hot(Entry::new(FIRST, 5, 0)));
        (0..3).for_each(|_| s.cool(e));
        assert!(!s.is_hot(e), "each time it is passed over counts for all of its pages");
    }
}

//! Keeps what does not compress in the program where there is no disk: in the pool it takes as much room.
//!
//! ```text
//! resident ─▶ in the pool, as it is ─ wanted back ─▶ incompressible, where nobody meets it
//!    ▲                                                    │ twice a second, where memory is short: a folio, and twice
//!    └───────────────────── tried again ◀─────────────────┘ as many each time that most of them compress by now
//! ```
//! Only storing a page shows that it does not compress. If it is not used again, it may as well be in the pool. But evicting it
//! once it was wanted back wins no memory, and costs a fault each time. So it stays, and the limit is exceeded by no more than
//! before. Reclaim evicts what compresses instead, down to the floor (`Pager::at_floor`), which does not include what stays.
//!
//! At the floor the limit cannot be kept whatever leaves. While the whole pool saves less than a quarter there, what by itself
//! saves less than a quarter stays as well: evicting such a page wins next to nothing, and it is wanted back at once. The program
//! then holds its own size at most, which is up to a third more than before.
//!
//! Contents change unseen. What the program has freed leaves the list by itself; of the rest, a sample is evicted next. What
//! still does not compress comes back when it is wanted, at one fault for each folio tried.
//!
//! The story: ImageMagick with 144 MiB that do not compress in 72, without a disk, took 150 s instead of 28. Pages went in and
//! out of a pool that gained nothing.
//!
//! A library region's limit is hard, and its owner chose it: there, all pages take their turn. So they do where the pool is not
//! charged, and where events are recorded: a trace must not depend on whether there was a disk, as it is replayed with one.
//! Owner: the pager's lock.

use crate::frames::arena::PAGE;
use crate::pager::Pager;
use crate::pool::object::{self, Header};
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::lru::{Entry, List};
use uzswap_mm::pageset::PageSet;
use uzswap_mm::pagetable::{Pte, Tag};

/// How many folios are tried again at once at most. (Half as many were tried the time before, and most compressed. They may have
/// one page each: with 256, a program that had overwritten 96 MiB of noise with text came within its limit only after a minute.)
const MOST: usize = 4096;
/// The same when nothing was learnt from those before: each costs a fault.
const MOST_IN_VAIN: usize = 64;

/// The folios that are tried again.
#[derive(Default)]
pub(crate) struct Retries {
    /// Folios listed for eviction.
    tried: Vec<Entry>,
    /// How many of them there were, or will be next.
    next: usize,
    /// How many of those were compressed since, and how many gained by it.
    judged: usize,
    gained: usize,
}

/// Which pages count as incompressible.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bound {
    /// None.
    Nothing,
    /// Those stored raw.
    Raw,
    /// Also those that take more than three quarters of the pages that are left of them.
    Poor,
}

/// Whether `len` stored bytes are more than three quarters of `pages` pages. (Raw ones are.)
fn is_poor(len: usize, pages: usize) -> bool {
    len > pages * PAGE / 4 * 3
}

impl Bound {
    /// Whether a page in the pool counts.
    pub(crate) fn is_met(self, s: &State, pte: Pte) -> bool {
        match self {
            _ if pte.tag() != Tag::Compressed => false,
            Self::Nothing => false,
            Self::Raw => pte.is_raw(),
            Self::Poor => {
                let object = s.object(pte.handle());
                is_poor(Header::read(object).len, object::live(object).len())
            }
        }
    }

    /// Whether a unit of `pages` pages gains by being stored as `len` bytes.
    pub(crate) fn gains(self, pages: usize, len: usize) -> bool {
        match self {
            Self::Nothing => true,
            Self::Raw => len < pages * PAGE,
            Self::Poor => !is_poor(len, pages),
        }
    }
}

impl Pager {
    /// The bound that holds now.
    pub(crate) fn incompressible(&self, s: &State) -> Bound {
        let uncharged = self.own_frames || self.group.pool_uncharged.load(Relaxed) != 0;
        if uncharged || s.recorder.is_some() || self.disk_may_take(s) {
            return Bound::Nothing;
        }
        let is_barren = s.pool.held_bytes() > s.swapped * PAGE / 4 * 3;
        if is_barren && self.at_floor(s) { Bound::Poor } else { Bound::Raw }
    }

    /// Whether a page in the pool counts as incompressible now. `bound` is determined when it first matters: most pages are below
    /// any bound, and it takes the sum of what all members hold.
    pub(crate) fn is_incompressible(&self, s: &State, pte: Pte, bound: &mut Option<Bound>) -> bool {
        Bound::Poor.is_met(s, pte) && bound.get_or_insert_with(|| self.incompressible(s)).is_met(s, pte)
    }

    /// How many of the `n` pages from `vpn` on free as much room in the pool as they take in the program, or nearly so.
    pub(crate) fn leave_as_much(&self, s: &State, vpn: u64, n: usize) -> usize {
        let mut bound = None;
        (vpn..vpn + n as u64).take_while(|at| self.is_incompressible(s, s.pt.get(*at), &mut bound)).count()
    }

    /// Lists some of what did not compress for eviction next, to see whether it compresses by now; all of it where it may go to
    /// disk now.
    pub(crate) fn try_incompressible(&self, s: &mut State) {
        let bound = self.incompressible(s);
        let stays = bound != Bound::Nothing;
        let mut left = if stays { s.retries_due() } else { usize::MAX };
        while left > 0 {
            let Some(e) = s.lru.incompressible.pop() else { break };
            if s.is_stale(e) {
                continue;
            }
            // If some pages of the folio have gone, the others are still listed.
            s.lru.inactive.push_front(e);
            if stays {
                s.retries.tried.push(e);
            }
            left -= 1;
        }
    }
}

impl Retries {
    /// Whether any folio was not stored yet.
    pub(crate) fn any(&self) -> bool {
        !self.tried.is_empty()
    }
}

impl State {
    /// Lists `n` pages that came: those in the set `apart` as incompressible, the others on `list`.
    pub(crate) fn list_apart(
        &mut self,
        vpn: u64,
        n: usize,
        list: List,
        apart: &PageSet,
        copy_of: impl Fn(usize) -> Option<u32>,
    ) {
        if apart.is_empty() {
            return self.list_resident(vpn, n, list, copy_of);
        }
        let mut at = 0;
        while at < n {
            let is_apart = apart.has(at);
            let run = (at..n).take_while(|i| apart.has(*i) == is_apart).count();
            let to = if is_apart { List::Incompressible } else { list };
            self.list_resident(vpn + at as u64, run, to, |i| copy_of(at + i));
            at += run;
        }
    }

    /// How many pages to be tried again were not stored yet; it counts up to `most`. (Those already staged count too, as at the
    /// floor nothing else is evicted.)
    pub(crate) fn retries_waiting(&self, most: usize) -> usize {
        let waits = |pte: Pte, e: Entry| pte.is_listed_as(e.stamp()) || pte.tag() == Tag::Staged;
        let pages = |e: Entry| (0..1 << e.order()).filter(move |i| waits(self.pt.get(e.vpn() + i), e));
        self.retries.tried.iter().copied().flat_map(pages).take(most).count()
    }

    /// How many folios are to be tried again now. More if most of those tried last compressed (or were all taken back at once, as
    /// by a program that goes round in what is tried first); none while those were not evicted yet.
    fn retries_due(&mut self) -> usize {
        let Self { retries, pt, .. } = self;
        // Trying pages that the program has dropped, or taken back before they were compressed, was in vain.
        retries.tried.retain(|e| {
            let pte = pt.get(e.vpn());
            pte.is_listed_as(e.stamp()) || matches!(pte.tag(), Tag::Staged | Tag::Busy)
        });
        if retries.tried.len() > retries.next / 2 {
            return 0;
        }
        let most = match retries.judged {
            0 => MOST_IN_VAIN,
            judged if retries.gained > judged / 2 => MOST,
            _ => 1,
        };
        let next = (retries.next * 2).clamp(1, most);
        *retries = Retries { next, ..Retries::default() };
        next
    }

    /// Notes that the unit at `vpn` was stored, with or without gain: counts it if it was tried again.
    pub(crate) fn judge_retry(&mut self, vpn: u64, gained: bool) {
        let retries = &mut self.retries;
        // Folios listed last leave first.
        let Some(k) = retries.tried.iter().rposition(|e| e.vpn() == vpn) else { return };
        retries.tried.swap_remove(k);
        retries.judged += 1;
        retries.gained += usize::from(gained);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::Request;
    use crate::fault::deliver::Delivery;
    use crate::pool::batch::Batch;
    use crate::state::BLOCK_PAGES;
    use crate::testing::{self, half_noise, noise, words};
    use crate::trace::Recorder;

    /// Where the tests' objects are whose pages are never brought.
    const ELSEWHERE: u64 = 1 << 24;

    /// Brings `n` pages for a fault at `vpn`.
    fn bring(p: &Pager, s: &mut State, vpn: u64, n: usize) {
        let r = Request { vpn, write: false, protected: false };
        let brought = p.bring_out(s, vpn, n, &mut Delivery::of(r, false));
        assert_eq!(brought.ok(), Some(n));
    }

    /// A pager with 16 MiB, and a block of its memory.
    fn with_block() -> (&'static Pager, u64) {
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, 2 * BLOCK_PAGES);
        (p, (at / PAGE).next_multiple_of(BLOCK_PAGES) as u64)
    }

    /// See the file's head.
    #[test]
    fn what_did_not_compress_stays_once_it_was_wanted_back() {
        let (p, first) = with_block();
        let mut s = p.state.lock();
        let contents = [noise, words, noise, noise];
        for (vpn, content) in (first..).zip(contents) {
            testing::store(&mut s, vpn, 0, 0, content);
        }
        bring(p, &mut s, first, 4);
        let stays = |s: &State| [0, 1, 2, 3].map(|i| s.pt.get(first + i).is_incompressible());
        assert_eq!(stays(&s), [true, false, true, true]);
        assert_eq!((s.lru.incompressible.pages(), s.evictable(), s.resident), (3, 1, 4));
        // Reclaim does not meet it, neither in its turn nor around a victim.
        assert_eq!(p.stage(&mut s, 4).ok(), Some(1));
        assert_eq!(s.lru.peek_victim(), None);
        assert_eq!(stays(&s), [true, false, true, true]);
    }

    #[test]
    fn it_goes_where_the_pool_is_not_charged_or_a_disk_may_take_it() {
        let (p, first) = with_block();
        let mut s = p.state.lock();
        assert!(p.incompressible(&s) == Bound::Raw);
        s.recorder = Some(Recorder::new(testing::rings(), 0));
        assert!(p.incompressible(&s) == Bound::Nothing, "what is recorded is as with a disk");
        s.recorder = None;
        p.group.pool_uncharged.store(1, Relaxed);
        testing::store(&mut s, first, 0, 0, noise);
        bring(p, &mut s, first, 1);
        assert_eq!((s.lru.incompressible.pages(), s.evictable()), (0, 1));
        drop(s);
        let p = testing::pager_with_swap(16 << 20);
        let mut s = p.state.lock();
        let listed = |s: &mut State| {
            s.list_resident(ELSEWHERE, 1, List::Incompressible, |_| None);
            p.try_incompressible(s);
            s.resident -= 1;
            s.lru.inactive.pages()
        };
        assert!(p.incompressible(&s) == Bound::Raw, "its file was not opened");
        p.tier.file.store(0, Relaxed);
        assert!(p.incompressible(&s) == Bound::Nothing);
        assert_eq!(listed(&mut s), 1, "all that stayed goes");
        p.group.nodes[0].zswap_writeback.store(0, Relaxed);
        assert!(p.incompressible(&s) == Bound::Raw, "it is forbidden");
        p.tier.file.store(-1, Relaxed);
    }

    /// The story: see the file's head. ImageMagick's pages did compress, to seven eighths, and what was left of blocks that had
    /// lost some pages took more room than the pages.
    #[test]
    fn at_the_floor_what_wins_little_stays_too() {
        let (p, first) = with_block();
        let mut s = p.state.lock();
        // A block of four that has lost three pages.
        let block = testing::store(&mut s, first, 2, 0b1110, half_noise);
        (1..4).for_each(|i| s.release(block, i));
        testing::store(&mut s, first + 4, 2, 0, half_noise);
        let met = |s: &State, bound: Bound| [0, 4].map(|i| bound.is_met(s, s.pt.get(first + i)));
        assert_eq!(met(&s, Bound::Raw), [false, false]);
        assert_eq!(met(&s, Bound::Poor), [true, false]);
        assert_eq!([4 * PAGE - 1, 4 * PAGE].map(|len| p.incompressible(&s).gains(4, len)), [true, false]);
        // The pool fills most of the limit, and gains something, or nothing.
        let mut vpn = ELSEWHERE;
        while s.pool.held_bytes() < 9 << 20 {
            testing::store(&mut s, vpn, 0, 0, half_noise);
            vpn += 1;
        }
        assert!(p.at_floor(&s) && p.incompressible(&s) == Bound::Raw);
        while s.pool.held_bytes() * 4 <= s.swapped * PAGE * 3 {
            testing::store(&mut s, vpn, 0, 0, noise);
            vpn += 1;
        }
        assert!(p.incompressible(&s) == Bound::Poor);
        assert_eq!([3 * PAGE, 3 * PAGE + 1].map(|len| p.incompressible(&s).gains(4, len)), [true, false]);
        assert_eq!([0, 1, 4].map(|i| p.leave_as_much(&s, first + i, 4)), [1, 0, 0]);
        let pages = (4 << 20) / PAGE;
        s.list_resident(1 << 25, pages, List::Inactive, |_| None);
        assert!(p.incompressible(&s) == Bound::Raw, "there is more than the floor");
    }

    /// The story: what had not compressed was not tried again, as the floor seemed to be reached. A program that had overwritten
    /// noise with text stayed at 103 MiB of 64.
    #[test]
    fn a_little_is_tried_again_and_more_when_it_compresses_by_now() {
        let (p, _) = with_block();
        let mut s = p.state.lock();
        (0..1000).for_each(|i| s.list_resident(ELSEWHERE + 2 * i, 1, List::Incompressible, |_| None));
        let s = &mut *s;
        let tries = |s: &mut State| {
            p.try_incompressible(s);
            s.retries.tried.clone()
        };
        for expected in [1, 2, 4, 8] {
            let tried = tries(s);
            assert_eq!((tried.len(), s.retries_waiting(usize::MAX)), (expected, expected));
            assert_eq!(tries(s), tried, "they are not stored yet");
            // They are the next to leave.
            for e in tried.iter().rev() {
                assert_eq!(s.lru.pop_victim().as_ref(), Some(e));
                s.judge_retry(e.vpn(), true);
            }
        }
        // Half of them do not compress.
        let tried = tries(s);
        assert_eq!((tried.len(), s.retries_waiting(5)), (16, 5));
        tried.iter().enumerate().for_each(|(i, e)| s.judge_retry(e.vpn(), i % 2 == 0));
        let tried = tries(s);
        assert_eq!(tried.len(), 1);
        // Nobody waits for pages that were dropped or taken back, and nothing is learnt from them.
        s.pt.set(tried[0].vpn(), Pte::NONE);
        s.resident -= 1;
        assert_eq!((tries(s).len(), s.retries.next), (2, 2));
        // A page that has gone is no try.
        let gone = s.lru.incompressible.peek().expect("there are more");
        for e in s.retries.tried.clone() {
            s.judge_retry(e.vpn(), true);
        }
        s.pt.set(gone.vpn(), Pte::NONE);
        s.resident -= 1;
        let tried = tries(s);
        assert!(tried.len() == 4 && !tried.contains(&gone));
        // More and more, but not without bound, while all is in vain.
        for expected in [8, 16, 32, 64, 64, 64] {
            let Retries { tried, .. } = &s.retries;
            tried.iter().for_each(|e| s.pt.set(e.vpn(), Pte::NONE));
            s.resident -= tried.len();
            assert_eq!(tries(s).len(), expected);
        }
    }

    /// The story: a page to be tried again was staged when the floor was reached, where only resident pages still counted as
    /// waiting. It was never compressed, so nothing else was tried: in one run of ten a program stayed above its limit.
    #[test]
    fn what_is_tried_again_is_stored_at_the_floor_though_it_was_staged_before() {
        let (p, first) = with_block();
        let mut s = p.state.lock();
        let listed = |s: &mut State, vpn: u64, list| {
            testing::put(p, vpn as usize * PAGE, &words(vpn));
            s.list_resident(vpn, 1, list, |_| None);
        };
        listed(&mut s, first, List::Inactive);
        assert_eq!(p.stage(&mut s, 1).ok(), Some(1));
        listed(&mut s, first + 1, List::Incompressible);
        p.try_incompressible(&mut s);
        assert_eq!(p.stage(&mut s, 1).ok(), Some(1));
        let tags = |s: &State| [0, 1].map(|i| s.pt.get(first + i).tag());
        assert_eq!(tags(&s), [Tag::Staged; 2]);
        for vpn in (ELSEWHERE..).take((9 << 20) / PAGE) {
            testing::store(&mut s, vpn, 0, 0, noise);
        }
        assert!(p.at_floor(&s));
        let mut batch = Batch::new(s.new_compressor());
        drop(s);
        // What was staged before it goes first; then there is no reason to store more.
        for (waiting, left) in
            [(1, [Tag::Compressed, Tag::Staged]), (1, [Tag::Compressed; 2]), (0, [Tag::Compressed; 2])]
        {
            let mut s = p.state.lock();
            assert_eq!(s.retries_waiting(usize::MAX), waiting);
            s.rss = 64 << 20;
            drop(s);
            p.reclaim_step(&mut batch);
            assert_eq!(tags(&p.state.lock()), left);
        }
    }

    /// A block of incompressible pages comes at once although there is no room: it frees as much as it takes.
    #[test]
    fn a_block_that_leaves_as_much_as_it_takes_comes_whole() {
        for (content, comes) in [(noise as fn(u64) -> [u8; PAGE], 4), (words, 1)] {
            let (p, first) = with_block();
            let mut s = p.state.lock();
            for i in 0..4 {
                testing::store(&mut s, first + i, 0, 0, content);
            }
            s.rss = 64 << 20;
            s.keeps_all = true;
            let r = Request { vpn: first, write: false, protected: false };
            let brought = p.bring_out(&mut s, first, 4, &mut Delivery::of(r, false));
            assert_eq!(brought.ok(), Some(comes));
        }
    }
}

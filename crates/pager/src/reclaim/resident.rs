//! Lists resident pages: as folios of the largest order that fits, on the inactive, the active or the passing list.
//!
//! Invariants: an entry of a list is a hint, true as long as its pages carry its stamp (see `uzswap_mm::lru`). Each resident page
//! is in one true entry, or it would never be evicted. Owner: the pager's lock.

use crate::state::{FOLIO_PAGES, State};
use core::ops::Range;
use uzswap_mm::lru::{Entry, List, next_stamp};
use uzswap_mm::pagemap::Tier;
use uzswap_mm::pagetable::{Pte, Tag, next_eviction};

/// How many of the pages faulted on last stay in any case.
const LAST_TOUCHED: usize = 8;
/// Of the sequential faults, one in this many brings pages to stay: of those on pages that left lately, of those on other pages
/// that would still be resident had nothing passed, and of the rest.
const CLOSE_STAY: u64 = 2;
const NEAR_STAY: u64 = 8;
const FAR_STAY: u64 = 64;

impl State {
    /// Makes `n` pages resident and lists them as folios. Their entries get a stamp, and the copies that `copy_of(i)` returns.
    pub fn list_resident(&mut self, vpn: u64, n: usize, list: List, mut copy_of: impl FnMut(usize) -> Option<u32>) {
        let (mut at, end) = (0, n as u64);
        while at < end {
            let order = self.folio_order(vpn + at, (end - at) as usize);
            self.stamp = next_stamp(self.stamp);
            let pte = Pte::new(Tag::Resident, self.stamp);
            let pte = if list == List::Incompressible { pte.packed(Tier::Raw) } else { pte };
            self.pt.set_run(vpn + at, 1 << order, |i| match copy_of(at as usize + i) {
                Some(handle) => pte.with_copy(handle),
                None => pte,
            });
            self.lru.push(list, Entry::new(vpn + at, order, self.stamp));
            at += 1 << order;
        }
        self.resident += n;
        // Pages that are unmapped or dropped leave their entries behind.
        let Self { lru, pt, resident, .. } = self;
        lru.tidy(*resident, |page, stamp| pt.get(page).is_listed_as(stamp));
    }

    /// Resident pages that nothing keeps from being evicted. (Not fewer than there are, and mostly no more: see `Lru`.)
    pub fn evictable(&self) -> usize {
        self.resident.min(self.lru.evictable())
    }

    /// The order of the folio that begins a run of `n` pages at `vpn`: the largest that is aligned and fits.
    pub fn folio_order(&self, vpn: u64, n: usize) -> u8 {
        (vpn.trailing_zeros().min(n.ilog2()) as u8).min(self.folio_max)
    }

    /// Lists pages as resident, and keeps the copies that their entries may have.
    pub fn list_with_copies(&mut self, vpn: u64, n: usize, list: List) {
        // It is mostly a page or a few, for which 4 KiB of copies would take longer than all the rest.
        match n {
            0..=16 => self.list_some::<16>(vpn, n, list),
            _ => (0..n).step_by(FOLIO_PAGES).for_each(|from| {
                self.list_some::<FOLIO_PAGES>(vpn + from as u64, (n - from).min(FOLIO_PAGES), list);
            }),
        }
    }

    fn list_some<const MOST: usize>(&mut self, vpn: u64, n: usize, list: List) {
        let mut copies = [None; MOST];
        for (i, copy) in copies.iter_mut().enumerate().take(n) {
            *copy = self.pt.get(vpn + i as u64).copy();
        }
        self.list_resident(vpn, n, list, |i| copies[i]);
    }

    /// Whether a page is resident as it was listed, with this stamp.
    pub fn is_fresh(&self, vpn: u64, stamp: u32) -> bool {
        self.pt.get(vpn).is_listed_as(stamp)
    }

    /// Whether all pages of a folio are resident as they were listed.
    pub fn is_whole(&self, e: Entry) -> bool {
        (0..1u64 << e.order()).all(|i| self.is_fresh(e.vpn() + i, e.stamp()))
    }

    /// Whether none of a folio's pages is.
    pub fn is_stale(&self, e: Entry) -> bool {
        (0..1u64 << e.order()).all(|i| !self.is_fresh(e.vpn() + i, e.stamp()))
    }

    /// How many pages from `at`, which is resident, up to `end` are resident.
    pub fn resident_run(&self, at: u64, end: u64) -> usize {
        (at..end).take_while(|v| self.pt.get(*v).tag() == Tag::Resident).count()
    }

    /// The list for pages that come from the pool; the last of them left `distance` evictions ago. `passing`: they are part of a
    /// sequence, and this is a random number of their fault.
    ///
    /// Sequential pages pass. But pages that would still be resident, had passing ones not left first, may be in use. Some of
    /// those come to stay, the more the shorter the distance, and more each time. Not all at once: of data that is read over and
    /// over and is a bit larger than memory, each page would evict another just before it is read. A few of the other pages stay
    /// as well, or pages that are never used again would stay forever. (As in the bimodal insertion of Qureshi et al., ISCA
    /// 2007.)
    pub fn list_of_refault(&self, distance: usize, passing: Option<u64>) -> List {
        let used = distance < if passing.is_some() { self.resident } else { self.lru.active.pages() };
        let stays = if used { List::Active } else { List::Inactive };
        let one_in = match distance {
            near if near < self.resident / 2 => CLOSE_STAY,
            near if near < self.resident => NEAR_STAY,
            _ => FAR_STAY,
        };
        if passing.is_none_or(|random| random.is_multiple_of(one_in)) { stays } else { List::Passing }
    }

    /// Counts `n` evicted pages.
    pub fn count_evictions(&mut self, n: usize) {
        self.evictions = next_eviction(self.evictions, n);
    }

    /// Notes a page that was faulted on.
    pub fn touch(&mut self, vpn: u64) {
        let last = self.touched.len() - 1;
        let before = self.touched.iter().position(|page| *page == vpn).unwrap_or(last);
        self.touched.copy_within(..before, 1);
        self.touched[0] = vpn;
    }

    /// Whether a page is among those faulted on last.
    pub fn was_touched(&self, vpn: u64) -> bool {
        self.touched.contains(&vpn)
    }

    /// Whether one of these pages is.
    pub fn touched_in(&self, pages: Range<u64>) -> bool {
        self.touched.iter().any(|vpn| pages.contains(vpn))
    }

    /// Whether one of these pages is among the last few: as many as an instruction or two may need at once.
    pub fn touched_last(&self, pages: Range<u64>) -> bool {
        self.touched[..LAST_TOUCHED].iter().any(|vpn| pages.contains(vpn))
    }
}

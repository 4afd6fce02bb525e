//! Folios of every order: a group's settings for them, and what is counted.
//!
//! A folio is a naturally aligned run of 2^order pages that is moved, stored, refused and counted as one. Which folio a page
//! belongs to follows from the accesses: pages faulted on or written in sequence lie together on the lists and leave together, as
//! the largest aligned runs; pages read at random come and go alone.
//!
//! Both structures here are parts of the group's page: all atomics, where zero means the default.

use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::*};

/// The largest order: 2 MiB.
pub const MAX_ORDER: u8 = 9;
/// The smallest order that counts as large: 16 KiB.
pub const LARGE_ORDER: u8 = 2;
/// Orders with counters of their own.
pub const LARGE_ORDERS: usize = (MAX_ORDER - LARGE_ORDER) as usize + 1;
/// The largest unit of compression by default: 64 KiB. (Larger ones take a few percent less room, but each fault then brings
/// more.)
pub const USUAL_UNIT: u8 = 4;

/// A group's settings for folios.
#[repr(C)]
#[derive(Default)]
pub struct FolioSettings {
    /// Orders (a bit each) whose folios may not enter the compressed pool.
    pub large_off: AtomicU32,
    /// 1 when each compression result is verified by decompressing it and comparing.
    pub verify: AtomicU32,
    /// For each order of folio: the order of its units of compression plus one; 0 for the default.
    pub units: [AtomicU8; MAX_ORDER as usize + 1],
    /// The rule for compacting the arena, as numbered by `compaction::rule::Rule`.
    pub compaction: AtomicU32,
    /// For the lab only: one in this many requests for contiguous frames is granted (0: every one).
    pub scarce: AtomicU32,
    /// For the lab only: 1 when a block that gets no frames comes in page by page, with a fault each.
    pub fallback_off: AtomicU32,
    /// Requests counted for `scarce` (events).
    pub scarce_seen: AtomicU32,
}

impl FolioSettings {
    /// Whether folios of an order may enter the pool.
    pub fn allows(&self, order: u8) -> bool {
        self.large_off.load(Relaxed) & (1 << order) == 0
    }

    /// The order of the compression units for a folio of this order, if it was set.
    pub fn unit(&self, order: u8) -> Option<u8> {
        let set = self.units[order.min(MAX_ORDER) as usize].load(Relaxed);
        (set != 0).then(|| (set - 1).min(order))
    }

    /// The order of the largest units that were set, for folios of up to `folio_max`; 0 if none were.
    pub fn largest_unit(&self, folio_max: u8) -> u8 {
        (0..=folio_max).filter_map(|order| self.unit(order)).max().unwrap_or(0)
    }
}

/// Counters of the folios of one order (folios, cumulative), named as in `hugepages-*kB/stats`.
#[repr(C)]
#[derive(Default)]
pub struct OrderCounters {
    /// Stored whole in the compressed pool.
    pub zswpout: AtomicU64,
    /// Brought back from the pool whole, by one fault.
    pub zswpin: AtomicU64,
    /// Written whole to the backing store: as one object, of 64 KiB at most, or as a folio that may not enter the pool.
    pub swpout: AtomicU64,
    /// Read whole from the backing store: as one object.
    pub swpin: AtomicU64,
    /// Split because they could not leave whole.
    pub swpout_fallback: AtomicU64,
    /// Blocks of this size compressed into the pool (blocks).
    pub block_write: AtomicU64,
    /// Mapped by one fault.
    pub anon_fault_alloc: AtomicU64,
    /// Faults that brought smaller folios, as there were no contiguous frames, or they could not be charged.
    pub anon_fault_fallback: AtomicU64,
}

impl OrderCounters {
    /// Names, in the order of [`OrderCounters::all`].
    pub const NAMES: [&'static str; 8] = [
        "zswpout",
        "zswpin",
        "swpout",
        "swpin",
        "swpout_fallback",
        "block_write",
        "anon_fault_alloc",
        "anon_fault_fallback",
    ];

    /// All counters.
    pub fn all(&self) -> [&AtomicU64; 8] {
        [
            &self.zswpout,
            &self.zswpin,
            &self.swpout,
            &self.swpin,
            &self.swpout_fallback,
            &self.block_write,
            &self.anon_fault_alloc,
            &self.anon_fault_fallback,
        ]
    }
}

/// What is counted for folios and blocks; all cumulative.
#[repr(C)]
#[derive(Default)]
pub struct FolioCounters {
    /// By order, from 16 KiB to 2 MiB.
    pub orders: [OrderCounters; LARGE_ORDERS],
    /// Zero pages brought back (4 KiB pages).
    pub swpin_zero: AtomicU64,
    /// Units stored raw because compression saved too little (units).
    pub reject_compress_poor: AtomicU64,
    /// Folios refused because the compressor failed, or verification found its result wrong (folios).
    pub reject_compress_fail: AtomicU64,
    /// Of those, found by verification (folios).
    pub reject_verify_fail: AtomicU64,
    /// Folios refused because the pool was at its limit (folios).
    pub pool_limit_hit: AtomicU64,
    /// Blocks of several pages compressed into the pool (blocks).
    pub block_write: AtomicU64,
    /// Blocks of several pages decompressed (blocks).
    pub block_read: AtomicU64,
    /// Blocks that could not be decompressed (blocks), and folios of several pages that could not be stored (folios).
    pub block_failed: AtomicU64,
    /// Faults that decompressed a block without delivering all of it: they could not, or the page was read at random (blocks).
    pub block_partial_read: AtomicU64,
    /// Blocks of more than 64 KiB stored again as smaller ones, as most of their pages had gone, or they were to go to disk
    /// (blocks).
    pub block_cut: AtomicU64,
    /// Blocks decompressed again for pages that an earlier partial read could not deliver (blocks).
    pub block_read_again: AtomicU64,
    /// Pages that left their block as they were written to, and are compressed anew (pages).
    pub block_partial_write: AtomicU64,
    /// Pages that the program dropped while they were being compressed, and that were freed later than asked (4 KiB pages).
    pub block_missed_free: AtomicU64,
    /// Faults that brought a block from the pool in smaller folios than wanted, for want of contiguous frames (events).
    pub block_fallback: AtomicU64,
    /// The part of them for which only the touched page could be had (events).
    pub block_fallback_single: AtomicU64,
    /// Huge pages moved out of the program as one (folios).
    pub thp_move_out: AtomicU64,
    /// Huge pages moved into the program as one (folios).
    pub thp_move_in: AtomicU64,
}

impl FolioCounters {
    /// Names, in the order of [`FolioCounters::all`].
    pub const NAMES: [&'static str; 17] = [
        "swpin_zero",
        "reject_compress_poor",
        "reject_compress_fail",
        "reject_verify_fail",
        "pool_limit_hit",
        "block_write",
        "block_read",
        "block_failed",
        "block_partial_read",
        "block_cut",
        "block_read_again",
        "block_partial_write",
        "block_missed_free",
        "block_fallback",
        "block_fallback_single",
        "thp_move_out",
        "thp_move_in",
    ];

    /// All counters except those by order.
    pub fn all(&self) -> [&AtomicU64; 17] {
        [
            &self.swpin_zero,
            &self.reject_compress_poor,
            &self.reject_compress_fail,
            &self.reject_verify_fail,
            &self.pool_limit_hit,
            &self.block_write,
            &self.block_read,
            &self.block_failed,
            &self.block_partial_read,
            &self.block_cut,
            &self.block_read_again,
            &self.block_partial_write,
            &self.block_missed_free,
            &self.block_fallback,
            &self.block_fallback_single,
            &self.thp_move_out,
            &self.thp_move_in,
        ]
    }

    /// The counters of an order; None below 16 KiB.
    pub fn order(&self, order: u8) -> Option<&OrderCounters> {
        self.orders.get((order as usize).checked_sub(LARGE_ORDER as usize)?)
    }

    /// Counts one folio of an order.
    pub fn count(&self, order: u8, counter: impl Fn(&OrderCounters) -> &AtomicU64) {
        if let Some(c) = self.order(order) {
            counter(c).fetch_add(1, Relaxed);
        }
    }

    /// Adds all to `other` and clears them.
    pub fn move_to(&self, other: &Self) {
        let by_order = self.orders.iter().flat_map(OrderCounters::all);
        let theirs = other.orders.iter().flat_map(OrderCounters::all);
        for (from, to) in by_order.zip(theirs).chain(self.all().into_iter().zip(other.all())) {
            to.fetch_add(from.swap(0, Relaxed), Relaxed);
        }
    }
}

/// The kernel's name of an order's counters: `hugepages-64kB`.
pub fn directory(order: u8) -> String {
    format!("hugepages-{}kB", 4u32 << order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_kernel() {
        assert_eq!(directory(LARGE_ORDER), "hugepages-16kB");
        assert_eq!(directory(MAX_ORDER), "hugepages-2048kB");
        let c = FolioCounters::default();
        c.count(0, |o| &o.zswpout);
        c.count(4, |o| &o.zswpout);
        c.count(9, |o| &o.anon_fault_fallback);
        let dead = FolioCounters::default();
        c.move_to(&dead);
        assert_eq!(dead.orders[2].zswpout.load(Relaxed), 1);
        assert_eq!(dead.orders[7].anon_fault_fallback.load(Relaxed), 1);
        assert_eq!(c.orders.iter().flat_map(OrderCounters::all).map(|n| n.load(Relaxed)).sum::<u64>(), 0);
    }

    #[test]
    fn units_are_at_most_the_folio() {
        let s = FolioSettings::default();
        assert_eq!(s.unit(9), None);
        s.units[9].store(9 + 1, Relaxed);
        s.units[2].store(4 + 1, Relaxed);
        assert_eq!((s.unit(9), s.unit(2)), (Some(9), Some(2)));
        assert_eq!((s.largest_unit(9), s.largest_unit(8), s.largest_unit(1)), (9, 2, 0));
        s.large_off.store(1 << 4, Relaxed);
        assert!(s.allows(9) && s.allows(0) && !s.allows(4));
    }
}

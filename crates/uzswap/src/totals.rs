//! What a group counted, summed over its members, dead and alive.

use crate::folios::FolioTotals;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use uzswap_pager::group::{Counters, GroupPage, NO_LIMIT, NODES};
use uzswap_pager::inject::SITES;

macro_rules! sums {
    ($($field:ident),* $(,)?) => {
        /// Sums of `Counters`, field by field.
        #[derive(Debug, Default, Serialize)]
        pub struct Sums {
            $(
                #[doc = concat!("See `Counters::", stringify!($field), "`.")]
                pub $field: u64,
            )*
            /// Sum of `Node::nr_disk_swapins`: of groups, not of members.
            pub nr_disk_swapins: u64,
        }

        impl Sums {
            fn add(&mut self, counters: &Counters) {
                $(self.$field = self.$field.saturating_add(counters.$field.load(Relaxed));)*
            }
        }
    };
}

sums! {
    pgfault, pgmajfault, refault_staged, handler_lifted, fault_zero, zswpout, zswpin, swpout_zero, swpout_clean, recompressed_pages,
    recompressed_idle_pages, reject_recompress_poor, pages_compacted, pool_blocks_freed, compact_stall, compact_success, compact_fail, compact_migrate_scanned, compact_free_scanned,
    compact_isolated, pgmigrate_success, pgmigrate_fail, migrated_twice, migrated_again, pivot_moved, stored_incompressible_pages, stored_pages, pool_total_size,
    pool_used_size, metadata_size, stall_ns, direct_reclaim, move_refused, move_concealed, reject_alloc_fail, poisoned,
    pswpin, pswpout, pswpout_clean, zswpwb, reject_reclaim_fail, swap_read_bytes, swap_write_bytes, swap_uring_writes,
    swap_uring_reads,
    swap_read_errors, swap_write_errors, swap_stalls, swap_pages, swap_used_size,
}

/// What a group and those below it did.
#[derive(Debug, Default, Serialize)]
pub struct Totals {
    /// Name of the group; the command's pid where it has none.
    pub group: String,
    /// The limit (`memory.max`) as it is now, in bytes; none where there is none.
    pub limit: Option<u64>,
    /// Highest charge seen, in bytes: resident memory, what the pools hold and metadata of all processes together.
    pub peak: u64,
    /// Most memory held, resident or not, in bytes.
    pub peak_held: u64,
    /// Processes that joined.
    pub joined: u32,
    /// Processes whose memory was managed.
    pub engaged: u32,
    /// Times the limit could not be kept.
    pub over_limit: u64,
    /// Members that were killed for that.
    pub oom_kill: u64,
    /// Reclaims because the charge was above `memory.high`.
    pub high: u64,
    /// Reclaims because the charge was about to exceed `memory.max`.
    pub max: u64,
    /// Pages that could go nowhere.
    pub swap_fail: u64,
    /// Whether some child could not be managed.
    pub unmanaged: bool,
    /// Uncompressed bytes per compressed byte in the pool, each process's when it had most there; none if nothing ever was.
    pub compression_ratio: Option<f64>,
    /// The size of the run's swap file as asked for, in bytes; 0 without one.
    pub swap: u64,
    /// How it is written and read: `direct`, `buffered` where the file system cannot do that, or `redis`; none without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap_io: Option<&'static str>,
    /// Bytes of the swap file that are in use at the end.
    pub swap_used: u64,
    /// The sums.
    pub counters: Sums,
    /// Of folios and blocks.
    pub folios: FolioTotals,
    /// For tests: how often each site failed on purpose, and where the draws began. None when nothing was injected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub injected: Option<BTreeMap<&'static str, u64>>,
}

impl Totals {
    /// Reads a group of a tree.
    pub fn of(page: &GroupPage, node: usize) -> Totals {
        let mut counters = Sums::default();
        for i in (0..NODES).filter(|i| page.nodes[*i].is_ready() && page.is_within(*i, node)) {
            counters.add(&page.nodes[i].dead);
            counters.nr_disk_swapins += page.nodes[i].nr_disk_swapins.get();
        }
        for slot in page.used().iter().filter(|slot| page.is_within(slot.node.load(Acquire) as usize, node)) {
            counters.add(&slot.counters);
        }
        let held = counters.pool_used_size;
        let n = &page.nodes[node];
        let max = n.max.load(Relaxed);
        Totals {
            group: crate::groups::name_of(page, node),
            limit: (max < NO_LIMIT).then_some(max),
            peak: n.peak.load(Relaxed),
            peak_held: n.peak_held.load(Relaxed),
            joined: n.joined.load(Relaxed),
            engaged: n.engaged.load(Relaxed),
            over_limit: n.events.oom.load(Relaxed),
            oom_kill: n.events.oom_kill.load(Relaxed),
            high: n.events.high.load(Relaxed),
            max: n.events.max.load(Relaxed),
            swap_fail: n.events.swap_fail.load(Relaxed),
            swap: 0,
            swap_io: None,
            swap_used: 0,
            unmanaged: page.warned_unmanaged.load(Relaxed) != 0,
            compression_ratio: (held > 0).then(|| counters.stored_pages as f64 * 4096.0 / held as f64),
            counters,
            folios: FolioTotals::of(page, node),
            injected: injected(page),
        }
    }
}

fn injected(page: &GroupPage) -> Option<BTreeMap<&'static str, u64>> {
    let faults = &page.faults;
    let fired = SITES.iter().zip(&faults.fired).map(|((_, name), fired)| (*name, fired.load(Relaxed)));
    let seed = ("seed", faults.seed.load(Relaxed));
    (faults.on.load(Relaxed) != 0).then(|| fired.chain([seed]).collect())
}

#[cfg(test)]
mod tests {
    use super::Totals;
    use std::sync::atomic::Ordering::Relaxed;
    use uzswap::group_file::GroupFile;

    #[test]
    fn sums_the_dead_and_the_living() {
        let group = GroupFile::create("web", false).unwrap();
        let page = group.page();
        assert_eq!(Totals::of(page, 0).compression_ratio, None);
        assert_eq!(Totals::of(page, 0).limit, None);
        page.nodes[0].max.store(4096, Relaxed);
        let child = page.make_child(0, b"worker").unwrap();
        page.nodes[0].dead.pgfault.store(1, Relaxed);
        page.slots[0].counters.pgfault.store(2, Relaxed);
        page.slots[1023].counters.pgfault.store(4, Relaxed);
        page.used.store(1024, Relaxed);
        page.slots[7].counters.stored_pages.store(3, Relaxed);
        page.slots[7].counters.pool_used_size.store(4096, Relaxed);
        page.slots[8].counters.pgfault.store(8, Relaxed);
        page.slots[8].node.store(child as u32, Relaxed);
        let totals = Totals::of(page, 0);
        assert_eq!(totals.counters.pgfault, 15, "those of the group below too");
        assert_eq!(totals.compression_ratio, Some(3.0));
        assert_eq!((totals.limit, totals.group.as_str()), (Some(4096), "web"));
        assert_eq!(totals.injected, None);
        page.faults.set("seed=5,move_in=1/2", 0).unwrap();
        page.faults.fired[3].store(8, Relaxed);
        let totals = Totals::of(page, child);
        assert_eq!((totals.counters.pgfault, totals.group.as_str()), (8, "web/worker"));
        let injected = totals.injected.unwrap();
        assert_eq!((injected["seed"], injected["move_in"], injected["pool"]), (5, 8, 0));
    }
}

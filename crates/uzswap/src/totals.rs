//! What a group counted, summed over its members, dead and alive.

use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use uzswap_pager::group::{Counters, GroupPage};
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
        }

        impl Sums {
            fn add(&mut self, counters: &Counters) {
                $(self.$field = self.$field.saturating_add(counters.$field.load(Relaxed));)*
            }
        }
    };
}

sums! {
    pgfault, pgmajfault, refault_staged, fault_zero, zswpout, zswpin, swpout_zero, swpout_clean, recompressed_pages,
    pages_compacted,     stored_incompressible_pages, stored_pages, pool_total_size, pool_used_size, metadata_size, stall_ns,
    direct_reclaim, move_refused, move_concealed, reject_alloc_fail, poisoned,
}

/// What a group did.
#[derive(Debug, Default, Serialize)]
pub struct Totals {
    /// The limit, in bytes.
    pub limit: u64,
    /// Highest resident memory seen, in bytes.
    pub peak: u64,
    /// Most memory held, resident or not, in bytes.
    pub peak_held: u64,
    /// Processes that joined.
    pub joined: u32,
    /// Processes whose memory was managed.
    pub engaged: u32,
    /// Times the limit could not be kept.
    pub over_limit: u64,
    /// Whether some child could not be managed.
    pub unmanaged: bool,
    /// Uncompressed bytes per compressed byte in the pool as it was last; none if it was empty.
    pub compression_ratio: Option<f64>,
    /// The sums.
    pub counters: Sums,
    /// For tests: how often each site failed on purpose, and where the draws began. None when nothing was injected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub injected: Option<BTreeMap<&'static str, u64>>,
}

impl Totals {
    /// Reads a group.
    pub fn of(page: &GroupPage) -> Totals {
        let mut counters = Sums::default();
        counters.add(&page.dead);
        for slot in &page.slots {
            slot.pid.load(Acquire);
            counters.add(&slot.counters);
        }
        let held = counters.pool_used_size;
        Totals {
            limit: page.limit.load(Relaxed),
            peak: page.peak.load(Relaxed),
            peak_held: page.peak_held.load(Relaxed),
            joined: page.joined.load(Relaxed),
            engaged: page.engaged.load(Relaxed),
            over_limit: page.over_limit.load(Relaxed),
            unmanaged: page.warned_unmanaged.load(Relaxed) != 0,
            compression_ratio: (held > 0).then(|| counters.stored_pages as f64 * 4096.0 / held as f64),
            counters,
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
    use crate::group_file::GroupFile;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn sums_the_dead_and_the_living() {
        let group = GroupFile::create(4096, 0, 0).unwrap();
        let page = group.page();
        assert_eq!(Totals::of(page).compression_ratio, None);
        page.dead.pgfault.store(1, Relaxed);
        page.slots[0].counters.pgfault.store(2, Relaxed);
        page.slots[1023].counters.pgfault.store(4, Relaxed);
        page.slots[7].counters.stored_pages.store(3, Relaxed);
        page.slots[7].counters.pool_used_size.store(4096, Relaxed);
        let totals = Totals::of(page);
        assert_eq!(totals.counters.pgfault, 7);
        assert_eq!(totals.compression_ratio, Some(3.0));
        assert_eq!(totals.limit, 4096);
        assert_eq!(totals.injected, None);
        page.faults.set("seed=5,move_in=1/2", 0).unwrap();
        page.faults.fired[3].store(8, Relaxed);
        let injected = Totals::of(page).injected.unwrap();
        assert_eq!((injected["seed"], injected["move_in"], injected["pool"]), (5, 8, 0));
    }
}

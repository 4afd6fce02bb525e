//! A group's counters, summed over its members, dead and alive.

use crate::folios::FolioTotals;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use uzswap_pager::group::counters::Counters;
use uzswap_pager::group::{GroupPage, NO_LIMIT, NODES};
use uzswap_pager::inject::SITES;

macro_rules! sums {
    ($($field:ident),* $(,)?) => {
        /// Sums of all `Counters`, field by field.
        #[derive(Debug, Default, Serialize)]
        pub struct Sums {
            $(
                #[doc = concat!("See `Counters::", stringify!($field), "`.")]
                pub $field: u64,
            )*
            /// Sum of `Node::nr_disk_swapins`, which groups count, not members.
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
    pgfault, pgmajfault, refault_staged, handler_lifted, handler_paused, fault_zero, zswpout, zswpin, swpout_zero, swpout_clean, recompressed_pages,
    recompressed_idle_pages, reject_recompress_poor, pages_compacted, pool_blocks_freed, compact_stall, compact_success, compact_fail, compact_migrate_scanned, compact_free_scanned,
    compact_isolated, pgmigrate_success, pgmigrate_fail, migrated_twice, migrated_again, pivot_moved, stored_incompressible_pages, stored_pages, pool_total_size,
    pool_used_size, metadata_size, stall_ns, direct_reclaim, move_refused, move_concealed, reject_alloc_fail, poisoned,
    pswpin, pswpout, pswpout_clean, swap_compacted, zswpwb, reject_reclaim_fail, swap_read_bytes, swap_write_bytes, swap_side_writes,
    swap_uring_reads,
    swap_read_errors, swap_write_errors, swap_stalls, swap_pages, swap_used_size,
}

/// The totals of a group and the groups inside it.
#[derive(Debug, Default, Serialize)]
pub struct Totals {
    /// The group's name; the command's pid if it has none.
    pub group: String,
    /// The present limit (`memory.max`), in bytes; None if there is none.
    pub limit: Option<u64>,
    /// The highest charge seen, in bytes: resident memory, pools and metadata of all processes together.
    pub peak: u64,
    /// The limit when the peak was seen, in bytes; [`NO_LIMIT`] if there was none, which the report shows as null. None if
    /// nothing was seen.
    #[serde(serialize_with = "limit_or_null")]
    pub peak_limit: Option<u64>,
    /// The most memory held, resident or not, in bytes.
    pub peak_held: u64,
    /// Processes that joined.
    pub joined: u32,
    /// Processes whose memory was managed.
    pub engaged: u32,
    /// How often the limit could not be kept.
    pub over_limit: u64,
    /// Members killed for that.
    pub oom_kill: u64,
    /// Reclaims because the charge was above `memory.high`.
    pub high: u64,
    /// Reclaims because the charge was about to exceed `memory.max`.
    pub max: u64,
    /// Pages that could not be put anywhere.
    pub swap_fail: u64,
    /// Whether any child could not be managed.
    pub unmanaged: bool,
    /// Uncompressed bytes per compressed byte in the pools, of each process at the time when it had most there. None if nothing
    /// was ever stored.
    pub compression_ratio: Option<f64>,
    /// The size of the run's swap file as asked for, in bytes; 0 without one.
    pub swap: u64,
    /// How it is written and read: `direct`, `buffered` if the file system cannot do that, or `redis`. None without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap_io: Option<&'static str>,
    /// Bytes of the swap file in use at the end.
    pub swap_used: u64,
    /// The sums.
    pub counters: Sums,
    /// Counters of folios and blocks.
    pub folios: FolioTotals,
    /// For tests: how often each site failed on purpose, and the seed. None if nothing was injected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub injected: Option<BTreeMap<&'static str, u64>>,
}

impl Totals {
    /// Sums up a group of a tree.
    pub fn of(page: &GroupPage, node: usize) -> Totals {
        let mut counters = Sums::default();
        for i in (0..NODES).filter(|i| page.nodes[*i].is_ready() && page.is_within(*i, node)) {
            counters.add(&page.nodes[i].dead);
            counters.nr_disk_swapins = counters.nr_disk_swapins.saturating_add(page.nodes[i].nr_disk_swapins.get());
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
            peak_limit: Some(n.peak_max.load(Relaxed)).filter(|max| *max > 0),
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

fn limit_or_null<S: Serializer>(limit: &Option<u64>, to: S) -> Result<S::Ok, S::Error> {
    limit.filter(|limit| *limit < NO_LIMIT).serialize(to)
}

fn injected(page: &GroupPage) -> Option<BTreeMap<&'static str, u64>> {
    let faults = &page.faults;
    let fired = SITES.iter().zip(&faults.fired).map(|((_, name), fired)| (*name, fired.load(Relaxed)));
    let seed = ("seed", faults.seed.load(Relaxed));
    faults.is_on().then(|| fired.chain([seed]).collect())
}

#[cfg(test)]
mod tests {
    use super::{NO_LIMIT, Totals};
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

    /// Gives each counter a different number; returns names and numbers.
    macro_rules! number {
        ($counters:expr, $from:expr, $($field:ident)*) => {{
            let names = [$(stringify!($field)),*];
            let numbers = [$(&$counters.$field),*];
            names.into_iter().zip(numbers).zip($from..).map(|((name, counter), n)| {
                counter.store(n, Relaxed);
                (name, n)
            }).collect::<Vec<(&str, u64)>>()
        }};
    }

    /// Each counter appears under its own name, in the report and in the files, also after its slot went to another group.
    #[test]
    fn every_counter_is_told_under_its_own_name() {
        let group = GroupFile::create("web", false).unwrap();
        let page = group.page();
        page.used.store(1, Relaxed);
        let c = &page.slots[0].counters;
        let all = number!(c, 1000, pgfault pgmajfault refault_staged handler_lifted handler_paused fault_zero zswpout zswpin swpout_zero
            swpout_clean recompressed_pages recompressed_idle_pages reject_recompress_poor pages_compacted pool_blocks_freed
            compact_stall compact_success compact_fail compact_migrate_scanned compact_free_scanned compact_isolated
            pgmigrate_success pgmigrate_fail migrated_twice migrated_again pivot_moved stored_pages
            stored_incompressible_pages pool_total_size pool_used_size metadata_size stall_ns direct_reclaim move_refused
            move_concealed reject_alloc_fail poisoned pswpin pswpout pswpout_clean swap_compacted zswpwb reject_reclaim_fail swap_read_bytes
            swap_write_bytes swap_side_writes swap_uring_reads swap_read_errors swap_write_errors swap_stalls swap_pages
            swap_used_size);
        let folios = number!(c.folios, 2000, swpin_zero reject_compress_poor reject_compress_fail reject_verify_fail
            pool_limit_hit block_write block_read block_failed block_partial_read block_read_again block_cut
            block_partial_write block_missed_free block_fallback block_fallback_single thp_move_out thp_move_in);
        let orders = ["16", "32", "64", "128", "256", "512", "1024", "2048"].map(|kib| format!("hugepages-{kib}kB"));
        let by_order = (c.folios.orders.iter().zip(3000..).map(|(o, n)| {
            number!(o, 10 * n, zswpout zswpin swpout swpin swpout_fallback block_write anon_fault_alloc anon_fault_fallback)
        }))
        .collect::<Vec<_>>();
        for retired in [false, true] {
            let told = serde_json::to_value(Totals::of(page, 0)).unwrap();
            let files: std::collections::BTreeMap<_, _> = crate::stat_files::files(page, 0).into_iter().collect();
            let text: String = ["memory.stat", "uzswap.stat"].iter().map(|file| files[*file].text()).collect();
            let in_files = |name: &str, n: u64| {
                let own = files.get(&format!("zswap/{name}")).map(crate::stat_files::Content::text);
                text.lines().any(|line| line == format!("{name} {n}")) || own == Some(format!("{n}\n"))
            };
            // These are of now.
            let now = ["stored_pages", "stored_incompressible_pages", "pool_total_size"];
            for (part, counters) in [("counters", &all), ("folios", &folios)] {
                assert_eq!(
                    told[part].as_object().unwrap().values().filter(|n| n.is_u64()).count(),
                    counters.len()
                        + match part {
                            "counters" => ["nr_disk_swapins"].len(),
                            _ => ["thp_swpout", "thp_swpout_fallback"].len(),
                        },
                    "each is asked for here"
                );
                for (name, n) in counters {
                    assert_eq!(told[part][*name], *n, "{name}, retired: {retired}");
                    assert!(now.contains(name) || in_files(name, *n), "{name}");
                }
            }
            for (order, counters) in orders.iter().zip(&by_order) {
                for (name, n) in counters {
                    assert_eq!(told["folios"][order][*name], *n, "{order} {name}, retired: {retired}");
                    assert_eq!(files[&format!("{order}/stats/{name}")].text(), format!("{n}\n"));
                }
            }
            let huge = |name: &str| by_order[7].iter().find(|(other, _)| *other == name).unwrap().1;
            for (thp, name) in [("thp_swpout", "swpout"), ("thp_swpout_fallback", "swpout_fallback")] {
                assert_eq!(told["folios"][thp], huge(name));
                assert!(in_files(thp, huge(name)));
            }
            let zswpwb = all.iter().find(|(name, _)| *name == "zswpwb").unwrap().1;
            assert!(in_files("written_back_pages", zswpwb));
            c.retire_into(&page.nodes[0].dead);
        }
    }

    /// Each event of a group appears under the kernel's name for it, and in the report.
    #[test]
    fn every_event_is_told_under_its_own_name() {
        let group = GroupFile::create("web", false).unwrap();
        let page = group.page();
        let child = page.make_child(0, b"worker").unwrap();
        let n = &page.nodes[child];
        drop(number!(n.events, 1, high max oom oom_kill zswap_max swap_max swap_fail));
        drop(number!(n, 11, peak peak_held peak_max));
        n.joined.store(13, Relaxed);
        n.engaged.store(14, Relaxed);
        let files: std::collections::BTreeMap<_, _> = crate::stat_files::files(page, child).into_iter().collect();
        assert_eq!(files["memory.events"].text(), "low 0\nhigh 1\nmax 2\noom 3\noom_kill 4\noom_group_kill 0\n");
        assert_eq!(files["memory.swap.events"].text(), "high 0\nmax 6\nfail 7\n");
        assert_eq!(files["memory.peak"].text(), "11\n");
        let own = files["uzswap.stat"].text();
        for line in ["zswap_max 5", "peak_held 12", "joined 13", "engaged 14"] {
            assert!(own.lines().any(|other| other == line), "{line}");
        }
        let told = serde_json::to_value(Totals::of(page, child)).unwrap();
        let names = [
            "high",
            "max",
            "over_limit",
            "oom_kill",
            "swap_fail",
            "peak",
            "peak_held",
            "peak_limit",
            "joined",
            "engaged",
        ];
        assert_eq!(names.map(|name| told[name].as_u64().unwrap()), [1, 2, 3, 4, 7, 11, 12, 13, 13, 14]);
        n.peak_max.store(NO_LIMIT, Relaxed);
        assert!(serde_json::to_value(Totals::of(page, child)).unwrap()["peak_limit"].is_null());
    }
}

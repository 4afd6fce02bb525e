//! A group's counters, in the kernel's file formats.
//!
//! Each file has the name and format that it has in a cgroup v2 directory (`memory.*`), under
//! `/sys/kernel/mm/transparent_hugepage` (`hugepages-*`) or under `/sys/kernel/debug` (`zswap/*`). `uzswap.stat` has all that
//! uzswap counts and the kernel does not.

use crate::totals::Totals;
use serde_json::{Map, Value};
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use uzswap_pager::group::{Events, GroupPage, NO_LIMIT, bytes_in};
use uzswap_sys::process::Identity;

/// What a group's living members use now, in bytes.
#[derive(Debug, Default, PartialEq)]
pub struct Usage {
    /// Resident + pool + metadata: what the limit bounds.
    pub charge: u64,
    /// Of that, what the pools hold.
    pub pool: u64,
    /// Of that, uzswap's tables.
    pub metadata: u64,
    /// Program memory in the pools, uncompressed.
    pub zswapped: u64,
    /// Of that, memory that did not compress.
    pub incompressible: u64,
    /// Data in swap files, in the size stored.
    pub swap: u64,
    /// Pids of the members.
    pub pids: Vec<u32>,
}

impl Usage {
    /// Reads a group and the groups inside it. Dead members' charges are returned first.
    pub fn of(page: &GroupPage, node: usize) -> Usage {
        page.bury_the_dead(Identity::own());
        let uncharged = page.pool_uncharged.load(Relaxed) != 0;
        let mut usage = Usage::default();
        for slot in page.used() {
            let owner = slot.owner().filter(|_| page.is_within(slot.node.load(Relaxed) as usize, node));
            let Some(owner) = owner.filter(|o| *o != Identity::own()) else { continue };
            usage.pids.push(owner.pid());
            let pool = bytes_in(&slot.pool);
            usage.charge += bytes_in(&slot.rss).saturating_sub(if uncharged { pool } else { 0 });
            usage.pool += pool;
            usage.metadata += bytes_in(&slot.metadata);
            usage.zswapped += bytes_in(&slot.zswapped);
            usage.incompressible += bytes_in(&slot.incompressible);
            usage.swap += bytes_in(&slot.swap);
        }
        usage.pids.sort_unstable();
        usage
    }
}

/// The contents of a file.
#[derive(Debug, PartialEq)]
pub enum Content {
    /// One number.
    Number(u64),
    /// One limit; printed as `max` if there is none.
    Limit(u64),
    /// Lines with a name and a number.
    Keyed(Vec<(&'static str, u64)>),
    /// Numbers, one per line.
    List(Vec<u32>),
}

impl Content {
    /// The contents as the kernel prints them.
    pub fn text(&self) -> String {
        match self {
            Content::Limit(NO_LIMIT..) => "max\n".to_owned(),
            Content::Number(n) | Content::Limit(n) => format!("{n}\n"),
            Content::Keyed(lines) => lines.iter().fold(String::new(), |mut out, (name, n)| {
                let _ = writeln!(out, "{name} {n}");
                out
            }),
            Content::List(lines) => lines.iter().map(|n| format!("{n}\n")).collect(),
        }
    }

    /// As JSON: a number, `null` for no limit, an object, an array.
    pub fn json(&self) -> Value {
        match self {
            Content::Limit(NO_LIMIT..) => Value::Null,
            Content::Number(n) | Content::Limit(n) => (*n).into(),
            Content::Keyed(lines) => {
                Value::Object(lines.iter().map(|(name, n)| ((*name).to_owned(), (*n).into())).collect::<Map<_, _>>())
            }
            Content::List(lines) => lines.clone().into(),
        }
    }
}

/// The files of a group, by name.
pub fn files(page: &GroupPage, node: usize) -> Vec<(String, Content)> {
    use Content::{Keyed, Limit, List, Number};
    let (usage, totals) = (Usage::of(page, node), Totals::of(page, node));
    let (n, e) = (&page.nodes[node], &page.nodes[node].events);
    let limit = |a: &AtomicU64| Limit(a.load(Relaxed));
    let files = vec![
        ("memory.current", Number(usage.charge)),
        ("memory.peak", Number(totals.peak)),
        ("memory.high", limit(&n.high)),
        ("memory.max", limit(&n.max)),
        ("memory.swap.current", Number(usage.swap)),
        ("memory.swap.max", limit(&n.swap_max)),
        ("memory.zswap.current", Number(usage.pool)),
        ("memory.zswap.max", limit(&n.zswap_max)),
        ("memory.zswap.writeback", Number(n.zswap_writeback.load(Relaxed).into())),
        ("memory.events", Keyed(events(e))),
        ("memory.swap.events", Keyed(swap_events(e))),
        ("memory.stat", Keyed(stat(&usage, &totals))),
        ("cgroup.procs", List(usage.pids.clone())),
    ];
    let mut files: Vec<_> = files.into_iter().map(|(name, content)| (name.to_owned(), content)).collect();
    files.extend(zswap(&usage, &totals).into_iter().map(|(name, n)| (format!("zswap/{name}"), Number(n))));
    files.push(("uzswap.stat".to_owned(), Keyed(own_stat(&usage, &totals, e))));
    for (directory, counters) in &totals.folios.orders {
        files.extend(counters.iter().map(|(counter, n)| (format!("{directory}/stats/{counter}"), Number(*n))));
    }
    files
}

/// Names and numbers.
type Lines = Vec<(&'static str, u64)>;

fn folio(totals: &Totals, name: &str) -> u64 {
    totals.folios.all.get(name).copied().unwrap_or(0)
}

fn events(e: &Events) -> Lines {
    let n = |a: &AtomicU64| a.load(Relaxed);
    vec![
        ("low", 0),
        ("high", n(&e.high)),
        ("max", n(&e.max)),
        ("oom", n(&e.oom)),
        ("oom_kill", n(&e.oom_kill)),
        ("oom_group_kill", 0),
    ]
}

fn swap_events(e: &Events) -> Lines {
    vec![("high", 0), ("max", e.swap_max.load(Relaxed)), ("fail", e.swap_fail.load(Relaxed))]
}

/// `memory.stat`.
fn stat(usage: &Usage, totals: &Totals) -> Lines {
    let c = &totals.counters;
    vec![
        ("anon", usage.charge.saturating_sub(usage.pool + usage.metadata)),
        ("zswap", usage.pool),
        ("zswapped", usage.zswapped),
        ("pgfault", c.pgfault),
        ("pgmajfault", c.pgmajfault),
        ("zswpin", c.zswpin),
        ("zswpout", c.zswpout),
        ("zswpwb", c.zswpwb),
        ("pswpin", c.pswpin),
        ("pswpout", c.pswpout),
        ("swpout_zero", c.swpout_zero),
        ("swpin_zero", folio(totals, "swpin_zero")),
        ("thp_swpout", folio(totals, "thp_swpout")),
        ("thp_swpout_fallback", folio(totals, "thp_swpout_fallback")),
    ]
}

/// The files under `zswap`.
fn zswap(usage: &Usage, totals: &Totals) -> Lines {
    let c = &totals.counters;
    vec![
        ("pool_limit_hit", folio(totals, "pool_limit_hit")),
        ("pool_total_size", usage.pool),
        ("reject_alloc_fail", c.reject_alloc_fail),
        ("reject_compress_fail", folio(totals, "reject_compress_fail")),
        ("reject_compress_poor", folio(totals, "reject_compress_poor")),
        ("reject_reclaim_fail", c.reject_reclaim_fail),
        ("stored_incompressible_pages", usage.incompressible / 4096),
        ("stored_pages", usage.zswapped / 4096),
        ("written_back_pages", c.zswpwb),
    ]
}

/// `uzswap.stat`: what uzswap counts and the kernel does not.
fn own_stat(usage: &Usage, totals: &Totals, e: &Events) -> Lines {
    let c = &totals.counters;
    vec![
        ("metadata", usage.metadata),
        ("joined", totals.joined.into()),
        ("engaged", totals.engaged.into()),
        ("unmanaged", totals.unmanaged.into()),
        ("peak_held", totals.peak_held),
        ("pool_used_size", c.pool_used_size),
        ("metadata_size", c.metadata_size),
        ("zswap_max", e.zswap_max.load(Relaxed)),
        ("reject_verify_fail", folio(totals, "reject_verify_fail")),
        ("refault_staged", c.refault_staged),
        ("handler_lifted", c.handler_lifted),
        ("handler_paused", c.handler_paused),
        ("fault_zero", c.fault_zero),
        ("swpout_clean", c.swpout_clean),
        ("recompressed_pages", c.recompressed_pages),
        ("recompressed_idle_pages", c.recompressed_idle_pages),
        ("reject_recompress_poor", c.reject_recompress_poor),
        ("pages_compacted", c.pages_compacted),
        ("pool_blocks_freed", c.pool_blocks_freed),
        ("compact_stall", c.compact_stall),
        ("compact_success", c.compact_success),
        ("compact_fail", c.compact_fail),
        ("compact_migrate_scanned", c.compact_migrate_scanned),
        ("compact_free_scanned", c.compact_free_scanned),
        ("compact_isolated", c.compact_isolated),
        ("pgmigrate_success", c.pgmigrate_success),
        ("pgmigrate_fail", c.pgmigrate_fail),
        ("migrated_twice", c.migrated_twice),
        ("migrated_again", c.migrated_again),
        ("pivot_moved", c.pivot_moved),
        ("stall_ns", c.stall_ns),
        ("direct_reclaim", c.direct_reclaim),
        ("move_refused", c.move_refused),
        ("move_concealed", c.move_concealed),
        ("poisoned", c.poisoned),
        ("pswpout_clean", c.pswpout_clean),
        ("swap_compacted", c.swap_compacted),
        ("nr_disk_swapins", c.nr_disk_swapins),
        ("swap_read_bytes", c.swap_read_bytes),
        ("swap_write_bytes", c.swap_write_bytes),
        ("swap_side_writes", c.swap_side_writes),
        ("swap_uring_reads", c.swap_uring_reads),
        ("swap_read_errors", c.swap_read_errors),
        ("swap_write_errors", c.swap_write_errors),
        ("swap_stalls", c.swap_stalls),
        ("swap_pages", c.swap_pages),
        ("swap_used_size", c.swap_used_size),
        ("thp_move_out", folio(totals, "thp_move_out")),
        ("thp_move_in", folio(totals, "thp_move_in")),
        ("block_write", folio(totals, "block_write")),
        ("block_read", folio(totals, "block_read")),
        ("block_failed", folio(totals, "block_failed")),
        ("block_partial_read", folio(totals, "block_partial_read")),
        ("block_partial_write", folio(totals, "block_partial_write")),
        ("block_read_again", folio(totals, "block_read_again")),
        ("block_cut", folio(totals, "block_cut")),
        ("block_missed_free", folio(totals, "block_missed_free")),
        ("block_fallback", folio(totals, "block_fallback")),
        ("block_fallback_single", folio(totals, "block_fallback_single")),
    ]
}

#[cfg(test)]
mod tests {
    use super::{Content, Usage, files};
    use crate::totals::Totals;
    use std::sync::atomic::Ordering::Relaxed;
    use uzswap::group_file::GroupFile;
    use uzswap_pager::group::{GroupPage, NO_LIMIT};

    #[test]
    fn formats_are_the_kernels() {
        assert_eq!(Content::Limit(NO_LIMIT).text(), "max\n");
        assert_eq!(Content::Limit(4096).text(), "4096\n");
        assert_eq!(Content::Keyed(vec![("high", 1), ("max", 2)]).text(), "high 1\nmax 2\n");
        assert_eq!(Content::List(vec![7, 9]).text(), "7\n9\n");
        assert!(Content::Limit(NO_LIMIT).json().is_null());
    }

    /// A member that was killed while it was charged must not stay charged. (An early version kept each group's charge as a sum
    /// that members added to and subtracted from. A member killed between storing its new size and adding the difference left the
    /// sum wrong for good. It was too high; or, when another member found it dead and subtracted what it had never added, below
    /// zero, which as an unsigned number is a group over its limit forever. Upstream's A4.)
    #[test]
    fn charges_of_the_dead_are_returned() {
        let group = GroupFile::create("web", false).unwrap();
        let page = group.page();
        let child = page.make_child(0, b"worker").unwrap();
        let mut dead = std::process::Command::new("/bin/cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = dead.id();
        page.used.store(3, Relaxed);
        let slot = &page.slots[2];
        slot.node.store(child as u32, Relaxed);
        slot.owner.store(u64::from(pid), Relaxed);
        slot.rss.store(100, Relaxed);
        slot.pool.store(40, Relaxed);
        for node in [0, child] {
            let usage = Usage::of(page, node);
            assert_eq!((usage.charge, usage.pool, usage.pids), (100, 40, vec![pid]));
        }
        dead.kill().unwrap();
        dead.wait().unwrap();
        for node in [0, child] {
            assert_eq!(Usage::of(page, node), Usage::default());
        }
        assert_eq!(slot.owner(), None);
    }

    #[test]
    fn every_file_has_its_place() {
        let group = GroupFile::create("web", false).unwrap();
        group.page().count(0, |e| &e.high, 3);
        let files = files(group.page(), 0);
        let text = |name: &str| files.iter().find(|(n, _)| n == name).map(|(_, c)| c.text()).unwrap();
        assert_eq!(text("memory.max"), "max\n");
        assert_eq!(text("memory.events"), "low 0\nhigh 3\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n");
        assert!(text("memory.stat").starts_with("anon 0\nzswap 0\n"));
        group.page().slots[0].counters.folios.count(4, |c| &c.zswpout);
        group.page().used.store(1, Relaxed);
        let files = super::files(group.page(), 0);
        let number = |name: &str| files.iter().find(|(n, _)| n == name).map(|(_, c)| c.text()).unwrap();
        assert_eq!(number("hugepages-64kB/stats/zswpout"), "1\n");
        assert_eq!(number("hugepages-2048kB/stats/anon_fault_alloc"), "0\n");
    }

    /// All counters of the report are available while the group runs, and each file is explained.
    #[test]
    fn all_that_the_report_counts_is_in_a_file() {
        let group = GroupFile::create("web", false).unwrap();
        let page = group.page();
        page.slots[0].counters.folios.pool_limit_hit.store(3, Relaxed);
        page.used.store(1, Relaxed);
        let files = super::files(page, 0);
        let names: Vec<&str> = (files.iter())
            .flat_map(|(name, content)| match content {
                Content::Keyed(lines) => lines.iter().map(|(name, _)| *name).collect(),
                _ => vec![name.rsplit('/').next().unwrap()],
            })
            .collect();
        let report = serde_json::to_value(Totals::of(page, 0)).unwrap();
        let counted = report["counters"].as_object().unwrap().iter().chain(report["folios"].as_object().unwrap());
        for (name, _) in counted.filter(|(_, value)| value.is_u64()) {
            assert!(names.contains(&name.as_str()), "{name} is in no file");
        }
        for name in ["peak_held", "joined", "engaged", "unmanaged"] {
            assert!(names.contains(&name), "{name} is in no file");
        }
        let limit_hit = files.iter().find(|(name, _)| name == "zswap/pool_limit_hit").unwrap();
        assert_eq!(limit_hit.1, Content::Number(3), "as in the report");
        let explained = include_str!("../REPORT.md");
        for name in names {
            assert!(explained.contains(&format!("`{name}`")), "{name} is not in REPORT.md");
        }
    }

    /// Any member, which is somebody's program, may have written anything to the group's page.
    #[test]
    fn whatever_stands_in_a_groups_page_is_told_without_a_panic() {
        use std::sync::atomic::AtomicU64;
        let (group, mut state) = (GroupFile::create("web", false).unwrap(), uzswap_sys::thread::now_ns());
        let page: &GroupPage = group.page();
        println!("seed {state}");
        let mut word = || {
            // An xorshift; a third of the words are large enough that two of them are more than a number can be.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            [state, u64::MAX - state % 3, state % 16][(state >> 60) as usize % 3]
        };
        for _ in 0..20 {
            let words = std::ptr::from_ref(page).cast::<AtomicU64>();
            for i in 1..size_of::<GroupPage>() / 8 {
                // SAFETY: within the page, which is all atomics and aligned to cache lines.
                unsafe { &*words.add(i) }.store(word(), Relaxed);
            }
            for node in [0, 5, 63] {
                let files = super::files(page, node);
                assert!(files.iter().all(|(_, content)| !content.text().is_empty() || !content.json().is_null()));
                let totals = Totals::of(page, node);
                crate::summary::text(&totals, Some(std::time::Duration::from_secs(1)));
                assert!(!totals.group.contains(char::is_control), "{:?}", totals.group);
            }
        }
    }

    /// The story: two figures that together are more than a number can be were a small one, and a debug build panicked.
    #[test]
    fn sums_of_nonsense_are_large() {
        let group = GroupFile::create("web", false).unwrap();
        let page = group.page();
        page.used.store(2, Relaxed);
        for slot in &page.slots[..2] {
            slot.owner.store(1, Relaxed);
            slot.rss.store(u64::MAX / 2 + 1, Relaxed);
            slot.counters.folios.block_read.store(u64::MAX / 2 + 1, Relaxed);
            page.nodes[0].nr_disk_swapins.add(usize::MAX / 2);
        }
        assert!(Usage::of(page, 0).charge >= 1 << 48);
        assert_eq!(Totals::of(page, 0).folios.all["block_read"], u64::MAX);
    }
}

//! What is counted for each member, and summed for the dead ones. Names are the kernel's where it has one.
//!
//! The counters lie in the member's slot of the group's page, which outlives the member (`group`). There are two kinds:
//! cumulative counters, which sum to the group's over all members, and figures of one moment, taken together when the first of
//! them was at its peak. Only the member's own threads write its counters, and nothing is concluded from one about another, so
//! `Relaxed` is enough. Adding or removing a field changes the page's layout: see [`MAGIC`](crate::group::MAGIC).

use crate::group::folio::FolioCounters;
use core::sync::atomic::{AtomicU64, Ordering::*};

/// The counters of one member, or the sums for all dead ones.
#[repr(C)]
#[derive(Default)]
pub struct Counters {
    /// Faults served (events).
    pub pgfault: AtomicU64,
    /// Faults that needed decompression (events).
    pub pgmajfault: AtomicU64,
    /// Faults on a staged folio: moved back, no decompression (events).
    pub refault_staged: AtomicU64,
    /// Times the handler was lifted from idle to normal policy, as others wanted its CPU (events).
    pub handler_lifted: AtomicU64,
    /// Times the handler left its CPU to others, for up to 0.4 ms (events).
    pub handler_paused: AtomicU64,
    /// Faults on memory that was never touched, or was zero (events).
    pub fault_zero: AtomicU64,
    /// Pages stored in the compressed pool (4 KiB pages, cumulative).
    pub zswpout: AtomicU64,
    /// Pages loaded from the compressed pool (4 KiB pages, cumulative).
    pub zswpin: AtomicU64,
    /// Zero-filled pages evicted at no cost (4 KiB pages, cumulative).
    pub swpout_zero: AtomicU64,
    /// Clean pages evicted with their kept compressed copy (4 KiB pages, cumulative).
    pub swpout_clean: AtomicU64,
    /// Pages out in the pool (4 KiB pages, at their peak).
    pub stored_pages: AtomicU64,
    /// The part of them that did not compress and is stored as it is (4 KiB pages, at that moment).
    pub stored_incompressible_pages: AtomicU64,
    /// Bytes the pool held from the kernel (bytes, at that moment).
    pub pool_total_size: AtomicU64,
    /// Bytes of compressed data in the pool, kept copies included (bytes, at that moment).
    pub pool_used_size: AtomicU64,
    /// uzswap's own metadata (bytes, peak).
    pub metadata_size: AtomicU64,
    /// Pages whose lz4 object was replaced by a denser one (4 KiB pages, cumulative).
    pub recompressed_pages: AtomicU64,
    /// The part of them that was recompressed because it was idle and about to be written to the swap file (4 KiB pages,
    /// cumulative).
    pub recompressed_idle_pages: AtomicU64,
    /// Idle pages that are written as they are, as their object would not get an eighth smaller or found no place (4 KiB pages,
    /// cumulative).
    pub reject_recompress_poor: AtomicU64,
    /// Pages of the pool that compaction freed (4 KiB pages, cumulative).
    pub pages_compacted: AtomicU64,
    /// Page blocks (2 MiB of addresses) of the pool that compaction emptied (cumulative).
    pub pool_blocks_freed: AtomicU64,
    /// Compactions of the arena for an allocation (events). This counter and those below as in /proc/vmstat.
    pub compact_stall: AtomicU64,
    /// Compactions that made a run (events).
    pub compact_success: AtomicU64,
    /// Compactions that did not (events).
    pub compact_fail: AtomicU64,
    /// Frames examined as sources of a move (looks; a free run, a huge page, or a page block examined for choosing counts once).
    pub compact_migrate_scanned: AtomicU64,
    /// Frames examined as targets of a move (looks, likewise).
    pub compact_free_scanned: AtomicU64,
    /// Frames isolated as source or target (frames).
    pub compact_isolated: AtomicU64,
    /// Frames moved (frames).
    pub pgmigrate_success: AtomicU64,
    /// Frames that could not be moved (frames).
    pub pgmigrate_fail: AtomicU64,
    /// Frames moved more than once in one pass of compaction (frames): always 0, see `compaction`.
    pub migrated_twice: AtomicU64,
    /// Frames moved that the previous pass had moved already (frames).
    pub migrated_again: AtomicU64,
    /// Times the pivot of compaction moved, with that policy (events).
    pub pivot_moved: AtomicU64,
    /// Time program threads waited for faults to be served, as measured by the serving thread (nanoseconds, cumulative).
    pub stall_ns: AtomicU64,
    /// Direct reclaims: the fault path had to make room itself (events).
    pub direct_reclaim: AtomicU64,
    /// Times the kernel refused to move a run of pages (shared after fork, pinned), which is then un-shared, copied or left
    /// (events).
    pub move_refused: AtomicU64,
    /// Pages that the kernel moved and reported as not moved (4 KiB pages, cumulative): see `transfer`.
    pub move_concealed: AtomicU64,
    /// Stores the pool could not take (events).
    pub reject_alloc_fail: AtomicU64,
    /// Pages that were poisoned, as they could not be decompressed or read back (4 KiB pages).
    pub poisoned: AtomicU64,
    /// Counters of folios and blocks.
    pub folios: FolioCounters,
    /// Pages read from the swap file, readahead included (4 KiB pages, cumulative).
    pub pswpin: AtomicU64,
    /// Pages written to the swap file (4 KiB pages, cumulative).
    pub pswpout: AtomicU64,
    /// Pages that left for the swap file without being written, as it had them unchanged (4 KiB pages, cumulative).
    pub pswpout_clean: AtomicU64,
    /// Pages read from the swap file to be written again closer together, as there was no room in it (4 KiB pages, cumulative).
    pub swap_compacted: AtomicU64,
    /// Pages that left the pool for the swap file (4 KiB pages, cumulative): `written_back_pages` of the kernel's zswap.
    pub zswpwb: AtomicU64,
    /// Pages that stayed in the pool because writing them back failed (4 KiB pages, cumulative).
    pub reject_reclaim_fail: AtomicU64,
    /// Bytes read from the swap file (bytes, cumulative).
    pub swap_read_bytes: AtomicU64,
    /// Bytes written to the swap file (bytes, cumulative).
    pub swap_write_bytes: AtomicU64,
    /// Writes to the swap file made by the second thread, beside the one that plans them (events).
    pub swap_side_writes: AtomicU64,
    /// Reads from the swap file through io_uring (events).
    pub swap_uring_reads: AtomicU64,
    /// Reads of the swap file that failed, or returned something else than was written (events).
    pub swap_read_errors: AtomicU64,
    /// Writes to the swap file that failed (events).
    pub swap_write_errors: AtomicU64,
    /// Times the swap file did not answer for 10 seconds (events).
    pub swap_stalls: AtomicU64,
    /// Pages in the swap file (4 KiB pages, at their peak).
    pub swap_pages: AtomicU64,
    /// Bytes of objects in the swap file (bytes, at that moment).
    pub swap_used_size: AtomicU64,
}

impl Counters {
    /// Adds the cumulative counters to another's and clears them. Of the figures taken at a peak the set with the higher peak
    /// stays there.
    pub fn retire_into(&self, to: &Counters) {
        for (f, t) in self.cumulative().into_iter().zip(to.cumulative()) {
            t.fetch_add(f.swap(0, Relaxed), Relaxed);
        }
        self.folios.move_to(&to.folios);
        let most = |from: &[&AtomicU64], to: &[&AtomicU64]| {
            let more = from[0].load(Relaxed) > to[0].load(Relaxed);
            for (from, to) in from.iter().zip(to) {
                let value = from.swap(0, Relaxed);
                if more {
                    to.store(value, Relaxed);
                }
            }
        };
        most(&self.stored(), &to.stored());
        most(&[&self.metadata_size], &[&to.metadata_size]);
        most(&[&self.swap_pages, &self.swap_used_size], &[&to.swap_pages, &to.swap_used_size]);
    }

    /// The figures of the moment at which most was stored.
    fn stored(&self) -> [&AtomicU64; 4] {
        [&self.stored_pages, &self.stored_incompressible_pages, &self.pool_total_size, &self.pool_used_size]
    }

    fn cumulative(&self) -> [&AtomicU64; 45] {
        [
            &self.pgfault,
            &self.pgmajfault,
            &self.refault_staged,
            &self.handler_lifted,
            &self.handler_paused,
            &self.fault_zero,
            &self.zswpout,
            &self.zswpin,
            &self.swpout_zero,
            &self.swpout_clean,
            &self.recompressed_pages,
            &self.recompressed_idle_pages,
            &self.reject_recompress_poor,
            &self.pages_compacted,
            &self.pool_blocks_freed,
            &self.compact_stall,
            &self.compact_success,
            &self.compact_fail,
            &self.compact_migrate_scanned,
            &self.compact_free_scanned,
            &self.compact_isolated,
            &self.pgmigrate_success,
            &self.pgmigrate_fail,
            &self.migrated_twice,
            &self.migrated_again,
            &self.pivot_moved,
            &self.stall_ns,
            &self.direct_reclaim,
            &self.move_refused,
            &self.move_concealed,
            &self.reject_alloc_fail,
            &self.poisoned,
            &self.pswpin,
            &self.pswpout,
            &self.pswpout_clean,
            &self.swap_compacted,
            &self.zswpwb,
            &self.reject_reclaim_fail,
            &self.swap_read_bytes,
            &self.swap_write_bytes,
            &self.swap_side_writes,
            &self.swap_uring_reads,
            &self.swap_read_errors,
            &self.swap_write_errors,
            &self.swap_stalls,
        ]
    }
}

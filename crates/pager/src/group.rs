//! The group: what a tree of processes under one limit shares.
//!
//! The command creates one memory object, sized for [`GroupPage`], and every process of the tree maps it (found
//! through the environment variable [`ENV_GROUP`], a path such as `/proc/PID/fd/N` of the command). All fields are
//! atomics; nobody holds a lock, so a member may be killed at any instruction and harms nobody: its slot is
//! recognised as dead by its pid and folded into `dead`.
//!
//! Sizes are bytes unless the name says otherwise.

use crate::inject::Faults;
use core::sync::atomic::{AtomicU32, AtomicU64};

/// Environment variable with the path of the group's memory object.
pub const ENV_GROUP: &str = "UZSWAP_GROUP";
/// First word of the page: refuses a page of another version.
pub const MAGIC: u64 = 0x757a_7377_6170_0002;
/// Processes that can be members at once.
pub const SLOTS: usize = 1024;

/// Codec of the pool, as stored in `GroupPage::codec`: 0 lz4, 1 zstd, 2 deflate.
pub const CODEC_LZ4: u32 = 0;
/// See [`CODEC_LZ4`].
pub const CODEC_ZSTD: u32 = 1;
/// See [`CODEC_LZ4`].
pub const CODEC_DEFLATE: u32 = 2;

/// Counters of one member (or of all the dead ones). Names are the kernel's where it has one.
#[repr(C)]
#[derive(Default)]
pub struct Counters {
    /// Faults served (events).
    pub pgfault: AtomicU64,
    /// Faults that needed decompression (events).
    pub pgmajfault: AtomicU64,
    /// Faults on a staged folio: moved back, no decompression (events).
    pub refault_staged: AtomicU64,
    /// Faults on memory never touched, or zero (events).
    pub fault_zero: AtomicU64,
    /// Pages stored in the compressed pool (4 KiB pages, cumulative).
    pub zswpout: AtomicU64,
    /// Pages loaded from the compressed pool (4 KiB pages, cumulative).
    pub zswpin: AtomicU64,
    /// Zero-filled pages evicted at no cost (4 KiB pages, cumulative).
    pub swpout_zero: AtomicU64,
    /// Clean pages evicted with their kept compressed copy (4 KiB pages, cumulative).
    pub swpout_clean: AtomicU64,
    /// Pages stored raw because they did not compress (4 KiB pages, now).
    pub stored_incompressible_pages: AtomicU64,
    /// Pages out in the pool (4 KiB pages, at the moment when they were most).
    pub stored_pages: AtomicU64,
    /// Bytes the pool held from the kernel (bytes, at that moment).
    pub pool_total_size: AtomicU64,
    /// Bytes of compressed data in the pool, kept copies included (bytes, at that moment).
    pub pool_used_size: AtomicU64,
    /// uzswap's own metadata (bytes, most at once).
    pub metadata_size: AtomicU64,
    /// Pages whose lz4 object was replaced by a denser one (4 KiB pages, cumulative).
    pub recompressed_pages: AtomicU64,
    /// Pages of the pool that compaction freed (4 KiB pages, cumulative).
    pub pages_compacted: AtomicU64,
    /// Time program threads waited for faults to be served, as the server saw it (nanoseconds, cumulative).
    pub stall_ns: AtomicU64,
    /// Direct reclaims: the fault path had to make room itself (events).
    pub direct_reclaim: AtomicU64,
    /// Pages that could not be moved (shared after fork, pinned) and were un-shared or copied (4 KiB pages).
    pub move_refused: AtomicU64,
    /// Pages the kernel moved and said it had not (4 KiB pages, cumulative): see `transfer`.
    pub move_concealed: AtomicU64,
    /// Stores the pool could not take (events).
    pub reject_alloc_fail: AtomicU64,
    /// Pages that could not be decompressed and were poisoned (4 KiB pages).
    pub poisoned: AtomicU64,
}

/// One member process.
#[repr(C)]
#[derive(Default)]
pub struct Slot {
    /// The member's pid, 0 when free.
    pub pid: AtomicU32,
    /// Bumped to wake the member's reclaim thread (a futex word).
    pub wake: AtomicU32,
    /// RssAnon of the member as it last read it.
    pub rss: AtomicU64,
    /// Program memory out of RAM (staged excluded): what it would use on top without uzswap.
    pub swapped: AtomicU64,
    /// The member's counters.
    pub counters: Counters,
}

/// The shared page.
#[repr(C)]
pub struct GroupPage {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// The limit on resident + pool + metadata.
    pub limit: AtomicU64,
    /// See [`CODEC_LZ4`].
    pub codec: AtomicU32,
    /// Level for zstd and deflate, 0 the default.
    pub level: AtomicU32,
    /// 1 when the pool is left out of what the limit bounds (only to compare with the kernel on cgroup v1).
    pub pool_uncharged: AtomicU32,
    /// 1 once somebody has warned that a static child runs unmanaged.
    pub warned_unmanaged: AtomicU32,
    /// Highest sum of members' `rss` seen.
    pub peak: AtomicU64,
    /// Highest sum of members' `rss` + `swapped` seen: the most memory held.
    pub peak_held: AtomicU64,
    /// Members that ever joined.
    pub joined: AtomicU32,
    /// Members that reached the point where memory is managed (below it nothing is touched).
    pub engaged: AtomicU32,
    /// Times the limit could not be kept because nothing more could be reclaimed (events).
    pub over_limit: AtomicU64,
    /// 1 when members record what happens to their pages: [`crate::trace::Rings`] follow this page.
    pub recording: AtomicU32,
    /// What the dead members counted (cumulative fields only).
    pub dead: Counters,
    /// What a test wants to fail; nothing otherwise.
    pub faults: Faults,
    /// The members.
    pub slots: [Slot; SLOTS],
}

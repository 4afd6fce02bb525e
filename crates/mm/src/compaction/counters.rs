//! Compaction's counters: the kernel's, by their names in `/proc/vmstat`, and two of our own.

/// Counters of one zone, cumulative. The zone's lock protects them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Direct compactions tried (events).
    pub compact_stall: u64,
    /// Direct compactions after which a run of the order was free (events).
    pub compact_success: u64,
    /// Direct compactions after which none was (events).
    pub compact_fail: u64,
    /// What the migrate scanner looked at (looks, as the kernel counts them: a free run or a huge page is one look; so
    /// is a page block looked at to choose, and a word of the map of free frames).
    pub compact_migrate_scanned: u64,
    /// What the free scanner looked at (looks, likewise).
    pub compact_free_scanned: u64,
    /// Frames that either scanner took (frames).
    pub compact_isolated: u64,
    /// Pages moved (frames).
    pub pgmigrate_success: u64,
    /// Pages that were isolated but could not be moved (frames).
    pub pgmigrate_fail: u64,
    /// Pages moved more than once in one pass (frames): bound 0, see `compaction`. If a page is freed after its move
    /// and another is allocated in its frame within the pass, it counts as the same page.
    pub migrated_twice: u64,
    /// Pages moved that the previous pass had moved, too (frames).
    pub migrated_again: u64,
}

impl Counters {
    /// The difference from an earlier reading, `before`.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            compact_stall: self.compact_stall - before.compact_stall,
            compact_success: self.compact_success - before.compact_success,
            compact_fail: self.compact_fail - before.compact_fail,
            compact_migrate_scanned: self.compact_migrate_scanned - before.compact_migrate_scanned,
            compact_free_scanned: self.compact_free_scanned - before.compact_free_scanned,
            compact_isolated: self.compact_isolated - before.compact_isolated,
            pgmigrate_success: self.pgmigrate_success - before.pgmigrate_success,
            pgmigrate_fail: self.pgmigrate_fail - before.pgmigrate_fail,
            migrated_twice: self.migrated_twice - before.migrated_twice,
            migrated_again: self.migrated_again - before.migrated_again,
        }
    }

    /// Looks of both scanners.
    pub fn scanned(&self) -> u64 {
        self.compact_migrate_scanned + self.compact_free_scanned
    }
}

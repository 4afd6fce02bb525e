//! What compaction counts: the kernel's names (`/proc/vmstat`), and two of our own.

/// Counters of one zone, cumulative; under the lock of the zone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Direct compactions that were tried (events).
    pub compact_stall: u64,
    /// Those after which a run of the order was there (events).
    pub compact_success: u64,
    /// Those after which none was (events).
    pub compact_fail: u64,
    /// Frames the migrate scanner looked at (looks, as the kernel counts: a free run or a huge page is one; so
    /// is a page block looked at to choose, and a word of the map of free frames).
    pub compact_migrate_scanned: u64,
    /// Frames the free scanner looked at (looks, likewise).
    pub compact_free_scanned: u64,
    /// Frames taken by either scanner (frames).
    pub compact_isolated: u64,
    /// Pages moved (frames).
    pub pgmigrate_success: u64,
    /// Pages that could not be moved though isolated (frames).
    pub pgmigrate_fail: u64,
    /// Pages moved more than once in one pass (frames): bound 0, see `compaction`. A page freed after its move and another
    /// allocated in its frame within the pass counts as if it were the same.
    pub migrated_twice: u64,
    /// Pages moved that the pass before had moved (frames).
    pub migrated_again: u64,
}

impl Counters {
    /// What was counted since: `before` is an earlier reading.
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

    /// Frames looked at by both.
    pub fn scanned(&self) -> u64 {
        self.compact_migrate_scanned + self.compact_free_scanned
    }
}

//! Tracks which process has which cluster of the swap file: books that a group shares, and that outlive any of its members.
//!
//! A process that needs room *claims* a free cluster. After a fork parent and child both have objects in the parent's clusters,
//! so what counts is who *refers* to a cluster: each process has a row of bits, one for each cluster. A cluster is free again
//! when the last reference is gone. Only a process that alone refers to a cluster may write into what it has freed there, as
//! another might still read it.
//!
//! ```text
//! owner[c]   generation │ row of the claimer + 1, 0: free       claimed and freed by compare-and-swap of the whole word
//! row[r]     whose it is, and a bit for each cluster            set by claim and inherit, cleared by release and bury
//! ```
//! The steps themselves are in `references`, where they are modelled with loom.
//!
//! Nobody holds a lock, and a member may be killed at any instruction:
//! - A row belongs to the process named in it. A parent makes its child's row before it forks, as the child's reference must
//!   exist before the parent can give up its own. Once there is a child, the row names it as its *heir*: it is the child's,
//!   whatever becomes of the parent; if the child ends before it has taken the row over, it is a dead process's row. A process
//!   that finds a dead process's row takes it over and empties it; if killed meanwhile, it is itself the dead one.
//! - Several processes may find the same row, and one of them may be its own living owner: it executed another program, and
//!   empties what it had before. So a process that is about to change a row's owner and empty it first enters itself as its
//!   *taker*, and then checks again. Nobody else touches the row until that is done or the taker is dead. (A taker that executes
//!   another program meanwhile keeps the row until that program is managed too, or ends.)
//! - If a claimer dies between claiming a cluster and setting its bit, that is found when its row is emptied.
//! - *release* first clears the bit, and then looks at the other rows: of two that release at once, one sees that it was the
//!   last. A fork under way passes references from row to row, and one could be missed; so `forks` counts the rows inherited, and
//!   a process that looks starts over if the count has changed.
//! - A write past the page cache may still go on when its process seems to have ended, or executes another program, as the
//!   writing thread ends last. So a row says which clusters are being written to. Whoever empties it marks them as *late*: nobody
//!   writes there before all such writes are known to have ended, for which all references must be gone (`Pager::await_late`).

use super::pipeline::DEPTH;
use super::references::{OWNER_BITS, OWNER_MASK, References};
use crate::pager::Pager;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use uzswap_mm::swapfile::{Geometry, MOST_CLUSTERS};
use uzswap_sys::process::Identity;
use uzswap_sys::thread;

/// Environment variable with the path of the swap file's books, a memory object of the command's.
pub const ENV_SWAP: &str = "UZSWAP_SWAP";
/// First word of the books. Books of another version have another, and are refused.
pub const MAGIC: u64 = 0x757a_7377_6469_0007;
/// [`ClusterMap::clear`] where data is not encrypted.
pub const IN_THE_CLEAR: u32 = 0x636c_6561;
/// Name of the books' memory object, which the kernel shows in `/proc/PID/fd`.
pub const OBJECT: &str = "uzswap-swap";
/// Processes that can have something in a swap file at once.
pub const ROWS: usize = 1024;
/// No row.
const NONE: usize = usize::MAX;
const WORDS: usize = MOST_CLUSTERS / 64;
const _: () = assert!(ROWS < 1 << OWNER_BITS);

/// The references of one process.
#[repr(C)]
struct Row {
    /// The owner ([`Identity::raw`]), 0 if the row is free. Changed only by its taker, or by a forked child that takes over what
    /// its parent made for it.
    owner: AtomicU64,
    /// The process that is changing the owner and emptying the row, 0 for none. It counts as long as it exists. The other sign
    /// that a process is dead (the ticker) concerns the owner, and may still be the former owner's.
    taker: AtomicU64,
    /// The forked child for which the owner made the row, and which is to take it over; 0 for none.
    heir: AtomicU64,
    /// The thread id of the owner's ticker, once known. If that thread is gone, the process executes a program that is not
    /// managed.
    ticker: AtomicU32,
    /// The clusters that the owner is writing to, each + 1; 0 for none.
    writing: [AtomicU32; DEPTH],
    bits: [AtomicU64; WORDS],
}

/// The books of a swap file, shared by the processes of a run: the object that [`ENV_SWAP`] leads to. It is large, but only what
/// is touched takes memory. All zeros, except what the command sets.
#[repr(C)]
pub struct ClusterMap {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// Size that the user asked for: most bytes on disk.
    pub bytes: AtomicU64,
    /// Pid of the command, which holds the file open, and its descriptor there.
    pub pid: AtomicU32,
    /// See `pid`.
    pub fd: AtomicI32,
    /// Identity of that file ([`uzswap_sys::blockio::identity`]). Once the command has ended its pid may be another process's,
    /// and `fd` another file there.
    pub file: [AtomicU64; 2],
    /// Policy of the shrinker: see [`uzswap_mm::shrinker::Policy::from_number`].
    pub policy: AtomicU32,
    /// 1: a server instead of a file; `fd` is the socket at which the command takes requests (`swap::backend`).
    pub remote: AtomicU32,
    /// 1: transfers bypass the page cache (`O_DIRECT`); the command has tried that the file system can.
    pub direct: AtomicU32,
    /// 1: do not use io_uring, and do not note who writes where, as holes, which are the way to wait for such writes, cannot be
    /// punched.
    pub plain: AtomicU32,
    /// [`IN_THE_CLEAR`]: data is not encrypted. With any other value it is, with a key for each process: a member's stray write
    /// must not have others' data written in the clear.
    pub clear: AtomicU32,
    /// Share of the limit that the pools may take before objects are written back (percent).
    pub max_pool_percent: AtomicU32,
    /// Share of that at which writing back stops (percent).
    pub accept_threshold_percent: AtomicU32,
    /// Messages given, once for the run: see `swap::io::Trouble`.
    pub told: AtomicU32,
    /// Bytes of the file that are preallocated.
    pub allocated: AtomicU64,
    /// How often a member found no room: each of the others then gives up the places that it only keeps.
    pub(super) asked: AtomicU32,
    /// When one last did (monotonic nanoseconds).
    pub(super) asked_at: AtomicU64,
    /// Number of rows inherited so far.
    forks: AtomicU32,
    /// One more than the highest row ever used.
    used: AtomicU32,
    owner: [AtomicU32; MOST_CLUSTERS],
    /// A bit for each cluster that a process was writing to when it ended.
    late: [AtomicU64; WORDS],
    rows: [Row; ROWS],
}

impl ClusterMap {
    /// How the file is divided.
    pub fn geometry(&self) -> Option<Geometry> {
        Geometry::of(self.bytes.load(Relaxed))
    }

    /// Notes the cluster that row `me`'s process writes to as its write `slot`; None when that write has ended.
    pub(super) fn note_writing(&self, me: usize, slot: usize, cluster: Option<u32>) {
        self.rows[me].writing[slot].store(cluster.map_or(0, |c| c + 1), SeqCst);
    }

    /// Whether a cluster is unclaimed.
    pub fn is_free(&self, cluster: u32) -> bool {
        self.owner[cluster as usize].load(SeqCst) & OWNER_MASK == 0
    }

    /// The owner of a row ([`Identity::raw`]), 0 if it is free.
    pub(super) fn owner_of(&self, row: usize) -> u64 {
        self.rows[row].owner.load(SeqCst)
    }

    /// Whether the process `owner` ([`Identity::raw`]) owns row `row` and refers to a cluster by it.
    pub fn is_claimed_by(&self, cluster: u32, row: usize, owner: u64) -> bool {
        if row >= ROWS || cluster >= self.clusters() || self.rows[row].owner.load(SeqCst) != owner {
            return false;
        }
        self.refers(row, cluster)
    }

    /// Number of clusters in use.
    pub fn clusters_used(&self) -> usize {
        let used = |owner: &&AtomicU32| owner.load(Relaxed) & OWNER_MASK != 0;
        self.owner[..self.clusters() as usize].iter().filter(used).count()
    }

    /// Whether at least so many eighths of the clusters are in use.
    pub fn has_filled(&self, eighths: usize) -> bool {
        self.clusters_used() * 8 >= self.clusters() as usize * eighths
    }

    /// Makes `me` the taker of a row; false while another process is.
    fn hold(&self, row: usize, me: Identity) -> bool {
        let taker = &self.rows[row].taker;
        let held = taker.load(SeqCst);
        let may = Identity::from_raw(held).is_none_or(Identity::is_dead);
        may && taker.compare_exchange(held, me.raw(), SeqCst, Relaxed).is_ok()
    }

    /// Ends being the taker of a row, which stays with its owner.
    fn let_go(&self, row: usize, me: Identity) {
        let _ = self.rows[row].taker.compare_exchange(me.raw(), 0, SeqCst, Relaxed);
    }

    /// Makes `me` the owner of a row that is free or a dead process's, empties it, and frees it unless `keeps`; false if it is
    /// neither, or another's by now.
    fn take(&self, row: usize, me: Identity, keeps: bool) -> bool {
        let r = &self.rows[row];
        if !r.is_to_be_had() || !self.hold(row, me) {
            return false;
        }
        // Between the first look and the hold another process may have taken the row, and even used it. And a forked child takes
        // over a row that its parent, killed at once, made for it without a hold.
        let owner = r.owner.load(SeqCst);
        let taken = r.is_to_be_had() && r.owner.compare_exchange(owner, me.raw(), SeqCst, Relaxed).is_ok();
        if taken {
            r.heir.store(0, SeqCst);
            r.ticker.store(0, SeqCst);
            self.empty(row);
        }
        if taken && !keeps {
            let _ = r.owner.compare_exchange(me.raw(), 0, SeqCst, Relaxed);
        }
        self.let_go(row, me);
        taken
    }

    /// Empties a row and frees it if it is `me`'s and not about to be taken over by a child; false if it is not, or if another
    /// process has come to take it.
    fn give_up(&self, row: usize, me: Identity) -> bool {
        let r = &self.rows[row];
        let is_mine = || r.owner.load(SeqCst) == me.raw() && r.heir.load(SeqCst) == 0;
        if !is_mine() || !self.hold(row, me) {
            return false;
        }
        let is_mine = is_mine();
        if is_mine {
            self.empty(row);
            r.ticker.store(0, SeqCst);
            let _ = r.owner.compare_exchange(me.raw(), 0, SeqCst, Relaxed);
        }
        self.let_go(row, me);
        is_mine
    }

    /// Names the child that is to take over a row that `me` made for it, unless the child has done so already.
    pub(super) fn leave_to(&self, row: usize, me: Identity, child: Identity) {
        let r = &self.rows[row];
        // Another process takes it just now only if the child has it, and has ended.
        if !self.hold(row, me) {
            return;
        }
        if r.owner.load(SeqCst) == me.raw() {
            r.heir.store(child.raw(), SeqCst);
            // The child took it over meanwhile, which needs no hold.
            if r.owner.load(SeqCst) != me.raw() {
                let _ = r.heir.compare_exchange(child.raw(), 0, SeqCst, Relaxed);
            }
        }
        self.let_go(row, me);
    }

    /// Makes a forked child the owner of a row that `parent` made for it; false if the row is another's.
    pub(super) fn take_over(&self, row: usize, parent: u64, me: Identity) -> bool {
        let r = &self.rows[row];
        let taken = r.owner.compare_exchange(parent, me.raw(), SeqCst, Relaxed).is_ok();
        if taken {
            r.heir.store(0, SeqCst);
        }
        taken
    }

    /// Takes a free or a dead process's row, and leaves it empty in the hands of `me`.
    pub fn take_row(&self, me: Identity) -> Option<usize> {
        (0..ROWS).find(|row| {
            // It counts as used before it is: whoever looks at a cluster's other rows must not miss it.
            self.rows[*row].is_to_be_had() && {
                self.used.fetch_max(*row as u32 + 1, SeqCst);
                self.take(*row, me, true)
            }
        })
    }

    /// Empties the rows that this process had before it executed another program. Call it before any of its threads takes a row.
    pub fn forget_own(&self, me: Identity) {
        for row in 0..self.used_rows() {
            // Rows that it was just taking then are nobody's to take now.
            self.let_go(row, me);
            self.give_up(row, me);
        }
    }

    /// Empties the rows of processes that have died, or that execute a program that is not managed.
    pub fn bury_the_dead(&self, me: Identity) {
        for row in 0..self.used_rows() {
            let r = &self.rows[row];
            let owner = r.owner.load(SeqCst);
            if owner != 0 && (owner != me.raw() || r.heir.load(SeqCst) != 0) {
                self.take(row, me, false);
            }
        }
    }
}

impl References for ClusterMap {
    type Half = AtomicU32;
    type Whole = AtomicU64;

    fn clusters(&self) -> u32 {
        self.geometry().map_or(0, |g| g.clusters)
    }
    fn used_rows(&self) -> usize {
        (self.used.load(SeqCst) as usize).min(ROWS)
    }
    fn forks(&self) -> &AtomicU32 {
        &self.forks
    }
    fn owner(&self, cluster: u32) -> &AtomicU32 {
        &self.owner[cluster as usize]
    }
    fn late(&self, word: usize) -> &AtomicU64 {
        &self.late[word]
    }
    fn bits(&self, row: usize, word: usize) -> &AtomicU64 {
        &self.rows[row].bits[word]
    }
    fn writing(&self, row: usize) -> &[AtomicU32] {
        &self.rows[row].writing
    }
}

#[cfg(test)]
impl ClusterMap {
    /// For tests: nobody has anything.
    pub(super) fn reset(&self) {
        self.asked_at.store(0, SeqCst);
        self.owner.iter().for_each(|owner| owner.store(0, SeqCst));
        self.late.iter().for_each(|late| late.store(0, SeqCst));
        for row in &self.rows[..self.used_rows()] {
            row.owner.store(0, SeqCst);
            row.taker.store(0, SeqCst);
            row.heir.store(0, SeqCst);
            row.ticker.store(0, SeqCst);
            row.writing.iter().for_each(|writing| writing.store(0, SeqCst));
            row.bits.iter().for_each(|bits| bits.store(0, SeqCst));
        }
    }

    /// For tests: makes a row refer to clusters, as one that was inherited does.
    pub(super) fn share_for_test(&self, row: usize, clusters: core::ops::RangeInclusive<u32>) {
        for cluster in clusters {
            self.refer(row, cluster);
        }
    }

    /// For tests: gives a row to a process whose ticker has this thread id.
    pub(super) fn set_row(&self, row: usize, owner: Identity, ticker: u32) {
        self.used.fetch_max(row as u32 + 1, SeqCst);
        self.rows[row].owner.store(owner.raw(), SeqCst);
        self.rows[row].ticker.store(ticker, SeqCst);
    }

    /// For tests: makes a process the taker of a row.
    pub(super) fn set_taker(&self, row: usize, taker: Identity) {
        self.rows[row].taker.store(taker.raw(), SeqCst);
    }
}

impl Row {
    /// Whether the row is free or nothing is left of its process: the process is gone, or its helpers are (it executed another
    /// program). Only the taker may rely on this: while another process takes the row, the ticker may be the former owner's.
    fn is_to_be_had(&self) -> bool {
        let Some(owner) = Identity::from_raw(self.owner.load(SeqCst)) else { return true };
        if let Some(heir) = Identity::from_raw(self.heir.load(SeqCst)) {
            return heir.is_dead();
        }
        let ticker = self.ticker.load(SeqCst);
        let left = || ticker != 0 && !thread::is_there(owner.pid() as i32, ticker as i32);
        owner.is_dead() || left()
    }
}

/// The rows that are this process's. They are atomics only because the pager is shared, and change with the pager's lock held.
/// Other processes contend for the rows themselves, which have holds of their own: see [`ClusterMap`].
pub struct Rows {
    /// Its own row; `NONE` until it needs one.
    own: AtomicUsize,
    /// The row that it made for the child being forked.
    child: AtomicUsize,
    /// The process that forks.
    parent: AtomicU64,
}

impl Default for Rows {
    fn default() -> Self {
        Self { own: AtomicUsize::new(NONE), child: AtomicUsize::new(NONE), parent: AtomicU64::new(0) }
    }
}

impl Pager {
    /// This process's row; takes one when it first needs it.
    pub(crate) fn own_row(&self, map: &ClusterMap) -> Option<usize> {
        let known = self.rows.own.load(Relaxed);
        if known != NONE {
            return Some(known);
        }
        let row = map.take_row(Identity::own())?;
        map.rows[row].ticker.store(self.ticker.load(Acquire) as u32, SeqCst);
        self.rows.own.store(row, Relaxed);
        Some(row)
    }

    /// This process's row, if it has one.
    pub(crate) fn own_row_if_any(&self) -> Option<usize> {
        Some(self.rows.own.load(Relaxed)).filter(|row| *row != NONE)
    }

    /// Before fork, with the lock held: makes a row with this process's references for the child, if it has any. If there is no
    /// row the child cannot get what is on disk, and finds out.
    pub(crate) fn make_row_for_child(&self, clusters: usize) {
        self.rows.child.store(NONE, Relaxed);
        let (own, me) = (self.rows.own.load(Relaxed), Identity::own());
        self.rows.parent.store(me.raw(), Relaxed);
        if let Some(map) = self.clusters
            && own != NONE
            && clusters > 0
            && let Some(row) = map.take_row(me)
        {
            map.inherit(own, row);
            self.rows.child.store(row, Relaxed);
        }
    }

    /// After fork, in the parent: gives the child's row up if there is no child; otherwise leaves it to the child.
    ///
    /// The story: until the child took the row over it was only the parent's. A parent that executed another program at once
    /// emptied it as its own, and the child was ended. A child that ended before it took the row over left it in use as long as
    /// the parent lived.
    pub(crate) fn end_fork(&self, child: isize) {
        let row = self.rows.child.swap(NONE, Relaxed);
        if let Some(map) = self.clusters.filter(|_| row != NONE)
            && let Some(me) = Identity::from_raw(self.rows.parent.load(Relaxed))
        {
            if child < 0 {
                map.give_up(row, me);
            } else {
                map.leave_to(row, me, Identity::of(child as u32));
            }
        }
    }

    /// In a forked child, with the lock held: takes over the row made for it; false if it has pages on disk and no row.
    pub(crate) fn take_inherited_row(&self, clusters: usize) -> bool {
        let row = self.rows.child.swap(NONE, Relaxed);
        self.rows.own.store(row, Relaxed);
        let Some(map) = self.clusters else { return true };
        if row == NONE {
            return clusters == 0;
        }
        // No ticker is noted there yet: the parent took it that way.
        // If the parent was killed at once, before it could name its child, it may have been buried.
        map.take_over(row, self.rows.parent.load(Relaxed), Identity::own())
    }

    /// Notes the thread id of the new ticker.
    pub(crate) fn row_has_ticker(&self, tid: i32) {
        let own = self.rows.own.load(Relaxed);
        if let Some(map) = self.clusters.filter(|_| own != NONE) {
            map.rows[own].ticker.store(tid as u32, SeqCst);
        }
    }

    /// Makes a new process of the run use a swap file, before other threads know of the pager.
    pub fn swap_to(&mut self, map: &'static ClusterMap) {
        map.forget_own(Identity::own());
        self.clusters = Some(map);
        let mut s = self.state.lock();
        s.swap = super::Swap::of(map, &self.group.nodes[self.node].nr_disk_swapins);
        if map.is_remote() {
            s.pt.disk_is_remote();
        }
    }
}

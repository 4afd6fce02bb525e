//! Which process has which cluster of the swap file: books that a group shares, and that outlive any of its members.
//!
//! A process that needs room *claims* a free cluster. After fork parent and child both have objects in the parent's
//! clusters, so what counts is who *refers* to a cluster: each process has a row of bits, one for each cluster. A
//! cluster is free again when the last reference is gone, and only a process that alone refers to a cluster may write
//! into what it has freed there (another might still read it).
//!
//! ```text
//! owner[c]   generation │ row of the claimer + 1, 0: free       claimed and freed by compare-and-swap of the whole word
//! row[r]     whose it is, and a bit for each cluster            set by claim and inherit, cleared by release and bury
//! ```
//! The steps themselves are in `references`, where they are modelled with loom.
//!
//! Nobody holds a lock, and a member may be killed at any instruction:
//! - A row belongs to the process named in it. A parent makes its child's row before it forks (the child's reference must
//!   be there before the parent can give up its own). Once there is a child the row names it as its *heir*: it is the child's,
//!   whatever becomes of the parent, and a dead process's when the child ends before it has taken it over. Who finds a row
//!   whose process is dead takes it over and empties it; killed meanwhile, it is itself the dead one.
//! - Several may find the same row, and a process that is alive may be one of them: it executed another program, and empties what
//!   it had before. So who is about to change whose a row is, and to empty it, first puts its name to it as its *taker*, and
//!   looks again then. Nobody else touches the row until that is over, or the taker is dead itself. (One that
//!   executes another program in the midst of it keeps the row until that program is managed too, or ends.)
//! - A cluster whose claimer died between claiming it and setting its bit is found when its row is emptied.
//! - *release* clears the bit first and looks at the other rows then: of two that release at once one sees that it was
//!   the last. A reference that passes from row to row by a fork under way could be missed, so `forks` counts the rows
//!   inherited, and who looks starts over when it changed.
//! - A write past the page cache may go on when its process seems to have ended, or executes another program: the thread that makes it
//!   ends last. So a row says which clusters are being written to. Who empties it marks them as *late*: nobody writes there before all such writes are
//!   known to have ended, for which all references must be gone (`Pager::await_late`).

use super::pipeline::DEPTH;
use super::references::{OWNER_BITS, OWNER_MASK, References};
use crate::pager::Pager;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use uzswap_mm::swapfile::{Geometry, MOST_CLUSTERS};
use uzswap_sys::process::Identity;
use uzswap_sys::thread;

/// Environment variable with the path of the swap file's books, a memory object of the command's.
pub const ENV_SWAP: &str = "UZSWAP_SWAP";
/// First word of the books: refuses those of another version.
pub const MAGIC: u64 = 0x757a_7377_6469_0005;
/// Processes that can have something in a swap file at once.
pub const ROWS: usize = 1024;
/// No row.
const NONE: usize = usize::MAX;
const WORDS: usize = MOST_CLUSTERS / 64;
const _: () = assert!(ROWS < 1 << OWNER_BITS);

/// What one process refers to.
#[repr(C)]
struct Row {
    /// Whose it is ([`Identity::raw`]), 0 when free. Changed by its taker only, or by a forked child that takes over what its
    /// parent made for it.
    owner: AtomicU64,
    /// Who is changing whose it is, and empties it, 0 for nobody. A process that is there: what else shows that one is dead
    /// (the ticker) is of the owner, and may be of the former one still.
    taker: AtomicU64,
    /// The forked child that its owner made it for, and that is to take it over; 0 for nobody.
    heir: AtomicU64,
    /// The thread id of its ticker, once known: without it the process executes a program that is not managed.
    ticker: AtomicU32,
    /// The clusters that it writes to just now, each + 1; 0 for none.
    writing: [AtomicU32; DEPTH],
    bits: [AtomicU64; WORDS],
}

/// The books of a swap file, shared by the processes of a run: the object that [`ENV_SWAP`] leads to. It is large, but
/// memory is used only for what is touched. All zeros but what the command sets.
#[repr(C)]
pub struct ClusterMap {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// Most bytes on disk, as asked for.
    pub bytes: AtomicU64,
    /// The command that holds the file open, and its descriptor there.
    pub pid: AtomicU32,
    /// See `pid`.
    pub fd: AtomicI32,
    /// Which file that is ([`uzswap_sys::blockio::identity`]): when the command has ended, its number may be another's, and `fd` be
    /// another file there.
    pub file: [AtomicU64; 2],
    /// Policy of the shrinker: see [`uzswap_mm::shrinker::Policy::from_number`].
    pub policy: AtomicU32,
    /// 1: not a file, but a server: `fd` names the socket at which the command takes requests (`swap::backend`).
    pub remote: AtomicU32,
    /// 1: transfers bypass the page cache (`O_DIRECT`), which the file system was seen to do.
    pub direct: AtomicU32,
    /// 1: io_uring is not to be used, nor is it noted who writes where, as holes, by which that is waited for, cannot be punched.
    pub plain: AtomicU32,
    /// 1: what is written is encrypted, with a key of each process.
    pub encrypt: AtomicU32,
    /// Share of the limit that the pools may take before objects are written back (percent).
    pub max_pool_percent: AtomicU32,
    /// Share of that down to which they are written back then (percent).
    pub accept_threshold_percent: AtomicU32,
    /// What has been told, once for the run: see `swap::io::Trouble`.
    pub told: AtomicU32,
    /// Bytes of the file that have been preallocated.
    pub allocated: AtomicU64,
    /// Rows inherited so far.
    forks: AtomicU32,
    /// One past the highest row ever used.
    used: AtomicU32,
    owner: [AtomicU32; MOST_CLUSTERS],
    /// A bit for each cluster that was being written to by a process when that ended.
    late: [AtomicU64; WORDS],
    rows: [Row; ROWS],
}

impl ClusterMap {
    /// How the file is divided.
    pub fn geometry(&self) -> Option<Geometry> {
        Geometry::of(self.bytes.load(Relaxed))
    }

    /// The process of row `me` writes to a cluster as its write `slot`, or does not any more.
    pub(super) fn note_writing(&self, me: usize, slot: usize, cluster: Option<u32>) {
        self.rows[me].writing[slot].store(cluster.map_or(0, |c| c + 1), SeqCst);
    }

    /// Whether nobody has claimed a cluster.
    pub fn is_free(&self, cluster: u32) -> bool {
        self.owner[cluster as usize].load(SeqCst) & OWNER_MASK == 0
    }

    /// The process that has a row ([`Identity::raw`]), 0 when it is free.
    pub(super) fn owner_of(&self, row: usize) -> u64 {
        self.rows[row].owner.load(SeqCst)
    }

    /// Whether the process `owner` ([`Identity::raw`]) has row `row` and refers to a cluster by it.
    pub fn is_claimed_by(&self, cluster: u32, row: usize, owner: u64) -> bool {
        if row >= ROWS || cluster >= self.clusters() || self.rows[row].owner.load(SeqCst) != owner {
            return false;
        }
        self.refers(row, cluster)
    }

    /// Clusters in use.
    pub fn clusters_used(&self) -> usize {
        let used = |owner: &&AtomicU32| owner.load(Relaxed) & OWNER_MASK != 0;
        self.owner[..self.clusters() as usize].iter().filter(used).count()
    }

    /// Whether half of the clusters or more are in use.
    pub fn is_half_full(&self) -> bool {
        self.clusters_used() * 2 >= self.clusters() as usize
    }

    /// Becomes the taker of a row; false while another is.
    fn hold(&self, row: usize, me: Identity) -> bool {
        let taker = &self.rows[row].taker;
        let held = taker.load(SeqCst);
        let may = Identity::from_raw(held).is_none_or(Identity::is_dead);
        may && taker.compare_exchange(held, me.raw(), SeqCst, Relaxed).is_ok()
    }

    /// Is its taker no more, and leaves it to whom it belongs.
    fn let_go(&self, row: usize, me: Identity) {
        let _ = self.rows[row].taker.compare_exchange(me.raw(), 0, SeqCst, Relaxed);
    }

    /// Makes a row that is free or a dead process's `me`'s own, empties it, and frees it unless it `keeps` it; false when it is
    /// neither, or another's by now.
    fn take(&self, row: usize, me: Identity, keeps: bool) -> bool {
        let r = &self.rows[row];
        if !r.is_to_be_had() || !self.hold(row, me) {
            return false;
        }
        // (It may have been taken, and even used, between the first look and the hold. A forked child that takes over
        // what its parent, killed at once, made for it does so without one.)
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

    /// Empties a row and frees it, if it is `me`'s and not a child's that is to take it over; false when it is not, or another has come to
    /// take it.
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

    /// Names the child that is to take over a row which `me` made for it, unless it has done so already.
    pub(super) fn leave_to(&self, row: usize, me: Identity, child: Identity) {
        let r = &self.rows[row];
        // (Who takes it just now does so because the child has it, and has ended.)
        if !self.hold(row, me) {
            return;
        }
        if r.owner.load(SeqCst) == me.raw() {
            r.heir.store(child.raw(), SeqCst);
            // (Taken over meanwhile, which is done without a hold.)
            if r.owner.load(SeqCst) != me.raw() {
                let _ = r.heir.compare_exchange(child.raw(), 0, SeqCst, Relaxed);
            }
        }
        self.let_go(row, me);
    }

    /// A forked child becomes the owner of a row that `parent` made for it; false when it is another's.
    pub(super) fn take_over(&self, row: usize, parent: u64, me: Identity) -> bool {
        let r = &self.rows[row];
        let taken = r.owner.compare_exchange(parent, me.raw(), SeqCst, Relaxed).is_ok();
        if taken {
            r.heir.store(0, SeqCst);
        }
        taken
    }

    /// Takes a row, free or a dead process's, and leaves it empty in the hands of `me`.
    pub fn take_row(&self, me: Identity) -> Option<usize> {
        (0..ROWS).find(|row| {
            // (Counted as used before it is: who looks at a cluster's other rows must not miss it.)
            self.rows[*row].is_to_be_had() && {
                self.used.fetch_max(*row as u32 + 1, SeqCst);
                self.take(*row, me, true)
            }
        })
    }

    /// Empties the rows that this process had before it executed another program. To be called before any thread of it takes one.
    pub fn forget_own(&self, me: Identity) {
        for row in 0..self.used_rows() {
            // What was being taken then nobody takes any more.
            self.let_go(row, me);
            self.give_up(row, me);
        }
    }

    /// Empties the rows of processes that died, or execute a program that is not managed.
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
    /// Nobody has anything.
    pub(super) fn reset(&self) {
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

    /// A row refers to clusters, as one does that was inherited.
    pub(super) fn share_for_test(&self, row: usize, clusters: core::ops::RangeInclusive<u32>) {
        for cluster in clusters {
            self.refer(row, cluster);
        }
    }

    /// A row is a process's whose ticker has this number.
    pub(super) fn set_row(&self, row: usize, owner: Identity, ticker: u32) {
        self.used.fetch_max(row as u32 + 1, SeqCst);
        self.rows[row].owner.store(owner.raw(), SeqCst);
        self.rows[row].ticker.store(ticker, SeqCst);
    }

    /// A process takes a row.
    pub(super) fn set_taker(&self, row: usize, taker: Identity) {
        self.rows[row].taker.store(taker.raw(), SeqCst);
    }
}

impl Row {
    /// Whether it is free, or nobody is left of its process: it is gone, or its helpers are (it executed another program). To be
    /// relied on by its taker only: while another takes it the ticker may be the former owner's.
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

/// Which rows are this process's. Atomics only because the pager is shared: they change with the pager's lock held. The rows
/// themselves other processes contend for, which have locks of their own: see [`ClusterMap`].
pub struct Rows {
    /// Its own; `NONE` until it needs one.
    own: AtomicUsize,
    /// What it made for the child being forked.
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
    /// This process's row, taken when it first needs one.
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

    /// Before fork, with the lock held: a row for the child that has this process's references, if it has any. When there
    /// is no row the child cannot be given what is on disk, and will be told.
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

    /// After fork, in the parent: where there is no child its row is given up, otherwise it is left to the child.
    ///
    /// The story: until the child took it, it was only the parent's. One that executed another program at once emptied it as its own, and
    /// the child was ended; a child that ended before it got to that left it in use as long as the parent lived.
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

    /// In a forked child, with the lock held: takes over the row made for it. False when it has pages on disk and no row.
    pub(crate) fn take_inherited_row(&self, clusters: usize) -> bool {
        let row = self.rows.child.swap(NONE, Relaxed);
        self.rows.own.store(row, Relaxed);
        let Some(map) = self.clusters else { return true };
        if row == NONE {
            return clusters == 0;
        }
        // (No ticker stands there yet: the parent took it so.)
        // (A parent that was killed at once, before it could name its child, may have been buried.)
        map.take_over(row, self.rows.parent.load(Relaxed), Identity::own())
    }

    /// The ticker is another now.
    pub(crate) fn row_has_ticker(&self, tid: i32) {
        let own = self.rows.own.load(Relaxed);
        if let Some(map) = self.clusters.filter(|_| own != NONE) {
            map.rows[own].ticker.store(tid as u32, SeqCst);
        }
    }

    /// Uses a swap file, as a new process of the run. Before other threads know of the pager.
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

//! The pager: all of one process, shared by its helper threads.
//!
//! State that must change together is in [`State`], behind the lock. The fields beside it are read without the lock, each by
//! itself: settings that are final before other threads know of the pager (layout, group, modes), descriptors and thread ids,
//! futex words, and hints whose old values cost only time. A forked child inherits all of it, and resets what belongs to another
//! process (`fork`).
//!
//! Lock order: the program's registering call (`ceded`), its mapping calls (`calls`), the pager's lock (`state`), then the leaf
//! locks: the helpers' tools, the page map, a region's queue of markers, the agent's allocator. No thread touches the program's
//! memory while it holds the pager's lock: the access may fault, and the handler needs the lock to serve the fault. What other
//! processes read or write (the group's page, the books of the swap file) is atomic.

use crate::calls::Calls;
use crate::calls::credentials::Following;
use crate::discover::ceded::Ceding;
use crate::discover::growth::Growth;
use crate::fault::stall::Stall;
use crate::fault::streams::WINDOW_PAGES;
use crate::fault::wakes::Wakes;
use crate::fault::watch::{Relief, Signs};
use crate::fork::kin::Kin;
use crate::frames::arena::{Layout, PAGE};
use crate::frames::huge::Blocks;
use crate::frames::shootdown::Shootdowns;
use crate::frames::thp::Thp;
use crate::group::full::Waiting;
use crate::group::member::Chain;
use crate::group::shares::Asking;
use crate::group::{DEPTH, GroupPage, NODES};
use crate::pool::batch::BATCH_PAGES;
use crate::pool::compress::CompressHelpers;
use crate::reclaim::floor::Floor;
use crate::state::{BLOCK_PAGES, State};
use crate::swap::clusters::{ClusterMap, Rows};
use crate::swap::io::Tier;
use crate::trace::{Recorder, Rings};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use uzswap_mm::codec::Algorithm;
use uzswap_mm::compaction::rule::Rule;
use uzswap_mm::trace::{Kind, Record};
use uzswap_sys::lock::{self, Lock};
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::thread;
use uzswap_sys::uffd::{self, Uffd};

/// The userfaultfd features that every pager asks for.
pub const FEATURES: u64 =
    uffd::FEATURE_THREAD_ID | uffd::FEATURE_EVENT_REMAP | uffd::FEATURE_EVENT_REMOVE | uffd::FEATURE_EVENT_UNMAP;

/// A process that has grown by more than this publishes its charge at once, for the other members.
const SAY_BYTES: u64 = 256 << 10;
/// Bounds of the high watermark of free frames: a single member keeps up to a 64th of the limit, from 1 to 8 MiB; each of several
/// keeps at least half a window of sequence and the batch that frees more.
const HIGH_LEAST: usize = 256;
const HIGH_MOST: usize = 2048;
/// From this share of the limit on (bytes) a member has folios as large as it would have alone.
const AMPLE_SHARE: usize = 16 << 20;
/// A window of sequence is at most a member's share of the limit divided by this.
const WINDOW_PARTS: usize = 32;

/// Descriptors of the process's own files in /proc: -1 before engaging, and where they are not needed.
pub struct Files {
    /// /proc/self/pagemap.
    pub pagemap: AtomicI32,
    /// /proc/self/maps, to ask about single mappings.
    pub maps: AtomicI32,
    /// /proc/thread-self/statm of the ticker: a process's own shows nothing any more once its first thread has ended.
    pub statm: AtomicI32,
    /// /proc/self/smaps_rollup.
    pub rollup: AtomicI32,
    /// A signalfd: readable for a helper to which the program has sent [`SIGNAL`](crate::group::member::SIGNAL).
    pub signals: AtomicI32,
}

/// The pager of a process.
pub struct Pager {
    /// The engine's tables.
    pub state: Lock<State>,
    /// Where uzswap's memory is.
    pub layout: Layout,
    /// Marks of the arena's 2 MiB blocks.
    pub blocks: Blocks,
    /// The group's page.
    pub group: &'static GroupPage,
    /// This process's group.
    pub node: usize,
    /// That group and those above it.
    pub chain: Chain,
    /// This process's slot.
    pub slot: AtomicUsize,
    /// Whether the process is ending and charges nothing any more.
    pub left: AtomicBool,
    /// Whether it is about to end, or to execute another program: see `fault::easing`.
    pub(crate) ending: AtomicBool,
    /// Whether it leaves because it executes another program.
    pub executing: AtomicBool,
    /// The process of which a thread makes a call that starts another program; 0: none. (A vfork child has this memory, too.)
    pub(crate) starting: AtomicI32,
    /// Whether what this process shares since a fork is still to be write-protected: see `copies` (a futex word).
    pub(crate) forked: AtomicU32,
    /// How often shared memory was write-protected. Changes with the lock held.
    pub protections: AtomicU32,
    /// When this process last looked for dead members (monotonic nanoseconds).
    pub buried: AtomicU64,
    /// When this process last poked members that are not engaged (monotonic nanoseconds).
    pub poked: AtomicU64,
    /// See `shares`.
    pub asking: Asking,
    /// How far its floor has sunk.
    pub floor: Floor,
    /// When this process last woke members that hold little (monotonic nanoseconds).
    pub asked_for_little: AtomicU64,
    /// Whether faults wait until the group has room (`--on-full=wait`).
    pub waits: AtomicBool,
    /// For each group of the chain: what this member saw while it found nothing to evict and another got on (see `full`).
    pub waiting: [Waiting; DEPTH],
    /// Whether `memory.zswap.max` refused the pool room when it last asked.
    pub zswap_full: AtomicBool,
    /// The fault count (`pgfault`) up to which a full pool is not tried again.
    pub refused_until: AtomicU64,
    /// The userfaultfd, in the helpers' own descriptor table; -1 before engaging.
    pub uffd: AtomicI32,
    /// The process's files in /proc, in the same table.
    pub files: Files,
    /// What this process shares with others since a fork.
    pub kin: Kin,
    /// Whether memory is registered and helpers run.
    pub engaged: AtomicBool,
    /// The ticker's thread id.
    pub ticker: AtomicI32,
    /// The handler's thread id.
    pub handler: AtomicI32,
    /// The reclaim thread's id.
    pub reclaimer: AtomicI32,
    /// The thread id of the swap file's writer, 0 without one.
    pub writer: AtomicI32,
    /// What the ticker can see of the handler.
    pub signs: Signs,
    /// Wake-ups held back until all pieces of a delivery are mapped.
    pub(crate) wakes: Wakes,
    /// The fault whose stall is being timed.
    pub stall: Stall,
    /// Whether a thread of this process may leave the idle policy: see [`uzswap_sys::thread::may_leave_idle_policy`].
    pub may_leave_idle: AtomicBool,
    /// How one handler takes over from another.
    pub relief: Relief,
    /// Keeps the program's mapping calls in order.
    pub calls: Calls,
    /// Whether calls are stopped on behalf of a thread that waits for the lock, so that the lock's holder may rely on it.
    pub calls_lent: AtomicBool,
    /// Number of engaged members, this one included, at the last look.
    pub(crate) sharers: AtomicUsize,
    /// What the other members' pools take of the limit (bytes), at the last look.
    pub(crate) others_pool: AtomicUsize,
    /// What the others were charged then, their pools included (bytes).
    pub(crate) others_held: AtomicUsize,
    /// What it costs to take mappings away.
    pub shootdowns: Shootdowns,
    /// The threads that compress together.
    pub helpers: CompressHelpers,
    /// Whether the reclaim thread is running, so need not be woken.
    pub reclaiming: AtomicBool,
    /// What the program has mapped and may still fill.
    pub growth: Growth,
    /// Whether new memory may come as huge pages.
    pub thp: Thp,
    /// Set when a forked child's helpers are ready (a futex word).
    pub ready: AtomicU32,
    /// Whether this is a region of the library: what it holds is counted here, not asked of the kernel.
    pub own_frames: bool,
    /// A region's markers, if it keeps them.
    pub marks: Option<crate::page_state::marks::Marks>,
    /// Whether the pager tracks which pages the program has written to: see `writes`.
    pub tracks: bool,
    /// Whether any page is protected: see `notify`. (The same as in the state, readable without the lock.)
    pub notifies: AtomicBool,
    /// Whether pages leave and come without UFFDIO_MOVE: see `without_move`.
    pub without_move: bool,
    /// Whether a device may write to the program's memory behind the kernel's page tables. If so, nothing may be evicted without
    /// MOVE, and nothing read-only with MOVE: see `pins`.
    pub pins: AtomicBool,
    /// Which of the scratch places for pages that are copied out is in use.
    pub scratch: AtomicUsize,
    /// Whether the program has locked memory.
    pub locks: AtomicBool,
    /// Whether some of the program's memory is to be zeros in forked children (MADV_WIPEONFORK).
    pub wipes: AtomicBool,
    /// How often the program has made guard pages (MADV_GUARD_INSTALL) or was about to, except on stacks of libc's.
    pub guards: AtomicUsize,
    /// The lowest start and the highest end of all ranges that were ever excluded.
    pub(crate) excluded_from: AtomicUsize,
    pub(crate) excluded_to: AtomicUsize,
    /// How many bytes of a thread's control block, from its thread pointer on, the kernel or a hook may write to.
    pub control_block: AtomicUsize,
    /// Tells the helpers to end: a region's, or those of a process that is let go of.
    pub stopping: AtomicBool,
    /// What the helpers must do as the program did it: see `credentials`.
    pub following: Following,
    /// What is ceded to a userfaultfd of the program's: see `ceded`.
    pub ceding: Ceding,
    /// Whether the reclaim thread is un-sharing memory (set with the lock held).
    pub unsharing: AtomicBool,
    /// Whether the process is being let go of (a futex word): see `letgo`.
    pub letting: AtomicU32,
    /// The address whose event tells the handler to end; 0 for none.
    pub farewell: AtomicUsize,
    /// The page map of a process under `uzswap run`; the page table writes to it under its own lock.
    pub page_map: Lock<Option<crate::page_state::mapfile::MapFile>>,
    /// Where events are recorded, if the group records.
    pub rings: Option<&'static Rings>,
    /// The books of the swap file, if there is one.
    pub clusters: Option<&'static ClusterMap>,
    /// This process's rows in them.
    pub rows: Rows,
    /// The swap file or server, if there is one.
    pub tier: Tier,
}

impl Pager {
    /// Makes an idle pager for a member of group `node` of a tree.
    ///
    /// # Errors
    /// `ENOMEM` when no address space can be reserved; `EAGAIN` when the tree has too many members; `EINVAL` when the tree has no
    /// such group, or the group's compressor does not exist.
    pub fn new(group: &'static GroupPage, node: usize, layout: Layout) -> Result<Self, Errno> {
        if node >= NODES || !group.nodes[node].is_ready() {
            return Err(libc::EINVAL);
        }
        let n = &group.nodes[node];
        let algorithm = crate::group::algorithm(n.codec.load(Relaxed), n.level.load(Relaxed)).ok_or(libc::EINVAL)?;
        let pager = Self::idle(group, node, layout, algorithm);
        pager.claim_slot()?;
        pager.state.lock().size_folios(pager.limit());
        Ok(pager)
    }

    /// A pager that has claimed nothing: no slot, no descriptor, no thread.
    fn idle(group: &'static GroupPage, node: usize, layout: Layout, algorithm: Algorithm) -> Self {
        let none = || AtomicI32::new(-1);
        let rule = Rule::from_number(group.folios.compaction.load(Relaxed));
        Self {
            state: Lock::new(State::new(layout, algorithm, rule)),
            layout,
            blocks: Blocks::new(layout.slots),
            group,
            node,
            chain: Chain::of(group, node),
            slot: AtomicUsize::new(0),
            left: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            executing: AtomicBool::new(false),
            starting: AtomicI32::new(0),
            forked: AtomicU32::new(0),
            protections: AtomicU32::new(0),
            buried: AtomicU64::new(0),
            poked: AtomicU64::new(0),
            asking: Asking::default(),
            floor: Floor::default(),
            asked_for_little: AtomicU64::new(0),
            waits: AtomicBool::new(false),
            waiting: Default::default(),
            zswap_full: AtomicBool::new(false),
            refused_until: AtomicU64::new(0),
            uffd: none(),
            files: Files { pagemap: none(), maps: none(), statm: none(), rollup: none(), signals: none() },
            kin: Kin::default(),
            engaged: AtomicBool::new(false),
            ticker: AtomicI32::new(0),
            handler: AtomicI32::new(0),
            reclaimer: AtomicI32::new(0),
            writer: AtomicI32::new(0),
            signs: Signs::default(),
            wakes: Wakes::default(),
            stall: Stall::new(),
            may_leave_idle: AtomicBool::new(false),
            relief: Relief::default(),
            calls: Calls::default(),
            calls_lent: AtomicBool::new(false),
            sharers: AtomicUsize::new(1),
            others_pool: AtomicUsize::new(0),
            others_held: AtomicUsize::new(0),
            shootdowns: Shootdowns::default(),
            helpers: CompressHelpers::new(),
            reclaiming: AtomicBool::new(false),
            growth: Growth::new(),
            thp: Thp::default(),
            ready: AtomicU32::new(0),
            own_frames: false,
            marks: None,
            tracks: false,
            notifies: AtomicBool::new(false),
            without_move: group.without_move.load(Relaxed) != 0 || group.faults.never_move.load(Relaxed) != 0,
            pins: AtomicBool::new(false),
            scratch: AtomicUsize::new(0),
            locks: AtomicBool::new(false),
            wipes: AtomicBool::new(false),
            guards: AtomicUsize::new(0),
            excluded_from: AtomicUsize::new(usize::MAX),
            excluded_to: AtomicUsize::new(0),
            control_block: AtomicUsize::new(crate::fork::CONTROL_BLOCK),
            stopping: AtomicBool::new(false),
            following: Following::default(),
            ceding: Ceding::default(),
            unsharing: AtomicBool::new(false),
            letting: AtomicU32::new(0),
            farewell: AtomicUsize::new(0),
            page_map: Lock::new(None),
            rings: None,
            clusters: None,
            rows: Rows::default(),
            tier: Tier::default(),
        }
    }

    /// The features that this process's userfaultfd needs.
    pub fn features(&self) -> u64 {
        // Without MOVE uzswap moves registered memory itself (see `without_move`), and would get events of its own moves.
        let told = if self.without_move { FEATURES & !uffd::FEATURE_EVENT_REMAP } else { FEATURES };
        // With MOVE, read-only memory is write-protected while it leaves.
        told | if self.tracks || !self.without_move { uffd::FEATURE_WRITE_PROTECT } else { 0 }
    }

    /// Records events from now on, as the slot's new owner. Call it before other threads know of the pager.
    pub fn record_in(&mut self, rings: &'static Rings) {
        self.rings = Some(rings);
        let mut s = self.state.lock();
        s.recorder = Some(Recorder::new(rings, self.slot.load(Relaxed)));
        s.note(Record::number(Kind::Start, u64::from(thread::getpid() as u32)));
    }

    /// The userfaultfd.
    pub fn uffd(&self) -> Uffd {
        Uffd::from_raw(self.uffd.load(Relaxed))
    }

    /// Reads what this process holds (bytes) and publishes it; 0 when it cannot be read.
    ///
    /// That is RssAnon; after a fork, less the process's share of what others map too (see `kin`). Otherwise each page shared
    /// copy-on-write would count once for each process.
    pub fn read_rss(&self) -> usize {
        let mut text = [0u8; 128];
        let Ok(n) = raw::pread(self.files.statm.load(Relaxed), &mut text, 0) else { return 0 };
        let mut numbers = text[..n]
            .split(|c| *c == b' ')
            .map(|f| f.iter().take_while(|c| c.is_ascii_digit()).fold(0usize, |v, c| v * 10 + (c - b'0') as usize));
        let resident = numbers.nth(1).unwrap_or(0);
        let shared = numbers.next().unwrap_or(0);
        let mut rss = resident.saturating_sub(shared) * PAGE;
        if self.has_kin() {
            rss = rss.saturating_sub(self.kin.shared(self.files.rollup.load(Relaxed)));
        }
        self.charge(rss);
        rss
    }

    /// Publishes this process's charge if it has grown much since it last did. Other members decide by it, and all of them may be
    /// filling memory.
    pub fn charge_growth(&self, s: &State) {
        if !self.own_frames && s.rss as u64 > self.me().rss.load(Relaxed).saturating_add(SAY_BYTES) {
            self.charge(s.rss);
        }
    }

    /// Publishes what this process holds (bytes).
    pub(crate) fn charge(&self, rss: usize) {
        let me = self.me();
        me.rss.store(rss as u64, Relaxed);
        me.said.store(me.said.load(Relaxed).wrapping_add(1), Release);
        if self.left.load(SeqCst) {
            me.uncharge();
        }
    }

    /// What this process holds now, for [`State::rss`]: a region counts exactly, a process asks the kernel.
    pub fn rss_now(&self, s: &State) -> usize {
        if !self.own_frames {
            return self.read_rss();
        }
        let rss = s.known_bytes();
        self.charge(rss);
        rss
    }

    /// Whether this process shares memory with one that it forked, or that forked it: more than a little, as far as is known.
    pub(crate) fn has_kin(&self) -> bool {
        self.kin.is_there()
    }

    /// Whether the handler also reclaims: see `placement`. Not after a fork: another thread must un-share the memory first, and
    /// the children compete for the CPUs anyway.
    pub fn handler_reclaims(&self, s: &State) -> bool {
        s.placement.alone() && !self.has_kin()
    }

    /// The watermarks of frames kept free ahead of demand: (low, high), in pages. The engaged members of a group share what one
    /// alone would keep.
    ///
    /// The story: each of 32 processes under 160 MiB kept up to 2.5 MiB free for itself, half of the limit in all. They
    /// compressed a tenth more than they do now.
    pub fn watermarks(&self) -> (usize, usize) {
        let high = (self.limit() / PAGE / 64).clamp(HIGH_LEAST, HIGH_MOST);
        let high = (high / self.sharers.load(Relaxed)).max(BATCH_PAGES + (1 << self.widest_window()) / 2);
        (high / 2, high)
    }

    /// How many pages one sequential fault brings at most, as a power of two: 512 KiB, or at least 64 KiB where many members
    /// share a limit.
    ///
    /// The story: each of 32 processes that filled 280 MiB in 160 had 2.5 of its 5 MiB in frames, buffers and pages brought
    /// ahead.
    pub(crate) fn widest_window(&self) -> u8 {
        (self.share() / PAGE / WINDOW_PARTS).clamp(BLOCK_PAGES, WINDOW_PAGES).ilog2() as u8
    }

    /// The room that bounds folios (bytes), for [`State::bound_folios`]: the limit, or a member's share of it where that is
    /// small.
    pub(crate) fn folio_room(&self) -> usize {
        if self.has_ample_share() { self.limit() } else { self.share() }
    }

    /// Whether this process's share is about as much as it would want alone.
    pub(crate) fn has_ample_share(&self) -> bool {
        self.share() >= AMPLE_SHARE
    }

    /// A member's share of the limit (bytes).
    pub(crate) fn share(&self) -> usize {
        self.limit() / self.sharers.load(Relaxed)
    }

    /// Updates how many members are engaged, and what the others hold.
    pub(crate) fn count_sharers(&self) {
        let others = self.others().filter(|o| o.engaged.load(Relaxed) != 0).count();
        self.sharers.store(others + 1, Relaxed);
        let (held, pool) = self.others_hold_now();
        self.others_held.store(held, Relaxed);
        self.others_pool.store(pool, Relaxed);
    }

    /// Bytes kept free below the limit for growth that is noticed late.
    pub fn margin(&self) -> usize {
        (self.limit() / 64).clamp(2 << 20, 16 << 20)
    }

    /// Wakes the reclaim thread.
    pub fn wake_reclaim(&self) {
        let word = &self.me().wake;
        word.fetch_add(1, SeqCst);
        // If it is running, it looks at the word before it sleeps.
        if !self.reclaiming.load(SeqCst) {
            lock::futex_wake(word, 1, true);
        }
    }

    /// Publishes this process's figures: the group's charges, and what the summary shows.
    pub fn publish(&self, s: &State) {
        let c = self.counters();
        // The summary wants the figures of the moment when most was stored: at the end there is nothing left to show.
        let raw = s.pt.raw_pages();
        if s.swapped as u64 >= c.stored_pages.load(Relaxed) {
            c.stored_pages.store(s.swapped as u64, Relaxed);
            c.stored_incompressible_pages.store(raw as u64, Relaxed);
            c.pool_total_size.store(s.pool.held_bytes() as u64, Relaxed);
            c.pool_used_size.store(s.pool.used_bytes() as u64, Relaxed);
        }
        let metadata = s.metadata_bytes() as u64;
        c.metadata_size.fetch_max(metadata, Relaxed);
        let on_disk = self.publish_swap(s);
        let (me, out, pool) = (self.me(), (s.swapped + s.zeros + on_disk) * PAGE, s.pool.held_bytes());
        for (charge, bytes) in [
            (&me.swapped, out),
            (&me.zswapped, s.swapped * PAGE),
            (&me.incompressible, raw * PAGE),
            (&me.pool, pool),
            (&me.metadata, metadata as usize),
        ] {
            charge.store(bytes as u64, Relaxed);
        }
        self.raise_peaks(self.charged(s), s.rss.saturating_sub(pool), out);
        if self.left.load(SeqCst) {
            me.uncharge();
        }
    }
}

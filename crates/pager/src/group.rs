//! The group: what processes under one limit share.
//!
//! The command creates one memory object, sized for [`GroupPage`], and every process of the tree maps it (found through the
//! environment variable [`ENV_GROUP`], a path such as `/proc/PID/fd/N` of the command). The object holds a tree of groups
//! ([`Node`]; 0 is the root, `web` of `web/worker`) and the member processes ([`Slot`]). Each member belongs to one group, and
//! counts in all groups above it too.
//!
//! # Who may be killed when
//! Any process, at any instruction. All fields are atomics and nobody holds a lock, so nobody is left waiting. A group's charge
//! is not kept as a sum that could be half updated: it *is* the sum of what its members' slots say at the moment, each written by
//! its one owner. Whoever notices that a member is dead returns its charge (`member`).
//!
//! ```text
//! slot: free ─ taken ─ charges = 0 ─▶ mine ─ I end ─▶ dead ─ taken by the finder ─ charges = 0 ─▶ free
//! ```
//! `uzswap_sys::owner`, which has a model, says how a slot is taken and who owns it. A finder that is killed on the way leaves a
//! slot whose owner, the finder, is dead: the next one finds that. Owners are named by pid and start time, so another process
//! with a dead one's pid is not taken for it.
//!
//! Counters stay in the slot when it changes hands (a sum over slots remains right; a value noted at a maximum is then that of
//! the owner with the highest). Only when the slot goes to another group are they added to [`Node::dead`], and a kill in between
//! may lose one.
//!
//! Sizes are bytes unless the name says otherwise.

pub mod counters;
pub mod folio;
pub mod full;
pub mod holder;
pub mod limits;
pub mod member;
pub mod shares;

use crate::group::counters::Counters;
use crate::group::folio::FolioSettings;
use crate::inject::Faults;
use crate::page_state::notify::WriteWatch;
use crate::request::PageRequest;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::*};
use uzswap_mm::codec::Algorithm;
use uzswap_mm::shrinker::DiskReads;
use uzswap_sys::owner;
use uzswap_sys::process::Identity;

/// Environment variable with the path of the group's memory object.
pub const ENV_GROUP: &str = "UZSWAP_GROUP";
/// Environment variable with the number of the group in its tree, and the inode of the object: `3@4711`. (The path in
/// [`ENV_GROUP`] may lead to another object once the command has ended.)
pub const ENV_NODE: &str = "UZSWAP_GROUP_NODE";
/// Name of the group's memory object, which the kernel shows in `/proc/PID/fd`.
pub const OBJECT: &str = "uzswap-group";
/// First word of the page: a page of another version is refused.
pub const MAGIC: u64 = 0x757a_7377_6170_0010;
/// Processes that can be members at once.
pub const SLOTS: usize = 1024;
/// Groups in one tree; a group's ancestors are a set of 64 bits.
pub const NODES: usize = 64;
/// Groups from the root to the deepest one.
pub const DEPTH: usize = 8;
/// Bytes of the longest name of a group (one component).
pub const NAME_BYTES: usize = 64;
/// The value of a limit that is not set; the kernel writes it `max`.
pub const NO_LIMIT: u64 = 1 << 60;

/// Codec of the pool, as stored in [`Node::codec`]: 0 lz4, 1 zstd, 2 deflate.
pub const CODEC_LZ4: u32 = 0;
/// See [`CODEC_LZ4`].
pub const CODEC_ZSTD: u32 = 1;
/// See [`CODEC_LZ4`].
pub const CODEC_DEFLATE: u32 = 2;

/// The algorithm that [`Node::codec`] and [`Node::level`] stand for. Level 0 is the codec's default, any other is used as it is.
/// `None` for a codec or a level that does not exist.
#[must_use]
pub fn algorithm(codec: u32, level: u32) -> Option<Algorithm> {
    let level = if level == 0 { 1 } else { i32::try_from(level).ok()? };
    let algorithm = match codec {
        CODEC_LZ4 => Algorithm::Lz4,
        CODEC_ZSTD => Algorithm::Zstd(level),
        CODEC_DEFLATE => Algorithm::Deflate(level),
        _ => return None,
    };
    algorithm.level_is_allowed().then_some(algorithm)
}

/// What happens when a limit is exceeded and nothing more can be reclaimed ([`Node::on_full`]): the program goes on.
pub const ON_FULL_EXCEED: u32 = 0;
/// Faulting threads wait until there is room.
pub const ON_FULL_WAIT: u32 = 1;
/// The member that holds most is killed.
pub const ON_FULL_KILL: u32 = 2;

/// One member process. The first cache line is what others read.
#[repr(C, align(64))]
#[derive(Default)]
pub struct Slot {
    /// The owner, or the process that returns the charges of the owner before, which died: see [`owner`].
    pub owner: AtomicU64,
    /// The group of the member, an index of [`GroupPage::nodes`].
    pub node: AtomicU32,
    /// Bumped to wake the member's reclaim thread (a futex word).
    pub wake: AtomicU32,
    /// RssAnon of the member as it last read it, pool and metadata included: what it is charged with.
    pub rss: AtomicU64,
    /// Of that, what the pool takes from the kernel.
    pub pool: AtomicU64,
    /// Program memory that is out of RAM (without staged pages): what the member would hold more without uzswap.
    pub swapped: AtomicU64,
    /// Of that, the part in the compressed pool.
    pub zswapped: AtomicU64,
    /// Of `zswapped`, what did not compress and is stored raw.
    pub incompressible: AtomicU64,
    /// Bytes of the member's objects in the swap file, kept copies included.
    pub swap: AtomicU64,
    /// Of `rss`, uzswap's own tables.
    pub metadata: AtomicU64,
    /// What the member has mapped but not filled yet, as far as known, while its memory is not managed.
    pub planned: AtomicU64,
    /// How often the member has published its charge (wrapping).
    pub said: AtomicU32,
    /// How many pages members that hold less ask for: see `shares`.
    pub asked: AtomicU32,
    /// Thread id of the member's ticker, 0 until it runs.
    pub ticker: AtomicU32,
    /// Whether the member's memory is managed. If not, its charge is what it was at its last look.
    pub engaged: AtomicU32,
    /// Whether the member counts among those whose memory was managed: still true after an exec, although it is not managed any
    /// more then.
    pub was_engaged: AtomicU32,
    /// Bumped to wake the member's writing thread (a futex word): see `swap::turns`, as for the next two.
    pub swap_wake: AtomicU32,
    /// Whether the member writes back when it is its turn: `WRITER_NONE` and the others there.
    pub writer: AtomicU32,
    /// How far the member has got in the round over full pools (pages).
    pub turn: AtomicU64,
    /// When the member last found nothing to evict although a group of its own was over its limit (monotonic nanoseconds); 0
    /// while it gets on: see `full`.
    pub stuck: AtomicU64,
    /// When the member last waited for a slow disk to make room (monotonic nanoseconds).
    pub disk_at: AtomicU64,
    /// What a command asks of the member.
    pub request: PageRequest,
    /// The client that is told of writes to the member's pages.
    pub watch: WriteWatch,
    /// The member's counters.
    pub counters: Counters,
}

impl Slot {
    /// The owner, if there is one: nobody while the charge in the slot is that of a dead one ([`GroupPage::bury_the_dead`]).
    pub fn owner(&self) -> Option<Identity> {
        owner::of(&self.owner)
    }

    /// Returns the charges. Only for the owner.
    pub fn uncharge(&self) {
        for charge in [
            &self.rss,
            &self.pool,
            &self.swapped,
            &self.zswapped,
            &self.incompressible,
            &self.swap,
            &self.metadata,
            &self.planned,
        ] {
            charge.store(0, Relaxed);
        }
        self.ticker.store(0, Relaxed);
        self.engaged.store(0, Relaxed);
        self.writer.store(0, Relaxed);
        self.turn.store(0, Relaxed);
        self.stuck.store(0, Relaxed);
        self.disk_at.store(0, Relaxed);
        self.asked.store(0, Relaxed);
    }
}

/// Events of a group and of those below it, under the kernel's names in `memory.events` (counts).
#[repr(C)]
#[derive(Default)]
pub struct Events {
    /// Reclaims because the charge was above `memory.high`.
    pub high: AtomicU64,
    /// Reclaims because the charge was about to exceed `memory.max`, or did.
    pub max: AtomicU64,
    /// Times that `memory.max` was exceeded and the whole group could reclaim nothing more.
    pub oom: AtomicU64,
    /// Members killed for that.
    pub oom_kill: AtomicU64,
    /// Stores refused because of `memory.zswap.max`.
    pub zswap_max: AtomicU64,
    /// Stores refused because of `memory.swap.max`.
    pub swap_max: AtomicU64,
    /// Pages that found room neither in the pool nor in the swap file.
    pub swap_fail: AtomicU64,
}

/// One group.
#[repr(C)]
pub struct Node {
    /// [`Node::FREE`], [`Node::READY`], or the raw identity of a process that is making the group.
    pub state: AtomicU64,
    /// The set of this group and all groups above it, as bits.
    pub ancestors: AtomicU64,
    /// The parent group; the root's is its own index.
    pub parent: AtomicU32,
    /// Codec of the members' pools: see [`CODEC_LZ4`].
    pub codec: AtomicU32,
    /// Level for zstd and deflate, 0 the default.
    pub level: AtomicU32,
    /// See [`ON_FULL_EXCEED`].
    pub on_full: AtomicU32,
    /// 1 when what the pool cannot take may be written to the swap file.
    pub zswap_writeback: AtomicU32,
    /// 1 once the group was reported full; cleared when a limit changes.
    pub full_said: AtomicU32,
    /// 1 from when the pools took more than they may until they are small enough for stores to be accepted again.
    pub pool_full: AtomicU32,
    /// Pages that members read from the swap file, readahead included, and that no member's shrinker has weighed yet.
    pub nr_disk_swapins: DiskReads,
    /// The charge above which members are throttled.
    pub high: AtomicU64,
    /// The limit on resident + pool + metadata.
    pub max: AtomicU64,
    /// The limit on what the pools hold.
    pub zswap_max: AtomicU64,
    /// The limit on what is in the swap file.
    pub swap_max: AtomicU64,
    /// Highest charge so far.
    pub peak: AtomicU64,
    /// The limit at that moment, 0 before.
    pub peak_max: AtomicU64,
    /// Highest sum of charge and memory out of RAM so far: the most memory held.
    pub peak_held: AtomicU64,
    /// Processes that ever joined.
    pub joined: AtomicU32,
    /// Processes that got to where memory is managed (below that nothing is touched), or were forked beyond it.
    pub engaged: AtomicU32,
    /// The charge when a limit was last set below it; 0 once that limit was met. Up to this charge nobody is killed, as shrinking
    /// a limit never kills.
    pub grace: AtomicU64,
    /// No member is killed before this time (monotonic nanoseconds), as the last one is still dying.
    pub kill_due: AtomicU64,
    /// Events of the group and of those below it.
    pub events: Events,
    /// Counts of members whose slots went to other groups (cumulative fields only).
    pub dead: Counters,
    /// The last component of its name, padded with zeros.
    pub name: [AtomicU8; NAME_BYTES],
}

impl Node {
    /// No group.
    pub const FREE: u64 = 0;
    /// A group.
    pub const READY: u64 = u64::MAX;

    /// Makes a new group's settings the defaults: no limits.
    fn reset(&self, parent: u32, ancestors: u64, name: &[u8]) {
        self.parent.store(parent, Relaxed);
        self.ancestors.store(ancestors, Relaxed);
        self.zswap_writeback.store(1, Relaxed);
        for limit in [&self.high, &self.max, &self.zswap_max, &self.swap_max] {
            limit.store(NO_LIMIT, Relaxed);
        }
        for (i, byte) in self.name.iter().enumerate() {
            byte.store(name.get(i).copied().unwrap_or(0), Relaxed);
        }
    }

    /// Whether this is a group.
    pub fn is_ready(&self) -> bool {
        self.state.load(Acquire) == Self::READY
    }

    /// The last component of its name, and that one's length.
    pub fn name(&self) -> ([u8; NAME_BYTES], usize) {
        let name: [u8; NAME_BYTES] = core::array::from_fn(|i| self.name[i].load(Relaxed));
        (name, name.iter().position(|b| *b == 0).unwrap_or(NAME_BYTES))
    }

    /// Whether it has this name.
    pub fn is_named(&self, name: &[u8]) -> bool {
        let (own, len) = self.name();
        &own[..len] == name
    }

    /// The charge that reclaim keeps below: the less of `memory.high` and `memory.max`.
    pub fn target(&self) -> u64 {
        self.high.load(Relaxed).min(self.max.load(Relaxed))
    }
}

/// Why a process runs unmanaged.
pub mod unmanaged {
    /// It is statically linked.
    pub const STATIC: u32 = 1;
    /// It filters its system calls.
    pub const FILTER: u32 = 2;
    /// It forks without the rights that its child needs.
    pub const RIGHTS: u32 = 4;
    /// It locks all its memory.
    pub const LOCKED: u32 = 8;
    /// It changed its user while its memory was managed.
    pub const USER: u32 = 16;
    /// It was started where uzswap's library cannot be loaded.
    pub const STARTED: u32 = 32;
    /// It could not open a userfaultfd.
    pub const REFUSED: u32 = 64;
    /// It stays managed: letting go of it failed.
    pub const STAYS: u32 = 128;
    /// It is searched for leaks, with all its threads stopped.
    pub const LEAKS: u32 = 256;
    /// It must have only one thread.
    pub const ALONE: u32 = 512;
    /// It was forked, and found no place in its group, or no thread could be started.
    pub const FORKED: u32 = 1024;
    /// It is in another namespace of process numbers or of clocks than the group.
    pub const APART: u32 = 2048;
    /// It has other rights than the process that started it, and nothing is preloaded into it.
    pub const PRIVILEGED: u32 = 4096;
    /// It is a 32-bit program.
    pub const SHORT: u32 = 8192;
}

/// The shared page.
#[repr(C)]
pub struct GroupPage {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// 1 when the limit does not bound the pool (only to compare with the kernel on cgroup v1).
    pub pool_uncharged: AtomicU32,
    /// Why processes run unmanaged, a bit of [`unmanaged`] each, set by the first to warn.
    pub warned_unmanaged: AtomicU32,
    /// 1 when members record what happens to their pages: [`crate::trace::Rings`] follow this page.
    pub recording: AtomicU32,
    /// One past the highest slot ever used: slots beyond it need no look.
    pub used: AtomicU32,
    /// 1 when members track which of their pages were written to: see `writes`.
    pub track_writes: AtomicU32,
    /// 1 where the kernel has no UFFDIO_MOVE: see `without_move`.
    pub without_move: AtomicU32,
    /// Settings for folios.
    pub folios: FolioSettings,
    /// What a test wants to fail; normally nothing.
    pub faults: Faults,
    /// The tree.
    pub nodes: [Node; NODES],
    /// The members.
    pub slots: [Slot; SLOTS],
}

impl GroupPage {
    /// Whether the caller is the first of the group to warn that processes run unmanaged for this reason, and so must do it.
    pub fn warns_first(&self, why: u32) -> bool {
        self.warned_unmanaged.fetch_or(why, AcqRel) & why == 0
    }

    /// Makes zeroed memory a tree with one group, the root, without limits. The caller sets the magic number last.
    pub fn set_up(&self, name: &[u8]) {
        self.nodes[0].reset(0, 1, name);
        self.nodes[0].state.store(Node::READY, Release);
    }

    /// The slots that were ever used.
    pub fn used(&self) -> &[Slot] {
        &self.slots[..(self.used.load(Acquire) as usize).min(SLOTS)]
    }

    /// The group named `name` below `parent`.
    pub fn child(&self, parent: usize, name: &[u8]) -> Option<usize> {
        let below = |n: &Node| n.is_ready() && n.parent.load(Relaxed) as usize == parent && n.is_named(name);
        (1..NODES).find(|i| below(&self.nodes[*i]))
    }

    /// Makes a group named `name` below `parent`, where there is none (callers that may compete must make sure of that). None
    /// when there are [`NODES`] groups, or the group would be deeper than [`DEPTH`].
    pub fn make_child(&self, parent: usize, name: &[u8]) -> Option<usize> {
        let above = self.nodes[parent].ancestors.load(Relaxed);
        if above.count_ones() as usize >= DEPTH || name.len() > NAME_BYTES {
            return None;
        }
        let me = Identity::own().raw();
        let index = (1..NODES).find(|i| {
            let state = &self.nodes[*i].state;
            let now = state.load(Acquire);
            // A group that was being made by a process that ended is free.
            let free =
                now == Node::FREE || (now != Node::READY && Identity::from_raw(now).is_some_and(Identity::is_dead));
            free && state.compare_exchange(now, me, AcqRel, Relaxed).is_ok()
        })?;
        self.nodes[index].reset(parent as u32, above | 1 << index, name);
        self.nodes[index].state.store(Node::READY, Release);
        Some(index)
    }

    /// Whether `node` is `group` or below it.
    pub fn is_within(&self, node: usize, group: usize) -> bool {
        self.nodes.get(node).is_some_and(|n| n.ancestors.load(Relaxed) & 1 << group != 0)
    }

    /// A group and those above it, nearest first.
    pub fn chain(&self, node: usize) -> impl Iterator<Item = usize> {
        let mut next = Some(node.min(NODES - 1));
        let mut left = DEPTH;
        core::iter::from_fn(move || {
            let at = next?;
            let parent = (self.nodes[at].parent.load(Relaxed) as usize).min(NODES - 1);
            left -= 1;
            next = (at != 0 && left > 0).then_some(parent);
            Some(at)
        })
    }

    /// Counts an event in a group and in all above it.
    pub fn count(&self, node: usize, event: impl Fn(&Events) -> &AtomicU64, n: u64) {
        for at in self.chain(node) {
            event(&self.nodes[at].events).fetch_add(n, Relaxed);
        }
    }

    /// Returns the charges of members that have ended. `me` is the caller's process, not one of its threads.
    pub fn bury_the_dead(&self, me: Identity) {
        for slot in self.used() {
            if owner::take(&slot.owner, me, |who| who.is_some_and(|who| who != me && who.is_dead())) {
                slot.uncharge();
                owner::settle(&slot.owner, None);
            }
        }
    }
}

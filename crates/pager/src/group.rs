//! The group: what the processes under one limit share.
//!
//! The command creates one memory object that holds a [`GroupPage`], and every process of the tree maps it. A process finds it
//! through the environment variable [`ENV_GROUP`], a path such as `/proc/PID/fd/N` of the command. The object holds a tree of
//! groups ([`Node`]; 0 is the root, `web` of `web/worker`) and the member processes ([`Slot`]). Each member belongs to one group,
//! and counts in all groups above it too.
//!
//! # Who may be killed when
//! Any process, at any instruction. All fields are atomics and nobody holds a lock, so no process is left waiting. A group's
//! charge is not kept as a sum, which could be half updated: it *is* the sum of what its members' slots say at the moment, each
//! written by its one owner. Whoever notices a dead member returns its charge (`member`).
//!
//! ```text
//! slot: free ─ taken ─ charges = 0 ─▶ mine ─ I end ─▶ dead ─ taken by the finder ─ charges = 0 ─▶ free
//! ```
//! `uzswap_sys::owner`, which has a model, defines how a slot is taken and who owns it. A finder that is killed on the way leaves
//! a slot that belongs to a dead process, itself; the next finder sees that. Owners are named by pid and start time, so another
//! process with the pid of a dead one is not taken for it.
//!
//! Counters stay in the slot when it changes hands: a sum over slots remains right, and the figures taken at a peak are then
//! those of the owner with the highest one. Only when the slot goes to another group are they added to [`Node::dead`]; a kill in
//! between may lose one.
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
/// Environment variable with the number of the process's group in the tree and the object's inode number: `3@4711`. (Once the
/// command has ended, the path in [`ENV_GROUP`] may lead to another object.)
pub const ENV_NODE: &str = "UZSWAP_GROUP_NODE";
/// Name of the group's memory object, which the kernel shows in `/proc/PID/fd`.
pub const OBJECT: &str = "uzswap-group";
/// First word of the page. A page of another version has another, and is refused.
pub const MAGIC: u64 = 0x757a_7377_6170_0014;
/// Processes that can be members at once.
pub const SLOTS: usize = 1024;
/// Groups in one tree. A set of ancestors is 64 bits.
pub const NODES: usize = 64;
/// Greatest number of groups on a path from the root.
pub const DEPTH: usize = 8;
/// Longest name of a group (one component; bytes).
pub const NAME_BYTES: usize = 64;
/// No limit; the kernel writes it `max`.
pub const NO_LIMIT: u64 = 1 << 60;
/// More than any process can hold (bytes). All members together then hold less than [`NO_LIMIT`].
pub const MOST_BYTES: u64 = 1 << 48;
const _: () = assert!(4 * MOST_BYTES * SLOTS as u64 <= NO_LIMIT);

/// Codec of the pool, as stored in [`Node::codec`]: 0 lz4, 1 zstd, 2 deflate.
pub const CODEC_LZ4: u32 = 0;
/// See [`CODEC_LZ4`].
pub const CODEC_ZSTD: u32 = 1;
/// See [`CODEC_LZ4`].
pub const CODEC_DEFLATE: u32 = 2;

/// The algorithm that [`Node::codec`] and [`Node::level`] stand for. Level 0 is the codec's default; any other is used as it is.
/// `None` for an unknown codec or level.
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

/// What a member says that it holds (bytes). Figures are read through this: any member, which is somebody's program, may have
/// written anything there, and sums of figures must not overflow.
pub fn bytes_in(figure: &AtomicU64) -> u64 {
    figure.load(Relaxed).min(MOST_BYTES)
}

/// [`Node::on_full`] says what happens when a limit is exceeded and nothing more can be reclaimed. This value: the program goes
/// on.
pub const ON_FULL_EXCEED: u32 = 0;
/// Faulting threads wait until there is room.
pub const ON_FULL_WAIT: u32 = 1;
/// The member that holds most is killed.
pub const ON_FULL_KILL: u32 = 2;

/// One member process. The first cache line is what others read.
#[repr(C, align(64))]
#[derive(Default)]
pub struct Slot {
    /// The owner, or the process that is returning the charges of a dead one: see [`owner`].
    pub owner: AtomicU64,
    /// The group of the member, an index of [`GroupPage::nodes`].
    pub node: AtomicU32,
    /// Incremented to wake the member's reclaim thread (a futex word).
    pub wake: AtomicU32,
    /// What the member is charged with: its RssAnon, pool and metadata included, as it last read it.
    pub rss: AtomicU64,
    /// The part of `rss` that the pool holds from the kernel.
    pub pool: AtomicU64,
    /// Program memory that is out of RAM (not staged): what the program would use in addition without uzswap.
    pub swapped: AtomicU64,
    /// The part of `swapped` that is in the compressed pool.
    pub zswapped: AtomicU64,
    /// The part of `zswapped` that did not compress and is stored as it is.
    pub incompressible: AtomicU64,
    /// Bytes of the member's objects in the swap file, kept copies included.
    pub swap: AtomicU64,
    /// The part of `rss` that is uzswap's own tables.
    pub metadata: AtomicU64,
    /// What the member has mapped and not filled yet, as far as known, before its memory is managed.
    pub planned: AtomicU64,
    /// How often the member has published its charge (wrapping).
    pub said: AtomicU32,
    /// Pages that members holding less ask this one for: see `shares`.
    pub asked: AtomicU32,
    /// Thread id of the member's ticker, 0 until it runs.
    pub ticker: AtomicU32,
    /// Whether the member's memory is managed. If not, its charge is that of its last look.
    pub engaged: AtomicU32,
    /// Whether the member is counted among those whose memory was managed. Stays set after an exec, when its memory no longer is.
    pub was_engaged: AtomicU32,
    /// Incremented to wake the member's writing thread (a futex word); see `swap::turns` for this and the next two.
    pub swap_wake: AtomicU32,
    /// Whether it writes back when it is its turn: one of the `WRITER_` constants in `swap::turns`.
    pub writer: AtomicU32,
    /// How far the member has gone in the round over full pools (pages).
    pub turn: AtomicU64,
    /// When the member last found nothing to take out although one of its groups was over its limit (monotonic nanoseconds); 0
    /// while it gets on: see `full`.
    pub stuck: AtomicU64,
    /// When the member last waited for its disk, which is slow to make room (monotonic nanoseconds).
    pub disk_at: AtomicU64,
    /// A command's request to the member.
    pub request: PageRequest,
    /// The client that is told of writes to the member's pages.
    pub watch: WriteWatch,
    /// The member's counters.
    pub counters: Counters,
}

impl Slot {
    /// The owner, if any. None while a dead owner's charge is being returned ([`GroupPage::bury_the_dead`]).
    pub fn owner(&self) -> Option<Identity> {
        owner::of(&self.owner)
    }

    /// Clears the charges. For the owner only.
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

/// Events of a group and the groups below it, under the kernel's names in `memory.events` (counts).
#[repr(C)]
#[derive(Default)]
pub struct Events {
    /// Reclaims because the charge was above `memory.high`.
    pub high: AtomicU64,
    /// Reclaims because the charge was above `memory.max`, or about to be.
    pub max: AtomicU64,
    /// Times `memory.max` was exceeded and nothing more could be reclaimed in the whole group.
    pub oom: AtomicU64,
    /// Members killed because of that.
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
    /// The group itself and all groups above it, as a set of bits.
    pub ancestors: AtomicU64,
    /// Index of the group above; the root has its own.
    pub parent: AtomicU32,
    /// Codec of the members' pools: see [`CODEC_LZ4`].
    pub codec: AtomicU32,
    /// Level for zstd and deflate; 0 is the default.
    pub level: AtomicU32,
    /// See [`ON_FULL_EXCEED`].
    pub on_full: AtomicU32,
    /// 1 if the pool's overflow may be written to the swap file.
    pub zswap_writeback: AtomicU32,
    /// 1 once a message said that the group is full; cleared when a limit changes.
    pub full_said: AtomicU32,
    /// 1 from when the pools take more than they may, until they are down to where stores are accepted again.
    pub pool_full: AtomicU32,
    /// 1 once a run has given the group its settings; 0 while it exists only because a group below it does.
    pub named: AtomicU32,
    /// Pages that members read from the swap file, read-ahead included, and that no member's shrinker has taken into account yet.
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
    /// The limit at that time; 0 before.
    pub peak_max: AtomicU64,
    /// Highest sum of charge and memory out of RAM seen: the most memory that the members had.
    pub peak_held: AtomicU64,
    /// Processes that have ever joined.
    pub joined: AtomicU32,
    /// Processes whose memory came to be managed, or was from their fork on. (A process below that threshold is left untouched.)
    pub engaged: AtomicU32,
    /// The charge when a limit was last set below it; 0 once the new limit was met. Up to this charge nobody is killed, as
    /// lowering a limit never kills.
    pub grace: AtomicU64,
    /// No member is killed before this time (monotonic nanoseconds), as the last one is still dying.
    pub kill_due: AtomicU64,
    /// Counts of events.
    pub events: Events,
    /// Counters of members whose slots went to other groups (cumulative fields only).
    pub dead: Counters,
    /// The last component of the name, padded with zeros.
    pub name: [AtomicU8; NAME_BYTES],
}

impl Node {
    /// This entry is free.
    pub const FREE: u64 = 0;
    /// This entry is a group.
    pub const READY: u64 = u64::MAX;

    /// Makes this a new group with default settings and no limits.
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

    /// Whether this entry is a group.
    pub fn is_ready(&self) -> bool {
        self.state.load(Acquire) == Self::READY
    }

    /// The last component of the name, and its length.
    pub fn name(&self) -> ([u8; NAME_BYTES], usize) {
        let name: [u8; NAME_BYTES] = core::array::from_fn(|i| self.name[i].load(Relaxed));
        (name, name.iter().position(|b| *b == 0).unwrap_or(NAME_BYTES))
    }

    /// Whether the last component of its name is `name`.
    pub fn is_named(&self, name: &[u8]) -> bool {
        let (own, len) = self.name();
        &own[..len] == name
    }

    /// The charge that reclaim stays below: the lesser of `memory.high` and `memory.max`; [`NO_LIMIT`] at most.
    pub fn target(&self) -> u64 {
        self.high.load(Relaxed).min(self.max.load(Relaxed)).min(NO_LIMIT)
    }
}

/// Why a process runs unmanaged.
pub mod unmanaged {
    /// It is statically linked.
    pub const STATIC: u32 = 1;
    /// It has a filter for its system calls.
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
    /// It stays managed: it was to be let go of, which failed.
    pub const STAYS: u32 = 128;
    /// It is searched for memory leaks, with all its threads stopped.
    pub const LEAKS: u32 = 256;
    /// It must have only one thread.
    pub const ALONE: u32 = 512;
    /// It is a forked child that found no place in its group, or could start no thread.
    pub const FORKED: u32 = 1024;
    /// It is in another PID namespace than the group, or has other clocks.
    pub const APART: u32 = 2048;
    /// It has other rights than the process that started it, and nothing is preloaded into it.
    pub const PRIVILEGED: u32 = 4096;
    /// It is a 32-bit program.
    pub const SHORT: u32 = 8192;
    /// It has another C library, whose calls cannot be followed.
    pub const LIBC: u32 = 16384;
}

/// The shared page.
#[repr(C)]
pub struct GroupPage {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// 1 if the pool does not count against the limit (only to compare with the kernel on cgroup v1).
    pub pool_uncharged: AtomicU32,
    /// Reasons for running unmanaged of which a message was given, a bit of [`unmanaged`] each, set by the first process to warn.
    pub warned_unmanaged: AtomicU32,
    /// 1 when members record what happens to their pages: [`crate::trace::Rings`] follow this page.
    pub recording: AtomicU32,
    /// One more than the highest slot ever used; slots beyond need not be examined.
    pub used: AtomicU32,
    /// 1 when members track which of their pages were written to: see `writes`.
    pub track_writes: AtomicU32,
    /// 1 where the kernel has no UFFDIO_MOVE: see `without_move`.
    pub without_move: AtomicU32,
    /// When a member last looked for dead members (monotonic nanoseconds).
    pub buried: AtomicU64,
    /// Settings for folios.
    pub folios: FolioSettings,
    /// What a test makes fail; nothing otherwise.
    pub faults: Faults,
    /// The tree of groups.
    pub nodes: [Node; NODES],
    /// The members.
    pub slots: [Slot; SLOTS],
}

impl GroupPage {
    /// Whether the caller is the first in the group to warn of this reason for running unmanaged, and so has to give the message.
    pub fn warns_first(&self, why: u32) -> bool {
        self.warned_unmanaged.fetch_or(why, AcqRel) & why == 0
    }

    /// Turns zeroed memory into a tree with one group, the root, without limits. The caller sets the magic number last.
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

    /// Makes a group named `name` below `parent`, which must not have one (competing callers must ensure that); None if there are
    /// [`NODES`] groups already, the group would be deeper than [`DEPTH`], or the name is too long.
    pub fn make_child(&self, parent: usize, name: &[u8]) -> Option<usize> {
        let above = self.nodes[parent].ancestors.load(Relaxed);
        if above.count_ones() as usize >= DEPTH || name.len() > NAME_BYTES {
            return None;
        }
        let me = Identity::own().raw();
        let index = (1..NODES).find(|i| {
            let state = &self.nodes[*i].state;
            let now = state.load(Acquire);
            // An entry is free too if the process that was making it has ended.
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

    /// A group and the groups above it, nearest first.
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

    /// Counts an event in a group and in all groups above it.
    pub fn count(&self, node: usize, event: impl Fn(&Events) -> &AtomicU64, n: u64) {
        for at in self.chain(node) {
            event(&self.nodes[at].events).fetch_add(n, Relaxed);
        }
    }

    /// Returns the charges of members that have ended. `me` is the identity of the calling process (not of a thread).
    pub fn bury_the_dead(&self, me: Identity) {
        for slot in self.used() {
            if owner::take(&slot.owner, me, |who| who.is_some_and(|who| who != me && who.is_dead())) {
                slot.uncharge();
                owner::settle(&slot.owner, None);
            }
        }
    }
}

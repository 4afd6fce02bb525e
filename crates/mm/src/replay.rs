//! Replay: runs the engine's own policies over a recorded trace, in virtual time.
//!
//! A trace says when pages left the program, how small they became, and when they were wanted again. None of that
//! depends on what was written to disk meanwhile. So the disk tier is played anew, with any policy and any size of the
//! pool; the engine's very own code, [`crate::shrinker::Shrinker`] and [`PoolFull`], decides what goes.
//!
//! The model. Every member of the group has its pool and its list. When the pools together exceed their maximum, all
//! are shrunk, each in proportion to its size, until they are down to a share of the maximum ([`PoolFull`]), at once
//! and in virtual time. Objects are written packed behind each other, as the engine does, to a file that never wraps.
//! If a wanted page is on disk, the blocks in which its object lies are read; objects that lie entirely in them come
//! along into the pool (readahead). A read takes [`Cost::read_ns`] plus the time of its bytes, and the program waits.
//! Writes are sequential and take the time of their bytes, and nobody waits.
//!
//! What it cannot show: with more or less memory for the pool, the program would have had less or more, and would have
//! faulted more or less often. Policies are still compared on equal terms, as all see the same events and memory.
//!
//! Children. A member begins with what its parent had when it forked. The child's block can come before its parent's;
//! then the child's records wait. Either may have been lost, so a slot waits at most until its next owner starts, and
//! what is kept is bounded.
//!
//! Invariants: `in_pool` is the sum of the objects that are not on disk, and a page refers to at most one object.
//! Nothing that a file can say makes the replay panic. What it keeps is in proportion to the file, except for members
//! that fork ([`MOST_FORKED`]).

mod world;

use crate::shrinker::{DiskReads, Policy, PoolFull};
use crate::trace::{Block, Kind, Record};
use std::collections::BTreeMap;
pub use world::{MOST_PAGES, head_bytes};
use world::{PAGE, Page, World, read_in, write_back};

/// Most pages and objects of all members kept as they forked. Beyond that the oldest are forgotten.
const MOST_FORKED: usize = 1 << 22;
/// Most records of a slot that wait for its owner's parent: many times what a ring holds.
const MOST_WAITING: usize = 1 << 20;

/// The cost of disk I/O.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Nanoseconds from issuing a read to its first byte.
    pub read_ns: u64,
    /// Bytes a second, reading or writing.
    pub bytes_per_second: u64,
}

impl Default for Cost {
    /// A solid-state disk: 100 µs, 500 MiB/s.
    fn default() -> Self {
        Self { read_ns: 100_000, bytes_per_second: 500 << 20 }
    }
}

/// For [`Settings::pool`]: no maximum, and nothing is written. Shows how much the pools took.
pub const NO_DISK: usize = usize::MAX;

/// Parameters of a replay.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The write-back policy.
    pub policy: Policy,
    /// Most bytes of all pools together, or [`NO_DISK`].
    pub pool: usize,
    /// The percentage of that down to which full pools are shrunk.
    pub accept_percent: usize,
    /// The group's limit (bytes). What is not pool counts as the program's.
    pub limit: usize,
    /// The disk's cost.
    pub cost: Cost,
}

/// The result of a replay. Pages are of 4 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Pages read from disk, readahead included.
    pub disk_swapins: u64,
    /// Reads from disk.
    pub reads: u64,
    /// Pages written back.
    pub written_back: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Objects given a second chance.
    pub rotated: u64,
    /// Pages stored.
    pub stored: u64,
    /// Faults that wanted a page from the pool or from disk.
    pub loads: u64,
    /// Of those: faults on pages of which the trace had said nothing (records were lost).
    pub unknown: u64,
    /// Most bytes that the pools took at once.
    pub pool_peak: u64,
    /// Time the program waited for the disk (nanoseconds).
    pub wait_ns: u64,
    /// Time the disk spent writing (nanoseconds).
    pub write_ns: u64,
    /// Records played.
    pub records: u64,
    /// Records lost when the trace was made.
    pub lost: u64,
    /// Virtual time at the end: the trace's, plus the time waited (nanoseconds).
    pub end_ns: u64,
    /// What the recorded run itself wrote back (pages; some may have left their objects before).
    pub recorded_written_back: u64,
    /// What the recorded run itself read from disk (likewise).
    pub recorded_swapins: u64,
}

/// A replay under way.
pub struct Replay {
    settings: Settings,
    worlds: BTreeMap<u32, World>,
    /// Members as they were when they forked, by number of the fork: the oldest first.
    forked: BTreeMap<u64, World>,
    /// Pages and objects of all of those.
    forked_size: usize,
    /// By slot: records of children whose parent's block has not come yet. The first record is the [`Kind::Born`].
    waiting: BTreeMap<u32, Vec<Record>>,
    /// Slots whose awaited fork has been played.
    awaited: Vec<u32>,
    pool_full: PoolFull,
    /// Pages that all members read back, as they are one group.
    disk_reads: DiskReads,
    out: Outcome,
}

impl Replay {
    /// A replay that has played nothing yet.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            worlds: BTreeMap::new(),
            forked: BTreeMap::new(),
            forked_size: 0,
            waiting: BTreeMap::new(),
            awaited: Vec::new(),
            pool_full: PoolFull::default(),
            disk_reads: DiskReads::new(),
            out: Outcome::default(),
        }
    }

    /// Plays a block.
    pub fn block(&mut self, block: &Block<'_>) {
        self.out.lost = self.out.lost.saturating_add(block.head.lost);
        self.out.end_ns = self.out.end_ns.max(block.head.time_ns);
        // Records are missing somewhere in this block, or most likely before or behind it.
        if block.head.lost > 0 {
            self.forget_move(block.head.slot);
        }
        self.play(block.head.slot, block.records());
        if block.head.lost > 0 {
            self.forget_move(block.head.slot);
        }
        self.play_awaited();
    }

    /// Plays records of a slot, or queues them if they must wait. A new owner that waits for nobody ends the wait of
    /// its predecessor.
    fn play(&mut self, slot: u32, records: impl Iterator<Item = Record>) {
        for r in records {
            let is_known = match r.kind {
                Kind::Start => true,
                Kind::Born => self.forked.contains_key(&r.vpn),
                _ => false,
            };
            if is_known {
                self.give_up(slot);
            }
            match self.waiting.get_mut(&slot) {
                Some(queue) => {
                    queue.push(r);
                    if queue.len() >= MOST_WAITING {
                        self.give_up(slot);
                    }
                }
                None if r.kind == Kind::Born && !is_known => drop(self.waiting.insert(slot, vec![r])),
                None => self.record(slot, r),
            }
        }
    }

    /// Plays the records of children whose block came before the one in which their parent forks.
    fn play_awaited(&mut self) {
        while let Some(slot) = self.awaited.pop() {
            if let Some(records) = self.waiting.remove(&slot) {
                self.play(slot, records.into_iter());
            }
        }
    }

    /// Gives up waiting, as the records of the parent were lost: the child starts with nothing.
    fn give_up(&mut self, slot: u32) {
        let records = self.waiting.remove(&slot).unwrap_or_default();
        records.into_iter().for_each(|r| self.record(slot, r));
    }

    /// Records of a slot were lost: the first half of a move is worth nothing without the second.
    fn forget_move(&mut self, slot: u32) {
        if let Some(world) = self.worlds.get_mut(&slot) {
            world.move_from = None;
        }
        if let Some(queue) = self.waiting.get_mut(&slot) {
            queue.pop_if(|r| r.kind == Kind::MoveFrom);
        }
    }

    /// Keeps a copy of a member as it forks.
    fn keep_forked(&mut self, fork: u64, world: World) {
        self.take_forked(fork);
        self.forked_size += world.size();
        self.forked.insert(fork, world);
        while self.forked_size > MOST_FORKED
            && let Some((_, oldest)) = self.forked.pop_first()
        {
            self.forked_size -= oldest.size();
        }
        self.awaited.extend(self.waiting.iter().filter(|(_, queue)| queue[0].vpn == fork).map(|(slot, _)| slot));
    }

    fn take_forked(&mut self, fork: u64) -> Option<World> {
        self.forked.remove(&fork).inspect(|world| self.forked_size -= world.size())
    }

    /// Ends the replay.
    pub fn finish(mut self) -> Outcome {
        while let Some((slot, _)) = self.waiting.first_key_value() {
            let slot = *slot;
            self.give_up(slot);
            self.play_awaited();
        }
        self.out.end_ns = self.out.end_ns.saturating_add(self.out.wait_ns);
        self.out
    }

    /// Plays one record of the member in a slot.
    pub fn record(&mut self, slot: u32, r: Record) {
        self.out.records += 1;
        let policy = self.settings.policy;
        let world = self.worlds.entry(slot).or_insert_with(|| World::new(policy));
        let (vpn, n) = (r.vpn, r.count());
        let moves_from = world.move_from.take();
        match r.kind {
            Kind::Start => *world = World::new(policy),
            Kind::Fork => {
                let as_it_forks = world.clone();
                self.keep_forked(r.vpn, as_it_forks);
            }
            Kind::Born => {
                let world = self.take_forked(r.vpn).unwrap_or_else(|| World::new(policy));
                self.worlds.insert(slot, world);
            }
            Kind::Store => {
                world.store(vpn, n, r.object_bytes());
                self.out.stored += n as u64;
                self.shrink();
            }
            Kind::Resize => world.resize(vpn, n, r.object_bytes()),
            Kind::Load => self.load(slot, &r),
            Kind::Clean => {
                (vpn..vpn + n as u64).for_each(|at| world.clean(at));
                self.shrink();
            }
            Kind::Evict => self.evict(slot, n),
            Kind::Free | Kind::Drop => world.forget_range(vpn, n),
            Kind::MoveFrom => world.move_from = Some((vpn, n)),
            // The two halves are recorded together. With another half in between, the counterpart of each was lost.
            Kind::MoveTo => {
                if let Some((from, _)) = moves_from.filter(|(_, pages)| *pages == n) {
                    world.moved(from, vpn, n);
                }
            }
            Kind::WriteBack => self.out.recorded_written_back += n as u64,
            Kind::DiskRead => self.out.recorded_swapins += n as u64,
            Kind::Zero => world.forget_range(vpn, n),
            Kind::Refault | Kind::Fresh => {}
        }
    }

    fn in_pools(&self) -> usize {
        self.worlds.values().map(|w| w.in_pool).sum()
    }

    fn load(&mut self, slot: u32, r: &Record) {
        let Some(world) = self.worlds.get_mut(&slot) else { return };
        self.out.loads += 1;
        let (mut known, mut read) = (false, false);
        for i in 0..r.count() {
            let at = r.vpn + i as u64;
            let Some(page) = world.pages.get(&at).copied().filter(|p| p.out) else { continue };
            known = true;
            if let Some(place) = world.objects[page.object as usize].at {
                read = true;
                let before = self.out.disk_swapins;
                read_in(world, place, self.settings.cost, &mut self.out);
                self.disk_reads.add((self.out.disk_swapins - before) as usize);
            }
            world.reused.insert(at / MOST_PAGES as u64);
            if r.wide & (1 << i) != 0 {
                world.objects[page.object as usize].out -= 1;
                world.stored -= 1;
                world.pages.insert(at, Page { out: false, ..page });
            } else {
                world.forget(at);
            }
        }
        world.shrinker.loaded();
        self.out.unknown += u64::from(!known);
        if read {
            self.shrink();
        }
    }

    fn evict(&mut self, slot: u32, n: usize) {
        if self.settings.pool == NO_DISK {
            return;
        }
        let resident = (self.settings.limit.saturating_sub(self.in_pools()) / PAGE).max(1);
        let Some(world) = self.worlds.get_mut(&slot) else { return };
        world.shrinker.press(n, resident, world.stored, world.in_pool / PAGE, &self.disk_reads);
        if world.shrinker.due() > 0 {
            write_back(world, 0, self.settings.cost, &mut self.out);
        }
    }

    /// The pool-full path: every member gives up a share in proportion to its pool.
    fn shrink(&mut self) {
        let held = self.in_pools();
        self.out.pool_peak = self.out.pool_peak.max(held as u64);
        let accept = self.settings.pool / 100 * self.settings.accept_percent;
        let excess = self.pool_full.excess(held, self.settings.pool, accept);
        if excess == 0 {
            return;
        }
        for world in self.worlds.values_mut() {
            let share = (excess as u128 * world.in_pool as u128 / held.max(1) as u128) as usize;
            if share > 0 {
                write_back(world, share, self.settings.cost, &mut self.out);
            }
        }
        self.pool_full.excess(self.in_pools(), self.settings.pool, accept);
    }
}

#[cfg(test)]
mod tests;

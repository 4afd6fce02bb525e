//! Replay: the engine's own policies over a recorded trace, in virtual time.
//!
//! A trace says when pages left the program, how small they became, and when they were wanted again; none of that
//! depends on what was written to disk meanwhile. So the disk tier is played anew, with any policy and any size of the
//! pool: [`crate::shrinker::Shrinker`] and [`PoolFull`], the very code of the engine, decide what goes.
//!
//! The model. Every member of the group has its pool and its list; together they may take so many bytes, down to a share
//! of which the fullest are shrunk when they take more ([`PoolFull`]), at once and in virtual time. Objects are written
//! packed behind each other, as the engine does, to a file that never wraps. A page wanted that is on disk costs a read
//! of the blocks its object lies in; what lies wholly in them comes along into the pool (readahead). A read takes
//! [`Cost::read_ns`] and the time of its bytes, during which the program waits; writes are sequential, take the time of
//! their bytes, and nobody waits for them.
//!
//! What it cannot show: with more or less memory for the pool the program would have had less or more, and would have
//! faulted more or less often. Policies are compared on equal terms all the same, as all see the same events and memory.
//!
//! Invariant: `in_pool` is the sum of the objects that are not on disk; a page refers to one object at most.

mod world;

use crate::shrinker::{DiskReads, Policy, PoolFull};
use crate::trace::{Block, Kind, Record};
use std::collections::{BTreeMap, HashMap};
use world::{MOST_PAGES, PAGE, Page, World, read_in, write_back};

/// What the disk costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Nanoseconds from asking for a read to its first byte.
    pub read_ns: u64,
    /// Bytes a second, either way.
    pub bytes_per_second: u64,
}

impl Default for Cost {
    /// A solid-state disk: 100 µs, 500 MiB/s.
    fn default() -> Self {
        Self { read_ns: 100_000, bytes_per_second: 500 << 20 }
    }
}

/// What to replay with.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Who decides.
    pub policy: Policy,
    /// Bytes all pools together may take.
    pub pool: usize,
    /// Down to how many percent of that they are shrunk.
    pub accept_percent: usize,
    /// The group's limit (bytes): what is not pool is taken for the program's.
    pub limit: usize,
    /// The disk.
    pub cost: Cost,
}

/// What came of it. Pages are of 4 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Pages read from disk, readahead included.
    pub disk_swapins: u64,
    /// Reads.
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
    /// Faults that wanted something from the pool or from disk.
    pub loads: u64,
    /// Those of which the trace had not said where from (records were lost).
    pub unknown: u64,
    /// Most bytes the pools took at once.
    pub pool_peak: u64,
    /// Time the program waited for the disk (nanoseconds).
    pub wait_ns: u64,
    /// Time the disk wrote (nanoseconds).
    pub write_ns: u64,
    /// Records played.
    pub records: u64,
    /// Records lost when the trace was made.
    pub lost: u64,
    /// Virtual time at the end: the trace's, and what was waited (nanoseconds).
    pub end_ns: u64,
    /// What the recorded run itself wrote back (pages).
    pub recorded_written_back: u64,
    /// What the recorded run itself read from disk (pages).
    pub recorded_swapins: u64,
}

/// A replay under way.
pub struct Replay {
    settings: Settings,
    worlds: BTreeMap<u32, World>,
    /// Members as they were when they forked, by the fork's number.
    forked: HashMap<u64, World>,
    /// Blocks of children whose parent's block is still to come.
    waiting: Vec<(u32, Vec<Record>)>,
    pool_full: PoolFull,
    /// What all members read back: they are one group.
    disk_reads: DiskReads,
    out: Outcome,
}

impl Replay {
    /// Nothing played yet.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            worlds: BTreeMap::new(),
            forked: HashMap::new(),
            waiting: Vec::new(),
            pool_full: PoolFull::default(),
            disk_reads: DiskReads::new(),
            out: Outcome::default(),
        }
    }

    /// Plays a block.
    pub fn block(&mut self, block: &Block<'_>) {
        self.out.lost = self.out.lost.saturating_add(block.head.lost);
        self.out.end_ns = self.out.end_ns.max(block.head.time_ns);
        self.play(block.head.slot, block.records().collect());
        // A child's block can come before the one in which its parent forks: it has waited for that.
        for (slot, records) in core::mem::take(&mut self.waiting) {
            self.play(slot, records);
        }
    }

    fn play(&mut self, slot: u32, records: Vec<Record>) {
        if self.waiting.iter().any(|(s, _)| *s == slot) {
            return self.waiting.push((slot, records));
        }
        for (i, r) in records.iter().enumerate() {
            if r.kind == Kind::Born && !self.forked.contains_key(&r.vpn) {
                return self.waiting.push((slot, records[i..].to_vec()));
            }
            self.record(slot, *r);
        }
    }

    /// Ends the replay.
    pub fn finish(mut self) -> Outcome {
        // Children whose parents' records were lost: they start with nothing.
        for (slot, records) in core::mem::take(&mut self.waiting) {
            records.into_iter().for_each(|r| self.record(slot, r));
        }
        self.out.end_ns += self.out.wait_ns;
        self.out
    }

    /// Plays one record of the member in a slot.
    pub fn record(&mut self, slot: u32, r: Record) {
        self.out.records += 1;
        let policy = self.settings.policy;
        let world = self.worlds.entry(slot).or_insert_with(|| World::new(policy));
        let (vpn, n) = (r.vpn, r.count());
        match r.kind {
            Kind::Start => *world = World::new(policy),
            Kind::Fork => drop(self.forked.insert(r.vpn, world.clone())),
            Kind::Born => *world = self.forked.remove(&r.vpn).unwrap_or_else(|| World::new(policy)),
            Kind::Store => {
                world.store(vpn, n, r.object_bytes());
                self.out.stored += n as u64;
                self.shrink();
            }
            Kind::Resize => world.resize(vpn, r.object_bytes()),
            Kind::Load => self.load(slot, &r),
            Kind::Clean => {
                (vpn..vpn + n as u64).for_each(|at| world.clean(at));
                self.shrink();
            }
            Kind::Evict => self.evict(slot, n),
            Kind::Free | Kind::Drop => world.forget_range(vpn, n),
            Kind::MoveFrom => world.move_from = Some(vpn),
            Kind::MoveTo => {
                if let Some(from) = world.move_from.take() {
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
        let resident = (self.settings.limit.saturating_sub(self.in_pools()) / PAGE).max(1);
        let Some(world) = self.worlds.get_mut(&slot) else { return };
        world.shrinker.press(n, resident, world.stored, world.in_pool / PAGE, &self.disk_reads);
        if world.shrinker.due() > 0 {
            write_back(world, 0, self.settings.cost, &mut self.out);
        }
    }

    /// The pool-full path: every member gives in proportion to what it has.
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

//! Compaction policies: where pages are taken from and where they go. Three of them share one mechanism.
//!
//! - [`ZoneEnds`] is the kernel's old way: pages from the zone's start go to its end.
//! - [`Pivot`] is the published rule: the same scanners start at a pivot, which moves.
//! - [`Emptiest`] is our own, and walks no addresses. It takes from page blocks in order of how free they are, the
//!   emptiest first, so the block that comes free is one with little to move. If something in a block refuses to move,
//!   it leaves the block at once. Targets are the fullest blocks that have free frames; the zone's map of free frames
//!   shows these without a look at the others. A target must be at least as full as the source, so the sum of the
//!   squares of the blocks' free frames grows with every move, and no pass undoes what another did. The blocks are
//!   sorted once in a pass, however many runs of a small budget the pass takes. What programs do in between shows in
//!   each block when its turn comes.

use super::pivot::{Cached, clear_skip};
use super::scanner::Position;
use crate::zone::{Kind, MAX_ORDER, MigrateType, Zone};

/// What a policy decides. A range of frames lies within one page block.
pub trait Policy {
    /// A run begins. `goes_on` says that it continues a run that stopped for want of budget. Returns true when a new
    /// pass begins.
    fn begin(&mut self, zone: &mut Zone, kind: Kind, goes_on: bool) -> bool;
    /// The frames to search for pages to move; `None` when the scanners have met.
    fn next_source(&mut self, zone: &mut Zone, kind: Kind) -> Option<(u32, u32)>;
    /// Sources were searched for up to `at`; `found` says whether there were any.
    fn source_done(&mut self, zone: &mut Zone, at: u32, found: bool);
    /// A frame in use could not be isolated. Returns true if the rest of its block is not worth searching.
    fn refused(&mut self, zone: &mut Zone, frame: u32) -> bool;
    /// The frames to search for free frames to move to; `None` when the scanners have met.
    fn next_target(&mut self, zone: &mut Zone, kind: Kind) -> Option<(u32, u32)>;
    /// Free frames were searched for up to `at`; `found` says whether there were any.
    fn target_done(&mut self, zone: &mut Zone, at: u32, found: bool);
    /// The targets found last, or some of them, were not needed and return to the zone.
    fn targets_returned(&mut self);
    /// The scanners have met.
    fn met(&mut self, zone: &mut Zone);
    /// The first run after the longest deferral begins.
    fn restart(&mut self, zone: &mut Zone);
    /// Whether free frames are looked up in the zone's map. If not, each frame is looked at, as in the kernel.
    fn uses_map(&self) -> bool {
        false
    }
    /// Called when no sources are left: whether a new pass may find some, now that pages have moved.
    fn is_worth_another_pass(&self) -> bool {
        false
    }
    /// The block where the scanners start, and how often it has moved; `None` if it does not move.
    fn pivot(&self) -> Option<(usize, u64)> {
        None
    }
    /// Page blocks looked at since the last call to choose sources and targets for a pass.
    fn looked_at(&mut self) -> u64 {
        0
    }
}

/// Skip bit of the migrate scanner.
const SOURCE: usize = 0;
/// Skip bit of the free scanner.
const TARGET: usize = 1;

fn is_source(zone: &Zone, block: usize, kind: Kind) -> bool {
    let b = &zone.blocks()[block];
    let (start, end) = zone.block_range(block);
    !b.skip[SOURCE] && b.migrate_type() != MigrateType::Unmovable && b.free(kind) < end - start
}

/// A block that is entirely free is no target: compaction is there to make such blocks.
fn is_target(zone: &Zone, block: usize, kind: Kind) -> bool {
    let b = &zone.blocks()[block];
    let whole = zone.free_run_at(zone.block_range(block).0) == Some((kind, MAX_ORDER));
    !b.skip[TARGET] && b.migrate_type() != MigrateType::Unmovable && b.free(kind) > 0 && !whole
}

/// Two scanners along the addresses, from a pivot.
pub struct Linear {
    /// The pivot and positions remembered between runs.
    pub cached: Cached,
    moves: bool,
    /// Whether to put the pivot in the middle of the zone when a run first begins.
    centre: bool,
    /// Whether each scanner has found something in its current block: [`SOURCE`], [`TARGET`].
    found: [bool; 2],
    /// The free scanner's position before the last look.
    before: Option<Position>,
}

/// The old way: from the zone's ends.
pub struct ZoneEnds;
/// The published rule: from a pivot, which moves on restarts.
pub struct Pivot;

impl ZoneEnds {
    /// The policy.
    #[allow(clippy::new_ret_no_self)]
    pub fn new() -> Linear {
        Linear::starting_at(0, false)
    }
}

impl Pivot {
    /// The policy with the pivot at `block` until it moves. A pivot at the zone's start is the old way until then.
    #[allow(clippy::new_ret_no_self)]
    pub fn new(block: usize) -> Linear {
        Linear::starting_at(block, true)
    }

    /// The policy with the pivot in the middle of the blocks that the zone has at the first compaction, until it moves.
    /// A zone begins its blocks one after the other, so there is no middle before that.
    pub fn in_the_middle() -> Linear {
        Linear { centre: true, ..Linear::starting_at(0, true) }
    }
}

impl Linear {
    /// Scanners that start at a block; with `moves` restarts move it.
    pub fn starting_at(pivot: usize, moves: bool) -> Self {
        Self { cached: Cached::new(pivot), moves, centre: false, found: [false; 2], before: None }
    }
}

impl Policy for Linear {
    fn begin(&mut self, zone: &mut Zone, _kind: Kind, _goes_on: bool) -> bool {
        if core::mem::take(&mut self.centre) {
            self.cached.pivot = zone.blocks().len() / 2;
        }
        let fresh = self.cached.scanners.is_none();
        self.cached.resume(zone);
        fresh
    }

    // A scanner that has finished a block leaves it only when it is asked for more. Until then the other one may come
    // up to this block, but not into it.
    fn next_source(&mut self, zone: &mut Zone, kind: Kind) -> Option<(u32, u32)> {
        let blocks = zone.blocks().len();
        let scanners = self.cached.resume(zone);
        while !scanners.met() {
            let at = scanners.migrate;
            let (start, end) = zone.block_range(at.block);
            if start + at.done < end && (at.done > 0 || is_source(zone, at.block, kind)) {
                return Some((start + at.done, end));
            }
            zone.block_mut(at.block).skip[SOURCE] |= at.done > 0 && !self.found[SOURCE];
            self.found[SOURCE] = false;
            scanners.advance_migrate(blocks);
        }
        None
    }

    fn source_done(&mut self, zone: &mut Zone, at: u32, found: bool) {
        self.found[SOURCE] |= found;
        let scanners = self.cached.resume(zone);
        scanners.migrate.done = at - zone.block_range(scanners.migrate.block).0;
    }

    fn refused(&mut self, _zone: &mut Zone, _frame: u32) -> bool {
        false
    }

    fn next_target(&mut self, zone: &mut Zone, kind: Kind) -> Option<(u32, u32)> {
        let blocks = zone.blocks().len();
        let scanners = self.cached.resume(zone);
        while !scanners.met() {
            let at = scanners.free;
            let (start, end) = zone.block_range(at.block);
            if start + at.done < end && (at.done > 0 || is_target(zone, at.block, kind)) {
                self.before = Some(at);
                return Some((start + at.done, end));
            }
            zone.block_mut(at.block).skip[TARGET] |= at.done > 0 && !self.found[TARGET];
            self.found[TARGET] = false;
            scanners.advance_free(blocks);
        }
        None
    }

    fn target_done(&mut self, zone: &mut Zone, at: u32, found: bool) {
        self.found[TARGET] |= found;
        let scanners = self.cached.resume(zone);
        scanners.free.done = at - zone.block_range(scanners.free.block).0;
    }

    fn targets_returned(&mut self) {
        if let (Some(before), Some(scanners)) = (self.before.take(), self.cached.scanners.as_mut()) {
            scanners.free = before;
        }
    }

    fn met(&mut self, _zone: &mut Zone) {
        self.cached.met();
    }

    fn restart(&mut self, zone: &mut Zone) {
        self.cached.restart(zone, self.moves);
    }

    fn pivot(&self) -> Option<(usize, u64)> {
        self.moves.then_some((self.cached.pivot, self.cached.moves))
    }
}

/// Our own rule: empties the emptiest blocks first, into the fullest.
#[derive(Default)]
pub struct Emptiest {
    /// Blocks to take from, the emptiest first, with how many frames were free in them when the pass began; then the
    /// position in that list.
    sources: Vec<(u32, u32)>,
    source: Place,
    /// Blocks to move to, the best first; then the position in that list, and the one before the last look.
    targets: Vec<u32>,
    target: Place,
    before: Place,
    /// For each block, whether it was a source or a target in this pass.
    touched: Vec<Side>,
    looked: u64,
}

/// A position: an index into a list of blocks, and how many frames of that block are done.
#[derive(Clone, Copy, Default)]
struct Place {
    index: usize,
    done: u32,
}

impl Place {
    fn next(&mut self) {
        *self = Self { index: self.index + 1, done: 0 };
    }
}

/// The role of a block in this pass.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Neither,
    Source,
    Target,
}

impl Emptiest {
    /// The policy.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Policy for Emptiest {
    fn begin(&mut self, zone: &mut Zone, kind: Kind, goes_on: bool) -> bool {
        if goes_on {
            return false;
        }
        let blocks = zone.blocks();
        self.looked += blocks.len() as u64;
        self.sources.clear();
        // Blocks that are entirely free, or entirely full, are neither sources nor targets.
        let all = (0..blocks.len() as u32).map(|b| (b, blocks[b as usize].free(kind)));
        self.sources.extend(all.filter(|(b, free)| {
            let (start, end) = zone.block_range(*b as usize);
            (1..end - start).contains(free)
        }));
        // Equally free blocks in order of address, so that sources and targets start at opposite ends.
        self.sources.sort_unstable_by_key(|(b, free)| (*free, core::cmp::Reverse(*b)));
        self.targets.clear();
        self.targets.extend(self.sources.iter().map(|(b, _)| *b));
        self.sources.reverse();
        (self.source, self.target) = Default::default();
        self.touched.clear();
        self.touched.resize(blocks.len(), Side::Neither);
        true
    }

    fn next_source(&mut self, zone: &mut Zone, kind: Kind) -> Option<(u32, u32)> {
        while let Some((block, free)) = self.sources.get(self.source.index).map(|(b, free)| (*b as usize, *free)) {
            let (start, end) = zone.block_range(block);
            // A block filled between two runs of a pass is not among the emptiest any more.
            let still = is_source(zone, block, kind) && zone.blocks()[block].free(kind) >= free;
            let usable = still && self.touched[block] != Side::Target;
            if usable && start + self.source.done < end {
                self.touched[block] = Side::Source;
                return Some((start + self.source.done, end));
            }
            self.source.next();
        }
        None
    }

    fn source_done(&mut self, zone: &mut Zone, at: u32, _found: bool) {
        if let Some((block, _)) = self.sources.get(self.source.index) {
            self.source.done = at - zone.block_range(*block as usize).0;
        }
    }

    /// One page that stays keeps the whole block: the others need not move.
    fn refused(&mut self, zone: &mut Zone, frame: u32) -> bool {
        let block = zone.block_of(frame);
        zone.block_mut(block).skip[SOURCE] = true;
        true
    }

    fn next_target(&mut self, zone: &mut Zone, kind: Kind) -> Option<(u32, u32)> {
        let source = self.sources.get(self.source.index)?.0 as usize;
        while let Some(block) = self.targets.get(self.target.index).map(|b| *b as usize) {
            let (start, end) = zone.block_range(block);
            let fuller = zone.blocks()[block].free(kind) <= zone.blocks()[source].free(kind);
            let usable = fuller && is_target(zone, block, kind) && self.touched[block] != Side::Source;
            if usable && start + self.target.done < end {
                self.touched[block] = Side::Target;
                self.before = self.target;
                return Some((start + self.target.done, end));
            }
            self.target.next();
        }
        None
    }

    fn target_done(&mut self, zone: &mut Zone, at: u32, _found: bool) {
        if let Some(block) = self.targets.get(self.target.index) {
            self.target.done = at - zone.block_range(*block as usize).0;
        }
    }

    fn targets_returned(&mut self) {
        self.target = self.before;
    }

    fn uses_map(&self) -> bool {
        true
    }

    /// What this pass filled may be a source in the next. The growing sum of squares makes that end.
    fn is_worth_another_pass(&self) -> bool {
        self.touched.contains(&Side::Target)
    }

    fn met(&mut self, _zone: &mut Zone) {}

    fn restart(&mut self, zone: &mut Zone) {
        clear_skip(zone);
    }

    fn looked_at(&mut self) -> u64 {
        core::mem::take(&mut self.looked)
    }
}

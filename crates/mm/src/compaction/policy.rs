//! Where pages are taken from and where they go: three policies over one mechanism.
//!
//! [`ZoneEnds`] is the old way of the kernel: pages from the zone's start go to its end. [`Pivot`] is the published rule:
//! the same scanners start at a pivot that moves. [`Emptiest`] is our own: it walks no
//! addresses. Sources are the page blocks in order of how free they are, the emptiest first, so the block that comes free
//! is one with little to move; a block in which something refuses to move is left at once. Targets are the fullest blocks
//! that have free frames, which the zone's map of free frames shows without looking at the others. They must be at least as
//! full as the source, so the sum of the squares of the blocks' free frames grows with every move: what one pass
//! did the next does not undo. Sorting is once in a pass, however many runs of a small budget it takes; what programs do between two
//! of them it sees in each block as it comes to it.

use super::pivot::{Cached, clear_skip};
use super::scanner::Position;
use crate::zone::{Kind, MAX_ORDER, MigrateType, Zone};

/// What a policy decides. Ranges of frames are within one page block.
pub trait Policy {
    /// A run begins, which `goes_on` where the last one has stopped for want of budget; true when a new pass begins with it.
    fn begin(&mut self, zone: &mut Zone, kind: Kind, goes_on: bool) -> bool;
    /// Frames to look for pages to be moved; none when the scanners have met.
    fn next_source(&mut self, zone: &mut Zone, kind: Kind) -> Option<(u32, u32)>;
    /// Sources were looked for up to `at`; whether there were any.
    fn source_done(&mut self, zone: &mut Zone, at: u32, found: bool);
    /// A frame in use could not be isolated; true when the rest of its block is not worth looking at.
    fn refused(&mut self, zone: &mut Zone, frame: u32) -> bool;
    /// Frames to look for free ones to move to; none when the scanners have met.
    fn next_target(&mut self, zone: &mut Zone, kind: Kind) -> Option<(u32, u32)>;
    /// Free frames were looked for up to `at`; whether there were any.
    fn target_done(&mut self, zone: &mut Zone, at: u32, found: bool);
    /// Targets of the block looked at last were not needed and go back.
    fn targets_returned(&mut self);
    /// The scanners have met.
    fn met(&mut self, zone: &mut Zone);
    /// The first run after the longest deferral.
    fn restart(&mut self, zone: &mut Zone);
    /// Whether free frames are looked up in the zone's map; else they are looked at one by one, as the kernel does.
    fn uses_map(&self) -> bool {
        false
    }
    /// There are no more sources: true when a new pass may find some, now that pages have moved.
    fn is_worth_another_pass(&self) -> bool {
        false
    }
    /// The block where the scanners start, and how often that has moved; none where it does not move.
    fn pivot(&self) -> Option<(usize, u64)> {
        None
    }
    /// Page blocks looked at to choose, when a pass began, since the last call.
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

/// Not a block that is free as a whole: that is what compaction is there to make.
fn is_target(zone: &Zone, block: usize, kind: Kind) -> bool {
    let b = &zone.blocks()[block];
    let whole = zone.free_run_at(zone.block_range(block).0) == Some((kind, MAX_ORDER));
    !b.skip[TARGET] && b.migrate_type() != MigrateType::Unmovable && b.free(kind) > 0 && !whole
}

/// Both scanners along the addresses, from a pivot.
pub struct Linear {
    /// What is remembered.
    pub cached: Cached,
    moves: bool,
    /// Whether the pivot is to be put in the middle of the zone when a run first begins.
    centre: bool,
    /// Whether the migrate scanner found something in its block.
    found: [bool; 2],
    /// Where the free scanner was before the last look.
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
    /// The policy, with the pivot at this block until it moves. (At the zone's start it is the old way until then.)
    #[allow(clippy::new_ret_no_self)]
    pub fn new(block: usize) -> Linear {
        Linear::starting_at(block, true)
    }

    /// The policy, with the pivot in the middle of what the zone has when it is first compacted, until it moves. (A zone's blocks are
    /// begun one after the other: before that there is no middle.)
    pub fn in_the_middle() -> Linear {
        Linear { centre: true, ..Linear::starting_at(0, true) }
    }
}

impl Linear {
    /// Scanners that start at a block; with `moves` it moves on restarts.
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

    // A scanner that has done a block leaves it only when it is asked for more: until then the other one may come up to
    // this block, not into it.
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

/// Our own rule: the emptiest block first, into the fullest.
#[derive(Default)]
pub struct Emptiest {
    /// Blocks to take from, the emptiest first, with the frames free in them when the pass began; and how far that is.
    sources: Vec<(u32, u32)>,
    source: Place,
    /// Blocks to move to, best first, and how far that is.
    targets: Vec<u32>,
    target: Place,
    before: Place,
    /// Blocks that pages came from or went to in this pass.
    touched: Vec<Side>,
    looked: u64,
}

/// An index into a list of blocks, and frames of that block that are done.
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

/// What a block has been in this pass.
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
        // (A block that is all free, or all full, is neither.)
        let all = (0..blocks.len() as u32).map(|b| (b, blocks[b as usize].free(kind)));
        self.sources.extend(all.filter(|(b, free)| {
            let (start, end) = zone.block_range(*b as usize);
            (1..end - start).contains(free)
        }));
        // Equals by address, from both ends.
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
            // (Between two runs of a pass it may have been filled: then it is none of the emptiest any more.)
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

    /// What was moved to in this pass may be moved from in the next. (The sum that grows with every move ends it.)
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

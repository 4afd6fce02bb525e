//! The positions of the two linear scanners, and when they have met.
//!
//! The migrate scanner goes up from the pivot, the free scanner down from the block below it; each wraps once at the
//! zone's edge. If neither has wrapped, they have not met; if both have, they must have crossed; if one has, their
//! blocks tell. All comparisons are by page block, as both scanners may stop inside one.

/// A position: a page block, where in it to continue, and whether the scanner has wrapped at the zone's edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The block, an index into the zone's blocks.
    pub block: usize,
    /// Frames of the block already done, counted from its start for both scanners.
    pub done: u32,
    /// Whether the scanner has wrapped.
    pub wrapped: bool,
}

/// Both positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scanners {
    /// The migrate scanner, upwards.
    pub migrate: Position,
    /// The free scanner, downwards.
    pub free: Position,
}

impl Scanners {
    /// Starts both at a pivot of a zone of `blocks` blocks. The block below the first is the last one, wrapped: a pivot
    /// at the zone's start puts the scanners at the zone's ends, the old way.
    pub fn at(pivot: usize, blocks: usize) -> Self {
        let start = |block, wrapped| Position { block, done: 0, wrapped };
        let free = if pivot == 0 { start(blocks - 1, true) } else { start(pivot - 1, false) };
        Self { migrate: start(pivot, false), free }
    }

    /// Whether they have met.
    pub fn met(&self) -> bool {
        match (self.migrate.wrapped, self.free.wrapped) {
            (false, false) => false,
            (true, true) => true,
            _ => self.free.block <= self.migrate.block,
        }
    }

    /// Moves the migrate scanner to the next block up.
    pub fn advance_migrate(&mut self, blocks: usize) {
        let at = &mut self.migrate;
        at.done = 0;
        at.block += 1;
        if at.block == blocks {
            (at.block, at.wrapped) = (0, true);
        }
    }

    /// Moves the free scanner to the next block down.
    pub fn advance_free(&mut self, blocks: usize) {
        let at = &mut self.free;
        at.done = 0;
        match at.block.checked_sub(1) {
            Some(below) => at.block = below,
            None => (at.block, at.wrapped) = (blocks - 1, true),
        }
    }
}

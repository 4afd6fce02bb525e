//! The two linear scanners' positions, and when they have met.
//!
//! The migrate scanner goes upwards from the pivot, the free scanner downwards from the block below it, each wrapping
//! once at the zone's edge. While neither or one has wrapped they are apart or meet; both cannot have wrapped without
//! having crossed. Everything is compared by page blocks, as both may stop inside one.

/// A position: a page block, where in it to go on, and whether the scanner has wrapped at the zone's edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The block, an index into the zone's blocks.
    pub block: usize,
    /// Frames of the block that are done (from its start upwards, for both scanners).
    pub done: u32,
    /// Whether it went round.
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
    /// Both at a pivot of a zone of `blocks` blocks. The block below the first one is the last one, gone round: with the
    /// pivot at the zone's start these are the ends of the zone, the old way.
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

    /// The migrate scanner goes to the next block up.
    pub fn advance_migrate(&mut self, blocks: usize) {
        let at = &mut self.migrate;
        at.done = 0;
        at.block += 1;
        if at.block == blocks {
            (at.block, at.wrapped) = (0, true);
        }
    }

    /// The free scanner goes to the next block down.
    pub fn advance_free(&mut self, blocks: usize) {
        let at = &mut self.free;
        at.done = 0;
        match at.block.checked_sub(1) {
            Some(below) => at.block = below,
            None => (at.block, at.wrapped) = (blocks - 1, true),
        }
    }
}

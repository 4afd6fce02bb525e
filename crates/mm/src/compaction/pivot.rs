//! The pivot: where the linear scanners start, and what they remember between two runs.
//!
//! [`Cached`] holds the pivot and the positions where the scanners stopped. A run starts from the cached positions; they
//! are reset to the pivot when the scanners have met and on a restart after the longest deferral, and so is what the skip
//! bits say. The pivot itself moves only on such a restart, to where the scanners last met: then the part of the zone
//! that was being emptied and the part that was being filled change places.

use super::scanner::Scanners;
use crate::zone::Zone;

/// What is remembered between runs.
#[derive(Clone, Copy, Debug)]
pub struct Cached {
    /// The block where the scanners start.
    pub pivot: usize,
    /// Where they stopped; none when the next run starts from the pivot.
    pub scanners: Option<Scanners>,
    /// The block where they last met.
    pub met_at: Option<usize>,
    /// How often the pivot has moved.
    pub moves: u64,
}

impl Cached {
    /// Starts at a block.
    pub fn new(pivot: usize) -> Self {
        Self { pivot, scanners: None, met_at: None, moves: 0 }
    }

    /// The positions to go on from. What does not lie in the zone (it may have shrunk, or never been set) is
    /// re-initialised: the pivot to the first block.
    pub fn resume(&mut self, zone: &Zone) -> &mut Scanners {
        let blocks = zone.blocks().len();
        if self.pivot >= blocks {
            *self = Self::new(0);
        }
        let pivot = self.pivot;
        let positions = self.scanners.filter(|s| s.migrate.block < blocks && s.free.block < blocks);
        self.scanners.insert(positions.unwrap_or_else(|| Scanners::at(pivot, blocks)))
    }

    /// The scanners have met: the next run starts from the pivot again.
    pub fn met(&mut self) {
        if let Some(scanners) = self.scanners.take() {
            self.met_at = Some(scanners.migrate.block);
        }
    }

    /// A restart after the longest deferral: skip bits are cleared, positions reset, and with `move_pivot` the pivot goes
    /// to where the scanners last met.
    pub fn restart(&mut self, zone: &mut Zone, move_pivot: bool) {
        clear_skip(zone);
        if move_pivot && let Some(met_at) = self.met_at.take() {
            self.moves += u64::from(self.pivot != met_at);
            self.pivot = met_at;
        }
        self.scanners = None;
    }
}

/// Clears the skip bits of all blocks.
pub fn clear_skip(zone: &mut Zone) {
    for block in 0..zone.blocks().len() {
        zone.block_mut(block).skip = [false; 2];
    }
}

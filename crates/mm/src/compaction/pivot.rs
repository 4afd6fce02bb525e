//! The pivot: where the linear scanners start, and what they remember between two runs.
//!
//! [`Cached`] holds the pivot and the positions where the scanners stopped; a run starts from these. When the scanners
//! have met, their positions are reset to the pivot. A restart after the longest deferral resets them too, and clears
//! the skip bits. Only such a restart moves the pivot itself, to where the scanners last met: then the part of the zone
//! that was being emptied and the part that was being filled change places.

use super::scanner::Scanners;
use crate::zone::Zone;

/// What the scanners remember between runs.
#[derive(Clone, Copy, Debug)]
pub struct Cached {
    /// The block where the scanners start.
    pub pivot: usize,
    /// Where the scanners stopped; `None` if the next run starts from the pivot.
    pub scanners: Option<Scanners>,
    /// The block where they last met.
    pub met_at: Option<usize>,
    /// How often the pivot has moved.
    pub moves: u64,
}

impl Cached {
    /// A pivot at a block, which has not moved.
    pub fn new(pivot: usize) -> Self {
        Self { pivot, scanners: None, met_at: None, moves: 0 }
    }

    /// The positions to continue from. Positions outside the zone (it may have shrunk, or they were never set) are
    /// reset to the pivot, and a pivot outside the zone to the first block.
    pub fn resume(&mut self, zone: &Zone) -> &mut Scanners {
        let blocks = zone.blocks().len();
        if self.pivot >= blocks {
            *self = Self::new(0);
        }
        let pivot = self.pivot;
        let positions = self.scanners.filter(|s| s.migrate.block < blocks && s.free.block < blocks);
        self.scanners.insert(positions.unwrap_or_else(|| Scanners::at(pivot, blocks)))
    }

    /// The scanners have met: the next run starts from the pivot.
    pub fn met(&mut self) {
        if let Some(scanners) = self.scanners.take() {
            self.met_at = Some(scanners.migrate.block);
        }
    }

    /// A restart after the longest deferral: clears the skip bits and resets the positions. With `move_pivot` the pivot
    /// moves to where the scanners last met.
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

//! Lists of ready frames in front of the zone: the kernel's per-CPU lists, as objects.
//!
//! Orders 0 and 2 (a page, and a block for four small folios) come and go all the time. A list takes them from the zone
//! a batch at a time and gives a batch back when it grows beyond `high`: most allocations then split and merge nothing.
//! `mm` has no threads: whoever has some gives each its own list, and calls the zone under its lock.
//!
//! Invariants: a frame in a list is allocated as far as the zone knows, so it merges with nothing; before compaction, or
//! when a larger run is wanted, the lists are drained.

use super::{Kind, MigrateType, Zone};

/// The orders that have a list.
pub const ORDERS: [u8; 2] = [0, 2];

/// Ready runs of one kind.
pub struct Pcp {
    kind: Kind,
    lists: [Vec<u32>; 2],
    /// Frames moved between the list and the zone at a time.
    batch: usize,
    /// Frames in a list above which some go back.
    high: usize,
}

impl Pcp {
    /// Lists that move `batch` frames at a time and keep up to `high`, of each order.
    pub fn new(kind: Kind, batch: usize, high: usize) -> Self {
        let lists = ORDERS.map(|order| Vec::with_capacity((high.max(batch) >> order) + 1));
        Self { kind, lists, batch, high }
    }

    fn list(order: u8) -> Option<usize> {
        ORDERS.iter().position(|o| *o == order)
    }

    /// Takes a movable run; an order without a list comes straight from the zone.
    pub fn alloc(&mut self, zone: &mut Zone, order: u8) -> Option<u32> {
        let Some(list) = Self::list(order) else { return zone.alloc(self.kind, order) };
        if self.lists[list].is_empty() {
            for _ in 0..(self.batch >> order).max(1) {
                let Some(frame) = zone.alloc_typed(self.kind, MigrateType::Movable, order) else { break };
                self.lists[list].push(frame);
            }
        }
        self.lists[list].pop()
    }

    /// Gives a run back.
    pub fn free(&mut self, zone: &mut Zone, frame: u32, order: u8) {
        let Some(list) = Self::list(order) else { return zone.free(self.kind, frame, order) };
        self.lists[list].push(frame);
        if self.lists[list].len() << order > self.high {
            // The oldest go: the newest are warm.
            let n = (self.batch >> order).clamp(1, self.lists[list].len());
            for frame in self.lists[list].drain(..n) {
                zone.free(self.kind, frame, order);
            }
        }
    }

    /// Frames in the lists.
    pub fn frames(&self) -> usize {
        self.lists.iter().zip(ORDERS).map(|(list, order)| list.len() << order).sum()
    }

    /// Gives everything back.
    pub fn drain(&mut self, zone: &mut Zone) {
        for (list, order) in self.lists.iter_mut().zip(ORDERS) {
            for frame in list.drain(..) {
                zone.free(self.kind, frame, order);
            }
        }
    }
}

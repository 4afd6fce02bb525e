//! Page blocks: 2 MiB of a zone, the grain at which movable pages are kept apart from unmovable ones.

use super::{BLOCK_FRAMES, Kind, MAX_ORDER, Zone};
use core::ops::RangeInclusive;

/// What a page block is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum MigrateType {
    /// Pages that can be moved: pages of programs, staged folios, compressed objects.
    Movable = 0,
    /// Pages that cannot be moved: tables.
    Unmovable = 1,
    /// Pages that can be dropped: compressed copies of clean pages.
    Reclaimable = 2,
}

impl MigrateType {
    /// How many there are.
    pub const COUNT: usize = 3;
    /// All of them.
    pub const ALL: [Self; Self::COUNT] = [Self::Movable, Self::Unmovable, Self::Reclaimable];

    /// The types to steal from when this one has run out, first choice first. Unmovable pages prefer to go beside pages
    /// that can at least be dropped.
    pub const fn fallbacks(self) -> [Self; 2] {
        match self {
            Self::Movable => [Self::Reclaimable, Self::Unmovable],
            Self::Unmovable => [Self::Reclaimable, Self::Movable],
            Self::Reclaimable => [Self::Unmovable, Self::Movable],
        }
    }
}

/// One page block: 8 bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Block {
    /// Free frames by kind.
    pub(super) free: [u16; 2],
    mt: u8,
    /// Scanners have found nothing here since these bits were cleared: see `compaction`.
    pub(crate) skip: [bool; 2],
    /// Its holes must not be filled any more: see [`Zone::close_block`].
    pub(super) closed: bool,
}

impl Block {
    /// Free frames of a kind.
    pub fn free(&self, kind: Kind) -> u32 {
        u32::from(self.free[kind as usize])
    }

    /// Its migrate type.
    pub fn migrate_type(&self) -> MigrateType {
        MigrateType::ALL[self.mt as usize]
    }

    /// Whether [`Zone::close_block`] has closed it.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    pub(super) fn set_migrate_type(&mut self, mt: MigrateType) {
        self.mt = mt as u8;
    }
}

impl Zone {
    /// Of the page blocks that are entirely free and whose number of free frames is in `wanted`, the one with the most.
    pub fn idle_block(&self, wanted: RangeInclusive<u32>) -> Option<usize> {
        self.fullest(|b| {
            b.free(Kind::Frame) + b.free(Kind::Hole) == BLOCK_FRAMES && wanted.contains(&b.free(Kind::Frame))
        })
    }

    /// The page block with the most free frames, if any has one.
    pub fn fullest_block(&self) -> Option<usize> {
        self.fullest(|b| b.free(Kind::Frame) > 0)
    }

    /// Of the blocks that `wanted` accepts, the one with the most free frames.
    fn fullest(&self, wanted: impl Fn(&Block) -> bool) -> Option<usize> {
        let all = self.blocks.iter().enumerate().filter(|(_, b)| wanted(b));
        all.max_by_key(|(_, b)| b.free(Kind::Frame)).map(|(block, _)| block)
    }

    /// Takes a page block that is entirely free, and returns its first slot. The caller then owns all of it, as after
    /// [`Zone::alloc`] of the largest order.
    pub fn take_idle_block(&mut self, block: usize) -> u32 {
        let (first, end) = self.block_range(block);
        debug_assert!(first.is_multiple_of(1 << MAX_ORDER), "a whole block is aligned");
        let mut at = first;
        while let Some((run, kind, order)) = self.next_free_run(at, end) {
            debug_assert_eq!(run, at, "all of it is free");
            self.unlink(kind, run, order);
            at = run + (1 << order);
        }
        first
    }

    /// Takes up to `most` free frames out of a page block and appends their runs to `runs`: first slots and orders.
    /// Returns how many frames it took.
    pub fn take_block_frames(&mut self, block: usize, most: usize, runs: &mut Vec<(u32, u8)>) -> usize {
        let (mut at, end) = self.block_range(block);
        let mut taken = 0;
        while taken < most {
            let Some((run, kind, found)) = self.next_free_run(at, end) else { break };
            at = run + (1 << found);
            if kind == Kind::Frame {
                let order = found.min((most - taken).ilog2() as u8);
                runs.push((self.take(kind, run, found, order), order));
                taken += 1 << order;
                // The rest of the run may still be wanted.
                at = run + (1 << order);
            }
        }
        taken
    }

    /// Closes a page block, so that nothing can be moved into its holes any more. Its free holes, and slots of it that
    /// are freed as holes later, stay allocated for good. Slots in use and free frames are left as they are.
    pub fn close_block(&mut self, block: usize) {
        self.blocks[block].closed = true;
        let (mut at, end) = self.block_range(block);
        while let Some((run, kind, order)) = self.next_free_run(at, end) {
            if kind == Kind::Hole {
                self.unlink(kind, run, order);
            }
            at = run + (1 << order);
        }
    }
}

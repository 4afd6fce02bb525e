//! Page blocks: 2 MiB of a zone, the grain at which what can be moved is kept apart from what cannot.

use super::{BLOCK_FRAMES, Kind, MAX_ORDER, Zone};
use core::ops::RangeInclusive;

/// What lives in a page block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum MigrateType {
    /// What can be moved: pages of programs, staged folios, compressed objects.
    Movable = 0,
    /// What stays where it is: tables.
    Unmovable = 1,
    /// What can be dropped: compressed copies of clean pages.
    Reclaimable = 2,
}

impl MigrateType {
    /// How many there are.
    pub const COUNT: usize = 3;
    /// All of them.
    pub const ALL: [Self; Self::COUNT] = [Self::Movable, Self::Unmovable, Self::Reclaimable];

    /// Whose blocks are taken from when there is nothing left, first choice first: what cannot be moved goes beside what
    /// at least can be dropped.
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
    /// Scanners have found nothing here since the bits were cleared: see `compaction`.
    pub(crate) skip: [bool; 2],
    /// Nothing may be put into its holes any more: see [`Zone::close_block`].
    pub(super) closed: bool,
}

impl Block {
    /// Free frames of a kind.
    pub fn free(&self, kind: Kind) -> u32 {
        u32::from(self.free[kind as usize])
    }

    /// What lives in it.
    pub fn migrate_type(&self) -> MigrateType {
        MigrateType::ALL[self.mt as usize]
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    pub(super) fn set_migrate_type(&mut self, mt: MigrateType) {
        self.mt = mt as u8;
    }
}

impl Zone {
    /// The page block that is all free with the most frames in it, of a number that `wanted` has.
    pub fn idle_block(&self, wanted: RangeInclusive<u32>) -> Option<usize> {
        self.fullest(|b| {
            b.free(Kind::Frame) + b.free(Kind::Hole) == BLOCK_FRAMES && wanted.contains(&b.free(Kind::Frame))
        })
    }

    /// The page block with the most free frames, of those that have any.
    pub fn fullest_block(&self) -> Option<usize> {
        self.fullest(|b| b.free(Kind::Frame) > 0)
    }

    /// The block with the most free frames, of those that are wanted.
    fn fullest(&self, wanted: impl Fn(&Block) -> bool) -> Option<usize> {
        let all = self.blocks.iter().enumerate().filter(|(_, b)| wanted(b));
        all.max_by_key(|(_, b)| b.free(Kind::Frame)).map(|(block, _)| block)
    }

    /// Takes a page block that is all free: its first slot. The caller has all of it then, as from [`Zone::alloc`] of the largest order.
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

    /// Takes free frames, up to `most`, out of a page block, and appends their runs: first slots and orders. Returns how many frames
    /// those are.
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
                // (What is left of it may be wanted yet.)
                at = run + (1 << order);
            }
        }
        taken
    }

    /// Closes a page block: nothing can be moved into its holes any more. Those that are free, and what is freed as holes from now on, stay
    /// allocated for good. What is in use in it, and its frames, stay what they are.
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

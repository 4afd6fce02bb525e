//! Pool compaction: drains partly filled slabs of a class into each other until the remaining ones are nearly full.
//!
//! A slab returns to the kernel only when its last object goes, so churn leaves many slabs with a few objects each. If
//! the free objects of a class would fill a slab, the class can do with one slab less ([`ZsPool::compact`]). The
//! emptiest slab is taken off the lists, so that nothing is allocated in it; its objects move into the fullest of the
//! others, and its pages are freed.
//!
//! The slabs left are scattered, a few in each page block. While more than half of the pages of all page blocks in use
//! are free, the emptiest block can be spared ([`ZsPool::evacuate`]). Its slabs are taken off the lists and the block
//! itself from allocation; their objects move into slabs of other blocks, new ones if need be.
//!
//! This module only knows offsets. The owner of the bytes implements [`Relocate`]: it copies an object and changes
//! every reference to it, in what readers see as one step, or it refuses, and the object stays where it is.
//!
//! Invariants: compaction never makes the pool larger, as it allocates in existing slabs only. Evacuation makes it
//! larger by at most one slab for each class, and only while one of the same class is being emptied. A drained slab is
//! gone, or is listed again with the objects that refused to move. Cost: beyond the budget, at most the objects of one
//! slab.

use super::{CLASS_COUNT, CLASSES, Freed, GRAIN, GROUPS, Handle, NONE, PAGE, ZsPool, group};
use crate::zone::{BLOCK_FRAMES, Block, Kind, MigrateType};

/// Moves objects for [`ZsPool::compact`] and [`ZsPool::evacuate`].
pub trait Relocate {
    /// Copies the object at `from` to `to` (both of `len` bytes, not overlapping) and makes all references to it name
    /// `to`. Returns false if nothing was changed and the object stays.
    fn relocate(&mut self, from: Handle, to: Handle, len: usize) -> bool;

    /// These pages hold nothing any more, like those that [`ZsPool::free`] returns.
    fn freed(&mut self, pages: Freed);
}

/// What a compaction did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    /// Objects moved.
    pub moved: usize,
    /// Objects that could not be moved.
    pub refused: usize,
    /// Bytes of the slabs freed.
    pub freed: usize,
    /// Page blocks emptied.
    pub blocks: usize,
}

impl ZsPool {
    /// Bytes that [`ZsPool::compact`] could free if every object moved. Looks at every class.
    pub fn compactable_bytes(&self) -> usize {
        (0..CLASS_COUNT).map(|class| self.spare_slabs(class) * CLASSES[class].pages as usize * PAGE).sum()
    }

    /// Drains slabs until about `budget` objects have moved or no class has a slab to spare. Continues with the class
    /// at which the last call stopped, so that every class has its turn.
    pub fn compact(&mut self, budget: usize, mover: &mut impl Relocate) -> Compacted {
        let mut done = Compacted::default();
        for _ in 0..CLASS_COUNT {
            let class = self.compact_next;
            while self.spare_slabs(class) > 0 {
                if done.moved + done.refused >= budget {
                    return done;
                }
                let Some(source) = self.partial[class].iter().copied().find(|head| *head != NONE) else { break };
                let refused = done.refused;
                self.unlist(source);
                self.drain(source, None, mover, &mut done);
                if done.refused > refused {
                    // Next time the emptiest slab would be the same one: try other classes first.
                    break;
                }
            }
            self.compact_next = (class + 1) % CLASS_COUNT;
        }
        done
    }

    /// How many slabs the others of the class have room for.
    fn spare_slabs(&self, class: usize) -> usize {
        let (objects, usage) = (CLASSES[class].objects as usize, &self.usage[class]);
        (usage.slabs as usize * objects - usage.live as usize) / objects
    }

    /// Whether more than half of the pages of the page blocks in use may be free. Constant time, while
    /// [`ZsPool::page_blocks`] looks at every block.
    pub fn may_be_sparse(&self) -> bool {
        self.zone.end() as usize * PAGE > 2 * self.held
    }

    /// The number of page blocks in use, and of their free pages.
    pub fn page_blocks(&self) -> (usize, usize) {
        let free = self.used_blocks().map(|(_, block)| block.free(Kind::Hole) as usize);
        free.fold((0, 0), |(blocks, all), free| (blocks + 1, all + free))
    }

    fn used_blocks(&self) -> impl Iterator<Item = (usize, &Block)> {
        let frames = |(first, end): (u32, u32)| end - first;
        let all = self.zone.blocks().iter().enumerate();
        all.filter(move |(i, block)| block.free(Kind::Hole) < frames(self.zone.block_range(*i)))
    }

    /// Empties page blocks, the emptiest first, until about `budget` objects have moved or at most half of the pages of
    /// all blocks in use are free. The next call continues with a block left half done, as that is the emptiest by
    /// then.
    pub fn evacuate(&mut self, budget: usize, mover: &mut impl Relocate) -> Compacted {
        let mut done = Compacted::default();
        while done.moved + done.refused < budget {
            let (blocks, free) = self.page_blocks();
            if blocks < 2 || free * 2 <= blocks * BLOCK_FRAMES as usize {
                break;
            }
            let source = self.used_blocks().max_by_key(|(_, block)| block.free(Kind::Hole)).map(|(i, _)| i);
            let Some(source) = source else { break };
            let emptied = self.empty_block(source, budget, mover, &mut done);
            done.blocks += usize::from(emptied);
            if !emptied {
                break;
            }
        }
        done
    }

    /// Moves the objects of a page block's slabs into other blocks. Returns whether the block is empty now.
    fn empty_block(&mut self, block: usize, budget: usize, mover: &mut impl Relocate, done: &mut Compacted) -> bool {
        // Isolates the block as the kernel does: allocation takes from another type.
        self.zone.set_block_type(block, MigrateType::Unmovable);
        let slabs = self.slabs_of(block);
        slabs.iter().for_each(|slab| self.unlist(*slab));
        let (mut left, mut emptied) = (slabs.into_iter(), true);
        while done.moved + done.refused < budget {
            let Some(slab) = left.next() else { break };
            emptied &= self.drain(slab, Some(block), mover, done);
        }
        for slab in left {
            self.relist(slab);
            emptied = false;
        }
        self.zone.set_block_type(block, MigrateType::Movable);
        emptied
    }

    /// The slabs of a page block.
    fn slabs_of(&self, block: usize) -> Vec<u32> {
        let (mut page, end) = self.zone.block_range(block);
        let mut slabs = Vec::new();
        while page < end {
            if let Some((_, order)) = self.zone.free_run_at(page) {
                page += 1 << order;
            } else {
                let index = self.slab_at(page).expect("a page that is not free is a slab's");
                page += u32::from(self.slabs[index as usize].pages);
                slabs.push(index);
            }
        }
        slabs
    }

    /// Takes a slab off its fullness list.
    fn unlist(&mut self, slab: u32) {
        let (class, live) = (self.slabs[slab as usize].class, self.slabs[slab as usize].live);
        self.move_group(slab, class, group(live, CLASSES[class as usize].objects), None);
    }

    /// Puts a slab that is in no list into the one it belongs in.
    fn relist(&mut self, slab: u32) {
        let (class, live) = (self.slabs[slab as usize].class, self.slabs[slab as usize].live);
        self.move_group(slab, class, None, group(live, CLASSES[class as usize].objects));
    }

    /// The fullest slab of a class that has room. While a page block is being emptied (its own slabs are not listed),
    /// adds a slab of `pages` pages in another block if there is none.
    fn target(&mut self, class: u8, pages: u16, emptied: Option<usize>) -> Option<u32> {
        let listed = (0..GROUPS).rev().map(|g| self.partial[class as usize][g]).find(|head| *head != NONE);
        let Some(source) = emptied.filter(|_| listed.is_none()) else { return listed };
        let slab = self.add_slab(class, pages)?;
        let (first, pages) = (self.slabs[slab as usize].first_page, u32::from(pages));
        let block = self.zone.block_of(first);
        let (from, to) = self.zone.block_range(block);
        if block == source || self.zone.blocks()[block].free(Kind::Hole) + pages == to - from {
            // No other block in use has room, so nothing would be gained. Nobody has touched the new slab.
            self.unlist(slab);
            self.remove_slab(slab);
            return None;
        }
        Some(slab)
    }

    /// Moves the objects of an unlisted slab into other slabs of its class. Returns whether all moved; if not, the slab
    /// is listed again.
    fn drain(&mut self, source: u32, emptied: Option<usize>, mover: &mut impl Relocate, done: &mut Compacted) -> bool {
        let slab = &self.slabs[source as usize];
        let (class_index, first, bits) = (slab.class, slab.first_page as usize * PAGE, slab.live_bits);
        let class = slab.class();
        for object in (0..class.objects as usize).filter(|o| bits[o / 64] >> (o % 64) & 1 == 1) {
            let size = class.size as usize;
            let from = Handle(((first + object * size) / GRAIN) as u32);
            let Some(target) = self.target(class_index, class.pages, emptied) else { break };
            let to = self.take_object(target);
            if mover.relocate(from, to, size) {
                self.drop_object(source, object);
                done.moved += 1;
            } else {
                done.refused += 1;
                if let Some(freed) = self.free(to) {
                    mover.freed(freed);
                }
            }
        }
        let gone = self.slabs[source as usize].live == 0;
        if gone {
            let freed = self.remove_slab(source);
            done.freed += freed.len;
            mover.freed(freed);
        } else {
            self.relist(source);
        }
        gone
    }
}

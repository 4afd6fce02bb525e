//! Pool compaction: partly filled slabs of a class are drained into each other until what is left is nearly full.
//!
//! A slab goes back to the kernel only when its last object goes, so after churn many slabs hold a few objects each. A
//! class whose free objects would fill a slab can do with one slab less: the emptiest is taken off the lists (so that
//! nothing is allocated in it), its objects move into the fullest of the others, and its pages are freed.
//!
//! This module only knows offsets. Whoever owns the bytes implements [`Relocate`]: copies an object and changes every
//! reference to it, in one step as seen by readers, or refuses, and then the object stays where it is.
//!
//! Invariants: a move never makes the pool larger (it allocates in existing slabs only); after it the slab is empty and
//! gone, or listed again with what refused to move. Cost: at most one slab's objects beyond the budget.

use super::{CLASS_COUNT, CLASSES, Freed, GRAIN, GROUPS, Handle, NONE, PAGE, ZsPool, group};

/// Moves objects for [`ZsPool::compact`].
pub trait Relocate {
    /// Copies the object at `from` to `to` (both of `len` bytes, not overlapping) and makes all references to it name
    /// `to`. False: nothing was changed and the object stays.
    fn relocate(&mut self, from: Handle, to: Handle, len: usize) -> bool;

    /// These pages hold nothing any more: as what [`ZsPool::free`] returns.
    fn freed(&mut self, pages: Freed);
}

/// What a compaction did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    /// Objects moved.
    pub moved: usize,
    /// Objects that refused.
    pub refused: usize,
    /// Bytes of the slabs that went.
    pub freed: usize,
}

impl ZsPool {
    /// Bytes that [`ZsPool::compact`] could free if every object moved. Looks at each class.
    pub fn compactable_bytes(&self) -> usize {
        (0..CLASS_COUNT).map(|class| self.spare_slabs(class) * CLASSES[class].pages as usize * PAGE).sum()
    }

    /// Drains slabs until about `budget` objects have moved or no class has a slab to spare. Goes on with the class
    /// after the one where the last call ended, so that every class has its turn.
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
                self.drain(source, mover, &mut done);
                if done.refused > refused {
                    // The emptiest slab is the same next time: other classes first.
                    break;
                }
            }
            self.compact_next = (class + 1) % CLASS_COUNT;
        }
        done
    }

    /// Slabs that the others of the class have room for.
    fn spare_slabs(&self, class: usize) -> usize {
        let (objects, usage) = (CLASSES[class].objects as usize, &self.usage[class]);
        (usage.slabs as usize * objects - usage.live as usize) / objects
    }

    /// Moves what a slab holds into other slabs of its class.
    fn drain(&mut self, source: u32, mover: &mut impl Relocate, done: &mut Compacted) {
        let slab = &self.slabs[source as usize];
        let (class_index, first, bits) = (slab.class, slab.first_page as usize * PAGE, slab.live_bits);
        let class = CLASSES[class_index as usize];
        self.move_group(source, class_index, group(slab.live, class.objects), None);
        for object in (0..class.objects as usize).filter(|o| bits[o / 64] >> (o % 64) & 1 == 1) {
            let size = class.size as usize;
            let from = Handle(((first + object * size) / GRAIN) as u32);
            let Some(target) = (0..GROUPS).rev().map(|g| self.partial[class_index as usize][g]).find(|h| *h != NONE)
            else {
                break;
            };
            let to = self.take_object(target);
            if mover.relocate(from, to, size) {
                self.drop_object(source, object);
                done.moved += 1;
            } else {
                let (slab, at) = self.locate(to);
                let before = self.drop_object(slab, at);
                self.move_group(slab, class_index, group(before, class.objects), group(before - 1, class.objects));
                done.refused += 1;
            }
        }
        let live = self.slabs[source as usize].live;
        if live == 0 {
            let freed = self.remove_slab(source);
            done.freed += freed.len;
            mover.freed(freed);
        } else {
            self.move_group(source, class_index, None, group(live, class.objects));
        }
    }
}

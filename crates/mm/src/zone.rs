//! The zone: slots of the frame arena under a buddy allocator.
//!
//! A slot is a 4 KiB place in the arena. A free slot is of one of two [`Kind`]s: it holds a *frame* (memory that can be
//! refilled and moved into the program), or it is a *hole* (an address to which a frame can be moved out). Moving a
//! frame into the program turns its slot from frame to hole; evicting turns a hole into a frame. Runs of slots are
//! naturally aligned powers of two, orders 0 to [`MAX_ORDER`], so that a folio moves in one call.
//!
//! Invariants: a slot is in at most one free block; a free block's buddy of the same kind and order is never free too
//! (they would have merged). It works on slot numbers and does not know memory. Owner: the pager's lock.

/// The largest order: 2 MiB.
pub const MAX_ORDER: u8 = 9;
const NIL: u32 = u32::MAX;
const ORDERS: usize = MAX_ORDER as usize + 1;

/// What a free slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It holds a frame.
    Frame = 0,
    /// It holds nothing.
    Hole = 1,
}

/// The allocator.
pub struct Zone {
    head: [[u32; ORDERS]; 2],
    count: [usize; 2],
    /// Links of the free block that starts at a slot (previous, next).
    links: Vec<(u32, u32)>,
    /// 0, or kind << 4 | order + 1 of the free block that starts at a slot.
    tag: Vec<u8>,
}

impl Zone {
    /// A zone of `slots` holes.
    ///
    /// # Panics
    /// When `slots` is not a multiple of 512 or does not fit 25 bits.
    pub fn new(slots: usize) -> Self {
        assert!(slots.is_multiple_of(512) && slots < 1 << 25);
        let mut zone =
            Self { head: [[NIL; ORDERS]; 2], count: [0; 2], links: vec![(0, 0); slots], tag: vec![0; slots] };
        for at in (0..slots).step_by(512).rev() {
            zone.push(Kind::Hole, at as u32, MAX_ORDER);
        }
        zone
    }

    /// Free slots of a kind.
    pub fn free_slots(&self, kind: Kind) -> usize {
        self.count[kind as usize]
    }

    /// Bytes of the zone's own tables.
    pub fn metadata_bytes(&self) -> usize {
        self.links.len() * 8 + self.tag.len()
    }

    fn push(&mut self, kind: Kind, slot: u32, order: u8) {
        let head = &mut self.head[kind as usize][order as usize];
        let next = core::mem::replace(head, slot);
        self.links[slot as usize] = (NIL, next);
        if next != NIL {
            self.links[next as usize].0 = slot;
        }
        self.tag[slot as usize] = ((kind as u8) << 4) | (order + 1);
        self.count[kind as usize] += 1 << order;
    }

    fn unlink(&mut self, kind: Kind, slot: u32, order: u8) {
        let (prev, next) = self.links[slot as usize];
        if prev == NIL {
            self.head[kind as usize][order as usize] = next;
        } else {
            self.links[prev as usize].1 = next;
        }
        if next != NIL {
            self.links[next as usize].0 = prev;
        }
        self.tag[slot as usize] = 0;
        self.count[kind as usize] -= 1 << order;
    }

    /// Takes a run of 2^order slots, or None when there is no run of that order.
    pub fn alloc(&mut self, kind: Kind, order: u8) -> Option<u32> {
        let found = (order..=MAX_ORDER).find(|o| self.head[kind as usize][*o as usize] != NIL)?;
        let slot = self.head[kind as usize][found as usize];
        self.unlink(kind, slot, found);
        for o in (order..found).rev() {
            self.push(kind, slot + (1 << o), o);
        }
        Some(slot)
    }

    /// Takes the largest run of an order up to `order`.
    pub fn alloc_up_to(&mut self, kind: Kind, order: u8) -> Option<(u32, u8)> {
        (0..=order).rev().find_map(|o| self.alloc(kind, o).map(|slot| (slot, o)))
    }

    /// Gives back a run of slots as being of a kind now.
    ///
    /// # Panics
    /// When the first slot is free already, or misaligned.
    pub fn free(&mut self, kind: Kind, slot: u32, order: u8) {
        assert!(
            self.tag[slot as usize] == 0 && slot.is_multiple_of(1 << order),
            "slot {slot} freed twice or misaligned"
        );
        let (mut slot, mut order) = (slot, order);
        while order < MAX_ORDER {
            let buddy = slot ^ (1 << order);
            if buddy as usize >= self.tag.len() || self.tag[buddy as usize] != ((kind as u8) << 4) | (order + 1) {
                break;
            }
            self.unlink(kind, buddy, order);
            slot &= !(1 << order);
            order += 1;
        }
        self.push(kind, slot, order);
    }

    /// Gives back `n` consecutive slots as naturally aligned runs.
    ///
    /// # Panics
    /// As [`Zone::free`].
    pub fn free_run(&mut self, kind: Kind, slot: u32, n: usize) {
        let (mut at, mut left) = (slot, n as u32);
        while left > 0 {
            let order = at.trailing_zeros().min(left.ilog2()).min(u32::from(MAX_ORDER)) as u8;
            self.free(kind, at, order);
            at += 1 << order;
            left -= 1 << order;
        }
    }
}

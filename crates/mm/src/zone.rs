//! The zone: a buddy allocator of frames.
//!
//! Frames are numbers; the zone knows no memory. Runs are naturally aligned powers of two, orders 0 to [`MAX_ORDER`],
//! so that a folio moves in one call. A zone may start at any frame (frame 1 is the classic trap).
//!
//! ```text
//! zone   │ page block: 512 frames, 2 MiB, of one migrate type │ page block │ page block │ …
//! free   │ lists by kind, migrate type and order; a bit mask says which orders have any
//! ```
//! - **Kinds** ([`Kind`]): a free slot of the pager's arena is a *frame* (memory that can be refilled and moved into
//!   the program) or a *hole* (an address to which a frame can be moved out). Moving a frame into the program turns its
//!   slot into a hole; evicting turns a hole into a frame. A zone of plain memory has frames only.
//! - **Migrate types** ([`MigrateType`]): movable pages are kept apart from unmovable ones, a page block at a time, as
//!   one unmovable frame spoils a whole block. A type that has run out steals the largest run of another's, so that it
//!   spoils as few blocks as possible. It takes the block over if half of the block is free, and always if the type is
//!   unmovable (`steal`).
//! - **Watermarks** ([`Watermarks`]).
//!
//! Slots never used yet are holes without tables. A page block is begun only when no other has a run.
//!
//! Invariants: a frame is in at most one free run. The buddy of a free run is never free with the same kind, order and
//! block type, as the two would have merged (for the exception see `ready`). Runs never cross the zone's ends. A
//! block's `free` counts its free frames by kind. A closed block has no free holes. Cost: allocating and freeing look
//! at each order once at most. Owner: the pager's lock.

pub mod block;
mod ready;

pub use block::{Block, MigrateType};

/// The largest order: 2 MiB.
pub const MAX_ORDER: u8 = 9;
/// Frames in a page block.
pub const BLOCK_FRAMES: u32 = 1 << MAX_ORDER;
const NIL: u32 = u32::MAX;
const ORDERS: usize = MAX_ORDER as usize + 1;

/// What a free slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A frame: it has memory.
    Frame = 0,
    /// A hole: an address without memory.
    Hole = 1,
}

/// The free runs of one kind and migrate type.
#[derive(Clone, Copy)]
struct FreeArea {
    /// First run of each order.
    head: [u32; ORDERS],
    /// A bit for each order that has a run.
    orders: u16,
}

/// Thresholds of free frames, as the kernel's: an allocation must leave `min` free, background reclaim starts below
/// `low` and stops at `high`. In frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watermarks {
    /// Reserved for the threads that free memory.
    pub min: usize,
    /// Reclaim starts below this.
    pub low: usize,
    /// Reclaim stops here.
    pub high: usize,
}

/// The allocator.
pub struct Zone {
    /// First frame of the zone.
    start: u32,
    /// One past the last frame that the zone may have. Frames beyond the tables are holes.
    limit: u32,
    areas: [[FreeArea; MigrateType::COUNT]; 2],
    count: [usize; 2],
    /// For a frame at which a free run starts: the run's links (previous, next). For a frame in use: what its user
    /// noted.
    links: Vec<(u32, u32)>,
    /// 0, or type << 5 | kind << 4 | order + 1 of the free run that starts at a frame.
    tag: Vec<u8>,
    /// A bit for each free frame, starting with frame `start / 64 * 64`. Compaction looks free frames up here.
    map: Vec<u64>,
    blocks: Vec<Block>,
    ready: ready::Ready,
    /// The watermarks, for [`Zone::watermark_ok`].
    pub watermarks: Watermarks,
}

const fn tag(kind: Kind, mt: MigrateType, order: u8) -> u8 {
    (mt as u8) << 5 | (kind as u8) << 4 | (order + 1)
}

impl Zone {
    /// A zone of `slots` holes, numbered from 0. Reserves address space for all tables; memory is taken as blocks are
    /// begun.
    ///
    /// # Panics
    /// When `slots` is not a multiple of 512 or does not fit 25 bits.
    pub fn new(slots: usize) -> Self {
        assert!(slots.is_multiple_of(BLOCK_FRAMES as usize) && slots < 1 << 25);
        let mut zone = Self::growing(slots as u32);
        zone.links.reserve_exact(slots);
        zone.tag.reserve_exact(slots);
        zone
    }

    /// A zone of up to `slots` holes, numbered from 0, whose tables are made as blocks are begun.
    pub fn growing(slots: u32) -> Self {
        Self::of(0, slots)
    }

    /// A zone without tables.
    fn of(start: u32, limit: u32) -> Self {
        Self {
            start,
            limit,
            areas: [[FreeArea { head: [NIL; ORDERS], orders: 0 }; MigrateType::COUNT]; 2],
            count: [0; 2],
            links: Vec::new(),
            tag: Vec::new(),
            map: Vec::new(),
            blocks: Vec::new(),
            ready: ready::Ready::default(),
            watermarks: Watermarks::default(),
        }
    }

    /// Makes the tables of the slots up to `end`. None of these is free yet.
    fn begin(&mut self, end: u32) {
        let frames = (end - self.start) as usize;
        self.links.resize(frames, (0, 0));
        self.tag.resize(frames, 0);
        self.map.resize((end.div_ceil(64) - self.start / 64) as usize, 0);
        let blocks = end.div_ceil(BLOCK_FRAMES) - self.start / BLOCK_FRAMES;
        self.blocks.resize(blocks as usize, Block::default());
    }

    /// Slots never used yet: all of them are holes.
    fn unused(&self, kind: Kind) -> usize {
        if kind == Kind::Hole { (self.limit - self.end()) as usize } else { 0 }
    }

    /// Begins another page block; false when there is none of that kind.
    fn grow(&mut self, kind: Kind) -> bool {
        let frames = (self.unused(kind) as u32).min(BLOCK_FRAMES);
        if frames == 0 {
            return false;
        }
        let first = self.end();
        self.begin(first + frames);
        self.free_run(kind, first, frames as usize);
        true
    }

    /// A zone of the frames `start..end`, all free and of one kind, every block movable.
    ///
    /// # Panics
    /// When the range is empty.
    pub fn spanning(start: u32, end: u32, kind: Kind) -> Self {
        assert!(start < end, "a zone of no frames");
        let mut zone = Self::of(start, end);
        zone.begin(end);
        // Highest first, so that the lowest ends up at the head of its list.
        let mut to = end;
        while to > start {
            let from = (to - 1) / BLOCK_FRAMES * BLOCK_FRAMES;
            zone.free_run(kind, from.max(start), (to - from.max(start)) as usize);
            to = from.max(start);
        }
        zone
    }

    /// First frame.
    pub fn start(&self) -> u32 {
        self.start
    }

    /// One past the last frame begun.
    pub fn end(&self) -> u32 {
        self.start + self.tag.len() as u32
    }

    /// Free slots of a kind.
    pub fn free_slots(&self, kind: Kind) -> usize {
        self.count[kind as usize] + self.unused(kind)
    }

    /// Bytes of the zone's own tables.
    pub fn metadata_bytes(&self) -> usize {
        self.links.len() * 8
            + self.tag.len()
            + self.map.len() * 8
            + self.blocks.len() * size_of::<Block>()
            + self.ready.bytes()
    }

    fn at(&self, frame: u32) -> usize {
        (frame - self.start) as usize
    }

    /// Index of the block that a frame is in.
    pub fn block_of(&self, frame: u32) -> usize {
        (frame / BLOCK_FRAMES - self.start / BLOCK_FRAMES) as usize
    }

    /// The frames of a block: first, and one past the last.
    pub fn block_range(&self, block: usize) -> (u32, u32) {
        let base = (self.start / BLOCK_FRAMES + block as u32) * BLOCK_FRAMES;
        (base.max(self.start), (base + BLOCK_FRAMES).min(self.end()))
    }

    /// Page blocks.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    pub(crate) fn block_mut(&mut self, block: usize) -> &mut Block {
        &mut self.blocks[block]
    }

    /// Kind and order of the free run that starts at a frame.
    pub fn free_run_at(&self, frame: u32) -> Option<(Kind, u8)> {
        let t = *self.tag.get(self.at(frame))?;
        (t != 0).then(|| (if t >> 4 & 1 == 0 { Kind::Frame } else { Kind::Hole }, (t & 15) - 1))
    }

    /// The first free run that starts in `at..end`: its first frame, kind and order.
    fn next_free_run(&self, at: u32, end: u32) -> Option<(u32, Kind, u8)> {
        (at..end).find_map(|frame| self.free_run_at(frame).map(|(kind, order)| (frame, kind, order)))
    }

    /// The free run that contains a frame: its kind, first frame and order.
    pub fn free_run_around(&self, frame: u32) -> Option<(Kind, u32, u8)> {
        (0..=MAX_ORDER).find_map(|o| {
            let head = frame & !((1 << o) - 1);
            if head < self.start {
                return None;
            }
            let (kind, order) = self.free_run_at(head)?;
            (head + (1 << order) > frame).then_some((kind, head, order))
        })
    }

    /// Whether a run of at least this order is free, of any migrate type.
    pub fn has_run(&self, kind: Kind, order: u8) -> bool {
        self.unused(kind) >> order != 0 || self.areas[kind as usize].iter().any(|area| area.orders >> order != 0)
    }

    /// Free runs of exactly this order. Counts them one by one: for reports and scores, not for the fault path.
    pub fn runs(&self, kind: Kind, order: u8) -> usize {
        let unused = if order == MAX_ORDER { self.unused(kind) / BLOCK_FRAMES as usize } else { 0 };
        unused + MigrateType::ALL.into_iter().map(|mt| self.list(kind, mt, order).count()).sum::<usize>()
    }

    /// The free runs of a kind, type and order, the one freed last first.
    pub fn list(&self, kind: Kind, mt: MigrateType, order: u8) -> impl Iterator<Item = u32> + '_ {
        let head = self.areas[kind as usize][mt as usize].head[order as usize];
        let next = |at: &u32| Some(self.links[self.at(*at)].1).filter(|next| *next != NIL);
        core::iter::successors((head != NIL).then_some(head), next)
    }

    /// Notes who uses an allocated frame, for a later [`Zone::user`]. The note takes no memory, and is lost when the
    /// frame is freed.
    pub fn set_user(&mut self, frame: u32, user: u64) {
        let at = self.at(frame);
        debug_assert_eq!(self.tag[at], 0, "a free frame has no user");
        self.links[at] = (user as u32, (user >> 32) as u32);
    }

    /// What [`Zone::set_user`] noted last. It is a hint: anything, if nothing was noted since the frame was allocated.
    pub fn user(&self, frame: u32) -> u64 {
        let (low, high) = self.links[self.at(frame)];
        u64::from(low) | u64::from(high) << 32
    }

    /// Whether a run of `order` is free and taking it leaves at least `mark` frames free.
    pub fn watermark_ok(&self, kind: Kind, order: u8, mark: usize) -> bool {
        self.free_slots(kind) + 1 > mark + (1 << order) && self.has_run(kind, order)
    }

    /// How fragmented the free space of a kind is: the percentage of free frames that are not in runs of `order` or
    /// more. 0 means that every free frame is in such a run.
    pub fn fragmentation(&self, kind: Kind, order: u8) -> u32 {
        let free = self.free_slots(kind);
        let large: usize = (order..=MAX_ORDER).map(|o| self.runs(kind, o) << o).sum();
        ((free - large) * 100).checked_div(free).unwrap_or(0) as u32
    }

    /// Sets or clears the bits of a run in the map of free frames.
    fn mark(&mut self, frame: u32, order: u8, free: bool) {
        let word = (frame / 64 - self.start / 64) as usize;
        if order >= 6 {
            self.map[word..word + (1 << (order - 6))].fill(if free { u64::MAX } else { 0 });
        } else {
            let bits = ((1u64 << (1 << order)) - 1) << (frame % 64);
            if free { self.map[word] |= bits } else { self.map[word] &= !bits }
        }
    }

    /// Appends the free frames of a kind in `at..end` to `out`, until `out` has `most`. Returns where it stopped and
    /// how many looks it took: one for each 64 frames, and one for each free frame.
    pub fn free_frames(&self, kind: Kind, mut at: u32, end: u32, most: usize, out: &mut Vec<u32>) -> (u32, u64) {
        let mut looks = 0;
        while at < end && out.len() < most {
            looks += 1;
            let upto = (at / 64 * 64 + 64).min(end);
            let mut bits = self.map[(at / 64 - self.start / 64) as usize] >> (at % 64);
            if upto - at < 64 {
                bits &= (1 << (upto - at)) - 1;
            }
            while bits != 0 && out.len() < most {
                looks += 1;
                let frame = at + bits.trailing_zeros();
                bits &= bits - 1;
                if self.free_run_around(frame).is_some_and(|(k, ..)| k == kind) {
                    out.push(frame);
                }
            }
            at = if bits == 0 { upto } else { at + bits.trailing_zeros() };
        }
        (at, looks)
    }

    fn push(&mut self, kind: Kind, frame: u32, order: u8) {
        let mt = self.blocks[self.block_of(frame)].migrate_type();
        self.push_as(kind, frame, order, mt);
    }

    fn push_as(&mut self, kind: Kind, frame: u32, order: u8, mt: MigrateType) {
        let block = self.block_of(frame);
        let area = &mut self.areas[kind as usize][mt as usize];
        let next = core::mem::replace(&mut area.head[order as usize], frame);
        area.orders |= 1 << order;
        let at = self.at(frame);
        self.links[at] = (NIL, next);
        if next != NIL {
            let next = self.at(next);
            self.links[next].0 = frame;
        }
        self.tag[at] = tag(kind, mt, order);
        self.mark(frame, order, true);
        self.count[kind as usize] += 1 << order;
        self.blocks[block].free[kind as usize] += 1 << order;
    }

    fn unlink(&mut self, kind: Kind, frame: u32, order: u8) {
        let at = self.at(frame);
        let (prev, next) = self.links[at];
        let area = &mut self.areas[kind as usize][(self.tag[at] >> 5) as usize];
        if prev == NIL {
            area.head[order as usize] = next;
            if next == NIL {
                area.orders &= !(1 << order);
            }
        } else {
            self.links[(prev - self.start) as usize].1 = next;
        }
        if next != NIL {
            self.links[(next - self.start) as usize].0 = prev;
        }
        self.tag[at] = 0;
        self.mark(frame, order, false);
        self.count[kind as usize] -= 1 << order;
        let block = self.block_of(frame);
        self.blocks[block].free[kind as usize] -= 1 << order;
    }

    /// Takes a movable run of 2^order slots, or returns None if no run of that order is left.
    pub fn alloc(&mut self, kind: Kind, order: u8) -> Option<u32> {
        self.alloc_typed(kind, MigrateType::Movable, order)
    }

    /// Takes a run for a migrate type: from a block of that type, else from another type's.
    pub fn alloc_typed(&mut self, kind: Kind, mt: MigrateType, order: u8) -> Option<u32> {
        let fitting = |zone: &Self| zone.areas[kind as usize][mt as usize].orders >> order << order;
        if fitting(self) == 0 && kind == Kind::Frame {
            self.coalesce();
        }
        if fitting(self) == 0 && self.unused(kind) >> order != 0 {
            self.grow(kind);
        }
        let (fitting, area) = (fitting(self), &self.areas[kind as usize][mt as usize]);
        let found = if fitting != 0 {
            let found = fitting.trailing_zeros() as u8;
            Some((area.head[found as usize], found))
        } else {
            self.steal(kind, mt, order)
        };
        let (frame, found) = found?;
        Some(self.take(kind, frame, found, order))
    }

    /// Takes the first 2^order slots of a free run of order `found`.
    fn take(&mut self, kind: Kind, frame: u32, found: u8, order: u8) -> u32 {
        self.unlink(kind, frame, found);
        for o in (order..found).rev() {
            self.push(kind, frame + (1 << o), o);
        }
        frame
    }

    /// Finds a run in the blocks of other types: the largest, so that the next allocations find room beside it.
    fn steal(&mut self, kind: Kind, mt: MigrateType, order: u8) -> Option<(u32, u8)> {
        let areas = &self.areas[kind as usize];
        let from = mt
            .fallbacks()
            .into_iter()
            // `max_by_key` returns the last of equals, which must be the first choice.
            .rev()
            .filter(|other| areas[*other as usize].orders >> order != 0)
            .max_by_key(|other| areas[*other as usize].orders.ilog2())?;
        let found = areas[from as usize].orders.ilog2() as u8;
        let frame = areas[from as usize].head[found as usize];
        let block = self.block_of(frame);
        let (first, last) = self.block_range(block);
        // One unmovable page spoils the block anyway, so let the next ones go beside it. Movable and reclaimable pages
        // take a block over only if half of it is free.
        let free: u16 = self.blocks[block].free.iter().sum();
        if mt == MigrateType::Unmovable || u32::from(free) * 2 >= last - first {
            self.set_block_type(block, mt);
        }
        Some((frame, found))
    }

    /// Changes the migrate type of a block; its free runs change lists.
    pub fn set_block_type(&mut self, block: usize, mt: MigrateType) {
        if self.blocks[block].migrate_type() == mt {
            return;
        }
        let (mut at, end) = self.block_range(block);
        while let Some((run, kind, order)) = self.next_free_run(at, end) {
            self.unlink(kind, run, order);
            self.push_as(kind, run, order, mt);
            at = run + (1 << order);
        }
        self.blocks[block].set_migrate_type(mt);
    }

    /// Takes a run of `order`, or of the largest order below it that is free.
    pub fn alloc_up_to(&mut self, kind: Kind, order: u8) -> Option<(u32, u8)> {
        let has_run = |zone: &Self| zone.areas[kind as usize].iter().any(|area| area.orders >> order != 0);
        if !has_run(self) && kind == Kind::Frame {
            self.coalesce();
        }
        if !has_run(self) {
            self.grow(kind);
        }
        let orders = self.areas[kind as usize].iter().fold(0, |all, area| all | area.orders);
        let order = (orders.checked_ilog2()? as u8).min(order);
        self.alloc(kind, order).map(|frame| (frame, order))
    }

    /// Takes one particular frame out of its free run; false if the frame is not free, or is of another kind.
    pub fn take_frame(&mut self, kind: Kind, frame: u32) -> bool {
        while (self.end()..self.limit).contains(&frame) && self.grow(kind) {}
        let Some((_, head, order)) = self.free_run_around(frame).filter(|(k, ..)| *k == kind) else { return false };
        self.unlink(kind, head, order);
        // The rest of the run stays free: both sides of the frame, in halves.
        let mut base = head;
        for half in (0..order).rev() {
            let upper = base + (1 << half);
            if frame >= upper {
                self.push(kind, base, half);
                base = upper;
            } else {
                self.push(kind, upper, half);
            }
        }
        true
    }

    /// Frees a run of slots, which are of `kind` from now on.
    ///
    /// # Panics
    /// When the first slot is free already, or misaligned.
    pub fn free(&mut self, kind: Kind, frame: u32, order: u8) {
        if self.ready.takes(kind, order) {
            self.check_used(frame, order);
            self.push(kind, frame, order);
            self.note_ready(frame, order);
        } else {
            self.free_merged(kind, frame, order);
        }
    }

    /// As [`Zone::free`], but never keeps the run ready: compaction wants merged runs.
    pub(crate) fn free_merged(&mut self, kind: Kind, frame: u32, order: u8) {
        self.check_used(frame, order);
        self.merge(kind, frame, order);
    }

    fn check_used(&self, frame: u32, order: u8) {
        assert!(
            self.tag[self.at(frame)] == 0 && frame.is_multiple_of(1 << order),
            "slot {frame} freed twice or misaligned"
        );
    }

    /// Merges a run that is in no list with its free buddies, and lists the result.
    fn merge(&mut self, kind: Kind, frame: u32, order: u8) {
        if kind == Kind::Hole && self.blocks[self.block_of(frame)].is_closed() {
            return;
        }
        let wanted = tag(kind, self.blocks[self.block_of(frame)].migrate_type(), 0);
        let (mut frame, mut order) = (frame, order);
        while order < MAX_ORDER {
            let buddy = frame ^ (1 << order);
            if buddy < self.start || buddy >= self.end() || self.tag[self.at(buddy)] != wanted + order {
                break;
            }
            self.unlink(kind, buddy, order);
            frame &= !(1 << order);
            order += 1;
        }
        self.push(kind, frame, order);
    }

    /// Frees `n` consecutive slots as naturally aligned runs.
    ///
    /// # Panics
    /// As [`Zone::free`].
    pub fn free_run(&mut self, kind: Kind, frame: u32, n: usize) {
        let (mut at, mut left) = (frame, n as u32);
        while left > 0 {
            let order = at.trailing_zeros().min(left.ilog2()).min(u32::from(MAX_ORDER)) as u8;
            self.free(kind, at, order);
            at += 1 << order;
            left -= 1 << order;
        }
    }
}

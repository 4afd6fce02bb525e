//! A machine in miniature that ages: a zone of real memory under the real engine, and programs that live in it.
//!
//! Everything is the engine's own: the zone and its page blocks, the page table, the lists of pages, the pool, the codec,
//! compaction. A recorded trace says what a process does: which pages come and go, and which it asks for again. What it touches
//! besides is drawn from the seed, three of four from the pages that came last. Evicted pages are compressed into the pool, whose
//! pages lie in the zone like any other. When the pool reaches its bound, its oldest objects go to a disk (memory outside the
//! zone). Page tables are unmovable frames. Every page read back is compared with what was written.

use super::processes::Process;
use super::trace::Trace;
use super::world::{Mover, Owner, World};
use crate::data::Source;
use crate::size::PAGE;
use crate::workload::Random;
use std::collections::{HashMap, VecDeque};
use uzswap_mm::codec::{Algorithm, Compressor, Decompressor, Encoding};
use uzswap_mm::compaction::policy::Policy;
use uzswap_mm::compaction::{Compactor, Goal};
use uzswap_mm::lru::{Entry, Lru};
use uzswap_mm::pagetable::{PageTable, Pte, Tag};
use uzswap_mm::zone::{BLOCK_FRAMES, Kind, MAX_ORDER, MigrateType, Watermarks, Zone};
use uzswap_mm::zsmalloc::{Freed, Handle, ZsPool};

/// Bytes in front of an object: its page (8), its length (2), its encoding (1).
const HEAD: usize = 11;
/// Pages in a process's address space.
pub(super) const SPACE: u64 = 1 << 22;

/// Events, cumulative.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Pages compressed into the pool.
    pub zswpout: u64,
    /// Pages brought back from it.
    pub zswpin: u64,
    /// Pages written to the disk.
    pub zswpwb: u64,
    /// Pages read from it.
    pub pswpin: u64,
    /// Pages that came for the first time.
    pub allocated: u64,
    /// Pages that could not be had at once, and were given up.
    pub stalled: u64,
    /// Pages that did not hold what was written.
    pub wrong: u64,
}

/// The machine under one policy of compaction.
pub struct Machine<'a, P> {
    zone: Zone,
    /// Compaction and its counters.
    pub compactor: Compactor<P>,
    pub(super) world: World<'a>,
    pool: ZsPool,
    lru: Lru,
    stored: VecDeque<u64>,
    disk: HashMap<u64, Vec<u8>>,
    compressor: Compressor,
    decompressor: Decompressor,
    pub(super) traces: &'a [Trace],
    pub(super) processes: Vec<Process>,
    huge: Vec<u32>,
    /// Pages that all processes together are to have.
    pub(super) load: usize,
    births: u16,
    pub(super) random: Random,
    /// Counters of events.
    pub counts: Counts,
}

impl<'a, P: Policy> Machine<'a, P> {
    /// A machine with `frames` frames and nothing running. (The first block is whole: if frame 1 were the first frame, the
    /// scanners that begin there would empty a block in which no huge page fits.)
    pub fn new(frames: u32, policy: impl FnOnce() -> P, traces: &'a [Trace], source: &'a Source, seed: u64) -> Self {
        let mut zone = Zone::spanning(BLOCK_FRAMES, BLOCK_FRAMES + frames, Kind::Frame);
        let n = frames as usize;
        zone.watermarks = Watermarks { min: n / 128, low: n / 100, high: n / 64 };
        let compactor = Compactor::new(policy());
        let world = World {
            source,
            start: BLOCK_FRAMES,
            memory: vec![0; n * PAGE],
            owner: vec![Owner::Free; n],
            birth: vec![0; n],
            referenced: vec![false; n],
            pt: PageTable::new(),
            pool_frames: Vec::new(),
            versions: HashMap::new(),
        };
        Self {
            zone,
            compactor,
            world,
            pool: ZsPool::new(n * PAGE),
            lru: Lru::default(),
            stored: VecDeque::new(),
            disk: HashMap::new(),
            compressor: Compressor::new(Algorithm::Lz4),
            decompressor: Decompressor::new(),
            traces,
            processes: Vec::new(),
            huge: Vec::new(),
            load: 0,
            births: 0,
            random: Random::new(seed),
            counts: Counts::default(),
        }
    }

    /// The number of page blocks that lie wholly in the zone.
    pub fn blocks(&self) -> usize {
        let whole = |b: &usize| self.zone.block_range(*b).1 - self.zone.block_range(*b).0 == BLOCK_FRAMES;
        (0..self.zone.blocks().len()).filter(whole).count()
    }

    /// Bytes used and held by the pool.
    pub fn pool_bytes(&self) -> (usize, usize) {
        (self.pool.used_bytes(), self.pool.held_bytes())
    }

    // --- frames

    fn take(&mut self, mt: MigrateType, owner: Owner) -> Option<u32> {
        let frame = self.zone.alloc_typed(Kind::Frame, mt, 0)?;
        let at = self.world.at(frame);
        debug_assert_eq!(self.world.owner[at], Owner::Free);
        self.world.owner[at] = owner;
        Some(frame)
    }

    pub(super) fn give(&mut self, frame: u32) {
        let at = self.world.at(frame);
        self.world.owner[at] = Owner::Free;
        self.zone.free(Kind::Frame, frame, 0);
    }

    /// Takes a frame for the load. Reclaims in the background first if few are free, and leaves the reserve alone.
    pub(super) fn take_for_load(&mut self, mt: MigrateType, owner: Owner) -> Option<u32> {
        let marks = self.zone.watermarks;
        let free = self.zone.free_slots(Kind::Frame);
        if free <= marks.low {
            self.reclaim(marks.high - free);
            self.compactor.reclaim_rests(&mut self.zone);
        }
        if self.zone.free_slots(Kind::Frame) <= marks.min {
            self.counts.stalled += 1;
            return None;
        }
        self.take(mt, owner)
    }

    // --- reclaim

    /// Evicts up to about `want` pages; returns the frames that came free.
    fn reclaim(&mut self, want: usize) -> usize {
        let before = self.zone.free_slots(Kind::Frame);
        let goal = before + want;
        let mut tries = want * 4 + 1024;
        while self.zone.free_slots(Kind::Frame) < goal && tries > 0 {
            tries -= 1;
            // The pool may take a quarter of what is not in huge blocks.
            let room = (self.world.owner.len() - self.huge.len() * BLOCK_FRAMES as usize) / 4 * PAGE;
            if self.pool.held_bytes() > room && self.write_back() {
                continue;
            }
            let Some(e) = self.lru.pop_victim() else {
                if self.write_back() {
                    continue;
                }
                break;
            };
            let pte = self.world.pt.get(e.vpn());
            let at = if pte.tag() == Tag::Resident { self.world.at(pte.aux()) } else { continue };
            if u32::from(self.world.birth[at]) != e.stamp() {
                continue;
            }
            if std::mem::take(&mut self.world.referenced[at]) {
                self.lru.active.push(e);
            } else if !self.evict(e.vpn(), pte.aux()) {
                self.lru.inactive.push(e);
            }
        }
        self.compact_pool();
        self.zone.free_slots(Kind::Frame).saturating_sub(before)
    }

    fn evict(&mut self, vpn: u64, frame: u32) -> bool {
        let mut object = [0; HEAD + PAGE];
        let page = self.world.frame(frame);
        let (encoding, len) = match self.compressor.compress(page, &mut object[HEAD..HEAD + PAGE - PAGE / 16]) {
            Some(packed) => packed,
            None => {
                object[HEAD..].copy_from_slice(page);
                (Encoding::Raw, PAGE)
            }
        };
        object[..8].copy_from_slice(&vpn.to_le_bytes());
        object[8..10].copy_from_slice(&(len as u16).to_le_bytes());
        object[10] = encoding as u8;
        let held = self.pool.held_bytes();
        let Some(handle) = self.pool.alloc(HEAD + len) else { return false };
        if self.pool.held_bytes() > held && !self.back_slab(handle) {
            return false;
        }
        self.world.pool_bytes(handle.offset(), &mut object[..HEAD + len], true);
        self.world.pt.set(vpn, Pte::compressed(handle.raw(), 0, 0));
        self.stored.push_back(vpn);
        self.give(frame);
        self.counts.zswpout += 1;
        true
    }

    /// Puts frames behind a new slab; if there are not enough, gives up the object.
    fn back_slab(&mut self, handle: Handle) -> bool {
        let Freed { offset, len } = self.pool.slab_of(handle);
        let pages = offset / PAGE..(offset + len) / PAGE;
        if self.world.pool_frames.len() < pages.end {
            self.world.pool_frames.resize(pages.end, 0);
        }
        for page in pages.clone() {
            let Some(frame) = self.take(MigrateType::Movable, Owner::Pool(page as u32)) else {
                for page in pages.start..page {
                    self.give(self.world.pool_frames[page]);
                }
                let freed = self.pool.free(handle);
                assert!(freed.is_some(), "the slab was new");
                return false;
            };
            self.world.pool_frames[page] = frame;
        }
        true
    }

    fn free_object(&mut self, handle: u32) {
        if let Some(freed) = self.pool.free(Handle::from_raw(handle)) {
            self.release(freed);
        }
    }

    fn release(&mut self, freed: Freed) {
        for page in freed.offset / PAGE..(freed.offset + freed.len) / PAGE {
            self.give(self.world.pool_frames[page]);
        }
    }

    /// Writes the oldest object to the disk; returns false if there is none.
    fn write_back(&mut self) -> bool {
        while let Some(vpn) = self.stored.pop_front() {
            let pte = self.world.pt.get(vpn);
            if pte.tag() == Tag::Compressed {
                let object = self.object(pte.handle());
                self.free_object(pte.handle());
                self.world.pt.set(vpn, Pte::new(Tag::Zero, 0));
                self.disk.insert(vpn, object);
                self.counts.zswpwb += 1;
                return true;
            }
        }
        false
    }

    fn object(&mut self, handle: u32) -> Vec<u8> {
        let at = Handle::from_raw(handle).offset();
        let mut head = [0; HEAD];
        self.world.pool_bytes(at, &mut head, false);
        let mut object = vec![0; HEAD + u16::from_le_bytes([head[8], head[9]]) as usize];
        self.world.pool_bytes(at, &mut object, false);
        object
    }

    /// Compacts the pool a little if a sixteenth of it is waste, like the pager.
    fn compact_pool(&mut self) {
        let (used, held) = self.pool_bytes();
        if held - used > held / 16 {
            let mut mover = Mover { world: &mut self.world, freed: Vec::new() };
            self.pool.compact(64, &mut mover);
            for freed in mover.freed {
                self.release(freed);
            }
        }
    }

    // --- pages

    fn map(&mut self, vpn: u64, frame: u32) {
        self.births = self.births.wrapping_add(1);
        let at = self.world.at(frame);
        (self.world.birth[at], self.world.referenced[at]) = (self.births, false);
        self.world.pt.set(vpn, Pte::new(Tag::Resident, frame));
        self.lru.inactive.push(Entry::new(vpn, 0, u32::from(self.births)));
    }

    /// Brings a page for the first time.
    pub(super) fn allocate(&mut self, vpn: u64) -> bool {
        let Some(frame) = self.take_for_load(MigrateType::Movable, Owner::Page(vpn)) else { return false };
        self.world.write_page(vpn, frame);
        self.map(vpn, frame);
        self.counts.allocated += 1;
        true
    }

    /// Reads or writes a page.
    pub(super) fn touch(&mut self, vpn: u64, write: bool) {
        let pte = self.world.pt.get(vpn);
        let frame = match pte.tag() {
            Tag::Resident => pte.aux(),
            Tag::Compressed | Tag::Zero => {
                let Some(frame) = self.take_for_load(MigrateType::Movable, Owner::Page(vpn)) else { return };
                self.bring(vpn, frame);
                frame
            }
            _ => return,
        };
        let at = self.world.at(frame);
        self.world.referenced[at] = true;
        if write {
            let version = self.world.versions.entry(vpn).or_insert(0);
            *version += 1;
            let version = version.to_le_bytes();
            self.world.frame(frame)[8..12].copy_from_slice(&version);
        }
    }

    fn bring(&mut self, vpn: u64, frame: u32) {
        // Making room may have written it back meanwhile.
        let pte = self.world.pt.get(vpn);
        let object = if pte.tag() == Tag::Compressed {
            self.counts.zswpin += 1;
            let object = self.object(pte.handle());
            self.free_object(pte.handle());
            object
        } else {
            self.counts.pswpin += 1;
            self.disk.remove(&vpn).unwrap_or_default()
        };
        let encoding = object.get(10).and_then(|e| Encoding::try_from(*e).ok());
        let at = self.world.at(frame) * PAGE;
        let page = &mut self.world.memory[at..at + PAGE];
        let decoded = encoding.is_some_and(|e| self.decompressor.decompress(e, &object[HEAD..], page).is_ok());
        if !decoded || !self.world.is_right(vpn, frame) {
            self.counts.wrong += 1;
        }
        self.map(vpn, frame);
    }

    /// Drops a page.
    pub(super) fn drop_page(&mut self, vpn: u64) {
        let pte = self.world.pt.get(vpn);
        match pte.tag() {
            Tag::Resident => {
                if !self.world.is_right(vpn, pte.aux()) {
                    self.counts.wrong += 1;
                }
                self.give(pte.aux());
            }
            Tag::Compressed => self.free_object(pte.handle()),
            Tag::Zero => drop(self.disk.remove(&vpn)),
            _ => {}
        }
        self.world.pt.set(vpn, Pte::NONE);
        self.world.versions.remove(&vpn);
    }

    /// Drops what the pool keeps half empty.
    pub fn drop_caches(&mut self) {
        while self.pool.compactable_bytes() > 0 {
            let held = self.pool.held_bytes();
            let mut mover = Mover { world: &mut self.world, freed: Vec::new() };
            self.pool.compact(1 << 20, &mut mover);
            for freed in mover.freed {
                self.release(freed);
            }
            if self.pool.held_bytes() == held {
                break;
            }
        }
    }

    // --- huge blocks

    /// Tries to allocate a block of 2 MiB: compaction, reclaim, compaction again.
    pub fn allocate_huge(&mut self) -> bool {
        if self.take_huge() {
            return true;
        }
        if self.compact_and_take() {
            return true;
        }
        // Twice what is wanted, as in the kernel, so that compaction has targets to move to.
        self.reclaim(2 * BLOCK_FRAMES as usize);
        self.take_huge() || self.compact_and_take()
    }

    fn take_huge(&mut self) -> bool {
        if !self.zone.watermark_ok(Kind::Frame, MAX_ORDER, self.zone.watermarks.min) {
            return false;
        }
        let Some(frame) = self.zone.alloc(Kind::Frame, MAX_ORDER) else { return false };
        let at = self.world.at(frame);
        self.world.owner[at..at + BLOCK_FRAMES as usize].fill(Owner::Huge);
        self.huge.push(frame);
        true
    }

    fn compact_and_take(&mut self) -> bool {
        let goal = Goal { kind: Kind::Frame, order: MAX_ORDER, score: None, budget: u64::MAX };
        self.compactor.direct(&mut self.zone, goal, &mut self.world);
        let taken = self.take_huge();
        if taken {
            self.compactor.allocated(MAX_ORDER);
        }
        taken
    }

    /// Frees all huge blocks.
    pub fn free_huge(&mut self) {
        for frame in std::mem::take(&mut self.huge) {
            let at = self.world.at(frame);
            self.world.owner[at..at + BLOCK_FRAMES as usize].fill(Owner::Free);
            self.zone.free(Kind::Frame, frame, MAX_ORDER);
        }
    }

    /// The number of blocks that a perfect packer could have now, without evicting anything: pages that cannot move keep their
    /// blocks; those that can move fill these up first, and then as few others as they need.
    pub fn packers_bound(&self) -> usize {
        let (mut movable, mut room, mut kept) = (0usize, 0usize, 0usize);
        let per_block = BLOCK_FRAMES as usize;
        for block in 0..self.zone.blocks().len() {
            let (from, to) = self.zone.block_range(block);
            let owners = &self.world.owner[self.world.at(from)..self.world.at(from) + (to - from) as usize];
            let fixed = owners.iter().filter(|o| matches!(o, Owner::Table | Owner::Huge)).count();
            movable += owners.iter().filter(|o| matches!(o, Owner::Page(_) | Owner::Pool(_))).count();
            if fixed > 0 || owners.len() < per_block {
                kept += usize::from(owners.len() == per_block);
                room += owners.len() - fixed;
            }
        }
        self.blocks().saturating_sub(kept).saturating_sub(movable.saturating_sub(room).div_ceil(per_block))
    }

    /// Checks that every frame is accounted for exactly once; returns the number of those that are not.
    pub fn lost_frames(&self) -> usize {
        let in_use = self.world.owner.iter().filter(|o| **o != Owner::Free).count();
        (in_use + self.zone.free_slots(Kind::Frame)).abs_diff(self.world.owner.len())
    }
}

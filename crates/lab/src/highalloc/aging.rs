//! A machine in miniature that ages: a zone of real memory under the real engine, and programs that live in it.
//!
//! Everything is the engine's own: the zone and its page blocks, the page table, the lists of pages, the pool, the codec,
//! compaction. What a process does comes from a recorded trace (which pages come and go, and which it asks for
//! again); what it touches beside that is drawn from the seed, three of four from the pages that came last. Evicted pages are compressed into the pool, whose
//! pages lie in the zone like any other; where the pool is at its bound the oldest objects go to a disk (memory outside
//! the zone). Page tables are unmovable frames. Every page read back is compared with what was written.

use super::trace::Trace;
use crate::data::Source;
use crate::size::PAGE;
use std::collections::{BTreeMap, HashMap, VecDeque};
use uzswap_mm::codec::{Algorithm, Compressor, Decompressor, Encoding};
use uzswap_mm::compaction::policy::Policy;
use uzswap_mm::compaction::{Compactor, Goal, Migrate};
use uzswap_mm::lru::{Entry, Lru};
use uzswap_mm::pagetable::{PageTable, Pte, Tag};
use uzswap_mm::zone::{BLOCK_FRAMES, Kind, MAX_ORDER, MigrateType, Watermarks, Zone};
use uzswap_mm::zsmalloc::{Freed, Handle, Relocate, ZsPool};

/// Bytes in front of an object: its page (8), its length (2), its encoding (1).
const HEAD: usize = 11;
/// Pages of address space of a process.
const SPACE: u64 = 1 << 22;

/// splitmix64.
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// What a frame is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Free,
    Page(u64),
    Pool(u32),
    Table,
    Huge,
}

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
    /// Pages that could not be had at once and were given up.
    pub stalled: u64,
    /// Pages that did not hold what was written.
    pub wrong: u64,
}

/// A running program.
struct Process {
    pid: u64,
    trace: usize,
    step: usize,
    /// Its pages, in the order they came, and where each is in that order.
    live: Vec<u32>,
    place: HashMap<u32, usize>,
    /// Frames of its tables, by the part of the address space they are for.
    tables: BTreeMap<u64, u32>,
    /// Whether it stays when it has done what it does.
    stays: bool,
}

/// Everything but the zone, so that compaction can move what the zone's frames hold.
struct World<'a> {
    source: &'a Source,
    start: u32,
    memory: Vec<u8>,
    owner: Vec<Owner>,
    /// When the page in a frame came, and whether it was touched since.
    birth: Vec<u16>,
    referenced: Vec<bool>,
    pt: PageTable,
    pool_frames: Vec<u32>,
    versions: HashMap<u64, u32>,
}

impl World<'_> {
    fn at(&self, frame: u32) -> usize {
        (frame - self.start) as usize
    }
    fn frame(&mut self, frame: u32) -> &mut [u8] {
        let at = self.at(frame) * PAGE;
        &mut self.memory[at..at + PAGE]
    }

    /// Reads (or with `write` writes) bytes of the pool, wherever its pages are.
    fn pool_bytes(&mut self, offset: usize, bytes: &mut [u8], write: bool) {
        let mut done = 0;
        while done < bytes.len() {
            let (page, into) = ((offset + done) / PAGE, (offset + done) % PAGE);
            let n = (PAGE - into).min(bytes.len() - done);
            let frame = self.pool_frames[page];
            let there = &mut self.frame(frame)[into..into + n];
            if write {
                there.copy_from_slice(&bytes[done..done + n]);
            } else {
                bytes[done..done + n].copy_from_slice(there);
            }
            done += n;
        }
    }

    fn content(&self, vpn: u64) -> &[u8] {
        let mut random = Random(vpn);
        self.source.page(random.below(self.source.pages()))
    }

    /// Fills a frame with a page as it must be.
    fn write_page(&mut self, vpn: u64, frame: u32) {
        let version = self.versions.get(&vpn).copied().unwrap_or(0);
        let at = self.at(frame) * PAGE;
        let index = Random(vpn).below(self.source.pages());
        let page = &mut self.memory[at..at + PAGE];
        page.copy_from_slice(self.source.page(index));
        page[..8].copy_from_slice(&vpn.to_le_bytes());
        page[8..12].copy_from_slice(&version.to_le_bytes());
    }

    /// Whether a frame holds a page as it must be.
    fn is_right(&self, vpn: u64, frame: u32) -> bool {
        let version = self.versions.get(&vpn).copied().unwrap_or(0);
        let at = self.at(frame) * PAGE;
        let page = &self.memory[at..at + PAGE];
        page[..8] == vpn.to_le_bytes() && page[8..12] == version.to_le_bytes() && page[12..] == self.content(vpn)[12..]
    }
}

impl Migrate for World<'_> {
    fn isolate(&mut self, _: &Zone, frame: u32) -> bool {
        matches!(self.owner[self.at(frame)], Owner::Page(_) | Owner::Pool(_))
    }

    fn extent(&self, frame: u32) -> u32 {
        if self.owner[self.at(frame)] == Owner::Huge { BLOCK_FRAMES } else { 1 }
    }

    fn migrate(&mut self, _: &mut Zone, from: u32, to: u32) -> bool {
        let (src, dst) = (self.at(from), self.at(to));
        self.memory.copy_within(src * PAGE..(src + 1) * PAGE, dst * PAGE);
        match self.owner[src] {
            Owner::Page(vpn) => self.pt.set(vpn, Pte::new(Tag::Resident, to)),
            Owner::Pool(page) => self.pool_frames[page as usize] = to,
            Owner::Free | Owner::Table | Owner::Huge => return false,
        }
        self.owner[dst] = std::mem::replace(&mut self.owner[src], Owner::Free);
        (self.birth[dst], self.referenced[dst]) = (self.birth[src], self.referenced[src]);
        true
    }

    fn putback(&mut self, _frame: u32) {}
}

/// Moves objects of the pool: the page table is told the new handle.
struct Mover<'a, 'b> {
    world: &'a mut World<'b>,
    freed: Vec<Freed>,
}

impl Relocate for Mover<'_, '_> {
    fn relocate(&mut self, from: Handle, to: Handle, len: usize) -> bool {
        let mut bytes = vec![0; len];
        self.world.pool_bytes(from.offset(), &mut bytes, false);
        let vpn = u64::from_le_bytes(std::array::from_fn(|i| bytes[i]));
        let pte = self.world.pt.get(vpn);
        if pte.tag() != Tag::Compressed || pte.handle() != from.raw() {
            return false;
        }
        self.world.pool_bytes(to.offset(), &mut bytes, true);
        self.world.pt.set(vpn, Pte::compressed(to.raw(), 0, 0));
        true
    }

    fn freed(&mut self, pages: Freed) {
        self.freed.push(pages);
    }
}

/// The machine under one policy of compaction.
pub struct Machine<'a, P> {
    zone: Zone,
    /// Compaction and its counters.
    pub compactor: Compactor<P>,
    world: World<'a>,
    pool: ZsPool,
    lru: Lru,
    stored: VecDeque<u64>,
    disk: HashMap<u64, Vec<u8>>,
    compressor: Compressor,
    decompressor: Decompressor,
    traces: &'a [Trace],
    processes: Vec<Process>,
    huge: Vec<u32>,
    /// Pages that processes are to have together.
    load: usize,
    births: u16,
    random: Random,
    /// What happened.
    pub counts: Counts,
}

impl<'a, P: Policy> Machine<'a, P> {
    /// A machine with `frames` frames and nothing running. (The first block is whole: with frame 1 as the first one the
    /// scanners that begin there would empty a block that no huge page fits.)
    pub fn new(frames: u32, policy: impl FnOnce() -> P, traces: &'a [Trace], source: &'a Source, seed: u64) -> Self {
        let mut zone = Zone::spanning(BLOCK_FRAMES, BLOCK_FRAMES + frames, Kind::Frame);
        let n = frames as usize;
        zone.watermarks = Watermarks { min: n / 128, low: n / 100, high: n / 64 };
        let compactor = Compactor::new(&zone, policy());
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
            random: Random(seed),
            counts: Counts::default(),
        }
    }

    /// Page blocks that lie wholly in the zone.
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

    fn give(&mut self, frame: u32) {
        let at = self.world.at(frame);
        self.world.owner[at] = Owner::Free;
        self.zone.free(Kind::Frame, frame, 0);
    }

    /// A frame for the load: background reclaim has run where there were few, and the reserve is left alone.
    fn take_for_load(&mut self, mt: MigrateType, owner: Owner) -> Option<u32> {
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

    /// Puts frames behind a new slab; without enough of them the object is given up again.
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

    /// Writes the oldest object to the disk; false when there is none.
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

    /// As the pager: a little, where a sixteenth of the pool is waste.
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

    /// A page comes for the first time.
    fn allocate(&mut self, vpn: u64) -> bool {
        let Some(frame) = self.take_for_load(MigrateType::Movable, Owner::Page(vpn)) else { return false };
        self.world.write_page(vpn, frame);
        self.map(vpn, frame);
        self.counts.allocated += 1;
        true
    }

    /// A page is read or written.
    fn touch(&mut self, vpn: u64, write: bool) {
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
        // (Making room may have written it back meanwhile.)
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

    /// A page goes.
    fn drop_page(&mut self, vpn: u64) {
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

    // --- processes

    /// Starts a program; with `stays` it does not end.
    fn start(&mut self, trace: usize, stays: bool) {
        let (live, place) = (Vec::new(), HashMap::new());
        // The lowest number nobody has: the page table has room for 8192.
        let pid = (1..).find(|pid| self.processes.iter().all(|p| p.pid != *pid)).expect("there are many");
        self.processes.push(Process { pid, trace, step: 0, live, place, tables: BTreeMap::new(), stays });
    }

    /// One step of a process; false when it has none left.
    fn step(&mut self, i: usize) -> bool {
        let traces = self.traces;
        let Some(step) = traces[self.processes[i].trace].steps.get(self.processes[i].step) else { return false };
        for page in step.went.iter().flat_map(|(first, n)| *first..first + n) {
            self.page_went(i, page);
        }
        for page in step.came.iter().flat_map(|(first, n)| *first..first + n) {
            self.page_came(i, page);
        }
        let base = self.processes[i].pid * SPACE;
        for page in step.touched.iter().flat_map(|(first, n)| *first..first + n) {
            self.touch(base + u64::from(page), page % 3 == 0);
        }
        self.processes[i].step += 1;
        true
    }

    /// Lets every process do a step and touch pages; who is done makes place for the next program.
    pub fn tick(&mut self, references: usize) {
        // As `make -j`: another one starts while there is less than there should be.
        if self.live() < self.load {
            let trace = self.random.below(self.traces.len());
            self.start(trace, false);
        }
        for i in 0..self.processes.len() {
            if !self.step(i) && !self.processes[i].stays {
                let trace = self.random.below(self.traces.len());
                let mut done = self.processes.swap_remove(i);
                self.exit(&mut done);
                self.start(trace, false);
                let last = self.processes.len() - 1;
                self.processes.swap(i, last);
            }
            let (base, n) = (self.processes[i].pid * SPACE, self.processes[i].live.len());
            // What stays is mostly idle.
            let times = if self.processes[i].stays { references / 16 } else { references };
            for _ in 0..if n > 0 { times } else { 0 } {
                let recent = (n / 8).max(1);
                let at =
                    if self.random.below(4) > 0 { n - 1 - self.random.below(recent) } else { self.random.below(n) };
                let write = self.random.below(3) == 0;
                self.touch(base + u64::from(self.processes[i].live[at]), write);
            }
        }
    }

    fn page_came(&mut self, i: usize, page: u32) {
        let (base, leaf) = (self.processes[i].pid * SPACE, u64::from(page) / 512);
        if !self.processes[i].tables.contains_key(&leaf) {
            let Some(table) = self.take_for_load(MigrateType::Unmovable, Owner::Table) else { return };
            self.processes[i].tables.insert(leaf, table);
        }
        if self.allocate(base + u64::from(page)) {
            let process = &mut self.processes[i];
            process.place.insert(page, process.live.len());
            process.live.push(page);
        }
    }

    fn page_went(&mut self, i: usize, page: u32) {
        let process = &mut self.processes[i];
        let Some(at) = process.place.remove(&page) else { return };
        process.live.swap_remove(at);
        if let Some(moved) = process.live.get(at) {
            process.place.insert(*moved, at);
        }
        let vpn = process.pid * SPACE + u64::from(page);
        self.drop_page(vpn);
    }

    fn exit(&mut self, process: &mut Process) {
        for page in process.live.drain(..) {
            self.drop_page(process.pid * SPACE + u64::from(page));
        }
        for table in std::mem::take(&mut process.tables).into_values() {
            self.give(table);
        }
    }

    /// Starts programs that stay, up to a tenth of the machine: they do what they do and remain.
    pub fn start_residents(&mut self) {
        let (mut wanted, mut next) = (0, 0);
        while wanted < self.world.owner.len() / 10 {
            self.start(next % self.traces.len(), true);
            wanted += self.traces[next % self.traces.len()].peak / 2;
            next += 1;
        }
        let mut more = true;
        while std::mem::take(&mut more) {
            for i in 0..self.processes.len() {
                more |= self.step(i);
            }
        }
    }

    /// Starts programs until all together have `times` the machine's size, each somewhere in what it does: the same ones
    /// for the same seed.
    pub fn start_load(&mut self, times: f64, seed: u64) {
        self.random = Random(seed);
        self.load = (self.world.owner.len() as f64 * times) as usize;
        while self.live() < self.load {
            let trace = self.random.below(self.traces.len());
            self.start(trace, false);
            let (me, steps) = (self.processes.len() - 1, self.traces[trace].steps.len());
            for _ in 0..self.random.below(steps) {
                self.step(me);
            }
        }
    }

    /// Pages that processes have, resident or not.
    fn live(&self) -> usize {
        self.processes.iter().map(|p| p.live.len()).sum()
    }

    /// Ends what does not stay.
    pub fn stop_load(&mut self) {
        self.load = 0;
        let (stay, end): (Vec<_>, Vec<_>) = std::mem::take(&mut self.processes).into_iter().partition(|p| p.stays);
        self.processes = stay;
        for mut process in end {
            self.exit(&mut process);
        }
    }

    /// Drops caches: what the pool keeps half empty.
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
        // As the kernel: twice what is wanted, so that compaction has where to move to.
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
            self.compactor.allocated(MAX_ORDER, true);
        }
        taken
    }

    /// Gives all huge blocks back.
    pub fn free_huge(&mut self) {
        for frame in std::mem::take(&mut self.huge) {
            let at = self.world.at(frame);
            self.world.owner[at..at + BLOCK_FRAMES as usize].fill(Owner::Free);
            self.zone.free(Kind::Frame, frame, MAX_ORDER);
        }
    }

    /// Blocks that a perfect packer could have now, without evicting anything: pages that cannot move keep their blocks,
    /// those that can move fill these up first and then as few others as they need.
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

    /// Checks that every frame is accounted for once; the number of frames that are not.
    pub fn lost_frames(&self) -> usize {
        let in_use = self.world.owner.iter().filter(|o| **o != Owner::Free).count();
        (in_use + self.zone.free_slots(Kind::Frame)).abs_diff(self.world.owner.len())
    }
}

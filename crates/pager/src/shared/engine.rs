//! The state of a shared region: the engine's tables, over a memory object instead of frames.
//!
//! Page numbers are those of the object, from 0. A page is [`Tag::None`] (the object has a hole, which reads as zeros),
//! [`Tag::Resident`] (the object has it), [`Tag::Busy`] (the object has it, write-protected, and a thread compresses it; aux: the
//! batch), [`Tag::Compressed`], [`Tag::Zero`] or [`Tag::Poisoned`]. One lock protects everything.

use super::SharedOptions;
use super::evict::Batch;
use super::gate::Gate;
use super::mapping::{Mapping, Pages};
use super::pins::Pins;
use super::removes::Removes;
use super::store::Store;
use crate::frames::arena::PAGE;
use crate::page_state::mapfile::{Kind, MapFile};
use crate::pool::object::{self, Header};
use crate::state::BLOCK;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;
use uzswap_mm::codec::{Algorithm, Decompressor};
use uzswap_mm::lru::{Entry, Lru, next_stamp};
use uzswap_mm::pagemap::{PRESENT, PageState, SWAPPED, Tier, WRITE_PROTECTED, ZERO};
use uzswap_mm::pagetable::{PageTable, Pte, Tag, next_eviction};
use uzswap_sys::memfd;

/// Counts since the region was made.
#[derive(Clone, Copy, Default)]
pub(super) struct Counts {
    pub faults: u64,
    pub near_faults: u64,
    pub major_faults: u64,
    pub wp_faults: u64,
    pub swpout: u64,
    pub swpout_clean: u64,
    pub direct_reclaims: u64,
    pub over_limit: u64,
    pub poisoned: u64,
}

/// The client that is told of writes, and the pages it has yet to be told of.
pub(super) struct Watch {
    /// The client's connection.
    pub connection: u64,
    /// Pages it protected in every mapping, those made later included.
    pub everywhere: Pages,
    /// Pages written to and not reported yet.
    pub queue: VecDeque<u64>,
}

/// A mapping whose process was about to fork, kept for the child's mapping.
pub(super) struct Fork {
    /// The token that the child presents.
    pub token: u64,
    /// Whether its soft-dirty bits are meaningful.
    pub tracking: bool,
    /// Its markers, a byte a page, without write-protection. A removal before the child asks changes them here, too.
    pub markers: Vec<u8>,
}

/// All tables of a shared region.
pub(super) struct Engine {
    /// Shared with threads that read pages on their way out.
    pub object: Arc<OwnedFd>,
    pub pages: u64,
    pub options: SharedOptions,
    pub pt: PageTable,
    pub lru: Lru,
    pub store: Store,
    /// The published state of the pages.
    pub map: MapFile,
    pub mappings: Vec<Mapping>,
    pub pins: Pins,
    pub removes: Removes,
    pub next_id: u64,
    pub watch: Option<Watch>,
    /// Forks whose child has not asked yet, oldest first.
    pub forks: VecDeque<Fork>,
    pub resident: usize,
    pub swapped: usize,
    pub zeros: usize,
    pub stamp: u32,
    pub evictions: u32,
    pub batches: u32,
    pub decompressor: Decompressor,
    pub scratch: Vec<u8>,
    /// Buffers for reclaim with the lock held.
    pub direct: Option<Box<Batch>>,
    /// A block decompressed recently: its handle and pages.
    pub decoded: (Option<u32>, Vec<u8>),
    pub counts: Counts,
    /// Rounds of ageing so far; and when each of the last ones began.
    pub round: u32,
    pub rounds: VecDeque<(u32, Instant)>,
    /// For each page the round in which it was last known to be touched.
    pub touched: Vec<u32>,
}

/// Largest region (bytes): half of a process's addresses.
const MOST_BYTES: usize = 1 << 46;

impl Engine {
    /// The engine of a region of `size` bytes that nobody has mapped yet. Fails for want of memory or descriptors.
    pub fn new(size: usize, options: SharedOptions) -> io::Result<Self> {
        let pages = size.div_ceil(PAGE) as u64;
        let bytes = pages as usize * PAGE;
        // Refuse here what memory cannot hold: when the tables themselves, of zeros, cannot be had, the process ends.
        if size > MOST_BYTES || Vec::<u32>::new().try_reserve_exact(pages as usize / 4 * 5).is_err() {
            let text = format!("a region of {size} bytes is too large: there is no memory for the tables of its pages");
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, text));
        }
        // One page more than the region: see `gate`, and `WATCH_AGE` in `wire`.
        let object = memfd::create(c"uzswap-shared", (bytes + PAGE) as u64)?;
        memfd::seal(&object, memfd::SEAL_SIZE)?;
        let os = io::Error::from_raw_os_error;
        Ok(Self {
            // If the kernel does not allow a gate everything else works, and callers can see that.
            removes: Removes::new(Gate::new(&object, bytes as u64).ok()),
            object: Arc::new(object),
            pages,
            // Room for headers and hashes of objects, and for partly filled slabs.
            store: Store::new(bytes + bytes / 4 + (16 << 20)).map_err(os)?,
            map: MapFile::create(Kind::Shared, 0, pages, options.limit as u64).map_err(os)?,
            options,
            pt: PageTable::new(),
            lru: Lru::default(),
            mappings: Vec::new(),
            pins: Pins::new(pages),
            next_id: 1,
            watch: None,
            forks: VecDeque::new(),
            resident: 0,
            swapped: 0,
            zeros: 0,
            stamp: 0,
            evictions: 0,
            batches: 0,
            decompressor: Decompressor::new(),
            scratch: vec![0; BLOCK],
            direct: None,
            decoded: (None, vec![0; 4 * PAGE]),
            counts: Counts::default(),
            round: 0,
            rounds: VecDeque::from([(0, Instant::now())]),
            touched: vec![0; pages as usize],
        })
    }

    /// The algorithm that compresses pages.
    pub fn algorithm(&self) -> Algorithm {
        self.options.compressor.algorithm().expect("`SharedRegion::create` takes no other level")
    }

    /// Bytes that count against the limit.
    pub fn charged(&self) -> usize {
        self.resident * PAGE + self.store.held()
    }

    /// Changes the limit; callers ensure at least [`LEAST_LIMIT`](super::LEAST_LIMIT) bytes.
    pub fn set_limit(&mut self, bytes: usize) {
        self.options.limit = bytes;
        self.map.set_limit(bytes as u64);
    }

    /// Bytes kept free below the limit for faults that come while pages leave.
    pub fn margin(&self) -> usize {
        (self.options.limit / 32).clamp(1 << 20, 16 << 20)
    }

    /// Whether the pool is so large that clean copies and a fast codec cost more than they gain.
    pub fn crowded(&self) -> bool {
        self.store.held() > self.options.limit / 2
    }

    /// Whether so little is in memory that taking more would only make everybody fault. What does not compress into the limit
    /// then exceeds it, which is counted.
    pub fn at_floor(&self) -> bool {
        self.resident * PAGE < self.options.limit / 8 && self.crowded()
    }

    /// Sets the entry of a page and publishes its state.
    pub fn set(&mut self, page: u64, pte: Pte) {
        let state = match pte.tag() {
            Tag::None => 0,
            Tag::Resident | Tag::Busy => PRESENT,
            Tag::Zero => SWAPPED | ZERO,
            Tag::Compressed => SWAPPED | self.tier(pte.handle()).bits(),
            _ => SWAPPED | Tier::Lost.bits(),
        };
        self.pt.set(page, pte);
        let hide = if self.options.markers { 0 } else { SWAPPED };
        let state = if state & hide != 0 { 0 } else { state };
        self.map.writer().publish(page, PageState(state));
    }

    fn tier(&self, handle: u32) -> Tier {
        object::tier(Header::read(self.store.object(handle)).encoding)
    }

    /// Drops a reference to an object.
    pub fn release(&mut self, handle: u32, index: usize) {
        if self.store.release(handle, index) && self.decoded.0 == Some(handle) {
            self.decoded.0 = None;
        }
    }

    /// Drops the kept copy of a page's entry.
    pub fn drop_copy(&mut self, page: u64, pte: Pte) {
        if let Some(handle) = pte.copy() {
            let index = self.store.index(page, handle);
            self.release(handle, index);
        }
    }

    /// Makes a page untouched, whatever it was. The caller takes care of the object's page.
    pub fn forget(&mut self, page: u64) {
        let pte = self.pt.get(page);
        match pte.tag() {
            Tag::None | Tag::Poisoned => {}
            Tag::Zero => self.zeros -= 1,
            Tag::Compressed => {
                self.swapped -= 1;
                self.release(pte.handle(), pte.index());
            }
            _ => self.resident -= 1,
        }
        self.drop_copy(page, pte);
        self.set(page, Pte::NONE);
    }

    /// Lists `n` pages from `page` on, which the object now holds, as resident; `copy_of` gives their kept copies.
    pub fn list_resident(&mut self, page: u64, n: usize, active: bool, copy_of: impl Fn(usize) -> Option<u32>) {
        let (mut at, end) = (0, n as u64);
        while at < end {
            let order = ((page + at).trailing_zeros().min(4)).min((end - at).ilog2()) as u8;
            self.stamp = next_stamp(self.stamp);
            for i in at..at + (1 << order) {
                let pte = Pte::new(Tag::Resident, self.stamp);
                self.set(page + i, copy_of(i as usize).map_or(pte, |handle| pte.with_copy(handle)));
                self.touched[(page + i) as usize] = self.round;
            }
            let entry = Entry::new(page + at, order, self.stamp);
            if active {
                self.lru.active.push(entry)
            } else {
                self.lru.inactive.push(entry)
            }
            at += 1 << order;
        }
        // Pages that leave on request, or are removed, leave list entries behind.
        self.tidy_lists();
    }

    pub fn count_eviction(&mut self) {
        self.evictions = next_eviction(self.evictions, 1);
    }

    pub fn mapping(&mut self, id: u64) -> Option<&mut Mapping> {
        self.mappings.iter_mut().find(|m| m.id == id)
    }

    /// Ends a mapping.
    pub fn detach(&mut self, id: u64) {
        self.mappings.retain(|m| m.id != id);
        self.end_doubts_of(id);
    }

    /// Drops a range's contents: for every mapping, those made later included, it is as if never touched.
    ///
    /// # Errors
    /// `EBUSY`: there is a pin. `EAGAIN`: it is done, except that a page still is an error where it was one; try again.
    pub fn remove(&mut self, from: u64, to: u64) -> io::Result<()> {
        if from == to {
            return Ok(());
        }
        if (from..to).any(|p| self.pins.has(p)) {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        // This comes before doubts end: a process that must be waited for may begin one.
        let all = self.end_errors(from, to);
        self.end_doubts(from, to);
        // The object's pages go first: a process that faults meanwhile waits for our lock.
        memfd::punch(&self.object, from * PAGE as u64, (to - from) * PAGE as u64)?;
        self.map.writer().begin();
        self.emptied(from, to);
        self.map.writer().end();
        if all { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EAGAIN)) }
    }

    /// Books that the object has nothing of `[from, to)`, and drops pages of it that were out. (It is part of a change of the
    /// page map if one is open; otherwise each page is a change of its own.)
    pub fn emptied(&mut self, from: u64, to: u64) {
        self.emptied_but(from, to, 0);
    }

    /// The same, but keeps the bits `keep` of the markers.
    pub fn emptied_but(&mut self, from: u64, to: u64, keep: u8) {
        if from == to {
            return;
        }
        let mut at = from;
        while let Some(page) = self.pt.next_used(at).filter(|p| *p < to) {
            self.forget(page);
            at = page + 1;
        }
        for m in &mut self.mappings {
            for page in from..to {
                m.mapped.put(page, false);
                m.seen.put(page, false);
                let PageState(marker) = m.markers.map().get(page);
                if marker & !keep != 0 {
                    m.markers.writer().set(page, PageState(marker & keep));
                }
            }
            // Threads that waited to write to a protected page go on, and find it unprotected.
            m.wake(from, to);
        }
        for f in &mut self.forks {
            f.markers[from as usize..to as usize].iter_mut().for_each(|byte| *byte &= keep);
        }
        if let Some(watch) = self.watch.as_mut().filter(|_| keep & WRITE_PROTECTED == 0) {
            (from..to).for_each(|p| watch.everywhere.put(p, false));
            watch.queue.retain(|p| !(from..to).contains(p));
        }
    }

    pub fn metadata_bytes(&self) -> usize {
        self.pt.metadata_bytes()
            + self.lru.active.metadata_bytes()
            + self.lru.inactive.metadata_bytes()
            + self.store.metadata_bytes()
            + self.map.metadata_bytes()
            + self.pins.metadata_bytes()
            + self.removes.metadata_bytes()
            + self.touched.len() * 4
            + self.mappings.iter().map(Mapping::metadata_bytes).sum::<usize>()
    }
}

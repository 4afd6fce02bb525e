//! Pages out shared pages; the head of `shared` has the protocol.
//!
//! A batch passes through three steps: [`Engine::begin`] (with the lock: choose pages, mark them Busy, write-protect them
//! everywhere), [`Batch::compress`] (without the lock), and [`Engine::finish`] (with the lock: store, punch, mark). Pages touched
//! meanwhile are no longer Busy with the batch's number, and stay.

use super::engine::Engine;
use crate::frames::arena::PAGE;
use crate::pool::object::{self, Header};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use uzswap_mm::codec::{Algorithm, Compressor, Encoding};
use uzswap_mm::pagetable::{HINT_RANDOM, HINT_WRITTEN, Pte, Tag};
use uzswap_sys::{blockio, memfd};

pub(super) const BATCH_PAGES: usize = 64;
/// Batch numbers have 25 bits, as they must fit a table entry.
const NUMBER_MASK: u32 = (1 << 25) - 1;

struct Page {
    number: u64,
    /// The hash of its kept copy.
    copy: Option<u128>,
    /// It is read at random, and so not compressed together with its neighbours.
    alone: bool,
}

enum Outcome {
    Zero,
    Clean,
    Packed { encoding: Encoding, at: usize, len: usize },
}

/// Pages that leave as one object.
struct Unit {
    /// Index of the first page in the batch.
    first: usize,
    order: u8,
    outcome: Outcome,
}

/// Pages on their way out. The buffers are allocated once.
pub(super) struct Batch {
    number: u32,
    pages: Vec<Page>,
    bytes: Vec<u8>,
    hashes: Vec<u128>,
    units: Vec<Unit>,
    out: Vec<u8>,
    compressor: Compressor,
    dense: Option<Compressor>,
    use_dense: bool,
    object: Arc<OwnedFd>,
}

impl Batch {
    /// An empty batch, which reads its pages from the object. (It opens no descriptor of its own: that might be the last one
    /// available, and pages must leave all the same.)
    pub fn new(object: Arc<OwnedFd>, algorithm: Algorithm) -> Self {
        let bytes = BATCH_PAGES * PAGE;
        Self {
            number: 0,
            pages: Vec::with_capacity(BATCH_PAGES),
            bytes: vec![0; bytes],
            hashes: Vec::with_capacity(BATCH_PAGES),
            units: Vec::with_capacity(BATCH_PAGES),
            out: vec![0; bytes],
            compressor: Compressor::new(algorithm),
            dense: (algorithm == Algorithm::Lz4).then(|| Compressor::new(Algorithm::Zstd(1))),
            use_dense: false,
            object,
        }
    }

    /// Reads the pages and determines the outcome for each. Needs no lock, as nobody can write to them.
    ///
    /// # Errors
    /// The kernel's, if the object cannot be read. The batch must still be finished, and then does nothing.
    pub fn compress(&mut self) -> io::Result<()> {
        self.units.clear();
        self.hashes.clear();
        let mut i = 0;
        while i < self.pages.len() {
            let n = self.pages[i..].iter().zip(self.pages[i].number..).take_while(|(p, at)| p.number == *at).count();
            let bytes = &mut self.bytes[i * PAGE..(i + n) * PAGE];
            blockio::read_full(self.object.as_raw_fd(), bytes, self.pages[i].number * PAGE as u64)
                .map_err(io::Error::from_raw_os_error)?;
            i += n;
        }
        self.hashes.extend(self.bytes[..self.pages.len() * PAGE].chunks(PAGE).map(object::hash));
        let (mut i, mut at) = (0, 0);
        while i < self.pages.len() {
            let order = if self.four_together(i) { 2 } else { 0 };
            let outcome = self.settle(i, order, &mut at);
            self.units.push(Unit { first: i, order, outcome });
            i += 1 << order;
        }
        Ok(())
    }

    fn is_clean(&self, i: usize) -> bool {
        self.pages[i].copy == Some(self.hashes[i])
    }

    fn four_together(&self, i: usize) -> bool {
        let first = self.pages[i].number;
        first.is_multiple_of(4)
            && i + 4 <= self.pages.len()
            && (0..4).all(|k| {
                let page = &self.pages[i + k];
                page.number == first + k as u64 && !page.alone && !self.is_clean(i + k)
            })
    }

    fn settle(&mut self, i: usize, order: u8, at: &mut usize) -> Outcome {
        let bytes = &self.bytes[i * PAGE..(i + (1 << order)) * PAGE];
        if order == 0 && self.is_clean(i) {
            return Outcome::Clean;
        }
        if bytes.chunks(PAGE).all(object::is_zero) {
            return Outcome::Zero;
        }
        let compressor = match &mut self.dense {
            Some(dense) if self.use_dense => dense,
            _ => &mut self.compressor,
        };
        let room = bytes.len() - bytes.len() / 16;
        let (encoding, len) = compressor.compress(bytes, &mut self.out[*at..*at + room]).unwrap_or_else(|| {
            self.out[*at..*at + bytes.len()].copy_from_slice(bytes);
            (Encoding::Raw, bytes.len())
        });
        *at += len;
        Outcome::Packed { encoding, at: *at - len, len }
    }
}

impl Engine {
    /// Takes up to `want` pages off the lists.
    fn victims(&mut self, want: usize) -> Vec<u64> {
        let mut pages = Vec::with_capacity(want + 16);
        while pages.len() < want {
            let Some(entry) = self.lru.pop_victim() else { break };
            for page in entry.vpn()..entry.vpn() + (1 << entry.order()) {
                let pte = self.pt.get(page);
                if pte.tag() == Tag::Resident && pte.aux() == entry.stamp() {
                    pages.push(page);
                }
            }
        }
        pages.sort_unstable();
        pages
    }

    /// Fills a batch with the coldest pages; returns how many there were.
    pub fn begin_coldest(&mut self, batch: &mut Batch) -> usize {
        let mut pages = self.victims(BATCH_PAGES - 15);
        let n = pages.len();
        self.begin(batch, &mut pages);
        n
    }

    /// Fills a batch with those of `pages` that are resident, as many as fit, and removes them from `pages` (which is sorted).
    pub fn begin(&mut self, batch: &mut Batch, pages: &mut Vec<u64>) {
        self.batches = (self.batches + 1) & NUMBER_MASK;
        batch.number = self.batches;
        batch.use_dense = self.crowded();
        batch.pages.clear();
        let (mut taken, mut settled) = (0, 0);
        for page in pages.iter().copied() {
            if batch.pages.len() == BATCH_PAGES {
                break;
            }
            taken += 1;
            // A page written to after it was removed must be known as such here.
            settled = self.settle_beyond(page, settled);
            let pte = self.pt.get(page);
            if pte.tag() != Tag::Resident {
                continue;
            }
            if self.pins.has(page) || self.removes.is_witness(page) {
                // It is listed again when the pin, or the doubt, ends.
                continue;
            }
            let copy = pte.copy().map(|handle| {
                let index = self.store.index(page, handle);
                object::stored_hash(self.store.object(handle), index)
            });
            let alone = self.pt.hints(page) & HINT_RANDOM != 0;
            let busy = Pte::new(Tag::Busy, batch.number);
            self.pt.set(page, pte.copy().map_or(busy, |handle| busy.with_copy(handle)));
            batch.pages.push(Page { number: page, copy, alone });
        }
        pages.drain(..taken);
        let mut i = 0;
        while i < batch.pages.len() {
            let first = batch.pages[i].number;
            let n = batch.pages[i..].iter().zip(first..).take_while(|(p, at)| p.number == *at).count();
            for k in 0..self.mappings.len() {
                if self.protect_mapped(k, first, first + n as u64).is_err() {
                    // It can still be written to there: the run stays.
                    (first..first + n as u64).for_each(|p| self.rescue(p));
                    break;
                }
            }
            i += n;
        }
    }

    /// Write-protects the pages of `[from, to)` that have a PTE in mapping `k`. (If its process is gone nobody writes.)
    ///
    /// # Errors
    /// `EAGAIN`: its process must run first. The kernel's: only a part was done.
    pub fn protect_mapped(&mut self, k: usize, from: u64, to: u64) -> Result<(), i32> {
        match self.ask(k, |m| m.protect_mapped(from, to)) {
            Err(libc::ESRCH) => Ok(()),
            other => other,
        }
    }

    /// Makes a page that is on its way out stay. Its write-protection ends at the next write.
    pub fn rescue(&mut self, page: u64) {
        let pte = self.pt.get(page);
        if pte.tag() == Tag::Busy {
            self.list_resident(page, 1, true, |_| pte.copy());
        }
    }

    fn is_busy_with(&self, page: u64, batch: u32) -> bool {
        let pte = self.pt.get(page);
        pte.tag() == Tag::Busy && pte.aux() == batch
    }

    /// Stores a batch and removes its pages from the object and every mapping; returns how many left.
    pub fn finish(&mut self, batch: &mut Batch) -> usize {
        let mut left = 0;
        self.map.writer().begin();
        for u in core::mem::take(&mut batch.units) {
            left += self.finish_unit(batch, &u);
        }
        self.map.writer().end();
        // Pages removed while they were on their way out must not be kept.
        batch.pages.iter().fold(0, |settled, page| self.settle_beyond(page.number, settled));
        // Pages that could not be stored or read stay.
        for page in core::mem::take(&mut batch.pages) {
            if self.is_busy_with(page.number, batch.number) {
                self.rescue(page.number);
            }
        }
        left
    }

    fn finish_unit(&mut self, batch: &Batch, u: &Unit) -> usize {
        let (first, n) = (batch.pages[u.first].number, 1usize << u.order);
        let live = (0..n).filter(|i| self.is_busy_with(first + *i as u64, batch.number)).fold(0u16, |l, i| l | 1 << i);
        if live == 0 {
            return 0;
        }
        let handle = match u.outcome {
            Outcome::Zero | Outcome::Clean => None,
            Outcome::Packed { encoding, at, len } => {
                let head = Header { len, encoding, order: u.order, vpn: first, flags: 0 };
                match self.store.put(head, live, &batch.hashes[u.first..u.first + n], &batch.out[at..at + len]) {
                    None => return 0,
                    handle => handle,
                }
            }
        };
        let mut left = 0;
        for i in (0..n).filter(|i| live & (1 << i) != 0) {
            let page = first + i as u64;
            if memfd::punch(&self.object, page * PAGE as u64, PAGE as u64).is_err() {
                if let Some(handle) = handle {
                    self.release(handle, i);
                }
                continue;
            }
            self.left(page, &u.outcome, handle, i);
            left += 1;
        }
        left
    }

    /// Books that a page has left the object.
    fn left(&mut self, page: u64, outcome: &Outcome, handle: Option<u32>, index: usize) {
        let old = self.pt.get(page);
        self.count_eviction();
        match (outcome, handle, old.copy()) {
            (Outcome::Clean, _, Some(copy)) => {
                let index = self.store.index(page, copy);
                self.set(page, Pte::compressed(copy, index, self.evictions));
                self.swapped += 1;
                self.counts.swpout_clean += 1;
            }
            (_, Some(handle), copy) => {
                if copy.is_some() {
                    self.pt.hint(page, HINT_WRITTEN, 0);
                    self.drop_copy(page, old);
                }
                self.set(page, Pte::compressed(handle, index, self.evictions));
                self.swapped += 1;
                self.counts.swpout += 1;
            }
            _ => {
                self.drop_copy(page, old);
                self.set(page, Pte::new(Tag::Zero, 0));
                self.zeros += 1;
            }
        }
        self.resident -= 1;
        for m in &mut self.mappings {
            m.mapped.put(page, false);
            m.seen.put(page, false);
        }
    }

    /// For a fault that finds no room: pages out with the lock held until one more batch would fit.
    pub fn direct_reclaim(&mut self, batch: &mut Batch) {
        self.counts.direct_reclaims += 1;
        for _ in 0..64 {
            if self.charged() + BATCH_PAGES * PAGE <= self.options.limit {
                return;
            }
            if self.at_floor() || self.begin_coldest(batch) == 0 {
                break;
            }
            let _ = batch.compress();
            self.finish(batch);
        }
        if self.charged() > self.options.limit {
            self.counts.over_limit += 1;
        }
    }

    /// Pages out with the lock held if `pages` more would not fit.
    pub fn make_room(&mut self, pages: u64) {
        if self.charged() + pages as usize * PAGE * 2 > self.options.limit {
            let mut batch = self.take_direct();
            self.direct_reclaim(&mut batch);
            self.direct = Some(batch);
        }
    }

    /// Pages out one page if possible, with the lock held.
    pub fn evict_now(&mut self, page: u64, batch: &mut Batch) {
        self.begin(batch, &mut vec![page]);
        let _ = batch.compress();
        self.finish(batch);
    }

    /// Takes the buffers for reclaim with the lock held; the caller puts them back.
    pub fn take_direct(&mut self) -> Box<Batch> {
        self.direct.take().unwrap_or_else(|| Box::new(self.new_batch()))
    }

    /// A batch of this region's pages.
    pub fn new_batch(&self) -> Batch {
        Batch::new(self.object.clone(), self.algorithm())
    }

    /// Drops stale list entries, whose pages have moved on, when they outnumber the others.
    pub fn tidy_lists(&mut self) {
        let Self { lru, pt, resident, .. } = self;
        lru.tidy(*resident, |page, stamp| pt.get(page).is_listed_as(stamp));
    }
}

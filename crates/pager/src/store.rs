//! Compressing what is staged: staged to stored, in batches.
//!
//! Compression runs without the lock on pages marked Busy; a fault on one copies the frame (which must not move
//! meanwhile) and the compressed result is thrown away when the batch is committed. A unit that cannot be stored goes
//! back to the staged list: nothing is lost.

use crate::arena::{Layout, PAGE};
use crate::inject::Site;
use crate::object::{self, Header, REFERENCED};
use crate::pager::Pager;
use crate::state::{BLOCK, State};
use core::sync::atomic::Ordering::*;
use uzswap_mm::codec::{Algorithm, Compressor, Encoding};
use uzswap_mm::lru::Entry;
use uzswap_mm::pagetable::{HINT_RANDOM, HINT_WRITTEN, Pte, Tag};
use uzswap_mm::trace::{self, Record};
use uzswap_mm::zone::Kind;

/// Pages compressed per batch.
pub const BATCH_PAGES: usize = 64;

/// One unit of compression: `1 << order` pages in consecutive slots.
struct Unit {
    vpn: u64,
    order: u8,
    slot: u32,
    outcome: Outcome,
}

enum Outcome {
    Pending,
    Zero,
    /// Compressed to `at..at + len` of the batch's output.
    Packed {
        encoding: Encoding,
        at: usize,
        len: usize,
    },
}

/// A batch on its way through compression; its buffers are allocated once.
pub struct Batch {
    units: Vec<Unit>,
    out: Vec<u8>,
    hashes: Vec<u128>,
    compressor: Compressor,
    /// zstd, made when the pool first grows large.
    dense: Option<Compressor>,
    use_dense: bool,
}

impl Batch {
    /// Buffers for one thread.
    pub fn new(compressor: Compressor) -> Self {
        let bytes = BATCH_PAGES * PAGE + BLOCK;
        Self {
            units: Vec::with_capacity(BATCH_PAGES + 16),
            out: vec![0; bytes + bytes / 8],
            hashes: Vec::with_capacity(BATCH_PAGES + 16),
            compressor,
            dense: None,
            use_dense: false,
        }
    }
}

impl Pager {
    /// Takes staged folios beyond `keep` pages: clean ones are done at once, the others become a batch.
    pub fn prepare(&self, s: &mut State, batch: &mut Batch, want: usize, keep: usize) -> bool {
        batch.use_dense = s.algorithm == Algorithm::Lz4 && self.crowded(s);
        if batch.use_dense && batch.dense.is_none() {
            batch.dense = Some(Compressor::new(Algorithm::Zstd(1)));
        }
        let mut taken = 0;
        while taken < want && s.idle_staged() > keep {
            let Some(e) = s.lru.staged.pop() else { break };
            let end = e.vpn() + (1 << e.order());
            let mut at = e.vpn();
            while at < end {
                let pte = s.pt.get(at);
                if pte.tag() != Tag::Staged {
                    at += 1;
                    continue;
                }
                taken += 1;
                if self.is_clean(s, at, pte) {
                    let handle = pte.copy().expect("clean means a copy");
                    let index = s.copy_index(at, handle);
                    s.pt.set(at, Pte::compressed(handle, index, s.evictions));
                    // Back in the pool's list, so to speak: it has its chance again.
                    object::set_flags(s.object(handle), REFERENCED, 0);
                    s.zone.free(Kind::Frame, pte.aux(), 0);
                    s.staged -= 1;
                    s.swapped += 1;
                    self.counters().swpout_clean.fetch_add(1, Relaxed);
                    s.note_pages(trace::Kind::Clean, at, 1);
                    at += 1;
                    continue;
                }
                let order = self.unit_order(s, at, end, pte);
                for i in 0..1u64 << order {
                    let p = s.pt.get(at + i);
                    if let Some(handle) = p.copy() {
                        let index = s.copy_index(at + i, handle);
                        s.release(handle, index);
                        s.pt.hint(at, HINT_WRITTEN, 0);
                        s.note_pages(trace::Kind::Drop, at + i, 1);
                    }
                    s.pt.set(at + i, Pte::new(Tag::Busy, p.aux()));
                }
                s.busy += 1 << order;
                taken += (1 << order) - 1;
                batch.units.push(Unit { vpn: at, order, slot: pte.aux(), outcome: Outcome::Pending });
                at += 1 << order;
            }
        }
        taken > 0
    }

    fn is_clean(&self, s: &State, vpn: u64, pte: Pte) -> bool {
        let Some(handle) = pte.copy() else { return false };
        let index = s.copy_index(vpn, handle);
        // SAFETY: a staged page's slot holds its frame, and the lock is held.
        let page = unsafe { self.layout.frames(pte.aux(), 1) };
        object::hash(page) == object::stored_hash(s.object(handle), index)
    }

    /// The unit of compression at `vpn`: 16 KiB where four pages are staged side by side and the block is not read at
    /// random, else 4 KiB.
    fn unit_order(&self, s: &State, vpn: u64, end: u64, first: Pte) -> u8 {
        if !vpn.is_multiple_of(4) || vpn + 4 > end || s.pt.hints(vpn) & HINT_RANDOM != 0 {
            return 0;
        }
        let together = (1..4).all(|i| {
            let p = s.pt.get(vpn + i);
            p.tag() == Tag::Staged && p.aux() == first.aux() + i as u32 && !self.is_clean(s, vpn + i, p)
        });
        if together { 2 } else { 0 }
    }

    /// Stores a compressed batch; returns the pages that left.
    pub fn commit(&self, s: &mut State, batch: &mut Batch) -> usize {
        let c = self.counters();
        let (mut left, mut hash_at) = (0, 0);
        for u in batch.units.drain(..) {
            let pages = 1usize << u.order;
            let hashes = &batch.hashes[hash_at..hash_at + pages];
            hash_at += pages;
            let mut live = 0u16;
            for i in 0..pages {
                let pte = s.pt.get(u.vpn + i as u64);
                if pte.tag() == Tag::Busy && pte.aux() == u.slot + i as u32 {
                    live |= 1 << i;
                }
            }
            let moved = if s.moved_busy.is_empty() { 0 } else { elsewhere(s, &u) };
            let stored = match u.outcome {
                _ if live == 0 => None,
                Outcome::Zero => Some(None),
                Outcome::Packed { encoding, at, len } => {
                    let head = Header { len, encoding, order: u.order, live, vpn: u.vpn, flags: REFERENCED };
                    let set = |place: &mut [u8]| {
                        hashes.iter().enumerate().for_each(|(i, h)| object::set_hash(place, i, *h));
                    };
                    let room = self.may_zswap(s, len);
                    let refused = !room || self.inject(Site::Pool).is_some();
                    let handle = if refused { None } else { s.put_object(head, set, &batch.out[at..at + len]) };
                    if let Some(handle) = handle {
                        self.damage(s, handle.raw());
                    } else {
                        c.reject_alloc_fail.fetch_add(u64::from(room), Relaxed);
                        self.count_swap_fail(pages as u64);
                        back_to_staged(s, &u, live, moved);
                        if !room {
                            self.back_to_program(s, &u, live);
                        }
                        continue;
                    }
                    c.zswpout.fetch_add(u64::from(live.count_ones()), Relaxed);
                    note_store(s, &u, len, live);
                    if matches!(encoding, Encoding::Raw) {
                        c.stored_incompressible_pages.fetch_add(pages as u64, Relaxed);
                    }
                    Some(handle.map(|h| h.raw()))
                }
                Outcome::Pending => unreachable!("compress() settles every unit"),
            };
            for i in (0..pages).filter(|i| live & (1 << i) != 0) {
                let at = u.vpn + i as u64;
                s.end_busy(1);
                match stored {
                    Some(Some(handle)) => {
                        s.pt.set(at, Pte::compressed(handle, i, s.evictions));
                        s.swapped += 1;
                    }
                    _ => {
                        s.pt.set(at, Pte::new(Tag::Zero, 0));
                        s.zeros += 1;
                        c.swpout_zero.fetch_add(1, Relaxed);
                        s.note_pages(trace::Kind::Zero, at, 1);
                    }
                }
            }
            if let Some(Some(handle)) = stored {
                s.entered_pool(u.vpn, handle);
            }
            if moved == 0 {
                s.zone.free_run(Kind::Frame, u.slot, pages);
            } else {
                (0..pages as u32)
                    .filter(|i| moved & (1 << i) == 0)
                    .for_each(|i| s.zone.free(Kind::Frame, u.slot + i, 0));
            }
            left += pages;
        }
        batch.hashes.clear();
        self.poke_writer(s);
        left
    }

    /// Where a test wants it, flips a bit of an object's hashes or bytes as failing memory would.
    fn damage(&self, s: &State, handle: u32) {
        if let Some(bits) = self.inject(Site::Damage) {
            let body = &mut s.object(handle)[object::HEADER_BYTES..];
            let at = (bits >> 8) as usize % body.len();
            body[at] ^= 1 << (bits % 8);
        }
    }

    /// Gives pages that were just put back to staged, and for which there will be no room, to the program again: others,
    /// that need none, get their turn.
    fn back_to_program(&self, s: &mut State, u: &Unit, live: u16) {
        for i in (0..1u32 << u.order).filter(|i| live & (1 << i) != 0) {
            // (Where it cannot be now, it stays staged.)
            let _ = self.bring_staged(s, u.vpn + u64::from(i), 1);
        }
    }
}

/// What could not be stored is staged again; what the program took back left its frame free.
fn back_to_staged(s: &mut State, u: &Unit, live: u16, moved: u16) {
    for i in 0..1u32 << u.order {
        let at = u.vpn + u64::from(i);
        if live & (1 << i) != 0 {
            s.busy -= 1;
            s.pt.set(at, Pte::new(Tag::Staged, u.slot + i));
            s.lru.staged.push(Entry::new(at, 0, 0));
        } else if moved & (1 << i) == 0 {
            s.zone.free(Kind::Frame, u.slot + i, 0);
        }
    }
}

/// The pages of a unit that mremap has taken elsewhere since: they are staged there, in the frames they have.
#[cold]
fn elsewhere(s: &mut State, u: &Unit) -> u16 {
    let mut moved = 0;
    for i in 0..1u32 << u.order {
        let Some(k) = s.moved_busy.iter().position(|(slot, _)| *slot == u.slot + i) else { continue };
        let (slot, vpn) = s.moved_busy.swap_remove(k);
        let pte = s.pt.get(vpn);
        // (Moved back again it is where the unit has it, and is stored as if nothing had happened.)
        if vpn != u.vpn + u64::from(i) && pte.tag() == Tag::Busy && pte.aux() == slot {
            s.busy -= 1;
            s.pt.set(vpn, Pte::new(Tag::Staged, slot));
            s.lru.staged.push(Entry::new(vpn, 0, 0));
            moved |= 1 << i;
        }
    }
    moved
}

fn note_store(s: &State, u: &Unit, len: usize, live: u16) {
    if s.recorder.is_none() {
        return;
    }
    s.note(Record::of_object(trace::Kind::Store, u.vpn, u.order, len));
    // Pages that the program took back, or dropped, while they were compressed.
    for i in (0..1u64 << u.order).filter(|i| live & (1 << i) == 0) {
        s.note_pages(trace::Kind::Drop, u.vpn + i, 1);
    }
}

impl Batch {
    /// Compresses every unit; needs no lock.
    pub fn compress(&mut self, layout: &Layout) {
        let mut at = 0;
        for u in &mut self.units {
            let pages = 1usize << u.order;
            // SAFETY: Busy pages' frames neither move nor change until commit.
            let bytes = unsafe { layout.frames(u.slot, pages) };
            self.hashes.extend(bytes.chunks(PAGE).map(object::hash));
            if bytes.chunks(PAGE).all(object::is_zero) {
                u.outcome = Outcome::Zero;
                continue;
            }
            let room = bytes.len() - bytes.len() / 16;
            let compressor = match &mut self.dense {
                Some(dense) if self.use_dense => dense,
                _ => &mut self.compressor,
            };
            let (encoding, len) = match compressor.compress(bytes, &mut self.out[at..at + room]) {
                Some(packed) => packed,
                None => {
                    self.out[at..at + bytes.len()].copy_from_slice(bytes);
                    (Encoding::Raw, bytes.len())
                }
            };
            u.outcome = Outcome::Packed { encoding, at, len };
            at += len;
        }
    }
}

//! A batch of staged folios on its way through compression: cut into units, with the buffers for the results.
//!
//! ```text
//! folios:  │ folio            │ folio │ folio            │     in the order they were taken
//! units:   │ unit  │ unit     │ unit  │ unit │ …         │     a folio's lie side by side
//! hashes:  │ # # # # # # # #  │ #     │ # # # # …        │     one for each page, from a unit's `page_at`
//! out:     │ bytes │ bytes    │ bytes │ …                │     from a unit's `out_at`: where is settled as it is compressed
//! ```
//! A batch belongs to one thread. It fills the batch with the pager's lock held (`store`), has the units compressed without it
//! (`compress`: helpers touch the batch's buffers then, and nothing else), and empties it with the lock again. Between batches
//! only memory is left: buffers grow to what was once needed, with the lock held, like everything that allocates. What only large
//! folios needed goes back to the kernel when none came for a while, and everything when the thread has nothing to do
//! ([`Batch::is_stored`], [`Batch::rest`]): otherwise the program, or other programs, would lack that memory.
//!
//! While a unit is in a batch its pages are Busy in their slots, which nobody frees. What became of single pages meanwhile is
//! looked up only when the unit is stored.

use crate::frames::arena::{self, PAGE};
use crate::group::folio::USUAL_UNIT;
use crate::pool::compress::Tools;
use crate::state::BLOCK;
use core::ops::Range;
use uzswap_mm::codec::{Compressor, Decompressor, Encoding};
use uzswap_mm::pageset::PageSet;
use uzswap_mm::zswap::{self, Packed};
use uzswap_sys::crew::Posted;

/// Pages compressed per batch, except for a folio that is larger.
pub const BATCH_PAGES: usize = 64;
/// Bytes that the results of such a batch take at most.
const USUAL_ROOM: usize = BATCH_PAGES * PAGE + BLOCK;
/// For how many batches room above the usual is kept: a program that fills memory makes runs of large folios, and the room must
/// not be taken anew for each.
const ROOM_KEPT: u32 = 32;

/// A folio in a batch.
pub(crate) struct Folio {
    pub(crate) vpn: u64,
    /// Its order; 0 when it is not whole.
    pub(crate) order: u8,
    /// Its pages in the batch.
    pub(crate) pages: usize,
    /// Its units in the batch.
    pub(crate) units: Range<usize>,
    /// Whether it must not enter the pool, and goes to the swap file whole.
    pub(crate) whole: bool,
}

/// One unit of compression: `1 << order` pages in consecutive slots.
pub(crate) struct Unit {
    pub(crate) vpn: u64,
    pub(crate) order: u8,
    pub(crate) slot: u32,
    /// Number of pages before it in the batch: where its hashes are.
    pub(crate) page_at: usize,
    /// Where its output is.
    pub(crate) out_at: usize,
    /// The set of its pages that mremap moved elsewhere while they were compressed.
    pub(crate) moved: PageSet,
    pub(crate) outcome: Outcome,
}

impl Unit {
    /// The unit itself, or a part of it from `page` on, if it did not compress.
    fn part(&self, page: u32, order: u8) -> Unit {
        let (at, outcome) = (page as usize, self.outcome);
        let outcome =
            if order == self.order { outcome } else { Outcome::Packed { encoding: Encoding::Raw, len: PAGE << order } };
        Unit {
            vpn: self.vpn + u64::from(page),
            order,
            slot: self.slot + page,
            page_at: self.page_at + at,
            out_at: self.out_at + PAGE * at,
            moved: PageSet::default(),
            outcome,
        }
    }
}

/// The result of compressing a unit.
#[derive(Clone, Copy)]
pub(crate) enum Outcome {
    /// It is not compressed yet.
    Pending,
    /// Nothing but zeros.
    Zero,
    /// Compressed to that many bytes.
    Packed { encoding: Encoding, len: usize },
    /// The compressed bytes do not decompress to what was compressed.
    Wrong,
}

/// A batch; its buffers grow to what was once needed.
pub struct Batch {
    pub(crate) folios: Vec<Folio>,
    pub(crate) units: Vec<Unit>,
    pub(crate) out: Vec<u8>,
    /// For how many more batches room above the usual is kept.
    room_kept: u32,
    /// Whether any of `out` may be in memory.
    touched: bool,
    pub(crate) hashes: Vec<u128>,
    pub(crate) tools: Tools,
    pub(crate) use_dense: bool,
    /// Whether helpers take part in compressing it.
    pub(crate) shared: bool,
    /// The work that helpers have.
    pub(crate) posted: Option<Posted>,
    /// The order of the largest units that there is room for: the usual one, until larger ones come.
    pub(crate) largest: u8,
    /// For verification, made when that is first asked for, with a buffer for the largest unit.
    pub(crate) verifier: Option<(Decompressor, Vec<u8>)>,
    /// Scratch of `commit`.
    pub(crate) plan: Vec<(zswap::Unit, Packed)>,
    pub(crate) places: Vec<Option<u32>>,
}

impl Batch {
    /// An empty batch for one thread.
    pub fn new(compressor: Compressor) -> Self {
        Self {
            folios: Vec::with_capacity(BATCH_PAGES + 16),
            units: Vec::with_capacity(BATCH_PAGES + 16),
            out: vec![0; USUAL_ROOM],
            room_kept: 0,
            touched: false,
            hashes: vec![0; BATCH_PAGES + 16],
            tools: Tools::new(compressor),
            use_dense: false,
            shared: false,
            posted: None,
            largest: USUAL_UNIT,
            verifier: None,
            plan: Vec::with_capacity(BATCH_PAGES + 16),
            places: Vec::with_capacity(BATCH_PAGES + 16),
        }
    }

    /// A compressor, dense or as configured, and room for two blocks of an order. Only between batches.
    pub fn block_room(&mut self, dense: bool, order: u8) -> (&mut Compressor, &mut [u8]) {
        self.make_room_for(order);
        let bytes = PAGE << order.max(USUAL_UNIT);
        self.make_room(2 * bytes);
        let compressor = if dense { self.tools.dense() } else { &mut self.tools.warm };
        (compressor, &mut self.out[..2 * bytes])
    }

    /// Makes `out` hold `bytes`, and no more than that where it grows.
    ///
    /// The story: it doubled as vectors do, and stayed. 640 KiB and 1.3 MiB that two batches once needed for folios of 512 KiB
    /// were a fortieth of GNU sort's 64 MiB, and it had to fault for them: 60,000 pages were decompressed where 42,000 are now.
    pub(crate) fn make_room(&mut self, bytes: usize) {
        self.touched = true;
        if bytes > USUAL_ROOM {
            self.room_kept = ROOM_KEPT;
            self.out.reserve_exact(bytes.saturating_sub(self.out.len()));
            self.out.resize(bytes.max(self.out.len()), 0);
        }
    }

    /// Empties the batch after it was stored. Room that was once needed goes back when it was not needed for some time.
    pub(crate) fn is_stored(&mut self) {
        self.units.clear();
        if self.room_kept > 0 {
            self.room_kept -= 1;
            if self.room_kept == 0 {
                arena::vacate(&mut self.out[USUAL_ROOM..]);
            }
        }
    }

    /// Gives the buffer back to the kernel; between batches, when no other is to be expected soon.
    pub(crate) fn rest(&mut self) {
        if core::mem::take(&mut self.touched) {
            arena::vacate(&mut self.out);
        }
    }

    /// Whether [`Batch::rest`] has anything to give back.
    pub(crate) fn may_rest(&self) -> bool {
        self.touched
    }

    /// Makes the batch's tools take units of an order.
    pub(crate) fn make_room_for(&mut self, order: u8) {
        if order > self.largest {
            self.largest = order;
            self.tools.reserve(order);
            self.verifier.iter_mut().for_each(|(_, plain)| plain.resize(PAGE << order, 0));
        }
    }

    /// Makes compression decompress each result and compare it.
    pub(crate) fn verify(&mut self) {
        self.verifier.get_or_insert_with(|| (Decompressor::new(), vec![0; PAGE << self.largest]));
    }

    /// Cuts the units of more than 64 KiB that did not compress: raw ones are no better for being large, and need large places.
    pub(crate) fn cut_raw(&mut self) {
        let is_raw = |u: &Unit| matches!(u.outcome, Outcome::Packed { encoding: Encoding::Raw, .. });
        if self.largest == USUAL_UNIT || !self.units.iter().any(|u| u.order > USUAL_UNIT && is_raw(u)) {
            return;
        }
        let whole = core::mem::take(&mut self.units);
        for f in &mut self.folios {
            let first = self.units.len();
            for u in &whole[f.units.clone()] {
                let step = if is_raw(u) { u.order.min(USUAL_UNIT) } else { u.order };
                self.units.extend((0..1u32 << u.order).step_by(1 << step).map(|page| u.part(page, step)));
            }
            f.units = first..self.units.len();
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.units.is_empty()
    }

    pub(crate) fn pages(&self) -> usize {
        self.units.last().map_or(0, |u| u.page_at + (1 << u.order))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uzswap_mm::codec::Algorithm;
    use uzswap_sys::sys;

    /// Pages of a buffer that are in memory.
    fn resident(buffer: &[u8]) -> usize {
        let (start, end) = (buffer.as_ptr() as usize & !(PAGE - 1), buffer.as_ptr_range().end as usize);
        let mut seen = vec![0u8; (end - start).div_ceil(PAGE)];
        // SAFETY: a byte for each page, ours.
        unsafe { sys!(libc::SYS_mincore, start, end - start, seen.as_mut_ptr()) }.expect("mincore");
        seen.iter().filter(|page| **page & 1 != 0).count()
    }

    /// See `Batch::make_room`.
    #[test]
    fn room_goes_back_when_it_is_not_needed_any_more() {
        let mut batch = Batch::new(Compressor::new(Algorithm::Lz4));
        let large = 191 * PAGE;
        batch.make_room(large);
        assert_eq!((batch.out.len(), batch.out.capacity()), (large, large), "no more than is needed");
        batch.out.fill(1);
        for _ in 1..ROOM_KEPT {
            batch.make_room(PAGE);
            batch.is_stored();
        }
        assert!(resident(&batch.out) >= large / PAGE, "large folios may come again");
        batch.make_room(PAGE);
        batch.is_stored();
        let kept = resident(&batch.out);
        assert!((USUAL_ROOM / PAGE - 1..=USUAL_ROOM / PAGE + 2).contains(&kept), "{kept} pages");
        assert!(batch.out[..USUAL_ROOM].iter().all(|byte| *byte == 1), "what is used yet is not touched");
        batch.rest();
        assert!(resident(&batch.out) <= 2 && !batch.may_rest());
        batch.make_room(large);
        batch.out.fill(2);
        assert!(batch.may_rest());
    }
}

//! What is on its way through compression: folios that were staged, cut into units, and the buffers for what comes of them.
//!
//! ```text
//! folios:  │ folio            │ folio │ folio            │     in the order they were taken
//! units:   │ unit  │ unit     │ unit  │ unit │ …         │     a folio's lie side by side
//! hashes:  │ # # # # # # # #  │ #     │ # # # # …        │     one for each page, from a unit's `page_at`
//! out:     │ bytes │ bytes    │ bytes │ …                │     from a unit's `out_at`: where is settled as it is compressed
//! ```
//! A batch belongs to one thread, which fills it with the pager's lock (`store`), has its units compressed without it
//! (`compress`: helpers touch its buffers then, and nothing else), and empties it with the lock again. Between batches nothing
//! is in it but memory: buffers grow to what was needed once, with the lock held, as everything that allocates.
//!
//! While a unit is in a batch its pages are Busy in their slots, which nobody frees; only what became of single pages meanwhile is
//! looked up when it is stored.

use crate::arena::PAGE;
use crate::compress::Tools;
use crate::state::BLOCK;
use core::ops::Range;
use uzswap_mm::codec::{Compressor, Decompressor, Encoding};
use uzswap_mm::zswap::{self, Packed};
use uzswap_sys::crew::Posted;

/// Pages compressed per batch, but for a folio that is larger.
pub const BATCH_PAGES: usize = 64;

/// A folio in a batch.
pub(crate) struct Folio {
    pub(crate) vpn: u64,
    /// Its order; 0 when it is not whole.
    pub(crate) order: u8,
    /// Pages of it that are in the batch.
    pub(crate) pages: usize,
    /// Its units in the batch.
    pub(crate) units: Range<usize>,
}

/// One unit of compression: `1 << order` pages in consecutive slots.
pub(crate) struct Unit {
    pub(crate) vpn: u64,
    pub(crate) order: u8,
    pub(crate) slot: u32,
    /// Pages of the batch before it: where its hashes are.
    pub(crate) page_at: usize,
    /// Where its output is.
    pub(crate) out_at: usize,
    /// Pages that mremap took elsewhere while they were compressed: a bit each.
    pub(crate) moved: u16,
    pub(crate) outcome: Outcome,
}

/// What came of a unit.
#[derive(Clone, Copy)]
pub(crate) enum Outcome {
    /// It is not compressed yet.
    Pending,
    /// Nothing but zeros.
    Zero,
    /// Compressed to that many bytes.
    Packed { encoding: Encoding, len: usize },
    /// What was compressed does not decompress to what it was.
    Wrong,
}

/// A batch on its way through compression; its buffers grow to what was needed once.
pub struct Batch {
    pub(crate) folios: Vec<Folio>,
    pub(crate) units: Vec<Unit>,
    pub(crate) out: Vec<u8>,
    pub(crate) hashes: Vec<u128>,
    pub(crate) tools: Tools,
    pub(crate) use_dense: bool,
    /// Whether helpers take part in compressing it.
    pub(crate) shared: bool,
    /// What helpers are at.
    pub(crate) posted: Option<Posted>,
    /// Made when verification is first asked for, with a buffer of the largest unit.
    pub(crate) verifier: Option<(Decompressor, Vec<u8>)>,
    /// Scratch of `commit`.
    pub(crate) plan: Vec<(zswap::Unit, Packed)>,
    pub(crate) places: Vec<Option<u32>>,
}

impl Batch {
    /// Buffers for one thread.
    pub fn new(compressor: Compressor) -> Self {
        Self {
            folios: Vec::with_capacity(BATCH_PAGES + 16),
            units: Vec::with_capacity(BATCH_PAGES + 16),
            out: vec![0; BATCH_PAGES * PAGE + BLOCK],
            hashes: vec![0; BATCH_PAGES + 16],
            tools: Tools { warm: compressor, dense: None },
            use_dense: false,
            shared: false,
            posted: None,
            verifier: None,
            plan: Vec::with_capacity(BATCH_PAGES + 16),
            places: Vec::with_capacity(BATCH_PAGES + 16),
        }
    }

    /// The compressor for what is to be dense, and room for two blocks (between batches).
    pub fn dense(&mut self) -> (&mut Compressor, &mut [u8]) {
        (self.tools.dense(), &mut self.out[..2 * BLOCK])
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.units.is_empty()
    }

    pub(crate) fn pages(&self) -> usize {
        self.units.last().map_or(0, |u| u.page_at + (1 << u.order))
    }
}

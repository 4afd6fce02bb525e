//! Recompression: what lz4 stored becomes denser with zstd, when the pool crowds the program out.
//!
//! lz4 is the warm codec: fast, and good enough while memory suffices. Where the pool takes more than half of the limit
//! memory is scarcer than time: what is stored from then on is stored with zstd, clean pages keep no copy, and the sweep
//! below goes over the page table and recompresses what lz4 stored before. It does a few units at a time, on the way of
//! other work, and rests after a pass that gained little until the pool has grown again.
//!
//! Invariant: an object is replaced only when every page that refers to it was found, and all of them change to the new
//! one under one hold of the lock; what cannot be decompressed or does not get smaller stays as it is.

use crate::arena::PAGE;
use crate::fault::decode;
use crate::inject::Site;
use crate::object::{self, Header};
use crate::pager::Pager;
use crate::relocate;
use crate::state::{State, UNIT};
use core::sync::atomic::Ordering::*;
use uzswap_mm::codec::{Algorithm, Compressor, Encoding};
use uzswap_mm::pagetable::Tag;
use uzswap_mm::trace::{Kind, Record};

/// Page-table entries looked at per call at most.
const LOOK: usize = 4096;

/// Where the sweep is.
#[derive(Default)]
pub struct Sweep {
    /// Next page to look at.
    at: u64,
    /// Bytes gained in this pass.
    gained: usize,
    /// Pool bytes held above which another pass is worth while.
    rest_until: usize,
    buffers: Option<Box<Buffers>>,
}

struct Buffers {
    plain: [u8; UNIT],
    packed: [u8; UNIT],
    compressor: Compressor,
}

impl Pager {
    /// Whether the pool takes so much of the limit that memory is scarcer than time.
    pub fn crowded(&self, s: &State) -> bool {
        s.pool.held_bytes() > self.limit() / 2 && self.group.pool_uncharged.load(Relaxed) == 0
    }

    /// Recompresses up to `units` objects; true when the pool got smaller.
    pub fn densify(&self, s: &mut State, units: usize) -> bool {
        if s.algorithm != Algorithm::Lz4 || !self.crowded(s) || s.pool.held_bytes() < s.sweep.rest_until {
            return false;
        }
        let mut buffers = s.sweep.buffers.take().unwrap_or_else(|| {
            let compressor = Compressor::new(Algorithm::Zstd(1));
            Box::new(Buffers { plain: [0; UNIT], packed: [0; UNIT], compressor })
        });
        let (mut done, mut gained) = (0, 0);
        for _ in 0..LOOK {
            if done == units {
                break;
            }
            let Some(vpn) = s.pt.next_used(s.sweep.at) else {
                // A whole pass: go on at once only if it was worth it.
                let poor = s.sweep.gained < s.pool.held_bytes() / 16;
                s.sweep.rest_until = if poor { s.pool.held_bytes() / 8 * 9 } else { 0 };
                (s.sweep.at, s.sweep.gained) = (0, 0);
                break;
            };
            s.sweep.at = vpn + 1;
            let pte = s.pt.get(vpn);
            if pte.tag() == Tag::Compressed {
                let head = Header::read(s.object(pte.handle()));
                if matches!(head.encoding, Encoding::Lz4) {
                    done += 1;
                    gained += self.recompress(s, pte.handle(), head, &mut buffers);
                }
            }
        }
        s.sweep.buffers = Some(buffers);
        s.sweep.gained += gained;
        gained > 0
    }

    /// Replaces an object; returns the bytes it got smaller.
    fn recompress(&self, s: &mut State, handle: u32, head: Header, b: &mut Buffers) -> usize {
        let pages = 1usize << head.order;
        // (After mremap of a part its pages are elsewhere: such objects stay.)
        if !relocate::is_found(&s.pt, handle, &head) || !decode(s, handle, &mut b.plain[..pages * PAGE]) {
            return 0;
        }
        let room = head.len - head.len / 8;
        let Some((encoding, len)) = b.compressor.compress(&b.plain[..pages * PAGE], &mut b.packed[..room]) else {
            return 0;
        };
        if self.inject(Site::Pool).is_some() {
            return 0;
        }
        let before = s.pool.used_bytes();
        let at = object::head_bytes(head.order);
        let old = s.object(handle);
        let copy_hashes =
            |place: &mut [u8]| place[object::HEADER_BYTES..at].copy_from_slice(&old[object::HEADER_BYTES..at]);
        let Some(new) = s.put_object(Header { len, encoding, flags: head.flags & !object::WRITING, ..head }, copy_hashes, &b.packed[..len]) else { return 0 };
        s.note(Record::of_object(Kind::Resize, head.vpn, head.order, len));
        relocate::repoint(&mut s.pt, &head, new.raw());
        for i in (0..pages).filter(|i| head.live & (1 << i) != 0) {
            s.release(handle, i);
        }
        s.entered_pool(head.vpn, new.raw());
        self.counters().recompressed_pages.fetch_add(u64::from(head.live.count_ones()), Relaxed);
        before.saturating_sub(s.pool.used_bytes())
    }
}

//! Objects change place in the pool.
//!
//! An object is named by page-table entries only: of pages that are out (compressed) and of pages that are in and kept a
//! copy. Its header says where in the program it belongs, and `live` which of its pages still refer to it, so the entries
//! are found from the object. Everything that reads an object holds the pager's lock from the look at the entry to the
//! last byte, and so does whoever moves one: copying it and changing its entries is one step for all readers.
//!
//! Invariant: an object moves only when every live page's entry was found to name it. (After mremap of a part of a unit
//! its pages are apart, the header can be right for one part only, and the object stays until it dies.)
//!
//! The pool is compacted under memory pressure only, on the way of reclaim, in small steps, when a sixteenth of it is
//! waste: that frees memory at a tenth of the price of compressing a page.

use crate::arena;
use crate::object::{self, Header};
use crate::pager::Pager;
use crate::state::{Decoded, State};
use core::sync::atomic::Ordering::*;
use std::collections::BTreeSet;
use uzswap_mm::pagetable::{PageTable, Pte, Tag};
use uzswap_mm::zsmalloc::{Freed, Handle, Relocate};

/// Objects moved per call: some tens of microseconds under the lock.
const STEP: usize = 64;

/// Whether an entry refers to page `index` of an object whose order is `order`.
fn refers(vpn: u64, pte: Pte, handle: u32, order: u8, index: usize) -> bool {
    let out = pte.tag() == Tag::Compressed && pte.handle() == handle && pte.index() == index;
    out || (pte.copy() == Some(handle) && (vpn & ((1 << order) - 1)) as usize == index)
}

fn live(head: &Header) -> impl Iterator<Item = usize> + use<> {
    let (bits, pages) = (head.live, 1usize << head.order);
    (0..pages).filter(move |i| bits & (1 << i) != 0)
}

/// Whether every page that refers to an object is where the object says.
pub fn is_found(pt: &PageTable, handle: u32, head: &Header) -> bool {
    live(head).all(|i| refers(head.vpn + i as u64, pt.get(head.vpn + i as u64), handle, head.order, i))
}

/// Makes the entries of all pages of an object name its new place.
pub fn repoint(pt: &mut PageTable, head: &Header, to: u32) {
    for i in live(head) {
        let vpn = head.vpn + i as u64;
        let pte = pt.get(vpn);
        let changed =
            if pte.tag() == Tag::Compressed { Pte::compressed(to, i, pte.evicted_at()) } else { pte.with_copy(to) };
        pt.set(vpn, changed);
    }
}

/// A compressed page is at `vpn` now, with its entry unchanged: its object shall be found there.
pub fn moved(s: &State, vpn: u64, pte: Pte) {
    let object = s.object(pte.handle());
    let mut head = Header::read(object);
    head.vpn = vpn.wrapping_sub(pte.index() as u64);
    head.write(object);
}

/// The parts of the state that a move changes, beside the pool itself.
struct Mover<'a> {
    pool: usize,
    pt: &'a mut PageTable,
    decoded: &'a mut [Decoded],
    left_behind: &'a mut BTreeSet<u32>,
    /// Where objects are now, by their first page.
    moved: Vec<(u64, u32)>,
    freed: usize,
}

impl Relocate for Mover<'_> {
    fn relocate(&mut self, from: Handle, to: Handle, len: usize) -> bool {
        let (src, dst) = ((self.pool + from.offset()) as *const u8, (self.pool + to.offset()) as *mut u8);
        // SAFETY: both are objects of the pool, which the pager's lock protects (the page table is borrowed from it);
        // the pool says that they are of `len` bytes and apart.
        let (src, dst) = unsafe { (core::slice::from_raw_parts(src, len), core::slice::from_raw_parts_mut(dst, len)) };
        let head = Header::read(src);
        // (What is being written must be found again by its place.)
        if head.flags & object::WRITING != 0 || !is_found(self.pt, from.raw(), &head) {
            return false;
        }
        let used = object::head_bytes(head.order) + head.len;
        dst[..used].copy_from_slice(&src[..used]);
        repoint(self.pt, &head, to.raw());
        self.moved.push((head.vpn, to.raw()));
        for d in self.decoded.iter_mut().filter(|d| d.handle == Some(from.raw())) {
            d.handle = Some(to.raw());
        }
        if self.left_behind.remove(&from.raw()) {
            self.left_behind.insert(to.raw());
        }
        true
    }

    fn freed(&mut self, pages: Freed) {
        self.freed += pages.len;
        // SAFETY: the pool says that no object is left in the range.
        unsafe { arena::discard(self.pool + pages.offset, pages.len) };
    }
}

impl Pager {
    /// Compacts the pool a little when a sixteenth of it is waste; true when memory was freed.
    pub fn compact_pool(&self, s: &mut State) -> bool {
        let (held, used) = (s.pool.held_bytes(), s.pool.used_bytes());
        // What cannot be freed (or was not worth it) is not looked at again until as much waste has come on top.
        if held - used < held / 16 + s.pool_rest {
            return false;
        }
        let State { pool, pt, decoded, left_behind, layout, .. } = s;
        let moved = Vec::with_capacity(STEP);
        let mut mover = Mover { pool: layout.pool, pt, decoded, left_behind, moved, freed: 0 };
        let done = pool.compact(STEP, &mut mover);
        let (freed, moved) = (mover.freed, mover.moved);
        // The shrinker's entries name objects by their place.
        moved.into_iter().for_each(|(vpn, handle)| s.entered_pool(vpn, handle));
        s.rss = s.rss.saturating_sub(freed);
        self.counters().pages_compacted.fetch_add((freed / arena::PAGE) as u64, Relaxed);
        let (held, used) = (s.pool.held_bytes(), s.pool.used_bytes());
        s.pool_rest = if done.moved < STEP { (held - used).saturating_sub(held / 16) + held / 64 } else { 0 };
        freed > 0
    }
}

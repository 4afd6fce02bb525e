//! Compaction of the swap file: where the file is full, what lies apart in it is read back and written again closer together.
//!
//! ```text
//! cluster before  │obj│ gap │obj│gap│obj with gaps│ gap │       no other run can be found, and the gaps are worth it
//!   read          └─ one read, without the lock ────────┘       into the buffer of the next write, which is free
//!   taken in      each object that is still on disk only, and right, goes into the pool, at the head of the list; the cluster
//!                 is free with its last object
//!   written       │obj│obj│cut│ what else is to go ·······│     by the next rounds of writing, as everything else
//! ```
//! So it needs neither a spare cluster nor a buffer of its own, and what is in memory meanwhile is charged as all that is in the
//! pool. No page is lost whatever fails: its place is given up when it is in the pool, and it is on disk again when a write has
//! ended.
//!
//! A block of which pages have gone is cut, so that their bytes are not written again: a raw one always, others when half of it
//! has gone. (With more of it left it moves whole, as parts no longer compress as well; see [`is_worth_a_cut`].)
//!
//! Rules:
//! - A process compacts its own clusters, and none that another process refers to, in which a write failed or that is being
//!   written to. With a server nothing is compacted: a cluster is a key there, but the server's memory for it is of the same use
//!   with gaps, and each read and write is a request.
//! - As in `swapin`, a read is for places. What was read is believed if it has the checksum that the books have *then*, and it is
//!   taken in if all pages that are only there are found *then*. A page that was faulted, freed or moved meanwhile needs nothing.
//! - What cannot be read, is damaged, or was torn apart by mremap stays where it is. The cluster's gaps are then forgotten: it is
//!   tried again once as much was released there again. (With one that kept its gaps if anything was moved, an object beside
//!   damaged ones was moved, and written to the same hole again, for ever.)
//! - A cluster is worth it by what was *released* in it since it was written ([`SwapFile::sparsest`]), at least an eighth. So at
//!   most seven bytes are moved for each that was released, whatever comes of it, and a file that is full of what is wanted is
//!   left alone.
//!
//! [`SwapFile::sparsest`]: uzswap_mm::swapfile::SwapFile::sparsest

use super::io::Trouble;
use super::pipeline::Writes;
use super::references::References;
use super::swapin::{Installed, Why, opened};
use super::writeback::RUN_BYTES;
use super::{FRONT, MOST_PAGES, Swap};
use crate::pager::Pager;
use crate::pool::object::{self, Header};
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::codec::Encoding;
use uzswap_mm::shrinker::Entry;
use uzswap_mm::swapfile::{Object, Place, Sparse, is_worth_a_cut, offset};
use uzswap_sys::raw::Errno;
use uzswap_sys::thread;

/// A cluster is compacted before small holes are written to if at least one part in so many of it is gaps.
pub(super) const MANY: usize = 2;
/// And before the file is said to be full.
pub(super) const SOME: usize = 8;
/// Pages taken in under one hold of the lock.
const AT_ONCE: usize = 2 * MOST_PAGES;
/// Rest after the pool had no room for anything that was read (nanoseconds).
const NO_ROOM_NS: u64 = 100_000_000;

/// A range of the file being compacted.
struct Moving {
    sparse: Sparse,
    /// All objects from here on were looked at. (From the last to the first, as each becomes the next to be written.)
    before: u64,
    /// Whether something has left, and whether something stays there.
    moved: bool,
    stays: bool,
}

/// The pool has no room.
struct NoRoom;

impl Swap {
    /// What row `me`'s process compacts next, outside of `bad` clusters, if one part in `part` of a cluster is gaps.
    pub(super) fn sparsest(&self, me: usize, bad: &[u32], part: usize) -> Option<Sparse> {
        if self.map.is_remote() || thread::now_ns() < self.compact_at {
            return None;
        }
        let bytes = self.books.cluster_bytes() as u64;
        let is_written = |c: u32| self.writing.iter().any(|(from, to)| from < to && from / bytes == u64::from(c));
        let may = |c: u32| !bad.contains(&c) && !is_written(c) && !self.whole.has(c) && self.map.may_write(me, c);
        self.books.sparsest(bytes as usize / part, RUN_BYTES, may)
    }
}

impl Pager {
    /// Empties a range of the file, by way of the buffer of write `slot`. Call it without the lock.
    pub(super) fn compact(&self, writes: &mut Writes, slot: usize, sparse: Sparse) {
        let bytes = &mut writes.buffer(slot)[..sparse.len];
        let result = self.beside_writes(|| self.swap_read(0, sparse.at, bytes, false));
        self.compacted(sparse, bytes, result);
        self.swap_progressed();
    }

    /// The read of a range to be emptied has ended.
    pub(super) fn compacted(&self, sparse: Sparse, bytes: &mut [u8], result: Result<(), Errno>) {
        let mut moving = Moving { sparse, before: sparse.at + sparse.len as u64, moved: false, stays: result.is_err() };
        loop {
            // Not in the loop's condition: the lock would be held throughout its body.
            let s = &mut *self.state.lock();
            let more = if result.is_ok() { self.take_in(s, &mut moving, bytes) } else { Ok(false) };
            match (more, s.swap.as_mut()) {
                (Ok(true), _) => continue,
                (Err(NoRoom), Some(swap)) if !moving.moved => swap.compact_at = thread::now_ns() + NO_ROOM_NS,
                (Ok(false), Some(swap)) if moving.stays => swap.books.forget_gaps(sparse.cluster),
                _ => {}
            }
            if result.is_err() {
                self.tell(Trouble::Read);
            }
            return self.publish(s);
        }
    }

    /// Takes some objects into the pool; returns whether there are more.
    fn take_in(&self, s: &mut State, moving: &mut Moving, bytes: &mut [u8]) -> Result<bool, NoRoom> {
        // What waits there may change a block that is to be cut.
        self.store_posted(s);
        let Some(swap) = s.swap.as_ref() else { return Ok(false) };
        // A child has them too since.
        if !swap.map.may_write(swap.row, moving.sparse.cluster) {
            return Ok(false);
        }
        let (at, mut pages) = (moving.sparse.at, 0);
        while pages < AT_ONCE {
            let last = s.swap.as_ref().and_then(|swap| swap.books.previous_object(moving.before, |_| true));
            let Some((place, object)) = last.filter(|(place, _)| offset(*place) >= at) else { return Ok(false) };
            moving.before = offset(place);
            let from = (offset(place) - at) as usize;
            // In a long cluster the last one may be there in part only.
            let Some(bytes) = bytes.get_mut(from..from + object.len) else { continue };
            pages += object.pages;
            let moved = self.move_object(s, place, &object, bytes)?;
            moving.moved |= moved;
            moving.stays |= !moved;
        }
        Ok(true)
    }

    /// Moves an object from its place into the pool, as the next to be written; returns whether it has left its place.
    fn move_object(&self, s: &mut State, place: Place, object: &Object, bytes: &mut [u8]) -> Result<bool, NoRoom> {
        let Some(bytes) = opened(s, place, object, bytes) else {
            self.counters().swap_read_errors.fetch_add(1, Relaxed);
            self.tell(Trouble::Read);
            return Ok(false);
        };
        let base = u64::from_le_bytes(core::array::from_fn(|i| bytes[i]));
        if object.kept != 0 {
            s.give_up_place(base, place);
        }
        let there = s.swap.as_ref().and_then(|swap| swap.books.get(place));
        let Some(object) = there else { return Ok(true) };
        let wanting = s.pages_on_disk(base, place);
        if object.kept != 0 || wanting != object.live {
            return Ok(false);
        }
        let handle = match self.install_object(s, place, &bytes[FRONT..], base, Why::Compaction) {
            Installed::Yes(handle) => handle,
            Installed::No => return Ok(false),
            Installed::NoRoom => return Err(NoRoom),
        };
        self.counters().swap_compacted.fetch_add(u64::from(wanting.count_ones()), Relaxed);
        self.comes_next(s, Entry { vpn: base, handle }, wanting);
        Ok(true)
    }

    /// Puts an object with these pages left at the head of the list, in parts if that is worth while.
    fn comes_next(&self, s: &mut State, entry: Entry, live: u16) {
        let head = Header::read(s.object(entry.handle));
        let raw = matches!(head.encoding, Encoding::Raw);
        let cuts = is_worth_a_cut(live.count_ones() as usize, 1 << head.order, raw);
        // Without place for the parts it goes as it is. None is made dense first: that is for what has not been on disk, and writes
        // what there is between in small runs.
        let parts = cuts.then(|| self.cut_into(s, entry, |_| true).ok()).flatten().unwrap_or_else(|| vec![entry]);
        parts.iter().for_each(|part| object::set_flags(s.object(part.handle), object::TRIED, 0));
        if let Some(swap) = s.swap.as_mut() {
            parts.into_iter().rev().for_each(|part| swap.shrinker.put_back(part));
        }
    }
}

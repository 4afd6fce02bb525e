//! Reading back: swap file to pool, before a fault on the page is served.
//!
//! The fault path never waits for the disk with the lock held: a request for a page on disk stays in the handler's list
//! until the page is in the pool, and is then served as any other. What is read along with an object, because it lies in
//! the same blocks, goes to the pool too if somebody still wants it.
//!
//! What was read is believed only if the checksum is that of the books *now*: meanwhile the place may have been given up
//! and written anew. A read that fails, or gives something else, is tried again a few times, each time from the start;
//! then the page is lost, for this process alone, and it is told.

use super::io::Trouble;
use super::seal::SEAL;
use super::writeback::{Block, blocks, bytes_of};
use super::{FRONT, MOST_PAGES, checksum};
use crate::object::{self, Header};
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::pagetable::Tag;
use uzswap_mm::shrinker::Entry;
use uzswap_mm::swapfile::{BLOCK, Object, Place, offset};
use uzswap_mm::trace::{Kind, Record};
use uzswap_sys::thread;

/// Bytes of the buffer: an object of the largest size and the blocks it begins and ends in.
const BUFFER: usize = 128 << 10;
/// Reads of one object before it is given up.
const TRIES: u32 = 4;

/// The handler's buffer for reads.
#[derive(Default)]
pub struct ReadBuffer(Vec<Block>);

impl ReadBuffer {
    /// Makes the buffer; to be called with the pager's lock held, like all that allocates.
    pub fn prepare(&mut self, s: &State) {
        if self.0.is_empty() && s.swap.is_some() {
            self.0 = blocks(BUFFER);
        }
    }
}

/// What is to be read for a page: blocks from an offset on.
struct Read {
    at: u64,
    len: usize,
}

impl Pager {
    /// Brings the object of a page that is on disk into the pool; what cannot be read is lost, and told. Called without
    /// the lock.
    pub(crate) fn swap_in(&self, vpn: u64, buffer: &mut ReadBuffer) {
        for tried in 1..=TRIES {
            let Some(read) = self.plan_read(&mut self.state.lock(), vpn) else { return };
            let bytes = &mut bytes_of(&mut buffer.0)[..read.len];
            let done = self.swap_read(read.at, bytes);
            let mut s = self.state.lock();
            if done.is_ok() {
                self.install(&mut s, &read, bytes, vpn);
            }
            if s.pt.get(vpn).tag() != Tag::Disk {
                return;
            }
            self.tell(Trouble::Read);
            if tried == TRIES {
                return self.lose(&mut s, vpn);
            }
            drop(s);
            // The first time at once: it may have been written anew meanwhile.
            if tried > 1 {
                thread::sleep_ns(62_500 << (2 * tried));
            }
        }
    }

    fn plan_read(&self, s: &mut State, vpn: u64) -> Option<Read> {
        let pte = s.pt.get(vpn);
        if pte.tag() != Tag::Disk {
            return None;
        }
        let swap = s.swap.as_ref()?;
        let place = pte.handle();
        let object = swap.books.get(place).expect("a page on disk has an object");
        let (at, len) = swap.readahead.range(offset(place), object.len, swap.books.cluster_bytes(), BUFFER);
        // (Where nothing of ours lies there is nothing to read, or the file may even end.)
        let mut mine = swap.books.objects_within(at, len).map(|(place, o)| (offset(place), o.len as u64));
        let first = mine.next().expect("the object itself");
        let last = mine.last().unwrap_or(first);
        let (at, end) = (first.0 / BLOCK as u64 * BLOCK as u64, (last.0 + last.1).next_multiple_of(BLOCK as u64));
        Some(Read { at, len: (end - at) as usize })
    }

    /// Puts what was read where it belongs: the object of `vpn`, and what came along.
    fn install(&self, s: &mut State, read: &Read, bytes: &mut [u8], vpn: u64) {
        let Some(swap) = s.swap.as_ref() else { return };
        let objects: Vec<(Place, Object)> = swap.books.objects_within(read.at, read.len).collect();
        let wanted = s.pt.get(vpn);
        let mut brought = 0;
        for (place, object) in objects {
            // The page that is wanted says itself where its object belongs: it may have been moved since (mremap).
            let is_wanted = wanted.tag() == Tag::Disk && wanted.handle() == place;
            let from = (offset(place) - read.at) as usize;
            let bytes = &mut bytes[from..from + object.len];
            let seal = s.swap.as_ref().and_then(|swap| swap.seal.as_ref());
            let right = checksum(bytes) == object.check && seal.is_none_or(|seal| seal.open(bytes, place));
            let bytes = if seal.is_some() && right { &bytes[SEAL..] } else { &bytes[..] };
            if !right {
                // (What came along may be half written yet.)
                self.counters().swap_read_errors.fetch_add(u64::from(is_wanted), Relaxed);
                continue;
            }
            let base = if is_wanted {
                vpn - wanted.index() as u64
            } else {
                u64::from_le_bytes(core::array::from_fn(|i| bytes[i]))
            };
            brought += usize::from(self.install_object(s, place, &bytes[FRONT..], base, is_wanted) && !is_wanted);
        }
        if let Some(swap) = s.swap.as_mut() {
            swap.readahead.read(read.at, read.len, brought);
        }
    }

    /// False when nobody wants the object any more, or there is no room for it.
    fn install_object(&self, s: &mut State, place: Place, stored: &[u8], base: u64, is_wanted: bool) -> bool {
        let head = Header::read(stored);
        let body = object::head_bytes(head.order.min(4));
        if 1 << head.order > MOST_PAGES || body + head.len > stored.len() {
            return false;
        }
        let belongs = |s: &State, i: u64| {
            let pte = s.pt.get(base + i);
            pte.tag() == Tag::Disk && pte.handle() == place && pte.index() as u64 == i
        };
        let pages = (0..1u64 << head.order).filter(|i| belongs(s, *i)).fold(0u16, |mask, i| mask | 1 << i);
        if pages == 0 {
            return false;
        }
        let ahead = if is_wanted { 0 } else { object::AHEAD };
        let new = Header { live: pages, flags: object::REFERENCED | ahead, ..head };
        let hashes = |to: &mut [u8]| {
            to[object::HEADER_BYTES..body].copy_from_slice(&stored[object::HEADER_BYTES..body]);
        };
        let Some(handle) = s.put_object(new, hashes, &stored[body..body + head.len]) else {
            self.counters().reject_alloc_fail.fetch_add(1, Relaxed);
            return false;
        };
        for i in (0..16).filter(|i| pages & (1 << i) != 0) {
            let pte = s.pt.get(base + i);
            s.pt.set(base + i, pte.back_in_pool(handle.raw()));
        }
        s.leave_disk(place, pages);
        s.note(Record::of_object(Kind::DiskRead, base, head.order, head.len));
        let n = pages.count_ones();
        s.swapped += n as usize;
        self.counters().pswpin.fetch_add(u64::from(n), Relaxed);
        let swap = s.swap.as_mut().expect("it was there a moment ago");
        swap.shrinker.read_from_disk(n as usize);
        s.entered_pool(base, handle.raw());
        debug_assert!(s.pages_of(Entry { vpn: base, handle: handle.raw() }).is_some());
        true
    }
}

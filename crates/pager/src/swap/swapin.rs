//! Reading back, from the swap file to the pool, before a fault on the page is served.
//!
//! The fault path never waits for the disk with the lock held, and no fault holds up another: a request for a page on disk stays
//! in the handler's list until the page is in the pool, and is then served as any other. What is read along with an object, as it
//! lies in the same blocks, goes to the pool too if somebody still wants it.
//!
//! ```text
//! fault ─ want: a read of the object, and a window around it, is begun ┈┈┈ land: what came is checked, and installed
//!           └ a read that is under way brings it too: nothing is begun         └ still on disk: tried again, or lost
//! ```
//! A read is for a *place*. Nobody needs to tell it what happens to the page meanwhile (it is unmapped, moved by mremap,
//! inherited by a child, read along with another, or its place is given up and holds another object now). When the read ends, its
//! data is believed only if it has the checksum that the books have *then*, and is installed only for pages whose entries name
//! the place *then*. A read that fails, or returns something else, is tried a few more times, each time from the start; then the
//! page is lost, for this process alone, which is told. (Data that was right and found no room in the pool is not lost: it is
//! read again until there is room.) The tries of a fault are those of reads begun for its page; a fault that only waited for
//! another one's window next has a read of its own.
//!
//! Where reads follow each other in the file the next range is read before anybody asks ([`Pager::read_ahead`]), so that the disk
//! works while the program does.

use super::io::Trouble;
use super::kept::OnDisk;
use super::reads::{BUFFER, Read, Reads};
use super::seal::SEAL;
use super::{FRONT, Swap, checksum};
use crate::fault::Request;
use crate::inject::Site;
use crate::pager::Pager;
use crate::pool::object::{self, Header};
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::pagetable::Tag;
use uzswap_mm::readahead::Ahead;
use uzswap_mm::shrinker::Entry;
use uzswap_mm::swapfile::{BLOCK, Object, Place, offset};
use uzswap_mm::trace::{Kind, Record};
use uzswap_sys::thread;

/// Reads of one object before it is given up.
const TRIES: u32 = 4;
/// Pause before an object is read again that found no room in the pool (nanoseconds).
const NO_ROOM_NS: u64 = 4_000_000;
/// Most reads under way ahead of all faults: in all streams, and in one.
const MOST_AHEAD: usize = 5;
const MOST_IN_STREAM: usize = 2;

/// Why an object is installed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// A fault waits for it.
    Wanted,
    /// It came along.
    Along,
    /// It is to be written elsewhere ([`sparse`](super::sparse)): it keeps no place, is on no list yet, and nobody has missed it.
    Compaction,
}

/// Outcome of installing an object that was read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Installed {
    /// This is the object in the pool.
    Yes(u32),
    /// Nobody wants it any more, or it is no object.
    No,
    /// The pool has no room for it.
    NoRoom,
}

/// A fault that was read and is not served yet.
#[derive(Clone, Copy)]
pub(crate) struct Waiting {
    pub(crate) r: Request,
    /// Reads begun for its page that did not bring it.
    tries: u32,
    /// Whether another fault's read should have brought it along and did not.
    alone: bool,
    /// When it may be tried again (monotonic nanoseconds).
    retry_at: u64,
    /// Since when it waits for the disk (monotonic nanoseconds); 0 if it does not.
    since: u64,
    /// Whether a thread waits for it, which is therefore stalled.
    stalls: bool,
    /// Whether the reclaim thread waits for it; serving it makes room.
    pub(crate) own: bool,
    /// The thread that waits for it; 0 if none does.
    pub(crate) tid: u32,
}

impl Waiting {
    /// A fault that was just read.
    pub(crate) fn new(r: Request) -> Self {
        Self { r, tries: 0, alone: false, retry_at: 0, since: 0, stalls: true, own: false, tid: 0 }
    }

    /// A page that is wanted though no thread has touched it.
    ///
    /// The story: a process that was let go of had its pages brought from disk in this way, 64 at a time. It was said to have
    /// stalled for five times as long as it ran.
    pub(crate) fn asked(vpn: u64) -> Self {
        Self { stalls: false, ..Self::new(Request { vpn, write: false, protected: false }) }
    }
}

impl Pager {
    /// If the page of a fault is on disk, makes sure that it is being read. If the page must not be read yet, returns when to ask
    /// again.
    pub(crate) fn want(&self, s: &State, reads: &mut Reads, waiting: &mut Waiting) -> Option<u64> {
        let pte = s.pt.get(waiting.r.vpn);
        if pte.tag() != Tag::Disk {
            return None;
        }
        let now = thread::now_ns();
        if waiting.since == 0 {
            waiting.since = now;
        }
        let (swap, place) = (s.swap.as_ref()?, pte.handle());
        let object = swap.books.get(place).expect("a page on disk has an object");
        let brings =
            |read: &Read| read.place == Some(place) || (!waiting.alone && read.covers(offset(place), object.len));
        if reads.iter().any(brings) || reads.free() == 0 {
            return None;
        }
        if waiting.retry_at > now {
            return Some(waiting.retry_at);
        }
        // What failed is read by itself: the blocks of its neighbours may be the unreadable ones.
        let (at, len) = match waiting.tries {
            0 => swap.readahead.range(offset(place), object.len, BUFFER),
            _ => (offset(place), object.len),
        };
        let (at, len) = swap.trimmed(at, len).expect("the object itself is there");
        reads.plan(self, s, Read::new(at, len, place).tried(waiting.tries + 1 == TRIES));
        None
    }

    /// Begins to read what comes next in the file where faults have been in sequence; first in the streams with the least under
    /// way. Not while threads wait for room, which it would take.
    pub(crate) fn read_ahead(&self, s: &State, reads: &mut Reads) {
        let Some(swap) = s.swap.as_ref() else { return };
        if swap.readahead.ahead().next().is_none() || self.waits_for_disk(s) {
            return;
        }
        for under_way in 0..MOST_IN_STREAM {
            for ahead in swap.readahead.ahead() {
                let all = reads.iter().filter(|read| read.place.is_none()).count();
                // The last slot is for a fault.
                if all >= MOST_AHEAD || reads.free() <= 1 {
                    return;
                }
                if reads.iter().filter(|read| read.stream == ahead.stream).count() != under_way {
                    continue;
                }
                if let Some((at, len)) = swap.next_in(&ahead, reads)
                    && !reads.iter().any(|read| read.covers(at, len))
                    && !reads.plan(self, s, Read::ahead(at, len, ahead.stream))
                {
                    return;
                }
            }
        }
    }

    /// Completes the reads that have ended: what they brought goes to the pool; what they did not bring is tried again or lost.
    pub(crate) fn land(&self, s: &mut State, reads: &mut Reads, waiting: &mut [Waiting]) {
        while reads.take(|read, bytes, result| {
            let mut room = true;
            match (result, s.swap.as_mut()) {
                (Ok(()), _) => room = self.install(s, read, bytes, waiting),
                (Err(_), Some(swap)) if read.place.is_none() => {
                    swap.readahead.read_ahead(read.stream, read.at, read.len, 0);
                }
                _ => {}
            }
            waiting.iter_mut().for_each(|w| self.read_ended(s, read, w, room));
        }) {}
    }

    /// What the end of a read means for a fault; `room`: the pool had room for the object that the read was begun for.
    fn read_ended(&self, s: &mut State, read: &Read, w: &mut Waiting, room: bool) {
        let pte = s.pt.get(w.r.vpn);
        if pte.tag() != Tag::Disk {
            let since = core::mem::take(&mut w.since);
            if since != 0 && w.stalls {
                self.counters().stall_ns.fetch_add(thread::now_ns().saturating_sub(since), Relaxed);
            }
            return;
        }
        if read.place != Some(pte.handle()) {
            w.alone |= read.covers(offset(pte.handle()), 1);
            return;
        }
        if !room {
            // The object is there and right: it waits for the pool, however long that takes.
            w.retry_at = thread::now_ns() + NO_ROOM_NS;
            return;
        }
        self.tell(Trouble::Read);
        // A read that another fault on the page began is no last try: see `lasts`.
        if w.tries + 1 == TRIES && !read.lasts() {
            return;
        }
        w.tries += 1;
        if w.tries == TRIES {
            return self.lose(s, w.r.vpn);
        }
        // The first retry is at once: the object may have been written anew meanwhile.
        w.retry_at = if w.tries > 1 { thread::now_ns() + (62_500 << (2 * w.tries)) } else { 0 };
    }

    /// Whether a read has ended that the handler has not seen.
    pub(crate) fn a_read_has_ended(&self) -> bool {
        let fd = self.tier.reads_fd.load(Relaxed);
        fd >= 0 && uzswap_sys::uffd::is_readable(fd)
    }

    /// Puts what was read where it belongs: the objects that are waited for, and what came along; false if the object that the
    /// read was begun for is right and found no room in the pool.
    fn install(&self, s: &mut State, read: &Read, bytes: &mut [u8], waiting: &[Waiting]) -> bool {
        let Some(swap) = s.swap.as_mut() else { return true };
        swap.look_for_room(self);
        let objects: Vec<(Place, Object)> =
            swap.books.objects_within(read.at, read.len).filter(|o| is_wanting(&o.1)).collect();
        let (mut brought, mut room) = (0, true);
        for (place, object) in objects {
            let from = (offset(place) - read.at) as usize;
            let bytes = &mut bytes[from..from + object.len];
            let Some(bytes) = opened(s, place, &object, bytes) else {
                // What came along may have been half written.
                self.counters().swap_read_errors.fetch_add(u64::from(read.place == Some(place)), Relaxed);
                continue;
            };
            let bases = bases(s, place, waiting);
            if bases.is_empty() {
                let base = u64::from_le_bytes(core::array::from_fn(|i| bytes[i]));
                let installed = self.install_object(s, place, &bytes[FRONT..], base, Why::Along);
                brought += usize::from(matches!(installed, Installed::Yes(_)));
            }
            for base in bases {
                let installed = self.install_object(s, place, &bytes[FRONT..], base, Why::Wanted);
                room &= installed != Installed::NoRoom || read.place != Some(place);
            }
        }
        if let Some(swap) = s.swap.as_mut() {
            match read.place {
                Some(_) => swap.readahead.read(read.at, read.len, brought),
                None => swap.readahead.read_ahead(read.stream, read.at, read.len, brought),
            }
        }
        room
    }

    /// Puts an object into the pool for those of its pages from `base` on that are at its place on disk.
    pub(super) fn install_object(&self, s: &mut State, place: Place, stored: &[u8], base: u64, why: Why) -> Installed {
        let head = Header::read(stored);
        let body = object::head_bytes(head.order.min(object::SMALL));
        if head.order > object::SMALL || body + head.len > stored.len() {
            return Installed::No;
        }
        let pages = s.pages_on_disk(base, place) & ((1u32 << (1 << head.order)) - 1) as u16;
        if pages == 0 {
            return Installed::No;
        }
        let flags = match why {
            Why::Wanted => object::REFERENCED,
            Why::Along => object::REFERENCED | object::AHEAD,
            Why::Compaction => 0,
        };
        // Its pages may be elsewhere than when it was written.
        let new = Header { flags, vpn: base, ..head };
        let hashes = |to: &mut [u8]| object::set_hashes(to, 0, object::hashes(stored));
        let keeps = why != Why::Compaction && s.swap.as_ref().is_some_and(|swap| swap.keeps(place));
        let at = keeps.then_some(OnDisk { place, first: 0 });
        let stored = &stored[body..body + head.len];
        let handle = match self.inject(Site::Pool) {
            None => s.put_object_on_disk(new, pages.into(), hashes, stored, at),
            Some(_) => None,
        };
        let Some(handle) = handle else {
            self.counters().reject_alloc_fail.fetch_add(1, Relaxed);
            return Installed::NoRoom;
        };
        for i in (0..16).filter(|i| pages & (1 << i) != 0) {
            let pte = s.pt.get(base + i);
            s.pt.set(base + i, pte.back_in_pool(handle.raw()));
        }
        match s.swap.as_mut().filter(|_| keeps) {
            Some(swap) => swap.keep(place, pages),
            None => s.leave_disk(place, pages),
        }
        s.note(Record::of_object(Kind::DiskRead, base, head.order, head.len));
        let n = pages.count_ones();
        s.swapped += n as usize;
        self.counters().pswpin.fetch_add(u64::from(n), Relaxed);
        if n == 1 << head.order {
            self.counters().folios.count(head.order, |o| &o.swpin);
        }
        if why != Why::Compaction {
            let swap = s.swap.as_mut().expect("it was there a moment ago");
            swap.disk_reads.add(n as usize);
            s.entered_pool(base, handle.raw());
        }
        debug_assert!(s.pages_of(Entry { vpn: base, handle: handle.raw() }).is_some());
        Installed::Yes(handle.raw())
    }
}

/// The first pages at which an object belongs. A page that is waited for says it itself, as mremap may have moved it since; if
/// the object's pages were moved apart, they may differ.
fn bases(s: &State, place: Place, waiting: &[Waiting]) -> Vec<u64> {
    let mut bases = Vec::new();
    for w in waiting {
        let pte = s.pt.get(w.r.vpn);
        let base = w.r.vpn.wrapping_sub(pte.index() as u64);
        if pte.tag() == Tag::Disk && pte.handle() == place && !bases.contains(&base) {
            bases.push(base);
        }
    }
    bases
}

/// What was read for an object, its first page's number in front, if it is what the books say and is decrypted.
pub(super) fn opened<'a>(s: &State, place: Place, object: &Object, bytes: &'a mut [u8]) -> Option<&'a [u8]> {
    let seal = s.swap.as_ref().and_then(|swap| swap.seal.as_ref());
    let right = checksum(bytes) == object.check && seal.is_none_or(|seal| seal.open(bytes, place));
    right.then_some(if seal.is_some() { &bytes[SEAL..] } else { &bytes[..] })
}

/// Whether an object has pages that are only on disk.
fn is_wanting(object: &Object) -> bool {
    object.live & !object.kept != 0
}

impl Swap {
    /// The part of a range of the file from this process's first object in it to its last, in whole blocks. Beyond them there is
    /// nothing to read, and the file (or a server's key) may even end there, as it does where something is just being written.
    /// None if there is no object.
    fn trimmed(&self, at: u64, len: usize) -> Option<(u64, usize)> {
        let there = |place| !self.writing.iter().any(|(from, to)| (*from..*to).contains(&offset(place)));
        let mine = self.books.objects_within(at, len).filter(|(place, o)| is_wanting(o) && there(*place));
        let mut mine = mine.map(|(place, o)| (offset(place), o.len as u64));
        let first = mine.next()?;
        let last = mine.last().unwrap_or(first);
        let (at, end) = (first.0 / BLOCK as u64 * BLOCK as u64, (last.0 + last.1).next_multiple_of(BLOCK as u64));
        Some((at, (end - at) as usize))
    }

    /// The next range of a stream, behind what is under way in it, that holds something of this process's which is only on disk.
    /// An object that crosses the border to the previous range is in neither unless it is looked for; so one block of that range
    /// is examined again.
    fn next_in(&self, ahead: &Ahead, reads: &Reads) -> Option<(u64, usize)> {
        let own = reads.iter().filter(|read| read.stream == ahead.stream);
        let (block, cluster) = (BLOCK as u64, self.books.cluster_bytes() as u64);
        if ahead.backwards {
            let before = own.map(|read| read.at).min().map_or(ahead.from, |at| at.min(ahead.from));
            let (place, object) = self.books.previous_object(before, is_wanting)?;
            let end = (offset(place) + object.len as u64).next_multiple_of(block);
            let from = end.saturating_sub(ahead.len as u64).min(offset(place) / block * block);
            let from = from.max(offset(place) / cluster * cluster);
            return self.trimmed(from, (end - from) as usize);
        }
        let from = own.map(Read::end).max().map_or(ahead.from, |end| end.max(ahead.from));
        let (place, object) = self.books.next_object(from.saturating_sub(block), is_wanting)?;
        let at = offset(place) / block * block;
        let own_end = (offset(place) + object.len as u64).next_multiple_of(block);
        let end = (at + ahead.len as u64).max(own_end).min((at / cluster + 1) * cluster);
        self.trimmed(at, (end - at) as usize)
    }
}

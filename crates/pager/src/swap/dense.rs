//! Recompression before write-back: what the shrinker would write next is first made dense.
//!
//! An object that lz4 stored and that memory pressure meets with its reference bit clear has been idle for a whole turn of the
//! list. Neither the time to compress it well nor the more expensive read is likely to be missed. So it is not written yet but
//! stored anew with zstd, in as large a unit as its neighbours allow (16 KiB, or 64 KiB where memory is used in sequence;
//! randomly read memory stays as it is cut). It goes to the tail of the list with its bit clear, and is written when met again.
//! What gains less than an eighth is marked and written at once.
//!
//! ```text
//! met, idle, lz4 ─▶ aside ─ parts found, marked, decompressed ─▶ compressed ─▶ all as before? stored, parts released
//!                              with the lock, several           without it       with it; else nothing changes
//! ```
//! This is done where it costs less than the bytes that it spares the disk (`worth`). Without a disk tier nothing is about to be
//! written, so nothing is recompressed here (see `densify` for that). Nor is it done while the limit is exceeded: whatever waits
//! then waits for room, which a write makes sooner.
//!
//! Rules:
//! - An object that is being written is left alone, and one that is being recompressed is not written: see [`object::HELD`]. The
//!   mark also distinguishes a part from another object that came to lie at its place meanwhile.
//! - An object set aside is on no list. It goes back to its list whatever becomes of it, and in a forked child at once.
//! - As in `densify`, parts are replaced only if all pages that refer to them are found, and all of these change to the new
//!   object under one hold of the lock. What cannot be decompressed, does not get smaller or finds no place stays as it is.

use super::{MOST_PAGES, Swap};
use crate::fault::deliver::decode;
use crate::frames::arena::PAGE;
use crate::inject::Site;
use crate::pager::Pager;
use crate::pool::object::{self, Header};
use crate::pool::relocate;
use crate::state::{BLOCK, State};
use core::sync::atomic::Ordering::*;
use uzswap_mm::codec::{Algorithm, Compressor, Encoding};
use uzswap_mm::pageset::PageSet;
use uzswap_mm::pagetable::{HINT_RANDOM, HINT_SEQUENTIAL, Tag};
use uzswap_mm::shrinker::Entry;
use uzswap_mm::trace::{Kind, Record};
use uzswap_sys::thread;

/// Objects set aside at once: some two milliseconds of work, for which ended writes have to wait.
pub(super) const MOST_ASIDE: usize = 8;
/// Bytes recompressed between two holds of the lock.
const ROOM: usize = 2 * BLOCK;

/// The writing thread's tools for recompression; made when first needed, with the lock held.
#[derive(Default)]
pub(super) struct Packer {
    tools: Option<Box<Tools>>,
    /// When the current work began (monotonic nanoseconds).
    began: u64,
}

struct Tools {
    compressor: Compressor,
    plain: Vec<u8>,
    packed: Vec<u8>,
    lots: Vec<Lot>,
}

impl Tools {
    /// Where the pages of the next unit go.
    fn end(&self) -> usize {
        self.lots.last().map_or(0, |lot| lot.at + PAGE * lot.unit.pages())
    }
}

/// A unit that is being recompressed.
struct Lot {
    unit: Unit,
    /// Offset of its pages, and of what they are compressed to.
    at: usize,
    /// The compressed result, if there is one.
    packed: Option<(Encoding, usize)>,
}

impl Lot {
    /// Bytes that it saves.
    fn gained(&self) -> usize {
        self.packed.map_or(0, |(_, len)| self.unit.bytes.saturating_sub(len))
    }
}

/// Neighbouring objects that are to become one.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    /// The one that was met.
    entry: Entry,
    vpn: u64,
    order: u8,
    /// Pages that refer to it (a bit each).
    live: u16,
    /// Handle and order of each part.
    parts: [(u32, u8); MOST_PAGES],
    count: usize,
    /// Compressed bytes of all parts.
    bytes: usize,
}

impl Unit {
    fn new(entry: Entry, vpn: u64, order: u8) -> Self {
        Self { entry, vpn, order, live: 0, parts: [(0, 0); MOST_PAGES], count: 0, bytes: 0 }
    }

    fn add(&mut self, handle: u32, head: &Header, live: u16, at: usize) {
        self.live |= live << at;
        self.parts[self.count] = (handle, head.order);
        self.count += 1;
        self.bytes += head.len;
    }

    fn pages(&self) -> usize {
        1 << self.order
    }

    /// Its parts: the object, and the page of the unit at which it begins.
    fn parts(&self) -> impl Iterator<Item = (Entry, usize, u8)> + use<> {
        let (vpn, parts) = (self.vpn, self.parts);
        let mut at = 0;
        parts.into_iter().take(self.count).map(move |(handle, order)| {
            let from = at;
            at += 1 << order;
            (Entry { vpn: vpn + from as u64, handle }, from, order)
        })
    }
}

/// Whether an object is worth trying: stored by lz4, idle, not held, not tried before, and not on disk already. (What was set
/// aside may have gone, and a large block may lie there.)
pub(super) fn is_warm(head: &Header) -> bool {
    let flags = object::HELD | object::REFERENCED | object::TRIED | object::ON_DISK;
    head.order <= object::SMALL && matches!(head.encoding, Encoding::Lz4) && head.flags & flags == 0
}

impl State {
    /// The largest unit that an object can form with its neighbours. None if it is not to be recompressed (any more).
    fn unit_of(&self, entry: Entry, may: impl Fn(u8) -> bool) -> Option<Unit> {
        let (out, copies) = self.pages_of(entry)?;
        let head = self.header_of(entry);
        if !is_warm(&head) || out != self.live_of(entry.handle) || copies != 0 {
            return None;
        }
        let hints = self.pt.hints(entry.vpn);
        let orders: &[u8] = match hints {
            _ if hints & HINT_RANDOM != 0 => &[],
            _ if hints & HINT_SEQUENTIAL != 0 => &[4, 2],
            _ => &[2],
        };
        let larger = orders.iter().copied().filter(|order| *order > head.order && may(*order));
        let merged = larger.filter_map(|order| self.gather(entry, order)).next();
        merged.or_else(|| {
            let mut alone = Unit::new(entry, entry.vpn, head.order);
            alone.add(entry.handle, &head, out, 0);
            Some(alone)
        })
    }

    /// A unit of this order around an object, if all of it is out, warm and idle.
    fn gather(&self, entry: Entry, order: u8) -> Option<Unit> {
        let mut unit = Unit::new(entry, entry.vpn & !((1 << order) - 1), order);
        let mut at = 0;
        while at < unit.pages() {
            let vpn = unit.vpn + at as u64;
            let pte = self.pt.get(vpn);
            if pte.tag() != Tag::Compressed || pte.index() != 0 {
                return None;
            }
            let part = Entry { vpn, handle: pte.handle() };
            if self.header_of(part).order > object::SMALL {
                return None;
            }
            let (head, (out, copies)) = (self.header_of(part), self.pages_of(part)?);
            let all = ((1u32 << (1 << head.order)) - 1) as u16;
            if !is_warm(&head) || out != all || copies != 0 || at + (1 << head.order) > unit.pages() {
                return None;
            }
            unit.add(part.handle, &head, out, at);
            at += 1 << head.order;
        }
        Some(unit)
    }

    /// Decompresses the parts of a unit and marks them; false if one is damaged.
    fn unpack(&mut self, unit: &Unit, plain: &mut [u8]) -> bool {
        for (part, from, order) in unit.parts() {
            if !decode(self, part.handle, &mut plain[from * PAGE..][..PAGE << order]) {
                return false;
            }
        }
        unit.parts().for_each(|(part, ..)| object::set_flags(self.object(part.handle), object::PACKING, 0));
        true
    }

    /// Takes the mark off those parts that are still there; returns whether all are, with all their pages.
    fn unmark(&mut self, unit: &Unit) -> bool {
        let mut intact = true;
        for (part, from, order) in unit.parts() {
            let pages = self.pages_of(part);
            let marked = pages.is_some() && self.header_of(part).flags & object::WAITING == object::PACKING;
            let all = ((1u32 << (1 << order)) - 1) as u16;
            intact &= marked && pages == Some((unit.live >> from & all, 0));
            if marked {
                object::set_flags(self.object(part.handle), 0, object::PACKING);
            }
        }
        intact
    }
}

impl Swap {
    /// Puts what was set aside back on the list; also in a forked child, where nobody continues the parent's recompression.
    pub(super) fn give_up_recompression(&mut self, s: &mut State) {
        for unit in core::mem::take(&mut self.packing) {
            s.unmark(&unit);
            self.shrinker.rotate(unit.entry);
        }
        while let Some(entry) = self.aside.pop() {
            self.shrinker.rotate(entry);
        }
    }
}

impl Packer {
    /// Space for the pages of one more unit, if there is any. Call it with the lock held, as it may allocate.
    fn plain(&mut self, unit: &Unit) -> Option<&mut [u8]> {
        let tools = self.tools.get_or_insert_with(|| {
            let compressor = Compressor::new(Algorithm::Zstd(1));
            Box::new(Tools {
                compressor,
                plain: vec![0; ROOM],
                packed: vec![0; ROOM],
                lots: Vec::with_capacity(MOST_ASIDE),
            })
        });
        let at = tools.end();
        let room = tools.plain.get_mut(at..at + PAGE * unit.pages());
        room.filter(|_| tools.lots.len() < MOST_ASIDE)
    }

    /// Adds a unit whose pages were put there.
    fn add(&mut self, unit: Unit) {
        let Some(tools) = &mut self.tools else { return };
        tools.lots.push(Lot { unit, at: tools.end(), packed: None });
    }

    /// Compresses what was put there; a unit that gains less than an eighth of what its parts take stays without a result.
    pub(super) fn compress(&mut self) {
        let Some(Tools { compressor, plain, packed, lots }) = self.tools.as_deref_mut() else { return };
        for lot in lots {
            let bytes = PAGE * lot.unit.pages();
            let most = (lot.unit.bytes - lot.unit.bytes / 8).min(bytes);
            lot.packed = compressor.compress(&plain[lot.at..][..bytes], &mut packed[lot.at..][..most]);
        }
    }

    /// The units being recompressed, first to last, and whether each has a result.
    #[cfg(test)]
    pub(super) fn units(&self) -> impl Iterator<Item = (&Unit, bool)> {
        self.tools.iter().flat_map(|tools| &tools.lots).map(|lot| (&lot.unit, lot.packed.is_some()))
    }
}

impl Pager {
    /// Recompresses what was set aside. Call it without the lock.
    pub(super) fn make_dense(&self, packer: &mut Packer) {
        loop {
            // Not in the loop's condition: the lock would be held throughout its body.
            let begun = self.begin_dense(&mut self.state.lock(), packer);
            if !begun {
                return;
            }
            packer.compress();
            self.end_dense(&mut self.state.lock(), packer);
            self.swap_progressed();
        }
    }

    /// Takes as many of the objects set aside as there is space for, marks their parts and decompresses them; returns whether
    /// there are any. (Several under one hold of the lock, as others want it too.)
    pub(super) fn begin_dense(&self, s: &mut State, packer: &mut Packer) -> bool {
        let Some(mut swap) = s.swap.take() else { return false };
        packer.began = thread::now_ns();
        let folios = &self.group.folios;
        let may = |order: u8| folios.allows(order) && folios.unit(order).is_none_or(|unit| unit >= order);
        while let Some(entry) = swap.aside.first().copied() {
            match s.unit_of(entry, may) {
                Some(unit) => {
                    let Some(plain) = packer.plain(&unit) else { break };
                    if s.unpack(&unit, plain) {
                        packer.add(unit);
                        swap.packing.push(unit);
                    } else {
                        self.leave_warm(s, &mut swap, entry);
                    }
                }
                None => swap.shrinker.rotate(entry),
            }
            swap.aside.remove(0);
        }
        let any = !swap.packing.is_empty();
        s.swap = Some(swap);
        any
    }

    /// Stores the results of those units that have not changed.
    pub(super) fn end_dense(&self, s: &mut State, packer: &mut Packer) {
        let Some(tools) = packer.tools.as_deref_mut() else { return };
        let Some(mut swap) = s.swap.take() else { return };
        swap.packing.clear();
        let mut lots = core::mem::take(&mut tools.lots);
        let (pages, gained) =
            lots.iter().fold((0, 0), |(pages, gained), lot| (pages + lot.unit.pages(), gained + lot.gained()));
        swap.worth.tried(pages, gained, thread::now_ns() - packer.began);
        for lot in lots.drain(..) {
            self.end_lot(s, &mut swap, tools, &lot);
        }
        tools.lots = lots;
        s.swap = Some(swap);
        self.me().pool.store(s.pool.held_bytes() as u64, Relaxed);
    }

    fn end_lot(&self, s: &mut State, swap: &mut Swap, tools: &mut Tools, lot: &Lot) {
        let unit = &lot.unit;
        if !s.unmark(unit) {
            swap.shrinker.rotate(unit.entry);
            return;
        }
        let Some(handle) = lot.packed.and_then(|packed| self.put_dense(s, lot, packed, tools)) else {
            self.leave_warm(s, swap, unit.entry);
            return;
        };
        // Only what was gained counts as met: pressure that wants more goes on.
        let left = s.header_of(Entry { vpn: unit.vpn, handle }).len;
        swap.shrinker.met(unit.pages() * (unit.bytes - left) / unit.bytes);
        let (pages, c) = (u64::from(unit.live.count_ones()), self.counters());
        c.recompressed_pages.fetch_add(pages, Relaxed);
        c.recompressed_idle_pages.fetch_add(pages, Relaxed);
        swap.shrinker.rotate(Entry { vpn: unit.vpn, handle });
    }

    /// An object that cannot be made denser is the next to be met, and is then written as it is.
    fn leave_warm(&self, s: &mut State, swap: &mut Swap, entry: Entry) {
        object::set_flags(s.object(entry.handle), object::TRIED, 0);
        let pages = u64::from(s.live_of(entry.handle).count_ones());
        self.counters().reject_recompress_poor.fetch_add(pages, Relaxed);
        swap.shrinker.put_back(entry);
    }

    /// Stores the new object in place of the parts. None if there is no room for both, or the codec was wrong.
    fn put_dense(
        &self,
        s: &mut State,
        lot: &Lot,
        (encoding, len): (Encoding, usize),
        tools: &mut Tools,
    ) -> Option<u32> {
        if self.inject(Site::Pool).is_some() {
            return None;
        }
        let unit = &lot.unit;
        let head = Header { len, encoding, order: unit.order, vpn: unit.vpn, flags: 0 };
        let mut hashes = [0; 16 * MOST_PAGES];
        for (part, from, order) in unit.parts() {
            let hashes = &mut hashes[16 * from..][..16 << order];
            hashes.copy_from_slice(object::hashes(s.object(part.handle)));
        }
        let hashes = &hashes[..16 << unit.order];
        let (live, set) = (PageSet::from(unit.live), |place: &mut [u8]| object::set_hashes(place, 0, hashes));
        let new = s.put_object(head, live, set, &tools.packed[lot.at..][..len])?.raw();
        if self.group.folios.verify.load(Relaxed) != 0
            && !decode(s, new, &mut tools.plain[lot.at..][..unit.pages() * PAGE])
        {
            (0..unit.pages()).filter(|i| unit.live & (1 << i) != 0).for_each(|i| s.release(new, i));
            self.counters().folios.reject_verify_fail.fetch_add(1, Relaxed);
            return None;
        }
        for (part, _, order) in unit.parts() {
            let share = len * (1 << order) / unit.pages();
            s.note(Record::of_object(Kind::Resize, part.vpn, order, share));
        }
        relocate::repoint(&mut s.pt, &head, &live, new);
        for (part, from, order) in unit.parts() {
            let mine = |i: &usize| unit.live & (1 << (from + i)) != 0;
            (0..1usize << order).filter(mine).for_each(|i| s.release(part.handle, i));
        }
        Some(new)
    }
}

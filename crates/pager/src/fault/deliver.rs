//! What a fault brings that is not in memory: zeros, and what is in the pool.
//!
//! ```text
//! frames (contiguous ones, else as they come) ── filled: cleared, or decompressed and checked ── one MOVE ── counted
//! ```
//! A block that is decompressed comes whole, so that none is decompressed twice for one use. What could not be
//! delivered all the same stays in a small cache for the next faults on it (`Decoded`), and is counted.
//!
//! Invariant: a page's entry changes only after it was moved in; until then what the pool holds is the page. Everything
//! here runs with the pager's lock held.

use crate::fault::{EventPending, Request};
use crate::frames::arena::PAGE;
use crate::group::folio::{MAX_ORDER, USUAL_UNIT};
use crate::inject::Site;
use crate::pager::Pager;
use crate::pool::decompress::{decode_object, whole_block};
use crate::pool::object::{self, Header};
use crate::state::{BLOCK_PAGES, Decoded, FOLIO_PAGES, LEFT_MOST, State};
use core::sync::atomic::Ordering::*;
use uzswap_mm::codec::Encoding;
use uzswap_mm::lru::List;
use uzswap_mm::pageset::PageSet;
use uzswap_mm::pagetable::{HINT_RANDOM, HINT_WRITTEN, Pte, Tag};
use uzswap_mm::trace::{self, Record};
use uzswap_mm::zone::Kind;
use uzswap_sys::uffd::Partial;

/// Order of the largest blocks of which one page alone is brought. To decompress 16 KiB of lz4 as far as a page costs 3 µs
/// on average, to store a page anew 6 and the room it has in its block; from 32 KiB on the block comes, and is stored anew.
pub(crate) const SMALL_BLOCK: u8 = 2;

/// One delivery of so many to blocks that are written to keeps its copies all the same: left clean, they tell that the block no
/// longer is. (Whole deliveries, so that folios are not cut into what is clean and what is not; a whole block tells more.)
const PROBE_EVERY: u32 = 8;
const PROBE_BLOCKS_EVERY: u32 = 2;

/// What a fault brings, counted when it is done.
pub(crate) struct Delivery {
    r: Request,
    /// Pages mapped, and those of them that came from the pool.
    pages: usize,
    from_pool: usize,
    /// Whether staged pages were taken back.
    pub(crate) taken_back: bool,
    /// Order of the largest folio mapped in one piece, and of the largest wanted.
    largest: u8,
    wanted: u8,
    /// Whether contiguous frames were wanted and not had; whether that is so of the piece in hand, and of one with pages of a block.
    missed: bool,
    misses: bool,
    block_missed: bool,
    /// Whether only the page touched is to come (the lab's comparison).
    pub(crate) only_touched: bool,
    /// Whether the page touched comes alone by choice: what is around it is read at random.
    alone: bool,
    /// Whether the piece in hand is mapped by a copy of what was filled.
    copied: bool,
    /// A random number where the pages are part of a sequence that is known for a while.
    pub(crate) passing: Option<u64>,
}

impl Delivery {
    /// The fault it is for.
    pub(crate) fn request(&self) -> Request {
        self.r
    }

    pub(crate) fn of(r: Request, alone: bool) -> Self {
        Self {
            r,
            passing: None,
            pages: 0,
            from_pool: 0,
            taken_back: false,
            largest: 0,
            wanted: 0,
            missed: false,
            misses: false,
            block_missed: false,
            only_touched: false,
            alone,
            copied: false,
        }
    }
}

impl Pager {
    /// Brings pages that are zero, never seen or in the pool: one run, at most `max`.
    pub(crate) fn bring_out(
        &self,
        s: &mut State,
        vpn: u64,
        max: usize,
        d: &mut Delivery,
    ) -> Result<usize, EventPending> {
        let mut n = 1;
        let comes = |tag: Tag| matches!(tag, Tag::Zero | Tag::Compressed) || (tag == Tag::None && !s.tracking);
        while n < max && comes(s.pt.get(vpn + n as u64).tag()) {
            n += 1;
        }
        // (Only what lies like a huge page comes as large as one.)
        let most = if vpn.is_multiple_of(FOLIO_PAGES as u64) { MAX_ORDER } else { MAX_ORDER - 1 };
        let order = (n.ilog2() as u8).min(most);
        let short = match self.without_move {
            false => s.zone.free_slots(Kind::Frame) < n && self.excess(s) + self.margin() as isize > 0,
            // (What comes takes memory from the kernel, frames or not.)
            true => self.excess(s) + (n * PAGE) as isize > 0,
        };
        if short && !s.keeps_all && !self.at_floor(s) {
            self.direct_reclaim(s, n)?;
        }
        let (frames, n) = self.frames_for(s, vpn, order, d);
        if n == 0 {
            return Ok(0);
        }
        let layout = self.layout;
        let to = if frames.is_none() { s.scratch(n * PAGE).as_mut_ptr() } else { core::ptr::null_mut() };
        let buffer = match frames {
            // SAFETY: frames just allocated are this function's alone.
            Some((slot, _)) => unsafe { layout.frames_mut(slot, n) },
            // SAFETY: there is scratch for n pages, which nothing else uses meanwhile.
            None => unsafe { core::slice::from_raw_parts_mut(to, n * PAGE) },
        };
        let (filled, src) = (self.fill(s, vpn, buffer, d.alone), buffer.as_ptr() as usize);
        if filled == 0 {
            if let Some((slot, o)) = frames {
                s.zone.free(Kind::Frame, slot, o);
            }
            return if vpn == d.r.vpn { self.poison(s, vpn).map(|()| 0) } else { Ok(0) };
        }
        // (By what is to come, not by what single frames there are for it: those would be filled one after the other, and never go.)
        d.copied = frames.is_none() || (self.comes_by_copy(s, 1 << order) && self.may_charge(s, filled));
        let brought = self.map_filled(s, vpn, frames, src, filled, d)?;
        if brought <= BLOCK_PAGES {
            self.brought_out::<BLOCK_PAGES>(s, vpn, brought, d);
        } else {
            self.brought_out::<FOLIO_PAGES>(s, vpn, brought, d);
        }
        Ok(brought)
    }

    /// Maps pages that were filled for a delivery: the frames they are in, or copies of what is at `src`. How many came.
    fn map_filled(
        &self,
        s: &mut State,
        vpn: u64,
        frames: Option<(u32, u8)>,
        src: usize,
        filled: usize,
        d: &Delivery,
    ) -> Result<usize, EventPending> {
        let (touched, copied) = (d.r.vpn, d.copied);
        let filled = if frames.is_some() { filled } else { self.copyable(vpn, filled, touched) };
        if filled == 0 {
            return Ok(0);
        }
        let result = match frames {
            Some((slot, _)) if !copied => self.move_in_up_to(s, vpn, slot, filled),
            // SAFETY: the caller filled the buffer, which is readable.
            _ => unsafe { self.copy(s, vpn, src, filled * PAGE) },
        };
        let (brought, error) = match result {
            Ok(()) => (filled, 0),
            Err((done, e)) => (done / PAGE, e),
        };
        if copied {
            s.rss += brought * PAGE;
        }
        if let Some((slot, o)) = frames {
            let moved = if copied { 0 } else { brought };
            if moved == FOLIO_PAGES {
                self.brought_huge(s, vpn, slot);
            }
            self.free_slots_of(s, vpn, slot, moved);
            s.zone.free_run(Kind::Frame, slot + moved as u32, (1 << o) - moved);
        }
        match error {
            _ if brought > 0 => Ok(brought),
            libc::EAGAIN => Err(EventPending),
            libc::EEXIST if filled == 1 => {
                self.uffd().wake(vpn as usize * PAGE, PAGE);
                Ok(0)
            }
            // Past the end of its mapping, read-only, or a neighbour is there: by copy, as much of a block as goes.
            // (The frames were not moved, and nobody else has had them since.)
            libc::EEXIST | libc::EINVAL | libc::ENOENT | libc::EBUSY | libc::EFAULT => {
                let n = if frames.is_some() { filled.min(1 << s.largest_block) } else { 1 };
                match self.copyable(vpn, n, touched) {
                    0 => Ok(0),
                    n => self.copy_some(s, vpn, src, n),
                }
            }
            _ => Ok(0),
        }
    }

    /// How many of `n` pages from `vpn` on may be copied for the fault on `touched`: that page alone where the program makes guard
    /// pages. COPY takes those for missing (MOVE does not), and the event of one just made is yet to come.
    fn copyable(&self, vpn: u64, n: usize, touched: u64) -> usize {
        if self.guards.load(Relaxed) == 0 { n } else { usize::from(vpn == touched) }
    }

    /// Copies as many of `n` pages as go, and fit into the mapping; wakes who waits when none does.
    pub(crate) fn copy_some(&self, s: &mut State, vpn: u64, src: usize, mut n: usize) -> Result<usize, EventPending> {
        loop {
            // SAFETY: the caller passes readable memory of ours.
            let copied = match unsafe { self.copy(s, vpn, src, n * PAGE) } {
                Ok(()) => n,
                Err((0, libc::EAGAIN)) => return Err(EventPending),
                Err((0, _)) if n > 1 => {
                    n /= 2;
                    continue;
                }
                Err((bytes, _)) => bytes / PAGE,
            };
            if copied == 0 {
                self.uffd().wake(vpn as usize * PAGE, PAGE);
            }
            s.rss += copied * PAGE;
            return Ok(copied);
        }
    }

    /// Moves in as many of `n` frames as fit into the mapping.
    fn move_in_up_to(&self, s: &State, vpn: u64, slot: u32, mut n: usize) -> Result<(), Partial> {
        let whole = n;
        loop {
            match self.move_in(s, vpn, slot, n) {
                Err((0, libc::EINVAL | libc::ENOENT)) if n > 1 => n /= 2,
                Ok(()) if n < whole => return Err((n * PAGE, libc::EINVAL)),
                result => return result,
            }
        }
    }

    /// Frames for up to 2^order pages at `vpn`, and for how many pages there is room: contiguous ones where there are
    /// any, which then come as one folio; else as many as lie together, the rest of the block following page by page in
    /// the same fault; else, without a frame, what may be copied in, which takes memory from the kernel and must be
    /// charged. The page touched comes in any case.
    fn frames_for(&self, s: &mut State, vpn: u64, order: u8, d: &mut Delivery) -> (Option<(u32, u8)>, usize) {
        let folios = &self.group.folios;
        let injected = self.inject(Site::Frames);
        let refused = injected.is_some() || (order > 0 && self.is_scarce());
        let frames = match injected {
            // Not even single ones.
            Some(bits) if bits % 2 == 0 => None,
            _ => s.zone.alloc_up_to(Kind::Frame, if refused { 0 } else { order }),
        };
        let got = frames.map_or(0, |(_, o)| o);
        d.wanted = d.wanted.max(order);
        d.misses = got < order;
        d.missed |= d.misses;
        if got < order && folios.fallback_off.load(Relaxed) != 0 {
            // (The lab's comparison: the page touched, and a fault for each of the others.)
            if let Some((slot, o)) = frames {
                s.zone.free(Kind::Frame, slot, o);
            }
            d.only_touched = true;
            return if vpn == d.r.vpn { (s.zone.alloc_up_to(Kind::Frame, 0), 1) } else { (None, 0) };
        }
        if frames.is_some() {
            return (frames, 1 << got);
        }
        let n = (1usize << order).min(BLOCK_PAGES);
        if self.may_charge(s, n) {
            return (None, n);
        }
        match self.leave_as_much(s, vpn, n) {
            0 | 1 => {}
            n => return (None, n),
        }
        d.misses |= n > 1;
        d.missed |= n > 1;
        (None, usize::from(vpn == d.r.vpn || self.may_charge(s, 1)))
    }

    /// Whether `n` pages more may be taken from the kernel.
    pub(crate) fn may_charge(&self, s: &State, n: usize) -> bool {
        self.inject(Site::Charge).is_none() && self.excess(s) + (n * PAGE) as isize <= 0
    }

    /// Only for the lab: whether contiguous frames are made scarce for this request.
    fn is_scarce(&self) -> bool {
        let folios = &self.group.folios;
        let one_in = folios.scarce.load(Relaxed);
        one_in != 0 && !folios.scarce_seen.fetch_add(1, Relaxed).is_multiple_of(one_in)
    }

    /// Fills a buffer with the pages from `vpn` on; returns how many it could. Of a block of which one page is wanted `alone`
    /// no more is decompressed than that takes.
    fn fill(&self, s: &mut State, vpn: u64, buffer: &mut [u8], alone: bool) -> usize {
        let n = buffer.len() / PAGE;
        let read = self.read_shared(s, vpn, buffer);
        let mut i = 0;
        while i < n {
            let pte = s.pt.get(vpn + i as u64);
            if pte.tag() != Tag::Compressed {
                buffer[i * PAGE..(i + 1) * PAGE].fill(0);
                i += 1;
                continue;
            }
            if let Some(block) = whole_block(s, vpn, i, n) {
                let out = &mut buffer[i * PAGE..(i + block.pages) * PAGE];
                if block.pages > 1 {
                    self.count_read(s, block.handle);
                }
                if read.binary_search(&i).is_ok() || decode(s, block.handle, out) {
                    i += block.pages;
                    continue;
                }
            }
            // (A damaged block may still have pages that are right.)
            if !self.fill_part(s, vpn + i as u64, pte, &mut buffer[i * PAGE..(i + 1) * PAGE], alone) {
                break;
            }
            i += 1;
        }
        i
    }

    fn count_read(&self, s: &State, handle: u32) {
        let c = &self.counters().folios;
        c.block_read.fetch_add(1, Relaxed);
        if !s.left_behind.is_empty() && s.left_behind.contains(&handle) {
            c.block_read_again.fetch_add(1, Relaxed);
        }
    }

    /// Fills one page from a block of several, decompressing the block once for all of them, or as far as the page if it
    /// is wanted `alone`.
    fn fill_part(&self, s: &mut State, vpn: u64, pte: Pte, page: &mut [u8], alone: bool) -> bool {
        let (handle, index) = (pte.handle(), pte.index());
        let known = s.decoded.iter().position(|d| d.handle == Some(handle));
        let at = known.unwrap_or_else(|| {
            s.decoded_next = (s.decoded_next + 1) % s.decoded.len();
            // (One buffer for large blocks is enough memory.)
            if object::order(s.object(handle)) > USUAL_UNIT { 0 } else { s.decoded_next }
        });
        if known.is_none() || s.decoded[at].pages <= index {
            let pages = 1usize << object::order(s.object(handle));
            if pages > 1 {
                self.count_read(s, handle);
            }
            let wanted = if alone { index + 1 } else { pages };
            let mut bytes = core::mem::take(&mut s.decoded[at].bytes);
            if bytes.len() < pages * PAGE {
                bytes = vec![0; pages * PAGE];
            }
            let decoded = decompress_start(s, handle, &mut bytes[..pages * PAGE], wanted * PAGE);
            s.decoded[at] = Decoded {
                handle: decoded.map(|_| handle),
                pages: decoded.unwrap_or(0) / PAGE,
                bytes,
                vpn: vpn.saturating_sub(index as u64),
                fresh: pages > 1,
            };
            if decoded.is_none() {
                self.counters().folios.block_failed.fetch_add(1, Relaxed);
                return false;
            }
        }
        // Each page is checked when it is used.
        page.copy_from_slice(&s.decoded[at].bytes[index * PAGE..(index + 1) * PAGE]);
        object::hash(page) == object::stored_hash(s.object(handle), index)
    }

    pub(crate) fn brought_out<const MOST: usize>(&self, s: &mut State, vpn: u64, n: usize, d: &mut Delivery) {
        if n == 0 {
            return;
        }
        let c = self.counters();
        let unwritten = s.pt.hints(vpn) & HINT_WRITTEN == 0 || {
            s.probes = s.probes.wrapping_add(1);
            s.probes.is_multiple_of(if n < BLOCK_PAGES { PROBE_EVERY } else { PROBE_BLOCKS_EVERY })
        };
        let crowded = self.crowded_out(s);
        let random = s.pt.hints(vpn) & HINT_RANDOM != 0;
        let mut copies = [None; MOST];
        let (mut from_pool, mut distance) = ([0usize; MOST], None);
        let (mut bound, mut apart) = (None, PageSet::default());
        for (i, copy) in copies.iter_mut().enumerate().take(n) {
            let at = vpn + i as u64;
            let pte = s.pt.get(at);
            match pte.tag() {
                Tag::Compressed => {
                    from_pool[i / 16] += 1;
                    s.swapped -= 1;
                    let this = pte.refault_distance(s.evictions);
                    distance = Some(distance.unwrap_or(this).min(this));
                    let head = Header::read(s.object(pte.handle()));
                    apart.put(i, self.is_incompressible(s, pte, &mut bound));
                    d.block_missed |= d.misses && head.order > 0;
                    if head.flags & object::AHEAD != 0 {
                        s.wanted_ahead(pte.handle());
                    }
                    // A copy of what did not compress would be paid twice; what is read at random is to be stored anew,
                    // page by page, or each read would decompress more than it uses; and where memory is very short
                    // nothing has one. But a page that came alone has its place in the block anyway.
                    let worth = !matches!(head.encoding, Encoding::Raw) && (head.order == 0 || !random);
                    let keep = unwritten && !apart.has(i) && (d.alone && head.order > 0 || worth && !crowded);
                    // Each page has its own fate: only the one written to is known to change.
                    let written = d.r.write && at == d.r.vpn;
                    if written && head.order > 0 {
                        c.folios.block_partial_write.fetch_add(1, Relaxed);
                    }
                    if keep && !written && s.copy_index(at, pte.handle()) == pte.index() {
                        *copy = Some(pte.handle());
                    } else {
                        // (A stub costs next to nothing: also where the block is known to be written to.)
                        *copy = s.release_or_stub(at, pte, !written);
                    }
                }
                Tag::Zero => {
                    s.zeros -= 1;
                    c.folios.swpin_zero.fetch_add(1, Relaxed);
                }
                _ => {}
            }
        }
        if let Some(distance) = distance {
            self.note_missed(from_pool.iter().sum(), distance);
        }
        let list = distance.map_or(List::Inactive, |distance| s.list_of_refault(distance, d.passing));
        s.list_apart(vpn, n, list, &apart, |i| copies[i]);
        for ((at, some), loaded) in (vpn..).step_by(16).zip(copies[..n].chunks(16)).zip(from_pool) {
            note_brought(s, at, some, loaded > 0, d.r.write && (at..at + 16).contains(&d.r.vpn));
            d.from_pool += loaded;
            if loaded > 0 {
                s.loaded_from_pool(at);
            }
        }
        d.pages += n;
        d.largest = d.largest.max(n.ilog2() as u8);
    }

    /// Counts what a fault brought: one fault, of one kind, however many pieces it came in: the dearest of them says which.
    pub(crate) fn count_delivery(&self, s: &mut State, d: &Delivery) {
        let c = self.counters();
        if d.pages == 0 {
            c.refault_staged.fetch_add(u64::from(d.taken_back), Relaxed);
            return;
        }
        if d.from_pool > 0 {
            c.pgmajfault.fetch_add(1, Relaxed);
            c.zswpin.fetch_add(d.from_pool as u64, Relaxed);
        } else {
            c.fault_zero.fetch_add(1, Relaxed);
        }
        if d.missed {
            c.folios.count(d.wanted, |o| &o.anon_fault_fallback);
        }
        // (What is wanted whole may be zeros, or single pages that lie together: nothing is decompressed twice for those.)
        if d.block_missed {
            c.folios.block_fallback.fetch_add(1, Relaxed);
            if d.pages == 1 {
                c.folios.block_fallback_single.fetch_add(1, Relaxed);
            }
        }
        c.folios.count(d.largest, |o| &o.anon_fault_alloc);
        if d.from_pool == d.pages {
            c.folios.count(d.largest, |o| &o.zswpin);
        }
        for i in 0..s.decoded.len() {
            if core::mem::take(&mut s.decoded[i].fresh) {
                self.note_left_behind(s, i, d.alone);
            }
            if d.only_touched {
                s.decoded[i].handle = None;
            }
        }
    }

    /// Remembers a block of which a fault could not deliver all.
    fn note_left_behind(&self, s: &mut State, i: usize, alone: bool) {
        let Some(handle) = s.decoded[i].handle else { return };
        let (vpn, pages) = (s.decoded[i].vpn, 1u64 << object::order(s.object(handle)));
        let left = (vpn..vpn + pages).any(|at| {
            let pte = s.pt.get(at);
            pte.tag() == Tag::Compressed && pte.handle() == handle
        });
        if left {
            self.counters().folios.block_partial_read.fetch_add(1, Relaxed);
            // (What was left by choice is not expected to be wanted.)
            if !alone && s.left_behind.len() < LEFT_MOST {
                s.left_behind.insert(handle);
            }
        }
    }
}

fn note_brought(s: &State, vpn: u64, copies: &[Option<u32>], from_pool: bool, write: bool) {
    if from_pool {
        if s.recorder.is_none() {
            return;
        }
        // (A stub is no copy: without a disk tier there would be none.)
        let is_copy = |copy: &Option<u32>| copy.is_some_and(|handle| !s.is_stub(handle));
        let kept = copies.iter().enumerate().fold(0, |mask, (i, copy)| mask | u16::from(is_copy(copy)) << i);
        s.note(Record::load(vpn, copies.len(), write, kept));
    } else {
        s.note_pages(trace::Kind::Fresh, vpn, copies.len());
    }
}

/// Decompresses an object into `out`, checking every page against its hash.
pub(crate) fn decode(s: &mut State, handle: u32, out: &mut [u8]) -> bool {
    let object = s.object(handle);
    decode_object(&mut s.decompressor, object, out)
}

/// Decompresses an object, which has as many bytes as `out`, until `wanted` of them are there; returns how many are.
fn decompress_start(s: &mut State, handle: u32, out: &mut [u8], wanted: usize) -> Option<usize> {
    let object = s.object(handle);
    let head = Header::read(object);
    let body = &object[object::head_bytes(head.order)..];
    s.decompressor.decompress_start(head.encoding, &body[..head.len], out, wanted).ok()
}

//! Brings the pages of a fault that are zeros, were never touched, or are in the pool.
//!
//! ```text
//! frames (contiguous ones, else as they come) ── filled: cleared, or decompressed and checked ── one MOVE ── counted
//! ```
//! A block that is decompressed comes whole, so that none is decompressed twice for one use. Pages that could not be delivered
//! with their block stay in a small cache (`Decoded`) for the next faults on it, and are counted.
//!
//! Invariant: a page's entry changes only after the page was moved in; until then the pool's contents are the page. All of this
//! module runs with the pager's lock held.

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

/// Order of the largest block of which a page may come alone. Decompressing a 16 KiB block of lz4 as far as the page costs 3 µs
/// on average; storing a page anew costs 6, and the room that it has in its block. From 32 KiB on the whole block comes, and is
/// stored anew.
pub(crate) const SMALL_BLOCK: u8 = 2;

/// Of the deliveries to blocks that are known to be written to, one in this many keeps its copies anyway: pages that then leave
/// clean show that the block is no longer written to. (Whole deliveries, so that folios are not cut into clean and dirty parts. A
/// whole block tells more, so it is probed more often.)
const PROBE_EVERY: u32 = 8;
const PROBE_BLOCKS_EVERY: u32 = 2;

/// What one fault brings, counted when the fault is done.
pub(crate) struct Delivery {
    r: Request,
    /// Pages mapped, and how many of them came from the pool.
    pages: usize,
    from_pool: usize,
    /// Whether staged pages were taken back.
    pub(crate) taken_back: bool,
    /// Order of the largest folio mapped in one piece, and of the largest wanted.
    largest: u8,
    wanted: u8,
    /// Whether a piece was smaller than wanted, as contiguous frames or room were missing: any piece, the current one, and one with
    /// pages of a block.
    missed: bool,
    misses: bool,
    block_missed: bool,
    /// Whether only the touched page may come (the lab's comparison).
    pub(crate) only_touched: bool,
    /// Whether the touched page comes alone by choice, as its surroundings are read at random.
    alone: bool,
    /// Whether the current piece is mapped as a copy of the filled frames.
    copied: bool,
    /// A random number, if the pages belong to a sequence that has gone on for a while.
    pub(crate) passing: Option<u64>,
}

impl Delivery {
    /// The fault that this is for.
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
    /// Brings one run of at most `max` pages that are zero, untouched or in the pool.
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
        // Only what lies like a huge page comes as large as one.
        let most = if vpn.is_multiple_of(FOLIO_PAGES as u64) { MAX_ORDER } else { MAX_ORDER - 1 };
        let order = (n.ilog2() as u8).min(most);
        let short = match self.without_move {
            false => s.zone.free_slots(Kind::Frame) < n && self.excess(s) + self.margin() as isize > 0,
            // Without MOVE, pages that come take memory from the kernel, whether there are frames or not.
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
            // SAFETY: the frames were just allocated, so nothing else uses them.
            Some((slot, _)) => unsafe { layout.frames_mut(slot, n) },
            // SAFETY: the scratch buffer has room for n pages, and nothing else uses it meanwhile.
            None => unsafe { core::slice::from_raw_parts_mut(to, n * PAGE) },
        };
        let (filled, src) = (self.fill(s, vpn, buffer, d.alone), buffer.as_ptr() as usize);
        if filled == 0 {
            if let Some((slot, o)) = frames {
                s.zone.free(Kind::Frame, slot, o);
            }
            return if vpn == d.r.vpn { self.poison(s, vpn).map(|()| 0) } else { Ok(0) };
        }
        // This goes by how much is to come, not by which single frames there are for it: those would be filled one after the
        // other, and would never go.
        d.copied = frames.is_none() || (self.comes_by_copy(s, 1 << order) && self.may_charge(s, filled));
        let brought = self.map_filled(s, vpn, frames, src, filled, d)?;
        if brought <= BLOCK_PAGES {
            self.brought_out::<BLOCK_PAGES>(s, vpn, brought, d);
        } else {
            self.brought_out::<FOLIO_PAGES>(s, vpn, brought, d);
        }
        Ok(brought)
    }

    /// Maps pages that were filled for a delivery: the frames they are in, or copies of the bytes at `src`. Returns how many
    /// came.
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
            // SAFETY: `src` is the buffer that the caller filled, so it is readable.
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
            // The run goes past the end of its mapping, the mapping is read-only, or a neighbour is there: copy as much of a
            // block as goes. (The frames were not moved, and nobody else has had them since.)
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

    /// How many of `n` pages from `vpn` on may be copied for the fault on `touched`. Only that page where the program makes guard
    /// pages: COPY takes guards for missing pages (MOVE does not), and the event of one just made is yet to come.
    fn copyable(&self, vpn: u64, n: usize, touched: u64) -> usize {
        if self.guards.load(Relaxed) == 0 { n } else { usize::from(vpn == touched) }
    }

    /// Copies as many of `n` pages as fit into the mapping; wakes the waiting thread when none does.
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

    /// Finds frames for up to 2^order pages at `vpn`; returns them, and how many pages may come. Contiguous frames, if there are
    /// any, come as one folio. Else the longest run there is; the rest of the block then follows page by page in the same fault.
    /// Where there is no frame at all, pages may be copied in, which takes memory from the kernel and must be charged. The
    /// touched page comes in any case.
    fn frames_for(&self, s: &mut State, vpn: u64, order: u8, d: &mut Delivery) -> (Option<(u32, u8)>, usize) {
        let folios = &self.group.folios;
        let injected = self.inject(Site::Frames);
        let refused = injected.is_some() || (order > 0 && self.is_scarce());
        let frames = match injected {
            // Not even single frames.
            Some(bits) if bits % 2 == 0 => None,
            _ => s.zone.alloc_up_to(Kind::Frame, if refused { 0 } else { order }),
        };
        let got = frames.map_or(0, |(_, o)| o);
        d.wanted = d.wanted.max(order);
        d.misses = got < order;
        if got < order && folios.fallback_off.load(Relaxed) != 0 {
            // The lab's comparison: the touched page, and a fault for each of the others.
            if let Some((slot, o)) = frames {
                s.zone.free(Kind::Frame, slot, o);
            }
            d.only_touched = true;
            d.missed |= d.misses;
            return if vpn == d.r.vpn { (s.zone.alloc_up_to(Kind::Frame, 0), 1) } else { (None, 0) };
        }
        let n = match frames {
            Some(_) => 1 << got,
            None => self.copied_for(s, vpn, (1 << order).min(BLOCK_PAGES), d),
        };
        // Copied pages count as one folio, too.
        d.misses = order > 0 && n < 1 << order;
        d.missed |= d.misses;
        (frames, n)
    }

    /// How many of up to `n` pages from `vpn` on may come as copies, which takes memory from the kernel.
    fn copied_for(&self, s: &State, vpn: u64, n: usize, d: &Delivery) -> usize {
        if self.may_charge(s, n) {
            return n;
        }
        match self.leave_as_much(s, vpn, n) {
            0 | 1 => usize::from(vpn == d.r.vpn || self.may_charge(s, 1)),
            n => n,
        }
    }

    /// Whether `n` more pages may be taken from the kernel.
    pub(crate) fn may_charge(&self, s: &State, n: usize) -> bool {
        self.inject(Site::Charge).is_none() && self.excess(s) + (n * PAGE) as isize <= 0
    }

    /// For the lab only: whether this request is to find contiguous frames scarce.
    fn is_scarce(&self) -> bool {
        let folios = &self.group.folios;
        let one_in = folios.scarce.load(Relaxed);
        one_in != 0 && !folios.scarce_seen.fetch_add(1, Relaxed).is_multiple_of(one_in)
    }

    /// Fills a buffer with the pages from `vpn` on, and returns how many it could fill. Of a block of which one page is wanted
    /// `alone`, it decompresses no more than that page needs.
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
            // A damaged block may still have pages that are right.
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

    /// Fills one page from a block of several. It decompresses the block once for all of them, or only as far as the page if that
    /// is wanted `alone`.
    fn fill_part(&self, s: &mut State, vpn: u64, pte: Pte, page: &mut [u8], alone: bool) -> bool {
        let (handle, index) = (pte.handle(), pte.index());
        let known = s.decoded.iter().position(|d| d.handle == Some(handle));
        let at = known.unwrap_or_else(|| {
            s.decoded_next = (s.decoded_next + 1) % s.decoded.len();
            // One buffer for large blocks is enough memory.
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
                    // No copy is kept of what did not compress, as it would be paid for twice; nor of what is read at random,
                    // which must be stored anew, page by page, or each read would decompress more than it uses; nor of anything
                    // where memory is very short. But a page that came alone has its place in the block anyway.
                    let worth = !matches!(head.encoding, Encoding::Raw) && (head.order == 0 || !random);
                    let keep = unwritten && !apart.has(i) && (d.alone && head.order > 0 || worth && !crowded);
                    // Each page keeps its own fate: only the one written to is known to change.
                    let written = d.r.write && at == d.r.vpn;
                    if written && head.order > 0 {
                        c.folios.block_partial_write.fetch_add(1, Relaxed);
                    }
                    if keep && !written && s.copy_index(at, pte.handle()) == pte.index() {
                        *copy = Some(pte.handle());
                    } else {
                        // A stub costs next to nothing, so it is worth having even where the block is known to be written to.
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

    /// Counts what a fault brought. It is one fault of one kind, however many pieces it came in: the most expensive piece
    /// decides.
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
        // A run wanted whole may be zeros, or single pages that lie together: nothing is decompressed twice for those.
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

    /// Remembers a block that a fault could not deliver whole.
    fn note_left_behind(&self, s: &mut State, i: usize, alone: bool) {
        let Some(handle) = s.decoded[i].handle else { return };
        let (vpn, pages) = (s.decoded[i].vpn, 1u64 << object::order(s.object(handle)));
        let left = (vpn..vpn + pages).any(|at| {
            let pte = s.pt.get(at);
            pte.tag() == Tag::Compressed && pte.handle() == handle
        });
        if left {
            self.counters().folios.block_partial_read.fetch_add(1, Relaxed);
            // Pages left behind by choice are not expected to be wanted.
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
        // A stub is no copy: without a disk tier there would be none.
        let is_copy = |copy: &Option<u32>| copy.is_some_and(|handle| !s.is_stub(handle));
        let kept = copies.iter().enumerate().fold(0, |mask, (i, copy)| mask | u16::from(is_copy(copy)) << i);
        s.note(Record::load(vpn, copies.len(), write, kept));
    } else {
        s.note_pages(trace::Kind::Fresh, vpn, copies.len());
    }
}

/// Decompresses an object into `out`, and checks each page against its hash.
pub(crate) fn decode(s: &mut State, handle: u32, out: &mut [u8]) -> bool {
    let object = s.object(handle);
    decode_object(&mut s.decompressor, object, out)
}

/// Decompresses an object, which is as long as `out`, until `wanted` bytes are there; returns how many are.
fn decompress_start(s: &mut State, handle: u32, out: &mut [u8], wanted: usize) -> Option<usize> {
    let object = s.object(handle);
    let head = Header::read(object);
    let body = &object[object::head_bytes(head.order)..];
    s.decompressor.decompress_start(head.encoding, &body[..head.len], out, wanted).ok()
}

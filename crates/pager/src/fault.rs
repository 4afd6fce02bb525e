//! The fault path.
//!
//! One thread serves the process's faults and events. It runs at `SCHED_IDLE` *on the CPU where the program faults*:
//! a CPU that runs only idle-policy threads counts as idle, so the kernel wakes the faulting thread right there, where
//! it preempts the handler; the handler is still runnable when the next fault blocks the program, and continues
//! without any wake-up. That costs 10 µs a fault where a handler elsewhere costs 45 to 110 (table in ARCHITECTURE.md).
//! Where the CPU is contended the ticker lifts the handler to the normal policy.
//!
//! ```text
//! message ─ under the lock ─ page table ─┬ staged: move the frame back (no decompression)
//!                                        ├ compressed: decompress into free frames ─┬─ one MOVE into the program
//!                                        └ zero, or never seen: clear free frames ──┘
//! ```
//! A message is read only with the lock held: an unmap event must have been processed before anything is evicted (or
//! brought in) after it was read, else a new mapping at the same address would be taken for the old one. While an
//! event is unread the kernel answers EAGAIN to MOVE and COPY, which closes the other side.
//!
//! How much one fault brings follows the access: a fault at the end of an earlier one is sequential and widens the
//! window fourfold up to 512 KiB; any other brings one page. A block that is decompressed for it comes whole: in
//! contiguous frames and one piece, else decompressed once and page by page in the same fault, else the page touched
//! alone (see `frames_for`).

use crate::arena::PAGE;
use crate::inject::Site;
use crate::object::{self, Header};
use crate::pager::Pager;
use crate::placement::Helpers;
use crate::state::{BLOCK_PAGES, Decoded, FOLIO_PAGES, LEFT_MOST, State};
use crate::swap::ReadBuffer;
use core::sync::atomic::Ordering::*;
use uzswap_mm::codec::Encoding;
use uzswap_mm::pagetable::{HINT_RANDOM, HINT_SEQUENTIAL, HINT_WRITTEN, Pte, Tag};
use uzswap_mm::trace::{self, Record};
use uzswap_mm::zone::Kind;
use uzswap_sys::uffd::{Message, Partial};
use uzswap_sys::{lock, sys, thread};

/// Pages one fault brings at most. Mapping 64 KiB in one call costs 5 µs in all, 512 KiB 16: beyond that little is won.
const WINDOW_PAGES: usize = 128;

/// How often a full group is looked at again while faults wait for room (milliseconds).
const FULL_MS: i32 = 20;

/// How long a fault waits for the swap file at most, when the limit is exceeded: so many times so long (nanoseconds).
const DISK_WAITS: u32 = 50;
const DISK_WAIT_NS: u64 = 20_000_000;

/// The kernel answered EAGAIN: an event must be read first.
pub struct EventPending;

/// What one fault asked for.
#[derive(Clone, Copy)]
pub struct Request {
    /// Page touched.
    pub vpn: u64,
    /// Whether to write.
    pub write: bool,
}

/// What a fault brings, counted when it is done.
struct Delivery {
    r: Request,
    /// Pages mapped, and those of them that came from the pool.
    pages: usize,
    from_pool: usize,
    /// Order of the largest folio mapped in one piece, and of the largest wanted.
    largest: u8,
    wanted: u8,
    /// Whether contiguous frames were wanted and not had.
    missed: bool,
    /// Whether only the page touched is to come (the lab's comparison).
    only_touched: bool,
}

impl Delivery {
    fn of(r: Request) -> Self {
        Self { r, pages: 0, from_pool: 0, largest: 0, wanted: 0, missed: false, only_touched: false }
    }
}

impl Pager {
    /// The handler thread.
    pub fn handler_loop(&self) -> ! {
        let uffd = self.uffd();
        let mut served = 0u32;
        thread::set_idle_policy(0, true);
        let mut waiting: Vec<Request> = Vec::new();
        let mut disk = ReadBuffer::default();
        loop {
            let mut s = self.state.lock();
            if waiting.capacity() == 0 {
                waiting.reserve(1024);
                disk.prepare(&s);
            }
            let message = if self.inject(Site::Event).is_some() { Err(libc::EIO) } else { uffd.read() };
            match message {
                Ok(Some(Message::Fault { address, write, tid })) => {
                    waiting.push(Request { vpn: (address / PAGE) as u64, write });
                    served = served.wrapping_add(1);
                    if s.placement.due()
                        && let Some(cpu) = thread::cpu_of(tid)
                    {
                        let (ticker, reclaimer) = (self.ticker.load(Relaxed), self.reclaimer.load(Relaxed));
                        let helpers = Helpers { handler: Some(0), ticker, reclaimer };
                        let busy = self.kin.load(Relaxed) || self.excess(&s) > 0;
                        s.placement.fault_on(cpu, tid, helpers, busy);
                    }
                    self.make_room(&mut s);
                    for tried in 0..=DISK_WAITS {
                        if !self.waits_for_disk(&s) {
                            break;
                        }
                        if tried == DISK_WAITS {
                            self.disk_helps.store(false, Relaxed);
                            break;
                        }
                        let seen = self.swap_progress.load(Acquire);
                        self.poke_writer(&s);
                        drop(s);
                        lock::futex_wait(&self.swap_progress, seen, Some(DISK_WAIT_NS), false);
                        s = self.state.lock();
                        self.make_room(&mut s);
                    }
                }
                Ok(Some(event)) => self.event(&mut s, event),
                Ok(None) if waiting.is_empty() => {
                    drop(s);
                    self.asleep.store(true, SeqCst);
                    uffd.wait(-1);
                    self.asleep.store(false, SeqCst);
                    if !self.watched.swap(true, SeqCst) {
                        self.poke_ticker();
                    }
                    self.state.lock().placement.slept();
                    continue;
                }
                Ok(None) => {}
                Err(_) => thread::sleep_ns(1_000_000),
            }
            self.hold_back(&s);
            if !waiting.is_empty() && self.must_wait(&mut s) {
                drop(s);
                self.wake_reclaim();
                uffd.wait(FULL_MS);
                continue;
            }
            let throttle = if waiting.is_empty() { 0 } else { self.throttle_ns(&s) };
            if throttle > 0 {
                drop(s);
                thread::sleep_ns(throttle);
                self.counters().stall_ns.fetch_add(throttle, Relaxed);
                s = self.state.lock();
            }
            // One fault in eight is timed, for all.
            let began = served.is_multiple_of(8).then(thread::now_ns);
            let on_disk = self.serve_waiting(&mut s, &mut waiting);
            if let Some(vpn) = on_disk {
                drop(s);
                self.swap_in(vpn, &mut disk);
                s = self.state.lock();
                // (Unless an event must be read first the rest is served at once.)
                self.serve_waiting(&mut s, &mut waiting);
            }
            if let Some(began) = began {
                self.counters().stall_ns.fetch_add((thread::now_ns() - began) * 8, Relaxed);
            }
            self.progress.fetch_add(1, Relaxed);
            if self.needs_reclaim(&s) {
                drop(s);
                self.wake_reclaim();
            } else if waiting.last().is_some_and(|r| s.pt.get(r.vpn).tag() != Tag::Disk) {
                drop(s);
                // The thread that waits for its event has been woken by our read and must run before MOVE works.
                thread::sleep_ns(10_000);
            }
        }
    }

    /// Serves what can be served now; the page of the first request that must be read from disk before.
    fn serve_waiting(&self, s: &mut State, waiting: &mut Vec<Request>) -> Option<u64> {
        while let Some(request) = waiting.last().copied() {
            if s.pt.get(request.vpn).tag() == Tag::Disk {
                return Some(request.vpn);
            }
            if self.serve(s, request).is_err() {
                return None;
            }
            waiting.pop();
        }
        None
    }

    /// Whether the reclaim thread has something to do.
    pub(crate) fn needs_reclaim(&self, s: &State) -> bool {
        if !s.unshare.is_empty() {
            return true;
        }
        if self.handler_reclaims(s) {
            return false;
        }
        let (low, _) = self.watermarks();
        let short = s.zone.free_slots(Kind::Frame) < low && self.excess(s) + 2 * self.margin() as isize > 0;
        short || self.excess(s) + self.margin() as isize > 0
    }

    /// How many pages to bring for a fault, the stream it belongs to, and whether it was sequential.
    fn window(&self, s: &mut State, vpn: u64) -> (usize, usize, bool) {
        let hit = s.streams.iter().position(|(next, _)| *next == vpn);
        let (i, log) = match hit {
            Some(i) => (i, (s.streams[i].1 + 2).min(WINDOW_PAGES.ilog2() as u8)),
            None => {
                s.stream_next = (s.stream_next + 1) % s.streams.len();
                (s.stream_next, 0)
            }
        };
        let most = BLOCK_PAGES.max(1 << log);
        let n = (1 << log).min(most - vpn as usize % most);
        s.streams[i] = (vpn + n as u64, log);
        (n, i, hit.is_some())
    }

    /// Brings the page of a fault, and what goes with it.
    ///
    /// # Errors
    /// [`EventPending`]: nothing was done; read messages, then call again.
    pub fn serve(&self, s: &mut State, r: Request) -> Result<(), EventPending> {
        let c = self.counters();
        c.pgfault.fetch_add(1, Relaxed);
        let first = s.pt.get(r.vpn);
        if matches!(first.tag(), Tag::Poisoned) {
            return self.poison(s, r.vpn);
        }
        let (n, stream, sequential) = self.window(s, r.vpn);
        let (set, clear) = if sequential { (HINT_SEQUENTIAL, HINT_RANDOM) } else { (HINT_RANDOM, HINT_SEQUENTIAL) };
        if first.tag() != Tag::None || sequential {
            s.pt.hint(r.vpn, set, clear);
        }
        let huge = self.wants_huge(s, r.vpn) && self.huge_frames(s)?;
        let (mut at, end) = if huge { (r.vpn, r.vpn + FOLIO_PAGES as u64) } else { whole_blocks(s, r.vpn, n) };
        // Who goes on in sequence meets the next fault there.
        s.streams[stream].0 = end;
        let mut d = Delivery::of(r);
        while at < end {
            let left = (end - at) as usize;
            let got = match s.pt.get(at).tag() {
                Tag::Staged => self.bring_staged(s, at, left),
                Tag::Busy if at == r.vpn => self.bring_busy(s, at),
                Tag::None | Tag::Zero | Tag::Compressed => self.bring_out(s, at, left, &mut d),
                // Another fault on the page was first, or the page vanished (MADV_FREE): zeros if missing.
                Tag::Resident if at == r.vpn => self.bring_lost(s, at),
                _ => Ok(0),
            };
            match got {
                Ok(n) if n > 0 && !d.only_touched => at += n as u64,
                // The page touched comes whatever is with its neighbours, or its thread would wait for ever.
                Ok(_) if at < r.vpn => at = r.vpn,
                Ok(_) => break,
                Err(EventPending) if at <= r.vpn => return Err(EventPending),
                Err(EventPending) => break,
            }
        }
        if d.only_touched {
            s.streams[stream].0 = r.vpn + 1;
        }
        if r.write && matches!(first.tag(), Tag::Compressed) {
            s.pt.hint(r.vpn, HINT_WRITTEN, 0);
        }
        self.count_delivery(s, &d);
        Ok(())
    }

    pub(crate) fn bring_staged(&self, s: &mut State, vpn: u64, max: usize) -> Result<usize, EventPending> {
        if let Some(n) = self.bring_staged_huge(s, vpn)? {
            return Ok(n);
        }
        let slot = s.pt.get(vpn).aux();
        let mut n = 1;
        while n < max
            && s.pt.get(vpn + n as u64).tag() == Tag::Staged
            && s.pt.get(vpn + n as u64).aux() == slot + n as u32
        {
            n += 1;
        }
        let moved = match self.move_in(vpn, slot, n) {
            Ok(()) => n,
            Err((done, _)) if done >= PAGE => done / PAGE,
            Err((_, libc::EAGAIN)) => return Err(EventPending),
            Err((_, libc::EEXIST)) => {
                // The page is there already, so what is staged is older: cannot happen while state is exact.
                self.uffd().wake(vpn as usize * PAGE, PAGE);
                return Ok(0);
            }
            Err((_, libc::ENOENT | libc::ESRCH)) => return Ok(0),
            // Read-only now, or shared with a child: a copy always works.
            Err(_) => {
                let from = self.layout.slot(slot);
                if !self.copy_in(s, vpn, from, 1)? {
                    return Ok(0);
                }
                s.zone.free_run(Kind::Frame, slot, 1);
                self.staged_became_resident(s, vpn, 1);
                return Ok(1);
            }
        };
        s.zone.free_run(Kind::Hole, slot, moved);
        self.staged_became_resident(s, vpn, moved);
        Ok(moved)
    }

    pub(crate) fn staged_became_resident(&self, s: &mut State, vpn: u64, n: usize) {
        s.staged -= n;
        s.list_with_copies(vpn, n);
        s.note_pages(trace::Kind::Refault, vpn, n);
        self.counters().refault_staged.fetch_add(1, Relaxed);
    }

    fn bring_busy(&self, s: &mut State, vpn: u64) -> Result<usize, EventPending> {
        let pte = s.pt.get(vpn);
        if !self.copy_in(s, vpn, self.layout.slot(pte.aux()), 1)? {
            return Ok(0);
        }
        s.end_busy(1);
        s.list_resident(vpn, 1, true, |_| pte.copy());
        s.note_pages(trace::Kind::Refault, vpn, 1);
        self.counters().refault_staged.fetch_add(1, Relaxed);
        Ok(1)
    }

    fn bring_lost(&self, s: &mut State, vpn: u64) -> Result<usize, EventPending> {
        s.scratch[..PAGE].fill(0);
        let from = s.scratch.as_ptr() as usize;
        // SAFETY: scratch is a block of ours.
        match unsafe { self.copy(vpn, from, PAGE) } {
            Ok(()) => s.rss += PAGE,
            Err((_, libc::EAGAIN)) => return Err(EventPending),
            Err(_) => self.uffd().wake(vpn as usize * PAGE, PAGE),
        }
        Ok(1)
    }

    /// Brings pages that are zero, never seen or in the pool: one run, at most `max`.
    fn bring_out(&self, s: &mut State, vpn: u64, max: usize, d: &mut Delivery) -> Result<usize, EventPending> {
        let mut n = 1;
        while n < max && matches!(s.pt.get(vpn + n as u64).tag(), Tag::None | Tag::Zero | Tag::Compressed) {
            n += 1;
        }
        let order = n.ilog2() as u8;
        let short = s.zone.free_slots(Kind::Frame) < n && self.excess(s) + self.margin() as isize > 0;
        if short && !self.at_floor(s) {
            self.direct_reclaim(s, n)?;
        }
        let (frames, n) = self.frames_for(s, vpn, order, d);
        if n == 0 {
            return Ok(0);
        }
        let (to, layout) = (s.scratch.as_mut_ptr(), self.layout);
        let buffer = match frames {
            // SAFETY: frames just allocated are this function's alone.
            Some((slot, _)) => unsafe { layout.frames_mut(slot, n) },
            // SAFETY: scratch is a block, and n pages at most one.
            None => unsafe { core::slice::from_raw_parts_mut(to, n * PAGE) },
        };
        let filled = self.fill(s, vpn, buffer);
        let (src, filled_n) = (buffer.as_ptr() as usize, filled);
        if filled_n == 0 {
            if let Some((slot, o)) = frames {
                s.zone.free(Kind::Frame, slot, o);
            }
            return if vpn == d.r.vpn { self.poison(s, vpn).map(|()| 0) } else { Ok(0) };
        }
        let result = match frames {
            Some((slot, _)) => self.move_in_up_to(vpn, slot, filled_n),
            // SAFETY: the buffer is readable.
            None => unsafe { self.copy(vpn, src, filled_n * PAGE) },
        };
        let (mut brought, error) = match result {
            Ok(()) => (filled_n, 0),
            Err((done, e)) => (done / PAGE, e),
        };
        if let Some((slot, o)) = frames {
            let moved = brought;
            if moved == FOLIO_PAGES {
                self.brought_huge(s, vpn, slot);
            }
            s.zone.free_run(Kind::Hole, slot, moved);
            s.zone.free_run(Kind::Frame, slot + moved as u32, (1 << o) - moved);
        } else {
            s.rss += brought * PAGE;
        }
        if brought == 0 {
            match error {
                libc::EAGAIN => return Err(EventPending),
                libc::EEXIST if filled_n == 1 => self.uffd().wake(vpn as usize * PAGE, PAGE),
                // Past the end of its mapping, read-only, or a neighbour is there: the page alone, by copy.
                libc::EEXIST | libc::EINVAL | libc::ENOENT | libc::EBUSY | libc::EFAULT => {
                    let mut one = [0u8; PAGE];
                    if self.fill(s, vpn, &mut one) == 1 && self.copy_in(s, vpn, one.as_ptr() as usize, 1)? {
                        brought = 1;
                    }
                }
                _ => {}
            }
        }
        if brought <= BLOCK_PAGES {
            self.brought_out::<BLOCK_PAGES>(s, vpn, brought, d);
        } else {
            self.brought_out::<FOLIO_PAGES>(s, vpn, brought, d);
        }
        Ok(brought)
    }

    /// Moves in as many of `n` frames as fit into the mapping.
    fn move_in_up_to(&self, vpn: u64, slot: u32, mut n: usize) -> Result<(), Partial> {
        let whole = n;
        loop {
            match self.move_in(vpn, slot, n) {
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
        d.missed |= got < order;
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
        d.missed |= n > 1;
        (None, usize::from(vpn == d.r.vpn || self.may_charge(s, 1)))
    }

    /// Whether `n` pages more may be taken from the kernel.
    fn may_charge(&self, s: &State, n: usize) -> bool {
        self.inject(Site::Charge).is_none() && self.excess(s) + (n * PAGE) as isize <= 0
    }

    /// Only for the lab: whether contiguous frames are made scarce for this request.
    fn is_scarce(&self) -> bool {
        let folios = &self.group.folios;
        let one_in = folios.scarce.load(Relaxed);
        one_in != 0 && !folios.scarce_seen.fetch_add(1, Relaxed).is_multiple_of(one_in)
    }

    /// Fills a buffer with the pages from `vpn` on; returns how many it could.
    fn fill(&self, s: &mut State, vpn: u64, buffer: &mut [u8]) -> usize {
        let n = buffer.len() / PAGE;
        let mut i = 0;
        while i < n {
            let pte = s.pt.get(vpn + i as u64);
            if pte.tag() != Tag::Compressed {
                buffer[i * PAGE..(i + 1) * PAGE].fill(0);
                i += 1;
                continue;
            }
            let (handle, index) = (pte.handle(), pte.index());
            let pages = 1usize << object::order(s.object(handle));
            let whole = index == 0
                && i + pages <= n
                && (1..pages).all(|k| {
                    let p = s.pt.get(vpn + (i + k) as u64);
                    p.tag() == Tag::Compressed && p.handle() == handle && p.index() == k
                });
            if whole && self.read_block(s, handle, &mut buffer[i * PAGE..(i + pages) * PAGE]) {
                i += pages;
                continue;
            }
            // (A damaged block may still have pages that are right.)
            if !self.fill_part(s, vpn + i as u64, pte, &mut buffer[i * PAGE..(i + 1) * PAGE]) {
                break;
            }
            i += 1;
        }
        i
    }

    /// Decompresses a whole object.
    fn read_block(&self, s: &mut State, handle: u32, out: &mut [u8]) -> bool {
        if out.len() > PAGE {
            self.count_read(s, handle);
        }
        decode(s, handle, out)
    }

    fn count_read(&self, s: &State, handle: u32) {
        let c = &self.counters().folios;
        c.block_read.fetch_add(1, Relaxed);
        if !s.left_behind.is_empty() && s.left_behind.contains(&handle) {
            c.block_read_again.fetch_add(1, Relaxed);
        }
    }

    /// Fills one page from a block of several, decompressing the block once for all of them.
    fn fill_part(&self, s: &mut State, vpn: u64, pte: Pte, page: &mut [u8]) -> bool {
        let (handle, index) = (pte.handle(), pte.index());
        let known = s.decoded.iter().position(|d| d.handle == Some(handle));
        let at = known.unwrap_or_else(|| {
            s.decoded_next = (s.decoded_next + 1) % s.decoded.len();
            s.decoded_next
        });
        if known.is_none() {
            let pages = 1usize << object::order(s.object(handle));
            if pages > 1 {
                self.count_read(s, handle);
            }
            let mut bytes = core::mem::take(&mut s.decoded[at].bytes);
            let ok = decompress(s, handle, &mut bytes[..pages * PAGE]);
            s.decoded[at] = Decoded {
                handle: ok.then_some(handle),
                bytes,
                vpn: vpn.saturating_sub(index as u64),
                fresh: pages > 1,
            };
            if !ok {
                self.counters().folios.block_failed.fetch_add(1, Relaxed);
                return false;
            }
        }
        // Each page is checked when it is used.
        page.copy_from_slice(&s.decoded[at].bytes[index * PAGE..(index + 1) * PAGE]);
        object::hash(page) == object::stored_hash(s.object(handle), index)
    }

    fn brought_out<const MOST: usize>(&self, s: &mut State, vpn: u64, n: usize, d: &mut Delivery) {
        if n == 0 {
            return;
        }
        let c = self.counters();
        let keep = s.pt.hints(vpn) & HINT_WRITTEN == 0 && !self.crowded(s);
        let random = s.pt.hints(vpn) & HINT_RANDOM != 0;
        let mut copies = [None; MOST];
        let (mut from_pool, mut close) = ([0usize; MOST], false);
        for (i, copy) in copies.iter_mut().enumerate().take(n) {
            let at = vpn + i as u64;
            let pte = s.pt.get(at);
            match pte.tag() {
                Tag::Compressed => {
                    from_pool[i / 16] += 1;
                    s.swapped -= 1;
                    close |= s.refault_distance(pte) < s.lru.active.pages();
                    let head = Header::read(s.object(pte.handle()));
                    // A copy of what did not compress would be paid twice; and a block of several pages that is read
                    // at random is to be stored anew, page by page, or each read would decompress all of it.
                    let worth = !matches!(head.encoding, Encoding::Raw) && (head.order == 0 || !random);
                    // Each page has its own fate: only the one written to is known to change.
                    let written = d.r.write && at == d.r.vpn;
                    if written && head.order > 0 {
                        c.folios.block_partial_write.fetch_add(1, Relaxed);
                    }
                    if keep && worth && !written && s.copy_index(at, pte.handle()) == pte.index() {
                        *copy = Some(pte.handle());
                    } else {
                        s.release(pte.handle(), pte.index());
                    }
                }
                Tag::Zero => {
                    s.zeros -= 1;
                    c.folios.swpin_zero.fetch_add(1, Relaxed);
                }
                _ => {}
            }
        }
        s.list_resident(vpn, n, close, |i| copies[i]);
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

    /// Counts what a fault brought: one fault, however many pieces it came in.
    fn count_delivery(&self, s: &mut State, d: &Delivery) {
        let c = self.counters();
        if d.pages == 0 {
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
                self.note_left_behind(s, i);
            }
            if d.only_touched {
                s.decoded[i].handle = None;
            }
        }
    }

    /// Remembers a block of which a fault could not deliver all.
    fn note_left_behind(&self, s: &mut State, i: usize) {
        let Some(handle) = s.decoded[i].handle else { return };
        let (vpn, pages) = (s.decoded[i].vpn, 1u64 << object::order(s.object(handle)));
        let left = (vpn..vpn + pages).any(|at| {
            let pte = s.pt.get(at);
            pte.tag() == Tag::Compressed && pte.handle() == handle
        });
        if left {
            self.counters().folios.block_partial_read.fetch_add(1, Relaxed);
            if s.left_behind.len() < LEFT_MOST {
                s.left_behind.insert(handle);
            }
        }
    }

    fn copy_in(&self, s: &mut State, vpn: u64, src: usize, n: usize) -> Result<bool, EventPending> {
        // SAFETY: callers pass readable memory of ours.
        match unsafe { self.copy(vpn, src, n * PAGE) } {
            Ok(()) => {
                s.rss += n * PAGE;
                Ok(true)
            }
            Err((_, libc::EAGAIN)) => Err(EventPending),
            Err(_) => {
                self.uffd().wake(vpn as usize * PAGE, n * PAGE);
                Ok(false)
            }
        }
    }

    /// Tells the process that a page is lost: SIGBUS on access, and a message (before it: the signal may end everything).
    fn poison(&self, s: &mut State, vpn: u64) -> Result<(), EventPending> {
        let pte = s.pt.get(vpn);
        if pte.tag() != Tag::Poisoned {
            s.pt.set(vpn, Pte::new(Tag::Poisoned, 0));
            s.forget(vpn, pte);
            s.note_pages(trace::Kind::Free, vpn, 1);
            self.counters().poisoned.fetch_add(1, Relaxed);
            self.say(b"uzswap: a compressed page was found damaged in memory and cannot be restored; the program gets SIGBUS when it touches it\n");
        }
        match self.uffd().poison(vpn as usize * PAGE, PAGE) {
            Ok(()) => {}
            Err((_, libc::EAGAIN)) => return Err(EventPending),
            // The page is there, or its mapping is gone: whoever waits may look again.
            Err((_, libc::EEXIST | libc::ENOENT)) => self.uffd().wake(vpn as usize * PAGE, PAGE),
            // SAFETY: a signal. (Linux before 6.6 cannot poison a page: the thread that asked must not wait for ever.)
            Err(_) => drop(unsafe { sys!(libc::SYS_kill, thread::getpid(), libc::SIGBUS) }),
        }
        Ok(())
    }
}

fn note_brought(s: &State, vpn: u64, copies: &[Option<u32>], from_pool: bool, write: bool) {
    if from_pool {
        let kept = copies.iter().enumerate().fold(0, |mask, (i, copy)| mask | u16::from(copy.is_some()) << i);
        s.note(Record::load(vpn, copies.len(), write, kept));
    } else {
        s.note_pages(trace::Kind::Fresh, vpn, copies.len());
    }
}

/// The pages to bring for a fault that wants `n` from `vpn` on: blocks that must be decompressed for them come whole,
/// so that none is decompressed twice for one use.
fn whole_blocks(s: &State, vpn: u64, n: usize) -> (u64, u64) {
    let (mut start, mut end) = (vpn, vpn + n as u64);
    let block = |at: u64| Some(s.pt.get(at)).filter(|p| p.tag() == Tag::Compressed).map(|p| p.handle());
    if let Some(first) = block(start) {
        while start > 0 && block(start - 1) == Some(first) {
            start -= 1;
        }
    }
    if let Some(last) = block(end - 1) {
        while block(end) == Some(last) {
            end += 1;
        }
    }
    (start, end)
}

/// Decompresses an object into `out`, checking every page against its hash.
pub(crate) fn decode(s: &mut State, handle: u32, out: &mut [u8]) -> bool {
    decompress(s, handle, out) && {
        let object = s.object(handle);
        out.chunks(PAGE).enumerate().all(|(i, page)| object::hash(page) == object::stored_hash(object, i))
    }
}

fn decompress(s: &mut State, handle: u32, out: &mut [u8]) -> bool {
    let object = s.object(handle);
    let head = Header::read(object);
    let body = &object[object::head_bytes(head.order)..];
    s.decompressor.decompress(head.encoding, &body[..head.len], out).is_ok()
}

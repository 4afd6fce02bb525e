//! The reclaim path.
//!
//! ```text
//! resident ──MOVE──▶ staged ──clean: hash unchanged──▶ compressed (kept copy)      frame ─▶ free ─▶ next fault
//!    ▲                 │ └──all zeros──▶ zero                                        or given back to the kernel
//!    └──── refault ────┘ └──compressed outside the lock (Busy)──▶ pool
//! ```
//! Background reclaim runs on its own thread between two watermarks of free frames, in batches; the fault path reclaims
//! for itself only when it finds none. Moving a page out is atomic, so there is no torn read and nothing to
//! write-protect. Compression runs without the lock on pages marked Busy; a fault on one copies the frame (which must
//! not move meanwhile) and the compressed result is thrown away when the batch is committed.
//!
//! lz4 is the warm codec; see `densify` for what happens when the pool crowds the program out. Where even that is not
//! enough the resident set is not squeezed below a quarter of the limit: the program would do nothing but fault. It then
//! exceeds its limit by what the pool needs, which is counted and said in the summary.

use crate::arena::PAGE;
use crate::fault::EventPending;
use crate::object::{self, Header};
use crate::pager::Pager;
use crate::state::{BLOCK, BLOCK_PAGES, State};
use core::sync::atomic::Ordering::*;
use uzswap_mm::codec::{Algorithm, Compressor, Encoding};
use uzswap_mm::lru::Entry;
use uzswap_mm::pagetable::{HINT_RANDOM, HINT_WRITTEN, Pte, Tag};
use uzswap_mm::zone::Kind;
use uzswap_sys::{lock, sys, thread};

/// Most pages staged by one MOVE.
const RUN_PAGES: usize = 128;
/// Pages compressed per batch.
const BATCH_PAGES: usize = 64;

/// One unit of compression: `1 << order` pages in consecutive slots.
struct Unit {
    vpn: u64,
    order: u8,
    slot: u32,
    outcome: Outcome,
}

enum Outcome {
    Pending,
    Zero,
    /// Compressed to `at..at + len` of the batch's output.
    Packed {
        encoding: Encoding,
        at: usize,
        len: usize,
    },
}

/// A batch on its way through compression; its buffers are allocated once.
pub struct Batch {
    units: Vec<Unit>,
    out: Vec<u8>,
    hashes: Vec<u128>,
    compressor: Compressor,
    /// zstd, made when the pool first grows large.
    dense: Option<Compressor>,
    use_dense: bool,
}

impl Batch {
    /// Buffers for one thread.
    pub fn new(compressor: Compressor) -> Self {
        let bytes = BATCH_PAGES * PAGE + BLOCK;
        Self {
            units: Vec::with_capacity(BATCH_PAGES + 16),
            out: vec![0; bytes + bytes / 8],
            hashes: Vec::with_capacity(BATCH_PAGES + 16),
            compressor,
            dense: None,
            use_dense: false,
        }
    }
}

impl Pager {
    /// The background thread.
    pub fn reclaim_loop(&self) -> ! {
        self.reclaim_until_stopped();
        thread::exit()
    }

    /// Reclaims until `stopping` is set (a region's end; a process's never is).
    pub fn reclaim_until_stopped(&self) {
        let mut batch = {
            let s = self.state.lock();
            Batch::new(s.new_compressor())
        };
        self.reclaimer.store(thread::gettid(), Release);
        let mut failures = 0u32;
        loop {
            let word = self.me().wake.load(Acquire);
            if self.stopping.load(Acquire) {
                return;
            }
            if !self.wants_reclaim() {
                failures = 0;
                self.reclaiming.store(false, SeqCst);
                lock::futex_wait(&self.me().wake, word, None, true);
                self.reclaiming.store(true, SeqCst);
                continue;
            }
            if self.reclaim_step(&mut batch) {
                failures = 0;
                continue;
            }
            failures += 1;
            if failures > 20 {
                let s = self.state.lock();
                if self.excess(&s) > 0 {
                    self.group.over_limit.fetch_add(1, Relaxed);
                }
                drop(s);
                lock::futex_wait(&self.me().wake, self.me().wake.load(Acquire), Some(20_000_000), true);
            } else {
                thread::sleep_ns(50_000);
            }
        }
    }

    fn wants_reclaim(&self) -> bool {
        let mut s = self.state.lock();
        s.rss = self.rss_now(&s);
        self.publish(&s);
        let excess = self.excess(&s);
        if excess > 0 {
            self.bury_the_dead();
            for other in self.group.slots.iter().filter(|o| o.pid.load(Relaxed) != 0 && o.rss.load(Relaxed) > 4 << 20) {
                if !core::ptr::eq(other, self.me()) {
                    other.wake.fetch_add(1, Release);
                    lock::futex_wake(&other.wake, 1, true);
                }
            }
        }
        let margin = self.margin() as isize;
        let (_, high) = self.watermarks();
        let short = s.zone.free_slots(Kind::Frame) < high && excess + 2 * margin > 0;
        !s.unshare.is_empty() || excess > 0 || (!self.handler_reclaims(&s) && (excess + margin > 0 || short))
    }

    /// One round: stage, compress a batch, give frames back. False when nothing could be done.
    fn reclaim_step(&self, batch: &mut Batch) -> bool {
        let (low, high) = self.watermarks();
        let mut progress = false;
        {
            let mut s = self.state.lock();
            let over = ((self.excess(&s) + self.margin() as isize).max(0) as usize) / PAGE;
            let spare = s.zone.free_slots(Kind::Frame);
            if over > 0 && spare > low.min(high / 2) {
                progress |= self.give_back(&mut s, over.min(spare - low / 2)) > 0;
            }
            if over > 0 {
                progress |= self.densify(&mut s, 16);
            }
            let squeezed = self.at_floor(&s);
            let want = if (over > 0 && !squeezed) || spare < high { BATCH_PAGES } else { 0 };
            if want > 0 {
                progress |= self.stage(&mut s, want).unwrap_or(0) > 0;
                let keep = self.stage_target(&s);
                progress |= self.prepare(&mut s, batch, want, keep);
            }
        }
        batch.compress(&self.layout);
        let mut s = self.state.lock();
        progress |= self.commit(&mut s, batch) > 0;
        let shared = core::mem::take(&mut s.unshare);
        drop(s);
        progress |= self.unshare(&shared);
        // Freed under the lock, as everything is: a child must find the allocator at rest.
        let s = self.state.lock();
        drop(shared);
        drop(s);
        progress
    }

    /// Reclaims before a fault is served, where the thread that serves it is to do so by itself.
    pub fn make_room(&self, s: &mut State) {
        if !self.handler_reclaims(s) {
            return;
        }
        // Frames go round: some are made free when there are none, and none are given back to the kernel (or taken
        // from it) while the group stays within a band below its limit.
        let margin = self.margin() as isize;
        let spare = s.zone.free_slots(Kind::Frame);
        // What the program takes from the kernel unmanaged shows only when it is asked for.
        if self.counters().pgfault.load(Relaxed).is_multiple_of(32) {
            s.rss = self.rss_now(s);
        }
        let over = self.excess(s) + margin / 2 > 0;
        if !over && (spare >= BLOCK_PAGES || self.excess(s) + margin < 0) {
            return;
        }
        s.rss = self.rss_now(s);
        self.publish(s);
        let over = ((self.excess(s) + margin / 2).max(0) as usize) / PAGE;
        let mut batch = s.direct.take().unwrap_or_else(|| Box::new(Batch::new(s.new_compressor())));
        let floor = over > 0 && self.at_floor(s);
        if floor && self.excess(s) > 0 {
            self.group.over_limit.fetch_add(1, Relaxed);
        }
        if !floor {
            let keep = self.stage_target(s);
            let _ = self.stage(s, (keep + BATCH_PAGES).saturating_sub(s.staged));
            self.prepare(s, &mut batch, BATCH_PAGES, keep);
            batch.compress(&self.layout);
            self.commit(s, &mut batch);
        }
        s.direct = Some(batch);
        self.densify(s, 4);
        let spare = s.zone.free_slots(Kind::Frame);
        if over > 0 && spare > BLOCK_PAGES {
            self.give_back(s, over.min(spare - BLOCK_PAGES));
        }
    }

    /// Whether the program has so little left that taking more would only make it fault.
    pub fn at_floor(&self, s: &State) -> bool {
        // A library region's limit is hard: its owner sized it.
        !self.own_frames && (s.resident + s.staged) * PAGE < self.limit() / 4 && s.pool.held_bytes() > self.limit() / 2
    }

    /// Pages to keep staged as the second chance.
    fn stage_target(&self, s: &State) -> usize {
        (s.resident / 32).min(self.limit() / PAGE / 32)
    }

    /// Makes room for `n` pages in the fault path.
    ///
    /// # Errors
    /// [`EventPending`]: nothing could be moved before an event is read.
    pub fn direct_reclaim(&self, s: &mut State, n: usize) -> Result<(), EventPending> {
        self.counters().direct_reclaim.fetch_add(1, Relaxed);
        let mut batch = s.direct.take().unwrap_or_else(|| Box::new(Batch::new(s.new_compressor())));
        let mut result = Ok(());
        for _ in 0..4 {
            if s.zone.free_slots(Kind::Frame) >= n {
                break;
            }
            let staged = self.stage(s, n.max(16));
            self.prepare(s, &mut batch, n.max(16), 0);
            batch.compress(&self.layout);
            if self.commit(s, &mut batch) == 0 && s.zone.free_slots(Kind::Frame) < n {
                if staged.is_err() {
                    result = Err(EventPending);
                }
                break;
            }
        }
        s.direct = Some(batch);
        result
    }

    /// Moves up to about `want` pages out of the program.
    ///
    /// # Errors
    /// [`EventPending`] when an unread event stopped it before anything moved.
    pub fn stage(&self, s: &mut State, want: usize) -> Result<usize, EventPending> {
        let (mut moved, mut tries) = (0, 0);
        while moved < want && tries < want * 2 + 64 {
            tries += 1;
            let Some(first) = s.lru.pop_victim() else { break };
            if !is_whole(s, first) {
                moved += self.stage_pages(s, first)?;
                continue;
            }
            let (start, mut n) = (first.vpn(), 1usize << first.order());
            // Neighbours that came right after it go in the same call.
            while n < RUN_PAGES {
                let Some(next) = s.lru.peek_victim().filter(|e| e.vpn() == start + n as u64) else { break };
                if !is_whole(s, next) {
                    break;
                }
                let _ = s.lru.pop_victim();
                n += 1 << next.order();
            }
            moved += self.stage_run(s, start, n)?;
        }
        Ok(moved)
    }

    /// Moves what is left of a folio that is no longer whole.
    fn stage_pages(&self, s: &mut State, e: Entry) -> Result<usize, EventPending> {
        let mut moved = 0;
        let (mut at, end) = (e.vpn(), e.vpn() + (1 << e.order()));
        while at < end {
            let mut n = 0;
            while at + n < end && is_fresh(s, at + n, e.stamp()) {
                n += 1;
            }
            if n > 0 {
                moved += self.stage_run(s, at, n as usize)?;
            }
            at += n + 1;
        }
        Ok(moved)
    }

    fn stage_run(&self, s: &mut State, start: u64, n: usize) -> Result<usize, EventPending> {
        let (mut at, end, mut moved) = (start, start + n as u64, 0);
        while at < end {
            let left = (end - at) as usize;
            let Some((slot, order)) = s.zone.alloc_up_to(Kind::Hole, left.ilog2() as u8) else { break };
            let n = 1usize << order;
            let (done, error) = match self.move_out(at, slot, n) {
                Ok(()) => (n, 0),
                Err((bytes, e)) => (bytes / PAGE, e),
            };
            self.became_staged(s, at, done, slot);
            s.zone.free_run(Kind::Hole, slot + done as u32, n - done);
            moved += done;
            at += done as u64;
            if done < n && (done == 0 || error != libc::EAGAIN) {
                match error {
                    libc::EAGAIN => {
                        self.requeue(s, at, (end - at) as usize);
                        return if moved > 0 { Ok(moved) } else { Err(EventPending) };
                    }
                    libc::ENOENT if s.pt.get(at).tag() == Tag::Resident => {
                        // Dropped without an event (MADV_FREE, reclaimed by the kernel): it reads as zeros.
                        let pte = s.pt.get(at);
                        s.pt.set(at, Pte::NONE);
                        s.forget(at, pte);
                        at += 1;
                    }
                    libc::EBUSY => {
                        self.counters().move_refused.fetch_add(1, Relaxed);
                        let len = 1 + s.lru_run_to(at, end);
                        s.unshare.push((at as usize * PAGE, len * PAGE));
                        self.requeue(s, at, len);
                        at += len as u64;
                    }
                    _ if n > 1 => {
                        // Crosses a mapping's border, perhaps: page by page.
                        for i in 0..(end - at).min(16) {
                            moved += self.stage_run(s, at + i, 1)?;
                        }
                        at += (end - at).min(16);
                    }
                    // Locked or read-only now: it stays.
                    _ => at += 1,
                }
            }
        }
        Ok(moved)
    }

    fn requeue(&self, s: &mut State, vpn: u64, n: usize) {
        let mut copies = vec![None; n];
        for (i, copy) in copies.iter_mut().enumerate() {
            *copy = s.pt.get(vpn + i as u64).copy();
        }
        s.resident -= n;
        s.list_resident(vpn, n, true, |i| copies[i]);
    }

    fn became_staged(&self, s: &mut State, vpn: u64, n: usize, slot: u32) {
        for i in 0..n {
            let at = vpn + i as u64;
            let mut pte = Pte::new(Tag::Staged, slot + i as u32);
            if let Some(handle) = s.pt.get(at).copy() {
                pte = pte.with_copy(handle);
            }
            s.pt.set(at, pte);
        }
        s.resident -= n;
        s.staged += n;
        s.evictions = (s.evictions + n as u32) & 0x1f_ffff;
        let mut at = 0;
        while at < n as u64 {
            let order = (vpn + at).trailing_zeros().min((n as u64 - at).ilog2()).min(4) as u8;
            s.lru.staged.push(Entry::new(vpn + at, order, 0));
            at += 1 << order;
        }
    }

    /// Takes staged folios beyond `keep` pages: clean ones are done at once, the others become a batch.
    fn prepare(&self, s: &mut State, batch: &mut Batch, want: usize, keep: usize) -> bool {
        batch.use_dense = s.algorithm == Algorithm::Lz4 && self.crowded(s);
        if batch.use_dense && batch.dense.is_none() {
            batch.dense = Some(Compressor::new(Algorithm::Zstd(1)));
        }
        let mut taken = 0;
        while taken < want && s.staged > keep {
            let Some(e) = s.lru.staged.pop() else { break };
            let end = e.vpn() + (1 << e.order());
            let mut at = e.vpn();
            while at < end {
                let pte = s.pt.get(at);
                if pte.tag() != Tag::Staged {
                    at += 1;
                    continue;
                }
                taken += 1;
                if self.is_clean(s, at, pte) {
                    let handle = pte.copy().expect("clean means a copy");
                    let index = s.copy_index(at, handle);
                    s.pt.set(at, Pte::compressed(handle, index, s.evictions));
                    s.zone.free(Kind::Frame, pte.aux(), 0);
                    s.staged -= 1;
                    s.swapped += 1;
                    self.counters().swpout_clean.fetch_add(1, Relaxed);
                    at += 1;
                    continue;
                }
                let order = self.unit_order(s, at, end, pte);
                for i in 0..1u64 << order {
                    let p = s.pt.get(at + i);
                    if let Some(handle) = p.copy() {
                        let index = s.copy_index(at + i, handle);
                        s.release(handle, index);
                        s.pt.hint(at, HINT_WRITTEN, 0);
                    }
                    s.pt.set(at + i, Pte::new(Tag::Busy, p.aux()));
                }
                taken += (1 << order) - 1;
                batch.units.push(Unit { vpn: at, order, slot: pte.aux(), outcome: Outcome::Pending });
                at += 1 << order;
            }
        }
        taken > 0
    }

    fn is_clean(&self, s: &State, vpn: u64, pte: Pte) -> bool {
        let Some(handle) = pte.copy() else { return false };
        let index = s.copy_index(vpn, handle);
        // SAFETY: a staged page's slot holds its frame, and the lock is held.
        let page = unsafe { self.layout.frames(pte.aux(), 1) };
        object::hash(page) == object::stored_hash(s.object(handle), index)
    }

    /// The unit of compression at `vpn`: 16 KiB where four pages are staged side by side and the block is not read at
    /// random, else 4 KiB.
    fn unit_order(&self, s: &State, vpn: u64, end: u64, first: Pte) -> u8 {
        if !vpn.is_multiple_of(4) || vpn + 4 > end || s.pt.hints(vpn) & HINT_RANDOM != 0 {
            return 0;
        }
        let together = (1..4).all(|i| {
            let p = s.pt.get(vpn + i);
            p.tag() == Tag::Staged && p.aux() == first.aux() + i as u32 && !self.is_clean(s, vpn + i, p)
        });
        if together { 2 } else { 0 }
    }

    /// Stores a compressed batch; returns the pages that left.
    fn commit(&self, s: &mut State, batch: &mut Batch) -> usize {
        let c = self.counters();
        let (mut left, mut hash_at) = (0, 0);
        for u in batch.units.drain(..) {
            let pages = 1usize << u.order;
            let hashes = &batch.hashes[hash_at..hash_at + pages];
            hash_at += pages;
            let mut live = 0u16;
            for i in 0..pages {
                let pte = s.pt.get(u.vpn + i as u64);
                if pte.tag() == Tag::Busy && pte.aux() == u.slot + i as u32 {
                    live |= 1 << i;
                }
            }
            let stored = match u.outcome {
                _ if live == 0 => None,
                Outcome::Zero => Some(None),
                Outcome::Packed { encoding, at, len } => {
                    let handle = self.store(s, &u, live, encoding, &batch.out[at..at + len], hashes);
                    if handle.is_none() {
                        c.reject_alloc_fail.fetch_add(1, Relaxed);
                        self.back_to_staged(s, &u, live);
                        continue;
                    }
                    c.zswpout.fetch_add(u64::from(live.count_ones()), Relaxed);
                    Some(handle)
                }
                Outcome::Pending => unreachable!("compress() settles every unit"),
            };
            for i in (0..pages).filter(|i| live & (1 << i) != 0) {
                let at = u.vpn + i as u64;
                s.staged -= 1;
                match stored {
                    Some(Some(handle)) => {
                        s.pt.set(at, Pte::compressed(handle, i, s.evictions));
                        s.swapped += 1;
                    }
                    _ => {
                        s.pt.set(at, Pte::new(Tag::Zero, 0));
                        s.zeros += 1;
                        c.swpout_zero.fetch_add(1, Relaxed);
                    }
                }
            }
            s.zone.free_run(Kind::Frame, u.slot, pages);
            left += pages;
        }
        batch.hashes.clear();
        left
    }

    fn store(
        &self,
        s: &mut State,
        u: &Unit,
        live: u16,
        encoding: Encoding,
        bytes: &[u8],
        hashes: &[u128],
    ) -> Option<u32> {
        let head = object::head_bytes(u.order);
        let held = s.pool.held_bytes();
        let handle = s.pool.alloc(head + bytes.len())?;
        s.rss += s.pool.held_bytes() - held;
        // SAFETY: the object was just allocated, and the lock is held.
        let place = unsafe { self.layout.pool(handle.offset(), head + bytes.len()) };
        Header { len: bytes.len(), encoding, order: u.order, live }.write(place);
        for (i, h) in hashes.iter().enumerate() {
            object::set_hash(place, i, *h);
        }
        place[head..].copy_from_slice(bytes);
        if encoding as u8 == Encoding::Raw as u8 {
            self.counters().stored_incompressible_pages.fetch_add(1 << u.order, Relaxed);
        }
        Some(handle.raw())
    }

    fn back_to_staged(&self, s: &mut State, u: &Unit, live: u16) {
        for i in 0..1u32 << u.order {
            let at = u.vpn + u64::from(i);
            if live & (1 << i) != 0 {
                s.pt.set(at, Pte::new(Tag::Staged, u.slot + i));
                s.lru.staged.push(Entry::new(at, 0, 0));
            } else {
                s.zone.free(Kind::Frame, u.slot + i, 0);
            }
        }
    }

    /// Gives up to `pages` free frames back to the kernel.
    ///
    /// The arena is registered, so discarding would raise an event to ourselves: the range leaves the registration for
    /// that moment. Nobody else touches free slots.
    fn give_back(&self, s: &mut State, pages: usize) -> usize {
        let mut given = 0;
        while given < pages {
            let order = (pages - given).ilog2().min(9) as u8;
            let Some((slot, order)) = s.zone.alloc_up_to(Kind::Frame, order) else { break };
            let (at, len) = (self.layout.slot(slot), PAGE << order);
            let uffd = self.uffd();
            // (A region asks for no events and has none.)
            if !self.own_frames && uffd.unregister(at, len).is_err() {
                s.zone.free(Kind::Frame, slot, order);
                break;
            }
            // SAFETY: free frames hold nothing of use.
            unsafe { crate::arena::discard(at, len) };
            if !self.own_frames {
                uffd.register(at, len).expect("the arena can be registered again");
            }
            s.zone.free(Kind::Hole, slot, order);
            s.rss = s.rss.saturating_sub(len);
            given += 1 << order;
        }
        given
    }

    /// Makes pages shared with a child this process's own, so that they can be moved: the kernel copies them.
    fn unshare(&self, ranges: &[(usize, usize)]) -> bool {
        const MADV_POPULATE_WRITE: i32 = 23;
        for (at, len) in ranges {
            // SAFETY: populating changes no contents. Without the lock, as a missing page is served by the handler.
            let _ = unsafe { sys!(libc::SYS_madvise, *at, *len, MADV_POPULATE_WRITE) };
        }
        !ranges.is_empty()
    }
}

impl Batch {
    /// Compresses every unit; needs no lock.
    fn compress(&mut self, layout: &crate::arena::Layout) {
        let mut at = 0;
        for u in &mut self.units {
            let pages = 1usize << u.order;
            // SAFETY: Busy pages' frames neither move nor change until commit.
            let bytes = unsafe { layout.frames(u.slot, pages) };
            self.hashes.extend(bytes.chunks(PAGE).map(object::hash));
            if bytes.chunks(PAGE).all(object::is_zero) {
                u.outcome = Outcome::Zero;
                continue;
            }
            let room = bytes.len() - bytes.len() / 16;
            let compressor = match &mut self.dense {
                Some(dense) if self.use_dense => dense,
                _ => &mut self.compressor,
            };
            let (encoding, len) = match compressor.compress(bytes, &mut self.out[at..at + room]) {
                Some(packed) => packed,
                None => {
                    self.out[at..at + bytes.len()].copy_from_slice(bytes);
                    (Encoding::Raw, bytes.len())
                }
            };
            u.outcome = Outcome::Packed { encoding, at, len };
            at += len;
        }
    }
}

fn is_fresh(s: &State, vpn: u64, stamp: u32) -> bool {
    let pte = s.pt.get(vpn);
    pte.tag() == Tag::Resident && pte.aux() == stamp
}

fn is_whole(s: &State, e: Entry) -> bool {
    (0..1u64 << e.order()).all(|i| is_fresh(s, e.vpn() + i, e.stamp()))
}

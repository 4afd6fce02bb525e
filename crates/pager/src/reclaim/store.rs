//! Compresses staged folios and stores them, in batches of whole folios.
//!
//! ```text
//! staged folio ─ clean pages leave with their kept copy
//!              └ the rest: older entries go, limits are asked for (once), units are marked Busy     with the lock
//!                  └ units compressed (and verified)                                                without it
//!                      └ all units stored, or none and the folio is staged as before                with it
//! ```
//! Compression (see `compress`) runs without the lock on pages marked Busy. A fault on such a page copies the frame (which must
//! not move meanwhile), and its part of the result is not stored. `uzswap_mm::zswap` stores a folio whole or not at all; here are
//! the tables it works on. A folio that cannot be stored goes back to the staged list: nothing is lost.

use crate::frames::arena::PAGE;
use crate::group::folio::{LARGE_ORDER, USUAL_UNIT};
use crate::inject::Site;
use crate::pager::Pager;
use crate::pool::batch::{Batch, Folio, Outcome, Unit};
use crate::pool::object::{self, Header, REFERENCED, WAITING};
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::codec::{Algorithm, Encoding};
use uzswap_mm::lru::Entry;
use uzswap_mm::pageset::PageSet;
use uzswap_mm::pagetable::{HINT_RANDOM, HINT_SEQUENTIAL, HINT_WRITTEN, Pte, Tag};
use uzswap_mm::trace::{self, Record};
use uzswap_mm::zone::Kind;
use uzswap_mm::zswap::{self, Packed, Refused};

/// The tables into which a folio is stored, and the bytes of its units.
struct Tables<'a> {
    /// Whether the folio is known to be zeros.
    zeros: bool,
    /// Whether it only waits in the pool to be written to the swap file.
    waits: bool,
    pager: &'a Pager,
    s: &'a mut State,
    units: &'a [Unit],
    out: &'a [u8],
    hashes: &'a [u128],
}

impl zswap::Store for Tables<'_> {
    fn invalidate(&mut self, vpn: u64) {
        let pte = self.s.pt.get(vpn);
        if let Some(handle) = pte.copy() {
            if self.s.is_packed_stub(handle) {
                // Whether the page is unchanged is known only once it has been compressed.
                return;
            }
            let index = self.s.copy_index(vpn, handle);
            if object::order(self.s.object(handle)) != 0 {
                self.pager.counters().folios.block_partial_write.fetch_add(1, Relaxed);
            }
            self.s.release(handle, index);
            self.s.pt.hint(vpn, HINT_WRITTEN, 0);
            self.s.note_pages(trace::Kind::Drop, vpn, 1);
            self.s.pt.set(vpn, Pte::new(pte.tag(), pte.aux()));
        }
    }

    fn admit(&mut self) -> Result<(), Refused> {
        // Reclaim, which called this, keeps the limit on resident memory and pool together; this is the pool's own limit. When it
        // is hit, try once to shrink the pool.
        if self.pager.inject(Site::Limit).is_some() {
            return Err(Refused::Limit);
        }
        if self.zeros || self.waits || !self.pager.zswap_is_full(self.s) {
            return Ok(());
        }
        self.pager.compact_pool(self.s);
        if self.pager.zswap_is_full(self.s) { Err(Refused::Limit) } else { Ok(()) }
    }

    fn put(&mut self, at: usize, unit: zswap::Unit) -> Result<u32, Refused> {
        let Unit { order, page_at, out_at, outcome: Outcome::Packed { encoding, len }, .. } = self.units[at] else {
            return Err(Refused::Compressor);
        };
        let (out, hashes) = (&self.out[out_at..][..len], &self.hashes[page_at..][..1 << order]);
        let flags = if self.waits { WAITING } else { REFERENCED };
        let head = Header { len, encoding, order, vpn: unit.vpn, flags };
        let set = |place: &mut [u8]| hashes.iter().enumerate().for_each(|(i, h)| object::set_hash(place, i, *h));
        // What waits to be written does not count as the pool's; how much may wait is bounded elsewhere.
        if !self.waits && !self.pager.may_zswap(self.s, len) {
            return Err(Refused::Limit);
        }
        if self.pager.inject(Site::Pool).is_some() {
            return Err(Refused::NoPlace);
        }
        let on_disk = self.s.kept_place(unit.pages(), hashes);
        let handle = self.s.put_object_on_disk(head, unit.live, set, out, on_disk).ok_or(Refused::NoPlace)?;
        if on_disk.is_some() {
            unit.pages().for_each(|(_, vpn)| self.s.hand_over_place(vpn));
        }
        self.pager.damage(self.s, handle.raw());
        Ok(handle.raw())
    }

    fn take_back(&mut self, handle: u32) {
        object::live(self.s.object(handle)).iter().for_each(|i| self.s.release(handle, i));
    }

    fn index(&mut self, vpn: u64, place: Option<(u32, usize)>) -> Result<(), Refused> {
        if self.pager.inject(Site::Index).is_some() {
            return Err(Refused::NoIndex);
        }
        let s = &mut *self.s;
        if let Some(stub) = s.pt.get(vpn).copy() {
            // The page has changed, or is stored together with others that have.
            s.release(stub, 0);
        }
        s.end_busy(1);
        match place {
            Some((handle, index)) => {
                let head = Header::read(s.object(handle));
                s.pt.set(vpn, head.entry(handle, index, s.evictions));
                s.swapped += 1;
            }
            None => {
                s.pt.set(vpn, Pte::new(Tag::Zero, 0));
                s.zeros += 1;
            }
        }
        Ok(())
    }

    fn unindex(&mut self, vpn: u64) {
        let s = &mut *self.s;
        match s.pt.get(vpn).tag() {
            Tag::Compressed => s.swapped -= 1,
            _ => s.zeros -= 1,
        }
        let unit = self.units.iter().find(|u| (u.vpn..u.vpn + (1 << u.order)).contains(&vpn));
        let unit = unit.expect("what was indexed is a page of a unit");
        s.pt.set(vpn, Pte::new(Tag::Busy, unit.slot + (vpn - unit.vpn) as u32));
        s.busy += 1;
        s.staged += 1;
    }
}

impl Pager {
    /// Takes staged folios beyond the `keep` pages that stay staged. Clean pages are done at once, the others become a batch.
    /// Returns whether it achieved anything.
    pub fn prepare(&self, s: &mut State, batch: &mut Batch, want: usize, keep: usize) -> bool {
        batch.use_dense = s.algorithm == Algorithm::Lz4 && self.wants_dense(s);
        if batch.use_dense {
            batch.tools.dense();
        }
        if self.group.folios.verify.load(Relaxed) != 0 {
            batch.verify();
        }
        let (mut taken, mut done) = (0, false);
        while taken < want && s.idle_staged() > keep {
            let Some(e) = s.lru.staged.pop() else { break };
            let (pages, some) = self.take_folio(s, batch, e);
            taken += pages;
            done |= some;
        }
        let pages = batch.pages();
        if batch.hashes.len() < pages {
            batch.hashes.resize(pages, 0);
        }
        if pages > 0 {
            batch.make_room(pages * PAGE);
        }
        self.call_helpers(s, batch);
        done
    }

    /// Takes what is staged of a folio; returns how many pages, and whether it achieved anything.
    fn take_folio(&self, s: &mut State, batch: &mut Batch, e: Entry) -> (usize, bool) {
        let (start, end) = (e.vpn(), e.vpn() + (1 << e.order()));
        let (mut dirty, mut clean) = (0, 0);
        for at in start..end {
            let pte = s.pt.get(at);
            if pte.tag() != Tag::Staged {
                continue;
            }
            // Anything read more than once from here on must be the same each time.
            self.settle(pte.aux(), 1);
            if self.is_clean(s, at, pte) {
                self.leave_clean(s, at, pte);
                clean += 1;
            } else {
                dirty += 1;
            }
        }
        let order = if dirty == 1 << e.order() { e.order() } else { 0 };
        let kept_out = order >= LARGE_ORDER && !self.group.folios.allows(order);
        let forbidden = self.pool_is_forbidden();
        let some = match dirty {
            0 => false,
            _ if (kept_out || forbidden) && self.may_go_whole(s, order) => {
                self.begin_folio(s, batch, (start, end), order, true)
            }
            // A full pool still takes zeros, which need no place in it: so try page by page. And where the pool is forbidden, the
            // disk may have room for single pages.
            _ if dirty > 1 && (forbidden || self.zswap_is_full(s)) => {
                let directly = forbidden && self.goes_directly(s);
                if directly {
                    self.counters().folios.count(order, |c| &c.swpout_fallback);
                }
                let staged = (start..end).filter(|at| s.pt.get(*at).tag() == Tag::Staged).collect::<Vec<_>>();
                staged.into_iter().filter(|at| self.begin_folio(s, batch, (*at, at + 1), 0, directly)).count() > 0
            }
            _ if !kept_out => self.begin_folio(s, batch, (start, end), order, false),
            _ => {
                // The pool does not admit folios as large as this one, and the disk does not take it: split it into the largest
                // that are admitted. Whatever comes of them, older entries of its pages must go.
                let mut tables =
                    Tables { zeros: false, waits: false, pager: self, s, units: &[], out: &[], hashes: &[] };
                let _ = zswap::begin(&mut tables, start..end, false);
                self.counters().folios.count(order, |c| &c.swpout_fallback);
                let part = (LARGE_ORDER..order).rev().find(|o| self.group.folios.allows(*o)).unwrap_or(0);
                let parts = (start..end).step_by(1 << part);
                parts.filter(|at| self.begin_folio(s, batch, (*at, at + (1 << part)), part, false)).count() > 0
            }
        };
        (dirty + clean, some || clean > 0)
    }

    /// Makes what is staged in `[start, end)` a folio of the batch, which goes to the swap file `whole` if so asked. False when
    /// it is refused and stays staged.
    fn begin_folio(&self, s: &mut State, batch: &mut Batch, (start, end): (u64, u64), order: u8, whole: bool) -> bool {
        let mut pages = [0u64; 8];
        for at in start..end {
            let staged = s.pt.get(at).tag() == Tag::Staged;
            pages[((at - start) / 64) as usize] |= u64::from(staged) << ((at - start) % 64);
        }
        let staged = |at: &u64| pages[((at - start) / 64) as usize] & (1 << ((at - start) % 64)) != 0;
        // Looked at only where it matters: compression finds out anyway.
        let zeros = end - start == 1 && staged(&start) && self.zswap_is_full(s) && {
            // SAFETY: a staged page's slot holds its frame, and the lock is held.
            object::is_zero(unsafe { self.layout.frames(s.pt.get(start).aux(), 1) })
        };
        let mut tables = Tables { zeros, waits: whole, pager: self, s, units: &[], out: &[], hashes: &[] };
        if let Err(why) = zswap::begin(&mut tables, (start..end).filter(staged), true) {
            self.refused(order, why);
            let count = (start..end).filter(staged).count();
            self.count_swap_fail(count as u64);
            s.lru.staged.push(Entry::new(start, (end - start).ilog2() as u8, 0));
            if self.zswap_is_full(s) {
                self.back_to_program(s, (start..end).filter(staged));
            }
            return false;
        }
        let (first, before) = (batch.units.len(), batch.pages());
        let (mut at, mut count) = (start, 0);
        while at < end {
            if !staged(&at) {
                at += 1;
                continue;
            }
            let slot = s.pt.get(at).aux();
            let unit = self.unit_order(s, at, end, order, whole, batch.use_dense);
            for i in 0..1u64 << unit {
                let pte = s.pt.get(at + i);
                s.pt.set(at + i, pte.tagged(Tag::Busy));
            }
            batch.make_room_for(unit);
            batch.units.push(Unit {
                vpn: at,
                order: unit,
                slot,
                page_at: before + count,
                out_at: 0,
                moved: PageSet::default(),
                outcome: Outcome::Pending,
            });
            count += 1 << unit;
            at += 1 << unit;
        }
        s.busy += count;
        batch.folios.push(Folio { vpn: start, order, pages: count, units: first..batch.units.len(), whole });
        true
    }

    fn leave_clean(&self, s: &mut State, vpn: u64, pte: Pte) {
        let handle = pte.copy().expect("clean means a copy");
        if s.is_stub(handle) {
            // The trace must not depend on the disk tier: without one the page would be stored now.
            s.note(Record::of_object(trace::Kind::Store, vpn, 0, PAGE));
            s.stub_to_disk(vpn, handle);
            s.zone.free(Kind::Frame, pte.aux(), 0);
            s.staged -= 1;
            self.counters().pswpout_clean.fetch_add(1, Relaxed);
            return;
        }
        let index = s.copy_index(vpn, handle);
        let head = Header::read(s.object(handle));
        s.pt.set(vpn, head.entry(handle, index, s.evictions));
        s.pt.hint(vpn, 0, HINT_WRITTEN);
        // As if the object had just entered the pool's list: it gets its second chance again.
        object::set_flags(s.object(handle), REFERENCED, 0);
        s.zone.free(Kind::Frame, pte.aux(), 0);
        s.staged -= 1;
        s.swapped += 1;
        self.counters().swpout_clean.fetch_add(1, Relaxed);
        s.note_pages(trace::Kind::Clean, vpn, 1);
    }

    fn is_clean(&self, s: &State, vpn: u64, pte: Pte) -> bool {
        let Some(handle) = pte.copy() else { return false };
        // A page that compresses has its turn in the pool. And a child that cannot open the swap file must not come to need it.
        if s.is_packed_stub(handle) || (s.is_stub(handle) && self.tier.file.load(Relaxed) < 0) {
            return false;
        }
        let index = s.copy_index(vpn, handle);
        // SAFETY: a staged page's slot holds its frame, and the lock is held.
        let page = unsafe { self.layout.frames(pte.aux(), 1) };
        object::hash(page) == object::stored_hash(s.object(handle), index)
    }

    /// The unit of compression at `vpn` of a folio: as was set; else 16 KiB where four pages are staged side by side and the
    /// block is not read at random; else 4 KiB. It is 64 KiB where the block is read in sequence, or was filled so and is a whole
    /// folio that large, if the codec gains by it. What goes to disk `whole` also has units of that size, the largest there, as a
    /// fault brings one in a single read.
    fn unit_order(&self, s: &State, vpn: u64, end: u64, folio: u8, whole: bool, dense: bool) -> u8 {
        let set = self.group.folios.unit(folio);
        let hints = s.pt.hints(vpn);
        let strong = dense || s.algorithm != Algorithm::Lz4;
        let want = match set {
            Some(order) => order.min(s.unit_max).min(if whole { USUAL_UNIT } else { order }),
            None if whole => USUAL_UNIT,
            None if hints & HINT_RANDOM != 0 => 0,
            None if strong && (hints & HINT_SEQUENTIAL != 0 || folio >= 4) => 4,
            None => 2,
        };
        let first = s.pt.get(vpn).aux();
        // Pages that are also on disk stay in the units that they have there, or they would have to be written again.
        let place = s.stub_place(vpn, 0);
        let together = |order: u8| {
            vpn.is_multiple_of(1 << order)
                && vpn + (1 << order) <= end
                && (order <= USUAL_UNIT || place.is_none())
                && (1..1u32 << order).all(|i| {
                    let (at, index) = (vpn + u64::from(i), i as usize);
                    let pte = s.pt.get(at);
                    pte.tag() == Tag::Staged && pte.aux() == first + i && s.stub_place(at, index) == place
                })
        };
        // 8 KiB is no unit, as it gains little. What is left of a large folio must not enter the pool as a unit of an order that
        // is not admitted.
        let may = |order: u8| folio > 0 || self.group.folios.allows(order);
        (2..=want).rev().find(|order| may(*order) && together(*order)).unwrap_or(0)
    }

    /// Stores a compressed batch; returns how many pages left.
    pub fn commit(&self, s: &mut State, batch: &mut Batch) -> usize {
        let mut left = 0;
        batch.cut_raw();
        for f in batch.folios.drain(..) {
            let units = &mut batch.units[f.units.clone()];
            if !s.moved_busy.is_empty() {
                units.iter_mut().for_each(|u| u.moved = elsewhere(s, u));
            }
            let units = &*units;
            batch.plan.clear();
            batch.plan.extend(units.iter().map(|u| planned(s, u)));
            let (out, hashes) = (&batch.out, &batch.hashes);
            let mut tables = Tables { zeros: false, waits: f.whole, pager: self, s, units, out, hashes };
            match zswap::finish(&mut tables, &batch.plan, &mut batch.places) {
                Ok(()) => {
                    self.count_stored(s, &f, units, &batch.plan);
                    if s.retries.any() {
                        self.judge_retries(s, units);
                    }
                    let placed = units.iter().zip(&batch.places);
                    let entries = placed.filter_map(|(u, place)| Some((u.vpn, (*place)?)));
                    if f.whole {
                        self.goes_whole(s, f.order, entries);
                    } else {
                        entries.for_each(|(vpn, handle)| s.entered_pool(vpn, handle));
                    }
                    units.iter().for_each(|u| free_frames(s, u));
                    left += f.pages;
                }
                Err(why) => {
                    if units.iter().any(|u| matches!(u.outcome, Outcome::Wrong)) {
                        self.counters().folios.reject_verify_fail.fetch_add(1, Relaxed);
                    }
                    self.refused(f.order, why);
                    self.back_to_staged(s, &f, units, &batch.plan, why);
                    if matches!(why, Refused::Limit | Refused::NoPlace) {
                        self.count_swap_fail(f.pages as u64);
                    }
                    if why == Refused::Limit {
                        self.back_to_program(
                            s,
                            batch.plan.iter().flat_map(|(unit, _)| unit.pages().map(|(_, vpn)| vpn)),
                        );
                    }
                }
            }
        }
        if !s.left_busy.is_empty() {
            let is_ours = |slot: u32| batch.units.iter().any(|u| (u.slot..u.slot + (1 << u.order)).contains(&slot));
            s.left_busy.retain(|slot| !is_ours(*slot));
        }
        batch.is_stored();
        if s.missed_frees > 0 {
            let missed = core::mem::take(&mut s.missed_frees);
            self.counters().folios.block_missed_free.fetch_add(missed, Relaxed);
        }
        self.poke_writer(s);
        left
    }

    fn count_stored(&self, s: &State, f: &Folio, units: &[Unit], plan: &[(zswap::Unit, Packed)]) {
        let c = self.counters();
        let (mut any, mut stored) = (false, 0);
        for (u, (unit, _)) in units.iter().zip(plan) {
            let live = unit.live.len() as u64;
            stored += live;
            match u.outcome {
                Outcome::Packed { encoding, len } if live > 0 => {
                    note_store(s, u, len, &unit.live);
                    if matches!(encoding, Encoding::Raw) {
                        c.folios.reject_compress_poor.fetch_add(1, Relaxed);
                    }
                    // It only waits there to be written.
                    if f.whole {
                        continue;
                    }
                    any = true;
                    c.zswpout.fetch_add(live, Relaxed);
                    if u.order > 0 {
                        c.folios.block_write.fetch_add(1, Relaxed);
                        c.folios.count(u.order, |c| &c.block_write);
                    }
                }
                Outcome::Zero => {
                    c.swpout_zero.fetch_add(live, Relaxed);
                    unit.pages().for_each(|(_, vpn)| s.note_pages(trace::Kind::Zero, vpn, 1));
                }
                _ => {}
            }
        }
        // A folio is not stored whole if a page of it was taken back while it was compressed.
        if any && stored == 1 << f.order {
            c.folios.count(f.order, |c| &c.zswpout);
        }
    }

    /// Notes for stored units that did not compress before whether they do now.
    fn judge_retries(&self, s: &mut State, units: &[Unit]) {
        let bound = self.incompressible(s);
        for u in units {
            let gained = match u.outcome {
                Outcome::Packed { len, .. } => bound.gains(1 << u.order, len),
                _ => true,
            };
            s.judge_retry(u.vpn, gained);
        }
    }

    fn refused(&self, order: u8, why: Refused) {
        let c = self.counters();
        let counter = match why {
            Refused::Limit => &c.folios.pool_limit_hit,
            Refused::Compressor => &c.folios.reject_compress_fail,
            Refused::NoPlace | Refused::NoIndex => &c.reject_alloc_fail,
            Refused::SwitchedOff => return,
        };
        counter.fetch_add(1, Relaxed);
        if order > 0 {
            c.folios.block_failed.fetch_add(1, Relaxed);
        }
    }

    /// Flips a bit of an object's hashes or bytes where a test injects that, as failing memory would.
    fn damage(&self, s: &State, handle: u32) {
        if let Some(bits) = self.inject(Site::Damage) {
            let body = &mut s.object(handle)[object::HEADER_BYTES..];
            let at = (bits >> 8) as usize % body.len();
            body[at] ^= 1 << (bits % 8);
        }
    }

    /// Gives staged pages for which there is no room back to the program, so that others, which need none, get their turn.
    fn back_to_program(&self, s: &mut State, pages: impl Iterator<Item = u64>) {
        for vpn in pages {
            if s.pt.get(vpn).tag() == Tag::Staged {
                // A page that cannot come back now stays staged.
                let _ = self.bring_staged(s, vpn, 1);
            }
        }
    }

    /// Stages a folio again that could not be stored. The frames of pages that the program has taken back become free.
    fn back_to_staged(&self, s: &mut State, f: &Folio, units: &[Unit], plan: &[(zswap::Unit, Packed)], why: Refused) {
        // A unit that the codec gets wrong, or that finds no place, must not keep the others in memory: they try again by
        // themselves. (Of many units one finds no place each time, so such a folio was compressed again and again.)
        let split = f.order == 0 || why != Refused::Limit;
        if split {
            self.counters().folios.count(f.order, |c| &c.swpout_fallback);
        }
        for (u, (unit, _)) in units.iter().zip(plan) {
            for i in 0..1u32 << u.order {
                if unit.live.has(i as usize) {
                    s.busy -= 1;
                    let at = u.vpn + u64::from(i);
                    s.pt.set(at, s.pt.get(at).tagged(Tag::Staged));
                } else if !u.moved.has(i as usize) {
                    s.zone.free(Kind::Frame, u.slot + i, 0);
                }
            }
            if split {
                // A folio of one large unit would fail in the same way again, and so would what did not go whole.
                let order = if f.whole { 0 } else { u.order.min(USUAL_UNIT) };
                let parts = (u.vpn..u.vpn + (1 << u.order)).step_by(1 << order);
                parts.for_each(|at| s.lru.staged.push(Entry::new(at, order, 0)));
            }
        }
        if !split {
            s.lru.staged.push(Entry::new(f.vpn, f.order, 0));
        }
    }
}

/// A unit as it is to be stored: without the pages that the program took back while it was being compressed.
fn planned(s: &State, u: &Unit) -> (zswap::Unit, Packed) {
    let is_there = |i: &usize| {
        let pte = s.pt.get(u.vpn + *i as u64);
        pte.tag() == Tag::Busy && pte.aux() == u.slot + *i as u32
    };
    let live = (0..1 << u.order).filter(is_there).collect();
    let packed = match u.outcome {
        Outcome::Zero => Packed::Zero,
        Outcome::Packed { .. } => Packed::Bytes,
        Outcome::Wrong => Packed::Failed,
        Outcome::Pending => unreachable!("compress() settles every unit"),
    };
    (zswap::Unit { vpn: u.vpn, order: u.order, live }, packed)
}

/// Frees the frames of a stored unit, except those that are staged elsewhere now.
fn free_frames(s: &mut State, u: &Unit) {
    if u.moved.is_empty() {
        s.zone.free_run(Kind::Frame, u.slot, 1 << u.order);
    } else {
        let here = (0..1u32 << u.order).filter(|i| !u.moved.has(*i as usize));
        here.for_each(|i| s.zone.free(Kind::Frame, u.slot + i, 0));
    }
}

/// The pages of a unit that mremap has moved elsewhere since: they are staged there, in their frames.
#[cold]
fn elsewhere(s: &mut State, u: &Unit) -> PageSet {
    let mut moved = PageSet::default();
    for i in 0..1u32 << u.order {
        let Some(k) = s.moved_busy.iter().position(|(slot, _)| *slot == u.slot + i) else { continue };
        let (slot, vpn) = s.moved_busy.swap_remove(k);
        let pte = s.pt.get(vpn);
        // A page that has moved back is where the unit has it, and is stored as if nothing had happened.
        if vpn != u.vpn + u64::from(i) && pte.tag() == Tag::Busy && pte.aux() == slot {
            s.busy -= 1;
            s.pt.set(vpn, Pte::new(Tag::Staged, slot));
            s.lru.staged.push(Entry::new(vpn, 0, 0));
            moved.put(i as usize, true);
        }
    }
    moved
}

fn note_store(s: &State, u: &Unit, len: usize, live: &PageSet) {
    if s.recorder.is_none() {
        return;
    }
    s.note(Record::of_object(trace::Kind::Store, u.vpn, u.order, len));
    // Pages that the program took back, or dropped, while they were compressed.
    for i in (0..1usize << u.order).filter(|i| !live.has(*i)) {
        s.note_pages(trace::Kind::Drop, u.vpn + i as u64, 1);
    }
}

//! The reclaim path.
//!
//! ```text
//! resident ──MOVE──▶ staged ──clean: hash unchanged──▶ compressed (kept copy)      frame ─▶ free ─▶ next fault
//!    ▲                 │ └──all zeros──▶ zero                                        or given back to the kernel
//!    └──── refault ────┘ └──compressed outside the lock (Busy)──▶ pool
//! ```
//! This file decides when and how much; `stage` moves folios out, `store` compresses them, `transfer` calls the kernel.
//! Background reclaim runs on its own thread between two watermarks of free frames, in batches. Where all faults come
//! from one CPU the thread that serves them reclaims before each (`make_room`; why: see `placement`). Direct reclaim,
//! for a fault that finds no free frame, is the last resort of both.
//!
//! lz4 is the warm codec; see `densify` for what happens when the pool crowds the program out. Where even that is not
//! enough the resident set is not squeezed below an eighth of the limit (of a member's share,
//! where several share it): the program would do nothing but fault. It then exceeds its limit by what the pool needs, which is
//! counted and said in the summary. So it is where what cannot be taken out (code made at run time, stacks, locked memory) fills
//! the limit together with the pool: a few MiB stay. Where other members fill it, whatever they hold, 1 MiB at most does.
//!
//! The story: the background thread kept to that where the limit was exceeded, but not where frames were few, and at the floor
//! they always are. A program that reads 400 MiB by Zipf's law in 220 had 3 % of its memory resident and faulted 745,000 times in 86 s;
//! with an eighth, and no more above its limit, 24,000 times in 6.

pub(crate) mod heat;
pub(crate) mod incompressible;
pub mod pageout;
pub(crate) mod read_only;
pub(crate) mod resident;
pub mod stage;
pub mod store;
pub(crate) mod window;

use crate::calls::Waits;
use crate::fault::EventPending;
use crate::fork::exclusive::PAUSE_NS;
use crate::frames::arena::PAGE;
use crate::pager::Pager;
use crate::pool::batch::{BATCH_PAGES, Batch};
use crate::state::{BLOCK_PAGES, State};
use core::sync::atomic::Ordering::*;
use uzswap_mm::zone::Kind;
use uzswap_sys::{lock, thread};

/// Frames that are given back at once then: a 128th of the limit, or of a member's share of it, between these. (Less than half of the
/// margin below any limit, 1 MiB.)
const MANY_LEAST: usize = 64;
const MANY_MOST: usize = 192;
/// Frames that are not counted upon meanwhile.
const KEPT_FRAMES: usize = BATCH_PAGES + BLOCK_PAGES;

/// Rounds in a row in which nothing could be taken out, after which that is taken for the end of what can be.
const MOST_FAILURES: u32 = 20;
/// Pause after each.
const FAILED_NS: u64 = 50_000;
/// How long the reclaim thread has nothing to do before its buffers go back to the kernel.
const REST_NS: u64 = 20_000_000;

/// How long who finds nothing to take out waits until it looks again: so long for each so many members, up to a part of how long it is
/// believed (nanoseconds).
const FULL_NAP_NS: u64 = 20_000_000;
const FULL_NAP_MOST_NS: u64 = 200_000_000;
const MANY_LOOK: u64 = 8;

/// What is left to a program of its memory that is managed, where other things fill the limit: as much, or a quarter of it.
const LEAST_BYTES: usize = 8 << 20;
/// The same where it is other members that fill it: as much, or an eighth of its share. It is little, as they may have some to give.
const LEAST_BESIDE_OTHERS: usize = 1 << 20;

impl Pager {
    /// The background thread.
    pub fn reclaim_loop(&self) -> ! {
        self.reclaim_until_stopped();
        thread::exit()
    }

    /// Reclaims until `stopping` is set (a region's end, or a process is let go of).
    pub fn reclaim_until_stopped(&self) {
        let mut batch = {
            let s = self.state.lock();
            Batch::new(s.new_compressor())
        };
        self.may_leave_idle.store(thread::may_leave_idle_policy(), Relaxed);
        self.reclaimer.store(thread::gettid(), Release);
        let mut failures = 0u32;
        loop {
            let word = self.me().wake.load(Acquire);
            if self.stopping.load(Acquire) {
                return self.calls.hold_back(Waits::Reclaim, false);
            }
            self.serve_request(&mut batch);
            let nap = self.look_after_client();
            if !self.wants_reclaim() {
                failures = 0;
                self.gets_on();
                self.calls.hold_back(Waits::Reclaim, false);
                if self.compact_behind(&mut self.state.lock()) {
                    continue;
                }
                self.reclaiming.store(false, SeqCst);
                let rests = batch.may_rest();
                let nap = if rests { Some(nap.map_or(REST_NS, |ns| ns.min(REST_NS))) } else { nap };
                lock::futex_wait(&self.me().wake, word, nap, true);
                self.reclaiming.store(true, SeqCst);
                if rests && self.me().wake.load(Acquire) == word {
                    batch.rest();
                }
                continue;
            }
            self.let_writer_go_on();
            if self.reclaim_step(&mut batch) {
                failures = 0;
                self.gets_on();
                continue;
            }
            // (What an unread event keeps from leaving is there to take all the same.)
            if !self.calls.are_waited_for(Waits::Reclaim) {
                failures += 1;
            }
            if failures > MOST_FAILURES {
                self.gives_nothing();
                let mut s = self.state.lock();
                if !self.has_disk_make_room(&mut s) {
                    self.full(&s);
                }
                drop(s);
                lock::futex_wait(&self.me().wake, self.me().wake.load(Acquire), Some(self.full_nap_ns()), true);
            } else {
                thread::sleep_ns(FAILED_NS);
            }
        }
    }

    /// Makes room in the calling thread, beside the reclaim thread, until the limit is kept or nothing more can be taken out.
    pub(crate) fn reclaim_to_limit(&self) {
        let compressor = self.state.lock().new_compressor();
        let (mut batch, mut failures) = (Batch::new(compressor), 0);
        while self.excess(&self.state.lock()) > 0 && failures <= MOST_FAILURES {
            if self.reclaim_step(&mut batch) {
                failures = 0;
            } else {
                failures += 1;
                thread::sleep_ns(FAILED_NS);
            }
        }
    }

    /// Whether a thread is the reclaim thread.
    pub(crate) fn is_reclaimer(&self, tid: u32) -> bool {
        tid as i32 == self.reclaimer.load(Relaxed)
    }

    /// How long who has found nothing to take out waits until it looks again. (Of many members each sums up what all others hold.)
    fn full_nap_ns(&self) -> u64 {
        (self.others_count() as u64 / MANY_LOOK * FULL_NAP_NS).clamp(FULL_NAP_NS, FULL_NAP_MOST_NS)
    }

    pub(crate) fn wants_reclaim(&self) -> bool {
        self.count_sharers();
        let mut s = self.state.lock();
        s.streams.widest = self.widest_window();
        s.bound_folios(self.folio_room(), self.share());
        s.rss = self.rss_now(&s);
        self.publish(&s);
        let excess = self.excess(&s);
        let margin = self.margin() as isize;
        let (_, high) = self.watermarks();
        let short = !self.without_move && s.zone.free_slots(Kind::Frame) < high && excess + 2 * margin > 0;
        // (What is to be done before the limit is exceeded the handler does where it can.)
        let ahead = !self.handler_reclaims(&s);
        let over = excess > 0 || (ahead && self.over(&s, margin, true) > 0) || self.asked_for(&s, excess) > 0;
        if excess > 0 {
            self.wake_others();
        }
        if over {
            self.look_at_others();
            self.ask_the_largest(&s);
            self.count_excess(&s, margin as usize);
        }
        !s.unshare.is_empty() || self.wants_read_only(&s) || over || (ahead && short)
    }

    /// One round: stage, compress a batch, give frames back. False when nothing could be done.
    pub(crate) fn reclaim_step(&self, batch: &mut Batch) -> bool {
        let (low, high) = self.watermarks();
        let (mut progress, mut put_off) = (false, false);
        let between = if self.without_move { self.lock_between_calls() } else { None };
        let stopped = between.is_some();
        {
            let mut s = between.unwrap_or_else(|| self.state.lock());
            s.calls_stopped = stopped;
            let mut over = self.over(&s, self.margin() as isize, true);
            let mut spare = s.zone.free_slots(Kind::Frame);
            if over > 0 && spare > low.min(high / 2) && self.gives(&s, over) {
                let given = self.give_back(&mut s, over.min(spare - low / 2));
                (over, spare) = (over.saturating_sub(given), spare - given);
                progress |= given > 0;
            }
            progress |= self.compact_pool(&mut s);
            self.cut_sparse(&mut s);
            if over > 0 {
                progress |= self.densify(&mut s, 16);
            }
            let squeezed = self.at_floor(&s);
            if over > 0 && squeezed {
                self.has_disk_make_room(&mut s);
            }
            // (Not even for frames: there are few for as long as the limit is exceeded, since they are given back.)
            let few = !self.without_move && spare < high;
            let copied = s.leaving.take_staged();
            let want = match (over > 0 || few, squeezed) {
                (true, false) => BATCH_PAGES,
                (true, true) => s.retries_waiting(BATCH_PAGES).max(copied.min(s.idle_staged())),
                _ => 0,
            };
            if want > 0 {
                let keep = if squeezed { 0 } else { self.stage_target(&s) };
                let short = (keep + want).saturating_sub(s.idle_staged());
                // (What a full pool refuses goes back: only what leaves is progress then.)
                let refusing = self.zswap_is_full(&s);
                let staged = self.stage_exclusive_first(&mut s, short);
                put_off = staged.is_err();
                progress |= staged.unwrap_or(0) > 0 && !refusing;
                progress |= self.prepare(&mut s, batch, want, keep) && !refusing;
            }
            self.calls.hold_back(Waits::Reclaim, put_off);
            s.calls_stopped = false;
            // (Before the lock is given up: who has it next, and runs instead of this thread, takes pages too.)
            if stopped {
                self.calls.go_on();
            }
        }
        batch.compress(self);
        let mut s = self.state.lock();
        progress |= self.commit(&mut s, batch) > 0;
        let rests = core::mem::take(&mut s.exclusive.rests);
        progress |= self.unshare_noted(s);
        progress |= self.take_read_only();
        if rests {
            thread::sleep_ns(PAUSE_NS);
        }
        progress |= rests;
        progress
    }

    /// Reclaims before a fault is served, where the thread that serves it is to do so by itself, or where the reclaim
    /// thread has fallen behind and the limit is exceeded: whoever faults then pays. (After a fork otherwise, see
    /// [`Pager::make_room_beside_kin`]: pages that must be un-shared first would be tried in vain before each fault.)
    ///
    /// # Errors
    /// [`EventPending`]: an unread event kept pages from leaving.
    pub fn make_room(&self, s: &mut State, vpn: u64) -> Result<(), EventPending> {
        self.charge_growth(s);
        if self.has_kin() {
            return self.make_room_beside_kin(s);
        }
        let behind = self.excess(s) > 0;
        if !behind && !self.handler_reclaims(s) {
            return Ok(());
        }
        // Frames go round: some are made free when there are none, and none are given back to the kernel (or taken
        // from it) while the group stays within a band below its limit.
        let margin = self.margin() as isize;
        let spare = s.zone.free_slots(Kind::Frame);
        let need = s.streams.expected(vpn);
        // (What comes in sequence wants runs of frames: single ones that wait to be given back are of no use to it.)
        let waits = need <= BLOCK_PAGES;
        // What the program takes from the kernel unmanaged shows only when it is asked for.
        if self.counters().pgfault.load(Relaxed).is_multiple_of(32) {
            s.rss = self.rss_now(s);
        }
        if self.over(s, margin / 2, waits) == 0 && (self.without_move || spare >= need || self.excess(s) + margin < 0) {
            return Ok(());
        }
        s.rss = self.rss_now(s);
        self.publish(s);
        let over = self.over(s, margin / 2, waits);
        if over > 0 {
            // (The story: Redis had 3 MiB of 72 in memory for minutes, in a group of 63 that used 12. By all that could be seen a child had
            // ended and left its charge; the handler kept the parent just below the limit in what that left, and who is dead was only
            // looked for above it.)
            self.look_at_others();
            self.count_sharers();
            self.ask_the_largest(s);
            self.count_excess(s, margin as usize / 2);
        }
        // (Free frames go first: a round for each page by which the pool grew would fill the limit with them.)
        let idle = spare.saturating_sub(need + BATCH_PAGES);
        if over > 0 && idle > 0 && !self.without_move && (!waits || self.gives(s, over)) {
            let given = self.give_back(s, (over + BLOCK_PAGES).min(idle));
            if given >= over {
                return Ok(());
            }
        }
        let floor = over > 0 && self.at_floor(s);
        let disk_helps = floor && self.has_disk_make_room(s);
        // A full pool takes zeros only: where there were few that is tried again later.
        let faults = self.counters().pgfault.load(Relaxed);
        let refused = self.zswap_is_full(s) && faults < self.refused_until.load(Relaxed);
        let mut staged = Ok(());
        if !floor && !refused {
            let (left, round) = self.direct_round(s, BATCH_PAGES.max(need), self.stage_target(s), Some(need));
            staged = round;
            if left > 0 {
                self.gets_on();
            }
            if left < BATCH_PAGES / 4 && self.zswap_is_full(s) {
                self.refused_until.store(faults + 32, Relaxed);
            }
        }
        // (Also where the group is just below its limit: what the pool wastes the program does without.)
        let shrinks = self.compact_pool(s);
        self.cut_sparse(s);
        let shrinks = self.densify(s, 4) || shrinks;
        let spare = s.zone.free_slots(Kind::Frame);
        // (Without MOVE a page that leaves gives its memory back at once; and what is free now may be enough to wait for more.)
        let over = match self.without_move || self.saves_flushes(s) {
            true => self.over(s, margin / 2, waits),
            false => over,
        };
        let given = if over > 0 && spare > BLOCK_PAGES { self.give_back(s, over.min(spare - BLOCK_PAGES)) } else { 0 };
        // (Whose pool shrinks, or who has had frames to spare, has not come to the end of what can be taken; nor is who waits for the reclaim
        // thread to make more of it fit to leave.)
        if floor && !disk_helps {
            if shrinks || given > 0 {
                self.gets_on();
            } else if !self.may_unshare(s) && !self.wants_read_only(s) {
                self.full(s);
            }
        }
        staged
    }

    /// Whether the program has so little left that taking more would only make it fault.
    pub fn at_floor(&self, s: &State) -> bool {
        // A library region's limit is hard: its owner sized it.
        if self.own_frames {
            return false;
        }
        let (limit, managed) = (self.limit(), (s.evictable() + s.staged) * PAGE);
        let own = || managed < limit / 8 && s.pool.held_bytes() > limit / 2;
        let crowded = self.pool_takes(s, limit / 2) && (managed < self.share() / 8 || own());
        // (What cannot be taken out at all: code made at run time, stacks, read-only and locked memory, what does not compress, and the
        // books.)
        let fixed = || self.charged(s).saturating_sub(managed + s.zone.free_slots(Kind::Frame) * PAGE);
        // (What others hold may be taken out of them, but not by this one. The story: a program's child had locked more than the limit.
        // All but the last pages of its parent were put out again and again, so that eight threads, each of which needed four pages at
        // once, did nothing but fault: 526,000 times in 30 s.)
        let beside = || {
            let least = (self.share() / 8).min(LEAST_BESIDE_OTHERS);
            managed < least && fixed() + self.others_held.load(Relaxed) > limit / 2
        };
        crowded || managed < (limit / 4).min(LEAST_BYTES) && fixed() > limit / 2 || beside()
    }

    /// Pages to keep staged as the second chance.
    fn stage_target(&self, s: &State) -> usize {
        // (A limit raised after the start may be large for the arena.)
        (s.resident / 64).min(self.limit() / PAGE / 64).min(self.layout.slots / 4)
    }

    /// Makes room for `n` pages in the fault path.
    ///
    /// # Errors
    /// [`EventPending`]: nothing could be moved before an event is read.
    pub fn direct_reclaim(&self, s: &mut State, n: usize) -> Result<(), EventPending> {
        self.counters().direct_reclaim.fetch_add(1, Relaxed);
        self.store_posted(s);
        if self.without_move {
            return self.direct_reclaim_without_move(s, n);
        }
        for _ in 0..4 {
            if s.zone.free_slots(Kind::Frame) >= n {
                break;
            }
            let (left, staged) = self.direct_round(s, n.clamp(16, BATCH_PAGES), 0, None);
            if left == 0 && s.zone.free_slots(Kind::Frame) < n {
                return staged;
            }
        }
        Ok(())
    }

    /// One round of reclaim in the calling thread, which holds the lock: `want` pages are staged beyond the `keep` that stay
    /// so, and stored. Where helpers compress them and there are frames enough for now they may be stored `later`, by the
    /// next round. Returns the pages that left, and whether an unread event kept any from being staged.
    pub(crate) fn direct_round(
        &self,
        s: &mut State,
        want: usize,
        keep: usize,
        later: Option<usize>,
    ) -> (usize, Result<(), EventPending>) {
        let mut left = self.store_posted(s);
        let mut batch = s.take_direct();
        let staged = self.take_more(s, &mut batch, want, keep);
        // (At random a fault brings a page or a block. The thread that serves a process's faults would lose the program to the CPU that
        // a helper leaves; a region's own threads serve theirs.)
        let need = later.filter(|need| batch.shared && (self.own_frames || *need > BLOCK_PAGES));
        if need.is_none_or(|need| !self.without_move && s.zone.free_slots(Kind::Frame) < need) {
            left += self.store_now(s, &mut batch);
            if need.is_some() {
                let _ = self.take_more(s, &mut batch, want, keep);
            }
        }
        if batch.shared {
            batch.post(self);
        } else if !batch.is_empty() {
            left += self.store_now(s, &mut batch);
        }
        s.direct = Some(batch);
        (left, staged)
    }

    /// Stages what `want` pages beyond `keep` need, and makes them a batch.
    fn take_more(&self, s: &mut State, batch: &mut Batch, want: usize, keep: usize) -> Result<(), EventPending> {
        let staged = self.stage(s, (keep + want).saturating_sub(s.idle_staged()));
        self.prepare(s, batch, want, keep);
        staged.map(|_| ())
    }

    /// Compresses and stores a batch under the lock; returns the pages that left.
    pub(crate) fn store_now(&self, s: &mut State, batch: &mut Batch) -> usize {
        batch.compress(self);
        self.commit(s, batch)
    }

    /// Stores what a round left to helpers; returns the pages that left.
    pub(crate) fn store_posted(&self, s: &mut State) -> usize {
        let Some(mut batch) = s.direct.take_if(|batch| batch.is_posted()) else { return 0 };
        batch.finish(self);
        let left = self.commit(s, &mut batch);
        s.direct = Some(batch);
        left
    }

    /// Pages by which the group is above what is `below` bytes under its limit. (Frames are given back so many at a time that few calls
    /// do: until there are as many it counts for nothing what free frames would make up for, where that `waits`.)
    pub(crate) fn over(&self, s: &State, below: isize, waits: bool) -> usize {
        let excess = self.excess(s);
        let over = ((excess + below).max(0) as usize) / PAGE + self.asked_for(s, excess);
        let waits = waits && !self.gives(s, over) && s.zone.free_slots(Kind::Frame) >= over + KEPT_FRAMES;
        if waits { 0 } else { over }
    }

    /// Whether frames are given back for so many pages that are to be.
    fn gives(&self, s: &State, pages: usize) -> bool {
        pages >= (self.share() / PAGE / 128).clamp(MANY_LEAST, MANY_MOST) || !self.saves_flushes(s) || self.is_to_give()
    }
}

#[cfg(test)]
mod tests;

//! The reclaim path: moves old pages out of the program, compresses them, and frees their frames.
//!
//! ```text
//! resident ──MOVE──▶ staged ──clean: hash unchanged──▶ compressed (kept copy)      frame ─▶ free ─▶ next fault
//!    ▲                 │ └──all zeros──▶ zero                                        or given back to the kernel
//!    └──── refault ────┘ └──compressed outside the lock (Busy)──▶ pool
//! ```
//! This file decides when to reclaim and how much; `stage` moves folios out, `store` compresses them, `transfer` calls the
//! kernel. The reclaim thread works in the background, in batches, between two watermarks of free frames. Where all faults come
//! from one CPU, the handler reclaims before it serves each (`make_room`; `placement` says why). Direct reclaim, for a fault that
//! finds no free frame, is the last resort of both.
//!
//! lz4 is the codec to begin with; `densify` says what happens when the pool crowds the program out. Where even that is not
//! enough, reclaim does not squeeze the resident set below its `floor`, as the program would do nothing but fault. It then exceeds its
//! limit by what the pool needs, which is counted and shown in the summary.
//!
//! The story: the background thread kept to that floor where the limit was exceeded, but not where frames were few, and at the
//! floor they always are. A program that reads 400 MiB by Zipf's law in 220 had 3 % of its memory resident, and faulted 745,000
//! times in 86 s. With an eighth resident, and no more above its limit, it faults 24,000 times in 6 s.

pub(crate) mod floor;
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
use uzswap_sys::lock::{self, Guard};
use uzswap_sys::thread;

/// How many frames are given back at once where TLB flushes are to be saved: a 128th of the limit, or of a member's share of it,
/// between these bounds. (That is less than half of the margin below any limit, 1 MiB.)
const MANY_LEAST: usize = 64;
const MANY_MOST: usize = 192;
/// Free frames that are kept in reserve, and so cannot make up for an excess meanwhile.
const KEPT_FRAMES: usize = BATCH_PAGES + BLOCK_PAGES;

/// After this many failed rounds in a row, nothing more can be evicted.
const MOST_FAILURES: u32 = 20;
/// The pause after each failed round.
const FAILED_NS: u64 = 50_000;
/// How long the reclaim thread must have nothing to do before its buffers go back to the kernel.
const REST_NS: u64 = 20_000_000;

/// How long a thread that found nothing to evict waits before it looks again (nanoseconds): this long for every `MANY_LOOK`
/// members, but no longer than a part of the time for which its finding is believed.
const FULL_NAP_NS: u64 = 20_000_000;
const FULL_NAP_MOST_NS: u64 = 200_000_000;
const MANY_LOOK: u64 = 8;

impl Pager {
    /// The reclaim thread.
    pub fn reclaim_loop(&self) -> ! {
        self.reclaim_until_stopped();
        thread::exit()
    }

    /// Reclaims until `stopping` is set (a region ends, or the process is let go of).
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
                self.calls.set_hold_up_room(false);
                return self.calls.hold_back(Waits::Reclaim, false);
            }
            self.serve_request(&mut batch);
            let nap = self.look_after_client();
            if !self.wants_reclaim() {
                failures = 0;
                self.gets_on();
                self.calls.hold_back(Waits::Reclaim, false);
                self.calls.set_hold_up_room(false);
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
            // Pages that an unread event keeps from leaving can still be evicted.
            if !self.calls.are_waited_for(Waits::Reclaim) {
                failures += 1;
            }
            if failures > MOST_FAILURES {
                self.gives_nothing();
                let mut s = self.state.lock();
                if self.floor_sinks() {
                    self.gets_on();
                } else if !self.has_disk_make_room(&mut s) {
                    self.full(&s);
                }
                drop(s);
                lock::futex_wait(&self.me().wake, self.me().wake.load(Acquire), Some(self.full_nap_ns()), true);
            } else {
                thread::sleep_ns(FAILED_NS);
            }
        }
    }

    /// Makes room in the calling thread, beside the reclaim thread, until the limit is kept or nothing more can be evicted.
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

    /// Whether a thread keeps the reclaim thread from making room, by a mapping call under way.
    pub(crate) fn keeps_from_room(&self, tid: u32) -> bool {
        self.calls.hold_up_room() && self.calls.are_held_by(tid)
    }

    /// Takes the lock between calls, for the reclaim thread to make room. If a call is under way, calls that begin wait a moment
    /// each until this is tried again, and a thread that faults in a call need not wait for room.
    pub(crate) fn lock_to_make_room(&self) -> Option<Guard<'_, State>> {
        let s = self.lock_between_calls();
        self.calls.set_hold_up_room(s.is_none());
        s
    }

    /// How long a thread that found nothing to evict waits before it looks again. (Of many members, each sums up what all others
    /// hold.)
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
        // Where it can, the handler does what is to be done before the limit is exceeded.
        let ahead = !self.handler_reclaims(&s);
        let over = excess > 0 || (ahead && self.over(&s, margin, true) > 0) || self.asked_for(&s, excess) > 0;
        if excess > 0 {
            self.wake_others();
        }
        if over {
            self.look_at_floor();
            self.look_at_others();
            self.ask_the_largest(&s);
            self.count_excess(&s, margin as usize);
        }
        !s.unshare.is_empty() || self.wants_read_only(&s) || over || (ahead && short) || self.calls.may_be_torn()
    }

    /// If a child that shares this memory was killed in a call, checks what it did. Nothing leaves before that.
    fn check_if_torn(&self) {
        if self.calls.may_be_torn()
            && let Some(s) = self.lock_between_calls()
        {
            drop(s);
            self.calls.go_on();
        }
    }

    /// One round: stages, compresses a batch, gives frames back. False when it could do nothing.
    pub(crate) fn reclaim_step(&self, batch: &mut Batch) -> bool {
        let (low, high) = self.watermarks();
        let (mut progress, mut put_off) = (false, false);
        self.check_if_torn();
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
            // Not even for frames: they are few as long as the limit is exceeded, since they are given back.
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
                // Pages that a full pool refuses go back to the program, so only pages that leave count as progress.
                let refusing = self.zswap_is_full(&s);
                let staged = self.stage_exclusive_first(&mut s, short);
                put_off = staged.is_err();
                progress |= staged.unwrap_or(0) > 0 && !refusing;
                progress |= self.prepare(&mut s, batch, want, keep) && !refusing;
            }
            self.calls.hold_back(Waits::Reclaim, put_off);
            s.calls_stopped = false;
            // Before the lock is released: the thread that gets it next, and runs instead of this one, takes pages too.
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

    /// Makes room before a fault is served, where the handler reclaims by itself, or where the reclaim thread has fallen behind
    /// and the limit is exceeded: then whoever faults pays. (After a fork see [`Pager::make_room_beside_kin`]: pages that must be
    /// un-shared first would be tried in vain before each fault.)
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
        // Frames go round: some are freed when there are none, and none go to the kernel or come from it while the group stays
        // within a band below its limit.
        let margin = self.margin() as isize;
        let spare = s.zone.free_slots(Kind::Frame);
        let need = s.streams.expected(vpn);
        // Sequential pages need runs of frames: single ones that wait to be given back are of no use to them.
        let waits = need <= BLOCK_PAGES;
        // Growth of the program's unmanaged memory shows only when the kernel is asked.
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
            // The story: Redis had 3 MiB of 72 in memory for minutes, in a group of 63 that used 12. By all that could be seen, a
            // child had ended and left its charge. The handler kept the parent just below the limit in what that left, and dead
            // members were only looked for above it.
            self.look_at_others();
            self.count_sharers();
            self.ask_the_largest(s);
            self.count_excess(s, margin as usize / 2);
        }
        // Free frames go first: otherwise a round for each page by which the pool grew would fill the limit with them.
        let idle = spare.saturating_sub(need + BATCH_PAGES);
        if over > 0 && idle > 0 && !self.without_move && (!waits || self.gives(s, over)) {
            let given = self.give_back(s, (over + BLOCK_PAGES).min(idle));
            if given >= over {
                return Ok(());
            }
        }
        let floor = over > 0 && self.at_floor(s);
        let disk_helps = floor && self.has_disk_make_room(s);
        // A full pool takes only zeros: where there were few, it is tried again later.
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
        // Also just below the limit: the program lacks what the pool wastes.
        let shrinks = self.compact_pool(s);
        self.cut_sparse(s);
        let shrinks = self.densify(s, 4) || shrinks;
        let spare = s.zone.free_slots(Kind::Frame);
        // Without MOVE a page that leaves gives its memory back at once; and the frames free by now may be enough to wait for
        // more.
        let over = match self.without_move || self.saves_flushes(s) {
            true => self.over(s, margin / 2, waits),
            false => over,
        };
        let given = if over > 0 && spare > BLOCK_PAGES { self.give_back(s, over.min(spare - BLOCK_PAGES)) } else { 0 };
        // While the pool shrinks, or there were frames to spare, more can still be evicted; likewise while the reclaim thread may
        // make more pages fit to leave.
        if floor && !disk_helps {
            if shrinks || given > 0 {
                self.gets_on();
            } else if !self.may_unshare(s) && !self.wants_read_only(s) {
                self.full(s);
            }
        }
        staged
    }

    /// How many pages to keep staged as the second chance.
    fn stage_target(&self, s: &State) -> usize {
        // A limit raised after the start may be large for the arena.
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

    /// One round of reclaim in the calling thread, which holds the lock. It stages `want` pages beyond the `keep` that stay
    /// staged, and stores as many. With `later`, if helpers compress the batch and that many frames are free, the next round may
    /// store it instead. Returns how many pages left, and whether an unread event kept any from being staged.
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
        // A random fault brings a page or a block. The handler would lose the program to the CPU that a helper leaves; a region's
        // own threads serve their faults.
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

    /// Stages what `want` pages beyond `keep` need, and makes a batch of them.
    fn take_more(&self, s: &mut State, batch: &mut Batch, want: usize, keep: usize) -> Result<(), EventPending> {
        let staged = self.stage(s, (keep + want).saturating_sub(s.idle_staged()));
        self.prepare(s, batch, want, keep);
        staged.map(|_| ())
    }

    /// Compresses and stores a batch under the lock; returns how many pages left.
    pub(crate) fn store_now(&self, s: &mut State, batch: &mut Batch) -> usize {
        batch.compress(self);
        self.commit(s, batch)
    }

    /// Stores the batch that a round left to helpers; returns how many pages left.
    pub(crate) fn store_posted(&self, s: &mut State) -> usize {
        let Some(mut batch) = s.direct.take_if(|batch| batch.is_posted()) else { return 0 };
        batch.finish(self);
        let left = self.commit(s, &mut batch);
        s.direct = Some(batch);
        left
    }

    /// By how many pages the group exceeds the line that is `below` bytes under its limit. Frames are given back many at a time,
    /// to save calls; until there are so many, and if it `waits`, an excess that free frames would make up for counts as nothing.
    pub(crate) fn over(&self, s: &State, below: isize, waits: bool) -> usize {
        let excess = self.excess(s);
        let over = ((excess + below).max(0) as usize) / PAGE + self.asked_for(s, excess);
        let waits = waits && !self.gives(s, over) && s.zone.free_slots(Kind::Frame) >= over + KEPT_FRAMES;
        if waits { 0 } else { over }
    }

    /// Whether enough pages are to be given back for that to begin now.
    fn gives(&self, s: &State, pages: usize) -> bool {
        pages >= (self.share() / PAGE / 128).clamp(MANY_LEAST, MANY_MOST) || !self.saves_flushes(s) || self.is_to_give()
    }
}

#[cfg(test)]
mod tests;

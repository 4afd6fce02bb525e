//! Compaction: moves pages in use together, so that runs of free frames appear elsewhere.
//!
//! ```text
//! zone start                       pivot                              zone end
//!     │ · · x · x x │ x · · x x · │ x · x · · x │ · x x · x · │ x x · x · · │
//!       ◀── free scanner ─────────┤├───────── migrate scanner ──▶
//!           (takes free frames)        (takes pages in use)
//!       each goes on at the other end when it comes to an end, and they stop where they meet
//! ```
//! The mechanism is [`Compactor`]. It asks a [`policy::Policy`] where to take pages from and where to put them,
//! isolates a handful at a time, has a [`Migrate`] move them, and frees the frames they left. It works on frame
//! numbers; the owner of the memory moves it. `scanner` holds the positions of the two linear scanners and tells when
//! they have met, `pivot` where they start, `deferral` when to give up for a while. `policy` has the three ways to
//! choose page blocks, `counters` what is counted.
//!
//! # What reviewers objected to in the original, and what is done about it here
//!
//! 1. *The pivot moves too slowly*: it moves only on a restart after maximal deferral, so between two moves the same
//!    part of the zone is emptied and the same part filled. [`policy::Pivot`] does just that, as published. Our own
//!    rule, [`policy::Emptiest`], has no pivot: it goes to where the least work is.
//! 2. *Pages are migrated back and forth* as the scanners change direction. [`Counters::migrated_twice`] counts pages
//!    moved more than once in a pass; the bound is 0. In a pass a page moves only into a block that the free scanner
//!    has reached. The migrate scanner enters no such block (they meet first, by block), and `Emptiest` takes no page
//!    from a block that received one in the same pass. The counter counts what actually happens, by a mark for each
//!    frame, and tests hold it at 0. [`Counters::migrated_again`] counts pages that move in two passes in succession,
//!    which no rule forbids.
//! 3. *The code is hairy*: positions, pivot, deferral and policy are values of their own, each with its own tests. The
//!    mechanism does not know which policy runs, and no scanner knows about deferral.
//!
//! # Invariants
//! At most one side isolates a frame. What is isolated is moved or put back before [`Compactor::run`] returns, and
//! target frames not used return to the zone. The number of frames in use never changes. Nothing here runs on the fault
//! path. A run looks at no more than [`Goal::budget`] frames, except that it finishes the block it is in and finds a
//! place for each of the handful it took last. Every run advances by at least a block, so a pass ends. Owner: the
//! pager's lock.

pub mod counters;
pub mod deferral;
pub mod pivot;
pub mod policy;
pub mod rule;
pub mod scanner;

use crate::zone::{BLOCK_FRAMES, Kind, MAX_ORDER, Zone};
pub use counters::Counters;
use deferral::Deferral;
use policy::Policy;

/// Pages isolated at a time: the kernel's COMPACT_CLUSTER_MAX.
const CLUSTER: usize = 32;

/// Implemented by the owner of the memory behind the frames.
pub trait Migrate {
    /// Takes a frame in use for moving: until [`Migrate::migrate`] or [`Migrate::putback`] nobody else changes it.
    /// False when it cannot be moved now (or ever).
    fn isolate(&mut self, zone: &Zone, frame: u32) -> bool;

    /// For a frame that could not be isolated: how many frames from it on belong to the same thing. So the scanner
    /// skips a huge page as a whole.
    fn extent(&self, frame: u32) -> u32 {
        let _ = frame;
        1
    }

    /// Moves the contents of `from`, which was isolated or is free of the other [`Kind`], to `to`, and makes all
    /// references to `from` name `to`. False when that failed; then nothing has changed.
    fn migrate(&mut self, zone: &mut Zone, from: u32, to: u32) -> bool;

    /// Releases an isolated frame: it stays where it is.
    fn putback(&mut self, frame: u32);
}

/// Why a compaction runs, and when it must stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Goal {
    /// The kind of free slots to gather. Free slots of the other kind are moved like pages in use.
    pub kind: Kind,
    /// The order of the run that is wanted.
    pub order: u8,
    /// For background compaction: stop when the fragmentation for `order` is at or below this, not at the first run of
    /// `order`. 0 to 100, see [`Zone::fragmentation`].
    pub score: Option<u32>,
    /// Frames that both scanners may look at before the migrate scanner must not begin another block. What the policy
    /// looks at to choose, once in a pass, is not included.
    pub budget: u64,
}

/// How a compaction ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The goal is reached.
    Success,
    /// The scanners have met: a whole pass is done.
    Complete,
    /// The budget is spent. The next run continues here, in the same pass.
    Partial,
    /// Not tried, as it failed too often lately.
    Deferred,
    /// Not tried, as too few frames are free for it to make sense.
    Skipped,
}

/// The state of compaction of one zone under one policy.
pub struct Compactor<P> {
    /// Chooses where pages come from and go to.
    pub policy: P,
    /// Tells when not to try.
    pub deferral: Deferral,
    /// Counts what was done.
    pub counters: Counters,
    /// For each frame, the pass (modulo 255, plus one) in which a page was last moved into it; 0 for none.
    moved_in: Vec<u8>,
    pass: u8,
    /// Pages moved before this pass.
    moved_before: u64,
    /// The kind that the last run gathered, if it stopped in the middle of its pass.
    stopped: Option<Kind>,
    /// Whether a pass has ended since the skip bits were cleared.
    flush: bool,
    from: Vec<u32>,
    to: Vec<u32>,
}

impl<P: Policy> Compactor<P> {
    /// A compactor that has not run yet.
    pub fn new(policy: P) -> Self {
        Self {
            policy,
            deferral: Deferral::default(),
            counters: Counters::default(),
            moved_in: Vec::new(),
            pass: 1,
            moved_before: 0,
            stopped: None,
            flush: false,
            from: Vec::with_capacity(CLUSTER),
            to: Vec::with_capacity(BLOCK_FRAMES as usize),
        }
    }

    /// Bytes of its own tables.
    pub fn metadata_bytes(&self) -> usize {
        self.moved_in.capacity() + (self.from.capacity() + self.to.capacity()) * 4
    }

    /// Direct compaction, for an allocation of `goal.order` that failed. The caller retries the allocation afterwards,
    /// and reports success by [`Compactor::allocated`].
    pub fn direct(&mut self, zone: &mut Zone, goal: Goal, mover: &mut impl Migrate) -> Outcome {
        // The kernel's compact_gap: twice the run, above the reserve. With less the pass is likely to fail, and the
        // next attempt, for which reclaim has made room, would be deferred. That used to cost `uzswap lab highalloc`
        // every tenth huge page.
        if zone.free_slots(goal.kind) < zone.watermarks.min + (2 << goal.order) {
            return Outcome::Skipped;
        }
        if self.deferral.is_deferred(goal.order) {
            return Outcome::Deferred;
        }
        self.counters.compact_stall += 1;
        if self.deferral.is_restarting(goal.order) {
            self.policy.restart(zone);
        }
        let outcome = self.run(zone, goal, mover);
        match outcome {
            Outcome::Success => {
                self.counters.compact_success += 1;
                self.deferral.reset(goal.order, false);
            }
            _ => self.counters.compact_fail += 1,
        }
        if outcome == Outcome::Complete {
            self.deferral.defer(goal.order);
        }
        outcome
    }

    /// The allocation that direct compaction was for has succeeded.
    pub fn allocated(&mut self, order: u8) {
        self.deferral.reset(order, true);
    }

    /// Background compaction towards `goal.score`. The caller decides when.
    pub fn background(&mut self, zone: &mut Zone, goal: Goal, mover: &mut impl Migrate) -> Outcome {
        let outcome = self.run(zone, goal, mover);
        match outcome {
            Outcome::Success => self.deferral.reset(goal.order, false),
            // After a whole pass the skip bits are out of date.
            Outcome::Complete => self.reclaim_rests(zone),
            _ => {}
        }
        outcome
    }

    /// Background reclaim has reached its mark and goes to sleep. If a whole pass has ended since, the skip bits are
    /// out of date and are cleared (the kernel's compact_blockskip_flush).
    pub fn reclaim_rests(&mut self, zone: &mut Zone) {
        if core::mem::take(&mut self.flush) {
            pivot::clear_skip(zone);
        }
    }

    /// Begins a pass, or continues the one in which the last run stopped.
    fn begin(&mut self, zone: &mut Zone, kind: Kind) {
        let goes_on = self.stopped.take() == Some(kind);
        if self.policy.begin(zone, kind, goes_on) {
            self.moved_before = self.counters.pgmigrate_success;
            self.pass = self.pass % 255 + 1;
            if self.pass == 1 {
                // Marks from 255 passes ago would count as this pass's.
                self.moved_in.fill(0);
            }
        }
        self.counters.compact_migrate_scanned += self.policy.looked_at();
    }

    fn is_done(zone: &Zone, goal: &Goal) -> bool {
        match goal.score {
            Some(score) => zone.fragmentation(goal.kind, goal.order.min(MAX_ORDER)) <= score,
            None => zone.has_run(goal.kind, goal.order),
        }
    }

    fn run(&mut self, zone: &mut Zone, goal: Goal, mover: &mut impl Migrate) -> Outcome {
        zone.coalesce();
        if Self::is_done(zone, &goal) {
            // The policy's choice will be out of date by the next run.
            self.stopped = None;
            return Outcome::Success;
        }
        self.begin(zone, goal.kind);
        // Blocks looked at to choose do not count against the budget: with many blocks nothing would be left of it.
        let upto = self.counters.scanned().saturating_add(goal.budget);
        let outcome = loop {
            if Self::is_done(zone, &goal) {
                break Outcome::Success;
            }
            if self.counters.scanned() > upto {
                self.stopped = Some(goal.kind);
                break Outcome::Partial;
            }
            if !self.isolate_pages(zone, goal.kind, upto, mover) {
                if self.counters.scanned() > upto {
                    continue;
                }
                // Every pass that moves something leaves less to move.
                if self.counters.pgmigrate_success > self.moved_before && self.policy.is_worth_another_pass() {
                    self.release_targets(zone, goal.kind);
                    self.begin(zone, goal.kind);
                    continue;
                }
                break Outcome::Complete;
            }
            self.move_pages(zone, goal.kind, mover);
        };
        self.release_targets(zone, goal.kind);
        if outcome == Outcome::Complete {
            self.policy.met(zone);
            self.flush = true;
        }
        outcome
    }

    /// Isolates up to a cluster of pages to move. False when the scanners have met, or have looked at more than `upto`
    /// frames in all.
    fn isolate_pages(&mut self, zone: &mut Zone, kind: Kind, upto: u64, mover: &mut impl Migrate) -> bool {
        debug_assert!(self.from.is_empty());
        while self.counters.scanned() <= upto
            && let Some((mut at, end)) = self.policy.next_source(zone, kind)
        {
            let mut scanned = 0;
            // The position may lie inside a free run by now.
            let mut around = zone.free_run_around(at);
            while at < end && self.from.len() < CLUSTER {
                scanned += 1;
                let here = zone.free_run_at(at).map(|(k, order)| (k, at, order));
                match around.take().or(here) {
                    Some((k, head, order)) if k == kind => {
                        at = head + (1 << order);
                        continue;
                    }
                    // Free, but of the other kind: it is moved, too.
                    Some((other, ..)) => {
                        zone.take_frame(other, at);
                        self.from.push(at | OTHER_KIND);
                    }
                    None if mover.isolate(zone, at) => self.from.push(at),
                    None if self.policy.refused(zone, at) => {
                        self.spoilt(zone, kind, mover);
                        at = end;
                        break;
                    }
                    None => {
                        at += mover.extent(at);
                        continue;
                    }
                }
                at += 1;
            }
            let at = at.min(end);
            self.counters.compact_migrate_scanned += scanned;
            self.policy.source_done(zone, at, !self.from.is_empty());
            if !self.from.is_empty() {
                self.counters.compact_isolated += self.from.len() as u64;
                return true;
            }
        }
        false
    }

    /// Abandons the block that pages were just isolated from: they stay.
    fn spoilt(&mut self, zone: &mut Zone, kind: Kind, mover: &mut impl Migrate) {
        for page in self.from.drain(..) {
            if page & OTHER_KIND != 0 {
                zone.free_merged(other(kind), page & !OTHER_KIND, 0)
            } else {
                mover.putback(page)
            }
        }
    }

    /// Makes target frames ready for the isolated pages; false when none are left.
    fn find_targets(&mut self, zone: &mut Zone, kind: Kind) -> bool {
        while self.to.is_empty() {
            let Some((at, end)) = self.policy.next_target(zone, kind) else { return false };
            let (at, scanned) = if self.policy.uses_map() {
                let found = zone.free_frames(kind, at, end, CLUSTER, &mut self.to);
                self.to.iter().for_each(|frame| assert!(zone.take_frame(kind, *frame), "the map says it is free"));
                found
            } else {
                self.look_at_each(zone, kind, at, end)
            };
            self.counters.compact_free_scanned += scanned;
            self.counters.compact_isolated += self.to.len() as u64;
            self.policy.target_done(zone, at, !self.to.is_empty());
            // So that the lowest is handed out first.
            self.to.reverse();
        }
        true
    }

    /// Takes free frames, enough for what is isolated now. If it stops inside a block, the next call continues there.
    /// Returns that position, and how many frames it looked at.
    fn look_at_each(&mut self, zone: &mut Zone, kind: Kind, mut at: u32, end: u32) -> (u32, u64) {
        let mut scanned = 0;
        // The position may lie inside a free run by now.
        let mut around = zone.free_run_around(at);
        while at < end && self.to.len() < CLUSTER {
            scanned += 1;
            let here = zone.free_run_at(at).map(|(k, order)| (k, at, order));
            match around.take().or(here) {
                Some((k, ..)) if k == kind => {
                    zone.take_frame(kind, at);
                    self.to.push(at);
                }
                Some((_, head, order)) => {
                    at = head + (1 << order);
                    continue;
                }
                None => {}
            }
            at += 1;
        }
        (at.min(end), scanned)
    }

    fn move_pages(&mut self, zone: &mut Zone, kind: Kind, mover: &mut impl Migrate) {
        let mut from = core::mem::take(&mut self.from);
        for page in from.drain(..) {
            let (page, free) = (page & !OTHER_KIND, page & OTHER_KIND != 0);
            let target = if self.find_targets(zone, kind) { self.to.pop() } else { None };
            let moved = target.is_some_and(|to| mover.migrate(zone, page, to));
            match (moved, target) {
                (true, Some(to)) => {
                    self.count_move(zone, page, to);
                    zone.free_merged(kind, page, 0);
                    if free {
                        zone.free_merged(other(kind), to, 0);
                    }
                }
                (_, target) => {
                    if let Some(to) = target {
                        self.counters.pgmigrate_fail += 1;
                        self.to.push(to);
                    }
                    if free { zone.free_merged(other(kind), page, 0) } else { mover.putback(page) }
                }
            }
        }
        self.from = from;
    }

    fn count_move(&mut self, zone: &Zone, page: u32, to: u32) {
        self.counters.pgmigrate_success += 1;
        self.moved_in.resize((zone.end() - zone.start()) as usize, 0);
        let before = core::mem::take(&mut self.moved_in[(page - zone.start()) as usize]);
        if before == self.pass {
            self.counters.migrated_twice += 1;
        } else if before != 0 && before % 255 + 1 == self.pass {
            self.counters.migrated_again += 1;
        }
        self.moved_in[(to - zone.start()) as usize] = self.pass;
    }

    fn release_targets(&mut self, zone: &mut Zone, kind: Kind) {
        if !self.to.is_empty() {
            self.policy.targets_returned();
        }
        for frame in self.to.drain(..) {
            zone.free_merged(kind, frame, 0);
        }
    }
}

/// Marks a page in `from` that is free and of the other kind.
const OTHER_KIND: u32 = 1 << 31;

fn other(kind: Kind) -> Kind {
    match kind {
        Kind::Frame => Kind::Hole,
        Kind::Hole => Kind::Frame,
    }
}

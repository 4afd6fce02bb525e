//! Paging out and in on request: ranges of a process's or a region's private memory.
//!
//! This module does the work under the lock, a piece at a time, so that faults get their turn in between; `request` is how a
//! command asks a process for it. Pages leave and come by the very steps of reclaim (`stage`, `store`) and of faults (`deliver`),
//! which deal with what the program does meanwhile: a thread that touches a page that is leaving takes it back, and the page
//! counts as one that stayed.
//!
//! A piece ends early where an event is unread: until it is read, nothing is known of the pages behind that point. A process's
//! reclaim thread then pauses and tries again; a region has no events.

use crate::calls::events::forget_range;
use crate::fault::deliver::Delivery;
use crate::fault::{EventPending, Request};
use crate::frames::arena::{PAGE, discard};
use crate::pager::Pager;
use crate::pool::batch::{BATCH_PAGES, Batch};
use crate::state::{FOLIO_PAGES, State};
use uzswap_mm::pagetable::Tag;
use uzswap_mm::zone::Kind;

impl Pager {
    /// Evicts the resident pages `[from, to)`, and whatever else is staged; returns how many pages of the range left. The frames
    /// that this frees go back to the kernel. It holds the lock for 64 pages at a time.
    pub fn page_out(&self, from: u64, to: u64) -> usize {
        let (mut at, mut left) = (from, 0);
        while at < to {
            let mut s = self.state.lock();
            let Some(first) = s.pt.next_known(at).filter(|first| *first < to) else { break };
            at = first;
            let end = to.min(at + BATCH_PAGES as u64);
            let (moved, stopped) = self.stage_range(&mut s, at, end);
            left += moved;
            if stopped < end {
                // The thread that reads events must read this one first.
                return left;
            }
            at = end;
            self.store_staged(&mut s);
        }
        left
    }

    /// Stages the resident pages of `[from, to)` without compressing them; returns how many.
    pub fn age(&self, from: u64, to: u64) -> usize {
        let (mut at, mut left) = (from, 0);
        while at < to {
            let mut s = self.state.lock();
            let Some(first) = s.pt.next_known(at).filter(|first| *first < to) else { break };
            let end = to.min((first / FOLIO_PAGES as u64 + 1) * FOLIO_PAGES as u64);
            left += self.stage_range(&mut s, first, end).0;
            at = end;
        }
        left
    }

    /// Stores all that is staged; returns how many pages.
    pub fn page_out_idle(&self) -> usize {
        let mut s = self.state.lock();
        let staged = s.staged;
        self.store_staged(&mut s);
        staged - s.staged
    }

    /// Stores what is staged, as far as there is room, and gives the frames back. The lock is held throughout.
    fn store_staged(&self, s: &mut State) {
        self.store_posted(s);
        let mut batch = s.take_direct();
        loop {
            let before = s.idle_staged();
            self.prepare(s, &mut batch, BATCH_PAGES, 0);
            self.store_now(s, &mut batch);
            if s.idle_staged() == 0 || s.idle_staged() >= before {
                break;
            }
        }
        s.direct = Some(batch);
        self.give_back_spare(s);
    }

    /// Stores one batch, without the lock while it compresses; for a thread of its own. False when nothing could be stored.
    pub(crate) fn store_batch(&self, batch: &mut Batch) -> bool {
        self.let_writer_go_on();
        let mut s = self.state.lock();
        let before = s.staged;
        self.prepare(&mut s, batch, BATCH_PAGES, 0);
        drop(s);
        batch.compress(self);
        let mut s = self.state.lock();
        let left = self.commit(&mut s, batch);
        self.give_back_spare(&mut s);
        left > 0 || s.staged < before
    }

    fn give_back_spare(&self, s: &mut State) {
        let (low, _) = self.watermarks();
        let spare = s.zone.free_slots(Kind::Frame);
        if spare > low {
            self.give_back(s, spare - low);
        }
    }

    /// Moves the resident pages of `[from, to)` out, uncompressed: a thread that touches one takes it back cheaply. Returns how
    /// many pages left, and where it stopped: at `to`, or at a page before which an event must be read.
    pub(crate) fn stage_range(&self, s: &mut State, from: u64, to: u64) -> (usize, u64) {
        let (mut at, mut left) = (from, 0);
        while at < to {
            let n = s.resident_run(at, to);
            if n == 0 {
                at += 1;
                continue;
            }
            match self.stage_run(s, at, n) {
                Ok(moved) => left += moved,
                Err(EventPending) => return (left, at),
            }
            at += n as u64;
        }
        (left, to)
    }

    /// Brings back the pages of `[from, to)` that are out, except for those on disk and those never touched. Returns how many
    /// came, and where it stopped, as [`Pager::stage_range`].
    pub(crate) fn bring_range(&self, s: &mut State, from: u64, to: u64) -> (usize, u64) {
        let (mut at, mut came) = (from, 0);
        while at < to {
            let tag = s.pt.get(at).tag();
            let same =
                |t: Tag| if t == Tag::Staged { tag == Tag::Staged } else { matches!(t, Tag::Zero | Tag::Compressed) };
            let n = (at..to).take_while(|v| same(s.pt.get(*v).tag())).count().max(1);
            let got = match tag {
                Tag::Staged => self.bring_staged(s, at, n),
                Tag::Busy => self.bring_busy(s, at),
                Tag::Zero | Tag::Compressed => {
                    let mut d = Delivery::of(Request { vpn: at, write: false, protected: false }, false);
                    let got = self.bring_out(s, at, n, &mut d);
                    self.count_delivery(s, &d);
                    got
                }
                Tag::None | Tag::Resident | Tag::Disk | Tag::Poisoned => Ok(0),
            };
            match got {
                Ok(n) => {
                    came += n;
                    at += n.max(1) as u64;
                }
                Err(EventPending) => return (came, at),
            }
        }
        (came, to)
    }

    /// Brings back the pages `[from, to)` of a region that are out, and makes room for them as a fault does; returns how many
    /// came.
    pub fn page_in(&self, from: u64, to: u64) -> usize {
        let (mut at, mut came) = (from, 0);
        while at < to {
            let mut s = self.state.lock();
            let Some(first) = s.pt.next_known(at).filter(|first| *first < to) else { break };
            at = first;
            let end = to.min(at + BATCH_PAGES as u64 / 4);
            let _ = self.make_room(&mut s, at);
            let (n, stopped) = self.bring_range(&mut s, at, end);
            came += n;
            if stopped < end {
                break;
            }
            at = end;
        }
        came
    }

    /// Drops the contents of the pages `[from, to)` of a region: they read as zeros, as if never touched. (Only for a region: it
    /// asks for no events, so the advice does not wait for us.)
    pub fn remove(&self, from: u64, to: u64) {
        let mut s = self.state.lock();
        forget_range(&mut s, from, to);
        // SAFETY: the caller gives the contents up; a thread that faults meanwhile waits for the lock.
        unsafe { discard(from as usize * PAGE, (to - from) as usize * PAGE) };
        self.forget_marks(from, to);
    }
}

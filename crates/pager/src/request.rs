//! Serves what a command asks of a running process: pages out, and in.
//!
//! Each slot of the group's page has room for one request. A command takes it (`holder`), writes what it wants, and wakes the
//! member. The member's reclaim thread does the work, after the ticker has made the process manage its memory if it did not yet.
//!
//! ```text
//! state: IDLE ─ the holder ─▶ ASKED ─ the member ─▶ SERVING ─ the member ─▶ DONE ─ the holder ─▶ IDLE
//!                               └───── the holder withdraws: IDLE
//! ```
//! # Who may be killed or stopped when
//! Any process. A *member* that ends leaves the state as it is; the holder sees that the slot's owner is dead, and whoever takes
//! the slot (after exec too) puts SERVING back to IDLE. A request names its target, so the next owner of a slot does not do what
//! was asked of the one before. A *command* that ends leaves its hold, which the next one takes from the dead. The member stops
//! when it sees that the hold has changed, and until then no new request can be made. A *stopped* member does nothing until it
//! goes on; the holder withdraws, and then nothing is done.
//!
//! The work moves pages as a fault or reclaim would, so it may come at any moment, whatever the program does.

use crate::group::Slot;
use crate::group::holder::Holder;
use crate::page_state::mapfile::{Kind as MapKind, MapFile};
use crate::pager::Pager;
use crate::pool::batch::{BATCH_PAGES, Batch};
use crate::state::{FOLIO_PAGES, State};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use uzswap_mm::pagemap::{PageState, SOFT_DIRTY};
use uzswap_mm::pagetable::{ADDRESS_SPACE_PAGES, Tag};
use uzswap_sys::process::Identity;
use uzswap_sys::{lock, sys, thread};

/// There is no request.
pub const IDLE: u32 = 0;
/// The holder has made a request.
pub const ASKED: u32 = 1;
/// The member is working on it.
pub const SERVING: u32 = 2;
/// The member has done what it could.
pub const DONE: u32 = 3;

/// What can be asked for a range of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Op {
    /// Page it out.
    Out = 1,
    /// Move it out of the program without compressing it: pages in use come back by themselves.
    Stage = 2,
    /// Compress the pages of it that have not come back.
    Store = 3,
    /// Bring it in.
    In = 4,
    /// Clear its soft-dirty bits.
    Clean = 5,
    /// Write-protect it, for the client that holds the slot's `watch`: see `notify`.
    Protect = 6,
    /// End that protection.
    Release = 7,
}

impl Op {
    fn of(number: u32) -> Option<Self> {
        [Self::Out, Self::Stage, Self::Store, Self::In, Self::Clean, Self::Protect, Self::Release]
            .into_iter()
            .find(|op| *op as u32 == number)
    }
}

/// The result of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Managed pages in the range.
    pub known: u64,
    /// Pages that left, or came; for [`Op::Store`] those that were still out, for [`Op::Clean`] those that were soft-dirty, for
    /// [`Op::Protect`] those that are protected, and for [`Op::Release`] those that were.
    pub pages: u64,
    /// Pages that should have left but are in memory: used again at once, locked, or in use by a device. For [`Op::Protect`]
    /// those that can be written to anyway, for [`Op::Clean`] those whose bits could not be cleared just then.
    pub stayed: u64,
}

/// A slot's request.
#[repr(C)]
#[derive(Default)]
pub struct PageRequest {
    /// The command that makes the request.
    pub holder: Holder,
    /// The member that must do it, as `Identity::raw`; 0: none.
    pub target: AtomicU64,
    /// [`IDLE`] to [`DONE`]; a futex word.
    pub state: AtomicU32,
    /// An [`Op`].
    pub op: AtomicU32,
    /// The first page.
    pub from: AtomicU64,
    /// One past the last.
    pub to: AtomicU64,
    /// As in [`Moved`], so far.
    pub known: AtomicU64,
    /// As in [`Moved`], so far.
    pub pages: AtomicU64,
    /// As in [`Moved`], so far.
    pub stayed: AtomicU64,
    /// Counts pieces done, and parts of the work before one is done (wrapping): shows that the work goes on.
    pub progress: AtomicU32,
}

/// How often a piece is tried while pages of it are shared with another process, and while events must be read first.
const TRIES: u32 = 3;
const EVENT_TRIES: u32 = 1000;
/// The same for a scan while mapping calls are under way.
const SCAN_TRIES: u32 = 100;
const PAUSE_NS: u64 = 100_000;

impl PageRequest {
    /// Withdraws the request, and gives the hold up.
    pub fn give_up(&self, me: Identity) {
        let _ = self.state.compare_exchange(ASKED, IDLE, AcqRel, Relaxed);
        let _ = self.state.compare_exchange(DONE, IDLE, AcqRel, Relaxed);
        self.holder.give_up(me);
    }

    /// Makes a request. Only for the holder. False while an earlier request is still being served.
    pub fn ask(&self, target: Identity, op: Op, (from, to): (u64, u64)) -> bool {
        // A holder that died may have left a request.
        let _ = self.state.compare_exchange(ASKED, IDLE, AcqRel, Relaxed);
        if self.state.load(Acquire) == SERVING {
            return false;
        }
        for (word, value) in [(&self.target, target.raw()), (&self.from, from), (&self.to, to)] {
            word.store(value, Relaxed);
        }
        [&self.known, &self.pages, &self.stayed].into_iter().for_each(|n| n.store(0, Relaxed));
        self.op.store(op as u32, Relaxed);
        self.state.store(ASKED, Release);
        true
    }

    /// The result, once the state is [`DONE`].
    pub fn moved(&self) -> Moved {
        Moved { known: self.known.load(Relaxed), pages: self.pages.load(Relaxed), stayed: self.stayed.load(Relaxed) }
    }

    /// Ends a request whose member is gone: the slot has a new owner, or the same one after exec.
    pub fn forsake(&self) {
        let _ = self.state.compare_exchange(SERVING, IDLE, AcqRel, Relaxed);
    }

    fn tell(&self, known: usize, pages: usize, stayed: usize) {
        self.known.fetch_add(known as u64, Relaxed);
        self.pages.fetch_add(pages as u64, Relaxed);
        self.stayed.fetch_add(stayed as u64, Relaxed);
        self.progress.fetch_add(1, Release);
    }
}

/// A request that is being served.
struct Work<'a> {
    r: &'a PageRequest,
    holder: Identity,
    from: u64,
    to: u64,
}

impl Work<'_> {
    /// Whether the holder still wants it.
    fn goes_on(&self) -> bool {
        self.r.holder.get() == Some(self.holder)
    }

    /// The next piece with known pages: to the next boundary of `most` pages, 2 MiB where huge pages must stay whole.
    fn piece(&self, s: &State, at: u64, most: u64) -> Option<(u64, u64)> {
        let start = s.pt.next_used(at).filter(|vpn| *vpn < self.to && self.goes_on())?;
        Some((start, self.to.min((start / most + 1) * most)))
    }
}

impl Pager {
    /// Whether a command has made a request that is not being served yet.
    pub(crate) fn is_asked(&self) -> bool {
        self.me().request.state.load(Acquire) == ASKED
    }

    /// Whether a command waits for the reclaim thread.
    pub(crate) fn has_request(&self) -> bool {
        matches!(self.me().request.state.load(Relaxed), ASKED | SERVING)
    }

    /// Ends a request without result, as this process's memory cannot be managed.
    pub(crate) fn refuse_request(&self) {
        let r = &self.me().request;
        if r.state.compare_exchange(ASKED, DONE, AcqRel, Relaxed).is_ok() {
            lock::futex_wake(&r.state, u32::MAX >> 1, true);
        }
    }

    /// Shows the holder, if there is one, that the reclaim thread is at work; it does not answer before it is done.
    pub(crate) fn show_progress(&self) {
        let r = &self.me().request;
        if matches!(r.state.load(Relaxed), ASKED | SERVING) {
            r.progress.fetch_add(1, Release);
        }
    }

    /// Serves the request, if there is one. Called by the reclaim thread.
    pub(crate) fn serve_request(&self, batch: &mut Batch) {
        let me: &Slot = self.me();
        let r = &me.request;
        if !self.is_asked() || r.state.compare_exchange(ASKED, SERVING, AcqRel, Relaxed).is_err() {
            return;
        }
        // A holder that has just given up wants nothing.
        if let Some(holder) = r.holder.get()
            && r.target.load(Relaxed) == me.owner.load(Relaxed)
        {
            let work = Work { r, holder, from: r.from.load(Relaxed), to: r.to.load(Relaxed).min(ADDRESS_SPACE_PAGES) };
            self.serve_work(&work, batch);
        }
        r.state.store(DONE, Release);
        lock::futex_wake(&r.state, u32::MAX >> 1, true);
    }

    fn serve_work(&self, work: &Work, batch: &mut Batch) {
        let op = Op::of(work.r.op.load(Relaxed));
        // The request includes what was mapped since the ticker last looked. (A region knows its memory. And whoever waits for a
        // release may keep a scan from getting between mapping calls.)
        let known = self.own_frames || op == Some(Op::Release);
        let _ = known || (0..SCAN_TRIES).any(|_| self.scan_between_calls());
        match op {
            Some(Op::Out) => self.put_out(work, batch, true),
            Some(Op::Stage) => self.put_out(work, batch, false),
            Some(Op::Store) => self.store_idle(work, batch),
            Some(Op::In) => self.bring_work(work, batch),
            Some(Op::Clean) if self.tracks => self.clean(work),
            Some(Op::Protect) if self.tracks => self.protect_work(work),
            Some(Op::Release) => self.release_work(work),
            // A region's bits are its program's own: see `Region::take_soft_dirty`.
            Some(Op::Clean | Op::Protect) | None => {}
        }
        let mut s = self.state.lock();
        s.rss = self.rss_now(&s);
        self.publish(&s);
    }

    fn put_out(&self, work: &Work, batch: &mut Batch, store: bool) {
        let (mut at, mut tries) = (work.from, 0);
        loop {
            let mut s = self.state.lock();
            let Some((start, end)) = work.piece(&s, at, FOLIO_PAGES as u64) else { break };
            s.leaving.refill();
            let (mut moved, stopped) = self.stage_range(&mut s, start, end);
            let tags = |s: &State, is: fn(Tag) -> bool| (start..end).filter(|vpn| is(s.pt.get(*vpn).tag())).count();
            let (known, mut stayed) = (tags(&s, |t| t != Tag::None), tags(&s, |t| t == Tag::Resident));
            let mut shared = self.unshare_noted(s);
            while self.take_read_only() {
                shared = true;
            }
            if shared {
                // What was un-shared has left as well.
                let left = stayed.saturating_sub(tags(&self.state.lock(), |t| t == Tag::Resident));
                (moved, stayed) = (moved + left, stayed - left);
            }
            tries += 1;
            if (stopped < end && tries < EVENT_TRIES) || (shared && tries < TRIES) {
                work.r.tell(0, moved, 0);
                thread::sleep_ns(PAUSE_NS);
                continue;
            }
            if store {
                self.store_backlog(work, batch);
            }
            work.r.tell(known, moved, stayed);
            (at, tries) = (end, 0);
        }
    }

    /// Counts what is still staged of a range, and stores all that is staged.
    fn store_idle(&self, work: &Work, batch: &mut Batch) {
        let mut at = work.from;
        loop {
            let s = self.state.lock();
            let Some((start, end)) = work.piece(&s, at, FOLIO_PAGES as u64) else { break };
            let tags = (start..end).map(|vpn| s.pt.get(vpn).tag());
            let known = tags.clone().filter(|t| *t != Tag::None).count();
            let staged = tags.filter(|t| matches!(t, Tag::Staged | Tag::Busy)).count();
            work.r.tell(known, staged, 0);
            at = end;
        }
        self.store_backlog(work, batch);
    }

    /// Stores as many pages as are staged now, the oldest first. (Not until none is left: under pressure the handler stages
    /// others all the time, and this would not end while the program runs.)
    fn store_backlog(&self, work: &Work, batch: &mut Batch) {
        let staged = self.state.lock().staged;
        for _ in 0..staged.div_ceil(BATCH_PAGES) {
            if !work.goes_on() || !self.store_batch(batch) {
                break;
            }
            work.r.tell(0, 0, 0);
        }
    }

    /// Clears soft-dirty bits. Without a map that remembers which, it clears none.
    ///
    /// The story: in a process that may have no more descriptors (`ulimit -n`), address space or files as large, bits were
    /// cleared all the same, and nothing said of which pages. A client that copies those pages missed all writes.
    fn clean(&self, work: &Work) {
        let (mut at, mut tries) = (work.from, 0);
        // The map remembers what was cleared, until bits are cleared again.
        let map = MapFile::create(MapKind::Cleared, 0, ADDRESS_SPACE_PAGES, 0).ok();
        let mut cleared = 0;
        loop {
            let mut s = self.state.lock();
            let Some((start, end)) = work.piece(&s, at, FOLIO_PAGES as u64) else { break };
            let was = |vpn| {
                map.iter().for_each(|map| map.writer().set(vpn, PageState(SOFT_DIRTY)));
                cleared += 1;
            };
            let done = map.is_some() && self.clear_soft_dirty(&mut s, start, end, was).is_ok();
            if !done && map.is_some() && tries < EVENT_TRIES {
                drop(s);
                tries += 1;
                thread::sleep_ns(PAUSE_NS);
                continue;
            }
            let known = (start..end).filter(|vpn| s.pt.get(*vpn).tag() != Tag::None).count();
            let dirty = (start..end).filter(|vpn| s.pt.get(*vpn).tag() != Tag::None && !s.pt.is_clean(*vpn)).count();
            work.r.tell(known, core::mem::take(&mut cleared), if done { 0 } else { dirty });
            (at, tries) = (end, 0);
        }
        let before = core::mem::replace(&mut self.state.lock().cleared, map);
        drop(before);
    }

    /// Protects pages for the client that holds the slot's watch, which must be the request's holder.
    fn protect_work(&self, work: &Work) {
        let (mut at, mut tries) = (work.from, 0);
        while self.me().watch.holder.get() == Some(work.holder) {
            let mut s = self.state.lock();
            let Some((start, end)) = work.piece(&s, at, FOLIO_PAGES as u64) else { break };
            if self.protect_pages(&mut s, work.holder, start, end).is_err() && tries < EVENT_TRIES {
                drop(s);
                tries += 1;
                thread::sleep_ns(PAUSE_NS);
                continue;
            }
            let known = (start..end).filter(|vpn| s.pt.get(*vpn).tag() != Tag::None).count();
            let protected = (start..end).filter(|vpn| s.pt.is_protected(*vpn)).count();
            work.r.tell(known, protected, known - protected);
            (at, tries) = (end, 0);
        }
    }

    /// Ends the protection of pages that the holder asked to have protected.
    fn release_work(&self, work: &Work) {
        let mut at = work.from;
        while at < work.to && self.me().watch.holder.get() == Some(work.holder) && work.goes_on() {
            let mut s = self.state.lock();
            let end = match s.pt.next_protected(at).filter(|vpn| *vpn < work.to) {
                // The last piece includes threads that wait for a page that is no longer known.
                None => work.to,
                Some(start) => work.to.min((start / FOLIO_PAGES as u64 + 1) * FOLIO_PAGES as u64),
            };
            let released = self.release_pages(&mut s, at, end);
            work.r.tell(released, released, 0);
            at = end;
        }
    }

    fn bring_work(&self, work: &Work, batch: &mut Batch) {
        let (mut at, mut tries) = (work.from, 0);
        loop {
            let mut rounds = 0;
            while rounds < 4 && self.wants_reclaim() && self.reclaim_step(batch) {
                rounds += 1;
            }
            let mut s = self.state.lock();
            let Some((start, end)) = work.piece(&s, at, BATCH_PAGES as u64) else { break };
            let known = (start..end).filter(|vpn| s.pt.get(*vpn).tag() != Tag::None).count();
            let (mut came, stopped) = self.bring_range(&mut s, start, end);
            if stopped < end && tries < EVENT_TRIES {
                drop(s);
                work.r.tell(0, came, 0);
                thread::sleep_ns(PAUSE_NS);
                tries += 1;
                continue;
            }
            let on_disk: Vec<u64> = (start..end).filter(|vpn| s.pt.get(*vpn).tag() == Tag::Disk).collect();
            drop(s);
            came += on_disk.iter().filter(|vpn| populated(**vpn)).count();
            // Freed under the lock, like all memory: a forked child must find the allocator at rest.
            let s = self.state.lock();
            drop(on_disk);
            drop(s);
            work.r.tell(known, came, 0);
            (at, tries) = (end, 0);
        }
    }
}

/// Reads a page as the program would, so that the handler brings it from disk. Call it without the lock.
fn populated(vpn: u64) -> bool {
    let page = crate::frames::arena::PAGE;
    // SAFETY: populating changes no contents.
    unsafe { sys!(libc::SYS_madvise, vpn as usize * page, page, libc::MADV_POPULATE_READ) }.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::arena::PAGE;
    use crate::testing;
    use uzswap_mm::lru::List;

    /// The story: pages shared with a child left when they were un-shared, and were not counted: of 33 MiB that were paged out, 8
    /// KiB were reported.
    #[test]
    fn what_was_shared_counts_as_put_out() {
        const N: usize = 600;
        let p = testing::pager(16 << 20);
        let at = testing::filled(p, N);
        let first = (at / PAGE) as u64;
        testing::let_inherit(at, N);
        let (r, holder) = (&p.me().request, Identity::own());
        assert!(r.holder.take(holder));
        testing::beside_a_child(|| {
            p.kin.gained();
            p.state.lock().list_resident(first, N, List::Inactive, |_| None);
            let mut batch = Batch::new(p.state.lock().new_compressor());
            p.put_out(&Work { r, holder, from: first, to: first + N as u64 }, &mut batch, false);
        });
        assert_eq!(r.moved(), Moved { known: N as u64, pages: N as u64, stayed: 0 });
    }
}

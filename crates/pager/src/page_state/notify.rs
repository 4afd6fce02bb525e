//! Write-protect notification: a client outside the process (a snapshot, a live migration) has pages of a program protected
//! (`uzswap run --track-writes`). A thread that writes to one waits, the client is told, and the thread goes on when the client
//! releases the page.
//!
//! ```text
//! client: takes `holder` ─ asks PROTECT ─▶ told a page ─ reads it ─ asks RELEASE ─▶ … ─ gives `holder` up, or ends
//! member:                   bits set,       ▲                        bits cleared,       all bits cleared,
//!                           pages protected │ a write: it waits      writers woken       all writers woken
//! ```
//! A protected page has a bit beside its entry in the page table, as a clean one has (`writes` says how pages leave and come back
//! with their protection). Paging leaves the bit alone, `mremap` takes it along, and dropping the contents ends it. Memory that
//! was never touched when it was to be protected is not protected: it holds zeros.
//!
//! # fork
//! A child's memory is its own, and nothing of it is protected, as the client never asked for that. (Soft-dirty bits go on.)
//!
//! # Who may be killed when
//! *The client*: pid and start time name the process that holds the protection. While pages are protected, the member's reclaim
//! thread checks every [`LOOK_NS`] whether that process is alive and still wants it; if not, everything is released. *The
//! member*: the client sees that the slot has another owner, or that [`WriteWatch::serving`] is 0, as after exec.
//!
//! Pages are reported through a ring in the slot with one writer (the member, with the pager's lock) and one reader. A page that
//! finds the ring full waits in the member for the next look. A page is reported once, until it is released or protected anew.

use crate::fault::EventPending;
use crate::frames::arena::PAGE;
use crate::group::holder::Holder;
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use std::collections::{BTreeSet, VecDeque};
use uzswap_mm::pagetable::{ADDRESS_SPACE_PAGES, Tag};
use uzswap_sys::process::Identity;
use uzswap_sys::{lock, thread};

/// Pages that can be reported and not yet taken.
pub const TOLD: usize = 32;
/// Time between two checks whether the client is still there (nanoseconds).
pub const LOOK_NS: u64 = 50_000_000;

/// The part of the watch that lies in a slot.
#[repr(C)]
#[derive(Default)]
pub struct WriteWatch {
    /// The client. When it gives the hold up it must wake the member.
    pub holder: Holder,
    /// The client for which the member protects pages, as `Identity::raw`; 0: none.
    pub serving: AtomicU64,
    /// Incremented when a page is reported (a futex word).
    pub news: AtomicU32,
    /// Pages reported so far (wrapping). Written by the member.
    pub head: AtomicU32,
    /// Pages taken so far (wrapping). Written by the client.
    pub tail: AtomicU32,
    /// The reported pages.
    pub told: [AtomicU64; TOLD],
}

impl WriteWatch {
    /// For the client: takes the next reported page, if there is one.
    pub fn next(&self) -> Option<u64> {
        let tail = self.tail.load(Relaxed);
        if tail == self.head.load(Acquire) {
            return None;
        }
        let page = self.told[tail as usize % TOLD].load(Relaxed);
        self.tail.store(tail.wrapping_add(1), Release);
        Some(page)
    }

    /// The slot has a new owner, or the same one after exec: nothing is protected.
    pub(crate) fn forsake(&self) {
        self.serving.store(0, Release);
        self.holder.forsake();
        self.news.fetch_add(1, Release);
        lock::futex_wake(&self.news, u32::MAX >> 1, true);
    }

    /// Whether the ring has room for one more page. (A client that writes nonsense to `tail` harms only itself.)
    fn has_room(&self) -> bool {
        let (head, tail) = (self.head.load(Relaxed), self.tail.load(Acquire));
        (head.wrapping_sub(tail) as usize) < TOLD
    }

    fn tell(&self, page: u64) {
        let head = self.head.load(Relaxed);
        self.told[head as usize % TOLD].store(page, Relaxed);
        self.head.store(head.wrapping_add(1), Release);
    }
}

/// What a process knows about the pages it protects. Exists while any is protected.
pub struct Notified {
    /// The client.
    holder: Identity,
    /// Pages that threads wait to write to.
    waiting: BTreeSet<u64>,
    /// Those of them that the client was not told of, for want of room in the ring.
    untold: VecDeque<u64>,
    /// When to check again whether the client is there (monotonic nanoseconds).
    look_at: u64,
}

impl Pager {
    /// Protects the known pages of `[from, to)`, which one leaf of the table covers, for the client `holder`. (A page that cannot
    /// be protected can be written to unseen.)
    ///
    /// # Errors
    /// [`EventPending`]: some pages that could be protected are not.
    pub(crate) fn protect_pages(
        &self,
        s: &mut State,
        holder: Identity,
        from: u64,
        to: u64,
    ) -> Result<(), EventPending> {
        self.serve_client(s, holder);
        self.write_protect_known(s, from, to, State::is_writable_unseen, |s, vpn| {
            s.pt.set_protected(vpn, true);
            if let Some(n) = &mut s.notified {
                n.waiting.remove(&vpn);
            }
        })
    }

    /// Ends the protection of the pages `[from, to)` and lets threads go on that wait to write to them. Returns how many were
    /// protected.
    pub(crate) fn release_pages(&self, s: &mut State, from: u64, to: u64) -> usize {
        let (mut at, mut released) = (from, 0);
        while let Some(start) = s.pt.next_protected(at).filter(|vpn| *vpn < to) {
            let end = (start..to).find(|vpn| !s.pt.is_protected(*vpn)).unwrap_or(to);
            (start..end).for_each(|vpn| s.pt.set_protected(vpn, false));
            self.unprotect_dirty(s, start, end);
            released += (end - start) as usize;
            at = end;
        }
        let Some(n) = &mut s.notified else { return released };
        n.untold.retain(|vpn| !(from..to).contains(vpn));
        // Those threads try again. A clean page faults once more, and is soft-dirty then.
        for vpn in n.waiting.extract_if(from..to, |_| true) {
            self.uffd().wake(vpn as usize * PAGE, PAGE);
        }
        released
    }

    /// Removes the kernel's protection from resident pages that count as written anyway; it saves a fault for each.
    fn unprotect_dirty(&self, s: &State, from: u64, to: u64) {
        let ends = |vpn: u64| s.pt.get(vpn).tag() == Tag::Resident && !(s.tracking && s.pt.is_clean(vpn));
        let mut at = from;
        while let Some(start) = (at..to).find(|vpn| ends(*vpn)) {
            at = (start..to).find(|vpn| !ends(*vpn)).unwrap_or(to);
            // If it fails a write faults, and is allowed then.
            let _ = self.uffd().write_protect(start as usize * PAGE, (at - start) as usize * PAGE, false);
        }
    }

    /// A thread wants to write to a protected page: tells the client, and makes the writer wait; false if nothing is protected.
    pub(crate) fn tell_write(&self, s: &mut State, vpn: u64) -> bool {
        let Some(n) = &mut s.notified else { return false };
        if n.waiting.insert(vpn) {
            n.untold.push_back(vpn);
        }
        self.tell_untold(s);
        true
    }

    fn tell_untold(&self, s: &mut State) {
        let (Some(n), watch) = (&mut s.notified, &self.me().watch) else { return };
        let before = n.untold.len();
        while watch.has_room()
            && let Some(vpn) = n.untold.pop_front()
        {
            watch.tell(vpn);
        }
        if n.untold.len() < before {
            watch.news.fetch_add(1, Release);
            lock::futex_wake(&watch.news, u32::MAX >> 1, true);
        }
    }

    /// Pages are protected for the client `holder` from now on; those of an earlier client are released.
    fn serve_client(&self, s: &mut State, holder: Identity) {
        if s.notified.as_ref().is_some_and(|n| n.holder == holder) {
            return;
        }
        self.end_protection(s);
        let watch = &self.me().watch;
        // The client waits for the answer to its request, and takes nothing meanwhile.
        watch.head.store(0, Relaxed);
        watch.tail.store(0, Relaxed);
        let look_at = thread::now_ns() + LOOK_NS;
        let (waiting, untold) = (BTreeSet::new(), VecDeque::new());
        s.notified = Some(Box::new(Notified { holder, waiting, untold, look_at }));
        self.notifies.store(true, Release);
        watch.serving.store(holder.raw(), Release);
    }

    /// Ends all protection, and lets all writers go on.
    pub(crate) fn end_protection(&self, s: &mut State) {
        if s.notified.is_some() {
            self.release_pages(s, 0, ADDRESS_SPACE_PAGES);
            s.notified = None;
            self.notifies.store(false, Release);
            self.me().watch.serving.store(0, Release);
        }
    }

    /// For the reclaim thread: checks whether the client is still there, and reports pages that found no room. Returns the time
    /// until the next check (nanoseconds); None if nothing is protected.
    pub(crate) fn look_after_client(&self) -> Option<u64> {
        if !self.notifies.load(Acquire) {
            return None;
        }
        let mut s = self.state.lock();
        self.tell_untold(&mut s);
        let n = s.notified.as_mut()?;
        let now = thread::now_ns();
        let given_up = self.me().watch.holder.get() != Some(n.holder);
        if given_up || (now >= n.look_at && n.holder.is_dead()) {
            self.end_protection(&mut s);
            return None;
        }
        if now >= n.look_at {
            n.look_at = now + LOOK_NS;
        }
        Some(n.look_at - now)
    }

    /// The contents of `[start, end)` (bytes) are gone or elsewhere: threads that wait there try again.
    pub(crate) fn wake_waiting(&self, s: &mut State, start: usize, end: usize) {
        if let Some(n) = &mut s.notified {
            let (from, to) = ((start / PAGE) as u64, end.div_ceil(PAGE) as u64);
            n.untold.retain(|vpn| !(from..to).contains(vpn));
            if n.waiting.extract_if(from..to, |_| true).count() > 0 {
                self.uffd().wake(start, end - start);
            }
        }
    }

    /// In a forked child nothing is protected: see the head of this file.
    pub(crate) fn inherit_unprotected(&self, s: &mut State) {
        s.notified = None;
        self.notifies.store(false, Relaxed);
        let mut at = 0;
        while let Some(vpn) = s.pt.next_protected(at) {
            s.pt.set_protected(vpn, false);
            at = vpn + 1;
        }
    }
}

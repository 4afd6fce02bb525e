//! Paging on a kernel without UFFDIO_MOVE (before 6.8): `mremap` takes pages out, and copies bring them back.
//!
//! ```text
//! program ──mremap, source stays mapped──▶ scratch ──copied──▶ slot of the arena (staged) ──▶ compressed …
//!    ▲                                        └ dropped: the memory goes back to the kernel
//!    └────────────UFFDIO_COPY from a frame, which stays a free frame───────────────────────────┘
//! ```
//! `mremap` with MREMAP_DONTUNMAP (5.7) takes a range's page tables in one step, as MOVE does: no page is torn, nothing need be
//! write-protected, and the source stays mapped and registered, so that a thread that touches it faults. What was taken is plain
//! memory of uzswap's then: in this mode the userfaultfd of a process does not ask for EVENT_REMAP, and without that the kernel
//! drops the registration of what moves. (With it, the move would raise an event, and wait until it is read by a thread that
//! needs the lock held here.) The price is that the program's own `mremap` must be made good: see `remapped`.
//!
//! Before 6.17 the kernel unmaps the destination before it looks whether it can move, and when it cannot, another thread may get
//! new memory there. So the scratch place is then reserved again; or, if it is another's, never used again. (Pages taken there
//! destroyed what was there: zeros, in most runs of `remaps` on Linux 6.1.)
//!
//! What differs from MOVE:
//! - Memory does not go round. A page that leaves gives its memory back at once, one that comes takes memory from the kernel, and
//!   frames are but buffers: pages must leave because of the limit, never for a lack of frames. The arena is not registered: a
//!   hole may be touched, and is a frame then.
//! - MOVE refuses while an event is unread, so that new memory is not taken for what was there before. `mremap` does not ask. So
//!   pages are taken only while no mapping call of the program is under way (`calls`), whose events are read before it ends. A
//!   fault never waits for a call to end, only the reclaim thread does. For calls that a program makes with instructions of its
//!   own, the pager asks afterwards whether the place is still registered; if not, the pages go back.
//! - MOVE refuses what is pinned. `mremap` does not, and what a device then writes would be lost: see `pins`.
//! - Pages shared with a forked child are taken like any other: what is copied need not be this process's alone.
//! - Read-only and even inaccessible memory can be taken. The kernel is asked about locked memory once the program has locked
//!   any.
//! - Huge pages are taken in pieces, and come back as small ones; the arena is compacted by copying, not by the kernel.
//!
//! What remains: memory that the program locks by instructions of its own is not known to be locked. Between such a call's event
//! and the question afterwards, another thread that reads the new mapping sees zeros for some microseconds. And what a debugger
//! writes (`process_vm_writev`, /proc/PID/mem) at the very moment in which a page is taken may be lost.

use crate::fault::EventPending;
use crate::frames::arena::{PAGE, SCRATCH_BYTES, SCRATCHES, discard, reserve_again};
use crate::inject::Site;
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::zone::Kind;
use uzswap_sys::lock::Guard;
use uzswap_sys::raw::Errno;
use uzswap_sys::uffd::Partial;
use uzswap_sys::{maps, sys, thread};

/// Order of the largest run taken at once: what is being copied is in memory twice.
const RUN_ORDER: u8 = 7;
const _: () = assert!(PAGE << RUN_ORDER <= SCRATCH_BYTES);

const DONTUNMAP: i32 = 4;

impl Pager {
    /// Runs `act` while no mapping call of the program is under way; None when one is, or when nothing may be taken at all.
    pub(crate) fn between_calls<T>(&self, s: &mut State, act: impl FnOnce(&mut State) -> T) -> Option<T> {
        if self.pins.load(Relaxed) {
            return None;
        }
        if s.calls_stopped || self.calls_lent.load(Acquire) {
            return Some(act(s));
        }
        if !self.calls.try_stop_now() {
            return None;
        }
        s.calls_stopped = true;
        self.mend_torn(s);
        let done = act(s);
        s.calls_stopped = false;
        self.calls.go_on();
        Some(done)
    }

    /// Keeps the program's mapping calls from running, and takes the lock; None when a call is under way that does not end. While
    /// this thread waits for the lock, its holder may do what is done between calls: they stay stopped until this thread has had
    /// its turn. (A thread that faults all the time takes the lock all the time. Each fault found the calls stopped for the
    /// thread that waited, evicted nothing, and the limit was exceeded for as long as that went on: a region of 16 MiB came to
    /// 43.)
    pub(crate) fn lock_between_calls(&self) -> Option<Guard<'_, State>> {
        self.calls.try_stop().then(|| self.lock_calls_stopped())
    }

    /// The same, if no call is under way now.
    pub(crate) fn lock_between_calls_now(&self) -> Option<Guard<'_, State>> {
        self.calls.try_stop_now().then(|| self.lock_calls_stopped())
    }

    fn lock_calls_stopped(&self) -> Guard<'_, State> {
        self.calls_lent.store(true, Release);
        let mut s = self.state.lock();
        self.calls_lent.store(false, Relaxed);
        self.mend_torn(&mut s);
        s
    }

    /// Moves resident pages out of the program; returns how many. The others are put back on a list.
    pub(crate) fn take_run(&self, s: &mut State, start: u64, n: usize) -> usize {
        let taken = self.between_calls(s, |s| {
            let (mut at, end, mut moved) = (start, start + n as u64, 0);
            while at < end {
                let left = (end - at) as usize;
                let piece = 1 << (left.ilog2() as u8).min(RUN_ORDER);
                match self.take_piece(s, at, piece) {
                    Some(n) => moved += n,
                    None => {
                        self.requeue(s, at, left);
                        break;
                    }
                }
                at += piece as u64;
            }
            moved
        });
        taken.unwrap_or_else(|| {
            self.requeue(s, start, n);
            0
        })
    }

    /// The same for a power of two of pages. None when none can be taken now; they are on no list then.
    fn take_piece(&self, s: &mut State, at: u64, n: usize) -> Option<usize> {
        let (slot, got, kind) = slots_for(s, n.ilog2() as u8)?;
        if got < n {
            s.zone.free_run(kind, slot, got);
            return self.take_halves(s, at, n);
        }
        match self.take_out(at, slot, n) {
            Ok(()) => {
                self.became_staged(s, at, n, slot);
                if kind == Kind::Frame {
                    s.rss = s.rss.saturating_sub(n * PAGE);
                }
                return Some(n);
            }
            Err(errno) => {
                s.zone.free_run(kind, slot, n);
                match errno {
                    // The pages are in several mappings.
                    libc::EFAULT if n > 1 => return self.take_halves(s, at, n),
                    // Too many mappings, or an injected failure: try later.
                    libc::ENOMEM | libc::EAGAIN => return None,
                    // Locked, or sealed.
                    libc::EINVAL | libc::EPERM => self.set_aside(s, at, n),
                    _ => self.requeue(s, at, n),
                }
                self.counters().move_refused.fetch_add(1, Relaxed);
            }
        }
        Some(0)
    }

    fn take_halves(&self, s: &mut State, at: u64, n: usize) -> Option<usize> {
        let half = n / 2;
        let first = self.take_piece(s, at, half)?;
        Some(
            first
                + self.take_piece(s, at + half as u64, half).unwrap_or_else(|| {
                    self.requeue(s, at + half as u64, half);
                    0
                }),
        )
    }

    /// Takes `n` pages of the program to slots that hold nothing of use.
    fn take_out(&self, vpn: u64, slot: u32, n: usize) -> Result<(), Errno> {
        if let Some(bits) = self.inject(Site::MoveOut) {
            return Err([libc::EAGAIN, libc::EFAULT, libc::EINVAL][bits as usize % 3]);
        }
        let (at, len, place) = (vpn as usize * PAGE, n * PAGE, self.scratch.load(Relaxed));
        if place == SCRATCHES {
            return Err(libc::ENOMEM);
        }
        let scratch = self.layout.scratch + place * SCRATCH_BYTES;
        // The kernel would end the lock of a whole mapping from which a page is taken.
        if self.locks.load(Relaxed) && maps::advise_unlocked(at, len) == Err(libc::EINVAL) {
            return Err(libc::EINVAL);
        }
        // Do not try what is known to be refused: see below.
        if !self.own_frames && self.uffd().is_registered(at, len, self.layout.unreadable()) == Ok(false) {
            return Err(if n > 1 { libc::EFAULT } else { libc::ENOENT });
        }
        // SAFETY: the program's memory, to which this code holds no references, and a place of ours that holds nothing.
        if let Err(errno) = unsafe { take(at, scratch, len) } {
            // Kernels before 6.17 unmap the place before they refuse, and another thread may have got it since: then it is not
            // uzswap's any more. (Not so where there are too many mappings.)
            if !reserve_again(scratch, len) && errno != libc::ENOMEM {
                self.scratch.store(place + 1, Relaxed);
            }
            return Err(errno);
        }
        if !self.own_frames && !self.is_still_ours(at, len) {
            // Another's memory, mapped there since: it goes back. (It is not registered, so has no events.)
            // SAFETY: as above.
            if unsafe { take(scratch, at, len) }.is_err() {
                self.say(b"uzswap: memory that was taken could not be put back; the process is ended\n");
                thread::end_process(125);
            }
            return Err(libc::ENOENT);
        }
        // SAFETY: the memory is ours now. (The place itself is not used for anything else.)
        if !thread::reads(scratch) && !unsafe { open_up(scratch, len) } {
            // Nor can it be put back: a thread that unmaps registered memory waits for the event of that to be read.
            self.say(b"uzswap: memory that was taken cannot be read; the process is ended\n");
            thread::end_process(125);
        }
        // SAFETY: both are plain memory of ours, apart from each other, to which no references are held.
        unsafe { core::ptr::copy_nonoverlapping(scratch as *const u8, self.layout.slot(slot) as *mut u8, len) };
        // If it was locked behind uzswap's back, it would stay in memory.
        // SAFETY: the contents have been copied.
        unsafe {
            if !discard(scratch, len) {
                let _ = sys!(libc::SYS_munlock, scratch, len);
                discard(scratch, len);
            }
        }
        Ok(())
    }

    /// Whether memory that was just taken is of a managed mapping.
    fn is_still_ours(&self, at: usize, len: usize) -> bool {
        match self.uffd().is_registered(at, len, self.layout.unreadable()) {
            Ok(registered) => registered,
            // An event is unread, of a call that nobody ordered.
            Err(_) => maps::is_registered(at).unwrap_or(true),
        }
    }

    /// Copies the frames of `n` consecutive slots to missing pages of the program, as far as those are in one mapping; they stay
    /// frames.
    pub(crate) fn copy_in(&self, vpn: u64, slot: u32, mut n: usize) -> Result<(), Partial> {
        if let Some(bits) = self.inject(Site::MoveIn) {
            return Err((0, [libc::EAGAIN, libc::EBUSY][bits as usize % 2]));
        }
        let (at, whole) = (vpn as usize * PAGE, n);
        loop {
            self.stall.mapping(vpn, n);
            // SAFETY: the slots hold frames.
            match unsafe { self.uffd().copy(at, self.layout.slot(slot), n * PAGE) } {
                // For a range in two mappings the kernel says no more than that.
                Err((0, libc::ENOENT)) if n > 1 => n /= 2,
                Ok(()) if n < whole => return Err((n * PAGE, libc::EINVAL)),
                Err((0, libc::ENOENT)) => {
                    self.uffd().wake(at, PAGE);
                    return Err((0, libc::ENOENT));
                }
                result => return result,
            }
        }
    }

    /// Moves the frame of a slot to a hole.
    pub(crate) fn copy_within(&self, from: u32, to: u32) {
        let (src, dst) = (self.layout.slot(from), self.layout.slot(to));
        // SAFETY: both slots are the arena's own, which is plain memory here, and no references to them are held.
        unsafe {
            core::ptr::copy_nonoverlapping(src as *const u8, dst as *mut u8, PAGE);
            discard(src, PAGE);
        }
    }

    /// Makes room for `n` pages in the fault path, as far as that can be done now.
    pub(crate) fn direct_reclaim_without_move(&self, s: &mut State, n: usize) -> Result<(), EventPending> {
        for _ in 0..4 {
            let over = self.excess(s) + (n * PAGE) as isize;
            if over <= 0 {
                break;
            }
            let before = s.rss;
            let (left, _) = self.direct_round(s, n.clamp(16, crate::pool::batch::BATCH_PAGES), 0, None);
            let spare = s.zone.free_slots(Kind::Frame);
            let over = (self.excess(s) + (n * PAGE) as isize).max(0) as usize / PAGE;
            if over > 0 && spare > 2 * n {
                self.give_back(s, over.min(spare - 2 * n));
            }
            if left == 0 && s.rss >= before {
                break;
            }
        }
        Ok(())
    }
}

/// Makes memory that was taken readable; returns whether it is now.
///
/// The story: a protection key stays with memory however it is protected, and the rights that a program gives its own threads for
/// a key are not given to uzswap's. They read such memory all the same, which ended the program (SIGSEGV).
///
/// # Safety
/// Nobody but the caller may use the memory.
unsafe fn open_up(at: usize, len: usize) -> bool {
    // SAFETY: as the caller says. (Every thread may use key 0.)
    let opened = unsafe {
        sys!(libc::SYS_pkey_mprotect, at, len, libc::PROT_READ, 0)
            .or_else(|_| sys!(libc::SYS_mprotect, at, len, libc::PROT_READ))
    };
    opened.is_ok() && thread::reads(at)
}

/// Slots for up to 2^order pages, how many, and of which kind: frames, which have memory, else holes.
fn slots_for(s: &mut State, order: u8) -> Option<(u32, usize, Kind)> {
    let exact = [Kind::Frame, Kind::Hole].into_iter().find_map(|kind| Some((s.zone.alloc(kind, order)?, kind)));
    if let Some((slot, kind)) = exact {
        return Some((slot, 1 << order, kind));
    }
    let (slot, order) = s.zone.alloc_up_to(Kind::Frame, order)?;
    Some((slot, 1 << order, Kind::Frame))
}

/// Moves the page tables of `[from, from + len)` to `to`; `from` stays mapped.
///
/// # Safety
/// No references into either may be held, and nobody may need what is at `to`.
unsafe fn take(from: usize, to: usize, len: usize) -> Result<(), Errno> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | DONTUNMAP;
    // SAFETY: as the caller says.
    unsafe { sys!(libc::SYS_mremap, from, len, len, flags, to) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn who_waits_for_the_lock_keeps_nobody_from_taking() {
        let pager = testing::pager(8 << 20);
        let mut s = pager.state.lock();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let s = pager.lock_between_calls().expect("no call is under way");
                assert!(!pager.calls_lent.load(Relaxed), "it is its own now");
                drop(s);
                pager.calls.go_on();
            });
            while !pager.calls_lent.load(Acquire) {
                std::thread::yield_now();
            }
            assert!(!pager.calls.try_stop_now(), "they are stopped");
            assert_eq!(pager.between_calls(&mut s, |_| 7), Some(7));
            drop(s);
            waits.join().unwrap();
        });
        // A call under way keeps both from it.
        let held = pager.calls.begin(false);
        assert!(pager.lock_between_calls().is_none());
        assert_eq!(pager.between_calls(&mut pager.state.lock(), |_| 7), None);
        pager.calls.end(held);
        assert_eq!(pager.between_calls(&mut pager.state.lock(), |_| 7), Some(7));
    }
}

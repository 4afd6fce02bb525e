//! Evicts read-only memory, which MOVE refuses: copies it, and then drops it.
//!
//! ```text
//! resident, refused ─ noted ─▶ write-protected ─ COPY into holes ─▶ staged ─ MADV_DONTNEED ─▶ out, as any other
//!                                        └ written to meanwhile: nothing has happened
//! ```
//! Until then the memory is on the unevictable list, as what can be moved goes first; the reclaim thread evicts it, without the
//! lock. Nobody writes to read-only memory, unless the program makes it writable in between, and nothing tells of that. So it is
//! also write-protected for userfaultfd (its mapping is registered for that when it is first met). A write before the copy is
//! known to be good makes the copy worthless; a thread that writes afterwards waits until the page is dropped, and has it brought
//! back.
//!
//! The kernel reports the drop like any such advice of the program's, and waits until the event is read: one event for each
//! mapping that it finds, and one more for what is left of a mapping that was split meanwhile (mprotect). These are uzswap's own
//! doing, and nothing is forgotten for them. The program's mapping calls are stopped from the first look to the last, so what is
//! dropped is what was copied. The pages are present until they are dropped, so none comes in before, whatever their entries say:
//! COPY answers EEXIST.
//!
//! A piece takes several system calls and a message, whether it is 512 KiB or a page. Memory that lies together and is hardly
//! used, like the relocated tables of a large program and constants, leaves for next to nothing. Memory in use comes back page by
//! page, and would cost more than it saves; so only a few small pieces are tried at a time, and what they do not reach stays
//! where it is.
//!
//! The story: before that, a program that read 96 MiB of such memory at random in 48 took 10 to 23 s, and 0.06 without a limit,
//! which it exceeded all the same.
//!
//! In a process that tracks writes such memory stays, and so it does where the kernel cannot be asked about single mappings
//! (before 6.11). Locked memory is not touched, nor what a thread waits for to be ceded. And none leaves once the program may
//! have pinned some (`pins`).
//!
//! Lock order: the calls, then the pager's lock, which is not held while the kernel copies or drops.

use crate::calls::events::forget_range;
use crate::frames::arena::PAGE;
use crate::inject::Site;
use crate::pager::Pager;
use crate::state::{BLOCK_PAGES, State};
use core::ops::Range;
use core::sync::atomic::Ordering::*;
use std::collections::VecDeque;
use uzswap_mm::lru::List;
use uzswap_mm::pagetable::Tag;
use uzswap_mm::zone::Kind;
use uzswap_sys::lock::Guard;
use uzswap_sys::raw::Errno;
use uzswap_sys::{maps, pagemap, sys, thread};

/// How many ranges are noted at most; more wait until they are tried again.
const RANGES_MOST: usize = 1024;
/// How many pages are copied before they are dropped: they are in memory twice meanwhile.
const PIECE: usize = 128;
/// Pieces with fewer pages than `SMALL` are limited to `SMALL_PIECES` until the unevictable list is tried again, twice a second.
const SMALL: usize = BLOCK_PAGES;
const SMALL_PIECES: u32 = 64;

/// Read-only memory on its way out.
#[derive(Default)]
pub(crate) struct Leaving {
    /// Ranges that were refused as read-only: first page, and number of pages.
    noted: VecDeque<(u64, usize)>,
    /// The pages that are being copied or dropped.
    pages: Range<u64>,
    /// Whether one was written to before all were known to be unwritten.
    written: bool,
    /// Whether they are being dropped.
    drops: bool,
    /// Pages staged in this way since that was last asked.
    staged: usize,
    /// How many small pieces may still be tried.
    small: u32,
}

impl Leaving {
    /// Whether a page is being copied or dropped.
    /// Whether a page is being dropped.
    pub(crate) fn drops(&self, vpn: u64) -> bool {
        self.drops && self.has(vpn)
    }

    pub(crate) fn has(&self, vpn: u64) -> bool {
        self.pages.contains(&vpn)
    }

    /// Notes that some pages left in the usual way. They come back without a protection and may be written to unseen, so a copy
    /// of them is worthless.
    ///
    /// The story: a program made memory writable while it was being copied. One of the pages left meanwhile and came back, and
    /// the program wrote to it. All pages were there, and no write had been reported, so the page was dropped, and had its old
    /// contents again.
    pub(crate) fn note_left(&mut self, vpn: u64, n: usize) {
        self.written |= vpn < self.pages.end && self.pages.start < vpn + n as u64;
    }

    /// Whether any range is noted.
    fn waits(&self) -> bool {
        !self.noted.is_empty()
    }

    /// Whether a piece of `n` pages may be tried now.
    fn lets(&self, n: usize) -> bool {
        n >= SMALL || self.small > 0
    }

    /// Lets small pieces be tried again.
    pub(crate) fn refill(&mut self) {
        self.small = SMALL_PIECES;
    }

    /// Whether an event about a range of bytes to be dropped is uzswap's own doing: as the program's calls are stopped, it can be
    /// nobody else's. (There may be several such events, where the program has split the mapping since the first.)
    pub(crate) fn is_own(&self, start: usize, end: usize) -> bool {
        self.drops && self.pages.start <= (start / PAGE) as u64 && (end / PAGE) as u64 <= self.pages.end
    }

    /// How many pages were staged since the last call.
    pub(crate) fn take_staged(&mut self) -> usize {
        core::mem::take(&mut self.staged)
    }

    /// Starts over in a forked child, which has none of the threads that do this.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }
}

/// Pages being copied, and the holes for the copies.
struct Piece {
    vpn: u64,
    n: usize,
    slot: u32,
    /// Number of holes.
    holes: usize,
}

impl Piece {
    fn address(&self) -> usize {
        self.vpn as usize * PAGE
    }
}

impl Pager {
    /// Notes pages that were refused as read-only.
    pub(crate) fn note_read_only(&self, s: &mut State, vpn: u64, n: usize) {
        let may = !self.tracks && !self.own_frames && !self.pins.load(Relaxed);
        if may && s.leaving.lets(n) && s.leaving.noted.len() < RANGES_MOST {
            s.leaving.noted.push_back((vpn, n));
        }
    }

    /// Whether noted pages are to be evicted now.
    pub(crate) fn wants_read_only(&self, s: &State) -> bool {
        s.leaving.waits() && self.excess(s) + self.margin() as isize > 0
    }

    /// Evicts some of the noted pages; returns whether any left.
    pub(crate) fn take_read_only(&self) -> bool {
        if !self.state.lock().leaving.waits() || self.ceding.is_wanted() {
            self.calls.set_hold_up_room(false);
            return false;
        }
        let Some(mut s) = self.lock_to_make_room() else { return false };
        // The thread that cedes memory waits until nobody reads there.
        self.unsharing.store(true, SeqCst);
        let mut left = 0;
        while left < PIECE
            && let Some((vpn, n)) = s.leaving.noted.pop_front()
        {
            if !s.leaving.lets(n) {
                continue;
            }
            let Some(piece) = self.begin_copy(&mut s, vpn, n) else { continue };
            if piece.n < n {
                s.leaving.noted.push_front((vpn + piece.n as u64, n - piece.n));
            }
            drop(s);
            let done = self.copy_and_drop(piece);
            s = self.state.lock();
            left += done;
            if done == 0 {
                break;
            }
        }
        drop(s);
        self.unsharing.store(false, SeqCst);
        self.calls.go_on();
        left > 0
    }

    /// Write-protects the first of these pages if they still are what they were, and takes holes for them; None when they must
    /// not leave.
    fn begin_copy(&self, s: &mut State, vpn: u64, n: usize) -> Option<Piece> {
        let at = vpn as usize * PAGE;
        let (from, to) = maps::read_only_at(self.files.maps.load(Relaxed), at)?;
        let n = s.resident_run(vpn, (vpn + n.min(PIECE) as u64).min((to / PAGE) as u64));
        let unlocked = n > 0 && maps::advise_unlocked(at, n * PAGE).is_ok();
        // Whether the memory may be pinned is asked with calls stopped: a program that made it read-only after pinning it has
        // said so before.
        if !unlocked
            || self.pins.load(SeqCst)
            || self.lets_go()
            || self.uffd().register_tracked(from, to - from).is_err()
        {
            return None;
        }
        if n < SMALL {
            s.leaving.small = s.leaving.small.saturating_sub(1);
        }
        let (slot, order) = self.take_holes(s, n.ilog2() as u8)?;
        let piece = Piece { vpn, n: n.min(1 << order), slot, holes: 1 << order };
        if self.uffd().write_protect(at, piece.n * PAGE, true).is_err() {
            s.zone.free_run(Kind::Hole, slot, piece.holes);
            return None;
        }
        s.leaving.pages = vpn..vpn + piece.n as u64;
        s.leaving.written = false;
        Some(piece)
    }

    /// Copies pages out and drops them; returns how many left.
    fn copy_and_drop(&self, piece: Piece) -> usize {
        let (dst, len) = (self.layout.slot(piece.slot), piece.n * PAGE);
        self.blocks.moved(piece.slot, piece.holes);
        let copied = match self.inject(Site::Copy) {
            Some(_) => Err((0, libc::EAGAIN)),
            // SAFETY: the source is the program's memory, which the kernel reads; where it cannot, it says so. The holes are this
            // thread's.
            None => unsafe { self.uffd().copy(dst, piece.address(), len) },
        };
        let copied = copied.map_or_else(|(done, _)| done / PAGE, |()| piece.n);
        let mut s = self.state.lock();
        s.zone.free_run(Kind::Hole, piece.slot + copied as u32, piece.holes - copied);
        let whole = copied == piece.n && !s.leaving.written && s.resident_run(piece.vpn, s.leaving.pages.end) == copied;
        if !whole {
            s.zone.free_run(Kind::Frame, piece.slot, copied);
            s.rss += copied * PAGE;
            self.end_copy(&mut s, &piece);
            return 0;
        }
        self.became_staged(&mut s, piece.vpn, piece.n, piece.slot);
        s.leaving.staged += piece.n;
        s.leaving.drops = true;
        drop(s);
        let dropped = match self.inject(Site::Drop) {
            Some(bits) => self.drop_part(&piece, bits).and(Err(libc::ENOMEM)),
            None => drop_pages(piece.address(), piece.n),
        };
        let mut s = self.state.lock();
        let left = match dropped {
            Ok(()) => piece.n,
            Err(_) => piece.n - self.stays(&mut s, &piece),
        };
        self.end_copy(&mut s, &piece);
        left
    }

    /// For tests: drops the first of a piece's pages.
    fn drop_part(&self, piece: &Piece, bits: u64) -> Result<(), Errno> {
        match bits as usize % piece.n {
            0 => Ok(()),
            n => drop_pages(piece.address(), n),
        }
    }

    /// Keeps the pages that could not be dropped as the program's, and forgets their copies; returns how many. (The kernel says
    /// which pages are there: all others have been dropped.)
    fn stays(&self, s: &mut State, piece: &Piece) -> usize {
        let (fd, mut there) = (self.files.pagemap.load(Relaxed), Vec::new());
        let (start, end) = (piece.address(), piece.address() + piece.n * PAGE);
        let scanned = pagemap::present_runs_any_way(fd, start, end, |from, to| there.push(from / PAGE..to / PAGE));
        if scanned.is_err() {
            self.say(b"uzswap: what is left of memory that was to be dropped cannot be known; the process is ended\n");
            thread::end_process(125);
        }
        let mut stay = 0;
        for vpn in there.into_iter().flatten().map(|page| page as u64) {
            // A page that has come back since it was dropped is the program's already.
            if matches!(s.pt.get(vpn).tag(), Tag::Resident | Tag::None) {
                continue;
            }
            forget_range(s, vpn, vpn + 1);
            s.list_resident(vpn, 1, List::Unevictable, |_| None);
            stay += 1;
        }
        stay
    }

    /// Ends the copying: pages that are there may be written to again, where the mapping allows it.
    fn end_copy(&self, s: &mut Guard<'_, State>, piece: &Piece) {
        s.leaving.pages = 0..0;
        s.leaving.drops = false;
        // If this fails, a write is reported, and allowed then. What was ceded meanwhile is not uzswap's to open up.
        if s.managed.covers(piece.address(), piece.address() + piece.n * PAGE) {
            let _ = self.uffd().write_protect(piece.address(), piece.n * PAGE, false);
        }
        self.uffd().wake(piece.address(), piece.n * PAGE);
    }

    /// A thread writes to a page that is on its way out, which was made writable meanwhile. The copy of it is worthless, unless
    /// it is already known to be good: then the thread waits until the page is dropped (`end_copy` wakes it).
    ///
    /// The story: the thread was woken to look again and again. It ran on the CPU of the handler, which has idle policy, so it
    /// had faulted anew each time that the handler read a message. The kernel hands out faults before events, so the event of the
    /// drop was never read. The writer, the reclaim thread and every thread that mapped memory stood still for seconds, until one
    /// of them happened to be moved to another CPU.
    pub(crate) fn write_to_leaving(&self, s: &mut State, vpn: u64) {
        if s.leaving.drops {
            return;
        }
        s.leaving.written = true;
        let _ = self.uffd().write_protect(vpn as usize * PAGE, PAGE, false);
        self.uffd().wake(vpn as usize * PAGE, PAGE);
    }
}

/// Drops pages of the program that were copied.
fn drop_pages(at: usize, n: usize) -> Result<(), Errno> {
    // SAFETY: the contents have been copied, and nobody can have written to them since.
    unsafe { sys!(libc::SYS_madvise, at, n * PAGE, libc::MADV_DONTNEED) }.map(drop)
}

#[cfg(test)]
mod tests;

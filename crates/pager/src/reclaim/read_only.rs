//! Read-only memory on its way out, which MOVE takes none of: it is copied, and then dropped.
//!
//! ```text
//! resident, refused ─ noted ─▶ write-protected ─ COPY into holes ─▶ staged ─ MADV_DONTNEED ─▶ out, as any other
//!                                        └ written to meanwhile: nothing has happened
//! ```
//! It is on the unevictable list until then, as what can be moved goes first; the reclaim thread does it, without the lock. Being
//! read-only nobody writes to it, unless it is made writable in between, of which nothing tells: so it is write-protected for userfaultfd
//! as well (the mapping is registered for that when it is first met). Who writes before the copy is known to be good makes it worth
//! nothing; who writes afterwards waits until the page is dropped, and has it brought back.
//!
//! The kernel tells of what is dropped as of any such advice, and waits until that is read: once for each mapping that it finds, and again
//! for what is left of one that was split meanwhile (mprotect). That is uzswap's own doing, and forgets nothing: the program's mapping calls
//! are stopped from the first look to the last, so what is dropped is what was copied. The pages are there until they are dropped, so that
//! none comes in before, whatever their entries say: COPY answers EEXIST.
//!
//! A piece takes several system calls and a message, whether it is of 512 KiB or of a page. What lies together and is hardly used, as
//! relocated tables of a large program and constants do, leaves for next to nothing. What is in use comes back page by page, and would
//! cost more than it saves: so few small pieces are tried at a time, and what they do not reach stays where it is.
//!
//! The story: without that a program that read 96 MiB of such memory at random in 48 took 10 to 23 s, and 0.06 without a limit, which
//! it exceeded all the same.
//!
//! Of a process that tracks writes, or where the kernel cannot be asked about single mappings (before 6.11), it stays. Locked memory is
//! not touched, nor what a thread waits for to be ceded. And none leaves any more once the program may have pinned some (`pins`).
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

/// Ranges noted at most; what more there is waits until it is tried again.
const RANGES_MOST: usize = 1024;
/// Pages copied before they are dropped: they are in memory twice meanwhile.
const PIECE: usize = 128;
/// Pieces of fewer pages are few: so many until what is unevictable is tried again, twice a second.
const SMALL: usize = BLOCK_PAGES;
const SMALL_PIECES: u32 = 64;

/// What is read-only and to leave.
#[derive(Default)]
pub(crate) struct Leaving {
    /// Ranges that were refused for that: first page, and how many.
    noted: VecDeque<(u64, usize)>,
    /// Pages that are being copied, or dropped.
    pages: Range<u64>,
    /// Whether one was written to before it was known that none was.
    written: bool,
    /// Whether they are being dropped.
    drops: bool,
    /// Pages staged in this way that nobody has looked at since.
    staged: usize,
    /// Small pieces that may be tried still.
    small: u32,
}

impl Leaving {
    /// Whether a page is being copied or dropped.
    pub(crate) fn has(&self, vpn: u64) -> bool {
        self.pages.contains(&vpn)
    }

    /// Some pages have left as any others do. (They come back without a protection, and may be written to unseen: what was copied of
    /// them, if it was, is worth nothing.)
    ///
    /// The story: a program opened up what was being copied, and when one of the pages left meanwhile and came back it wrote to it. All were
    /// there, and nobody had told of a write: the page was dropped, and was what it had been before.
    pub(crate) fn note_left(&mut self, vpn: u64, n: usize) {
        self.written |= vpn < self.pages.end && self.pages.start < vpn + n as u64;
    }

    /// Whether any is noted.
    fn waits(&self) -> bool {
        !self.noted.is_empty()
    }

    /// Whether a piece of so many pages may be tried now.
    fn lets(&self, n: usize) -> bool {
        n >= SMALL || self.small > 0
    }

    /// Small pieces may be tried again.
    pub(crate) fn refill(&mut self) {
        self.small = SMALL_PIECES;
    }

    /// An event tells that a range of bytes is about to be dropped: whether that is uzswap's own doing, as the program's calls are stopped.
    /// (More than once, where the program has made it several mappings since it was told of.)
    pub(crate) fn is_own(&self, start: usize, end: usize) -> bool {
        self.drops && self.pages.start <= (start / PAGE) as u64 && (end / PAGE) as u64 <= self.pages.end
    }

    /// How many pages were staged since this was last asked.
    pub(crate) fn take_staged(&mut self) -> usize {
        core::mem::take(&mut self.staged)
    }

    /// In a forked child, which has none of the threads that do it.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }
}

/// Pages being copied, and the holes that they are copied to.
struct Piece {
    vpn: u64,
    n: usize,
    slot: u32,
    /// How many holes there are.
    holes: usize,
}

impl Piece {
    fn address(&self) -> usize {
        self.vpn as usize * PAGE
    }
}

impl Pager {
    /// Notes pages that were refused for being read-only.
    pub(crate) fn note_read_only(&self, s: &mut State, vpn: u64, n: usize) {
        let may = !self.tracks && !self.own_frames && !self.pins.load(Relaxed);
        if may && s.leaving.lets(n) && s.leaving.noted.len() < RANGES_MOST {
            s.leaving.noted.push_back((vpn, n));
        }
    }

    /// Whether pages noted are to be taken now.
    pub(crate) fn wants_read_only(&self, s: &State) -> bool {
        s.leaving.waits() && self.excess(s) + self.margin() as isize > 0
    }

    /// Takes some of the pages noted out of the program; whether any left.
    pub(crate) fn take_read_only(&self) -> bool {
        if !self.state.lock().leaving.waits() || self.ceding.is_wanted() {
            return false;
        }
        let Some(mut s) = self.lock_between_calls() else { return false };
        // (Who cedes memory waits until nobody reads there.)
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

    /// Write-protects the first of these pages if they still are what they were, and takes holes for them; None when they are not to go.
    fn begin_copy(&self, s: &mut State, vpn: u64, n: usize) -> Option<Piece> {
        let at = vpn as usize * PAGE;
        let (from, to) = maps::read_only_at(self.files.maps.load(Relaxed), at)?;
        let n = s.resident_run(vpn, (vpn + n.min(PIECE) as u64).min((to / PAGE) as u64));
        let unlocked = n > 0 && maps::advise_unlocked(at, n * PAGE).is_ok();
        // (Whether it may be pinned is asked with calls stopped: who made it read-only since it was pinned has said so before.)
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

    /// Copies pages out and drops them; how many left.
    fn copy_and_drop(&self, piece: Piece) -> usize {
        let (dst, len) = (self.layout.slot(piece.slot), piece.n * PAGE);
        self.blocks.moved(piece.slot, piece.holes);
        let copied = match self.inject(Site::Copy) {
            Some(_) => Err((0, libc::EAGAIN)),
            // SAFETY: the program's memory, which the kernel reads: where it cannot it says so. The holes are this thread's.
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

    /// What could not be dropped is what the program has, and what was copied of it is forgotten; how many pages. (Which are there the
    /// kernel says: all others have been dropped.)
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
            // (What has come back since it was dropped is the program's already.)
            if matches!(s.pt.get(vpn).tag(), Tag::Resident | Tag::None) {
                continue;
            }
            forget_range(s, vpn, vpn + 1);
            s.list_resident(vpn, 1, List::Unevictable, |_| None);
            stay += 1;
        }
        stay
    }

    /// The pages are no longer on their way: those that are there may be written to, by who may.
    fn end_copy(&self, s: &mut Guard<'_, State>, piece: &Piece) {
        s.leaving.pages = 0..0;
        s.leaving.drops = false;
        // (Where that fails a write is told of, and allowed. What was ceded meanwhile is not uzswap's to open up.)
        if s.managed.covers(piece.address(), piece.address() + piece.n * PAGE) {
            let _ = self.uffd().write_protect(piece.address(), piece.n * PAGE, false);
        }
        self.uffd().wake(piece.address(), piece.n * PAGE);
    }

    /// A thread writes to a page that is on its way out, as it was made writable meanwhile. What was copied of it is worth nothing, unless
    /// it is known to be good already: then it waits until the page is dropped (`end_copy` wakes it).
    ///
    /// The story: it looked again and again. It ran on the CPU of the handler, which is of the idle policy, and so had faulted anew each time
    /// that the handler read a message. The kernel hands out faults before events, so that of the drop was never read: the writer, the
    /// reclaim thread and whoever mapped memory stood still for seconds, until one of them happened to be moved to another CPU.
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
    // SAFETY: what is there has been copied, and nobody can have written to it since.
    unsafe { sys!(libc::SYS_madvise, at, n * PAGE, libc::MADV_DONTNEED) }.map(drop)
}

#[cfg(test)]
mod tests;

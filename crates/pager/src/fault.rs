//! The fault path: how the pager serves one page fault.
//!
//! One thread, the `handler`, serves all faults and events of the process. It runs at `SCHED_IDLE` *on the CPU where the program
//! faults*. A CPU that runs only idle-policy threads counts as idle, so the kernel wakes the faulting thread right there, where
//! it preempts the handler. The handler is still runnable when the next fault blocks the program, and continues without a
//! wake-up. That costs 10 µs a fault, where a handler elsewhere costs 41 to 54 (table in ARCHITECTURE.md). Where others want
//! that CPU, the ticker lifts the handler to the normal policy.
//!
//! ```text
//! message ─ under the lock ─ page table ─┬ staged: move the frame back (no decompression)
//!                                        ├ compressed: decompress into free frames ─┬─ one MOVE into the program
//!                                        └ zero, or never seen: clear free frames ──┘
//! ```
//! The handler reads a message only with the lock held. Nothing may be evicted or brought in between reading an unmap event and
//! processing it, or a new mapping at the same address would be taken for the old one. While an event is unread the kernel
//! answers EAGAIN to MOVE and COPY, which closes the other side.
//!
//! How much one fault brings follows the access pattern. A fault at the end of an earlier one is sequential, and widens the
//! window fourfold up to 512 KiB; any other brings one page. A block that must be decompressed comes whole: in contiguous frames
//! and one piece; else decompressed once and mapped page by page in the same fault; else the touched page comes alone (see
//! `deliver`). Where the last fault on a small block was random too, and none of the last faults was near, its other pages are
//! not expected to be wanted: the touched page comes alone, and the block stays as the copy of all its pages.

pub mod deliver;
pub(crate) mod easing;
pub(crate) mod handler;
pub(crate) mod lost;
pub(crate) mod pauses;
pub mod placement;
pub(crate) mod stall;
pub mod streams;
pub(crate) mod wakes;
pub(crate) mod watch;

use crate::chance::mix;
use crate::fault::deliver::{Delivery, SMALL_BLOCK};
use crate::fault::streams::{Way, Window};
use crate::frames::arena::PAGE;
use crate::group::folio::USUAL_UNIT;
use crate::pager::Pager;
use crate::pool::object;
use crate::reclaim::heat::blocks;
use crate::state::{BLOCK_PAGES, FOLIO_PAGES, State};
use core::sync::atomic::Ordering::*;
use uzswap_mm::lru::{List, age};
use uzswap_mm::pagetable::{HINT_RANDOM, HINT_SEQUENTIAL, HINT_WRITTEN, PageTable, Pte, Tag};
use uzswap_mm::trace;
use uzswap_mm::zone::Kind;
use uzswap_sys::{maps, thread};

/// A page came lately if at most this many folios were listed since.
const LATELY: usize = 1024;

/// The kernel answered EAGAIN: an event must be read first.
pub struct EventPending;

/// What one fault asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The touched page.
    pub vpn: u64,
    /// Whether the access is a write.
    pub write: bool,
    /// Whether the page was there, but write-protected.
    pub protected: bool,
}

impl Request {
    /// The request of a fault at `address`.
    pub(crate) fn at(address: usize, write: bool, protected: bool) -> Self {
        Self { vpn: (address / PAGE) as u64, write, protected }
    }
}

impl Pager {
    /// Whether the reclaim thread has work.
    pub(crate) fn needs_reclaim(&self, s: &State) -> bool {
        if !s.unshare.is_empty() || self.wants_read_only(s) || self.calls.may_be_torn() {
            return true;
        }
        if self.handler_reclaims(s) {
            return false;
        }
        let (low, _) = self.watermarks();
        let few = !self.without_move && s.zone.free_slots(Kind::Frame) < low;
        let short = few && self.excess(s) + 2 * self.margin() as isize > 0;
        short || self.over(s, self.margin() as isize, true) > 0
    }

    /// Whether the reclaim thread has work that must not wait for the program's CPU, or that no other thread can do.
    pub(crate) fn reclaimer_is_wanted(&self, s: &State, excess: isize) -> bool {
        excess > 0 || self.has_request() || self.wants_read_only(s)
    }

    /// Serves a fault: brings the touched page, and those that come with it.
    ///
    /// # Errors
    /// [`EventPending`]: nothing was done; read messages, then call again.
    pub fn serve(&self, s: &mut State, r: Request) -> Result<(), EventPending> {
        self.serve_now(s, r).inspect(|()| {
            self.counters().pgfault.fetch_add(1, Relaxed);
        })
    }

    fn serve_now(&self, s: &mut State, r: Request) -> Result<(), EventPending> {
        let first = s.pt.get(r.vpn);
        if self.without_move && s.remapping.has(r.vpn) {
            // The waiting thread is woken once it is known what is there.
            return Ok(());
        }
        if r.protected && s.leaving.has(r.vpn) {
            self.write_to_leaving(s, r.vpn);
            return Ok(());
        }
        match first.tag() {
            Tag::Poisoned => return self.poison(s, r.vpn),
            Tag::Resident if r.protected && s.pt.is_protected(r.vpn) && self.tell_write(s, r.vpn) => return Ok(()),
            // The unknown page may be about to go: leave it alone.
            Tag::Resident | Tag::None if r.protected && !self.protects_some(s) => return self.allow_copies(s, r.vpn),
            Tag::Resident | Tag::None if r.protected => return self.allow_write(s, r.vpn),
            _ if !s.tracking => return self.bring(s, r, first),
            _ => {}
        }
        let was_clean = self.note_access(s, r);
        let brought = self.bring(s, r, first);
        if brought.is_err() {
            s.pt.set_clean(r.vpn, was_clean);
        } else if s.pt.get(r.vpn).tag() == Tag::None {
            s.pt.set_clean(r.vpn, false);
        }
        brought
    }

    /// Decides how much comes, and brings it.
    ///
    /// The story: a sequential fault was asked again, because another thread's call had left an event unread. It started over
    /// with one page, and its block was stored in single pages from then on.
    fn bring(&self, s: &mut State, r: Request, first: Pte) -> Result<(), EventPending> {
        s.touch(r.vpn);
        let hints = s.pt.hints(r.vpn);
        let scattered = hints & HINT_RANDOM != 0 && !s.streams.is_near(r.vpn);
        let lately = (s.resident / 16).min(LATELY) as u32;
        let window = s.streams.window(r.vpn, first.tag() == Tag::None, || follows(&s.pt, s.stamp, r.vpn, lately));
        let sequential = window.way != Way::Anew;
        let alone = scattered && !sequential && first.tag() == Tag::Compressed && !self.crowded_out(s) && {
            object::order(s.object(first.handle())) <= SMALL_BLOCK
        };
        let (set, clear) = if sequential { (HINT_SEQUENTIAL, HINT_RANDOM) } else { (HINT_RANDOM, HINT_SEQUENTIAL) };
        let hinted = first.tag() != Tag::None || sequential;
        if hinted {
            s.pt.hint(r.vpn, set, clear);
        }
        let brought = self.bring_window(s, r, first, (window, alone));
        if brought.is_err() {
            s.streams.undo();
            if hinted {
                s.pt.hint(r.vpn, hints & (set | clear), !hints & (set | clear));
            }
        }
        brought
    }

    /// Brings a window, or only the touched page if that is to come `alone`.
    fn bring_window(
        &self,
        s: &mut State,
        r: Request,
        first: Pte,
        (window, alone): (Window, bool),
    ) -> Result<(), EventPending> {
        let sequential = window.way != Way::Anew;
        if first.tag() == Tag::None && self.bring_new_huge(s, r, window)? {
            return Ok(());
        }
        let huge = self.wants_huge(s, r.vpn) && self.huge_frames(s)?;
        let (at, until) = match (huge, alone || s.remapping.is_under_way()) {
            (true, _) => (r.vpn, r.vpn + FOLIO_PAGES as u64),
            (_, true) => (r.vpn, r.vpn + 1),
            _ if !sequential && first.tag() == Tag::Staged => s.staged_around(r.vpn),
            _ if window.way == Way::Down => {
                let new_from = if window.known_only { r.vpn } else { self.new_from(s, r.vpn) };
                blocks_down(s, r.vpn, window.pages, new_from)
            }
            _ if window.known_only => whole_blocks(s, r.vpn, known_run(s, r.vpn, window.pages)),
            _ => whole_blocks(s, r.vpn, window.pages),
        };
        let (at, end) = (s.behind_ceded(r.vpn, at), s.before_ceded(r.vpn, until));
        if sequential {
            no_longer_random(&mut s.pt, at, end);
        }
        // A thread that goes on in sequence faults there next.
        s.streams.brought(window.stream, at, end, |vpn| s.pt.get(vpn).tag() == Tag::Resident);
        let mut d = Delivery::of(r, alone && !huge);
        d.passing =
            (sequential && !huge && window.pages >= BLOCK_PAGES).then(|| mix(self.counters().pgfault.load(Relaxed)));
        // A block, or a single page, mostly comes in one piece.
        let n = end.saturating_sub(at);
        let in_pieces = n > BLOCK_PAGES as u64 || !n.is_power_of_two();
        self.all_at_once(in_pieces, || self.bring_pieces(s, at, end, &mut d))?;
        if d.only_touched {
            s.streams.brought(window.stream, r.vpn, r.vpn + 1, |_| false);
        }
        if r.write && matches!(first.tag(), Tag::Compressed) {
            s.pt.hint(r.vpn, HINT_WRITTEN, 0);
        }
        self.count_delivery(s, &d);
        Ok(())
    }

    /// Brings the pages from `at` up to `end` piece by piece: the touched one in any case, the others as far as they go.
    fn bring_pieces(&self, s: &mut State, mut at: u64, end: u64, d: &mut Delivery) -> Result<(), EventPending> {
        let r = d.request();
        while at < end {
            let left = (end - at) as usize;
            let got = match s.pt.get(at).tag() {
                Tag::Staged => self.bring_staged(s, at, left).inspect(|n| d.taken_back |= *n > 0),
                Tag::Busy if at == r.vpn => self.bring_busy(s, at).inspect(|n| d.taken_back |= *n > 0),
                Tag::None if at != r.vpn && !self.brings_new(s) => Ok(0),
                Tag::None | Tag::Zero | Tag::Compressed => self.bring_out(s, at, left, d),
                // Another fault on the page came first, or the page vanished (MADV_FREE): zeros if it is missing.
                Tag::Resident if at == r.vpn => self.bring_lost(s, at),
                // A page that is there already ends neither a block nor a sequence.
                Tag::Resident | Tag::Busy if at != r.vpn => Ok(1),
                _ => Ok(0),
            };
            match got {
                Ok(n) if n > 0 && !d.only_touched => at += n as u64,
                // The touched page comes whatever happens to its neighbours, or its thread would wait forever.
                Ok(_) if at < r.vpn => at = r.vpn,
                Ok(n) => {
                    // Nothing came: the mapping is gone, or the kernel refused. Wake the thread to look again; the kernel wakes
                    // nobody when a mapping ends.
                    if n == 0 && at == r.vpn {
                        self.uffd().wake(at as usize * PAGE, PAGE);
                    }
                    break;
                }
                Err(EventPending) if at <= r.vpn => return Err(EventPending),
                Err(EventPending) => break,
            }
        }
        Ok(())
    }

    /// Whether untouched pages come along with others. Not while soft-dirty bits are tracked, as such a page would not be known
    /// to be clean; nor once there are guard pages, as a copy would replace a guard.
    pub(crate) fn brings_new(&self, s: &State) -> bool {
        !s.tracking && self.guards.load(Relaxed) == 0
    }

    /// The first untouched page that comes along with page `vpn`, which is being filled downwards; `vpn` itself where that cannot
    /// be known. At most 64 KiB come, within the mapping of `vpn`. (512 KiB, as upwards, win nothing, and GNU sort with a limit
    /// of 16 MiB and a disk then came to 19.) What lies below may be a guard, or somebody else's memory, and the kernel would map
    /// what it is given where a run starts there. Upwards a run starts in the touched page's mapping, and the kernel takes none
    /// that extends beyond it.
    fn new_from(&self, s: &State, vpn: u64) -> u64 {
        let lowest = (vpn + 1).saturating_sub(BLOCK_PAGES as u64);
        if !self.brings_new(s) || (lowest..vpn).all(|page| s.pt.get(page).tag() != Tag::None) {
            return vpn;
        }
        let at = vpn as usize * PAGE;
        let start = match self.files.maps.load(Relaxed) {
            // A region's memory is one mapping.
            -1 => s.managed.holding(at).map(|(from, _)| from),
            maps => maps::mapping_at(maps, at).map(|(start, ..)| start),
        };
        start.map_or(vpn, |start| lowest.max((start / PAGE) as u64))
    }

    pub(crate) fn bring_staged(&self, s: &mut State, vpn: u64, max: usize) -> Result<usize, EventPending> {
        if let Some(n) = self.bring_staged_huge(s, vpn)? {
            return Ok(n);
        }
        let slot = s.pt.get(vpn).aux();
        let mut n = 1;
        while n < max
            && s.pt.get(vpn + n as u64).tag() == Tag::Staged
            && s.pt.get(vpn + n as u64).aux() == slot + n as u32
        {
            n += 1;
        }
        if self.comes_by_copy(s, n) && self.may_charge(s, n) {
            return self.bring_staged_copy(s, vpn, slot, n);
        }
        let moved = match self.move_in(s, vpn, slot, n) {
            Ok(()) => n,
            Err((done, _)) if done >= PAGE => done / PAGE,
            Err((_, libc::EAGAIN)) => return Err(EventPending),
            Err((_, libc::EEXIST)) => {
                // The page is there already, so the staged one is older: cannot happen while the state is exact.
                self.uffd().wake(vpn as usize * PAGE, PAGE);
                return Ok(0);
            }
            Err((_, libc::ENOENT | libc::ESRCH)) => return Ok(0),
            // Read-only by now, or shared with a child: a copy always works.
            Err(_) => return self.bring_staged_copy(s, vpn, slot, 1),
        };
        self.free_slots_of(s, vpn, slot, moved);
        self.staged_became_resident(s, vpn, moved);
        Ok(moved)
    }

    /// Copies up to `n` staged pages in, and leaves their frames free.
    fn bring_staged_copy(&self, s: &mut State, vpn: u64, slot: u32, n: usize) -> Result<usize, EventPending> {
        self.settle(slot, n);
        let copied = self.copy_some(s, vpn, self.layout.slot(slot), n)?;
        if copied > 0 {
            s.zone.free_run(Kind::Frame, slot, copied);
            self.staged_became_resident(s, vpn, copied);
        }
        Ok(copied)
    }

    pub(crate) fn staged_became_resident(&self, s: &mut State, vpn: u64, n: usize) {
        s.staged -= n;
        s.list_with_copies(vpn, n, List::Active);
        s.heat(vpn, n);
        s.note_pages(trace::Kind::Refault, vpn, n);
    }

    pub(crate) fn bring_busy(&self, s: &mut State, vpn: u64) -> Result<usize, EventPending> {
        let pte = s.pt.get(vpn);
        if self.copy_some(s, vpn, self.layout.slot(pte.aux()), 1)? == 0 {
            return Ok(0);
        }
        s.leave_busy(pte.aux());
        s.list_resident(vpn, 1, List::Active, |_| pte.copy());
        s.heat(vpn, 1);
        s.note_pages(trace::Kind::Refault, vpn, 1);
        Ok(1)
    }

    fn bring_lost(&self, s: &mut State, vpn: u64) -> Result<usize, EventPending> {
        let zeros = s.scratch(PAGE);
        zeros.fill(0);
        let from = zeros.as_ptr() as usize;
        self.copy_some(s, vpn, from, 1)?;
        Ok(1)
    }

    /// Makes a lost page raise SIGBUS on access. The message comes first, as the signal may end everything.
    pub(crate) fn poison(&self, s: &mut State, vpn: u64) -> Result<(), EventPending> {
        let pte = s.pt.get(vpn);
        if pte.tag() != Tag::Poisoned {
            s.pt.set(vpn, Pte::new(Tag::Poisoned, 0));
            s.forget(vpn, pte);
            s.note_pages(trace::Kind::Free, vpn, 1);
            self.counters().poisoned.fetch_add(1, Relaxed);
            self.say(b"uzswap: a compressed page was found damaged in memory and cannot be restored; the program gets SIGBUS when it touches it\n");
        }
        if self.without_move {
            self.lose_page(s, vpn);
            return Ok(());
        }
        match self.uffd().poison(vpn as usize * PAGE, PAGE) {
            Ok(()) => {}
            Err((_, libc::EAGAIN)) => return Err(EventPending),
            // The page is there, or its mapping is gone: the waiting thread may look again.
            Err((_, libc::EEXIST | libc::ENOENT)) => self.uffd().wake(vpn as usize * PAGE, PAGE),
            // Whatever the kernel objects to, the faulting thread must not wait forever.
            Err(_) => thread::kill(thread::getpid(), libc::SIGBUS),
        }
        Ok(())
    }
}

/// Whether `vpn` follows two pages that came lately, one after the other. Lately means among the last `lately` listed folios; the
/// last one has `stamp`.
///
/// Where a garbage collector or a merge of sorted runs uses memory at random in between, the streams' ends are forgotten between
/// two faults. By chance this is true for one fault in 250.
fn follows(pt: &PageTable, stamp: u32, vpn: u64, lately: u32) -> Way {
    let age = |at: Option<u64>| {
        let pte = pt.get(at?);
        (pte.tag() == Tag::Resident).then(|| age(stamp, pte.aux()))
    };
    let in_order = |last, before| matches!((age(last), age(before)), (Some(a), Some(b)) if a < b && b <= lately);
    if in_order(vpn.checked_sub(1), vpn.checked_sub(2)) {
        Way::Up
    } else if in_order(Some(vpn + 1), Some(vpn + 2)) {
        Way::Down
    } else {
        Way::Anew
    }
}

/// The compressed block that page `at` is part of: its first page that is still there, the page behind its last, and its order.
fn block_of(s: &State, at: u64) -> Option<(u64, u64, u8)> {
    let pte = Some(s.pt.get(at)).filter(|p| p.tag() == Tag::Compressed)?;
    let first = at.checked_sub(pte.index() as u64)?;
    let in_it = |at: &u64| {
        let other = s.pt.get(*at);
        other.tag() == Tag::Compressed && other.handle() == pte.handle()
    };
    let order = object::order(s.object(pte.handle()));
    let pages = first..first + (1 << order);
    Some((pages.clone().find(in_it)?, pages.rev().find(in_it)? + 1, order))
}

/// The pages to bring for a fault that wants `n` from `vpn` on. Blocks that must be decompressed for them come whole, so that
/// none is decompressed twice for one use. (A block of more than 64 KiB behind the first page is left to a fault of its own.)
fn whole_blocks(s: &State, vpn: u64, n: usize) -> (u64, u64) {
    let end = vpn + n as u64;
    let end = match block_of(s, end - 1) {
        Some((first, _, order)) if order > USUAL_UNIT && first > vpn => first,
        Some((_, end, _)) => end,
        None => end,
    };
    (block_of(s, vpn).map_or(vpn, |(first, ..)| first), end)
}

/// Clears the random hint of all blocks that come in sequence.
///
/// The story: only the touched page's block was taken to be used in sequence. The other seven of a window, once faulted on at
/// random, kept no copies, so all that a pass over such memory brought was compressed anew, page by page, when it left.
fn no_longer_random(pt: &mut PageTable, at: u64, end: u64) {
    for block in blocks(at, end.saturating_sub(at) as usize) {
        // Only if there is a hint: clearing one in an unknown block would make its leaf.
        if pt.hints(block) & HINT_RANDOM != 0 {
            pt.hint(block, 0, HINT_RANDOM);
        }
    }
}

/// How many of the `n` pages from `vpn` on come before the first untouched one; at least one.
fn known_run(s: &State, vpn: u64, n: usize) -> usize {
    (1..n).find(|i| s.pt.get(vpn + *i as u64).tag() == Tag::None).unwrap_or(n)
}

/// As [`whole_blocks`], for `n` pages that end with `vpn`. An untouched page below `new_from` ends the run.
fn blocks_down(s: &State, vpn: u64, n: usize, new_from: u64) -> (u64, u64) {
    let known = |at: &u64| *at >= new_from || s.pt.get(*at).tag() != Tag::None;
    let first = (vpn + 1 - n as u64..vpn).rev().take_while(known).last().unwrap_or(vpn);
    (block_of(s, first).map_or(first, |(first, ..)| first), block_of(s, vpn).map_or(vpn + 1, |(_, end, _)| end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use uzswap_sys::sys;

    const N: u64 = 64;

    /// The story: found by reading. A thread had asked for a staged page of memory that another thread unmapped at that moment:
    /// the reclaim thread, which un-shared pages, or a call that was given the memory. It waited forever.
    #[test]
    fn who_waits_for_what_was_unmapped_looks_again() {
        use uzswap_sys::uffd::Message;
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, 1);
        let vpn = (at / PAGE) as u64;
        testing::put(p, at, &[7; PAGE]);
        let mut s = p.state.lock();
        s.list_resident(vpn, 1, List::Inactive, |_| None);
        assert_eq!(p.stage_range(&mut s, vpn, vpn + 1), (1, vpn + 1));
        let (told, answer) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            // SAFETY: populating changes no contents.
            told.send(unsafe { sys!(libc::SYS_madvise, at, PAGE, libc::MADV_POPULATE_READ) }).unwrap();
        });
        let asked = loop {
            match p.uffd().read().expect("messages are read") {
                Some(Message::Fault { address, .. }) => break address,
                _ => std::thread::yield_now(),
            }
        };
        assert_eq!(asked, at);
        // SAFETY: memory of the test's own.
        unsafe { sys!(libc::SYS_munmap, at, PAGE) }.expect("munmap");
        assert!(p.serve(&mut s, Request { vpn, write: false, protected: false }).is_ok());
        let answer = answer.recv_timeout(std::time::Duration::from_secs(60)).expect("it waits no more");
        assert_eq!(answer, Err(libc::ENOMEM));
    }

    /// See `Pager::bring`.
    #[test]
    fn a_sequence_goes_on_behind_a_fault_that_is_asked_again() {
        let p = testing::pager_told_of_moves(16 << 20);
        // Start where a run of 64 pages begins: what is brought ahead ends with it.
        let (at, beside) = (testing::memory(p, 2 * N as usize).next_multiple_of(64 * PAGE), testing::memory(p, 1));
        let s = &mut *p.state.lock();
        let serve = |s: &mut State, vpn| {
            let before = s.resident;
            p.serve(s, Request { vpn, write: true, protected: false }).map(|()| s.resident - before)
        };
        let mut vpn = (at / PAGE) as u64;
        for _ in 0..3 {
            vpn += serve(s, vpn).unwrap_or_else(|_| panic!("no event is unread")) as u64;
        }
        let (hints, faults) = (s.pt.hints(vpn - 1), p.counters().pgfault.load(Relaxed));
        // SAFETY: memory of this test, of which nothing is needed.
        let drops = std::thread::spawn(move || unsafe { crate::frames::arena::discard(beside, PAGE) });
        assert!(p.uffd().wait(-1), "the event");
        (0..20).for_each(|_| assert!(serve(s, vpn).is_err()));
        let event = p.uffd().read().expect("a message").expect("one");
        p.event(s, event);
        drops.join().expect("its call ends");
        let brought = serve(s, vpn).unwrap_or_else(|_| panic!("no event is unread"));
        assert!(brought >= 32, "{brought} pages");
        assert_eq!((p.counters().pgfault.load(Relaxed), s.pt.hints(vpn - 1)), (faults + 1, hints));
    }

    /// See `no_longer_random`.
    #[test]
    fn what_comes_in_sequence_keeps_its_copies_though_it_was_read_at_random_before() {
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, 2 * N as usize).next_multiple_of(64 * PAGE);
        let first = (at / PAGE) as u64;
        let s = &mut *p.state.lock();
        for vpn in (first..first + N).step_by(4) {
            testing::store(s, vpn, 2, 0, testing::words);
            s.pt.hint(vpn, HINT_RANDOM, 0);
        }
        for vpn in first..first + N {
            if s.pt.get(vpn).tag() != Tag::Resident {
                assert!(p.serve(s, Request { vpn, write: false, protected: false }).is_ok());
            }
        }
        // The first fault followed nothing.
        let kept = |vpn: u64| s.pt.get(vpn).copy().is_some();
        assert!((first + 4..first + N).all(kept), "{} copies", (first..first + N).filter(|vpn| kept(*vpn)).count());
    }

    /// See `new_from`: memory below the mapping that is filled downwards, or somebody else's page, is not touched.
    #[test]
    fn who_fills_memory_downwards_is_brought_no_guards() {
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, 2 * N as usize);
        let (first, own) = ((at / PAGE) as u64, (at / PAGE) as u64 + N);
        // SAFETY: memory of the test's own.
        unsafe { sys!(libc::SYS_mprotect, at, N as usize * PAGE, libc::PROT_NONE) }.expect("mprotect");
        let s = &mut *p.state.lock();
        let mut faults = 0;
        for vpn in (own..own + N).rev() {
            if s.pt.get(vpn).tag() != Tag::Resident {
                assert!(p.serve(s, Request { vpn, write: true, protected: false }).is_ok());
                faults += 1;
            }
        }
        let known = (first..own).filter(|vpn| s.pt.get(*vpn).tag() != Tag::None).count();
        assert_eq!((known, s.resident), (0, N as usize));
        if maps::mapping_at(p.files.maps.load(Relaxed), at).is_some() {
            // One, one, then up to sixteen, never across a border.
            assert!(faults <= 10, "{faults} faults");
        }
    }
}

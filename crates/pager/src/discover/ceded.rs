//! *Ceding*: gives up memory that the program registers with a userfaultfd of its own.
//!
//! The kernel gives a mapping to one userfaultfd and answers EBUSY to the second. So where the program gets EBUSY for memory that
//! uzswap registered, uzswap gives the range up and makes the call again (the agent interposes `ioctl`). Only the helpers have
//! uzswap's userfaultfd, so the ticker does it:
//!
//! ```text
//! thread of the program                                     ticker
//! UFFDIO_REGISTER ─ EBUSY ─▶ ASKED ── and waits ──────────▶ a scan: what was mapped or moved meanwhile is registered, too
//!                                        CEDING ◀────────── from here on no scan, whoever makes it, registers any of the range
//!                                                           piece by piece, under the lock: what is out comes in, the
//!                                                           registration ends, the pages are forgotten
//! UFFDIO_REGISTER again ◀─────────────── CEDED ◀──────────── ▼
//!          └─▶ NOTHING      (REFUSED: a piece could not come in, or its registration not end)
//! ```
//! A page is present for the program's own handler if it was touched before. Pages that are out come back, zeros too; pages never
//! touched are missing. (A page brought ahead of a sequence counts as touched, as with huge pages.) From then on the kernel keeps
//! uzswap out: a scan gets EBUSY. When the program's registration has ended, or the memory is unmapped, a scan finds what is
//! there like any new memory.
//!
//! The kernel leaves one gap: UFFDIO_COPY fills missing memory of *anybody's* registration. So a fault brings nothing ahead into
//! a range known to be the program's ([`State::ceded`]; a stale entry costs only the read-ahead). Faults read before a range was
//! ceded are not served afterwards ([`State::withdrawn`]): their threads are woken and fault again, to the program's handler.
//!
//! No page is lost, refused or not: a piece stays uzswap's until all of it is in memory. A refused call fails with EBUSY, as it
//! did at first, or with ENOMEM if the kernel had no memory.

use crate::calls::events::forget_range;
use crate::discover::letgo::{GIVE_UP_NS, PAUSE_NS, Patience, next_out};
use crate::discover::without;
use crate::frames::arena::PAGE;
use crate::inject::Site;
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering::*};
use uzswap_mm::pagetable::Tag;
use uzswap_sys::lock::{self, Lock};
use uzswap_sys::raw::Errno;
use uzswap_sys::thread;

const NOTHING: u32 = 0;
const ASKED: u32 = 1;
const CEDING: u32 = 2;
const CEDED: u32 = 3;
const REFUSED: u32 = 4;

/// Bytes ceded at a time under one hold of the lock.
const PIECE: usize = 64 * PAGE;
/// How often a scan is tried while mapping calls are under way. Memory that it finds too late is not ceded; the program then gets
/// EBUSY.
const SCAN_TRIES: u32 = 100;
/// How often the ticker checks whether the reclaim thread has finished un-sharing: about 2 s in all.
const UNSHARE_WAITS: u32 = 40_000;

/// A request to the ticker to cede a range.
pub struct Ceding {
    /// The program's thread that registers memory holds this.
    one: Lock<()>,
    /// How far the request has come (a futex word).
    state: AtomicU32,
    start: AtomicUsize,
    end: AtomicUsize,
    /// Why the request was refused.
    errno: AtomicI32,
}

impl Default for Ceding {
    fn default() -> Self {
        Self {
            one: Lock::new(()),
            state: AtomicU32::new(NOTHING),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            errno: AtomicI32::new(0),
        }
    }
}

impl Ceding {
    /// Answers the request: the ticker is done with it, or ends.
    pub(crate) fn answer(&self, done: Result<(), Errno>) {
        let state = match done {
            Ok(()) => CEDED,
            Err(errno) => {
                self.errno.store(errno, Relaxed);
                REFUSED
            }
        };
        let answered = |before: u32| is_open(before).then_some(state);
        if self.state.fetch_update(SeqCst, SeqCst, answered).is_ok() {
            lock::futex_wake(&self.state, u32::MAX >> 1, false);
        }
    }

    /// The ticker begins the request; false if it was answered meanwhile.
    fn begin(&self) -> bool {
        self.state.compare_exchange(ASKED, CEDING, SeqCst, SeqCst).is_ok()
    }

    /// In a forked child: no request is pending.
    pub(crate) fn forget(&self) {
        self.state.store(NOTHING, Relaxed);
        // SAFETY: the thread that held it in the parent does not exist here.
        unsafe { self.one.force_unlock() };
    }

    /// The range that is being ceded, or was ceded and is about to be registered by the program. No scan takes it. (Parts that
    /// are still managed stay so until their turn comes.)
    ///
    /// The story: while the ticker ceded a range piece by piece, the handler looked at new mappings and registered the ceded
    /// pieces again. The program's call was refused.
    pub(crate) fn kept(&self) -> Option<(usize, usize)> {
        matches!(self.state.load(SeqCst), CEDING | CEDED).then(|| self.range())
    }

    /// Whether a request to cede waits for the ticker.
    pub(crate) fn is_wanted(&self) -> bool {
        is_open(self.state.load(SeqCst))
    }

    fn range(&self) -> (usize, usize) {
        (self.start.load(Relaxed), self.end.load(Relaxed))
    }
}

/// Whether the request has no answer yet.
fn is_open(state: u32) -> bool {
    matches!(state, ASKED | CEDING)
}

/// What became of a piece.
#[derive(Debug, PartialEq, Eq)]
enum Piece {
    /// The piece is the program's.
    Ceded,
    /// This page must come from disk first.
    OnDisk(u64),
    /// An event must be read first.
    Waits,
}

impl Pager {
    /// Lets the program register `[start, end)` with a userfaultfd of its own, by `call`. Runs on a thread of the program with
    /// all signals blocked. `call` runs with the pager's lock held, so it must touch nothing but the stack.
    ///
    /// # Errors
    /// The last error of `call`; `ENOMEM` if the kernel had no memory to cede the range.
    pub fn register_of_program(
        &self,
        (start, end): (usize, usize),
        mut call: impl FnMut() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let one = self.ceding.one.lock();
        let mut done = self.call_locked((start, end), &mut call);
        if done == Err(libc::EBUSY) && self.engaged.load(Acquire) {
            let ceded = self.cede(start, end);
            // Even a refusal is tried again: the process may have been let go of meanwhile.
            done = match self.call_locked((start, end), &mut call) {
                Err(libc::EBUSY) => Err(ceded.err().unwrap_or(libc::EBUSY)),
                done => done,
            };
            self.ceding.state.store(NOTHING, SeqCst);
        }
        drop(one);
        done
    }

    /// Makes the call with the lock held, so that no page is brought in meanwhile, and notes whose the range is then.
    fn call_locked(
        &self,
        (start, end): (usize, usize),
        call: &mut impl FnMut() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut s = self.lock_in_hook();
        let done = call();
        if done.is_ok() {
            s.note_ceded(start, end);
        }
        done
    }

    fn cede(&self, start: usize, end: usize) -> Result<(), Errno> {
        let c = &self.ceding;
        c.start.store(start, Relaxed);
        c.end.store(end, Relaxed);
        c.state.store(ASKED, SeqCst);
        if self.has_gone() {
            // The ticker may have ended before it saw the request.
            c.answer(Err(libc::EBUSY));
        }
        self.poke_ticker();
        loop {
            match c.state.load(SeqCst) {
                CEDED => return Ok(()),
                state if is_open(state) => lock::futex_wait(&c.state, state, None, false),
                _ => return Err(c.errno.load(Relaxed)),
            }
        }
    }

    /// In the ticker: serves a request to cede; calls `between` now and then.
    pub(crate) fn cede_asked(&self, mut between: impl FnMut()) {
        if !self.ceding.is_wanted() {
            return;
        }
        // Memory mapped or moved since the last scan may have to be registered first.
        let _ = (0..SCAN_TRIES).any(|_| self.scan_between_calls());
        if self.ceding.begin() {
            let (start, end) = self.ceding.range();
            let done = if self.engaged.load(Acquire) { self.cede_range(start, end, &mut between) } else { Ok(()) };
            self.ceding.answer(done);
        }
    }

    fn cede_range(&self, start: usize, end: usize, between: &mut impl FnMut()) -> Result<(), Errno> {
        let mut patience = Patience::new(GIVE_UP_NS);
        let mut at = start;
        loop {
            between();
            let mut s = self.state.lock();
            let Some((from, to)) = managed_part(&s, at, end) else { break };
            let to = to.min(from + PIECE);
            let _ = self.make_room(&mut s, (from / PAGE) as u64);
            let piece = self.cede_piece(&mut s, from, to)?;
            drop(s);
            match piece {
                Piece::Ceded => at = to,
                Piece::OnDisk(vpn) => {
                    if !self.bring_from_disk(vpn, (to / PAGE) as u64, &mut patience) {
                        return Err(libc::EBUSY);
                    }
                }
                Piece::Waits => {
                    self.cover_lost_between_calls();
                    if !patience.pause() {
                        return Err(libc::EBUSY);
                    }
                }
            }
        }
        self.end_unsharing(start, end, between);
        Ok(())
    }

    /// Brings a piece in, ends its registration and forgets it: all of that or nothing.
    fn cede_piece(&self, s: &mut State, from: usize, to: usize) -> Result<Piece, Errno> {
        let fails = self.inject(Site::Cede);
        let (first, end) = ((from / PAGE) as u64, (to / PAGE) as u64);
        // Memory that is being moved is registered nowhere for a moment, or at another place: see `remapped`.
        if s.remapping.is_under_way() || fails.is_some_and(|bits| bits.is_multiple_of(2)) {
            return Ok(Piece::Waits);
        }
        // The caller made room. Making room here would evict the first pages of the piece for its last ones.
        s.keeps_all = true;
        let (_, stopped) = self.bring_range(s, first, end);
        s.keeps_all = false;
        if stopped < end {
            return Ok(Piece::Waits);
        }
        if let Some(vpn) = next_out(s, first).filter(|vpn| *vpn < end) {
            return Ok(if s.pt.get(vpn).tag() == Tag::Disk { Piece::OnDisk(vpn) } else { Piece::Waits });
        }
        // A lost page gets its mark, so that it neither reads as zeros nor is asked of the program's handler.
        for vpn in first..end {
            if s.pt.get(vpn).tag() == Tag::Poisoned && (self.poison(s, vpn).is_err() || self.without_move) {
                return Ok(Piece::Waits);
            }
        }
        let ended = if fails.is_some() { Err(libc::ENOMEM) } else { self.uffd().unregister(from, to - from) };
        match ended {
            Ok(()) => {}
            Err(libc::ENOMEM) => return Err(libc::ENOMEM),
            // The memory was unmapped, and the event is still unread.
            Err(_) => return Ok(Piece::Waits),
        }
        forget_range(s, first, end);
        s.managed.cut(from, to);
        s.note_ceded(from, to);
        match s.withdrawn.last_mut().filter(|last| last.1 == first) {
            Some(last) => last.1 = end,
            None => s.withdrawn.push((first, end)),
        }
        self.wake_waiting(s, from, to);
        Ok(Piece::Ceded)
    }

    /// Makes lost pages raise SIGBUS where the kernel cannot poison them, unless a mapping call is under way.
    fn cover_lost_between_calls(&self) {
        if self.without_move && self.calls.try_stop() {
            self.cover_lost_now();
            self.calls.go_on();
        }
    }

    /// Makes sure that the reclaim thread does not un-share what is the program's now: the program's handler would get a fault
    /// that none of its threads made. (The wait is bounded: the thread that serves the reclaim thread's fault may wait for this
    /// one.)
    fn end_unsharing(&self, start: usize, end: usize, between: &mut impl FnMut()) {
        // Nothing of the range is known any more, so none of it is noted again.
        self.state.lock().unshare.retain(|(at, len)| at + len <= start || *at >= end);
        for _ in 0..UNSHARE_WAITS {
            if !self.unsharing.load(SeqCst) {
                return;
            }
            between();
            thread::sleep_ns(PAUSE_NS);
        }
    }
}

impl State {
    /// Notes that the program has registered a range.
    pub(crate) fn note_ceded(&mut self, mut start: usize, mut end: usize) {
        self.ceded.retain(|(a, b)| {
            let apart = *b < start || end < *a;
            if !apart {
                (start, end) = (start.min(*a), end.max(*b));
            }
            apart
        });
        self.ceded.push((start, end));
    }

    /// Notes that uzswap has registered a range, so nobody else has it.
    pub(crate) fn note_taken_over(&mut self, start: usize, end: usize) {
        if !self.ceded.is_empty() {
            self.ceded = without(core::mem::take(&mut self.ceded), &[(start, end)]);
        }
    }

    /// How far a fault on page `vpn` may bring pages: to `end`, or to where memory of the program's own registration begins.
    #[inline]
    pub(crate) fn before_ceded(&self, vpn: u64, end: u64) -> u64 {
        if self.ceded.is_empty() {
            return end;
        }
        let pages = self.ceded.iter().map(|(a, b)| ((a / PAGE) as u64, (b / PAGE) as u64));
        pages.filter(|(a, b)| *b > vpn && *a < end).map(|(a, _)| a.max(vpn + 1)).min().unwrap_or(end)
    }

    /// The same downwards: the first page that a fault on page `vpn` may bring, of pages that begin at `first`.
    ///
    /// The story: memory of the program's own userfaultfd lay in the middle of a block, and a fault brought the whole block from
    /// its first page on. COPY filled what the program had dropped there with zeros, and its handler was never asked.
    #[inline]
    pub(crate) fn behind_ceded(&self, vpn: u64, first: u64) -> u64 {
        if self.ceded.is_empty() {
            return first;
        }
        let pages = self.ceded.iter().map(|(a, b)| ((a / PAGE) as u64, (b / PAGE) as u64));
        pages.filter(|(a, b)| *a < vpn && *b > first).map(|(_, b)| b.min(vpn)).max().unwrap_or(first)
    }
}

fn managed_part(s: &State, at: usize, end: usize) -> Option<(usize, usize)> {
    let parts = s.managed.overlapping(at, end).map(|(a, b)| (at.max(a), end.min(b)));
    parts.min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use uzswap_mm::lru::List;
    use uzswap_sys::maps;
    use uzswap_sys::uffd::Uffd;

    const PAGES: u64 = 200;

    /// Makes the request for `[start, end)` that a thread of the program makes.
    fn ask(p: &Pager, start: usize, end: usize) {
        p.ceding.start.store(start, Relaxed);
        p.ceding.end.store(end, Relaxed);
        p.ceding.state.store(ASKED, SeqCst);
    }

    /// See [`Ceding::kept`]: a scan during ceding registers nothing again, and forgets nothing that has not been ceded yet.
    #[test]
    fn nobody_registers_again_what_is_being_ceded() {
        let p = testing::pager(16 << 20);
        let (at, theirs) = (memory_out(p), other());
        let (from, to, end) = (at + 10 * PAGE, at + 190 * PAGE, at + PAGES as usize * PAGE);
        let mut name = [0; maps::NAME_BYTES];
        if maps::mapping_from(p.files.maps.load(Relaxed), 0, &mut name) == Err(libc::ENOTTY) {
            return testing::skip("this kernel cannot be asked about single mappings (before 6.11)");
        }
        ask(p, from, to);
        assert!(p.ceding.begin() && p.ceding.is_wanted() && !p.ceding.begin());
        let mut looks = 0;
        let looked = p.cede_range(from, to, &mut || {
            p.growth.noted.note(at, end - at);
            assert!(p.scan_noted_now(), "the handler looks");
            looks += 1;
        });
        assert!(looked == Ok(()) && looks > 3, "{looked:?}, {looks} looks");
        p.ceding.answer(looked);
        p.growth.noted.note(at, end - at);
        assert!(p.scan_noted_now() && !p.ceding.is_wanted());
        assert_eq!(p.ceding.kept(), Some((from, to)));
        let left: Vec<_> = p.state.lock().managed.iter().collect();
        assert_eq!(left, [(at, from), (to, end)]);
        assert_eq!(theirs.register(from, to - from), Ok(()));
        assert!(p.page_in((at / PAGE) as u64, (end / PAGE) as u64) > 0, "the rest was out");
        assert_eq!(wrong(at), 0);
    }

    /// Memory of a managed program, with all but each fifth page out; returns its first address.
    fn memory_out(p: &Pager) -> usize {
        let at = testing::memory(p, PAGES as usize);
        let first = (at / PAGE) as u64;
        (0..PAGES).for_each(|page| testing::put(p, at + page as usize * PAGE, &content(at, page)));
        let mut s = p.state.lock();
        s.managed.push((at, at + PAGES as usize * PAGE));
        s.list_resident(first, PAGES as usize, List::Inactive, |_| None);
        drop(s);
        assert_eq!(p.age(first, first + PAGES), PAGES as usize);
        assert!(p.page_out_idle() > 0);
        (0..PAGES).step_by(5).for_each(|page| assert_eq!(p.page_in(first + page, first + page + 1), 1));
        at
    }

    fn content(at: usize, page: u64) -> [u8; PAGE] {
        // Some pages are zeros, which are out as such.
        if page.is_multiple_of(7) { [0; PAGE] } else { testing::words((at / PAGE) as u64 + page) }
    }

    /// The pages that differ from what they should hold; all of the memory must be there.
    fn wrong(at: usize) -> usize {
        (0..PAGES)
            .filter(|page| {
                // SAFETY: memory of this test, which nobody writes to.
                let is = unsafe { core::slice::from_raw_parts((at + *page as usize * PAGE) as *const u8, PAGE) };
                is != content(at, *page)
            })
            .count()
    }

    fn other() -> Uffd {
        Uffd::open(0).expect("tests of the pager need access to userfaultfd").0
    }

    #[test]
    fn what_is_ceded_is_all_there_and_another_may_register_it() {
        let p = testing::pager(16 << 20);
        let (at, theirs) = (memory_out(p), other());
        let (end, len) = (at + PAGES as usize * PAGE, PAGES as usize * PAGE);
        assert_eq!(theirs.register(at, len), Err(libc::EBUSY));
        let mut looks = 0;
        assert_eq!(p.cede_range(at, end, &mut || looks += 1), Ok(()));
        assert!(looks > 3, "the handler is looked after meanwhile");
        let (first, last) = ((at / PAGE) as u64, (end / PAGE) as u64);
        {
            let s = p.state.lock();
            assert!(s.managed.is_empty() && !s.knows_any(at, end) && s.resident == 0 && s.staged == 0);
            assert_eq!((&s.ceded[..], &s.withdrawn[..]), (&[(at, end)][..], &[(first, last)][..]));
            assert!(!s.keeps_all);
        }
        assert_eq!(theirs.register(at, len), Ok(()));
        assert_eq!(wrong(at), 0);
        // Nothing of it is out that could be missing.
        assert_eq!(p.page_in(first, last), 0);
    }

    #[test]
    fn a_part_is_ceded_and_the_rest_stays() {
        let p = testing::pager(16 << 20);
        let (at, theirs) = (memory_out(p), other());
        let (from, to) = (at + 50 * PAGE, at + 120 * PAGE);
        assert_eq!(p.cede_range(from, to, &mut || {}), Ok(()));
        assert_eq!(theirs.register(from, to - from), Ok(()));
        let all = (at, at + PAGES as usize * PAGE);
        assert_eq!(theirs.register(at, PAGE), Err(libc::EBUSY));
        let left: Vec<_> = p.state.lock().managed.iter().collect();
        assert_eq!(left, [(at, from), (to, all.1)]);
        assert!(p.page_in((at / PAGE) as u64, (all.1 / PAGE) as u64) > 50, "the rest was out");
        assert_eq!(wrong(at), 0);
    }

    /// Whatever fails, the part not yet ceded is managed as before, and the ceded part is all there.
    #[test]
    fn what_is_refused_is_not_lost() {
        for faults in ["seed=1,cede=1/1", "seed=3,cede=4/5"] {
            let p = testing::pager(16 << 20);
            let at = memory_out(p);
            let (end, len) = (at + PAGES as usize * PAGE, PAGES as usize * PAGE);
            p.group.faults.set(faults, 0).unwrap();
            assert_eq!(p.cede_range(at, end, &mut || {}), Err(libc::ENOMEM), "{faults}");
            assert!(!p.state.lock().keeps_all && !p.state.lock().managed.is_empty());
            assert_eq!(other().register(at, len), Err(libc::EBUSY), "{faults}");
            p.group.faults.set("cede=0/1", 0).unwrap();
            assert_eq!(p.cede_range(at, end, &mut || {}), Ok(()));
            assert_eq!(other().register(at, len), Ok(()), "{faults}");
            assert_eq!(wrong(at), 0, "{faults}");
        }
    }

    /// While an event is unread no page can come in: the ticker waits for a while, then refuses.
    #[test]
    fn what_waits_for_an_event_is_refused_at_last() {
        let p = testing::pager_told_of_moves(16 << 20);
        let (at, beside) = (memory_out(p), testing::memory(p, 1));
        let end = at + PAGES as usize * PAGE;
        // SAFETY: memory of this test, of which nothing is needed.
        let drops = std::thread::spawn(move || unsafe { crate::frames::arena::discard(beside, PAGE) });
        assert!(p.uffd().wait(-1), "the event");
        assert_eq!(p.cede_range(at, end, &mut || {}), Err(libc::EBUSY));
        let event = p.uffd().read().expect("a message").expect("one");
        p.event(&mut p.state.lock(), event);
        drops.join().expect("its call ends");
        assert_eq!(p.cede_range(at, end, &mut || {}), Ok(()));
        assert_eq!((other().register(at, end - at), wrong(at)), (Ok(()), 0));
    }

    #[test]
    fn nothing_is_brought_ahead_into_what_is_the_programs() {
        let p = testing::pager(16 << 20);
        let mut s = p.state.lock();
        assert_eq!(s.before_ceded(5, 100), 100);
        s.note_ceded(20 * PAGE, 30 * PAGE);
        s.note_ceded(30 * PAGE, 40 * PAGE);
        s.note_ceded(60 * PAGE, 70 * PAGE);
        assert_eq!(s.ceded, [(20 * PAGE, 40 * PAGE), (60 * PAGE, 70 * PAGE)]);
        assert_eq!([5, 19, 45, 80].map(|vpn| s.before_ceded(vpn, 100)), [20, 20, 60, 100]);
        assert_eq!(s.before_ceded(5, 20), 20);
        // A fault on such a page means that the entry is stale: the page comes alone.
        assert_eq!(s.before_ceded(25, 28), 26);
        assert_eq!(
            [(15, 10), (50, 41), (50, 39), (80, 10), (25, 18)].map(|(vpn, from)| s.behind_ceded(vpn, from)),
            [10, 41, 40, 70, 25]
        );
        s.note_taken_over(0, 25 * PAGE);
        assert_eq!(s.before_ceded(5, 100), 25);
        s.note_taken_over(0, 100 * PAGE);
        assert_eq!(s.before_ceded(5, 100), 100);
    }

    /// See [`State::behind_ceded`].
    #[test]
    fn a_block_around_what_is_the_programs_comes_without_it() {
        const BLOCK: u64 = 16;
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, 2 * BLOCK as usize).next_multiple_of(BLOCK as usize * PAGE);
        let first = (at / PAGE) as u64;
        let (from, to) = (at + 5 * PAGE, at + 8 * PAGE);
        {
            let s = &mut *p.state.lock();
            s.managed.push((at, at + BLOCK as usize * PAGE));
            testing::store(s, first, BLOCK.ilog2() as u8, 0, testing::words);
        }
        assert_eq!(p.cede_range(from, to, &mut || {}), Ok(()));
        let theirs = other();
        assert_eq!(theirs.register(from, to - from), Ok(()));
        // SAFETY: memory of this test; its owner drops what it is to fill itself.
        unsafe { crate::frames::arena::discard(from, to - from) };
        let s = &mut *p.state.lock();
        assert!(p.serve(s, crate::fault::Request { vpn: first + 10, write: false, protected: false }).is_ok());
        let brought: Vec<u64> = (0..BLOCK).filter(|page| s.pt.get(first + page).tag() == Tag::Resident).collect();
        assert!(brought.contains(&10) && !brought.iter().any(|page| (5..8).contains(page)), "{brought:?}");
        let mut there = [0u8; BLOCK as usize];
        // SAFETY: asks about memory of this test, with room for each page's answer.
        unsafe { uzswap_sys::sys!(libc::SYS_mincore, at, BLOCK as usize * PAGE, there.as_mut_ptr()) }.expect("mincore");
        let missing: Vec<usize> = (0..BLOCK as usize).filter(|page| there[*page] & 1 == 0).collect();
        assert!([5, 6, 7].iter().all(|page| missing.contains(page)), "its handler is to be asked: {there:?}");
    }

    /// The story: a thread registered memory while the process was let go of. It asked a ticker that had ended, and would have
    /// waited forever.
    #[test]
    fn who_asks_a_ticker_that_ends_is_answered() {
        let p = testing::pager(16 << 20);
        p.engaged.store(true, Release);
        let mut calls = 0;
        let refused = std::thread::scope(|threads| {
            let asks = threads.spawn(|| {
                let mut calls = 0;
                let busy = || {
                    calls += 1;
                    Err(libc::EBUSY)
                };
                (p.register_of_program((1 << 30, (1 << 30) + PAGE), busy), calls)
            });
            while !p.ceding.is_wanted() {
                std::thread::yield_now();
            }
            assert_eq!(p.ceding.kept(), None);
            p.ceding.answer(Err(libc::ENOMEM));
            asks.join().unwrap()
        });
        assert_eq!(refused, (Err(libc::ENOMEM), 2));
        // A call that succeeds is noted, and needs no ticker.
        let done = p.register_of_program((1 << 30, (1 << 30) + PAGE), || {
            calls += 1;
            Ok(())
        });
        assert_eq!((done, calls), (Ok(()), 1));
        assert_eq!(p.state.lock().ceded, [(1 << 30, (1 << 30) + PAGE)]);
    }
}

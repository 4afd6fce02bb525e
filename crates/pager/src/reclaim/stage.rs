//! Moves folios out of the program: from resident to staged.
//!
//! Moving a page out is atomic, so no read is torn and nothing need be write-protected. A page that cannot be moved now (shared
//! with a forked child, an unread event) goes back to a list: a resident page is always on one, or it would never be reclaimed. A
//! page that cannot be moved as it is mapped (read-only, locked: the kernel answers EINVAL), or that is pinned, is set aside on
//! the unevictable list, from which the ticker's `look` rescues it now and then.
//!
//! An instruction may need several pages at once, where its operands cross from one page to the next. So where next to nothing is
//! resident, the pages faulted on last stay: otherwise one would be evicted to bring the other, forever.

use crate::fault::EventPending;
use crate::fork::exclusive::UNSHARED_MOST;
use crate::frames::arena::PAGE;
use crate::group::folio::MAX_ORDER;
use crate::pager::Pager;
use crate::reclaim::heat::PASSED_OVER;
use crate::state::{FOLIO_PAGES, State};
use core::sync::atomic::Ordering::*;
use uzswap_mm::lru::{Entry, List};
use uzswap_mm::pagetable::{Pte, Tag};
use uzswap_mm::trace;
use uzswap_mm::zone::Kind;
use uzswap_sys::maps;

/// Below this number of resident pages, those faulted on last stay.
const FEW_LEFT: usize = 64;
/// A round gives up after this many runs of pages that were all shared with another process.
const SHARED_TRIES: u64 = 16;
/// Where one page is pinned, this many are taken to be: each would take a call to try.
pub(crate) const PINNED_PAGES: u64 = 16;

/// A run of pages on their way out: those from `at` to `end` are left to move.
struct Run {
    at: u64,
    end: u64,
    moved: usize,
}

impl Pager {
    /// Moves up to about `want` pages out of the program.
    ///
    /// # Errors
    /// [`EventPending`] when an unread event stopped it before anything moved.
    pub fn stage(&self, s: &mut State, want: usize) -> Result<usize, EventPending> {
        if !self.without_move {
            return self.stage_victims(s, want);
        }
        self.between_calls(s, |s| self.stage_victims(s, want)).unwrap_or(Ok(0))
    }

    fn stage_victims(&self, s: &mut State, want: usize) -> Result<usize, EventPending> {
        let (mut moved, mut tries, mut left) = (0, 0, want * PASSED_OVER);
        let mut waiting = None;
        s.lru.passing_waits = false;
        let unit = self.group.folios.largest_unit(s.folio_max).min(s.unit_max);
        let refused = || self.counters().move_refused.load(Relaxed);
        let enough = refused() + SHARED_TRIES;
        // After a fork everything is shared, and more than a few tries only confirm that, at a system call each. Pinned pages are
        // set aside, and the next may not be pinned.
        let (few, full) = (self.has_kin(), s.copies_enough());
        // Nor are many tries made while much is set aside that the reclaim thread has yet to handle: see `pass_refused`.
        while moved < want
            && tries < want * 2 + 64
            && (few || s.noted_pages() < UNSHARED_MOST || refused() < enough)
            && (moved > 0 || !few || (refused() < enough && (full || !s.copies_enough())))
        {
            let Some((first, passes)) = s.pop_victim(&mut left) else { break };
            let whole = s.is_whole(first);
            // An entry left of a folio that has gone is no try: there may be thousands, see `Lru::tidy`.
            if !whole && s.is_stale(first) {
                continue;
            }
            tries += 1;
            let stays = must_stay(s, first);
            if passes && !s.lru.passing_waits && whole && stays {
                s.lru.passing_waits = waiting == Some(first);
                waiting.get_or_insert(first);
                pass_over(s, first);
                continue;
            }
            if !whole || stays {
                moved += self.stage_pages(s, first)?;
                continue;
            }
            if !passes && self.goes_by_window(s, first) {
                moved += self.stage_window(s, first)?;
                continue;
            }
            let (start, mut n) = (first.vpn(), 1usize << first.order());
            // Neighbours that came right after it go in the same call: where large units are wanted, as many as make one.
            let border = 1 << unit;
            let most = want.clamp(16, 1 << s.streams.widest).max(border - start as usize % border);
            while n < most {
                let next = s.lru.peek_victim().filter(|e| e.vpn() == start + n as u64 && e.order() < MAX_ORDER);
                let Some(next) = next else { break };
                let hot = !passes && left > 0 && s.is_hot(next);
                if hot || !s.is_whole(next) || must_stay(s, next) || s.resident < n + FEW_LEFT {
                    break;
                }
                let _ = s.lru.pop_victim();
                n += 1 << next.order();
            }
            moved += self.stage_run(s, start, n)?;
        }
        Ok(moved)
    }

    /// Moves what is left of a folio that is no longer whole, or that must not go as a whole.
    fn stage_pages(&self, s: &mut State, e: Entry) -> Result<usize, EventPending> {
        let mut moved = 0;
        let stay = must_stay(s, e);
        let (mut at, end) = (e.vpn(), e.vpn() + (1 << e.order()));
        while at < end {
            let mut n = 0;
            while at + n < end && s.is_fresh(at + n, e.stamp()) && !(stay && s.was_touched(at + n)) {
                n += 1;
            }
            if n > 0 {
                match self.stage_run(s, at, n as usize) {
                    Ok(n) => moved += n,
                    Err(pending) => {
                        // `stage_run` has listed the pages of its own run again.
                        for later in at + n..end {
                            if s.is_fresh(later, e.stamp()) {
                                self.requeue(s, later, 1);
                            }
                        }
                        return if moved > 0 { Ok(moved) } else { Err(pending) };
                    }
                }
            }
            at += n;
            if at < end && s.is_fresh(at, e.stamp()) {
                self.requeue(s, at, 1);
            }
            at += 1;
        }
        Ok(moved)
    }

    /// Moves `n` resident pages from `start` on, which are on no list, in as few calls as holes and mappings allow. Pages that
    /// stay are put back on a list.
    ///
    /// # Errors
    /// [`EventPending`] when an unread event stopped it before anything moved.
    pub(crate) fn stage_run(&self, s: &mut State, start: u64, n: usize) -> Result<usize, EventPending> {
        if self.lets_go() {
            self.requeue(s, start, n);
            return Ok(0);
        }
        if self.without_move {
            return Ok(self.take_run(s, start, n));
        }
        let mut run = Run { at: start, end: start + n as u64, moved: 0 };
        while run.at < run.end {
            let (at, left) = (run.at, (run.end - run.at) as usize);
            let Some((slot, order)) = self.take_holes(s, left.ilog2() as u8) else {
                self.requeue(s, at, left);
                break;
            };
            let n = 1usize << order;
            let maybe_huge = n == FOLIO_PAGES && at.is_multiple_of(n as u64);
            if maybe_huge && !self.ready_for_huge(at, slot) {
                self.requeue(s, at, left);
                break;
            }
            let (done, error) = match self.move_out(at, slot, n) {
                Ok(()) => (n, 0),
                Err((bytes, e)) => (bytes / PAGE, e),
            };
            if maybe_huge && done == n {
                self.note_huge(s, at, slot);
            }
            self.became_staged(s, at, done, slot);
            s.zone.free_run(Kind::Hole, slot + done as u32, n - done);
            run.moved += done;
            run.at += done as u64;
            if done < n
                && (done == 0 || error != libc::EAGAIN)
                && let Err(pending) = self.pass_refused(s, &mut run, n == 1, error)
            {
                return if run.moved > 0 { Ok(run.moved) } else { Err(pending) };
            }
        }
        Ok(run.moved)
    }

    /// Steps over what could not be moved at the head of a run; `alone` says that it was a single page. Puts the page on a list
    /// where reclaim meets it again if that may help; a page that is not there counts as zeros.
    ///
    /// It sets no more pages aside than the reclaim thread can soon handle, or what is left would look like all that can leave.
    /// Further refused pages stay on a list, and are met again.
    ///
    /// The story: once much was set aside, nothing was staged any more. Beside many busy programs the reclaim thread had no CPU
    /// for seconds, and a region of 64 MiB, of which one MOVE in twenty was refused, was all in memory in the end, under a limit
    /// of 24.
    fn pass_refused(&self, s: &mut State, run: &mut Run, alone: bool, error: i32) -> Result<(), EventPending> {
        let (at, end) = (run.at, run.end);
        let resident = s.pt.get(at).tag() == Tag::Resident;
        if error == libc::EINVAL
            && let Some(len) = self.read_only(s, at, end)
        {
            self.set_aside(s, at, len);
            self.note_read_only(s, at, len);
            run.at += len as u64;
            return Ok(());
        }
        match error {
            // Also if the mapping was not found because it has moved, and the event of that must be read first.
            libc::EAGAIN | libc::ENOENT if error == libc::EAGAIN || self.event_is_unread(at) => {
                self.requeue(s, at, (end - at) as usize);
                return Err(EventPending);
            }
            libc::ENOENT if resident => self.was_dropped(s, at),
            libc::EBUSY => {
                self.counters().move_refused.fetch_add(1, Relaxed);
                let pinned = !self.has_kin();
                if pinned && s.noted_pages() >= UNSHARED_MOST {
                    self.requeue(s, at, 1);
                    run.at += 1;
                    return Ok(());
                }
                let most = if pinned { at + PINNED_PAGES } else { end };
                let len = s.resident_run(at, end.min(most)).max(1);
                s.note_shared(at, len, !pinned && !s.exclusive.takes);
                // In a process that shares nothing the page is pinned, unless a fork has left it so: see `unshare`.
                if pinned {
                    self.set_aside(s, at, len);
                } else {
                    self.requeue(s, at, len);
                }
                run.at += len as u64;
                return Ok(());
            }
            // Perhaps it crosses the border of a mapping.
            _ if !alone => return self.stage_one_by_one(s, run),
            // Locked.
            libc::EINVAL if resident => self.set_aside(s, at, 1),
            // It stays for this time.
            _ if resident => self.requeue(s, at, 1),
            _ => {}
        }
        run.at += 1;
        Ok(())
    }

    /// Stages the next pages of a run one by one.
    fn stage_one_by_one(&self, s: &mut State, run: &mut Run) -> Result<(), EventPending> {
        for _ in 0..(run.end - run.at).min(16) {
            let one = self.stage_run(s, run.at, 1);
            run.at += 1;
            match one {
                Ok(n) => run.moved += n,
                Err(pending) => {
                    self.requeue(s, run.at, (run.end - run.at) as usize);
                    return Err(pending);
                }
            }
        }
        Ok(())
    }

    /// Notes that a resident page is not there, so reads as zeros. It was dropped without an event (MADV_FREE, and the kernel
    /// reclaimed it), or was never there: a forked child does not get pages that were only read, of a mapping never written to.
    fn was_dropped(&self, s: &mut State, vpn: u64) {
        let pte = s.pt.get(vpn);
        s.pt.set(vpn, Pte::new(Tag::Zero, 0));
        s.zeros += 1;
        s.forget(vpn, pte);
        s.note_pages(trace::Kind::Free, vpn, 1);
    }

    /// Whether an event of the mapping at a page must be read before anything is known of the page.
    ///
    /// The story: pages that a program had only read were shown as written to, one in some ten thousand. Linux looks for the
    /// mapping first, and only then whether an event is unread, so a MOVE that waits meanwhile for an `mremap` answers ENOENT,
    /// not EAGAIN. The page was taken for dropped, and nothing was known of it where it had gone. When it was found there it
    /// counted as written to; had it been protected, a write to it would not have been reported.
    fn event_is_unread(&self, vpn: u64) -> bool {
        self.uffd().is_registered(vpn as usize * PAGE, PAGE, self.layout.unreadable()) == Err(libc::EAGAIN)
    }

    /// Puts resident pages that could not be moved back on a list.
    pub(crate) fn requeue(&self, s: &mut State, vpn: u64, n: usize) {
        s.resident -= n;
        s.list_with_copies(vpn, n, List::Active);
    }

    /// Sets aside resident pages that cannot be moved as they are mapped: on the unevictable list, where reclaim does not meet
    /// them.
    pub(crate) fn set_aside(&self, s: &mut State, vpn: u64, n: usize) {
        s.resident -= n;
        s.list_with_copies(vpn, n, List::Unevictable);
    }

    /// How many resident pages from `at` on, before `end`, are in one read-only mapping; None when the first is not.
    fn read_only(&self, s: &State, at: u64, end: u64) -> Option<usize> {
        let (_, to) = maps::read_only_at(self.files.maps.load(Relaxed), at as usize * PAGE)?;
        Some(s.resident_run(at, end.min((to / PAGE) as u64))).filter(|n| *n > 0)
    }

    pub(crate) fn became_staged(&self, s: &mut State, vpn: u64, n: usize, slot: u32) {
        for i in 0..n {
            let at = vpn + i as u64;
            let mut pte = Pte::new(Tag::Staged, slot + i as u32);
            if let Some(handle) = s.pt.get(at).copy() {
                pte = pte.with_copy(handle);
            }
            s.pt.set(at, pte);
            s.zone.set_user(slot + i as u32, at);
        }
        s.leaving.note_left(vpn, n);
        if s.idle_staged() == 0 {
            // All entries are of pages that were taken back. Such entries are otherwise dropped when staged pages are taken to be
            // compressed, which never happens if all are taken back.
            s.lru.staged.clear();
        }
        s.resident -= n;
        s.staged += n;
        s.count_evictions(n);
        s.press_pool(n);
        s.note_pages(trace::Kind::Evict, vpn, n);
        let mut at = 0;
        while at < n as u64 {
            let order = s.folio_order(vpn + at, n - at as usize);
            s.lru.staged.push(Entry::new(vpn + at, order, 0));
            at += 1 << order;
        }
    }
}

/// Whether a folio holds pages that must stay: see the file's head.
///
/// The story: Java at half of its memory stood still. An instruction wrote to two pages, one of which had come from the pool
/// (inactive), the other from staging (active). There were more than a few resident pages, so none had to stay, and each fault
/// that brought one page evicted the other.
fn must_stay(s: &State, e: Entry) -> bool {
    let n = 1 << e.order();
    let pages = e.vpn()..e.vpn() + n as u64;
    s.touched_last(pages.clone()) || (s.resident < n + FEW_LEFT && s.touched_in(pages))
}

/// Makes a passing folio, and what follows it, wait behind the other passing folios.
///
/// The story: passing pages leave a few faults after they came, so the pages faulted on last were among them, and had to stay.
/// They were listed as active, each by itself: a hole in the next sequential read, in what was stored then, and so on.
fn pass_over(s: &mut State, first: Entry) {
    let mut e = first;
    loop {
        s.lru.push(List::Passing, e);
        let end = e.vpn() + (1 << e.order());
        match s.lru.passing.peek() {
            Some(next) if next.vpn() == end => e = next,
            _ => break,
        }
        let _ = s.lru.passing.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use uzswap_sys::sys;

    const N: usize = 64;

    /// The story: 32 MiB that a program had made read-only were tried again and again, page by page with two system calls each,
    /// before every fault: 35 s for what takes one.
    #[test]
    fn what_is_read_only_is_set_aside_until_it_is_rescued() {
        let p = testing::pager(16 << 20);
        let at = testing::filled(p, 2 * N);
        let first = (at / PAGE) as u64;
        let protect = |prot: i32| {
            // SAFETY: memory of the test's own.
            unsafe { sys!(libc::SYS_mprotect, at, N * PAGE, prot) }.expect("mprotect");
        };
        protect(libc::PROT_READ);
        let mut s = p.state.lock();
        s.list_resident(first, 2 * N, List::Inactive, |_| None);
        assert_eq!(p.stage(&mut s, 4 * N).ok(), Some(N), "the writable half leaves");
        assert_eq!((s.lru.unevictable.pages(), s.resident, s.staged), (N, N, N));
        assert_eq!(s.lru.peek_victim(), None, "nobody meets the other");
        assert_eq!((p.stage(&mut s, N).ok(), s.lru.unevictable.pages()), (Some(0), N));
        s.lru.rescue();
        assert_eq!((p.stage(&mut s, N).ok(), s.lru.unevictable.pages()), (Some(0), N), "read-only still");
        protect(libc::PROT_READ | libc::PROT_WRITE);
        s.lru.rescue();
        assert_eq!(p.stage(&mut s, N).ok(), Some(N));
        assert_eq!((s.lru.unevictable.pages(), s.resident, s.staged), (0, 0, 2 * N));
    }

    /// The story: a program's memory was looked at for idle pages again and again, and all of it was in use. Each look left an
    /// entry for each folio in the list of staged ones, for good.
    #[test]
    fn what_is_always_taken_back_leaves_no_entries_behind() {
        let p = testing::pager(16 << 20);
        let first = (testing::filled(p, N) / PAGE) as u64;
        let mut s = p.state.lock();
        s.list_resident(first, N, List::Inactive, |_| None);
        for _ in 0..100 {
            assert_eq!(p.stage_range(&mut s, first, first + N as u64).0, N);
            let mut at = first;
            while at < first + N as u64 {
                at += p.bring_staged(&mut s, at, 1).ok().expect("nothing is unread") as u64;
            }
            assert_eq!((s.staged, s.resident), (0, N));
        }
        assert!(s.lru.staged.len() <= N, "{} entries", s.lru.staged.len());
        // One that stays is still found.
        assert_eq!(p.stage_range(&mut s, first, first + N as u64).0, N);
        (1..N as u64).for_each(|i| assert_eq!(p.bring_staged(&mut s, first + i, 1).ok(), Some(1)));
        let entries: Vec<_> = core::iter::from_fn(|| s.lru.staged.pop()).collect();
        assert!(entries.iter().any(|e| (e.vpn()..e.vpn() + (1 << e.order())).contains(&first)));
    }

    /// See [`Pager::pass_refused`].
    #[test]
    fn what_waits_for_the_reclaim_thread_keeps_nothing_else_from_leaving() {
        let p = testing::pager(16 << 20);
        let at = testing::filled(p, N);
        let first = (at / PAGE) as u64;
        let mut s = p.state.lock();
        s.list_resident(first, N, List::Inactive, |_| None);
        s.note_shared(1 << 20, UNSHARED_MOST, false);
        let left = p.stage(&mut s, N / 4).ok().expect("nothing is unread");
        assert!((N / 4..N).contains(&left), "{left}");
        // A page refused now is on its list, not one of those that wait.
        let victim = s.lru.pop_victim().expect("a victim").vpn();
        let mut run = Run { at: victim, end: victim + 1, moved: 0 };
        assert!(p.pass_refused(&mut s, &mut run, true, libc::EBUSY).is_ok());
        assert_eq!((run.at, s.noted_pages(), s.lru.unevictable.pages()), (victim + 1, UNSHARED_MOST, 0));
        s.unshare.clear();
        assert!(p.stage(&mut s, N).is_ok_and(|n| n > 0));
    }

    /// The story: a program used memory, dropped it again, and then came to its limit. So many entries of gone pages stood before
    /// those of resident ones that reclaim found nothing to evict, and the group was called full.
    #[test]
    fn what_is_left_of_pages_that_have_gone_is_no_try() {
        let p = testing::pager(16 << 20);
        let at = testing::filled(p, N);
        let mut s = p.state.lock();
        // As many as there may be before they are dropped, and the pages of a folio.
        (0..4_000).for_each(|i| s.lru.push(List::Inactive, Entry::new(1 << 20 | i << 9, (i % 10) as u8, 5)));
        s.list_resident((at / PAGE) as u64, N, List::Inactive, |_| None);
        assert_eq!(p.stage(&mut s, N).ok(), Some(N));
    }

    /// See `must_stay`: whichever list the pages faulted on last are on, and however many others there are.
    #[test]
    fn what_an_instruction_needs_stays() {
        let p = testing::pager(16 << 20);
        let at = testing::filled(p, 8 * N);
        let first = (at / PAGE) as u64;
        let mut s = p.state.lock();
        let other = first + 4 * N as u64;
        s.list_resident(first, 4 * N, List::Inactive, |_| None);
        s.list_resident(other, 4 * N, List::Active, |_| None);
        // One instruction needs both, with other faults in between.
        for round in 0..40 {
            [first, other, first + 9 + round, other].into_iter().for_each(|vpn| s.touch(vpn));
        }
        assert!(p.stage(&mut s, 4 * N).is_ok());
        let out = |from: u64| (from..from + 4 * N as u64).filter(|vpn| s.pt.get(*vpn).tag() == Tag::Staged).count();
        println!("{} and {} of {} leave, {} stay", out(first), out(other), 4 * N, s.resident);
        assert!(
            s.resident > FEW_LEFT && out(first) > 0 && out(other) > 0,
            "both lists are aged, and more stays than must"
        );
        let tags = [first, other].map(|vpn| s.pt.get(vpn).tag());
        assert_eq!(tags, [Tag::Resident; 2]);
    }

    /// The story: a forked child did not see pages that its parent had only read. The kernel does not copy the page table of a
    /// mapping that nobody has written to, so the pages were not there when they were to leave.
    #[test]
    fn what_is_not_there_is_zeros_and_stays_clean() {
        let p = testing::tracking_pager(16 << 20);
        let first = (testing::memory(p, N) / PAGE) as u64;
        let mut s = p.state.lock();
        s.tracking = true;
        (0..4).for_each(|i| s.pt.set_clean(first + i, i != 2));
        s.list_resident(first, 4, List::Inactive, |_| None);
        assert_eq!(p.stage_range(&mut s, first, first + 4), (0, first + 4));
        let is = |i: u64| (s.pt.get(first + i).tag(), s.pt.is_clean(first + i));
        assert_eq!([0, 1, 2, 3].map(is), [true, true, false, true].map(|clean| (Tag::Zero, clean)));
        assert_eq!((s.resident, s.zeros), (0, 4));
        assert_eq!(p.bring_range(&mut s, first, first + 4), (4, first + 4));
        // SAFETY: just brought, and nobody else's.
        let bytes = unsafe { core::slice::from_raw_parts((first as usize * PAGE) as *const u8, 4 * PAGE) };
        assert!(bytes.iter().all(|b| *b == 0) && (s.resident, s.zeros) == (4, 0));
    }

    /// See `event_is_unread`: whatever a MOVE meets while another thread moves the memory, nothing is forgotten.
    #[test]
    fn what_is_moved_meanwhile_is_not_taken_for_dropped() {
        use core::sync::atomic::AtomicUsize;
        const ROUNDS: usize = 1500;
        // Where the kernel maps nothing by itself: otherwise any mapping may get the place that moved memory leaves.
        const PLACE: usize = 0x2000_0000_0000;
        static BEGUN: AtomicUsize = AtomicUsize::new(0);
        static DONE: AtomicUsize = AtomicUsize::new(0);
        let p = testing::pager_told_of_moves(16 << 20);
        let places = [testing::memory_at(p, PLACE, N), PLACE + 2 * N * PAGE];
        (0..N).for_each(|page| testing::put(p, PLACE + page * PAGE, &[page as u8 + 1; PAGE]));
        p.state.lock().list_resident((PLACE / PAGE) as u64, N, List::Inactive, |_| None);
        let moving = std::thread::spawn(move || {
            for round in 0..ROUNDS {
                while BEGUN.load(Acquire) <= round {
                    std::thread::yield_now();
                }
                let (from, to) = (places[round % 2], places[(round + 1) % 2]);
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                // SAFETY: memory of the test's own, to a place where nothing is.
                unsafe { sys!(libc::SYS_mremap, from, N * PAGE, N * PAGE, flags, to) }.expect("mremap");
                DONE.store(round + 1, Release);
            }
        });
        let (mut staged, mut pending) = (0, 0);
        for round in 0..ROUNDS {
            let [from, to] = [places[round % 2], places[(round + 1) % 2]].map(|at| (at / PAGE) as u64);
            // Page by page, until the event is there. In every third round it is there from the start; in the others that is
            // luck, except for some pages of the next round.
            let mut s = p.state.lock();
            let (late, early) = (round % 3 == 0, if round % 3 == 1 { N as u64 / 4 } else { 0 });
            for vpn in from..from + early {
                staged += p.stage_run(&mut s, vpn, 1).unwrap_or_else(|_| panic!("nothing moves yet"));
            }
            BEGUN.store(round + 1, Release);
            while late && !p.event_is_unread(from) {
                std::thread::yield_now();
            }
            for vpn in from + early..from + N as u64 {
                match p.stage_run(&mut s, vpn, 1) {
                    Ok(_) if late => panic!("round {round}: pages are taken while an event is unread"),
                    Ok(n) => staged += n,
                    Err(EventPending) => {
                        pending += 1;
                        break;
                    }
                }
            }
            while DONE.load(Acquire) <= round {
                if let Some(message) = p.uffd().read().expect("messages are read") {
                    p.event(&mut s, message);
                } else {
                    std::thread::yield_now();
                }
            }
            let known = (to..to + N as u64).filter(|vpn| s.pt.get(*vpn).tag() != Tag::None).count();
            assert_eq!((known, s.zeros), (N, 0), "round {round}");
            assert_eq!(p.bring_range(&mut s, to, to + N as u64).1, to + N as u64);
            assert_eq!(s.resident, N);
        }
        moving.join().unwrap();
        for page in 0..N {
            // SAFETY: everything is back, and nobody else uses it.
            let content = unsafe { core::slice::from_raw_parts((places[ROUNDS % 2] + page * PAGE) as *const u8, PAGE) };
            assert!(content.iter().all(|b| *b == page as u8 + 1), "page {page}");
        }
        println!("{staged} pages staged, {pending} rounds met the event");
        assert!(staged > 0 && pending > 0);
    }
}

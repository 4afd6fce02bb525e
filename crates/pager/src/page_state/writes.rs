//! Tracks which pages a program under `uzswap run` has written to (`--track-writes`), by soft-dirty bits that stay with a page
//! wherever it goes.
//!
//! Memory is registered for write-protection too. A page that was not written to since the bits were last cleared is *clean*: it
//! has a bit beside its entry in the page table. Paging leaves that bit alone, `mremap` takes it along, a forked child inherits
//! it with the table, and unmapping ends it with the entry. All other known pages are soft-dirty; before the bits are first
//! cleared, that is all of them.
//!
//! ```text
//! clean, in the program: write-protected ── a write ──▶ told to the handler: soft-dirty, writable, the write is done
//! clean, out            ── a read ──▶ copied in, write-protected by the same call
//!                       ── a write ─▶ soft-dirty, moved in, writable
//! never touched         ── as a clean page; its neighbours are not brought along
//! ```
//! # Why no write is missed
//! A clean page in the program is always write-protected, as bits change and pages come in only under the pager's lock. Clearing
//! a bit first protects the page: a write before that belongs to the time before, and a write after it waits for the handler,
//! which needs the lock. Paging out is atomic, and a thread that writes to a clean page meanwhile waits for the handler too,
//! which finds the page out and brings it in as written to. A clean page comes in by a copy, not by MOVE, which would map it
//! writable: another thread could write before the page is protected. (The frame stays behind, and is used for the next page.)
//!
//! The kernel keeps the protection when mremap moves memory, but not in a forked child, where it is renewed before the child
//! runs. Un-sharing after fork must not count as writing: see [`Pager::unshare_unwritten`].
//!
//! The kernel answers EAGAIN while an event is unread. Then the bit is put back, as the page may be another one by then, and the
//! fault is served after the event.

use crate::discover::without;
use crate::fault::{EventPending, Request};
use crate::frames::arena::PAGE;
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::pagetable::Tag;
use uzswap_mm::zone::Kind;
use uzswap_sys::process::read_bytes;
use uzswap_sys::uffd::Partial;
use uzswap_sys::{pagemap, thread};

/// Pages un-shared by one call.
const UNSHARE_PAGES: usize = 64;

impl State {
    /// The parts of a byte range that are never protected: control blocks, and memory of another userfaultfd.
    pub(crate) fn never_protected(&self, start: usize, end: usize) -> Vec<(usize, usize)> {
        self.pinned.iter().chain(&self.ceded).filter(|(a, b)| *a < end && start < *b).copied().collect()
    }
}

impl Pager {
    /// Registers memory of the program.
    pub(crate) fn register(&self, start: usize, len: usize) -> Result<(), i32> {
        match self.tracks {
            true => self.uffd().register_tracked(start, len),
            false => self.uffd().register(start, len),
        }
    }

    /// Whether any page may have to come in write-protected.
    pub(crate) fn protects_some(&self, s: &State) -> bool {
        s.protects() || self.marks.is_some()
    }

    /// Whether a page must come in write-protected.
    fn protects(&self, s: &State, vpn: u64) -> bool {
        match &self.marks {
            Some(marks) => marks.protects(vpn),
            None => s.protects() && (s.pt.is_protected(vpn) || (s.tracking && s.pt.is_clean(vpn))),
        }
    }

    /// Splits `n` pages into runs that are mapped alike, and calls `put(first, pages, protect)` for each. If that fails, with the
    /// number of bytes it did, this stops there.
    pub(crate) fn by_runs(
        &self,
        s: &State,
        vpn: u64,
        n: usize,
        mut put: impl FnMut(usize, usize, bool) -> Result<(), Partial>,
    ) -> Result<(), Partial> {
        let mut at = 0;
        while at < n {
            let protect = self.protects(s, vpn + at as u64);
            let len = (at + 1..n).find(|i| self.protects(s, vpn + *i as u64) != protect).unwrap_or(n) - at;
            put(at, len, protect).map_err(|(done, e)| (at * PAGE + done, e))?;
            at += len;
        }
        Ok(())
    }

    /// Frees the slots of `n` pages that came in: as holes, or as frames where the page was copied.
    pub(crate) fn free_slots_of(&self, s: &mut State, vpn: u64, slot: u32, n: usize) {
        if self.without_move {
            s.zone.free_run(Kind::Frame, slot, n);
            s.rss += n * PAGE;
            return;
        }
        if !s.protects() {
            s.zone.free_run(Kind::Hole, slot, n);
            return;
        }
        let mut runs = Vec::new();
        let _ = self.by_runs(s, vpn, n, |at, len, copied| {
            runs.push((slot + at as u32, len, copied));
            Ok(())
        });
        for (slot, len, copied) in runs {
            s.zone.free_run(if copied { Kind::Frame } else { Kind::Hole }, slot, len);
            s.rss += if copied { len * PAGE } else { 0 };
        }
    }

    /// Sets what a page becomes when it is brought in for a fault. Returns whether it was clean.
    pub(crate) fn note_access(&self, s: &mut State, r: Request) -> bool {
        let was = s.pt.is_clean(r.vpn);
        // A write to a protected page is not done yet: the page comes in protected, and the access is repeated.
        let writes = r.write && !s.pt.is_protected(r.vpn);
        let clean = !writes && (was || s.pt.get(r.vpn).tag() == Tag::None);
        s.pt.set_clean(r.vpn, s.tracking && clean);
        was
    }

    /// Makes a resident write-protected page writable.
    ///
    /// # Errors
    /// [`EventPending`]: nothing was done.
    pub(crate) fn allow_write(&self, s: &mut State, vpn: u64) -> Result<(), EventPending> {
        let was = s.pt.is_clean(vpn);
        // Before any thread can have written.
        s.pt.set_clean(vpn, false);
        let at = vpn as usize * PAGE;
        self.let_write(at, at + PAGE, at).inspect_err(|EventPending| s.pt.set_clean(vpn, was))
    }

    /// Makes a byte range writable; a thread waits to write to the page `at` in it. If the kernel refuses the range, makes only
    /// that page writable: some of the range was never protected, and so is not registered for that, whatever is known of it now.
    ///
    /// The story: a child was forked by a thread on a stack of the program's own. It wrote to a frame above the pages that the
    /// fork's hook had written to, which had been left out of the protection. The kernel did nothing behind those pages, the
    /// faulting thread was woken only to fault again, and it went on like that forever, keeping the kernel and the handler busy.
    ///
    /// # Errors
    /// [`EventPending`]: nothing was done.
    pub(crate) fn let_write(&self, from: usize, to: usize, at: usize) -> Result<(), EventPending> {
        for (from, to) in [(from, to), (at, at + PAGE)] {
            match self.uffd().write_protect(from, to - from, false) {
                Ok(()) => return Ok(()),
                Err(libc::EAGAIN) => return Err(EventPending),
                Err(_) => {}
            }
        }
        // The page is not mapped any more: the waiting thread tries again.
        self.uffd().wake(at, PAGE);
        Ok(())
    }

    /// Write-protects the resident pages of `[from, to)`, which one leaf of the table covers. Calls `done` for each known and
    /// `wanted` page that cannot be written to unseen from then on.
    ///
    /// # Errors
    /// [`EventPending`]: `done` was not called for all of them.
    pub(crate) fn write_protect_known(
        &self,
        s: &mut State,
        from: u64,
        to: u64,
        wanted: impl Fn(&State, u64) -> bool,
        mut done: impl FnMut(&mut State, u64),
    ) -> Result<(), EventPending> {
        let protect = |from: u64, to: u64| {
            let done = self.uffd().write_protect(from as usize * PAGE, (to - from) as usize * PAGE, true);
            if done == Err(libc::EAGAIN) { Err(EventPending) } else { Ok(done.is_ok()) }
        };
        // A thread that ends gets no service when it writes to its control block; and the kernel does not ask whose userfaultfd
        // protects.
        let (start, end) = (from as usize * PAGE, to as usize * PAGE);
        let others = s.never_protected(start, end);
        let mut all = true;
        for (start, end) in without(vec![(start, end)], &others) {
            all &= protect((start / PAGE) as u64, (end / PAGE) as u64)?;
        }
        for vpn in from..to {
            let tag = s.pt.get(vpn).tag();
            if tag == Tag::None || !wanted(s, vpn) {
                continue;
            }
            // If some of the range is not registered it goes page by page, and pages that cannot be protected stay as they are. A
            // known page is neither pinned nor another's, even if it was that before.
            let protected = all && !others.iter().any(|(a, b)| (*a..*b).contains(&(vpn as usize * PAGE)));
            if tag != Tag::Resident || protected || protect(vpn, vpn + 1)? {
                done(s, vpn);
            }
        }
        Ok(())
    }

    /// Clears the soft-dirty bits of the known pages of `[from, to)`, which one leaf of the table covers, and calls `was` for
    /// each that was set. Returns how many those are. (Both in one step, so that no write is missed.)
    ///
    /// # Errors
    /// [`EventPending`]: not all were cleared; `was` got those that were.
    pub(crate) fn clear_soft_dirty(
        &self,
        s: &mut State,
        from: u64,
        to: u64,
        mut was: impl FnMut(u64),
    ) -> Result<usize, EventPending> {
        s.tracking = true;
        let mut cleared = 0;
        self.write_protect_known(
            s,
            from,
            to,
            |s, vpn| !s.pt.is_clean(vpn),
            |s, vpn| {
                s.pt.set_clean(vpn, true);
                was(vpn);
                cleared += 1;
            },
        )?;
        Ok(cleared)
    }

    /// In memory just found, marks pages that were only read as clean. Everything else counts as written, which it is.
    pub(crate) fn find_unwritten(&self, s: &mut State, from: u64, to: u64) {
        let zeros = |start, end| {
            let mut runs = Vec::new();
            let _ = pagemap::zero_runs(self.files.pagemap.load(Relaxed), start, end, |a, b| runs.push((a, b)));
            runs
        };
        for (start, end) in zeros(from as usize * PAGE, to as usize * PAGE) {
            // If one is written to before it is protected, it is not the page of zeros any more.
            if self.uffd().write_protect(start, end - start, true).is_ok() {
                let pages = zeros(start, end).into_iter().flat_map(|(a, b)| a / PAGE..b / PAGE);
                pages.for_each(|page| s.pt.set_clean(page as u64, true));
            }
        }
    }

    /// In a forked child, before the program's code runs: protects clean pages again.
    pub(crate) fn protect_inherited(&self, s: &mut State) {
        if !s.tracking {
            return;
        }
        let mut runs: Vec<(u64, u64)> = Vec::new();
        s.pt.for_each(|vpn, pte| {
            if pte.tag() != Tag::Resident || !s.pt.is_clean(vpn) {
                return;
            }
            match runs.last_mut() {
                Some((_, to)) if *to == vpn => *to += 1,
                _ => runs.push((vpn, vpn + 1)),
            }
        });
        let protect = |from: u64, to: u64| {
            self.uffd().write_protect(from as usize * PAGE, (to - from) as usize * PAGE, true).is_ok()
        };
        for (from, to) in runs {
            // If that fails, page by page, so that the others stay clean.
            if !protect(from, to) {
                (from..to).filter(|vpn| !protect(*vpn, vpn + 1)).for_each(|vpn| s.pt.set_clean(vpn, false));
            }
        }
    }

    /// Makes memory shared with another process exclusive to this one without writing to it; false if the kernel refuses.
    ///
    /// A write by MADV_POPULATE_WRITE would count as the program's. But since Linux 6.2 or so, pinning a page for reading
    /// un-shares it and leaves its protection as it was; and `process_vm_readv` pins what it reads.
    pub(crate) fn unshare_unwritten(&self, start: usize, len: usize) -> bool {
        let (mut at, end) = (start, start + len);
        while at < end {
            self.show_progress();
            let n = ((end - at) / PAGE).min(UNSHARE_PAGES);
            let mut pages = [0; UNSHARE_PAGES];
            pages.iter_mut().enumerate().for_each(|(i, page)| *page = at + i * PAGE);
            at += match read_bytes(thread::getpid(), &pages[..n]) {
                // A page that cannot be read is skipped.
                Ok(read) => (read + usize::from(read < n)) * PAGE,
                Err(libc::EFAULT) => PAGE,
                Err(_) => return false,
            };
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use uzswap_mm::lru::List;
    use uzswap_sys::uffd::{Message, Uffd};
    use uzswap_sys::{raw, sys, uffd};

    const N: usize = 32;

    /// Memory of `N` known pages, each holding its number; returns the number of the first.
    fn written(p: &Pager) -> u64 {
        let at = testing::memory(p, N);
        (0..N).for_each(|page| testing::put(p, at + page * PAGE, &[page as u8 + 1; PAGE]));
        let first = (at / PAGE) as u64;
        p.state.lock().list_resident(first, N, List::Inactive, |_| None);
        first
    }

    fn serve(p: &Pager, vpn: u64, write: bool, protected: bool) {
        let served = p.serve(&mut p.state.lock(), Request { vpn, write, protected });
        assert!(served.is_ok(), "no event is pending");
    }

    fn holds(vpn: u64, byte: u8) -> bool {
        // SAFETY: the page was just brought, and nobody else uses it.
        unsafe { core::slice::from_raw_parts((vpn as usize * PAGE) as *const u8, PAGE) }.iter().all(|b| *b == byte)
    }

    /// The arena's frames are those that the zone calls free, and those of staged pages.
    fn frames_are_accounted_for(p: &Pager) {
        let (mut there, s) = (0, p.state.lock());
        let end = p.layout.arena + p.layout.slots * PAGE;
        pagemap::present_runs(p.files.pagemap.load(Relaxed), p.layout.arena, end, |a, b| there += (b - a) / PAGE)
            .unwrap();
        assert_eq!(there, s.zone.free_slots(Kind::Frame) + s.staged);
    }

    /// A pinned page is unknown, and is not protected with the others.
    #[test]
    fn a_control_block_is_not_protected() {
        let p = testing::tracking_pager(16 << 20);
        let first = written(p);
        let mut s = p.state.lock();
        s.pinned.push(((first as usize + 5) * PAGE, (first as usize + 6) * PAGE));
        crate::calls::events::forget_range(&mut s, first + 5, first + 6);
        let cleared = p.clear_soft_dirty(&mut s, first, first + N as u64, |_| {}).ok();
        assert_eq!(cleared, Some(N - 1));
        (first..first + N as u64).for_each(|vpn| assert_eq!(testing::is_protected(p, vpn), vpn != first + 5));
    }

    /// The story: memory in between, of a userfaultfd of the program's own, was protected as well. The program's handler got
    /// reports of writes that it never asked for.
    #[test]
    fn what_is_anothers_is_not_protected() {
        let p = testing::tracking_pager(16 << 20);
        let first = written(p);
        let (theirs, _) = Uffd::open(uffd::FEATURE_WRITE_PROTECT).expect("access to userfaultfd");
        let (at, len) = ((first as usize + 5) * PAGE, 3 * PAGE);
        p.uffd().unregister(at, len).expect("it is registered");
        theirs.register_tracked(at, len).expect("it is nobody's");
        let s = &mut *p.state.lock();
        // The page behind once belonged to it, and the one after that was pinned.
        s.note_ceded(at, at + len + PAGE);
        s.pinned.push((at + len + PAGE, at + len + 2 * PAGE));
        crate::calls::events::forget_range(s, first + 5, first + 8);
        assert_eq!(p.clear_soft_dirty(s, first, first + N as u64, |_| {}).ok(), Some(N - 3));
        (0..N as u64).for_each(|i| assert_eq!(testing::is_protected(p, first + i), !(5..8).contains(&i), "page {i}"));
    }

    #[test]
    fn a_clean_page_is_protected_wherever_it_goes() {
        let p = testing::tracking_pager(16 << 20);
        let first = written(p);
        let end = first + N as u64;
        assert!((first..end).all(|vpn| !testing::is_protected(p, vpn)));
        let clear = || p.clear_soft_dirty(&mut p.state.lock(), first, end, |_| ()).ok();
        assert_eq!((clear(), clear()), (Some(N), Some(0)));
        assert!((first..end).all(|vpn| testing::is_protected(p, vpn)));
        for stored in [false, true] {
            match stored {
                false => assert_eq!(p.age(first, end), N),
                true => assert_eq!(p.page_out(first, end), N),
            }
            let written = |vpn: u64| stored && [5, 7].contains(&(vpn - first));
            assert!((first..end).all(|vpn| p.state.lock().pt.is_clean(vpn) != written(vpn)), "out, stored: {stored}");
            frames_are_accounted_for(p);
            // One page is written to, another read: its block or neighbours come along, each in its own state.
            serve(p, first + 5, true, false);
            (first..end).filter(|vpn| p.state.lock().pt.get(*vpn).tag() != Tag::Resident).for_each(|vpn| {
                if p.state.lock().pt.get(vpn).tag() != Tag::Resident {
                    serve(p, vpn, false, false);
                }
            });
            for vpn in first..end {
                let written = vpn == first + 5 || written(vpn);
                let is = (testing::is_protected(p, vpn), p.state.lock().pt.is_clean(vpn));
                assert_eq!(is, (!written, !written), "page {} (stored: {stored})", vpn - first);
                assert!(holds(vpn, (vpn - first) as u8 + 1));
            }
            frames_are_accounted_for(p);
            // A write to a page that is resident.
            serve(p, first + 7, true, true);
            assert!(!testing::is_protected(p, first + 7) && !p.state.lock().pt.is_clean(first + 7));
        }
        assert_eq!(clear(), Some(2));
    }

    /// A page never touched is clean when it is read; its untouched neighbours stay unknown.
    #[test]
    fn what_was_never_touched_is_clean_until_it_is_written_to() {
        let p = testing::tracking_pager(16 << 20);
        let first = (testing::memory(p, N) / PAGE) as u64;
        p.state.lock().tracking = true;
        for (i, write) in [(0, false), (1, false), (2, true), (3, true)] {
            serve(p, first + i, write, false);
            assert_eq!((testing::is_protected(p, first + i), p.state.lock().pt.is_clean(first + i)), (!write, !write));
            assert_eq!(p.state.lock().pt.get(first + i + 1).tag(), Tag::None, "though it is a sequence");
        }
        assert!(holds(first, 0) && holds(first + 3, 0));
        // Nothing is mapped there, so nothing is clean. (With as many pages behind the first, one run in some forty left the
        // address space.)
        let nowhere = 0x1000_0000_0000 / PAGE as u64;
        serve(p, nowhere, false, false);
        assert!(!p.state.lock().pt.is_clean(nowhere));
    }

    /// After fork pages are shared and cannot be moved. The kernel's usual way to un-share them is to write.
    #[test]
    fn unsharing_is_no_write() {
        // A fork shares other tests' memory as well, which then cannot be moved; they waited forever.
        if !testing::by_itself("page_state::writes::tests::unsharing_is_no_write") {
            return;
        }
        let p = testing::tracking_pager(16 << 20);
        let first = written(p);
        let (at, end) = (first as usize * PAGE, first + N as u64);
        testing::let_inherit(at, N);
        assert_eq!(p.clear_soft_dirty(&mut p.state.lock(), first, end - 2, |_| ()).ok(), Some(N - 2));
        let mut pipe = [0; 2];
        // SAFETY: two descriptors are written; the child makes system calls only.
        let child = unsafe {
            sys!(libc::SYS_pipe2, pipe.as_mut_ptr(), 0).expect("a pipe");
            let child = sys!(libc::SYS_fork).expect("fork");
            if child == 0 {
                raw::close(pipe[1]);
                let _ = sys!(libc::SYS_read, pipe[0], &raw mut pipe as usize, 1);
                let _ = sys!(libc::SYS_exit_group, 0);
            }
            child
        };
        assert_eq!(p.stage_run(&mut p.state.lock(), first, N).ok(), Some(0), "all is shared");
        assert!(p.unshare_unwritten(at, N * PAGE));
        for vpn in first..end {
            assert_eq!(testing::is_protected(p, vpn), vpn < end - 2, "page {}", vpn - first);
        }
        assert_eq!(p.stage_run(&mut p.state.lock(), first, N).ok(), Some(N), "it is ours alone now");
        (first..end).for_each(|vpn| serve(p, vpn, false, false));
        assert!((first..end).all(|vpn| holds(vpn, (vpn - first) as u8 + 1)));
        raw::close(pipe[1]);
        // SAFETY: no status is asked for.
        let _ = unsafe { sys!(libc::SYS_wait4, child, 0, 0, 0) };
        raw::close(pipe[0]);
    }

    #[test]
    fn clean_pages_are_moved_and_forgotten_with_what_is_known_of_them() {
        let p = testing::tracking_pager(16 << 20);
        let (from, to) = (written(p), 1 << 20);
        let mut s = p.state.lock();
        s.tracking = true;
        (0..N as u64).step_by(3).for_each(|i| s.pt.set_clean(from + i, true));
        let bytes = |page: u64| page as usize * PAGE;
        p.event(&mut s, Message::Remap { from: bytes(from), to: bytes(to), len: N * PAGE });
        assert!((0..N as u64).all(|i| s.pt.is_clean(to + i) == i.is_multiple_of(3) && !s.pt.is_clean(from + i)));
        p.event(&mut s, Message::Removed { start: bytes(to), end: bytes(to + 7) });
        assert!((0..N as u64).all(|i| s.pt.is_clean(to + i) == (i >= 7 && i.is_multiple_of(3))));
    }
}

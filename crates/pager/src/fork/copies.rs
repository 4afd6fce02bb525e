//! Traps writes to memory shared after a fork, where the copies might not fit.
//!
//! When a process writes to a page that it shares with a parent or child, the kernel makes a copy and tells nobody. Three
//! children that each wrote to 64 MiB of their parent's had copied all 192 MiB before any was compressed. So where the copies
//! would not fit, the tickers write-protect what is shared: in the parent before the fork returns, if that is soon, and in the
//! child before its first instruction. A write then is a fault like any other. It waits a moment for reclaim while the limit is
//! exceeded, and ends the protection of the 256 KiB around it: that many pages may be copied unseen until the next fault. The
//! waits are short, as the shared memory may be all there is. Where the copies do fit, each look of the ticker checks again, as
//! more may come.
//!
//! A write to a page that nobody shares any more copies nothing. So it does not wait (unless the limit is exceeded by much, see
//! `exclusive`), and all such pages in the 2 MiB around it become writable at once. (The story: a program forks for each command
//! it runs, and all its children have executed another program before it writes again. Each 256 KiB cost it a fault, and two
//! milliseconds while the limit was exceeded.)
//!
//! A thread that faults on a page that is out does not wait, but makes room itself (`exclusive`). (The story: it waited for half
//! a millisecond each time. A program that uses 53 MiB and forks now and then took 16 s instead of 3 in 16 MiB, which it exceeds
//! all the time.)
//!
//! Single pages are not tracked. A page that moves out loses its protection, and one that comes in has none, as it is shared with
//! nobody. If protection is lost for another reason a copy goes unseen, as it would without protection.
//!
//! Pages pinned from then on are made writable in full (`may_be_written`).
//!
//! Invariants: protection begins with the pager's lock held, and `protections` counts how often. It begins between mapping calls,
//! as it registers the managed memory, which by then must not be something else. A hook must not fault while it
//! holds the lock; it writes to its pages before it takes the lock, and again if that count has changed by then (`lock_in_hook`).
//! Protection leaves out pinned memory (control blocks), ceded memory, and memory that is protected as it leaves (`read_only`).
//! With `--track-writes` pages are protected for another purpose, and copies are not trapped.

use crate::discover::without;
use crate::fault::EventPending;
use crate::frames::arena::PAGE;
use crate::pager::Pager;
use crate::state::State;
use core::ops::Range;
use core::sync::atomic::Ordering::*;
use uzswap_sys::{lock, pagemap, thread};

/// Bytes around a write that become writable; and bytes around it of which those pages do that nobody shares.
const WINDOW: usize = 64 * PAGE;
const WIDE: usize = 512 * PAGE;
/// How often a write waits for reclaim, and for how long each time (nanoseconds).
pub(crate) const COPY_WAITS: u32 = 4;
pub(crate) const WAIT_NS: u64 = 500_000;
/// With less shared memory than this (bytes) nothing is protected later: each window written to costs a fault, shared or not.
const MUCH_SHARED: usize = 4 << 20;
/// States of `Pager::forked`: everything shared is protected; or it is not (yet); or the forking thread waits until it is.
pub(crate) const PROTECTED: u32 = 0;
pub(crate) const UNPROTECTED: u32 = 1;
pub(crate) const AWAITED: u32 = 2;
/// How long the forking thread waits at most for the protection (nanoseconds).
const PROTECTED_WITHIN_NS: u64 = 20_000_000;

impl Pager {
    /// Whether the memory that this process shares since a fork may fail to fit if it is copied.
    pub(crate) fn copies_may_exceed(&self, s: &State) -> bool {
        self.may_exceed(s, s.resident * PAGE)
    }

    /// The same if `copied` bytes may be copied.
    fn may_exceed(&self, s: &State, copied: usize) -> bool {
        let tells = self.engaged.load(Relaxed) && !self.tracks && !self.without_move && !self.own_frames;
        tells && self.excess(s) + copied as isize > 0
    }

    /// Write-protects all managed memory, except the pages `but`.
    pub(crate) fn protect_shared(&self, s: &State, but: &[Range<usize>]) {
        self.protections.fetch_add(1, SeqCst);
        for (start, end) in s.managed.iter() {
            let mut others = s.never_protected(start, end);
            others.extend(but.iter().map(|pages| (pages.start * PAGE, pages.end * PAGE)));
            for (from, to) in without(vec![(start, end)], &others) {
                // If refused (an event is unread, or the mapping is gone), copies there go unseen.
                if from < to && self.uffd().register_tracked(from, to - from).is_ok() {
                    let _ = self.uffd().write_protect(from, to - from, true);
                }
            }
        }
    }

    /// Ends the protection of pages whose writes must not fault any more; false if an event must be read first.
    ///
    /// What the kernel writes as a thread ends (the word that a joining thread waits for) waits for no fault handler: with the
    /// protection on it would be lost.
    pub(crate) fn may_be_written(&self, start: usize, end: usize) -> bool {
        let none = self.protections.load(Relaxed) == 0;
        // Page by page: some may lie in a mapping that was never protected, which would be an error for the whole range.
        let mut pages = (start..end).step_by(PAGE);
        none || pages.all(|page| self.uffd().write_protect(page, PAGE, false) != Err(libc::EAGAIN))
    }

    /// Whether it is time to protect: in the parent after a fork, and on either side later, once the copies would not fit any
    /// more. If not, a forking thread that waits goes on.
    fn is_to_protect(&self, s: &State) -> bool {
        let forked = self.forked.load(SeqCst);
        let protects = match forked {
            AWAITED => self.copies_may_exceed(s),
            UNPROTECTED if self.has_kin() => {
                // The number of processes that share on average; each of them may copy as much.
                let shared = self.kin.left();
                let who = (s.rss + shared) / s.rss.max(1);
                shared >= MUCH_SHARED && self.may_exceed(s, shared * who.max(2))
            }
            _ => false,
        };
        if !protects && forked == AWAITED {
            self.let_forked_go_on(UNPROTECTED);
        }
        protects
    }

    /// Protects if it is time to, with the lock held and no mapping call under way.
    pub(crate) fn protect_after_fork(&self, s: &State) {
        if self.is_to_protect(s) {
            self.protect_and_go_on(s);
        }
    }

    /// Protects, and lets a forking thread that waits go on.
    fn protect_and_go_on(&self, s: &State) {
        self.protect_shared(s, &[]);
        self.let_forked_go_on(PROTECTED);
    }

    /// The same in the ticker, with the lock held, unless a mapping call is under way; false if one is.
    pub(crate) fn protect_now(&self, s: &State) -> bool {
        if !self.is_to_protect(s) {
            return true;
        }
        let stopped = self.calls.try_stop_now();
        if stopped {
            self.protect_and_go_on(s);
            self.calls.go_on();
        }
        stopped
    }

    /// The same without the lock held; false if mapping calls cannot be stopped now.
    ///
    /// The story: mapping calls kept running. A thread had just mapped a memfd privately in the place of managed memory, and the
    /// event was still unread, so the new mapping was registered. A sequential fault then copied pages of zeros ahead into it,
    /// where the file's pages should be (once, in `torture` on a machine with a load of eleven).
    pub(crate) fn protect_between_calls(&self) -> bool {
        let Some(s) = self.lock_between_calls() else { return false };
        self.protect_after_fork(&s);
        drop(s);
        self.calls.go_on();
        true
    }

    fn let_forked_go_on(&self, how: u32) {
        if self.forked.swap(how, SeqCst) == AWAITED {
            lock::futex_wake(&self.forked, u32::MAX, false);
        }
    }

    /// In the forking thread, without the lock: waits a moment for the protection, or it would write unseen.
    ///
    /// The story: where the ticker had no CPU for a few milliseconds, a parent had copied all of its 64 MiB by then.
    pub(crate) fn await_protection(&self) {
        self.await_protection_for(PROTECTED_WITHIN_NS);
    }

    fn await_protection_for(&self, ns: u64) {
        let end = thread::now_ns() + ns;
        while self.forked.load(SeqCst) == AWAITED {
            let now = thread::now_ns();
            if now >= end {
                break;
            }
            lock::futex_wait(&self.forked, AWAITED, Some(end - now), false);
        }
    }

    /// Makes the pages around one that is written to writable.
    ///
    /// # Errors
    /// [`EventPending`]: nothing was done.
    pub(crate) fn allow_copies(&self, s: &State, vpn: u64) -> Result<(), EventPending> {
        let at = vpn as usize * PAGE;
        let near = (at / WINDOW * WINDOW, (at / WINDOW + 1) * WINDOW);
        let alone = self.alone_around(at).unwrap_or(near);
        let window = (near.0.min(alone.0), near.1.max(alone.1));
        let managed = s.managed.holding(at).unwrap_or((at, at + PAGE));
        let leaves = |page: &usize| s.leaving.has((*page / PAGE) as u64);
        let from = (window.0.max(managed.0)..at).step_by(PAGE).rev().take_while(|page| !leaves(page)).last();
        let to = (at + PAGE..window.1.min(managed.1)).step_by(PAGE).take_while(|page| !leaves(page)).last();
        let part = (from.unwrap_or(at), to.map_or(at + PAGE, |page| page + PAGE));
        let parts = without(vec![part], &s.never_protected(part.0, part.1));
        let (from, to) = parts.into_iter().find(|(from, to)| (*from..*to).contains(&at)).unwrap_or((at, at + PAGE));
        self.let_write(from, to, at)
    }

    /// Whether no other process has the page at `at`: writing to it copies nothing, even if it was once shared.
    pub(crate) fn is_alone(&self, at: usize) -> bool {
        let mut alone = false;
        // A page that cannot be looked up counts as shared.
        let _ = pagemap::exclusive_runs(self.files.pagemap.load(Relaxed), at, at + PAGE, |_, _| alone = true);
        alone
    }

    /// The range around a page that no other process has either; None if another process has the page itself.
    fn alone_around(&self, at: usize) -> Option<(usize, usize)> {
        if !self.is_alone(at) {
            return None;
        }
        let (start, mut around) = (at / WIDE * WIDE, None);
        let found = |from, to| around = around.or((from..to).contains(&at).then_some((from, to)));
        pagemap::unshared_runs(self.files.pagemap.load(Relaxed), start, start + WIDE, found).ok().and(around)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::Request;
    use crate::testing;
    use std::sync::atomic::AtomicBool;
    use uzswap_mm::lru::List;
    use uzswap_sys::uffd::Message;
    use uzswap_sys::{maps, sys};

    const N: usize = 256;

    fn begin() -> (&'static Pager, usize) {
        let p = testing::pager_told_of_moves(16 << 20);
        // A window begins at a multiple of its size.
        let at = testing::memory(p, N + WINDOW / PAGE).next_multiple_of(WINDOW);
        (0..N).for_each(|page| testing::put(p, at + page * PAGE, &[7; PAGE]));
        let mut s = p.state.lock();
        s.managed.push((at, at + N * PAGE));
        s.list_resident((at / PAGE) as u64, N, List::Inactive, |_| None);
        (p, at)
    }

    fn protected(p: &Pager, at: usize) -> Vec<Range<usize>> {
        let is = |page: &usize| testing::is_protected(p, (at / PAGE + page) as u64);
        let mut runs: Vec<Range<usize>> = Vec::new();
        for page in (0..N).filter(is) {
            match runs.last_mut().filter(|run| run.end == page) {
                Some(run) => run.end += 1,
                None => runs.push(page..page + 1),
            }
        }
        runs
    }

    /// See the file's head. The writer waits until it is served, and what it wrote is there.
    #[test]
    fn a_write_is_told_and_those_around_it_are_not() {
        let (p, at) = begin();
        let page = |n: usize| at / PAGE + n;
        {
            let mut s = p.state.lock();
            s.pinned.push((page(70) * PAGE, page(72) * PAGE));
            s.note_ceded(page(100) * PAGE, page(101) * PAGE);
            p.protect_shared(&s, core::slice::from_ref(&(page(200)..page(203))));
        }
        assert_eq!(protected(p, at), [0..70, 72..100, 101..200, 203..N]);
        let written = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: a page of this test's, which is there.
                unsafe { (((page(80)) * PAGE) as *mut u8).write(8) };
                written.store(true, SeqCst);
            });
            let message = loop {
                match p.uffd().read().expect("the client is there") {
                    Some(message) => break message,
                    None => std::thread::yield_now(),
                }
            };
            let Message::Fault { address, write, protected, .. } = message else { panic!("{message:?}") };
            assert!(write && protected && !written.load(SeqCst), "{address:#x}");
            assert_eq!(address / PAGE, page(80));
            let served = p.serve(&mut p.state.lock(), Request::at(address, write, protected));
            assert!(served.is_ok(), "no event is unread");
        });
        // Pages around it that are pinned or of other kinds stay as they are: they were never protected.
        assert_eq!(protected(p, at), [0..70, 101..200, 203..N]);
        // SAFETY: the same page.
        assert_eq!(unsafe { (((page(80)) * PAGE) as *const u8).read() }, 8);
    }

    /// See [`Pager::allow_copies`]: pages left out of the protection (a hook wrote to them, or they held a control block) are no
    /// longer known as such when a page near them is written to.
    #[test]
    fn who_writes_near_what_was_left_out_goes_on() {
        for page in [8, 80, 210] {
            let (p, at) = begin();
            {
                let s = &mut *p.state.lock();
                s.pinned.push((at + 70 * PAGE, at + 72 * PAGE));
                p.protect_shared(s, &[at / PAGE + 2..at / PAGE + 4, at / PAGE + 200..at / PAGE + 203]);
                s.pinned.clear();
            }
            assert_eq!(protected(p, at), [0..2, 4..70, 72..200, 203..N]);
            let request = Request::at(at + page * PAGE, true, true);
            assert!(p.serve(&mut p.state.lock(), request).is_ok(), "no event is unread");
            assert!(!testing::is_protected(p, (at / PAGE + page) as u64), "a writer to page {page} faults forever");
        }
    }

    /// The story: in a program that forks for each command it runs, each 256 KiB cost a fault and a wait after the command was
    /// executed.
    #[test]
    fn what_nobody_shares_any_more_may_be_written_to_at_once() {
        let (p, at) = begin();
        testing::let_inherit(at, N);
        let write_to = |page: usize| {
            let request = Request::at(at + page * PAGE, true, true);
            assert!(p.serve(&mut p.state.lock(), request).is_ok(), "no event is unread");
        };
        testing::beside_a_child(|| {
            p.protect_shared(&p.state.lock(), &[]);
            // SAFETY: a page of this test's, which is there; the child keeps the one that was.
            let copy = |page: usize| unsafe { ((at + page * PAGE) as *mut u8).write(8) };
            write_to(70);
            assert_eq!(protected(p, at), [0..64, 128..N], "the child has it");
            assert!(!p.is_alone(at + 70 * PAGE));
            copy(70);
            assert!(p.is_alone(at + 70 * PAGE));
            write_to(70);
            assert_eq!(protected(p, at), [0..64, 128..N], "the child has what is around it");
        });
        // Other tests may fork and share it for a while. A 2 MiB boundary may lie within it.
        let wide = |page: usize| (at + page * PAGE) / WIDE;
        let done = (0..10_000).any(|_| {
            p.protect_shared(&p.state.lock(), &[]);
            write_to(70);
            protected(p, at).into_iter().flatten().all(|page| wide(page) != wide(70))
        });
        assert!(done, "{:?}", protected(p, at));
    }

    /// The kernel writes to a control block as its thread ends, and waits for no handler then. Otherwise the write would be lost,
    /// and a joining thread would wait forever.
    #[test]
    fn what_is_pinned_is_protected_no_more() {
        let (p, at) = begin();
        p.protect_shared(&p.state.lock(), &[]);
        assert_eq!(protected(p, at).as_slice(), core::slice::from_ref(&(0..N)));
        p.pin(at + 30 * PAGE + 8, at + 31 * PAGE + 8, true);
        assert_eq!(protected(p, at), [0..30, 32..N]);
        assert_eq!(p.state.lock().pinned, [(at + 30 * PAGE, at + 32 * PAGE)]);
    }

    /// The story: where the ticker had no CPU for a few milliseconds, a parent had copied all of its 64 MiB by then.
    #[test]
    fn who_forks_goes_on_when_what_it_shares_is_protected() {
        let (p, at) = begin();
        p.engaged.store(true, SeqCst);
        p.forked.store(AWAITED, SeqCst);
        std::thread::scope(|scope| {
            let mut s = p.state.lock();
            // More than the whole limit.
            s.rss = 32 << 20;
            let waiter = scope.spawn(|| {
                p.await_protection_for(u64::MAX / 2);
                drop(p.state.lock());
                protected(p, at) == core::slice::from_ref(&(0..N))
            });
            assert!(!waiter.is_finished(), "nothing is protected yet");
            p.protect_after_fork(&s);
            assert_eq!(p.forked.load(SeqCst), PROTECTED);
            drop(s);
            assert!(waiter.join().unwrap());
        });
        // If the protection does not come, the forking thread goes on all the same.
        p.forked.store(AWAITED, SeqCst);
        p.await_protection_for(1);
        p.engaged.store(false, SeqCst);
    }

    /// The story: a process far from its limit forked, so nothing was protected. When both processes came near the limit by what
    /// they copied, the rest was copied unseen: they held 128 MiB of 100.
    #[test]
    fn what_fits_as_it_is_shared_is_protected_when_it_does_not_any_more() {
        let (p, at) = begin();
        p.forked.store(UNPROTECTED, SeqCst);
        p.kin.gained();
        p.kin.seem_shared(4 << 20);
        let look = |rss: usize| {
            let mut s = p.state.lock();
            s.rss = rss;
            p.protect_after_fork(&s);
            drop(s);
            p.forked.load(SeqCst) == PROTECTED
        };
        assert!(!look(15 << 20), "it is not managed yet");
        p.engaged.store(true, SeqCst);
        assert!(!look(6 << 20) && protected(p, at).is_empty(), "there is room for both to copy it");
        p.kin.seem_shared(1 << 20);
        assert!(!look(15 << 20), "it is little");
        p.kin.seem_shared(4 << 20);
        assert!(look(15 << 20));
        assert_eq!(protected(p, at).as_slice(), core::slice::from_ref(&(0..N)));
        p.engaged.store(false, SeqCst);
    }

    /// See [`Pager::protect_between_calls`].
    #[test]
    fn what_is_mapped_in_the_place_of_what_was_managed_is_not_registered() {
        let (p, at) = begin();
        p.engaged.store(true, SeqCst);
        p.forked.store(AWAITED, SeqCst);
        p.state.lock().rss = 32 << 20;
        // SAFETY: a file of the test's own.
        let file = unsafe { sys!(libc::SYS_memfd_create, c"pages".as_ptr(), 0) }.expect("a file");
        // SAFETY: the bytes are there.
        unsafe { sys!(libc::SYS_pwrite64, file, [9u8; N * PAGE].as_ptr(), N * PAGE, 0) }.expect("its contents");
        let meanwhile = std::thread::scope(|scope| {
            let maps = scope.spawn(|| {
                let held = p.calls.begin(false);
                let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
                // SAFETY: memory of the test's own is replaced.
                let mapped = unsafe { sys!(libc::SYS_mmap, at, N * PAGE, libc::PROT_READ, flags, file, 0) };
                p.calls.end(held);
                mapped
            });
            // (Its event is not read.)
            while !p.uffd().wait(-1) {}
            let now = p.protect_now(&p.state.lock());
            let protects = now || p.protect_between_calls();
            let meanwhile = (protects, maps::is_registered(at), p.forked.load(SeqCst));
            let s = &mut *p.state.lock();
            let event = p.uffd().read().expect("the client is there").expect("a message");
            p.event(s, event);
            assert_eq!(maps.join().unwrap(), Ok(at));
            let ahead = Request { vpn: (at / PAGE) as u64, write: false, protected: false };
            assert!(p.serve(s, ahead).is_ok(), "no event is unread");
            meanwhile
        });
        assert_eq!(meanwhile, (false, Some(false), AWAITED), "it is to be tried again");
        // SAFETY: the mapping just made.
        assert_eq!(unsafe { *(at as *const u8) }, 9, "a page that is not the file's");
        assert!(p.protect_now(&p.state.lock()) && maps::is_registered(at) == Some(false));
        assert_eq!(p.forked.load(SeqCst), PROTECTED);
        p.engaged.store(false, SeqCst);
    }

    /// Only where a second copy would not fit, and not where writes are trapped for another purpose.
    #[test]
    fn copies_are_told_where_they_might_not_fit() {
        let p = testing::pager(16 << 20);
        let may = |rss: usize, resident: usize| {
            let mut s = p.state.lock();
            (s.rss, s.resident) = (rss, resident);
            let may = p.copies_may_exceed(&s);
            s.resident = 0;
            may
        };
        assert!(!may(15 << 20, (8 << 20) / PAGE), "it is not managed yet");
        p.engaged.store(true, SeqCst);
        assert!(may(15 << 20, (8 << 20) / PAGE) && !may(4 << 20, (2 << 20) / PAGE));
        p.engaged.store(false, SeqCst);
    }
}

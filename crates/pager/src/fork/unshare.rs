//! Un-shares pages that a process shares since a fork, so that they can leave.
//!
//! MOVE takes a page only if one process has it alone. Pages that it refuses (EBUSY) are noted, and the reclaim thread has the
//! kernel copy them, without the lock. A copy is additional memory, and each process of a group makes its own; so few pages are
//! noted at a time, and they leave at once. They leave the other processes in the same way, and then the shared page is gone.
//!
//! In a process that shares nothing with a child a refused page is pinned, unless a fork left it looking shared: the kernel does
//! not notice that nobody shares a page any more until somebody writes to it. Un-sharing such pages takes no memory, and is tried
//! for all of them.
//!
//! The story: un-shared pages went back to *active*, and the next round un-shared the next ones, up to 4 MiB for each 256 KiB
//! that left. A Python program of 85 MiB that forks three workers, which takes 176 MiB by itself, held 330 under a limit of 88.
//!
//! By the time a noted range gets its turn it may be gone, and something else may be mapped there. So the range is checked again,
//! and un-shared while no mapping call runs. (The story: a private mapping of a file had come there. Its pages were copied, and
//! did not follow the file any more. Pages of a shared mapping got blocks in a sparse file that nobody had written to.)
//!
//! Lock order: the calls' lock before the pager's, as ever (`calls`). The pager's is released before the kernel is asked to copy.

use crate::frames::arena::PAGE;
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::pagetable::Tag;
use uzswap_sys::lock::Guard;
use uzswap_sys::sys;

/// Ranges noted at most: while the reclaim thread gets at none, the same ones are found again and again.
const RANGES_MOST: usize = 1024;
/// Pages noted at most that others may have too, except for the range that exceeds it: as many are copied before any leaves.
const COPIED_MOST: usize = 128;

impl State {
    /// Notes pages to be un-shared; `copied` if un-sharing them makes copies, as others have them too.
    pub(crate) fn note_shared(&mut self, vpn: u64, n: usize, copied: bool) {
        if self.unshare.len() < RANGES_MOST && !(copied && self.copies_enough()) {
            self.unshare.push((vpn as usize * PAGE, n * PAGE));
        }
    }

    /// Whether as many pages are noted as may be copied before any leaves.
    pub(crate) fn copies_enough(&self) -> bool {
        self.noted_pages() >= COPIED_MOST
    }

    pub(crate) fn noted_pages(&self) -> usize {
        self.unshare.iter().map(|(_, len)| len / PAGE).sum()
    }
}

impl Pager {
    /// Releases the lock, un-shares what was noted, and evicts it; returns whether any of it could be evicted.
    ///
    /// The story: the mere presence of noted pages counted as progress. In a process with a child nobody can tell pinned pages
    /// from shared ones. So where all pages were pinned the reclaim thread never rested, and a full group was not reported as
    /// full.
    pub(crate) fn unshare_noted(&self, mut s: Guard<'_, State>) -> bool {
        let shared = core::mem::take(&mut s.unshare);
        if shared.is_empty() {
            return false;
        }
        self.unsharing.store(true, SeqCst);
        drop(s);
        let all = self.unshare(&shared);
        // Freed under the lock, as everything is: a child must find the allocator at rest.
        let mut s = self.state.lock();
        // Not earlier: a thread that forks meanwhile must see it.
        self.unsharing.store(false, SeqCst);
        let helped = match self.has_kin() {
            true => self.take_unshared(&mut s, &shared),
            false => self.rescue_unshared(&mut s, &shared, all),
        };
        drop(shared);
        drop(s);
        helped
    }

    /// Whether refused pages are yet to be un-shared, or are being un-shared; they may leave then.
    ///
    /// The story: all of a program's pages were set aside, as its children had shared them until they executed another program.
    /// The rest could not leave, so the group was called full (82 MiB of 64, which compress to 8), and with `--on-full=kill` the
    /// program was killed.
    pub(crate) fn may_unshare(&self, s: &State) -> bool {
        !s.unshare.is_empty() || self.unsharing.load(SeqCst)
    }

    /// Evicts what was un-shared, before more is un-shared.
    fn take_unshared(&self, s: &mut State, ranges: &[(usize, usize)]) -> bool {
        let noted = s.unshare.len();
        let mut left = 0;
        for (at, len) in ranges {
            let (first, end) = ((at / PAGE) as u64, ((at + len) / PAGE) as u64);
            let (n, stopped) = self.stage_range(s, first, end);
            left += n;
            if stopped < end {
                break;
            }
        }
        // A page that could not be un-shared is pinned, or was shared again: reclaim meets it again.
        s.unshare.truncate(noted);
        left > 0
    }

    /// Tests whether pages that were un-shared, or were to be, can be evicted now. If so, or if that is unknown (an event is
    /// unread, or not `all` ranges were tried), reclaim meets again what was set aside. Pages that it did not help are pinned,
    /// and remain set aside.
    ///
    /// The story: half of a program's memory was pinned (registered buffers of io_uring), and nothing was evicted at all. Pinned
    /// pages went back to *active*, which was then the larger list, and nothing else was tried.
    fn rescue_unshared(&self, s: &mut State, ranges: &[(usize, usize)], all: bool) -> bool {
        let noted = s.unshare.len();
        let (mut helped, mut pending) = (false, false);
        for vpn in ranges.iter().map(|(at, _)| (at / PAGE) as u64) {
            if s.pt.get(vpn).tag() == Tag::Resident {
                let left = self.stage_run(s, vpn, 1);
                (helped, pending) = (matches!(left, Ok(1)), left.is_err());
            }
            if helped || pending {
                break;
            }
        }
        s.unshare.truncate(noted);
        if helped || pending || !all {
            s.lru.rescue();
        }
        helped
    }

    /// Makes pages shared with a child this process's own, so that they can be moved: the kernel copies them; false if not all
    /// ranges were tried, because a thread that cedes memory waits for this, or a mapping call does not end. The rest is found to
    /// be shared again.
    fn unshare(&self, ranges: &[(usize, usize)]) -> bool {
        // Once for all ranges: they are few, and other threads' calls would wait each time.
        let Some(mut s) = self.lock_to_make_room() else { return false };
        let mut all = true;
        for (at, len) in ranges {
            self.show_progress();
            if self.ceding.is_wanted() {
                all = false;
                break;
            }
            let (first, end) = ((at / PAGE) as u64, ((at + len) / PAGE) as u64);
            let len = s.resident_run(first, end) * PAGE;
            drop(s);
            // Writing to a protected page would mean waiting for the client, which this very thread watches over.
            if len > 0 && !(self.tracks && (self.unshare_unwritten(*at, len) || self.notifies.load(Acquire))) {
                // SAFETY: populating changes no contents. Without the lock, as a missing page is served by the handler.
                let _ = unsafe { sys!(libc::SYS_madvise, *at, len, libc::MADV_POPULATE_WRITE) };
            }
            s = self.state.lock();
        }
        drop(s);
        self.calls.go_on();
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reclaim::stage::PINNED_PAGES;
    use crate::{request, testing};
    use std::os::fd::AsRawFd;
    use uzswap_mm::lru::List;
    use uzswap_sys::uffd::Message;
    use uzswap_sys::uring::Uring;
    use uzswap_sys::{pagemap, raw};

    const N: usize = 64;

    /// Has the kernel pin N pages until the ring is dropped; None, with a message, if the kernel makes no ring.
    fn pin(at: usize) -> Option<Uring> {
        const REGISTER_BUFFERS: usize = 0;
        let Ok(ring) = Uring::new(1) else {
            testing::skip("io_uring is not to be had");
            return None;
        };
        let pinned = libc::iovec { iov_base: at as *mut _, iov_len: N * PAGE };
        // SAFETY: the kernel pins the range, which stays mapped.
        let done = unsafe { sys!(libc::SYS_io_uring_register, ring.fd(), REGISTER_BUFFERS, &raw const pinned, 1) };
        done.expect("buffers are registered");
        Some(ring)
    }

    /// See `unshare_noted`: pinned pages keep no others in memory, and leave once they are no longer pinned. Pages that a child
    /// which has ended left shared leave as soon as they are un-shared.
    #[test]
    fn what_is_pinned_is_set_aside_and_what_was_shared_comes() {
        const UNREGISTER_BUFFERS: usize = 1;
        let p = testing::pager(16 << 20);
        let at = testing::filled(p, 2 * N);
        let first = (at / PAGE) as u64;
        let Some(ring) = pin(at) else { return };
        // Tried more than once: other tests of this process may fork meanwhile, and share all of it for a while.
        let leaves = |most: usize, rescues: bool| {
            for _ in 0..10_000 {
                let mut s = p.state.lock();
                if rescues {
                    s.lru.rescue();
                }
                let _ = p.stage(&mut s, 2 * N);
                p.unshare_noted(s);
                if p.state.lock().resident <= most {
                    return;
                }
                std::thread::yield_now();
            }
            panic!("{} pages stay, not at most {most}", p.state.lock().resident);
        };
        p.state.lock().list_resident(first, N + N / 2, List::Inactive, |_| None);
        leaves(N + PINNED_PAGES as usize - 1, true);
        let tags = |s: &State| (first..first + N as u64).map(|vpn| s.pt.get(vpn).tag()).collect::<Vec<_>>();
        assert_eq!(tags(&p.state.lock()), [Tag::Resident; N]);
        // SAFETY: ends what was registered above.
        let done = unsafe { sys!(libc::SYS_io_uring_register, ring.fd(), UNREGISTER_BUFFERS, 0, 0) };
        done.expect("buffers are no longer registered");
        leaves(0, true);

        // The rest is shared with a child, which ends.
        testing::let_inherit(at, 2 * N);
        testing::beside_a_child(|| ());
        p.state.lock().list_resident(first + (N + N / 2) as u64, N / 2, List::Inactive, |_| None);
        leaves(0, false);
    }

    /// See the file's head: copied pages leave before more are copied.
    #[test]
    fn little_is_copied_before_it_leaves() {
        const MANY: usize = 32 * N;
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, MANY);
        let first = (at / PAGE) as u64;
        (0..MANY).for_each(|page| testing::put(p, at + page * PAGE, &[page as u8; PAGE]));
        testing::let_inherit(at, MANY);
        // Pages there that nobody else has (bits 63 and 56 of the kernel's page map).
        let own = || {
            let mut words = vec![0u8; MANY * 8];
            assert_eq!(raw::pread(p.files.pagemap.load(Relaxed), &mut words, first * 8), Ok(MANY * 8));
            words.chunks_exact(8).filter(|w| w[7] & 0x81 == 0x81).count()
        };
        let (most, rounds) = testing::beside_a_child(|| {
            p.kin.gained();
            p.state.lock().list_resident(first, MANY, List::Inactive, |_| None);
            assert_eq!(own(), 0);
            let (mut most, mut rounds) = (0, 0);
            while p.state.lock().resident > N {
                let mut s = p.state.lock();
                let before = s.staged;
                let _ = p.stage(&mut s, N);
                p.unshare_noted(s);
                let left = p.state.lock().staged - before;
                (most, rounds) = (most.max(own() + left), rounds + 1);
                assert!(rounds < 1000, "{} pages stay", p.state.lock().resident);
            }
            (most, rounds)
        });
        println!("{MANY} pages left in {rounds} rounds; at most {most} were copied in one");
        assert!(most < 2 * COPIED_MOST, "{most} pages were copied at once");
        let mut s = p.state.lock();
        assert_eq!(p.bring_range(&mut s, first, first + MANY as u64).1, first + MANY as u64);
        // SAFETY: everything is back, and nobody else uses it.
        let contents = unsafe { core::slice::from_raw_parts(at as *const u8, MANY * PAGE) };
        assert!(contents.chunks(PAGE).enumerate().all(|(page, c)| c.iter().all(|b| *b == page as u8)));
    }

    /// See `Pager::unshare_noted`: where all is pinned no progress is possible, whether a child may share it or not.
    #[test]
    fn to_unshare_what_is_pinned_is_no_progress() {
        let p = testing::pager(16 << 20);
        let at = testing::filled(p, N);
        let Some(_ring) = pin(at) else { return };
        p.state.lock().list_resident((at / PAGE) as u64, N, List::Inactive, |_| None);
        p.kin.gained();
        for round in 0..20 {
            let mut s = p.state.lock();
            assert_eq!(p.stage(&mut s, N).ok(), Some(0));
            assert!(!s.unshare.is_empty(), "round {round}: it is tried again");
            assert!(!p.unshare_noted(s), "round {round}");
        }
        assert_eq!(p.state.lock().resident, N);
    }

    /// See the file's head: if the noted memory was unmapped, whatever is mapped there since is left alone.
    #[test]
    fn what_is_mapped_where_something_was_to_be_unshared_is_let_alone() {
        let p = testing::pager(16 << 20);
        let at = testing::filled(p, N);
        let first = (at / PAGE) as u64;
        let mut s = p.state.lock();
        s.list_resident(first, N, List::Inactive, |_| None);
        s.note_shared(first, N, false);
        // A mapping call would replace it in this way.
        let file = std::fs::File::open("/proc/self/exe").expect("this program");
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_FIXED);
        // SAFETY: memory of this test's own is replaced, of which nothing is used any more.
        let mapped = unsafe { libc::mmap(at as *mut _, N * PAGE, prot, flags, file.as_raw_fd(), 0) };
        assert_eq!(mapped as usize, at);
        p.event(&mut s, Message::Unmapped { start: at, end: at + N * PAGE });
        p.unshare_noted(s);
        let copied = pagemap::anonymous_pages(p.files.pagemap.load(Relaxed), at, at + N * PAGE);
        assert_eq!(copied, Ok(0), "pages that do not follow the file");
    }

    /// The story: on a busy machine a program that forked all the time was asked to page out. Un-sharing its pages took more than
    /// five seconds, and the asking command was told that the program does not answer.
    #[test]
    fn who_asks_sees_that_unsharing_goes_on() {
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, 3);
        (0..3).for_each(|page| testing::put(p, at + page * PAGE, &[1; PAGE]));
        let ranges = [0, 1, 2].map(|page| (at + page * PAGE, PAGE));
        let r = &p.me().request;
        for (state, shown) in [(request::IDLE, 0), (request::ASKED, 3), (request::SERVING, 3), (request::DONE, 0)] {
            r.state.store(state, Relaxed);
            let before = r.progress.load(Relaxed);
            p.unshare(&ranges);
            assert_eq!(r.progress.load(Relaxed).wrapping_sub(before), shown, "state {state}");
        }
    }
}

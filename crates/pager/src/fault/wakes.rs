//! Holds wake-ups back while a fault's pages are mapped in several pieces.
//!
//! COPY and MOVE wake the threads that wait for the pages they map. On its own CPU the woken thread preempts the handler, which
//! has idle policy, and soon meets a page that the handler was about to map. It sleeps again and the handler maps the next piece:
//! two thread switches for each piece. Where a huge page may come there is another cost: whenever a thread touches memory without
//! a page table, the kernel takes a huge page and clears it, for nothing (100 µs). So the handler maps all pieces first, and
//! wakes once.
//!
//! Invariant: whoever holds wake-ups back delivers them all, whatever fails meanwhile ([`Pager::all_at_once`]). Owner: the
//! pager's lock.

use crate::frames::arena::PAGE;
use crate::pager::Pager;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// The range that was mapped without waking anybody.
#[derive(Debug, Default)]
pub struct Wakes {
    held: AtomicBool,
    /// The first page mapped, and the one behind the last; equal while there is none.
    from: AtomicU64,
    to: AtomicU64,
}

impl Wakes {
    /// Whether pages about to be mapped must not wake anybody yet.
    pub(crate) fn are_held(&self) -> bool {
        self.held.load(Relaxed)
    }

    /// Notes `n` pages that were mapped without a wake-up. Pages that could not be mapped must not be noted.
    ///
    /// The story: pages that were only tried were woken as well. While an event was unread nothing came; each try woke the
    /// thread, which faulted again, and was tried twice. Node.js had 167,000 faults instead of 17,000.
    pub(crate) fn note(&self, vpn: u64, n: usize) {
        let (from, to, end) = (self.from.load(Relaxed), self.to.load(Relaxed), vpn + n as u64);
        if n > 0 {
            let none = from == to;
            self.from.store(if none { vpn } else { from.min(vpn) }, Relaxed);
            self.to.store(if none { end } else { to.max(end) }, Relaxed);
        }
    }
}

impl Pager {
    /// Runs `map`, which maps the pages of one delivery. If the delivery is `large`, waiting threads are woken when all of it is
    /// there; otherwise as the pages come.
    pub(crate) fn all_at_once<T>(&self, large: bool, map: impl FnOnce() -> T) -> T {
        self.wakes.held.store(large, Relaxed);
        let done = map();
        self.wakes.held.store(false, Relaxed);
        let (from, to) = (self.wakes.from.swap(0, Relaxed), self.wakes.to.swap(0, Relaxed));
        if from < to {
            let n = (to - from) as usize;
            self.stall.mapping(from, n);
            self.uffd().wake(from as usize * PAGE, n * PAGE);
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use core::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    #[test]
    fn who_waits_for_a_piece_is_woken_when_all_are_there() {
        static BYTE: AtomicUsize = AtomicUsize::new(0);
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, 8);
        let vpn = (at / PAGE) as u64;
        let waits = std::thread::spawn(move || {
            // SAFETY: the test's memory, which is served below.
            BYTE.store(usize::from(unsafe { ((at + 2 * PAGE) as *const u8).read_volatile() }), SeqCst);
        });
        while !p.uffd().wait(1000) {}
        let s = p.state.lock();
        let bytes = [7u8; 4 * PAGE];
        p.all_at_once(true, || {
            for page in [2, 0] {
                // SAFETY: the bytes are readable.
                unsafe { p.copy(&s, vpn + page, bytes.as_ptr() as usize, 2 * PAGE) }.expect("missing pages");
            }
            // The fault is still unread, so only a call can have woken the thread.
            assert_eq!(BYTE.load(SeqCst), 0, "it sleeps");
        });
        waits.join().expect("it is woken");
        assert_eq!(BYTE.load(SeqCst), 7);
        // A page that could not be mapped wakes nobody.
        p.group.faults.set("copy=1/1", 1).unwrap();
        p.all_at_once(true, || {
            // SAFETY: as above.
            unsafe { p.copy(&s, vpn + 4, bytes.as_ptr() as usize, PAGE) }.expect_err("it is to fail");
            assert_eq!((p.wakes.from.load(SeqCst), p.wakes.to.load(SeqCst)), (0, 0));
        });
        p.group.faults.set("copy=0/1", 1).unwrap();
        // Nothing is held any more, and no wake-up is left.
        assert!(!p.wakes.are_held());
        // SAFETY: as above.
        p.all_at_once(false, || unsafe { p.copy(&s, vpn + 4, bytes.as_ptr() as usize, PAGE) }).expect("a missing page");
        assert_eq!((p.wakes.from.load(SeqCst), p.wakes.to.load(SeqCst)), (0, 0));
    }
}

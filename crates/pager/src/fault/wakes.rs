//! Wake-ups kept back while what a fault brings comes in pieces.
//!
//! COPY and MOVE wake who waits for the pages that they map. On its own CPU the woken thread preempts the handler, which is of the idle
//! policy, and soon meets a page that the handler was about to map: it sleeps again, the handler goes on with the next piece, and so
//! on, two thread switches a piece. Where a huge page may come the kernel besides takes one and clears it, for nothing, whenever
//! a thread meets memory of which there is no page table yet (100 µs). So all pieces are mapped first, and who waits is woken once.
//!
//! Invariant: whoever holds wake-ups wakes all, whatever fails meanwhile ([`Pager::all_at_once`]). Owner: the pager's lock.

use crate::frames::arena::PAGE;
use crate::pager::Pager;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// What was mapped without waking anybody.
#[derive(Debug, Default)]
pub struct Wakes {
    held: AtomicBool,
    /// The first page that was mapped, and the one behind the last; equal while there is none.
    from: AtomicU64,
    to: AtomicU64,
}

impl Wakes {
    /// Whether pages that are about to be mapped are to wake nobody yet.
    pub(crate) fn are_held(&self) -> bool {
        self.held.load(Relaxed)
    }

    /// So many pages were mapped quietly.
    ///
    /// The story: those that were tried were woken as well. While an event was unread nothing came, and with each try its thread was
    /// woken, faulted again, and was tried twice: Node.js had 167,000 faults for 17,000.
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
    /// Does what maps pages of one delivery, and wakes who waits for any of them when all are there: if it is `large`, else as they come.
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
            // (Its fault is unread still, so nothing but a call has woken it.)
            assert_eq!(BYTE.load(SeqCst), 0, "it sleeps");
        });
        waits.join().expect("it is woken");
        assert_eq!(BYTE.load(SeqCst), 7);
        // What could not be mapped wakes nobody.
        p.group.faults.set("copy=1/1", 1).unwrap();
        p.all_at_once(true, || {
            // SAFETY: as above.
            unsafe { p.copy(&s, vpn + 4, bytes.as_ptr() as usize, PAGE) }.expect_err("it is to fail");
            assert_eq!((p.wakes.from.load(SeqCst), p.wakes.to.load(SeqCst)), (0, 0));
        });
        p.group.faults.set("copy=0/1", 1).unwrap();
        // Nothing is held any more, and nothing is left to be woken.
        assert!(!p.wakes.are_held());
        // SAFETY: as above.
        p.all_at_once(false, || unsafe { p.copy(&s, vpn + 4, bytes.as_ptr() as usize, PAGE) }).expect("a missing page");
        assert_eq!((p.wakes.from.load(SeqCst), p.wakes.to.load(SeqCst)), (0, 0));
    }
}

//! Soft-dirty and write-protected pages of private memory: a byte for each page, beside the page map, in regions made to track
//! writes.
//!
//! ```text
//! marker            a resident page is      a write
//! plain             writable                -
//! clean (tracked)   write-protected         sets soft-dirty, the page is writable again
//! protected         write-protected         is reported, and waits until the page is unprotected
//! ```
//! The kernel keeps write-protection in the PTE, so it is lost when a page leaves; the markers are what counts. Paging out leaves
//! them alone. A page that comes back and is not plain is *copied* in, write-protected by the same call: MOVE would map it
//! writable, and another thread could write unseen before it is protected.
//!
//! Why no write is missed: bits are cleared and set, and pages protected and brought in, under the pager's lock. Clearing a bit
//! first protects the page. A write before that is to a page whose bit is set, and so is reported; a write after it faults, waits
//! for the lock, and sets the bit again.
//!
//! The markers are written under the pager's lock only. Lock order: that lock, then the queue's.

use crate::frames::arena::PAGE;
use crate::page_state::mapfile::{Kind, MapFile};
use crate::pager::Pager;
use crate::region::SignalsBlocked;
use crate::state::State;
use core::sync::atomic::{AtomicU32, Ordering::*};
use std::collections::VecDeque;
use std::sync::Arc;
use uzswap_mm::pagemap::{PageState, SOFT_DIRTY, WRITE_PROTECTED};
use uzswap_mm::pagetable::Tag;
use uzswap_sys::lock::{self, Lock};
use uzswap_sys::raw::Errno;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Marker {
    /// Nobody tracks writes.
    Plain,
    /// The first write must be noted.
    Clean,
    /// Writes are reported before they are done.
    Protected,
}

/// What to do about a write fault.
pub(crate) enum Write {
    /// Bring the page in.
    Missing,
    /// The page may be written now: repeat the access.
    Allowed,
    /// The thread waits (see [`Marks::wait`]), then repeats its access.
    Waits(u32),
}

/// The markers of a region's pages.
pub struct Marks {
    map: Arc<MapFile>,
    /// Number of the region's first page.
    first: u64,
    /// Protected pages that threads wait to write to, and that the client was not told of yet.
    queue: Lock<VecDeque<u64>>,
    /// Incremented when a page enters the queue (a futex word).
    news: AtomicU32,
    /// Incremented when pages are unprotected (a futex word).
    freed: AtomicU32,
}

impl Marks {
    /// Makes markers for `pages` pages from address `base` on. Nothing is protected, and everything counts as written.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(base: usize, pages: u64) -> Result<Self, Errno> {
        Ok(Self {
            map: Arc::new(MapFile::create(Kind::Markers, base, pages, 0)?),
            first: (base / PAGE) as u64,
            queue: Lock::new(VecDeque::new()),
            news: AtomicU32::new(0),
            freed: AtomicU32::new(0),
        })
    }

    /// The memory object that holds them.
    pub(crate) fn file(&self) -> Arc<MapFile> {
        self.map.clone()
    }

    fn marker(&self, vpn: u64) -> Marker {
        let state = self.map.map().get(vpn - self.first);
        if state.write_protected() {
            Marker::Protected
        } else if self.map.tracking() && !state.soft_dirty() {
            Marker::Clean
        } else {
            Marker::Plain
        }
    }

    fn change(&self, vpn: u64, set: u8, clear: u8) {
        self.map.writer().change(vpn - self.first, set, clear);
    }

    /// Whether a page must be mapped write-protected.
    pub(crate) fn protects(&self, vpn: u64) -> bool {
        self.marker(vpn) != Marker::Plain
    }

    /// How many of the `n` pages from `vpn` on are mapped alike, and whether that is write-protected.
    fn alike(&self, vpn: u64, n: usize) -> (usize, bool) {
        let first = self.protects(vpn);
        ((1..n).find(|i| self.protects(vpn + *i as u64) != first).unwrap_or(n), first)
    }

    /// In the thread that wants to write: waits until pages are unprotected after `seen`.
    pub(crate) fn wait(&self, seen: u32) {
        lock::futex_wait(&self.freed, seen, None, false);
    }

    /// The address of the next page that a thread waits to write to; None if none came within `timeout_ns`.
    ///
    /// The story: a signal came while this thread held the queue's lock, and its handler touched the region, for which it needed
    /// the pager's. A writer held that one and waited for the queue's, so all threads hung.
    pub(crate) fn next_write(&self, timeout_ns: u64) -> Option<usize> {
        let end = uzswap_sys::thread::now_ns().saturating_add(timeout_ns);
        loop {
            let seen = self.news.load(Acquire);
            if let Some(vpn) = self.pop() {
                return Some(vpn as usize * PAGE);
            }
            let left = end.saturating_sub(uzswap_sys::thread::now_ns());
            if left == 0 {
                return None;
            }
            lock::futex_wait(&self.news, seen, Some(left), false);
        }
    }

    fn pop(&self) -> Option<u64> {
        let _quiet = SignalsBlocked::new();
        self.queue.lock().pop_front()
    }
}

/// The pages of `[from, to)` about which anything is known: untouched ones are not looked at, as a region may have billions.
fn known(s: &State, from: u64, to: u64) -> impl Iterator<Item = u64> {
    let next = move |from: u64| s.pt.next_used(from).filter(|vpn| *vpn < to);
    core::iter::successors(next(from), move |vpn| next(vpn + 1)).filter(|vpn| s.pt.get(*vpn).tag() != Tag::None)
}

impl Pager {
    /// Notes a write to a page, if its marker asks for it.
    pub(crate) fn note_write(&self, s: &mut State, marks: &Marks, vpn: u64) -> Write {
        let resident = s.pt.get(vpn).tag() == Tag::Resident;
        match marks.marker(vpn) {
            Marker::Plain => return Write::Missing,
            Marker::Clean => marks.change(vpn, SOFT_DIRTY, 0),
            Marker::Protected if resident => {
                let seen = marks.freed.load(Acquire);
                let mut queue = marks.queue.lock();
                if !queue.contains(&vpn) {
                    queue.push_back(vpn);
                }
                drop(queue);
                marks.news.fetch_add(1, Release);
                lock::futex_wake(&marks.news, u32::MAX >> 1, false);
                return Write::Waits(seen);
            }
            // The page comes in protected, and the access is repeated.
            Marker::Protected => return Write::Missing,
        }
        // A missing page comes in writable now. If the kernel does not unprotect a resident one, the access faults again.
        match resident {
            true => {
                let _ = self.write_protect(vpn, vpn + 1, false);
                Write::Allowed
            }
            false => Write::Missing,
        }
    }

    fn write_protect(&self, from: u64, to: u64, protect: bool) -> Result<(), Errno> {
        loop {
            match self.uffd().write_protect(from as usize * PAGE, (to - from) as usize * PAGE, protect) {
                Err(libc::EAGAIN) => core::hint::spin_loop(),
                result => return result,
            }
        }
    }

    /// Clears the soft-dirty bits of `[from, to)`. Returns the pages whose bit was set, counted from the region's first.
    ///
    /// # Errors
    /// The kernel's; no bit has changed.
    pub(crate) fn take_soft_dirty(&self, marks: &Marks, from: u64, to: u64) -> Result<Vec<u64>, Errno> {
        let s = self.state.lock();
        self.write_protect(from, to, true)?;
        let map = marks.map.writer();
        if !marks.map.tracking() {
            // Until now everything counted as written. (A page that nobody has touched was not written, and is noted when it is.)
            known(&s, marks.first, marks.first + map.pages()).for_each(|vpn| marks.change(vpn, SOFT_DIRTY, 0));
            marks.map.set_tracking(true);
        }
        let pages = known(&s, from, to).map(|vpn| vpn - marks.first);
        let dirty: Vec<u64> = pages.filter(|page| map.get(*page).soft_dirty()).collect();
        dirty.iter().for_each(|page| map.change(*page, 0, SOFT_DIRTY));
        Ok(dirty)
    }

    /// Write-protects `[from, to)`: threads that write there wait.
    ///
    /// # Errors
    /// The kernel's; pages that are resident may then be writable.
    pub(crate) fn protect(&self, marks: &Marks, from: u64, to: u64) -> Result<(), Errno> {
        let _s = self.state.lock();
        // The marker comes first: a write that faults from now on is reported.
        (from..to).for_each(|vpn| marks.change(vpn, WRITE_PROTECTED, 0));
        self.write_protect(from, to, true)
    }

    /// Ends write-protection and lets the writers go on.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn unprotect(&self, marks: &Marks, from: u64, to: u64) -> Result<(), Errno> {
        let _s = self.state.lock();
        self.set_free(marks, from, to, |state| PageState(state.0 & !WRITE_PROTECTED))
    }

    /// Drops the markers of `[from, to)`, whose contents are dropped. The caller holds the lock.
    pub(crate) fn forget_marks(&self, from: u64, to: u64) {
        if let Some(marks) = &self.marks {
            let _ = self.set_free(marks, from, to, |_| PageState(0));
        }
    }

    fn set_free(
        &self,
        marks: &Marks,
        from: u64,
        to: u64,
        change: impl Fn(PageState) -> PageState,
    ) -> Result<(), Errno> {
        let map = marks.map.writer();
        let mut result = Ok(());
        // Pages without a marker are as they shall be.
        for (start, end) in marks.map.written_within(from - marks.first, to - marks.first) {
            for page in start..end {
                let (old, new) = (map.get(page), change(map.get(page)));
                if old != new {
                    map.set(page, new);
                }
            }
            let (mut at, end) = (marks.first + start, marks.first + end);
            while at < end {
                let (n, protect) = marks.alike(at, (end - at) as usize);
                if !protect {
                    result = result.and(self.write_protect(at, at + n as u64, false));
                }
                at += n as u64;
            }
        }
        marks.queue.lock().retain(|vpn| !(from..to).contains(vpn));
        marks.freed.fetch_add(1, Release);
        lock::futex_wake(&marks.freed, u32::MAX >> 1, false);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    /// Whether a thread has SIGUSR1 blocked.
    fn blocks(tid: i32) -> bool {
        let status = std::fs::read_to_string(format!("/proc/self/task/{tid}/status")).unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
        mask.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).unwrap() & 1 << (libc::SIGUSR1 - 1) != 0)
    }

    /// See [`Marks::next_write`].
    #[test]
    fn who_takes_from_the_queue_is_not_interrupted() {
        let marks = Marks::new(0, 16).unwrap();
        std::thread::scope(|scope| {
            let mut queue = marks.queue.lock();
            let (say, hear) = std::sync::mpsc::channel();
            let marks = &marks;
            let taker = scope.spawn(move || {
                say.send(uzswap_sys::thread::gettid()).unwrap();
                let page = marks.next_write(u64::MAX);
                (page, blocks(uzswap_sys::thread::gettid()))
            });
            let (taker_id, began) = (hear.recv().unwrap(), Instant::now());
            let mut blocked = false;
            while !blocked && began.elapsed() < Duration::from_secs(20) {
                blocked = blocks(taker_id);
                std::thread::yield_now();
            }
            queue.push_back(3);
            drop(queue);
            assert_eq!(taker.join().unwrap(), (Some(3 * PAGE), false));
            assert!(blocked, "it waits for the queue, and has it then, with signals that it may be sent");
        });
    }
}

//! The gate: keeps everybody from punching holes in the memory object, by holding the object's kernel lock.
//!
//! `fallocate` and `madvise(MADV_REMOVE)` hold the kernel's lock of the object (its inode's) from the first page they drop to the
//! last, and so does `pwrite`. User space cannot take that lock by name. But a write from a buffer that is missing under a
//! userfaultfd of our own takes the lock, and then waits in the copy until we fill the buffer:
//!
//! ```text
//! owner (engine's lock)      gate's thread                      a client
//! close: ask ──────────────▶ pwrite(object, buffer): lock
//!   ◀──────── fault ──────── waits in the copy                  madvise(REMOVE): waits for the lock
//! ... the gate is closed: no page leaves the object ...
//! open: fill the buffer ───▶ goes on: unlock ─────────────────▶ goes on
//! ```
//! While the gate is closed the owner must not write to, populate or punch the object itself, nor seek in it: it would wait for
//! itself. It asks whether a page is there, and fills a missing one, through a registered mapping of its own, which takes no lock
//! of the object ([`Gate::holds`], [`Gate::fill`]). The owner makes all its own writes and punches under the engine's lock, and
//! so everything between `close` and `open`; hence they never meet. The gate's thread takes no lock of ours. It can wait only for
//! a punch that is under way, which waits for nobody.

use super::owner::spawn;
use crate::frames::arena::{self, PAGE};
use std::cell::Cell;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use uzswap_sys::raw::Errno;
use uzswap_sys::uffd::Uffd;
use uzswap_sys::uffd_shared::{FEATURES_SHARED, SharedMessage};
use uzswap_sys::{eventfd, memfd, sys};

/// How often a question is repeated while a page table is being changed.
const BUSY_TRIES: usize = 1000;

/// State of the gate's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Thread {
    /// Waits for a request.
    Rests,
    /// Waits in the copy: the gate is closed.
    Copies,
    /// Was let go; its `done` was not taken yet.
    Leaves,
}

/// The gate of an object. Owner: the engine's lock.
pub(super) struct Gate {
    /// A userfaultfd of the owner's, which serves the kernel's faults.
    uffd: OwnedFd,
    /// The registered mapping of the object, and its length in bytes.
    base: usize,
    len: usize,
    /// A registered page that is missing while the gate is closed.
    buffer: usize,
    /// Tells the thread to write.
    ask: Sender<()>,
    /// Readable when the thread has written, or could not.
    done: Arc<OwnedFd>,
    thread: Thread,
    /// For tests: this many of the next closings fail.
    pub failing: u64,
    /// For tests: which of the next questions and fillings through it are refused (bit 0: the next one).
    pub refusing: Cell<u64>,
}

impl Gate {
    /// A gate for an object whose last page, at byte `spare`, nobody uses.
    ///
    /// # Errors
    /// `EPERM`: the kernel's own faults may not be served by this process. The kernel's.
    pub fn new(object: &OwnedFd, spare: u64) -> Result<Self, Errno> {
        let errno = |e: std::io::Error| super::owner::errno_of(&e);
        let (uffd, _) = Uffd::open(FEATURES_SHARED)?;
        // SAFETY: just made, and owned by nobody.
        let uffd = unsafe { OwnedFd::from_raw_fd(uffd.fd()) };
        // SAFETY: as above.
        let done = Arc::new(unsafe { OwnedFd::from_raw_fd(eventfd::create()?) });
        let file = File::from(object.try_clone().map_err(errno)?);
        // The page exists from the beginning, so the write needs no memory.
        memfd::populate(object, spare, PAGE as u64).map_err(errno)?;
        let len = spare as usize + PAGE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new mappings, and advice on them. (Nothing fills them before they are registered: see `arena::open`.)
        let (base, buffer) = unsafe {
            let base = memfd::map(object, len, libc::PROT_NONE, None).map_err(errno)?;
            let buffer = sys!(libc::SYS_mmap, 0, PAGE, libc::PROT_NONE, flags, -1isize, 0);
            for (at, len) in [(base, len)].into_iter().chain(buffer.map(|b| (b, PAGE))) {
                let _ = sys!(libc::SYS_madvise, at, len, libc::MADV_DONTFORK);
                let _ = sys!(libc::SYS_madvise, at, len, libc::MADV_NOHUGEPAGE);
            }
            (base, buffer)
        };
        let (ask, asked) = channel();
        let gate = Self {
            uffd,
            base,
            len,
            buffer: buffer.unwrap_or(0),
            ask,
            done,
            thread: Thread::Rests,
            failing: 0,
            refusing: Cell::new(0),
        };
        buffer?;
        gate.uffd().register_shared(base, len)?;
        gate.uffd().register(gate.buffer, PAGE)?;
        arena::open(base, len)?;
        arena::open(gate.buffer, PAGE)?;
        let (done, buffer) = (gate.done.clone(), gate.buffer);
        spawn("uzswap-gate", move || work(&asked, &file, spare, buffer, &done)).map_err(errno)?;
        Ok(gate)
    }

    fn uffd(&self) -> Uffd {
        Uffd::from_raw(self.uffd.as_raw_fd())
    }

    /// Closes the gate. After success nobody can punch a hole until [`Gate::open`].
    ///
    /// # Errors
    /// The kernel refuses the write; the gate is open.
    pub fn close(&mut self) -> Result<(), Errno> {
        if self.failing > 0 {
            self.failing -= 1;
            return Err(libc::EIO);
        }
        self.finish();
        // SAFETY: our page, which nobody uses now.
        unsafe { sys!(libc::SYS_madvise, self.buffer, PAGE, libc::MADV_DONTNEED) }?;
        self.ask.send(()).map_err(|_| libc::EIO)?;
        loop {
            if self.wait_done(true) {
                return Err(libc::EIO);
            }
            if let Ok(Some(SharedMessage::Fault { fault, .. })) = self.uffd().read_shared()
                && fault.address == self.buffer
            {
                self.thread = Thread::Copies;
                return Ok(());
            }
        }
    }

    /// Waits until the thread, if it was let go, has left the buffer.
    fn finish(&mut self) {
        if self.thread == Thread::Leaves {
            self.wait_done(false);
            self.thread = Thread::Rests;
        }
    }

    /// Waits until the thread has written, or (`or_fault`) waits in the copy. Returns whether it has written.
    fn wait_done(&self, or_fault: bool) -> bool {
        loop {
            let mut polls = [&*self.done, &self.uffd].map(|fd| libc::pollfd {
                fd: fd.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            });
            // SAFETY: pollfds of ours, as many as said.
            let _ = unsafe { sys!(libc::SYS_poll, polls.as_mut_ptr(), if or_fault { 2 } else { 1 }, -1isize) };
            if polls[0].revents != 0 && eventfd::take(self.done.as_raw_fd()) {
                return true;
            }
            if or_fault && polls[1].revents != 0 {
                return false;
            }
        }
    }

    /// Opens the gate again.
    pub fn open(&mut self) {
        self.thread = Thread::Leaves;
        while let Err((_, errno)) = self.uffd().zero(self.buffer, PAGE) {
            if errno == libc::EEXIST {
                self.uffd().wake(self.buffer, PAGE);
                return;
            }
            // There is no memory for a page table. There will be sooner or later, as the kernel kills to get some.
            std::thread::yield_now();
        }
    }

    fn at(&self, page: u64) -> usize {
        let at = self.base + page as usize * PAGE;
        assert!(at < self.base + self.len, "a page beyond the object");
        at
    }

    /// Whether the object has a page; certain only while the gate is closed.
    ///
    /// # Errors
    /// The kernel could not tell.
    pub fn holds(&self, page: u64) -> Result<bool, Errno> {
        self.refused()?;
        while_busy(|| self.uffd().is_held(self.at(page)))
    }

    /// Gives the object a page that it does not have. If it has the page, returns false and changes nothing.
    ///
    /// # Errors
    /// No memory.
    pub fn fill(&self, page: u64, bytes: &[u8]) -> Result<bool, Errno> {
        assert_eq!(bytes.len(), PAGE, "whole pages only");
        self.refused()?;
        // SAFETY: the source is a slice of that length.
        while_busy(|| match unsafe { self.uffd().copy(self.at(page), bytes.as_ptr() as usize, PAGE) } {
            Ok(()) => Ok(true),
            Err((_, libc::EEXIST)) => Ok(false),
            Err((_, errno)) => Err(errno),
        })
    }

    /// For tests: the kernel has no memory for the current question.
    fn refused(&self) -> Result<(), Errno> {
        let coming = self.refusing.get();
        self.refusing.set(coming >> 1);
        if coming & 1 == 0 { Ok(()) } else { Err(libc::ENOMEM) }
    }

    /// Which of the pages `[from, to)` the object surely has; waits for nobody. (It misses pages that the kernel has swapped out,
    /// or that were populated and never used: ask [`Gate::holds`] for them.)
    pub fn surely_has(&self, from: u64, to: u64) -> Vec<bool> {
        let mut bytes = vec![0u8; (to - from) as usize];
        let len = bytes.len() * PAGE;
        // SAFETY: a byte for each page of our mapping.
        let told = unsafe { sys!(libc::SYS_mincore, self.at(from), len, bytes.as_mut_ptr()) };
        bytes.into_iter().map(|b| told.is_ok() && b & 1 != 0).collect()
    }
}

/// Asks again while the kernel answers `EAGAIN`. The gate's descriptor asks for no events, so that means only that a page table
/// is just being changed.
fn while_busy(ask: impl Fn() -> Result<bool, Errno>) -> Result<bool, Errno> {
    let mut answer = ask();
    for _ in 0..BUSY_TRIES {
        if answer != Err(libc::EAGAIN) {
            break;
        }
        std::thread::yield_now();
        answer = ask();
    }
    answer
}

fn work(asked: &Receiver<()>, object: &File, spare: u64, buffer: usize, done: &OwnedFd) {
    // The thread ends with the gate, which has the other end.
    while let Ok(()) = asked.recv() {
        // By a raw system call: the buffer is missing memory, to which no reference may be formed.
        // SAFETY: reads one byte of a mapping that is the gate's, whichever it is.
        let _ = unsafe { sys!(libc::SYS_pwrite64, object.as_raw_fd(), buffer, 1, spare) };
        eventfd::raise(done.as_raw_fd());
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // Otherwise a later fault of the thread there might meet another mapping, such as the next gate's buffer.
        if self.thread == Thread::Copies {
            self.open();
        }
        self.finish();
        // SAFETY: our mappings, which nobody uses any more.
        unsafe {
            let _ = sys!(libc::SYS_munmap, self.base, self.len);
            let _ = sys!(libc::SYS_munmap, self.buffer, PAGE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::{AtomicBool, Ordering::*};

    fn object() -> (OwnedFd, Gate) {
        let object = memfd::create(c"uzswap-test", 9 * PAGE as u64).unwrap();
        let gate = Gate::new(&object, 8 * PAGE as u64).expect("this test needs a userfaultfd for the kernel's faults");
        (object, gate)
    }

    #[test]
    fn nobody_punches_while_it_is_closed() {
        let (object, mut gate) = object();
        memfd::populate(&object, 0, 8 * PAGE as u64).unwrap();
        // A page that was only populated is no data yet to those who look without the gate; it is from the first question through
        // the gate on.
        assert!(!memfd::has(&object, 0).unwrap() && !gate.surely_has(0, 8).into_iter().any(|has| has));
        assert!((0..8).all(|page| gate.holds(page).unwrap() && memfd::has(&object, page * PAGE as u64).unwrap()));
        for round in 0..200u64 {
            let (page, gone) = (round % 8, AtomicBool::new(false));
            gate.close().unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    memfd::punch(&object, page * PAGE as u64, PAGE as u64).unwrap();
                    gone.store(true, SeqCst);
                });
                (0..100).for_each(|_| {
                    std::thread::yield_now();
                    assert!(gate.holds(page).unwrap() && !gone.load(SeqCst), "round {round}");
                });
                gate.open();
            });
            assert!(!gate.holds(page).unwrap() && !memfd::has(&object, page * PAGE as u64).unwrap());
            assert!(gate.fill(page, &[7; PAGE]).unwrap() && !gate.fill(page, &[8; PAGE]).unwrap());
            assert!(gate.surely_has(0, 8).into_iter().all(|has| has));
            assert!(memfd::has(&object, page * PAGE as u64).unwrap());
        }
    }

    #[test]
    fn a_page_filled_while_it_is_closed_is_the_objects() {
        let (object, mut gate) = object();
        gate.close().unwrap();
        assert!(!gate.holds(3).unwrap() && gate.fill(3, &[9; PAGE]).unwrap() && gate.holds(3).unwrap());
        gate.open();
        let mut bytes = vec![0; PAGE];
        File::from(object).read_exact_at(&mut bytes, 3 * PAGE as u64).unwrap();
        assert!(bytes.iter().all(|b| *b == 9));
        assert_eq!(gate.surely_has(0, 8), [false, false, false, true, false, false, false, false]);
    }

    #[test]
    fn where_the_write_is_refused_it_is_open() {
        let (object, mut gate) = object();
        memfd::seal(&object, libc::F_SEAL_FUTURE_WRITE).unwrap();
        assert_eq!(gate.close(), Err(libc::EIO));
        gate.failing = 1;
        assert_eq!((gate.close(), gate.failing), (Err(libc::EIO), 0));
    }

    /// The story: a gate was dropped while its thread was about to read the buffer again, and the next gate's buffer came to lie
    /// at that address. The thread's fault there was taken for one of the new gate's thread, so that gate was believed to be
    /// closed, and was open.
    #[test]
    fn the_thread_of_one_that_is_gone_is_not_taken_for_anothers() {
        for round in 0..1000 {
            let (_object, mut gate) = object();
            gate.close().unwrap();
            if round % 2 == 0 {
                gate.open();
            }
            drop(gate);
            let (object, mut gate) = self::object();
            memfd::seal(&object, libc::F_SEAL_FUTURE_WRITE).unwrap();
            assert_eq!(gate.close(), Err(libc::EIO), "round {round}");
        }
    }

    #[test]
    fn what_is_to_be_refused_is_and_changes_nothing() {
        let (_object, gate) = object();
        gate.refusing.set(0b1101);
        assert_eq!((gate.fill(3, &[9; PAGE]), gate.holds(3)), (Err(libc::ENOMEM), Ok(false)));
        assert_eq!((gate.holds(3), gate.fill(3, &[9; PAGE])), (Err(libc::ENOMEM), Err(libc::ENOMEM)));
        assert_eq!((gate.holds(3), gate.fill(3, &[9; PAGE]), gate.holds(3)), (Ok(false), Ok(true), Ok(true)));
    }
}

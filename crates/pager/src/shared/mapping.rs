//! One attached mapping, as the owner sees it.
//!
//! `mapped` may say too much (a page whose PTE the kernel has dropped) but never too little: a page not marked there cannot be
//! written through this mapping. Eviction relies on that.

use super::engine::Engine;
use crate::frames::arena::PAGE;
use crate::page_state::mapfile::MapFile;
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use uzswap_mm::pagemap::{PageState, SOFT_DIRTY, WRITE_PROTECTED};
use uzswap_sys::uffd::{Partial, Uffd};
use uzswap_sys::uffd_shared::SharedFault;

/// A set of pages.
pub(super) struct Pages(Vec<u64>);

impl Pages {
    /// The empty set, with room for so many pages.
    pub fn new(pages: u64) -> Self {
        Self(vec![0; pages.div_ceil(64) as usize])
    }
    pub fn has(&self, page: u64) -> bool {
        self.0[(page / 64) as usize] & (1 << (page % 64)) != 0
    }
    /// Adds a page, or removes it.
    pub fn put(&mut self, page: u64, is: bool) {
        let (word, bit) = (&mut self.0[(page / 64) as usize], 1 << (page % 64));
        if is { *word |= bit } else { *word &= !bit }
    }
    /// Removes all pages.
    pub fn clear(&mut self) {
        self.0.fill(0);
    }
    /// Bytes that the set takes.
    pub fn bytes(&self) -> usize {
        self.0.len() * 8
    }
}

/// An attached mapping. Owner: the engine's lock.
pub(super) struct Mapping {
    /// The mapping's number, never used twice.
    pub id: u64,
    /// The userfaultfd of its faults.
    pub uffd: Arc<OwnedFd>,
    /// The socket to its watcher.
    pub watch: OwnedFd,
    /// Address of its first byte in its process.
    pub base: usize,
    /// Pages that may have a PTE.
    pub mapped: Pages,
    /// Pages mapped since the last round of ageing: a hint.
    pub seen: Pages,
    /// The mapping's own bits, published.
    pub markers: MapFile,
    /// The last round of ageing that its watcher has completed.
    pub aged: u32,
    /// Where recent faults ended: a fault at one of these pages is sequential.
    pub streams: [(u64, u8); 8],
    /// Index of the entry of `streams` to reuse next.
    pub stream_next: usize,
    /// Pages whose touches raise an error, and some that once did and that the kernel has forgotten.
    pub poisoned: BTreeSet<u64>,
    /// The process is gone (`ESRCH`).
    pub dead: bool,
    /// Faults that another thread read, for the mapping's own thread.
    pub kept: VecDeque<SharedFault>,
    /// Faults that could not be served yet, oldest first, and the one being served. (Not those answered meanwhile: see
    /// [`Mapping::answered`].)
    pub later: VecDeque<SharedFault>,
    /// Wakes put off until the lock is released, as addresses and bytes, while a thread serves that must do so: see `near`.
    pub put_off: Option<Vec<(usize, usize)>>,
    /// The thread whose fault was read last, and how far it is the only one that faults.
    faulter: u32,
    lone: u32,
    /// Readable when the mapping's own thread has something to do.
    pub kick: Arc<OwnedFd>,
}

/// After this many faults in succession a thread counts as the only one that faults; each fault of another thread subtracts
/// [`OTHERS`].
const LONE: u32 = 64;
const OTHERS: u32 = 16;

/// What a mapping's marker asks for when its page is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marker {
    /// Nothing.
    Plain,
    /// Note the first write.
    Track,
    /// Report writes to the client that asked for it.
    Notify,
    /// Not one of our markers: the process gets SIGBUS.
    Unknown,
}

impl Mapping {
    /// A mapping at `base` of another process, with that process's userfaultfd. Fails if no eventfd can be made.
    pub fn new(
        id: u64,
        uffd: OwnedFd,
        watch: OwnedFd,
        base: usize,
        markers: MapFile,
        engine: &Engine,
    ) -> io::Result<Self> {
        let pages = engine.pages;
        let kick = uzswap_sys::eventfd::create().map_err(io::Error::from_raw_os_error)?;
        // SAFETY: just made, and owned by nobody.
        let kick = unsafe { OwnedFd::from_raw_fd(kick) };
        Ok(Self {
            id,
            uffd: Arc::new(uffd),
            watch,
            base,
            mapped: Pages::new(pages),
            seen: Pages::new(pages),
            markers,
            aged: engine.round,
            streams: [(u64::MAX, 0); 8],
            stream_next: 0,
            poisoned: BTreeSet::new(),
            dead: false,
            kept: VecDeque::new(),
            later: VecDeque::new(),
            put_off: None,
            faulter: 0,
            lone: 0,
            kick: Arc::new(kick),
        })
    }

    /// The mapping's userfaultfd.
    pub fn uffd(&self) -> Uffd {
        Uffd::from_raw(self.uffd.as_raw_fd())
    }

    pub fn address(&self, page: u64) -> usize {
        self.base + page as usize * PAGE
    }

    /// The marker of a page.
    pub fn marker(&self, page: u64) -> Marker {
        let PageState(byte) = self.markers.map().get(page);
        if byte & !(SOFT_DIRTY | WRITE_PROTECTED) != 0 {
            Marker::Unknown
        } else if byte & WRITE_PROTECTED != 0 {
            Marker::Notify
        } else if byte & SOFT_DIRTY == 0 && self.markers.tracking() {
            Marker::Track
        } else {
            Marker::Plain
        }
    }

    /// Marks a page as written.
    pub fn note_write(&self, page: u64) {
        if self.markers.tracking() {
            self.markers.writer().change(page, SOFT_DIRTY, 0);
        }
    }

    /// Write-protects the pages of `[from, to)` that have a PTE here.
    ///
    /// # Errors
    /// `EAGAIN`, `ESRCH`: as [`Engine::ask`] expects them. The kernel's: only a part was done.
    pub fn protect_mapped(&self, from: u64, to: u64) -> Result<(), i32> {
        let mut at = from;
        while at < to {
            if !self.mapped.has(at) {
                at += 1;
                continue;
            }
            let end = (at..to).find(|p| !self.mapped.has(*p)).unwrap_or(to);
            self.protect_run(at, end)?;
            at = end;
        }
        Ok(())
    }

    fn protect_run(&self, from: u64, to: u64) -> Result<(), i32> {
        match self.uffd().write_protect(self.address(from), (to - from) as usize * PAGE, true) {
            // The program has unmapped a part, or put something else there: go page by page. Memory that is not registered has no
            // PTE of this mapping.
            Err(libc::ENOENT) if to - from > 1 => (from..to).try_for_each(|p| self.protect_run(p, p + 1)),
            Err(libc::ENOENT) => Ok(()),
            other => other,
        }
    }

    /// Ends a page's write-protection; wakes nobody.
    ///
    /// # Errors
    /// As [`Mapping::protect_mapped`].
    pub fn unprotect(&self, page: u64) -> Result<(), i32> {
        self.uffd().unprotect_quietly(self.address(page), PAGE)
    }

    /// Maps pages that the object holds, write-protected or not, and wakes the threads that wait for them.
    ///
    /// # Errors
    /// As [`Uffd::continue_pages`].
    pub fn map(&mut self, from: u64, to: u64, protect: bool) -> Result<(), Partial> {
        let (at, len) = (self.address(from), (to - from) as usize * PAGE);
        let mapped = self.uffd().continue_pages(at, len, protect, self.put_off.is_none());
        let done = mapped.map_or_else(|(done, _)| done, |()| len);
        if done > 0 {
            self.answered(from, from + (done / PAGE) as u64);
            self.put_off.iter_mut().for_each(|wakes| wakes.push((at, done)));
        }
        mapped
    }

    /// Wakes threads that wait for pages `[from, to)`.
    pub fn wake(&mut self, from: u64, to: u64) {
        self.answered(from, to);
        let (at, len) = (self.address(from), (to - from) as usize * PAGE);
        match &mut self.put_off {
            Some(wakes) => wakes.push((at, len)),
            None => self.uffd().wake(at, len),
        }
    }

    /// Notes that a fault of thread `tid` was read.
    pub fn faulted_by(&mut self, tid: u32) {
        let same = core::mem::replace(&mut self.faulter, tid) == tid;
        self.lone = if same { (self.lone + 1).min(LONE) } else { self.lone.saturating_sub(OTHERS) };
    }

    /// The faulting thread, if it has been the only one for some time.
    pub fn lone_faulter(&self) -> Option<u32> {
        (self.lone == LONE).then_some(self.faulter)
    }

    /// Whether other threads fault so often that there is no lone faulting thread any more.
    pub fn many_fault(&self) -> bool {
        self.lone < LONE / 2
    }

    /// Threads that waited for pages `[from, to)` go on, and fault again if that is not enough. So drops their faults that were
    /// read but not yet served. (If one were served later, a page removed in between would be made again, though nobody has
    /// touched it.)
    pub fn answered(&mut self, from: u64, to: u64) {
        let (from, to) = (self.address(from), self.address(to));
        for faults in [&mut self.kept, &mut self.later] {
            faults.retain(|fault| !(from..to).contains(&fault.address));
        }
    }

    /// Makes every touch of the page at an address raise SIGBUS in this process; wakes no thread.
    ///
    /// # Errors
    /// As [`Mapping::protect_mapped`]. `EBUSY`: a page is mapped there, as far as is known.
    pub fn poison(&self, address: usize) -> Result<(), i32> {
        let page = (address - self.base) as u64 / PAGE as u64;
        match self.uffd().poison(address, PAGE) {
            // The write-protection is not ours to end then. (The page behind the region has no such mark.)
            Err((_, libc::EEXIST)) if page < self.markers.pages() && self.mapped.has(page) => Err(libc::EBUSY),
            Err((_, libc::EEXIST)) => {
                // The kernel left a write-protection marker in the PTE; ending the protection removes it.
                self.uffd().write_protect(address, PAGE, false)?;
                self.uffd().poison(address, PAGE).map_err(|(_, errno)| errno)
            }
            other => other.map_err(|(_, errno)| errno),
        }
    }

    /// Replaces an error by a page that the object holds, write-protected; wakes no thread.
    ///
    /// # Errors
    /// As [`Mapping::protect_mapped`].
    pub fn replace_error(&self, page: u64) -> Result<(), i32> {
        match self.uffd().continue_pages(self.address(page), PAGE, true, false) {
            // The error is gone already, and a page is mapped there.
            Ok(()) | Err((_, libc::EEXIST)) => Ok(()),
            Err((_, errno)) => Err(errno),
        }
    }

    /// Whether the process is there. (Probing by protecting a page costs a fault at worst; ending its protection could lose a
    /// write.)
    pub fn is_alive(&self) -> bool {
        self.uffd().write_protect(self.base, PAGE, true) != Err(libc::ESRCH)
    }

    /// Bytes of the mapping's tables.
    pub fn metadata_bytes(&self) -> usize {
        self.mapped.bytes() + self.seen.bytes() + self.markers.metadata_bytes() + self.poisoned.len() * 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page_state::mapfile::Kind;
    use crate::shared::SharedOptions;
    use uzswap_sys::eventfd;

    fn fault(page: usize) -> SharedFault {
        SharedFault { address: (100 + page) * PAGE, write: false, protected: false }
    }

    fn mapping(engine: &Engine) -> Mapping {
        // SAFETY: just made, and owned by nobody.
        let fd = || unsafe { OwnedFd::from_raw_fd(eventfd::create().unwrap()) };
        let markers = MapFile::create(Kind::Markers, 100 * PAGE, 16, 0).unwrap();
        Mapping::new(1, fd(), fd(), 100 * PAGE, markers, engine).unwrap()
    }

    #[test]
    fn who_was_woken_is_not_served_for_an_earlier_fault() {
        let mut engine = Engine::new(16 * PAGE, SharedOptions::new(16 << 20)).unwrap();
        let mut m = mapping(&engine);
        m.later.extend([0, 3, 4, 5, 16, 3].map(fault));
        m.kept.extend([2, 5].map(fault));
        m.wake(3, 5);
        assert_eq!((&m.later, &m.kept), (&[0, 5, 16].map(fault).into(), &[2, 5].map(fault).into()));
        engine.mappings.push(m);
        engine.emptied(4, 6);
        let m = &engine.mappings[0];
        assert_eq!((&m.later, &m.kept), (&[0, 16].map(fault).into(), &[2].map(fault).into()));
    }

    #[test]
    fn a_fault_of_another_thread_now_and_then_makes_nobody_one_of_many() {
        let mut m = mapping(&Engine::new(16 * PAGE, SharedOptions::new(16 << 20)).unwrap());
        (0..LONE).for_each(|_| m.faulted_by(7));
        assert_eq!((m.lone_faulter(), m.many_fault()), (None, false), "the first was another's than the one before");
        m.faulted_by(7);
        assert_eq!(m.lone_faulter(), Some(7));
        for _ in 0..10 {
            m.faulted_by(8);
            assert_eq!((m.lone_faulter(), m.many_fault()), (None, false));
            (0..=2 * OTHERS).for_each(|_| m.faulted_by(7));
            assert_eq!(m.lone_faulter(), Some(7));
        }
        (0..2).for_each(|_| m.faulted_by(8));
        (0..9).for_each(|i| m.faulted_by(7 + i % 2));
        assert!(m.many_fault());
    }
}

//! One attached mapping, as the owner sees it.
//!
//! `mapped` may say too much (a page whose PTE the kernel has dropped) but never too little: a page that is not marked
//! there cannot be written through this mapping. That is what eviction relies on.

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
    /// None of so many pages.
    pub fn new(pages: u64) -> Self {
        Self(vec![0; pages.div_ceil(64) as usize])
    }
    /// Whether a page is in it.
    pub fn has(&self, page: u64) -> bool {
        self.0[(page / 64) as usize] & (1 << (page % 64)) != 0
    }
    /// Puts a page in, or takes it out.
    pub fn put(&mut self, page: u64, is: bool) {
        let (word, bit) = (&mut self.0[(page / 64) as usize], 1 << (page % 64));
        if is { *word |= bit } else { *word &= !bit }
    }
    /// Takes all out.
    pub fn clear(&mut self) {
        self.0.fill(0);
    }
    /// What it takes itself.
    pub fn bytes(&self) -> usize {
        self.0.len() * 8
    }
}

/// An attached mapping. Owner: the engine's lock.
pub(super) struct Mapping {
    /// Its number, never used twice.
    pub id: u64,
    /// Its faults.
    pub uffd: Arc<OwnedFd>,
    /// To its watcher.
    pub watch: OwnedFd,
    /// Its first byte, in its process.
    pub base: usize,
    /// Pages that may have a PTE.
    pub mapped: Pages,
    /// Pages that were mapped since the last round of ageing: a hint.
    pub seen: Pages,
    /// The bits that are its own, published.
    pub markers: MapFile,
    /// The last round of ageing that its watcher has done.
    pub aged: u32,
    /// Recent ends of faults: a fault at one of them is sequential.
    pub streams: [(u64, u8); 8],
    /// Next of `streams` to reuse.
    pub stream_next: usize,
    /// Pages, touches of which are made an error; and some that were, where the kernel has forgotten it.
    pub poisoned: BTreeSet<u64>,
    /// The process is gone (`ESRCH`).
    pub dead: bool,
    /// Faults that somebody else read, for the mapping's own thread.
    pub kept: VecDeque<SharedFault>,
    /// Faults that could not be served yet, oldest first, and the one that is being served. (Not those that were answered meanwhile: see
    /// [`Mapping::answered`].)
    pub later: VecDeque<SharedFault>,
    /// Wakes put off until the lock is given up, in addresses and bytes, while somebody serves for whom that is right: see `near`.
    pub put_off: Option<Vec<(usize, usize)>>,
    /// The thread whose fault was read last, and how much it is the only one that faults.
    faulter: u32,
    lone: u32,
    /// Readable when there is something for the mapping's own thread to do.
    pub kick: Arc<OwnedFd>,
}

/// A thread is taken to be the only one that faults from so many faults of its own in succession on; one of another thread's takes
/// [`OTHERS`] off.
const LONE: u32 = 64;
const OTHERS: u32 = 16;

/// What a mapping's marker asks for when its page is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marker {
    /// Nothing.
    Plain,
    /// The first write is noted.
    Track,
    /// Writes are told to the one who asked.
    Notify,
    /// It is none of ours: the process gets SIGBUS.
    Unknown,
}

impl Mapping {
    /// A mapping at `base` of another process, whose userfaultfd this is. Fails as making an eventfd does.
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

    /// Its userfaultfd.
    pub fn uffd(&self) -> Uffd {
        Uffd::from_raw(self.uffd.as_raw_fd())
    }

    /// A page's address.
    pub fn address(&self, page: u64) -> usize {
        self.base + page as usize * PAGE
    }

    /// What the marker of a page says.
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

    /// Marks a page as written to.
    pub fn note_write(&self, page: u64) {
        if self.markers.tracking() {
            self.markers.writer().change(page, SOFT_DIRTY, 0);
        }
    }

    /// Write-protects the pages `[from, to)` that have a PTE here.
    ///
    /// # Errors
    /// `EAGAIN`, `ESRCH`: as [`Engine::ask`] wants them. The kernel's: not all of it was done.
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
            // The program has unmapped a part, or put something else there: page by page. What is not registered has no
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

    /// Maps pages that the object holds, write-protected or not, and wakes who waits for them.
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

    /// Wakes who waits for pages `[from, to)`.
    pub fn wake(&mut self, from: u64, to: u64) {
        self.answered(from, to);
        let (at, len) = (self.address(from), (to - from) as usize * PAGE);
        match &mut self.put_off {
            Some(wakes) => wakes.push((at, len)),
            None => self.uffd().wake(at, len),
        }
    }

    /// A fault of thread `tid`'s was read.
    pub fn faulted_by(&mut self, tid: u32) {
        let same = core::mem::replace(&mut self.faulter, tid) == tid;
        self.lone = if same { (self.lone + 1).min(LONE) } else { self.lone.saturating_sub(OTHERS) };
    }

    /// The thread that faults, where for some time it was the only one.
    pub fn lone_faulter(&self) -> Option<u32> {
        (self.lone == LONE).then_some(self.faulter)
    }

    /// Whether others fault so often that there is no such thread any more.
    pub fn many_fault(&self) -> bool {
        self.lone < LONE / 2
    }

    /// Whoever waited for pages `[from, to)` goes on, and faults again where that is not enough: what was read of theirs and could not
    /// be served is no fault any more. (Served then, a page that was removed in between would be made again, which nobody has touched.)
    pub fn answered(&mut self, from: u64, to: u64) {
        let (from, to) = (self.address(from), self.address(to));
        for faults in [&mut self.kept, &mut self.later] {
            faults.retain(|fault| !(from..to).contains(&fault.address));
        }
    }

    /// Makes every touch of the page at an address a SIGBUS in this process; wakes nobody.
    ///
    /// # Errors
    /// As [`Mapping::protect_mapped`]. `EBUSY`: a page is mapped there, as far as is known.
    pub fn poison(&self, address: usize) -> Result<(), i32> {
        let page = (address - self.base) as u64 / PAGE as u64;
        match self.uffd().poison(address, PAGE) {
            // Its write-protection is not ours to end then. (Of the page behind the region there is no such mark.)
            Err((_, libc::EEXIST)) if page < self.markers.pages() && self.mapped.has(page) => Err(libc::EBUSY),
            Err((_, libc::EEXIST)) => {
                // A write-protection marker of the kernel's is left in the PTE: ending the protection takes it away.
                self.uffd().write_protect(address, PAGE, false)?;
                self.uffd().poison(address, PAGE).map_err(|(_, errno)| errno)
            }
            other => other.map_err(|(_, errno)| errno),
        }
    }

    /// Maps a page that the object holds, write-protected, in the place of an error; wakes nobody.
    ///
    /// # Errors
    /// As [`Mapping::protect_mapped`].
    pub fn replace_error(&self, page: u64) -> Result<(), i32> {
        match self.uffd().continue_pages(self.address(page), PAGE, true, false) {
            // There is none any more, and somebody has mapped it.
            Ok(()) | Err((_, libc::EEXIST)) => Ok(()),
            Err((_, errno)) => Err(errno),
        }
    }

    /// Whether the process is there. (Protecting a page too much costs a fault; ending its protection could lose a write.)
    pub fn is_alive(&self) -> bool {
        self.uffd().write_protect(self.base, PAGE, true) != Err(libc::ESRCH)
    }

    /// Bytes of its tables.
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

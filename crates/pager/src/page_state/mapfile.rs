//! The page map as a memory object: its owner writes it, and anybody who wants to know maps it read-only.
//!
//! ```text
//! page 0: MAGIC │ kind │ base │ pages │ sequence │ limit │ tracking │ doubts │ maker │ …      page 1…: a byte a page (uzswap_mm::pagemap)
//! ```
//! The object is called [`NAME`], by which it is found among a process's descriptors. It is sparse: only those parts of the table
//! take memory that were ever written, so one object of 2^35 bytes covers a process's whole address space. It is sealed, so that
//! nobody can map it writable later; the owner's mapping is older than the seal. A process's map is not sealed against writing,
//! as a seal would forbid giving back pages of the table that are all zeros ([`give_back`]). (Whoever may open it may write to
//! the process as well.)
//!
//! It is made with plain system calls, as the agent's threads must do.

use core::ffi::CStr;
use core::sync::atomic::{AtomicU64, Ordering::*};
use uzswap_mm::pagemap::{PageMap, PageMapWriter};
use uzswap_mm::pagetable::STRETCH_PAGES;
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::{sys, thread};

/// First word of the object.
pub const MAGIC: u64 = 0x757a_6d61_7000_0001;
/// Name of the object.
pub const NAME: &CStr = c"uzswap-pagemap";
/// Bytes before the table.
pub const HEAD: usize = 4096;

/// What a map describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Kind {
    /// A shared region: pages by number, with the same state for every mapping.
    Shared = 1,
    /// One mapping of a shared region: the bits that belong to the mapping.
    Markers = 2,
    /// A region of the library, whose address is `base`.
    Region = 3,
    /// A process under `uzswap run`: pages by address.
    Process = 4,
    /// A process: the pages that were soft-dirty when its bits were last cleared.
    Cleared = 5,
}

impl Kind {
    fn of(number: u64) -> Option<Self> {
        [Self::Shared, Self::Markers, Self::Region, Self::Process, Self::Cleared]
            .into_iter()
            .find(|k| *k as u64 == number)
    }
}

const KIND: usize = 1;
const BASE: usize = 2;
const PAGES: usize = 3;
const SEQUENCE: usize = 4;
const LIMIT: usize = 5;
const TRACKING: usize = 6;
const DOUBTS: usize = 7;
const MAKER: usize = 8;

/// A page map that is mapped here.
#[derive(Debug)]
pub struct MapFile {
    at: usize,
    len: usize,
    fd: i32,
    /// Device and inode of the object.
    object: (u64, u64),
    /// Number of pages and kind, as read when the map was mapped. Another process may change what the object says.
    pages: u64,
    kind: Option<Kind>,
    /// Whether this process made it; another process's map can only be read.
    own: bool,
    /// The process that mapped it. A forked child does not inherit the mapping of its own map (`MADV_DONTFORK`).
    process: i32,
}

impl MapFile {
    /// Makes a map of pages that nobody has touched.
    ///
    /// # Errors
    /// The kernel's.
    pub fn create(kind: Kind, base: usize, pages: u64, limit: u64) -> Result<Self, Errno> {
        let len = HEAD + pages.next_multiple_of(4096) as usize;
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: a NUL-terminated name.
        let fd = unsafe { sys!(libc::SYS_memfd_create, NAME.as_ptr(), flags) }? as i32;
        let made = (|| {
            // SAFETY: no memory is involved.
            unsafe { sys!(libc::SYS_ftruncate, fd, len) }?;
            let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE);
            // SAFETY: a new mapping.
            let at = unsafe { sys!(libc::SYS_mmap, 0, len, prot, flags, fd, 0) }?;
            let read_only = if kind == Kind::Process { 0 } else { uzswap_sys::memfd::SEAL_FUTURE_WRITE };
            let seals = uzswap_sys::memfd::SEAL_SIZE | read_only;
            // SAFETY: as above.
            unsafe {
                let _ = sys!(libc::SYS_fcntl, fd, libc::F_ADD_SEALS, seals);
                let _ = sys!(libc::SYS_madvise, at, len, libc::MADV_DONTFORK);
                let _ = sys!(libc::SYS_madvise, at, len, libc::MADV_DONTDUMP);
            }
            Ok(at)
        })();
        let at = match made {
            Ok(at) => at,
            Err(e) => {
                raw::close(fd);
                return Err(e);
            }
        };
        let object = Object::of(fd).map_or((0, 0), |object| object.id);
        let map = Self { at, len, fd, object, pages, kind: Some(kind), own: true, process: thread::getpid() };
        let head = map.head();
        let maker = thread::getpid() as u64;
        let words = [(KIND, kind as u64), (BASE, base as u64), (PAGES, pages), (LIMIT, limit), (MAKER, maker)];
        for (word, value) in words {
            head[word].store(value, Relaxed);
        }
        head[0].store(MAGIC, Release);
        Ok(map)
    }

    /// Maps another process's map for reading. Takes ownership of the descriptor and keeps it open.
    ///
    /// # Errors
    /// `EINVAL`: it is not a page map. Otherwise the kernel's.
    pub fn open(fd: i32) -> Result<Self, Errno> {
        let object = Object::of(fd).ok().filter(|object| object.len > HEAD);
        let Some(Object { id: object, len, .. }) = object else {
            raw::close(fd);
            return Err(libc::EINVAL);
        };
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        // SAFETY: a new mapping.
        let at = match unsafe { sys!(libc::SYS_mmap, 0, len, libc::PROT_READ, flags, fd, 0) } {
            Ok(at) => at,
            Err(e) => {
                raw::close(fd);
                return Err(e);
            }
        };
        let mut map = Self { at, len, fd, object, pages: 0, kind: None, own: false, process: thread::getpid() };
        map.pages = map.head()[PAGES].load(Relaxed);
        map.kind = Kind::of(map.head()[KIND].load(Relaxed));
        // The seal keeps the object from shrinking below what it says, which would make reading raise SIGBUS.
        // SAFETY: no memory is involved.
        let seals = unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GET_SEALS) }.unwrap_or(0);
        let shrinks = seals & libc::F_SEAL_SHRINK as usize == 0;
        if map.head()[0].load(Acquire) != MAGIC || map.pages > (len - HEAD) as u64 || shrinks {
            return Err(libc::EINVAL);
        }
        Ok(map)
    }

    fn head(&self) -> &[AtomicU64] {
        // SAFETY: the first page of the mapping, aligned, alive as long as self; only used as atomics.
        unsafe { core::slice::from_raw_parts(self.at as *const AtomicU64, HEAD / 8) }
    }

    fn words(&self) -> &[AtomicU64] {
        let words = PageMap::<AtomicU64>::words_for(self.pages);
        // SAFETY: the mapping has room for the pages (checked when opened), aligned, alive as long as self; only used as
        // atomics, and only read where it is another process's.
        unsafe { core::slice::from_raw_parts((self.at + HEAD) as *const AtomicU64, words) }
    }

    /// The map, for reading.
    #[must_use]
    pub fn map(&self) -> PageMap<'_> {
        PageMap::new(&self.head()[SEQUENCE], self.words(), self.pages)
    }

    /// The map, for writing.
    ///
    /// # Panics
    /// When it belongs to another process.
    #[must_use]
    pub(crate) fn writer(&self) -> PageMapWriter<'_> {
        PageMapWriter::new(&self.own_head()[SEQUENCE], self.words(), self.pages)
    }

    /// The head, for writing.
    fn own_head(&self) -> &[AtomicU64] {
        assert!(self.own, "another process's map cannot be written");
        self.head()
    }

    /// The map, for writing by a table that lives as long as this.
    ///
    /// # Safety
    /// The result must not be used after this is dropped.
    #[must_use]
    pub(crate) unsafe fn writer_unbound(&self) -> PageMapWriter<'static> {
        // SAFETY: the caller promises the lifetime.
        unsafe { core::mem::transmute::<PageMapWriter<'_>, PageMapWriter<'static>>(self.writer()) }
    }

    /// The address of the table in this mapping.
    pub(crate) fn table(&self) -> usize {
        self.at + HEAD
    }

    /// The descriptor of the object.
    #[must_use]
    pub fn fd(&self) -> i32 {
        self.fd
    }
    /// Number of pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }
    /// What it describes.
    #[must_use]
    pub fn kind(&self) -> Option<Kind> {
        self.kind
    }
    /// Address of the first page.
    #[must_use]
    pub fn base(&self) -> usize {
        self.head()[BASE].load(Relaxed) as usize
    }
    /// The process that made it, by the pid it has in its own namespace: a forked child has its parent's descriptors.
    #[must_use]
    pub fn maker(&self) -> u32 {
        self.head()[MAKER].load(Relaxed) as u32
    }
    /// The limit that the memory is under (bytes).
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.head()[LIMIT].load(Relaxed)
    }
    /// Publishes another limit (bytes). For whoever has the map mapped writable.
    pub(crate) fn set_limit(&self, bytes: u64) {
        self.head()[LIMIT].store(bytes, Relaxed);
    }
    /// Whether soft-dirty bits are meaningful: in [`Kind::Markers`] once they were first cleared (before that every page counts
    /// as written), in [`Kind::Process`] where they are kept. (There, written pages are marked.)
    #[must_use]
    pub fn tracking(&self) -> bool {
        self.head()[TRACKING].load(Acquire) != 0
    }
    /// Sets [`MapFile::tracking`], in a map of this process.
    pub(crate) fn set_tracking(&self, on: bool) {
        self.own_head()[TRACKING].store(u64::from(on), Release);
    }
    /// Number of ranges whose contents may just have been removed. While there are any, ask the owner before believing the map.
    /// (In [`Kind::Shared`] only.)
    #[must_use]
    pub fn doubts(&self) -> u64 {
        self.head()[DOUBTS].load(Acquire)
    }
    /// Sets [`MapFile::doubts`], in a map of this process.
    pub(crate) fn set_doubts(&self, n: u64) {
        self.own_head()[DOUBTS].store(n, Release);
    }
    /// Sets the address of the first page, in a map of this process.
    pub(crate) fn set_base(&self, base: usize) {
        self.own_head()[BASE].store(base as u64, Release);
    }

    /// The parts of the table that were ever written, as ranges of pages.
    #[must_use]
    pub fn written_ranges(&self) -> Vec<(u64, u64)> {
        self.written_within(0, self.pages)
    }

    /// The same for the pages `[from, to)`; all of them if the kernel does not say.
    pub(crate) fn written_within(&self, from: u64, to: u64) -> Vec<(u64, u64)> {
        if !Object::of(self.fd).is_ok_and(|object| object.id == self.object) {
            // The program has closed the descriptor, and may have put another file there.
            return vec![(from, to)];
        }
        let (mut ranges, mut at, last) = (Vec::new(), HEAD + from as usize, HEAD + to as usize);
        let seek = |at: usize, whence: i32| {
            // SAFETY: no memory is involved.
            unsafe { sys!(libc::SYS_lseek, self.fd, at, whence) }
        };
        while at < last {
            let (start, end) = match seek(at, libc::SEEK_DATA) {
                Ok(start) => (start, seek(start, libc::SEEK_HOLE).unwrap_or(self.len).min(last)),
                Err(libc::ENXIO) => break,
                Err(_) => (at, last),
            };
            if start < end {
                ranges.push(((start - HEAD) as u64, (end - HEAD) as u64));
            }
            at = start.max(end);
        }
        ranges
    }

    /// The parts of the table, together with those of its markers, that may say anything about a page, in order.
    ///
    /// The story: whoever looked at the map of a large region read all of it. The kernel gives memory to each page of an object
    /// that is read through a mapping: a look at 2 TiB of which a page was touched took 512 MiB, as long as the region lived.
    #[must_use]
    pub fn parts(&self, markers: Option<&Self>) -> Vec<(u64, u64)> {
        // The owner of a shared region has tables of all its pages anyway, and who maps one may close descriptors.
        if self.kind == Some(Kind::Shared) {
            return vec![(0, self.pages)];
        }
        let mut all = self.written_ranges();
        all.extend(markers.into_iter().flat_map(Self::written_ranges));
        all.sort_unstable();
        let mut parts: Vec<(u64, u64)> = Vec::new();
        for (from, to) in all {
            match parts.last_mut() {
                Some((_, end)) if *end >= from => *end = to.max(*end),
                _ => parts.push((from, to)),
            }
        }
        parts
    }

    /// Memory that the table takes (bytes).
    #[must_use]
    pub fn metadata_bytes(&self) -> usize {
        Object::of(self.fd).map_or(0, |object| object.taken)
    }
}

/// What fstat says of an open object.
struct Object {
    /// Device and inode.
    id: (u64, u64),
    /// Its size (bytes).
    len: usize,
    /// Memory that it takes (bytes).
    taken: usize,
}

impl Object {
    fn of(fd: i32) -> Result<Self, Errno> {
        let mut stat = [0u64; 32];
        // SAFETY: `struct stat` has 144 bytes.
        unsafe { sys!(libc::SYS_fstat, fd, stat.as_mut_ptr()) }?;
        // st_dev, st_ino, st_size and st_blocks (of 512 bytes), on x86-64 and AArch64 alike.
        Ok(Self { id: (stat[0], stat[1]), len: stat[6] as usize, taken: stat[8] as usize * 512 })
    }
}

/// Bytes of a table given back to the kernel at a time: a page.
const PIECE: usize = 4096;
const _: () = assert!(PIECE as u64 == STRETCH_PAGES);

/// Gives the `n`-th page of a table's memory back to the kernel. It describes the `n`-th [`STRETCH_PAGES`] pages, and must be all
/// zeros. `table` is the address of the table in its owner's mapping.
///
/// The story: V8 maps its heap in pieces of 256 KiB at ever new addresses. Each took a page of the table for good: half a
/// megabyte a second of shared memory that no limit counts.
///
/// # Safety
/// `table` belongs to a map that is mapped writable, and nobody writes to it meanwhile.
pub(crate) unsafe fn give_back(table: usize, n: u64) {
    // SAFETY: the caller promises it. If the kernel refuses (the program locks its memory) the page stays.
    let _ = unsafe { sys!(libc::SYS_madvise, table + n as usize * PIECE, PIECE, libc::MADV_REMOVE) };
}

/// The story: a forked child dropped the page map of its parent's region, and unmapped memory of its own at that address.
impl Drop for MapFile {
    fn drop(&mut self) {
        if !self.own || self.process == thread::getpid() {
            // SAFETY: our mapping; what borrows from it has ended.
            let _ = unsafe { sys!(libc::SYS_munmap, self.at, self.len) };
        }
        raw::close(self.fd);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::events::{forget_range, remap};
    use uzswap_mm::lru::List;
    use uzswap_mm::pagemap::{PRESENT, PageState};
    use uzswap_mm::pagetable::{ADDRESS_SPACE_PAGES, Pte, Tag};

    #[test]
    fn a_reader_sees_what_the_owner_writes_and_cannot_write() {
        let owner = MapFile::create(Kind::Region, 0x7000_0000, ADDRESS_SPACE_PAGES, 5).unwrap();
        // SAFETY: no memory is involved.
        let fd = unsafe { sys!(libc::SYS_dup, owner.fd()) }.unwrap() as i32;
        let reader = MapFile::open(fd).unwrap();
        owner.writer().set(1 << 34, PageState(PRESENT));
        owner.set_tracking(true);
        assert_eq!(reader.map().get(1 << 34), PageState(PRESENT));
        assert_eq!((reader.kind(), reader.base(), reader.limit()), (Some(Kind::Region), 0x7000_0000, 5));
        assert!(reader.tracking());
        assert_eq!(reader.written_ranges(), [(1 << 34, (1 << 34) + 4096)]);
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, if at all.
        let writable = unsafe { sys!(libc::SYS_mmap, 0, 4096, rw, libc::MAP_SHARED, fd, 0) };
        assert_eq!(writable, Err(libc::EPERM));
        // SAFETY: no memory is involved.
        let other = unsafe { sys!(libc::SYS_dup, 0) }.unwrap() as i32;
        assert!(MapFile::open(other).is_err());
    }

    /// See `drop`.
    #[test]
    fn a_forked_child_that_drops_a_map_unmaps_nothing_of_its_own() {
        let map = MapFile::create(Kind::Region, 0, 4096, 5).unwrap();
        let (at, len, rw) = (map.at, map.len, libc::PROT_READ | libc::PROT_WRITE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: the child makes system calls only, and leaves without the harness.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: a new mapping that replaces nothing, and is read where it must still be (SIGSEGV else).
            unsafe {
                let own = sys!(libc::SYS_mmap, at, len, rw, flags, -1isize, 0);
                drop(map);
                let read = (at as *const u8).read_volatile();
                libc::_exit(i32::from(own != Ok(at) || read != 0));
            }
        }
        let mut status = 0;
        // SAFETY: a child of ours.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
        // Here the map is unchanged.
        map.writer().set(7, PageState(PRESENT));
        assert_eq!(map.map().get(7), PageState(PRESENT));
    }

    /// The story: the number of pages was read at each look from memory that the map's owner can write to. That could lead a
    /// process of another user, which looks at the map, out of its mapping.
    #[test]
    fn what_the_owner_says_of_its_size_later_changes_nothing() {
        let owner = MapFile::create(Kind::Process, 0, 4096, 5).unwrap();
        owner.writer().set(7, PageState(PRESENT));
        // SAFETY: no memory is involved.
        let fd = unsafe { sys!(libc::SYS_dup, owner.fd()) }.unwrap() as i32;
        let reader = MapFile::open(fd).unwrap();
        owner.head()[PAGES].store(1 << 40, Relaxed);
        owner.head()[KIND].store(Kind::Region as u64, Relaxed);
        let sum = reader.map().summary(0, u64::MAX);
        assert_eq!((sum.pages, sum.present, reader.pages()), (4096, 1, 4096));
        assert_eq!((reader.kind(), reader.written_ranges()), (Some(Kind::Process), vec![(0, 4096)]));
    }

    /// See `give_back`.
    #[test]
    fn what_is_forgotten_takes_no_memory_in_the_map() {
        let p = crate::testing::pager(16 << 20);
        let map = MapFile::create(Kind::Process, 0, ADDRESS_SPACE_PAGES, 5).unwrap();
        // Read by a system call, as touching a page of the mapping would create it.
        let said = |vpn: u64| {
            let mut byte = [0xff];
            assert_eq!(raw::pread(map.fd(), &mut byte, HEAD as u64 + vpn), Ok(1));
            PageState(byte[0])
        };
        let mut s = p.state.lock();
        // SAFETY: unpublished below.
        s.pt.publish(unsafe { map.writer_unbound() }, 0);
        s.pt.note_emptied();
        s.page_map = Some(map.table());
        // One page that stays, and pieces of 256 KiB at scattered addresses that come and go.
        s.pt.set(77, Pte::new(Tag::Zero, 0));
        s.zeros += 1;
        let before = map.metadata_bytes();
        for i in 1..500u64 {
            let first = i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % ADDRESS_SPACE_PAGES / 64 * 64;
            s.list_resident(first, 64, List::Inactive, |_| None);
            assert_eq!(said(first + 5), PageState(PRESENT));
            let to = i.wrapping_mul(0xd6e8_feb8_6659_fd93) % ADDRESS_SPACE_PAGES / 64 * 64;
            remap(&mut s, first, to, 64);
            assert_eq!([first, to].map(|at| said(at + 5)), [PageState(0), PageState(PRESENT)]);
            forget_range(&mut s, to, to + 40);
            forget_range(&mut s, to + 40, to + 64);
            assert_eq!(said(to + 5), PageState(0));
        }
        assert_eq!(map.metadata_bytes(), before);
        assert_eq!(said(77), Pte::new(Tag::Zero, 0).state());
        s.pt.unpublish();
        s.page_map = None;
    }
}

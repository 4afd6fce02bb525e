//! Regions: memory under a limit inside one program, without `uzswap run`.
//!
//! A region is a pager over one anonymous mapping, with its own arena, pool and group. A fault is not a message to a handler
//! thread but a SIGBUS to the thread that touched the page. That thread serves the fault itself and goes on, without a thread
//! switch. Regions need no privilege, since only faults of the program's own instructions are served.
//!
//! ```text
//! access ─ SIGBUS ─ registry: whose address? ─┬ a region's: lock, serve, unlock, return: the access is done again
//!                                             └ nobody's: the handler that was there before
//! ```
//! What a program must know:
//! - A system call given a pointer into a region fails with `EFAULT` where the page is not resident, as the kernel's own faults
//!   raise no signal. Copy through another buffer.
//! - `madvise`, `mremap`, `munmap` and `mprotect` on a region are not seen, and must not be used.
//! - After `fork` the child has no access to regions (`MADV_DONTFORK`): touching one raises SIGSEGV. Nor may it call a region's
//!   functions, as a thread that the child does not have may hold the lock, or use a page map, which it does not have either. It
//!   may drop regions, and a [`RegionWatch`], which then does nothing, and make regions of its own.
//! - `mlockall` with MCL_CURRENT must not be called while there is a region: it fills all address space that uzswap has reserved,
//!   75 GB for each. With MCL_FUTURE it may be called before: what a region takes is not locked. (Nor may `mlock` lock a region.)
//! - A region's descriptors must not be closed. If they are (`close_range`), pages that are out are lost: touching one raises
//!   SIGBUS, and uzswap says so. (They would read as zeros; the thread `uzswap-keeper` prevents that, where it may have a
//!   descriptor table of its own.)
//! - SIGBUS must stay handled by this module, and unblocked in threads that touch a region. A program that installs its own
//!   handler later must chain to the one it replaces.
//!
//! The handler runs with all signals blocked, on the stack of the thread that faulted (alternate stacks are too small for a
//! decompressor), and may allocate: a thread must not touch a region while inside the allocator.
//!
//! With [`Options::track_writes`] a region has a soft-dirty and a write-protected bit for each page, which survive paging
//! (`marks`). They are exact for the program's own instructions, and nothing else can write to a region.
//!
//! The limit bounds what can be counted exactly without asking the kernel: resident, staged and free frames, and the pool. The
//! tables come on top (see [`Stats::metadata`]).

use crate::frames::arena::{self, Layout, PAGE, pages_of};
use crate::group::{CODEC_DEFLATE, CODEC_LZ4, CODEC_ZSTD, GroupPage, MAGIC, ON_FULL_EXCEED, ON_FULL_KILL, algorithm};
use crate::page_state::mapfile::{Kind as MapKind, MapFile};
use crate::page_state::marks::Marks;
use crate::pager::Pager;
use crate::state::BLOCK;
use core::fmt;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering::*};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use uzswap_mm::codec::Algorithm;
pub use uzswap_mm::compaction::rule::Rule as Compaction;
use uzswap_mm::zone::Kind;
use uzswap_sys::raw::Errno;
use uzswap_sys::sys;
use uzswap_sys::uffd::{self, Uffd};

mod keeper;
mod limit;
mod markers;
mod published;
mod signals;

use keeper::Keeper;
pub use markers::RegionWatch;
use published::Published;
pub(crate) use signals::SignalsBlocked;
use signals::{REGISTRY, install_handler};

/// Regions a process can have at once. Each takes four of its descriptors (`ulimit -n`); with [`Options::track_writes`] five,
/// without [`Options::page_map`] one fewer.
pub const MOST_REGIONS: usize = 256;
/// The least limit (bytes): what one batch under way needs, with room to spare.
pub const LEAST_LIMIT: usize = 8 << 20;

/// The pool's compressor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compressor {
    /// LZ4.
    #[default]
    Lz4,
    /// Zstandard at a level, 1 to 22 (0: its default).
    Zstd(u32),
    /// Deflate at a level, 1 to 12 (0: its default).
    Deflate(u32),
}

impl Compressor {
    /// Codec and level as a group's page stores them.
    const fn numbers(self) -> (u32, u32) {
        match self {
            Self::Lz4 => (CODEC_LZ4, 0),
            Self::Zstd(level) => (CODEC_ZSTD, level),
            Self::Deflate(level) => (CODEC_DEFLATE, level),
        }
    }

    /// The engine's algorithm; `None` if it has no such level.
    pub(crate) fn algorithm(self) -> Option<Algorithm> {
        let (codec, level) = self.numbers();
        algorithm(codec, level)
    }
}

/// How to make a region.
#[derive(Clone, Debug)]
pub struct Options {
    /// How many bytes the region's frames and its pool may take together.
    pub limit: usize,
    /// How pages are compressed.
    pub compressor: Compressor,
    /// The rule for compacting its frames.
    pub compaction: Compaction,
    /// Keeps the pool from counting against the limit: only for comparisons with the kernel's cgroup v1.
    pub pool_uncharged: bool,
    /// Publishes the state of each page: see [`Region::page_map`].
    pub page_map: bool,
    /// Keeps a soft-dirty and a write-protected bit for each page: see [`Region::take_soft_dirty`] and [`Region::protect`]. Off
    /// by default: until bits are first cleared it costs little, but a page whose writes are tracked comes back by a copy.
    pub track_writes: bool,
    /// Works as on a kernel without UFFDIO_MOVE (before 6.8), to try that out; such a kernel implies it. Has no effect with
    /// [`Options::track_writes`], which needs the call.
    pub without_move: bool,
}

impl Options {
    /// Options with this limit (bytes), and defaults otherwise.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            compressor: Compressor::Lz4,
            compaction: Compaction::default(),
            pool_uncharged: false,
            page_map: true,
            track_writes: false,
            without_move: false,
        }
    }
}

/// Why a region could not be made or used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The limit is below [`LEAST_LIMIT`], or the size is zero. (A size that is too large finds no address space:
    /// [`Error::Kernel`].)
    Size,
    /// The compressor has no such level.
    Level(Compressor),
    /// The process has [`MOST_REGIONS`] already.
    TooMany,
    /// The region was made without [`Options::track_writes`].
    NotTracked,
    /// The region has a [`RegionWatch`] already.
    Watched,
    /// The kernel refused.
    Kernel {
        /// What the kernel was asked for.
        what: &'static str,
        /// Its error number.
        errno: Errno,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size => write!(f, "a region needs a size, and a limit of at least {} MiB", LEAST_LIMIT >> 20),
            Self::Level(Compressor::Zstd(level)) => write!(f, "zstd has no level {level}: choose 1 to 22"),
            Self::Level(Compressor::Deflate(level)) => write!(f, "deflate has no level {level}: choose 1 to 12"),
            Self::Level(Compressor::Lz4) => write!(f, "lz4 has no levels"),
            Self::TooMany => write!(f, "a process can have {MOST_REGIONS} regions"),
            Self::NotTracked => write!(f, "the region was created without tracking of writes"),
            Self::Watched => write!(f, "another watch of the region's writes is active: end it first"),
            Self::Kernel { what, errno } => write!(f, "{what}: {}", std::io::Error::from_raw_os_error(*errno)),
        }
    }
}

impl std::error::Error for Error {}

/// Where a region's memory is at the moment; in bytes, except the counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// In the region; touching it raises no fault.
    pub resident: usize,
    /// Out of the region but not compressed yet.
    pub staged: usize,
    /// Frames kept free for the next faults.
    pub free: usize,
    /// What the pool takes from the kernel.
    pub pool: usize,
    /// Objects in the pool; what the pool holds beyond that is waste.
    pub pool_used: usize,
    /// Pages of the pool that compaction freed (cumulative).
    pub pages_compacted: u64,
    /// Page blocks (2 MiB of addresses) of the pool that compaction emptied (cumulative).
    pub pool_blocks_freed: u64,
    /// Frames of the arena that compaction moved (cumulative).
    pub pages_migrated: u64,
    /// Pages in the pool, by their uncompressed size.
    pub stored: usize,
    /// Pages that are all zeros and take no room.
    pub zeros: usize,
    /// The tables, which the limit does not bound.
    pub metadata: usize,
    /// What counts against the limit.
    pub charged: usize,
    /// Faults served (count).
    pub faults: u64,
    /// Faults that decompressed (count).
    pub major_faults: u64,
    /// Faults on staged pages (count).
    pub staged_faults: u64,
    /// Faults that had to make room first (count).
    pub direct_reclaims: u64,
    /// How often the limit could not be kept.
    pub over_limit: u64,
}

/// Memory under a limit.
///
/// It is zero at first, readable and writable at [`Region::as_mut_ptr`], and freed when the value is dropped. See the module for
/// what must not be done with it.
#[derive(Debug)]
pub struct Region {
    base: usize,
    len: usize,
    mapped: usize,
    index: Option<usize>,
    pager: *mut Pager,
    group: Published,
    threads: Vec<std::thread::JoinHandle<()>>,
    keeper: Option<Keeper>,
    /// Whether there is a [`RegionWatch`].
    watched: AtomicBool,
    /// The process that made it.
    process: u32,
    /// It outlives the pager, whose table writes to it (and so does the group): fields are dropped after [`Drop::drop`].
    page_map: Option<std::sync::Arc<MapFile>>,
}
// SAFETY: the pager is made for many threads (it owns what the raw pointers point to), and access to the memory is the caller's
// affair.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// Said of a region that is too large, even for the kernel to be asked.
const NO_SPACE: &str = "no address space for a region";

fn kernel(what: &'static str) -> impl Fn(Errno) -> Error {
    move |errno| Error::Kernel { what, errno }
}

impl Region {
    /// Makes a region of `size` bytes.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn new(size: usize, options: &Options) -> Result<Self, Error> {
        if size == 0 || options.limit < LEAST_LIMIT {
            return Err(Error::Size);
        }
        options.compressor.algorithm().ok_or(Error::Level(options.compressor))?;
        let mapped = size.checked_next_multiple_of(BLOCK).ok_or(libc::ENOMEM).map_err(kernel(NO_SPACE))?;
        let published = Published::new().map_err(kernel("a region's group"))?;
        let group = published.page();
        let (codec, level) = options.compressor.numbers();
        group.set_up(b"region");
        group.nodes[0].max.store(limit::of_group(options.limit), Relaxed);
        group.nodes[0].codec.store(codec, Relaxed);
        group.nodes[0].level.store(level, Relaxed);
        group.folios.compaction.store(options.compaction.number(), Relaxed);
        group.pool_uncharged.store(u32::from(options.pool_uncharged), Relaxed);
        group.track_writes.store(u32::from(options.track_writes), Relaxed);
        group.magic.store(MAGIC, Release);
        // From here on, dropping the value undoes whatever was done.
        let mut region = Self {
            base: 0,
            len: size,
            mapped,
            index: None,
            pager: core::ptr::null_mut(),
            group: published,
            threads: Vec::new(),
            keeper: None,
            watched: AtomicBool::new(false),
            process: std::process::id(),
            page_map: None,
        };
        region.build(options)?;
        Ok(region)
    }

    fn build(&mut self, options: &Options) -> Result<(), Error> {
        install_handler();
        // What is most likely to be refused comes first. This value owns the descriptor until there is a pager for it.
        let (uffd, without_move) = open_uffd(options)?;
        // SAFETY: just made, and owned by nobody.
        let owned = unsafe { OwnedFd::from_raw_fd(uffd.fd()) };
        self.base = map_aligned(self.mapped).map_err(kernel(NO_SPACE))?;
        let marks = options.track_writes.then(|| Marks::new(self.base, (self.mapped / PAGE) as u64));
        let marks = marks.transpose().map_err(kernel("a region's markers"))?;
        let layout = Layout::reserve(options.limit).map_err(kernel(NO_SPACE))?;
        // SAFETY: the group lives until the pager is gone: see drop.
        let group: &'static GroupPage = unsafe { &*core::ptr::from_ref(self.group.page()) };
        let mut pager = match Pager::new(group, 0, layout) {
            Ok(pager) => pager,
            Err(errno) => {
                unmap(layout.base, layout.end - layout.base);
                return Err(kernel("a region's group")(errno));
            }
        };
        pager.own_frames = true;
        pager.without_move = without_move;
        pager.uffd.store(owned.into_raw_fd(), Release);
        pager.marks = marks;
        self.pager = Box::into_raw(Box::new(pager));
        // SAFETY: just made, and freed only in drop.
        let pager: &'static Pager = unsafe { &*self.pager };
        for (at, n) in [(layout.base, layout.end - layout.base), (self.base, self.mapped)] {
            // SAFETY: advice on our own mappings: no huge pages but those asked for (`huge`), and nothing of them in a forked
            // child.
            unsafe {
                let _ = sys!(libc::SYS_madvise, at, n, libc::MADV_NOHUGEPAGE);
                let _ = sys!(libc::SYS_madvise, at, n, libc::MADV_DONTFORK);
            }
        }
        let pagemap = uzswap_sys::raw::open(b"/proc/thread-self/pagemap\0", libc::O_RDONLY)
            .map_err(kernel("/proc/thread-self/pagemap"))?;
        pager.files.pagemap.store(pagemap, Release);
        if !without_move {
            uffd.register_as_target(layout.arena, layout.slots * PAGE)
                .map_err(kernel("registering a region's arena"))?;
        }
        let registered = match options.track_writes {
            true => uffd.register_tracked(self.base, self.mapped),
            false => uffd.register(self.base, self.mapped),
        };
        registered.map_err(kernel("registering a region"))?;
        pager.thp.look_for_region();
        pager.state.lock().managed.push((self.base, self.base + self.mapped));
        self.index = Some(REGISTRY.add(self.base, self.mapped, self.pager).ok_or(Error::TooMany)?);
        if options.page_map {
            let pages = (self.mapped / PAGE) as u64;
            let map = MapFile::create(MapKind::Region, self.base, pages, limit::of_group(options.limit))
                .map_err(kernel("a region's page map"))?;
            // SAFETY: the pager is gone before this value's fields are dropped.
            pager.state.lock().pt.publish(unsafe { map.writer_unbound() }, (self.base / PAGE) as u64);
            self.page_map = Some(std::sync::Arc::new(map));
        }
        self.keeper = Keeper::start(uffd.fd());
        self.start_threads(pager)
    }

    fn start_threads(&mut self, pager: &Pager) -> Result<(), Error> {
        let address = self.pager as usize;
        let all = SignalsBlocked::new();
        let run = |name: &str, f: fn(&Pager, usize), i: usize| {
            // SAFETY: drop joins the threads before it frees the pager.
            let run = move || f(unsafe { &*(address as *const Pager) }, i);
            std::thread::Builder::new().name(name.to_owned()).spawn(run)
        };
        let reclaim = run("uzswap-reclaim", |p, _| p.reclaim_until_stopped(), 0);
        let helpers = pager.helpers_wanted(&pager.state.lock());
        let helpers = (0..helpers).map_while(|i| run("uzswap-compress", Pager::help, i).ok()).collect::<Vec<_>>();
        drop(all);
        self.threads.extend(helpers);
        let reclaim = reclaim.map_err(|e| e.raw_os_error().unwrap_or(libc::EAGAIN));
        self.threads.push(reclaim.map_err(kernel("starting a region's thread"))?);
        Ok(())
    }

    /// Address of the first byte, aligned to 64 KiB.
    #[must_use]
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.base as *mut u8
    }

    /// The length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether its length is zero: never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The memory as a slice.
    ///
    /// # Safety
    /// Nobody may write to it meanwhile, neither through [`Region::as_mut_ptr`] nor by [`Region::remove`], which makes it zeros.
    /// (Paging out and in changes nothing.) The slice must not be passed to a system call.
    #[must_use]
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: mapped, zero at first, served on access; the rest is the caller's promise.
        unsafe { core::slice::from_raw_parts(self.as_mut_ptr(), self.len) }
    }

    /// The memory as a mutable slice.
    ///
    /// # Safety
    /// Nobody may use it through [`Region::as_mut_ptr`] meanwhile (the borrow rules out the rest), and the slice must not be
    /// passed to a system call.
    #[must_use]
    pub unsafe fn as_slice_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { core::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len) }
    }

    /// Chooses what happens when the limit cannot be kept: the process is ended by SIGKILL, with a message, or (the default) the
    /// region goes on above its limit, which a message says too. May be called at any time.
    pub fn set_kill_when_full(&self, kill: bool) {
        self.group().nodes[0].on_full.store(if kill { ON_FULL_KILL } else { ON_FULL_EXCEED }, Relaxed);
    }

    /// The region's own group, for its counters. The settings in it are the region's: [`Region::set_limit`] and
    /// [`Region::set_kill_when_full`] change them.
    #[must_use]
    pub fn group(&self) -> &GroupPage {
        self.group.page()
    }

    /// The page map: each page's state, readable without asking anybody. None where [`Options::page_map`] is off.
    #[must_use]
    pub fn page_map(&self) -> Option<crate::shared::View> {
        // SAFETY: alive until drop.
        let markers = unsafe { &*self.pager }.marks.as_ref().map(crate::page_state::marks::Marks::file);
        Some(crate::shared::View::of_private(self.page_map.clone()?, markers))
    }

    /// Pages out a range of bytes (widened to pages). Returns the pages that left. Other threads may use the range meanwhile.
    pub fn page_out(&self, range: Range<usize>) -> usize {
        let (from, to) = self.pages_of(&range);
        let _quiet = SignalsBlocked::new();
        // SAFETY: alive until drop.
        unsafe { &*self.pager }.page_out(from, to)
    }

    /// Pages in a range of bytes (widened to pages), making room for it. Returns the pages that came in. Pages never touched stay
    /// untouched.
    pub fn page_in(&self, range: Range<usize>) -> usize {
        let (from, to) = self.pages_of(&range);
        let _quiet = SignalsBlocked::new();
        // SAFETY: alive until drop.
        unsafe { &*self.pager }.page_in(from, to)
    }

    /// Begins to find out which pages are in use: moves all pages out, uncompressed; a thread that touches one gets it back at
    /// the cost of a fault. Returns the pages that were in memory. Call [`Region::page_out_idle`] some time later.
    pub fn age(&self) -> usize {
        let (from, to) = self.pages_of(&(0..self.len));
        let _quiet = SignalsBlocked::new();
        // SAFETY: alive until drop.
        unsafe { &*self.pager }.age(from, to)
    }

    /// Pages touched since [`Region::age`], or brought in since: an estimate of the working set. (Without `age`, all pages in
    /// memory.)
    #[must_use]
    pub fn working_set(&self) -> usize {
        self.stats().resident / PAGE
    }

    /// Pages out what was not touched since [`Region::age`]; returns the pages that left.
    pub fn page_out_idle(&self) -> usize {
        let _quiet = SignalsBlocked::new();
        // SAFETY: alive until drop.
        unsafe { &*self.pager }.page_out_idle()
    }

    /// Drops the contents of all pages that a range of bytes overlaps: they read as zeros, as if never touched.
    pub fn remove(&self, range: Range<usize>) {
        let (from, to) = self.pages_of(&range);
        let _quiet = SignalsBlocked::new();
        // SAFETY: alive until drop.
        unsafe { &*self.pager }.remove(from, to);
    }

    /// Page numbers of a byte range of the region.
    fn pages_of(&self, range: &Range<usize>) -> (u64, u64) {
        let end = range.end.min(self.len);
        let pages = pages_of(&(self.base + range.start.min(end)..self.base + end));
        (pages.start, pages.end)
    }

    /// Moves the region's frames together as far as possible. This happens in the background anyway when there is time; call it
    /// where now is a good time. Returns the frames moved.
    pub fn compact(&self) -> u64 {
        // SAFETY: alive until drop.
        let pager = unsafe { &*self.pager };
        let _quiet = SignalsBlocked::new();
        let mut s = pager.state.lock();
        let before = s.compactor.counters.pgmigrate_success;
        pager.compact_towards(&mut s, 0, u64::MAX);
        s.compactor.counters.pgmigrate_success - before
    }

    /// Where the memory is at the moment.
    #[must_use]
    pub fn stats(&self) -> Stats {
        // SAFETY: alive until drop.
        let pager = unsafe { &*self.pager };
        // A signal handler that touched a region while this thread holds the lock would wait forever.
        let _quiet = SignalsBlocked::new();
        let s = pager.state.lock();
        let c = pager.counters();
        Stats {
            resident: s.resident * PAGE,
            staged: s.staged * PAGE,
            free: s.zone.free_slots(Kind::Frame) * PAGE,
            pool: s.pool.held_bytes(),
            pool_used: s.pool.used_bytes(),
            pages_migrated: c.pgmigrate_success.load(Relaxed),
            pages_compacted: c.pages_compacted.load(Relaxed),
            pool_blocks_freed: c.pool_blocks_freed.load(Relaxed),
            stored: s.swapped * PAGE,
            zeros: s.zeros * PAGE,
            metadata: s.metadata_bytes(),
            charged: pager.charged(&s),
            faults: c.pgfault.load(Relaxed),
            major_faults: c.pgmajfault.load(Relaxed),
            staged_faults: c.refault_staged.load(Relaxed),
            direct_reclaims: c.direct_reclaim.load(Relaxed),
            over_limit: pager.group.nodes[0].events.oom.load(Relaxed),
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            // A forked child has neither the threads nor the memory, the page map's included: other memory may be in their
            // places.
            core::mem::take(&mut self.threads).into_iter().for_each(core::mem::forget);
            core::mem::forget((self.page_map.take(), self.keeper.take()));
            return;
        }
        if !self.threads.is_empty() {
            // SAFETY: alive until below.
            let pager = unsafe { &*self.pager };
            pager.stopping.store(true, Release);
            pager.store_posted(&mut pager.state.lock());
            pager.wake_reclaim();
            pager.helpers.crew.end();
            self.threads.drain(..).for_each(|thread| drop(thread.join()));
        }
        if let Some(index) = self.index {
            REGISTRY.remove(index);
        }
        if self.base != 0 {
            unmap(self.base, self.mapped);
        }
        if !self.pager.is_null() {
            // SAFETY: made by Box::into_raw; no thread uses it any more, as its threads were joined, and nobody touches the
            // region while it is dropped.
            let pager = unsafe { Box::from_raw(self.pager) };
            let descriptors = [pager.uffd.load(Acquire), pager.files.pagemap.load(Acquire)];
            let layout = pager.layout;
            drop(pager);
            for fd in descriptors.into_iter().filter(|fd| *fd >= 0) {
                uzswap_sys::raw::close(fd);
            }
            unmap(layout.base, layout.end - layout.base);
        }
    }
}

/// Opens the userfaultfd for a region. Returns it, and whether pages must do without UFFDIO_MOVE. (Write-protection that survives
/// paging needs that call.)
fn open_uffd(options: &Options) -> Result<(Uffd, bool), Error> {
    let writes = if options.track_writes { uffd::FEATURE_WRITE_PROTECT } else { 0 };
    let features = uffd::FEATURE_SIGBUS | uffd::FEATURE_MOVE | uffd::FEATURE_POISON | writes;
    if !options.without_move || options.track_writes {
        match Uffd::open_for_program(features) {
            Ok(uffd) => return Ok((uffd, false)),
            Err(libc::EINVAL) if !options.track_writes => {}
            Err(e) => return Err(kernel("userfaultfd with UFFDIO_MOVE, which Linux 6.8 and later have")(e)),
        }
    }
    let opened = Uffd::open_for_program(uffd::FEATURE_SIGBUS);
    opened.map(|uffd| (uffd, true)).map_err(kernel("userfaultfd, which Linux 5.11 and later have for programs"))
}

fn unmap(at: usize, len: usize) {
    // SAFETY: callers pass mappings of their own to which nobody refers any more.
    let _ = unsafe { sys!(libc::SYS_munmap, at, len) };
}

/// Maps `len` bytes aligned to a block. (Address space before and behind it is free for other mappings.)
fn map_aligned(len: usize) -> Result<usize, Errno> {
    let whole = len.checked_add(2 * BLOCK).ok_or(libc::ENOMEM)?;
    let raw = arena::reserve(whole)?;
    let base = raw.next_multiple_of(BLOCK);
    if base > raw {
        unmap(raw, base - raw);
    }
    unmap(base + len, raw + whole - (base + len));
    arena::open(base, len).inspect_err(|_| unmap(base, len))?;
    Ok(base)
}

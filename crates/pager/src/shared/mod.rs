//! Shared regions: one memory object that several processes map, paged by its owner under a limit.
//!
//! The object is a memfd. Its owner gives the object to each process that attaches, and gets from it a userfaultfd registered
//! over that process's mapping for missing, minor and write-protection faults. So
//! - a page becomes visible in a mapping only by the owner's CONTINUE, page by page;
//! - the owner can make a page read-only in every mapping, and is told of writes to it;
//! - a hole punched in the object takes the page out of every mapping at once.
//!
//! The owner itself touches pages only by `pread` and `pwrite` on the object. To use the region it attaches like any other
//! process.
//!
//! ```text
//!           ┌────────── write-protect in every mapping ──────────┐   compress     store, punch, under the lock
//! Resident ─┘                                                    └▶ Busy ───────────▶ Compressed | Zero
//!     ▲                                                               │                     │
//!     └────────────── any fault on it: it stays ──────────────────────┘                     │
//!     └────────────── fault: fill the object's page, then CONTINUE ─────────────────────────┘
//! ```
//! # Why no write is lost and no page seen half
//! 1. *Eviction.* Under the lock the page becomes Busy and is write-protected in every mapping that may have a PTE for it
//!    (`Mapping::mapped`, set before each CONTINUE, cleared only with the page). A mapping without a PTE cannot get one: its
//!    fault is minor, and waits for us. From here on the page does not change, and is read and compressed without the lock. A
//!    thread that wants to write faults, and serving that fault takes the page off the batch (`rescue`). Under the lock again, a
//!    page still Busy *with this batch's number* has not been written to: it is stored, and only then punched.
//! 2. *Page-in.* The object's page is written whole under the lock. A thread that touches it meanwhile has a minor fault, which
//!    waits for the lock. Then CONTINUE maps it.
//! 3. *The kernel's own accesses* (read and write system calls, io_uring with plain buffers) go through the PTEs and fault as the
//!    program does, where userfaultfd may serve the kernel's faults ([`SharedMapping::kernel_faults`]); elsewhere they fail with
//!    EFAULT. What *pins* pages (direct I/O, registered buffers of io_uring, VFIO) writes to the frame past all PTEs, and user
//!    space cannot see a pin of shared memory: a page punched under a pin loses what the device writes. Pin such buffers here
//!    first ([`SharedMapping::pin`]); that keeps their pages in memory.
//! 4. *Behind our back.* `munmap` of a mapping harms nobody. `MADV_DONTNEED` drops only PTEs. What `MADV_REMOVE` drops is dropped
//!    where it is out, too, as [`SharedMapping::remove`] does it, if the owner can see it ([`SharedMapping::sees_removes`];
//!    `removes` says how); a call that was killed half way may be done in part. A hole punched through a descriptor kept from
//!    attaching is noticed where the page was in memory; a page that was out comes back. `mremap` loses the registration and must
//!    not be used.
//!
//! # Markers
//! Whether a page is out is a fact about the object, kept once. So every mapping has the same answer, whoever touched, dropped or
//! removed what, including mappings made later and forked children. Soft-dirty and write-protection belong to a mapping: a byte
//! for each page in the mapping's own map, which page-out leaves alone, and which CONTINUE obeys when the page comes back. Both
//! maps are memory objects that everybody reads ([`View`]), and only the owner writes. A marker that is not one of ours is an
//! error for its process alone: SIGBUS at that page. (While the page must stay in memory, for a pin, a thread that writes to it
//! waits.)
//!
//! # Who can harm whom
//! A process may attach if it is of the owner's user. (Root's may not, if the owner is another user: nobody should wait for
//! somebody he does not trust, and an attached process waits for the owner at each fault.) It can write to the memory (that is
//! what it is for) and order pages out or dropped. A dead, stopped or mute process harms nobody: its faults have a thread of
//! their own, the ioctls need no answer, and nobody waits for its sockets. When the *owner* ends, the others get SIGBUS and a
//! message: `attach`.
//!
//! Read on: `engine` (tables), `evict`, `fault`, `mapping` (one mapping, as the owner sees it), `owner` (threads), `calls` (what
//! can be asked), `removes` (with `gate`: MADV_REMOVE), `attach` (the other side; `line`: its questions), `wire` (messages).

mod attach;
mod calls;
mod engine;
mod evict;
mod fault;
mod gate;
mod line;
mod mapping;
mod near;
mod owner;
mod pin;
mod pins;
mod removes;
mod serve;
mod store;
mod view;
mod wire;

use crate::region::{Compressor, LEAST_LIMIT};
use attach::{Attached, Control, milliseconds, pages_of};
use line::Line;
pub(crate) use owner::isolate_descriptors;
pub use pin::SharedPin;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
pub use view::View;
use wire::op;

/// How to make a shared region.
#[derive(Clone, Debug)]
pub struct SharedOptions {
    /// Bytes that the object's pages in memory and the pool may take together.
    pub limit: usize,
    /// How pages are compressed.
    pub compressor: Compressor,
    /// Whether the page map distinguishes swapped pages from those never touched; without it, both are simply not present.
    pub markers: bool,
    /// For tests: whether anybody who may attach can cause rare events.
    #[doc(hidden)]
    pub injectable: bool,
}

impl SharedOptions {
    /// Options with this limit (bytes), and defaults otherwise.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { limit, compressor: Compressor::Lz4, markers: true, injectable: false }
    }
}

/// Figures of a shared region; in bytes, except the counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharedStats {
    /// Pages in memory.
    pub resident: usize,
    /// Pages in the pool, by their uncompressed size.
    pub stored: usize,
    /// Pages out that are all zeros and take no room.
    pub zeros: usize,
    /// What the pool holds from the kernel.
    pub pool: usize,
    /// What counts against the limit.
    pub charged: usize,
    /// The tables, which the limit does not bound.
    pub metadata: usize,
    /// Mappings of all processes (count).
    pub mappings: u64,
    /// Faults served (count).
    pub faults: u64,
    /// Faults that decompressed (count).
    pub major_faults: u64,
    /// Write faults on protected pages (count).
    pub wp_faults: u64,
    /// Pages compressed so far (count).
    pub swpout: u64,
    /// Pages that left with the copy they still had, so far (count).
    pub swpout_clean: u64,
    /// Faults that had to make room first (count).
    pub direct_reclaims: u64,
    /// Times the limit could not be kept.
    pub over_limit: u64,
    /// Pages lost (count).
    pub poisoned: u64,
    /// Ranges that `madvise` may or may not have removed (count): see [`SharedControl::sees_removes`].
    pub doubts: u64,
    /// Pages lost because it could not be seen whether they were removed (count).
    pub unvouched: u64,
    /// The part of `faults` served on the CPU of the faulting thread, as is done where one thread faults again and again.
    pub near_faults: u64,
}

impl SharedStats {
    fn of(words: &wire::Words) -> Self {
        let (page, w) = (crate::frames::arena::PAGE, &words[1..]);
        Self {
            resident: w[0] as usize * page,
            stored: w[1] as usize * page,
            zeros: w[2] as usize * page,
            pool: w[3] as usize,
            charged: w[4] as usize,
            metadata: w[5] as usize,
            mappings: w[6],
            faults: w[7],
            major_faults: w[8],
            wp_faults: w[9],
            swpout: w[10],
            swpout_clean: w[11],
            direct_reclaims: w[12],
            over_limit: w[13],
            poisoned: w[14],
            doubts: 0,
            unvouched: 0,
            near_faults: 0,
        }
    }
}

/// The owner of a shared region. When it is dropped, or its process ends, the region is lost for everybody.
#[derive(Debug)]
pub struct SharedRegion {
    orders: Mutex<OwnedFd>,
    control: SharedControl,
    /// Where the region was first served.
    path: Arc<OnceLock<PathBuf>>,
    process: u32,
}

impl SharedRegion {
    /// Makes a region of `size` bytes (rounded up to pages), which nobody has mapped yet.
    ///
    /// # Errors
    /// `InvalidInput`: no size, a limit below [`LEAST_LIMIT`], or a level that the compressor does not have. `OutOfMemory`: there
    /// is no memory for its tables, some five bytes for each of its pages, touched or not. The kernel's.
    pub fn create(size: usize, options: &SharedOptions) -> io::Result<Self> {
        if size == 0 || options.limit < LEAST_LIMIT {
            return Err(too_small());
        }
        if options.compressor.algorithm().is_none() {
            let error = crate::region::Error::Level(options.compressor);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, error));
        }
        let orders = owner::start(size, options.clone())?;
        let socket = new_connection(&orders)?;
        let control = SharedControl::of(attach::control(socket)?);
        Ok(Self { orders: Mutex::new(orders), control, path: Arc::default(), process: std::process::id() })
    }

    fn orders(&self) -> io::Result<std::sync::MutexGuard<'_, OwnedFd>> {
        if std::process::id() != self.process {
            return Err(io::Error::other("a forked child does not own its parent's shared regions"));
        }
        Ok(self.orders.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Lets processes of this user attach at a Unix socket. This makes the socket, which must not exist, and the region removes
    /// it when dropped. An owner that was killed leaves the socket behind. Nobody listens there then, so
    /// [`SharedControl::connect`] is refused (`ConnectionRefused`); whoever sees that removes the file and serves anew.
    ///
    /// # Errors
    /// `InvalidInput` if the path cannot be a socket's; otherwise the kernel's.
    pub fn serve(&self, path: &Path) -> io::Result<()> {
        let path = std::path::absolute(path)?;
        // The owner can answer only with an error number.
        uzswap_sys::socket::check_path(&path)?;
        let orders = self.orders()?;
        let bytes = path.as_os_str().as_bytes();
        wire::send(&orders, &wire::words(&[op::SERVE, bytes.len() as u64]), &[])?;
        uzswap_sys::socket::send(&orders, bytes, &[])?;
        match wire::receive(&orders)?.0[0] {
            0 => {
                // Only the first path is kept, though each of several is served.
                let _ = self.path.set(path);
                Ok(())
            }
            errno => Err(io::Error::from_raw_os_error(errno as i32)),
        }
    }

    /// Maps the region in the owner's own process.
    ///
    /// # Errors
    /// See [`SharedMapping::attach`].
    pub fn map(&self) -> io::Result<SharedMapping> {
        let socket = new_connection(&*self.orders()?)?;
        Ok(SharedMapping { attached: Attached::new(socket, self.path.clone())? })
    }

    /// Changes the limit to `bytes`, and makes room if it shrinks; everybody can use the region meanwhile. Returns the bytes
    /// charged afterwards: more than `bytes` if the contents do not compress that far, or are pinned.
    ///
    /// # Errors
    /// `InvalidInput`: less than [`LEAST_LIMIT`]. Any error in a forked child, which does not own the region.
    pub fn set_limit(&self, bytes: usize) -> io::Result<usize> {
        if bytes < LEAST_LIMIT {
            return Err(too_small());
        }
        wire::call(&*self.orders()?, &[op::LIMIT, bytes as u64])?;
        self.control.call(&[op::SHRINK]).map(|w| w[1] as usize)
    }

    /// The owner's connection for questions and orders.
    #[must_use]
    pub fn control(&self) -> &SharedControl {
        &self.control
    }
}

fn too_small() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, crate::region::Error::Size)
}

fn new_connection(orders: &OwnedFd) -> io::Result<OwnedFd> {
    let (_, fds) = wire::call(orders, &[op::CONNECT])?;
    fds.into_iter().next().ok_or_else(|| io::Error::from_raw_os_error(libc::EPROTO))
}

impl Drop for SharedRegion {
    fn drop(&mut self) {
        if let Ok(orders) = self.orders() {
            let _ = wire::call(&orders, &[op::STOP]);
        }
    }
}

/// Questions and orders about a shared region, from its owner or anybody who may attach.
///
/// Ranges are bytes of the region, widened to pages. A forked child has no part in its parent's connection: every call there is
/// refused (`NotConnected`), and the child makes a connection of its own instead. (It can read the page map.)
pub struct SharedControl {
    line: Line,
    pages: u64,
    view: View,
    sees_removes: bool,
}

impl std::fmt::Debug for SharedControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedControl").field("pages", &self.pages).finish_non_exhaustive()
    }
}

impl SharedControl {
    /// Connects to the region served at `path`.
    ///
    /// # Errors
    /// `PermissionDenied`: it is another user's. The kernel's.
    pub fn connect(path: &Path) -> io::Result<Self> {
        attach::control(attach::connect(path)?).map(Self::of)
    }

    fn of(control: Control) -> Self {
        let view = View::new(control.map, None, control.asker);
        let sees_removes = control.sees_removes;
        Self { line: Line::new(control.socket), pages: control.pages, view, sees_removes }
    }

    fn call(&self, request: &[u64]) -> io::Result<wire::Words> {
        self.line.call(request)
    }

    fn call_range(&self, what: u64, range: Range<usize>, more: u64) -> io::Result<wire::Words> {
        let (from, to) = pages_of(range, self.len())?;
        self.call(&[what, from, to, more])
    }

    /// Length of the region in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pages as usize * crate::frames::arena::PAGE
    }

    /// Whether its length is zero: never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// The page map, without the bits that belong to a mapping.
    #[must_use]
    pub fn page_map(&self) -> &View {
        &self.view
    }

    /// Pages out a range; returns the pages that left. Pages touched meanwhile stay.
    ///
    /// # Errors
    /// `InvalidInput`: not within the region. `UnexpectedEof`: the owner is gone.
    pub fn page_out(&self, range: Range<usize>) -> io::Result<u64> {
        self.call_range(op::PAGEOUT, range, 0).map(|w| w[1])
    }

    /// Brings pages of a range that are out into memory; returns how many came.
    ///
    /// # Errors
    /// As [`SharedControl::page_out`].
    pub fn page_in(&self, range: Range<usize>) -> io::Result<u64> {
        self.call_range(op::PAGEIN, range, 0).map(|w| w[1])
    }

    /// Drops a range's contents, in memory and out: it reads as zeros, and for every mapping is as if never touched. So do lost
    /// pages, also in a process that has had SIGBUS there.
    ///
    /// # Errors
    /// `ResourceBusy`: there is a pin. `WouldBlock`: it is done, but a process that is stopped in a call of `madvise` still gets
    /// SIGBUS where it got it before. As [`SharedControl::page_out`].
    pub fn remove(&self, range: Range<usize>) -> io::Result<()> {
        self.call_range(op::REMOVE, range, 0).map(drop)
    }

    /// Begins a round of ageing: each mapping drops its PTEs, so that pages in use show themselves by a (cheap) fault.
    /// [`SharedControl::page_out_idle`] and [`SharedControl::working_set`] know only what rounds have shown.
    ///
    /// # Errors
    /// `UnexpectedEof`: the owner is gone.
    pub fn age(&self) -> io::Result<()> {
        self.call(&[op::AGE]).map(drop)
    }

    /// Pages out what was not touched since the last round that began at least `time` ago; returns the pages that left.
    ///
    /// # Errors
    /// `UnexpectedEof`: the owner is gone.
    pub fn page_out_idle(&self, time: Duration) -> io::Result<u64> {
        self.call(&[op::IDLE, milliseconds(time)]).map(|w| w[1])
    }

    /// Pages in memory that were touched since the last round that began at least `time` ago (without such a round, all pages in
    /// memory).
    ///
    /// # Errors
    /// `UnexpectedEof`: the owner is gone.
    pub fn working_set(&self, time: Duration) -> io::Result<u64> {
        self.call(&[op::WORKING_SET, milliseconds(time)]).map(|w| w[1])
    }

    /// Figures of the region.
    ///
    /// # Errors
    /// `UnexpectedEof`: the owner is gone.
    pub fn stats(&self) -> io::Result<SharedStats> {
        let stats = SharedStats::of(&self.call(&[op::STATS])?);
        let more = self.call(&[op::MORE_STATS])?;
        Ok(SharedStats { doubts: more[2], unvouched: more[3], near_faults: more[4], ..stats })
    }

    /// Whether the owner sees what processes remove by `madvise(MADV_REMOVE)`. It does if it may serve the kernel's own faults.
    /// Otherwise such a call drops only pages in memory; use [`SharedControl::remove`] instead.
    #[must_use]
    pub fn sees_removes(&self) -> bool {
        self.sees_removes
    }

    /// For tests: makes a rare event happen.
    ///
    /// # Errors
    /// `PermissionDenied`: the region was not made for that. `UnexpectedEof`: the owner is gone.
    #[doc(hidden)]
    pub fn inject(&self, what: u64, n: u64) -> io::Result<()> {
        self.call(&[op::INJECT, what, n]).map(drop)
    }

    /// Write-protects a range in every mapping, those made later included, or only in the mapping with number `mapping`. Threads that
    /// write to it wait until [`SharedControl::unprotect`], and [`SharedControl::next_write`] reports them. One connection of a
    /// region can do that at a time. When the connection ends so does the protection.
    ///
    /// # Errors
    /// `ResourceBusy`: another connection does it. `NotFound`: no such mapping. `WouldBlock`: a process that is stopped in a call
    /// of `madvise` did not go on within 20 seconds; a part of the range may then be protected, which
    /// [`SharedControl::unprotect`] ends. As [`SharedControl::page_out`].
    pub fn protect(&self, range: Range<usize>, mapping: Option<u64>) -> io::Result<()> {
        self.call_range(op::PROTECT, range, mapping.unwrap_or(wire::ALL)).map(drop)
    }

    /// Ends write-protection and lets the writers go on, whichever connection asked for it.
    ///
    /// # Errors
    /// As [`SharedControl::page_out`].
    pub fn unprotect(&self, range: Range<usize>, mapping: Option<u64>) -> io::Result<()> {
        self.call_range(op::UNPROTECT, range, mapping.unwrap_or(wire::ALL)).map(drop)
    }

    /// Waits for a write to a protected page. Returns the offset of the page in the region (bytes), or None after `time`. Other
    /// calls on this connection wait meanwhile.
    ///
    /// # Errors
    /// `UnexpectedEof`: the owner is gone.
    pub fn next_write(&self, time: Duration) -> io::Result<Option<usize>> {
        let w = self.call(&[op::NEXT_WRITE, milliseconds(time)])?;
        Ok((w[1] != 0).then_some(w[2] as usize * crate::frames::arena::PAGE))
    }
}

/// A shared region, mapped in this process; unmapped when dropped.
///
/// What must not be done with the memory: see the module, *Behind our back* and *The kernel's own accesses*.
pub struct SharedMapping {
    attached: Box<Attached>,
}

impl std::fmt::Debug for SharedMapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedMapping").field("base", &self.attached.base).field("len", &self.attached.len).finish()
    }
}

impl SharedMapping {
    /// Attaches the region served at `path`.
    ///
    /// # Errors
    /// `PermissionDenied`: the owner is another user, or this process may not use userfaultfd. The kernel's.
    pub fn attach(path: &Path) -> io::Result<Self> {
        let path = std::path::absolute(path)?;
        Ok(Self { attached: Attached::new(attach::connect(&path)?, Arc::new(path.into()))? })
    }

    /// Address of the first byte. Others write to the memory meanwhile, so no references into it may be formed except to atomics.
    #[must_use]
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.attached.base as *mut u8
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.attached.len
    }

    /// Whether its length is zero: never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.attached.len == 0
    }

    /// The mapping's number, for [`SharedControl::protect`]. A forked child's mapping has another.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.attached.id()
    }

    /// Whether system calls may be given pointers to pages that are out (otherwise they fail with EFAULT).
    #[must_use]
    pub fn kernel_faults(&self) -> bool {
        self.attached.kernel_faults()
    }

    /// Whether the owner sees what this process removes by `madvise(MADV_REMOVE)`: see [`SharedControl::sees_removes`].
    #[must_use]
    pub fn sees_removes(&self) -> bool {
        self.attached.sees_removes()
    }

    /// The page map of this mapping.
    #[must_use]
    pub fn page_map(&self) -> View {
        self.attached.view()
    }

    /// See [`SharedControl::page_out`].
    ///
    /// # Errors
    /// As there.
    pub fn page_out(&self, range: Range<usize>) -> io::Result<u64> {
        self.attached.call_range(op::PAGEOUT, range, 0).map(|w| w[1])
    }

    /// See [`SharedControl::page_in`]; the pages are mapped here, too.
    ///
    /// # Errors
    /// As there.
    pub fn page_in(&self, range: Range<usize>) -> io::Result<u64> {
        self.attached.call_range(op::PAGEIN, range, 0).map(|w| w[1])
    }

    /// See [`SharedControl::remove`].
    ///
    /// # Errors
    /// As there.
    pub fn remove(&self, range: Range<usize>) -> io::Result<()> {
        self.attached.call_range(op::REMOVE, range, 0).map(drop)
    }

    /// Clears this mapping's soft-dirty bits of a range; the next write to each page sets its bit again. Before bits are first
    /// cleared every page counts as written, as in the kernel.
    ///
    /// # Errors
    /// `WouldBlock`: a call of `madvise` in this process has not gone on for 20 seconds; no bit is cleared. As
    /// [`SharedControl::page_out`].
    pub fn clear_soft_dirty(&self, range: Range<usize>) -> io::Result<()> {
        self.attached.call_range(op::CLEAR_SOFT_DIRTY, range, 0).map(drop)
    }

    /// Clears this mapping's soft-dirty bits of a range and returns the numbers of the pages whose bit was set: in one step, so
    /// that no write is missed.
    ///
    /// # Errors
    /// As [`SharedMapping::clear_soft_dirty`]. Of a range of more than 896 pages, the bits of a part may have been cleared, and
    /// are lost.
    pub fn take_soft_dirty(&self, range: Range<usize>) -> io::Result<Vec<u64>> {
        let (mut at, to) = pages_of(range, self.len())?;
        let mut dirty = Vec::new();
        while at < to {
            let end = to.min(at + calls::TAKE_PAGES);
            let words = self.attached.call(&[op::CLEAR_SOFT_DIRTY, at, end])?;
            dirty.extend((at..end).filter(|p| words[2 + ((p - at) / 64) as usize] & (1 << ((p - at) % 64)) != 0));
            at = end;
        }
        Ok(dirty)
    }

    /// For tests: sets a marker's byte to any value, to see what becomes of an unknown one.
    ///
    /// # Errors
    /// As [`SharedControl::page_out`].
    #[doc(hidden)]
    pub fn inject_marker(&self, page: u64, byte: u8) -> io::Result<()> {
        self.attached.call(&[op::INJECT_MARKER, page, u64::from(byte)]).map(drop)
    }
}

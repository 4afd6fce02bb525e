//! Where a worker's memory comes from; only this module knows.

use std::io;
use std::ops::Range;
use uzswap_pager::region::{Options, Region};

/// Memory a workload runs on. Private to one worker, readable and writable, zero at first.
pub trait Memory {
    /// The first byte, page-aligned.
    fn base(&self) -> *mut u8;
    /// The length in bytes, whole pages.
    fn len(&self) -> usize;
    /// Whether the length is 0.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Drops the contents of a range of whole pages, which then reads as zeros.
    fn drop_range(&self, range: Range<usize>);
    /// Bytes that its own compressed pool holds, if it has one.
    fn pool(&self) -> u64 {
        0
    }
}

/// The sources of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Origin {
    /// The kernel's anonymous memory, as in any program.
    Anonymous,
    /// A region of the uzswap library, which enforces the limit itself.
    Region,
}

/// Takes `len` bytes from `origin`. `limit` is for an [`Origin::Region`]; `uncharged` leaves its compressed pool out of that, as
/// a cgroup v1 does with the kernel's.
///
/// # Errors
/// When the memory cannot be had: why.
pub fn take(origin: Origin, len: usize, limit: u64, uncharged: bool) -> Result<Box<dyn Memory>, String> {
    match origin {
        Origin::Anonymous => Ok(Box::new(Anonymous::map(len).map_err(|e| format!("cannot map {len} bytes: {e}"))?)),
        Origin::Region => {
            let options = Options { pool_uncharged: uncharged, ..Options::new(limit as usize) };
            Ok(Box::new(Region::new(len, &options).map_err(|e| e.to_string())?))
        }
    }
}

impl Memory for Region {
    fn base(&self) -> *mut u8 {
        self.as_mut_ptr()
    }

    fn len(&self) -> usize {
        self.len()
    }

    fn drop_range(&self, range: Range<usize>) {
        self.remove(range);
    }

    fn pool(&self) -> u64 {
        self.stats().pool as u64
    }
}

/// A private anonymous mapping.
struct Anonymous {
    base: *mut u8,
    len: usize,
}

impl Anonymous {
    fn map(len: usize) -> io::Result<Self> {
        // SAFETY: a new private mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self { base: base.cast(), len }) }
    }
}

impl Memory for Anonymous {
    fn base(&self) -> *mut u8 {
        self.base
    }

    fn len(&self) -> usize {
        self.len
    }

    fn drop_range(&self, range: Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: the mapping is ours, and nobody holds a reference into it.
        unsafe {
            libc::madvise(self.base.add(range.start).cast(), range.end - range.start, libc::MADV_DONTNEED);
        }
    }
}

impl Drop for Anonymous {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody else holds a pointer into it.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

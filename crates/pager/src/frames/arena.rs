//! The address range that uzswap keeps for itself, and the only place where its bytes become slices.
//!
//! ```text
//! base ─ heap (the agent's allocator) ─ stacks ─ scratch, bells ─┬ guard ┬─ arena: slots of 4 KiB ─┬ guard ┬─ pool: compressed objects ─
//! ```
//! It is one reservation, so that one range check tells uzswap's memory from the program's. Guards keep the arena's mapping from
//! merging with others, as UFFDIO_MOVE refuses to cross mappings. The arena is registered with the pager's userfaultfd, as the
//! target of a MOVE must be, but not for faults on missing pages, which nobody could serve: a frame that the program had given up
//! and the kernel took reads as zeros (`transfer::settle`). The heap and the pool are plain memory.

use core::ops::Range;
use uzswap_sys::raw::Errno;
use uzswap_sys::sys;

/// Bytes in a page.
pub const PAGE: usize = 4096;

/// The pages (numbers) that a range of bytes touches; none for an empty range.
#[must_use]
pub fn pages_of(bytes: &Range<usize>) -> Range<u64> {
    let first = (bytes.start / PAGE) as u64;
    if bytes.is_empty() { first..first } else { first..bytes.end.div_ceil(PAGE) as u64 }
}
/// Address space for the agent's own allocations (bytes; not memory).
pub const HEAP_BYTES: usize = 8 << 30;
const STACKS_BYTES: usize = 8 << 20;
const GUARD: usize = 2 << 20;
// What lies before the arena must keep it aligned to huge pages.
const _: () = assert!((HEAP_BYTES | STACKS_BYTES | SCRATCH_BYTES) & (GUARD - 1) == 0);
/// Bytes of a scratch place, to which pages are taken on a kernel without MOVE: see `without_move`.
pub const SCRATCH_BYTES: usize = 2 << 20;
/// Number of scratch places: one that was lost is not used again.
pub const SCRATCHES: usize = 64;
/// Bytes of the two pages by which a thread of the program rings for the handler: see `remapped`.
pub const BELL_BYTES: usize = 2 * PAGE;
/// Bytes of address space for compressed objects. (A handle reaches 128 GiB.)
pub const POOL_BYTES: usize = 64 << 30;

/// Where all of uzswap's memory is.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// First byte of the reservation.
    pub base: usize,
    /// One past its last byte.
    pub end: usize,
    /// Stacks of the helper threads.
    pub stacks: usize,
    /// The scratch places, for a kernel without MOVE (inaccessible otherwise).
    pub scratch: usize,
    /// The two pages that ring for the handler, on such a kernel.
    pub bells: usize,
    /// First slot.
    pub arena: usize,
    /// Number of slots.
    pub slots: usize,
    /// First byte of the pool.
    pub pool: usize,
}

/// The mapping flags of a reservation.
const RESERVED: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// Reserves address space that is inaccessible until it is [opened](open).
///
/// # Errors
/// The kernel's.
pub(crate) fn reserve(len: usize) -> Result<usize, Errno> {
    // SAFETY: a fresh mapping.
    unsafe { sys!(libc::SYS_mmap, 0, len, libc::PROT_NONE, RESERVED, -1isize, 0) }
}

/// Makes a new, inaccessible mapping readable and writable, without giving it a page.
///
/// The story: a program had locked its memory (`mlockall` with MCL_FUTURE), and the kernel then fills what is mapped before it
/// can be registered. It filled a shared region's holes with zeros; those were read instead of what was out, and writes to them
/// were seen by nobody else. (It also filled all of a reservation of 75 GB.) The kernel does not fill inaccessible memory, nor
/// memory that is unlocked before it becomes accessible.
///
/// # Errors
/// The kernel's.
pub(crate) fn open(at: usize, len: usize) -> Result<(), Errno> {
    // SAFETY: callers pass their own mappings, which nobody uses yet.
    unsafe {
        sys!(libc::SYS_munlock, at, len)?;
        sys!(libc::SYS_mprotect, at, len, libc::PROT_READ | libc::PROT_WRITE).map(drop)
    }
}

impl Layout {
    /// Reserves the range for a limit of `limit` bytes and makes heap, stacks, arena and pool accessible.
    ///
    /// # Errors
    /// `ENOMEM` when there is no address space (a small `ulimit -v` or `-d`). Nothing of it is left then: the program may have
    /// less than this.
    pub fn reserve(limit: usize) -> Result<Self, Errno> {
        let slots = (limit.saturating_add(64 << 20).max(128 << 20) / PAGE).next_multiple_of(512).min((1 << 25) - 512);
        let len = HEAP_BYTES + STACKS_BYTES + SCRATCHES * SCRATCH_BYTES + slots * PAGE + POOL_BYTES + 7 * GUARD;
        let raw = reserve(len)?;
        Self::within(raw, len, slots).inspect_err(|_| {
            // SAFETY: our reservation, or what is left of it, which holds nothing yet.
            let _ = unsafe { sys!(libc::SYS_munmap, raw, len) };
        })
    }

    /// Whether [`Layout::reserve`] succeeds here; gives back what it reserved.
    #[must_use]
    pub fn can_be_reserved(limit: usize) -> bool {
        let reserved = Self::reserve(limit);
        if let Ok(layout) = &reserved {
            // SAFETY: reserved just now, and used by nobody.
            let _ = unsafe { sys!(libc::SYS_munmap, layout.base, layout.end - layout.base) };
        }
        reserved.is_ok()
    }

    /// Lays everything out in a reservation of `len` bytes at `raw`.
    fn within(raw: usize, len: usize, slots: usize) -> Result<Self, Errno> {
        let base = raw.next_multiple_of(GUARD);
        if base > raw {
            // SAFETY: the head of our reservation, which alignment leaves unused.
            let _ = unsafe { sys!(libc::SYS_munmap, raw, base - raw) };
        }
        let stacks = base + HEAP_BYTES;
        let scratch = stacks + STACKS_BYTES + GUARD;
        let bells = scratch + SCRATCHES * SCRATCH_BYTES + GUARD;
        let arena = bells + 2 * GUARD;
        let pool = (arena + slots * PAGE).next_multiple_of(GUARD) + GUARD;
        for (at, n) in [(base, HEAP_BYTES + STACKS_BYTES), (arena, slots * PAGE), (pool, POOL_BYTES - GUARD)] {
            open(at, n)?;
            // SAFETY: advice on our own mappings.
            unsafe {
                let _ = sys!(libc::SYS_madvise, at, n, libc::MADV_NOHUGEPAGE);
                let _ = sys!(libc::SYS_madvise, at, n, libc::MADV_DONTDUMP);
            }
        }
        Ok(Self { base, end: raw + len, stacks, scratch, bells, arena, slots, pool })
    }

    /// Whether an address is uzswap's own.
    pub fn owns(&self, at: usize) -> bool {
        (self.base..self.end).contains(&at)
    }

    /// An address at which there is never anything to read.
    pub fn unreadable(&self) -> usize {
        self.bells - GUARD
    }

    /// The address of a slot.
    pub fn slot(&self, slot: u32) -> usize {
        self.arena + slot as usize * PAGE
    }

    /// The frames in `n` consecutive slots.
    ///
    /// # Safety
    /// The slots must hold frames that the caller owns (by the pager's lock, or as pages that are Busy) and that nobody moves or
    /// writes to.
    pub unsafe fn frames(&self, slot: u32, n: usize) -> &[u8] {
        // SAFETY: as the caller says.
        unsafe { core::slice::from_raw_parts(self.slot(slot) as *const u8, n * PAGE) }
    }

    /// The frames in `n` consecutive slots, to be filled.
    ///
    /// # Safety
    /// As for [`Layout::frames`], and nobody else may read them.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn frames_mut(&self, slot: u32, n: usize) -> &mut [u8] {
        // SAFETY: as the caller says.
        unsafe { core::slice::from_raw_parts_mut(self.slot(slot) as *mut u8, n * PAGE) }
    }

    /// `len` bytes of the pool.
    ///
    /// # Safety
    /// The range must belong to one live object, and the pager's lock must be held.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn pool(&self, offset: usize, len: usize) -> &mut [u8] {
        // SAFETY: as the caller says; the pool is plain zero-initialised memory.
        unsafe { core::slice::from_raw_parts_mut((self.pool + offset) as *mut u8, len) }
    }
}

/// Maps part of the arena anew, with neither memory nor a page table. False when the kernel refuses; then nothing has changed.
///
/// # Safety
/// Nobody may need the contents, and the range must not be registered.
pub unsafe fn remap(at: usize, len: usize) -> bool {
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, RESERVED | libc::MAP_FIXED);
    // SAFETY: the mapping replaces part of our own, whose contents nobody needs, as the caller says.
    let mapped = unsafe { sys!(libc::SYS_mmap, at, len, prot, flags, -1isize, 0) }.is_ok();
    if mapped {
        // If the program locks what it maps, there is memory in it by now.
        // SAFETY: as above; the new mapping holds nothing that anybody needs.
        let _ = unsafe { sys!(libc::SYS_munlock, at, len).map(|_| discard(at, len)) };
        for advice in [libc::MADV_NOHUGEPAGE, libc::MADV_DONTDUMP] {
            // SAFETY: advice on our own mapping.
            let _ = unsafe { sys!(libc::SYS_madvise, at, len, advice) };
        }
    }
    mapped
}

/// Takes a huge page from the kernel for an aligned part of the arena that has neither memory nor a page table. False when there
/// was none; then part of the range may have memory.
///
/// # Safety
/// Nobody else may touch the range, which must not be registered.
pub unsafe fn touch_huge(at: usize, len: usize) -> bool {
    // SAFETY: advice on our own mapping.
    let advise = |advice: i32| unsafe { sys!(libc::SYS_madvise, at, len, advice) };
    if advise(libc::MADV_HUGEPAGE).is_err() {
        return false;
    }
    // SAFETY: the arena is readable and writable, and the range is not registered: no fault comes to us.
    unsafe { (at as *mut u8).write_volatile(0) };
    // The same advice as its neighbours', so that they are one mapping, which a MOVE must not leave.
    advise(libc::MADV_NOHUGEPAGE).is_ok()
}

/// Reserves a part of uzswap's range that may have become unmapped; returns whether it is uzswap's.
pub fn reserve_again(at: usize, len: usize) -> bool {
    let flags = RESERVED | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: a new mapping, where there is none.
    unsafe { sys!(libc::SYS_mmap, at, len, libc::PROT_NONE, flags, -1isize, 0) }.is_ok()
}

/// Gives the whole pages of a buffer back to the kernel. Their contents are lost; they take memory again when written to.
pub fn vacate(buffer: &mut [u8]) {
    let (start, end) = (buffer.as_ptr() as usize, buffer.as_ptr_range().end as usize);
    let (first, last) = (start.next_multiple_of(PAGE), end & !(PAGE - 1));
    if first < last {
        // SAFETY: the caller's own memory, in which any bytes will do. (Where it is locked, or not plain, it keeps its bytes.)
        unsafe { discard(first, last - first) };
    }
}

/// Gives plain memory back to the kernel; false where the kernel refuses (locked memory).
///
/// # Safety
/// Nobody may need the contents.
pub unsafe fn discard(at: usize, len: usize) -> bool {
    // SAFETY: as the caller says.
    unsafe { sys!(libc::SYS_madvise, at, len, libc::MADV_DONTNEED) }.is_ok()
}

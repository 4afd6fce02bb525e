//! The agent's own allocator: dlmalloc over the heap part of uzswap's reservation, behind its own lock.
//!
//! It is never the program's malloc, whose lock a thread of the program may hold while it waits for us.

use core::alloc::{GlobalAlloc, Layout};
use core::sync::atomic::{AtomicUsize, Ordering::*};
use dlmalloc::{Allocator, Dlmalloc};
use uzswap_pager::frames::arena;
use uzswap_sys::lock::Lock;

static NEXT: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);

/// Sets where the heap is. Must precede the first allocation.
pub fn init(base: usize) {
    NEXT.store(base, Release);
    END.store(base + arena::HEAP_BYTES, Release);
}

/// From this size on, zeroed memory is not written to before it is used. dlmalloc clears whatever it does not know to
/// be fresh, which is everything here. Two buffers of 320 KiB each for the output of batches were most of what a small
/// process paid for being managed, and it never used more than a page or two of them.
const LARGE: usize = 64 << 10;

struct Reservation;

// SAFETY: ranges are handed out once, from fresh zeroed memory; a freed range is discarded and not reused.
unsafe impl Allocator for Reservation {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let at = NEXT.fetch_add(size, AcqRel);
        if at == 0 || at + size > END.load(Acquire) { (core::ptr::null_mut(), 0, 0) } else { (at as *mut u8, size, 0) }
    }
    fn remap(&self, _: *mut u8, _: usize, _: usize, _: bool) -> *mut u8 {
        core::ptr::null_mut()
    }
    fn free_part(&self, ptr: *mut u8, old: usize, new: usize) -> bool {
        // SAFETY: dlmalloc says that nothing lives there any more.
        unsafe { arena::discard(ptr as usize + new, old - new) };
        true
    }
    fn free(&self, ptr: *mut u8, size: usize) -> bool {
        // SAFETY: as above.
        unsafe { arena::discard(ptr as usize, size) };
        true
    }
    fn can_release_part(&self, _: u32) -> bool {
        true
    }
    fn allocates_zeros(&self) -> bool {
        true
    }
    fn page_size(&self) -> usize {
        arena::PAGE
    }
}

/// Zeroes memory by giving its whole pages back: they take memory again only when touched.
///
/// # Safety
/// The caller owns the range, which lies in the heap.
unsafe fn clear(at: *mut u8, len: usize) {
    let (start, end) = (at as usize, at as usize + len);
    let (first, last) = (start.next_multiple_of(arena::PAGE), end & !(arena::PAGE - 1));
    // SAFETY: the caller owns the range; being at least `LARGE`, it contains a whole page.
    unsafe {
        at.write_bytes(0, first - start);
        (last as *mut u8).write_bytes(0, end - last);
        if !arena::discard(first, last - first) {
            // Locked memory stays.
            (first as *mut u8).write_bytes(0, last - first);
        }
    }
}

struct Heap(Lock<Dlmalloc<Reservation>>);

// SAFETY: dlmalloc meets the contract, and the lock serialises it.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, l: Layout) -> *mut u8 {
        // SAFETY: the caller's layout is valid.
        unsafe { self.0.lock().malloc(l.size(), l.align()) }
    }
    unsafe fn dealloc(&self, p: *mut u8, l: Layout) {
        // SAFETY: the caller passes a pointer from this allocator, with its layout.
        unsafe { self.0.lock().free(p, l.size(), l.align()) }
    }
    unsafe fn alloc_zeroed(&self, l: Layout) -> *mut u8 {
        if l.size() < LARGE {
            // SAFETY: the caller's layout is valid.
            return unsafe { self.0.lock().calloc(l.size(), l.align()) };
        }
        // SAFETY: as above.
        let at = unsafe { self.alloc(l) };
        if !at.is_null() {
            // SAFETY: it was just allocated, with that size.
            unsafe { clear(at, l.size()) };
        }
        at
    }
    unsafe fn realloc(&self, p: *mut u8, l: Layout, n: usize) -> *mut u8 {
        // SAFETY: the caller passes a pointer from this allocator, with its layout.
        unsafe { self.0.lock().realloc(p, l.size(), l.align(), n) }
    }
}

/// Called before a fork, with the pager's lock held: waits until nobody allocates, and keeps it so until [`go_on`].
/// Otherwise a child would wait forever for a thread that it does not have.
///
/// The story: a rule said that nothing is allocated without the pager's lock, which a fork takes. But a thread that
/// began to serve faults did, and so did one that gave others work to compress. A child stood still, twice in some
/// fifteen runs of a program that forks under page-outs.
pub fn stop() {
    core::mem::forget(HEAP.0.lock());
}

/// Called after the fork, in the parent and in the child.
///
/// # Safety
/// The calling thread must have called [`stop`], or be the child's copy of one that did.
pub unsafe fn go_on() {
    // SAFETY: the calling thread holds the lock, as the caller promises, and `stop` forgot the guard.
    unsafe { HEAP.0.force_unlock() }
}

#[cfg_attr(not(test), global_allocator)]
#[cfg_attr(test, allow(dead_code))]
static HEAP: Heap = Heap(Lock::new(Dlmalloc::new_with_allocator(Reservation)));

#[cfg(test)]
mod tests {
    use super::*;
    use uzswap_sys::sys;

    /// Pages of `[at, at + len)` that are in memory.
    fn resident(at: *mut u8, len: usize) -> usize {
        let start = at as usize & !(arena::PAGE - 1);
        let pages = (at as usize + len - start).div_ceil(arena::PAGE);
        let mut seen = vec![0u8; pages];
        // SAFETY: a byte for each page, ours.
        unsafe { sys!(libc::SYS_mincore, start, pages * arena::PAGE, seen.as_mut_ptr()) }.expect("mincore");
        seen.iter().filter(|page| **page & 1 != 0).count()
    }

    /// With forks: `forks_under_page_outs`.
    #[test]
    fn nobody_allocates_until_a_fork_is_made() {
        stop();
        assert!(HEAP.0.is_locked());
        // SAFETY: stopped above.
        unsafe { go_on() };
        assert!(!HEAP.0.is_locked());
    }

    /// The story: a managed process had a mebibyte of tables before it had any page out, most of it zeroed buffers of
    /// which it used a page or two. For thirty small processes that was more than their limit.
    #[test]
    fn large_zeros_take_no_memory_before_they_are_used() {
        let (flags, rw) =
            (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: a new mapping.
        let base = unsafe { sys!(libc::SYS_mmap, 0, arena::HEAP_BYTES, rw, flags, -1isize, 0) }.expect("mmap");
        init(base);
        let heap = Heap(Lock::new(Dlmalloc::new_with_allocator(Reservation)));
        let lens = [LARGE - 1, LARGE, LARGE + 1, (320 << 10) - 8, 320 << 10, (1 << 20) + 100];
        let mut reused = 0;
        for (len, align) in lens.into_iter().flat_map(|len| [1, 64, arena::PAGE].map(|align| (len, align))) {
            let layout = Layout::from_size_align(len, align).expect("a layout");
            // SAFETY: what is allocated is used within its bounds, and freed once.
            unsafe {
                let (used, behind) = (heap.alloc(layout), heap.alloc(layout));
                assert!(!used.is_null() && !behind.is_null());
                used.write_bytes(0xa5, len);
                behind.write_bytes(0x5a, len);
                heap.dealloc(used, layout);
                let zeros = heap.alloc_zeroed(layout);
                assert!((zeros as usize).is_multiple_of(align), "{len} {align}");
                reused += usize::from(zeros == used);
                if len >= LARGE {
                    let pages = resident(zeros, len);
                    assert!(pages <= 2, "{len} {align}: {pages} pages");
                }
                assert!(core::slice::from_raw_parts(zeros, len).iter().all(|byte| *byte == 0), "{len} {align}");
                assert!(core::slice::from_raw_parts(behind, len).iter().all(|byte| *byte == 0x5a), "{len} {align}");
                zeros.write_bytes(0xa5, len);
                // Where the test may lock memory: locked memory cannot be given back.
                let locked = sys!(libc::SYS_mlock, zeros, len).is_ok();
                heap.dealloc(zeros, layout);
                let again = heap.alloc_zeroed(layout);
                assert!(
                    core::slice::from_raw_parts(again, len).iter().all(|byte| *byte == 0),
                    "{len} {align} {locked}"
                );
                again.write_bytes(0xa5, len);
                let _ = sys!(libc::SYS_munlock, zeros, len);
                heap.dealloc(again, layout);
                heap.dealloc(behind, layout);
            }
        }
        assert!(reused > 0, "nothing was met that had been used before");
    }
}

//! The agent's own allocator: dlmalloc over the heap part of uzswap's reservation, behind a lock of its own.
//!
//! Never the program's malloc: a thread of the program may hold its lock while it waits for us.

use core::alloc::{GlobalAlloc, Layout};
use core::sync::atomic::{AtomicUsize, Ordering::*};
use dlmalloc::{Allocator, Dlmalloc};
use uzswap_pager::arena;
use uzswap_sys::lock::Lock;

static NEXT: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);

/// Says where the heap is. Must come before the first allocation.
pub fn init(base: usize) {
    NEXT.store(base, Release);
    END.store(base + arena::HEAP_BYTES, Release);
}

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

struct Heap(Lock<Dlmalloc<Reservation>>);

// SAFETY: dlmalloc meets the contract; the lock serialises it.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, l: Layout) -> *mut u8 {
        // SAFETY: the caller's layout is valid.
        unsafe { self.0.lock().malloc(l.size(), l.align()) }
    }
    unsafe fn dealloc(&self, p: *mut u8, l: Layout) {
        // SAFETY: as the caller says.
        unsafe { self.0.lock().free(p, l.size(), l.align()) }
    }
    unsafe fn alloc_zeroed(&self, l: Layout) -> *mut u8 {
        // SAFETY: the caller's layout is valid.
        unsafe { self.0.lock().calloc(l.size(), l.align()) }
    }
    unsafe fn realloc(&self, p: *mut u8, l: Layout, n: usize) -> *mut u8 {
        // SAFETY: as the caller says.
        unsafe { self.0.lock().realloc(p, l.size(), l.align(), n) }
    }
}

#[global_allocator]
static HEAP: Heap = Heap(Lock::new(Dlmalloc::new_with_allocator(Reservation)));

//! A C codec's state: memory from Rust's global allocator, at a fixed address, freed on drop.
//!
//! Only raw pointers to it are ever formed, since the C side keeps pointers into it.
#![allow(unsafe_code)] // It is an allocation behind a raw pointer.

use core::ffi::c_void;
use core::ptr::NonNull;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

/// Bytes aligned to a cache line, zeroed at first.
pub(super) struct Workspace {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is owned and not tied to a thread; every use goes through `&mut self`.
unsafe impl Send for Workspace {}

impl Workspace {
    pub(super) fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes.max(1), 64).expect("a workspace is far smaller than isize::MAX");
        // SAFETY: the size is not 0.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        Self { start, layout }
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut c_void {
        self.start.as_ptr().cast()
    }

    pub(super) fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and freed only here.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

//! The wall around libdeflate: raw deflate, with objects from Rust's global allocator.
//!
//! libdeflate allocates only when it makes an object, through functions that the caller provides. Ours store the size
//! in front of the memory, as its `free` does not pass the size.
#![allow(unsafe_code)] // FFI.

use core::ffi::{c_int, c_void};
use core::ptr::{NonNull, null_mut};
use libdeflate_sys::{
    libdeflate_alloc_compressor_ex, libdeflate_alloc_decompressor_ex, libdeflate_compressor, libdeflate_decompressor,
    libdeflate_deflate_compress, libdeflate_deflate_decompress_ex, libdeflate_free_compressor,
    libdeflate_free_decompressor, libdeflate_options, libdeflate_result_LIBDEFLATE_SUCCESS,
};
use std::alloc::{Layout, alloc, dealloc};

/// Bytes before each allocation, where its size is kept; as much as malloc aligns to.
const HEADER: usize = 16;

fn layout(size: usize) -> Option<Layout> {
    Layout::from_size_align(size.checked_add(HEADER)?, HEADER).ok()
}

/// malloc's contract.
///
/// # Safety
/// None beyond being handed to libdeflate together with [`release`].
unsafe extern "C" fn allocate(size: usize) -> *mut c_void {
    let Some(layout) = layout(size) else {
        return null_mut();
    };
    // SAFETY: the layout is at least HEADER bytes; when the allocation succeeds, its first HEADER bytes are ours and
    // aligned for a usize, and what follows is the caller's.
    unsafe {
        let start = alloc(layout);
        if start.is_null() {
            return null_mut();
        }
        start.cast::<usize>().write(size);
        start.add(HEADER).cast()
    }
}

/// free's contract.
///
/// # Safety
/// `memory` is null or came from [`allocate`] and is not used again.
unsafe extern "C" fn release(memory: *mut c_void) {
    if memory.is_null() {
        return;
    }
    // SAFETY: `allocate` put the size HEADER bytes before, and made the layout from it.
    unsafe {
        let start = memory.cast::<u8>().sub(HEADER);
        let size = start.cast::<usize>().read();
        dealloc(start, layout(size).expect("it was valid in allocate"));
    }
}

fn options() -> libdeflate_options {
    libdeflate_options {
        sizeof_options: size_of::<libdeflate_options>(),
        malloc_func: Some(allocate),
        free_func: Some(release),
    }
}

pub(super) struct Compressor(NonNull<libdeflate_compressor>);

// SAFETY: the object is owned, not tied to a thread, and used only through `&mut self`.
unsafe impl Send for Compressor {}

impl Compressor {
    pub(super) fn new(level: c_int) -> Self {
        // SAFETY: the options are valid during the call, which copies them; the functions keep malloc's contract.
        let object = unsafe { libdeflate_alloc_compressor_ex(level, &options()) };
        Self(NonNull::new(object).expect("memory for libdeflate's compressor, at a level of 1 to 12"))
    }

    /// Returns the length written, or `None` when it does not fit.
    pub(super) fn compress(&mut self, src: &[u8], dst: &mut [u8]) -> Option<usize> {
        // SAFETY: the object is ours; src and dst are valid for their lengths, and it writes at most dst.len().
        let written = unsafe {
            libdeflate_deflate_compress(
                self.0.as_ptr(),
                src.as_ptr().cast(),
                src.len(),
                dst.as_mut_ptr().cast(),
                dst.len(),
            )
        };
        (written > 0).then_some(written)
    }
}

impl Drop for Compressor {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed only here.
        unsafe { libdeflate_free_compressor(self.0.as_ptr()) }
    }
}

pub(super) struct Decompressor(NonNull<libdeflate_decompressor>);

// SAFETY: as for `Compressor`.
unsafe impl Send for Decompressor {}

impl Decompressor {
    pub(super) fn new() -> Self {
        // SAFETY: as in `Compressor::new`.
        let object = unsafe { libdeflate_alloc_decompressor_ex(&options()) };
        Self(NonNull::new(object).expect("memory for libdeflate's decompressor"))
    }

    /// Returns the length decoded, or `None` when `src` is no deflate stream, has bytes after it, or decodes to more
    /// than `dst` holds.
    pub(super) fn decompress(&mut self, src: &[u8], dst: &mut [u8]) -> Option<usize> {
        let (mut read, mut written) = (0, 0);
        // SAFETY: the object is ours; src and dst are valid for their lengths and the decoder stays within both
        // whatever the bytes; both results point to locals.
        let result = unsafe {
            libdeflate_deflate_decompress_ex(
                self.0.as_ptr(),
                src.as_ptr().cast(),
                src.len(),
                dst.as_mut_ptr().cast(),
                dst.len(),
                &mut read,
                &mut written,
            )
        };
        (result == libdeflate_result_LIBDEFLATE_SUCCESS && read == src.len()).then_some(written)
    }
}

impl Drop for Decompressor {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed only here.
        unsafe { libdeflate_free_decompressor(self.0.as_ptr()) }
    }
}

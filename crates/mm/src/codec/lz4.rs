//! The wall around the C library lz4: block format, our state, no allocation by C.
//!
//! Lengths fit C's int: sources are at most 1 GiB (the caller asserts it), `compress` clamps a longer `dst` to `int`'s
//! range, and any other length beyond it yields `None`.
#![allow(unsafe_code)] // FFI.

use super::workspace::Workspace;
use core::ffi::{c_char, c_int, c_void};
// Links the library, which declares only some of the functions below.
use lz4_sys as _;

unsafe extern "C" {
    fn LZ4_sizeofState() -> c_int;
    fn LZ4_initStream(state: *mut c_void, size: usize) -> *mut c_void;
    fn LZ4_compress_fast_extState_fastReset(
        state: *mut c_void,
        src: *const c_char,
        dst: *mut c_char,
        src_len: c_int,
        dst_len: c_int,
        acceleration: c_int,
    ) -> c_int;
    fn LZ4_decompress_safe(src: *const c_char, dst: *mut c_char, src_len: c_int, dst_len: c_int) -> c_int;
    fn LZ4_decompress_safe_partial(
        src: *const c_char,
        dst: *mut c_char,
        src_len: c_int,
        wanted: c_int,
        dst_len: c_int,
    ) -> c_int;
}

/// Trades ratio for speed; see the figures in `codec`.
const ACCELERATION: c_int = 1;

/// A hash table of 16 KiB.
pub(super) struct Compressor {
    state: Workspace,
}

impl Compressor {
    pub(super) fn new() -> Self {
        // SAFETY: takes nothing and only returns a constant.
        let bytes = unsafe { LZ4_sizeofState() };
        let mut state = Workspace::new(bytes as usize);
        // SAFETY: the state has that many bytes, aligned to 64.
        let made = unsafe { LZ4_initStream(state.as_mut_ptr(), bytes as usize) };
        assert!(!made.is_null(), "LZ4_initStream refuses a state of its own size");
        Self { state }
    }

    /// Returns the length written, or `None` when it does not fit.
    pub(super) fn compress(&mut self, src: &[u8], dst: &mut [u8]) -> Option<usize> {
        let src_len = c_int::try_from(src.len()).ok()?;
        let dst_len = c_int::try_from(dst.len()).unwrap_or(c_int::MAX);
        // The state is not cleared for each block: that costs more than compressing a page.
        // SAFETY: the state was initialised in `new` and is only used here; src and dst are valid for their lengths, do
        // not overlap (& and &mut), and it writes at most dst_len.
        let written = unsafe {
            LZ4_compress_fast_extState_fastReset(
                self.state.as_mut_ptr(),
                src.as_ptr().cast(),
                dst.as_mut_ptr().cast(),
                src_len,
                dst_len,
                ACCELERATION,
            )
        };
        usize::try_from(written).ok().filter(|&len| len > 0)
    }
}

/// Returns the length decoded, or `None` when `src` is no LZ4 block or decodes to more than `dst` holds.
pub(super) fn decompress(src: &[u8], dst: &mut [u8]) -> Option<usize> {
    let src_len = c_int::try_from(src.len()).ok()?;
    let dst_len = c_int::try_from(dst.len()).ok()?;
    // SAFETY: src and dst are valid for their lengths and do not overlap; the safe decoder checks every length it
    // reads, and stays within both whatever the bytes.
    let len = unsafe { LZ4_decompress_safe(src.as_ptr().cast(), dst.as_mut_ptr().cast(), src_len, dst_len) };
    usize::try_from(len).ok()
}

/// Decodes until `wanted` bytes are there, or to the end. Returns the length decoded, or `None` when `src` is no LZ4
/// block up to there.
pub(super) fn decompress_start(src: &[u8], dst: &mut [u8], wanted: usize) -> Option<usize> {
    let src_len = c_int::try_from(src.len()).ok()?;
    let dst_len = c_int::try_from(dst.len()).ok()?;
    let wanted = c_int::try_from(wanted.min(dst.len())).ok()?;
    // SAFETY: as in `decompress`; `wanted` is at most dst_len.
    let len =
        unsafe { LZ4_decompress_safe_partial(src.as_ptr().cast(), dst.as_mut_ptr().cast(), src_len, wanted, dst_len) };
    usize::try_from(len).ok()
}

//! The wall around zstd: contexts in our own memory (`ZSTD_initStatic*`), which C never grows or frees.
//!
//! A static context that is too small fails a call instead of allocating. So the workspace is sized for every parameter
//! set that the level can choose for sources up to the maximum. A compression error other than "does not fit" is a
//! broken invariant.
#![allow(unsafe_code)] // FFI.

use super::workspace::Workspace;
use core::ffi::c_int;
use zstd_sys::{
    ZSTD_CCtx, ZSTD_DCtx, ZSTD_ErrorCode, ZSTD_compressCCtx, ZSTD_decompressDCtx, ZSTD_estimateCCtxSize_usingCParams,
    ZSTD_estimateDCtxSize, ZSTD_getCParams, ZSTD_getErrorCode, ZSTD_initStaticCCtx, ZSTD_initStaticDCtx, ZSTD_isError,
};

pub(super) struct Compressor {
    /// Holds the context at its start.
    workspace: Workspace,
    level: c_int,
}

/// Bytes a context needs at `level` for any source up to `source_max`.
pub(super) fn context_bytes(level: c_int, source_max: usize) -> usize {
    let mut bytes = 0;
    let mut source = 1usize;
    // zstd chooses parameters by ranges of sizes that begin and end at powers of two.
    while source < 2 * source_max.max(1) {
        for len in [source.min(source_max.max(1)), (source + 1).min(source_max.max(1))] {
            // SAFETY: plain values in, plain values out.
            bytes = bytes.max(unsafe { ZSTD_estimateCCtxSize_usingCParams(ZSTD_getCParams(level, len as u64, 0)) });
        }
        source *= 2;
    }
    bytes
}

impl Compressor {
    pub(super) fn new(level: c_int, source_max: usize) -> Self {
        let mut workspace = Workspace::new(context_bytes(level, source_max));
        // SAFETY: the workspace is valid for its length, aligned to 64 and lives as long as the context in it.
        let context = unsafe { ZSTD_initStaticCCtx(workspace.as_mut_ptr(), workspace.len()) };
        // Documented: the context is at the workspace's start, or null when that is too small.
        assert_eq!(
            context.cast(),
            workspace.as_mut_ptr(),
            "zstd's workspace of {} bytes is too small",
            workspace.len()
        );
        Self { workspace, level }
    }

    /// Returns the length written, or `None` when it does not fit.
    pub(super) fn compress(&mut self, src: &[u8], dst: &mut [u8]) -> Option<usize> {
        let context: *mut ZSTD_CCtx = self.workspace.as_mut_ptr().cast();
        // SAFETY: `new` initialised the context, it is ours alone, and src and dst are valid for their lengths.
        let written = unsafe {
            ZSTD_compressCCtx(context, dst.as_mut_ptr().cast(), dst.len(), src.as_ptr().cast(), src.len(), self.level)
        };
        // SAFETY: both only look at the number.
        let error = unsafe { (ZSTD_isError(written) != 0).then(|| ZSTD_getErrorCode(written)) };
        match error {
            None => Some(written),
            Some(code) => {
                debug_assert_eq!(code, ZSTD_ErrorCode::ZSTD_error_dstSize_tooSmall, "{} bytes", src.len());
                None
            }
        }
    }
}

pub(super) struct Decompressor {
    /// Holds the context at its start.
    workspace: Workspace,
}

impl Decompressor {
    pub(super) fn new() -> Self {
        // SAFETY: takes nothing and only returns a constant.
        let mut workspace = Workspace::new(unsafe { ZSTD_estimateDCtxSize() });
        // SAFETY: as in `Compressor::new`.
        let context = unsafe { ZSTD_initStaticDCtx(workspace.as_mut_ptr(), workspace.len()) };
        assert_eq!(
            context.cast(),
            workspace.as_mut_ptr(),
            "zstd's workspace of {} bytes is too small",
            workspace.len()
        );
        Self { workspace }
    }

    /// Returns the length decoded, or `None` when `src` is no zstd frame or decodes to more than `dst` holds.
    pub(super) fn decompress(&mut self, src: &[u8], dst: &mut [u8]) -> Option<usize> {
        let context: *mut ZSTD_DCtx = self.workspace.as_mut_ptr().cast();
        // SAFETY: `new` initialised the context, it is ours alone, src and dst are valid for their lengths, and the
        // decoder stays within both whatever the bytes.
        let len =
            unsafe { ZSTD_decompressDCtx(context, dst.as_mut_ptr().cast(), dst.len(), src.as_ptr().cast(), src.len()) };
        // SAFETY: only looks at the number.
        (unsafe { ZSTD_isError(len) } == 0).then_some(len)
    }
}

#[cfg(test)]
mod tests {
    use super::context_bytes;

    /// The best levels have windows of up to 128 MiB for large files. For units of at most 64 KiB they must stay
    /// affordable inside a program that is short of memory.
    #[test]
    fn no_level_takes_much_memory_for_small_units() {
        for source_max in [16 << 10, 64 << 10, 256 << 10, 2 << 20] {
            let all = [1, 3, 9, 19, 20, 21, 22].map(|level| (level, context_bytes(level, source_max)));
            println!("workspace for {source_max} bytes, (level, bytes): {all:?}");
            // (Larger units are for whoever asks for them, and has the memory: see the pager's `unit_max`.)
            assert!(source_max > 64 << 10 || all.iter().all(|(_, bytes)| *bytes < 4 << 20), "{all:?}");
        }
    }
}

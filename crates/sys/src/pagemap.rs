//! `PAGEMAP_SCAN` (Linux 6.7): which pages of a range are there.

use crate::raw::Errno;
use crate::sys;

const PAGEMAP_SCAN: u64 = (3 << 30) | (96 << 16) | ((b'f' as u64) << 8) | 16;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;

/// Calls `found(start, end)` for each run of pages of this process that are present (or swapped by the kernel).
///
/// # Errors
/// The kernel's; `ENOTTY` before 6.7.
pub fn present_runs(fd: i32, start: usize, end: usize, mut found: impl FnMut(usize, usize)) -> Result<(), Errno> {
    let mut at = start as u64;
    let mut regions = [[0u64; 3]; 64];
    while at < end as u64 {
        // size, flags, start, end, walk_end, vec, vec_len, max_pages, inverted, mask, anyof, return
        let mut arg = [96, 0, at, end as u64, 0, regions.as_mut_ptr() as u64, 64, 0, 0, 0, PRESENT | SWAPPED, PRESENT];
        // SAFETY: the structure is 96 bytes and the vector as long as said.
        let n = unsafe { sys!(libc::SYS_ioctl, fd, PAGEMAP_SCAN, arg.as_mut_ptr()) }?;
        for r in &regions[..n] {
            found(r[0] as usize, r[1] as usize);
        }
        if arg[4] <= at {
            break;
        }
        at = arg[4];
    }
    Ok(())
}

//! `PAGEMAP_SCAN` (Linux 6.7) and the pagemap file: which pages of a range are present.

use crate::raw::Errno;
use crate::sys;

const PAGEMAP_SCAN: u64 = (3 << 30) | (96 << 16) | ((b'f' as u64) << 8) | 16;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
const PFNZERO: u64 = 1 << 5;
const HUGE: u64 = 1 << 6;
/// In an entry of the pagemap file: the page is present, or swapped by the kernel.
const THERE: u64 = 3 << 62;
/// In such an entry: the page is present, and mapped in no other process.
const EXCLUSIVE: u64 = 1 << 63 | 1 << 56;
const PAGE: usize = 4096;
/// Bytes of a huge page.
const HUGE_BYTES: usize = 2 << 20;

/// Whether one huge page of 2 MiB is mapped at `at`, which must be aligned to it. False if the kernel cannot say.
pub fn is_huge(fd: i32, at: usize) -> bool {
    let mut region = [0u64; 3];
    let end = (at + HUGE_BYTES) as u64;
    let mut arg = [96, 0, at as u64, end, 0, region.as_mut_ptr() as u64, 1, 0, 0, HUGE | PRESENT, 0, HUGE];
    // SAFETY: the structure is 96 bytes and the vector one long.
    let n = unsafe { sys!(libc::SYS_ioctl, fd, PAGEMAP_SCAN, arg.as_mut_ptr()) };
    n == Ok(1) && region[0] == at as u64 && region[1] == end
}

/// Calls `found(start, end)` for each run of pages of this process that are present, or swapped by the kernel.
///
/// # Errors
/// The kernel's; `ENOTTY` before 6.7.
pub fn present_runs(fd: i32, start: usize, end: usize, found: impl FnMut(usize, usize)) -> Result<(), Errno> {
    runs_with_any(fd, start, end, (PRESENT | SWAPPED, PRESENT), found)
}

/// As [`present_runs`], on a kernel without PAGEMAP_SCAN. It reads 8 bytes for each page of the range.
///
/// # Errors
/// The kernel's.
pub fn present_runs_read(fd: i32, start: usize, end: usize, found: impl FnMut(usize, usize)) -> Result<(), Errno> {
    runs_read(fd, start, end, |entry| entry & THERE != 0, found)
}

/// As [`present_runs`], by either way: when the kernel has no memory for a scan, a read may still work. Runs found by
/// the first way are then found again.
///
/// # Errors
/// The kernel's; some runs may have been found.
pub fn present_runs_any_way(
    fd: i32,
    start: usize,
    end: usize,
    mut found: impl FnMut(usize, usize),
) -> Result<(), Errno> {
    present_runs(fd, start, end, &mut found).or_else(|_| present_runs_read(fd, start, end, &mut found))
}

/// How many pages of a private mapping are present and not its file's: those that were written to.
///
/// # Errors
/// The kernel's.
pub fn anonymous_pages(fd: i32, start: usize, end: usize) -> Result<usize, Errno> {
    const FILE: u64 = 1 << 61;
    let mut own = 0;
    runs_read(fd, start, end, |entry| entry & THERE != 0 && entry & FILE == 0, |from, to| own += (to - from) / PAGE)?;
    Ok(own)
}

/// Calls `found(start, end)` for each run of pages that are present and mapped in no other process. It reads 8 bytes
/// for each page of the range.
///
/// # Errors
/// The kernel's.
pub fn exclusive_runs(fd: i32, start: usize, end: usize, found: impl FnMut(usize, usize)) -> Result<(), Errno> {
    runs_read(fd, start, end, |entry| entry & EXCLUSIVE == EXCLUSIVE, found)
}

/// As [`exclusive_runs`], but for all pages that no other process has, including those not present.
///
/// # Errors
/// The kernel's.
pub fn unshared_runs(fd: i32, start: usize, end: usize, found: impl FnMut(usize, usize)) -> Result<(), Errno> {
    runs_read(fd, start, end, |entry| entry & THERE == 0 || entry & EXCLUSIVE == EXCLUSIVE, found)
}

/// Calls `found(start, end)` for each run of pages whose entries satisfy `are`. It reads 8 bytes for each page of the
/// range.
fn runs_read(
    fd: i32,
    start: usize,
    end: usize,
    are: impl Fn(u64) -> bool,
    mut found: impl FnMut(usize, usize),
) -> Result<(), Errno> {
    let mut entries = [0u64; 512];
    let (mut at, mut run) = (start, None);
    while at < end {
        let want = ((end - at) / PAGE).min(entries.len());
        // SAFETY: the buffer is ours and that long.
        let read = unsafe { sys!(libc::SYS_pread64, fd, entries.as_mut_ptr(), want * 8, at / PAGE * 8) }? / 8;
        if read == 0 {
            break;
        }
        for entry in &entries[..read] {
            match (are(*entry), run) {
                (true, None) => run = Some(at),
                (false, Some(from)) => {
                    found(from, at);
                    run = None;
                }
                _ => {}
            }
            at += PAGE;
        }
    }
    if let Some(from) = run {
        found(from, at);
    }
    Ok(())
}

/// As [`present_runs`], for pages that were read but never written: the kernel's zero page is mapped there.
///
/// # Errors
/// As [`present_runs`].
pub fn zero_runs(fd: i32, start: usize, end: usize, found: impl FnMut(usize, usize)) -> Result<(), Errno> {
    runs_with_any(fd, start, end, (PFNZERO, PFNZERO), found)
}

fn runs_with_any(
    fd: i32,
    start: usize,
    end: usize,
    (any, report): (u64, u64),
    mut found: impl FnMut(usize, usize),
) -> Result<(), Errno> {
    let mut at = start as u64;
    let mut regions = [[0u64; 3]; 64];
    while at < end as u64 {
        // size, flags, start, end, walk_end, vec, vec_len, max_pages, inverted, mask, anyof, return
        let mut arg = [96, 0, at, end as u64, 0, regions.as_mut_ptr() as u64, 64, 0, 0, 0, any, report];
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

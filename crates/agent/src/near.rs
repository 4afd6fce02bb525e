//! Allocates memory near code that must jump there: the operand of a call reaches 2 GiB.

use uzswap_pager::frames::arena::PAGE;
use uzswap_sys::raw::Errno;
use uzswap_sys::sys;

/// How far a page may be from the code that must reach it (bytes).
const REACH: usize = 1 << 30;
/// Distance between the places that are tried (bytes).
const STEP: usize = 512 << 10;

/// A fresh page, readable and writable, within reach of everything from `first` to `end` (page addresses).
///
/// # Errors
/// The kernel's; `ENOMEM` if nothing is free within reach.
pub fn page(first: usize, end: usize) -> Result<usize, Errno> {
    // The kernel's own choice is mostly next to the libraries.
    let at = map(0, 0)?;
    if is_within_reach(at, first, end) {
        return Ok(at);
    }
    // SAFETY: a page of ours, which nobody knows.
    let _ = unsafe { sys!(libc::SYS_munmap, at, PAGE) };
    // Below and above in turn.
    let hints = (1..REACH / STEP).flat_map(|k| [first.checked_sub(k * STEP), end.checked_add(k * STEP)]);
    hints.flatten().find_map(|hint| map(hint, libc::MAP_FIXED_NOREPLACE).ok()).ok_or(libc::ENOMEM)
}

/// Whether everything from `first` to `end` can jump to page `at`.
pub fn is_within_reach(at: usize, first: usize, end: usize) -> bool {
    at.abs_diff(first).max(at.abs_diff(end)) < REACH
}

fn map(hint: usize, flags: i32) -> Result<usize, Errno> {
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags);
    // SAFETY: only free addresses are mapped.
    unsafe { sys!(libc::SYS_mmap, hint, PAGE, prot, flags, -1isize, 0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unmap(at: usize, len: usize) {
        // SAFETY: mappings of the tests', used no more.
        unsafe { sys!(libc::SYS_munmap, at, len) }.expect("it was mapped");
    }

    /// Whether a call from anywhere in between reaches it, and it is a writable page.
    fn is_good(at: usize, first: usize, end: usize) -> bool {
        // SAFETY: a fresh page of ours.
        unsafe { (at as *mut u8).write(7) };
        at.is_multiple_of(PAGE) && [first, end].iter().all(|from| i32::try_from(at as isize - *from as isize).is_ok())
    }

    #[test]
    fn near_a_library() {
        let first = libc::getpid as *const () as usize & !(PAGE - 1);
        let at = page(first, first + PAGE).expect("there is room");
        assert!(is_good(at, first, first + PAGE));
        unmap(at, PAGE);
    }

    /// For code far from where the kernel puts mappings, a page is found beside what is there already.
    #[test]
    fn far_from_where_the_kernel_would_put_it() {
        const LEN: usize = 8 << 20;
        let place = |at: usize| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
            // SAFETY: only free addresses are mapped.
            unsafe { sys!(libc::SYS_mmap, at, LEN, libc::PROT_NONE, flags, -1isize, 0) }
        };
        // 1 TiB to 8 TiB: nothing is mapped there by itself.
        let first = (1..8).find_map(|tib| place(tib << 40).ok()).expect("a free place");
        let (first, end) = (first + LEN / 4, first + LEN / 2);
        let at = page(first, end).expect("there is room");
        assert!(is_good(at, first, end));
        assert!(at + PAGE <= first - LEN / 4 || at >= end + LEN / 2, "what was mapped was left alone");
        unmap(at, PAGE);
        unmap(first - LEN / 4, LEN);
    }

    /// If nothing is free within reach, that is reported, and nothing is replaced.
    #[test]
    fn nowhere() {
        // Addresses that cannot be mapped: beyond user space.
        let first = 1usize << 62;
        assert_eq!(page(first, first + PAGE), Err(libc::ENOMEM));
    }
}

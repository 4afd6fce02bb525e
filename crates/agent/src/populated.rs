//! Memory that a program maps already filled with zeros (MAP_POPULATE).
//!
//! The kernel fills it within the call, before it can be managed: 64 MiB mapped that way under a limit of 32, all of
//! which was in use, made 95. So it is mapped empty, examined like any other mapping, and filled afterwards. If it is
//! managed by then, its pages come as by faults, and what is too much leaves again.

use crate::{mapped, pager};
use core::ffi::c_int;
use uzswap_sys::{raw, sys};

/// Whether memory mapped by such a call is filled after it. (Read-only memory is filled with the shared zero page.
/// Stacks, locked memory and huge pages of the system's pool are not managed.)
fn is_filled_later(prot: c_int, flags: c_int) -> bool {
    let asked = libc::MAP_POPULATE | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // With MAP_NONBLOCK the kernel does not fill it either.
    let never = libc::MAP_SHARED
        | libc::MAP_STACK
        | libc::MAP_GROWSDOWN
        | libc::MAP_LOCKED
        | libc::MAP_HUGETLB
        | libc::MAP_NONBLOCK;
    prot & libc::PROT_WRITE != 0 && flags & (asked | never) == asked
}

/// The flags to pass to the kernel for an `mmap` of the program's with MAP_POPULATE.
pub extern "C" fn flags_of_mmap(prot: c_int, flags: c_int) -> c_int {
    if is_filled_later(prot, flags) && pager().is_some() { flags & !libc::MAP_POPULATE } else { flags }
}

/// Called after an `mmap` of the program's; `flags` are those that it gave.
pub extern "C" fn after_mmap(ret: usize, len: usize, prot: c_int, flags: c_int) {
    mapped(ret, len, prot, flags);
    if is_filled_later(prot, flags) && raw::check(ret as isize).is_ok() && pager().is_some() {
        // Filling is a hint: mmap does not tell either how far it got.
        // SAFETY: the caller's own new mapping; no contents are changed.
        let _ = unsafe { sys!(libc::SYS_madvise, ret, len, libc::MADV_POPULATE_WRITE) };
    }
}

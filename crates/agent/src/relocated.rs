//! Which tables of the program's objects the linker has relocated and made read-only: see the pager's `relocated`.
//!
//! Who hooks functions opens them up, changes a pointer, and closes them again. Such calls of `mprotect` wait while tables are taken over, or
//! keep that from beginning.
//!
//! The story: a pointer that was changed between the copy and its being put in place was the linker's again, or who changed it got SIGSEGV.

use crate::calls::{InOrder, begin_one, end_one};
use crate::fails;
use core::cmp::Reverse;
use core::ffi::{c_int, c_long, c_void};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use uzswap_pager::discover::relocated::LEAST_BYTES;
use uzswap_pager::frames::arena::PAGE;
use uzswap_sys::raw;

/// Tables at most that are taken over: the largest.
const MOST: usize = 16;
/// Where those begin and end, as far as there are any.
static TABLES: [[AtomicUsize; 2]; MOST] = [const { [const { AtomicUsize::new(0) }; 2] }; MOST];

/// What is looked for, and what is not taken: the object that this address is in.
struct Search {
    own: usize,
    found: Vec<(usize, usize)>,
}

/// The large ones of the objects that the program has started with, in the constructor: from first to last whole page, the largest first.
pub fn tables() -> Vec<(usize, usize)> {
    let mut search = Search { own: tables as *const () as usize, found: Vec::new() };
    // SAFETY: the callback is given what it is called with here.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    search.found.sort_unstable_by_key(|(start, end)| Reverse(end - start));
    search.found.truncate(MOST);
    for (table, (start, end)) in TABLES.iter().zip(&search.found) {
        table[0].store(*start, Relaxed);
        table[1].store(*end, Relaxed);
    }
    search.found
}

/// Whether a range has some of them.
fn has_some(at: usize, len: usize) -> bool {
    let tables = TABLES.iter().map(|table| (table[0].load(Relaxed), table[1].load(Relaxed)));
    tables.take_while(|(_, end)| *end != 0).any(|(start, end)| at < end && start < at.saturating_add(len))
}

/// mprotect(2), or pkey_mprotect(2).
///
/// # Safety
/// As the system call's.
unsafe fn protect(nr: c_long, args: [usize; 6]) -> c_int {
    let call = if has_some(args[0], args[1]) { begin_one(nr, 0, 0) } else { InOrder::default() };
    // SAFETY: as the caller says.
    let done = raw::check(unsafe { raw::syscall(nr, args) });
    end_one(call);
    done.map_or_else(fails, |_| 0)
}

/// mprotect(2) of libc.
///
/// # Safety
/// As the system call's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(at: usize, len: usize, prot: c_int) -> c_int {
    // SAFETY: as the caller says.
    unsafe { protect(libc::SYS_mprotect, [at, len, prot as usize, 0, 0, 0]) }
}

/// pkey_mprotect(2) of libc.
///
/// # Safety
/// As the system call's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkey_mprotect(at: usize, len: usize, prot: c_int, key: c_int) -> c_int {
    // SAFETY: as the caller says.
    unsafe { protect(libc::SYS_pkey_mprotect, [at, len, prot as usize, key as usize, 0, 0]) }
}

unsafe extern "C" fn look(object: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
    // SAFETY: libc's description of an object, and the search that `tables` has begun.
    let (object, search) = unsafe { (&*object, &mut *search.cast::<Search>()) };
    // SAFETY: so many headers, as libc says.
    let headers = unsafe { core::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into()) };
    let range = |header: &libc::Elf64_Phdr| {
        let start = object.dlpi_addr as usize + header.p_vaddr as usize;
        (start, start + header.p_memsz as usize)
    };
    let is_own =
        headers.iter().filter(|h| h.p_type == libc::PT_LOAD).map(range).any(|(a, b)| (a..b).contains(&search.own));
    for (start, end) in headers.iter().filter(|h| h.p_type == libc::PT_GNU_RELRO).map(range) {
        let (start, end) = (start & !(PAGE - 1), end & !(PAGE - 1));
        if !is_own && end.saturating_sub(start) >= LEAST_BYTES {
            search.found.push((start, end));
        }
    }
    0
}

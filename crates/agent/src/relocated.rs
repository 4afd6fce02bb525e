//! The tables in the program's objects that the linker relocated and made read-only: see the pager's `relocated`.
//!
//! Code that hooks functions makes them writable, changes a pointer, and protects them again. Such calls of `mprotect`
//! wait while tables are taken over, or keep that from beginning.
//!
//! The story: a pointer changed after the table was copied, but before the copy was put in place, was the linker's
//! again; or the hooking code got SIGSEGV.

use crate::calls::{InOrder, begin_one, end_one};
use crate::fails;
use core::cmp::Reverse;
use core::ffi::{c_int, c_long, c_void};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use uzswap_pager::discover::relocated::LEAST_BYTES;
use uzswap_pager::frames::arena::PAGE;
use uzswap_sys::raw;

/// Most tables that are taken over: the largest ones.
const MOST: usize = 16;
/// Start and end of each of those, as far as there are any.
static TABLES: [[AtomicUsize; 2]; MOST] = [const { [const { AtomicUsize::new(0) }; 2] }; MOST];

/// A search for tables, and an address in the object whose tables are not wanted.
struct Search {
    own: usize,
    found: Vec<(usize, usize)>,
}

/// The large tables of the objects that the program started with, from first to last whole page, the largest first.
/// Called in the constructor.
pub fn tables() -> Vec<(usize, usize)> {
    let mut search = Search { own: tables as *const () as usize, found: Vec::new() };
    // SAFETY: the callback gets the search that it expects.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    search.found.sort_unstable_by_key(|(start, end)| Reverse(end - start));
    search.found.truncate(MOST);
    for (table, (start, end)) in TABLES.iter().zip(&search.found) {
        table[0].store(*start, Relaxed);
        table[1].store(*end, Relaxed);
    }
    search.found
}

/// Whether a range overlaps one of them.
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
    // SAFETY: the caller passes the system call's arguments.
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
    // SAFETY: the caller passes the system call's arguments.
    unsafe { protect(libc::SYS_mprotect, [at, len, prot as usize, 0, 0, 0]) }
}

/// pkey_mprotect(2) of libc.
///
/// # Safety
/// As the system call's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkey_mprotect(at: usize, len: usize, prot: c_int, key: c_int) -> c_int {
    // SAFETY: the caller passes the system call's arguments.
    unsafe { protect(libc::SYS_pkey_mprotect, [at, len, prot as usize, key as usize, 0, 0]) }
}

unsafe extern "C" fn look(object: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
    // SAFETY: libc's description of an object, and the search that `tables` began.
    let (object, search) = unsafe { (&*object, &mut *search.cast::<Search>()) };
    // SAFETY: as many headers as libc says.
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

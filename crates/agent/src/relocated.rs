//! Which tables of the program's objects the linker has relocated and made read-only: see the pager's `relocated`.

use core::ffi::{c_int, c_void};
use uzswap_pager::arena::PAGE;
use uzswap_pager::relocated::LEAST_BYTES;

/// What is looked for, and what is not taken: the object that this address is in.
struct Search {
    own: usize,
    found: Vec<(usize, usize)>,
}

/// The large ones of the objects that the program has started with, in the constructor: from first to last whole page.
pub fn tables() -> Vec<(usize, usize)> {
    let mut search = Search { own: tables as *const () as usize, found: Vec::new() };
    // SAFETY: the callback is given what it is called with here.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    search.found
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

//! What libc itself defines, whoever else has a function of that name: allocators and sanitizers have an `mmap` and a `memcpy`.
//!
//! Looked up in libc's own table (ELF's symbols and GNU hash). dlopen would give a handle for dlsym, but allocates: the program's
//! heap then begins with what the loader needs, in a page that can be out, and be lost with a swap server.

use core::ffi::{CStr, c_char, c_int, c_void};

unsafe extern "C" {
    /// As dladdr(3), and more.
    fn dladdr1(at: *const c_void, info: *mut libc::Dl_info, more: *mut *mut c_void, flags: c_int) -> c_int;
}

const RTLD_DL_LINKMAP: c_int = 2;
const DT_NULL: i64 = 0;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
/// A symbol whose value is a function that returns the function.
const STT_GNU_IFUNC: u8 = 10;

/// The beginning of glibc's `struct link_map`.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const c_char,
    dynamic: *const (i64, usize),
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: usize,
}

/// The tables of libc.
pub struct Libc {
    base: usize,
    symbols: *const Symbol,
    strings: *const c_char,
    hash: *const u32,
}

impl Libc {
    /// Those of the libc that is loaded; None where it has other ones.
    pub fn find() -> Option<Self> {
        // SAFETY: zeros are such a structure; a constant name that nobody else has; the calls fill what is ours. The link map and its
        // tables are the loader's, and stay.
        unsafe {
            let inside = libc::dlsym(libc::RTLD_DEFAULT, c"gnu_get_libc_version".as_ptr());
            let mut info: libc::Dl_info = core::mem::zeroed();
            let mut map = core::ptr::null_mut();
            if inside.is_null() || dladdr1(inside, &raw mut info, &raw mut map, RTLD_DL_LINKMAP) == 0 || map.is_null() {
                return None;
            }
            let map = &*map.cast::<LinkMap>();
            let mut found = [0usize; 3];
            let mut at = map.dynamic;
            while (*at).0 != DT_NULL {
                if let Some(i) = [DT_SYMTAB, DT_STRTAB, DT_GNU_HASH].iter().position(|tag| *tag == (*at).0) {
                    found[i] = (*at).1;
                }
                at = at.add(1);
            }
            let [symbols, strings, hash] = found;
            let here = found.iter().all(|at| *at >= map.base);
            here.then_some(Self { base: map.base, symbols: symbols as _, strings: strings as _, hash: hash as _ })
        }
    }

    /// The address of a function; 0 where there is none.
    pub fn symbol(&self, name: &CStr) -> usize {
        let wanted = name.to_bytes().iter().fold(5381u32, |h, c| h.wrapping_mul(33).wrapping_add(u32::from(*c)));
        // SAFETY: the tables of a library that is loaded, as the format says: four numbers, the filter (64-bit words), a list of
        // buckets, a hash for each symbol from the first on, the last of a bucket with its lowest bit set.
        unsafe {
            let [buckets, first, filter] = [0, 1, 2].map(|i| *self.hash.add(i) as usize);
            let lists = self.hash.add(4 + 2 * filter);
            let mut i = *lists.add(wanted as usize % buckets) as usize;
            while i >= first {
                let hash = *lists.add(buckets + i - first);
                let symbol = *self.symbols.add(i);
                let is_it = hash | 1 == wanted | 1 && CStr::from_ptr(self.strings.add(symbol.name as usize)) == name;
                if is_it && symbol.section != 0 && symbol.value != 0 {
                    let at = self.base + symbol.value;
                    if symbol.info & 15 != STT_GNU_IFUNC {
                        return at;
                    }
                    return core::mem::transmute::<usize, extern "C" fn() -> usize>(at)();
                }
                if hash & 1 == 1 {
                    break;
                }
                i += 1;
            }
        }
        0
    }
}

//! Finds the functions that libc itself defines, even if others define the same names: allocators and sanitizers have
//! an `mmap` and a `memcpy` of their own.
//!
//! It searches libc's own table (ELF symbols and GNU hash). dlopen would give a handle for dlsym, but allocates: the
//! program's heap would then begin with data that the loader needs, in a page that can be out, and be lost with a swap
//! server.

use core::ffi::{CStr, c_char, c_int, c_void};

unsafe extern "C" {
    /// dladdr(3) with more results.
    fn dladdr1(at: *const c_void, info: *mut libc::Dl_info, more: *mut *mut c_void, flags: c_int) -> c_int;
}

const RTLD_DL_LINKMAP: c_int = 2;
const DT_NULL: i64 = 0;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_SONAME: i64 = 14;
const DT_DEBUG: i64 = 21;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const DT_VERSYM: i64 = 0x6fff_fff0;
/// In a symbol's version: only callers that ask for this version get it.
const VERSION_HIDDEN: u16 = 0x8000;
const STT_FUNC: u8 = 2;
/// A symbol whose value is a function that returns the function's address.
const STT_GNU_IFUNC: u8 = 10;

/// The start of glibc's `struct link_map`: a loaded object.
#[repr(C)]
pub struct LinkMap {
    base: usize,
    name: *const c_char,
    dynamic: *const (i64, usize),
    /// The one loaded after it, in the same namespace.
    pub next: *const LinkMap,
    previous: *const LinkMap,
}

impl LinkMap {
    /// That of the libc that the library itself calls.
    fn of_own_libc() -> Option<&'static Self> {
        // SAFETY: zeros are a valid Dl_info; the name is a constant that nobody else defines; the calls fill structures
        // of ours. The link map is the loader's, and stays.
        unsafe {
            let inside = libc::dlsym(libc::RTLD_DEFAULT, c"gnu_get_libc_version".as_ptr());
            let mut info: libc::Dl_info = core::mem::zeroed();
            let mut map = core::ptr::null_mut();
            if inside.is_null() || dladdr1(inside, &raw mut info, &raw mut map, RTLD_DL_LINKMAP) == 0 {
                return None;
            }
            map.cast::<Self>().as_ref()
        }
    }

    /// The program's, which is the first.
    pub fn of_program() -> Option<&'static Self> {
        let mut map = Self::of_own_libc()?;
        // SAFETY: null, or an object loaded before, which the program needs and keeps.
        while let Some(before) = unsafe { map.previous.as_ref() } {
            map = before;
        }
        Some(map)
    }

    /// The entries of its dynamic section with these tags; 0 for those that it does not have.
    fn dynamic<const N: usize>(&self, tags: [i64; N]) -> [usize; N] {
        let mut found = [0; N];
        let mut at = self.dynamic;
        // SAFETY: null, or the section of a loaded object, which ends with that tag.
        while let Some((tag, value)) = unsafe { at.as_ref() }.filter(|(tag, _)| *tag != DT_NULL) {
            if let Some(i) = tags.iter().position(|wanted| wanted == tag) {
                found[i] = *value;
            }
            at = at.wrapping_add(1);
        }
        found
    }

    /// Where the loader tells debuggers what is loaded, if this is the program.
    pub fn debug(&self) -> usize {
        let [at] = self.dynamic([DT_DEBUG]);
        at
    }

    /// Whether it is a libc.
    pub fn is_libc(&self) -> bool {
        let [name, strings] = self.dynamic([DT_SONAME, DT_STRTAB]);
        // SAFETY: the loader has made the table's address absolute, and the name is one of its strings.
        name != 0
            && strings >= self.base
            && unsafe { CStr::from_ptr((strings + name) as *const c_char) } == c"libc.so.6"
    }
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

/// libc's symbol tables.
pub struct Libc {
    base: usize,
    symbols: *const Symbol,
    strings: *const c_char,
    hash: *const u32,
    /// One for each symbol.
    versions: *const u16,
}

impl Libc {
    /// The tables of the libc that the library itself calls; `None` if it has other kinds of tables.
    pub fn find() -> Option<Self> {
        Self::of(LinkMap::of_own_libc()?)
    }

    /// The tables of a loaded libc; `None` if it has other kinds of tables.
    pub fn of(map: &LinkMap) -> Option<Self> {
        let found = map.dynamic([DT_SYMTAB, DT_STRTAB, DT_GNU_HASH, DT_VERSYM]);
        let [symbols, strings, hash, versions] = found;
        let (symbols, strings, hash, versions) = (symbols as _, strings as _, hash as _, versions as _);
        let here = found.iter().all(|at| *at != 0 && *at >= map.base);
        here.then_some(Self { base: map.base, symbols, strings, hash, versions })
    }

    /// The address of a function's default version; 0 if there is none.
    pub fn symbol(&self, name: &CStr) -> usize {
        let wanted = name.to_bytes().iter().fold(5381u32, |h, c| h.wrapping_mul(33).wrapping_add(u32::from(*c)));
        // SAFETY: the tables are those of a loaded library, in the documented format: four numbers, the filter (64-bit
        // words), the buckets, and a hash for each symbol from `first` on; the last hash of a bucket has its lowest bit
        // set.
        unsafe {
            let [buckets, first, filter] = [0, 1, 2].map(|i| *self.hash.add(i) as usize);
            let lists = self.hash.add(4 + 2 * filter);
            let mut i = *lists.add(wanted as usize % buckets) as usize;
            while i >= first {
                let hash = *lists.add(buckets + i - first);
                let symbol = *self.symbols.add(i);
                let is_it = hash | 1 == wanted | 1 && CStr::from_ptr(self.strings.add(symbol.name as usize)) == name;
                if is_it && self.is_default(i) {
                    let at = self.base + symbol.value;
                    match symbol.info & 15 {
                        STT_FUNC => return at,
                        STT_GNU_IFUNC => return core::mem::transmute::<usize, extern "C" fn() -> usize>(at)(),
                        _ => {}
                    }
                }
                if hash & 1 == 1 {
                    break;
                }
                i += 1;
            }
        }
        0
    }

    /// Whether symbol `i` is defined, and is the one that a reference without a version means.
    ///
    /// # Safety
    /// There is such a symbol.
    unsafe fn is_default(&self, i: usize) -> bool {
        // SAFETY: the caller promises that the symbol exists, and there are as many versions as symbols.
        let (symbol, version) = unsafe { (*self.symbols.add(i), *self.versions.add(i)) };
        symbol.section != 0 && symbol.value != 0 && version & VERSION_HIDDEN == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_programs_object_is_the_first_and_libc_is_one_of_those_behind_it() {
        let program = LinkMap::of_program().expect("it is loaded");
        // SAFETY: the loader's list, which does not change while the tests run.
        let all = core::iter::successors(Some(program), |map| unsafe { map.next.as_ref() }).collect::<Vec<_>>();
        assert!(program.previous.is_null() && !program.is_libc());
        assert_eq!(all.iter().filter(|map| map.is_libc()).count(), 1);
        // `struct r_debug`: a version, and the first object.
        let debug = program.debug() as *const [usize; 2];
        // SAFETY: what the loader says to debuggers.
        assert_eq!(unsafe { (*debug)[1] }, core::ptr::from_ref(program) as usize);
        let libc = all.iter().find(|map| map.is_libc()).and_then(|map| Libc::of(map)).expect("its tables");
        assert_eq!(libc.symbol(c"mmap"), Loader::new().symbol(c"mmap"));
    }

    /// The loader's answers about libc itself.
    struct Loader(*mut c_void);

    impl Loader {
        fn new() -> Self {
            // SAFETY: a constant name of what is loaded.
            let handle = unsafe { libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
            assert!(!handle.is_null());
            Self(handle)
        }

        fn symbol(&self, name: &CStr) -> usize {
            // SAFETY: a library that stays, and a name.
            unsafe { libc::dlsym(self.0, name.as_ptr()) as usize }
        }

        fn version(&self, name: &CStr, version: &CStr) -> usize {
            // SAFETY: as above.
            unsafe { libc::dlvsym(self.0, name.as_ptr(), version.as_ptr()) as usize }
        }
    }

    /// All functions in libc's table: names, and whether a function resolves them.
    fn all(libc: &Libc) -> Vec<(&'static CStr, bool)> {
        // SAFETY: as in `Libc::symbol`; the names stay as long as libc.
        unsafe {
            let [buckets, first, filter] = [0, 1, 2].map(|i| *libc.hash.add(i) as usize);
            let lists = libc.hash.add(4 + 2 * filter);
            let last = (0..buckets).map(|b| *lists.add(b) as usize).max().unwrap();
            let end = (last..).find(|i| *lists.add(buckets + i - first) & 1 == 1).unwrap();
            let symbols = (first..=end).filter(|i| libc.is_default(*i)).map(|i| *libc.symbols.add(i));
            let functions = symbols.filter(|s| [STT_FUNC, STT_GNU_IFUNC].contains(&(s.info & 15)));
            let named = |s: Symbol| CStr::from_ptr(libc.strings.add(s.name as usize));
            functions.map(|s| (named(s), s.info & 15 == STT_GNU_IFUNC)).collect()
        }
    }

    #[test]
    fn every_function_is_what_the_loader_says() {
        let (libc, loader) = (Libc::find().expect("glibc"), Loader::new());
        let functions = all(&libc);
        let resolved = functions.iter().filter(|(_, resolved)| *resolved).count();
        assert!(functions.len() > 2000 && resolved > 20, "{} functions, {resolved} of them resolved", functions.len());
        for (name, _) in &functions {
            assert_eq!(libc.symbol(name), loader.symbol(name), "{name:?}");
        }
        let names: BTreeSet<_> = functions.iter().map(|(name, _)| *name).collect();
        assert_eq!(names.len(), functions.len(), "one default version of each");
        for name in [c"mmap64", c"brk", c"munmap", c"mremap", c"madvise", c"_Fork", c"execve", c"memcpy", c"memset"] {
            assert!(names.contains(name) && libc.symbol(name) != 0, "{name:?}");
        }
    }

    #[test]
    fn what_is_found_is_libcs_own() {
        let libc = Libc::find().expect("glibc");
        for name in [c"prctl", c"mlockall", c"setuid", c"syscall", c"clone", c"malloc"] {
            let found = libc.symbol(name);
            // SAFETY: an address is looked up, and zeros are such a structure.
            let of = unsafe {
                let mut info: libc::Dl_info = core::mem::zeroed();
                assert_ne!(libc::dladdr(found as *const c_void, &raw mut info), 0, "{name:?}");
                CStr::from_ptr(info.dli_fname).to_str().unwrap()
            };
            assert!(of.contains("libc.so"), "{name:?} is of {of}");
        }
    }

    #[test]
    fn of_several_versions_the_default_is_found() {
        let (libc, loader) = (Libc::find().expect("glibc"), Loader::new());
        for (name, old, new) in
            [(c"realpath", c"GLIBC_2.2.5", c"GLIBC_2.3"), (c"posix_spawn", c"GLIBC_2.2.5", c"GLIBC_2.15")]
        {
            let [old, new] = [old, new].map(|version| loader.version(name, version));
            assert!(old != 0 && new != 0 && old != new, "{name:?}: two versions");
            assert_eq!(libc.symbol(name), new, "{name:?}");
        }
    }

    #[test]
    fn what_is_no_function_of_libcs_is_not_found() {
        let libc = Libc::find().expect("glibc");
        let none = [c"", c"m", c"mma", c"mmap65", c"uzswap_no_such_function", c"dlopen_of_another_library"];
        // Data, and a thread-local variable.
        let data = [c"environ", c"stdout", c"__libc_single_threaded", c"errno"];
        for name in none.into_iter().chain(data) {
            assert_eq!(libc.symbol(name), 0, "{name:?}");
        }
    }
}

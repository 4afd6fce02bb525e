//! The libc functions that the agent's functions of the same name interpose.

use core::ffi::{CStr, c_int, c_void};
use core::sync::atomic::{AtomicUsize, Ordering::*};

/// Longest path of a library, including its NUL (bytes).
const PATH_BYTES: usize = libc::PATH_MAX as usize;

/// The function that programs would call if the agent did not define its name.
pub struct Next {
    name: &'static CStr,
    found: AtomicUsize,
}

impl Next {
    /// The function of this name, not looked up yet.
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicUsize::new(0) }
    }

    /// Its address; 0 if there is none. It is looked up once, by the agent's constructor, because it may be called
    /// where a lookup is impossible (in a signal handler, or a vfork child).
    pub fn find(&self) -> usize {
        if self.found() == 0 {
            // SAFETY: a constant name.
            self.found.store(unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) } as usize, Relaxed);
        }
        self.found()
    }

    /// As [`Next::find`], but also finds a function in a library that is visible only to those with which it was loaded
    /// (`dlopen` without RTLD_GLOBAL, as for plugins). They still find the agent's `own` before it. The library is then
    /// never unloaded.
    ///
    /// The story: plugins that use liburing, and Python's ctypes, got ENOSYS, as no function follows the agent's in the
    /// global scope.
    pub fn find_anywhere(&self, own: usize) -> usize {
        let mut found = self.find();
        for n in 0.. {
            if found != 0 {
                break;
            }
            let mut path = Path { left: n, text: [0; PATH_BYTES] };
            // SAFETY: the callback gets our structure. (It opens nothing, as the loader holds a lock meanwhile.)
            if unsafe { libc::dl_iterate_phdr(Some(copy_path), (&raw mut path).cast()) } == 0 {
                break;
            }
            self.look_in(&path.text, own);
            found = self.found();
        }
        found
    }

    /// Looks in the loaded object with this path, and in those that it needs.
    fn look_in(&self, path: &[u8; PATH_BYTES], own: usize) {
        // The program itself has no name, and sees the global scope.
        if path[0] == 0 {
            return;
        }
        // SAFETY: a string with its NUL, and a constant name; what is found stays loaded, as the handle is kept.
        unsafe {
            let object = libc::dlopen(path.as_ptr().cast(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
            if object.is_null() {
                return;
            }
            let found = libc::dlsym(object, self.name.as_ptr()) as usize;
            if found == 0 || found == own {
                libc::dlclose(object);
            } else {
                self.found.store(found, Relaxed);
            }
        }
    }

    /// Its address if it was found before; else 0.
    fn found(&self) -> usize {
        self.found.load(Relaxed)
    }
}

/// The path of a loaded object, including its NUL.
struct Path {
    /// How many objects come before it.
    left: usize,
    text: [u8; PATH_BYTES],
}

/// Copies the path of the object searched for, if it fits.
unsafe extern "C" fn copy_path(object: *mut libc::dl_phdr_info, _: usize, path: *mut c_void) -> c_int {
    // SAFETY: the structure that the loader was given for this callback, and one of the loader's, whose name is a
    // string.
    let (path, name) = unsafe { (&mut *path.cast::<Path>(), (*object).dlpi_name) };
    if path.left > 0 {
        path.left -= 1;
        return 0;
    }
    // SAFETY: as above.
    let name: &[u8] = if name.is_null() { b"" } else { unsafe { CStr::from_ptr(name) }.to_bytes() };
    if name.len() < path.text.len() {
        path.text[..name.len()].copy_from_slice(name);
    }
    1
}

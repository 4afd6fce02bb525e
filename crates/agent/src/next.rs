//! The functions of libc that the agent's own of the same name stand before.

use core::ffi::CStr;
use core::sync::atomic::{AtomicUsize, Ordering::*};

/// A function that programs would call if the agent had none of its name.
pub struct Next {
    name: &'static CStr,
    found: AtomicUsize,
}

impl Next {
    /// The function of this name, not looked for yet.
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicUsize::new(0) }
    }

    /// Its address, 0 if there is none. Looked for once: by the agent's constructor, as it may be called where nothing can
    /// be looked for (in a signal handler, or a vfork child).
    pub fn find(&self) -> usize {
        if self.found() == 0 {
            // SAFETY: a constant name.
            self.found.store(unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) } as usize, Relaxed);
        }
        self.found()
    }

    /// Its address if it was found before, else 0.
    fn found(&self) -> usize {
        self.found.load(Relaxed)
    }
}

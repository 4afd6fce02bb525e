//! The other libcs of a process: those of namespaces that `dlmopen` makes, and of auditors (LD_AUDIT). Each is patched
//! like the first (`patch`) before anything can call it.
//!
//! The loader tells debuggers what it does: it changes a structure (`struct r_debug` of <link.h>) and calls a function
//! that only returns. That function is patched, so the agent is told when objects are mapped; none of their
//! constructors has run then. What auditors have loaded is there when the agent starts.
//!
//! The story: such a libc was not followed. A child that it forked read zeros where its parent's pages were out.

use crate::symbols::{Libc, LinkMap};
use crate::{leaving, next::Next, pager, patch};
use core::ffi::{c_int, c_long};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering::Relaxed};

/// glibc's `struct r_debug_extended`, which the loader changes.
#[repr(C)]
struct Debug {
    /// From 2 on, there are other namespaces (glibc 2.35).
    version: AtomicI32,
    /// The first object.
    objects: AtomicPtr<LinkMap>,
    /// The function that is called.
    function: AtomicUsize,
    state: AtomicI32,
    loader: AtomicUsize,
    /// The next namespace, if there are others.
    next: AtomicPtr<Debug>,
}

impl Debug {
    /// Whether there are other namespaces.
    fn has_others(&self) -> bool {
        self.version.load(Relaxed) >= 2
    }
}

/// The state in which a namespace's list of objects is whole.
const CONSISTENT: c_int = 0;
/// To `dlmopen`: a new namespace.
const NEW: c_long = -1;

static DEBUG: AtomicPtr<Debug> = AtomicPtr::new(core::ptr::null_mut());
/// Whether the loader tells of what it loads.
static IS_TOLD: AtomicBool = AtomicBool::new(false);
static DLMOPEN: Next = Next::new(c"dlmopen");

/// Has the loader tell of what it loads, and follows the libcs that are there already. Called in the constructor, when
/// libc is patched.
///
/// # Errors
/// The text for stderr, if one of them cannot be followed.
pub fn init() -> Result<(), &'static str> {
    DLMOPEN.find();
    let at = LinkMap::of_program().map_or(0, LinkMap::debug) as *mut Debug;
    // SAFETY: null, or the loader's structure, which stays.
    let Some(debug) = (unsafe { at.as_ref() }) else { return Ok(()) };
    DEBUG.store(at, Relaxed);
    // SAFETY: no other thread runs in the loader yet; that is the loader's function. (A debugger may have put a
    // breakpoint there.)
    let told = unsafe { patch::follow_loader(debug.function.load(Relaxed)) }.is_ok();
    IS_TOLD.store(told && has_list_of_namespaces(), Relaxed);
    follow(debug).map_err(|_| {
        "uzswap: this process runs without a limit: it has another C library (of an auditor), whose calls cannot be followed\n"
    })
}

/// Whether this glibc lists all namespaces: since 2.35.
fn has_list_of_namespaces() -> bool {
    // SAFETY: a string of libc's.
    let version = unsafe { core::ffi::CStr::from_ptr(libc::gnu_get_libc_version()) };
    version != c"2.34"
}

/// The loader has loaded or unloaded something, or begins to.
pub extern "C" fn loader_changed() {
    // SAFETY: null, or the loader's structure, which stays.
    let Some(debug) = (unsafe { DEBUG.load(Relaxed).as_ref() }) else { return };
    if debug.has_others() && pager().is_some() && follow(debug).is_err() {
        leaving::cannot_follow();
    }
}

/// Patches the libcs of all other namespaces. The loader's lock is held, or no other thread runs.
fn follow(debug: &Debug) -> Result<(), patch::PatchError> {
    if !debug.has_others() {
        return Ok(());
    }
    // SAFETY: null, or a namespace of the loader's list, which stays; null, or an object of a list that nobody changes
    // meanwhile.
    let (namespace, object) =
        unsafe { (|at: &AtomicPtr<Debug>| at.load(Relaxed).as_ref(), |at: *const LinkMap| at.as_ref()) };
    let mut at = namespace(&debug.next);
    while let Some(other) = at {
        let is_whole = other.state.load(Relaxed) == CONSISTENT;
        let first = object(other.objects.load(Relaxed)).filter(|_| is_whole);
        let objects = core::iter::successors(first, |map| object(map.next));
        for libc in objects.filter(|map| map.is_libc()) {
            let libc = Libc::of(libc).ok_or(patch::PatchError::Pattern)?;
            // SAFETY: it was just mapped, so that nobody runs in it yet, or it is patched.
            unsafe { patch::install_in(&libc, patch::Needed::InOthers) }?;
        }
        at = namespace(&other.next);
    }
    Ok(())
}

/// dlmopen(3). The loader looks at who called it, so it must be called with this one's return address.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlmopen() {
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "call {before}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        before = sym before_dlmopen,
    )
}

/// Lets go of the process if what a new namespace brings would not be seen. Returns the function that opens it.
extern "C" fn before_dlmopen(namespace: c_long) -> usize {
    if namespace == NEW && !IS_TOLD.load(Relaxed) {
        leaving::cannot_follow();
    }
    DLMOPEN.find()
}

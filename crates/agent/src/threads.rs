//! Threads of the program: each has its control block pinned before it runs (why: `Pager::pin_control_block`).
//!
//! `pthread_create` is interposed. Threads that libc makes by itself (C11's `thrd_create`, timers that notify by a thread)
//! are on stacks of libc's, which are excluded.

use crate::next::Next;
use crate::{pager, set_mask};
use core::ffi::{c_int, c_void};

type Entry = extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(*mut c_void, *const c_void, Entry, *mut c_void) -> c_int;

static PTHREAD_CREATE: Next = Next::new(c"pthread_create");

/// What a new thread is to run.
struct Start {
    entry: Entry,
    arg: *mut c_void,
}

/// Finds the wrapped function, in the constructor.
pub fn init() {
    PTHREAD_CREATE.find();
}

/// pthread_create(3).
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut c_void,
    attributes: *const c_void,
    entry: Entry,
    arg: *mut c_void,
) -> c_int {
    let real = PTHREAD_CREATE.find();
    if real == 0 {
        return libc::EAGAIN;
    }
    // SAFETY: the function found under this name.
    let real = unsafe { core::mem::transmute::<usize, Create>(real) };
    if pager().is_none() {
        // SAFETY: the caller's arguments.
        return unsafe { real(thread, attributes, entry, arg) };
    }
    // (Of the program's heap, as libc takes memory there too: uzswap's own is allocated from under the pager's lock only.)
    // SAFETY: malloc of the program's.
    let start = unsafe { libc::malloc(size_of::<Start>()) }.cast::<Start>();
    if start.is_null() {
        return libc::EAGAIN;
    }
    // SAFETY: room for it, which is the new thread's from here on, unless there is none.
    unsafe {
        start.write(Start { entry, arg });
        let error = real(thread, attributes, run, start.cast());
        if error != 0 {
            libc::free(start.cast());
        }
        error
    }
}

/// The thread's first code.
extern "C" fn run(start: *mut c_void) -> *mut c_void {
    // SAFETY: what `pthread_create` made for this thread.
    let Start { entry, arg } = unsafe {
        let inner = start.cast::<Start>().read();
        libc::free(start);
        inner
    };
    if let Some(p) = pager() {
        let old = set_mask(!0);
        p.pin_control_block();
        set_mask(old);
    }
    entry(arg)
}

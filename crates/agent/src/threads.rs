//! Threads of the program: each has its control block pinned before it runs (why: `Pager::pin_control_block`).
//!
//! `pthread_create` is interposed. Threads that libc makes by itself (C11's `thrd_create`, timers that notify by a thread)
//! are on stacks of libc's, which are excluded.

use crate::next::Next;
use crate::{pager, set_mask};
use core::ffi::{c_int, c_void};
use uzswap_pager::fork::CONTROL_BLOCK;

/// What is written to in any case: the thread's number and the head of its robust list.
const CONTROL_LEAST: usize = 1 << 10;

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

/// The bytes of a thread's control block from its thread pointer on that the kernel writes to: to the end of the rseq area,
/// where libc says where that is (glibc since 2.35).
pub fn control_block() -> Option<usize> {
    /// `struct rseq`.
    const RSEQ_BYTES: isize = 32;
    // SAFETY: a constant name; the symbol is a `ptrdiff_t` that does not change any more.
    let offset = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()).cast::<isize>().as_ref() }?;
    usize::try_from(offset + RSEQ_BYTES).ok().filter(|end| *end > CONTROL_LEAST && *end <= CONTROL_BLOCK)
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

//! Notices that the process is about to end, so that uzswap's threads do not hold it up (`uzswap_pager::fault::easing`).
//!
//! | the program | noticed by |
//! |---|---|
//! | returns from `main`, calls `exit`, ends its last thread | the agent's destructor |
//! | calls `quick_exit` | a function registered with it |
//! | calls `_exit`, `_Exit`, or `exit_group` by libc's `syscall` | the functions here, and `rawfork` |
//!
//! It cannot notice that a signal kills the process, or that the program makes the call with instructions of its own.

use crate::next::Next;
use crate::pager;
use core::ffi::{c_int, c_void};
use uzswap_sys::thread;

static EXIT: Next = Next::new(c"_exit");
static EXIT_C: Next = Next::new(c"_Exit");

unsafe extern "C" {
    fn __cxa_at_quick_exit(f: extern "C" fn(*mut c_void), of: *const c_void) -> c_int;
}

/// Called in the constructor: the function registered first is called last.
pub fn init() {
    EXIT.find();
    EXIT_C.find();
    // SAFETY: the function stays, as this library is never unloaded.
    unsafe { __cxa_at_quick_exit(quick, core::ptr::null()) };
}

extern "C" fn quick(_: *mut c_void) {
    noted();
}

/// The process is about to end.
pub fn noted() {
    if let Some(p) = pager() {
        p.ends();
    }
}

macro_rules! interpose_exit {
    ($name:ident, $next:ident) => {
        /// Replaces the function of this name, and calls the next one: a leak sanitizer's may change the status.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(status: c_int) -> ! {
            type Real = unsafe extern "C" fn(c_int) -> !;
            noted();
            match $next.find() {
                0 => thread::end_process(status),
                // SAFETY: the function found under this name.
                next => unsafe { core::mem::transmute::<usize, Real>(next)(status) },
            }
        }
    };
}

interpose_exit!(_exit, EXIT);
interpose_exit!(_Exit, EXIT_C);

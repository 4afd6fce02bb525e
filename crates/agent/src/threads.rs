//! The program's threads: pins each one's control block before it runs (why: `Pager::pin_control_block`), and the
//! robust mutexes that it still holds when it ends.
//!
//! When a thread is gone, the kernel marks those mutexes as a dead owner's, and serves no more faults for the thread.
//! So a thread that waited for a mutex that was out waited forever.
//!
//! `pthread_create` is interposed. Threads that libc makes by itself (C11's `thrd_create`, timers that notify by a
//! thread) are on stacks of libc's, which are excluded.

use crate::next::Next;
use crate::{pager, set_mask};
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use uzswap_pager::fork::CONTROL_BLOCK;
use uzswap_pager::pager::Pager;
use uzswap_sys::sys;

/// What the kernel writes to in any case: the thread's number, and the head of its robust list.
const CONTROL_LEAST: usize = 1 << 10;

type Entry = extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(*mut c_void, *const c_void, Entry, *mut c_void) -> c_int;

/// Entries of a robust list that the kernel looks at.
const ROBUST_MOST: usize = 2048;

/// A key of thread-specific data. For a thread that has a value for it, libc calls `ends` when the thread ends.
static AT_END: AtomicU32 = AtomicU32::new(NO_KEY);
const NO_KEY: u32 = u32::MAX;

static PTHREAD_CREATE: Next = Next::new(c"pthread_create");

/// What a new thread must run.
struct Start {
    entry: Entry,
    arg: *mut c_void,
}

/// The kernel's `struct robust_list_head`.
#[repr(C)]
struct RobustHead {
    /// The first entry. The first word of an entry is the address of the next; that of the last is the head's.
    next: usize,
    /// Offset from an entry to its futex.
    futex: isize,
    /// The entry that is being taken or released.
    pending: usize,
}

/// Finds the wrapped function. Called in the constructor.
pub fn init() {
    PTHREAD_CREATE.find();
    let mut key = 0;
    // SAFETY: room for the key; the destructor stays loaded.
    if unsafe { libc::pthread_key_create(&raw mut key, Some(ends)) } == 0 {
        AT_END.store(key, Relaxed);
    }
}

/// A thread ends: its destructors run.
unsafe extern "C" fn ends(_: *mut c_void) {
    if let Some(p) = pager() {
        let old = set_mask(!0);
        pin_robust(p);
        set_mask(old);
    }
}

/// Keeps in memory everything that the calling thread's robust list reaches.
fn pin_robust(p: &Pager) {
    let (mut head, mut bytes) = (core::ptr::null::<RobustHead>(), 0usize);
    // SAFETY: room for both results, about the calling thread.
    let told = unsafe { sys!(libc::SYS_get_robust_list, 0, &raw mut head, &raw mut bytes) };
    if told.is_err() || head.is_null() || bytes < size_of::<RobustHead>() {
        return;
    }
    // SAFETY: the list belongs to the calling thread, and only its own code changes it; its mutexes exist as long as
    // they are held.
    let RobustHead { next, futex, pending } = unsafe { head.read() };
    let keep = |entry: usize| {
        let word = entry.wrapping_add_signed(futex);
        pin_written(p, entry.min(word), entry.max(word) + 8);
    };
    let mut entry = next & !1;
    for _ in 0..ROBUST_MOST {
        if entry == 0 || entry == head as usize {
            break;
        }
        keep(entry);
        // SAFETY: as above.
        entry = unsafe { (entry as *const usize).read() } & !1;
    }
    if pending & !1 != 0 {
        keep(pending & !1);
    }
}

/// Keeps the place in memory where the kernel will note the end of a thread or process that shares this memory. The
/// kernel serves no faults for a thread that ends, so a thread that waited for that note waited forever.
pub fn pin_number(at: usize) {
    if let Some(p) = pager() {
        let old = set_mask(!0);
        pin_written(p, at, at + 1);
        set_mask(old);
    }
}

/// Keeps the pages of `[from, to)` in memory, as the kernel will write to them. Call it with all signals blocked.
fn pin_written(p: &Pager, from: usize, to: usize) {
    p.pin(from, to, false);
}

/// The bytes of a thread's control block, from its thread pointer on, that the kernel writes to: up to the end of the
/// rseq area, if libc says where that is (glibc since 2.35).
pub fn control_block() -> Option<usize> {
    /// `struct rseq`.
    const RSEQ_BYTES: isize = 32;
    // SAFETY: a constant name; the symbol is a `ptrdiff_t` that never changes again.
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
    // From the program's heap, as libc allocates there, too, and not from uzswap's.
    // SAFETY: the program's malloc.
    let start = unsafe { libc::malloc(size_of::<Start>()) }.cast::<Start>();
    if start.is_null() {
        return libc::EAGAIN;
    }
    // SAFETY: there is room for it; from here on it belongs to the new thread, unless there is none.
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
    // SAFETY: `pthread_create` made it for this thread.
    let Start { entry, arg } = unsafe {
        let inner = start.cast::<Start>().read();
        libc::free(start);
        inner
    };
    if let Some(p) = pager() {
        let old = set_mask(!0);
        p.pin_control_block();
        set_mask(old);
        let key = AT_END.load(Relaxed);
        if key != NO_KEY {
            // SAFETY: a key of ours; the value only has to differ from null.
            let _ = unsafe { libc::pthread_setspecific(key, core::ptr::from_ref(p).cast()) };
        }
    }
    entry(arg)
}

//! Orders the program's mapping calls (why: `uzswap_pager::calls`). `mremap` is in `remap`.

use crate::{fails, pager, set_mask};
use core::ffi::{c_int, c_long, c_uint};
use core::sync::atomic::Ordering::Relaxed;
use uzswap_pager::calls::Held;
use uzswap_pager::frames::arena::PAGE;
use uzswap_sys::{raw, sys};

/// How a call under way is ordered. Lives on the stack of its thread.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct InOrder {
    pub held: Option<Held>,
    /// The old signal mask, if signals are blocked meanwhile.
    mask: u64,
}

/// Makes guard pages: drops what was there, and a touch raises SIGSEGV (Linux 6.13).
const MADV_GUARD_INSTALL: c_int = 102;

/// The kernel reads no more ranges than this (UIO_MAXIOV).
const MOST_RANGES: usize = 1024;

/// Advice that drops contents.
const DROPS: [c_int; 5] =
    [libc::MADV_DONTNEED, libc::MADV_FREE, libc::MADV_REMOVE, libc::MADV_DONTNEED_LOCKED, MADV_GUARD_INSTALL];

/// Whether a call must be ordered: `Some`, with true for `mremap`.
fn kind(nr: c_long, third: usize, fourth: usize) -> Option<bool> {
    let fixed = libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE;
    match nr {
        libc::SYS_mremap => Some(true),
        libc::SYS_munmap | libc::SYS_brk => Some(false),
        // Only those that concern relocated tables come here: see `relocated`.
        libc::SYS_mprotect | libc::SYS_pkey_mprotect => Some(false),
        // Without MOVE, memory locked after it was taken would lose its lock: see `without_move` of the pager.
        libc::SYS_mlock | libc::SYS_mlock2 | libc::SYS_munlock | libc::SYS_mlockall | libc::SYS_munlockall => {
            pager().filter(|p| p.without_move).map(|_| false)
        }
        libc::SYS_mmap => (fourth as i32 & fixed == libc::MAP_FIXED).then_some(false),
        _ => advice(nr, third, fourth).filter(|advice| DROPS.contains(advice)).map(|_| false),
    }
}

/// The advice that a call gives, if any.
fn advice(nr: c_long, third: usize, fourth: usize) -> Option<c_int> {
    match nr {
        libc::SYS_madvise => Some(third as c_int),
        libc::SYS_process_madvise => Some(fourth as c_int),
        _ => None,
    }
}

/// Before call `nr`, given its third and fourth argument.
pub fn begin_one(nr: c_long, third: usize, fourth: usize) -> InOrder {
    let Some(p) = pager() else { return InOrder::default() };
    match advice(nr, third, fourth) {
        // Set this before it is true, as another thread may fork right after. It takes effect even if the call fails:
        // ENOMEM says that some of the range is not mapped, EINVAL that some of it is of files.
        Some(libc::MADV_WIPEONFORK) => p.wipes.store(true, Relaxed),
        Some(MADV_GUARD_INSTALL) => _ = p.guards.fetch_add(1, Relaxed),
        _ if [libc::SYS_mlock, libc::SYS_mlock2].contains(&nr) => p.locks.store(true, Relaxed),
        _ => {}
    }
    let Some(alone) = kind(nr, third, fourth) else { return InOrder::default() };
    if p.calls.begin_unordered() {
        return InOrder { held: Some(Held::Counted), ..InOrder::default() };
    }
    let mask = set_mask(!0);
    let held = p.calls.begin(alone);
    if pager().is_none() {
        // The process was let go of while this thread waited. From here on it is not, before the call has ended.
        p.calls.end(held);
        set_mask(mask);
        return InOrder::default();
    }
    InOrder { held: Some(held), mask }
}

/// After the call.
pub fn end_one(call: InOrder) {
    let (Some(p), Some(held)) = (pager(), call.held) else { return };
    p.calls.end(held);
    if held != Held::Counted {
        set_mask(call.mask);
    }
}

/// After `madvise`; `ret` is the kernel's return value.
pub fn end_advice(call: InOrder, at: usize, len: usize, advice: usize, ret: isize) {
    if matches!(advice as i32, libc::MADV_HUGEPAGE | libc::MADV_NOHUGEPAGE)
        && ret == 0
        && let Some(p) = pager().filter(|p| p.is_of_this_process())
    {
        let mask = set_mask(!0);
        let end = at.saturating_add(len.next_multiple_of(PAGE));
        p.note_thp(&mut p.lock_in_hook(), at, end, advice as i32 == libc::MADV_HUGEPAGE);
        set_mask(mask);
    }
    let pages = if ret == 0 { len.div_ceil(PAGE) } else { pages_taken(call, (at, len), advice, ret) };
    if advice as i32 == MADV_GUARD_INSTALL
        && let Some(p) = pager().filter(|p| p.is_of_this_process())
    {
        let mask = set_mask(!0);
        // libc makes guards of stacks this way; stacks are not managed.
        if pages == 0 || p.is_excluded(at, at.wrapping_add(len)) {
            p.guards.fetch_sub(1, Relaxed);
        }
        set_mask(mask);
    }
    if pages > 0 && is_followed(call, advice) {
        // SAFETY: the program has given the contents up; a thread that writes there meanwhile cannot know that the call
        // has not ended.
        let _ = unsafe { sys!(libc::SYS_madvise, at, pages * PAGE, libc::MADV_DONTNEED) };
    }
    end_one(call);
}

/// For how many pages advice took effect although the call failed, where that matters. ENOMEM means: for all that are
/// mapped, but some are not.
fn pages_taken(call: InOrder, (at, len): (usize, usize), advice: usize, ret: isize) -> usize {
    if is_whole(ret) {
        return len.div_ceil(PAGE);
    }
    let matters = is_followed(call, advice) || advice as i32 == MADV_GUARD_INSTALL;
    if !matters || !at.is_multiple_of(PAGE) || at.checked_add(len).is_none() {
        return 0;
    }
    taken(len.div_ceil(PAGE), |pages| {
        // SAFETY: the program's own call, for fewer pages.
        is_whole(unsafe { raw::syscall(libc::SYS_madvise, [at, pages * PAGE, advice, 0, 0, 0]) })
    })
}

/// Whether advice took effect wherever something is mapped.
fn is_whole(ret: isize) -> bool {
    raw::check(ret).is_ok() || raw::check(ret) == Err(libc::ENOMEM)
}

/// For how many of `pages` advice took effect, when it was refused for all of them together. The kernel goes mapping by
/// mapping, up to the first that refuses. `again` repeats the advice for fewer pages, which changes nothing where it
/// took effect before.
///
/// The story: guard pages over memory whose last page is locked are refused (EINVAL), but made up to there. Nobody knew
/// of those, and when they were removed, what had been out there came back.
fn taken(pages: usize, again: impl Fn(usize) -> bool) -> usize {
    let (mut done, mut refused) = (0, pages);
    while refused - done > 1 {
        let middle = done.midpoint(refused);
        *if again(middle) { &mut done } else { &mut refused } = middle;
    }
    done
}

/// Whether MADV_DONTNEED must follow the advice, as the kernel does not report what the advice drops.
///
/// With MADV_FREE, pages stay until the kernel wants them, and count for nothing meanwhile. A page that the program
/// used again was in no table of uzswap's: neither kept below the limit nor known to be written to. The kernel may drop
/// it at once, so this does. (Only where the kernel took the advice, which it does for private anonymous memory alone.)
///
/// Guard pages send no event at all: what was out there came back when the guards were removed, where there should be
/// zeros. MADV_DONTNEED leaves the guards in place.
fn is_followed(call: InOrder, advice: usize) -> bool {
    let managed = matches!(call.held, Some(Held::Shared(_) | Held::Alone));
    managed && [libc::MADV_FREE, MADV_GUARD_INSTALL].contains(&(advice as i32))
}

/// process_madvise(2), by which a process may advise on its own memory. `call` was begun for it, and `args` are its
/// arguments.
///
/// # Safety
/// As the system call's.
pub unsafe fn process_advice(call: InOrder, args: [usize; 6]) -> isize {
    let [pidfd, ranges, count, advice, ..] = args;
    // SAFETY: the caller passes the system call's arguments.
    let ret = unsafe { raw::syscall(libc::SYS_process_madvise, args) };
    // With other errors, or with flags, the kernel may not have been able to read the ranges.
    let read = ret >= 0 || args[4] == 0 && matches!(raw::check(ret), Err(libc::EINVAL | libc::ENOMEM));
    if is_followed(call, advice) && read && count <= MOST_RANGES {
        // For another process the kernel refuses this, which does no harm: that process's memory is its own.
        let advise = |range: libc::iovec, advice: usize| {
            // SAFETY: the program has given the contents up, as in `end_advice`.
            unsafe { raw::syscall(libc::SYS_process_madvise, [pidfd, &raw const range as usize, 1, advice, 0, 0]) }
        };
        let mut left = ret.max(0) as usize;
        for i in 0..count {
            // SAFETY: the kernel has read the ranges.
            let mut range = unsafe { (ranges as *const libc::iovec).add(i).read() };
            // The kernel returns the bytes of whole ranges: it stopped within this one.
            let stopped = range.iov_len > left;
            if stopped && !is_whole(advise(range, advice)) {
                let first = |pages| libc::iovec { iov_len: pages * PAGE, ..range };
                range = first(taken(range.iov_len.div_ceil(PAGE), |pages| is_whole(advise(first(pages), advice))));
            }
            if range.iov_len > 0 {
                advise(range, libc::MADV_DONTNEED as usize);
            }
            if stopped {
                break;
            }
            left -= range.iov_len;
        }
    }
    end_one(call);
    ret
}

/// process_madvise(2) of libc.
///
/// # Safety
/// As the system call's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn process_madvise(
    pidfd: c_int,
    ranges: *const libc::iovec,
    count: usize,
    advice: c_int,
    flags: c_uint,
) -> isize {
    let call = begin_one(libc::SYS_process_madvise, count, advice as usize);
    let args = [pidfd as usize, ranges as usize, count, advice as usize, flags as usize, 0];
    // SAFETY: the caller passes the system call's arguments.
    raw::check(unsafe { process_advice(call, args) }).map_or_else(|errno| fails(errno) as isize, |n| n as isize)
}

macro_rules! interpose_lock {
    ($name:ident, $nr:expr $(, $argument:ident)*) => {
        /// Replaces the libc function of this name.
        ///
        /// # Safety
        /// As the system call's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: usize),*) -> c_int {
            let call = begin_one($nr, 0, 0);
            // SAFETY: the caller passes the system call's arguments.
            let done = unsafe { sys!($nr $(, $argument)*) };
            end_one(call);
            done.map_or_else(fails, |_| 0)
        }
    };
}

interpose_lock!(mlock, libc::SYS_mlock, at, len);
interpose_lock!(mlock2, libc::SYS_mlock2, at, len, flags);
interpose_lock!(munlock, libc::SYS_munlock, at, len);
interpose_lock!(munlockall, libc::SYS_munlockall);

/// For the wrapped calls of libc: before one of them.
pub extern "C" fn begin(at: *mut InOrder, nr: u32, third: usize, fourth: usize) {
    // SAFETY: room that the thunk made on the stack.
    unsafe { at.write(begin_one(c_long::from(nr), third, fourth)) }
}

/// After one of them.
pub extern "C" fn end(at: *const InOrder) {
    // SAFETY: `begin` wrote it.
    end_one(unsafe { at.read() })
}

/// After `madvise`.
pub extern "C" fn end_madvise(call: *const InOrder, at: usize, len: usize, advice: usize, ret: isize) {
    // SAFETY: `begin` wrote it.
    end_advice(unsafe { call.read() }, at, len, advice, ret)
}

const _: () = assert!(size_of::<InOrder>() == 16);

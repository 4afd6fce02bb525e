//! Handles programs that fork without `fork`: by libc's `syscall` or `clone`.
//!
//! Both are interposed, and give such a child its memory just as `fork` does. Where their code is known they are also
//! followed in libc itself (`patch`): some callers do not come through the interposed ones. What remains is a program
//! that makes the system call with instructions of its own (or has libc make it on a new stack through `syscall`).

use crate::next::Next;
use crate::{
    after_fork, before_fork, calls, ends, environment, fails, futexes, leaving, lent, lockall, pager, patch, pins,
    populated, remap, segments, threads, userfaults,
};
use core::ffi::{c_int, c_long, c_uint, c_void};
use core::sync::atomic::{AtomicUsize, Ordering::*};
use uzswap_pager::discover::populate;
use uzswap_pager::fork::HOOK_STACK;
use uzswap_pager::frames::arena::PAGE;
use uzswap_sys::{raw, sys, thread};

static SYSCALL: Next = Next::new(c"syscall");
static CLONE: Next = Next::new(c"clone");
/// What the child made by `clone` must run. The pager's lock protects both; the child inherits it.
static ENTRY: AtomicUsize = AtomicUsize::new(0);
static ARGUMENT: AtomicUsize = AtomicUsize::new(0);

/// Finds the wrapped functions. Called in the constructor.
pub fn init() {
    SYSCALL.find();
    CLONE.find();
}

/// How often to bring memory that has left again by the time the lock is taken.
const TRIES: u32 = 100;

/// Flags and stack of a call that makes a process or a thread; `None` for any other call.
fn cloning(nr: c_long, a: [usize; 6]) -> Option<(u64, u64)> {
    match nr {
        libc::SYS_fork => Some((0, 0)),
        libc::SYS_clone => Some((a[0] as u64, a[1] as u64)),
        // struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack, …
        libc::SYS_clone3 if a[0] != 0 && a[1] >= 64 => {
            // SAFETY: the caller passes a structure of at least that size.
            let args = unsafe { core::slice::from_raw_parts(a[0] as *const u64, 8) };
            Some((args[0], args[5]))
        }
        _ => None,
    }
}

/// The address where the kernel must note the end of the caller, or of the thread that the call makes in this memory.
///
/// The story: this was known only for libc's `clone`. A thread that waited for one made by the number of the call, or
/// for one that had set the address itself (`set_tid_address`), waited forever if that page was out.
fn end_noted_at(nr: c_long, a: [usize; 6]) -> Option<usize> {
    let shared = (libc::CLONE_VM | libc::CLONE_CHILD_CLEARTID) as u64;
    let is_asked = cloning(nr, a).is_some_and(|(flags, _)| flags & shared == shared);
    let at = match nr {
        libc::SYS_set_tid_address => a[0],
        libc::SYS_clone if is_asked => a[3],
        // SAFETY: the caller passes a structure with more words than this (see `cloning`).
        libc::SYS_clone3 if is_asked => unsafe { (a[0] as *const usize).add(2).read() },
        _ => 0,
    };
    (at != 0).then_some(at)
}

/// syscall(2). A fork made with it is treated as one.
///
/// # Safety
/// As the system call's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(nr: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    let args = [a, b, c, d, e, f];
    // SAFETY: the caller passes the system call's arguments.
    let ret = match unsafe { by_number(nr, args) } {
        Some(ret) => ret,
        None if SYSCALL.find() != 0 => {
            type Real = unsafe extern "C" fn(c_long, usize, usize, usize, usize, usize, usize) -> c_long;
            // SAFETY: the function found under this name, with the caller's arguments.
            return unsafe { core::mem::transmute::<usize, Real>(SYSCALL.find())(nr, a, b, c, d, e, f) };
        }
        // SAFETY: the caller passes the system call's arguments.
        None => unsafe { raw::syscall(nr, args) },
    };
    match raw::check(ret) {
        Ok(value) => value as c_long,
        Err(errno) => fails(errno).into(),
    }
}

/// What has become of a call that libc was about to make.
#[repr(C)]
pub struct Made {
    /// The kernel's value if it was made, else the number of the call.
    value: isize,
    /// Whether it was made.
    is_made: usize,
}

/// Makes a call of libc's `syscall`, or of a function with a call of its own, if it must be followed.
///
/// # Safety
/// `args` points to the six arguments of call `nr`.
pub unsafe extern "C" fn made(nr: c_long, args: *const [usize; 6]) -> Made {
    // SAFETY: as the caller promises.
    let ret = unsafe { by_number(nr, *args) };
    Made { value: ret.unwrap_or(nr as isize), is_made: ret.is_some().into() }
}

/// Makes a call with all that it takes to follow it, and returns the kernel's value; `None` if libc must make it
/// itself, as what it makes may have another stack.
///
/// # Safety
/// As the system call's.
unsafe fn by_number(nr: c_long, args: [usize; 6]) -> Option<isize> {
    let [a, b, c, d, e, f] = args;
    if let Some(at) = end_noted_at(nr, args) {
        threads::pin_number(at);
    }
    Some(match cloning(nr, args) {
        Some((flags, 0)) if flags & libc::CLONE_VM as u64 == 0 && pager().is_some() => {
            hold_with(&used_by(nr, args, flags), flags);
            // SAFETY: the caller's arguments; the child returns here on its copy of this stack.
            let ret = unsafe { raw::syscall(nr, args) };
            after_fork(ret);
            ret
        }
        Some(_) => return None,
        // SAFETY: the caller passes the system call's arguments.
        _ if nr == libc::SYS_mremap => unsafe { remap::mremap(a, b, c, d, e) },
        _ if nr == libc::SYS_process_madvise => {
            let call = calls::begin_one(nr, c, d);
            // SAFETY: the caller passes the system call's arguments.
            unsafe { calls::process_advice(call, args) }
        }
        _ if nr == libc::SYS_vmsplice && lent::copies(a as c_int) => {
            // SAFETY: the caller passes the system call's arguments.
            unsafe { lent::give(a as c_int, b as *const libc::iovec, c, d as c_uint) }
        }
        _ if nr == libc::SYS_mlockall => lockall::call(a as c_int).map_or_else(|errno| -(errno as isize), |()| 0),
        _ if nr == libc::SYS_setsockopt && lent::is_refused(b as c_int, c as c_int) => {
            lent::refuse(args).map_or_else(|errno| -(errno as isize), |()| 0)
        }
        // SAFETY: the caller passes the system call's arguments.
        _ if nr == libc::SYS_futex => unsafe { futexes::call(args) },
        // SAFETY: the caller passes the system call's arguments.
        _ if nr == libc::SYS_execve => environment::start(libc::AT_FDCWD, a as _, c as _, |envp| unsafe {
            raw::syscall(nr, [a, b, envp as usize, d, e, f])
        }),
        // SAFETY: the caller passes the system call's arguments.
        _ if nr == libc::SYS_execveat => environment::start(a as c_int, b as _, d as _, |envp| unsafe {
            raw::syscall(nr, [a, b, c, envp as usize, e, f])
        }),
        _ if nr == libc::SYS_exit_group => {
            ends::noted();
            thread::end_process(a as c_int)
        }
        _ if nr == libc::SYS_mmap => {
            let call = calls::begin_one(nr, c, d);
            let flags = populated::flags_of_mmap(c as c_int, d as c_int) as usize;
            // SAFETY: the caller passes the system call's arguments.
            let ret = unsafe { raw::syscall(nr, [a, b, c, flags, e, f]) };
            calls::end_one(call);
            populated::after_mmap(ret as usize, b, c as c_int, d as c_int);
            ret
        }
        // SAFETY: the caller passes the system call's arguments.
        _ => unsafe { other(nr, args) },
    })
}

/// Makes a call that needs no branch of its own in [`by_number`]. Returns the kernel's value.
///
/// # Safety
/// As the system call's.
unsafe fn other(nr: c_long, args: [usize; 6]) -> isize {
    let [a, b, c, d, ..] = args;
    if !leaving::before_call(nr, a, b, c) {
        return -(libc::ENOMEM as isize);
    }
    if nr == libc::SYS_io_uring_setup {
        pins::may_pin();
    }
    let held = calls::begin_one(nr, c, d);
    let done = match nr {
        libc::SYS_ioctl => userfaults::call(a, b, c),
        libc::SYS_shmat => segments::call(a, b, c),
        _ => None,
    };
    // SAFETY: the caller passes the system call's arguments.
    let ret = done.unwrap_or_else(|| unsafe { raw::syscall(nr, args) });
    match nr {
        libc::SYS_madvise => calls::end_advice(held, a, b, c, ret),
        _ => calls::end_one(held),
    }
    pins::called(nr, ret);
    ret
}

type Entry = extern "C" fn(*mut c_void) -> c_int;
type RealClone =
    unsafe extern "C" fn(Entry, *mut c_void, c_int, *mut c_void, *mut c_void, *mut c_void, *mut c_void) -> c_int;

/// clone(2) of libc. Without CLONE_VM it is a fork.
///
/// # Safety
/// As clone's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    entry: Option<Entry>,
    stack: *mut c_void,
    flags: c_int,
    arg: *mut c_void,
    parent_tid: *mut c_void,
    tls: *mut c_void,
    child_tid: *mut c_void,
) -> c_int {
    let (Some(entry), false, real @ 1..) = (entry, stack.is_null(), CLONE.find()) else {
        return fails(libc::EINVAL);
    };
    // SAFETY: the function found under this name.
    let real = unsafe { core::mem::transmute::<usize, RealClone>(real) };
    if flags & (libc::CLONE_VM | libc::CLONE_CHILD_CLEARTID) == libc::CLONE_VM | libc::CLONE_CHILD_CLEARTID {
        threads::pin_number(child_tid as usize);
    }
    if flags & libc::CLONE_VM != 0 || pager().is_none() || patch::follows_clone() {
        // SAFETY: the caller's arguments.
        return unsafe { real(entry, stack, flags, arg, parent_tid, tls, child_tid) };
    }
    hold_for_clone(flags, stack as usize, parent_tid as usize, child_tid as usize);
    ENTRY.store(entry as usize, Relaxed);
    ARGUMENT.store(arg as usize, Relaxed);
    // SAFETY: the caller's arguments, with an entry of ours that continues with the caller's.
    let pid = unsafe { real(run, stack, flags, core::ptr::null_mut(), parent_tid, tls, child_tid) };
    after_fork(pid as isize);
    pid
}

/// libc's `clone` is about to make a process, whose function and argument lie where its stack begins.
///
/// # Safety
/// They do.
pub unsafe extern "C" fn before_clone(flags: c_int, stack: *mut [usize; 2], parent_tid: usize, child_tid: usize) {
    if pager().is_none() {
        return;
    }
    hold_for_clone(flags, stack as usize + size_of::<[usize; 2]>(), parent_tid, child_tid);
    // Otherwise nobody holds the lock.
    if pager().is_some() {
        // SAFETY: as the caller promises; the stack is in memory, and the lock protects the rest.
        unsafe {
            ENTRY.store((*stack)[0], Relaxed);
            ARGUMENT.store((*stack)[1], Relaxed);
            (*stack)[0] = run as *const () as usize;
        }
    }
}

/// [`hold_with`] the memory that libc's `clone` uses, where the child's stack is below `top`.
fn hold_for_clone(flags: c_int, top: usize, parent_tid: usize, child_tid: usize) {
    let mut used = [(0, 0); 5];
    used[..3].copy_from_slice(&thread_ids(flags as u64, parent_tid, parent_tid, child_tid));
    // libc writes to the new stack, too, before there is a child.
    used[3] = (top.saturating_sub(HOOK_STACK), HOOK_STACK);
    hold_with(&used, flags as u64);
}

/// Where the kernel writes the numbers of what it makes: the first two in the parent, the third in the child. Each is
/// an address and a number of bytes, 0 for none.
fn thread_ids(flags: u64, pidfd: usize, parent_tid: usize, child_tid: usize) -> [(usize, usize); 3] {
    let asked =
        [(libc::CLONE_PIDFD, pidfd), (libc::CLONE_PARENT_SETTID, parent_tid), (libc::CLONE_CHILD_SETTID, child_tid)];
    asked.map(|(flag, at)| if flags & flag as u64 != 0 { (at, size_of::<c_int>()) } else { (0, 0) })
}

/// The memory that a call which makes a process uses: [`thread_ids`], and the arguments of `clone3`.
fn used_by(nr: c_long, a: [usize; 6], flags: u64) -> [(usize, usize); 5] {
    let mut used = [(0, 0); 5];
    let ids = match nr {
        libc::SYS_clone => thread_ids(flags, a[2], a[2], a[3]),
        libc::SYS_clone3 => {
            // SAFETY: the caller passes a structure of that size, which is at least 8 words (see `cloning`).
            let args = unsafe { core::slice::from_raw_parts(a[0] as *const usize, a[1].min(PAGE) / 8) };
            used[3] = (a[0], a[1].min(PAGE));
            // The numbers that the child must get, and how many they are.
            if let [set_tid, count] = args.get(8..10).unwrap_or_default() {
                used[4] = (*set_tid, (*count).min(PAGE / 4) * size_of::<c_int>());
            }
            thread_ids(flags, args[1], args[3], args[2])
        }
        _ => [(0, 0); 3],
    };
    used[..3].copy_from_slice(&ids);
    used
}

/// Takes the lock as for a fork, at a moment when the memory that is used until its release is present. Nobody could
/// serve a fault on it; and where the child writes to it before its memory is managed, the page must be its own
/// already.
///
/// The story: only the new stack was made sure of. If a child's pid was to be written to memory that was out, the
/// program hung; and if the child wrote its own pid, the rest of that page was zeros.
fn hold_with(used: &[(usize, usize)], flags: u64) {
    if flags & libc::CLONE_NEWPID as u64 != 0 {
        leaving::before_fork_apart();
    }
    let used = used.iter().filter(|(at, len)| *at != 0 && *len != 0);
    let pages = used.flat_map(|(at, len)| at / PAGE..at.saturating_add(*len).div_ceil(PAGE));
    for left in (0..TRIES).rev() {
        let protections = pager().map_or(0, |p| p.protections.load(Relaxed));
        pages.clone().for_each(|page| populate(page * PAGE, (page + 1) * PAGE));
        before_fork();
        let Some(p) = pager() else { return };
        // Memory that could not be brought after so many tries is none that the kernel could write to.
        let writable = p.protections.load(Relaxed) == protections;
        if left == 0 || writable && pages.clone().all(|page| p.is_in_memory(page * PAGE)) {
            return;
        }
        after_fork(-1);
    }
}

/// The child's first code.
extern "C" fn run(_: *mut c_void) -> c_int {
    let (entry, arg) = (ENTRY.load(Relaxed), ARGUMENT.load(Relaxed));
    after_fork(0);
    // SAFETY: the entry and argument that `clone` was given.
    let status = unsafe { core::mem::transmute::<usize, Entry>(entry)(arg as *mut c_void) };
    // The entry's return ends the process. (libc's clone would end only this thread, and the helpers would keep the
    // process alive.)
    // SAFETY: ends the process.
    let _ = unsafe { sys!(libc::SYS_exit_group, status) };
    status
}

//! Watches for what a managed process cannot do: the process is let go of first (`uzswap_pager::discover::letgo`). Such
//! are a filter for system calls, a fork by a program that has given up privileges that its child needs, and a search
//! for leaks.
//!
//! Programs install filters by libc's `prctl` and `syscall`, which are interposed. A program that makes the system call
//! with instructions of its own goes unseen.
//!
//! LeakSanitizer (part of AddressSanitizer, active when a program ends) stops all threads of the process by ptrace,
//! including uzswap's, and has another process that shares its memory read all of it. That process waited forever for
//! pages that were out. Before it starts, it calls a function that programs may define, to ask whether it is turned
//! off.

use crate::next::Next;
use crate::{PAGER, environment, fails, pager, set_mask};
use core::ffi::{c_int, c_long};
use core::sync::atomic::{AtomicUsize, Ordering::*};
use uzswap_pager::frames::arena::Layout;
use uzswap_pager::group::unmanaged;
use uzswap_pager::pager::Pager;
use uzswap_pager::says;
use uzswap_sys::{raw, sys, thread};

/// The range that uzswap has reserved. It is also set in a process that is not managed, or not any more, as that may
/// lock all its memory.
///
/// The story: in a process that had no place in its group, or no thread of uzswap's, `mlockall` made the kernel fill
/// the whole range, 72 GiB.
static RESERVED: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

static PRCTL: Next = Next::new(c"prctl");
static UNSHARE: Next = Next::new(c"unshare");
static SETNS: Next = Next::new(c"setns");
static TURNED_OFF: Next = Next::new(c"__lsan_is_turned_off");

/// Finds the interposed functions, and records the reserved range. Called in the constructor.
pub fn init(layout: &Layout) {
    RESERVED[0].store(layout.base, Relaxed);
    RESERVED[1].store(layout.end, Relaxed);
    PRCTL.find();
    UNSHARE.find();
    SETNS.find();
    TURNED_OFF.find();
}

/// prctl(2): it can install a filter.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(option: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int {
    type Real = unsafe extern "C" fn(c_int, usize, usize, usize, usize) -> c_int;
    if option == libc::PR_SET_SECCOMP && restricts(a, b) && !may_restrict_calls() {
        return fails(libc::ENOMEM);
    }
    // SAFETY: the function found under this name, with the caller's arguments. (All are passed in registers, given or
    // not.)
    unsafe { core::mem::transmute::<usize, Real>(PRCTL.find())(option, a, b, c, d) }
}

/// unshare(2): only a single-threaded process may get its own user namespace.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unshare(flags: c_int) -> c_int {
    type Real = unsafe extern "C" fn(c_int) -> c_int;
    let wants_one = flags & (libc::CLONE_NEWUSER | libc::CLONE_THREAD | libc::CLONE_SIGHAND | libc::CLONE_VM) != 0;
    // SAFETY: the function found under this name, with the caller's arguments.
    with_one_thread(wants_one, || unsafe { core::mem::transmute::<usize, Real>(UNSHARE.find())(flags) })
}

/// setns(2): as for unshare.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setns(fd: c_int, kind: c_int) -> c_int {
    type Real = unsafe extern "C" fn(c_int, c_int) -> c_int;
    let wants_one = kind == 0 || kind & (libc::CLONE_NEWUSER | libc::CLONE_NEWNS) != 0;
    // SAFETY: as above.
    with_one_thread(wants_one, || unsafe { core::mem::transmute::<usize, Real>(SETNS.find())(fd, kind) })
}

/// Makes a call that the kernel refuses (EINVAL) to a process with several threads. If it does, lets go of the process,
/// and makes the call again.
fn with_one_thread(wants_one: bool, call: impl Fn() -> c_int) -> c_int {
    let done = call();
    // SAFETY: the calling thread is one of libc's, so it has an `errno`.
    let refused = done != 0 && unsafe { *libc::__errno_location() } == libc::EINVAL;
    let Some(p) = pager().filter(|_| refused && wants_one) else { return done };
    let_go(p, unmanaged::ALONE, b" enters a namespace that is open to processes of one thread only, so uzswap's have to end; it runs without a limit from now on\n");
    if pager().is_some() { fails(libc::EINVAL) } else { call() }
}

/// Called before a system call that the program makes by number: whether it may be made. If not, it must fail with
/// `ENOMEM`.
pub fn before_call(nr: c_long, a: usize, b: usize, c: usize) -> bool {
    let restricts = match nr {
        libc::SYS_seccomp => match a as u32 {
            libc::SECCOMP_SET_MODE_STRICT => true,
            // Without a filter it only asks what the kernel supports.
            libc::SECCOMP_SET_MODE_FILTER => c != 0,
            _ => false,
        },
        libc::SYS_prctl => a as c_int == libc::PR_SET_SECCOMP && restricts(b, c),
        _ => false,
    };
    !restricts || may_restrict_calls()
}

/// Whether prctl's PR_SET_SECCOMP restricts anything. Without a filter it only asks whether the kernel supports filters
/// (EFAULT).
///
/// The story: Firefox asks this when it starts, and all of it ran without a limit.
fn restricts(mode: usize, filter: usize) -> bool {
    mode != libc::SECCOMP_MODE_FILTER as usize || filter != 0
}

/// Lets go of the process, as it is about to restrict its system calls. False if it stays managed: its threads would
/// wait forever for pages that are out, as uzswap's threads may be forbidden the calls that bring them.
fn may_restrict_calls() -> bool {
    let Some(p) = pager() else {
        environment::filters();
        return true;
    };
    let why = b" restricts its system calls (seccomp), which uzswap's threads would not survive; it runs without a limit from now on\n";
    let_go(p, unmanaged::FILTER, why);
    if pager().is_none() {
        environment::filters();
    }
    pager().is_none() || !p.is_of_this_process()
}

/// Called before a program locks all its memory. Returns the range that uzswap has reserved, if any, which must not be
/// locked.
pub fn locks_all() -> Option<(usize, usize)> {
    if let Some(p) = pager() {
        // In case it stays managed because a page cannot come back.
        p.locks.store(true, Relaxed);
        let why = b" locks all its memory (mlockall), so that nothing can be taken out of it; it runs without a limit from now on\n";
        let_go(p, unmanaged::LOCKED, why);
    }
    reserved()
}

/// The range that uzswap has reserved, if any.
pub fn reserved() -> Option<(usize, usize)> {
    let [base, end] = [0, 1].map(|i| RESERVED[i].load(Relaxed));
    (end != 0).then_some((base, end))
}

/// LeakSanitizer's question before it stops all threads: whether it must not look for leaks. It must not if the process
/// cannot be let go of, as it would never finish.
#[unsafe(no_mangle)]
pub extern "C" fn __lsan_is_turned_off() -> c_int {
    type Real = unsafe extern "C" fn() -> c_int;
    let next = TURNED_OFF.find();
    // SAFETY: the function found under this name, which takes no arguments.
    if next != 0 && unsafe { core::mem::transmute::<usize, Real>(next)() } != 0 {
        return 1;
    }
    let Some(p) = pager() else { return 0 };
    let_go(
        p,
        unmanaged::LEAKS,
        b" is searched for leaks (LeakSanitizer), which stops uzswap's threads; it runs without a limit from now on\n",
    );
    c_int::from(pager().is_some_and(Pager::is_of_this_process))
}

/// Called before a fork, with all signals blocked: lets go of the process if the child could not manage the memory that
/// it inherits.
pub fn before_fork(p: &Pager) {
    if p.engaged.load(Acquire) && !p.child_could_manage() {
        lets_children_go(p);
    }
}

/// Called before a fork into a new PID namespace: like [`before_fork`], which would not see it.
pub fn before_fork_apart() {
    if let Some(p) = pager().filter(|p| p.engaged.load(Acquire)) {
        lets_children_go(p);
    }
}

fn lets_children_go(p: &Pager) {
    let why = b" forks, and its child could not manage its memory (for want of rights that it gave up, of /proc, or of descriptors, or in a namespace of its own); both run without a limit from now on\n";
    let_go(p, unmanaged::RIGHTS, why);
}

/// Makes a call that changes the user of all threads that libc knows, and has uzswap's threads `follow`. `real` makes
/// the call, and returns 0 on success. If the threads cannot follow, the process is let go of.
pub fn changes_user(real: impl FnOnce() -> c_int, follow: impl FnOnce(&Pager) -> bool) -> c_int {
    const WHY: &[u8] = b" changes its user while its memory is managed, and no uzswap thread may keep the former user's rights; it runs without a limit from now on\n";
    let Some(p) = pager().filter(|p| p.is_of_this_process()) else { return real() };
    // libc's own signals stay unblocked: by one of them it makes the other threads change their user, and waits for
    // them.
    let mask = set_mask(!(1 << 31 | 1 << 32));
    let one = p.following.one.lock();
    if pager().is_some() && !p.can_follow() {
        let_go(p, unmanaged::USER, WHY);
        if pager().is_some() {
            drop(one);
            set_mask(mask);
            return fails(libc::EAGAIN);
        }
    }
    let done = real();
    if done == 0 && pager().is_some() && !follow(p) {
        let_go(p, unmanaged::USER, WHY);
        if pager().is_some() {
            p.say(b"uzswap: a process changed its user, and its memory cannot be given back; it is ended rather than keep threads of the former user\n");
            // SAFETY: ends the process.
            let _ = unsafe { sys!(libc::SYS_exit_group, 125) };
        }
    }
    drop(one);
    set_mask(mask);
    done
}

/// Called when a process has a C library, besides that of the program, whose calls cannot be followed.
pub fn cannot_follow() {
    let why = b" loads another C library, whose calls cannot be followed; it runs without a limit from now on\n";
    if let Some(p) = pager() {
        let_go(p, unmanaged::LIBC, why);
    }
}

fn let_go(p: &Pager, reason: u32, why: &[u8]) {
    // In a vfork child the memory is the parent's.
    if !p.is_of_this_process() {
        return;
    }
    let mask = set_mask(!0);
    if p.let_go() {
        // Mapping calls and forks that began with a pager end with it.
        p.calls.stop();
        PAGER.store(core::ptr::null_mut(), Release);
        p.calls.go_on();
        says::end();
        if p.group.warns_first(reason) {
            say(why);
        }
    } else if p.group.warns_first(unmanaged::STAYS) {
        say(b": its memory cannot be given back now, as some pages cannot be read back; it stays managed, and what it asked for (a system-call filter, another user) is refused if it needs that\n");
    }
    set_mask(mask);
}

/// Prints a line about this process in one piece, without allocating (which would take the heap's lock).
fn say(why: &[u8]) {
    let (mut line, mut number, mut n) = ([0; 320], [0; 20], 0);
    for part in [b"uzswap: process ".as_slice(), raw::decimal(thread::getpid() as u64, &mut number), why] {
        line[n..n + part.len()].copy_from_slice(part);
        n += part.len();
    }
    // Not by another thread: the program's next call may be refused if there are several.
    says::write(&line[..n]);
}

//! The program's `mremap`. It runs alone among the mapping calls (why: `uzswap_pager::calls`). Where the kernel sends
//! no event for it, the tables are updated here (`uzswap_pager::calls::remapped`). Where the kernel sees several
//! mappings in what the program knows as one, it is made in pieces (`pieces`).

use crate::calls::{begin_one, end_one};
use crate::parts::Call;
use crate::{is_no_stack, locked, pager, pieces};
use uzswap_pager::calls::Held;
use uzswap_pager::calls::remapped::Remap;
use uzswap_pager::frames::arena::PAGE;
use uzswap_pager::pager::Pager;
use uzswap_sys::{raw, thread};

/// mremap(2). Returns the kernel's value.
///
/// # Safety
/// As the system call's.
pub unsafe extern "C" fn mremap(from: usize, old_len: usize, new_len: usize, flags: usize, to: usize) -> isize {
    let call = Call { from, old_len, new_len, flags, to };
    let order = begin_one(libc::SYS_mremap, new_len, flags);
    // SAFETY: the caller passes the system call's arguments.
    let (ret, in_pieces) = unsafe {
        match pager().filter(|_| order.held == Some(Held::Alone)) {
            Some(p) => alone(p, &call),
            None => (system_call(&call), false),
        }
    };
    if let (Some(p), Ok(at)) = (pager(), raw::check(ret)) {
        is_no_stack(p, at, at + new_len.next_multiple_of(PAGE));
        if in_pieces {
            // Parts of it may not be managed yet, and were noted at their old place.
            p.growth.noted.note(at, new_len);
        }
    }
    end_one(order);
    ret
}

/// Makes the call with the lock of mapping calls held alone and all signals blocked. Also returns whether it was made
/// in pieces.
///
/// # Safety
/// As the system call's.
unsafe fn alone(p: &Pager, call: &Call) -> (isize, bool) {
    let mut pieces = pieces::before(p, call);
    let mut ret = -(libc::EFAULT as isize);
    if pieces.is_none() {
        // SAFETY: the caller passes the system call's arguments.
        ret = unsafe { one(p, call) };
        if raw::check(ret) == Err(libc::EFAULT) {
            pieces = pieces::after(p, call);
        }
    }
    // SAFETY: the caller passes the system call's arguments, with the lock held and signals blocked.
    pieces.map_or((ret, false), |pieces| (unsafe { pieces::remap(&pieces, p, call) }, true))
}

/// The bare system call.
///
/// # Safety
/// As the system call's.
unsafe fn system_call(call: &Call) -> isize {
    // SAFETY: the caller passes the system call's arguments.
    unsafe { raw::syscall(libc::SYS_mremap, [call.from, call.old_len, call.new_len, call.flags, call.to, 0]) }
}

/// The system call, with what it takes to keep managed memory managed. The lock of mapping calls must be held alone,
/// and all signals blocked.
///
/// # Safety
/// As the system call's.
pub unsafe fn one(p: &Pager, call: &Call) -> isize {
    let Call { from, old_len, new_len, flags, .. } = *call;
    p.calls.begin_remap(from, new_len);
    let locks = locked::before(from, old_len, new_len);
    let remaps = Remap::of(from, old_len, new_len, flags).is_some_and(|remap| p.before_remap(remap));
    // SAFETY: the caller passes the system call's arguments.
    let ret = unsafe { system_call(call) };
    if remaps && !p.after_remap(raw::check(ret).ok()) {
        p.say(b"uzswap: memory that was moved could not be registered; the process is ended rather than read wrong data\n");
        thread::end_process(125);
    }
    if locks {
        locked::after(raw::check(ret).ok().map(|at| (at, new_len.next_multiple_of(PAGE))));
    }
    ret
}

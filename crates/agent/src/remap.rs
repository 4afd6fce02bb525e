//! The program's `mremap`: alone among its mapping calls (why: `uzswap_pager::calls`), made good where the kernel does not tell of it
//! (`uzswap_pager::calls::remapped`), and in pieces where the kernel sees several mappings in what the program knows as one (`pieces`).

use crate::calls::{begin_one, end_one};
use crate::parts::Call;
use crate::{is_no_stack, locked, pager, pieces};
use uzswap_pager::calls::Held;
use uzswap_pager::calls::remapped::Remap;
use uzswap_pager::frames::arena::PAGE;
use uzswap_pager::pager::Pager;
use uzswap_sys::{raw, thread};

/// mremap(2): what the kernel returns.
///
/// # Safety
/// As the system call's.
pub unsafe extern "C" fn mremap(from: usize, old_len: usize, new_len: usize, flags: usize, to: usize) -> isize {
    let call = Call { from, old_len, new_len, flags, to };
    let order = begin_one(libc::SYS_mremap, new_len, flags);
    // SAFETY: as the caller says.
    let (ret, in_pieces) = unsafe {
        match pager().filter(|_| order.held == Some(Held::Alone)) {
            Some(p) => alone(p, &call),
            None => (system_call(&call), false),
        }
    };
    if let (Some(p), Ok(at)) = (pager(), raw::check(ret)) {
        is_no_stack(p, at, at + new_len.next_multiple_of(PAGE));
        if in_pieces {
            // (Parts of it may not be managed yet, and were noted to be elsewhere.)
            p.growth.noted.note(at, new_len);
        }
    }
    end_one(order);
    ret
}

/// The call, with the lock of mapping calls held alone and all signals blocked; whether it was made in pieces.
///
/// # Safety
/// As the system call's.
unsafe fn alone(p: &Pager, call: &Call) -> (isize, bool) {
    let mut pieces = pieces::before(p, call);
    let mut ret = -(libc::EFAULT as isize);
    if pieces.is_none() {
        // SAFETY: as the caller says.
        ret = unsafe { one(p, call) };
        if raw::check(ret) == Err(libc::EFAULT) {
            pieces = pieces::after(p, call);
        }
    }
    // SAFETY: as the caller says.
    pieces.map_or((ret, false), |pieces| (unsafe { pieces::remap(&pieces, p, call) }, true))
}

/// The system call alone.
///
/// # Safety
/// As the system call's.
unsafe fn system_call(call: &Call) -> isize {
    // SAFETY: as the caller says.
    unsafe { raw::syscall(libc::SYS_mremap, [call.from, call.old_len, call.new_len, call.flags, call.to, 0]) }
}

/// The system call, and what it takes that what is managed stays so, with the lock of mapping calls held alone and all signals blocked.
///
/// # Safety
/// As the system call's.
pub unsafe fn one(p: &Pager, call: &Call) -> isize {
    let Call { from, old_len, new_len, flags, .. } = *call;
    p.calls.begin_remap(from, new_len);
    let locks = locked::before(from, old_len, new_len);
    let remaps = Remap::of(from, old_len, new_len, flags).is_some_and(|remap| p.before_remap(remap));
    // SAFETY: as the caller says.
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

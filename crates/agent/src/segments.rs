//! System V shared memory that is attached over memory of the program's (`shmat` with SHM_REMAP).
//!
//! This is the one way to unmap memory for which the kernel sends no event. What was out there was still known when the
//! segment was detached, and came back in what was mapped there next, where there should be zeros. So the segment is
//! attached elsewhere and moved over that memory by `mremap`, which unmaps it in the same step and sends an event. A
//! segment that may not be attached changes nothing.

use crate::next::Next;
use crate::{fails, pager, remap};
use core::ffi::{c_int, c_void};
use uzswap_pager::frames::arena::PAGE;
use uzswap_sys::raw::Errno;
use uzswap_sys::{raw, sys};

static SHMAT: Next = Next::new(c"shmat");

/// Finds the interposed function. Called in the constructor.
pub fn init() {
    SHMAT.find();
}

/// The address, if a segment is attached over what is there; `None` if it is not, or if the kernel should report what
/// is wrong.
fn over(at: usize, flags: c_int) -> Option<usize> {
    let start = if flags & libc::SHM_RND != 0 { at & !(PAGE - 1) } else { at };
    (flags & libc::SHM_REMAP != 0 && start != 0 && start.is_multiple_of(PAGE) && pager().is_some()).then_some(start)
}

/// Makes the system call `shmat` for the program if it attaches over memory. Returns what the kernel would.
pub fn call(id: usize, at: usize, flags: usize) -> Option<isize> {
    let at = over(at, flags as c_int)?;
    Some(attach(id as c_int, at, flags as c_int).map_or_else(|errno| -(errno as isize), |()| at as isize))
}

/// Attaches a segment over what is at `at`.
fn attach(id: c_int, at: usize, flags: c_int) -> Result<(), Errno> {
    // SAFETY: a plain structure, for which zeros are a valid value.
    let mut about: libc::shmid_ds = unsafe { core::mem::zeroed() };
    // SAFETY: a structure of ours.
    unsafe { sys!(libc::SYS_shmctl, id, libc::IPC_STAT, &raw mut about) }?;
    let len = about.shm_segsz.next_multiple_of(PAGE);
    // SAFETY: the kernel chooses a free place.
    let from = unsafe { sys!(libc::SYS_shmat, id, 0, flags & !(libc::SHM_REMAP | libc::SHM_RND)) }?;
    let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the segment just attached, over memory that the program gives up.
    let ret = unsafe { remap::mremap(from, len, len, how as usize, at) };
    raw::check(ret).map(drop).inspect_err(|_| {
        // SAFETY: the segment just attached, which nobody knows.
        let _ = unsafe { sys!(libc::SYS_shmdt, from) };
    })
}

/// shmat(2).
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmat(id: c_int, at: *const c_void, flags: c_int) -> *mut c_void {
    type Real = unsafe extern "C" fn(c_int, *const c_void, c_int) -> *mut c_void;
    if let Some(start) = over(at as usize, flags) {
        return attach(id, start, flags)
            .map_or_else(|errno| fails(errno) as isize as *mut c_void, |()| start as *mut c_void);
    }
    // SAFETY: the function found under this name, with the caller's arguments.
    unsafe { core::mem::transmute::<usize, Real>(SHMAT.find())(id, at, flags) }
}

//! A program's own userfaultfd: memory that uzswap has registered is given up for it (why and how:
//! `uzswap_pager::discover::ceded`).
//!
//! libc's `ioctl` is interposed for one request, as `syscall` is anyway; every other request is passed on after one
//! comparison. A program that registers memory with instructions of its own, or for another process by a descriptor
//! that it was given, gets EBUSY.

use crate::next::Next;
use crate::{fails, pager, set_mask};
use core::ffi::{c_int, c_ulong};
use uzswap_pager::frames::arena::PAGE;
use uzswap_sys::raw::Errno;
use uzswap_sys::{sys, thread};

static IOCTL: Next = Next::new(c"ioctl");
/// UFFDIO_REGISTER. Its argument is a `struct uffdio_register`: start, len, mode, ioctls (the last is the kernel's
/// answer).
const REGISTER: u32 = 0xc020_aa00;
type Register = [u64; 4];

/// Finds the interposed function. Called in the constructor.
pub fn init() {
    IOCTL.find();
}

/// ioctl(2).
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: usize) -> c_int {
    type Real = unsafe extern "C" fn(c_int, c_ulong, usize) -> c_int;
    if request as u32 == REGISTER
        && let Some(done) = register(fd, argument)
    {
        return done.map_or_else(fails, |()| 0);
    }
    // SAFETY: the function found under this name, with the caller's arguments. (The last is passed in a register,
    // whether the caller gave it or not.)
    unsafe { core::mem::transmute::<usize, Real>(IOCTL.find())(fd, request, argument) }
}

/// Makes the system call `ioctl` for the program if it registers memory. Returns what the kernel would.
pub fn call(fd: usize, request: usize, argument: usize) -> Option<isize> {
    let done = (request as u32 == REGISTER).then(|| register(fd as c_int, argument)).flatten()?;
    Some(done.map_or_else(|errno| -(errno as isize), |()| 0))
}

/// Registers memory; `None` if the call can simply go to the kernel.
fn register(fd: c_int, argument: usize) -> Option<Result<(), Errno>> {
    // In a vfork child the memory is the parent's.
    let p = pager().filter(|p| p.is_of_this_process())?;
    let mut asked: Register = [0; 4];
    // If it cannot be read, let the kernel complain.
    transfer(libc::SYS_process_vm_readv, asked.as_mut_ptr(), argument).ok()?;
    let (start, end) = (asked[0] as usize, (asked[0] as usize).checked_add(asked[1] as usize)?);
    if !start.is_multiple_of(PAGE) || !end.is_multiple_of(PAGE) {
        return None;
    }
    let mask = set_mask(!0);
    let done = p.register_of_program((start, end), || {
        // SAFETY: a structure of ours, because the caller's may be out.
        unsafe { sys!(libc::SYS_ioctl, fd, REGISTER, asked.as_mut_ptr()) }.map(drop)
    });
    set_mask(mask);
    // The kernel, too, fails when everything is done and its answer cannot be written.
    Some(done.and_then(|()| transfer(libc::SYS_process_vm_writev, asked.as_mut_ptr(), argument)))
}

/// Reads or writes a structure of the program's, which may not exist.
fn transfer(how: i64, own: *mut u64, theirs: usize) -> Result<(), Errno> {
    let of = |at: usize| libc::iovec { iov_base: at as *mut _, iov_len: size_of::<Register>() };
    let (local, remote) = (of(own as usize), of(theirs));
    // SAFETY: one range is the caller's; for the other the kernel returns EFAULT if it does not exist.
    let n = unsafe { sys!(how, thread::getpid(), &raw const local, 1, &raw const remote, 1, 0) }?;
    if n == size_of::<Register>() { Ok(()) } else { Err(libc::EFAULT) }
}

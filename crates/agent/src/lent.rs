//! Memory that a program lends to the kernel until somebody has read it: by `vmsplice` to a pipe, by MSG_ZEROCOPY to a
//! socket.
//!
//! The kernel holds such pages by a reference, not a pin, and UFFDIO_MOVE does not see references. So a page would move
//! out of the program while a pipe has it, its frame would be reused, and the reader would get another page's bytes.
//! Therefore a managed process does not lend:
//!
//! - `vmsplice` copies, like a write. It still waits for room for the first bytes only, and takes what there is room
//!   for, as the caller itself may be the one that empties the pipe. (The reader does not see what the program writes
//!   there afterwards; it must not rely on that.)
//! - SO_ZEROCOPY is refused with EOPNOTSUPP, as sockets do that do not support it. Without it the kernel ignores
//!   MSG_ZEROCOPY.
//!
//! Both hold before memory is managed, too, as a page lent now may be managed before it is read. Without MOVE neither
//! is done: then the kernel holds a page of its own, which is not reused.

use crate::next::Next;
use crate::{fails, pager};
use core::ffi::{c_int, c_uint, c_void};
use uzswap_sys::raw::Errno;
use uzswap_sys::{process, raw, sys, thread};

/// Most `struct iovec`s in one call (UIO_MAXIOV).
const RANGES: usize = 1024;
/// Bytes written to a pipe in one piece: there is room for them if there is any.
const PIECE: usize = 4096;

static VMSPLICE: Next = Next::new(c"vmsplice");
/// libc's functions in which a thread can be cancelled.
static WRITE: Next = Next::new(c"write");
static TESTCANCEL: Next = Next::new(c"pthread_testcancel");

/// Finds the functions. Called in the constructor.
pub fn init() {
    for f in [&VMSPLICE, &WRITE, &TESTCANCEL] {
        f.find();
    }
}

/// Whether a socket option would make the socket send memory that is lent to it.
pub fn is_refused(level: c_int, name: c_int) -> bool {
    (level, name) == (libc::SOL_SOCKET, libc::SO_ZEROCOPY) && pager().is_some_and(|p| !p.without_move)
}

/// setsockopt(2) with these arguments, for an option that is refused ([`is_refused`]). The kernel reports what else is
/// wrong with the call, and may still turn the option off.
///
/// The story: programs got EOPNOTSUPP also for a closed descriptor or a file, and even when they turned the option off.
///
/// # Errors
/// The kernel's; `EOPNOTSUPP` if the kernel would have accepted the call.
pub fn refuse(args: [usize; 6]) -> Result<(), Errno> {
    let [fd, level, name, value, len, _] = args;
    let (mut asked, off) = ([0; size_of::<c_int>()], 0 as c_int);
    // If the value may not be read, assume that it turns the option on.
    let lends = match process::read_memory(thread::getpid(), value, &mut asked) {
        Ok(()) => c_int::from_ne_bytes(asked) == 1,
        Err(errno) => errno != libc::EFAULT,
    };
    let (value, len) = if lends { (&raw const off as usize, len.min(size_of::<c_int>())) } else { (value, len) };
    // SAFETY: the program's call, or one that turns off the option that it would have turned on.
    unsafe { sys!(libc::SYS_setsockopt, fd, level, name, value, len) }?;
    if lends { Err(libc::EOPNOTSUPP) } else { Ok(()) }
}

/// Whether `vmsplice` to `pipe` must copy. (Out of a pipe the kernel copies; for what is no pipe it refuses.)
pub fn copies(pipe: c_int) -> bool {
    if pager().is_none_or(|p| p.without_move) {
        return false;
    }
    // SAFETY: zeros are a stat; the call fills it.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: as above.
    let stated = unsafe { sys!(libc::SYS_fstat, pipe, &raw mut stat) }.is_ok();
    // SAFETY: numbers only.
    let flags = unsafe { sys!(libc::SYS_fcntl, pipe, libc::F_GETFL) };
    let writes = flags.is_ok_and(|f| f as i32 & libc::O_ACCMODE != libc::O_RDONLY);
    stated && stat.st_mode & libc::S_IFMT == libc::S_IFIFO && writes
}

/// Writes to a pipe what `vmsplice` would lend to it. Returns what the system call would.
///
/// # Safety
/// As vmsplice's.
pub unsafe fn give(pipe: c_int, ranges: *const libc::iovec, count: usize, flags: c_uint) -> isize {
    // SAFETY: the caller passes vmsplice's arguments.
    unsafe {
        give_by(pipe, ranges, count, flags, |at, len| {
            raw::syscall(libc::SYS_write, [pipe as usize, at as usize, len, 0, 0, 0])
        })
    }
}

/// As [`give`], but bytes whose write may block go through `write`, which returns what the system call does.
///
/// # Safety
/// As vmsplice's.
unsafe fn give_by(
    pipe: c_int,
    ranges: *const libc::iovec,
    count: usize,
    flags: c_uint,
    write: impl Fn(*mut c_void, usize) -> isize,
) -> isize {
    const FLAGS: c_uint = libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;
    if flags & !FLAGS != 0 || count > RANGES {
        return -(libc::EINVAL as isize);
    }
    // At the file's own position (a pipe has no other).
    const HERE: isize = -1;
    let args = [pipe as usize, ranges as usize, count, HERE as usize, 0, libc::RWF_NOWAIT as usize];
    // SAFETY: the caller passes vmsplice's arguments.
    match unsafe { raw::syscall(libc::SYS_pwritev2, args) } {
        full if full == -(libc::EAGAIN as isize) && flags & libc::SPLICE_F_NONBLOCK != 0 => full,
        // EOPNOTSUPP: kernels before 6.4, and named pipes.
        told if [-libc::EAGAIN, -libc::EOPNOTSUPP].contains(&(told as c_int)) => {
            let wait = flags & libc::SPLICE_F_NONBLOCK == 0;
            // SAFETY: the caller passes vmsplice's arguments, and the kernel was able to read the ranges.
            unsafe { give_piece(pipe, core::slice::from_raw_parts(ranges, count), wait, write) }
        }
        done => done,
    }
}

/// Writes the first bytes, which fit wherever there is any room. With `wait`, waits for room.
///
/// # Safety
/// The kernel must be able to read the ranges.
unsafe fn give_piece(
    pipe: c_int,
    ranges: &[libc::iovec],
    wait: bool,
    write: impl Fn(*mut c_void, usize) -> isize,
) -> isize {
    let Some(first) = ranges.iter().find(|range| range.iov_len > 0) else { return 0 };
    if !wait {
        let mut asked = libc::pollfd { fd: pipe, events: libc::POLLOUT, revents: 0 };
        // SAFETY: one structure, filled by the call.
        if unsafe { sys!(libc::SYS_poll, &raw mut asked, 1, 0) } == Ok(0) {
            return -(libc::EAGAIN as isize);
        }
    }
    write(first.iov_base, first.iov_len.min(PIECE))
}

/// Writes to a pipe by libc's function, in which a waiting thread can be cancelled.
///
/// # Safety
/// As the system call's.
unsafe fn write_as_libc(pipe: c_int, at: *mut c_void, len: usize) -> isize {
    type Real = unsafe extern "C" fn(c_int, *const c_void, usize) -> isize;
    // SAFETY: the function found under this name, with the caller's arguments; the calling thread is one of libc's, so
    // it has an `errno`.
    unsafe {
        match core::mem::transmute::<usize, Real>(WRITE.find())(pipe, at, len) {
            -1 => -(*libc::__errno_location() as isize),
            done => done,
        }
    }
}

/// vmsplice(2).
///
/// The story: libc's is a cancellation point, but a thread that waited for room in a pipe could no longer be cancelled.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmsplice(pipe: c_int, ranges: *const libc::iovec, count: usize, flags: c_uint) -> isize {
    type Real = unsafe extern "C" fn(c_int, *const libc::iovec, usize, c_uint) -> isize;
    if !copies(pipe) {
        // SAFETY: the function found under this name, with the caller's arguments.
        return unsafe { core::mem::transmute::<usize, Real>(VMSPLICE.find())(pipe, ranges, count, flags) };
    }
    // SAFETY: the function found under this name, which takes no arguments and returns nothing.
    unsafe { core::mem::transmute::<usize, unsafe extern "C" fn()>(TESTCANCEL.find())() };
    // SAFETY: the caller passes vmsplice's arguments.
    let given = unsafe { give_by(pipe, ranges, count, flags, |at, len| write_as_libc(pipe, at, len)) };
    raw::check(given).map_or_else(|errno| fails(errno) as isize, |n| n as isize)
}

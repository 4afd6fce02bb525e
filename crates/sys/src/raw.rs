//! System calls without libc: helper threads have no usable TLS, so nothing here may touch `errno`.

use core::arch::asm;

/// An error number as the kernel returned it, made positive.
pub type Errno = i32;

/// Makes a system call and returns the kernel's value, which is negative on error.
///
/// # Safety
/// The arguments must be what call `nr` expects, and pointers must be valid for what it does with them.
#[inline]
pub unsafe fn syscall(nr: i64, a: [usize; 6]) -> isize {
    let ret: isize;
    // SAFETY: the caller vouches for the arguments; the clobbers are those of the x86-64 system call ABI.
    unsafe {
        asm!("syscall", inlateout("rax") nr as isize => ret, in("rdi") a[0], in("rsi") a[1], in("rdx") a[2],
             in("r10") a[3], in("r8") a[4], in("r9") a[5], lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    ret
}

/// Turns a kernel return value into a `Result`.
///
/// # Errors
/// The error that the kernel returned.
#[inline]
pub fn check(ret: isize) -> Result<usize, Errno> {
    if (-4095..0).contains(&ret) { Err(-ret as Errno) } else { Ok(ret as usize) }
}

/// Makes a system call with up to six arguments: `sys!(nr, a, b…)`, giving `Result<usize, Errno>`.
#[macro_export]
macro_rules! sys {
    ($nr:expr $(, $a:expr)* $(,)?) => {{
        let given: &[usize] = &[$($a as usize),*];
        let mut all = [0usize; 6];
        all[..given.len()].copy_from_slice(given);
        $crate::raw::check($crate::raw::syscall($nr, all))
    }};
}

/// Closes a descriptor, ignoring errors.
pub fn close(fd: i32) {
    // SAFETY: closing a descriptor touches no memory.
    let _ = unsafe { sys!(libc::SYS_close, fd) };
}

/// Opens a path, which is given with its terminating NUL.
///
/// # Errors
/// The kernel's.
///
/// # Panics
/// When the path has no terminating NUL.
pub fn open(path: &[u8], flags: i32) -> Result<i32, Errno> {
    assert_eq!(path.last(), Some(&0));
    // SAFETY: the path is a readable NUL-terminated string.
    unsafe { sys!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags | libc::O_CLOEXEC, 0) }.map(|fd| fd as i32)
}

/// Fills a buffer of at most 256 bytes with random bytes good enough for keys.
///
/// # Errors
/// The kernel's; `EIO` when it returned fewer.
pub fn random(out: &mut [u8]) -> Result<(), Errno> {
    // SAFETY: the buffer is writable and that long.
    let n = unsafe { sys!(libc::SYS_getrandom, out.as_mut_ptr(), out.len(), 0) }?;
    if n == out.len() { Ok(()) } else { Err(libc::EIO) }
}

/// A new descriptor for the process's standard error, whatever descriptor table the calling thread has.
///
/// # Errors
/// When the process has no standard error.
pub fn standard_error() -> Result<i32, Errno> {
    // SAFETY: numbers only.
    let own = unsafe { sys!(libc::SYS_pidfd_open, crate::thread::getpid(), 0) };
    let same = own.and_then(|pidfd| {
        // The open file itself, so that output continues where the program's own ended.
        // SAFETY: numbers only.
        let fd = unsafe { sys!(libc::SYS_pidfd_getfd, pidfd, 2, 0) };
        close(pidfd as i32);
        fd
    });
    // Some containers forbid that. Without O_APPEND a file opened anew would be overwritten from its start. A socket
    // cannot be opened.
    same.map(|fd| fd as i32).or_else(|_| open(b"/proc/self/fd/2\0", libc::O_WRONLY | libc::O_APPEND))
}

/// Reads at an offset into a buffer.
///
/// # Errors
/// The kernel's.
pub fn pread(fd: i32, buf: &mut [u8], at: u64) -> Result<usize, Errno> {
    // SAFETY: the buffer is ours and as long as said.
    unsafe { sys!(libc::SYS_pread64, fd, buf.as_mut_ptr(), buf.len(), at) }
}

/// Reads the target of a symbolic link into `out`. `path` ends with NUL. A target longer than `out` is cut off.
///
/// # Errors
/// The kernel's.
pub fn readlink<'a>(path: &[u8], out: &'a mut [u8]) -> Result<&'a [u8], Errno> {
    debug_assert_eq!(path.last(), Some(&0));
    // SAFETY: `path` ends with NUL, and the buffer is ours and as long as said.
    let n = unsafe { sys!(libc::SYS_readlinkat, libc::AT_FDCWD, path.as_ptr(), out.as_mut_ptr(), out.len()) }?;
    Ok(&out[..n])
}

/// Bytes that [`read_file`] makes room for before each read.
const READ_BYTES: usize = 64 << 10;

/// Reads a whole small file (procfs) into `out`.
///
/// # Errors
/// The kernel's.
pub fn read_file(path: &[u8], out: &mut Vec<u8>) -> Result<(), Errno> {
    let fd = open(path, libc::O_RDONLY)?;
    out.clear();
    let done = loop {
        // Not cleared first, so that only pages that receive text are touched.
        out.reserve(READ_BYTES);
        let room = out.spare_capacity_mut();
        // SAFETY: the room is ours and as long as said.
        match unsafe { sys!(libc::SYS_read, fd, room.as_mut_ptr(), room.len()) } {
            Ok(0) => break Ok(()),
            // SAFETY: the kernel wrote that many bytes there.
            Ok(n) => unsafe { out.set_len(out.len() + n) },
            Err(e) => break Err(e),
        }
    };
    close(fd);
    done
}

/// Longest path that [`path_of`] builds, including its NUL (bytes).
pub const PATH: usize = 64;

/// Joins the parts of a path, the last of which ends with NUL, without allocating. `None` when it is longer than
/// [`PATH`].
pub fn path_of<'a>(parts: &[&[u8]], path: &'a mut [u8; PATH]) -> Option<&'a [u8]> {
    let mut n = 0;
    for part in parts {
        path.get_mut(n..n + part.len())?.copy_from_slice(part);
        n += part.len();
    }
    Some(&path[..n])
}

/// Writes a decimal number into a buffer and returns the digits, without allocating.
pub fn decimal(mut v: u64, buf: &mut [u8; 20]) -> &[u8] {
    let mut i = 20;
    loop {
        i -= 1;
        buf[i] = b'0' + (v % 10) as u8;
        v /= 10;
        if v == 0 {
            return &buf[i..];
        }
    }
}

//! memfd_create(2): memory objects, their seals, and holes in them. Also tells from its pages whether a file is such an
//! object.
//!
//! Since Linux 3.17; `F_SEAL_FUTURE_WRITE` since 5.1. Punching a hole removes it from every mapping at once, and it
//! reads as zeros.

use crate::raw::{self, Errno};
use crate::sys;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// The size is fixed, and so are the seals.
pub const SEAL_SIZE: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
/// Mappings made from now on cannot be written.
pub const SEAL_FUTURE_WRITE: i32 = 0x10;

fn check(ret: i64) -> io::Result<i64> {
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(ret) }
}

/// Makes an object of `len` zero bytes.
///
/// # Errors
/// The kernel's.
pub fn create(name: &CStr, len: u64) -> io::Result<OwnedFd> {
    // SAFETY: a string; the descriptor is owned at once.
    let fd = check(unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) }.into())?;
    // SAFETY: the kernel has just returned this descriptor to us.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    // SAFETY: no memory is involved.
    check(unsafe { libc::ftruncate(fd.as_raw_fd(), len as libc::off_t) }.into())?;
    Ok(fd)
}

/// Adds seals.
///
/// # Errors
/// `EPERM`: the object is sealed against it.
pub fn seal(fd: &OwnedFd, seals: i32) -> io::Result<()> {
    // SAFETY: no memory is involved.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) }.into()).map(drop)
}

/// Opens the object of this user-visible name that another process shows at `path` (`/proc/PID/fd/N`, with its NUL), for reading
/// and writing. Makes no use of libc.
///
/// # Errors
/// The kernel's; `ENOENT` if `path` leads to anything else, which is not opened, as that could have effects.
pub fn open(path: &[u8], name: &str) -> Result<i32, Errno> {
    let mut room = [0; raw::PATH];
    let shown = raw::readlink(path, &mut room)?;
    if !shown.strip_prefix(b"/memfd:").is_some_and(|shown| shown.starts_with(name.as_bytes())) {
        return Err(libc::ENOENT);
    }
    raw::open(path, libc::O_RDWR)
}

/// An object that is sealed against shrinking: memory mapped from it is always there, whatever other processes do.
pub struct Sealed {
    /// Its inode number, which no other object has.
    pub inode: u64,
    /// Its size, or less than that if it has grown since.
    pub bytes: usize,
}

/// The object behind a descriptor; `None` if it may become smaller, or is no object. Makes no use of libc.
pub fn sealed(fd: i32) -> Option<Sealed> {
    // SAFETY: numbers only.
    let seals = unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GET_SEALS) };
    // SAFETY: a plain structure, for which zeros are a valid value.
    let mut found: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: a structure of ours.
    let asked = unsafe { sys!(libc::SYS_fstat, fd, &raw mut found) };
    let keeps = seals.is_ok_and(|seals| seals as i32 & libc::F_SEAL_SHRINK != 0) && asked.is_ok();
    keeps.then_some(Sealed { inode: found.st_ino, bytes: found.st_size as usize })
}

/// Allocates zero pages in a range where the object has none.
///
/// # Errors
/// `ENOSPC`, `ENOMEM`: no memory.
pub fn populate(fd: &OwnedFd, at: u64, len: u64) -> io::Result<()> {
    // SAFETY: no memory of ours is involved.
    check(unsafe { libc::fallocate(fd.as_raw_fd(), 0, at as i64, len as i64) }.into()).map(drop)
}

/// Removes a range's pages from the object and from every mapping of it.
///
/// # Errors
/// The kernel's.
pub fn punch(fd: &OwnedFd, at: u64, len: u64) -> io::Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: it changes only the object, and its readers expect that.
    check(unsafe { libc::fallocate(fd.as_raw_fd(), mode, at as i64, len as i64) }.into()).map(drop)
}

/// Whether the object has a page at byte `at`, a multiple of the page size. A page that the kernel has swapped out
/// counts; one that [`populate`] made and nobody has used yet does not. Takes the object's lock, as [`punch`] does, so
/// it waits for a hole that is being punched.
///
/// # Errors
/// The kernel's.
pub fn has(fd: &OwnedFd, at: u64) -> io::Result<bool> {
    // SAFETY: no memory is involved.
    match check(unsafe { libc::lseek(fd.as_raw_fd(), at as i64, libc::SEEK_DATA) }) {
        Ok(data) => Ok(data as u64 == at),
        // No data from there on.
        Err(e) if e.raw_os_error() == Some(libc::ENXIO) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Protection of memory that is read and written.
pub const WRITABLE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Maps an object shared, with protection `prot`, at an address that the kernel chooses, or at `fixed` in place of what
/// is there.
///
/// # Errors
/// The kernel's.
///
/// # Safety
/// Nobody may use what is mapped at `fixed`.
pub unsafe fn map(fd: &OwnedFd, len: usize, prot: i32, fixed: Option<usize>) -> io::Result<usize> {
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | if fixed.is_some() { libc::MAP_FIXED } else { 0 };
    // SAFETY: a new mapping, or as the caller promises.
    let at = unsafe { libc::mmap(fixed.unwrap_or(0) as *mut _, len, prot, flags, fd.as_raw_fd(), 0) };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(at as usize) }
}

/// Whether the first `len` bytes of a file lie in memory that is no disk's cache: in a tmpfs, under whatever name (an
/// overlay on one has its own). They must have been written. The kernel counts such pages as shared memory where they
/// are mapped.
///
/// # Errors
/// The kernel's; `Unsupported` if it does not count them (before 5.4).
pub fn is_shared_memory(fd: &OwnedFd, len: usize) -> io::Result<bool> {
    let before = shared_kib()?;
    let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
    // SAFETY: a new mapping, which nobody reads.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, flags, fd.as_raw_fd(), 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let after = shared_kib();
    // SAFETY: the mapping made above.
    check(unsafe { libc::munmap(at, len) }.into())?;
    Ok(after? >= before + len as u64 / 1024)
}

/// Shared memory that this process has mapped, in proportion where other processes map it, too (KiB).
fn shared_kib() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss_Shmem:"));
    line.and_then(|kib| kib.trim().strip_suffix(" kB")?.parse().ok()).ok_or(io::ErrorKind::Unsupported.into())
}

//! What this machine allows: the ways to a userfaultfd, the features behind it, PAGEMAP_SCAN, and an `mremap` that
//! keeps its source.
//!
//! Each is really tried; nothing is concluded from the kernel's version.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

pub use crate::uffd::{FEATURE_MOVE, FEATURE_WRITE_PROTECT as FEATURE_WP};

/// Names of the feature bits, lowest first, as in `linux/userfaultfd.h`.
pub const FEATURE_NAMES: [&str; 17] = [
    "PAGEFAULT_FLAG_WP",
    "EVENT_FORK",
    "EVENT_REMAP",
    "EVENT_REMOVE",
    "MISSING_HUGETLBFS",
    "MISSING_SHMEM",
    "EVENT_UNMAP",
    "SIGBUS",
    "THREAD_ID",
    "MINOR_HUGETLBFS",
    "MINOR_SHMEM",
    "EXACT_ADDRESS",
    "WP_HUGETLBFS_SHMEM",
    "WP_UNPOPULATED",
    "POISON",
    "WP_ASYNC",
    "MOVE",
];

const DEVICE: &CStr = c"/dev/userfaultfd";
const USERFAULTFD_IOC_NEW: libc::Ioctl = 0xaa00;
const UFFDIO_API: libc::Ioctl = 0xc018_aa3f_u32 as libc::Ioctl;
const UFFD_API: u64 = 0xaa;
const UFFD_USER_MODE_ONLY: libc::c_int = 1;
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610_u32 as libc::Ioctl;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const FLAGS: libc::c_int = libc::O_CLOEXEC | libc::O_NONBLOCK;

/// Opens a userfaultfd through `/dev/userfaultfd` (Linux 6.1).
///
/// # Errors
/// `ENOENT`: no such device (an older kernel, or a container that was not given it); `EACCES`: no permission to open
/// it.
pub fn by_device() -> io::Result<OwnedFd> {
    // SAFETY: a constant path; the descriptor is owned at once.
    let device = owned(unsafe { libc::open(DEVICE.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) })?;
    // SAFETY: this ioctl takes the flags by value and returns a new descriptor.
    owned(unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, FLAGS) })
}

/// Opens a userfaultfd through the system call.
///
/// # Errors
/// `ENOSYS`: not in this kernel, or filtered; `EPERM`: without CAP_SYS_PTRACE, where vm.unprivileged_userfaultfd is 0.
pub fn by_syscall() -> io::Result<OwnedFd> {
    // SAFETY: userfaultfd(2) takes the flags by value and returns a new descriptor.
    owned(unsafe { libc::syscall(libc::SYS_userfaultfd, FLAGS) } as libc::c_int)
}

/// Opens a userfaultfd that sees faults of user mode only (Linux 5.11): system calls on evicted buffers fail.
///
/// # Errors
/// `ENOSYS`: as above; `EINVAL`: an older kernel.
pub fn by_syscall_user_mode_only() -> io::Result<OwnedFd> {
    // SAFETY: as in `by_syscall`.
    owned(unsafe { libc::syscall(libc::SYS_userfaultfd, FLAGS | UFFD_USER_MODE_ONLY) } as libc::c_int)
}

/// Makes the UFFDIO_API handshake, and returns the kernel's features.
///
/// # Errors
/// `EINVAL`: the handshake was made already, or the version differs.
pub fn features(uffd: &OwnedFd) -> io::Result<u64> {
    #[repr(C)]
    struct Api {
        api: u64,
        features: u64,
        ioctls: u64,
    }
    let mut api = Api { api: UFFD_API, features: 0, ioctls: 0 };
    // SAFETY: the kernel reads and writes one `struct uffdio_api`, which `api` is.
    let done = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, &raw mut api) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(api.features) }
}

/// Tries `mremap` with MREMAP_DONTUNMAP (Linux 5.7) on a page of our own.
///
/// # Errors
/// `EINVAL`: an older kernel.
pub fn mremap_keeps() -> io::Result<()> {
    const PAGE: usize = 4096;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping of two pages, of which the first is moved over the second, and both are unmapped.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), 2 * PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let to = at.cast::<u8>().add(PAGE).cast();
        let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
        let moved = libc::mremap(at, PAGE, PAGE, how, to);
        let result = if moved == to { Ok(()) } else { Err(io::Error::last_os_error()) };
        libc::munmap(at, 2 * PAGE);
        result
    }
}

/// Tries PAGEMAP_SCAN (Linux 6.7) on one page of our own.
///
/// # Errors
/// `ENOTTY`: an older kernel; or what kept /proc's file from being opened.
pub fn pagemap_scan() -> io::Result<()> {
    // SAFETY: a constant path; the descriptor is owned at once.
    let pagemap = owned(unsafe { libc::open(c"/proc/self/pagemap".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) })?;
    let mut region = [0u64; 3];
    let page = (&raw const region) as u64 & !4095;
    // `struct pm_scan_arg`: size, flags, start, end, walk_end, vec, vec_len, max_pages, inverted, mask, anyof, return.
    let vec = (&raw mut region) as u64;
    let mut arg: [u64; 12] = [96, 0, page, page + 4096, 0, vec, 1, 0, 0, 0, 0, PAGE_IS_PRESENT];
    // SAFETY: `arg` is a whole `struct pm_scan_arg`, its `vec` one `struct page_region` that outlives the call.
    let done = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, arg.as_mut_ptr()) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor to us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

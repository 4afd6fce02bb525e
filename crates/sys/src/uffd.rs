//! userfaultfd(2): the descriptor, its ioctls and its messages.
//!
//! Since Linux 4.3 (the system call), 6.1 (`/dev/userfaultfd`), 6.6 (`POISON`) and 6.8 (`MOVE`). While an unmap, remap
//! or remove event is unread, every filling ioctl returns `EAGAIN`: read the event, then retry.

use crate::raw::{self, Errno};
use crate::sys;

/// Fault messages carry the thread id.
pub const FEATURE_THREAD_ID: u64 = 1 << 8;
/// mremap of registered memory sends an event.
pub const FEATURE_EVENT_REMAP: u64 = 1 << 2;
/// `madvise(DONTNEED, FREE, REMOVE)` sends an event before it acts.
pub const FEATURE_EVENT_REMOVE: u64 = 1 << 3;
/// Unmapping sends an event after it happened.
pub const FEATURE_EVENT_UNMAP: u64 = 1 << 6;
/// A fault raises a signal in the faulting thread instead of a message.
pub const FEATURE_SIGBUS: u64 = 1 << 7;
/// The kernel has write-protection.
pub const FEATURE_WRITE_PROTECT: u64 = 1;
/// The kernel has `UFFDIO_POISON`.
pub const FEATURE_POISON: u64 = 1 << 14;
/// The kernel has `UFFDIO_MOVE`.
pub const FEATURE_MOVE: u64 = 1 << 16;

const fn iowr(dir: u64, nr: u64, size: u64) -> u64 {
    (dir << 30) | (size << 16) | (0xaa << 8) | nr
}
const API: u64 = iowr(3, 0x3f, 24);
const REGISTER: u64 = iowr(3, 0, 32);
const UNREGISTER: u64 = iowr(2, 1, 16);
const WAKE: u64 = iowr(2, 2, 16);
const COPY: u64 = iowr(3, 3, 40);
const ZEROPAGE: u64 = iowr(3, 4, 32);
/// COPY and MOVE wake nobody.
const DONT_WAKE: u64 = 1;
const MOVE: u64 = iowr(3, 5, 40);
const POISON: u64 = iowr(3, 8, 32);

/// How the descriptor was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// `/dev/userfaultfd`.
    Device,
    /// The system call, with the privilege to serve the kernel's own faults.
    Syscall,
}

/// A message from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// A thread touched a missing page.
    Fault {
        /// The address touched, rounded down to its page.
        address: usize,
        /// Whether it was a write.
        write: bool,
        /// Whether the page was present but write-protected.
        protected: bool,
        /// Id of the thread.
        tid: u32,
    },
    /// mremap moved the range.
    Remap {
        /// Old address.
        from: usize,
        /// New address.
        to: usize,
        /// Old length in bytes.
        len: usize,
    },
    /// The range's contents are about to be dropped (`madvise`).
    Removed {
        /// First byte.
        start: usize,
        /// One past the last byte.
        end: usize,
    },
    /// The range was unmapped.
    Unmapped {
        /// First byte.
        start: usize,
        /// One past the last byte.
        end: usize,
    },
    /// A message that this code does not know.
    Unknown(u8),
}

/// A userfaultfd descriptor.
#[derive(Debug)]
pub struct Uffd {
    fd: i32,
}

/// Partial result of a filling ioctl: bytes done before the error, and the error.
pub type Partial = (usize, Errno);

impl Uffd {
    /// Opens a non-blocking descriptor that also serves the kernel's own faults, and negotiates `features`.
    ///
    /// # Errors
    /// The last error of the two ways tried (`EPERM`: no access; `EINVAL`: a feature is missing).
    pub fn open(features: u64) -> Result<(Self, Via), Errno> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        let (fd, via) = match raw::open(b"/dev/userfaultfd\0", libc::O_RDWR) {
            Ok(dev) => {
                // SAFETY: _IO(0xAA, 0) takes flags and touches no memory.
                let fd = unsafe { sys!(libc::SYS_ioctl, dev, 0xaa00, flags) };
                raw::close(dev);
                (fd?, Via::Device)
            }
            // SAFETY: the call takes flags only.
            Err(_) => (unsafe { sys!(libc::SYS_userfaultfd, flags) }?, Via::Syscall),
        };
        Self::agreed(fd, features).map(|uffd| (uffd, via))
    }

    /// Negotiates `features` on a new descriptor; closes it if the kernel refuses.
    fn agreed(fd: usize, features: u64) -> Result<Self, Errno> {
        let uffd = Self { fd: fd as i32 };
        let mut api = [0xaa_u64, features, 0];
        uffd.ioctl(API, api.as_mut_ptr()).inspect_err(|_| raw::close(uffd.fd))?;
        Ok(uffd)
    }

    /// Opens a non-blocking descriptor that serves only faults of the program's own instructions. This needs no
    /// privilege.
    ///
    /// # Errors
    /// `EINVAL`: a feature is missing; `EPERM`: a seccomp filter.
    pub fn open_for_program(features: u64) -> Result<Self, Errno> {
        const USER_MODE_ONLY: i32 = 1;
        // SAFETY: the call takes flags only.
        let fd = unsafe { sys!(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY) }?;
        Self::agreed(fd, features)
    }

    /// Wraps an open descriptor.
    pub fn from_raw(fd: i32) -> Self {
        Self { fd }
    }

    /// The descriptor's number.
    pub fn fd(&self) -> i32 {
        self.fd
    }

    fn ioctl(&self, nr: u64, arg: *mut u64) -> Result<usize, Errno> {
        // SAFETY: every caller in this file passes an array as large as the ioctl's structure.
        unsafe { sys!(libc::SYS_ioctl, self.fd, nr, arg) }
    }

    /// Registers a range for missing-page faults.
    ///
    /// # Errors
    /// `EINVAL`/`ENOMEM`: not all of it is anonymous memory; `EBUSY`: another descriptor has it.
    pub fn register(&self, start: usize, len: usize) -> Result<(), Errno> {
        let mut a = [start as u64, len as u64, 1, 0];
        self.ioctl(REGISTER, a.as_mut_ptr()).map(drop)
    }

    /// Registers a range for missing-page and write-protection faults.
    ///
    /// # Errors
    /// As [`Uffd::register`].
    pub fn register_tracked(&self, start: usize, len: usize) -> Result<(), Errno> {
        let mut a = [start as u64, len as u64, 1 | 2, 0];
        self.ioctl(REGISTER, a.as_mut_ptr()).map(drop)
    }

    /// Registers a range so that pages can be moved and copied into it, but sends no faults: missing pages read as
    /// zeros, as in any memory. It registers for write-protection, which is never used, because MOVE demands some
    /// registration.
    ///
    /// # Errors
    /// As [`Uffd::register`].
    pub fn register_as_target(&self, start: usize, len: usize) -> Result<(), Errno> {
        let mut a = [start as u64, len as u64, 2, 0];
        self.ioctl(REGISTER, a.as_mut_ptr()).map(drop)
    }

    /// Ends the registration of a range. Its missing pages read as zeros from then on.
    ///
    /// # Errors
    /// The kernel's.
    pub fn unregister(&self, start: usize, len: usize) -> Result<(), Errno> {
        let mut a = [start as u64, len as u64];
        self.ioctl(UNREGISTER, a.as_mut_ptr()).map(drop)
    }

    /// Wakes the threads waiting in a range.
    pub fn wake(&self, start: usize, len: usize) {
        let mut a = [start as u64, len as u64];
        let _ = self.ioctl(WAKE, a.as_mut_ptr());
    }

    fn fill(&self, nr: u64, a: &mut [u64], len: usize) -> Result<(), Partial> {
        let last = a.len() - 1;
        a[last] = 0;
        match self.ioctl(nr, a.as_mut_ptr()) {
            Ok(_) => Ok(()),
            Err(e) => {
                let done = a[last] as i64;
                Err((if done > 0 { (done as usize).min(len) } else { 0 }, e))
            }
        }
    }

    /// Fills missing pages with copies.
    ///
    /// # Errors
    /// `EEXIST`: a page is present; `EAGAIN`: partial, or an event is unread; `ENOENT`: not mapped any more.
    ///
    /// # Safety
    /// `src` must be readable for `len` bytes.
    pub unsafe fn copy(&self, dst: usize, src: usize, len: usize) -> Result<(), Partial> {
        self.fill(COPY, &mut [dst as u64, src as u64, len as u64, 0, 0], len)
    }

    /// As [`Uffd::copy`], but wakes nobody: see [`Uffd::wake`].
    ///
    /// # Errors
    /// As [`Uffd::copy`].
    ///
    /// # Safety
    /// `src` must be readable for `len` bytes.
    pub unsafe fn copy_quietly(&self, dst: usize, src: usize, len: usize) -> Result<(), Partial> {
        self.fill(COPY, &mut [dst as u64, src as u64, len as u64, DONT_WAKE, 0], len)
    }

    /// As [`Uffd::copy`], with the pages write-protected from the first moment. The range must be registered for
    /// write-protection.
    ///
    /// # Errors
    /// As [`Uffd::copy`].
    ///
    /// # Safety
    /// `src` must be readable for `len` bytes.
    pub unsafe fn copy_protected(&self, dst: usize, src: usize, len: usize) -> Result<(), Partial> {
        const WRITE_PROTECT: u64 = 2;
        self.fill(COPY, &mut [dst as u64, src as u64, len as u64, WRITE_PROTECT, 0], len)
    }

    /// Maps the kernel's zero page at missing pages.
    ///
    /// # Errors
    /// As [`Uffd::copy`].
    pub fn zero(&self, start: usize, len: usize) -> Result<(), Partial> {
        self.fill(ZEROPAGE, &mut [start as u64, len as u64, 0, 0], len)
    }

    /// Whether a range is registered and lies in one mapping. It changes nothing: it asks for a copy from `unreadable`,
    /// an address from which nothing can be read.
    ///
    /// # Errors
    /// `EAGAIN` while an event is unread, as nothing is known then.
    pub fn is_registered(&self, at: usize, len: usize, unreadable: usize) -> Result<bool, Errno> {
        // SAFETY: the source need not be readable, it must not be.
        match unsafe { self.copy(at, unreadable, len) } {
            // EEXIST: where there is a huge page the kernel does not even try.
            Err((_, libc::EFAULT | libc::EEXIST)) => Ok(true),
            Err((_, libc::EAGAIN)) => Err(libc::EAGAIN),
            Ok(()) | Err(_) => Ok(false),
        }
    }

    /// Moves the frames of `src` to the missing pages of `dst`, which must be registered. The pages of `src` are then
    /// missing.
    ///
    /// # Errors
    /// `EBUSY`: shared after fork, or pinned; `EEXIST`: a page of `dst` is present; `ENOENT`: a hole in `src`;
    /// `EINVAL`: the mappings differ in protection or locking; `EAGAIN`: partial, or an event is unread.
    ///
    /// # Safety
    /// No reference into `src` may be alive.
    pub unsafe fn move_pages(&self, dst: usize, src: usize, len: usize) -> Result<(), Partial> {
        self.fill(MOVE, &mut [dst as u64, src as u64, len as u64, 0, 0], len)
    }

    /// As [`Uffd::move_pages`], but wakes nobody: see [`Uffd::wake`].
    ///
    /// # Errors
    /// As [`Uffd::move_pages`].
    ///
    /// # Safety
    /// No reference into `src` may be alive.
    pub unsafe fn move_quietly(&self, dst: usize, src: usize, len: usize) -> Result<(), Partial> {
        self.fill(MOVE, &mut [dst as u64, src as u64, len as u64, DONT_WAKE, 0], len)
    }

    /// As [`Uffd::move_pages`], but `src` may have missing pages, which stay missing in `dst`.
    ///
    /// # Errors
    /// As [`Uffd::move_pages`], except `ENOENT`. The bytes done include the pages passed over.
    ///
    /// # Safety
    /// No reference into `src` may be alive.
    pub unsafe fn move_present(&self, dst: usize, src: usize, len: usize) -> Result<(), Partial> {
        const ALLOW_SRC_HOLES: u64 = 2;
        self.fill(MOVE, &mut [dst as u64, src as u64, len as u64, ALLOW_SRC_HOLES, 0], len)
    }

    /// Makes every access to missing pages of the range raise SIGBUS.
    ///
    /// # Errors
    /// The kernel's.
    pub fn poison(&self, start: usize, len: usize) -> Result<(), Partial> {
        self.fill(POISON, &mut [start as u64, len as u64, 0, 0], len)
    }

    /// Reads one message, if there is one.
    ///
    /// # Errors
    /// The kernel's, other than `EAGAIN`.
    pub fn read(&self) -> Result<Option<Message>, Errno> {
        let mut m = [0u64; 4];
        // SAFETY: the buffer holds one message (32 bytes).
        match unsafe { sys!(libc::SYS_read, self.fd, m.as_mut_ptr(), 32) } {
            Ok(_) => Ok(Some(decode(&m))),
            Err(libc::EAGAIN) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Sleeps until there is a message, or for `timeout_ms` (-1: no timeout). Returns whether there is one.
    pub fn wait(&self, timeout_ms: i32) -> bool {
        poll(self.fd, timeout_ms)
    }

    /// Sleeps until there is a message, or one of `others` is readable (-1: none), or the timeout passes. Returns which
    /// of `others` are readable.
    pub fn wait_or(&self, others: [i32; 2], timeout_ms: i32) -> [bool; 2] {
        let of = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut p = [of(self.fd), of(others[0]), of(others[1])];
        // SAFETY: pollfds of ours, as many as said.
        let _ = unsafe { sys!(libc::SYS_poll, p.as_mut_ptr(), p.len(), timeout_ms) };
        [p[1], p[2]].map(|p| p.revents & libc::POLLIN != 0)
    }
}

/// Whether a descriptor is readable, as poll(2) defines it.
pub fn is_readable(fd: i32) -> bool {
    poll(fd, 0)
}

fn poll(fd: i32, timeout_ms: i32) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd of ours.
    let ready = unsafe { sys!(libc::SYS_poll, &raw mut p, 1, timeout_ms) };
    // For a descriptor that blocks in `read`, which a client of a shared region may make its own, the kernel reports
    // POLLERR.
    ready == Ok(1) && p.revents & libc::POLLIN != 0
}

fn decode(m: &[u64; 4]) -> Message {
    let event = m[0] as u8;
    match event {
        0x12 => Message::Fault {
            address: (m[2] & !4095) as usize,
            write: m[1] & 1 != 0,
            protected: m[1] & 2 != 0,
            tid: m[3] as u32,
        },
        0x14 => Message::Remap { from: m[1] as usize, to: m[2] as usize, len: m[3] as usize },
        0x15 => Message::Removed { start: m[1] as usize, end: m[2] as usize },
        0x16 => Message::Unmapped { start: m[1] as usize, end: m[2] as usize },
        other => Message::Unknown(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: when the kernel refused a feature, the descriptor stayed open, one for each try.
    #[test]
    fn what_is_refused_a_feature_is_closed() {
        const TRIES: usize = 100;
        const NO_SUCH_FEATURE: u64 = 1 << 60;
        let open = || {
            let is = |e: std::io::Result<std::fs::DirEntry>| {
                std::fs::read_link(e.unwrap().path()).is_ok_and(|to| to.as_os_str() == "anon_inode:[userfaultfd]")
            };
            std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|e| is(e).then_some(())).count()
        };
        let before = open();
        for _ in 0..TRIES {
            assert!(Uffd::open(NO_SUCH_FEATURE).is_err() && Uffd::open_for_program(NO_SUCH_FEATURE).is_err());
        }
        // Other tests may have some open.
        assert!(open() < before + TRIES / 2, "{before} descriptors before, {} after", open());
    }

    /// The story: a descriptor that blocks in `read` (the kernel reports POLLERR) seemed to have a message, and its
    /// reader blocked.
    #[test]
    fn one_that_waits_in_read_has_no_message() {
        let Ok((uffd, _)) = Uffd::open(0) else { return crate::skip("no userfaultfd") };
        // SAFETY: a descriptor of ours.
        let flags = unsafe { libc::fcntl(uffd.fd(), libc::F_GETFL) };
        assert!(!uffd.wait(0));
        // SAFETY: as above.
        assert_eq!(unsafe { libc::fcntl(uffd.fd(), libc::F_SETFL, flags & !libc::O_NONBLOCK) }, 0);
        assert!(!uffd.wait(0));
    }

    #[test]
    fn messages_decode() {
        let fault = |write, protected| Message::Fault { address: 0x7000_0000, write, protected, tid: 42 };
        for (flags, write, protected) in [(0, false, false), (1, true, false), (3, true, true)] {
            assert_eq!(decode(&[0x12, flags, 0x7000_0123, 42]), fault(write, protected));
        }
        assert_eq!(decode(&[0x14, 1, 2, 3]), Message::Remap { from: 1, to: 2, len: 3 });
        assert_eq!(decode(&[0x15, 1, 2, 0]), Message::Removed { start: 1, end: 2 });
        assert_eq!(decode(&[0x16, 1, 2, 0]), Message::Unmapped { start: 1, end: 2 });
        assert_eq!(decode(&[0x99, 0, 0, 0]), Message::Unknown(0x99));
    }
}

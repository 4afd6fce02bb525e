//! userfaultfd(2) on shared memory: the operations and messages that private memory does not need.
//!
//! Since Linux 4.11 (missing pages of shared memory), 5.14 (minor faults on it, `CONTINUE`), 5.19 (its
//! write-protection) and 6.4 (`CONTINUE` with write-protection). A *minor* fault is one on a page that the memory
//! object holds but the mapping does not. With minor faults registered, only `CONTINUE` makes a page of the object
//! visible in the mapping. So a page can be filled through the object itself while every mapping waits.
//!
//! # Remove events
//! With [`FEATURE_EVENT_REMOVE`](crate::uffd::FEATURE_EVENT_REMOVE), `madvise` with DONTNEED or REMOVE on the mapping
//! reports its range *before* it acts, and waits until the event was read. The event does not say which of the two it
//! is. From before the event is queued until its caller has run again, CONTINUE, WRITEPROTECT, COPY and POISON return
//! `EAGAIN` ([`Uffd::is_changing`]). A caller that is killed withdraws its unread event, and acts all the same. Reading
//! returns faults first.

use crate::raw::{self, Errno};
use crate::sys;
use crate::uffd::{self, Partial, Uffd};

/// Features that shared memory needs: write-protection, missing and minor faults, write-protection of shared memory,
/// thread ids, and poison.
pub const FEATURES_SHARED: u64 = 1 | 1 << 5 | 1 << 10 | 1 << 12 | uffd::FEATURE_THREAD_ID | uffd::FEATURE_POISON;

const REGISTER: u64 = 0xc020_aa00;
const WRITEPROTECT: u64 = 0xc018_aa06;
const CONTINUE: u64 = 0xc020_aa07;
const MODES_ALL: u64 = 1 | 2 | 4;

/// A message about a shared mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedMessage {
    /// A thread waits for a page.
    Fault {
        /// The fault.
        fault: SharedFault,
        /// Id of the thread in its own process.
        tid: u32,
    },
    /// A thread is about to drop page-table entries (DONTNEED) or contents (REMOVE) in `start..end`.
    Removed {
        /// First byte.
        start: usize,
        /// One past the last byte.
        end: usize,
    },
    /// A message that this code does not ask for.
    Other,
}

/// A fault in a shared mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedFault {
    /// The address touched, rounded down to its page.
    pub address: usize,
    /// Whether it was a write.
    pub write: bool,
    /// Whether the page is mapped but write-protected.
    pub protected: bool,
}

fn ioctl(fd: i32, nr: u64, arg: &mut [u64]) -> Result<usize, Errno> {
    // SAFETY: every caller in this file passes an array as large as the ioctl's structure.
    unsafe { sys!(libc::SYS_ioctl, fd, nr, arg.as_mut_ptr()) }
}

impl Uffd {
    /// Registers a range of shared memory for missing, minor and write-protection faults.
    ///
    /// # Errors
    /// `EINVAL`: not memory of a memory object; `EPERM`: the object cannot be written; `EBUSY`: another descriptor has
    /// it.
    pub fn register_shared(&self, start: usize, len: usize) -> Result<(), Errno> {
        ioctl(self.fd(), REGISTER, &mut [start as u64, len as u64, MODES_ALL, 0]).map(drop)
    }

    /// Maps pages that the memory object holds, write-protected or not. With `wake`, wakes the threads that wait for
    /// them.
    ///
    /// # Errors
    /// `EEXIST`: a page is mapped; `EFAULT`: the object does not hold one; `ENOENT`: not all registered; `ESRCH`: the
    /// process is gone; `EAGAIN`: try again.
    pub fn continue_pages(&self, start: usize, len: usize, protect: bool, wake: bool) -> Result<(), Partial> {
        let mut a = [start as u64, len as u64, u64::from(protect) << 1 | u64::from(!wake), 0];
        match ioctl(self.fd(), CONTINUE, &mut a) {
            Ok(_) => Ok(()),
            Err(e) => Err((usize::try_from(a[3] as i64).unwrap_or(0).min(len), e)),
        }
    }

    /// Write-protects a range, mapped or not; or ends its write-protection, and wakes the threads that wait to write.
    ///
    /// # Errors
    /// `ENOENT`: not all registered; `ESRCH`: the process is gone; `EAGAIN`: try again.
    pub fn write_protect(&self, start: usize, len: usize, protect: bool) -> Result<(), Errno> {
        ioctl(self.fd(), WRITEPROTECT, &mut [start as u64, len as u64, u64::from(protect)]).map(drop)
    }

    /// Ends the write-protection of a range, but wakes nobody.
    ///
    /// # Errors
    /// As [`Uffd::write_protect`].
    pub fn unprotect_quietly(&self, start: usize, len: usize) -> Result<(), Errno> {
        ioctl(self.fd(), WRITEPROTECT, &mut [start as u64, len as u64, 1 << 1]).map(drop)
    }

    /// Reads one message, if there is one.
    ///
    /// # Errors
    /// The kernel's, other than `EAGAIN`.
    pub fn read_shared(&self) -> Result<Option<SharedMessage>, Errno> {
        let mut m = [0u64; 4];
        // SAFETY: the buffer holds one message (32 bytes).
        match unsafe { sys!(libc::SYS_read, self.fd(), m.as_mut_ptr(), 32) } {
            Ok(_) => Ok(Some(decode(&m))),
            Err(libc::EAGAIN) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Whether a remove event is about to be queued, or is unread, or was read and its caller has not run again. It
    /// changes nothing: it asks CONTINUE for an impossible range, and CONTINUE checks for events first.
    pub fn is_changing(&self) -> bool {
        ioctl(self.fd(), CONTINUE, &mut [1, 0, 0, 0]) == Err(libc::EAGAIN)
    }

    /// Whether the memory object holds a page of this process's own registered mapping; if so, maps it. It waits for
    /// nobody, not even for the object's lock, so it may see a hole that is being punched half done.
    ///
    /// # Errors
    /// `ENOMEM`, or whatever else kept the kernel from telling.
    pub fn is_held(&self, at: usize) -> Result<bool, Errno> {
        match self.continue_pages(at, 4096, false, true) {
            Ok(()) | Err((_, libc::EEXIST)) => Ok(true),
            Err((_, libc::EFAULT)) => Ok(false),
            Err((_, errno)) => Err(errno),
        }
    }
}

fn decode(m: &[u64; 4]) -> SharedMessage {
    match m[0] as u8 {
        0x12 => SharedMessage::Fault {
            fault: SharedFault { address: (m[2] & !4095) as usize, write: m[1] & 1 != 0, protected: m[1] & 2 != 0 },
            tid: m[3] as u32,
        },
        0x15 => SharedMessage::Removed { start: m[1] as usize, end: m[2] as usize },
        _ => SharedMessage::Other,
    }
}

/// Whether a descriptor is a userfaultfd. Check this for one received from another process.
pub fn is_uffd(fd: i32) -> bool {
    let (mut path, mut number, mut target) = ([0; raw::PATH], [0; 20], [0u8; 64]);
    let parts = [b"/proc/thread-self/fd/", raw::decimal(fd as u64, &mut number), b"\0"];
    let Some(path) = raw::path_of(&parts, &mut path) else { return false };
    // SAFETY: a NUL-terminated path, and a buffer as long as said.
    let got = unsafe { sys!(libc::SYS_readlinkat, libc::AT_FDCWD, path.as_ptr(), target.as_mut_ptr(), target.len()) };
    got.is_ok_and(|n| &target[..n] == b"anon_inode:[userfaultfd]")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_decode() {
        let minor = SharedFault { address: 0x7000_0000, write: true, protected: false };
        assert_eq!(decode(&[0x12, 5, 0x7000_0123, 9]), SharedMessage::Fault { fault: minor, tid: 9 });
        let protected = SharedFault { address: 0x1000, write: true, protected: true };
        assert_eq!(decode(&[0x12, 3, 0x1000, 0]), SharedMessage::Fault { fault: protected, tid: 0 });
        let removed = SharedMessage::Removed { start: 0x1000, end: 0x3000 };
        assert_eq!(decode(&[0x15, 0x1000, 0x3000, 0]), removed);
        assert_eq!(decode(&[0x14, 0, 0, 0]), SharedMessage::Other);
    }

    #[test]
    fn other_descriptors_are_told_apart() {
        assert!(!is_uffd(0) && !is_uffd(9999));
        let Ok((uffd, _)) = Uffd::open(0) else { return };
        assert!(is_uffd(uffd.fd()));
        raw::close(uffd.fd());
    }
}

//! eventfd(2): a descriptor that one thread makes readable, and on which another waits together with others.
//!
//! Since Linux 2.6.27 with flags. It is readable while its count is not zero; a read takes the whole count.

use crate::raw::Errno;
use crate::sys;

/// A new eventfd, close-on-exec and non-blocking.
///
/// # Errors
/// `EMFILE`, `ENFILE`, `ENOMEM`.
pub fn create() -> Result<i32, Errno> {
    // SAFETY: no memory is involved.
    unsafe { sys!(libc::SYS_eventfd2, 0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }.map(|fd| fd as i32)
}

/// Makes it readable.
pub fn raise(fd: i32) {
    let one = 1u64;
    // SAFETY: eight bytes of ours. (It fails only if the count is at its maximum, and then it is readable.)
    let _ = unsafe { sys!(libc::SYS_write, fd, &raw const one, 8) };
}

/// Makes it unreadable; returns whether it was readable.
pub fn take(fd: i32) -> bool {
    let mut count = 0u64;
    // SAFETY: eight bytes of ours.
    unsafe { sys!(libc::SYS_read, fd, &raw mut count, 8) }.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raised_often_it_is_taken_once() {
        let fd = create().unwrap();
        assert!(!take(fd));
        (0..3).for_each(|_| raise(fd));
        assert!(take(fd) && !take(fd));
        crate::raw::close(fd);
    }
}

//! Reading and writing a file whole ranges at a time: pread64, pwrite64, fallocate.
//!
//! What matters here: short transfers are gone on with; a read that meets the end of the file is EIO (what was written
//! there is not there any more); EINTR is tried again. ENOSPC comes from fallocate where the file system can preallocate
//! and from pwrite where it cannot (EOPNOTSUPP from fallocate is no error). EIO may come from either, for good or not.

use crate::raw::Errno;
use crate::sys;

/// Writes all of `bytes` at an offset.
///
/// # Errors
/// The kernel's; part of it may have been written.
pub fn write_all(fd: i32, mut bytes: &[u8], mut at: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        // SAFETY: the bytes are readable.
        match unsafe { sys!(libc::SYS_pwrite64, fd, bytes.as_ptr(), bytes.len(), at) } {
            Ok(0) => return Err(libc::EIO),
            Ok(n) => (bytes, at) = (&bytes[n..], at + n as u64),
            Err(libc::EINTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Fills `bytes` from an offset.
///
/// # Errors
/// The kernel's, and `EIO` where the file ends.
pub fn read_full(fd: i32, mut bytes: &mut [u8], mut at: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match crate::raw::pread(fd, bytes, at) {
            Ok(0) => return Err(libc::EIO),
            Ok(n) => (bytes, at) = (&mut bytes[n..], at + n as u64),
            Err(libc::EINTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Makes sure that a range of a file has room on disk.
///
/// # Errors
/// `ENOSPC`, `EDQUOT`, `EIO`. A file system that cannot say is believed to have room.
pub fn preallocate(fd: i32, at: u64, len: u64) -> Result<(), Errno> {
    loop {
        // SAFETY: no memory is involved.
        match unsafe { sys!(libc::SYS_fallocate, fd, 0, at, len) } {
            Ok(_) | Err(libc::EOPNOTSUPP | libc::ENOSYS) => return Ok(()),
            Err(libc::EINTR) => {}
            Err(e) => return Err(e),
        }
    }
}

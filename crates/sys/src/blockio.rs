//! File I/O in whole ranges: pread64, pwrite64, fallocate.
//!
//! What callers rely on: a short transfer is continued, from a block boundary as direct I/O demands. A read that meets
//! the end of the file returns EIO, as what was written there is gone. EINTR is retried. ENOSPC comes from fallocate
//! where the file system can preallocate, and from pwrite where it cannot (then fallocate's EOPNOTSUPP is no error).
//! Either may return EIO, transient or not.

use crate::raw::Errno;
use crate::sys;

/// Where a transfer that was cut short continues: direct I/O takes whole blocks only.
pub const BLOCK: usize = 4096;
/// More than this many short transfers of less than a block in a row are an error.
const MOST_FRUITLESS: u32 = 8;

/// Repeats transfers until `len` bytes are done. `transfer` gets the number of bytes done so far.
fn whole(len: usize, mut transfer: impl FnMut(usize) -> Result<usize, Errno>) -> Result<(), Errno> {
    let (mut done, mut fruitless) = (0, 0);
    while done < len {
        match transfer(done) {
            Ok(0) => return Err(libc::EIO),
            Ok(n) if done + n >= len => return Ok(()),
            Ok(n) if n < BLOCK && fruitless == MOST_FRUITLESS => return Err(libc::EIO),
            Ok(n) => {
                fruitless = if n < BLOCK { fruitless + 1 } else { 0 };
                done += n / BLOCK * BLOCK;
            }
            Err(libc::EINTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Writes all of `bytes` at an offset. With `O_DIRECT`, address, length and offset must be multiples of [`BLOCK`].
///
/// # Errors
/// The kernel's; part of it may have been written.
pub fn write_all(fd: i32, bytes: &[u8], at: u64) -> Result<(), Errno> {
    whole(bytes.len(), |done| {
        let rest = &bytes[done..];
        // SAFETY: the bytes are readable.
        unsafe { sys!(libc::SYS_pwrite64, fd, rest.as_ptr(), rest.len(), at + done as u64) }
    })
}

/// Fills `bytes` from an offset. With `O_DIRECT`, address, length and offset must be multiples of [`BLOCK`].
///
/// # Errors
/// The kernel's, and `EIO` where the file ends.
pub fn read_full(fd: i32, bytes: &mut [u8], at: u64) -> Result<(), Errno> {
    whole(bytes.len(), |done| crate::raw::pread(fd, &mut bytes[done..], at + done as u64))
}

/// The identity of a descriptor's file: device number and inode number. No other file has these while it is open.
///
/// # Errors
/// `EBADF`.
pub fn identity(fd: i32) -> Result<[u64; 2], Errno> {
    let mut stat = [0u64; 32];
    // SAFETY: `struct stat` has 144 bytes.
    unsafe { sys!(libc::SYS_fstat, fd, stat.as_mut_ptr()) }?;
    // st_dev and st_ino are the first two words.
    Ok([stat[0], stat[1]])
}

/// Makes sure that a range of a file has room on disk.
///
/// # Errors
/// `ENOSPC`, `EDQUOT`, `EIO`. A file system that cannot preallocate is assumed to have room.
pub fn preallocate(fd: i32, at: u64, len: u64) -> Result<(), Errno> {
    match fallocate(fd, 0, at, len) {
        Err(libc::EOPNOTSUPP | libc::ENOSYS) => Ok(()),
        other => other,
    }
}

/// Frees the disk space of a range of a file, which then reads as zeros. It waits for all writes to the file that are
/// under way, including those of processes that have ended meanwhile.
///
/// # Errors
/// `EOPNOTSUPP`: the file system cannot do that. The kernel's.
pub fn punch(fd: i32, at: u64, len: u64) -> Result<(), Errno> {
    fallocate(fd, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, at, len)
}

/// The system call, repeated while signals interrupt it.
fn fallocate(fd: i32, mode: i32, at: u64, len: u64) -> Result<(), Errno> {
    loop {
        // SAFETY: no memory is involved.
        match unsafe { sys!(libc::SYS_fallocate, fd, mode, at, len) } {
            Ok(_) => return Ok(()),
            Err(libc::EINTR) => {}
            Err(e) => return Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs with the given result for each transfer; returns the result, and the offset of each transfer.
    fn run(len: usize, gives: &[Result<usize, Errno>]) -> (Result<(), Errno>, Vec<usize>) {
        let (mut gives, mut asked) = (gives.iter(), Vec::new());
        let result = whole(len, |done| {
            asked.push(done);
            *gives.next().expect("asked once too often")
        });
        assert!(gives.next().is_none(), "asked too few times");
        (result, asked)
    }

    #[test]
    fn short_transfers_are_gone_on_with_from_a_block() {
        assert_eq!(run(8192, &[Ok(8192)]), (Ok(()), vec![0]));
        assert_eq!(run(16384, &[Ok(4096), Ok(5000), Err(libc::EINTR), Ok(8192)]), (Ok(()), vec![0, 4096, 8192, 8192]));
        assert_eq!(run(8192, &[Ok(100), Ok(4195), Ok(4096)]), (Ok(()), vec![0, 0, 4096]));
    }

    #[test]
    fn what_does_not_get_on_is_an_error() {
        assert_eq!(run(8192, &[Ok(4096), Ok(0)]), (Err(libc::EIO), vec![0, 4096]));
        assert_eq!(run(8192, &[Err(libc::ENOSPC)]), (Err(libc::ENOSPC), vec![0]));
        assert_eq!(run(8192, &[Ok(512); MOST_FRUITLESS as usize + 1]).0, Err(libc::EIO));
    }

    #[test]
    fn what_is_punched_is_zeros_and_of_nothing_it_is_refused() {
        let file = crate::memfd::create(c"punched", 3 * BLOCK as u64).unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        let mut bytes = vec![7; 3 * BLOCK];
        write_all(fd, &bytes, 0).unwrap();
        punch(fd, BLOCK as u64, BLOCK as u64).unwrap();
        read_full(fd, &mut bytes, 0).unwrap();
        let filled = |block: usize| bytes[block * BLOCK..][..BLOCK].iter().all(|b| *b == 7);
        assert_eq!([0, 1, 2].map(filled), [true, false, true]);
        assert_eq!(punch(-1, 0, BLOCK as u64), Err(libc::EBADF));
    }
}

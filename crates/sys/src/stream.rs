//! Unix stream sockets without libc, for threads that have no `errno`: connect, send all, receive all.
//!
//! EPIPE and ECONNRESET mean that the peer is gone, ECONNREFUSED that nobody listens any more. After a partial send or
//! receive the stream is in the middle of a message and of no further use.

use crate::raw::{self, Errno};
use crate::sys;

/// Connects to a socket's path, which is given with its terminating NUL. `/proc/PID/fd/N` also works if that descriptor
/// (O_PATH) names a socket file, even one whose name is gone.
///
/// # Errors
/// The kernel's; `ENAMETOOLONG` if this cannot be a socket's path.
pub fn connect(path: &[u8]) -> Result<i32, Errno> {
    let mut address = [0u8; size_of::<libc::sockaddr_un>()];
    let at = core::mem::offset_of!(libc::sockaddr_un, sun_path);
    if path.len() > address.len() - at || path.last() != Some(&0) {
        return Err(libc::ENAMETOOLONG);
    }
    address[..2].copy_from_slice(&(libc::AF_UNIX as u16).to_ne_bytes());
    address[at..at + path.len()].copy_from_slice(path);
    // SAFETY: no memory is involved.
    let fd = unsafe { sys!(libc::SYS_socket, libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) }? as i32;
    // SAFETY: an address of its length.
    match unsafe { sys!(libc::SYS_connect, fd, address.as_ptr(), at + path.len()) } {
        Ok(_) => Ok(fd),
        Err(e) => {
            raw::close(fd);
            Err(e)
        }
    }
}

/// Sends all of `bytes`; never raises SIGPIPE.
///
/// # Errors
/// The kernel's.
pub fn send_all(fd: i32, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        // SAFETY: the bytes are readable.
        match unsafe { sys!(libc::SYS_sendto, fd, bytes.as_ptr(), bytes.len(), libc::MSG_NOSIGNAL, 0, 0) } {
            Ok(n) => bytes = &bytes[n..],
            Err(libc::EINTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Fills all of `bytes`.
///
/// # Errors
/// The kernel's; `EPIPE` if the peer has closed.
pub fn receive_all(fd: i32, mut bytes: &mut [u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        // SAFETY: the bytes are ours to write.
        match unsafe { sys!(libc::SYS_recvfrom, fd, bytes.as_mut_ptr(), bytes.len(), 0, 0, 0) } {
            Ok(0) => return Err(libc::EPIPE),
            Ok(n) => bytes = &mut bytes[n..],
            Err(libc::EINTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_socket_without_a_name_is_reached_by_its_descriptor_and_its_end_is_told() {
        let path = std::env::temp_dir().join(format!("uzswap-stream-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let named = std::os::unix::fs::OpenOptionsExt::custom_flags(std::fs::File::options().read(true), libc::O_PATH)
            .open(&path)
            .unwrap();
        std::fs::remove_file(path).unwrap();
        let fd = connect(format!("/proc/self/fd/{}\0", named.as_raw_fd()).as_bytes()).unwrap();
        let (mut other, _) = listener.accept().unwrap();
        let mut got = [0; 5];
        send_all(fd, b"hello").unwrap();
        other.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello");
        other.write_all(b"there").unwrap();
        receive_all(fd, &mut got).unwrap();
        assert_eq!(&got, b"there");
        // Not by closing: a parallel test may have forked, and its child keeps open what is open.
        other.shutdown(std::net::Shutdown::Both).unwrap();
        assert_eq!(receive_all(fd, &mut got), Err(libc::EPIPE));
        assert_eq!(send_all(fd, b"x"), Err(libc::EPIPE));
        // SAFETY: no memory is involved.
        assert_eq!(unsafe { libc::shutdown(listener.as_raw_fd(), libc::SHUT_RDWR) }, 0);
        assert!(connect(format!("/proc/self/fd/{}\0", named.as_raw_fd()).as_bytes()).is_err(), "nobody listens");
        raw::close(fd);
    }
}

//! unix(7): message sockets that carry descriptors, and the identity of the peer.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Most descriptors in one message.
pub const MOST_FDS: usize = 8;

/// Offset of the path in an address, and the most bytes it may have without the zero at its end.
const PATH_AT: usize = mem::offset_of!(libc::sockaddr_un, sun_path);
const MOST_PATH: usize = size_of::<libc::sockaddr_un>() - PATH_AT - 1;

fn check(ret: i64) -> io::Result<i64> {
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(ret) }
}

/// Checks that a path can be a socket's.
///
/// # Errors
/// `InvalidInput`, with a sentence: the path is longer than an address has room for, or contains a zero byte.
pub fn check_path(path: &Path) -> io::Result<()> {
    let bytes = path.as_os_str().as_bytes();
    let wrong = if bytes.contains(&0) {
        "the socket's path has a zero byte in it".to_owned()
    } else if bytes.len() > MOST_PATH {
        format!("the socket's path is too long: {} bytes, of at most {MOST_PATH}", bytes.len())
    } else {
        return Ok(());
    };
    Err(io::Error::new(io::ErrorKind::InvalidInput, wrong))
}

fn address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    let bytes = path.as_os_str().as_bytes();
    // SAFETY: zero is a sockaddr_un.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    check_path(path)?;
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Ok((address, (PATH_AT + bytes.len() + 1) as libc::socklen_t))
}

fn new_socket(kind: i32) -> io::Result<OwnedFd> {
    // SAFETY: no memory is involved; the descriptor is owned at once.
    let fd = check(unsafe { libc::socket(libc::AF_UNIX, kind | libc::SOCK_CLOEXEC, 0) }.into())?;
    // SAFETY: the kernel has just returned this descriptor to us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Listens for message connections at a path. Only this user may connect.
///
/// # Errors
/// `AddrInUse` if something is there.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    let socket = new_socket(libc::SOCK_SEQPACKET)?;
    let (address, len) = address(path)?;
    // The socket's own mode becomes the file's, so nobody else can connect from the first moment.
    // SAFETY: no memory is involved.
    check(unsafe { libc::fchmod(socket.as_raw_fd(), 0o600) }.into())?;
    // SAFETY: an address of its length.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) }.into())?;
    // SAFETY: no memory is involved.
    check(unsafe { libc::listen(socket.as_raw_fd(), 64) }.into())?;
    Ok(socket)
}

/// Whether the other end of a connection is closed.
#[must_use]
pub fn is_hung_up(socket: &OwnedFd) -> bool {
    let mut p = libc::pollfd { fd: socket.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: one pollfd of ours.
    let ready = unsafe { libc::poll(&raw mut p, 1, 0) };
    ready == 1 && p.revents & (libc::POLLHUP | libc::POLLERR) != 0
}

/// Connects to the socket at a path.
///
/// # Errors
/// The kernel's.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket = new_socket(libc::SOCK_SEQPACKET)?;
    let (address, len) = address(path)?;
    // SAFETY: an address of its length.
    check(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) }.into())?;
    Ok(socket)
}

/// Accepts a connection.
///
/// # Errors
/// The kernel's.
pub fn accept(socket: &OwnedFd) -> io::Result<OwnedFd> {
    let (address, len) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: no address is asked for; the descriptor is owned at once.
    let fd = check(unsafe { libc::accept4(socket.as_raw_fd(), address, len, libc::SOCK_CLOEXEC) }.into())?;
    // SAFETY: the kernel has just returned this descriptor to us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Two connected message sockets.
///
/// # Errors
/// The kernel's.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: room for two descriptors.
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) }.into())?;
    // SAFETY: the kernel has just returned these descriptors to us.
    Ok(unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) })
}

/// User id and process id of the peer.
///
/// # Errors
/// The kernel's.
pub fn peer(socket: &OwnedFd) -> io::Result<(u32, i32)> {
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let fd = socket.as_raw_fd();
    let value = (&raw mut cred).cast();
    // SAFETY: a ucred of its length.
    let got = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, value, &raw mut len) };
    check(got.into())?;
    Ok((cred.uid, cred.pid))
}

/// Whether the peer is this user or root.
///
/// # Errors
/// As [`peer`].
pub fn is_trusted(socket: &OwnedFd) -> io::Result<bool> {
    let (user, _) = peer(socket)?;
    Ok(user == crate::thread::user() || user == 0)
}

/// Sets a timeout for reads and writes, in seconds (zero: none).
///
/// # Errors
/// The kernel's.
pub fn time_out(socket: &OwnedFd, seconds: i64) -> io::Result<()> {
    let time = libc::timeval { tv_sec: seconds, tv_usec: 0 };
    for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        let (fd, len) = (socket.as_raw_fd(), size_of::<libc::timeval>() as libc::socklen_t);
        // SAFETY: a timeval of its length.
        check(unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, option, (&raw const time).cast(), len) }.into())?;
    }
    Ok(())
}

#[repr(C, align(8))]
struct Control([u8; 128]);

/// Sends one message with descriptors; never raises SIGPIPE.
///
/// # Errors
/// `EPIPE`, `ECONNRESET`: the peer is gone.
///
/// # Panics
/// With more than [`MOST_FDS`] descriptors.
pub fn send(socket: &OwnedFd, bytes: &[u8], fds: &[RawFd]) -> io::Result<()> {
    assert!(fds.len() <= MOST_FDS);
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 128]);
    // SAFETY: zero is a msghdr.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    if !fds.is_empty() {
        let data = size_of_val(fds) as u32;
        message.msg_control = control.0.as_mut_ptr().cast();
        // SAFETY: arithmetic only.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(data) } as usize;
        // SAFETY: the buffer is aligned and longer than one header with MOST_FDS descriptors (16 + 32 bytes).
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(data) as usize;
            std::ptr::copy_nonoverlapping(fds.as_ptr().cast::<u8>(), libc::CMSG_DATA(header), data as usize);
        }
    }
    // SAFETY: all the header points to is alive.
    let send = || check(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) } as i64);
    let sent = loop {
        match send() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => break other?,
        }
    };
    if sent as usize == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives one message into `bytes`, and its descriptors, which are close-on-exec. Zero bytes: the peer is gone.
///
/// # Errors
/// The kernel's; `InvalidData` if the message did not fit.
pub fn receive(socket: &OwnedFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 128]);
    // SAFETY: zero is a msghdr.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len();
    let got = loop {
        // SAFETY: all the header points to is alive and as long as said.
        match check(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) } as i64) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => break other?,
        }
    };
    let mut fds = Vec::new();
    // SAFETY: the kernel filled the control buffer; the macros walk it. Descriptors in it are new and ours.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let n = ((*header).cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<RawFd>();
                for i in 0..n {
                    fds.push(OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().add(i).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    if message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message was longer than it should be"));
    }
    Ok((got as usize, fds))
}

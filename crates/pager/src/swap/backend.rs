//! Block I/O behind the swap file: a file, or a server that the command speaks to on behalf of its members.
//!
//! ```text
//! file     pread, pwrite                             in the helpers' own descriptor table
//! remote   request ─ Unix socket ─▶ `uzswap run` ─▶ server       a socket for each reading thread, and the writing one
//! ```
//! Everything above sees one thing: ranges of whole blocks that are written and read, with an error number when that fails. The
//! command answers each request within the time that it gives the server. If the command is gone the socket says so, and the
//! request fails with EIO; it is then made once more on a new connection, which is refused at once if nobody is there. So nothing
//! waits forever, and a server that is dead or lies looks like a disk that fails or lies.

use super::clusters::ClusterMap;
use crate::pager::Pager;
use core::sync::atomic::{AtomicI32, Ordering::*};
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::{blockio, stream};

/// A request to the command; the bytes follow if they are to be written. Everything is in the machine's byte order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// [`OP_READ`] or [`OP_WRITE`].
    pub op: u32,
    /// Length in bytes; the range lies in one cluster.
    pub len: u32,
    /// Byte at which the range begins.
    pub at: u64,
    /// The requesting process (`Identity::raw`), and in `row` the row by which it claims the cluster. A late request is refused
    /// if another process has been given the cluster by then.
    pub owner: u64,
    /// See `owner`.
    pub row: u64,
}

/// [`Request::op`]: the answer is an error number or 0 (an `i32`), followed by the bytes.
pub const OP_READ: u32 = 1;
/// [`Request::op`]: the answer is an error number or 0.
pub const OP_WRITE: u32 = 2;
/// One more than the largest error number (the kernel's).
const MOST_ERRORS: Errno = 4096;

impl Request {
    /// Length of a request in bytes.
    pub const BYTES: usize = size_of::<Self>();

    /// The request as bytes.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..4].copy_from_slice(&self.op.to_ne_bytes());
        out[4..8].copy_from_slice(&self.len.to_ne_bytes());
        for (to, word) in out[8..].chunks_mut(8).zip([self.at, self.owner, self.row]) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        out
    }

    /// The request that these bytes are.
    pub fn from_bytes(b: &[u8; Self::BYTES]) -> Self {
        let half = |i: usize| u32::from_ne_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        let word = |i: usize| u64::from_ne_bytes(core::array::from_fn(|k| b[i + k]));
        Self { op: half(0), len: half(4), at: word(8), owner: word(16), row: word(24) }
    }
}

/// The file or the server.
pub(super) enum Backend<'a> {
    File(i32),
    Remote { map: &'a ClusterMap, link: &'a AtomicI32, owner: u64, row: u64 },
}

impl Backend<'_> {
    /// Writes whole blocks.
    ///
    /// # Errors
    /// The kernel's, the server's.
    pub(super) fn write_all(&self, bytes: &[u8], at: u64) -> Result<(), Errno> {
        match self {
            Self::File(fd) => blockio::write_all(*fd, bytes, at),
            Self::Remote { .. } if bytes.is_empty() => Ok(()),
            Self::Remote { .. } => {
                self.ask(OP_WRITE, at, bytes.len(), &mut |fd| stream::send_all(fd, bytes), &mut |_| Ok(()))
            }
        }
    }

    /// Reads whole blocks.
    ///
    /// # Errors
    /// The kernel's, the server's.
    pub(super) fn read_full(&self, bytes: &mut [u8], at: u64) -> Result<(), Errno> {
        match self {
            Self::File(fd) => blockio::read_full(*fd, bytes, at),
            Self::Remote { .. } if bytes.is_empty() => Ok(()),
            Self::Remote { .. } => {
                let len = bytes.len();
                self.ask(OP_READ, at, len, &mut |_| Ok(()), &mut |fd| stream::receive_all(fd, bytes))
            }
        }
    }

    /// Sends a request to the command; once more if the connection turns out to be closed. The command closes some when it has
    /// too many.
    fn ask(&self, op: u32, at: u64, len: usize, send: Transfer<'_>, receive: Transfer<'_>) -> Result<(), Errno> {
        let Self::Remote { map, link, owner, row } = self else { return Err(libc::EBADF) };
        let request = Request { op, len: len as u32, at, owner: *owner, row: *row };
        loop {
            let kept = link.load(Acquire) >= 0;
            if !kept {
                link.store(connect(map).or(Err(libc::EIO))?, Release);
            }
            let fd = link.load(Acquire);
            let mut status = [0; 4];
            let answered = stream::send_all(fd, &request.to_bytes())
                .and_then(|()| send(fd))
                .and_then(|()| stream::receive_all(fd, &mut status))
                .and_then(|()| if status == [0; 4] { receive(fd) } else { Ok(()) });
            match (answered, i32::from_ne_bytes(status)) {
                (Ok(()), 0) => return Ok(()),
                (Ok(()), e @ 1..MOST_ERRORS) => return Err(e),
                _ => {
                    // Half a message may be in the connection, or something that is no answer.
                    raw::close(fd);
                    link.store(-1, Release);
                    if answered.is_ok() || !kept {
                        return Err(libc::EIO);
                    }
                }
            }
        }
    }
}

/// Sends or receives the data that belongs to a request.
type Transfer<'a> = &'a mut dyn FnMut(i32) -> Result<(), Errno>;

/// Makes a connection to the command.
///
/// # Errors
/// The kernel's.
pub(super) fn connect(map: &ClusterMap) -> Result<i32, Errno> {
    let mut path = [0; 64];
    stream::connect(map.path(&mut path))
}

/// The path made of these parts: numbers of up to ten digits, and a few letters. The last part ends with NUL.
fn path_to<'a>(parts: &[&[u8]], path: &'a mut [u8; raw::PATH]) -> &'a [u8] {
    raw::path_of(parts, path).expect("three numbers at most")
}

impl ClusterMap {
    /// The command's descriptor as a path with its terminating NUL: the file, or the socket's file.
    pub(super) fn path<'a>(&self, path: &'a mut [u8; raw::PATH]) -> &'a [u8] {
        let (mut pid, mut fd) = ([0; 20], [0; 20]);
        let pid = raw::decimal(self.pid.load(Relaxed).into(), &mut pid);
        path_to(&[b"/proc/", pid, b"/fd/", raw::decimal(self.fd.load(Relaxed) as u64, &mut fd), b"\0"], path)
    }

    /// Opens the swap file at the path where a descriptor of it should be. If another file is there it is not even opened. If the
    /// file system has become read-only the file can still be read, and writes fail.
    ///
    /// The story: a file system that meets an error becomes read-only. Programs went on, with what was on disk and the rest in
    /// memory. But their forked children were ended, as the file could not be opened for writing.
    ///
    /// # Errors
    /// `ESTALE`: it is another file. The kernel's.
    fn open_file(&self, path: &[u8]) -> Result<i32, Errno> {
        let found = raw::open(path, libc::O_PATH)?;
        let is_it = blockio::identity(found).is_ok_and(|file| file == [0, 1].map(|i| self.file[i].load(Relaxed)));
        let direct = if self.direct.load(Relaxed) != 0 { libc::O_DIRECT } else { 0 };
        let (mut path, mut digits) = ([0; 64], [0; 20]);
        let path = path_to(&[b"/proc/thread-self/fd/", raw::decimal(found as u64, &mut digits), b"\0"], &mut path);
        let open = |mode| if is_it { raw::open(path, mode | direct) } else { Err(libc::ESTALE) };
        let opened = match open(libc::O_RDWR) {
            Err(libc::EROFS) => open(libc::O_RDONLY),
            other => other,
        };
        raw::close(found);
        opened
    }

    /// Whether swapped data goes to a server.
    pub(super) fn is_remote(&self) -> bool {
        self.remote.load(Relaxed) != 0
    }
}

impl Pager {
    /// The backend of the writing thread.
    pub(super) fn backend_to_write(&self) -> Backend<'_> {
        self.backend(&self.tier.link)
    }

    /// The backend of reading thread `i`.
    pub(super) fn backend_to_read(&self, i: usize) -> Backend<'_> {
        self.backend(self.read_link(i))
    }

    /// The connection of reading thread `i`. (The first one's also says that there is a backend at all.)
    fn read_link(&self, i: usize) -> &AtomicI32 {
        i.checked_sub(1).map_or(&self.tier.file, |i| &self.tier.readers.links[i])
    }

    /// Whether reading thread `i` can send requests. Only the first surely can, as it is connected from the start.
    pub(super) fn can_read(&self, i: usize) -> bool {
        let link = self.read_link(i);
        match self.clusters.filter(|map| map.is_remote() && i > 0 && link.load(Acquire) < 0) {
            Some(map) => connect(map).is_ok_and(|fd| {
                link.store(fd, Release);
                true
            }),
            None => true,
        }
    }

    fn backend<'a>(&'a self, link: &'a AtomicI32) -> Backend<'a> {
        match self.clusters {
            Some(map) if map.is_remote() => {
                // The identity is the one in the row: where /proc is out of sight it cannot be read anew.
                let (owner, row) = self.own_row_if_any().map_or((0, u64::MAX), |row| (map.owner_of(row), row as u64));
                Backend::Remote { map, link, owner, row }
            }
            _ => Backend::File(self.tier.file.load(Acquire)),
        }
    }

    /// Opens the group's swap file, or connects to the command for the server.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn open_backend(&self, map: &ClusterMap) -> Result<(), Errno> {
        let parents = self.tier.file.swap(-1, AcqRel);
        self.tier.link.store(-1, Release);
        self.tier.readers.links.iter().for_each(|link| link.store(-1, Release));
        if map.is_remote() {
            // Make both now: later the program may be where there is no /proc.
            self.tier.link.store(connect(map)?, Release);
            self.tier.file.store(connect(map)?, Release);
            return Ok(());
        }
        let opened = map.open_file(map.path(&mut [0; 64]));
        self.tier.file.store(opened.or_else(|e| self.file_of_a_member(map, parents).ok_or(e))?, Release);
        Ok(())
    }

    /// The swap file by way of another member, after the command has ended. All members' helpers open the same files first, so
    /// they have it in their own table as `fd`.
    fn file_of_a_member(&self, map: &ClusterMap, fd: i32) -> Option<i32> {
        let fd = u64::try_from(fd).ok()?;
        let (mut a, mut b, mut c) = ([0; 20], [0; 20], [0; 20]);
        let fd = raw::decimal(fd, &mut c);
        self.others().find_map(|other| {
            let pid = raw::decimal(other.owner()?.pid().into(), &mut a);
            let ticker = raw::decimal(other.ticker.load(Relaxed).into(), &mut b);
            let mut path = [0; 64];
            map.open_file(path_to(&[b"/proc/", pid, b"/task/", ticker, b"/fd/", fd, b"\0"], &mut path)).ok()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use std::io::{Read, Write};
    use std::os::fd::{AsRawFd, IntoRawFd};
    use std::os::unix::fs::OpenOptionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};
    use uzswap_sys::memfd;

    /// The story: the file was opened by the command's pid and descriptor number, whatever was there. It was another program's
    /// file, and was written to.
    #[test]
    fn only_the_swap_file_is_opened_whoever_has_it() {
        let files = (memfd::create(c"swap", 0).unwrap(), memfd::create(c"other", 0).unwrap());
        let (file, other) = (files.0.as_raw_fd(), files.1.as_raw_fd());
        let (p, map) = (testing::pager(16 << 20), testing::books());
        map.file.iter().zip(blockio::identity(file).unwrap()).for_each(|(to, part)| to.store(part, Relaxed));
        map.pid.store(std::process::id(), Relaxed);
        let open = |fd: i32, parents: i32| {
            map.fd.store(fd, Relaxed);
            p.tier.file.store(parents, Relaxed);
            p.open_backend(map).map(|()| blockio::identity(p.tier.file.load(Relaxed)) == blockio::identity(file))
        };
        assert_eq!(open(file, -1), Ok(true));
        assert_eq!(open(other, -1), Err(libc::ESTALE));
        assert_eq!((open(other, file), p.tier.file.load(Relaxed)), (Err(libc::ESTALE), -1), "there is no other member");
        // One member that has it among its helpers' files, and one that has another file there.
        for (i, ticker) in [(7, 0), (8, uzswap_sys::thread::gettid())] {
            p.group.slots[i].owner.store(u64::from(std::process::id()), Relaxed);
            p.group.slots[i].ticker.store(ticker as u32, Relaxed);
        }
        p.group.used.store(9, Relaxed);
        assert_eq!((open(other, file), open(other, other)), (Ok(true), Err(libc::ESTALE)));
        assert_eq!(open(other, -1), Err(libc::ESTALE), "without a parent, only from the command");
    }

    /// See [`ClusterMap::open_file`].
    #[test]
    fn what_can_only_be_read_is_opened_to_be_read() {
        let path = std::env::temp_dir().join(format!("uzswap-readonly-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("swap"), [7; 4096]).unwrap();
        let dir = path.clone();
        // On a thread of its own, as the mount is visible in that thread's view of the files alone.
        let thread = std::thread::spawn(move || {
            let (swap, path) =
                (path.join("swap"), std::ffi::CString::new(path.into_os_string().into_encoded_bytes()).unwrap());
            let mount = |at: &std::ffi::CStr, flags| {
                // SAFETY: strings; no data.
                unsafe { libc::mount(at.as_ptr(), at.as_ptr(), core::ptr::null(), flags, core::ptr::null()) }
            };
            // SAFETY: no memory is involved.
            if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
                return testing::skip("a file system that is read-only cannot be had");
            }
            assert_eq!(mount(c"/", libc::MS_REC | libc::MS_PRIVATE), 0);
            assert_eq!(mount(&path, libc::MS_BIND), 0);
            assert_eq!(mount(&path, libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY), 0);
            let file = std::fs::File::open(swap).unwrap();
            let (p, map) = (testing::pager(16 << 20), testing::books());
            map.file
                .iter()
                .zip(blockio::identity(file.as_raw_fd()).unwrap())
                .for_each(|(to, part)| to.store(part, Relaxed));
            map.pid.store(std::process::id(), Relaxed);
            map.fd.store(file.as_raw_fd(), Relaxed);
            assert_eq!(p.open_backend(map), Ok(()));
            let (mut bytes, fd) = ([0; 4096], p.tier.file.load(Relaxed));
            assert_eq!((blockio::read_full(fd, &mut bytes, 0), bytes), (Ok(()), [7; 4096]));
            assert_eq!(blockio::write_all(fd, &bytes, 0), Err(libc::EBADF));
        });
        let ended = thread.join();
        std::fs::remove_dir_all(dir).unwrap();
        ended.unwrap();
    }

    #[test]
    fn requests_are_read_as_they_were_written() {
        let request = Request { op: OP_WRITE, len: 4096, at: 0x1234_5678_9abc, owner: u64::MAX - 5, row: 7 };
        assert_eq!(Request::from_bytes(&request.to_bytes()), request);
    }

    /// When the command has too many connections it closes idle ones; a request on a closed one is repeated once, on a new one.
    #[test]
    fn a_connection_that_is_found_closed_is_made_anew() {
        let path = std::env::temp_dir().join(format!("uzswap-asked-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let file = std::fs::File::options().read(true).custom_flags(libc::O_PATH).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let map = testing::books();
        map.pid.store(std::process::id(), Relaxed);
        map.fd.store(file.as_raw_fd(), Relaxed);
        // It answers two requests, each on a connection of its own, and then closes one that was used.
        let command = std::thread::spawn(move || {
            for status in [0, libc::ENOSPC, -1] {
                let mut stream = listener.accept().unwrap().0;
                stream.read_exact(&mut [0; Request::BYTES + 4096]).unwrap();
                if status >= 0 {
                    stream.write_all(&i32::to_ne_bytes(status)).unwrap();
                }
            }
        });
        let link = AtomicI32::new(-1);
        let backend = Backend::Remote { map, link: &link, owner: 1, row: 0 };
        let results = [(); 3].map(|()| backend.write_all(&[7; 4096], 0));
        assert_eq!(results, [Ok(()), Err(libc::ENOSPC), Err(libc::EIO)]);
        command.join().unwrap();
    }

    /// The story: two threads had used one connection, and got each other's bytes. These were taken for an error number, and the
    /// next request got the remains of them as its answer.
    #[test]
    fn a_connection_that_answers_nonsense_is_closed() {
        for (status, stays) in [(libc::EIO, true), (4095, true), (4096, false), (-5, false), (0x2020_2020, false)] {
            let (link, mut peer) = UnixStream::pair().unwrap();
            peer.write_all(&i32::to_ne_bytes(status)).unwrap();
            let link = AtomicI32::new(link.into_raw_fd());
            let backend = Backend::Remote { map: testing::books(), link: &link, owner: 1, row: 0 };
            let result = backend.read_full(&mut [0; 4096], 0);
            assert_eq!(
                (result, link.load(Relaxed) >= 0),
                (Err(if stays { status } else { libc::EIO }), stays),
                "{status}"
            );
        }
    }
}

//! io_uring: reads that are begun now and reaped later. Linux 5.6 has all that is used here.
//!
//! It uses the bare minimum: one ring, used by one thread at a time, with ordinary descriptors and buffers, and one
//! system call that submits and waits. No kernel thread polls. A thread may hand its ring to another, with transfers
//! under way, and end. The second must then see what the first one did, as a lock would ensure.
//!
//! `io_uring_setup` can be refused with ENOSYS (not built in, or an old seccomp profile), EPERM (sysctl
//! `kernel.io_uring_disabled`, or seccomp, as in most container runtimes) or ENOMEM; callers must then do without. A
//! forked child has no use for a ring, so its memory is not inherited, and its descriptor is close-on-exec.

use crate::raw::{self, Errno};
use crate::sys;
use core::sync::atomic::{AtomicU32, Ordering::*};

const FEAT_SINGLE_MMAP: u32 = 1;
const OFF_SQ_RING: usize = 0;
const OFF_SQES: usize = 0x1000_0000;
const ENTER_GETEVENTS: u32 = 1;
const OP_READ: u8 = 22;

/// Offsets in the memory of the submission or the completion queue. (`cqes` of the latter is at `dropped_or_cqes`.)
#[repr(C)]
#[derive(Default)]
struct Offsets {
    head: u32,
    tail: u32,
    mask: u32,
    entries: u32,
    flags_or_overflow: u32,
    dropped_or_cqes: u32,
    array_or_flags: u32,
    _reserved: u32,
    _user_addr: u64,
}

/// `struct io_uring_params`.
#[repr(C)]
#[derive(Default)]
struct Params {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    sq_thread: [u32; 2],
    features: u32,
    wq_fd: u32,
    _reserved: [u32; 3],
    sq: Offsets,
    cq: Offsets,
}

/// `struct io_uring_sqe`.
#[repr(C)]
#[derive(Default)]
struct Sqe {
    opcode: u8,
    flags: u8,
    ioprio: u16,
    fd: i32,
    off: u64,
    addr: u64,
    len: u32,
    rw_flags: u32,
    user_data: u64,
    _rest: [u64; 3],
}

/// `struct io_uring_cqe`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Cqe {
    user_data: u64,
    res: i32,
    _flags: u32,
}

const _: () = assert!(size_of::<Params>() == 120 && size_of::<Sqe>() == 64 && size_of::<Cqe>() == 16);

/// The tag of a transfer that has ended, and its result: the number of bytes.
pub type Ended = (u64, Result<usize, Errno>);

/// A ring. It is never closed, as it is used as long as the process lives, though not always by the same thread
/// (another thread may take over the fault handler's work).
pub struct Uring {
    fd: i32,
    memory: usize,
    sqes: usize,
    params: Params,
    /// Transfers begun whose results were not reaped yet.
    under_way: u32,
}

impl Uring {
    /// A ring for `entries` transfers at once.
    ///
    /// # Errors
    /// The kernel's: see the module. `ENOSYS` also if the kernel is too old.
    pub fn new(entries: u32) -> Result<Self, Errno> {
        let mut params = Params::default();
        // SAFETY: the structure has the kernel's layout, and is ours.
        let fd = unsafe { sys!(libc::SYS_io_uring_setup, entries, &raw mut params) }? as i32;
        let made = Self::map(fd, params);
        if made.is_err() {
            raw::close(fd);
        }
        made
    }

    fn map(fd: i32, params: Params) -> Result<Self, Errno> {
        if params.features & FEAT_SINGLE_MMAP == 0 {
            return Err(libc::ENOSYS);
        }
        let rings = (params.sq.array_or_flags as usize + params.sq_entries as usize * 4)
            .max(params.cq.dropped_or_cqes as usize + params.cq_entries as usize * size_of::<Cqe>());
        let map = |len: usize, at: usize| {
            let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_POPULATE);
            // SAFETY: a new mapping at an address of the kernel's choice. A child must not inherit it, as it would
            // submit for its parent.
            unsafe {
                let found = sys!(libc::SYS_mmap, 0, len, protection, flags, fd, at)?;
                sys!(libc::SYS_madvise, found, len, libc::MADV_DONTFORK)?;
                Ok::<usize, Errno>(found)
            }
        };
        let memory = map(rings, OFF_SQ_RING)?;
        let sqes = map(params.sq_entries as usize * size_of::<Sqe>(), OFF_SQES)?;
        Ok(Self { fd, memory, sqes, params, under_way: 0 })
    }

    fn word(&self, offset: u32) -> &AtomicU32 {
        // SAFETY: a word of the mapped ring, aligned, shared with the kernel.
        unsafe { AtomicU32::from_ptr((self.memory + offset as usize) as *mut u32) }
    }

    /// Begins a read; [`Uring::next`] returns its result under `tag`.
    ///
    /// # Errors
    /// `EBUSY` when as many reads are under way as the ring has entries; the kernel's. Then the read was not begun.
    ///
    /// # Safety
    /// Nobody else may use the `len` bytes from `to` on until the result was reaped.
    pub unsafe fn read(&mut self, fd: i32, to: *mut u8, len: usize, at: u64, tag: u64) -> Result<(), Errno> {
        if self.under_way == self.params.sq_entries {
            return Err(libc::EBUSY);
        }
        let sq = &self.params.sq;
        // Only we move the tail, and the kernel has taken all earlier entries, as each is submitted at once.
        let tail = self.word(sq.tail).load(Relaxed);
        let i = tail & self.word(sq.mask).load(Relaxed);
        let sqe =
            Sqe { opcode: OP_READ, fd, off: at, addr: to as u64, len: len as u32, user_data: tag, ..Sqe::default() };
        // SAFETY: entry `i` is within the mapped entries (by the mask), and the kernel does not read it before the tail
        // moves.
        unsafe { (self.sqes as *mut Sqe).add(i as usize).write(sqe) };
        self.word(sq.array_or_flags + i * 4).store(i, Relaxed);
        self.word(sq.tail).store(tail.wrapping_add(1), Release);
        match self.enter(1, 0) {
            Ok(1..) => {
                self.under_way += 1;
                Ok(())
            }
            refused if self.word(sq.head).load(Acquire) == tail => {
                // Take it back: otherwise it would be submitted with the next one, when its memory may hold something
                // else.
                self.word(sq.tail).store(tail, Release);
                Err(refused.err().unwrap_or(libc::EAGAIN))
            }
            // The kernel has taken it all the same, and will report its result.
            _ => {
                self.under_way += 1;
                Ok(())
            }
        }
    }

    /// The ring's descriptor. By poll(2) it is readable while a transfer has ended whose result was not reaped.
    pub fn fd(&self) -> i32 {
        self.fd
    }

    fn enter(&self, submit: u32, wait: u32) -> Result<usize, Errno> {
        let flags = if wait > 0 { ENTER_GETEVENTS } else { 0 };
        loop {
            // SAFETY: no signal mask is passed, and the caller of `read` vouched for what is submitted.
            match unsafe { sys!(libc::SYS_io_uring_enter, self.fd, submit, wait, flags, 0, 0) } {
                Err(libc::EINTR) => {}
                other => return other,
            }
        }
    }

    /// Transfers begun whose results were not reaped yet.
    pub fn under_way(&self) -> u32 {
        self.under_way
    }

    /// Reaps the tag and result of a transfer that has ended, waiting for one if `wait` is set. `None` if none has
    /// ended (and none is under way, or `wait` is not set).
    ///
    /// # Errors
    /// The kernel's, if it cannot wait.
    pub fn next(&mut self, wait: bool) -> Result<Option<Ended>, Errno> {
        loop {
            let cq = &self.params.cq;
            let head = self.word(cq.head).load(Relaxed);
            if head != self.word(cq.tail).load(Acquire) {
                let i = head & self.word(cq.mask).load(Relaxed);
                // SAFETY: entry `i` is within the mapped entries, and the kernel does not write it before the head moves.
                let cqe = unsafe { ((self.memory + cq.dropped_or_cqes as usize) as *const Cqe).add(i as usize).read() };
                self.word(cq.head).store(head.wrapping_add(1), Release);
                self.under_way -= 1;
                return Ok(Some((cqe.user_data, raw::check(cqe.res as isize))));
            }
            if !wait || self.under_way == 0 {
                return Ok(None);
            }
            self.enter(0, 1)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;

    fn ring(entries: u32) -> Option<Uring> {
        match Uring::new(entries) {
            Err(libc::ENOSYS | libc::EPERM) => {
                crate::skip("io_uring is refused here");
                None
            }
            other => Some(other.unwrap()),
        }
    }

    #[test]
    fn reads_bring_what_is_there_and_poll_says_when() {
        let Some(mut ring) = ring(4) else { return };
        assert_eq!(ring.next(true), Ok(None), "nothing is under way");
        let file = tempfile();
        let bytes: Vec<u8> = (0..64 << 10).map(|i| (i / 4096 * 7 + i % 4096 % 13) as u8).collect();
        file.write_all_at(&bytes, 0).unwrap();
        let mut parts = vec![vec![0u8; 16 << 10]; 4];
        for (i, part) in parts.iter_mut().enumerate() {
            // SAFETY: each has its own memory, which stays.
            unsafe { ring.read(file.as_raw_fd(), part.as_mut_ptr(), 16 << 10, (i as u64) << 14, i as u64) }.unwrap();
        }
        assert_eq!(ring.under_way(), 4);
        // SAFETY: it is refused.
        assert_eq!(unsafe { ring.read(file.as_raw_fd(), bytes.as_ptr().cast_mut(), 1, 0, 9) }, Err(libc::EBUSY));
        let mut poll = libc::pollfd { fd: ring.fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd.
        while unsafe { libc::poll(&raw mut poll, 1, 10_000) } != 1 {}
        let mut tags: Vec<_> = (0..4).map(|_| ring.next(true).unwrap().unwrap()).collect();
        tags.sort();
        assert_eq!(tags, (0..4).map(|i| (i, Ok(16 << 10))).collect::<Vec<_>>());
        assert!(parts.concat() == bytes);
        // SAFETY: one pollfd.
        assert_eq!(unsafe { libc::poll(&raw mut poll, 1, 0) }, 0, "all were found");
        // There is nothing behind the end of the file.
        // SAFETY: as above.
        unsafe { ring.read(file.as_raw_fd(), parts[0].as_mut_ptr(), 4096, 1 << 20, 9) }.unwrap();
        assert_eq!(ring.next(true), Ok(Some((9, Ok(0)))));
    }

    #[test]
    fn errors_are_those_of_the_transfer() {
        let Some(mut ring) = ring(2) else { return };
        // SAFETY: nothing is read.
        unsafe { ring.read(-1, [0u8].as_mut_ptr(), 1, 0, 7) }.unwrap();
        assert_eq!(ring.next(true), Ok(Some((7, Err(libc::EBADF)))));
        assert_eq!(ring.next(false), Ok(None));
    }

    fn tempfile() -> std::fs::File {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Relaxed);
        let path = std::env::temp_dir().join(format!("uzswap-uring-{}-{number}", std::process::id()));
        let file = std::fs::File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file
    }
}

//! The swap file itself: what is known of it without the lock, transfers, preallocation, and messages when the disk fails.
//!
//! Nothing here touches the tables or needs the lock. Each kind of trouble is reported once for the group; the counters have all
//! of it.

use crate::inject::{SLOW_NS, Site};
use crate::pager::Pager;
use crate::swap::readers::Readers;
use crate::swap::references::References;
use crate::swap::worker::Worker;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering::*};
use uzswap_mm::swapfile::BLOCK;
use uzswap_sys::raw::Errno;
use uzswap_sys::{blockio, thread};

/// Bytes of the file preallocated at once.
const EXTENT: u64 = 16 << 20;
/// A transfer that takes longer than this is reported (nanoseconds).
const STALL_NS: u64 = 10_000_000_000;
/// A write that takes longer than this means a slow disk (nanoseconds).
const LONG_NS: u64 = 250_000_000;
/// For tests: replaces `STALL_NS`; and how long a read stands still that is made to (nanoseconds).
const SOON_STALLED_NS: u64 = 700_000_000;
pub(super) const STANDS_NS: u64 = 3 * SOON_STALLED_NS;
/// Index into [`Tier::began`]: one entry for all reads under way, and one for all writes.
pub(crate) const READ: usize = 0;
pub(super) const WRITE: usize = 1;

/// Length of a transfer that is cut short on purpose, in whole blocks, as direct I/O requires.
pub(super) fn some_blocks(bits: u64, len: usize) -> usize {
    (bits >> 8) as usize % (len / BLOCK) * BLOCK
}

/// The parts of a process's swap file or server that are used without the lock.
pub struct Tier {
    /// The file, in the helpers' own descriptor table, or the first reading thread's connection to the command, which speaks to
    /// the server; -1 without either.
    pub file: AtomicI32,
    /// With a server: the writing thread's connection.
    pub link: AtomicI32,
    /// Incremented when the writer has written, or failed to (a futex word).
    pub progress: AtomicU32,
    /// Number of writes that succeeded.
    pub writes: AtomicU32,
    /// Whether waiting for the disk helps: false from a vain wait in which nothing was being written, until the next write that
    /// succeeds.
    pub helps: AtomicBool,
    /// The threads that read where io_uring cannot be used.
    pub readers: Readers,
    /// The second writing thread.
    pub second: Worker,
    /// A descriptor that is readable when a read has ended (the handler polls it); -1 where no read can be under way.
    pub reads_fd: AtomicI32,
    /// When the reads and the writes under way began or last progressed (monotonic nanoseconds), 0 if there are none. A write is
    /// under way until the books know its outcome; making room on disk counts as one.
    pub began: [AtomicU64; 2],
    /// The value of `began` that was last counted as a stall.
    pub stalled: [AtomicU64; 2],
}

impl Default for Tier {
    fn default() -> Self {
        Self {
            file: AtomicI32::new(-1),
            link: AtomicI32::new(-1),
            progress: AtomicU32::new(0),
            writes: AtomicU32::new(0),
            helps: AtomicBool::new(true),
            readers: Readers::default(),
            second: Worker::default(),
            reads_fd: AtomicI32::new(-1),
            began: [AtomicU64::new(0), AtomicU64::new(0)],
            stalled: [AtomicU64::new(0), AtomicU64::new(0)],
        }
    }
}

impl Tier {
    /// In a forked child: no transfer is under way, and no thread makes any.
    pub(crate) fn forget_transfers(&self) {
        self.readers.forget();
        self.second.forget();
        self.reads_fd.store(-1, Relaxed);
        self.began.iter().for_each(|began| began.store(0, Relaxed));
    }
}

/// Troubles with the swap file, each reported once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The file system has no room.
    NoSpace,
    /// A write failed.
    Write,
    /// A read failed, or returned something else than was written.
    Read,
    /// A transfer takes very long.
    Stall,
    /// All of `--swap` is used.
    Full,
    /// As many processes as possible have something in the file.
    Rows,
    /// A process cannot open the file.
    Open,
    /// A page could not be read back.
    Lost,
    /// A process may not have files that large (`ulimit -f`).
    Limit,
}

impl Trouble {
    /// The trouble behind this error of a write, or of making room on disk.
    fn of_write(e: Errno) -> Self {
        match e {
            libc::ENOSPC | libc::EDQUOT => Self::NoSpace,
            libc::EFBIG => Self::Limit,
            _ => Self::Write,
        }
    }

    /// The message for the user, for a file or for a server.
    pub(super) fn sentence(self, remote: bool) -> &'static [u8] {
        if remote { self.of_a_server() } else { self.of_a_file() }
    }

    fn of_a_file(self) -> &'static [u8] {
        match self {
            Self::NoSpace => b"uzswap: the disk of the swap file is full: what should be written stays in memory, and the limit may be exceeded; free some room, or name another directory with --swap-dir\n",
            Self::Write => b"uzswap: writing to the swap file failed: what should be written stays in memory, and the limit may be exceeded; the report counts each failure\n",
            Self::Read => b"uzswap: reading from the swap file failed, or returned other data than was written; it is tried again\n",
            Self::Stall => b"uzswap: the disk of the swap file has not answered for 10 seconds; the program waits for the data there, and what should be written stays in memory meanwhile\n",
            Self::Full => b"uzswap: the swap file is full: the limit may be exceeded; give it more with --swap\n",
            Self::Rows => b"uzswap: more than 1024 processes have something in the swap file or on their way there: others run without swap, and the limit may be exceeded\n",
            Self::Open => b"uzswap: a process cannot open the swap file (its rights changed, or `uzswap run` is gone): it runs without swap\n",
            Self::Lost => b"uzswap: a page could not be read back from the swap file and is lost; the program gets SIGBUS when it touches it (more such pages are only counted)\n",
            Self::Limit => b"uzswap: a process may not write to the swap file, as it limits how large its files may be (`ulimit -f`): what should be written stays in memory, and the limit may be exceeded\n",
        }
    }

    fn of_a_server(self) -> &'static [u8] {
        match self {
            Self::NoSpace => b"uzswap: the swap server has no memory left: what should be written stays in memory, and the limit may be exceeded\n",
            Self::Write | Self::Limit => b"uzswap: writing to the swap server failed: what should be written stays in memory, and the limit may be exceeded; the report counts each failure\n",
            Self::Read => b"uzswap: reading from the swap server failed, or returned other data than was written; it is tried again\n",
            Self::Stall => b"uzswap: the swap server has not answered for 10 seconds; the program waits for the data there, and what should be written stays in memory meanwhile\n",
            Self::Full => b"uzswap: the room on the swap server is used up: the limit may be exceeded; give it more with size= in --swap\n",
            Self::Rows => b"uzswap: more than 1024 processes have something on the swap server or on their way there: others run without swap, and the limit may be exceeded\n",
            Self::Open => b"uzswap: a process cannot reach `uzswap run`, which speaks to the swap server: it runs without swap\n",
            Self::Lost => b"uzswap: a page could not be read back from the swap server and is lost; the program gets SIGBUS when it touches it (more such pages are only counted)\n",
        }
    }
}

impl Pager {
    /// Opens the group's swap file, if there is one, in the caller's descriptor table, which is the helpers' own. Without the
    /// file the process runs as if there were no swap. A process that has pages there already cannot go on (`rearm` handles
    /// that).
    pub(crate) fn open_swap_file(&self) {
        let Some(map) = self.clusters else { return };
        if self.open_backend(map).is_err() {
            self.tell(Trouble::Open);
        }
    }

    /// Reports trouble, once for the group.
    pub(crate) fn tell(&self, trouble: Trouble) {
        let bit = 1 << trouble as u32;
        if let Some(map) = self.clusters
            && map.told.fetch_or(bit, AcqRel) & bit == 0
        {
            self.say(trouble.sentence(map.is_remote()));
        }
    }

    /// Called by the ticker: counts and reports a transfer that has taken very long.
    pub(crate) fn look_for_stalls(&self) {
        for (began, stalled) in self.tier.began.iter().zip(&self.tier.stalled) {
            let began = began.load(Relaxed);
            let late = began != 0 && thread::now_ns().saturating_sub(began) >= self.stall_ns();
            if late && stalled.swap(began, Relaxed) != began {
                self.counters().swap_stalls.fetch_add(1, Relaxed);
                self.tell(Trouble::Stall);
            }
        }
    }

    /// Nanoseconds until a transfer under way will have taken very long; None if there is none, or it was reported.
    pub(crate) fn until_stall_ns(&self) -> Option<u64> {
        let began = self.tier.began.iter().zip(&self.tier.stalled).filter_map(|(began, stalled)| {
            let began = began.load(Relaxed);
            (began != 0 && began != stalled.load(Relaxed)).then_some(began)
        });
        began.min().map(|began| (began + self.stall_ns()).saturating_sub(thread::now_ns()))
    }

    /// How long the current write has taken (nanoseconds); None if there is none.
    fn writing_ns(&self) -> Option<u64> {
        let began = self.tier.began[WRITE].load(Relaxed);
        (began != 0).then(|| thread::now_ns().saturating_sub(began))
    }

    /// Whether a write is under way on a disk that does not stand still: it will make room.
    pub(crate) fn disk_is_writing(&self) -> bool {
        self.writing_ns().is_some_and(|ns| ns < self.stall_ns())
    }

    /// The same, on a slow disk.
    pub(crate) fn writes_slowly(&self) -> bool {
        self.writing_ns().is_some_and(|ns| (LONG_NS..self.stall_ns()).contains(&ns))
    }

    /// Whether the current write has taken very long: nobody waits for it.
    pub(super) fn writes_stand_still(&self) -> bool {
        self.writing_ns().is_some_and(|ns| ns >= self.stall_ns())
    }

    /// Runs something for which the writing thread waits on the disk, possibly beside writes under way.
    pub(super) fn beside_writes<T>(&self, act: impl FnOnce() -> T) -> T {
        let began = &self.tier.began[WRITE];
        let alone = began.load(Relaxed) == 0;
        if alone {
            began.store(thread::now_ns(), Relaxed);
        }
        let done = act();
        began.store(if alone { 0 } else { thread::now_ns() }, Relaxed);
        done
    }

    fn stall_ns(&self) -> u64 {
        if self.is_injected(Site::SwapStall) { SOON_STALLED_NS } else { STALL_NS }
    }

    /// Writes to the file, and counts and reports the outcome.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn swap_write(&self, at: u64, bytes: &[u8]) -> Result<(), Errno> {
        if self.inject(Site::SwapSlow).is_some() {
            thread::sleep_ns(SLOW_NS);
        }
        let to = self.backend_to_write();
        let result = match self.inject(Site::SwapWrite) {
            None => to.write_all(bytes, at),
            Some(bits) => {
                // Nothing, or only the beginning, reaches the disk; or everything does, in two transfers.
                let part = some_blocks(bits, bytes.len());
                let begun = to.write_all(&bytes[..if bits & 2 == 0 { 0 } else { part }], at);
                match bits % 4 {
                    0 | 2 => begun.and(Err(libc::EIO)),
                    1 => begun.and(Err(libc::ENOSPC)),
                    _ => begun.and_then(|()| to.write_all(&bytes[part..], at + part as u64)),
                }
            }
        };
        self.wrote(bytes.len(), result);
        result
    }

    /// Counts a write of `len` bytes, and reports one that failed.
    pub(super) fn wrote(&self, len: usize, result: Result<(), Errno>) {
        match result {
            Ok(()) => self.counters().swap_write_bytes.fetch_add(len as u64, Relaxed),
            Err(e) => {
                self.tell(Trouble::of_write(e));
                self.counters().swap_write_errors.fetch_add(1, Relaxed)
            }
        };
    }

    /// Reads from the file, as reading thread `i`; `last`: nobody will try again.
    ///
    /// # Errors
    /// The kernel's, and `EIO` where the file ends.
    pub(super) fn swap_read(&self, i: usize, at: u64, bytes: &mut [u8], last: bool) -> Result<(), Errno> {
        let from = self.backend_to_read(i);
        let result = match self.inject_read(last) {
            None => from.read_full(bytes, at),
            Some(bits) => {
                // Nothing comes, or only the beginning; or everything, with one bit changed or in two transfers.
                let (part, bit) = (some_blocks(bits, bytes.len()), 1 << ((bits >> 2) % 8));
                match bits % 4 {
                    0 => Err(libc::EIO),
                    1 => from.read_full(&mut bytes[..part], at).and(Err(libc::EIO)),
                    2 => from.read_full(bytes, at).inspect(|()| bytes[(bits >> 8) as usize % bytes.len()] ^= bit),
                    _ => from
                        .read_full(&mut bytes[..part], at)
                        .and_then(|()| from.read_full(&mut bytes[part..], at + part as u64)),
                }
            }
        };
        self.count_swap_read(bytes.len(), result);
        result
    }

    pub(super) fn count_swap_read(&self, len: usize, result: Result<(), Errno>) {
        match result {
            Ok(()) => self.counters().swap_read_bytes.fetch_add(len as u64, Relaxed),
            Err(_) => self.counters().swap_read_errors.fetch_add(1, Relaxed),
        };
    }

    /// Waits until no write to a late cluster is under way any more; only this process refers to the cluster. It punches a hole,
    /// for which a file system waits for all direct writes, as it then frees what they write to.
    ///
    /// The story: a member was killed with a write under way, which was left to the kernel, and the disk was slow. Another member
    /// wrote to the cluster, and then the dead one's write arrived: pages of an uninvolved process were lost.
    ///
    /// # Errors
    /// The kernel's; also for want of room on disk, after it has waited.
    pub(super) fn await_late(&self, cluster: u32, cluster_bytes: u64) -> Result<(), Errno> {
        let Some(map) = self.clusters else { return Err(libc::EBADF) };
        let (fd, from) = (self.tier.file.load(Acquire), u64::from(cluster) * cluster_bytes);
        let result = self.beside_writes(|| {
            let waited = blockio::punch(fd, from, cluster_bytes).inspect(|()| map.settled(cluster));
            waited.and_then(|()| blockio::preallocate(fd, from, cluster_bytes))
        });
        if let Err(e) = result {
            self.counters().swap_write_errors.fetch_add(1, Relaxed);
            self.tell(Trouble::of_write(e));
        }
        result
    }

    /// Makes sure that a cluster has room on disk.
    ///
    /// # Errors
    /// `ENOSPC` and the like: it has none.
    pub(crate) fn preallocate(&self, cluster: u32, cluster_bytes: u64) -> Result<(), Errno> {
        let Some(map) = self.clusters else { return Err(libc::EBADF) };
        let (from, to) = (u64::from(cluster) * cluster_bytes, (u64::from(cluster) + 1) * cluster_bytes);
        let done = map.allocated.load(Relaxed);
        if to <= done {
            return Ok(());
        }
        if map.is_remote() {
            // A server without room says so when it is written to.
            map.allocated.fetch_max(to, Relaxed);
            return Ok(());
        }
        let fd = self.tier.file.load(Acquire);
        let size = map.geometry().map_or(0, |g| u64::from(g.clusters) << g.cluster_shift);
        let end = to.next_multiple_of(EXTENT).min(size).max(to);
        let injected = self.inject(Site::SwapSpace).is_some();
        let made = || match blockio::preallocate(fd, done.min(from), end - done.min(from)) {
            _ if injected => Err(libc::ENOSPC),
            Err(libc::ENOSPC | libc::EDQUOT) => blockio::preallocate(fd, from, to - from),
            Ok(()) => {
                map.allocated.fetch_max(end, Relaxed);
                Ok(())
            }
            other => other,
        };
        let result = self.beside_writes(made);
        if let Err(e) = result {
            self.counters().swap_write_errors.fetch_add(1, Relaxed);
            self.tell(Trouble::of_write(e));
        }
        result
    }
}

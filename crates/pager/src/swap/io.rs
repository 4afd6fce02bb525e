//! The swap file itself: what is known of it without the lock, transfers, preallocation, and what is said when the disk fails.
//!
//! Nothing here touches the tables or needs the lock. Each kind of trouble is told once for the group; the counters have
//! all of it.

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
/// A transfer that takes longer than this is told (nanoseconds).
const STALL_NS: u64 = 10_000_000_000;
/// A write that takes longer than this is one of a slow disk (nanoseconds).
const LONG_NS: u64 = 250_000_000;
/// For tests: what takes its place, and for how long a read stands still that is to (nanoseconds).
const SOON_STALLED_NS: u64 = 700_000_000;
pub(super) const STANDS_NS: u64 = 3 * SOON_STALLED_NS;
/// Which of [`Tier::began`] a transfer is: there is one entry for all reads under way, and one for all writes.
pub(crate) const READ: usize = 0;
pub(super) const WRITE: usize = 1;

/// A part of a transfer that is cut short on purpose: whole blocks, as direct I/O wants them.
pub(super) fn some_blocks(bits: u64, len: usize) -> usize {
    (bits >> 8) as usize % (len / BLOCK) * BLOCK
}

/// The swap file or server of a process, as far as it is asked about without the lock.
pub struct Tier {
    /// The file, in the helpers' own descriptor table, or the reading thread's connection to the command that speaks to a
    /// server; -1 without one.
    pub file: AtomicI32,
    /// With a server: the writing thread's connection.
    pub link: AtomicI32,
    /// Bumped when the writer has written, or failed to (a futex word).
    pub progress: AtomicU32,
    /// Writes that succeeded.
    pub writes: AtomicU32,
    /// Whether waiting for it has helped: false from a wait in vain, in which nothing was being written, to the next write that succeeds.
    pub helps: AtomicBool,
    /// The threads that read where io_uring cannot be used.
    pub readers: Readers,
    /// The second thread that writes.
    pub second: Worker,
    /// What is readable when a read has ended (the handler polls it); -1 where none can be under way.
    pub reads_fd: AtomicI32,
    /// When the reads and the writes under way were begun or went on last (monotonic nanoseconds), 0 when there is none. A write is
    /// under way until the books say what became of it, and so is making room on disk.
    pub began: [AtomicU64; 2],
    /// What `began` was when it was last counted as a stall.
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
    /// In a forked child: no transfer is under way, and nobody makes any.
    pub(crate) fn forget_transfers(&self) {
        self.readers.forget();
        self.second.forget();
        self.reads_fd.store(-1, Relaxed);
        self.began.iter().for_each(|began| began.store(0, Relaxed));
    }
}

/// What can be told about the swap file, once each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The file system has no room.
    NoSpace,
    /// A write failed.
    Write,
    /// A read failed, or gave something else than was written.
    Read,
    /// A transfer takes very long.
    Stall,
    /// All of `--swap` is used.
    Full,
    /// As many processes as can have something in the file.
    Rows,
    /// A process cannot open the file.
    Open,
    /// A page could not be read back.
    Lost,
    /// A process may not have files so large (`ulimit -f`).
    Limit,
}

impl Trouble {
    /// What it is that a write, or room on disk, was refused with this error.
    fn of_write(e: Errno) -> Self {
        match e {
            libc::ENOSPC | libc::EDQUOT => Self::NoSpace,
            libc::EFBIG => Self::Limit,
            _ => Self::Write,
        }
    }

    /// What the user reads, of a file or of a server.
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
    /// Opens the group's swap file, if there is one, in the caller's descriptor table, which is the helpers' own. Without
    /// it the process runs as if there were no swap; one that has pages there already cannot go on (`rearm` sees to that).
    pub(crate) fn open_swap_file(&self) {
        let Some(map) = self.clusters else { return };
        if self.open_backend(map).is_err() {
            self.tell(Trouble::Open);
        }
    }

    /// Tells of trouble, once for the group.
    pub(crate) fn tell(&self, trouble: Trouble) {
        let bit = 1 << trouble as u32;
        if let Some(map) = self.clusters
            && map.told.fetch_or(bit, AcqRel) & bit == 0
        {
            self.say(trouble.sentence(map.is_remote()));
        }
    }

    /// Counts, and tells, when a transfer has taken very long: called by the ticker.
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

    /// In how many nanoseconds a transfer that is under way will have taken very long; None when there is none, or it was told.
    pub(crate) fn until_stall_ns(&self) -> Option<u64> {
        let began = self.tier.began.iter().zip(&self.tier.stalled).filter_map(|(began, stalled)| {
            let began = began.load(Relaxed);
            (began != 0 && began != stalled.load(Relaxed)).then_some(began)
        });
        began.min().map(|began| (began + self.stall_ns()).saturating_sub(thread::now_ns()))
    }

    /// For how long what is being written has been (nanoseconds); None where nothing is.
    fn writing_ns(&self) -> Option<u64> {
        let began = self.tier.began[WRITE].load(Relaxed);
        (began != 0).then(|| thread::now_ns().saturating_sub(began))
    }

    /// Whether something is being written, by a disk that does not stand still: what it takes will make room.
    pub(crate) fn disk_is_writing(&self) -> bool {
        self.writing_ns().is_some_and(|ns| ns < self.stall_ns())
    }

    /// The same, by one that takes long.
    pub(crate) fn writes_slowly(&self) -> bool {
        self.writing_ns().is_some_and(|ns| (LONG_NS..self.stall_ns()).contains(&ns))
    }

    /// Whether what is being written has taken very long: nobody waits for that.
    pub(super) fn writes_stand_still(&self) -> bool {
        self.writing_ns().is_some_and(|ns| ns >= self.stall_ns())
    }

    /// Does what the writing thread waits for the disk to do, beside the writes under way perhaps.
    fn beside_writes<T>(&self, act: impl FnOnce() -> T) -> T {
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

    /// Writes to the file, and says what became of it.
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
                // All, or only the beginning of it, does not reach the disk; or all does, but in two transfers.
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

    /// Counts a write of `len` bytes, and tells of one that failed.
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
                // Nothing comes, or only the beginning; or all, with one bit changed, or in two transfers.
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

    /// Counts a read of `len` bytes.
    pub(super) fn count_swap_read(&self, len: usize, result: Result<(), Errno>) {
        match result {
            Ok(()) => self.counters().swap_read_bytes.fetch_add(len as u64, Relaxed),
            Err(_) => self.counters().swap_read_errors.fetch_add(1, Relaxed),
        };
    }

    /// Waits until nobody is writing to a late cluster any more, to which this process alone refers: by punching a hole, for which
    /// a file system waits for all direct writes, as what they go to is free then.
    ///
    /// The story: a member was killed with a write under way, which was left to the kernel, and the disk was slow. Another wrote
    /// to the cluster, and then the dead one's write came: pages of a process that had nothing to do with it were lost.
    ///
    /// # Errors
    /// The kernel's; of room on disk after it has waited.
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

    /// Sees to it that a cluster has room on disk.
    ///
    /// # Errors
    /// `ENOSPC` and the like: it has not.
    pub(crate) fn preallocate(&self, cluster: u32, cluster_bytes: u64) -> Result<(), Errno> {
        let Some(map) = self.clusters else { return Err(libc::EBADF) };
        let (from, to) = (u64::from(cluster) * cluster_bytes, (u64::from(cluster) + 1) * cluster_bytes);
        let done = map.allocated.load(Relaxed);
        if to <= done {
            return Ok(());
        }
        if map.is_remote() {
            // (A server that has no room says so when it is written to.)
            map.allocated.fetch_max(to, Relaxed);
            return Ok(());
        }
        let fd = self.tier.file.load(Acquire);
        let size = map.geometry().map_or(0, |g| u64::from(g.clusters) << g.cluster_shift);
        let end = to.next_multiple_of(EXTENT).min(size);
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

//! The swap file itself: opening it, transfers, preallocation, and what is said when the disk fails.
//!
//! Nothing here touches the tables or needs the lock. Each kind of trouble is told once for the group; the counters have
//! all of it.

use crate::inject::Site;
use crate::pager::Pager;
use core::sync::atomic::Ordering::*;
use uzswap_mm::swapfile::BLOCK;
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::{blockio, thread};

/// Bytes of the file preallocated at once.
const EXTENT: u64 = 16 << 20;
/// A transfer that takes longer than this is told (nanoseconds).
const STALL_NS: u64 = 10_000_000_000;
/// Which of [`Pager::swap_began`] a transfer is.
const READ: usize = 0;
const WRITE: usize = 1;

/// A part of a transfer that is cut short on purpose: whole blocks, as direct I/O wants them.
fn some_blocks(bits: u64, len: usize) -> usize {
    (bits >> 8) as usize % (len / BLOCK) * BLOCK
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
    /// A process cannot open the file.
    Open,
}

impl Trouble {
    fn sentence(self) -> &'static [u8] {
        match self {
            Self::NoSpace => b"uzswap: the disk of the swap file is full: what it was to take stays in memory, and the limit may be exceeded; free some room, or name another directory with --swap-dir\n",
            Self::Write => b"uzswap: writing to the swap file failed: what it was to take stays in memory, and the limit may be exceeded; the report counts each failure\n",
            Self::Read => b"uzswap: reading from the swap file failed, or gave something else than was written; it is tried again\n",
            Self::Stall => b"uzswap: the disk of the swap file has not answered for 10 seconds; the program waits for it\n",
            Self::Full => b"uzswap: the swap file is full: the limit may be exceeded; give it more with --swap\n",
            Self::Open => b"uzswap: a process cannot open the swap file (its rights changed, or `uzswap run` is gone): it runs without swap\n",
        }
    }
}

impl Pager {
    /// Opens the group's swap file, if there is one, in the caller's descriptor table, which is the helpers' own. Without
    /// it the process runs as if there were no swap; one that has pages there already cannot go on (`rearm` sees to that).
    pub(crate) fn open_swap_file(&self) {
        self.swap_file.store(-1, Release);
        let Some(map) = self.clusters else { return };
        let mut path = [0u8; 64];
        let (mut n, mut pid, mut fd) = (0, [0; 20], [0; 20]);
        for part in [
            b"/proc/".as_slice(),
            raw::decimal(u64::from(map.pid.load(Relaxed)), &mut pid),
            b"/fd/",
            raw::decimal(map.fd.load(Relaxed) as u64, &mut fd),
            b"\0",
        ] {
            path[n..n + part.len()].copy_from_slice(part);
            n += part.len();
        }
        let direct = if map.direct.load(Relaxed) != 0 { libc::O_DIRECT } else { 0 };
        match raw::open(&path[..n], libc::O_RDWR | direct) {
            Ok(fd) => self.swap_file.store(fd, Release),
            Err(_) => self.tell(Trouble::Open),
        }
    }

    /// Tells of trouble, once for the group.
    pub(crate) fn tell(&self, trouble: Trouble) {
        let bit = 1 << trouble as u32;
        if let Some(map) = self.clusters
            && map.told.fetch_or(bit, AcqRel) & bit == 0
        {
            self.say(trouble.sentence());
        }
    }

    /// Tells when a transfer has taken very long: called by the ticker.
    pub(crate) fn look_for_stalls(&self) {
        for began in &self.swap_began {
            let began = began.load(Relaxed);
            if began != 0 && thread::now_ns().saturating_sub(began) > STALL_NS {
                self.tell(Trouble::Stall);
            }
        }
    }

    /// Writes to the file.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn swap_write(&self, at: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.swap_began[WRITE].store(thread::now_ns(), Relaxed);
        let fd = self.swap_file.load(Acquire);
        let result = match self.inject(Site::SwapWrite) {
            None => blockio::write_all(fd, bytes, at),
            Some(bits) => {
                // All, or only the beginning of it, does not reach the disk; or all does, but in two transfers.
                let part = some_blocks(bits, bytes.len());
                let begun = blockio::write_all(fd, &bytes[..if bits & 2 == 0 { 0 } else { part }], at);
                match bits % 4 {
                    0 | 2 => begun.and(Err(libc::EIO)),
                    1 => begun.and(Err(libc::ENOSPC)),
                    _ => begun.and_then(|()| blockio::write_all(fd, &bytes[part..], at + part as u64)),
                }
            }
        };
        self.swap_began[WRITE].store(0, Relaxed);
        match result {
            Ok(()) => self.counters().swap_write_bytes.fetch_add(bytes.len() as u64, Relaxed),
            Err(e) => {
                self.tell(if matches!(e, libc::ENOSPC | libc::EDQUOT) { Trouble::NoSpace } else { Trouble::Write });
                self.counters().swap_write_errors.fetch_add(1, Relaxed)
            }
        };
        result
    }

    /// Reads from the file.
    ///
    /// # Errors
    /// The kernel's, and `EIO` where the file ends.
    pub(crate) fn swap_read(&self, at: u64, bytes: &mut [u8]) -> Result<(), Errno> {
        self.swap_began[READ].store(thread::now_ns(), Relaxed);
        let fd = self.swap_file.load(Acquire);
        let result = match self.inject(Site::SwapRead) {
            None => blockio::read_full(fd, bytes, at),
            Some(bits) => {
                // Nothing comes, or only the beginning; or all, with one bit changed, or in two transfers.
                let (part, bit) = (some_blocks(bits, bytes.len()), 1 << ((bits >> 2) % 8));
                match bits % 4 {
                    0 => Err(libc::EIO),
                    1 => blockio::read_full(fd, &mut bytes[..part], at).and(Err(libc::EIO)),
                    2 => blockio::read_full(fd, bytes, at).inspect(|()| bytes[(bits >> 8) as usize % bytes.len()] ^= bit),
                    _ => blockio::read_full(fd, &mut bytes[..part], at)
                        .and_then(|()| blockio::read_full(fd, &mut bytes[part..], at + part as u64)),
                }
            }
        };
        self.swap_began[READ].store(0, Relaxed);
        match result {
            Ok(()) => self.counters().swap_read_bytes.fetch_add(bytes.len() as u64, Relaxed),
            Err(_) => self.counters().swap_read_errors.fetch_add(1, Relaxed),
        };
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
        let fd = self.swap_file.load(Acquire);
        let size = map.geometry().map_or(0, |g| u64::from(g.clusters) << g.cluster_shift);
        let end = to.next_multiple_of(EXTENT).min(size);
        let injected = self.inject(Site::SwapSpace).is_some();
        let result = match blockio::preallocate(fd, done.min(from), end - done.min(from)) {
            _ if injected => Err(libc::ENOSPC),
            Err(libc::ENOSPC | libc::EDQUOT) => blockio::preallocate(fd, from, to - from),
            Ok(()) => {
                map.allocated.fetch_max(end, Relaxed);
                Ok(())
            }
            other => other,
        };
        if result.is_err() {
            self.counters().swap_write_errors.fetch_add(1, Relaxed);
            self.tell(Trouble::NoSpace);
        }
        result
    }
}

//! Makes relocated tables evictable: pointer tables that the linker relocated and made read-only in the objects that a program
//! started with. A browser has 12 MiB of them in each process, a compiler 4 to 8.
//!
//! Such a table is a private mapping of a file, each page of which was written to. It is the process's own memory, but
//! userfaultfd does not register it. Where the limit is tight it becomes anonymous memory with the same contents, at the same
//! place and just as read-only, and leaves as such (`read_only`):
//!
//! ```text
//! file, private, written to ──copied──▶ new memory, made read-only ──mremap──▶ the same place: registered, listed
//! ```
//! `mremap` puts it there in one step, so a concurrent reader reads either the one or the other. Nobody writes: the linker is
//! done with the tables of objects that the program started with, and never unmaps them. A table that was opened for writing by
//! then (a program may, to hook functions) is no longer one read-only mapping, and is left alone. It is done by 512 KiB, as that
//! much is in memory twice meanwhile, and with the program's mapping calls stopped, including `mprotect` on these tables (the
//! agent's `relocated`).
//!
//! The tables of libc, the linker and this library, which uzswap's own threads run, stay as they are: they are small.

use crate::frames::arena::PAGE;
use crate::inject::Site;
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_sys::raw::Errno;
use uzswap_sys::{maps, pagemap, process, sys, thread};

/// Tables from this size on are worth it (bytes).
pub const LEAST_BYTES: usize = 512 << 10;
/// Bytes that are in memory twice at a time.
const PIECE: usize = 512 << 10;

impl Pager {
    /// Whether there are tables that were not examined yet.
    pub(crate) fn has_relocated(&self, s: &State) -> bool {
        !s.relocated.is_empty() && !self.without_move && !self.tracks
    }

    /// Turns relocated tables into memory that can leave. Runs in the ticker, once memory is managed and short.
    pub(crate) fn take_over_relocated(&self) {
        let Some(mut s) = self.lock_between_calls() else { return };
        let tables = core::mem::take(&mut s.relocated);
        drop(s);
        for (start, end) in &tables {
            for at in (*start..*end).step_by(PIECE) {
                if self.take_over_piece(at, (*end).min(at + PIECE)).is_err() {
                    break;
                }
            }
        }
        // Freed under the lock, as everything is: a forked child must find the allocator at rest.
        let s = self.state.lock();
        drop(tables);
        drop(s);
        self.calls.go_on();
    }

    /// Turns a piece into anonymous memory, and manages that. (The lock is taken only then: what is copied may have to be read
    /// from disk.)
    ///
    /// # Errors
    /// The kernel's, and `EINVAL` if something else is mapped there; nothing has changed then.
    fn take_over_piece(&self, start: usize, end: usize) -> Result<(), Errno> {
        let (len, fd) = (end - start, self.files.maps.load(Relaxed));
        let is_table = |m: &maps::Mapping| {
            m.start <= start && end <= m.end && m.perms == *b"r--p" && m.inode != 0 && m.name.is_empty()
        };
        let mut name = [0; maps::NAME_BYTES];
        if !maps::mapping_from(fd, start, &mut name)?.is_some_and(|m| is_table(&m)) {
            return Err(libc::EINVAL);
        }
        // A page that nobody wrote to is the file's, and costs nothing.
        let own = pagemap::anonymous_pages(self.files.pagemap.load(Relaxed), start, end)?;
        maps::advise_unlocked(start, len)?;
        if own < len / PAGE / 2 {
            return Err(libc::EINVAL);
        }
        let new = new_copy(start, len)?;
        let replaced = match self.inject(Site::Register) {
            Some(_) => Err(libc::ENOMEM),
            // SAFETY: memory that nobody else knows of, to where the same contents are.
            None => unsafe { sys!(libc::SYS_mremap, new, len, len, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, start) },
        };
        if let Err(errno) = replaced {
            // Kernels before 6.17 unmap what is at the target before they check whether they can move.
            if !maps::mapping_from(fd, start, &mut name)?.is_some_and(|m| is_table(&m)) {
                self.say(b"uzswap: memory that was to be replaced is gone; the process is ended\n");
                thread::end_process(125);
            }
            unmap(new, len);
            return Err(errno);
        }
        self.take_over(&mut self.state.lock(), start, end).map(drop)
    }
}

/// Makes new read-only memory with the contents of other memory.
fn new_copy(from: usize, len: usize) -> Result<usize, Errno> {
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: the kernel chooses a place where nothing is.
    let new = unsafe { sys!(libc::SYS_mmap, 0, len, prot, flags, -1isize, 0) }?;
    // SAFETY: it was just made, and that long.
    let to = unsafe { core::slice::from_raw_parts_mut(new as *mut u8, len) };
    let made = process::read_memory(thread::getpid(), from, to)
        // SAFETY: the same, of which no reference is held any more.
        .and_then(|()| unsafe { sys!(libc::SYS_mprotect, new, len, libc::PROT_READ) });
    made.map(|_| new).inspect_err(|_| unmap(new, len))
}

/// Unmaps memory that [`new_copy`] made.
fn unmap(new: usize, len: usize) {
    // SAFETY: it is ours, and nobody refers to it. (It is not registered, so unmapping it raises no event.)
    let _ = unsafe { sys!(libc::SYS_munmap, new, len) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use uzswap_mm::pagetable::Tag;

    const N: usize = 700;

    /// A private mapping of a file of which `written` pages were written to; read-only unless `open`.
    fn table(written: usize, open: bool) -> usize {
        // SAFETY: a file of the test's own, and a mapping of it.
        unsafe {
            let fd = sys!(libc::SYS_memfd_create, c"table".as_ptr(), 0).expect("a file");
            sys!(libc::SYS_ftruncate, fd, N * PAGE).expect("its size");
            let rw = libc::PROT_READ | libc::PROT_WRITE;
            let at = sys!(libc::SYS_mmap, 0, N * PAGE, rw, libc::MAP_PRIVATE, fd, 0).expect("a mapping");
            for page in 0..written {
                *((at + page * PAGE) as *mut [u8; PAGE]) = testing::words(page as u64);
            }
            if !open {
                sys!(libc::SYS_mprotect, at, N * PAGE, libc::PROT_READ).expect("mprotect");
            }
            // Another test's child must not share it: it could not leave then.
            sys!(libc::SYS_madvise, at, N * PAGE, libc::MADV_DONTFORK).expect("advice");
            at
        }
    }

    fn is_anonymous(p: &Pager, at: usize) -> bool {
        let mut name = [0; maps::NAME_BYTES];
        let mapping = maps::mapping_from(p.files.maps.load(Relaxed), at, &mut name).expect("the kernel can say");
        mapping.is_some_and(|m| m.inode == 0 && m.perms == *b"r--p")
    }

    fn is_right(at: usize) -> bool {
        // SAFETY: a mapping of the test's own, to which nobody writes.
        let contents = unsafe { core::slice::from_raw_parts(at as *const u8, N * PAGE) };
        contents.chunks(PAGE).enumerate().all(|(page, content)| content == testing::words(page as u64))
    }

    #[test]
    fn what_is_relocated_becomes_memory_that_is_managed() {
        let p = testing::pager_told_of_moves(16 << 20);
        let at = table(N, false);
        let first = (at / PAGE) as u64;
        p.state.lock().relocated = vec![(at, at + N * PAGE)];
        assert!(p.has_relocated(&p.state.lock()));
        p.take_over_relocated();
        let s = p.state.lock();
        assert!(!p.has_relocated(&s) && is_anonymous(p, at) && is_right(at));
        assert!((first..first + N as u64).all(|vpn| s.pt.get(vpn).tag() == Tag::Resident));
        assert!(s.managed.covers(at, at + N * PAGE) && s.resident == N);
    }

    #[test]
    fn what_is_something_else_or_cannot_be_replaced_stays() {
        let p = testing::pager_told_of_moves(16 << 20);
        for (at, fault) in [(table(N, true), "0/1"), (table(N / 2 - 1, false), "0/1"), (table(N, false), "1/1")] {
            p.group.faults.set(&format!("register={fault}"), 1).unwrap();
            assert!(p.take_over_piece(at, at + N * PAGE).is_err());
            assert!(!is_anonymous(p, at));
            assert_eq!((fault == "1/1" && !is_right(at), p.state.lock().resident), (false, 0));
        }
        let at = table(N, false);
        // SAFETY: memory of the test's own.
        if unsafe { sys!(libc::SYS_mlock, at, N * PAGE) }.is_ok() {
            p.group.faults.set("register=0/1", 1).unwrap();
            assert!(p.take_over_piece(at, at + N * PAGE).is_err() && !is_anonymous(p, at));
        }
    }
}

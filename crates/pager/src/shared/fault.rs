//! Serves a fault of an attached mapping.
//!
//! Pages become visible in a mapping only here, by CONTINUE, once the object's page is complete.

use super::engine::Engine;
use super::mapping::{Mapping, Marker};
use crate::frames::arena::PAGE;
use crate::pool::object::{self, Header};
use crate::state::BLOCK_PAGES;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use uzswap_mm::pagemap::WRITE_PROTECTED;
use uzswap_mm::pagetable::{HINT_RANDOM, HINT_SEQUENTIAL, HINT_WRITTEN, Tag};
use uzswap_sys::memfd;
use uzswap_sys::uffd_shared::SharedFault;

/// Outcome of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Served {
    /// The thread goes on, or its process is gone.
    Done,
    /// The client is told first; the thread waits until the page is unprotected.
    Told,
    /// The kernel is short of memory: try again later.
    Later,
    /// The mapping is about to change, and its process must run first.
    Soon,
}

/// How far pages were mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mapped {
    All,
    /// Leave the rest.
    Part,
    /// See [`Served::Soon`].
    Soon,
}

impl Engine {
    /// Serves a fault of the `k`-th mapping in the list.
    pub fn serve(&mut self, k: usize, fault: SharedFault) -> Served {
        let m = &self.mappings[k];
        let Some(page) = fault.address.checked_sub(m.base).map(|b| (b / PAGE) as u64).filter(|p| *p < self.pages)
        else {
            // Nobody uses the page behind the region.
            return self.refuse(k, fault.address);
        };
        self.settle(page, page + 1);
        self.counts.faults += 1;
        self.touched[page as usize] = self.round;
        // If another batch has it in hand, ours cannot page it out, and nobody may write to it.
        self.rescue(page);
        if self.mappings[k].marker(page) == Marker::Unknown {
            // Whatever the page holds, only this process gets an error; nobody else's view changes. A mapped page must first be
            // unmapped, which only paging out does.
            let mut batch = self.take_direct();
            self.evict_now(page, &mut batch);
            self.direct = Some(batch);
            return self.refuse(k, self.mappings[k].address(page));
        }
        let resident = self.pt.get(page).tag() == Tag::Resident;
        if fault.protected && resident {
            return self.write_to_protected(k, page);
        }
        self.make_room(BLOCK_PAGES as u64);
        self.bring(k, page, fault.write)
    }

    /// Makes every touch of the page at an address of mapping `k` raise SIGBUS in its process.
    fn refuse(&mut self, k: usize, address: usize) -> Served {
        match self.ask(k, |m| m.poison(address)) {
            Err(libc::EAGAIN) => Served::Soon,
            // A page that must stay in memory (a pin, a witness) stays mapped, and only its leaving makes room for the error: a
            // thread that wants to write waits for that.
            Err(libc::EBUSY) => Served::Later,
            done => {
                let m = &mut self.mappings[k];
                let page = ((address - m.base) / PAGE) as u64;
                if done.is_ok() {
                    m.poisoned.insert(page);
                }
                m.wake(page, page + 1);
                Served::Done
            }
        }
    }

    /// Removes the errors for pages `[from, to)` from all mappings, before those pages are punched. A punch removes what is
    /// mapped, but no errors; so this replaces an error by a page of zeros, which nobody can write to; false if a process must
    /// run first: try again then.
    pub fn end_errors(&mut self, from: u64, to: u64) -> bool {
        let mut all = true;
        for k in 0..self.mappings.len() {
            for page in self.mappings[k].poisoned.range(from..to).copied().collect::<Vec<_>>() {
                // If there is no memory for it, or the kernel refuses, the error stays.
                let _ = memfd::populate(&self.object, page * PAGE as u64, PAGE as u64);
                self.mappings[k].mapped.put(page, true);
                match self.ask(k, |m| m.replace_error(page)) {
                    Ok(()) => drop(self.mappings[k].poisoned.remove(&page)),
                    Err(errno) => all &= errno != libc::EAGAIN,
                }
            }
        }
        all
    }

    /// Makes an ioctl call on mapping `k`. Repeats it while the process does something to the mapping that must be seen first,
    /// and notes when the process is gone. `EAGAIN`: the process must run before it can be done; release the lock.
    pub fn ask(&mut self, k: usize, call: impl Fn(&Mapping) -> Result<(), i32>) -> Result<(), i32> {
        loop {
            match call(&self.mappings[k]) {
                Err(libc::EAGAIN) if self.wait_out(k) => {}
                Err(libc::ESRCH) => {
                    self.mappings[k].dead = true;
                    return Err(libc::ESRCH);
                }
                other => return other,
            }
        }
    }

    /// Serves a write to a page that is mapped read-only.
    fn write_to_protected(&mut self, k: usize, page: u64) -> Served {
        let m = &mut self.mappings[k];
        if m.marker(page) == Marker::Notify
            && let Some(watch) = &mut self.watch
        {
            self.counts.wp_faults += 1;
            if !watch.queue.contains(&page) {
                watch.queue.push_back(page);
            }
            return Served::Told;
        }
        m.note_write(page);
        if self.ask(k, |m| m.unprotect(page)) == Err(libc::EAGAIN) {
            return Served::Soon;
        }
        self.mappings[k].wake(page, page + 1);
        self.counts.wp_faults += 1;
        self.pt.hint(page, HINT_WRITTEN, 0);
        Served::Done
    }

    /// Maps a page, and its companions, in mapping `k`.
    pub fn bring(&mut self, k: usize, page: u64, write: bool) -> Served {
        let n = self.window(k, page);
        let n = match self.hold(page, n, write) {
            Ok(n) => n,
            Err(_) if self.pt.get(page).tag() == Tag::Poisoned => {
                return self.refuse(k, self.mappings[k].address(page));
            }
            Err(_) => return Served::Later,
        };
        if write && self.mappings[k].marker(page) == Marker::Track {
            self.mappings[k].note_write(page);
        }
        if self.bring_in(k, page, page + n as u64) { Served::Done } else { Served::Soon }
    }

    /// Maps pages that the object holds in mapping `k`, as their markers ask; false if its process must run first.
    pub fn bring_in(&mut self, k: usize, from: u64, to: u64) -> bool {
        let mut at = from;
        while at < to {
            let wanted = |p| match self.mappings[k].marker(p) {
                Marker::Plain => Some(false),
                Marker::Track | Marker::Notify => Some(true),
                // Whoever touches it must get an error.
                Marker::Unknown => None,
            };
            let protect = wanted(at);
            let stop = (at..to).find(|p| wanted(*p) != protect).unwrap_or(to);
            let Some(protect) = protect else {
                at = stop;
                continue;
            };
            match self.map_run(k, at, stop, protect) {
                Mapped::All => at = stop,
                Mapped::Part => return true,
                Mapped::Soon => return false,
            }
        }
        true
    }

    /// How many pages to bring for a fault: up to 64 KiB where faults run in sequence, one page otherwise.
    fn window(&mut self, k: usize, page: u64) -> usize {
        let left = (BLOCK_PAGES - (page as usize % BLOCK_PAGES)).min((self.pages - page) as usize);
        let m = &mut self.mappings[k];
        let hit = m.streams.iter().position(|(next, _)| *next == page);
        let (i, log) = match hit {
            Some(i) => (i, (m.streams[i].1 + 2).min(4)),
            None => {
                m.stream_next = (m.stream_next + 1) % m.streams.len();
                (m.stream_next, 0)
            }
        };
        let mut n = (1usize << log).min(left);
        if let Some(stop) = (1..n).find(|i| {
            let at = page + *i as u64;
            m.seen.has(at) || m.marker(at) == Marker::Unknown
        }) {
            n = stop;
        }
        m.streams[i] = (page + n as u64, log);
        let (set, clear) = if hit.is_some() { (HINT_SEQUENTIAL, HINT_RANDOM) } else { (HINT_RANDOM, HINT_SEQUENTIAL) };
        self.pt.hint(page, set, clear);
        n
    }

    /// Makes the object hold the page and up to `n` pages in all; returns how many it then holds.
    ///
    /// # Errors
    /// No memory, or the page is lost (its tag says so).
    pub fn hold(&mut self, page: u64, n: usize, write: bool) -> io::Result<usize> {
        self.settle(page, page + n as u64);
        self.bring_back(page, n, write, false)
    }

    /// The same with doubts settled. `gated`: with the gate closed, and only for the first page.
    ///
    /// # Errors
    /// As [`Engine::hold`].
    pub fn bring_back(&mut self, page: u64, n: usize, write: bool, gated: bool) -> io::Result<usize> {
        // A page that nobody has touched stays that way: it is not brought along.
        let out = |e: &Self, p: u64| matches!(e.pt.get(p).tag(), Tag::Zero | Tag::Compressed);
        match self.pt.get(page).tag() {
            Tag::Resident => {
                return Ok((1..n).find(|i| self.pt.get(page + *i as u64).tag() != Tag::Resident).unwrap_or(n));
            }
            Tag::Poisoned => return Err(io::ErrorKind::InvalidData.into()),
            _ => {}
        }
        let n = if self.pt.get(page).tag() == Tag::None { 1 } else { n };
        let n = (1..n).find(|i| !out(self, page + *i as u64)).unwrap_or(n);
        let mut copies = [None; BLOCK_PAGES];
        let mut scratch = core::mem::take(&mut self.scratch);
        let filled = self.fill(page, &mut scratch[..n * PAGE]);
        let compressed = (0..filled).any(|i| self.pt.get(page + i as u64).tag() == Tag::Compressed);
        let written = if filled == 0 {
            self.lose(page);
            Err(io::ErrorKind::InvalidData.into())
        } else if gated {
            let gate = self.removes.gate.as_ref().expect("it is closed");
            gate.fill(page, &scratch[..PAGE]).map(drop).map_err(io::Error::from_raw_os_error)
        } else if compressed {
            write_at(&self.object, &scratch[..filled * PAGE], page)
        } else {
            memfd::populate(&self.object, page * PAGE as u64, (filled * PAGE) as u64)
        };
        self.scratch = scratch;
        written?;
        if !gated && self.removes.covers(page, page + filled as u64) && !self.still_there(page, filled)? {
            return self.hold(page, n, write);
        }
        let close = self.brought(page, filled, write, &mut copies);
        self.resident += filled;
        self.list_resident(page, filled, close, |i| copies[i]);
        Ok(filled)
    }

    /// Pages in doubt were just filled: whether they may be booked as resident. If a hole was punched before or after that, takes
    /// them out again (nobody can have mapped them), and settles what they were.
    fn still_there(&mut self, page: u64, n: usize) -> io::Result<bool> {
        if self.witnesses_are_there(page, page + n as u64) {
            return Ok(true);
        }
        memfd::punch(&self.object, page * PAGE as u64, (n * PAGE) as u64)?;
        self.settle(page, page + n as u64);
        Ok(false)
    }

    /// Books pages as no longer out, and keeps copies that may serve again. Returns whether they left only recently.
    fn brought(&mut self, page: u64, n: usize, write: bool, copies: &mut [Option<u32>]) -> bool {
        let (mut close, mut major) = (false, false);
        let crowded = self.crowded();
        for (i, copy) in copies.iter_mut().enumerate().take(n) {
            let at = page + i as u64;
            let pte = self.pt.get(at);
            match pte.tag() {
                Tag::Compressed => {
                    major = true;
                    self.swapped -= 1;
                    close |= pte.refault_distance(self.evictions) <= self.lru.active.pages();
                    let written = write && i == 0 || self.pt.hints(at) & HINT_WRITTEN != 0;
                    if written || crowded {
                        self.release(pte.handle(), pte.index());
                    } else {
                        *copy = Some(pte.handle());
                    }
                }
                Tag::Zero => self.zeros -= 1,
                _ => {}
            }
        }
        self.counts.major_faults += u64::from(major);
        close
    }

    /// Fills a buffer with the pages from `page` on; returns how many it could fill.
    fn fill(&mut self, page: u64, buffer: &mut [u8]) -> usize {
        for (i, out) in buffer.chunks_mut(PAGE).enumerate() {
            let pte = self.pt.get(page + i as u64);
            if pte.tag() != Tag::Compressed {
                out.fill(0);
            } else if !self.fill_one(pte.handle(), pte.index(), out) {
                return i;
            }
        }
        buffer.len() / PAGE
    }

    /// Fills one page, and decompresses its block only once for all its pages.
    fn fill_one(&mut self, handle: u32, index: usize, out: &mut [u8]) -> bool {
        if self.decoded.0 != Some(handle) {
            self.decoded.0 = None;
            let object = self.store.object(handle);
            let head = Header::read(object);
            let len = (PAGE << head.order).min(self.decoded.1.len());
            let body = &object[object::head_bytes(head.order)..];
            if self.decompressor.decompress(head.encoding, body, &mut self.decoded.1[..len]).is_err() {
                return false;
            }
            self.decoded.0 = Some(handle);
        }
        out.copy_from_slice(&self.decoded.1[index * PAGE..(index + 1) * PAGE]);
        object::hash(out) == object::stored_hash(self.store.object(handle), index)
    }

    /// A page's object does not return what was stored: everybody who touches the page gets SIGBUS.
    fn lose(&mut self, page: u64) {
        self.forget(page);
        self.set(page, uzswap_mm::pagetable::Pte::new(Tag::Poisoned, 0));
        self.counts.poisoned += 1;
        let text =
            "uzswap: a compressed page of a shared region was found damaged; a process that touches it gets SIGBUS\n";
        crate::says::say(text.as_bytes());
    }

    /// Maps `[from, to)`, which the object holds.
    fn map_run(&mut self, k: usize, from: u64, to: u64, protect: bool) -> Mapped {
        let m = &mut self.mappings[k];
        // Note it before the kernel does it, as `mapped` must never say too little. From now on the process may use all of them
        // unseen.
        for p in from..to {
            m.mapped.put(p, true);
            m.seen.put(p, true);
            self.touched[p as usize] = self.round;
        }
        let (mut at, mut tries) = (from, 0);
        while at < to {
            let m = &mut self.mappings[k];
            let Err((done, errno)) = m.map(at, to, protect) else { return Mapped::All };
            at += (done / PAGE) as u64;
            tries += 1;
            match errno {
                _ if at >= to => return Mapped::All,
                libc::EAGAIN if tries < 10_000 => {
                    if !self.wait_out(k) {
                        return Mapped::Soon;
                    }
                }
                // Another fault was served first.
                libc::EEXIST => {
                    m.wake(at, at + 1);
                    at += 1;
                }
                // The object holds the page, but it is missing there: the mapping is of other pages than its process claimed.
                // Only that process gets an error.
                libc::EFAULT if memfd::has(&self.object, at * PAGE as u64).is_ok_and(|has| has) => {
                    let _ = self.refuse(k, self.mappings[k].address(at));
                    return Mapped::Part;
                }
                // The object does not hold it: it was punched unseen, so it reads as zeros. It may have been protected since, and
                // that stays.
                libc::EFAULT => {
                    // It may be a witness; settle that before it is made anew.
                    self.settle(at, at + 1);
                    self.emptied_but(at, at + 1, WRITE_PROTECTED);
                    return Mapped::Soon;
                }
                libc::ESRCH => {
                    m.dead = true;
                    return Mapped::Part;
                }
                // The program has unmapped it, or the page was poisoned before.
                _ => {
                    m.wake(at, at + 1);
                    return Mapped::Part;
                }
            }
        }
        Mapped::All
    }
}

fn write_at(object: &OwnedFd, bytes: &[u8], page: u64) -> io::Result<()> {
    use std::os::fd::{AsRawFd, FromRawFd};
    // SAFETY: the descriptor is open, and not closed by this File.
    let file = std::mem::ManuallyDrop::new(unsafe { File::from_raw_fd(object.as_raw_fd()) });
    file.write_all_at(bytes, page * PAGE as u64)
}

//! Discovery: which of the program's memory is managed.
//!
//! The pager manages private anonymous memory that was not executable when it was found. It excludes uzswap's own memory, thread
//! stacks (libc maps them with MAP_STACK, which the agent sees), the TLS of live threads (the kernel writes there and kills the
//! process when it cannot), and small anonymous mappings older than the agent (the loader's). Reserved ranges (PROT_NONE) are
//! registered too, which covers what malloc arenas and runtimes open up later. Ranges are found by reading /proc/self/maps, never
//! trusted from a hook: a hook only says that it is time to look. Memory found late was the kernel's meanwhile: nothing is wrong,
//! it only counted without being evictable.

pub mod ceded;
pub(crate) mod engage;
pub mod growth;
pub mod letgo;
pub(crate) mod pins;
pub(crate) mod ranges;
pub mod relocated;

use crate::calls::Calls;
use crate::calls::events::forget_range;
use crate::frames::arena::PAGE;
use crate::inject::Site;
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::lru::List;
use uzswap_mm::pagetable::{ADDRESS_SPACE_PAGES, Tag};
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::{maps, pagemap, sys, thread};

/// Anonymous mappings older than the agent are managed if they are at least this large.
pub const OLD_MAPPING_BYTES: usize = 4 << 20;

/// How many bytes from the thread pointer on are pinned: the thread's number and the head of its robust list are there (in
/// glibc's layout at 720 and 736, where debuggers expect them). No more, as behind the block there may be other memory.
const PINNED_BYTES: usize = 1 << 10;

/// How often to look whether a thread's control block, touched before each look, is left as it is.
const PIN_TRIES: usize = 100;

/// The ticker looks for unknown memory from this amount on.
const UNKNOWN_BYTES: usize = 1 << 20;
/// Where little is unknown, a scan is made again after this many times its duration.
const PAUSES: u64 = 8;

/// When the ticker scans. The time of a scan grows with the number of mappings (50 ms for 30,000), and a program that maps memory
/// piece by piece has another MiB of it unknown right away.
#[derive(Default)]
pub struct Scans {
    /// What was unknown after the last scan (bytes).
    pub unknown_before: usize,
    /// When the last scan ended, and how long it took (nanoseconds).
    ended: u64,
    took: u64,
    /// When to try again to manage memory, after that failed (monotonic nanoseconds).
    pub engage_from: u64,
    /// How often it failed, for a reason that may pass.
    pub refused: u32,
    /// Whether new calls of the program wait for a scan that calls did not let through ([`Calls::want_stopped`]).
    ///
    /// [`Calls::want_stopped`]: crate::calls::Calls::want_stopped
    held_up: bool,
}

impl Scans {
    /// Whether a scan is due where `unknown` bytes are unknown, in a process with this share of the limit.
    pub fn are_due(&self, unknown: usize, share: usize, now: u64) -> bool {
        let new = unknown.saturating_sub(self.unknown_before);
        let rested = now.saturating_sub(self.ended) >= PAUSES * self.took;
        new > UNKNOWN_BYTES && (rested || new > share / 16)
    }

    /// Sets whether calls did not let a scan through, so that new ones wait for it.
    pub fn set_held_up(&mut self, calls: &Calls, held_up: bool) {
        if core::mem::replace(&mut self.held_up, held_up) != held_up {
            calls.want_stopped(held_up);
        }
    }

    /// Notes a scan that was made.
    pub fn note(&mut self, begun: u64, ended: u64) {
        (self.ended, self.took) = (ended, ended.saturating_sub(begun));
    }
}

impl Pager {
    /// Registers what is not registered yet and lists its pages, while no mapping call of the program is under way. Returns how
    /// many bytes it newly found present.
    ///
    /// # Errors
    /// When the maps cannot be read, or when a range of which pages are out could not be registered (in a forked child: they
    /// would read as zeros). Other memory that cannot be registered stays the kernel's.
    pub fn scan(&self, s: &mut State) -> Result<usize, Errno> {
        let mut text = Vec::with_capacity(128 << 10);
        raw::read_file(b"/proc/thread-self/maps\0", &mut text)?;
        drop_stale(s);
        let mut found = Ok(0);
        for m in maps::parse(&text) {
            // Register the others all the same.
            found = self.take_over_mapping(s, &m).and_then(|new| Ok(found? + new));
        }
        found
    }

    /// Registers a mapping if it is to be managed, without what is excluded, and lists its present pages that were unknown.
    fn take_over_mapping(&self, s: &mut State, m: &maps::Mapping) -> Result<usize, Errno> {
        // Memory that a program makes executable later, as compilers at run time do, has been managed before.
        let managed = m.is_private_anonymous() || m.is_anonymous() && s.knows_any(m.start, m.end);
        // Memory beyond 47 bits, where the machine has such addresses and the program asks for them, is not managed.
        let managed = managed && (m.end / PAGE) as u64 <= ADDRESS_SPACE_PAGES;
        if self.layout.owns(m.start) || !managed {
            return Ok(0);
        }
        let parts = without(vec![(m.start, m.end)], &s.pinned);
        let parts = without(parts, self.ceding.kept().as_slice());
        let mut found = Ok(0);
        for (start, end) in without(parts, &s.excluded) {
            found = self.take_over(s, start, end).and_then(|new| Ok(found? + new));
        }
        found
    }

    /// Scans between mapping calls of the program: while one runs, from its event to its end, there may be pages that are about
    /// to go. False when calls cannot be kept from running now.
    pub(crate) fn scan_between_calls(&self) -> bool {
        let Some(mut s) = self.lock_between_calls() else { return false };
        let _ = self.scan(&mut s);
        self.calls.go_on();
        true
    }

    /// Registers, between the program's calls, what those calls noted as mapped; or everything not registered yet, if they noted
    /// more than there was room for, or the kernel cannot be asked about single mappings. Returns whether it looked through
    /// everything; None when calls cannot be kept from running now.
    ///
    /// The story: for each MiB that a program mapped, all its mappings were read and registered again. A program that mapped
    /// 30,000 of 16 KiB took 31 s, 28 of them for that.
    pub(crate) fn scan_noted_between_calls(&self) -> Option<bool> {
        let mut s = self.lock_between_calls()?;
        let whole = !self.scan_noted(&mut s);
        if whole {
            let _ = self.scan(&mut s);
        }
        self.calls.go_on();
        Some(whole)
    }

    /// The same for the handler, which waits for no call to end; false where it has not been done. (While the process is let go
    /// of, the handler must not register what the ticker gives up.)
    pub(crate) fn scan_noted_now(&self) -> bool {
        let Some(mut s) = self.lock_between_calls_now() else { return false };
        if self.lets_go() {
            self.calls.go_on();
            return false;
        }
        let done = self.scan_noted(&mut s);
        if !done {
            self.growth.noted.lose();
        }
        // What was unmapped since shows only when the kernel is asked: without that there would be no room for what is mapped
        // now.
        s.rss = self.rss_now(&s);
        self.publish(&s);
        self.calls.go_on();
        done
    }

    /// Registers what was noted; false where that is not all, or could not be looked at.
    fn scan_noted(&self, s: &mut State) -> bool {
        let noted = self.growth.noted.take();
        noted.is_some_and(|noted| self.scan_ranges(s, noted).is_ok())
    }

    /// Registers the mappings in these ranges that are not managed yet, and lists their pages.
    ///
    /// # Errors
    /// When the kernel cannot say what is mapped (before 6.11).
    fn scan_ranges(&self, s: &mut State, mut ranges: Vec<(usize, usize)>) -> Result<(), Errno> {
        let (fd, mut name) = (self.files.maps.load(Relaxed), [0; maps::NAME_BYTES]);
        drop_stale(s);
        ranges.sort_unstable();
        let mut done = 0;
        for (start, end) in ranges {
            let mut at = start.max(done);
            while at < end {
                let Some(m) = maps::mapping_from(fd, at, &mut name)?.filter(|m| m.start < end) else { break };
                // Skip what a neighbour was noted for, or an earlier look found.
                if !s.managed.covers(m.start.max(at), m.end.min(end)) {
                    let _ = self.take_over_mapping(s, &m);
                }
                at = m.end;
            }
            done = done.max(end);
        }
        Ok(())
    }

    /// Registers one range and lists its present pages that were unknown.
    pub(crate) fn take_over(&self, s: &mut State, start: usize, end: usize) -> Result<usize, Errno> {
        // Registering again what is registered is a cheap no-op for the kernel.
        let refused = self.inject(Site::Register).map(|_| libc::ENOMEM);
        if let Some(errno) = refused.or(self.register(start, end - start).err()) {
            if any_out(s, start, end) {
                return Err(errno);
            }
            // What is there must not leave either: MOVE does not ask whether its source is registered.
            s.managed.cut(start, end);
            if errno == libc::EBUSY {
                s.note_ceded(start, end);
            }
            forget_range(s, (start / PAGE) as u64, (end / PAGE) as u64);
            return Ok(0);
        }
        s.note_taken_over(start, end);
        if s.managed.has(start, end) {
            return Ok(0);
        }
        // What is managed beyond it, of a mapping that was split since, stays: not every look sees that one.
        s.managed.cut(start, end);
        s.managed.push((start, end));
        let mut runs: Vec<(usize, usize)> = Vec::new();
        let (fd, note) = (self.files.pagemap.load(Relaxed), |a, b| runs.push((a, b)));
        let found = match self.without_move {
            true => pagemap::present_runs_read(fd, start, end, note),
            false => pagemap::present_runs(fd, start, end, note),
        };
        if found.is_err() {
            return Ok(0);
        }
        let mut pages = 0;
        for (a, b) in runs {
            let mut at = (a / PAGE) as u64;
            let end = (b / PAGE) as u64;
            while at < end {
                if s.pt.get(at) != uzswap_mm::pagetable::Pte::NONE {
                    at += 1;
                    continue;
                }
                let mut n = 1;
                while at + n < end && n < 512 && s.pt.get(at + n) == uzswap_mm::pagetable::Pte::NONE {
                    n += 1;
                }
                // Before they are listed: no reader of the page map may see a page as written to that was only read.
                if s.tracking {
                    self.find_unwritten(s, at, at + n);
                }
                s.list_resident(at, n as usize, List::Inactive, |_| None);
                pages += n as usize;
                at += n;
            }
        }
        Ok(pages * PAGE)
    }

    /// Forgets memory that a forked child did not get (MADV_DONTFORK), once all that is mapped has been registered. What the
    /// child maps there is new.
    pub(crate) fn forget_unmapped(&self, s: &mut State) {
        let mut at = 0;
        for (start, end) in s.managed.clone().iter() {
            forget_range(s, at, (start / PAGE) as u64);
            at = (end / PAGE) as u64;
        }
        forget_range(s, at, ADDRESS_SPACE_PAGES);
    }

    /// Forgets, in a forked child, what its parent had in memory that is zeros in its children (MADV_WIPEONFORK), as the kernel
    /// says.
    ///
    /// The story: where such memory was out, the child got its parent's contents. Random number generators keep their state in
    /// such memory so that parent and child do not come to the same keys.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub(crate) fn forget_wiped(&self, s: &mut State) -> Result<(), Errno> {
        if !self.wipes.load(Relaxed) {
            return Ok(());
        }
        let mut text = Vec::with_capacity(1 << 20);
        raw::read_file(b"/proc/thread-self/smaps\0", &mut text)?;
        for (start, end) in maps::flagged(&text, maps::WIPED_ON_FORK) {
            forget_range(s, (start / PAGE) as u64, (end / PAGE) as u64);
        }
        Ok(())
    }

    /// Excludes a range that was just mapped, as long as it is mapped: a stack.
    ///
    /// A stack that the ticker has found and registered since it was mapped stays managed, like one that the program made itself:
    /// it cannot be unregistered here, as only the helpers have the userfaultfd. If it were excluded as well, it would be managed
    /// in this process, and read as zeros in forked children, which go by what is excluded.
    pub fn exclude(&self, s: &mut State, start: usize, end: usize) {
        let found = s.managed.overlapping(start, end).next().is_some();
        if !found && !s.excluded.contains(&(start, end)) {
            s.excluded.push((start, end));
            self.excluded_from.fetch_min(start, Relaxed);
            self.excluded_to.fetch_max(end, Relaxed);
        }
    }

    /// Whether part of a range may ever have been excluded.
    pub fn may_be_excluded(&self, start: usize, end: usize) -> bool {
        start < self.excluded_to.load(Relaxed) && self.excluded_from.load(Relaxed) < end
    }

    /// Keeps the calling thread's control block in memory for good. The kernel's last write for a thread that ends goes there (a
    /// thread that joins it waits for that), and the kernel serves no fault of a thread that ends. If the thread's stack is
    /// libc's, the block is excluded with it; if the stack is the program's, or was found before it was excluded, the block is
    /// managed.
    ///
    /// Call it with all signals blocked.
    pub fn pin_control_block(&self) {
        let at = thread::pointer();
        // It was there a moment ago, as the thread runs. It may have been evicted since.
        self.pin(at, at + PINNED_BYTES, true);
    }

    /// Keeps the pages of `[from, to)` in memory, and writable, for as long as they are mapped. `touched` says that they were
    /// touched a moment ago; otherwise, and where they have gone since, it brings them in.
    ///
    /// The story: memory that had been pinned, then dropped (MADV_DONTNEED) and used again, as stacks and heaps are, still
    /// counted as pinned. It was evicted, and a thread that joined its thread waited forever.
    ///
    /// Call it with all signals blocked.
    pub fn pin(&self, from: usize, to: usize, mut touched: bool) {
        let (start, end) = (from & !(PAGE - 1), to.next_multiple_of(PAGE));
        let pages = || (start / PAGE) as u64..(end / PAGE) as u64;
        for _ in 0..PIN_TRIES {
            if !core::mem::take(&mut touched) {
                populate(start, end);
            }
            let mut s = self.lock_in_hook();
            let within = |ranges: &[(usize, usize)]| ranges.iter().any(|(a, b)| *a <= start && end <= *b);
            let pinned = within(&s.pinned);
            if within(&s.excluded) || pinned && !s.knows_any(start, end) {
                return;
            }
            // Present, and not write-protected, as the kernel's last write would meet the protection as well.
            let there = |vpn| {
                let plain = !s.pt.is_clean(vpn) && !s.pt.is_protected(vpn);
                matches!(s.pt.get(vpn).tag(), Tag::Resident | Tag::None) && plain
            };
            if pages().all(there) && self.may_be_written(start, end) {
                if !pinned {
                    s.pinned.push((start, end));
                }
                forget_range(&mut s, pages().start, pages().end);
                return;
            }
        }
    }

    /// Whether all of a range is excluded, as a stack of libc's. Call it with all signals blocked.
    pub fn is_excluded(&self, start: usize, end: usize) -> bool {
        self.lock_in_hook().excluded.iter().any(|(a, b)| *a <= start && end <= *b)
    }

    /// Notes that a mapping other than a stack was made, or moved to: the range may be managed, and no advice holds for it.
    /// (Nothing tells when a stack is unmapped, as it was not registered, nor what happens before memory is managed.)
    pub fn include(&self, s: &mut State, start: usize, end: usize) {
        s.advice.forget(start, end);
        s.excluded = without(core::mem::take(&mut s.excluded), &[(start, end)]);
    }

    /// Excludes what the loader and libc mapped before the agent came, and the caller's TLS block at `tls`.
    ///
    /// # Errors
    /// When the maps cannot be read.
    pub fn exclude_old(&self, s: &mut State, tls: usize) -> Result<(), Errno> {
        let mut text = Vec::with_capacity(128 << 10);
        raw::read_file(b"/proc/thread-self/maps\0", &mut text)?;
        for m in maps::parse(&text).filter(maps::Mapping::is_private_anonymous) {
            if !self.layout.owns(m.start) && m.name != b"[heap]" && m.end - m.start < OLD_MAPPING_BYTES {
                s.pinned.push((m.start, m.end));
            }
        }
        let page = tls & !(PAGE - 1);
        s.pinned.push((page - (128 << 10), page + 4 * PAGE));
        Ok(())
    }
}

/// Brings pages in, writable where the kernel can be told so; does nothing where there is no memory.
pub fn populate(from: usize, to: usize) {
    // SAFETY: populating changes no contents, and does nothing where there is no memory.
    if unsafe { sys!(libc::SYS_madvise, from, to - from, libc::MADV_POPULATE_WRITE) }.is_err() {
        (from..to).step_by(PAGE).for_each(|page| {
            thread::reads(page);
        });
    }
}

/// Drops exclusions of ranges of which pages are known, and pins of ranges of which pages are out. The stack was unmapped, and
/// other memory moved or grew to its place; or the program dropped what had been pinned.
///
/// The story: a block that `mremap` moved to where threads' stacks had been stayed managed, and was zeros in forked children,
/// which register all but what is excluded.
fn drop_stale(s: &mut State) {
    let (mut excluded, mut pinned) = (core::mem::take(&mut s.excluded), core::mem::take(&mut s.pinned));
    excluded.retain(|(start, end)| !s.knows_any(*start, *end));
    pinned.retain(|(start, end)| !any_out(s, *start, *end));
    (s.excluded, s.pinned) = (excluded, pinned);
}

/// Whether a page of the range is out.
fn any_out(s: &State, start: usize, end: usize) -> bool {
    let (mut at, end) = ((start / PAGE) as u64, (end / PAGE) as u64);
    while let Some(vpn) = s.pt.next_used(at).filter(|vpn| *vpn < end) {
        if s.pt.get(vpn).tag() != Tag::Resident {
            return true;
        }
        at = vpn + 1;
    }
    false
}

/// Forgets what is known of a range: what is mapped there next is looked at anew, and is nobody's control block.
pub(crate) fn no_longer_managed(s: &mut State, start: usize, end: usize) {
    if s.pinned.iter().any(|(a, b)| *a < end && start < *b) {
        s.pinned = without(core::mem::take(&mut s.pinned), &[(start, end)]);
    }
    s.advice.forget(start, end);
    s.managed.cut(start, end);
}

/// The parts without the excluded ranges.
pub(crate) fn without(mut parts: Vec<(usize, usize)>, excluded: &[(usize, usize)]) -> Vec<(usize, usize)> {
    for (a, b) in excluded {
        let mut next = Vec::with_capacity(parts.len() + 1);
        for (s, e) in parts {
            if *b <= s || *a >= e {
                next.push((s, e));
                continue;
            }
            if s < *a {
                next.push((s, *a));
            }
            if *b < e {
                next.push((*b, e));
            }
        }
        parts = next;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn exclusion_cuts() {
        assert_eq!(without(vec![(10, 20)], &[]), [(10, 20)]);
        assert_eq!(without(vec![(10, 20)], &[(12, 14), (18, 30)]), [(10, 12), (14, 18)]);
        assert_eq!(without(vec![(10, 20)], &[(0, 30)]), []);
        assert_eq!(without(vec![(10, 20)], &[(0, 10), (20, 30)]), [(10, 20)]);
    }

    #[test]
    fn what_takes_long_is_not_done_all_the_time() {
        const MIB: usize = 1 << 20;
        let mut scans = Scans::default();
        let due = |scans: &Scans, mib: usize, now| scans.are_due(mib * MIB, 64 * MIB, now);
        assert_eq!([due(&scans, 1, 0), due(&scans, 2, 0)], [false, true]);
        scans.note(1000, 2000);
        scans.unknown_before = 3 * MIB;
        assert_eq!([due(&scans, 5, 3000), due(&scans, 5, 10_000), due(&scans, 4, 10_000)], [false, true, false]);
        assert!(due(&scans, 8, 2001), "more than a sixteenth of the limit");
    }

    /// What calls noted as mapped is managed after a look at those ranges, and nothing else is looked at.
    #[test]
    fn what_calls_noted_is_found_without_looking_at_the_rest() {
        let p = testing::pager(16 << 20);
        let map = |prot: i32| {
            // SAFETY: new memory of the test's own.
            unsafe {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                // With a page of another kind on either side, so that it is a mapping of its own.
                let at = sys!(libc::SYS_mmap, 0, 18 * PAGE, libc::PROT_NONE, flags, -1isize, 0).expect("memory");
                sys!(libc::SYS_mprotect, at + PAGE, 16 * PAGE, prot).expect("mprotect");
                at + PAGE
            }
        };
        let writable = libc::PROT_READ | libc::PROT_WRITE;
        let [noted, other, code] = [writable, writable, writable | libc::PROT_EXEC].map(map);
        // SAFETY: the test's own, and writable.
        unsafe { ((noted + 3 * PAGE) as *mut u8).write(1) };
        let managed = |at: usize| p.state.lock().managed.covers(at, at + 16 * PAGE);
        let mut name = [0; maps::NAME_BYTES];
        if maps::mapping_from(p.files.maps.load(Relaxed), 0, &mut name) == Err(libc::ENOTTY) {
            return testing::skip("this kernel cannot be asked about single mappings (before 6.11)");
        }
        let ranges = vec![(code, code + 16 * PAGE), (noted + 4 * PAGE, noted + 5 * PAGE), (noted, noted + PAGE)];
        p.scan_ranges(&mut p.state.lock(), ranges).expect("the kernel can be asked");
        assert_eq!([noted, other, code].map(managed), [true, false, false]);
        let tag = |page: usize| p.state.lock().pt.get((noted / PAGE + page) as u64).tag();
        assert_eq!([tag(2), tag(3), tag(4)], [Tag::None, Tag::Resident, Tag::None]);
        assert_eq!(p.state.lock().resident, 1);
        // What is managed beyond a mapping that is found, as that was split, stays so: nobody looked at it.
        let half = 8 * PAGE;
        // SAFETY: the test's own, of which nothing is needed.
        unsafe { sys!(libc::SYS_mprotect, noted + half, half, libc::PROT_READ) }.expect("mprotect");
        p.state.lock().managed.cut(noted, noted + PAGE);
        p.scan_ranges(&mut p.state.lock(), vec![(noted, noted + PAGE)]).expect("the kernel can be asked");
        assert!(managed(noted));
        // Unmapped, and noted once more: nothing is there.
        // SAFETY: nobody uses it.
        unsafe { sys!(libc::SYS_munmap, other, 16 * PAGE) }.expect("munmap");
        p.scan_ranges(&mut p.state.lock(), vec![(other, other + 16 * PAGE)]).expect("the kernel can be asked");
        assert!(!managed(other));
        p.files.maps.store(-1, Relaxed);
        assert!(p.scan_ranges(&mut p.state.lock(), vec![(noted, noted + PAGE)]).is_err(), "it cannot be asked");
    }

    /// The story: the ticker found a thread's stack between its mapping and the hook that excludes it, so it was both managed and
    /// excluded. A child forked while its first page was out read zeros there, and libc's fork relied on them (SIGSEGV). After
    /// that, the hook was made to unregister the stack, from a thread of the program, which does not have the userfaultfd.
    #[test]
    fn a_stack_that_was_found_first_stays_managed() {
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, 16);
        let (start, end) = (at + 4 * PAGE, at + 8 * PAGE);
        let mut s = p.state.lock();
        p.take_over(&mut s, at, at + 16 * PAGE).expect("registers");
        p.exclude(&mut s, start, end);
        assert!(s.managed.has(at, at + 16 * PAGE) && s.managed.iter().count() == 1 && s.excluded.is_empty());
        p.exclude(&mut s, at + 32 * PAGE, at + 40 * PAGE);
        assert_eq!(s.excluded, [(at + 32 * PAGE, at + 40 * PAGE)]);
        assert!(
            p.may_be_excluded(at + 39 * PAGE, at + 41 * PAGE) && !p.may_be_excluded(at + 40 * PAGE, at + 41 * PAGE)
        );
        // Where it was there is something else now, which is smaller.
        p.include(&mut s, at + 34 * PAGE, at + 36 * PAGE);
        assert_eq!(s.excluded, [(at + 32 * PAGE, at + 34 * PAGE), (at + 36 * PAGE, at + 40 * PAGE)]);
    }

    /// See [`Pager::pin`].
    #[test]
    fn what_was_dropped_and_used_again_is_pinned_anew() {
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, 2);
        let first = (at / PAGE) as u64;
        for page in 0..2 {
            testing::put(p, at + page * PAGE, &[7; PAGE]);
            p.state.lock().list_resident(first + page as u64, 1, List::Inactive, |_| None);
        }
        for round in 0..3 {
            p.pin(at + 8, at + 16, round != 1);
            let tags = [0, 1].map(|page| p.state.lock().pt.get(first + page).tag());
            assert_eq!(tags, [Tag::None, Tag::Resident], "round {round}");
            assert_eq!(p.state.lock().pinned, [(at, at + PAGE)]);
            // The page comes anew, as a fault on dropped memory brings it.
            p.state.lock().list_resident(first, 1, List::Inactive, |_| None);
        }
        assert_eq!(p.state.lock().resident, 2);
    }

    /// A known range is managed, so it is registered whatever was there before; a range with pages out, whatever was pinned.
    #[test]
    fn what_is_managed_is_neither_excluded_nor_pinned() {
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, 16);
        let range = |from: usize| (at + from * PAGE, at + (from + 2) * PAGE);
        let mut s = p.state.lock();
        s.excluded = vec![range(0), range(4)];
        s.pinned = vec![range(8), range(12)];
        for page in [5, 9, 12] {
            let tag = if page == 12 { Tag::Resident } else { Tag::Poisoned };
            s.pt.set((at / PAGE + page) as u64, uzswap_mm::pagetable::Pte::new(tag, 0));
        }
        drop_stale(&mut s);
        assert_eq!((&s.excluded[..], &s.pinned[..]), (&[range(0)][..], &[range(12)][..]));
    }
}

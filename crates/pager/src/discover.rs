//! Discovery: decides which of the program's memory is managed.
//!
//! uzswap manages private anonymous memory that was not executable when it was found, except its own memory, thread stacks (libc
//! maps them with MAP_STACK, which the agent sees), the TLS of live threads (the kernel itself writes there, and kills the
//! process when it cannot), and small anonymous mappings older than the agent (the loader's). Reserved ranges (PROT_NONE) are
//! registered too, so whatever malloc arenas and runtimes open up later is covered.
//!
//! A scan finds ranges by reading /proc/self/maps. It never trusts a hook for them: a hook only says that it is time to look.
//! Memory that is found late belonged to the kernel meanwhile. Nothing is wrong with it; it merely counted without being
//! evictable.

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

/// Anonymous mappings older than the agent are managed only from this size on.
pub const OLD_MAPPING_BYTES: usize = 4 << 20;

/// Bytes from the thread pointer on that are pinned. The thread's number and the head of its robust list are there (at 720 and
/// 736 in glibc's layout, where debuggers expect them). No more is pinned, as other memory may follow the block.
const PINNED_BYTES: usize = 1 << 10;

/// How often a thread touches its control block and checks it, until reclaim has left it alone in between.
const PIN_TRIES: usize = 100;

/// The ticker scans when more than this much memory is resident and unknown.
const UNKNOWN_BYTES: usize = 1 << 20;
/// A scan that took time t is not repeated for this many times t, while little is unknown.
const PAUSES: u64 = 8;

/// When the ticker scans. The cost of a scan grows with the number of mappings (30,000 take 50 ms), and a program that maps
/// memory piece by piece soon has another MiB unknown.
#[derive(Default)]
pub struct Scans {
    /// Bytes that were unknown after the last scan.
    pub unknown_before: usize,
    /// When the last scan ended, and how long it took (nanoseconds).
    ended: u64,
    took: u64,
    /// When the process may try to engage again, after a failure (monotonic nanoseconds).
    pub engage_from: u64,
    /// Failures to engage whose cause may pass.
    pub refused: u32,
    /// Whether new mapping calls wait for a scan that they kept from running ([`Calls::want_stopped`]).
    ///
    /// [`Calls::want_stopped`]: crate::calls::Calls::want_stopped
    held_up: bool,
}

impl Scans {
    /// Whether a scan is due at `now`, with `unknown` bytes unknown in a process whose share of the limit is `share` bytes.
    pub fn are_due(&self, unknown: usize, share: usize, now: u64) -> bool {
        let new = unknown.saturating_sub(self.unknown_before);
        let rested = now.saturating_sub(self.ended) >= PAUSES * self.took;
        new > UNKNOWN_BYTES && (rested || new > share / 16)
    }

    /// Makes new mapping calls wait for a scan that could not run because of them, or ends that.
    pub fn set_held_up(&mut self, calls: &Calls, held_up: bool) {
        if core::mem::replace(&mut self.held_up, held_up) != held_up {
            calls.want_stopped(held_up);
        }
    }

    /// Notes that a scan was made.
    pub fn note(&mut self, begun: u64, ended: u64) {
        (self.ended, self.took) = (ended, ended.saturating_sub(begun));
    }
}

impl Pager {
    /// Registers what is to be managed and is not yet, and lists its resident pages. Returns the bytes newly found resident. No
    /// mapping call of the program may be under way.
    ///
    /// # Errors
    /// When the maps cannot be read, or when a range that has pages out could not be registered (in a forked child they would
    /// read as zeros). Any other range that cannot be registered stays with the kernel.
    pub fn scan(&self, s: &mut State) -> Result<usize, Errno> {
        let mut text = Vec::with_capacity(128 << 10);
        raw::read_file(b"/proc/thread-self/maps\0", &mut text)?;
        drop_stale(s);
        let mut found = Ok(0);
        for m in maps::parse(&text) {
            // A range that fails does not keep the others from being registered.
            found = self.take_over_mapping(s, &m).and_then(|new| Ok(found? + new));
        }
        found
    }

    /// Registers a mapping that is to be managed, less what is excluded, and lists its resident pages that were unknown.
    fn take_over_mapping(&self, s: &mut State, m: &maps::Mapping) -> Result<usize, Errno> {
        // Memory that a program makes executable later (as JIT compilers do) was managed before, and stays so.
        let managed = m.is_private_anonymous() || m.is_anonymous() && s.knows_any(m.start, m.end);
        // Memory beyond 47 bits, which a program must ask for explicitly, is left alone.
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

    /// Scans with the program's mapping calls stopped: between a call's event and its end, pages may still be mapped that are
    /// about to go. Returns false when the calls cannot be stopped now.
    pub(crate) fn scan_between_calls(&self) -> bool {
        let Some(mut s) = self.lock_between_calls() else { return false };
        let _ = self.scan(&mut s);
        self.calls.go_on();
        true
    }

    /// Registers what the mapping calls noted, with those calls stopped. Falls back to a whole scan if there was more than could
    /// be noted, or if the kernel cannot be asked about single mappings. Returns whether it made a whole scan; None when the
    /// calls cannot be stopped now.
    ///
    /// The story: each MiB that a program mapped had all its mappings read and registered again. A program that mapped 30,000 of
    /// 16 KiB took 31 s, 28 of them for that.
    pub(crate) fn scan_noted_between_calls(&self) -> Option<bool> {
        let mut s = self.lock_between_calls()?;
        let whole = !self.scan_noted(&mut s);
        if whole {
            let _ = self.scan(&mut s);
        }
        self.calls.go_on();
        Some(whole)
    }

    /// Does the same on the handler, which waits for no call to end; false if it was not done. (While the process is let go of
    /// the handler must not register again what the ticker gives up.)
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
        // RSS shows an unmapping only when it is read again; with the old value there would seem to be no room for the new
        // mapping.
        s.rss = self.rss_now(&s);
        self.publish(&s);
        self.calls.go_on();
        done
    }

    /// Registers what was noted; false if not all was noted, or the kernel could not be asked.
    fn scan_noted(&self, s: &mut State) -> bool {
        let noted = self.growth.noted.take();
        noted.is_some_and(|noted| self.scan_ranges(s, noted).is_ok())
    }

    /// Registers the mappings in these ranges that are not managed yet, and lists their resident pages.
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
                // A mapping may be known already, from a neighbour's note or an earlier scan.
                if !s.managed.covers(m.start.max(at), m.end.min(end)) {
                    let _ = self.take_over_mapping(s, &m);
                }
                at = m.end;
            }
            done = done.max(end);
        }
        Ok(())
    }

    /// Registers one range and lists its resident pages that were unknown.
    pub(crate) fn take_over(&self, s: &mut State, start: usize, end: usize) -> Result<usize, Errno> {
        // The kernel takes a repeated registration as a cheap no-op.
        let refused = self.inject(Site::Register).map(|_| libc::ENOMEM);
        if let Some(errno) = refused.or(self.register(start, end - start).err()) {
            if any_out(s, start, end) {
                return Err(errno);
            }
            // Without a registration these pages must not leave either, and MOVE does not check whether its source is registered.
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
        // If the mapping was split since, the managed part beyond it stays: not every scan sees the other half.
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
                // This comes before listing, so that no reader of the page map sees a page as written that was only read.
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

    /// In a forked child, once everything mapped is registered: forgets memory that the parent has and the child does not
    /// (MADV_DONTFORK). Whatever the child maps there is new.
    pub(crate) fn forget_unmapped(&self, s: &mut State) {
        let mut at = 0;
        for (start, end) in s.managed.clone().iter() {
            forget_range(s, at, (start / PAGE) as u64);
            at = (end / PAGE) as u64;
        }
        forget_range(s, at, ADDRESS_SPACE_PAGES);
    }

    /// In a forked child: forgets memory that is zeros in children (MADV_WIPEONFORK), as the kernel reports it.
    ///
    /// The story: where such memory was out, the child read the parent's data. Random number generators keep their state there,
    /// so that parent and child do not produce the same keys.
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

    /// Excludes a stack that was just mapped, for as long as it is mapped.
    ///
    /// If the ticker found and registered it in between, it stays managed, as a stack that the program made itself does. It
    /// cannot be let go of here, as only the helpers have the userfaultfd. If it were excluded as well, it would be managed in
    /// this process but read as zeros in forked children, which do not register what is excluded.
    pub fn exclude(&self, s: &mut State, start: usize, end: usize) {
        let found = s.managed.overlapping(start, end).next().is_some();
        if !found && !s.excluded.contains(&(start, end)) {
            s.excluded.push((start, end));
            self.excluded_from.fetch_min(start, Relaxed);
            self.excluded_to.fetch_max(end, Relaxed);
        }
    }

    /// Whether any part of the range may ever have been excluded.
    pub fn may_be_excluded(&self, start: usize, end: usize) -> bool {
        start < self.excluded_to.load(Relaxed) && self.excluded_from.load(Relaxed) < end
    }

    /// Keeps the calling thread's control block in memory for good. The kernel's last write for an ending thread goes there (a
    /// joining thread waits for it), and the kernel serves no fault of a thread that ends. A block on libc's stack is excluded
    /// with that stack. A block on the program's own stack, or on a stack that was found before it was excluded, is managed, and
    /// needs this.
    ///
    /// The caller has all signals blocked.
    pub fn pin_control_block(&self) {
        let at = thread::pointer();
        // The block was resident a moment ago, as this thread runs; it may have been evicted since.
        self.pin(at, at + PINNED_BYTES, true);
    }

    /// Keeps the pages of `[from, to)` in memory and writable for as long as they are mapped. `touched` says that they were
    /// resident a moment ago. Without it, and if they have left since, this function brings them in.
    ///
    /// The story: pages that had been pinned, then dropped (MADV_DONTNEED) and used again, as stacks and heaps are, still counted
    /// as pinned. They were evicted, and a thread that joined theirs waited forever.
    ///
    /// The caller has all signals blocked.
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
            // Resident, and not write-protected: the kernel's last write would meet the protection too.
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

    /// Whether all of a range is excluded, as a stack of libc's is. The caller has all signals blocked.
    pub fn is_excluded(&self, start: usize, end: usize) -> bool {
        self.lock_in_hook().excluded.iter().any(|(a, b)| *a <= start && end <= *b)
    }

    /// Notes that memory other than a stack was mapped at, or moved to, this range: it may be managed, and earlier advice no
    /// longer applies. (An excluded stack is not registered, so no event tells when it is unmapped; nor does any before memory is
    /// managed.)
    pub fn include(&self, s: &mut State, start: usize, end: usize) {
        s.advice.forget(start, end);
        s.excluded = without(core::mem::take(&mut s.excluded), &[(start, end)]);
    }

    /// Excludes what the loader and libc mapped before the agent was loaded, and the caller's TLS block at `tls`.
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

/// Brings pages in, for writing where the kernel can be told so. Ranges without memory are left as they are.
pub fn populate(from: usize, to: usize) {
    // SAFETY: populating changes no contents, and does nothing where there is no memory.
    if unsafe { sys!(libc::SYS_madvise, from, to - from, libc::MADV_POPULATE_WRITE) }.is_err() {
        (from..to).step_by(PAGE).for_each(|page| {
            thread::reads(page);
        });
    }
}

/// Drops exclusions of ranges that have known pages, and pins of ranges that have pages out. The stack was unmapped and other
/// memory moved or grew to its place, or the program dropped the pinned memory.
///
/// The story: `mremap` moved a block to where threads' stacks had been. The block stayed managed but read as zeros in forked
/// children, which register everything that is not excluded.
fn drop_stale(s: &mut State) {
    let (mut excluded, mut pinned) = (core::mem::take(&mut s.excluded), core::mem::take(&mut s.pinned));
    excluded.retain(|(start, end)| !s.knows_any(*start, *end));
    pinned.retain(|(start, end)| !any_out(s, *start, *end));
    (s.excluded, s.pinned) = (excluded, pinned);
}

/// Whether any page of the range is out.
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

/// Forgets that the range is managed, pinned or advised. Whatever is mapped there next is examined anew.
pub(crate) fn no_longer_managed(s: &mut State, start: usize, end: usize) {
    if s.pinned.iter().any(|(a, b)| *a < end && start < *b) {
        s.pinned = without(core::mem::take(&mut s.pinned), &[(start, end)]);
    }
    s.advice.forget(start, end);
    s.managed.cut(start, end);
}

/// Subtracts the excluded ranges from the parts.
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

    /// A look at what calls noted manages that, and looks at nothing else.
    #[test]
    fn what_calls_noted_is_found_without_looking_at_the_rest() {
        let p = testing::pager(16 << 20);
        let map = |prot: i32| {
            // SAFETY: new memory of the test's own.
            unsafe {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                // PROT_NONE pages on either side keep it a mapping of its own.
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
        // The mapping was split; the managed half beyond the one that is found stays managed, as nobody looked at it.
        let half = 8 * PAGE;
        // SAFETY: the test's own, of which nothing is needed.
        unsafe { sys!(libc::SYS_mprotect, noted + half, half, libc::PROT_READ) }.expect("mprotect");
        p.state.lock().managed.cut(noted, noted + PAGE);
        p.scan_ranges(&mut p.state.lock(), vec![(noted, noted + PAGE)]).expect("the kernel can be asked");
        assert!(managed(noted));
        // Unmapped and noted once more: nothing is found.
        // SAFETY: nobody uses it.
        unsafe { sys!(libc::SYS_munmap, other, 16 * PAGE) }.expect("munmap");
        p.scan_ranges(&mut p.state.lock(), vec![(other, other + 16 * PAGE)]).expect("the kernel can be asked");
        assert!(!managed(other));
        p.files.maps.store(-1, Relaxed);
        assert!(p.scan_ranges(&mut p.state.lock(), vec![(noted, noted + PAGE)]).is_err(), "it cannot be asked");
    }

    /// The story: the ticker found a thread's stack before the hook that excludes it ran. The stack was then both managed and
    /// excluded. A child forked while its first page was out read zeros there, and libc's fork crashed on them (SIGSEGV). The
    /// first fix unregistered the stack in the hook, on a thread of the program, which does not have the userfaultfd.
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
        // A smaller mapping takes its place.
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
            // The page comes back as a fault on dropped memory brings it.
            p.state.lock().list_resident(first, 1, List::Inactive, |_| None);
        }
        assert_eq!(p.state.lock().resident, 2);
    }

    /// A managed range gets registered whatever was noted before: no exclusion of a known page and no pin of an evicted one
    /// survives.
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

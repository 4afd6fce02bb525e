//! Measures what a process shares with its parent or children since a fork, so that it counts once for all of them.
//!
//! RssAnon counts a shared page in full in each process, Pss_Anon only this process's part; the difference is not charged. Pss is
//! expensive, as the kernel walks the page tables for it, so it is measured only now and then, at most a twentieth of the time. A
//! write to a shared page makes a copy by a minor fault that nobody reports to uzswap. So each minor fault since the measurement
//! counts as a page that is this process's own now (an upper bound, as new memory is among them); where there are many, the next
//! measurement comes sooner.
//!
//! The story: four processes that each wrote to 25 MiB they shared came to twice their limit before anybody knew of it.

use crate::frames::arena::PAGE;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*};
use uzswap_sys::{raw, thread};

/// With less shared than this (bytes) a process counts as sharing nothing. (The little that is left is un-shared where it is
/// met.)
const LITTLE_SHARED: usize = 1 << 20;
/// Least time between two measurements (nanoseconds); and as a multiple of what a measurement takes.
const LEAST_PAUSE_NS: u64 = 20_000_000;
const PAUSES: u64 = 20;
/// The multiple once much may have been copied: a part of what was shared, with this divisor.
const PAUSES_SOON: u64 = 4;
const MUCH: usize = 16;

/// See the file's head.
#[derive(Default)]
pub struct Kin {
    /// When memory came to be shared with a parent or child (the last fork; monotonic nanoseconds); 0 while hardly any is shared.
    since: AtomicU64,
    /// Bytes that RssAnon counts here and another process counts too, as last measured.
    shared: AtomicUsize,
    /// Minor faults of this process up to that measurement.
    faults: AtomicU64,
    /// When to measure again, and when if much has changed (monotonic nanoseconds).
    due: AtomicU64,
    due_soon: AtomicU64,
    /// Whether a page that nobody shares any more was seen since the last fork.
    alone: AtomicBool,
}

impl Kin {
    /// Whether more than a little is shared, as far as known.
    pub fn is_there(&self) -> bool {
        self.since.load(Relaxed) != 0
    }

    /// After a fork, on either side.
    pub fn gained(&self) {
        self.since.store(thread::now_ns(), Relaxed);
        self.due.store(0, Relaxed);
        self.alone.store(false, Relaxed);
    }

    /// A page that was shared is exclusive now, so all may be: measures at once, the first time after a fork.
    ///
    /// The story: a program ran a command 60 times a second. Each time, half of what it had was taken to be the commands' until
    /// the next fork, so it held 82 MiB of 64.
    pub fn seems_alone(&self) {
        if !self.alone.swap(true, Relaxed) {
            self.due.store(0, Relaxed);
        }
    }

    /// After a fork, in the parent, which charged `charged` bytes: returns what it charges until the share is measured (bytes).
    /// The estimate is that all its memory is shared by one process more than it was on average.
    ///
    /// The story: a child, measured as it began, charged half of what its parent had, and the parent still charged all of it. A
    /// Jupyter kernel in 130 MiB was said to have held 187, and pages were evicted for it; it held 135.
    pub fn gained_child(&self, charged: usize) -> usize {
        let shared = if self.is_there() { self.left() } else { 0 };
        let all = charged + shared;
        let now = (all as u128 * charged as u128 / (all + charged).max(1) as u128) as usize;
        self.shared.store(all - now, Relaxed);
        self.faults.store(thread::minor_faults(), Relaxed);
        self.gained();
        now
    }

    /// What is shared now (bytes), measured if that is due; `rollup` is the process's `smaps_rollup`.
    pub fn shared(&self, rollup: i32) -> usize {
        let (now, left) = (thread::now_ns(), self.left());
        let much = left < self.shared.load(Relaxed) / MUCH * (MUCH - 1);
        if now >= self.due.load(Relaxed) || (much && now >= self.due_soon.load(Relaxed)) {
            self.measure(rollup);
            return self.left();
        }
        left
    }

    /// What is left of the shared bytes if each minor fault since has copied a page.
    pub fn left(&self) -> usize {
        let copied = thread::minor_faults().saturating_sub(self.faults.load(Relaxed)) as usize;
        self.shared.load(Relaxed).saturating_sub(copied * PAGE)
    }

    /// As if this many bytes had just been measured, and would be for long.
    #[cfg(test)]
    pub(crate) fn seem_shared(&self, bytes: usize) {
        self.shared.store(bytes, Relaxed);
        self.faults.store(thread::minor_faults() + (1 << 40), Relaxed);
        self.due.store(u64::MAX, Relaxed);
        self.due_soon.store(u64::MAX, Relaxed);
    }

    fn measure(&self, rollup: i32) {
        let since = self.since.load(Relaxed);
        let mut text = [0u8; 2048];
        let start = thread::now_ns();
        let faults = thread::minor_faults();
        let n = raw::pread(rollup, &mut text, 0).unwrap_or(0);
        let bytes = |name: &[u8]| {
            let digits =
                text[..n].split(|c| *c == b'\n').find_map(|line| line.strip_prefix(name)?.strip_suffix(b" kB"))?;
            Some(core::str::from_utf8(digits.trim_ascii()).ok()?.parse::<usize>().ok()? << 10)
        };
        // Both figures must be of one look: the program may fill or free memory between two.
        let shared = bytes(b"Anonymous:").zip(bytes(b"Pss_Anon:")).map(|(all, own)| all.saturating_sub(own));
        self.shared.store(shared.unwrap_or(0), Relaxed);
        self.faults.store(faults, Relaxed);
        let end = thread::now_ns();
        for (due, pauses) in [(&self.due, PAUSES), (&self.due_soon, PAUSES_SOON)] {
            due.store(end + ((end - start) * pauses).max(LEAST_PAUSE_NS), Relaxed);
        }
        // A fork meanwhile was not measured.
        if shared.is_some_and(|shared| shared < LITTLE_SHARED) {
            let _ = self.since.compare_exchange(since, 0, Relaxed, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    /// A parent that charged everything, and one that shared half already.
    #[test]
    fn who_has_a_child_charges_its_part_before_that_is_measured() {
        const ALL: usize = 60 << 30;
        let (kin, mut charged) = (Kin::default(), ALL);
        for part in [2, 3, 4] {
            charged = kin.gained_child(charged);
            // Pages that other tests of this process touch meanwhile count as copied.
            assert!(charged.abs_diff(ALL / part) < ALL / 100, "{charged} bytes of {ALL}, not a part of {part}");
            assert!(kin.is_there() && kin.due.load(Relaxed) == 0);
        }
        assert_eq!(Kin::default().gained_child(0), 0);
    }

    /// See `seems_alone`: measured once after each fork, as that looks at all memory.
    #[test]
    fn what_seems_alone_is_measured_once_after_a_fork() {
        let kin = Kin::default();
        for _ in 0..2 {
            kin.gained();
            kin.due.store(u64::MAX, Relaxed);
            kin.seems_alone();
            assert_eq!(kin.due.load(Relaxed), 0);
            kin.due.store(u64::MAX, Relaxed);
            kin.seems_alone();
            assert_eq!(kin.due.load(Relaxed), u64::MAX);
        }
    }

    /// The story: a process that had forked once, if only to execute another program, was taken to share its memory forever. No
    /// faulting thread had to make room first, and the limit was exceeded by a fifth.
    #[test]
    fn who_shares_nothing_any_more_has_no_kin() {
        const SHARED: usize = 8 << 20;
        let p = testing::pager(16 << 20);
        let all = raw::open(b"/proc/thread-self/smaps_rollup\0", libc::O_RDONLY).expect("smaps_rollup");
        p.files.rollup.store(all, Relaxed);
        p.files.statm.store(raw::open(b"/proc/thread-self/statm\0", libc::O_RDONLY).expect("statm"), Relaxed);
        let measured = || {
            p.kin.due.store(0, Relaxed);
            p.read_rss();
            p.has_kin()
        };
        let mut memory = std::hint::black_box(vec![1u8; SHARED]);
        testing::beside_a_child(|| {
            p.kin.gained();
            assert!(
                measured() && p.kin.shared.load(Relaxed) >= SHARED / 2,
                "{} bytes are shared",
                p.kin.shared.load(Relaxed)
            );
            // Pages written to since are not shared, which is known before the next measurement.
            let before = p.kin.left();
            memory[..SHARED / 2].chunks_mut(PAGE).for_each(|page| page[0] = 2);
            let left = p.kin.left();
            assert!(left <= before - SHARED / 2, "{left} of {before} bytes");
        });
        // Other tests of this process may fork too, and share all of it for a while.
        let alone = (0..10_000).any(|_| !measured());
        assert!(alone, "{} bytes are shared with nobody", p.kin.shared.load(Relaxed));
        drop(memory);
    }
}

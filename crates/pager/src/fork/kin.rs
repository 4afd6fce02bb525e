//! What a process shares with its parent or children since a fork, which is to count once for all of them.
//!
//! RssAnon counts a shared page in each process, Pss_Anon its part of it: the difference is not charged. Pss is dear, as the kernel walks
//! the page tables for it, so it is measured now and then, a twentieth of the time at most. Who writes to a shared page gets a copy of it,
//! by a minor fault that nobody tells uzswap of: so as many pages as there were such faults since (an upper bound, new memory is among
//! them) are taken to be this process's own, and where they are many it is measured sooner.
//!
//! The story: four processes that each wrote to 25 MiB they shared came to twice their limit before anybody knew of it.

use crate::frames::arena::PAGE;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*};
use uzswap_sys::{raw, thread};

/// What is shared below which a process counts as sharing nothing (bytes). (What little is left is un-shared where it is met.)
const LITTLE_SHARED: usize = 1 << 20;
/// Time between two measurements at least, and in what one takes (nanoseconds).
const LEAST_PAUSE_NS: u64 = 20_000_000;
const PAUSES: u64 = 20;
/// The same where a part of what was shared, so large, may not be any more.
const PAUSES_SOON: u64 = 4;
const MUCH: usize = 16;

/// See the file's head.
#[derive(Default)]
pub struct Kin {
    /// When memory came to be shared with a parent or child (the last fork; monotonic nanoseconds); 0 while hardly any is.
    since: AtomicU64,
    /// What RssAnon counts and another process counts too (bytes), as last measured.
    shared: AtomicUsize,
    /// Minor faults of this process until then.
    faults: AtomicU64,
    /// When that is to be measured again, and when if much of it has changed (monotonic nanoseconds).
    due: AtomicU64,
    due_soon: AtomicU64,
    /// Whether a page was seen, since the last fork, that nobody shares any more.
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

    /// A page that was shared is this process's alone, and so may be all: that is measured at once, the first time after a fork.
    ///
    /// The story: of a program that ran a command 60 times a second half of what it had was taken to be the commands' each time, until the
    /// next fork, and so 82 MiB were held of 64.
    pub fn seems_alone(&self) {
        if !self.alone.swap(true, Relaxed) {
            self.due.store(0, Relaxed);
        }
    }

    /// After a fork, in the parent, which charged so many bytes: what it is to charge until that is measured (bytes). All is taken to be
    /// shared by as many as it was on average, and one more.
    ///
    /// The story: a child that was measured as it began charged half of what its parent had, and the parent still all of it. A Jupyter
    /// kernel in 130 MiB was said to have held 187, and was put out for it; it held 135.
    pub fn gained_child(&self, charged: usize) -> usize {
        let shared = if self.is_there() { self.left() } else { 0 };
        let all = charged + shared;
        let now = (all as u128 * charged as u128 / (all + charged).max(1) as u128) as usize;
        self.shared.store(all - now, Relaxed);
        self.faults.store(thread::minor_faults(), Relaxed);
        self.gained();
        now
    }

    /// What is shared now (bytes), measured where that is due; `rollup` is the process's `smaps_rollup`.
    pub fn shared(&self, rollup: i32) -> usize {
        let (now, left) = (thread::now_ns(), self.left());
        let much = left < self.shared.load(Relaxed) / MUCH * (MUCH - 1);
        if now >= self.due.load(Relaxed) || (much && now >= self.due_soon.load(Relaxed)) {
            self.measure(rollup);
            return self.left();
        }
        left
    }

    /// What is left of what was shared, if each minor fault since has copied a page.
    pub fn left(&self) -> usize {
        let copied = thread::minor_faults().saturating_sub(self.faults.load(Relaxed)) as usize;
        self.shared.load(Relaxed).saturating_sub(copied * PAGE)
    }

    /// As if so many bytes had just been measured, and for long.
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
        // (Both of one look: the program may fill or free memory between two.)
        let shared = bytes(b"Anonymous:").zip(bytes(b"Pss_Anon:")).map(|(all, own)| all.saturating_sub(own));
        self.shared.store(shared.unwrap_or(0), Relaxed);
        self.faults.store(faults, Relaxed);
        let end = thread::now_ns();
        for (due, pauses) in [(&self.due, PAUSES), (&self.due_soon, PAUSES_SOON)] {
            due.store(end + ((end - start) * pauses).max(LEAST_PAUSE_NS), Relaxed);
        }
        // (A fork meanwhile was not measured.)
        if shared.is_some_and(|shared| shared < LITTLE_SHARED) {
            let _ = self.since.compare_exchange(since, 0, Relaxed, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    /// A parent that charged all, and one that shared half before.
    #[test]
    fn who_has_a_child_charges_its_part_before_that_is_measured() {
        const ALL: usize = 60 << 30;
        let (kin, mut charged) = (Kin::default(), ALL);
        for part in [2, 3, 4] {
            charged = kin.gained_child(charged);
            // (What other tests of this process touch meanwhile counts as copied.)
            assert!(charged.abs_diff(ALL / part) < ALL / 100, "{charged} bytes of {ALL}, not a part of {part}");
            assert!(kin.is_there() && kin.due.load(Relaxed) == 0);
        }
        assert_eq!(Kin::default().gained_child(0), 0);
    }

    /// See `seems_alone`: once after each fork, as it costs a look at all that there is.
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

    /// The story: who had forked once, be it to execute another program, was taken to share its memory for ever: nobody who faulted
    /// had to make room first, and the limit was exceeded by a fifth.
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
            // What is written to since is not shared, which is known before it is measured again.
            let before = p.kin.left();
            memory[..SHARED / 2].chunks_mut(PAGE).for_each(|page| page[0] = 2);
            let left = p.kin.left();
            assert!(left <= before - SHARED / 2, "{left} of {before} bytes");
        });
        // (Other tests of this process may fork too, and share all of it for a while.)
        let alone = (0..10_000).any(|_| !measured());
        assert!(alone, "{} bytes are shared with nobody", p.kin.shared.load(Relaxed));
        drop(memory);
    }
}

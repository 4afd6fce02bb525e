//! Decides which of the program's new memory may come as huge pages: where the kernel would give it some.
//!
//! The system's setting decides that, and the program, which may ask for huge pages or refuse them (MADV_HUGEPAGE,
//! MADV_NOHUGEPAGE). The kernel shows the advice for a mapping only in a file that takes it milliseconds to write. So the agent
//! notes the advice given through libc, until the range is unmapped or mapped anew. (A process that refuses all huge pages by
//! `prctl` gets none from the kernel, which is how that is noticed: see `huge`.)
//!
//! Owner: the pager's lock. The bounds are atomics, so that a mapping call need not take the lock where no advice was given.

use crate::discover::ranges::Ranges;
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::{AtomicU8, AtomicUsize, Ordering::*};
use uzswap_sys::thp::{self, Policy};

/// What the system allows, and where advice may have been given.
#[derive(Debug)]
pub struct Thp {
    policy: AtomicU8,
    from: AtomicUsize,
    to: AtomicUsize,
}

impl Default for Thp {
    /// Nothing is allowed, and no advice was given.
    fn default() -> Self {
        Self { policy: AtomicU8::new(Policy::Never as u8), from: AtomicUsize::new(usize::MAX), to: AtomicUsize::new(0) }
    }
}

impl Thp {
    /// Reads the system's setting.
    pub(crate) fn look(&self) {
        self.set(thp::policy());
    }

    /// The same for a region of the library, which wants huge pages wherever the system allows them.
    pub(crate) fn look_for_region(&self) {
        self.set(if thp::policy() == Policy::Never { Policy::Never } else { Policy::Always });
    }

    pub(crate) fn set(&self, policy: Policy) {
        self.policy.store(policy as u8, Relaxed);
    }

    /// Whether advice may have been given for part of a range.
    pub fn may_know(&self, start: usize, end: usize) -> bool {
        start < self.to.load(Relaxed) && self.from.load(Relaxed) < end
    }
}

/// The advice that the program has given.
#[derive(Clone, Debug, Default)]
pub struct Advice {
    wanted: Ranges,
    refused: Ranges,
}

impl Advice {
    /// Forgets all advice about a range.
    pub(crate) fn forget(&mut self, start: usize, end: usize) {
        self.wanted.cut(start, end);
        self.refused.cut(start, end);
    }
}

impl Pager {
    /// Notes that the program advised a range to be huge pages, or not to be.
    pub fn note_thp(&self, s: &mut State, start: usize, end: usize, wanted: bool) {
        if start >= end {
            return;
        }
        s.advice.forget(start, end);
        let of = if wanted { &mut s.advice.wanted } else { &mut s.advice.refused };
        of.push((start, end));
        self.thp.from.fetch_min(start, Relaxed);
        self.thp.to.fetch_max(end, Relaxed);
    }

    /// Whether all of a range may come as huge pages.
    pub(crate) fn may_be_huge(&self, s: &State, start: usize, end: usize) -> bool {
        let policy = self.thp.policy.load(Relaxed);
        policy == Policy::Always as u8 && s.advice.refused.overlapping(start, end).next().is_none()
            || policy == Policy::Advised as u8 && s.advice.wanted.covers(start, end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn the_last_advice_counts_as_far_as_the_system_allows() {
        let p = testing::pager(16 << 20);
        let s = &mut *p.state.lock();
        let allowed = |s: &State| {
            [Policy::Never, Policy::Advised, Policy::Always].map(|policy| {
                p.thp.set(policy);
                [(100, 200), (150, 250), (200, 300), (300, 400)].map(|(a, b)| p.may_be_huge(s, a, b))
            })
        };
        let (none, all) = ([false; 4], [true; 4]);
        assert_eq!(allowed(s), [none, none, all]);
        assert!(!p.thp.may_know(0, usize::MAX));
        p.note_thp(s, 100, 200, true);
        p.note_thp(s, 200, 300, false);
        assert_eq!(allowed(s), [none, [true, false, false, false], [true, false, false, true]]);
        assert!(p.thp.may_know(299, 300) && !p.thp.may_know(300, 400) && !p.thp.may_know(0, 100));
        p.note_thp(s, 200, 300, true);
        assert_eq!(allowed(s), [none, [true, true, true, false], all]);
        p.note_thp(s, 150, 160, false);
        assert_eq!(allowed(s), [none, [false, false, true, false], [false, false, true, true]]);
        s.advice.forget(0, 260);
        assert_eq!(allowed(s), [none, none, all]);
        p.note_thp(s, 400, 400, true);
        assert_eq!(allowed(s), [none, none, all]);
    }
}

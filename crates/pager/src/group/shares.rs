//! Balances a limit among members: a member that refaults pages which it would still have if it held as much as another asks that
//! one to give.
//!
//! Each member keeps the limit by evicting its own pages. That alone would leave memory to those that came first. A member that
//! holds all it needs does not fault, so it evicts nothing; a late member evicts a page for each that it brings in. User space
//! sees no accesses, so nobody knows whose pages are older. So the member that holds most gives, until no member that misses
//! pages holds much less. What it then misses it faults on, and asks for in turn. The refault distance identifies misses, as in
//! the kernel's workingset: pages that come back and left no more evictions ago than the largest member holds pages. So a member
//! that fills memory, or reads once through more than the whole limit, asks for nothing.
//!
//! The story: a program joined another that was busy with 85 MiB of their 100. The newcomer worked on 90 MiB, had 14 for as long
//! as one looked, and did nothing but fault.

use crate::frames::arena::PAGE;
use crate::group::full::finds_nothing;
use crate::group::member::{due, wake_member};
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use uzswap_sys::thread;

/// How often a member asks (nanoseconds).
const ASK_NS: u64 = 4_000_000;
/// Pages asked for at most: as many as the member has missed since.
const ASK_PAGES: u32 = 128;
/// It does not ask for fewer pages than this.
const ASK_LEAST: u32 = 16;
/// The asked member holds more than the asking one by a quarter and this (bytes).
const MORE: u64 = 2 << 20;
/// How long the asked member does not grow again (nanoseconds): it gives for the asking one.
const HELD_NS: u64 = 40_000_000;
/// How long a member that found nothing to give does not look again (nanoseconds).
const VAIN_NS: u64 = 100_000_000;

/// What a member knows of being asked and of asking (times are monotonic nanoseconds).
#[derive(Default)]
pub struct Asking {
    /// When this member last asked.
    last: AtomicU64,
    /// Pages that came back since, and that it would have had if it held as much as the largest member.
    missed: AtomicU32,
    /// What the largest member held at the last look (pages).
    largest: AtomicU32,
    /// What this member is to come down to (bytes), and to stay below until `held`.
    most: AtomicU64,
    held: AtomicU64,
    /// Until when it does not look for pages to give.
    vain: AtomicU64,
}

impl Pager {
    /// Asks the largest member within the limit to give, if that one holds much more than this one.
    pub(crate) fn ask_the_largest(&self, s: &State) {
        if self.without_move || !due(&self.asking.last, ASK_NS) {
            return;
        }
        let worst = self.excesses(s, self.others_charge()).max_by_key(|(_, over)| *over);
        let Some((node, _)) = worst else { return };
        let own = self.charged(s);
        let (now, least) = (thread::now_ns(), (own + own / 4) as u64 + MORE);
        let gives = |o: &&crate::group::Slot| o.engaged.load(Relaxed) != 0 && !finds_nothing(o, now);
        let largest = self.others_within(node).filter(gives).max_by_key(|o| o.rss.load(Relaxed));
        let largest = largest.filter(|o| o.rss.load(Relaxed) > least);
        let holds = largest.map_or(0, |o| o.rss.load(Relaxed) as usize / PAGE);
        self.asking.largest.store(holds as u32, Relaxed);
        let missed = self.asking.missed.swap(0, Relaxed);
        // A member that has not answered the last request yet has nothing to give, or is about to.
        if let Some(largest) = largest.filter(|o| missed >= ASK_LEAST && o.asked.load(Relaxed) == 0) {
            largest.asked.store(missed.min(ASK_PAGES), Relaxed);
            wake_member(largest, false);
        }
    }

    /// Notes pages that came back from the pool; the last of them left `distance` evictions ago.
    pub(crate) fn note_missed(&self, pages: usize, distance: usize) {
        if distance < self.asking.largest.load(Relaxed) as usize {
            self.asking.missed.fetch_add(pages as u32, Relaxed);
        }
    }

    /// Pages that this member is to give to others while the group is over reclaim's target by `excess` bytes; none while there
    /// is room.
    pub(crate) fn asked_for(&self, s: &State, excess: isize) -> usize {
        let (a, asked) = (&self.asking, &self.me().asked);
        if asked.load(Relaxed) == 0 && a.held.load(Relaxed) == 0 {
            return 0;
        }
        if excess + 2 * (self.margin() as isize) < 0 {
            asked.store(0, Relaxed);
            a.held.store(0, Relaxed);
            return 0;
        }
        let now = thread::now_ns();
        if now < a.vain.load(Relaxed) {
            return 0;
        }
        let (charged, held) = (self.charged(s) as u64, now < a.held.load(Relaxed));
        let more = u64::from(asked.swap(0, Relaxed)) * PAGE as u64;
        if more > 0 {
            let most = if held { charged.min(a.most.load(Relaxed)) } else { charged };
            a.most.store(most.saturating_sub(more), Relaxed);
            a.held.store(now + HELD_NS, Relaxed);
        } else if !held {
            a.held.store(0, Relaxed);
            return 0;
        }
        charged.saturating_sub(a.most.load(Relaxed)) as usize / PAGE
    }

    /// Whether this member gives to others, or did a moment ago.
    pub(crate) fn is_to_give(&self) -> bool {
        self.asking.held.load(Relaxed) != 0
    }

    /// Notes that nothing was found to give.
    pub(crate) fn gives_nothing(&self) {
        if self.is_to_give() {
            self.asking.held.store(0, Relaxed);
            self.asking.vain.store(thread::now_ns() + VAIN_NS, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use core::sync::atomic::Ordering::SeqCst;

    #[test]
    fn who_holds_most_is_asked_and_gives() {
        let p = testing::pager(64 << 20);
        p.group.used.store(3, SeqCst);
        let raw = uzswap_sys::process::Identity::own().raw();
        for (slot, mib) in [(1, 50), (2, 20)] {
            p.group.slots[slot].owner.store(raw, Relaxed);
            p.group.slots[slot].engaged.store(1, Relaxed);
            p.group.slots[slot].rss.store(mib << 20, Relaxed);
        }
        let asked = |slot: usize| p.group.slots[slot].asked.load(Relaxed);
        let mut s = p.state.lock();
        // A member that holds as much asks nobody.
        s.rss = 45 << 20;
        p.ask_the_largest(&s);
        assert_eq!((asked(1), asked(2)), (0, 0));
        s.rss = 10 << 20;
        let asks = |s: &State| {
            p.asking.last.store(0, Relaxed);
            p.ask_the_largest(s);
        };
        asks(&s);
        assert_eq!((asked(1), asked(2)), (0, 0), "it misses nothing");
        // A page that left more evictions ago than the other holds pages would not be there either.
        p.note_missed(100, (50 << 20) / PAGE);
        asks(&s);
        assert_eq!((asked(1), asked(2)), (0, 0));
        p.note_missed(100, (50 << 20) / PAGE - 1);
        asks(&s);
        assert_eq!((asked(1), asked(2)), (100, 0));
        p.note_missed(1000, 1);
        asks(&s);
        assert_eq!(asked(1), 100, "it has not heard yet");
        p.group.slots[1].asked.store(0, Relaxed);
        p.note_missed(1000, 1);
        asks(&s);
        assert_eq!((asked(1), asked(2)), (ASK_PAGES, 0));
        // The asked member is over by as much as it was asked for, though the group is not, until it has given.
        p.me().asked.store(1024, Relaxed);
        p.group.slots[1].rss.fetch_sub((p.excess(&s) + p.margin() as isize) as u64, Relaxed);
        assert_eq!(p.over(&s, 0, true), 1024);
        p.asking.held.store(u64::MAX, Relaxed);
        s.rss -= 1 << 20;
        assert_eq!(p.over(&s, 0, true), 768);
        // What it takes again meanwhile it gives again.
        s.rss += 1 << 20;
        assert_eq!(p.over(&s, 0, true), 1024);
        p.gives_nothing();
        p.me().asked.store(1024, Relaxed);
        assert_eq!(p.over(&s, 0, true), 0, "it has looked just now");
        p.asking.vain.store(0, Relaxed);
        assert_eq!(p.over(&s, 0, true), 1024);
        p.group.slots[1].rss.store(0, Relaxed);
        assert_eq!((p.over(&s, 0, true), p.is_to_give()), (0, false), "there is room");
        s.rss = 0;
    }
}

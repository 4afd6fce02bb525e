//! Shares of a limit: who brings back what it would still have with as much as another holds, asks that one to give.
//!
//! Each member keeps the limit by what it takes out of itself. That alone would leave memory to those that came first: who holds all that it
//! needs does not fault, so it takes nothing out, and who came late puts out a page for each that it brings. User space sees no
//! accesses, so nobody knows whose pages are older. So the member that holds most gives, until none that misses them holds much less;
//! what it misses then it faults on, and asks in turn. Misses are told by the refault distance, as in the kernel's workingset: pages that
//! come back, and left no longer ago than as many others have as the largest member holds. So who fills memory, or reads once what is
//! larger than all of the limit, asks for nothing.
//!
//! The story: a program joined another that held 85 MiB of their 100 and was busy with them. It had 14, of the 90 that it worked on, for
//! as long as one looked, and did nothing but fault.

use crate::frames::arena::PAGE;
use crate::group::full::finds_nothing;
use crate::group::member::{due, wake_member};
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use uzswap_sys::thread;

/// How often a member asks (nanoseconds).
const ASK_NS: u64 = 4_000_000;
/// For how many pages at most: as many as it has missed since.
const ASK_PAGES: u32 = 128;
/// Less than this it does not ask for.
const ASK_LEAST: u32 = 16;
/// Who is asked holds more than the one that asks by a quarter, and this (bytes).
const MORE: u64 = 2 << 20;
/// How long who was asked does not grow again (nanoseconds): what it gives is for who asked.
const HELD_NS: u64 = 40_000_000;
/// How long who has found nothing to give looks for no more (nanoseconds).
const VAIN_NS: u64 = 100_000_000;

/// What a member knows of being asked, and of asking (times are monotonic nanoseconds).
#[derive(Default)]
pub struct Asking {
    /// When it last asked.
    last: AtomicU64,
    /// Pages that came back since, which it would have had with as much as the largest member.
    missed: AtomicU32,
    /// What that holds (pages), when it was last looked.
    largest: AtomicU32,
    /// What it is to come down to (bytes), and stays below until `held`.
    most: AtomicU64,
    held: AtomicU64,
    /// Until when it looks for nothing to give.
    vain: AtomicU64,
}

impl Pager {
    /// Asks the member that holds most of the limit to give, where that is much more than what this one holds.
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
        // (Who has not heard yet that it was asked has nothing to give, or is about to.)
        if let Some(largest) = largest.filter(|o| missed >= ASK_LEAST && o.asked.load(Relaxed) == 0) {
            largest.asked.store(missed.min(ASK_PAGES), Relaxed);
            wake_member(largest, false);
        }
    }

    /// Pages came back from the pool, of which the last left so many evictions ago.
    pub(crate) fn note_missed(&self, pages: usize, distance: usize) {
        if distance < self.asking.largest.load(Relaxed) as usize {
            self.asking.missed.fetch_add(pages as u32, Relaxed);
        }
    }

    /// Pages that this member is to give to others, where the group is over what reclaim keeps by `excess` bytes: none where there is
    /// room.
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

    /// Nothing was found to give.
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
        // Who holds as much asks nobody.
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
        // What left longer ago than as much came as the other holds would not be there either.
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
        // Who is asked is over by as much, though the group is not, until it has given.
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

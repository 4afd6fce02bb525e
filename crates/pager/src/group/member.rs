//! Membership: this process's slot in its group, and what the other members publish.
//!
//! A member publishes its charge, and decides by what the others have published: sums over their slots, computed anew each time,
//! for each group from its own to the root. What it reads is a moment old, and each figure is from another moment. So members
//! keep a limit with a margin, publish growth before it is much (`Pager::charge_growth`), and wake the others when the group is
//! over its limit, as those may hold what the group lacks.
//!
//! Invariants: only the owner writes a slot's charges, and only while it lives; whoever looks returns the charges of dead
//! members. `group` explains how a slot changes hands. Nothing here takes a lock.

use crate::group::counters::Counters;
use crate::group::full::{LITTLE_BYTES, finds_nothing, little};
use crate::group::{DEPTH, GroupPage, NODES, SLOTS, Slot, bytes_in};
use crate::inject::Site;
use crate::pager::Pager;
use core::sync::atomic::{AtomicU64, Ordering::*};
use uzswap_sys::process::{self, Identity};
use uzswap_sys::raw::Errno;
use uzswap_sys::{lock, owner, thread};

/// The signal that makes a ticker look. It is sent only to tickers, which block it.
///
/// It is one of libc's own signals (for cancelling threads). Programs cannot use it, and nobody sends it to a process, which
/// matters as a thread that waits for a signal also takes those sent to its whole process. libc sends it only to threads that it
/// knows, so to none of uzswap's.
///
/// The story: it was the last signal, 64. A program that blocked that one and read it by `sigwait` or a signalfd missed most of
/// them.
pub const SIGNAL: i32 = 32;
/// Nanoseconds between two searches for dead members, for each member that is asked about: to ask about one (its file in /proc)
/// takes ten or twenty microseconds.
const SEARCH_EACH_NS: u64 = 1_000_000;
const SEARCH_LEAST_NS: u64 = 1_000_000;
const SEARCH_NS: u64 = 100_000_000;
/// Nanoseconds between two pokes at members that are not engaged, for each of them: a poke costs some tens of microseconds.
const POKE_NS: u64 = 1_000_000;
const POKE_LEAST_NS: u64 = 10_000_000;

/// This process's group and those above it, nearest first.
#[derive(Clone, Copy, Debug)]
pub struct Chain {
    nodes: [usize; DEPTH],
    len: usize,
}

impl Chain {
    /// The chain of group `node`.
    pub fn of(page: &GroupPage, node: usize) -> Self {
        let mut chain = Self { nodes: [0; DEPTH], len: 0 };
        for at in page.chain(node) {
            chain.nodes[chain.len] = at;
            chain.len += 1;
        }
        chain
    }

    /// The groups.
    pub fn nodes(&self) -> &[usize] {
        &self.nodes[..self.len]
    }
}

/// What the other members use, for each group of the chain (bytes).
#[derive(Clone, Copy, Default)]
pub struct Others {
    /// Charges.
    pub charge: [usize; DEPTH],
    /// The resident part of the charge: without the pools.
    pub resident: [usize; DEPTH],
    /// Memory out of RAM.
    pub swapped: [usize; DEPTH],
    /// What pools hold.
    pub pool: [usize; DEPTH],
    /// What is in swap files.
    pub swap: [usize; DEPTH],
    /// Memory mapped and not filled yet.
    pub planned: [usize; DEPTH],
}

impl Pager {
    /// Takes a slot in the group: this process's own (after exec), a free one, or a dead member's.
    ///
    /// # Errors
    /// `EAGAIN` when all are taken by live processes.
    pub fn claim_slot(&self) -> Result<(), Errno> {
        if self.inject(Site::Slot).is_some() {
            return Err(libc::EAGAIN);
        }
        let me = Identity::own();
        let page = self.group;
        let mut own = None;
        for (i, slot) in page.used().iter().enumerate() {
            let Some(whole) = owner::is_left_by(&slot.owner, me) else { continue };
            slot.uncharge();
            if own.is_none() && whole && slot.node.load(Relaxed) as usize == self.node {
                own = Some(i);
            } else {
                // Exec broke off a burial.
                owner::settle(&slot.owner, None);
            }
        }
        // After exec it is the same process, which does not join again.
        let joins = own.is_none();
        let index = own.or_else(|| self.take_slot(me)).ok_or(libc::EAGAIN)?;
        let slot = &page.slots[index];
        page.used.fetch_max(index as u32 + 1, AcqRel);
        slot.uncharge();
        owner::settle(&slot.owner, Some(me));
        slot.request.forsake();
        slot.watch.forsake();
        let before = slot.node.swap(self.node as u32, AcqRel) as usize;
        if before != self.node {
            slot.counters.retire_into(&page.nodes[before.min(NODES - 1)].dead);
        }
        slot.ticker.store(self.ticker.load(Relaxed) as u32, Relaxed);
        self.slot.store(index, Release);
        if joins {
            slot.was_engaged.store(0, Relaxed);
            self.chain.nodes().iter().for_each(|at| _ = page.nodes[*at].joined.fetch_add(1, Relaxed));
        }
        Ok(())
    }

    /// Notes that this process's memory is managed, and counts it once.
    pub(crate) fn note_engaged(&self) {
        self.me().engaged.store(1, Relaxed);
        if self.me().was_engaged.swap(1, Relaxed) == 0 {
            self.chain.nodes().iter().for_each(|at| _ = self.group.nodes[*at].engaged.fetch_add(1, Relaxed));
        }
    }

    /// Takes a slot for this process: preferably a free one of its own group, so that the slot's counters can stay. The slot's
    /// charge is not this process's yet.
    ///
    /// The story: a process that took a dead member's slot seemed to hold its charge until that was returned, and could be killed
    /// for it.
    fn take_slot(&self, me: Identity) -> Option<usize> {
        let slots = &self.group.slots;
        let take = |i: usize, same_group: bool, free: &dyn Fn(Identity) -> bool| {
            let fits = !same_group || slots[i].node.load(Relaxed) as usize == self.node;
            fits && owner::take(&slots[i].owner, me, |who| who.is_none_or(free))
        };
        let used = self.group.used().len();
        (0..used)
            .find(|i| take(*i, true, &Identity::is_gone))
            .or_else(|| (used..SLOTS).find(|i| take(*i, false, &|_| false)))
            .or_else(|| (0..SLOTS).find(|i| take(*i, false, &Identity::is_dead)))
    }

    /// This process's slot.
    pub fn me(&self) -> &Slot {
        &self.group.slots[self.slot.load(Relaxed)]
    }

    /// This process's counters.
    pub fn counters(&self) -> &Counters {
        &self.me().counters
    }

    /// The other members' slots that have an owner.
    pub(crate) fn others(&self) -> impl Iterator<Item = &Slot> {
        let mine = self.slot.load(Relaxed);
        let all = self.group.used().iter().enumerate();
        all.filter(move |(i, s)| *i != mine && s.owner.load(Relaxed) != 0).map(|(_, s)| s)
    }

    /// Number of other members.
    pub fn others_count(&self) -> usize {
        self.others().count()
    }

    /// The other members' charges, as last published, in each group of the chain.
    pub fn others_charge(&self) -> [usize; DEPTH] {
        self.sum_others(charge_of)
    }

    /// The same, plus what members that are not managed yet may have filled since: their plans. (Called at every fault.)
    ///
    /// The story: eight processes filled a group at once. The first three had room for all of theirs, so they were not managed
    /// yet when the others began. The others were, but learned what the three had filled only when those published it, which was
    /// too late.
    pub fn others_charge_soon(&self) -> [usize; DEPTH] {
        self.sum_others(|s, uncharged| charge_of(s, uncharged) + planned_by(s))
    }

    fn sum_others(&self, of: impl Fn(&Slot, bool) -> usize) -> [usize; DEPTH] {
        let mut sums = [0; DEPTH];
        let uncharged = self.group.pool_uncharged.load(Relaxed) != 0;
        for s in self.others() {
            let ancestors = self.ancestors(s);
            let charge = of(s, uncharged);
            let levels = sums.iter_mut().zip(self.chain.nodes());
            levels.filter(|(_, at)| ancestors & 1 << **at != 0).for_each(|(sum, _)| *sum += charge);
        }
        sums
    }

    fn ancestors(&self, s: &Slot) -> u64 {
        let node = (s.node.load(Relaxed) as usize).min(NODES - 1);
        self.group.nodes[node].ancestors.load(Relaxed)
    }

    /// What the other members use, as last published, in each group of the chain.
    pub fn others_use(&self) -> Others {
        let mut sums = Others::default();
        let uncharged = self.group.pool_uncharged.load(Relaxed) != 0;
        for s in self.others() {
            let ancestors = self.ancestors(s);
            let (rss, pool) = (bytes_in(&s.rss) as usize, bytes_in(&s.pool) as usize);
            let levels = self.chain.nodes().iter().enumerate();
            for (i, _) in levels.filter(|(_, at)| ancestors & 1 << **at != 0) {
                sums.resident[i] += rss.saturating_sub(pool);
                sums.charge[i] += charge_of(s, uncharged);
                sums.swapped[i] += bytes_in(&s.swapped) as usize;
                sums.pool[i] += pool;
                sums.swap[i] += bytes_in(&s.swap) as usize;
                sums.planned[i] += planned_by(s);
            }
        }
        sums
    }

    /// Wakes the reclaim threads of the other members that hold something worthwhile. Now and then it also asks members that are
    /// not engaged to check whether they should be. (What those hold is unknown: one that filled its memory since its last look,
    /// and uses no CPU time any more, would never look again by itself.)
    ///
    /// The story: the members of a full group woke each other; each looked in vain, and woke the others. Four sleeping processes
    /// took a whole CPU. A member that finds nothing looks by itself, 50 times a second (less often with many members).
    ///
    /// The story: where many shared a limit, each held less than what a member was woken for. Sleeping members kept what they
    /// had, and the last to come had nothing but its floor.
    pub fn wake_others(&self) {
        self.rally_now_and_then();
        let (now, others) = (thread::now_ns(), self.others_count());
        let all = due(&self.asked_for_little, poke_every(others));
        let least = if all { little(self.limit(), others + 1) } else { LITTLE_BYTES };
        let has_some = |o: &&Slot| o.rss.load(Relaxed) > least && !finds_nothing(o, now);
        self.others().filter(has_some).for_each(|o| wake_member(o, false));
    }

    fn rally_now_and_then(&self) {
        if due(&self.poked, poke_every(self.others_count())) {
            self.rally();
        }
    }

    /// Asks all other members that are not engaged to check whether they should be.
    pub fn rally(&self) {
        let idle = |o: &&Slot| o.engaged.load(Relaxed) == 0 && o.ticker.load(Relaxed) != 0;
        self.others().filter(idle).for_each(|o| wake_member(o, true));
    }

    /// Called before memory is taken out, so that the others' charges are what they hold. A dead member holds nothing; one that
    /// has planned memory, not filled it, and uses no CPU time would not look by itself any more.
    pub(crate) fn look_at_others(&self) {
        self.bury_the_dead(false);
        if self.others().any(|o| planned_by(o) != 0) {
            self.rally_now_and_then();
        }
    }

    /// Returns the charges of members that died without a word, now and then or `at_once`. Returns whether it searched.
    ///
    /// One search serves all members. The story: each made its own. Eight that filled memory spent a twentieth of all CPU time on
    /// reading each other's files in /proc.
    pub(crate) fn bury_the_dead(&self, at_once: bool) -> bool {
        let others = self.others_count() as u64;
        let every = (SEARCH_EACH_NS * others).clamp(SEARCH_LEAST_NS, SEARCH_NS);
        let (now, all) = (thread::now_ns(), &self.group.buried);
        // In a time namespace the clock may be another: such members do not know who searched when, and search by themselves.
        let long_ago = now.abs_diff(all.load(Relaxed)) >= every;
        let looks = others > 0 && (at_once || (long_ago && due(&self.buried, every)));
        if looks {
            all.store(now, Relaxed);
            self.group.bury_the_dead(Identity::own());
        }
        looks
    }

    /// This process ends: returns its charges, and keeps its helpers, which still run, from charging anything.
    pub fn leave(&self) {
        if self.is_of_caller() {
            self.left.store(true, SeqCst);
            self.me().uncharge();
        }
    }

    /// Whether the calling process owns this slot. (A vfork child has the parent's memory.)
    pub(crate) fn is_of_caller(&self) -> bool {
        self.me().owner().is_some_and(|owner| owner.pid() == thread::getpid() as u32)
    }
}

/// A member's charge as last published; with `uncharged`, without its pool.
fn charge_of(s: &Slot, uncharged: bool) -> usize {
    let pool = if uncharged { bytes_in(&s.pool) as usize } else { 0 };
    (bytes_in(&s.rss) as usize).saturating_sub(pool)
}

/// What a member has planned and may fill unmanaged. (An engaged member fills nothing unmanaged, but a thread that planned just
/// as it engaged may have left a figure behind.)
fn planned_by(s: &Slot) -> usize {
    if s.engaged.load(Relaxed) == 0 { bytes_in(&s.planned) as usize } else { 0 }
}

/// Wakes a member's reclaim thread, and with `poke` its ticker.
pub fn wake_member(slot: &Slot, poke: bool) {
    slot.wake.fetch_add(1, Release);
    lock::futex_wake(&slot.wake, 1, true);
    let Some(owner) = slot.owner().filter(|_| poke) else { return };
    let ticker = slot.ticker.load(Relaxed);
    // The signal would kill any other thread, so it goes only to one that waits for it.
    if ticker != 0 && owner.is_certain() && process::awaits(owner.pid(), ticker, SIGNAL) {
        thread::kill_thread(owner.pid() as i32, ticker as i32, SIGNAL);
    }
}

/// Nanoseconds between two pokes at members, each of which may be in vain.
fn poke_every(others: usize) -> u64 {
    (POKE_NS * others as u64).clamp(POKE_LEAST_NS, SEARCH_NS)
}

/// Whether something was last done at least `every` nanoseconds ago; if so notes that it is done now.
pub(crate) fn due(last: &AtomicU64, every: u64) -> bool {
    let now = thread::now_ns();
    let before = last.load(Relaxed);
    now >= before.saturating_add(every) && last.compare_exchange(before, now, Relaxed, Relaxed).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use std::sync::mpsc;
    use uzswap_sys::sys;

    /// A thread that waits for the ticker's signal, as a ticker does; it sends whether the signal came in time.
    fn ticker(times: usize) -> (u32, mpsc::Receiver<bool>) {
        let (say, hear) = mpsc::channel();
        let (say_tid, tid) = mpsc::channel();
        std::thread::spawn(move || {
            let signal = 1u64 << (SIGNAL - 1);
            thread::set_signal_mask(u64::MAX);
            say_tid.send(thread::gettid() as u32).unwrap();
            for _ in 0..times {
                let ts = libc::timespec { tv_sec: 10, tv_nsec: 0 };
                // SAFETY: a signal set of 8 bytes and a timespec.
                let got = unsafe { sys!(libc::SYS_rt_sigtimedwait, &raw const signal, 0, &raw const ts, 8) };
                say.send(got.is_ok()).unwrap();
            }
        });
        (tid.recv().unwrap(), hear)
    }

    /// Another member, with a [`ticker`] that waits.
    fn member(p: &Pager, times: usize) -> (&Slot, mpsc::Receiver<bool>) {
        let (tid, woken) = ticker(times);
        let other = &p.group.slots[7];
        p.group.used.store(8, Relaxed);
        other.owner.store(Identity::own().raw(), Relaxed);
        other.ticker.store(tid, Relaxed);
        (other, woken)
    }

    /// See [`Pager::wake_others`].
    #[test]
    fn who_has_just_found_nothing_is_not_woken() {
        let p = testing::pager(16 << 20);
        let other = &p.group.slots[7];
        p.group.used.store(8, Relaxed);
        other.owner.store(Identity::own().raw(), Relaxed);
        other.engaged.store(1, Relaxed);
        let woken = |rss: u64, stuck: u64| {
            other.rss.store(rss, Relaxed);
            other.stuck.store(stuck, Relaxed);
            let seen = other.wake.load(Relaxed);
            p.wake_others();
            other.wake.load(Relaxed) != seen
        };
        let (much, now) = (LITTLE_BYTES + 1, thread::now_ns());
        assert_eq!(
            [(much, 0), (much, 1), (much, now), (1, 0)].map(|(rss, stuck)| woken(rss, stuck)),
            [true, true, false, false]
        );
        // Where many share the limit each holds less; such members are woken now and then.
        for more in &p.group.slots[1..7] {
            more.owner.store(Identity::own().raw(), Relaxed);
        }
        p.asked_for_little.store(0, Relaxed);
        let least = little(16 << 20, 8);
        assert!(least < 1 << 20, "{least}");
        assert_eq!([(1 << 20, 0), (1 << 20, 0)].map(|(rss, stuck)| woken(rss, stuck)), [true, false]);
        p.asked_for_little.store(0, Relaxed);
        assert!(!woken(least, 0));
        p.asked_for_little.store(0, Relaxed);
        assert!(!woken(1 << 20, thread::now_ns()), "it has just found nothing");
        other.owner.store(0, Relaxed);
    }

    /// The story: eight processes filled a group at once, and one had finished before its next look. Its charge was next to
    /// nothing, so nobody woke it, and being idle it never looked: its 36 MiB stayed above the limit for good.
    #[test]
    fn who_is_not_engaged_is_asked_whatever_it_last_said() {
        let p = testing::pager(16 << 20);
        let (other, woken) = member(p, 2);
        other.rss.store(1 << 20, Relaxed);
        assert_eq!(p.others_count(), 1);
        let seen = other.wake.load(Relaxed);
        p.wake_others();
        assert!(woken.recv().unwrap(), "asked to look");
        assert_ne!(other.wake.load(Relaxed), seen);
        other.engaged.store(1, Relaxed);
        p.rally();
        other.engaged.store(0, Relaxed);
        other.owner.store(0, Relaxed);
        p.rally();
        assert!(woken.try_recv().is_err(), "nobody else is");
        other.owner.store(Identity::own().raw(), Relaxed);
        p.rally();
        assert!(woken.recv().unwrap());
    }

    /// See [`Pager::others_charge_soon`] and [`Pager::look_at_others`]: managed members count a plan, and have its owner look, so
    /// that the plan does not count for good.
    #[test]
    fn what_others_plan_counts_until_they_have_looked() {
        let p = testing::pager(64 << 20);
        let (other, woken) = member(p, 1);
        let mut s = p.state.lock();
        s.rss = 40 << 20;
        let excess = |planned: u64| {
            other.planned.store(planned << 20, Relaxed);
            (p.excess(&s) >> 20, p.over_max(&s).next().is_some())
        };
        assert_eq!([0, 20, 30].map(excess), [(-24, false), (-4, false), (6, false)], "nothing is exceeded yet");
        p.look_at_others();
        assert!(woken.recv().unwrap(), "it is asked to look");
        // The owner sees the plan the same way as members that keep the limit with a margin: it engages, and plans nothing any
        // more.
        let room = |planned: usize| p.headroom(20 << 20, planned << 20, |limit| limit).0 >> 20;
        other.planned.store(0, Relaxed);
        assert_eq!([30, 41].map(room), [44, 0]);
        other.planned.store(11 << 20, Relaxed);
        assert_eq!([28, 30].map(room), [44, 0]);
        // The story: a thread that planned just as its process engaged left a plan behind that nobody takes back.
        other.engaged.store(1, Relaxed);
        assert_eq!((excess(30), room(30)), ((-24, false), 44), "a managed process fills nothing unseen");
        p.poked.store(0, Relaxed);
        other.engaged.store(0, Relaxed);
        other.planned.store(0, Relaxed);
        let before = other.wake.load(Relaxed);
        p.look_at_others();
        assert_eq!(other.wake.load(Relaxed), before, "nobody plans anything");
        s.rss = 0;
    }

    /// See [`Pager::take_slot`].
    #[test]
    fn who_takes_a_dead_members_slot_does_not_hold_what_that_held() {
        let p = testing::pager(16 << 20);
        let slot = p.me();
        let dead = testing::dead_process();
        slot.rss.store(40 << 20, Relaxed);
        slot.owner.store(dead.raw(), Relaxed);
        assert_eq!(p.take_slot(Identity::own()), Some(0));
        assert_eq!((slot.owner(), slot.rss.load(Relaxed)), (None, 40 << 20), "nobody is charged with it");
        p.claim_slot().unwrap();
        assert_eq!((slot.owner(), slot.rss.load(Relaxed)), (Some(Identity::own()), 0));
    }

    /// See [`Pager::raise_peaks`] and [`Pager::headroom`].
    #[test]
    fn what_the_dead_are_charged_is_no_peak_and_leaves_no_less_room() {
        let p = testing::pager(64 << 20);
        let dead = testing::dead_process();
        p.group.used.store(8, Relaxed);
        let dies = || {
            p.group.slots[7].rss.store(40 << 20, Relaxed);
            p.group.slots[7].owner.store(dead.raw(), Relaxed);
            p.buried.store(0, Relaxed);
            p.group.buried.store(0, Relaxed);
        };
        dies();
        p.raise_peaks(30 << 20, 30 << 20, 0);
        let n = &p.group.nodes[0];
        assert_eq!([&n.peak, &n.peak_held].map(|peak| peak.load(Relaxed)), [30 << 20; 2]);
        dies();
        assert_eq!(p.headroom(30 << 20, 0, |limit| limit).0, 34 << 20);
    }

    /// The story: a shell that ran three programs was four processes, and counted as seven, since a process that was forked and
    /// executed a program had joined twice. And a child that was managed from its beginning was not counted as managed.
    #[test]
    fn a_process_joins_once_whatever_it_executes() {
        let p = testing::pager(16 << 20);
        let counted = || (p.group.nodes[0].joined.load(Relaxed), p.group.nodes[0].engaged.load(Relaxed));
        assert_eq!(counted(), (1, 0));
        for _ in 0..2 {
            p.note_engaged();
            assert_eq!(counted(), (1, 1));
            p.claim_slot().unwrap();
            assert_eq!(p.me().engaged.load(Relaxed), 0);
        }
        // Another process in the slot is another member.
        p.me().owner.store(0, Relaxed);
        p.claim_slot().unwrap();
        p.note_engaged();
        assert_eq!(counted(), (2, 2));
    }

    /// The story: a shell ran a large program and then small ones, each in the slot of the one before. The report gave the last
    /// one's pool figures.
    #[test]
    fn what_was_most_is_kept_when_a_slot_changes_hands() {
        let p = testing::pager(16 << 20);
        let most = |c: &Counters| {
            let all = [&c.stored_pages, &c.stored_incompressible_pages, &c.pool_total_size, &c.pool_used_size];
            let disk = [&c.metadata_size, &c.swap_pages, &c.swap_used_size];
            all.into_iter().chain(disk).map(|n| n.load(Relaxed)).collect::<Vec<_>>()
        };
        let set = |pages: u64| {
            let c = p.counters();
            c.stored_pages.store(pages, Relaxed);
            c.pool_used_size.store(pages * 1000, Relaxed);
            c.metadata_size.store(7, Relaxed);
            c.swap_pages.store(3, Relaxed);
        };
        set(100);
        let before = most(p.counters());
        for _ in 0..2 {
            p.claim_slot().unwrap();
            assert_eq!(most(p.counters()), before, "after exec");
            p.me().owner.store(0, Relaxed);
            p.claim_slot().unwrap();
            assert_eq!(most(p.counters()), before, "and for the next owner");
        }
        // If the slot goes to another group, the figures stay with the first.
        let dead = &p.group.nodes[0].dead;
        p.counters().retire_into(dead);
        assert_eq!((most(dead), most(p.counters())), (before.clone(), vec![0; 7]));
        set(50);
        p.counters().retire_into(dead);
        assert_eq!(most(dead), before, "the most, of one moment");
    }

    /// The story: each of 32 processes in a group kept as much free as one alone would, together up to half of the limit.
    #[test]
    fn members_share_what_is_kept_free() {
        let p = testing::pager(128 << 20);
        assert_eq!(p.watermarks(), (256, 512));
        p.group.used.store(9, Relaxed);
        for other in &p.group.slots[1..9] {
            other.owner.store(Identity::own().raw(), Relaxed);
        }
        p.count_sharers();
        assert_eq!(p.watermarks(), (256, 512), "none of the others has any");
        let folios = || {
            p.wants_reclaim();
            let s = p.state.lock();
            (s.folio_max, s.unit_max)
        };
        assert_eq!(folios(), (9, 9));
        p.group.slots[1].engaged.store(1, Relaxed);
        p.count_sharers();
        assert_eq!((p.watermarks(), folios()), ((128, 256), (9, 8)), "64 MiB are enough for folios of 2");
        p.group.slots[1..6].iter().for_each(|other| other.engaged.store(1, Relaxed));
        assert_eq!(folios(), (9, 6), "and an ample share is, but not for units");
        p.group.slots[1..9].iter().for_each(|other| other.engaged.store(1, Relaxed));
        p.count_sharers();
        assert_eq!(folios(), (5, 5));
        assert_eq!(
            (p.watermarks(), p.widest_window()),
            ((48, 96), 6),
            "no less than a batch and half of a window, which is smaller"
        );
    }

    /// The story: processes that filled a group at once published their charge only every 32 faults, or 16 MiB.
    #[test]
    fn what_is_filled_is_said_before_it_is_much() {
        let p = testing::pager(16 << 20);
        let mut s = p.state.lock();
        for step in 1..=64 {
            s.rss = step * (64 << 10);
            p.charge_growth(&s);
            let said = p.me().rss.load(Relaxed) as usize;
            assert!(said <= s.rss && s.rss - said <= 256 << 10, "{said} said of {}", s.rss);
        }
    }
}

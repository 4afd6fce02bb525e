//! Decides when a group is full: its `memory.max` is exceeded, and nothing more can be taken out of memory.
//!
//! A member knows only about itself: its reclaim comes to nothing again and again, or it is down to what it must keep. That says
//! nothing about the group. The other members may hold plenty that is about to be taken; yet a small process that had just
//! started declared its group full, and the largest member was killed. So a member that finds nothing says so in its slot
//! ([`Slot::stuck`]), again at each look, and takes it back when it gets on. The group is full when *all* members that hold
//! something say so:
//!
//! ```text
//! a member     gets on ─ finds nothing ─▶ stuck ─ gets on ─▶ …
//! the group    is full, for a member that has just found nothing, if each other member of it
//!                - holds little, also for its share of the limit (nobody would wake it for that), or is dead; or
//!                - is stuck, and was so a moment ago;
//!              or if the group has not come down for some seconds, as a member that might give is stopped, or what it takes out
//!              comes back, or takes as much room where it is put
//! ```
//! Nor is the group full while a member's disk is slow to make room, as long as the disk does not stand still.
//!
//! A full group is counted (`oom`), reported once, and acted upon (`--on-full`). Each stuck member looks 50 times a second, so
//! whichever is left reports it when the last one that got on is stuck, stopped or dead. Only waiting (`--on-full=wait`) starts
//! at once: a thread that faults in a member with nothing to give waits for room, whoever makes it.

mod messages;

use crate::group::limits::Over;
use crate::group::{DEPTH, GroupPage, ON_FULL_KILL, ON_FULL_WAIT, Slot, bytes_in};
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::{AtomicU64, Ordering::*};
use uzswap_sys::process::Identity;
use uzswap_sys::thread;

/// A member that holds less has nothing to give, and is not woken either. Where many share a limit the bound is lower: a part of
/// a share.
pub(crate) const LITTLE_BYTES: u64 = 4 << 20;
const LITTLE_PART: u64 = 4;
/// A member that last found nothing this long ago, many looks, may get on by now (nanoseconds).
const STUCK_NS: u64 = 1_000_000_000;
/// If the group has not come down for this long, nobody really gets on, whatever the members say (nanoseconds).
const PATIENCE_NS: u64 = 5_000_000_000;
/// The group has come down if its charge fell by this much (bytes).
const FALL_BYTES: u64 = 256 << 10;
/// After a kill nobody else is killed for this long, as dying takes time (nanoseconds).
const KILL_PAUSE_NS: u64 = 2_000_000_000;

/// Whether a member has found nothing to take out a moment ago.
pub(crate) fn finds_nothing(member: &Slot, now: u64) -> bool {
    is_recent(&member.stuck, now)
}

/// Whether a member has waited a moment ago for its disk, which is slow to make room.
fn waits_for_disk(member: &Slot, now: u64) -> bool {
    is_recent(&member.disk_at, now)
}

/// Whether a member's statement, made at each look, is recent; 0 means that it does not hold.
fn is_recent(at: &AtomicU64, now: u64) -> bool {
    let at = at.load(Acquire);
    at != 0 && now < at.saturating_add(STUCK_NS)
}

/// What a member with nothing to give holds at most, where this many members share a limit (bytes).
///
/// The story: nine members shared 16 MiB, so each held less than 4. The first that found nothing had the largest killed, which
/// held 3.9 MiB that nobody had asked it for. When none was killed they came down to 15 MiB together.
pub(crate) fn little(limit: usize, members: usize) -> u64 {
    LITTLE_BYTES.min((limit / members.max(1)) as u64 / LITTLE_PART)
}

/// What a stuck member has seen of one group of its chain, while another member seems to get on.
#[derive(Default)]
pub struct Waiting {
    /// The group's lowest charge (bytes).
    lowest: AtomicU64,
    /// Since when it has been the lowest (monotonic nanoseconds); 0 while no other member is waited for.
    since: AtomicU64,
}

impl Pager {
    /// This member finds nothing more to take out. If the same is true of the whole group, and its `memory.max` is exceeded, the
    /// group is counted as full, reported once, and acted upon.
    pub fn full(&self, s: &State) {
        self.full_at(s, thread::now_ns());
    }

    fn full_at(&self, s: &State, now: u64) {
        let mut overs = [None; DEPTH];
        self.over_max(s).for_each(|over| overs[over.level] = Some(over));
        let fits = self.waiting.iter().zip(&overs).filter(|(_, over)| over.is_none());
        fits.for_each(|(waiting, _)| waiting.since.store(0, Relaxed));
        if overs.iter().all(Option::is_none) {
            return;
        }
        self.me().stuck.store(now, Release);
        let mut counted = false;
        for over in overs.into_iter().flatten() {
            counted |= self.full_group(s, over, now, !counted);
        }
    }

    /// The same for one group. Counting includes all groups above, so only the nearest full one is counted (`counts`).
    fn full_group(&self, s: &State, over: Over, now: u64, counts: bool) -> bool {
        let n = &self.group.nodes[over.node];
        let on_full = n.on_full.load(Relaxed);
        if on_full == ON_FULL_WAIT {
            self.waits.store(true, SeqCst);
        }
        if self.another_gets_on(over, now) {
            return false;
        }
        let acts = n.full_said.load(Relaxed) == 0 || (on_full == ON_FULL_KILL && now >= n.kill_due.load(Relaxed));
        let Some(over) = self.over_without_the_dead(s, over, acts) else { return false };
        // First report why: otherwise the ticker would report a disk that stands still only after a member was killed for it.
        if acts {
            self.look_for_stalls();
        }
        if counts {
            self.group.count(over.node, |e| &e.oom, 1);
        }
        let spares = on_full == ON_FULL_KILL && n.spares(over);
        if n.full_said.swap(1, AcqRel) == 0 {
            self.say_full(s, over, (on_full, spares));
        }
        if on_full == ON_FULL_KILL && !spares {
            self.kill_largest(over.node);
        }
        true
    }

    /// By how much the group still exceeds its limit once the charges of dead members are returned; None if it does not. It
    /// searches for them now and then, and always before anything is said or done (`acts`), as it asks the kernel about each
    /// member.
    ///
    /// The story: a child that held 40 MiB ended. Until its charge was returned, up to 100 ms later, its parent, which was at its
    /// floor, found the group full and said so.
    fn over_without_the_dead(&self, s: &State, over: Over, acts: bool) -> Option<Over> {
        if !self.bury_the_dead(acts) {
            return Some(over);
        }
        self.over_max(s).find(|now| now.level == over.level)
    }

    /// This member took something out, or need not.
    pub(crate) fn gets_on(&self) {
        let stuck = &self.me().stuck;
        if stuck.load(Relaxed) != 0 {
            stuck.store(0, Release);
            self.waiting.iter().for_each(|waiting| waiting.since.store(0, Relaxed));
        }
    }

    /// This member cannot be managed: it will never have anything to give.
    pub(crate) fn never_gets_on(&self) {
        self.me().stuck.store(u64::MAX, Release);
    }

    /// Whether another member of a group may have something to give.
    fn another_gets_on(&self, over: Over, now: u64) -> bool {
        let (w, charge) = (&self.waiting[over.level], over.charge as u64);
        let little = little(over.max, self.others_within(over.node).count() + 1);
        let mut others = self.others_within(over.node).filter(|o| o.rss.load(Relaxed) > little);
        let any = others.any(|o| !finds_nothing(o, now) && o.owner().is_some_and(|owner| !owner.is_dead()));
        let since = w.since.load(Relaxed);
        // What is being written makes room, even if nothing else is found meanwhile, and may take longer than all of this.
        if self.writes_slowly() || self.others_within(over.node).any(|o| waits_for_disk(o, now)) {
            w.lowest.store(charge, Relaxed);
            w.since.store(now, Relaxed);
            return true;
        }
        if !any {
            w.since.store(0, Relaxed);
        } else if since == 0 || charge + FALL_BYTES <= w.lowest.load(Relaxed) {
            w.lowest.store(charge, Relaxed);
            w.since.store(now, Relaxed);
        } else {
            return now.saturating_sub(since) < PATIENCE_NS;
        }
        any
    }

    /// The member of a group that holds most, possibly this one.
    fn largest(&self, node: usize, s: &State) -> Largest {
        let own = s.pool.held_bytes();
        let me = Largest {
            pid: thread::getpid() as u32,
            resident: self.charged(s).saturating_sub(own) as u64,
            pool: own as u64,
        };
        let others = self.others_within(node).filter_map(|o| {
            let owner = o.owner().filter(|owner| !owner.is_dead())?;
            let (rss, pool) = (bytes_in(&o.rss), bytes_in(&o.pool));
            Some(Largest { pid: owner.pid(), resident: rss.saturating_sub(pool), pool })
        });
        others.fold(me, |most, other| if other.holds() > most.holds() { other } else { most })
    }

    /// The slots of the other members in a group.
    pub(crate) fn others_within(&self, node: usize) -> impl Iterator<Item = &Slot> {
        self.others().filter(move |slot| is_within(self.group, slot, node))
    }

    /// Kills the member of a group with the largest charge. After that, nobody is killed for any group that the victim is in
    /// until it has had time to die.
    ///
    /// The story: this held for that one group only. While a member of `web/worker` was dying, another was killed for `web`,
    /// because of the first one's remaining charge.
    fn kill_largest(&self, node: usize) {
        let n = &self.group.nodes[node];
        let (now, due) = (thread::now_ns(), n.kill_due.load(Relaxed));
        if now < due || n.kill_due.compare_exchange(due, now + KILL_PAUSE_NS, AcqRel, Relaxed).is_err() {
            return;
        }
        let Some((charge, victim, of)) = self.victim(node) else { return };
        for at in self.group.chain(of as usize) {
            self.group.nodes[at].kill_due.fetch_max(now + KILL_PAUSE_NS, AcqRel);
        }
        self.group.count(node, |e| &e.oom_kill, 1);
        self.say_killed(victim.pid(), charge);
        victim.signal(libc::SIGKILL);
    }

    /// The member of a group with the largest charge, that charge, and the member's own group.
    ///
    /// The story: who is killed was read from the slots as it stood there. A stray write, by any member, of a word whose lower half
    /// is 0 would have had the killer's whole process group killed, and a small number a process that is no member.
    fn victim(&self, node: usize) -> Option<(u64, Identity, u32)> {
        let members = self.group.used().iter().filter(|slot| is_within(self.group, slot, node));
        let alive = members.filter_map(|slot| {
            let owner = slot.owner().filter(|owner| owner.is_certain())?;
            Some((bytes_in(&slot.rss), owner, slot.node.load(Relaxed)))
        });
        alive.max_by_key(|(charge, ..)| *charge)
    }
}

/// What a member holds (bytes).
struct Largest {
    pid: u32,
    resident: u64,
    pool: u64,
}

impl Largest {
    fn holds(&self) -> u64 {
        self.resident + self.pool
    }
}

fn is_within(group: &GroupPage, slot: &Slot, node: usize) -> bool {
    group.is_within(slot.node.load(Relaxed) as usize, node)
}

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod nested;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use uzswap_sys::owner::CLEANS;

    const LIMIT: usize = 32 << 20;

    /// A small member of a group of 32 MiB, and the slot of another that holds 40 and is alive.
    fn two() -> (&'static Pager, &'static Slot) {
        let p = testing::pager(LIMIT);
        let other = &p.group.slots[7];
        p.group.used.store(8, Relaxed);
        other.owner.store(Identity::own().raw(), Relaxed);
        other.rss.store(40 << 20, Relaxed);
        p.state.lock().rss = 2 << 20;
        (p, other)
    }

    /// How often the group was full so far, when the member finds nothing at `now`.
    fn full(p: &Pager, now: u64) -> u64 {
        p.full_at(&p.state.lock(), now);
        let (n, oom) = (&p.group.nodes[0], p.group.nodes[0].events.oom.load(Relaxed));
        assert_eq!(n.full_said.load(Relaxed), u32::from(oom > 0), "reported if and only if it is full");
        oom
    }

    /// The story: in a group of several processes one that had just started and had nothing to give found the group full. The
    /// message named that process, while the others held plenty that was taken from them a moment later. With `--on-full=kill`
    /// the largest was killed for it.
    #[test]
    fn a_group_is_full_when_nobody_gets_on() {
        let (p, other) = two();
        let mut now = PATIENCE_NS;
        for _ in 0..20 {
            now += PATIENCE_NS / 2;
            other.rss.fetch_sub(3 * FALL_BYTES / 2, Relaxed);
            assert_eq!(full(p, now), 0, "the other gets on");
        }
        other.stuck.store(now, Relaxed);
        assert_eq!(full(p, now + 20_000_000), 1, "it does not any more");
        assert_eq!(full(p, now + 40_000_000), 2);
        other.stuck.store(0, Relaxed);
        assert_eq!(full(p, now + 60_000_000), 2, "it does again");
        // This member says that it finds nothing, until it gets on.
        assert_eq!(p.me().stuck.load(Relaxed), now + 60_000_000);
        p.gets_on();
        assert_eq!(p.me().stuck.load(Relaxed), 0);
    }

    #[test]
    fn who_holds_little_or_is_dead_or_alone_is_not_waited_for() {
        let (p, other) = two();
        let dead = testing::dead_process();
        // As in a group that others have filled, where nobody else matters.
        p.state.lock().rss = LIMIT + (1 << 20);
        assert_eq!(full(p, 1), 0);
        other.rss.store(LITTLE_BYTES, Relaxed);
        assert_eq!(full(p, 2), 1, "it holds little");
        other.rss.store(40 << 20, Relaxed);
        assert_eq!(full(p, 3), 1);
        other.owner.store(dead.raw(), Relaxed);
        assert_eq!(full(p, 4), 2, "it is dead");
        other.owner.store(0, Relaxed);
        assert_eq!(full(p, 5), 3, "it is gone");
    }

    /// The story: a process that found a dead member took its slot to return the charge, and for that moment seemed to hold the
    /// charge as well. Another process could take it for the largest and kill it.
    #[test]
    fn who_returns_the_charge_of_the_dead_does_not_hold_it() {
        const TIMES: u32 = 20_000;
        let (p, other) = two();
        let dead = testing::dead_process();
        let looks = std::thread::spawn(|| {
            let (mut seen, mut blamed) = (0, 0);
            while seen < TIMES {
                let charged = other.owner() == Some(Identity::own()) && other.rss.load(Acquire) != 0;
                // This belongs to one round: the next one charges again.
                let round = other.ticker.load(Acquire);
                blamed += u32::from(charged && round == seen);
                seen = round;
            }
            blamed
        });
        for round in 1..=TIMES {
            other.owner.store(0, Release);
            other.rss.store(40 << 20, Release);
            other.owner.store(dead.raw(), Release);
            p.group.bury_the_dead(Identity::own());
            assert_eq!((other.owner.load(Relaxed), other.rss.load(Relaxed)), (0, 0));
            other.ticker.store(round, Release);
        }
        assert_eq!(looks.join().expect("it looks"), 0);
        // A return that was broken off is begun again. The process that does so is not charged in the slot meanwhile.
        other.rss.store(40 << 20, Relaxed);
        other.owner.store(dead.raw() | CLEANS, Relaxed);
        assert_eq!(p.largest(0, &p.state.lock()).pid, thread::getpid() as u32);
        p.group.bury_the_dead(Identity::own());
        assert_eq!((other.owner.load(Relaxed), other.rss.load(Relaxed)), (0, 0));
    }

    /// See [`little`]: each member holds little, all together more than the limit, and nobody has asked them for it yet.
    #[test]
    fn a_group_of_many_is_full_when_none_of_them_gets_on() {
        let (p, other) = two();
        p.group.used.store(16, Relaxed);
        let others = &p.group.slots[1..16];
        for each in others {
            each.owner.store(Identity::own().raw(), Relaxed);
            each.rss.store(LITTLE_BYTES - 1, Relaxed);
            each.stuck.store(1, Relaxed);
        }
        other.stuck.store(0, Relaxed);
        assert_eq!(full(p, 2), 0, "one has not been asked");
        other.rss.store(little(LIMIT, 16), Relaxed);
        assert_eq!(full(p, 3), 1, "it holds little for that");
        other.rss.store(LITTLE_BYTES - 1, Relaxed);
        assert_eq!(full(p, 4), 1);
        others.iter().for_each(|each| each.owner.store(0, Relaxed));
        other.owner.store(Identity::own().raw(), Relaxed);
        p.state.lock().rss = LIMIT;
        assert_eq!(full(p, 5), 2, "beside one other it is little");
    }

    /// See [`Pager::over_without_the_dead`].
    #[test]
    fn what_the_dead_are_charged_fills_no_group() {
        let (p, other) = two();
        let dead = testing::dead_process();
        // Somebody in this process has just searched for dead members.
        p.bury_the_dead(true);
        other.owner.store(dead.raw(), Relaxed);
        assert_eq!(full(p, 1), 0);
        assert_eq!((other.owner.load(Relaxed), other.rss.load(Relaxed)), (0, 0));
        // Nor is anybody killed for it, once the message was given.
        p.group.nodes[0].full_said.store(1, Relaxed);
        p.group.nodes[0].on_full.store(ON_FULL_KILL, Relaxed);
        other.rss.store(40 << 20, Relaxed);
        other.owner.store(dead.raw(), Relaxed);
        p.full_at(&p.state.lock(), thread::now_ns());
        let events = &p.group.nodes[0].events;
        assert_eq!((events.oom.load(Relaxed), events.oom_kill.load(Relaxed)), (0, 0));
    }

    /// The group may not come down although no member is stuck: one is stopped, or what it takes out takes as much room
    /// elsewhere.
    #[test]
    fn a_group_that_does_not_come_down_is_full() {
        let (p, other) = two();
        assert_eq!(full(p, 1), 0);
        other.rss.fetch_sub(FALL_BYTES - 1, Relaxed);
        assert_eq!(full(p, PATIENCE_NS), 0);
        other.rss.fetch_add(1 << 20, Relaxed);
        assert_eq!(full(p, PATIENCE_NS + 1), 1, "it has not come down");
        other.rss.fetch_sub(2 << 20, Relaxed);
        let now = PATIENCE_NS + 2;
        assert_eq!(full(p, now), 1, "now it has");
        // The other member is stopped just after it had found nothing.
        other.stuck.store(now, Relaxed);
        assert_eq!(full(p, now + STUCK_NS - 1), 2);
        assert_eq!(full(p, now + STUCK_NS), 2, "it may get on by now");
        assert_eq!(full(p, now + STUCK_NS + PATIENCE_NS), 3, "it does not");
        // A member that cannot be managed never gets on.
        other.stuck.store(u64::MAX, Relaxed);
        assert_eq!(full(p, 1), 4);
        // Once the group is within its limit, everything starts over.
        other.stuck.store(0, Relaxed);
        assert_eq!(full(p, 10), 4);
        p.group.nodes[0].max.store(64 << 20, Relaxed);
        assert_eq!(full(p, 20), 4);
        p.group.nodes[0].max.store(32 << 20, Relaxed);
        assert_eq!(full(p, PATIENCE_NS + 10), 4);
    }

    /// The story: a cloud disk took some seconds for a write. Members that found nothing to take meanwhile saw that the group did
    /// not come down, and the largest was killed while it waited for its disk to make room.
    #[test]
    fn a_group_whose_slow_disk_is_waited_for_is_not_full() {
        let (p, other) = two();
        let mut now = 1;
        for _ in 0..20 {
            now += PATIENCE_NS / 2;
            other.disk_at.store(now, Relaxed);
            assert_eq!(full(p, now + 1), 0, "its disk makes room");
        }
        // Nor while this member's disk does, or where the other one finds nothing beside it.
        other.stuck.store(now, Relaxed);
        assert_eq!(full(p, now + 2), 0);
        other.stuck.store(0, Relaxed);
        other.disk_at.store(0, Relaxed);
        p.tier.began[1].store(thread::now_ns() - 2_000_000_000, Relaxed);
        assert_eq!(full(p, now + 2 * PATIENCE_NS), 0);
        p.tier.began[1].store(thread::now_ns() - 11_000_000_000, Relaxed);
        other.disk_at.store(now, Relaxed);
        // Both disks stand still.
        now += 2 * PATIENCE_NS;
        assert_eq!(full(p, now), 0, "the other may get on without it");
        assert_eq!(full(p, now + PATIENCE_NS), 1, "it does not");
        p.tier.began[1].store(0, Relaxed);
    }

    /// The action is the one that the group is set to, and it concerns the largest of all members.
    #[test]
    fn what_is_done_about_it_waits_too() {
        let (p, other) = two();
        let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("a process");
        other.owner.store(Identity::of(child.id()).raw(), Relaxed);
        p.group.nodes[0].on_full.store(ON_FULL_KILL, Relaxed);
        let killed = || p.group.nodes[0].events.oom_kill.load(Relaxed);
        assert_eq!((full(p, 1), killed()), (0, 0), "it gets on");
        let largest = p.largest(0, &p.state.lock());
        assert_eq!((largest.pid, largest.holds()), (child.id(), 40 << 20));
        other.stuck.store(1, Relaxed);
        assert_eq!((full(p, 2), killed()), (1, 1));
        let ended = child.wait().expect("it was killed");
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&ended), Some(libc::SIGKILL));
        // Waiting is not put off.
        p.group.nodes[0].on_full.store(ON_FULL_WAIT, Relaxed);
        other.owner.store(Identity::own().raw(), Relaxed);
        other.stuck.store(0, Relaxed);
        assert!(!p.waits.load(SeqCst));
        assert_eq!(full(p, 3), 1);
        assert!(p.waits.load(SeqCst));
    }
}

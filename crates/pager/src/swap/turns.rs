//! Decides whose turn it is to write back when the pools of a group are full.
//!
//! The pool-full path goes round the groups below the full one, from when their pools exceed `max_pool_percent` of its limit
//! until they are down to `accept_threshold_percent` of that. Each process has its own list, which no other can touch. So the
//! group's page has, for each member, how far it has come ([`Slot::turn`]). A member goes on while it is less than [`TURN`] pages
//! ahead of the one furthest behind; otherwise it wakes that one. What is counted is pages *met*, as in the kernel: a group whose
//! memory is in use gives its second chances, and one whose memory is idle gives the memory.
//!
//! ```text
//!  group a   ████████████░░░░   ahead by a turn: waits, and wakes those behind
//!  group b   ████████           one process with 3/4 of the group's pool, one with 1/4: they have met 3 pages to 1,
//!            █████████          which is as far for each
//! ```
//! Within a group pages are met in proportion to the members' pools, as if they were on one list, and between groups evenly: a
//! member's pages count as many times as its group's pool is larger than its own. The page also holds whether the group is full
//! ([`Node::pool_full`]), so all stop together.
//!
//! Nobody holds a turn, so a member that is killed or stopped takes none along. A member that cannot write (it is forbidden, its
//! disk fails, or its list is empty) says so and is not waited for. One that makes no progress within [`PATIENCE_NS`] is passed
//! over until it runs again. A member that comes late, or comes back, is at most [`MOST_LAG`] pages behind.

use super::Swap;
use super::writeback::RUN_BYTES;
use crate::group::{GroupPage, NODES, Node, Slot, bytes_in};
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::shrinker::PoolFull;
use uzswap_sys::{lock, thread};

/// Pages that a member may be ahead of another: some writes' worth.
const TURN: u64 = 512;
/// Pages that a member may be behind; it does not make up for more.
const MOST_LAG: u64 = 4 * TURN;
/// With a smaller pool (bytes) a member is not waited for.
const LEAST_POOL: u64 = 256 << 10;
/// How long a member that makes no progress is waited for (nanoseconds).
const PATIENCE_NS: u64 = 100_000_000;
/// How often a member checks whether it is its turn (nanoseconds).
pub(super) const LOOK_NS: u64 = 1_000_000;

/// [`Slot::writer`]: no thread of the member writes.
pub const WRITER_NONE: u32 = 0;
/// A thread writes when it is the member's turn.
pub const WRITER_READY: u32 = 1;
/// The member's thread cannot write now, or did not when it was waited for.
pub const WRITER_PASSES: u32 = 2;

/// A task for the writing thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Task {
    /// Bytes to free, as the pools are full.
    pub bytes: usize,
    /// Pages that it may meet now for that.
    pub pages: usize,
    /// Whether objects are due to be met, as reclaim presses the pool.
    pub due: bool,
    /// A page that is met advances the member by `group_pool` / `own_pool`.
    pub group_pool: usize,
    /// See `group_pool`.
    pub own_pool: usize,
}

/// Whether the writing thread has to do something.
pub(super) enum Wanted {
    /// There is nothing to do.
    Nothing,
    /// There is, but it cannot: it is forbidden, or nothing would be gained.
    Unable,
    /// Others must go first.
    NotYet,
    /// There is this to do.
    Work(Task),
}

/// A member's view of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Look {
    /// How far the one furthest behind has come; None if there is no other.
    least: Option<u64>,
    /// How far this member has come.
    mine: u64,
    /// Bytes of the pools in its own group.
    group_pool: usize,
    /// Number of groups that take part.
    groups: usize,
}

impl Look {
    /// The view of member `me`, whose pool has `own` bytes, of the members of the full group `full` and those below.
    fn at(page: &GroupPage, full: usize, me: usize, own: usize) -> Self {
        let node = |slot: &Slot| (slot.node.load(Relaxed) as usize).min(NODES - 1);
        let (slot, group) = (&page.slots[me], node(&page.slots[me]));
        if slot.turn.load(Relaxed) == 0 {
            // It begins where the others are.
            let most = others(page, full, me).map(|other| other.turn.load(Relaxed)).max();
            slot.turn.fetch_max(most.unwrap_or(0).max(1), Relaxed);
        }
        let mine = slot.turn.load(Relaxed);
        let mut look = Self { least: None, mine, group_pool: own.max(1), groups: 0 };
        let mut groups = 1u64 << group;
        for other in others(page, full, me) {
            let far_behind = mine.saturating_sub(MOST_LAG);
            let mut at = other.turn.load(Relaxed);
            if at < far_behind {
                other.turn.fetch_max(far_behind, Relaxed);
                at = far_behind;
            }
            look.least = Some(look.least.map_or(at, |least| least.min(at)));
            groups |= 1 << node(other);
            if node(other) == group {
                look.group_pool += bytes_in(&other.pool) as usize;
            }
        }
        look.groups = groups.count_ones() as usize;
        look
    }

    /// Pages that this member, whose pool has `own` bytes, may meet now.
    fn pages(&self, own: usize) -> usize {
        let Some(least) = self.least else { return usize::MAX };
        let ahead = u128::from(least.saturating_add(TURN).saturating_sub(self.mine));
        (ahead * own as u128).div_ceil(self.group_pool as u128) as usize
    }

    /// This member's part of `bytes` to be freed.
    fn part(&self, bytes: usize, own: usize) -> usize {
        (bytes as u128 * own as u128 / (self.group_pool as u128 * self.groups as u128)) as usize
    }

    fn is_behind(&self, slot: &Slot) -> bool {
        slot.turn.load(Relaxed).saturating_add(TURN) <= self.mine
    }
}

/// The members of a group and those below it that take part in the round, except `me`.
fn others(page: &GroupPage, full: usize, me: usize) -> impl Iterator<Item = &Slot> {
    let takes_part = move |slot: &Slot| {
        let node = (slot.node.load(Relaxed) as usize).min(NODES - 1);
        slot.owner.load(Relaxed) != 0
            && slot.writer.load(Relaxed) == WRITER_READY
            && slot.pool.load(Relaxed) >= LEAST_POOL
            && page.is_within(node, full)
            && page.chain(node).all(|at| page.nodes[at].zswap_writeback.load(Relaxed) != 0)
    };
    page.used().iter().enumerate().filter(move |(i, slot)| *i != me && takes_part(slot)).map(|(_, slot)| slot)
}

impl Pager {
    /// The writing thread's task now. Nothing if writing back is forbidden; `memory.swap.max` counts that.
    pub(super) fn write_back_wanted(&self, s: &State, swap: &mut Swap) -> Wanted {
        let (excess, full) = self.fullest(s, swap);
        let due = swap.is_pressed(s);
        if excess == 0 && !due {
            return Wanted::Nothing;
        }
        if !self.may_write_back() || !self.may_swap(swap.books.used_bytes(), RUN_BYTES) {
            return Wanted::Unable;
        }
        let only_due = Task { due, ..Task::default() };
        if excess == 0 {
            return Wanted::Work(only_due);
        }
        let own = s.pool.held_bytes();
        let look = Look::at(self.group, full, self.slot.load(Relaxed), own);
        // Freed memory stays held until whole slabs are empty, and objects reuse the room before.
        let slack = own.saturating_sub(s.pool.used_bytes() / 3 * 4);
        let bytes = look.part(excess, own).saturating_sub(slack);
        let pages = look.pages(own);
        if bytes > 0 && pages > 0 {
            return Wanted::Work(Task { bytes, pages, due, group_pool: look.group_pool, own_pool: own });
        }
        if bytes > 0 {
            self.wake_those_behind(swap, full, &look);
        }
        match due {
            true => Wanted::Work(only_due),
            false if bytes > 0 => Wanted::NotYet,
            false => Wanted::Unable,
        }
    }

    /// Bytes that the pools must get rid of in the group of the chain where that is most; and that group.
    fn fullest(&self, s: &State, swap: &Swap) -> (usize, usize) {
        let mut worst = (0, self.node);
        for (held, most, accept, at) in self.pools(s, swap) {
            let node: &Node = &self.group.nodes[at];
            let before = node.pool_full.load(Relaxed) != 0;
            let mut pools = PoolFull::new(before);
            let excess = pools.excess(held, most, accept);
            if pools.is_full() != before {
                node.pool_full.store(u32::from(pools.is_full()), Relaxed);
            }
            if excess > worst.0 {
                worst = (excess, at);
            }
        }
        worst
    }

    /// Wakes the members that this one waits for, and passes over those that have made no progress for some time.
    fn wake_those_behind(&self, swap: &mut Swap, full: usize, look: &Look) {
        let (least, now) = (look.least.unwrap_or(0), thread::now_ns());
        if swap.waits_for.0 != least {
            swap.waits_for = (least, now);
        }
        let patient = now.saturating_sub(swap.waits_for.1) < PATIENCE_NS;
        for slot in others(self.group, full, self.slot.load(Relaxed)).filter(|slot| look.is_behind(slot)) {
            if !patient {
                let _ = slot.writer.compare_exchange(WRITER_READY, WRITER_PASSES, Relaxed, Relaxed);
            }
            wake_writer(slot);
        }
    }

    /// Notes that it has met this many pages of its task.
    pub(super) fn took_turn(&self, task: &Task, pages: usize) {
        let far = pages as u128 * task.group_pool as u128 / task.own_pool.max(1) as u128;
        self.me().turn.fetch_add(far as u64, Relaxed);
    }

    /// Publishes whether this process can write when it is its turn.
    pub(super) fn takes_part(&self, can: bool) {
        self.me().writer.store(if can { WRITER_READY } else { WRITER_PASSES }, Relaxed);
    }
}

/// Wakes a member's writing thread, which then checks whether it has something to do.
pub fn wake_writer(slot: &Slot) {
    slot.swap_wake.fetch_add(1, Release);
    lock::futex_wake(&slot.swap_wake, 1, true);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use uzswap_sys::process::Identity;

    /// A tree `root` with groups such as `a` and `b`, and members in them with pools of so many MiB.
    fn tree(members: &[(&[u8], u64)]) -> &'static GroupPage {
        let page = testing::group();
        for (i, (name, mib)) in members.iter().enumerate() {
            let node = page.child(0, name).or_else(|| page.make_child(0, name)).unwrap();
            let slot = &page.slots[i];
            slot.owner.store(Identity::own().raw(), Relaxed);
            slot.node.store(node as u32, Relaxed);
            slot.pool.store(mib << 20, Relaxed);
            slot.writer.store(WRITER_READY, Relaxed);
            page.used.store(i as u32 + 1, Relaxed);
        }
        page
    }

    fn own(page: &GroupPage, me: usize) -> usize {
        page.slots[me].pool.load(Relaxed) as usize
    }

    /// One round of the member's writing thread that meets all it may, at most 100 pages; returns how many it met.
    fn round(page: &GroupPage, me: usize) -> u64 {
        let own = own(page, me);
        let look = Look::at(page, 0, me, own);
        let pages = look.pages(own).min(100) as u64;
        page.slots[me].turn.fetch_add(pages * look.group_pool as u64 / own as u64, Relaxed);
        pages
    }

    /// Pages that each has met when the first gets no further, whatever their speeds.
    fn race(page: &GroupPage, speeds: &[usize], rounds: usize) -> Vec<u64> {
        let mut met = vec![0; speeds.len()];
        for _ in 0..rounds {
            for (me, speed) in speeds.iter().enumerate() {
                (0..*speed).for_each(|_| met[me] += round(page, me));
            }
        }
        met
    }

    #[test]
    fn groups_take_turns_and_members_of_one_are_as_one_list() {
        let page = tree(&[(b"a", 12), (b"b", 30), (b"b", 10)]);
        let met = race(page, &[7, 1, 1], 400);
        let (a, b) = (met[0], met[1] + met[2]);
        assert!(a > 10_000 && a.abs_diff(b) <= 2 * TURN, "{met:?}");
        assert!(met[1].abs_diff(3 * met[2]) <= 2 * TURN, "{met:?}");
    }

    #[test]
    fn who_cannot_write_is_not_waited_for() {
        // In this order: has no writing thread, cannot write now, is forbidden to, has next to nothing, is in another tree's
        // group.
        let page = tree(&[(b"a", 8), (b"b", 8), (b"b", 8), (b"c", 8), (b"d", 8), (b"e", 8)]);
        page.slots[1].writer.store(WRITER_NONE, Relaxed);
        page.slots[2].writer.store(WRITER_PASSES, Relaxed);
        let c = page.child(0, b"c").unwrap();
        page.nodes[c].zswap_writeback.store(0, Relaxed);
        page.slots[4].pool.store(LEAST_POOL - 1, Relaxed);
        page.slots[5].owner.store(0, Relaxed);
        let look = Look::at(page, 0, 0, 8 << 20);
        assert_eq!((look.least, look.groups, look.part(1000, 8 << 20)), (None, 1, 1000));
        assert_eq!(look.pages(8 << 20), usize::MAX);
        // If only the member's own group is full, the others do not matter either.
        page.slots[1].writer.store(WRITER_READY, Relaxed);
        let a = page.child(0, b"a").unwrap();
        assert_eq!(Look::at(page, a, 0, 8 << 20).least, None);
        let look = Look::at(page, 0, 0, 8 << 20);
        assert!(look.least.is_some() && look.groups == 2 && look.part(1000, 8 << 20) == 500);
    }

    #[test]
    fn one_that_does_not_go_on_is_waited_for_and_does_not_make_up_for_much() {
        let page = tree(&[(b"a", 8), (b"b", 8)]);
        let met = race(page, &[1, 0], 100);
        assert_eq!(met, [TURN - 1, 0]);
        assert!(Look::at(page, 0, 0, 8 << 20).is_behind(&page.slots[1]));
        // A member that is passed over holds nobody up. It comes back far behind, but not by all that it missed.
        page.slots[1].writer.store(WRITER_PASSES, Relaxed);
        let alone = race(page, &[1, 0], 100);
        assert_eq!(alone, [10_000, 0]);
        page.slots[1].writer.store(WRITER_READY, Relaxed);
        assert_eq!(round(page, 0), 0);
        let back = race(page, &[1, 1], 100);
        assert!(back[1] - back[0] <= MOST_LAG && back[1] > MOST_LAG, "{back:?}");
    }

    #[test]
    fn who_comes_later_begins_where_the_others_are() {
        let page = tree(&[(b"a", 8), (b"b", 8), (b"c", 8)]);
        page.slots[2].writer.store(WRITER_NONE, Relaxed);
        race(page, &[1, 1], 100);
        page.slots[2].writer.store(WRITER_READY, Relaxed);
        let met = race(page, &[0, 0, 1], 100);
        assert!(met[2] <= 2 * TURN, "{met:?}");
    }

    /// The story: a stray write left a turn near the largest number. What a member may be ahead of it was added to that, so its
    /// round ended in a panic, or (with sums that wrap) the others waited for it forever.
    #[test]
    fn a_turn_that_cannot_be_is_no_reason_to_wait() {
        let page = tree(&[(b"a", 8), (b"b", 8)]);
        page.slots[0].turn.store(u64::MAX - 10, Relaxed);
        page.slots[1].turn.store(u64::MAX - 5, Relaxed);
        let look = Look::at(page, 0, 0, 8 << 20);
        assert!(look.pages(8 << 20) > 0 && !look.is_behind(&page.slots[1]));
        // Nor is a pool that cannot be.
        page.slots[1].node.store(page.slots[0].node.load(Relaxed), Relaxed);
        page.slots[1].pool.store(u64::MAX - (8 << 20) + 1, Relaxed);
        let look = Look::at(page, 0, 0, 8 << 20);
        assert!(look.group_pool > 8 << 20);
        look.part(1 << 20, 8 << 20);
    }
}

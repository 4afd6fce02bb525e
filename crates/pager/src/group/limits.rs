//! The limits of a group, and what happens at each.
//!
//! ```text
//!        memory.high                        memory.max
//! ────────────┼──────────────────────────────────┼───────────────▶ charge: resident + pool + metadata
//!  nothing    │ reclaim; the faulting threads    │ reclaim; when nothing more can be taken out:
//!             │ wait in proportion to the excess │ --on-full: see `full`
//! ```
//! The groups above have limits too: reclaim goes by the one that is exceeded most, and each group is full by itself. Limits are
//! read anew each time, so a change takes effect at once; `uzswap ctl` wakes the members for it.
//!
//! `memory.zswap.max` and `memory.swap.max` bound the pool and the swap file: callers ask [`Pager::may_zswap`] and
//! [`Pager::may_swap`] before they put something there.

use crate::frames::arena::PAGE;
use crate::group::member::Others;
use crate::group::{DEPTH, NO_LIMIT, Node, ON_FULL_WAIT, bytes_in};
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_sys::thread;

/// Each fault waits this long when the charge is twice `memory.high`, and in proportion otherwise. At 10 % above it a program
/// that touches page after page gets 2 MB/s.
const THROTTLE_NS: u64 = 20_000_000;
/// The longest wait (nanoseconds).
const THROTTLE_MOST_NS: u64 = 100_000_000;
/// A shorter wait is not worth a system call (nanoseconds).
const THROTTLE_LEAST_NS: u64 = 50_000;
/// Faults go on up to this far above `memory.max` before they wait, where the limit is small (bytes).
const FAR_BYTES: usize = 4 << 20;

/// A group of the chain that exceeds its `memory.max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Over {
    /// Its position in the chain, counted from the nearest.
    pub level: usize,
    /// The group.
    pub node: usize,
    /// Its charge.
    pub charge: usize,
    /// Its limit.
    pub max: usize,
}

impl Node {
    /// Sets `memory.max` while `charged` bytes are charged. Nobody is killed for what exceeds the new limit now, if that cannot
    /// be taken out.
    ///
    /// The story: a member had just read the former limit, which was met, when the grace was noted, and took the grace back. So
    /// it is noted once more with another number, which only a member that has read the new limit takes back.
    ///
    /// Another story: a limit was raised. The grace that held for the former one was taken back a moment before the limit was
    /// replaced, and a member was killed in that moment.
    pub fn set_max(&self, bytes: u64, charged: u64) {
        let grace = if charged > bytes { charged & !1 } else { 0 };
        if grace != 0 {
            self.grace.store(grace | 1, SeqCst);
        }
        self.max.store(bytes, SeqCst);
        self.grace.store(grace, SeqCst);
    }

    /// Whether nobody is to be killed although the group exceeds its limit: what exceeds it was there when the limit was set, or
    /// the limit has changed since `over` was found. (A quarter more than was there is allowed, as incompressible pages take more
    /// room in the pool than before.)
    pub(crate) fn spares(&self, over: Over) -> bool {
        // The grace first: if the limit is still the one that was exceeded, that grace was its own. See `set_max`.
        let grace = self.grace.load(SeqCst);
        over.charge as u64 <= (grace / 4).saturating_mul(5) || self.max.load(SeqCst) != over.max as u64
    }
}

impl Pager {
    /// The charge that reclaim stays below: the least `memory.high` or `memory.max` of the chain.
    pub fn limit(&self) -> usize {
        self.chain_nodes().map(|(_, n)| n.target()).min().unwrap_or(NO_LIMIT) as usize
    }

    /// What the other members charge against that limit, and the part of that in their pools (bytes).
    pub(crate) fn others_hold_now(&self) -> (usize, usize) {
        let tightest = self.chain_nodes().enumerate().min_by_key(|(_, (_, n))| n.target());
        let others = self.others_use();
        tightest.map_or((0, 0), |(level, _)| (others.charge[level], others.pool[level]))
    }

    fn chain_nodes(&self) -> impl Iterator<Item = (usize, &Node)> {
        self.chain.nodes().iter().map(|at| (*at, &self.group.nodes[*at]))
    }

    /// Bytes that count against the limit in this process.
    pub fn charged(&self, s: &State) -> usize {
        let held = if self.own_frames { s.known_bytes() } else { s.rss };
        if self.group.pool_uncharged.load(Relaxed) != 0 { held.saturating_sub(s.pool.held_bytes()) } else { held }
    }

    /// Bytes by which the group is over (positive) or under reclaim's target, in the group of the chain that is worst off. Counts
    /// what other members plan and may have filled already.
    pub fn excess(&self, s: &State) -> isize {
        if self.lets_go() {
            return isize::MIN / 2;
        }
        self.excesses(s, self.others_charge_soon()).map(|(_, over)| over).max().unwrap_or(isize::MIN / 2)
    }

    /// The groups of the chain, and by how many bytes each is over (positive) or under reclaim's target, if the other members are
    /// charged `others`.
    pub(crate) fn excesses(&self, s: &State, others: [usize; DEPTH]) -> impl Iterator<Item = (usize, isize)> {
        let own = self.charged(s);
        let levels = self.chain_nodes().zip(others);
        levels.map(move |((node, n), others)| (node, (own + others) as isize - n.target() as isize))
    }

    /// How far a process that charges `own` may grow before its memory must be managed (0: now), in the worst group of the chain;
    /// and how far it may grow until it should look again. (Others grow too: while this process uses a second of CPU time each of
    /// them may.)
    ///
    /// `engage_at` gives the charge at which a process engages for a limit. It engages at once if `planned` more bytes, and what
    /// others have planned, would not fit below the charge that managed members keep (`over`; they count with all of it).
    ///
    /// The story: children of 40 MiB each ended one after the other, and their parent filled as much. Below the limit nobody
    /// searched for dead members, so of 64 MiB the parent had 24 left, and became managed.
    pub fn headroom(&self, own: usize, planned: usize, engage_at: impl Fn(usize) -> usize) -> (usize, usize) {
        let (room, until_look) = self.headroom_beside(own, planned, &engage_at);
        if room == 0 && self.bury_the_dead(false) {
            return self.headroom_beside(own, planned, &engage_at);
        }
        (room, until_look)
    }

    fn headroom_beside(&self, own: usize, planned: usize, engage_at: impl Fn(usize) -> usize) -> (usize, usize) {
        let others = self.others_use();
        let (mut room, mut until_look) = (usize::MAX, usize::MAX);
        for (i, (_, n)) in self.chain_nodes().enumerate() {
            let (charge, limit) = (own + others.charge[i], n.target() as usize);
            let tight = charge + planned + others.planned[i] + 2 * self.margin() > limit;
            let left = if tight { 0 } else { engage_at(limit).saturating_sub(charge) };
            room = room.min(left);
            until_look = until_look.min(left.saturating_sub(others.planned[i]));
        }
        (room, until_look / (1 + self.others_count()))
    }

    /// Raises the peaks of the chain's groups. This process charges `own`, of which `resident` is not in the pool, and has `out`
    /// bytes out of RAM.
    ///
    /// The story: a program of 40 MiB had a child that held as much and had ended. The reported peak was 81 MiB.
    pub fn raise_peaks(&self, own: usize, resident: usize, out: usize) {
        let mut others = self.others_use();
        let sums = |others: &Others, i: usize| {
            let held = resident + others.resident[i] + out + others.swapped[i];
            ((own + others.charge[i]) as u64, held as u64)
        };
        let raises = |(i, (_, n)): (usize, (usize, &Node))| {
            let (charge, held) = sums(&others, i);
            charge > n.peak.load(Relaxed) || held > n.peak_held.load(Relaxed)
        };
        if self.chain_nodes().enumerate().any(raises) && self.bury_the_dead(false) {
            others = self.others_use();
        }
        for (i, (_, n)) in self.chain_nodes().enumerate() {
            let (charge, held) = sums(&others, i);
            // If the limit was just set below the charge, the peak was not reached under that limit.
            if n.peak.fetch_max(charge, Relaxed) < charge && n.grace.load(Relaxed) == 0 {
                n.peak_max.store(n.max.load(Relaxed), Relaxed);
            }
            n.peak_held.fetch_max(held, Relaxed);
        }
    }

    /// The groups of the chain that exceed their `memory.max`, nearest first.
    ///
    /// The story: it was only the one exceeded by most. A member of `web/worker` was far above that group's limit, which it was
    /// allowed to exceed. So it was above the limit of `web` as well, whose members were to wait or be killed; but `web` was
    /// never even reported as full.
    pub fn over_max(&self, s: &State) -> impl Iterator<Item = Over> {
        let others = if self.lets_go() { None } else { Some(self.others_charge()) };
        let (own, chain) = (self.charged(s), self.chain_nodes().enumerate());
        chain.filter_map(move |(level, (node, n))| {
            let over = Over { level, node, charge: own + others?[level], max: n.max.load(Relaxed) as usize };
            (over.charge > over.max).then_some(over)
        })
    }

    /// Counts a reclaim because the charge is about to exceed a group's `memory.max` (as the kernel counts it: at most `margin`
    /// bytes are left, and mostly it never gets there), or because it exceeds `memory.high`.
    pub fn count_excess(&self, s: &State, margin: usize) {
        // Read them before the limits are read and the charges summed up: see `Node::set_max`.
        let graces = self.chain.nodes().iter().map(|at| self.group.nodes[*at].grace.load(Acquire));
        let mut grace = [0; DEPTH];
        grace.iter_mut().zip(graces).for_each(|(to, grace)| *to = grace);
        let (own, others) = (self.charged(s), self.others_charge());
        for (i, (node, n)) in self.chain_nodes().enumerate() {
            let (charge, max, high) = ((own + others[i]) as u64, n.max.load(Relaxed), n.high.load(Relaxed));
            if charge <= max && grace[i] != 0 {
                let _ = n.grace.compare_exchange(grace[i], 0, Relaxed, Relaxed);
            }
            // Below a `memory.high`, that limit takes memory out first.
            if charge > max || (max <= high && charge + margin as u64 > max) {
                self.group.count(node, |e| &e.max, 1);
            } else if charge > high {
                self.group.count(node, |e| &e.high, 1);
            }
        }
    }

    /// How long a fault is to wait because the charge is above `memory.high`: in proportion to the excess (nanoseconds).
    pub fn throttle_ns(&self, s: &State) -> u64 {
        if self.chain_nodes().all(|(_, n)| n.high.load(Relaxed) >= NO_LIMIT) {
            return 0;
        }
        let (own, others) = (self.charged(s), self.others_charge());
        let wait = |(i, (_, n)): (usize, (usize, &Node))| throttle((own + others[i]) as u64, n.high.load(Relaxed));
        self.chain_nodes().enumerate().map(wait).max().unwrap_or(0)
    }

    /// The same for a thread that allocates, which may not take the pager's lock: uses the charge last published.
    pub fn throttle_allocation(&self) {
        let (own, others) = (bytes_in(&self.me().rss), self.others_charge());
        let wait =
            self.chain_nodes().enumerate().map(|(i, (_, n))| throttle(own + others[i] as u64, n.high.load(Relaxed)));
        let wait = wait.max().unwrap_or(0);
        if wait > 0 {
            thread::sleep_ns(wait);
        }
    }

    /// Whether the groups' `memory.zswap.max` let the pool grow by `bytes`. Counts refusals.
    pub fn may_zswap(&self, s: &State, bytes: usize) -> bool {
        if self.chain_nodes().all(|(_, n)| n.zswap_max.load(Relaxed) >= NO_LIMIT) {
            return true;
        }
        let (own, others) = (s.pool.held_bytes(), self.others_use());
        for (i, (node, n)) in self.chain_nodes().enumerate() {
            if (own + others.pool[i] + bytes) as u64 > n.zswap_max.load(Relaxed) {
                self.group.count(node, |e| &e.zswap_max, 1);
                self.zswap_full.store(true, Relaxed);
                return false;
            }
        }
        true
    }

    /// Whether nothing may be in the pool, as a group's `memory.zswap.max` is less than a page: pages then go to the swap file
    /// directly.
    pub fn pool_is_forbidden(&self) -> bool {
        self.chain_nodes().any(|(_, n)| n.zswap_max.load(Relaxed) < PAGE as u64)
    }

    /// Whether the pool was refused room, would be refused again, and the swap file does not take those pages instead. Nothing
    /// that needs room in the pool is worth trying then.
    pub fn zswap_is_full(&self, s: &State) -> bool {
        if !self.zswap_full.load(Relaxed) {
            return false;
        }
        let (own, others) = (s.pool.held_bytes(), self.others_use());
        let mut levels = self.chain_nodes().enumerate();
        let full = levels.any(|(i, (_, n))| (own + others.pool[i] + PAGE) as u64 > n.zswap_max.load(Relaxed));
        self.zswap_full.store(full, Relaxed);
        full && !(self.pool_is_forbidden() && self.goes_directly(s))
    }

    /// Whether the groups' `memory.swap.max` let `bytes` more into the swap file; `own` bytes there are this process's already.
    /// Counts refusals.
    pub fn may_swap(&self, own: usize, bytes: usize) -> bool {
        let refuses = self.without_swap_room(own, bytes);
        if let Some(node) = refuses {
            self.group.count(node, |e| &e.swap_max, 1);
        }
        refuses.is_none()
    }

    /// The same, without counting.
    pub fn has_swap_room(&self, own: usize, bytes: usize) -> bool {
        self.without_swap_room(own, bytes).is_none()
    }

    /// The first group of the chain that would then exceed its `memory.swap.max`.
    fn without_swap_room(&self, own: usize, bytes: usize) -> Option<usize> {
        let others = self.others_use();
        let mut levels = self.chain_nodes().enumerate();
        let refuses = levels.find(|(i, (_, n))| (own + others.swap[*i] + bytes) as u64 > n.swap_max.load(Relaxed));
        refuses.map(|(_, (node, _))| node)
    }

    /// Whether all groups of the chain let the pool be written back (`memory.zswap.writeback`).
    pub fn may_write_back(&self) -> bool {
        self.chain_nodes().all(|(_, n)| n.zswap_writeback.load(Relaxed) != 0)
    }

    /// Counts pages that neither the pool nor the swap file could take.
    pub fn count_swap_fail(&self, pages: u64) {
        self.group.count(self.node, |e| &e.swap_fail, pages);
    }

    /// Makes faults wait for reclaim when the charge is far above the `memory.max` of a group with `--on-full=wait`, even if
    /// reclaim does not know yet that there is nothing more to take.
    pub fn hold_back(&self, s: &State) {
        // This comes before anything is summed up, as it runs at every fault.
        let waits = |n: &Node| n.on_full.load(Relaxed) == ON_FULL_WAIT;
        if !self.chain_nodes().any(|(_, n)| waits(n)) {
            return;
        }
        let mut far = self.over_max(s).filter(|o| o.charge - o.max > (o.max / 16).max(FAR_BYTES));
        if far.any(|o| waits(&self.group.nodes[o.node])) {
            self.waits.store(true, SeqCst);
        }
    }

    /// Whether faults are to wait for room (`--on-full=wait`). Reads the RSS again, which may have changed.
    pub fn must_wait(&self, s: &mut State) -> bool {
        if !self.waits.load(SeqCst) {
            return false;
        }
        s.rss = self.rss_now(s);
        let wait = self.over_max(s).any(|o| self.group.nodes[o.node].on_full.load(Relaxed) == ON_FULL_WAIT);
        self.waits.store(wait, SeqCst);
        wait
    }
}

/// The wait at a charge above `high` (nanoseconds).
fn throttle(charge: u64, high: u64) -> u64 {
    let over = charge.saturating_sub(high);
    if over == 0 {
        return 0;
    }
    let wait = u128::from(over) * u128::from(THROTTLE_NS) / u128::from(high.max(1));
    let wait = wait.min(THROTTLE_MOST_NS.into()) as u64;
    if wait < THROTTLE_LEAST_NS { 0 } else { wait }
}

#[cfg(test)]
mod tests {
    use super::{THROTTLE_LEAST_NS, THROTTLE_MOST_NS, THROTTLE_NS, throttle};
    use crate::testing;
    use core::sync::atomic::Ordering::*;

    /// See [`super::Node::spares`].
    #[test]
    fn nobody_is_killed_for_a_limit_that_no_longer_holds() {
        let p = testing::pager(64 << 20);
        let n = &p.group.nodes[0];
        let over = |max: usize| super::Over { level: 0, node: 0, charge: 40 << 20, max };
        assert!(!n.spares(over(64 << 20)));
        n.set_max(32 << 20, 40 << 20);
        let exceeds = over(32 << 20);
        assert!(n.spares(exceeds));
        assert!(!n.spares(super::Over { charge: 51 << 20, ..exceeds }), "more than a quarter above what was there");
        // A member has found the group over its limit, and the limit is raised before it kills somebody.
        n.set_max(48 << 20, 40 << 20);
        assert!(n.spares(exceeds));
        n.set_max(32 << 20, 20 << 20);
        assert!(!n.spares(exceeds));
    }

    /// See [`super::Node::set_max`].
    #[test]
    fn what_is_spared_when_a_limit_shrinks_is_not_forgotten() {
        const TIMES: u32 = 3_000;
        const CHARGED: u64 = 40 << 20;
        let p = testing::pager(64 << 20);
        let n = &p.group.nodes[0];
        let ends = core::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                let mut s = p.state.lock();
                s.rss = CHARGED as usize;
                while !ends.load(Relaxed) {
                    p.count_excess(&s, 0);
                }
            });
            let mut forgotten = 0;
            for round in 0..u64::from(TIMES) {
                // The charge is another one each time, as it would be.
                let charged = CHARGED + 2 * round;
                n.set_max(64 << 20, charged);
                while n.grace.load(Relaxed) != 0 {
                    std::thread::yield_now();
                }
                n.set_max(32 << 20, charged);
                // A member that has still read the former limit is through by then.
                let counted = n.events.max.load(Relaxed);
                while n.events.max.load(Relaxed) < counted + 2 {
                    std::thread::yield_now();
                }
                forgotten += u32::from(n.grace.load(Relaxed) != charged);
            }
            ends.store(true, Relaxed);
            assert_eq!(forgotten, 0);
        });
        // Once the limit is met the grace is forgotten.
        p.state.lock().rss = 20 << 20;
        p.count_excess(&p.state.lock(), 0);
        assert_eq!(n.grace.load(Relaxed), 0);
    }

    #[test]
    fn waits_are_in_proportion_to_the_excess() {
        let high = 100 << 20;
        assert_eq!(throttle(high, high), 0);
        assert_eq!(throttle(0, high), 0);
        assert_eq!(throttle(high + 4096, high), 0, "too short to be worth it");
        let (one, two) = (throttle(high + (1 << 20), high), throttle(high + (2 << 20), high));
        assert_eq!(one, THROTTLE_NS / 100);
        assert!(one >= THROTTLE_LEAST_NS && two == 2 * one);
        assert_eq!(throttle(2 * high, high), THROTTLE_NS);
        assert_eq!(throttle(100 * high, high), THROTTLE_MOST_NS);
        assert_eq!(throttle(1 << 60, 0), THROTTLE_MOST_NS);
    }
}

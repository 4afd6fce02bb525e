//! The limits of the group, and what happens at each.
//!
//! ```text
//!        memory.high                        memory.max
//! ────────────┼──────────────────────────────────┼───────────────▶ charge: resident + pool + metadata
//!  nothing    │ reclaim; the faulting threads    │ reclaim; when nothing more can be taken out:
//!             │ wait in proportion to the excess │ --on-full: see `full`
//! ```
//! Every group above a member's has its limits too: reclaim goes by the one that is exceeded most, and each is full by itself. Limits are read anew each
//! time, so changing one takes effect at once; `uzswap ctl` wakes the members for it.
//!
//! `memory.zswap.max` and `memory.swap.max` bound what is in the pool and in the swap file: [`Pager::may_zswap`] and
//! [`Pager::may_swap`] are asked before something is put there.

use crate::frames::arena::PAGE;
use crate::group::member::Others;
use crate::group::{DEPTH, NO_LIMIT, Node, ON_FULL_WAIT};
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_sys::thread;

/// What each fault waits when the charge is twice `memory.high`, and in proportion otherwise: at 10 % above it a program
/// that takes page after page gets 2 MB/s.
const THROTTLE_NS: u64 = 20_000_000;
/// The longest wait.
const THROTTLE_MOST_NS: u64 = 100_000_000;
/// A wait shorter than this is not worth a system call.
const THROTTLE_LEAST_NS: u64 = 50_000;
/// How far above `memory.max`, where that is little, faults go on before they wait.
const FAR_BYTES: usize = 4 << 20;

/// A group of the chain whose `memory.max` is exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Over {
    /// Which of the chain it is, from the nearest.
    pub level: usize,
    /// The group.
    pub node: usize,
    /// Its charge.
    pub charge: usize,
    /// Its limit.
    pub max: usize,
}

impl Node {
    /// Sets `memory.max` where so much is charged. Nobody is killed for what is above it now, if it cannot be taken out.
    ///
    /// The story: a member had just read the former limit, which was kept, when that was said; and took it back. So it is said once more,
    /// by another number, which only who has read the new limit takes back.
    pub fn set_max(&self, bytes: u64, charged: u64) {
        let grace = if charged > bytes { charged & !1 } else { 0 };
        self.grace.store(grace | u64::from(grace != 0), SeqCst);
        self.max.store(bytes, SeqCst);
        self.grace.store(grace, SeqCst);
    }
}

impl Pager {
    /// The charge that reclaim keeps below: the least `memory.high` or `memory.max` of the chain.
    pub fn limit(&self) -> usize {
        self.chain_nodes().map(|(_, n)| n.target()).min().unwrap_or(NO_LIMIT) as usize
    }

    /// What the other members are charged of that limit, and what of that is their pools (bytes).
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

    /// Bytes the group is over (positive) or under what reclaim keeps, what others plan and may have filled already included; of the
    /// chain, the group that is worst off.
    pub fn excess(&self, s: &State) -> isize {
        if self.lets_go() {
            return isize::MIN / 2;
        }
        self.excesses(s, self.others_charge_soon()).map(|(_, over)| over).max().unwrap_or(isize::MIN / 2)
    }

    /// The groups of the chain, and by how many bytes each is over (positive) or under what reclaim keeps, where the other members are
    /// charged with so much.
    pub(crate) fn excesses(&self, s: &State, others: [usize; DEPTH]) -> impl Iterator<Item = (usize, isize)> {
        let own = self.charged(s);
        let levels = self.chain_nodes().zip(others);
        levels.map(move |((node, n), others)| (node, (own + others) as isize - n.target() as isize))
    }

    /// How far a process that charges `own` may grow, in the worst group of the chain, before memory must be managed
    /// (0: now), where `engage_at` says at which charge of a limit that is: at once where `planned` more, and what others
    /// have planned, would not fit below where those that are managed keep the limit (`over`: they count with all of it). And
    /// how far until it should look again, as others grow too: while this process uses a second of CPU time each of them may.
    ///
    /// The story: children of 40 MiB each ended, one after the other, and their parent filled as much. Who had died was not looked for below
    /// the limit, so of 64 MiB the parent had 24 left, and was managed.
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

    /// Raises the peaks of the chain's groups, where this process charges `own`, of which `resident` is not the pool,
    /// and has `out` bytes out of RAM.
    ///
    /// The story: of a program of 40 MiB whose child had held as much, and had ended, a peak of 81 MiB was told.
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
            // (Where the limit was just set below the charge that is not what it was seen under.)
            if n.peak.fetch_max(charge, Relaxed) < charge && n.grace.load(Relaxed) == 0 {
                n.peak_max.store(n.max.load(Relaxed), Relaxed);
            }
            n.peak_held.fetch_max(held, Relaxed);
        }
    }

    /// The groups of the chain whose `memory.max` is exceeded, nearest first.
    ///
    /// The story: it was the one that is exceeded by most. A member of `web/worker` was far above that group's limit, which it was to
    /// exceed, and so it was above that of `web`, which was to wait, or to have somebody killed: that was never even said to be full.
    pub fn over_max(&self, s: &State) -> impl Iterator<Item = Over> {
        let others = if self.lets_go() { None } else { Some(self.others_charge()) };
        let (own, chain) = (self.charged(s), self.chain_nodes().enumerate());
        chain.filter_map(move |(level, (node, n))| {
            let over = Over { level, node, charge: own + others?[level], max: n.max.load(Relaxed) as usize };
            (over.charge > over.max).then_some(over)
        })
    }

    /// Counts a reclaim because of a group's `memory.max`, which the charge is about to exceed (the kernel's words: it has
    /// no more than `margin` bytes to go, and mostly never gets there), or because its `memory.high` is exceeded.
    pub fn count_excess(&self, s: &State, margin: usize) {
        // (Before the limits are read and what is charged is summed up: see `Node::set_max`.)
        let graces = self.chain.nodes().iter().map(|at| self.group.nodes[*at].grace.load(Acquire));
        let mut grace = [0; DEPTH];
        grace.iter_mut().zip(graces).for_each(|(to, grace)| *to = grace);
        let (own, others) = (self.charged(s), self.others_charge());
        for (i, (node, n)) in self.chain_nodes().enumerate() {
            let (charge, max, high) = ((own + others[i]) as u64, n.max.load(Relaxed), n.high.load(Relaxed));
            if charge <= max && grace[i] != 0 {
                let _ = n.grace.compare_exchange(grace[i], 0, Relaxed, Relaxed);
            }
            // (Below a `memory.high` it is that which takes memory out first.)
            if charge > max || (max <= high && charge + margin as u64 > max) {
                self.group.count(node, |e| &e.max, 1);
            } else if charge > high {
                self.group.count(node, |e| &e.high, 1);
            }
        }
    }

    /// How long a fault is to wait because the charge is above `memory.high`: in proportion to the excess.
    pub fn throttle_ns(&self, s: &State) -> u64 {
        if self.chain_nodes().all(|(_, n)| n.high.load(Relaxed) >= NO_LIMIT) {
            return 0;
        }
        let (own, others) = (self.charged(s), self.others_charge());
        let wait = |(i, (_, n)): (usize, (usize, &Node))| throttle((own + others[i]) as u64, n.high.load(Relaxed));
        self.chain_nodes().enumerate().map(wait).max().unwrap_or(0)
    }

    /// The same for a thread that is allocating, which may not take the pager's lock: as last published.
    pub fn throttle_allocation(&self) {
        let (own, others) = (self.me().rss.load(Relaxed), self.others_charge());
        let wait =
            self.chain_nodes().enumerate().map(|(i, (_, n))| throttle(own + others[i] as u64, n.high.load(Relaxed)));
        let wait = wait.max().unwrap_or(0);
        if wait > 0 {
            thread::sleep_ns(wait);
        }
    }

    /// Whether the pool may grow by `bytes`: the groups' `memory.zswap.max`. Refusals are counted.
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

    /// Whether nothing may be in the pool (`memory.zswap.max` of a group is less than a page): what leaves goes to the swap file directly.
    pub fn pool_is_forbidden(&self) -> bool {
        self.chain_nodes().any(|(_, n)| n.zswap_max.load(Relaxed) < PAGE as u64)
    }

    /// Whether the pool was refused room, and would be still, and the swap file does not take what it is refused: nothing that needs any
    /// is then worth trying.
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

    /// Whether `bytes` more may be put in the swap file: the groups' `memory.swap.max`, of which `own` are this
    /// process's already. Refusals are counted.
    pub fn may_swap(&self, own: usize, bytes: usize) -> bool {
        let refuses = self.without_swap_room(own, bytes);
        if let Some(node) = refuses {
            self.group.count(node, |e| &e.swap_max, 1);
        }
        refuses.is_none()
    }

    /// The same, only asked.
    pub fn has_swap_room(&self, own: usize, bytes: usize) -> bool {
        self.without_swap_room(own, bytes).is_none()
    }

    /// The first group of the chain that would then have more in the swap file than its `memory.swap.max`.
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

    /// Counts pages that could go nowhere.
    pub fn count_swap_fail(&self, pages: u64) {
        self.group.count(self.node, |e| &e.swap_fail, pages);
    }

    /// Far above a `memory.max` whose members are to wait (`--on-full=wait`), faults wait for reclaim, whether or not it
    /// knows yet that there is nothing more to take.
    pub fn hold_back(&self, s: &State) {
        // (Before anything is summed up: this is asked at every fault.)
        let waits = |n: &Node| n.on_full.load(Relaxed) == ON_FULL_WAIT;
        if !self.chain_nodes().any(|(_, n)| waits(n)) {
            return;
        }
        let mut far = self.over_max(s).filter(|o| o.charge - o.max > (o.max / 16).max(FAR_BYTES));
        if far.any(|o| waits(&self.group.nodes[o.node])) {
            self.waits.store(true, SeqCst);
        }
    }

    /// Whether faults are to wait for room (`--on-full=wait`). Reads what is resident, which may have changed.
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

/// The wait at a charge above `high`.
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
                // (Each time it is another charge, as it would be.)
                let charged = CHARGED + 2 * round;
                n.set_max(64 << 20, charged);
                while n.grace.load(Relaxed) != 0 {
                    std::thread::yield_now();
                }
                n.set_max(32 << 20, charged);
                // (Whoever has still read the former limit is through by then.)
                let counted = n.events.max.load(Relaxed);
                while n.events.max.load(Relaxed) < counted + 2 {
                    std::thread::yield_now();
                }
                forgotten += u32::from(n.grace.load(Relaxed) != charged);
            }
            ends.store(true, Relaxed);
            assert_eq!(forgotten, 0);
        });
        // When it is met it is forgotten.
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

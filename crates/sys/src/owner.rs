//! A place in shared memory that belongs to one living process at a time: who has it, who takes it over from a dead
//! process, and who only cleans up behind one. There is no lock, as any process may be killed at any instruction.
//!
//! ```text
//!        take ─▶ taken by X ─ X cleans up ─▶ settle ─▶ X's, or free
//!         ▲          │                            │
//!         │      X is killed                  X is killed
//!         └──────────┴────────────────────────────┘
//! ```
//! The word is 0 if the place is free. Otherwise it is the identity of a process, with a mark while that process cleans
//! up what another left there. The data beside the word (a member's charges) belongs to the process named, marked or
//! not: only that process writes it. While the mark is set the data is still the previous owner's, so readers must not
//! be told that X has it.
//!
//! Invariants: a word that names another process changes only when that process is dead, and by one compare-exchange,
//! so of several that want the place one gets it. A dead process never comes back (identities are not reused), so the
//! word cannot return to an old value. Whoever sees the place free, or with its next owner, sees the cleaned-up data
//! (release and acquire). (Modelled with loom below.)

use crate::process::Identity;
use core::sync::atomic::Ordering::*;

#[cfg(not(loom))]
use core::sync::atomic::AtomicU64;
#[cfg(loom)]
use loom::sync::atomic::AtomicU64;

/// Mark in the word: the process named is only cleaning up. (The bit is above all pids, which have 22 bits.)
pub const CLEANS: u64 = 1 << 31;

/// The owner of the place, if any; `None` while somebody cleans it up.
pub fn of(owner: &AtomicU64) -> Option<Identity> {
    let raw = owner.load(Acquire);
    Identity::from_raw(raw).filter(|_| raw & CLEANS == 0)
}

/// Whether this process has left its mark on the place, as when it executed another program. `Some(true)`: it owned the
/// place; `Some(false)`: it was only cleaning up there.
pub fn is_left_by(owner: &AtomicU64, me: Identity) -> Option<bool> {
    let raw = owner.load(Acquire);
    (raw & !CLEANS == me.raw()).then_some(raw & CLEANS == 0)
}

/// Takes the place to clean it up, if `may` agrees; `may` gets the process that the word names, which must be dead, or
/// `None` if the place is free. From then on the data beside the word is the caller's until [`settle`]. The caller is
/// `me`: the process, one thread of it at a time.
pub fn take(owner: &AtomicU64, me: Identity, may: impl FnOnce(Option<Identity>) -> bool) -> bool {
    let raw = owner.load(Acquire);
    // A mark without a process is a stray word; whoever asks is told of a process that there cannot be.
    let named = if raw == CLEANS { raw } else { raw & !CLEANS };
    may(Identity::from_raw(named)) && owner.compare_exchange(raw, me.raw() | CLEANS, AcqRel, Relaxed).is_ok()
}

/// Ends the clean-up: from now on the place belongs to `whose`, or is free. Only for a caller of [`take`].
pub fn settle(owner: &AtomicU64, whose: Option<Identity>) {
    owner.store(whose.map_or(0, Identity::raw), Release);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn who_takes_a_place_has_it_when_it_has_been_cleaned_up() {
        let [dead, me, other] = [7, 8, 9].map(|raw| Identity::from_raw(raw << 32 | raw).unwrap());
        let owner = AtomicU64::new(dead.raw());
        assert_eq!(of(&owner), Some(dead));
        assert!(!take(&owner, me, |who| who != Some(dead)) && of(&owner) == Some(dead), "it was not to be had");
        assert!(take(&owner, me, |who| who == Some(dead)));
        assert_eq!((of(&owner), is_left_by(&owner, me), is_left_by(&owner, dead)), (None, Some(false), None));
        assert!(take(&owner, other, |who| who == Some(me)), "who cleans up may die as well");
        settle(&owner, Some(other));
        assert_eq!((of(&owner), is_left_by(&owner, other)), (Some(other), Some(true)));
        settle(&owner, None);
        assert!(of(&owner).is_none() && take(&owner, me, |who| who.is_none()));
    }

    /// The story: pids of 22 bits are in the lower half of an identity, so none of them has the mark.
    #[test]
    fn the_mark_is_no_part_of_an_identity() {
        let most = std::fs::read_to_string("/proc/sys/kernel/pid_max").unwrap().trim().parse::<u64>().unwrap();
        assert!(most <= 1 << 22 && Identity::own().raw() & CLEANS == 0);
    }
}

/// Processes that take a place, clean it up and are killed on the way, in every interleaving:
/// `RUSTFLAGS="--cfg loom" cargo test --release -p uzswap-sys --lib -- owner`.
#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicBool;
    use std::sync::Arc as Std;
    use std::sync::atomic::AtomicUsize;

    const DEAD: usize = 0;
    const A: usize = 1;
    const B: usize = 2;
    const C: usize = 3;
    /// What each is charged, in any of the figures: a sum tells whose charges are in it.
    const CHARGES: [u64; 4] = [1, 10, 100, 1000];

    fn identity(who: usize) -> Identity {
        Identity::from_raw(1 << 32 | (who as u64 + 1)).unwrap()
    }

    /// A place, several figures charged there, and who has been killed.
    struct World<const FIGURES: usize> {
        owner: AtomicU64,
        charges: [AtomicU64; FIGURES],
        killed: [AtomicBool; 4],
    }

    impl<const FIGURES: usize> World<FIGURES> {
        /// A place that belongs to a killed process.
        fn new() -> Arc<Self> {
            Arc::new(Self {
                owner: AtomicU64::new(identity(DEAD).raw()),
                charges: core::array::from_fn(|_| AtomicU64::new(CHARGES[DEAD])),
                killed: core::array::from_fn(|who| AtomicBool::new(who == DEAD)),
            })
        }

        /// What the kernel would say.
        fn is_dead(&self, who: Identity) -> bool {
            self.killed[who.pid() as usize - 1].load(SeqCst)
        }

        /// Takes the place, to have it or only to clean up for others; is killed before step `dies`. Returns whether it
        /// has the place, alive.
        fn claim(&self, who: usize, joins: bool, dies: usize) -> bool {
            let mut step = 0;
            let mut lives = || {
                step += 1;
                let lives = step <= dies;
                if !lives {
                    self.killed[who].store(true, SeqCst);
                }
                lives
            };
            if !take(&self.owner, identity(who), |before| before.map_or(joins, |before| self.is_dead(before))) {
                return false;
            }
            // Nobody else may write here.
            let mine = || assert_eq!(self.owner.load(SeqCst) & !CLEANS, identity(who).raw(), "another has it too");
            for charge in &self.charges {
                if !lives() {
                    return false;
                }
                mine();
                charge.store(0, Relaxed);
            }
            if !lives() {
                return false;
            }
            mine();
            settle(&self.owner, joins.then_some(identity(who)));
            if joins {
                for charge in &self.charges {
                    if !lives() {
                        return false;
                    }
                    mine();
                    charge.store(CHARGES[who], Relaxed);
                }
            }
            joins
        }

        /// What a reader sees: the owner, and its charges.
        fn read(&self) -> (Option<Identity>, [u64; FIGURES]) {
            let who = of(&self.owner);
            (who, core::array::from_fn(|i| self.charges[i].load(Relaxed)))
        }

        /// All have run or were killed: `C` returns once more what is left to return, and then everything must agree.
        fn check(&self, has: &[usize]) {
            assert!(has.len() < 2, "two have it: {has:?}");
            match has {
                [who] => {
                    assert_eq!(
                        self.read(),
                        (Some(identity(*who)), [CHARGES[*who]; FIGURES]),
                        "it is charged with what it said"
                    );
                    assert!(!self.claim(C, true, usize::MAX), "nobody takes it from the living");
                }
                _ => {
                    assert!(of(&self.owner).is_none_or(|who| self.is_dead(who)));
                    self.claim(C, false, usize::MAX);
                    assert_eq!((self.owner.load(SeqCst), self.read().1), (0, [0; FIGURES]), "all is returned");
                }
            }
        }
    }

    fn explore(preemptions: usize, run: impl Fn() + Sync + Send + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(preemptions);
        model.check(run);
    }

    /// Two want the same dead member's place. Each may be killed at any step, and the other then finds it dead.
    #[test]
    fn one_of_two_gets_it_whenever_they_are_killed() {
        let (got, both) = (Std::new([0, 1].map(|_| AtomicUsize::new(0))), Std::new(AtomicUsize::new(0)));
        // Five steps after the take: two figures cleared, one step to own it, two figures set.
        for (a, b) in (0..=5).flat_map(|a| (0..=5).map(move |b| (a, b))) {
            let (got, both) = (got.clone(), both.clone());
            explore(3, move || {
                let world = World::<2>::new();
                let threads = [(A, a), (B, b)].map(|(who, dies)| {
                    let world = world.clone();
                    loom::thread::spawn(move || (world.claim(who, true, dies), who))
                });
                let ended = threads.map(|thread| thread.join().unwrap());
                let has: Vec<usize> = ended.into_iter().filter(|(has, _)| *has).map(|(_, who)| who).collect();
                has.iter().for_each(|who| _ = got[who - 1].fetch_add(1, Relaxed));
                both.fetch_add(usize::from(has.is_empty()), Relaxed);
                world.check(&has);
            });
        }
        assert!(got.iter().all(|n| n.load(Relaxed) > 0) && both.load(Relaxed) > 0, "each case was met");
    }

    /// One takes the place to have it, another returns the charges of whatever dead process it finds there, and either
    /// may be killed. A reader sums up meanwhile, and must never attribute a charge to the wrong process.
    #[test]
    fn who_sums_up_counts_nobody_twice() {
        let seen = Std::new([0, 1, 2].map(|_| AtomicUsize::new(0)));
        for (a, b) in (0..=3).flat_map(|a| (0..=2).map(move |b| (a, b))) {
            let seen = seen.clone();
            explore(2, move || {
                let world = World::<1>::new();
                let claims = [(A, true, a), (B, false, b)].map(|(who, joins, dies)| {
                    let world = world.clone();
                    loom::thread::spawn(move || world.claim(who, joins, dies))
                });
                let sums_up = {
                    let world = world.clone();
                    loom::thread::spawn(move || world.read())
                };
                let (who, charges) = sums_up.join().unwrap();
                let may = |figure: u64| match who {
                    // It was read before it was returned, or after another has it: at most one of the two.
                    Some(who) if who == identity(DEAD) => [0, CHARGES[DEAD], CHARGES[A]].contains(&figure),
                    Some(who) => who == identity(A) && [0, CHARGES[A]].contains(&figure),
                    None => true,
                };
                assert!(charges.into_iter().all(may), "{who:?} with {charges:?}");
                let kind = who.map_or(2, |who| who.pid() as usize - 1);
                seen[kind].fetch_add(1, Relaxed);
                let [has, _] = claims.map(|thread| thread.join().unwrap());
                world.check(if has { &[A] } else { &[] });
            });
        }
        let seen = [0, 1, 2].map(|kind| seen[kind].load(Relaxed));
        assert!(seen.iter().all(|n| *n > 0), "each case was met: {seen:?}");
    }
}

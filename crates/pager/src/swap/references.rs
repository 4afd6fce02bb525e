//! The steps by which a cluster is claimed, inherited and given up, without a lock. `clusters` says what they are for and who may
//! take them.
//!
//! They are generic over any memory that has such words, so that these very steps run under loom, in every order (below).

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};

/// Bits of an owner word that hold the row.
pub(super) const OWNER_BITS: u32 = 11;
pub(super) const OWNER_MASK: u32 = (1 << OWNER_BITS) - 1;

/// How often the rows are searched while others fork. That many forks do not come one in each search: a member writes nonsense.
const MOST_LOOKS: u32 = 10_000;

/// A word that several processes change; all of them see its changes in one order (sequentially consistent).
pub(crate) trait Word<V> {
    fn load(&self) -> V;
    fn store(&self, value: V);
    fn add(&self, n: V);
    fn or(&self, bits: V);
    fn and(&self, bits: V);
    /// Replaces `old` by `new`; false if the word is not `old`.
    fn replace(&self, old: V, new: V) -> bool;
}

macro_rules! word {
    ($atomic:ty, $value:ty) => {
        impl Word<$value> for $atomic {
            fn load(&self) -> $value {
                self.load(SeqCst)
            }
            fn store(&self, value: $value) {
                self.store(value, SeqCst);
            }
            fn add(&self, n: $value) {
                self.fetch_add(n, SeqCst);
            }
            fn or(&self, bits: $value) {
                self.fetch_or(bits, SeqCst);
            }
            fn and(&self, bits: $value) {
                self.fetch_and(bits, SeqCst);
            }
            fn replace(&self, old: $value, new: $value) -> bool {
                self.compare_exchange(old, new, SeqCst, SeqCst).is_ok()
            }
        }
    };
}
word!(AtomicU32, u32);
word!(AtomicU64, u64);

/// The words, and the steps on them.
pub(crate) trait References {
    type Half: Word<u32>;
    type Whole: Word<u64>;

    fn clusters(&self) -> u32;
    /// One more than the highest row ever used.
    fn used_rows(&self) -> usize;
    /// Number of rows inherited so far.
    fn forks(&self) -> &Self::Half;
    /// A cluster's owner word: a generation, and the claimer's row + 1; 0 there means free.
    fn owner(&self, cluster: u32) -> &Self::Half;
    /// Bits of the 64 clusters from `64 * word` on to which a process was writing when it ended.
    fn late(&self, word: usize) -> &Self::Whole;
    /// Bits of the 64 clusters from `64 * word` on to which a row refers.
    fn bits(&self, row: usize, word: usize) -> &Self::Whole;
    /// The clusters that a row's process is writing to, each + 1.
    fn writing(&self, row: usize) -> &[Self::Half];

    /// Claims the first free cluster for row `me`'s process; a late one only if there is no other.
    fn claim_cluster(&self, me: usize) -> Option<u32> {
        let any = |late: bool| (0..self.clusters()).find(|cluster| self.claim(*cluster, me, late));
        any(false).or_else(|| any(true))
    }

    /// Claims the first `n` adjacent clusters that are free, not late and that the caller `may` use; returns the first of them.
    fn claim_side_by_side(&self, me: usize, n: u32, may: impl Fn(u32) -> bool) -> Option<u32> {
        let all = self.clusters();
        let mut first = 0;
        while first + n <= all {
            let taken = (first..first + n).find(|c| !may(*c) || !self.claim(*c, me, false));
            let Some(taken) = taken else { return Some(first) };
            (first..taken).for_each(|c| self.release_cluster(me, c));
            first = taken + 1;
        }
        None
    }

    /// Claims a cluster if it is free and `late` as given.
    fn claim(&self, cluster: u32, me: usize, late: bool) -> bool {
        // Whoever freed it had said before whether it is late.
        let old = self.owner(cluster).load();
        let taken = (old >> OWNER_BITS).wrapping_add(1) << OWNER_BITS | (me as u32 + 1);
        let free = old & OWNER_MASK == 0 && self.is_late(cluster) == late;
        if !free || !self.owner(cluster).replace(old, taken) {
            return false;
        }
        self.refer(me, cluster);
        true
    }

    /// Gives up row `me`'s reference to a cluster, which is free with the last one.
    fn release_cluster(&self, me: usize, cluster: u32) {
        let owner = self.owner(cluster).load();
        self.bits(me, cluster as usize / 64).and(!(1 << (cluster % 64)));
        if owner & OWNER_MASK != 0 && self.alone_with(me, cluster) {
            let _ = self.owner(cluster).replace(owner, owner & !OWNER_MASK);
        }
    }

    fn refer(&self, row: usize, cluster: u32) {
        self.bits(row, cluster as usize / 64).or(1 << (cluster % 64));
    }

    fn refers(&self, row: usize, cluster: u32) -> bool {
        self.bits(row, cluster as usize / 64).load() & 1 << (cluster % 64) != 0
    }

    /// Whether no other row refers to a cluster. No, if it cannot be told, as rows seem to be inherited all the time.
    fn alone_with(&self, me: usize, cluster: u32) -> bool {
        for _ in 0..MOST_LOOKS {
            let forks = self.forks().load();
            let alone = (0..self.used_rows()).filter(|r| *r != me).all(|row| !self.refers(row, cluster));
            if self.forks().load() == forks {
                return alone;
            }
        }
        false
    }

    /// Whether a process may write to a cluster that it refers to: nobody else reads there, or may still be writing.
    fn may_write(&self, me: usize, cluster: u32) -> bool {
        // The order matters: whoever empties another's row first marks what is late.
        self.alone_with(me, cluster) && !self.is_late(cluster)
    }

    /// Whether a process that has ended may still be writing to a cluster.
    fn is_late(&self, cluster: u32) -> bool {
        self.late(cluster as usize / 64).load() & 1 << (cluster % 64) != 0
    }

    /// Notes that all writes to a cluster have ended; only the caller refers to it.
    fn settled(&self, cluster: u32) {
        self.late(cluster as usize / 64).and(!(1 << (cluster % 64)));
    }

    /// Gives row `to`, which is the caller's, the references of `from`.
    fn inherit(&self, from: usize, to: usize) {
        for word in 0..self.clusters().div_ceil(64) as usize {
            self.bits(to, word).store(self.bits(from, word).load());
        }
        self.forks().add(1);
    }

    /// Empties a row that is the caller's, and frees what nobody refers to any more.
    fn empty(&self, row: usize) {
        // If this process is killed half way, the next one does it.
        for writing in self.writing(row) {
            if let Some(cluster) = writing.load().checked_sub(1).filter(|c| *c < self.clusters()) {
                self.late(cluster as usize / 64).or(1 << (cluster % 64));
            }
            writing.store(0);
        }
        for cluster in 0..self.clusters() {
            let half_claimed = self.owner(cluster).load() & OWNER_MASK == row as u32 + 1;
            if self.refers(row, cluster) || half_claimed {
                self.release_cluster(row, cluster);
            }
        }
    }
}

/// Runs the steps in every order in which a thread is interrupted at most three times.
#[cfg(test)]
mod tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU32 as Half, AtomicU64 as Whole, Ordering::AcqRel};
    use loom::thread;

    // loom takes a sequentially consistent load for an acquiring one, which may see an old value. A read-modify-write that
    // changes nothing does not.
    macro_rules! loomed {
        ($name:ident, $atomic:ty, $value:ty) => {
            struct $name($atomic);

            impl Word<$value> for $name {
                fn load(&self) -> $value {
                    self.0.fetch_add(0, AcqRel)
                }
                fn store(&self, value: $value) {
                    self.0.swap(value, AcqRel);
                }
                fn add(&self, n: $value) {
                    self.0.fetch_add(n, AcqRel);
                }
                fn or(&self, bits: $value) {
                    self.0.fetch_or(bits, AcqRel);
                }
                fn and(&self, bits: $value) {
                    self.0.fetch_and(bits, AcqRel);
                }
                fn replace(&self, old: $value, new: $value) -> bool {
                    self.0.compare_exchange(old, new, AcqRel, AcqRel).is_ok()
                }
            }
        };
    }
    loomed!(Loomed32, Half, u32);
    loomed!(Loomed64, Whole, u64);

    /// Books of one cluster and some rows, each of which writes once at a time.
    struct Books {
        owner: Loomed32,
        late: Loomed64,
        rows: Vec<(Loomed64, [Loomed32; 1])>,
        forks: Loomed32,
    }

    impl Books {
        fn new(rows: usize) -> Self {
            let half = || Loomed32(Half::new(0));
            let rows = (0..rows).map(|_| (Loomed64(Whole::new(0)), [half()])).collect();
            Self { owner: half(), late: Loomed64(Whole::new(0)), rows, forks: half() }
        }

        fn row(&self) -> u32 {
            self.owner.load() & OWNER_MASK
        }
    }

    impl References for Books {
        type Half = Loomed32;
        type Whole = Loomed64;

        fn clusters(&self) -> u32 {
            1
        }
        fn used_rows(&self) -> usize {
            self.rows.len()
        }
        fn forks(&self) -> &Loomed32 {
            &self.forks
        }
        fn owner(&self, _: u32) -> &Loomed32 {
            &self.owner
        }
        fn late(&self, _: usize) -> &Loomed64 {
            &self.late
        }
        fn bits(&self, row: usize, _: usize) -> &Loomed64 {
            &self.rows[row].0
        }
        fn writing(&self, row: usize) -> &[Loomed32] {
            &self.rows[row].1
        }
    }

    /// Runs a model that returns whether all was right. Returns in how many orders it was, and in how many it was not. (A panic
    /// inside loom's model may hang it.)
    fn check(model: impl Fn() -> bool + Sync + Send + 'static) -> [usize; 2] {
        let counts = std::sync::Arc::new([0, 0].map(std::sync::atomic::AtomicUsize::new));
        let seen = counts.clone();
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || _ = seen[usize::from(!model())].fetch_add(1, SeqCst));
        let [right, wrong] = [0, 1].map(|i| counts[i].load(SeqCst));
        println!("right in {right} orders, wrong in {wrong}");
        [right, wrong]
    }

    fn always(model: impl Fn() -> bool + Sync + Send + 'static) {
        let [right, wrong] = check(model);
        assert!(right > 10 && wrong == 0, "right in {right} orders, wrong in {wrong}");
    }

    #[test]
    fn of_two_that_give_a_cluster_up_at_once_one_frees_it_and_not_who_has_it_next() {
        always(|| {
            let books = Arc::new(Books::new(3));
            books.claim(0, 0, false);
            books.inherit(0, 1);
            let (one, next) = (books.clone(), books.clone());
            let one = thread::spawn(move || one.release_cluster(0, 0));
            let next = thread::spawn(move || next.claim(0, 2, false));
            books.release_cluster(1, 0);
            one.join().unwrap();
            match next.join().unwrap() {
                true => books.row() == 3 && books.refers(2, 0) && books.alone_with(2, 0),
                false => books.row() == 0 && (0..3).all(|row| !books.refers(row, 0)),
            }
        });
    }

    /// Whether a cluster is kept for a child that inherits it just now, by these steps. (Its row comes before its parent's, so
    /// that another process that looks may have passed it.)
    fn is_kept(inherit: fn(&Books, usize, usize)) -> bool {
        let (child, parent, other) = (0, 1, 2);
        let books = Arc::new(Books::new(3));
        books.claim(0, parent, false);
        books.inherit(parent, other);
        let forks = books.clone();
        let forks = thread::spawn(move || {
            inherit(&forks, parent, child);
            forks.release_cluster(parent, 0);
        });
        books.release_cluster(other, 0);
        forks.join().unwrap();
        books.row() != 0 && books.refers(child, 0)
    }

    #[test]
    fn what_a_child_inherits_just_now_is_not_free() {
        always(|| is_kept(Books::inherit));
        // If the fork is not counted it may be freed: the model finds that.
        let [_, wrong] = check(|| is_kept(|books, _, child| books.refer(child, 0)));
        assert!(wrong > 0);
    }

    #[test]
    fn what_a_dead_process_had_half_claimed_is_free_again() {
        for bit in [false, true] {
            always(move || {
                let books = Arc::new(Books::new(2));
                // The claimer was killed before it could set its bit, or after.
                books.owner.store(1 << OWNER_BITS | 1);
                if bit {
                    books.refer(0, 0);
                }
                let next = books.clone();
                let next = thread::spawn(move || next.claim(0, 1, false));
                books.empty(0);
                match next.join().unwrap() {
                    true => books.row() == 2 && books.refers(1, 0),
                    false => books.row() == 0 && !books.refers(0, 0),
                }
            });
        }
    }

    #[test]
    fn nobody_writes_where_a_dead_process_may_be_writing_still() {
        always(|| {
            let books = Arc::new(Books::new(3));
            books.claim(0, 0, false);
            books.inherit(0, 1);
            books.writing(0)[0].store(1);
            let (shares, next) = (books.clone(), books.clone());
            let shares = thread::spawn(move || {
                let may = shares.may_write(1, 0);
                shares.release_cluster(1, 0);
                may
            });
            let next = thread::spawn(move || next.claim(0, 2, false));
            books.empty(0);
            let (wrote, claimed) = (shares.join().unwrap(), next.join().unwrap());
            !wrote && !claimed && books.is_late(0) && books.row() == 0 && books.claim(0, 2, true)
        });
    }
}

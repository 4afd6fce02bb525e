//! Tests of the books that say which process has which cluster, used by several processes at once: threads here, each in the name
//! of a process of its own.

use super::clusters::{ClusterMap, ROWS};
use super::references::References;
use crate::testing;
use core::sync::atomic::{AtomicUsize, Ordering::*};
use std::process::{Child, Command};
use std::sync::Barrier;
use uzswap_sys::process::Identity;

/// A thread id that no process has.
const NO_THREAD: u32 = 1 << 23;

/// Processes that exist as long as the test wants them.
struct Processes(Vec<Child>);

impl Processes {
    fn new(n: usize) -> Self {
        Self((0..n).map(|_| Command::new("sleep").arg("600").spawn().expect("a process")).collect())
    }

    fn identity(&self, i: usize) -> Identity {
        // Without the start time, as where /proc cannot be read.
        Identity::from_raw(self.0[i].id().into()).expect("a pid")
    }

    fn end(&mut self, i: usize) {
        self.0[i].kill().expect("a child");
        self.0[i].wait().expect("a child");
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        (0..self.0.len()).for_each(|i| self.end(i));
    }
}

/// Books of a large file, so that emptying a row takes its time.
fn books() -> &'static ClusterMap {
    let map = testing::books();
    map.bytes.store(4 << 30, Relaxed);
    map
}

/// The story: a process that takes a dead one's row is its owner from the first moment, but the thread id of the dead one's
/// ticker stood there until the row was emptied. Another process that looked meanwhile saw an owner without that thread, so a
/// dead one, and took the row as well. Each freed the other's clusters, which others overwrote.
#[test]
fn a_row_has_one_taker() {
    const DEAD: usize = 3;
    const TAKERS: usize = 4;
    const ROUNDS: usize = 200;
    let (map, mut processes) = (books(), Processes::new(TAKERS + 3));
    // One has ended. One executes another program, and finds in its first thread that it had rows, while its former ticker is
    // gone. One only searches for dead processes.
    let (dead, executes, buries) = (TAKERS, processes.identity(TAKERS + 1), processes.identity(TAKERS + 2));
    processes.end(dead);
    let dead = processes.identity(dead);
    let (barrier, wrong) = (Barrier::new(TAKERS + 2), AtomicUsize::new(0));
    let rows: Vec<AtomicUsize> = (0..ROWS).map(|_| AtomicUsize::new(0)).collect();
    let clusters: Vec<AtomicUsize> = (0..TAKERS + DEAD + 1).map(|_| AtomicUsize::new(0)).collect();
    let check = |ok: bool| wrong.fetch_add(usize::from(!ok), Relaxed);
    let take = |me: Identity| {
        for _ in 0..ROUNDS {
            barrier.wait();
            let row = map.take_row(me).expect("a row");
            check(rows[row].fetch_add(1, SeqCst) == 0);
            let cluster = map.claim_cluster(row).expect("a cluster");
            check(clusters[cluster as usize].fetch_add(1, SeqCst) == 0);
            barrier.wait();
            // Whatever the others were doing is done.
            check(map.is_claimed_by(cluster, row, me.raw()) && !map.is_free(cluster));
            barrier.wait();
        }
    };
    std::thread::scope(|scope| {
        let take = &take;
        (0..TAKERS).map(|i| processes.identity(i)).for_each(|me| _ = scope.spawn(move || take(me)));
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                barrier.wait();
                map.bury_the_dead(buries);
                barrier.wait();
                barrier.wait();
            }
        });
        for _ in 0..ROUNDS {
            map.reset();
            (0..DEAD).for_each(|row| map.set_row(row, dead, NO_THREAD));
            map.set_row(DEAD, executes, NO_THREAD);
            (0..=DEAD).for_each(|row| _ = map.claim_cluster(row));
            rows.iter().chain(&clusters).for_each(|n| n.store(0, Relaxed));
            barrier.wait();
            map.forget_own(executes);
            barrier.wait();
            barrier.wait();
        }
    });
    assert_eq!(wrong.load(Relaxed), 0);
}

/// A row that one process empties after taking it from a dead one: nobody else touches it, unless the taker is dead itself.
#[test]
fn a_row_that_is_being_emptied_is_nobody_else_s() {
    let (map, mut processes) = (books(), Processes::new(3));
    let [taker, other, third] = [0, 1, 2].map(|i| processes.identity(i));
    map.set_row(0, taker, NO_THREAD);
    let cluster = map.claim_cluster(0).unwrap();
    map.set_taker(0, taker);
    map.bury_the_dead(other);
    assert_eq!(map.take_row(other), Some(1));
    assert!(map.is_claimed_by(cluster, 0, taker.raw()));
    // A process that has executed another program finds that others are about to take what it had.
    map.set_row(1, third, NO_THREAD);
    map.set_taker(1, other);
    map.forget_own(third);
    assert_eq!(map.owner_of(1), third.raw());
    // Or it was taking one itself, before it executed that program.
    map.set_taker(1, third);
    map.forget_own(third);
    assert_eq!(map.owner_of(1), 0);
    processes.end(0);
    map.bury_the_dead(other);
    assert_eq!((map.owner_of(0), map.is_free(cluster)), (0, true));
    assert_eq!(map.take_row(third), Some(0));
}

/// What a fork leaves to a child is the child's even before it takes it over: the parent may execute another program first, or
/// the child may end.
#[test]
fn a_row_made_for_a_child_is_the_child_s() {
    let (p, mut processes) = (testing::pager_with_swap(16 << 20), Processes::new(3));
    let (map, me) = (p.clusters.unwrap(), Identity::own());
    let own = p.own_row(map).expect("a row");
    let cluster = map.claim_cluster(own).unwrap();
    let fork = |child: isize| {
        p.make_row_for_child(1);
        p.end_fork(child);
    };
    fork(-1);
    assert_eq!(map.take_row(me), Some(1), "without a child its row is free");
    map.forget_own(me);
    map.set_row(own, me, 0);
    assert_eq!(map.claim_cluster(own), Some(cluster));
    fork(processes.0[0].id() as isize);
    map.forget_own(me);
    assert!(!map.is_free(cluster), "the child refers to it");
    [me, processes.identity(1)].into_iter().for_each(|me| map.bury_the_dead(me));
    assert!(!map.is_free(cluster), "nor is it a dead process's");
    processes.end(0);
    map.bury_the_dead(me);
    assert!(map.is_free(cluster), "the child has ended");
    // A child that has taken the row over owns it, whether it is named as the heir yet or not.
    for named_first in [true, false] {
        let (row, child) = (map.take_row(me).expect("a row"), processes.identity(2));
        if named_first {
            map.leave_to(row, me, child);
        }
        assert!(map.take_over(row, me.raw(), child));
        map.leave_to(row, me, child);
        map.forget_own(me);
        assert_eq!(map.owner_of(row), child.raw());
        map.forget_own(child);
        assert_eq!(map.owner_of(row), 0, "its own as any other when it executes a program");
    }
}

/// Clusters that were being written to when a process ended, or executed another program, are not written to by others: neither
/// by a process that inherited them, nor by one that claims them.
#[test]
fn what_a_dead_process_may_be_writing_to_is_left_alone() {
    let (p, mut processes) = (testing::pager_with_swap(16 << 20), Processes::new(2));
    let (map, me) = (p.clusters.unwrap(), Identity::own());
    let (own, last) = (p.own_row(map).expect("a row"), 255);
    let [shared, alone] = [0, 1].map(|_| map.claim_cluster(own).unwrap());
    p.make_row_for_child(1);
    let child = map.take_row(processes.identity(0)).expect("a row") - 1;
    p.end_fork(processes.0[0].id() as isize);
    [shared, alone].iter().enumerate().for_each(|(slot, cluster)| map.note_writing(own, slot, Some(*cluster)));
    assert!(!map.is_late(shared) && !map.may_write(own, alone), "the child reads there");
    map.forget_own(me);
    assert!(!map.is_free(shared) && map.alone_with(child, shared) && !map.may_write(child, shared));
    processes.end(0);
    map.bury_the_dead(me);
    assert!(map.is_free(shared) && map.is_late(shared));
    // The other clusters are claimed first.
    let row = map.take_row(me).expect("a row");
    let claimed: Vec<u32> = std::iter::from_fn(|| map.claim_cluster(row)).collect();
    assert_eq!((claimed.len(), &claimed[last - 1..]), (last + 1, &[shared, alone][..]));
    assert!(map.may_write(row, claimed[0]) && !map.may_write(row, shared));
    map.settled(shared);
    assert!(map.may_write(row, shared) && !map.may_write(row, alone));
    // A write that was found ended does not matter.
    map.note_writing(row, 0, Some(claimed[0]));
    map.note_writing(row, 0, None);
    map.forget_own(me);
    assert!(map.is_free(claimed[0]) && !map.is_late(claimed[0]));
}

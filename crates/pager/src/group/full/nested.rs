//! Tests of a full group inside another full group.

use super::*;
use crate::testing;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command};
use uzswap_sys::process::Identity;

/// A small member of a group of 32 MiB inside one of 64, and another member that holds 100 and never gets on; returns the inner
/// group's number.
fn inside() -> (&'static Pager, usize) {
    let group = testing::group();
    let worker = group.make_child(0, b"worker").expect("a group");
    group.nodes[0].max.store(64 << 20, Relaxed);
    group.nodes[worker].max.store(32 << 20, Relaxed);
    let p: &'static Pager = Box::leak(Box::new(testing::member(group, worker, 64 << 20)));
    member(p, 1, worker, 100, Identity::own());
    (p, worker)
}

fn member(p: &Pager, slot: usize, node: usize, mib: u64, who: Identity) {
    let other = &p.group.slots[slot];
    p.group.used.fetch_max(slot as u32 + 1, Relaxed);
    other.node.store(node as u32, Relaxed);
    other.rss.store(mib << 20, Relaxed);
    other.stuck.store(u64::MAX, Relaxed);
    other.owner.store(who.raw(), Relaxed);
}

/// Another member, with a process of its own.
fn beside(p: &Pager, slot: usize, node: usize, mib: u64) -> Child {
    let child = Command::new("sleep").arg("600").spawn().expect("a process");
    member(p, slot, node, mib, Identity::of(child.id()));
    child
}

fn full(p: &Pager) {
    p.full_at(&p.state.lock(), thread::now_ns());
}

fn events(p: &Pager, node: usize) -> (u64, u64) {
    let e = &p.group.nodes[node].events;
    (e.oom.load(Relaxed), e.oom_kill.load(Relaxed))
}

/// See [`Pager::over_max`].
#[test]
fn who_exceeds_its_own_limit_by_more_waits_for_that_above() {
    let (p, worker) = inside();
    let waits = || {
        p.waits.store(false, SeqCst);
        p.hold_back(&p.state.lock());
        let far = p.waits.load(SeqCst);
        full(p);
        (far, p.must_wait(&mut p.state.lock()))
    };
    assert_eq!(waits(), (false, false));
    assert_eq!([0, worker].map(|node| events(p, node).0), [1, 1], "it is counted once");
    assert_eq!([0, worker].map(|node| p.group.nodes[node].full_said.load(Relaxed)), [1, 1], "each is said to be full");
    p.group.nodes[0].on_full.store(ON_FULL_WAIT, Relaxed);
    assert_eq!(waits(), (true, true));
    p.group.slots[1].rss.store(50 << 20, Relaxed);
    assert_eq!(waits(), (false, false), "only that group is full that is to be exceeded");
}

/// The same where a member is to be killed.
#[test]
fn who_exceeds_its_own_limit_by_more_is_killed_for_that_above() {
    let (p, worker) = inside();
    let mut largest = beside(p, 7, worker, 200);
    full(p);
    assert_eq!([0, worker].map(|node| events(p, node)), [(1, 0); 2]);
    p.group.nodes[0].on_full.store(ON_FULL_KILL, Relaxed);
    full(p);
    assert_eq!([0, worker].map(|node| events(p, node)), [(2, 1), (2, 0)]);
    assert_eq!(largest.wait().expect("it was killed").signal(), Some(libc::SIGKILL));
}

/// See [`Pager::kill_largest`].
#[test]
fn nobody_else_is_killed_while_one_dies_for_a_group_in_it() {
    let (p, worker) = inside();
    let (mut largest, mut other) = (beside(p, 7, worker, 200), beside(p, 8, 0, 300));
    for node in [0, worker] {
        p.group.nodes[node].on_full.store(ON_FULL_KILL, Relaxed);
    }
    full(p);
    assert_eq!([0, worker].map(|node| events(p, node)), [(1, 1), (1, 1)]);
    assert_eq!(largest.wait().expect("it was killed").signal(), Some(libc::SIGKILL));
    assert!(other.try_wait().expect("a child").is_none());
    // Once it is dead and the group still uses more, it is another member's turn.
    p.group.nodes[0].kill_due.store(0, Relaxed);
    full(p);
    assert_eq!([0, worker].map(|node| events(p, node).1), [2, 1]);
    assert_eq!(other.wait().expect("it was killed").signal(), Some(libc::SIGKILL));
}

//! Tests of a group whose page any of its members may have scribbled over: whoever reads it may exceed a limit or report nonsense,
//! but does not panic, overflow, hang, or signal a process that is no member.

use super::*;
use crate::group::folio::MAX_ORDER;
use crate::group::member::wake_member;
use crate::group::{MOST_BYTES, NO_LIMIT, NODES, ON_FULL_EXCEED, SLOTS, algorithm};
use crate::pool::batch::Batch;
use crate::request::{ASKED, Op};
use crate::testing::{self, Scribbler, within};
use core::time::Duration;
use uzswap_sys::owner::CLEANS;

const ROUNDS: usize = 12;
/// The most that all members together can be said to hold.
const MOST: usize = MOST_BYTES as usize * SLOTS;

/// Scribbles over a group's page. Nobody is killed by what reads it then: see `what_is_killed_is_a_member` for that.
fn scribble(page: &'static GroupPage, by: &mut Scribbler) {
    // SAFETY: the page is all atomics, and aligned to cache lines.
    unsafe { by.fill(page, 8) };
    if by.below(4) > 0 {
        page.used.store(SLOTS as u32, Relaxed);
    }
    for n in &page.nodes {
        n.on_full.store([ON_FULL_EXCEED, ON_FULL_WAIT, 7][by.below(3) as usize], Relaxed);
        // One message is enough.
        n.full_said.fetch_or(1, Relaxed);
        if by.below(2) > 0 {
            n.state.store(crate::group::Node::READY, Relaxed);
        }
    }
}

/// Everything that asks what the group uses and may use.
fn reads_charges(p: &Pager, s: &mut State) {
    let others = p.others_use();
    for sums in [others.charge, others.resident, others.swapped, others.pool, others.swap, others.planned] {
        assert!(sums.iter().all(|sum| *sum <= MOST), "{sums:?}");
    }
    assert!(p.others_charge().iter().all(|sum| *sum <= MOST));
    assert!(p.others_charge_soon().iter().all(|sum| *sum <= 2 * MOST));
    assert!(p.excess(s) <= 3 * MOST as isize && p.excess(s) >= isize::MIN / 2);
    p.over_max(s).for_each(|over| assert!(over.charge > over.max));
    p.raise_peaks(1 << 20, 1 << 20, 1 << 20);
    p.headroom(1 << 20, 1 << 20, crate::discover::engage::engage_threshold);
    p.count_excess(s, p.margin());
    p.throttle_ns(s);
    p.may_zswap(s, 1 << 20);
    p.zswap_is_full(s);
    p.pool_is_forbidden();
    p.may_swap(1 << 20, 1 << 20);
    p.may_write_back();
    p.count_swap_fail(1);
    p.hold_back(s);
    p.must_wait(s);
    p.others_hold_now();
    p.count_sharers();
    p.watermarks();
    p.widest_window();
    s.size_folios(p.limit());
    s.bound_folios(p.folio_room(), p.share());
    p.charge_growth(s);
    p.over(s, 0, true);
}

/// Everything that decides on other members, or tells them something.
fn concerns_others(p: &Pager, s: &State, by: &mut Scribbler) {
    p.full_at(s, thread::now_ns());
    p.gets_on();
    p.note_missed(1000, by.below(100) as usize);
    p.ask_the_largest(s);
    p.asked_for(s, p.excess(s));
    p.gives_nothing();
    p.wake_others();
    p.rally();
    p.look_at_others();
    wake_member(&p.group.slots[by.below(SLOTS as u64) as usize], true);
    p.largest(0, s);
}

/// The tree, its settings, and who is in it.
fn reads_tree(page: &GroupPage, by: &mut Scribbler) {
    for node in 0..NODES {
        let n = &page.nodes[node];
        assert!(page.chain(node).count() <= DEPTH, "however its parents go round");
        assert!(page.chain(by.word() as usize).all(|at| at < NODES));
        page.is_within(by.word() as usize, node);
        page.count(node, |e| &e.max, u64::MAX);
        n.set_max(by.word(), by.word());
        n.spares(Over { level: 0, node, charge: 1 << 40, max: 1 << 30 });
        let _ = algorithm(n.codec.load(Relaxed), n.level.load(Relaxed));
        messages::name_for_test(page, node);
    }
    let _ = page.child(by.below(NODES as u64) as usize, b"x").or_else(|| page.make_child(0, b"x"));
    for order in 0..=MAX_ORDER {
        page.folios.allows(order);
        assert!(page.folios.unit(order).is_none_or(|unit| unit <= order));
        page.folios.largest_unit(order);
    }
    let [a, b] = [0, 1].map(|_| &page.slots[by.below(SLOTS as u64) as usize]);
    a.counters.retire_into(&b.counters);
    a.watch.next();
}

/// A request that nobody has made, to a member that serves it. (A release: before others the member looks for its program's
/// memory, which here is the tests' own.)
fn serves_nonsense(p: &Pager, batch: &mut Batch) {
    let r = &p.me().request;
    r.state.store(ASKED, Relaxed);
    r.target.store(p.me().owner.load(Relaxed), Relaxed);
    r.op.store(Op::Release as u32, Relaxed);
    p.show_progress();
    p.serve_request(batch);
    p.refuse_request();
    p.look_after_client();
}

#[test]
fn whatever_stands_in_a_groups_page_nobody_panics_or_hangs() {
    within(Duration::from_secs(240), || {
        let (p, mut by) = (testing::pager(64 << 20), Scribbler::new());
        let mut batch = Batch::new(p.state.lock().new_compressor());
        for _ in 0..ROUNDS {
            scribble(p.group, &mut by);
            reads_charges(p, &mut p.state.lock());
            scribble(p.group, &mut by);
            concerns_others(p, &p.state.lock(), &mut by);
            reads_tree(p.group, &mut by);
            serves_nonsense(p, &mut batch);
        }
        for _ in 0..ROUNDS / 4 {
            scribble(p.group, &mut by);
            p.throttle_allocation();
            p.publish(&p.state.lock());
            p.group.bury_the_dead(Identity::own());
            scribble(p.group, &mut by);
            let _ = p.claim_slot();
            p.leave();
            p.executes();
            p.goes_on();
            p.left.store(false, SeqCst);
        }
        assert!(by.is_unharmed());
        p.state.lock().rss = 0;
    });
}

/// See [`Pager::victim`]. (Nothing is killed here, as it would be this process.)
#[test]
fn what_is_killed_is_a_member() {
    let (p, mut by) = (testing::pager(64 << 20), Scribbler::new());
    for _ in 0..ROUNDS {
        scribble(p.group, &mut by);
        for node in 0..NODES {
            let victim = p.victim(node).map(|(_, who, _)| who);
            assert!(victim.is_none_or(|who| who == Identity::own()), "{victim:?}");
        }
    }
    // Of a process that cannot be told from another with its pid nothing is known for sure.
    let sole = |raw: u64| {
        p.group.slots.iter().for_each(|slot| slot.owner.store(0, Relaxed));
        p.group.used.store(1, Relaxed);
        p.group.slots[0].owner.store(raw, Relaxed);
        p.group.slots[0].node.store(0, Relaxed);
        p.group.nodes[0].ancestors.store(1, Relaxed);
        p.victim(0).is_some()
    };
    let stranger = u64::from(by.stranger());
    assert_eq!([7 << 32, 7 << 32 | 0xffff_ffff, stranger, 7 << 32 | stranger].map(sole), [false; 4]);
    assert!(sole(Identity::of(by.stranger()).raw()));
    assert!(by.is_unharmed());
}

/// See [`crate::group::bytes_in`].
#[test]
fn sums_of_nonsense_do_not_wrap() {
    let p = testing::pager(64 << 20);
    p.group.used.store(4, Relaxed);
    for other in &p.group.slots[1..4] {
        other.owner.store(Identity::own().raw(), Relaxed);
        [&other.rss, &other.pool, &other.swapped, &other.swap].iter().for_each(|n| n.store(u64::MAX / 2 + 1, Relaxed));
        other.planned.store(u64::MAX, Relaxed);
    }
    let mut s = p.state.lock();
    s.rss = 1 << 20;
    assert!(p.excess(&s) > 0 && p.over_max(&s).count() == 1, "there is more than it may be");
    assert!(!p.may_swap(0, 4096) || p.group.nodes[0].swap_max.load(Relaxed) >= NO_LIMIT);
    p.group.nodes[0].swap_max.store(1 << 30, Relaxed);
    assert!(!p.may_swap(0, 4096));
    assert_eq!(p.headroom(1 << 20, 0, |limit| limit).0, 0);
    // A limit that is no limit is none.
    p.group.slots[1..4].iter().for_each(|other| other.owner.store(0, Relaxed));
    [&p.group.nodes[0].max, &p.group.nodes[0].high].iter().for_each(|limit| limit.store(u64::MAX, Relaxed));
    assert!(p.excess(&s) < 0);
    // A grace that nobody can have had.
    p.group.nodes[0].grace.store(u64::MAX, Relaxed);
    p.group.nodes[0].max.store(1 << 30, Relaxed);
    assert!(p.group.nodes[0].spares(Over { level: 0, node: 0, charge: usize::MAX / 2, max: 1 << 30 }));
    s.rss = 0;
}

/// The story: see `Identity::is_gone`.
#[test]
fn who_can_be_no_process_is_buried() {
    let p = testing::pager(64 << 20);
    for raw in [7 << 32, 7 << 32 | 0xffff_ffff, CLEANS, CLEANS | 7 << 32, 0xffff_ffff] {
        let slot = &p.group.slots[5];
        p.group.used.store(6, Relaxed);
        slot.owner.store(raw, Relaxed);
        slot.rss.store(40 << 20, Relaxed);
        p.group.bury_the_dead(Identity::own());
        assert_eq!((slot.owner.load(Relaxed), slot.rss.load(Relaxed)), (0, 0), "{raw:#x}");
    }
}

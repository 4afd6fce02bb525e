//! MADV_REMOVE and MADV_DONTNEED by the kernel's own call: the former drops contents wherever they are, the latter none.

use super::processes::{Lines, say, wait_for_word, wait_within, worker};
use super::*;
use crate::region::{Rng, seed};
use std::collections::VecDeque;
use std::io::Read;
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use uzswap_mm::pagemap::Tier;
use uzswap_pager::shared::SharedControl;

/// Arguments of [`SharedControl::inject`].
pub const BLIND: u64 = 1;
const GATE: u64 = 2;
pub const HOLD: u64 = 3;
pub const HELD: u64 = 4;
const DEAF: u64 = 5;
pub const REFUSE: u64 = 6;
pub const NEAR: u64 = 7;

fn advise(m: &SharedMapping, pages: Range<usize>, advice: i32) {
    assert!(pages.end * PAGE <= m.len());
    // SAFETY: within the mapping, whose words are used as atomics only.
    let done = unsafe { libc::madvise(m.as_mut_ptr().add(pages.start * PAGE).cast(), pages.len() * PAGE, advice) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

/// Removes pages by the kernel's call.
pub fn remove(m: &SharedMapping, pages: Range<usize>) {
    advise(m, pages, libc::MADV_REMOVE);
}

pub fn unmap(m: &SharedMapping, pages: Range<usize>) {
    advise(m, pages, libc::MADV_DONTNEED);
}

pub fn bytes(pages: Range<usize>) -> Range<usize> {
    pages.start * PAGE..pages.end * PAGE
}

pub fn value(m: &SharedMapping, page: usize) -> u64 {
    words(m, page)[7].load(Relaxed)
}

/// A region whose owner can see removals, and two mappings.
fn set_up() -> (SharedRegion, SharedMapping, SharedMapping) {
    let region = region(8 * MIB, 16 * MIB);
    let (a, b) = (region.map().unwrap(), region.map().unwrap());
    assert!(region.control().sees_removes() && a.sees_removes(), "this needs a userfaultfd for the kernel's faults");
    (region, a, b)
}

/// The page map's answers, which must be the same in every mapping, including one made now.
fn states(region: &SharedRegion, of: &[&SharedMapping], pages: Range<usize>) -> Vec<(bool, bool)> {
    let get = |m: &SharedMapping| pages.clone().map(|p| state(m.page_map().get(p as u64))).collect::<Vec<_>>();
    let later = get(&region.map().unwrap());
    for m in of {
        assert_eq!(get(m), later);
    }
    let control = region.control().page_map();
    assert_eq!(pages.clone().map(|p| state(control.get(p as u64))).collect::<Vec<_>>(), later);
    later
}

pub const NONE: (bool, bool) = (false, false);
const OUT: (bool, bool) = (false, true);
const IN: (bool, bool) = (true, false);

/// Pages 0 to 4 are in memory, 5 to 9 out, 10 to 14 out and zero, 15 to 19 never touched; each holds 100 + page, or 0.
fn mixed(region: &SharedRegion, m: &SharedMapping) -> Vec<u64> {
    (0..10).for_each(|page| write(m, page, 100 + page as u64));
    (10..15).for_each(|page| assert_eq!(touch(m, page), 0));
    assert_eq!(region.control().page_out(bytes(5..15)).unwrap(), 10);
    (0..20).map(|page| if page < 10 { 100 + page } else { 0 }).collect()
}

#[test]
fn what_the_kernel_removes_is_gone_wherever_it_was() {
    // All of it, and parts that begin and end in each kind of page.
    for (from, to) in [(0, 20), (0, 5), (5, 10), (5, 6), (10, 15), (3, 12), (7, 18), (15, 20), (9, 10), (14, 16)] {
        let (region, a, b) = set_up();
        let mut model = mixed(&region, &a);
        let mut expected = states(&region, &[&a, &b], 0..20);
        assert_eq!(expected, [[IN; 5], [OUT; 5], [OUT; 5], [NONE; 5]].concat());
        remove(&a, from..to);
        expected[from..to].fill(NONE);
        model[from..to].fill(0);
        assert_eq!(states(&region, &[&a, &b], 0..20), expected, "{from}..{to}");
        for (page, expected) in model.into_iter().enumerate() {
            assert_eq!(value(&b, page), expected, "{from}..{to}: page {page}, in the other mapping");
            assert_eq!(value(&a, page), expected, "{from}..{to}: page {page}");
        }
        let stats = region.control().stats().unwrap();
        assert_eq!((stats.doubts, stats.unvouched), (0, 0), "{from}..{to}");
        // And nothing stays in memory because of it.
        assert_eq!(region.control().page_out(bytes(0..20)).unwrap(), 20);
    }
}

#[test]
fn what_is_only_unmapped_is_kept_wherever_it_was() {
    let (region, a, b) = set_up();
    let model = mixed(&region, &a);
    unmap(&a, 0..20);
    unmap(&a, 6..7);
    unmap(&b, 4..12);
    // The ends of each range are in memory now; contents are as before, and nothing else has changed.
    let now = states(&region, &[&a, &b], 0..20);
    assert!(now[15..] == [NONE; 5] && now[..15].iter().all(|s| *s != NONE), "{now:?}");
    region.control().page_out(bytes(0..20)).unwrap();
    assert!((0..20).all(|page| value(&b, page) == model[page] && value(&a, page) == model[page]));
    let stats = region.control().stats().unwrap();
    assert!(stats.doubts > 0 && stats.unvouched == 0, "{stats:?}");
    // A mapping's doubts end with it, and then keep nothing in memory any more.
    drop((a, b));
    let end = Instant::now() + Duration::from_secs(20);
    while region.control().stats().unwrap().mappings > 0 {
        assert!(Instant::now() < end, "the mappings stay");
        std::thread::yield_now();
    }
    assert_eq!(region.control().stats().unwrap().doubts, 0);
    region.control().page_out(0..8 * MIB).unwrap();
    assert_eq!(region.control().stats().unwrap().resident, 0);
    let c = region.map().unwrap();
    assert!((0..20).all(|page| value(&c, page) == model[page]));
}

/// What happens to pages on their way out: already read, and not stored yet.
fn on_the_way(
    meanwhile: impl Fn(&SharedControl, &SharedMapping, &SharedMapping),
) -> (SharedRegion, SharedMapping, SharedMapping) {
    let (region, a, b) = set_up();
    let path = socket_path("busy");
    region.serve(&path).unwrap();
    let pager = SharedControl::connect(&path).unwrap();
    (0..16).for_each(|page| write(&a, page, 100 + page as u64));
    let control = region.control();
    control.inject(HOLD, 1).unwrap();
    std::thread::scope(|scope| {
        let out = scope.spawn(|| pager.page_out(bytes(0..16)).unwrap());
        control.inject(HELD, 0).unwrap();
        meanwhile(control, &a, &b);
        control.inject(HOLD, 0).unwrap();
        out.join().unwrap();
    });
    (region, a, b)
}

#[test]
fn what_is_removed_on_its_way_out_does_not_come_back() {
    let (region, a, b) = on_the_way(|_, a, _| remove(a, 4..12));
    let now = states(&region, &[&a, &b], 0..16);
    assert!(now[4..12] == [NONE; 8] && now[..4].iter().chain(&now[12..]).all(|s| *s != NONE), "{now:?}");
    for page in 0..16 {
        assert_eq!(value(&b, page), if (4..12).contains(&page) { 0 } else { 100 + page as u64 }, "page {page}");
    }
}

#[test]
fn what_is_written_after_it_was_removed_stays() {
    let (region, a, b) = on_the_way(|_, a, b| {
        remove(a, 4..12);
        [4, 7, 11].iter().for_each(|page| write(b, *page, 7));
    });
    for out in [false, true] {
        if out {
            region.control().page_out(bytes(0..16)).unwrap();
        }
        for page in 0..16 {
            let expected = match page {
                4 | 7 | 11 => 7,
                4..12 => 0,
                _ => 100 + page as u64,
            };
            assert_eq!((value(&a, page), value(&b, page)), (expected, expected), "page {page}");
        }
    }
}

#[test]
fn what_is_unmapped_on_its_way_out_is_kept() {
    let (region, a, b) = on_the_way(|_, a, b| {
        unmap(a, 0..16);
        unmap(b, 3..9);
    });
    assert!((0..16).all(|page| value(&a, page) == 100 + page as u64 && value(&b, page) == 100 + page as u64));
    assert!(states(&region, &[&a, &b], 0..16).iter().all(|s| *s != NONE));
}

#[test]
fn any_sequence_of_calls_does_what_it_says() {
    sequence_of_calls(false);
}

/// A model, one page after the other: every call returns before the next begins, so everything is exact. `near`: faults are
/// served beside the faulting thread.
pub fn sequence_of_calls(near: bool) {
    const PAGES: usize = 48;
    let (region, a, b) = set_up();
    let control = region.control();
    control.inject(NEAR, near.into()).unwrap();
    let mut rng = Rng::new(seed());
    let (mut model, mut known) = ([0u64; PAGES], [false; PAGES]);
    let mut mappings = [a, b];
    // The last operations, to find out why one went wrong.
    let mut done = VecDeque::new();
    for step in 0..4000u64 {
        let from = rng.below(PAGES);
        let pages = from..from + 1 + rng.below((PAGES - from).min(12));
        let (which, what) = (rng.below(2), rng.below(11));
        let m = &mappings[which];
        done.push_front((step, what, which, pages.clone()));
        done.truncate(40);
        match what {
            0..4 => pages.clone().for_each(|page| {
                write(m, page, step + 1);
                (model[page], known[page]) = (step + 1, true);
            }),
            4 => pages.clone().for_each(|page| {
                touch(m, page);
                known[page] = true;
            }),
            5 | 6 => drop(control.page_out(bytes(pages.clone())).unwrap()),
            7 => drop(m.page_in(bytes(pages.clone())).unwrap()),
            8 => unmap(m, pages.clone()),
            9 => {
                remove(m, pages.clone());
                model[pages.clone()].fill(0);
                known[pages.clone()].fill(false);
            }
            _ => match rng.below(8) {
                0 => {
                    let (i, new) = (rng.below(2), region.map().unwrap());
                    mappings[i] = new;
                }
                1 => control.age().map(drop).unwrap(),
                _ => {
                    m.remove(bytes(pages.clone())).unwrap();
                    model[pages.clone()].fill(0);
                    known[pages.clone()].fill(false);
                }
            },
        }
        for (which, m) in mappings.iter().enumerate() {
            let map = m.page_map();
            let map = map.map();
            for (page, known) in known.into_iter().enumerate() {
                let is = map.get(page as u64);
                let right = (state(is) != NONE) == known;
                assert!(
                    right,
                    "step {step}, mapping {which}, page {page}, {is:?}, {:?}, last {done:?}",
                    control.stats()
                );
            }
        }
        if rng.below(4) == 0 {
            for _ in 0..8 {
                let (page, m) = (rng.below(PAGES), &mappings[rng.below(2)]);
                assert_eq!(value(m, page), model[page], "step {step}, page {page}");
                known[page] = true;
            }
        }
    }
    let stats = control.stats().unwrap();
    assert_eq!((stats.unvouched, stats.poisoned), (0, 0), "{stats:?}");
    assert!((0..PAGES).all(|page| value(&mappings[0], page) == model[page]));
}

#[test]
fn ageing_leaves_no_doubts() {
    let (region, a, _b) = set_up();
    (0..64).for_each(|page| write(&a, page, 1));
    let zero = Duration::ZERO;
    assert_eq!(region.control().working_set(zero).unwrap(), 64);
    region.control().age().unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while region.control().working_set(zero).unwrap() > 0 {
        assert!(Instant::now() < end, "the watchers never answered");
        std::thread::yield_now();
    }
    assert_eq!(region.control().stats().unwrap().doubts, 0);
    assert_eq!(region.control().page_out_idle(zero).unwrap(), 64);
}

/// An event is read when none was expected: what is in memory vouches for what is out.
#[test]
fn an_event_read_unawares_is_known_by_what_is_in_memory() {
    for removed in [false, true] {
        let (region, a, b) = set_up();
        let model = mixed(&region, &a);
        region.control().inject(BLIND, 1).unwrap();
        if removed {
            remove(&a, 2..12)
        } else {
            unmap(&a, 2..12)
        }
        let stats = region.control().stats().unwrap();
        // The hole may have been punched before anybody could look: then that is reported.
        assert!(removed || stats.unvouched == 0, "{stats:?}");
        for (page, old) in model.into_iter().enumerate() {
            let lost = region.control().page_map().get(page as u64).tier() == Tier::Lost;
            let expected = if removed && (2..12).contains(&page) { 0 } else { old };
            assert!(!lost || removed && (5..12).contains(&page), "page {page}");
            assert!(lost || value(&b, page) == expected, "page {page}");
        }
    }
}

/// The same with a doubt of which the call takes one end: it must not pass for the act of a process that was killed.
#[test]
fn an_event_read_unawares_across_a_doubt_serves_nothing_old() {
    for _ in 0..20 {
        let (region, a, b) = set_up();
        (0..20).for_each(|page| write(&a, page, 100 + page as u64));
        region.control().page_out(bytes(0..20)).unwrap();
        unmap(&b, 0..10);
        region.control().page_out(bytes(0..20)).unwrap();
        region.control().inject(BLIND, 1).unwrap();
        remove(&a, 5..15);
        for page in 0..20 {
            let lost = region.control().page_map().get(page as u64).tier() == Tier::Lost;
            let inside = (5..15).contains(&page);
            assert!(!lost || inside, "page {page}");
            assert!(lost || value(&b, page) == if inside { 0 } else { 100 + page as u64 }, "page {page}");
        }
    }
}

/// The same if nothing is in memory: what is out may be older than the removal, and nobody gets it.
#[test]
fn what_nothing_vouches_for_is_lost_and_said() {
    for advice in [libc::MADV_REMOVE, libc::MADV_DONTNEED] {
        let path = socket_path("unvouched");
        let (region, a, _b) = set_up();
        region.serve(&path).unwrap();
        (0..8).for_each(|page| write(&a, page, 100 + page as u64));
        region.control().page_out(bytes(0..8)).unwrap();
        region.control().inject(BLIND, 1).unwrap();
        advise(&a, 2..6, advice);
        let stats = region.control().stats().unwrap();
        assert_eq!((stats.unvouched, stats.poisoned), (4, 4));
        let lost: Vec<_> = (0..8).filter(|p| region.control().page_map().get(*p).tier() == Tier::Lost).collect();
        assert_eq!(lost, [2, 3, 4, 5]);
        let mut child = worker("touch", &path, 3).spawn().unwrap();
        assert_eq!(wait_within(&mut child, Duration::from_secs(20)).signal(), Some(libc::SIGBUS));
        assert_eq!((value(&a, 1), value(&a, 6)), (101, 106));
        // As after any loss, memory that is dropped may be used again.
        remove(&a, 0..8);
        assert!((0..8).all(|page| value(&a, page) == 0));
    }
}

/// The gate cannot be closed: for this event, or ever again.
#[test]
fn without_the_gate_nothing_old_is_served() {
    for failing in [1, 2, 3, 4, 6, 7, 1000] {
        for advice in [libc::MADV_REMOVE, libc::MADV_DONTNEED] {
            let (region, a, b) = set_up();
            let model = mixed(&region, &a);
            let control = region.control();
            control.inject(GATE, failing).unwrap();
            advise(&a, 2..12, advice);
            let stats = control.stats().unwrap();
            assert!(failing > 2 || stats.unvouched == 0, "{failing}: {stats:?}");
            for (page, old) in model.into_iter().enumerate() {
                let inside = (2..12).contains(&page);
                let lost = control.page_map().get(page as u64).tier() == Tier::Lost;
                assert!(!lost || failing > 2 && inside, "{failing}: page {page}");
                if !lost {
                    let expected = if inside && advice == libc::MADV_REMOVE { 0 } else { old };
                    assert_eq!(value(&b, page), expected, "{failing}: page {page}");
                }
            }
            assert_eq!(stats.unvouched, control.stats().unwrap().poisoned);
        }
    }
}

/// The story: pages were removed on their way out, and the gate could not be closed, or the kernel had no memory for a witness.
/// They were stored with their former contents, and read again.
#[test]
fn what_was_on_its_way_out_and_could_not_be_looked_at_serves_nothing_old() {
    for (what, n) in [(GATE, 1000), (REFUSE, u64::MAX), (REFUSE, 1), (REFUSE, 2)] {
        let (region, a, b) = on_the_way(|control, a, _| {
            control.inject(what, n).unwrap();
            remove(a, 4..12);
        });
        for page in 0..16 {
            let inside = (4..12).contains(&page);
            let lost = region.control().page_map().get(page as u64).tier() == Tier::Lost;
            assert!(!lost || inside, "{what} {n}: page {page}");
            for m in [&a, &b] {
                assert!(
                    lost || value(m, page) == if inside { 0 } else { 100 + page as u64 },
                    "{what} {n}: page {page}"
                );
            }
        }
    }
}

/// The kernel has no memory for one or the other question, or for pages, that are needed while the gate is closed; or for all of
/// them. Every page is right, or lost and reported; at the end nothing is held in memory for it.
#[test]
fn without_memory_under_the_gate_nothing_old_is_served() {
    let (mut unvouched, mut told) = (0, 0);
    for refused in (0..16).map(|n| 1 << n).chain([3, 0b1010, 0xff00, u64::MAX]) {
        for advice in [libc::MADV_REMOVE, libc::MADV_DONTNEED] {
            let (region, a, b) = set_up();
            let model = mixed(&region, &a);
            let control = region.control();
            // A doubt that the call has a part in.
            unmap(&b, 0..8);
            control.page_out(bytes(0..20)).unwrap();
            control.inject(REFUSE, refused).unwrap();
            advise(&a, 2..12, advice);
            // Questions that are asked each time are refused as well, until there is memory again.
            (0..3).for_each(|_| assert!(control.stats().is_ok()));
            control.inject(REFUSE, 0).unwrap();
            for (page, old) in model.into_iter().enumerate() {
                let lost = control.page_map().get(page as u64).tier() == Tier::Lost;
                assert!(!lost || page < 12, "{refused:b}: page {page}");
                if !lost {
                    let expected = if (2..12).contains(&page) && advice == libc::MADV_REMOVE { 0 } else { old };
                    assert_eq!((value(&b, page), value(&a, page)), (expected, expected), "{refused:b}: page {page}");
                }
            }
            let stats = control.stats().unwrap();
            assert_eq!(stats.unvouched, stats.poisoned, "{refused:b}");
            unvouched += stats.unvouched;
            told += u64::from(stats.unvouched > 0);
            // By the owner: with the kernel's call a lost page may lie at an end, and stay lost.
            control.remove(bytes(0..20)).unwrap();
            assert_eq!(control.stats().unwrap().doubts, 0, "{refused:b}");
            (0..20).for_each(|page| write(&a, page, 7));
            assert_eq!(control.page_out(bytes(0..20)).unwrap(), 20, "{refused:b}");
            assert!((0..20).all(|page| value(&a, page) == 7 && value(&b, page) == 7), "{refused:b}");
        }
    }
    assert!(unvouched > 0 && told > 10, "{unvouched} pages were lost, in {told} runs");
}

/// An owner that may not serve the kernel's own faults cannot see removals, and says so; nothing else is different.
#[test]
fn an_owner_that_may_not_see_removes_says_so() {
    // SAFETY: no arguments.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED: only root can become another user");
        return;
    }
    let mut child = worker("unprivileged", &socket_path("unprivileged"), 0).spawn().unwrap();
    let mut lines = Lines::of(&mut child);
    let said: Vec<String> = std::iter::from_fn(|| lines.next()).collect();
    assert!(wait_within(&mut child, Duration::from_secs(20)).success());
    if said == ["privileged"] {
        println!("SKIPPED: everybody may serve the kernel's faults here");
    } else {
        assert_eq!(said, ["right"]);
    }
}

fn unprivileged() {
    // SAFETY: a plain call: from here on this is another user.
    assert_eq!(unsafe { libc::setuid(65534) }, 0);
    let region = region(4 * MIB, 8 * MIB);
    let m = region.map().unwrap();
    if region.control().sees_removes() {
        return say("privileged");
    }
    assert!(!m.sees_removes());
    (0..8).for_each(|page| write(&m, page, 5));
    region.control().page_out(bytes(0..4)).unwrap();
    unmap(&m, 0..8);
    remove(&m, 4..6);
    assert!((0..8).all(|page| value(&m, page) == if (4..6).contains(&page) { 0 } else { 5 }));
    region.control().page_out(bytes(0..8)).unwrap();
    m.remove(bytes(0..8)).unwrap();
    assert!((0..8).all(|page| value(&m, page) == 0));
    super::markers::what_was_removed_unseen_is_protected_as_well(&region, &m);
    assert_eq!(region.control().stats().unwrap().doubts, 0);
    say("right");
}

/// Plays a role of this file's workers.
pub fn be(role: &str, path: &Path, number: usize) {
    if role == "unprivileged" {
        return unprivileged();
    }
    let m = SharedMapping::attach(path).unwrap();
    match role {
        "touch" => say(&format!("{}", value(&m, number))),
        "removing" => {
            say("begun");
            remove(&m, 0..number);
            say("removed");
            wait_for_word();
            say(&format!("{}", value(&m, 0)));
        }
        "removes" => super::removes_stress::stress(&m, number),
        other => panic!("no such role: {other}"),
    }
}

/// Waits until a thread of a process waits in the kernel for its event to be read.
fn wait_for_caller(child: &Child) {
    let end = Instant::now() + Duration::from_secs(20);
    let waits = |task: std::fs::DirEntry| {
        let call = std::fs::read_to_string(task.path().join("syscall")).unwrap_or_default();
        call.split(' ').next() == Some("28")
    };
    while !std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap().flatten().any(waits) {
        assert!(Instant::now() < end, "nobody waits in madvise");
        std::thread::yield_now();
    }
}

/// The story: when a caller is killed, the kernel withdraws its event, and still removes the pages without telling anybody.
#[test]
fn a_caller_killed_before_it_was_heard_harms_nobody() {
    for round in 0..4 {
        let path = socket_path("killed");
        let (region, a, b) = set_up();
        region.serve(&path).unwrap();
        let model = mixed(&region, &a);
        let control = region.control();
        // A doubt, of which the killed caller takes a part.
        if round % 2 == 1 {
            unmap(&b, 3..8);
        }
        control.inject(DEAF, 1).unwrap();
        let mut child = worker("removing", &path, 6).spawn().unwrap();
        wait_for_caller(&child);
        // Nobody whose pages are not in its range is held up.
        if round >= 2 {
            control.page_out(bytes(0..20)).unwrap();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        control.inject(DEAF, 0).unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        while control.stats().unwrap().mappings > 2 {
            assert!(Instant::now() < end, "the mapping of the dead stays");
            std::thread::yield_now();
        }
        let now = states(&region, &[&a, &b], 0..20);
        for page in 0..20 {
            let got = value(&a, page);
            assert_eq!(got, value(&b, page));
            // Each page in its range was removed or not; none outside was.
            assert!(got == model[page] || page < 6 && got == 0, "round {round}: page {page} is {got}");
            let known = now[page] != NONE;
            assert_eq!(known, page < 15 && (page >= 10 || got != 0), "round {round}: page {page}, {got}");
        }
        assert_eq!(control.stats().unwrap().unvouched, 0);
    }
}

/// The story: the watcher of a process, which must see the end of its owner, could itself be waiting in madvise for the owner to
/// read.
#[test]
fn who_waits_to_be_heard_by_an_owner_that_is_killed_goes_on() {
    for ageing in [false, true] {
        let path = socket_path("heard");
        let mut owner = worker("own", &path, 0).spawn().unwrap();
        assert_eq!(Lines::of(&mut owner).next().as_deref(), Some("serving"));
        let control = SharedControl::connect(&path).unwrap();
        {
            let m = SharedMapping::attach(&path).unwrap();
            (0..8).for_each(|page| write(&m, page, 5));
        }
        control.page_out(bytes(0..8)).unwrap();
        control.inject(DEAF, u64::from(!ageing)).unwrap();
        let role = if ageing { "read" } else { "removing" };
        let mut child = worker(role, &path, if ageing { 2 } else { 6 }).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = Lines::of(&mut child);
        if ageing {
            assert_eq!(lines.next().as_deref(), Some("5"));
            control.inject(DEAF, 1).unwrap();
            control.age().unwrap();
        }
        wait_for_caller(&child);
        owner.kill().unwrap();
        owner.wait().unwrap();
        drop(child.stdin.take());
        let status = wait_within(&mut child, Duration::from_secs(20));
        let mut error = String::new();
        child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
        // Pages in memory may be read until the watcher has seen the end.
        let said: Vec<String> = std::iter::from_fn(|| lines.next()).collect();
        let told = error.contains("the owner of a shared region has ended");
        assert!(status.signal() == Some(libc::SIGBUS) && told || ageing && said == ["5"], "{status} {said:?} {error}");
        let _ = std::fs::remove_file(&path);
    }
}

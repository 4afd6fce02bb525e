//! MADV_REMOVE and MADV_DONTNEED from two processes at once, with page-outs, ageing and kills.

use super::processes::{LONGEST, Lines, say, worker};
use super::removes::{NEAR, NONE, bytes, remove, unmap, value};
use super::*;
use crate::region::{Rng, seed};
use std::time::{Duration, Instant};

const WORKERS: usize = 2;
const PART: usize = 512;

/// Each worker writes, removes and reads pages of its own part, whose contents it knows exactly. It unmaps and pages out any
/// pages.
pub fn stress(m: &SharedMapping, number: usize) {
    let mut rng = Rng::new(seed().wrapping_add(number as u64));
    let mut model = vec![0u64; PART];
    let first = number * PART;
    let word = |page: usize, i: usize, v: u64| {
        if v == 0 { 0 } else { v << 32 | ((page * 512 + i) as u64 ^ v << 13).wrapping_mul(0x9e37_79b9) & 0xffff_ffff }
    };
    let range = |rng: &mut Rng, pages: usize| {
        let from = rng.below(pages);
        let most = if rng.below(16) == 0 { pages } else { 24 };
        from..from + 1 + rng.below((pages - from).min(most))
    };
    say("begun");
    for step in 1.. {
        match rng.below(16) {
            0 | 1 => {
                let r = range(&mut rng, PART);
                remove(m, first + r.start..first + r.end);
                model[r.clone()].fill(0);
                let map = m.page_map();
                let map = map.map();
                for page in r {
                    let page = first + page;
                    assert_eq!(state(map.get(page as u64)), NONE, "step {step}: page {page} is known");
                    if rng.below(2) == 0 {
                        let old = words(m, page).iter().position(|w| w.load(Relaxed) != 0);
                        assert_eq!(old, None, "step {step}: page {page} came back");
                    }
                }
            }
            2 => {
                let r = range(&mut rng, WORKERS * PART);
                unmap(m, r);
            }
            3 => drop(m.page_out(bytes(range(&mut rng, WORKERS * PART))).unwrap()),
            4..10 => {
                let page = rng.below(PART);
                words(m, first + page).iter().enumerate().for_each(|(i, w)| w.store(word(page, i, step), Relaxed));
                model[page] = step;
            }
            10..15 => {
                let page = rng.below(PART);
                for (i, w) in words(m, first + page).iter().enumerate() {
                    let (is, v) = (w.load(Relaxed), model[page]);
                    assert_eq!(is, word(page, i, v), "step {step}: page {}, word {i}, version {v}", first + page);
                }
            }
            // A touch without a check makes pages known that nobody knows of.
            _ => drop(touch(m, first + rng.below(PART))),
        }
    }
}

/// Two processes write, remove and unmap, pages go out all the while, and some callers are killed. To run longer:
/// UZSWAP_TEST_SECONDS.
#[test]
fn processes_that_remove_and_unmap_at_once_see_what_they_wrote() {
    let _one = crate::region::alone();
    let seconds = std::env::var("UZSWAP_TEST_SECONDS").map_or(6, |s| s.parse().unwrap());
    let mut rng = Rng::new(seed());
    let path = socket_path("removes");
    let region = region((WORKERS + 1) * PART * PAGE, 8 * MIB);
    region.serve(&path).unwrap();
    let start = |i: usize| {
        let mut child = worker("removes", &path, i).spawn().unwrap();
        let mut lines = Lines::of(&mut child);
        assert_eq!(lines.next().as_deref(), Some("begun"));
        (child, lines)
    };
    let mut workers: Vec<_> = (0..WORKERS).map(start).collect();
    let (mut kills, control) = (0, region.control());
    let mine = region.map().unwrap();
    let end = Instant::now() + Duration::from_secs(seconds);
    // If others want the CPUs as well it takes longer until enough is out.
    let few = || control.stats().unwrap().swpout <= 1000 && end.elapsed() < LONGEST;
    let mut round = 0;
    while Instant::now() < end || few() {
        for (i, (child, _)) in workers.iter_mut().enumerate() {
            assert_eq!(child.try_wait().unwrap(), None, "worker {i} failed: {:?}", control.stats());
        }
        // A process that does none of this sees its own pages unharmed.
        round += 1;
        (0..PART).step_by(7).for_each(|page| write(&mine, WORKERS * PART + page, round));
        control.page_out(0..mine.len()).unwrap();
        if rng.below(4) == 0 {
            control.age().unwrap();
            control.inject(NEAR, rng.below(2) as u64).unwrap();
        }
        assert!((0..PART).step_by(7).all(|page| value(&mine, WORKERS * PART + page) == round));
        if rng.below(40) == 0 {
            // The contents of its part are then unknown: all of it goes.
            let i = rng.below(WORKERS);
            workers[i].0.kill().unwrap();
            workers[i].0.wait().unwrap();
            control.remove(bytes(i * PART..(i + 1) * PART)).unwrap();
            workers[i] = start(i);
            kills += 1;
        }
    }
    for (child, _) in &mut workers {
        assert_eq!(child.try_wait().unwrap(), None, "a worker failed: {:?}", control.stats());
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let stats = control.stats().unwrap();
    println!("{kills} kills, {round} rounds, {stats:?}");
    assert!(stats.swpout > 1000, "{stats:?}");
    // Each worker has one thread that touches the region, and nothing interrupts it: no event can come where a fault was asked
    // for.
    assert_eq!(stats.unvouched, 0, "{stats:?}");
}

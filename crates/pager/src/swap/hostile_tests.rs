//! Tests of the books of a swap file that any member of the group may have scribbled over: whoever uses them may lose what is on
//! disk, and learns of that, but does not panic, overflow or hang.

use super::clusters::{ClusterMap, ROWS};
use super::references::References;
use super::writeback::{Block, NoRun, RUN_BYTES, Round, blocks, bytes_of};
use super::*;
use crate::testing::{self, Scribbler, half_noise, within};
use core::time::Duration;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use uzswap_sys::memfd;
use uzswap_sys::process::Identity;

const LIMIT: usize = 8 << 20;
const FIRST: u64 = 0x1_0000;
/// Bytes of a cluster of the file, and their number.
const CLUSTER: u64 = 256 << 10;
const CLUSTERS: u32 = 256;

/// Scribbles over the books of a file, whose size seems to be `bytes` then.
fn scribble(map: &'static ClusterMap, by: &mut Scribbler, bytes: u64) {
    // SAFETY: the books are all atomics, and hold words of eight bytes.
    unsafe { by.fill(map, 8) };
    map.bytes.store(bytes, Relaxed);
    map.remote.store(0, Relaxed);
}

/// Some rounds of the writing thread, whose writes all succeed.
fn writes(p: &'static Pager, buffer: &mut [Block], from: u64) {
    for vpn in from..from + 40 {
        let s = &mut *p.state.lock();
        let handle = testing::store(s, vpn, 0, 0, half_noise);
        object::set_flags(s.object(handle), object::TRIED, 0);
    }
    for _ in 0..5 {
        let round = {
            let s = &mut *p.state.lock();
            let swap = s.swap.as_mut().unwrap();
            (swap.rest_until, swap.failures) = (0, 0);
            swap.shrinker.press(1 << 20, 1, 1 << 20, 1 << 20, &DiskReads::new());
            let mut swap = s.swap.take().unwrap();
            swap.look_for_room(p);
            swap.is_short_without_the_dead(p);
            s.give_way(&mut swap);
            let _ = p.write_back_wanted(s, &mut swap);
            s.swap = Some(swap);
            let round = p.plan_round(s, 0, bytes_of(buffer));
            if matches!(round, Round::Write(..)) {
                p.complete(s, 0, Ok(()));
            }
            round
        };
        match round {
            Round::Extend(cluster) => p.extend(cluster),
            // What was read is not what was written.
            Round::Compact(sparse) => p.compacted(sparse, &mut bytes_of(buffer)[..sparse.len], Ok(())),
            Round::Write(..) | Round::Rest(_) | Round::NotYet | Round::Again => {}
        }
    }
}

#[test]
fn whatever_stands_in_the_books_nobody_panics_or_hangs() {
    within(Duration::from_secs(240), || {
        let (p, mut by) = (testing::pager_with_swap(LIMIT), Scribbler::new());
        let (map, me) = (p.clusters.unwrap(), Identity::own());
        let mut buffer = blocks(RUN_BYTES);
        for round in 0..3 {
            // The file seems to be as large as it is, or of any other size.
            let sizes = [u64::from(CLUSTERS) * CLUSTER, by.word(), by.below(1 << 38)];
            for bytes in sizes {
                scribble(map, &mut by, bytes);
                writes(p, &mut buffer, FIRST + round * 64);
                assert!(map.clusters_used() <= map.clusters() as usize);
                map.has_filled(7);
                map.is_claimed_by(by.word() as u32, by.below(2 * ROWS as u64) as usize, by.word());
            }
            scribble(map, &mut by, sizes[0]);
            map.bury_the_dead(me);
            scribble(map, &mut by, sizes[0]);
            map.forget_own(me);
            scribble(map, &mut by, sizes[0]);
            p.make_row_for_child(1);
            p.end_fork(-1);
            map.take_row(me).into_iter().for_each(|row| map.note_writing(row, 0, Some(1)));
        }
        assert!(by.is_unharmed());
        p.state.lock().rss = 0;
    });
}

/// Runs from the writing thread's search for room, each in another cluster than those before. (Those are `bad`.)
fn runs_in_new_clusters(p: &Pager, swap: &mut Swap, most: usize) -> Vec<u32> {
    let mut found = Vec::new();
    while found.len() < most {
        match p.find_run(swap) {
            Ok(run) => {
                found.push(run.cluster());
                swap.bad.push(run.cluster());
            }
            Err(NoRun::Extend(cluster)) => panic!("all of the file is there, cluster {cluster} too"),
            Err(NoRun::Again) => {}
            Err(NoRun::Sparse(_)) => panic!("nothing has been released"),
            Err(NoRun::Full(_)) => break,
        }
    }
    found
}

/// See [`Swap::enter`].
#[test]
fn what_this_process_has_is_not_claimed_again() {
    let p = testing::pager_with_swap(LIMIT);
    let (map, s) = (p.clusters.unwrap(), &mut *p.state.lock());
    let swap = s.swap.as_mut().unwrap();
    let mut found = runs_in_new_clusters(p, swap, 8);
    assert_eq!(found.len(), 8);
    // All seems to be free.
    map.reset();
    found.extend(runs_in_new_clusters(p, swap, 8));
    assert_eq!(found.len(), 16);
    found.sort_unstable();
    found.dedup();
    assert_eq!(found.len(), 16, "each was found once");
    let sees_double = map.claim_side_by_side(swap.row, 2, |c| !swap.books.has_cluster(c)).unwrap();
    assert!(!found.contains(&sees_double));
}

/// See [`Swap::enter`].
#[test]
fn a_file_does_not_get_more_clusters_than_it_had() {
    let p = testing::pager_with_swap(LIMIT);
    let (map, s) = (p.clusters.unwrap(), &mut *p.state.lock());
    [&map.bytes, &map.allocated].iter().for_each(|bytes| bytes.store(1 << 38, Relaxed));
    let found = runs_in_new_clusters(p, s.swap.as_mut().unwrap(), 1000);
    assert_eq!((found.len(), found.iter().max()), (CLUSTERS as usize, Some(&(CLUSTERS - 1))));
    // What was claimed beyond is given back.
    assert!(map.is_free(CLUSTERS));
}

/// The story: before a cluster is written to in which a dead process may be writing still, a hole is punched there. Its place was
/// taken from the shared books: with another size there the hole would be where other clusters have their data.
#[test]
fn where_a_cluster_is_does_not_depend_on_the_shared_books() {
    let p = testing::pager_with_swap(LIMIT);
    let file = std::fs::File::from(memfd::create(c"swap", 64 << 20).unwrap());
    p.tier.file.store(file.as_raw_fd(), Relaxed);
    let map = p.clusters.unwrap();
    let row = p.own_row(map).unwrap();
    let cluster = (0..5).map(|_| map.claim_cluster(row).unwrap()).last().unwrap();
    map.late(cluster as usize / 64).fetch_or(1 << (cluster % 64), SeqCst);
    // Where the cluster would be if clusters had 4 MiB.
    map.bytes.store(1 << 38, Relaxed);
    let elsewhere = u64::from(cluster) << 22;
    file.write_all_at(b"data", elsewhere).unwrap();
    file.write_all_at(b"late", u64::from(cluster) * CLUSTER).unwrap();
    p.extend(cluster);
    let read = |at: u64| {
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    };
    assert_eq!((read(elsewhere), read(u64::from(cluster) * CLUSTER)), (*b"data", [0; 4]));
    assert!(!map.is_late(cluster));
}

/// The story: whether data is encrypted was a word of which 0 said no. After a member's stray write the processes that began later
/// wrote in the clear.
#[test]
fn no_stray_word_has_data_written_in_the_clear() {
    let (books, mut by) = (testing::books(), Scribbler::new());
    let is_encrypted = |swap: Option<Box<Swap>>| swap.is_some_and(|swap| swap.seal.is_some());
    let reads: &'static DiskReads = Box::leak(Box::new(DiskReads::new()));
    assert!(!is_encrypted(Swap::of(books, reads)), "these books say so");
    for word in [0, 1, 2, u32::MAX].into_iter().chain((0..20).map(|_| by.word() as u32)) {
        books.clear.store(word, Relaxed);
        assert!(is_encrypted(Swap::of(books, reads)), "{word:x}");
    }
}

//! The swap file's planner, compared with a model of the file: who owns each grain, and which block each run writes.

use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use uzswap_mm::swapfile::{BLOCK, GRAIN, Geometry, LEAST_CLUSTER, MOST_BYTES, MOST_CLUSTERS, Object, SwapFile, offset};

const CLUSTERS: u32 = 6;
const LEAST: usize = 20 << 10;

#[derive(Clone, Debug)]
enum Step {
    /// One write: objects of these lengths and numbers of pages.
    Write(Vec<(usize, u8)>),
    /// Ends one page's reference to the n-th object.
    Release(usize, u8),
    /// From now on one page of the n-th object, if the object has it, is also in memory, or no longer is.
    Keep(usize, u8),
    /// From now on this cluster is shared with another process, or no longer is.
    Share(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let object = (32usize..17_000, 1u8..=4);
    let step = prop_oneof![
        2 => proptest::collection::vec(object, 1..40).prop_map(Step::Write),
        20 => (any::<usize>(), 0u8..4).prop_map(|(n, page)| Step::Release(n, page)),
        5 => (any::<usize>(), 0u8..4).prop_map(|(n, page)| Step::Keep(n, page)),
        1 => (0..CLUSTERS).prop_map(Step::Share),
    ];
    proptest::collection::vec(step, 1..300)
}

#[derive(Default)]
struct Model {
    /// Byte ranges of objects, by place.
    objects: BTreeMap<u32, (usize, u16, u32)>,
    /// Number of pages that each was written for.
    pages: BTreeMap<u32, usize>,
    /// The pages of these that are kept.
    kept: BTreeMap<u32, u16>,
    /// Clusters given to the planner.
    given: BTreeSet<u32>,
    /// Of each, the grains that were released and not written to since, and where its furthest object so far ended.
    gaps: BTreeMap<u32, (usize, u64)>,
    shared: BTreeSet<u32>,
    /// The number that the next object gets for its checksum.
    number: u32,
}

/// Grains of an object, with these pages left of so many, that are left out when it moves.
fn gap(len: usize, pages: usize, live: u16) -> usize {
    let left = live.count_ones() as usize;
    match left {
        0 => len / GRAIN,
        _ if len >= pages * BLOCK || 2 * left <= pages => len / GRAIN * (pages - left) / pages,
        _ => 0,
    }
}

impl Model {
    /// The blocks that objects are in.
    fn blocks(&self) -> BTreeSet<u64> {
        let block = BLOCK as u64;
        self.objects
            .iter()
            .flat_map(|(p, (len, ..))| offset(*p) / block..(offset(*p) + *len as u64).div_ceil(block))
            .collect()
    }

    /// Bytes of the largest run of free blocks in a cluster.
    fn largest_hole(&self, cluster: u32) -> usize {
        let blocks = LEAST_CLUSTER / BLOCK;
        let (taken, first) = (self.blocks(), cluster as u64 * blocks as u64);
        let free: Vec<bool> = (first..first + blocks as u64).map(|b| !taken.contains(&b)).collect();
        free.split(|free| !free).map(|hole| hole.len() * BLOCK).max().unwrap_or(0)
    }

    /// If no cluster is fresh: a large hole of the emptiest cluster that has one, else the largest hole.
    fn holes(&self, file: &SwapFile, most: usize) -> Result<(), TestCaseError> {
        let mine = |c: u32| !self.shared.contains(&c);
        let writable = || self.given.iter().copied().filter(|c| mine(*c));
        let used = |c: u32| -> usize {
            let base = u64::from(c) * LEAST_CLUSTER as u64;
            let inside =
                self.objects.iter().filter(|(p, _)| (base..base + LEAST_CLUSTER as u64).contains(&offset(**p)));
            inside.map(|(_, (len, ..))| *len).sum()
        };
        let most_blocks = most / BLOCK * BLOCK;
        let large = writable().filter(|c| self.largest_hole(*c).min(most_blocks) >= LEAST).map(used).min();
        let found = file.run_in_hole(LEAST, most, mine);
        prop_assert_eq!(found.map(|run| used(run.cluster())), large);
        let largest = |c: u32| self.largest_hole(c).min(most_blocks);
        if let Some(run) = found {
            prop_assert_eq!(run.bytes(), largest(run.cluster()));
        }
        let all = writable().map(largest).max().filter(|bytes| *bytes > 0);
        prop_assert_eq!(file.run_in_largest_hole(most, mine).map(|run| run.bytes()), all);
        Ok(())
    }

    /// One write of `objects`, as many as fit into the run that the planner gives.
    fn write(&mut self, file: &mut SwapFile, objects: Vec<(usize, u8)>) -> Result<(), TestCaseError> {
        let shared = self.shared.clone();
        let mine = |c: u32| !shared.contains(&c);
        let mut run = file.run_behind_last(LEAST, LEAST_CLUSTER, mine);
        if run.is_none()
            && let Some(fresh) = (0..CLUSTERS).find(|c| !self.given.contains(c) && mine(*c))
        {
            file.add_cluster(fresh);
            self.given.insert(fresh);
            run = file.run_behind_last(LEAST, LEAST_CLUSTER, mine);
            prop_assert!(run.is_some());
        }
        let run = run.or_else(|| file.run_in_hole(LEAST, LEAST_CLUSTER, mine));
        let least = if run.is_some() { LEAST } else { BLOCK };
        let Some(mut run) = run.or_else(|| file.run_in_largest_hole(LEAST_CLUSTER, mine)) else { return Ok(()) };
        prop_assert!(mine(run.cluster()) && run.bytes() >= least);
        prop_assert!(least == LEAST || run.bytes() < LEAST, "there was a larger one");
        let occupied = self.blocks();
        for (len, pages) in objects {
            let live = (1u16 << pages) - 1;
            let filled = run.filled();
            let Some(place) = file.put(&mut run, len, live, self.number) else {
                prop_assert!(filled + len.next_multiple_of(GRAIN) > run.bytes());
                break;
            };
            let object = file.get(place).unwrap();
            prop_assert_eq!((object.len, object.pages), (len.next_multiple_of(GRAIN), pages as usize));
            self.pages.insert(place, object.pages);
            prop_assert!(self.objects.insert(place, (object.len, live, self.number)).is_none());
            let (gaps, reached) = self.gaps.entry(run.cluster()).or_default();
            if offset(place) < *reached {
                *gaps = gaps.saturating_sub(object.len / GRAIN);
            }
            *reached = (*reached).max(offset(place) + object.len as u64);
            self.number += 1;
        }
        if run.filled() == 0 {
            // None fits into a small hole: nothing is written.
            return Ok(());
        }
        let (at, len) = file.extent(&run);
        prop_assert!(at.is_multiple_of(BLOCK as u64) && len.is_multiple_of(BLOCK));
        let (first, last) = (at / BLOCK as u64, (at + len as u64) / BLOCK as u64);
        prop_assert!(!(first..last).any(|b| occupied.contains(&b)), "a write covers what was there");
        let cluster = LEAST_CLUSTER as u64;
        prop_assert!(at / cluster == (at + len as u64 - 1) / cluster, "a write crosses clusters");
        if file.drop_if_empty(run.cluster()) {
            self.given.remove(&run.cluster());
        }
        Ok(())
    }

    /// Ends one page's reference to the n-th object, if it has one.
    fn release(&mut self, file: &mut SwapFile, n: usize, page: u8) -> Result<(), TestCaseError> {
        let bit = 1u16 << page;
        let nth = self.objects.iter().nth(n % self.objects.len().max(1));
        let Some((&place, &(len, live, check))) = nth.filter(|(_, (_, live, _))| live & bit != 0) else {
            return Ok(());
        };
        prop_assert!(!file.drop_if_empty((offset(place) / LEAST_CLUSTER as u64) as u32), "it is not empty");
        prop_assert!(!file.drop_if_empty(CLUSTERS), "nobody has it");
        let cluster = (offset(place) / LEAST_CLUSTER as u64) as u32;
        let before = gap(len, self.pages[&place], live);
        self.gaps.entry(cluster).or_default().0 += gap(len, self.pages[&place], live & !bit) - before;
        let emptied = file.release(place, bit);
        *self.kept.entry(place).or_default() &= !bit;
        if live & !bit == 0 {
            self.objects.remove(&place);
            self.kept.remove(&place);
            prop_assert!(file.get(place).is_none());
        } else {
            self.objects.insert(place, (len, live & !bit, check));
        }
        let last = !self.objects.keys().any(|p| offset(*p) / LEAST_CLUSTER as u64 == u64::from(cluster));
        prop_assert_eq!(emptied, last.then_some(cluster));
        if last {
            self.given.remove(&cluster);
            self.gaps.remove(&cluster);
        }
        Ok(())
    }

    /// What is to be compacted: in the cluster with the largest gaps, and whole objects only.
    fn sparsest(&self, file: &SwapFile, least: usize, most: usize) -> Result<(), TestCaseError> {
        let gaps = |c: &u32| self.gaps.get(c).map_or(0, |(gaps, _)| gaps * GRAIN);
        let within = |c: u64| {
            let inside = self.objects.range((c * LEAST_CLUSTER as u64 / GRAIN as u64) as u32..);
            inside.take_while(move |(p, _)| offset(**p) / LEAST_CLUSTER as u64 == c)
        };
        let mine = |c: u32| !self.shared.contains(&c);
        let has_any = |c: &u32| within(u64::from(*c)).next().is_some();
        let largest = self.given.iter().filter(|c| mine(**c) && gaps(c) >= least && has_any(c)).map(gaps).max();
        let found = file.sparsest(least, most, mine);
        prop_assert_eq!(found.map(|sparse| file.gaps_bytes(sparse.cluster)), largest);
        let Some(sparse) = found else { return Ok(()) };
        let (at, end) = (sparse.at, sparse.at + sparse.len as u64);
        prop_assert!(at.is_multiple_of(BLOCK as u64) && sparse.len.is_multiple_of(BLOCK) && sparse.len <= most);
        prop_assert_eq!(
            (at / LEAST_CLUSTER as u64, (end - 1) / LEAST_CLUSTER as u64),
            (sparse.cluster.into(), sparse.cluster.into())
        );
        let objects: Vec<_> =
            within(sparse.cluster.into()).filter(|(p, _)| offset(**p) >= at && offset(**p) < end).collect();
        let whole = objects.iter().take_while(|(p, (len, ..))| offset(**p) + *len as u64 <= end).count();
        prop_assert!(whole > 0 && whole + 1 >= objects.len());
        if most == LEAST_CLUSTER {
            prop_assert_eq!(whole, within(sparse.cluster.into()).count(), "all of a cluster that is no longer");
        }
        Ok(())
    }

    /// One page of the n-th object is also in memory now, or no longer is.
    fn keep(&mut self, file: &mut SwapFile, n: usize, page: u8) {
        let bit = 1u16 << page;
        let nth = self.objects.iter().nth(n % self.objects.len().max(1));
        let Some((&place, _)) = nth.filter(|(_, (_, live, _))| live & bit != 0) else { return };
        let kept = self.kept.entry(place).or_default();
        if *kept & bit == 0 {
            file.keep(place, bit)
        } else {
            file.put_out(place, bit)
        }
        *kept ^= bit;
    }

    /// Compares everything that both hold, and what is found in a range.
    fn agrees(&self, file: &SwapFile) -> Result<(), TestCaseError> {
        prop_assert_eq!(file.clusters().collect::<BTreeSet<_>>(), self.given.clone());
        prop_assert_eq!(file.used_bytes(), self.objects.values().map(|(len, ..)| *len).sum::<usize>());
        let kept: u32 = self.kept.values().map(|kept| kept.count_ones()).sum();
        prop_assert_eq!(file.kept_pages(), kept as usize);
        let waste = |(place, (len, live, _)): (&u32, &(usize, u16, u32))| {
            let pages = self.pages[place];
            len / GRAIN * (pages - live.count_ones() as usize) / pages * GRAIN
        };
        prop_assert_eq!(file.wasted_bytes(), self.objects.iter().map(waste).sum::<usize>());
        // The books take something for each object and cluster, and nothing if there are none.
        let (least, books) = (12 * self.objects.len() + 64 * self.given.len(), file.metadata_bytes());
        prop_assert!(
            if least == 0 { books == 0 } else { (least..=4 * least + 4096).contains(&books) },
            "{} {}",
            least,
            books
        );
        prop_assert_eq!(file.cluster_bytes(), LEAST_CLUSTER);
        let (from, len) = (u64::from(self.number % 90) * 20_000, (self.number as usize % 7) * 50_000);
        let within = self
            .objects
            .iter()
            .filter(|(p, (l, ..))| offset(**p) >= from && offset(**p) + *l as u64 <= from + len as u64);
        // Objects that are only on disk, before and behind.
        let wanting = |p: &&u32| self.objects[*p].1 != self.kept.get(*p).copied().unwrap_or(0);
        let only = |object: &Object| object.live != object.kept;
        let behind = self.objects.keys().filter(wanting).find(|p| offset(**p) >= from).copied();
        prop_assert_eq!(file.next_object(from, only).map(|(place, _)| place), behind);
        let before = self.objects.keys().filter(wanting).rfind(|p| offset(**p) < from).copied();
        prop_assert_eq!(file.previous_object(from, only).map(|(place, _)| place), before);
        let found: Vec<u32> = file.objects_within(from, len).map(|(place, _)| place).collect();
        prop_assert_eq!(found, within.map(|(p, _)| *p).collect::<Vec<_>>());
        for (place, (len, live, check)) in &self.objects {
            let object = file.get(*place).unwrap();
            let kept = self.kept.get(place).copied().unwrap_or(0);
            prop_assert_eq!((object.len, object.live, object.kept, object.check), (*len, *live, kept, *check));
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_object_is_ever_overwritten(steps in steps()) {
        let mut file = SwapFile::new(Geometry::of(u64::from(CLUSTERS) * LEAST_CLUSTER as u64).unwrap());
        let mut model = Model::default();
        for step in steps {
            match step {
                Step::Write(objects) => model.write(&mut file, objects)?,
                Step::Release(n, page) => model.release(&mut file, n, page)?,
                Step::Keep(n, page) => model.keep(&mut file, n, page),
                Step::Share(cluster) => {
                    if !model.shared.remove(&cluster) {
                        model.shared.insert(cluster);
                    }
                }
            }
            model.agrees(&file)?;
            [LEAST_CLUSTER, 30_000].into_iter().try_for_each(|most| model.holes(&file, most))?;
            let sizes = [(LEAST_CLUSTER / 4, LEAST_CLUSTER), (GRAIN, LEAST_CLUSTER), (LEAST_CLUSTER / 2, LEAST_CLUSTER / 4)];
            sizes.into_iter().try_for_each(|(least, most)| model.sparsest(&file, least, most))?;
        }
    }

    #[test]
    fn geometry_fits(bytes in 0..MOST_BYTES * 2) {
        match Geometry::of(bytes) {
            None => prop_assert!(bytes < LEAST_CLUSTER as u64 || bytes > MOST_BYTES),
            Some(g) => {
                prop_assert!(g.clusters as usize <= MOST_CLUSTERS && g.cluster_shift >= 18 && g.cluster_shift <= 22);
                let used = u64::from(g.clusters) << g.cluster_shift;
                prop_assert!(used <= bytes && bytes - used < 1 << g.cluster_shift);
            }
        }
    }
}

#[test]
fn geometry_at_its_edges() {
    for (bytes, want) in [
        (0, None),
        (LEAST_CLUSTER as u64 - 1, None),
        (LEAST_CLUSTER as u64, Some((18, 1))),
        (16 << 30, Some((18, 65_536))),
        ((16 << 30) + (1 << 20), Some((19, 32_770))),
        (MOST_BYTES, Some((22, 65_536))),
        (MOST_BYTES + 1, None),
    ] {
        assert_eq!(Geometry::of(bytes).map(|g| (g.cluster_shift, g.clusters)), want, "{bytes}");
    }
}

/// A fresh cluster can be written whole, but not beyond its end.
#[test]
fn a_fresh_cluster_is_one_run() {
    let mut file = SwapFile::new(Geometry::of(4 * LEAST_CLUSTER as u64).unwrap());
    file.add_cluster(2);
    let run = |least: usize| file.run_behind_last(least, LEAST_CLUSTER, |_| true);
    assert_eq!(run(LEAST_CLUSTER).map(|run| (run.cluster(), run.bytes(), run.filled())), Some((2, LEAST_CLUSTER, 0)));
    assert_eq!(file.extent(&run(0).unwrap()), (2 * LEAST_CLUSTER as u64, 0));
    assert_eq!(file.run_behind_last(0, 1 << 30, |_| true).map(|run| run.bytes()), Some(LEAST_CLUSTER));
    assert!(run(LEAST_CLUSTER + 1).is_none());
    assert!(file.run_behind_last(0, 1 << 30, |cluster| cluster != 2).is_none(), "it may not write there");
    // A cluster that is gone is no longer written to.
    assert!(file.drop_if_empty(2) && file.run_behind_last(0, 1 << 30, |_| true).is_none());
}

/// A cluster whose gaps were forgotten is compacted again once as much was released there anew. A gap that was written to is none.
#[test]
fn gaps_come_back_by_what_is_released() {
    let mut file = SwapFile::new(Geometry::of(4 * LEAST_CLUSTER as u64).unwrap());
    file.add_cluster(1);
    let mut run = file.run_behind_last(0, LEAST_CLUSTER, |_| true).unwrap();
    let places: Vec<u32> = (0..16).map(|_| file.put(&mut run, 16 << 10, 1, 0).unwrap()).collect();
    let found =
        |file: &SwapFile| file.sparsest(64 << 10, LEAST_CLUSTER, |_| true).map(|sparse| (sparse.at, sparse.len));
    let release = |file: &mut SwapFile, places: &[u32]| places.iter().for_each(|p| _ = file.release(*p, 1));
    release(&mut file, &places[..3]);
    assert_eq!((file.gaps_bytes(1), found(&file)), (48 << 10, None));
    release(&mut file, &places[15..]);
    let behind = LEAST_CLUSTER + (48 << 10);
    assert_eq!((file.gaps_bytes(1), found(&file)), (64 << 10, Some((behind as u64, 192 << 10))));
    assert!(file.sparsest(64 << 10, LEAST_CLUSTER, |c| c != 1).is_none());
    file.forget_gaps(1);
    release(&mut file, &places[12..15]);
    assert_eq!((file.gaps_bytes(1), found(&file)), (48 << 10, None));
    release(&mut file, &places[11..12]);
    assert_eq!(found(&file), Some((behind as u64, 128 << 10)));
    let mut hole = file.run_in_hole(4096, LEAST_CLUSTER, |_| true).unwrap();
    assert!(file.put(&mut hole, 4096, 1, 0).is_some());
    assert_eq!((file.gaps_bytes(1), found(&file)), (60 << 10, None));
}

/// Of a long cluster the emptiest part is compacted.
#[test]
fn the_emptiest_part_of_a_long_cluster_is_found() {
    let geometry = Geometry { cluster_shift: 20, clusters: 1 };
    let mut file = SwapFile::new(geometry);
    file.add_cluster(0);
    let mut run = file.run_behind_last(0, 1 << 20, |_| true).unwrap();
    let places: Vec<u32> = (0..256).map(|_| file.put(&mut run, 4096, 1, 0).unwrap()).collect();
    let mut release = |gone: &dyn Fn(usize) -> bool| {
        (0..256).filter(|i| gone(*i)).for_each(|i| _ = file.release(places[i], 1));
        file.sparsest(1, LEAST_CLUSTER, |_| true).map(|sparse| (sparse.at / 4096, sparse.len / 4096))
    };
    assert_eq!(release(&|_| false), None);
    // A page in two of the third quarter, and one in four of the last.
    assert_eq!(release(&|i| (128..192).contains(&i) && i % 2 == 1 || i >= 192 && i % 4 == 3), Some((128, 63)));
}

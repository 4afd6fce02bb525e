//! The swap file: decides where on disk each object lies, and what one write covers.
//!
//! It is a pure planner: it makes no OS calls and never sees a byte of data. The file is divided into *clusters*. Each
//! belongs to one process of the group at a time; the layer above decides which, adds clusters here and takes them
//! back. Inside a cluster objects are packed, several to a page, in *runs*. A run is written with one system call,
//! starts and ends on a block of 4 KiB, and shares no block with another run.
//!
//! ```text
//! file     | cluster 0 | cluster 1 | ...                     each 256 KiB to 4 MiB, a power of two
//! cluster  | run: object object obj│pad | hole | run ...     objects in grains of 64 bytes, runs in blocks of 4 KiB
//! ```
//! A write goes behind the last one in its cluster, else to a new cluster, and to a hole only if there is no new
//! cluster. The hole is the largest one of a cluster that nobody else reads; after a fork a child may still need what
//! its parent has freed, so the caller says which clusters are its own alone. If no hole is large enough for a
//! worthwhile write, the largest of all is taken.
//!
//! Invariants:
//! - A page that is in memory as well and *keeps* its place refers to the object just as one that is on disk only.
//! - Objects of a cluster are disjoint and sorted, and none crosses the cluster's end. An object has at least one live
//!   page.
//! - A run covers no block in which an older object lies.
//! - `used` is the sum of the lengths of all objects, in grains, `waste` that of the parts of them whose pages have gone, and
//!   `kept` the number of all pages that keep their places.
//! - A cluster's `gaps` are what was released in it and not written to since, in grains: what moving its objects closer together
//!   wins. What a run left free at its end, or at the end of the cluster, is no gap.
//!
//! Ownership: one owner, `&mut self` (the pager's lock).

use std::collections::BTreeMap;

/// Granularity of places. With 64 a `u32` addresses 256 GiB, and an object wastes 32 bytes on average.
pub const GRAIN: usize = 64;
/// Alignment of runs: the unit that a disk and the page cache read and write.
pub const BLOCK: usize = 4096;
/// Smallest cluster, in bytes: large enough for a write to count as sequential.
pub const LEAST_CLUSTER: usize = 256 << 10;
/// Most clusters of a file: the group's tables have room for no more.
pub const MOST_CLUSTERS: usize = 65_536;
/// Largest file.
pub const MOST_BYTES: u64 = (GRAIN as u64) << 32;
const GRAINS_PER_BLOCK: usize = BLOCK / GRAIN;
/// Bits of an object's length in grains, and the largest.
const LEN_BITS: u32 = 12;
const MOST_GRAINS: usize = (1 << LEN_BITS) - 1;

/// How a file of a given size is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of a cluster, as a power of two.
    pub cluster_shift: u32,
    /// Number of clusters. What is left of the file's size is not used.
    pub clusters: u32,
}

impl Geometry {
    /// The division of a file of at most `bytes`; `None` if that is less than one cluster or more than [`MOST_BYTES`].
    pub fn of(bytes: u64) -> Option<Self> {
        if bytes > MOST_BYTES {
            return None;
        }
        let mut shift = LEAST_CLUSTER.trailing_zeros();
        while bytes >> shift > MOST_CLUSTERS as u64 {
            shift += 1;
        }
        let clusters = (bytes >> shift) as u32;
        (clusters > 0).then_some(Self { cluster_shift: shift, clusters })
    }
}

/// The place of an object, as a page-table entry holds it: grains from the start of the file.
pub type Place = u32;

/// The byte offset of a place.
pub fn offset(place: Place) -> u64 {
    u64::from(place) * GRAIN as u64
}

/// An object in a cluster.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// First grain, from the cluster's start.
    at: u16,
    /// Length in grains, and above that the number of pages that it was written for, less one.
    size: u16,
    /// Pages that still refer to it, a bit each.
    live: u16,
    /// Those of them that are in memory as well, a bit each.
    kept: u16,
    /// The caller's checksum of its contents.
    check: u32,
}

impl Slot {
    /// Length in grains.
    fn len(&self) -> usize {
        self.size as usize & MOST_GRAINS
    }

    fn end(&self) -> usize {
        self.at as usize + self.len()
    }

    /// Pages that it was written for.
    fn pages(&self) -> usize {
        (self.size >> LEN_BITS) as usize + 1
    }

    /// The part of its grains that were written for pages that refer to it no more.
    fn waste(&self) -> usize {
        self.len() * (self.pages() - self.live.count_ones() as usize) / self.pages()
    }

    /// The part of that which is left out when it moves.
    fn gap(&self) -> usize {
        let (left, pages) = (self.live.count_ones() as usize, self.pages());
        let raw = self.len() * GRAIN >= pages * BLOCK;
        if is_worth_a_cut(left, pages, raw) { self.waste() } else { 0 }
    }

    fn object(&self) -> Object {
        let len = self.len() * GRAIN;
        Object { len, live: self.live, kept: self.kept, check: self.check, pages: self.pages() }
    }
}

#[derive(Default)]
struct Cluster {
    slots: Vec<Slot>,
    /// Grains of all slots.
    used: usize,
    /// Grains of its gaps.
    gaps: usize,
    /// Where its furthest object since it was last empty ends, in grains from its start.
    reached: usize,
}

/// What the books say of an object on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    /// Bytes to read: its length rounded up to grains.
    pub len: usize,
    /// Pages that still refer to it, a bit each.
    pub live: u16,
    /// Those of them that are in memory as well, a bit each: they were read back and keep their places.
    pub kept: u16,
    /// The caller's checksum of its contents.
    pub check: u32,
    /// Number of pages that it was written for.
    pub pages: usize,
}

/// Whether an object of which `left` of `pages` pages are left is cut when it moves, so that what was written for the others is
/// left out. A `raw` one, which does not compress, is cut for each page that has gone; others no longer compress as well in parts,
/// so half of their pages must have gone.
pub fn is_worth_a_cut(left: usize, pages: usize, raw: bool) -> bool {
    left < pages && (raw || left * 2 <= pages)
}

/// A range of the file whose objects are to be moved closer together, in whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sparse {
    /// Where it begins, in bytes.
    pub at: u64,
    /// Its length in bytes.
    pub len: usize,
    /// Its cluster.
    pub cluster: u32,
}

/// A contiguous range of the file that is being filled, to be written with one call.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    cluster: u32,
    /// In grains from the cluster's start: where it starts, where the next object goes, and where it must end.
    start: usize,
    next: usize,
    end: usize,
}

/// The books of the clusters that one process has objects in.
pub struct SwapFile {
    grains: usize,
    clusters: BTreeMap<u32, Cluster>,
    /// The cluster last written to.
    current: Option<u32>,
    /// Grains that all objects take, and the part of them that was written for pages that refer to them no more.
    used: usize,
    waste: usize,
    /// Pages that keep their places.
    kept: usize,
    /// Slots for which the clusters have room allocated.
    room: usize,
}

impl SwapFile {
    /// The books without any cluster.
    pub fn new(geometry: Geometry) -> Self {
        let grains = (1usize << geometry.cluster_shift) / GRAIN;
        Self { grains, clusters: BTreeMap::new(), current: None, used: 0, waste: 0, kept: 0, room: 0 }
    }

    /// The longest possible run, in bytes: a cluster.
    pub fn cluster_bytes(&self) -> usize {
        self.grains * GRAIN
    }

    /// Bytes that all objects take.
    pub fn used_bytes(&self) -> usize {
        self.used * GRAIN
    }

    /// The part of [`used_bytes`](Self::used_bytes) that was written for pages that are there no more: objects of several pages
    /// stay whole until the last page has gone.
    pub fn wasted_bytes(&self) -> usize {
        self.waste * GRAIN
    }

    /// Number of pages that are in memory as well, and keep their places.
    pub fn kept_pages(&self) -> usize {
        self.kept
    }

    /// The clusters known here: those with objects, and those added but not used yet.
    pub fn clusters(&self) -> impl Iterator<Item = u32> + '_ {
        self.clusters.keys().copied()
    }

    /// Whether a cluster is known here.
    pub fn has_cluster(&self, cluster: u32) -> bool {
        self.clusters.contains_key(&cluster)
    }

    /// Takes over an empty cluster. The next run goes there.
    ///
    /// # Panics
    /// When the cluster is known already.
    pub fn add_cluster(&mut self, cluster: u32) {
        assert!(self.clusters.insert(cluster, Cluster::default()).is_none(), "cluster {cluster} was added twice");
        self.current = Some(cluster);
    }

    /// Gives up a cluster if it is empty; returns whether it did.
    pub fn drop_if_empty(&mut self, cluster: u32) -> bool {
        if !self.clusters.get(&cluster).is_some_and(|c| c.slots.is_empty()) {
            return false;
        }
        self.room -= self.clusters.remove(&cluster).map_or(0, |c| c.slots.capacity());
        if self.current == Some(cluster) {
            self.current = None;
        }
        true
    }

    /// A run of `least` to `most` bytes behind the last run of the current cluster.
    pub fn run_behind_last(&self, least: usize, most: usize, may_write: impl Fn(u32) -> bool) -> Option<Run> {
        self.run_at_end(self.current?, least, most, may_write)
    }

    /// The same in a given cluster.
    pub fn run_at_end(&self, cluster: u32, least: usize, most: usize, may_write: impl Fn(u32) -> bool) -> Option<Run> {
        let last = self.clusters.get(&cluster)?.slots.last().map_or(0, Slot::end);
        let start = last.next_multiple_of(GRAINS_PER_BLOCK);
        let run = clip(cluster, start, self.grains, most);
        (run.bytes() >= least && may_write(cluster)).then_some(run)
    }

    /// A run of at most `most` bytes in a hole of at least `least`: the largest hole of the emptiest cluster that has
    /// one.
    pub fn run_in_hole(&self, least: usize, most: usize, may_write: impl Fn(u32) -> bool) -> Option<Run> {
        let mut best: Option<(usize, Run)> = None;
        for (&index, cluster) in &self.clusters {
            if best.as_ref().is_some_and(|(used, _)| *used <= cluster.used)
                || (self.grains - cluster.used) * GRAIN < least
                || !may_write(index)
            {
                continue;
            }
            let largest = self.largest_hole(index, cluster, most).filter(|run| run.bytes() >= least);
            if let Some(run) = largest {
                best = Some((cluster.used, run));
            }
        }
        best.map(|(_, run)| run)
    }

    /// A run of at most `most` bytes in the largest hole there is, which is at least a block.
    pub fn run_in_largest_hole(&self, most: usize, may_write: impl Fn(u32) -> bool) -> Option<Run> {
        let writable = self.clusters.iter().filter(|(index, _)| may_write(**index));
        writable.filter_map(|(index, cluster)| self.largest_hole(*index, cluster, most)).max_by_key(Run::bytes)
    }

    /// A run in the largest hole of a cluster (the first of equals), if that has room for a block.
    fn largest_hole(&self, index: u32, cluster: &Cluster, most: usize) -> Option<Run> {
        let (mut at, mut largest) = (0, None);
        let ends = cluster.slots.iter().map(|s| (s.at as usize, s.end())).chain([(self.grains, self.grains)]);
        for (from, to) in ends {
            let (start, end) =
                (usize::next_multiple_of(at, GRAINS_PER_BLOCK), from / GRAINS_PER_BLOCK * GRAINS_PER_BLOCK);
            at = to;
            if start < end {
                let run = clip(index, start, end, most);
                if largest.is_none_or(|l: Run| run.bytes() > l.bytes()) {
                    largest = Some(run);
                }
            }
        }
        largest
    }

    /// Bytes of a cluster's gaps.
    pub fn gaps_bytes(&self, cluster: u32) -> usize {
        self.clusters.get(&cluster).map_or(0, |c| c.gaps * GRAIN)
    }

    /// Of the clusters with gaps of at least `least` bytes that the caller `may` compact, the range of at most `most` bytes that
    /// is the emptiest in the one with the largest. A cluster that is no longer is such a range.
    pub fn sparsest(&self, least: usize, most: usize, may: impl Fn(u32) -> bool) -> Option<Sparse> {
        let has_gaps = |c: &Cluster| c.gaps * GRAIN >= least && !c.slots.is_empty();
        let found = self.clusters.iter().filter(|(index, c)| has_gaps(c) && may(**index));
        let (&index, cluster) = found.max_by_key(|(_, c)| c.gaps)?;
        let block = |slot: &Slot| slot.at as usize / GRAINS_PER_BLOCK * GRAINS_PER_BLOCK;
        let (mut best, mut next): (Option<(usize, usize, usize)>, _) = (None, 0);
        while let Some(first) = cluster.slots[next..].first() {
            let from = block(first);
            let most = (from + most / GRAIN).min(self.grains);
            let inside = cluster.slots[next..].iter().take_while(|s| s.end() <= most);
            let (n, left, end) =
                inside.fold((0, 0, from), |(n, left, _), s| (n + 1, left + s.len() - s.gap(), s.end()));
            let until = cluster.slots.get(next + n).map_or(most, |s| (s.at as usize).min(most));
            let free = until - from - left;
            if n > 0 && best.is_none_or(|(least, ..)| free > least) {
                best = Some((free, from, end));
            }
            next += usize::max(n, 1);
        }
        let (_, from, end) = best?;
        let at = (index as usize * self.grains + from) as u64 * GRAIN as u64;
        Some(Sparse { at, len: (end - from).next_multiple_of(GRAINS_PER_BLOCK) * GRAIN, cluster: index })
    }

    /// What a cluster has of gaps cannot be had: it is not compacted before as much was released again.
    pub fn forget_gaps(&mut self, cluster: u32) {
        if let Some(cluster) = self.clusters.get_mut(&cluster) {
            cluster.gaps = 0;
        }
    }

    /// Puts an object of `len` bytes next in a run; `live` are the pages that refer to it, a bit each. `None` when it
    /// does not fit.
    ///
    /// # Panics
    /// When `live` is empty, or the object as large as a cluster.
    pub fn put(&mut self, run: &mut Run, len: usize, live: u16, check: u32) -> Option<Place> {
        assert!(live != 0, "an object that no page refers to");
        let grains = len.div_ceil(GRAIN);
        assert!(grains <= MOST_GRAINS, "an object of {len} bytes");
        if run.next + grains > run.end {
            return None;
        }
        let cluster = self.clusters.get_mut(&run.cluster)?;
        let size = grains as u16 | (live.count_ones() as u16 - 1) << LEN_BITS;
        let slot = Slot { at: run.next as u16, size, live, kept: 0, check };
        let at = cluster.slots.partition_point(|s| s.at < slot.at);
        let room = cluster.slots.capacity();
        cluster.slots.insert(at, slot);
        self.room += cluster.slots.capacity() - room;
        cluster.used += grains;
        // Room behind all others was no gap.
        if run.next < cluster.reached {
            cluster.gaps = cluster.gaps.saturating_sub(grains);
        }
        cluster.reached = cluster.reached.max(run.next + grains);
        self.used += grains;
        let place = self.next_place(run);
        run.next += grains;
        Some(place)
    }

    /// The place that the next object of a run will get.
    pub fn next_place(&self, run: &Run) -> Place {
        (run.cluster as usize * self.grains + run.next) as Place
    }

    /// What a run covers as filled so far: offset in the file, and length in bytes.
    pub fn extent(&self, run: &Run) -> (u64, usize) {
        let first = run.cluster as u64 * self.grains as u64 + run.start as u64;
        (first * GRAIN as u64, (run.next - run.start).next_multiple_of(GRAINS_PER_BLOCK) * GRAIN)
    }

    fn find(&self, place: Place) -> Option<(u32, usize)> {
        let (cluster, at) = (place / self.grains as u32, (place % self.grains as u32) as u16);
        let slots = &self.clusters.get(&cluster)?.slots;
        slots.binary_search_by_key(&at, |s| s.at).ok().map(|i| (cluster, i))
    }

    /// The object at a place.
    pub fn get(&self, place: Place) -> Option<Object> {
        let (cluster, i) = self.find(place)?;
        Some(self.clusters[&cluster].slots[i].object())
    }

    /// The objects that lie entirely in the `len` bytes from `at` on.
    pub fn objects_within(&self, at: u64, len: usize) -> impl Iterator<Item = (Place, Object)> + '_ {
        let grain = |byte: u64| (byte / GRAIN as u64) as usize;
        let (from, to) = (grain(at + GRAIN as u64 - 1), grain(at + len as u64));
        let clusters = self.clusters.range((from / self.grains) as u32..=(to / self.grains) as u32);
        clusters.flat_map(move |(&index, cluster)| {
            let base = index as usize * self.grains;
            let first = cluster.slots.partition_point(|s| base + (s.at as usize) < from);
            let inside = cluster.slots[first..].iter().take_while(move |s| base + s.end() <= to);
            inside.map(move |s| ((base + s.at as usize) as Place, s.object()))
        })
    }

    /// The first object at or after byte `at` for which `is_one` holds.
    pub fn next_object(&self, at: u64, is_one: impl Fn(&Object) -> bool) -> Option<(Place, Object)> {
        let grain = at.div_ceil(GRAIN as u64) as usize;
        self.clusters.range((grain / self.grains) as u32..).find_map(|(&index, cluster)| {
            let base = index as usize * self.grains;
            let first = cluster.slots.partition_point(|s| base + (s.at as usize) < grain);
            let found = cluster.slots[first..].iter().find(|s| is_one(&s.object()));
            found.map(|s| ((base + s.at as usize) as Place, s.object()))
        })
    }

    /// The last object that begins before byte `before` and for which `is_one` holds.
    pub fn previous_object(&self, before: u64, is_one: impl Fn(&Object) -> bool) -> Option<(Place, Object)> {
        let grain = before.div_ceil(GRAIN as u64) as usize;
        self.clusters.range(..=(grain / self.grains) as u32).rev().find_map(|(&index, cluster)| {
            let base = index as usize * self.grains;
            let end = cluster.slots.partition_point(|s| base + (s.at as usize) < grain);
            let found = cluster.slots[..end].iter().rev().find(|s| is_one(&s.object()));
            found.map(|s| ((base + s.at as usize) as Place, s.object()))
        })
    }

    /// Notes that these pages of an object are in memory as well, and keep their places.
    ///
    /// # Panics
    /// When there is no such object, or one of the pages did not refer to it.
    pub fn keep(&mut self, place: Place, pages: u16) {
        let slot = self.slot_mut(place);
        assert!(slot.live & pages == pages, "a page keeps a place on disk that it was not in");
        let more = (pages & !slot.kept).count_ones() as usize;
        slot.kept |= pages;
        self.kept += more;
    }

    /// Notes that these pages of an object, which kept their places, are on disk only again.
    ///
    /// # Panics
    /// When there is no such object, or one of the pages did not keep its place.
    pub fn put_out(&mut self, place: Place, pages: u16) {
        let slot = self.slot_mut(place);
        assert!(slot.kept & pages == pages, "a page goes back to a place on disk that it did not keep");
        slot.kept &= !pages;
        self.kept -= pages.count_ones() as usize;
    }

    fn slot_mut(&mut self, place: Place) -> &mut Slot {
        let (cluster, i) = self.find(place).expect("a place on disk holds an object");
        &mut self.clusters.get_mut(&cluster).expect("it was found there").slots[i]
    }

    /// Ends the references of `pages` (a bit each) to the object at a place. The object goes with its last reference.
    /// If it was the last of its cluster, the cluster is no longer known here, and is returned.
    ///
    /// # Panics
    /// When there is no such object, or one of the pages did not refer to it.
    pub fn release(&mut self, place: Place, pages: u16) -> Option<u32> {
        let (index, i) = self.find(place).expect("a place on disk holds an object");
        let cluster = self.clusters.get_mut(&index)?;
        let slot = &mut cluster.slots[i];
        assert!(slot.live & pages == pages, "a page left an object on disk that it was not in");
        self.waste -= slot.waste();
        self.kept -= (slot.kept & pages).count_ones() as usize;
        let before = slot.gap();
        slot.live &= !pages;
        slot.kept &= !pages;
        if slot.live != 0 {
            self.waste += slot.waste();
            cluster.gaps += slot.gap() - before;
        } else {
            let grains = slot.len();
            cluster.gaps += grains - before;
            cluster.slots.remove(i);
            cluster.used -= grains;
            self.used -= grains;
        }
        self.drop_if_empty(index).then_some(index)
    }

    /// Bytes that the books take. Each fault asks for this, so it searches nothing.
    pub fn metadata_bytes(&self) -> usize {
        self.room * size_of::<Slot>() + self.clusters.len() * 64
    }
}

fn clip(cluster: u32, start: usize, end: usize, most: usize) -> Run {
    let end = end.min(start + most / BLOCK * GRAINS_PER_BLOCK);
    Run { cluster, start, next: start, end: end.max(start) }
}

impl Run {
    /// Its cluster.
    pub fn cluster(&self) -> u32 {
        self.cluster
    }

    /// Bytes filled so far.
    pub fn filled(&self) -> usize {
        (self.next - self.start) * GRAIN
    }

    /// Bytes it can hold.
    pub fn bytes(&self) -> usize {
        (self.end - self.start) * GRAIN
    }
}

//! One member of the group in a replay: its pages, its objects in the pool and on disk, and its shrinker.
//!
//! What the engine keeps in tables and bytes is only numbers here: an object has a size and a number of pages, is
//! referenced or not, and is in the pool or at a place on disk. The engine's own [`Shrinker`] says which goes next.
//!
//! Invariants: `in_pool` and `stored` are sums over the objects that are not on disk. An object exists while any page
//! refers to it (`live`), and `disk` knows the place of each that is on disk. Numbers of objects are reused, so `birth`
//! tells an object that the shrinker lists from an earlier one of the same number.

use super::{Cost, Outcome};
use crate::shrinker::{Entry, Policy, Shrinker, Verdict};
use std::collections::{BTreeMap, HashMap, HashSet};

pub(super) const PAGE: usize = 4096;
/// Bytes in front of the data of an object with `pages` pages: the pager's own header, as it asserts.
#[must_use]
pub const fn head_bytes(pages: usize) -> usize {
    12 + 16 * pages
}
/// Additional bytes in front of an object on disk.
const FRONT: usize = 8;
const GRAIN: u64 = 64;
const BLOCK: u64 = 4096;
/// Pages of the largest object. A larger folio is stored as several.
pub const MOST_PAGES: usize = 16;
/// Bytes of the largest write.
const RUN_BYTES: u64 = 256 << 10;
pub(super) const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
pub(super) struct Object {
    /// Tells this object from an earlier one of the same number, whose entries are stale.
    pub(super) birth: u64,
    pub(super) bytes: u32,
    pub(super) pages: u8,
    pub(super) live: u8,
    /// Pages of it that are not in the program.
    pub(super) out: u8,
    pub(super) referenced: bool,
    /// Its place on disk, if it is there.
    pub(super) at: Option<u64>,
    /// The page where it was stored, whose block says whether it was reused.
    pub(super) vpn: u64,
}

#[derive(Clone, Copy)]
pub(super) struct Page {
    /// The object, or NONE if the page is in the program and its kept copy was given up.
    pub(super) object: u32,
    /// Bytes that the page takes when it is stored alone.
    pub(super) bytes: u16,
    pub(super) out: bool,
}

/// One member of the group.
#[derive(Clone)]
pub(super) struct World {
    pub(super) pages: HashMap<u64, Page>,
    pub(super) objects: Vec<Object>,
    pub(super) free: Vec<u32>,
    pub(super) births: u64,
    pub(super) shrinker: Shrinker,
    pub(super) disk: BTreeMap<u64, u32>,
    pub(super) disk_end: u64,
    /// Blocks of 16 pages from which a page was read back since one was last written back.
    pub(super) reused: HashSet<u64>,
    /// Bytes of objects in the pool.
    pub(super) in_pool: usize,
    /// Pages that are out and in the pool.
    pub(super) stored: usize,
    /// If the last record was [`crate::trace::Kind::MoveFrom`]: its first page and number of pages.
    pub(super) move_from: Option<(u64, usize)>,
}

impl World {
    pub(super) fn new(policy: Policy) -> Self {
        Self {
            pages: HashMap::new(),
            objects: Vec::new(),
            free: Vec::new(),
            births: 0,
            shrinker: Shrinker::new(policy),
            disk: BTreeMap::new(),
            disk_end: 0,
            reused: HashSet::new(),
            in_pool: 0,
            stored: 0,
            move_from: None,
        }
    }

    /// Forgets a page.
    pub(super) fn forget(&mut self, vpn: u64) {
        let Some(page) = self.pages.remove(&vpn) else { return };
        if page.object != NONE {
            self.release(page);
        }
    }

    fn release(&mut self, page: Page) {
        let object = &mut self.objects[page.object as usize];
        object.live -= 1;
        if page.out {
            object.out -= 1;
            self.stored -= usize::from(object.at.is_none());
        }
        if object.live == 0 {
            match object.at {
                Some(at) => drop(self.disk.remove(&at)),
                None => self.in_pool -= object.bytes as usize,
            }
            object.birth = 0;
            self.free.push(page.object);
        }
    }

    pub(super) fn forget_range(&mut self, vpn: u64, n: usize) {
        if n <= self.pages.len() {
            return (vpn..vpn + n as u64).for_each(|at| self.forget(at));
        }
        let gone: Vec<u64> = self.pages.keys().copied().filter(|at| (vpn..vpn + n as u64).contains(at)).collect();
        gone.into_iter().for_each(|at| self.forget(at));
    }

    pub(super) fn store(&mut self, vpn: u64, pages: usize, bytes: usize) {
        for from in (0..pages).step_by(MOST_PAGES) {
            let n = (pages - from).min(MOST_PAGES);
            let base = vpn + from as u64;
            self.forget_range(base, n);
            let bytes = bytes * n / pages;
            self.births += 1;
            let object = Object {
                birth: self.births,
                bytes: (head_bytes(n) + bytes) as u32,
                pages: n as u8,
                live: n as u8,
                out: n as u8,
                referenced: true,
                at: None,
                vpn: base,
            };
            let handle = match self.free.pop() {
                Some(handle) => {
                    self.objects[handle as usize] = object;
                    handle
                }
                None => {
                    self.objects.push(object);
                    self.objects.len() as u32 - 1
                }
            };
            for at in base..base + n as u64 {
                self.pages.insert(at, Page { object: handle, bytes: (bytes / n).min(PAGE) as u16, out: true });
            }
            self.in_pool += object.bytes as usize;
            self.stored += n;
            self.listed(handle);
        }
    }

    /// Lists an object that entered the pool.
    fn listed(&mut self, handle: u32) {
        let objects = &self.objects;
        self.shrinker.stored(Entry { vpn: objects[handle as usize].birth, handle });
        if self.shrinker.wants_prune() {
            self.shrinker.prune(|e| is_fresh(objects, e));
        }
    }

    /// A page that was in the program is out again, unchanged.
    pub(super) fn clean(&mut self, vpn: u64) {
        let Some(page) = self.pages.get_mut(&vpn) else { return };
        if page.object == NONE {
            // The copy was given up in this replay, so the engine would have stored the page.
            let bytes = page.bytes as usize;
            return self.store(vpn, 1, bytes);
        }
        if !page.out {
            page.out = true;
            let object = &mut self.objects[page.object as usize];
            object.out += 1;
            object.referenced = true;
            self.stored += usize::from(object.at.is_none());
        }
    }

    /// A denser object replaced that of `pages` pages.
    pub(super) fn resize(&mut self, vpn: u64, pages: usize, bytes: usize) {
        for from in (0..pages).step_by(MOST_PAGES) {
            let n = (pages - from).min(MOST_PAGES);
            let base = vpn + from as u64;
            // Some of its pages may refer to other objects by now: those are stored by themselves.
            let named = (base..base + n as u64).filter_map(|at| self.pages.get(&at)).map(|page| page.object);
            let mut named = named.filter(|object| *object != NONE);
            let Some(handle) = named.find(|object| self.objects[*object as usize].pages as usize == n) else {
                continue;
            };
            let object = &mut self.objects[handle as usize];
            let new = (head_bytes(n) + bytes * n / pages) as u32;
            if object.at.is_none() {
                self.in_pool = self.in_pool - object.bytes as usize + new as usize;
                object.bytes = new;
            }
        }
    }

    /// Its size: the number of pages and objects, plus one.
    pub(super) fn size(&self) -> usize {
        self.pages.len() + self.objects.len() + 1
    }

    /// Pages moved to another address. mremap refuses ranges that overlap, so a record that has such was made up.
    pub(super) fn moved(&mut self, from: u64, to: u64, n: usize) {
        if from.abs_diff(to) < n as u64 {
            return;
        }
        let pages: Vec<(u64, Page)> =
            (from..from + n as u64).filter_map(|at| self.pages.get(&at).map(|p| (at, *p))).collect();
        for (at, page) in pages {
            if page.out {
                self.forget(to + (at - from));
                self.pages.remove(&at);
                self.pages.insert(to + (at - from), page);
            } else {
                self.forget(at);
            }
        }
    }
}

fn is_fresh(objects: &[Object], e: Entry) -> bool {
    let object = &objects[e.handle as usize];
    object.birth == e.vpn && object.live > 0 && object.at.is_none()
}

/// Reads the object at a place, and those that come along.
pub(super) fn read_in(world: &mut World, place: u64, cost: Cost, out: &mut Outcome) {
    let handle = world.disk[&place];
    let end = (place + on_disk(&world.objects[handle as usize])).next_multiple_of(BLOCK);
    let start = place / BLOCK * BLOCK;
    let inside: Vec<(u64, u32)> = world.disk.range(start..end).map(|(at, handle)| (*at, *handle)).collect();
    out.reads += 1;
    out.bytes_read += end - start;
    out.wait_ns += cost.read_ns + (end - start) * 1_000_000_000 / cost.bytes_per_second.max(1);
    for (at, handle) in inside {
        let object = &mut world.objects[handle as usize];
        if at + on_disk(object) > end {
            continue;
        }
        world.disk.remove(&at);
        (object.at, object.referenced) = (None, true);
        world.in_pool += object.bytes as usize;
        world.stored += object.out as usize;
        out.disk_swapins += u64::from(object.out);
        world.listed(handle);
    }
}

fn on_disk(object: &Object) -> u64 {
    (FRONT as u64 + u64::from(object.bytes)).next_multiple_of(GRAIN)
}

/// Has the shrinker meet objects until `want` bytes are freed and nothing is due.
pub(super) fn write_back(world: &mut World, want: usize, cost: Cost, out: &mut Outcome) {
    let (mut freed, mut run) = (0, 0u64);
    // Each object is met at most four times: young, with its bit set, with its block marked, with neither.
    for _ in 0..4 * world.shrinker.len() {
        if freed >= want && world.shrinker.due() == 0 {
            break;
        }
        let Some(entry) = world.shrinker.pop() else { break };
        if !is_fresh(&world.objects, entry) {
            continue;
        }
        let object = &mut world.objects[entry.handle as usize];
        world.shrinker.met(object.pages as usize);
        let block = object.vpn / MOST_PAGES as u64;
        if world.shrinker.verdict(object.referenced, world.reused.contains(&block)) == Verdict::Rotate {
            if !core::mem::take(&mut object.referenced) {
                world.reused.remove(&block);
            }
            world.shrinker.rotate(entry);
            out.rotated += 1;
            continue;
        }
        freed += object.bytes as usize;
        give_up_copies(world, entry.handle);
        let object = &mut world.objects[entry.handle as usize];
        if object.birth != entry.vpn {
            continue;
        }
        if run == 0 {
            world.disk_end = world.disk_end.next_multiple_of(BLOCK);
        }
        let at = world.disk_end;
        object.at = Some(at);
        world.disk_end += on_disk(object);
        run += on_disk(object);
        world.in_pool -= object.bytes as usize;
        world.stored -= object.out as usize;
        out.written_back += u64::from(object.out);
        world.disk.insert(at, entry.handle);
        world.reused.remove(&block);
        if run >= RUN_BYTES {
            wrote(core::mem::take(&mut run), cost, out);
        }
    }
    wrote(run, cost, out);
}

fn wrote(run: u64, cost: Cost, out: &mut Outcome) {
    let bytes = run.next_multiple_of(BLOCK);
    out.bytes_written += bytes;
    out.write_ns += bytes * 1_000_000_000 / cost.bytes_per_second.max(1);
}

/// An object leaves the pool, so pages in the program give up their copies in it.
fn give_up_copies(world: &mut World, handle: u32) {
    let object = world.objects[handle as usize];
    if object.out == object.live {
        return;
    }
    for at in object.vpn..object.vpn + u64::from(object.pages) {
        let Some(page) = world.pages.get(&at).copied() else { continue };
        if page.object == handle && !page.out {
            world.pages.insert(at, Page { object: NONE, ..page });
            world.release(page);
        }
    }
}

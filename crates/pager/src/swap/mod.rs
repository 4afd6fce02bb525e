//! The disk tier: what the pool cannot hold goes to a swap file, the coldest first.
//!
//! ```text
//! pool ─ shrinker picks ─▶ run in a buffer ─ one write, without the lock ─▶ Disk     `writeback`, a thread of its own
//!   ▲                                                                        │
//!   └──── checked, and stored as it was ◀── one read, without the lock ──────┘       `swapin`, before a fault is served
//! ```
//! Objects are written as they are stored: nothing is decompressed to be written back, and a page that is wanted comes back
//! through the pool. On disk each object is preceded by its first page's number, so that an object read along with another can be
//! assigned to its pages. The books (`mm::swapfile`) have the place, the length and a checksum of each object; the pages have
//! their hashes as in the pool. So a page comes back bit for bit, or the process is told (SIGBUS); it never becomes zeros.
//!
//! Rules:
//! - The file belongs to the group; `clusters` decides who may write where. A forked child inherits its parent's places. It never
//!   reads anything overwritten, since nobody writes into a cluster that others refer to.
//! - Between planning a write and completing it the pages stay *Compressed* and in the pool: a fault wins, and what has left the
//!   pool meanwhile, or was moved by mremap, only gives its place up. [`object::WRITING_BY`] distinguishes the object that was
//!   written from another that came to lie at the same place of the pool, even if that one is being written meanwhile.
//! - An object is in one place: on the shrinker's list, aboard a write, or being recompressed. What a write or a recompression
//!   leaves in the pool goes back to the tail of the list under the hold of the lock that ends it; so an object whose write
//!   failed is simply met again.
//! - A page on disk is read only while its entry says so, and installed only if it still does.
//!
//! Lock order: the pager's lock; the group's books are atomics. I/O is done without the lock, from the helpers' own descriptor
//! table.

pub mod backend;
#[cfg(test)]
mod cluster_tests;
pub mod clusters;
mod dense;
mod fill;
#[cfg(test)]
mod hostile_tests;
pub mod io;
pub mod kept;
#[cfg(test)]
mod kept_tests;
mod pipeline;
#[cfg(test)]
mod read_tests;
#[cfg(test)]
mod readahead_tests;
pub mod readers;
mod reads;
mod references;
#[cfg(test)]
mod room_tests;
#[cfg(test)]
mod run_tests;
mod seal;
mod sparse;
#[cfg(test)]
mod sparse_tests;
mod swapin;
#[cfg(test)]
mod tests;
pub mod turns;
mod whole;
#[cfg(test)]
mod whole_tests;
pub mod worker;
mod worth;
mod writeback;

pub(crate) use reads::Reads;
pub(crate) use swapin::Waiting;

use crate::frames::arena::PAGE;
use crate::pager::Pager;
use crate::pool::object::{self, Header};
use crate::state::State;
use clusters::{ClusterMap, IN_THE_CLEAR};
use core::sync::atomic::Ordering::*;
use references::References;
use seal::{SEAL, Seal};
use uzswap_mm::pagetable::{HINT_REUSED, Tag};
use uzswap_mm::readahead::Readahead;
use uzswap_mm::shrinker::{DiskReads, Entry, Policy, Shrinker};
use uzswap_mm::swapfile::{Place, SwapFile, offset};
use uzswap_sys::thread;
use worth::Worth;
use writeback::RUN_BYTES;

/// Bytes in front of an object on disk: the number of its first page. (An encrypted object has [`SEAL`] more in front.)
const FRONT: usize = 8;
/// With this many pages due to be met, a round of the writing thread is worthwhile; for a small pool it is an eighth of the pool.
const MOST_DUE: usize = 512;
/// Pages of the largest object on disk; larger ones are first cut ([`crate::pool::cut`]).
const MOST_PAGES: usize = 1 << object::SMALL;
/// Bytes of the largest object on disk: a raw one.
const MOST_OBJECT: usize = SEAL + FRONT + object::head_bytes(object::SMALL) + PAGE * MOST_PAGES;

/// An object that is being written.
#[derive(Clone, Copy)]
struct Flight {
    entry: Entry,
    place: Place,
    /// Its bytes in the pool.
    bytes: usize,
    /// Those of its pages that were in the pool when the write was planned (a bit for each).
    pages: u16,
    /// The folio that it is part of, if that goes to disk whole ([`whole`]).
    whole: Option<u32>,
}

/// What this process has in the swap file, and what its shrinker knows. Protected by the pager's lock.
pub struct Swap {
    map: &'static ClusterMap,
    /// Counts what the members of this process's group have read back.
    disk_reads: &'static DiskReads,
    /// This process's row in the books, once it has one.
    row: usize,
    /// Number of clusters that the file had when this process began.
    clusters_there: u32,
    books: SwapFile,
    /// Present if data on disk is encrypted.
    seal: Option<Seal>,
    /// The pool's list.
    shrinker: Shrinker,
    /// The objects aboard each write under way.
    flights: [Vec<Flight>; pipeline::DEPTH],
    /// Start and end in the file of each write under way; that range must not be read.
    writing: [(u64, u64); pipeline::DEPTH],
    /// Objects to be recompressed instead of written; they are off the list.
    aside: Vec<Entry>,
    /// A block too large for the disk, met by the round being planned, and cut when that ends.
    to_cut: Option<Entry>,
    /// Folios that go to disk whole.
    whole: whole::Queue,
    /// Objects of such folios that are to enter the pool after all, and are on no list yet.
    to_pool: Vec<Entry>,
    /// Units being recompressed.
    packing: Vec<dense::Unit>,
    /// Whether recompression is worthwhile.
    worth: Worth,
    /// How far the member last waited for had come, and since when (monotonic nanoseconds): see [`turns`].
    waits_for: (u64, u64),
    /// Clusters in which a write failed: nothing more is written there.
    bad: Vec<u32>,
    /// Writes that failed since the last success.
    failures: u32,
    /// When the next write may be tried (monotonic nanoseconds).
    rest_until: u64,
    /// Until when the disk counts as having no room for a larger file (monotonic nanoseconds).
    full_until: u64,
    /// How often members had asked for room when this one last gave some up; and whether it asks now.
    asked: u32,
    asks: bool,
    /// Pages on disk.
    on_disk: usize,
    /// How much to read around a wanted object.
    readahead: Readahead,
    /// Whether objects that are read back keep their places, as there is room on disk.
    keeps: bool,
    /// Whether less than half of the room there is in use.
    is_spare: bool,
    /// Reads until that is checked again.
    until_look: u32,
    /// When to search again for what ended processes have on disk (monotonic nanoseconds).
    bury_at: u64,
    /// When the file may be compacted again (monotonic nanoseconds).
    compact_at: u64,
}

impl Swap {
    /// With nothing on disk yet. None, and so no swap, if the books are wrong or no key can be had.
    pub fn of(map: &'static ClusterMap, disk_reads: &'static DiskReads) -> Option<Box<Self>> {
        let geometry = map.geometry()?;
        let seal = if map.clear.load(Relaxed) == IN_THE_CLEAR { None } else { Some(Seal::new()?) };
        Some(Box::new(Self {
            map,
            disk_reads,
            row: 0,
            clusters_there: geometry.clusters,
            books: SwapFile::new(geometry),
            seal,
            shrinker: Shrinker::new(Policy::from_number(map.policy.load(Relaxed))),
            flights: Default::default(),
            writing: Default::default(),
            aside: Vec::with_capacity(dense::MOST_ASIDE),
            to_cut: None,
            whole: whole::Queue::default(),
            to_pool: Vec::new(),
            packing: Vec::with_capacity(dense::MOST_ASIDE),
            worth: Worth::default(),
            waits_for: (0, 0),
            bad: Vec::new(),
            failures: 0,
            rest_until: 0,
            full_until: 0,
            asked: map.asked.load(Relaxed),
            asks: false,
            on_disk: 0,
            readahead: Readahead::default(),
            keeps: false,
            is_spare: false,
            until_look: 0,
            bury_at: 0,
            compact_at: 0,
        }))
    }

    /// Bytes in front of an object on disk.
    fn front(&self) -> usize {
        FRONT + if self.seal.is_some() { SEAL } else { 0 }
    }

    /// Number of clusters this process refers to.
    pub fn clusters(&self) -> usize {
        self.books.clusters().count()
    }

    /// Number of this process's pages on disk.
    pub fn on_disk(&self) -> usize {
        self.on_disk
    }

    /// Bytes of the tables.
    pub fn metadata_bytes(&self) -> usize {
        self.books.metadata_bytes()
            + self.shrinker.metadata_bytes()
            + self.whole.metadata_bytes()
            + self.flights.iter().map(Vec::capacity).sum::<usize>() * size_of::<Flight>()
    }

    /// Whether something waits to be written or is being written.
    fn has_something_to_write(&self) -> bool {
        !(self.shrinker.is_empty() && self.whole.is_empty() && self.flights.iter().all(Vec::is_empty))
    }

    /// Bytes of the pool that the writes under way will free.
    fn in_flight(&self) -> usize {
        self.flights.iter().flatten().map(|flight| flight.bytes).sum()
    }

    /// Whether enough objects are due to be met for a round to be worthwhile.
    fn is_pressed(&self, s: &State) -> bool {
        self.shrinker.due() >= worth_a_round(s)
    }

    /// Ends the references of pages to an object on disk.
    fn release(&mut self, place: Place, pages: u16) {
        if let Some(cluster) = self.books.release(place, pages) {
            self.map.release_cluster(self.row, cluster);
        }
    }
}

impl State {
    /// An object was stored whose range begins at page `vpn`: puts it on the shrinker's list. Does nothing without swap.
    pub fn entered_pool(&mut self, vpn: u64, handle: u32) {
        let Some(mut swap) = self.swap.take() else { return };
        swap.shrinker.stored(Entry { vpn, handle });
        if swap.shrinker.wants_prune() {
            self.prune(&mut swap.shrinker);
        }
        self.swap = Some(swap);
    }

    /// Drops entries that name no object, and all but the newest of those that name the same one: a page stored again in its old
    /// place makes its old entries look as good as the new one.
    fn prune(&self, shrinker: &mut Shrinker) {
        let flags = |e: Entry, set, clear| object::set_flags(self.object(e.handle), set, clear);
        shrinker.prune(|e| {
            let first = (self.pages_of(e).is_some() || self.is_large(e)) && self.header_of(e).flags & object::SEEN == 0;
            if first {
                flags(e, object::SEEN, 0);
            }
            first
        });
        shrinker.entries().for_each(|e| flags(e, 0, object::SEEN));
    }

    /// A fault on the block of `vpn` was served from the pool.
    pub fn loaded_from_pool(&mut self, vpn: u64) {
        if let Some(swap) = self.swap.as_mut() {
            swap.shrinker.loaded();
            self.pt.hint(vpn, HINT_REUSED, 0);
        }
    }

    /// An object that came from disk along with another one is wanted now.
    pub fn wanted_ahead(&mut self, handle: u32) {
        object::set_flags(self.object(handle), 0, object::AHEAD);
        let at = self.on_disk(handle).map(|at| offset(at.place));
        if let Some(swap) = self.swap.as_mut() {
            swap.readahead.wanted(at);
        }
    }

    /// Reclaim has taken `n` pages from the program: policies that follow the kernel press the pool as much.
    pub fn press_pool(&mut self, n: usize) {
        let (resident, stored, pool) = (self.resident, self.swapped, self.pool.used_bytes() / PAGE);
        if let Some(swap) = self.swap.as_mut() {
            swap.shrinker.press(n, resident, stored, pool, swap.disk_reads);
        }
    }

    /// Gives up pages on disk.
    ///
    /// # Panics
    /// If there is no swap.
    pub fn leave_disk(&mut self, place: Place, pages: u16) {
        let swap = self.swap.as_mut().expect("only with swap a page is on disk");
        swap.on_disk -= pages.count_ones() as usize;
        swap.release(place, pages);
    }

    /// The pages from `base` on that are only at a place on disk, each with its index there (a bit for each).
    fn pages_on_disk(&self, base: u64, place: Place) -> u16 {
        let belongs = |i: &u64| {
            let pte = self.pt.get(base.wrapping_add(*i));
            pte.tag() == Tag::Disk && pte.handle() == place && pte.index() as u64 == *i
        };
        (0..MOST_PAGES as u64).filter(belongs).fold(0, |mask, i| mask | 1 << i)
    }

    /// The pages of an entry's object, not a [large one](State::is_large): those that are out, and those whose kept copy it is (a
    /// bit for each). None if no page at its place refers to it, so that the entry is stale.
    pub(crate) fn pages_of(&self, e: Entry) -> Option<(u16, u16)> {
        let (mut out, mut copies) = (0u16, 0u16);
        for i in 0..MOST_PAGES {
            let pte = self.pt.get(e.vpn + i as u64);
            if pte.tag() == Tag::Compressed && pte.handle() == e.handle && pte.index() == i {
                out |= 1 << i;
            } else if pte.copy() == Some(e.handle) && self.copy_index(e.vpn + i as u64, e.handle) == i {
                copies |= 1 << i;
            }
        }
        (out | copies != 0).then_some((out, copies))
    }

    /// The pages that refer to an object of at most 16 (a bit for each).
    fn live_of(&self, handle: u32) -> u16 {
        object::live(self.object(handle)).first_16()
    }

    /// The header of an entry's object, which some page refers to.
    fn header_of(&self, e: Entry) -> Header {
        Header::read(self.object(e.handle))
    }

    /// In a forked child, with the lock held: ends the writes that were under way as if they had failed, as the child does not
    /// make them. Gives up clusters that hold nothing for the child.
    pub(crate) fn end_flights(&mut self) {
        let Some(mut swap) = self.swap.take() else { return };
        for (slot, flights) in core::mem::take(&mut swap.flights).into_iter().enumerate() {
            for flight in flights {
                swap.release(flight.place, flight.pages);
                self.landed(slot, flight);
                swap.shrinker.rotate(flight.entry);
            }
        }
        swap.writing = Default::default();
        swap.give_up_whole(self);
        swap.give_up_recompression(self);
        let clusters: Vec<u32> = swap.books.clusters().collect();
        for cluster in clusters {
            if swap.books.drop_if_empty(cluster) {
                swap.map.release_cluster(swap.row, cluster);
            }
        }
        self.swap = Some(swap);
    }

    /// Takes the mark of write `slot` off an object. Returns those of its pages that are still out in it (a bit for each); none
    /// if the object has gone.
    fn landed(&mut self, slot: usize, flight: Flight) -> u16 {
        let Some((out, _)) = self.pages_of(flight.entry) else { return 0 };
        if self.header_of(flight.entry).flags & object::WRITING_BY[slot] == 0 {
            return 0;
        }
        object::set_flags(self.object(flight.entry.handle), 0, object::WRITING_BY[slot]);
        out & flight.pages
    }
}

impl Pager {
    /// In a forked child, with the lock held; false if it cannot have its parent's pages on disk.
    pub(crate) fn inherit_swap(&self, s: &mut State) -> bool {
        let Some(swap) = s.swap.as_mut() else { return true };
        let ok = self.take_inherited_row(swap.clusters()) && swap.seal.as_mut().is_none_or(Seal::renew);
        swap.row = self.own_row_if_any().unwrap_or(0);
        ok
    }

    /// Publishes how much is on disk; returns the pages.
    pub(crate) fn publish_swap(&self, s: &State) -> usize {
        let Some(swap) = s.swap.as_ref() else { return 0 };
        let (c, used) = (self.counters(), swap.books.used_bytes() as u64);
        self.me().swap.store(used, Relaxed);
        if swap.on_disk as u64 >= c.swap_pages.load(Relaxed) {
            c.swap_pages.store(swap.on_disk as u64, Relaxed);
            c.swap_used_size.store(used, Relaxed);
        }
        swap.on_disk
    }

    /// For each group this process is in: the bytes that its pools hold, the most and the least to keep them between, and the
    /// group.
    fn pools(&self, s: &State, swap: &Swap) -> impl Iterator<Item = (usize, usize, usize, usize)> {
        let (own, others) = (s.pool.held_bytes(), self.others_use());
        let percents = [&swap.map.max_pool_percent, &swap.map.accept_threshold_percent];
        let percents = percents.map(|percent| percent.load(Relaxed).min(100) as usize);
        self.chain.nodes().iter().enumerate().map(move |(i, at)| {
            let node = &self.group.nodes[*at];
            let (target, zswap) = (node.target() as usize, node.zswap_max.load(Relaxed) as usize);
            // Stores are refused from `memory.zswap.max` on; the disk takes over before that.
            let most = (target / 100 * percents[0]).min(zswap / 100 * 95);
            (own + others.pool[i], most, most / 100 * percents[1], *at)
        })
    }

    /// Whether the pools of a group that this process is in take more than they may.
    fn pools_are_full(&self, s: &State, swap: &Swap) -> bool {
        self.pools(s, swap).any(|(held, most, ..)| held > most)
    }

    /// Whether a group that this process is in forbids writing back (`memory.zswap.writeback`), or has as much on disk as it may
    /// (`memory.swap.max`), none of which is only kept.
    fn writeback_forbidden(&self, swap: &Swap) -> bool {
        let has_room = self.has_swap_room(swap.books.used_bytes(), RUN_BYTES) || swap.books.kept_pages() > 0;
        !self.may_write_back() || !has_room
    }

    /// Wakes the writing thread if there is something for it to do. While it rests, as there is no room or a write failed, it
    /// would only look and go on resting; then it wakes by itself.
    ///
    /// The story: the swap file of a group above its limit was full. Each of 16 sleeping members looked for room 50 times a
    /// second, and had its writing thread look as well, which took most of the CPU time.
    pub(crate) fn poke_writer(&self, s: &State) {
        let Some(swap) = s.swap.as_ref() else { return };
        let rests = || thread::now_ns() < swap.rest_until;
        if !swap.whole.is_empty() || ((self.pools_are_full(s, swap) || swap.is_pressed(s)) && !rests()) {
            turns::wake_writer(self.me());
        }
    }

    /// Makes the disk take some of the pool when nothing can be taken from the program and the limit is exceeded. Returns whether
    /// it can.
    ///
    /// The story: GNU sort in 16 MiB was told that its group is full, though a disk of 4 GiB was nearly empty. The pool was a
    /// little below the size from which on it is written, and only taking pages from the program presses it.
    pub(crate) fn has_disk_make_room(&self, s: &mut State) -> bool {
        if !self.disk_takes_over(s) {
            return false;
        }
        let due = worth_a_round(s);
        if let Some(swap) = s.swap.as_mut() {
            swap.shrinker.owe(due);
        }
        self.poke_writer(s);
        self.note_slow_disk();
        true
    }

    /// This member waits for its disk: lets the others know if the disk is slow.
    pub(crate) fn note_slow_disk(&self) {
        if self.writes_slowly() {
            self.me().disk_at.store(thread::now_ns(), Release);
        }
    }

    /// Whether writing back makes room: it is allowed, does not fail or stand still, and there is something to write.
    pub(crate) fn disk_takes_over(&self, s: &State) -> bool {
        s.swap.as_ref().is_some_and(|swap| {
            self.tier.file.load(Relaxed) >= 0
                && swap.failures == 0
                && self.tier.helps.load(Relaxed)
                && !self.writes_stand_still()
                && swap.has_something_to_write()
                && !self.writeback_forbidden(swap)
        })
    }

    /// Whether what leaves the pool may go to disk, now or before long. (A failed write, for want of room too, may be temporary.)
    pub(crate) fn disk_may_take(&self, s: &State) -> bool {
        let swap = s.swap.as_ref();
        swap.is_some_and(|swap| self.tier.file.load(Relaxed) >= 0 && !self.writeback_forbidden(swap))
    }

    /// Ends the threads that write and read, once the handler has ended.
    pub(crate) fn end_swap(&self) {
        turns::wake_writer(self.me());
        crate::discover::letgo::await_end(self.writer.load(Relaxed));
        self.tier.second.end();
        self.tier.readers.end();
    }

    /// Whether the limit is exceeded because the pools are full, or because as much waits to be written whole as may; and writing
    /// helps.
    pub(crate) fn waits_for_disk(&self, s: &State) -> bool {
        let too_many = s.swap.as_ref().is_some_and(|swap| self.enough_waits(swap)) && self.disk_takes_over(s);
        too_many
            || self.excess(s) > 0
                && self.disk_takes_over(s)
                && s.swap.as_ref().is_some_and(|swap| self.pools_are_full(s, swap))
    }

    /// Notes that a page is lost, and reports it once for each process, which gets SIGBUS when it touches such a page.
    fn lose(&self, s: &mut State, vpn: u64) {
        let pte = s.pt.get(vpn);
        s.pt.set(vpn, uzswap_mm::pagetable::Pte::new(Tag::Poisoned, 0));
        s.forget(vpn, pte);
        if self.counters().poisoned.fetch_add(1, Relaxed) > 0 {
            return;
        }
        self.say(io::Trouble::Lost.sentence(self.clusters.is_some_and(ClusterMap::is_remote)));
    }
}

/// Pages that must be due to be met for a round to be worthwhile.
fn worth_a_round(s: &State) -> usize {
    (s.pool.used_bytes() / PAGE / 8).clamp(16, MOST_DUE)
}

/// The checksum by which an object's bytes on disk are recognised.
fn checksum(bytes: &[u8]) -> u32 {
    let hash = object::hash(bytes);
    (hash ^ (hash >> 32) ^ (hash >> 64) ^ (hash >> 96)) as u32
}

const _: () = assert!(MOST_OBJECT < uzswap_mm::swapfile::LEAST_CLUSTER);

//! Writes folios that may not enter the pool to the swap file whole (`--large-folios`; all folios where `memory.zswap.max` is 0).
//!
//! ```text
//! staged ─ compressed ─▶ waits: objects in the pool, on no list ─ room for all, side by side ─▶ written ─▶ Disk
//!                          │ too much waits, no room, forbidden,             │ the write failed
//!                          ▼ the disk fails: split before, as ever           ▼
//!                        staged, in parts that may enter         cut into parts that may enter: the pool's from now on
//! ```
//! A folio's objects ([`object::WAITING`]) are in the pool only until they are written, so that its bytes are always somewhere.
//! Only so much may wait ([`Pager::enough_waits`]); beyond that, threads that fault or reclaim wait for the writer. Everything
//! that holds for objects being written back holds for these: a fault wins, and mremap turns such an object into an ordinary one
//! of the pool.
//!
//! The writer takes them before anything that the shrinker chooses. It finds room for the whole folio at once: behind the last
//! object of a cluster, or in adjacent clusters claimed for it. So nothing else comes to lie between its objects, which are
//! written in as many runs as it takes. A server has no adjacent room, so there a folio that is only too large for the pool is
//! split. Where nothing may enter the pool everything goes this way, with a server as with a file.

use super::fill::{board, drop_copies};
use super::references::References;
use super::writeback::{NoRun, RUN_BYTES, Round, as_write};
use super::{Flight, Swap};
use crate::frames::arena::PAGE;
use crate::pager::Pager;
use crate::pool::object;
use crate::state::State;
use crate::swap::io::Trouble;
use core::sync::atomic::Ordering::*;
use std::collections::VecDeque;
use uzswap_mm::shrinker::Entry;
use uzswap_mm::swapfile::{BLOCK, GRAIN, Run};
use uzswap_sys::process::Identity;
use uzswap_sys::thread;

/// So many bytes may wait to be written: a 32nd of the limit, but at least and at most these.
const LEAST_WAITING: usize = 1 << 20;
const MOST_WAITING: usize = 8 << 20;
/// How long the disk is not asked again to take a folio as large as one for which there was no room (nanoseconds).
const NO_ROOM_NS: u64 = 100_000_000;

/// A folio that waits to be written, or is being written.
struct Folio {
    id: u32,
    order: u8,
    /// Its objects that are not aboard a write yet, first to last.
    left: VecDeque<Entry>,
    /// Number of its objects aboard writes.
    aboard: usize,
    /// Bytes of the pool that it takes.
    bytes: usize,
    /// Number of its pages that are not zeros; None if it was no longer whole when it was compressed.
    pages: Option<usize>,
    /// Pages that have gone to disk.
    gone: usize,
    /// The first and the last of the clusters for the rest of it.
    room: Option<(u32, u32)>,
    /// Whether some of it has entered the pool.
    split: bool,
}

/// Folios that go to disk whole, in their order.
#[derive(Default)]
pub(super) struct Queue {
    folios: VecDeque<Folio>,
    /// The last id given.
    last_id: u32,
    /// Bytes of the pool that they take.
    bytes: usize,
    /// Folios of this order and larger found no room; until when they are not tried again (monotonic nanoseconds).
    no_room: (u8, u64),
}

impl Queue {
    pub(super) fn is_empty(&self) -> bool {
        self.folios.is_empty()
    }

    /// Whether a cluster is to be written to for a folio.
    pub(super) fn has(&self, cluster: u32) -> bool {
        self.folios.iter().filter_map(|folio| folio.room).any(|(next, last)| (next..=last).contains(&cluster))
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        self.folios.capacity() * size_of::<Folio>()
    }
}

/// How far a folio came in the round that is being planned.
enum Boarded {
    /// All of it is aboard, or has gone.
    All,
    /// The run has no more room.
    Part,
    /// A cluster claimed for it first needs room on disk.
    Extend(u32),
}

impl Pager {
    /// Whether as much waits to be written whole as may.
    pub(super) fn enough_waits(&self, swap: &Swap) -> bool {
        swap.whole.bytes >= (self.limit() / 32).clamp(LEAST_WAITING, MOST_WAITING)
    }

    /// Whether a folio that may not enter the pool can go to disk now.
    pub(crate) fn may_go_whole(&self, s: &State, order: u8) -> bool {
        s.swap.as_ref().is_some_and(|swap| {
            self.takes_whole(swap, order) && self.may_swap(swap.books.used_bytes() + swap.whole.bytes, PAGE << order)
        })
    }

    /// Whether a page that may not enter the pool could go to disk now.
    pub(crate) fn goes_directly(&self, s: &State) -> bool {
        s.swap.as_ref().is_some_and(|swap| {
            self.takes_whole(swap, 0) && self.has_swap_room(swap.books.used_bytes() + swap.whole.bytes, PAGE)
        })
    }

    fn takes_whole(&self, swap: &Swap, order: u8) -> bool {
        let (least, until) = swap.whole.no_room;
        self.tier.file.load(Relaxed) >= 0
            && (!swap.map.is_remote() || self.pool_is_forbidden())
            && swap.failures == 0
            && !(order >= least && thread::now_ns() < until)
            // A folio without room enters the pool. Where nothing may be there, no more comes before the disk has taken that.
            && (until == 0 || order < least || !self.pool_is_forbidden() || swap.whole.is_empty() && swap.shrinker.is_empty())
            && !self.enough_waits(swap)
            && self.may_write_back()
    }

    /// Queues a folio whose objects were stored to be written whole.
    pub(crate) fn goes_whole(&self, s: &mut State, order: u8, entries: impl Iterator<Item = (u64, u32)>) {
        let left: VecDeque<Entry> = entries.map(|(vpn, handle)| Entry { vpn, handle }).collect();
        let objects = left.iter().map(|e| (s.live_of(e.handle).count_ones() as usize, s.header_of(*e).order));
        let (pages, all) = objects.fold((0, true), |(n, all), (live, order)| (n + live, all && live == 1 << order));
        let bytes = left.iter().map(|e| s.object(e.handle).len()).sum();
        if left.is_empty() {
            return;
        }
        let queue = &mut s.swap.as_mut().expect("without swap nothing goes whole").whole;
        queue.last_id = queue.last_id.wrapping_add(1);
        queue.bytes += bytes;
        let (id, pages) = (queue.last_id, all.then_some(pages));
        queue.folios.push_back(Folio { id, order, left, aboard: 0, bytes, pages, gone: 0, room: None, split: false });
    }

    /// For threads that reclaim, without the lock: waits a little for the writer if as much waits as may.
    pub(crate) fn let_writer_go_on(&self) {
        let s = self.state.lock();
        if !s.swap.as_ref().is_some_and(|swap| self.enough_waits(swap)) || !self.disk_takes_over(&s) {
            return;
        }
        let seen = self.tier.progress.load(Acquire);
        self.poke_writer(&s);
        drop(s);
        uzswap_sys::lock::futex_wait(&self.tier.progress, seen, Some(NO_ROOM_NS / 5), false);
    }

    /// Fills a run with folios that wait to be written whole; None if none waits.
    pub(super) fn plan_whole(&self, s: &mut State, swap: &mut Swap, slot: usize, buffer: &mut [u8]) -> Option<Round> {
        let (mut run, mut at, mut extend) = (None, 0, None);
        while let Some(mut folio) = swap.whole.folios.remove(at) {
            let boarded = self.board_folio(s, swap, slot, &mut run, buffer, &mut folio);
            swap.whole.folios.insert(at, folio);
            match boarded {
                Boarded::All => at += 1,
                Boarded::Part => break,
                Boarded::Extend(cluster) => {
                    extend = Some(Round::Extend(cluster));
                    break;
                }
            }
        }
        self.end_whole(swap);
        let run = run.filter(|_| !swap.flights[slot].is_empty());
        run.map(|run| as_write(swap, slot, &run, buffer)).or(extend)
    }

    fn board_folio(
        &self,
        s: &mut State,
        swap: &mut Swap,
        slot: usize,
        run: &mut Option<Run>,
        buffer: &mut [u8],
        folio: &mut Folio,
    ) -> Boarded {
        self.leave_out(s, swap, folio);
        let front = swap.front();
        let sizes: Vec<usize> = folio.left.iter().map(|e| front + s.object(e.handle).len()).collect();
        let sizes: Vec<usize> = sizes.into_iter().map(|bytes| bytes.next_multiple_of(GRAIN)).collect();
        if sizes.is_empty() {
            return Boarded::All;
        }
        match run {
            Some(open) if sizes.iter().sum::<usize>() > open.bytes() - open.filled() => return Boarded::Part,
            Some(open) => folio.room = Some((open.cluster(), open.cluster())),
            None => match self.room_for(swap, folio, &sizes) {
                Ok(found) => *run = Some(found),
                Err(NoRun::Extend(cluster)) => return Boarded::Extend(cluster),
                Err(_) => {
                    refuse(s, swap, folio);
                    return Boarded::All;
                }
            },
        }
        let open = run.as_mut().expect("just found");
        for bytes in sizes {
            if open.filled() + bytes > open.bytes() {
                return Boarded::Part;
            }
            let entry = folio.left.pop_front().expect("one for each size");
            let (out, copies) = s.pages_of(entry).expect("what has gone was left out");
            drop_copies(s, entry, copies.into());
            object::set_flags(s.object(entry.handle), 0, object::WAITING);
            board(s, swap, slot, open, buffer, entry, out);
            swap.flights[slot].last_mut().expect("it has just boarded").whole = Some(folio.id);
            folio.aboard += 1;
        }
        Boarded::All
    }

    /// Drops from a folio what need not be written, or cannot be as a part of it.
    fn leave_out(&self, s: &mut State, swap: &mut Swap, folio: &mut Folio) {
        folio.left.retain(|entry| {
            // The object has gone. Another may lie there, which waits by itself or not. Objects that mremap has moved are listed.
            let Some((out, copies)) = s.pages_of(*entry) else { return false };
            let head = s.header_of(*entry);
            if head.flags & object::WAITING != object::WAITING {
                return false;
            }
            let found = out | copies == s.live_of(entry.handle);
            let waits = found && out != 0 && head.flags & object::ON_DISK == 0;
            if !waits {
                object::set_flags(s.object(entry.handle), 0, object::WAITING);
                match head.flags & object::ON_DISK != 0 && found {
                    // Its pages were on disk already, and have not changed.
                    true => _ = self.put_out_kept(s, swap, *entry, out, copies),
                    false if found => drop_copies(s, *entry, copies.into()),
                    false => swap.shrinker.rotate(*entry),
                }
            }
            waits
        });
    }

    /// Finds room for the rest of a folio, whose objects have these sizes: a run that has room for the first.
    fn room_for(&self, swap: &mut Swap, folio: &mut Folio, sizes: &[usize]) -> Result<Run, NoRun> {
        let map = swap.map;
        swap.row = self.own_row(map).ok_or(NoRun::Full(Trouble::Rows))?;
        let forbidden = swap.failures > 0 || !self.may_write_back();
        let (me, bytes) = (swap.row, swap.books.cluster_bytes());
        let bad = swap.bad.clone();
        let may_write = |c: u32| !bad.contains(&c) && map.may_write(me, c);
        let ends_at = |cluster: u32| (u64::from(cluster) + 1) * bytes as u64;
        let allocated = map.allocated.load(Relaxed);
        if let Some((next, last)) = folio.room {
            // Not there: claimed, but no room was made on disk; or begun, and shared with a child since.
            let there = |c: &u32| ends_at(*c) <= allocated && !forbidden;
            let found = (next..=last)
                .filter(there)
                .find_map(|c| swap.books.run_at_end(c, sizes[0].next_multiple_of(BLOCK), RUN_BYTES, may_write));
            let run = found.filter(|_| folio.aboard + folio.gone > 0 || ends_at(last) <= allocated);
            folio.room = run.map(|run| (run.cluster(), last)).or(folio.room);
            return run.ok_or(NoRun::Full(Trouble::Full));
        }
        if forbidden {
            return Err(NoRun::Full(Trouble::Write));
        }
        let behind = swap.books.run_behind_last(BLOCK, bytes, may_write);
        if let Some(run) = behind.filter(|run| clusters_for(sizes, bytes, bytes - run.bytes()) == 1) {
            folio.room = Some((run.cluster(), run.cluster()));
            return swap.books.run_behind_last(BLOCK, RUN_BYTES, may_write).ok_or(NoRun::Again);
        }
        let n = clusters_for(sizes, bytes, 0);
        // The story: a cluster in which a write had failed was claimed along with the others, and the folio refused as nothing may
        // be written there. All came free again, so the next folio claimed the same ones, and none went to disk whole any more.
        // (What the shared books say to be free may still be this process's, or not there: see `Swap::enter`.)
        let may_claim = |c: u32| !bad.contains(&c) && c < swap.clusters_there && !swap.books.has_cluster(c);
        let claim = || map.claim_side_by_side(me, n, may_claim);
        let claimed = claim().or_else(|| {
            map.bury_the_dead(Identity::own());
            claim()
        });
        let Some(first) = claimed else {
            let total = sizes.iter().sum();
            let hole = swap.books.run_in_hole(total, RUN_BYTES, may_write);
            folio.room = hole.map(|run| (run.cluster(), run.cluster()));
            return hole.ok_or(NoRun::Full(Trouble::Full));
        };
        let last = first + n - 1;
        (first..=last).for_each(|c| swap.books.add_cluster(c));
        folio.room = Some((first, last));
        if ends_at(last) > allocated {
            return if swap.disk_is_full() { Err(NoRun::Full(Trouble::NoSpace)) } else { Err(NoRun::Extend(last)) };
        }
        swap.books.run_at_end(first, BLOCK, RUN_BYTES, may_write).ok_or(NoRun::Full(Trouble::Full))
    }

    /// Counts and removes folios of which nothing is left to be written or being written.
    pub(super) fn end_whole(&self, swap: &mut Swap) {
        let queue = &mut swap.whole;
        queue.folios.retain(|folio| {
            if !folio.left.is_empty() || folio.aboard > 0 {
                return true;
            }
            queue.bytes -= folio.bytes;
            // A folio that the program took back meanwhile counts as neither.
            if folio.split {
                self.counters().folios.count(folio.order, |c| &c.swpout_fallback);
            } else if folio.pages == Some(folio.gone) {
                self.counters().folios.count(folio.order, |c| &c.swpout);
            }
            false
        });
    }

    /// Lets objects that could not be written whole enter the pool, in parts that may.
    pub(super) fn let_into_pool(&self, s: &mut State) {
        let may = |order: u8| order == 0 || self.group.folios.allows(order);
        let there = |s: &State, e: Entry| s.pages_of(e).filter(|_| s.header_of(e).flags & object::HELD == 0);
        while let Some(entry) = s.swap.as_mut().and_then(|swap| swap.to_pool.pop()) {
            self.store_posted(s);
            let Some((out, _)) = there(s, entry) else { continue };
            let whole = vec![entry];
            // If there is no place for the parts it stays as it is.
            let fits = may(s.header_of(entry).order);
            let parts = if fits { whole } else { self.cut_into(s, entry, may).unwrap_or(whole) };
            self.counters().zswpout.fetch_add(u64::from(out.count_ones()), Relaxed);
            for part in parts {
                self.counters().folios.count(s.header_of(part).order, |c| &c.zswpout);
                object::set_flags(s.object(part.handle), object::REFERENCED, 0);
                s.entered_pool(part.vpn, part.handle);
            }
        }
    }
}

/// Lets the rest of a folio not go to disk as part of it.
fn refuse(s: &State, swap: &mut Swap, folio: &mut Folio) {
    if swap.failures == 0 && folio.aboard + folio.gone == 0 {
        swap.whole.no_room = (folio.order, thread::now_ns() + NO_ROOM_NS);
    }
    folio.split = true;
    for entry in folio.left.drain(..) {
        object::set_flags(s.object(entry.handle), 0, object::WAITING);
        swap.to_pool.push(entry);
    }
    if let Some((first, last)) = folio.room.take() {
        (first..=last).for_each(|c| swap.drop_cluster(c));
    }
}

/// How many clusters objects of these sizes take that are written one after the other, in runs, from byte `from` of the first
/// cluster on.
fn clusters_for(sizes: &[usize], cluster: usize, from: usize) -> u32 {
    let (mut n, mut at, mut run) = (1, from, from);
    for bytes in sizes {
        if at + bytes - run > RUN_BYTES {
            at = at.next_multiple_of(BLOCK);
            run = at;
        }
        if at + bytes > cluster {
            (n, at, run) = (n + 1, 0, 0);
        }
        at += bytes;
    }
    n
}

impl Swap {
    /// An object of a folio has left a write; `pages` went to disk if it was `written`.
    pub(super) fn landed_whole(&mut self, flight: &Flight, written: bool, pages: u16) {
        let Some(id) = flight.whole else { return };
        if let Some(folio) = self.whole.folios.iter_mut().find(|folio| folio.id == id) {
            folio.aboard -= 1;
            folio.split |= !written;
            folio.gone += if written { pages.count_ones() as usize } else { 0 };
            if written && folio.order >= self.whole.no_room.0 {
                self.whole.no_room = (0, 0);
            }
        }
    }

    /// In a forked child, where nobody makes the parent's writes: what waits becomes the pool's, as large as it is.
    pub(super) fn give_up_whole(&mut self, s: &mut State) {
        let queue = core::mem::take(&mut self.whole);
        let waiting = queue.folios.into_iter().flat_map(|folio| folio.left);
        for entry in waiting.chain(core::mem::take(&mut self.to_pool)) {
            if s.pages_of(entry).is_some() {
                if s.header_of(entry).flags & object::WAITING == object::WAITING {
                    object::set_flags(s.object(entry.handle), 0, object::WAITING);
                }
                self.shrinker.rotate(entry);
            }
        }
    }
}

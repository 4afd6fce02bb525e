//! Writes back from the pool to the swap file.
//!
//! A thread of its own does this, so that a slow disk holds up neither faults nor compression. A round is
//!
//! 1. with the lock: find a run in the file (behind the last one, else in a cluster of its own, else in a hole; where the disk
//!    has no room for a larger file a hole comes before a cluster), and fill the buffer with the objects that the shrinker gives
//!    up; they stay where they are, marked as being written;
//! 2. without the lock: begin to write the run; if a second thread writes (`pipeline`), the next run is planned meanwhile;
//! 3. with the lock: what has not changed becomes *Disk* and leaves the pool. If the write failed the places are given up and
//!    everything stays: the objects go to the tail of the shrinker's list, under the same hold of the lock.
//!
//! An object that only backs kept copies of resident pages is no use on disk: it is dropped when its turn comes.

use super::dense::Packer;
use super::io::Trouble;
use super::pipeline::{Ended, Writes};
use super::references::References;
use super::sparse::{MANY, SOME};
use super::turns::{LOOK_NS, Task, Wanted};
use super::{MOST_OBJECT, Swap};
use crate::inject::Site;
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::pagetable::HINT_REUSED;
use uzswap_mm::shrinker::Entry;
use uzswap_mm::swapfile::{BLOCK, Place, Run, Sparse, offset};
use uzswap_mm::trace::{Kind, Record};
use uzswap_mm::zswap::Refused;
use uzswap_sys::process::Identity;
use uzswap_sys::raw::Errno;
use uzswap_sys::{lock, thread};

/// Bytes of the largest write.
pub(super) const RUN_BYTES: usize = 256 << 10;
/// Bytes of the smallest run worthwhile, which has room for the largest object; smaller ones are used if there is no other.
const LEAST_RUN: usize = MOST_OBJECT.next_multiple_of(BLOCK);
/// How long the file is not extended after the disk had no room for that, as long as there is room in the file (nanoseconds).
const FULL_NS: u64 = 10_000_000_000;
/// Longest rest after failures, and the rest while there is nothing to write (nanoseconds).
const REST_NS: u64 = 1_000_000_000;
/// How long the other members have to give up what they only keep (nanoseconds).
const ASK_NS: u64 = 20_000_000;
/// The search for small holes takes one part in so many of the time in which they are searched and written to.
const WALK_PART: u64 = 20;
const IDLE_NS: u64 = 100_000_000;

/// A block of the file in memory, aligned for direct I/O.
#[repr(C, align(4096))]
pub(super) struct Block([u8; BLOCK]);

/// Blocks as bytes.
pub(super) fn bytes_of(blocks: &mut [Block]) -> &mut [u8] {
    // SAFETY: blocks are plain bytes without padding.
    unsafe { core::slice::from_raw_parts_mut(blocks.as_mut_ptr().cast(), blocks.len() * BLOCK) }
}

/// A buffer of blocks. Call it with the lock held, as for everything that allocates.
pub(super) fn blocks(bytes: usize) -> Vec<Block> {
    (0..bytes / BLOCK).map(|_| Block([0; BLOCK])).collect()
}

/// Outcome of a round.
pub(super) enum Round {
    /// There is nothing to do, or nothing can be done, for this long (nanoseconds).
    Rest(u64),
    /// Other members of a group whose pools are full must go first.
    NotYet,
    /// Objects were only looked at.
    Again,
    /// A cluster needs room on disk.
    Extend(u32),
    /// Write this many bytes of the buffer at this offset.
    Write(u64, usize),
    /// There is no room for a run: what lies apart here is to be moved closer together.
    Compact(Sparse),
}

/// Why there is no run.
#[derive(Debug)]
pub(super) enum NoRun {
    /// This cluster, which was just claimed, needs room on disk.
    Extend(u32),
    /// Search again.
    Again,
    /// There are small holes only; this is to be compacted first.
    Sparse(Sparse),
    /// There is no room; the trouble to report.
    Full(Trouble),
}

impl Pager {
    /// The writing thread.
    pub(crate) fn swap_loop(&'static self) -> ! {
        self.write_until_stopped();
        thread::exit()
    }

    pub(super) fn write_until_stopped(&'static self) {
        let mut writes = {
            let _s = self.state.lock();
            Writes::new(self)
        };
        let mut packer = Packer::default();
        loop {
            let word = self.me().swap_wake.load(Acquire);
            if self.stopping.load(Acquire) && !writes.under_way() {
                return;
            }
            while let Some(ended) = self.ended_or_free(&mut writes) {
                self.write_ended(&mut writes, ended);
            }
            let slot = writes.free().expect("waited for one to end");
            let round = self.plan_round(&mut self.state.lock(), slot, writes.buffer(slot));
            match round {
                Round::Rest(_) | Round::NotYet if writes.under_way() => {
                    if let Some(ended) = self.next_ended(&mut writes, true) {
                        self.write_ended(&mut writes, ended);
                    }
                }
                Round::Rest(ns) => {
                    writes.rest();
                    self.swap_progressed();
                    lock::futex_wait(&self.me().swap_wake, word, Some(ns), true);
                }
                // This is no progress of this process's: threads that wait for the disk go on waiting.
                Round::NotYet => lock::futex_wait(&self.me().swap_wake, word, Some(LOOK_NS), true),
                Round::Again => {
                    self.swap_progressed();
                    // Other threads want the lock, which is not a fair one.
                    thread::sleep_ns(10_000);
                }
                Round::Extend(cluster) => self.extend(cluster),
                Round::Compact(sparse) => self.compact(&mut writes, slot, sparse),
                Round::Write(at, len) => {
                    if let Some(bits) = self.inject(Site::SwapDamage) {
                        writes.buffer(slot)[(bits >> 8) as usize % len] ^= 1 << (bits % 8);
                    }
                    self.begin_write(&mut writes, slot, at, len);
                }
            }
            self.make_dense(&mut packer);
        }
    }

    fn write_ended(&self, writes: &mut Writes, (slot, result): Ended) {
        let mut s = self.state.lock();
        if let Some(swap) = s.swap.as_mut() {
            let (from, to) = swap.writing[slot];
            swap.worth.wrote(to - from, writes.take_waited_ns());
        }
        self.complete(&mut s, slot, result);
        self.one_write_less(writes);
        drop(s);
        self.swap_progressed();
    }

    pub(super) fn swap_progressed(&self) {
        self.tier.progress.fetch_add(1, Release);
        lock::futex_wake(&self.tier.progress, u32::MAX >> 1, false);
    }

    pub(super) fn plan_round(&self, s: &mut State, slot: usize, buffer: &mut [u8]) -> Round {
        let Some(mut swap) = s.swap.take() else { return Round::Rest(REST_NS) };
        s.give_way(&mut swap);
        let round = self.plan_whole(s, &mut swap, slot, buffer);
        let round = round.unwrap_or_else(|| self.plan_run(s, &mut swap, slot, buffer));
        let to_cut = swap.to_cut.take();
        s.swap = Some(swap);
        self.let_into_pool(s);
        if let Some(block) = to_cut {
            self.cut_for_disk(s, block);
        }
        round
    }

    fn plan_run(&self, s: &mut State, swap: &mut Swap, slot: usize, buffer: &mut [u8]) -> Round {
        let mut task = match self.write_back_wanted(s, swap) {
            Wanted::Work(task) => task,
            Wanted::NotYet => return Round::NotYet,
            Wanted::Unable if self.gives_way_to_itself(s, swap) => return Round::Again,
            other => {
                let able = matches!(other, Wanted::Nothing);
                self.takes_part(able);
                return Round::Rest(if able { u64::MAX >> 1 } else { REST_NS });
            }
        };
        let wanted = task.bytes > 0;
        task.bytes = task.bytes.saturating_sub(swap.in_flight());
        if task.bytes == 0 && !task.due {
            return Round::Rest(u64::MAX >> 1);
        }
        let round = self.plan_write(s, swap, slot, buffer, task);
        if wanted {
            self.takes_part(!matches!(round, Round::Rest(_)));
        }
        round
    }

    fn plan_write(&self, s: &mut State, swap: &mut Swap, slot: usize, buffer: &mut [u8], task: Task) -> Round {
        let rest = swap.rest_until.saturating_sub(thread::now_ns());
        if rest > 0 {
            return Round::Rest(rest);
        }
        let mut run = match self.find_run(swap) {
            // The disk may have no room for a new cluster.
            Ok(run) if swap.disk_is_full() && swap.is_new(run.cluster()) && s.give_up_kept(swap) => {
                swap.drop_cluster(run.cluster());
                return Round::Again;
            }
            Ok(run) => run,
            Err(NoRun::Full(trouble)) => return self.file_is_full(s, swap, trouble),
            // The disk has no room for it. A cluster in which another process may be writing still is there.
            Err(NoRun::Extend(cluster)) if swap.disk_is_full() && !swap.map.is_late(cluster) => {
                let Some(round) = self.finds_more(s, swap) else { return Round::Extend(cluster) };
                swap.drop_cluster(cluster);
                return round;
            }
            Err(NoRun::Extend(cluster)) => return Round::Extend(cluster),
            Err(NoRun::Again) => return Round::Again,
            Err(NoRun::Sparse(sparse)) => return Round::Compact(sparse),
        };
        let filled = self.fill_run(s, swap, slot, &mut run, buffer, task);
        self.me().pool.store(s.pool.held_bytes() as u64, Relaxed);
        if swap.flights[slot].is_empty() {
            let other = filled.freed || !swap.aside.is_empty() || swap.to_cut.is_some();
            if filled.too_large && !other {
                return self.file_is_full(s, swap, Trouble::Full);
            }
            return if filled.more || other { Round::Again } else { Round::Rest(IDLE_NS) };
        }
        as_write(swap, slot, &run, buffer)
    }

    /// Where the next run goes. A cluster without room on disk must first be extended.
    pub(super) fn find_run(&self, swap: &mut Swap) -> Result<Run, NoRun> {
        let map = swap.map;
        let Some(me) = self.own_row(map) else { return Err(NoRun::Full(Trouble::Rows)) };
        swap.row = me;
        let began = thread::now_ns();
        let bad = core::mem::take(&mut swap.bad);
        let may_write = |c: u32| !bad.contains(&c) && map.may_write(me, c);
        let mut found = swap.books.run_behind_last(LEAST_RUN, RUN_BYTES, may_write).map(Ok);
        // There is a free cluster then, too, but it lies beyond the end of the file.
        if found.is_none() && swap.disk_is_full() {
            found = swap.books.run_in_hole(LEAST_RUN, RUN_BYTES, may_write).map(Ok);
            // The story: as a cluster can always be claimed there, what ended processes had in the file was never freed, and nothing
            // more was written.
            if found.is_none() {
                map.bury_the_dead(Identity::own());
            }
        }
        if found.is_none() {
            found = swap.claim(&bad).map(|cluster| {
                let end = (u64::from(cluster) + 1) * swap.books.cluster_bytes() as u64;
                if end > map.allocated.load(Relaxed) || map.is_late(cluster) {
                    return Err(NoRun::Extend(cluster));
                }
                swap.books.run_behind_last(LEAST_RUN, RUN_BYTES, may_write).ok_or(NoRun::Again)
            });
        }
        if found.is_none() {
            found = swap.books.run_in_hole(LEAST_RUN, RUN_BYTES, may_write).map(Ok);
        }
        if found.is_none() {
            found = swap.sparsest(me, &bad, MANY).map(|sparse| Err(NoRun::Sparse(sparse)));
        }
        if found.is_none() {
            found = swap.books.run_in_largest_hole(RUN_BYTES, may_write).map(Ok);
            // All books were searched, with the lock held, for little; that may take only a small part of the time.
            let now = thread::now_ns();
            swap.rest_until = now + ((now - began) * WALK_PART).min(REST_NS);
        }
        swap.bad = bad;
        found.unwrap_or(Err(NoRun::Full(Trouble::Full)))
    }

    /// There is no room for what is next, unless some can be made.
    fn file_is_full(&self, s: &mut State, swap: &mut Swap, trouble: Trouble) -> Round {
        if let Some(round) = self.finds_more(s, swap) {
            return round;
        }
        self.tell(trouble);
        swap.failures += 1;
        swap.rest_until = thread::now_ns() + REST_NS;
        Round::Rest(REST_NS)
    }

    /// Makes room where there is none: what is only kept is given up, this process's file is compacted, what the others only keep
    /// is given up, and where writes failed it is tried again, as that may have passed. (A write that fails again rests longer each
    /// time.) None if there is nothing of the kind.
    fn finds_more(&self, s: &mut State, swap: &mut Swap) -> Option<Round> {
        if s.give_up_kept(swap) {
            (swap.failures, swap.rest_until) = (0, 0);
            return Some(Round::Again);
        }
        if let Some(sparse) = swap.sparsest(swap.row, &swap.bad, SOME) {
            (swap.failures, swap.rest_until) = (0, 0);
            return Some(Round::Compact(sparse));
        }
        if !swap.asks && swap.map.used_rows() > 1 {
            swap.asks = true;
            self.ask_for_room(swap);
            swap.rest_until = thread::now_ns() + ASK_NS;
            return Some(Round::Rest(ASK_NS));
        }
        if !swap.bad.is_empty() {
            swap.bad.clear();
            return Some(Round::Again);
        }
        swap.asks = false;
        None
    }

    /// Preallocates a cluster that was just added, or waits until no writes of others can be under way there. Gives the cluster
    /// up if that fails.
    pub(super) fn extend(&self, cluster: u32) {
        let Some(map) = self.clusters else { return };
        // (The size in the shared books is anybody's to change; what lies elsewhere must not be punched.)
        let Some(bytes) = self.state.lock().swap.as_ref().map(|swap| swap.books.cluster_bytes() as u64) else { return };
        let done =
            if map.is_late(cluster) { self.await_late(cluster, bytes) } else { self.preallocate(cluster, bytes) };
        let mut s = self.state.lock();
        let Some(swap) = s.swap.as_mut() else { return };
        if map.is_late(cluster) {
            // It stays claimed, so that nobody meets it again.
            swap.put_aside(cluster);
        } else if done.is_err() {
            swap.failures += 1;
            let now = thread::now_ns();
            // If the disk was known to be full, everything else was tried before. Otherwise the next try is at once.
            if swap.disk_is_full() {
                swap.rest_until = now + REST_NS;
            }
            swap.full_until = now + FULL_NS;
            swap.drop_cluster(cluster);
        } else {
            swap.full_until = 0;
        }
        drop(s);
        self.swap_progressed();
    }

    /// Cuts a block that was set aside; its parts are the next to be met. (A block that cannot be cut for want of room is met
    /// again; one that cannot for other reasons never is.)
    fn cut_for_disk(&self, s: &mut State, entry: Entry) {
        let parts = if s.is_large(entry) { self.cut(s, entry) } else { self.cut_to_fit(s, entry) };
        let Some(swap) = s.swap.as_mut() else { return };
        match parts {
            Ok(parts) => parts.into_iter().rev().for_each(|part| swap.shrinker.put_back(part)),
            Err(Refused::NoPlace) => swap.shrinker.rotate(entry),
            // For instance a block that mremap has torn apart stays.
            Err(_) => {}
        }
    }

    /// Completes a write that has ended.
    pub(super) fn complete(&self, s: &mut State, slot: usize, result: Result<(), Errno>) {
        let Some(mut swap) = s.swap.take() else { return };
        let (c, written) = (self.counters(), result.is_ok());
        let mut flights = core::mem::take(&mut swap.flights[slot]);
        swap.writing[slot] = (0, 0);
        let (mut gone, mut from_pool) = (0, 0);
        for flight in &flights {
            let still = s.landed(slot, *flight);
            swap.landed_whole(flight, written, still);
            if !written {
                // An object that may not enter the pool is first cut.
                match flight.whole {
                    Some(_) => swap.to_pool.push(flight.entry),
                    None => swap.shrinker.rotate(flight.entry),
                }
                swap.release(flight.place, flight.pages);
                c.reject_reclaim_fail.fetch_add(u64::from(still.count_ones()), Relaxed);
                continue;
            }
            if still != 0 {
                let head = s.header_of(flight.entry);
                s.note(Record::of_object(Kind::WriteBack, flight.entry.vpn, head.order, head.len));
                s.pt.hint(flight.entry.vpn, 0, HINT_REUSED);
                if flight.whole.is_none() && still.count_ones() == 1 << head.order {
                    c.folios.count(head.order, |o| &o.swpout);
                }
            }
            from_pool += if flight.whole.is_none() { still.count_ones() as usize } else { 0 };
            for i in (0..16).filter(|i| still & (1 << i) != 0) {
                let at = flight.entry.vpn + i;
                let pte = s.pt.get(at);
                s.pt.set(at, pte.on_disk(flight.place));
                s.release(pte.handle(), i as usize);
                s.swapped -= 1;
                gone += 1;
            }
            if flight.pages != still {
                swap.release(flight.place, flight.pages & !still);
                // Pages that came back meanwhile may have kept it.
                swap.shrinker.rotate(flight.entry);
            }
        }
        swap.on_disk += gone;
        c.pswpout.fetch_add(gone as u64, Relaxed);
        c.zswpwb.fetch_add(from_pool as u64, Relaxed);
        match result {
            Ok(()) => {
                (swap.failures, swap.asks) = (0, false);
                self.tier.writes.fetch_add(1, Relaxed);
                self.tier.helps.store(true, Relaxed);
            }
            Err(e) => swap.failed(e, flights.first().map(|flight| flight.place)),
        }
        flights.clear();
        swap.flights[slot] = flights;
        self.end_whole(&mut swap);
        s.swap = Some(swap);
        self.let_into_pool(s);
        self.publish(s);
    }
}

impl Swap {
    /// Whether the disk recently had no room for a larger file.
    pub(super) fn disk_is_full(&self) -> bool {
        thread::now_ns() < self.full_until
    }

    /// Handles a failed write, of a run that begins at place `at`; its objects have left the books.
    ///
    /// The story: where the file system cannot preallocate, a full disk shows only when a cluster is written to. Such a write
    /// counted like any other failure, and the next went to the next cluster beyond the end, forever. Free room in clusters that
    /// the disk has was never written to again.
    fn failed(&mut self, error: Errno, at: Option<Place>) {
        let (now, full) = (thread::now_ns(), matches!(error, libc::ENOSPC | libc::EDQUOT));
        if full {
            self.full_until = now + FULL_NS;
        }
        if let Some(place) = at {
            let cluster = (offset(place) / self.books.cluster_bytes() as u64) as u32;
            // A new cluster is not at fault: it has its turn when there is room.
            if !full || self.books.clusters().any(|c| c == cluster) {
                self.put_aside(cluster);
            }
        }
        self.failures += 1;
        let rest = if self.failures < 3 { 0 } else { (1_000_000 << self.failures.min(10)).min(REST_NS) };
        self.rest_until = now + rest;
    }

    /// Whether a cluster is empty.
    fn is_new(&self, cluster: u32) -> bool {
        let bytes = self.books.cluster_bytes();
        self.books.objects_within(u64::from(cluster) * bytes as u64, bytes).next().is_none()
    }

    /// Gives up a cluster that was just claimed.
    pub(super) fn drop_cluster(&mut self, cluster: u32) {
        if self.books.drop_if_empty(cluster) {
            self.map.release_cluster(self.row, cluster);
        }
    }

    /// Claims a cluster that is not `bad`.
    fn claim(&mut self, bad: &[u32]) -> Option<u32> {
        loop {
            let claimed = self.map.claim_cluster(self.row).or_else(|| {
                self.map.bury_the_dead(Identity::own());
                self.map.claim_cluster(self.row)
            })?;
            if !self.enter(claimed)? {
                continue;
            }
            // A bad cluster stays claimed, so that it is not met again.
            if !bad.contains(&claimed) {
                return Some(claimed);
            }
        }
    }

    /// Enters a cluster that was just claimed into the books; false if it is there already. None if the file has no such cluster,
    /// which is given up.
    ///
    /// The story: another member's stray write said that a cluster was free in which this process had objects. It was claimed
    /// once more, and the process ended by a panic; with a file that seemed larger, places of two clusters were the same.
    pub(super) fn enter(&mut self, cluster: u32) -> Option<bool> {
        if cluster >= self.clusters_there {
            self.map.release_cluster(self.row, cluster);
            return None;
        }
        let known = self.books.has_cluster(cluster);
        if !known {
            self.books.add_cluster(cluster);
        }
        Some(!known)
    }

    /// Writes nothing more to a cluster in which a write failed, unless there are so many that the disk as a whole fails.
    fn put_aside(&mut self, cluster: u32) {
        if !self.bad.contains(&cluster) {
            self.bad.push(cluster);
        }
        if self.bad.len() > 16 {
            self.bad.clear();
        }
    }
}

/// The write `slot` of a run that is filled.
pub(super) fn as_write(swap: &mut Swap, slot: usize, run: &Run, buffer: &mut [u8]) -> Round {
    let (at, len) = swap.books.extent(run);
    buffer[run.filled()..len].fill(0);
    swap.writing[slot] = (at, at + len as u64);
    Round::Write(at, len)
}

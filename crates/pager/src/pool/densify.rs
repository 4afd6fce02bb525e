//! Recompression: what lz4 stored is made denser with zstd when the pool crowds the program out.
//!
//! lz4 is the codec to begin with: fast, and good enough while memory suffices. Where the pool takes more than an eighth of the
//! limit, its size costs faults, which cost more than zstd does. What is stored from then on is stored with zstd, and the sweep
//! below goes over the page table and recompresses what lz4 stored before. It does a few units at a time, along with other work.
//! After a pass that gained little it rests until the pool has grown again. From three quarters of the limit on, clean pages keep
//! no copy either. (Where there is a disk tier, idle objects are made dense before they are written, at any size of the pool: see
//! `swap::dense`.)
//!
//! Invariant: an object is replaced only when every page that refers to it was found, and all of them switch to the new one under
//! one hold of the lock. An object that cannot be decompressed, or does not get smaller, stays as it is.

use crate::fault::deliver::decode;
use crate::frames::arena::PAGE;
use crate::inject::Site;
use crate::pager::Pager;
use crate::pool::batch::Batch;
use crate::pool::object::{self, Header};
use crate::pool::relocate;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::codec::{Algorithm, Encoding};
use uzswap_mm::pagetable::Tag;
use uzswap_mm::trace::{Kind, Record};

/// The pool is made dense when it takes more than this part of the limit.
///
/// The story: it was half. Programs that use all of their memory at random lost more by the room that lz4 took from them than
/// zstd costs in time: Ruby at half of its memory faulted 1.36 million times in 25 s, and does 0.27 million times in 8.5 now.
const DENSE_PART: usize = 8;
/// How many page-table entries a call looks at at most.
const LOOK: usize = 4096;

/// The state of the sweep.
#[derive(Default)]
pub struct Sweep {
    /// The next page to look at.
    at: u64,
    /// Bytes gained in this pass.
    gained: usize,
    /// The pool must hold more than this (bytes) for another pass to be worth while.
    rest_until: usize,
}

impl Pager {
    /// Whether the pool takes so much of the limit that zstd, which leaves the program more room, is worth its time. (Where there
    /// is a disk, that keeps the pool small; if the pool holds more for a moment, the disk is the faster way out than zstd.)
    pub fn wants_dense(&self, s: &State) -> bool {
        self.takes_unless_disk(s, self.limit() / DENSE_PART)
    }

    /// Whether the pool takes so much that memory is scarcer than anything else.
    pub fn crowded(&self, s: &State) -> bool {
        self.takes_unless_disk(s, self.limit() / 2)
    }

    fn takes_unless_disk(&self, s: &State, bytes: usize) -> bool {
        self.pool_takes(s, bytes) && (self.crowded_out(s) || !self.disk_takes_over(s))
    }

    /// Whether the pool takes so much that clean pages keep no copy, and pages read at random leave their block: the program
    /// needs the room more.
    pub fn crowded_out(&self, s: &State) -> bool {
        self.pool_takes(s, self.limit() / 4 * 3)
    }

    /// Whether the pool takes more than `bytes` from the program. The pools of the group's other members count with it.
    ///
    /// The story: four processes of 100 MiB each under 220 had pools of up to 110 MiB, of lz4, which hardly compressed what they
    /// held. None of the pools took more than half of the limit; together they took twice the limit.
    pub(crate) fn pool_takes(&self, s: &State, bytes: usize) -> bool {
        let pools = || s.pool.held_bytes() + self.others_pool.load(Relaxed);
        self.group.pool_uncharged.load(Relaxed) == 0 && pools() > bytes
    }

    /// Recompresses up to `units` objects; true when the pool got smaller.
    pub fn densify(&self, s: &mut State, units: usize) -> bool {
        if s.algorithm != Algorithm::Lz4 || !self.wants_dense(s) || s.pool.held_bytes() < s.sweep.rest_until {
            return false;
        }
        // The fault path's own tools: a context of zstd is large, and both are used with the lock held.
        self.store_posted(s);
        let mut batch = s.take_direct();
        let (mut done, mut gained) = (0, 0);
        for _ in 0..LOOK {
            if done == units {
                break;
            }
            let Some(vpn) = s.pt.next_used(s.sweep.at) else {
                // A whole pass is done: go on at once only if it was worth it.
                let poor = s.sweep.gained < s.pool.held_bytes() / 16;
                s.sweep.rest_until = if poor { s.pool.held_bytes() / 8 * 9 } else { 0 };
                (s.sweep.at, s.sweep.gained) = (0, 0);
                break;
            };
            s.sweep.at = vpn + 1;
            let pte = s.pt.get(vpn);
            if pte.tag() == Tag::Compressed {
                let head = Header::read(s.object(pte.handle()));
                if matches!(head.encoding, Encoding::Lz4) {
                    done += 1;
                    gained += self.recompress(s, pte.handle(), head, &mut batch);
                }
            }
        }
        s.direct = Some(batch);
        s.sweep.gained += gained;
        gained > 0
    }

    /// Replaces an object; returns by how many bytes it got smaller.
    fn recompress(&self, s: &mut State, handle: u32, head: Header, batch: &mut Batch) -> usize {
        let pages = 1usize << head.order;
        let (compressor, room) = batch.block_room(true, head.order);
        let (plain, packed) = room.split_at_mut(room.len() / 2);
        let (plain, live) = (&mut plain[..pages * PAGE], object::live(s.object(handle)));
        // An object that is being written, or is already on disk, will leave anyway. After mremap of a part of it its pages are
        // elsewhere: such objects stay.
        if head.flags & (object::HELD | object::ON_DISK) != 0
            || !relocate::is_found(&s.pt, handle, &head, &live)
            || !decode(s, handle, plain)
        {
            return 0;
        }
        let room = head.len - head.len / 8;
        let Some((encoding, len)) = compressor.compress(plain, &mut packed[..room]) else {
            return 0;
        };
        if self.inject(Site::Pool).is_some() {
            return 0;
        }
        let before = s.pool.used_bytes();
        let old = s.object(handle);
        let copy_hashes = |place: &mut [u8]| object::set_hashes(place, 0, object::hashes(old));
        let Some(new) = s.put_object(Header { len, encoding, ..head }, live, copy_hashes, &packed[..len]) else {
            return 0;
        };
        s.note(Record::of_object(Kind::Resize, head.vpn, head.order, len));
        relocate::repoint(&mut s.pt, &Header { encoding, ..head }, &live, new.raw());
        live.iter().for_each(|i| s.release(handle, i));
        s.entered_pool(head.vpn, new.raw());
        self.counters().recompressed_pages.fetch_add(live.len() as u64, Relaxed);
        before.saturating_sub(s.pool.used_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::State;
    use crate::testing::{self, words as page_of};
    use uzswap_mm::pagetable::Pte;

    fn store(s: &mut State, vpn: u64, order: u8, copies: u16) {
        testing::store(s, vpn, order, copies, page_of);
    }

    /// Checks that a page is what it was, and is still out, or in with a `copy`.
    fn check(s: &mut State, vpn: u64, copy: bool) -> Encoding {
        let pte = s.pt.get(vpn);
        let (handle, index) = if copy {
            assert_eq!(pte.tag(), Tag::Resident);
            let handle = pte.copy().expect("its copy");
            (handle, s.copy_index(vpn, handle))
        } else {
            assert_eq!((pte.tag(), pte.evicted_at()), (Tag::Compressed, testing::EVICTED_AT));
            (pte.handle(), pte.index())
        };
        let head = Header::read(s.object(handle));
        assert!(object::live(s.object(handle)).has(index));
        assert!(copy || pte.state().tier() == object::tier(head.encoding), "page {vpn:x}: {:?}", pte.state());
        let mut out = vec![0; PAGE << head.order];
        assert!(decode(s, handle, &mut out), "page {vpn:x}");
        assert_eq!(out[index * PAGE..(index + 1) * PAGE], page_of(vpn), "page {vpn:x}");
        head.encoding
    }

    /// Stores until the pool crowds the program out; the page behind the last.
    fn crowd(p: &Pager, s: &mut State) -> u64 {
        let copies = |vpn: u64| if vpn.is_multiple_of(16) { 0b0101 } else { 0 };
        let mut vpn = 0x1000;
        while !p.crowded(s) {
            store(s, vpn, 2, copies(vpn));
            store(s, vpn + 4, 0, 0);
            vpn += 8;
        }
        vpn
    }

    fn check_all(s: &mut State, last: u64) -> (usize, usize) {
        let (mut dense, mut all) = (0, 0);
        for vpn in (0x1000..last).filter(|v| v % 8 < 5) {
            let copy = (vpn & !7).is_multiple_of(16) && matches!(vpn % 8, 0 | 2);
            all += 1;
            dense += usize::from(matches!(check(s, vpn, copy), Encoding::Zstd));
        }
        (dense, all)
    }

    #[test]
    fn every_page_survives_recompression_and_the_pool_shrinks() {
        let p = testing::pager(8 << 20);
        let mut s = p.state.lock();
        let last = crowd(p, &mut s);
        let (held, used) = (s.pool.held_bytes(), s.pool.used_bytes());
        let (swapped, resident) = (s.swapped, s.resident);
        assert_eq!(check_all(&mut s, last).0, 0);
        // A single call does what it is asked, no more.
        assert!(p.densify(&mut s, 4));
        let few = p.counters().recompressed_pages.load(Relaxed);
        assert!((4..=16).contains(&few), "{few} pages");
        while p.crowded(&s) && p.densify(&mut s, 64) {}
        let (dense, all) = check_all(&mut s, last);
        assert!(!p.crowded(&s) && dense > 50, "{dense} of {all} pages are dense");
        assert!(s.pool.used_bytes() < used && s.pool.held_bytes() < held, "of {held} {}", s.pool.held_bytes());
        assert_eq!((s.swapped, s.resident), (swapped, resident));
        // What is left frees completely: no object was referred to twice, and none is left over.
        for vpn in (0x1000..last).filter(|v| v % 8 < 5) {
            let pte = s.pt.get(vpn);
            s.pt.set(vpn, Pte::NONE);
            s.forget(vpn, pte);
        }
        assert_eq!(s.pool.used_bytes(), 0);
    }

    #[test]
    fn without_room_for_the_denser_object_the_old_one_stays() {
        let p = testing::pager(8 << 20);
        let mut s = p.state.lock();
        let last = crowd(p, &mut s);
        p.group.faults.set("pool=1/1", 1).unwrap();
        assert!(!p.densify(&mut s, 64));
        assert_eq!(check_all(&mut s, last).0, 0);
    }

    /// An object that is being written leaves anyway, and the write must end with the object that it began with.
    #[test]
    fn what_is_being_written_is_left_alone() {
        let p = testing::pager(8 << 20);
        let mut s = p.state.lock();
        let last = crowd(p, &mut s);
        let handle = s.pt.get(0x1004).handle();
        object::set_flags(s.object(handle), object::WRITING_BY[1], 0);
        assert!(p.densify(&mut s, 2));
        assert!(p.counters().recompressed_pages.load(Relaxed) > 0);
        assert_eq!(s.pt.get(0x1004).handle(), handle);
        let head = Header::read(s.object(handle));
        assert!(matches!(head.encoding, Encoding::Lz4) && head.flags == object::WRITING_BY[1]);
        check_all(&mut s, last);
    }

    /// See [`Pager::pool_takes`].
    #[test]
    fn members_crowd_each_other_out_together() {
        let p = testing::pager(64 << 20);
        let mut s = p.state.lock();
        store(&mut s, 0x1000, 2, 0);
        p.group.used.store(9, Relaxed);
        let others = &p.group.slots[1..9];
        let all_hold = |s: &State, pool: u64| {
            others.iter().for_each(|other| other.pool.store(pool, Relaxed));
            p.count_sharers();
            (p.crowded(s), p.crowded_out(s))
        };
        for other in others {
            other.owner.store(uzswap_sys::process::Identity::own().raw(), Relaxed);
            other.engaged.store(1, Relaxed);
        }
        assert_eq!(all_hold(&s, 4 << 20), (true, false), "half of the limit, and what is here");
        assert_eq!(all_hold(&s, 3 << 20), (false, false));
        assert_eq!(all_hold(&s, 6 << 20), (true, true));
        // A floor is left to each: an eighth of its share, with next to nothing in its own pool.
        let least = (p.share() / 8).div_ceil(PAGE);
        let floor = |s: &mut State, resident: usize| {
            testing::seem_resident(s, resident);
            let floor = p.at_floor(s);
            testing::seem_resident(s, 0);
            floor
        };
        assert_eq!([least - 1, least].map(|resident| floor(&mut s, resident)), [true, false]);
        all_hold(&s, 3 << 20);
        assert!(!floor(&mut s, least - 1));
    }

    /// See [`DENSE_PART`]: it is worth its time long before the pool crowds the program out.
    #[test]
    fn from_an_eighth_of_the_limit_on_the_pool_is_made_dense() {
        let p = testing::pager(8 << 20);
        let mut s = p.state.lock();
        let mut vpn = 0x1000;
        while !p.wants_dense(&s) {
            assert!(s.pool.held_bytes() <= 1 << 20 && !p.densify(&mut s, 64));
            store(&mut s, vpn, 2, 0);
            vpn += 4;
        }
        assert!(s.pool.held_bytes() > 1 << 20 && !p.crowded(&s));
        assert!(p.densify(&mut s, 4));
        let dense = (0x1000..vpn).filter(|at| matches!(check(&mut s, *at, false), Encoding::Zstd)).count();
        assert_eq!(dense, 16, "four objects of four pages");
        let mut batch = Batch::new(s.new_compressor());
        p.prepare(&mut s, &mut batch, 0, 0);
        assert!(batch.use_dense, "and what is stored from now on is");
    }

    #[test]
    fn a_pool_that_crowds_nobody_out_is_left_alone() {
        let p = testing::pager(8 << 20);
        let mut s = p.state.lock();
        store(&mut s, 0x1000, 2, 0);
        assert!(!p.crowded(&s) && !p.densify(&mut s, 64));
        assert!(matches!(check(&mut s, 0x1000, false), Encoding::Lz4));
    }
}

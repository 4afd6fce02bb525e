//! Cuts a block of more than 64 KiB, or a raw one, into smaller ones.
//!
//! Blocks of more than 64 KiB are made where the user asked for them, and stay as they are except in two cases. Pages that are
//! dropped or written anew leave a block one by one, and the block goes only with the last. Much of a large block may be kept for
//! the little of it that is wanted; so when three quarters have left, the rest is stored anew. And none are on disk: a thread
//! that wants one page from there would wait for all of it, so a block is cut before it is written.
//!
//! A raw block, of memory that does not compress, takes as much room as its pages did. So when a quarter of them have left it is
//! cut, by copying what is there. (Not where there is a disk, to which it goes instead: writes of it may be under way.)
//!
//! The story: a program that wrote here and there to 96 MiB of noise, in 32, came to hold 130 (115 now).
//!
//! ```text
//! block, live pages:   ████░░██ ░░░░░░░░ ████████ …        each run of live pages that is aligned, of 64 KiB at most,
//! cut:                 ████  ██          ████████          is an object of its own; what is dead is left out
//! ```
//! Invariant: as in `densify`, a block is cut only when every page that refers to it was found, and all of them switch to the
//! parts under one hold of the lock. When one part finds no place none is stored, and the block stays as it is.

use crate::fault::deliver::decode;
use crate::frames::arena::PAGE;
use crate::group::folio::USUAL_UNIT;
use crate::inject::Site;
use crate::pager::Pager;
use crate::pool::object::{self, Header};
use crate::pool::relocate;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::codec::{Algorithm, Encoding};
use uzswap_mm::pageset::PageSet;
use uzswap_mm::pagetable::Tag;
use uzswap_mm::shrinker::Entry;
use uzswap_mm::trace::{Kind, Record};
use uzswap_mm::zswap::Refused;

/// How many blocks that have lost most of their pages are remembered at most.
const MOST_SPARSE: usize = 64;

/// A block is cut when at most this many quarters of its pages refer to it: a large one, and a raw one of up to 64 KiB.
const SPARSE: usize = 1;
const SPARSE_RAW: usize = 3;
/// The smallest raw block that is cut: 16 KiB.
const LEAST_RAW: u8 = 2;
/// Order of the largest parts of a block that is cut for a hole on disk.
pub(crate) const FITTING: u8 = 2;

impl State {
    /// Notes that a page, not the last, has left a block: if the block is to be cut, that happens later.
    pub(crate) fn note_sparse(&mut self, handle: u32) {
        // Called for each page that leaves, so that a block is noted again if there was no place to cut it, or no room to
        // remember it.
        let block = self.object(handle);
        if object::order(block) < LEAST_RAW {
            return;
        }
        let head = Header::read(block);
        if self.is_sparse(handle) && self.sparse.len() < MOST_SPARSE && !self.sparse.iter().any(|e| e.handle == handle)
        {
            self.sparse.push(Entry { vpn: head.vpn, handle });
        }
    }

    /// Whether so little of a block is still wanted that it is to be cut.
    fn is_sparse(&self, handle: u32) -> bool {
        let block = self.object(handle);
        let head = Header::read(block);
        let quarters = match head.order {
            order if order > USUAL_UNIT => SPARSE,
            LEAST_RAW.. if head.encoding == Encoding::Raw && self.swap.is_none() => SPARSE_RAW,
            _ => return false,
        };
        object::live(block).len() * 4 <= quarters << head.order
    }

    /// Whether an entry names a block of more than 64 KiB that a page at its place refers to.
    pub(crate) fn is_large(&self, e: Entry) -> bool {
        self.largest_block > USUAL_UNIT && self.is_there(e) && object::order(self.object(e.handle)) > USUAL_UNIT
    }

    /// Whether a page at an entry's place refers to its object.
    fn is_there(&self, e: Entry) -> bool {
        let refers = |i: usize| {
            let pte = self.pt.get(e.vpn + i as u64);
            let out = pte.tag() == Tag::Compressed && pte.handle() == e.handle && pte.index() == i;
            out || pte.copy() == Some(e.handle) && self.copy_index(e.vpn + i as u64, e.handle) == i
        };
        (0..1 << self.largest_block).any(refers)
    }
}

/// The parts into which a block is cut: first page and order of each.
fn parts(live: &PageSet, order: u8, may: impl Fn(u8) -> bool) -> Vec<(usize, u8)> {
    let (mut parts, mut at) = (Vec::new(), 0usize);
    while at < 1 << order {
        // 8 KiB is no unit, as it gains little.
        let all = |order: &u8| at.is_multiple_of(1 << order) && (at..at + (1 << order)).all(|i| live.has(i));
        match [USUAL_UNIT, 3, 2, 0].into_iter().filter(|order| *order == 0 || may(*order)).find(all) {
            Some(order) => {
                parts.push((at, order));
                at += 1 << order;
            }
            None => at += 1,
        }
    }
    parts
}

impl Pager {
    /// Cuts the blocks that are remembered for having lost most of their pages.
    pub(crate) fn cut_sparse(&self, s: &mut State) {
        while let Some(e) = s.sparse.pop() {
            if s.is_there(e) && s.is_sparse(e.handle) {
                let parts = self.cut(s, e).unwrap_or_default();
                parts.into_iter().for_each(|part| s.entered_pool(part.vpn, part.handle));
            }
        }
    }

    /// Stores a block of more than 64 KiB, or a sparse one, as smaller ones, and returns those.
    ///
    /// # Errors
    /// Why the block stays as it is: not all its pages are found (it has gone, or mremap has moved some away), it is damaged, or
    /// there is no place.
    pub(crate) fn cut(&self, s: &mut State, e: Entry) -> Result<Vec<Entry>, Refused> {
        // Uses the fault path's own tools, as in `densify`. What waits there is stored first, as that may change the block.
        self.store_posted(s);
        if !(s.is_large(e) || s.is_there(e) && s.is_sparse(e.handle)) {
            return Err(Refused::NoIndex);
        }
        self.cut_into(s, e, |_| true)
    }

    /// The same for a block that does not compress, and that a hole on disk has no room for: into parts of up to [`FITTING`].
    ///
    /// # Errors
    /// As [`Pager::cut`].
    pub(crate) fn cut_to_fit(&self, s: &mut State, e: Entry) -> Result<Vec<Entry>, Refused> {
        self.store_posted(s);
        if s.is_there(e) { self.cut_into(s, e, |order| order <= FITTING) } else { Err(Refused::NoIndex) }
    }

    /// The same for a block of any size that is there, into single pages and parts of those orders that `may` allows. Nothing may
    /// wait in the fault path's own tools.
    ///
    /// # Errors
    /// As [`Pager::cut`].
    pub(crate) fn cut_into(&self, s: &mut State, e: Entry, may: impl Fn(u8) -> bool) -> Result<Vec<Entry>, Refused> {
        let block = s.object(e.handle);
        let (head, live) = (Header::read(block), object::live(block));
        if !relocate::is_found(&s.pt, e.handle, &head, &live) {
            return Err(Refused::NoIndex);
        }
        let mut batch = s.take_direct();
        let dense = s.algorithm == Algorithm::Lz4 && !matches!(head.encoding, Encoding::Lz4);
        let (compressor, room) = batch.block_room(dense, head.order);
        let (plain, packed) = room.split_at_mut(PAGE << head.order);
        let mut made = Vec::new();
        let right = decode(s, e.handle, plain);
        let placed = right
            && parts(&live, head.order, may).into_iter().all(|(at, order)| {
                let plain = &plain[at * PAGE..][..PAGE << order];
                let most = plain.len() - plain.len() / 16;
                let packs = head.order > USUAL_UNIT || head.encoding != Encoding::Raw;
                let (encoding, bytes) = match packs.then(|| compressor.compress(plain, &mut packed[..most])).flatten() {
                    Some((encoding, len)) => (encoding, &packed[..len]),
                    None => (Encoding::Raw, plain),
                };
                let part = Header { len: bytes.len(), encoding, order, vpn: head.vpn + at as u64, flags: 0 };
                let hashes = &object::hashes(s.object(e.handle))[16 * at..][..16 << order];
                let set = |place: &mut [u8]| object::set_hashes(place, 0, hashes);
                let place = match self.inject(Site::Pool) {
                    Some(_) => None,
                    None => s.put_object(part, PageSet::first(1 << order), set, bytes),
                };
                made.extend(place.map(|handle| (part, handle.raw())));
                place.is_some()
            });
        let verify = self.group.folios.verify.load(Relaxed) != 0;
        let right = right
            && (!verify || made.iter().all(|(part, handle)| decode(s, *handle, &mut packed[..PAGE << part.order])));
        s.direct = Some(batch);
        if !placed || !right {
            made.iter().for_each(|(part, handle)| (0..1 << part.order).for_each(|i| s.release(*handle, i)));
            return Err(if right { Refused::NoPlace } else { Refused::Compressor });
        }
        for (part, handle) in &made {
            relocate::repoint(&mut s.pt, part, &PageSet::first(1 << part.order), *handle);
            s.note(Record::of_object(Kind::Resize, part.vpn, part.order, part.len));
        }
        live.iter().for_each(|i| s.release(e.handle, i));
        self.counters().folios.block_cut.fetch_add(1, Relaxed);
        Ok(made.into_iter().map(|(part, handle)| Entry { vpn: part.vpn, handle }).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::object;
    use crate::testing::{self, EVICTED_AT, noise, words};
    use uzswap_mm::pagetable::Pte;

    const LIMIT: usize = 64 << 20;
    const FIRST: u64 = 0x1_0000;
    /// The set of its pages that are in the program, and have a copy in it.
    const COPIES: u16 = 0b1001;

    /// Drops pages, as the program does.
    fn drop_pages(s: &mut State, pages: impl Iterator<Item = u64>) {
        for vpn in pages {
            let pte = s.pt.get(vpn);
            s.pt.set(vpn, Pte::NONE);
            s.forget(vpn, pte);
        }
    }

    /// Checks that a page's contents are what they were; returns the order of its block.
    fn check(s: &mut State, vpn: u64) -> u8 {
        let pte = s.pt.get(vpn);
        let (handle, index) = match pte.copy() {
            Some(handle) => (handle, s.copy_index(vpn, handle)),
            None => {
                assert_eq!((pte.tag(), pte.evicted_at()), (Tag::Compressed, EVICTED_AT), "page {vpn:x}");
                (pte.handle(), pte.index())
            }
        };
        let head = Header::read(s.object(handle));
        assert!(object::live(s.object(handle)).has(index) && head.vpn + index as u64 == vpn, "page {vpn:x}");
        let mut out = vec![0; PAGE << head.order];
        assert!(decode(s, handle, &mut out) && out[index * PAGE..][..PAGE] == words(vpn), "page {vpn:x}");
        head.order
    }

    #[test]
    fn only_live_pages_have_parts_and_each_has_one() {
        let sets = [PageSet::first(32), PageSet::from(0b1101_1111_0111_1010), (16..32).collect(), PageSet::default()];
        for live in sets {
            let parts = parts(&live, 5, |_| true);
            let covered = parts.iter().flat_map(|(at, order)| *at..at + (1 << order));
            assert!(covered.eq(live.iter()), "{parts:?}");
            assert!(parts.iter().all(|(at, order)| at.is_multiple_of(1 << order) && *order != 1), "{parts:?}");
        }
        assert_eq!(parts(&PageSet::first(32), 5, |_| true), [(0, 4), (16, 4)]);
        assert_eq!(parts(&(4..16).collect(), 5, |_| true), [(4, 2), (8, 3)]);
        assert_eq!(parts(&PageSet::first(8), 3, |order| order < 3), [(0, 2), (4, 2)]);
    }

    #[test]
    fn every_page_survives_being_cut_and_nothing_is_left_over() {
        for order in 5..=9u8 {
            let p = testing::pager(LIMIT);
            let s = &mut *p.state.lock();
            let end = FIRST + (1 << order);
            let handle = testing::store(s, FIRST, order, COPIES, words);
            let gone = FIRST + 16..FIRST + 19;
            drop_pages(s, gone.clone());
            let (swapped, resident) = (s.swapped, s.resident);
            let parts = p.cut(s, Entry { vpn: FIRST, handle }).unwrap();
            assert!(!s.is_large(Entry { vpn: FIRST, handle }));
            assert!((FIRST..end).filter(|v| !gone.contains(v)).all(|v| check(s, v) <= 4), "order {order}");
            assert_eq!(parts.len(), (1 << (order - 4)) - 1 + [19, 20, 24].len());
            assert_eq!((s.swapped, s.resident, p.counters().folios.block_cut.load(Relaxed)), (swapped, resident, 1));
            drop_pages(s, FIRST..end);
            assert_eq!((s.pool.used_bytes(), s.swapped, s.resident), (0, 0, 0), "order {order}");
        }
    }

    /// All parts are stored, or none, whichever finds no place.
    #[test]
    fn without_place_for_every_part_it_stays_as_it_is() {
        let p = testing::pager(LIMIT);
        let s = &mut *p.state.lock();
        let handle = testing::store(s, FIRST, 9, COPIES, words);
        let used = s.pool.used_bytes();
        for (seed, rate) in ["pool=1/1", "pool=1/4", "pool=1/16", "pool=1/16"].into_iter().enumerate() {
            p.group.faults.set(rate, seed as u64).unwrap();
            assert_eq!(p.cut(s, Entry { vpn: FIRST, handle }), Err(Refused::NoPlace), "{rate}");
            assert!((FIRST..FIRST + 512).all(|vpn| check(s, vpn) == 9));
            assert_eq!(s.pool.used_bytes(), used, "{rate}: what was put is taken back");
        }
    }

    #[test]
    fn what_is_damaged_or_torn_apart_stays_as_it_is() {
        let p = testing::pager(LIMIT);
        let s = &mut *p.state.lock();
        let e = Entry { vpn: FIRST, handle: testing::store(s, FIRST, 7, 0, words) };
        let at = object::head_bytes(7) + 1000;
        s.object(e.handle)[at] ^= 1;
        assert_eq!(p.cut(s, e), Err(Refused::Compressor));
        s.object(e.handle)[at] ^= 1;
        // mremap takes a page elsewhere.
        let (from, to) = (FIRST + 77, FIRST + 0x1000);
        let pte = s.pt.get(from);
        s.pt.set(from, Pte::NONE);
        s.pt.set(to, pte);
        relocate::moved(s, to, pte);
        assert_eq!(p.cut(s, e), Err(Refused::NoIndex));
        let mut out = vec![0; PAGE << 7];
        assert!(decode(s, s.pt.get(to).handle(), &mut out) && out[77 * PAGE..][..PAGE] == words(from));
    }

    /// A block of which little is wanted is not kept whole: what the program has dropped of it goes.
    #[test]
    fn a_block_that_lost_most_of_its_pages_is_cut() {
        let p = testing::pager(LIMIT);
        let s = &mut *p.state.lock();
        let handle = testing::store(s, FIRST, 9, COPIES, words);
        let used = s.pool.used_bytes();
        drop_pages(s, FIRST + 129..FIRST + 512);
        p.cut_sparse(s);
        assert_eq!(
            (s.pt.get(FIRST + 1).handle(), s.pool.used_bytes()),
            (handle, used),
            "a quarter and a page are left"
        );
        drop_pages(s, FIRST + 128..FIRST + 129);
        p.cut_sparse(s);
        assert!((FIRST..FIRST + 128).all(|vpn| check(s, vpn) <= 4));
        assert!(s.pool.used_bytes() < used / 3, "{} of {used} bytes", s.pool.used_bytes());
        // A block that has gone meanwhile, and another that lies at its place, are not cut.
        let handle = testing::store(s, FIRST + 512, 9, 0, words);
        drop_pages(s, FIRST + 512 + 128..FIRST + 1024);
        assert_eq!(s.sparse.len(), 1);
        drop_pages(s, FIRST + 512..FIRST + 512 + 128);
        assert_eq!(testing::store(s, FIRST + 1024, 9, 0, words), handle, "the same place");
        p.cut_sparse(s);
        assert!((FIRST + 1024..FIRST + 1536).all(|vpn| check(s, vpn) == 9));
        assert_eq!(p.counters().folios.block_cut.load(Relaxed), 1);
    }

    /// A raw block of any size keeps little more than what is wanted of it; it is copied, not compressed.
    #[test]
    fn a_raw_block_that_lost_a_quarter_of_its_pages_is_cut() {
        for order in 2..=4u8 {
            let p = testing::pager(LIMIT);
            let s = &mut *p.state.lock();
            let handle = testing::store(s, FIRST, order, COPIES, noise);
            assert_eq!(Header::read(s.object(handle)).encoding, Encoding::Raw);
            let (used, most) = (s.pool.used_bytes(), FIRST + (3 << (order - 2)));
            drop_pages(s, most + 1..FIRST + (1 << order));
            p.cut_sparse(s);
            assert_eq!(s.pool.used_bytes(), used, "more is left");
            drop_pages(s, most..most + 1);
            p.cut_sparse(s);
            assert!(s.pool.used_bytes() < used * 4 / 5, "{} of {used} bytes, order {order}", s.pool.used_bytes());
            for vpn in FIRST..most {
                let pte = s.pt.get(vpn);
                let handle = pte.copy().unwrap_or_else(|| pte.handle());
                let head = Header::read(s.object(handle));
                let mut out = vec![0; PAGE << head.order];
                assert!(head.encoding == Encoding::Raw && decode(s, handle, &mut out), "page {vpn:x}");
                assert_eq!(out[(vpn - head.vpn) as usize * PAGE..][..PAGE], noise(vpn), "page {vpn:x}");
            }
            drop_pages(s, FIRST..most);
            assert_eq!((s.pool.used_bytes(), s.swapped, s.resident), (0, 0, 0), "order {order}");
            p.cut_sparse(s);
            assert_eq!(p.counters().folios.block_cut.load(Relaxed), 1);
        }
        // A block that compresses is left as it is.
        let p = testing::pager(LIMIT);
        let s = &mut *p.state.lock();
        testing::store(s, FIRST, 4, 0, words);
        drop_pages(s, FIRST + 1..FIRST + 16);
        p.cut_sparse(s);
        assert_eq!(p.counters().folios.block_cut.load(Relaxed), 0);
    }

    /// The story: a sparse block was remembered once, by the place of its object. If the pool was compacted before the block was
    /// cut, or there was no place to cut it, all of its bytes stayed until its last page went.
    #[test]
    fn a_sparse_block_is_cut_though_it_moves_or_there_was_no_place() {
        let p = testing::pager(LIMIT);
        let s = &mut *p.state.lock();
        let (pages, block) = (1u64 << 5, |i: u64| FIRST + (i << 5));
        let handles: Vec<u32> = (0..64).map(|i| testing::store(s, block(i), 5, 0, words)).collect();
        // The blocks between go, so that there is something to compact.
        let kept: Vec<u64> = (0..64).step_by(8).collect();
        (0..64).filter(|i| !kept.contains(i)).for_each(|i| drop_pages(s, block(i)..block(i) + pages));
        s.sparse.clear();
        kept.iter().for_each(|i| drop_pages(s, block(*i) + pages / 4..block(*i) + pages));
        assert_eq!(s.sparse.len(), kept.len());
        while p.compact_pool(s) {}
        assert!(kept.iter().any(|i| s.pt.get(block(*i)).handle() != handles[*i as usize]), "none moved");
        p.group.faults.set("pool=1/1", 1).unwrap();
        p.cut_sparse(s);
        assert_eq!(p.counters().folios.block_cut.load(Relaxed), 0);
        p.group.faults.set("pool=0/1", 1).unwrap();
        kept.iter().for_each(|i| drop_pages(s, block(*i)..block(*i) + 1));
        p.cut_sparse(s);
        assert_eq!(p.counters().folios.block_cut.load(Relaxed), kept.len() as u64);
        assert!(kept.iter().all(|i| (1..pages / 4).all(|page| check(s, block(*i) + page) <= 3)));
    }

    /// Where the pool crowds the program out, blocks of any size that lz4 stored are made dense.
    #[test]
    fn large_blocks_are_recompressed_whole() {
        let p = testing::pager(8 << 20);
        let s = &mut *p.state.lock();
        let mut vpn = FIRST;
        while !p.crowded(s) {
            testing::store(s, vpn, 9, COPIES, words);
            vpn += 512;
        }
        let used = s.pool.used_bytes();
        assert!(p.densify(s, 1));
        assert!(s.pool.used_bytes() < used);
        assert_eq!(p.counters().recompressed_pages.load(Relaxed), 512);
        assert!((FIRST..vpn).all(|vpn| check(s, vpn) == 9));
    }
}

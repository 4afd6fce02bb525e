//! Moves objects within the pool, to compact it.
//!
//! Only page-table entries name an object: those of pages that are out (compressed), and of pages that are in and kept a copy.
//! Its header says where in the program it belongs, and `live` which of its pages still refer to it, so the entries are found
//! from the object. Whoever reads an object holds the pager's lock from the look at the entry to the last byte, and so does
//! whoever moves one: to all readers, copying an object and changing its entries is one step. There is no lock-free protocol for
//! handles, and none is needed: a read takes 2 to 10 µs, and the lock is held that long anyway to serve the fault. But readers
//! must not keep a handle across a release of the lock: it is a place, not a name, and may be another's by then. What does
//! outlive a hold (`decoded`, `left_behind`, `sparse`, entries of pages being compressed) lies in the state and changes with the
//! move. The page map, which is read without the lock, has states and no handles, and a move publishes the state it found.
//! (Modelled with loom below.)
//!
//! Invariant: an object moves only when every live page's entry was found to name it. (After mremap of a part of a unit its pages
//! are apart, and the header can be right for one part only; such an object stays until it dies.)
//!
//! The pool is compacted only under memory pressure, in small steps of reclaim, when a sixteenth of it is waste: that frees
//! memory at a tenth of the price of compressing a page. When there is no such waste, and more than half of the pages of the
//! pool's page blocks are free, the emptiest blocks are emptied in steps as small.

use crate::frames::arena;
use crate::pager::Pager;
use crate::pool::object::{self, Header};
use crate::state::{Decoded, State};
use crate::swap::kept::OnDisk;
use core::sync::atomic::Ordering::*;
use std::collections::BTreeSet;
use uzswap_mm::pageset::PageSet;
use uzswap_mm::pagetable::{PageTable, Pte, Tag};
use uzswap_mm::shrinker;
use uzswap_mm::zone::BLOCK_FRAMES;
use uzswap_mm::zsmalloc::{Compacted, Freed, Handle, Relocate, ZsPool};

/// Objects moved per call: some tens of microseconds under the lock.
const STEP: usize = 64;
/// Calls per look at the page blocks, which looks at each of them.
const LOOK_EVERY: u32 = 16;

/// Whether an entry refers to page `index` of an object whose order is `order`.
fn refers(vpn: u64, pte: Pte, handle: u32, order: u8, index: usize) -> bool {
    let out = pte.tag() == Tag::Compressed && pte.handle() == handle && pte.index() == index;
    out || (pte.copy() == Some(handle) && (vpn & ((1 << order) - 1)) as usize == index)
}

/// Whether every page that refers to an object (`live`) is where the object says.
pub fn is_found(pt: &PageTable, handle: u32, head: &Header, live: &PageSet) -> bool {
    live.iter().all(|i| refers(head.vpn + i as u64, pt.get(head.vpn + i as u64), handle, head.order, i))
}

/// Makes the entries of the pages that refer to an object (`live`) name its new place; `head` is that of the object there.
pub fn repoint(pt: &mut PageTable, head: &Header, live: &PageSet, to: u32) {
    for i in live.iter() {
        let vpn = head.vpn + i as u64;
        let pte = pt.get(vpn);
        let changed =
            if pte.tag() == Tag::Compressed { head.entry(to, i, pte.evicted_at()) } else { pte.with_copy(to) };
        pt.set(vpn, changed);
    }
}

/// A compressed page is at `vpn` now, with its entry unchanged: makes its object be found there, and no longer by a thread that
/// looks for it where it was.
pub fn moved(s: &State, vpn: u64, pte: Pte) {
    let object = s.object(pte.handle());
    let mut head = Header::read(object);
    head.vpn = vpn.wrapping_sub(pte.index() as u64);
    // A thread that writes or recompresses the object would not find it again where it was, to take the mark off. Without a mark,
    // or not found, the object counts as gone to that thread.
    head.flags &= !object::HELD;
    head.write(object);
}

/// The parts of the state that a move changes, besides the pool itself.
struct Mover<'a> {
    pool: usize,
    pt: &'a mut PageTable,
    decoded: &'a mut [Decoded],
    left_behind: &'a mut BTreeSet<u32>,
    sparse: &'a mut [shrinker::Entry],
    /// The new places of moved objects, by their first page.
    moved: Vec<(u64, u32)>,
}

impl Relocate for Mover<'_> {
    fn relocate(&mut self, from: Handle, to: Handle, len: usize) -> bool {
        let (src, dst) = ((self.pool + from.offset()) as *const u8, (self.pool + to.offset()) as *mut u8);
        // SAFETY: both are objects of the pool, which the pager's lock protects (the page table is borrowed from it); the pool
        // says that they are `len` bytes long and apart.
        let (src, dst) = unsafe { (core::slice::from_raw_parts(src, len), core::slice::from_raw_parts_mut(dst, len)) };
        let (head, live) = (Header::read(src), object::live(src));
        // An object that is being written or recompressed must be found again by its place.
        if head.flags & object::HELD != 0 || !is_found(self.pt, from.raw(), &head, &live) {
            return false;
        }
        let behind = if head.flags & object::ON_DISK != 0 { OnDisk::BYTES } else { 0 };
        let used = object::head_bytes(head.order) + head.len + behind;
        dst[..used].copy_from_slice(&src[..used]);
        repoint(self.pt, &head, &live, to.raw());
        self.moved.push((head.vpn, to.raw()));
        for d in self.decoded.iter_mut().filter(|d| d.handle == Some(from.raw())) {
            d.handle = Some(to.raw());
        }
        if self.left_behind.remove(&from.raw()) {
            self.left_behind.insert(to.raw());
        }
        self.sparse.iter_mut().filter(|e| e.handle == from.raw()).for_each(|e| e.handle = to.raw());
        true
    }

    fn freed(&mut self, pages: Freed) {
        // SAFETY: the pool says that the range holds no object any more.
        unsafe { arena::discard(self.pool + pages.offset, pages.len) };
    }
}

impl Pager {
    /// Compacts the pool a little when a sixteenth of it is waste, or else empties page blocks; true when compaction freed
    /// memory.
    pub fn compact_pool(&self, s: &mut State) -> bool {
        let (held, used) = (s.pool.held_bytes(), s.pool.used_bytes());
        // Waste that could not be freed (or was not worth it) is not looked at again until as much has come on top.
        if held - used < held / 16 + s.pool_rest {
            self.empty_page_blocks(s);
            return false;
        }
        let done = relocate(s, |pool, mover| pool.compact(STEP, mover));
        self.counters().pages_compacted.fetch_add((done.freed / arena::PAGE) as u64, Relaxed);
        let (held, used) = (s.pool.held_bytes(), s.pool.used_bytes());
        s.pool_rest = if done.moved < STEP { (held - used).saturating_sub(held / 16) + held / 64 } else { 0 };
        done.freed > 0
    }

    /// Empties the emptiest page blocks of the pool a little, where more than half of the pages in its blocks are free.
    fn empty_page_blocks(&self, s: &mut State) {
        s.pool_looks = s.pool_looks.wrapping_add(1);
        if !s.pool_looks.is_multiple_of(LOOK_EVERY) || !s.pool.may_be_sparse() {
            return;
        }
        let (blocks, free) = s.pool.page_blocks();
        let pages = blocks * BLOCK_FRAMES as usize;
        if blocks < 2 || free * 2 <= pages || free.abs_diff(s.pool_stuck) < pages / 16 {
            return;
        }
        let done = relocate(s, |pool, mover| pool.evacuate(STEP, mover));
        self.counters().pool_blocks_freed.fetch_add(done.blocks as u64, Relaxed);
        // If nothing moved, or something will not move, the next look would find the same.
        s.pool_stuck = if done.moved < STEP { s.pool.page_blocks().1 } else { usize::MAX / 2 };
    }
}

/// Moves objects of the pool, and updates what names them.
fn relocate(s: &mut State, act: impl FnOnce(&mut ZsPool, &mut Mover) -> Compacted) -> Compacted {
    let held = s.pool.held_bytes();
    let State { pool, pt, decoded, left_behind, sparse, layout, .. } = s;
    let mut mover = Mover { pool: layout.pool, pt, decoded, left_behind, sparse, moved: Vec::with_capacity(STEP) };
    let done = act(pool, &mut mover);
    let moved = mover.moved;
    // The shrinker's entries name objects by their place.
    moved.into_iter().for_each(|(vpn, handle)| s.entered_pool(vpn, handle));
    s.rss = (s.rss + s.pool.held_bytes()).saturating_sub(held);
    done
}

/// Readers and movers in every order of their steps (loom), over the engine's own tables and pool.
///
/// loom's mutex stands in for the pager's lock, which has a model of its own (`uzswap_sys::lock`). The models show that this lock
/// is all a reader needs: a thread that looks at the entry and reads to the last byte under one hold finds its page, whatever
/// moves and frees before, between and after; and that no less would do.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::deliver::decode;
    use crate::testing;
    use arena::PAGE;
    use loom::sync::{Arc, Mutex};
    use loom::thread;
    use uzswap_mm::codec::{Algorithm, Encoding};
    use uzswap_mm::compaction::rule::Rule;

    // Boxed, as loom's threads have small stacks.
    type Shared = Arc<Mutex<Box<State>>>;

    fn content(vpn: u64) -> [u8; PAGE] {
        core::array::from_fn(|i| (i as u64 * 31 + vpn * 7919) as u8)
    }

    /// Stores a page raw, as one that has left the program or as one that is in it and kept its copy.
    fn put(s: &mut State, vpn: u64, copy: bool) {
        let page = content(vpn);
        let head = Header { len: PAGE, encoding: Encoding::Raw, order: 0, vpn, flags: 0 };
        let handle =
            s.put_object(head, PageSet::first(1), |place| object::set_hash(place, 0, object::hash(&page)), &page);
        let handle = handle.expect("room");
        let pte = Pte::new(Tag::Resident, 0).with_copy(handle.raw());
        s.pt.set(vpn, if copy { pte } else { Pte::compressed(handle.raw(), 0, 0) });
    }

    fn handle_of(s: &State, vpn: u64) -> u32 {
        let pte = s.pt.get(vpn);
        pte.copy().unwrap_or_else(|| pte.handle())
    }

    fn free(s: &mut State, vpn: u64) {
        s.release(handle_of(s, vpn), 0);
        s.pt.set(vpn, Pte::NONE);
    }

    /// Reads a page as a fault does if it is out, or as eviction does with a kept copy; returns whether it finds the page.
    fn read(s: &mut State, vpn: u64) -> bool {
        let (handle, mut out) = (handle_of(s, vpn), [0; PAGE]);
        let followed = s.decoded.iter().all(|d| d.vpn != vpn || d.handle == Some(handle));
        let followed = followed && (vpn == 1000 || s.left_behind.contains(&handle));
        decode(s, handle, &mut out) && out == content(vpn) && followed
    }

    /// A pool of two slabs with one object left in each, of many: one is to be drained into the other. Returns the two pages as
    /// well.
    fn sparse(pager: &Pager) -> (Box<State>, u64, u64) {
        let mut s = Box::new(State::new(pager.layout, Algorithm::Lz4, Rule::default()));
        let (mut n, mut slabs) = (0, Vec::new());
        while slabs.len() < 3 {
            n += 1;
            put(&mut s, n, false);
            let slab = s.pool.slab_of(Handle::from_raw(handle_of(&s, n))).offset;
            if slabs.last() != Some(&slab) {
                slabs.push(slab);
            }
        }
        // The third slab goes again with its only object.
        let (first, second) = (1, n - 1);
        (2..n - 1).chain([n]).for_each(|vpn| free(&mut s, vpn));
        let held = s.pool.held_bytes();
        assert_eq!(s.pool.slab_of(Handle::from_raw(handle_of(&s, first))).len * 2, held);
        for vpn in [first, second] {
            s.decoded.push(Decoded {
                handle: Some(handle_of(&s, vpn)),
                bytes: Vec::new(),
                pages: 0,
                vpn,
                fresh: false,
            });
            s.left_behind.insert(handle_of(&s, vpn));
        }
        (s, first, second)
    }

    /// What happened in all orders together. (A panic inside loom's model may hang it.)
    #[derive(Clone, Default)]
    struct Seen(std::sync::Arc<[std::sync::atomic::AtomicUsize; 3]>);

    const ORDERS: usize = 0;
    const WRONG: usize = 1;
    const MOVED: usize = 2;

    impl Seen {
        fn add(&self, what: usize, n: bool) {
            self.0[what].fetch_add(usize::from(n), Relaxed);
        }

        fn get(&self, what: usize) -> usize {
            self.0[what].load(Relaxed)
        }
    }

    /// Runs a model in every order in which a thread is interrupted three times at most.
    fn check(model: impl Fn(&Seen) + Sync + Send + 'static) -> Seen {
        let seen = Seen::default();
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        let counts = seen.clone();
        builder.check(move || {
            counts.add(ORDERS, true);
            model(&counts);
        });
        println!("{} orders, {} moves, {} wrong", seen.get(ORDERS), seen.get(MOVED), seen.get(WRONG));
        seen
    }

    #[test]
    fn who_looks_and_reads_under_one_hold_finds_its_page() {
        let pager = testing::pager(16 << 20);
        let seen = check(move |seen| {
            let (mut s, first, second) = sparse(pager);
            // One of the two is in the program and kept its copy.
            let handle = handle_of(&s, second);
            s.pt.set(second, Pte::new(Tag::Resident, 0).with_copy(handle));
            let state: Shared = Arc::new(Mutex::new(s));
            let (mover, writer, counts) = (state.clone(), state.clone(), seen.clone());
            let mover = thread::spawn(move || {
                let moved = pager.compact_pool(&mut mover.lock().unwrap());
                counts.add(MOVED, moved);
            });
            let writer = thread::spawn(move || {
                // Another page leaves, and takes whatever place is free by now; then a page goes.
                put(&mut writer.lock().unwrap(), 1000, false);
                free(&mut writer.lock().unwrap(), second);
            });
            for _ in 0..3 {
                let mut s = state.lock().unwrap();
                let right = read(&mut s, first) && (s.pt.get(second) == Pte::NONE || read(&mut s, second));
                seen.add(WRONG, !right);
            }
            mover.join().unwrap();
            writer.join().unwrap();
            let mut s = state.lock().unwrap();
            let right = read(&mut s, first) && read(&mut s, 1000);
            seen.add(WRONG, !right);
        });
        assert_eq!(seen.get(WRONG), 0);
        assert!(seen.get(MOVED) > 0, "nothing was ever moved: the test shows nothing");
    }

    /// A handle is a place, not a name: a thread that keeps it across a release of the lock reads whatever lies there by then. No
    /// code does that; this shows that the model above has the orders in which it would matter.
    #[test]
    fn a_handle_kept_over_the_lock_is_stale() {
        let pager = testing::pager(16 << 20);
        let seen = check(move |seen| {
            let (s, first, second) = sparse(pager);
            let state: Shared = Arc::new(Mutex::new(s));
            let mover = state.clone();
            let mover = thread::spawn(move || {
                pager.compact_pool(&mut mover.lock().unwrap());
            });
            let (page, handle) = {
                let s = state.lock().unwrap();
                // Of the two objects, the one that compaction will move.
                let page = if handle_of(&s, first) > handle_of(&s, second) { first } else { second };
                (page, handle_of(&s, page))
            };
            let same = {
                let mut s = state.lock().unwrap();
                let mut out = [0; PAGE];
                decode(&mut s, handle, &mut out) && out == content(page)
            };
            seen.add(WRONG, !same);
            mover.join().unwrap();
        });
        assert!(seen.get(WRONG) > 0, "a kept handle was never stale: the model has no order that matters");
    }
}

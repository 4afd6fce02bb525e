//! Compresses the units of a batch, in as many threads as have a CPU to spare.
//!
//! Reclaim spends most of its time here, and units do not depend on each other. Where one thread of the program faults, it and
//! the thread that serves it take its CPU, and the others may be idle: helper threads there take units too (`uzswap_sys::crew`).
//! They touch only the frames of Busy pages and the batch's buffers, and change no mapping, so the program's CPU need not
//! interrupt theirs. (Such interrupts are what makes a second thread of the pager expensive elsewhere.)
//!
//! Waking a helper costs some microseconds here, and some tens until it runs, so only a batch of many pages is shared. If the
//! leader waited for a helper longer than it had worked itself (somebody else wanted the helper's CPU), the next batches are not
//! shared.
//!
//! Lock order: the batch's leader holds the crew, then the lock of the helpers' tools, which nobody else asks for. Tools are made
//! with the pager's lock held, like everything that allocates.

use crate::frames::arena::PAGE;
use crate::group::folio::USUAL_UNIT;
use crate::inject::Site;
use crate::pager::Pager;
use crate::pool::batch::{Batch, Outcome, Unit};
use crate::pool::object;
use crate::state::State;
use crate::ticker;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering::*};
use uzswap_mm::codec::{Algorithm, Compressor, Decompressor, Encoding};
use uzswap_sys::crew::Crew;
use uzswap_sys::lock::Lock;
use uzswap_sys::thread;

/// From this many pages on a batch is shared: lz4 takes 100 µs for them.
pub(crate) const SHARE_FROM: usize = 16;
/// How much of a member's share of the limit (bytes) there must be for each helper: what one needs takes up to 0.4 MiB, and where
/// there are many members the other CPUs have enough to do.
const SHARE_OF_HELPER: usize = 16 << 20;
/// How many batches are not shared after one whose leader waited long.
pub(crate) const REST: u32 = 64;
/// The number of the first helper's stack: those before it belong to the pager's other threads.
const FIRST_STACK: usize = 4;
/// How many helpers there are at most.
pub const HELPERS_MOST: usize = 3;

/// What one thread compresses and decompresses with (`decompress`).
pub struct Tools {
    /// The configured compressor.
    pub warm: Compressor,
    /// zstd, made when the pool first grows large.
    pub dense: Option<Compressor>,
    /// For decompressing.
    pub(crate) decompressor: Decompressor,
    /// The order of the largest units that the tools take.
    largest: u8,
}

impl Tools {
    /// Tools with the configured compressor.
    pub fn new(warm: Compressor) -> Self {
        Self { warm, dense: None, decompressor: Decompressor::new(), largest: USUAL_UNIT }
    }

    /// The dense compressor, made now if it is not there.
    pub fn dense(&mut self) -> &mut Compressor {
        let source_max = PAGE << self.largest;
        self.dense.get_or_insert_with(|| Compressor::with_source_max(Algorithm::Zstd(1), source_max))
    }

    /// Makes the tools take units of an order.
    pub fn reserve(&mut self, order: u8) {
        self.largest = self.largest.max(order);
        self.warm.reserve(PAGE << order);
        self.dense.iter_mut().for_each(|dense| dense.reserve(PAGE << order));
    }

    fn wanted(&mut self, dense: bool) -> &mut Compressor {
        match &mut self.dense {
            Some(compressor) if dense => compressor,
            _ => &mut self.warm,
        }
    }
}

/// The helper threads that compress, and what they need.
pub struct CompressHelpers {
    /// The helpers and their leader.
    pub crew: Crew,
    /// The helpers' tools.
    pub(crate) tools: Lock<Vec<Tools>>,
    /// Their thread ids: 0 where there is none, -1 in the first when none could be started.
    tids: [AtomicI32; HELPERS_MOST],
    /// Whether the ticker is to start them.
    wanted: AtomicBool,
    /// How many more batches are compressed, and runs decompressed, by one thread alone.
    pub(crate) rest: AtomicU32,
}

impl CompressHelpers {
    /// None yet.
    pub(crate) fn new() -> Self {
        Self {
            crew: Crew::new(),
            tools: Lock::new(Vec::new()),
            tids: Default::default(),
            wanted: AtomicBool::new(false),
            rest: AtomicU32::new(0),
        }
    }
}

/// The order of the largest units, of folios of up to `folio_max`, that can be afforded under a limit (bytes). zstd's workspace
/// grows with them, to tens of megabytes at high levels, and each thread that compresses has one. So it may be at most a 64th of
/// the limit, or twice what the usual units take.
pub(crate) fn largest_unit(algorithm: Algorithm, folio_max: u8, limit: usize) -> u8 {
    let takes = |order: u8| Compressor::workspace_bytes(algorithm, PAGE << order);
    let most = (limit / 64).max(2 * takes(USUAL_UNIT));
    (USUAL_UNIT..=folio_max).rev().find(|order| takes(*order) <= most).unwrap_or(USUAL_UNIT)
}

impl Pager {
    /// Decides whether helpers take part in compressing a prepared batch, and makes sure that they can.
    pub(crate) fn call_helpers(&self, s: &mut State, batch: &mut Batch) {
        let many = batch.pages() >= SHARE_FROM && batch.units.len() > 1;
        if !many || batch.verifier.is_some() || !s.placement.alone() || !self.lead_helpers(s) {
            return;
        }
        let mut tools = self.helpers.tools.lock();
        if batch.largest > USUAL_UNIT {
            tools.iter_mut().for_each(|t| t.reserve(batch.largest));
        }
        if batch.use_dense {
            tools.iter_mut().for_each(|t| {
                t.dense();
            });
        }
        batch.shared = true;
    }

    /// Makes the caller the helpers' leader, if there are helpers and sharing is worth while; each has tools then.
    pub(crate) fn lead_helpers(&self, s: &State) -> bool {
        if self.helpers_wanted(s) == 0 {
            return false;
        }
        if self.helpers.rest.load(Relaxed) > 0 {
            self.helpers.rest.fetch_sub(1, Relaxed);
            return false;
        }
        if !self.helpers.crew.lead() {
            return false;
        }
        self.helpers.wanted.store(true, Relaxed);
        let mut tools = self.helpers.tools.lock();
        while tools.len() < HELPERS_MOST.min(self.helpers.crew.helpers()) {
            tools.push(Tools::new(s.new_compressor()));
        }
        if tools.is_empty() {
            self.helpers.crew.step_down();
        }
        !tools.is_empty()
    }

    /// How many helpers there should be.
    pub(crate) fn helpers_wanted(&self, s: &State) -> usize {
        s.placement.spare_cpus().min(HELPERS_MOST).min(self.share() / SHARE_OF_HELPER)
    }

    /// The body of a region's helper `i`, until the region ends.
    pub(crate) fn help(&self, i: usize) {
        self.helpers.tids[i].store(thread::gettid(), Relaxed);
        self.helpers.crew.help();
    }

    /// Starts a process's helpers, once, after its first batch. (A region has them from its start.) Called by the ticker, as
    /// threads inherit their creator's policy.
    ///
    /// The story: the handler started them, so they had its idle policy. On a busy machine they held up batches, and the end of the
    /// process.
    pub(crate) fn start_wanted_helpers(&self, s: &State) {
        if !self.helpers.wanted.load(Relaxed) || self.own_frames || self.helpers.tids[0].load(Relaxed) != 0 {
            return;
        }
        self.helpers.tids[0].store(-1, Relaxed);
        for (i, slot) in self.helpers.tids.iter().enumerate().take(self.helpers_wanted(s)) {
            let Ok(tid) = self.spawn_on(FIRST_STACK + i, false, run_helper) else { break };
            slot.store(tid, Relaxed);
            s.placement.keep_off(tid);
        }
    }

    /// The helpers' thread ids.
    pub(crate) fn crew_tids(&self) -> [i32; HELPERS_MOST] {
        self.helpers.tids.each_ref().map(|tid| tid.load(Relaxed))
    }

    /// Starts over in a forked child: there are no helpers, and what they had may be half written.
    pub(crate) fn forget_helpers(&self) {
        self.helpers.crew.reset();
        self.helpers.tids.iter().for_each(|tid| tid.store(0, Relaxed));
        // SAFETY: no other thread of this process runs. (The lock may have been held by one that is not here.)
        unsafe {
            core::mem::forget(core::mem::take(self.helpers.tools.assume_locked()));
            self.helpers.tools.force_unlock();
        }
    }
}

extern "C" fn run_helper(pager: usize) -> ! {
    ticker::pager(pager).helpers.crew.help();
    thread::exit()
}

impl Batch {
    /// Compresses every unit; needs no lock.
    pub fn compress(&mut self, pager: &Pager) {
        if self.shared {
            self.post(pager);
            self.finish(pager);
        } else {
            self.compress_alone(pager);
        }
    }

    /// Whether helpers are at work on it: then `finish` must come before anything else.
    pub(crate) fn is_posted(&self) -> bool {
        self.posted.is_some()
    }

    fn compress_alone(&mut self, pager: &Pager) {
        let verify = pager.group.folios.verify.load(Relaxed) != 0;
        // Outputs lie side by side, so that less memory is touched than was compressed.
        let mut out_at = 0;
        for u in &mut self.units {
            let pages = 1usize << u.order;
            // SAFETY: Busy pages' frames neither move nor change until commit.
            let bytes = unsafe { pager.layout.frames(u.slot, pages) };
            let out = &mut self.out[out_at..][..bytes.len()];
            let compressor = self.tools.wanted(self.use_dense);
            u.outcome = pack(pager, bytes, &mut self.hashes[u.page_at..][..pages], out, compressor);
            let Outcome::Packed { encoding, len } = u.outcome else { continue };
            u.out_at = out_at;
            out_at += len;
            if let Some((decompressor, plain)) = self.verifier.as_mut().filter(|_| verify) {
                let plain = &mut plain[..bytes.len()];
                if decompressor.decompress(encoding, &out[..len], plain).is_err() || plain != bytes {
                    u.outcome = Outcome::Wrong;
                }
            }
        }
    }

    /// Has the helpers begin with a shared batch. Each unit's output lies where its pages would.
    pub(crate) fn post(&mut self, pager: &Pager) {
        self.shared = false;
        // The lock is held until the batch is finished, by whatever thread.
        core::mem::forget(pager.helpers.tools.lock());
        // SAFETY: the lock is held, and helpers use the tools only while the job is posted, each its own.
        let tools = unsafe { pager.helpers.tools.assume_locked() };
        let pages = self.pages();
        assert!(self.out.len() >= pages * PAGE && self.hashes.len() >= pages, "prepare made room");
        let parts = Parts {
            pager,
            units: self.units.as_mut_ptr(),
            out: self.out.as_mut_ptr(),
            hashes: self.hashes.as_mut_ptr(),
            own: &raw mut self.tools,
            others: tools.as_mut_ptr(),
            dense: self.use_dense,
        };
        // SAFETY: the crew gives each unit to one worker, and each worker its own number; the batch stays where it is, and as it
        // is, until it is finished.
        let work = move |worker, i| unsafe { parts.pack(worker, i) };
        self.posted = Some(pager.helpers.crew.post(self.units.len(), tools.len(), Box::new(work)));
    }

    /// Compresses what helpers have left of a posted batch, and waits for them.
    pub(crate) fn finish(&mut self, pager: &Pager) {
        let Some(posted) = self.posted.take() else { return };
        let late = pager.helpers.crew.finish(posted);
        // SAFETY: `post` took the lock, and forgot its guard.
        unsafe { pager.helpers.tools.force_unlock() };
        pager.helpers.crew.step_down();
        if late {
            pager.helpers.rest.store(REST, Relaxed);
        }
    }
}

/// A batch as its workers see it.
#[derive(Clone, Copy)]
struct Parts {
    pager: *const Pager,
    units: *mut Unit,
    out: *mut u8,
    hashes: *mut u128,
    own: *mut Tools,
    others: *mut Tools,
    dense: bool,
}
// SAFETY: workers use different elements: see `pack`.
unsafe impl Sync for Parts {}
// SAFETY: as above.
unsafe impl Send for Parts {}

impl Parts {
    /// Compresses unit `i`.
    ///
    /// # Safety
    /// No other worker may have this unit or this worker's number. The pointers must be to a whole batch: units, tools of all
    /// helpers, room for the pages of all units and for their hashes.
    unsafe fn pack(&self, worker: usize, i: usize) {
        // SAFETY: the unit and the tools are this worker's alone. A unit's pages, and so its bytes of output and its
        // hashes, are no other unit's. Busy pages' frames neither move nor change until commit.
        unsafe {
            let pager = &*self.pager;
            let u = &mut *self.units.add(i);
            let tools = &mut *if worker == 0 { self.own } else { self.others.add(worker - 1) };
            let pages = 1usize << u.order;
            let bytes = pager.layout.frames(u.slot, pages);
            let hashes = core::slice::from_raw_parts_mut(self.hashes.add(u.page_at), pages);
            let out = core::slice::from_raw_parts_mut(self.out.add(u.page_at * PAGE), pages * PAGE);
            u.out_at = u.page_at * PAGE;
            u.outcome = pack(pager, bytes, hashes, out, tools.wanted(self.dense));
        }
    }
}

/// Compresses pages to `out`, which is as long as they are, and stores their hashes.
fn pack(pager: &Pager, bytes: &[u8], hashes: &mut [u128], out: &mut [u8], compressor: &mut Compressor) -> Outcome {
    hashes.iter_mut().zip(bytes.chunks(PAGE)).for_each(|(h, page)| *h = object::hash(page));
    if bytes.chunks(PAGE).all(object::is_zero) {
        return Outcome::Zero;
    }
    let (encoding, len) = compressor.compress(bytes, &mut out[..bytes.len() - bytes.len() / 16]).unwrap_or_else(|| {
        out.copy_from_slice(bytes);
        (Encoding::Raw, bytes.len())
    });
    if let Some(bits) = pager.inject(Site::Compress) {
        // As an unreliable codec does.
        out[(bits >> 8) as usize % len] ^= 1 << (bits % 8);
    }
    Outcome::Packed { encoding, len }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::events::forget_range;
    use crate::fault::deliver::decode;
    use crate::fault::placement::Helpers;
    use crate::state::BLOCK_PAGES;
    use crate::testing;
    use uzswap_mm::lru::List;
    use uzswap_mm::pagetable::Tag;

    const N: usize = 2048;

    /// Numbers that compress, different on each page.
    fn content(page: usize, round: usize) -> [u8; PAGE] {
        let mut bytes = [0; PAGE];
        for (i, word) in bytes.chunks_mut(4).enumerate() {
            word.copy_from_slice(&((page * 7919 + round * 31 + i / 3) as u32).to_le_bytes());
        }
        bytes
    }

    /// `N` resident pages with their contents; the number of the first.
    fn resident(p: &Pager, s: &mut State, round: usize) -> u64 {
        let at = testing::memory(p, N);
        (0..N).for_each(|page| testing::put(p, at + page * PAGE, &content(page, round)));
        s.list_resident((at / PAGE) as u64, N, List::Inactive, |_| None);
        (at / PAGE) as u64
    }

    /// One thread faults on one CPU: the others are free.
    fn one_faults(s: &mut State) {
        (0..8).for_each(|_| s.placement.fault_on(0, 1, Helpers::default(), false));
    }

    /// Whether a page is stored with these contents.
    fn is_stored(s: &mut State, vpn: u64, content: &[u8; PAGE]) -> bool {
        let pte = s.pt.get(vpn);
        assert_eq!(pte.tag(), Tag::Compressed);
        let mut plain = vec![0; PAGE << object::order(s.object(pte.handle()))];
        decode(s, pte.handle(), &mut plain) && plain[pte.index() * PAGE..][..PAGE] == *content
    }

    /// Pages compressed with helpers come back bit for bit: with lz4, and with zstd, as where the pool crowds the program out.
    #[test]
    fn what_helpers_compressed_is_right() {
        testing::with_helper(|p, s| {
            let mut batch = Batch::new(s.new_compressor());
            let mut shared = 0;
            for round in 0..4 {
                let first = resident(p, s, round);
                while s.resident + s.staged > 0 {
                    one_faults(s);
                    assert!(p.stage(s, 64).is_ok());
                    p.prepare(s, &mut batch, 64, 0);
                    batch.use_dense |= round % 2 == 1;
                    batch.tools.dense();
                    shared += usize::from(batch.shared);
                    batch.compress(p);
                    p.commit(s, &mut batch);
                }
                for page in 0..N {
                    assert!(is_stored(s, first + page as u64, &content(page, round)), "round {round}, page {page}");
                }
            }
            println!("{shared} batches were shared");
            assert!(shared > 0);
        });
    }

    /// A round of reclaim leaves its pages to helpers, and the next one stores them; pages that the program drops meanwhile are
    /// not stored.
    #[test]
    fn what_was_posted_is_stored_later() {
        testing::with_helper(|p, s| {
            let first = resident(p, s, 0);
            let all = first..first + N as u64;
            let (mut posted, mut dropped) = (0, Vec::new());
            while s.resident + s.idle_staged() > 0 {
                one_faults(s);
                // On a busy machine a helper may be late, and gets a rest for it: then none would be asked after the first round.
                p.helpers.rest.store(0, Relaxed);
                assert!(p.direct_round(s, 64, 0, Some(BLOCK_PAGES + 1)).1.is_ok());
                if s.direct.as_ref().is_some_and(|batch| batch.is_posted()) {
                    posted += 1;
                    let busy = all.clone().find(|vpn| s.pt.get(*vpn).tag() == Tag::Busy).expect("posted");
                    forget_range(s, busy, busy + 1);
                    dropped.push(busy);
                }
            }
            println!("{posted} batches were posted");
            assert!(posted > 0);
            p.store_posted(s);
            assert_eq!((s.busy, s.staged, s.swapped), (0, 0, N - dropped.len()));
            for (page, vpn) in all.enumerate() {
                if dropped.contains(&vpn) {
                    assert_eq!(s.pt.get(vpn).tag(), Tag::None, "page {page}");
                } else {
                    assert!(is_stored(s, vpn, &content(page, 0)), "page {page}");
                }
            }
        });
    }

    #[test]
    fn large_units_must_be_affordable() {
        const GIB: usize = 1 << 30;
        assert_eq!(largest_unit(Algorithm::Lz4, 9, 64 << 20), 9);
        assert_eq!(largest_unit(Algorithm::Zstd(1), 9, 128 << 20), 9);
        let high = [128 << 20, GIB, 16 * GIB].map(|limit| largest_unit(Algorithm::Zstd(19), 9, limit));
        println!("zstd:19: {high:?}");
        assert!(high[0] < 9 && high.is_sorted() && high[2] == 9, "{high:?}");
    }

    /// While one thread leads, others compress alone; and after a fork, which may come while one leads, all do.
    #[test]
    fn one_leads_and_after_a_fork_nobody_helps() {
        let p = testing::pager(128 << 20);
        assert!(p.helpers.crew.lead() && !p.helpers.crew.lead());
        let tools = p.helpers.tools.lock();
        core::mem::forget(tools);
        p.helpers.tids[0].store(7, Relaxed);
        p.forget_helpers();
        assert_eq!((p.helpers.crew.helpers(), p.crew_tids()), (0, [0; HELPERS_MOST]));
        assert!(p.helpers.tools.lock().is_empty() && p.helpers.crew.lead());
    }
}

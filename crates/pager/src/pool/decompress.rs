//! Decompresses the blocks of a run in as many threads as have a CPU to spare.
//!
//! A sequential fault brings up to 512 KiB; decompressing and checking is most of the work, and blocks do not depend on each
//! other. So where many blocks come, the helpers that compress (`compress`) take some. The leader begins with the first, and
//! waits only for blocks that a helper has begun.
//!
//! Invariants: the pager's lock is held from first to last, so no object moves or goes meanwhile; a block's pages in the buffer
//! are its worker's alone; the buffer is frames that nobody else has, so what a helper leaves of a damaged block is seen by
//! nobody. Lock order: as in `compress`.

use crate::frames::arena::PAGE;
use crate::pager::Pager;
use crate::pool::compress::{REST, SHARE_FROM, Tools};
use crate::pool::object::{self, Header};
use crate::state::State;
use core::sync::atomic::{AtomicBool, Ordering::*};
use uzswap_mm::codec::Decompressor;
use uzswap_mm::pagetable::Tag;

/// From this many pages on helpers take part in a run: lz4 takes some 100 µs for them.
const SHARE_RUNS_FROM: usize = 64;

/// A block of a run that comes whole. Valid only while the lock is held: see [`State::object`].
pub(crate) struct Block {
    /// Its first page in the run.
    at: usize,
    pub(crate) handle: u32,
    pub(crate) pages: usize,
    object: &'static [u8],
}

/// The block that begins at page `i` of a run of `n` pages from `vpn` on, if all of it is in the run, in order, and out.
pub(crate) fn whole_block(s: &State, vpn: u64, i: usize, n: usize) -> Option<Block> {
    let pte = s.pt.get(vpn + i as u64);
    if pte.tag() != Tag::Compressed || pte.index() != 0 {
        return None;
    }
    let handle = pte.handle();
    let object = s.object(handle);
    let pages = 1usize << object::order(object);
    let follows = |k: usize| {
        let p = s.pt.get(vpn + (i + k) as u64);
        p.tag() == Tag::Compressed && p.handle() == handle && p.index() == k
    };
    (i + pages <= n && (1..pages).all(follows)).then_some(Block { at: i, handle, pages, object })
}

impl Pager {
    /// Decompresses the whole blocks in the run from `vpn` on, together with helpers where that is worth while. Returns the first
    /// pages of those that are right.
    pub(crate) fn read_shared(&self, s: &mut State, vpn: u64, buffer: &mut [u8]) -> Vec<usize> {
        let n = buffer.len() / PAGE;
        // New memory costs a look in three places only.
        let is_out = |i: usize| s.pt.get(vpn + i as u64).tag() == Tag::Compressed;
        if n < SHARE_RUNS_FROM || s.placement.is_scattered() || ![0, n / 2, n - 1].into_iter().any(is_out) {
            return Vec::new();
        }
        let (mut blocks, mut i) = (Vec::new(), 0);
        while i < n {
            let block = whole_block(s, vpn, i, n);
            i += block.as_ref().map_or(1, |b| b.pages);
            blocks.extend(block);
        }
        let pages: usize = blocks.iter().map(|b| b.pages).sum();
        if pages < SHARE_FROM || blocks.len() < 2 || !self.lead_helpers(s) {
            return Vec::new();
        }
        let read = self.read_together(s, &blocks, buffer);
        self.helpers.crew.step_down();
        read
    }

    /// Decompresses these blocks, as the helpers' leader.
    fn read_together(&self, s: &mut State, blocks: &[Block], buffer: &mut [u8]) -> Vec<usize> {
        let mut tools = self.helpers.tools.lock();
        for block in blocks {
            // Helpers must not allocate.
            let encoding = Header::read(block.object).encoding;
            tools.iter_mut().for_each(|tools| tools.decompressor.prepare(encoding));
        }
        let right: Vec<AtomicBool> = blocks.iter().map(|_| AtomicBool::new(false)).collect();
        let parts = Parts {
            blocks: blocks.as_ptr(),
            buffer: buffer.as_mut_ptr(),
            own: &raw mut s.decompressor,
            others: tools.as_mut_ptr(),
            right: right.as_ptr(),
        };
        // SAFETY: the crew gives each block to one worker, and each worker its own number. All that is pointed to stays until
        // `finish`, and the lock is held.
        let work = move |worker, i| unsafe { parts.read(worker, i) };
        let crew = &self.helpers.crew;
        if crew.finish(crew.post(blocks.len(), tools.len(), Box::new(work))) {
            self.helpers.rest.store(REST, Relaxed);
        }
        let right = blocks.iter().zip(&right).filter(|(_, right)| right.load(Relaxed));
        right.map(|(block, _)| block.at).collect()
    }
}

/// A run as its workers see it.
#[derive(Clone, Copy)]
struct Parts {
    blocks: *const Block,
    buffer: *mut u8,
    own: *mut Decompressor,
    others: *mut Tools,
    right: *const AtomicBool,
}
// SAFETY: workers use different elements: see `read`.
unsafe impl Sync for Parts {}
// SAFETY: as above.
unsafe impl Send for Parts {}

impl Parts {
    /// Decompresses block `i` into its pages, and notes whether all of them are what was stored.
    ///
    /// # Safety
    /// No other worker may have this block or this worker's number. The poster must hold the pager's lock, and all that is
    /// pointed to must be there: a mark for each block, room for its pages, a decompressor for each worker.
    unsafe fn read(&self, worker: usize, i: usize) {
        // SAFETY: the decompressor and the block's pages are this worker's alone. Objects are only read, and stay as they are.
        unsafe {
            let block = &*self.blocks.add(i);
            let decompressor =
                if worker == 0 { &mut *self.own } else { &mut (*self.others.add(worker - 1)).decompressor };
            let out = core::slice::from_raw_parts_mut(self.buffer.add(block.at * PAGE), block.pages * PAGE);
            (*self.right.add(i)).store(decode_object(decompressor, block.object, out), Relaxed);
        }
    }
}

/// Decompresses an object into `out`, and checks each page against its hash.
pub(crate) fn decode_object(decompressor: &mut Decompressor, object: &[u8], out: &mut [u8]) -> bool {
    let head = Header::read(object);
    let body = &object[object::head_bytes(head.order)..];
    decompressor.decompress(head.encoding, &body[..head.len], out).is_ok()
        && out.chunks(PAGE).enumerate().all(|(i, page)| object::hash(page) == object::stored_hash(object, i))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::events::forget_range;
    use crate::fault::placement::Helpers;
    use crate::testing::{self, noise, words};
    use uzswap_mm::codec::{Algorithm, Encoding};

    /// Pages in the run.
    const N: usize = 128;
    const FIRST: u64 = 0x4000;

    /// Stores blocks of one to sixteen pages, of every codec and of none, from the first page on, with a gap behind each fourth.
    /// Returns their first pages in the run, and their handles.
    fn run(s: &mut State, orders: &[u8]) -> Vec<(usize, u32)> {
        let codecs = [Algorithm::Lz4, Algorithm::Zstd(1), Algorithm::Deflate(1)];
        let (mut at, mut blocks) = (0, Vec::new());
        for (i, order) in orders.iter().cycle().enumerate() {
            if at + (1 << order) > N {
                return blocks;
            }
            let content = if i % 7 == 6 { noise } else { words };
            let vpn = FIRST + at as u64;
            blocks.push((at, testing::store_by(codecs[i % 3], s, vpn, *order, 0, content)));
            at += (1 << order) + usize::from(i % 4 == 3);
        }
        unreachable!("it is cycled through")
    }

    /// What is read with a helper is what was stored; neither a damaged block nor one that is not whole is reported as right.
    #[test]
    fn what_helpers_decompressed_is_right() {
        testing::with_helper(|p, s| {
            let blocks = run(s, &[2, 0, 4, 3]);
            let encodings: Vec<_> = blocks.iter().map(|(_, handle)| Header::read(s.object(*handle)).encoding).collect();
            for encoding in [Encoding::Lz4, Encoding::Zstd, Encoding::Deflate, Encoding::Raw] {
                assert!(encodings.contains(&encoding), "{encoding:?}");
            }
            let mut wanted: Vec<usize> = blocks.iter().map(|(at, _)| *at).collect();
            for round in 0..200 {
                // On a busy machine a helper may be late, and gets a rest for it.
                p.helpers.rest.store(0, Relaxed);
                let mut buffer = vec![0xee; N * PAGE];
                assert_eq!(p.read_shared(s, FIRST, &mut buffer), wanted, "round {round}");
                for (at, handle) in blocks.iter().filter(|(at, _)| wanted.contains(at)) {
                    let object = s.object(*handle);
                    for (i, page) in buffer[at * PAGE..].chunks(PAGE).take(1 << object::order(object)).enumerate() {
                        assert_eq!(
                            object::hash(page),
                            object::stored_hash(object, i),
                            "round {round}, page {at} + {i}"
                        );
                        assert!(page == words(FIRST + (at + i) as u64) || page == noise(FIRST + (at + i) as u64));
                    }
                }
                if round == 100 {
                    // One is damaged, and the last page of another was dropped.
                    let object = s.object(blocks[3].1);
                    let byte = object::head_bytes(object::order(object)) + 5;
                    object[byte] ^= 0x40;
                    let last = FIRST + blocks[4].0 as u64 + (1 << object::order(s.object(blocks[4].1))) - 1;
                    forget_range(s, last, last + 1);
                    wanted.retain(|at| ![blocks[3].0, blocks[4].0].contains(at));
                }
            }
            assert!(p.helpers.crew.lead(), "nobody leads afterwards");
            assert!(p.read_shared(s, FIRST, &mut vec![0; N * PAGE]).is_empty(), "somebody else leads");
            p.helpers.crew.step_down();
        });
    }

    /// A few pages, many pages of which few are in the pool, or one block: decompressing them takes less time than sharing.
    #[test]
    fn little_is_not_shared() {
        testing::with_helper(|p, s| {
            let mut buffer = vec![0; N * PAGE];
            testing::store(s, FIRST, 4, 0, words);
            assert!(p.read_shared(s, FIRST, &mut buffer).is_empty(), "one block");
            for i in 4..7 {
                testing::store(s, FIRST + i * 4, 2, 0, words);
            }
            assert!(p.read_shared(s, FIRST, &mut buffer[..32 * PAGE]).is_empty(), "a short run");
            assert_eq!(p.read_shared(s, FIRST, &mut buffer), [0, 16, 20, 24]);
            (0..2).for_each(|cpu| s.placement.fault_on(cpu, cpu as u32, Helpers::default(), false));
            assert!(p.read_shared(s, FIRST, &mut buffer).is_empty(), "threads fault on several CPUs");
            assert!(p.helpers.crew.lead(), "nobody leads");
        });
    }
}

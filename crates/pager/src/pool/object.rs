//! The format of objects in the pool: a header, a 128-bit hash for each page, the compressed bytes.
//!
//! ```text
//! len u24 │ encoding u4 order u4 │ live u16 │ vpn u40 │ flags u8 │ live, of more than 16 pages │ hash u128 × 2^order │ bytes │ place on disk, if any
//! ```
//! `vpn` is where the first of the object's pages is (or was) in the program. It leads from an object back to the page-table
//! entries that name it, which compaction of the pool needs. It is a hint; see `relocate`.
//!
//! `live` has a bit for each page that still refers to the object; the object goes with the last. (Where 16 bits are too few, the
//! set is behind the header, as long as it must be, and the 16 bits are unused.)
//!
//! The hashes are those of the pages as stored. An evicted page whose hash is unchanged is clean, and its kept copy serves again
//! without compression. (A false match has a probability of 2^-128 per eviction, far below that of memory errors; in return no
//! page need be write-protected: see ARCHITECTURE.md.) Each decompression is checked against the hash as well.

use core::ops::Range;
use uzswap_mm::codec::Encoding;
use uzswap_mm::pagemap::Tier;
use uzswap_mm::pageset::PageSet;
use uzswap_mm::pagetable::Pte;
use uzswap_mm::replay;

/// The decoded header.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    /// Number of compressed bytes.
    pub len: usize,
    /// How they are compressed.
    pub encoding: Encoding,
    /// Number of pages, as a power of two.
    pub order: u8,
    /// The page number of page 0 in the program.
    pub vpn: u64,
    /// [`REFERENCED`], [`WRITING_BY`], [`SEEN`], [`AHEAD`], [`PACKING`], [`TRIED`], [`ON_DISK`].
    pub flags: u8,
}

/// Set when an object enters the pool's list, cleared by the shrinker that meets it: see `uzswap_mm::shrinker`.
pub const REFERENCED: u8 = 1;
/// The object is being written to the swap file, and must not move. There is a mark for each of two writes under way. (With one
/// mark for both, an object that was stored where another had been, and boarded the second write, was taken for the first write's
/// when that ended: the page's entry then named its former contents.)
pub const WRITING: u8 = WRITING_BY[0] | WRITING_BY[1];
/// The mark of each write: see [`WRITING`].
pub const WRITING_BY: [u8; 2] = [2, 16];
/// The current pass over the shrinker's list has met the object; clear between passes.
pub const SEEN: u8 = 4;

/// The object came from the swap file along with another, and was not wanted yet.
pub const AHEAD: u8 = 8;
/// The object is being recompressed, and must not move either.
pub const PACKING: u8 = 32;
/// Recompression gained little: the object goes to the swap file as it is.
pub const TRIED: u8 = 64;
/// The object is also on disk, unchanged: its place there stands behind its bytes ([`crate::swap::kept`]).
pub const ON_DISK: u8 = 128;
/// The object is part of a folio that goes to the swap file whole, and waits for its write. (An object that is being recompressed
/// was not [`TRIED`], so it is not taken for one that came to its place meanwhile and waits.)
pub const WAITING: u8 = PACKING | TRIED;
/// Somebody looks at the object without the lock, or will want to find it again by its place.
pub const HELD: u8 = WRITING | PACKING;

/// Bytes of the fixed header.
pub const HEADER_BYTES: usize = 12;

/// The largest order whose set of live pages is in the header.
pub const SMALL: u8 = 4;

/// Where the set of live pages is.
const fn live_at(order: u8) -> Range<usize> {
    if order <= SMALL { 4..6 } else { HEADER_BYTES..HEADER_BYTES + (1 << order) / 8 }
}

/// Where the hashes are.
const fn hashes_at(order: u8) -> usize {
    if order <= SMALL { HEADER_BYTES } else { live_at(order).end }
}

/// Bytes in front of the compressed ones.
pub const fn head_bytes(order: u8) -> usize {
    hashes_at(order) + (16 << order)
}
// A trace is replayed with these sizes. (The replay once went on with a header of 8 bytes when it had become 12.)
const _: () =
    assert!(head_bytes(0) == replay::head_bytes(1) && head_bytes(SMALL) == replay::head_bytes(replay::MOST_PAGES));

impl Header {
    /// Reads a header.
    ///
    /// # Panics
    /// `b` is shorter than a header.
    pub fn read(b: &[u8]) -> Self {
        let b: &[u8; HEADER_BYTES] = b.first_chunk().expect("an object begins with its header");
        Self {
            len: u32::from_le_bytes([b[0], b[1], b[2], 0]) as usize,
            encoding: Encoding::try_from(b[3] & 15).unwrap_or(Encoding::Raw),
            order: order(b),
            vpn: u64::from_le_bytes([b[6], b[7], b[8], b[9], b[10], 0, 0, 0]),
            flags: b[11],
        }
    }

    /// Writes a header; the set of live pages stays as it stands there ([`set_live`]).
    pub fn write(&self, b: &mut [u8]) {
        b[0..3].copy_from_slice(&(self.len as u32).to_le_bytes()[..3]);
        b[3] = self.encoding as u8 | self.order << 4;
        b[6..11].copy_from_slice(&self.vpn.to_le_bytes()[..5]);
        b[11] = self.flags;
    }
}

impl Header {
    /// The entry of page `index` of the object at `handle`, which left at `evicted_at`.
    pub fn entry(&self, handle: u32, index: usize, evicted_at: u32) -> Pte {
        Pte::compressed(handle, index, evicted_at).packed(tier(self.encoding))
    }
}

/// The tier of an encoding.
pub const fn tier(encoding: Encoding) -> Tier {
    match encoding {
        Encoding::Lz4 => Tier::Warm,
        Encoding::Zstd | Encoding::Deflate => Tier::Dense,
        Encoding::Raw => Tier::Raw,
    }
}

/// The order of the object that starts with `b`.
pub fn order(b: &[u8]) -> u8 {
    b[3] >> 4
}

/// Sets and clears flags in an object's header.
pub fn set_flags(b: &mut [u8], set: u8, clear: u8) {
    b[11] = (b[11] & !clear) | set;
}

/// The set of pages that still refer to an object.
pub fn live(b: &[u8]) -> PageSet {
    PageSet::read(&b[live_at(order(b))])
}

/// Sets which pages refer to an object; its header must be written.
pub fn set_live(b: &mut [u8], live: PageSet) {
    let at = live_at(order(b));
    live.write(&mut b[at]);
}

/// Page `index` no longer refers to the object; returns whether another does.
///
/// # Panics
/// When the page did not refer to the object.
pub fn leave(b: &mut [u8], index: usize) -> bool {
    let at = live_at(order(b));
    let bits = &mut b[at];
    let bit = 1 << (index % 8);
    assert!(bits[index / 8] & bit != 0, "a page left an object it was not in");
    bits[index / 8] &= !bit;
    bits.iter().any(|bits| *bits != 0)
}

/// The bytes of all stored hashes.
pub fn hashes(b: &[u8]) -> &[u8] {
    let order = order(b);
    &b[hashes_at(order)..head_bytes(order)]
}

/// Sets the hashes of pages from `index` on, from bytes that [`hashes`] returned.
pub fn set_hashes(b: &mut [u8], index: usize, hashes: &[u8]) {
    let at = hashes_at(order(b)) + 16 * index;
    b[at..at + hashes.len()].copy_from_slice(hashes);
}

/// The stored hash of page `index`.
///
/// # Panics
/// The object has no such page.
pub fn stored_hash(b: &[u8], index: usize) -> u128 {
    let at = hashes_at(order(b)) + 16 * index;
    u128::from_le_bytes(*b[at..].first_chunk().expect("a hash for each page"))
}

/// Sets the stored hash of page `index`.
pub fn set_hash(b: &mut [u8], index: usize, hash: u128) {
    set_hashes(b, index, &hash.to_le_bytes());
}

/// The hash of a page's contents.
pub fn hash(page: &[u8]) -> u128 {
    twox_hash::XxHash3_128::oneshot(page)
}

/// Whether a page is all zeros.
pub fn is_zero(page: &[u8]) -> bool {
    let (words, tail) = page.as_chunks::<8>();
    tail.iter().all(|b| *b == 0) && words.chunks(64).all(|c| c.iter().fold(0, |a, w| a | u64::from_ne_bytes(*w)) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_of_any_order_round_trips() {
        for order in 0..=9u8 {
            let pages = 1 << order;
            let mut b = vec![0xaa; head_bytes(order)];
            let vpn = 0x7_ffff_fffe;
            Header { len: 12345, encoding: Encoding::Lz4, order, vpn, flags: WRITING }.write(&mut b);
            let set: PageSet = (0..pages).filter(|i| i % 3 != 1).collect();
            set_live(&mut b, set);
            (0..pages).for_each(|i| set_hash(&mut b, i, (i as u128) << 100 | 5));
            assert_eq!((live(&b), super::order(&b)), (set, order));
            set_flags(&mut b, REFERENCED, WRITING);
            let r = Header::read(&b);
            assert_eq!((r.vpn, r.flags, r.len, r.encoding, r.order), (vpn, REFERENCED, 12345, Encoding::Lz4, order));
            assert!((0..pages).all(|i| stored_hash(&b, i) == (i as u128) << 100 | 5), "order {order}");
            let copied = hashes(&b)[16..].to_vec();
            set_hashes(&mut b, 0, &copied);
            assert_eq!((copied.len(), live(&b)), (16 * (pages - 1), set));
            let left = set.iter().map(|i| leave(&mut b, i)).filter(|any| *any).count();
            assert_eq!((left, live(&b)), (set.len() - 1, PageSet::default()), "order {order}: it goes with the last");
        }
    }

    #[test]
    #[should_panic(expected = "a page left an object it was not in")]
    fn no_page_leaves_twice() {
        let mut b = vec![0; head_bytes(7)];
        Header { len: 1, encoding: Encoding::Raw, order: 7, vpn: 0, flags: 0 }.write(&mut b);
        set_live(&mut b, PageSet::first(128));
        leave(&mut b, 100);
        leave(&mut b, 100);
    }

    #[test]
    fn zero_pages_are_seen() {
        let mut page = [0u8; 4096];
        assert!(is_zero(&page));
        page[4095] = 1;
        assert!(!is_zero(&page));
    }
}

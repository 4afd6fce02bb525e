//! Objects in the pool: a header, a 128-bit hash for each page, the compressed bytes.
//!
//! ```text
//! len u24 │ encoding u4 order u4 │ live u16 │ vpn u40 │ flags u8 │ hash u128 × 2^order │ bytes │ place on disk, if any
//! ```
//! `vpn` is where the first of its pages is (or was) in the program: the way back from an object to the page-table
//! entries that name it, which compaction of the pool needs. It is a hint; see `relocate`.
//! `live` has a bit for each page that still refers to the object; the object goes with the last. The hashes are those
//! of the pages as stored: an evicted page whose hash is unchanged is clean, and its kept copy serves again without
//! compression. (A false match has a probability of 2^-128 per eviction, far below that of memory errors; in return no
//! page need be write-protected: see ARCHITECTURE.md.) The hash also checks every decompression.

use uzswap_mm::codec::Encoding;
use uzswap_mm::pagemap::Tier;
use uzswap_mm::pagetable::Pte;

/// The decoded header.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    /// Compressed bytes.
    pub len: usize,
    /// How they are compressed.
    pub encoding: Encoding,
    /// Pages as a power of two.
    pub order: u8,
    /// Pages that still refer to it.
    pub live: u16,
    /// The page of the program that page 0 is.
    pub vpn: u64,
    /// [`REFERENCED`], [`WRITING_BY`], [`SEEN`], [`AHEAD`], [`PACKING`], [`TRIED`], [`ON_DISK`].
    pub flags: u8,
}

/// Set when an object enters the pool's list, cleared by the shrinker that meets it: see `uzswap_mm::shrinker`.
pub const REFERENCED: u8 = 1;
/// The object is being written to the swap file, and must not change its place: a mark for each of two writes under way.
/// (With one mark for both, an object that was stored where another had been, and boarded the second write, was taken for
/// the first one's when that ended: the page's entry then named what it had been before.)
pub const WRITING: u8 = WRITING_BY[0] | WRITING_BY[1];
/// See [`WRITING`]: which write it is.
pub const WRITING_BY: [u8; 2] = [2, 16];
/// Met already by the pass over the shrinker's list that is under way; clear between passes.
pub const SEEN: u8 = 4;

/// Came from the swap file along with another, and was not wanted yet.
pub const AHEAD: u8 = 8;
/// The object is being recompressed, and must not change its place either.
pub const PACKING: u8 = 32;
/// Recompression gained little: the object is written to the swap file as it is.
pub const TRIED: u8 = 64;
/// The object is on disk too, unchanged: its place there stands behind its bytes ([`crate::swap::kept`]).
pub const ON_DISK: u8 = 128;
/// Somebody looks at the object without the lock, or will want to find it again by its place.
pub const HELD: u8 = WRITING | PACKING;

/// Bytes of the header alone.
pub const HEADER_BYTES: usize = 12;

/// Bytes of the header and the hashes.
pub const fn head_bytes(order: u8) -> usize {
    HEADER_BYTES + (16 << order)
}

impl Header {
    /// Reads a header.
    pub fn read(b: &[u8]) -> Self {
        let b: &[u8; HEADER_BYTES] = b.first_chunk().expect("an object begins with its header");
        Self {
            len: u32::from_le_bytes([b[0], b[1], b[2], 0]) as usize,
            encoding: Encoding::try_from(b[3] & 15).unwrap_or(Encoding::Raw),
            order: order(b),
            live: u16::from_le_bytes([b[4], b[5]]),
            vpn: u64::from_le_bytes([b[6], b[7], b[8], b[9], b[10], 0, 0, 0]),
            flags: b[11],
        }
    }

    /// Writes a header.
    pub fn write(&self, b: &mut [u8]) {
        b[0..3].copy_from_slice(&(self.len as u32).to_le_bytes()[..3]);
        b[3] = self.encoding as u8 | self.order << 4;
        b[4..6].copy_from_slice(&self.live.to_le_bytes());
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

/// The tier of what is packed so.
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

/// The stored hash of page `index`.
pub fn stored_hash(b: &[u8], index: usize) -> u128 {
    let at = HEADER_BYTES + 16 * index;
    u128::from_le_bytes(*b[at..].first_chunk().expect("a hash for each page"))
}

/// Sets the stored hash of page `index`.
pub fn set_hash(b: &mut [u8], index: usize, hash: u128) {
    let at = HEADER_BYTES + 16 * index;
    b[at..at + 16].copy_from_slice(&hash.to_le_bytes());
}

/// The hash of a page's contents.
pub fn hash(page: &[u8]) -> u128 {
    twox_hash::XxHash3_128::oneshot(page)
}

/// Whether a page is all zeros.
pub fn is_zero(page: &[u8]) -> bool {
    let (head, words, tail) = zerocopy_words(page);
    head.iter().chain(tail).all(|b| *b == 0)
        && words.chunks(64).all(|c| c.iter().fold(0, |a, w| a | u64::from_ne_bytes(*w)) == 0)
}

fn zerocopy_words(b: &[u8]) -> (&[u8], &[[u8; 8]], &[u8]) {
    let (words, tail) = b.as_chunks::<8>();
    (&[], words, tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_round_trips() {
        let mut b = vec![0; head_bytes(2)];
        let h =
            Header { len: 12345, encoding: Encoding::Lz4, order: 2, live: 0b1011, vpn: 0x7_ffff_fffe, flags: WRITING };
        h.write(&mut b);
        set_hash(&mut b, 3, 7 << 100);
        let r = Header::read(&b);
        assert_eq!((r.vpn, order(&b), r.flags), (0x7_ffff_fffe, 2, WRITING));
        set_flags(&mut b, REFERENCED, WRITING);
        assert_eq!(Header::read(&b).flags, REFERENCED);
        assert_eq!((r.len, r.encoding as u8, r.order, r.live), (12345, Encoding::Lz4 as u8, 2, 0b1011));
        assert_eq!((stored_hash(&b, 3), stored_hash(&b, 0)), (7 << 100, 0));
    }

    #[test]
    fn zero_pages_are_seen() {
        let mut page = [0u8; 4096];
        assert!(is_zero(&page));
        page[4095] = 1;
        assert!(!is_zero(&page));
    }
}

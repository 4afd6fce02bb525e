//! Size classes: what objects are rounded up to, and how many share how large a slab.
//!
//! About a hundred sizes some 5 % apart, as the kernel's zsmalloc has them. All tables are made by the compiler. What is larger
//! than the largest of them has a slab of its own, of as many pages as it needs.

use super::PAGE;
use crate::zone::BLOCK_FRAMES;

/// Granularity of offsets and class sizes. 32 lets a `u32` address 128 GiB; 16 would gain under 1 % of a 1 KiB object.
pub(super) const GRAIN: usize = 32;
/// Largest object: what lies in one page block.
pub const MAX_OBJECT: usize = BLOCK_FRAMES as usize * PAGE;
/// Largest object that shares its slab with others: a 64 KiB source stored raw, with a page to spare for a header.
pub(super) const MAX_SHARED: usize = 69_632;
/// Pages in the largest slab that objects share. More would waste less in the tail and more in slabs that never drain.
pub(super) const MAX_SLAB_PAGES: usize = 32;
/// Objects in a slab at most: the bits of its bitmap.
pub(super) const MAX_SLAB_OBJECTS: usize = 128;
/// A tail waste, in 1/1024 of the slab, that is not worth more pages (1.5 %).
const TAIL_WASTE_OK: usize = 16;
/// Sizes that come up as such (sources stored raw), which therefore end a class each.
const ANCHORS: [usize; 6] = [4096, 8192, 16_384, 32_768, 65_536, MAX_SHARED];
/// A size class.
#[derive(Clone, Copy)]
pub(super) struct Class {
    /// Bytes given to each object.
    pub(super) size: u32,
    /// Pages of a slab.
    pub(super) pages: u16,
    /// Objects of a slab.
    pub(super) objects: u8,
}

/// The smallest number of pages with little tail waste for objects of `size`, or that with the least.
const fn slab_pages(size: usize) -> usize {
    let mut best = (0, usize::MAX);
    let mut pages = size.div_ceil(PAGE);
    while pages <= MAX_SLAB_PAGES {
        let bytes = pages * PAGE;
        if bytes / size > MAX_SLAB_OBJECTS {
            break;
        }
        let waste = (bytes % size) * 1024 / bytes;
        if waste < best.1 {
            best = (pages, waste);
        }
        if waste <= TAIL_WASTE_OK {
            break;
        }
        pages += 1;
    }
    assert!(best.0 != 0);
    best.0
}

/// The first anchor at or above `size`.
const fn anchor(size: usize) -> usize {
    let mut i = 0;
    while ANCHORS[i] < size {
        i += 1;
    }
    ANCHORS[i]
}

const CLASS_ROOM: usize = 160;

const fn build_classes() -> ([Class; CLASS_ROOM], usize) {
    let mut classes = [Class { size: 0, pages: 0, objects: 0 }; CLASS_ROOM];
    let mut count = 0;
    let mut wanted = GRAIN;
    loop {
        let pages = slab_pages(wanted);
        let objects = pages * PAGE / wanted;
        // Widen to what the slab has anyway, but not past a size that must end its own class.
        let widened = pages * PAGE / objects / GRAIN * GRAIN;
        let size = if widened > anchor(wanted) { anchor(wanted) } else { widened };
        classes[count] = Class { size: size as u32, pages: pages as u16, objects: objects as u8 };
        count += 1;
        if size == MAX_SHARED {
            classes[count].objects = 1;
            return (classes, count);
        }
        // About 5 % up (1/20), at least one grain.
        let up = (size + size / 20).div_ceil(GRAIN) * GRAIN;
        let next = if up > size { up } else { size + GRAIN };
        wanted = if next > anchor(size + 1) { anchor(size + 1) } else { next };
    }
}

const BUILT: ([Class; CLASS_ROOM], usize) = build_classes();
pub(super) const CLASS_COUNT: usize = BUILT.1;
pub(super) static CLASSES: [Class; CLASS_ROOM] = BUILT.0;
/// The class behind those that have a size: of objects with a slab of their own, which says how many pages it has.
pub(super) const LARGE: u8 = CLASS_COUNT as u8;
const _: () = assert!(CLASS_COUNT < CLASS_ROOM, "there is room for the class of large objects");

/// Class by length in grains, rounded up.
pub(super) static CLASS_OF: [u8; MAX_SHARED / GRAIN + 1] = {
    let mut of = [0; MAX_SHARED / GRAIN + 1];
    let mut class = 0;
    let mut grains = 0;
    while grains < of.len() {
        if grains * GRAIN > BUILT.0[class].size as usize {
            class += 1;
        }
        of[grains] = class as u8;
        grains += 1;
    }
    of
};

/// The sizes that objects with a slab in common are rounded up to, ascending, in bytes. (Larger ones take whole pages.)
pub fn class_sizes() -> impl Iterator<Item = usize> {
    CLASSES[..CLASS_COUNT].iter().map(|class| class.size as usize)
}

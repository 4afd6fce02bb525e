//! Size classes: which sizes objects are rounded up to, and how many objects share a slab of how many pages.
//!
//! There are about a hundred sizes some 5 % apart, as in the kernel's zsmalloc. The compiler builds all tables. An
//! object larger than the largest class has a slab of its own, of as many pages as it needs.

use super::PAGE;
use crate::zone::BLOCK_FRAMES;

/// Granularity of offsets and class sizes. 32 lets a `u32` address 128 GiB; 16 would gain under 1 % of a 1 KiB object.
pub(super) const GRAIN: usize = 32;
/// Largest object: one page block.
pub const MAX_OBJECT: usize = BLOCK_FRAMES as usize * PAGE;
/// Largest object that shares its slab with others: a 64 KiB source stored raw, with a page to spare for a header.
pub(super) const MAX_SHARED: usize = 69_632;
/// Pages of the largest slab that objects share. Larger slabs would waste less in the tail, and more because they never
/// drain.
pub(super) const MAX_SLAB_PAGES: usize = 32;
/// Most objects of a slab: the bits of its bitmap.
pub(super) const MAX_SLAB_OBJECTS: usize = 128;
/// Tail waste that is not worth another page, in 1/1024 of the slab (1.5 %).
const TAIL_WASTE_OK: usize = 16;
/// Sizes that occur as such (sources stored raw). Each ends a class.
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

/// The smallest number of pages with little tail waste for objects of `size`; if there is none, the number with the
/// least waste.
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
        // Widen to what the slab gives each object anyway, but not past a size that must end its own class.
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
/// The class after those with a size: objects with a slab of their own. The slab says how many pages it has.
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

/// The sizes of all classes whose objects share slabs, ascending, in bytes. (Larger objects take whole pages.)
pub fn class_sizes() -> impl Iterator<Item = usize> {
    CLASSES[..CLASS_COUNT].iter().map(|class| class.size as usize)
}

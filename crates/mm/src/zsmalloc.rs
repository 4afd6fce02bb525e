//! zsmalloc: decides where in the pool a compressed object lies.
//!
//! It is a pure offset allocator that never touches the pool's memory. It hands out byte offsets into one contiguous
//! range that the caller maps. So tests need no memory behind it, and its state survives a pool that is protected,
//! discarded or elsewhere.
//!
//! ```text
//! pool   | page block: 512 pages of a zone      | page block | page block | ... what the zone has begun ... capacity
//! block  | slab (3 pages) | slab (1) | free run | slab (2 pages) | ...
//! slab   | object | object | object | tail |          all of one class, at most 128 objects
//! slab   | object of more than 68 KiB | tail |        by itself
//! ```
//!
//! As in the kernel's zsmalloc, objects are rounded up to one of about a hundred size classes some 5 % apart. Objects
//! of a class share *slabs* (the kernel's "zspages") of 1 to 32 contiguous 4 KiB pages. A slab has the smallest number
//! of pages whose tail waste is below `TAIL_WASTE_OK` (`classes`); the class is then widened to divide its slab evenly.
//! Objects may straddle pages inside a slab: the range is contiguous in memory, so nobody notices.
//!
//! - The pages come from a [`Zone`], which begins a page block when no run is left in the others. A slab whose number
//!   of pages is no power of two returns the rest of its run at once. Free pages are *holes*: they have no memory.
//! - An object is one bit in its slab's bitmap, and takes no bytes of its own. A slab takes 32 bytes; the zone's note
//!   of a page's user says which slab the page belongs to.
//! - Each class lists its partial slabs by fullness, in four lists. Allocation takes from the fullest, so nearly empty
//!   slabs drain and are given back.
//! - A small pool ([`SMALL_POOL`]) takes a place of a larger class rather than begin a slab of its own.
//! - A slab whose last object goes leaves at once, as [`Freed`]; no empty slab is kept. [`ZsPool::compact`] drains
//!   slabs that are nearly empty, and [`ZsPool::evacuate`] empties page blocks.
//!
//! Invariants:
//! - `used` is the sum of the class sizes of all set bits, `held` the pages of all slabs; both in bytes.
//! - A slab has 1..=objects live objects. A partial slab is in exactly one list, a full one in none.
//! - The zone notes the slab as the user of each of its pages. What the zone says of a free page means nothing, so a
//!   lookup always checks that the page lies in the slab that it names.
//!
//! Ownership: one owner, `&mut self`. To share a pool among threads, put a lock around it.

mod classes;
mod compaction;

use crate::zone::{BLOCK_FRAMES, Kind, Zone};
use classes::{CLASS_COUNT, CLASS_OF, CLASSES, Class, GRAIN, LARGE, MAX_SHARED, MAX_SLAB_OBJECTS, MAX_SLAB_PAGES};
pub use classes::{MAX_OBJECT, class_sizes};
pub use compaction::{Compacted, Relocate};

/// The allocator's page, whatever the kernel's is.
const PAGE: usize = 4096;
/// Largest pool that a [`Handle`] can address: 128 GiB.
pub const MAX_CAPACITY: usize = GRAIN << 32;
/// Fullness lists per class.
const GROUPS: usize = 4;
/// While the pool holds less than this (bytes), an object may take a place up to half as large again as itself. A
/// hundred classes, each with a slab that has room left, take as much as a small pool holds: 200 objects of a program's
/// heap, 0.6 MiB, took 1.7 MiB of slabs, and take 1.0 this way. From this size on slabs are full enough, and places
/// that fit waste less.
const SMALL_POOL: usize = 8 << 20;
/// No slab; no link.
const NONE: u32 = u32::MAX;

/// An object in a [`ZsPool`]: its byte offset divided by 32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Handle(u32);

impl Handle {
    /// Where the object starts, in bytes from the start of the pool.
    pub fn offset(self) -> usize {
        self.0 as usize * GRAIN
    }

    /// The handle that `raw` came from ([`Handle::raw`]). Nothing is checked here; the pool checks at use.
    pub fn from_raw(raw: u32) -> Self {
        Self(raw)
    }

    /// The handle as a number to store.
    pub fn raw(self) -> u32 {
        self.0
    }
}

/// Whole pages of the pool that hold nothing any more.
///
/// Give them back to the kernel *before the next* [`ZsPool::alloc`], which may hand out the same range again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Freed {
    /// Start, in bytes from the start of the pool.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
}

/// A slab, 32 bytes.
struct Slab {
    /// Which objects are live.
    live_bits: [u64; 2],
    /// First page in the pool.
    first_page: u32,
    /// Neighbours in the fullness list. In unused entries `next` links them.
    next: u32,
    prev: u32,
    class: u8,
    /// Set bits of `live_bits`; 0 in an unused entry.
    live: u8,
    /// Pages: as many as the class has, or as its one object takes.
    pages: u16,
}

impl Slab {
    /// Its class. For a large object: one of the slab's own size.
    fn class(&self) -> Class {
        match self.class {
            LARGE => Class { size: u32::from(self.pages) * PAGE as u32, pages: self.pages, objects: 1 },
            class => CLASSES[class as usize],
        }
    }
}

const _: () = assert!(size_of::<Slab>() == 32);

/// The allocator: see the module's documentation.
pub struct ZsPool {
    slabs: Vec<Slab>,
    /// First unused entry of `slabs`.
    unused: u32,
    /// Where slabs get their pages from.
    zone: Zone,
    /// Heads of the fullness lists.
    partial: Box<[[u32; GROUPS]]>,
    /// Slabs and live objects of each class.
    usage: Box<[Usage]>,
    /// The class that compaction looks at next.
    compact_next: usize,
    /// Bytes: sum of the class sizes of live objects.
    used: usize,
    /// Bytes: pages of all slabs.
    held: usize,
}

/// What a class has in the pool.
#[derive(Clone, Copy, Default)]
struct Usage {
    /// Its slabs.
    slabs: u32,
    /// Live objects in them.
    live: u32,
}

/// The fullness list of a slab with `live` of `objects` in use; `None` when it is full.
fn group(live: u8, objects: u8) -> Option<usize> {
    (live < objects).then(|| live as usize * GROUPS / objects as usize)
}

impl ZsPool {
    /// A pool of `capacity_bytes`, rounded down to pages and at most [`MAX_CAPACITY`]. It takes memory for its tables
    /// as it fills.
    pub fn new(capacity_bytes: usize) -> Self {
        Self {
            slabs: Vec::new(),
            unused: NONE,
            zone: Zone::growing((capacity_bytes.min(MAX_CAPACITY) / PAGE) as u32),
            partial: vec![[NONE; GROUPS]; CLASS_COUNT + 1].into_boxed_slice(),
            usage: vec![Usage::default(); CLASS_COUNT + 1].into_boxed_slice(),
            compact_next: 0,
            used: 0,
            held: 0,
        }
    }

    /// Room for `len` bytes (1 to [`MAX_OBJECT`]), or `None` when the pool has no run of pages left for them.
    ///
    /// # Panics
    /// When `len` is 0 or more than [`MAX_OBJECT`].
    pub fn alloc(&mut self, len: usize) -> Option<Handle> {
        assert!((1..=MAX_OBJECT).contains(&len), "object of {len} bytes: not 1 to {MAX_OBJECT}");
        // The slab of a large object never has room for another.
        let class_index = if len <= MAX_SHARED { CLASS_OF[len.div_ceil(GRAIN)] } else { LARGE };
        let slab_index = match self.fullest(class_index).or_else(|| self.fullest_above(class_index, len)) {
            Some(index) => index,
            None if class_index == LARGE => self.add_slab(LARGE, len.div_ceil(PAGE) as u16)?,
            None => self.add_slab(class_index, CLASSES[class_index as usize].pages)?,
        };
        Some(self.take_object(slab_index))
    }

    /// The fullest slab of a class with room left.
    fn fullest(&self, class_index: u8) -> Option<u32> {
        self.partial[class_index as usize].iter().rev().copied().find(|&head| head != NONE)
    }

    /// In a small pool: a slab with room of one of the next larger classes, up to half as large again as `len`.
    fn fullest_above(&self, class_index: u8, len: usize) -> Option<u32> {
        if self.held >= SMALL_POOL {
            return None;
        }
        let fits = |at: &u8| CLASSES[*at as usize].size as usize <= len + len / 2;
        (class_index + 1..LARGE).take_while(fits).find_map(|at| self.fullest(at))
    }

    /// Takes the first free object of a listed slab.
    fn take_object(&mut self, slab_index: u32) -> Handle {
        let slab = &mut self.slabs[slab_index as usize];
        let (class_index, class) = (slab.class, slab.class());
        // The search never reaches bits at or above `objects`: a listed slab has a clear bit below.
        let word = usize::from(slab.live_bits[0] == u64::MAX);
        let bit = slab.live_bits[word].trailing_ones() as usize;
        let object = word * 64 + bit;
        debug_assert!(object < class.objects as usize);
        slab.live_bits[word] |= 1 << bit;
        let before = slab.live;
        slab.live += 1;
        let offset = slab.first_page as usize * PAGE + object * class.size as usize;
        self.move_group(slab_index, class_index, group(before, class.objects), group(before + 1, class.objects));
        self.used += class.size as usize;
        self.usage[class_index as usize].live += 1;
        Handle((offset / GRAIN) as u32)
    }

    /// Clears an object's bit but leaves the lists alone. Returns how many objects were live before.
    fn drop_object(&mut self, slab_index: u32, object: usize) -> u8 {
        let slab = &mut self.slabs[slab_index as usize];
        slab.live_bits[object / 64] &= !(1 << (object % 64));
        let before = slab.live;
        slab.live -= 1;
        self.used -= slab.class().size as usize;
        self.usage[slab.class as usize].live -= 1;
        before
    }

    /// Frees an object. Returns the slab's pages if this was its last object.
    ///
    /// # Panics
    /// When `handle` is not allocated.
    pub fn free(&mut self, handle: Handle) -> Option<Freed> {
        let (slab_index, object) = self.locate(handle);
        let before = self.drop_object(slab_index, object);
        let class_index = self.slabs[slab_index as usize].class;
        let class = CLASSES[class_index as usize];
        let from = group(before, class.objects);
        if before > 1 {
            self.move_group(slab_index, class_index, from, group(before - 1, class.objects));
            return None;
        }
        self.move_group(slab_index, class_index, from, None);
        Some(self.remove_slab(slab_index))
    }

    /// Bytes that the object of `handle` may use: its class size.
    ///
    /// # Panics
    /// When `handle` is not allocated.
    pub fn usable(&self, handle: Handle) -> usize {
        let (slab_index, _) = self.locate(handle);
        self.slabs[slab_index as usize].class().size as usize
    }

    /// The pages of a live object's slab, which [`ZsPool::free`] returns with its last object.
    ///
    /// # Panics
    /// When `handle` is not allocated.
    pub fn slab_of(&self, handle: Handle) -> Freed {
        let slab = &self.slabs[self.locate(handle).0 as usize];
        Freed { offset: slab.first_page as usize * PAGE, len: slab.pages as usize * PAGE }
    }

    /// Bytes of live objects, each counted with its class size.
    pub fn used_bytes(&self) -> usize {
        self.used
    }

    /// Bytes of all slabs, tails and free objects included: what the pool costs.
    pub fn held_bytes(&self) -> usize {
        self.held
    }

    /// Bytes allocated for the allocator's own tables.
    pub fn metadata_bytes(&self) -> usize {
        size_of::<Self>()
            + self.slabs.capacity() * size_of::<Slab>()
            + self.zone.metadata_bytes()
            + size_of_val(&*self.partial)
            + size_of_val(&*self.usage)
    }

    /// The slab that a page is in, if any.
    fn slab_at(&self, page: u32) -> Option<u32> {
        let index = (page < self.zone.end()).then(|| self.zone.user(page) as u32)?;
        let slab = self.slabs.get(index as usize).filter(|slab| slab.live > 0)?;
        let end = slab.first_page + u32::from(slab.pages);
        (slab.first_page..end).contains(&page).then_some(index)
    }

    /// The slab of a live object and the object's index in it. Panics when there is no such object.
    fn locate(&self, handle: Handle) -> (u32, usize) {
        let offset = handle.offset();
        let slab_index = self.slab_at((offset / PAGE) as u32);
        let slab_index = slab_index.unwrap_or_else(|| panic!("handle {:#x} is in no slab", handle.0));
        let slab = &self.slabs[slab_index as usize];
        let size = slab.class().size;
        let into = (offset - slab.first_page as usize * PAGE) as u32;
        let object = (into / size) as usize;
        // A slab's tail holds no object, but a handle can name a grain of it: the live bit of its index is clear.
        let live = object < MAX_SLAB_OBJECTS && slab.live_bits[object / 64] >> (object % 64) & 1 == 1;
        assert!(live && into.is_multiple_of(size), "handle {:#x} is not allocated", handle.0);
        (slab_index, object)
    }

    /// Moves a slab between fullness lists; `None` stands for no list.
    fn move_group(&mut self, slab: u32, class: u8, from: Option<usize>, to: Option<usize>) {
        if from == to {
            return;
        }
        let heads = &mut self.partial[class as usize];
        if let Some(from) = from {
            let Slab { next, prev, .. } = self.slabs[slab as usize];
            match prev {
                NONE => heads[from] = next,
                prev => self.slabs[prev as usize].next = next,
            }
            if next != NONE {
                self.slabs[next as usize].prev = prev;
            }
        }
        if let Some(to) = to {
            let head = std::mem::replace(&mut heads[to], slab);
            if head != NONE {
                self.slabs[head as usize].prev = slab;
            }
            let slab = &mut self.slabs[slab as usize];
            (slab.next, slab.prev) = (head, NONE);
        }
    }

    /// Adds an empty slab of `pages` pages, listed among the emptiest.
    fn add_slab(&mut self, class: u8, pages: u16) -> Option<u32> {
        let objects = CLASSES[class as usize].objects;
        let first_page = self.take_run(u32::from(pages))?;
        let slab = Slab { live_bits: [0; 2], first_page, next: NONE, prev: NONE, class, live: 0, pages };
        let index = if self.unused == NONE {
            if self.slabs.len() == self.slabs.capacity() {
                // Grow by an eighth, not to double: slabs are a large part of the tables.
                self.slabs.reserve_exact(self.slabs.len() / 8 + 64);
            }
            self.slabs.push(slab);
            (self.slabs.len() - 1) as u32
        } else {
            let index = self.unused;
            self.unused = std::mem::replace(&mut self.slabs[index as usize], slab).next;
            index
        };
        (first_page..first_page + u32::from(pages)).for_each(|page| self.zone.set_user(page, u64::from(index)));
        self.held += pages as usize * PAGE;
        self.usage[class as usize].slabs += 1;
        self.move_group(index, class, None, group(0, objects));
        Some(index)
    }

    /// Removes an empty slab, which is in no list, from the pool.
    fn remove_slab(&mut self, index: u32) -> Freed {
        let slab = &mut self.slabs[index as usize];
        let (first, pages) = (slab.first_page, slab.pages);
        slab.next = std::mem::replace(&mut self.unused, index);
        let len = pages as usize * PAGE;
        self.held -= len;
        self.usage[slab.class as usize].slabs -= 1;
        self.zone.free_run(Kind::Hole, first, pages as usize);
        Freed { offset: first as usize * PAGE, len }
    }

    /// Takes `pages` contiguous pages.
    fn take_run(&mut self, pages: u32) -> Option<u32> {
        let run = pages.next_power_of_two();
        let order = run.trailing_zeros() as u8;
        let first = self.zone.alloc(Kind::Hole, order)?;
        self.zone.free_run(Kind::Hole, first + pages, (run - pages) as usize);
        Some(first)
    }
}

const _: () = assert!(MAX_SLAB_PAGES <= BLOCK_FRAMES as usize, "a slab lies in one page block");

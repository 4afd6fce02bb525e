//! What the pager's lock protects: the engine's tables, and the few operations on them that every path needs.
//!
//! All of this module runs with the lock held (`pager` has the lock order). The tables allocate only under the lock, and the
//! agent's allocator lock nests inside it: a thread that forks with the lock held leaves both consistent in the child.

use crate::calls::remapped::Remapping;
use crate::discover::ranges::Ranges;
use crate::fault::placement::Placement;
use crate::fault::streams::Streams;
use crate::fork::exclusive::Exclusive;
use crate::frames::arena::{self, Layout, PAGE};
use crate::frames::compact::Counted;
use crate::frames::thp::Advice;
use crate::group::folio::{MAX_ORDER, USUAL_UNIT};
use crate::page_state::mapfile::{self, MapFile};
use crate::page_state::notify::Notified;
use crate::pool::batch::Batch;
use crate::pool::compress::largest_unit;
use crate::pool::densify::Sweep;
use crate::pool::object::{self, Header};
use crate::reclaim::incompressible::Retries;
use crate::reclaim::read_only::Leaving;
use crate::swap::Swap;
use crate::swap::kept::OnDisk;
use crate::trace::Recorder;
use core::ops::Range;
use std::collections::BTreeSet;
use uzswap_mm::codec::{Algorithm, Compressor, Decompressor};
use uzswap_mm::compaction::Compactor;
use uzswap_mm::compaction::rule::{Chosen, Rule};
use uzswap_mm::lru::Lru;
use uzswap_mm::pageset::PageSet;
use uzswap_mm::pagetable::{PageTable, Pte, Tag};
use uzswap_mm::shrinker;
use uzswap_mm::trace::{self, Record};
use uzswap_mm::zone::{Kind, Zone};
use uzswap_mm::zsmalloc::{Handle, ZsPool};

/// Frames freed last that stay unmerged: see `uzswap_mm::zone`.
const READY_FRAMES: usize = 64;
/// Bytes of the largest block unless the user asks for larger units.
pub const BLOCK: usize = PAGE << USUAL_UNIT;
/// The same in pages.
pub const BLOCK_PAGES: usize = BLOCK / PAGE;

/// Pages of the largest folio.
pub const FOLIO_PAGES: usize = 1 << MAX_ORDER;
/// How many partly read blocks are remembered at most.
pub const LEFT_MOST: usize = 4096;

/// A decompressed block, kept for faults on its other pages, so that it is decompressed only once.
pub struct Decoded {
    /// The object, None when the buffer holds nothing.
    pub handle: Option<u32>,
    /// Its pages, of which the first `pages` are decompressed. The buffer grows to the largest block met.
    pub bytes: Vec<u8>,
    /// Number of decompressed pages.
    pub pages: usize,
    /// The page number of its first page in the program.
    pub vpn: u64,
    /// Whether this fault decompressed it.
    pub fresh: bool,
}

/// The tables.
pub struct State {
    /// Where uzswap's memory is.
    pub layout: Layout,
    /// State of every page.
    pub pt: PageTable,
    /// The published page map, if its empty pages go back to the kernel: see `mapfile`.
    pub page_map: Option<usize>,
    /// Lists of resident and staged folios.
    pub lru: Lru,
    /// Allocator of the arena's slots.
    pub zone: Zone,
    /// Whether a large run of holes was wanted and not found.
    pub runs_wanted: bool,
    /// Holes for the next windows: see `window`.
    pub windows: Range<u32>,
    /// Compaction of the arena.
    pub compactor: Compactor<Chosen>,
    /// What the compactor had counted when the member's counters were last updated.
    pub compacted: Counted,
    /// Allocator of the pool.
    pub pool: ZsPool,
    /// Waste that compaction of the pool could not free (bytes).
    pub pool_rest: usize,
    /// Free pages in the pool's page blocks when the last attempt to empty one got no further.
    pub pool_stuck: usize,
    /// How often it was asked whether to empty one.
    pub pool_looks: u32,
    /// Decompressor of the fault path.
    pub decompressor: Decompressor,
    /// Blocks decompressed lately; reused round robin.
    pub decoded: Vec<Decoded>,
    /// The next of `decoded` to reuse.
    pub decoded_next: usize,
    /// Counts deliveries to blocks that are written to: see `deliver`.
    pub probes: u32,
    /// A buffer for swap-ins that find no free frame: see [`State::scratch`].
    scratch: Vec<u8>,
    /// Birth stamp of the next folio.
    pub stamp: u32,
    /// Evictions so far (pages, wrapping at 21 bits): the clock of refault distance.
    pub evictions: u32,
    /// Pages known to be in the program.
    pub resident: usize,
    /// Pages staged or being compressed.
    pub staged: usize,
    /// Staged pages that are being compressed.
    pub busy: usize,
    /// Pages that are out and in the pool.
    pub swapped: usize,
    /// Pages evicted as zeros.
    pub zeros: usize,
    /// RssAnon of this process when last read, corrected by what was taken from the kernel and given back since (bytes).
    pub rss: usize,
    /// Ranges never to be managed: the first thread's TLS, what the loader mapped.
    pub pinned: Vec<(usize, usize)>,
    /// Ranges not to be managed while they are mapped as they are: thread stacks.
    pub excluded: Vec<(usize, usize)>,
    /// Which memory the program advised to be huge pages, and which not: see `thp`.
    pub advice: Advice,
    /// The fault count (`pgfault`) from which on the kernel is asked again for a huge page that it did not have.
    pub huge_due: u64,
    /// Registered ranges, as they were found.
    pub managed: Ranges,
    /// Pages that only this process has, since a fork.
    pub(crate) exclusive: Exclusive,
    /// Pages that the forking thread writes to in the child until it releases the lock.
    pub(crate) hooks: [core::ops::Range<usize>; 2],
    /// Ranges that the program registers, or once registered, with a userfaultfd of its own: see `ceded`.
    pub ceded: Vec<(usize, usize)>,
    /// Ceded ranges (page numbers) whose faults, if read before, this pager no longer serves.
    pub withdrawn: Vec<(u64, u64)>,
    /// Whether the lock's owner brings pages without evicting others for them.
    pub keeps_all: bool,
    /// Ranges that are shared after a fork, to be un-shared outside the lock.
    pub unshare: Vec<(usize, usize)>,
    /// Relocated tables that have not been looked at yet: see `relocated`.
    pub relocated: Vec<(usize, usize)>,
    /// Read-only memory on its way out: see `read_only`.
    pub(crate) leaving: Leaving,
    /// Scratch list of free runs of frames that are being given back.
    pub giving: Vec<(u32, u8)>,
    /// Pages that mremap moved while they were being compressed: slot, and new page number. `commit` looks here.
    pub moved_busy: Vec<(u32, u64)>,
    /// Slots of pages that were dropped or taken back while they were being compressed: `commit` frees them.
    pub left_busy: Vec<u32>,
    /// Dropped pages of that kind that are not counted yet.
    pub missed_frees: u64,
    /// Sequential access streams.
    pub streams: Streams,
    /// The pages faulted on last, the latest first: see `stage`.
    pub(crate) touched: [u64; 16],
    /// On which CPU the program faults, and which thread reclaims.
    pub placement: Placement,
    /// How far recompression has got.
    pub sweep: Sweep,
    /// The configured compressor.
    pub algorithm: Algorithm,
    /// Order of the largest folio: what leaves at once must be small against the limit.
    pub folio_max: u8,
    /// Order of the largest unit of compression for which the process's share has room, and whose compressor it can afford.
    pub unit_max: u8,
    /// Order of the largest unit whose compressor it can afford, whatever its share.
    unit_affordable: u8,
    /// Order of the largest block so far; at least the usual one.
    pub largest_block: u8,
    /// Blocks of more than 64 KiB that have lost most of their pages: see `cut`.
    pub sparse: Vec<shrinker::Entry>,
    /// Blocks (handles) of which a partial read left pages behind; at most [`LEFT_MOST`].
    pub left_behind: BTreeSet<u32>,
    /// How often reclaim passed over a folio that is in use: see `heat`.
    pub passed_over: u64,
    /// Buffers for reclaim in the fault path.
    pub direct: Option<Box<Batch>>,
    /// What is in the swap file, if there is one.
    pub swap: Option<Box<Swap>>,
    /// Records events, if they are recorded.
    pub recorder: Option<Recorder>,
    /// The number of the fork under way, which the child reports as its origin.
    pub fork_number: u64,
    /// Pages on disk that the handler must bring in although nobody touched them: see `letgo`.
    pub asked: Vec<u64>,
    /// Whether soft-dirty bits were ever cleared: from then on there are clean pages, which are write-protected.
    pub tracking: bool,
    /// The client that is told of writes to protected pages, while any page is protected: see `notify`.
    pub notified: Option<Box<Notified>>,
    /// The pages that were soft-dirty when bits were last cleared.
    pub cleared: Option<MapFile>,
    /// When the unevictable list was last tried again (monotonic nanoseconds).
    pub rescued_ns: u64,
    /// How often that was put off since.
    pub put_off: u32,
    /// What did not compress, and is tried again later: see `incompressible`.
    pub(crate) retries: Retries,
    /// Whether the lock's owner has stopped the program's mapping calls: see `without_move`.
    pub calls_stopped: bool,
    /// Memory that the program is moving, and what is left to do for it: see `remapped`.
    pub remapping: Remapping,
    /// Lost pages that do not raise SIGBUS yet: see `lost`.
    pub lost: Vec<u64>,
}

impl State {
    /// Empty tables over a layout; `rule` is the compaction policy.
    pub fn new(layout: Layout, algorithm: Algorithm, rule: Rule) -> Self {
        let mut zone = Zone::new(layout.slots);
        zone.keep_ready(READY_FRAMES);
        Self {
            layout,
            pt: PageTable::new(),
            page_map: None,
            lru: Lru::default(),
            runs_wanted: false,
            windows: 0..0,
            compacted: Counted::default(),
            compactor: Compactor::new(rule.policy()),
            zone,
            pool: ZsPool::new(arena::POOL_BYTES - (4 << 20)),
            pool_rest: 0,
            pool_stuck: usize::MAX / 2,
            pool_looks: 0,
            decompressor: Decompressor::new(),
            decoded: (0..4)
                .map(|_| Decoded { handle: None, bytes: Vec::new(), pages: 0, vpn: 0, fresh: false })
                .collect(),
            decoded_next: 0,
            probes: 0,
            scratch: Vec::new(),
            stamp: 0,
            evictions: 0,
            resident: 0,
            staged: 0,
            busy: 0,
            swapped: 0,
            zeros: 0,
            rss: 0,
            pinned: Vec::new(),
            excluded: Vec::new(),
            advice: Advice::default(),
            huge_due: 0,
            managed: Ranges::default(),
            exclusive: Exclusive::default(),
            hooks: [0..0, 0..0],
            ceded: Vec::new(),
            withdrawn: Vec::new(),
            keeps_all: false,
            unshare: Vec::new(),
            relocated: Vec::new(),
            leaving: Leaving::default(),
            giving: Vec::new(),
            asked: Vec::new(),
            moved_busy: Vec::new(),
            left_busy: Vec::new(),
            missed_frees: 0,
            streams: Streams::default(),
            touched: [u64::MAX; 16],
            placement: Placement::new(),
            sweep: Sweep::default(),
            algorithm,
            folio_max: MAX_ORDER,
            unit_max: MAX_ORDER,
            unit_affordable: MAX_ORDER,
            largest_block: USUAL_UNIT,
            sparse: Vec::new(),
            left_behind: BTreeSet::new(),
            passed_over: 0,
            direct: None,
            swap: None,
            recorder: None,
            fork_number: 0,
            tracking: false,
            notified: None,
            cleared: None,
            rescued_ns: 0,
            put_off: 0,
            retries: Retries::default(),
            calls_stopped: false,
            remapping: Remapping::default(),
            lost: Vec::new(),
        }
    }

    /// Bounds folios and units by a limit (bytes).
    pub fn size_folios(&mut self, limit: usize) {
        self.unit_affordable = largest_unit(self.algorithm, bound(limit), limit);
        self.bound_folios(limit, limit);
    }

    /// Bounds folios by the `room` that this process has (bytes), and units by its `share`. A folio is at most a 64th of the
    /// room, as its compressed units wait in a buffer until the whole of it can be stored. A unit is at most a 64th of the share,
    /// even where the share is ample, as it is in memory twice meanwhile: as it was, and compressed.
    ///
    /// The story: each of 32 processes under 160 MiB listed the memory that it had when it became managed as folios of 2 MiB, as
    /// one alone would. Some had two buffers for such folios, of the 5 MiB that were their share. Eight processes with units of 2
    /// MiB had 10 to 17 MiB of buffers, and have 4 since.
    pub fn bound_folios(&mut self, room: usize, share: usize) {
        self.folio_max = bound(room);
        self.unit_max = self.unit_affordable.min(bound(share));
    }

    /// Records an event, if events are recorded.
    #[inline]
    pub fn note(&self, record: Record) {
        if let Some(recorder) = &self.recorder {
            recorder.note(record);
        }
    }

    /// Records an event about `n` pages, if events are recorded.
    #[inline]
    pub fn note_pages(&self, kind: trace::Kind, vpn: u64, n: usize) {
        if let Some(recorder) = &self.recorder {
            recorder.note_pages(kind, vpn, n);
        }
    }

    /// Makes a compressor as configured, for one thread.
    pub fn new_compressor(&self) -> Compressor {
        Compressor::new(self.algorithm)
    }

    /// The whole object of a handle, header first.
    ///
    /// The slice does not borrow the state, so that the caller can change tables while it looks at it. Drop it before the object
    /// is freed or the lock released.
    pub fn object<'a>(&self, handle: u32) -> &'a mut [u8] {
        let (offset, pool) = (Handle::from_raw(handle).offset(), self.layout.pool as *mut u8);
        // SAFETY: handles in page-table entries are live objects, and the lock is held (self is borrowed). The header is read
        // first, to learn the length.
        unsafe {
            let head = Header::read(core::slice::from_raw_parts(pool.add(offset), object::HEADER_BYTES));
            core::slice::from_raw_parts_mut(pool.add(offset), object::head_bytes(head.order) + head.len)
        }
    }

    /// The record behind the bytes of an object that is also on disk.
    pub(crate) fn behind_object(&self, handle: u32) -> [u8; OnDisk::BYTES] {
        let end = Handle::from_raw(handle).offset() + self.object(handle).len();
        // SAFETY: such an object was allocated with room for the record, and the lock is held (self is borrowed).
        unsafe { self.layout.pool(end, OnDisk::BYTES) }.try_into().unwrap_or_default()
    }

    /// Drops page `index`'s reference to an object, and to its place on disk if it has one; frees each with its last reference.
    ///
    /// # Panics
    /// When the page did not refer to the object.
    pub fn release(&mut self, handle: u32, index: usize) {
        let on_disk = self.on_disk(handle);
        self.release_object(handle, index);
        if let Some(at) = on_disk {
            self.release_kept(at, index);
        }
    }

    /// Drops page `index`'s reference to an object, and frees it with the last. The caller sees to its place on disk.
    ///
    /// # Panics
    /// When the page did not refer to the object.
    pub(crate) fn release_object(&mut self, handle: u32, index: usize) {
        let object = self.object(handle);
        let any_left = object::leave(object, index);
        if any_left {
            self.note_sparse(handle);
        }
        if !any_left {
            for d in self.decoded.iter_mut().filter(|d| d.handle == Some(handle)) {
                d.handle = None;
            }
            self.left_behind.remove(&handle);
            if let Some(freed) = self.pool.free(Handle::from_raw(handle)) {
                self.rss = self.rss.saturating_sub(freed.len);
                // SAFETY: the pool says that the range holds no object any more.
                unsafe { arena::discard(self.layout.pool + freed.offset, freed.len) };
            }
        }
    }

    /// Forgets a page whose entry was `pte` and has been replaced, and frees what the entry held.
    pub fn forget(&mut self, vpn: u64, pte: Pte) {
        match pte.tag() {
            Tag::None | Tag::Poisoned => {}
            Tag::Zero => self.zeros -= 1,
            Tag::Compressed => {
                self.swapped -= 1;
                self.release(pte.handle(), pte.index());
            }
            Tag::Disk => self.leave_disk(pte.handle(), 1 << pte.index()),
            Tag::Resident => self.resident -= 1,
            // A Busy page's slot belongs to the thread that compresses it, which gives it back.
            Tag::Busy => {
                self.leave_busy(pte.aux());
                self.missed_frees += 1;
            }
            Tag::Staged => {
                self.staged -= 1;
                self.zone.free(Kind::Frame, pte.aux(), 0);
            }
        }
        if let Some(handle) = pte.copy() {
            self.release(handle, self.copy_index(vpn, handle));
        }
    }

    /// Gives back those pages of the published map that describe only forgotten pages.
    pub fn tidy_page_map(&mut self) {
        let Some(table) = self.page_map else { return };
        for n in self.pt.take_emptied() {
            // SAFETY: the map is in the pager as long as it is published, and only the lock's holder writes to it.
            unsafe { mapfile::give_back(table, n) };
        }
    }

    /// Ends the compression of `n` pages that are out of the arena, or in the program again.
    pub fn end_busy(&mut self, n: usize) {
        self.busy -= n;
        self.staged -= n;
    }

    /// Notes that the page in a slot was dropped or taken back while it was being compressed. The slot stays the compressing
    /// thread's, which gives it back.
    pub fn leave_busy(&mut self, slot: u32) {
        self.end_busy(1);
        self.left_busy.push(slot);
    }

    /// Number of staged pages that are not being compressed yet.
    pub fn idle_staged(&self) -> usize {
        self.staged - self.busy
    }

    /// The index of a page in its kept copy. (Copies are kept only where the object is aligned to its pages.)
    pub fn copy_index(&self, vpn: u64, handle: u32) -> usize {
        let order = object::order(self.object(handle));
        (vpn & ((1 << order) - 1)) as usize
    }

    /// Whether pages may have to come in write-protected.
    pub fn protects(&self) -> bool {
        self.tracking || self.notified.is_some()
    }

    /// Whether the program can write to a page without a fault that reports it.
    pub fn is_writable_unseen(&self, vpn: u64) -> bool {
        !self.pt.is_protected(vpn)
    }

    /// Whether the table knows any page between two addresses.
    pub fn knows_any(&self, start: usize, end: usize) -> bool {
        self.pt.next_used((start / PAGE) as u64).is_some_and(|vpn| vpn < (end / PAGE) as u64)
    }

    /// Bytes of memory accounted for: in the program, staged, free frames, and the pool.
    pub fn known_bytes(&self) -> usize {
        (self.resident + self.staged + self.zone.free_slots(Kind::Frame)) * PAGE + self.pool.held_bytes()
    }

    /// Stores an object that the pages `live` refer to in the pool; `hashes` writes the hashes of its pages. None when the pool
    /// is full.
    pub fn put_object(
        &mut self,
        head: Header,
        live: PageSet,
        hashes: impl FnOnce(&mut [u8]),
        bytes: &[u8],
    ) -> Option<Handle> {
        self.put_object_on_disk(head, live, hashes, bytes, None)
    }

    /// As [`State::put_object`], for an object that may also be on disk.
    pub(crate) fn put_object_on_disk(
        &mut self,
        head: Header,
        live: PageSet,
        hashes: impl FnOnce(&mut [u8]),
        bytes: &[u8],
        on_disk: Option<OnDisk>,
    ) -> Option<Handle> {
        let at = object::head_bytes(head.order);
        let (end, held) = (at + bytes.len(), self.pool.held_bytes());
        let len = end + if on_disk.is_some() { OnDisk::BYTES } else { 0 };
        let handle = self.pool.alloc(len)?;
        self.largest_block = self.largest_block.max(head.order);
        self.rss += self.pool.held_bytes() - held;
        // SAFETY: the object was just allocated, and the lock is held (self is borrowed).
        let place = unsafe { self.layout.pool(handle.offset(), len) };
        let flag = if on_disk.is_some() { object::ON_DISK } else { 0 };
        Header { flags: head.flags & !object::ON_DISK | flag, ..head }.write(place);
        object::set_live(place, live);
        hashes(place);
        place[at..end].copy_from_slice(bytes);
        if let Some(on_disk) = on_disk {
            place[end..].copy_from_slice(&on_disk.to_bytes());
        }
        Some(handle)
    }

    /// A buffer of `len` bytes with arbitrary contents, valid until the next call.
    pub fn scratch(&mut self, len: usize) -> &mut [u8] {
        if self.scratch.len() < len {
            self.scratch = vec![0; len];
        }
        &mut self.scratch[..len]
    }

    /// Takes the fault path's own batch; put it back into `direct`.
    pub fn take_direct(&mut self) -> Box<Batch> {
        self.direct.take().unwrap_or_else(|| Box::new(Batch::new(Compressor::new(self.algorithm))))
    }

    /// Bytes of the pager's own tables.
    pub fn metadata_bytes(&self) -> usize {
        self.pt.metadata_bytes()
            + self.lru.metadata_bytes()
            + self.zone.metadata_bytes()
            + self.compactor.metadata_bytes()
            + self.pool.metadata_bytes()
            + self.swap.as_ref().map_or(0, |swap| swap.metadata_bytes())
            + self.decoded.iter().map(|d| d.bytes.capacity()).sum::<usize>()
            + self.scratch.capacity()
    }
}

/// The order of a 64th of so many bytes, between 64 KiB and 2 MiB.
fn bound(room: usize) -> u8 {
    (room / PAGE / 64).max(BLOCK_PAGES).ilog2().min(u32::from(MAX_ORDER)) as u8
}

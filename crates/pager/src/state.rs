//! What the pager's lock protects: the engine's tables, and the few operations on them that every path needs.
//!
//! Everything here runs with it held (see `pager` for the order of locks) and allocates only there, and the agent's
//! allocator lock nests inside it: a thread that forks with it held leaves both consistent in the child.

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

/// Frames that were freed last and are not merged: see `uzswap_mm::zone`.
const READY_FRAMES: usize = 64;
/// Bytes of the largest block that nobody asked for.
pub const BLOCK: usize = PAGE << USUAL_UNIT;
/// Pages of it.
pub const BLOCK_PAGES: usize = BLOCK / PAGE;

/// Pages of the largest folio.
pub const FOLIO_PAGES: usize = 1 << MAX_ORDER;
/// Blocks remembered as partly read at most.
pub const LEFT_MOST: usize = 4096;

/// A decompressed block kept for the neighbours of a page: a block is decompressed once.
pub struct Decoded {
    /// The object, None when the buffer holds nothing.
    pub handle: Option<u32>,
    /// Its pages, of which the first `pages` were decompressed. (Grows to the largest block there was.)
    pub bytes: Vec<u8>,
    /// Pages.
    pub pages: usize,
    /// Where its first page is in the program.
    pub vpn: u64,
    /// Whether this fault decompressed it.
    pub fresh: bool,
}

/// The tables.
pub struct State {
    /// Where memory is.
    pub layout: Layout,
    /// State of every page.
    pub pt: PageTable,
    /// Where its states are published, if pages of that go back to the kernel: see `mapfile`.
    pub page_map: Option<usize>,
    /// Lists of resident and staged folios.
    pub lru: Lru,
    /// Slots of the arena.
    pub zone: Zone,
    /// Whether a large run of holes was wanted and not found.
    pub runs_wanted: bool,
    /// Holes that the next windows go to: see `window`.
    pub windows: Range<u32>,
    /// Compaction of them.
    pub compactor: Compactor<Chosen>,
    /// What it had counted when that was last added to the member's counters.
    pub compacted: Counted,
    /// Places in the pool.
    pub pool: ZsPool,
    /// Waste that compaction of the pool could not free (bytes).
    pub pool_rest: usize,
    /// Free pages in its page blocks when those could not be emptied any further.
    pub pool_stuck: usize,
    /// Times it was asked whether they should be.
    pub pool_looks: u32,
    /// Decompresses for faults.
    pub decompressor: Decompressor,
    /// Blocks decompressed lately, round robin.
    pub decoded: Vec<Decoded>,
    /// Next of `decoded` to reuse.
    pub decoded_next: usize,
    /// Deliveries to blocks that are written to: see `deliver`.
    pub probes: u32,
    /// A buffer for swap-ins that find no free frame: see [`State::scratch`].
    scratch: Vec<u8>,
    /// Birth stamp of folios.
    pub stamp: u32,
    /// Evictions so far (pages, wrapping at 21 bits): the clock of refault distance.
    pub evictions: u32,
    /// Pages known to be in the program.
    pub resident: usize,
    /// Pages staged or being compressed.
    pub staged: usize,
    /// Those of them that are being compressed.
    pub busy: usize,
    /// Pages in the pool whose page is out.
    pub swapped: usize,
    /// Pages evicted as zeros.
    pub zeros: usize,
    /// RssAnon of this process when last read, corrected by what was taken and given since (bytes).
    pub rss: usize,
    /// Ranges that must stay out for good: the first thread's TLS, what the loader mapped.
    pub pinned: Vec<(usize, usize)>,
    /// Ranges that must stay out while they are mapped as they are: thread stacks.
    pub excluded: Vec<(usize, usize)>,
    /// Which memory the program wants as huge pages, and which not: see `thp`.
    pub advice: Advice,
    /// The fault (as `pgfault` counts them) from which on a huge page is asked for again that the kernel did not have.
    pub huge_due: u64,
    /// Ranges registered, as they were found.
    pub managed: Ranges,
    /// What this process has alone, since a fork.
    pub(crate) exclusive: Exclusive,
    /// Pages of the thread that forked which it writes to until it gives the lock back, in the child.
    pub(crate) hooks: [core::ops::Range<usize>; 2],
    /// Ranges that the program has registered with a userfaultfd of its own, or had once: see `ceded`.
    pub ceded: Vec<(usize, usize)>,
    /// Ranges of pages that were ceded: faults on them that were read before are no longer this pager's.
    pub withdrawn: Vec<(u64, u64)>,
    /// Whether nothing is to be taken out for what the lock's owner brings.
    pub keeps_all: bool,
    /// Ranges whose frames are shared after fork: to be un-shared outside the lock.
    pub unshare: Vec<(usize, usize)>,
    /// Tables that the linker relocated, and that nobody has looked at yet: see `relocated`.
    pub relocated: Vec<(usize, usize)>,
    /// What is read-only and to leave: see `read_only`.
    pub(crate) leaving: Leaving,
    /// Free runs of frames that are given back: room for them.
    pub giving: Vec<(u32, u8)>,
    /// Pages moved by mremap while they were being compressed: slot, and where they are now. `commit` asks.
    pub moved_busy: Vec<(u32, u64)>,
    /// Slots of pages that were dropped or taken back while they were compressed: `commit` frees them.
    pub left_busy: Vec<u32>,
    /// Pages dropped so that are not yet counted.
    pub missed_frees: u64,
    /// Faults that run in sequence.
    pub streams: Streams,
    /// Pages that were faulted on last, the last one first: see `stage`.
    pub(crate) touched: [u64; 16],
    /// Where faults come from, and who reclaims.
    pub placement: Placement,
    /// Where recompression is.
    pub sweep: Sweep,
    /// The agreed compressor.
    pub algorithm: Algorithm,
    /// Order of the largest folio: what leaves at once must be little against the limit.
    pub folio_max: u8,
    /// Order of the largest unit of compression that a process's share has room for, and whose compressor can be afforded.
    pub unit_max: u8,
    /// Order of the largest one whose compressor can be, whatever the share.
    unit_affordable: u8,
    /// Order of the largest block there was; the usual one at least.
    pub largest_block: u8,
    /// Blocks of more than 64 KiB most of whose pages have gone: see `cut`.
    pub sparse: Vec<shrinker::Entry>,
    /// Blocks of which a partial read left something behind (handles; at most [`LEFT_MOST`]).
    pub left_behind: BTreeSet<u32>,
    /// Times that a folio was passed over as it is in use: see `heat`.
    pub passed_over: u64,
    /// Buffers of the fault path's own reclaim.
    pub direct: Option<Box<Batch>>,
    /// What is in the swap file, where there is one.
    pub swap: Option<Box<Swap>>,
    /// Where events are noted, when they are.
    pub recorder: Option<Recorder>,
    /// The number of the fork under way: what the child says it was born of.
    pub fork_number: u64,
    /// Pages on disk that the handler is to bring though nobody has touched them: see `letgo`.
    pub asked: Vec<u64>,
    /// Whether soft-dirty bits were ever cleared: from then on there are clean pages, which are write-protected.
    pub tracking: bool,
    /// Who is told of writes to protected pages, while any page is protected: see `notify`.
    pub notified: Option<Box<Notified>>,
    /// The pages that were soft-dirty when bits were last cleared.
    pub cleared: Option<MapFile>,
    /// When what was unevictable was last tried again (monotonic nanoseconds).
    pub rescued_ns: u64,
    /// How many times since then it was put off.
    pub put_off: u32,
    /// What did not compress, and is tried again: see `incompressible`.
    pub(crate) retries: Retries,
    /// Whether the lock's owner keeps the program's mapping calls from running: see `without_move`.
    pub calls_stopped: bool,
    /// Memory that the program is moving, and what is to be done about it: see `remapped`.
    pub remapping: Remapping,
    /// Pages that are lost and not yet made to raise SIGBUS: see `lost`.
    pub lost: Vec<u64>,
}

impl State {
    /// Empty tables over a layout, which is compacted by a rule.
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

    /// Bounds folios by what there is for this process (bytes): one is a 64th of it at most, as what is compressed of a whole one waits in
    /// a buffer until it can be stored. And units by its share: one is in memory twice meanwhile, compressed and as it was, whoever has
    /// an ample share.
    ///
    /// The story: of 32 processes under 160 MiB each listed what it had when it was managed as folios of 2 MiB, as one alone would, and
    /// some had two buffers for them, of the 5 MiB that were their share. Eight with units of 2 MiB
    /// had 10 to 17 MiB of buffers, and have 4 since.
    pub fn bound_folios(&mut self, room: usize, share: usize) {
        self.folio_max = bound(room);
        self.unit_max = self.unit_affordable.min(bound(share));
    }

    /// Notes an event, when events are recorded.
    #[inline]
    pub fn note(&self, record: Record) {
        if let Some(recorder) = &self.recorder {
            recorder.note(record);
        }
    }

    /// Notes something of `n` pages, when events are recorded.
    #[inline]
    pub fn note_pages(&self, kind: trace::Kind, vpn: u64, n: usize) {
        if let Some(recorder) = &self.recorder {
            recorder.note_pages(kind, vpn, n);
        }
    }

    /// A compressor as agreed, for one thread.
    pub fn new_compressor(&self) -> Compressor {
        Compressor::new(self.algorithm)
    }

    /// The whole object of a handle, header first.
    ///
    /// The slice is not tied to the state, so that tables can change while it is looked at: it must be dropped before
    /// the object is freed or the lock released.
    pub fn object<'a>(&self, handle: u32) -> &'a mut [u8] {
        let (offset, pool) = (Handle::from_raw(handle).offset(), self.layout.pool as *mut u8);
        // SAFETY: handles in page-table entries are live objects, and the lock is held (self is borrowed). The header
        // is read first, to learn the length.
        unsafe {
            let head = Header::read(core::slice::from_raw_parts(pool.add(offset), object::HEADER_BYTES));
            core::slice::from_raw_parts_mut(pool.add(offset), object::head_bytes(head.order) + head.len)
        }
    }

    /// What stands behind the bytes of an object that is on disk too.
    pub(crate) fn behind_object(&self, handle: u32) -> [u8; OnDisk::BYTES] {
        let end = Handle::from_raw(handle).offset() + self.object(handle).len();
        // SAFETY: such an object was allocated with room for it, and the lock is held (self is borrowed).
        unsafe { self.layout.pool(end, OnDisk::BYTES) }.try_into().unwrap_or_default()
    }

    /// Ends the reference of page `index` to an object, and to its place on disk if it has one; frees it with the last.
    ///
    /// # Panics
    /// When the page did not refer to it.
    pub fn release(&mut self, handle: u32, index: usize) {
        let on_disk = self.on_disk(handle);
        self.release_object(handle, index);
        if let Some(at) = on_disk {
            self.release_kept(at, index);
        }
    }

    /// Ends the reference of page `index` to an object, whose place on disk is seen to; frees it with the last.
    ///
    /// # Panics
    /// When the page did not refer to it.
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
                // SAFETY: the pool says that no object is left in the range.
                unsafe { arena::discard(self.layout.pool + freed.offset, freed.len) };
            }
        }
    }

    /// Forgets what was known of a page whose entry was `pte` and has been replaced: frees what it held.
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

    /// What is published of pages that are forgotten takes no memory.
    pub fn tidy_page_map(&mut self) {
        let Some(table) = self.page_map else { return };
        for n in self.pt.take_emptied() {
            // SAFETY: the map is in the pager as long as it is published; who writes to it has the lock.
            unsafe { mapfile::give_back(table, n) };
        }
    }

    /// `n` pages that were being compressed are out of the arena, or in the program again.
    pub fn end_busy(&mut self, n: usize) {
        self.busy -= n;
        self.staged -= n;
    }

    /// The page in a slot was dropped or taken back while it is compressed: the slot is that thread's, who gives it back.
    pub fn leave_busy(&mut self, slot: u32) {
        self.end_busy(1);
        self.left_busy.push(slot);
    }

    /// Pages staged that nobody compresses yet.
    pub fn idle_staged(&self) -> usize {
        self.staged - self.busy
    }

    /// The index of a page in its kept copy (copies are kept only where the object is aligned to its pages).
    pub fn copy_index(&self, vpn: u64, handle: u32) -> usize {
        let order = object::order(self.object(handle));
        (vpn & ((1 << order) - 1)) as usize
    }

    /// Whether there may be pages that come in write-protected.
    pub fn protects(&self) -> bool {
        self.tracking || self.notified.is_some()
    }

    /// Whether a page can be written to without anybody's being told first.
    pub fn is_writable_unseen(&self, vpn: u64) -> bool {
        !self.pt.is_protected(vpn)
    }

    /// Whether anything is known of a page between two addresses.
    pub fn knows_any(&self, start: usize, end: usize) -> bool {
        self.pt.next_used((start / PAGE) as u64).is_some_and(|vpn| vpn < (end / PAGE) as u64)
    }

    /// Bytes of memory that are accounted for: in the program, staged, free frames, and the pool.
    pub fn known_bytes(&self) -> usize {
        (self.resident + self.staged + self.zone.free_slots(Kind::Frame)) * PAGE + self.pool.held_bytes()
    }

    /// Stores an object in the pool, to which the pages `live` refer: `hashes` writes those of its pages. None when the pool is
    /// full.
    pub fn put_object(
        &mut self,
        head: Header,
        live: PageSet,
        hashes: impl FnOnce(&mut [u8]),
        bytes: &[u8],
    ) -> Option<Handle> {
        self.put_object_on_disk(head, live, hashes, bytes, None)
    }

    /// The same of an object that may be on disk too.
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

    /// A buffer of `len` bytes, holding anything, until it is asked for again.
    pub fn scratch(&mut self, len: usize) -> &mut [u8] {
        if self.scratch.len() < len {
            self.scratch = vec![0; len];
        }
        &mut self.scratch[..len]
    }

    /// The fault path's own batch, to be put back with `direct`.
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

/// The order of what is a 64th of so many bytes, of 64 KiB to 2 MiB.
fn bound(room: usize) -> u8 {
    (room / PAGE / 64).max(BLOCK_PAGES).ilog2().min(u32::from(MAX_ORDER)) as u8
}

//! A pager for unit tests: real memory, a real userfaultfd, no threads.

mod alone;
mod scribble;

pub(crate) use alone::{by_itself, skip};
pub(crate) use scribble::{Scribbler, within};

use crate::frames::arena::{Layout, PAGE};
use crate::group::GroupPage;
use crate::pager::Pager;
use crate::pool::object::{self, Header};
use crate::state::State;
use crate::swap::clusters::{ClusterMap, IN_THE_CLEAR};
use crate::trace::Rings;
use core::sync::atomic::Ordering::*;
use uzswap_mm::codec::{Algorithm, Compressor, Encoding};
use uzswap_mm::lru::{Entry, Ring};
use uzswap_mm::pageset::PageSet;
use uzswap_mm::pagetable::{Pte, Tag};
use uzswap_sys::process::Identity;
use uzswap_sys::uffd::{self, Uffd};
use uzswap_sys::{raw, sys};

/// A pager with a limit in bytes, whose arena is registered.
pub(crate) fn pager(limit: usize) -> &'static Pager {
    Box::leak(Box::new(limited(limit, false)))
}

/// The same, but it tracks which pages are written to.
pub(crate) fn tracking_pager(limit: usize) -> &'static Pager {
    Box::leak(Box::new(limited(limit, true)))
}

/// The same, but it gets events when its memory is moved.
pub(crate) fn pager_told_of_moves(limit: usize) -> &'static Pager {
    let group = group();
    group.nodes[0].max.store(limit as u64, Relaxed);
    Box::leak(Box::new(make(group, 0, limit, crate::pager::FEATURES | uffd::FEATURE_WRITE_PROTECT)))
}

fn limited(limit: usize, tracks: bool) -> Pager {
    let group = group();
    group.nodes[0].max.store(limit as u64, Relaxed);
    let mut pager = make(group, 0, limit, if tracks { uffd::FEATURE_WRITE_PROTECT } else { 0 });
    pager.tracks = tracks;
    pager
}

/// A tree whose root has no limits.
pub(crate) fn group() -> &'static GroupPage {
    // SAFETY: the page is atomics, for which zeros are valid.
    let group: Box<GroupPage> = unsafe { Box::new_zeroed().assume_init() };
    group.set_up(b"test");
    Box::leak(group)
}

/// The same with the books of a swap file of 64 MiB, to which nothing can be written.
pub(crate) fn pager_with_swap(limit: usize) -> &'static Pager {
    let group = group();
    group.nodes[0].max.store(limit as u64, Relaxed);
    let mut pager = member(group, 0, limit);
    pager.swap_to(books());
    Box::leak(Box::new(pager))
}

/// Books of a swap file of 64 MiB, all of it preallocated.
pub(crate) fn books() -> &'static ClusterMap {
    // SAFETY: atomics, as above.
    let map: Box<ClusterMap> = unsafe { Box::new_zeroed().assume_init() };
    let settings = [(&map.max_pool_percent, 60), (&map.accept_threshold_percent, 90), (&map.clear, IN_THE_CLEAR)];
    settings.iter().for_each(|(setting, value)| setting.store(*value, Relaxed));
    [&map.bytes, &map.allocated].iter().for_each(|bytes| bytes.store(64 << 20, Relaxed));
    Box::leak(map)
}

/// A member of a group, with an arena for a limit in bytes.
pub(crate) fn member(group: &'static GroupPage, node: usize, limit: usize) -> Pager {
    make(group, node, limit, 0)
}

fn make(group: &'static GroupPage, node: usize, limit: usize, features: u64) -> Pager {
    let layout = Layout::reserve(limit).expect("address space");
    let pager = Pager::new(group, node, layout).expect("a slot");
    let (uffd, _) = Uffd::open(features).expect("tests of the pager need access to userfaultfd");
    uffd.register_as_target(layout.arena, layout.slots * PAGE).expect("the arena");
    keep_from_children(layout.arena, layout.slots * PAGE);
    pager.uffd.store(uffd.fd(), Relaxed);
    pager.files.pagemap.store(raw::open(b"/proc/thread-self/pagemap\0", libc::O_RDONLY).expect("pagemap"), Relaxed);
    pager.files.maps.store(raw::open(b"/proc/thread-self/maps\0", libc::O_RDONLY).expect("maps"), Relaxed);
    pager
}

/// Memory like a program's, registered with the pager; returns its address.
pub(crate) fn memory(pager: &Pager, pages: usize) -> usize {
    memory_at(pager, 0, pages)
}

/// The same at `place`, where nothing may be, if that is not 0.
pub(crate) fn memory_at(pager: &Pager, place: usize, pages: usize) -> usize {
    let (rw, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, or (fixed) one over another that was just made.
    let map = |place: usize, pages: usize, prot: i32, fixed: i32| unsafe {
        sys!(libc::SYS_mmap, place, pages * PAGE, prot, flags | fixed, -1isize, 0).expect("memory")
    };
    let at = match place {
        // Between two pages that are nobody's: otherwise pages brought ahead of a sequence would be zeros in another test's
        // memory, as COPY fills missing pages whoever has registered them.
        0 => map(map(0, pages + 2, libc::PROT_NONE, 0) + PAGE, pages, rw, libc::MAP_FIXED),
        place => map(place, pages, rw, libc::MAP_FIXED_NOREPLACE),
    };
    // SAFETY: advice on this memory. (Pages are moved one by one here.)
    unsafe { sys!(libc::SYS_madvise, at, pages * PAGE, libc::MADV_NOHUGEPAGE) }.expect("advice");
    pager.register(at, pages * PAGE).expect("the memory");
    keep_from_children(at, pages * PAGE);
    at
}

/// Keeps the memory from a child that a test beside this one forks. Memory shared with it could not be moved out, and nobody
/// un-shares it here (a test was in a loop forever).
fn keep_from_children(at: usize, len: usize) {
    // SAFETY: advice on memory of a test.
    unsafe { sys!(libc::SYS_madvise, at, len, libc::MADV_DONTFORK) }.expect("advice");
}

/// Lets children have `pages` of such memory.
pub(crate) fn let_inherit(at: usize, pages: usize) {
    // SAFETY: as above.
    unsafe { sys!(libc::SYS_madvise, at, pages * PAGE, libc::MADV_DOFORK) }.expect("advice");
}

/// Runs `act` while a child shares this process's memory.
///
/// The story: the child waited for a pipe to be closed. Two children that two tests forked at once had each other's ends, and
/// waited forever.
pub(crate) fn beside_a_child<T>(act: impl FnOnce() -> T) -> T {
    // SAFETY: the child waits by system calls alone until it is killed: below, or when the thread that made it ends.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "a child");
    if child == 0 {
        // SAFETY: as above.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            loop {
                libc::pause();
            }
        }
    }
    let done = act();
    // SAFETY: a child of ours, which nobody else waits for.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        assert_eq!(libc::waitpid(child, core::ptr::null_mut(), 0), child);
    }
    done
}

/// Whether the kernel has a present page there that is write-protected for us (bits 63 and 57 of its pagemap).
pub(crate) fn is_protected(p: &Pager, vpn: u64) -> bool {
    let mut word = [0; 8];
    assert_eq!(raw::pread(p.files.pagemap.load(Relaxed), &mut word, vpn * 8), Ok(8));
    let word = u64::from_le_bytes(word);
    assert!(word >> 63 == 1, "page {vpn:#x} is not there");
    word >> 57 & 1 == 1
}

/// Empty rings for records, which are never freed.
pub(crate) fn rings() -> &'static Rings {
    let layout = core::alloc::Layout::new::<Rings>();
    // SAFETY: zero bytes are empty rings; the memory is never freed.
    unsafe { &*std::alloc::alloc_zeroed(layout).cast::<Rings>() }
}

/// A process that has ended, and was waited for.
pub(crate) fn dead_process() -> Identity {
    let mut child = std::process::Command::new("true").spawn().expect("a process");
    let dead = Identity::from_raw(child.id().into()).expect("a pid");
    child.wait().expect("it ends");
    dead
}

/// Makes so many pages seem resident, any of which may be evicted next.
pub(crate) fn seem_resident(s: &mut State, pages: usize) {
    s.resident = pages;
    s.lru.inactive = Ring::default();
    (0..pages as u64).for_each(|vpn| s.lru.inactive.push(Entry::new(vpn, 0, 0)));
}

/// Gives a missing page at `at` its contents, by COPY, as nobody serves faults here.
pub(crate) fn put(pager: &Pager, at: usize, content: &[u8; PAGE]) {
    // SAFETY: the content is readable.
    unsafe { pager.uffd().copy(at, content.as_ptr() as usize, PAGE) }.expect("a missing page");
}

/// As [`memory`], with the pages present but on no list yet; returns the address.
pub(crate) fn filled(pager: &Pager, pages: usize) -> usize {
    let at = memory(pager, pages);
    (0..pages).for_each(|page| put(pager, at + page * PAGE, &[7; PAGE]));
    at
}

/// A page's contents: words, different for each page, which zstd makes smaller than lz4.
pub(crate) fn words(vpn: u64) -> [u8; PAGE] {
    const WORDS: [&[u8]; 8] =
        [b"memory ", b"of ", b"the page ", b"faults ", b"kernel, ", b"swapped ", b"in ", b"again. "];
    let mut x = vpn.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let (mut page, mut at) = ([0; PAGE], 0);
    while at < PAGE {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        let word = WORDS[(x >> 40) as usize % 8];
        let n = word.len().min(PAGE - at);
        page[at..at + n].copy_from_slice(&word[..n]);
        at += n;
    }
    page
}

/// A page's contents: noise, different for each page, which does not compress.
pub(crate) fn noise(vpn: u64) -> [u8; PAGE] {
    let mut x = vpn.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    core::array::from_fn(|_| {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 56) as u8
    })
}

/// The same with half of it zeros, which no codec makes smaller than another.
pub(crate) fn half_noise(vpn: u64) -> [u8; PAGE] {
    let mut page = noise(vpn);
    page[PAGE / 2..].fill(0);
    page
}

/// The same with a quarter of it zeros.
pub(crate) fn mostly_noise(vpn: u64) -> [u8; PAGE] {
    let mut page = noise(vpn);
    page[PAGE / 4 * 3..].fill(0);
    page
}

/// Runs a test with a pager of 128 MiB and a helper that has joined; not on a machine with one CPU.
pub(crate) fn with_helper(test: impl FnOnce(&'static Pager, &mut State)) {
    let p = pager(128 << 20);
    let mut s = p.state.lock();
    if p.helpers_wanted(&s) == 0 {
        return skip("it takes two CPUs");
    }
    let helper = std::thread::spawn(|| p.help(0));
    while p.helpers.crew.helpers() == 0 {
        std::thread::yield_now();
    }
    test(p, &mut s);
    drop(s);
    p.helpers.crew.end();
    helper.join().unwrap();
}

/// When the pages of [`store`] were evicted.
pub(crate) const EVICTED_AT: u32 = 48;

/// Stores `1 << order` pages at `vpn` as one lz4 object (or raw, if they do not compress), idle, and lists it. Those in `copies`
/// (of the first 16) are kept copies of resident pages, the others are out. Returns the object's handle.
pub(crate) fn store(s: &mut State, vpn: u64, order: u8, copies: u16, content: fn(u64) -> [u8; PAGE]) -> u32 {
    store_by(Algorithm::Lz4, s, vpn, order, copies, content)
}

/// The same with another codec.
pub(crate) fn store_by(
    algorithm: Algorithm,
    s: &mut State,
    vpn: u64,
    order: u8,
    copies: u16,
    content: fn(u64) -> [u8; PAGE],
) -> u32 {
    let pages = 1u64 << order;
    let plain: Vec<u8> = (0..pages).flat_map(|i| content(vpn + i)).collect();
    let mut packed = vec![0; plain.len()];
    let (encoding, len) =
        Compressor::with_source_max(algorithm, plain.len()).compress(&plain, &mut packed).unwrap_or_else(|| {
            packed.copy_from_slice(&plain);
            (Encoding::Raw, plain.len())
        });
    let head = Header { len, encoding, order, vpn, flags: 0 };
    let set = |place: &mut [u8]| {
        plain.chunks(PAGE).enumerate().for_each(|(i, p)| object::set_hash(place, i, object::hash(p)));
    };
    let handle = s.put_object(head, PageSet::first(pages as usize), set, &packed[..len]).expect("room").raw();
    for i in 0..pages {
        let pte = if i < 16 && copies & (1 << i) != 0 {
            s.resident += 1;
            Pte::new(Tag::Resident, 0).with_copy(handle)
        } else {
            s.swapped += 1;
            Pte::compressed(handle, i as usize, EVICTED_AT).packed(object::tier(encoding))
        };
        s.pt.set(vpn + i, pte);
    }
    s.entered_pool(vpn, handle);
    handle
}

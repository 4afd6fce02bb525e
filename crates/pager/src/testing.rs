//! A pager for unit tests: real memory, a real userfaultfd, no threads.

use crate::arena::{Layout, PAGE};
use crate::group::GroupPage;
use crate::pager::Pager;
use core::sync::atomic::Ordering::*;
use uzswap_sys::uffd::{self, Uffd};
use uzswap_sys::{raw, sys};

/// A pager with a limit in bytes, whose arena is registered.
pub(crate) fn pager(limit: usize) -> &'static Pager {
    make(limit, false)
}

/// The same, which keeps which pages are written to.
pub(crate) fn tracking_pager(limit: usize) -> &'static Pager {
    make(limit, true)
}

fn make(limit: usize, tracks: bool) -> &'static Pager {
    // SAFETY: the page is atomics, for which zeros are valid.
    let group: Box<GroupPage> = unsafe { Box::new_zeroed().assume_init() };
    group.set_up(b"test");
    group.nodes[0].max.store(limit as u64, Relaxed);
    let layout = Layout::reserve(limit).expect("address space");
    let pager = Box::leak(Box::new(Pager::new(Box::leak(group), 0, layout).expect("a slot")));
    pager.tracks = tracks;
    let (uffd, _) = Uffd::open(if tracks { uffd::FEATURE_WRITE_PROTECT } else { 0 })
        .expect("tests of the pager need access to userfaultfd");
    uffd.register(layout.arena, layout.slots * PAGE).expect("the arena");
    pager.uffd.store(uffd.fd(), Relaxed);
    pager.pagemap.store(raw::open(b"/proc/self/pagemap\0", libc::O_RDONLY).expect("pagemap"), Relaxed);
    pager.maps.store(raw::open(b"/proc/self/maps\0", libc::O_RDONLY).expect("maps"), Relaxed);
    pager
}

/// Memory as a program has it, registered with the pager: its first page.
pub(crate) fn memory(pager: &Pager, pages: usize) -> usize {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping.
    let at = unsafe { sys!(libc::SYS_mmap, 0, pages * PAGE, prot, flags, -1isize, 0) }.expect("memory");
    // SAFETY: advice on it. (Pages are moved one by one here.)
    unsafe { sys!(libc::SYS_madvise, at, pages * PAGE, libc::MADV_NOHUGEPAGE) }.expect("advice");
    pager.register(at, pages * PAGE).expect("the memory");
    at
}

/// Gives a missing page at `at` its content, by COPY, as nobody serves faults here.
pub(crate) fn put(pager: &Pager, at: usize, content: &[u8; PAGE]) {
    // SAFETY: the content is readable.
    unsafe { pager.uffd().copy(at, content.as_ptr() as usize, PAGE) }.expect("a missing page");
}

//! Regions, compared with plain memory.

use crate::alone::skip;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};
use uzswap_pager::region::{Compaction, Compressor, Error, Options, Region};
use uzswap_pager::shared::{SharedOptions, SharedRegion};

pub(crate) const PAGE: usize = 4096;
pub(crate) const MIB: usize = 1 << 20;

/// xorshift64*.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

pub(crate) fn seed() -> u64 {
    let seed = std::env::var("SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(|| {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64
    });
    println!("SEED={seed}");
    seed
}

/// Fills a page: of four kinds two compress, one does not, one is zero.
fn page(rng: &mut Rng, out: &mut [u8]) {
    match rng.below(4) {
        0 => out.fill(0),
        1 => out.chunks_mut(8).for_each(|c| c.copy_from_slice(&rng.next().to_le_bytes())),
        _ => {
            let word = rng.next().to_le_bytes();
            out.chunks_mut(8).for_each(|c| c.copy_from_slice(&word));
            let at = rng.below(out.len() - 8);
            out[at..at + 8].copy_from_slice(&rng.next().to_le_bytes());
        }
    }
}

/// Does random work on a part of a region and of its model, which must agree at every step and at the end.
pub(crate) fn work(memory: &mut [u8], model: &mut [u8], rng: &mut Rng, steps: usize) {
    for (m, p) in model.chunks_mut(PAGE).zip(memory.chunks_mut(PAGE)) {
        page(rng, m);
        p.copy_from_slice(m);
    }
    let len = memory.len();
    for step in 0..steps {
        match rng.below(8) {
            0 => {
                // Read a run of pages.
                let at = rng.below(len / PAGE) * PAGE;
                let n = (1 + rng.below(64) * PAGE).min(len - at);
                assert!(memory[at..at + n] == model[at..at + n], "step {step}, {at}+{n}");
            }
            1 => {
                let at = rng.below(len / PAGE) * PAGE;
                page(rng, &mut model[at..at + PAGE]);
                memory[at..at + PAGE].copy_from_slice(&model[at..at + PAGE]);
            }
            2..5 => {
                let at = rng.below(len);
                let byte = rng.next() as u8;
                model[at] = byte;
                memory[at] = byte;
            }
            _ => {
                let at = rng.below(len - 8);
                assert_eq!(memory[at..at + 8], model[at..at + 8], "step {step}, {at}");
            }
        }
    }
    for (i, (m, p)) in model.chunks(PAGE).zip(memory.chunks(PAGE)).enumerate() {
        assert!(m == p, "page {i} differs in the end");
    }
}

pub(crate) fn against_model(region: &mut Region, threads: usize, seed: u64, steps: usize) {
    // SAFETY: the only user, and no system call gets it.
    let memory = unsafe { region.as_slice_mut() };
    let mut model = vec![0u8; memory.len()];
    let part = (memory.len() / threads).next_multiple_of(PAGE);
    std::thread::scope(|scope| {
        for (i, (r, m)) in memory.chunks_mut(part).zip(model.chunks_mut(part)).enumerate() {
            scope.spawn(move || work(r, m, &mut Rng::new(seed.wrapping_add(i as u64)), steps));
        }
    });
}

pub(crate) fn rss_anon() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// Tests that need much memory run one at a time.
pub(crate) fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The story: pages that nobody had touched were looked at one by one, which took 50 seconds for 64 TB.
#[test]
fn what_nobody_has_touched_of_a_huge_region_is_not_walked() {
    const SIZE: usize = 64 << 40;
    let region = match Region::new(SIZE, &Options::new(16 * MIB)) {
        Ok(region) => region,
        Err(e) => return skip(&format!("no region of 64 TB: {e}")),
    };
    let pages = [0, SIZE / 2 - PAGE, SIZE - 3 * PAGE];
    for page in pages {
        // SAFETY: inside the region.
        unsafe { region.as_mut_ptr().add(page).cast::<usize>().write(page + 1) };
    }
    let began = std::time::Instant::now();
    let out = region.page_out(0..usize::MAX);
    assert!(out >= pages.len(), "{out} pages");
    assert!(region.page_in(0..usize::MAX) >= pages.len());
    assert!(region.age() >= pages.len());
    assert!(began.elapsed().as_secs() < 20, "{:?}", began.elapsed());
    for page in pages {
        // SAFETY: as above.
        assert_eq!(unsafe { region.as_mut_ptr().add(page).cast::<usize>().read() }, page + 1);
    }
}

#[test]
fn one_thread_reads_what_it_wrote() {
    let _one = alone();
    let mut region = Region::new(64 * MIB, &Options::new(24 * MIB)).unwrap();
    against_model(&mut region, 1, seed(), 20_000);
    let stats = region.stats();
    println!("{stats:?}");
    assert!(stats.charged <= 24 * MIB, "{stats:?}");
    assert!(stats.stored > 20 * MIB, "{stats:?}");
}

/// Levels 20 to 22 of zstd were once accepted, and 19 was used: every existing level must be used, and others refused.
#[test]
fn the_highest_levels_are_used_and_higher_ones_refused() {
    let _one = alone();
    for compressor in [Compressor::Zstd(22), Compressor::Deflate(12)] {
        let mut region = Region::new(16 * MIB, &Options { compressor, ..Options::new(12 * MIB) }).unwrap();
        against_model(&mut region, 1, seed(), 2000);
        assert!(region.stats().stored > 2 * MIB, "{:?}", region.stats());
    }
    for compressor in [Compressor::Zstd(23), Compressor::Zstd(u32::MAX), Compressor::Deflate(13)] {
        let refused = Region::new(16 * MIB, &Options { compressor, ..Options::new(12 * MIB) }).unwrap_err();
        assert_eq!(refused, Error::Level(compressor));
        assert!(refused.to_string().contains("has no level"), "{refused}");
        let shared = SharedOptions { compressor, ..SharedOptions::new(12 * MIB) };
        let refused = SharedRegion::create(16 * MIB, &shared).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::InvalidInput, "{refused}");
    }
}

/// When compaction of the pool moves an object, all pages that name it must find it: those that are out, those that kept a copy,
/// and all four of a unit.
#[test]
fn the_pool_stays_dense_and_its_objects_are_found() {
    let _one = alone();
    let mut region = Region::new(96 * MIB, &Options::new(32 * MIB)).unwrap();
    // SAFETY: the only user.
    let memory = unsafe { region.as_slice_mut() };
    let mut model = vec![0u8; memory.len()];
    let mut rng = Rng::new(seed());
    // Pages of ever different compressed sizes: a part of each is noise.
    let mut fill = |m: &mut [u8], noise: usize| {
        m.fill(1);
        m[..noise].chunks_mut(8).for_each(|c| c.copy_from_slice(&rng.next().to_le_bytes()));
    };
    for round in 0..6 {
        let pages = model.len() / PAGE;
        // In sequence blocks would come and go whole, and leave no gaps.
        for i in (0..pages).map(|i| if round == 0 { i } else { i * 7919 % pages }) {
            let (m, p) = (&mut model[i * PAGE..(i + 1) * PAGE], &mut memory[i * PAGE..(i + 1) * PAGE]);
            match round {
                0 => fill(m, 1024),
                // One page in `round + 1` shrinks, so its old class is left full of gaps.
                _ if i % (round + 1) == 0 => fill(m, 1024 - 160 * round),
                _ => {
                    assert!(m == p, "page {i} in round {round}");
                    continue;
                }
            }
            p.copy_from_slice(m);
        }
    }
    assert!(model == memory, "the memory differs in the end");
    let stats = region.stats();
    println!("{stats:?}");
    assert!(stats.pages_compacted > 0 || stats.pool_used * 100 >= stats.pool * 95, "{stats:?}");
    assert!(stats.pool_used * 100 >= stats.pool * 90, "{stats:?}");
    assert!(stats.charged <= 32 * MIB, "{stats:?}");
}

/// Leftovers of a pool that was large lie in all its page blocks: they are moved together, and found again.
#[test]
fn page_blocks_of_the_pool_are_emptied() {
    let _one = alone();
    let mut region = Region::new(96 * MIB, &Options::new(40 * MIB)).unwrap();
    // SAFETY: the only user.
    let memory = unsafe { region.as_slice_mut() };
    let mut model = vec![0u8; memory.len()];
    let mut rng = Rng::new(seed());
    for (m, p) in model.chunks_mut(PAGE).zip(memory.chunks_mut(PAGE)) {
        m.fill(1);
        m[..1200].chunks_mut(8).for_each(|c| c.copy_from_slice(&rng.next().to_le_bytes()));
        p.copy_from_slice(m);
    }
    let pages = model.len() / PAGE;
    for i in (0..pages).map(|i| i * 7919 % pages).filter(|i| i % 8 != 0) {
        let (m, p) = (&mut model[i * PAGE..(i + 1) * PAGE], &mut memory[i * PAGE..(i + 1) * PAGE]);
        assert!(m == p, "page {i}");
        m.fill(0);
        p.fill(0);
    }
    assert!(model == memory, "the memory differs in the end");
    let stats = region.stats();
    println!("{stats:?}");
    assert!(stats.pool_blocks_freed > 0, "{stats:?}");
    assert!(stats.charged <= 40 * MIB, "{stats:?}");
}

/// E1: when compaction moves the frames of staged pages, the pages must be found in their new frames, also while other threads
/// fault on them, and under each rule of compaction.
#[test]
fn e1_pages_are_found_after_their_frames_have_moved() {
    let _one = alone();
    Compaction::ALL.into_iter().for_each(found_after_moves);
}

fn found_after_moves(rule: Compaction) {
    let mut region = Region::new(64 * MIB, &Options { compaction: rule, ..Options::new(40 * MIB) }).unwrap();
    let seed = seed();
    let done = std::sync::atomic::AtomicBool::new(false);
    let shared = Shared(&raw mut region);
    let moved = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        let (shared, done, moved) = (&shared, &done, &moved);
        scope.spawn(move || {
            // Frames move only if some are staged at that moment, in several blocks: on a busy machine that is luck.
            for round in 0..30 {
                // SAFETY: the only thread that touches the memory; the others call methods that do not.
                against_model(unsafe { &mut *shared.0 }, 2, seed + round, 8000);
                // What the region moves by itself does not count.
                if moved.load(SeqCst) > 100 {
                    break;
                }
            }
            done.store(true, SeqCst);
        });
        while !done.load(SeqCst) {
            // SAFETY: alive until the scope ends; `compact` takes the region's lock.
            moved.fetch_add(unsafe { &*shared.0 }.compact(), SeqCst);
            std::thread::yield_now();
        }
    });
    let (moved, stats) = (moved.into_inner(), region.stats());
    println!("{rule:?}: {moved} frames moved, {stats:?}");
    assert!(moved > 100, "{rule:?}: {moved} frames moved: {stats:?}");
    assert!(stats.pages_migrated >= moved);
    assert!(stats.charged <= 40 * MIB, "{stats:?}");
}

struct Shared(*mut Region);
// SAFETY: several threads may use a region.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

#[test]
fn several_threads_read_what_they_wrote() {
    let _one = alone();
    let mut region = Region::new(64 * MIB, &Options::new(24 * MIB)).unwrap();
    against_model(&mut region, 4, seed(), 10_000);
    let stats = region.stats();
    assert!(stats.charged <= 24 * MIB, "{stats:?}");
}

/// The same as if each TLB flush interrupted another CPU: pages leave in windows, and come by copies; and the kernel moves
/// something other than it was asked for.
#[test]
fn threads_read_what_they_wrote_where_flushes_are_dear() {
    let _one = alone();
    for faults in ["flushes=dear", "flushes=dear,move_out=1/20"] {
        let mut region = Region::new(64 * MIB, &Options::new(24 * MIB)).unwrap();
        let seed = seed();
        region.group().faults.set(faults, seed).unwrap();
        against_model(&mut region, 4, seed, 5000);
        let stats = region.stats();
        assert!(stats.charged <= 24 * MIB && stats.major_faults > 1000, "{faults}: {stats:?}");
    }
}

#[test]
fn every_compressor_gives_the_bytes_back() {
    let _one = alone();
    for compressor in [Compressor::Zstd(0), Compressor::Deflate(0)] {
        let options = Options { compressor, ..Options::new(12 * MIB) };
        against_model(&mut Region::new(24 * MIB, &options).unwrap(), 2, seed(), 1000);
    }
}

#[test]
fn two_regions_at_once() {
    let _one = alone();
    let seed = seed();
    std::thread::scope(|scope| {
        for i in 0..2 {
            scope.spawn(move || {
                let mut region = Region::new(32 * MIB, &Options::new(14 * MIB)).unwrap();
                against_model(&mut region, 2, seed + i, 3000);
            });
        }
    });
}

#[test]
fn threads_that_touch_the_same_pages_agree() {
    let _one = alone();
    let region = Region::new(32 * MIB, &Options::new(10 * MIB)).unwrap();
    let words = region.len() / 8;
    // SAFETY: the region as atomics, which every thread may change.
    let cells =
        unsafe { std::slice::from_raw_parts(region.as_mut_ptr().cast::<std::sync::atomic::AtomicU64>(), words) };
    let seed = seed();
    std::thread::scope(|scope| {
        for i in 0..4 {
            scope.spawn(move || {
                let mut rng = Rng::new(seed + i);
                for _ in 0..30_000 {
                    cells[rng.below(words / 512) * 512 + 7].fetch_add(1, Relaxed);
                }
            });
        }
    });
    assert_eq!(cells.iter().map(|c| c.load(Relaxed)).sum::<u64>(), 120_000);
}

/// The number of this process's threads, once at most `most` are left, or after 20 seconds. (A joined thread is listed until it
/// has left the kernel.)
fn threads_at_rest(most: usize) -> usize {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        let threads = std::fs::read_dir("/proc/self/task").unwrap().count();
        if threads <= most || std::time::Instant::now() > end {
            return threads;
        }
        std::thread::yield_now();
    }
}

#[test]
fn dropping_a_region_returns_its_memory() {
    let _one = alone();
    if !crate::alone::by_itself("region::dropping_a_region_returns_its_memory") {
        return;
    }
    let fill = || {
        let mut region = Region::new(64 * MIB, &Options::new(24 * MIB)).unwrap();
        let mut rng = Rng::new(1);
        // SAFETY: the only user.
        unsafe { region.as_slice_mut() }.chunks_mut(PAGE).for_each(|p| page(&mut rng, p));
        region
    };
    // malloc keeps some for each thread's arena, up to a bound.
    (0..16).for_each(|_| drop(fill()));
    let before = rss_anon();
    let threads = threads_at_rest(2);
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    for _ in 0..8 {
        let region = fill();
        assert!(rss_anon() > before + 12 * MIB);
        drop(region);
    }
    assert!(rss_anon() < before + 4 * MIB, "{} before, {} after", before, rss_anon());
    assert_eq!(threads_at_rest(threads), threads);
    assert_eq!(std::fs::read_dir("/proc/self/fd").unwrap().count(), fds);
    assert!(std::fs::read_to_string("/proc/self/maps").unwrap().lines().count() <= maps + 4);
}

static WILD: AtomicUsize = AtomicUsize::new(0);

extern "C" fn earlier(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the siginfo is the kernel's; the page is replaced by a readable one, so the access goes on.
    unsafe {
        let at = (*info).si_addr() as usize & !(PAGE - 1);
        WILD.store(at, SeqCst);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        libc::mmap(at as *mut libc::c_void, PAGE, libc::PROT_READ, flags, -1, 0);
    }
}

/// Runs in a process of its own, as the handler is installed once per process.
#[test]
fn a_wild_sigbus_goes_to_the_earlier_handler() {
    let _one = alone();
    if std::env::var_os("UZSWAP_TEST_WILD").is_none() {
        let me = std::env::current_exe().unwrap();
        let name = "region::a_wild_sigbus_goes_to_the_earlier_handler";
        for way in ["handler", "default"] {
            let mut command = std::process::Command::new(&me);
            let status = command.args(["--exact", name]).env("UZSWAP_TEST_WILD", way).output().unwrap().status;
            let signal = std::os::unix::process::ExitStatusExt::signal(&status);
            assert_eq!(signal, (way == "default").then_some(libc::SIGBUS), "{way}: {status}");
            assert!(way == "default" || status.success(), "{status}");
        }
        return;
    }
    // SAFETY: a handler of ours, a mapping past the end of a file, and reads of it that raise SIGBUS.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = earlier as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        if std::env::var("UZSWAP_TEST_WILD").unwrap() == "handler" {
            libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
        }
        let region = Region::new(MIB, &Options::new(8 * MIB)).unwrap();
        region.as_mut_ptr().write_volatile(1);
        assert_eq!(WILD.load(SeqCst), 0);
        let fd = libc::memfd_create(c"empty".as_ptr(), 0);
        let at = libc::mmap(std::ptr::null_mut(), PAGE, libc::PROT_READ, libc::MAP_SHARED, fd, 0);
        assert_eq!(at.cast::<u8>().read_volatile(), 0);
        assert_eq!(WILD.load(SeqCst), at as usize);
        region.as_mut_ptr().add(PAGE).write_volatile(1);
        assert_eq!(region.as_mut_ptr().read_volatile(), 1);
    }
}

#[test]
fn a_system_call_on_memory_that_is_out_fails() {
    let _one = alone();
    let region = Region::new(MIB, &Options::new(8 * MIB)).unwrap();
    // SAFETY: the kernel writes into the region, or refuses.
    let got = unsafe { libc::getrandom(region.as_mut_ptr().cast(), 16, 0) };
    assert!(got < 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT));
}

/// The story: a region whose pool had filled its limit had a handful of pages left. A read across the end of a page brought the
/// next one, for which the first was evicted, for which the next one was: forever.
#[test]
fn what_an_instruction_needs_is_there_at_once() {
    let _one = alone();
    for without_move in [false, true] {
        let options = Options { without_move, ..Options::new(16 * MIB) };
        let mut region = Region::new(32 * MIB, &options).unwrap();
        let mut rng = Rng::new(seed());
        // SAFETY: the only user.
        let memory = unsafe { region.as_slice_mut() };
        let mut sums = vec![];
        for page in memory.chunks_mut(PAGE) {
            // Four tenths are noise: the pool takes nearly all of the limit.
            page.fill(1);
            page[PAGE - 1640..].chunks_mut(8).for_each(|c| c.copy_from_slice(&rng.next().to_le_bytes()));
            sums.push(u64::from_le_bytes(
                page[PAGE - 4..].iter().chain(&[1; 4]).copied().collect::<Vec<_>>()[..].try_into().unwrap(),
            ));
        }
        let base = memory.as_ptr();
        let mut least = usize::MAX;
        for i in (0..sums.len() - 1).map(|i| i * 7919 % (sums.len() - 1)) {
            if i % 64 == 0 {
                least = least.min(region.stats().resident);
            }
            // SAFETY: the last four bytes of a page and the first four of the next, both of the region.
            let read = unsafe { base.add((i + 1) * PAGE - 4).cast::<u64>().read_unaligned() };
            assert_eq!(read, sums[i], "behind page {i}");
        }
        println!("{least} bytes at least, {:?}", region.stats());
        // What compaction of the pool has just freed is the program's for a while.
        assert!(least < MIB, "there is more room than this is about: {least}");
    }
}

/// The story: an empty range in the middle of a page was taken for that page, and removed it.
#[test]
fn a_range_of_no_bytes_is_of_no_pages_of_a_region() {
    let _one = alone();
    let region = Region::new(MIB, &Options { track_writes: true, ..Options::new(8 * MIB) }).unwrap();
    // SAFETY: the first word of the region, used as an atomic only.
    let word = unsafe { &*region.as_mut_ptr().cast::<AtomicU64>() };
    word.store(7, Relaxed);
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = 6..5;
    for nothing in [5..5, 0..0, PAGE..PAGE, MIB..MIB, 2 * MIB..3 * MIB, backwards] {
        region.remove(nothing.clone());
        assert_eq!((region.page_out(nothing.clone()), region.page_in(nothing.clone())), (0, 0), "{nothing:?}");
        assert!(region.take_soft_dirty(nothing.clone()).unwrap().is_empty(), "{nothing:?}");
        region.protect(nothing).unwrap();
    }
    let state = region.page_map().unwrap().get(0);
    assert!(state.present() && state.soft_dirty() && !state.write_protected(), "{state:?}");
    assert_eq!(word.load(Relaxed), 7);
}

/// As on a kernel without UFFDIO_MOVE, where a region's pages are taken by `mremap` and come back by copies.
#[test]
fn a_region_without_move_reads_what_it_wrote() {
    let _one = alone();
    for threads in [1, 3] {
        let options = Options { without_move: true, ..Options::new(24 * MIB) };
        let mut region = Region::new(64 * MIB, &options).unwrap();
        against_model(&mut region, threads, seed(), 20_000 / threads);
        let stats = region.stats();
        println!("{stats:?}");
        assert!(stats.charged <= 24 * MIB && stats.stored > 20 * MIB, "{stats:?}");
        assert!(region.page_out(0..64 * MIB) > 0);
        assert_eq!(region.stats().resident, 0);
    }
}

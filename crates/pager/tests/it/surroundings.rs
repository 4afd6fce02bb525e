//! Regions in programs that lock their memory, close descriptors, or fork.

use crate::alone::{by_itself, skip};
use crate::region::{MIB, PAGE};
use uzswap_pager::region::{Error, Options, Region};

/// The first word of a page.
fn word(region: &Region, page: usize) -> *mut u64 {
    assert!((page + 1) * PAGE <= region.len());
    // SAFETY: within the region.
    unsafe { region.as_mut_ptr().add(page * PAGE).cast() }
}

/// Fills a region of `size` MiB, and reads it again.
fn filled(size: usize, options: &Options) -> Region {
    let region = Region::new(size * MIB, options).unwrap();
    for page in 0..size * MIB / PAGE {
        // SAFETY: within the region, which nobody else uses.
        unsafe { word(&region, page).write_volatile(page as u64 + 1) };
    }
    for page in 0..size * MIB / PAGE {
        // SAFETY: as above.
        assert_eq!(unsafe { word(&region, page).read_volatile() }, page as u64 + 1);
    }
    region
}

/// A figure from this process's status, in bytes.
fn status(name: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// The story: everything that a region reserves, 75 GB, was filled, and so was the region itself, beyond its limit.
#[test]
fn a_program_that_locks_its_memory_may_make_a_region() {
    if !by_itself("surroundings::a_program_that_locks_its_memory_may_make_a_region") {
        return;
    }
    let lock = |more: i32| {
        // SAFETY: a plain call, in a process of a few MiB.
        unsafe { libc::mlockall(libc::MCL_FUTURE | more) == 0 }
    };
    // Memory that is locked on first touch is known as locked before, so this fills nothing, whatever becomes of it.
    const MCL_ONFAULT: i32 = 4;
    if !lock(MCL_ONFAULT) {
        return skip("the process may not lock its memory");
    }
    let before = status("VmLck");
    match Region::new(16 * MIB, &Options::new(8 * MIB)) {
        Ok(_region) => assert!(status("VmLck") < before + (1 << 30), "{} MiB", status("VmLck") / MIB),
        Err(e) => return skip(&format!("the process may lock little: {e}")),
    }
    assert!(lock(0));
    let region = filled(64, &Options::new(8 * MIB));
    assert!(region.stats().charged <= 8 * MIB, "{:?}", region.stats());
    assert!(status("VmRSS") < 48 * MIB, "{} MiB", status("VmRSS") / MIB);
}

/// Closes all descriptors in a child, then reads and writes a region.
fn touch_after_closing(options: &Options) {
    let region = filled(32, options);
    // SAFETY: this process does not use the descriptors otherwise, and ends by a signal.
    unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
    let pages = 0..region.len() / PAGE;
    // SAFETY: within the region.
    let wrong = pages.filter(|page| unsafe { word(&region, *page).read_volatile() } != *page as u64 + 1).count();
    println!("{wrong} pages read wrong");
}

/// The story: the last descriptor of the userfaultfd was closed, which ended the registration: pages that were out read as zeros.
#[test]
fn what_is_out_when_descriptors_are_closed_is_never_read_as_zeros() {
    const TEST: &str = "surroundings::what_is_out_when_descriptors_are_closed_is_never_read_as_zeros";
    const WAY: &str = "UZSWAP_TEST_CLOSED";
    let plain = Options::new(8 * MIB);
    if let Some(way) = std::env::var_os(WAY) {
        return match way.to_str() {
            Some("plain") => touch_after_closing(&plain),
            Some("copied") => touch_after_closing(&Options { without_move: true, ..plain }),
            _ => write_after_closing(),
        };
    }
    for way in ["plain", "copied", "tracked"] {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let ended = command.args(["--exact", TEST, "--nocapture"]).env(WAY, way).output().unwrap();
        let said = [ended.stdout, ended.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        let signal = std::os::unix::process::ExitStatusExt::signal(&ended.status);
        assert_eq!(signal, Some(libc::SIGBUS), "{way}: {said}");
        assert_eq!(said.matches("has closed a region's descriptors").count(), 1, "{way}: {said}");
        assert!(!said.contains("read wrong"), "{way}: {said}");
    }
}

/// Closes all descriptors, then writes to a page in memory whose next write is to be noted.
fn write_after_closing() {
    let region = filled(4, &Options { track_writes: true, ..Options::new(8 * MIB) });
    region.clear_soft_dirty(0..region.len()).unwrap();
    // SAFETY: as in `touch_after_closing`; within the region.
    unsafe {
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0);
        assert_eq!(word(&region, 7).read_volatile(), 8);
        word(&region, 7).write_volatile(9);
    }
}

#[test]
fn a_forked_child_may_drop_what_it_has_of_a_region() {
    if !by_itself("surroundings::a_forked_child_may_drop_what_it_has_of_a_region") {
        return;
    }
    let region = filled(1, &Options { track_writes: true, ..Options::new(8 * MIB) });
    let (watch, view) = (region.watch_writes().unwrap(), region.page_map().unwrap());
    watch.protect(0..PAGE).unwrap();
    // SAFETY: the child drops what it has, and leaves without the harness.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(watch);
        drop(view);
        drop(region);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: a child of ours.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
    assert_eq!(view.summary().write_protected, 1);
    drop(watch);
    assert_eq!(view.summary().write_protected, 0);
    // SAFETY: within the region.
    unsafe { word(&region, 0).write_volatile(5) };
    assert_eq!(region.page_out(0..PAGE), 1);
    // SAFETY: as above.
    assert_eq!(unsafe { word(&region, 0).read_volatile() }, 5);
}

/// The kernel takes the highest address range that is large enough. Has it put the next region of 10 MiB where something else
/// was.
fn take_all_places_above(there: &std::ops::Range<usize>) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    for size in [16 << 30, 1 << 30, 64 * MIB, 10 * MIB + (128 << 10)] {
        // SAFETY: new mappings, which nobody uses.
        unsafe {
            let mut at = there.end;
            while at >= there.end {
                at = libc::mmap(std::ptr::null_mut(), size, libc::PROT_NONE, flags, -1, 0) as usize;
                assert_ne!(at, libc::MAP_FAILED as usize);
            }
            libc::munmap(at as *mut libc::c_void, size);
        }
    }
}

/// The story: a child made a region where its parent's had been, which the child does not have. Its faults were taken for faults
/// on the parent's region, and the child ended by SIGSEGV.
#[test]
fn a_forked_child_may_make_a_region_where_its_parents_was() {
    if !by_itself("surroundings::a_forked_child_may_make_a_region_where_its_parents_was") {
        return;
    }
    let parents = filled(32, &Options::new(8 * MIB));
    let there = parents.as_mut_ptr() as usize..parents.as_mut_ptr() as usize + parents.len();
    // SAFETY: the child uses what it makes itself, and leaves without the harness.
    let child = unsafe { libc::fork() };
    if child == 0 {
        take_all_places_above(&there);
        let own = filled(10, &Options::new(8 * MIB));
        let is_there = there.contains(&(own.as_mut_ptr() as usize));
        drop(own);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(if is_there { 0 } else { 77 }) };
    }
    let mut status = 0;
    // SAFETY: a child of ours.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0, "{status:#x}");
    // The child changed nothing here.
    let wrong = (0..parents.len() / PAGE).filter(|page| {
        // SAFETY: within the region, which nobody else uses.
        unsafe { word(&parents, *page).read_volatile() != *page as u64 + 1 }
    });
    assert_eq!(wrong.count(), 0);
}

const FULL_CHILD: &str = "UZSWAP_TEST_FULL";

/// Runs a test again as a process of its own, with `FULL_CHILD` set; returns how that ended, and what uzswap said first.
fn ended_full(test: &str) -> (std::process::ExitStatus, String) {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let ended = command.args(["--exact", test, "--nocapture"]).env(FULL_CHILD, "1").output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    (ended.status, said.lines().find(|line| line.starts_with("uzswap:")).unwrap_or_default().to_owned())
}

/// Fills a region with incompressible memory, four times its limit, and waits until its reclaim thread has found that out.
fn fill_above_limit(kill: bool) {
    let region = Region::new(32 * MIB, &Options::new(8 * MIB)).unwrap();
    region.set_kill_when_full(kill);
    let mut rng = crate::region::Rng::new(7);
    for at in 0..32 * MIB / 8 {
        // SAFETY: within the region, which nobody else uses.
        unsafe { region.as_mut_ptr().cast::<u64>().add(at).write_volatile(rng.next()) };
    }
    // One that should be killed and is not ends at last, which the test sees.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while region.stats().over_limit == 0 || kill && std::time::Instant::now() < deadline {
        std::thread::yield_now();
    }
}

/// The story: the message about a full region spoke of a group, its `memory.max` and `--on-full`, none of which its program has.
#[test]
fn a_region_that_is_full_is_called_one() {
    if std::env::var_os(FULL_CHILD).is_some() {
        return fill_above_limit(false);
    }
    let (status, line) = ended_full("surroundings::a_region_that_is_full_is_called_one");
    assert!(status.success(), "{line}");
    assert!(line.starts_with("uzswap: a region is full: ") && line.ends_with("; it goes on above its limit"), "{line}");
    assert!(line.contains(" used of its limit of 8.0 MiB, ") && !line.contains("group"), "{line}");
}

/// If that was chosen.
#[test]
fn a_process_whose_region_is_full_is_killed() {
    if std::env::var_os(FULL_CHILD).is_some() {
        return fill_above_limit(true);
    }
    let (status, line) = ended_full("surroundings::a_process_whose_region_is_full_is_killed");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGKILL), "{status}: {line}");
    assert!(line.starts_with("uzswap: a region is full: ") && line.contains("; the process is killed"), "{line}");
}

#[test]
fn a_region_that_is_too_large_has_no_address_space() {
    for size in [usize::MAX, usize::MAX - 65535, 1 << 60] {
        let error = Region::new(size, &Options::new(8 * MIB)).unwrap_err().to_string();
        assert!(error.starts_with("no address space for a region"), "{size}: {error}");
    }
    assert_eq!(Region::new(0, &Options::new(8 * MIB)).unwrap_err(), Error::Size);
}

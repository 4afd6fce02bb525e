//! No descriptors or threads are left: what cannot be made leaves nothing behind, and nobody waits for it.

use super::processes::{Lines, say, wait_for_word, wait_within, worker};
use super::*;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};
use uzswap_pager::region::{Options, Region};
use uzswap_pager::shared::SharedControl;

/// The longest time for a worker.
const LONGEST: Duration = Duration::from_secs(20);

/// Bytes of address space left when no thread can be had: less than a thread's stack.
const LEFT: u64 = 512 << 10;

/// How long a thread runs to see that another does not, in nanoseconds of its own time.
const SHARE_NS: u64 = 300_000_000;

/// Sets a limit of this process, or removes it.
fn limit(resource: libc::__rlimit_resource_t, to: Option<u64>) {
    // SAFETY: limits of ours, written by the first call.
    unsafe {
        let mut both: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(resource, &raw mut both), 0);
        both.rlim_cur = to.unwrap_or(both.rlim_max);
        assert_eq!(libc::setrlimit(resource, &raw const both), 0);
    }
}

/// Bytes of address space in use.
fn address_space() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').next().unwrap().parse::<u64>().unwrap() * PAGE as u64
}

/// Waits until all other threads wait for something: none is about to allocate.
fn wait_for_rest() {
    // SAFETY: no arguments.
    let me = unsafe { libc::gettid() }.to_string();
    let awake = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        task.file_name() != *me && stat.rsplit(") ").next().is_some_and(|state| state.starts_with(['R', 'D']))
    };
    let begun = Instant::now();
    while std::fs::read_dir("/proc/self/task").unwrap().any(|task| awake(task.unwrap())) {
        assert!(begun.elapsed() < LONGEST / 2, "a thread does not come to rest");
        std::thread::yield_now();
    }
}

fn without_threads<T>(work: impl FnOnce() -> T) -> T {
    wait_for_rest();
    limit(libc::RLIMIT_AS, Some(address_space() + LEFT));
    let done = work();
    limit(libc::RLIMIT_AS, None);
    done
}

/// Plays a role of this file's workers; returns false if there is no such role here.
pub fn be(role: &str, path: &Path, _number: usize) -> bool {
    match role {
        "few-descriptors" => few_descriptors(),
        "no-client-thread" => {
            let region = region(16 * PAGE, 8 * MIB);
            assert!(without_threads(|| region.map()).is_err());
            let m = region.map().unwrap();
            write(&m, 1, 1);
            say("well");
        }
        "no-watcher" => {
            assert!(without_threads(|| SharedMapping::attach(path)).is_err());
            say("refused");
            wait_for_word();
        }
        "full" => full(path),
        _ => return false,
    }
    true
}

fn few_descriptors() {
    const TRIES: usize = 3;
    const MOST: u64 = 100;
    let options = Options { track_writes: true, ..Options::new(8 * MIB) };
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    // This makes everything that exists once per process.
    drop(Region::new(MIB, &options).unwrap());
    let (descriptors, bytes) = (open(), address_space());
    let enough = (1..MOST).find(|few| {
        (0..TRIES).all(|_| {
            limit(libc::RLIMIT_NOFILE, Some(*few));
            let made = Region::new(MIB, &options);
            limit(libc::RLIMIT_NOFILE, None);
            made.is_ok()
        })
    });
    assert!(enough.is_some_and(|few| few > 4), "{enough:?}");
    assert_eq!(open(), descriptors);
    // Threads that have ended leave a stack to the next.
    assert!(address_space() < bytes + 64 * MIB as u64, "{bytes} -> {}", address_space());
    say("well");
}

/// Descriptors that an owner may have whose table is to be full.
const FEW: u64 = 64;

fn full(path: &Path) {
    let region = region(32 * MIB, 8 * MIB);
    region.serve(path).unwrap();
    let m = region.map().unwrap();
    limit(libc::RLIMIT_NOFILE, Some(FEW));
    say("serving");
    wait_for_word();
    // If the owner ends, a faulting thread in this process waits forever.
    // SAFETY: no memory is involved.
    unsafe { libc::alarm(5 * LONGEST.as_secs() as u32) };
    let name = |task: &Path| std::fs::read_to_string(task.join("comm")).unwrap_or_default();
    let mut tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let server = tasks.find(|task| name(task).trim_end() == "uzswap-shared").unwrap();
    let begun = Instant::now();
    while std::fs::read_dir(server.join("fd")).unwrap().count() < FEW as usize {
        assert!(begun.elapsed() < LONGEST / 2, "the table does not become full");
        std::thread::yield_now();
    }
    // A thread that can accept nobody rests: this thread runs all the time, and that one hardly ever.
    let ran = |task: &Path| -> u64 {
        let stat = std::fs::read_to_string(task.join("schedstat")).unwrap();
        stat.split(' ').next().unwrap().parse().unwrap()
    };
    let me = Path::new("/proc/thread-self");
    let (mine, its) = (ran(me), ran(&server));
    while ran(me) < mine + SHARE_NS {}
    assert!(ran(&server) - its < SHARE_NS / 4, "the server runs though it can do nothing");
    // And the region still does its work.
    for round in 1..4 {
        (0..m.len() / PAGE).for_each(|page| write(&m, page, (round * page) as u64));
        assert!((0..m.len() / PAGE).all(|page| words(&m, page)[7].load(Relaxed) == (round * page) as u64));
        m.page_out(0..m.len()).unwrap();
    }
    println!("{:?}", region.control().stats().unwrap());
    say("well");
    wait_for_word();
}

/// The story: the connections of clients, which any process of the same user may open, filled an owner's table of descriptors. It
/// asked without pause for the next connection, and was ended when it had to make room: the buffers for that had a descriptor of
/// their own.
#[test]
fn an_owner_with_no_descriptor_left_goes_on() {
    let path = socket_path("full");
    let mut child = worker("full", &path, 0).spawn().unwrap();
    let mut lines = Lines::of(&mut child);
    assert_eq!(lines.next().as_deref(), Some("serving"));
    // Clients, until there is no room for all descriptors of the next; then some that send nothing; there is room for one of them.
    let clients: Vec<_> = std::iter::from_fn(|| SharedControl::connect(&path).ok()).collect();
    let mute: Vec<_> = (0..8).map(|_| uzswap_sys::socket::connect(&path).unwrap()).collect();
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"\n").unwrap();
    assert_eq!(lines.next().as_deref(), Some("well"));
    drop((clients, mute));
    // There is room again.
    SharedControl::connect(&path).unwrap().stats().unwrap();
    drop(input);
    assert!(wait_within(&mut child, LONGEST).success());
}

fn works(role: &str) {
    let mut child = worker(role, &socket_path(role), 0).spawn().unwrap();
    let mut lines = Lines::of(&mut child);
    assert!(wait_within(&mut child, LONGEST).success());
    assert_eq!(lines.next().as_deref(), Some("well"));
}

/// The story: each region that could not be made for lack of a userfaultfd left its reservation behind, tens of gigabytes of
/// addresses, and one that failed later the userfaultfd.
#[test]
fn a_region_that_cannot_be_made_leaves_nothing() {
    works("few-descriptors");
}

/// The story: if the owner had no thread for a connection, its client waited forever.
#[test]
fn who_cannot_be_served_is_told() {
    works("no-client-thread");
}

/// The story: a process that could not start its watcher reported nothing, and the owner kept its mapping as long as it lived.
#[test]
fn who_has_no_watcher_leaves_no_mapping() {
    let path = socket_path("no-watcher");
    let region = region(16 * PAGE, 8 * MIB);
    region.serve(&path).unwrap();
    let mut child = worker("no-watcher", &path, 0).spawn().unwrap();
    let mut lines = Lines::of(&mut child);
    assert_eq!(lines.next().as_deref(), Some("refused"));
    let begun = Instant::now();
    while region.control().stats().unwrap().mappings > 0 {
        assert!(begun.elapsed() < LONGEST, "the owner keeps a mapping that does not exist");
        std::thread::yield_now();
    }
    drop(child.stdin.take());
    assert!(wait_within(&mut child, LONGEST).success());
}

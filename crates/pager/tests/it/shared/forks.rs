//! Forked children when something goes wrong. They are forked from workers, as this process has other tests' mappings.

use super::processes::{Lines, say, wait_for_word, wait_within, worker};
use super::*;
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Stdio;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use uzswap_pager::region::{Options, Region};
use uzswap_pager::shared::SharedControl;

/// The longest time for a worker, with a child that it waits for.
const LONGEST: Duration = Duration::from_secs(60);
/// The longest time for a child, in milliseconds.
const CHILDS_LONGEST: i32 = 20_000;

/// Does something in a forked child; returns whether it ended in time and succeeded.
fn in_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child leaves without the harness.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // A panic that is not caught would end this thread, the only one, and the child with success.
        let well = catch_unwind(AssertUnwindSafe(work)).unwrap_or(false);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(if well { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: a child of ours, and a pollfd of ours; the descriptor is closed by the process's end.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, child, 0) as i32;
        let ended = libc::poll(&mut libc::pollfd { fd, events: libc::POLLIN, revents: 0 }, 1, CHILDS_LONGEST) == 1;
        if !ended {
            libc::kill(child, libc::SIGKILL);
        }
        libc::waitpid(child, &raw mut status, 0);
        ended && status == 0
    }
}

/// Plays a role of this file's workers; returns false if there is no such role here.
pub fn be(role: &str, path: &Path, number: usize) -> bool {
    match role {
        "orphan" => orphan(),
        "fork-after-end" => fork_after_end(),
        "fork-between" => fork_between(path, number),
        "fork-region" => fork_region(),
        "fork-watching" => fork_watching(path),
        "fork-late" => fork_late(path),
        "fork-protected" => fork_protected(path),
        "fork-served" => fork_served(path),
        _ => return false,
    }
    true
}

/// Has a worker do its work; returns what it wrote to standard error.
fn works(role: &str, path: &Path, number: usize) -> String {
    let mut child = worker(role, path, number).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = Lines::of(&mut child);
    let status = wait_within(&mut child, LONGEST);
    let mut error = String::new();
    child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    assert!(status.success() && lines.next().as_deref() == Some("well"), "{number}: {status}, {error}");
    error
}

fn orphan() {
    let region = region(MIB, 8 * MIB);
    let mut m = Some(region.map().unwrap());
    write(m.as_ref().unwrap(), 3, 7);
    assert!(in_child(|| {
        let m = m.take().unwrap();
        // Its own child is no worse off.
        let forks = in_child(|| true);
        let alone = m.page_out(at(3)).is_err() && m.take_soft_dirty(at(3)).is_err();
        drop(m);
        forks && alone
    }));
    let m = m.unwrap();
    for round in 7..50 {
        assert_eq!(m.page_out(at(3)).unwrap(), 1);
        assert_eq!(words(&m, 3)[7].load(Relaxed), round);
        write(&m, 3, round + 1);
    }
    assert_eq!(region.control().stats().unwrap().mappings, 1);
    say("well");
}

/// The story: a child that could not attach again kept its parent's connection. When it dropped its mapping, the owner ended the
/// parent's, which raised SIGBUS from then on. Its requests were carried out for the parent, which missed the answers. A child
/// that such a child forked was ended.
#[test]
fn a_child_that_cannot_attach_again_leaves_its_parents_mapping_alone() {
    let error = works("orphan", &socket_path("orphan"), 0);
    assert!(error.contains("could not attach") && !error.contains("has ended"), "{error}");
}

fn fork_after_end() {
    let region = region(MIB, 8 * MIB);
    let _m = region.map().unwrap();
    drop(region);
    let begun = Instant::now();
    while !std::fs::read_to_string("/proc/self/maps").unwrap().contains("uzswap-gone") {
        assert!(begun.elapsed() < LONGEST / 3, "the watcher has not seen the owner's end");
        std::thread::yield_now();
    }
    assert!(in_child(|| true));
    say("well");
}

/// The story: a child inherited the error in place of a lost region, found the place taken, and was ended.
#[test]
fn a_process_that_has_lost_its_region_may_fork() {
    let error = works("fork-after-end", &socket_path("fork-after-end"), 0);
    assert!(error.contains("has ended") && !error.contains("took"), "{error}");
}

type Between = Option<Box<dyn FnOnce() + Send>>;
static BETWEEN: Mutex<Between> = Mutex::new(None);

/// Registered before the handler of shared regions, so called after it.
extern "C" fn between() {
    if let Some(work) = BETWEEN.lock().unwrap().take() {
        work();
    }
}

fn fork_between(path: &Path, what: usize) {
    // SAFETY: the handler lives as long as the program.
    assert_eq!(unsafe { libc::pthread_atfork(Some(between), None, None) }, 0);
    let m = SharedMapping::attach(path).unwrap();
    (0..8).for_each(|page| write(&m, page, 50));
    m.clear_soft_dirty(0..m.len()).unwrap();
    write(&m, 6, 60);
    let (client, other) = (SharedControl::connect(path).unwrap(), SharedControl::connect(path).unwrap());
    let all = 0..8 * PAGE;
    client.protect(all.clone(), None).unwrap();
    *BETWEEN.lock().unwrap() = Some(Box::new(move || {
        match what {
            0 => client.unprotect(all, None).unwrap(),
            1 => {
                drop(client);
                let begun = Instant::now();
                // Until this is noticed.
                while other.protect(0..0, None).is_err() {
                    assert!(begun.elapsed() < LONGEST / 3, "the client that is gone is not missed");
                    std::thread::yield_now();
                }
                return std::mem::forget(other);
            }
            _ => other.remove(all).unwrap(),
        }
        // It goes on watching.
        std::mem::forget(client);
    }));
    assert!(in_child(|| {
        let map = m.page_map();
        let free = (0..8).all(|p| !map.get(p).write_protected());
        let dirty: Vec<u64> = (0..8).filter(|p| map.get(*p).soft_dirty()).collect();
        if !free || dirty != if what == 2 { vec![] } else { vec![6] } {
            eprintln!("{free}, {dirty:?}");
            return false;
        }
        (0..8).for_each(|page| write(&m, page, 70));
        true
    }));
    assert!((0..8).all(|page| words(&m, page)[7].load(Relaxed) == 70));
    say("well");
}

/// The story: what a child was to inherit was recorded before its parent forked. Pages that were unprotected or removed between
/// that and the child's request stayed protected, or dirty, for the child: its write waited for a client that knew of no
/// protection.
#[test]
fn what_ends_while_a_process_forks_has_ended_for_its_child() {
    for what in 0..3 {
        let path = socket_path("fork-between");
        let region = region(4 * MIB, 8 * MIB);
        region.serve(&path).unwrap();
        works("fork-between", &path, what);
    }
}

fn fork_region() {
    let region = Region::new(4 * MIB, &Options::new(8 * MIB)).unwrap();
    let at = region.as_mut_ptr();
    // SAFETY: the only user of the region.
    unsafe { at.write_volatile(5) };
    let mut region = Some(region);
    assert!(in_child(|| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: a new mapping at an address where fork has left nothing.
        let own = unsafe { libc::mmap(at.cast(), PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if own != at.cast() {
            return false;
        }
        // SAFETY: just mapped.
        unsafe { at.write_volatile(9) };
        drop(region.take());
        // SAFETY: as above.
        unsafe { at.read_volatile() == 9 }
    }));
    // SAFETY: as above.
    assert_eq!(unsafe { at.read_volatile() }, 5);
    drop(region);
    say("well");
}

/// The story: a child that dropped its parent's region waited for threads that it does not have, and unmapped what it had mapped
/// where the region had been.
#[test]
fn a_child_may_drop_its_parents_region() {
    works("fork-region", &socket_path("fork-region"), 0);
}

/// Waits until a thread of this process waits for a message.
fn wait_for_reader() {
    let begun = Instant::now();
    let reads = |task: std::fs::DirEntry| {
        let call = std::fs::read_to_string(task.path().join("syscall")).unwrap_or_default();
        call.split(' ').next() == Some("47")
    };
    while !std::fs::read_dir("/proc/self/task").unwrap().flatten().any(reads) {
        assert!(begun.elapsed() < LONGEST / 3, "nobody waits for an answer");
        std::thread::yield_now();
    }
}

fn fork_watching(path: &Path) {
    let control = SharedControl::connect(path).unwrap();
    control.protect(at(0), None).unwrap();
    std::thread::scope(|scope| {
        // It has the connection to itself while this thread forks.
        scope.spawn(|| control.next_write(LONGEST).unwrap());
        wait_for_reader();
        // SAFETY: the child leaves without the harness.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // SAFETY: no memory is involved.
            unsafe { libc::alarm(CHILDS_LONGEST as u32 / 1000) };
            let refused = control.stats().unwrap_err().raw_os_error() == Some(libc::ENOTCONN);
            say(if refused && control.page_map().get(0).present() { "alone" } else { "connected" });
            wait_for_word();
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(0) };
        }
        // SAFETY: a child of ours.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        say("gone");
    });
}

/// The story: a forked child had its parent's connection as well. Its requests took the answer that the parent waited for, or
/// waited forever for a thread that it did not have. And when the parent was killed, its protections and pins stayed as long as
/// the child lived.
#[test]
fn a_child_has_no_part_in_its_parents_connection() {
    let path = socket_path("fork-watching");
    let region = region(MIB, 8 * MIB);
    region.serve(&path).unwrap();
    write(&region.map().unwrap(), 0, 1);
    let mut child = worker("fork-watching", &path, 0).spawn().unwrap();
    let mut lines = Lines::of(&mut child);
    let input = child.stdin.take();
    assert_eq!(lines.next().as_deref(), Some("alone"));
    assert_eq!(region.control().protect(at(1), None).unwrap_err().kind(), std::io::ErrorKind::ResourceBusy);
    child.kill().unwrap();
    child.wait().unwrap();
    let begun = Instant::now();
    while region.control().protect(at(1), None).is_err() {
        assert!(begun.elapsed() < LONGEST / 4, "a client that was killed is not missed while its child lives");
        std::thread::yield_now();
    }
    drop(input);
}

fn fork_late(path: &Path) {
    let m = SharedMapping::attach(path).unwrap();
    say("attached");
    wait_for_word();
    // SAFETY: the child leaves without the harness.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        say(&format!("read {}", words(&m, 3)[7].load(Relaxed)));
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: a child of ours.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGBUS, "{status:#x}");
    assert_eq!(words(&m, 3)[7].load(Relaxed), 1);
    say("well");
}

/// The story: a child attaches again where its parent did, but another region was served there by then. The child had that
/// region's bytes in place of its own; if that region was larger, it was mapped over whatever lay behind.
#[test]
fn a_child_does_not_get_another_region_in_its_parents_place() {
    for size in [MIB, 4 * MIB] {
        let path = socket_path("fork-late");
        let first = region(MIB, 8 * MIB);
        first.serve(&path).unwrap();
        write(&first.map().unwrap(), 3, 1);
        let mut child = worker("fork-late", &path, 0).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = Lines::of(&mut child);
        assert_eq!(lines.next().as_deref(), Some("attached"));
        std::fs::remove_file(&path).unwrap();
        let second = region(size, 8 * MIB);
        second.serve(&path).unwrap();
        write(&second.map().unwrap(), 3, 2);
        drop(child.stdin.take());
        let status = wait_within(&mut child, LONGEST);
        let mut error = String::new();
        child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
        assert!(status.success() && lines.next().as_deref() == Some("well"), "{status}, {error}");
        assert!(error.contains("another region"), "{error}");
    }
}

fn fork_served(path: &Path) {
    let region = region(MIB, 8 * MIB);
    let m = region.map().unwrap();
    write(&m, 3, 7);
    region.serve(path).unwrap();
    assert!(in_child(|| words(&m, 3)[7].load(Relaxed) == 7 && m.page_out(at(3)).is_ok()));
    say("well");
}

/// The story: if an owner mapped its region before it served it, its children could not attach again.
#[test]
fn a_child_of_an_owner_has_what_was_mapped_before_it_was_served() {
    let error = works("fork-served", &socket_path("fork-served"), 0);
    assert!(error.is_empty(), "{error}");
}

fn fork_protected(path: &Path) {
    let m = SharedMapping::attach(path).unwrap();
    (0..4).for_each(|page| write(&m, page, 50));
    let client = SharedControl::connect(path).unwrap();
    let (own, end) = (Some(m.id()), AtomicBool::new(false));
    client.protect(0..2 * PAGE, own).unwrap();
    // What is protected in every mapping is so in a child's.
    client.protect(at(3), None).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !end.load(Relaxed) {
                if let Some(byte) = client.next_write(Duration::from_millis(20)).unwrap() {
                    let whose = if byte == 3 * PAGE { None } else { own };
                    client.unprotect(byte..byte + PAGE, whose).unwrap();
                }
            }
        });
        let well = in_child(|| {
            let map = m.page_map();
            let protected: Vec<u64> = (0..4).filter(|p| map.get(*p).write_protected()).collect();
            (0..4).for_each(|page| write(&m, page, 70));
            protected == [3]
        });
        let still = (0..2).all(|page| m.page_map().get(page).write_protected());
        end.store(true, Relaxed);
        assert!(well && still, "{well}, {still}");
    });
    say("well");
}

/// The story: a child inherited the protection that a client had asked for its parent's mapping alone. The client could not end it,
/// as it did not know the child's mapping, and the child's write waited forever.
#[test]
fn a_child_is_not_protected_for_whom_its_parent_is() {
    let path = socket_path("fork-protected");
    let region = region(4 * MIB, 8 * MIB);
    region.serve(&path).unwrap();
    works("fork-protected", &path, 0);
}

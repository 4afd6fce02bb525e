//! Forked children, where not all goes well. They are forked from workers, as this process has mappings of other tests'.

use super::processes::{Lines, say, wait_within, worker};
use super::*;
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// How long a worker may take, with a child that it waits for.
const LONGEST: Duration = Duration::from_secs(60);
/// How long a child may take (milliseconds).
const CHILDS_LONGEST: i32 = 20_000;

/// Does something in a forked child: whether it ended in time, and said that all was well.
fn in_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child leaves without the harness.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // (What is not caught ends this thread, the only one, and that well.)
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

/// Roles of this file's workers; false: it is none.
pub fn be(role: &str, _path: &Path, _number: usize) -> bool {
    match role {
        "orphan" => orphan(),
        "fork-after-end" => fork_after_end(),
        _ => return false,
    }
    true
}

/// Has a worker do its work; returns what is on its standard error.
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

/// The story: a child that could not attach again kept its parent's connection. When it dropped its mapping the owner ended the
/// parent's, which raised SIGBUS from then on; what it asked was asked for the parent, who missed the answer. A child that such a
/// child forked was ended.
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

/// The story: the error in a lost region's place was inherited, so that a child found the place taken, and was ended.
#[test]
fn a_process_that_has_lost_its_region_may_fork() {
    let error = works("fork-after-end", &socket_path("fork-after-end"), 0);
    assert!(error.contains("has ended") && !error.contains("took"), "{error}");
}

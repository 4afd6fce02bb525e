//! The program's terminal, when it goes away.

use crate::cli::{UZSWAP, agent_built};
use std::fs::File;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};

/// A new terminal: our side of it, and the program's.
fn terminal() -> (File, OwnedFd) {
    let (mut ours, mut theirs) = (-1, -1);
    let none = std::ptr::null_mut();
    // SAFETY: two out-parameters; what else there is may be left out.
    assert_eq!(unsafe { libc::openpty(&raw mut ours, &raw mut theirs, none, none.cast(), none.cast()) }, 0);
    // A child that another test forks meanwhile would keep the terminal open.
    // SAFETY: both were just opened, and nobody else knows them.
    unsafe {
        libc::fcntl(ours, libc::F_SETFD, libc::FD_CLOEXEC);
        libc::fcntl(theirs, libc::F_SETFD, libc::FD_CLOEXEC);
        (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs))
    }
}

/// Starts a shell script under `uzswap run` at a terminal, as a terminal's window does: as the leader of its session.
fn start_at(theirs: &OwnedFd, script: &str) -> Child {
    agent_built();
    let mut run = Command::new(UZSWAP);
    run.args(["run", "-q", "-m", "64M", "--", "/bin/sh", "-c", script]).env_remove("UZSWAP_GROUP");
    let stream = || Stdio::from(theirs.try_clone().unwrap());
    run.stdin(stream()).stdout(stream()).stderr(stream());
    // SAFETY: async-signal-safe calls only.
    unsafe {
        run.pre_exec(|| {
            let led = libc::setsid() > 0 && libc::ioctl(0, libc::TIOCSCTTY, 0) == 0;
            led.then_some(()).ok_or_else(std::io::Error::last_os_error)
        });
    }
    run.spawn().unwrap()
}

/// Reads from a terminal until this text comes.
fn read_until(ours: &mut File, what: &str) {
    let (mut said, mut byte) = (String::new(), [0]);
    while !said.contains(what) {
        ours.read_exact(&mut byte).unwrap_or_else(|e| panic!("{e}: {said:?}"));
        said.push(char::from(byte[0]));
    }
}

/// The story: a terminal's window that ran only `uzswap run` was closed. The kernel tells the session's leader alone, which was
/// the command. The program would have ended without us, but went on for good.
#[test]
fn a_program_hears_that_its_terminal_is_gone() {
    for script in ["echo ready; while :; do sleep 0.1; done", "echo ready; kill -STOP $$; while :; do sleep 0.1; done"]
    {
        let (mut ours, theirs) = terminal();
        let mut child = start_at(&theirs, script);
        drop(theirs);
        read_until(&mut ours, "ready");
        drop(ours);
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGHUP), "{script}");
    }
    // The program may ignore that, as without us.
    let (mut ours, theirs) = terminal();
    let mut child = start_at(&theirs, "trap 'exit 7' HUP; echo ready; while :; do sleep 0.1; done");
    drop(theirs);
    read_until(&mut ours, "ready");
    drop(ours);
    assert_eq!(child.wait().unwrap().code(), Some(7));
}

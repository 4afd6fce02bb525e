//! `uzswap lab` as a command: what it refuses, and how it ends.

use crate::cli::{UZSWAP, agent_built, uzswap};
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Whether a process has a handler for a signal.
fn catches(pid: u32, signal: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0").trim();
    u64::from_str_radix(mask, 16).unwrap() & 1 << (signal - 1) != 0
}

/// Starts a lab that makes its files in `dir`, and waits until a signal would end it in order.
fn started(args: &[&str], dir: &TempDir) -> Child {
    agent_built();
    let mut lab = Command::new(UZSWAP);
    lab.arg("lab").args(args).env("TMPDIR", dir.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // SAFETY: one async-signal-safe call.
    unsafe {
        lab.pre_exec(|| {
            // Another lab may hold the socket that allows only one at a time; this hides it, if that is allowed.
            libc::unshare(libc::CLONE_NEWNET);
            Ok(())
        });
    }
    let lab = lab.spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !catches(lab.id(), libc::SIGINT) {
        assert!(Instant::now() < deadline, "no handler");
        std::thread::sleep(Duration::from_millis(1));
    }
    lab
}

/// The story: a lab that was interrupted before it had tried `uzswap run` wrote findings without figures, which said that that
/// did not work on the machine.
#[test]
fn who_is_interrupted_finds_nothing() {
    let dir = TempDir::new().unwrap();
    let findings = dir.path().join("findings");
    let lab = started(&["kernel", "--quick", "--only", "limit", "--json", findings.to_str().unwrap()], &dir);
    // SAFETY: no memory is involved.
    assert_eq!(unsafe { libc::kill(lab.id() as i32, libc::SIGINT) }, 0);
    let output = lab.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.ends_with("interrupted; the machine is as it was\n") && output.stdout.is_empty(), "{said}");
    assert!(!findings.exists());
}

/// The story: a lab that was killed while it made the contents for its measurements left them behind, with the programs that made
/// them.
#[test]
fn who_is_killed_leaves_nothing() {
    let dir = TempDir::new().unwrap();
    let entries = || fs::read_dir(dir.path()).unwrap().count();
    let until = |there: bool| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while (entries() > 0) != there {
            assert!(Instant::now() < deadline, "{} entries", entries());
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let mut lab = started(&["fallback", "--quick"], &dir);
    until(true);
    lab.kill().unwrap();
    lab.wait().unwrap();
    until(false);
}

#[test]
fn what_no_machine_can_do_is_a_wrong_call() {
    for (experiment, option, most) in [
        ("kernel", "--memory", "16M"),
        ("usemem", "--memory", "32M"),
        ("shrinker", "--memory", "16M"),
        ("fallback", "--memory", "24M"),
        ("highalloc", "--memory", "16M"),
        ("blocks", "--image", "2M"),
        ("pagemap", "--size", "1M"),
    ] {
        let output = uzswap().args(["lab", experiment, "--quick", option, "4K"]).output().unwrap();
        assert_eq!(output.status.code(), Some(125), "{experiment}");
        let said = format!("uzswap lab: {option} is to be {most} or more\n");
        assert_eq!(String::from_utf8_lossy(&output.stderr), said, "{experiment}");
    }
}

#[test]
fn traces_without_programs_are_refused() {
    let dir = TempDir::new().unwrap();
    let trace = dir.path().join("trace");
    for text in ["[]", r#"[{"program":"x","steps":[],"peak":0}]"#] {
        fs::write(&trace, text).unwrap();
        let output = uzswap().args(["lab", "highalloc", "--quick", "--trace"]).arg(&trace).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&output.stderr).ends_with("delete the file to record anew\n"), "{text}");
    }
}

/// The story: if the table could not be printed, all measurements were lost without a message, and with status 0.
#[test]
fn a_table_that_nobody_sees_is_said() {
    agent_built();
    for args in ["--help", "pagemap --quick --size 1M"] {
        let script = format!("'{UZSWAP}' lab {args} >/dev/full");
        let output = Command::new("/bin/sh").args(["-c", &script]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args}: {said}");
        assert!(said.contains("nothing can be written to standard output: "), "{args}: {said}");
    }
}

//! A refused command leaves nothing behind: no file, no group, no page moved. And what an ended command left is no obstacle.

use crate::cli::{UZSWAP, agent_built, refused, start_python, uzswap};
use crate::place::Place;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;
use uzswap_sys::memfd;

#[test]
fn a_refused_run_writes_no_file() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    refused(&["-m", "64M", "--report", &path("new"), "--record", "/no/such/dir/t"], &["trace", "cannot be written"]);
    refused(&["-m", "64M", "--report", &path("new"), "--record", &path("new")], &["name the same file", "choose two"]);
    refused(&["-m", "64M", "--report", &path("new"), "--group", "no-such-group-/"], &["not a name for a group"]);
    refused(&["-m", "64M", "--report", &path("new"), "--record", "/dev/full"], &["no space left"]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    // An existing file is neither removed nor emptied; another name for it is the same file.
    fs::write(path("old"), "old").unwrap();
    std::os::unix::fs::symlink(path("old"), path("link")).unwrap();
    refused(&["-m", "64M", "--report", &path("old"), "--record", &path("link")], &["name the same file"]);
    assert_eq!(fs::read(path("old")).unwrap(), b"old");
    let both = ["run", "-qm64M", "--report", "/dev/null", "--record", "/dev/null", "--", "/bin/true"];
    assert!(uzswap().args(both).output().unwrap().status.success());
}

/// The story: the command waited forever for somebody to read its report.
#[test]
fn a_pipe_that_nobody_reads_is_refused() {
    let dir = TempDir::new().unwrap();
    let pipe = dir.path().join("ff");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let name = pipe.to_str().unwrap();
    refused(&["-m", "64M", "--report", name], &["nobody reads the pipe", "ff`"]);
    let mut reader = Command::new("cat").arg(&pipe).stdout(Stdio::piped()).spawn().unwrap();
    let output = uzswap().args(["run", "-qm64M", "--report", name, "--", "/bin/true"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut text = Vec::new();
    reader.stdout.take().unwrap().read_to_end(&mut text).unwrap();
    reader.wait().unwrap();
    serde_json::from_slice::<serde_json::Value>(&text).expect("a report");
}

/// The story: each refused run left a group without a process behind, up to 64.
#[test]
fn a_refused_run_makes_no_group() {
    let place = Place::new();
    let mut web = place.start(&["--group", "web", "-m", "64M", "--unit", "64K"]);
    web.tell("c 1");
    for (options, part) in [
        (&["--unit", "12K"][..], "not a unit of compression"),
        (&["--unit", "16K"], "leave out --unit to join it"),
        (&["--large-folios", "off"], "leave out --large-folios"),
        (&["--compaction", "pivot"], "leave out --compaction"),
        (&["--compaction", "middle"], "choose one of emptiest, pivot, zone-ends"),
        (&["--report", "/no/such/dir/r"], "cannot be written"),
        (&["--record", "/no/such/dir/r"], "cannot be written"),
    ] {
        let args = [&["run", "-q", "-g", "web/worker", "-m", "32M"], options, &["--", "/bin/true"]].concat();
        assert!(place.refusal(&args).contains(part), "{options:?}");
    }
    let listed = String::from_utf8(place.call(&["stat"]).stdout).unwrap();
    assert!(!listed.contains("worker") && listed.contains("web"), "{listed}");
    // A run with the same settings joins.
    let same = ["run", "-q", "-g", "web/worker", "-m", "32M", "--unit", "64K", "--", "/bin/true"];
    assert!(place.call(&same).status.success());
    web.ends_well();
}

#[test]
fn pages_are_moved_only_where_all_can_be_done() {
    let script =
        "import os, sys\nb = bytearray(os.urandom(1 << 20) * 8)\nprint(os.getpid(), flush=True)\nsys.stdin.read()";
    let Some(mut run) = start_python(&["--memory", "256M"], script) else { return };
    let mut pid = String::new();
    BufReader::new(run.stdout.take().unwrap()).read_line(&mut pid).unwrap();
    let dir = TempDir::new().unwrap();
    let new = dir.path().join("new").to_str().unwrap().to_owned();
    for (args, status, part) in [
        (&["--svg", "/tmp"][..], 1, "`/tmp` cannot be written"),
        (&["--svg", &new, "--page-in", "x"], 125, "is not a range"),
        (&["--svg", &new, "--idle", "nan"], 125, "is not a time"),
        (&["--svg", &new, "--soft-dirty"], 1, "start it with --track-writes"),
        (&["--svg", &new, "--clear-soft-dirty"], 1, "start it with --track-writes"),
    ] {
        let asked = uzswap().args(["pagemap", pid.trim(), "--page-out", "all"]).args(args).output().unwrap();
        let text = String::from_utf8(asked.stderr).unwrap();
        let refused = asked.status.code() == Some(status) && text.contains(part);
        assert!(refused && text.lines().count() == 1, "{args:?}: {text}");
    }
    assert!(!Path::new(&new).exists());
    // Nothing was asked of it, so it is not even managed.
    let shown = uzswap().args(["pagemap", pid.trim()]).output().unwrap();
    assert!(String::from_utf8_lossy(&shown.stderr).contains("has no page map"));
    let drawn = uzswap().args(["pagemap", pid.trim(), "--page-out", "all", "--svg", &new]).output().unwrap();
    assert!(drawn.status.success() && fs::read_to_string(&new).unwrap().starts_with("<svg"));
    drop(run.stdin.take());
    assert!(run.wait().unwrap().success());
}

/// Starts a handler, and waits until it accepts monitors.
fn handler(socket: &Path, memory: &Path) -> Child {
    agent_built();
    let mut handler = Command::new(UZSWAP);
    handler.arg("handover").args([socket, memory]).stderr(Stdio::piped());
    let mut handler = handler.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(handler.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("waiting for monitors"), "{line}");
    handler
}

/// The story: a handler that was killed left its socket behind, and none could be started there again.
#[test]
fn a_handler_begins_again_where_one_was_ended() {
    let dir = TempDir::new().unwrap();
    let (socket, memory) = (dir.path().join("socket"), dir.path().join("memory"));
    fs::write(&memory, vec![7; 64 << 10]).unwrap();
    let said = |socket: &Path, memory: &Path| {
        let output = uzswap().arg("handover").args([socket, memory]).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    for _ in 0..2 {
        let mut handler = handler(&socket, &memory);
        assert!(said(&socket, &memory).contains("in use"), "one is there");
        handler.kill().unwrap();
        handler.wait().unwrap();
        assert!(socket.exists());
    }
    // Only a socket at which nobody listens is removed.
    assert!(said(&memory, &memory).contains("in use") && memory.exists());
    let other = dir.path().join("other");
    let _listens = UnixListener::bind(&other).unwrap();
    assert!(said(&other, &memory).contains("in use"));
    fs::write(&memory, "").unwrap();
    for empty in [memory.as_path(), Path::new("/dev/zero")] {
        assert!(said(&dir.path().join("new"), empty).contains("is empty: name the snapshot's memory file"));
    }
    assert!(!dir.path().join("new").exists());
}

/// The story: a command was killed, and another process got its pid. What its program started then became a member of the other's
/// group, or ended by SIGBUS if the other process had an empty file at the descriptor that had been the group's, or that of the
/// books of the swap file.
#[test]
fn what_has_the_place_of_a_group_that_is_gone_is_not_joined() {
    let (place, dir) = (Place::new(), TempDir::new().unwrap());
    let mut members = ["a", "b"].map(|group| place.start(&["--group", group, "-m", "64M"]));
    members.iter_mut().for_each(|member| member.tell("c 1"));
    let [a, b] = members.each_ref().map(|member| fs::read(format!("/proc/{}/environ", member.pid())).unwrap());
    let variable = |of: &[u8], name: &str| {
        let mut all = of.split(|byte| *byte == 0).map(|one| String::from_utf8_lossy(one).into_owned());
        all.find_map(|one| Some(one.strip_prefix(name)?.strip_prefix('=')?.to_owned())).unwrap_or_default()
    };
    let starts = |group: &str, number: &str, books: &str| {
        let mut program = Command::new("/bin/true");
        program.env("LD_PRELOAD", variable(&a, "LD_PRELOAD")).env("UZSWAP_GROUP", group).env("UZSWAP_SWAP", books);
        let output = program.env("UZSWAP_GROUP_NODE", number).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{}: {said}", output.status);
        said
    };
    let joined = || ["a", "b"].map(|group| place.event(group, "uzswap.stat", "joined"));
    let [b_group, number_of_a, number] = [(&b, "UZSWAP_GROUP"), (&a, "UZSWAP_GROUP_NODE"), (&b, "UZSWAP_GROUP_NODE")]
        .map(|(of, name)| variable(of, name));
    let none = dir.path().join("none");
    let none = none.to_str().unwrap();
    assert!(starts(&b_group, &number_of_a, none).contains("is out of reach"));
    assert_eq!(joined(), [1, 1]);
    assert_eq!(starts(&b_group, &number, none), "");
    assert_eq!(joined(), [1, 2]);
    let short = memfd::create(c"uzswap-swap", 0).unwrap();
    let shown = format!("/proc/{}/fd/{}", std::process::id(), short.as_raw_fd());
    for (name, bytes) in [("empty", &b""[..]), ("small", b"something else")] {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        let other = path.to_str().unwrap();
        assert!(starts(other, &number, none).contains("is out of reach"), "{name}");
        assert_eq!(starts(&b_group, &number, other), "", "{name}");
    }
    assert_eq!(starts(&b_group, &number, &shown), "");
    assert_eq!(joined(), [1, 5]);
    members.into_iter().for_each(|member| _ = member.ends_well());
}

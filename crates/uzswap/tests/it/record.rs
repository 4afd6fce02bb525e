//! `uzswap run --record`: the trace agrees with the counters, also for processes that forked or were killed.

use crate::cli::{UZSWAP, python, sentence_of, uzswap};
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use uzswap_mm::trace::{Kind, Record, Trace};

/// Runs a program under 16 MiB, recording. Returns the records by slot, the number lost, and the report.
fn record(dir: &TempDir, program: &[&str]) -> (Vec<(u32, Record)>, u64, serde_json::Value) {
    let (trace, report) = (dir.path().join("trace"), dir.path().join("report"));
    let mut command = uzswap();
    command.args(["run", "--quiet", "--memory", "16M", "--record"]).arg(&trace).arg("--report").arg(&report);
    let output = command.arg("--").args(program).output().unwrap();
    let report = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    println!("{}", String::from_utf8_lossy(&output.stderr));
    let bytes = fs::read(trace).unwrap();
    let trace = Trace::parse(&bytes).unwrap();
    assert_eq!(trace.header.limit, 16 << 20);
    let (mut all, mut lost) = (Vec::new(), 0);
    for block in trace.blocks() {
        let block = block.unwrap();
        lost += block.head.lost;
        all.extend(block.records().map(|r| (block.head.slot, r)));
    }
    (all, lost, report)
}

fn contents(dir: &Path) -> PathBuf {
    // Compressible, but not to nothing, and no two pages are alike.
    let path = dir.join("contents");
    let bytes: Vec<u8> =
        (0..4u32 << 20).flat_map(|i| (i.wrapping_mul(0x9e37_79b9) & 0xff_ffff).to_le_bytes()).collect();
    fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn the_trace_agrees_with_the_counters() {
    let dir = TempDir::new().unwrap();
    let source = contents(dir.path());
    let worker = [UZSWAP, "lab", "worker", "--size", "40M", "--source", source.to_str().unwrap()];
    let (records, lost, report) = record(&dir, &worker);
    assert_eq!(report["exit_status"], 0);
    assert_eq!(report["trace"]["records"], records.len() as u64);
    assert_eq!(report["trace"]["lost"], lost);
    if lost > 0 {
        // The machine is too busy to run the command for a while: this is printed, and the sums cannot be right then.
        return;
    }
    let sum = |kind: Kind| records.iter().filter(|(_, r)| r.kind == kind).map(|(_, r)| r.count() as u64).sum::<u64>();
    let events = |kind: Kind| records.iter().filter(|(_, r)| r.kind == kind).count() as u64;
    let counters = &report["counters"];
    assert!(events(Kind::Load) > 1000 && events(Kind::Store) > 1000, "too little happened to tell");
    // One fault may bring several pieces, some of them new: it counts once.
    let faults = |name: &str| counters[name].as_u64().unwrap();
    assert!(events(Kind::Load) >= faults("pgmajfault"));
    assert!(events(Kind::Fresh) >= faults("fault_zero"));
    assert!(events(Kind::Load) + events(Kind::Fresh) <= 2 * (faults("pgmajfault") + faults("fault_zero")));
    assert!(events(Kind::Refault) >= faults("refault_staged") && faults("refault_staged") > 0);
    // Each fault is of one kind at most.
    assert!(faults("pgmajfault") + faults("fault_zero") + faults("refault_staged") <= faults("pgfault"));
    assert_eq!(sum(Kind::Clean), counters["swpout_clean"]);
    assert_eq!(sum(Kind::Zero), counters["swpout_zero"]);
    // A page taken back while it was compressed is in the object, and dropped from it at once.
    assert!(sum(Kind::Store) >= counters["zswpout"].as_u64().unwrap());
    assert!(sum(Kind::Store) - sum(Kind::Drop) <= counters["zswpout"].as_u64().unwrap());
    // Whatever a page is loaded from was stored before.
    let mut stored = HashSet::new();
    for (slot, r) in &records {
        match r.kind {
            Kind::Store => stored.extend((0..r.count() as u64).map(|i| (*slot, r.vpn + i))),
            Kind::Load => assert!((0..r.count() as u64).any(|i| stored.contains(&(*slot, r.vpn + i)))),
            _ => {}
        }
    }
}

/// A forked child has a ring of its own. It must not write to its parent's, although it has mapped the same memory object.
#[test]
fn a_forked_child_says_where_it_was_born() {
    const FORK: &str = "
import os
kept = [os.urandom(512) * 8 for _ in range(9000)]
pid = os.fork()
total = sum(b[0] for b in kept)
if pid == 0: os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
";
    let Some(python) = python() else { return };
    let dir = TempDir::new().unwrap();
    let (records, _, report) = record(&dir, &[python.to_str().unwrap(), "-I", "-c", FORK]);
    assert_eq!(report["exit_status"], 0);
    let born: Vec<_> = records.iter().filter(|(_, r)| r.kind == Kind::Born).collect();
    assert!(!born.is_empty());
    for (slot, b) in born {
        let parent = records.iter().find(|(_, r)| r.kind == Kind::Fork && r.vpn == b.vpn).expect("its parent says so");
        assert_ne!(parent.0, *slot);
    }
    // The child read what its parent had put out before the child was born.
    let mine: Vec<u32> = records.iter().filter(|(_, r)| r.kind == Kind::Born).map(|(slot, _)| *slot).collect();
    assert!(records.iter().any(|(slot, r)| mine.contains(slot) && r.kind == Kind::Load));
}

/// A member killed at any instruction leaves whole records, and the recording goes on.
#[test]
fn a_killed_program_leaves_a_whole_trace() {
    let dir = TempDir::new().unwrap();
    let source = contents(dir.path());
    // Three are killed wherever they are by then; the trace has what the fourth did, although its shell is killed.
    let worker = format!("{UZSWAP} lab worker --size 32M --source {}", source.display());
    let script =
        format!("for i in 1 2 3; do {worker} & sleep 0.$i; kill -9 $!; wait $!; done; {worker} >/dev/null; kill -9 $$");
    let (records, _, report) = record(&dir, &["/bin/sh", "-c", &script]);
    assert_eq!(report["signal"], 9);
    assert!(records.iter().filter(|(_, r)| r.kind == Kind::Start).count() >= 5);
    assert!(records.iter().any(|(_, r)| r.kind == Kind::Evict));
}

#[test]
fn a_trace_that_cannot_be_written_is_refused() {
    let output = uzswap().args(["run", "-m", "64M", "--record", "/no/such/dir/t", "--", "/bin/true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    let output = uzswap().args(["run", "-m", "64M", "--record", "/dev/full", "--", "/bin/true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no space left"));
}

/// One trace, replayed by the engine's policies: the figures are consistent, and none is invented.
#[test]
fn a_trace_is_replayed_under_every_policy() {
    let dir = TempDir::new().unwrap();
    let source = contents(dir.path());
    let worker = [UZSWAP, "lab", "worker", "--size", "40M", "--source", source.to_str().unwrap()];
    let (_, lost, report) = record(&dir, &worker);
    let trace = dir.path().join("trace");
    let replay = |more: &[&str]| -> serde_json::Value {
        let output = uzswap().arg("replay").arg(&trace).arg("--json").args(more).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let all = replay(&[]);
    println!("{all:#}");
    assert_eq!(all["trace"]["records"], report["trace"]["records"]);
    assert!(lost > 0 || all["trace"]["loads"].as_u64() >= report["counters"]["pgmajfault"].as_u64());
    assert!(lost > 0 || all["trace"]["unknown_loads"] == 0);
    assert_eq!(all["policies"].as_array().unwrap().len(), 6);
    for policy in all["policies"].as_array().unwrap() {
        let number = |key: &str| policy[key].as_f64().unwrap();
        assert!(number("pool_peak") <= 1.02 * all["settings"]["pool"].as_f64().unwrap());
        assert!(number("disk_swapins") > 0.0 && number("written_back_pages") >= number("disk_swapins") / 4.0);
        assert!(number("bytes_read") >= 4096.0 * number("disk_reads"));
        assert!(number("wait_seconds") >= 100e-6 * number("disk_reads"));
    }
    // With room for everything less is written: only what reclaim presses the pool to give up.
    let roomy = replay(&["--policy", "s3-fifo", "--pool", "1G"]);
    let tight = replay(&["--policy", "s3-fifo", "--pool", "20%"]);
    let written = |of: &serde_json::Value| of["policies"][0]["written_back_pages"].as_f64().unwrap();
    assert!(written(&roomy) < written(&tight), "{roomy:#} {tight:#}");
    // A truncated trace is replayed as far as it is good, with a message.
    let bytes = fs::read(&trace).unwrap();
    fs::write(&trace, &bytes[..bytes.len() / 2]).unwrap();
    let cut = replay(&["--policy", "fifo"]);
    assert!(cut["trace"]["error"].as_str().unwrap().contains("cut short"));
    assert!(cut["trace"]["records"].as_u64() < all["trace"]["records"].as_u64());
}

#[test]
fn what_is_no_trace_is_not_replayed() {
    for args in [&["replay", "/bin/true"][..], &["replay", "/no/such"]] {
        let output = uzswap().args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1);
    }
    // See `replay::read`.
    let script = format!("ulimit -v 4000000; exec '{UZSWAP}' replay /dev/zero");
    let output = std::process::Command::new("/bin/sh").args(["-c", &script]).output().unwrap();
    assert!(sentence_of(&output, 1).contains("it is not a trace"));
}

//! `uzswap run --track-writes`: a program that keeps a model of which of its pages it has written to is compared with what
//! `uzswap pagemap` says, at limits that press and at one that does not, while its pages are paged out all the time.

use crate::harness::*;
use crate::hung::end_hung;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc;

fn pagemap(pid: &str, args: &[&str]) -> (bool, Vec<u8>, String) {
    let output = Command::new(uzswap()).args(["pagemap", pid]).args(args).output().expect("the command");
    (output.status.success(), output.stdout, String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The page map's state of each page that it knows, in the letters of the program's model.
fn known_pages(pid: &str) -> BTreeMap<u64, char> {
    let (ok, text, errors) = pagemap(pid, &["--json", "--runs"]);
    assert!(ok, "{errors}");
    let found: Value = serde_json::from_slice(&text).expect("JSON");
    let of = format!("process {pid}");
    let found = found.as_array().unwrap().iter().find(|f| f["what"] == of.as_str()).expect("its page map");
    let mut pages = BTreeMap::new();
    let mut dirty = 0;
    for run in found["runs"].as_array().expect("runs") {
        let is = |word: &str| run["state"].as_array().unwrap().iter().any(|w| w == word);
        let letter = match (is("present") || is("swapped"), is("soft-dirty")) {
            (true, true) => 'd',
            (true, false) => 'c',
            _ => '?',
        };
        let (from, to) = (run["from"].as_u64().unwrap(), run["to"].as_u64().unwrap());
        dirty += if letter == 'd' { to - from } else { 0 };
        pages.extend((from..to).map(|page| (page, letter)));
    }
    assert_eq!(found["soft_dirty"], dirty, "the summary says the same as the runs");
    pages
}

/// Compares the model, as the program prints it, with the page map. Counts the pages compared by letter in `counts`.
fn compare(at: &str, pid: &str, model: &[String], counts: &mut BTreeMap<char, usize>) {
    let known = known_pages(pid);
    for (page, letter, line) in pages(model) {
        let is = known.get(&page).copied().unwrap_or('n');
        assert_eq!(is, letter, "{at}: page {page:#x}000 of process {pid} in {line}");
        *counts.entry(letter).or_default() += 1;
    }
}

/// Clears all bits; those that were set must be the model's.
fn compare_cleared(at: &str, pid: &str, model: &[String]) {
    let (ok, text, errors) = pagemap(pid, &["--clear-soft-dirty", "--json"]);
    assert!(ok, "{at}: {errors}");
    let found: Value = serde_json::from_slice(&text).expect("JSON");
    let runs = found[0]["cleared"].as_array().expect("what was cleared").iter();
    let runs = runs.map(|r| r["from"].as_u64().unwrap()..r["to"].as_u64().unwrap());
    let cleared: BTreeSet<u64> = runs.flatten().collect();
    for (page, letter, line) in pages(model) {
        assert_eq!(cleared.contains(&page), letter == 'd', "{at}: page {page:#x}000 of process {pid} in {line}");
    }
}

/// The lines of a model that the program is about to print.
fn model(lines: &mut impl Iterator<Item = String>) -> Vec<String> {
    lines.take_while(|line| line != "end").collect()
}

/// The model's pages, with their letters and lines.
fn pages(model: &[String]) -> impl Iterator<Item = (u64, char, &str)> {
    model.iter().flat_map(|line| {
        let (address, states) = line.split_once(' ').expect("an address and letters");
        let first = u64::from_str_radix(address, 16).expect("an address") / 4096;
        (first..).zip(states.chars()).map(move |(page, letter)| (page, letter, line.as_str()))
    })
}

/// Pages out all processes of the group until told to end.
fn put_out_all(run: u32, end: &AtomicBool) -> u32 {
    let mut done = 0;
    while !end.load(SeqCst) {
        for pid in session(run as i32) {
            done += u32::from(pagemap(&pid.to_string(), &["--page-out", "all"]).0);
        }
    }
    done
}

fn checked(program: &Path, seed: &str, limit: u64, page_outs: bool) {
    let at = format!("seed {seed}, {limit} MiB");
    let mut command = Command::new(uzswap());
    command.args(["run", "--quiet", "--track-writes", "--memory", &format!("{limit}M"), "--"]).arg(program).arg(seed);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).env_remove("LD_PRELOAD");
    let mut run = leading_a_session(&mut command).spawn().expect("uzswap run");
    let (mut to, pid) = (run.stdin.take().expect("piped"), run.id());
    let mut lines = BufReader::new(run.stdout.take().expect("piped")).lines().map_while(Result::ok);
    let ended = AtomicBool::new(false);
    let (finished, end) = mpsc::channel::<()>();
    let (mut counts, mut last) = (BTreeMap::new(), String::new());
    std::thread::scope(|threads| {
        // Whatever goes wrong here, the program must not be left behind.
        threads.spawn(move || {
            if end.recv_timeout(RUN_TIMEOUT) != Ok(()) {
                end_hung(pid as i32);
            }
        });
        let outs = page_outs.then(|| threads.spawn(|| put_out_all(pid, &ended)));
        let _stops = Stops(&ended, finished);
        let mut checks = 0;
        while let Some(line) = lines.next() {
            let (what, of) = line.split_once(' ').unwrap_or((&line, ""));
            match what {
                "clear" => compare_cleared(&at, of, &model(&mut lines)),
                "check" => {
                    let model = model(&mut lines);
                    checks += 1;
                    // A request finds memory that was mapped a moment before. A request for addresses where the program has none,
                    // as here, is refused.
                    match checks % 2 {
                        0 => {
                            let (ok, _, errors) = pagemap(of, &["--page-out", "all"]);
                            assert!(ok, "{at}: page-out failed: {errors}");
                        }
                        _ => assert!(!pagemap(of, &["--page-in", "0-10000"]).0, "{at}: what is at 0?"),
                    }
                    compare(&at, of, &model, &mut counts);
                }
                _ => last = line.clone(),
            }
            if what == "clear" || what == "check" {
                to.write_all(b"\n").expect("it listens");
            }
        }
        ended.store(true, SeqCst);
        let outs = outs.map(|outs| outs.join().expect("page-outs"));
        assert!(outs != Some(0), "{at}: no page-out moved anything");
        say(&format!("{at}: {checks} checks, pages compared: {counts:?}, page-outs: {outs:?}"));
    });
    let status = run.wait().expect("its end");
    assert!(status.success() && last == "done", "{at}: {status}, {last}");
    for letter in ['c', 'd', 'n'] {
        assert!(counts.get(&letter).is_some_and(|n| *n > 1000), "{at}: {counts:?}");
    }
}

/// When a check fails, tells the other threads to end.
struct Stops<'a>(&'a AtomicBool, mpsc::Sender<()>);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
        // A program that waits for an answer ends by itself when its stdin is closed, or is killed.
        if !std::thread::panicking() {
            let _ = self.1.send(());
        }
    }
}

#[test]
fn what_was_written_to_is_known_exactly() {
    let _beside = beside();
    let Some(program) = compile_c("written") else { return };
    // Pages leave all the time, by the limit or on request, or hardly ever.
    for (seed, limit, page_outs) in [("1", 24, false), ("2", 1024, true), ("3", 24, true), ("4", 1024, false)] {
        checked(&program, seed, limit, page_outs);
    }
}

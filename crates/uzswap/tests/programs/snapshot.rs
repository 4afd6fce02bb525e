//! Snapshots of a program that writes all the time, taken by a client that is told of each write (`uzswap::WriteWatch`) while the
//! program's pages leave and come back under a limit.
//!
//! Each thread of the program writes the numbers from 0 on to its pages in turn. A snapshot contains what the threads wrote
//! before it began, and nothing of what they wrote afterwards: so of each thread it has consecutive numbers, each once. A write
//! that the client was not told of, or that did not wait, shows as a gap.

use crate::harness::*;
use crate::hung::end_hung;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use uzswap::WriteWatch;

const PAGE: usize = 4096;
const THREADS: usize = 2;
/// Pages copied and released by one request.
const BATCH: usize = 48;

/// The first word of each of `n` pages from `address` on.
fn words(pid: u32, address: usize, n: usize) -> Vec<u64> {
    let mut words = vec![0u64; n];
    let local = libc::iovec { iov_base: words.as_mut_ptr().cast(), iov_len: n * 8 };
    let remote: Vec<_> =
        (0..n).map(|i| libc::iovec { iov_base: (address + i * PAGE) as *mut libc::c_void, iov_len: 8 }).collect();
    // SAFETY: the call writes n words into memory of ours.
    let read =
        unsafe { libc::process_vm_readv(pid as i32, &raw const local, 1, remote.as_ptr(), n as libc::c_ulong, 0) };
    assert_eq!(read, n as isize * 8, "{}", std::io::Error::last_os_error());
    words
}

/// Takes a snapshot of the first words of `pages` pages. Returns them, and how many writes were reported.
fn snapshot(watch: &WriteWatch, pid: u32, base: usize, pages: usize) -> (Vec<u64>, usize) {
    let protected = watch.protect(base..base + pages * PAGE).expect("protection");
    assert_eq!((protected.pages, protected.stayed), (pages as u64, 0));
    let (mut copy, mut told, mut at) = (vec![None; pages], 0, 0);
    while at < pages {
        while let Some(address) = watch.next_write(Duration::ZERO).expect("the program runs") {
            let page = (address - base) / PAGE;
            // A write may be reported before the page was released with others.
            if copy[page].is_none() {
                copy[page] = Some(words(pid, address, 1)[0]);
                watch.release(address..address + PAGE).expect("release");
                told += 1;
            }
        }
        let n = BATCH.min(pages - at);
        for (i, word) in words(pid, base + at * PAGE, n).into_iter().enumerate() {
            copy[at + i].get_or_insert(word);
        }
        watch.release(base + at * PAGE..base + (at + n) * PAGE).expect("release");
        at += n;
    }
    (copy.into_iter().map(|word| word.expect("all were copied")).collect(), told)
}

/// The first number, if these are consecutive numbers, each at its place.
fn consecutive(words: &[u64]) -> Option<u64> {
    let (n, least) = (words.len() as u64, *words.iter().min()?);
    let right = words.iter().enumerate().all(|(i, word)| word % n == i as u64 && (least..least + n).contains(word));
    right.then_some(least)
}

fn snapshots(program: &Path, limit: u64, faults: Option<&str>) {
    let at = format!("{limit} MiB, failures: {faults:?}");
    let mut command = Command::new(uzswap());
    command.args(["run", "--quiet", "--track-writes", "--memory", &format!("{limit}M"), "--"]).arg(program).arg("5");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).env_remove("LD_PRELOAD");
    if let Some(faults) = faults {
        command.env("UZSWAP_TEST_FAULTS", faults);
    }
    let mut run = leading_a_session(&mut command).spawn().expect("uzswap run");
    let (mut to, leader) = (run.stdin.take().expect("piped"), run.id());
    let mut lines = BufReader::new(run.stdout.take().expect("piped")).lines().map_while(Result::ok);
    let (finished, end) = mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if end.recv_timeout(RUN_TIMEOUT) == Err(mpsc::RecvTimeoutError::Timeout) {
            end_hung(leader as i32);
        }
    });
    let first = lines.next().expect("its first line");
    let mut words = first.split(' ');
    let pid: u32 = words.next().unwrap().parse().unwrap();
    let base = usize::from_str_radix(words.next().unwrap(), 16).unwrap();
    let pages: usize = words.next().unwrap().parse().unwrap();
    let (mut told, mut since) = (0, [0; THREADS]);
    for round in 0..6 {
        // One client after the other, or the same.
        let watch = WriteWatch::of(pid).expect("a watch");
        for _ in 0..=round % 2 {
            // A child meanwhile, whose own writes do not wait.
            if round % 3 == 1 {
                to.write_all(b"fork\n").expect("it listens");
            }
            let (copy, n) = snapshot(&watch, pid, base, THREADS * pages);
            told += n;
            for (t, copy) in copy.chunks(pages).enumerate() {
                let least = consecutive(copy).unwrap_or_else(|| panic!("{at}, round {round}, thread {t}: {copy:?}"));
                assert!(least >= since[t], "{at}: an older snapshot");
                since[t] = least;
            }
            if round % 3 == 1 {
                assert_eq!(lines.next().as_deref(), Some("forked"), "{at}");
            }
        }
    }
    drop(to);
    let last = lines.next();
    let status = run.wait().expect("its end");
    assert!(status.success() && last.as_deref() == Some("done"), "{at}: {status}, {last:?}");
    let _ = finished.send(());
    watchdog.join().expect("the watchdog");
    assert!(told > 20 && since.iter().all(|n| *n > 0), "{at}: {told} writes told, {since:?}");
    say(&format!("{at}: {told} writes told, up to number {since:?}"));
}

#[test]
fn a_snapshot_is_of_one_moment() {
    let _beside = beside();
    let Some(program) = compile_c("snapshot") else { return };
    for (limit, faults) in
        [(16, None), (256, None), (18, Some("seed=9,move_in=1/60,move_out=1/60,copy=1/60,event=1/80"))]
    {
        snapshots(&program, limit, faults);
    }
}

//! The processes of `lab usemem`: each writes its memory, all at once, and reads it back afterwards.
//!
//! The first process starts the others, and lets them begin when all are ready, as starting processes and reading through the
//! contents is not swapping. It waits until all have written, and prints what that took. Then each process, one after another,
//! compares its memory with what it wrote; that is not measured.

use crate::data::Source;
use crate::size::{self, PAGE};
use crate::used::Used;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// `uzswap lab usemem-worker`.
#[derive(clap::Args)]
pub struct Args {
    /// Number of processes; 0: this is one of them
    #[arg(long)]
    processes: u32,
    /// Which of them this is
    #[arg(long, default_value = "0")]
    index: u64,
    /// Bytes that each process writes
    #[arg(long, value_parser = size::parse)]
    size: u64,
    /// Size of the folios that the memory is to have, in bytes
    #[arg(long, value_parser = size::parse)]
    folio: u64,
    /// File of real contents; without it the words are numbered, as in usemem
    #[arg(long)]
    source: Option<PathBuf>,
}

/// Printed by a process that can begin.
const READY: &str = "ready";

/// What writing took, of one process or of all.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Said {
    /// Seconds on the clock.
    pub seconds: f64,
    /// CPU seconds in user mode, of all threads.
    pub user: f64,
    /// CPU seconds in the kernel.
    pub system: f64,
    /// Whether some memory did not hold what was written.
    pub corrupt: bool,
}

/// Runs; returns 0 if everything read was what was written.
#[must_use]
pub fn main(args: &Args) -> i32 {
    let result = if args.processes == 0 { one(args) } else { all(args) };
    match result {
        Ok(right) => i32::from(!right),
        Err(error) => {
            eprintln!("error: {error}");
            1
        }
    }
}

/// One process. It prints that it is ready and waits for a byte; writes, prints what that took and waits for another; then prints
/// whether its memory is as it was written.
fn one(args: &Args) -> io::Result<bool> {
    let source = args.source.as_deref().map(Source::open).transpose()?;
    let len = args.size as usize / PAGE * PAGE;
    let memory = map(len, args.folio)?;
    let mut want = [0u8; PAGE];
    let mut stdin = io::stdin().lock();
    println!("{READY}");
    stdin.read_exact(&mut [0])?;
    let (start, before) = (Instant::now(), Used::by_me());
    for (i, page) in memory.chunks_exact_mut(PAGE).enumerate() {
        contents(source.as_ref(), args.index, i, page);
    }
    let used = Used::by_me() - before;
    let said = Said { seconds: start.elapsed().as_secs_f64(), user: used.user, system: used.system, corrupt: false };
    println!("{}", serde_json::to_string(&said)?);
    stdin.read_exact(&mut [0])?;
    let right = memory.chunks_exact(PAGE).enumerate().all(|(i, page)| {
        contents(source.as_ref(), args.index, i, &mut want);
        page == want
    });
    println!("{right}");
    Ok(right)
}

/// Runs all processes.
fn all(args: &Args) -> io::Result<bool> {
    let exe = std::env::current_exe()?;
    let mut children: Vec<(Child, BufReader<std::process::ChildStdout>)> = Vec::new();
    for index in 0..args.processes {
        let mut command = Command::new(&exe);
        command.args(["lab", "usemem-worker", "--processes", "0", "--index", &index.to_string()]);
        command.args(["--size", &args.size.to_string(), "--folio", &args.folio.to_string()]);
        if let Some(source) = &args.source {
            command.arg("--source").arg(source);
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let output = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        children.push((child, BufReader::new(output)));
    }
    for (_, output) in &mut children {
        let mut line = String::new();
        output.read_line(&mut line)?;
        if line.trim() != READY {
            return Err(io::Error::other("a process did not start"));
        }
    }
    let start = Instant::now();
    for (child, _) in &mut children {
        child.stdin.as_mut().ok_or(io::ErrorKind::BrokenPipe)?.write_all(b"w")?;
    }
    let mut total = Said::default();
    for (_, output) in &mut children {
        let mut line = String::new();
        output.read_line(&mut line)?;
        let said: Said = serde_json::from_str(&line).map_err(|_| io::Error::other("a process said nothing"))?;
        total.user += said.user;
        total.system += said.system;
    }
    total.seconds = start.elapsed().as_secs_f64();
    for (child, output) in &mut children {
        child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?.write_all(b"v")?;
        let mut line = String::new();
        output.read_line(&mut line)?;
        total.corrupt |= line.trim() == "false";
        if !child.wait()?.success() && !total.corrupt {
            return Err(io::Error::other("a process ended badly"));
        }
    }
    println!("{}", serde_json::to_string(&total)?);
    Ok(!total.corrupt)
}

/// The contents of page `i` of process `index`.
fn contents(source: Option<&Source>, index: u64, i: usize, page: &mut [u8]) {
    match source {
        Some(source) => {
            page.copy_from_slice(source.page((i + index as usize * 997) % source.pages()));
            page[..8].copy_from_slice(&(index << 32 | i as u64).to_ne_bytes());
        }
        None => {
            for (word, bytes) in page.chunks_exact_mut(8).enumerate() {
                bytes.copy_from_slice(&((i * PAGE / 8 + word) as u64).to_ne_bytes());
            }
        }
    }
}

/// Memory with folios of this size, where the kernel makes them: huge pages from 2 MiB on, what it makes unasked from 64 KiB on,
/// small pages below.
fn map(len: usize, folio: u64) -> io::Result<&'static mut [u8]> {
    const HUGE: usize = 2 << 20;
    const HUGE_BYTES: u64 = HUGE as u64;
    const K64: u64 = 64 << 10;
    let (rw, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice; advice about it; a slice of it that nobody else has, from an
    // address aligned to a huge page, with `len` bytes left.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), len + HUGE, rw, flags, -1, 0);
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let at = (at as usize).next_multiple_of(HUGE);
        let advice = match folio {
            K64..HUGE_BYTES => None,
            HUGE_BYTES.. => Some(libc::MADV_HUGEPAGE),
            _ => Some(libc::MADV_NOHUGEPAGE),
        };
        if let Some(advice) = advice {
            libc::madvise(at as *mut libc::c_void, len, advice);
        }
        Ok(std::slice::from_raw_parts_mut(at as *mut u8, len))
    }
}

//! `uzswap lab kernel`: the same work under the kernel's compressed swaps and under uzswap.
//!
//! Read [`subject`] (who does the work, and how one run is judged), [`memory`] (workloads on memory, and the limit), [`churned`]
//! (the same after an hour's churn), then [`programs`] (real programs).

mod churned;
mod memory;
mod programs;
mod subject;

use crate::experiment::{Common, Runs, Stop, at_least, go_on};
use crate::json::{Findings, Row, Verdict};
use crate::size::{self, MIB, mib};
use crate::undo::Keeper;
use crate::{data, process};
use serde_json::json;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use subject::{Failure, Subject, With};

/// `uzswap lab kernel`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(crate) common: Common,
    /// The limit; the work uses twice as much [default: 128M, 32M with --quick]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,
    #[command(flatten)]
    runs: Runs,
    /// Only these parts: memory, churn, programs, overhead, limit
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    #[arg(value_parser = ["memory", "churn", "programs", "overhead", "limit"])]
    only: Vec<String>,
    /// Directory for temporary files, a swap file among them, so no tmpfs [default: the system's temporary directory]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// The command whose `run` is measured [default: this one]
    #[arg(long, value_name = "PATH", hide = true)]
    uzswap: Option<PathBuf>,
}

/// When `--quick` starts nothing more and stops what still runs; writing the table takes no time.
const QUICK: Duration = Duration::from_secs(37);

/// An experiment under way.
struct Lab<'a> {
    keeper: &'a Keeper,
    /// A directory of the lab's own, removed at the end.
    dir: PathBuf,
    exe: PathBuf,
    uzswap: PathBuf,
    limit: u64,
    size: u64,
    runs: u32,
    quick: bool,
    /// Bytes of swap for each peer.
    swap: u64,
    rows: Vec<Row>,
    verdicts: Vec<Verdict>,
    notes: Vec<String>,
    /// Subjects that cannot be set up here, and why.
    out: BTreeMap<Subject, String>,
    /// When a quick experiment must end.
    deadline: Option<Instant>,
    /// Runs that the kernel's OOM killer ended, by subject.
    oom: RefCell<BTreeMap<Subject, u32>>,
    /// Whether everything read back was right.
    right: bool,
}

/// Runs the experiment. Returns whether everything read back was right.
///
/// # Errors
/// Why it ended early.
pub fn run(args: &Args) -> Result<bool, Stop> {
    let start = Instant::now();
    let limit = args.memory.unwrap_or(if args.common.quick { 32 * MIB } else { 128 * MIB });
    at_least("memory", limit, 16 * MIB)?;
    let exe = std::env::current_exe().map_err(|e| e.to_string())?;
    let keeper = Keeper::start()?;
    let (dir, _dir) = keeper.make_dir(args.dir.as_deref())?;
    let python = crate::programs::python();
    let pool = if args.common.quick { 32 * MIB } else { 64 * MIB };
    let contents = data::write(&dir.join("source"), pool, python.as_deref())?;
    let mut lab = Lab {
        keeper: &keeper,
        dir,
        uzswap: args.uzswap.clone().unwrap_or_else(|| exe.clone()),
        exe,
        limit,
        size: limit * 2,
        runs: args.runs.count(&args.common),
        quick: args.common.quick,
        swap: (2 << 30).max(limit * 4),
        rows: Vec::new(),
        verdicts: Vec::new(),
        notes: Vec::new(),
        out: BTreeMap::new(),
        deadline: args.common.quick.then(|| start + QUICK),
        oom: RefCell::default(),
        right: true,
    };
    lab.measure(&args.only, python.as_deref())?;
    for (subject, times) in lab.oom.take() {
        lab.notes.push(format!(
            "{}: the kernel's OOM killer ended {times} runs although there was swap; such a run was made again, {} times \
             at most.",
            subject.title(),
            subject::TRIES
        ));
    }
    for (subject, reason) in &lab.out {
        lab.notes.push(format!("Not measured: {}: {reason}.", subject.title()));
    }
    let settings = json!({
        "limit_bytes": lab.limit, "data_bytes": lab.size, "runs": lab.runs, "quick": lab.quick, "threads": 1,
        "contents": contents, "pool_bytes": pool, "swap_bytes": lab.swap,
        "peers": { "zswap": "lzo, in front of a swap file", "zram": "lz4", "limit": "cgroup v1 memory.limit_in_bytes" },
        "seconds": start.elapsed().as_secs(), "notes": lab.notes,
    });
    let findings = Findings { rows: lab.rows, verdicts: lab.verdicts, ..Findings::new("kernel", settings) };
    show!(
        "uzswap lab kernel: {} of memory under a limit of {}, holding {contents}; medians of {} {}, one thread where no more are named\n",
        mib(lab.size),
        mib(lab.limit),
        lab.runs,
        if lab.runs == 1 { "run" } else { "runs" },
    );
    findings.publish(&Subject::ALL.map(|s| (s.key(), s.title())), &lab.notes, args.common.json.as_deref())?;
    Ok(lab.right)
}

impl Lab<'_> {
    /// Measures all parts, or those in `only`.
    fn measure(&mut self, only: &[String], python: Option<&Path>) -> Result<(), Stop> {
        let wants = |part: &str| only.is_empty() || only.iter().any(|p| p == part);
        self.try_run()?;
        if wants("limit") {
            self.limit_kept()?;
        }
        if wants("memory") {
            self.memory()?;
        }
        // Churn takes minutes, whatever the size.
        if wants("churn") && !(self.quick && only.is_empty()) {
            self.churned()?;
        }
        if wants("programs") || wants("overhead") {
            let (programs, missing) = crate::programs::all(&self.dir, python, self.quick);
            if !missing.is_empty() {
                self.notes.push(format!("Not measured: {}.", missing.join(", ")));
            }
            // First, as it is short and needs no peer: with --quick, peers that are killed again and again may use up the time.
            if let (true, Some(program)) = (wants("overhead"), programs.first()) {
                self.overhead(program)?;
            }
            if wants("overhead") {
                self.starts()?;
            }
            if wants("programs") {
                self.programs(&programs)?;
            }
        }
        Ok(())
    }

    fn say(&self, what: &str) {
        tell!("uzswap lab: {what}");
    }

    /// Finds out early whether there is a `run` to measure.
    fn try_run(&mut self) -> Result<(), Stop> {
        let done = self.run(Subject::RunCharged, &["/bin/true".into()], self.limit, &With::default());
        // Otherwise an interruption would be taken for the reason.
        go_on()?;
        let reason = done.map_or_else(|failure| Err(failure.to_string()), |outcome| outcome.ok());
        if let Err(reason) = reason {
            for subject in [Subject::Run, Subject::RunCharged] {
                self.out.insert(subject, format!("`uzswap run` does not work here: {reason}"));
            }
        }
        Ok(())
    }
}

/// Notes that a subject has no figure in a part of the experiment. A signal stops everything.
fn fail(lab: &mut Lab<'_>, part: &str, subject: Subject, failure: Failure) -> Result<(), Stop> {
    if process::interrupted() {
        return Err(Stop::Interrupted);
    }
    match failure {
        Failure::Absent(reason) => drop(lab.out.insert(subject, reason)),
        failure => lab.notes.push(format!("{part}, {}: {failure}.", subject.title())),
    }
    Ok(())
}

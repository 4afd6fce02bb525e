//! The subjects of the experiment, and how one run is made and judged.

use super::Lab;
use crate::peers::{self, Peer};
use crate::process::{self, Outcome, Spec};
use crate::{report, worker};
use serde_json::Value;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// What the work runs under.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// No limit at all.
    Plain,
    /// The kernel's zswap.
    Zswap,
    /// The kernel's zram.
    Zram,
    /// `uzswap run` without its pool counted, as a cgroup v1 does not count the kernel's.
    Run,
    /// `uzswap run` as it is, with its pool counted.
    RunCharged,
    /// A region of the library, without its pool counted.
    Library,
    /// A region of the library as it is, with its pool counted.
    LibraryCharged,
}

use Subject::{Library, LibraryCharged, Plain, Run, RunCharged, Zram, Zswap};

impl Subject {
    /// All, in the order of the columns.
    pub const ALL: [Self; 7] = [Plain, Zswap, Zram, Run, RunCharged, Library, LibraryCharged];

    /// Its name in files.
    pub const fn key(self) -> &'static str {
        match self {
            Plain => "plain",
            Zswap => "zswap",
            Zram => "zram",
            Run => "run",
            RunCharged => "run_charged",
            Library => "library",
            LibraryCharged => "library_charged",
        }
    }

    /// Its name in tables.
    pub const fn title(self) -> &'static str {
        match self {
            Plain => "no limit",
            Zswap => "zswap lzo",
            Zram => "zram lz4",
            Run => "uzswap run",
            RunCharged => "run, pool charged",
            Library => "uzswap region",
            LibraryCharged => "region, pool charged",
        }
    }

    /// Its name in verdicts, for the two of ours that are judged.
    pub const fn judged(self) -> &'static str {
        if self.is_library() { "library region" } else { "run" }
    }

    const fn is_library(self) -> bool {
        matches!(self, Library | LibraryCharged)
    }

    const fn is_run(self) -> bool {
        matches!(self, Run | RunCharged)
    }

    const fn uncharged(self) -> bool {
        matches!(self, Run | Library)
    }

    const fn peer(self) -> Option<Peer> {
        match self {
            Zswap => Some(Peer::Zswap),
            Zram => Some(Peer::Zram),
            _ => None,
        }
    }
}

/// Why a subject has no figure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The kernel's OOM killer ended it each time, although there was swap. This is no figure, but a finding.
    OomKilled,
    /// This machine cannot set it up, so it will not be tried again.
    Absent(String),
    /// It failed this time.
    Went(String),
}

impl Failure {
    /// The table's entry in place of a figure, if it says more than that there is none.
    pub const fn mark(&self) -> Option<&'static str> {
        match self {
            Self::OomKilled => Some("OOM-killed"),
            Self::Absent(_) | Self::Went(_) => None,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OomKilled => {
                write!(f, "OOM-killed {TRIES} times of {TRIES} by the kernel, although there was swap to spare")
            }
            Self::Absent(reason) | Self::Went(reason) => f.write_str(reason),
        }
    }
}

impl From<String> for Failure {
    fn from(reason: String) -> Self {
        Self::Went(reason)
    }
}

/// How often a run is made that the OOM killer ends: in a small cgroup it strikes at times although there is swap.
pub const TRIES: u32 = 3;

const OUT_OF_TIME: &str = "no time left with --quick";

/// How to watch a run.
pub struct With {
    /// The file for its standard input.
    pub stdin: Option<PathBuf>,
    /// How often to sample its memory.
    pub sample: Duration,
    /// When to give it up.
    pub timeout: Duration,
}

impl Default for With {
    fn default() -> Self {
        Self { stdin: None, sample: Duration::from_millis(20), timeout: Duration::from_secs(120) }
    }
}

impl Lab<'_> {
    /// Runs `argv` as the subject does, under `limit`. A run that the OOM killer ends is made again, up to [`TRIES`] times in
    /// all; the notes say how often it struck.
    pub(super) fn run(&self, subject: Subject, argv: &[OsString], limit: u64, with: &With) -> Result<Outcome, Failure> {
        for _ in 0..TRIES {
            let (outcome, oom) = self.run_once(subject, argv, limit, with)?;
            if !oom {
                return Ok(outcome);
            }
            *self.oom.borrow_mut().entry(subject).or_default() += 1;
        }
        Err(Failure::OomKilled)
    }

    /// Makes one run; also returns whether the OOM killer ended it.
    fn run_once(
        &self,
        subject: Subject,
        argv: &[OsString],
        limit: u64,
        with: &With,
    ) -> Result<(Outcome, bool), Failure> {
        let mut spec = Spec {
            argv: argv.to_vec(),
            env: Vec::new(),
            stdin: with.stdin.clone(),
            cgroup: None,
            sample: Some(with.sample),
            timeout: with.timeout,
        };
        if let Some(deadline) = self.deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(OUT_OF_TIME.to_owned().into());
            }
            spec.timeout = spec.timeout.min(left);
        }
        if subject.uncharged() {
            spec.env.push(("UZSWAP_POOL_UNCHARGED", "1".to_owned()));
        }
        let ready = match subject.peer() {
            Some(peer) => {
                let ready = peers::set_up(self.keeper, peer, limit, self.swap, &self.dir, false);
                Some(ready.map_err(Failure::Absent)?)
            }
            None => None,
        };
        spec.cgroup = ready.as_ref().map(|ready| ready.cgroup().to_owned());
        if subject.is_run() {
            let memory = format!("{}K", limit / 1024);
            let mut argv: Vec<OsString> = vec![self.uzswap.clone().into()];
            argv.extend(["run", "--memory", &memory, "--quiet", "--report"].map(OsString::from));
            argv.extend([self.report_path().into(), "--".into()]);
            argv.append(&mut spec.argv);
            spec.argv = argv;
            let _ = std::fs::remove_file(self.report_path());
        }
        let outcome = process::run(self.keeper, &spec)?;
        if outcome.timed_out && self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(OUT_OF_TIME.to_owned().into());
        }
        let oom = !outcome.timed_out && !outcome.status.success() && ready.is_some_and(|ready| ready.oom_kills() > 0);
        Ok((outcome, oom))
    }

    /// The report of the last `uzswap run`, if it wrote one.
    pub(super) fn report(&self) -> Option<Value> {
        report::read(&self.report_path())
    }

    /// The path of the report of `uzswap run`.
    fn report_path(&self) -> PathBuf {
        self.dir.join("report.json")
    }

    /// The command line of a worker.
    fn worker(&self, subject: Subject, more: &[&str]) -> Vec<OsString> {
        let mut argv: Vec<OsString> = vec![self.exe.clone().into()];
        argv.extend(["lab", "worker", "--source"].map(OsString::from));
        argv.push(self.dir.join("source").into());
        argv.extend(["--size".into(), self.size.to_string().into()]);
        if subject.is_library() {
            argv.extend(["--origin", "region", "--limit"].map(OsString::from));
            argv.push(self.limit.to_string().into());
        }
        argv.extend(more.iter().map(OsString::from));
        argv
    }

    /// Runs one worker under one subject; returns its report, and how it looked from outside.
    pub(super) fn work(
        &mut self,
        subject: Subject,
        more: &[&str],
        with: &With,
    ) -> Result<(worker::Report, Outcome), Failure> {
        let outcome = self.run(subject, &self.worker(subject, more), self.limit, with)?;
        let line = String::from_utf8_lossy(&outcome.stdout);
        let report: worker::Report = match serde_json::from_str(line.trim()) {
            Ok(report) => report,
            Err(_) => {
                return Err(outcome.ok().err().unwrap_or_else(|| "said nothing".to_owned()).into());
            }
        };
        if report.corrupt {
            self.right = false;
        }
        match &report.error {
            Some(error) if report.corrupt => Err(format!("MEMORY WAS NOT KEPT: {error}").into()),
            Some(error) => Err(error.clone().into()),
            None => Ok(outcome.ok().map(|()| (report, outcome))?),
        }
    }
}

/// How much of the most anonymous memory that a subject's processes held counts against the limit. The pool does not if it is not
/// charged: it is in the same processes, and would make a limited subject look unlimited. A region says how large its `pool` was.
/// For `run`, its `report` has the highest charge, as its pool at the end is not that at the peak.
pub fn counted(subject: Subject, peak_anon: u64, pool: u64, report: Option<&Value>) -> u64 {
    match subject {
        Run => report.and_then(report::peak).unwrap_or(peak_anon),
        Library => peak_anon.saturating_sub(pool),
        _ => peak_anon,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size::MIB;
    use serde_json::json;

    /// With a pool of 30 MiB and 34 MiB of the program, the sum looked like no limit at all (64 of 64 MiB).
    #[test]
    fn an_uncharged_pool_is_not_held_against_its_subject() {
        let report = json!({"peak": 34 * MIB, "counters": {"pool_total_size": 20 * MIB}});
        assert_eq!(counted(Run, 64 * MIB, 0, Some(&report)), 34 * MIB, "not the pool at the end, which is smaller");
        assert_eq!(counted(Run, 64 * MIB, 0, None), 64 * MIB);
        assert_eq!(counted(Library, 64 * MIB, 30 * MIB, None), 34 * MIB);
        assert_eq!(counted(RunCharged, 64 * MIB, 30 * MIB, Some(&report)), 64 * MIB, "charged: the pool counts");
    }

    #[test]
    fn only_the_oom_killer_leaves_a_mark() {
        assert_eq!(Failure::OomKilled.mark(), Some("OOM-killed"));
        assert_eq!(Failure::Went("exit status 1".to_owned()).mark(), None);
        assert!(Failure::OomKilled.to_string().contains("3 times of 3"));
    }
}

//! `uzswap lab kernel`: the same work under the kernel's compressed swaps and under uzswap.

use crate::json::{Findings, Row, Verdict};
use crate::peers::{self, Peer};
use crate::process::{self, Outcome, Spec};
use crate::programs::{self, Program};
use crate::size::{self, MIB, mib};
use crate::stats::{geometric_mean, median, percent};
use crate::undo::{Keeper, Step};
use crate::workload::Workload;
use crate::{data, machine, worker};
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hasher};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// `uzswap lab kernel`.
#[derive(clap::Args)]
pub struct Args {
    /// Less memory and fewer programs, one run of each: under 40 s
    #[arg(long)]
    quick: bool,
    /// Write the findings to FILE
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The limit; the work is on twice as much [default: 128M, 32M with --quick]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,
    /// Runs of each, of which the median counts [default: 3, 1 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=99))]
    runs: Option<u32>,
    /// Only these parts: memory, programs, overhead, limit
    #[arg(long, value_name = "PART", value_delimiter = ',', value_parser = ["memory", "programs", "overhead", "limit"])]
    only: Vec<String>,
    /// Where files are made meanwhile (a swap file among them, so no tmpfs) [default: the system's temporary directory]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// The command whose `run` is measured [default: this one]
    #[arg(long, value_name = "PATH", hide = true)]
    uzswap: Option<PathBuf>,
}

/// When `--quick` starts nothing more: what runs then is stopped, and writing the table takes no time.
const QUICK: Duration = Duration::from_secs(37);

/// Who does the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    /// Without any limit.
    Plain,
    Zswap,
    Zram,
    /// `uzswap run`, its pool not counted, as a cgroup v1 does not count the kernel's.
    Run,
    /// `uzswap run` as it is, its pool counted.
    RunCharged,
    /// A region of the library, its pool not counted.
    Library,
    /// A region of the library as it is, its pool counted.
    LibraryCharged,
}

use Subject::{Library, LibraryCharged, Plain, Run, RunCharged, Zram, Zswap};

impl Subject {
    const ALL: [Self; 7] = [Plain, Zswap, Zram, Run, RunCharged, Library, LibraryCharged];

    /// Its name in files.
    const fn key(self) -> &'static str {
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
    const fn title(self) -> &'static str {
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

    const fn is_library(self) -> bool {
        matches!(self, Library | LibraryCharged)
    }

    const fn uncharged(self) -> bool {
        matches!(self, Run | Library)
    }
}

/// Why the experiment ends early.
enum Stop {
    /// A signal asked for it.
    Interrupted,
    /// It cannot go on.
    Failed(String),
}

impl From<String> for Stop {
    fn from(reason: String) -> Self {
        if process::interrupted() { Self::Interrupted } else { Self::Failed(reason) }
    }
}

/// Runs the experiment and returns the exit status.
#[must_use]
pub fn main(args: &Args) -> i32 {
    process::unwind_on_signals();
    match experiment(args) {
        Ok(right) => i32::from(!right),
        Err(Stop::Interrupted) => {
            eprintln!("uzswap lab: interrupted; the machine is as it was");
            130
        }
        Err(Stop::Failed(reason)) => {
            eprintln!("uzswap lab: {reason}");
            1
        }
    }
}

/// One experiment under way.
struct Lab<'a> {
    keeper: &'a Keeper,
    /// Of the lab's own, gone afterwards.
    dir: PathBuf,
    exe: PathBuf,
    uzswap: PathBuf,
    limit: u64,
    size: u64,
    runs: u32,
    quick: bool,
    /// Bytes of swap each peer gets.
    swap: u64,
    rows: Vec<Row>,
    verdicts: Vec<Verdict>,
    notes: Vec<String>,
    /// Subjects that cannot be measured here, with the reason.
    out: BTreeMap<Subject, String>,
    /// When a quick experiment is to be over.
    deadline: Option<Instant>,
    /// Times the kernel's reclaim gave up and was made to try again, by subject.
    rescues: RefCell<BTreeMap<Subject, u64>>,
    /// Runs the kernel's OOM killer ended, by subject.
    oom: RefCell<BTreeMap<Subject, u32>>,
    /// Whether all that was read was right.
    right: bool,
}

/// Whether everything read was right.
fn experiment(args: &Args) -> Result<bool, Stop> {
    let start = Instant::now();
    let limit = args.memory.unwrap_or(if args.quick { 32 * MIB } else { 128 * MIB });
    if limit < 16 * MIB {
        return Err(Stop::Failed("--memory is to be 16M or more".to_owned()));
    }
    let exe = std::env::current_exe().map_err(|e| e.to_string())?;
    let keeper = Keeper::start()?;
    let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir).join(format!("uzswap-lab-{}", std::process::id()));
    let _dir = keeper.will_undo(Step::RemoveDir(dir.clone()))?;
    std::fs::create_dir_all(&dir).map_err(|e| format!("cannot make {}: {e}", dir.display()))?;
    let python = programs::python();
    let pool = if args.quick { 32 * MIB } else { 64 * MIB };
    let contents = data::write(&dir.join("source"), pool, python.as_deref())?;
    let mut lab = Lab {
        keeper: &keeper,
        dir,
        uzswap: args.uzswap.clone().unwrap_or_else(|| exe.clone()),
        exe,
        limit,
        size: limit * 2,
        runs: args.runs.unwrap_or(if args.quick { 1 } else { 3 }),
        quick: args.quick,
        swap: (2 << 30).max(limit * 4),
        rows: Vec::new(),
        verdicts: Vec::new(),
        notes: Vec::new(),
        out: BTreeMap::new(),
        deadline: args.quick.then(|| start + QUICK),
        rescues: RefCell::default(),
        oom: RefCell::default(),
        right: true,
    };
    let wants = |part: &str| args.only.is_empty() || args.only.iter().any(|p| p == part);
    lab.try_run();
    if wants("limit") {
        lab.limit_kept()?;
    }
    if wants("memory") {
        lab.memory()?;
    }
    if wants("programs") || wants("overhead") {
        let (programs, missing) = programs::all(&lab.dir, python.as_deref(), args.quick)?;
        if !missing.is_empty() {
            lab.notes.push(format!("Not on this machine, so not measured: {}.", missing.join(", ")));
        }
        if wants("programs") {
            lab.programs(&programs)?;
        }
        if let (true, Some(program)) = (wants("overhead"), programs.first()) {
            lab.overhead(program)?;
        }
    }
    for (subject, times) in lab.rescues.take() {
        lab.notes.push(format!(
            "{}: {times} times the kernel's reclaim gave up although there was swap; the program waited (a millisecond or \
             so each, in its figures) and reclaim was tried again. Only in runs that the OOM killer had ended twice.",
            subject.title()
        ));
    }
    for (subject, times) in lab.oom.take() {
        lab.notes.push(format!(
            "{}: the kernel's OOM killer ended {times} runs although there was swap; such a run was done again.",
            subject.title()
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
    let findings = Findings {
        experiment: "kernel".to_owned(),
        machine: machine::describe(),
        settings: match settings {
            Value::Object(map) => map,
            _ => Map::new(),
        },
        rows: lab.rows,
        verdicts: lab.verdicts,
    };
    println!(
        "uzswap lab kernel: {} of memory under a limit of {}, holding {contents}; medians of {} {}, one thread\n",
        mib(lab.size),
        mib(lab.limit),
        lab.runs,
        if lab.runs == 1 { "run" } else { "runs" },
    );
    findings.publish(&Subject::ALL.map(|s| (s.key(), s.title())), &lab.notes, args.json.as_deref())?;
    Ok(lab.right)
}

impl Lab<'_> {
    fn say(&self, what: &str) {
        eprintln!("uzswap lab: {what}");
    }

    /// Runs `argv` as the subject does, under `limit`. The kernel's OOM killer at times ends a program in a small cgroup
    /// although there is swap; such a run is done again, and the third time the program waits instead of being killed
    /// (see [`peers::cgroup::Rescue`]). Both are told in the notes.
    fn run(&self, subject: Subject, argv: &[OsString], limit: u64, with: &With) -> Result<Outcome, String> {
        for wait in [false, false, true] {
            let (outcome, oom) = self.run_once(subject, argv, limit, with, wait)?;
            if !oom {
                return Ok(outcome);
            }
            *self.oom.borrow_mut().entry(subject).or_default() += 1;
        }
        Err("killed three times by the kernel's OOM killer, with swap to spare".to_owned())
    }

    /// One run, and whether the OOM killer ended it.
    fn run_once(
        &self,
        subject: Subject,
        argv: &[OsString],
        limit: u64,
        with: &With,
        wait: bool,
    ) -> Result<(Outcome, bool), String> {
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
                return Err("no time left with --quick".to_owned());
            }
            spec.timeout = spec.timeout.min(left);
        }
        if subject.uncharged() {
            spec.env.push(("UZSWAP_POOL_UNCHARGED", "1".to_owned()));
        }
        let peer = match subject {
            Zswap => Some(Peer::Zswap),
            Zram => Some(Peer::Zram),
            _ => None,
        };
        let ready = match peer {
            Some(peer) => Some(peers::set_up(self.keeper, peer, limit, self.swap, &self.dir, wait)?),
            None => None,
        };
        spec.cgroup = ready.as_ref().map(|ready| ready.cgroup().to_owned());
        if matches!(subject, Run | RunCharged) {
            let memory = format!("{}K", limit / 1024);
            let mut argv: Vec<OsString> = vec![self.uzswap.clone().into()];
            argv.extend(["run", "--memory", &memory, "--quiet"].map(OsString::from));
            if let Some(report) = &with.report {
                argv.extend(["--report".into(), report.into()]);
            }
            argv.push("--".into());
            argv.append(&mut spec.argv);
            spec.argv = argv;
        }
        let outcome = process::run(self.keeper, &spec)?;
        if outcome.rescues > 0 {
            *self.rescues.borrow_mut().entry(subject).or_default() += outcome.rescues;
        }
        let oom = !outcome.timed_out && !outcome.status.success() && ready.is_some_and(|ready| ready.oom_kills() > 0);
        Ok((outcome, oom))
    }

    /// Tells early whether there is a `run` to measure.
    fn try_run(&mut self) {
        let done = self.run(RunCharged, &["/bin/true".into()], self.limit, &With::default());
        if let Err(reason) = done.and_then(|outcome| outcome.ok()) {
            self.out.insert(Run, format!("`uzswap run` does not work here: {reason}"));
            self.out.insert(RunCharged, format!("`uzswap run` does not work here: {reason}"));
        }
    }

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

    /// One worker under one subject: its report and how it was seen from outside.
    fn work(&mut self, subject: Subject, more: &[&str], with: &With) -> Result<(worker::Report, Outcome), String> {
        let outcome = self.run(subject, &self.worker(subject, more), self.limit, with)?;
        let line = String::from_utf8_lossy(&outcome.stdout);
        let report: worker::Report = match serde_json::from_str(line.trim()) {
            Ok(report) => report,
            Err(_) => {
                return Err(outcome.ok().err().unwrap_or_else(|| "said nothing".to_owned()));
            }
        };
        if report.corrupt {
            self.right = false;
        }
        match &report.error {
            Some(error) if report.corrupt => Err(format!("MEMORY WAS NOT KEPT: {error}")),
            Some(error) => Err(error.clone()),
            None => outcome.ok().map(|()| (report, outcome)),
        }
    }

    /// The workloads on memory: a row each, and the ratios.
    fn memory(&mut self) -> Result<(), Stop> {
        let subjects = [Plain, Zswap, Zram, Run, RunCharged, Library, LibraryCharged];
        let mut figures: BTreeMap<(Workload, Subject), Vec<f64>> = BTreeMap::new();
        let mut peaks: BTreeMap<Subject, f64> = BTreeMap::new();
        for run in 0..self.runs {
            for subject in subjects {
                if self.out.contains_key(&subject) {
                    continue;
                }
                self.say(&format!("run {} of {}: memory, {}", run + 1, self.runs, subject.title()));
                match self.work(subject, &[], &With::default()) {
                    Ok((report, outcome)) => {
                        let peak = peaks.entry(subject).or_default();
                        *peak = peak.max(outcome.peak_anon as f64);
                        for (workload, figure) in report.done.iter().filter_map(worker::Done::figure) {
                            figures.entry((workload, subject)).or_default().push(figure);
                        }
                    }
                    Err(_) if process::interrupted() => return Err(Stop::Interrupted),
                    Err(reason) => {
                        figures.retain(|(_, s), _| *s != subject);
                        peaks.remove(&subject);
                        self.out.insert(subject, reason);
                    }
                }
            }
        }
        for workload in Workload::ALL {
            let mut row = Row::new(workload.name(), if workload.per_access() { "ns" } else { "MB/s" });
            for subject in subjects {
                row.put(subject.key(), figures.get(&(workload, subject)).and_then(|f| median(f)));
            }
            self.rows.push(row);
        }
        let mut row = Row::new("anonymous memory, peak", "MiB");
        for (subject, peak) in &peaks {
            row.put(subject.key(), Some(peak / MIB as f64));
        }
        self.rows.push(row);
        // A subject that held nearly all of it in memory was not limited; how fast it was says nothing.
        for subject in [Run, Library] {
            if peaks.get(&subject).is_some_and(|peak| *peak > 0.95 * self.size as f64) {
                self.notes.push(format!(
                    "{} held {} of the {} in memory: it was not limited, and its figures are not compared.",
                    subject.title(),
                    mib(peaks[&subject] as u64),
                    mib(self.size)
                ));
                peaks.remove(&subject);
            }
        }
        self.notes.push(
            "A cgroup v1 charges the program for neither zswap's pool nor zram's. So `uzswap run` and `uzswap region` \
             count the same way (UZSWAP_POOL_UNCHARGED=1) and are what is compared;\nin the columns `pool charged`, \
             uzswap's default, the limit bounds the pool too, which leaves less room for the program."
                .to_owned(),
        );
        self.ratios(&peaks);
        Ok(())
    }

    /// The verdicts on the workloads.
    fn ratios(&mut self, comparable: &BTreeMap<Subject, f64>) {
        let targets = [
            (Library, Workload::Fill, 4.0),
            (Library, Workload::SequentialRead, 9.0),
            (Library, Workload::RandomRead, 2.0),
            (Library, Workload::RandomWrite, 1.5),
            (Run, Workload::Fill, 3.0),
            (Run, Workload::SequentialRead, 5.0),
            (Run, Workload::RandomRead, 1.3),
        ];
        for (subject, workload, target) in targets {
            let Some(row) = self.rows.iter().find(|row| row.name == workload.name()) else {
                continue;
            };
            let name = if subject == Library { "library region" } else { "run" };
            let what = format!("{name}: {}, times the better of zswap and zram", workload.name());
            if let (true, Some(ratio)) = (comparable.contains_key(&subject), ratio(row, subject, workload.per_access()))
            {
                self.verdicts.push(Verdict::at_least(&what, target, ratio));
            }
        }
    }

    /// The limit as seen from outside while memory is filled; and what uzswap says of its metadata.
    fn limit_kept(&mut self) -> Result<(), Stop> {
        if self.out.contains_key(&RunCharged) {
            return Ok(());
        }
        self.say("the limit, from outside");
        let report = self.dir.join("report.json");
        let with = With { sample: Duration::from_millis(3), report: Some(report.clone()), ..With::default() };
        let outcome = match self.work(RunCharged, &["--fill-only"], &with) {
            Ok((_, outcome)) => outcome,
            Err(_) if process::interrupted() => return Err(Stop::Interrupted),
            Err(reason) => {
                self.notes.push(format!("The limit could not be watched: {reason}."));
                return Ok(());
            }
        };
        let over = outcome.peak_anon.saturating_sub(self.limit);
        self.notes.push(format!(
            "Limit of {}: the most anonymous memory seen from outside was {} in {} looks, {:.1} % over.",
            mib(self.limit),
            mib(outcome.peak_anon),
            outcome.samples,
            percent(over as f64, self.limit as f64)
        ));
        let allowed = (self.limit as f64 * 0.05).max(16.0 * MIB as f64) / MIB as f64;
        let what = "run: anonymous memory over the limit, MiB (5 % or 16 MiB)";
        self.verdicts.push(Verdict::at_most(what, allowed, over as f64 / MIB as f64));
        let metadata = std::fs::read_to_string(&report)
            .ok()
            .and_then(|text| serde_json::from_str::<Value>(&text).ok())
            .and_then(|report| metadata(&report));
        if let Some(bytes) = metadata {
            let what = "run: metadata, percent of managed memory";
            self.verdicts.push(Verdict::at_most(what, 0.5, percent(bytes, self.size as f64)));
        }
        Ok(())
    }

    /// Real programs at half of what they use.
    fn programs(&mut self, programs: &[Program]) -> Result<(), Stop> {
        let mut extra: BTreeMap<Subject, Vec<f64>> = BTreeMap::new();
        let mut left_out = Vec::new();
        for program in programs {
            let Some(row) = self.program(program)? else {
                continue;
            };
            let plain = row.get("plain").unwrap_or(0.0);
            let more = |s: Subject| row.get(s.key()).map(|seconds| (seconds - plain).max(0.001));
            if let (Some(zswap), Some(zram), Some(run)) = (more(Zswap), more(Zram), more(Run)) {
                for (subject, seconds) in [(Zswap, zswap), (Zram, zram), (Run, run)] {
                    extra.entry(subject).or_default().push(seconds);
                }
            } else {
                left_out.push(program.name);
            }
            self.rows.push(row);
        }
        let mean = |s| extra.get(&s).and_then(|e| geometric_mean(e));
        if let (Some(zswap), Some(zram), Some(run)) = (mean(Zswap), mean(Zram), mean(Run)) {
            let what = "run: real programs at 50 %, extra time (geometric mean), times the better of zswap and zram";
            self.verdicts.push(Verdict::at_most(what, 0.5, run / zswap.min(zram)));
            if !left_out.is_empty() {
                self.notes.push(format!("Not in the mean of extra time: {}.", left_out.join(", ")));
            }
        }
        Ok(())
    }

    /// One program under all subjects.
    fn program(&mut self, program: &Program) -> Result<Option<Row>, Stop> {
        let mut with = With { stdin: program.stdin.clone(), timeout: Duration::from_secs(120), ..With::default() };
        let mut seconds: BTreeMap<Subject, Vec<f64>> = BTreeMap::new();
        self.say(&format!("{}, without a limit", program.name));
        let first = match self.run(Plain, &program.argv, 0, &with) {
            Ok(outcome) => outcome,
            Err(_) if process::interrupted() => return Err(Stop::Interrupted),
            Err(reason) => {
                self.notes.push(format!("{}: {reason}.", program.name));
                return Ok(None);
            }
        };
        if let Err(reason) = first.ok() {
            self.notes.push(format!("{}: {reason}.", program.name));
            return Ok(None);
        }
        let right = checksum(&first.stdout);
        let limit = (first.peak_anon / 2).next_multiple_of(MIB);
        with.timeout = Duration::from_secs(if self.quick { 5 } else { 25 });
        seconds.entry(Plain).or_default().push(first.seconds);
        let mut failed: BTreeMap<Subject, String> = BTreeMap::new();
        for run in 0..self.runs {
            for subject in [Plain, Zswap, Zram, Run, RunCharged] {
                if self.out.contains_key(&subject)
                    || failed.contains_key(&subject)
                    || (run == 0 && subject == Plain)
                    || (self.quick && subject == RunCharged)
                {
                    continue;
                }
                self.say(&format!(
                    "run {} of {}: {} in {}, {}",
                    run + 1,
                    self.runs,
                    program.name,
                    mib(limit),
                    subject.title()
                ));
                let result = self.run(subject, &program.argv, limit, &with).and_then(|outcome| {
                    outcome.ok()?;
                    Ok(outcome)
                });
                match result {
                    Ok(outcome) if checksum(&outcome.stdout) != right => {
                        self.right = false;
                        failed.insert(subject, "WRONG OUTPUT".to_owned());
                    }
                    Ok(outcome) if subject == Run && outcome.peak_anon as f64 > 0.95 * first.peak_anon as f64 => {
                        failed.insert(subject, format!("held {}: not limited", mib(outcome.peak_anon)));
                    }
                    Ok(outcome) => seconds.entry(subject).or_default().push(outcome.seconds),
                    Err(_) if process::interrupted() => return Err(Stop::Interrupted),
                    Err(reason) => {
                        failed.insert(subject, reason);
                    }
                }
            }
        }
        for (subject, reason) in &failed {
            seconds.remove(subject);
            self.notes.push(format!("{}, {}: {reason}.", program.name, subject.title()));
        }
        let mut row = Row::new(format!("{}, in {} of {}", program.name, mib(limit), mib(first.peak_anon)), "s");
        for (subject, seconds) in &seconds {
            row.put(subject.key(), median(seconds));
        }
        let figures: Vec<String> =
            row.values.iter().map(|(subject, seconds)| format!("{subject} {seconds} s")).collect();
        self.say(&format!("{}: {}", program.name, figures.join(", ")));
        Ok(Some(row))
    }

    /// What `uzswap run` costs a program that stays under its limit: pairs, one with and one without.
    fn overhead(&mut self, program: &Program) -> Result<(), Stop> {
        if self.out.contains_key(&RunCharged) {
            return Ok(());
        }
        let with = With { stdin: program.stdin.clone(), ..With::default() };
        let mut ratios = Vec::new();
        let mut times: BTreeMap<Subject, Vec<f64>> = BTreeMap::new();
        let mut limit = self.limit * 64;
        for pair in 0..if self.quick { 3 } else { 4 * self.runs + 3 } {
            let mut took = BTreeMap::new();
            // The first has to be plain: its peak makes the limit.
            for subject in if pair % 2 == 0 { [Plain, RunCharged] } else { [RunCharged, Plain] } {
                self.say(&format!("pair {}: {} under its limit, {}", pair + 1, program.name, subject.title()));
                let outcome = self.run(subject, &program.argv, limit, &with);
                if process::interrupted() {
                    return Err(Stop::Interrupted);
                }
                match outcome.and_then(|o| o.ok().map(|()| o)) {
                    Ok(outcome) => {
                        if pair == 0 && subject == Plain {
                            limit = (4 * outcome.peak_anon).next_multiple_of(MIB);
                        }
                        took.insert(subject, outcome.seconds);
                        times.entry(subject).or_default().push(outcome.seconds);
                    }
                    Err(reason) => {
                        self.notes.push(format!("{} under its limit: {reason}.", program.name));
                        return Ok(());
                    }
                }
            }
            ratios.push(took[&RunCharged] / took[&Plain]);
        }
        let mut row = Row::new(format!("{}, under its limit", program.name), "s");
        for (subject, times) in &times {
            row.put(subject.key(), median(times));
        }
        self.rows.push(row);
        if let Some(ratio) = median(&ratios) {
            let what = "run: time of a program under its limit, times without uzswap";
            self.verdicts.push(Verdict::at_most(what, 1.01, ratio));
        }
        Ok(())
    }
}

/// How one run is watched.
struct With {
    stdin: Option<PathBuf>,
    sample: Duration,
    report: Option<PathBuf>,
    timeout: Duration,
}

impl Default for With {
    fn default() -> Self {
        Self { stdin: None, sample: Duration::from_millis(20), report: None, timeout: Duration::from_secs(120) }
    }
}

/// How many times better a subject is than the better of the kernel's two. `None` unless all three were measured.
fn ratio(row: &Row, subject: Subject, less_is_better: bool) -> Option<f64> {
    let (own, zswap, zram) = (row.get(subject.key())?, row.get("zswap")?, row.get("zram")?);
    Some(if less_is_better { zswap.min(zram) / own } else { own / zswap.max(zram) })
}

fn checksum(bytes: &[u8]) -> (usize, u64) {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    (bytes.len(), hasher.finish())
}

/// The most metadata a `--report` speaks of, in bytes.
fn metadata(report: &Value) -> Option<f64> {
    let known = ["peak_metadata_size", "metadata_peak", "metadata_size", "metadata_bytes", "metadata"];
    let nested = |value: &Value| match value {
        Value::Object(map) => map.values().filter_map(metadata).max_by(f64::total_cmp),
        _ => None,
    };
    let here = known.iter().filter_map(|key| report.get(key)?.as_f64()).max_by(f64::total_cmp);
    here.or_else(|| nested(report)).filter(|bytes| *bytes > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_to_the_better_peer_and_absent_without_both() {
        let mut row = Row::new("fill", "MB/s");
        row.put("zswap", Some(106.0));
        row.put("run", Some(429.0));
        assert_eq!(ratio(&row, Run, false), None);
        row.put("zram", Some(143.0));
        assert_eq!(ratio(&row, Run, false), Some(3.0));
        let mut row = Row::new("random read", "ns");
        row.put("zswap", Some(14_000.0));
        row.put("zram", Some(15_000.0));
        row.put("run", Some(7_000.0));
        assert_eq!(ratio(&row, Run, true), Some(2.0));
        assert_eq!(ratio(&row, Library, true), None);
    }

    #[test]
    fn metadata_is_found_where_a_report_has_it() {
        assert_eq!(metadata(&json!({"peak": 1, "metadata_size": 4096})), Some(4096.0));
        assert_eq!(metadata(&json!({"pool": {"metadata": 7}})), Some(7.0));
        assert_eq!(metadata(&json!({"metadata_size": 0})), None);
        assert_eq!(metadata(&json!([1])), None);
    }
}

//! `uzswap lab shrinker`: what each policy writes to disk, and what that costs.
//!
//! Two programs need more than their limit holds even compressed: a build (gcc on generated sources, two at a time), and a
//! program with bursts (see [`crate::bursts`]). Each runs under every policy of the real engine, under the default policy with
//! encryption, which shows what that costs, and under the kernel's zswap with its shrinker on. Then a run without a disk is
//! recorded, and its trace is replayed under every policy with the same pool: so all get the same events, which no two runs have.
//!
//! Bias: the kernel's pool is limited to a share of the machine's memory, not of the cgroup's, and a cgroup v1 does not charge it
//! to the program (nor does the shrinker then know what to shrink). So the kernel has more memory. To correct for that, the
//! program with bursts runs once more with equal memory for both: the smallest pool that the kernel can have, 1 % of the
//! machine's memory, and 48 MiB; the kernel's cgroup gets the 48. Under the very same limit, everything counted, the kernel can
//! only swap to a file without compression; each program runs like that, too.

use crate::bursts::NOT_KEPT;
use crate::experiment::{Common, Stop, at_least};
use crate::json::{Findings, Row, Verdict};
use crate::peers::{self, Peer};
use crate::process::{self, Outcome, Spec};
use crate::programs;
use crate::size::{self, MIB, mib};
use crate::stats::median;
use crate::undo::Keeper;
use crate::used::Used;
use crate::{data, machine};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use uzswap_mm::shrinker::Policy;

/// `uzswap lab shrinker`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(crate) common: Common,
    /// The limit of the program with bursts [default: 48M, 16M with --quick]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,
    /// Runs of each; the median counts [default: 5, 1 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=99))]
    runs: Option<u32>,
    /// Only these programs: build, bursts
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = ["build", "bursts"])]
    only: Vec<String>,
    /// Directory for temporary files, swap files among them: no tmpfs
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    dir: PathBuf,
    /// The command whose `run` is measured [default: this one]
    #[arg(long, value_name = "PATH", hide = true)]
    uzswap: Option<PathBuf>,
}

/// Room on disk for each subject, in bytes.
const SWAP: u64 = 4 << 30;
/// The longest a program may take.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The same when a trace is recorded: without a disk the program does little but fault, for 15 to 120 seconds.
const RECORD_TIMEOUT: Duration = Duration::from_secs(400);
/// Bytes that each has in addition to the kernel's pool when both have equal memory.
const EQUAL: u64 = 48 * MIB;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    Under(u32),
    /// The default policy, with encryption.
    Encrypted,
    /// zswap with its shrinker on.
    Kernel,
    /// The kernel's swap to a file, without zswap.
    SwapFile,
}

impl Subject {
    fn all() -> impl Iterator<Item = Self> {
        Policy::ALL.into_iter().map(|p| Self::Under(p.number())).chain([Self::Encrypted, Self::Kernel, Self::SwapFile])
    }

    fn title(self) -> &'static str {
        match self {
            Self::Under(number) => Policy::from_number(number).name(),
            Self::Encrypted => "default, encrypted",
            Self::Kernel => "zswap, shrinker",
            Self::SwapFile => "swap file",
        }
    }

    fn key(self) -> &'static str {
        match self {
            Self::Encrypted => "encrypted",
            Self::Kernel => "zswap",
            Self::SwapFile => "swap_file",
            Self::Under(number) => match Policy::from_number(number) {
                Policy::SecondChance => "second_chance",
                Policy::Decaying => "decaying",
                Policy::Fifo => "fifo",
                Policy::S3Fifo => "s3_fifo",
                Policy::Reuse => "reuse",
                Policy::Balanced => "balanced",
            },
        }
    }
}

/// The figures of a row.
const FIGURES: [(&str, &str); 7] = [
    ("disk swap-ins", "pages"),
    ("write-backs", "pages"),
    ("real", "s"),
    ("user", "s"),
    ("sys", "s"),
    ("written", "MiB"),
    ("read", "MiB"),
];
/// Second chance under the kernel's pressure, and under the default's: the policies that the published figures are compared with.
const SECOND_CHANCES: [Policy; 2] = [Policy::SecondChance, Policy::Balanced];
const SWAPINS: usize = 0;
const REAL: usize = 2;

type Figures = [f64; FIGURES.len()];

/// A program under a limit.
struct Program {
    name: &'static str,
    argv: Vec<OsString>,
    limit: u64,
    /// The limit of its cgroup, which does not include the kernel's pool.
    kernel_limit: u64,
}

struct Lab<'a> {
    keeper: &'a Keeper,
    dir: PathBuf,
    uzswap: PathBuf,
    runs: u32,
    rows: Vec<Row>,
    verdicts: Vec<Verdict>,
    notes: Vec<String>,
    right: bool,
    /// For each replayed trace, disk swap-ins by the policy's number.
    replayed: Vec<BTreeMap<u32, f64>>,
}

/// Runs the experiment. Returns whether everything read back was right.
///
/// # Errors
/// [`Stop`] when it cannot go on, or is interrupted.
pub fn run(args: &Args) -> Result<bool, Stop> {
    let start = Instant::now();
    let memory = args.memory.unwrap_or(if args.common.quick { 16 } else { 48 } * MIB);
    at_least("memory", memory, 16 * MIB)?;
    let exe = std::env::current_exe().map_err(|e| e.to_string())?;
    let keeper = Keeper::start()?;
    let (dir, _dir) = keeper.make_dir(Some(&args.dir))?;
    let mut lab = Lab {
        keeper: &keeper,
        dir,
        uzswap: args.uzswap.clone().unwrap_or_else(|| exe.clone()),
        runs: args.runs.unwrap_or(if args.common.quick { 1 } else { 5 }),
        rows: Vec::new(),
        verdicts: Vec::new(),
        notes: Vec::new(),
        right: true,
        replayed: Vec::new(),
    };
    let wants = |name: &str| args.only.is_empty() || args.only.iter().any(|n| n == name);
    if wants("bursts") {
        let program = lab.bursts(&exe, memory, if args.common.quick { 3 } else { 12 })?;
        lab.program(&program)?;
        if !args.common.quick {
            let done = lab.beside_the_kernel(&exe);
            lab.noted("bursts with equal memory", done)?;
        }
    }
    if wants("build") {
        let built = match lab.build(args.common.quick) {
            Ok(Some(program)) => lab.program(&program),
            Ok(None) => Err("there is no gcc here that builds".to_owned()),
            Err(reason) => Err(reason),
        };
        lab.noted("build", built)?;
    }
    lab.default_is_no_worse();
    let settings = json!({
        "runs": lab.runs, "quick": args.common.quick, "swap_bytes": SWAP, "default_policy": Policy::default().name(),
        "seconds": start.elapsed().as_secs(), "notes": lab.notes,
    });
    let Lab { rows, verdicts, notes, right, .. } = lab;
    let findings = Findings { rows, verdicts, ..Findings::new("shrinker", settings) };
    let subjects: Vec<_> = Subject::all().map(|s| (s.key(), s.title())).collect();
    findings.publish(&subjects, &notes, args.common.json.as_deref())?;
    Ok(right)
}

impl Lab<'_> {
    /// Notes why a part was not measured, which does not lose earlier measurements. A signal stops everything.
    fn noted(&mut self, part: &str, done: Result<(), String>) -> Result<(), String> {
        match done {
            Err(reason) if !process::interrupted() => {
                self.notes.push(format!("Not measured: {part}: {reason}."));
                Ok(())
            }
            done => done,
        }
    }

    fn bursts(&self, exe: &Path, limit: u64, rounds: u32) -> Result<Program, String> {
        let source = self.dir.join("source");
        data::write(&source, 32 * MIB, programs::python().as_deref())?;
        let mut argv: Vec<OsString> = vec![exe.into(), "lab".into(), "bursts".into()];
        argv.extend(["--source".into(), source.into()]);
        for (name, value) in [("--warm", limit), ("--cold", limit * 3), ("--burst", limit)] {
            argv.extend([name.into(), value.to_string().into()]);
        }
        argv.extend(["--rounds".into(), rounds.to_string().into()]);
        Ok(Program { name: "bursts", argv, limit, kernel_limit: limit })
    }

    /// The program with bursts, when the kernel has no more memory than uzswap.
    fn beside_the_kernel(&mut self, exe: &Path) -> Result<(), String> {
        let pool = machine::describe()["memory_bytes"].as_u64().map(|bytes| bytes / 100);
        let pool = pool.ok_or("how much the machine has is not known")?;
        let limit = (pool + EQUAL).next_multiple_of(MIB);
        let program = Program { name: "bursts, equal memory", kernel_limit: EQUAL, ..self.bursts(exe, limit, 2)? };
        self.notes.push(format!("With equal memory the kernel has {} of it as its pool.", mib(pool)));
        let default = Subject::Under(Policy::default().number());
        self.measure_all(&program, &[default, Subject::Kernel, Subject::SwapFile], self.runs.min(3))
    }

    /// A build of several C files, two compilers at a time; the limit is a part of what they use.
    fn build(&mut self, quick: bool) -> Result<Option<Program>, String> {
        let (files, functions) = if quick { (2, 300) } else { (4, 600) };
        for i in 0..files {
            let text = programs::c_source(functions + 100 * i);
            fs::write(self.dir.join(format!("{i}.c")), text).map_err(|e| format!("cannot write a source: {e}"))?;
        }
        let script = format!(
            "cd '{}' && ls *.c | xargs -P2 -n1 sh -c 'exec gcc -O1 -S -o \"$0.s\" \"$0\"' && cat *.s | cksum",
            self.dir.display()
        );
        let argv: Vec<OsString> = ["/bin/sh", "-c", &script].map(OsString::from).into();
        tell!("uzswap lab: build, without a limit");
        let outcome = process::run(self.keeper, &spec(&argv))?;
        if outcome.ok().is_err() {
            return Ok(None);
        }
        // Two compilers at a time have tables, too: with less they do little but fault.
        let share = if quick { 2 } else { 3 };
        let limit = (outcome.peak_anon / share).next_multiple_of(MIB).max(24 * MIB);
        self.notes.push(format!("The build holds {} without a limit.", mib(outcome.peak_anon)));
        Ok(Some(Program { name: "build", argv, limit, kernel_limit: limit }))
    }

    /// Measures a program under all subjects, and replays its trace.
    fn program(&mut self, program: &Program) -> Result<(), String> {
        self.measure_all(program, &Subject::all().collect::<Vec<_>>(), self.runs)?;
        match self.replay(program) {
            Err(reason) if !process::interrupted() => {
                self.right &= !reason.contains(NOT_KEPT);
                self.notes.push(format!("Not measured: {}, its trace: {reason}.", program.name));
                Ok(())
            }
            done => done,
        }
    }

    /// Measures a program under these subjects.
    fn measure_all(&mut self, program: &Program, subjects: &[Subject], runs: u32) -> Result<(), String> {
        let mut all: BTreeMap<Subject, Vec<Figures>> = BTreeMap::new();
        let mut failed: BTreeMap<Subject, String> = BTreeMap::new();
        let mut right: Option<Vec<u8>> = None;
        for run in 0..runs {
            for subject in subjects.iter().copied() {
                if failed.contains_key(&subject) {
                    continue;
                }
                let title = subject.title();
                tell!("uzswap lab: run {} of {}: {} in {}, {title}", run + 1, runs, program.name, mib(program.limit));
                match self.measure(subject, program) {
                    Ok((figures, stdout)) if *right.get_or_insert_with(|| stdout.clone()) == stdout => {
                        all.entry(subject).or_default().push(figures);
                    }
                    Ok(_) => {
                        self.right = false;
                        failed.insert(subject, "WRONG OUTPUT".to_owned());
                    }
                    Err(reason) if process::interrupted() => return Err(reason),
                    Err(reason) => {
                        self.right &= !reason.contains(NOT_KEPT);
                        failed.insert(subject, reason);
                    }
                }
            }
        }
        for (subject, reason) in failed {
            all.remove(&subject);
            self.notes.push(format!("Not measured: {}, {}: {reason}.", program.name, subject.title()));
        }
        let of = |subject, figure: usize| {
            all.get(&subject).and_then(|runs| median(&runs.iter().map(|f| f[figure]).collect::<Vec<_>>()))
        };
        for (i, (figure, unit)) in FIGURES.into_iter().enumerate() {
            let mut row = Row::new(format!("{} in {}: {figure}", program.name, mib(program.limit)), unit);
            for subject in all.keys() {
                row.put(subject.key(), of(*subject, i));
            }
            self.rows.push(row);
        }
        self.verdicts_of(program.name, of);
        Ok(())
    }

    fn verdicts_of(&mut self, name: &str, of: impl Fn(Subject, usize) -> Option<f64>) {
        let under = |policy: Policy| Subject::Under(policy.number());
        let change = |figure, from, to| change(of(from, figure)?, of(to, figure)?);
        let old = under(Policy::Decaying);
        for policy in SECOND_CHANCES {
            for (figure, said, target) in [(SWAPINS, "disk swap-ins", -64.0), (REAL, "real time", -10.3)] {
                if let Some(percent) = change(figure, old, under(policy)) {
                    let what = format!("{name}: {said}, {} against the old heuristic, percent", policy.name());
                    self.verdicts.push(Verdict::at_most(&what, target, percent));
                }
            }
        }
        let default = under(Policy::default());
        for (peer, whose) in [(Subject::Kernel, "the kernel's"), (Subject::SwapFile, "that of the kernel's swap file")]
        {
            if let (Some(own), Some(kernel)) = (of(default, REAL), of(peer, REAL)) {
                let what = format!("{name}: real time of the default policy, times {whose}");
                self.verdicts.push(Verdict::at_most(&what, 0.5, own / kernel));
            }
        }
    }

    /// Records one run, without a disk so that it favours no policy, and replays it under all policies.
    fn replay(&mut self, program: &Program) -> Result<(), String> {
        tell!("uzswap lab: {}, recorded and replayed", program.name);
        let trace = self.dir.join("trace");
        let memory = format!("{}K", program.limit / 1024);
        let mut argv: Vec<OsString> = vec![self.uzswap.clone().into(), "run".into(), "--quiet".into()];
        argv.extend(["--memory".into(), memory.into(), "--record".into(), trace.clone().into(), "--".into()]);
        argv.extend_from_slice(&program.argv);
        ended_well(&process::run(self.keeper, &Spec { timeout: RECORD_TIMEOUT, ..spec(&argv) })?)?;
        let pool = format!("{}", program.limit / 2);
        let argv: Vec<OsString> = vec![self.uzswap.clone().into(), "replay".into(), trace.into()];
        let argv = [&argv[..], &["--json", "--pool", &pool].map(OsString::from)].concat();
        let outcome = process::run(self.keeper, &spec(&argv))?;
        outcome.ok()?;
        let replayed: Value = serde_json::from_slice(&outcome.stdout).map_err(|e| format!("replay said: {e}"))?;
        let lost = replayed["trace"]["lost"].as_u64().unwrap_or(0);
        if lost > 0 {
            self.notes.push(format!("{}: {lost} records of the trace were lost.", program.name));
        }
        let mut swapins = BTreeMap::new();
        for (figure, unit, key) in [
            ("disk swap-ins", "pages", "disk_swapins"),
            ("write-backs", "pages", "written_back_pages"),
            ("waited for the disk", "s", "wait_seconds"),
        ] {
            let mut row =
                Row::new(format!("{}, same trace, pool of {}: {figure}", program.name, mib(program.limit / 2)), unit);
            for policy in replayed["policies"].as_array().into_iter().flatten() {
                let Some(known) = policy["policy"].as_str().and_then(|name| name.parse::<Policy>().ok()) else {
                    continue;
                };
                row.put(Subject::Under(known.number()).key(), policy[key].as_f64());
                if key == "disk_swapins" {
                    swapins.extend(policy[key].as_f64().map(|pages| (known.number(), pages)));
                }
            }
            self.rows.push(row);
        }
        let of = |policy: Policy| swapins.get(&policy.number()).copied();
        for policy in SECOND_CHANCES {
            if let (Some(old), Some(second)) = (of(Policy::Decaying), of(policy)) {
                let what = format!(
                    "{}, same trace: disk swap-ins, {} against the old heuristic, percent",
                    program.name,
                    policy.name()
                );
                self.verdicts.extend(change(old, second).map(|percent| Verdict::at_most(&what, -64.0, percent)));
            }
        }
        self.replayed.push(swapins);
        Ok(())
    }

    fn default_is_no_worse(&mut self) {
        let ratio = |trace: &BTreeMap<u32, f64>| {
            let (own, second) = (trace.get(&Policy::default().number())?, trace.get(&Policy::SecondChance.number())?);
            Some(if second == own { 1.0 } else { own / second.max(1e-9) })
        };
        if let Some(worst) = self.replayed.iter().filter_map(ratio).max_by(f64::total_cmp) {
            let what = "disk swap-ins of the default policy, times second chance's, on the worst trace";
            self.verdicts.push(Verdict::at_most(what, 1.0, worst));
        }
    }

    /// The command line for a run under a policy.
    fn under(&self, policy: Policy, program: &Program, more: &[OsString]) -> Vec<OsString> {
        let mut argv: Vec<OsString> = vec![self.uzswap.clone().into(), "run".into(), "--quiet".into()];
        let (memory, swap) = (format!("{}K", program.limit / 1024), format!("{}M", SWAP / MIB));
        argv.extend(["--memory", &memory, "--swap", &swap, "--swap-policy", policy.name()].map(OsString::from));
        argv.extend(["--swap-dir".into(), self.dir.clone().into()]);
        argv.extend_from_slice(more);
        argv.push("--".into());
        argv.extend_from_slice(&program.argv);
        argv
    }

    fn measure(&self, subject: Subject, program: &Program) -> Result<(Figures, Vec<u8>), String> {
        let (policy, encrypt) = match subject {
            Subject::Kernel => return self.measure_kernel(program, Peer::ZswapShrinker, program.kernel_limit),
            Subject::SwapFile => return self.measure_kernel(program, Peer::SwapFile, program.limit),
            Subject::Under(number) => (Policy::from_number(number), None),
            Subject::Encrypted => (Policy::default(), Some("--encrypt-swap".into())),
        };
        let report = self.dir.join("report.json");
        let more: Vec<OsString> = ["--report".into(), report.clone().into()].into_iter().chain(encrypt).collect();
        let argv = self.under(policy, program, &more);
        let (outcome, user, sys) = timed(|| process::run(self.keeper, &spec(&argv)))?;
        ended_well(&outcome)?;
        let text = fs::read_to_string(&report).map_err(|e| format!("no report: {e}"))?;
        let report: Value = serde_json::from_str(&text).map_err(|e| format!("the report: {e}"))?;
        let counter = |name: &str| report["counters"][name].as_f64().ok_or(format!("no counter {name}"));
        let bytes = |name: &str| counter(name).map(|bytes| bytes / MIB as f64);
        let (written, read) = (bytes("swap_write_bytes")?, bytes("swap_read_bytes")?);
        let figures = [counter("pswpin")?, counter("zswpwb")?, outcome.seconds, user, sys, written, read];
        Ok((figures, outcome.stdout))
    }

    fn measure_kernel(&self, program: &Program, peer: Peer, limit: u64) -> Result<(Figures, Vec<u8>), String> {
        let ready = peers::set_up(self.keeper, peer, limit, SWAP, &self.dir, true)?;
        let argv = program.argv.clone();
        let spec = Spec { cgroup: Some(ready.cgroup().to_owned()), ..spec(&argv) };
        let before = vmstat();
        let (outcome, user, sys) = timed(|| process::run(self.keeper, &spec))?;
        ended_well(&outcome)?;
        let after = vmstat();
        let of = |name: &str| (after.get(name).unwrap_or(&0) - before.get(name).unwrap_or(&0)) as f64;
        let mib = |pages: f64| pages * size::PAGE as f64 / MIB as f64;
        let figures = [of("pswpin"), of("zswpwb"), outcome.seconds, user, sys, mib(of("pswpout")), mib(of("pswpin"))];
        Ok((figures, outcome.stdout))
    }
}

fn spec(argv: &[OsString]) -> Spec {
    Spec {
        argv: argv.to_vec(),
        env: Vec::new(),
        stdin: None,
        cgroup: None,
        sample: Some(Duration::from_millis(20)),
        timeout: TIMEOUT,
    }
}

/// A run's outcome and its CPU time, children included: user and system seconds.
fn timed(run: impl FnOnce() -> Result<Outcome, String>) -> Result<(Outcome, f64, f64), String> {
    let before = Used::by_children();
    let outcome = run()?;
    let used = Used::by_children() - before;
    Ok((outcome, used.user, used.system))
}

/// By how many percent a figure has changed; `None` if both are zero, which compares nothing. (From zero, each unit counts as
/// 100 percent.)
fn change(from: f64, to: f64) -> Option<f64> {
    match (from, to) {
        (0.0, 0.0) => None,
        (0.0, to) => Some(to * 100.0),
        (from, to) => Some((to / from - 1.0) * 100.0),
    }
}

/// `Ok` if a program ended well, else why not: first what it says of its memory, whatever else it printed.
fn ended_well(outcome: &Outcome) -> Result<(), String> {
    match outcome.stderr.lines().find(|line| line.contains(NOT_KEPT)) {
        Some(line) => Err(line.trim().to_owned()),
        None => outcome.ok(),
    }
}

fn vmstat() -> BTreeMap<String, i64> {
    let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    text.lines().filter_map(|l| l.split_once(' ')).filter_map(|(k, v)| Some((k.to_owned(), v.parse().ok()?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    #[test]
    fn every_subject_has_a_name_of_its_own() {
        let keys: std::collections::BTreeSet<_> = Subject::all().map(Subject::key).collect();
        assert_eq!(keys.len(), Policy::ALL.len() + 3);
    }

    /// The story: a quick run read nothing back under either policy, which was reported as 100 percent less, target met.
    #[test]
    fn of_nothing_there_is_no_change() {
        assert_eq!(change(0.0, 0.0), None);
        assert_eq!(
            [(200.0, 50.0), (50.0, 75.0), (0.0, 7.0)].map(|(a, b)| change(a, b)),
            [-75.0, 50.0, 700.0].map(Some)
        );
    }

    /// The story: a program with bursts found its memory changed. The lab said that the program was not measured, and ended with
    /// 0.
    #[test]
    fn memory_that_was_not_kept_is_told_from_what_was_not_measured() {
        let outcome = |status: i32, stderr: &str| Outcome {
            status: ExitStatus::from_raw(status << 8),
            stdout: Vec::new(),
            stderr: stderr.to_owned(),
            seconds: 1.0,
            peak_anon: 0,
            samples: 1,
            timed_out: false,
            rescues: 0,
        };
        let said = format!("uzswap: 3 pages were lost\nerror: {NOT_KEPT}: page 7 differs from what was written\n");
        assert!(ended_well(&outcome(1, &said)).unwrap_err().contains(NOT_KEPT));
        assert!(!ended_well(&outcome(1, "uzswap: no room")).unwrap_err().contains(NOT_KEPT));
        assert_eq!(ended_well(&outcome(0, "")), Ok(()));
    }

    #[test]
    fn vmstat_counts() {
        assert!(vmstat().contains_key("pswpin"));
    }
}

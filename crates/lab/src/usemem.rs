//! `uzswap lab usemem`: several processes in one group write more memory than its limit.
//!
//! This is the experiment of large folios in zswap (70 × 1 GiB in 40 GiB), scaled to this machine: N processes
//! ([`crate::usemem_worker`]) each write their share of 70/40 of the limit, all at once, into one group - or for the kernel's
//! zswap into one cgroup. Throughput and CPU time are those of writing; afterwards everything is read back and compared. `uzswap
//! run`'s `--large-folios` says which folios enter the pool whole; `split` is the same work with it off. uzswap's subjects of 4K
//! and 64K both have memory of small pages: uzswap finds what to take out together by how the memory is used. So `split` is also
//! the subject of 4K, and there is no other. The kernel's subject of 64K has folios of 64 KiB (`hugepages-64kB`, switched on
//! meanwhile).
//!
//! The lab measures scale in two ways: more processes that write as much each, under a limit that grows with them (more work of
//! the same kind, the original's way from one process to 70), and more processes that write as much together, under one limit.

use crate::experiment::{Common, Runs, Stop, at_least};
use crate::json::{Findings, Row, Verdict};
use crate::peers::{self, Peer, thp, zswap};
use crate::process::{self, Spec};
use crate::size::{self, MIB, mib};
use crate::stats::median;
use crate::undo::Keeper;
use crate::usemem_worker::Said;
use crate::{data, programs, report};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// `uzswap lab usemem`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(crate) common: Common,
    /// The limit of the group; the processes write 70/40 of it [default: 160M, 64M with --quick]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,
    #[command(flatten)]
    runs: Runs,
    /// An earlier `uzswap`, to compare the cost of 4K folios before there were others
    #[arg(long, value_name = "PATH")]
    before: Option<PathBuf>,
    /// Directory for temporary files, a swap file among them, so no tmpfs [default: the system's temporary directory]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// How many processes compare folios.
const PROCESSES: u32 = 8;
/// How many processes compare scale.
const SCALE: [u32; 3] = [2, 8, 32];
/// When a run is given up.
const TIMEOUT: Duration = Duration::from_secs(100);

/// What the work runs under.
struct Subject {
    /// Its key in files and tables.
    key: &'static str,
    /// The folio size that its memory is asked to have, in bytes.
    folio: u64,
    how: How,
}

enum How {
    /// `uzswap run` with these options.
    Run(&'static [&'static str]),
    /// The command of `--before`, with these options.
    Before(&'static [&'static str]),
    /// The kernel's zswap with this compressor.
    Kernel(&'static str),
}

/// The cost of 4K folios, before there were others and since. One process writes everything, as several were not limited together
/// before.
const BEFORE: [Subject; 2] = [
    Subject { key: "before, zstd 4K", folio: K4, how: How::Before(&["-c", "zstd"]) },
    Subject { key: "zstd 64K split", folio: K64, how: How::Run(&["-c", "zstd", "--large-folios", "off"]) },
];

const K4: u64 = 4 << 10;
const K64: u64 = 64 << 10;
const M2: u64 = 2 << 20;

/// All subjects. Those with true are also measured with `--quick`.
const SUBJECTS: [(Subject, bool); 13] = [
    (Subject { key: "zstd 64K split", folio: K64, how: How::Run(&["-c", "zstd", "--large-folios", "off"]) }, true),
    (
        Subject { key: "zstd 64K whole", folio: K64, how: How::Run(&["-c", "zstd", "--large-folios", "16K,32K,64K"]) },
        true,
    ),
    (Subject { key: "zstd 2M split", folio: M2, how: How::Run(&["-c", "zstd", "--large-folios", "off"]) }, false),
    (Subject { key: "zstd 2M whole", folio: M2, how: How::Run(&["-c", "zstd", "--large-folios", "on"]) }, true),
    (Subject { key: "zstd 2M as one", folio: M2, how: How::Run(&["-c", "zstd", "--unit", "2M"]) }, false),
    (
        Subject { key: "deflate 64K split", folio: K64, how: How::Run(&["-c", "deflate", "--large-folios", "off"]) },
        false,
    ),
    (
        Subject {
            key: "deflate 64K whole",
            folio: K64,
            how: How::Run(&["-c", "deflate", "--large-folios", "16K,32K,64K"]),
        },
        true,
    ),
    (
        Subject {
            key: "deflate 64K verified",
            folio: K64,
            how: How::Run(&["-c", "deflate", "--large-folios", "16K,32K,64K", "--verify-compression"]),
        },
        false,
    ),
    (Subject { key: "defaults", folio: K64, how: How::Run(&[]) }, true),
    (Subject { key: "kernel lzo 4K", folio: K4, how: How::Kernel("lzo") }, true),
    (Subject { key: "kernel deflate 4K", folio: K4, how: How::Kernel("deflate") }, true),
    (Subject { key: "kernel deflate 64K", folio: K64, how: How::Kernel("deflate") }, false),
    (Subject { key: "kernel lzo 2M", folio: M2, how: How::Kernel("lzo") }, false),
];

/// Rows: name and unit, in the order of the published tables.
const ROWS: [(&str, &str); 18] = [
    ("throughput", "MB/s"),
    ("sys time", "s"),
    ("user time", "s"),
    ("memcg_high", "events"),
    ("memcg_max", "events"),
    ("memcg_swap_fail", "pages"),
    ("pswpin", "pages"),
    ("pswpout", "pages"),
    ("zswpin", "pages"),
    ("zswpout", "pages"),
    ("thp_swpout", "folios"),
    ("thp_swpout_fallback", "folios"),
    ("pgmajfault", "faults"),
    ("ZSWPOUT-64kB", "folios"),
    ("SWPOUT-64kB", "folios"),
    ("peak", "MiB"),
    (HELD, "MiB"),
    (MOST, "MiB"),
];

/// The row of what counts against the limit.
const HELD: &str = "charged peak";
/// The same in the run with the highest.
const MOST: &str = "charged peak of all runs";

/// The figures of one run, by the row's name.
type Figures = BTreeMap<&'static str, f64>;

struct Lab<'a> {
    keeper: &'a Keeper,
    dir: PathBuf,
    exe: PathBuf,
    before: Option<PathBuf>,
    limit: u64,
    runs: u32,
    /// Whether `uzswap run` knows `--large-folios`.
    folios: bool,
    notes: Vec<String>,
    /// How often the kernel's reclaim gave up and was made to try again, by subject.
    rescues: BTreeMap<&'static str, u64>,
    right: bool,
}

/// Runs the experiment. Returns whether everything read back was right.
///
/// # Errors
/// Why it ended early.
pub fn run(args: &Args) -> Result<bool, Stop> {
    let start = Instant::now();
    let limit = args.memory.unwrap_or(if args.common.quick { 64 * MIB } else { 160 * MIB });
    at_least("memory", limit, 32 * MIB)?;
    let keeper = Keeper::start()?;
    let (dir, _dir) = keeper.make_dir(args.dir.as_deref())?;
    let contents = data::write(&dir.join("source"), 32 * MIB, programs::python().as_deref())?;
    let exe = std::env::current_exe().map_err(|e| e.to_string())?;
    let help = std::process::Command::new(&exe).args(["run", "--help"]).output().map_err(|e| e.to_string())?;
    let mut lab = Lab {
        keeper: &keeper,
        dir,
        exe,
        before: args.before.clone(),
        limit,
        runs: args.runs.count(&args.common),
        folios: String::from_utf8_lossy(&help.stdout).contains("--large-folios"),
        notes: Vec::new(),
        rescues: BTreeMap::new(),
        right: true,
    };
    let mut rows = Vec::new();
    let mut verdicts = Vec::new();
    for contents in if args.common.quick { &["real"][..] } else { &["real", "pattern"] } {
        let all = lab.subjects(contents, args.common.quick)?;
        for (name, unit) in ROWS {
            let mut row = Row::new(format!("{contents}: {name}"), unit);
            all.iter().for_each(|(key, figures)| row.put(key, figures.get(name).copied()));
            rows.push(row);
        }
        verdicts.extend(lab.kept(contents, &all));
        if *contents == "real" {
            compare(&lab.limited(&all), &mut verdicts);
        }
    }
    lab.scale(&mut rows, &mut verdicts)?;
    lab.beside_before(&mut rows, &mut verdicts)?;
    for (subject, times) in &lab.rescues {
        lab.notes.push(format!(
            "{subject}: {times} times in all runs the kernel's reclaim gave up although there was swap; the processes waited (a \
             millisecond or so each, in its figures) instead of being killed, and reclaim was tried again."
        ));
    }
    if lab.before.is_none() {
        lab.notes.push(
            "Not measured: 4K with large folios off against uzswap before there were any (target 0.98): give an earlier `uzswap` with \
             --before."
                .to_owned(),
        );
    }
    lab.notes.push(
        "The memory of uzswap's subjects is of small pages but for those of 2M: `split` is what 4K is.".to_owned(),
    );
    lab.notes.push(
        "All subjects but `kernel` leave the pool out of the limit (UZSWAP_POOL_UNCHARGED=1), as a cgroup v1 does with \
         the kernel's: they are compared alike."
            .to_owned(),
    );
    let settings = json!({
        "limit_bytes": limit, "data_bytes": limit / 40 * 70, "processes": PROCESSES, "runs": lab.runs,
        "quick": args.common.quick, "contents": contents, "pool_charged": false, "seconds": start.elapsed().as_secs(),
        "notes": lab.notes,
    });
    let findings = Findings { rows, verdicts, ..Findings::new("usemem", settings) };
    show!(
        "uzswap lab usemem: {PROCESSES} processes write {} under a limit of {} (real: {contents}; pattern: usemem's own); \
         medians of {} runs\n",
        mib(limit / 40 * 70),
        mib(limit),
        lab.runs
    );
    let mut columns: Vec<(&str, &str)> = SUBJECTS.iter().map(|(s, _)| (s.key, s.key)).collect();
    columns.push((BEFORE[0].key, BEFORE[0].key));
    columns.extend([("2", "2 processes"), ("8", "8 processes"), ("32", "32 processes")]);
    findings.publish(&columns, &lab.notes, args.common.json.as_deref())?;
    Ok(lab.right)
}

/// The verdicts on folios, and against the kernel.
fn compare(all: &BTreeMap<&'static str, Figures>, verdicts: &mut Vec<Verdict>) {
    let ratio = |a: &str, b: &str, row: &str| Some(all.get(a)?.get(row)? / all.get(b)?.get(row)?);
    let mut at_least = |what: &str, target, measured: Option<f64>| {
        verdicts.extend(measured.map(|m| Verdict::at_least(what, target, m)));
    };
    at_least(
        "64K zstd: throughput of whole folios, times split ones",
        1.62,
        ratio("zstd 64K whole", "zstd 64K split", "throughput"),
    );
    at_least(
        "2M zstd: throughput of whole folios, times split ones",
        1.62,
        ratio("zstd 2M whole", "zstd 2M split", "throughput"),
    );
    for kernel in ["kernel lzo 4K", "kernel deflate 4K", "kernel deflate 64K"] {
        let own = if kernel.contains("lzo") { "defaults" } else { "deflate 64K whole" };
        at_least(&format!("{own}: throughput, times {kernel}"), 3.0, ratio(own, kernel, "throughput"));
    }
    let sys = ratio("zstd 64K whole", "zstd 64K split", "sys time");
    verdicts.extend(sys.map(|m| Verdict::at_most("64K zstd: sys time of whole folios, times split ones", 0.77, m)));
    // The kernel compresses in system time, uzswap in user time; most of uzswap's system time is the first touch of new memory.
    let cpu = |key: &str| Some(all.get(key)?.get("sys time")? + all.get(key)?.get("user time")?);
    let both = cpu("zstd 64K whole").zip(cpu("zstd 64K split")).map(|(whole, split)| whole / split);
    let what = "64K zstd: CPU time, sys and user, of whole folios, times split ones";
    verdicts.extend(both.map(|m| Verdict::at_most(what, 0.77, m)));
    let fails = all.values().filter_map(|f| f.get("memcg_swap_fail")).copied().reduce(f64::max);
    verdicts.extend(fails.map(|m| Verdict::at_most("memcg_swap_fail of any subject", 0.0, m)));
}

impl Lab<'_> {
    /// The most by which any of our subjects exceeded the limit.
    fn kept(&self, contents: &str, all: &BTreeMap<&'static str, Figures>) -> Option<Verdict> {
        let own = all.iter().filter(|(key, _)| !key.starts_with("kernel"));
        let most = own.filter_map(|(_, figures)| figures.get(MOST)).copied().reduce(f64::max)?;
        let limit = self.limit as f64 / MIB as f64;
        let allowed = (limit * 0.05).max(16.0);
        let what =
            format!("{contents}: memory over the limit, MiB, the most of any run of any subject (5 % or 16 MiB)");
        Some(Verdict::at_most(&what, allowed, (most - limit).max(0.0)))
    }

    /// The subjects that the limit forced into less memory than they use; the others are noted, as the speed of a subject that
    /// keeps everything in memory says nothing.
    fn limited(&mut self, all: &BTreeMap<&'static str, Figures>) -> BTreeMap<&'static str, Figures> {
        let mut limited = all.clone();
        limited.retain(|key, figures| {
            let held = figures.get(HELD).map_or(0, |mib| (mib * MIB as f64) as u64);
            let said = report::unlimited(key, held, self.limit / 40 * 70);
            self.notes.extend(said.iter().map(|said| format!("{said}, and its figures are not compared.")));
            said.is_none()
        });
        limited
    }

    /// The medians of all subjects.
    fn subjects(&mut self, contents: &str, quick: bool) -> Result<BTreeMap<&'static str, Figures>, String> {
        let mut runs: BTreeMap<&'static str, Vec<Figures>> = BTreeMap::new();
        let mut out: BTreeMap<&'static str, String> = BTreeMap::new();
        for run in 0..self.runs {
            for (subject, _) in SUBJECTS.iter().filter(|(_, in_quick)| *in_quick || !quick) {
                if out.contains_key(subject.key) {
                    continue;
                }
                tell!("uzswap lab: run {} of {}: {contents}, {}", run + 1, self.runs, subject.key);
                match self.once(subject, contents, PROCESSES, self.limit) {
                    Ok(figures) => runs.entry(subject.key).or_default().push(figures),
                    Err(reason) if process::interrupted() => return Err(reason),
                    Err(reason) => drop(out.insert(subject.key, reason)),
                }
            }
        }
        for (key, reason) in &out {
            runs.remove(key);
            self.notes.push(format!("Not measured: {key}, {contents}: {reason}."));
        }
        Ok(runs.into_iter().map(|(key, runs)| (key, medians(&runs))).collect())
    }

    /// More and more processes: with as much memory each, then with as much together.
    fn scale(&mut self, rows: &mut Vec<Row>, verdicts: &mut Vec<Verdict>) -> Result<(), String> {
        for (how, each) in [("as much each", true), ("as much together", false)] {
            let mut throughput = Row::new(format!("scale, {how}: throughput"), "MB/s");
            let mut held = Row::new(format!("scale, {how}: {MOST}, over the limit"), "MiB");
            for processes in SCALE {
                let limit = if each { self.limit / u64::from(PROCESSES) * u64::from(processes) } else { self.limit };
                let Some(figures) = self.scaled(processes, limit)? else { continue };
                throughput.put(&processes.to_string(), figures.get("throughput").copied());
                let over = figures.get(MOST).map(|held| (held - limit as f64 / MIB as f64).max(0.0));
                held.put(&processes.to_string(), over);
            }
            if let (Some(two), Some(many)) = (throughput.get("2"), throughput.get("32")) {
                let what = format!("throughput of 32 processes, times that of 2, {how}");
                verdicts.push(Verdict::at_least(&what, 0.8, many / two));
            }
            rows.extend([throughput, held]);
        }
        Ok(())
    }

    /// The medians of so many processes under this limit; None unless all runs went well.
    fn scaled(&mut self, processes: u32, limit: u64) -> Result<Option<Figures>, String> {
        let subject = Subject { key: "defaults", folio: K64, how: How::Run(&[]) };
        let mut runs = Vec::new();
        for run in 0..self.runs {
            tell!("uzswap lab: run {} of {}: {processes} processes under {}", run + 1, self.runs, mib(limit));
            let Some(figures) = self.once_or_noted(&subject, processes, limit)? else { return Ok(None) };
            runs.push(figures);
        }
        Ok(Some(medians(&runs)))
    }

    /// The cost of 4K folios before there were others, and now with the others off, in turn, if all runs went well.
    fn beside_before(&mut self, rows: &mut Vec<Row>, verdicts: &mut Vec<Verdict>) -> Result<(), String> {
        if self.before.is_none() {
            return Ok(());
        }
        let mut runs: BTreeMap<&'static str, Vec<Figures>> = BTreeMap::new();
        for run in 0..self.runs {
            for subject in &BEFORE {
                tell!("uzswap lab: run {} of {}: one process, {}", run + 1, self.runs, subject.key);
                let Some(figures) = self.once_or_noted(subject, 1, self.limit)? else { return Ok(()) };
                runs.entry(subject.key).or_default().push(figures);
            }
        }
        let all = runs.into_iter().map(|(key, runs)| (key, medians(&runs))).collect();
        let all = self.limited(&all);
        let mut throughput = Row::new("one process: throughput".to_owned(), "MB/s");
        all.iter().for_each(|(key, figures)| throughput.put(key, figures.get("throughput").copied()));
        if let (Some(before), Some(since)) = (throughput.get(BEFORE[0].key), throughput.get(BEFORE[1].key)) {
            let what =
                "one process, 4K (zstd 64K split, the same) with large folios off: throughput, times that of --before";
            verdicts.push(Verdict::at_least(what, 0.98, since / before));
        }
        rows.push(throughput);
        Ok(())
    }

    /// One run with real contents; None and a note if it did not go well.
    fn once_or_noted(&mut self, subject: &Subject, processes: u32, limit: u64) -> Result<Option<Figures>, String> {
        match self.once(subject, "real", processes, limit) {
            Ok(figures) => Ok(Some(figures)),
            Err(reason) if process::interrupted() => Err(reason),
            Err(reason) => {
                let (key, limit) = (subject.key, mib(limit));
                self.notes.push(format!("Not measured: {key}, processes: {processes}, under {limit}: {reason}."));
                Ok(None)
            }
        }
    }

    /// The command line: so many processes, each of which fills `share` bytes, under `uzswap run` if the subject is one.
    fn command(
        &self,
        subject: &Subject,
        contents: &str,
        (processes, share): (u32, u64),
        limit: u64,
        report: &Path,
    ) -> Result<Vec<String>, String> {
        let mut argv: Vec<String> = Vec::new();
        let text = |path: &Path| path.display().to_string();
        if let How::Run(options) | How::Before(options) = &subject.how {
            let before = self.before.as_ref().filter(|_| matches!(subject.how, How::Before(_)));
            let needs_folios = options.iter().any(|o| o.contains("folios") || o.contains("verify"));
            if needs_folios && !self.folios {
                return Err("`uzswap run` has no --large-folios".to_owned());
            }
            argv.extend([text(before.unwrap_or(&self.exe)), "run".into(), "-q".into(), "--report".into()]);
            argv.extend([text(report), "--memory".into(), limit.to_string()]);
            argv.extend(options.iter().map(|o| (*o).to_owned()));
            argv.push("--".into());
        }
        argv.extend([
            text(&self.exe),
            "lab".into(),
            "usemem-worker".into(),
            "--processes".into(),
            processes.to_string(),
        ]);
        // uzswap's subject of 64K has small pages: see the module's head.
        let small = subject.folio == K64 && !matches!(subject.how, How::Kernel(_));
        let folio = if small { K4 } else { subject.folio };
        argv.extend(["--size".into(), share.to_string(), "--folio".into(), folio.to_string()]);
        if contents == "real" {
            argv.extend(["--source".into(), text(&self.dir.join("source"))]);
        }
        Ok(argv)
    }

    /// One run of one subject.
    fn once(&mut self, subject: &Subject, contents: &str, processes: u32, limit: u64) -> Result<Figures, String> {
        let share = (limit / 40 * 70 / u64::from(processes)).next_multiple_of(M2);
        let report = self.dir.join("report.json");
        let argv = self.command(subject, contents, (processes, share), limit, &report)?;
        let peer = match &subject.how {
            How::Kernel(compressor) => {
                let ready = peers::set_up(self.keeper, Peer::Zswap, limit, (1 << 30).max(limit * 4), &self.dir, true)?;
                let set = zswap::set(self.keeper, "compressor", compressor)?;
                let folios = if subject.folio == K64 { thp::of_64k(self.keeper)? } else { Vec::new() };
                Some((folios, set, ready))
            }
            _ => None,
        };
        let spec = Spec {
            argv: argv.into_iter().map(Into::into).collect(),
            env: vec![("UZSWAP_POOL_UNCHARGED", "1".to_owned())],
            stdin: None,
            cgroup: peer.as_ref().map(|(.., ready)| ready.cgroup().to_owned()),
            sample: Some(Duration::from_millis(20)),
            timeout: TIMEOUT,
        };
        let before = vmstat();
        let outcome = process::run(self.keeper, &spec)?;
        let after = vmstat();
        let said: Option<Said> = serde_json::from_slice(&outcome.stdout).ok();
        if said.as_ref().is_some_and(|said| said.corrupt) {
            self.right = false;
            return Err("MEMORY WAS NOT KEPT".to_owned());
        }
        if outcome.rescues > 0 {
            *self.rescues.entry(subject.key).or_default() += outcome.rescues;
        }
        outcome.ok()?;
        let said = said.ok_or("said nothing")?;
        let mut figures = Figures::from([
            ("throughput", (share * u64::from(processes)) as f64 / 1e6 / said.seconds),
            ("sys time", said.system),
            ("user time", said.user),
            ("peak", outcome.peak_anon as f64 / MIB as f64),
        ]);
        let mut held = outcome.peak_anon;
        if peer.is_some() {
            let known = ["pswpin", "pswpout", "zswpin", "zswpout", "thp_swpout", "thp_swpout_fallback", "pgmajfault"];
            for name in known {
                let value = |stat: &Map<String, Value>| stat.get(name).and_then(Value::as_f64);
                figures.extend(Some(name).zip(value(&after).zip(value(&before)).map(|(a, b)| a - b)));
            }
        } else {
            let report = report::read(&report).ok_or("no report that can be read")?;
            held = charged(held, &report);
            figures.extend(counted(&report));
        }
        figures.insert(HELD, held as f64 / MIB as f64);
        Ok(figures)
    }
}

/// What counts against the limit of the most memory that was seen, without the pool, which is not charged here (see the note). It
/// is the larger of what members said that they are charged with, and what was seen from outside less the most that their pools
/// held. (The latter is too little, as each pool's maximum is of its own process's moment. If nobody was managed, all that was
/// seen counts.)
fn charged(peak_anon: u64, report: &Value) -> u64 {
    let managed = report.get("engaged").and_then(Value::as_u64).is_some_and(|n| n > 0);
    let pool = report::pool(report).filter(|_| managed).unwrap_or(0);
    report::peak(report).unwrap_or(0).max(peak_anon.saturating_sub(pool))
}

/// The figures of a report.
fn counted(report: &Value) -> Figures {
    let places = [
        ("memcg_high", "/high"),
        ("memcg_max", "/max"),
        ("memcg_swap_fail", "/swap_fail"),
        ("pswpin", "/folios/pswpin"),
        ("pswpout", "/folios/pswpout"),
        ("zswpin", "/counters/zswpin"),
        ("zswpout", "/counters/zswpout"),
        ("thp_swpout", "/folios/thp_swpout"),
        ("thp_swpout_fallback", "/folios/thp_swpout_fallback"),
        ("pgmajfault", "/counters/pgmajfault"),
        ("ZSWPOUT-64kB", "/folios/hugepages-64kB/zswpout"),
        ("SWPOUT-64kB", "/folios/hugepages-64kB/swpout"),
    ];
    places.into_iter().filter_map(|(name, at)| Some((name, report.pointer(at)?.as_f64()?))).collect()
}

fn vmstat() -> Map<String, Value> {
    let text = std::fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let line = |line: &str| {
        let (name, number) = line.split_once(' ')?;
        Some((name.to_owned(), number.parse::<u64>().ok()?.into()))
    };
    text.lines().filter_map(line).collect()
}

/// The medians of runs, and the most held in any.
fn medians(runs: &[Figures]) -> Figures {
    let names = runs.iter().flat_map(|run| run.keys().copied());
    let most = runs.iter().filter_map(|run| run.get(HELD)).copied().reduce(f64::max);
    names
        .filter_map(|name| {
            let values: Vec<f64> = runs.iter().filter_map(|run| run.get(name).copied()).collect();
            Some((name, median(&values)?))
        })
        .chain(most.map(|most| (MOST, most)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_need_both_figures() {
        let figures = |mb: f64, sys: f64| {
            Figures::from([("throughput", mb), ("sys time", sys), ("user time", 3.0 * sys), ("memcg_swap_fail", 0.0)])
        };
        let mut verdicts = Vec::new();
        compare(&BTreeMap::from([("zstd 64K whole", figures(170.0, 1.0))]), &mut verdicts);
        assert_eq!(verdicts.len(), 1, "only that nothing failed");
        let mut verdicts = Vec::new();
        let both = [("zstd 64K whole", figures(170.0, 0.5)), ("zstd 64K split", figures(100.0, 1.0))];
        compare(&BTreeMap::from(both), &mut verdicts);
        assert!(verdicts.iter().all(|v| v.met) && verdicts.len() == 4);
    }

    /// Two processes, each with a pool of 30 MiB, one after the other: they never held 60 of 100 MiB.
    #[test]
    fn what_is_charged_is_what_the_members_said() {
        let report = |engaged: u64, peak: u64| json!({"engaged": engaged, "peak": peak * MIB, "counters": {"pool_total_size": 60 * MIB}});
        assert_eq!(charged(100 * MIB, &report(2, 68)), 68 * MIB);
        assert_eq!(charged(100 * MIB, &report(2, 12)), 40 * MIB, "they looked too late");
        assert_eq!([report(0, 0), json!({})].map(|report| charged(100 * MIB, &report)), [100 * MIB; 2]);
        let runs = [64.0, 99.0, 65.0].map(|mib| Figures::from([(HELD, mib)]));
        let figures = medians(&runs);
        assert_eq!((figures[HELD], figures[MOST]), (65.0, 99.0), "one run of three does not move the median");
    }

    #[test]
    fn medians_are_by_row() {
        let runs = [1.0, 9.0, 2.0].map(|mb| Figures::from([("throughput", mb)]));
        assert_eq!(medians(&runs), Figures::from([("throughput", 2.0)]));
        assert!(medians(&[]).is_empty());
    }
}

//! Runs programs, watches them, and compares the results.
//!
//! A *subject* is a program that prints the same output each time. It runs plain first, which gives its output and its peak, then
//! under `uzswap run` at half and at a quarter of that peak. Its output and exit status must not change, the report must show
//! that uzswap worked, and (if the subject's content compresses and it is one process) its resident memory must have stayed under
//! the limit.
//!
//! Each run is a session of its own, so all its processes can be found, measured and, if the run is late, ended by pid. Memory is
//! measured from outside: the session's anonymous pages, sampled every 5 ms. A page that several processes share since a fork
//! counts once (`Pss_Anon`). That takes a walk through their pages, which is done only if the sum of their RssAnon, which counts
//! such a page in each process, is above the peak so far.

use crate::hung::end_hung;
pub use crate::needs::*;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Bytes in one MiB.
pub const MIB: u64 = 1 << 20;
/// The lowest limit in these tests.
pub const LIMIT_MIN_BYTES: u64 = 16 * MIB;
/// A run that takes longer is ended and fails; the slowest one needs a small part of it.
pub const RUN_TIMEOUT: Duration = Duration::from_secs(240);
/// The time between two readings of RssAnon.
const SAMPLE_PERIOD: Duration = Duration::from_millis(5);
/// The list of the session's processes is read anew once in so many samples, as it costs more than they do.
const SAMPLES_PER_LISTING: u32 = 4;
/// How much of stdout and stderr is kept to be shown when a run fails.
const KEPT_OUTPUT_BYTES: usize = 6000;

/// Makes uzswap work as on a kernel without UFFDIO_MOVE.
pub const WITHOUT_MOVE: &str = "move=never";

/// A program to run, with all it depends on.
#[derive(Clone)]
pub struct Subject {
    /// Short name, for messages.
    pub name: &'static str,
    /// The program and its arguments.
    pub argv: Vec<OsString>,
    /// The directory where it runs.
    pub dir: PathBuf,
    /// Its content compresses: the anonymous memory of all its processes must stay under the limit.
    pub limit_kept: bool,
    /// Exceptions, for a program that works on more than what is left beside the pool: the limit in percent, and the most that it
    /// may hold there (bytes).
    pub ceilings: &'static [(u64, u64)],
    /// Whether it ends with status 0.
    pub succeeds: bool,
    /// Whether its stdout is compared; false for programs that print times and pids.
    pub stdout_compared: bool,
    /// Further options of `uzswap run`.
    pub options: Vec<OsString>,
    /// The command that starts `uzswap`.
    pub before: Vec<OsString>,
    /// Failures to inject (`UZSWAP_TEST_FAULTS`), if any.
    pub faults: Option<&'static str>,
    /// The limits to check, in percent of its peak.
    pub percents: &'static [u64],
}

impl Subject {
    /// A subject that runs in its scratch directory. Its stdout is compared, its limit is not checked.
    pub fn new(name: &'static str, argv: &[&dyn AsRef<std::ffi::OsStr>]) -> Self {
        Self {
            name,
            argv: argv.iter().map(|a| a.as_ref().to_owned()).collect(),
            dir: std::env::temp_dir(),
            limit_kept: false,
            ceilings: &[],
            succeeds: true,
            stdout_compared: true,
            options: Vec::new(),
            before: Vec::new(),
            faults: None,
            percents: &[50, 25],
        }
    }

    /// Also checks that its resident memory stays under the limit.
    pub fn keeps_limit(mut self) -> Self {
        self.limit_kept = true;
        self
    }

    /// Also checks the limit, except that at these limits (percent) it may hold up to so many bytes.
    pub fn keeps_limit_but(mut self, ceilings: &'static [(u64, u64)]) -> Self {
        self.ceilings = ceilings;
        self.keeps_limit()
    }

    /// Runs as on a kernel without UFFDIO_MOVE, and at half of its peak only.
    pub fn without_move(mut self) -> Self {
        (self.faults, self.percents) = (Some(WITHOUT_MOVE), &[50]);
        self
    }

    /// Adds options of `uzswap run`.
    pub fn with(mut self, options: &[&str]) -> Self {
        self.options.extend(options.iter().map(|o| o.into()));
        self
    }

    /// Does not compare stdout, which differs between runs.
    pub fn prints_anything(mut self) -> Self {
        self.stdout_compared = false;
        self
    }

    /// Starts the program without uzswap.
    pub fn start_plain(&self) -> Running {
        Running::start(&self.argv, &self.dir, None, &[])
    }

    /// Starts the program under `uzswap run`.
    pub fn start_limited(&self, limit_bytes: u64) -> Running {
        let faults = self.faults.map(|faults| ("UZSWAP_TEST_FAULTS", faults));
        self.start_limited_with(limit_bytes, faults.as_slice())
    }

    /// Also sets variables in `uzswap`'s environment.
    pub fn start_limited_with(&self, limit_bytes: u64, variables: &[(&str, &str)]) -> Running {
        static REPORTS: AtomicU32 = AtomicU32::new(0);
        let report = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!(
            "report-{}-{}.json",
            std::process::id(),
            REPORTS.fetch_add(1, Ordering::Relaxed)
        ));
        let _ = fs::remove_file(&report);
        let mut argv = self.before.clone();
        argv.extend([uzswap().into(), "run".into(), "--memory".into()]);
        argv.push(format!("{}M", limit_bytes.div_ceil(MIB)).into());
        argv.push("--report".into());
        argv.push(report.clone().into());
        argv.extend(self.options.iter().cloned());
        argv.push("--".into());
        argv.extend(self.argv.iter().cloned());
        Running::start(&argv, &self.dir, Some(report), variables)
    }

    /// Expects the program to fail.
    pub fn fails(mut self) -> Self {
        self.succeeds = false;
        self
    }

    /// The whole test: plain, at half, at a quarter.
    pub fn check(&self) {
        let plain = self.start_plain().finish();
        plain.say(self.name, "plain", None);
        assert!(
            !plain.timed_out && plain.status.success() == self.succeeds,
            "{}: does not work without uzswap\n{}",
            self.name,
            plain.describe()
        );
        let (mut before, mut shows) = (None, false);
        for percent in self.percents {
            let percent = *percent;
            let limit = limit_of(plain.peak_anon_bytes, percent);
            if before.replace(limit) == Some(limit) {
                say(&format!("    {:<18} {percent} %   the limit of before, the least there is", self.name));
                continue;
            }
            let limited = self.start_limited(limit).finish();
            limited.say(self.name, &format!("{percent} %"), Some(limit));
            let at = format!("{} at {percent} % ({} MiB)", self.name, limit.div_ceil(MIB));
            assert!(!limited.timed_out, "{at}: not done after {RUN_TIMEOUT:?}\n{}", limited.describe());
            assert!(
                same_status(plain.status, limited.status),
                "{at}: exit status differs: {} without uzswap\n{}",
                plain.status,
                limited.describe()
            );
            if self.stdout_compared {
                assert!(
                    (plain.stdout.bytes, plain.stdout.hash) == (limited.stdout.bytes, limited.stdout.hash),
                    "{at}: stdout differs; without uzswap {} bytes, hash {:016x}:\n{}\n{}",
                    plain.stdout.bytes,
                    plain.stdout.hash,
                    plain.stdout.text(),
                    limited.describe()
                );
            }
            let ceiling = self.ceilings.iter().find(|(at, _)| *at == percent);
            let most = ceiling.map_or(0, |(_, most)| *most).max(with_slack(limit));
            assert_limited(&at, &limited, self.limit_kept.then_some(most));
            shows |= plain.peak_anon_bytes > most;
        }
        assert!(shows || !self.limit_kept, "{}: it uses so little that it would keep any of its limits", self.name);
    }
}

/// The limit for a peak: whole MiB, and not below the lowest of these tests.
pub fn limit_of(peak_bytes: u64, percent: u64) -> u64 {
    (peak_bytes * percent / 100).max(LIMIT_MIN_BYTES).div_ceil(MIB) * MIB
}

/// The only place that decides whether a program really ran limited. `crates/uzswap/REPORT.md` describes the report's fields.
///
/// Memory held is measured from outside: it is no excuse that uzswap's report itself says that the limit was exceeded.
pub fn assert_limited(at: &str, run: &Outcome, most_bytes: Option<u64>) {
    let report = run.report.as_deref().unwrap_or_else(|| panic!("{at}: no report was written\n{}", run.describe()));
    let engaged = report_number(report, "engaged");
    assert!(
        engaged.is_some_and(|n| n >= 1.0),
        "{at}: the report says engaged = {engaged:?}: no process was managed\n{}",
        run.describe()
    );
    if let Some(most) = most_bytes {
        assert!(
            run.peak_anon_bytes <= most,
            "{at}: anonymous memory reached {:.1} MiB, limit and tolerance are {:.1} MiB\n{}",
            mib(run.peak_anon_bytes),
            mib(most),
            run.describe()
        );
    }
}

/// A limit with what may be held beyond it for a moment: 5 %, or 16 MiB if that is more.
pub fn with_slack(limit_bytes: u64) -> u64 {
    limit_bytes + (limit_bytes / 20).max(16 * MIB)
}

/// The number after the first `"key":` in a JSON text, at any depth.
pub fn report_number(json: &str, key: &str) -> Option<f64> {
    let (_, after) = json.split_once(&format!("\"{key}\""))?;
    let value = after.trim_start().strip_prefix(':')?.trim_start();
    let end = value.find(|c: char| !(c.is_ascii_digit() || ".+-eE".contains(c))).unwrap_or(value.len());
    value[..end].parse().ok()
}

/// The same, of a run's report.
pub fn number(run: &Outcome, key: &str) -> u64 {
    let report = run.report.as_deref().unwrap_or_else(|| panic!("no report\n{}", run.describe()));
    report_number(report, key).unwrap_or_else(|| panic!("no {key} in the report\n{}", run.describe())) as u64
}

/// Whether two statuses are equal; a shell's `128 + signal` equals the signal.
fn same_status(plain: ExitStatus, limited: ExitStatus) -> bool {
    plain == limited || plain.signal().is_some_and(|s| limited.code() == Some(128 + s))
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}

/// A stream read to its end: its length, its hash, and as much of it as a message may show.
#[derive(Default)]
pub struct Stream {
    /// Length in bytes.
    pub bytes: u64,
    /// FNV-1a, 64 bits.
    pub hash: u64,
    head: Vec<u8>,
    tail: Vec<u8>,
}

impl Stream {
    fn read(mut from: impl Read) -> Self {
        let mut stream = Stream { hash: 0xcbf2_9ce4_8422_2325, ..Stream::default() };
        let mut buffer = vec![0; 1 << 16];
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            let new = &buffer[..n];
            stream.bytes += n as u64;
            for &b in new {
                stream.hash = (stream.hash ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3);
            }
            let room = KEPT_OUTPUT_BYTES / 2 - stream.head.len();
            let (head, rest) = new.split_at(room.min(n));
            stream.head.extend_from_slice(head);
            stream.tail.extend_from_slice(rest);
            let excess = stream.tail.len().saturating_sub(KEPT_OUTPUT_BYTES / 2);
            stream.tail.drain(..excess);
        }
        stream
    }

    /// Its beginning and its end.
    pub fn text(&self) -> String {
        let gap = self.bytes as usize > self.head.len() + self.tail.len();
        format!(
            "{}{}{}",
            String::from_utf8_lossy(&self.head),
            if gap { "\n[…]\n" } else { "" },
            String::from_utf8_lossy(&self.tail)
        )
    }
}

/// The result of a run.
pub struct Outcome {
    /// The command as one would type it in a shell.
    pub command: String,
    /// How the first process ended.
    pub status: ExitStatus,
    /// Whether it was ended because it took too long.
    pub timed_out: bool,
    /// Its output.
    pub stdout: Stream,
    /// Its messages.
    pub stderr: Stream,
    /// From start to end.
    pub wall: Duration,
    /// `ru_maxrss` of the process and those it waited for: the largest one, including file pages.
    pub rss_max_bytes: u64,
    /// The most anonymous memory of the session in any sample; what its processes share counts once.
    pub peak_anon_bytes: u64,
    /// What `--report` wrote.
    pub report: Option<String>,
}

impl Outcome {
    /// Prints one line for people who watch the tests.
    pub fn say(&self, name: &str, how: &str, limit_bytes: Option<u64>) {
        let limit = limit_bytes.map_or(String::new(), |l| format!(" of {} MiB", l.div_ceil(MIB)));
        say(&format!(
            "{name:<18} {how:<5} {:6.2} s, anonymous {:.0} MiB{limit}, largest process {:.0} MiB, {}",
            self.wall.as_secs_f64(),
            mib(self.peak_anon_bytes),
            mib(self.rss_max_bytes),
            self.status
        ));
    }

    /// Everything that helps to understand a failure.
    pub fn describe(&self) -> String {
        format!(
            "command: {}\nended: {}{} after {:.2} s; anonymous memory at most {:.1} MiB, largest process {:.1} MiB\n\
             --- stdout ({} bytes, hash {:016x})\n{}\n--- stderr ({} bytes)\n{}\n--- report\n{}\n---",
            self.command,
            self.status,
            if self.timed_out { " (timed out)" } else { "" },
            self.wall.as_secs_f64(),
            mib(self.peak_anon_bytes),
            mib(self.rss_max_bytes),
            self.stdout.bytes,
            self.stdout.hash,
            self.stdout.text(),
            self.stderr.bytes,
            self.stderr.text(),
            self.report.as_deref().unwrap_or("none")
        )
    }
}

/// Makes the command's process lead a session of its own.
pub fn leading_a_session(command: &mut Command) -> &mut Command {
    // SAFETY: setsid is async-signal-safe and touches no memory of ours.
    unsafe {
        command.pre_exec(|| {
            if libc::setsid() < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        })
    }
}

/// A running program, watched by a thread of ours.
pub struct Running {
    watcher: Option<JoinHandle<Outcome>>,
    pid: i32,
}

impl Running {
    fn start(argv: &[OsString], dir: &Path, report: Option<PathBuf>, variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(&argv[0]);
        command
            .args(&argv[1..])
            .current_dir(dir)
            .env("LC_ALL", "C")
            .env("PYTHONHASHSEED", "0")
            .env_remove("LD_PRELOAD")
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        leading_a_session(&mut command);
        let shown = argv
            .iter()
            .map(|a| match a.to_string_lossy() {
                a if a.contains([' ', '"', '(', ';', '*', '$']) => format!("'{a}'"),
                a => a.into_owned(),
            })
            .collect::<Vec<_>>()
            .join(" ");
        let started = Instant::now();
        let mut child = command.spawn().unwrap_or_else(|e| panic!("cannot start {shown}: {e}"));
        let pid = child.id() as i32;
        let stdout = child.stdout.take().expect("piped");
        let stderr = child.stderr.take().expect("piped");
        let stdout = thread::spawn(move || Stream::read(stdout));
        let stderr = thread::spawn(move || Stream::read(stderr));
        let watcher = thread::spawn(move || {
            // wait4 below reaps it; `child` has no destructor that would.
            let _child = child;
            let watched = watch(pid, started);
            Outcome {
                command: shown,
                status: watched.status,
                timed_out: watched.timed_out,
                stdout: stdout.join().expect("reader"),
                stderr: stderr.join().expect("reader"),
                wall: watched.wall,
                rss_max_bytes: watched.rss_max_bytes,
                peak_anon_bytes: watched.peak_anon_bytes,
                report: report.and_then(|r| fs::read_to_string(r).ok()),
            }
        });
        Running { watcher: Some(watcher), pid }
    }

    /// Waits for the end of the program.
    pub fn finish(mut self) -> Outcome {
        self.watcher.take().expect("finished once").join().expect("watcher")
    }

    /// The processes of its session, including the first one.
    pub fn processes(&self) -> Vec<i32> {
        session(self.pid)
    }

    /// Whether the first process has not ended.
    pub fn is_running(&self) -> bool {
        self.watcher.as_ref().is_some_and(|w| !w.is_finished())
    }
}

impl Drop for Running {
    /// A test that panics leaves no program behind.
    fn drop(&mut self) {
        if let Some(watcher) = self.watcher.take() {
            end_all(self.pid);
            if let Ok(outcome) = watcher.join() {
                eprintln!("{}", outcome.describe());
            }
        }
    }
}

struct Watched {
    status: ExitStatus,
    timed_out: bool,
    wall: Duration,
    rss_max_bytes: u64,
    peak_anon_bytes: u64,
}

/// Samples the session that `pid` leads until its leader ends, and reaps that.
fn watch(pid: i32, started: Instant) -> Watched {
    let mut members = vec![pid];
    let mut peak_anon_bytes = 0;
    let mut timed_out = false;
    let mut samples = 0u32;
    loop {
        let mut status = 0;
        // SAFETY: rusage is a plain structure of integers, for which zeros are valid.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: both pointers are to live locals; pid is our own child, reaped nowhere else.
        let reaped = unsafe { libc::wait4(pid, &mut status, libc::WNOHANG, &mut usage) };
        assert!(reaped >= 0, "wait4: {}", io::Error::last_os_error());
        if reaped == pid {
            let wall = started.elapsed();
            // Processes left behind would hold our pipes open.
            end_all(pid);
            return Watched {
                status: ExitStatus::from_raw(status),
                timed_out,
                wall,
                rss_max_bytes: usage.ru_maxrss as u64 * 1024,
                peak_anon_bytes,
            };
        }
        if started.elapsed() > RUN_TIMEOUT {
            timed_out = true;
            end_hung(pid);
        }
        if samples.is_multiple_of(SAMPLES_PER_LISTING) {
            members = session(pid);
        }
        samples += 1;
        peak_anon_bytes = peak_anon_bytes.max(anon_bytes(&members, peak_anon_bytes));
        thread::sleep(SAMPLE_PERIOD);
    }
}

/// The pids of a session, zombies excluded.
pub fn session(leader: i32) -> Vec<i32> {
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // After the name, which is in parentheses: state, parent, group, session.
            let mut fields = stat.rsplit(')').next().unwrap_or("").split_whitespace();
            fields.next().is_some_and(|state| state != "Z")
                && fields.nth(2).and_then(|s| s.parse().ok()) == Some(leader)
        })
        .collect()
}

/// Kills every process of a session that we started.
pub fn end_all(leader: i32) {
    for pid in session(leader) {
        // SAFETY: kill has no memory effects; pid was a member of our own session a moment ago.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
}

/// The anonymous memory that processes have together (bytes); if it is not more than `known`, any value that is not either.
fn anon_bytes(pids: &[i32], known: u64) -> u64 {
    let sum_of = |file, field| pids.iter().map(|&pid| field_bytes(pid, file, field)).sum();
    let each = sum_of("status", "RssAnon:");
    if each <= known { 0 } else { sum_of("smaps_rollup", "Pss_Anon:") }
}

/// A field of a process's file in /proc (bytes); 0 if there is none.
fn field_bytes(pid: i32, file: &str, field: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let value = text.lines().find_map(|l| l.strip_prefix(field));
    let kib: Option<u64> = value.and_then(|v| v.split_whitespace().next()?.parse().ok());
    kib.unwrap_or(0) * 1024
}

//! Starts what is measured, and watches it from outside.

use crate::peers::cgroup::Rescue;
use crate::undo::{Keeper, Step, Todo};
use std::ffi::OsString;
use std::fs;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static CHILD_GROUP: AtomicI32 = AtomicI32::new(0);

extern "C" fn on_signal(_: libc::c_int) {
    INTERRUPTED.store(true, Ordering::SeqCst);
    let group = CHILD_GROUP.load(Ordering::SeqCst);
    if group > 0 {
        // SAFETY: kill is async-signal-safe; the group is that of a child that has not been waited for.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    }
}

/// Has SIGINT, SIGTERM and SIGHUP end the lab in order: the running child is killed, everything else unwinds. A signal that is
/// ignored stays ignored.
///
/// The story: a lab started by nohup, as it takes hours, ended with its terminal.
pub fn unwind_on_signals() {
    let handler = on_signal as extern "C" fn(libc::c_int) as libc::sighandler_t;
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: zero is a valid sigaction, and the call fills it; the handler makes async-signal-safe calls only.
        unsafe {
            let mut now: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &raw mut now);
            if now.sa_sigaction != libc::SIG_IGN {
                libc::signal(signal, handler);
            }
        }
    }
}

/// Whether a signal asked the lab to stop.
#[must_use]
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// What to run.
#[derive(Clone)]
pub struct Spec {
    /// The program and its arguments.
    pub argv: Vec<OsString>,
    /// Environment variables on top of the lab's.
    pub env: Vec<(&'static str, String)>,
    /// The file for its standard input, if any.
    pub stdin: Option<PathBuf>,
    /// The memory cgroup to start it in.
    pub cgroup: Option<PathBuf>,
    /// How often to sample its memory, if at all.
    pub sample: Option<Duration>,
    /// When to give it up.
    pub timeout: Duration,
}

/// The result of a run.
pub struct Outcome {
    /// How it ended.
    pub status: ExitStatus,
    /// All it wrote.
    pub stdout: Vec<u8>,
    /// What it wrote to stderr.
    pub stderr: String,
    /// Seconds from before its start until after its end.
    pub seconds: f64,
    /// The most anonymous memory (bytes) that its process tree held at once, as sampled.
    pub peak_anon: u64,
    /// How often its memory was sampled.
    pub samples: u64,
    /// Whether it was killed for taking too long.
    pub timed_out: bool,
    /// How often it was woken because it waited after the kernel's reclaim had given up.
    pub rescues: u64,
}

impl Outcome {
    /// `Ok` if it ended well, else why not, in one line.
    ///
    /// # Errors
    /// When it did not exit with 0.
    pub fn ok(&self) -> Result<(), String> {
        if self.status.success() {
            return Ok(());
        }
        let lines = || self.stderr.lines().map(str::trim).filter(|l| !l.is_empty());
        let error = lines().find(|l| l.starts_with("error") || l.starts_with("uzswap"));
        let last = error.or_else(|| lines().next_back()).unwrap_or("");
        let said = if last.is_empty() { String::new() } else { format!(": {last}") };
        Err(match (self.timed_out, self.status.code(), self.status.signal()) {
            (true, ..) => format!("not done after {:.0} s", self.seconds),
            (_, Some(code), _) => format!("exit status {code}{said}"),
            (_, _, signal) => format!("killed by signal {}{said}", signal.unwrap_or(0)),
        })
    }
}

/// A running child, in a process group of its own. The group is killed by a signal that ends the lab, when this value is dropped,
/// or by the guard if the lab is killed. So processes that the child left behind end, too.
pub struct Started {
    /// The child.
    pub child: Child,
    kill: Option<Todo>,
}

impl Started {
    /// Starts it.
    ///
    /// # Errors
    /// When it cannot be started, the guard is gone, or the lab was interrupted.
    pub fn of(keeper: &Keeper, command: &mut Command) -> Result<Self, String> {
        if interrupted() {
            return Err("interrupted".to_owned());
        }
        let child = command.process_group(0).spawn();
        let child = child.map_err(|e| format!("cannot run {}: {e}", command.get_program().to_string_lossy()))?;
        let pid = child.id() as i32;
        CHILD_GROUP.store(pid, Ordering::SeqCst);
        let mut started = Self { child, kill: None };
        let kill = keeper.will_undo(Step::KillGroup(pid));
        if kill.is_err() || interrupted() {
            // SAFETY: kill has no memory effects; the child has not been waited for.
            unsafe { libc::kill(-pid, libc::SIGKILL) };
        }
        started.kill = Some(kill?);
        Ok(started)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        CHILD_GROUP.store(0, Ordering::SeqCst);
        drop(self.kill.take());
        let _ = self.child.wait();
    }
}

/// Builds the command for a spec.
fn command(spec: &Spec) -> Result<Command, String> {
    let mut command = Command::new(&spec.argv[0]);
    command.args(&spec.argv[1..]).envs(spec.env.iter().map(|(k, v)| (*k, v.as_str())));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.stdin(match &spec.stdin {
        Some(path) => fs::File::open(path).map_err(|e| format!("cannot open {}: {e}", path.display()))?.into(),
        None => Stdio::null(),
    });
    if let Some(cgroup) = &spec.cgroup {
        let procs = fs::OpenOptions::new()
            .write(true)
            .open(cgroup.join("cgroup.procs"))
            .map_err(|e| format!("cannot enter the cgroup: {e}"))?;
        // SAFETY: the closure makes one write system call between fork and exec.
        unsafe {
            command.pre_exec(move || {
                use std::io::Write;
                (&procs).write_all(b"0")
            });
        }
    }
    Ok(command)
}

/// Runs a spec to its end.
///
/// # Errors
/// When it cannot be started, or the lab was interrupted; one sentence.
pub fn run(keeper: &Keeper, spec: &Spec) -> Result<Outcome, String> {
    let mut command = command(spec)?;
    let start = Instant::now();
    let mut started = Started::of(keeper, &mut command)?;
    let pid = started.child.id() as i32;
    let (mut out, mut err) = (started.child.stdout.take(), started.child.stderr.take());
    let (stop, stopped) = mpsc::channel::<()>();
    let (status, seconds, stdout, stderr, watched) = std::thread::scope(|scope| {
        let out = scope.spawn(move || {
            let mut bytes = Vec::new();
            let _ = out.as_mut().map(|pipe| pipe.read_to_end(&mut bytes));
            bytes
        });
        let err = scope.spawn(move || {
            let mut bytes = Vec::new();
            let _ = err.as_mut().map(|pipe| pipe.read_to_end(&mut bytes));
            bytes
        });
        let watch = scope.spawn(move || watch(pid, spec, start, &stopped));
        let status = started.child.wait();
        let seconds = start.elapsed().as_secs_f64();
        CHILD_GROUP.store(0, Ordering::SeqCst);
        drop(stop);
        let watched = watch.join().unwrap_or_default();
        (status, seconds, out.join().unwrap_or_default(), err.join().unwrap_or_default(), watched)
    });
    drop(started);
    if interrupted() {
        return Err("interrupted".to_owned());
    }
    Ok(Outcome {
        status: status.map_err(|e| format!("cannot wait for {}: {e}", spec.argv[0].to_string_lossy()))?,
        stdout,
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
        seconds,
        peak_anon: watched.peak,
        samples: watched.samples,
        timed_out: watched.timed_out,
        rescues: watched.rescues,
    })
}

#[derive(Default)]
struct Watched {
    peak: u64,
    samples: u64,
    timed_out: bool,
    rescues: u64,
}

/// How often to look for processes that wait in a cgroup.
const RESCUE_EVERY: Duration = Duration::from_millis(1);

fn watch(pid: i32, spec: &Spec, start: Instant, stopped: &mpsc::Receiver<()>) -> Watched {
    let mut watched = Watched::default();
    let rescue = spec.cgroup.as_deref().map(Rescue::of);
    let mut next = start;
    loop {
        if let Some(sample) = spec.sample
            && Instant::now() >= next
        {
            watched.peak = watched.peak.max(tree_anon(pid));
            watched.samples += 1;
            next = Instant::now() + sample;
        }
        watched.rescues += rescue.as_ref().map_or(0, |rescue| u64::from(rescue.once()));
        let pause = match &rescue {
            Some(_) => RESCUE_EVERY,
            None => spec.sample.unwrap_or(Duration::from_millis(200)),
        };
        if stopped.recv_timeout(pause) != Err(mpsc::RecvTimeoutError::Timeout) {
            return watched;
        }
        if !watched.timed_out && start.elapsed() > spec.timeout {
            watched.timed_out = true;
            // SAFETY: kill has no memory effects; the main thread still waits for the child, or is about to say that it does not.
            unsafe { libc::kill(-pid, libc::SIGKILL) };
        }
    }
}

/// Anonymous memory (`RssAnon`) of a process and all its descendants, in bytes.
fn tree_anon(pid: i32) -> u64 {
    let root = PathBuf::from(format!("/proc/{pid}"));
    let own = fs::read_to_string(root.join("status")).map_or(0, |status| rss_anon(&status));
    own + children(&root).into_iter().map(tree_anon).sum::<u64>()
}

fn children(process: &Path) -> Vec<i32> {
    let tasks = fs::read_dir(process.join("task")).into_iter().flatten().flatten();
    tasks
        .flat_map(|task| {
            let list = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<i32>>()
        })
        .collect()
}

fn rss_anon(status: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
        .map_or(0, |kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// See [`unwind_on_signals`].
    #[test]
    fn what_is_ignored_stays_ignored() {
        // SAFETY: these are dispositions of this process, whose other tests send it no signals.
        let found = unsafe {
            libc::signal(libc::SIGHUP, libc::SIG_IGN);
            unwind_on_signals();
            [libc::SIGHUP, libc::SIGTERM].map(|signal| libc::signal(signal, libc::SIG_DFL))
        };
        assert_eq!(found[0], libc::SIG_IGN);
        assert!(found[1] != libc::SIG_IGN && found[1] != libc::SIG_DFL);
    }

    #[test]
    fn rss_anon_is_read_in_bytes() {
        assert_eq!(rss_anon("VmRSS:\t  999 kB\nRssAnon:\t     512 kB\nRssFile:\t 1 kB\n"), 512 * 1024);
        assert_eq!(rss_anon("Name:\tkthreadd\n"), 0);
        assert!(tree_anon(std::process::id() as i32) > 4096);
    }
}

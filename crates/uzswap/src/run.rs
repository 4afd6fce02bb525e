//! `uzswap run`: checks the request, starts the program, waits for it, and prints a summary.
//!
//! Everything that can be refused is refused before the program starts. The command then stays beside the program as its parent:
//! it keeps the group's memory and the swap file open, records and talks to a swap server if asked to, and forwards signals that
//! others send it. It stops when the program stops, and ends as it ends. It does not enforce the limit; the program's processes
//! do that among themselves. If the command is killed they go on running, but nobody talks to the swap server for them any more.

use crate::addressed::Addressed;
use crate::check::{self, Refused};
use crate::cli::RunArgs;
use crate::config::{Compressor, Config, plain};
use crate::descriptors::Limit;
use crate::groups::Group;
use crate::handed::Handed;
use crate::output::Output;
use crate::record::Recording;
use crate::report::{self, Report};
use crate::signals::{self, Blocked};
use crate::swap::Swap;
use crate::witness::Early;
use crate::{EXIT_CANNOT_RUN, EXIT_NO_PROGRAM, summary, totals::Totals};
use std::env;
use std::ffi::OsString;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use uzswap_pager::group::{ENV_GROUP, ENV_NODE};
use uzswap_pager::inject::{ENV_FAULTS, Site};
use uzswap_pager::swap::clusters::ENV_SWAP;

/// How the program ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ended {
    /// With an exit status.
    Exited(u8),
    /// By a signal.
    Killed(i32),
}

impl Ended {
    /// Ends this process in the same way.
    pub fn leave(self) -> ExitCode {
        match self {
            Ended::Exited(status) => ExitCode::from(status),
            Ended::Killed(signal) => {
                signals::die_of(signal);
                // Reached only if we are init, which its own signals do not kill.
                ExitCode::from(128 | signal as u8)
            }
        }
    }
}

/// What the program used, as the kernel counted it.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// CPU time in the program.
    pub user: Duration,
    /// CPU time in the kernel.
    pub system: Duration,
    /// Highest resident size of one process, in bytes.
    pub max_rss: u64,
}

/// Runs a program under a limit.
pub fn run(args: &RunArgs) -> Result<Ended, Refused> {
    check::nested()?;
    check::numbers()?;
    check::addresses()?;
    let config = Config::of(args)?;
    let wanted = check::wanted(&config)?;
    let swap = Swap::of(&config)?;
    let program = check::program(&args.command[0])?;
    let without_move = check::machine()?;
    if without_move {
        check::without_move(&config)?;
    }
    let agent = check::agent()?;
    let mut outputs = Outputs::open(&config)?;
    // Last, as a group inside another stays, whatever becomes of this run.
    let group = check::group(&config, &wanted)?;
    tell(&group, without_move, &config)?;
    let mut blocked = Blocked::new(group.page().faults.fails(Site::Witness));
    let trace = outputs.trace.as_ref().map(|trace| start_recording(&group, trace)).transpose()?;
    let keeper = swap.as_ref().map_or(Ok(None), Swap::serve)?;
    let files = keeper.as_ref().and_then(|_| Limit::raise().ok());
    let start = Instant::now();
    let child = start_program(&program, &args.command, &agent, &group, swap.as_ref(), &blocked, files)?;
    outputs.keep();
    let (ended, usage) = supervise(child, &mut blocked);
    blocked.program_ended();
    let wall = start.elapsed();
    if let Some((left @ 1.., seconds)) = keeper.map(|keeper| keeper.finish()) {
        summary::say(&format!(
            "uzswap: the swap server does not answer; {left} keys stay there and expire in {seconds} s\n"
        ));
    }

    let recorded = trace.map(Recording::finish);
    let mut totals = Totals::of(group.page(), group.node);
    if let Some(swap) = &swap {
        (totals.swap, totals.swap_used, totals.swap_io) = (swap.bytes(), swap.used(), Some(swap.io()));
    }
    if config.quiet != Some(true) {
        summary::print(&totals, (!group.joined).then_some(wall));
    }
    if let (Some(trace), Some(recorded)) = (&outputs.trace, &recorded) {
        summary::print_trace(trace.path(), recorded, config.quiet == Some(true));
    }
    if let Some(output) = &outputs.report {
        let n = &group.page().nodes[group.node];
        let compressor = Compressor { codec: n.codec.load(Relaxed), level: n.level.load(Relaxed) };
        let report = Report::new(&args.command, ended, wall, usage, compressor, &totals, recorded);
        if let Err(e) = output.emptied().and_then(|file| report::write(&report, file)) {
            summary::say(&format!(
                "uzswap: the report `{}` cannot be written: {}\n",
                output.path().display(),
                plain(&e)
            ));
        }
    }
    blocked.inherited.restore();
    Ok(ended)
}

/// Tells a group what the machine cannot do, and what the lab and the tests want of it.
fn tell(group: &Group, without_move: bool, config: &Config) -> Result<(), Refused> {
    let page = group.page();
    // For `uzswap lab`, to compare like with like: a cgroup v1 does not charge the kernel's compressed swap either.
    if env::var_os("UZSWAP_POOL_UNCHARGED").is_some_and(|value| value == "1") {
        page.pool_uncharged.store(1, Relaxed);
    }
    if let Some(faults) = env::var_os(ENV_FAULTS) {
        let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| u64::from(t.subsec_nanos()));
        page.faults.set(&faults.to_string_lossy(), seed)?;
    }
    if without_move || page.faults.never_move.load(Relaxed) != 0 {
        check::without_move(config)?;
        page.without_move.store(1, Relaxed);
    }
    Ok(())
}

/// The files that a run writes.
struct Outputs {
    report: Option<Output>,
    trace: Option<Output>,
}

impl Outputs {
    fn open(config: &Config) -> Result<Outputs, String> {
        let report = config.report.as_deref().map(|path| Output::open("report", path)).transpose()?;
        let trace = config.record.as_deref().map(|path| Output::open("trace", path)).transpose()?;
        if let (Some(report), Some(trace)) = (&report, &trace)
            && report.is_same(trace)
        {
            return Err(format!("--report and --record name the same file `{}`: choose two", report.path().display()));
        }
        Ok(Outputs { report, trace })
    }

    /// Keeps the files: the program was started.
    fn keep(&mut self) {
        self.report.iter_mut().chain(&mut self.trace).for_each(Output::keep);
    }
}

fn start_recording(group: &Group, trace: &Output) -> Result<Recording, Refused> {
    let started = trace.emptied().and_then(|file| Recording::start(&group.file, group.node, file.try_clone()?));
    started.map_err(|e| format!("the trace `{}` cannot be written: {}", trace.path().display(), plain(&e)).into())
}

fn start_program(
    program: &Path,
    command: &[OsString],
    agent: &Path,
    group: &Group,
    swap: Option<&Swap>,
    blocked: &Blocked,
    files: Option<Limit>,
) -> Result<libc::pid_t, Refused> {
    let mut preload = agent.as_os_str().to_owned();
    if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    // AddressSanitizer refuses to run if it is not the first library, as others might wrap its allocator.
    let mut sanitizer = env::var_os("ASAN_OPTIONS").unwrap_or_default();
    if !sanitizer.to_string_lossy().contains("verify_asan_link_order") {
        sanitizer.push(if sanitizer.is_empty() { "" } else { ":" });
        sanitizer.push("verify_asan_link_order=0");
    }
    let (inherited, early, handed) = (blocked.inherited, blocked.early(), Handed::take());
    let mut start = Command::new(program);
    start.arg0(&command[0]).args(&command[1..]).env("LD_PRELOAD", preload).env("ASAN_OPTIONS", sanitizer);
    start.env(ENV_GROUP, group.file.path());
    match swap {
        Some(swap) => start.env(ENV_SWAP, swap.path()),
        None => start.env_remove(ENV_SWAP),
    };
    let number =
        group.file.inode().map_err(|e| format!("the memory shared with the program cannot be asked: {}", plain(&e)))?;
    start.env(ENV_NODE, format!("{}@{number}", group.node));
    let mut addressed = Addressed::of(&start, command);
    // SAFETY: the closure makes async-signal-safe calls only.
    unsafe {
        start.pre_exec(move || {
            early.iter().for_each(Early::note);
            inherited.restore();
            inherited.close_streams();
            handed.give();
            files.map_or(Ok(()), Limit::restore)?;
            addressed.as_mut().map_or(Ok(()), |program| Err(program.execute()))
        });
    }
    match start.spawn() {
        Ok(child) => Ok(child.id() as libc::pid_t),
        Err(e) => {
            blocked.inherited.restore();
            let status = if e.kind() == io::ErrorKind::NotFound { EXIT_NO_PROGRAM } else { EXIT_CANNOT_RUN };
            let sentence = format!("`{}` could not be started: {}", program.display(), plain(&e));
            Err(Refused { sentence, status })
        }
    }
}

/// Forwards signals until the program ends; stops when it stops, and goes on when it does.
fn supervise(child: libc::pid_t, blocked: &mut Blocked) -> (Ended, Usage) {
    loop {
        let came = blocked.wait();
        if came.signal() != libc::SIGCHLD {
            came.pass_on(child);
            continue;
        }
        while let Some((status, usage)) = changed(child) {
            if libc::WIFSTOPPED(status) {
                blocked.stop_with(child);
            } else if libc::WIFEXITED(status) {
                return (Ended::Exited(libc::WEXITSTATUS(status) as u8), usage);
            } else if libc::WIFSIGNALED(status) {
                return (Ended::Killed(libc::WTERMSIG(status)), usage);
            }
        }
    }
}

/// The next change of the child's state, if one has happened. This also reaps other children: as process 1 we inherit processes
/// whose parents have ended.
///
/// The story: where the command was process 1 of a container, each process that outlived its parent remained as a zombie.
fn changed(child: libc::pid_t) -> Option<(libc::c_int, Usage)> {
    let options = libc::WNOHANG | libc::WUNTRACED;
    loop {
        let mut status = 0;
        let mut usage = MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: both out-parameters outlive the call; a zeroed rusage is valid.
        let (pid, usage) = unsafe {
            let pid = libc::wait4(-1, &raw mut status, options, usage.as_mut_ptr());
            (pid, usage.assume_init())
        };
        if pid == child {
            return Some((status, used(&usage)));
        }
        if pid <= 0 {
            return None;
        }
    }
}

fn used(usage: &libc::rusage) -> Usage {
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    Usage {
        user: time(usage.ru_utime),
        system: time(usage.ru_stime),
        max_rss: (usage.ru_maxrss as u64).saturating_mul(1024),
    }
}

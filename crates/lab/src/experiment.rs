//! What all experiments share: their common options, and how they end.

use crate::process;
use crate::size::MIB;
use crate::undo;
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Options of every experiment.
#[derive(clap::Args)]
pub struct Common {
    /// A shorter experiment on less memory: tells whether it works; its figures are rough
    #[arg(long)]
    pub quick: bool,
    /// Write the findings to FILE
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The option of experiments that repeat their measurements.
#[derive(clap::Args)]
pub struct Runs {
    /// Runs of each; the median counts [default: 3, 1 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=99))]
    runs: Option<u32>,
}

impl Runs {
    /// How often to make each measurement.
    #[must_use]
    pub fn count(&self, common: &Common) -> u32 {
        self.runs.unwrap_or(if common.quick { 1 } else { 3 })
    }
}

/// Why an experiment ends early.
#[derive(Debug, PartialEq, Eq)]
pub enum Stop {
    /// A signal asked for it.
    Interrupted,
    /// It cannot go on; one sentence.
    Failed(String),
    /// The request makes no sense on any machine; one sentence.
    Wrongly(String),
}

impl From<String> for Stop {
    /// After a signal, whatever fails counts as interrupted.
    fn from(reason: String) -> Self {
        if process::interrupted() { Self::Interrupted } else { Self::Failed(reason) }
    }
}

/// Refuses a `--NAME` of less than `least` bytes, which the experiment needs.
///
/// # Errors
/// [`Stop::Wrongly`].
pub fn at_least(name: &str, bytes: u64, least: u64) -> Result<(), Stop> {
    if bytes < least { Err(Stop::Wrongly(format!("--{name} is to be {}M or more", least / MIB))) } else { Ok(()) }
}

/// Refuses a `--NAME` of more than `most` bytes, which the experiment cannot do.
///
/// # Errors
/// [`Stop::Wrongly`].
pub fn at_most(name: &str, bytes: u64, most: u64) -> Result<(), Stop> {
    if bytes > most { Err(Stop::Wrongly(format!("--{name} is to be {}M or less", most / MIB))) } else { Ok(()) }
}

/// Ends an experiment that a signal asked to end; called between measurements.
///
/// # Errors
/// [`Stop::Interrupted`].
pub fn go_on() -> Result<(), Stop> {
    if process::interrupted() { Err(Stop::Interrupted) } else { Ok(()) }
}

/// Runs an experiment and returns the exit status: 0 done, whatever the verdicts; 1 something failed or read wrong; 125 called
/// wrongly; 130 interrupted. `experiment` returns whether everything read back was right. If the file for the findings cannot be
/// written, this says so before it starts.
#[must_use]
pub fn run(common: &Common, experiment: impl FnOnce() -> Result<bool, Stop>) -> i32 {
    process::unwind_on_signals();
    let end = common.json.as_deref().map_or(Ok(()), writable).map_err(Stop::Failed).and_then(|()| experiment());
    status(end, undo::is_left())
}

/// Refuses a file that cannot be written, before hours of measurements whose figures would be lost. Creates no file that was not
/// there.
///
/// # Errors
/// One sentence.
pub fn writable(path: &Path) -> Result<(), String> {
    let is_new = path.symlink_metadata().is_err();
    // If a pipe has no reader yet, waiting for it is left to the end, when there is something to write.
    let opened = File::options().append(true).create(true).custom_flags(libc::O_NONBLOCK).open(path);
    match opened {
        Err(e) if e.raw_os_error() != Some(libc::ENXIO) => {
            Err(format!("cannot write {}: {e}; choose another file", path.display()))
        }
        Ok(_) if is_new => std::fs::remove_file(path).map_err(|e| format!("cannot write {}: {e}", path.display())),
        _ => Ok(()),
    }
}

/// The result of printing to standard output. A reader that has closed its end is no error.
///
/// # Errors
/// That nothing can be written there, in one sentence.
pub fn seen(printed: io::Result<()>) -> Result<(), String> {
    match printed {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(format!("nothing can be written to standard output: {e}"))
        }
        _ => Ok(()),
    }
}

/// The exit status; `left` means that the machine is not as it was.
///
/// The story: when something could not be undone, an interrupted lab said that the machine was as before, and any other ended
/// with 0.
pub(crate) fn status(end: Result<bool, Stop>, left: bool) -> i32 {
    match end {
        Ok(right) => i32::from(!right || left),
        Err(Stop::Interrupted) => {
            let machine = if left { "what could not be undone is said above" } else { "the machine is as it was" };
            tell!("uzswap lab: interrupted; {machine}");
            130
        }
        Err(Stop::Failed(reason)) => {
            tell!("uzswap lab: {reason}");
            1
        }
        Err(Stop::Wrongly(reason)) => {
            tell!("uzswap lab: {reason}");
            125
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses() {
        assert_eq!(status(Ok(true), false), 0);
        assert_eq!(status(Ok(true), true), 1, "something is left");
        assert_eq!(status(Ok(false), false), 1, "something read wrong");
        assert_eq!(status(Err("no memory".to_owned().into()), false), 1);
        assert_eq!(status(Err(Stop::Interrupted), false), 130);
        assert_eq!(status(at_least("memory", 15 << 20, 16 << 20).map(|()| true), false), 125);
        assert_eq!(at_least("memory", 16 << 20, 16 << 20), Ok(()));
        assert_eq!(status(at_most("memory", (32 << 30) + 1, 32 << 30).map(|()| true), false), 125);
        assert_eq!(at_most("memory", 32 << 30, 32 << 30), Ok(()));
    }

    /// The story: the lab said only after all measurements that it could not write the findings.
    #[test]
    fn what_cannot_be_written_is_said_before_it_is_measured() {
        let dir = std::env::temp_dir().join(format!("uzswap-lab-experiment-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let run = |path: &Path| {
            let mut measured = false;
            let common = Common { quick: true, json: Some(path.to_owned()) };
            let status = run(&common, || {
                measured = true;
                Ok(true)
            });
            (status, measured)
        };
        assert_eq!(run(&dir.join("no/such")), (1, false));
        assert_eq!(run(&dir), (1, false));
        let (new, old) = (dir.join("new"), dir.join("old"));
        std::fs::write(&old, "old").unwrap();
        assert_eq!((run(&new), run(&old)), ((0, true), (0, true)));
        assert!(!new.exists() && std::fs::read_to_string(&old).unwrap() == "old");
        assert!(writable(&dir.join("no/such")).unwrap_err().ends_with("choose another file"));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn quick_is_one_run_unless_told() {
        let common = |quick| Common { quick, json: None };
        assert_eq!(Runs { runs: None }.count(&common(false)), 3);
        assert_eq!(Runs { runs: None }.count(&common(true)), 1);
        assert_eq!(Runs { runs: Some(5) }.count(&common(true)), 5);
    }
}

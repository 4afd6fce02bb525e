//! `--report`: a JSON report of the run. REPORT.md describes the schema.

use crate::config::Compressor;
use crate::record::Recorded;
use crate::run::{Ended, Usage};
use crate::totals::Totals;
use serde::Serialize;
use std::ffi::OsString;
use std::io::Write;
use std::time::Duration;

/// The report.
#[derive(Serialize)]
pub struct Report<'a> {
    /// Version of the schema.
    pub schema: u32,
    /// Version of uzswap.
    pub uzswap: &'static str,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Exit status; none if a signal ended the program.
    pub exit_status: Option<u8>,
    /// The signal that ended it, if one did.
    pub signal: Option<i32>,
    /// Seconds from start to end.
    pub wall_seconds: f64,
    /// CPU seconds in user mode, of the program and the children it waited for.
    pub user_seconds: f64,
    /// CPU seconds in the kernel.
    pub system_seconds: f64,
    /// Highest resident size of one process, in bytes, as the kernel counted it.
    pub max_rss: u64,
    /// Name of the compressor.
    pub compressor: &'static str,
    /// Its level; 0 is the default.
    pub level: u32,
    /// What `--record` recorded, if it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<Recorded>,
    /// What the group did.
    #[serde(flatten)]
    pub totals: &'a Totals,
}

impl<'a> Report<'a> {
    /// Puts a report together.
    pub fn new(
        command: &[OsString],
        ended: Ended,
        wall: Duration,
        usage: Usage,
        compressor: Compressor,
        totals: &'a Totals,
        trace: Option<Recorded>,
    ) -> Report<'a> {
        let (exit_status, signal) = match ended {
            Ended::Exited(status) => (Some(status), None),
            Ended::Killed(signal) => (None, Some(signal)),
        };
        Report {
            schema: 1,
            uzswap: env!("CARGO_PKG_VERSION"),
            command: command.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
            exit_status,
            signal,
            wall_seconds: wall.as_secs_f64(),
            user_seconds: usage.user.as_secs_f64(),
            system_seconds: usage.system.as_secs_f64(),
            max_rss: usage.max_rss,
            compressor: compressor.name(),
            level: compressor.level,
            trace,
            totals,
        }
    }
}

/// Writes a report.
pub fn write(report: &Report, mut file: impl Write) -> std::io::Result<()> {
    serde_json::to_writer_pretty(&mut file, report)?;
    file.write_all(b"\n")?;
    file.flush()
}

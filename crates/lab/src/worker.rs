//! The process that is measured: runs workloads on memory, and prints one line of JSON about them.

use crate::churn;
use crate::data::Source;
use crate::memory::{self, Origin};
use crate::size;
use crate::workload::{Pages, Timing, Workload};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// `uzswap lab worker`.
#[derive(clap::Args)]
pub struct Args {
    /// Wait, and undo what a lab changed if it is killed
    #[arg(long)]
    guard: bool,
    /// File of real contents
    #[arg(long, required_unless_present = "guard")]
    source: Option<PathBuf>,
    /// Bytes of memory to work on
    #[arg(long, value_parser = size::parse, default_value = "128M")]
    size: u64,
    /// Where the memory comes from
    #[arg(long, value_enum, default_value = "anonymous")]
    origin: Origin,
    /// Limit of a region
    #[arg(long, value_parser = size::parse, default_value = "64M")]
    limit: u64,
    /// Only fill, then verify
    #[arg(long)]
    fill_only: bool,
    /// Age the memory first, by this many touches of pages
    #[arg(long, value_name = "PAGES", default_value = "0")]
    churn: u64,
}

/// What a worker prints: one line.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    /// The workloads done, each with its seconds and accesses.
    pub done: Vec<Done>,
    /// Why there are no more.
    pub error: Option<String>,
    /// Whether the error is that memory did not hold what was written.
    pub corrupt: bool,
    /// The most bytes that a region's pool held, as seen after each workload.
    #[serde(default)]
    pub pool_peak: u64,
}

/// One workload done.
#[derive(Debug, Serialize, Deserialize)]
pub struct Done {
    /// [`Workload::name`].
    pub workload: String,
    /// Seconds it took.
    pub seconds: f64,
    /// Its number of accesses.
    pub accesses: u64,
}

impl Done {
    /// Its figure for the table, with the workload.
    #[must_use]
    pub fn figure(&self) -> Option<(Workload, f64)> {
        let workload = Workload::named(&self.workload)?;
        Some((workload, Timing { seconds: self.seconds, accesses: self.accesses }.figure(workload)))
    }
}

/// Runs the worker; returns 0 if everything read was what was written.
#[must_use]
pub fn main(args: &Args) -> i32 {
    if args.guard {
        return crate::undo::guard();
    }
    let report = work(args);
    println!("{}", serde_json::to_string(&report).unwrap_or_default());
    i32::from(report.error.is_some())
}

fn work(args: &Args) -> Report {
    let mut report = Report { done: Vec::new(), error: None, corrupt: false, pool_peak: 0 };
    let source = match args.source.as_deref().map(Source::open) {
        Some(Ok(source)) => source,
        Some(Err(error)) => {
            report.error = Some(format!("cannot read the source of contents: {error}"));
            return report;
        }
        None => return report,
    };
    let uncharged = std::env::var_os("UZSWAP_POOL_UNCHARGED").is_some_and(|v| v == "1");
    let len = args.size as usize / size::PAGE * size::PAGE;
    let memory = match memory::take(args.origin, len, args.limit, uncharged) {
        Ok(memory) => memory,
        Err(error) => {
            report.error = Some(error);
            return report;
        }
    };
    if args.churn > 0
        && let Err(corrupt) = churn::churn(&*memory, &source, args.churn)
    {
        report.error = Some(corrupt.to_string());
        report.corrupt = true;
        return report;
    }
    // SAFETY: the memory was made for this alone, and outlives `pages`.
    let mut pages = unsafe { Pages::new(memory.base(), memory.len(), &source) };
    let fill_only = [Workload::Fill, Workload::Verify];
    for workload in if args.fill_only { &fill_only[..] } else { &Workload::ALL } {
        let done = pages.run(*workload);
        report.pool_peak = report.pool_peak.max(memory.pool());
        match done {
            Ok(timing) => report.done.push(Done {
                workload: workload.name().to_owned(),
                seconds: timing.seconds,
                accesses: timing.accesses,
            }),
            Err(corrupt) => {
                report.error = Some(corrupt.to_string());
                report.corrupt = true;
                break;
            }
        }
    }
    report
}

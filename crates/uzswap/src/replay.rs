//! `uzswap replay`: what each write-back policy would have written and read in a recorded run.

use crate::Failed;
use crate::cli::ReplayArgs;
use crate::config::plain;
use crate::output::print;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use uzswap_mm::replay::{Cost, NO_DISK, Outcome, Replay, Settings};
use uzswap_mm::shrinker::Policy;
use uzswap_mm::size::{Size, human};
use uzswap_mm::trace::{Error, HEADER_BYTES, Trace};

/// Runs the command. The error is one sentence.
pub fn replay(args: &ReplayArgs) -> Result<(), Failed> {
    let policies = policies(&args.policy).map_err(Failed::Wrongly)?;
    let size = args.pool.as_deref().map(Size::parse).transpose().map_err(Failed::Wrongly)?;
    let name = args.file.display();
    let bytes = read(&args.file).map_err(|e| format!("the trace `{name}` cannot be read: {}", plain(&e)))?;
    let trace = Trace::parse(&bytes).map_err(|e| format!("`{name}` cannot be replayed: {e}"))?;
    let limit = trace.header.limit as usize;
    let cost = Cost { read_ns: args.read_latency * 1000, bytes_per_second: args.bandwidth << 20 };
    let settings = |policy, pool| Settings { policy, pool, accept_percent: args.accept_threshold.into(), limit, cost };
    // Any policy does: without a disk it decides nothing.
    let (all, error) = play(&trace, settings(Policy::default(), NO_DISK));
    let pool = match size {
        Some(size) => size.resolve(all.pool_peak) as usize,
        None => all.pool_peak as usize / 2,
    };
    let done: Vec<(Policy, Outcome)> = policies.into_iter().map(|p| (p, play(&trace, settings(p, pool)).0)).collect();
    let text = if args.json {
        format!("{:#}\n", as_json(&trace, &all, error, pool, cost, &done))
    } else {
        as_text(&trace, &all, error, pool, &done)
    };
    Ok(print(text.as_bytes())?)
}

/// Reads a trace. Of a file that does not begin as a trace, only the beginning is read.
///
/// The story: a device was read until there was no memory left.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let (mut file, mut bytes) = (File::open(path)?, Vec::new());
    (&mut file).take(HEADER_BYTES as u64).read_to_end(&mut bytes)?;
    if Trace::parse(&bytes).is_ok() {
        file.read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

fn policies(text: &str) -> Result<Vec<Policy>, String> {
    match text {
        "all" => Ok(Policy::ALL.to_vec()),
        list => list.split(',').map(str::trim).try_fold(Vec::new(), |mut some, name| {
            let policy = name.parse()?;
            if some.contains(&policy) {
                return Err(format!("the policy `{name}` is named twice: name each once"));
            }
            some.push(policy);
            Ok(some)
        }),
    }
}

/// Replays the good part of a trace, and returns what is wrong with the rest.
fn play(trace: &Trace<'_>, settings: Settings) -> (Outcome, Option<Error>) {
    let (mut replay, mut error) = (Replay::new(settings), None);
    for block in trace.blocks() {
        match block {
            Ok(block) => replay.block(&block),
            Err(e) => error = Some(e),
        }
    }
    (replay.finish(), error)
}

fn as_json(
    trace: &Trace<'_>,
    all: &Outcome,
    error: Option<Error>,
    pool: usize,
    cost: Cost,
    done: &[(Policy, Outcome)],
) -> Value {
    let policies: Vec<Value> = done
        .iter()
        .map(|(policy, o)| {
            json!({
                "policy": policy.name(), "disk_swapins": o.disk_swapins, "disk_reads": o.reads,
                "written_back_pages": o.written_back, "bytes_read": o.bytes_read, "bytes_written": o.bytes_written,
                "second_chances": o.rotated, "pool_peak": o.pool_peak, "wait_seconds": o.wait_ns as f64 / 1e9,
                "write_seconds": o.write_ns as f64 / 1e9, "virtual_seconds": o.end_ns as f64 / 1e9,
            })
        })
        .collect();
    json!({
        "trace": {
            "limit": trace.header.limit, "records": all.records, "lost": all.lost, "error": error.map(|e| e.to_string()),
            "seconds": all.end_ns as f64 / 1e9, "stored_pages": all.stored, "loads": all.loads,
            "unknown_loads": all.unknown, "pool_peak": all.pool_peak,
            "recorded_written_back_pages": all.recorded_written_back, "recorded_disk_swapins": all.recorded_swapins,
        },
        "settings": {
            "pool": pool, "read_latency_us": cost.read_ns / 1000, "bytes_per_second": cost.bytes_per_second,
        },
        "policies": policies,
    })
}

fn as_text(trace: &Trace<'_>, all: &Outcome, error: Option<Error>, pool: usize, done: &[(Policy, Outcome)]) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{} records of {:.1} s under a limit of {}: {} pages stored, {} faults on them; without a disk the pools took up to {}",
        all.records,
        all.end_ns as f64 / 1e9,
        human(trace.header.limit),
        all.stored,
        all.loads,
        human(all.pool_peak)
    );
    if let Some(error) = error {
        let _ = writeln!(out, "of the trace only the beginning was replayed: {error}");
    }
    if all.lost > 0 || all.unknown > 0 {
        let _ = writeln!(
            out,
            "not exact: {} records were lost in recording, and {} faults were on pages of which nothing was known",
            all.lost, all.unknown
        );
    }
    let _ = writeln!(out, "replayed with pools of {} together:\n", human(pool as u64));
    let _ = writeln!(
        out,
        "{:<14} {:>12} {:>10} {:>12} {:>11} {:>11} {:>10}",
        "policy", "disk swapins", "reads", "write-backs", "read", "written", "waited s"
    );
    for (policy, o) in done {
        let _ = writeln!(
            out,
            "{:<14} {:>12} {:>10} {:>12} {:>11} {:>11} {:>10.3}",
            policy.name(),
            o.disk_swapins,
            o.reads,
            o.written_back,
            human(o.bytes_read),
            human(o.bytes_written),
            o.wait_ns as f64 / 1e9
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::policies;
    use uzswap_mm::shrinker::Policy;

    #[test]
    fn names_of_policies() {
        assert_eq!(policies("all").unwrap(), Policy::ALL);
        assert_eq!(policies("fifo, s3-fifo").unwrap(), [Policy::Fifo, Policy::S3Fifo]);
        for (bad, part) in [
            ("lru", "`lru`"),
            ("", "``"),
            ("fifo,", "``"),
            ("all,fifo", "`all`"),
            ("fifo,reuse, fifo", "the policy `fifo` is named twice"),
        ] {
            let error = policies(bad).unwrap_err();
            assert!(error.contains(part) && !error.contains('\n'), "{bad}: {error}");
        }
    }
}

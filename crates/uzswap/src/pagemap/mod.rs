//! `uzswap pagemap`: which pages of a process or a shared region are in memory, and which are out.

mod find;
mod picture;
pub mod process;

use crate::Failed;
use crate::cli::PagemapArgs;
use crate::config::plain;
use crate::output::{Output, print};
use find::{Found, Part};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::Write as _;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;
use uzswap::shared::SharedControl;
use uzswap_mm::pagemap::{PageState, Query, Run, SOFT_DIRTY, Summary, TIERS, Tier};
use uzswap_mm::size::{Size, human};
use uzswap_pager::request::Op;

const PAGE: u64 = 4096;

/// Moves pages as asked, then prints. The error is one sentence.
pub fn pagemap(args: &PagemapArgs) -> Result<(), Failed> {
    Ok(print(shown(args)?.as_bytes())?)
}

fn shown(args: &PagemapArgs) -> Result<String, Failed> {
    let (found, svg) = match args.target.parse::<u32>() {
        Ok(pid) => {
            let asked = Asked::of(args, process::parse_range).map_err(Failed::Wrongly)?;
            if asked.clean.is_some() {
                uzswap::process::clears_soft_dirty(pid)?;
            }
            if args.soft_dirty {
                is_tracked(pid)?;
            }
            let svg = open_svg(args)?;
            act_on_process(&asked, pid)?;
            (find::of_process(pid)?, svg)
        }
        Err(_) => {
            let path = Path::new(&args.target);
            let region = SharedControl::connect(path)
                .map_err(|e| format!("`{}` is neither a process nor a shared region: {}", args.target, plain(&e)))?;
            if args.soft_dirty || args.clear_soft_dirty.is_some() {
                return Err(Failed::Cannot(format!(
                    "the soft-dirty bits of `{}` belong to each of its mappings: the program that has one reads and clears them",
                    args.target
                )));
            }
            let asked = Asked::of(args, |text| parse_range(text, region.len())).map_err(Failed::Wrongly)?;
            let svg = open_svg(args)?;
            act(&asked, &args.target, &region)?;
            (find::of_region(path, &region)?, svg)
        }
    };
    if let Some(mut file) = svg {
        let drawn = file.emptied().and_then(|mut f| f.write_all(picture::svg(&found, args.soft_dirty).as_bytes()));
        drawn.map_err(|e| format!("the drawing `{}` cannot be written: {}", file.path().display(), plain(&e)))?;
        file.keep();
    }
    if args.json {
        let all: Vec<Value> = found.iter().map(|f| as_json(f, args)).collect();
        return Ok(serde_json::to_string_pretty(&all).unwrap_or_default() + "\n");
    }
    let colour = std::io::IsTerminal::is_terminal(&std::io::stdout());
    Ok(found.iter().map(|f| as_text(f, args, colour)).collect::<Vec<_>>().join("\n"))
}

/// What to do before printing. All of it is parsed before any of it is done. A range is of bytes or of pages.
struct Asked<R> {
    out: Option<R>,
    idle: Option<Duration>,
    back: Option<R>,
    clean: Option<R>,
}

impl<R> Asked<R> {
    fn of(args: &PagemapArgs, parse: impl Fn(&str) -> Result<R, String>) -> Result<Self, String> {
        let range = |text: &Option<String>| text.as_deref().map(&parse).transpose();
        Ok(Self {
            out: range(&args.page_out)?,
            idle: args.idle.map(seconds_of).transpose()?,
            back: range(&args.page_in)?,
            clean: range(&args.clear_soft_dirty)?,
        })
    }
}

fn open_svg(args: &PagemapArgs) -> Result<Option<Output>, String> {
    args.svg.as_deref().map(|path| Output::open("drawing", path)).transpose()
}

/// Refuses a process whose writes are not tracked.
fn is_tracked(pid: u32) -> Result<(), String> {
    // A process far below its limit has no page map yet.
    match find::of_process(pid).is_ok_and(|found| found.iter().any(|f| f.map.tracks_writes())) {
        true => Ok(()),
        false => uzswap::process::tracks_writes(pid),
    }
}

/// Pages a shared region out and in.
fn act(asked: &Asked<Range<usize>>, target: &str, region: &SharedControl) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("`{target}` refused: {}", plain(&e));
    if let Some(range) = &asked.out {
        let pages = region.page_out(range.clone()).map_err(failed)?;
        say!("uzswap: {} put out", human(pages * PAGE));
    }
    if let Some(time) = asked.idle {
        region.age().map_err(failed)?;
        std::thread::sleep(time);
        let used = region.working_set(time).map_err(failed)?;
        let pages = region.page_out_idle(time).map_err(failed)?;
        say_idle(time, used, pages);
    }
    if let Some(range) = &asked.back {
        let pages = region.page_in(range.clone()).map_err(failed)?;
        say!("uzswap: {} brought in", human(pages * PAGE));
    }
    Ok(())
}

fn say_idle(time: Duration, used: u64, idle: u64) {
    let (used, idle) = (human(used * PAGE), human(idle * PAGE));
    say!("uzswap: {used} in use within {} s; {idle} put out as idle", time.as_secs_f64());
}

/// The query for the runs to be shown.
fn query(args: &PagemapArgs) -> Query {
    match args.soft_dirty {
        true => Query { report: 0xff, ..Query::having(SOFT_DIRTY) },
        false => Query::EVERYTHING,
    }
}

fn seconds_of(seconds: f64) -> Result<Duration, String> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| format!("`{seconds}` is not a time: write seconds, such as --idle 10"))
}

/// Has a process page itself out and in.
fn act_on_process(asked: &Asked<Range<u64>>, pid: u32) -> Result<(), String> {
    if let Some(range) = &asked.out {
        let moved = uzswap::process::ask(pid, Op::Out, range.clone())?;
        let stay = match moved.stayed {
            0 => String::new(),
            n => format!("; {} stay: used again at once, locked, or in use by a device", human(n * PAGE)),
        };
        say!("uzswap: {} put out{stay}", human(moved.pages * PAGE));
    }
    if let Some(time) = asked.idle {
        let all = process::parse_range("all")?;
        uzswap::process::ask(pid, Op::Stage, all.clone())?;
        std::thread::sleep(time);
        // After all was moved out, what is in memory was used since, or could not leave.
        let used: u64 = find::of_process(pid)?.iter().filter(|f| f.is_private()).map(|f| summary(f).present).sum();
        let idle = uzswap::process::ask(pid, Op::Store, all)?;
        say_idle(time, used, idle.pages);
    }
    if let Some(range) = &asked.back {
        let moved = uzswap::process::ask(pid, Op::In, range.clone())?;
        say!("uzswap: {} brought in", human(moved.pages * PAGE));
    }
    if let Some(range) = &asked.clean {
        let cleared = uzswap::process::ask(pid, Op::Clean, range.clone())?;
        let stay = match cleared.stayed {
            0 => String::new(),
            n if cleared.pages == 0 => return Err(not_cleared(pid, n)),
            n => format!("; the bits of {} could not be cleared just now", human(n * PAGE)),
        };
        say!("uzswap: {} had been written to{stay}", human(cleared.pages * PAGE));
    }
    Ok(())
}

fn not_cleared(pid: u32, pages: u64) -> String {
    format!(
        "the soft-dirty bits of {} of process {pid} could not be cleared: it must be allowed one more descriptor, a file of 32 GiB and as much address space (`ulimit -n`, `-f`, `-v`) to remember which they are",
        human(pages * PAGE)
    )
}

/// Parses `all`, or `FROM..TO` as sizes.
fn parse_range(text: &str, len: usize) -> Result<Range<usize>, String> {
    if text == "all" {
        return Ok(0..len);
    }
    let wrong = || format!("`{text}` is not a range: write it as 0..64M, or all");
    let (from, to) = text.split_once("..").ok_or_else(wrong)?;
    let at = |side: &str, otherwise: usize| match side {
        "" => Ok(otherwise),
        side => match Size::parse(side) {
            Ok(Size::Bytes(bytes)) => Ok(bytes as usize),
            _ => Err(wrong()),
        },
    };
    let (from, to) = (at(from, 0)?, at(to, len)?);
    if from > to || to > len {
        return Err(format!("`{text}` is not within the region, which has {} bytes", len));
    }
    Ok(from..to)
}

fn summary(found: &Found) -> Summary {
    let mut sum = Summary::default();
    for part in &found.parts {
        let s = found.map.map().summary(part.from, part.to);
        sum.pages += s.pages;
        sum.present += s.present;
        sum.swapped += s.swapped;
        sum.zero += s.zero;
        sum.soft_dirty += s.soft_dirty;
        sum.write_protected += s.write_protected;
        sum.tiers.iter_mut().zip(s.tiers).for_each(|(to, n)| *to += n);
    }
    sum
}

fn runs(found: &Found, query: Query) -> Vec<Run> {
    let mut runs = Vec::new();
    for Part { from, to } in &found.parts {
        found.map.map().scan(*from, *to, query, |run| runs.push(run));
    }
    runs
}

fn words(state: PageState) -> Vec<&'static str> {
    let mut words = Vec::new();
    let mut word = |is: bool, name| {
        if is {
            words.push(name);
        }
    };
    word(state.present(), "present");
    word(state.swapped(), "swapped");
    word(state.zero(), "zero");
    word(state.soft_dirty(), "soft-dirty");
    word(state.write_protected(), "write-protected");
    if state.tier() != Tier::None {
        words.push(state.tier().name());
    }
    words
}

fn as_json(found: &Found, args: &PagemapArgs) -> Value {
    let sum = summary(found);
    let tiers: serde_json::Map<_, _> =
        TIERS[1..].iter().map(|t| (t.name().to_owned(), json!(sum.tiers[*t as usize]))).collect();
    let mut value = json!({
        "what": found.what, "base": found.base, "pages": found.map.pages(), "page_bytes": PAGE,
        "limit": found.map.limit(),
        "present": sum.present, "swapped": sum.swapped, "zero": sum.zero,
        "soft_dirty": sum.soft_dirty, "write_protected": sum.write_protected, "tiers": tiers,
    });
    if args.clear_soft_dirty.is_some() && found.is_process() {
        value["cleared"] = found.cleared.iter().map(|r| json!({"from": r.from, "to": r.to})).collect();
    }
    if args.runs {
        let all: Vec<Value> = runs(found, query(args))
            .iter()
            .map(|r| json!({"from": r.from, "to": r.to, "state": words(r.state)}))
            .collect();
        value["runs"] = Value::Array(all);
    }
    value
}

fn as_text(found: &Found, args: &PagemapArgs, colour: bool) -> String {
    let sum = summary(found);
    let mut out = String::new();
    let mut line = |name: &str, pages: u64| {
        if pages > 0 {
            let _ = writeln!(out, "  {name:<16} {:>12} pages  {:>10}", pages, human(pages * PAGE));
        }
    };
    line("present", sum.present);
    line("swapped", sum.swapped);
    line("  zero", sum.zero);
    for tier in &TIERS[1..] {
        line(&format!("  {}", tier.name()), sum.tiers[*tier as usize]);
    }
    line("soft-dirty", sum.soft_dirty);
    line("write-protected", sum.write_protected);
    let mut text = format!("{}\n{out}", found.what);
    text.push_str(&picture::text(found, args.soft_dirty, colour));
    if args.runs && args.clear_soft_dirty.is_some() {
        for run in &found.cleared {
            let _ = writeln!(text, "  {:#014x}-{:#014x} was soft-dirty", run.from * PAGE, run.to * PAGE);
        }
    }
    if args.runs {
        for run in runs(found, query(args)) {
            let at = |page: u64| found.base as u64 + page * PAGE;
            let _ = writeln!(text, "  {:#014x}-{:#014x} {}", at(run.from), at(run.to), words(run.state).join(" "));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read() {
        assert_eq!(parse_range("all", 1 << 20), Ok(0..1 << 20));
        assert_eq!(parse_range("4K..64K", 1 << 20), Ok(4096..65536));
        assert_eq!(parse_range("..", 1 << 20), Ok(0..1 << 20));
        for wrong in ["", "x", "64K..4K", "0..2M", "50%..1M"] {
            assert!(parse_range(wrong, 1 << 20).is_err(), "{wrong}");
        }
    }
}

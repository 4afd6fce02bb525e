//! `uzswap lab fallback`: what four small folios for one decompression are worth when large frames are scarce.
//!
//! The work resembles a build. Each step reads runs of 64 KiB that many steps share (headers), fills an area of its own with real
//! contents (what a compiler builds), goes back and forth in it, and now and then reads through all areas of the last steps (a
//! link). It runs in a region of the library, under a third of the memory it uses, three times:
//!
//! - with contiguous frames as they come;
//! - *scarce*: 99 of 100 requests for contiguous frames are refused;
//! - scarce and without the fall-back: if there are no frames for a block, only the page touched comes, and the block is
//!   decompressed again for the next.
//!
//! The pool is not charged, as in the original's cgroup: real contents hardly fit in a third of their size, so a charged pool
//! would leave next to no room for the program. Every page read is checked: its number and version at a place that moves, and at
//! the end all of it.

use crate::data::Source;
use crate::experiment::{Common, Runs, Stop, at_least, go_on};
use crate::json::{Findings, Row, Verdict};
use crate::programs;
use crate::size::{self, MIB, PAGE, mib};
use crate::stats::{median, percent};
use crate::undo::Keeper;
use crate::used::Used;
use crate::workload::Random;
use serde_json::json;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use uzswap_pager::region::{Options, Region};

/// `uzswap lab fallback`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Memory that the work uses; the limit is a third of it [default: 96M, 36M with --quick]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,
    #[command(flatten)]
    runs: Runs,
}

/// Pages in a run of headers, and in a step's own area.
const RUN: usize = 16;
const AREA: usize = 64;
/// Steps between two links.
const LINK: usize = 16;

const SUBJECTS: [(&str, &str); 3] =
    [("plenty", "frames as they come"), ("fallback", "scarce"), ("without", "scarce, no fall-back")];

/// The figures of one run.
#[derive(Clone, Copy, Default)]
struct Figures {
    reads: Duration,
    reads_cpu: f64,
    wall: Duration,
    user: f64,
    system: f64,
    switches: f64,
    direct: u64,
    swapouts: u64,
    faults: u64,
    majors: u64,
    swapins: u64,
    block_reads: u64,
    partial: u64,
    again: u64,
    fallbacks: u64,
}

/// Runs the experiment. Returns whether everything read back was right.
///
/// # Errors
/// Why it ended early.
pub fn run(args: &Args) -> Result<bool, Stop> {
    let memory = args.memory.unwrap_or(if args.common.quick { 36 * MIB } else { 96 * MIB });
    at_least("memory", memory, 24 * MIB)?;
    let runs = args.runs.count(&args.common) as usize;
    let keeper = Keeper::start()?;
    let (dir, _dir) = keeper.make_dir(None)?;
    let (source, holds) = Source::made(&dir, 32 * MIB, programs::python().as_deref())?;
    let mut all: [Vec<Figures>; 3] = Default::default();
    // Runs alternate, so that other load on the machine meets all of them alike.
    for _ in 0..runs {
        for (figures, (subject, _)) in all.iter_mut().zip(SUBJECTS) {
            go_on()?;
            figures.push(build_once(subject, memory as usize, &source)?);
        }
    }
    let findings = findings(&all, memory, runs, &holds);
    let notes = [format!(
        "{} under {} (pool not charged), real contents ({holds}); every page read was checked.",
        mib(memory),
        mib(memory / 3)
    )];
    findings.publish(&SUBJECTS, &notes, args.common.json.as_deref())?;
    Ok(true)
}

fn findings(all: &[Vec<Figures>; 3], memory: u64, runs: usize, holds: &str) -> Findings {
    let of = |i: usize, f: &dyn Fn(&Figures) -> f64| median(&all[i].iter().map(f).collect::<Vec<_>>());
    let mut rows = Vec::new();
    let mut row = |name: &str, unit: &'static str, f: &dyn Fn(&Figures) -> f64| {
        let mut row = Row::new(name, unit);
        SUBJECTS.iter().enumerate().for_each(|(i, (key, _))| row.put(key, of(i, f)));
        rows.push(row);
    };
    row("wall", "s", &|f| f.wall.as_secs_f64());
    row("reads (swap-in)", "s", &|f| f.reads.as_secs_f64());
    row("reads (swap-in), CPU", "s", &|f| f.reads_cpu);
    row("user", "s", &|f| f.user);
    row("sys", "s", &|f| f.system);
    row("threads waited", "events", &|f| f.switches);
    row("direct_reclaim", "events", &|f| f.direct as f64);
    row("zswpout", "pages", &|f| f.swapouts as f64);
    row("pgfault", "events", &|f| f.faults as f64);
    row("pgmajfault", "events", &|f| f.majors as f64);
    row("zswpin", "pages", &|f| f.swapins as f64);
    row("block reads", "blocks", &|f| f.block_reads as f64);
    row("partial reads", "%", &|f| percent(f.partial as f64, f.block_reads as f64));
    row("blocks decompressed twice for one use", "blocks", &|f| f.again as f64);
    row("four small folios", "faults", &|f| f.fallbacks as f64);
    let twice = of(1, &|f| f.again as f64).unwrap_or(f64::NAN);
    let reads = |i| of(i, &|f: &Figures| f.reads.as_secs_f64()).unwrap_or(f64::NAN);
    let cpu = |i| of(i, &|f: &Figures| f.reads_cpu).unwrap_or(f64::NAN);
    let settings = json!({
        "memory": memory, "limit": memory / 3, "pool_charged": false, "runs": runs, "contents": holds,
    });
    Findings {
        rows,
        verdicts: vec![
            Verdict::at_most("blocks decompressed twice for one use", 0.0, twice),
            Verdict::at_most("swap-in time with the fall-back, of that without", 0.75, reads(1) / reads(2)),
            // CPU time says the same where other programs make the clock's time unreliable.
            Verdict::at_most("swap-in CPU time with the fall-back, of that without", 0.75, cpu(1) / cpu(2)),
        ],
        ..Findings::new("fallback", settings)
    }
}

/// The memory, and the model of what it holds.
struct Work<'a> {
    memory: &'a mut [u8],
    versions: Vec<u32>,
    source: &'a Source,
    /// Time spent reading: by the clock, and in CPU seconds of the whole process.
    reads: Duration,
    reads_cpu: f64,
}

impl Work<'_> {
    fn stamp(page: usize, version: u32) -> [u8; 8] {
        ((page as u64) << 32 | u64::from(version)).to_le_bytes()
    }

    /// The place of a page's stamp.
    fn at(page: usize, version: u32) -> usize {
        page * PAGE + (page * 7 + version as usize * 13) % (PAGE / 8) * 8
    }

    fn write(&mut self, page: usize) {
        self.versions[page] += 1;
        let version = self.versions[page];
        let from = self.source.page((page * 31 + version as usize * 7) % self.source.pages());
        self.memory[page * PAGE..][..PAGE].copy_from_slice(from);
        let at = Self::at(page, version);
        self.memory[at..at + 8].copy_from_slice(&Self::stamp(page, version));
    }

    fn read(&mut self, page: usize) -> Result<(), String> {
        let version = self.versions[page];
        if version == 0 {
            return Ok(());
        }
        let at = Self::at(page, version);
        if self.memory[at..at + 8] != Self::stamp(page, version) {
            return Err(format!("page {page} does not hold what was written"));
        }
        Ok(())
    }

    fn timed(&mut self, pages: impl Iterator<Item = usize>) -> Result<(), String> {
        let (start, cpu) = (Instant::now(), cpu_seconds());
        let mut result = Ok(());
        for page in pages {
            result = self.read(page);
            if result.is_err() {
                break;
            }
        }
        self.reads += start.elapsed();
        self.reads_cpu += cpu_seconds() - cpu;
        result
    }

    fn verify(&self) -> Result<(), String> {
        for (page, version) in self.versions.iter().enumerate().filter(|(_, v)| **v > 0) {
            let mut want = self.source.page((page * 31 + *version as usize * 7) % self.source.pages()).to_vec();
            let at = Self::at(page, *version) - page * PAGE;
            want[at..at + 8].copy_from_slice(&Self::stamp(page, *version));
            if self.memory[page * PAGE..][..PAGE] != want {
                return Err(format!("page {page} does not hold what was written"));
            }
        }
        Ok(())
    }
}

fn build_once(subject: &str, size: usize, source: &Source) -> Result<Figures, String> {
    let mut region =
        Region::new(size, &Options { pool_uncharged: true, ..Options::new(size / 3) }).map_err(|e| e.to_string())?;
    let folios = &region.group().folios;
    folios.scarce.store(if subject == "plenty" { 0 } else { 100 }, Relaxed);
    folios.fallback_off.store(u32::from(subject == "without"), Relaxed);
    let pages = size / PAGE;
    // SAFETY: the region is used only here, and given to no system call.
    let memory = unsafe { region.as_slice_mut() };
    let mut work = Work { memory, versions: vec![0; pages], source, reads: Duration::ZERO, reads_cpu: 0.0 };
    let before = Used::by_me();
    let start = Instant::now();
    build(&mut work, pages)?;
    let (wall, used) = (start.elapsed(), Used::by_me() - before);
    let (reads, reads_cpu) = (work.reads, work.reads_cpu);
    let versions = std::mem::take(&mut work.versions);
    let c = &region.group().slots[0].counters;
    let figures = Figures {
        reads,
        reads_cpu,
        wall,
        user: used.user,
        system: used.system,
        switches: used.waits,
        direct: c.direct_reclaim.load(Relaxed),
        swapouts: c.zswpout.load(Relaxed),
        faults: c.pgfault.load(Relaxed),
        majors: c.pgmajfault.load(Relaxed),
        swapins: c.zswpin.load(Relaxed),
        block_reads: c.folios.block_read.load(Relaxed),
        partial: c.folios.block_partial_read.load(Relaxed),
        again: c.folios.block_read_again.load(Relaxed),
        fallbacks: c.folios.block_fallback.load(Relaxed) - c.folios.block_fallback_single.load(Relaxed),
    };
    // SAFETY: as above.
    let memory = unsafe { region.as_slice_mut() };
    Work { memory, versions, source, reads: Duration::ZERO, reads_cpu: 0.0 }.verify()?;
    Ok(figures)
}

/// The build: headers are in the first half, the areas of the steps in the second.
fn build(work: &mut Work, pages: usize) -> Result<(), String> {
    let mut random = Random::new(1);
    let headers = pages / 2 / RUN;
    let areas = (pages - pages / 2) / AREA;
    (0..headers * RUN).for_each(|page| work.write(page));
    for step in 0..areas * 3 {
        for _ in 0..12 {
            // Every file includes some headers; few files include most of them.
            let run = ((random.unit() * random.unit()) * headers as f64) as usize;
            work.timed(run * RUN..(run + 1) * RUN)?;
        }
        let area = pages / 2 + step % areas * AREA;
        (area..area + AREA).for_each(|page| work.write(page));
        for _ in 0..AREA / 2 {
            let page = area + (random.unit() * AREA as f64) as usize;
            work.timed(std::iter::once(page))?;
        }
        if step % LINK == LINK - 1 {
            for back in (0..LINK).rev() {
                let area = pages / 2 + (step - back) % areas * AREA;
                work.timed(area..area + AREA)?;
            }
        }
    }
    Ok(())
}

/// CPU seconds of this process, including its reclaim thread.
fn cpu_seconds() -> f64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call fills `t`.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_build_reads_what_it_wrote_and_the_fallback_decompresses_once() {
        let bytes = (0..512 * PAGE).map(|i| (i / 3 % 253) as u8 ^ (i >> 12) as u8).collect();
        let source = Source::of_bytes(bytes);
        let with = build_once("fallback", 24 << 20, &source).unwrap();
        assert_eq!(with.again, 0);
        assert!(with.fallbacks > 0 && with.majors > 0);
        let without = build_once("without", 24 << 20, &source).unwrap();
        assert!(without.again > 0 && without.faults > with.faults);
    }
}

//! `uzswap lab highalloc`: how many huge blocks an ageing machine can give, under three rules of compaction.
//!
//! Read [`trace`] (what real programs do to memory), [`aging`] (the machine that replays it), then the phases below. Each policy
//! gets a machine of its own, with the same traces and the same seed, and no restart between iterations.
//!
//! The pivot begins in the middle of the machine. At the machine's start it would be the old rule until it moves, and it moves
//! only after the longest deferral: six passes in vain without a success between. Most attempts succeed here, so that never
//! happened, and both rows had the same figures. The table says how often the pivot moves.

pub mod aging;
mod processes;
pub mod trace;
mod world;

use crate::data::Source;
use crate::experiment::{Common, Stop, at_least, at_most, go_on, writable};
use crate::json::{Findings, Row, Verdict};
use crate::size::{self, MIB};
use crate::stats::percent;
use crate::undo::Keeper;
use aging::{Counts, Machine};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Instant;
use trace::Trace;
use uzswap_mm::compaction::Counters;
use uzswap_mm::compaction::policy::Policy;
use uzswap_mm::compaction::rule::Rule;

/// Frames of the largest machine.
const MOST_FRAMES: u64 = 1 << 23;

/// `uzswap lab highalloc`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Size of the machine [default: 256M, 64M with --quick]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,
    /// Iterations without restart
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=20))]
    iterations: u32,
    /// Seed of all random choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Traces of the programs: read from FILE if it exists, else recorded and written to it
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

/// The share of the blocks that is asked for.
const ASKED: f64 = 0.95;
/// Memory of the load when it starts, resident or not, as a multiple of the machine's.
const LOAD: f64 = 1.5;
/// Published figures in percent: phases 1 to 3, at iterations 1 to 3.
const PUBLISHED: [(&str, [[f64; 3]; 3]); 2] = [
    ("published_old", [[36.2, 23.4, 16.4], [37.2, 25.0, 17.2], [85.8, 82.8, 80.4]]),
    ("published_pivot", [[51.0, 45.0, 42.6], [59.6, 50.8, 48.2], [85.6, 82.8, 79.4]]),
];
const SUBJECTS: [(&str, &str); 5] = [
    ("zone_ends", "zone ends"),
    ("pivot", "pivot"),
    ("emptiest", "emptiest first"),
    ("published_old", "published, old"),
    ("published_pivot", "published, pivot"),
];

/// One iteration of one policy.
struct Iteration {
    /// Success by phase, in percent of what was asked for.
    phases: [f64; 3],
    /// What a perfect packer would have got in phase 3, in the same unit.
    bound: f64,
    /// Blocks obtained in the three phases.
    blocks: usize,
    /// The counters of compaction in this iteration.
    compaction: Counters,
    counts: Counts,
    /// Used bytes of the pool per byte that it holds, after the warm-up.
    density: f64,
    /// How often the pivot moved in this iteration.
    pivot_moves: Option<u64>,
    /// Where the pivot is at the end, in percent of the machine.
    pivot_at: Option<f64>,
}

struct Settings {
    frames: u32,
    iterations: u32,
    seed: u64,
    warm_up: usize,
    references: usize,
}

/// Runs the experiment. Returns whether everything read back was right.
///
/// # Errors
/// Why it ended early.
pub fn run(args: &Args) -> Result<bool, Stop> {
    let memory = args.memory.unwrap_or(if args.common.quick { 64 * MIB } else { 256 * MIB });
    at_least("memory", memory, 16 * MIB)?;
    at_most("memory", memory, MOST_FRAMES * size::PAGE as u64)?;
    let settings = Settings {
        frames: (memory as usize / size::PAGE) as u32,
        iterations: args.iterations,
        seed: args.seed,
        warm_up: if args.common.quick { 40 } else { 150 },
        references: if args.common.quick { 6 } else { 16 },
    };
    tell!("seed {}", settings.seed);
    let read = args.trace.as_deref().filter(|path| path.exists()).map(read).transpose()?;
    let keeper = Keeper::start()?;
    let (dir, _dir) = keeper.make_dir(None)?;
    let traces = read.map_or_else(|| record(args.trace.as_deref(), &keeper, &dir), Ok)?;
    let (contents, _) = Source::made(&dir, 16 << 20, None)?;
    for t in &traces {
        tell!("{}: {} steps, {} pages at most", t.program, t.steps.len(), t.peak);
    }
    let mut findings = Findings::new("highalloc", describe(&settings, &traces));
    let done = [
        ("zone_ends", age(&settings, || Rule::ZoneEnds.policy(), &traces, &contents)?),
        ("pivot", age(&settings, || Rule::Pivot.policy(), &traces, &contents)?),
        ("emptiest", age(&settings, || Rule::Emptiest.policy(), &traces, &contents)?),
    ];
    findings.rows = rows(&done, &settings);
    findings.verdicts = verdicts(&done);
    let wrong: u64 = done.iter().flat_map(|(_, all)| all).map(|i| i.counts.wrong).sum();
    let mut notes = vec![
        "success in percent of the blocks asked for (95 % of the machine); what comes, goes and is brought back is as \
         recorded, touches of pages that never left are drawn"
            .to_owned(),
    ];
    if wrong > 0 {
        notes.push(format!("{wrong} pages did not hold what was written"));
    }
    findings.publish(&SUBJECTS, &notes, args.common.json.as_deref())?;
    Ok(wrong == 0)
}

/// Reads the traces in a file.
fn read(path: &Path) -> Result<Vec<Trace>, String> {
    let file = path.display();
    let text = std::fs::read(path).map_err(|e| format!("cannot read {file}: {e}"))?;
    let traces: Vec<Trace> = serde_json::from_slice(&text).map_err(|e| format!("{file}: {e}"))?;
    if traces.is_empty() || !traces.iter().all(Trace::is_playable) {
        return Err(format!("{file}: it has a program without pages, or none; delete the file to record anew"));
    }
    match traces.iter().find_map(|t| Some((&t.program, t.contradiction()?))) {
        Some((program, (step, page))) => Err(format!(
            "{file}: in step {step} of {program} page {page} comes though it is there; delete the file to record anew"
        )),
        None => Ok(traces),
    }
}

/// Records traces by way of `dir`, and writes them to `file` if there is one.
fn record(file: Option<&Path>, keeper: &Keeper, dir: &Path) -> Result<Vec<Trace>, Stop> {
    file.map_or(Ok(()), writable)?;
    // The command can record; a lab built as an example cannot.
    let own = std::env::current_exe().ok().filter(|exe| exe.file_name().is_some_and(|name| name == "uzswap"));
    let traces = trace::record_all(own.as_deref(), keeper, dir);
    // An interrupted recording must not be read as if it were complete.
    go_on()?;
    if traces.is_empty() {
        return Err("none of the programs to record (python3, cc, sort, xz) is here".to_owned().into());
    }
    if let Some(path) = file {
        let text = serde_json::to_vec(&traces).map_err(|e| e.to_string())?;
        std::fs::write(path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
    }
    Ok(traces)
}

fn describe(settings: &Settings, traces: &[Trace]) -> Value {
    let programs: Vec<_> = traces.iter().map(|t| json!({"program": t.program, "pages": t.peak})).collect();
    json!({
        "memory_bytes": settings.frames as usize * size::PAGE,
        "load": LOAD,
        "asked": ASKED,
        "iterations": settings.iterations,
        "seed": settings.seed,
        "warm_up_steps": settings.warm_up,
        "references_per_step": settings.references,
        "compressor": "lz4",
        "programs": programs,
    })
}

/// Runs one machine through all iterations.
fn age<P: Policy>(
    settings: &Settings,
    policy: impl FnOnce() -> P,
    traces: &[Trace],
    contents: &Source,
) -> Result<Vec<Iteration>, Stop> {
    let began = Instant::now();
    let mut m = Machine::new(settings.frames, policy, traces, contents, settings.seed);
    let asked = (m.blocks() as f64 * ASKED) as usize;
    m.start_residents();
    let mut done = Vec::new();
    for _ in 0..settings.iterations {
        let (compaction, counts) = (m.compactor.counters, m.counts);
        let pivot = m.compactor.policy.pivot();
        m.start_load(LOAD, settings.seed);
        for _ in 0..settings.warm_up {
            go_on()?;
            m.tick(settings.references);
        }
        let (used, held) = m.pool_bytes();
        let density = percent(used as f64, held as f64);
        let (mut phases, mut blocks, mut bound) = ([0.0; 3], 0, 0);
        for (phase, success) in phases.iter_mut().enumerate() {
            if phase == 2 {
                m.stop_load();
                m.drop_caches();
                bound = m.packers_bound().min(asked);
            }
            let mut got = 0;
            for _ in 0..asked {
                go_on()?;
                if phase < 2 {
                    m.tick(settings.references);
                }
                got += usize::from(m.allocate_huge());
            }
            *success = percent(got as f64, asked as f64);
            blocks += got;
            m.free_huge();
        }
        if m.lost_frames() > 0 {
            return Err(format!("{} frames are not accounted for", m.lost_frames()).into());
        }
        done.push(Iteration {
            phases,
            bound: percent(bound as f64, asked as f64),
            blocks,
            compaction: m.compactor.counters.since(&compaction),
            counts: Counts {
                zswpout: m.counts.zswpout - counts.zswpout,
                zswpin: m.counts.zswpin - counts.zswpin,
                zswpwb: m.counts.zswpwb - counts.zswpwb,
                pswpin: m.counts.pswpin - counts.pswpin,
                allocated: m.counts.allocated - counts.allocated,
                stalled: m.counts.stalled - counts.stalled,
                wrong: m.counts.wrong - counts.wrong,
            },
            density,
            pivot_moves: m.compactor.policy.pivot().zip(pivot).map(|((_, after), (_, before))| after - before),
            pivot_at: m.compactor.policy.pivot().map(|(block, _)| percent(block as f64, m.blocks() as f64)),
        });
    }
    tell!("{:.1} s", began.elapsed().as_secs_f64());
    Ok(done)
}

type Done = [(&'static str, Vec<Iteration>); 3];
type Figure = (&'static str, &'static str, fn(&Iteration) -> f64);
type PivotsFigure = (&'static str, &'static str, fn(&Iteration) -> Option<f64>);

/// Figures of policies with a pivot that moves.
const PIVOTS_FIGURES: &[PivotsFigure] = &[
    ("pivot moved", "times", |i| i.pivot_moves.map(|n| n as f64)),
    ("pivot at the end, of the machine", "%", |i| i.pivot_at),
];

const FIGURES: &[Figure] = &[
    ("packer's bound of phase 3", "%", |i| i.bound),
    ("pool density", "%", |i| i.density),
    ("blocks obtained", "blocks", |i| i.blocks as f64),
    ("frames scanned per block", "frames", |i| i.compaction.scanned() as f64 / i.blocks.max(1) as f64),
    ("compact_stall", "events", |i| i.compaction.compact_stall as f64),
    ("compact_success", "events", |i| i.compaction.compact_success as f64),
    ("compact_fail", "events", |i| i.compaction.compact_fail as f64),
    ("compact_migrate_scanned", "frames", |i| i.compaction.compact_migrate_scanned as f64),
    ("compact_free_scanned", "frames", |i| i.compaction.compact_free_scanned as f64),
    ("compact_isolated", "frames", |i| i.compaction.compact_isolated as f64),
    ("pgmigrate_success", "frames", |i| i.compaction.pgmigrate_success as f64),
    ("pgmigrate_fail", "frames", |i| i.compaction.pgmigrate_fail as f64),
    ("migrated twice in a pass", "frames", |i| i.compaction.migrated_twice as f64),
    ("migrated in the pass before, too", "frames", |i| i.compaction.migrated_again as f64),
    ("zswpout", "pages", |i| i.counts.zswpout as f64),
    ("zswpin", "pages", |i| i.counts.zswpin as f64),
    ("zswpwb", "pages", |i| i.counts.zswpwb as f64),
    ("pswpin", "pages", |i| i.counts.pswpin as f64),
    ("pages allocated", "pages", |i| i.counts.allocated as f64),
    ("pages given up", "pages", |i| i.counts.stalled as f64),
];

fn rows(done: &Done, settings: &Settings) -> Vec<Row> {
    let mut rows = Vec::new();
    for phase in 0..3 {
        for iteration in 0..settings.iterations as usize {
            let mut row = Row::new(format!("phase {}, iteration {}", phase + 1, iteration + 1), "%");
            for (subject, all) in done {
                row.put(subject, Some(all[iteration].phases[phase]));
            }
            for (subject, published) in PUBLISHED {
                row.put(subject, published[phase].get(iteration).copied());
            }
            rows.push(row);
        }
    }
    for (name, unit, figure) in FIGURES {
        for iteration in 0..settings.iterations as usize {
            let mut row = Row::new(format!("{name}, iteration {}", iteration + 1), unit);
            done.iter().for_each(|(subject, all)| row.put(subject, Some(figure(&all[iteration]))));
            rows.push(row);
        }
    }
    for (name, unit, figure) in PIVOTS_FIGURES {
        for iteration in 0..settings.iterations as usize {
            let mut row = Row::new(format!("{name}, iteration {}", iteration + 1), unit);
            done.iter().for_each(|(subject, all)| row.put(subject, figure(&all[iteration])));
            rows.push(row);
        }
    }
    rows
}

/// The targets for our own rule.
fn verdicts(done: &Done) -> Vec<Verdict> {
    let [(_, old), _, (_, own)] = done;
    let least = |of: fn(&Iteration) -> f64| own.iter().map(of).fold(f64::INFINITY, f64::min);
    let per_block = |all: &[Iteration]| {
        let scanned: u64 = all.iter().map(|i| i.compaction.scanned()).sum();
        scanned as f64 / all.iter().map(|i| i.blocks).sum::<usize>().max(1) as f64
    };
    let mut verdicts = Vec::new();
    if own.len() >= 3 {
        let (first, third) = (own[0].phases[0], own[2].phases[0]);
        verdicts.push(Verdict::at_least("phase 1 at iteration 3, percent, against that at iteration 1", first, third));
        verdicts.push(Verdict::at_least("phase 1 at iteration 3, percent", 51.0, third));
    }
    verdicts.extend([
        Verdict::at_least("phase 2, percent, the least of all iterations", 60.0, least(|i| i.phases[1])),
        Verdict::at_least("phase 3, percent, the least of all iterations", 86.0, least(|i| i.phases[2])),
        Verdict::at_least("phase 3 less the packer's bound, points", -5.0, least(|i| i.phases[2] - i.bound)),
        Verdict::at_least("pool bytes used of those held, percent", 90.0, least(|i| i.density)),
        Verdict::at_most("pages migrated twice in a pass", 0.0, {
            own.iter().map(|i| i.compaction.migrated_twice).sum::<u64>() as f64
        }),
    ]);
    let (own, old) = (per_block(own), per_block(old));
    if old > 0.0 {
        verdicts.push(Verdict::at_most("frames scanned per block, times the old way's", 0.5, own / old));
    }
    verdicts
}

#[cfg(test)]
mod tests {
    use super::*;
    use trace::Step;
    use uzswap_mm::compaction::policy::Pivot;
    use uzswap_mm::zone::BLOCK_FRAMES;

    /// A program that takes one MiB after another, keeps every other one, and asks for those now and then.
    fn made_up() -> Trace {
        let steps = (0..40u32).map(|i| Step {
            came: vec![(i * 256, 256)],
            went: if i > 4 && i % 2 == 0 { vec![((i - 4) * 256, 256)] } else { vec![] },
            ..Step::default()
        });
        Trace { program: "made up".to_owned(), steps: steps.collect(), peak: 24 * 256 }
    }

    /// The story: with the pivot at the machine's start, the published rule had the same figures as the old one, as the pivot
    /// moves only after the longest deferral, which never came.
    #[test]
    fn the_pivot_is_not_the_old_way_again() {
        let settings = Settings { frames: 16 * BLOCK_FRAMES, iterations: 1, seed: 1, warm_up: 40, references: 6 };
        let (traces, contents) = ([made_up()], Source::made(&std::env::temp_dir(), 16 << 20, None).unwrap().0);
        let old = age(&settings, || Rule::ZoneEnds.policy(), &traces, &contents).ok().unwrap();
        let pivot = age(&settings, || Rule::Pivot.policy(), &traces, &contents).ok().unwrap();
        assert!(old[0].pivot_at.is_none() && pivot[0].pivot_at.is_some());
        assert_ne!(old[0].compaction, pivot[0].compaction);
        // At the machine's start it is the old rule until it moves.
        let from_start = age(&settings, || Pivot::new(0), &traces, &contents).ok().unwrap();
        assert_eq!((from_start[0].pivot_moves, from_start[0].pivot_at), (Some(0), Some(0.0)));
        assert_eq!(from_start[0].compaction, old[0].compaction);
    }
}

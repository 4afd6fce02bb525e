//! What real programs do to memory: which pages come, which go, and which are asked for again.
//!
//! Programs run under `uzswap run --record` with less memory than they use, and the engine itself reports what happened: a page
//! seen for the first time came, one that it was told to forget went, one that it had to bring back was touched. References to a
//! page that never left are not seen; they are drawn when the trace is replayed, see `aging`.
//!
//! If no uzswap command is at hand (the lab built as an example), the lab looks at a program from outside, every few milliseconds
//! through `/proc/PID/pagemap`: a page that is present and was not before came, one that is gone went.

use super::aging::SPACE;
use crate::process::{self, Spec};
use crate::size::PAGE;
use crate::undo::Keeper;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use uzswap_mm::trace::{Kind, Record};

/// One look. Pages are runs (first, count), numbered from 0 within the program.
#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Step {
    /// Pages that came.
    pub came: Vec<(u32, u32)>,
    /// Pages that went.
    pub went: Vec<(u32, u32)>,
    /// Pages that were brought back.
    #[serde(default)]
    pub touched: Vec<(u32, u32)>,
}

/// One program, from its start to its end.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Trace {
    /// Its name.
    pub program: String,
    /// What was seen, in order.
    pub steps: Vec<Step>,
    /// The most pages at once.
    pub peak: usize,
}

impl Trace {
    /// Whether it can fill a machine: before its last step (programs start anywhere before that) it has more than `LEAST` pages,
    /// as recorded traces have, and none beyond the address space of a process.
    #[must_use]
    pub fn is_playable(&self) -> bool {
        let (mut live, mut most) = (BTreeSet::new(), 0);
        let within = |(first, n): &(u32, u32)| first.checked_add(*n).is_some_and(|end| u64::from(end) <= SPACE);
        for (step, after) in self.steps.iter().zip(1..) {
            if !step.came.iter().chain(&step.went).chain(&step.touched).all(within) {
                return false;
            }
            pages(&step.went).for_each(|page| _ = live.remove(&page));
            live.extend(pages(&step.came));
            if after < self.steps.len() {
                most = live.len().max(most);
            }
        }
        most.min(self.peak) > LEAST
    }

    /// The first step in which a page comes that is present already, with that page; none in a recorded trace.
    #[must_use]
    pub fn contradiction(&self) -> Option<(usize, u32)> {
        let mut live = BTreeSet::new();
        self.steps.iter().enumerate().find_map(|(i, step)| {
            pages(&step.went).for_each(|page| _ = live.remove(&page));
            pages(&step.came).find(|page| !live.insert(*page)).map(|page| (i, page))
        })
    }
}

/// The pages of runs.
fn pages(runs: &[(u32, u32)]) -> impl Iterator<Item = u32> + '_ {
    runs.iter().flat_map(|(first, n)| *first..first + n)
}

/// A program that never has more pages at once is too small to be of use.
const LEAST: usize = 256;
/// The time between two looks from outside.
const EVERY: Duration = Duration::from_millis(5);
/// The limit of a recorded program: less than it wants.
const MEMORY: &str = "24M";
/// Records of the engine in one step.
const RECORDS: usize = 64;

/// A program worth recording: a name, and a command.
type Recipe = (&'static str, &'static [&'static str]);

const PYTHON: &str = "
import random, sys
random.seed(int(sys.argv[1])); live = {}
words = [('w%d' % i) * 3 for i in range(20000)]
for k in range(900):
    live[k] = [random.choice(words) + str(i) for i in range(random.randrange(100, 900))]
    if k % 3 == 2: live.pop(random.choice(list(live)))
    if k % 50 == 49: live[k] = bytearray(random.randrange(1 << 20, 6 << 20))
";
const C: &str = "i=0; while [ $i -lt 900 ]; do echo \"struct s$i { int a[$((i % 50 + 1))]; char *b; }; \
    int f$i(struct s$i *p, int n) { int t = 0; for (int k = 0; k < n; k++) t += p[k].a[k % ($((i % 50 + 1)))] * $i; \
    return t; }\"; i=$((i+1)); done | cc -O2 -x c - -c -o /dev/null";
const SORT: &str = "i=0; seq 1 400000 | sed 's/.*/&-&-the quick brown fox &/' | LC_ALL=C sort -r -k2 --parallel=1 \
    -S 64M > /dev/null";
const XZ: &str = "seq 1 900000 | xz -T1 -6 -c > /dev/null";

const RECIPES: &[Recipe] = &[
    ("Python 1", &["python3", "-c", PYTHON, "1"]),
    ("cc", &["sh", "-c", C]),
    ("Python 2", &["python3", "-c", PYTHON, "2"]),
    ("sort", &["sh", "-c", SORT]),
    ("xz", &["sh", "-c", XZ]),
];

/// Records every program that this machine has: by `uzswap` if there is one, with files in `dir`.
#[must_use]
pub fn record_all(uzswap: Option<&Path>, keeper: &Keeper, dir: &Path) -> Vec<Trace> {
    let one = |(name, command): &Recipe| match uzswap {
        Some(uzswap) => record(name, command, uzswap, keeper, &dir.join("trace")),
        None => watch(name, command, EVERY).map_err(|e| e.to_string()),
    };
    RECIPES.iter().filter_map(|recipe| one(recipe).ok()).filter(|t| t.peak > LEAST).collect()
}

/// Runs a command under `uzswap run --record` with little memory, and records to a file at `path`.
///
/// The story: an interrupted lab went on until all programs had been recorded.
///
/// # Errors
/// When it cannot be started, the lab was interrupted, or the recording cannot be read; in one sentence.
pub fn record(name: &str, command: &[&str], uzswap: &Path, keeper: &Keeper, path: &Path) -> Result<Trace, String> {
    let mut argv: Vec<OsString> = vec![uzswap.into()];
    argv.extend(["run", "--quiet", "--memory", MEMORY, "--record"].map(OsString::from));
    argv.extend([path.into(), "--".into()]);
    argv.extend(command.iter().map(OsString::from));
    let (env, timeout) = (Vec::new(), Duration::from_secs(600));
    process::run(keeper, &Spec { argv, env, stdin: None, cgroup: None, sample: None, timeout })?;
    let bytes = fs::read(path);
    let _ = fs::remove_file(path);
    let bytes = bytes.map_err(|e| e.to_string())?;
    let recorded = uzswap_mm::trace::Trace::parse(&bytes).map_err(|e| e.to_string())?;
    let records = recorded.blocks().map_while(Result::ok).flat_map(|block| {
        let slot = block.head.slot;
        block.records().map(|r| (slot, r)).collect::<Vec<_>>()
    });
    Ok(from_records(name, records))
}

/// Makes a trace from the engine's records.
fn from_records(name: &str, records: impl Iterator<Item = (u32, Record)>) -> Trace {
    let mut numbers = BTreeMap::new();
    let mut live = BTreeSet::new();
    let mut trace = Trace { program: name.to_owned(), steps: Vec::new(), peak: 0 };
    let mut now = Open::default();
    for (i, (slot, record)) in records.enumerate() {
        for page in (0..record.count() as u64).map(|k| (slot, record.vpn + k)) {
            let next = numbers.len() as u32;
            let number = *numbers.entry(page).or_insert(next);
            match record.kind {
                Kind::Fresh | Kind::Evict if live.insert(page) => now.change(number, true),
                Kind::Free if live.remove(&page) => now.change(number, false),
                Kind::Load | Kind::Refault if live.contains(&page) => now.touched.push(number),
                _ => {}
            }
        }
        trace.peak = trace.peak.max(live.len());
        if i % RECORDS == RECORDS - 1 {
            trace.steps.push(std::mem::take(&mut now).close());
        }
    }
    trace.steps.push(now.close());
    trace
}

/// A step being made. In a step pages go before any come, so if a page came and went several times only the net change counts:
/// one that came, went and came again has come once. (Once this was recorded as coming twice. The machine that replayed it had
/// two frames for one page, and took one for the other.)
#[derive(Default)]
struct Open {
    /// For each page that came or went: whether it was present before the step, and whether it is now.
    changed: BTreeMap<u32, (bool, bool)>,
    touched: Vec<u32>,
}

impl Open {
    /// A page came (`there`) or went.
    fn change(&mut self, page: u32, there: bool) {
        self.changed.entry(page).or_insert((!there, there)).1 = there;
    }

    fn close(self) -> Step {
        let those = |of: fn(&(bool, bool)) -> bool| {
            runs(self.changed.iter().filter(|(_, change)| of(change)).map(|(page, _)| *page).collect())
        };
        Step { came: those(|c| c.1), went: those(|c| c.0), touched: runs(self.touched) }
    }
}

/// Runs a command, and watches it and its children from outside.
///
/// # Errors
/// When it cannot be started.
pub fn watch(name: &str, command: &[&str], every: Duration) -> io::Result<Trace> {
    let mut child = Command::new(command[0])
        .args(&command[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let mut numbers = BTreeMap::new();
    let mut before = BTreeSet::new();
    let mut trace = Trace { program: name.to_owned(), steps: Vec::new(), peak: 0 };
    let began = Instant::now();
    while child.try_wait()?.is_none() {
        if began.elapsed() > Duration::from_secs(20) {
            let _ = child.kill();
            let _ = child.wait();
            break;
        }
        let mut now = BTreeSet::new();
        for pid in family(child.id()) {
            let _ = present(pid, &mut now);
        }
        let mut number = |page: &(u32, u64)| {
            let next = numbers.len() as u32;
            *numbers.entry(*page).or_insert(next)
        };
        let came: Vec<_> = now.difference(&before).map(&mut number).collect();
        let went: Vec<_> = before.difference(&now).map(&mut number).collect();
        trace.peak = trace.peak.max(now.len());
        trace.steps.push(Step { came: runs(came), went: runs(went), touched: Vec::new() });
        before = now;
        std::thread::sleep(every);
    }
    Ok(trace)
}

/// A process and its descendants.
fn family(pid: u32) -> Vec<u32> {
    let mut all = vec![pid];
    let mut at = 0;
    while at < all.len() {
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", all[at])).unwrap_or_default();
        all.extend(children.split_whitespace().filter_map(|c| c.parse::<u32>().ok()));
        at += 1;
    }
    all
}

/// Adds the pages of a process's private anonymous memory that are present.
fn present(pid: u32, pages: &mut BTreeSet<(u32, u64)>) -> io::Result<()> {
    const PRESENT: u64 = 1 << 63;
    let maps = fs::read(format!("/proc/{pid}/maps"))?;
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let mut words = vec![0u8; 8 * 512];
    for map in uzswap_sys::maps::parse(&maps).filter(|m| m.is_private_anonymous()) {
        let (mut at, end) = (map.start / PAGE, map.end / PAGE);
        while at < end {
            let n = (end - at).min(512);
            pagemap.read_exact_at(&mut words[..n * 8], at as u64 * 8)?;
            let (entries, _) = words[..n * 8].as_chunks::<8>();
            let there = entries.iter().enumerate().filter(|(_, e)| u64::from_ne_bytes(**e) & PRESENT != 0);
            pages.extend(there.map(|(i, _)| (pid, (at + i) as u64)));
            at += n;
        }
    }
    Ok(())
}

/// Turns numbers into runs.
fn runs(mut numbers: Vec<u32>) -> Vec<(u32, u32)> {
    numbers.sort_unstable();
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for n in numbers {
        match runs.last_mut() {
            Some((first, count)) if *first + *count == n => *count += 1,
            _ => runs.push((n, 1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_seen_to_allocate_and_to_free() {
        // On a busy machine the watcher may sleep through a pause: then try once more, with longer pauses.
        let seen_well = |seen: &(usize, usize, usize)| seen.0 > 4 * 2000 && seen.1 > 3 * 2000;
        let mut tries = ["0.03", "0.3", "2"].into_iter().map(allocations_seen).inspect(|seen| println!("{seen:?}"));
        let (came, went, peak) = tries.find(seen_well).expect("not seen in three tries");
        assert!((2048..9 * 2048).contains(&peak), "{came} came, {went} went, {peak}");
    }

    /// What a watcher sees of a program that allocates 2,048 pages four times and frees them, with pauses of so many seconds:
    /// pages that came, pages that went, and the most at a time.
    fn allocations_seen(pause: &str) -> (usize, usize, usize) {
        let script = format!(
            "
import mmap, time
for i in range(4):
    # (Not malloc, which keeps what is freed.)
    m = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, len(m), 4096): m[at] = 1
    time.sleep({pause}); m.close(); time.sleep({pause})
"
        );
        let trace = watch("python", &["python3", "-c", &script], Duration::from_millis(3)).unwrap();
        let count = |of: fn(&Step) -> &Vec<(u32, u32)>| {
            trace.steps.iter().flat_map(of).map(|(_, n)| *n as usize).sum::<usize>()
        };
        (count(|s| &s.came), count(|s| &s.went), trace.peak)
    }

    #[test]
    fn what_the_engine_recorded_becomes_steps() {
        let records = [
            (Kind::Fresh, 100, 4),
            (Kind::Evict, 102, 4),
            (Kind::Refault, 103, 2),
            (Kind::Free, 101, 2),
            (Kind::Refault, 101, 1),
            (Kind::Fresh, 101, 1),
        ]
        .map(|(kind, vpn, n)| (0, Record::pages(kind, vpn, n)));
        let trace = from_records("x", records.into_iter());
        assert_eq!(trace.peak, 6);
        // 102 came and went; 101 too, and came again: once, as nothing was there before.
        let step = Step { came: vec![(0, 2), (3, 3)], went: vec![], touched: vec![(3, 2)] };
        assert_eq!(trace.steps, [step]);
        assert_eq!(trace.contradiction(), None);
    }

    #[test]
    fn a_page_that_is_there_cannot_come() {
        let step = |came: &[(u32, u32)], went: &[(u32, u32)]| Step {
            came: came.to_vec(),
            went: went.to_vec(),
            touched: Vec::new(),
        };
        let trace = |steps: Vec<Step>| Trace { program: "x".to_owned(), steps, peak: 9 };
        let again = trace(vec![step(&[(0, 4)], &[]), step(&[(2, 1)], &[(1, 3)]), step(&[(1, 1)], &[])]);
        assert_eq!(again.contradiction(), None);
        assert_eq!(trace(vec![step(&[(0, 4), (3, 1)], &[])]).contradiction(), Some((0, 3)));
        assert_eq!(trace(vec![step(&[(0, 4)], &[]), step(&[(2, 1)], &[(3, 1)])]).contradiction(), Some((1, 2)));
    }

    /// The story: with a file that named no program the lab ended in a panic, or looked for pages forever, deaf to signals.
    #[test]
    fn what_has_no_pages_is_not_played() {
        let step = |first, n| Step { came: vec![(first, n)], ..Step::default() };
        let trace = |peak, steps: &[Step]| Trace { program: "x".to_owned(), steps: steps.to_vec(), peak };
        assert!(trace(300, &[step(0, 300), step(300, 1)]).is_playable());
        for (peak, steps) in [
            (300, &[][..]),
            (300, &[step(0, 200), step(200, 1)]),
            (300, &[step(0, 300)]),
            (0, &[step(0, 300), step(300, 1)]),
            (300, &[step(0, 300), step(u32::MAX, 2)]),
            (300, &[step(0, 300), step(1 << 22, 1)]),
        ] {
            assert!(!trace(peak, steps).is_playable(), "{peak} {steps:?}");
        }
    }

    #[test]
    fn runs_are_joined() {
        assert_eq!(runs(vec![7, 3, 4, 5, 9]), [(3, 3), (7, 1), (9, 1)]);
    }
}

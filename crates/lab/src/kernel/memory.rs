//! The workloads on memory, and whether the limit is kept meanwhile.

use super::subject::{Subject, With, counted};
use super::{Lab, fail};
use crate::experiment::Stop;
use crate::json::{Row, Verdict};
use crate::size::{MIB, mib};
use crate::stats::{median, percent};
use crate::workload::Workload;
use crate::{report, worker};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use Subject::{Library, LibraryCharged, Plain, Run, RunCharged, Zram, Zswap};

/// The subjects, in the order in which they run.
const SUBJECTS: [Subject; 7] = [Plain, Zswap, Zram, Run, RunCharged, Library, LibraryCharged];

/// The targets, as multiples of the better of the kernel's two.
const TARGETS: [(Subject, Workload, f64); 7] = [
    (Library, Workload::Fill, 4.0),
    (Library, Workload::SequentialRead, 9.0),
    (Library, Workload::RandomRead, 2.0),
    (Library, Workload::RandomWrite, 1.5),
    (Run, Workload::Fill, 3.0),
    (Run, Workload::SequentialRead, 5.0),
    (Run, Workload::RandomRead, 1.3),
];

/// The results of all subjects so far.
#[derive(Default)]
struct Seen {
    figures: BTreeMap<(Workload, Subject), Vec<f64>>,
    /// The most anonymous memory, and how much of it counted against the limit.
    peaks: BTreeMap<Subject, (u64, u64)>,
    marks: BTreeMap<Subject, &'static str>,
    failed: BTreeSet<Subject>,
}

impl Lab<'_> {
    /// Runs the workloads on memory: a row for each, and the ratios.
    pub(super) fn memory(&mut self) -> Result<(), Stop> {
        let mut seen = Seen::default();
        for run in 0..self.runs {
            for subject in SUBJECTS {
                if !self.out.contains_key(&subject) && !seen.failed.contains(&subject) {
                    self.say(&format!("run {} of {}: memory, {}", run + 1, self.runs, subject.title()));
                    self.memory_once(subject, &mut seen)?;
                }
            }
        }
        for workload in Workload::ALL {
            let mut row = Row::new(workload.name(), workload.unit());
            for subject in SUBJECTS {
                row.put(subject.key(), seen.figures.get(&(workload, subject)).and_then(|f| median(f)));
            }
            seen.marks.iter().for_each(|(subject, mark)| row.mark(subject.key(), mark));
            self.rows.push(row);
        }
        let mut peak = Row::new("anonymous memory, peak", "MiB");
        let mut held = Row::new("of it counted against the limit", "MiB");
        for (subject, (anon, counted)) in &seen.peaks {
            peak.put(subject.key(), Some(*anon as f64 / MIB as f64));
            held.put(subject.key(), Some(*counted as f64 / MIB as f64));
        }
        self.rows.extend([peak, held]);
        let size = self.size;
        let limited = |subject: &Subject| {
            seen.peaks.get(subject).is_some_and(|p| report::unlimited(subject.title(), p.1, size).is_none())
        };
        let comparable: Vec<Subject> = [Run, Library].into_iter().filter(limited).collect();
        for (subject, (_, counted)) in &seen.peaks {
            let said = report::unlimited(subject.title(), *counted, size).filter(|_| *subject != Plain);
            self.notes.extend(said.map(|said| format!("{said}, and its figures are not compared.")));
        }
        self.notes.push(
            "A cgroup v1 charges the program for neither zswap's pool nor zram's. So `uzswap run` and `uzswap region` \
             count the same way (UZSWAP_POOL_UNCHARGED=1) and are what is compared;\nin the columns `pool charged`, \
             uzswap's default, the limit bounds the pool too, which leaves less room for the program."
                .to_owned(),
        );
        self.ratios(&comparable);
        Ok(())
    }

    /// Runs one worker under one subject.
    fn memory_once(&mut self, subject: Subject, seen: &mut Seen) -> Result<(), Stop> {
        let (done, outcome) = match self.work(subject, &[], &With::default()) {
            Ok(done) => done,
            Err(failure) => {
                seen.figures.retain(|(_, s), _| *s != subject);
                seen.peaks.remove(&subject);
                seen.failed.insert(subject);
                seen.marks.extend(failure.mark().map(|mark| (subject, mark)));
                return fail(self, "memory", subject, failure);
            }
        };
        let (anon, held) = seen.peaks.entry(subject).or_default();
        *anon = outcome.peak_anon.max(*anon);
        *held = counted(subject, outcome.peak_anon, done.pool_peak, self.report().as_ref()).max(*held);
        for (workload, figure) in done.done.iter().filter_map(worker::Done::figure) {
            seen.figures.entry((workload, subject)).or_default().push(figure);
        }
        Ok(())
    }

    /// The verdicts on the workloads.
    fn ratios(&mut self, comparable: &[Subject]) {
        for (subject, workload, target) in TARGETS {
            let Some(row) = self.rows.iter().find(|row| row.name == workload.name()) else {
                continue;
            };
            let what = format!("{}: {}, times the better of zswap and zram", subject.judged(), workload.name());
            let ratio = ratio(row, subject, workload.per_access()).filter(|_| comparable.contains(&subject));
            self.verdicts.extend(ratio.map(|ratio| Verdict::at_least(&what, target, ratio)));
        }
    }

    /// Whether the limit is kept, as seen from outside while memory is filled, and what uzswap reports of its metadata.
    pub(super) fn limit_kept(&mut self) -> Result<(), Stop> {
        if self.out.contains_key(&RunCharged) {
            return Ok(());
        }
        self.say("the limit, from outside");
        let with = With { sample: Duration::from_millis(3), ..With::default() };
        let outcome = match self.work(RunCharged, &["--fill-only"], &with) {
            Ok((_, outcome)) => outcome,
            Err(failure) => return fail(self, "the limit from outside", RunCharged, failure),
        };
        let over = outcome.peak_anon.saturating_sub(self.limit);
        self.notes.push(format!(
            "Limit of {}: the most anonymous memory seen from outside was {} in {} looks, {:.1} % over.",
            mib(self.limit),
            mib(outcome.peak_anon),
            outcome.samples,
            percent(over as f64, self.limit as f64)
        ));
        let allowed = (self.limit as f64 * 0.05).max(16.0 * MIB as f64) / MIB as f64;
        let what = "run: anonymous memory over the limit, MiB (5 % or 16 MiB)";
        self.verdicts.push(Verdict::at_most(what, allowed, over as f64 / MIB as f64));
        if let Some(bytes) = self.report().and_then(|report| report::metadata(&report)) {
            let what = "run: metadata, percent of managed memory";
            self.verdicts.push(Verdict::at_most(what, 0.5, percent(bytes as f64, self.size as f64)));
        }
        Ok(())
    }
}

/// How many times better a subject is than the better of the kernel's two. `None` unless all three were measured; if one of the
/// two was OOM-killed, it is not the better one.
fn ratio(row: &Row, subject: Subject, less_is_better: bool) -> Option<f64> {
    let own = row.get(subject.key())?;
    let peer = |subject: Subject| match row.get(subject.key()) {
        Some(figure) => Some(Some(figure)),
        None if row.is_marked(subject.key()) => Some(None),
        None => None,
    };
    let peers = [peer(Zswap)?, peer(Zram)?].into_iter().flatten();
    if less_is_better {
        peers.reduce(f64::min).map(|best| best / own)
    } else {
        peers.reduce(f64::max).map(|best| own / best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_to_the_better_peer_and_absent_without_both() {
        let mut row = Row::new("fill", "MB/s");
        row.put("zswap", Some(106.0));
        row.put("run", Some(429.0));
        assert_eq!(ratio(&row, Run, false), None);
        row.put("zram", Some(143.0));
        assert_eq!(ratio(&row, Run, false), Some(3.0));
        let mut row = Row::new("random read", "ns");
        row.put("zswap", Some(14_000.0));
        row.put("zram", Some(15_000.0));
        row.put("run", Some(7_000.0));
        assert_eq!(ratio(&row, Run, true), Some(2.0));
        assert_eq!(ratio(&row, Library, true), None);
    }

    #[test]
    fn an_oom_killed_peer_is_not_the_better_one() {
        let mut row = Row::new("fill", "MB/s");
        row.mark("zswap", "OOM-killed");
        row.put("zram", Some(143.0));
        row.put("run", Some(429.0));
        assert_eq!(ratio(&row, Run, false), Some(3.0));
        let mut row = Row::new("fill", "MB/s");
        row.mark("zswap", "OOM-killed");
        row.mark("zram", "OOM-killed");
        row.put("run", Some(429.0));
        assert_eq!(ratio(&row, Run, false), None, "nothing to compare with");
    }
}

//! The workloads on memory again, after an hour's worth of churn in the same zone and pool: the figures should not change.

use super::subject::{Subject, With};
use super::{Lab, fail};
use crate::churn::HOUR;
use crate::experiment::Stop;
use crate::json::{Row, Verdict};
use crate::stats::median;
use crate::worker;
use crate::workload::Workload;
use std::collections::BTreeMap;
use std::time::Duration;

const SUBJECTS: [Subject; 2] = [Subject::Run, Subject::Library];

/// The target for a figure after churn, as a multiple of that on a fresh zone; where less is better, its reciprocal.
const TARGET: f64 = 0.9;

/// Figures by workload, subject, and whether memory was churned before; one for each run that has one.
type Figures = BTreeMap<(Workload, Subject, bool), BTreeMap<u32, f64>>;

impl Lab<'_> {
    /// A row for each workload and subject, fresh and churned, and the verdicts.
    pub(super) fn churned(&mut self) -> Result<(), Stop> {
        let mut seen = Figures::new();
        for run in 0..self.runs {
            for subject in SUBJECTS {
                // Side by side, so that both meet the same load on the machine; each comes second in every other run.
                for churned in [run % 2 == 1, run % 2 == 0] {
                    self.say(&format!("run {} of {}: {}, {}", run + 1, self.runs, how(churned), subject.title()));
                    self.churned_once(subject, churned, run, &mut seen)?;
                }
            }
        }
        for churned in [false, true] {
            for workload in Workload::ALL {
                let mut row = Row::new(format!("{}: {}", how(churned), workload.name()), workload.unit());
                for subject in SUBJECTS {
                    let figures = seen.get(&(workload, subject, churned));
                    row.put(subject.key(), figures.and_then(|f| median(&f.values().copied().collect::<Vec<_>>())));
                }
                self.rows.push(row);
            }
        }
        for subject in SUBJECTS {
            let measured = Workload::ALL.into_iter().filter(|w| *w != Workload::Verify && w.is_of_one_thread());
            let worst = measured.filter_map(|w| kept(&seen, w, subject)).reduce(|a, b| if b.0 < a.0 { b } else { a });
            if let Some((least, workload)) = worst {
                let what = format!(
                    "{}: after an hour's churn, times a fresh zone; the worst of all workloads ({})",
                    subject.judged(),
                    workload.name()
                );
                self.verdicts.push(Verdict::at_least(&what, TARGET, least));
            }
        }
        Ok(())
    }

    /// Runs one worker, unless its subject cannot be set up here.
    fn churned_once(&mut self, subject: Subject, churned: bool, run: u32, seen: &mut Figures) -> Result<(), Stop> {
        if self.out.contains_key(&subject) {
            return Ok(());
        }
        let touches = HOUR.to_string();
        let more: &[&str] = if churned { &["--churn", &touches] } else { &[] };
        let with = With { timeout: Duration::from_secs(600), ..With::default() };
        let report = match self.work(subject, more, &with) {
            Ok((report, _)) => report,
            Err(failure) => return fail(self, how(churned), subject, failure),
        };
        for (workload, figure) in report.done.iter().filter_map(worker::Done::figure) {
            seen.entry((workload, subject, churned)).or_default().insert(run, figure);
        }
        Ok(())
    }
}

fn how(churned: bool) -> &'static str {
    if churned { "after churn" } else { "fresh" }
}

/// What is left of a figure after churn: the median over the runs, each of which measured both side by side. (The ratio of two
/// medians would compare one run with another, and the machine differs between runs.)
fn kept(seen: &Figures, workload: Workload, subject: Subject) -> Option<(f64, Workload)> {
    let figures = |churned| seen.get(&(workload, subject, churned));
    let after = figures(true)?;
    let pairs = figures(false)?.iter().filter_map(|(run, fresh)| Some((fresh, after.get(run)?)));
    let ratios: Vec<f64> = pairs.map(|(f, c)| if workload.per_access() { f / c } else { c / f }).collect();
    Some((median(&ratios)?, workload))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn less_is_better_where_it_is_time() {
        let one = |figure| BTreeMap::from([(0, figure)]);
        let seen = Figures::from([
            ((Workload::Fill, Subject::Run, false), one(100.0)),
            ((Workload::Fill, Subject::Run, true), one(80.0)),
            ((Workload::RandomRead, Subject::Run, false), one(8.0)),
            ((Workload::RandomRead, Subject::Run, true), one(16.0)),
        ]);
        assert_eq!(kept(&seen, Workload::Fill, Subject::Run), Some((0.8, Workload::Fill)));
        assert_eq!(kept(&seen, Workload::RandomRead, Subject::Run), Some((0.5, Workload::RandomRead)));
        assert_eq!(kept(&seen, Workload::ZipfRead, Subject::Run), None, "not measured, no verdict");
    }

    /// A machine that is twice as slow in one run, and then half as slow in the churned part of another.
    #[test]
    fn what_is_compared_was_measured_in_the_same_run() {
        let key = |churned| (Workload::ZipfRead, Subject::Run, churned);
        let runs = |figures: &[(u32, f64)]| BTreeMap::from_iter(figures.iter().copied());
        let fresh = runs(&[(0, 10.0), (1, 20.0), (2, 10.0)]);
        let seen = Figures::from([(key(false), fresh.clone()), (key(true), runs(&[(0, 10.0), (1, 20.0), (2, 20.0)]))]);
        assert_eq!(kept(&seen, Workload::ZipfRead, Subject::Run), Some((1.0, Workload::ZipfRead)));
        // The story: if a run had failed, the next run's figure was taken for it.
        let seen = Figures::from([(key(false), fresh), (key(true), runs(&[(1, 20.0)]))]);
        assert_eq!(kept(&seen, Workload::ZipfRead, Subject::Run), Some((1.0, Workload::ZipfRead)));
    }
}

//! The workloads on memory once more, after an hour's worth of churn in the same zone and pool: the figures should stay.

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

/// What a figure after churn may be, times (or, where less is better, as a part of) that on a fresh zone.
const TARGET: f64 = 0.9;

/// Figures by workload, subject, and whether memory was churned before.
type Figures = BTreeMap<(Workload, Subject, bool), Vec<f64>>;

impl Lab<'_> {
    /// A row for each workload and subject, fresh and churned, and the verdicts.
    pub(super) fn churned(&mut self) -> Result<(), Stop> {
        let mut seen = Figures::new();
        let touches = HOUR.to_string();
        for run in 0..self.runs {
            for subject in SUBJECTS.into_iter().filter(|s| !self.out.contains_key(s)).collect::<Vec<_>>() {
                // (Side by side, so that both meet the same neighbours on the machine.)
                for churned in [false, true] {
                    let how = if churned { "after an hour's churn" } else { "fresh" };
                    self.say(&format!("run {} of {}: {how}, {}", run + 1, self.runs, subject.title()));
                    let more: &[&str] = if churned { &["--churn", &touches] } else { &[] };
                    let with = With { timeout: Duration::from_secs(600), ..With::default() };
                    match self.work(subject, more, &with) {
                        Ok((report, _)) => {
                            for (workload, figure) in report.done.iter().filter_map(worker::Done::figure) {
                                seen.entry((workload, subject, churned)).or_default().push(figure);
                            }
                        }
                        Err(failure) => fail(self, how, subject, failure)?,
                    }
                }
            }
        }
        for churned in [false, true] {
            let how = if churned { "after churn" } else { "fresh" };
            for workload in Workload::ALL {
                let unit = if workload.per_access() { "ns" } else { "MB/s" };
                let mut row = Row::new(format!("{how}: {}", workload.name()), unit);
                for subject in SUBJECTS {
                    row.put(subject.key(), seen.get(&(workload, subject, churned)).and_then(|f| median(f)));
                }
                self.rows.push(row);
            }
        }
        for subject in SUBJECTS {
            let ratios =
                Workload::ALL.into_iter().filter(|w| *w != Workload::Verify).filter_map(|w| kept(&seen, w, subject));
            if let Some((least, workload)) = ratios.reduce(|a, b| if b.0 < a.0 { b } else { a }) {
                let name = if subject == Subject::Library { "library region" } else { "run" };
                let what = format!(
                    "{name}: after an hour's churn, times a fresh zone; the worst of all workloads ({})",
                    workload.name()
                );
                self.verdicts.push(Verdict::at_least(&what, TARGET, least));
            }
        }
        Ok(())
    }
}

/// What is left of a figure after churn.
fn kept(seen: &Figures, workload: Workload, subject: Subject) -> Option<(f64, Workload)> {
    let figure = |churned| median(seen.get(&(workload, subject, churned))?);
    let (fresh, churned) = (figure(false)?, figure(true)?);
    Some((if workload.per_access() { fresh / churned } else { churned / fresh }, workload))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn less_is_better_where_it_is_time() {
        let seen = Figures::from([
            ((Workload::Fill, Subject::Run, false), vec![100.0]),
            ((Workload::Fill, Subject::Run, true), vec![80.0]),
            ((Workload::RandomRead, Subject::Run, false), vec![8.0]),
            ((Workload::RandomRead, Subject::Run, true), vec![16.0]),
        ]);
        assert_eq!(kept(&seen, Workload::Fill, Subject::Run), Some((0.8, Workload::Fill)));
        assert_eq!(kept(&seen, Workload::RandomRead, Subject::Run), Some((0.5, Workload::RandomRead)));
        assert_eq!(kept(&seen, Workload::ZipfRead, Subject::Run), None, "not measured, no verdict");
    }
}

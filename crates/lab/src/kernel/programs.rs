//! Real programs at half of what they use, and one that stays under its limit.

use super::subject::{Failure, Subject, With, counted};
use super::{Lab, fail};
use crate::experiment::{Stop, go_on};
use crate::json::{Row, Verdict};
use crate::process::Outcome;
use crate::programs::Program;
use crate::report;
use crate::size::{MIB, mib};
use crate::stats::{geometric_mean, median};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hasher};
use std::time::Duration;

use Subject::{Plain, Run, RunCharged, Zram, Zswap};

/// Processes that a shell starts one after the other, to measure the cost of one.
const STARTS: u32 = 300;
/// The lowest limit that `uzswap run` takes.
const LEAST: u64 = 16 * MIB;

impl Lab<'_> {
    /// Measures real programs at half of what they use.
    pub(super) fn programs(&mut self, programs: &[Program]) -> Result<(), Stop> {
        let (mut ratios, mut left_out) = (Vec::new(), Vec::new());
        for program in programs {
            let Some(row) = self.program(program)? else {
                continue;
            };
            match extra_ratio(&row) {
                Some(ratio) => ratios.push(ratio),
                None => left_out.push(program.name),
            }
            self.rows.push(row);
        }
        if let Some(mean) = geometric_mean(&ratios) {
            let what = "run: extra time of real programs at 50 %, times the better of zswap and zram (geometric mean)";
            self.verdicts.push(Verdict::at_most(what, 0.5, mean));
        }
        if !left_out.is_empty() {
            self.notes.push(format!("Not in the mean of extra time: {}.", left_out.join(", ")));
        }
        Ok(())
    }

    /// Measures one program under all subjects.
    fn program(&mut self, program: &Program) -> Result<Option<Row>, Stop> {
        let mut with = With { stdin: program.stdin.clone(), ..With::default() };
        let mut seconds: BTreeMap<Subject, Vec<f64>> = BTreeMap::new();
        self.say(&format!("{}, without a limit", program.name));
        let first = match self.run_well(Plain, &program.argv, 0, &with) {
            Ok(outcome) => outcome,
            Err(failure) => return fail(self, program.name, Plain, failure).map(|()| None),
        };
        let right = checksum(&first.stdout);
        let limit = (first.peak_anon / 2).next_multiple_of(MIB).max(LEAST);
        with.timeout = Duration::from_secs(if self.quick { 5 } else { 25 });
        seconds.entry(Plain).or_default().push(first.seconds);
        let mut row = Row::new(format!("{}, in {} of {}", program.name, mib(limit), mib(first.peak_anon)), "s");
        let mut failed: Vec<Subject> = Vec::new();
        for run in 0..self.runs {
            for subject in [Plain, Zswap, Zram, Run, RunCharged] {
                if self.out.contains_key(&subject)
                    || failed.contains(&subject)
                    || (run == 0 && subject == Plain)
                    || (self.quick && subject == RunCharged)
                {
                    continue;
                }
                let (turn, title) = (format!("run {} of {}", run + 1, self.runs), subject.title());
                self.say(&format!("{turn}: {} in {}, {title}", program.name, mib(limit)));
                match self.program_once(subject, program, limit, first.peak_anon, right, &with) {
                    Ok(took) => seconds.entry(subject).or_default().push(took),
                    Err(failure) => {
                        failed.push(subject);
                        seconds.remove(&subject);
                        failure.mark().into_iter().for_each(|mark| row.mark(subject.key(), mark));
                        fail(self, program.name, subject, failure)?;
                    }
                }
            }
        }
        for (subject, seconds) in &seconds {
            row.put(subject.key(), median(seconds));
        }
        let figures: Vec<String> =
            row.values.iter().map(|(subject, seconds)| format!("{subject} {seconds} s")).collect();
        self.say(&format!("{}: {}", program.name, figures.join(", ")));
        Ok(Some(row))
    }

    /// Runs a program under a subject; returns its seconds, if its output was `right` and it was limited.
    fn program_once(
        &mut self,
        subject: Subject,
        program: &Program,
        limit: u64,
        whole: u64,
        right: (usize, u64),
        with: &With,
    ) -> Result<f64, Failure> {
        let outcome = self.run_well(subject, &program.argv, limit, with)?;
        if checksum(&outcome.stdout) != right {
            self.right = false;
            return Err("WRONG OUTPUT".to_owned().into());
        }
        let held = counted(subject, outcome.peak_anon, 0, self.report().as_ref());
        match report::unlimited(subject.title(), held, whole).filter(|_| subject == Run) {
            Some(said) => Err(said.into()),
            None => Ok(outcome.seconds),
        }
    }

    /// Measures what `uzswap run` costs a program that stays under its limit: pairs of runs, one with and one without.
    pub(super) fn overhead(&mut self, program: &Program) -> Result<(), Stop> {
        if self.out.contains_key(&RunCharged) {
            return Ok(());
        }
        let with = With { stdin: program.stdin.clone(), ..With::default() };
        let mut ratios = Vec::new();
        let mut times: BTreeMap<Subject, Vec<f64>> = BTreeMap::new();
        let mut limit = self.limit * 64;
        for pair in 0..if self.quick { 3 } else { 4 * self.runs + 3 } {
            let mut took = BTreeMap::new();
            // In the first pair the plain run must be first: its peak gives the limit.
            for subject in if pair % 2 == 0 { [Plain, RunCharged] } else { [RunCharged, Plain] } {
                self.say(&format!("pair {}: {} under its limit, {}", pair + 1, program.name, subject.title()));
                match self.run_well(subject, &program.argv, limit, &with) {
                    Ok(outcome) => {
                        if pair == 0 && subject == Plain {
                            limit = (4 * outcome.peak_anon).next_multiple_of(MIB);
                        }
                        took.insert(subject, outcome.seconds);
                        times.entry(subject).or_default().push(outcome.seconds);
                    }
                    Err(failure) => return fail(self, &format!("{} under its limit", program.name), subject, failure),
                }
                go_on()?;
            }
            ratios.push(took[&RunCharged] / took[&Plain]);
        }
        let mut row = Row::new(format!("{}, under its limit", program.name), "s");
        for (subject, times) in &times {
            row.put(subject.key(), median(times));
        }
        self.rows.push(row);
        if let Some(ratio) = median(&ratios) {
            let what = "run: time of a program under its limit, times without uzswap";
            self.verdicts.push(Verdict::at_most(what, 1.01, ratio));
        }
        Ok(())
    }

    /// Measures what `uzswap run` costs a process from its start to its end: a shell runs processes that do nothing, one after
    /// the other, far below the limit. (There is no target for this; builds and scripts consist of such processes.)
    pub(super) fn starts(&mut self) -> Result<(), Stop> {
        let script = format!("i=0; while [ $i -lt {STARTS} ]; do /bin/true; i=$((i+1)); done");
        let argv = ["/bin/sh".into(), "-c".into(), script.into()];
        let mut times: BTreeMap<Subject, Vec<f64>> = BTreeMap::new();
        for run in 0..=2 * self.runs {
            for subject in if run % 2 == 0 { [Plain, RunCharged] } else { [RunCharged, Plain] } {
                if self.out.contains_key(&subject) {
                    continue;
                }
                self.say(&format!("{STARTS} processes one after the other, {}", subject.title()));
                let limit = self.limit * 8;
                match self.run_well(subject, &argv, limit, &With::default()) {
                    Ok(outcome) => times.entry(subject).or_default().push(outcome.seconds),
                    Err(failure) => return fail(self, "starting processes", subject, failure),
                }
                go_on()?;
            }
        }
        let mut row = Row::new("a process that does nothing".to_owned(), "us");
        for (subject, times) in &times {
            row.put(subject.key(), median(times).map(|seconds| seconds * 1e6 / f64::from(STARTS)));
        }
        self.rows.push(row);
        Ok(())
    }

    /// Makes a run that must end well.
    fn run_well(&self, subject: Subject, argv: &[OsString], limit: u64, with: &With) -> Result<Outcome, Failure> {
        let outcome = self.run(subject, argv, limit, with)?;
        outcome.ok()?;
        Ok(outcome)
    }
}

/// The time that `uzswap run` adds to a program, as a multiple of what the better of the kernel's two adds. `None` if there is
/// nothing to compare: `run` has no figure, or neither of the two has, or one has none without having been OOM-killed. A
/// difference below the noise counts as a hundredth of the program's time.
fn extra_ratio(row: &Row) -> Option<f64> {
    let plain = row.get(Plain.key())?;
    let extra = |subject: Subject| row.get(subject.key()).map(|seconds| (seconds - plain).max(0.01 * plain));
    if [Zswap, Zram].iter().any(|s| extra(*s).is_none() && !row.is_marked(s.key())) {
        return None;
    }
    Some(extra(Run)? / [Zswap, Zram].into_iter().filter_map(extra).reduce(f64::min)?)
}

fn checksum(bytes: &[u8]) -> (usize, u64) {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    (bytes.len(), hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extra_time_is_compared_with_the_better_peer_that_got_through() {
        let row = |zswap: Option<f64>, zram: Option<f64>, run: Option<f64>| {
            let mut row = Row::new("x", "s");
            row.put("plain", Some(1.0));
            for (key, seconds) in [("zswap", zswap), ("zram", zram), ("run", run)] {
                row.put(key, seconds);
            }
            row
        };
        assert_eq!(extra_ratio(&row(Some(5.0), Some(3.0), Some(2.0))), Some(0.5));
        assert_eq!(extra_ratio(&row(None, Some(3.0), Some(2.0))), None, "not measured is not slower");
        let mut killed = row(None, Some(3.0), Some(2.0));
        killed.mark("zswap", "OOM-killed");
        assert_eq!(extra_ratio(&killed), Some(0.5));
        let mut both = row(None, None, Some(2.0));
        both.mark("zswap", "OOM-killed");
        both.mark("zram", "OOM-killed");
        assert_eq!(extra_ratio(&both), None);
        assert_eq!(extra_ratio(&row(Some(5.0), Some(3.0), None)), None);
        assert_eq!(extra_ratio(&row(Some(0.9), Some(1.001), Some(0.8))), Some(1.0), "noise is no gain");
    }
}

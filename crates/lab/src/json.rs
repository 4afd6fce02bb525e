//! The findings of an experiment, in the form in which every lab writes them with `--json`.

use crate::experiment::seen;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::path::Path;

/// An experiment's findings.
#[derive(Debug, Serialize)]
pub struct Findings {
    /// Its name.
    pub experiment: String,
    /// The machine that it was measured on.
    pub machine: Map<String, Value>,
    /// The settings that it was measured with.
    pub settings: Map<String, Value>,
    /// The figures.
    pub rows: Vec<Row>,
    /// How the figures compare with the targets. Targets that were not measured are absent.
    pub verdicts: Vec<Verdict>,
}

/// One line of figures.
#[derive(Debug, Serialize)]
pub struct Row {
    /// What was measured.
    pub name: String,
    /// The unit of all values.
    pub unit: &'static str,
    /// A number for each subject; a subject that was not measured is absent.
    pub values: Map<String, Value>,
    /// The table's entries for subjects without a number, where that is a finding too. They are not in the file, whose values are
    /// numbers; there the notes among the settings say it.
    #[serde(skip)]
    marks: BTreeMap<String, &'static str>,
}

/// The comparison with one target.
#[derive(Debug, Serialize)]
pub struct Verdict {
    /// What should hold, with the direction ("at least", "at most").
    pub what: String,
    /// The target.
    pub target: f64,
    /// What was measured.
    pub measured: f64,
    /// Whether it was met.
    pub met: bool,
}

impl Row {
    /// A row without values.
    #[must_use]
    pub fn new(name: impl Into<String>, unit: &'static str) -> Self {
        Self { name: name.into(), unit, values: Map::new(), marks: BTreeMap::new() }
    }

    /// Adds a value, if there is one.
    pub fn put(&mut self, subject: &str, value: Option<f64>) {
        if let Some(number) = value.map(crate::stats::round).and_then(serde_json::Number::from_f64) {
            self.values.insert(subject.to_owned(), Value::Number(number));
        }
    }

    /// Notes why a subject can have no number ("OOM-killed").
    pub fn mark(&mut self, subject: &str, mark: &'static str) {
        self.marks.insert(subject.to_owned(), mark);
    }

    /// Whether a subject has a mark.
    #[must_use]
    pub fn is_marked(&self, subject: &str) -> bool {
        self.marks.contains_key(subject)
    }

    /// A subject's cell in the table: its number, its mark, or a dash.
    #[must_use]
    pub fn cell(&self, subject: &str) -> String {
        match (self.get(subject), self.marks.get(subject)) {
            (Some(value), _) => crate::table::number(value),
            (None, Some(mark)) => (*mark).to_owned(),
            (None, None) => "–".to_owned(),
        }
    }

    /// A subject's value.
    #[must_use]
    pub fn get(&self, subject: &str) -> Option<f64> {
        self.values.get(subject)?.as_f64()
    }
}

impl Verdict {
    /// Met when `measured` is at least `target`.
    #[must_use]
    pub fn at_least(what: &str, target: f64, measured: f64) -> Self {
        let what = format!("{what}, at least");
        Self { what, target, measured: crate::stats::round(measured), met: measured >= target }
    }

    /// Met when `measured` is at most `target`.
    #[must_use]
    pub fn at_most(what: &str, target: f64, measured: f64) -> Self {
        let what = format!("{what}, at most");
        Self { what, target, measured: crate::stats::round(measured), met: measured <= target }
    }
}

impl Findings {
    /// The findings of an experiment on this machine, without figures yet. `settings` is an object.
    #[must_use]
    pub fn new(experiment: &str, settings: Value) -> Self {
        let settings = match settings {
            Value::Object(map) => map,
            _ => Map::new(),
        };
        let (experiment, machine) = (experiment.to_owned(), crate::machine::describe());
        Self { experiment, machine, settings, rows: Vec::new(), verdicts: Vec::new() }
    }

    /// Prints the findings as a table with `notes` below it, and writes them to `file` if there is one; every experiment ends
    /// with this. The columns are `subjects` (name in the file, title).
    ///
    /// # Errors
    /// When the file or the table cannot be written: what, and why.
    pub fn publish(&self, subjects: &[(&str, &str)], notes: &[String], file: Option<&Path>) -> Result<(), String> {
        let table = crate::table::render(self, subjects, notes);
        let shown = io::stdout().write_all(table.as_bytes()).and_then(|()| io::stdout().flush());
        // Write the file even if the table cannot be printed.
        if let Some(path) = file {
            self.write(path).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
        }
        seen(shown)
    }

    /// Writes the findings to a file.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        std::fs::write(path, text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shape_is_the_one_promised() {
        let mut row = Row::new("fill", "MB/s");
        row.put("zswap", Some(106.2));
        row.put("zram", None);
        row.put("library", Some(f64::NAN));
        let findings = Findings {
            experiment: "kernel".into(),
            machine: crate::machine::describe(),
            settings: Map::new(),
            rows: vec![row],
            verdicts: vec![Verdict::at_least("fill", 4.0, 3.9), Verdict::at_most("overshoot", 16.0, 3.0)],
        };
        let value: Value = serde_json::from_str(&serde_json::to_string(&findings).unwrap()).unwrap();
        let keys: Vec<_> = value.as_object().unwrap().keys().cloned().collect();
        assert_eq!(keys, ["experiment", "machine", "settings", "rows", "verdicts"]);
        assert!(value["machine"]["cpus"].as_u64().unwrap() > 0);
        assert_eq!(value["rows"][0].as_object().unwrap().keys().collect::<Vec<_>>(), ["name", "unit", "values"]);
        assert_eq!(value["rows"][0]["values"].as_object().unwrap().len(), 1);
        assert_eq!(value["rows"][0]["values"]["zswap"], 106.2);
        let verdict = value["verdicts"][0].as_object().unwrap();
        assert_eq!(verdict.keys().collect::<Vec<_>>(), ["what", "target", "measured", "met"]);
        assert_eq!(verdict["met"], false);
        assert_eq!(value["verdicts"][1]["met"], true);
    }
}

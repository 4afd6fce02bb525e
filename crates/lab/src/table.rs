//! Prints findings to the terminal.

use crate::json::Findings;
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use std::fmt::Write;

/// The findings as text: the figures of `subjects` (key and title, in the order of the columns; without those that have no
/// figures), then `notes`, then the verdicts.
#[must_use]
pub fn render(findings: &Findings, subjects: &[(&str, &str)], notes: &[String]) -> String {
    let shown: Vec<_> = subjects
        .iter()
        .filter(|(key, _)| findings.rows.iter().any(|row| row.get(key).is_some() || row.is_marked(key)))
        .collect();
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(["", "unit"].into_iter().chain(shown.iter().map(|(_, title)| *title)));
    for row in &findings.rows {
        let figures = shown.iter().map(|(key, _)| row.cell(key));
        table.add_row([row.name.clone(), row.unit.to_owned()].into_iter().chain(figures));
    }
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut text = format!("{table}\n");
    for note in notes {
        let _ = writeln!(text, "{note}");
    }
    if !findings.verdicts.is_empty() {
        text.push('\n');
    }
    for verdict in &findings.verdicts {
        let word = if verdict.met { "met    " } else { "not met" };
        let _ = writeln!(text, "{word}  {} {}: measured {}", verdict.what, verdict.target, number(verdict.measured));
    }
    text
}

/// A number for people: three significant digits, with thousands separators.
#[must_use]
pub fn number(value: f64) -> String {
    let size = value.abs();
    if size >= 1000.0 {
        let digits = format!("{:.0}", size);
        let mut text = String::new();
        for (i, digit) in digits.chars().enumerate() {
            if i > 0 && (digits.len() - i).is_multiple_of(3) {
                text.push(',');
            }
            text.push(digit);
        }
        return if value < 0.0 { format!("-{text}") } else { text };
    }
    match size {
        s if s >= 100.0 => format!("{value:.0}"),
        s if s >= 10.0 => format!("{value:.1}"),
        0.0 => "0".to_owned(),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::{Row, Verdict};
    use serde_json::Map;

    #[test]
    fn numbers_are_readable() {
        let all: Vec<_> = [0.0, 0.514, 1.00512, 15.27, 281.4, 1583.4, 74_500.0, 1_234_567.0].map(number).into();
        assert_eq!(all, ["0", "0.514", "1.005", "15.3", "281", "1,583", "74,500", "1,234,567"]);
    }

    #[test]
    fn only_what_was_measured_is_shown() {
        let mut row = Row::new("fill", "MB/s");
        row.put("zram", Some(143.0));
        row.mark("other", "OOM-killed");
        let findings = Findings {
            experiment: "kernel".into(),
            machine: Map::new(),
            settings: Map::new(),
            rows: vec![row],
            verdicts: vec![Verdict::at_least("run: fill", 3.0, 3.5)],
        };
        let subjects = [("zswap", "zswap lzo"), ("zram", "zram lz4"), ("other", "other")];
        let text = render(&findings, &subjects, &["a note".to_owned()]);
        assert!(text.contains("zram lz4") && text.contains("143") && !text.contains("zswap"), "{text}");
        assert!(
            text.contains("other") && text.contains("OOM-killed"),
            "a peer that was killed is not left out: {text}"
        );
        assert!(text.ends_with("a note\n\nmet      run: fill, at least 3: measured 3.500\n"), "{text}");
    }
}

//! A picture of the address space: each cell stands for a stretch of pages, and shows the state of most of them.

use super::find::Found;
use std::fmt::Write;
use uzswap_mm::pagemap::{PageState, Tier};

/// The kinds of cell: sign, colour (of a terminal with 256, and in HTML), name.
const SORTS: [(char, u8, &str, &str); 10] = [
    ('·', 240, "#e8e8e8", "untouched"),
    ('█', 34, "#2e9e4f", "present"),
    ('z', 250, "#b8c4cc", "zero"),
    ('▓', 142, "#c9b037", "staged"),
    ('▒', 208, "#e8822e", "warm"),
    ('░', 160, "#c8402f", "dense"),
    ('r', 127, "#9b3b9b", "raw"),
    ('d', 27, "#2f5fd0", "disk"),
    ('n', 19, "#1b2f80", "remote"),
    ('!', 196, "#000000", "lost"),
];
/// Cells in a line.
const COLUMNS: usize = 64;
/// Cells in the whole picture.
const CELLS: u64 = 64 * 16;
const SIDE: usize = 12;

fn sort(state: PageState) -> usize {
    match state.tier() {
        _ if state.present() => 1,
        Tier::None if state.zero() => 2,
        Tier::None => 0,
        tier => 2 + tier as usize,
    }
}

/// A line of the picture: the page where it begins, and its cells.
struct Line {
    page: u64,
    cells: Vec<usize>,
}

/// The pages per cell, and the lines; with `soft_dirty`, of soft-dirty pages only.
fn lines(found: &Found, soft_dirty: bool) -> (u64, Vec<Line>) {
    let pages: u64 = found.parts.iter().map(|p| p.to - p.from).sum();
    let each = pages.div_ceil(CELLS).max(1);
    let map = found.map.map();
    let mut lines = Vec::new();
    for part in &found.parts {
        let mut at = part.from;
        while at < part.to {
            let mut line = Line { page: at, cells: Vec::with_capacity(COLUMNS) };
            while at < part.to && line.cells.len() < COLUMNS {
                let end = (at + each).min(part.to);
                let mut count = [0u64; SORTS.len()];
                for state in (at..end).map(|p| map.get(p)).filter(|state| !soft_dirty || state.soft_dirty()) {
                    count[sort(state)] += 1;
                }
                // A known state shows before an unknown one, however few its pages.
                let most = (1..SORTS.len()).max_by_key(|i| count[*i]).filter(|i| count[*i] > 0).unwrap_or(0);
                line.cells.push(most);
                at = end;
            }
            if line.cells.iter().any(|c| *c != 0) || found.parts.len() == 1 {
                lines.push(line);
            }
        }
    }
    (each, lines)
}

/// The picture for a terminal.
pub fn text(found: &Found, soft_dirty: bool, colour: bool) -> String {
    let (each, lines) = lines(found, soft_dirty);
    let mut out = format!("  each sign is {} KiB:", each * 4);
    for (sign, _, _, name) in SORTS {
        let _ = write!(out, " {sign} {name}");
    }
    out.push('\n');
    for line in lines {
        let _ = write!(out, "  {:#014x} ", found.base as u64 + line.page * 4096);
        let mut last = usize::MAX;
        for cell in line.cells {
            if colour && cell != last {
                let _ = write!(out, "\x1b[38;5;{}m", SORTS[cell].1);
            }
            out.push(SORTS[cell].0);
            last = cell;
        }
        out.push_str(if colour { "\x1b[0m\n" } else { "\n" });
    }
    out
}

/// As an SVG drawing.
pub fn svg(found: &[Found], soft_dirty: bool) -> String {
    let mut body = String::new();
    let mut y = 20;
    for f in found {
        let (each, lines) = lines(f, soft_dirty);
        let what = f.what.replace('&', "&amp;").replace('<', "&lt;");
        let _ = writeln!(body, "<text x=\"8\" y=\"{y}\">{what}: each square is {} KiB</text>", each * 4);
        y += 8;
        for line in lines {
            let address = f.base as u64 + line.page * 4096;
            let _ = writeln!(body, "<text x=\"8\" y=\"{}\">{address:#014x}</text>", y + SIDE - 2);
            for (i, cell) in line.cells.iter().enumerate() {
                let (x, colour) = (120 + i * SIDE, SORTS[*cell].2);
                let (w, h) = (SIDE - 1, SIDE - 1);
                let _ = writeln!(body, "<rect x=\"{x}\" y=\"{y}\" width=\"{w}\" height=\"{h}\" fill=\"{colour}\"/>");
            }
            y += SIDE;
        }
        y += 24;
    }
    for (i, (_, _, colour, name)) in SORTS.iter().enumerate() {
        let x = 8 + i * 88;
        let _ = writeln!(body, "<rect x=\"{x}\" y=\"{}\" width=\"11\" height=\"11\" fill=\"{colour}\"/>", y - 10);
        let _ = writeln!(body, "<text x=\"{}\" y=\"{y}\">{name}</text>", x + 15);
    }
    let (width, height) = (130 + COLUMNS * SIDE, y + 12);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"monospace\" \
         font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{body}</svg>\n"
    )
}

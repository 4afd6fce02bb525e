//! Real programs, made to hold memory and use it, with an output that says whether it was kept.

use crate::workload::Random;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A program to run.
pub struct Program {
    /// Its name in the table.
    pub name: &'static str,
    /// Program and arguments.
    pub argv: Vec<OsString>,
    /// Its standard input, if any.
    pub stdin: Option<PathBuf>,
}

const DICT: &str = r"
import sys, zlib
n = int(sys.argv[1]); d = {}; h = 0
for i in range(n): d['key-%d' % (i * 2654435761 % (1 << 32))] = ('value %d' % i, i)
x = 12345
for i in range(n // 8):
    x = (x * 1103515245 + 12345) % (1 << 31); k = 'key-%d' % ((x % n) * 2654435761 % (1 << 32))
    h = zlib.crc32(d[k][0].encode(), h)
for k, v in d.items(): h = (h * 31 + v[1]) & 0xffffffff
print(len(d), h)
";

/// The Python interpreter itself, past any wrapper on the path.
#[must_use]
pub fn python() -> Option<PathBuf> {
    let output = Command::new("python3").args(["-I", "-c", "import sys; print(sys.executable)"]).output().ok()?;
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    path.is_file().then_some(path)
}

pub(crate) fn find(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?).map(|dir| dir.join(name)).find(|path| path.is_file())
}

/// The programs this machine has, with their inputs written to `dir`; and the names of those it has not.
///
/// # Errors
/// When an input cannot be written.
pub fn all(dir: &Path, python: Option<&Path>, quick: bool) -> Result<(Vec<Program>, Vec<&'static str>), String> {
    let mut programs = Vec::new();
    let mut missing = Vec::new();
    let write = |name: &str, contents: &[u8]| {
        let path = dir.join(name);
        fs::write(&path, contents).map(|()| path).map_err(|e| format!("cannot write {name}: {e}"))
    };
    let args = |program: &Path, args: &[&str]| -> Vec<OsString> {
        std::iter::once(program.as_os_str().to_owned()).chain(args.iter().map(OsString::from)).collect()
    };
    match python {
        Some(python) => {
            let n = if quick { "150000" } else { "600000" };
            programs.push(Program {
                name: "python, a big dict",
                argv: args(python, &["-I", "-c", DICT, n]),
                stdin: None,
            });
        }
        None => missing.push("python3"),
    }
    match find("sort") {
        Some(sort) => {
            let input = write("lines", &lines(if quick { 450_000 } else { 1_500_000 }))?;
            let input = input.to_string_lossy().into_owned();
            let argv = args(&sort, &["--parallel=1", "--buffer-size=2G", "--stable", &input]);
            programs.push(Program { name: "sort", argv, stdin: None });
        }
        None => missing.push("sort"),
    }
    if quick {
        return Ok((programs, missing));
    }
    match find("xz") {
        Some(xz) => {
            let input = dir.join("source");
            let bytes = fs::read(&input).map_err(|e| format!("cannot read the contents: {e}"))?;
            let input = write("to-compress", &bytes[..bytes.len().min(2 << 20)])?;
            programs.push(Program { name: "xz -9", argv: args(&xz, &["-9", "-T1", "-c"]), stdin: Some(input) });
        }
        None => missing.push("xz"),
    }
    match find("sqlite3") {
        Some(sqlite) => {
            let script = write("script.sql", SQL.as_bytes())?;
            programs.push(Program {
                name: "sqlite3 in memory",
                argv: args(&sqlite, &["-batch", ":memory:"]),
                stdin: Some(script),
            });
        }
        None => missing.push("sqlite3"),
    }
    match find("gcc") {
        Some(gcc) => {
            let input = write("large.c", c_source(2500).as_bytes())?;
            let input = input.to_string_lossy().into_owned();
            let argv = args(&gcc, &["-O1", "-S", "-o", "-", &input]);
            programs.push(Program { name: "gcc -O1, one large file", argv, stdin: None });
        }
        None => missing.push("gcc"),
    }
    Ok((programs, missing))
}

const SQL: &str = "
CREATE TABLE t(id INTEGER PRIMARY KEY, name TEXT, score REAL, body TEXT);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000)
INSERT INTO t SELECT i, 'name-' || (i * 7919 % 300007), i * 0.5, 'the body of row ' || i || ' has ' || (i % 97) FROM n;
CREATE INDEX by_name ON t(name);
SELECT count(*), sum(score), sum(length(body)) FROM t;
SELECT sum(id) FROM t WHERE name BETWEEN 'name-3' AND 'name-5';
UPDATE t SET score = score + 1 WHERE id % 7 = 0;
SELECT count(*), sum(score) FROM (SELECT score FROM t ORDER BY body LIMIT 300000);
";

/// Lines in no order, as logs have them.
fn lines(count: usize) -> Vec<u8> {
    let mut random = Random::new(7);
    let mut text = String::with_capacity(count * 48);
    for i in 0..count {
        let key = random.next();
        let _ = writeln!(text, "{:012x} user-{} did {} at {i}", key >> 16, key % 9973, key % 89);
    }
    text.into_bytes()
}

/// A C file of many functions.
#[must_use]
pub fn c_source(functions: usize) -> String {
    let mut text = String::from("struct s { int a[16]; long b; struct s *next; };\n");
    for i in 0..functions {
        let _ = writeln!(
            text,
            "long f{i}(struct s *p, long x) {{ long r = x + {i}; for (int i = 0; i < 16; i++) {{ if (p->a[i] > {k}) r += \
             p->a[i] * {m}; else r ^= p->b << (i & 7); }} switch (r & 7) {{ case 0: return r + {k}; case 1: return \
             r * {m}; case 2: p->b = r; break; case 5: p->a[r & 15] = {i}; break; default: r -= p->b; }} return p->next \
             ? f{j}(p->next, r) : r; }}",
            k = i % 101,
            m = i % 37 + 2,
            j = i.saturating_sub(1),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_the_same_every_time() {
        assert_eq!(lines(100), lines(100));
        assert_eq!(lines(100).iter().filter(|b| **b == b'\n').count(), 100);
        assert_eq!(c_source(10).lines().count(), 11);
    }
}

//! Real programs that hold memory and use it, with an output that shows whether it was kept.

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

/// The Python interpreter itself, not a wrapper on the path.
#[must_use]
pub fn python() -> Option<PathBuf> {
    let output = Command::new("python3").args(["-I", "-c", "import sys; print(sys.executable)"]).output().ok()?;
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    path.is_file().then_some(path)
}

pub(crate) fn find(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?).map(|dir| dir.join(name)).find(|path| path.is_file())
}

/// The programs that this machine has, with their inputs written to `dir`; and those that cannot be measured, with the reason.
///
/// The story: the disk had no room for an input, and an hour of measurements was lost.
#[must_use]
pub fn all(dir: &Path, python: Option<&Path>, quick: bool) -> (Vec<Program>, Vec<String>) {
    let mut programs = Vec::new();
    let mut missing = Vec::new();
    let mut add = |command: &str, program: Option<Result<Program, String>>| match program {
        Some(Ok(program)) => programs.push(program),
        Some(Err(reason)) => missing.push(format!("{command} ({reason})")),
        None => missing.push(format!("{command} (not on this machine)")),
    };
    let write = |name: &str, contents: &[u8]| {
        let path = dir.join(name);
        fs::write(&path, contents).map(|()| path).map_err(|e| format!("cannot write {name}: {e}"))
    };
    let args = |program: &Path, args: &[&str]| -> Vec<OsString> {
        std::iter::once(program.as_os_str().to_owned()).chain(args.iter().map(OsString::from)).collect()
    };
    let dict = |python: &Path| {
        let n = if quick { "150000" } else { "600000" };
        Ok(Program { name: "python, a big dict", argv: args(python, &["-I", "-c", DICT, n]), stdin: None })
    };
    add("python3", python.map(dict));
    let sort = |sort: PathBuf| {
        let input = write("lines", &lines(if quick { 450_000 } else { 1_500_000 }))?;
        let input = input.to_string_lossy().into_owned();
        let argv = args(&sort, &["--parallel=1", "--buffer-size=2G", "--stable", &input]);
        Ok(Program { name: "sort", argv, stdin: None })
    };
    add("sort", find("sort").map(sort));
    if quick {
        return (programs, missing);
    }
    let xz = |xz: PathBuf| {
        let bytes = fs::read(dir.join("source")).map_err(|e| format!("cannot read the contents: {e}"))?;
        let input = write("to-compress", &bytes[..bytes.len().min(2 << 20)])?;
        Ok(Program { name: "xz -9", argv: args(&xz, &["-9", "-T1", "-c"]), stdin: Some(input) })
    };
    add("xz", find("xz").map(xz));
    let sqlite = |sqlite: PathBuf| {
        let script = Some(write("script.sql", SQL.as_bytes())?);
        Ok(Program { name: "sqlite3 in memory", argv: args(&sqlite, &["-batch", ":memory:"]), stdin: script })
    };
    add("sqlite3", find("sqlite3").map(sqlite));
    let gcc = |gcc: PathBuf| {
        let input = write("large.c", c_source(2500).as_bytes())?;
        let argv = args(&gcc, &["-O1", "-S", "-o", "-", &input.to_string_lossy()]);
        Ok(Program { name: "gcc -O1, one large file", argv, stdin: None })
    };
    add("gcc", find("gcc").map(gcc));
    (programs, missing)
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

/// Lines in random order, as in logs.
fn lines(count: usize) -> Vec<u8> {
    let mut random = Random::new(7);
    let mut text = String::with_capacity(count * 48);
    for i in 0..count {
        let key = random.next();
        let _ = writeln!(text, "{:012x} user-{} did {} at {i}", key >> 16, key % 9973, key % 89);
    }
    text.into_bytes()
}

/// A C file with many functions.
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

    /// See [`all`].
    #[test]
    fn what_has_no_room_for_its_input_is_not_measured() {
        let (programs, missing) = all(Path::new("/no/such"), Some(Path::new("/bin/true")), false);
        assert_eq!(programs.iter().map(|program| program.name).collect::<Vec<_>>(), ["python, a big dict"]);
        assert_eq!(missing.len(), 4);
        assert!(missing[0].starts_with("sort (cannot write lines: "), "{missing:?}");
    }

    #[test]
    fn inputs_are_the_same_every_time() {
        assert_eq!(lines(100), lines(100));
        assert_eq!(lines(100).iter().filter(|b| **b == b'\n').count(), 100);
        assert_eq!(c_source(10).lines().count(), 11);
    }
}

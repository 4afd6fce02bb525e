//! Memory images of real programs: heaps of interpreters and of a database, and program files.

use crate::data;
use crate::process::Started;
use crate::programs;
use crate::size::PAGE;
use crate::undo::Keeper;
use std::fs;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Memory of a program.
pub struct Image {
    /// The program's name.
    pub name: &'static str,
    /// Whole pages, none of them all zeros.
    pub bytes: Vec<u8>,
}

const NODE: &str = r"
const n = +process.argv[1] / 900 | 0, rows = [], by = new Map();
for (let i = 0; i < n; i++) {
  const r = {id: i, name: 'user-' + i, score: Math.sin(i), tags: ['t' + i % 97, String(i * 7919)], at: [i, i * 3.5],
             text: `line ${i} of a log about ${(i * 40503).toString(16)}`};
  rows.push(r); by.set(r.name, r);
}
globalThis.keep = [rows, by, JSON.parse(JSON.stringify(rows.slice(0, 2000)))];
console.log('ready'); setInterval(() => {}, 1e6);
";

const JAVA: &str = r#"
import java.util.*;
public class Heap {
  record Row(int id, String name, double score, List<String> tags, long[] at, String text) {}
  public static void main(String[] a) throws Exception {
    int n = (int) (Long.parseLong(a[0]) / 480);
    List<Row> rows = new ArrayList<>(); Map<String, Row> by = new HashMap<>();
    for (int i = 0; i < n; i++) {
      Row r = new Row(i, "user-" + i, Math.sin(i), List.of("t" + i % 97, "" + i * 7919L), new long[] {i, i * 3L},
                      "line " + i + " of a log about " + Integer.toHexString(i * 40503));
      rows.add(r); by.put(r.name(), r);
    }
    System.out.println("ready"); System.out.flush();
    Thread.sleep(Long.MAX_VALUE / 2000000);
    System.out.println(rows.size() + by.size());
  }
}
"#;

/// SQL that fills an in-memory database.
fn sql(len: usize) -> String {
    format!(
        "CREATE TABLE t(id INTEGER PRIMARY KEY, name TEXT, score REAL, body TEXT);\n\
         CREATE INDEX by_name ON t(name);\n\
         WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) \
         INSERT INTO t SELECT i, 'user-' || i, i * 0.37, 'line ' || i || ' of a log about ' || hex(i * 40503) FROM n;\n\
         .print ready\n",
        len / 96
    )
}

/// The images that this machine can make, of up to `len` bytes each, and the names of those that it cannot. Files are made in
/// `dir`.
#[must_use]
pub fn all(keeper: &Keeper, dir: &Path, len: usize) -> (Vec<Image>, Vec<&'static str>) {
    let (mut images, mut missing) = (Vec::new(), Vec::new());
    let mut add = |name: &'static str, bytes: Option<Vec<u8>>| match bytes.map(without_zeros) {
        Some(bytes) if bytes.len() >= 2 << 20 => images.push(Image { name, bytes }),
        _ => missing.push(name),
    };
    add("program files", {
        let mut bytes = Vec::new();
        data::libraries().iter().for_each(|file| data::append(file, &mut bytes, len));
        Some(bytes)
    });
    add(
        "Python heap",
        programs::python().map(|python| {
            let mut bytes = Vec::new();
            data::python_heap(&python, &mut bytes, len);
            bytes
        }),
    );
    add(
        "Node heap",
        programs::find("node")
            .and_then(|node| heap_of(keeper, Command::new(node).args(["-e", NODE, &len.to_string()]), "", len)),
    );
    add(
        "Java heap",
        programs::find("java").and_then(|java| {
            let file = dir.join("Heap.java");
            fs::write(&file, JAVA).ok()?;
            heap_of(
                keeper,
                Command::new(java).arg(format!("-Xms{}m", 2 * (len >> 20))).arg(&file).arg(len.to_string()),
                "",
                len,
            )
        }),
    );
    add(
        "SQLite heap",
        programs::find("sqlite3")
            .and_then(|sqlite| heap_of(keeper, Command::new(sqlite).arg(":memory:"), &sql(len), len)),
    );
    (images, missing)
}

/// Starts a program, waits until it says that it is ready, and reads its anonymous memory.
///
/// The story: when the lab was killed meanwhile, programs that wait to be read were left behind, Java for good.
fn heap_of(keeper: &Keeper, command: &mut Command, input: &str, len: usize) -> Option<Vec<u8>> {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut started = Started::of(keeper, command).ok()?;
    // Kept open, as some programs end when there is no more to read.
    let mut stdin = started.child.stdin.take()?;
    stdin.write_all(input.as_bytes()).ok()?;
    stdin.flush().ok()?;
    let mut line = String::new();
    BufReader::new(started.child.stdout.take()?).read_line(&mut line).ok()?;
    (line.trim() == "ready").then(|| read_memory(started.child.id(), len))?
}

/// Reads up to `len` bytes of a process's private writable memory that no file backs, without zero pages.
fn read_memory(pid: u32, len: usize) -> Option<Vec<u8>> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let mut memory = fs::File::open(PathBuf::from(format!("/proc/{pid}/mem"))).ok()?;
    let mut out = Vec::with_capacity(len);
    let mut chunk = vec![0; 64 << 10];
    for line in maps.lines() {
        let mut fields = line.split_whitespace();
        let (Some(range), Some(rights)) = (fields.next(), fields.next()) else { continue };
        let name = fields.nth(3).unwrap_or("");
        if !rights.starts_with("rw") || !(name.is_empty() || name == "[heap]") {
            continue;
        }
        let Some((start, end)) = range.split_once('-') else { continue };
        let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16)) else { continue };
        let mut at = start;
        while at < end && out.len() < len {
            let n = ((end - at) as usize).min(chunk.len());
            if memory.seek(SeekFrom::Start(at)).is_err() || memory.read_exact(&mut chunk[..n]).is_err() {
                break;
            }
            chunk[..n].chunks(PAGE).filter(|p| p.iter().any(|b| *b != 0)).for_each(|p| out.extend_from_slice(p));
            at += n as u64;
        }
    }
    out.truncate(len);
    Some(out)
}

fn without_zeros(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(bytes.len() / PAGE * PAGE);
    let pages = bytes.chunks(PAGE).filter(|p| p.iter().any(|b| *b != 0));
    pages.flatten().copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_not_ready_has_no_image() {
        let keeper = Keeper::unguarded();
        assert!(heap_of(&keeper, &mut Command::new("false"), "", 1 << 20).is_none());
        assert!(heap_of(&keeper, &mut Command::new("/nonexistent"), "", 1 << 20).is_none());
    }

    #[test]
    fn memory_of_a_child_is_read() {
        let mut shell = Command::new("sh");
        let shell = shell.args(["-c", "x=needle-in-memory; echo ready; read y"]);
        let bytes = heap_of(&Keeper::unguarded(), shell, "", 4 << 20).unwrap();
        assert!(bytes.windows(16).any(|w| w == b"needle-in-memory"));
    }
}

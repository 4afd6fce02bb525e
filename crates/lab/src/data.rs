//! Real contents for memory: the files of programs, and the heap of a running one.

use crate::size::PAGE;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Pages of real contents, mapped shared from a file. They are page cache, which no limit here counts.
pub struct Source {
    bytes: Bytes,
    /// The exclusive or of each page's words, except the first (the stamp's).
    folded: Vec<u64>,
}

enum Bytes {
    Mapped { base: *const u8, len: usize },
    Owned(Vec<u8>),
}

impl Source {
    /// Maps the file, and reads it through once.
    ///
    /// # Errors
    /// When the file cannot be opened or mapped, or holds no whole page.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let len = file.metadata()?.len() as usize / PAGE * PAGE;
        if len == 0 {
            return Err(io::Error::other("no whole page in it"));
        }
        // SAFETY: a new shared read-only mapping of a file that nobody changes while the lab runs.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self::fold(Bytes::Mapped { base: base.cast(), len }))
    }

    /// Makes a source of `len` bytes of what [write](fn@write) writes, in a file of `dir` that is deleted at once. Also returns a
    /// description of the contents.
    ///
    /// # Errors
    /// As [write](fn@write); when the file cannot be read again.
    pub fn made(dir: &Path, len: u64, python: Option<&Path>) -> Result<(Self, String), String> {
        let path = dir.join(format!("uzswap-lab-source-{}", std::process::id()));
        let made = write(&path, len, python).and_then(|holds| match Self::open(&path) {
            Ok(source) => Ok((source, holds)),
            Err(e) => Err(format!("cannot read the source of contents: {e}")),
        });
        let _ = fs::remove_file(&path);
        made
    }

    /// A source of these bytes, which must be whole pages.
    #[must_use]
    pub fn of_bytes(bytes: Vec<u8>) -> Self {
        Self::fold(Bytes::Owned(bytes))
    }

    fn fold(bytes: Bytes) -> Self {
        let mut source = Self { bytes, folded: Vec::new() };
        source.folded =
            (0..source.pages()).map(|page| (1..PAGE / 8).fold(0, |all, word| all ^ source.word(page, word))).collect();
        source
    }

    fn bytes(&self) -> &[u8] {
        match &self.bytes {
            // SAFETY: mapped readable for this length until `drop`.
            Bytes::Mapped { base, len } => unsafe { std::slice::from_raw_parts(*base, *len) },
            Bytes::Owned(bytes) => bytes,
        }
    }

    /// The number of pages.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.bytes().len() / PAGE
    }

    /// One page.
    #[must_use]
    pub fn page(&self, page: usize) -> &[u8] {
        &self.bytes()[page * PAGE..][..PAGE]
    }

    /// Eight bytes of a page.
    #[must_use]
    pub fn word(&self, page: usize, word: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.page(page)[word * 8..][..8]);
        u64::from_ne_bytes(bytes)
    }

    /// The exclusive or of a page's words, except the first.
    #[must_use]
    pub fn folded(&self, page: usize) -> u64 {
        self.folded[page]
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        if let Bytes::Mapped { base, len } = self.bytes {
            // SAFETY: the mapping is ours.
            unsafe { libc::munmap(base.cast_mut().cast(), len) };
        }
    }
}

/// Writes `len` bytes of real contents to `path`: a quarter from the heap of a Python program, a quarter from Python's own
/// sources, the rest from the machine's shared libraries. Returns a description of the contents.
///
/// # Errors
/// When there is not enough to read, or the file cannot be written.
pub fn write(path: &Path, len: u64, python: Option<&Path>) -> Result<String, String> {
    let fail = |e: io::Error| format!("cannot write {}: {e}", path.display());
    let mut out = Vec::with_capacity(len as usize);
    let mut parts = Vec::new();
    let mut part = |out: &mut Vec<u8>, name: &str, upto: u64, fill: &mut dyn FnMut(&mut Vec<u8>, usize)| {
        let before = out.len();
        fill(out, upto as usize);
        out.truncate(out.len() / PAGE * PAGE);
        parts.push(format!("{} of {name}", crate::size::mib((out.len() - before) as u64)));
    };
    if let Some(python) = python {
        part(&mut out, "a Python heap", len / 4, &mut |out, upto| python_heap(python, out, upto));
    }
    part(&mut out, "Python sources and bytecode", len / 2, &mut |out, upto| {
        for file in python_files() {
            append(&file, out, upto);
        }
    });
    part(&mut out, "shared libraries", len, &mut |out, upto| {
        for file in libraries() {
            append(&file, out, upto);
        }
    });
    if out.len() < 8 << 20 {
        return Err("found less than 8 MiB of program files to fill memory with".to_owned());
    }
    let mut file = File::create(path).map_err(fail)?;
    file.write_all(&out).map_err(fail)?;
    file.sync_all().map_err(fail)?;
    Ok(parts.join(", "))
}

/// Appends at most 4 MiB of a file, in whole pages, until `out` has `upto` bytes.
pub(crate) fn append(path: &Path, out: &mut Vec<u8>, upto: usize) {
    let room = upto.saturating_sub(out.len()).min(4 << 20);
    if room < PAGE {
        return;
    }
    let before = out.len();
    if let Ok(file) = File::open(path) {
        let _ = file.take(room as u64).read_to_end(out);
    }
    // Text in memory is packed, not padded to pages, so only what a cut leaves over is removed.
    if out.len() - before == room {
        out.truncate(out.len() / PAGE * PAGE);
    }
}

fn sorted(dir: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<_> = fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect();
    entries.sort();
    entries
}

pub(crate) fn libraries() -> Vec<PathBuf> {
    let dirs = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
    let is_library = |p: &PathBuf| {
        p.is_file() && !p.is_symlink() && p.file_name().is_some_and(|n| n.to_string_lossy().contains(".so"))
    };
    dirs.iter().flat_map(|d| sorted(Path::new(d))).filter(is_library).collect()
}

fn python_files() -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut dirs: Vec<PathBuf> = sorted(Path::new("/usr/lib"))
        .into_iter()
        .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3")))
        .collect();
    while let Some(dir) = dirs.pop() {
        for path in sorted(&dir) {
            if path.is_symlink() {
                continue;
            }
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|e| e == "py" || e == "pyc") {
                files.push(path);
            }
        }
    }
    files
}

/// Has Python build what programs build (dicts, lists, strings, numbers, parsed JSON), and dump its own heap.
pub(crate) fn python_heap(python: &Path, out: &mut Vec<u8>, upto: usize) {
    const SCRIPT: &str = r"
import sys, json, random
want = int(sys.argv[1]); random.seed(1); keep = []; rows = []
while len(rows) * 620 < want:
    i = len(rows)
    rows.append({'id': i, 'name': 'user-%d' % i, 'score': random.random(), 'tags': ['t%d' % (i % 97), str(i * 7919)],
                 'at': (i, i * 3.5), 'text': 'line %d of a log about %x' % (i, i * 2654435761)})
keep.append({r['name']: r['score'] for r in rows}); keep.append(json.loads(json.dumps(rows[:2000])))
import gc; gc.collect()
left = want
with open('/proc/self/maps') as f: maps = f.read().split('\n')
with open('/proc/self/mem', 'rb', 0) as mem:
    for line in maps:
        p = line.split()
        if left <= 0 or len(p) < 5 or not p[1].startswith('rw') or p[4] != '0': continue
        if len(p) > 5 and p[5] != '[heap]': continue
        a, b = (int(x, 16) for x in p[0].split('-'))
        while a < b and left > 0:
            try: chunk = mem.read(min(65536, b - a, left)) if mem.seek(a) >= 0 else b''
            except OSError: break
            if not chunk: break
            a += len(chunk)
            chunk = b''.join(chunk[i:i+4096] for i in range(0, len(chunk), 4096) if any(chunk[i:i+4096]))
            left -= len(chunk)
            sys.stdout.buffer.write(chunk)
";
    let room = upto.saturating_sub(out.len());
    let child = Command::new(python)
        .args(["-I", "-c", SCRIPT, &room.to_string()])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    if let Ok(output) = child {
        out.extend_from_slice(&output.stdout[..output.stdout.len().min(room)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_is_real_and_whole() {
        let path = std::env::temp_dir().join(format!("uzswap-lab-test-{}", std::process::id()));
        let holds = write(&path, 16 << 20, None).unwrap();
        assert!(holds.contains("shared libraries"), "{holds}");
        let source = Source::open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(source.pages() >= 2048);
        let zero = (0..source.pages()).filter(|p| source.page(*p).iter().all(|b| *b == 0)).count();
        assert!(zero < source.pages() / 4, "{zero} zero pages of {}", source.pages());
    }
}

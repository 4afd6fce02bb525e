//! Write-protect notification: `uzswap protect` and `uzswap::WriteWatch`.

use crate::cli::{UZSWAP, start_python};
use crate::place::eventually;
use serde_json::Value;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use uzswap::WriteWatch;

const PAGES: usize = 100;
const PAGE: usize = 4096;
/// No answer takes that long.
const LONG: Duration = Duration::from_secs(20);

/// A program with 100 pages, each of which holds its number plus one. Each line is a command; what it prints is the answer.
/// (Another thread does `late`, and says so when it is done.)
const PROGRAM: &str = "
import ctypes, os, sys, threading
libc = ctypes.CDLL(None)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
size = 100 * 4096
def new(prot):
    return libc.mmap(None, size, prot, 0x22, -1, 0)
at = new(3)
def put(page, value, offset=0):
    libc.memset(at + page * 4096 + offset, value, 1)
def get(page, offset=0):
    return ctypes.c_ubyte.from_address(at + page * 4096 + offset).value
for page in range(100):
    put(page, page + 1)
said = threading.Lock()
def say(*what):
    with said:
        print(*what, flush=True)
def late(page):
    put(page, 9, 5)
    say('late', page)
say(os.getpid(), at)
for line in sys.stdin:
    what, page = (line.split() + ['0'])[:2]
    page = int(page)
    if what == 'late':
        threading.Thread(target=late, args=[page]).start()
        continue
    if what == 'write':
        put(page, 7, 5)
    elif what == 'child':
        child = os.fork()
        if child == 0:
            for p in range(100):
                put(p, 3, 6)
            os._exit(0 if all(get(p) == p + 1 and get(p, 6) == 3 for p in range(100)) else 1)
        page = os.waitpid(child, 0)[1]
    elif what == 'move':
        at = page = libc.mremap(at, size, size, 3, new(0))
    elif what == 'drop':
        libc.madvise(at, size, 4)
    elif what == 'exec':
        os.execv(sys.executable, [sys.executable, '-c', 'import sys; print(\"exec 0\", flush=True); sys.stdin.read()'])
    elif what == 'right':
        page = int(all(get(p) == p + 1 for p in range(100)))
    say(what, page)
";

struct Program {
    run: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    pid: u32,
    at: usize,
}

impl Program {
    fn start(options: &[&str]) -> Option<Self> {
        let mut run = start_python(&[&["--memory", "128M"], options].concat(), PROGRAM)?;
        let (input, mut output) = (run.stdin.take().unwrap(), BufReader::new(run.stdout.take().unwrap()).lines());
        let line = output.next().expect("its first line").unwrap();
        let (pid, at) = line.split_once(' ').unwrap();
        let (pid, at) = (pid.parse().unwrap(), at.parse().unwrap());
        Some(Self { run, input, output, pid, at })
    }

    fn tell(&mut self, command: &str) {
        writeln!(self.input, "{command}").unwrap();
    }

    /// The number in its next line, which must begin with `what`.
    fn says(&mut self, what: &str) -> usize {
        let line = self.output.next().expect("an answer").unwrap();
        let number = line.strip_prefix(what).unwrap_or_else(|| panic!("`{line}` where `{what}` was to come"));
        number.trim().parse().unwrap()
    }

    fn page(&self, page: usize) -> usize {
        self.at + page * PAGE
    }

    fn all(&self) -> std::ops::Range<usize> {
        self.at..self.page(PAGES)
    }

    fn put_out(&self) {
        let range = format!("{:x}-{:x}", self.at, self.page(PAGES));
        let done = Command::new(UZSWAP).args(["pagemap", &self.pid.to_string(), "--page-out", &range]).output();
        assert!(done.unwrap().status.success());
    }

    /// How many pages of the block have a word among their states.
    fn pages_with(&self, word: &str) -> u64 {
        let output =
            Command::new(UZSWAP).args(["pagemap", &self.pid.to_string(), "--json", "--runs"]).output().unwrap();
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        let (from, to) = ((self.at / PAGE) as u64, (self.at / PAGE + PAGES) as u64);
        let runs = found[0]["runs"].as_array().unwrap().iter();
        let has = runs.filter(|r| r["state"].as_array().unwrap().iter().any(|w| w == word));
        let inside =
            |r: &Value| r["to"].as_u64().unwrap().min(to).saturating_sub(r["from"].as_u64().unwrap().max(from));
        has.map(inside).sum()
    }

    /// A byte of its memory, read as a client does.
    fn byte(&self, address: usize) -> u8 {
        let mut byte = 0u8;
        let local = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: 1 };
        // SAFETY: one byte of ours is written.
        let read = unsafe { libc::process_vm_readv(self.pid as i32, &raw const local, 1, &raw const remote, 1, 0) };
        assert_eq!(read, 1, "{}", std::io::Error::last_os_error());
        byte
    }

    fn end(mut self) {
        drop(self.input);
        assert!(self.run.wait().unwrap().success());
    }
}

#[test]
fn a_writer_waits_until_its_page_is_released_wherever_the_page_is() {
    let Some(mut p) = Program::start(&["--track-writes"]) else { return };
    let watch = WriteWatch::of(p.pid).unwrap();
    let protected = watch.protect(p.all()).unwrap();
    assert_eq!((protected.pages, protected.stayed), (100, 0));
    assert_eq!(p.pages_with("write-protected"), 100);
    assert_eq!(watch.next_write(Duration::ZERO).unwrap(), None);
    // In memory, out, and paged out while the writer waits; the program itself also reads meanwhile.
    for (page, out_before, out_meanwhile) in [(1, false, false), (2, true, false), (3, false, true), (4, true, true)] {
        if out_before {
            p.put_out();
        }
        p.tell(&format!("late {page}"));
        assert_eq!(watch.next_write(LONG).unwrap(), Some(p.page(page)));
        if out_meanwhile {
            p.put_out();
        }
        p.tell("right");
        assert_eq!(p.says("right"), 1);
        assert_eq!((p.byte(p.page(page)), p.byte(p.page(page) + 5)), (page as u8 + 1, 0), "as it was");
        assert_eq!(watch.next_write(Duration::from_millis(20)).unwrap(), None, "it is told once");
        assert_eq!(watch.release(p.page(page)..p.page(page) + 1).unwrap(), 1);
        assert_eq!(p.says("late"), page);
        assert_eq!(p.byte(p.page(page) + 5), 9);
        // The page is no longer protected.
        p.tell(&format!("write {page}"));
        assert_eq!(p.says("write"), page);
    }
    assert_eq!(p.pages_with("write-protected"), 96);
    // Protected anew, writes are reported anew; more threads wait at once than are reported at once.
    assert_eq!(watch.protect(p.all()).unwrap().pages, 100);
    (0..80).for_each(|page| p.tell(&format!("late {page}")));
    let mut told = Vec::new();
    while told.len() < 80 {
        told.push(watch.next_write(LONG).unwrap().expect("80 threads wait"));
    }
    told.sort_unstable();
    assert_eq!(told, (0..80).map(|page| p.page(page)).collect::<Vec<_>>());
    assert_eq!(watch.release(0..usize::MAX).unwrap(), 100);
    let mut done: Vec<usize> = (0..80).map(|_| p.says("late")).collect();
    done.sort_unstable();
    assert_eq!(done, (0..80).collect::<Vec<_>>());
    p.tell("right");
    assert_eq!((p.says("right"), p.pages_with("write-protected")), (1, 0));
    drop(watch);
    p.end();
}

/// Soft-dirty bits and protection are independent: writes to clean pages are reported, and make them soft-dirty.
#[test]
fn soft_dirty_bits_go_on_meanwhile() {
    let Some(mut p) = Program::start(&["--track-writes"]) else { return };
    let (range, pid) = (format!("{:x}-{:x}", p.at, p.page(PAGES)), p.pid.to_string());
    let pagemap = |args: &[&str]| {
        let done = Command::new(UZSWAP).args(["pagemap", &pid]).args(args).output().unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    pagemap(&["--clear-soft-dirty", &range]);
    let watch = WriteWatch::of(p.pid).unwrap();
    watch.protect(p.all()).unwrap();
    assert_eq!((p.pages_with("soft-dirty"), p.pages_with("write-protected")), (0, 100));
    pagemap(&["--page-out", &range]);
    p.tell("late 5");
    assert_eq!(watch.next_write(LONG).unwrap(), Some(p.page(5)));
    assert_eq!(p.pages_with("soft-dirty"), 0, "nothing was written yet");
    // Clearing the bits of pages with waiting writers changes nothing.
    pagemap(&["--clear-soft-dirty", &range]);
    watch.release(p.page(5)..p.page(6)).unwrap();
    assert_eq!(p.says("late"), 5);
    assert_eq!((p.pages_with("soft-dirty"), p.pages_with("write-protected")), (1, 99));
    drop(watch);
    (0..PAGES).for_each(|page| {
        p.tell(&format!("write {page}"));
        assert_eq!(p.says("write"), page);
    });
    assert_eq!((p.pages_with("soft-dirty"), p.pages_with("write-protected")), (100, 0));
    p.end();
}

/// When a client ends, in whatever way, the writers go on.
#[test]
fn nobody_waits_for_a_client_that_is_gone() {
    let Some(mut p) = Program::start(&["--track-writes"]) else { return };
    let range = format!("{:x}-{:x}", p.at, p.page(PAGES));
    for how in ["killed", "its input ends", "end", "what it says makes no sense", "dropped"] {
        if how == "dropped" {
            let watch = WriteWatch::of(p.pid).unwrap();
            watch.protect(p.all()).unwrap();
            p.tell("late 8");
            assert_eq!(watch.next_write(LONG).unwrap(), Some(p.page(8)));
            drop(watch);
            assert_eq!(p.says("late"), 8);
            continue;
        }
        let mut client = Command::new(UZSWAP)
            .args(["protect", &p.pid.to_string(), &range])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = client.stdin.take().unwrap();
        let mut lines = BufReader::new(client.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert_eq!(lines.next().as_deref(), Some("protected 100"), "{how}");
        p.tell("late 8");
        assert_eq!(lines.next(), Some(format!("write {:x}", p.page(8))), "{how}");
        // One client at a time.
        let second = WriteWatch::of(p.pid).map(drop).unwrap_err().to_string();
        assert!(second.contains("already"), "{second}");
        writeln!(input, "release {:x}", p.page(9)).unwrap();
        assert_eq!(lines.next().as_deref(), Some("released 1"), "{how}");
        match how {
            "killed" => client.kill().unwrap(),
            "its input ends" => drop(input),
            "end" => writeln!(input, "end").unwrap(),
            _ => writeln!(input, "relase all").unwrap(),
        }
        assert_eq!(p.says("late"), 8, "{how}");
        // Not waited for before: a killed client is a zombie meanwhile.
        assert_eq!(client.wait().unwrap().success(), how.contains("end"), "{how}");
        let begun = Instant::now();
        while p.pages_with("write-protected") > 0 {
            assert!(begun.elapsed() < LONG, "{how}: pages stay protected");
        }
    }
    p.end();
}

#[test]
fn what_becomes_of_protected_memory_is_defined() {
    let Some(mut p) = Program::start(&["--track-writes"]) else { return };
    let watch = WriteWatch::of(p.pid).unwrap();
    watch.protect(p.all()).unwrap();
    // A forked child may write to its own memory; the parent's stays protected.
    p.tell("child");
    assert_eq!(p.says("child"), 0);
    assert_eq!((p.pages_with("write-protected"), watch.next_write(Duration::ZERO).unwrap()), (100, None));
    p.put_out();
    p.tell("child");
    assert_eq!(p.says("child"), 0);
    p.tell("late 6");
    assert_eq!(watch.next_write(LONG).unwrap(), Some(p.page(6)));
    p.tell("child");
    assert_eq!((p.says("child"), p.byte(p.page(6) + 5)), (0, 0));
    watch.release(p.page(6)..p.page(7)).unwrap();
    assert_eq!(p.says("late"), 6);
    // The protection moves along.
    p.tell("move");
    p.at = p.says("move");
    // The call returns when the event has been read, perhaps before it is noted.
    eventually("it has moved along", || p.pages_with("write-protected") == 99);
    p.tell("late 7");
    assert_eq!(watch.next_write(LONG).unwrap(), Some(p.page(7)));
    // Dropped memory is no longer protected, and a thread that waited there goes on.
    p.tell("drop");
    let mut said = [p.output.next().unwrap().unwrap(), p.output.next().unwrap().unwrap()];
    said.sort();
    assert_eq!(said, ["drop 0", "late 7"]);
    assert_eq!((p.pages_with("write-protected"), p.byte(p.page(7) + 5)), (0, 9));
    // Memory not touched since is not protected; memory that was is.
    assert_eq!(watch.protect(p.all()).unwrap().pages, 1);
    p.tell("write 30");
    assert_eq!(p.says("write"), 30);
    // After an exec it is another program.
    p.tell("late 7");
    assert_eq!(watch.next_write(LONG).unwrap(), Some(p.page(7)));
    p.tell("exec");
    assert_eq!(p.says("exec"), 0);
    let gone = watch.next_write(LONG).unwrap_err().to_string();
    assert!(gone.contains("another program"), "{gone}");
    assert!(watch.protect(0..usize::MAX).is_err() && watch.release(0..usize::MAX).is_err());
    drop(watch);
    let again = WriteWatch::of(p.pid).unwrap();
    let pid = p.pid;
    p.end();
    let gone = again.next_write(LONG).unwrap_err().to_string();
    assert!(gone.contains("has ended"), "{gone}");
    assert!(WriteWatch::of(pid).is_err());
}

#[test]
fn what_cannot_be_protected_is_said() {
    let Some(p) = Program::start(&[]) else { return };
    let no = WriteWatch::of(p.pid).map(drop).unwrap_err().to_string();
    assert!(no.contains("--track-writes"), "{no}");
    p.end();
    let Some(p) = Program::start(&["--track-writes"]) else { return };
    let watch = WriteWatch::of(p.pid).unwrap();
    let no = watch.protect(0x1000..0x2000).map(drop).unwrap_err().to_string();
    assert!(no.contains("no managed memory there"), "{no}");
    assert_eq!(watch.release(0..usize::MAX).unwrap(), 0);
    p.end();
    for (args, part) in [
        (["protect", "1", "all"], "in no `uzswap run` of yours"),
        (["protect", "1000000000", "all"], "there is no process"),
        (["protect", "1", "0..4K"], "is not a range of a process"),
    ] {
        let refused = Command::new(UZSWAP).args(args).stdin(Stdio::null()).output().unwrap();
        let text = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success() && text.contains(part) && text.lines().count() == 1, "{text}");
    }
}

/// See `WriteWatch`'s drop.
#[test]
fn a_clients_forked_child_ends_nothing() {
    let Some(mut p) = Program::start(&["--track-writes"]) else { return };
    let watch = WriteWatch::of(p.pid).unwrap();
    assert_eq!(watch.protect(p.all()).unwrap().pages, 100);
    let mut watch = Some(watch);
    // SAFETY: the child makes few calls, and leaves without the harness.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = watch.as_ref().is_some_and(|watch| watch.next_write(Duration::ZERO).is_err());
        drop(watch.take());
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = -1;
    // SAFETY: a child of ours; its status is written.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "it was served as the client");
    let watch = watch.unwrap();
    p.tell("late 5");
    assert_eq!(watch.next_write(LONG).unwrap(), Some(p.page(5)));
    assert_eq!(p.byte(p.page(5) + 5), 0, "the writer waits");
    assert_eq!(watch.release(p.all()).unwrap(), 100);
    assert_eq!(p.says("late"), 5);
    p.end();
}

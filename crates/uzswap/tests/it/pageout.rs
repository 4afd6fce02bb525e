//! Pages of a running program, paged out and in by `uzswap pagemap PID`.

use crate::cli::{UZSWAP, start_python};
use crate::place::eventually;
use serde_json::Value;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output};

/// Holds numbers as text, and 8 MiB in one mapping, which its second line names. It writes the first `hot` bytes of these over
/// and over when told to. Each line that it reads is a command, each line that it prints the answer.
const PROGRAM: &str = "
import mmap, os, sys, threading, ctypes
texts = [str(i) * 20 for i in range(100_000)]
block = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(2048):
    block[page * 4096:page * 4096 + 8] = (page * 2654435761).to_bytes(8, 'little')
at = ctypes.addressof(ctypes.c_char.from_buffer(block))
def right():
    return (all(texts[i] == str(i) * 20 for i in range(len(texts)))
        and all(block[p * 4096:p * 4096 + 8] == (p * 2654435761).to_bytes(8, 'little') for p in range(2048)))
busy = True
def touch():
    n = 0
    while busy:
        for page in range(64):
            block[page * 4096 + 100] = n & 255
        n += 1
print(os.getpid(), at, flush=True)
for line in sys.stdin:
    if line == 'busy\\n':
        threading.Thread(target=touch, daemon=True).start()
    elif line == 'rest\\n':
        busy = False
    elif line == 'fork\\n':
        child = os.fork()
        if child == 0:
            os._exit(0 if right() else 1)
        print(os.waitpid(child, 0)[1] == 0, flush=True)
        continue
    print(right(), flush=True)
";

struct Program {
    run: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    pid: String,
    block: u64,
}

impl Program {
    fn start(memory: &str) -> Option<Self> {
        let mut run = start_python(&["--memory", memory], PROGRAM)?;
        let (input, output) = (run.stdin.take().unwrap(), run.stdout.take().unwrap());
        let mut output = BufReader::new(output).lines();
        let line = output.next().expect("its first line").unwrap();
        let (pid, block) = line.split_once(' ').unwrap();
        Some(Self { run, input, output, pid: pid.to_owned(), block: block.parse().unwrap() })
    }

    /// Has it do a command, and checks that every byte was right afterwards.
    fn told(&mut self, command: &str) {
        writeln!(self.input, "{command}").unwrap();
        assert_eq!(self.output.next().expect("an answer").unwrap(), "True", "after {command}");
    }

    fn pagemap(&self, args: &[&str]) -> Output {
        Command::new(UZSWAP).args(["pagemap", &self.pid]).args(args).output().unwrap()
    }

    /// Moves its pages; returns its page map afterwards, and what was printed.
    fn moved(&self, args: &[&str]) -> (Value, String) {
        let output = self.pagemap(&[args, &["--json", "--runs"]].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        let maps: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        let own = maps.into_iter().find(|m| m["what"] == format!("process {}", self.pid).as_str());
        (own.expect("its page map"), said)
    }

    /// How many pages of the block have a word among their states.
    fn pages(&self, map: &Value, word: &str, within: std::ops::Range<u64>) -> u64 {
        let (from, to) = (self.block / 4096 + within.start, self.block / 4096 + within.end);
        let runs = map["runs"].as_array().unwrap();
        let has = runs.iter().filter(|r| r["state"].as_array().unwrap().iter().any(|w| w == word));
        let inside =
            |r: &Value| r["to"].as_u64().unwrap().min(to).saturating_sub(r["from"].as_u64().unwrap().max(from));
        has.map(inside).sum()
    }

    /// The one sentence of a refusal.
    fn refused(&self, args: &[&str]) -> String {
        let output = self.pagemap(args);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && text.lines().count() == 1, "{args:?}: {text}");
        text
    }

    fn end(mut self) {
        drop(self.input);
        assert!(self.run.wait().unwrap().success());
    }
}

#[test]
fn a_program_far_below_its_limit_is_put_out_and_brought_in() {
    let Some(mut p) = Program::start("256M") else { return };
    let (map, said) = p.moved(&["--page-out", "all"]);
    assert!(said.contains("put out"), "{said}");
    assert_eq!(p.pages(&map, "swapped", 0..2048), 2048, "{map}");
    assert!(map["swapped"].as_u64().unwrap() > 4000, "{map}");
    p.told("look");
    // What its last fault brought is noted after it goes on.
    eventually("all of it is there", || p.pages(&p.moved(&[]).0, "present", 0..2048) == 2048);
    // A part of it, and only that.
    let range = format!("{:x}-{:x}", p.block + 100 * 4096, p.block + 300 * 4096);
    let (map, _) = p.moved(&["--page-out", &range]);
    let swapped = [0..100, 100..300, 300..2048].map(|part| p.pages(&map, "swapped", part));
    assert_eq!(swapped, [0, 200, 0], "{map}");
    let range = format!("0x{:x}-0x{:x}", p.block + 150 * 4096 + 1, p.block + 199 * 4096 + 1);
    let (map, said) = p.moved(&["--page-in", &range]);
    let swapped = [100..150, 150..200, 200..300].map(|part| p.pages(&map, "swapped", part));
    assert_eq!(swapped, [50, 0, 100], "{said}: {map}");
    // A forked child has memory of its own, and it is right.
    p.told("fork");
    p.moved(&["--page-out", "all"]);
    p.told("fork");
    p.told("look");
    p.end();
}

#[test]
fn what_is_in_use_stays_when_idle_pages_go() {
    let Some(mut p) = Program::start("128M") else { return };
    p.told("busy");
    let (map, said) = p.moved(&["--idle", "1"]);
    assert!(said.contains("put out as idle"), "{said}");
    // Pages that nobody touches are out and compressed; the 64 pages written all the time were written in this second.
    assert_eq!(p.pages(&map, "swapped", 64..2048), 1984, "{map}");
    assert_eq!(p.pages(&map, "staged", 64..2048), 0, "{map}");
    assert_eq!(p.pages(&map, "present", 0..64), 64, "{map}");
    // Paged out again and again while the program writes to it, and its limit presses.
    for _ in 0..20 {
        p.moved(&["--page-out", "all"]);
        p.moved(&["--page-in", "all"]);
    }
    p.told("rest");
    p.told("look");
    p.end();
}

#[test]
fn a_request_that_comes_to_nothing_is_said_and_harms_nobody() {
    let Some(mut p) = Program::start("128M") else { return };
    assert!(p.refused(&["--page-out", "1000-2000"]).contains("no managed memory there"));
    assert!(p.refused(&["--page-out", "0..64M"]).contains("is not a range of a process"));
    assert!(p.refused(&["--idle=-1"]).contains("is not a time"));
    let signal = |signal: i32, pid: i32| {
        // SAFETY: signals to processes that this test started.
        unsafe { libc::kill(pid, signal) };
    };
    let pid: i32 = p.pid.parse().unwrap();
    signal(libc::SIGSTOP, pid);
    assert!(p.refused(&["--page-out", "all"]).contains("is stopped"));
    signal(libc::SIGCONT, pid);
    // The command stops and goes on with its program, like a shell's job.
    signal(libc::SIGCONT, p.run.id() as i32);
    p.told("look");
    // Nothing of that request is done later; the next request is.
    let (map, _) = p.moved(&["--page-out", "all"]);
    assert_eq!(p.pages(&map, "swapped", 0..2048), 2048, "{map}");
    p.told("look");
    // Commands that ask at the same time take turns.
    let both = std::thread::scope(|scope| {
        let args = [["--page-out", "all", "--json"], ["--page-in", "all", "--json"]];
        let p = &p;
        args.map(|args| scope.spawn(move || p.pagemap(&args))).map(|asked| asked.join().unwrap().status.success())
    });
    assert_eq!(both, [true, true]);
    p.told("look");
    // The program ends in the middle of a request, before it, or after it.
    std::thread::scope(|scope| {
        let p = &p;
        let asking = scope.spawn(move || p.pagemap(&["--page-out", "all", "--page-in", "all"]));
        signal(libc::SIGKILL, pid);
        let text = String::from_utf8(asking.join().unwrap().stderr).unwrap();
        assert!(text.lines().count() <= 2, "{text}");
    });
    p.run.wait().unwrap();
    let text = p.refused(&["--page-out", "all"]);
    assert!(text.contains("there is no process") || text.contains("has ended"), "{text}");
}

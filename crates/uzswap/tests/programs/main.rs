//! Real programs, unmodified, at half and at a quarter of the memory they use: same output, same exit status.
//!
//! `harness.rs` runs and compares, `debuggers.rs` debugs them, `qemu.rs` boots a guest, `redis.rs` is the one program that is
//! talked to while it runs, `read_only.rs` has what a program or its linker made read-only, `remote.rs` and `cluster.rs` swap to
//! servers, `units.rs` has large units, `injected.rs` makes the pager's own operations fail meanwhile, `without_move.rs` pages
//! programs as on kernels before 6.8 and boots one, `torture.rs` does to memory all that is allowed, `fixtures/` holds the
//! programs written for this. `./test` installs what is missing. To see each run's time and memory: `cargo test --release --test
//! programs`.

mod apart;
mod cluster;
mod debuggers;
mod disk;
mod ending;
mod harness;
mod hung;
mod incompressible;
mod injected;
mod kin;
mod leaving;
mod lends;
mod needs;
mod otherlibcs;
mod pageout;
mod pauses;
mod preloads;
mod qemu;
mod read_only;
mod redis;
mod remote;
mod signalled;
mod snapshot;
mod torture;
mod units;
mod userfaults;
mod without_move;
mod written;

use harness::*;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The system's Python: a version manager's shim is a script, and has no NumPy.
pub fn python() -> Option<PathBuf> {
    need("python3")
}

/// The same, if it has NumPy.
pub fn python_with_numpy() -> Option<PathBuf> {
    let python = python()?;
    let found = Command::new(&python).args(["-c", "import numpy"]).output();
    if !found.is_ok_and(|o| o.status.success()) {
        missing("NumPy is not installed (./test installs it when run as root)");
        return None;
    }
    Some(python)
}

/// Text that compresses like logs and prose, from a fixed seed: lines of `words` to three times as many common words, and numbers.
fn text(bytes: usize, words: u64) -> String {
    const WORDS: [&str; 24] = [
        "the", "memory", "of", "page", "fault", "kernel", "reads", "request", "served", "in", "from", "user", "error",
        "while", "writing", "to", "block", "and", "swap", "returned", "status", "time", "a", "session",
    ];
    let mut rng = 88_172_645_463_325_252_u64;
    let mut next = move || {
        rng ^= rng << 13;
        rng ^= rng >> 7;
        rng ^= rng << 17;
        rng
    };
    let mut text = String::with_capacity(bytes + 40 * words as usize);
    while text.len() < bytes {
        let _ = write!(text, "{:06} ", next() % 1_000_000);
        for _ in 0..words + next() % (2 * words) {
            // The square favours the first words.
            let r = (next() % 24) * (next() % 24) / 24;
            text.push_str(WORDS[r as usize]);
            text.push(' ');
        }
        let _ = writeln!(text, "{}", next() % 500);
    }
    text
}

fn text_file(dir: &Path, bytes: usize, words: u64) -> PathBuf {
    let path = dir.join("text");
    std::fs::write(&path, text(bytes, words)).expect("the input");
    path
}

/// A C source with many functions over one structure: `gcc` keeps all of them until the end.
fn c_source(functions: usize) -> String {
    let mut c = String::from(
        "struct node { int id, kind; long weight[8]; struct node *left, *right; };\n\
         extern long note(const char *, long);\n",
    );
    for f in 0..functions {
        let k = f % 13;
        let m = f % 7 + 1;
        let _ = write!(
            c,
            "static long helper{f}(struct node *n, long a)\n{{\n  \
             return n->weight[{m}] * a + n->kind - {f};\n}}\n\
             long work{f}(struct node *n, long a, long b)\n{{\n  \
             long sum = note(\"work {f}\", a);\n  \
             if (sum > {f}000) sum -= n->id * {m};\n  \
             else if (n->kind == {k}) sum ^= n->weight[{m}] << {k};\n  \
             switch (n->kind) {{\n  \
             case 1: sum += a * b; break;\n  \
             case 2: sum -= n->left ? n->left->id : {m}; break;\n  \
             case 3: sum += helper{f}(n->right, b); break;\n  \
             default: sum = sum * 31 + {f};\n  }}\n  \
             return note(\"done {f}\", sum);\n}}\n",
        );
    }
    c
}

#[test]
fn python_dicts_and_lists() {
    let _alone = alone();
    let Some(python) = python() else { return };
    Subject::new("python dicts", &[&python, &fixture("dicts.py")]).keeps_limit().check();
}

#[test]
fn numpy_sort() {
    let _alone = alone();
    let Some(python) = python_with_numpy() else {
        return;
    };
    Subject::new("numpy sort", &[&python, &fixture("arrays.py"), &"sort"]).keeps_limit().check();
}

#[test]
fn numpy_matmul() {
    let _alone = alone();
    let Some(python) = python_with_numpy() else {
        return;
    };
    Subject::new("numpy matmul", &[&python, &fixture("arrays.py"), &"matmul"]).keeps_limit().check();
}

#[test]
fn numpy_random_access() {
    let _alone = alone();
    let Some(python) = python_with_numpy() else {
        return;
    };
    Subject::new("numpy random", &[&python, &fixture("arrays.py"), &"random"]).keeps_limit().check();
}

#[test]
fn python_multiprocessing_with_fork() {
    let _alone = alone();
    let Some(python) = python() else { return };
    Subject::new("multiprocessing", &[&python, &fixture("forks.py")]).check();
}

#[test]
fn exit_status_and_signal_are_the_programs_own() {
    let _alone = alone();
    let Some(python) = python() else { return };
    for how in ["exit", "signal"] {
        Subject::new("ends", &[&python, &fixture("ends.py"), &how]).fails().check();
    }
}

#[test]
fn threads_and_every_memory_call() {
    let _beside = beside();
    let Some(mix) = compile_c("mix") else { return };
    for seed in ["1", "2"] {
        Subject::new("memory calls", &[&mix, &seed]).check();
    }
}

/// The story: the kernel reports `mremap` after it has let go of the mappings. So another thread's call may get the place that
/// became free, and be reported first. Nine of ten runs read zeros or another piece's pages until the calls were ordered.
#[test]
fn what_moves_to_where_another_was() {
    let _beside = beside();
    let Some(remaps) = compile_c("remaps") else { return };
    for seed in ["1", "2"] {
        Subject::new("remaps", &[&remaps, &seed]).check();
    }
}

/// The story: a thread with a second signal pending does not sleep for the page that the first signal's frame is written to, but
/// faults as fast as it can, and the kernel hands out faults before events. The event of another thread's `mremap`, without which
/// no page may come in, was not reached for minutes. And where the next `mremap` always began when one had ended, hardly a page
/// came in between.
#[test]
fn faults_are_served_beside_threads_that_move_memory_all_the_time() {
    let _beside = beside();
    let Some(frames) = compile_c("frames") else { return };
    for seed in ["1", "2", "3"] {
        Subject::new("frames", &[&frames, &seed]).check();
    }
}

/// The story: under a limit of 24 MiB, three threads that filled 48 MiB at once had filled up to 42 before the ticker got a CPU.
#[test]
fn several_threads_that_fill_memory_at_once_keep_the_limit() {
    let _beside = beside();
    let Some(frames) = compile_c("frames") else { return };
    for seed in ["1", "2", "3", "4"] {
        let run = Subject::new("frames", &[&frames, &seed, &"0"]).start_limited(24 * MIB).finish();
        run.say("frames", "no movers", Some(24 * MIB));
        assert!(run.status.success(), "{}", run.describe());
        assert_limited("frames", &run, Some(30 * MIB));
    }
}

/// The story: when `mremap` enlarges locked memory, the kernel fills the new part before it reports the move, and until then no
/// page can come in. The call waited forever, and all threads with it.
#[test]
fn locked_memory_that_grows_and_moves() {
    let _beside = beside();
    let Some(grows) = compile_c("growslocked") else { return };
    Subject::new("grows locked", &[&grows]).check();
    Subject::new("grows locked, without MOVE", &[&grows]).without_move().check();
}

/// The story: memory mapped beside other memory is one piece to the program, but two mappings if only one was managed when both
/// had been written to. `mremap` of both was refused (EFAULT), as the kernel moves one; so were moves of several mappings at
/// once, which later kernels allow. It still failed for a program with all its descriptors in use, as asking for the mappings
/// took one.
#[test]
fn what_is_mapped_side_by_side_moves_as_one() {
    let _beside = beside();
    let Some(side) = compile_c("sidebyside") else { return };
    for seed in ["1", "2"] {
        Subject::new("side by side", &[&side, &seed]).check();
    }
    Subject::new("side by side, no descriptor left", &[&side, &"5", &"full"]).check();
    Subject::new("side by side, without MOVE", &[&side, &"3"]).without_move().check();
    let events = Subject::new("side by side, events late", &[&side, &"4"]);
    injected::survives(&events, 20 << 20, &[(&["event"], "event=1/50")]);
}

/// The story: another process of the group held what could not be taken out, and all but the last pages of this one were evicted
/// again and again. Eight threads that each needed four pages at once did nothing but fault.
#[test]
fn threads_that_need_several_pages_at_once_in_a_group_that_another_fills() {
    let _beside = beside();
    let Some(several) = compile_c("several") else { return };
    Subject::new("several pages at once", &[&several]).check();
    Subject::new("several pages at once, without MOVE", &[&several]).without_move().check();
}

/// Messages contain the seeds: `model SEED` does the same again.
#[test]
fn every_call_agrees_with_a_flat_model() {
    let _beside = beside();
    let Some(model) = compile_c("model") else { return };
    let new = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_secs());
    for seed in [1, new] {
        say(&format!("model: seed {seed}"));
        Subject::new("flat model", &[&model, &seed.to_string()]).check();
    }
}

/// Children made by libc's `clone` and `syscall` read zeros where their parent's pages were out: only `fork` gave a child its
/// memory.
#[test]
fn forks_made_without_fork() {
    let _beside = beside();
    let Some(ways) = compile_c("rawfork") else { return };
    Subject::new("raw forks", &[&ways]).check();
}

/// Memory that should be zeros in children (MADV_WIPEONFORK, as random number generators use it) was the parent's where it was
/// out. It still was if the advice was also for a hole, or also for a file, which fails after the rest has taken it, or was given
/// by `process_madvise`.
#[test]
fn what_is_wiped_on_fork() {
    let _beside = beside();
    let Some(wipes) = compile_c("wipes") else { return };
    Subject::new("wiped on fork", &[&wipes]).check();
    // The story: advice given by process_madvise, or taken in part, went unnoticed.
    for how in ["hole", "file", "process"] {
        let mut wiped = Subject::new("wiped on fork", &[&wipes, &how]);
        wiped.percents = &[50];
        wiped.check();
    }
}

/// The story: the kernel does not report that attaching shared memory (`shmat` with SHM_REMAP) unmapped other memory. What was
/// mapped there after the detach got the contents that had been out there before, where there should have been zeros.
#[test]
fn memory_attached_over() {
    let _alone = alone();
    let Some(segments) = compile_c("segments") else { return };
    Subject::new("segments", &[&segments]).check();
}

/// The story: V8 reserves its heap in pieces of 256 KiB, and later makes each writable. Only memory that was mapped writable woke
/// anybody. So the heaps of several workers were filled by the kernel before they were found, on a busy machine up to twice the
/// limit.
#[test]
fn memory_reserved_in_pieces() {
    let _alone = alone();
    let Some(pieces) = compile_c("pieces") else { return };
    let run = Subject::new("pieces", &[&pieces]).start_limited(24 * MIB).finish();
    run.say("pieces", "", Some(24 * MIB));
    assert!(run.status.success(), "{}", run.describe());
    assert_eq!(run.stdout.text(), "managed before it is filled\n", "{}", run.describe());
}

/// The story: the kernel fills a mapping with MAP_POPULATE within the call, so 64 MiB under a limit of 32 reached two and three
/// times the limit before any of it was managed.
#[test]
fn memory_mapped_filled() {
    let _alone = alone();
    let Some(populates) = compile_c("populates") else { return };
    let (limit, slack) = (32 * MIB, 16 * MIB);
    let run = Subject::new("populates", &[&populates]).start_limited(limit).finish();
    run.say("populates", "", Some(limit));
    assert!(run.status.success(), "{}", run.describe());
    let most: u64 = run.stdout.text().trim().parse().unwrap_or_else(|_| panic!("{}", run.describe()));
    assert!(most * 1024 < limit + slack, "it held {most} KiB when the call returned\n{}", run.describe());
}

/// A thread whose stack or control block was out waited forever when it forked: it held the lock, or was the only thread woken
/// to take it, and the threads that could serve its fault waited for that lock.
#[test]
fn threads_on_their_own_stacks() {
    let _beside = beside();
    let Some(stacks) = compile_c("ownstack") else { return };
    Subject::new("own stacks", &[&stacks]).check();
}

/// The story: a thread's former stack stayed excluded after it was unmapped, as nothing reports that. A block that `mremap` moved
/// to its place was managed all the same, and was zeros in forked children; small mappings there were not managed at all.
#[test]
fn memory_where_stacks_were() {
    let _beside = beside();
    let Some(gone) = compile_c("stacksgone") else { return };
    Subject::new("stacks gone", &[&gone]).check();
}

/// The story: the kernel notes the end of a thread that `clone` made at an address that the program names, and serves no fault of
/// a thread that ends: if that address was out, threads that waited for the end waited forever. The same happened with threads
/// made by the call's number, and with those that named the address themselves later.
#[test]
fn threads_made_by_clone_are_seen_to_end() {
    let _beside = beside();
    let Some(threads) = compile_c("ownthread") else { return };
    for how in ["clone", "call", "structure", "late"] {
        Subject::new("own threads", &[&threads, &how]).check();
    }
}

#[test]
fn fork_storm() {
    let _beside = beside();
    let Some(storm) = compile_c("forkstorm") else {
        return;
    };
    Subject::new("fork storm", &[&storm, &"1"]).check();
}

/// Runs a program without a limit and with one, where [`Subject::check`] does not fit: both end well and print the same.
fn same_under(subject: &Subject, limit_bytes: u64, how: &str) -> Outcome {
    let (plain, run) = (subject.start_plain().finish(), subject.start_limited(limit_bytes).finish());
    run.say(subject.name, how, Some(limit_bytes));
    let same = run.status == plain.status && run.stdout.hash == plain.stdout.hash;
    assert!(plain.status.success() && same, "{}", run.describe());
    run
}

/// The story: a program that read and wrote at random within three quarters of its memory was left much less than that. Each page
/// by which the pool grew freed a whole batch of frames, and one of them was given back: 17 MiB of 72 were free frames.
#[test]
fn free_frames_do_not_pile_up() {
    let _alone = alone();
    let Some(random) = compile_c("random") else { return };
    let run = same_under(&Subject::new("random", &[&random, &"96", &"300000"]), 72 * MIB, "72 MiB");
    let held = number(&run, "peak_held");
    assert!((96 * MIB..104 * MIB).contains(&held), "{} MiB for 96\n{}", held / MIB, run.describe());
}

/// The story: a program that executed a pipe waited for somebody to write to it, where the kernel refuses. And a program that
/// told a socket to stop lending, or asked for it in a wrong way, was told that the socket cannot do it.
#[test]
fn calls_with_strange_arguments() {
    let _beside = beside();
    let Some(edges) = compile_c("edges") else { return };
    let pipe = scratch("edges-pipe").join("pipe");
    let run = same_under(&Subject::new("edges", &[&edges, &pipe]), 32 * MIB, "32 MiB");
    let lent = "lent: done EINVAL EFAULT EINVAL done EOPNOTSUPP EBADF ENOTSOCK\n".repeat(2);
    assert_eq!(run.stdout.text(), format!("a pipe: 1, a bad address: 1\nspawned: 1\n{lent}0 pages filled\n"));
}

/// The story: a program wrote memory that was out to standard error, so the kernel held the file's lock while it waited for the
/// handler. A thread that held the pager's lock printed, to the same file, that the group was full, and waited for the file's
/// lock: all hung, each time.
#[test]
fn what_is_said_where_the_program_writes_what_is_out() {
    let _beside = beside();
    let Some(says) = compile_c("says") else { return };
    for how in ["file", "pipe"] {
        same_under(&Subject::new("says", &[&says, &how]), 32 * MIB, how);
    }
}

/// The story: a program was started without a standard error, and uzswap's messages went to the first file that it had opened.
#[test]
fn nothing_is_said_where_there_is_no_standard_error() {
    let _beside = beside();
    let Some(says) = compile_c("says") else { return };
    let script = format!("exec {} closed 2>&-", says.display());
    let run = same_under(&Subject::new("says", &[&"/bin/sh", &"-c", &script]), 32 * MIB, "closed");
    assert_eq!(run.stdout.text(), "file 2 has 0 bytes\n");
}

/// The story: a process whose first thread has ended while others go on is a zombie without memory by all that /proc says. Its
/// limit was given up, and all others took it for dead.
#[test]
fn first_threads_that_end() {
    let _beside = beside();
    let Some(ends) = compile_c("firstends") else { return };
    let run = same_under(&Subject::new("first thread ends", &[&ends, &"64", &"4"]), 24 * MIB, "24 MiB");
    let (held, peak) = (number(&run, "peak_held"), number(&run, "peak"));
    assert!(held > 60 * MIB && peak < 26 * MIB, "{}", run.describe());
    // Beside a process that starts when the first one's main thread has ended, with a disk. (The whole process may have ended
    // before anybody sees that its first thread has. Then the script used to look forever, without uzswap, too.)
    let script = format!(
        "{0} 32 2 all & until grep -qs ') Z' /proc/$!/stat || ! kill -0 $! 2>/dev/null; do :; done; {0} 24 2 all; wait $!",
        ends.display()
    );
    let subject = Subject::new("first threads end", &[&"/bin/sh", &"-c", &script]).with(&["--swap", "1G"]);
    let (plain, run) = (subject.start_plain().finish(), subject.start_limited(32 * MIB).finish());
    run.say(subject.name, "disk", Some(32 * MIB));
    let lines = |run: &Outcome| {
        let mut lines = run.stdout.text().lines().map(str::to_owned).collect::<Vec<_>>();
        lines.sort();
        lines
    };
    assert!(run.status.success() && lines(&run) == lines(&plain), "{}", run.describe());
}

#[test]
fn sqlite_in_memory() {
    let _alone = alone();
    let Some(sqlite) = need("sqlite3") else {
        return;
    };
    let script = format!(".read {}", fixture("memory.sql").display());
    Subject::new("sqlite", &[&sqlite, &"-batch", &":memory:", &script]).keeps_limit().check();
}

#[test]
fn gnu_sort() {
    let _alone = alone();
    let Some(sort) = need("sort") else { return };
    // Short lines in as much memory are read at random several times as often, which takes a minute.
    let input = text_file(&scratch("sort"), 44 << 20, 40);
    Subject::new("sort", &[&sort, &"--parallel=2", &"-S", &"400M", &"-k2", &input]).keeps_limit().check();
}

#[test]
fn xz_9() {
    let _alone = alone();
    let Some(xz) = need("xz") else { return };
    let input = text_file(&scratch("xz"), 2 << 20, 4);
    // Like -9, except for how far it looks for matches: that uses all its memory at random in each step, 1.9 million faults of 35
    // us.
    Subject::new("xz -9, depth 2", &[&xz, &"--lzma2=preset=9,depth=2", &"-T1", &"-c", &input]).check();
}

#[test]
fn gcc_on_a_large_source() {
    let _alone = alone();
    let Some(gcc) = need("gcc") else { return };
    let source = scratch("gcc").join("large.c");
    std::fs::write(&source, c_source(400)).expect("the source");
    Subject::new("gcc -O1", &[&gcc, &"-O1", &"-S", &"-o", &"-", &source]).keeps_limit().check();
}

#[test]
fn java_heap() {
    let _alone = alone();
    let (Some(javac), Some(java)) = (need("javac"), need("java")) else {
        return;
    };
    let dir = scratch("java");
    build(Command::new(javac).arg("-d").arg(&dir).arg(fixture("Heap.java")));
    // A quarter is less than it can do with even if all else is compressed: it holds some 58 of 37 MiB, and the report says so.
    Subject::new("java", &[&java, &"-Xmx256m", &"-cp", &dir, &"Heap"]).keeps_limit_but(&[(25, 72 * MIB)]).check();
}

#[test]
fn node_heap() {
    let _alone = alone();
    let Some(node) = need("node") else { return };
    Subject::new("node", &[&node, &fixture("heap.js")]).keeps_limit().check();
}

#[test]
fn go_heap() {
    let _alone = alone();
    let (Some(go), Some(_)) = (need("go"), need("cc")) else {
        return;
    };
    let program = scratch("go").join("heap");
    // The build cache stays between runs: the first one compiles Go's own library.
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("go-cache");
    build(
        Command::new(go)
            .env("CGO_ENABLED", "1")
            .env("GOCACHE", cache)
            .env("GOTOOLCHAIN", "local")
            .args(["build", "-o"])
            .arg(&program)
            .arg(fixture("heap.go")),
    );
    Subject::new("go", &[&program]).keeps_limit().check();
}

#[test]
fn stress_ng_vm_verified() {
    let _alone = alone();
    let Some(stress) = need("stress-ng") else {
        return;
    };
    for method in ["incdec", "rand-set", "walk-1d"] {
        let argv: [&dyn AsRef<std::ffi::OsStr>; 12] = [
            &stress,
            &"--vm",
            &"1",
            &"--vm-bytes",
            &"96M",
            &"--vm-method",
            &method,
            &"--verify",
            &"-t",
            &"2",
            &"--temp-path",
            &env!("CARGO_TARGET_TMPDIR"),
        ];
        Subject::new("stress-ng", &argv).prints_anything().keeps_limit().check();
    }
}

/// The story: uzswap's threads took a signal for themselves that programs may use, the last one. A wait for signals also takes
/// those for the whole process. So a program that blocked that signal, and took it when it was ready, found most of them gone.
#[test]
fn all_signals_are_the_programs_own() {
    let _beside = beside();
    let Some(python) = python() else { return };
    let script = "import os, signal\n\
                  memory = [bytes([n % 251]) * 4096 for n in range(10240)]\n\
                  signals = range(signal.SIGRTMIN, signal.SIGRTMAX + 1)\n\
                  signal.pthread_sigmask(signal.SIG_BLOCK, signals)\n\
                  for n in signals:\n\
                  \x20   came = 0\n\
                  \x20   for i in range(300):\n\
                  \x20       os.kill(os.getpid(), n)\n\
                  \x20       os.sched_yield()\n\
                  \x20       came += signal.sigtimedwait([n], 0) is not None\n\
                  \x20   if came != 300: print(n, 'came', came, 'times')\n\
                  print(sum(page[7] for page in memory))";
    for limit in [16, 256] {
        let subject = Subject::new("signals", &[&python, &"-c", &script]);
        let plain = subject.start_plain().finish();
        let run = subject.start_limited(limit * MIB).finish();
        assert!(run.status.success() && run.stdout.text() == plain.stdout.text(), "{}", run.describe());
        assert_eq!(plain.stdout.text().lines().count(), 1, "{}", plain.describe());
    }
}

/// The story: `strace -f` also traced uzswap's threads. When it read a call's argument that was out, it waited for the thread
/// that brings it, which had stopped to report a call of its own to strace: both waited forever.
#[test]
fn a_tracer_reads_what_is_out() {
    let _alone = alone();
    let (Some(python), Some(strace)) = (python(), need("strace")) else { return };
    let script = "import os\n\
                  memory = bytearray(b'\\x07') * (48 << 20)\n\
                  null = os.open('/dev/null', os.O_WRONLY)\n\
                  view = memoryview(memory)\n\
                  print(sum(os.write(null, view[at:at + 1]) for at in range(0, len(memory), 4096)))";
    let mut subject = Subject::new("strace", &[&python, &"-c", &script]);
    subject.before = [strace.as_os_str(), "-f".as_ref(), "-o".as_ref(), "/dev/null".as_ref()].map(Into::into).into();
    let run = subject.start_limited(24 * MIB).finish();
    if run.stderr.text().contains("ptrace") {
        return skip(&format!("programs cannot be traced here: {}", run.stderr.text()));
    }
    assert!(run.status.success() && run.stdout.text() == "12288\n", "{}", run.describe());
    assert_limited("strace", &run, Some(with_slack(24 * MIB)));
}

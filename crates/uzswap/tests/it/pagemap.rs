//! `uzswap pagemap` of shared regions, processes, and the library's regions.

use crate::cli::start_python;
use serde_json::Value;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::os::fd::FromRawFd;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use tempfile::TempDir;
use uzswap::{Options, Region, SharedOptions, SharedRegion};

/// Held by each test with regions of its own: a request to this process goes to all its regions.
static WITH_REGIONS: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn pagemap(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_uzswap")).arg("pagemap").args(args).output().unwrap()
}

fn json(args: &[&str]) -> Value {
    let output = pagemap(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_shared_regions_pages_are_shown_and_moved() {
    let dir = TempDir::new().unwrap();
    let (socket, drawing) = (dir.path().join("region"), dir.path().join("region.svg"));
    let region = SharedRegion::create(4 << 20, &SharedOptions::new(8 << 20)).unwrap();
    region.serve(&socket).unwrap();
    let m = region.map().unwrap();
    for page in 0..100 {
        // SAFETY: within the mapping, which nobody else uses.
        unsafe { m.as_mut_ptr().add(page * 4096).cast::<u64>().write_volatile(page as u64 + 1) };
    }
    let socket = socket.to_str().unwrap();
    let found = json(&[socket, "--json", "--runs"]);
    assert_eq!((&found[0]["present"], &found[0]["swapped"]), (&100.into(), &0.into()), "{found}");
    assert_eq!(found[0]["runs"][0]["to"], 100);
    let found = json(&[socket, "--json", "--page-out", "0..256K"]);
    assert_eq!((&found[0]["present"], &found[0]["swapped"]), (&36.into(), &64.into()), "{found}");
    // The same by the owner's process id.
    let by_pid = json(&[&std::process::id().to_string(), "--json"]);
    let same = |f: &Value| f["present"] == 36 && f["swapped"] == 64;
    assert!(by_pid.as_array().unwrap().iter().any(same), "{by_pid}");
    let found = json(&[socket, "--json", "--page-in", "all"]);
    assert_eq!(found[0]["present"], 100);
    let output = pagemap(&[socket, "--svg", drawing.to_str().unwrap(), "--runs"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("present") && text.contains('█') && text.contains("0x000000000000-0x000000064000"), "{text}");
    let drawing = std::fs::read_to_string(drawing).unwrap();
    assert!(drawing.starts_with("<svg") && drawing.matches("<rect").count() > 1000);
}

#[test]
fn a_regions_written_and_protected_pages_are_shown() {
    let _alone = WITH_REGIONS.lock().unwrap_or_else(|e| e.into_inner());
    let options = Options { track_writes: true, ..Options::new(8 << 20) };
    let region = Region::new(4 << 20, &options).unwrap();
    // SAFETY: within the region, which nobody else uses. (Downwards: a fault brings no neighbours.)
    let write =
        |page: usize| unsafe { region.as_mut_ptr().add(page * 4096).cast::<u64>().write_volatile(page as u64 + 1) };
    (0..100).rev().for_each(write);
    region.clear_soft_dirty(0..4 << 20).unwrap();
    [70, 50, 3].into_iter().for_each(write);
    region.protect(60 * 4096..80 * 4096).unwrap();
    region.page_out(0..64 * 4096);
    let found = json(&[&std::process::id().to_string(), "--json"]);
    let of = format!("region of process {} at {:#x}", std::process::id(), region.as_mut_ptr() as usize);
    let found = found.as_array().unwrap().iter().find(|f| f["what"] == of.as_str()).expect("its page map");
    let count = ["present", "swapped", "write_protected"].map(|key| found[key].as_u64().unwrap());
    assert_eq!(count, [36, 64, 20], "{found}");
    let runs = json(&[&std::process::id().to_string(), "--json", "--runs"]);
    let runs = runs.as_array().unwrap().iter().find(|f| f["what"] == of.as_str()).unwrap()["runs"].clone();
    let is = |run: &Value, word: &str| run["state"].as_array().unwrap().iter().any(|w| w == word);
    let written =
        runs.as_array().unwrap().iter().filter(|r| is(r, "soft-dirty") && (is(r, "present") || is(r, "swapped")));
    let written: Vec<_> = written.map(|r| (r["from"].as_u64().unwrap(), r["to"].as_u64().unwrap())).collect();
    assert_eq!(written, [(3, 4), (50, 51), (70, 71)], "{runs}");
}

/// A child forked by this process, killed when this is dropped. It has done what it is to do.
struct Forked {
    pid: i32,
    /// It waits for this to be closed.
    _end: std::fs::File,
}

impl Forked {
    /// Forks a child that does something and then waits for its end.
    fn new(does: impl FnOnce()) -> Self {
        let mut ends = [[0; 2]; 2];
        // SAFETY: descriptors are owned at once. The child does what a program of several threads may do after fork, and ends.
        unsafe {
            assert!(ends.iter_mut().all(|ends| libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) == 0));
            let own = ends.map(|ends| ends.map(|end| std::fs::File::from_raw_fd(end)));
            let [[waits, ends], [mut told, mut tells]] = own;
            let pid = libc::fork();
            if pid == 0 {
                drop(ends);
                does();
                let _ = tells.write_all(b".").and_then(|()| (&waits).read(&mut [0]).map(drop));
                libc::_exit(0);
            }
            drop(tells);
            let said = told.read_exact(&mut [0]);
            let child = Self { pid, _end: ends };
            said.expect("the child is there");
            child
        }
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        // SAFETY: a child of this process, which is waited for once.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

/// The story: `uzswap pagemap` of a forked child showed its parent's region, of which it has no memory. (A child with a region of
/// its own at the same place was shown with both, perhaps with its parent's soft-dirty bits for its own.)
#[test]
fn a_forked_child_is_not_shown_its_parents_regions() {
    let _alone = WITH_REGIONS.lock().unwrap_or_else(|e| e.into_inner());
    let options = Options { track_writes: true, ..Options::new(8 << 20) };
    let region = Region::new(4 << 20, &options).unwrap();
    // SAFETY: within the region, which nobody else uses.
    unsafe { region.as_mut_ptr().write_volatile(1) };
    let none = Forked::new(|| ());
    let output = pagemap(&[&none.pid.to_string()]);
    let text = String::from_utf8(output.stderr).unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(!output.status.success() && text.contains("has no page map"), "{shown}{text}");
    let one = Forked::new(|| {
        let own = Region::new(1 << 20, &options).unwrap();
        // SAFETY: within the region, which nobody else uses.
        (0..5).for_each(|page| unsafe { own.as_mut_ptr().add(page * 4096).write_volatile(1) });
        std::mem::forget(own);
    });
    let found = json(&[&one.pid.to_string(), "--json"]);
    let found = found.as_array().unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0]["what"].as_str().unwrap().contains("region") && found[0]["pages"] == 256, "{found:?}");
    let found = json(&[&std::process::id().to_string(), "--json"]);
    assert!(found.as_array().unwrap().iter().any(|f| f["pages"] == 1024), "{found}");
}

/// A Python program that holds more text than its limit; it prints its pid, and its child's.
const PROGRAM: &str = "
import os, sys
d = [str(i) * 20 for i in range(400_000)]
child = os.fork()
if child == 0:
    ok = all(d[i] == str(i) * 20 for i in range(0, 400_000, 70))
    print('child', os.getpid(), ok, flush=True)
    sys.stdin.read()
    os._exit(0)
print('parent', os.getpid(), flush=True)
os.waitpid(child, 0)
";

#[test]
fn a_managed_process_and_its_forked_child_have_their_page_maps() {
    let Some(mut run) = start_python(&["--memory", "32M"], PROGRAM) else { return };
    let lines = BufReader::new(run.stdout.take().unwrap()).lines().take(2);
    for line in lines {
        let line = line.unwrap();
        let words: Vec<_> = line.split(' ').collect();
        assert!(words[0] == "parent" || words[2] == "True", "{line}");
        let found = json(&[words[1], "--json"]);
        let of = format!("process {}", words[1]);
        let found = found.as_array().unwrap().iter().find(|f| f["what"] == of.as_str()).expect("its own page map");
        let count = |key: &str| found[key].as_u64().unwrap();
        // Some 50 MB of text in 32 MiB.
        assert!(count("swapped") > 4000, "{line}: {found}");
        // (None, if the machine is slow: both wait, and together they need more than the limit.)
        assert!(count("present") <= 8192, "{line}: {found}");
        // lz4, and zstd when the pool crowds the program out.
        let packed: u64 = ["warm", "dense"].iter().map(|tier| found["tiers"][tier].as_u64().unwrap()).sum();
        assert!(packed > 2000, "{line}: {found}");
    }
    drop(run.stdin.take());
    assert!(run.wait().unwrap().success());
}

/// A program that has written to each of 100 pages of its own. It prints where they are, and writes to three of them whenever it
/// is told to.
const WRITER: &str = "
import ctypes, mmap, os, sys
m = mmap.mmap(-1, 100 * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
at = ctypes.addressof(ctypes.c_char.from_buffer(m))
for page in range(100):
    m[page * 4096] = page + 1
print(os.getpid(), at // 4096, flush=True)
for line in sys.stdin:
    for page in (70, 3, 50):
        m[page * 4096 + 5] = 1
    print('written', flush=True)
assert all(m[page * 4096] == page + 1 for page in range(100))
";

/// Starts [`WRITER`]. Returns it, its pid, the first of its pages, and the lines that it prints.
fn start_writer() -> Option<(Child, String, u64, Lines<BufReader<ChildStdout>>)> {
    let mut run = start_python(&["--track-writes", "--memory", "256M"], WRITER)?;
    let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
    let line = lines.next().unwrap().unwrap();
    let (pid, first) = line.split_once(' ').unwrap();
    Some((run, pid.into(), first.parse().unwrap(), lines))
}

#[test]
fn what_a_program_has_written_to_is_shown_and_cleared() {
    let Some((mut run, pid, first, mut lines)) = start_writer() else { return };
    let (mut to, pid) = (run.stdin.take().unwrap(), pid.as_str());
    let bytes = format!("{:x}-{:x}", first * 4096, (first + 100) * 4096);
    let dirty = || -> Vec<(u64, u64)> {
        let found = json(&[pid, "--json", "--runs", "--soft-dirty"]);
        let runs = found[0]["runs"].as_array().unwrap().iter();
        let runs = runs.map(|r| (r["from"].as_u64().unwrap(), r["to"].as_u64().unwrap()));
        // Runs also end where the rest of the state changes.
        let pages = runs.flat_map(|(from, to)| from..to).filter(|page| (first..first + 100).contains(page));
        pages.map(|page| (page - first, page - first + 1)).collect()
    };
    // The first request makes its memory managed, which it was not, far below its limit. All pages count as written.
    let out = pagemap(&[pid, "--page-out", &bytes]);
    assert!(out.status.success(), "{out:?}");
    assert_eq!(dirty().len(), 100);
    let cleared = pagemap(&[pid, "--clear-soft-dirty", &bytes, "--soft-dirty"]);
    let told = String::from_utf8(cleared.stderr).unwrap();
    assert!(cleared.status.success() && told.contains("400 KiB had been written to"), "{told}");
    assert_eq!(dirty(), []);
    for outs in [false, true] {
        to.write_all(b"write\n").unwrap();
        assert_eq!(lines.next().unwrap().unwrap(), "written");
        if outs {
            assert!(pagemap(&[pid, "--page-out", &bytes]).status.success());
        }
        assert_eq!(dirty(), [(3, 4), (50, 51), (70, 71)], "out: {outs}");
        let cleared = json(&[pid, "--clear-soft-dirty", &bytes, "--json"])[0]["cleared"].clone();
        let runs = cleared.as_array().unwrap().iter().map(|r| r["from"].as_u64().unwrap()..r["to"].as_u64().unwrap());
        assert_eq!(runs.flatten().map(|page| page - first).collect::<Vec<_>>(), [3, 50, 70], "{cleared}");
        assert_eq!(dirty(), []);
    }
    let text = String::from_utf8(pagemap(&[pid, "--clear-soft-dirty", "--runs"]).stdout).unwrap();
    assert!(text.contains("was soft-dirty"), "the rest of its memory: {text}");
    drop(to);
    assert!(run.wait().unwrap().success());
}

/// The story: a look at a region of 2 TiB, of which a page was touched, took half a gigabyte until the region ended.
#[test]
fn a_look_at_a_large_region_takes_no_memory() {
    use std::os::unix::fs::MetadataExt;
    let _alone = WITH_REGIONS.lock().unwrap_or_else(|e| e.into_inner());
    const PAGES: u64 = 5 << 26;
    let region = Region::new(PAGES as usize * 4096, &Options { track_writes: true, ..Options::new(8 << 20) }).unwrap();
    // SAFETY: within the region, which nobody else uses.
    unsafe { region.as_mut_ptr().write_volatile(1) };
    let found = json(&[&std::process::id().to_string(), "--json", "--runs"]);
    let found = found.as_array().unwrap().iter().find(|f| f["pages"] == PAGES).unwrap();
    assert_eq!((&found["present"], &found["runs"][0]["to"]), (&1.into(), &1.into()), "{found}");
    let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(|e| std::fs::metadata(e.path()).ok());
    let taken: u64 = files.filter(|m| m.len() == PAGES + 4096).map(|m| m.blocks() * 512).sum();
    assert!(taken > 0 && taken < 1 << 20, "{taken}");
}

/// Sets what a process may have at most of something.
fn let_have(pid: i32, what: libc::__rlimit_resource_t, most: Option<u64>) -> Option<u64> {
    let mut was = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: structures of ours.
    assert_eq!(unsafe { libc::prlimit(pid, what, std::ptr::null(), &raw mut was) }, 0);
    let wanted = libc::rlimit { rlim_cur: most.unwrap_or(was.rlim_max), ..was };
    // SAFETY: as above.
    assert_eq!(unsafe { libc::prlimit(pid, what, &raw const wanted, std::ptr::null_mut()) }, 0);
    Some(was.rlim_cur)
}

/// The story: bits were cleared in a process that could not remember which, and a client that copied those pages missed writes.
#[test]
fn no_bit_is_cleared_where_nothing_can_remember_which() {
    let Some((mut run, pid, first, mut lines)) = start_writer() else { return };
    let (mut to, pid) = (run.stdin.take().unwrap(), pid.as_str());
    let number: i32 = pid.parse().unwrap();
    let bytes = format!("{:x}-{:x}", first * 4096, (first + 100) * 4096);
    json(&[pid, "--clear-soft-dirty", "--json"]);
    for what in [libc::RLIMIT_NOFILE, libc::RLIMIT_FSIZE] {
        to.write_all(b"write\n").unwrap();
        assert_eq!(lines.next().unwrap().unwrap(), "written");
        let was = let_have(number, what, Some(0));
        let refused = pagemap(&[pid, "--clear-soft-dirty", &bytes, "--json"]);
        let_have(number, what, was);
        let text = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success() && refused.stdout.is_empty(), "{text}");
        assert!(text.contains("12 KiB of process") && text.contains("`ulimit -n`"), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        let cleared = json(&[pid, "--clear-soft-dirty", &bytes, "--json"])[0]["cleared"].clone();
        let runs = cleared.as_array().unwrap().iter().map(|r| r["from"].as_u64().unwrap()..r["to"].as_u64().unwrap());
        assert_eq!(runs.flatten().map(|page| page - first).collect::<Vec<_>>(), [3, 50, 70], "{cleared}");
    }
    drop(to);
    assert!(run.wait().unwrap().success());
}

#[test]
fn what_is_not_kept_is_not_shown() {
    crate::cli::agent_built();
    let mut run = Command::new(env!("CARGO_BIN_EXE_uzswap"))
        .args(["run", "--quiet", "--memory", "256M", "--", "/bin/sh", "-c", "echo $$; read line"])
        .env_remove("UZSWAP_GROUP")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = BufReader::new(run.stdout.take().unwrap()).lines().next().unwrap().unwrap();
    // Once its memory is managed, it has a page map.
    assert!(pagemap(&[&pid, "--page-out", "all"]).status.success());
    for args in [[&pid, "--clear-soft-dirty"], [&pid, "--soft-dirty"]] {
        let refused = pagemap(&args);
        let text = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success() && text.contains("--track-writes") && text.lines().count() == 1, "{text}");
    }
    drop(run.stdin.take());
    run.wait().unwrap();
}

#[test]
fn what_has_no_page_map_is_refused_in_a_sentence() {
    for (args, part) in [
        (vec!["1000000000"], "there is no process"),
        (vec!["/nowhere/to/be/found"], "neither a process nor a shared region"),
        (vec!["1", "--page-out", "all"], "in no `uzswap run` of yours"),
    ] {
        let output = pagemap(&args);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && text.contains(part) && text.lines().count() == 1, "{text}");
    }
}

/// A region of this process, paged by a command that knows only its pid.
#[test]
fn a_regions_pages_are_moved_from_outside() {
    let _alone = WITH_REGIONS.lock().unwrap_or_else(|e| e.into_inner());
    let options = Options { track_writes: true, ..Options::new(16 << 20) };
    let region = Region::new(4 << 20, &options).unwrap();
    // Another region, which is left alone if a range is given.
    let other = Region::new(1 << 20, &Options::new(8 << 20)).unwrap();
    // SAFETY: within the regions, which nobody else uses.
    let word = |region: &Region, page: usize| unsafe { region.as_mut_ptr().add(page * 4096).cast::<u64>() };
    // SAFETY: as above.
    (0..200).rev().for_each(|page| unsafe { word(&region, page).write_volatile(page as u64 + 1) });
    // SAFETY: as above.
    (0..50).rev().for_each(|page| unsafe { word(&other, page).write_volatile(page as u64 + 7) });
    let pid = std::process::id().to_string();
    let present = || [&region, &other].map(|r| r.page_map().unwrap().summary().present);
    let at = |page: usize| word(&region, page) as usize;
    let asked = |args: &[&str], part: &str| {
        let output = pagemap(&[&[pid.as_str()], args].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && said.contains(part), "{args:?}: {said}");
    };
    let range = format!("{:x}-{:x}", at(20), at(120));
    asked(&["--page-out", &range], "400 KiB put out");
    assert_eq!(present(), [100, 50]);
    // Other threads write and read meanwhile; every byte stays right.
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (stop, region, word) = (&stop, &region, &word);
        let busy = scope.spawn(move || {
            let mut n = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                for page in (0..200).rev() {
                    // SAFETY: as above; this thread alone writes here.
                    unsafe {
                        assert_eq!(word(region, page).read_volatile(), page as u64 + 1);
                        word(region, page).add(1).write_volatile(n);
                    }
                }
                n += 1;
            }
        });
        (0..6).for_each(|_| asked(&["--page-out", "all", "--page-in", "all"], "brought in"));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        busy.join().unwrap();
    });
    asked(&["--page-in", "all"], "brought in");
    assert_eq!(present(), [200, 50]);
    // The story: a region's bits were cleared from outside, too, and its program missed what it had written.
    region.clear_soft_dirty(0..4 << 20).unwrap();
    // SAFETY: as above.
    unsafe { word(&region, 25).write_volatile(26) };
    for range in [&range, "all"] {
        let refused = pagemap(&[&pid, "--clear-soft-dirty", range, "--page-out", "all"]);
        let text = String::from_utf8(refused.stderr).unwrap();
        assert!(
            refused.status.code() == Some(1) && text.contains("has regions only") && text.lines().count() == 1,
            "{text}"
        );
    }
    assert_eq!(region.take_soft_dirty(0..4 << 20).unwrap(), [25]);
    // Pages that are not touched are idle.
    asked(&["--idle", "0.2"], "in use within 0.2 s");
    assert_eq!((present(), region.working_set()), ([0, 0], 0));
    // SAFETY: as above.
    assert!((0..50).rev().all(|page| unsafe { word(&other, page).read_volatile() } == page as u64 + 7));
    assert_eq!((other.working_set(), present()), (50, [0, 50]));
    let nothing = pagemap(&[&pid, "--page-out", "1000-2000"]);
    let text = String::from_utf8(nothing.stderr).unwrap();
    assert!(!nothing.status.success() && text.contains("no managed memory there"), "{text}");
}

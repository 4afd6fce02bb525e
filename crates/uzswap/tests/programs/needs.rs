//! What tests need before a program runs: their turn, programs that may be missing, places for files, and what is built for them.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread;
use std::time::{Duration, Instant};

static RUNNING: RwLock<()> = RwLock::new(());

/// A guard for tests that measure their programs' memory against a limit: nothing else must compete with these for two CPUs.
pub fn alone() -> RwLockWriteGuard<'static, ()> {
    // A failed test poisons the lock, which does not harm the next one.
    RUNNING.write().unwrap_or_else(|e| e.into_inner())
}

/// A guard for tests of what programs do and are told; other such tests may run at the same time.
pub fn beside() -> RwLockReadGuard<'static, ()> {
    RUNNING.read().unwrap_or_else(|e| e.into_inner())
}

/// Prints a line that the test runner does not capture.
pub fn say(line: &str) {
    let _ = writeln!(io::stderr(), "    {line}");
}

/// The path of a program that these tests need. If it is missing, the test is skipped and says so; under `UZSWAP_TEST_REQUIRE=1`
/// (as in CI) that is a failure.
pub fn need(program: &str) -> Option<PathBuf> {
    let mut dirs: Vec<PathBuf> =
        ["/usr/bin", "/usr/local/bin", "/bin", "/usr/local/go/bin"].iter().map(PathBuf::from).collect();
    dirs.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    match dirs.iter().map(|d| d.join(program)).find(|p| p.is_file()) {
        Some(path) => Some(path),
        None => {
            missing(&format!("{program} is not installed (./test installs it when run as root)"));
            None
        }
    }
}

/// Reports that something a test needs is not installed; a failure if everything is required.
pub fn missing(reason: &str) {
    let test = thread::current().name().unwrap_or("?").to_owned();
    assert!(std::env::var_os("UZSWAP_TEST_REQUIRE").is_none(), "{test}: {reason}, and UZSWAP_TEST_REQUIRE is set");
    skip(reason);
}

/// Reports a test that cannot run on this machine, or with these rights, whatever is installed.
pub fn skip(reason: &str) {
    let test = thread::current().name().unwrap_or("?").to_owned();
    say(&format!("SKIPPED {test}: {reason}"));
}

/// The command under test. `UZSWAP_TEST_BIN` names another one, such as an installed one.
pub fn uzswap() -> PathBuf {
    std::env::var_os("UZSWAP_TEST_BIN").map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_uzswap")), PathBuf::from)
}

/// A file of the fixtures.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/fixtures").join(name)
}

/// A new, empty directory. It is kept after the run, so that a failure can be examined.
pub fn scratch(name: &str) -> PathBuf {
    let dir = scratch_path(name);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).expect("a scratch directory");
    dir
}

fn scratch_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("programs").join(name)
}

/// Runs a build tool to its end; panics with its output if it fails.
pub fn build(command: &mut Command) {
    let out = command.stdin(Stdio::null()).output();
    let out = out.unwrap_or_else(|e| panic!("cannot start {command:?}: {e}"));
    assert!(
        out.status.success(),
        "{command:?}: {}\n{}{}",
        out.status,
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
}

/// A C program of the fixtures; the first test that needs it compiles it.
pub fn compile_c(name: &str) -> Option<PathBuf> {
    static COMPILED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let cc = need("cc")?;
    let mut compiled = COMPILED.lock().unwrap_or_else(|e| e.into_inner());
    if compiled.contains(name) {
        return Some(scratch_path(name).join(name));
    }
    let out = scratch(name).join(name);
    build(
        Command::new(cc)
            .args(["-O2", "-g", "-pthread", "-Wall", "-Werror", "-o"])
            .arg(&out)
            .arg(fixture(&format!("{name}.c"))),
    );
    compiled.insert(name.to_owned());
    Some(out)
}

/// Waits for the line that a program which outlives the command writes to a file at its end.
pub fn line_in(file: &Path) -> String {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let text = fs::read_to_string(file).unwrap_or_default();
        if text.ends_with('\n') {
            return text;
        }
        assert!(Instant::now() < deadline, "the program does not end");
        thread::sleep(Duration::from_millis(20));
    }
}

//! A directory of groups for a test alone (`XDG_RUNTIME_DIR`), and members of its groups: they run `hold.c`, which holds memory with
//! known contents and verifies it.

use crate::cli::{UZSWAP, agent_built, state_and_parent};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub(crate) const MIB: u64 = 1 << 20;

/// Compiles the member's program, once.
fn hold() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        agent_built();
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("hold-{}", std::process::id()));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/fixtures/hold.c");
        let built = Command::new("cc").args(["-O2", "-Wall", "-Werror", "-o"]).arg(&out).arg(source).status();
        assert!(built.expect("a C compiler").success());
        out
    })
}

/// A directory of groups.
pub(crate) struct Place(TempDir);

impl Place {
    pub(crate) fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        agent_built();
        let mut command = Command::new(UZSWAP);
        command.args(args).env("XDG_RUNTIME_DIR", self.0.path());
        command.env_remove("UZSWAP_GROUP").env_remove("LD_PRELOAD").env_remove("UZSWAP_AGENT");
        command
    }

    pub(crate) fn call(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// The one sentence of a failure.
    pub(crate) fn refusal(&self, args: &[&str]) -> String {
        let output = self.call(args);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{args:?}: {text}");
        assert!(text.starts_with("uzswap: ") && text.lines().count() == 1, "{args:?}: {text}");
        text
    }

    /// What `ctl` printed on stderr.
    pub(crate) fn ctl(&self, args: &[&str]) -> String {
        let output = self.call(&[&["ctl"], args].concat());
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{args:?}: {text}");
        text
    }

    pub(crate) fn file(&self, group: &str, name: &str) -> String {
        let output = self.call(&["stat", group, name]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    pub(crate) fn number(&self, group: &str, name: &str) -> u64 {
        self.file(group, name).trim().parse().unwrap()
    }

    pub(crate) fn event(&self, group: &str, file: &str, name: &str) -> u64 {
        let text = self.file(group, file);
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }

    pub(crate) fn start(&self, args: &[&str]) -> Member {
        let mut child = self
            .command(&[&["run", "-q"], args, &["--", hold().to_str().unwrap()]].concat())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Member { child, input, output }
    }
}

/// A member under an `uzswap run` of its own.
pub(crate) struct Member {
    pub(crate) child: Child,
    pub(crate) input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Member {
    pub(crate) fn send(&mut self, line: &str) {
        self.input.as_mut().unwrap().write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    pub(crate) fn answer(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    pub(crate) fn tell(&mut self, line: &str) {
        self.send(line);
        let answer = self.answer();
        assert_eq!(answer, "ok", "{line}: {}", if answer.is_empty() { self.stderr() } else { String::new() });
    }

    /// Everything that it prints on stderr until its end.
    pub(crate) fn stderr(&mut self) -> String {
        let mut text = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        text
    }

    /// Ends it; it verifies its memory once more.
    fn end(mut self) -> (ExitStatus, String) {
        drop(self.input.take());
        let text = self.stderr();
        (self.child.wait().unwrap(), text)
    }

    pub(crate) fn ends_well(self) -> String {
        let (status, text) = self.end();
        assert!(status.success(), "{status}: {text}");
        text
    }

    /// The pid of the command.
    pub(crate) fn command(&self) -> u32 {
        self.child.id()
    }

    /// The pid of the program below the command, which has another child: its witness (`uzswap::witness`).
    pub(crate) fn pid(&self) -> u32 {
        let id = self.child.id();
        let mut found = None;
        eventually("a program below the command", || {
            let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|e| e.file_name().to_str()?.parse().ok());
            let comm = |pid: u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            found = pids
                .into_iter()
                .filter(|pid| state_and_parent(*pid).is_some_and(|(_, parent)| parent == id))
                .find(|pid| !["uzswap\n", "signal-witness\n"].contains(&comm(*pid).as_str()));
            found.is_some()
        });
        found.unwrap()
    }
}

pub(crate) fn rss_anon(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    line.map_or(0, |line| line.trim_end_matches("kB").trim().parse::<u64>().unwrap() * 1024)
}

/// Waits until a condition holds; panics if it does not in time.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What is allowed above a limit, as in all of this project.
pub(crate) fn slack(limit: u64) -> u64 {
    (limit / 20).max(16 * MIB)
}

//! The command line: errors before anything is started, and the program's own input, output, status and signals passed on.

use assert_cmd::Command;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::sync::Once;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The command.
pub const UZSWAP: &str = env!("CARGO_BIN_EXE_uzswap");
pub const AGENT: &str = "libuzswap_agent.so";

/// Builds the agent beside the command, once.
pub fn agent_built() {
    static BUILD: Once = Once::new();
    BUILD.call_once(|| {
        // Tests that run in the background, or under nohup, start with ignored signals, which programs inherit and no shell can
        // trap.
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGUSR1, libc::SIGUSR2] {
            // SAFETY: the disposition is a constant.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        let dir = Path::new(UZSWAP).parent().unwrap();
        let mut build = std::process::Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "-p", "uzswap-agent"]).current_dir(env!("CARGO_MANIFEST_DIR"));
        match dir.file_name().and_then(|name| name.to_str()) {
            Some("debug") | None => {}
            Some(profile) => drop(build.args(["--profile", profile])),
        }
        // `deps/..` is the profile's directory, its parent the target directory.
        build.env("CARGO_TARGET_DIR", dir.parent().unwrap());
        assert!(build.status().unwrap().success(), "the agent does not build");
        assert!(dir.join(AGENT).is_file());
    });
}

/// Reports that something a test needs is not installed. Under `UZSWAP_TEST_REQUIRE=1` (as in CI) the test fails.
fn missing(reason: &str) {
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    assert!(std::env::var_os("UZSWAP_TEST_REQUIRE").is_none(), "{test}: {reason}, and UZSWAP_TEST_REQUIRE is set");
    skip(reason);
}

/// Reports why a test cannot run on this machine, or with these rights, in a way that the test runner does not capture.
pub fn skip(reason: &str) {
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    let _ = writeln!(std::io::stderr(), "    SKIPPED {test}: {reason}");
}

/// A Python that is no script, as a version manager's is. If there is none, the test is skipped.
pub fn python() -> Option<PathBuf> {
    let python = uzswap_lab::programs::python();
    if python.is_none() {
        missing("python3 is not installed (./test installs it when run as root)");
    }
    python
}

/// Starts a Python program under `uzswap run` with these options, with pipes to its input and output. None if there is no Python.
pub fn start_python(options: &[&str], script: &str) -> Option<Child> {
    let python = python()?;
    agent_built();
    let mut run = std::process::Command::new(UZSWAP);
    run.args(["run", "--quiet"]).args(options).arg("--").arg(python).args(["-c", script]).env_remove("UZSWAP_GROUP");
    Some(run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap())
}

/// A process's state (`T` is stopped, `Z` has ended and was not waited for) and its parent; None if it does not exist.
pub fn state_and_parent(pid: u32) -> Option<(char, u32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name, which is in parentheses and may contain any.
    let mut fields = stat.rsplit(')').next()?.split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

pub fn uzswap() -> Command {
    agent_built();
    let mut command = Command::new(UZSWAP);
    command.env_remove("UZSWAP_GROUP").env_remove("LD_PRELOAD").env_remove("UZSWAP_AGENT");
    command
}

pub fn run(args: &[&str]) -> Output {
    uzswap().args(["run", "--memory", "256M"]).args(args).output().unwrap()
}

fn sh(script: &str) -> Output {
    run(&["--quiet", "--", "/bin/sh", "-c", script])
}

/// The one sentence of a refusal; checks that it is one.
pub fn sentence(output: &Output) -> String {
    sentence_of(output, 125)
}

/// The same for a refusal with this exit status.
pub fn sentence_of(output: &Output, status: i32) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(status), "{text}");
    assert!(output.stdout.is_empty());
    assert!(text.starts_with("uzswap: ") && text.ends_with('\n') && text.lines().count() == 1, "{text}");
    text
}

/// Checks that `args` are refused, with a program behind them that would leave a file.
pub fn refused(args: &[&str], parts: &[&str]) {
    let dir = TempDir::new().unwrap();
    let mark = dir.path().join("started");
    let output = uzswap().arg("run").args(args).arg("--").arg("/bin/touch").arg(&mark).output().unwrap();
    let text = sentence(&output);
    for part in parts {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!mark.exists(), "started in spite of: {text}");
}

/// A new directory for files to be executed, which may not be allowed in the one for temporary files.
pub fn for_programs() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A file in `dir` with these permissions.
pub fn file(dir: &TempDir, name: &str, bytes: &[u8], mode: u32) -> PathBuf {
    let (path, written) = (dir.path().join(name), dir.path().join(format!("{name}.written")));
    fs::write(&written, bytes).unwrap();
    copy(&written, &path);
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    path
}

/// Copies a file that may be executed. (In another process: here a child that a neighbouring test forks meanwhile would hold the
/// copy open for writing, and it could not be executed.)
pub fn copy(from: &Path, to: &Path) {
    assert!(std::process::Command::new("cp").arg(from).arg(to).status().unwrap().success());
}

#[test]
fn output_and_status_are_the_programs() {
    for status in [0, 3, 125, 255] {
        let output = sh(&format!("echo out; echo err >&2; exit {status}"));
        assert_eq!(output.status.code(), Some(status));
        assert_eq!(output.stdout, b"out\n");
        assert_eq!(output.stderr, b"err\n");
    }
}

#[test]
fn death_by_signal_is_the_programs() {
    for signal in [libc::SIGKILL, libc::SIGSEGV, libc::SIGTERM, libc::SIGINT, libc::SIGABRT, libc::SIGPIPE] {
        let output = sh(&format!("kill -{signal} $$"));
        assert_eq!(output.status.signal(), Some(signal));
        assert!(output.stderr.is_empty());
    }
}

/// The story: standard streams that were closed were /dev/null in the program, so what it wrote there was lost without an error.
#[test]
fn closed_streams_are_closed_for_the_program() {
    agent_built();
    let script = format!(
        "'{UZSWAP}' run -q -m 64M -- cat /etc/passwd 2>/dev/null >&-; echo $?; \
        exec '{UZSWAP}' run -q -m 64M -- /bin/sh -c 'for n in 0 1 2; do [ ! -e /proc/$$/fd/$n ] || echo $n; done' <&- 2>&-"
    );
    let output = std::process::Command::new("/bin/sh").args(["-c", &script]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "1\n1\n");
}

#[test]
fn input_environment_and_name_are_passed_on() {
    let output = uzswap()
        .args([
            "run",
            "-m",
            "50%",
            "-q",
            "--",
            "sh",
            "-c",
            "cat; echo $MARK $0 $*; echo $LD_PRELOAD >&2",
            "name",
            "a b",
            "--quiet",
        ])
        .env("MARK", "mark")
        .env("LD_PRELOAD", "libc.so.6")
        .write_stdin("in\n")
        .output()
        .unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "in\nmark name a b --quiet\n");
    let preload = String::from_utf8(output.stderr).unwrap();
    assert!(preload.ends_with(&format!("{AGENT}:libc.so.6\n")), "{preload}");
}

#[test]
fn the_group_is_found_in_the_environment_and_not_inherited() {
    let output = sh("test -r $UZSWAP_GROUP && head -c 2 $UZSWAP_GROUP | od -An -tx1; ls /proc/$$/fd | tr '\\n' ' '");
    let text = String::from_utf8(output.stdout).unwrap();
    let magic = uzswap_pager::group::MAGIC.to_le_bytes();
    assert!(text.contains(&format!(" {:02x} {:02x}\n", magic[0], magic[1])), "{text}");
}

#[test]
fn ignored_and_blocked_signals_stay_as_they_were() {
    let status = |command: &mut std::process::Command| {
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines()
            .filter(|line| line.starts_with("SigIgn") || line.starts_with("SigBlk"))
            .collect::<Vec<_>>()
            .join(" ")
    };
    let with_signals = |command: &mut std::process::Command| {
        // SAFETY: async-signal-safe calls only; the set is initialised by sigemptyset.
        unsafe {
            command.pre_exec(|| {
                let mut set = std::mem::zeroed();
                libc::sigemptyset(&raw mut set);
                libc::sigaddset(&raw mut set, libc::SIGUSR2);
                libc::sigprocmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut());
                libc::signal(libc::SIGHUP, libc::SIG_IGN);
                libc::signal(libc::SIGPIPE, libc::SIG_IGN);
                // A signal that libc uses itself where there are threads, and lets nobody set.
                let ignored = [libc::SIG_IGN, 0, 0, 0];
                libc::syscall(libc::SYS_rt_sigaction, 33, ignored.as_ptr(), 0, 8);
                Ok(())
            });
        }
    };
    agent_built();
    let mut plain = std::process::Command::new("/bin/cat");
    plain.arg("/proc/self/status");
    with_signals(&mut plain);
    let mut limited = std::process::Command::new(UZSWAP);
    limited.args(["run", "-q", "-m", "256M", "/bin/cat", "/proc/self/status"]);
    with_signals(&mut limited);
    assert_eq!(status(&mut limited), status(&mut plain));
    let mut limited = std::process::Command::new(UZSWAP);
    limited.args(["run", "-q", "-m", "256M", "/bin/cat", "/proc/self/status"]);
    assert_eq!(status(&mut limited), status(std::process::Command::new("/bin/cat").arg("/proc/self/status")));
}

/// Starts a script under uzswap and waits until it has written its first line.
fn started(script: &str) -> (std::process::Child, std::io::BufReader<std::process::ChildStdout>) {
    agent_built();
    let mut child = std::process::Command::new(UZSWAP)
        .args(["run", "-q", "-m", "256M", "--", "/bin/sh", "-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut output, &mut line).unwrap();
    (child, output)
}

fn send(pid: u32, signal: i32) {
    // SAFETY: no memory is involved.
    assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
}

#[test]
fn signals_sent_to_us_reach_the_program() {
    for signal in [libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2, libc::SIGINT, libc::SIGWINCH] {
        let (mut child, _output) =
            started(&format!("trap 'exit 40' {signal}; echo ready; while :; do sleep 0.02; done"));
        send(child.id(), signal);
        assert_eq!(child.wait().unwrap().code(), Some(40), "signal {signal}");
    }
}

/// The story: a program that sent a signal to its parent, or to its whole group, got it back from the command.
#[test]
fn what_the_program_sends_itself_it_does_not_get_back() {
    // The command gets the first one before the second, which another process sends.
    let script = "trap 'echo one' USR1; trap 'exit 40' USR2; kill -USR1 $PPID; echo ready; \
        sh -c 'kill -USR2 $0' $PPID; while :; do sleep 0.02; done";
    let (mut child, mut output) = started(script);
    let mut said = String::new();
    std::io::Read::read_to_string(&mut output, &mut said).unwrap();
    assert_eq!((child.wait().unwrap().code(), said.as_str()), (Some(40), ""));
}

#[test]
fn stops_and_continues_with_the_program() {
    let (mut child, _output) = started("echo ready; kill -STOP $$; exit 7");
    let deadline = Instant::now() + Duration::from_secs(30);
    while state_and_parent(child.id()).unwrap().0 != 'T' {
        assert!(Instant::now() < deadline, "did not stop with its program");
        std::thread::sleep(Duration::from_millis(5));
    }
    send(child.id(), libc::SIGCONT);
    assert_eq!(child.wait().unwrap().code(), Some(7));
}

/// See `signals::stop_with`: the program is stopped, and continued or killed, by its own pid.
#[test]
fn goes_on_when_the_program_does_without_it() {
    for (signal, code) in [(libc::SIGCONT, Some(7)), (libc::SIGKILL, None)] {
        let (mut child, mut output) =
            started("trap 'n=1$n' CONT; echo ready; echo $$; kill -STOP $$; sleep 0.3; exit $((n + 6))");
        let mut line = String::new();
        std::io::BufRead::read_line(&mut output, &mut line).unwrap();
        let program: u32 = line.trim().parse().unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        while [child.id(), program].iter().any(|pid| state_and_parent(*pid).is_none_or(|(state, _)| state != 'T')) {
            assert!(Instant::now() < deadline, "did not stop with its program");
            std::thread::sleep(Duration::from_millis(5));
        }
        send(program, signal);
        let ended = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None => std::thread::sleep(Duration::from_millis(5)),
            }
            if Instant::now() > deadline {
                child.kill().unwrap();
                panic!("the command did not go on");
            }
        };
        // One SIGCONT, its own.
        assert_eq!(ended.code(), code);
    }
}

#[test]
fn does_not_wait_for_what_the_program_leaves_behind() {
    let output = sh("sleep 300 >/dev/null 2>&1 & echo $!; exit 4");
    assert_eq!(output.status.code(), Some(4));
    let left: u32 = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
    assert!(state_and_parent(left).is_some_and(|(state, _)| state != 'Z'), "it has waited for its end");
    send(left, libc::SIGKILL);
}

#[test]
fn summary_unless_quiet() {
    let output = run(&["--", "/bin/true"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!text.is_empty() && text.lines().all(|line| line.starts_with("uzswap: ")), "{text}");
    assert!(run(&["-q", "--", "/bin/true"]).stderr.is_empty());
}

/// The story: if the program could not be started the report was removed, whatever it was: even `/dev/null`, by root.
#[test]
fn what_was_there_before_stays_where_nothing_starts() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    // The loader of this program is missing: only the kernel finds that out.
    let mut program = fs::read("/bin/true").unwrap();
    let at = program.windows(15).position(|w| w == b"/lib64/ld-linux").expect("a dynamic program");
    program[at + 1] = b'X';
    file(&dir, "broken", &program, 0o755);
    std::os::unix::fs::symlink("/dev/null", path("link")).unwrap();
    for option in ["--report", "--record"] {
        fs::write(path("old"), "old").unwrap();
        for name in ["old", "link", "new"] {
            let out = run(&[option, &path(name), "--", &path("broken")]);
            assert_eq!(out.status.code(), Some(127), "{}", String::from_utf8_lossy(&out.stderr));
        }
        assert!(fs::symlink_metadata(path("link")).is_ok() && fs::metadata("/dev/null").is_ok(), "{option}");
        assert!(fs::exists(path("old")).unwrap() && !fs::exists(path("new")).unwrap(), "{option}");
        // A trace begins before the program does.
        assert!(option == "--record" || fs::read(path("old")).unwrap() == b"old", "{option}");
    }
    // A run that starts overwrites all of the file.
    fs::write(path("old"), vec![b'x'; 1 << 20]).unwrap();
    assert!(run(&["-q", "--report", &path("old"), "--", "/bin/true"]).status.success());
    serde_json::from_slice::<serde_json::Value>(&fs::read(path("old")).unwrap()).expect("one report");
}

/// The output of a shell that sets `limits` for itself, and then runs `uzswap run` with these arguments.
fn run_limited(limits: &str, args: &str) -> Output {
    agent_built();
    let script = format!("{limits}; exec '{UZSWAP}' run -m 64M {args}");
    std::process::Command::new("/bin/sh").args(["-c", &script]).env_remove("UZSWAP_GROUP").output().unwrap()
}

/// The story: under a limit on the size of files the command was ended by a signal, without a message.
#[test]
fn files_larger_than_allowed_are_refused_in_words() {
    for options in ["", "--swap 1G"] {
        let out = run_limited("ulimit -f 0", &format!("{options} -- /bin/true"));
        assert_eq!(out.status.code(), Some(125), "{}", String::from_utf8_lossy(&out.stderr));
        assert!(sentence(&out).contains("ulimit -f"), "{}", sentence(&out));
    }
    // The program gets the signal as always.
    let dir = TempDir::new().unwrap();
    let grow = format!("-q -- truncate -s 1G {}/large", dir.path().display());
    assert_eq!(run_limited("ulimit -f 200000", &grow).status.signal(), Some(libc::SIGXFSZ));
}

/// The story: with a stack of 64 KiB the command ended by SIGSEGV, or by SIGABRT, before it did anything.
#[test]
fn small_stacks_are_large_enough() {
    for kib in [48, 64] {
        let out = run_limited(&format!("ulimit -s {kib}"), "-q -- /bin/echo right");
        assert!(out.status.success() && out.stdout == b"right\n", "{kib}: {out:?}");
        for args in ["--help", "doctor", "man run", "completions bash"] {
            let script = format!("ulimit -s {kib}; exec '{UZSWAP}' {args}");
            let out = std::process::Command::new("/bin/sh").args(["-c", &script]).output().unwrap();
            assert!(out.status.success() && !out.stdout.is_empty(), "{kib}, {args}: {:?}", out.status);
        }
    }
}

/// The story: if nothing could be written to stderr, a message there ended the command by SIGABRT.
#[test]
fn who_hears_nothing_has_the_status_all_the_same() {
    agent_built();
    for (args, status) in [
        ("run -m 64M -- no-such-program", 127),
        ("run -m 64M -- /", 126),
        ("run -m 1M -- true", 125),
        ("run -m 64M -- /bin/sh -c 'exit 3'", 3),
        ("run --no-such", 125),
        ("stat no-such-group", 1),
        ("pagemap 0", 1),
        ("lab kernel --json /no/such/file", 1),
    ] {
        let script = format!("'{UZSWAP}' {args} 2>/dev/full");
        let mut shell = std::process::Command::new("/bin/sh");
        let out = shell.args(["-c", &script]).env_remove("UZSWAP_GROUP").output().unwrap();
        assert_eq!(out.status.code(), Some(status), "{args}");
    }
}

/// The story: a process that may have little writable memory (`ulimit -d`) should have run without a limit. But uzswap's
/// reservations stayed, and took all that it might have.
#[test]
fn who_may_not_reserve_runs_without_a_limit() {
    let Some(python) = python() else { return };
    let program = format!("-q -- {} -c 'print(len(bytearray(100 << 20)))'", python.display());
    for limits in ["ulimit -d 400000", "ulimit -v 4000000"] {
        let out = run_limited(limits, &program);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && out.stdout == b"104857600\n", "{limits}: {said}");
        assert_eq!(said.matches("without a limit").count(), 1, "{limits}: {said}");
        assert!(said.contains("raise `ulimit -v`"), "{limits}: {said}");
    }
}

#[test]
fn report_says_how_it_ended() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("report.json");
    let name = path.to_str().unwrap();
    let read = || -> serde_json::Value { serde_json::from_slice(&fs::read(&path).unwrap()).unwrap() };
    run(&["-q", "-c", "zstd:3", "--report", name, "--", "/bin/sh", "-c", "exit 3"]);
    let report = read();
    assert_eq!(report["exit_status"], 3);
    assert_eq!(report["signal"], serde_json::Value::Null);
    assert_eq!(report["limit"], 256 << 20);
    assert_eq!(report["compressor"], "zstd");
    assert_eq!(report["level"], 3);
    assert_eq!(report["command"][2], "exit 3");
    assert!(report["wall_seconds"].as_f64().unwrap() > 0.0);
    run(&["-q", "--report", name, "--", "/bin/sh", "-c", "kill -9 $$"]);
    assert_eq!(read()["signal"], 9);
    assert_eq!(read()["exit_status"], serde_json::Value::Null);

    // Every member is described in the schema.
    let schema = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("REPORT.md")).unwrap();
    let report = read();
    let names = |part: &serde_json::Value| part.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let order = names(&report["folios"]["hugepages-64kB"]);
    let folios = names(&report["folios"]).into_iter().filter(|name| !name.starts_with("hugepages-"));
    for member in names(&report).into_iter().chain(names(&report["counters"])).chain(order).chain(folios) {
        assert!(schema.contains(&format!("`{member}`")), "{member} is not in REPORT.md");
    }
    // Members of the moment when most was stored are not described as being of the end.
    let line = |name: &str| schema.lines().find(|line| line.starts_with(&format!("| `{name}`"))).unwrap();
    let stored = ["stored_pages", "stored_incompressible_pages", "pool_total_size", "pool_used_size"];
    for name in stored.into_iter().chain(["metadata_size", "compression_ratio"]) {
        assert!(!line(name).contains("at the end") && !line(name).contains("last"), "{}", line(name));
    }
}

#[test]
fn config_file_under_the_command_line() {
    let dir = TempDir::new().unwrap();
    let report = dir.path().join("report.json");
    let text = format!("memory = '64M'\ncompressor = 'deflate'\nquiet = true\nreport = '{}'\n", report.display());
    let config = file(&dir, "config.toml", text.as_bytes(), 0o644);
    let output =
        uzswap().args(["run", "-c", "lz4", "--config"]).arg(config).args(["--", "/bin/true"]).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty());
    let report: serde_json::Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    assert_eq!(report["limit"], 64 << 20);
    assert_eq!(report["compressor"], "lz4");
}

#[test]
fn scripts_without_a_first_line_run_in_the_shell() {
    let dir = for_programs();
    let script = file(&dir, "script", b"echo plain; exit 5\n", 0o755);
    let output = run(&["-q", "--", script.to_str().unwrap()]);
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(5), &b"plain\n"[..]));
}

#[test]
fn doctor_in_words_and_json() {
    let plain = uzswap().arg("doctor").output().unwrap();
    let text = String::from_utf8(plain.stdout).unwrap();
    assert!(text.contains(" kernel ") && text.contains(" agent library "), "{text}");
    let json = uzswap().args(["doctor", "--json"]).output().unwrap();
    let findings: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(findings["works"], plain.status.success());
    assert_eq!(json.status.code(), plain.status.code());
    assert!(
        findings["checks"].as_array().unwrap().iter().all(|check| check["ok"] == true || check["change"].is_string())
    );
}

#[test]
fn help_manual_and_completions() {
    for (args, part) in [
        (&["--help"][..], "pagemap"),
        (&["run", "--help"], "--memory"),
        (&["lab", "--help"], "highalloc"),
        (&["man"], "uzswap\\-run(1)"),
        (&["man", "run"], "\\-\\-memory"),
        (&["man", "lab"], "uzswap\\-lab\\-highalloc(1)"),
        (&["man", "lab", "kernel"], "\\-\\-quick"),
        (&["completions", "bash"], "--soft-dirty"),
        (&["completions", "zsh"], "highalloc"),
    ] {
        let output = uzswap().args(args).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && output.stderr.is_empty() && text.contains(part), "{args:?}: {text}");
    }
    for (words, part) in [
        (&["swap"][..], "pagemap, protect"),
        (&["run", "fast"], "none below `run`"),
        // The lab's internal subcommands are not offered.
        (&["lab", "nosuch"], "usemem, shrinker, help\n"),
    ] {
        let refused = uzswap().arg("man").args(words).output().unwrap();
        let text = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success() && text.lines().count() == 1 && text.contains(part), "{text}");
    }
}

/// The story: completions that nobody read to their end ended in a panic.
#[test]
fn readers_may_have_enough_and_disks_may_be_full() {
    for args in ["completions bash", "man run", "doctor", "stat", "--help", "run --help"] {
        // The reader is gone before the first byte comes.
        let script = format!("{{ sleep 0.2; '{UZSWAP}' {args}; echo $? >&2; }} | true");
        let output = std::process::Command::new("/bin/bash").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "0\n", "{args}");
        let script = format!("'{UZSWAP}' {args} >/dev/full");
        let output = std::process::Command::new("/bin/sh").args(["-c", &script]).output().unwrap();
        assert!(sentence_of(&output, 1).contains("no space left"), "{args}");
    }
}

#[test]
fn statuses_of_other_subcommands() {
    let status = |args: &[&str]| uzswap().args(args).output().unwrap().status.code();
    for args in [&["replay", "/no/such"][..], &["stat", "no-such-group"], &["ctl", "no-such-group"], &["protect", "0"]]
    {
        assert_eq!(status(args), Some(1), "{args:?}");
    }
    for args in [&["replay"][..], &["stat", "--no-such"], &["lab", "nosuch"], &["lab", "kernel", "--no-such"], &["lab"]]
    {
        assert_eq!(status(args), Some(125), "{args:?}");
    }
    // The story: requests that the command's own parsers rejected had the status of any other failure.
    for args in [
        &["man", "nosuch"][..],
        &["replay", "/no/such", "--policy", "nosuch"],
        &["replay", "/no/such", "--pool", "200%"],
        &["ctl", "no-such-group", "memory.max=abc"],
        &["ctl", "no-such-group", "memory.max=1G", "memory.max=2G"],
        &["ctl", "no//name"],
        &["stat", "../name", "memory.max"],
        &["pagemap", "0", "--page-out", "x"],
        &["protect", "0", "x"],
    ] {
        assert_eq!(status(args), Some(125), "{args:?}");
    }
    assert_eq!(status(&["lab", "--help"]), Some(0));
}

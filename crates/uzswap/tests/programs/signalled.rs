//! What somebody sends to the whole process group reaches the program once, and what is sent to the command alone is never lost.

use crate::harness::*;
use crate::redis;
use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Signals for the tests: merged while they are pending, and queued.
fn signals() -> [i32; 4] {
    [libc::SIGUSR1, libc::SIGRTMIN() + 1, libc::SIGINT, libc::SIGRTMAX()]
}

/// `counts` under `uzswap run`, in a process group of their own.
struct Counting {
    child: Child,
    said: Lines<BufReader<ChildStdout>>,
    program: i32,
}

impl Counting {
    /// Starts it; None if nothing can compile it.
    fn start(how: &str) -> Option<Counting> {
        Self::start_failing(how, "")
    }

    /// The same where something fails, in the form of `UZSWAP_TEST_FAULTS`, unless that is empty.
    fn start_failing(how: &str, faults: &str) -> Option<Counting> {
        let counts = compile_c("counts")?;
        let mut run = Command::new(uzswap());
        run.args(["run", "-q", "-m", "64M", "--"]).arg(counts).arg(how).env_remove("LD_PRELOAD");
        if !faults.is_empty() {
            run.env("UZSWAP_TEST_FAULTS", faults);
        }
        let mut child = run.process_group(0).stdout(Stdio::piped()).spawn().expect("uzswap");
        let said = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut counting = Counting { child, said, program: 0 };
        counting.program = counting.next();
        Some(counting)
    }

    fn command(&self) -> i32 {
        self.child.id() as i32
    }

    fn next(&mut self) -> i32 {
        let line = self.said.next().expect("a line").expect("a line");
        line.parse().expect("a number")
    }

    /// Sends a signal to the group.
    fn to_group(&self, signal: i32) {
        send(-self.command(), signal);
    }

    /// Sends a signal to the command alone.
    fn to_command(&self, signal: i32) {
        send(self.command(), signal);
    }

    /// Waits until the command has taken what came to it: what comes while the same signal is pending merges with that.
    fn taken(&self) {
        let path = format!("/proc/{}/status", self.command());
        let status = || fs::read_to_string(&path).unwrap_or_default();
        within("the command takes its signals", || status().contains("ShdPnd:\t0000000000000000").then_some(()));
    }

    /// The next that the program says is that these signals came; what comes once too often fails the next call.
    fn comes(&mut self, signals: &[i32], how: &str) {
        for signal in signals {
            assert_eq!(self.next(), *signal, "{how}");
        }
    }

    /// The witness, as soon as it has closed what it does not need.
    fn witness(&self) -> i32 {
        let command = self.command();
        let children = || fs::read_to_string(format!("/proc/{command}/task/{command}/children")).unwrap_or_default();
        let name = |pid: i32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let open = |pid: i32| fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        within("the witness has no descriptors but its own two", || {
            let children = children();
            let mut pids = children.split_whitespace().filter_map(|pid| pid.parse().ok());
            pids.find(|pid| name(*pid) == "signal-witness\n" && open(*pid) == 2)
        })
    }

    /// Ends the program. It has got all that was sent, and nothing more.
    fn ends(mut self) {
        self.to_group(libc::SIGQUIT);
        self.comes(&[libc::SIGQUIT], "the end");
        let left: Vec<_> = self.said.by_ref().map(|line| line.expect("a line")).collect();
        assert!(left.is_empty(), "{left:?}");
        let ended = self.child.wait().expect("its end");
        assert!(ended.success(), "{ended}");
        // SAFETY: no memory is involved.
        assert_eq!(unsafe { libc::kill(-self.command(), 0) }, -1, "something is left in the group");
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // SAFETY: no memory is involved; our child has not been reaped, nor has its group ended.
            unsafe { libc::kill(-self.command(), libc::SIGKILL) };
            let _ = self.child.wait();
        }
    }
}

fn send(pid: i32, signal: i32) {
    // SAFETY: no memory is involved.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0, "{pid}, {signal}");
}

/// Waits for something that happens soon.
fn within<T>(what: &str, mut happened: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(result) = happened() {
            return result;
        }
        assert!(Instant::now() < deadline, "not so: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until processes are stopped.
fn stopped(pids: &[i32]) {
    let stat = |pid: &i32| fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    within("all are stopped", || pids.iter().all(|pid| stat(pid).contains(") T ")).then_some(()));
}

/// The story: the program got such a signal from its sender, and once more from the command.
#[test]
fn what_is_sent_to_the_group_comes_once() {
    let _beside = beside();
    let Some(mut counting) = Counting::start("") else { return };
    for round in 0..100 {
        for signal in signals() {
            counting.to_group(signal);
            counting.comes(&[signal], &format!("round {round}, to the group"));
        }
        let several = [libc::SIGRTMIN() + 2; 3];
        several.iter().for_each(|signal| counting.to_group(*signal));
        counting.comes(&several, &format!("round {round}, several to the group"));
    }
    counting.ends();
}

#[test]
fn what_is_sent_to_the_command_alone_comes_once() {
    let _beside = beside();
    let Some(mut counting) = Counting::start("") else { return };
    for round in 0..100 {
        for signal in signals() {
            counting.to_command(signal);
            counting.comes(&[signal], &format!("round {round}, to the command"));
            counting.to_group(signal);
            counting.comes(&[signal], &format!("round {round}, then to the group"));
            counting.taken();
            counting.to_command(signal);
            counting.comes(&[signal], &format!("round {round}, then to the command"));
        }
        let several = [libc::SIGRTMIN() + 2; 4];
        for (i, signal) in several.iter().enumerate() {
            if i % 2 == 0 { counting.to_command(*signal) } else { counting.to_group(*signal) }
        }
        counting.comes(&several, &format!("round {round}, several to both"));
    }
    counting.ends();
}

/// Somebody who signals processes one by one also finds the witness. What that saw must not count later.
#[test]
fn the_witness_forgets_what_came_to_it_alone() {
    let _beside = beside();
    let Some(mut counting) = Counting::start("") else { return };
    let witness = counting.witness();
    for round in 0..50 {
        for signal in signals() {
            send(witness, signal);
            counting.to_command(libc::SIGUSR2);
            counting.comes(&[libc::SIGUSR2], &format!("round {round}"));
            counting.to_command(signal);
            counting.comes(&[signal], &format!("round {round}, to the command"));
        }
    }
    // Without it, all is forwarded.
    send(witness, libc::SIGKILL);
    for signal in signals() {
        counting.to_command(signal);
        counting.comes(&[signal], "without a witness");
    }
    counting.to_command(libc::SIGQUIT);
    counting.comes(&[libc::SIGQUIT], "without a witness");
    assert!(counting.child.wait().expect("its end").success());
}

#[test]
fn a_program_that_has_left_the_group_is_told_what_comes_to_it() {
    let _beside = beside();
    let Some(mut counting) = Counting::start("own") else { return };
    for round in 0..30 {
        for signal in signals() {
            counting.to_group(signal);
            counting.comes(&[signal], &format!("round {round}, to the group"));
            counting.to_command(signal);
            counting.comes(&[signal], &format!("round {round}, to the command"));
        }
    }
    counting.ends();
}

/// The story: after the group was stopped, and the command alone continued, the command stopped again at the news that its program
/// had, and the program was not continued.
#[test]
fn stopped_and_continued_programs_are_told_once() {
    let _beside = beside();
    let Some(mut counting) = Counting::start("") else { return };
    let (command, program, witness) = (counting.command(), counting.program, counting.witness());
    for round in 0..20 {
        let how = |what: &str| format!("round {round}: {what}");
        counting.to_group(libc::SIGSTOP);
        stopped(&[command, program, witness]);
        counting.to_group(libc::SIGCONT);
        counting.comes(&[libc::SIGCONT], &how("the group stopped and went on"));
        counting.to_group(libc::SIGSTOP);
        stopped(&[command, program, witness]);
        counting.to_command(libc::SIGCONT);
        counting.comes(&[libc::SIGCONT], &how("the command went on alone"));
        counting.to_group(libc::SIGUSR1);
        counting.comes(&[libc::SIGUSR1], &how("to the group"));
        send(program, libc::SIGSTOP);
        stopped(&[command, program]);
        counting.to_group(libc::SIGCONT);
        counting.comes(&[libc::SIGCONT], &how("the program stopped, the group went on"));
        send(program, libc::SIGSTOP);
        stopped(&[command, program]);
        counting.to_command(libc::SIGCONT);
        counting.comes(&[libc::SIGCONT], &how("the program stopped, the command went on"));
        counting.to_group(libc::SIGTSTP);
        counting.comes(&[libc::SIGTSTP], &how("a stop that the program takes"));
    }
    counting.ends();
}

/// A signal to the group before the program is in it is passed on; whenever it comes, it ends the program.
#[test]
fn no_signal_is_lost_while_the_program_starts() {
    let _beside = beside();
    for round in 0..80 {
        let mut run = Command::new(uzswap());
        run.args(["run", "-q", "-m", "64M", "--", "/bin/sleep", "600"]).env_remove("LD_PRELOAD");
        let mut child = run.process_group(0).spawn().expect("uzswap");
        // To be at another point of the start each time.
        thread::sleep(Duration::from_micros(50 * round));
        let pid = child.id() as i32;
        send(-pid, libc::SIGTERM);
        let ended = within(&format!("round {round}: the program ends"), || child.try_wait().expect("its end"));
        assert_eq!(ended.signal(), Some(libc::SIGTERM), "round {round}");
    }
}

/// The witness has nothing open, and does not outlive the command.
#[test]
fn the_witness_ends_with_the_command() {
    let _beside = beside();
    let Some(mut counting) = Counting::start("") else { return };
    let witness = counting.witness();
    counting.to_command(libc::SIGKILL);
    within("the witness has ended", || (!fs::exists(format!("/proc/{witness}")).expect("/proc")).then_some(()));
    send(counting.program, libc::SIGKILL);
    // Nobody holds the program's output open.
    assert_eq!(counting.said.by_ref().count(), 0);
    assert_eq!(counting.child.wait().expect("its end").signal(), Some(libc::SIGKILL));
}

/// The story: on the second SIGINT Redis ends without saving.
#[test]
fn redis_saves_when_its_group_is_interrupted() {
    let _beside = beside();
    if need("redis-server").is_none() {
        return;
    }
    let (dir, port) = (scratch("interrupted"), redis::free_port());
    let subject = redis::subject_with(&dir, port, &["--save", "3600 1"]);
    let server = subject.start_limited(64 * MIB);
    let mut client = redis::Client::connect(port, &server);
    assert_eq!(client.one(&["SET", "key", "value"]), b"OK");
    // SAFETY: no memory is involved.
    let group = unsafe { libc::getpgid(server.processes()[0]) };
    send(-group, libc::SIGINT);
    let outcome = server.finish();
    assert!(outcome.status.success() && dir.join("dump.rdb").is_file(), "{}", outcome.describe());
}

/// The story: where no process could be started for the witness, the command killed all processes that its user may signal. So
/// this is first tried in a PID namespace, with somebody uninvolved in it.
#[test]
fn where_there_can_be_no_witness_the_program_runs_and_is_told() {
    let (Some(sh), Some(unshare)) = (need("sh"), need("unshare")) else { return };
    let apart = |script: &str| {
        let mut apart = Command::new(&unshare);
        apart.args(["--pid", "--fork", "--mount-proc", "--kill-child"]).arg(&sh).args(["-c", script, "sh"]);
        let out = apart.arg(uzswap()).env("UZSWAP_TEST_FAULTS", "witness=1/1").env_remove("LD_PRELOAD").output();
        let out = out.expect("unshare");
        (out.status.success(), String::from_utf8_lossy(&out.stdout).into_owned(), out.stderr)
    };
    if !apart("true").0 {
        return skip("unshare --pid --mount-proc is not allowed here");
    }
    let script = "sleep 600 & \"$1\" run -q -m 64M --report /dev/stdout -- echo it runs; kill $! && echo unharmed";
    let (right, said, errors) = apart(script);
    let failed = said.contains("\"witness\": 1");
    assert!(right && failed && said.contains("it runs\n") && said.ends_with("unharmed\n"), "{said}");
    assert!(errors.is_empty(), "{}", String::from_utf8_lossy(&errors));
    // What somebody sends to the command alone comes to the program, once.
    let Some(mut counting) = Counting::start_failing("", "witness=1/1") else { return };
    for signal in signals() {
        counting.to_command(signal);
        counting.comes(&[signal], "there is no witness");
    }
    counting.to_command(libc::SIGQUIT);
    counting.comes(&[libc::SIGQUIT], "the end");
    assert!(counting.said.next().is_none(), "each came once");
    assert!(counting.child.wait().expect("its end").success());
}

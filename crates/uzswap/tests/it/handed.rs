//! What a program gets from the caller of `uzswap run`, or with a signal, and a forked child would not have by itself; and whose
//! children orphans are.

use crate::cli::{UZSWAP, agent_built, python, skip};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// Prints the timers, the signal sent when the parent ends, and whether orphans become its children.
const SHOWS: &str = "
import ctypes, signal
def asked(what):
    n = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(what, ctypes.byref(n)) == 0
    return n.value
timers = [signal.getitimer(which) for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)]
print([(round(at, -2), every) for at, every in timers], asked(2), asked(37))
";

/// See the command's module `handed`.
#[test]
fn timers_and_ties_to_others_are_the_programs() {
    let Some(python) = python() else { return };
    agent_built();
    let seconds = |tv_sec| libc::timeval { tv_sec, tv_usec: 0 };
    let shown = |given: bool, args: &[&str]| {
        let mut command = Command::new(args[0]);
        command.args(&args[1..]).args([python.to_str().unwrap(), "-c", SHOWS]);
        // SAFETY: the closure makes async-signal-safe calls only.
        unsafe {
            command.pre_exec(move || {
                let timers =
                    [(libc::ITIMER_REAL, 1000, 0), (libc::ITIMER_VIRTUAL, 2000, 7), (libc::ITIMER_PROF, 3000, 8)];
                for (which, at, every) in timers.into_iter().filter(|_| given) {
                    let timer = libc::itimerval { it_value: seconds(at), it_interval: seconds(every) };
                    libc::setitimer(which as _, &raw const timer, std::ptr::null_mut());
                }
                if given {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGUSR2);
                    libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1);
                }
                Ok(())
            });
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let limited = [UZSWAP, "run", "-q", "-m", "128M", "--"];
    for given in [true, false] {
        assert_eq!(shown(given, &limited), shown(given, &["env"]), "given: {given}");
    }
}

/// A signal arrives with its value and its sender.
#[test]
fn what_is_sent_with_a_signal_is_the_programs() {
    const WAITS: &str = "
import ctypes, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN + 3])
print('ready', flush=True)
words = (ctypes.c_int * 32)()
which = (ctypes.c_ulong * 16)(1 << (signal.SIGRTMIN + 2))
assert ctypes.CDLL(None).sigwaitinfo(which, words) == signal.SIGRTMIN + 3
print(words[2], words[4], words[6])
";
    let Some(python) = python() else { return };
    agent_built();
    let args = ["run", "-q", "-m", "128M", "--", python.to_str().unwrap(), "-c", WAITS];
    let mut child = Command::new(UZSWAP).args(args).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut said = String::new();
    output.read_line(&mut said).unwrap();
    let value = libc::sigval { sival_ptr: 77 as *mut libc::c_void };
    // SAFETY: a signal to a process of this test's.
    assert_eq!(unsafe { libc::sigqueue(child.id() as i32, libc::SIGRTMIN() + 3, value) }, 0);
    output.read_to_string(&mut said).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(said, format!("ready\n{} {} 77\n", libc::SI_QUEUE, std::process::id()));
}

/// The story: where the command was process 1, as in a container, all processes that ended after their parents stayed as zombies.
#[test]
fn orphans_that_are_the_commands_children_do_not_stay_when_they_end() {
    const SCRIPT: &str = "orphan=$( (sh -c 'echo $$' &) ); n=0; \
        while [ -e /proc/$orphan ] && [ $n -lt 300 ]; do sleep 0.1; n=$((n + 1)); done; \
        [ -e /proc/$orphan ] && grep State /proc/$orphan/status; exit 7";
    agent_built();
    let alone = ["-pf", "--mount-proc"];
    let known = Command::new("unshare").args(alone).arg("true").output();
    if !known.is_ok_and(|output| output.status.success()) {
        return skip("no namespace of processes can be made");
    }
    let args = [&alone[..], &[UZSWAP, "run", "-q", "-m", "64M", "--", "sh", "-c", SCRIPT]].concat();
    let output = Command::new("unshare").args(args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), said.as_str()), (Some(7), ""));
}

/// See the command's module `addressed`.
#[test]
fn what_names_the_command_by_its_number_names_the_program() {
    agent_built();
    let names = "echo $((LISTEN_PID == $$)) $((WATCHDOG_PID == $$)) $LISTEN_FDS $0 $1 $(env | grep -c ^LISTEN_PID)";
    let shown = |listen: &str, limited: &[&str]| {
        // (What the shell executes keeps the shell's pid.)
        let start = format!("export LISTEN_FDS=2 LISTEN_PID={listen} LISTEN_PIDFDID=1 WATCHDOG_PID=$$; exec \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &start, "sh"]).args(limited).args(["sh", "-c", names, "called", "with"]);
        let output = command.env_remove("LISTEN_PID").output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    };
    let limited = [UZSWAP, "run", "-q", "-m", "128M", "--"];
    for (listen, seen, left) in [("$$", "1 1 2 called with", 1), ("7", "0 1 2 called with", 2)] {
        assert_eq!(shown(listen, &[]), format!("{seen} 2\n"), "without uzswap");
        assert_eq!(shown(listen, &limited), format!("{seen} {left}\n"));
    }
}

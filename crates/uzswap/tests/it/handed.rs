//! What a program has from who starts `uzswap run`, which a forked child has not of itself.

use crate::cli::{UZSWAP, agent_built, python};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Prints the timers, the signal for a parent that ends, and whether orphans are its children.
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

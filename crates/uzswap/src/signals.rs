//! Signals between the terminal, us, and the program.
//!
//! While the program runs all signals are blocked in the supervisor and taken one by one: what somebody sent to us
//! is forwarded; what the kernel sent (Ctrl-C at the terminal) has reached the program by itself.

use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Signals that say something about ourselves, never about the program.
const OWN: [libc::c_int; 8] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGTRAP,
    libc::SIGABRT,
    libc::SIGSYS,
    libc::SIGPIPE,
];

/// Whether SIGPIPE was ignored before Rust's start-up code ignored it.
static PIPE_IGNORED: AtomicBool = AtomicBool::new(false);
/// Whether SIGXFSZ was ignored before we ignored it: what is larger than `ulimit -f` is an error that can be said.
static FILE_SIZE_IGNORED: AtomicBool = AtomicBool::new(false);

/// Runs before `main`, while dispositions are still those we were started with.
#[used]
// SAFETY: a function of C's calling convention, as the loader calls them there; it needs nothing that main sets up.
#[unsafe(link_section = ".init_array")]
static NOTE_IGNORED: extern "C" fn() = {
    extern "C" fn note_ignored() {
        PIPE_IGNORED.store(is_ignored(libc::SIGPIPE), Relaxed);
        FILE_SIZE_IGNORED.store(is_ignored(libc::SIGXFSZ), Relaxed);
        // SAFETY: a constant disposition.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    }
    note_ignored
};

/// Signals as we were started with them; what the program is to get.
#[derive(Clone, Copy)]
pub struct Inherited {
    mask: libc::sigset_t,
    child_ignored: bool,
    pipe_ignored: bool,
    file_size_ignored: bool,
}

/// Signals blocked in the supervisor.
pub struct Blocked {
    set: libc::sigset_t,
    /// How they were before.
    pub inherited: Inherited,
}

impl Blocked {
    /// Blocks what is to be forwarded, and takes note of SIGCHLD.
    pub fn new() -> Blocked {
        let child_ignored = is_ignored(libc::SIGCHLD);
        let mut set = MaybeUninit::uninit();
        let mut mask = MaybeUninit::uninit();
        // SAFETY: sigfillset and sigprocmask initialise the sets they are given; SIGCHLD gets its default action.
        let (set, mask) = unsafe {
            libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            libc::sigfillset(set.as_mut_ptr());
            for signal in OWN {
                libc::sigdelset(set.as_mut_ptr(), signal);
            }
            libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), mask.as_mut_ptr());
            (set.assume_init(), mask.assume_init())
        };
        let (pipe_ignored, file_size_ignored) = (PIPE_IGNORED.load(Relaxed), FILE_SIZE_IGNORED.load(Relaxed));
        Blocked { set, inherited: Inherited { mask, child_ignored, pipe_ignored, file_size_ignored } }
    }

    /// Waits for a signal: its number, and whether somebody sent it to us (rather than the kernel to the group).
    pub fn wait(&self) -> (libc::c_int, bool) {
        loop {
            let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
            // SAFETY: `set` is initialised; the kernel fills `info` when the call succeeds.
            let signal = unsafe { libc::sigwaitinfo(&raw const self.set, info.as_mut_ptr()) };
            if signal > 0 {
                // SAFETY: filled by the successful call.
                return (signal, unsafe { info.assume_init() }.si_code <= 0);
            }
        }
    }
}

impl Inherited {
    /// Puts signals back as they were. Only async-signal-safe calls: used between fork and exec.
    pub fn restore(&self) {
        let disposition = |ignored| {
            if ignored { libc::SIG_IGN } else { libc::SIG_DFL }
        };
        // SAFETY: dispositions are constants, `mask` is initialised.
        unsafe {
            libc::signal(libc::SIGCHLD, disposition(self.child_ignored));
            libc::signal(libc::SIGPIPE, disposition(self.pipe_ignored));
            libc::signal(libc::SIGXFSZ, disposition(self.file_size_ignored));
            libc::sigprocmask(libc::SIG_SETMASK, &raw const self.mask, std::ptr::null_mut());
        }
    }
}

/// Ends us by a signal, leaving no core: for our parent it is as if the program had been run directly.
pub fn die_of(signal: libc::c_int) {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let mut set = MaybeUninit::uninit();
    // SAFETY: `none` and `set` outlive the calls; `set` is initialised by sigemptyset; the signal's default action is
    // what we are after.
    unsafe {
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
        libc::prctl(libc::PR_SET_DUMPABLE, 0);
        libc::signal(signal, libc::SIG_DFL);
        libc::kill(libc::getpid(), signal);
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        libc::sigprocmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut());
    }
}

/// Stops us until somebody continues us.
pub fn stop_self() {
    // SAFETY: no memory is involved.
    unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
}

/// Sends a signal to our child, which has not been reaped.
pub fn send(child: libc::pid_t, signal: libc::c_int) -> io::Result<()> {
    // SAFETY: no memory is involved.
    if unsafe { libc::kill(child, signal) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: with no new action the call only writes `action`, which is valid when zero too.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
        action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

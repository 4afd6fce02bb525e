//! Signals between the terminal, us, and the program.
//!
//! While the program runs all signals are blocked in the supervisor and taken one by one: what somebody sent to us
//! is forwarded; what the kernel sent (Ctrl-C at the terminal) has reached the program by itself. But that the terminal is gone the
//! kernel says to the session's leader alone, which we are where `ssh`, `tmux` or a terminal's window starts us.

use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};

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

/// Which of the standard streams were closed before Rust's start-up code opened /dev/null in their place: a bit each.
static CLOSED: AtomicU8 = AtomicU8::new(0);

/// Runs before `main`, while dispositions and descriptors are still those we were started with.
#[used]
// SAFETY: a function of C's calling convention, as the loader calls them there; it needs nothing that main sets up.
#[unsafe(link_section = ".init_array")]
static NOTE_INHERITED: extern "C" fn() = {
    extern "C" fn note_inherited() {
        PIPE_IGNORED.store(is_ignored(libc::SIGPIPE), Relaxed);
        FILE_SIZE_IGNORED.store(is_ignored(libc::SIGXFSZ), Relaxed);
        // SAFETY: a constant disposition.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        // SAFETY: no memory is involved.
        let closed = (0..=2).filter(|&stream| unsafe { libc::fcntl(stream, libc::F_GETFD) } < 0);
        CLOSED.store(closed.fold(0, |bits, stream| bits | 1 << stream), Relaxed);
    }
    note_inherited
};

/// Signals and standard streams as we were started with them; what the program is to get.
#[derive(Clone, Copy)]
pub struct Inherited {
    mask: libc::sigset_t,
    /// See [`CLOSED`].
    closed: u8,
    child_ignored: bool,
    pipe_ignored: bool,
    file_size_ignored: bool,
}

/// Signals blocked in the supervisor.
pub struct Blocked {
    set: libc::sigset_t,
    /// Whether we lead a session of a terminal: the kernel tells us alone that it is gone.
    leads_terminal: bool,
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
        Blocked {
            set,
            leads_terminal: leads_session() && has_terminal(),
            inherited: Inherited { mask, closed: CLOSED.load(Relaxed), child_ignored, pipe_ignored, file_size_ignored },
        }
    }

    /// Waits for a signal.
    pub fn wait(&self) -> Came {
        loop {
            let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
            // SAFETY: `set` is initialised; the kernel fills `info` when the call succeeds.
            let signal = unsafe { libc::sigwaitinfo(&raw const self.set, info.as_mut_ptr()) };
            if signal > 0 {
                // SAFETY: filled by the successful call.
                return Came(unsafe { info.assume_init() });
            }
        }
    }

    /// Stops us, as our child has stopped, until somebody continues us, or continues or ends it without us, or our terminal is gone.
    ///
    /// The stories: who stopped a program by its own pid and continued it in the same way left its command stopped for good, and whoever
    /// waited for the command waited for ever. So it did where a terminal went away just before we stopped: stopping discards the SIGCONT
    /// by which the kernel sees to it that the hangup is heard.
    pub fn stop_with(&self, child: libc::pid_t) {
        let path = std::ffi::CString::new(format!("/proc/{child}/stat")).unwrap_or_default();
        // SAFETY: no memory is involved.
        let me = unsafe { libc::getpid() };
        // SAFETY: the child makes async-signal-safe calls only, and does not return.
        let watcher = unsafe { libc::fork() };
        if watcher == 0 {
            continue_when(me, || !is_stopped(&path) || self.leads_terminal && !has_terminal());
        }
        // SAFETY: no memory is involved.
        unsafe { libc::kill(me, libc::SIGSTOP) };
        if watcher > 0 {
            // SAFETY: a child of ours that has not been reaped; nobody asks for its status.
            unsafe {
                libc::kill(watcher, libc::SIGKILL);
                libc::waitpid(watcher, std::ptr::null_mut(), 0);
            }
        }
        // What it sent is for us alone; what others sent is for the program too.
        if sent_to_continue().is_some_and(|by| by != watcher) {
            let _ = send(child, libc::SIGCONT);
        }
    }
}

/// A signal that came to us.
pub struct Came(libc::siginfo_t);

impl Came {
    /// Its number.
    pub fn signal(&self) -> libc::c_int {
        self.0.si_signo
    }

    /// Who sent it to us (rather than the kernel to the group).
    fn sender(&self) -> Option<libc::pid_t> {
        // SAFETY: a signal has a sender when its code says so.
        (self.0.si_code <= 0).then(|| unsafe { self.0.si_pid() })
    }

    /// Gives our child what it is to have of it: nothing of what it sent itself, to its parent or to all of its group.
    ///
    /// The story: a program told its parent by a signal that it was ready, and was ended by that, as it got it back. One that ended its group
    /// (`kill 0`) cleaned up twice.
    pub fn pass_on(&self, child: libc::pid_t) {
        let sender = self.sender();
        for signal in passed_on(self.signal(), sender.is_some()).filter(|_| sender != Some(child)) {
            // It may have just ended: then SIGCHLD is next.
            let _ = if self.0.si_code == libc::SI_QUEUE { self.queue(child) } else { send(child, signal) };
        }
    }

    /// Sends our child what was sent to us by `sigqueue`, with the value and by whom.
    ///
    /// The story: the value was 0, whatever was sent.
    fn queue(&self, child: libc::pid_t) -> io::Result<()> {
        // SAFETY: the kernel's own information, which it takes back as it is.
        let sent = unsafe { libc::syscall(libc::SYS_rt_sigqueueinfo, child, self.signal(), &raw const self.0) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Inherited {
    /// Closes the standard streams that were closed: who writes to one is told so, as without us. As [`Self::restore`], in the child.
    pub fn close_streams(&self) {
        for stream in (0..=2).filter(|stream| self.closed & 1 << stream != 0) {
            // SAFETY: what is open there is Rust's /dev/null, which nobody else uses in a child that is about to execute the program.
            unsafe { libc::close(stream) };
        }
    }

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

/// How often it is looked whether a stopped program goes on (nanoseconds).
const LOOK_NS: libc::c_long = 50_000_000;

/// In a process of its own: continues `stopped` when it `goes_on`, which makes async-signal-safe calls only. It is ended by `stopped`.
fn continue_when(stopped: libc::pid_t, goes_on: impl Fn() -> bool) -> ! {
    // SAFETY: constants and a signal to our parent, which is there or has had us killed.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    loop {
        // SAFETY: as above.
        unsafe {
            if libc::getppid() != stopped {
                libc::_exit(0);
            }
            if goes_on() {
                libc::kill(stopped, libc::SIGCONT);
            }
            libc::nanosleep(&libc::timespec { tv_sec: 0, tv_nsec: LOOK_NS }, std::ptr::null_mut());
        }
    }
}

fn leads_session() -> bool {
    // SAFETY: no memory is involved.
    unsafe { libc::getsid(0) == libc::getpid() }
}

/// Whether the session has a terminal. Only async-signal-safe calls.
fn has_terminal() -> bool {
    // SAFETY: a C string; no memory is involved in closing.
    unsafe {
        let terminal = libc::open(c"/dev/tty".as_ptr(), libc::O_RDONLY | libc::O_NONBLOCK | libc::O_CLOEXEC);
        terminal >= 0 && libc::close(terminal) == 0
    }
}

/// Whether a `/proc/PID/stat` says that its process is stopped. Only async-signal-safe calls.
fn is_stopped(path: &std::ffi::CStr) -> bool {
    let mut text = [0u8; 256];
    // SAFETY: a C string, and a buffer of that size.
    let read = unsafe {
        let file = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        let read = libc::read(file, text.as_mut_ptr().cast(), text.len());
        libc::close(file);
        usize::try_from(read).unwrap_or(0)
    };
    // (The name, in brackets, may have some itself.)
    let after = text[..read].iter().rposition(|b| *b == b')').and_then(|at| text.get(at + 2));
    after.is_some_and(|state| b"Tt".contains(state))
}

/// Takes a pending SIGCONT, if there is one that a process sent: which.
fn sent_to_continue() -> Option<libc::pid_t> {
    let (mut set, mut info) = (MaybeUninit::uninit(), MaybeUninit::<libc::siginfo_t>::uninit());
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: sigemptyset initialises the set; the kernel fills `info` when the call succeeds, of a signal that has a sender when
    // its code says so.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGCONT);
        let taken = libc::sigtimedwait(set.as_ptr(), info.as_mut_ptr(), &raw const now) > 0;
        (taken && info.assume_init().si_code <= 0).then(|| info.assume_init().si_pid())
    }
}

/// What the program gets of a signal that came to us, which somebody sent or else the kernel.
///
/// The story: a terminal's window was closed in which `uzswap run` was all there was. The program, which would have ended, went on for good.
fn passed_on(signal: libc::c_int, sent: bool) -> impl Iterator<Item = libc::c_int> {
    let hung_up = !sent && signal == libc::SIGHUP && leads_session();
    // (A program that is stopped goes on and ends, as the kernel has it.)
    [(sent || hung_up).then_some(signal), hung_up.then_some(libc::SIGCONT)].into_iter().flatten()
}

/// Sends a signal to our child, which has not been reaped.
fn send(child: libc::pid_t, signal: libc::c_int) -> io::Result<()> {
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

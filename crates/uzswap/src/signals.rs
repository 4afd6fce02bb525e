//! Signals between the terminal, the command, and the program.
//!
//! While the program runs, all signals are blocked in the command, which takes them one by one. It forwards what somebody sent to
//! it alone. What somebody sent to the whole process group ([`witness`]) has reached the program by itself, and so has what the
//! kernel sent (Ctrl-C at the terminal). One exception: if the terminal is gone, the kernel tells only the session's leader, which
//! we are if `ssh`, `tmux` or a terminal's window starts us.

use crate::witness::{self, Early, Witness, bit};
use std::ffi::{CStr, CString};
use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};

/// Signals about the command itself, never about the program.
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

/// The highest signal.
const SIGNALS: libc::c_int = 64;

/// Whether SIGPIPE was ignored before Rust's start-up code ignored it.
static PIPE_IGNORED: AtomicBool = AtomicBool::new(false);
/// Whether SIGXFSZ was ignored before we ignored it. We do, so that writing beyond `ulimit -f` is an error that we can report.
static FILE_SIZE_IGNORED: AtomicBool = AtomicBool::new(false);

/// Which standard streams were closed before Rust's start-up code opened /dev/null in their place; one bit each.
static CLOSED: AtomicU8 = AtomicU8::new(0);

/// Runs before `main`, while dispositions and descriptors are still those that we were started with.
#[used]
// SAFETY: a function of C's calling convention, as the loader calls those in this section; it needs nothing that main sets up.
#[unsafe(link_section = ".init_array")]
static NOTE_INHERITED: extern "C" fn() = {
    extern "C" fn note_inherited() {
        PIPE_IGNORED.store(is_ignored(libc::SIGPIPE), Relaxed);
        FILE_SIZE_IGNORED.store(is_ignored(libc::SIGXFSZ), Relaxed);
        // SAFETY: the disposition is a constant.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        // SAFETY: no memory is involved.
        let closed = (0..=2).filter(|&stream| unsafe { libc::fcntl(stream, libc::F_GETFD) } < 0);
        CLOSED.store(closed.fold(0, |bits, stream| bits | 1 << stream), Relaxed);
    }
    note_inherited
};

/// The signals and standard streams that we were started with, for the program.
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
    /// Whether we lead a session with a terminal: the kernel tells only us when it is gone.
    leads_terminal: bool,
    /// Sees what comes to our whole process group. None if there can be none.
    witness: Option<Witness>,
    /// The state before.
    pub inherited: Inherited,
}

impl Blocked {
    /// Blocks the signals to be forwarded, and sees that SIGCHLD comes. From now on the witness is there, unless it `fails` to
    /// start, as a test may want.
    pub fn new(fails: bool) -> Blocked {
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
            witness: Witness::start(&set, fails),
            inherited: Inherited { mask, closed: CLOSED.load(Relaxed), child_ignored, pipe_ignored, file_size_ignored },
        }
    }

    /// What the program's process is to call before it executes the program.
    pub fn early(&self) -> Option<Early> {
        self.witness.as_ref().and_then(Witness::early)
    }

    /// Forgets what has come until the program's end, and ends the witness.
    ///
    /// The story: a program took a signal to its group, and exited with status 0. The command, which had not come to its own copy of
    /// the signal yet, ended by it.
    pub fn program_ended(&mut self) {
        while witness::take(&self.set).is_some() {}
        self.witness.iter().for_each(Witness::end);
    }

    /// Waits for a signal.
    pub fn wait(&mut self) -> Came {
        loop {
            let Some(witness) = &self.witness else { return self.wait_alone() };
            let told = witness.sleep();
            let pending = witness::pending();
            // SIGCHLD is never forwarded.
            if told || (1..=SIGNALS).any(|signal| signal != libc::SIGCHLD && self.is_in(pending, signal)) {
                self.look();
            }
            // SIGCHLD last: the news that the program has stopped would stop us, and that discards a SIGCONT; after the program's end,
            // what is still pending would end us.
            let others = (1..=SIGNALS).filter(|signal| *signal != libc::SIGCHLD);
            let next = others.chain([libc::SIGCHLD]).find(|signal| self.is_in(pending, *signal));
            if let Some(came) = next.and_then(|signal| self.take(signal)) {
                return came;
            }
        }
    }

    /// Whether this is one of the signals that we take, and it is in the mask.
    fn is_in(&self, mask: u64, signal: libc::c_int) -> bool {
        // SAFETY: `set` is initialised.
        mask & bit(signal) != 0 && unsafe { libc::sigismember(&raw const self.set, signal) } == 1
    }

    /// Asks the witness what has come to it.
    fn look(&mut self) {
        if self.witness.as_mut().is_some_and(|witness| witness.look().is_none()) {
            self.witness = None;
        }
    }

    /// Takes a signal that was pending before [`Self::look`].
    fn take(&mut self, signal: libc::c_int) -> Option<Came> {
        let mut set = MaybeUninit::uninit();
        // SAFETY: sigemptyset initialises the set.
        let set = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), signal);
            set.assume_init()
        };
        let info = witness::take(&set)?;
        Some(Came { info, group: self.witness.as_mut().and_then(|witness| witness.saw(&info)) })
    }

    /// Waits for a signal where there is no witness.
    fn wait_alone(&self) -> Came {
        loop {
            let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
            // SAFETY: `set` is initialised; the kernel fills `info` when the call succeeds.
            let signal = unsafe { libc::sigwaitinfo(&raw const self.set, info.as_mut_ptr()) };
            if signal > 0 {
                // SAFETY: the successful call has filled it.
                return Came { info: unsafe { info.assume_init() }, group: None };
            }
        }
    }

    /// Stops this process, as its child has stopped. It stays stopped until somebody continues it, or continues or ends the child
    /// alone, or the terminal is gone.
    ///
    /// The stories: a program was stopped by its own pid and continued in the same way. Its command stayed stopped for good, and
    /// whoever waited for the command waited forever. The same happened if a terminal went away just before we stopped: stopping
    /// discards the SIGCONT by which the kernel makes sure that the hangup is noticed.
    pub fn stop_with(&mut self, child: libc::pid_t) {
        let path = CString::new(format!("/proc/{child}/stat")).unwrap_or_default();
        // Stopping would discard this.
        if self.continued(child, None) && !is_stopped(&path) {
            return;
        }
        // SAFETY: no memory is involved.
        let me = unsafe { libc::getpid() };
        // SAFETY: the child makes async-signal-safe calls only, and never returns from here.
        let watcher = unsafe { libc::fork() };
        if watcher == 0 {
            continue_when(me, || !is_stopped(&path) || self.leads_terminal && !has_terminal());
        }
        // SAFETY: no memory is involved.
        unsafe { libc::kill(me, libc::SIGSTOP) };
        if watcher > 0 {
            // SAFETY: `watcher` is a child of ours that has not been reaped; nobody needs its status.
            unsafe {
                libc::kill(watcher, libc::SIGKILL);
                libc::waitpid(watcher, std::ptr::null_mut(), 0);
            }
        }
        // A SIGCONT from the watcher is for us alone; one from others is for the program, too.
        self.continued(child, Some(watcher));
    }

    /// Takes a pending SIGCONT, and passes it on unless the watcher sent it. Returns whether one was pending.
    fn continued(&mut self, child: libc::pid_t, watcher: Option<libc::pid_t>) -> bool {
        if witness::pending() & bit(libc::SIGCONT) == 0 {
            return false;
        }
        self.look();
        let came = self.take(libc::SIGCONT);
        if let Some(came) = came.as_ref().filter(|came| watcher.is_none() || came.sender() != watcher) {
            came.pass_on(child);
        }
        came.is_some()
    }
}

/// A signal that was sent to us.
pub struct Came {
    info: libc::siginfo_t,
    /// The process group that it was sent to; None if it was sent to us alone, or that is unknown.
    group: Option<libc::pid_t>,
}

impl Came {
    /// Its number.
    pub fn signal(&self) -> libc::c_int {
        self.info.si_signo
    }

    /// The process that sent it to us; None if the kernel sent it to the group.
    fn sender(&self) -> Option<libc::pid_t> {
        // SAFETY: the code says that the signal has a sender.
        (self.info.si_code <= 0).then(|| unsafe { self.info.si_pid() })
    }

    /// Passes the signal on to our child, unless it was sent to the group that the child is in, or the child itself sent it.
    ///
    /// The story: a program that told its parent by a signal that it was ready got that signal back, which ended it. A program
    /// that ended its group (`kill 0`) cleaned up twice.
    pub fn pass_on(&self, child: libc::pid_t) {
        let sender = self.sender();
        // SAFETY: no memory is involved.
        if self.group.is_some_and(|group| unsafe { libc::getpgid(child) } == group) {
            return;
        }
        for signal in passed_on(self.signal(), sender.is_some()).filter(|_| sender != Some(child)) {
            // The child may have just ended: then SIGCHLD is next.
            let _ = if self.info.si_code == libc::SI_QUEUE { self.queue(child) } else { send(child, signal) };
        }
    }

    /// Sends our child what somebody sent to us by `sigqueue`, with its value and its sender.
    ///
    /// The story: the value was always 0.
    fn queue(&self, child: libc::pid_t) -> io::Result<()> {
        // SAFETY: the kernel reads its own siginfo, which outlives the call.
        let sent = unsafe { libc::syscall(libc::SYS_rt_sigqueueinfo, child, self.signal(), &raw const self.info) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Inherited {
    /// Closes the standard streams that were closed when we started, so that writing to one fails as it does without us. Called
    /// in the child, like [`Self::restore`].
    pub fn close_streams(&self) {
        for stream in (0..=2).filter(|stream| self.closed & 1 << stream != 0) {
            // SAFETY: the descriptor is Rust's /dev/null, which nobody else uses in a child that is about to execute the program.
            unsafe { libc::close(stream) };
        }
    }

    /// Restores the signals. Makes only async-signal-safe calls: used between fork and exec.
    pub fn restore(&self) {
        let disposition = |ignored| {
            if ignored { libc::SIG_IGN } else { libc::SIG_DFL }
        };
        // SAFETY: dispositions are constants, and `mask` is initialised.
        unsafe {
            libc::signal(libc::SIGCHLD, disposition(self.child_ignored));
            libc::signal(libc::SIGPIPE, disposition(self.pipe_ignored));
            libc::signal(libc::SIGXFSZ, disposition(self.file_size_ignored));
            libc::sigprocmask(libc::SIG_SETMASK, &raw const self.mask, std::ptr::null_mut());
        }
    }
}

/// Ends this process by a signal, without a core: to our parent it looks as if it had run the program directly.
pub fn die_of(signal: libc::c_int) {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let mut set = MaybeUninit::uninit();
    // SAFETY: `none` and `set` outlive the calls; `set` is initialised by sigemptyset; the signal's default action, to end us, is
    // intended.
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

/// The time between two looks at a stopped program, in nanoseconds.
const LOOK_NS: libc::c_long = 50_000_000;

/// Runs in a process of its own: continues `stopped` when `goes_on` returns true. `goes_on` must make only async-signal-safe
/// calls. `stopped` ends this process.
fn continue_when(stopped: libc::pid_t, goes_on: impl Fn() -> bool) -> ! {
    // SAFETY: constants, and a signal to our parent, which exists, or its end has killed us.
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

/// Whether the session has a terminal. Makes only async-signal-safe calls.
fn has_terminal() -> bool {
    // SAFETY: the path is a C string; closing involves no memory.
    unsafe {
        let terminal = libc::open(c"/dev/tty".as_ptr(), libc::O_RDONLY | libc::O_NONBLOCK | libc::O_CLOEXEC);
        terminal >= 0 && libc::close(terminal) == 0
    }
}

/// Whether this `/proc/PID/stat` says that its process is stopped. Makes only async-signal-safe calls.
fn is_stopped(path: &CStr) -> bool {
    let mut text = [0u8; 256];
    // SAFETY: the path is a C string, and the buffer has the size given.
    let read = unsafe {
        let file = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        let read = libc::read(file, text.as_mut_ptr().cast(), text.len());
        libc::close(file);
        usize::try_from(read).unwrap_or(0)
    };
    // The name in brackets may contain brackets itself.
    let after = text[..read].iter().rposition(|b| *b == b')').and_then(|at| text.get(at + 2));
    after.is_some_and(|state| b"Tt".contains(state))
}

/// The signals that the program gets for one that came to us: `sent` by a process, or else by the kernel.
///
/// The story: a terminal's window that ran only `uzswap run` was closed. The program would have ended without us, but went on for
/// good.
fn passed_on(signal: libc::c_int, sent: bool) -> impl Iterator<Item = libc::c_int> {
    let hung_up = !sent && signal == libc::SIGHUP && leads_session();
    // As in the kernel, a stopped program goes on, and ends.
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

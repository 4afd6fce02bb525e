//! The witness: it tells whether a signal that came to the command has come to its whole process group.
//!
//! The command and its program are in one process group. What a process sends to the command alone is meant for the program, and
//! must be forwarded. What it sends to the group (`kill -INT -PGID`, a shell's `kill %1`, `timeout`, Jupyter) has reached the
//! program by itself. In the command both look the same.
//!
//! The story: Redis got SIGINT twice, and the second one ends it without saving its data. A Jupyter kernel lost a request.
//!
//! So a process waits beside the program, in the same group, for signals that nobody sends to it alone. What comes to it has come
//! to the group. It is exact, up to what the kernel itself merges:
//!
//! - The kernel signals the members of a group one after the other, holding its list of tasks for reading. [`after_senders`] asks
//!   for that list for writing, so what was under way is complete when it returns.
//! - The order is: a signal is pending here; wait for its sender; have the witness tell what has come to it; wait for the senders of
//!   that; only then take the signal. What comes to the group before it is taken here merges with it, as it does in the kernel; what
//!   comes later is pending here anew, and at the witness too.
//! - What has come to the witness, but is not pending here, has been dealt with, or was sent to the witness after all (by somebody who
//!   signals processes one by one). It is forgotten at once: it must not vouch for what somebody sends to the command alone later.
//!   So the witness also tells of signals by itself.
//! - What was pending here when the program came into being has not reached the program, whoever else got it ([`Early`]).
//!
//! The witness has all signals blocked that the command takes, no descriptors but two of its own, and another name than the command.
//! (Whoever signals all that is called `uzswap` means the command alone.) It ends with the command, is reaped by it, and neither its
//! end nor a stop is seen by who waits for ordinary children. Where there can be none, or it does not answer, signals are forwarded
//! as if they had been sent to the command alone.

use std::ffi::CString;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::{env, fs, process};

/// What the witness calls itself.
const NAME: &std::ffi::CStr = c"signal-witness";
/// How long to wait for an answer before looking whether the witness was stopped (milliseconds), and how often.
const PATIENCE_MS: libc::c_int = 20;
const LOOKS: u32 = 100;

/// The beginning of a `siginfo_t`: the signal's number, code, sender and value.
type Note = [u8; 32];
/// What the witness sends after all that has come to it: no signal.
const THAT_IS_ALL: Note = [0; 32];

/// A process that sees the signals that come to our process group.
pub struct Witness {
    pid: libc::pid_t,
    /// Our end of the socket between us. Whatever we send asks for all that has come to it.
    socket: OwnedFd,
    /// Readable while a signal is pending in the process that asks.
    signals: OwnedFd,
    /// What has come to the witness and is still pending here.
    seen: Vec<Note>,
    /// Whether it was stopped when we were not, since a SIGCONT was last taken here.
    was_stopped: bool,
    /// See [`Early`].
    early: &'static AtomicU64,
}

/// The signals that were pending in the command when the program came into being.
pub struct Early {
    mask: &'static AtomicU64,
    /// `/proc/PID/status` of the command.
    status: CString,
}

/// A signal's bit in a mask of signals.
pub fn bit(signal: libc::c_int) -> u64 {
    1 << (signal - 1)
}

/// The signals pending in this process.
pub fn pending() -> u64 {
    let mut mask = 0u64;
    // SAFETY: the kernel writes the eight bytes of its set of signals, and the mask outlives the call.
    unsafe { libc::syscall(libc::SYS_rt_sigpending, &raw mut mask, size_of::<u64>()) };
    mask
}

/// Takes a signal of the set, if one is pending. Async-signal-safe.
pub fn take(set: &libc::sigset_t) -> Option<libc::siginfo_t> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: all three outlive the call; zeros are a siginfo_t, too.
    unsafe { (libc::sigtimedwait(set, info.as_mut_ptr(), &raw const now) > 0).then(|| info.assume_init()) }
}

/// Waits until no process is half way through signalling a group.
///
/// `setpgid` takes the kernel's list of tasks for writing before it looks for the process, and this one cannot exist.
fn after_senders() {
    // SAFETY: no memory is involved.
    unsafe { libc::setpgid(libc::pid_t::MAX, 1) };
}

impl Witness {
    /// Starts one. All `signals` are blocked. None if there can be none; `fails`: a test wants that no process can be started for
    /// it.
    ///
    /// The story: where no more processes could be started (`ulimit -u`, `pids.max`), a witness was made of the error number and
    /// dropped at once, which ends its process. That was number -1: all processes that the user may signal were killed.
    pub fn start(signals: &libc::sigset_t, fails: bool) -> Option<Witness> {
        if !children_share_our_pids() {
            return None;
        }
        let (socket, theirs) = sockets()?;
        // SAFETY: the set is initialised, and the descriptor is nobody else's.
        let fd = unsafe {
            let fd = libc::signalfd(-1, signals, libc::SFD_CLOEXEC);
            (fd >= 0).then(|| OwnedFd::from_raw_fd(fd))?
        };
        let early = shared_mask()?;
        let disguise = Disguise::new();
        // Without a signal at its end: only who asks for it waits for it. Untraced: a debugger that follows our children means the
        // program.
        // SAFETY: a fork; the child makes async-signal-safe calls only and never returns from here.
        let fork = || unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_UNTRACED, 0, 0, 0, 0) } as libc::pid_t;
        let pid = if fails { -1 } else { fork() };
        if pid == 0 {
            disguise.put_on();
            testify(&theirs, &fd, signals);
        }
        if pid < 0 {
            return None;
        }
        Some(Witness { pid, socket, signals: fd, seen: Vec::new(), was_stopped: false, early })
    }

    /// What the program's process calls before it executes the program.
    pub fn early(&self) -> Option<Early> {
        let status = CString::new(format!("/proc/{}/status", process::id())).ok()?;
        Some(Early { mask: self.early, status })
    }

    /// Sleeps until a signal is pending here, or the witness says something. Returns whether it does.
    pub fn sleep(&self) -> bool {
        let mut polls = [&self.signals, &self.socket].map(|fd| waits_for(fd.as_raw_fd()));
        // SAFETY: two pollfds of ours, which outlive the call.
        unsafe { libc::poll(polls.as_mut_ptr(), 2, -1) };
        polls[1].revents != 0
    }

    /// Learns what has come to the witness. None if it does not answer.
    ///
    /// A signal that was pending here before the call, and is taken after it, is one that [`Self::saw`] knows about.
    pub fn look(&mut self) -> Option<()> {
        after_senders();
        self.go_on();
        self.ask()?;
        after_senders();
        let pending = pending();
        self.seen.retain(|note| pending & bit(number(note)) != 0);
        Some(())
    }

    /// Whether a signal that was just taken here has come to the group since the program is in it: then returns the group.
    pub fn saw(&mut self, info: &libc::siginfo_t) -> Option<libc::pid_t> {
        let (note, signal) = (note_of(info), info.si_signo);
        let at = self.seen.iter().position(|seen| *seen == note);
        if signal < libc::SIGRTMIN() {
            // All that came have merged.
            self.seen.retain(|seen| number(seen) != signal);
        } else if let Some(at) = at {
            self.seen.remove(at);
        }
        // A stopped group has not been continued, whatever was told before it stopped: the SIGCONT that continued us was sent to us
        // alone. That is this one, unless one is pending.
        let alone = signal == libc::SIGCONT && {
            self.go_on();
            self.was_stopped && pending() & bit(libc::SIGCONT) == 0
        };
        self.was_stopped &= !alone;
        let was_early = self.early.fetch_and(pending(), Relaxed) & bit(signal) != 0;
        // SAFETY: no memory is involved.
        (at.is_some() && !was_early && !alone).then(|| unsafe { libc::getpgid(self.pid) })
    }

    /// Ends it, so that no process is left in our group. It takes a while to end, and is reaped when this is dropped.
    pub fn end(&self) {
        // SAFETY: our child has not been reaped.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
    }

    /// Has the witness tell all that has come to it.
    fn ask(&mut self) -> Option<()> {
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: one byte is read, of a note.
        if unsafe { libc::send(self.socket.as_raw_fd(), THAT_IS_ALL.as_ptr().cast(), 1, flags) } < 0 {
            return None;
        }
        for _ in 0..LOOKS {
            let mut poll = waits_for(self.socket.as_raw_fd());
            // SAFETY: a pollfd of ours, which outlives the call.
            while unsafe { libc::poll(&raw mut poll, 1, PATIENCE_MS) } > 0 {
                match receive(&self.socket)? {
                    THAT_IS_ALL => return Some(()),
                    note => self.seen.push(note),
                }
            }
            self.go_on();
        }
        None
    }

    /// Continues the witness if it is stopped, as the whole group was, and we alone were continued.
    fn go_on(&mut self) {
        let options = libc::WSTOPPED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        // SAFETY: `info` outlives the call; zeros are a siginfo_t, which has the field. Our child has not been reaped.
        unsafe {
            let known = libc::waitid(libc::P_PID, self.pid as libc::id_t, info.as_mut_ptr(), options) == 0;
            self.was_stopped |= known && info.assume_init().si_pid() != 0 && libc::kill(self.pid, libc::SIGCONT) == 0;
        }
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.end();
        // SAFETY: our child has not been reaped, and nobody needs its status.
        unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), libc::__WALL) };
    }
}

impl Early {
    /// Notes what is pending in the command, our parent. Makes only async-signal-safe calls: used between fork and exec.
    pub fn note(&self) {
        let mut text = [0u8; 4096];
        // SAFETY: the path is a C string, and the buffer has the size given.
        let read = unsafe {
            let file = libc::open(self.status.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
            let read = libc::read(file, text.as_mut_ptr().cast(), text.len());
            libc::close(file);
            usize::try_from(read).unwrap_or(0)
        };
        self.mask.store(shared_pending(&text[..read]), Relaxed);
    }
}

/// The process's pending signals in the text of `/proc/PID/status`.
fn shared_pending(status: &[u8]) -> u64 {
    const FIELD: &[u8] = b"\nShdPnd:\t";
    let Some(at) = status.windows(FIELD.len()).position(|field| field == FIELD) else { return 0 };
    let digits = status[at + FIELD.len()..].iter().map_while(|b| char::from(*b).to_digit(16));
    digits.fold(0, |mask, digit| mask << 4 | u64::from(digit))
}

/// Whether our children see processes by the same numbers as we do. (`unshare --pid` without `--fork`: the first child is process
/// 1 of another namespace. That is the program.)
fn children_share_our_pids() -> bool {
    let inode = |name| fs::metadata(format!("/proc/self/ns/{name}")).ok().map(|m| m.ino());
    inode("pid") == inode("pid_for_children")
}

/// A pair of sockets that keep messages apart.
fn sockets() -> Option<(OwnedFd, OwnedFd)> {
    let mut fds = [-1; 2];
    // SAFETY: room for two descriptors, which are nobody else's.
    unsafe {
        let made = libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0, fds.as_mut_ptr());
        (made == 0).then(|| (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])))
    }
}

/// A number in memory that our children share with us.
fn shared_mask() -> Option<&'static AtomicU64> {
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping of zeros, which stays. It begins at a page, and is larger than the number.
    unsafe {
        let page = libc::mmap(std::ptr::null_mut(), size_of::<AtomicU64>(), access, kind, -1, 0);
        (page != libc::MAP_FAILED).then(|| &*page.cast::<AtomicU64>())
    }
}

fn waits_for(fd: libc::c_int) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

fn note_of(info: &libc::siginfo_t) -> Note {
    // SAFETY: the structure is larger, and all of it is initialised.
    unsafe { std::ptr::from_ref(info).cast::<Note>().read() }
}

fn number(note: &Note) -> libc::c_int {
    libc::c_int::from_ne_bytes([note[0], note[1], note[2], note[3]])
}

/// The next message; None if the other end is closed.
fn receive(socket: &OwnedFd) -> Option<Note> {
    let mut note = THAT_IS_ALL;
    // SAFETY: the buffer has the size given.
    let read = unsafe { libc::recv(socket.as_raw_fd(), note.as_mut_ptr().cast(), note.len(), 0) };
    (read > 0).then_some(note)
}

/// Another name for the witness than the command's.
///
/// The story: `pkill -f "uzswap run"` means the command. If it found the witness too, the program would not be told.
struct Disguise {
    /// Where our arguments lie, one after the other.
    arguments: *mut u8,
    len: usize,
}

unsafe extern "C" {
    /// libc's pointer to the first argument.
    static program_invocation_name: *mut u8;
}

impl Disguise {
    fn new() -> Disguise {
        // SAFETY: libc has set it before `main`, and nobody sets it again.
        let arguments = unsafe { program_invocation_name };
        Disguise { arguments, len: env::args_os().map(|argument| argument.len() + 1).sum() }
    }

    /// Async-signal-safe.
    fn put_on(&self) {
        let name = NAME.to_bytes();
        // SAFETY: the kernel has laid out the arguments one after the other, in memory of this process that it may write, and which
        // nobody reads any more. The rest involves constants.
        unsafe {
            libc::prctl(libc::PR_SET_NAME, NAME.as_ptr());
            self.arguments.write_bytes(0, self.len);
            self.arguments.copy_from_nonoverlapping(name.as_ptr(), name.len().min(self.len.saturating_sub(1)));
            // Others then cannot see which file it executes, either, unless they are root.
            libc::prctl(libc::PR_SET_DUMPABLE, 0);
        }
    }
}

/// The witness: tells of each signal as it comes, and when it is asked, that these were all. Makes only async-signal-safe calls.
fn testify(socket: &OwnedFd, signals: &OwnedFd, set: &libc::sigset_t) -> ! {
    let done = |failed: bool| {
        if failed {
            // SAFETY: ends this process.
            unsafe { libc::_exit(0) }
        }
    };
    let tell = |note: Note| {
        // SAFETY: the buffer has the size given.
        unsafe { libc::send(0, note.as_ptr().cast(), note.len(), libc::MSG_NOSIGNAL) }
    };
    // SAFETY: descriptors of this process alone, and constants.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::dup2(socket.as_raw_fd(), 0);
        libc::dup2(signals.as_raw_fd(), 1);
        done(libc::syscall(libc::SYS_close_range, 2, u32::MAX, 0) < 0);
    }
    loop {
        let (mut polls, mut asked) = ([waits_for(0), waits_for(1)], 0u8);
        // SAFETY: two pollfds and one byte, which outlive the calls.
        let came = unsafe {
            libc::poll(polls.as_mut_ptr(), 2, -1);
            libc::recv(0, (&raw mut asked).cast(), 1, libc::MSG_DONTWAIT)
        };
        // The other end is closed.
        done(came == 0);
        while let Some(info) = take(set) {
            done(tell(note_of(&info)) < 0);
        }
        if came > 0 {
            done(tell(THAT_IS_ALL) < 0);
        }
    }
}

//! Identities of processes that outlast the reuse of pids: pid and start time together.
//!
//! Both come from `/proc/PID/stat`. The kernel may give a pid to another process. Together with the start time (in
//! clock ticks since boot, of which 32 bits are kept) it names one process until the machine restarts.

use crate::raw::{self, Errno};
use crate::sys;

/// A process: its pid and start time. Never 0 for an existing process, so 0 can mean none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity(u64);

impl Identity {
    /// The calling process. The start time is 0 if /proc cannot be read.
    pub fn own() -> Self {
        Self::of(crate::thread::getpid() as u32)
    }

    /// The process that has this pid now. The start time is 0 if it is gone already, or /proc cannot be read.
    pub fn of(pid: u32) -> Self {
        Self::new(pid, read_stat(pid).map_or(0, |stat| stat.start))
    }

    fn new(pid: u32, start: u32) -> Self {
        Self(u64::from(start) << 32 | u64::from(pid))
    }

    /// From the raw form; `None` for 0.
    pub fn from_raw(raw: u64) -> Option<Self> {
        (raw != 0).then_some(Self(raw))
    }

    /// The raw form: a number that fits an atomic.
    pub fn raw(self) -> u64 {
        self.0
    }

    /// The pid.
    pub fn pid(self) -> u32 {
        self.0 as u32
    }

    /// The pid as system calls take it; `None` for what is no process's pid. An identity may come from a word that others can
    /// write to, and to the kernel 0 and negative numbers stand for many processes.
    fn one_pid(self) -> Option<i32> {
        i32::try_from(self.pid()).ok().filter(|pid| *pid > 0)
    }

    /// Whether no process has this pid. It is quick, but takes a zombie, or another process with the same pid, for this
    /// one.
    ///
    /// The story: a stray write left a word whose lower half was 0 where a member's identity had been. The kernel takes that
    /// for the caller's process group, which is there, so the member was never found dead, and its charge stayed.
    pub fn is_gone(self) -> bool {
        let Some(pid) = self.one_pid() else { return true };
        // SAFETY: signal 0 only asks.
        let asked = unsafe { sys!(libc::SYS_kill, pid, 0) };
        asked == Err(libc::ESRCH)
    }

    /// Whether the process has ended; a zombie has. A process has not ended while only its first thread has
    /// (`pthread_exit` in `main`), or while some threads are still ending (it was killed, and one of them is in a
    /// write).
    ///
    /// The story: the kernel shows `Z` for such a process, too. Its charge was returned, and its slot and its clusters
    /// of the swap file were given to others while it went on using them.
    pub fn is_dead(self) -> bool {
        if self.is_gone() {
            return true;
        }
        let start = (self.0 >> 32) as u32;
        match read_stat(self.pid()) {
            Some(now) => now.has_ended() || (start != 0 && now.start != 0 && now.start != start),
            // It has ended meanwhile, or /proc is hidden from us: the next look tells.
            None => false,
        }
    }

    /// Whether the process is there and certainly this one: its start time can be read, and is the one known here. Anything
    /// that cannot be taken back, such as a signal, takes this; [`is_dead`](Self::is_dead) errs on the other side.
    pub fn is_certain(self) -> bool {
        let start = (self.0 >> 32) as u32;
        let now = self.one_pid().and_then(|pid| read_stat(pid as u32));
        start != 0 && now.is_some_and(|now| now.start == start && !now.has_ended())
    }

    /// Sends a signal to the process if it is certainly this one; returns whether it was sent.
    ///
    /// The story: `kill` was given the pid in a word that all members of a group can write to. A stray write that leaves its
    /// lower half 0 has the caller's whole process group killed, and a small number some process that is no member.
    pub fn signal(self, signal: i32) -> bool {
        let pid = self.one_pid().filter(|_| self.is_certain());
        // SAFETY: a signal touches no memory of ours.
        pid.is_some_and(|pid| unsafe { sys!(libc::SYS_kill, pid, signal) }.is_ok())
    }
}

/// The first two numbers of the kernel's release.
pub fn kernel_release() -> Option<(u32, u32)> {
    // SAFETY: a plain structure, for which zeros are a valid value.
    let mut names: libc::utsname = unsafe { core::mem::zeroed() };
    // SAFETY: a structure of ours.
    unsafe { sys!(libc::SYS_uname, &raw mut names) }.ok()?;
    let mut numbers = names
        .release
        .split(|c| !(*c as u8).is_ascii_digit())
        .map(|digits| digits.iter().try_fold(0u32, |v, c| v.checked_mul(10)?.checked_add(u32::from(*c as u8 - b'0'))));
    Some((numbers.next()??, numbers.next()??))
}

/// Whether /proc knows the calling process by the number that the process itself sees. It does not if /proc belongs to
/// another PID namespace; there an [`Identity`] identifies nobody. True if /proc cannot be read.
pub fn is_in_own_proc() -> bool {
    let (mut number, mut name) = ([0; 20], [0; 20]);
    let own = raw::decimal(crate::thread::getpid() as u64, &mut number);
    raw::readlink(b"/proc/self\0", &mut name).map_or(true, |name| name == own)
}

/// Whether the kernel never overcommits memory (`vm.overcommit_memory` is 2). It then charges writable reservations too, even if
/// they are never touched. False if that cannot be read.
pub fn never_overcommits() -> bool {
    let Ok(fd) = raw::open(b"/proc/sys/vm/overcommit_memory\0", libc::O_RDONLY) else { return false };
    let mut mode = [0];
    let read = raw::pread(fd, &mut mode, 0);
    raw::close(fd);
    read == Ok(1) && mode == *b"2"
}

/// Whether the calling process shares the clocks of process `pid`, so that both see the same start times. True if that
/// cannot be determined.
pub fn has_clocks_of(pid: &[u8]) -> bool {
    let own = &mut [0; raw::PATH];
    let (mut path, other) = ([0; raw::PATH], &mut [0; raw::PATH]);
    let Some(path) = raw::path_of(&[b"/proc/", pid, b"/ns/time\0"], &mut path) else { return true };
    match (raw::readlink(b"/proc/self/ns/time\0", own), raw::readlink(path, other)) {
        (Ok(own), Ok(other)) => own == other,
        _ => true,
    }
}

/// Whether a child that the calling thread forks would be in the thread's own namespaces of pids and of clocks.
pub fn has_children_beside_it() -> bool {
    let (own, children) = (&mut [0; raw::PATH], &mut [0; raw::PATH]);
    let mut same = |of_own: &[u8], of_children: &[u8]| match raw::readlink(of_own, own) {
        // A namespace without any process yet has no name.
        Ok(own) => raw::readlink(of_children, children) == Ok(own),
        // The kernel has no such namespaces.
        Err(_) => true,
    };
    same(b"/proc/thread-self/ns/pid\0", b"/proc/thread-self/ns/pid_for_children\0")
        && same(b"/proc/thread-self/ns/time\0", b"/proc/thread-self/ns/time_for_children\0")
}

/// Tasks of the whole machine that run or wait for a CPU; `None` if the kernel does not say.
pub fn running() -> Option<u32> {
    let mut text = [0u8; 64];
    let n = read(&[b"/proc/loadavg\0"], &mut text)?;
    parse_running(&text[..n])
}

/// The fourth field of proc_loadavg(5): runnable tasks, a slash, all tasks.
fn parse_running(text: &[u8]) -> Option<u32> {
    let field = text.split(|c| *c == b' ').nth(3)?;
    core::str::from_utf8(field.split(|c| *c == b'/').next()?).ok()?.parse().ok()
}

/// Reads one byte at each address of a process's memory and discards it. Returns how many of the addresses, counted
/// from the first, could be read.
///
/// # Errors
/// `EFAULT`: the first could not be read; `EPERM`, `ENOSYS`: none can.
pub fn read_bytes(pid: i32, addresses: &[usize]) -> Result<usize, Errno> {
    const MOST: usize = 64;
    let (mut bytes, n) = ([0u8; MOST], addresses.len().min(MOST));
    let local = [bytes.as_mut_ptr() as usize, n];
    let mut remote = [[0usize; 2]; MOST];
    for (to, at) in remote.iter_mut().zip(&addresses[..n]) {
        *to = [*at, 1];
    }
    // SAFETY: two vectors of (address, length), the local one of a buffer of ours.
    unsafe { sys!(libc::SYS_process_vm_readv, pid, local.as_ptr(), 1, remote.as_ptr(), n, 0) }
}

/// Reads a process's memory starting at an address.
///
/// # Errors
/// `EFAULT`: not all of it could be read; `EPERM`, `ENOSYS`: none can.
pub fn read_memory(pid: i32, from: usize, to: &mut [u8]) -> Result<(), Errno> {
    let (local, remote) = ([to.as_mut_ptr() as usize, to.len()], [from, to.len()]);
    // SAFETY: two vectors of (address, length), the local one of the caller's buffer.
    let read = unsafe { sys!(libc::SYS_process_vm_readv, pid, local.as_ptr(), 1, remote.as_ptr(), 1, 0) }?;
    if read == to.len() { Ok(()) } else { Err(libc::EFAULT) }
}

/// Fields of /proc/PID/stat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    /// State letter of the first thread.
    state: u8,
    /// Threads that nobody has waited for, including the first.
    threads: u32,
    /// Start time (ticks).
    start: u32,
}

impl Stat {
    fn has_ended(self) -> bool {
        self.state == b'X' || (self.state == b'Z' && self.threads <= 1)
    }
}

fn read_stat(pid: u32) -> Option<Stat> {
    let mut text = [0u8; 512];
    let n = read(&[b"/proc/", raw::decimal(u64::from(pid), &mut [0; 20]), b"/stat\0"], &mut text)?;
    parse_stat(&text[..n])
}

/// Fields 3 (state), 20 (threads) and 22 (start time) of proc_pid_stat(5).
fn parse_stat(text: &[u8]) -> Option<Stat> {
    let after = text.get(text.iter().rposition(|c| *c == b')')? + 2..)?;
    let number = |field: usize| -> Option<u64> {
        core::str::from_utf8(after.split(|c| *c == b' ').nth(field - 3)?).ok()?.parse().ok()
    };
    Some(Stat { state: *after.first()?, threads: number(20)? as u32, start: number(22)? as u32 })
}

/// Whether a thread blocks all signals except perhaps `signal`. A thread does that while it waits for `signal` with
/// sigtimedwait, which takes it out of the mask meanwhile. Sending `signal` to such a thread ends nothing.
///
/// The story: for a user in hundreds of groups the mask is beyond the first 4 KiB, as the list of groups precedes it.
/// Nobody was woken.
pub fn awaits(pid: u32, tid: u32, signal: i32) -> bool {
    let (mut a, mut b) = ([0; 20], [0; 20]);
    let path = [b"/proc/", raw::decimal(pid.into(), &mut a), b"/task/", raw::decimal(tid.into(), &mut b), b"/status\0"];
    let mut path_room = [0; raw::PATH];
    let opened = raw::path_of(&path, &mut path_room).and_then(|path| raw::open(path, libc::O_RDONLY).ok());
    let Some(fd) = opened else { return false };
    let mask = blocked(|to, at| raw::pread(fd, to, at).unwrap_or(0));
    raw::close(fd);
    // SIGKILL and SIGSTOP cannot be blocked.
    let always = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);
    mask.is_some_and(|mask| mask | always | 1 << (signal - 1) == u64::MAX)
}

/// The signals that a thread blocks, from its `status` file, which `read` reads at an offset.
fn blocked(read: impl Fn(&mut [u8], u64) -> usize) -> Option<u64> {
    const WORD: &[u8] = b"\nSigBlk:\t";
    const DIGITS: usize = 16;
    let (mut text, mut at) = ([0u8; 4096], 0);
    loop {
        let n = read(&mut text, at);
        let found = text[..n].windows(WORD.len() + DIGITS).find(|window| window.starts_with(WORD));
        if let Some(found) = found {
            return u64::from_str_radix(core::str::from_utf8(&found[WORD.len()..]).ok()?, 16).ok();
        }
        // The line may begin at the end of what was read and be incomplete.
        match n.checked_sub(WORD.len() + DIGITS) {
            Some(next @ 1..) => at += next as u64,
            _ => return None,
        }
    }
}

/// Reads the file whose path is the parts joined, the last of which ends with NUL.
pub(crate) fn read(parts: &[&[u8]], out: &mut [u8]) -> Option<usize> {
    let fd = raw::open(raw::path_of(parts, &mut [0; raw::PATH])?, libc::O_RDONLY).ok()?;
    let got = raw::pread(fd, out, 0);
    raw::close(fd);
    got.ok()
}

#[cfg(test)]
mod tests {
    use super::{Identity, Stat, awaits, blocked, parse_running, parse_stat, running};

    #[test]
    fn a_process_is_told_from_its_pid() {
        let own = Identity::own();
        assert_eq!(own.pid(), std::process::id());
        assert!(!own.is_dead() && !own.is_gone());
        assert_eq!(Identity::from_raw(own.raw()), Some(own));
        assert_eq!(Identity::from_raw(0), None);
        // The same pid, started at another time.
        let other = Identity::from_raw(own.raw() ^ 1 << 40).unwrap();
        assert!(other.is_dead() && !other.is_gone());
        let child = std::process::Command::new("/bin/true").spawn().unwrap();
        let zombie = Identity::new(child.id(), 0);
        let mut child = child;
        while !zombie.is_dead() {
            std::thread::yield_now();
        }
        assert!(!zombie.is_gone(), "not waited for yet");
        child.wait().unwrap();
        assert!(zombie.is_gone() && zombie.is_dead());
    }

    /// See [`Identity::is_gone`] and [`Identity::signal`].
    #[test]
    fn what_names_many_processes_or_perhaps_another_is_sent_nothing() {
        let own = Identity::own();
        assert!(own.is_certain() && own.signal(0));
        for nobody in [0, u32::MAX, 1 << 31] {
            let nobody = Identity::new(nobody, 7);
            assert!(nobody.is_gone() && nobody.is_dead() && !nobody.is_certain() && !nobody.signal(0), "{nobody:?}");
        }
        // Perhaps this process, and certainly another.
        for start in [0, (own.raw() >> 32) as u32 ^ 1] {
            let other = Identity::new(own.pid(), start);
            assert!(!other.is_certain() && !other.signal(0), "{other:?}");
        }
    }

    #[test]
    fn stat_is_parsed_after_the_name() {
        let text = b"7 (a ) R b) S 1 1 1 0 -1 4 0 0 0 0 0 0 0 0 20 0 1 0 12345 999 1";
        assert_eq!(parse_stat(text), Some(Stat { state: b'S', threads: 1, start: 12345 }));
        assert_eq!(parse_stat(b""), None);
        assert_eq!(parse_stat(b"7 (x)"), None);
    }

    #[test]
    fn who_asks_runs_itself() {
        assert!(running().is_some_and(|tasks| tasks > 0));
        assert_eq!(parse_running(b"0.86 2.90 4.08 3/150 27348\n"), Some(3));
        assert_eq!(parse_running(b"0.86 2.90 4.08\n"), None);
        assert_eq!(parse_running(b""), None);
    }

    #[test]
    fn who_has_threads_left_has_not_ended() {
        let ended = |state, threads| Stat { state, threads, start: 1 }.has_ended();
        assert_eq!([ended(b'Z', 1), ended(b'Z', 0), ended(b'X', 3)], [true; 3]);
        assert_eq!([ended(b'Z', 2), ended(b'S', 1), ended(b'R', 5)], [false; 3]);
    }

    #[test]
    fn who_is_in_the_namespaces_of_its_proc_is_known_to_be() {
        assert!(super::is_in_own_proc() && super::has_children_beside_it());
        assert!(super::has_clocks_of(b"self") && super::has_clocks_of(b"0") && super::has_clocks_of(&[b'1'; 99]));
    }

    #[test]
    fn what_is_blocked_is_found_wherever_it_is() {
        for groups in 0..1000 {
            let text = format!(
                "Name:\tx\nGroups:\t{}\nSigPnd:\t0000000000000000\nSigBlk:\tfffffffe7ffbfeff\nSigIgn:\t0\n",
                "1234567 ".repeat(groups)
            );
            let read = |to: &mut [u8], at: u64| {
                let rest = text.as_bytes().get(at as usize..).unwrap_or_default();
                let n = rest.len().min(to.len());
                to[..n].copy_from_slice(&rest[..n]);
                n
            };
            assert_eq!(blocked(read), Some(0xffff_fffe_7ffb_feff), "{groups} groups");
        }
        assert_eq!(blocked(|_, _| 0), None);
        assert_eq!(blocked(|to, at| if at < 9000 { to.len() } else { 5 }), None);
    }

    #[test]
    fn a_thread_that_awaits_a_signal_is_known() {
        let pid = std::process::id();
        let tid = crate::thread::gettid() as u32;
        assert!(!awaits(pid, tid, 64));
        assert!(!awaits(pid, u32::MAX, 64));
        let mut old = 0u64;
        let set = |mask: u64, old: *mut u64| {
            // SAFETY: masks of 8 bytes, ours.
            unsafe { crate::sys!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const mask, old, 8) }.unwrap();
        };
        set(u64::MAX, &raw mut old);
        let all = awaits(pid, tid, 64);
        set(u64::MAX >> 1, core::ptr::null_mut());
        let but_one = awaits(pid, tid, 64);
        set(u64::MAX >> 2, core::ptr::null_mut());
        let but_two = awaits(pid, tid, 64);
        set(old, core::ptr::null_mut());
        assert_eq!((all, but_one, but_two), (true, true, false));
    }
}

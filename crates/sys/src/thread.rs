//! Helper threads: made with `clone` directly, and what threads ask of the kernel.
//!
//! libc does not know these threads. They hold none of its locks, have no TLS from it, do not keep the process alive
//! after `pthread_exit`, and can be started in a forked child before libc has put itself in order. In turn they may use
//! nothing of libc or std that needs TLS. All signals are blocked in them. A tracer that follows new threads
//! (`strace -f`) does not get them: when it reads memory that is out it waits for one of them, and would have stopped
//! the very one.

use crate::raw::Errno;
use crate::sys;
use core::arch::asm;

/// Bytes mapped for each helper. The stack grows down from the TLS block at the top.
pub const STACK_BYTES: usize = 512 << 10;

/// Starts `entry(arg)` on the stack `[stack, stack + STACK_BYTES)` and returns the thread id.
///
/// With `own_files` the thread gets its own copy of the descriptor table, which the program cannot close.
///
/// # Errors
/// `clone`'s.
///
/// # Safety
/// The stack must be zeroed or unused memory that stays mapped. `entry` must never return, and must obey the rules of
/// this module.
pub unsafe fn spawn(stack: usize, own_files: bool, entry: extern "C" fn(usize) -> !, arg: usize) -> Result<i32, Errno> {
    let tls = stack + STACK_BYTES - 4096;
    // SAFETY: the block lies in the caller's stack memory. The words are the self pointers that the ABI wants at %fs.
    unsafe {
        (tls as *mut usize).write(tls);
        ((tls + 16) as *mut usize).write(tls);
    }
    // The room below %fs stays unused, so a stray write to a TLS variable of libc (errno) hits nothing.
    let top = (tls - 16384) & !15;
    let mut flags = libc::CLONE_VM
        | libc::CLONE_FS
        | libc::CLONE_SIGHAND
        | libc::CLONE_THREAD
        | libc::CLONE_SYSVSEM
        | libc::CLONE_SETTLS;
    // A tracer that has system calls filtered (`strace --seccomp-bpf`) has its filter on the helpers, too, and an
    // untraced thread would get ENOSYS from it.
    // SAFETY: no memory is involved.
    if unsafe { sys!(libc::SYS_prctl, libc::PR_GET_SECCOMP, 0, 0, 0, 0) } == Ok(0) {
        flags |= libc::CLONE_UNTRACED;
    }
    if !own_files {
        flags |= libc::CLONE_FILES;
    }
    let mut old = 0u64;
    let all = !0u64;
    // The child inherits the mask, so block everything before and restore after.
    // SAFETY: masks of 8 bytes, ours.
    unsafe { sys!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const all, &raw mut old, 8) }?;
    let ret: isize;
    // SAFETY: the child runs on its own stack and jumps to `entry`, never returning here.
    unsafe {
        asm!("syscall",
             "test rax, rax",
             "jnz 2f",
             "xor ebp, ebp",
             "mov rdi, r13",
             "call r12",
             "ud2",
             "2:",
             inlateout("rax") libc::SYS_clone as isize => ret, in("rdi") flags, in("rsi") top, in("rdx") 0, in("r10") 0,
             in("r8") tls, in("r12") entry, in("r13") arg, lateout("rcx") _, lateout("r11") _);
    }
    // SAFETY: as above.
    unsafe { sys!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const old, 0, 8) }?;
    crate::raw::check(ret).map(|t| t as i32)
}

/// Ends the calling helper thread.
pub fn exit() -> ! {
    loop {
        // SAFETY: ends this thread.
        let _ = unsafe { sys!(libc::SYS_exit, 0) };
    }
}

/// The caller's thread id.
pub fn gettid() -> i32 {
    // SAFETY: no arguments.
    unsafe { sys!(libc::SYS_gettid) }.unwrap_or(0) as i32
}

/// The process id.
pub fn getpid() -> i32 {
    // SAFETY: no arguments.
    unsafe { sys!(libc::SYS_getpid) }.unwrap_or(0) as i32
}

/// The parent's process id, or that of the process that adopted the caller.
pub fn getppid() -> i32 {
    // SAFETY: no arguments.
    unsafe { sys!(libc::SYS_getppid) }.unwrap_or(0) as i32
}

/// The effective user id.
pub fn user() -> u32 {
    // SAFETY: no arguments.
    unsafe { sys!(libc::SYS_geteuid) }.unwrap_or(0) as u32
}

/// Ends the process with all its threads. None of its own code runs any more.
pub fn end_process(status: i32) -> ! {
    loop {
        // SAFETY: ends the process.
        let _ = unsafe { sys!(libc::SYS_exit_group, status) };
    }
}

/// Sends a signal to a process, ignoring errors.
pub fn kill(pid: i32, signal: i32) {
    // SAFETY: a signal touches no memory of ours.
    let _ = unsafe { sys!(libc::SYS_kill, pid, signal) };
}

/// Waits until `signal`, which the calling thread blocks, is pending for it, and consumes it. The timeout is in
/// nanoseconds, less than a second; `None` waits forever.
pub fn take_signal(signal: i32, timeout_ns: Option<u64>) {
    let set = 1u64 << (signal - 1);
    let ts = timeout_ns.map(|ns| libc::timespec { tv_sec: 0, tv_nsec: ns as i64 });
    let ptr = ts.as_ref().map_or(core::ptr::null(), core::ptr::from_ref);
    // SAFETY: a signal set of 8 bytes and a timespec, ours.
    let _ = unsafe { sys!(libc::SYS_rt_sigtimedwait, &raw const set, 0, ptr, 8) };
}

/// Sends a signal to thread `tid` of process `pid`, like [`kill`].
pub fn kill_thread(pid: i32, tid: i32, signal: i32) {
    // SAFETY: a signal touches no memory of ours.
    let _ = unsafe { sys!(libc::SYS_tgkill, pid, tid, signal) };
}

/// Sets this thread's signal mask, a bit for each signal, signal 1 the lowest. Returns the old mask.
pub fn set_signal_mask(mask: u64) -> u64 {
    change_signal_mask(libc::SIG_SETMASK, mask)
}

/// Blocks more signals in this thread. Returns the old mask.
pub fn block_signals(mask: u64) -> u64 {
    change_signal_mask(libc::SIG_BLOCK, mask)
}

fn change_signal_mask(how: i32, mask: u64) -> u64 {
    let mut old = 0u64;
    // SAFETY: masks of 8 bytes, ours.
    let _ = unsafe { sys!(libc::SYS_rt_sigprocmask, how, &raw const mask, &raw mut old, 8) };
    old
}

/// Sleeps.
pub fn sleep_ns(ns: u64) {
    let ts = libc::timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 };
    // SAFETY: our timespec.
    let _ = unsafe { sys!(libc::SYS_nanosleep, &raw const ts, 0) };
}

/// Reads from an address through a system call, which waits for a missing page like any access; false when nothing
/// there may be read.
pub fn reads(address: usize) -> bool {
    let timeout = [0i64; 2];
    // The futex call compares the word with a value that it may or may not have, with a timeout of zero.
    // SAFETY: a timeout of ours; the kernel checks the address.
    let asked = unsafe {
        sys!(libc::SYS_futex, address & !3, libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, 0x5a5a_a5a5, timeout.as_ptr())
    };
    asked != Err(libc::EFAULT)
}

/// The thread pointer, where the calling thread's TLS ends and its control block begins.
pub fn pointer() -> usize {
    let pointer: usize;
    // SAFETY: by the x86-64 ABI and in glibc, a control block begins with its own address, twice.
    unsafe { core::arch::asm!("mov {}, fs:[0x10]", out(reg) pointer, options(nostack, readonly)) };
    pointer
}

/// CPU time used by a thread of this process (nanoseconds); 0 if there is no such thread.
pub fn cpu_ns(tid: i32) -> u64 {
    // The number of a thread's CPU-time clock: see clock_getcpuclockid(3) and the kernel's encoding.
    clock_ns((!tid << 3) | 6)
}

/// CPU time used by this process (nanoseconds).
pub fn process_cpu_ns() -> u64 {
    clock_ns(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// This process's page faults (and no other's) that had nothing to read: new pages, and copies of shared ones.
pub fn minor_faults() -> u64 {
    // SAFETY: a plain structure of integers, for which zeros are valid.
    let mut usage: libc::rusage = unsafe { core::mem::zeroed() };
    // SAFETY: fills a structure of ours.
    let _ = unsafe { sys!(libc::SYS_getrusage, libc::RUSAGE_SELF, &raw mut usage) };
    usage.ru_minflt as u64
}

/// Reads a clock (nanoseconds); 0 if there is no such clock.
fn clock_ns(clock: i32) -> u64 {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills a timespec of ours.
    let ok = unsafe { sys!(libc::SYS_clock_gettime, clock, &raw mut ts) };
    if ok.is_ok() { ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64 } else { 0 }
}

/// Monotonic time in nanoseconds.
pub fn now_ns() -> u64 {
    // The vDSO would save the system call, but is reached through libc.
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// Allows the calling thread to read the time stamp counter. A program may have forbidden that (PR_SET_TSC) to the
/// thread from which this one inherits.
pub fn allow_ticks() {
    // SAFETY: changes what one instruction does in this thread.
    let _ = unsafe { sys!(libc::SYS_prctl, libc::PR_SET_TSC, libc::PR_TSC_ENABLE, 0, 0, 0) };
}

/// The processor's time stamp counter: some 1 to 4 ticks a nanosecond, at the same pace on all CPUs. See
/// [`allow_ticks`].
pub fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has this instruction, and it only reads a register.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Makes the calling thread's sleeps end on time, not up to 50 µs later. By default the kernel delays them so as to
/// wake several threads at once.
pub fn wake_on_time() {
    // SAFETY: a number only.
    let _ = unsafe { sys!(libc::SYS_prctl, libc::PR_SET_TIMERSLACK, 1, 0, 0, 0) };
}

/// Asks that the calling thread, which has normal policy and does little work at a time, gets the CPU soon after it is
/// woken: a slice of 100 µs (`sched_setattr`, Linux 6.12; no effect elsewhere). It keeps that slice if it gets idle policy
/// later.
pub fn wake_soon() {
    let Some(nice) = niceness() else { return };
    // struct sched_attr, first version: size and policy, flags, nice and priority, runtime, deadline, period.
    let attr = [48u64, 0, u64::from(nice as u32), 100_000, 0, 0];
    // SAFETY: a structure of ours.
    let _ = unsafe { sys!(libc::SYS_sched_setattr, 0, attr.as_ptr(), 0) };
}

/// Whether thread `tid` of process `pid` exists. True also for one that nobody has waited for yet, and for another one
/// that has its number by now.
pub fn is_there(pid: i32, tid: i32) -> bool {
    // SAFETY: signal 0 is never sent; the call only checks whether it could be.
    let asked = unsafe { sys!(libc::SYS_tgkill, pid, tid, 0) };
    asked != Err(libc::ESRCH)
}

/// The calling thread's niceness.
fn niceness() -> Option<i32> {
    // SAFETY: numbers only. (The raw call returns 20 minus the niceness: 1 to 40.)
    unsafe { sys!(libc::SYS_getpriority, libc::PRIO_PROCESS, 0) }.ok().map(|n| 20 - n as i32)
}

/// Whether a thread has the policy `SCHED_IDLE`. False if there is none of this number.
pub fn has_idle_policy(tid: i32) -> bool {
    // SAFETY: a number only.
    let policy = unsafe { sys!(libc::SYS_sched_getscheduler, tid) };
    policy.is_ok_and(|policy| policy as i32 & !libc::SCHED_RESET_ON_FORK == libc::SCHED_IDLE)
}

/// Sets a thread's scheduling policy to `SCHED_IDLE` or `SCHED_OTHER`.
pub fn set_idle_policy(tid: i32, idle: bool) {
    let policy = if idle { libc::SCHED_IDLE } else { libc::SCHED_OTHER };
    let param = 0i32;
    // SAFETY: sched_param is one int.
    let _ = unsafe { sys!(libc::SYS_sched_setscheduler, tid, policy, &raw const param) };
}

/// Pins the calling thread's I/O priority to what it is now, whatever its scheduling policy becomes.
///
/// If none was set (`ionice`), the kernel derives it from policy and niceness. Disk schedulers (mq-deadline, BFQ) then
/// let reads of a `SCHED_IDLE` thread wait for all other I/O, up to ten seconds.
pub fn keep_io_priority() {
    const WHO_PROCESS: i32 = 1;
    const CLASS_SHIFT: usize = 13;
    const BEST_EFFORT: usize = 2;
    // SAFETY: numbers only.
    let Ok(set) = (unsafe { sys!(libc::SYS_ioprio_get, WHO_PROCESS, 0) }) else { return };
    // For a thread without a set priority, some kernels report the derived one, others that none is set.
    let priority = if set >> CLASS_SHIFT == 0 {
        // SAFETY: numbers only. (The call returns 20 minus the niceness; the kernel derives 0 to 7 from the niceness:
        // `task_nice_ioprio`.)
        let Ok(nice) = (unsafe { sys!(libc::SYS_getpriority, libc::PRIO_PROCESS, 0) }) else { return };
        (BEST_EFFORT << CLASS_SHIFT) + (40 - nice) / 5
    } else {
        set
    };
    // SAFETY: numbers only.
    let _ = unsafe { sys!(libc::SYS_ioprio_set, WHO_PROCESS, 0, priority) };
}

/// Whether the calling thread, having taken the policy `SCHED_IDLE`, could leave it again (or another thread could make
/// it leave).
///
/// The kernel allows that with `CAP_SYS_NICE`, or if the thread's niceness is within the limit on niceness
/// (`RLIMIT_NICE`). By default users have neither.
pub fn may_leave_idle_policy() -> bool {
    let mut most = [0u64; 2];
    // SAFETY: the kernel fills a limit of ours.
    let asked = unsafe { sys!(libc::SYS_prlimit64, 0, libc::RLIMIT_NICE, 0, most.as_mut_ptr()) };
    // SAFETY: numbers only. (The raw call returns 20 minus the niceness: 1 to 40.)
    let Ok(own) = (unsafe { sys!(libc::SYS_getpriority, libc::PRIO_PROCESS, 0) }) else { return false };
    if asked.is_ok() && most[0] >= own as u64 {
        return true;
    }
    let set = |nice: isize| {
        // SAFETY: numbers only; it is the caller's own niceness.
        unsafe { sys!(libc::SYS_setpriority, libc::PRIO_PROCESS, 0, nice) }.is_ok()
    };
    // The kernel demands the same right for lowering one's niceness by one. A thread at the lowest niceness cannot test
    // it this way.
    let nice = 20 - own as isize;
    own < 40 && set(nice - 1) && set(nice)
}

/// The calling thread's capabilities in the kernel's layout (effective, permitted, inheritable; twice).
///
/// # Errors
/// The kernel's.
pub fn capabilities() -> Result<[u32; 6], Errno> {
    let mut own = [0u32; 6];
    // SAFETY: structures of ours, in the layout of this version.
    unsafe { sys!(libc::SYS_capget, CAPABILITY_HEADER.as_ptr(), own.as_mut_ptr()) }.map(|_| own)
}

/// Sets the calling thread's capabilities.
///
/// # Errors
/// The kernel's: `EPERM` for any that it does not have.
pub fn set_capabilities(to: [u32; 6]) -> Result<(), Errno> {
    // SAFETY: as above.
    unsafe { sys!(libc::SYS_capset, CAPABILITY_HEADER.as_ptr(), to.as_ptr()) }.map(drop)
}

/// `_LINUX_CAPABILITY_VERSION_3`, for the calling thread.
const CAPABILITY_HEADER: [u32; 2] = [0x2008_0522, 0];

/// A set of CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpus([u64; 16]);

impl Cpus {
    /// The CPUs on which a thread (0: the caller) may run; all CPUs if that cannot be read.
    pub fn of(tid: i32) -> Self {
        let mut set = [0; 16];
        // SAFETY: the set is 128 bytes.
        let got = unsafe { sys!(libc::SYS_sched_getaffinity, tid, 128, set.as_mut_ptr()) };
        if got.is_err() { Self([u64::MAX; 16]) } else { Self(set) }
    }

    /// Only one CPU; the empty set for a CPU beyond 1023.
    pub fn only(cpu: usize) -> Self {
        let mut set = [0; 16];
        if let Some(word) = set.get_mut(cpu / 64) {
            *word = 1 << (cpu % 64);
        }
        Self(set)
    }

    /// This set without one CPU; `None` if that leaves none.
    pub fn without(mut self, cpu: usize) -> Option<Self> {
        if let Some(word) = self.0.get_mut(cpu / 64) {
            *word &= !(1 << (cpu % 64));
        }
        (self.0 != [0; 16]).then_some(self)
    }

    /// Number of CPUs in the set.
    pub fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Confines a thread (0: the caller) to these CPUs. No effect if none of them is allowed.
    pub fn confine(&self, tid: i32) {
        // SAFETY: the set is 128 bytes.
        let _ = unsafe { sys!(libc::SYS_sched_setaffinity, tid, 128, self.0.as_ptr()) };
    }
}

/// How long thread `tid` of this process has waited for a CPU in its life (nanoseconds), counting only waits that ended
/// with one; 0 if the kernel does not say.
pub fn waited_ns(tid: i32) -> u64 {
    let mut text = [0u8; 512];
    // Fields: time on a CPU, time waited for one, number of times it ran.
    let waited = read_of(tid as u32, b"/schedstat\0", &mut text).and_then(|text| text.split(|c| *c == b' ').nth(1));
    waited.and_then(|digits| core::str::from_utf8(digits).ok()?.parse().ok()).unwrap_or(0)
}

/// Reads a /proc file of thread `tid` of this process; `name` ends with NUL.
fn read_of<'a>(tid: u32, name: &[u8], text: &'a mut [u8]) -> Option<&'a [u8]> {
    read_in(b"/proc/self/task/", tid, name, text)
}

fn read_in<'a>(folder: &[u8], tid: u32, name: &[u8], text: &'a mut [u8]) -> Option<&'a [u8]> {
    let mut number = [0; 20];
    let n = crate::process::read(&[folder, crate::raw::decimal(tid.into(), &mut number), name], text)?;
    text.get(..n)
}

/// The CPU on which thread `tid` of this process last ran.
pub fn cpu_of(tid: u32) -> Option<usize> {
    let mut text = [0u8; 512];
    cpu_in(read_of(tid, b"/stat\0", &mut text)?)
}

/// The CPU on which thread `tid`, of any process, last ran.
pub fn cpu_of_any(tid: u32) -> Option<usize> {
    let mut text = [0u8; 512];
    cpu_in(read_in(b"/proc/", tid, b"/stat\0", &mut text)?)
}

/// The CPU in the text of a `stat` file.
fn cpu_in(text: &[u8]) -> Option<usize> {
    let after = text.iter().rposition(|c| *c == b')')? + 2;
    // Field 39 of proc_pid_stat(5) is the processor; the state, right after the name, is field 3.
    let field = text[after..].split(|c| *c == b' ').nth(36)?;
    core::str::from_utf8(field).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicBool, Ordering::*};
    use std::sync::Barrier;

    /// A thread inherits from its creator that it may not read the counter, and would end by SIGSEGV.
    #[test]
    fn the_counter_is_read_also_where_the_program_forbade_it_to_itself() {
        let reads = || {
            // SAFETY: changes what one instruction does in this thread.
            unsafe { sys!(libc::SYS_prctl, libc::PR_SET_TSC, libc::PR_TSC_SIGSEGV, 0, 0, 0) }.expect("prctl");
            let child = std::thread::spawn(|| {
                allow_ticks();
                (ticks(), ticks())
            });
            child.join().expect("it reads")
        };
        let (first, second) = std::thread::spawn(reads).join().expect("its child ends");
        assert!(first < second);
    }

    #[test]
    fn a_thread_is_woken_on_time() {
        let slack = || {
            wake_on_time();
            // SAFETY: a number only.
            unsafe { sys!(libc::SYS_prctl, libc::PR_GET_TIMERSLACK, 0, 0, 0, 0) }
        };
        assert_eq!(std::thread::spawn(slack).join().expect("it ends"), Ok(1));
    }

    /// The story: reads that a fault waited for had the lowest priority of all, and took seconds beside other
    /// processes' I/O.
    #[test]
    fn what_an_idle_thread_reads_is_as_urgent_as_before() {
        let class = || {
            // SAFETY: numbers only.
            unsafe { sys!(libc::SYS_ioprio_get, 1, 0) }.unwrap() >> 13
        };
        let of_another = |keep: bool| {
            let asked = std::thread::spawn(move || {
                if keep {
                    keep_io_priority();
                }
                set_idle_policy(0, true);
                class()
            });
            asked.join().unwrap()
        };
        assert_eq!(of_another(true), 2, "best effort");
        // Older kernels do not report the derived priority.
        assert!([0, 3].contains(&of_another(false)), "idle");
    }

    /// Two threads compete for one CPU. The kernel reports how long one of them waited, without its time on the CPU.
    #[test]
    fn a_thread_that_others_keep_off_the_cpu_has_waited() {
        let cpu = cpu_of(gettid() as u32).unwrap();
        let (begin, done) = (Barrier::new(2), AtomicBool::new(false));
        let compute = || {
            let tid = gettid();
            Cpus::only(cpu).confine(tid);
            let (since, waited) = (now_ns(), waited_ns(tid));
            begin.wait();
            // The longest slice is a few milliseconds, and each waits for the other's.
            while !done.load(Relaxed) && waited_ns(tid) < waited + 20_000_000 {
                core::hint::spin_loop();
            }
            done.store(true, Relaxed);
            (waited_ns(tid) - waited, now_ns() - since)
        };
        let both: Vec<(u64, u64)> = std::thread::scope(|scope| {
            let threads = [scope.spawn(compute), scope.spawn(compute)];
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(both.iter().any(|(waited, _)| *waited >= 20_000_000), "{both:?}");
        assert!(both.iter().all(|(waited, all)| waited <= all), "{both:?}");
    }

    #[test]
    fn nothing_is_known_of_a_thread_that_is_not_there() {
        assert_eq!(waited_ns(i32::MAX), 0);
        assert_eq!((cpu_of(i32::MAX as u32), cpu_of_any(i32::MAX as u32)), (None, None));
        assert!(!is_there(getpid(), i32::MAX) && is_there(getpid(), gettid()));
    }
}

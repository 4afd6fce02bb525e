//! Writes uzswap's messages to the program's standard error, without waiting for anything that the handler must serve.
//!
//! The kernel holds a file's or a pipe's lock while it reads what a thread writes there from the program's memory, and where that
//! is out it waits for the handler. Another thread that writes to the same file waits for that lock; and if nobody reads a full
//! pipe, for whoever does. So none of uzswap's threads writes there itself, nor does a thread of the program that holds the
//! pager's lock. A thread made for the message writes it, and nobody waits longer than a moment for that one.
//!
//! The story: a program wrote memory that was out to standard error just when its group was full. The thread that reported that
//! held the pager's lock and waited for the file's lock, so for the program's thread, whose fault waited for the pager's lock.
//! The program hung, in each of twelve runs.
//!
//! Such a thread has a place of its own with its message, which it unmaps when it is done: it may outlive a region. The place is
//! shared memory, which is not managed, and which forked children do not get. If nobody reads what it writes, the thread would
//! stay, and keep a process that is let go of from what only a process of one thread may do. So it writes only once there is room,
//! and [`end`] ends it.

use crate::discover::letgo::PAUSE_NS;
use crate::frames::arena::PAGE;
use crate::pager::Pager;
use core::arch::asm;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering::*};
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::{lock, sys, thread};

/// How long the caller waits for its message to be written (nanoseconds): what comes next may end the process.
const WAIT_NS: u64 = 500_000_000;
/// About how many threads may write messages at a time.
const THREADS: u32 = 16;
/// Room for their tids.
const PLACES: usize = 2 * THREADS as usize;
/// How often a thread that waits for room checks whether it must end (milliseconds).
const LOOK_MS: i32 = 100;
/// How long [`end`] waits for the threads at most (nanoseconds): the time of many such checks.
const END_NS: u64 = 1_000_000_000;
/// Bytes of one message.
const MOST: usize = PAGE - size_of::<usize>();
/// Bytes of a place: a page for the message, and the stack.
const PLACE: usize = PAGE + thread::STACK_BYTES;

/// A message, at the start of its place.
#[repr(C)]
struct Saying {
    len: usize,
    text: [u8; MOST],
}

/// How many messages were begun, and how many were written or given up (a futex).
static BEGUN: AtomicU32 = AtomicU32::new(0);
static SAID: AtomicU32 = AtomicU32::new(0);

/// Whether those threads must end, and drop messages for which there is no room.
static ENDS: AtomicBool = AtomicBool::new(false);
/// The tids of those threads, as many as fit. The kernel clears each when its thread ends.
static THERE: [AtomicI32; PLACES] = [const { AtomicI32::new(0) }; PLACES];

/// Whether the program was started without a standard error.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// Notes whether there is a standard error, as the program starts. If there is none, the first file that the program opens gets
/// its number.
///
/// The story: the message that its group was full landed in the middle of a program's output, which was the file of this number.
pub fn begin() {
    // SAFETY: numbers only.
    let flags = unsafe { sys!(libc::SYS_fcntl, 2, libc::F_GETFD) };
    CLOSED.store(flags == Err(libc::EBADF), Relaxed);
}

/// Whether messages are not to be written.
pub fn is_closed() -> bool {
    CLOSED.load(Relaxed)
}

impl Pager {
    /// Writes a line to the program's standard error, whatever the caller's descriptor table is and whatever locks it holds.
    pub fn say(&self, text: &[u8]) {
        // A vfork child holds nothing that its parent needs, and shares its memory.
        if self.is_of_this_process() { say(text) } else { write(text) }
    }
}

/// The same, for a process that shares its memory with no other.
pub(crate) fn say(text: &[u8]) {
    if say_apart(text).is_err() {
        write(text);
    }
}

/// Has another thread write the text, and waits a moment for that; not at all if another message is still being written. If many
/// are, drops the text.
fn say_apart(text: &[u8]) -> Result<(), Errno> {
    if BEGUN.load(Relaxed).wrapping_sub(SAID.load(Relaxed)) >= THREADS {
        return Ok(());
    }
    let (rw, how) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a new mapping.
    let at = unsafe { sys!(libc::SYS_mmap, 0, PLACE, rw, how, -1isize, 0) }?;
    // SAFETY: the structure is a page of the new mapping, and any bytes are a valid value of it. The thread gives up the whole
    // place when it is done; advice changes no contents.
    let begun = unsafe {
        let _ = sys!(libc::SYS_madvise, at, PLACE, libc::MADV_DONTFORK);
        let saying = &mut *(at as *mut Saying);
        saying.len = text.len().min(MOST);
        saying.text[..saying.len].copy_from_slice(&text[..saying.len]);
        let before = SAID.load(Acquire);
        let alone = BEGUN.fetch_add(1, AcqRel) == before;
        thread::spawn(at + PAGE, true, run, at).map(|_| (before, alone)).inspect_err(|_| {
            is_said();
            let _ = sys!(libc::SYS_munmap, at, PLACE);
        })
    };
    let (before, alone) = begun?;
    if alone {
        lock::futex_wait(&SAID, before, Some(WAIT_NS), false);
    }
    Ok(())
}

/// Starts over in a forked child, which has no threads that write messages.
pub(crate) fn forget_others() {
    SAID.store(BEGUN.load(Relaxed), Relaxed);
    THERE.iter().for_each(|there| there.store(0, Relaxed));
}

/// Ends the threads that write messages in a process that is let go of; they drop messages that there is no room for. Waits a
/// while for a write that has begun.
///
/// The story: a program's standard error was a full pipe that nobody read. The thread that was to report that the group was full
/// waited there. The program was let go of, but had a second thread, so it was refused a user namespace. If it set a filter for the
/// system calls of all its threads instead, the filter killed it as soon as somebody read the pipe and that thread went on.
pub fn end() {
    ENDS.store(true, SeqCst);
    let (until, pid, mut tids) = (thread::now_ns() + END_NS, thread::getpid(), [0; PLACES]);
    let mut any = || {
        // The kernel clears a tid a moment before the thread is gone.
        for (tid, there) in tids.iter_mut().zip(&THERE) {
            match there.load(SeqCst) {
                0 => {}
                now => *tid = now,
            }
        }
        BEGUN.load(SeqCst) != SAID.load(SeqCst) || tids.iter().any(|tid| *tid != 0 && thread::is_there(pid, *tid))
    };
    while any() && thread::now_ns() < until {
        thread::sleep_ns(PAUSE_NS);
    }
}

/// Adds the calling thread's tid to those in [`THERE`]; the kernel removes it when the thread ends.
fn is_there() {
    let tid = thread::gettid();
    let free = |there: &&AtomicI32| there.compare_exchange(0, tid, SeqCst, Relaxed).is_ok();
    if let Some(place) = THERE.iter().find(free) {
        // SAFETY: the place is static, and this thread's own until it ends.
        let _ = unsafe { sys!(libc::SYS_set_tid_address, place.as_ptr()) };
    }
}

/// One more message was written, or given up.
fn is_said() {
    SAID.fetch_add(1, AcqRel);
    lock::futex_wake(&SAID, u32::MAX >> 1, false);
}

/// Writes the message in the place at `at`, and gives the place up.
extern "C" fn run(at: usize) -> ! {
    // This thread needs nothing that the caller has open, and might keep it open for long.
    // SAFETY: this thread's table is a copy that nobody else uses.
    let _ = unsafe { sys!(libc::SYS_close_range, 0, u32::MAX, 0) };
    is_there();
    thread::set_idle_policy(0, false);
    // SAFETY: written before this thread was made, and its own now.
    let saying = unsafe { &*(at as *const Saying) };
    write_where(&saying.text[..saying.len.min(MOST)], |fd| has_room(fd, |_| !ENDS.load(SeqCst)));
    is_said();
    // SAFETY: nobody else knows the place; this thread touches no stack once it is gone, and ends.
    unsafe {
        asm!("syscall", "mov eax, {exit}", "xor edi, edi", "syscall", "ud2",
             exit = const libc::SYS_exit, in("rax") libc::SYS_munmap, in("rdi") at, in("rsi") PLACE, options(noreturn))
    }
}

/// Writes a text in the calling thread, which must hold nothing that the handler needs. Waits half a second for room, and drops
/// the text if there is none.
pub fn write(text: &[u8]) {
    let until = WAIT_NS / (LOOK_MS as u64 * 1_000_000);
    write_where(text, |fd| has_room(fd, |looks| looks < until));
}

/// Writes a text to standard error if `is_to_be` allows it for that descriptor.
fn write_where(text: &[u8], is_to_be: impl FnOnce(i32) -> bool) {
    if is_closed() {
        return;
    }
    let Ok(fd) = raw::standard_error() else { return };
    if is_to_be(fd) {
        // SAFETY: the text is readable.
        let _ = unsafe { sys!(libc::SYS_write, fd, text.as_ptr(), text.len()) };
    }
    raw::close(fd);
}

/// Waits for room to write, while `goes_on`, which is given the number of looks so far; returns whether there is room. A
/// descriptor that cannot be polled counts as having room.
fn has_room(fd: i32, goes_on: impl Fn(u64) -> bool) -> bool {
    for looks in 0.. {
        let mut asked = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
        // SAFETY: a structure of ours.
        let found = unsafe { sys!(libc::SYS_poll, &raw mut asked, 1, LOOK_MS) };
        if found != Ok(0) && found != Err(libc::EINTR) {
            return true;
        }
        if !goes_on(looks) {
            break;
        }
    }
    false
}

const _: () = assert!(size_of::<Saying>() == PAGE);

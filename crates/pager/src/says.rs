//! What is said on the program's standard error.
//!
//! The kernel holds a file's or a pipe's lock while it reads what is written to it from the program's memory, and where that is out it
//! waits for the handler. Who writes to the same file meanwhile waits for that lock; and where nobody reads a pipe that is full, for who
//! does. So none of uzswap's threads writes there itself, nor one of the program's that has the pager's lock: a thread that is made for it
//! does, which nobody waits for longer than a moment.
//!
//! The story: a program wrote to standard error what was out, and its group was full just then. Who said so had the pager's lock, waited for
//! the file's, and so for the program's thread, whose fault waited for the pager's: all of it hung, in each of twelve runs.
//!
//! Such a thread has a place of its own with what it is to say, which it unmaps when it has: it may be there longer than a region, and than
//! a process is managed. The place is shared memory, which is not managed, and which forked children are not given.

use crate::frames::arena::PAGE;
use crate::pager::Pager;
use core::arch::asm;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::{lock, sys, thread};

/// How long who says something waits until it is said (nanoseconds): what comes next may end the process.
const WAIT_NS: u64 = 500_000_000;
/// Threads that say something at a time, about.
const THREADS: u32 = 16;
/// Bytes of one saying.
const MOST: usize = PAGE - size_of::<usize>();
/// Bytes of a place: a page for what is to be said, and the stack.
const PLACE: usize = PAGE + thread::STACK_BYTES;

/// What is to be said, at the start of the place.
#[repr(C)]
struct Saying {
    len: usize,
    text: [u8; MOST],
}

/// How often something has been begun to be said, and how often it was (a futex).
static BEGUN: AtomicU32 = AtomicU32::new(0);
static SAID: AtomicU32 = AtomicU32::new(0);

/// Whether the program was started without a standard error.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// Notes whether there is a standard error, as the program starts. Where there is none the first file that it opens has its number.
///
/// The story: that its group was full was said in the midst of a program's output, as that was the file of this number.
pub fn begin() {
    // SAFETY: numbers only.
    let flags = unsafe { sys!(libc::SYS_fcntl, 2, libc::F_GETFD) };
    CLOSED.store(flags == Err(libc::EBADF), Relaxed);
}

/// Whether nothing is to be said.
pub fn is_closed() -> bool {
    CLOSED.load(Relaxed)
}

impl Pager {
    /// Writes a line to the program's standard error, whatever the caller's descriptor table is and whatever it holds.
    pub fn say(&self, text: &[u8]) {
        // (A vfork child holds nothing that its parent needs, and shares its memory.)
        if self.is_of_this_process() { say(text) } else { write(text) }
    }
}

/// The same, of a process that shares its memory with no other.
pub(crate) fn say(text: &[u8]) {
    if say_apart(text).is_err() {
        write(text);
    }
}

/// Has another thread say it, and waits a moment for that; not at all where one that was to say something before still does. Where many
/// still do it is not said.
fn say_apart(text: &[u8]) -> Result<(), Errno> {
    if BEGUN.load(Relaxed).wrapping_sub(SAID.load(Relaxed)) >= THREADS {
        return Ok(());
    }
    let (rw, how) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a new mapping.
    let at = unsafe { sys!(libc::SYS_mmap, 0, PLACE, rw, how, -1isize, 0) }?;
    // SAFETY: a page of the new mapping, as large as the structure, of which any bytes are a value. The thread gives all of it up when it is
    // done with it; advice changes no contents.
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

/// In a forked child, which has none of the threads that say something.
pub(crate) fn forget_others() {
    SAID.store(BEGUN.load(Relaxed), Relaxed);
}

/// One saying more is said, or given up.
fn is_said() {
    SAID.fetch_add(1, AcqRel);
    lock::futex_wake(&SAID, u32::MAX >> 1, false);
}

/// Says what the place at `at` has, and gives that up.
extern "C" fn run(at: usize) -> ! {
    // (What the caller has open this thread has no need of, and might keep open for long.)
    // SAFETY: this thread's table is a copy that nobody else uses.
    let _ = unsafe { sys!(libc::SYS_close_range, 0, u32::MAX, 0) };
    thread::set_idle_policy(0, false);
    // SAFETY: written before this thread was made, and its own.
    let saying = unsafe { &*(at as *const Saying) };
    write(&saying.text[..saying.len.min(MOST)]);
    is_said();
    // SAFETY: nobody else knows the place; this thread touches no stack once it is gone, and ends.
    unsafe {
        asm!("syscall", "mov eax, {exit}", "xor edi, edi", "syscall", "ud2",
             exit = const libc::SYS_exit, in("rax") libc::SYS_munmap, in("rdi") at, in("rsi") PLACE, options(noreturn))
    }
}

/// Writes it, and waits for as long as that takes: for who has nothing that the handler needs.
pub fn write(text: &[u8]) {
    if is_closed() {
        return;
    }
    let Ok(fd) = raw::standard_error() else { return };
    // SAFETY: the text is readable.
    let _ = unsafe { sys!(libc::SYS_write, fd, text.as_ptr(), text.len()) };
    raw::close(fd);
}

const _: () = assert!(size_of::<Saying>() == PAGE);

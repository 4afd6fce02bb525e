//! Opens a file on behalf of a program thread that can have no more descriptors.
//!
//! How memory is mapped is read from a file (for `mremap` of memory that is several mappings to the kernel, in the agent's
//! `pieces`). The helpers have it open in a descriptor table of their own, which the program's threads cannot use; and the
//! helpers may be waiting for the very call that asks. So a thread is started with a copy of the program's table, in which it
//! closes one descriptor.

use crate::discover::letgo::await_end;
use crate::pager::Pager;
use uzswap_sys::{raw, thread};

/// Index of its stack (see the ticker's `stack`).
const STACK: usize = 13;

/// The work, and its result.
struct Job<F, R> {
    open: F,
    done: Option<R>,
}

impl Pager {
    /// Runs `open`, which opens a file, in a thread that can have one more descriptor than the caller; None if there can be no
    /// thread.
    ///
    /// The caller holds the lock of mapping calls alone, so only one runs at a time.
    pub fn with_a_descriptor<R: Send>(&self, open: impl Fn() -> R + Sync) -> Option<R> {
        let mut job = Job { open, done: None };
        // SAFETY: this is the job's entry point, and the job stays until the thread has ended.
        let tid = unsafe { self.spawn_for(STACK, true, entry_of(&job), (&raw mut job) as usize) }.ok()?;
        await_end(tid);
        job.done
    }
}

/// The entry point of the thread that does such a job.
fn entry_of<F: Fn() -> R, R>(_: &Job<F, R>) -> extern "C" fn(usize) -> ! {
    run::<F, R>
}

extern "C" fn run<F: Fn() -> R, R>(job: usize) -> ! {
    // SAFETY: the thread that made it waits until this thread has ended.
    let job = unsafe { &mut *(job as *mut Job<F, R>) };
    // If all descriptors are in use, so is this one. The program's own stays open.
    raw::close(0);
    job.done = Some((job.open)());
    thread::exit()
}

#[cfg(test)]
mod tests {
    use crate::testing;
    use uzswap_sys::raw;

    #[test]
    fn a_file_is_opened_where_no_descriptor_is_left() {
        if !testing::by_itself("calls::descriptors::tests::a_file_is_opened_where_no_descriptor_is_left") {
            return;
        }
        let p = testing::pager(16 << 20);
        let read = || {
            let mut text = Vec::new();
            raw::read_file(b"/proc/thread-self/maps\0", &mut text).map(|()| text.len())
        };
        let mut most = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: limits of ours; the process is this test's alone.
        unsafe {
            libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut most);
            libc::setrlimit(libc::RLIMIT_NOFILE, &libc::rlimit { rlim_cur: 64, ..most });
            while libc::dup(2) >= 0 {}
        }
        let (refused, opened) = (read(), p.with_a_descriptor(read));
        // SAFETY: as above; it asks whether the descriptor is open.
        let open = unsafe {
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const most);
            libc::fcntl(0, libc::F_GETFD)
        };
        assert!(refused == Err(libc::EMFILE) && matches!(opened, Some(Ok(1..))), "{refused:?} {opened:?}");
        assert!(open >= 0, "the program's own was closed");
    }
}

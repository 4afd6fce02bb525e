//! Opening a file for a thread of the program's that can have no more descriptors.
//!
//! How memory is mapped is asked by a file (`mremap` of what is several mappings for the kernel, in the agent's `pieces`). The helpers have one
//! open, in a table of descriptors of their own, which the program's threads do not see; and the helpers may wait for the very call that asks.
//! So a thread is started for it that has a copy of the program's table, in which it closes one.

use crate::discover::letgo::await_end;
use crate::pager::Pager;
use uzswap_sys::{raw, thread};

/// Its stack (see `stack` of the ticker).
const STACK: usize = 13;

/// What is to be done, and what came of it.
struct Job<F, R> {
    open: F,
    done: Option<R>,
}

impl Pager {
    /// Does what opens a file in a thread that can have one more descriptor than the caller; None where there can be no thread.
    ///
    /// To be called with the lock of mapping calls held alone: one at a time.
    pub fn with_a_descriptor<R: Send>(&self, open: impl Fn() -> R + Sync) -> Option<R> {
        let mut job = Job { open, done: None };
        // SAFETY: it is this job's entry, and the job stays until the thread has ended.
        let tid = unsafe { self.spawn_for(STACK, true, entry_of(&job), (&raw mut job) as usize) }.ok()?;
        await_end(tid);
        job.done
    }
}

/// What does such a job.
fn entry_of<F: Fn() -> R, R>(_: &Job<F, R>) -> extern "C" fn(usize) -> ! {
    run::<F, R>
}

extern "C" fn run<F: Fn() -> R, R>(job: usize) -> ! {
    // SAFETY: who made it waits until this thread has ended.
    let job = unsafe { &mut *(job as *mut Job<F, R>) };
    // (Where all are in use this one is. The program's own stays open.)
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

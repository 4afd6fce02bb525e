//! Hands a transfer from one thread to another, for threads without TLS.
//!
//! ```text
//! idle ─ what and where is written down ─▶ posted ─ the thread transfers ─▶ done ─ the result is taken ─▶ idle
//! ```
//! One thread posts transfers and takes results; the other waits for work and reports the result. The state word orders
//! the accesses: what one side writes before it changes the state belongs to the other side afterwards. (Modelled with
//! loom below.)

use crate::lock::{futex_wait, futex_wake};
use crate::raw::Errno;
use core::sync::atomic::Ordering::*;
#[cfg(not(loom))]
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize};
#[cfg(loom)]
use {
    crate::lock::model::AtomicU32,
    loom::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize},
};

const IDLE: u32 = 0;
const POSTED: u32 = 1;
const DONE: u32 = 2;
/// The thread must end.
const ENDED: u32 = 3;

/// The bytes to transfer, and their place in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Offset in the file (bytes).
    pub at: u64,
    /// First byte in memory.
    pub bytes: *mut u8,
    /// Number of bytes.
    pub len: usize,
    /// Whether this is the last try.
    pub last: bool,
}

/// The mailbox of one transferring thread.
pub struct Job {
    /// [`IDLE`] and so on (a futex word).
    state: AtomicU32,
    at: AtomicU64,
    bytes: AtomicUsize,
    len: AtomicUsize,
    last: AtomicBool,
    /// An error number; 0 for none.
    result: AtomicI32,
}

impl Default for Job {
    fn default() -> Self {
        Self {
            state: AtomicU32::new(IDLE),
            at: AtomicU64::new(0),
            bytes: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            last: AtomicBool::new(false),
            result: AtomicI32::new(0),
        }
    }
}

impl Job {
    /// Posts a transfer. Its bytes belong to the other thread until the result was taken. False if that thread has a
    /// transfer already, or the result of one was not taken, or it must end.
    pub fn post(&self, what: Transfer) -> bool {
        if self.state.load(Acquire) != IDLE {
            return false;
        }
        self.at.store(what.at, Relaxed);
        self.bytes.store(what.bytes as usize, Relaxed);
        self.len.store(what.len, Relaxed);
        self.last.store(what.last, Relaxed);
        self.state.store(POSTED, Release);
        futex_wake(&self.state, 1, false);
        true
    }

    /// The result of the transfer, if it has ended. An error is one that the thread reported.
    pub fn take(&self) -> Option<Result<(), Errno>> {
        (self.state.load(Acquire) == DONE).then(|| {
            let result = self.result.load(Relaxed);
            self.state.store(IDLE, Release);
            if result == 0 { Ok(()) } else { Err(result) }
        })
    }

    /// Waits until the posted transfer, if any, has ended.
    pub fn wait(&self) {
        while self.state.load(Acquire) == POSTED {
            futex_wait(&self.state, POSTED, None, false);
        }
    }

    /// In the transferring thread: waits for a transfer; `None` when the thread must end.
    pub fn next(&self) -> Option<Transfer> {
        loop {
            match self.state.load(Acquire) {
                ENDED => return None,
                POSTED => {
                    return Some(Transfer {
                        at: self.at.load(Relaxed),
                        bytes: self.bytes.load(Relaxed) as *mut u8,
                        len: self.len.load(Relaxed),
                        last: self.last.load(Relaxed),
                    });
                }
                state => futex_wait(&self.state, state, None, false),
            }
        }
    }

    /// In the transferring thread: reports the result.
    pub fn done(&self, result: Result<(), Errno>) {
        self.result.store(result.err().unwrap_or(0), Relaxed);
        self.state.store(DONE, Release);
        futex_wake(&self.state, 1, false);
    }

    /// Makes the thread end, after the posted transfer, if any. The caller must make sure that nothing more is posted.
    pub fn end(&self) {
        self.wait();
        self.state.store(ENDED, SeqCst);
        futex_wake(&self.state, 1, false);
    }

    /// In a forked child: the thread does not exist.
    pub fn forget(&self) {
        self.state.store(IDLE, Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_makes_one_transfer_at_a_time_until_it_is_to_end() {
        let job = Job::default();
        let mut bytes = [0u8; 64];
        std::thread::scope(|threads| {
            let made = threads.spawn(|| {
                let mut made = 0;
                while let Some(what) = job.next() {
                    // SAFETY: the bytes are lent until the result is taken.
                    unsafe { what.bytes.write_bytes(what.at as u8, what.len) };
                    job.done(if what.last { Err(libc::EIO) } else { Ok(()) });
                    made += 1;
                }
                made
            });
            for round in 1..=200u64 {
                let what = Transfer {
                    at: round,
                    bytes: bytes.as_mut_ptr(),
                    len: 1 + round as usize % 64,
                    last: round % 5 == 0,
                };
                assert!(job.post(what), "it has none");
                assert!(!job.post(what), "it has one");
                job.wait();
                assert!(!job.post(what), "its result was not taken");
                assert_eq!(job.take(), Some(if what.last { Err(libc::EIO) } else { Ok(()) }));
                assert_eq!(job.take(), None);
                assert!(bytes[..what.len].iter().all(|byte| *byte == round as u8));
            }
            job.end();
            assert_eq!(made.join().unwrap(), 200);
        });
    }
}

/// Every interleaving: `RUSTFLAGS="--cfg loom" cargo test --release -p uzswap-sys --lib -- transfer`.
#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    struct Lent(UnsafeCell<u64>);
    // SAFETY: the job gives it to one thread at a time, and loom's cell checks that.
    unsafe impl Sync for Lent {}
    // SAFETY: as above.
    unsafe impl Send for Lent {}

    #[test]
    fn the_bytes_are_of_one_thread_at_a_time() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let job = Arc::new(Job::default());
            let lent = Arc::new(Lent(UnsafeCell::new(0)));
            let (its, bytes) = (job.clone(), lent.clone());
            let thread = loom::thread::spawn(move || {
                while let Some(what) = its.next() {
                    // SAFETY: lent.
                    bytes.0.with_mut(|n| unsafe { *n += what.at });
                    its.done(if what.last { Err(libc::EIO) } else { Ok(()) });
                }
            });
            for round in 1..=2 {
                assert!(job.post(Transfer { at: round, bytes: core::ptr::null_mut(), len: 0, last: round == 2 }));
                job.wait();
                assert_eq!(job.take(), Some(if round == 2 { Err(libc::EIO) } else { Ok(()) }));
                // SAFETY: given back.
                lent.0.with_mut(|n| unsafe { *n *= 10 });
            }
            job.end();
            thread.join().unwrap();
            // SAFETY: the thread is gone.
            lent.0.with(|n| assert_eq!(unsafe { *n }, 120));
        });
    }
}

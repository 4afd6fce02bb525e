//! Stray writes: what any member of a group, which is somebody's program, can do to the words that the members share.

use crate::chance::mix;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::process::{Child, Command};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;
use uzswap_sys::owner::CLEANS;
use uzswap_sys::process::Identity;

/// Writes words that hurt. A process that is no member of anything, and that some of the words name, lives as long as this.
pub(crate) struct Scribbler {
    state: u64,
    stranger: Child,
}

impl Scribbler {
    /// A new one, from a seed that is printed.
    pub(crate) fn new() -> Self {
        let seed = uzswap_sys::thread::now_ns();
        println!("seed {seed}");
        Self { state: seed, stranger: Command::new("sleep").arg("600").spawn().expect("a process") }
    }

    /// The pid of the process that is no member.
    pub(crate) fn stranger(&self) -> u32 {
        self.stranger.id()
    }

    /// Whether that process still runs.
    pub(crate) fn is_unharmed(&mut self) -> bool {
        self.stranger.try_wait().expect("a child").is_none()
    }

    /// A random number below `n`.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state) % n
    }

    /// A word: anything, or what is most likely to hurt somewhere.
    pub(crate) fn word(&mut self) -> u64 {
        let any = self.below(u64::MAX);
        match self.below(12) {
            0 => 0,
            1 => any % 16,
            2 => u64::MAX - any % 3,
            3 => 1 << (any % 64),
            4 => (1 << (any % 64)) - 1,
            5 => Identity::own().raw(),
            // As a pid these are the caller's process group, and all processes.
            6 => any << 32,
            7 => any | 0xffff_ffff,
            8 => u64::from(self.stranger()),
            9 => CLEANS | any & u64::from(u32::MAX),
            // Two small numbers in one word.
            10 => (any & 0xff) << 32 | any >> 56,
            _ => any,
        }
    }

    /// Writes to all words of shared memory that begin at byte `from` of `page`.
    ///
    /// # Safety
    /// It is all atomics, with a size and alignment of whole words.
    pub(crate) unsafe fn fill<T>(&mut self, page: &'static T, from: usize) {
        let words = (core::ptr::from_ref(page) as usize + from) as *const AtomicU64;
        for i in 0..(size_of::<T>() - from) / 8 {
            // SAFETY: within the value, which is all atomics.
            unsafe { &*words.add(i) }.store(self.word(), Relaxed);
        }
    }
}

impl Drop for Scribbler {
    fn drop(&mut self) {
        let _ = self.stranger.kill();
        let _ = self.stranger.wait();
    }
}

/// Runs a test that may hang, and fails if it has not ended in time.
pub(crate) fn within(time: Duration, test: impl FnOnce() + Send + 'static) {
    let (say, hear) = channel::<()>();
    let thread = std::thread::spawn(move || {
        test();
        drop(say);
    });
    assert_ne!(hear.recv_timeout(time), Err(RecvTimeoutError::Timeout), "it hangs");
    thread.join().expect("it does not panic");
}

//! A futex readers-writer lock for threads without TLS, for the threads of one process.
//!
//! A thread that wants it alone keeps newcomers out from then on, so those that share it never starve it. Like
//! [`crate::lock`] it is one word without owners: it can be held across `fork` and released in the child.
//!
//! ```text
//! word:  bit 31 ALONE (held alone, or waited for so) · bit 30 ASLEEP (somebody sleeps) · the rest: how many share it
//! ```

use crate::lock::{futex_wait, futex_wake};
#[cfg(not(loom))]
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::*;

#[cfg(loom)]
use crate::lock::AtomicU32;

const ALONE: u32 = 1 << 31;
const ASLEEP: u32 = 1 << 30;
const SHARES: u32 = ASLEEP - 1;

/// The lock. It guards no value: it orders system calls.
pub struct RwLock {
    word: AtomicU32,
}

impl Default for RwLock {
    fn default() -> Self {
        Self::new()
    }
}

impl RwLock {
    /// A free lock.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self { word: AtomicU32::new(0) }
    }

    /// The same for a loom model.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self { word: AtomicU32::new(0) }
    }

    /// Takes it shared, as soon as nobody has it alone or waits for that.
    pub fn share(&self) {
        self.share_with(None, || ());
    }

    /// Takes it shared, and calls `check` after each wait of at most `ns` nanoseconds: for callers that can do something about a
    /// holder that will not release it.
    pub fn share_checking(&self, ns: u64, check: impl Fn()) {
        self.share_with(Some(ns), check);
    }

    fn share_with(&self, ns: Option<u64>, check: impl Fn()) {
        loop {
            let word = self.word.load(Relaxed);
            if word & ALONE != 0 {
                self.sleep(word, ns);
                check();
            } else if self.word.compare_exchange(word, word + 1, Acquire, Relaxed).is_ok() {
                return;
            }
        }
    }

    /// Releases a share.
    pub fn unshare(&self) {
        let word = self.word.fetch_sub(1, Release) - 1;
        if word & SHARES == 0 && word & ALONE != 0 {
            self.wake(word);
        }
    }

    /// Takes it alone, as soon as nobody else has it.
    pub fn take(&self) {
        self.claim(None);
        self.wait_for_shares(None);
    }

    /// Takes it alone, and calls `check` after each wait of at most `ns` nanoseconds: for callers that can do something about a
    /// holder that will not release it.
    pub fn take_checking(&self, ns: u64, check: impl Fn()) {
        while !self.claim(Some(ns)) {
            check();
        }
        // It is claimed: no new shares are given meanwhile.
        while !self.wait_for_shares(Some(ns)) {
            check();
        }
    }

    /// Takes it alone if that succeeds within `ns` nanoseconds or little more; returns whether it did.
    pub fn take_within(&self, ns: u64) -> bool {
        if !self.claim(Some(ns)) {
            return false;
        }
        if !self.wait_for_shares(Some(ns)) {
            self.release();
            return false;
        }
        true
    }

    /// Takes it alone if nobody has it now; returns whether it did.
    pub fn try_take(&self) -> bool {
        let word = self.word.load(Relaxed);
        word & (ALONE | SHARES) == 0 && self.word.compare_exchange(word, word | ALONE, Acquire, Relaxed).is_ok()
    }

    /// Whether any thread has it now. It may have changed when this returns.
    pub fn is_held(&self) -> bool {
        self.word.load(Relaxed) & (ALONE | SHARES) != 0
    }

    /// Releases it after taking it alone.
    pub fn release(&self) {
        // Shares that were not waited out (`take_within` gave up) stay counted.
        loop {
            let word = self.word.load(Relaxed);
            if self.word.compare_exchange(word, word & SHARES, Release, Relaxed).is_ok() {
                self.wake(word);
                return;
            }
        }
    }

    /// Keeps newcomers out; false if another thread did so and still does after the timeout.
    fn claim(&self, ns: Option<u64>) -> bool {
        let mut slept = false;
        loop {
            let word = self.word.load(Relaxed);
            if word & ALONE == 0 {
                if self.word.compare_exchange(word, word | ALONE, Acquire, Relaxed).is_ok() {
                    return true;
                }
            } else if ns.is_some() && slept {
                return false;
            } else {
                self.sleep(word, ns);
                slept = true;
            }
        }
    }

    fn wait_for_shares(&self, ns: Option<u64>) -> bool {
        let mut slept = false;
        loop {
            let word = self.word.load(Acquire);
            if word & SHARES == 0 {
                return true;
            }
            if ns.is_some() && slept {
                return false;
            }
            self.sleep(word, ns);
            slept = true;
        }
    }

    fn sleep(&self, word: u32, ns: Option<u64>) {
        let marked = word | ASLEEP;
        if word == marked || self.word.compare_exchange(word, marked, Relaxed, Relaxed).is_ok() {
            futex_wait(&self.word, marked, ns, false);
        }
    }

    /// Wakes all, as sharers and those that want it alone sleep on one word.
    fn wake(&self, word: u32) {
        if word & ASLEEP != 0 {
            futex_wake(&self.word, u32::MAX >> 1, false);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    #[test]
    fn who_gives_up_leaves_it_as_it_was() {
        let lock = RwLock::new();
        lock.share();
        assert!(!lock.take_within(1_000_000) && !lock.try_take());
        lock.share();
        lock.unshare();
        lock.unshare();
        assert!(lock.take_within(0));
        assert!(!lock.take_within(1_000_000) && !lock.try_take(), "it is taken");
        lock.release();
        assert_eq!(lock.word.load(Relaxed), 0);
    }

    #[test]
    fn newcomers_wait_for_who_waits() {
        let (lock, order) = (RwLock::new(), AtomicUsize::new(0));
        let (told, wait) = mpsc::channel();
        lock.share();
        std::thread::scope(|threads| {
            threads.spawn(|| {
                lock.take();
                assert_eq!(order.fetch_add(1, SeqCst), 0, "before the newcomer");
                lock.release();
            });
            while lock.word.load(SeqCst) & ALONE == 0 {
                std::thread::yield_now();
            }
            threads.spawn(|| {
                told.send(()).unwrap();
                lock.share();
                assert_eq!(order.fetch_add(1, SeqCst), 1, "after who waited");
                lock.unshare();
            });
            wait.recv().unwrap();
            lock.unshare();
        });
        assert_eq!(lock.word.load(SeqCst), 0);
    }
}

/// The lock under every interleaving: `RUSTFLAGS="--cfg loom" cargo test --release -p uzswap-sys --lib rwlock`.
#[cfg(all(test, loom))]
mod model {
    use super::RwLock;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    fn check(model: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(model);
    }

    /// loom's cell detects a write beside any other access by itself.
    #[test]
    fn nobody_beside_who_has_it_alone() {
        check(|| {
            let shared = Arc::new((RwLock::new(), UnsafeCell::new(0)));
            let (reader, writer) = (shared.clone(), shared.clone());
            let reader = thread::spawn(move || {
                reader.0.share();
                // SAFETY: only shared meanwhile.
                reader.1.with(|n| unsafe { *n });
                reader.0.unshare();
            });
            let writer = thread::spawn(move || {
                writer.0.take();
                // SAFETY: alone.
                writer.1.with_mut(|n| unsafe { *n += 1 });
                writer.0.release();
            });
            shared.0.share();
            // SAFETY: only shared meanwhile.
            shared.1.with(|n| unsafe { *n });
            shared.0.unshare();
            reader.join().unwrap();
            writer.join().unwrap();
        });
    }

    #[test]
    fn two_that_want_it_alone() {
        check(|| {
            let shared = Arc::new((RwLock::new(), UnsafeCell::new(0)));
            let add = |shared: &(RwLock, UnsafeCell<u32>)| {
                shared.0.take();
                // SAFETY: alone.
                shared.1.with_mut(|n| unsafe { *n += 1 });
                shared.0.release();
            };
            let other = shared.clone();
            let other = thread::spawn(move || add(&other));
            shared.0.share();
            shared.0.unshare();
            add(&shared);
            other.join().unwrap();
            shared.0.share();
            // SAFETY: the others have ended.
            shared.1.with(|n| assert_eq!(unsafe { *n }, 2));
            shared.0.unshare();
        });
    }
}

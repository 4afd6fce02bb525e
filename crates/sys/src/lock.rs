//! A futex lock for threads without TLS, shared by threads of one process only.
//!
//! Unlike std's it can be held across `fork` and released in the child (it is one word, with no owner).

use crate::sys;
use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering::*};

/// Waits while `*word == value`, at most `timeout_ns` (None: for ever).
pub fn futex_wait(word: &AtomicU32, value: u32, timeout_ns: Option<u64>, shared: bool) {
    let op = libc::FUTEX_WAIT | if shared { 0 } else { libc::FUTEX_PRIVATE_FLAG };
    let ts =
        timeout_ns.map(|n| libc::timespec { tv_sec: (n / 1_000_000_000) as i64, tv_nsec: (n % 1_000_000_000) as i64 });
    let ptr = ts.as_ref().map_or(core::ptr::null(), core::ptr::from_ref);
    // SAFETY: the word is alive, the time-out is ours or null.
    let _ = unsafe { sys!(libc::SYS_futex, word.as_ptr(), op, value, ptr) };
}

/// Wakes up to `n` waiters.
pub fn futex_wake(word: &AtomicU32, n: u32, shared: bool) {
    let op = libc::FUTEX_WAKE | if shared { 0 } else { libc::FUTEX_PRIVATE_FLAG };
    // SAFETY: a wake only uses the address.
    let _ = unsafe { sys!(libc::SYS_futex, word.as_ptr(), op, n) };
}

/// How often a taker looks before it sleeps: some 30 µs, which is what being woken on another CPU costs.
const SPINS: u32 = 1000;

/// A mutual exclusion lock around a value.
pub struct Lock<T> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}
// SAFETY: the lock gives one thread at a time access to the value.
unsafe impl<T: Send> Sync for Lock<T> {}

/// Holds the lock.
pub struct Guard<'a, T>(&'a Lock<T>);

impl<T> Lock<T> {
    /// A free lock.
    pub const fn new(value: T) -> Self {
        Self { word: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    /// Takes the lock.
    pub fn lock(&self) -> Guard<'_, T> {
        if self.word.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
            for _ in 0..SPINS {
                if self.word.load(Relaxed) == 0 && self.word.compare_exchange(0, 1, Acquire, Relaxed).is_ok() {
                    return Guard(self);
                }
                core::hint::spin_loop();
            }
            while self.word.swap(2, Acquire) != 0 {
                futex_wait(&self.word, 2, None, false);
            }
        }
        Guard(self)
    }

    /// Whether somebody holds it now (a hint).
    pub fn is_locked(&self) -> bool {
        self.word.load(Relaxed) != 0
    }

    /// The value, for a thread to which the holder of the lock has lent it.
    ///
    /// # Safety
    /// The lock must be held by a thread that does not use the value meanwhile.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn assume_locked(&self) -> &mut T {
        // SAFETY: as the caller says.
        unsafe { &mut *self.value.get() }
    }

    /// Releases the lock without a guard: in a forked child, for the thread that forked with the lock held.
    ///
    /// # Safety
    /// The caller must hold the lock and have forgotten its guard.
    pub unsafe fn force_unlock(&self) {
        if self.word.swap(0, Release) == 2 {
            futex_wake(&self.word, 1, false);
        }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        // SAFETY: the guard proves that the lock is held.
        unsafe { self.0.force_unlock() }
    }
}
impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the guard proves exclusive access.
        unsafe { &*self.0.value.get() }
    }
}
impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard proves exclusive access.
        unsafe { &mut *self.0.value.get() }
    }
}

//! A futex lock for threads without TLS, for the threads of one process.
//!
//! Unlike std's it can be held across `fork` and released in the child: it is one word, without an owner.
//!
//! A thread that releases it and takes it again at once would mostly win against a sleeper that has yet to wake: a
//! thread that served one fault after the other kept the writer of the swap file waiting 1.6 ms each time. So a sleeper
//! that was woken [`PATIENCE`] times in vain declares itself *hungry*, and others sleep before they take the lock until
//! it has had its turn. That is a courtesy, not part of the lock: nobody waits for it longer than [`LET_PASS_NS`], and
//! only once for a thread that is gone (a thread of the parent, in a forked child).

#[cfg(loom)]
pub(crate) use self::model::{AtomicU32, futex_wait, futex_wake};
#[cfg(not(loom))]
use crate::sys;
use core::cell::UnsafeCell;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
#[cfg(not(loom))]
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::*;

/// Looks at a taken lock before sleeping. They take some 10 µs: a fraction of a wake-up on another CPU, and little lost
/// if the holder waits for this very CPU.
const SPINS: usize = if cfg!(loom) { 1 } else { 300 };

/// How often a sleeper is woken in vain before others let it pass.
const PATIENCE: u32 = 1;
/// How long others let it pass (nanoseconds). It must wake up, perhaps on another CPU, and take the lock.
const LET_PASS_NS: u64 = 500_000;

/// Bytes that [`Lock::lock_on_stack`] ensures below the caller's frame, and [`ABOVE_STACK`] above its end. A page at
/// most, as each page of the range must hold one of the bytes that are written; and no more than needed, as a program's
/// own stack may be small.
pub const BELOW_STACK: usize = 512;
/// See [`BELOW_STACK`].
pub const ABOVE_STACK: usize = 1024;

/// Waits while `*word == value`, for at most `timeout_ns` (`None`: forever).
#[cfg(not(loom))]
pub fn futex_wait(word: &AtomicU32, value: u32, timeout_ns: Option<u64>, shared: bool) {
    let op = libc::FUTEX_WAIT | if shared { 0 } else { libc::FUTEX_PRIVATE_FLAG };
    let ts =
        timeout_ns.map(|n| libc::timespec { tv_sec: (n / 1_000_000_000) as i64, tv_nsec: (n % 1_000_000_000) as i64 });
    let ptr = ts.as_ref().map_or(core::ptr::null(), core::ptr::from_ref);
    // SAFETY: the word is alive; the timeout is ours or null.
    let _ = unsafe { sys!(libc::SYS_futex, word.as_ptr(), op, value, ptr) };
}

/// Wakes up to `n` waiters.
#[cfg(not(loom))]
pub fn futex_wake(word: &AtomicU32, n: u32, shared: bool) {
    let op = libc::FUTEX_WAKE | if shared { 0 } else { libc::FUTEX_PRIVATE_FLAG };
    // SAFETY: a wake only uses the address.
    let _ = unsafe { sys!(libc::SYS_futex, word.as_ptr(), op, n) };
}

/// A mutual exclusion lock around a value.
pub struct Lock<T> {
    word: AtomicU32,
    /// Whether a hungry waiter must be let pass.
    hungry: AtomicU32,
    /// How often the lock was taken (wrapping).
    turns: AtomicU32,
    value: UnsafeCell<T>,
}
// SAFETY: the lock gives one thread at a time access to the value.
unsafe impl<T: Send> Sync for Lock<T> {}

/// Holds the lock.
///
/// It is `Send` where the value is, and `Sync` only where the value is, like a reference to the value.
pub struct Guard<'a, T>(&'a Lock<T>, PhantomData<&'a mut T>);

impl<T> Lock<T> {
    /// A free lock.
    #[cfg(not(loom))]
    pub const fn new(value: T) -> Self {
        Self {
            word: AtomicU32::new(0),
            hungry: AtomicU32::new(0),
            turns: AtomicU32::new(0),
            value: UnsafeCell::new(value),
        }
    }

    /// The same for a loom model.
    #[cfg(loom)]
    pub fn new(value: T) -> Self {
        Self {
            word: AtomicU32::new(0),
            hungry: AtomicU32::new(0),
            turns: AtomicU32::new(0),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock.
    pub fn lock(&self) -> Guard<'_, T> {
        if self.hungry.load(Relaxed) != 0 {
            futex_wait(&self.hungry, 1, Some(LET_PASS_NS), false);
            self.hungry.store(0, Relaxed);
        }
        if self.word.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
            for _ in 0..SPINS {
                if self.word.load(Relaxed) == 0 && self.word.compare_exchange(0, 1, Acquire, Relaxed).is_ok() {
                    return self.taken();
                }
                core::hint::spin_loop();
            }
            let mut woken = 0;
            while self.word.swap(2, Acquire) != 0 {
                if woken == PATIENCE {
                    self.hungry.store(1, Relaxed);
                }
                futex_wait(&self.word, 2, None, false);
                woken += 1;
            }
            if woken > PATIENCE {
                self.is_fed();
            }
        }
        self.taken()
    }

    /// Takes the lock if that succeeds within `ns` nanoseconds: for a caller that can help if it does not, as when the
    /// holder waits for a CPU.
    #[cfg(not(loom))]
    pub fn lock_within(&self, ns: u64) -> Option<Guard<'_, T>> {
        let (mut tries, end) = (0, crate::thread::now_ns() + ns);
        // 2, not 1: others may be waiting, too.
        while self.word.compare_exchange(0, 2, Acquire, Relaxed).is_err() {
            if crate::thread::now_ns() >= end {
                return None;
            }
            self.wait_for(false, &mut tries);
        }
        if tries > PATIENCE {
            self.is_fed();
        }
        Some(self.taken())
    }

    /// The caller has just taken the lock.
    fn taken(&self) -> Guard<'_, T> {
        self.turns.store(self.turns.load(Relaxed).wrapping_add(1), Relaxed);
        Guard(self, PhantomData)
    }

    /// The hungry waiter has had its turn.
    fn is_fed(&self) {
        self.hungry.store(0, Relaxed);
        futex_wake(&self.hungry, u32::MAX >> 1, false);
    }

    /// Takes the lock at a moment when certain pages are writable: those of the calling thread's stack from
    /// [`BELOW_STACK`] bytes below the caller's frame to [`ABOVE_STACK`] above its end, and those of the bytes at
    /// `also`. It is for a thread whose memory the lock's holder may evict.
    ///
    /// It writes to the pages (what they hold already), and keeps the lock only if nobody has had it since. In between
    /// it uses only registers, so giving the lock back needs no memory either.
    ///
    /// # Safety
    /// The addresses `also` must be mapped and writable.
    #[cfg(not(loom))]
    #[inline(always)]
    pub unsafe fn lock_on_stack(&self, also: [*mut u8; 2]) -> Guard<'_, T> {
        const TAKEN: u32 = 1;
        const GIVEN_BACK: u32 = 2;
        let mut tries = 0;
        loop {
            let result: u32;
            // SAFETY: the word is the lock's own, and a waiter takes it with 2, too. The bytes written on the stack
            // (or'ed with 0) are in the caller's frame and in the frames it would call; `also` is as the caller
            // promises.
            unsafe {
                core::arch::asm!(
                    "xor {result:e}, {result:e}",
                    "mov {seen:e}, dword ptr [{turns}]",
                    "cmp dword ptr [{word}], 0",
                    "jne 3f",
                    "lock or byte ptr [rsp - {below}], 0",
                    "lock or byte ptr [rsp], 0",
                    "lock or byte ptr [rsp + {above}], 0",
                    "lock or byte ptr [{first}], 0",
                    "lock or byte ptr [{second}], 0",
                    "xor eax, eax",
                    "lock cmpxchg dword ptr [{word}], {two:e}",
                    "jne 3f",
                    "mov {result:e}, {taken}",
                    "cmp {seen:e}, dword ptr [{turns}]",
                    "je 3f",
                    "xor eax, eax",
                    "xchg dword ptr [{word}], eax",
                    "mov {result:e}, {given_back}",
                    "3:",
                    word = in(reg) self.word.as_ptr(),
                    turns = in(reg) self.turns.as_ptr(),
                    first = in(reg) also[0],
                    second = in(reg) also[1],
                    two = in(reg) 2u32,
                    seen = out(reg) _,
                    result = out(reg) result,
                    out("eax") _,
                    below = const BELOW_STACK,
                    above = const ABOVE_STACK,
                    taken = const TAKEN,
                    given_back = const GIVEN_BACK,
                    options(nostack)
                );
            }
            if result == TAKEN {
                if tries > PATIENCE {
                    self.is_fed();
                }
                return self.taken();
            }
            self.wait_for(result == GIVEN_BACK, &mut tries);
        }
    }

    /// The lock could not be taken: waits until it is free, or briefly. `given_back`: this thread had taken and
    /// released it.
    #[cfg(not(loom))]
    #[inline(never)]
    fn wait_for(&self, given_back: bool, tries: &mut u32) {
        if given_back {
            futex_wake(&self.word, u32::MAX >> 1, false);
        }
        *tries += 1;
        if *tries > PATIENCE {
            self.hungry.store(1, Relaxed);
        }
        let _ = self.word.compare_exchange(1, 2, Relaxed, Relaxed);
        futex_wait(&self.word, 2, Some(LET_PASS_NS), false);
    }

    /// Whether somebody holds it now (a hint).
    pub fn is_locked(&self) -> bool {
        self.word.load(Relaxed) != 0
    }

    /// The value, for a thread to which the lock's holder has lent it.
    ///
    /// # Safety
    /// A thread that does not use the value meanwhile must hold the lock.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn assume_locked(&self) -> &mut T {
        // SAFETY: the caller promises that the holder does not use the value.
        unsafe { &mut *self.value.get() }
    }

    /// Releases the lock without a guard: in a forked child, for the thread that forked with the lock held.
    ///
    /// # Safety
    /// The caller must hold the lock and have forgotten its guard.
    pub unsafe fn force_unlock(&self) {
        // Wake all: the only waiter woken may be a thread of the program that, on its way out of the kernel, touches
        // memory that is out (its rseq area), and so waits for another thread that sleeps here.
        if self.word.swap(0, Release) == 2 {
            futex_wake(&self.word, u32::MAX >> 1, false);
        }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        // SAFETY: the guard proves that this thread holds the lock, and the guard is gone after this.
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

#[cfg(all(test, not(loom)))]
mod stack_tests {
    use super::{Guard, Lock};
    use core::cell::Cell;

    /// The story: threads could share a guard whatever it guarded, even a Cell, to which several then wrote at once.
    #[test]
    fn a_guard_is_shared_only_where_its_value_may_be() {
        // A type that is Sync implements it twice, so the call is ambiguous and does not compile.
        trait NotSync<Which> {
            const IS: bool = true;
        }
        impl<T: ?Sized> NotSync<()> for T {}
        impl<T: ?Sized + Sync> NotSync<u8> for T {}
        fn is_sync<T: Sync>() {}
        fn is_send<T: Send>() {}
        const { assert!(<Guard<'static, Cell<u32>> as NotSync<_>>::IS) };
        is_sync::<Guard<'static, u32>>();
        is_send::<Guard<'static, Cell<u32>>>();
    }

    /// With threads that take it in the usual way: one holder at a time, and nobody sleeps forever.
    /// (`fixtures/depths.c` tests that the stack is there.)
    #[test]
    fn on_the_stack_it_is_taken_by_one_at_a_time() {
        const TIMES: usize = 20_000;
        let lock = Lock::new(0usize);
        std::thread::scope(|threads| {
            for number in 0..4 {
                let lock = &lock;
                threads.spawn(move || {
                    let mut also = [0u8; 2];
                    let also = also.each_mut().map(core::ptr::from_mut);
                    for i in 0..TIMES {
                        // SAFETY: bytes of this thread's.
                        let mut guard = if number < 2 { unsafe { lock.lock_on_stack(also) } } else { lock.lock() };
                        let before = core::hint::black_box(*guard);
                        if i % 64 == 0 {
                            std::thread::yield_now();
                        }
                        *guard = before + 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), 4 * TIMES);
    }

    #[test]
    fn who_waits_for_so_long_only_gets_it_when_it_is_released_in_time() {
        let lock = Lock::new(0usize);
        let held = lock.lock();
        assert!(lock.lock_within(2_000_000).is_none());
        std::thread::scope(|threads| {
            let waits = threads.spawn(|| *lock.lock_within(u64::MAX >> 1).expect("it is released") += 1);
            drop(held);
            waits.join().unwrap();
        });
        assert_eq!(*lock.lock_within(0).expect("it is free"), 1);
    }
}

/// The lock under every interleaving: `RUSTFLAGS="--cfg loom" cargo test --release -p uzswap-sys --lib lock`.
#[cfg(all(test, loom))]
mod tests {
    use super::Lock;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    // loom's cell detects concurrent accesses by itself.
    type Shared = Arc<Lock<UnsafeCell<u32>>>;

    fn add(lock: &Shared) {
        let guard = lock.lock();
        // SAFETY: the guard.
        guard.with_mut(|n| unsafe { *n += 1 });
    }

    fn value(lock: &Shared) -> u32 {
        // SAFETY: the guard.
        lock.lock().with(|n| unsafe { *n })
    }

    #[test]
    fn one_at_a_time_and_no_wake_up_lost() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let lock: Shared = Arc::new(Lock::new(UnsafeCell::new(0)));
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let lock = lock.clone();
                    thread::spawn(move || add(&lock))
                })
                .collect();
            add(&lock);
            threads.into_iter().for_each(|t| t.join().unwrap());
            assert_eq!(value(&lock), 3);
        });
    }

    /// As over a fork: taken, lent to another thread that releases it, while a third waits.
    #[test]
    fn released_without_its_guard() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let lock: Shared = Arc::new(Lock::new(UnsafeCell::new(0)));
            core::mem::forget(lock.lock());
            let (waits, lent) = (lock.clone(), lock.clone());
            let waits = thread::spawn(move || add(&waits));
            let lent = thread::spawn(move || {
                // SAFETY: the lock is held, and its holder waits for this thread.
                let cell = unsafe { lent.assume_locked() };
                // SAFETY: as above.
                cell.with_mut(|n| unsafe { *n += 1 });
                // SAFETY: the guard was forgotten.
                unsafe { lent.force_unlock() };
            });
            lent.join().unwrap();
            waits.join().unwrap();
            assert_eq!(value(&lock), 2);
        });
    }
}

/// The kernel's futex as loom can follow it: checking the word and falling asleep are one step.
#[cfg(loom)]
pub(crate) mod model {
    use core::sync::atomic::Ordering;
    use loom::sync::{Condvar, Mutex, atomic};

    pub struct AtomicU32 {
        word: atomic::AtomicU32,
        asleep: Mutex<()>,
        woken: Condvar,
    }

    impl AtomicU32 {
        pub fn new(value: u32) -> Self {
            Self { word: atomic::AtomicU32::new(value), asleep: Mutex::new(()), woken: Condvar::new() }
        }
        pub fn load(&self, order: Ordering) -> u32 {
            self.word.load(order)
        }
        pub fn store(&self, value: u32, order: Ordering) {
            self.word.store(value, order)
        }
        pub fn fetch_add(&self, n: u32, order: Ordering) -> u32 {
            self.word.fetch_add(n, order)
        }
        pub fn fetch_sub(&self, n: u32, order: Ordering) -> u32 {
            self.word.fetch_sub(n, order)
        }
        pub fn swap(&self, value: u32, order: Ordering) -> u32 {
            self.word.swap(value, order)
        }
        pub fn compare_exchange(&self, old: u32, new: u32, ok: Ordering, not: Ordering) -> Result<u32, u32> {
            self.word.compare_exchange(old, new, ok, not)
        }
    }

    /// A wait with a timeout returns at once, as a model has no time.
    pub fn futex_wait(word: &AtomicU32, value: u32, timeout_ns: Option<u64>, _shared: bool) {
        if timeout_ns.is_some() {
            return loom::thread::yield_now();
        }
        let asleep = word.asleep.lock().unwrap();
        if word.word.load(Ordering::SeqCst) == value {
            drop(word.woken.wait(asleep).unwrap());
        }
    }

    pub fn futex_wake(word: &AtomicU32, n: u32, _shared: bool) {
        let _asleep = word.asleep.lock().unwrap();
        if n == 1 { word.woken.notify_one() } else { word.woken.notify_all() }
    }
}

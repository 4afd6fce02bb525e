//! Work in pieces that several threads share, for threads without TLS.
//!
//! A leader has `n` pieces to do. It calls the helpers, which sleep on a futex, and takes pieces itself until none is left;
//! a helper that comes while there are some takes them likewise. So a helper that is slow to wake costs nothing but the
//! call, and the leader waits for no more than the pieces that helpers have begun.
//!
//! Invariant: what the leader shares lives on its stack. It takes the pointer back before it looks whether a helper is
//! inside, and a helper says that it is inside before it reads the pointer, each with a fence between. So none has the
//! pointer when the leader returns. (Modelled with loom below.)
//!
//! In a forked child there are no helpers: [`Crew::reset`].

use crate::lock::{futex_wait, futex_wake};
use crate::thread::now_ns;
use core::sync::atomic::Ordering::*;
#[cfg(not(loom))]
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, fence};
#[cfg(loom)]
use {
    crate::lock::model::AtomicU32,
    loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, fence},
};

/// Looks at what helpers are at before sleeping: a piece takes some ten microseconds.
const SPINS: usize = if cfg!(loom) { 1 } else { 2000 };

/// The pieces of one piece of work: `f(worker, piece)` does one.
struct Job<'a> {
    f: &'a (dyn Fn(usize, usize) + Sync),
    n: usize,
    /// Helpers of a higher number do not take part.
    helpers: usize,
    next: AtomicUsize,
}

impl Job<'_> {
    /// Does pieces until there are no more.
    fn take_part(&self, worker: usize) {
        loop {
            let piece = self.next.fetch_add(1, Relaxed);
            if piece >= self.n {
                return;
            }
            (self.f)(worker, piece);
        }
    }
}

/// A leader at a time, and helpers.
pub struct Crew {
    /// Bumped to call the helpers.
    call: AtomicU32,
    /// Helpers that may have the job.
    inside: AtomicU32,
    job: AtomicPtr<Job<'static>>,
    led: AtomicBool,
    ended: AtomicBool,
    /// Helpers there are.
    helpers: AtomicUsize,
}

impl Crew {
    /// A crew without helpers.
    pub fn new() -> Self {
        Self {
            call: AtomicU32::new(0),
            inside: AtomicU32::new(0),
            job: AtomicPtr::new(core::ptr::null_mut()),
            led: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            helpers: AtomicUsize::new(0),
        }
    }

    /// Helpers that have joined.
    pub fn helpers(&self) -> usize {
        self.helpers.load(SeqCst)
    }

    /// Makes the caller the leader; false while another thread is. Ends with [`Crew::step_down`].
    pub fn lead(&self) -> bool {
        !self.led.swap(true, SeqCst)
    }

    /// Ends what [`Crew::lead`] began.
    pub fn step_down(&self) {
        self.led.store(false, SeqCst);
    }

    /// Does the pieces `0..n` of some work, each once, in the calling thread (worker 0) and in the first `helpers` that
    /// joined (1 and up); returns when all are done, and whether the caller waited for a helper longer than it had worked itself (the
    /// helper's CPU is wanted by others). `f` must not panic. Only for the leader.
    pub fn share(&self, n: usize, helpers: usize, f: &(dyn Fn(usize, usize) + Sync)) -> bool {
        let began = now_ns();
        let job = Job { f, n, helpers, next: AtomicUsize::new(0) };
        self.job.store(core::ptr::from_ref(&job).cast_mut().cast(), SeqCst);
        self.call.fetch_add(1, SeqCst);
        futex_wake(&self.call, u32::MAX >> 1, false);
        job.take_part(0);
        self.job.store(core::ptr::null_mut(), SeqCst);
        fence(SeqCst);
        let (mut looks, done) = (0, now_ns());
        loop {
            let inside = self.inside.load(SeqCst);
            if inside == 0 {
                return looks > SPINS && now_ns() - done > done - began;
            }
            looks += 1;
            if looks > SPINS {
                futex_wait(&self.inside, inside, None, false);
            }
            core::hint::spin_loop();
        }
    }

    /// Becomes a helper and takes part in whatever is shared, until [`Crew::end`].
    pub fn help(&self) {
        let worker = self.helpers.fetch_add(1, SeqCst) + 1;
        loop {
            let call = self.call.load(SeqCst);
            if self.ended.load(SeqCst) {
                return;
            }
            self.inside.fetch_add(1, SeqCst);
            fence(SeqCst);
            let job = self.job.load(SeqCst);
            if !job.is_null() {
                // SAFETY: the leader, which owns it, does not return before this thread is no longer inside (see the
                // module).
                let job = unsafe { &*job };
                if worker <= job.helpers {
                    job.take_part(worker);
                }
            }
            if self.inside.fetch_sub(1, SeqCst) == 1 {
                futex_wake(&self.inside, 1, false);
            }
            futex_wait(&self.call, call, None, false);
        }
    }

    /// Ends the helpers, as soon as they have no work.
    pub fn end(&self) {
        self.ended.store(true, SeqCst);
        self.call.fetch_add(1, SeqCst);
        futex_wake(&self.call, u32::MAX >> 1, false);
    }

    /// In a forked child, which has no other threads: nobody leads and nobody helps.
    pub fn reset(&self) {
        self.job.store(core::ptr::null_mut(), SeqCst);
        self.inside.store(0, SeqCst);
        self.helpers.store(0, SeqCst);
        self.led.store(false, SeqCst);
    }
}

impl Default for Crew {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    #[test]
    fn each_piece_is_done_once() {
        let crew = Crew::new();
        std::thread::scope(|threads| {
            (0..3).for_each(|_| drop(threads.spawn(|| crew.help())));
            let mut by_helpers = 0;
            for round in 0..2000 {
                let done: Vec<_> = (0..round % 40).map(|_| AtomicUsize::new(0)).collect();
                let workers = Mutex::new(BTreeSet::new());
                assert!(crew.lead() && !crew.lead());
                crew.share(done.len(), 2, &|worker, piece| {
                    done[piece].fetch_add(1, Relaxed);
                    workers.lock().unwrap().insert(worker);
                });
                crew.step_down();
                assert!(done.iter().all(|n| n.load(Relaxed) == 1), "round {round}");
                let workers = workers.into_inner().unwrap();
                assert!(workers.iter().all(|w| *w <= 2));
                by_helpers += usize::from(workers.iter().any(|w| *w > 0));
            }
            println!("helpers took part in {by_helpers} rounds");
            crew.end();
        });
    }

    #[test]
    fn alone_after_a_fork() {
        let crew = Crew::new();
        assert!(crew.lead());
        crew.inside.store(2, SeqCst);
        crew.helpers.store(2, SeqCst);
        crew.reset();
        assert_eq!(crew.helpers(), 0);
        assert!(crew.lead());
        let done = AtomicUsize::new(0);
        crew.share(5, 3, &|worker, _| {
            assert_eq!(worker, 0);
            done.fetch_add(1, Relaxed);
        });
        assert_eq!(done.load(Relaxed), 5);
    }
}

/// Every order of the steps: `RUSTFLAGS="--cfg loom" cargo test --release -p uzswap-sys --lib -- crew`.
#[cfg(all(test, loom))]
mod tests {
    use super::Crew;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    #[test]
    fn what_is_shared_is_the_leaders_again_when_it_returns() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let crew = Arc::new(Crew::new());
            let helper = {
                let crew = crew.clone();
                loom::thread::spawn(move || crew.help())
            };
            // loom's cell finds two accesses at once by itself.
            let pieces = [UnsafeCell::new(0), UnsafeCell::new(0)];
            struct Shared<'a>(&'a [UnsafeCell<u32>; 2]);
            // SAFETY: the crew gives each piece to one thread.
            unsafe impl Sync for Shared<'_> {}
            let shared = Shared(&pieces);
            let shared = &shared;
            assert!(crew.lead());
            crew.share(2, 1, &move |_, piece| {
                // SAFETY: as above.
                shared.0[piece].with_mut(|n| unsafe { *n += 1 })
            });
            crew.step_down();
            for piece in &pieces {
                // SAFETY: nobody else has it any more.
                piece.with_mut(|n| unsafe { assert_eq!(*n, 1) });
            }
            crew.end();
            helper.join().unwrap();
        });
    }
}

//! Shares work among threads without TLS, piece by piece.
//!
//! A leader has `n` pieces of work. It posts them, which wakes helpers that sleep on a futex, does its other work, and
//! finally takes pieces itself until none is left; a helper that arrives in time does the same. So a helper that is
//! slow to wake costs no more than the call, and the leader waits only for pieces that helpers have begun.
//!
//! Invariant: the leader withdraws the pointer to the job before it checks whether a helper is inside, and a helper
//! declares itself inside before it reads the pointer, each with a fence in between. So no helper has the pointer once
//! the job is finished. (Modelled with loom below.)
//!
//! A forked child has no helpers: [`Crew::reset`].

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

/// How often the leader checks on helpers before it sleeps: a piece takes some ten microseconds.
const SPINS: usize = if cfg!(loom) { 1 } else { 2000 };

/// Does one piece: `f(worker, piece)`.
type Work = dyn Fn(usize, usize) + Sync + Send;

/// Some work, and which pieces of it are taken.
struct Job {
    f: Box<Work>,
    n: usize,
    /// Helpers with a higher number do not take part.
    helpers: usize,
    next: AtomicUsize,
}

impl Job {
    /// Does pieces until none is left.
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

/// Posted work, to be passed to [`Crew::finish`]. If it is dropped instead, it leaks, as helpers may be at it.
pub struct Posted(core::mem::ManuallyDrop<Box<Job>>);

/// One leader at a time, and helpers.
pub struct Crew {
    /// Incremented to call the helpers.
    call: AtomicU32,
    /// Helpers that may have the pointer to the job.
    inside: AtomicU32,
    job: AtomicPtr<Job>,
    led: AtomicBool,
    ended: AtomicBool,
    /// Number of helpers.
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

    /// How many helpers have joined.
    pub fn helpers(&self) -> usize {
        self.helpers.load(SeqCst)
    }

    /// Makes the caller the leader, until [`Crew::step_down`]; false if another thread leads.
    pub fn lead(&self) -> bool {
        !self.led.swap(true, SeqCst)
    }

    /// Ends the caller's lead: see [`Crew::lead`].
    pub fn step_down(&self) {
        self.led.store(false, SeqCst);
    }

    /// Calls the first `helpers` that joined (workers 1 and up) to do the pieces `0..n`, each once. Only the leader may
    /// post, and must finish the work before it posts more. `f` must not panic.
    pub fn post(&self, n: usize, helpers: usize, f: Box<Work>) -> Posted {
        let job = Box::new(Job { f, n, helpers, next: AtomicUsize::new(0) });
        self.job.store(core::ptr::from_ref(&*job).cast_mut(), SeqCst);
        self.call.fetch_add(1, SeqCst);
        futex_wake(&self.call, u32::MAX >> 1, false);
        Posted(core::mem::ManuallyDrop::new(job))
    }

    /// Does the remaining pieces in the calling thread (worker 0), and returns when all are done. True if the caller
    /// waited for a helper longer than it had worked itself: others then want the helper's CPU.
    pub fn finish(&self, posted: Posted) -> bool {
        let began = now_ns();
        posted.0.take_part(0);
        self.job.store(core::ptr::null_mut(), SeqCst);
        fence(SeqCst);
        let (mut looks, done) = (0, now_ns());
        loop {
            let inside = self.inside.load(SeqCst);
            if inside == 0 {
                drop(core::mem::ManuallyDrop::into_inner(posted.0));
                return looks > SPINS && now_ns() - done > done - began;
            }
            looks += 1;
            if looks > SPINS {
                futex_wait(&self.inside, inside, None, false);
            }
            core::hint::spin_loop();
        }
    }

    /// Becomes a helper that takes part in all posted work, until [`Crew::end`].
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
                // SAFETY: the leader owns the job, and does not drop it before this thread is no longer inside (see the
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

    /// In a forked child, which has no other threads: nobody leads or helps any more.
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
    use std::sync::{Arc, Mutex};

    #[test]
    fn each_piece_is_done_once() {
        let crew = Crew::new();
        std::thread::scope(|threads| {
            (0..3).for_each(|_| drop(threads.spawn(|| crew.help())));
            let mut by_helpers = 0;
            for round in 0..2000 {
                let done: Arc<Vec<_>> = Arc::new((0..round % 40).map(|_| AtomicUsize::new(0)).collect());
                let workers = Arc::new(Mutex::new(BTreeSet::new()));
                assert!(crew.lead() && !crew.lead());
                let shared = (done.clone(), workers.clone());
                let work = move |worker, piece: usize| {
                    shared.0[piece].fetch_add(1, Relaxed);
                    shared.1.lock().unwrap().insert(worker);
                };
                crew.finish(crew.post(done.len(), 2, Box::new(work)));
                crew.step_down();
                assert!(done.iter().all(|n| n.load(Relaxed) == 1), "round {round}");
                let workers = workers.lock().unwrap();
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
        let done = Arc::new(AtomicUsize::new(0));
        let count = done.clone();
        let work = move |worker, _| {
            count.fetch_add(1 + 100 * worker, Relaxed);
        };
        crew.finish(crew.post(5, 3, Box::new(work)));
        assert_eq!(done.load(Relaxed), 5);
    }
}

/// Every interleaving: `RUSTFLAGS="--cfg loom" cargo test --release -p uzswap-sys --lib -- crew`.
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
            // loom's cell detects concurrent accesses by itself.
            struct Pieces([UnsafeCell<u32>; 2]);
            // SAFETY: the crew gives each piece to one thread.
            unsafe impl Sync for Pieces {}
            // SAFETY: as above.
            unsafe impl Send for Pieces {}
            let pieces = Arc::new(Pieces([UnsafeCell::new(0), UnsafeCell::new(0)]));
            let shared = pieces.clone();
            assert!(crew.lead());
            let work = move |_, piece: usize| {
                let Pieces(shared) = &*shared;
                // SAFETY: as above.
                shared[piece].with_mut(|n| unsafe { *n += 1 })
            };
            crew.finish(crew.post(2, 1, Box::new(work)));
            crew.step_down();
            for piece in &pieces.0 {
                // SAFETY: nobody else has it any more.
                piece.with_mut(|n| unsafe { assert_eq!(*n, 1) });
            }
            crew.end();
            helper.join().unwrap();
        });
    }
}

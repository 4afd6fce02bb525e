//! Orders the program's mapping calls, so that their events can be applied as they are read.
//!
//! The kernel reports what a call did only after it has let go of the mappings, and reports `mremap` twice: that the memory has
//! moved, and, once the thread has run again, that its old place was unmapped. Until then another thread's `mremap` may get that
//! place, and its event may be read first. Applied as they arrive, such events make no sense: the pages that moved there last
//! would be taken along with those that were there before, or forgotten with them, and then read as another page or as zeros. No
//! event says when it happened, so the calls themselves are ordered:
//!
//! - `mremap` runs alone.
//! - The other calls that raise events run side by side. (An unmapping that is reported late drops only the knowledge of resident
//!   pages: while an event is unread nothing moves.)
//! - `fork` runs alone: the child's tables are a copy, and it gets none of the parent's events.
//! - So do the ticker's scans: between the event of `madvise` and the end of the call, old pages are still there.
//! - So does everything that registers memory by what is known or was read: while an event is unread, something else may be
//!   mapped there.
//!
//! While an event is unread no page can come in (the kernel answers EAGAIN), and threads that made such calls all the time left
//! hardly a moment without one. So while a fault or reclaim waits for an event, new calls are held back, for a moment at most;
//! and for some moments while a thread wants calls stopped, as a thread that takes the lock once it is free would get it before
//! one that sleeps for it.
//!
//! Calls are wrapped where libc makes them (the agent's `patch`). Calls that a program makes with instructions of its own are not
//! ordered.
//!
//! Lock order: this lock before the pager's. Its holder waits for events to be read, so the handler never takes it, and the
//! ticker, which must keep the handler running, waits for it only a moment. Its holder has all signals blocked: a signal handler
//! might make such calls, or never return.

pub mod credentials;
pub(crate) mod descriptors;
pub mod events;
pub(crate) mod executes;
mod holders;
pub mod remapped;

use crate::frames::arena::PAGE;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::*};
use holders::Holders;
use uzswap_sys::lock::{futex_wait, futex_wake};
use uzswap_sys::rwlock::RwLock;
use uzswap_sys::thread;

/// How long the ticker waits for calls to end (nanoseconds).
const SCAN_WAITS_NS: u64 = 2_000_000;

/// How long engaging waits for calls that began before calls were ordered: this many pauses of [`ENGAGE_WAIT_NS`]. (A signal
/// handler that never returns leaves a call counted for good.)
///
/// The story: found by reading. The wait was 20 ms, less than a thread may wait for a CPU, so a thread's `mremap` ran beside
/// ordered ones.
const ENGAGE_WAITS: u32 = 10_000;
const ENGAGE_WAIT_NS: u64 = 200_000;

/// How long a call is held back at most (nanoseconds). What it is held back for takes microseconds, or does not depend on the
/// call.
const HOLD_BACK_NS: u64 = 2_000_000;
/// This many times as long for a thread that wants calls stopped: it waits for other calls to end, whose threads may wait for a
/// CPU.
const HOLD_FOR_STOP: u64 = 10;

/// How often a thread that waits for the lock checks whether its holders are still alive (nanoseconds).
const CHECK_NS: u64 = 50_000_000;

/// What a call holds while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// Only a count: no memory is managed yet.
    Counted,
    /// The lock, shared with others, and the place where its thread is noted ([`holders`]).
    Shared(u8),
    /// The lock, alone.
    Alone,
}

/// Who waits for calls to end; nothing can be moved while an event is unread.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub enum Waits {
    /// The handler, with a fault to serve.
    Fault = 1,
    /// The reclaim thread.
    Reclaim = 2,
}

/// Orders the calls of one process.
pub struct Calls {
    lock: RwLock,
    /// The threads that hold it.
    holders: Holders,
    /// Whether calls take the lock: from before the first memory is registered.
    ordered: AtomicBool,
    /// Calls under way that did not take it.
    unordered: AtomicU32,
    /// The `mremap` under way: where from, and how many bytes it is to leave there (0: none under way).
    remaps: [AtomicUsize; 2],
    /// Who waits for calls to end ([`Waits`]; a futex).
    waited_for: AtomicU32,
    /// How many threads want calls stopped and have not got there yet (a futex).
    stopping: AtomicU32,
    /// Whether calls kept the reclaim thread from making room when it last tried.
    hold_up_room: AtomicBool,
    /// How long a call is held back at most (nanoseconds).
    hold_ns: u64,
}

impl Default for Calls {
    fn default() -> Self {
        Self::with_hold(HOLD_BACK_NS)
    }
}

impl Calls {
    fn with_hold(hold_ns: u64) -> Self {
        Self {
            lock: RwLock::new(),
            holders: Holders::new(),
            ordered: AtomicBool::new(false),
            unordered: AtomicU32::new(0),
            remaps: [const { AtomicUsize::new(0) }; 2],
            waited_for: AtomicU32::new(0),
            stopping: AtomicU32::new(0),
            hold_up_room: AtomicBool::new(false),
            hold_ns,
        }
    }

    /// Before a call while no memory is managed; false if the call must begin with [`Calls::begin`].
    pub fn begin_unordered(&self) -> bool {
        if !self.ordered.load(Relaxed) {
            self.unordered.fetch_add(1, SeqCst);
            if !self.ordered.load(SeqCst) {
                return true;
            }
            self.unordered.fetch_sub(1, Release);
        }
        false
    }

    /// Before a call, with all signals blocked; `alone` if it is `mremap`.
    pub fn begin(&self, alone: bool) -> Held {
        // Wait before taking the lock, which is what those threads want.
        self.wait_for_stop();
        let held = if alone {
            self.take();
            Held::Alone
        } else {
            let me = self.holders.calling_thread();
            self.lock.share_checking(CHECK_NS, || self.release_for_dead());
            Held::Shared(self.holders.note_shared(me))
        };
        // Wait with the lock held: a call that waited for the lock would otherwise begin without having looked.
        let waited_for = self.waited_for.load(Acquire);
        if waited_for != 0 {
            futex_wait(&self.waited_for, waited_for, Some(self.hold_ns), false);
        }
        held
    }

    /// Takes the lock alone, for a call or a fork.
    fn take(&self) {
        let me = self.holders.calling_thread();
        self.lock.take_checking(CHECK_NS, || self.release_for_dead());
        self.holders.note_alone(me);
    }

    /// Releases the lock for holders that died with it.
    ///
    /// The story: a child that shared its parent's memory was killed in `munmap`. Its parent's next `mremap`, or fork, waited
    /// forever.
    fn release_for_dead(&self) {
        let (shared, alone) = self.holders.remove_dead();
        (0..shared).for_each(|_| self.lock.unshare());
        if alone {
            self.remaps[1].store(0, Release);
            self.lock.release();
        }
    }

    /// Whether a thread holds the lock: it is in a call, or forks.
    pub(crate) fn are_held_by(&self, tid: u32) -> bool {
        self.lock.is_held() && self.holders.include(tid)
    }

    /// Whether mappings may have changed without an event: another process that shares this memory is in a call, or died in one
    /// and nobody has checked since what it did ([`crate::Pager::mend_torn`]).
    pub(crate) fn may_be_torn(&self) -> bool {
        self.holders.may_be_torn()
    }

    /// Whether such a process died in a call since the last time this was asked. The caller checks what it did.
    pub(crate) fn take_torn(&self) -> bool {
        self.holders.take_torn()
    }

    /// The check that [`Calls::take_torn`] asked for failed.
    pub(crate) fn stay_torn(&self) {
        self.holders.stay_torn();
    }

    /// Waits until no thread wants calls stopped, for some moments at most.
    fn wait_for_stop(&self) {
        let (mut left, mut before) = (self.hold_ns.saturating_mul(HOLD_FOR_STOP), None);
        loop {
            let wanted = self.stopping.load(Acquire);
            if wanted == 0 || left == 0 {
                return;
            }
            let now = thread::now_ns();
            left = left.saturating_sub(now - before.replace(now).unwrap_or(now));
            futex_wait(&self.stopping, wanted, Some(left), false);
        }
    }

    /// Sets whether `who` waits for the calls under way. New calls are held back until nobody waits.
    ///
    /// The story: two threads did nothing but `mremap` in turn, each waiting for its event to be read. Other threads got a page
    /// only when by chance neither call was under way. After twelve seconds three threads had not got past the pages they began
    /// with.
    pub fn hold_back(&self, who: Waits, waits: bool) {
        let bit = who as u32;
        if self.are_waited_for(who) == waits {
            return;
        }
        if waits {
            self.waited_for.fetch_or(bit, Release);
        } else if self.waited_for.fetch_and(!bit, Release) == bit {
            futex_wake(&self.waited_for, u32::MAX >> 1, false);
        }
    }

    /// Whether `who` waits for calls to end.
    pub fn are_waited_for(&self, who: Waits) -> bool {
        self.waited_for.load(Relaxed) & who as u32 != 0
    }

    /// Notes that the call begun alone is an `mremap` of memory at `from`, which is to be `new_len` bytes long. It holds until
    /// the call ends.
    pub fn begin_remap(&self, from: usize, new_len: usize) {
        self.remaps[0].store(from, Relaxed);
        self.remaps[1].store(new_len, Release);
    }

    /// How many bytes moved by the `mremap` of memory at `from`, for which an event reports `len`.
    ///
    /// The story: kernels before 6.15 unmap what a shrinking call with MREMAP_FIXED leaves out, and then report the whole old
    /// length as moved. What was known of the rest was noted for the memory behind the new place, and read there.
    pub fn moved_bytes(&self, from: usize, len: usize) -> usize {
        match self.remaps[1].load(Acquire) {
            0 => len,
            new_len if self.remaps[0].load(Relaxed) == from => len.min(new_len.next_multiple_of(PAGE)),
            _ => len,
        }
    }

    /// After the call.
    pub fn end(&self, held: Held) {
        match held {
            Held::Counted => drop(self.unordered.fetch_sub(1, Release)),
            Held::Shared(place) => {
                self.holders.forget_shared(place);
                self.lock.unshare();
            }
            Held::Alone => {
                self.remaps[1].store(0, Release);
                self.go_on();
            }
        }
    }

    /// Orders all calls, from the first one on.
    pub fn order_always(&self) {
        self.ordered.store(true, SeqCst);
    }

    /// Orders calls from now on, before any memory is registered, and waits for those under way.
    pub fn order(&self) {
        self.order_waiting(ENGAGE_WAITS);
    }

    fn order_waiting(&self, times: u32) {
        self.ordered.store(true, SeqCst);
        for _ in 0..times {
            if self.unordered.load(SeqCst) == 0 {
                return;
            }
            thread::sleep_ns(ENGAGE_WAIT_NS);
        }
    }

    /// Stops calls, for a fork.
    pub fn stop(&self) {
        self.before_others(Self::take);
    }

    /// Stops calls, for a scan; false if they cannot be stopped now.
    pub fn try_stop(&self) -> bool {
        self.before_others(|calls| {
            let taken = calls.lock.take_within(SCAN_WAITS_NS);
            if !taken {
                calls.release_for_dead();
            }
            taken
        })
    }

    /// Takes the lock ahead of new calls, which wait meanwhile.
    fn before_others<T>(&self, take: impl FnOnce(&Self) -> T) -> T {
        self.want_stopped(true);
        let taken = take(self);
        self.want_stopped(false);
        taken
    }

    /// Makes new calls wait for a thread that wants calls stopped, or ends that. For a thread that tries again and again; each
    /// `true` must be followed by a `false`.
    ///
    /// The story: beside two threads that did nothing but `mremap` in turn, the ticker was woken each time one call ended and
    /// found the lock taken by the other. Or, where others had the CPUs, the lock was never free in the moments for which it
    /// waits. It did not scan for a second, in which others filled half as much again as the limit.
    pub fn want_stopped(&self, wants: bool) {
        if wants {
            self.stopping.fetch_add(1, Release);
        } else if self.stopping.fetch_sub(1, Release) == 1 {
            futex_wake(&self.stopping, u32::MAX >> 1, false);
        }
    }

    /// The reclaim thread notes whether calls keep it from making room. As long as they do, calls that begin wait for it as they
    /// wait for a thread that wants calls stopped.
    pub(crate) fn set_hold_up_room(&self, hold_up: bool) {
        if self.hold_up_room.load(Relaxed) != hold_up {
            self.hold_up_room.store(hold_up, Relaxed);
            self.want_stopped(hold_up);
        }
    }

    /// Whether calls keep the reclaim thread from making room.
    pub(crate) fn hold_up_room(&self) -> bool {
        self.hold_up_room.load(Relaxed)
    }

    /// Whether a thread wants calls stopped and has not got there yet.
    pub fn are_to_stop(&self) -> bool {
        self.stopping.load(Relaxed) != 0
    }

    /// Stops calls if none is under way, for callers that cannot wait.
    pub fn try_stop_now(&self) -> bool {
        self.lock.try_take()
    }

    /// Lets calls run again.
    pub fn go_on(&self) {
        self.holders.forget_alone();
        self.lock.release();
    }

    /// In a forked child, which has only the forking thread.
    pub fn forget_others(&self) {
        self.unordered.store(0, Relaxed);
        self.waited_for.store(0, Relaxed);
        self.stopping.store(0, Relaxed);
        self.hold_up_room.store(false, Relaxed);
        self.holders.forget_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn what_began_unordered_has_ended_before_memory_is_managed() {
        let (calls, ended) = (Calls::default(), AtomicBool::new(false));
        assert!(calls.begin_unordered());
        std::thread::scope(|threads| {
            let engages = threads.spawn(|| {
                calls.order_waiting(u32::MAX);
                ended.load(SeqCst)
            });
            while calls.begin_unordered() {
                calls.end(Held::Counted);
            }
            ended.store(true, SeqCst);
            calls.end(Held::Counted);
            assert!(engages.join().unwrap(), "it did not wait");
        });
        assert_eq!(calls.unordered.load(SeqCst), 0);
    }

    /// A process that shared this memory died in a call: its share, and the lock that another had alone, are released for it.
    #[test]
    fn the_lock_is_released_for_dead_holders() {
        let calls = Calls::default();
        for alone in [false, true] {
            let mut dead = std::process::Command::new("/bin/true").spawn().unwrap();
            let thread = dead.id() | 1 << 31;
            match alone {
                true => {
                    calls.lock.take();
                    calls.holders.note_alone(thread);
                }
                false => {
                    calls.lock.share();
                    calls.holders.note_shared(thread);
                }
            }
            calls.stop();
            assert!(calls.take_torn(), "alone: {alone}");
            calls.go_on();
            dead.wait().unwrap();
        }
        assert!(!calls.lock.is_held());
    }

    /// Of two that wait for calls, the last to be done lets a call begin.
    #[test]
    fn a_call_is_held_back_until_nobody_waits_for_it() {
        let (calls, goes_on) = (Calls::with_hold(u64::MAX >> 1), AtomicBool::new(false));
        calls.hold_back(Waits::Fault, true);
        calls.hold_back(Waits::Reclaim, true);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                let held = calls.begin(true);
                assert!(goes_on.load(SeqCst), "it was not held back");
                calls.end(held);
            });
            while calls.try_stop_now() {
                calls.go_on();
                std::thread::yield_now();
            }
            calls.hold_back(Waits::Fault, false);
            goes_on.store(true, SeqCst);
            calls.hold_back(Waits::Reclaim, false);
        });
        assert!(calls.try_stop_now(), "it has ended");
    }

    /// A call is not held back forever, whoever waits; and a child waits for no thread that it does not have.
    #[test]
    fn a_call_is_held_back_for_a_moment() {
        let calls = Calls::default();
        calls.hold_back(Waits::Fault, true);
        calls.end(calls.begin(false));
        assert!(calls.are_waited_for(Waits::Fault) && !calls.are_waited_for(Waits::Reclaim));
        calls.forget_others();
        assert!(!calls.are_waited_for(Waits::Fault));
    }

    /// However often calls take the lock as soon as it is free.
    #[test]
    fn who_wants_calls_stopped_comes_before_those_that_begin() {
        for _ in 0..100 {
            let (calls, stopped) = (Calls::with_hold(u64::MAX >> 1), AtomicBool::new(false));
            let held = calls.begin(true);
            std::thread::scope(|threads| {
                threads.spawn(|| {
                    calls.stop();
                    stopped.store(true, SeqCst);
                    calls.go_on();
                });
                while calls.stopping.load(SeqCst) == 0 {
                    std::thread::yield_now();
                }
                for _ in 0..2 {
                    threads.spawn(|| {
                        let held = calls.begin(true);
                        let in_turn = stopped.load(SeqCst);
                        calls.end(held);
                        assert!(in_turn, "a call began before");
                    });
                }
                calls.end(held);
            });
            assert_eq!(calls.stopping.load(SeqCst), 0);
        }
    }

    #[test]
    fn a_scan_waits_for_no_call_for_long() {
        let calls = Calls::default();
        let held = calls.begin(false);
        assert!(!calls.try_stop());
        calls.end(held);
        assert!(calls.try_stop());
        calls.go_on();
    }
}

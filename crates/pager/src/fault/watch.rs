//! Makes sure that the handler gets to run: idle policy makes faults cheap (`fault`), but such a thread gets next to nothing of a
//! CPU that others want.
//!
//! The ticker looks every 16 ms while faults occur. It *lifts* a handler that has work and does not get on to the normal policy,
//! and lowers it again after a while. Leaving the idle policy takes `CAP_SYS_NICE` or a sufficient limit on niceness, which in
//! most containers nobody has, not even root. There the handler is *relieved*: the ticker, which has normal policy, starts
//! another thread. The old handler hands over its work (the faults it has read, the reads under way) and ends.
//!
//! ```text
//! ticker             old handler                      new one
//! start it ────────────────────────────────────────▶ waits for the duty
//! WANTED ──────────▶ at the end of its turn,
//!                    with the pager's lock held:
//!                    duty put down, HANDED ─────────▶ takes it, NOBODY; goes on
//! ```
//! Invariants: one thread at a time has the duty, and no fault that was read is lost with a thread. A relief takes as long as the
//! old handler needs to finish its turn, so each new handler stays lifted for longer: see `hold`. Lock order: the pager's lock,
//! then `duty`; so a fork, which holds the pager's lock, finds `duty` free.

use crate::fault::handler::{Handler, begin_handler};
use crate::group::member::SIGNAL;
use crate::pager::Pager;
use crate::ticker::{LOOK_NS, pager};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering::*};
use uzswap_sys::lock::{self, Lock};
use uzswap_sys::thread;

/// The number of the handlers' second stack; they alternate between two.
const SECOND_STACK: usize = 11;
/// For how many looks a handler stays lifted.
const LIFTED: u32 = 25;
/// The same for one that relieved another, at most: a minute or so.
const LIFTED_MOST: u32 = 4000;
/// A relief is forgotten when the handler has been lowered for this long (nanoseconds).
const FORGOTTEN_NS: u64 = 10_000_000_000;
/// How long the ticker leaves the CPU to a handler that seems starved before it lifts it (nanoseconds).
const LEAVE_NS: u64 = 1_000_000;
/// A handler that makes this many turns in that time is not starved: some 10 µs each, plus the program's time.
const TURNS: u64 = 8;
/// How many such moments in a row must show it starved.
const LEAVES: u32 = 3;
/// How many unclear moments count as starved: the handler may have done what there was, which was little.
const UNCLEAR: u32 = 3;

const NOBODY: u32 = 0;
const WANTED: u32 = 1;
const HANDED: u32 = 2;

/// What the ticker can see of the handler, and the handler of the ticker.
#[derive(Default)]
pub struct Signs {
    /// Faults handled: evidence that the handler gets to run.
    pub progress: AtomicU64,
    /// The thread whose fault the handler read last.
    pub faulted: AtomicU32,
    /// Whether the handler sleeps in poll.
    pub asleep: AtomicBool,
    /// Whether the handler has read a fault that it has not served yet.
    pub owes: AtomicBool,
    /// Whether the ticker is watching the handler.
    pub watched: AtomicBool,
    /// Whether the handler has normal policy.
    pub normal: AtomicBool,
}

/// How one handler takes over from another.
pub struct Relief {
    /// Whether a handover is wanted, or the duty has been put down (a futex word).
    state: AtomicU32,
    /// The duty that the old handler put down.
    duty: Lock<Option<Box<Handler>>>,
    /// The handler relieved last (0: none).
    former: AtomicI32,
    /// Whether the handler runs on the second stack.
    second: AtomicBool,
}

impl Default for Relief {
    /// Nobody was relieved.
    fn default() -> Self {
        Self {
            state: AtomicU32::new(NOBODY),
            duty: Lock::new(None),
            former: AtomicI32::new(0),
            second: AtomicBool::new(false),
        }
    }
}

impl Relief {
    /// Starts over in a forked child, whose handler runs on the first stack.
    pub(crate) fn reset(&self) {
        // A duty put down in the parent is the parent's.
        core::mem::forget(self.duty.lock().take());
        self.state.store(NOBODY, Relaxed);
        self.former.store(0, Relaxed);
        self.second.store(false, Relaxed);
    }
}

impl Pager {
    /// Serves until the process is let go of, or another handler takes over.
    pub(crate) fn serve_until_relieved(&self, mut handler: Box<Handler>) -> ! {
        loop {
            if self.relief.state.load(Acquire) == WANTED {
                let mut s = self.state.lock();
                s.placement.new_handler();
                *self.relief.duty.lock() = Some(handler);
                self.relief.state.store(HANDED, Release);
                drop(s);
                lock::futex_wake(&self.relief.state, 1, false);
                thread::exit()
            }
            if handler.has_ended() {
                thread::exit()
            }
            handler.turn(self);
        }
    }

    fn take_duty(&self) -> Box<Handler> {
        loop {
            let state = self.relief.state.load(Acquire);
            if state == HANDED {
                let _s = self.state.lock();
                if let Some(handler) = self.relief.duty.lock().take() {
                    self.relief.state.store(NOBODY, Release);
                    return handler;
                }
            }
            lock::futex_wait(&self.relief.state, state, None, false);
        }
    }

    /// Makes the handler compete for its CPU like any other thread. False when that is not possible now. Called by the ticker.
    pub(crate) fn lift_handler(&self) -> bool {
        let handler = self.handler.load(Relaxed);
        if self.may_leave_idle.load(Relaxed) {
            thread::set_idle_policy(handler, false);
        } else if !self.is_relieved(handler) {
            return false;
        }
        self.signs.normal.store(true, SeqCst);
        self.counters().handler_lifted.fetch_add(1, Relaxed);
        true
    }

    /// Has another thread take over from the handler when it has finished its turn, unless one is about to. False if that is not
    /// possible now, or if the one that is about to has idle policy.
    ///
    /// The story: it was given that policy while it waited, as the former handler slept and did not hand over. It then counted as
    /// a normal thread, and a process that ended waited 3 s for it, and each of its children.
    pub(crate) fn is_relieved(&self, handler: i32) -> bool {
        match self.relief.state.load(Relaxed) {
            NOBODY => self.relieve(handler),
            _ => !thread::has_idle_policy(handler),
        }
    }

    /// Wakes the handler that is to be relieved, as it may sleep.
    pub(crate) fn wake_former_handler(&self) {
        let former = self.relief.former.load(Relaxed);
        if former > 0 && self.relief.state.load(Relaxed) == WANTED {
            thread::kill_thread(thread::getpid(), former, SIGNAL);
        }
    }

    /// Whether a handler that was relieved has idle policy and has not ended yet.
    pub(crate) fn has_idle_former(&self) -> bool {
        let former = self.relief.former.load(Relaxed);
        former > 0 && thread::has_idle_policy(former)
    }

    fn relieve(&self, handler: i32) -> bool {
        let former = self.relief.former.load(Relaxed);
        // The next handler needs its stack.
        if former > 0 && thread::is_there(thread::getpid(), former) {
            return false;
        }
        let second = !self.relief.second.load(Relaxed);
        let Ok(tid) = self.spawn_on(if second { SECOND_STACK } else { 1 }, false, run_relief) else { return false };
        self.relief.second.store(second, Relaxed);
        self.relief.former.store(handler, Relaxed);
        self.handler.store(tid, Release);
        self.relief.state.store(WANTED, Release);
        true
    }
}

extern "C" fn run_relief(arg: usize) -> ! {
    let p = pager(arg);
    begin_handler();
    p.serve_until_relieved(p.take_duty())
}

/// The ticker's view of the handler.
#[derive(Default)]
pub(crate) struct Watch {
    seen: u64,
    /// When `seen` was read (monotonic nanoseconds); 0 while nobody looks.
    at: u64,
    /// CPU time that the handler had used then (nanoseconds).
    used: u64,
    /// How long the handler had waited for a CPU then (nanoseconds).
    waited: u64,
    /// Whether a fault was waiting then although the handler had little of the CPU.
    late: bool,
    quiet: u32,
    /// For how many more looks the handler stays lifted.
    lifted: u32,
    /// How many looks the last relief was for.
    hold: u32,
    /// Looks at which the handler seemed starved, but had nothing to do a moment later; less those at which it did not seem so.
    unclear: u32,
    /// When the handler was last lowered (monotonic nanoseconds).
    lowered_at: u64,
}

impl Watch {
    pub(crate) fn look_after_handler(&mut self, p: &Pager) {
        if p.ending.load(SeqCst) {
            p.ease_handler();
        }
        if !p.signs.watched.load(Relaxed) {
            self.at = 0;
            return;
        }
        // The CPU timer may end a nap early, and two looks in a row would always find no progress.
        let now = thread::now_ns();
        if now - self.at < LOOK_NS / 4 * 3 {
            return;
        }
        let handler = p.handler.load(Relaxed);
        let used = thread::cpu_ns(handler);
        let before = core::mem::replace(&mut self.waited, thread::waited_ns(handler));
        if self.at == 0 {
            self.lower(p);
            // A handler that was just woken has not run yet.
            (self.at, self.used, self.seen, self.late) = (now, used, p.signs.progress.load(Relaxed), false);
            return;
        }
        // A thread that computes on this CPU leaves an idle-policy thread a little, so each look finds some progress.
        let delayed = self.waited.saturating_sub(before) > (now - self.at) / 2;
        let little = used.saturating_sub(self.used) < (now - self.at) / 2;
        (self.at, self.used) = (now, used);
        let progress = p.signs.progress.load(Relaxed);
        let moved = core::mem::replace(&mut self.seen, progress) != progress;
        let asleep = p.signs.asleep.load(SeqCst);
        // Also if the handler sleeps: it may have been woken long ago, by a fault or a read, and not have run since.
        let waiting = p.uffd().wait(0) || p.a_read_has_ended();
        let late = core::mem::replace(&mut self.late, waiting && little);
        // Work that is left once all faults are served may wait for a program that computes.
        let held_up = delayed && (waiting || (!asleep && p.signs.owes.load(Relaxed)));
        let suspect = held_up || (late && self.late) || (!moved && !asleep && (waiting || p.state.is_locked()));
        // A handler that was lifted for good reason gets on, and would starve again.
        if suspect && (self.lifted > 0 || self.is_starved(p, handler)) {
            // It is runnable, has work, and has hardly run, or not at all, for a whole look.
            self.lift(p, now);
        } else if self.lifted > 0 {
            self.lifted -= 1;
            if self.lifted == 0 {
                self.lowered_at = now;
            }
        }
        if !suspect {
            self.unclear = self.unclear.saturating_sub(1);
        }
        self.quiet = if moved || !asleep { 0 } else { self.quiet + 1 };
        if self.quiet > 25 {
            self.quiet = 0;
            p.ease_handler();
            p.signs.watched.store(false, SeqCst);
        } else if self.quiet == 0 {
            self.lower(p);
        }
    }

    /// Gives the handler idle policy again, unless it is lifted.
    fn lower(&self, p: &Pager) {
        if self.lifted == 0 {
            p.lower_handler();
        }
    }

    /// Whether the handler does not get on even when this thread leaves it the CPU.
    ///
    /// The story: the ticker is on the CPU of the program and the handler, and gets it before the handler when the program waits
    /// for a fault. So now and then it found a fault waiting where nothing else ran. It lifted the handler, which had waited for
    /// a CPU while the program computed, for half a second at a time; the kernel then wakes the program on the other CPU, fault
    /// for fault. Lifting it only when it made no step at all in this time let a handler starve that others keep from the CPU.
    /// After a long wait such a handler gets the CPU at once, and serves a fault or two (an idle-policy thread may be 50 µs of it
    /// behind after 16 ms). Then it starves again, and with it the program, which waits for a CPU as well. (A program that
    /// computes for long after a fault has a CPU.)
    ///
    /// Nor is it enough that once neither had the CPU: on a virtual machine the host may have taken it, for a millisecond or so.
    /// `xz -9` alone on an idle machine was lifted for that in 18 of 46 runs, and took 2.2 to 8.3 s where it takes 1.8.
    fn is_starved(&mut self, p: &Pager, handler: i32) -> bool {
        for _ in 0..LEAVES {
            match self.leave_cpu(p, handler) {
                Some(Shown::Starved) => {}
                None => return false,
                Some(Shown::GetsOn) => {
                    self.unclear = 0;
                    return false;
                }
                Some(Shown::Unclear) => {
                    self.unclear += 1;
                    return self.unclear >= UNCLEAR;
                }
            }
        }
        true
    }

    /// What the handler shows while this thread leaves it the CPU for a moment. None when another thread waits for this one; but
    /// if this one waits for calls to end it looks on, as the calls may wait for the handler.
    ///
    /// The story: an `mremap` waited for its event to be read; the ticker for the `mremap`, to look at what other threads had
    /// mapped; and the handler for a CPU, which it was not given while a look was wanted. That took a second and more beside two
    /// threads that compute.
    fn leave_cpu(&self, p: &Pager, handler: i32) -> Option<Shown> {
        let of = p.signs.faulted.load(Relaxed);
        let look = || (p.signs.progress.load(Relaxed), thread::cpu_ns(handler), thread::cpu_ns(of as i32));
        let (before, until) = (look(), thread::now_ns() + LEAVE_NS);
        // The CPU timer may end a nap early.
        while let left @ 1.. = until.saturating_sub(thread::now_ns()) {
            if p.growth.looks_wanted.load(Relaxed) != p.growth.looks_done.load(Relaxed) && !p.calls.are_to_stop() {
                // A thread that waits cannot show anything meanwhile.
                return None;
            }
            thread::sleep_ns(left);
        }
        let now = look();
        let served = !p.uffd().wait(0);
        let idle = served && p.signs.asleep.load(SeqCst);
        let (ran, computed) = (now.1.saturating_sub(before.1), now.2.saturating_sub(before.2));
        Some(shown(now.0 - before.0, ran, computed, served, idle))
    }

    fn lift(&mut self, p: &Pager, now: u64) {
        self.unclear = 0;
        if self.lifted == 0 {
            if !p.signs.normal.load(Relaxed) && !p.lift_handler() {
                return;
            }
            // Lifting costs nothing; relieving costs a thread, and delays its faults for a while.
            let at_no_cost = p.may_leave_idle.load(Relaxed);
            self.hold = if at_no_cost { LIFTED } else { hold(self.hold, now - self.lowered_at) };
        }
        self.lifted = self.hold;
    }
}

/// What a handler shows when it is left the CPU for a moment.
#[derive(Debug, PartialEq, Eq)]
enum Shown {
    GetsOn,
    Starved,
    Unclear,
}

/// Judges such a moment: the handler made so many turns and had the CPU for `ran`, while the thread it served last had one for
/// `computed` (nanoseconds); in the end all faults are `served` (or were read), and the handler is `idle` or not.
fn shown(turns: u64, ran: u64, computed: u64, served: bool, idle: bool) -> Shown {
    if turns >= TURNS || ran >= LEAVE_NS / 8 || ((turns > 0 || served) && ran + computed >= LEAVE_NS / 2) {
        Shown::GetsOn
    } else if turns > 0 && idle {
        Shown::Unclear
    } else {
        Shown::Starved
    }
}

/// For how many looks a handler that relieved another stays lifted: twice as long as the one before, which was lowered so many
/// nanoseconds ago, unless that is long ago.
fn hold(last: u32, since_lowered_ns: u64) -> u32 {
    if since_lowered_ns > FORGOTTEN_NS { LIFTED } else { (last * 2).clamp(LIFTED, LIFTED_MOST) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    /// See [`Pager::is_relieved`].
    #[test]
    fn a_handler_that_is_about_to_take_over_with_idle_policy_is_no_relief() {
        let p = testing::pager(16 << 20);
        p.relief.state.store(WANTED, Relaxed);
        assert!(p.is_relieved(thread::gettid()));
        let idle = std::thread::spawn(|| {
            thread::set_idle_policy(0, true);
            assert!(!p.is_relieved(thread::gettid()));
        });
        idle.join().unwrap();
    }

    #[test]
    fn who_is_relieved_again_and_again_stays_lifted_for_longer() {
        let mut last = 0;
        for expected in [25, 50, 100, 200, 400, 800, 1600, 3200, 4000, 4000] {
            last = hold(last, 1_000_000);
            assert_eq!(last, expected);
        }
        assert_eq!(hold(last, FORGOTTEN_NS + 1), LIFTED);
    }

    /// See [`Watch::leave_cpu`].
    #[test]
    fn a_look_that_waits_for_calls_keeps_no_handler_from_being_lifted() {
        if !testing::by_itself("fault::watch::tests::a_look_that_waits_for_calls_keeps_no_handler_from_being_lifted") {
            return;
        }
        let (p, watch) = (testing::pager(16 << 20), Watch::default());
        p.growth.looks_wanted.store(1, Relaxed);
        assert_eq!(watch.leave_cpu(p, thread::gettid()), None, "the one that asked for a look waits");
        p.calls.want_stopped(true);
        assert!(watch.leave_cpu(p, thread::gettid()).is_some(), "the look waits as well");
        p.calls.want_stopped(false);
        assert_eq!(watch.leave_cpu(p, thread::gettid()), None);
    }

    #[test]
    fn a_fault_or_two_do_not_show_that_a_handler_gets_on() {
        let starved = [
            shown(0, 0, 900_000, false, false),
            shown(2, 50_000, 200_000, false, false),
            shown(0, 0, 0, true, true),
            shown(0, 40_000, 0, true, false),
        ];
        assert_eq!(starved, [const { Shown::Starved }; 4]);
        // Either there is little to do, or the program itself waits for a CPU.
        assert_eq!(shown(1, 7_000, 100_000, true, true), Shown::Unclear);
        // Small faults; one that makes room or brings much; a program that computes, with a fault behind it or work put off.
        let gets_on = [
            shown(20, 200_000, 0, true, true),
            shown(1, 700_000, 0, false, false),
            shown(1, 7_000, 900_000, false, false),
            shown(0, 0, 900_000, true, false),
        ];
        assert_eq!(gets_on, [const { Shown::GetsOn }; 4]);
    }
}

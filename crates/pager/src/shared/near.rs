//! Serves a mapping's faults on the CPU of the thread that faults.
//!
//! On an otherwise idle machine, serving a fault on another CPU wakes two CPUs from their sleep: first the one that serves it,
//! then that of the waiting thread. That takes 73 µs on the machine this was built on, of which serving takes 4. So where one
//! thread faults again and again, a second thread of the owner serves it *on its own CPU*, at idle policy: 11 µs. `handler` does
//! the same for private memory (and says why: a CPU that runs only idle-policy threads counts as idle, so a woken thread goes on
//! right there).
//!
//! An idle-policy thread gets next to nothing of a CPU that others want. Three rules make up for that.
//!
//! 1. It wakes no thread with the engine's lock held: the program would take the CPU from it within that call, and everybody else
//!    would wait for the lock as long as the program computes. Wakes are put off until the lock is released (`Mapping::put_off`).
//! 2. The mapping's own thread, of normal policy, is its *guard*. While the second thread serves, the guard checks every
//!    [`LOOK_MS`] for a fault that was not read, or was read and its thread not woken, at two looks in succession. Then it wakes
//!    all waiting threads (those not served yet fault again), and serves by itself for some time.
//! 3. If the second thread is not faster than the guard was just before, it is not used for some time either: on a busy machine
//!    no CPU sleeps, and the guard's way costs 5 µs.
//!
//! If other work on that CPU preempts the second thread with the lock held, others wait until the scheduler gives even an
//! idle-policy thread a moment: some milliseconds, and only once, as the guard then serves.
//!
//! The second thread makes room for its faults by itself, and leaves the reclaim thread asleep. Reclaim would run on another CPU,
//! and each of the two would wait for the other's lock, and wake the other, time and again (random reads and writes of 256 MiB in
//! 96, one process: 44 µs an access with the reclaim thread, 31 without; two processes 43 to 53 and 39 to 44).
//!
//! Both threads may serve at the same time: messages are read, and faults served, under the engine's lock.

use super::fault::Served;
use super::mapping::Mapping;
use super::owner::{Server, poll_in, spawn, wait};
use super::wire;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::time::{Duration, Instant};
use uzswap_sys::eventfd;
use uzswap_sys::thread::{self, Cpus};
use uzswap_sys::uffd::Uffd;

/// Time between two looks of the guard (milliseconds).
const LOOK_MS: i32 = 2;
/// After this many looks the guard decides whether the second thread is faster.
const TRIAL: u32 = 10;
/// After this many looks in succession with few faults the guard serves by itself again; and how many are few.
const QUIET: u32 = 25;
const FEW: u64 = 4;
/// Faults in succession over which the guard's own pace is measured.
const PACE: u32 = 64;
/// A longer gap between faults ends such a succession.
const RARE: Duration = Duration::from_millis(1);
/// How long the second thread is not tried again, at first and at most.
const HOLD: Duration = Duration::from_millis(100);
const HOLD_MOST: Duration = Duration::from_secs(10);
/// Faults between two checks where the program runs.
const EVERY: u64 = 256;

/// What the two threads of a mapping share.
struct Near {
    /// Whether the second thread serves.
    on: AtomicBool,
    /// Whether the second thread is to end.
    ended: AtomicBool,
    /// Faults that the second thread has served.
    served: AtomicU64,
    /// Whether a fault was read whose thread may not have been woken yet.
    owes: AtomicBool,
    /// Readable after a change of the first two.
    kick: OwnedFd,
    uffd: Arc<OwnedFd>,
    /// The guard's eventfd: see `Mapping::kick`.
    guard: Arc<OwnedFd>,
}

impl Near {
    fn uffd(&self) -> Uffd {
        Uffd::from_raw(self.uffd.as_raw_fd())
    }

    fn set(&self, flag: &AtomicBool, to: bool) {
        flag.store(to, SeqCst);
        eventfd::raise(self.kick.as_raw_fd());
    }
}

impl Server {
    /// The second thread.
    fn serve_near(&self, id: u64, near: &Near) {
        thread::keep_io_priority();
        thread::set_idle_policy(0, true);
        let mut cpu = None;
        loop {
            let mut polls = [poll_in(&near.kick), poll_in(&near.uffd)];
            let wanted = if near.on.load(SeqCst) { 2 } else { 1 };
            wait(&mut polls[..wanted], -1);
            if near.ended.load(SeqCst) || self.stopping.load(SeqCst) {
                return;
            }
            if polls[0].revents != 0 {
                eventfd::take(near.kick.as_raw_fd());
            }
            // It has slept. (While the program stays on this CPU, its next fault always finds this thread runnable.)
            let mut moved = true;
            while near.on.load(SeqCst) && self.serve_one(id, near, &mut cpu, moved) {
                moved = near.served.load(Relaxed).is_multiple_of(EVERY);
            }
        }
    }

    /// Serves a fault, if there is one; returns whether there was.
    fn serve_one(&self, id: u64, near: &Near, cpu: &mut Option<usize>, moved: bool) -> bool {
        self.held.reading();
        self.held.beside(wire::BEFORE_READING);
        let mut engine = self.engine();
        let Some(k) = engine.mappings.iter().position(|m| m.id == id) else { return false };
        near.owes.store(true, SeqCst);
        let next = engine.mappings[k].kept.pop_front();
        let Some(fault) = next.or_else(|| engine.next_fault(k)) else {
            near.owes.store(false, SeqCst);
            return false;
        };
        engine.mappings[k].put_off = Some(Vec::new());
        let served = engine.serve_waiting(k, fault);
        engine.counts.near_faults += 1;
        let m = &mut engine.mappings[k];
        let wakes = m.put_off.take().unwrap_or_default();
        let (lone, many, waits) = (m.lone_faulter(), m.many_fault(), !m.later.is_empty());
        drop(engine);
        if served == Served::Told {
            self.news.notify_all();
        }
        if waits {
            eventfd::raise(near.guard.as_raw_fd());
        }
        if let Some(tid) = lone.filter(|_| moved) {
            go_to(cpu, tid);
        }
        if many && !self.always_near.load(Relaxed) {
            near.set(&near.on, false);
            eventfd::raise(near.guard.as_raw_fd());
        }
        self.held.beside(wire::BEFORE_WAKING);
        near.served.fetch_add(1, Relaxed);
        for (at, len) in wakes {
            near.uffd().wake(at, len);
        }
        near.owes.store(false, SeqCst);
        true
    }
}

/// Moves the calling thread to the CPU of thread `tid`.
fn go_to(cpu: &mut Option<usize>, tid: u32) {
    let is = thread::cpu_of_any(tid);
    if is.is_some() && is != *cpu {
        *cpu = is;
        is.into_iter().for_each(|cpu| Cpus::only(cpu).confine(0));
    }
}

/// The state of a mapping's own thread as guard of the second one.
pub(super) struct Guard {
    near: Arc<Near>,
    /// Whether the second thread was started.
    started: bool,
    base: usize,
    len: usize,
    judge: Judge,
}

impl Guard {
    /// The guard of a mapping of `len` bytes, the page behind the region included.
    ///
    /// # Errors
    /// No descriptor is available.
    pub fn new(m: &Mapping, len: usize) -> io::Result<Self> {
        // SAFETY: just made, and owned by nobody.
        let kick = unsafe { OwnedFd::from_raw_fd(eventfd::create().map_err(io::Error::from_raw_os_error)?) };
        let near = Near {
            on: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            served: AtomicU64::new(0),
            owes: AtomicBool::new(false),
            kick,
            uffd: m.uffd.clone(),
            guard: m.kick.clone(),
        };
        Ok(Self { near: Arc::new(near), started: false, base: m.base, len, judge: Judge::new(Instant::now()) })
    }

    /// Whether the second thread is to serve.
    pub fn is_on(&self) -> bool {
        self.near.on.load(SeqCst)
    }

    /// How long the guard may wait (milliseconds) if it has something else to do after `timeout` (-1: never).
    pub fn patience(&self, timeout: i32) -> i32 {
        match timeout {
            _ if !self.is_on() => timeout,
            0.. => timeout.min(LOOK_MS),
            _ => LOOK_MS,
        }
    }

    /// Checks on the second thread; `readable`: a fault waits. Returns whether it goes on serving.
    pub fn look(&mut self, server: &Server, readable: bool) -> bool {
        if !self.is_on() {
            self.judge.end();
            return false;
        }
        let always = server.always_near.load(Relaxed);
        let owes = self.near.owes.load(SeqCst);
        let stays = self.judge.look(Instant::now(), self.near.served.load(SeqCst), readable || owes);
        if stays == Stays::Starved || (stays == Stays::No && !always) {
            self.near.set(&self.near.on, false);
            self.judge.end();
            // Wakes threads that it has served and not woken; a thread that has not been served faults again.
            self.near.uffd().wake(self.base, self.len);
        }
        self.is_on()
    }

    /// The guard has served `served` faults: lets the second thread serve from now on if that may be faster.
    pub fn consider(&mut self, server: &Arc<Server>, id: u64, served: u32) {
        let always = served > 0 && server.always_near.load(Relaxed);
        let lone = || server.engine().mapping(id).is_some_and(|m| m.lone_faulter().is_some());
        if !(self.judge.served(Instant::now(), served) && lone() || always) {
            return;
        }
        if !self.started {
            let (server, near) = (server.clone(), self.near.clone());
            self.started = spawn("uzswap-near", move || server.serve_near(id, &near)).is_ok();
        }
        if self.started {
            self.judge.begin(Instant::now(), self.near.served.load(SeqCst));
            self.near.set(&self.near.on, true);
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.near.set(&self.near.ended, true);
    }
}

/// Decides which of the two threads serves.
struct Judge {
    stage: Stage,
    /// Time per fault when the guard serves, including what the program does before the next one.
    pace: Duration,
    /// The second thread must not serve before this time; and how long that break was.
    not_before: Instant,
    hold: Duration,
}

enum Stage {
    /// The guard serves: since when, how many faults, and the time of the last one.
    Own { since: Instant, count: u32, last: Instant },
    /// The second thread serves.
    Near {
        since: Instant,
        /// Faults it had served when it began, and at the last look.
        from: u64,
        seen: u64,
        looks: u32,
        /// Whether a fault was waiting for it at the last look.
        late: bool,
        /// Looks in succession with few faults.
        quiet: u32,
    },
}

/// Whether the second thread goes on serving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stays {
    Yes,
    /// It is no faster, or there is nothing to do.
    No,
    /// It makes no progress.
    Starved,
}

impl Judge {
    fn new(now: Instant) -> Self {
        let stage = Stage::Own { since: now, count: 0, last: now };
        Self { stage, pace: Duration::ZERO, not_before: now, hold: HOLD }
    }

    /// The guard has served `faults` faults; returns whether the second thread may be tried.
    fn served(&mut self, now: Instant, faults: u32) -> bool {
        let Stage::Own { since, count, last } = &mut self.stage else { return false };
        if faults == 0 {
            return false;
        }
        if now - core::mem::replace(last, now) > RARE {
            // Counting this gap in would make the guard seem slower than it is.
            (*since, *count) = (now, 0);
            return false;
        }
        *count += faults;
        if *count < PACE {
            return false;
        }
        self.pace = (now - *since) / *count;
        (*since, *count) = (now, 0);
        now >= self.not_before
    }

    /// The second thread begins; it has served `served` faults so far.
    fn begin(&mut self, now: Instant, served: u64) {
        self.stage = Stage::Near { since: now, from: served, seen: served, looks: 0, late: false, quiet: 0 };
    }

    /// The guard serves again.
    fn end(&mut self) {
        if let Stage::Near { since, .. } = self.stage {
            self.stage = Stage::Own { since, count: 0, last: since };
        }
    }

    /// A look at the second thread: it has served `served` faults so far, and `waits` says that a fault waits.
    fn look(&mut self, now: Instant, served: u64, waits: bool) -> Stays {
        let Stage::Near { since, from, seen, looks, late, quiet } = &mut self.stage else { return Stays::No };
        let new = served - core::mem::replace(seen, served);
        *looks += 1;
        *quiet = if new < FEW { *quiet + 1 } else { 0 };
        if core::mem::replace(late, waits && new == 0) && *late {
            self.put_off(now);
            return Stays::Starved;
        }
        if *looks == TRIAL {
            let faults = u32::try_from(served - *from).unwrap_or(u32::MAX);
            if faults == 0 || (now - *since) / faults > self.pace {
                self.put_off(now);
                return Stays::No;
            }
            self.hold = (self.hold / 2).max(HOLD);
        }
        if *quiet == QUIET { Stays::No } else { Stays::Yes }
    }

    fn put_off(&mut self, now: Instant) {
        self.not_before = now + self.hold;
        self.hold = (self.hold * 2).min(HOLD_MOST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);
    const LOOK: Duration = Duration::from_millis(LOOK_MS as u64);

    /// A judge that has just handed over, after faults of 70 µs; and the time.
    fn begun() -> (Judge, Instant) {
        let mut now = Instant::now();
        let mut judge = Judge::new(now);
        for i in 1..=PACE {
            now += 70 * US;
            assert_eq!(judge.served(now, 1), i == PACE);
        }
        judge.begin(now, 0);
        (judge, now)
    }

    /// Lets it look a number of times, with `faults` served between looks; returns the last verdict.
    fn looks(judge: &mut Judge, now: &mut Instant, faults: u64, waits: bool, looks: u32) -> Stays {
        let Stage::Near { mut seen, .. } = judge.stage else { panic!() };
        for i in 1..=looks {
            *now += LOOK;
            seen += faults;
            let stays = judge.look(*now, seen, waits);
            assert!(i == looks || stays == Stays::Yes, "look {i} of {looks}");
            if i == looks {
                return stays;
            }
        }
        Stays::Yes
    }

    #[test]
    fn who_is_faster_stays() {
        let (mut judge, mut now) = begun();
        assert_eq!(looks(&mut judge, &mut now, 150, true, 1000), Stays::Yes);
        assert_eq!(judge.hold, HOLD);
    }

    #[test]
    fn who_is_slower_is_not_tried_for_longer_each_time() {
        let (mut judge, mut now) = begun();
        let mut hold = HOLD;
        for _ in 0..10 {
            assert_eq!(looks(&mut judge, &mut now, 20, false, TRIAL), Stays::No);
            judge.end();
            let mut faults = 0;
            let since = now;
            loop {
                now += 70 * US;
                faults += 1;
                if judge.served(now, 1) {
                    break;
                }
            }
            assert!(now - since >= hold && now - since < hold + 2 * PACE * 70 * US, "{faults}");
            hold = (hold * 2).min(HOLD_MOST);
            judge.begin(now, 0);
        }
        assert_eq!(hold, HOLD_MOST);
    }

    #[test]
    fn who_keeps_somebody_waiting_for_two_looks_is_starved() {
        let (mut judge, mut now) = begun();
        assert_eq!(looks(&mut judge, &mut now, 1, true, 3), Stays::Yes, "it gets on");
        assert_eq!(looks(&mut judge, &mut now, 0, false, 2), Stays::Yes, "nobody waits");
        assert_eq!(looks(&mut judge, &mut now, 0, true, 2), Stays::Starved);
    }

    #[test]
    fn where_few_faults_come_the_guard_serves() {
        let (mut judge, mut now) = begun();
        assert_eq!(looks(&mut judge, &mut now, 150, false, TRIAL), Stays::Yes);
        assert_eq!(looks(&mut judge, &mut now, FEW - 1, false, QUIET), Stays::No);
        assert!(judge.not_before <= now, "and it may be tried at once");
    }

    #[test]
    fn a_pause_is_not_taken_for_the_guards_pace() {
        let mut now = Instant::now();
        let mut judge = Judge::new(now);
        for i in 0..10 * PACE {
            now += if i % PACE == PACE / 2 { 2 * RARE } else { 5 * US };
            if judge.served(now, 1) {
                assert_eq!(judge.pace, 5 * US);
            }
        }
    }
}

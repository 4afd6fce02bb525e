//! Serving a mapping's faults beside the thread that faults.
//!
//! On a machine that is idle besides, a fault that a thread on another CPU serves wakes two CPUs from their sleep, first the one where it
//! is served, then that of the thread that waits: 73 µs on the machine this was built on, of which serving takes 4. So where one
//! thread faults again and again another one serves it *on its own CPU*, at idle policy, as `handler` does for private memory (there is
//! why: a CPU that runs only idle-policy threads counts as idle, so who is woken goes on right there): 11 µs.
//!
//! An idle-policy thread gets next to nothing of a CPU that others want. Three rules make up for that.
//!
//! 1. It wakes nobody with the engine's lock held: the program would take the CPU from it in the call, and everybody else would wait
//!    for the lock as long as the program computes. The wakes are put off until the lock is given up (`Mapping::put_off`).
//! 2. The mapping's own thread, of normal policy, is its *guard*: while the other serves, it looks every [`LOOK_MS`] whether a fault
//!    waits that was not read, or was read and its thread not woken, at two looks in succession. Then it wakes all who wait (who faults
//!    again is served again), and serves by itself for some time.
//! 3. Where it is not faster than the guard was just before, it is not used for some time either: on a machine that has much to do no
//!    CPU sleeps, and the guard's way costs 5 µs.
//!
//! Who is preempted with the lock held, by what else runs on that CPU, keeps others waiting until the scheduler gives even an idle-policy
//! thread a moment: some milliseconds, once, as its guard then serves.
//!
//! It makes room for its faults by itself, and leaves the reclaim thread asleep: that one would work on another CPU, and each of them
//! would wait for the other's lock, and wake it from sleep, time and again (random reads and writes of 256 MiB in 96, one process: 44 µs
//! an access with the reclaim thread, 31 without; two processes 43 to 53 and 39 to 44).
//!
//! Both threads may serve at a time: messages are read, and faults served, under the engine's lock.

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

/// Between two looks of the guard (milliseconds).
const LOOK_MS: i32 = 2;
/// Looks after which it is decided whether it is faster so.
const TRIAL: u32 = 10;
/// Looks in succession with few faults, after which the guard serves by itself again; and how many are few.
const QUIET: u32 = 25;
const FEW: u64 = 4;
/// Faults in succession that the guard's own pace is taken from.
const PACE: u32 = 64;
/// Faults that are longer apart are not of one such succession.
const RARE: Duration = Duration::from_millis(1);
/// For how long it is not tried again, the first time and at most.
const HOLD: Duration = Duration::from_millis(100);
const HOLD_MOST: Duration = Duration::from_secs(10);
/// Faults between two looks at where the program is.
const EVERY: u64 = 256;

/// What the two threads of a mapping share.
struct Near {
    /// Whether faults are served beside who faults.
    on: AtomicBool,
    /// Whether the thread is to end.
    ended: AtomicBool,
    /// Faults that were served so.
    served: AtomicU64,
    /// A fault was read whose thread may not have been woken.
    owes: AtomicBool,
    /// Readable after a change of the first two.
    kick: OwnedFd,
    uffd: Arc<OwnedFd>,
    /// The guard's: see `Mapping::kick`.
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
    /// The thread.
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
            // It slept: while the program stays on this CPU the next fault always finds this thread runnable.
            let mut moved = true;
            while near.on.load(SeqCst) && self.serve_one(id, near, &mut cpu, moved) {
                moved = near.served.load(Relaxed).is_multiple_of(EVERY);
            }
        }
    }

    /// Serves a fault, if there is one; whether there was.
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

/// Has the calling thread go where thread `tid` is.
fn go_to(cpu: &mut Option<usize>, tid: u32) {
    let is = thread::cpu_of_any(tid);
    if is.is_some() && is != *cpu {
        *cpu = is;
        is.into_iter().for_each(|cpu| Cpus::only(cpu).confine(0));
    }
}

/// The mapping's own thread, as far as it has to do with the other.
pub(super) struct Guard {
    near: Arc<Near>,
    /// Whether the other was started.
    started: bool,
    base: usize,
    len: usize,
    judge: Judge,
}

impl Guard {
    /// That of a mapping of so many bytes, the page behind the region included.
    ///
    /// # Errors
    /// There is no descriptor to be had.
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

    /// Whether the other is to serve.
    pub fn is_on(&self) -> bool {
        self.near.on.load(SeqCst)
    }

    /// How long may be waited (milliseconds) by who has to do something else after `timeout` (-1: never).
    pub fn patience(&self, timeout: i32) -> i32 {
        match timeout {
            _ if !self.is_on() => timeout,
            0.. => timeout.min(LOOK_MS),
            _ => LOOK_MS,
        }
    }

    /// Looks after the other; `readable`: a fault waits. Whether it goes on.
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
            // Whoever it has served and not woken; who has not been served faults again.
            self.near.uffd().wake(self.base, self.len);
        }
        self.is_on()
    }

    /// This thread has served so many faults: has the other serve those to come where that may be faster.
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

/// Who decides which of the two serves.
struct Judge {
    stage: Stage,
    /// What a fault takes that the guard serves, and what the program does before the next.
    pace: Duration,
    /// The other is not to serve before, and for how long that was.
    not_before: Instant,
    hold: Duration,
}

enum Stage {
    /// The guard serves: since when, how many, and when the last.
    Own { since: Instant, count: u32, last: Instant },
    /// The other does.
    Near {
        since: Instant,
        /// What it had served then, and at the last look.
        from: u64,
        seen: u64,
        looks: u32,
        /// Whether somebody waited for it at the last look.
        late: bool,
        /// Looks in succession with few faults.
        quiet: u32,
    },
}

/// Whether the other goes on serving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stays {
    Yes,
    /// It is no better, or there is nothing to do.
    No,
    /// It does not get on.
    Starved,
}

impl Judge {
    fn new(now: Instant) -> Self {
        let stage = Stage::Own { since: now, count: 0, last: now };
        Self { stage, pace: Duration::ZERO, not_before: now, hold: HOLD }
    }

    /// The guard has served so many; whether the other may be tried.
    fn served(&mut self, now: Instant, faults: u32) -> bool {
        let Stage::Own { since, count, last } = &mut self.stage else { return false };
        if faults == 0 {
            return false;
        }
        if now - core::mem::replace(last, now) > RARE {
            // (It would seem slower than it is.)
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

    /// The other begins, having served `served` all its life.
    fn begin(&mut self, now: Instant, served: u64) {
        self.stage = Stage::Near { since: now, from: served, seen: served, looks: 0, late: false, quiet: 0 };
    }

    /// The guard serves again.
    fn end(&mut self) {
        if let Stage::Near { since, .. } = self.stage {
            self.stage = Stage::Own { since, count: 0, last: since };
        }
    }

    /// A look: the other has served `served` all its life, and somebody `waits`.
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

    /// A judge at a time of which the other was just given the duty, after faults of 70 µs.
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

    /// Looks at one that serves so many between two; returns what is said to the last.
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

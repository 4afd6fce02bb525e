//! The ticker: the helper thread that runs from the start.
//!
//! It sleeps until the process has used some CPU time (a POSIX timer on the process's CPU clock, so an idle program costs
//! nothing), then reads RssAnon. Far below the limit that is all that ever happens: nothing is registered, and no fault is
//! slower. Near the limit the process *engages*: memory is registered, and the handler and the reclaim thread start. From then on
//! the ticker looks for memory that is resident but unknown, and makes sure that the handler, which has idle policy, is not
//! starved.
//!
//! It has a descriptor table of its own (shared with the other helpers), so the program can neither see nor close the
//! userfaultfd, and the helpers hold none of the program's pipes open.

use crate::discover::Scans;
use crate::discover::engage::engage_threshold;
use crate::fault::watch::Watch;
use crate::frames::arena::PAGE;
use crate::group::member::SIGNAL;
use crate::group::{bytes_in, unmanaged};
use crate::inject::Site;
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_sys::lock::Guard;
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::{lock, sys, thread};

/// How fast a program may fill memory (bytes per second of CPU time). This bounds what can happen unseen between two looks.
const FASTEST_FILL: usize = 3 << 30;
/// How often the ticker looks after the handler (nanoseconds).
pub(crate) const LOOK_NS: u64 = 16_000_000;
/// How often the unevictable list, and a little of what did not compress, is tried again while memory is short (nanoseconds).
const RESCUE_NS: u64 = 500_000_000;
/// How many times the unevictable list is skipped while the limit is not exceeded: each page may take a call to try.
///
/// The story: tables became read-only when all other memory had been squeezed to a few MiB. That kept the limit, so the tables
/// stayed, and the program did nothing but fault.
const RESCUE_PUT_OFF: u32 = 4;
/// When to try a scan again that mapping calls under way did not let through (nanoseconds).
const SCAN_AGAIN_NS: u64 = 500_000;

/// The stack of helper `n`: 0 ticker, 1 handler, 2 reclaim, 3 the writer of the swap file, from 4 on the compressing helpers,
/// from 7 on the readers of the swap file, 11 a handler that relieved another, 12 the second writer of the swap file, 13 a thread
/// that opens a file for the program's.
fn stack(pager: &Pager, n: usize) -> usize {
    pager.layout.stacks + n * (thread::STACK_BYTES + PAGE)
}

impl Pager {
    /// Starts the ticker; `entry` is [`start`] or [`start_in_child`].
    ///
    /// # Errors
    /// `clone`'s.
    pub fn spawn_ticker(&'static self, entry: extern "C" fn(usize) -> !) -> Result<(), Errno> {
        // In a forked child the stack's former user does not exist.
        let tid = self.spawn_on(0, true, entry)?;
        self.ticker.store(tid, Release);
        self.me().ticker.store(tid as u32, Release);
        self.row_has_ticker(tid);
        Ok(())
    }

    /// Starts a thread on stack `n`, which must not be in use; with `own_files`, with a descriptor table of its own. `entry` gets
    /// the pager's address.
    ///
    /// # Errors
    /// `clone`'s; `ENOTSUP`: this is a region's pager, whose threads are the region's.
    pub(crate) fn spawn_on(&self, n: usize, own_files: bool, entry: extern "C" fn(usize) -> !) -> Result<i32, Errno> {
        // SAFETY: the entries get the pager's address, and a process's pager is never freed.
        unsafe { self.spawn_for(n, own_files, entry, core::ptr::from_ref(self) as usize) }
    }

    /// The same, but `entry` gets `arg`.
    ///
    /// # Errors
    /// As above.
    ///
    /// # Safety
    /// `arg` must be what `entry` expects, for as long as the thread runs.
    pub(crate) unsafe fn spawn_for(
        &self,
        n: usize,
        own_files: bool,
        entry: extern "C" fn(usize) -> !,
        arg: usize,
    ) -> Result<i32, Errno> {
        if self.own_frames {
            return Err(libc::ENOTSUP);
        }
        if self.inject(Site::Thread).is_some() {
            return Err(libc::EAGAIN);
        }
        // SAFETY: the stack is ours and unused; the entries never return, and get what the caller promises.
        unsafe { thread::spawn(stack(self, n), own_files, entry, arg) }
    }

    /// Makes the ticker look now.
    pub fn poke_ticker(&self) {
        // The ticker is a thread of ours that waits for this signal.
        thread::kill_thread(thread::getpid(), self.ticker.load(Acquire), SIGNAL);
    }

    fn open_own_files(&self) {
        // SAFETY: this thread's table is a copy that nobody else uses.
        let _ = unsafe { sys!(libc::SYS_close_range, 0, u32::MAX, 0) };
        let _ = raw::open(b"/dev/null\0", libc::O_RDWR);
        self.files.statm.store(raw::open(b"/proc/thread-self/statm\0", libc::O_RDONLY).unwrap_or(-1), Release);
        self.files.rollup.store(raw::open(b"/proc/thread-self/smaps_rollup\0", libc::O_RDONLY).unwrap_or(-1), Release);
        if self.files.statm.load(Relaxed) < 0 && self.group.warns_first(unmanaged::REFUSED) {
            self.say(b"uzswap: memory cannot be managed in this process (there is no /proc in its root directory); it runs without a limit\n");
        }
        self.open_swap_file();
    }

    fn ticker_loop(&'static self) -> ! {
        let timer = Timer::new();
        let set = 1u64 << (SIGNAL - 1);
        // SAFETY: a signal set of 8 bytes, ours. (The descriptor is in the ticker's own table.)
        let signals = unsafe { sys!(libc::SYS_signalfd4, -1isize, &raw const set, 8, libc::SFD_CLOEXEC) };
        self.files.signals.store(signals.map_or(-1, |fd| fd as i32), Release);
        let mut scans = Scans::default();
        let mut watch = Watch::default();
        loop {
            if self.lets_go() {
                scans.set_held_up(&self.calls, false);
                self.let_go_now();
            }
            self.change_ticker();
            self.cede_asked(|| watch.look_after_handler(self));
            // This look does not serve requests made from now on: it may be past what they are about.
            let ticket = self.growth.looks_wanted.load(Acquire);
            let wanted = ticket != self.growth.looks_done.load(Relaxed);
            let Some(mut nap) = self.look(&mut scans, wanted, &mut watch) else {
                thread::sleep_ns(SCAN_AGAIN_NS);
                watch.look_after_handler(self);
                continue;
            };
            scans.set_held_up(&self.calls, false);
            self.growth.looked(ticket);
            if self.signs.watched.load(Relaxed) {
                nap = nap.min(LOOK_NS);
            }
            timer.arm(nap);
            if self.signs.watched.load(Relaxed) {
                thread::take_signal(SIGNAL, Some(LOOK_NS))
            } else {
                self.wait_unwatched()
            }
            watch.look_after_handler(self);
            self.cover_lost();
            self.look_for_stalls();
        }
    }

    /// Waits for a signal, for a fault, or until a transfer under way will have taken very long. A fault: while nobody looks
    /// after the handler, one may come when other programs have all of the CPU, and a program that waits for it uses no CPU time,
    /// which would wake the ticker. (So programs that had not faulted for a while stood still for seconds, beside two that
    /// compute.) A transfer: nobody else would report a disk that stands still.
    fn wait_unwatched(&self) {
        let signals = self.files.signals.load(Relaxed);
        if signals < 0 || self.uffd.load(Relaxed) < 0 {
            return thread::take_signal(SIGNAL, None);
        }
        let ms = self.until_stall_ns().map_or(-1, |ns| ns.div_ceil(1_000_000) as i32);
        self.uffd().wait_or([signals, -1], ms);
        if self.uffd().wait(0) {
            self.signs.watched.store(true, SeqCst);
        }
        thread::take_signal(SIGNAL, Some(0));
    }

    /// Reads where the process stands, and engages or scans when it is time (a scan is made if `wanted`). Returns the CPU time
    /// until the next look (nanoseconds); None when a scan could not be made or shared memory not be protected now, or when what
    /// keeps memory from being managed may pass.
    fn look(&'static self, scans: &mut Scans, wanted: bool, watch: &mut Watch) -> Option<u64> {
        let before = self.me().rss.load(Relaxed) as usize;
        // First, as this look may not see what is mapped from now on.
        self.growth.mapped.store(0, Relaxed);
        let rss = self.read_rss();
        if !self.engaged.load(Acquire) {
            self.raise_peaks(rss, rss, 0);
            let (room, until_look) = self.headroom(rss, bytes_in(&self.me().planned) as usize, engage_threshold);
            self.growth.room.store(room, Relaxed);
            // Memory that a request wants paged out must be managed first, however far the limit is.
            if room == 0 || self.is_asked() {
                return self.begin_to_manage(scans);
            }
            self.forget_plans(rss.saturating_sub(before));
            let ns = until_look as u128 * 1_000_000_000 / FASTEST_FILL as u128;
            return Some((ns.min(u128::from(u64::MAX >> 1)) as u64).max(1_000_000));
        }
        // Read again, under the lock: faults served while this thread waited for the lock, or for a CPU, are counted then.
        let mut s = self.lock_and_lift(watch);
        let mut held_up = !self.protect_now(&s);
        if held_up {
            drop(s);
            held_up = !self.protect_between_calls();
            s = self.lock_and_lift(watch);
        }
        let rss = self.read_rss();
        s.rss = rss;
        let unknown = rss.saturating_sub(s.known_bytes());
        let due = scans.are_due(unknown, self.share(), thread::now_ns());
        let mut whole = false;
        if due || wanted {
            drop(s);
            let begun = thread::now_ns();
            let made = if due { self.scan_between_calls().then_some(true) } else { self.scan_noted_between_calls() };
            scans.set_held_up(&self.calls, made.is_none());
            whole = made?;
            s = self.lock_and_lift(watch);
            if whole {
                scans.note(begun, thread::now_ns());
                scans.unknown_before = rss.saturating_sub(s.known_bytes());
            }
        }
        if !whole {
            scans.unknown_before = unknown.min(scans.unknown_before);
        }
        self.publish(&s);
        self.start_wanted_helpers(&s);
        let excess = self.excess(&s);
        let wanted = self.reclaimer_is_wanted(&s, excess);
        s.placement.look(self.reclaimer.load(Relaxed), wanted);
        let over = excess > 0 || (!self.handler_reclaims(&s) && excess + self.margin() as isize > 0);
        let short = excess + 2 * self.margin() as isize > 0;
        if short && thread::now_ns() - s.rescued_ns > RESCUE_NS {
            s.rescued_ns = thread::now_ns();
            self.try_incompressible(&mut s);
            s.put_off += 1;
            if over || s.put_off >= RESCUE_PUT_OFF {
                s.put_off = 0;
                s.leaving.refill();
                s.lru.rescue();
            }
        }
        let relocated = short && self.has_relocated(&s);
        drop(s);
        if relocated {
            self.take_over_relocated();
        }
        if over {
            self.wake_reclaim();
        }
        (!held_up).then_some(8_000_000)
    }

    /// Takes the lock. If that takes long, its holder may be the reclaim thread, at idle policy and waiting for a CPU while
    /// everybody waits for it: then makes that thread a normal one.
    ///
    /// The story: the reclaim thread served a request while the program faulted on the same CPU, beside others that computed. The
    /// program waited for the handler, the handler for the lock, and so did the ticker: for more than five seconds.
    fn lock_and_lift(&self, watch: &mut Watch) -> Guard<'_, State> {
        let mut lifted = None;
        loop {
            if let Some(mut s) = self.state.lock_within(LOOK_NS) {
                if let Some(reclaimer) = lifted {
                    s.placement.set_free_others(reclaimer);
                }
                return s;
            }
            let reclaimer = self.reclaimer.load(Relaxed);
            thread::set_idle_policy(reclaimer, false);
            lifted = Some(reclaimer);
            watch.look_after_handler(self);
        }
    }
}

pub(crate) fn pager(arg: usize) -> &'static Pager {
    // SAFETY: the argument is the leaked pager that started the thread.
    unsafe { &*(arg as *const Pager) }
}

/// The body of the ticker.
pub extern "C" fn start(arg: usize) -> ! {
    let p = pager(arg);
    // The threads that it starts inherit this.
    thread::wake_soon();
    p.open_own_files();
    p.ticker_loop()
}

/// The body of the ticker in a forked child whose parent was engaged.
pub extern "C" fn start_in_child(arg: usize) -> ! {
    let p = pager(arg);
    thread::wake_soon();
    p.open_own_files();
    let ok = p.rearm().is_ok();
    p.ready.store(if ok { 1 } else { 2 }, Release);
    lock::futex_wake(&p.ready, 1, false);
    if !ok {
        thread::exit();
    }
    p.ticker_loop()
}

struct Timer(i32);

impl Timer {
    fn new() -> Self {
        let mut id = 0i32;
        // struct sigevent: value, signo, notify = SIGEV_THREAD_ID (4), tid.
        let mut event = [0i32; 16];
        (event[2], event[3], event[4]) = (SIGNAL, 4, thread::gettid());
        // SAFETY: 64 bytes of sigevent and an int, ours.
        let made = unsafe { sys!(libc::SYS_timer_create, libc::CLOCK_PROCESS_CPUTIME_ID, event.as_ptr(), &raw mut id) };
        Self(if made.is_ok() { id } else { -1 })
    }

    fn arm(&self, ns: u64) {
        let ns = ns.min(3_600_000_000_000);
        let spec = [0i64, 0, (ns / 1_000_000_000) as i64, (ns % 1_000_000_000) as i64];
        // SAFETY: an itimerspec of ours.
        let _ = unsafe { sys!(libc::SYS_timer_settime, self.0, 0, spec.as_ptr(), 0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::swap::io::READ;
    use crate::testing;
    use std::sync::mpsc;
    use std::time::Duration;
    use uzswap_sys::eventfd;

    /// The story: a disk stood still while a program's only thread waited for it. After half a second nobody looked after the
    /// handler, which had nothing to do, and the ticker slept until the program would have used some CPU time: nobody reported
    /// the disk.
    #[test]
    fn a_disk_that_stands_still_wakes_the_ticker() {
        let p = testing::pager_with_swap(8 << 20);
        // No signal comes.
        p.files.signals.store(eventfd::create().unwrap(), Relaxed);
        p.group.faults.set("swap_stall=1/1", 0).unwrap();
        let (say, said) = mpsc::channel();
        p.tier.began[READ].store(thread::now_ns(), Relaxed);
        std::thread::spawn(move || {
            p.wait_unwatched();
            p.look_for_stalls();
            say.send(p.counters().swap_stalls.load(Relaxed)).unwrap();
            // Reported once, it wakes nobody again; another one is counted.
            p.look_for_stalls();
            let told = p.until_stall_ns().is_none();
            p.tier.began[READ].store(1, Relaxed);
            p.look_for_stalls();
            say.send(p.counters().swap_stalls.load(Relaxed) * u64::from(told)).unwrap();
        });
        let next = || said.recv_timeout(Duration::from_secs(60)).expect("the ticker wakes");
        assert_eq!((next(), next()), (1, 2));
    }
}

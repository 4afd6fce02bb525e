//! The ticker: the thread that is there from the start.
//!
//! It sleeps until the process has used some CPU time (a POSIX timer on the process's CPU clock: an idle program costs
//! nothing), then reads RssAnon. Far below the limit that is all that ever happens: nothing is registered, no fault is
//! slower. Near it the process *engages*: memory is registered, the handler and the reclaim thread start. From then on
//! the ticker looks for memory that is resident but unknown, and sees to it that the handler, which runs at idle
//! priority, is not starved.
//!
//! It owns a descriptor table of its own (shared with the other helpers), so the program can neither see nor close the
//! userfaultfd, and the helpers hold none of the program's pipes open.

use crate::arena::PAGE;
use crate::discover::Scans;
use crate::events::forget_all;
use crate::group::unmanaged;
use crate::inject::Site;
use crate::mapfile::{Kind, MapFile};
use crate::member::SIGNAL;
use crate::pager::Pager;
use crate::state::State;
use crate::watch::Watch;
use core::sync::atomic::Ordering::*;
use uzswap_mm::pagetable::ADDRESS_SPACE_PAGES;
use uzswap_sys::lock::Guard;
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::uffd::Uffd;
use uzswap_sys::{lock, sys, thread};

/// How fast a program may fill memory: bounds what can happen unseen between two looks (bytes per second of CPU).
const FASTEST_FILL: usize = 3 << 30;
/// How often the ticker looks after the handler.
pub(crate) const LOOK_NS: u64 = 16_000_000;
/// How often what was unevictable, and a little of what did not compress, is tried again while memory is short.
const RESCUE_NS: u64 = 500_000_000;
/// How many times that is put off where the limit is not exceeded, for what is unevictable: each page may take a call to be tried.
///
/// The story: tables became read-only when what else there was had been squeezed to a few MiB. With that the limit was kept, so they
/// stayed, and the program did nothing but fault.
const RESCUE_PUT_OFF: u32 = 4;
/// For how long it is not tried again to have memory managed where that could not be, whoever asks for it: each time all of it is
/// registered.
const ENGAGE_AGAIN_NS: u64 = 100_000_000;
/// The same where what refused it may have passed by then, and how often that is believed.
const ENGAGE_SOON_NS: u64 = 10_000_000;
const REFUSED_OFTEN: u32 = 3;
/// When a scan is tried again that mapping calls under way did not let through.
const SCAN_AGAIN_NS: u64 = 500_000;

/// Stack of helper `n`: 0 ticker, 1 handler, 2 reclaim, 3 the writer of the swap file, from 4 on those that compress, from 7
/// on those that read the swap file, 11 a handler that relieved another.
pub fn stack(pager: &Pager, n: usize) -> usize {
    pager.layout.stacks + n * (thread::STACK_BYTES + PAGE)
}

impl Pager {
    /// Starts the ticker; `entry` is [`start`] or [`start_in_child`].
    ///
    /// # Errors
    /// `clone`'s.
    pub fn spawn_ticker(&'static self, entry: extern "C" fn(usize) -> !) -> Result<(), Errno> {
        // (In a forked child the stack's former user does not exist.)
        let tid = self.spawn_on(0, true, entry)?;
        self.ticker.store(tid, Release);
        self.me().ticker.store(tid as u32, Release);
        self.row_has_ticker(tid);
        Ok(())
    }

    /// Starts a thread on the stack of this number, which nobody is on; with `own_files`, with a descriptor table of its own.
    fn spawn_on(&'static self, n: usize, own_files: bool, entry: extern "C" fn(usize) -> !) -> Result<i32, Errno> {
        if self.inject(Site::Thread).is_some() {
            return Err(libc::EAGAIN);
        }
        // SAFETY: the stack is ours and unused; the entries never return.
        unsafe { thread::spawn(stack(self, n), own_files, entry, core::ptr::from_ref(self) as usize) }
    }

    /// Makes the ticker look now.
    pub fn poke_ticker(&self) {
        // (It is a thread of ours, which waits for it.)
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

    /// Opens the userfaultfd, and what says how this process's memory is mapped (a forked child's is another): all of it or nothing.
    pub(crate) fn open_uffd(&self) -> Result<(), Errno> {
        let mut opened = [Uffd::open(self.features())?.0.fd(), -1, -1];
        for (i, path) in [(1, &b"/proc/thread-self/pagemap\0"[..]), (2, b"/proc/thread-self/maps\0")] {
            let fd = raw::open(path, libc::O_RDONLY);
            opened[i] = fd.inspect_err(|_| opened[..i].iter().for_each(|fd| raw::close(*fd)))?;
        }
        for (file, fd) in [&self.uffd, &self.files.pagemap, &self.files.maps].into_iter().zip(opened) {
            file.store(fd, Release);
        }
        Ok(())
    }

    /// Closes that again.
    ///
    /// The story: of what says how memory is mapped nothing was closed. A process that could have no more threads for a minute had no
    /// descriptors left then, and its memory could not be managed when there were threads again.
    fn close_uffd(&self) {
        for file in [&self.uffd, &self.files.pagemap, &self.files.maps] {
            raw::close(file.swap(-1, AcqRel));
        }
    }

    fn ticker_loop(&'static self) -> ! {
        let timer = Timer::new();
        let set = 1u64 << (SIGNAL - 1);
        // SAFETY: a signal set of 8 bytes, ours. (In the ticker's own table.)
        let signals = unsafe { sys!(libc::SYS_signalfd4, -1isize, &raw const set, 8, libc::SFD_CLOEXEC) };
        self.files.signals.store(signals.map_or(-1, |fd| fd as i32), Release);
        thread::wake_soon();
        let mut scans = Scans::default();
        let mut watch = Watch::default();
        loop {
            if self.lets_go() {
                self.let_go_now();
            }
            self.change_ticker();
            self.cede_asked(|| watch.look_after_handler(self));
            // Requests made from now on are not served by this look: it may be past what they are about.
            let ticket = self.growth.looks_wanted.load(Acquire);
            let wanted = ticket != self.growth.looks_done.load(Relaxed);
            let Some(mut nap) = self.look(&mut scans, wanted, &mut watch) else {
                thread::sleep_ns(SCAN_AGAIN_NS);
                watch.look_after_handler(self);
                continue;
            };
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

    /// Waits for a signal, or a fault: while nobody looks after the handler it may come when other programs have all of the CPU,
    /// and a program that waits for it uses no CPU time, by which the ticker would be woken. (So each one stood still for seconds
    /// that had not faulted for a while, beside two that compute.) Or until a transfer that is under way will have taken very long:
    /// of a disk that stands still nobody else would tell.
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

    /// Reads where the process stands, engages or scans when it is time (a scan is made when `wanted`); returns the CPU
    /// time until the next look; None when a scan could not be made now.
    fn look(&'static self, scans: &mut Scans, wanted: bool, watch: &mut Watch) -> Option<u64> {
        let before = self.me().rss.load(Relaxed) as usize;
        // (First: what is mapped from now on may not be seen.)
        self.growth.mapped.store(0, Relaxed);
        let rss = self.read_rss();
        if !self.engaged.load(Acquire) {
            self.raise_peaks(rss, rss, 0);
            // (Alone it looks often enough; others may fill theirs meanwhile.)
            let left = if self.others_count() > 0 { self.me().planned.load(Relaxed) as usize } else { 0 };
            let planned = self.growth.planned.swap(0, Relaxed).max(left);
            let (room, until_look) = self.headroom(rss, planned, engage_threshold);
            self.growth.room.store(room, Relaxed);
            // (What is to be put out on request must be managed first, however far the limit is.)
            if room == 0 || self.is_asked() {
                return Some(self.begin_to_manage(scans));
            }
            self.forget_plans(rss.saturating_sub(before));
            let ns = until_look as u128 * 1_000_000_000 / FASTEST_FILL as u128;
            return Some((ns.min(u128::from(u64::MAX >> 1)) as u64).max(1_000_000));
        }
        // (Read again, under the lock: faults served while this thread waited for it, or for a CPU, were counted.)
        let mut s = self.lock_and_lift(watch);
        let rss = self.read_rss();
        s.rss = rss;
        let unknown = rss.saturating_sub(s.known_bytes());
        let due = scans.are_due(unknown, self.share(), thread::now_ns());
        let mut whole = false;
        if due || wanted {
            drop(s);
            let begun = thread::now_ns();
            whole = if due { self.scan_between_calls().then_some(true) } else { self.scan_noted_between_calls() }?;
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
        Some(8_000_000)
    }

    /// Engages, where that can be; returns the CPU time until the next look.
    fn begin_to_manage(&'static self, scans: &mut Scans) -> u64 {
        let now = thread::now_ns();
        // (None: it was refused a little ago.)
        let engaged = if now >= scans.engage_from { self.engage().map_err(Some) } else { Err(None) };
        match engaged {
            Ok(()) => {
                self.forget_plans(0);
                // What made it tight for this one may do so for others, which fill what they mapped before.
                self.rally();
                return 1_000_000;
            }
            Err(None) if scans.refused <= REFUSED_OFTEN => return ENGAGE_SOON_NS,
            Err(None) => {}
            Err(Some(refused)) if refused.may_pass() && scans.refused < REFUSED_OFTEN => {
                scans.refused += 1;
                scans.engage_from = now + ENGAGE_SOON_NS;
                return ENGAGE_SOON_NS;
            }
            Err(Some(refused)) => {
                scans.refused = REFUSED_OFTEN + 1;
                scans.engage_from = now + ENGAGE_AGAIN_NS;
                if self.group.warns_first(unmanaged::REFUSED) {
                    self.say(refused.sentence().as_bytes());
                }
            }
        }
        self.never_gets_on();
        self.growth.room.store(usize::MAX, Relaxed);
        // (What it planned would count with the others for good.)
        self.me().planned.store(0, Relaxed);
        self.refuse_request();
        // (Threads may be had by then. Who is idle does not fill anything.)
        ENGAGE_AGAIN_NS
    }

    /// Registers memory and starts the helpers.
    pub(crate) fn engage(&'static self) -> Result<(), Refused> {
        // (Before the process became another user's, perhaps: see `credentials`.)
        if self.uffd.load(Relaxed) < 0 {
            self.open_uffd().map_err(Refused::of("userfaultfd or /proc"))?;
        }
        let uffd = self.uffd();
        self.calls.order();
        self.register_own(&uffd).map_err(Refused::of("registration of uzswap's own memory"))?;
        if self.without_move {
            // What a call moves meanwhile would not be registered where it comes to be.
            self.calls.stop();
        }
        let begun = self.take_charge();
        if self.without_move {
            self.calls.go_on();
        }
        if let Err(e) = begun {
            self.end_started();
            // (Nothing has left the program. With the descriptor its registration goes, and whoever waits goes on.)
            self.close_uffd();
            // (Nor is it known what becomes of what was found, until it is found anew.)
            forget_all(&mut self.state.lock());
            return Err(e);
        }
        Ok(())
    }

    /// Takes the lock. Who has it for long may be a thread of idle policy that waits for a CPU, and then everybody waits for it: it is made a
    /// normal one.
    ///
    /// The story: the reclaim thread served a request while the program faulted on the same CPU, beside others that computed. The program
    /// waited for the handler, the handler for the lock, and so did the ticker: for more than five seconds.
    fn lock_and_lift(&'static self, watch: &mut Watch) -> Guard<'static, State> {
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

    /// Registers the program's memory and starts the helpers, with the userfaultfd that is there now.
    fn take_charge(&'static self) -> Result<(), Refused> {
        // First of all the program stops filling unseen what is registered: where processes compete for the CPUs the handler,
        // for which its faults wait, may be tens of milliseconds away.
        self.thp.look();
        let mut s = self.state.lock();
        self.scan(&mut s).map_err(Refused::of("registration of the program's memory"))?;
        self.spawn_helpers().map_err(Refused::of("a thread"))?;
        self.publish_pages(&mut s);
        // The handler counts on from here; zero would let it fill as much again before anybody looks.
        s.rss = self.read_rss();
        self.engaged.store(true, Release);
        self.note_engaged();
        drop(s);
        self.wake_reclaim();
        Ok(())
    }

    /// Registers of uzswap's own memory what must be.
    fn register_own(&self, uffd: &Uffd) -> Result<(), Errno> {
        match self.without_move {
            true => self.hang_bells(),
            false => uffd.register(self.layout.arena, self.layout.slots * PAGE),
        }
    }

    /// Makes the page map that `uzswap pagemap` reads. Without one (no address space for it) all else works.
    fn publish_pages(&'static self, s: &mut State) {
        let made = MapFile::create(Kind::Process, 0, ADDRESS_SPACE_PAGES, self.limit() as u64);
        if let Ok(map) = made {
            if self.tracks {
                s.pt.publish_soft_dirty();
                map.set_tracking(true);
            }
            // SAFETY: kept in the pager, which is never dropped, until the table no longer uses it (`reset_inherited`).
            s.pt.publish(unsafe { map.writer_unbound() }, 0);
            s.pt.note_emptied();
            s.page_map = Some(map.table());
            *self.page_map.lock() = Some(map);
        }
    }

    /// Starts the helpers, all of which first take the lock, which the caller has. Where one cannot be had, those that were started find
    /// that they are to end.
    fn spawn_helpers(&'static self) -> Result<(), Errno> {
        let started = self.spawn_each();
        if started.is_err() {
            self.stopping.store(true, SeqCst);
        }
        started
    }

    fn spawn_each(&'static self) -> Result<(), Errno> {
        self.reclaimer.store(self.spawn_on(2, false, run_reclaim)?, Release);
        if self.tier.file.load(Acquire) >= 0 {
            self.writer.store(self.spawn_on(3, false, run_swap)?, Release);
        }
        // (Last: nobody can end it that has not begun to read messages.)
        self.handler.store(self.spawn_on(1, false, run_handler)?, Release);
        self.signs.watched.store(true, SeqCst);
        Ok(())
    }

    /// Waits until the helpers have ended that were started before one could not be: others may be started on their stacks later.
    ///
    /// The story: of a process that could have a handler and no more threads the handler went on, without a userfaultfd, and the next one
    /// was started on its stack.
    fn end_started(&self) {
        for helper in [&self.reclaimer, &self.writer] {
            crate::letgo::await_end(helper.load(Acquire));
            helper.store(0, Release);
        }
        self.stopping.store(false, SeqCst);
    }

    /// In a forked child, before the program's code runs: a new userfaultfd, everything registered again.
    fn rearm(&'static self) -> Result<(), Errno> {
        if self.inject(Site::Uffd).is_some() {
            return Err(libc::EMFILE);
        }
        self.open_uffd()?;
        self.register_own(&self.uffd())?;
        // SAFETY: the forking thread holds the lock and waits for us.
        let s: &mut State = unsafe { self.state.assume_locked() };
        self.leave_out_closed(s)?;
        if self.tier.file.load(Acquire) < 0 && !s.does_without_disk() {
            return Err(libc::EBADF);
        }
        s.managed.clear();
        self.scan(s)?;
        self.forget_unmapped(s);
        self.forget_wiped(s)?;
        self.protect_inherited(s);
        self.publish_pages(s);
        s.rss = self.read_rss();
        self.note_engaged();
        self.spawn_helpers()
    }
}

/// Why management could not be started.
#[derive(Debug)]
pub(crate) struct Refused {
    what: &'static str,
    error: Errno,
}

impl Refused {
    fn of(what: &'static str) -> impl FnOnce(Errno) -> Self {
        move |error| Self { what, error }
    }

    /// Whether it is what a process is told that is starting another program: the kernel makes it no threads from the moment it reads
    /// that program's file to the one at which all threads end, or the call fails.
    ///
    /// The story: of every fifth build one said that memory could not be managed in a process, of a shell that was about to be the
    /// compiler.
    fn may_pass(&self) -> bool {
        self.error == libc::EAGAIN
    }

    /// What the user is told.
    fn sentence(&self) -> String {
        let Self { what, error } = self;
        format!(
            "uzswap: memory cannot be managed in this process ({what} refused, error {error}); it runs without a limit; see `uzswap doctor`\n"
        )
    }
}

/// Where management starts.
fn engage_threshold(limit: usize) -> usize {
    (limit / 4 * 3).min(limit.saturating_sub(64 << 20)).max(limit / 2)
}

pub(crate) fn pager(arg: usize) -> &'static Pager {
    // SAFETY: the argument is the leaked pager that started the thread.
    unsafe { &*(arg as *const Pager) }
}

/// Entry of the ticker.
pub extern "C" fn start(arg: usize) -> ! {
    let p = pager(arg);
    p.open_own_files();
    p.ticker_loop()
}

/// Entry of the ticker in a forked child whose parent was engaged.
pub extern "C" fn start_in_child(arg: usize) -> ! {
    let p = pager(arg);
    p.open_own_files();
    let ok = p.rearm().is_ok();
    p.ready.store(if ok { 1 } else { 2 }, Release);
    lock::futex_wake(&p.ready, 1, false);
    if !ok {
        thread::exit();
    }
    p.ticker_loop()
}

extern "C" fn run_handler(arg: usize) -> ! {
    pager(arg).handler_loop()
}

extern "C" fn run_swap(arg: usize) -> ! {
    pager(arg).swap_loop()
}

extern "C" fn run_reclaim(arg: usize) -> ! {
    pager(arg).reclaim_loop()
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

    /// See [`Pager::close_uffd`].
    #[test]
    fn who_could_not_be_managed_has_as_many_descriptors_as_before() {
        if !testing::by_itself("ticker::tests::who_could_not_be_managed_has_as_many_descriptors_as_before") {
            return;
        }
        let p = testing::pager(16 << 20);
        // (Nothing of the test's own is to be managed.)
        p.state.lock().pinned.push((0, usize::MAX));
        p.close_uffd();
        p.group.faults.set("thread=1/1", 0).unwrap();
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = open();
        let engage = || p.engage().map_err(|refused| refused.error);
        (0..20).for_each(|_| assert_eq!(engage(), Err(libc::EAGAIN)));
        assert_eq!(open(), before);
        // And where not all could be opened.
        let mut most = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: a limit of ours; it is this process's alone.
        unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut most) };
        let tries = (0..32).map(|few| {
            // SAFETY: as above.
            unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &libc::rlimit { rlim_cur: few, ..most }) };
            let engaged = engage();
            // SAFETY: as above.
            unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &most) };
            assert_eq!((open(), p.uffd.load(Relaxed)), (before, -1), "{few} descriptors");
            engaged
        });
        let tries = tries.collect::<Vec<_>>();
        let refused = tries.iter().take_while(|tried| **tried == Err(libc::EMFILE)).count();
        assert!(refused > 3 && tries[refused..].iter().all(|tried| *tried == Err(libc::EAGAIN)), "{tries:?}");
    }

    /// See [`Refused::may_pass`].
    #[test]
    fn that_threads_are_refused_is_told_when_it_does_not_pass() {
        if !testing::by_itself("ticker::tests::that_threads_are_refused_is_told_when_it_does_not_pass") {
            return;
        }
        let p = testing::pager(16 << 20);
        p.state.lock().pinned.push((0, usize::MAX));
        p.group.faults.set("thread=1/1", 0).unwrap();
        let told = || p.group.warned_unmanaged.load(Relaxed) & unmanaged::REFUSED != 0;
        let mut scans = Scans::default();
        for _ in 0..REFUSED_OFTEN {
            assert_eq!((p.begin_to_manage(&mut scans), told()), (ENGAGE_SOON_NS, false));
            assert_eq!((p.begin_to_manage(&mut scans), told()), (ENGAGE_SOON_NS, false), "it is too soon");
            scans.engage_from = 0;
        }
        assert_eq!((p.begin_to_manage(&mut scans), told()), (ENGAGE_AGAIN_NS, true));
        assert_eq!(p.begin_to_manage(&mut scans), ENGAGE_AGAIN_NS, "it is too soon");
    }

    /// The story: a disk stood still while a program's only thread waited for it. After half a second nobody looked after the handler,
    /// which had nothing to do, and the ticker slept until the program would have used some CPU time: nobody was told.
    #[test]
    fn a_disk_that_stands_still_wakes_the_ticker() {
        let p = testing::pager_with_swap(8 << 20);
        // (No signal comes.)
        p.files.signals.store(eventfd::create().unwrap(), Relaxed);
        p.group.faults.set("swap_stall=1/1", 0).unwrap();
        let (say, said) = mpsc::channel();
        p.tier.began[READ].store(thread::now_ns(), Relaxed);
        std::thread::spawn(move || {
            p.wait_unwatched();
            p.look_for_stalls();
            say.send(p.counters().swap_stalls.load(Relaxed)).unwrap();
            // Told once, it does not wake anybody again; another is counted.
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

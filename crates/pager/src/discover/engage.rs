//! Engaging: a process's memory comes to be managed, near the limit, in a forked child, or when it is asked for.
//!
//! The userfaultfd is opened, the program's memory is registered, and the threads start that serve faults, reclaim and write: all of it or
//! nothing. What was begun is undone where one step is refused: with the descriptor its registration goes, and whoever waits goes on.
//!
//! Lock order: `take_charge` has the pager's lock while helpers start, all of which first take it.

use crate::calls::events::forget_all;
use crate::discover::Scans;
use crate::fork::copies::PROTECTED;
use crate::frames::arena::PAGE;
use crate::group::unmanaged;
use crate::inject::Site;
use crate::page_state::mapfile::{Kind, MapFile};
use crate::pager::Pager;
use crate::state::State;
use crate::ticker::pager;
use core::sync::atomic::Ordering::*;
use uzswap_mm::pagetable::ADDRESS_SPACE_PAGES;
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::thread;
use uzswap_sys::uffd::Uffd;

/// For how long it is not tried again to have memory managed where that could not be, whoever asks for it: each time all of it is
/// registered.
const ENGAGE_AGAIN_NS: u64 = 100_000_000;
/// The same where what refused it may have passed by then, and how often that is believed.
const ENGAGE_SOON_NS: u64 = 10_000_000;
const REFUSED_OFTEN: u32 = 3;

impl Pager {
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

    /// Engages, where that can be; returns the CPU time until the next look, None for a look soon (whoever is idle may be asked for memory).
    pub(crate) fn begin_to_manage(&'static self, scans: &mut Scans) -> Option<u64> {
        let now = thread::now_ns();
        // (None: it was refused a little ago.)
        let engaged = if now >= scans.engage_from { self.engage().map_err(Some) } else { Err(None) };
        match engaged {
            Ok(()) => {
                self.forget_plans(0);
                // What made it tight for this one may do so for others, which fill what they mapped before.
                self.rally();
                return Some(1_000_000);
            }
            Err(None) if scans.refused <= REFUSED_OFTEN => return None,
            Err(None) => {}
            Err(Some(refused))
                if refused.may_pass() && (scans.refused < REFUSED_OFTEN || self.is_starting_program()) =>
            {
                scans.refused = (scans.refused + 1).min(REFUSED_OFTEN);
                scans.engage_from = now + ENGAGE_SOON_NS;
                return None;
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
        Some(ENGAGE_AGAIN_NS)
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
        self.protect_after_fork(&s);
        drop(s);
        self.wake_reclaim();
        Ok(())
    }

    /// Registers of uzswap's own memory what must be.
    fn register_own(&self, uffd: &Uffd) -> Result<(), Errno> {
        match self.without_move {
            true => self.hang_bells(),
            false => uffd.register_as_target(self.layout.arena, self.layout.slots * PAGE),
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
            crate::discover::letgo::await_end(helper.load(Acquire));
            helper.store(0, Release);
        }
        self.stopping.store(false, SeqCst);
    }

    /// In a forked child, before the program's code runs: a new userfaultfd, everything registered again.
    pub(crate) fn rearm(&'static self) -> Result<(), Errno> {
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
        if self.copies_may_exceed(s) {
            // (Who waits for this has the lock, and goes on with it.)
            let hooks = core::mem::take(&mut s.hooks);
            self.protect_shared(s, &hooks);
            self.forked.store(PROTECTED, Relaxed);
        }
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
    /// compiler. (And where both CPUs are wanted by others that takes longer than is waited for: who makes such a call is believed for as long
    /// as that lasts.)
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
pub(crate) fn engage_threshold(limit: usize) -> usize {
    (limit / 4 * 3).min(limit.saturating_sub(64 << 20)).max(limit / 2)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    /// See [`Pager::close_uffd`].
    #[test]
    fn who_could_not_be_managed_has_as_many_descriptors_as_before() {
        if !testing::by_itself("discover::engage::tests::who_could_not_be_managed_has_as_many_descriptors_as_before") {
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
        if !testing::by_itself("discover::engage::tests::that_threads_are_refused_is_told_when_it_does_not_pass") {
            return;
        }
        let p = testing::pager(16 << 20);
        p.state.lock().pinned.push((0, usize::MAX));
        p.group.faults.set("thread=1/1", 0).unwrap();
        let told = || p.group.warned_unmanaged.load(Relaxed) & unmanaged::REFUSED != 0;
        let mut scans = Scans::default();
        for _ in 0..REFUSED_OFTEN {
            assert_eq!((p.begin_to_manage(&mut scans), told()), (None, false));
            assert_eq!((p.begin_to_manage(&mut scans), told()), (None, false), "it is too soon");
            scans.engage_from = 0;
        }
        // As long as another program is being started, that is why.
        p.starts_program();
        for _ in 0..2 * REFUSED_OFTEN {
            assert_eq!((p.begin_to_manage(&mut scans), told()), (None, false));
            scans.engage_from = 0;
        }
        p.goes_on();
        assert_eq!((p.begin_to_manage(&mut scans), told()), (Some(ENGAGE_AGAIN_NS), true));
        assert_eq!(p.begin_to_manage(&mut scans), Some(ENGAGE_AGAIN_NS), "it is too soon");
    }
}

//! Engaging: puts a process's memory under management, near its limit, in a forked child, or on request.
//!
//! Engaging opens the userfaultfd, registers the program's memory, and starts the threads that serve faults, reclaim and write:
//! all of it or nothing. If a step is refused, what was begun is undone: closing the descriptor ends its registrations, and
//! waiting threads go on.
//!
//! Lock order: `take_charge` holds the pager's lock while helpers start; each helper first takes that lock.

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

/// How long after a failure nobody tries to engage again, for whatever reason, as each try registers all memory.
const ENGAGE_AGAIN_NS: u64 = 100_000_000;
/// The same where the cause of the failure may pass by then; and how many such failures in a row are believed to pass.
const ENGAGE_SOON_NS: u64 = 10_000_000;
const REFUSED_OFTEN: u32 = 3;

impl Pager {
    /// Opens the userfaultfd and the files that describe this process's mappings (a forked child's are others): all of them or
    /// none.
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

    /// Closes those descriptors.
    ///
    /// The story: the files that describe the mappings stayed open. A process that could start no threads for a minute ran out of
    /// descriptors by then, and could not be managed when there were threads again.
    fn close_uffd(&self) {
        for file in [&self.uffd, &self.files.pagemap, &self.files.maps] {
            raw::close(file.swap(-1, AcqRel));
        }
    }

    /// Engages if possible. Returns the CPU time until the next look, or None for a look soon (an idle process may be asked for
    /// memory).
    pub(crate) fn begin_to_manage(&'static self, scans: &mut Scans) -> Option<u64> {
        let now = thread::now_ns();
        // An inner None: a try was refused a short time ago.
        let engaged = if now >= scans.engage_from { self.engage().map_err(Some) } else { Err(None) };
        match engaged {
            Ok(()) => {
                self.forget_plans(0);
                // What is tight for this member may be so for others, which may yet fill what they have mapped.
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
        // Otherwise the other members would count its plans for good.
        self.me().planned.store(0, Relaxed);
        self.refuse_request();
        // By then there may be threads again. A process that is idle until then fills nothing.
        Some(ENGAGE_AGAIN_NS)
    }

    /// Registers memory and starts the helpers, while no mapping call of the program is under way.
    ///
    /// The story (found by reading): engaging reads all mappings first, and then registers them. A mapping that a thread made
    /// over some of that memory in between was registered too. If it was a private mapping of a memfd, for example, of which the
    /// pager knew nothing, it got pages of zeros in place of the file's (see [`Pager::protect_between_calls`]). And memory that
    /// was unmapped in between, and mapped and filled anew before the pager asked what is there, was listed but not registered,
    /// so it could be taken out.
    pub(crate) fn engage(&'static self) -> Result<(), Refused> {
        // The descriptors may be open already, since before the process changed its user: see `credentials`.
        if self.uffd.load(Relaxed) < 0 {
            self.open_uffd().map_err(Refused::of("userfaultfd or /proc"))?;
        }
        let uffd = self.uffd();
        self.calls.order();
        self.register_own(&uffd).map_err(Refused::of("registration of uzswap's own memory"))?;
        self.calls.stop();
        let begun = self.take_charge();
        self.calls.go_on();
        if let Err(e) = begun {
            self.end_started();
            // Nothing has been evicted yet. Closing the descriptor ends its registrations, and waiting threads go on.
            self.close_uffd();
            // What was found is unknown again until it is found anew.
            forget_all(&mut self.state.lock());
            return Err(e);
        }
        Ok(())
    }

    /// Registers the program's memory and starts the helpers, on the userfaultfd that is open now.
    fn take_charge(&'static self) -> Result<(), Refused> {
        // Registering comes first, so that the program stops filling memory unseen: where processes compete for the CPUs, the
        // handler that its faults wait for may be tens of milliseconds away.
        self.thp.look();
        let mut s = self.state.lock();
        self.scan(&mut s).map_err(Refused::of("registration of the program's memory"))?;
        self.spawn_helpers().map_err(Refused::of("a thread"))?;
        self.publish_pages(&mut s);
        // The handler counts on from this value; from zero it would let the program fill as much again before anyone looks.
        s.rss = self.read_rss();
        self.engaged.store(true, Release);
        self.note_engaged();
        self.protect_after_fork(&s);
        drop(s);
        self.wake_reclaim();
        Ok(())
    }

    /// Registers those parts of uzswap's own memory that must be registered.
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
            // SAFETY: the map is kept in the pager, which is never dropped, until the table no longer uses it
            // (`reset_inherited`).
            s.pt.publish(unsafe { map.writer_unbound() }, 0);
            s.pt.note_emptied();
            s.page_map = Some(map.table());
            *self.page_map.lock() = Some(map);
        }
    }

    /// Starts the helpers, all of which first take the lock that the caller holds. If one cannot be started, the others find that
    /// they are to end.
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
        // The handler starts last: a handler that has not begun to read messages cannot be ended.
        self.handler.store(self.spawn_on(1, false, run_handler)?, Release);
        self.signs.watched.store(true, SeqCst);
        Ok(())
    }

    /// Waits for the helpers to end that were started before one could not be. Others may be started on their stacks later.
    ///
    /// The story: a process could start a handler and no more threads. That handler went on without a userfaultfd, and the next
    /// one was started on its stack.
    fn end_started(&self) {
        for helper in [&self.reclaimer, &self.writer] {
            crate::discover::letgo::await_end(helper.load(Acquire));
            helper.store(0, Release);
        }
        self.stopping.store(false, SeqCst);
    }

    /// In a forked child, before the program's code runs: opens a new userfaultfd and registers everything again.
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
            // The forking thread waits for this with the lock held, and goes on with that lock.
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

    /// Whether this is the error that a process gets while it starts another program: the kernel refuses it new threads from the
    /// moment at which it reads that program's file until all threads end or the call fails.
    ///
    /// The story: one of every five builds reported that memory could not be managed in a process. It was a shell about to become
    /// the compiler. (Where others want both CPUs, that takes longer than the wait; so while such a call lasts the cause is
    /// believed to pass.)
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

/// The charge (bytes) at which a process engages.
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
    use core::sync::atomic::AtomicBool;

    /// See [`Pager::close_uffd`].
    #[test]
    fn who_could_not_be_managed_has_as_many_descriptors_as_before() {
        if !testing::by_itself("discover::engage::tests::who_could_not_be_managed_has_as_many_descriptors_as_before") {
            return;
        }
        let p = testing::pager(16 << 20);
        // Nothing of the test's own may be managed.
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

    /// See [`Pager::engage`].
    #[test]
    fn memory_comes_to_be_managed_between_calls() {
        if !testing::by_itself("discover::engage::tests::memory_comes_to_be_managed_between_calls") {
            return;
        }
        let (p, ended) = (testing::pager(16 << 20), AtomicBool::new(false));
        p.state.lock().pinned.push((0, usize::MAX));
        p.close_uffd();
        p.group.faults.set("thread=1/1", 0).unwrap();
        let held = p.calls.begin(false);
        std::thread::scope(|threads| {
            let engages = threads.spawn(|| (p.engage().map_err(|refused| refused.error), ended.load(SeqCst)));
            while !p.calls.are_to_stop() {
                assert!(!engages.is_finished(), "a call is under way");
                std::thread::yield_now();
            }
            ended.store(true, SeqCst);
            p.calls.end(held);
            assert_eq!(engages.join().unwrap(), (Err(libc::EAGAIN), true));
        });
        assert!(p.calls.try_stop_now(), "they go on");
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
            let now = thread::now_ns();
            assert_eq!((p.begin_to_manage(&mut scans), told()), (None, false));
            assert!(scans.engage_from >= now + ENGAGE_SOON_NS);
            // However long this thread was without a CPU meanwhile.
            scans.engage_from = u64::MAX;
            let refused = scans.refused;
            assert_eq!((p.begin_to_manage(&mut scans), scans.refused), (None, refused), "it is too soon");
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

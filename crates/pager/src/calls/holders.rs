//! Which threads hold the lock of mapping calls.
//!
//! Two ask for this:
//!
//! - The handler. A thread may fault in its call, and with `--on-full=wait` faults wait for room. But read-only and shared
//!   memory leaves only between calls, so the fault of such a thread must not wait for it.
//! - A thread that waits for the lock. A child that shares its parent's memory (`vfork`, `posix_spawn`, CLONE_VM) makes calls
//!   like its parent, and may be killed in one. (A thread of the process itself does not end alone.)
//!
//! The kernel drops the event of a call whose thread is killed. What was unmapped then still counts as managed, and so does what
//! is mapped there next, though it is not registered: its pages would be taken and read as zeros, or as what was there before. So
//! nothing leaves while such a child is in a call. When one has died in a call, nothing leaves until it was checked what is still
//! registered ([`crate::Pager::mend_torn`]). That comes before any new memory is looked for.
//!
//! A child that is killed in the few instructions between taking the lock and being noted, or between being forgotten and
//! releasing it, still leaves it taken.

use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering::*};
use uzswap_sys::process::Identity;
use uzswap_sys::thread;

/// How many threads that share the lock are noted at most. Others hold it without being known here.
const KNOWN: usize = 64;
/// A bit beside a thread's id: the thread belongs to another process that shares this memory.
const OTHER_PROCESS: u32 = 1 << 31;

/// The threads that hold the lock.
pub(super) struct Holders {
    /// The process whose memory it is.
    own: AtomicI32,
    /// Threads that share the lock; 0 is a free place.
    sharing: [AtomicU32; KNOWN],
    /// The thread that has it alone; 0 if none, or one of the pager's own threads.
    alone: AtomicU32,
    /// Whether a thread of another process ever asked for the lock.
    others: AtomicBool,
    /// Whether one died holding the lock, and nobody has checked since what it did.
    torn: AtomicBool,
}

impl Holders {
    /// No holders; the memory is the calling process's.
    pub(super) fn new() -> Self {
        Self {
            own: AtomicI32::new(thread::getpid()),
            sharing: [const { AtomicU32::new(0) }; KNOWN],
            alone: AtomicU32::new(0),
            others: AtomicBool::new(false),
            torn: AtomicBool::new(false),
        }
    }

    /// The calling thread, as it is noted. To be asked before the lock is taken: a system call is where a killed thread ends.
    pub(super) fn calling_thread(&self) -> u32 {
        let tid = thread::gettid() as u32;
        if thread::getpid() == self.own.load(Relaxed) {
            return tid;
        }
        self.others.store(true, SeqCst);
        tid | OTHER_PROCESS
    }

    /// Notes that a thread shares the lock. Returns its place, for [`Holders::forget_shared`].
    pub(super) fn note_shared(&self, thread: u32) -> u8 {
        let first = thread as usize % KNOWN;
        let take = |place: &usize| self.sharing[*place].compare_exchange(0, thread, AcqRel, Relaxed).is_ok();
        (first..KNOWN).chain(0..first).find(take).map_or(u8::MAX, |place| place as u8)
    }

    /// A thread is about to release its share.
    pub(super) fn forget_shared(&self, place: u8) {
        if let Some(place) = self.sharing.get(usize::from(place)) {
            place.store(0, Release);
        }
    }

    /// Notes that a thread has the lock alone.
    pub(super) fn note_alone(&self, thread: u32) {
        self.alone.store(thread, Release);
    }

    /// The thread that has the lock alone is about to release it.
    pub(super) fn forget_alone(&self) {
        self.alone.store(0, Release);
    }

    fn all(&self) -> impl Iterator<Item = &AtomicU32> {
        self.sharing.iter().chain([&self.alone])
    }

    /// Whether a thread holds the lock. No thread has the id 0, which stands for a free place.
    pub(super) fn include(&self, tid: u32) -> bool {
        tid != 0 && self.all().any(|place| place.load(Relaxed) & !OTHER_PROCESS == tid)
    }

    /// Whether another process that shares this memory may have changed its mappings without an event.
    pub(super) fn may_be_torn(&self) -> bool {
        self.others.load(Acquire)
            && (self.all().any(|place| place.load(Acquire) & OTHER_PROCESS != 0) || self.torn.load(Acquire))
    }

    /// Whether one died holding the lock since this was last asked.
    pub(super) fn take_torn(&self) -> bool {
        self.torn.load(Relaxed) && self.torn.swap(false, AcqRel)
    }

    /// What it did could not be checked.
    pub(super) fn stay_torn(&self) {
        self.torn.store(true, Release);
    }

    /// Removes dead threads. Returns how many of them shared the lock, and whether one had it alone.
    pub(super) fn remove_dead(&self) -> (usize, bool) {
        let remove = |place: &AtomicU32| {
            let thread = place.load(Acquire);
            if thread & OTHER_PROCESS == 0 || !Identity::of(thread & !OTHER_PROCESS).is_dead() {
                return false;
            }
            self.torn.store(true, Release);
            place.compare_exchange(thread, 0, AcqRel, Relaxed).is_ok()
        };
        (self.sharing.iter().filter(|place| remove(place)).count(), remove(&self.alone))
    }

    /// In a forked child, where none of them exists.
    pub(super) fn forget_all(&self) {
        self.all().for_each(|place| place.store(0, Relaxed));
        self.torn.store(false, Relaxed);
        self.own.store(thread::getpid(), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    /// A process that has ended and is not waited for, so its pid cannot be another's.
    fn ended() -> Child {
        let child = Command::new("/bin/true").spawn().unwrap();
        while !Identity::of(child.id()).is_dead() {
            std::thread::yield_now();
        }
        child
    }

    #[test]
    fn holders_are_known_until_they_are_forgotten() {
        let holders = Holders::new();
        let me = holders.calling_thread();
        assert!(!holders.include(me) && me & OTHER_PROCESS == 0);
        assert!(!holders.include(0), "a page that no thread waits for");
        // Two threads with the same first place.
        let (a, b) = (holders.note_shared(me), holders.note_shared(me + KNOWN as u32));
        assert!(a != b && holders.include(me) && holders.include(me + KNOWN as u32));
        holders.forget_shared(a);
        assert!(!holders.include(me) && holders.include(me + KNOWN as u32));
        holders.note_alone(me);
        assert!(holders.include(me));
        holders.forget_alone();
        assert!(!holders.include(me) && !holders.may_be_torn());
    }

    #[test]
    fn more_than_can_be_noted_hold_the_lock_unknown() {
        let holders = Holders::new();
        let places: Vec<_> = (1..=KNOWN as u32).map(|tid| holders.note_shared(tid)).collect();
        let beyond = holders.note_shared(1000);
        assert!(!holders.include(1000) && !places.contains(&beyond));
        holders.forget_shared(beyond);
        assert!((1..=KNOWN as u32).all(|tid| holders.include(tid)));
        assert_eq!(holders.remove_dead(), (0, false), "threads of this process do not end alone");
    }

    #[test]
    fn the_dead_are_removed_and_leave_mappings_unchecked() {
        // It reads a pipe, so it lives until it is killed.
        let mut alive = Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let (holders, mut dead) = (Holders::new(), ended());
        holders.others.store(true, SeqCst);
        let place = holders.note_shared(alive.id() | OTHER_PROCESS);
        assert!(holders.may_be_torn() && !holders.take_torn());
        assert_eq!(holders.remove_dead(), (0, false));
        holders.note_shared(dead.id() | OTHER_PROCESS);
        holders.note_alone(dead.id() | OTHER_PROCESS);
        assert_eq!(holders.remove_dead(), (1, true));
        assert_eq!(holders.remove_dead(), (0, false));
        holders.forget_shared(place);
        assert!(holders.may_be_torn(), "nobody has checked yet");
        assert!(holders.take_torn() && !holders.take_torn() && !holders.may_be_torn());
        holders.stay_torn();
        holders.forget_all();
        assert!(!holders.may_be_torn());
        alive.kill().unwrap();
        alive.wait().unwrap();
        dead.wait().unwrap();
    }
}

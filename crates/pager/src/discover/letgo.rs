//! Letting go: returns a process's memory to the kernel for good; the process then runs without a limit.
//!
//! uzswap needs threads in the process that make system calls, and forked children in which it can do the same. A program may be
//! about to forbid that. A seccomp filter for all threads holds for the helpers too: it killed them, or they could serve no more
//! faults, and the program waited forever. Or the program gives up the right to manage memory, which its children then lack: they
//! were ended, as they would have read zeros. Nothing that is out could come back afterwards, so it comes back before:
//!
//! ```text
//! KEEPS ─ a thread of the program asks, and waits ─▶ ASKED ─ the ticker: all pages come in; helpers end ─▶ GONE
//!   ▲                                                  └──── a page cannot come in ────▶ KEEPS
//! ```
//! From ASKED on nothing is evicted. The handler is asked for the pages on disk, as if they were touched. A page that is lost on
//! the way is marked, so that it raises SIGBUS for good. All is back when a whole pass, with the mapping calls stopped, finds
//! nothing out. Then the helpers end one by one, the userfaultfd is closed, which ends all registrations, and the ticker ends
//! last. The asking thread goes on when no helper is left. The agent then forgets the pager between mapping calls and forks: what
//! began with a pager ends with it. Its hooks make no system calls any more, except those of `exec`, unless a filter may forbid
//! what they need.
//!
//! A page cannot come back while an event stays unread, or if nothing comes from the disk (or its server) for a while. Then the
//! agent refuses the program's call where the program would not survive it: see its `leaving`.

use crate::calls::events::forget_all;
use crate::frames::arena::{PAGE, discard};
use crate::inject::Site;
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::pagetable::Tag;
use uzswap_mm::zone::Kind;
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::uffd::{Message, Uffd};
use uzswap_sys::{lock, process, sys, thread};

/// Memory is managed, or may come to be.
pub const KEEPS: u32 = 0;
/// The ticker is to let go.
pub const ASKED: u32 = 1;
/// The ticker has let go.
pub const GONE: u32 = 2;

/// Pages brought in at a time under one hold of the lock.
const PIECE: u64 = 64;
/// Pages on disk asked of the handler at a time: more than it can have reads under way.
const AT_ONCE: usize = 64;
/// How many passes over the whole table are made, and how many pauses for events to be read, before giving up.
const PASSES: u32 = 8;
const PAUSES: u32 = 20_000;
pub(crate) const PAUSE_NS: u64 = 50_000;
/// After this long without anything from disk letting go is given up (nanoseconds): twice what a server gets for a read.
pub(crate) const GIVE_UP_NS: u64 = 20_000_000_000;
/// Descriptors that a forked child's helpers need.
const DESCRIPTORS: u64 = 12;

impl Pager {
    /// Makes the ticker let go of this process, and returns once it has and no helper is left; false if a page cannot be brought
    /// back; then all is as before. The caller is a thread of the program with signals blocked, and holds no lock.
    pub fn let_go(&self) -> bool {
        let _ = self.letting.compare_exchange(KEEPS, ASKED, SeqCst, SeqCst);
        self.poke_ticker();
        while self.letting.load(SeqCst) == ASKED {
            lock::futex_wait(&self.letting, ASKED, None, false);
        }
        if self.letting.load(SeqCst) != GONE {
            return false;
        }
        await_end(self.ticker.load(Relaxed));
        true
    }

    /// Whether this process was let go of.
    pub fn has_gone(&self) -> bool {
        self.letting.load(SeqCst) == GONE
    }

    /// Whether this process is being let go of, or was.
    pub(crate) fn lets_go(&self) -> bool {
        self.letting.load(SeqCst) != KEEPS
    }

    /// Whether a child forked now could manage the memory it inherits, as far as that can be told.
    pub fn child_could_manage(&self) -> bool {
        if !process::has_children_beside_it() {
            return false;
        }
        let mut most = [0u64; 2];
        // SAFETY: a limit of ours to be filled.
        let asked = unsafe { sys!(libc::SYS_prlimit64, 0, libc::RLIMIT_NOFILE, 0, most.as_mut_ptr()) };
        if asked.is_ok() && most[0] < DESCRIPTORS {
            return false;
        }
        // EMFILE and ENFILE do not count: a full table of the program's is not the helpers'.
        let full = |e: &Errno| [libc::EMFILE, libc::ENFILE].contains(e);
        let opens = |path: &[u8], flags: i32| raw::open(path, flags | libc::O_CLOEXEC).map(raw::close);
        if opens(b"/proc/thread-self/pagemap\0", libc::O_RDONLY).is_err_and(|e| !full(&e)) {
            return false;
        }
        if opens(b"/dev/userfaultfd\0", libc::O_RDWR).is_ok() {
            return true;
        }
        match Uffd::open(self.features()) {
            Ok((uffd, _)) => {
                raw::close(uffd.fd());
                true
            }
            Err(e) => full(&e),
        }
    }

    /// In the ticker: lets go, and ends the ticker. Returns only if that cannot be done.
    pub(crate) fn let_go_now(&'static self) {
        let engaged = self.engaged.load(Acquire);
        if engaged {
            // Letting go, and mapping calls under way, wait for events that the handler reads, and meanwhile nobody watches that
            // it gets a CPU.
            self.lift_handler();
        }
        while !self.calls.try_stop() {
            thread::sleep_ns(PAUSE_NS);
        }
        if engaged {
            if !self.bring_all_back() {
                self.calls.go_on();
                self.has_let_go(KEEPS);
                return;
            }
            self.end_helpers();
            // Threads that wait for a fault or an event go on.
            raw::close(self.uffd.swap(-1, SeqCst));
            let mut s = self.state.lock();
            forget_all(&mut s);
            // SAFETY: all frames are free, and nobody takes one any more.
            unsafe { discard(self.layout.arena, self.layout.slots * PAGE) };
        }
        self.engaged.store(false, SeqCst);
        self.me().engaged.store(0, Relaxed);
        self.me().ticker.store(0, Relaxed);
        self.leave();
        // This comes before calls and forks go on: a child made in between would take over helpers that have ended.
        self.has_let_go(GONE);
        self.calls.go_on();
        thread::exit()
    }

    fn has_let_go(&self, how: u32) {
        self.letting.store(how, SeqCst);
        lock::futex_wake(&self.letting, u32::MAX >> 1, false);
        if how == GONE {
            // A thread that asked for something else meanwhile would wait forever.
            self.following.refuse();
            self.ceding.answer(Err(libc::EBUSY));
        }
    }

    /// Whether this event tells the handler to end.
    pub(crate) fn is_farewell(&self, event: &Message) -> bool {
        let farewell = self.farewell.load(SeqCst);
        farewell != 0 && matches!(event, Message::Removed { start, .. } if *start == farewell)
    }

    /// Brings back every page that is out; false if one cannot come.
    fn bring_all_back(&self) -> bool {
        let mut patience = Patience::new(GIVE_UP_NS);
        for _ in 0..PASSES {
            let (mut at, mut any) = (0, false);
            loop {
                let mut s = self.state.lock();
                let Some(vpn) = next_out(&s, at) else { break };
                any = true;
                if s.pt.get(vpn).tag() == Tag::Disk {
                    drop(s);
                    if !self.bring_from_disk(vpn, u64::MAX, &mut patience) {
                        return false;
                    }
                    at = vpn + 1;
                    continue;
                }
                at = match self.inject(Site::LetGo) {
                    Some(_) => vpn,
                    None => self.bring_range(&mut s, vpn, vpn + PIECE).1,
                };
                drop(s);
                // If it stopped at once, an event must be read first.
                if at == vpn && !patience.pause() {
                    return false;
                }
            }
            if !any {
                return self.mark_lost(&mut patience);
            }
        }
        false
    }

    /// Has the handler bring some of the pages of `[first, end)` that are on disk, as if a thread touched them. So several reads
    /// are under way at once, and memory that may not be read (PROT_NONE) gets its pages back too. Nor does this thread wait in a
    /// fault: a lost page may need this very thread (see `lost`); false if nothing came for too long.
    pub(crate) fn bring_from_disk(&self, first: u64, end: u64, patience: &mut Patience) -> bool {
        let (mut asked, mut n) = ([0; AT_ONCE], 0);
        {
            let mut s = self.state.lock();
            let mut at = first;
            while n < AT_ONCE
                && let Some(vpn) = s.pt.next_used(at).filter(|vpn| *vpn < end)
            {
                if s.pt.get(vpn).tag() == Tag::Disk {
                    (asked[n], n) = (vpn, n + 1);
                }
                at = vpn + 1;
            }
            s.asked.extend_from_slice(&asked[..n]);
        }
        self.wake_handler(|_| {});
        let mut most = 0;
        loop {
            self.cover_lost_now();
            let (mut left, mut came) = (0, 0);
            {
                let s = self.state.lock();
                for vpn in &asked[..n] {
                    match s.pt.get(*vpn).tag() {
                        Tag::Disk => left += 1,
                        Tag::Poisoned => {}
                        _ => came += 1,
                    }
                }
            }
            if came > most {
                most = came;
                patience.renew();
            }
            if left == 0 {
                return true;
            }
            if patience.is_at_end() {
                return false;
            }
            thread::sleep_ns(PAUSE_NS);
        }
    }

    /// Puts a lost page's mark, which the kernel keeps, wherever nobody has touched the page yet; it would read as zeros; false
    /// if an event prevented it.
    fn mark_lost(&self, patience: &mut Patience) -> bool {
        let mut at = 0;
        loop {
            let mut s = self.state.lock();
            let waits = self.inject(Site::LetGo).is_some();
            match s.pt.next_used(at) {
                _ if waits => {}
                None => break,
                Some(vpn) if s.pt.get(vpn).tag() != Tag::Poisoned || self.poison(&mut s, vpn).is_ok() => {
                    at = vpn + 1;
                    continue;
                }
                Some(_) => {}
            }
            drop(s);
            if !patience.pause() {
                return false;
            }
        }
        self.cover_lost_now();
        true
    }

    /// Ends all helpers but the ticker, which calls this.
    fn end_helpers(&self) {
        self.store_posted(&mut self.state.lock());
        self.stopping.store(true, SeqCst);
        self.wake_reclaim();
        await_end(self.reclaimer.load(Relaxed));
        self.helpers.crew.end();
        self.crew_tids().into_iter().for_each(await_end);
        self.wake_handler(|at| self.farewell.store(at, SeqCst));
        await_end(self.handler.load(Relaxed));
        self.end_swap();
    }

    /// Wakes the handler, which may sleep and have no other reason to look: discards an address where nothing is, which raises an
    /// event, and returns when that was read. `before` is given the address first.
    fn wake_handler(&self, before: impl FnOnce(usize)) {
        let hole = match self.without_move {
            true => None,
            false => self.state.lock().zone.alloc(Kind::Hole, 0),
        };
        let at = hole.map(|slot| self.layout.slot(slot)).or(self.without_move.then_some(self.layout.bells));
        if let Some(at) = at {
            before(at);
            // SAFETY: nothing is there, and nobody uses it now.
            unsafe { discard(at, PAGE) };
        }
        if let Some(slot) = hole {
            self.state.lock().zone.free(Kind::Hole, slot, 0);
        }
    }
}

/// How long letting go, or a similar wait, keeps trying.
pub(crate) struct Patience {
    /// How often it waited for an event.
    pauses: u32,
    /// When something last came (monotonic nanoseconds).
    came_at: u64,
    /// How long it accepts that nothing comes (nanoseconds).
    most_ns: u64,
}

impl Patience {
    pub(crate) fn new(most_ns: u64) -> Self {
        Self { pauses: 0, came_at: thread::now_ns(), most_ns }
    }

    /// Waits a little for events to be read; false if that was done too often.
    pub(crate) fn pause(&mut self) -> bool {
        self.pauses += 1;
        thread::sleep_ns(PAUSE_NS);
        self.pauses <= PAUSES
    }

    /// Something has come from disk.
    fn renew(&mut self) {
        self.came_at = thread::now_ns();
    }

    /// Whether nothing has come for too long.
    fn is_at_end(&self) -> bool {
        thread::now_ns() - self.came_at > self.most_ns
    }
}

/// The first page from `at` on that is out.
pub(crate) fn next_out(s: &State, mut at: u64) -> Option<u64> {
    loop {
        at = s.pt.next_used(at)?;
        if !matches!(s.pt.get(at).tag(), Tag::None | Tag::Resident | Tag::Poisoned) {
            return Some(at);
        }
        at += 1;
    }
}

/// Waits until a helper of this process has ended.
pub(crate) fn await_end(tid: i32) {
    while tid > 0 && thread::is_there(thread::getpid(), tid) {
        thread::sleep_ns(PAUSE_NS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::credentials::Change;
    use crate::testing;
    use uzswap_mm::pagetable::Pte;

    /// See `scan_noted_now`: the handler does not register again what the ticker is about to give up.
    #[test]
    fn the_handler_does_not_look_while_the_process_is_let_go_of() {
        let p = testing::pager(16 << 20);
        p.growth.looks_wanted.store(1, Relaxed);
        p.growth.noted.note(1 << 20, PAGE);
        p.letting.store(ASKED, SeqCst);
        p.look_if_asked();
        assert_eq!(p.growth.looks_done.load(Relaxed), 0);
        assert!(p.growth.noted.take().is_some_and(|noted| noted.len() == 1), "left to the ticker");
        p.letting.store(KEEPS, SeqCst);
        assert!(p.calls.try_stop_now(), "calls go on");
        p.calls.go_on();
    }

    /// The story: a lost page that nobody had touched yet would have read as zeros once nobody served its faults any more.
    #[test]
    fn what_is_lost_is_told_of_later_too() {
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, 3);
        testing::put(p, at + PAGE, &[7; PAGE]);
        let first = (at / PAGE) as u64;
        p.state.lock().pt.set(first, Pte::new(Tag::Poisoned, 0));
        assert!(p.mark_lost(&mut Patience::new(GIVE_UP_NS)));
        // process_vm_readv meets what a touch would, without the signal.
        let read = |page: usize| {
            let mut byte = 0u8;
            let to = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
            let from = libc::iovec { iov_base: (at + page * PAGE) as *mut _, iov_len: 1 };
            // SAFETY: one byte of ours is written to, and nothing but bytes read.
            let n = unsafe { libc::process_vm_readv(libc::getpid(), &to, 1, &from, 1, 0) };
            (n == 1).then_some(byte)
        };
        assert_eq!([read(0), read(1)], [None, Some(7)]);
        // SAFETY: nobody else uses the descriptor; what comes after belongs to the kernel alone.
        raw::close(p.uffd.swap(-1, SeqCst));
        assert_eq!(read(0), None);
    }

    /// If a read of the disk never ends, letting go is given up, and the asking thread is told.
    #[test]
    fn what_does_not_come_from_disk_is_given_up() {
        let p = testing::pager_with_swap(16 << 20);
        let at = (testing::memory(p, 3) / PAGE) as u64;
        [0, 2].iter().for_each(|i| p.state.lock().pt.set(at + i, Pte::new(Tag::Disk, 0)));
        assert!(!p.bring_from_disk(at, u64::MAX, &mut Patience::new(1_000_000)));
        assert_eq!(core::mem::take(&mut p.state.lock().asked), [at, at + 2], "what is on disk, and nothing else");
        // One page has come and the other is lost: there is nothing more to wait for.
        p.state.lock().pt.set(at, Pte::new(Tag::Resident, 0));
        p.state.lock().pt.set(at + 2, Pte::new(Tag::Poisoned, 0));
        assert!(p.bring_from_disk(at, u64::MAX, &mut Patience::new(0)));
        assert!(p.state.lock().asked.is_empty());
    }

    /// The story: a thread changed its user at the moment at which another had the process let go of. It asked a ticker that had
    /// ended, and waited forever.
    #[test]
    fn who_asks_a_ticker_that_has_ended_is_answered() {
        let change = Change { nr: libc::SYS_setuid, args: [usize::MAX; 3] };
        let p = testing::pager(16 << 20);
        let asks = std::thread::spawn(move || p.change_helpers(change));
        while !p.following.is_asked() {
            std::thread::yield_now();
        }
        p.has_let_go(GONE);
        assert!(!asks.join().unwrap(), "asked before it ended");
        assert!(!p.change_helpers(change), "and after");
    }
}

//! Letting go: a process's memory is the kernel's again, for good, and it runs without a limit.
//!
//! What uzswap does for a process needs threads in it that make system calls, and forked children that may do the same. A
//! program may be about to forbid that: by a seccomp filter (which, where it is for all threads, holds for the helpers too:
//! they were killed by it, or could serve no fault any more, and the program waited for ever), or by giving up the right to
//! manage memory, which its children then lack (they were ended, as they would have read zeros). Nothing that is out could
//! come back then, so it comes back before:
//!
//! ```text
//! KEEPS ─ a thread of the program asks, and waits ─▶ ASKED ─ the ticker: all pages come in; helpers end ─▶ GONE
//!   ▲                                                  └──── a page cannot come in ────▶ KEEPS
//! ```
//! From ASKED on nothing is taken out. All is back when a whole pass finds nothing out with the mapping calls stopped; then
//! the helpers end one by one, the userfaultfd is closed, which ends all registrations, and the ticker ends last. Who asked
//! goes on when none of them is left. The agent then forgets the pager: its hooks make no system call any more.

use crate::arena::{PAGE, discard};
use crate::events::forget_range;
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_mm::pagetable::Tag;
use uzswap_mm::zone::Kind;
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::uffd::{Message, Uffd};
use uzswap_sys::{lock, sys, thread};

/// Memory is managed, or may come to be.
pub const KEEPS: u32 = 0;
/// The ticker is to let go.
pub const ASKED: u32 = 1;
/// It has.
pub const GONE: u32 = 2;

/// Pages brought in under the lock at a time.
const PIECE: u64 = 64;
/// Times the whole table is gone through, and pauses while events are to be read, before it is given up.
const PASSES: u32 = 8;
const PAUSES: u32 = 20_000;
pub(crate) const PAUSE_NS: u64 = 50_000;
/// Descriptors that a forked child's helpers need.
const DESCRIPTORS: u64 = 12;

impl Pager {
    /// Has the ticker let go of this process; returns when it has and no helper is left. False when it cannot, as a page
    /// cannot be brought back: then all is as before. For a thread of the program that holds no lock, with signals blocked.
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

    /// Whether this process is let go of, or was.
    pub(crate) fn lets_go(&self) -> bool {
        self.letting.load(SeqCst) != KEEPS
    }

    /// Whether a child forked now could manage the memory that it is given, as far as that can be told.
    pub fn child_could_manage(&self) -> bool {
        let mut most = [0u64; 2];
        // SAFETY: a limit of ours to be filled.
        let asked = unsafe { sys!(libc::SYS_prlimit64, 0, libc::RLIMIT_NOFILE, 0, most.as_mut_ptr()) };
        if asked.is_ok() && most[0] < DESCRIPTORS {
            return false;
        }
        // (A table of the program's that is full is not the helpers'.)
        let full = |e: &Errno| [libc::EMFILE, libc::ENFILE].contains(e);
        let opens = |path: &[u8], flags: i32| raw::open(path, flags | libc::O_CLOEXEC).map(raw::close);
        if opens(b"/proc/self/pagemap\0", libc::O_RDONLY).is_err_and(|e| !full(&e)) {
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

    /// In the ticker: lets go, and ends it. Returns when that cannot be done.
    pub(crate) fn let_go_now(&'static self) {
        while !self.calls.try_stop() {
            thread::sleep_ns(PAUSE_NS);
        }
        let engaged = self.engaged.load(Acquire);
        if engaged {
            // (It reads the events that are waited for, and nobody sees to it meanwhile that it runs.)
            self.lift_handler();
            if !self.bring_all_back() {
                self.calls.go_on();
                self.has_let_go(KEEPS);
                return;
            }
            self.end_helpers();
            // (Whoever waits for a fault or an event goes on.)
            raw::close(self.uffd.swap(-1, SeqCst));
            let mut s = self.state.lock();
            forget_range(&mut s, 0, 1 << 35);
            s.managed.clear();
            // SAFETY: all frames are free, and nobody takes one any more.
            unsafe { discard(self.layout.arena, self.layout.slots * PAGE) };
        }
        self.engaged.store(false, SeqCst);
        self.me().engaged.store(0, Relaxed);
        self.me().ticker.store(0, Relaxed);
        self.leave();
        self.calls.go_on();
        self.has_let_go(GONE);
        thread::exit()
    }

    fn has_let_go(&self, how: u32) {
        self.letting.store(how, SeqCst);
        lock::futex_wake(&self.letting, u32::MAX >> 1, false);
    }

    /// Whether an event tells the handler to end.
    pub(crate) fn is_farewell(&self, event: &Message) -> bool {
        let farewell = self.farewell.load(SeqCst);
        farewell != 0 && matches!(event, Message::Removed { start, .. } if *start == farewell)
    }

    /// Brings every page back that is out; false when one cannot come.
    fn bring_all_back(&self) -> bool {
        let mut pauses = 0;
        for _ in 0..PASSES {
            let (mut at, mut any) = (0, false);
            loop {
                let mut s = self.state.lock();
                let Some(vpn) = next_out(&s, at) else { break };
                any = true;
                if s.pt.get(vpn).tag() == Tag::Disk {
                    drop(s);
                    // (As whoever touches it would.)
                    thread::reads(vpn as usize * PAGE);
                    at = vpn + 1;
                    continue;
                }
                let (_, stopped) = self.bring_range(&mut s, vpn, vpn + PIECE);
                drop(s);
                at = stopped;
                if stopped == vpn {
                    // An event is to be read first.
                    if !pause(&mut pauses) {
                        return false;
                    }
                }
            }
            if !any {
                return self.mark_lost();
            }
        }
        false
    }

    /// Puts the mark of a lost page, which the kernel keeps, wherever nobody has met it yet: there would be zeros. False when
    /// an event kept it from that.
    fn mark_lost(&self) -> bool {
        let (mut at, mut pauses) = (0, 0);
        loop {
            let mut s = self.state.lock();
            let Some(vpn) = s.pt.next_used(at) else { return true };
            if s.pt.get(vpn).tag() != Tag::Poisoned || self.poison(&mut s, vpn).is_ok() {
                at = vpn + 1;
                continue;
            }
            drop(s);
            if !pause(&mut pauses) {
                return false;
            }
        }
    }

    /// Ends all helpers but the ticker, which calls this.
    fn end_helpers(&self) {
        self.store_posted(&mut self.state.lock());
        self.stopping.store(true, SeqCst);
        self.wake_reclaim();
        await_end(self.reclaimer.load(Relaxed));
        self.crew.end();
        self.crew_tids().into_iter().for_each(await_end);
        // An event wakes the handler, which may sleep and has no other reason to look; the advice ends when it was read.
        let hole = match self.without_move {
            true => Some(self.layout.bells),
            false => self.state.lock().zone.alloc(Kind::Hole, 0).map(|slot| self.layout.slot(slot)),
        };
        if let Some(at) = hole {
            self.farewell.store(at, SeqCst);
            // SAFETY: nothing is there, and nobody uses it any more.
            unsafe { discard(at, PAGE) };
        }
        await_end(self.handler.load(Relaxed));
        self.end_swap();
    }
}

/// Waits a little for events to be read; false when that has been done too often.
fn pause(pauses: &mut u32) -> bool {
    *pauses += 1;
    thread::sleep_ns(PAUSE_NS);
    *pauses <= PAUSES
}

/// The first page from `at` on that is out.
fn next_out(s: &State, mut at: u64) -> Option<u64> {
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
    use crate::testing;
    use uzswap_mm::pagetable::Pte;

    /// The story: what was lost and not touched yet would have read as zeros once nobody served its faults any more.
    #[test]
    fn what_is_lost_is_told_of_later_too() {
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, 3);
        testing::put(p, at + PAGE, &[7; PAGE]);
        let first = (at / PAGE) as u64;
        p.state.lock().pt.set(first, Pte::new(Tag::Poisoned, 0));
        assert!(p.mark_lost());
        // (process_vm_readv meets what a touch would, without the signal.)
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
}

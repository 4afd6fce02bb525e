//! The handler thread: reads messages, keeps the faults that it cannot serve yet, and sleeps when there is nothing to do.
//!
//! ```text
//! message ─┬ event: applied                                       ┌───── reads of the swap file that have ended ◀─┐
//!          └ fault: on the list ─ its page on disk? ─ yes ─▶ a read is begun, the fault stays on the list ────────┘
//!                                      └ no ─▶ served (`fault`)
//! ```
//! A fault waits on the list for one of two things: an event that must be read first (the kernel answers EAGAIN), or a read from
//! disk (`swap::swapin`). Neither holds up other faults: each turn serves all that can be served, and faults of several threads
//! have several reads under way. With nothing left to serve the handler sleeps until there is a message or a read has ended, so
//! waiting for the disk costs no CPU time.
//!
//! Rules: with the pager's lock held the handler reads messages (see `fault`), plans reads, and installs what they brought.
//! Without it, it begins reads and waits for them.

use crate::calls::Waits;
use crate::fault::pauses::Pauses;
use crate::fault::placement::Helpers;
use crate::fault::{EventPending, Request};
use crate::fork::copies::{COPY_WAITS, WAIT_NS};
use crate::frames::arena::PAGE;
use crate::group::member::SIGNAL;
use crate::inject::Site;
use crate::pager::Pager;
use crate::state::State;
use crate::swap::{Reads, Waiting};
use core::sync::atomic::Ordering::*;
use uzswap_mm::pagetable::Tag;
use uzswap_sys::lock::{self, Guard};
use uzswap_sys::raw::Errno;
use uzswap_sys::thread;
use uzswap_sys::uffd::Message;

/// How often the handler looks at a full group again while faults wait for room (milliseconds).
const FULL_MS: i32 = 20;

/// How long a fault waits at most for the writer of the swap file when the limit is exceeded, and how long at a time
/// (nanoseconds).
const DISK_WAIT_NS: u64 = 1_000_000_000;
const DISK_LOOK_NS: u64 = 20_000_000;

/// How many faults a turn passes over at most: see `Handler::read`.
const PASSED_OVER_MOST: usize = 1000;

/// What the handler keeps between turns, and hands to its successor.
#[derive(Default)]
pub(crate) struct Handler {
    /// Faults that were read but not served yet, the oldest first.
    waiting: Vec<Waiting>,
    reads: Reads,
    /// Whether a fault must be tried again although no message may come: it waits for an event to be read first, or for room in
    /// the group.
    retry: bool,
    /// A page for which room must still be made: an unread event kept others from leaving.
    room_for: Option<u64>,
    /// Whether the handler must end, because the process is let go of.
    ended: bool,
    /// When to make a failed read again (monotonic nanoseconds).
    wake_at: Option<u64>,
    /// The slow write that faults wait for.
    slow: Option<SlowWrite>,
    /// How long this turn waited for the writer (nanoseconds).
    waited_ns: u64,
    pauses: Pauses,
}

/// A write to disk that takes long.
struct SlowWrite {
    /// Successful writes when the wait began.
    writes: u32,
    /// Since when faults wait for it in this way (monotonic nanoseconds).
    since: u64,
}

/// Prepares a thread to be the handler.
pub(crate) fn begin_handler() {
    thread::keep_io_priority();
    thread::allow_ticks();
    thread::wake_on_time();
}

impl Pager {
    /// The body of the first handler thread (`watch` starts others).
    pub fn handler_loop(&self) -> ! {
        self.may_leave_idle.store(thread::may_leave_idle_policy(), Relaxed);
        begin_handler();
        thread::set_idle_policy(0, true);
        self.signs.normal.store(false, SeqCst);
        self.stays_normal_if_ending();
        let mut handler = Box::new(Handler::default());
        {
            let s = self.state.lock();
            handler.waiting.reserve(1024);
            if s.swap.is_some() {
                handler.reads = Reads::new(self);
            }
        }
        self.serve_until_relieved(handler)
    }
}

impl Handler {
    /// Whether the process is let go of, so that the handler must end.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Reads a message, if there is one, and serves what can be served; sleeps if there is nothing to do.
    pub(crate) fn turn(&mut self, p: &Pager) {
        p.pause(&mut self.pauses);
        p.look_if_asked();
        let mut s = p.state.lock();
        self.take_asked(&mut s);
        let message = if p.inject(Site::Event).is_some() { Err(libc::EIO) } else { self.read(p, &s) };
        self.reads.look(p);
        let mut fault = false;
        match message {
            Ok(Some(Message::Fault { address, .. })) if p.without_move && p.is_of_remap(&mut s, address) => {}
            Ok(Some(Message::Fault { address, write, protected, tid })) => {
                fault = true;
                let r = Request::at(address, write, protected);
                p.stall.begin(r.vpn, p.counters().pgfault.load(Relaxed));
                s = self.take_fault(p, s, r, tid);
            }
            Ok(Some(event)) => {
                self.ended = p.is_farewell(&event);
                self.reads.count_message();
                self.drop_gone(p, &s, &event);
                p.event(&mut s, event);
            }
            Ok(None) if self.is_idle() => {
                drop(s);
                return self.sleep(p);
            }
            Ok(None) => {}
            Err(_) => {
                drop(s);
                return thread::sleep_ns(1_000_000);
            }
        }
        let waited = core::mem::take(&mut self.waited_ns);
        if waited > 0 {
            p.counters().stall_ns.fetch_add(waited, Relaxed);
        }
        p.hold_back(&s);
        if !self.waiting.is_empty() && (p.must_wait(&mut s) || self.waits_for_slow_disk(p, &s)) {
            p.calls.hold_back(Waits::Fault, false);
            self.serve_own(p, &mut s);
            self.retry = true;
            drop(s);
            if self.reads.any_planned() {
                self.reads.begin(p);
            }
            p.wake_reclaim();
            p.uffd().wait(FULL_MS);
            return;
        }
        let own = self.waiting.last().is_some_and(|waiting| waiting.own);
        let throttle = if fault && !own { p.throttle_ns(&s) } else { 0 };
        if throttle > 0 {
            drop(s);
            thread::sleep_ns(throttle);
            p.counters().stall_ns.fetch_add(throttle, Relaxed);
            s = p.state.lock();
        }
        if let Some(vpn) = self.room_for.filter(|_| !fault) {
            self.make_room(p, &mut s, vpn);
        }
        p.land(&mut s, &mut self.reads, &mut self.waiting);
        self.serve_waiting(p, &mut s);
        p.signs.owes.store(!self.waiting.is_empty(), Relaxed);
        if fault {
            let stalled = p.stall.end(throttle + waited, !self.waiting.is_empty());
            p.counters().stall_ns.fetch_add(stalled, Relaxed);
        }
        p.signs.progress.fetch_add(1, Relaxed);
        p.read_ahead(&s, &mut self.reads);
        let reclaim = p.needs_reclaim(&s);
        drop(s);
        if self.reads.any_planned() {
            self.reads.begin(p);
        }
        if reclaim {
            p.wake_reclaim();
        } else if self.retry {
            // The thread whose event is awaited has been woken by our read; it must run before MOVE works.
            thread::sleep_ns(10_000);
        }
    }

    /// Reads a message. While faults wait for an event, it passes over those that were read before, but notes if the reclaim
    /// thread waits for one of them too. It also passes over writes to pages that are being dropped: they wait until that is done
    /// (`read_only`).
    ///
    /// The story: a thread is given a signal while another signal waits for it. While the kernel writes the signal's frame to a
    /// page that is out, the thread does not sleep: the kernel retries at once, and queues a fault each time. It hands out faults
    /// before events, so with one message a turn the handler never reached the event of an `mremap`, without which no page may
    /// come. `torture` stood still for minutes, in a child. A drop of read-only memory waits for its event too, and a stack on it
    /// that was written to meanwhile held it up for up to eleven seconds.
    fn read(&mut self, p: &Pager, s: &State) -> Result<Option<Message>, Errno> {
        let mut message = p.uffd().read();
        for _ in 0..PASSED_OVER_MOST {
            let Ok(Some(Message::Fault { address, write, protected, tid })) = message else { break };
            let r = Request::at(address, write, protected);
            match self.waiting.iter_mut().find(|waiting| self.retry && waiting.r == r) {
                Some(same) => {
                    same.own |= p.is_reclaimer(tid);
                    same.tid = if p.calls.are_held_by(tid) { tid } else { same.tid };
                }
                None if r.protected && s.leaving.drops(r.vpn) => {}
                None => break,
            }
            message = p.uffd().read();
        }
        message
    }

    /// Puts pages that are wanted although nobody touched them on the list, like faults.
    fn take_asked(&mut self, s: &mut State) {
        for vpn in s.asked.drain(..) {
            self.waiting.push(Waiting::asked(vpn));
            self.retry = true;
        }
    }

    /// Takes a fault that was read: asks for what it needs from disk, and makes room for it meanwhile.
    fn take_fault<'a>(&mut self, p: &'a Pager, mut s: Guard<'a, State>, r: Request, tid: u32) -> Guard<'a, State> {
        self.reads.count_message();
        let own = p.is_reclaimer(tid);
        let mut waiting = Waiting::new(r);
        (waiting.own, waiting.tid) = (own, tid);
        p.want(&s, &mut self.reads, &mut waiting);
        self.waiting.push(waiting);
        p.signs.owes.store(true, Relaxed);
        p.signs.faulted.store(tid, Relaxed);
        if self.reads.any_planned() {
            drop(s);
            self.reads.begin(p);
            s = p.state.lock();
        }
        if s.placement.due()
            && let Some(cpu) = thread::cpu_of(tid)
        {
            let (ticker, reclaimer) = (p.ticker.load(Relaxed), p.reclaimer.load(Relaxed));
            let helpers = Helpers {
                handler: Some(0),
                ticker,
                reclaimer,
                crew: p.crew_tids(),
                idles: p.may_leave_idle.load(Relaxed),
            };
            let busy = p.has_kin() || p.reclaimer_is_wanted(&s, p.excess(&s));
            s.placement.fault_on(cpu, tid, helpers, busy);
            p.stays_normal_if_ending();
        }
        if r.protected && !own && p.has_kin() {
            let alone = p.is_alone(r.vpn as usize * PAGE);
            if alone {
                p.kin.seems_alone();
            }
            s = self.wait_for_reclaim(p, s, if alone { p.much_over() } else { 0 });
        }
        self.make_room(p, &mut s, r.vpn);
        self.wait_for_writer(p, s, r.vpn)
    }

    /// Waits a moment for reclaim if memory is shared since a fork and the limit is exceeded by more than `borne`: see `copies`.
    fn wait_for_reclaim<'a>(&mut self, p: &'a Pager, mut s: Guard<'a, State>, borne: isize) -> Guard<'a, State> {
        for _ in 0..COPY_WAITS {
            if !p.has_kin() {
                break;
            }
            s.rss = p.rss_now(&s);
            if p.excess(&s) <= borne {
                break;
            }
            drop(s);
            p.wake_reclaim();
            thread::sleep_ns(WAIT_NS);
            self.waited_ns += WAIT_NS;
            s = p.state.lock();
        }
        s
    }

    /// Makes room for a fault, and again in the next turn if an unread event kept pages from leaving.
    fn make_room(&mut self, p: &Pager, s: &mut State, vpn: u64) {
        self.room_for = p.make_room(s, vpn).err().map(|EventPending| vpn);
    }

    /// Waits until the swap file's writer has made room, if the limit is exceeded and the writer helps. If it has written nothing
    /// after the longest wait, and is not writing, the wait was in vain, and the disk counts as no help. If it is still at one
    /// write, the disk is slow, and the wait goes on in another way.
    ///
    /// The story: each time that the writer got on counted as a wait of full length. Where it gave many objects their second
    /// chance, or had no CPU of its own, fifty such waits were over before it had written anything. The disk then counted as no
    /// help, the group was called full, and all that was read back stayed in memory: up to 44 MiB under a limit of 16.
    fn wait_for_writer<'a>(&mut self, p: &'a Pager, mut s: Guard<'a, State>, vpn: u64) -> Guard<'a, State> {
        let (mut until, writes, mut was_writing) = (None, p.tier.writes.load(Relaxed), false);
        while self.slow.is_none() && p.waits_for_disk(&s) {
            let (now, writing) = (thread::now_ns(), p.disk_is_writing());
            // It may be between two writes.
            let at_work = core::mem::replace(&mut was_writing, writing) || writing;
            if now >= *until.get_or_insert(now + DISK_WAIT_NS) {
                match p.tier.writes.load(Relaxed) == writes {
                    true if at_work => self.slow = Some(SlowWrite { writes, since: now }),
                    true => p.tier.helps.store(false, Relaxed),
                    false => {}
                }
                break;
            }
            p.note_slow_disk();
            let seen = p.tier.progress.load(Acquire);
            p.poke_writer(&s);
            drop(s);
            lock::futex_wait(&p.tier.progress, seen, Some(DISK_LOOK_NS), false);
            s = p.state.lock();
            self.waited_ns += thread::now_ns().saturating_sub(now);
            self.make_room(p, &mut s, vpn);
        }
        s
    }

    /// Whether faults still wait for a slow disk: until a write has succeeded (or failed), there is room without it, or the disk
    /// stands still. Events are read meanwhile.
    ///
    /// The story: a disk whose writes took longer than a fault waits, like a cloud's that has used up its credit, counted as no
    /// help until one of them had ended. The group was called full, and with `--on-full=kill` the largest member was killed.
    fn waits_for_slow_disk(&mut self, p: &Pager, s: &State) -> bool {
        let Some(slow) = &self.slow else { return false };
        if slow.writes == p.tier.writes.load(Relaxed) && p.disk_is_writing() && p.waits_for_disk(s) {
            p.note_slow_disk();
            p.poke_writer(s);
            return true;
        }
        p.counters().stall_ns.fetch_add(thread::now_ns().saturating_sub(slow.since), Relaxed);
        self.slow = None;
        false
    }

    /// Serves the faults of threads that room depends on, while others must wait for room: the reclaim thread, which met a page
    /// that is out while it un-shares what may leave then, and threads in a mapping call, as read-only and shared memory leaves
    /// between calls.
    ///
    /// The story: they waited with the others, and so, with `--on-full=wait`, did the whole program, forever.
    fn serve_own(&mut self, p: &Pager, s: &mut State) {
        let first = |waiting: &Waiting| waiting.own || p.keeps_from_room(waiting.tid);
        if self.waiting.iter().any(first) {
            p.land(s, &mut self.reads, &mut self.waiting);
            self.serve_those(p, s, first);
        }
    }

    /// Serves what can be served now, and has pages on disk read.
    fn serve_waiting(&mut self, p: &Pager, s: &mut State) {
        self.serve_those(p, s, |_| true);
    }

    /// The same for those faults that are `served`.
    fn serve_those(&mut self, p: &Pager, s: &mut State, served: impl Fn(&Waiting) -> bool) {
        (self.retry, self.wake_at) = (false, None);
        // Each fault asks for what it needs here.
        self.reads.forget_given_up();
        if !s.withdrawn.is_empty() {
            self.drop_withdrawn(p, s);
        }
        let mut i = 0;
        while i < self.waiting.len() {
            let waiting = &mut self.waiting[i];
            if !served(waiting) {
                i += 1;
                continue;
            }
            if s.pt.get(waiting.r.vpn).tag() == Tag::Disk {
                let later = p.want(s, &mut self.reads, waiting);
                self.wake_at = self.wake_at.into_iter().chain(later).min();
                i += 1;
                continue;
            }
            if p.serve(s, waiting.r).is_err() {
                self.retry = true;
                return p.calls.hold_back(Waits::Fault, true);
            }
            self.waiting.remove(i);
        }
        p.calls.hold_back(Waits::Fault, false);
    }

    /// Drops faults on memory that was ceded to the program since they were read. Their threads fault again.
    fn drop_withdrawn(&mut self, p: &Pager, s: &mut State) {
        let withdrawn = core::mem::take(&mut s.withdrawn);
        self.withdraw(p, |vpn| withdrawn.iter().any(|(from, to)| (*from..*to).contains(&vpn)));
    }

    /// Drops faults on memory that is gone or was moved since they were read, and likewise pages there that were asked for.
    ///
    /// The story: such a fault was served with a page of zeros, whatever was there by then. The thread that waited for the disk
    /// may have been interrupted, or nobody may have touched the page, as a command had asked for it. New memory there that the
    /// program had registered with a userfaultfd of its own was filled in this way without its handler being asked, and guard
    /// pages lost their guards.
    fn drop_gone(&mut self, p: &Pager, s: &State, event: &Message) {
        let (start, end) = match *event {
            Message::Unmapped { start, end } if s.remapping.is_of(start, end) => return,
            Message::Removed { start, end } | Message::Unmapped { start, end } => (start, end),
            Message::Remap { from, len, .. } => (from, from + p.calls.moved_bytes(from, len)),
            Message::Fault { .. } | Message::Unknown(_) => return,
        };
        self.withdraw(p, |vpn| (start..end).contains(&(vpn as usize * PAGE)));
    }

    /// Drops faults on the pages that are `gone`. Their threads fault again.
    fn withdraw(&mut self, p: &Pager, gone: impl Fn(u64) -> bool) {
        self.waiting.retain(|waiting| {
            let stays = !gone(waiting.r.vpn);
            if !stays {
                p.uffd().wake(waiting.r.vpn as usize * PAGE, PAGE);
            }
            stays
        });
    }

    /// Whether there is nothing to do before a message comes or a read ends.
    fn is_idle(&self) -> bool {
        let due = || self.wake_at.is_some_and(|at| thread::now_ns() >= at);
        // A read that came in part is planned again for the rest.
        let reads = &self.reads;
        !self.retry && !reads.any_ended() && !reads.any_planned() && !reads.any_given_up() && !due()
    }

    fn sleep(&mut self, p: &Pager) {
        let until = self.wake_at.into_iter().chain(self.reads.look_at()).min();
        let ms = until.map_or(-1, |at| at.saturating_sub(thread::now_ns()).div_ceil(1_000_000) as i32);
        p.signs.asleep.store(true, SeqCst);
        let [_, asked] = p.uffd().wait_or([self.reads.fd(), p.files.signals.load(Relaxed)], ms);
        p.signs.asleep.store(false, SeqCst);
        // Take the signal, whichever thread then looks: left pending, it would keep this thread awake.
        if asked {
            thread::take_signal(SIGNAL, Some(0));
        }
        self.reads.slept();
        if !p.signs.watched.swap(true, SeqCst) {
            p.poke_ticker();
        }
        let mut s = p.state.lock();
        // A program that waits for the disk sleeps where its last fault was served.
        if self.waiting.is_empty() {
            s.placement.slept();
        }
        // In any case: it would not sleep again while it is time to.
        self.reads.give_back();
    }
}

#[cfg(test)]
mod tests;

//! The program's own `mremap` on a kernel without MOVE.
//!
//! There the userfaultfd does not ask to be told of moves (why: `without_move`), and the kernel drops the registration of
//! what moves: its missing pages would read as zeros. So libc's call, which runs alone anyway (`calls`), is made good before
//! it returns:
//!
//! ```text
//! thread of the program                              handler
//! before_remap: "this may move" ── touches a bell ──fault──▶ ends the registration of the range
//! mremap                           ◀── fills the bell ──────
//! after_remap: "it is there now" ── touches a bell ──fault──▶ registers what is there, moves what is known of the pages,
//!                                  ◀── fills the bell ────── wakes who has touched the old place meanwhile
//! ```
//! The registration is ended first, since the kernel drops that of a *mapping*: where what moves becomes one with memory
//! beside its new place, which it does when that is registered too, that would be dropped as well. (So were pages beside what
//! had moved read as zeros, in one of ten runs of `model`.) Memory of several mappings, which the kernel refuses to move when
//! it is registered, stays so.
//!
//! Only the helpers have the userfaultfd, so the thread cannot register by itself. A *bell* is a page of uzswap's that is
//! registered and missing: touching one is how a thread calls the handler, at the cost of one fault. There are two, so that
//! the one not in use can be made missing again.
//!
//! Nor may what is not registered meanwhile be filled with a huge page, be it for a fault beside it or by khugepaged: where
//! pages are out it would be zeros. So the process has none for the time of the call.
//!
//! While a range moves no page is taken anywhere, since the call holds the lock of mapping calls alone. Who touches what is
//! moving has no answer until the call is done, but once its registration has ended sees zeros where pages are out: no
//! program may do so, as it cannot know whether its memory is still there. (A call that moves nothing is left alone.)
//!
//! When the new place cannot be registered the process is ended with a message. `mremap` made by instructions of the
//! program's own is not seen: what was out of the memory that it moves reads as zeros.

use crate::calls::events;
use crate::discover::no_longer_managed;
use crate::frames::arena::{BELL_BYTES, PAGE, discard, remap as map_anew};
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_sys::raw::Errno;
use uzswap_sys::sys;

/// How often the handler is called at most for one answer.
const CALLS_MOST: usize = 1000;

/// A call of `mremap`.
#[derive(Clone, Copy, Debug)]
pub struct Remap {
    /// Where the memory is.
    pub from: usize,
    /// How long it is.
    pub old_len: usize,
    /// How long it is to be.
    pub new_len: usize,
    /// Whether it may move.
    pub moves: bool,
    /// Whether its old place stays mapped.
    pub keeps: bool,
}

impl Remap {
    /// A call with these arguments, if they make sense.
    pub fn of(from: usize, old_len: usize, new_len: usize, flags: usize) -> Option<Self> {
        const DONTUNMAP: usize = 4;
        let len = |len: usize| len.checked_next_multiple_of(PAGE);
        let (moves, keeps) = (flags & libc::MREMAP_MAYMOVE as usize != 0, flags & DONTUNMAP != 0);
        let call = Self { from, old_len: len(old_len)?, new_len: len(new_len)?, moves, keeps };
        (from.is_multiple_of(PAGE) && call.old_len > 0 && from.checked_add(call.old_len).is_some()).then_some(call)
    }

    /// The end of what moves, if it moves. (What a shorter mapping loses is unmapped first.)
    fn end(&self) -> usize {
        self.from + self.old_len.min(self.new_len)
    }
}

/// What the handler is to do about a call.
#[derive(Clone, Copy)]
enum Ask {
    /// Its memory is about to move.
    Release,
    /// It has ended: the new address, None when it failed.
    Follow(Option<usize>),
}

/// What is being moved.
#[derive(Default)]
pub struct Remapping {
    /// The call under way.
    call: Option<Remap>,
    /// Whether the registration of its memory was ended for it.
    released: bool,
    /// Whether huge pages were forbidden for it.
    small: bool,
    /// What is asked of the handler.
    ask: Option<Ask>,
    /// Whether that could not be done.
    failed: bool,
    /// The bell to use next.
    bell: usize,
}

impl Remapping {
    /// Whether there is a call under way: nothing is brought but what is touched, lest it be what is moving.
    pub fn is_under_way(&self) -> bool {
        self.call.is_some()
    }

    /// Whether a page is moving.
    pub(crate) fn has(&self, vpn: u64) -> bool {
        self.call.is_some_and(|c| (c.from..c.from + c.old_len).contains(&(vpn as usize * PAGE)))
    }

    /// Whether unmapping a range is a part of the call under way.
    pub fn is_of(&self, start: usize, end: usize) -> bool {
        self.call.is_some_and(|c| c.from <= start && end <= c.end())
    }
}

impl Pager {
    /// Before `mremap`, in the calling thread, with all signals blocked and the calls' lock held alone. Whether
    /// [`Pager::after_remap`] must follow.
    pub fn before_remap(&self, call: Remap) -> bool {
        if !self.without_move || !self.engaged.load(Acquire) || !call.moves {
            return false;
        }
        self.lock_in_hook().remapping.call = Some(call);
        // (Where that fails what follows does.)
        self.ask(Ask::Release);
        let small = thp_disabled(None) == Ok(0) && thp_disabled(Some(1)).is_ok();
        self.lock_in_hook().remapping.small = small;
        true
    }

    /// After it: `to` is what it returned, None when it failed. False when memory could not be registered.
    pub fn after_remap(&self, to: Option<usize>) -> bool {
        let done = self.ask(Ask::Follow(to));
        if core::mem::take(&mut self.lock_in_hook().remapping.small) {
            let _ = thp_disabled(Some(0));
        }
        done
    }

    /// Has the handler do something; whether it could.
    fn ask(&self, what: Ask) -> bool {
        self.lock_in_hook().remapping.ask = Some(what);
        for _ in 0..CALLS_MOST {
            let bell = {
                let mut s = self.lock_in_hook();
                if s.remapping.ask.is_none() {
                    return !core::mem::take(&mut s.remapping.failed);
                }
                s.remapping.bell ^= 1;
                self.layout.bells + s.remapping.bell * PAGE
            };
            // SAFETY: a page of ours; where it is missing the handler fills it.
            unsafe { (bell as *const u8).read_volatile() };
        }
        false
    }

    /// Makes the bells, in a process that has no use of them yet, or in a forked child.
    pub(crate) fn hang_bells(&self) -> Result<(), Errno> {
        // SAFETY: nobody uses them, and they are not registered.
        if !unsafe { map_anew(self.layout.bells, BELL_BYTES) } {
            return Err(libc::ENOMEM);
        }
        self.uffd().register(self.layout.bells, BELL_BYTES)
    }

    /// Whether a fault is a call by a bell, which is answered, or one in a place that memory is moving from, which waits.
    pub(crate) fn is_of_remap(&self, s: &mut State, address: usize) -> bool {
        let bells = self.layout.bells;
        if (bells..bells + BELL_BYTES).contains(&address) {
            self.answer(s, address);
            return true;
        }
        s.remapping.has((address / PAGE) as u64)
    }

    /// Makes good what a thread has done that rings, and lets it go on.
    fn answer(&self, s: &mut State, bell: usize) {
        match (s.remapping.ask.take(), s.remapping.call) {
            (Some(Ask::Release), Some(call)) => {
                let (from, len) = (call.from, call.old_len);
                s.remapping.released = self.uffd().is_registered(from, len, self.layout.unreadable()) != Ok(false)
                    && self.uffd().unregister(from, len).is_ok();
            }
            (Some(Ask::Follow(to)), Some(call)) => {
                s.remapping.failed = !self.follow(s, call, to);
                s.remapping.call = None;
                self.uffd().wake(call.from, call.old_len);
            }
            _ => {}
        }
        // The other one is ready for the next call.
        let other = self.layout.bells + ((bell - self.layout.bells) ^ PAGE);
        let uffd = self.uffd();
        if uffd.unregister(other, PAGE).is_ok() {
            // SAFETY: nobody needs what is on a bell.
            unsafe { discard(other, PAGE) };
            s.remapping.failed |= uffd.register(other, PAGE).is_err();
        }
        if let Err((_, e)) = uffd.zero(bell, PAGE)
            && e != libc::EEXIST
        {
            // (While an event is unread: it rings again.)
            uffd.wake(bell, PAGE);
        }
    }

    /// The memory of a call is at `to` now, or where it was.
    fn follow(&self, s: &mut State, call: Remap, to: Option<usize>) -> bool {
        let released = core::mem::take(&mut s.remapping.released);
        let Some(to) = to.filter(|to| *to != call.from) else {
            // (In place it may have become shorter or longer.)
            let len = to.map_or(call.old_len, |_| call.new_len);
            if len < call.old_len {
                self.forget_end(s, call);
            }
            return !released || self.register(call.from, len).is_ok() || self.scan(s).is_ok();
        };
        let known = released || s.knows_any(call.from, call.from + call.old_len);
        if known && self.register(to, call.new_len).is_err() {
            return false;
        }
        let pages = ((call.end() - call.from) / PAGE) as u64;
        events::remap(s, (call.from / PAGE) as u64, (to / PAGE) as u64, pages);
        self.forget_end(s, call);
        if call.keeps {
            return !released || self.register(call.from, call.old_len).is_ok();
        }
        no_longer_managed(s, call.from, call.from + call.old_len);
        no_longer_managed(s, to, to + call.new_len);
        if known {
            s.managed.push((to, to + call.new_len));
        }
        true
    }

    /// Memory became shorter. Its end was not registered when it was unmapped, so nobody was told.
    fn forget_end(&self, s: &mut State, call: Remap) {
        let (start, end) = (call.end(), call.from + call.old_len);
        if start < end {
            events::forget_range(s, (start / PAGE) as u64, (end / PAGE) as u64);
            no_longer_managed(s, start, end);
        }
    }
}

/// Whether the process may have no huge pages; with `set`, forbids or allows them.
fn thp_disabled(set: Option<usize>) -> Result<usize, Errno> {
    let (what, value) = match set {
        Some(value) => (libc::PR_SET_THP_DISABLE, value),
        None => (libc::PR_GET_THP_DISABLE, 0),
    };
    // SAFETY: numbers only.
    unsafe { sys!(libc::SYS_prctl, what, value, 0, 0, 0) }
}

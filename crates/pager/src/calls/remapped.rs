//! Follows up the program's own `mremap` on a kernel without MOVE.
//!
//! There the userfaultfd does not ask for move events (`without_move` says why), and the kernel drops the registration of memory
//! that moves: its missing pages would read as zeros. libc's call runs alone anyway (`calls`), so it is followed up before it
//! returns:
//!
//! ```text
//! thread of the program                              handler
//! before_remap: "this may move" ── touches a bell ──fault──▶ ends the registration of the range
//! mremap                           ◀── fills the bell ──────
//! after_remap: "it is there now" ── touches a bell ──fault──▶ registers what is there, moves what is known of the pages,
//!                                  ◀── fills the bell ────── wakes threads that touched the old place meanwhile
//! ```
//! The registration is ended first, since the kernel drops that of a whole *mapping*. If the memory merges with a registered
//! neighbour at its new place, the neighbour's registration would be dropped as well. (That is how pages beside memory that had
//! moved read as zeros, in one of ten runs of `model`.) Memory of several mappings, which the kernel refuses to move while it is
//! registered, stays registered.
//!
//! Only the helpers have the userfaultfd, so the thread cannot register by itself. A *bell* is a page of uzswap's that is
//! registered and missing: a thread calls the handler by touching one, at the cost of one fault. There are two, so that the one
//! not in use can be made missing again.
//!
//! Memory that is unregistered meanwhile must not be filled with a huge page either, whether by a fault beside it or by
//! khugepaged: pages that are out would be zeros in it. So the process gets no huge pages during the call.
//!
//! While a range moves no page is taken anywhere, since the call holds the lock of mapping calls alone. A thread that touches the
//! moving range gets no answer until the call is done; once the registration has ended, it sees zeros where pages are out. No
//! program may do that, as it cannot know whether its memory is still there. (A call that moves nothing is left alone.)
//!
//! If the new place cannot be registered the process is ended with a message. An `mremap` made by the program's own instructions
//! is not seen: pages that are out of the memory it moves read as zeros.

use crate::calls::events;
use crate::discover::no_longer_managed;
use crate::frames::arena::{BELL_BYTES, PAGE, discard, remap as map_anew};
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_sys::raw::Errno;
use uzswap_sys::sys;

/// How often the handler is called at most to get one answer.
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
    /// Whether the memory may move.
    pub moves: bool,
    /// Whether the old place stays mapped.
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

    /// End of the part that moves, if it moves. (A call that shortens a mapping unmaps the rest first.)
    fn end(&self) -> usize {
        self.from + self.old_len.min(self.new_len)
    }
}

/// What the handler is asked to do about a call.
#[derive(Clone, Copy)]
enum Ask {
    /// Release the memory, which is about to move.
    Release,
    /// Follow the call, which has ended: the new address, or None if it failed.
    Follow(Option<usize>),
}

/// State of the `mremap` that is followed up.
#[derive(Default)]
pub struct Remapping {
    /// The call under way.
    call: Option<Remap>,
    /// Whether the registration of its memory was ended for it.
    released: bool,
    /// Whether huge pages were forbidden for it.
    small: bool,
    /// The request to the handler.
    ask: Option<Ask>,
    /// Whether that request failed.
    failed: bool,
    /// The bell to use next.
    bell: usize,
}

impl Remapping {
    /// Whether a call is under way. Meanwhile only touched pages are brought in, since others may be moving.
    pub fn is_under_way(&self) -> bool {
        self.call.is_some()
    }

    /// Whether a page is in the range that moves.
    pub(crate) fn has(&self, vpn: u64) -> bool {
        self.call.is_some_and(|c| (c.from..c.from + c.old_len).contains(&(vpn as usize * PAGE)))
    }

    /// Whether unmapping a range is part of the call under way.
    pub fn is_of(&self, start: usize, end: usize) -> bool {
        self.call.is_some_and(|c| c.from <= start && end <= c.end())
    }
}

impl Pager {
    /// Before `mremap`: runs in the calling thread, with all signals blocked and the calls' lock held alone. Returns whether
    /// [`Pager::after_remap`] must follow.
    pub fn before_remap(&self, call: Remap) -> bool {
        if !self.without_move || !self.engaged.load(Acquire) || !call.moves {
            return false;
        }
        self.lock_in_hook().remapping.call = Some(call);
        // If this fails, so does the call that follows.
        self.ask(Ask::Release);
        let small = thp_disabled(None) == Ok(0) && thp_disabled(Some(1)).is_ok();
        self.lock_in_hook().remapping.small = small;
        true
    }

    /// After `mremap`: `to` is what it returned, None if it failed; false if memory could not be registered.
    pub fn after_remap(&self, to: Option<usize>) -> bool {
        let done = self.ask(Ask::Follow(to));
        if core::mem::take(&mut self.lock_in_hook().remapping.small) {
            let _ = thp_disabled(Some(0));
        }
        done
    }

    /// Asks the handler to do something; returns whether it could.
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
            // SAFETY: a page of ours; the handler fills it where it is missing.
            unsafe { (bell as *const u8).read_volatile() };
        }
        false
    }

    /// Makes the bells, in a process that has none yet, or in a forked child.
    pub(crate) fn hang_bells(&self) -> Result<(), Errno> {
        // SAFETY: nobody uses them, and they are not registered.
        if !unsafe { map_anew(self.layout.bells, BELL_BYTES) } {
            return Err(libc::ENOMEM);
        }
        self.uffd().register(self.layout.bells, BELL_BYTES)
    }

    /// Whether a fault is the ring of a bell, which is answered here, or lies in a range that is moving, in which case it waits.
    pub(crate) fn is_of_remap(&self, s: &mut State, address: usize) -> bool {
        let bells = self.layout.bells;
        if (bells..bells + BELL_BYTES).contains(&address) {
            self.answer(s, address);
            return true;
        }
        s.remapping.has((address / PAGE) as u64)
    }

    /// Does what the ringing thread asks for, and lets that thread go on.
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
        // Make the other bell ready for the next call.
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
            // An event is unread: the thread rings again.
            uffd.wake(bell, PAGE);
        }
    }

    /// Follows a call whose memory is at `to` now, or still where it was.
    fn follow(&self, s: &mut State, call: Remap, to: Option<usize>) -> bool {
        let released = core::mem::take(&mut s.remapping.released);
        let Some(to) = to.filter(|to| *to != call.from) else {
            // It may have become shorter or longer in place.
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

    /// The memory became shorter. Its end was not registered when it was unmapped, so no event reports it.
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

//! Applies events: what the program did to its mappings.
//!
//! When a range is unmapped, or its contents are dropped by madvise, everything known of it is forgotten: what appears at that
//! address next reads as zeros. Between a *remove* event and the kernel's own zap, old pages are still there. Nevertheless no
//! stale page is evicted and brought back: they are no longer listed, a fault can only be on a page without old data, and a newly
//! registered range is swept only under the same hold of the lock in which it was registered.

use crate::discover::no_longer_managed;
use crate::frames::arena::PAGE;
use crate::pager::Pager;
use crate::pool::relocate;
use crate::state::State;
use uzswap_mm::lru::Entry;
use uzswap_mm::lru::List;
use uzswap_mm::pagetable::{ADDRESS_SPACE_PAGES, Pte, Tag};
use uzswap_mm::trace::{Kind, Record};
use uzswap_sys::uffd::Message;
use uzswap_sys::{maps, raw};

impl Pager {
    /// Applies an event.
    pub fn event(&self, s: &mut State, message: Message) {
        match message {
            Message::Removed { start, end } if s.leaving.is_own(start, end) => {}
            Message::Removed { start, end } => {
                forget_range(s, (start / PAGE) as u64, end.div_ceil(PAGE) as u64);
                self.wake_waiting(s, start, end);
            }
            // Its contents are elsewhere by now: see `remapped`.
            Message::Unmapped { start, end } if s.remapping.is_of(start, end) => {}
            Message::Unmapped { start, end } => {
                forget_range(s, (start / PAGE) as u64, end.div_ceil(PAGE) as u64);
                no_longer_managed(s, start, end);
                self.wake_waiting(s, start, end);
            }
            Message::Remap { from, to, len } => {
                let len = self.calls.moved_bytes(from, len);
                remap(s, (from / PAGE) as u64, (to / PAGE) as u64, len.div_ceil(PAGE) as u64);
                no_longer_managed(s, from, from + len);
                self.wake_waiting(s, from, from + len);
            }
            Message::Fault { .. } | Message::Unknown(_) => {}
        }
    }

    /// If a child that shares this memory was killed in a call, forgets what is no longer registered: the event of that call was
    /// never sent ([`crate::calls::holders`]). Calls must be stopped. (Where such a child moved memory to by `mremap` stays
    /// unknown, to its parent as well.)
    ///
    /// The story: children of a program were killed while they unmapped memory. The program read the old contents in what it
    /// mapped there next, and zeros where it had written to that.
    pub(crate) fn mend_torn(&self, s: &mut State) {
        if !self.calls.take_torn() {
            return;
        }
        let mut text = Vec::with_capacity(1 << 20);
        if raw::read_file(b"/proc/thread-self/smaps\0", &mut text).is_err() {
            return self.calls.stay_torn();
        }
        let mut gone = s.managed.clone();
        maps::flagged(&text, maps::REGISTERED).for_each(|(start, end)| gone.cut(start, end));
        for (start, end) in gone.iter() {
            self.event(s, Message::Unmapped { start, end });
        }
    }
}

/// Pages forgotten or moved at a time. What is collected about them is in the heap meanwhile, and counts.
const AT_A_TIME: u64 = 1 << 16;

/// Moves all that is known of `pages` pages to their new addresses.
pub(crate) fn remap(s: &mut State, from: u64, to: u64, pages: u64) {
    if s.recorder.is_some() {
        note_move(s, from, to, pages);
    }
    for at in (0..pages).step_by(AT_A_TIME as usize) {
        remap_some(s, from + at, to + at, (pages - at).min(AT_A_TIME));
    }
    s.tidy_page_map();
}

fn remap_some(s: &mut State, from: u64, to: u64, pages: u64) {
    let (mut moved, mut clean, mut protected) = (Vec::new(), Vec::new(), Vec::new());
    if s.protects() {
        let mut at = from;
        while let Some(vpn) = s.pt.next_used(at).filter(|vpn| *vpn < from + pages) {
            if s.pt.is_clean(vpn) {
                clean.push(vpn);
            }
            if s.pt.is_protected(vpn) {
                protected.push(vpn);
            }
            at = vpn + 1;
        }
    }
    s.pt.clear(from, from + pages, |vpn, pte| moved.push((vpn, pte)));
    let mut listed = None;
    for (vpn, pte) in moved {
        let target = vpn - from + to;
        // This comes before the entry is set, so that no reader of the page map sees a page as written that is not.
        if clean.binary_search(&vpn).is_ok() {
            s.pt.set_clean(target, true);
        }
        if protected.binary_search(&vpn).is_ok() {
            s.pt.set_protected(target, true);
        }
        // A kept copy is found by the page's address, which changes; so the copy goes.
        if let Some(handle) = pte.copy() {
            let index = s.copy_index(vpn, handle);
            s.release(handle, index);
        }
        match pte.tag() {
            Tag::Resident => {
                s.resident -= 1;
                s.list_resident(target, 1, List::Inactive, |_| None);
            }
            Tag::Staged => {
                s.pt.set(target, Pte::new(Tag::Staged, pte.aux()));
                s.zone.set_user(pte.aux(), target);
                s.lru.staged.push(Entry::new(target, 0, 0));
            }
            // The compressing thread looks for the page at its old address; note the new one for it.
            Tag::Busy => {
                s.moved_busy.retain(|(slot, _)| *slot != pte.aux());
                s.moved_busy.push((pte.aux(), target));
                s.pt.set(target, Pte::new(Tag::Busy, pte.aux()));
            }
            Tag::None => {}
            Tag::Compressed => {
                s.pt.set(target, pte);
                relocate::moved(s, target, pte);
                // The shrinker finds an object by where its first page is or would be (the program may have that page). A block
                // is listed once, except where another's pages lie among its own: of equal entries one counts.
                if listed.replace(pte.handle()) != Some(pte.handle())
                    && let Some(first) = target.checked_sub(pte.index() as u64)
                {
                    s.entered_pool(first, pte.handle());
                }
            }
            Tag::Disk | Tag::Zero | Tag::Poisoned => s.pt.set(target, pte),
        }
    }
}

/// Forgets all that is known of the program's memory, because it is no longer managed, or could not come to be. What becomes of
/// it from now on is unknown too.
///
/// The story: where engaging failed at first, the next try took what was found then for managed, and did not register it. Pages
/// taken out of it read as zeros.
pub(crate) fn forget_all(s: &mut State) {
    forget_range(s, 0, ADDRESS_SPACE_PAGES);
    s.managed.clear();
}

/// Forgets all that is known of the pages `[from, to)`.
pub(crate) fn forget_range(s: &mut State, from: u64, to: u64) {
    let (mut at, mut gone) = (from, Vec::new());
    // The range itself may be terabytes of nothing.
    while let Some(start) = s.pt.next_known(at).filter(|vpn| *vpn < to) {
        at = to.min((start / AT_A_TIME + 1) * AT_A_TIME);
        s.pt.clear(start, at, |vpn, pte| gone.push((vpn, pte)));
        if let (Some((first, _)), Some((last, _))) = (gone.first(), gone.last()) {
            s.note_pages(Kind::Free, *first, (last - first) as usize + 1);
        }
        for (vpn, pte) in gone.drain(..) {
            s.forget(vpn, pte);
        }
    }
    s.tidy_page_map();
}

fn note_move(s: &State, from: u64, to: u64, pages: u64) {
    for at in (0..pages).step_by(0xffff) {
        let n = (pages - at).min(0xffff) as usize;
        s.note(Record::pages(Kind::MoveFrom, from + at, n));
        s.note(Record::pages(Kind::MoveTo, to + at, n));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    /// See `Calls::moved_bytes`: what kernels before 6.15 report of a call that moves and shrinks.
    #[test]
    fn what_a_shrinking_move_leaves_out_does_not_move() {
        const N: u64 = 16;
        let p = testing::pager(16 << 20);
        let mut s = p.state.lock();
        let (from, to) = (1u64 << 20, 1u64 << 21);
        let zeros = |s: &mut State, at: u64, n: u64| {
            (at..at + n).for_each(|vpn| s.pt.set(vpn, Pte::new(Tag::Zero, 0)));
            s.zeros += n as usize;
        };
        let address = |vpn: u64| vpn as usize * PAGE;
        s.list_resident(from, 2 * N as usize, List::Inactive, |_| None);
        zeros(&mut s, to + N, N);
        let held = p.calls.begin(true);
        p.calls.begin_remap(address(from), address(N) - 5);
        p.event(&mut s, Message::Unmapped { start: address(to), end: address(to + N) });
        p.event(&mut s, Message::Remap { from: address(from), to: address(to), len: address(2 * N) });
        p.event(&mut s, Message::Unmapped { start: address(from + N), end: address(from + 2 * N) });
        p.event(&mut s, Message::Unmapped { start: address(from), end: address(from + N) });
        p.calls.end(held);
        let tags = |s: &State, at: u64| [at, at + N - 1].map(|vpn| s.pt.get(vpn).tag());
        assert_eq!(tags(&s, to), [Tag::Resident; 2]);
        assert_eq!(tags(&s, to + N), [Tag::Zero; 2], "another's");
        assert_eq!([tags(&s, from), tags(&s, from + N)], [[Tag::None; 2]; 2]);
        assert_eq!((s.resident, s.zeros), (N as usize, N as usize));
        // Events of another call, or of one that was not announced, are taken as reported.
        assert_eq!(p.calls.moved_bytes(address(from), 77), 77);
        let held = p.calls.begin(true);
        p.calls.begin_remap(5 * PAGE, PAGE);
        assert_eq!((p.calls.moved_bytes(address(from), 77), p.calls.moved_bytes(5 * PAGE, 3 * PAGE)), (77, PAGE));
        p.calls.end(held);
    }
}

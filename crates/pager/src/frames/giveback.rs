//! Gives free frames back to the kernel.
//!
//! The arena is registered, as only registered memory can be moved to, and discarding registered memory raises an event to
//! ourselves. So what is discarded leaves the registration for that moment. Unregistering and registering change the address
//! space: 2 us each where nothing faults meanwhile, more than discarding a few pages (3 us for seven). So they are done for a
//! page block at a time:
//!
//! ```text
//! idle block (nothing in use)    unregister ─ discard all of it ─ register            one call each, in whatever runs frames lie
//! the one with most frames       unregister ─ discard run, run, … ─ register          between them pages are in use, and stay so
//! ```
//! A thread that meanwhile reads a page of the block, to compress it without the lock, finds it there.
//!
//! Invariant: a free hole is a target of a MOVE. If the kernel does not register a block again (it is short of memory), its holes
//! are none any more: the block is closed ([`uzswap_mm::zone::Zone::close_block`]). What is staged in it can still be moved back.
//! All of this module runs with the pager's lock held.

use crate::frames::arena::PAGE;
use crate::group::folio::MAX_ORDER;
use crate::inject::Site;
use crate::pager::Pager;
use crate::state::State;
use uzswap_mm::zone::{BLOCK_FRAMES, Kind};
use uzswap_sys::raw::Errno;

/// How often to try to make a block a target of MOVE again before it is closed: the kernel may be short of memory for a moment.
const REGISTER_TRIES: u32 = 3;
/// From this many frames on, a page block is given back as a whole.
const IDLE_FRAMES: u32 = 4;

impl Pager {
    /// Gives about `pages` free frames back to the kernel; returns how many.
    pub(crate) fn give_back(&self, s: &mut State, pages: usize) -> usize {
        let (mut given, mut any_idle) = (0, true);
        while given < pages {
            let most = pages - given;
            // The search looks at all blocks: if it finds none, it will find none the next time either.
            let idle = if any_idle { self.idle_block(s, most) } else { None };
            any_idle = idle.is_some();
            let Some(block) = idle.or_else(|| s.zone.fullest_block()) else { break };
            let Some(frames) = self.give_back_of(s, block, (!any_idle).then_some(most)) else { break };
            given += frames;
        }
        given
    }

    /// A page block with nothing in use, if about `pages` are to be given back: one call, and one flush, serves for all its
    /// frames, in whatever runs they lie. (Windows leave holes between them. A block that is all frames may be a huge page.)
    fn idle_block(&self, s: &State, pages: usize) -> Option<usize> {
        let most = (2 * pages as u32).clamp(2 * IDLE_FRAMES, BLOCK_FRAMES - 1);
        if self.saves_flushes(s) { s.zone.idle_block(IDLE_FRAMES..=most) } else { None }
    }

    /// Gives up to `most` free frames of a page block back, or all frames of an idle block: they are free holes then. Returns how
    /// many; None when the block could not be taken out of the registration.
    fn give_back_of(&self, s: &mut State, block: usize, most: Option<usize>) -> Option<usize> {
        let (first, end) = s.zone.block_range(block);
        let (at, len) = (self.layout.slot(first), (end - first) as usize * PAGE);
        // A region asks for no events and has none, and without MOVE the arena is not registered.
        let registered = !self.own_frames && !self.without_move && !s.zone.blocks()[block].is_closed();
        // Before anything is taken: if this fails, nothing has changed.
        if registered && !self.unregister_frames(at, len) {
            return None;
        }
        let mut runs = core::mem::take(&mut s.giving);
        let frames = match most {
            Some(most) => s.zone.take_block_frames(block, most, &mut runs),
            None => {
                let frames = s.zone.blocks()[block].free(Kind::Frame) as usize;
                runs.push((s.zone.take_idle_block(block), MAX_ORDER));
                frames
            }
        };
        for (slot, order) in &runs {
            // SAFETY: free frames hold nothing of use.
            unsafe { crate::frames::arena::discard(self.layout.slot(*slot), PAGE << order) };
            self.blocks.given_back(*slot, 1 << order);
        }
        s.rss = s.rss.saturating_sub(frames * PAGE);
        if registered && !self.register_frames(at, len) {
            s.zone.close_block(block);
        }
        runs.drain(..).for_each(|(slot, order)| s.zone.free(Kind::Hole, slot, order));
        s.giving = runs;
        Some(frames)
    }

    /// Unregisters the blocks that the parent had closed, in a forked child that has just registered all of the arena.
    ///
    /// The story: giving back part of such a block raised an event to the very thread that held the lock, which the handler needs
    /// to read it. The child stood still forever.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn leave_out_closed(&self, s: &State) -> Result<(), Errno> {
        let closed = s.zone.blocks().iter().enumerate().filter(|_| !self.without_move).filter(|(_, b)| b.is_closed());
        closed
            .map(|(block, _)| s.zone.block_range(block))
            .try_for_each(|(first, end)| self.uffd().unregister(self.layout.slot(first), (end - first) as usize * PAGE))
    }

    /// Takes a part of the arena out of the registration, so that it can be discarded or mapped anew without an event to
    /// ourselves. False when the kernel refuses; then nothing has changed.
    pub(crate) fn unregister_frames(&self, at: usize, len: usize) -> bool {
        self.inject(Site::Unregister).is_none() && self.uffd().unregister(at, len).is_ok()
    }

    /// Makes a part of the arena a target of MOVE again; false when the kernel has no memory for that.
    pub(crate) fn register_frames(&self, at: usize, len: usize) -> bool {
        (0..REGISTER_TRIES)
            .any(|_| self.inject(Site::Register).is_none() && self.uffd().register_as_target(at, len).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    const PAGES: usize = 64;

    /// See [`Pager::leave_out_closed`].
    #[test]
    fn what_is_given_back_of_a_closed_block_is_no_event_in_a_child_either() {
        let p = testing::pager_told_of_moves(16 << 20);
        let at = testing::memory(p, 1);
        let mut s = p.state.lock();
        let slot = s.zone.alloc(Kind::Hole, MAX_ORDER).expect("holes");
        testing::put(p, at, &[1; PAGE]);
        p.move_out((at / PAGE) as u64, slot, 1).expect("it is there, and goes to a hole");
        let block = s.zone.block_of(slot);
        s.zone.close_block(block);
        // As a child registers it.
        p.uffd().register_as_target(p.layout.arena, p.layout.slots * PAGE).expect("the arena");
        p.leave_out_closed(&s).expect("the block");
        let frames = p.layout.slot(slot);
        let (done, is_done) = std::sync::mpsc::channel();
        // SAFETY: a staged page of this test, of which nothing is needed.
        let gives = std::thread::spawn(move || done.send(unsafe { crate::frames::arena::discard(frames, PAGE) }));
        let given = loop {
            if p.uffd().wait(1) {
                // The thread that waits for it goes on.
                let _ = p.uffd().read();
                break false;
            }
            if let Ok(given) = is_done.try_recv() {
                break given;
            }
        };
        gives.join().expect("its call ends").expect("it is heard");
        assert!(given, "an event to ourselves");
    }

    /// Windows leave frames here and there in a page block: it is given back all at once, and can then be moved to again.
    #[test]
    fn a_page_block_is_given_back_as_a_whole() {
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, PAGES);
        let mut s = p.state.lock();
        let block = s.zone.alloc(Kind::Hole, MAX_ORDER).expect("holes");
        let slots = (0..PAGES as u32).map(|i| block + 7 * i).collect::<Vec<_>>();
        for round in 0..2 {
            for (i, slot) in slots.iter().enumerate() {
                testing::put(p, at + i * PAGE, &[round; PAGE]);
                p.move_out((at / PAGE + i) as u64, *slot, 1).expect("it is there, and goes to a hole");
            }
            let (mut from, end) = (block, block + BLOCK_FRAMES);
            for slot in &slots {
                s.zone.free_run(Kind::Hole, from, (slot - from) as usize);
                s.zone.free(Kind::Frame, *slot, 0);
                from = slot + 1;
            }
            s.zone.free_run(Kind::Hole, from, (end - from) as usize);
            s.rss = 100 * PAGE;
            let free = (s.zone.free_slots(Kind::Frame), s.zone.free_slots(Kind::Hole));
            p.group.faults.set("unregister=1/1", 1).unwrap();
            assert_eq!(p.give_back(&mut s, PAGES / 2), 0);
            assert_eq!((s.zone.free_slots(Kind::Frame), s.zone.free_slots(Kind::Hole)), free, "nothing is lost");
            p.group.faults.set("unregister=0/1", 1).unwrap();
            assert_eq!(p.give_back(&mut s, PAGES / 2), PAGES, "all of it, in one call");
            assert_eq!((s.zone.free_slots(Kind::Frame), s.rss), (0, 36 * PAGE));
            assert_eq!(p.leading(block, BLOCK_FRAMES as usize, false), BLOCK_FRAMES as usize, "nothing is left");
            s.zone.alloc(Kind::Hole, MAX_ORDER).filter(|again| *again == block).expect("the block is one hole again");
        }
    }

    /// Makes a block that is in use, with single frames between pages in use. Returns the block's first slot; the next one is in
    /// use.
    fn half_used(p: &Pager, s: &mut State, at: usize) -> u32 {
        let block = s.zone.alloc(Kind::Hole, MAX_ORDER).expect("holes");
        for i in 0..PAGES {
            testing::put(p, at + i * PAGE, &[i as u8 + 1; PAGE]);
            p.move_out((at / PAGE + i) as u64, block + i as u32, 1).expect("it is there, and goes to a hole");
        }
        (0..PAGES as u32).step_by(2).for_each(|i| s.zone.free(Kind::Frame, block + i, 0));
        s.rss = 100 * PAGE;
        block
    }

    /// Pages in use stay, and can go back to where they were.
    fn what_is_in_use_is_right(p: &Pager, s: &State, at: usize, block: u32) {
        for i in (1..PAGES).step_by(2) {
            p.move_in(s, (at / PAGE + i) as u64, block + i as u32, 1).expect("it comes back");
            // SAFETY: the page was just moved in.
            let page = unsafe { *((at + i * PAGE) as *const [u8; PAGE]) };
            assert_eq!(page, [i as u8 + 1; PAGE]);
        }
    }

    #[test]
    fn frames_between_pages_in_use_are_given_back() {
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, PAGES);
        let mut s = p.state.lock();
        let block = half_used(p, &mut s, at);
        assert_eq!(p.give_back(&mut s, 20), 20);
        assert_eq!((s.zone.free_slots(Kind::Frame), s.rss), (PAGES / 2 - 20, 80 * PAGE));
        assert_eq!(p.give_back(&mut s, PAGES), PAGES / 2 - 20, "there are no more");
        what_is_in_use_is_right(p, &s, at, block);
        // A page can be moved there again: to where one was given back, and to where one was in use.
        (0..2).for_each(|i| p.move_out((at / PAGE) as u64 + 1 + 2 * i, block + i as u32, 1).expect("a hole"));
    }

    /// The kernel is short of memory: not even that may lose a page.
    #[test]
    fn a_block_that_is_not_registered_again_is_closed() {
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, PAGES);
        let mut s = p.state.lock();
        let block = half_used(p, &mut s, at);
        let (used, holes) = (block + 1, s.zone.free_slots(Kind::Hole));
        p.group.faults.set("unregister=1/1", 1).unwrap();
        assert_eq!(p.give_back(&mut s, 8), 0);
        assert_eq!((s.zone.free_slots(Kind::Frame), s.rss), (PAGES / 2, 100 * PAGE), "nothing has changed");
        p.group.faults.set("unregister=0/1,register=1/1", 1).unwrap();
        assert_eq!(p.give_back(&mut s, 8), 8);
        assert_eq!(s.zone.free_slots(Kind::Hole), holes, "they are no holes");
        p.group.faults.set("register=0/1", 1).unwrap();
        assert_eq!(p.give_back(&mut s, PAGES), PAGES / 2 - 8, "the others of the block");
        what_is_in_use_is_right(p, &s, at, block);
        s.zone.free(Kind::Hole, used, 0);
        assert_eq!(s.zone.free_slots(Kind::Hole), holes, "nothing goes there any more");
        let refused = p.move_out((at / PAGE) as u64 + 1, used, 1);
        assert!(refused.is_err(), "or the block need not have been closed");
    }
}

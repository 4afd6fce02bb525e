//! fork: the child gets the parent's memory, but neither its registrations nor its threads.
//!
//! The kernel drops the registration in the child, where pages that are out would then read as zeros. So the clone system call
//! itself is wrapped (the agent patches libc's one call site). The forking thread takes the pager's lock, so the tables and the
//! pool are consistent in the child's copy. In the child, before any of libc's or the program's code runs, a new ticker opens a
//! new userfaultfd, registers everything again, and starts the other helpers. Frames and compressed objects are inherited
//! copy-on-write. Afterwards MOVE answers EBUSY for frames that are still shared: see `move_in` and `unshare`. Shared memory
//! counts once: `kin`.

pub(crate) mod copies;
pub(crate) mod exclusive;
pub(crate) mod kin;
pub(crate) mod unshare;

use crate::calls::events::forget_all;
use crate::discover::letgo::{GONE, KEEPS};
use crate::fault::placement::Placement;
use crate::fork::copies::{AWAITED, UNPROTECTED};
use crate::frames::arena;
use crate::group::unmanaged;
use crate::pager::Pager;
use crate::state::State;
use crate::trace::Recorder;
use crate::{says, ticker};
use core::sync::atomic::Ordering::*;
use uzswap_mm::lru::Entry;
use uzswap_mm::pagetable::Tag;
use uzswap_mm::trace::{self, Record};
use uzswap_mm::zone::Kind;
use uzswap_sys::lock::{self, Guard};
use uzswap_sys::{process, raw, sys, thread};

/// Bytes of stack that a hook needs at most while it holds the lock. A forked child needs as many until its memory is managed.
pub const HOOK_STACK: usize = 32 << 10;
/// Bytes of stack above the point where a hook takes the lock that it uses until it releases it, in whole pages: the frames of
/// its callers, and libc's around a fork.
const HOOK_ABOVE: usize = 2 * arena::PAGE;
const ABOVE_PAGES: usize = HOOK_ABOVE / arena::PAGE;
/// Bytes of a thread's control block, from the thread pointer on, that hold its rseq area, where libc does not say where that
/// ends (glibc's block has 2.3 KiB).
pub const CONTROL_BLOCK: usize = 3 << 10;

impl Pager {
    /// Prepares for clone: called by the forking thread, with all signals blocked.
    pub fn before_fork(&self) {
        self.calls.stop();
        let mut s = self.lock_in_hook();
        // In the child nothing is registered at first, so it could not check this.
        self.mend_torn(&mut s);
        self.store_posted(&mut s);
        if let Some(rings) = self.rings {
            s.fork_number = rings.fork_number();
            s.note(Record::number(trace::Kind::Fork, s.fork_number));
        }
        self.make_row_for_child(s.swap.as_ref().map_or(0, |swap| swap.clusters()));
        core::mem::forget(s);
    }

    /// Takes the lock in a thread of the program, with all signals blocked, at a moment when the thread's stack and control block
    /// are in memory.
    ///
    /// If the program made them itself they are managed like other memory. A fault on them with the lock held would wait forever,
    /// as the handler needs the lock to serve it; and the kernel writes to the rseq area in the control block whenever it has
    /// interrupted the thread.
    ///
    /// The story: a program's stack was evicted on request while its thread waited for the lock. With the lock held the thread
    /// checked whether its stack was there, and the frame in which it did that was not; or the page that it checked was, and the
    /// next one, with its caller's frame, was not. All threads waited forever, once in hundreds of runs of a test.
    #[inline(never)]
    pub fn lock_in_hook(&self) -> Guard<'_, State> {
        let (mut tries, mut written) = (0, 0);
        // This is read from the control block itself, so not with the lock held.
        let control = thread::pointer();
        let last = match self.control_block.load(Relaxed) {
            // Where libc does not tell the size of the area, the kernel does not write to it.
            CONTROL_BLOCK.. => control,
            bytes => control + bytes - 1,
        };
        loop {
            // What is needed now is the stack of this function and of what it calls.
            // SAFETY: both bytes are the calling thread's control block's.
            let s = unsafe { self.state.lock_on_stack([control as *mut u8, last as *mut u8]) };
            let [stack, control] = self.pages_of_hook(&s, control, HOOK_ABOVE);
            if stack.is_empty() && control.is_empty() {
                return s;
            }
            // Frames above are in memory if the table says so; they are not written to without need.
            let here = stack_address() / arena::PAGE;
            let above: [bool; ABOVE_PAGES] = core::array::from_fn(|i| is_in(&s, here + 1 + i));
            let protections = self.protections.load(Relaxed);
            let is_there =
                |page: usize| protections == 0 && page > here && page <= here + ABOVE_PAGES && above[page - here - 1];
            let pages = stack.chain(control);
            // After that many tries a missing page is one that is not needed: a guard page below the stack. Pages that were
            // protected since they were written to may not be written to now.
            if tries > 0 && written == protections && pages.clone().all(|page| is_in(&s, page)) || tries == 100 {
                return s;
            }
            written = protections;
            drop(s);
            tries += 1;
            for page in pages.filter(|page| !is_there(*page)) {
                if self.without_move {
                    // Where pages are never write-protected, reading one is enough to bring it in.
                    thread::reads(page * arena::PAGE);
                    continue;
                }
                // SAFETY: populating changes no contents, and does nothing where there is no memory. The lock is not held, as the
                // handler serves a missing page.
                let _ = unsafe { sys!(libc::SYS_madvise, page * arena::PAGE, arena::PAGE, libc::MADV_POPULATE_WRITE) };
            }
        }
    }

    /// The pages that the calling thread writes to while in a hook, as far as they are managed: of its stack, up to `above` bytes
    /// above here, and of its control block at `control`.
    fn pages_of_hook(&self, s: &State, control: usize, above: usize) -> [core::ops::Range<usize>; 2] {
        let top = stack_address();
        let end = control + self.control_block.load(Relaxed);
        [stack_pages(s, top, top + above), managed_pages(s, control, end)]
    }

    /// Whether the page of an address that was touched a moment ago is still in memory. Only for the thread that called
    /// [`Pager::before_fork`].
    pub fn is_in_memory(&self, address: usize) -> bool {
        // SAFETY: before_fork took the lock in this thread.
        let s = unsafe { self.state.assume_locked() };
        is_in(s, address / arena::PAGE)
    }

    /// After clone, in the parent; `child` is clone's result.
    pub fn after_fork_in_parent(&self, child: isize) {
        self.end_fork(child);
        // SAFETY: before_fork took the lock in this thread.
        let s = unsafe { self.state.assume_locked() };
        s.exclusive.forked();
        // Pages that were refused for an earlier child are noted, or are un-shared by now and shared again.
        if child > 0 && self.may_unshare(s) {
            s.lru.rescue();
        }
        let tells = child > 0 && self.copies_may_exceed(s);
        // A fork that failed shares nothing, but another thread may wait for protection after its own.
        if child > 0 {
            self.forked.store(if tells { AWAITED } else { UNPROTECTED }, SeqCst);
        }
        match tells {
            // Charge the estimate only where the share is measured soon.
            true => {
                s.rss = self.kin.gained_child(s.rss);
                self.charge(s.rss);
            }
            false => self.kin.gained(),
        }
        // SAFETY: the same.
        unsafe { self.state.force_unlock() };
        self.calls.go_on();
        if tells {
            self.poke_ticker();
            self.await_protection();
        }
    }

    /// After clone, in the child. Returns true when memory is managed again, or when the child goes on unmanaged (then it has
    /// been let go of: [`Pager::has_gone`]); false if the child cannot go on, as pages are out that cannot be managed.
    pub fn after_fork_in_child(&'static self) -> bool {
        if self.letting.load(Relaxed) == GONE {
            // SAFETY: before_fork took the lock in this thread.
            unsafe { self.state.force_unlock() };
            self.calls.go_on();
            return true;
        }
        // The parent's ticker, which may have been asked to let go, is not here.
        self.letting.store(KEEPS, Relaxed);
        self.following.forget();
        self.ceding.forget();
        self.unsharing.store(false, Relaxed);
        let engaged = self.engaged.load(Relaxed);
        self.calls.forget_others();
        says::forget_others();
        let managed = self.begins_as_child(engaged);
        if !managed && !engaged {
            self.go_unmanaged();
        }
        // SAFETY: before_fork took the lock in this thread; nobody else holds the child's copy of it.
        unsafe { self.state.force_unlock() };
        self.calls.go_on();
        managed || !engaged
    }

    /// Lets the child of an unmanaged process go on without a limit: nothing of it is out, so it needs no helper.
    ///
    /// The story: where no thread could be started (RLIMIT_NPROC, pids.max), or the group was full, such a child was ended.
    fn go_unmanaged(&self) {
        self.letting.store(GONE, SeqCst);
        if self.group.warns_first(unmanaged::FORKED) {
            self.say(b"uzswap: a forked child found no place in its group, is in another PID namespace, or could have no more threads; it runs without a limit\n");
        }
    }

    /// Joins the group as a member of its own and starts the child's helpers; false if that fails.
    fn begins_as_child(&'static self, engaged: bool) -> bool {
        // Fails if another process has the parent's number in this namespace or the group's, or if other members read other start
        // times.
        let (mut digits, parent) = ([0; 20], thread::getppid());
        if !process::is_in_own_proc() || !process::has_clocks_of(raw::decimal(parent as u64, &mut digits)) {
            return false;
        }
        if self.claim_slot().is_err() {
            return false;
        }
        // SAFETY: before_fork took the lock in this thread.
        if !self.inherit_swap(unsafe { self.state.assume_locked() }) {
            self.leave();
            return false;
        }
        // SAFETY: before_fork took the lock in this thread.
        self.record_as_child(unsafe { self.state.assume_locked() });
        self.kin.gained();
        // The child's ticker protects it as it begins, where that is wanted.
        self.forked.store(UNPROTECTED, Relaxed);
        self.signs.watched.store(false, Relaxed);
        self.reclaiming.store(false, Relaxed);
        self.signs.asleep.store(false, Relaxed);
        self.ending.store(false, Relaxed);
        self.signs.owes.store(false, Relaxed);
        self.growth.looks_done.store(self.growth.looks_wanted.load(Relaxed), Relaxed);
        if engaged {
            self.reset_inherited();
            self.note_own_writes();
            self.ready.store(0, Release);
            let spawned = self.spawn_ticker(ticker::start_in_child).is_ok();
            while spawned && self.ready.load(Acquire) == 0 {
                lock::futex_wait(&self.ready, 0, None, false);
            }
            spawned && self.ready.load(Acquire) == 1
        } else {
            self.forget_engaging();
            let started = self.spawn_ticker(ticker::start).is_ok();
            if !started {
                self.leave();
            }
            started
        }
    }

    /// Drops what the parent had opened, found and begun to manage its memory.
    ///
    /// The story: engaging had failed in the parent (no more threads), and another thread forked before the failed attempt was
    /// undone. The child took the ranges found for managed, and its later helpers believed that they were told to end.
    fn forget_engaging(&self) {
        self.uffd.store(-1, Relaxed);
        self.stopping.store(false, Relaxed);
        for helper in [&self.handler, &self.reclaimer, &self.writer] {
            helper.store(0, Relaxed);
        }
        // SAFETY: before_fork took the lock in this thread.
        forget_all(unsafe { self.state.assume_locked() });
    }

    /// A child records to the ring of its own slot; the parent's ring is the parent's.
    fn record_as_child(&self, s: &mut State) {
        s.recorder = self.rings.map(|rings| Recorder::new(rings, self.slot.load(Relaxed)));
        s.note(Record::number(trace::Kind::Born, s.fork_number));
    }

    /// Marks what this thread writes before memory is managed again as written, since no fault reports it.
    fn note_own_writes(&self) {
        // SAFETY: before_fork took the lock in this thread.
        let s = unsafe { self.state.assume_locked() };
        // The managed ranges are still the parent's, which are the same here. The callers' frames lie above.
        let written = self.pages_of_hook(s, thread::pointer(), arena::PAGE);
        written.into_iter().flatten().for_each(|page| s.pt.set_clean(page as u64, false));
        s.hooks = self.pages_of_hook(s, thread::pointer(), HOOK_ABOVE);
    }

    /// Ends what only the parent's threads were doing.
    pub(crate) fn reset_inherited(&self) {
        // SAFETY: before_fork took the lock in this thread.
        let s = unsafe { self.state.assume_locked() };
        // It refers to the faults that the parent's slot counts.
        s.huge_due = 0;
        // The parent's page map is not inherited: its addresses are empty here, or hold something else.
        s.pt.unpublish();
        s.page_map = None;
        core::mem::forget(self.page_map.lock().take());
        core::mem::forget(s.cleared.take());
        self.inherit_unprotected(s);
        let mut busy = Vec::new();
        s.pt.for_each(|vpn, pte| {
            if pte.tag() == Tag::Busy {
                busy.push((vpn, pte));
            }
        });
        s.busy = 0;
        // These slots belong to a batch that exists only in the parent.
        for slot in core::mem::take(&mut s.left_busy) {
            s.zone.free(Kind::Frame, slot, 0);
        }
        for (vpn, pte) in busy {
            s.pt.set(vpn, pte.tagged(Tag::Staged));
            s.lru.staged.push(Entry::new(vpn, 0, 0));
        }
        self.forget_helpers();
        self.relief.reset();
        self.tier.forget_transfers();
        s.end_flights();
        // Refused pages must be met again, as nothing is noted any more.
        s.unshare.clear();
        s.lru.rescue();
        s.exclusive.forked();
        s.leaving.forget();
        // The program's registrations are not inherited, unless it asked for that; a scan then gets EBUSY.
        s.ceded.clear();
        s.withdrawn.clear();
        s.asked.clear();
        s.moved_busy.clear();
        s.placement = Placement::new();
        // Free frames are garbage shared with the parent: drop them. No descriptor is registered here yet, so discarding raises
        // no event.
        while let Some((slot, order)) = s.zone.alloc_up_to(Kind::Frame, 9) {
            // SAFETY: free frames hold nothing of use.
            unsafe { arena::discard(self.layout.slot(slot), arena::PAGE << order) };
            s.zone.free(Kind::Hole, slot, order);
        }
    }
}

/// An address in the caller's frame, or just below it.
#[inline(always)]
fn stack_address() -> usize {
    let here = 0u8;
    core::ptr::from_ref(&here) as usize
}

/// The stack's pages around `top`, up to the one with `end`, that are managed and within the same mapping.
fn stack_pages(s: &State, top: usize, end: usize) -> core::ops::Range<usize> {
    let Some((from, to)) = s.managed.holding(top) else { return 0..0 };
    (top - HOOK_STACK).max(from) / arena::PAGE..(end / arena::PAGE + 1).min(to / arena::PAGE)
}

/// The pages of `[from, to)` from the first managed one to the last.
fn managed_pages(s: &State, from: usize, to: usize) -> core::ops::Range<usize> {
    let managed = |page: &usize| s.managed.holding(page * arena::PAGE).is_some();
    let pages = from / arena::PAGE..to.div_ceil(arena::PAGE);
    match (pages.clone().find(managed), pages.rev().find(managed)) {
        (Some(first), Some(last)) => first..last + 1,
        _ => 0..0,
    }
}

/// Whether a page that was touched is resident and writable, or cannot come back any more.
fn is_in(s: &State, page: usize) -> bool {
    match s.pt.get(page as u64).tag() {
        Tag::Resident => !s.pt.is_clean(page as u64) && !s.pt.is_protected(page as u64),
        tag => matches!(tag, Tag::None | Tag::Poisoned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::events::forget_range;
    use crate::pool::batch::Batch;
    use crate::testing;
    use uzswap_mm::lru::List;

    /// The story: a page that a program had only read was shown as written to, once in many runs with threads, forks and
    /// page-outs on request. A thread's stack had been found before it was excluded, so its pages were made writable before each
    /// hook, up to 3 KiB from its control block on. The block is smaller, and ends where its mapping does. So the next mapping's
    /// first page was written to (by MADV_POPULATE_WRITE), and so was the memory below a small stack.
    #[test]
    fn a_hook_needs_pages_of_its_own_threads_only() {
        const K: usize = 1 << 10;
        let p = testing::pager(16 << 20);
        let mut s = p.state.lock();
        // 16 KiB of stack between two other mappings; the control block ends where the stack's mapping does.
        let at = 1 << 30;
        for range in [(at - 64 * K, at), (at, at + 16 * K), (at + 16 * K, at + 64 * K)] {
            s.managed.push(range);
        }
        let (top, end) = (at + 14 * K, at + 16 * K);
        assert_eq!(stack_pages(&s, top, top), at >> 12..end >> 12);
        assert_eq!(stack_pages(&s, top, top + 8 * K), at >> 12..end >> 12, "above it there is another's");
        assert_eq!(managed_pages(&s, end - 2496, end), (end >> 12) - 1..end >> 12);
        // Nothing unmanaged, but the managed half of a control block.
        assert!(stack_pages(&s, at + 65 * K, at + 65 * K).is_empty() && managed_pages(&s, 0, 5 * K).is_empty());
        assert_eq!(managed_pages(&s, at - 65 * K, at - 62 * K), (at - 64 * K) >> 12..(at - 60 * K) >> 12);
    }

    const BUSY: usize = 16;

    /// Has a batch compress pages from the first one on.
    fn being_compressed(p: &Pager, s: &mut State) -> (u64, Batch) {
        let at = testing::memory(p, BUSY);
        (0..BUSY).for_each(|page| testing::put(p, at + page * arena::PAGE, &[page as u8 + 1; arena::PAGE]));
        let first = (at / arena::PAGE) as u64;
        s.list_resident(first, BUSY, List::Inactive, |_| None);
        assert_eq!(p.stage(s, BUSY).ok(), Some(BUSY));
        let mut batch = Batch::new(s.new_compressor());
        assert!(p.prepare(s, &mut batch, BUSY, 0) && s.busy == BUSY);
        (first, batch)
    }

    /// The story: pages that were taken back or dropped while the reclaim thread compressed them left their slots to that thread.
    /// A child has no such thread, so each fork at such a moment lost some frames in every descendant.
    #[test]
    fn slots_that_only_the_parents_batch_knows_are_free_in_the_child() {
        let p = testing::pager(16 << 20);
        let mut s = p.state.lock();
        let free = |s: &State| s.zone.free_slots(Kind::Frame) + s.zone.free_slots(Kind::Hole);
        let all = free(&s);
        let (first, _batch) = being_compressed(p, &mut s);
        assert_eq!(p.bring_busy(&mut s, first + 3).ok(), Some(1));
        forget_range(&mut s, first + 5, first + 7);
        // In the parent the batch frees them. Slots taken by windows belong to nobody yet.
        let windows = s.windows.len();
        p.reset_inherited();
        assert_eq!((s.busy, s.staged, s.resident), (0, BUSY - 3, 1));
        assert_eq!(free(&s) + windows + s.staged, all);
    }

    /// In the parent the batch frees them, once.
    #[test]
    fn slots_of_what_was_taken_back_are_freed_once() {
        let p = testing::pager(16 << 20);
        let mut s = p.state.lock();
        let (first, mut batch) = being_compressed(p, &mut s);
        assert_eq!(p.bring_busy(&mut s, first + 3).ok(), Some(1));
        assert_eq!(s.left_busy.len(), 1);
        batch.compress(p);
        assert_eq!(p.commit(&mut s, &mut batch), BUSY);
        assert!(s.left_busy.is_empty());
        assert_eq!((s.busy, s.staged, s.swapped + s.zeros, s.resident), (0, 0, BUSY - 1, 1));
    }
}

//! Moves frames between the program and the arena, the one place that calls `UFFDIO_MOVE`; and copies into the program where a
//! frame cannot be moved.
//!
//! What was moved is decided by what the arena holds afterwards, not by the kernel's answer. Linux 6.18 sometimes answers EEXIST,
//! with nothing moved, to a MOVE whose first page it did move (seen in one of a few hundred thousand calls, on memory that forked
//! children share, while another thread un-shares it). If the pager believed that, it would look for the page in the program,
//! find it missing, and zeros would be read. The arena is uzswap's alone: a hole that holds a frame after a MOVE out was moved
//! to, and a frame's slot that is a hole after a MOVE in was moved from.

use crate::frames::arena::{PAGE, discard};
use crate::inject::Site;
use crate::pager::Pager;
use crate::state::State;
use core::sync::atomic::Ordering::*;
use uzswap_sys::raw::Errno;
use uzswap_sys::uffd::{Partial, Uffd};
use uzswap_sys::{pagemap, thread};

/// A call that moves pages: destination, source, bytes.
type Call = unsafe fn(&Uffd, usize, usize, usize) -> Result<(), Partial>;

impl Pager {
    /// Moves `n` pages of the program into consecutive holes.
    ///
    /// # Errors
    /// How many bytes were moved, and why not all.
    pub(crate) fn move_out(&self, vpn: u64, slot: u32, n: usize) -> Result<(), Partial> {
        let (dst, src) = (self.layout.slot(slot), vpn as usize * PAGE);
        // SAFETY: the source is the program's memory, to which this code holds no references.
        let result =
            self.moving_out(slot, n, || unsafe { self.ask_move(Site::MoveOut, Uffd::move_pages, dst, src, n) });
        result.or_else(|told| self.corrected(told, self.leading(slot, n, true), n))
    }

    /// Moves what is present of `n` pages of the program (at most 64), each to its own of `n` consecutive holes, as far as it
    /// gets. Returns the set of pages that are in the holes now, and why not all that was present. (`go` is the set believed to
    /// be present: used only where nobody can look.)
    pub(crate) fn move_out_present(&self, vpn: u64, slot: u32, n: usize, go: u64) -> (u64, Result<(), Errno>) {
        let (dst, src) = (self.layout.slot(slot), vpn as usize * PAGE);
        // SAFETY: the source is the program's memory, to which this code holds no references.
        let result =
            self.moving_out(slot, n, || unsafe { self.ask_move(Site::MoveOut, Uffd::move_present, dst, src, n) });
        let mut there = 0u64;
        let mut found = |from: usize, to: usize| {
            for page in (from - dst) / PAGE..(to - dst) / PAGE {
                there |= 1 << page;
            }
        };
        let (fd, end) = (self.files.pagemap.load(Relaxed), dst + n * PAGE);
        let scanned = pagemap::present_runs_any_way(fd, dst, end, &mut found);
        if scanned.is_err() {
            let done = result.map_or_else(|(bytes, _)| bytes / PAGE, |()| n);
            there = go & (1u64 << done).wrapping_sub(1);
        }
        (there, result.map_err(|(_, errno)| errno))
    }

    /// Runs a `call` that moves `n` pages out, to `slot` and those behind it, and times it now and then.
    fn moving_out(&self, slot: u32, n: usize, call: impl FnOnce() -> Result<(), Partial>) -> Result<(), Partial> {
        if self.calls.may_be_torn() {
            // As while an event is unread.
            return Err((0, libc::EAGAIN));
        }
        self.blocks.moved(slot, n);
        if !self.shootdowns.due(n) {
            return call();
        }
        let began = thread::now_ns();
        let result = call();
        self.shootdowns.note(n, thread::now_ns() - began);
        result
    }

    /// Moves the frames of `n` consecutive slots, to which nothing refers any more, to missing pages of the program.
    ///
    /// # Errors
    /// How many bytes were moved, and why not all.
    pub(crate) fn move_in(&self, s: &State, vpn: u64, slot: u32, n: usize) -> Result<(), Partial> {
        if !self.protects_some(s) {
            return self.move_in_plain(vpn, slot, n);
        }
        // A page that must be write-protected is copied: its slot still holds a frame then, except in a region.
        self.by_runs(s, vpn, n, |at, len, protect| {
            let (vpn, slot) = (vpn + at as u64, slot + at as u32);
            if !protect {
                return self.move_in_plain(vpn, slot, len);
            }
            if self.inject(Site::Copy).is_some() {
                return Err((0, libc::EAGAIN));
            }
            let from = self.layout.slot(slot);
            self.stall.mapping(vpn, len);
            // SAFETY: the slots hold frames, to which nothing else refers.
            let copied = unsafe { self.uffd().copy_protected(vpn as usize * PAGE, from, len * PAGE) };
            if self.marks.is_some() {
                let done = copied.map_or_else(|(done, _)| done, |()| len * PAGE);
                // SAFETY: the contents are in the program now. (A region asks for no events, so the advice does not wait.)
                unsafe { discard(from, done) };
            }
            copied
        })
    }

    fn move_in_plain(&self, vpn: u64, slot: u32, n: usize) -> Result<(), Partial> {
        if self.without_move {
            return self.copy_in(vpn, slot, n);
        }
        self.blocks.moved(slot, n);
        let quietly = self.wakes.are_held();
        if !quietly {
            self.stall.mapping(vpn, n);
        }
        let call: Call = if quietly { Uffd::move_quietly } else { Uffd::move_pages };
        let (dst, src) = (vpn as usize * PAGE, self.layout.slot(slot));
        // SAFETY: as the caller says.
        let mut result = unsafe { self.ask_move(Site::MoveIn, call, dst, src, n) };
        if let Err((0, libc::EBUSY | libc::ENOENT)) = result {
            // The frames are shared with a forked child: writing makes them ours alone. Or the kernel has taken them.
            self.settle(slot, n);
            // SAFETY: as above.
            result = unsafe { self.ask_move(Site::MoveIn, call, dst, src, n) };
        }
        let result = result.or_else(|told| {
            let moved = self.leading(slot, n, false);
            if moved * PAGE > told.0 {
                self.uffd().wake(dst, moved * PAGE);
            }
            self.corrected(told, moved, n)
        });
        if quietly {
            self.wakes.note(vpn, result.map_or_else(|(done, _)| done / PAGE, |()| n));
        }
        result
    }

    /// Copies to missing pages of the program.
    ///
    /// # Errors
    /// How many bytes were copied, and why not all.
    ///
    /// # Safety
    /// `src` must be readable for `len` bytes.
    pub(crate) unsafe fn copy(&self, s: &State, vpn: u64, src: usize, len: usize) -> Result<(), Partial> {
        if self.inject(Site::Copy).is_some() {
            return Err((0, libc::EAGAIN));
        }
        let copy = |at: usize, pages: usize, protect: bool| {
            let (dst, src) = (vpn as usize * PAGE + at * PAGE, src + at * PAGE);
            if !protect && self.wakes.are_held() {
                // SAFETY: as the caller says.
                let copied = unsafe { self.uffd().copy_quietly(dst, src, pages * PAGE) };
                self.wakes.note(vpn + at as u64, copied.map_or_else(|(done, _)| done / PAGE, |()| pages));
                return copied;
            }
            self.stall.mapping(vpn + at as u64, pages);
            // SAFETY: as the caller says.
            unsafe {
                match protect {
                    true => self.uffd().copy_protected(dst, src, pages * PAGE),
                    false => self.uffd().copy(dst, src, pages * PAGE),
                }
            }
        };
        match self.protects_some(s) {
            true => self.by_runs(s, vpn, len / PAGE, copy),
            false => copy(0, len / PAGE, false),
        }
    }

    /// Makes the kernel keep `n` frames, to which nobody holds references; those that it took already become zeros.
    ///
    /// The story: a program had given memory up by MADV_FREE before it was managed. MOVE leaves such pages as they are (Linux
    /// 6.16 and later), so the kernel could take them in the arena too, until they were written to. When it was short of memory
    /// it did. The arena was registered for faults on missing pages, and the thread that met one was the one to serve it: the
    /// program hung.
    pub(crate) fn settle(&self, slot: u32, n: usize) {
        for i in 0..n as u32 {
            let byte = self.layout.slot(slot + i) as *mut u8;
            // SAFETY: as the caller says; where there is no memory, the kernel gives some.
            unsafe { byte.write_volatile(byte.read_volatile()) };
        }
    }

    /// Asks the kernel to move `n` pages by a call, or forges the answer that a test wants.
    ///
    /// # Safety
    /// No reference into `src` may be alive.
    unsafe fn ask_move(&self, site: Site, call: Call, dst: usize, src: usize, n: usize) -> Result<(), Partial> {
        // SAFETY: as the caller says.
        let moved = |pages: usize| unsafe { call(&self.uffd(), dst, src, pages * PAGE) };
        let Some(bits) = self.inject(site) else { return moved(n) };
        match bits % 3 {
            0 => Err((0, libc::EBUSY)),
            // Moves a part, as when an event comes meanwhile.
            1 => match (bits >> 8) as usize % n {
                0 => Err((0, libc::EAGAIN)),
                part => moved(part).and(Err((part * PAGE, libc::EAGAIN))),
            },
            // Moves one page, and conceals it.
            _ => moved(1).and(Err((0, libc::EEXIST))),
        }
    }

    /// Moves the frame of a slot to a hole of the arena; returns whether it is there now.
    pub(crate) fn move_within(&self, from: u32, to: u32) -> bool {
        if self.without_move {
            self.copy_within(from, to);
            return true;
        }
        self.settle(from, 1);
        // SAFETY: both slots are the arena's own, to which references are held only under the lock.
        let result = unsafe { self.uffd().move_pages(self.layout.slot(to), self.layout.slot(from), PAGE) };
        result.or_else(|told| self.corrected(told, self.leading(to, 1, true), 1)).is_ok()
    }

    /// The kernel's answer, corrected by what it concealed.
    fn corrected(&self, told: Partial, moved: usize, n: usize) -> Result<(), Partial> {
        if moved * PAGE <= told.0 {
            return Err(told);
        }
        self.counters().move_concealed.fetch_add((moved - told.0 / PAGE) as u64, Relaxed);
        if moved == n { Ok(()) } else { Err((moved * PAGE, libc::EAGAIN)) }
    }

    /// How many slots from `slot` on, of `n`, hold a frame (or, without `frames`, hold none).
    pub(crate) fn leading(&self, slot: u32, n: usize, frames: bool) -> usize {
        let start = self.layout.slot(slot);
        let mut first = None;
        let scanned = pagemap::present_runs(self.files.pagemap.load(Relaxed), start, start + n * PAGE, |a, b| {
            first.get_or_insert((a, b));
        });
        match (scanned, first, frames) {
            // Every kernel that can MOVE has this call.
            (Err(_), ..) => 0,
            (Ok(()), Some((a, b)), true) if a == start => (b - a) / PAGE,
            (Ok(()), _, true) => 0,
            (Ok(()), first, false) => first.map_or(n, |(a, _)| (a - start) / PAGE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::batch::Batch;
    use crate::testing;
    use uzswap_mm::lru::List;
    use uzswap_mm::zone::Kind;
    use uzswap_sys::sys;

    const N: usize = 8;

    /// The story: programs that forked read zeros, in one of a few hundred runs of the fork storm. The kernel (6.18) had answered
    /// EEXIST and "nothing moved" to a MOVE of several pages out of memory shared with a child, although it had moved the first
    /// page. The pager believed it and gave the slots back, so that page was lost. In the program it was missing, and read as
    /// zeros when next touched.
    ///
    /// Here the answer is forged after a real MOVE, among the others that an attempt can have. Whatever it is, the report must
    /// match what the arena holds, and the program, given back what was taken, must have every byte.
    #[test]
    fn what_moved_is_known_whatever_the_kernel_says() {
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, N);
        let vpn = (at / PAGE) as u64;
        let byte = |page: usize| page as u8 + 1;
        (0..N).for_each(|page| testing::put(p, at + page * PAGE, &[byte(page); PAGE]));
        p.group.faults.set("seed=11,move_out=1/2,move_in=1/2", 0).unwrap();
        let mut partial = 0;
        for round in 0..400 {
            let (slot, _) = p.state.lock().zone.alloc_up_to(Kind::Hole, 3).expect("holes");
            let out = match p.move_out(vpn, slot, N) {
                Ok(()) => N,
                Err((bytes, _)) => bytes / PAGE,
            };
            assert_eq!(out, p.leading(slot, N, true), "round {round}");
            partial += usize::from(out > 0 && out < N);
            for page in 0..out {
                // SAFETY: the slot holds a frame, as was just asserted.
                let frame = unsafe { p.layout.frames(slot + page as u32, 1) };
                assert!(frame.iter().all(|b| *b == byte(page)), "round {round}, page {page}");
            }
            let mut back = 0;
            while back < out {
                back += match p.move_in(&p.state.lock(), vpn + back as u64, slot + back as u32, out - back) {
                    Ok(()) => out - back,
                    Err((bytes, _)) => bytes / PAGE,
                };
                assert_eq!(p.leading(slot, out, false), back, "round {round}");
            }
            for page in 0..N {
                // SAFETY: everything is back in the program's memory, which nobody else uses.
                let content = unsafe { core::slice::from_raw_parts((at + page * PAGE) as *const u8, PAGE) };
                assert!(content.iter().all(|b| *b == byte(page)), "round {round}, page {page}");
            }
            p.state.lock().zone.free_run(Kind::Hole, slot, N);
        }
        let concealed = p.counters().move_concealed.load(Relaxed);
        assert!(concealed > 50 && partial > 20, "{concealed} concealed, {partial} partial");
    }

    const MANY: usize = 256;

    /// Memory that a program has filled, given up by MADV_FREE and not written to since, and that is now staged; returns its
    /// first page.
    fn given_up(p: &'static Pager) -> u64 {
        let at = testing::memory(p, MANY);
        (0..MANY).for_each(|page| testing::put(p, at + page * PAGE, &testing::words(page as u64)));
        // SAFETY: memory of the test's own.
        unsafe { sys!(libc::SYS_madvise, at, MANY * PAGE, libc::MADV_FREE) }.expect("advice");
        let first = (at / PAGE) as u64;
        let s = &mut *p.state.lock();
        s.list_resident(first, MANY, List::Inactive, |_| None);
        assert_eq!(p.stage_run(s, first, MANY).ok(), Some(MANY));
        first
    }

    /// Has the kernel take what it may of frames; returns which it took.
    fn taken(p: &'static Pager, slots: &[u32]) -> Vec<usize> {
        for slot in slots {
            // SAFETY: advice that drops nothing of use.
            unsafe { sys!(libc::SYS_madvise, p.layout.slot(*slot), PAGE, libc::MADV_PAGEOUT) }.expect("advice");
        }
        (0..slots.len()).filter(|i| p.leading(slots[*i], 1, false) == 1).collect()
    }

    /// Runs `act` in a thread of its own, for which nobody serves faults.
    fn unserved<T: Send + 'static>(p: &'static Pager, act: impl FnOnce() -> T + Send + 'static) -> T {
        let acts = std::thread::spawn(act);
        while !acts.is_finished() {
            assert!(!p.uffd().wait(1), "it waits for a fault to be served");
        }
        acts.join().unwrap()
    }

    /// Brings the pages back; returns those that the program now reads as zeros. The others hold what they held.
    fn zeros(p: &'static Pager, first: u64) -> Vec<usize> {
        let end = first + MANY as u64;
        let mut at = first;
        while at < end {
            at = p.bring_range(&mut p.state.lock(), at, end).1.max(at + 1);
        }
        let is_zero = |page: &usize| {
            // SAFETY: memory of the test's own, all of which is there.
            let content =
                unsafe { core::slice::from_raw_parts(((first as usize + page) * PAGE) as *const [u8; PAGE], 1) };
            let zero = content[0].iter().all(|b| *b == 0);
            assert!(zero || content[0] == testing::words(*page as u64)[..], "page {page}");
            zero
        };
        (0..MANY).filter(is_zero).collect()
    }

    fn slots_of(p: &'static Pager, first: u64) -> Vec<u32> {
        let s = p.state.lock();
        (first..first + MANY as u64).map(|vpn| s.pt.get(vpn).aux()).collect()
    }

    /// See [`Pager::settle`].
    #[test]
    fn what_the_kernel_took_of_what_is_staged_is_zeros() {
        for compressed in [false, true] {
            let p = testing::pager(16 << 20);
            let first = given_up(p);
            let gone = taken(p, &slots_of(p, first));
            if gone.is_empty() {
                return testing::skip("the kernel takes nothing");
            }
            let are_zeros = unserved(p, move || {
                if compressed {
                    let s = &mut *p.state.lock();
                    let mut batch = Batch::new(s.new_compressor());
                    p.prepare(s, &mut batch, MANY, 0);
                    p.store_now(s, &mut batch);
                    assert_eq!((s.staged, s.busy), (0, 0));
                }
                zeros(p, first)
            });
            assert_eq!(are_zeros, gone, "compressed: {compressed}");
        }
    }

    /// A page is read more than once: were it gone in between, its hash would be another's.
    #[test]
    fn what_is_to_be_compressed_the_kernel_takes_no_more() {
        let p = testing::pager(16 << 20);
        let first = given_up(p);
        let (slots, mut batch) = (slots_of(p, first), Batch::new(p.state.lock().new_compressor()));
        p.prepare(&mut p.state.lock(), &mut batch, MANY, 0);
        assert_eq!((batch.pages(), taken(p, &slots)), (MANY, vec![]));
        p.store_now(&mut p.state.lock(), &mut batch);
        assert_eq!(unserved(p, move || zeros(p, first)), []);
    }
}

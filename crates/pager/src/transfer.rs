//! Moving frames between the program and the arena: the one place that calls `UFFDIO_MOVE`.
//!
//! What the arena holds afterwards decides what was moved, not the kernel's answer. Linux 6.18 at times answers EEXIST,
//! with nothing moved, to a MOVE whose first page it did move (seen in one of a few hundred thousand calls on memory
//! that forked children share, while another thread un-shares it). Taken at its word the page would be looked for in
//! the program, found missing, and read as zeros. The arena is uzswap's alone: a hole that holds a frame after a MOVE
//! out, or a frame's slot that is a hole after a MOVE in, was moved.

use crate::arena::PAGE;
use crate::pager::Pager;
use core::sync::atomic::Ordering::*;
use uzswap_sys::pagemap;
use uzswap_sys::uffd::Partial;

impl Pager {
    /// Moves `n` pages of the program into consecutive holes.
    ///
    /// # Errors
    /// The bytes that were moved, and why not all.
    pub(crate) fn move_out(&self, vpn: u64, slot: u32, n: usize) -> Result<(), Partial> {
        // SAFETY: the source is the program's memory, of which this code holds no references.
        let result = unsafe { self.uffd().move_pages(self.layout.slot(slot), vpn as usize * PAGE, n * PAGE) };
        result.or_else(|told| self.corrected(told, self.leading(slot, n, true), n))
    }

    /// Moves the frames of `n` consecutive slots, which nobody refers to any more, to missing pages of the program.
    ///
    /// # Errors
    /// The bytes that were moved, and why not all.
    pub(crate) fn move_in(&self, vpn: u64, slot: u32, n: usize) -> Result<(), Partial> {
        let (dst, src) = (vpn as usize * PAGE, self.layout.slot(slot));
        // SAFETY: as the caller says.
        let mut result = unsafe { self.uffd().move_pages(dst, src, n * PAGE) };
        if let Err((0, libc::EBUSY)) = result {
            // Shared with a forked child: writing makes the frames ours alone.
            for i in 0..n {
                // SAFETY: as above; a frame is there.
                unsafe {
                    let p = (src + i * PAGE) as *mut u8;
                    p.write_volatile(p.read_volatile());
                }
            }
            // SAFETY: as above.
            result = unsafe { self.uffd().move_pages(dst, src, n * PAGE) };
        }
        result.or_else(|told| {
            let moved = self.leading(slot, n, false);
            if moved * PAGE > told.0 {
                self.uffd().wake(dst, moved * PAGE);
            }
            self.corrected(told, moved, n)
        })
    }

    /// The kernel's answer, less what it concealed.
    fn corrected(&self, told: Partial, moved: usize, n: usize) -> Result<(), Partial> {
        if moved * PAGE <= told.0 {
            return Err(told);
        }
        self.counters().move_concealed.fetch_add((moved - told.0 / PAGE) as u64, Relaxed);
        if moved == n { Ok(()) } else { Err((moved * PAGE, libc::EAGAIN)) }
    }

    /// How many slots from `slot` on, of `n`, hold a frame (or hold none).
    fn leading(&self, slot: u32, n: usize, frames: bool) -> usize {
        let start = self.layout.slot(slot);
        let mut first = None;
        let scanned = pagemap::present_runs(self.pagemap.load(Relaxed), start, start + n * PAGE, |a, b| {
            first.get_or_insert((a, b));
        });
        match (scanned, first, frames) {
            // (The call is there on every kernel that can MOVE.)
            (Err(_), ..) => 0,
            (Ok(()), Some((a, b)), true) if a == start => (b - a) / PAGE,
            (Ok(()), _, true) => 0,
            (Ok(()), first, false) => first.map_or(n, |(a, _)| (a - start) / PAGE),
        }
    }
}

//! Paging out on request: a range of a process's or a region's private memory.

use crate::arena::{PAGE, discard};
use crate::events::forget_range;
use crate::fault::EventPending;
use crate::pager::Pager;
use crate::store::BATCH_PAGES;
use uzswap_mm::zone::Kind;

impl Pager {
    /// Puts the resident pages `[from, to)` out, and with them whatever was staged; returns the pages of the range that
    /// left. Frames that this frees go back to the kernel. The lock is held for 64 pages at a time.
    pub fn page_out(&self, from: u64, to: u64) -> usize {
        let (mut at, mut left) = (from, 0);
        while at < to {
            let mut s = self.state.lock();
            let end = to.min(at + BATCH_PAGES as u64);
            while at < end {
                let n = s.resident_run(at, end);
                if n == 0 {
                    at += 1;
                    continue;
                }
                match self.stage_run(&mut s, at, n) {
                    Ok(moved) => left += moved,
                    // The event must be read first, by the thread that reads events.
                    Err(EventPending) => return left,
                }
                at += n as u64;
            }
            let mut batch = s.take_direct();
            for _ in 0..4 {
                self.prepare(&mut s, &mut batch, BATCH_PAGES, 0);
                batch.compress(self);
                if self.commit(&mut s, &mut batch) == 0 && s.idle_staged() == 0 {
                    break;
                }
            }
            s.direct = Some(batch);
            let (low, _) = self.watermarks();
            let spare = s.zone.free_slots(Kind::Frame);
            if spare > low {
                self.give_back(&mut s, spare - low);
            }
        }
        left
    }

    /// Drops the contents of the pages `[from, to)` of a region: they read as zeros, as if never touched. (Of a region
    /// only: it asks for no events, so the advice does not wait for us.)
    pub fn remove(&self, from: u64, to: u64) {
        let mut s = self.state.lock();
        forget_range(&mut s, from, to);
        // SAFETY: the caller gives the contents up; who faults meanwhile waits for the lock.
        unsafe { discard(from as usize * PAGE, (to - from) as usize * PAGE) };
    }
}

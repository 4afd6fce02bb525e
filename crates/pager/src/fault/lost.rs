//! Lost pages on kernels that cannot poison a page (before 6.6).
//!
//! There the pager covers a page whose contents are lost with a mapping past the end of an empty file, which raises SIGBUS on
//! access. Covering unmaps what was there; that raises an event, and waits until the event is read. So not the handler but the
//! ticker does it, while no mapping call of the program is under way. Until then a thread that touches the page waits.

use crate::frames::arena::PAGE;
use crate::pager::Pager;
use crate::state::State;
use uzswap_mm::pagetable::Tag;
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::{sys, thread};

impl Pager {
    /// Makes a lost page raise SIGBUS: now in a region, else through the ticker.
    pub(crate) fn lose_page(&self, s: &mut State, vpn: u64) {
        if self.own_frames {
            // A region's memory has no events, and nobody else maps anything there. (The calling thread is the one that touched
            // the page, and gets the signal again.)
            let _ = cover(vpn as usize * PAGE);
        } else if !s.lost.contains(&vpn) {
            s.lost.push(vpn);
            self.poke_ticker();
        }
    }

    /// Covers all lost pages. Called by the ticker.
    pub(crate) fn cover_lost(&self) {
        while self.without_move && !self.state.lock().lost.is_empty() {
            self.calls.stop();
            self.cover_lost_now();
            self.calls.go_on();
        }
    }

    /// The same for a thread that has stopped the program's mapping calls already. Never call it with the lock held, or on the
    /// thread that reads events.
    pub(crate) fn cover_lost_now(&self) {
        // There are none where the kernel can poison a page.
        loop {
            let (vpn, lost) = {
                let mut s = self.state.lock();
                let Some(vpn) = s.lost.pop() else { return };
                (vpn, s.pt.get(vpn).tag() == Tag::Poisoned)
            };
            let covered = if lost { cover(vpn as usize * PAGE) } else { Ok(()) };
            self.uffd().wake(vpn as usize * PAGE, PAGE);
            if covered.is_err() {
                // Otherwise the page would read as zeros, or its thread wait forever.
                self.say(b"uzswap: a lost page could not be made to raise SIGBUS; the process is ended\n");
                thread::end_process(125);
            }
        }
    }
}

/// Puts a mapping that raises SIGBUS over a page.
fn cover(at: usize) -> Result<(), Errno> {
    // SAFETY: a constant name; the call touches no other memory.
    let fd = unsafe { sys!(libc::SYS_memfd_create, c"uzswap-lost".as_ptr(), libc::MFD_CLOEXEC) }? as i32;
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
    // SAFETY: the mapping replaces a page whose contents are lost.
    let mapped = unsafe { sys!(libc::SYS_mmap, at, PAGE, prot, flags, fd, 0) };
    raw::close(fd);
    mapped.map(drop)
}

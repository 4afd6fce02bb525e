//! Lost pages on a kernel that cannot poison one (before 6.6).
//!
//! There a page whose contents are lost is covered by a mapping past the end of an empty file: whoever touches it gets
//! SIGBUS. Covering unmaps what was there, which raises an event and waits until it is read: so not the handler does it, but
//! the ticker, while no mapping call of the program is under way. Until then who touches the page waits.

use crate::frames::arena::PAGE;
use crate::pager::Pager;
use crate::state::State;
use uzswap_mm::pagetable::Tag;
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::{sys, thread};

impl Pager {
    /// A page is lost: it is to raise SIGBUS.
    pub(crate) fn lose_page(&self, s: &mut State, vpn: u64) {
        if self.own_frames {
            // A region's memory has no events, and nobody else maps anything there. (The thread that asks is the one that
            // touched it, and gets the signal again.)
            let _ = cover(vpn as usize * PAGE);
        } else if !s.lost.contains(&vpn) {
            s.lost.push(vpn);
            self.poke_ticker();
        }
    }

    /// Covers what is lost: in the ticker.
    pub(crate) fn cover_lost(&self) {
        while self.without_move && !self.state.lock().lost.is_empty() {
            self.calls.stop();
            self.cover_lost_now();
            self.calls.go_on();
        }
    }

    /// The same where it has stopped the program's mapping calls already. Not for a thread that holds the lock, or that events
    /// are read by.
    pub(crate) fn cover_lost_now(&self) {
        // (None where the kernel can poison a page.)
        loop {
            let (vpn, lost) = {
                let mut s = self.state.lock();
                let Some(vpn) = s.lost.pop() else { return };
                (vpn, s.pt.get(vpn).tag() == Tag::Poisoned)
            };
            let covered = if lost { cover(vpn as usize * PAGE) } else { Ok(()) };
            self.uffd().wake(vpn as usize * PAGE, PAGE);
            if covered.is_err() {
                // It would read as zeros otherwise, or wait for ever.
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
    // SAFETY: over a page whose contents are lost.
    let mapped = unsafe { sys!(libc::SYS_mmap, at, PAGE, prot, flags, fd, 0) };
    raw::close(fd);
    mapped.map(drop)
}

//! Stops eviction that could lose what a device writes, once the program may pin memory.
//!
//! Direct I/O, io_uring's registered buffers, RDMA and device drivers *pin* pages: the device writes to the memory, not through
//! the page tables. MOVE refuses a pinned page. `mremap` takes it: the copy has what was there so far, and what the device writes
//! afterwards is lost. The kernel offers a program no way to ask about pins. So uzswap watches for what precedes one (the agent's
//! `pins`), and from then on takes no page of the process. Pages that are out come back when touched, as ever, and pinning
//! touches a page. The limit may then be exceeded, which is said once.
//!
//! With MOVE this concerns only read-only memory, which leaves by a copy (`read_only`), as MOVE refuses it before it looks for
//! pins. It may have been pinned while it could be written to, and made read-only then. From then on no read-only memory leaves.
//! (Any other read-only memory was not pinned for writing; but nothing tells the two apart.)

use crate::pager::Pager;
use core::sync::atomic::Ordering::*;

impl Pager {
    /// Notes that the program is about to be able to pin memory. The caller has all signals blocked.
    pub fn may_pin(&self) {
        // With MOVE no wait is needed: what is being copied is read-only, and calls that could make it writable, and so pinned,
        // are stopped.
        if self.pins.swap(true, SeqCst) || !self.without_move {
            return;
        }
        // Taking the lock waits for whoever is taking pages.
        drop(self.lock_in_hook());
        self.say(
            b"uzswap: this process uses direct I/O, io_uring or a device that may write to its memory, which on this \
              kernel (without UFFDIO_MOVE, before 6.8) cannot be evicted safely then; its memory is no longer limited\n",
        );
    }
}

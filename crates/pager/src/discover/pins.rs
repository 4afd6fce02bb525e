//! Memory that a device writes to, where MOVE is not asked.
//!
//! Direct I/O, io_uring's registered buffers, RDMA and drivers of devices *pin* pages: the device writes to the memory, not
//! through the page tables. MOVE refuses such a page; `mremap` takes it, what is copied then is what was there so far, and
//! what the device writes afterwards is lost. Nothing that a program may ask the kernel tells of a pin. So it is watched for
//! what comes before one (the agent's `pins`): from then on no page of the process is taken any more. What is out comes back
//! when it is touched, as ever, and a page is touched when it is pinned. The limit is exceeded then, and that is said once.
//!
//! With MOVE it is read-only memory that leaves by a copy (`read_only`), as MOVE refuses that before it looks for pins: what was pinned
//! while it could be written to, and made read-only then. From then on none leaves in that way. (Whatever else is read-only was
//! not pinned for being written to; but which that is nothing tells.)

use crate::pager::Pager;
use core::sync::atomic::Ordering::*;

impl Pager {
    /// The program is about to be able to pin memory. To be called before it is, with all signals blocked.
    pub fn may_pin(&self) {
        // (With MOVE nobody is waited for: what is being copied is read-only, and not made writable, and so pinned, while calls are stopped.)
        if self.pins.swap(true, SeqCst) || !self.without_move {
            return;
        }
        // Whoever was taking pages has done so.
        drop(self.lock_in_hook());
        self.say(
            b"uzswap: this process uses direct I/O, io_uring or a device that may write to its memory, which on this \
              kernel (without UFFDIO_MOVE, before 6.8) cannot be evicted safely then; its memory is no longer limited\n",
        );
    }
}

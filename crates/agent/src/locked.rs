//! Locked memory that `mremap` enlarges, or of which it moves a part.
//!
//! The kernel fills the new part within the call, before it sends the event that the memory has moved. Until that event
//! is read, no page comes in anywhere. So the call waited for a page that waited for the call, and the whole process
//! with them. Therefore such memory is locked on fault for the time of the call, which then fills nothing, and is
//! locked as before afterwards: that fills it. It is never unlocked in between.

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use uzswap_sys::{maps, raw, sys};

/// Address and length (bytes) of the memory of the call under way. Only one runs at a time.
static WAS: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];

/// Called before an `mremap` that runs alone. Returns whether [`after`] must follow.
pub fn before(from: usize, old_len: usize, new_len: usize) -> bool {
    if old_len == 0 || old_len >= new_len || !is_locked(from, old_len) || is_locked_on_fault(from) {
        return false;
    }
    WAS[0].store(from, Relaxed);
    WAS[1].store(old_len, Relaxed);
    lock(from, old_len, libc::MLOCK_ONFAULT)
}

/// Called after it. `moved` is the memory's new address and length; `None` if the call failed.
pub fn after(moved: Option<(usize, usize)>) {
    let (at, len) = moved.unwrap_or_else(|| (WAS[0].load(Relaxed), WAS[1].load(Relaxed)));
    // Nobody is told how far the filling got; `mremap` does not tell either.
    let _ = lock(at, len, 0);
}

/// A range of locked memory, and how it is locked.
pub struct Locked(Range<usize>, libc::c_uint);

/// How a range within one mapping is locked; `None` if it is not, or is empty.
pub fn of(range: Range<usize>) -> Option<Locked> {
    let locked = !range.is_empty() && is_locked(range.start, range.len());
    locked.then(|| {
        let on_fault = is_locked_on_fault(range.start);
        Locked(range, if on_fault { libc::MLOCK_ONFAULT } else { 0 })
    })
}

impl Locked {
    /// Locks the range again in the same way, if it is no longer locked; false if the kernel refuses.
    pub fn again(&self) -> bool {
        let Self(range, how) = self;
        is_locked(range.start, range.len()) || lock(range.start, range.len(), *how)
    }
}

fn lock(at: usize, len: usize, how: libc::c_uint) -> bool {
    // SAFETY: it changes no contents.
    unsafe { sys!(libc::SYS_mlock2, at, len, how) }.is_ok()
}

/// Whether a range contains locked memory.
fn is_locked(at: usize, len: usize) -> bool {
    // Only locked memory makes the kernel refuse this call in this way, and the call does nothing to memory without a
    // file.
    // SAFETY: it changes no contents.
    let asked = unsafe { sys!(libc::SYS_msync, at, len, libc::MS_ASYNC | libc::MS_INVALIDATE) };
    asked == Err(libc::EBUSY)
}

/// Whether locked memory is locked on fault, so that the kernel fills none of it. False if that cannot be read.
fn is_locked_on_fault(at: usize) -> bool {
    let mut text = Vec::with_capacity(1 << 20);
    raw::read_file(b"/proc/thread-self/smaps\0", &mut text).is_ok()
        && maps::flagged(&text, maps::LOCKED_ON_FAULT).any(|(start, end)| (start..end).contains(&at))
}

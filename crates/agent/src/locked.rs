//! Locked memory that `mremap` makes larger, or of which it moves a part.
//!
//! The kernel fills what is new of it within the call, before it tells that the memory has moved. Until that is told no page comes in
//! anywhere, and so the call waited for a page that waited for the call, and all of the process with them. So such memory is locked as
//! it is touched for the time of the call, which fills nothing then, and as it was afterwards: that fills it, and it is never unlocked.

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use uzswap_sys::{maps, raw, sys};

/// Where the memory of the call under way is, and how long (bytes). (One runs at a time.)
static WAS: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];

/// Before an `mremap` that runs alone: whether [`after`] must follow.
pub fn before(from: usize, old_len: usize, new_len: usize) -> bool {
    if old_len == 0 || old_len >= new_len || !is_locked(from, old_len) || is_locked_on_fault(from) {
        return false;
    }
    WAS[0].store(from, Relaxed);
    WAS[1].store(old_len, Relaxed);
    lock(from, old_len, libc::MLOCK_ONFAULT)
}

/// After it: `moved` is where the memory is now and how long, None where the call failed.
pub fn after(moved: Option<(usize, usize)>) {
    let (at, len) = moved.unwrap_or_else(|| (WAS[0].load(Relaxed), WAS[1].load(Relaxed)));
    // (Of filling nobody hears how far it got, nor from `mremap`.)
    let _ = lock(at, len, 0);
}

/// Memory that was locked, and how.
pub struct Locked(Range<usize>, libc::c_uint);

/// How a range is locked, which is of one mapping; None where it is not, or empty.
pub fn of(range: Range<usize>) -> Option<Locked> {
    let locked = !range.is_empty() && is_locked(range.start, range.len());
    locked.then(|| {
        let on_fault = is_locked_on_fault(range.start);
        Locked(range, if on_fault { libc::MLOCK_ONFAULT } else { 0 })
    })
}

impl Locked {
    /// Locks it in the same way, if it is not any more; false where that is refused.
    pub fn again(&self) -> bool {
        let Self(range, how) = self;
        is_locked(range.start, range.len()) || lock(range.start, range.len(), *how)
    }
}

fn lock(at: usize, len: usize, how: libc::c_uint) -> bool {
    // SAFETY: it changes no contents.
    unsafe { sys!(libc::SYS_mlock2, at, len, how) }.is_ok()
}

/// Whether there is locked memory in a range.
fn is_locked(at: usize, len: usize) -> bool {
    // (Nothing else refuses this so, which does nothing to memory of no file.)
    // SAFETY: it changes no contents.
    let asked = unsafe { sys!(libc::SYS_msync, at, len, libc::MS_ASYNC | libc::MS_INVALIDATE) };
    asked == Err(libc::EBUSY)
}

/// Whether locked memory is so from when it is touched on: the kernel fills none of that. (Where it cannot be asked it is filled.)
fn is_locked_on_fault(at: usize) -> bool {
    let mut text = Vec::with_capacity(1 << 20);
    raw::read_file(b"/proc/thread-self/smaps\0", &mut text).is_ok()
        && maps::flagged(&text, maps::LOCKED_ON_FAULT).any(|(start, end)| (start..end).contains(&at))
}

//! The program's mapping calls are kept in order (why: `uzswap_pager::calls`).

use crate::{pager, set_mask};
use core::ffi::c_long;
use uzswap_pager::calls::Held;

/// How a call that is under way is ordered, on the stack of its thread.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct InOrder {
    held: Option<Held>,
    /// Signals as they were before, where they are blocked meanwhile.
    mask: u64,
}

/// Whether a call makes events, and whether it is `mremap`.
fn kind(nr: c_long, third: usize, fourth: usize) -> Option<bool> {
    let fixed = libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE;
    let drops = [libc::MADV_DONTNEED, libc::MADV_FREE, libc::MADV_REMOVE, libc::MADV_DONTNEED_LOCKED];
    match nr {
        libc::SYS_mremap => Some(true),
        libc::SYS_munmap | libc::SYS_brk => Some(false),
        libc::SYS_mmap => (fourth as i32 & fixed == libc::MAP_FIXED).then_some(false),
        libc::SYS_madvise => drops.contains(&(third as i32)).then_some(false),
        _ => None,
    }
}

/// Before the call `nr`, whose third and fourth argument are given.
pub fn begin_one(nr: c_long, third: usize, fourth: usize) -> InOrder {
    let (Some(p), Some(alone)) = (pager(), kind(nr, third, fourth)) else { return InOrder { held: None, mask: 0 } };
    if p.calls.begin_unordered() {
        return InOrder { held: Some(Held::Counted), mask: 0 };
    }
    let mask = set_mask(!0);
    InOrder { held: Some(p.calls.begin(alone)), mask }
}

/// After it.
pub fn end_one(call: InOrder) {
    let (Some(p), Some(held)) = (pager(), call.held) else { return };
    p.calls.end(held);
    if held != Held::Counted {
        set_mask(call.mask);
    }
}

/// For the wrapped calls of libc: before one.
pub extern "C" fn begin(at: *mut InOrder, nr: u32, third: usize, fourth: usize) {
    // SAFETY: the thunk's room on the stack.
    unsafe { at.write(begin_one(c_long::from(nr), third, fourth)) }
}

/// After one.
pub extern "C" fn end(at: *const InOrder) {
    // SAFETY: as `begin` wrote it.
    end_one(unsafe { at.read() })
}

const _: () = assert!(size_of::<InOrder>() == 16);

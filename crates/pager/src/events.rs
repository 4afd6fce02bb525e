//! Events: what the program did to its mappings.
//!
//! A range that is gone (unmapped, or its contents dropped by madvise) forgets everything known of it: what comes next
//! at that address reads as zeros. Between a *remove* event and the kernel's own zap old pages are still there; they
//! are no longer listed, a fault can only be on a page without old data, and a newly registered range is swept only
//! under the lock in which it was registered, so no stale page is ever evicted and brought back.

use crate::arena::PAGE;
use crate::object::{self, Header};
use crate::pager::Pager;
use crate::state::State;
use uzswap_mm::codec::Encoding;
use uzswap_mm::pagetable::{Pte, Tag};
use uzswap_sys::uffd::Message;

impl Pager {
    /// Applies an event.
    pub fn event(&self, s: &mut State, message: Message) {
        match message {
            Message::Gone { start, end } => forget_range(s, (start / PAGE) as u64, end.div_ceil(PAGE) as u64),
            Message::Remap { from, to, len } => {
                remap(s, (from / PAGE) as u64, (to / PAGE) as u64, len.div_ceil(PAGE) as u64)
            }
            Message::Fault { .. } | Message::Unknown(_) => {}
        }
    }
}

fn forget_range(s: &mut State, from: u64, to: u64) {
    let mut gone = Vec::new();
    s.pt.clear(from, to, |vpn, pte| gone.push((vpn, pte)));
    for (vpn, pte) in gone {
        s.forget(vpn, pte);
    }
}

fn remap(s: &mut State, from: u64, to: u64, pages: u64) {
    let mut moved = Vec::new();
    s.pt.clear(from, from + pages, |vpn, pte| moved.push((vpn, pte)));
    for (vpn, pte) in moved {
        let target = vpn - from + to;
        // A kept copy is found by the page's address, which changes: it goes.
        if let Some(handle) = pte.copy() {
            let index = s.copy_index(vpn, handle);
            s.release(handle, index);
        }
        match pte.tag() {
            Tag::Resident => {
                s.resident -= 1;
                s.list_resident(target, 1, false, |_| None);
            }
            Tag::Staged => {
                s.pt.set(target, Pte::new(Tag::Staged, pte.aux()));
                s.lru.staged.push(uzswap_mm::lru::Entry::new(target, 0, 0));
            }
            Tag::Busy => {
                // Its slot belongs to the compressing thread: recognised at the old address only. Copy the frame.
                busy_to_new_frame(s, target, pte.aux());
            }
            Tag::None => {}
            Tag::Compressed | Tag::Zero | Tag::Poisoned => s.pt.set(target, pte),
        }
    }
}

/// Stores a page that is being compressed raw in the pool under its new address: rare, and always possible.
fn busy_to_new_frame(s: &mut State, vpn: u64, slot: u32) {
    let layout = s.layout;
    // SAFETY: a Busy page's frame stays until commit; reading is shared.
    let page = unsafe { layout.frames(slot, 1) };
    let head = Header { len: PAGE, encoding: Encoding::Raw, order: 0, live: 1 };
    let handle = s.put_object(head, |place| object::set_hash(place, 0, object::hash(page)), page);
    let handle = handle.expect("the pool's address space holds one more page");
    s.pt.set(vpn, Pte::compressed(handle.raw(), 0, s.evictions));
    s.end_busy(1);
    s.swapped += 1;
}

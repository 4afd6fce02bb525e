//! Ready frames: runs just freed that stay unmerged for the next allocation, like the kernel's per-CPU lists.
//!
//! Runs of orders 0 and 2 (a page, and a block for four small folios) come and go all the time. If they merged when
//! freed, the next allocation would split them again. So the last ones freed stay as they are, at the heads of their
//! lists, where the next allocation of that order finds the warm one. The kernel has a list for each CPU, so that a CPU
//! need not take the zone's lock. Here one list is enough: the zone is under the pager's lock, which the thread that
//! serves a fault holds anyway.
//!
//! Invariants: a ready run is free in all books of the zone, but need not have merged. At most `high` frames are ready,
//! and none once somebody wants a run that the zone does not have ([`Zone::alloc`], [`Zone::alloc_up_to`]) or
//! compaction begins ([`Zone::coalesce`]). An entry may be out of date, as its run was taken or merged with one freed
//! since. Then there is nothing to do, or another run at that place merges, which is right at any time.

use super::{Kind, MigrateType, Zone, tag};
use std::collections::VecDeque;

/// The orders that are kept ready.
const ORDERS: [u8; 2] = [0, 2];

/// The runs that were freed last and have not merged yet.
#[derive(Default)]
pub(super) struct Ready {
    runs: VecDeque<(u32, u8)>,
    frames: usize,
    high: usize,
}

impl Ready {
    pub(super) fn takes(&self, kind: Kind, order: u8) -> bool {
        kind == Kind::Frame && self.high > 0 && ORDERS.contains(&order)
    }

    pub(super) fn bytes(&self) -> usize {
        self.runs.capacity() * size_of::<(u32, u8)>()
    }
}

impl Zone {
    /// Keeps up to `high` frames of [`Kind::Frame`] ready from now on. Initially it is 0: none.
    pub fn keep_ready(&mut self, high: usize) {
        self.coalesce();
        self.ready.high = high;
        // Room for one run more than may stay.
        self.ready.runs.reserve_exact(high + 1);
    }

    /// Free frames that may not have merged yet.
    pub fn ready(&self) -> usize {
        self.ready.frames
    }

    /// Merges all ready runs: each free run is then as large as it can be.
    pub fn coalesce(&mut self) {
        while self.merge_oldest() {}
    }

    /// Notes a run that was just freed. If too many frames are ready, the oldest runs merge until half of `high` are
    /// left.
    pub(super) fn note_ready(&mut self, frame: u32, order: u8) {
        self.ready.runs.push_back((frame, order));
        self.ready.frames += 1 << order;
        if self.ready.frames > self.ready.high {
            while self.ready.frames > self.ready.high / 2 && self.merge_oldest() {}
        }
    }

    fn merge_oldest(&mut self) -> bool {
        let Some((frame, order)) = self.ready.runs.pop_front() else { return false };
        self.ready.frames -= 1 << order;
        let of_any_type = |tag: u8| tag & 0x1f;
        if of_any_type(self.tag[self.at(frame)]) == of_any_type(tag(Kind::Frame, MigrateType::Movable, order)) {
            self.unlink(Kind::Frame, frame, order);
            self.merge(Kind::Frame, frame, order);
        }
        true
    }
}

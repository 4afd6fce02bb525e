//! Ready frames: what the kernel's per-CPU lists are for, in a zone that one thread has at a time.
//!
//! Runs of orders 0 and 2 (a page, and a block for four small folios) come and go all the time: merged when they are freed they are
//! split again by the next allocation. Here the last ones freed stay as they are, at the heads of their lists, where the next
//! allocation of that order finds the one that is warm. The kernel has a list for each CPU, so that a CPU need not take the
//! zone's lock; the pager has its zone under a lock that whoever serves a fault holds anyway, so there is one for all.
//!
//! Invariants: a ready run is free in all books of the zone, but need not have merged; no more than `high` frames are ready, and
//! none once a run is wanted that the zone does not have ([`Zone::alloc`], [`Zone::alloc_up_to`]), or compaction begins
//! ([`Zone::coalesce`]). An entry may be out of date (its run was taken, or has merged with one freed since): then there is
//! nothing to do, or another run of that place merges, which is right at any time.

use super::{Kind, MigrateType, Zone, tag};
use std::collections::VecDeque;

/// The orders that are kept ready.
const ORDERS: [u8; 2] = [0, 2];

/// The runs that were freed last, and have not merged yet.
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
    /// Keeps up to `high` frames ready from now on (0, as at first: none), of the kind [`Kind::Frame`].
    pub fn keep_ready(&mut self, high: usize) {
        self.coalesce();
        self.ready.high = high;
        // (One run more than may stay.)
        self.ready.runs.reserve_exact(high + 1);
    }

    /// Frames that are free and may not have merged yet.
    pub fn ready(&self) -> usize {
        self.ready.frames
    }

    /// Merges what is ready: after that each free run is as large as it can be.
    pub fn coalesce(&mut self) {
        while self.merge_oldest() {}
    }

    /// Notes a run that was freed just now. Of too many the oldest go, half of them at a time.
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

//! Contents that a process drops by the kernel's own call, `madvise(MADV_REMOVE)` on its mapping.
//!
//! What the object holds is dropped by the kernel. What is out (or on its way out) is ours to drop, and of that the kernel tells
//! only *before* the call acts, and in the same words as of MADV_DONTNEED, which must lose nothing. So what is told is taken down as
//! a **doubt**: a range of pages whose first and last page are held in the object as *witnesses*, and which ends one of three ways:
//! - both witnesses are gone: the hole was punched, and all that is out of the range is dropped with it;
//! - the mappings whose calls it stands for are gone: they only dropped page-table entries;
//! - the owner is told to drop it all itself.
//!
//! # Why it is right
//! 1. *The witnesses are there before the punch.* The caller waits until its event is read. It is read with the gate closed
//!    ([`Gate`]), that is, while nobody can punch; the witnesses are there before it is opened. (They are neither evicted nor punched
//!    by us while the doubt stands: [`Removes::is_witness`].)
//! 2. *Both gone means that all of it was punched.* A punch is one run of pages, so one that took both ends took what is between.
//!    Ranges told of are cut at each other's ends, hence each call's punch takes a doubt as a whole or not at all. One end gone
//!    alone is the doing of a caller that was killed before its event was read (the kernel then acts and tells nobody): such a
//!    call has not returned, and what of it was out may stay.
//! 3. *Both there means: not yet.* [`memfd::has`] takes the object's lock, so no punch is half done when it answers. What happens
//!    after the answer is seen to where it matters: a page filled from the pool is looked at again before it is called resident
//!    (`hold`), and what a batch has put out is settled when it has left (`finish`). In both cases the lock of the object puts our
//!    own write or punch wholly before or wholly after the other.
//! 4. *A doubt is about what was there when its event was read*, and is cut to the pages that had contents. What is written later is
//!    written while the call is under way, and may be kept. So it ends with the first punch that is seen, however many events
//!    it stands for: all of them were read before that punch, as every event settles first what it overlaps.
//! 5. *Nothing is made in the place of a witness* before it was seen that it is gone: all that fills a page settles first.
//!
//! # Locks
//! Engine's lock → gate. Everything here is under the engine's lock, and nothing waits for another process: not for its events,
//! which are read by whoever meets `EAGAIN` and has the lock ([`Engine::wait_out`]; faults that are read meanwhile are kept for the
//! mapping's own thread, which is kicked), and not for it to go on after it was read, which is tried a number of times and then put
//! off with the lock given up.
//!
//! # When an event is read unawares
//! Closing the gate takes two thread switches, too much for each fault. So it is asked first whether an event is coming
//! ([`Uffd::is_changing`](uzswap_sys::uffd::Uffd)), and if not, and something was there to be read before the question (with the
//! lock held, so that nobody else has read it since), one message is read: a fault. If that fault's thread was interrupted and a call
//! of `madvise` came in the same microsecond, an event is read with the gate open. Pages that were in memory are then witnesses by
//! themselves; where there are none, or they are gone, it cannot be known whether the others are older than the punch: they are lost,
//! and whoever touches them is told. [`Removes::unvouched`] counts them.
//!
//! # When it cannot be looked
//! Where the gate cannot be closed, or the kernel has no memory for a question or a witness, what is out of the range is lost as well.
//! What is in memory stays there, what was on its way out included: if it left before the call's punch the punch would find nothing,
//! and it would come back as it was. So the doubt is a *blind* one, which holds all of its pages, until a later look succeeds.
//!
//! # What it costs
//! A question for each message read. A doubt keeps two pages in memory (one, where it is of one page). A call of MADV_REMOVE ends it;
//! one of MADV_DONTNEED keeps it as long as its mapping. Their number is bounded only by the pages in use: none may be forgotten, as
//! its call may be one that is slow.

use super::engine::Engine;
use super::gate::Gate;
use crate::frames::arena::PAGE;
use std::ops::Range;
use std::os::fd::AsRawFd;
use uzswap_mm::pagetable::{Pte, Tag};
use uzswap_sys::memfd;
use uzswap_sys::uffd_shared::{SharedFault, SharedMessage};

/// Closings of the gate that are tried.
const CLOSINGS: usize = 3;
/// Looks at a mapping that is about to change, with the lock held, before its work is put off.
const LOOKS: usize = 200;

/// Why it may be that it cannot be seen what was removed.
const GATE_OPEN: &str = "the kernel refuses the write that keeps others from removing";
const NO_ANSWER: &str = "the kernel does not tell, or has no memory for, which pages there are";
const UNAWARES: &str = "a thread was interrupted in a fault and called madvise just when its fault was to be read";

/// A range of which it is not known whether it was removed. Its first and its last page are its witnesses.
struct Doubt {
    from: u64,
    to: u64,
    /// Mappings whose calls it stands for.
    of: Vec<u64>,
    /// Without witnesses, as it could not be seen what is there: nothing of it is out, and nothing of it leaves.
    blind: bool,
}

impl Doubt {
    /// Pages that must stay in the object while it stands.
    fn held(&self) -> impl Iterator<Item = u64> + use<> {
        let step = if self.blind { 1 } else { (self.to - 1 - self.from).max(1) };
        (self.from..self.to).step_by(step as usize)
    }
}

/// The doubts of a region. Owner: the engine's lock.
pub(super) struct Removes {
    /// None: the kernel does not allow it, and removes by its call are not seen.
    pub gate: Option<Gate>,
    /// Ascending, disjoint.
    doubts: Vec<Doubt>,
    /// As many doubts make the next event settle all of them.
    settle_at: usize,
    /// Pages lost as it could not be known whether they were removed.
    pub unvouched: u64,
    /// Messages that are to be read without asking for events first: for tests.
    pub blind: u64,
}

impl Removes {
    pub fn new(gate: Option<Gate>) -> Self {
        Self { gate, doubts: Vec::new(), settle_at: 64, unvouched: 0, blind: 0 }
    }

    /// Doubts that stand.
    pub fn len(&self) -> usize {
        self.doubts.len()
    }

    /// Bytes of the table.
    pub fn metadata_bytes(&self) -> usize {
        self.doubts.capacity() * size_of::<Doubt>() + self.doubts.iter().map(|d| d.of.capacity() * 8).sum::<usize>()
    }

    /// Indices of the doubts that share a page with `[from, to)`.
    fn meeting(&self, from: u64, to: u64) -> Range<usize> {
        let first = self.doubts.partition_point(|d| d.to <= from);
        first..first.max(self.doubts.partition_point(|d| d.from < to))
    }

    /// Whether a page of `[from, to)` is in doubt.
    pub fn covers(&self, from: u64, to: u64) -> bool {
        !self.doubts.is_empty() && !self.meeting(from, to).is_empty()
    }

    /// Whether a page must stay in the object.
    pub fn is_witness(&self, page: u64) -> bool {
        self.covers(page, page + 1) && {
            let d = &self.doubts[self.meeting(page, page + 1).start];
            d.blind || page == d.from || page == d.to - 1
        }
    }

    fn insert(&mut self, doubt: Doubt) {
        let at = self.doubts.partition_point(|d| d.from < doubt.from);
        self.doubts.insert(at, doubt);
    }

    fn gate(&self) -> &Gate {
        self.gate.as_ref().expect("doubts come through the gate")
    }
}

impl Engine {
    /// Sees what has become of the doubts about `[from, to)`: whoever is to do anything with its pages does this first.
    pub fn settle(&mut self, from: u64, to: u64) {
        if !self.removes.covers(from, to) {
            return;
        }
        let blind = || self.removes.doubts[self.removes.meeting(from, to)].iter().any(|d| d.blind);
        if (blind() || !self.witnesses_are_there(from, to)) && !self.gated(|e| e.evaluate(from, to)) {
            self.give_up(from, to);
        }
    }

    /// The same for one page of many in ascending order, of which those below `settled` were settled; returns up to where they now are.
    pub fn settle_beyond(&mut self, page: u64, settled: u64) -> u64 {
        if page < settled || !self.removes.covers(page, page + 1) {
            return settled;
        }
        let end = self.removes.doubts[self.removes.meeting(page, page + 1).start].to;
        self.settle(page, page + 1);
        end
    }

    /// Whether the object has the witnesses of all doubts about `[from, to)`.
    pub fn witnesses_are_there(&self, from: u64, to: u64) -> bool {
        let there = |page: u64| memfd::has(&self.object, page * PAGE as u64).unwrap_or(false);
        let doubts = &self.removes.doubts[self.removes.meeting(from, to)];
        doubts.iter().all(|d| d.blind || there(d.from) && there(d.to - 1))
    }

    /// Does something with the gate closed; false when it cannot be closed.
    fn gated(&mut self, work: impl FnOnce(&mut Self)) -> bool {
        let Some(gate) = &mut self.removes.gate else { return false };
        if (0..CLOSINGS).all(|_| gate.close().is_err()) {
            return false;
        }
        // Readers ask, and so wait for the lock: a caller of MADV_DONTNEED goes on as soon as its event is read.
        self.map.set_doubts(self.removes.len() as u64 + 1);
        work(self);
        // One of MADV_REMOVE goes on when the gate is open.
        self.map.set_doubts(self.removes.len() as u64);
        self.removes.gate.as_mut().expect("it was just closed").open();
        true
    }

    /// Gate closed: what has become of the doubts about `[from, to)`.
    fn evaluate(&mut self, from: u64, to: u64) {
        for d in self.take_doubts(from, to) {
            if d.blind {
                self.list_witnesses(&d);
                self.punched(d.from, d.to, false);
                self.cover(d.from, d.to, d.of);
                continue;
            }
            match (self.removes.gate().holds(d.from), self.removes.gate().holds(d.to - 1)) {
                (Ok(true), Ok(true)) => self.removes.insert(d),
                (Ok(false), Ok(false)) => {
                    self.list_witnesses(&d);
                    self.punched(d.from, d.to, true);
                }
                (Ok(_), Ok(_)) => {
                    self.list_witnesses(&d);
                    self.punched(d.from, d.to, false);
                    self.cover(d.from, d.to, d.of);
                }
                _ => self.hold_all(d.from, d.to, d.of, NO_ANSWER),
            }
        }
    }

    fn take_doubts(&mut self, from: u64, to: u64) -> Vec<Doubt> {
        let meeting = self.removes.meeting(from, to);
        self.removes.doubts.drain(meeting).collect()
    }

    /// The gate cannot be closed: nothing can be known of what is out.
    fn give_up(&mut self, from: u64, to: u64) {
        for d in self.take_doubts(from, to) {
            self.hold_all(d.from, d.to, d.of, GATE_OPEN);
        }
        self.map.set_doubts(self.removes.len() as u64);
    }

    /// The witnesses of a doubt that has ended (and is in the list no more) may leave again.
    fn list_witnesses(&mut self, d: &Doubt) {
        for page in d.held() {
            let pte = self.pt.get(page);
            if pte.tag() == Tag::Resident && !self.pins.has(page) {
                self.list_resident(page, 1, true, |_| pte.copy());
            }
        }
    }

    /// Books what a punch took of `[from, to)`: pages that the object should have and has not, and with `out` all that is out.
    fn punched(&mut self, from: u64, to: u64, out: bool) {
        let sure = self.removes.gate().surely_has(from, to);
        let (mut at, mut run) = (from, from..from);
        self.map.writer().begin();
        while let Some(page) = self.pt.next_used(at).filter(|p| *p < to) {
            at = page + 1;
            let gone = match self.pt.get(page).tag() {
                Tag::Resident | Tag::Busy => {
                    !sure[(page - from) as usize] && self.removes.gate().holds(page) == Ok(false)
                }
                _ => out,
            };
            if !gone {
                continue;
            }
            if run.end != page {
                self.emptied(run.start, run.end);
                run.start = page;
            }
            run.end = page + 1;
        }
        self.emptied(run.start, run.end);
        self.map.writer().end();
    }

    /// What is out of `[from, to)` may have been removed, or not, as `why` says: nobody gets it.
    fn lose_out(&mut self, from: u64, to: u64, why: &str) {
        let (mut at, mut lost) = (from, 0);
        while let Some(page) = self.pt.next_used(at).filter(|p| *p < to) {
            at = page + 1;
            if matches!(self.pt.get(page).tag(), Tag::Compressed | Tag::Zero) {
                self.forget(page);
                self.set(page, Pte::new(Tag::Poisoned, 0));
                lost += 1;
            }
        }
        if lost > 0 {
            self.counts.poisoned += lost;
            self.removes.unvouched += lost;
            let text = format!(
                "uzswap: it could not be seen whether {lost} pages of a shared region were removed while they were out ({why}); who \
                 touches them gets SIGBUS\n",
            );
            crate::says::say(text.as_bytes());
        }
    }

    /// A call in mappings `of` is under way, or may be, about `[from, to)`, where there is no doubt, and it cannot be seen what it
    /// takes. What is out is lost; the rest stays in memory, lest the call find it gone, and what was taken come back: until it can be
    /// seen again, or they end. (A page that was on its way out just then had its former contents after it was removed.)
    fn hold_all(&mut self, from: u64, to: u64, of: Vec<u64>, why: &str) {
        self.lose_out(from, to, why);
        let (mut at, mut held) = (from, None);
        while let Some(page) = self.pt.next_used(at).filter(|p| *p < to) {
            at = page + 1;
            self.rescue(page);
            if self.pt.get(page).tag() == Tag::Resident {
                held = Some((held.map_or(page, |(first, _)| first), at));
            }
        }
        if let Some((from, to)) = held {
            self.removes.insert(Doubt { from, to, of, blind: true });
        }
    }

    /// Gate closed: takes down a doubt about what has contents in `[from, to)`, where there is none yet.
    fn cover(&mut self, from: u64, to: u64, of: Vec<u64>) {
        let mut first = from;
        loop {
            let Some(page) = self.pt.next_used(first).filter(|p| *p < to) else { return };
            first = page;
            match self.make_witness(page) {
                Some(true) => break,
                // It is empty, as is now seen, or lost.
                Some(false) => first += 1,
                None => return self.hold_all(from, to, of, NO_ANSWER),
            }
        }
        let mut last = to - 1;
        while last > first {
            match self.make_witness(last) {
                Some(true) => break,
                Some(false) => last -= 1,
                None => return self.hold_all(from, to, of, NO_ANSWER),
            }
        }
        self.removes.insert(Doubt { from: first, to: last + 1, of, blind: false });
    }

    /// Gate closed: sees to it that the object has the page. False: it has no contents. None: no memory.
    fn make_witness(&mut self, page: u64) -> Option<bool> {
        match self.pt.get(page).tag() {
            Tag::Resident | Tag::Busy => match self.removes.gate().holds(page) {
                Ok(true) => {
                    self.rescue(page);
                    Some(true)
                }
                Ok(false) => {
                    self.emptied(page, page + 1);
                    Some(false)
                }
                Err(_) => None,
            },
            Tag::Compressed | Tag::Zero => match self.bring_back(page, 1, false, true) {
                Ok(_) => Some(true),
                Err(_) if self.pt.get(page).tag() == Tag::Poisoned => Some(false),
                Err(_) => None,
            },
            _ => Some(false),
        }
    }

    /// Gate closed: a call in a mapping is about to drop entries or contents of `[from, to)`.
    fn removing(&mut self, id: u64, from: u64, to: u64) {
        self.evaluate(from, to);
        self.cut(from);
        self.cut(to);
        for (from, to) in self.doubted_too(id, from, to) {
            self.cover(from, to, vec![id]);
        }
    }

    /// The doubts about `[from, to)` stand for a call in another mapping as well; what of it they leave out.
    fn doubted_too(&mut self, id: u64, from: u64, to: u64) -> Vec<(u64, u64)> {
        let (mut at, mut gaps) = (from, Vec::new());
        let meeting = self.removes.meeting(from, to);
        for d in &mut self.removes.doubts[meeting] {
            if !d.of.contains(&id) {
                d.of.push(id);
            }
            gaps.push((at, d.from));
            at = d.to;
        }
        gaps.push((at, to));
        gaps.retain(|(from, to)| from < to);
        gaps
    }

    /// Gate closed: makes two of the doubt that page `at` is inside of.
    fn cut(&mut self, at: u64) {
        let meeting = self.removes.meeting(at, at + 1);
        if self.removes.doubts[meeting].iter().any(|d| d.from < at) {
            for d in self.take_doubts(at, at + 1) {
                self.list_witnesses(&d);
                self.cover(d.from, at, d.of.clone());
                self.cover(at, d.to, d.of);
            }
        }
    }

    /// The owner is about to drop `[from, to)` itself: no doubt is left about it.
    pub fn end_doubts(&mut self, from: u64, to: u64) {
        if !self.removes.covers(from, to) {
            return;
        }
        let done = self.gated(|e| {
            e.evaluate(from, to);
            e.cut(from);
            e.cut(to);
            for d in e.take_doubts(from, to) {
                e.list_witnesses(&d);
            }
        });
        if !done {
            self.give_up(from, to);
        }
    }

    /// A mapping has ended, and with it the calls made in it.
    pub fn end_doubts_of(&mut self, id: u64) {
        if self.removes.gate.is_none() {
            return;
        }
        self.settle(0, self.pages);
        let (ended, stay) = core::mem::take(&mut self.removes.doubts).into_iter().partition(|d| d.of == [id]);
        self.removes.doubts = stay;
        self.removes.doubts.iter_mut().for_each(|d| d.of.retain(|of| *of != id));
        let ended: Vec<Doubt> = ended;
        ended.iter().for_each(|d| self.list_witnesses(d));
        self.map.set_doubts(self.removes.len() as u64);
        // What a call that was killed has taken and not told of. (Witnesses were just looked at; between them it is found later.)
        let mut at = 0;
        for (from, to) in
            self.removes.doubts.iter().map(|d| (d.from, d.to)).chain([(self.pages, self.pages)]).collect::<Vec<_>>()
        {
            if at < from {
                self.punched(at, from, false);
            }
            at = to;
        }
    }

    /// The next fault of mapping `k` of the list. Events are seen to.
    pub fn next_fault(&mut self, k: usize) -> Option<SharedFault> {
        let uffd = self.mappings[k].uffd();
        if self.removes.gate.is_some() && self.removes.blind == 0 {
            // Asked with the lock held: what the thread's poll had found may have been read since by whoever had the lock, or its
            // page may have been mapped, and then the next message could as well be an event that comes after the next question.
            if !uffd.wait(0) {
                return None;
            }
            if uffd.is_changing() {
                self.read_events(k);
                return self.mappings[k].kept.pop_front();
            }
        }
        match uffd.read_shared() {
            Ok(Some(SharedMessage::Fault { fault, tid })) => {
                self.mappings[k].faulted_by(tid);
                Some(fault)
            }
            Ok(Some(SharedMessage::Removed { start, end })) => {
                self.removes.blind = self.removes.blind.saturating_sub(1);
                self.removing_unawares(k, start, end);
                None
            }
            Ok(Some(SharedMessage::Other) | None) | Err(_) => None,
        }
    }

    /// Reads what there is of mapping `k` with the gate closed.
    fn read_events(&mut self, k: usize) {
        let done = self.gated(|e| {
            while let Ok(Some(message)) = e.mappings[k].uffd().read_shared() {
                match message {
                    SharedMessage::Fault { fault, .. } => e.mappings[k].kept.push_back(fault),
                    SharedMessage::Removed { start, end } => {
                        if let Some((id, from, to)) = e.pages_told(k, start, end) {
                            e.removing(id, from, to);
                        }
                    }
                    SharedMessage::Other => {}
                }
            }
        });
        if !done {
            // Then with the gate open, one at a time.
            match self.mappings[k].uffd().read_shared() {
                Ok(Some(SharedMessage::Fault { fault, .. })) => self.mappings[k].kept.push_back(fault),
                Ok(Some(SharedMessage::Removed { start, end })) => self.removing_unawares(k, start, end),
                _ => {}
            }
        }
        if self.removes.len() >= self.removes.settle_at {
            self.settle(0, self.pages);
            self.removes.settle_at = 64.max(2 * self.removes.len());
        }
    }

    /// The pages that an event is about, and the mapping's number. None: it is our own watcher's, which drops page-table entries
    /// only, and says so by the page behind the region that it takes along.
    fn pages_told(&self, k: usize, start: usize, end: usize) -> Option<(u64, u64, u64)> {
        let m = &self.mappings[k];
        let from = start.checked_sub(m.base)? / PAGE;
        let to = end.checked_sub(m.base)?.div_ceil(PAGE);
        (from < to && to as u64 <= self.pages).then_some((m.id, from as u64, to as u64))
    }

    /// An event was read with the gate open: see the head of this file.
    fn removing_unawares(&mut self, k: usize, start: usize, end: usize) {
        let Some((id, from, to)) = self.pages_told(k, start, end) else { return };
        let done = self.gated(|e| {
            // Before anything is made of it: a witness that this very call took must not pass for one that was taken by another.
            let (mut at, mut there, mut gone) = (from, false, false);
            while let Some(page) = e.pt.next_used(at).filter(|p| *p < to) {
                at = page + 1;
                if matches!(e.pt.get(page).tag(), Tag::Resident | Tag::Busy) {
                    let holds = e.removes.gate().holds(page);
                    there |= holds == Ok(true);
                    gone |= holds != Ok(true);
                }
            }
            if gone || !there {
                e.lose_out(from, to, UNAWARES);
            }
            e.evaluate(from, to);
            e.punched(from, to, false);
            e.removing(id, from, to);
        });
        if !done {
            self.give_up(from, to);
            for (from, to) in self.doubted_too(id, from, to) {
                self.hold_all(from, to, vec![id], GATE_OPEN);
            }
            self.map.set_doubts(self.removes.len() as u64);
        }
    }

    /// An ioctl on mapping `k` answered `EAGAIN`: sees to its events. False when its process must run first: then the lock is to be
    /// given up.
    pub fn wait_out(&mut self, k: usize) -> bool {
        for _ in 0..LOOKS {
            let uffd = self.mappings[k].uffd();
            if !uffd.is_changing() {
                return true;
            }
            if self.removes.gate.is_some() && uffd.wait(0) {
                self.read_events(k);
                if !self.mappings[k].kept.is_empty() {
                    // They are not in the queue any more: nothing else would wake the mapping's thread for them.
                    uzswap_sys::eventfd::raise(self.mappings[k].kick.as_raw_fd());
                }
            } else {
                std::thread::yield_now();
            }
        }
        false
    }
}

//! Drops pages that are out when a process removes them by the kernel's own call, `madvise(MADV_REMOVE)` on its mapping.
//!
//! The kernel drops what the object holds. Pages that are out (or on their way out) are ours to drop. The kernel reports the call
//! only *before* it acts, and in the same words as MADV_DONTNEED, which must lose nothing. So each report is noted as a
//! **doubt**: a range of pages whose first and last page are held in the object as *witnesses*. A doubt ends in one of three
//! ways:
//! - both witnesses are gone: the hole was punched, and everything in the range that is out is dropped with it;
//! - the mappings whose calls it stands for are gone: those calls only dropped page-table entries;
//! - the owner is told to drop the range itself.
//!
//! # Why it is right
//! 1. *The witnesses are there before the punch.* The caller waits until its event is read. The event is read with the gate
//!    closed ([`Gate`]), so that nobody can punch; the witnesses are there before it opens. (While the doubt stands we neither
//!    evict nor punch them: [`Removes::is_witness`].)
//! 2. *Both gone means that all of it was punched.* A punch is one run of pages, so one that took both ends took everything
//!    between. Reported ranges are cut at each other's ends, so each call's punch takes a doubt as a whole or not at all. If only
//!    one end is gone, a caller was killed before its event was read (the kernel then acts and tells nobody). Such a call has not
//!    returned, and pages of it that were out may stay.
//! 3. *Both there means: not yet.* [`memfd::has`] takes the object's lock, so no punch is half done when it answers. What happens
//!    after the answer is checked where it matters: a page filled from the pool is looked at again before it is called resident
//!    (`hold`), and pages that a batch has paged out are settled after they have left (`finish`). In both cases the object's lock
//!    puts our own write or punch wholly before or wholly after the other.
//! 4. *A doubt is about what was there when its event was read*, and is cut to the pages that had contents. Whatever is written
//!    later is written while the call is under way, and may be kept. So a doubt ends with the first punch that is seen, however
//!    many events it stands for: all of them were read before that punch, as every event first settles what it overlaps.
//! 5. *Nothing replaces a witness* before it was seen to be gone: everything that fills a page settles first.
//!
//! # Locks
//! Engine's lock → gate. Everything here runs under the engine's lock, and nothing waits for another process. It does not wait
//! for events: the thread that meets `EAGAIN` and has the lock reads them ([`Engine::wait_out`]; faults read meanwhile are kept
//! for the mapping's own thread, which is kicked). Nor does it wait for the process to go on afterwards: it tries a number of
//! times, and then puts the work off with the lock released.
//!
//! # When an event is read unawares
//! Closing the gate takes two thread switches, too much for each fault. So we first ask whether an event is coming
//! ([`Uffd::is_changing`](uzswap_sys::uffd::Uffd)). If not, and there was something to read before that question (with the lock
//! held, so that nobody else has read it since), one message is read: a fault. If that fault's thread was interrupted, and a call
//! of `madvise` came in the same microsecond, an event is read with the gate open. Pages that were in memory are then witnesses
//! by themselves. Where there are none, or they are gone, nobody can know whether the other pages are older than the punch: they
//! are lost, and touching them raises SIGBUS. [`Removes::unvouched`] counts them.
//!
//! # When nobody can look
//! If the gate cannot be closed, or the kernel has no memory for a question or a witness, pages of the range that are out are
//! lost as well. Pages in memory stay there, including those that were on their way out: had they left before the call's punch,
//! the punch would find nothing, and they would come back as they were. So the doubt is *blind* and holds all of its pages, until
//! a later look succeeds.
//!
//! # What it costs
//! One question for each message read. A doubt keeps two pages in memory (or its only page). A call of MADV_REMOVE ends it; one
//! of MADV_DONTNEED keeps it as long as its mapping lives. Only the pages in use bound the number of doubts: none may be
//! forgotten, as its call may be a slow one.

use super::engine::Engine;
use super::gate::Gate;
use crate::frames::arena::PAGE;
use std::ops::Range;
use std::os::fd::AsRawFd;
use uzswap_mm::pagetable::{Pte, Tag};
use uzswap_sys::memfd;
use uzswap_sys::uffd_shared::{SharedFault, SharedMessage};

/// How often closing the gate is tried.
const CLOSINGS: usize = 3;
/// Looks at a mapping that is about to change, with the lock held, before the work is put off.
const LOOKS: usize = 200;

/// Reasons why it could not be seen what was removed.
const GATE_OPEN: &str = "the kernel refuses the write that keeps others from removing";
const NO_ANSWER: &str = "the kernel does not tell, or has no memory for, which pages there are";
const UNAWARES: &str = "a thread was interrupted in a fault and called madvise just when its fault was to be read";

/// A range that may or may not have been removed. Its first and its last page are its witnesses.
struct Doubt {
    from: u64,
    to: u64,
    /// The mappings whose calls it stands for.
    of: Vec<u64>,
    /// It has no witnesses, as it could not be seen what is there: nothing of it is out, and nothing of it leaves.
    blind: bool,
}

impl Doubt {
    /// The pages that must stay in the object while the doubt stands.
    fn held(&self) -> impl Iterator<Item = u64> + use<> {
        let step = if self.blind { 1 } else { (self.to - 1 - self.from).max(1) };
        (self.from..self.to).step_by(step as usize)
    }
}

/// The doubts of a region. Owner: the engine's lock.
pub(super) struct Removes {
    /// None: the kernel does not allow a gate, and `madvise(MADV_REMOVE)` is not seen.
    pub gate: Option<Gate>,
    /// The doubts, ascending and disjoint.
    doubts: Vec<Doubt>,
    /// With this many doubts the next event settles all of them.
    settle_at: usize,
    /// Pages lost because nobody could know whether they were removed.
    pub unvouched: u64,
    /// For tests: this many messages are read without asking for events first.
    pub blind: u64,
}

impl Removes {
    pub fn new(gate: Option<Gate>) -> Self {
        Self { gate, doubts: Vec::new(), settle_at: 64, unvouched: 0, blind: 0 }
    }

    /// Number of doubts that stand.
    pub fn len(&self) -> usize {
        self.doubts.len()
    }

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

    /// Whether a page must stay in the object, for a doubt.
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
    /// Determines what became of the doubts about `[from, to)`. Everything that touches its pages calls this first.
    pub fn settle(&mut self, from: u64, to: u64) {
        if !self.removes.covers(from, to) {
            return;
        }
        let blind = || self.removes.doubts[self.removes.meeting(from, to)].iter().any(|d| d.blind);
        if (blind() || !self.witnesses_are_there(from, to)) && !self.gated(|e| e.evaluate(from, to)) {
            self.give_up(from, to);
        }
    }

    /// The same for one of many pages in ascending order, of which those below `settled` are settled; returns the new bound.
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

    /// Does something with the gate closed; false if the gate cannot be closed.
    fn gated(&mut self, work: impl FnOnce(&mut Self)) -> bool {
        let Some(gate) = &mut self.removes.gate else { return false };
        if (0..CLOSINGS).all(|_| gate.close().is_err()) {
            return false;
        }
        // This makes readers ask, and so wait for the lock: a caller of MADV_DONTNEED goes on as soon as its event is read.
        self.map.set_doubts(self.removes.len() as u64 + 1);
        work(self);
        // A caller of MADV_REMOVE goes on once the gate is open.
        self.map.set_doubts(self.removes.len() as u64);
        self.removes.gate.as_mut().expect("it was just closed").open();
        true
    }

    /// With the gate closed: determines what became of the doubts about `[from, to)`.
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

    /// The gate cannot be closed: nothing can be known about pages that are out.
    fn give_up(&mut self, from: u64, to: u64) {
        for d in self.take_doubts(from, to) {
            self.hold_all(d.from, d.to, d.of, GATE_OPEN);
        }
        self.map.set_doubts(self.removes.len() as u64);
    }

    /// Lets the witnesses of a doubt leave again that has ended (and is not in the list any more).
    fn list_witnesses(&mut self, d: &Doubt) {
        for page in d.held() {
            let pte = self.pt.get(page);
            if pte.tag() == Tag::Resident && !self.pins.has(page) {
                self.list_resident(page, 1, true, |_| pte.copy());
            }
        }
    }

    /// Books what a punch took from `[from, to)`: pages that the object should have and has not; with `out`, also all pages that
    /// are out.
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

    /// Pages of `[from, to)` that are out may or may not have been removed, for the reason `why`: nobody gets them.
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

    /// A call in the mappings `of` is, or may be, under way on `[from, to)`, where there is no doubt yet, and it cannot be seen
    /// what it takes. Pages that are out are lost. The rest stays in memory until the look succeeds, or those mappings end;
    /// otherwise the call might find it gone, and removed pages come back. (A page that was just on its way out then has its
    /// former contents after it was removed.)
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

    /// With the gate closed: notes a doubt about those pages of `[from, to)` that have contents; there is none about them yet.
    fn cover(&mut self, from: u64, to: u64, of: Vec<u64>) {
        let mut first = from;
        loop {
            let Some(page) = self.pt.next_used(first).filter(|p| *p < to) else { return };
            first = page;
            match self.make_witness(page) {
                Some(true) => break,
                // It turned out to be empty, or is lost.
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

    /// With the gate closed: makes sure that the object has the page; false if the page has no contents, None if there is no
    /// memory.
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

    /// With the gate closed: a call in a mapping is about to drop entries or contents of `[from, to)`.
    fn removing(&mut self, id: u64, from: u64, to: u64) {
        self.evaluate(from, to);
        self.cut(from);
        self.cut(to);
        for (from, to) in self.doubted_too(id, from, to) {
            self.cover(from, to, vec![id]);
        }
    }

    /// Makes the doubts about `[from, to)` stand for a call in another mapping as well; returns the parts that they leave out.
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

    /// With the gate closed: splits the doubt that page `at` lies inside of.
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

    /// The owner is about to drop `[from, to)` itself: ends all doubts about it.
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
        // Finds what a killed call took and did not report. (Witnesses were just checked; pages between them are found later.)
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

    /// The next fault of the `k`-th mapping in the list. Handles events on the way.
    pub fn next_fault(&mut self, k: usize) -> Option<SharedFault> {
        let uffd = self.mappings[k].uffd();
        if self.removes.gate.is_some() && self.removes.blind == 0 {
            // Ask with the lock held. Whoever had the lock may have read what the thread's poll found, or mapped its page since.
            // Then the next message could as well be an event that comes after the next question.
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

    /// Reads all messages of mapping `k` with the gate closed.
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
            // If the gate cannot be closed, with the gate open, one message at a time.
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

    /// The pages that an event is about, and the mapping's number. None if the event is our own watcher's, which drops only
    /// page-table entries, and shows that by including the page behind the region.
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
            // This comes before anything is made of it: a witness taken by this very call must not seem taken by another.
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

    /// An ioctl on mapping `k` answered `EAGAIN`: reads its events; false if its process must run first; then release the lock.
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

//! Fills a write with the objects that the shrinker gives up, in its order.
//!
//! Objects that are still warm are set aside to be made dense first (`dense`), and those too large for the disk, or for the last
//! holes in it, to be cut.
//! Objects that only back copies are dropped. Each object that goes is in flight, and marked so, until its write has ended
//! (`writeback`).

use super::dense::{MOST_ASIDE, is_warm};
use super::turns::Task;
use super::{FRONT, Flight, Swap, checksum};
use crate::frames::arena::PAGE;
use crate::pager::Pager;
use crate::pool::cut::FITTING;
use crate::pool::object::{self, Header};
use crate::state::State;
use uzswap_mm::codec::Encoding;
use uzswap_mm::pageset::PageSet;
use uzswap_mm::pagetable::{HINT_REUSED, Pte, Tag};
use uzswap_mm::shrinker::{Entry, Verdict};
use uzswap_mm::swapfile::{GRAIN, Run};

/// Objects met under one hold of the lock.
const MOST_MET: usize = 2048;

/// Outcome of filling a run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Filled {
    /// There is more to meet.
    pub(super) more: bool,
    /// Memory was freed already.
    pub(super) freed: bool,
    /// Objects were met that are larger than the whole run.
    pub(super) too_large: bool,
}

impl Pager {
    /// Fills a run with objects that are to go, until the task is done: about as many bytes are in it as are to be freed, or as
    /// many pages were met for that as may be, and all that was due was met.
    pub(super) fn fill_run(
        &self,
        s: &mut State,
        swap: &mut Swap,
        slot: usize,
        run: &mut Run,
        buffer: &mut [u8],
        task: Task,
    ) -> Filled {
        // `hoped`: an object that is set aside gets smaller by a quarter or more.
        let (mut met, mut freed, mut hoped, mut turn, mut too_large) = (0, 0, 0, 0, false);
        // Making objects dense takes longer than the disk does: not while threads wait for room.
        let hurry = self.excess(s) > 0;
        let short = swap.is_short_without_the_dead(self);
        while met < MOST_MET && swap.to_cut.is_none() {
            let for_room = freed + hoped + run.filled() < task.bytes && turn < task.pages;
            let for_pressure = task.due && swap.shrinker.due() > 0;
            if !for_room && !for_pressure {
                break;
            }
            let Some(entry) = swap.shrinker.pop() else { break };
            met += 1;
            if s.is_large(entry) {
                freed += set_to_cut(s, swap, entry);
                continue;
            }
            let Some((out, copies)) = s.pages_of(entry) else { continue };
            let head = s.header_of(entry);
            // A held object comes back to the list later; this is an older entry of it. And an object of which mremap moved a
            // part has pages elsewhere: it stays.
            if head.flags & object::HELD != 0 || (out | copies) != s.live_of(entry.handle) {
                continue;
            }
            let warm = !hurry && copies == 0 && is_warm(&head) && (short || swap.worth.is_dense());
            if !warm {
                // An object that is to be recompressed counts once that is done, by what it gained.
                swap.shrinker.met(1 << head.order);
                turn += usize::from(for_room) << head.order;
            }
            if s.has_second_chance(swap, entry, &head) {
                continue;
            }
            if head.flags & object::ON_DISK != 0 {
                freed += self.put_out_kept(s, swap, entry, out, copies);
                continue;
            }
            let bytes = s.object(entry.handle).len();
            if warm {
                swap.aside.push(entry);
                hoped += bytes / 4;
                if swap.aside.len() == MOST_ASIDE {
                    break;
                }
                continue;
            }
            if out != 0 && run.filled() + (swap.front() + bytes).next_multiple_of(GRAIN) > run.bytes() {
                // In a small hole its parts may fit, or the next one.
                if run.filled() == 0 {
                    if swap.has_room_for_parts(&head, run) {
                        drop_copies(s, entry, copies.into());
                        swap.to_cut = Some(entry);
                        break;
                    }
                    too_large = true;
                    swap.shrinker.rotate(entry);
                    continue;
                }
                swap.shrinker.put_back(entry);
                break;
            }
            drop_copies(s, entry, copies.into());
            if out == 0 {
                freed += bytes;
                continue;
            }
            board(s, swap, slot, run, buffer, entry, out);
        }
        self.took_turn(&task, turn);
        // Giving second chances to everything met was progress too.
        Filled { more: met == MOST_MET || turn > 0, freed: freed > 0, too_large }
    }
}

impl Swap {
    /// Whether a block that does not compress, and is too large for a run, is to be cut: parts of it fit.
    ///
    /// The story: a cluster of 256 KiB has room for three blocks of 64 KiB with their headers. The quarter behind them was used for
    /// smaller objects only. So a file was full of data that does not compress when three quarters of it were.
    fn has_room_for_parts(&self, head: &Header, run: &Run) -> bool {
        let part = self.front() + object::head_bytes(FITTING) + (PAGE << FITTING);
        matches!(head.encoding, Encoding::Raw) && head.order > FITTING && part.next_multiple_of(GRAIN) <= run.bytes()
    }
}

impl State {
    /// Whether the policy spares an object that was met; its reference bit is spent then.
    fn has_second_chance(&mut self, swap: &mut Swap, entry: Entry, head: &Header) -> bool {
        let referenced = head.flags & object::REFERENCED != 0;
        let reused = self.pt.hints(entry.vpn) & HINT_REUSED != 0;
        if swap.shrinker.verdict(referenced, reused) != Verdict::Rotate {
            return false;
        }
        if referenced {
            object::set_flags(self.object(entry.handle), 0, object::REFERENCED);
        } else {
            self.pt.hint(entry.vpn, 0, HINT_REUSED);
        }
        swap.shrinker.rotate(entry);
        true
    }
}

/// Puts an object, which fits, into the run of write `slot`; from now on it is in flight.
pub(super) fn board(
    s: &mut State,
    swap: &mut Swap,
    slot: usize,
    run: &mut Run,
    buffer: &mut [u8],
    entry: Entry,
    out: u16,
) {
    object::set_flags(s.object(entry.handle), object::WRITING_BY[slot], 0);
    let object = s.object(entry.handle);
    let (at, front) = (run.filled(), swap.front());
    let len = front + object.len();
    let padded = len.next_multiple_of(GRAIN);
    let space = &mut buffer[at..at + padded];
    space[front - FRONT..front].copy_from_slice(&entry.vpn.to_le_bytes());
    space[front..len].copy_from_slice(object);
    space[len..].fill(0);
    if let Some(seal) = &mut swap.seal {
        seal.close(space, swap.books.next_place(run));
    }
    let place = swap.books.put(run, len, out, checksum(space)).expect("the caller saw that it fits");
    swap.flights[slot].push(Flight { entry, place, bytes: len - front, pages: out, whole: None });
}

/// Sets aside a block that was met and is too large for the disk, to be cut, unless it has a second chance, or nothing of it is
/// out. In the latter case frees what its copies took.
fn set_to_cut(s: &mut State, swap: &mut Swap, entry: Entry) -> usize {
    let head = s.header_of(entry);
    if s.has_second_chance(swap, entry, &head) {
        swap.shrinker.met(1 << head.order);
        return 0;
    }
    let block = s.object(entry.handle);
    let (bytes, live) = (block.len(), object::live(block));
    let is_copy = |i: &usize| s.pt.get(entry.vpn + *i as u64).copy() == Some(entry.handle);
    let copies: PageSet = live.iter().filter(is_copy).collect();
    drop_copies(s, entry, copies);
    if copies == live {
        swap.shrinker.met(1 << head.order);
        return bytes;
    }
    swap.to_cut = Some(entry);
    0
}

/// Makes resident pages give up their kept copy.
pub(super) fn drop_copies(s: &mut State, entry: Entry, copies: PageSet) {
    for i in copies.iter() {
        let at = entry.vpn + i as u64;
        let pte = s.pt.get(at);
        s.pt.set(at, Pte::new(pte.tag(), pte.aux()));
        s.release(entry.handle, i);
        debug_assert!(matches!(pte.tag(), Tag::Resident | Tag::Staged | Tag::Busy));
    }
}

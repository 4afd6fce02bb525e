//! After a fork, evicts pages that a process has alone before those that it shares.
//!
//! A shared page is in memory once. A process that evicts it frees nothing as long as another process has it, and puts one more
//! compressed copy into the pool: of four processes that share 64 MiB, each would take 15 more before the first page is free.
//! Exclusive pages give their memory back at once. Pages that the process wrote to since the fork are exclusive, as they were
//! copied; so are those that all others wrote to, as they have copies. The lists do not know which pages these are, but the
//! kernel's page map does (*exclusively mapped*). Where the lists gave little, a clock hand goes round the managed memory for
//! them. If MOVE refuses such a page, no other process has it, but the kernel does not know that until somebody writes to it;
//! un-sharing it takes no memory (see `unshare`).
//!
//! Shared pages leave when nothing else was found for a moment, in which others may write. A few leave meanwhile: otherwise
//! unused ones would stay forever, and used pages be evicted in their place.
//!
//! The story: three children that each wrote to all of their parent's 64 MiB, under a limit of 100, held 269. With each write
//! trapped and delayed until there was room (`copies`), they still held 157: all four were evicting what they shared, for which
//! the pool grew by 27 MiB before any memory was free.
//!
//! A faulting thread waits for nobody meanwhile, so more was served than left: three workers and their parent stayed a fifth
//! above their limit for a second. So from some excess on, each faulting thread makes room itself (`make_room_beside_kin`).
//!
//! Owner: the pager's lock.

use crate::fault::EventPending;
use crate::frames::arena::PAGE;
use crate::pager::Pager;
use crate::pool::batch::BATCH_PAGES;
use crate::state::{BLOCK_PAGES, State};
use core::ops::Range;
use core::sync::atomic::Ordering::*;
use uzswap_mm::pagetable::Tag;
use uzswap_mm::zone::Kind;
use uzswap_sys::{pagemap, thread};

/// Pages whose page map entries are read in one call; and at most in one round.
const LOOK_PAGES: usize = 512;
const ROUND_PAGES: usize = 64 * LOOK_PAGES;
/// At most this many pages found in one round wait to be un-shared.
pub(crate) const UNSHARED_MOST: usize = 512;
/// How long shared pages stay after exclusive ones were found (nanoseconds); and how long a round rests meanwhile.
const PATIENCE_NS: u64 = 5_000_000;
pub(crate) const PAUSE_NS: u64 = 500_000;
/// A faulting thread makes room too when the limit is exceeded by this part of it, and by at least so many bytes. (A smaller
/// excess is left to the reclaim thread, which waits for others to write; otherwise programs that are always a little above their
/// limit took a quarter longer.)
const MUCH_OVER: usize = 16;
const MUCH_OVER_LEAST: usize = 8 << 20;
/// One round in this many takes some shared pages, whatever else there is.
const SHARED_ROUNDS: u32 = 16;

/// See the file's head.
#[derive(Default)]
pub(crate) struct Exclusive {
    /// Where the hand stands (an address).
    hand: usize,
    /// Whether the pages being taken were found exclusive: no other process has them, whatever MOVE answers.
    pub(crate) takes: bool,
    /// When exclusive pages were last found, or could be expected (monotonic nanoseconds).
    found: u64,
    /// Whether the round is to rest, so that others can write.
    pub(crate) rests: bool,
    rounds: u32,
    /// Until when faulting threads make no room, as there was little to take (monotonic nanoseconds).
    none_until: u64,
}

impl Exclusive {
    /// After a fork, on either side: no page is exclusive yet.
    pub(crate) fn forked(&mut self) {
        *self = Self { found: thread::now_ns(), ..Self::default() };
    }
}

impl Pager {
    /// Like [`Pager::stage`], for the reclaim thread. Goes on to exclusive pages where the lists, full of shared pages, gave
    /// little.
    ///
    /// # Errors
    /// [`EventPending`]: an unread event stopped it before anything moved.
    pub(crate) fn stage_exclusive_first(&self, s: &mut State, want: usize) -> Result<usize, EventPending> {
        let left = self.stage(s, want)?;
        if left >= want / 2 || !self.has_kin() || self.without_move {
            return Ok(left);
        }
        let shared = core::mem::take(&mut s.unshare);
        s.exclusive.takes = true;
        let moved = self.stage_exclusive(s, want - left);
        s.exclusive.takes = false;
        let found = left + *moved.as_ref().unwrap_or(&0) >= want / 4 || !s.unshare.is_empty();
        let now = thread::now_ns();
        s.exclusive.rounds = s.exclusive.rounds.wrapping_add(1);
        if found {
            s.exclusive.found = now;
        }
        let patient = now < s.exclusive.found + PATIENCE_NS;
        s.exclusive.rests = patient && !found;
        if !patient || (found && s.exclusive.rounds.is_multiple_of(SHARED_ROUNDS)) {
            s.unshare.extend(shared);
        }
        moved.map(|moved| left + moved)
    }

    /// Like [`Pager::make_room`], where memory is shared since a fork: if the limit is exceeded by much, a faulting thread evicts
    /// exclusive pages of its process.
    ///
    /// # Errors
    /// [`EventPending`]: an unread event kept pages from leaving.
    pub(crate) fn make_room_beside_kin(&self, s: &mut State) -> Result<(), EventPending> {
        if self.without_move || self.excess(s) <= self.much_over() {
            return Ok(());
        }
        // Read the clock only now: most faults return before.
        let now = thread::now_ns();
        if now < s.exclusive.none_until || self.at_floor(s) {
            return Ok(());
        }
        s.rss = self.rss_now(s);
        let over = self.over(s, 0, true);
        let idle = s.zone.free_slots(Kind::Frame).saturating_sub(BATCH_PAGES);
        if over == 0 || self.give_back(s, (over + BATCH_PAGES).min(idle)) >= over {
            return Ok(());
        }
        let short = BATCH_PAGES.saturating_sub(s.idle_staged());
        let staged = self.stage_exclusive_first(s, short);
        let (left, _) = self.direct_round(s, BATCH_PAGES.min(s.idle_staged()), 0, None);
        if left < BATCH_PAGES / 4 {
            s.exclusive.none_until = now + PAUSE_NS;
        }
        self.give_back(s, over.min(s.zone.free_slots(Kind::Frame).saturating_sub(BLOCK_PAGES)));
        staged.map(|_| ())
    }

    /// Excess from which a faulting thread makes room, or waits for it, whatever its fault is (bytes).
    pub(crate) fn much_over(&self) -> isize {
        (self.limit() / MUCH_OVER).max(MUCH_OVER_LEAST) as isize
    }

    /// Moves out `want` exclusive pages, or all that one look finds, from the hand on, in one round at most. Pages that MOVE
    /// refuses are noted to be un-shared.
    fn stage_exclusive(&self, s: &mut State, want: usize) -> Result<usize, EventPending> {
        let (first, mut round) = (s.exclusive.hand, ROUND_PAGES);
        let (mut at, mut wrapped, mut moved, mut runs) = (first, false, 0, Vec::new());
        while moved < want && round > 0 && s.noted_pages() < UNSHARED_MOST {
            let Some((from, to)) = s.managed.next_from(at).filter(|(from, _)| !wrapped || *from < first) else {
                if wrapped {
                    break;
                }
                (at, wrapped) = (0, true);
                continue;
            };
            let from = from.max(at);
            let to = to.min(from + LOOK_PAGES * PAGE);
            round = round.saturating_sub((to - from) / PAGE);
            self.find_exclusive(s, from..to, &mut runs);
            at = to;
            for run in runs.drain(..) {
                let end = run.end.min(run.start + (want - moved) as u64);
                let (n, stopped) = self.stage_range(s, run.start, end);
                moved += n;
                if stopped < end || moved >= want {
                    s.exclusive.hand = stopped as usize * PAGE;
                    return if moved > 0 { Ok(moved) } else { Err(EventPending) };
                }
            }
        }
        s.exclusive.hand = at;
        Ok(moved)
    }

    /// Finds the resident pages in a byte range that no other process has, except those just faulted on.
    fn find_exclusive(&self, s: &State, range: Range<usize>, runs: &mut Vec<Range<u64>>) {
        let pages = (range.start / PAGE) as u64..(range.end / PAGE) as u64;
        if !pages.clone().any(|vpn| s.pt.get(vpn).tag() == Tag::Resident) {
            return;
        }
        let file = self.files.pagemap.load(Relaxed);
        // Pages that cannot be looked up are not found.
        let _ = pagemap::exclusive_runs(file, range.start, range.end, |from, to| {
            let mut at = (from / PAGE) as u64;
            for vpn in (from / PAGE) as u64..(to / PAGE) as u64 {
                if s.was_touched(vpn) {
                    runs.push(at..vpn);
                    at = vpn + 1;
                }
            }
            runs.push(at..(to / PAGE) as u64);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use uzswap_mm::lru::List;

    const N: usize = 256;

    /// One round of the reclaim thread, without storing what left; returns whether it is to rest.
    fn round(p: &Pager) -> bool {
        let mut s = p.state.lock();
        let _ = p.stage_exclusive_first(&mut s, 64);
        let rests = core::mem::take(&mut s.exclusive.rests);
        p.unshare_noted(s);
        rests
    }

    /// However busy the machine is, the patience is not over, and the next round is not one that takes shared pages.
    fn be_patient(p: &Pager) {
        let mut s = p.state.lock();
        s.exclusive.found = thread::now_ns() + 1_000_000_000;
        s.exclusive.rounds = 0;
    }

    fn begin() -> (&'static Pager, usize) {
        let p = testing::pager(16 << 20);
        let at = testing::memory(p, N);
        testing::let_inherit(at, N);
        (0..N).for_each(|page| testing::put(p, at + page * PAGE, &[page as u8; PAGE]));
        let mut s = p.state.lock();
        s.managed.push((at, at + N * PAGE));
        s.list_resident((at / PAGE) as u64, N, List::Inactive, |_| None);
        (p, at)
    }

    fn tags(p: &Pager, at: usize, pages: Range<usize>, tag: Tag) -> usize {
        let s = p.state.lock();
        pages.filter(|page| s.pt.get((at / PAGE + page) as u64).tag() == tag).count()
    }

    /// See the file's head. (`stored` takes what another member holds, in MiB. That nothing was found is believed for a moment.)
    #[test]
    fn who_faults_beside_kin_makes_room_from_some_excess_on() {
        // Children of other tests would share its memory.
        if !testing::by_itself("fork::exclusive::tests::who_faults_beside_kin_makes_room_from_some_excess_on") {
            return;
        }
        let (p, at) = begin();
        p.kin.gained();
        p.group.used.store(2, Relaxed);
        let other = &p.group.slots[1];
        other.owner.store(uzswap_sys::process::Identity::own().raw(), Relaxed);
        let stored = |others: u64| {
            other.rss.store(others << 20, Relaxed);
            let mut s = p.state.lock();
            assert!(p.make_room(&mut s, 1).is_ok());
            drop(s);
            N - tags(p, at, 0..N, Tag::Resident) - tags(p, at, 0..N, Tag::Staged)
        };
        assert_eq!(stored(20), 0, "4 MiB more than the limit are the reclaim thread's");
        p.state.lock().exclusive.none_until = u64::MAX;
        assert_eq!(stored(40), 0, "nothing was found a moment ago");
        p.state.lock().exclusive.none_until = 0;
        let left = stored(40);
        assert!(left >= BATCH_PAGES / 2, "{left} pages left");
    }

    /// See the file's head: beside a child, pages written to since leave; shared ones stay until nothing else is found.
    #[test]
    fn what_was_copied_leaves_before_what_is_shared() {
        let (p, at) = begin();
        testing::beside_a_child(|| {
            p.kin.gained();
            p.state.lock().exclusive.forked();
            for page in N / 2..N {
                // SAFETY: a page of this test's, which is there.
                unsafe { ((at + page * PAGE) as *mut u8).write(page as u8) };
            }
            let rounds = (1..1000).find(|_| {
                be_patient(p);
                round(p);
                tags(p, at, N / 2..N, Tag::Staged) == N / 2
            });
            println!("what was copied left in {rounds:?} rounds");
            assert!(rounds.is_some(), "{} pages left", tags(p, at, N / 2..N, Tag::Staged));
            assert_eq!(tags(p, at, 0..N / 2, Tag::Resident), N / 2, "what is shared stays");
            be_patient(p);
            assert!(round(p), "nothing is found: others are to write");
            assert_eq!(tags(p, at, 0..N / 2, Tag::Resident), N / 2, "what is shared stays still");
            // As if nothing else was found for long.
            p.state.lock().exclusive.found = 0;
            let left = (0..1000).any(|_| {
                assert!(!round(p));
                tags(p, at, 0..N / 2, Tag::Staged) > 0
            });
            assert!(left, "what is shared leaves in the end");
        });
    }

    /// Pages that all others have copied or dropped are exclusive, but the kernel does not know that until they are written to.
    #[test]
    fn what_the_others_have_copied_leaves_without_patience() {
        let (p, at) = begin();
        testing::beside_a_child(|| ());
        p.kin.gained();
        let left = (0..10_000).any(|_| {
            // Other tests of this process may fork and share all of it for a while; then it is found shared, and stays.
            be_patient(p);
            round(p);
            tags(p, at, 0..N, Tag::Staged) == N
        });
        assert!(left, "{} pages stay", tags(p, at, 0..N, Tag::Resident));
        let mut s = p.state.lock();
        let first = (at / PAGE) as u64;
        assert_eq!(p.bring_range(&mut s, first, first + N as u64).1, first + N as u64);
        // SAFETY: everything is back, and nobody else uses it.
        let contents = unsafe { core::slice::from_raw_parts(at as *const u8, N * PAGE) };
        assert!(contents.chunks(PAGE).enumerate().all(|(page, c)| c.iter().all(|b| *b == page as u8)));
    }
}

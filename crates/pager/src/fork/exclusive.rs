//! After a fork, what a process has alone leaves before what it shares.
//!
//! A page that several processes have is in memory once. Who takes it out for itself frees nothing as long as another has it, and has
//! one more compressed copy of it in the pool: of four processes that share 64 MiB each would take 15 more before the first page is free. What
//! a process has alone gives its memory back at once; so does what it wrote to since, as that was copied, and what the others wrote to,
//! as they have copies. Where those pages are no list knows, but the kernel's page map does (*exclusively mapped*): a hand goes round
//! through what is managed, as a clock's, where the lists gave little. What MOVE refuses of it nobody else has, but the kernel does not
//! know that until somebody writes to it: to un-share it takes no memory (see `unshare`).
//!
//! What is shared leaves where nothing else has been found for a moment, in which others may write; and a little of it meanwhile, or what
//! nobody uses would stay for ever, and what is used be put out for it.
//!
//! The story: three children that each wrote to all of their parent's 64 MiB, under a limit of 100, held 269. With each write told, and
//! held up until there was room (`copies`), it was 157 still: all four were putting out what they shared, for which the pool grew by
//! 27 MiB before any memory was free.
//!
//! Who faults waits for nobody meanwhile, and was served more than left: three workers and their parent stayed a fifth above their limit for a
//! second. So each makes room itself from some excess on (`make_room_beside_kin`).
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

/// Pages of which the page map is read in one call, and at most in one round.
const LOOK_PAGES: usize = 512;
const ROUND_PAGES: usize = 64 * LOOK_PAGES;
/// Pages at most that are found in a round and are to be un-shared first.
pub(crate) const UNSHARED_MOST: usize = 512;
/// How long what is shared stays after something else was found (nanoseconds), and how long a round rests meanwhile.
const PATIENCE_NS: u64 = 5_000_000;
pub(crate) const PAUSE_NS: u64 = 500_000;
/// By how much the limit is exceeded when who faults makes room too: this part of it, and so much at least (bytes). (Below that it is left to
/// the reclaim thread, which waits for others to write; programs that always are a little above their limit took a quarter longer.)
const MUCH_OVER: usize = 16;
const MUCH_OVER_LEAST: usize = 8 << 20;
/// One round in so many takes some of what is shared whatever else there is.
const SHARED_ROUNDS: u32 = 16;

/// See the file's head.
#[derive(Default)]
pub(crate) struct Exclusive {
    /// Where the hand stands (an address).
    hand: usize,
    /// Whether what is being taken was found so: nobody else has it, whatever MOVE says.
    pub(crate) takes: bool,
    /// When such pages were last found, or could be expected (monotonic nanoseconds).
    found: u64,
    /// Whether the round is to rest, for others to write.
    pub(crate) rests: bool,
    rounds: u32,
    /// Until when who faults makes no room, as there was little to take (monotonic nanoseconds).
    none_until: u64,
}

impl Exclusive {
    /// After a fork, on either side: nothing is this process's alone yet.
    pub(crate) fn forked(&mut self) {
        *self = Self { found: thread::now_ns(), ..Self::default() };
    }
}

impl Pager {
    /// As [`Pager::stage`], for the reclaim thread: goes on where the lists gave little, as they are full of what is shared.
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

    /// As [`Pager::make_room`], where memory is shared since a fork: where the limit is exceeded by much, whoever faults pays with what is
    /// its own.
    ///
    /// # Errors
    /// [`EventPending`]: an unread event kept pages from leaving.
    pub(crate) fn make_room_beside_kin(&self, s: &mut State) -> Result<(), EventPending> {
        if self.without_move || self.excess(s) <= self.much_over() {
            return Ok(());
        }
        // (Only now: most faults come no further.)
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

    /// By how much the limit is exceeded at least when who faults makes room, or waits for it, whatever its fault is (bytes).
    pub(crate) fn much_over(&self) -> isize {
        (self.limit() / MUCH_OVER).max(MUCH_OVER_LEAST) as isize
    }

    /// Moves `want` pages out that no other process has, or all that one look finds, from where the hand stands, in one round at most.
    /// What MOVE refuses is noted to be un-shared.
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

    /// Finds the pages in a range of bytes that are resident and no other process has, but for those that were just faulted on.
    fn find_exclusive(&self, s: &State, range: Range<usize>, runs: &mut Vec<Range<u64>>) {
        let pages = (range.start / PAGE) as u64..(range.end / PAGE) as u64;
        if !pages.clone().any(|vpn| s.pt.get(vpn).tag() == Tag::Resident) {
            return;
        }
        let file = self.files.pagemap.load(Relaxed);
        // (What cannot be read is not found.)
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

    /// What the reclaim thread does in a round, without storing what left; whether it is to rest.
    fn round(p: &Pager) -> bool {
        let mut s = p.state.lock();
        let _ = p.stage_exclusive_first(&mut s, 64);
        let rests = core::mem::take(&mut s.exclusive.rests);
        p.unshare_noted(s);
        rests
    }

    /// However busy the machine is, less time than that has passed, and no more than a round.
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

    /// See the file's head. (Others hold so much; that one finds nothing is believed for a moment.)
    #[test]
    fn who_faults_beside_kin_makes_room_from_some_excess_on() {
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
        // (Other tests of this process may fork, and share all of it for a while.)
        let some = (0..10_000).any(|_| {
            p.state.lock().exclusive.none_until = 0;
            stored(40) >= BATCH_PAGES / 2
        });
        assert!(some, "{} pages stay", tags(p, at, 0..N, Tag::Resident));
    }

    /// See the file's head: beside a child what was written to since leaves, and what is shared does not until nothing else is found.
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
            // Nothing else was found for long.
            p.state.lock().exclusive.found = 0;
            let left = (0..1000).any(|_| {
                assert!(!round(p));
                tags(p, at, 0..N / 2, Tag::Staged) > 0
            });
            assert!(left, "what is shared leaves in the end");
        });
    }

    /// What the others have copied, or given up, is this process's alone, of which the kernel knows nothing until it is written to.
    #[test]
    fn what_the_others_have_copied_leaves_without_patience() {
        let (p, at) = begin();
        testing::beside_a_child(|| ());
        p.kin.gained();
        let left = (0..10_000).any(|_| {
            // (Other tests of this process may fork, and share all of it for a while: then it is found shared, and stays.)
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

//! What another process may ask of one under `uzswap run`: to move its pages, and to report writes to pages before they happen.
//!
//! ```no_run
//! use std::time::Duration;
//! use uzswap::WriteWatch;
//! # fn copy(address: usize) {}
//! # let pid = 4711;
//! let watch = WriteWatch::of(pid)?;                     // started with `uzswap run --track-writes`
//! watch.protect(0..usize::MAX)?;                        // all that it has
//! while let Some(address) = watch.next_write(Duration::from_secs(1))? {
//!     copy(address);                                    // as it was: the writer waits
//!     watch.release(address..address + 4096)?;          // and goes on
//! }
//! # Ok::<(), std::io::Error>(())
//! ```

use crate::directory;
use crate::group_file::GroupFile;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, Instant};
use uzswap_pager::frames::arena::{self, PAGE};
use uzswap_pager::group::Slot;
use uzswap_pager::group::member::wake_member;
use uzswap_pager::request::{ASKED, DONE, IDLE, Moved, Op, PageRequest, SERVING};
use uzswap_sys::lock::futex_wait;
use uzswap_sys::process::Identity;

/// Pages of the address space.
const ALL: u64 = uzswap_mm::pagetable::ADDRESS_SPACE_PAGES;
/// How long a process may make no progress before it is said not to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same for a stopped process, which may go on at any moment.
const STOPPED_PATIENCE: Duration = Duration::from_millis(500);
/// The time between two looks, and between two wake-ups, in nanoseconds.
const LOOK_NS: u64 = 50_000_000;

/// A process that is a member of a group.
struct Member {
    file: GroupFile,
    slot: usize,
    /// Whether this is one of the library's regions, not the process under `uzswap run`.
    is_region: bool,
    /// The process's identity when it was found.
    identity: Identity,
}

impl Member {
    fn find(pid: u32) -> Result<Self, String> {
        let (file, slot) =
            directory::member(&directory::open()?, pid).ok_or_else(|| match std::fs::metadata(format!("/proc/{pid}")) {
                Ok(_) => format!(
                    "process {pid} is in no `uzswap run` of yours, and has no region: only memory of those can be moved or protected"
                ),
                Err(_) => format!("there is no process {pid}"),
            })?;
        let owner = file.page().slots[slot].owner().filter(|owner| owner.pid() == pid);
        let identity = owner.ok_or_else(|| format!("process {pid} has ended"))?;
        Ok(Self { file, slot, is_region: false, identity })
    }

    /// The library's regions in a process, as far as we may look.
    fn regions(pid: u32) -> Vec<Self> {
        let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let is_region = |path: &std::path::PathBuf| {
            std::fs::read_link(path).is_ok_and(|link| link.to_string_lossy().starts_with("/memfd:uzswap-group-region"))
        };
        let files = entries.map(|e| e.path()).filter(is_region).filter_map(|path| GroupFile::open(&path).ok());
        // A forked child has its parent's descriptors, too.
        let own = |file: GroupFile| {
            let identity = file.page().slots[0].owner().filter(|owner| owner.pid() == pid)?;
            Some(Self { file, slot: 0, is_region: true, identity })
        };
        files.filter_map(own).collect()
    }

    fn slot(&self) -> &Slot {
        &self.file.page().slots[self.slot]
    }

    fn pid(&self) -> u32 {
        self.identity.pid()
    }

    fn tracks_writes(&self) -> Result<(), String> {
        match self.file.page().track_writes.load(Acquire) {
            0 if self.is_region => Err(format!(
                "the regions of process {} do not track which pages were written to: create them with Options::track_writes",
                self.pid()
            )),
            0 => Err(format!(
                "process {} does not track which pages were written to: start it with --track-writes",
                self.pid()
            )),
            _ => Ok(()),
        }
    }

    /// Has the process carry out `op`, and waits for it. The error is one sentence.
    fn ask(&self, op: Op, pages: Range<u64>) -> Result<Moved, String> {
        let (slot, pid) = (self.slot(), self.pid());
        let hold = Hold::take(&slot.request, Identity::own(), pid)?;
        let mut waiter = Waiter::new(slot, self.identity);
        while !hold.request.ask(self.identity, op, (pages.start, pages.end)) {
            waiter.wait(SERVING)?;
        }
        // A release needs no ticker: memory is managed already.
        wake_member(slot, op != Op::Release);
        loop {
            match hold.request.state.load(Acquire) {
                DONE => break,
                // The slot is idle because it was taken anew: by another process, or by this one after exec.
                IDLE if slot.owner() == Some(self.identity) => {
                    return Err(format!("process {pid} became another program meanwhile; ask again"));
                }
                IDLE => break,
                state => waiter.wait(state)?,
            }
        }
        if slot.owner() != Some(self.identity) {
            return Err(format!("process {pid} ended meanwhile"));
        }
        Ok(hold.request.moved())
    }
}

/// Checks that writes of a process are tracked. The error is one sentence.
///
/// # Errors
/// They are not, or there is no such process under `uzswap run`.
#[doc(hidden)]
pub fn tracks_writes(pid: u32) -> Result<(), String> {
    all_of(pid)?.iter().map(Member::tracks_writes).reduce(Result::or).unwrap_or(Ok(()))
}

/// Checks that other processes may clear the soft-dirty bits of a process: it must be under `uzswap run`. The bits of its regions
/// are left to the process itself, which would miss writes if another cleared them. The error is one sentence.
///
/// # Errors
/// There is no such process, its writes are not tracked, or it has regions only.
#[doc(hidden)]
pub fn clears_soft_dirty(pid: u32) -> Result<(), String> {
    cleared_in(pid).map(drop)
}

fn cleared_in(pid: u32) -> Result<Vec<Member>, String> {
    let mut asked = all_of(pid)?;
    asked.retain(|member| !member.is_region);
    if asked.is_empty() {
        return Err(format!(
            "process {pid} has regions only, whose soft-dirty bits are left to the program: it clears them by Region::take_soft_dirty"
        ));
    }
    asked.iter().try_for_each(Member::tracks_writes)?;
    Ok(asked)
}

/// The process as a member of a group, and its regions; at least one of them.
fn all_of(pid: u32) -> Result<Vec<Member>, String> {
    let mut all = Member::regions(pid);
    match Member::find(pid) {
        Ok(member) => all.push(member),
        Err(sentence) if all.is_empty() => return Err(sentence),
        Err(_) => {}
    }
    Ok(all)
}

/// Has a process carry out `op` on pages of its memory, and waits for it. The error is one sentence.
///
/// # Errors
/// There is no such process, it does not answer, or none of its memory there is managed.
#[doc(hidden)]
pub fn ask(pid: u32, op: Op, pages: Range<u64>) -> Result<Moved, String> {
    let asked = if op == Op::Clean { cleared_in(pid)? } else { all_of(pid)? };
    let mut all = Moved::default();
    for member in asked {
        let moved = member.ask(op, pages.clone())?;
        // What a member says it has moved may be anything.
        all.known = all.known.saturating_add(moved.known);
        all.pages = all.pages.saturating_add(moved.pages);
        all.stayed = all.stayed.saturating_add(moved.stayed);
    }
    something(pid, all)
}

fn something(pid: u32, moved: Moved) -> Result<Moved, String> {
    match moved.known {
        0 => Err(format!(
            "process {pid} has no managed memory there: thread stacks, file mappings and shared memory are left alone"
        )),
        _ => Ok(moved),
    }
}

/// A member's request, held by this process.
struct Hold<'a> {
    request: &'a PageRequest,
    me: Identity,
}

impl<'a> Hold<'a> {
    fn take(request: &'a PageRequest, me: Identity, pid: u32) -> Result<Self, String> {
        let since = Instant::now();
        while !request.holder.take(me) {
            if since.elapsed() > PATIENCE {
                return Err(format!("another command is moving pages of process {pid}; try again when it has ended"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Self { request, me })
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.request.give_up(self.me);
    }
}

/// Waits for a process, which may end or be stopped.
struct Waiter<'a> {
    slot: &'a Slot,
    target: Identity,
    progress: u32,
    since: Instant,
}

impl<'a> Waiter<'a> {
    fn new(slot: &'a Slot, target: Identity) -> Self {
        Self { slot, target, progress: slot.request.progress.load(Acquire), since: Instant::now() }
    }

    /// Waits a little while the state is `state`. An error if waiting longer is pointless.
    fn wait(&mut self, state: u32) -> Result<(), String> {
        let (r, pid) = (&self.slot.request, self.target.pid());
        futex_wait(&r.state, state, Some(LOOK_NS), true);
        let progress = r.progress.load(Acquire);
        if r.state.load(Acquire) != state || progress != self.progress {
            (self.progress, self.since) = (progress, Instant::now());
            return Ok(());
        }
        if self.slot.owner() != Some(self.target) || self.target.is_dead() {
            return Err(format!("process {pid} ended meanwhile"));
        }
        let waited = self.since.elapsed();
        if waited > STOPPED_PATIENCE && is_stopped(pid) {
            return Err(format!("process {pid} is stopped, and does nothing until it goes on"));
        }
        if waited > PATIENCE {
            return Err(format!("process {pid} does not answer"));
        }
        if state == ASKED {
            wake_member(self.slot, true);
        }
        Ok(())
    }
}

/// Whether a process is stopped by a signal or a tracer.
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['T', 't']))
}

/// How many pages were write-protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protected {
    /// Pages protected, in memory or out.
    pub pages: u64,
    /// Pages that could not be protected, and can still be written to.
    pub stayed: u64,
}

/// Reports writes of a process under `uzswap run --track-writes` to protected pages before they happen: for a snapshot, or a live
/// migration.
///
/// A thread that writes to a protected page waits until the page is released. Paging out and in keeps the protection, and
/// `mremap` takes it along. Memory whose contents are dropped loses it. Memory that was never touched (it holds zeros) and the
/// process's forked children are not protected. The protection ends with this value, or with the client process that has it: all
/// writers that wait then go on. A process has one client at a time. (A child that the client forks is none: its calls fail.)
pub struct WriteWatch {
    member: Member,
    me: Identity,
}

impl std::fmt::Debug for WriteWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WriteWatch").field("pid", &self.member.pid()).finish_non_exhaustive()
    }
}

impl WriteWatch {
    /// Starts to watch a process. Nothing is protected yet.
    ///
    /// # Errors
    /// It is not a process of this user's under `uzswap run --track-writes`, or it is watched already.
    pub fn of(pid: u32) -> io::Result<Self> {
        let member = Member::find(pid).map_err(|sentence| match Member::regions(pid).is_empty() {
            true => io::Error::other(sentence),
            false => io::Error::other(format!(
                "process {pid} is in no `uzswap run` of yours: only those can be protected from outside (a region: `Region::watch_writes`)"
            )),
        })?;
        member.tracks_writes().map_err(io::Error::other)?;
        let me = Identity::own();
        if !member.slot().watch.holder.take(me) {
            return Err(io::Error::other(format!("another client is already told of the writes of process {pid}")));
        }
        Ok(Self { member, me })
    }

    /// Protects the pages that a range of addresses touches, as far as they are known: those that the page map shows as present
    /// or swapped. It shows them as write-protected afterwards.
    ///
    /// # Errors
    /// Nothing is known there; the process has ended, become another program, or does not answer.
    pub fn protect(&self, range: Range<usize>) -> io::Result<Protected> {
        self.is_there()?;
        let moved = self.member.ask(Op::Protect, pages_of(range));
        let moved = moved.and_then(|moved| something(self.member.pid(), moved)).map_err(io::Error::other)?;
        Ok(Protected { pages: moved.pages, stayed: moved.stayed })
    }

    /// Ends the protection of the pages that a range touches, and lets threads that wait to write there go on. Returns how many
    /// pages were protected: 0 if nothing is known there.
    ///
    /// # Errors
    /// The process has ended, become another program, or does not answer.
    pub fn release(&self, range: Range<usize>) -> io::Result<u64> {
        self.is_there()?;
        self.member.ask(Op::Release, pages_of(range)).map(|moved| moved.pages).map_err(io::Error::other)
    }

    /// Waits for a write to a protected page. Returns the page's address, or None after `time`. The writer waits until the page
    /// is released; each page is reported once.
    ///
    /// # Errors
    /// The process has ended, or become another program.
    pub fn next_write(&self, time: Duration) -> io::Result<Option<usize>> {
        let (slot, end) = (self.member.slot(), Instant::now().checked_add(time));
        loop {
            let seen = slot.watch.news.load(Acquire);
            self.is_there()?;
            if let Some(page) = slot.watch.next() {
                // The member may have found no room before.
                wake_member(slot, false);
                return Ok(Some(page.min(ALL - 1) as usize * PAGE));
            }
            let left = end.map_or(LOOK_NS, |end| {
                u64::try_from(end.saturating_duration_since(Instant::now()).as_nanos()).unwrap_or(u64::MAX)
            });
            if left == 0 {
                return Ok(None);
            }
            futex_wait(&slot.watch.news, seen, Some(left.min(LOOK_NS)), true);
        }
    }

    /// Whether this is the process that watches, not a child that it has forked.
    fn is_own(&self) -> bool {
        std::process::id() == self.me.pid()
    }

    /// Checks that the process still exists and runs the program that is watched.
    fn is_there(&self) -> io::Result<()> {
        if !self.is_own() {
            return Err(io::Error::other("a forked child has no part in its parent's watch: it makes one of its own"));
        }
        let (slot, pid) = (self.member.slot(), self.member.pid());
        if slot.owner() != Some(self.member.identity) || self.member.identity.is_dead() {
            return Err(io::Error::other(format!("process {pid} has ended")));
        }
        match slot.watch.holder.get() == Some(self.me) {
            true => Ok(()),
            false => Err(io::Error::other(format!("process {pid} has become another program"))),
        }
    }
}

/// The story: a client forked a child, which dropped its copy of the watch. All protection ended, and the client was told of
/// nothing any more.
impl Drop for WriteWatch {
    fn drop(&mut self) {
        if !self.is_own() {
            return;
        }
        self.member.slot().watch.holder.give_up(self.me);
        wake_member(self.member.slot(), false);
    }
}

/// The pages that a range of addresses touches, within the address space.
fn pages_of(range: Range<usize>) -> Range<u64> {
    let pages = arena::pages_of(&range);
    pages.start.min(ALL)..pages.end.min(ALL)
}

#[cfg(test)]
mod tests {
    use super::pages_of;

    #[test]
    fn addresses_become_pages() {
        assert_eq!(pages_of(0..usize::MAX), 0..1 << 35);
        assert_eq!(pages_of(4097..8193), 1..3);
        assert!(pages_of(5..5).is_empty() && pages_of(4096..4096).is_empty());
        let end = 1 << 47;
        assert_eq!(pages_of(end + 1..usize::MAX), 1 << 35..1 << 35);
    }
}

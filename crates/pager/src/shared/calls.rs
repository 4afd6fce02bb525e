//! The calls that an attached process (or the owner's own handle) can make to the owner.

use super::engine::{Engine, Fork, Watch};
use super::mapping::Pages;
use super::owner::{Server, errno_of};
use super::wire::{self, ALL, Words, op};
use crate::frames::arena::PAGE;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};
use uzswap_mm::pagemap::{PageState, SOFT_DIRTY, WRITE_PROTECTED};
use uzswap_mm::pagetable::Tag;

/// Pages that one CLEAR_SOFT_DIRTY can answer for: a bit each, in the words from the third on.
pub(super) const TAKE_PAGES: u64 = 14 * 64;
/// Most forks that may be between their two halves at once.
const MOST_FORKS: usize = 64;
/// Rounds of ageing whose beginning is remembered.
const MOST_ROUNDS: usize = 256;
/// How soon it is noticed that a client waiting for writes has gone.
const LOOK: Duration = Duration::from_millis(100);
/// How long a call is tried while it waits for a process to run.
const PATIENCE: Duration = Duration::from_secs(20);
/// Pages brought in under one hold of the lock.
pub(super) const BRING: u64 = 16;

/// Carries out a call.
pub(super) fn answer(
    server: &Server,
    request: &Words,
    mapping: Option<u64>,
    (connection, socket): (u64, &OwnedFd),
) -> Words {
    match try_answer(server, request, mapping, (connection, socket)) {
        Ok(mut answer) => {
            answer.copy_within(0..15, 1);
            answer[0] = 0;
            answer
        }
        Err(e) => wire::words(&[errno_of(&e) as u64]),
    }
}

fn refuse(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

/// The results of a call, without the leading 0.
fn try_answer(
    server: &Server,
    request: &Words,
    mapping: Option<u64>,
    (connection, socket): (u64, &OwnedFd),
) -> io::Result<Words> {
    let pages = server.engine().pages;
    let range = || {
        let (from, to) = (request[1], request[2]);
        if from <= to && to <= pages { Ok((from, to)) } else { Err(refuse(libc::EINVAL)) }
    };
    let mine = || mapping.ok_or_else(|| refuse(libc::EBADF));
    let n = match request[0] {
        op::PAGEOUT => {
            let (from, to) = range()?;
            server.engine().settle(from, to);
            server.page_out(|e| leavable(e, from, to)) as u64
        }
        op::PAGEIN => {
            let (from, to) = range()?;
            page_in(server, from, to, mapping)?
        }
        op::REMOVE => {
            let (from, to) = range()?;
            patiently(|| server.engine().remove(from, to))?;
            0
        }
        op::CLEAR_SOFT_DIRTY => {
            let ((from, to), id) = (range()?, mine()?);
            return patiently(|| take_soft_dirty(&mut server.engine(), id, from, to));
        }
        op::PROTECT => {
            let (from, to) = range()?;
            patiently(|| protect(&mut server.engine(), from, to, request[3], connection))?;
            0
        }
        op::UNPROTECT => {
            let (from, to) = range()?;
            unprotect(&mut server.engine(), from, to, request[3]);
            0
        }
        op::NEXT_WRITE => return Ok(next_write(server, request[1], connection, socket)),
        op::FORK => fork(&mut server.engine(), mine()?)?,
        op::DETACH => {
            let id = mine()?;
            let mut engine = server.engine();
            if let Some(m) = engine.mapping(id) {
                m.dead = true;
                super::owner::shut(&m.watch);
            }
            0
        }
        op::PIN => {
            let (from, to) = range()?;
            super::pins::pin(server, from, to, connection, mapping)?
        }
        op::UNPIN => {
            if !server.engine().unpin(connection, Some(request[1])) {
                return Err(refuse(libc::ENOENT));
            }
            0
        }
        _ => return about_all(server, request, pages, mapping),
    };
    Ok(wire::words(&[n]))
}

/// Calls that concern no range.
fn about_all(server: &Server, request: &Words, pages: u64, mapping: Option<u64>) -> io::Result<Words> {
    let n = match request[0] {
        op::STATS => {
            let mut engine = server.engine();
            engine.settle(0, pages);
            return Ok(stats(&engine));
        }
        op::AGE => age(&mut server.engine()),
        op::IDLE => {
            let time = Duration::from_millis(request[1]);
            server.page_out(|e| idle(e, time)) as u64
        }
        op::WORKING_SET => {
            let mut engine = server.engine();
            engine.settle(0, pages);
            working_set(&engine, Duration::from_millis(request[1]))
        }
        op::SHRINK => server.reclaim_to_limit() as u64,
        op::SETTLE => {
            server.engine().settle(0, pages);
            0
        }
        op::MORE_STATS => {
            let e = server.engine();
            let sees_removes = u64::from(e.removes.gate.is_some());
            return Ok(wire::words(&[sees_removes, e.removes.len() as u64, e.removes.unvouched, e.counts.near_faults]));
        }
        op::INJECT => {
            injectable(&server.engine())?;
            inject(server, request[1], request[2]);
            0
        }
        op::INJECT_MARKER => {
            let (id, page) = (mapping.ok_or_else(|| refuse(libc::EBADF))?, request[1]);
            let mut engine = server.engine();
            injectable(&engine)?;
            let m = engine.mapping(id).filter(|_| page < pages).ok_or_else(|| refuse(libc::EINVAL))?;
            m.markers.writer().set(page, PageState(request[2] as u8));
            0
        }
        _ => return Err(refuse(libc::ENOSYS)),
    };
    Ok(wire::words(&[n]))
}

/// Tries again while a process whose mapping is about to change has yet to run, and releases the lock in between.
fn patiently<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let end = Instant::now() + PATIENCE;
    loop {
        match call() {
            Err(e) if e.raw_os_error() == Some(libc::EAGAIN) && Instant::now() < end => std::thread::yield_now(),
            other => return other,
        }
    }
}

/// Fails unless the region was made for tests.
fn injectable(e: &Engine) -> io::Result<()> {
    if e.options.injectable { Ok(()) } else { Err(refuse(libc::EPERM)) }
}

/// For tests: see `wire`.
fn inject(server: &Server, what: u64, n: u64) {
    match what {
        wire::INJECT_BLIND => server.engine().removes.blind = n,
        wire::INJECT_GATE => server.engine().removes.gate.iter_mut().for_each(|gate| gate.failing = n),
        wire::INJECT_REFUSE => server.engine().removes.gate.iter().for_each(|gate| gate.refusing.set(n)),
        wire::INJECT_HELD => server.held.wait(),
        wire::INJECT_HOLD | wire::INJECT_DEAF | wire::INJECT_STARVE => server.held.set(what, n),
        wire::INJECT_NEAR => server.always_near.store(n != 0, Relaxed),
        _ => {}
    }
}

/// Cleans up after a connection that has ended.
pub(super) fn disconnected(server: &Server, connection: u64) {
    let mut engine = server.engine();
    engine.unpin(connection, None);
    if engine.watch.as_ref().is_some_and(|w| w.connection == connection) {
        let pages = engine.pages;
        unprotect(&mut engine, 0, pages, ALL);
        engine.watch = None;
    }
}

fn resident(e: &Engine, from: u64, to: u64) -> Vec<u64> {
    (from..to).filter(|p| matches!(e.pt.get(*p).tag(), Tag::Resident)).collect()
}

/// The pages of a range that may leave.
fn leavable(e: &Engine, from: u64, to: u64) -> Vec<u64> {
    let mut pages = resident(e, from, to);
    pages.retain(|p| !e.pins.has(*p) && !e.removes.is_witness(*p));
    pages
}

/// Brings pages of `[at, end)` into memory, from the first on, and into the caller's mapping if it has one; returns how many.
pub(super) fn hold_mapped(engine: &mut Engine, at: u64, end: u64, mapping: Option<u64>) -> io::Result<u64> {
    let n = engine.hold(at, (end - at) as usize, false)? as u64;
    if let Some(k) = mapping.and_then(|id| engine.mappings.iter().position(|m| m.id == id)) {
        engine.bring_in(k, at, at + n);
    }
    Ok(n)
}

/// Brings pages that are out into memory, and into the caller's mapping if it has one.
fn page_in(server: &Server, from: u64, to: u64, mapping: Option<u64>) -> io::Result<u64> {
    let (mut at, mut came) = (from, 0);
    while at < to {
        let mut engine = server.engine();
        engine.make_room(BRING);
        let end = to.min(at + BRING);
        engine.settle(at, end);
        while at < end {
            if matches!(engine.pt.get(at).tag(), Tag::Compressed | Tag::Zero) {
                let n = hold_mapped(&mut engine, at, end, mapping)?;
                came += n;
                at += n;
            } else {
                at += 1;
            }
        }
    }
    server.want_reclaim();
    Ok(came)
}

/// Clears soft-dirty bits and answers how many were set, and which (for the first [`TAKE_PAGES`]).
///
/// No write is missed, as the pages are protected first: a write before that is to a page whose bit is set, and so is answered; a
/// write after it waits for our lock, and sets the bit anew.
fn take_soft_dirty(e: &mut Engine, id: u64, from: u64, to: u64) -> io::Result<Words> {
    let known = |e: &Engine, p: u64| e.pt.get(p).tag() != Tag::None;
    e.settle(from, to);
    let written: Vec<bool> = (from..to).map(|p| known(e, p)).collect();
    let pages = e.pages;
    let k = e.mappings.iter().position(|m| m.id == id).ok_or_else(|| refuse(libc::EBADF))?;
    e.protect_mapped(k, from, to).map_err(refuse)?;
    let m = &e.mappings[k];
    let map = m.markers.writer();
    if !m.markers.tracking() {
        // Until now everything counted as written. (A page that nobody has touched was not, and is noted when it is.)
        (0..pages).filter(|p| known(e, *p)).for_each(|p| map.change(p, SOFT_DIRTY, 0));
        m.markers.set_tracking(true);
    }
    let mut answer = [0u64; 16];
    for (i, known) in written.into_iter().enumerate() {
        let page = from + i as u64;
        if known && map.get(page).soft_dirty() {
            answer[0] += 1;
            if (i as u64) < TAKE_PAGES {
                answer[1 + i / 64] |= 1 << (i % 64);
            }
        }
        map.change(page, 0, SOFT_DIRTY);
    }
    Ok(answer)
}

fn protect(e: &mut Engine, from: u64, to: u64, which: u64, connection: u64) -> io::Result<()> {
    let pages = e.pages;
    if which != ALL && e.mapping(which).is_none() {
        return Err(refuse(libc::ENOENT));
    }
    let watch =
        e.watch.get_or_insert_with(|| Watch { connection, everywhere: Pages::new(pages), queue: VecDeque::new() });
    if watch.connection != connection {
        return Err(refuse(libc::EBUSY));
    }
    // A removal takes along the markers that pages had then, not those that they get now.
    e.settle(from, to);
    if let Some(watch) = e.watch.as_mut().filter(|_| which == ALL) {
        (from..to).for_each(|p| watch.everywhere.put(p, true));
    }
    for k in 0..e.mappings.len() {
        let m = &e.mappings[k];
        if which != ALL && m.id != which {
            continue;
        }
        // The marker comes first: a write that faults from now on is reported.
        let map = m.markers.writer();
        (from..to).for_each(|p| map.change(p, WRITE_PROTECTED, 0));
        e.protect_mapped(k, from, to).map_err(refuse)?;
    }
    Ok(())
}

fn unprotect(e: &mut Engine, from: u64, to: u64, which: u64) {
    if let Some(watch) = &mut e.watch {
        if which == ALL {
            (from..to).for_each(|p| watch.everywhere.put(p, false));
        }
        watch.queue.retain(|p| !(from..to).contains(p));
    }
    for m in &mut e.mappings {
        if which == ALL || m.id == which {
            let map = m.markers.writer();
            (from..to).filter(|p| map.get(*p).write_protected()).for_each(|p| map.change(p, 0, WRITE_PROTECTED));
        }
        // Waiting threads try again. A page still protected in its PTE faults once more, and is found free. Those of other
        // mappings try again too: the queue does not say whose writes it reported, so writes of other mappings must enter it
        // anew.
        m.wake(from, to);
    }
}

/// Waits for a write to a page that this connection protected, as long as its other end exists.
///
/// The story: a client was killed while it waited here. Nobody noticed before its time was up, and the writers to what it had
/// protected waited as long.
fn next_write(server: &Server, milliseconds: u64, connection: u64, socket: &OwnedFd) -> Words {
    let end = Instant::now().checked_add(Duration::from_millis(milliseconds));
    let mut engine = server.engine();
    loop {
        if let Some(watch) = engine.watch.as_mut().filter(|w| w.connection == connection)
            && let Some(page) = watch.queue.pop_front()
        {
            return wire::words(&[1, page]);
        }
        let left = end.map_or(LOOK, |end| end.saturating_duration_since(Instant::now()));
        let ended = server.stopping.load(SeqCst);
        if left.is_zero() || ended || uzswap_sys::socket::is_hung_up(socket) {
            return wire::words(&[0]);
        }
        engine = server.wait_for_news(engine, left.min(LOOK));
    }
}

/// A process is about to fork: stores what its child will inherit until the child asks for it. The child inherits only the
/// write-protection that holds in all mappings by then.
///
/// The story: it also inherited what was asked for its parent's mapping alone. Its writers waited forever, as the client knew only
/// the parent's number and could not release them.
fn fork(e: &mut Engine, id: u64) -> io::Result<u64> {
    let (token, pages) = (e.next_id, e.pages);
    e.next_id += 1;
    // Removed pages have no markers to inherit.
    e.settle(0, pages);
    let m = e.mapping(id).ok_or_else(|| refuse(libc::EBADF))?;
    let map = m.markers.map();
    let markers = (0..pages).map(|p| map.get(p).0 & !WRITE_PROTECTED).collect();
    let tracking = m.markers.tracking();
    if e.forks.len() == MOST_FORKS {
        e.forks.pop_front();
    }
    e.forks.push_back(Fork { token, tracking, markers });
    Ok(token)
}

/// Begins a round: every watcher drops its mapping's PTEs, so that a touch of any page shows as a fault.
fn age(e: &mut Engine) -> u64 {
    e.round += 1;
    e.rounds.push_back((e.round, Instant::now()));
    if e.rounds.len() > MOST_ROUNDS {
        e.rounds.pop_front();
    }
    let (round, bytes) = (u64::from(e.round), e.pages * PAGE as u64);
    for m in &e.mappings {
        // This never waits: if a watcher does not listen, its mapping's pages count as in use.
        let _ = wire::send(&m.watch, &wire::words(&[wire::WATCH_AGE, round, m.base as u64, bytes]), &[]);
    }
    round
}

/// The last round that began at least `time` ago.
fn round_before(e: &Engine, time: Duration) -> Option<u32> {
    e.rounds.iter().rev().find(|(_, began)| began.elapsed() >= time).map(|(round, _)| *round)
}

/// Whether a page is known to be untouched since round `round` began.
fn untouched_since(e: &Engine, page: u64, round: u32) -> bool {
    e.touched[page as usize] < round && e.mappings.iter().all(|m| !m.mapped.has(page) || m.aged >= round)
}

fn idle(e: &Engine, time: Duration) -> Vec<u64> {
    let Some(round) = round_before(e, time) else { return Vec::new() };
    let mut pages = leavable(e, 0, e.pages);
    pages.retain(|p| untouched_since(e, *p, round));
    pages
}

/// Pages touched since the last round that began at least `time` ago.
fn working_set(e: &Engine, time: Duration) -> u64 {
    let Some(round) = round_before(e, time) else { return e.resident as u64 };
    resident(e, 0, e.pages).into_iter().filter(|p| !untouched_since(e, *p, round)).count() as u64
}

fn stats(e: &Engine) -> Words {
    let c = &e.counts;
    wire::words(&[
        e.resident as u64,
        e.swapped as u64,
        e.zeros as u64,
        e.store.held() as u64,
        e.charged() as u64,
        e.metadata_bytes() as u64,
        e.mappings.len() as u64,
        c.faults,
        c.major_faults,
        c.wp_faults,
        c.swpout,
        c.swpout_clean,
        c.direct_reclaims,
        c.over_limit,
        c.poisoned,
    ])
}

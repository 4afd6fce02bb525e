//! Pages of a process under `uzswap run`, put out and brought in, and their soft-dirty bits cleared: asked of the process by its slot in the group.

use crate::groups::Registry;
use std::ops::Range;
use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, Instant};
use uzswap_pager::group::Slot;
use uzswap_pager::member::wake_member;
use uzswap_pager::request::{ASKED, DONE, IDLE, Moved, Op, PageRequest, SERVING};
use uzswap_sys::lock::futex_wait;
use uzswap_sys::process::Identity;

/// How long nothing may happen before the process is said not to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same for one that is stopped, which may go on at any moment.
const STOPPED_PATIENCE: Duration = Duration::from_millis(500);
/// Between two looks, and two wake-ups (nanoseconds).
const LOOK_NS: u64 = 50_000_000;

/// The pages of a range: `all`, or `START-END` in hexadecimal, widened to whole pages.
pub fn parse_range(text: &str) -> Result<Range<u64>, String> {
    const ALL: u64 = 1 << 47;
    if text == "all" {
        return Ok(0..ALL / super::PAGE);
    }
    let address = |side: &str| {
        let digits = side.strip_prefix("0x").unwrap_or(side);
        let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_hexdigit());
        u64::from_str_radix(digits, 16).ok().filter(|at| plain && *at <= ALL)
    };
    text.split_once('-')
        .and_then(|(from, to)| Some(address(from)?..address(to)?))
        .filter(|bytes| bytes.start < bytes.end)
        .map(|bytes| bytes.start / super::PAGE..bytes.end.div_ceil(super::PAGE))
        .ok_or_else(|| {
            format!("`{text}` is not a range of a process: write START-END in hexadecimal, as --runs and /proc/PID/maps show it, or all")
        })
}

/// Has a process move pages, and waits until it has. The error is one sentence.
pub fn ask(pid: u32, op: Op, pages: Range<u64>) -> Result<Moved, String> {
    let (file, slot) =
        Registry::open()?.member(pid).ok_or_else(|| match std::fs::metadata(format!("/proc/{pid}")) {
            Ok(_) => format!("process {pid} is in no `uzswap run` of yours: only of those pages are put out and in"),
            Err(_) => format!("there is no process {pid}"),
        })?;
    if op == Op::Clean && file.page().track_writes.load(Acquire) == 0 {
        return Err(format!(
            "of process {pid} it is not kept which pages were written to: start it with --track-writes"
        ));
    }
    let slot: &Slot = &file.page().slots[slot];
    let me = Identity::own();
    let gone = || format!("process {pid} has ended");
    let target = slot.owner().filter(|owner| owner.pid() == pid).ok_or_else(gone)?;
    let hold = Hold::take(&slot.request, me, pid)?;
    let mut waiter = Waiter::new(slot, target);
    while !hold.request.ask(target, op, (pages.start, pages.end)) {
        waiter.wait(SERVING)?;
    }
    wake_member(slot, true);
    loop {
        match hold.request.state.load(Acquire) {
            DONE => break,
            // (The slot was taken anew: by another process, or by this one after exec.)
            IDLE if slot.owner() == Some(target) => {
                return Err(format!("process {pid} became another program meanwhile; ask again"));
            }
            IDLE => break,
            state => waiter.wait(state)?,
        }
    }
    if slot.owner() != Some(target) {
        return Err(format!("process {pid} ended meanwhile"));
    }
    let moved = hold.request.moved();
    if moved.known == 0 {
        return Err(format!(
            "process {pid} has no managed memory there: thread stacks, file mappings and shared memory are left alone"
        ));
    }
    Ok(moved)
}

/// The request, held by this command.
struct Hold<'a> {
    request: &'a PageRequest,
    me: Identity,
}

impl<'a> Hold<'a> {
    fn take(request: &'a PageRequest, me: Identity, pid: u32) -> Result<Self, String> {
        let since = Instant::now();
        while !request.take(me) {
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

/// Waits for a process that may end or be stopped.
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

    /// Waits a little while the state is `state`. An error when it is in vain.
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

/// Whether a process is stopped (by a signal, or a tracer).
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['T', 't']))
}

#[cfg(test)]
mod tests {
    use super::parse_range;

    #[test]
    fn ranges_of_a_process_are_read() {
        assert_eq!(parse_range("7f0000001000-7f0000003000"), Ok(0x7_f000_0001..0x7_f000_0003));
        assert_eq!(parse_range("0x7f0000001fff-0x7f0000002001"), Ok(0x7_f000_0001..0x7_f000_0003));
        assert_eq!(parse_range("all"), Ok(0..1 << 35));
        for wrong in ["", "-", "1000", "2000-1000", "1000-1000", "0..64M", "+1-2000", "1000-ffffffffffffffff", "x-y"] {
            assert!(parse_range(wrong).is_err(), "{wrong}");
        }
    }
}

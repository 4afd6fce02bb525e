//! On which CPUs the helpers run, and who reclaims.
//!
//! The helpers share the program's address space, so every page moved while another of its threads runs on another
//! CPU must be flushed from that CPU's TLB by an interrupt, and the mover waits for the answer (in a virtual machine
//! with shadow page tables each change of a mapping costs both CPUs more still); and each time a reclaim thread is
//! woken the scheduler may take the occasion to move the program. Together that costs more than what a second
//! CPU can do meanwhile (table in ARCHITECTURE.md). So the handler follows the faulting thread, and while faults come
//! from one CPU it reclaims by itself, between reading a fault and serving it; the reclaim thread, should it be wanted,
//! runs there too. Where several threads fault on several CPUs the interrupts are there anyway: there the reclaim
//! thread works ahead.
//!
//! The scheduler wakes the program where it faulted because that CPU runs only idle-policy threads, so there the reclaim
//! thread is of that policy too. The ticker remains a normal one: it is to be on time.

use crate::pool::compress::HELPERS_MOST;
use uzswap_sys::thread::{self, Cpus};

/// Faults between two looks.
const EVERY: u32 = 256;
/// The program is taken to fault on one CPU from this score on: a look at which the CPU or the thread was that of the look
/// before counts one, another thread on another CPU takes two off, and at most 64 are kept.
const STEADY: u32 = 4;

/// Where the faults come from.
pub struct Placement {
    /// Where helpers may run.
    cpus: Cpus,
    cpu: Option<usize>,
    /// The thread that faulted when the CPU was last looked at.
    tid: u32,
    steady: u32,
    /// Whether the last look found another thread on another CPU than the look before.
    apart: bool,
    faults: u32,
    /// Faults when the ticker last looked, and whether there had been none since the look before.
    seen: u32,
    quiet: bool,
    /// Whether the program may have moved.
    suspect: bool,
    /// Where the other helpers are.
    others: Where,
}

/// Where the ticker and the reclaim thread may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Where {
    Anywhere,
    /// On the program's CPU, and of the idle policy.
    With(usize),
    /// On any but the program's: there they would only drive it away, and the handler after it.
    Off(usize),
}
use Where::{Anywhere, Off, With};

/// The helper threads (0: none), as far as they are to be placed.
#[derive(Clone, Copy, Default)]
pub struct Helpers {
    /// Serves faults: goes where the program is.
    pub handler: Option<i32>,
    /// Goes where the program is.
    pub ticker: i32,
    /// On the program's CPU while the handler reclaims, free where the work is its own.
    pub reclaimer: i32,
    /// Whether a thread may be put at idle policy: see [`thread::may_leave_idle_policy`].
    pub idles: bool,
    /// Compress, on any CPU but the program's.
    pub crew: [i32; HELPERS_MOST],
}

impl Placement {
    /// Nothing is known yet.
    pub fn new() -> Self {
        Self {
            cpus: Cpus::of(0),
            cpu: None,
            tid: 0,
            steady: 0,
            apart: false,
            faults: 0,
            seen: 0,
            quiet: false,
            suspect: true,
            others: Anywhere,
        }
    }

    /// The handler slept: while the program stays on the handler's CPU the next fault always finds it runnable, so the
    /// program may be elsewhere.
    pub fn slept(&mut self) {
        self.suspect = true;
    }

    /// Another thread is the handler now: it goes where the program is at the next fault.
    pub fn new_handler(&mut self) {
        (self.cpu, self.suspect) = (None, true);
    }

    /// Counts a fault; true when the CPU is to be looked at.
    pub fn due(&mut self) -> bool {
        self.faults = self.faults.wrapping_add(1);
        self.quiet = false;
        self.faults.is_multiple_of(EVERY) || core::mem::take(&mut self.suspect)
    }

    /// Thread `tid` faulted on `cpu`. The handler goes there; the ticker and the reclaim thread too while faults come from one
    /// CPU and `kin` (shared memory, which it alone can un-share) gives it no work of its own, else elsewhere.
    pub fn fault_on(&mut self, cpu: usize, tid: u32, helpers: Helpers, kin: bool) {
        // (One thread is followed wherever it goes.)
        let one = self.cpu == Some(cpu) || self.tid == tid;
        self.apart = !one && self.cpu.is_some();
        self.steady = if one { (self.steady + 1).min(64) } else { self.steady.saturating_sub(2) };
        self.tid = tid;
        if self.cpu != Some(cpu) {
            self.cpu = Some(cpu);
            if let Some(handler) = helpers.handler {
                Cpus::only(cpu).confine(handler);
            }
            helpers.crew.into_iter().filter(|tid| *tid > 0).for_each(|tid| self.keep_off(tid));
        }
        self.place(if self.steady >= STEADY && !kin { With(cpu) } else { Off(cpu) }, helpers);
    }

    /// Puts the ticker and the reclaim thread somewhere else than they are.
    fn place(&mut self, to: Where, helpers: Helpers) {
        if to == self.others {
            return;
        }
        let cpus = match to {
            With(cpu) => Cpus::only(cpu),
            // (On a machine of one CPU there is no other.)
            Off(cpu) => self.cpus.without(cpu).unwrap_or(self.cpus),
            Anywhere => self.cpus,
        };
        for helper in [helpers.ticker, helpers.reclaimer].into_iter().filter(|tid| *tid != 0) {
            cpus.confine(helper);
        }
        if helpers.reclaimer != 0 && (helpers.idles || !matches!(to, With(_))) {
            // (A CPU that runs only idle-policy threads counts as idle: see `fault`.)
            thread::set_idle_policy(helpers.reclaimer, matches!(to, With(_)));
        }
        self.others = to;
    }

    /// CPUs beside the program's.
    pub fn spare_cpus(&self) -> usize {
        self.cpus.count() - 1
    }

    /// Keeps a thread off the program's CPU, as far as that is known.
    pub fn keep_off(&self, tid: i32) {
        let others = self.cpu.and_then(|cpu| self.cpus.without(cpu));
        others.unwrap_or(self.cpus).confine(tid);
    }

    /// Lets a thread run on any CPU.
    pub fn set_free(&self, tid: i32) {
        self.cpus.confine(tid);
    }

    /// Whether the handler is to reclaim by itself.
    pub fn alone(&self) -> bool {
        self.steady >= STEADY && !self.quiet
    }

    /// Whether several threads fault on several CPUs, as far as is known: helpers would wait for a CPU. (Long before it is known that there
    /// is one thread alone, which takes a thousand faults.)
    pub fn is_scattered(&self) -> bool {
        self.apart
    }

    /// Called now and then by the ticker: where no fault comes the handler reclaims nothing, and the thread must.
    /// Above the limit (`over`) it must not wait for the program's CPU either.
    pub fn look(&mut self, reclaimer: i32, over: bool) {
        self.quiet = core::mem::replace(&mut self.seen, self.faults) == self.faults;
        if self.quiet || over {
            self.set_free_others(reclaimer);
        }
    }

    /// The reclaim thread is not to wait for the program's CPU.
    pub fn set_free_others(&mut self, reclaimer: i32) {
        self.place(Anywhere, Helpers { reclaimer, ..Helpers::default() });
    }
}

impl Default for Placement {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table: what happens, and whether the handler reclaims afterwards.
    #[test]
    fn who_reclaims() {
        let mut p = Placement::new();
        assert!(!p.alone() && !p.is_scattered(), "nothing is known");
        p.fault_on(0, 7, Helpers::default(), false);
        for look in 1..=STEADY {
            assert_eq!(p.alone(), look > STEADY, "after {look} looks");
            p.fault_on(0, 7, Helpers::default(), false);
        }
        assert!(p.alone() && !p.is_scattered());
        p.fault_on(1, 8, Helpers::default(), false);
        assert!(!p.alone() && p.is_scattered(), "another thread on another CPU");
        (0..2).for_each(|_| p.fault_on(1, 8, Helpers::default(), false));
        assert!(!p.is_scattered());
        assert!(p.alone(), "that is made up for by two looks");
        (0..9).for_each(|cpu| p.fault_on(cpu, 8, Helpers::default(), false));
        assert!(p.alone(), "one thread is followed");
    }

    #[test]
    fn two_threads_on_two_cpus_never_count_as_one() {
        let mut p = Placement::new();
        for i in 0..10_000 {
            p.fault_on(i % 2, 7 + (i % 2) as u32, Helpers::default(), false);
            assert!(!p.alone() && p.is_scattered() == (i > 0));
        }
    }

    #[test]
    fn where_no_fault_comes_the_thread_must_reclaim() {
        let mut p = Placement::new();
        (0..10).for_each(|_| p.fault_on(3, 7, Helpers::default(), false));
        p.due();
        p.look(0, false);
        assert!(p.alone(), "a fault since the last look");
        p.look(0, false);
        assert!(!p.alone(), "none");
        p.due();
        assert!(p.alone(), "again");
    }

    #[test]
    fn the_cpu_is_looked_at_after_sleep_and_now_and_then() {
        let mut p = Placement::new();
        let looks = |p: &mut Placement, faults: u32| (0..faults).filter(|_| p.due()).count();
        assert_eq!(looks(&mut p, 1), 1, "the first");
        assert_eq!(looks(&mut p, EVERY - 2), 0);
        assert_eq!(looks(&mut p, 10 * EVERY), 10);
        p.slept();
        assert_eq!(looks(&mut p, 1), 1, "the program may have moved");
    }
}

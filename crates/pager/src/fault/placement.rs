//! On which CPUs the helpers run, and which thread reclaims.
//!
//! The helpers share the program's address space. While another of its threads runs on another CPU, moving a page flushes that
//! CPU's TLB by an interrupt, and the mover waits for the answer. (In a virtual machine with shadow page tables, each change of a
//! mapping costs both CPUs still more.) And each time a reclaim thread is woken, the scheduler may move the program. Together
//! that costs more than a second CPU can do meanwhile (table in ARCHITECTURE.md). So the handler follows the faulting thread.
//! While faults come from one CPU the handler reclaims by itself, between reading a fault and serving it; if the reclaim thread
//! is needed, it runs on that CPU too. Where several threads fault on several CPUs the interrupts happen anyway, so there the
//! reclaim thread works ahead.
//!
//! The scheduler wakes the program on the CPU where it faulted because only idle-policy threads run there. So on that CPU the
//! reclaim thread has idle policy too. The ticker keeps normal policy: it must be on time.

use crate::pool::compress::HELPERS_MOST;
use uzswap_sys::thread::{self, Cpus};

/// Faults from one look at the CPU to the next.
const EVERY: u32 = 256;
/// The score from which on the program counts as faulting on one CPU. A look that finds the same CPU or thread as the one before
/// adds one, another thread on another CPU takes two off; the score is at most 64.
const STEADY: u32 = 4;

/// On which CPU the program faults.
pub struct Placement {
    /// The CPUs on which helpers may run.
    cpus: Cpus,
    cpu: Option<usize>,
    /// The thread that faulted at the last look.
    tid: u32,
    steady: u32,
    /// Whether the last look found another thread on another CPU than the look before.
    apart: bool,
    faults: u32,
    /// Faults when the ticker last looked, and whether there were none since the look before.
    seen: u32,
    quiet: bool,
    /// Whether the program may have moved.
    suspect: bool,
    /// Where the ticker and the reclaim thread are.
    others: Where,
}

/// Where the ticker and the reclaim thread may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Where {
    Anywhere,
    /// On the program's CPU, the reclaim thread with idle policy.
    With(usize),
    /// On any CPU but the program's: there they would only drive it away, and the handler after it.
    Off(usize),
}
use Where::{Anywhere, Off, With};

/// The helper threads to be placed (0: none).
#[derive(Clone, Copy, Default)]
pub struct Helpers {
    /// Serves faults: goes where the program is.
    pub handler: Option<i32>,
    /// Goes where the program is.
    pub ticker: i32,
    /// On the program's CPU while the handler reclaims; anywhere while it has work of its own.
    pub reclaimer: i32,
    /// Whether threads may be given idle policy: see [`thread::may_leave_idle_policy`].
    pub idles: bool,
    /// The compressing helpers, on any CPU but the program's.
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

    /// The handler slept. While the program stays on the handler's CPU, its next fault always finds the handler runnable; so the
    /// program may have moved.
    pub fn slept(&mut self) {
        self.suspect = true;
    }

    /// Another thread is the handler now: at the next fault it goes where the program is.
    pub fn new_handler(&mut self) {
        (self.cpu, self.suspect) = (None, true);
    }

    /// Counts a fault; true when it is time to look at the CPU.
    pub fn due(&mut self) -> bool {
        self.faults = self.faults.wrapping_add(1);
        self.quiet = false;
        self.faults.is_multiple_of(EVERY) || core::mem::take(&mut self.suspect)
    }

    /// Thread `tid` faulted on `cpu`: moves the handler there. The ticker and the reclaim thread go there too while faults come
    /// from one CPU and the reclaim thread has no work of its own; else they go elsewhere. `kin` says that it has (it alone can
    /// un-share memory, for one).
    pub fn fault_on(&mut self, cpu: usize, tid: u32, helpers: Helpers, kin: bool) {
        // A single thread is followed wherever it goes.
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

    /// Moves the ticker and the reclaim thread, unless they are there already.
    fn place(&mut self, to: Where, helpers: Helpers) {
        if to == self.others {
            return;
        }
        let cpus = match to {
            With(cpu) => Cpus::only(cpu),
            // On a machine with one CPU there is no other.
            Off(cpu) => self.cpus.without(cpu).unwrap_or(self.cpus),
            Anywhere => self.cpus,
        };
        for helper in [helpers.ticker, helpers.reclaimer].into_iter().filter(|tid| *tid != 0) {
            cpus.confine(helper);
        }
        if helpers.reclaimer != 0 && (helpers.idles || !matches!(to, With(_))) {
            // A CPU that runs only idle-policy threads counts as idle: see `fault`.
            thread::set_idle_policy(helpers.reclaimer, matches!(to, With(_)));
        }
        self.others = to;
    }

    /// Number of CPUs beside the program's.
    pub fn spare_cpus(&self) -> usize {
        self.cpus.count() - 1
    }

    /// Keeps a thread off the program's CPU, if that is known.
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

    /// Whether several threads fault on several CPUs, as far as is known: helpers would wait for a CPU. (Known long before it is
    /// known that there is only one thread, which takes a thousand faults.)
    pub fn is_scattered(&self) -> bool {
        self.apart
    }

    /// Called by the ticker now and then. Where no fault comes the handler reclaims nothing, so the reclaim thread must; above
    /// the limit (`over`) it must not wait for the program's CPU either.
    pub fn look(&mut self, reclaimer: i32, over: bool) {
        self.quiet = core::mem::replace(&mut self.seen, self.faults) == self.faults;
        if self.quiet || over {
            self.set_free_others(reclaimer);
        }
    }

    /// Frees the reclaim thread from waiting for the program's CPU.
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

    /// A table: what happens, and whether the handler reclaims afterwards.
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

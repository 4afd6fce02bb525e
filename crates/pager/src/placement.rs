//! On which CPUs the helpers run, and who reclaims.
//!
//! The helpers share the program's address space, so every page moved while another of its threads runs on another
//! CPU must be flushed from that CPU's TLB by an interrupt, and the mover waits for the answer; and each time a reclaim
//! thread is woken the scheduler may take the occasion to move the program. Together that costs more than what a second
//! CPU can do meanwhile (table in ARCHITECTURE.md). So the handler follows the faulting thread, and while faults come
//! from one CPU it reclaims by itself, between reading a fault and serving it. Where several threads fault on several
//! CPUs the interrupts are there anyway: there the reclaim thread works ahead.
//!
//! The scheduler wakes the program where it faulted because that CPU runs only idle-policy threads. The other helpers
//! are of the normal policy, and one that has just gone to sleep still counts (delayed dequeue): so while the program
//! stays on one CPU they are kept off it.

use uzswap_sys::thread::Cpus;

/// Faults between two looks.
const EVERY: u32 = 256;
/// The program is taken to fault on one CPU from this score on: a look at which it had not moved counts one, a move
/// takes two off (the scheduler moves a thread now and then), and at most 64 are kept.
const STEADY: u32 = 4;

/// Where the faults come from.
pub struct Placement {
    /// Where helpers may run.
    cpus: Cpus,
    cpu: Option<usize>,
    steady: u32,
    faults: u32,
    /// Faults when the ticker last looked, and whether there had been none since the look before.
    seen: u32,
    quiet: bool,
    /// Whether the program may have moved.
    suspect: bool,
}

impl Placement {
    /// Nothing is known yet.
    pub fn new() -> Self {
        Self { cpus: Cpus::of(0), cpu: None, steady: 0, faults: 0, seen: 0, quiet: false, suspect: true }
    }

    /// The handler slept: while the program stays on the handler's CPU the next fault always finds it runnable, so the
    /// program may be elsewhere.
    pub fn slept(&mut self) {
        self.suspect = true;
    }

    /// Counts a fault; true when the CPU is to be looked at.
    pub fn due(&mut self) -> bool {
        self.faults = self.faults.wrapping_add(1);
        self.quiet = false;
        self.faults.is_multiple_of(EVERY) || core::mem::take(&mut self.suspect)
    }

    /// A fault happened on `cpu`. The `handler` (a thread, where there is one) goes there, the `others` elsewhere.
    pub fn fault_on(&mut self, cpu: usize, handler: Option<i32>, others: &[i32]) {
        if self.cpu == Some(cpu) {
            self.steady = (self.steady + 1).min(64);
            return;
        }
        self.cpu = Some(cpu);
        self.steady = self.steady.saturating_sub(2);
        if let Some(handler) = handler {
            Cpus::only(cpu).confine(handler);
        }
        if let Some(elsewhere) = self.cpus.without(cpu) {
            for other in others.iter().filter(|t| **t != 0) {
                elsewhere.confine(*other);
            }
        }
    }

    /// Whether the handler is to reclaim by itself.
    pub fn alone(&self) -> bool {
        self.steady >= STEADY && !self.quiet
    }

    /// Called now and then by the ticker: where no fault comes the handler reclaims nothing, and the thread must.
    pub fn look(&mut self) {
        self.quiet = core::mem::replace(&mut self.seen, self.faults) == self.faults;
    }
}

impl Default for Placement {
    fn default() -> Self {
        Self::new()
    }
}

//! On which CPUs the helpers run, and who reclaims.
//!
//! The helpers share the program's address space, so every page moved while another of its threads runs on another
//! CPU must be flushed from that CPU's TLB by an interrupt, and the mover waits for the answer. For single pages that
//! costs more than what a second CPU could do meanwhile (table in ARCHITECTURE.md): a program that faults at random on
//! one CPU is 1.6 times slower with a reclaim thread elsewhere, and a reclaim thread on the same CPU only makes the
//! scheduler move the program. So the handler follows the faulting thread; and while faults come from one CPU and
//! bring few pages, it reclaims by itself, between reading a fault and serving it. Where several threads fault on
//! several CPUs the interrupts are there anyway, and where one fault brings many pages they are few: there the reclaim
//! thread works ahead.
//!
//! The scheduler wakes the program where it faulted because that CPU runs only idle-policy threads. The other helpers
//! are of the normal policy, and one that has just gone to sleep still counts (delayed dequeue): so while the program
//! stays on one CPU they are kept off it.

use uzswap_sys::thread::Cpus;

/// Faults between two looks.
const EVERY: u32 = 32;
/// The program is taken to fault on one CPU from this score on: a look at which it had not moved counts one, a move
/// takes four off (the scheduler moves a thread now and then), and at most 16 are kept.
const STEADY: u32 = 4;
/// Pages a fault brings on average, times 256, below which the handler reclaims by itself.
const FEW: u32 = 4 << 8;

/// Where the faults come from, and how large they are.
pub struct Placement {
    /// Where helpers may run.
    cpus: Cpus,
    cpu: Option<usize>,
    steady: u32,
    faults: u32,
    pages: u32,
    /// Faults when the ticker last looked, and whether there had been none since the look before.
    seen: u32,
    quiet: bool,
    /// Whether the program may have moved.
    suspect: bool,
}

impl Placement {
    /// Nothing is known yet.
    pub fn new() -> Self {
        Self { cpus: Cpus::of(0), cpu: None, steady: 0, faults: 0, pages: 0, seen: 0, quiet: false, suspect: true }
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
            self.steady = (self.steady + 1).min(16);
            return;
        }
        self.cpu = Some(cpu);
        self.steady = self.steady.saturating_sub(4);
        if let Some(handler) = handler {
            Cpus::only(cpu).confine(handler);
        }
        if let Some(elsewhere) = self.cpus.without(cpu) {
            for other in others.iter().filter(|t| **t != 0) {
                elsewhere.confine(*other);
            }
        }
    }

    /// A fault brought so many pages.
    pub fn brought(&mut self, pages: usize) {
        // A mean over about the last 64 faults.
        self.pages = self.pages - self.pages / 64 + (pages as u32) * 4;
    }

    /// Whether the handler is to reclaim by itself.
    pub fn alone(&self) -> bool {
        self.steady >= STEADY && self.pages < FEW && !self.quiet
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

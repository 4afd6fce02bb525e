//! Pauses: the handler sleeps now and then, so that other tasks get the CPU of a program that faults all the time.
//!
//! Such a program never leaves its CPU: while it waits for a fault the handler runs there, and the scheduler counts both in one
//! group of tasks (a session's, by autogroup, or a cgroup). Each fault changes the group's weight on that CPU twice. On Linux
//! 6.18 each such change may move the group's virtual time back, where the group runs on another CPU as well. Then nobody outside
//! the group gets this CPU for as long as the faults go on: other sessions waited for 4.8 s beside two processes that faulted for
//! 5, and kernel threads for up to 111 s beside others (ARCHITECTURE.md, *Pauses*).
//!
//! So the handler sleeps for a moment with a fault waiting, and no task of the group is left to run there. Another process of the
//! same kind may be on that CPU as well, so all handlers of a machine sleep at the same time: in *windows* of the processor's
//! time stamp counter, which needs no shared memory. Waiting tasks run at once, and the group starts afresh.
//!
//! ```text
//! counter   ├──────────── PERIOD ────────────┼──────────── PERIOD ───
//!           ▓▓ window                        ▓▓
//! handler 1   serves ··· serves ··· serves     serves ···
//! handler 2   serves ··· serves ··· serves     serves ···
//! ```
//! The handler misses a window in which no fault comes: then the program computes, and the scheduler is fair. It skips a window
//! where the kernel counts so few runnable tasks that nobody can be waiting (a program alone on the machine).

use crate::pager::Pager;
use core::sync::atomic::Ordering::Relaxed;
use uzswap_sys::{process, thread};

/// Ticks of the time stamp counter from one window to the next: 0.1 s at 2.6 GHz. (Counters run at 1 to 4 GHz.)
const PERIOD: u64 = 1 << 28;
/// Ticks of a window: 0.4 ms at that rate. In a shorter window a second process that computes on the same CPU may not fault. With
/// longer or more windows, CPUs that nobody waits for are idle, and the scheduler moves programs there (MEASUREMENTS.md).
const WINDOW: u64 = 1 << 20;
/// The sleep assumes this many ticks in 2 ns.
const IN_TWO_NS: u64 = 5;
/// From this many runnable tasks on, one may be waiting for this thread's CPU: this thread, one that makes its group's weight
/// change on another CPU, and one that waits.
const CROWD: u32 = 3;

/// The windows that the handler has looked at.
#[derive(Default)]
pub(crate) struct Pauses {
    /// The last one, counted from one.
    seen: u64,
}

impl Pauses {
    /// How long to pause at this value of the time stamp counter (nanoseconds); None outside a window, or for the second time in
    /// one.
    fn due(&mut self, ticks: u64) -> Option<u64> {
        let (window, at) = (ticks / PERIOD + 1, ticks % PERIOD);
        if at >= WINDOW || window == self.seen {
            return None;
        }
        self.seen = window;
        Some((WINDOW - at) * 2 / IN_TWO_NS)
    }
}

impl Pager {
    /// Sleeps until the window is over, if this is one, a fault waits, and other tasks may be waiting. Called by the handler
    /// without the pager's lock.
    pub(crate) fn pause(&self, pauses: &mut Pauses) {
        let Some(ns) = pauses.due(thread::ticks()) else { return };
        if process::running().is_none_or(|tasks| tasks >= CROWD) && self.uffd().wait(0) {
            thread::sleep_ns(ns);
            self.counters().stall_ns.fetch_add(ns, Relaxed);
            self.counters().handler_paused.fetch_add(1, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_has_one_pause_up_to_its_end() {
        let (mut pauses, most) = (Pauses::default(), WINDOW * 2 / IN_TWO_NS);
        assert_eq!(pauses.due(0), Some(most));
        assert_eq!(pauses.due(1), None, "not twice");
        assert_eq!(pauses.due(WINDOW), None, "between windows");
        assert_eq!(pauses.due(PERIOD - 1), None);
        assert_eq!(pauses.due(PERIOD + WINDOW / 2), Some(most / 2));
        assert_eq!(pauses.due(7 * PERIOD + WINDOW - IN_TWO_NS), Some(2));
        assert_eq!(pauses.due(u64::MAX - PERIOD + 1), Some(most));
    }
}

//! Pauses: whoever waits for a CPU beside a program that faults gets it.
//!
//! A program that faults all the time never leaves its CPU: while it waits for a fault the handler runs there, and both are of one group of
//! tasks for the scheduler (a session's, by autogroup, or a cgroup). On Linux 6.18 each change of such a group's weight on a CPU, of which
//! every fault makes two, may move the group's virtual time back, where the group runs on another CPU as well. Then nobody outside of it
//! gets this CPU any more, for as long as the faults go on: other sessions waited for 4.8 s beside two processes that faulted for 5, and
//! kernel threads for up to 111 s beside others (ARCHITECTURE, *Who waits for a thread of the kernel's*).
//!
//! So the handler sleeps for a moment now and then, with a fault waiting, so that no task of the group is left to run there. As another
//! process of the same kind may be on that CPU as well all handlers of a machine do that at the same time, in *windows* of the processor's
//! time stamp counter, which needs no memory in common. What waited runs at once, and the group begins anew.
//!
//! ```text
//! counter   ├──────────── PERIOD ────────────┼──────────── PERIOD ───
//!           ▓▓ window                        ▓▓
//! handler 1   serves ··· serves ··· serves     serves ···
//! handler 2   serves ··· serves ··· serves     serves ···
//! ```
//! A window is missed where no fault comes in it: then the program computes, and the scheduler is fair. It is let pass where the kernel
//! counts so few runnable tasks that nobody can be waiting (a program alone on the machine).

use crate::pager::Pager;
use core::sync::atomic::Ordering::Relaxed;
use uzswap_sys::{process, thread};

/// Ticks of the time stamp counter between two windows: 0.1 s where it has 2.6 GHz. (Counters have 1 to 4 GHz.)
const PERIOD: u64 = 1 << 28;
/// Ticks of a window: 0.4 ms there. (In a shorter one a second process that computes on the same CPU may not fault. In longer or more ones
/// CPUs that nobody waits for are idle, so that the scheduler takes programs there: MEASUREMENTS.md.)
const WINDOW: u64 = 1 << 20;
/// Ticks are slept for as if there were so many in 2 ns.
const IN_TWO_NS: u64 = 5;
/// Runnable tasks from which on one may be waiting for this thread's CPU: this thread, whoever makes its group's weight change on another
/// CPU, and one that waits.
const CROWD: u32 = 3;

/// Which windows were looked at.
#[derive(Default)]
pub(crate) struct Pauses {
    /// The last one, counted from one.
    seen: u64,
}

impl Pauses {
    /// For how long a pause is to be at this count of the time stamp counter (nanoseconds), if one is; not again in the same window.
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
    /// In the handler, without the pager's lock: sleeps until the window is over, if this is one, a fault waits and others may.
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

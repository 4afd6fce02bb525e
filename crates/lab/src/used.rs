//! CPU time and waits of processes, as the kernel counted them.

use std::ops::Sub;

/// Usage so far, or between two looks.
#[derive(Clone, Copy, Debug)]
pub struct Used {
    /// CPU seconds in user mode.
    pub user: f64,
    /// CPU seconds in the kernel.
    pub system: f64,
    /// How often threads have waited.
    pub waits: f64,
}

impl Used {
    /// The usage of this process, all threads.
    #[must_use]
    pub fn by_me() -> Self {
        Self::by(libc::RUSAGE_SELF)
    }

    /// The usage of children that have ended and were waited for, and of theirs.
    #[must_use]
    pub fn by_children() -> Self {
        Self::by(libc::RUSAGE_CHILDREN)
    }

    fn by(whom: libc::c_int) -> Self {
        // SAFETY: zero is a valid rusage, and the call fills it.
        let usage = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            libc::getrusage(whom, &raw mut usage);
            usage
        };
        let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
        Self { user: seconds(usage.ru_utime), system: seconds(usage.ru_stime), waits: usage.ru_nvcsw as f64 }
    }
}

impl Sub for Used {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self { user: self.user - before.user, system: self.system - before.system, waits: self.waits - before.waits }
    }
}

//! The command's limit on descriptors. While it talks to a swap server for the program's processes, each of which has some
//! connections to it, the command has as many descriptors as it may. The program gets the limit that the command was started
//! with.

use std::io;

/// A limit on descriptors, soft and hard.
#[derive(Clone, Copy)]
pub struct Limit(libc::rlimit);

impl Limit {
    /// The current limit.
    fn now() -> io::Result<Limit> {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the out-parameter is of the right type and outlives the call.
        if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Limit(limit))
    }

    /// Raises the soft limit to the hard one. Returns the limit before.
    pub fn raise() -> io::Result<Limit> {
        let before = Limit::now()?;
        Limit(libc::rlimit { rlim_cur: before.0.rlim_max, ..before.0 }).restore()?;
        Ok(before)
    }

    /// Sets the limit to this one. Async-signal-safe.
    pub fn restore(self) -> io::Result<()> {
        // SAFETY: the limit is of the right type and outlives the call.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const self.0) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// How many descriptors this process may have.
pub fn most() -> usize {
    Limit::now().map_or(1024, |limit| usize::try_from(limit.0.rlim_cur).unwrap_or(usize::MAX))
}

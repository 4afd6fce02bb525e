//! How many descriptors the command may have: as many as it can, while it speaks to a swap server for the program's processes, each of
//! which has some connections to it. The program gets what the command was started with.

use std::io;

/// The limit that we were started with.
#[derive(Clone, Copy)]
pub struct Limit(libc::rlimit);

impl Limit {
    /// The limit of now.
    fn now() -> io::Result<Limit> {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: an out-parameter of the right type.
        if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Limit(limit))
    }

    /// Makes the soft limit as high as the hard one; what it was before.
    pub fn raise() -> io::Result<Limit> {
        let before = Limit::now()?;
        Limit(libc::rlimit { rlim_cur: before.0.rlim_max, ..before.0 }).restore()?;
        Ok(before)
    }

    /// Sets it to what it was. (Async-signal-safe.)
    pub fn restore(self) -> io::Result<()> {
        // SAFETY: a limit of the right type.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const self.0) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// How many descriptors we may have.
pub fn most() -> usize {
    Limit::now().map_or(1024, |limit| usize::try_from(limit.0.rlim_cur).unwrap_or(usize::MAX))
}

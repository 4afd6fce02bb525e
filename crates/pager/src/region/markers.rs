//! Queries of a region's soft-dirty and write-protected bits.
//!
//! A region's client is in the same process, so nobody can tell from outside whether it is still there. It holds a
//! [`RegionWatch`] as long as it wants to be told of writes. When that is dropped, also as a panicking thread unwinds, no writer
//! waits any more.

use super::signals::SignalsBlocked;
use super::{Error, Region, kernel};
use crate::page_state::marks::Marks;
use crate::pager::Pager;
use core::ops::Range;
use core::sync::atomic::Ordering::*;
use core::time::Duration;

impl Region {
    /// Runs something on the markers, with signals blocked, as it takes the pager's lock.
    fn marked<T>(
        &self,
        range: &Range<usize>,
        run: impl FnOnce(&Pager, &Marks, (u64, u64)) -> Result<T, Error>,
    ) -> Result<T, Error> {
        // SAFETY: alive until drop.
        let pager = unsafe { &*self.pager };
        let marks = pager.marks.as_ref().ok_or(Error::NotTracked)?;
        let _quiet = SignalsBlocked::new();
        run(pager, marks, self.pages_of(range))
    }

    /// Clears the soft-dirty bits of all pages that a range of bytes overlaps; the next write to each page sets its bit again.
    /// Before bits are first cleared every page counts as written, as in the kernel. Here and in all that follows, the part of a
    /// range beyond the region's end is ignored.
    ///
    /// # Errors
    /// [`Error::NotTracked`]; the kernel's.
    pub fn clear_soft_dirty(&self, range: Range<usize>) -> Result<(), Error> {
        self.take_soft_dirty(range).map(drop)
    }

    /// The same, and returns the numbers of the pages whose bit was set: in one step, so that no write is missed.
    ///
    /// # Errors
    /// As [`Region::clear_soft_dirty`].
    pub fn take_soft_dirty(&self, range: Range<usize>) -> Result<Vec<u64>, Error> {
        self.marked(&range, |pager, marks, (from, to)| match from < to {
            true => pager.take_soft_dirty(marks, from, to).map_err(kernel("write-protecting a region")),
            false => Ok(Vec::new()),
        })
    }

    /// Starts to watch writes. What is protected through the returned value ends with it. Dropping it ends *all* write-protection
    /// of the region, whoever asked for it, so do not use [`Region::protect`] beside it.
    ///
    /// The story: there could be two watches, and the end of one ended the other's protection.
    ///
    /// # Errors
    /// [`Error::NotTracked`]; [`Error::Watched`]: there is one already.
    pub fn watch_writes(&self) -> Result<RegionWatch<'_>, Error> {
        self.marked(&(0..0), |_, _, _| match self.watched.swap(true, AcqRel) {
            false => Ok(RegionWatch { region: self }),
            true => Err(Error::Watched),
        })
    }

    /// Write-protects all pages that a range of bytes overlaps. A thread that writes there waits until [`Region::unprotect`], and
    /// [`Region::next_write`] reports it. (So some thread must listen that does not write there itself. A thread that may end
    /// before it unprotects uses [`Region::watch_writes`].)
    ///
    /// # Errors
    /// As [`Region::clear_soft_dirty`].
    pub fn protect(&self, range: Range<usize>) -> Result<(), Error> {
        self.marked(&range, |pager, marks, (from, to)| match from < to {
            true => pager.protect(marks, from, to).map_err(kernel("write-protecting a region")),
            false => Ok(()),
        })
    }

    /// Ends write-protection and lets the writers go on.
    ///
    /// # Errors
    /// As [`Region::clear_soft_dirty`].
    pub fn unprotect(&self, range: Range<usize>) -> Result<(), Error> {
        self.marked(&range, |pager, marks, (from, to)| match from < to {
            true => pager.unprotect(marks, from, to).map_err(kernel("unprotecting a region")),
            false => Ok(()),
        })
    }

    /// Waits for a write to a protected page. Returns the offset of the page in the region (bytes), or None after `time`.
    ///
    /// # Errors
    /// [`Error::NotTracked`].
    pub fn next_write(&self, time: Duration) -> Result<Option<usize>, Error> {
        // SAFETY: alive until drop.
        let marks = unsafe { &*self.pager }.marks.as_ref().ok_or(Error::NotTracked)?;
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).min(1 << 60);
        Ok(marks.next_write(time).map(|at| at - self.base))
    }
}

/// Reports writes to a region before they are done, as long as it lives. When it is dropped all protection of the region ends,
/// and waiting threads go on.
#[derive(Debug)]
pub struct RegionWatch<'a> {
    region: &'a Region,
}

impl RegionWatch<'_> {
    /// As [`Region::protect`].
    ///
    /// # Errors
    /// As there.
    pub fn protect(&self, range: Range<usize>) -> Result<(), Error> {
        self.region.protect(range)
    }

    /// As [`Region::unprotect`].
    ///
    /// # Errors
    /// As there.
    pub fn unprotect(&self, range: Range<usize>) -> Result<(), Error> {
        self.region.unprotect(range)
    }

    /// As [`Region::next_write`].
    ///
    /// # Errors
    /// As there.
    pub fn next_write(&self, time: Duration) -> Result<Option<usize>, Error> {
        self.region.next_write(time)
    }
}

/// The story: a forked child dropped its parent's watch and ended by SIGSEGV, as it has nothing of the region.
impl Drop for RegionWatch<'_> {
    fn drop(&mut self) {
        if std::process::id() != self.region.process {
            return;
        }
        let _ = self.region.unprotect(0..self.region.len());
        self.region.watched.store(false, Release);
    }
}

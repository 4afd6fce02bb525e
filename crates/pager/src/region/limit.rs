//! Changes a region's limit while it is in use.

use super::signals::SignalsBlocked;
use super::{Error, LEAST_LIMIT, Region};
use crate::group::NO_LIMIT;
use core::sync::atomic::Ordering::SeqCst;

/// A limit in the form the region's group has it; one above what a group can express is no limit.
///
/// The story: charges are compared with the limit as signed numbers, and a limit near `usize::MAX` is negative there. A region
/// with such a limit was paged out at once, and a debug build panicked when it was created.
pub(super) fn of_group(bytes: usize) -> u64 {
    (bytes as u64).min(NO_LIMIT)
}

impl Region {
    /// Changes the limit to `bytes`. If it shrinks, makes room in the calling thread; others may use the region meanwhile.
    /// Returns the bytes charged afterwards: more than `bytes` if the region's contents do not compress that far. Nothing is lost
    /// then, and nobody is killed, whatever `on_full` says, before more is added.
    ///
    /// # Errors
    /// [`Error::Size`]: less than [`LEAST_LIMIT`].
    pub fn set_limit(&self, bytes: usize) -> Result<usize, Error> {
        if bytes < LEAST_LIMIT {
            return Err(Error::Size);
        }
        // SAFETY: alive until drop.
        let pager = unsafe { &*self.pager };
        let _quiet = SignalsBlocked::new();
        let charged = pager.charged(&pager.state.lock());
        let node = &pager.group.nodes[0];
        let limit = of_group(bytes);
        node.set_max(limit, charged as u64);
        // If this limit is too small as well, a new message says so.
        node.full_said.store(0, SeqCst);
        if let Some(map) = &self.page_map {
            map.set_limit(limit);
        }
        pager.wake_reclaim();
        pager.reclaim_to_limit();
        Ok(pager.charged(&pager.state.lock()))
    }
}

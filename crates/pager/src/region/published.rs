//! A region's group page as a memory object, so that a command can ask for pages of the region as it asks a process under
//! `uzswap run` (`request`). Commands find it by name among the process's descriptors, and whoever may look there may ask.

use crate::group::GroupPage;
use std::os::fd::OwnedFd;
use uzswap_sys::raw::Errno;
use uzswap_sys::{memfd, sys};

/// Name of the object. (It begins as the name of a run's group object does.)
pub const NAME: &core::ffi::CStr = c"uzswap-group-region";

/// The mapped page; dropping it unmaps it.
#[derive(Debug)]
pub(super) struct Published {
    at: usize,
    /// Stays open for commands that look for it.
    _object: OwnedFd,
}

impl Published {
    /// Makes a page of zeros.
    pub(super) fn new() -> Result<Self, Errno> {
        let errno = |e: std::io::Error| e.raw_os_error().unwrap_or(libc::ENOMEM);
        let object = memfd::create(NAME, size_of::<GroupPage>() as u64).map_err(errno)?;
        // Nobody can make it smaller while it is mapped.
        memfd::seal(&object, memfd::SEAL_SIZE).map_err(errno)?;
        // SAFETY: a new mapping.
        let at = unsafe { memfd::map(&object, size_of::<GroupPage>(), memfd::WRITABLE, None) }.map_err(errno)?;
        Ok(Self { at, _object: object })
    }

    /// The page.
    pub(super) fn page(&self) -> &GroupPage {
        // SAFETY: the mapping is as large, aligned to pages, zero at first, which is valid for atomics, and alive as long as
        // self.
        unsafe { &*(self.at as *const GroupPage) }
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        // SAFETY: our mapping, to which nobody refers any more: see the region's drop.
        let _ = unsafe { sys!(libc::SYS_munmap, self.at, size_of::<GroupPage>()) };
    }
}

//! The memory object behind a group: made here, mapped here and by every member.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;
use uzswap_pager::group::{GroupPage, MAGIC};
use uzswap_pager::trace::{OBJECT_BYTES, RINGS_AT, Rings};

/// A new group; unmapped when dropped.
pub struct GroupFile {
    fd: OwnedFd,
    page: NonNull<GroupPage>,
    /// Bytes mapped.
    size: usize,
}

// SAFETY: what is mapped is atomics only, and stays mapped until the value is dropped.
unsafe impl Send for GroupFile {}
// SAFETY: as above.
unsafe impl Sync for GroupFile {}

impl GroupFile {
    /// Makes a group with this limit and codec.
    #[cfg(test)]
    pub fn create(limit: u64, codec: u32, level: u32) -> io::Result<GroupFile> {
        Self::create_recording(limit, codec, level, false)
    }

    /// Makes a group with this limit and codec, with rings for the members' records if they are wanted.
    pub fn create_recording(limit: u64, codec: u32, level: u32, recording: bool) -> io::Result<GroupFile> {
        // SAFETY: a constant name; the descriptor is owned at once.
        let fd = unsafe { libc::memfd_create(c"uzswap-group".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just returned this descriptor to us.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let size = if recording { OBJECT_BYTES } else { size_of::<GroupPage>() };
        // SAFETY: no memory is involved.
        if unsafe { libc::ftruncate(fd.as_raw_fd(), size as libc::off_t) } < 0 {
            return Err(io::Error::last_os_error());
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing of ours.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), size, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let page = NonNull::new(page.cast::<GroupPage>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let group = GroupFile { fd, page, size };
        group.page().recording.store(recording.into(), Relaxed);
        group.page().limit.store(limit, Relaxed);
        group.page().codec.store(codec, Relaxed);
        group.page().level.store(level, Relaxed);
        group.page().magic.store(MAGIC, std::sync::atomic::Ordering::Release);
        Ok(group)
    }

    /// The shared page.
    pub fn page(&self) -> &GroupPage {
        // SAFETY: the mapping is of the page's size, aligned, zero-filled (valid for atomics) and lives as long as
        // `self`; all fields are atomics, so others writing to it is no data race.
        unsafe { self.page.as_ref() }
    }

    /// The members' rings, where the group records.
    pub fn rings(&self) -> Option<&Rings> {
        let rings = self.page.as_ptr().wrapping_byte_add(RINGS_AT).cast::<Rings>();
        // SAFETY: the mapping covers the rings when it is that large; they are page-aligned atomics, for which zero bytes
        // are valid, and it lives as long as `self`.
        (self.size == OBJECT_BYTES).then(|| unsafe { &*rings })
    }

    /// Where members find it, for as long as we live.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.fd.as_raw_fd())
    }
}

impl Drop for GroupFile {
    fn drop(&mut self) {
        // SAFETY: this is our mapping, of this size; `page` borrows from `self`, so no reference is left.
        unsafe { libc::munmap(self.page.as_ptr().cast(), self.size) };
    }
}

/// Whether `path` leads to a group that is there.
pub fn is_group(path: &OsStr) -> bool {
    let mut magic = [0; 8];
    File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && u64::from_ne_bytes(magic) == MAGIC
}

#[cfg(test)]
mod tests {
    use super::{GroupFile, is_group};
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn found_by_its_path() {
        let group = GroupFile::create(1 << 30, 1, 3).unwrap();
        assert!(is_group(group.path().as_ref()));
        assert!(!is_group("/dev/null".as_ref()));
        assert!(!is_group("/proc/1/no/such".as_ref()));
        assert_eq!(group.page().limit.load(Relaxed), 1 << 30);
        assert_eq!(group.page().slots[1023].pid.load(Relaxed), 0);
    }
}

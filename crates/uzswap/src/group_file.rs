//! The memory object behind a tree of groups: created or opened here, mapped here and by every member.
//!
//! It has no name in a file system, so it goes with the last process that has it. Processes that have it find it among their own
//! descriptors, others through the `/proc` of one that has it. We open what another process shows there only if the kernel says
//! that it is such an object, of our own user (or we are root), of the right size, and sealed, so that nobody can make it smaller
//! under us; and we trust it only if its first word is this version's [`MAGIC`].

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Relaxed, Release};
use uzswap_pager::group::{GroupPage, MAGIC, OBJECT};
use uzswap_pager::trace::{OBJECT_BYTES, RINGS_AT, Rings};
use uzswap_sys::{memfd, thread};

/// The object of a tree of groups, mapped; unmapped when dropped.
pub struct GroupFile {
    fd: File,
    page: NonNull<GroupPage>,
    /// Bytes mapped.
    size: usize,
}

// SAFETY: the mapping holds atomics only, and stays until the value is dropped.
unsafe impl Send for GroupFile {}
// SAFETY: as above.
unsafe impl Sync for GroupFile {}

impl GroupFile {
    /// Creates a tree whose root has this name and no limits; if `recording`, with rings for the members' records.
    pub fn create(name: &str, recording: bool) -> io::Result<GroupFile> {
        let size = if recording { OBJECT_BYTES } else { size_of::<GroupPage>() };
        let object = memfd::create(&std::ffi::CString::new(OBJECT)?, size as u64)?;
        memfd::seal(&object, memfd::SEAL_SIZE)?;
        let group = GroupFile::map(object.into(), size)?;
        group.page().recording.store(recording.into(), Relaxed);
        group.page().set_up(name.as_bytes());
        group.page().magic.store(MAGIC, Release);
        Ok(group)
    }

    /// Opens the tree that a process shows at `path` (`/proc/PID/fd/N`).
    ///
    /// # Errors
    /// Also if `path` leads to anything else, which is not opened, as opening could have effects.
    pub fn open(path: &Path) -> io::Result<GroupFile> {
        if !GroupFile::is_at(path) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let found = file.metadata()?;
        let me = thread::user();
        let size = found.len() as usize;
        if ![size_of::<GroupPage>(), OBJECT_BYTES].contains(&size) || (found.uid() != me && me != 0) {
            return Err(io::ErrorKind::NotFound.into());
        }
        if memfd::sealed(file.as_raw_fd()).is_none_or(|object| object.bytes < size) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let group = GroupFile::map(file, size)?;
        match group.page().magic.load(std::sync::atomic::Ordering::Acquire) {
            MAGIC => Ok(group),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Whether there is a tree at `path`, of this or of another version of uzswap.
    pub fn is_at(path: &Path) -> bool {
        fs::read_link(path).is_ok_and(|shown| shown.to_string_lossy().starts_with(&format!("/memfd:{OBJECT}")))
    }

    fn map(fd: File, size: usize) -> io::Result<GroupFile> {
        let object = OwnedFd::from(fd);
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing of ours.
        let page = unsafe { memfd::map(&object, size, memfd::WRITABLE, None) }?;
        let page = NonNull::new(page as *mut GroupPage).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(GroupFile { fd: object.into(), page, size })
    }

    /// The shared page.
    pub fn page(&self) -> &GroupPage {
        // SAFETY: the mapping is of the page's size, aligned, zero-filled (valid for atomics) and lives as long as `self`; all
        // fields are atomics, so writes by others are no data race.
        unsafe { self.page.as_ref() }
    }

    /// The members' rings, if the group records.
    pub fn rings(&self) -> Option<&Rings> {
        let rings = self.page.as_ptr().wrapping_byte_add(RINGS_AT).cast::<Rings>();
        // SAFETY: at this size the mapping covers the rings; they are page-aligned atomics, for which zero bytes are valid, and
        // it lives as long as `self`.
        (self.size == OBJECT_BYTES).then(|| unsafe { &*rings })
    }

    /// The object's inode number, which no other object has.
    ///
    /// # Errors
    /// The kernel's.
    pub fn inode(&self) -> io::Result<u64> {
        Ok(self.fd.metadata()?.ino())
    }

    /// The path at which members find the object for as long as this process lives.
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

/// Whether `path` leads to an existing group.
pub fn is_group(path: &std::ffi::OsStr) -> bool {
    let mut magic = [0; 8];
    let read = |mut file: File| file.read_exact(&mut magic);
    GroupFile::is_at(path.as_ref()) && File::open(path).and_then(read).is_ok() && u64::from_ne_bytes(magic) == MAGIC
}

#[cfg(test)]
mod tests {
    use super::{GroupFile, is_group};
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::path::Path;
    use std::sync::atomic::Ordering::Relaxed;
    use uzswap_pager::group::{DEPTH, GroupPage, MAGIC, NO_LIMIT, NODES};
    use uzswap_sys::memfd;

    #[test]
    fn found_by_its_path() {
        let group = GroupFile::create("web", false).unwrap();
        assert!(is_group(group.path().as_ref()));
        assert!(!is_group("/dev/null".as_ref()));
        assert!(!is_group("/proc/1/no/such".as_ref()));
        let again = GroupFile::open(Path::new(&group.path())).unwrap();
        again.page().nodes[0].max.store(1 << 30, Relaxed);
        assert_eq!(group.page().nodes[0].max.load(Relaxed), 1 << 30);
        assert_eq!(group.page().nodes[0].high.load(Relaxed), NO_LIMIT);
        assert!(again.page().nodes[0].is_named(b"web"));
        assert_eq!(group.page().slots[1023].owner(), None);
        assert!(GroupFile::open(Path::new("/dev/null")).is_err());
    }

    /// Whoever maps an object that can still be made smaller may end by SIGBUS.
    #[test]
    fn an_object_that_can_become_smaller_is_not_opened() {
        let group = GroupFile::create("web", false).unwrap();
        assert!(group.fd.set_len(4096).is_err(), "ours cannot");
        let other = memfd::create(c"uzswap-group", size_of::<GroupPage>() as u64).unwrap();
        std::fs::File::from(other.try_clone().unwrap()).write_all(&MAGIC.to_ne_bytes()).unwrap();
        let path = format!("/proc/self/fd/{}", other.as_raw_fd());
        let opened = || GroupFile::open(Path::new(&path)).map(|_| ()).map_err(|e| e.kind());
        assert_eq!(opened(), Err(std::io::ErrorKind::InvalidData));
        memfd::seal(&other, memfd::SEAL_SIZE).unwrap();
        assert_eq!(opened(), Ok(()));
    }

    /// The story: commands of two versions on one machine removed each other's entries, and no group was found any more.
    #[test]
    fn another_versions_groups_are_left_alone() {
        let (group, dir) = (GroupFile::create("web", false).unwrap(), tempfile::tempdir().unwrap());
        let entry = dir.path().join(format!("web@{}", std::process::id()));
        std::os::unix::fs::symlink(group.path(), &entry).unwrap();
        assert_eq!(crate::directory::list(dir.path()).len(), 1);
        group.page().magic.fetch_add(1, Relaxed);
        let found = crate::directory::look(dir.path());
        assert!(found.trees.is_empty() && found.foreign == ["web"] && entry.is_symlink());
        // Links to what is no group, or is gone, are removed.
        for target in ["/proc/self/fd/0", "/proc/1/fd/99999"] {
            std::fs::remove_file(&entry).unwrap();
            std::os::unix::fs::symlink(target, &entry).unwrap();
            let found = crate::directory::look(dir.path());
            assert!(found.trees.is_empty() && found.foreign.is_empty() && !entry.is_symlink());
            std::os::unix::fs::symlink(target, &entry).unwrap();
        }
    }

    #[test]
    fn trees_are_as_deep_and_as_wide_as_promised() {
        let group = GroupFile::create("a", false).unwrap();
        let page = group.page();
        let mut at = 0;
        for depth in 1..DEPTH {
            at = page.make_child(at, b"b").unwrap();
            assert_eq!(page.chain(at).count(), depth + 1);
        }
        assert_eq!(page.make_child(at, b"b"), None, "too deep");
        assert!(page.is_within(at, 0) && page.is_within(at, at) && !page.is_within(0, at));
        assert_eq!(page.child(0, b"b"), Some(1));
        assert_eq!(page.child(0, b"c"), None);
        for i in DEPTH..NODES {
            assert!(page.make_child(0, format!("n{i}").as_bytes()).is_some());
        }
        assert_eq!(page.make_child(0, b"one more"), None);
        page.count(at, |e| &e.max, 2);
        assert!(page.chain(at).all(|n| page.nodes[n].events.max.load(Relaxed) == 2));
    }
}

//! Properties of the machine, or of the cgroup we are in: memory and kernel.

use std::fs;
use std::path::{Path, PathBuf};

/// The machine's memory, in bytes.
pub fn total_memory() -> u64 {
    // SAFETY: sysconf has no preconditions.
    let (pages, size) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    u64::try_from(pages).unwrap_or(0).saturating_mul(u64::try_from(size).unwrap_or(0))
}

/// The lowest memory limit of our cgroup and those above it (v1 or v2), in bytes, if there is one.
pub fn cgroup_limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    groups.lines().filter_map(|line| lowest_limit(Path::new("/sys/fs/cgroup"), line)).min()
}

/// The memory of the machine or of our cgroup, whichever is less, in bytes.
pub fn available_memory() -> u64 {
    let total = total_memory();
    cgroup_limit().map_or(total, |limit| limit.min(total))
}

/// The lowest limit from the cgroup in one line of `/proc/self/cgroup` (`ID:CONTROLLERS:PATH`) up to the root.
fn lowest_limit(root: &Path, line: &str) -> Option<u64> {
    let mut fields = line.splitn(3, ':');
    let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    let (top, file): (PathBuf, _) = if id == "0" && controllers.is_empty() {
        let unified = root.join("unified");
        (if unified.is_dir() { unified } else { root.to_path_buf() }, "memory.max")
    } else if controllers.split(',').any(|c| c == "memory") {
        (root.join("memory"), "memory.limit_in_bytes")
    } else {
        return None;
    };
    let own = top.join(path.trim_start_matches('/'));
    let own = if own.is_dir() { own } else { top.clone() };
    own.ancestors()
        .take_while(|dir| dir.starts_with(&top))
        .filter_map(|dir| fs::read_to_string(dir.join(file)).ok()?.trim().parse().ok())
        .filter(|&limit| limit < 1 << 62)
        .min()
}

/// The kernel's release, such as `6.18.44-generic`.
///
/// The story: the release was read from /proc/sys, which some containers hide. There `doctor` said that the kernel was too old.
pub fn kernel_release() -> String {
    let mut names = std::mem::MaybeUninit::<libc::utsname>::zeroed();
    // SAFETY: the out-parameter is of the right type; its strings are all zero if the call fails, and end with a zero otherwise.
    let release = unsafe {
        libc::uname(names.as_mut_ptr());
        std::ffi::CStr::from_ptr(names.assume_init_ref().release.as_ptr()).to_owned()
    };
    release.to_string_lossy().into_owned()
}

/// The major and minor number of a release; 0.0 if it has none.
pub fn version_of(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::{kernel_release, lowest_limit, version_of};
    use std::fs;

    #[test]
    fn the_kernel_says_its_release_itself() {
        assert!(version_of(&kernel_release()) >= (5, 10));
        if let Ok(file) = fs::read_to_string("/proc/sys/kernel/osrelease") {
            assert_eq!(kernel_release(), file.trim());
        }
    }

    #[test]
    fn versions() {
        assert_eq!(version_of("6.18.44-fc-v657"), (6, 18));
        assert_eq!(version_of("5.7-rc1"), (5, 7));
        assert_eq!(version_of(""), (0, 0));
    }

    #[test]
    fn the_lowest_limit_on_the_way_up_counts() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        at("a/memory.max", "1000\n");
        at("a/b/memory.max", "max\n");
        at("memory/c/memory.limit_in_bytes", "2000\n");
        at("memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(lowest_limit(root.path(), "0::/a/b"), Some(1000));
        assert_eq!(lowest_limit(root.path(), "0::/"), None);
        assert_eq!(lowest_limit(root.path(), "7:cpu,memory:/c"), Some(2000));
        assert_eq!(lowest_limit(root.path(), "7:memory:/gone/in/container"), None);
        assert_eq!(lowest_limit(root.path(), "3:cpu:/c"), None);
        assert_eq!(lowest_limit(root.path(), "nonsense"), None);
    }
}

//! A memory cgroup (version 1) with a limit.

use crate::undo::{Keeper, Step, Todo};
use std::fs;
use std::path::{Path, PathBuf};

/// Mount point of version 1 of the memory controller.
const ROOT: &str = "/sys/fs/cgroup/memory";

/// Wakes processes that wait in a cgroup whose reclaim gave up. In a cgroup as small as these the kernel sometimes declares
/// itself out of memory although there is swap (every page is on the active list); if it tries again, it finds pages to swap out.
pub struct Rescue {
    control: PathBuf,
    limit: PathBuf,
}

impl Rescue {
    /// For the cgroup at `path`.
    #[must_use]
    pub fn of(path: &Path) -> Self {
        Self { control: path.join("memory.oom_control"), limit: path.join("memory.limit_in_bytes") }
    }

    /// If a process waits, reclaims once more and wakes it; returns whether one did. The limit never rises above what it was.
    #[must_use]
    pub fn once(&self) -> bool {
        let control = fs::read_to_string(&self.control).unwrap_or_default();
        if !control.lines().any(|line| line == "under_oom 1") {
            return false;
        }
        let Some(limit) = fs::read_to_string(&self.limit).ok().and_then(|text| text.trim().parse::<u64>().ok()) else {
            return false;
        };
        // A lower limit makes the kernel reclaim (it is refused if that fails); raising it again wakes the waiters.
        let _ = fs::write(&self.limit, (limit - limit / 16).to_string());
        let _ = fs::write(&self.limit, limit.to_string());
        true
    }
}

/// A cgroup of the lab's own.
pub struct Cgroup {
    path: PathBuf,
    _remove: Todo,
}

impl Cgroup {
    /// Makes a cgroup with `limit` as its `memory.limit_in_bytes` and unlimited swap. With `wait`, a process that finds no memory
    /// waits for a [`Rescue`] instead of being killed.
    ///
    /// # Errors
    /// When there is no version 1 memory controller, or it may not be used.
    pub fn make(keeper: &Keeper, limit: u64, wait: bool) -> Result<Self, String> {
        if !Path::new(ROOT).join("memory.limit_in_bytes").exists() {
            return Err(format!("no memory controller of cgroup v1 at {ROOT}"));
        }
        let path = Path::new(ROOT).join(format!("uzswap-lab-{}", std::process::id()));
        let remove = keeper.will_undo(Step::RemoveCgroup(path.clone()))?;
        fs::create_dir(&path).map_err(|e| format!("cannot make the cgroup {}: {e}", path.display()))?;
        fs::write(path.join("memory.limit_in_bytes"), limit.to_string())
            .map_err(|e| format!("cannot set the cgroup's limit: {e}"))?;
        if wait {
            // If this is refused, the program is killed as without it.
            let _ = fs::write(path.join("memory.oom_control"), "1");
        }
        Ok(Self { path, _remove: remove })
    }

    /// Its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Processes in it that the kernel's OOM killer ended.
    #[must_use]
    pub fn oom_kills(&self) -> u64 {
        let control = fs::read_to_string(self.path.join("memory.oom_control")).unwrap_or_default();
        let count = control.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
    }
}

//! A memory cgroup (version 1) with a limit.

use crate::undo::{Keeper, Step, Todo};
use std::fs;
use std::path::{Path, PathBuf};

/// Where version 1 of the memory controller is mounted.
const ROOT: &str = "/sys/fs/cgroup/memory";

/// A cgroup of the lab's own.
pub struct Cgroup {
    path: PathBuf,
    _remove: Todo,
}

impl Cgroup {
    /// Makes one with `memory.limit_in_bytes` of `limit`, swap unlimited.
    ///
    /// # Errors
    /// When there is no version 1 memory controller, or it may not be used.
    pub fn make(keeper: &Keeper, limit: u64) -> Result<Self, String> {
        if !Path::new(ROOT).join("memory.limit_in_bytes").exists() {
            return Err(format!("no memory controller of cgroup v1 at {ROOT}"));
        }
        let path = Path::new(ROOT).join(format!("uzswap-lab-{}", std::process::id()));
        let remove = keeper.will_undo(Step::RemoveCgroup(path.clone()))?;
        fs::create_dir(&path).map_err(|e| format!("cannot make the cgroup {}: {e}", path.display()))?;
        fs::write(path.join("memory.limit_in_bytes"), limit.to_string())
            .map_err(|e| format!("cannot set the cgroup's limit: {e}"))?;
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

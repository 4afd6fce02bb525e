//! The kernel's zswap, in front of a swap file.

use super::swap;
use crate::undo::{Keeper, Step, Todo};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

const PARAMETERS: &str = "/sys/module/zswap/parameters";

/// zswap, on, with lzo; everything else as the machine has it.
pub struct Zswap {
    // Undone in this order.
    _swap: Todo,
    _parameters: [Todo; 2],
}

impl Zswap {
    /// Switches it on over a swap file of `bytes` in `dir` (made once, kept for the next time).
    ///
    /// # Errors
    /// When the kernel has no zswap, or something of it is refused.
    pub fn set_up(keeper: &Keeper, bytes: u64, dir: &Path) -> Result<Self, String> {
        if !Path::new(PARAMETERS).exists() {
            return Err("this kernel has no zswap".to_owned());
        }
        let parameters = [set(keeper, "compressor", "lzo")?, set(keeper, "enabled", "Y")?];
        let file = dir.join("swapfile");
        if !file.exists() {
            allocate(&file, bytes).map_err(|e| format!("cannot make a swap file of {bytes} bytes: {e}"))?;
        }
        Ok(Self { _swap: swap::on(keeper, &file, bytes)?, _parameters: parameters })
    }
}

/// Sets a parameter of zswap until the returned value is dropped.
///
/// # Errors
/// When it cannot be read or written.
pub fn set(keeper: &Keeper, name: &str, value: &str) -> Result<Todo, String> {
    let path = Path::new(PARAMETERS).join(name);
    let before = fs::read_to_string(&path).map_err(|e| format!("cannot read zswap's `{name}`: {e}"))?;
    let restore = keeper.will_undo(Step::Restore(path.clone(), before.trim().to_owned()))?;
    fs::write(&path, value).map_err(|e| format!("cannot set zswap's `{name}` to `{value}`: {e}"))?;
    Ok(restore)
}

fn allocate(path: &Path, bytes: u64) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let file: File = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    // SAFETY: the descriptor is open.
    if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes as libc::off_t) } != 0 {
        return Err(io::Error::last_os_error());
    }
    file.sync_all()
}

//! The kernel's zswap, in front of a swap file.

use super::swap;
use crate::undo::{Keeper, Step, Todo};
use std::fs;
use std::path::Path;

const PARAMETERS: &str = "/sys/module/zswap/parameters";

/// zswap, switched on, with lzo; all other settings are the machine's.
pub struct Zswap {
    // Fields are dropped in this order.
    _swap: Todo,
    _parameters: [Todo; 2],
}

impl Zswap {
    /// Switches zswap on over a swap file of `bytes` in `dir` (made once, kept for the next time).
    ///
    /// # Errors
    /// When the kernel has no zswap, or refuses a setting.
    pub fn set_up(keeper: &Keeper, bytes: u64, dir: &Path) -> Result<Self, String> {
        if !Path::new(PARAMETERS).exists() {
            return Err("this kernel has no zswap".to_owned());
        }
        let parameters = [set(keeper, "compressor", "lzo")?, set(keeper, "enabled", "Y")?];
        Ok(Self { _swap: swap::file(keeper, bytes, dir)?, _parameters: parameters })
    }
}

/// The swap file alone: zswap is off if the kernel has it.
pub struct Without {
    // Fields are dropped in this order.
    _swap: Todo,
    _parameter: Option<Todo>,
}

impl Without {
    /// Swaps to a file of `bytes` in `dir` (made once, kept for the next time).
    ///
    /// # Errors
    /// When zswap cannot be switched off, or the file is refused.
    pub fn set_up(keeper: &Keeper, bytes: u64, dir: &Path) -> Result<Self, String> {
        let parameter = if Path::new(PARAMETERS).exists() { Some(set(keeper, "enabled", "N")?) } else { None };
        Ok(Self { _swap: swap::file(keeper, bytes, dir)?, _parameter: parameter })
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

//! Sets the kernel's folio sizes for memory without advice.

use super::selected;
use crate::undo::{Keeper, Step, Todo};
use std::fs;
use std::path::Path;

const DIRECTORY: &str = "/sys/kernel/mm/transparent_hugepage";

/// Has the kernel make folios of 64 KiB unasked, and none of 2 MiB, until the returned values are dropped.
///
/// # Errors
/// When it has no folios of that size, or a setting is refused.
pub fn of_64k(keeper: &Keeper) -> Result<Vec<Todo>, String> {
    ["hugepages-64kB/enabled always", "hugepages-2048kB/enabled madvise", "enabled madvise"]
        .iter()
        .filter_map(|setting| setting.split_once(' '))
        .map(|(name, value)| set(keeper, name, value))
        .collect()
}

fn set(keeper: &Keeper, name: &str, value: &str) -> Result<Todo, String> {
    let path = Path::new(DIRECTORY).join(name);
    let text = fs::read_to_string(&path).map_err(|e| format!("this kernel has no {name}: {e}"))?;
    let before = selected(&text).ok_or_else(|| format!("{name} is not understood: {}", text.trim()))?;
    let restore = keeper.will_undo(Step::Restore(path.clone(), before.to_owned()))?;
    fs::write(&path, value).map_err(|e| format!("cannot set {name} to `{value}`: {e}"))?;
    Ok(restore)
}

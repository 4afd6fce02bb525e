//! The kernel's zram as swap.

use super::{selected, swap, zswap};
use crate::undo::{Keeper, Step, Todo};
use std::fs;
use std::path::Path;

const DEVICE: &str = "/dev/zram0";
const SYSFS: &str = "/sys/block/zram0";

/// zram0 with lz4 as swap; zswap is off, as it would take the pages first.
pub struct Zram {
    // Fields are dropped in this order.
    _swap: Todo,
    _reset: Todo,
    _algorithm: Todo,
    _zswap: Option<Todo>,
}

impl Zram {
    /// Sets up the device with `bytes`.
    ///
    /// # Errors
    /// When there is no zram0, it is in use, or something is refused.
    pub fn set_up(keeper: &Keeper, bytes: u64) -> Result<Self, String> {
        let file = |name: &str| Path::new(SYSFS).join(name);
        let size =
            fs::read_to_string(file("disksize")).map_err(|_| format!("no device {DEVICE} (as root: modprobe zram)"))?;
        if size.trim() != "0" {
            return Err(format!("{DEVICE} is in use"));
        }
        let algorithms =
            fs::read_to_string(file("comp_algorithm")).map_err(|e| format!("cannot read zram's algorithms: {e}"))?;
        let before = selected(&algorithms).ok_or("cannot tell zram's algorithm")?;
        let zswap = if Path::new("/sys/module/zswap/parameters/enabled").exists() {
            Some(zswap::set(keeper, "enabled", "N")?)
        } else {
            None
        };
        let set = |name: &str, value: &str| {
            fs::write(file(name), value).map_err(|e| format!("cannot set zram's {name} to `{value}`: {e}"))
        };
        let algorithm = keeper.will_undo(Step::Restore(file("comp_algorithm"), before.to_owned()))?;
        set("comp_algorithm", "lz4")?;
        let reset = keeper.will_undo(Step::Restore(file("reset"), "1".to_owned()))?;
        set("disksize", &bytes.to_string())?;
        let swap = swap::on(keeper, Path::new(DEVICE), bytes)?;
        Ok(Self { _swap: swap, _reset: reset, _algorithm: algorithm, _zswap: zswap })
    }
}

//! The kernel's side: a memory cgroup with the limit, and one of the kernel's swaps under it.
//!
//! Each peer exists while its value does: it is set up before a run and undone after it (see [`crate::undo`]). So the peers never
//! meet, and an interrupted lab leaves the machine as it was.

pub mod cgroup;
pub mod swap;
pub mod thp;
pub mod zram;
pub mod zswap;

use crate::undo::Keeper;
use std::path::Path;

/// The kernel's swaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// A compressed pool in front of a swap file.
    Zswap,
    /// The same with its shrinker on, and its pool as small as the kernel allows: 1 % of the machine's memory.
    ZswapShrinker,
    /// A swap file without compression. Of the three with a file, only its limit covers all that is in memory.
    SwapFile,
    /// A compressed block device as swap.
    Zram,
}

/// A peer that is set up.
pub struct Ready {
    // Fields are dropped in this order: first the cgroup with what runs in it, then its swap.
    cgroup: cgroup::Cgroup,
    _swap: Box<dyn std::any::Any>,
}

impl Ready {
    /// The cgroup to start in.
    #[must_use]
    pub fn cgroup(&self) -> &Path {
        self.cgroup.path()
    }

    /// How often the kernel's OOM killer struck in the cgroup.
    #[must_use]
    pub fn oom_kills(&self) -> u64 {
        self.cgroup.oom_kills()
    }
}

/// Sets up a cgroup with `limit`, over `peer` with room for `swap` bytes. For `wait`, see [`cgroup::Rescue`].
///
/// # Errors
/// When this machine cannot, with the reason; nothing is left then.
pub fn set_up(keeper: &Keeper, peer: Peer, limit: u64, swap: u64, dir: &Path, wait: bool) -> Result<Ready, String> {
    let swap: Box<dyn std::any::Any> = match peer {
        Peer::Zswap => Box::new(zswap::Zswap::set_up(keeper, swap, dir)?),
        Peer::ZswapShrinker => {
            let shrinker = [zswap::set(keeper, "shrinker_enabled", "Y")?, zswap::set(keeper, "max_pool_percent", "1")?];
            Box::new((zswap::Zswap::set_up(keeper, swap, dir)?, shrinker))
        }
        Peer::SwapFile => Box::new(zswap::Without::set_up(keeper, swap, dir)?),
        Peer::Zram => Box::new(zram::Zram::set_up(keeper, swap)?),
    };
    Ok(Ready { cgroup: cgroup::Cgroup::make(keeper, limit, wait)?, _swap: swap })
}

/// The selected one of several choices: that in brackets, as in `[lzo-rle] lzo lz4` and `always inherit [madvise] never`.
fn selected(list: &str) -> Option<&str> {
    list.split_once('[')?.1.split_once(']').map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_is_the_one_in_brackets() {
        assert_eq!(selected("[lzo-rle] lzo lz4 \n"), Some("lzo-rle"));
        assert_eq!(selected("lzo [lz4]"), Some("lz4"));
        assert_eq!(selected("lzo lz4"), None);
        assert_eq!(selected("always inherit [madvise] never\n"), Some("madvise"));
        assert_eq!(selected("always madvise [never]\n"), Some("never"));
        assert_eq!(selected("always\n"), None);
    }
}

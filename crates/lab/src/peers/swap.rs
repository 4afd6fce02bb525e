//! Swap areas: the header that the kernel looks for, and the system call.

use crate::undo::{Keeper, Step, Todo};
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

const PAGE: usize = crate::size::PAGE;
/// Use the priority in the low bits.
const SWAP_FLAG_PREFER: libc::c_int = 0x8000;
/// The highest priority: before whatever else the machine swaps to.
const PRIORITY: libc::c_int = 0x7fff;

/// The first page of a swap area of `bytes`, as mkswap writes it.
fn header(bytes: u64) -> Vec<u8> {
    let mut page = vec![0; PAGE];
    let last = u32::try_from(bytes / PAGE as u64 - 1).unwrap_or(u32::MAX);
    page[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
    page[1028..1032].copy_from_slice(&last.to_ne_bytes());
    page[PAGE - 10..].copy_from_slice(b"SWAPSPACE2");
    page
}

/// Makes `path`, a file or device of `bytes`, a swap area, and swaps to it until the returned value is dropped.
///
/// # Errors
/// When it cannot be written, or the kernel refuses it.
pub fn on(keeper: &Keeper, path: &Path, bytes: u64) -> Result<Todo, String> {
    let write = || -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(path)?;
        file.write_all_at(&header(bytes), 0)?;
        file.sync_all()
    };
    write().map_err(|e| format!("cannot write a swap header to {}: {e}", path.display()))?;
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
    let off = keeper.will_undo(Step::SwapOff(path.to_owned()))?;
    // SAFETY: the name is a valid C string.
    if unsafe { libc::swapon(name.as_ptr(), SWAP_FLAG_PREFER | PRIORITY) } == 0 {
        Ok(off)
    } else {
        Err(format!("cannot swap to {}: {}", path.display(), io::Error::last_os_error()))
    }
}

/// Starts to swap to a file of `bytes` in `dir`. The file is made once and kept for the next time.
///
/// # Errors
/// When it cannot be made, or the kernel refuses it.
pub fn file(keeper: &Keeper, bytes: u64, dir: &Path) -> Result<Todo, String> {
    let file = dir.join("swapfile");
    if !file.exists() {
        allocate(&file, bytes).map_err(|e| format!("cannot make a swap file of {bytes} bytes: {e}"))?;
    }
    on(keeper, &file, bytes)
}

fn allocate(path: &Path, bytes: u64) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let file: File = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    // SAFETY: the descriptor is open.
    let all = match unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes as libc::off_t) } {
        0 => file.sync_all(),
        _ => Err(io::Error::last_os_error()),
    };
    // A partial file would be taken for the whole one the next time.
    all.inspect_err(|_| drop(fs::remove_file(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: there was no room for the whole file, and its part was left. The next peer tried to swap to that: EINVAL.
    #[test]
    fn no_part_of_a_file_is_left() {
        let path = std::env::temp_dir().join(format!("uzswap-lab-swap-{}", std::process::id()));
        assert!(allocate(&path, 1 << 60).is_err());
        assert!(!path.exists());
    }

    #[test]
    fn the_header_is_mkswaps() {
        let page = header(1 << 30);
        assert_eq!(page.len(), PAGE);
        assert_eq!(&page[PAGE - 10..], b"SWAPSPACE2");
        assert_eq!(page[1024..1032], [1, 0, 0, 0, 0xff, 0xff, 3, 0]);
    }
}

//! With whose rights a program runs. It may be asked in a vfork child, or on a small stack: nothing is allocated, and no state touched.
//!
//! The loader preloads nothing into a program that runs with other rights than who starts it (AT_SECURE).

use crate::sys;
use core::ffi::{c_char, c_int};

/// Whether the kernel has a program that is in this file run with other rights than those of who starts it: as another user or group than
/// its real ones, or with capabilities of the file's.
pub fn is_privileged(fd: i32) -> bool {
    // SAFETY: zeros are a stat; the call fills it.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // struct statfs: … its eleventh word the flags of the mount.
    let mut fs = [0u64; 15];
    // SAFETY: structures of ours.
    let asked = unsafe { sys!(libc::SYS_fstat, fd, &raw mut stat).and(sys!(libc::SYS_fstatfs, fd, fs.as_mut_ptr())) };
    let counts = asked.is_ok() && fs[10] & libc::ST_NOSUID == 0;
    has_other_user(&stat, counts) || counts && !is_root() && has_capabilities(fd)
}

/// The same, of the file `path` of the directory `dir`, which may not be read, as far as its mode says it.
pub fn is_privileged_at(dir: c_int, path: *const c_char) -> bool {
    // SAFETY: zeros are a stat; the call fills it.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: as above; the kernel has read the path, and says EFAULT if it cannot any more.
    let asked = unsafe { sys!(libc::SYS_newfstatat, dir, path, &raw mut stat, libc::AT_EMPTY_PATH) };
    asked.is_ok() && has_other_user(&stat, true)
}

/// Whether what is in a file of which this is known runs as another user or group than the calling thread's real ones. `counts`: what
/// the file's mode says of that may count.
fn has_other_user(stat: &libc::stat, counts: bool) -> bool {
    // SAFETY: numbers only. (With no new rights the mode does not count, either.)
    let counts = counts && unsafe { sys!(libc::SYS_prctl, libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) } != Ok(1);
    let becomes = |bits: u32, own: u32, effective: i64| {
        // SAFETY: no arguments.
        let effective = || unsafe { sys!(effective) }.unwrap_or(0) as u32;
        if counts && stat.st_mode & bits == bits { own } else { effective() }
    };
    let user = becomes(libc::S_ISUID, stat.st_uid, libc::SYS_geteuid);
    let group = becomes(libc::S_ISGID | libc::S_IXGRP, stat.st_gid, libc::SYS_getegid);
    // SAFETY: no arguments.
    unsafe { sys!(libc::SYS_getuid) != Ok(user as usize) || sys!(libc::SYS_getgid) != Ok(group as usize) }
}

fn is_root() -> bool {
    // SAFETY: no arguments.
    unsafe { sys!(libc::SYS_getuid) == Ok(0) }
}

/// Whether a file has capabilities, which its program is given.
pub fn has_capabilities(fd: i32) -> bool {
    // SAFETY: a constant name; with a size of 0 nothing is written.
    unsafe { sys!(libc::SYS_fgetxattr, fd, c"security.capability".as_ptr(), 0, 0) }.is_ok_and(|n| n > 0)
}

//! The privileges that a program runs with. Callers may be in a vfork child, or on a small stack, so nothing here
//! allocates or touches shared state.
//!
//! The loader preloads nothing into a program that runs with other privileges than its caller's (AT_SECURE).

use crate::sys;
use core::ffi::{c_char, c_int};

/// Whether the kernel would run the program in this file with other privileges than those of the caller: as a user or
/// group other than its real ones, or with capabilities of the file's.
pub fn is_privileged(fd: i32) -> bool {
    // SAFETY: zeros are a stat; the call fills it.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // struct statfs; its eleventh word has the mount's flags.
    let mut fs = [0u64; 15];
    // SAFETY: structures of ours.
    let asked = unsafe { sys!(libc::SYS_fstat, fd, &raw mut stat).and(sys!(libc::SYS_fstatfs, fd, fs.as_mut_ptr())) };
    let counts = asked.is_ok() && fs[10] & libc::ST_NOSUID == 0;
    has_other_user(&stat, counts) || counts && !is_root() && has_capabilities(fd)
}

/// As [`is_privileged`] for the file `path` in directory `dir`, which may be unreadable, as far as the file's mode
/// tells.
pub fn is_privileged_at(dir: c_int, path: *const c_char) -> bool {
    // SAFETY: zeros are a stat; the call fills it.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: as above; the kernel checks the path, and returns EFAULT if it cannot read it any more.
    let asked = unsafe { sys!(libc::SYS_newfstatat, dir, path, &raw mut stat, libc::AT_EMPTY_PATH) };
    asked.is_ok() && has_other_user(&stat, true)
}

/// Whether a program in a file with this `stat` runs as a user or group other than the calling thread's real ones.
/// `counts` says whether set-user-ID and set-group-ID bits can have effect.
fn has_other_user(stat: &libc::stat, counts: bool) -> bool {
    // SAFETY: numbers only. (With no_new_privs the mode has no effect either.)
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

/// Whether a file has capabilities, which the kernel gives to its program.
pub fn has_capabilities(fd: i32) -> bool {
    // SAFETY: a constant name; with a size of 0 nothing is written.
    unsafe { sys!(libc::SYS_fgetxattr, fd, c"security.capability".as_ptr(), 0, 0) }.is_ok_and(|n| n > 0)
}

//! `mlockall`: a program that locks all its memory leaves nothing to take out, so it is let go of.
//!
//! The kernel would also lock, and fill, what uzswap has reserved: more than 70 GiB. So existing memory is locked
//! mapping by mapping, without uzswap's; the kernel locks what the program maps later.

use crate::{fails, leaving};
use core::ffi::c_int;
use uzswap_pager::frames::arena::PAGE;
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::{maps, sys};

/// Most passes over the mappings while other threads unmap some of them.
const PASSES: u32 = 8;
/// Tries for one mapping while others are mapped and unmapped there.
const TRIES: u32 = 200;

/// mlockall(2).
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    call(flags).map_or_else(fails, |()| 0)
}

/// The call, which may also be made by its number.
///
/// The story: a program that made it by libc's `syscall` had the kernel fill what uzswap reserved, and was killed for
/// lack of memory.
///
/// # Errors
/// The kernel's.
pub fn call(flags: c_int) -> Result<(), Errno> {
    let known = libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT;
    let valid = flags & known == flags && flags & (libc::MCL_CURRENT | libc::MCL_FUTURE) != 0;
    if valid {
        is_allowed(flags)?;
    }
    let reserved = valid.then(leaving::locks_all).flatten();
    match reserved {
        Some(_) => lock(flags),
        // SAFETY: flags only.
        None => unsafe { sys!(libc::SYS_mlockall, flags) }.map(drop),
    }
}

/// Checks whether the kernel would allow it without uzswap's memory. The kernel refuses before it changes anything.
///
/// The story: future memory was already locked when it turned out that the existing memory exceeds RLIMIT_MEMLOCK. The
/// program got ENOMEM, as it would without uzswap, but could not map anything any more; and it ran without a limit.
fn is_allowed(flags: c_int) -> Result<(), Errno> {
    let Some(errno) = refusal_of_more() else { return Ok(()) };
    let mut most = [0u64; 2];
    // SAFETY: the kernel fills a limit of ours.
    unsafe { sys!(libc::SYS_prlimit64, 0, libc::RLIMIT_MEMLOCK, 0, most.as_mut_ptr()) }?;
    if errno != libc::ENOMEM || flags & libc::MCL_CURRENT == 0 {
        return if most[0] == 0 { Err(errno) } else { Ok(()) };
    }
    let mut text = Vec::with_capacity(128 << 10);
    raw::read_file(b"/proc/thread-self/maps\0", &mut text)?;
    let theirs = maps::parse(&text).filter(|m| !is_own(m) && !m.name.starts_with(b"[vs"));
    let bytes = theirs.map(|m| m.end - m.start).sum::<usize>();
    if bytes as u64 <= most[0] { Ok(()) } else { Err(errno) }
}

/// The kernel's error for locking more than RLIMIT_MEMLOCK, if it has one. The probe is a range that ends before it
/// begins: if the kernel allows more, it only complains about that (EINVAL).
fn refusal_of_more() -> Option<Errno> {
    // SAFETY: there is no such range.
    let asked = unsafe { sys!(libc::SYS_mlock2, 2 * PAGE, PAGE.wrapping_neg(), 0) };
    asked.err().filter(|errno| *errno != libc::EINVAL)
}

/// Whether a mapping is uzswap's.
fn is_own(m: &maps::Mapping) -> bool {
    let reserved = leaving::reserved().is_some_and(|(base, end)| (base..end).contains(&m.start));
    reserved || m.name.starts_with(b"/memfd:uzswap") || m.name.ends_with(b"/libuzswap_agent.so")
}

/// Locks existing memory except uzswap's, and future memory, as the flags say.
fn lock(flags: c_int) -> Result<(), Errno> {
    if flags & libc::MCL_FUTURE != 0 {
        // SAFETY: flags only.
        unsafe { sys!(libc::SYS_mlockall, flags & !libc::MCL_CURRENT) }?;
    }
    if flags & libc::MCL_CURRENT == 0 {
        return Ok(());
    }
    for _ in 0..PASSES {
        if lock_mappings(flags)? {
            break;
        }
    }
    Ok(())
}

/// Locks all existing mappings except uzswap's. False if one of them is gone, entirely or in part, so that the caller
/// must look again.
fn lock_mappings(flags: c_int) -> Result<bool, Errno> {
    let (mut text, mut all) = (Vec::with_capacity(128 << 10), true);
    raw::read_file(b"/proc/thread-self/maps\0", &mut text)?;
    for m in maps::parse(&text) {
        if is_own(&m) || m.name.starts_with(b"[v") {
            continue;
        }
        let len = m.end - m.start;
        if !lock_mapping(m.start, len)? {
            all = false;
            continue;
        }
        if flags & libc::MCL_ONFAULT != 0 {
            continue;
        }
        let written = m.perms[1] == b'w' && m.perms[3] == b'p';
        let advice = if written { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
        // Like mlockall, leave memory that cannot be read as it is.
        // SAFETY: populating changes no contents.
        let _ = unsafe { sys!(libc::SYS_madvise, m.start, len, advice) };
    }
    Ok(all)
}

/// Locks a mapping; false if not all of it exists any more. It tries again and again, because the kernel returns the
/// same error for that as for locking too much, and another thread may map anew what was missing before the check.
fn lock_mapping(at: usize, len: usize) -> Result<bool, Errno> {
    let mut done = Ok(0);
    for _ in 0..TRIES {
        // SAFETY: locking changes no contents.
        done = unsafe { sys!(libc::SYS_mlock2, at, len, libc::MLOCK_ONFAULT) };
        if done != Err(libc::ENOMEM) {
            break;
        }
        if !is_mapped(at, len) {
            return Ok(false);
        }
    }
    done.map(|_| true)
}

/// Whether all of a range is mapped.
fn is_mapped(at: usize, len: usize) -> bool {
    // SAFETY: with this flag the call changes nothing, and only reports what is not mapped.
    unsafe { sys!(libc::SYS_msync, at, len, libc::MS_ASYNC) }.is_ok()
}

//! `mlockall`: a program that locks all its memory has nothing that could be taken out, so it is let go of.
//!
//! The kernel would lock, and fill, what uzswap reserved as well: more than 70 GiB. So what is there is locked mapping by
//! mapping, without uzswap's; what the program maps later the kernel locks.

use crate::{fails, leaving};
use core::ffi::c_int;
use uzswap_pager::frames::arena::PAGE;
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::{maps, sys};

/// How often the mappings are gone through at most while other threads unmap some of them.
const PASSES: u32 = 8;
/// Times one mapping is tried while others are mapped and unmapped there.
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
/// The story: what made it by libc's `syscall` had the kernel fill what uzswap reserved, and was killed for want of memory.
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

/// Whether the kernel would allow it if there were nothing of uzswap's. It refuses before it changes anything.
///
/// The story: what was to come had been locked when it showed that what there was is more than may be (RLIMIT_MEMLOCK). The program was told
/// ENOMEM, as it is without uzswap, and could map nothing any more; and it ran without a limit.
fn is_allowed(flags: c_int) -> Result<(), Errno> {
    let Some(errno) = refusal_of_more() else { return Ok(()) };
    let mut most = [0u64; 2];
    // SAFETY: a limit of ours to be filled.
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

/// What the kernel has against locking more than RLIMIT_MEMLOCK, if anything. It is asked for a range that ends before it begins, of which it
/// says so (EINVAL) where it has nothing against that.
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

/// Locks what there is but what is uzswap's, and what comes, as the flags say.
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

/// Locks the mappings that there are but uzswap's; false where one of them is there no more, or not all of it, so that
/// it must be looked again.
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
        // (As mlockall does, what cannot be read is left as it is.)
        // SAFETY: populating changes no contents.
        let _ = unsafe { sys!(libc::SYS_madvise, m.start, len, advice) };
    }
    Ok(all)
}

/// Locks a mapping; false where not all of it is there any more. (The kernel says the same of that and of more than may be locked; and
/// what is not there may be mapped anew, by another thread, before that is asked: so it is tried again.)
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
    // SAFETY: the call changes nothing with this flag, but says what is not there.
    unsafe { sys!(libc::SYS_msync, at, len, libc::MS_ASYNC) }.is_ok()
}

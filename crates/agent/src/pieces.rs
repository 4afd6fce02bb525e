//! `mremap` of what are several mappings for the kernel.
//!
//! Memory that is mapped beside other memory becomes one mapping with it, and may be resized and moved with it. Where only one of the two
//! is registered they are two, and stay two when both are, once both have been written to. The kernel moves one mapping in a call:
//! such a call was told EFAULT, and what it was to replace was gone. (From Linux 6.17 on several mappings that stay as large may be
//! moved at once, but what is registered may not; the kernel moves those before it, and then says EFAULT.) So their parts are moved one by
//! one:
//!
//! - What would be *one* without uzswap (private anonymous memory without a gap, of the same rights) is all moved or not at all: all
//!   addresses are taken first; all parts but the last are moved so that their old places stay mapped, empty, and can be moved back to,
//!   whatever other threads map meanwhile; the last is moved, and resized, as the call says; and then the old places go.
//! - What would be several is moved as the kernel does where it does: one after the other, with what there is between them, until one
//!   cannot be moved.
//!
//! What stays where it is of the first mapping stays locked, if it was: the kernel unlocks all of a mapping of which a part is moved so that
//! the old place stays (Linux 6.18; by itself it would have moved that part in one call, which unlocks nothing).
//!
//! For the tables each is a call of its own. Who touches what is moving, or where it comes to be, sees some of it moved and some not, as no
//! program may do (it cannot know whether its memory is still there).
//!
//! Which mappings there are is asked before the call where it says where to: after it the place may be another thread's. Kernels before
//! 6.11 answer that slowly; there it is asked only when the call was refused. A program that has all its descriptors in use has it asked by
//! another thread.

use crate::locked;
use crate::parts::{Call, MREMAP_DONTUNMAP, Part, Pieces, Range, end, is_sane, of};
use crate::remap::one;
use uzswap_pager::frames::arena::PAGE;
use uzswap_pager::pager::Pager;
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::{maps, sys, thread};

/// Before the system call, with the lock of mapping calls held alone: the parts, where it is known that it must be made in parts.
pub fn before(p: &Pager, call: &Call) -> Option<Pieces> {
    if !call.has(libc::MREMAP_FIXED) || !is_sane(call) {
        return None;
    }
    let (from, end) = (call.from, end(call));
    let found = opened(p, || {
        let fd = raw::open(b"/proc/thread-self/maps\0", libc::O_RDONLY | libc::O_CLOEXEC)?;
        let found = asked(fd, from, end);
        raw::close(fd);
        found
    });
    of(call, &found?, true)
}

/// After it was refused (EFAULT), with the same lock.
pub fn after(p: &Pager, call: &Call) -> Option<Pieces> {
    if !is_sane(call) {
        return None;
    }
    let text = opened(p, || {
        let mut text = Vec::with_capacity(128 << 10);
        raw::read_file(b"/proc/thread-self/maps\0", &mut text).map(|()| text)
    })?;
    let found = maps::parse(&text).filter(|m| m.end > call.from && m.start < end(call)).map(|m| Part::of(&m));
    of(call, &found.collect::<Vec<_>>(), false)
}

/// What comes of opening a file, which another thread does where the program has all its descriptors in use.
///
/// The story: of such a program `mremap` was refused (EFAULT), or moved nothing, as it could not be asked what is mapped.
fn opened<R: Send>(p: &Pager, open: impl Fn() -> Result<R, Errno> + Sync) -> Option<R> {
    match open() {
        Err(libc::EMFILE) => p.with_a_descriptor(&open)?.ok(),
        done => done.ok(),
    }
}

impl Part {
    fn of(m: &maps::Mapping) -> Self {
        Self { start: m.start, end: m.end, perms: m.perms, anonymous: m.is_anonymous() }
    }
}

/// The mappings in a range; nothing of them where there is one.
fn asked(fd: i32, from: usize, end: usize) -> Result<Vec<Part>, Errno> {
    let (mut found, mut at, mut name) = (Vec::new(), from, [0; maps::NAME_BYTES]);
    while at < end
        && let Some(m) = maps::mapping_from(fd, at, &mut name)?.filter(|m| m.start < end)
    {
        at = m.end;
        if at >= end && found.is_empty() {
            break;
        }
        found.push(Part::of(&m));
    }
    Ok(found)
}

/// Makes the call in these parts; what the kernel would return.
///
/// # Safety
/// As the system call's; with the lock of mapping calls held alone and all signals blocked.
pub unsafe fn remap(pieces: &Pieces, p: &Pager, call: &Call) -> isize {
    // SAFETY: as the caller says.
    let done = unsafe {
        match pieces {
            Pieces::One { parts, rest, may_replace } => {
                let locked = locked::of(rest.0..rest.1);
                let done = as_one(p, call, parts, *may_replace);
                if locked.is_some_and(|locked| !locked.again()) {
                    p.say(b"uzswap: memory that was locked (mlock) could not be locked again when what lay behind it had been moved; the kernel may swap it out\n");
                }
                done
            }
            Pieces::Several(parts) => in_turn(p, call, parts),
        }
    };
    done.map_or_else(|errno| -(errno as isize), |at| at as isize)
}

/// Moves mappings one after the other.
///
/// # Safety
/// As the system call's.
unsafe fn in_turn(p: &Pager, call: &Call, parts: &[Range]) -> Result<usize, Errno> {
    for (start, end) in parts {
        let (len, to) = (end - start, call.to + (start - call.from));
        // SAFETY: as the caller says.
        raw::check(unsafe { one(p, &Call { from: *start, old_len: len, new_len: len, to, flags: call.flags }) })?;
    }
    Ok(call.to)
}

/// Resizes and moves parts as if they were one mapping: all of them, or none.
///
/// # Safety
/// As the system call's.
unsafe fn as_one(p: &Pager, call: &Call, parts: &[Range], may_replace: bool) -> Result<usize, Errno> {
    let [old_len, new_len] = [call.old_len, call.new_len].map(|len| len.next_multiple_of(PAGE));
    let (fixed, keeps) = (call.has(libc::MREMAP_FIXED), call.has(MREMAP_DONTUNMAP));
    let (Some((last, end)), false) = (parts.last().copied(), !fixed && !keeps && new_len <= old_len) else {
        // (In its place what does not grow is not moved, and the kernel does not mind how many mappings it is.)
        return Err(libc::EFAULT);
    };
    if !fixed && !keeps {
        let grown =
            Call { from: last, old_len: end - last, new_len: end - last + (new_len - old_len), flags: 0, to: 0 };
        // SAFETY: as the caller says.
        match raw::check(unsafe { one(p, &grown) }) {
            Ok(_) => return Ok(call.from),
            // (There is something behind it.)
            Err(libc::ENOMEM) if call.has(libc::MREMAP_MAYMOVE) => {}
            Err(errno) => return Err(errno),
        }
    }
    let place = take(call, new_len, may_replace)?;
    // SAFETY: as the caller says; what is at the place is ours to replace.
    unsafe { move_all(p, call, parts, place) }?;
    let drop = |from: usize, to: usize| {
        // SAFETY: what the program gives up by the call, and nobody else has mapped anything there since.
        from >= to || unsafe { sys!(libc::SYS_munmap, from, to - from) }.is_ok()
    };
    let moved = call.from + old_len.min(new_len);
    let last_moved = parts.iter().map(|part| part.0).rfind(|start| *start < moved).unwrap_or(call.from);
    if !keeps && (!drop(call.from, last_moved) || !drop(moved, end)) {
        p.say(b"uzswap: memory that was moved in parts could not be unmapped where it was; it stays mapped, and empty, there\n");
    }
    Ok(place)
}

/// Takes the addresses where parts are to be.
fn take(call: &Call, len: usize, may_replace: bool) -> Result<usize, Errno> {
    let (to, how) = match (call.has(libc::MREMAP_FIXED), may_replace) {
        (false, _) => (0, 0),
        (true, true) => (call.to, libc::MAP_FIXED),
        // (The kernel has unmapped what was there.)
        (true, false) => (call.to, libc::MAP_FIXED_NOREPLACE),
    };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | how;
    // SAFETY: where nothing is, or what the program gives up by the call.
    unsafe { sys!(libc::SYS_mmap, to, len, libc::PROT_NONE, flags, usize::MAX, 0) }
        .map_err(|errno| if errno == libc::EEXIST { libc::EFAULT } else { errno })
}

/// Moves parts to a place that was taken for them; all of them, or none, and then the place is given up.
///
/// # Safety
/// As the system call's.
unsafe fn move_all(p: &Pager, call: &Call, parts: &[Range], place: usize) -> Result<(), Errno> {
    let new_len = call.new_len.next_multiple_of(PAGE);
    let moved = call.from + new_len.min(end(call) - call.from);
    let fixed = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as usize;
    let keep = fixed | MREMAP_DONTUNMAP as usize;
    let move_one = |from: usize, old_len: usize, new_len: usize, to: usize, flags: usize| {
        // SAFETY: as the caller says; back, to where nothing but its empty mapping is.
        raw::check(unsafe { one(p, &Call { from, old_len, new_len, flags, to }) })
    };
    let there = |start: usize| place + (start - call.from);
    for (i, (start, end)) in
        parts.iter().map(|(a, b)| (*a, (*b).min(moved))).take_while(|(a, _)| *a < moved).enumerate()
    {
        let is_last = end == moved;
        let len = if is_last { new_len - (start - call.from) } else { end - start };
        let flags = if is_last && !call.has(MREMAP_DONTUNMAP) { fixed } else { keep };
        let Err(errno) = move_one(start, end - start, len, there(start), flags) else { continue };
        for (start, end) in &parts[..i] {
            if move_one(there(*start), end - start, end - start, *start, fixed).is_err() {
                p.say(b"uzswap: memory of which a part was moved could not be moved back; the process is ended rather than read wrong data\n");
                thread::end_process(125);
            }
        }
        // SAFETY: the place that was taken, in which nothing is any more.
        let _ = unsafe { sys!(libc::SYS_munmap, place, new_len) };
        return Err(errno);
    }
    Ok(())
}

//! `mremap` of memory that is several mappings to the kernel, though one to the program.
//!
//! Memory that is mapped beside other memory merges with it into one mapping, and may be resized and moved together
//! with it. If only one of the two is registered they are two mappings, and they stay two when both are registered,
//! once both have been written to. The kernel moves one mapping in a call: such a call got EFAULT, and what it should
//! have replaced was gone. (From Linux 6.17 on, several mappings that keep their size may be moved at once, but not
//! registered ones: the kernel moves those before, and then returns EFAULT.) So the parts are moved one by one:
//!
//! - Parts that would be *one* mapping without uzswap (private anonymous memory without a gap, of the same permissions)
//!   are all moved, or none. First all addresses are taken. Then all parts but the last are moved so that their old
//!   places stay mapped, empty; so they can be moved back, whatever other threads map meanwhile. The last part is
//!   moved, and resized, as the call says. Finally the old places are unmapped.
//! - Parts that would be several mappings anyway are moved as the kernel does where it can: one after the other, with
//!   the gaps between them, until one cannot be moved.
//!
//! The rest of the first mapping, which stays where it is, stays locked if it was. When part of a mapping is moved so
//! that its old place stays, the kernel unlocks the whole mapping (Linux 6.18); without uzswap it would have moved that
//! part in one call, which unlocks nothing.
//!
//! To the tables each part is a call of its own. A thread that touches memory while it moves, or the place it moves to,
//! sees some of it moved and some not. No program may do that, as it cannot know whether its memory is still there.
//!
//! If the call names the target, the mappings are looked up before it, as afterwards the place may belong to another
//! thread. Kernels before 6.11 are slow to answer, so there the lookup comes only after a refusal. For a program that
//! has all its descriptors in use another thread does the lookup.

use crate::locked;
use crate::parts::{Call, MREMAP_DONTUNMAP, Part, Pieces, Range, end, is_sane, of};
use crate::remap::one;
use uzswap_pager::frames::arena::PAGE;
use uzswap_pager::pager::Pager;
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::{maps, sys, thread};

/// Before the system call, with the lock of mapping calls held alone: the parts, if it is known that the call must be
/// made in parts.
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

/// After the call was refused (EFAULT), with the same lock: the parts, if it must be made in parts.
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

/// Runs `open`, which opens a file. If the program has all its descriptors in use, another thread runs it.
///
/// The story: for such a program `mremap` was refused (EFAULT), or moved nothing, as the mappings could not be looked
/// up.
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

/// The mappings in a range; an empty list if there is only one.
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

/// Makes the call in these parts. Returns what the kernel would return.
///
/// # Safety
/// As the system call's; the lock of mapping calls must be held alone, and all signals blocked.
pub unsafe fn remap(pieces: &Pieces, p: &Pager, call: &Call) -> isize {
    // SAFETY: the caller passes the system call's arguments, with the lock held and signals blocked.
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
/// As [`remap`].
unsafe fn in_turn(p: &Pager, call: &Call, parts: &[Range]) -> Result<usize, Errno> {
    for (start, end) in parts {
        let (len, to) = (end - start, call.to + (start - call.from));
        // SAFETY: the caller's obligations are the same.
        raw::check(unsafe { one(p, &Call { from: *start, old_len: len, new_len: len, to, flags: call.flags }) })?;
    }
    Ok(call.to)
}

/// Resizes and moves parts as if they were one mapping: all of them, or none.
///
/// # Safety
/// As [`remap`].
unsafe fn as_one(p: &Pager, call: &Call, parts: &[Range], may_replace: bool) -> Result<usize, Errno> {
    let [old_len, new_len] = [call.old_len, call.new_len].map(|len| len.next_multiple_of(PAGE));
    let (fixed, keeps) = (call.has(libc::MREMAP_FIXED), call.has(MREMAP_DONTUNMAP));
    let (Some((last, end)), false) = (parts.last().copied(), !fixed && !keeps && new_len <= old_len) else {
        // A call that neither grows nor moves the memory works on any number of mappings, so the kernel's error stands.
        return Err(libc::EFAULT);
    };
    if !fixed && !keeps {
        let grown =
            Call { from: last, old_len: end - last, new_len: end - last + (new_len - old_len), flags: 0, to: 0 };
        // SAFETY: the caller's obligations are the same.
        match raw::check(unsafe { one(p, &grown) }) {
            Ok(_) => return Ok(call.from),
            // There is something behind it.
            Err(libc::ENOMEM) if call.has(libc::MREMAP_MAYMOVE) => {}
            Err(errno) => return Err(errno),
        }
    }
    let place = take(call, new_len, may_replace)?;
    // SAFETY: the caller's obligations are the same, and the target is ours to replace.
    unsafe { move_all(p, call, parts, place) }?;
    let drop = |from: usize, to: usize| {
        // SAFETY: memory that the program gives up by the call; nobody else has mapped anything there since.
        from >= to || unsafe { sys!(libc::SYS_munmap, from, to - from) }.is_ok()
    };
    let moved = call.from + old_len.min(new_len);
    let last_moved = parts.iter().map(|part| part.0).rfind(|start| *start < moved).unwrap_or(call.from);
    if !keeps && (!drop(call.from, last_moved) || !drop(moved, end)) {
        p.say(b"uzswap: memory that was moved in parts could not be unmapped where it was; it stays mapped, and empty, there\n");
    }
    Ok(place)
}

/// Takes the addresses that the parts will move to.
fn take(call: &Call, len: usize, may_replace: bool) -> Result<usize, Errno> {
    let (to, how) = match (call.has(libc::MREMAP_FIXED), may_replace) {
        (false, _) => (0, 0),
        (true, true) => (call.to, libc::MAP_FIXED),
        // The kernel has already unmapped what was there.
        (true, false) => (call.to, libc::MAP_FIXED_NOREPLACE),
    };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | how;
    // SAFETY: nothing is there, or only what the program gives up by the call.
    unsafe { sys!(libc::SYS_mmap, to, len, libc::PROT_NONE, flags, usize::MAX, 0) }
        .map_err(|errno| if errno == libc::EEXIST { libc::EFAULT } else { errno })
}

/// Moves parts to the place taken for them: all of them, or none, and then gives the place up.
///
/// # Safety
/// As [`remap`].
unsafe fn move_all(p: &Pager, call: &Call, parts: &[Range], place: usize) -> Result<(), Errno> {
    let new_len = call.new_len.next_multiple_of(PAGE);
    let moved = call.from + new_len.min(end(call) - call.from);
    let fixed = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as usize;
    let keep = fixed | MREMAP_DONTUNMAP as usize;
    let move_one = |from: usize, old_len: usize, new_len: usize, to: usize, flags: usize| {
        // SAFETY: the caller's obligations are the same; and what is moved back goes to where only its empty mapping
        // is.
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
        // SAFETY: the place that was taken, which is empty again.
        let _ = unsafe { sys!(libc::SYS_munmap, place, new_len) };
        return Err(errno);
    }
    Ok(())
}

//! The arguments of an `mremap`, and whether it must be made in parts (`pieces` says why, and does it).

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use uzswap_pager::frames::arena::PAGE;
use uzswap_sys::process;

/// The old place stays mapped, and is empty.
pub const MREMAP_DONTUNMAP: i32 = 4;

/// The arguments of an `mremap`.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Old address.
    pub from: usize,
    /// Old length.
    pub old_len: usize,
    /// New length.
    pub new_len: usize,
    /// MREMAP_… flags.
    pub flags: usize,
    /// New address, with MREMAP_FIXED.
    pub to: usize,
}

impl Call {
    /// Whether a flag is set.
    pub fn has(&self, flag: i32) -> bool {
        self.flags & flag as usize != 0
    }
}

/// A range of addresses: first, and one past the last.
pub type Range = (usize, usize);

/// The parts of the memory to be moved: the mappings, of the first and last one only what belongs to the call.
#[derive(Debug, PartialEq, Eq)]
pub enum Pieces {
    /// Without uzswap they would be one mapping.
    One {
        /// All parts.
        parts: Vec<Range>,
        /// The part of the first mapping that lies before the call's memory.
        rest: Range,
        /// Whether the target may be in use and is replaced, or must be free.
        may_replace: bool,
    },
    /// They would be several mappings anyway.
    Several(Vec<Range>),
}

/// What matters about a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
    /// Its permissions as in /proc/PID/maps.
    pub perms: [u8; 4],
    /// Whether it is anonymous.
    pub anonymous: bool,
}

/// The end of a call's old memory.
pub fn end(call: &Call) -> usize {
    call.from + call.old_len.next_multiple_of(PAGE)
}

/// Whether the kernel would accept the arguments as such.
pub fn is_sane(call: &Call) -> bool {
    let fits = |at: usize, len: usize| {
        let end = len.checked_next_multiple_of(PAGE).and_then(|len| at.checked_add(len));
        at.is_multiple_of(PAGE) && end.is_some_and(|end| end <= 1 << 56)
    };
    let known = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | MREMAP_DONTUNMAP) as usize;
    let (fixed, keeps) = (call.has(libc::MREMAP_FIXED), call.has(MREMAP_DONTUNMAP));
    let [old_len, new_len] = [call.old_len, call.new_len].map(|len| len.wrapping_add(PAGE - 1) & !(PAGE - 1));
    // With DONTUNMAP the size must stay, and the target must not overlap the source.
    call.flags & !known == 0
        && (call.has(libc::MREMAP_MAYMOVE) || !fixed && !keeps)
        && fits(call.from, call.old_len)
        && (old_len > 0 && new_len > 0 && new_len <= 1 << 56)
        && (!keeps || old_len == new_len)
        && (!fixed || fits(call.to, call.new_len))
        && (!fixed || call.to + new_len <= call.from || call.from + old_len <= call.to)
}

/// The parts of a call's memory, given the mappings found there; `None` if the call need not be made in parts.
pub fn of(call: &Call, found: &[Part], may_replace: bool) -> Option<Pieces> {
    let first = found.first().filter(|m| m.start <= call.from && found.len() > 1)?;
    let parts = || found.iter().map(|m| (m.start.max(call.from), m.end.min(end(call)))).collect();
    let alike = |m: &Part| m.anonymous && m.perms == first.perms;
    let whole = found.windows(2).all(|m| m[0].end == m[1].start) && found.last().is_some_and(|m| m.end >= end(call));
    if whole && found.iter().all(alike) {
        return Some(Pieces::One { parts: parts(), rest: (first.start, call.from), may_replace });
    }
    let stays_as_large = call.old_len.next_multiple_of(PAGE) == call.new_len.next_multiple_of(PAGE);
    (may_replace && stays_as_large && moves_several()).then(|| Pieces::Several(parts()))
}

/// Whether the kernel moves several mappings at once (Linux 6.17).
fn moves_several() -> bool {
    static RELEASE: AtomicU32 = AtomicU32::new(0);
    let known = RELEASE.load(Relaxed);
    let release = if known != 0 { known } else { process::kernel_release().map_or(1, |(a, b)| a << 16 | b) };
    RELEASE.store(release, Relaxed);
    release >= 6 << 16 | 17
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIXED: usize = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as usize;

    fn call(from: usize, old: usize, new: usize, flags: usize, to: usize) -> Call {
        let [from, old_len, new_len, to] = [from, old, new, to].map(|pages| pages * PAGE);
        Call { from, old_len, new_len, flags, to }
    }

    fn part(start: usize, end: usize, perms: &[u8; 4]) -> Part {
        Part { start: start * PAGE, end: end * PAGE, perms: *perms, anonymous: true }
    }

    #[test]
    fn what_would_be_one_mapping_is_told_from_what_would_be_several() {
        let ranges = |all: &[(usize, usize)]| all.iter().map(|(a, b)| (a * PAGE, b * PAGE)).collect::<Vec<_>>();
        let grows = call(10, 8, 9, FIXED, 50);
        let one = [part(5, 12, b"rw-p"), part(12, 14, b"rw-p"), part(14, 30, b"rw-p")];
        let parts = ranges(&[(10, 12), (12, 14), (14, 18)]);
        let rest = (5 * PAGE, 10 * PAGE);
        assert_eq!(of(&grows, &one, true), Some(Pieces::One { parts: parts.clone(), rest, may_replace: true }));
        assert_eq!(of(&grows, &one[..1], true), None, "the kernel moves one mapping by itself");
        assert_eq!(of(&grows, &one[..2], true), None, "some of it is not mapped");
        // With other permissions, with a gap, or not mapped from the start.
        let rights = [one[0], part(12, 14, b"r--p"), one[2]];
        let gap = [one[0], one[2]];
        let late = [part(11, 12, b"rw-p"), one[1], one[2]];
        assert_eq!([&rights[..], &gap, &late].map(|found| of(&grows, found, true)), [None, None, None]);
        let stays = Call { new_len: grows.old_len, ..grows };
        let several = moves_several().then_some(Pieces::Several(parts));
        assert_eq!(of(&stays, &rights, true), several);
        assert_eq!((of(&stays, &rights, false), of(&stays, &late, true)), (None, None));
    }

    #[test]
    fn what_the_kernel_refuses_as_such_is_left_to_it() {
        assert!(is_sane(&call(10, 8, 9, FIXED, 50)) && is_sane(&call(10, 8, 9, 0, 0)));
        let keeps = FIXED | MREMAP_DONTUNMAP as usize;
        assert!(is_sane(&call(10, 8, 8, keeps, 18)) && is_sane(&call(10, 8, 8, keeps, 2)));
        for (from, old, new, flags, to) in [
            (10, 8, 8, keeps, 17),
            (10, 8, 8, keeps, 3),
            (10, 8, 9, keeps, 50),
            (10, 0, 9, FIXED, 50),
            (10, 8, 0, FIXED, 50),
            (10, 8, 9, libc::MREMAP_FIXED as usize, 50),
            (10, 8, 9, FIXED | 64, 50),
            (10, 8, 9, FIXED, usize::MAX / PAGE),
        ] {
            assert!(!is_sane(&call(from, old, new, flags, to)), "{from} {old} {new} {flags} {to}");
        }
        assert!(!is_sane(&Call { to: 50 * PAGE + 1, ..call(10, 8, 9, FIXED, 50) }));
        assert!(!is_sane(&Call { new_len: usize::MAX, ..call(10, 8, 9, 1, 50) }));
    }
}

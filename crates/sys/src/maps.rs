//! /proc/self/maps: parses it, tells which mappings can be managed, and answers questions about single mappings.

use crate::raw::Errno;
use crate::sys;

/// `PROCMAP_QUERY` (Linux 6.11).
const PROCMAP_QUERY: u64 = (3 << 30) | (104 << 16) | ((b'f' as u64) << 8) | 17;
/// Flags of a mapping, and the flag that asks for the next mapping if there is none at the address.
const READABLE: u64 = 1;
const WRITABLE: u64 = 2;
const EXECUTABLE: u64 = 4;
const SHARED: u64 = 8;
const OR_NEXT: u64 = 16;

/// Bytes for the longest name of anonymous memory, with some to spare: `[anon:` and 80 letters.
pub const NAME_BYTES: usize = 128;

/// Asks about the mapping at an address. Words: size, query_flags, query_addr, vma_start, vma_end, vma_flags, page
/// size, offset, inode, device, sizes and addresses of name and build id.
fn query(fd: i32, address: usize, flags: u64, name: &mut [u8]) -> Result<[u64; 13], Errno> {
    let mut query = [0u64; 13];
    (query[0], query[1], query[2]) = (104, flags, address as u64);
    if !name.is_empty() {
        (query[10], query[11]) = (name.len() as u64, name.as_mut_ptr() as u64);
    }
    // SAFETY: the structure is 104 bytes, and it and the name are ours.
    unsafe { sys!(libc::SYS_ioctl, fd, PROCMAP_QUERY, query.as_mut_ptr()) }.map(|_| query)
}

/// The mapping at an address as `(start, end)`, and whether it is writable. `None` if there is none, or the kernel
/// cannot say (before 6.11). `fd` is an open maps file.
pub fn mapping_at(fd: i32, address: usize) -> Option<(usize, usize, bool)> {
    let answer = query(fd, address, 0, &mut []).ok()?;
    Some((answer[3] as usize, answer[4] as usize, answer[5] & WRITABLE != 0))
}

/// The mapping at an address, or else the next one above it; `None` if there is neither. `fd` is an open maps file.
/// `name` receives the name column, which only anonymous memory has here.
///
/// The story: the name was asked for at the address where the mapping had begun a moment before. If another thread had
/// changed the rights of a part of it in between, the answer was about memory before `address`. An `mremap` of a page
/// was then made in pieces that did not exist: it was refused (EINVAL), and what it was to replace was gone.
///
/// # Errors
/// `ENOTTY` if the kernel cannot say (before 6.11); others if it has no memory for the answer.
pub fn mapping_from(fd: i32, address: usize, name: &mut [u8; NAME_BYTES]) -> Result<Option<Mapping<'_>>, Errno> {
    let mut answer = match query(fd, address, OR_NEXT, &mut []) {
        Err(libc::ENOENT) => return Ok(None),
        answer => answer?,
    };
    // A file's name may be longer than the buffer.
    let mut letters = 0;
    if answer[8] == 0 {
        // (Not at its start: by now it may be two mappings, of which the first ends before `address`.)
        answer = query(fd, address.max(answer[3] as usize), 0, name)?;
        // The length includes the terminating zero.
        letters = (answer[10] as u32 as usize).saturating_sub(1);
    }
    let flags = answer[5];
    let letter = |flag, letter| if flags & flag != 0 { letter } else { b'-' };
    let shared = if flags & SHARED != 0 { b's' } else { b'p' };
    Ok(Some(Mapping {
        start: answer[3] as usize,
        end: answer[4] as usize,
        perms: [letter(READABLE, b'r'), letter(WRITABLE, b'w'), letter(EXECUTABLE, b'x'), shared],
        inode: answer[8],
        name: &name[..letters],
    }))
}

/// The mapping at an address as `(start, end)`, if [`mapping_at`] finds one and it is not writable.
pub fn read_only_at(fd: i32, address: usize) -> Option<(usize, usize)> {
    mapping_at(fd, address).filter(|(.., writable)| !writable).map(|(start, end, _)| (start, end))
}

/// Gives memory an advice that changes no contents (MADV_COLD) but that the kernel refuses for locked memory.
///
/// # Errors
/// `EINVAL`: some of it is locked; `ENOMEM`: some is not mapped.
pub fn advise_unlocked(at: usize, len: usize) -> Result<(), Errno> {
    // SAFETY: nothing is dropped.
    unsafe { sys!(libc::SYS_madvise, at, len, libc::MADV_COLD) }.map(drop)
}

/// Whether the mapping at an address is registered with a userfaultfd for missing pages; `None` if there is no mapping,
/// or this cannot be determined.
pub fn is_registered(address: usize) -> Option<bool> {
    let mut text = Vec::new();
    crate::raw::read_file(b"/proc/thread-self/smaps\0", &mut text).ok()?;
    registered_in(&text, address)
}

fn registered_in(smaps: &[u8], address: usize) -> Option<bool> {
    let mut found = false;
    for line in smaps.split(|c| *c == b'\n') {
        if let Some(m) = parse(line).next() {
            found = (m.start..m.end).contains(&address);
        } else if found && let Some(flags) = line.strip_prefix(b"VmFlags:") {
            return Some(flags.split(|c| *c == b' ').any(|flag| flag == b"um"));
        }
    }
    None
}

/// One mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping<'a> {
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
    /// The four permission letters, such as `rw-p`.
    pub perms: [u8; 4],
    /// Inode, 0 for anonymous memory.
    pub inode: u64,
    /// The name column, empty for plain anonymous memory.
    pub name: &'a [u8],
}

fn hex(s: &[u8]) -> Option<usize> {
    if s.is_empty() || s.len() > 16 {
        return None;
    }
    s.iter().try_fold(0usize, |v, c| Some((v << 4) | (*c as char).to_digit(16)? as usize))
}

fn parse_line(line: &[u8]) -> Option<Mapping<'_>> {
    let mut fields = line.splitn(6, |c| *c == b' ');
    let range = fields.next()?;
    let dash = range.iter().position(|c| *c == b'-')?;
    let (start, end) = (hex(&range[..dash])?, hex(&range[dash + 1..])?);
    let perms: [u8; 4] = fields.next()?.try_into().ok()?;
    let (_offset, _device) = (fields.next()?, fields.next()?);
    let inode = core::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let name = fields.next().unwrap_or(b"").trim_ascii();
    (start < end).then_some(Mapping { start, end, perms, inode, name })
}

/// Parses the text of a maps file. Lines that it does not understand are skipped.
pub fn parse(text: &[u8]) -> impl Iterator<Item = Mapping<'_>> {
    text.split(|c| *c == b'\n').filter_map(parse_line)
}

/// The smaps flag of a mapping that is zeros in forked children (MADV_WIPEONFORK).
pub const WIPED_ON_FORK: &[u8] = b"wf";
/// The smaps flag of a mapping that is registered with a userfaultfd for missing pages.
pub const REGISTERED: &[u8] = b"um";
/// The smaps flag of a mapping whose pages are locked as they are touched (MLOCK_ONFAULT).
pub const LOCKED_ON_FAULT: &[u8] = b"lf";

/// The ranges in `text` (the contents of /proc/PID/smaps) that have a flag.
pub fn flagged<'a>(text: &'a [u8], wanted: &'a [u8]) -> impl Iterator<Item = (usize, usize)> + 'a {
    let mut at = (0, 0);
    text.split(|c| *c == b'\n').filter_map(move |line| {
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            return flags.split(|c| *c == b' ').any(|flag| flag == wanted).then_some(at);
        }
        if let Some(mapping) = parse_line(line) {
            at = (mapping.start, mapping.end);
        }
        None
    })
}

impl Mapping<'_> {
    /// Whether this is private anonymous memory, not executable, and neither the kernel's nor a stack.
    pub fn is_private_anonymous(&self) -> bool {
        self.perms[2] != b'x' && self.is_anonymous()
    }

    /// Whether this is private anonymous memory, executable or not, and neither the kernel's nor a stack.
    pub fn is_anonymous(&self) -> bool {
        self.inode == 0
            && self.perms[3] == b'p'
            && (self.name.is_empty() || self.name == b"[heap]" || self.name.starts_with(b"[anon"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_only_is_known() {
        let fd = crate::raw::open(b"/proc/thread-self/maps\0", libc::O_RDONLY).expect("maps");
        // SAFETY: a mapping of the test's own.
        let at = unsafe {
            let at = libc::mmap(
                core::ptr::null_mut(),
                4 * 4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_eq!(libc::mprotect(at.add(4096), 2 * 4096, libc::PROT_READ), 0);
            at as usize
        };
        let known = read_only_at(fd, at + 2 * 4096);
        // SAFETY: there is no structure at zero; a kernel that knows the question returns EFAULT.
        if unsafe { sys!(libc::SYS_ioctl, fd, PROCMAP_QUERY, 0) } == Err(libc::ENOTTY) {
            crate::skip("this kernel cannot be asked (before 6.11)");
            assert_eq!(known, None);
        } else {
            assert_eq!(known, Some((at + 4096, at + 3 * 4096)));
            assert_eq!(mapping_at(fd, at + 4096), Some((at + 4096, at + 3 * 4096, false)));
            assert_eq!(mapping_at(fd, at).map(|(_, end, writable)| (end, writable)), Some((at + 4096, true)));
        }
        assert_eq!((read_only_at(fd, at), read_only_at(fd, at + 3 * 4096), read_only_at(-1, at)), (None, None, None));
    }

    /// What the kernel answers is what the maps file says.
    #[test]
    fn mappings_asked_for_are_those_of_the_text() {
        let fd = crate::raw::open(b"/proc/thread-self/maps\0", libc::O_RDONLY).expect("maps");
        let mut name = [0; NAME_BYTES];
        if mapping_from(fd, 0, &mut name) == Err(libc::ENOTTY) {
            return crate::skip("this kernel cannot be asked (before 6.11)");
        }
        // SAFETY: a mapping of the test's own, which is given a name.
        let at = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let at = libc::mmap(core::ptr::null_mut(), 3 * 4096, libc::PROT_READ, flags, -1, 0) as usize;
            let _ = libc::prctl(libc::PR_SET_VMA, libc::PR_SET_VMA_ANON_NAME, at + 4096, 4096, c"a name".as_ptr());
            at
        };
        // Other tests map and unmap meanwhile, so compare only mappings that are there before and after.
        let read = || {
            let mut text = Vec::new();
            crate::raw::read_file(b"/proc/thread-self/maps\0", &mut text).expect("maps");
            text
        };
        let before = read();
        let mut asked = Vec::new();
        let mut from = 0;
        while let Some(m) = mapping_from(fd, from, &mut name).expect("it can be asked") {
            asked.push((m.start, m.end, m.perms, m.inode, m.is_anonymous().then(|| m.name.to_vec())));
            from = m.end;
        }
        let after = read();
        let after: Vec<_> = parse(&after).collect();
        let mut anonymous = 0;
        for m in parse(&before).filter(|m| after.contains(m) && m.name != b"[vsyscall]") {
            let same = (m.start, m.end, m.perms, m.inode, m.is_anonymous().then(|| m.name.to_vec()));
            assert!(asked.contains(&same), "{m:x?}");
            anonymous += usize::from(m.is_anonymous());
        }
        assert!(anonymous > 0 && asked.iter().any(|m| (m.0..m.1).contains(&(at + 4096))));
        assert_eq!(mapping_from(fd, 1 << 47, &mut name), Ok(None));
        assert!(mapping_from(-1, 0, &mut name).is_err());
    }

    /// See [`mapping_from`].
    #[test]
    fn who_asks_beside_changes_of_rights_is_told_of_nothing_before_the_address() {
        const CHANGES: usize = 50_000;
        let fd = crate::raw::open(b"/proc/thread-self/maps\0", libc::O_RDONLY).expect("maps");
        let mut name = [0; NAME_BYTES];
        if mapping_from(fd, 0, &mut name) == Err(libc::ENOTTY) {
            return crate::skip("this kernel cannot be asked (before 6.11)");
        }
        let (rw, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a mapping of the test's own.
        let at = unsafe { libc::mmap(core::ptr::null_mut(), 4 * 4096, rw, flags, -1, 0) } as usize;
        let (page, mut asked) = (at + 2 * 4096, 0);
        std::thread::scope(|threads| {
            let changes = threads.spawn(|| {
                for i in 0..CHANGES {
                    let rights = if i % 2 == 0 { libc::PROT_READ } else { rw };
                    // SAFETY: rights of the test's own memory, which nobody uses.
                    unsafe { libc::mprotect((at + 4096) as *mut _, 4096, rights) };
                }
            });
            while !changes.is_finished() {
                let m = mapping_from(fd, page, &mut name).expect("it can be asked").expect("it is mapped");
                assert!((m.start..m.end).contains(&page), "{:x}-{:x} after {asked} answers", m.start, m.end);
                asked += 1;
            }
        });
    }

    #[test]
    fn flags_are_those_of_the_mapping_asked_for() {
        let smaps = b"1000-3000 rw-p 00000000 00:00 0 \nSize:     8 kB\nVmFlags: rd wr mr um ac \n\
            3000-4000 rw-p 00000000 00:00 0 [heap]\nSize:     4 kB\nVmFlags: rd wr mr ac \n";
        let asked = [0x2fff, 0x3000, 0x4000].map(|at| registered_in(smaps, at));
        assert_eq!(asked, [Some(true), Some(false), None]);
        let here = 0u8;
        assert_eq!(is_registered((&raw const here) as usize), Some(false));
    }

    #[test]
    fn lines_parse() {
        let text = b"55d0-66e0 rw-p 00000000 00:00 0                          [heap]\n\
            7f00-7f10 r-xp 00001000 fe:00 123 /lib/a b.so\nnonsense\n8000-7000 rw-p 0 00:00 0 \n9000-a000 rw-p 0 00:00 0 \n";
        let all: Vec<_> = parse(text).collect();
        assert_eq!(all.len(), 3);
        assert!(all[0].is_private_anonymous() && all[0].name == b"[heap]" && all[0].end == 0x66e0);
        assert!(!all[1].is_private_anonymous() && all[1].name == b"/lib/a b.so");
        assert!(all[2].is_private_anonymous());
    }

    #[test]
    fn mappings_that_have_a_flag_are_found() {
        let text = b"1000-3000 rw-p 00000000 00:00 0 \nSize: 8 kB\nVmFlags: rd wr mr mw me wf ac \n\
                     3000-4000 rw-p 00000000 00:00 0 [heap]\nRss: 4 kB\nVmFlags: rd wr mr mw me lo lf ac \n";
        assert_eq!(flagged(text, WIPED_ON_FORK).collect::<Vec<_>>(), [(0x1000, 0x3000)]);
        assert_eq!(flagged(text, LOCKED_ON_FAULT).collect::<Vec<_>>(), [(0x3000, 0x4000)]);
    }
}

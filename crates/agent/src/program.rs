//! What is about to be executed. A static program, into which nothing can be preloaded, runs all the same; the group says so once. One
//! whose loader is musl's does so without this library.
//!
//! This may run in a vfork child, or on a small stack: it allocates nothing, reads little at a time, and touches no state but the group's
//! flag.

use crate::pager;
use core::ffi::{CStr, c_char, c_int};
use uzswap_pager::group::unmanaged;
use uzswap_sys::{raw, sys};

/// Bytes of the header of a 64-bit ELF file, and of an entry of its table of segments.
const HEADER: usize = 64;
const ENTRY: usize = 56;
/// The kind of the entry that says which loader a program wants.
const PT_INTERP: [u8; 4] = [3, 0, 0, 0];
/// Entries that are looked at.
const ENTRIES: usize = 64;

/// Of what kind a program is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It has no loader.
    Static,
    /// Its loader is musl's.
    Musl,
    /// It has another one, or is something else than a 64-bit ELF program, or cannot be read.
    Other,
}

/// Of what kind the file `path` of the directory `dir` is, or the file `dir` itself where the path is empty. `path` is as exec was given it,
/// perhaps no string at all: only the kernel reads it.
pub fn kind(dir: c_int, path: *const c_char) -> Kind {
    // (The kernel executes regular files only. A pipe is not waited for.)
    let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
    // SAFETY: the kernel says EFAULT of what it cannot read.
    let fd = match unsafe { sys!(libc::SYS_openat, dir, path, flags, 0) } {
        Ok(fd) => fd as i32,
        Err(libc::ENOENT) if dir >= 0 => match open_again(dir, flags) {
            Some(fd) => fd,
            None => return Kind::Other,
        },
        Err(_) => return Kind::Other,
    };
    let kind = kind_of(fd);
    raw::close(fd);
    kind
}

/// Opens what a descriptor has open, which may not be one to be read.
fn open_again(fd: c_int, flags: c_int) -> Option<i32> {
    let (mut path, mut number) = ([0; raw::PATH], [0; 20]);
    raw::open(raw::path_of(&[b"/proc/self/fd/", raw::decimal(fd as u64, &mut number), b"\0"], &mut path)?, flags).ok()
}

fn kind_of(fd: i32) -> Kind {
    let read = |to: &mut [u8], at: usize| raw::pread(fd, to, at as u64).unwrap_or(0);
    let word = |bytes: &[u8], at: usize| usize::from_le_bytes(core::array::from_fn(|i| bytes[at + i]));
    let mut head = [0u8; HEADER];
    if read(&mut head, 0) < HEADER || head[..5] != *b"\x7fELF\x02" {
        return Kind::Other;
    }
    let (table, count) = (word(&head, 32), usize::from(u16::from_le_bytes([head[56], head[57]])));
    let mut entry = [0u8; ENTRY];
    for n in 0..count.min(ENTRIES) {
        if read(&mut entry, table.saturating_add(n * ENTRY)) < ENTRY {
            return Kind::Other;
        }
        if entry[..4] == PT_INTERP {
            let mut loader = [0u8; 128];
            let len = word(&entry, 32).min(loader.len());
            read(&mut loader[..len], word(&entry, 8));
            return if loader.windows(8).any(|name| name == b"/ld-musl") { Kind::Musl } else { Kind::Other };
        }
    }
    // (Where not all were looked at: no warning is better than a wrong one.)
    if (1..=ENTRIES).contains(&count) { Kind::Static } else { Kind::Other }
}

/// Says, once in a group, of a static program whose path the kernel has read that it runs without a limit.
pub fn warn_of_static(path: *const c_char) {
    let Some(p) = pager() else { return };
    if !p.group.warns_first(unmanaged::STATIC) {
        return;
    }
    // SAFETY: a string, as the kernel has opened the file of that name.
    let name = unsafe { CStr::from_ptr(path) }.to_bytes();
    let name = if name.is_empty() { b"a program".as_slice() } else { name };
    for part in [b"uzswap: ".as_slice(), name, b" is statically linked, so it runs without a limit\n"] {
        // SAFETY: the part is readable.
        let _ = unsafe { sys!(libc::SYS_write, 2, part.as_ptr(), part.len()) };
    }
}

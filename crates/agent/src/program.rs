//! Examines a program that is about to be executed. A program into which nothing can be preloaded (a static one, one
//! with other privileges than its caller's, a 32-bit one) runs all the same; the group says so once. One whose loader
//! is musl's runs without this library.
//!
//! The code may run in a vfork child, or on a small stack: it allocates nothing, reads little at a time, and touches no
//! state except the group's flag.

use crate::pager;
use core::ffi::{CStr, c_char, c_int};
use uzswap_pager::group::unmanaged;
use uzswap_pager::says;
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::rights::{is_privileged, is_privileged_at};
use uzswap_sys::{loader, sys};

/// Bytes of the header of a 64-bit ELF file, and of an entry in its table of segments.
const HEADER: usize = 64;
const ENTRY: usize = 56;
/// The type of the entry that names the program's loader.
const PT_INTERP: [u8; 4] = [3, 0, 0, 0];
/// Entries that are examined.
const ENTRIES: usize = 64;
/// Bytes of a script's first line that the kernel reads.
const LINE: usize = 256;
/// How many scripts are followed, each the interpreter of the one before, as in the kernel.
const SCRIPTS: usize = 5;

/// The kind of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It has no loader, and is none.
    Static,
    /// Its loader is musl's, or it is that loader.
    Musl,
    /// It runs with other privileges than its caller's, so its loader preloads nothing.
    Privileged,
    /// It is a 32-bit program.
    Short,
    /// It has another loader, or is no ELF program, or cannot be read.
    Other,
}

/// The kind of file `path` in directory `dir`, or of file `dir` itself if the path is empty. For a script it is the
/// kind of its interpreter. `path` is as exec received it and may not be a string at all, so only the kernel reads it.
///
/// The story: nothing was known of a script's interpreter. One linked with musl got an `LD_PRELOAD` that its loader
/// cannot load.
pub fn kind(dir: c_int, path: *const c_char) -> Kind {
    let mut opened = open(dir, path);
    if opened == Err(libc::ENOENT) && dir >= 0 {
        opened = open_again(dir);
    }
    let mut line = [0; LINE];
    for _ in 0..SCRIPTS {
        let fd = match opened {
            Ok(fd) => fd,
            // A caller that may only execute it can tell its privileges from the file's mode, and that is all there is
            // to know.
            Err(libc::EACCES) => return if is_privileged_at(dir, path) { Kind::Privileged } else { Kind::Other },
            Err(_) => return Kind::Other,
        };
        let kind = kind_of(fd, &mut line);
        raw::close(fd);
        match kind {
            Some(kind) => return kind,
            None => opened = open(libc::AT_FDCWD, line.as_ptr().cast()).map_err(|_| libc::ENOENT),
        }
    }
    Kind::Other
}

/// Opens a file to examine it. (The kernel executes only regular files; O_NONBLOCK does not wait for a pipe.)
fn open(dir: c_int, path: *const c_char) -> Result<i32, Errno> {
    let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
    // SAFETY: the kernel returns EFAULT for a path that it cannot read.
    unsafe { sys!(libc::SYS_openat, dir, path, flags, 0) }.map(|fd| fd as i32)
}

/// Opens again the file behind a descriptor, which may not be open for reading.
fn open_again(fd: c_int) -> Result<i32, Errno> {
    let (mut path, mut number) = ([0; raw::PATH], [0; 20]);
    let path = raw::path_of(&[b"/proc/self/fd/", raw::decimal(fd as u64, &mut number), b"\0"], &mut path);
    path.map_or(Err(libc::ENOENT), |path| open(libc::AT_FDCWD, path.as_ptr().cast()))
}

/// The kind of an open file; `None` for a script, with its interpreter's name at the start of `line`.
fn kind_of(fd: i32, line: &mut [u8; LINE]) -> Option<Kind> {
    let read = |to: &mut [u8], at: usize| raw::pread(fd, to, at as u64).unwrap_or(0);
    let word = |bytes: &[u8], at: usize| usize::from_le_bytes(core::array::from_fn(|i| bytes[at + i]));
    line.fill(0);
    let got = read(line, 0);
    if line.starts_with(b"#!") {
        return if keep_interpreter(line) { None } else { Some(Kind::Other) };
    }
    if got < HEADER || line[..4] != *b"\x7fELF" {
        return Some(Kind::Other);
    }
    let (table, count) = (word(line, 32), usize::from(u16::from_le_bytes([line[56], line[57]])));
    let of_loader = match line[4] {
        2 => kind_by_loader(&read, table, count),
        1 => Kind::Short,
        _ => Kind::Other,
    };
    let kind = if of_loader == Kind::Static { kind_of_loader(fd).unwrap_or(of_loader) } else { of_loader };
    Some(if kind == Kind::Other && is_privileged(fd) { Kind::Privileged } else { kind })
}

/// The kind of a file without a loader, if it is a loader itself, executed by name with a program to load (`ldd`,
/// wrappers of programs that bring their own libc). Its file name tells.
///
/// The story: glibc's loader was taken for a static program, so a program was said to run without a limit though it had
/// one; and the program that musl's loader was to load got an `LD_PRELOAD`.
fn kind_of_loader(fd: i32) -> Option<Kind> {
    let (mut path, mut number, mut name) = ([0; raw::PATH], [0; 20], [0; LINE]);
    let path = raw::path_of(&[b"/proc/thread-self/fd/", raw::decimal(fd as u64, &mut number), b"\0"], &mut path)?;
    let path = raw::readlink(path, &mut name).ok()?;
    let is_glibcs = loader::name(path)?.starts_with(b"ld-linux-");
    Some(if is_glibcs { Kind::Other } else { Kind::Musl })
}

/// The kind of a 64-bit ELF program, from its table of `count` segments at `table`.
fn kind_by_loader(read: &impl Fn(&mut [u8], usize) -> usize, table: usize, count: usize) -> Kind {
    let word = |bytes: &[u8], at: usize| usize::from_le_bytes(core::array::from_fn(|i| bytes[at + i]));
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
    // If not all entries were examined, no warning is better than a wrong one.
    if (1..=ENTRIES).contains(&count) { Kind::Static } else { Kind::Other }
}

/// Turns a script's first line into the name of its interpreter, with its NUL. False if it names none.
fn keep_interpreter(line: &mut [u8; LINE]) -> bool {
    let ends = |c: &u8| b" \t\n\0".contains(c);
    let Some(start) = line[2..].iter().position(|c| !b" \t".contains(c)).map(|at| at + 2) else { return false };
    let Some(len) = line[start..].iter().position(ends) else { return false };
    line.copy_within(start..start + len, 0);
    line[len] = 0;
    len > 0
}

/// Warns, once in a group for each of these kinds, that a program runs without a limit. The kernel must have read its
/// path.
pub fn warn(kind: Kind, path: *const c_char) {
    let (reason, why): (u32, &[u8]) = match kind {
        Kind::Static => (unmanaged::STATIC, b" is statically linked"),
        Kind::Privileged => {
            (unmanaged::PRIVILEGED, b" runs with other rights than its caller (setuid, setgid or file capabilities)")
        }
        Kind::Short => (unmanaged::SHORT, b" is a 32-bit program, and uzswap's library is a 64-bit one"),
        Kind::Musl | Kind::Other => return,
    };
    let Some(p) = pager() else { return };
    if says::is_closed() || !p.group.warns_first(reason) {
        return;
    }
    // SAFETY: a string, as the kernel has opened the file of that name.
    let name = unsafe { CStr::from_ptr(path) }.to_bytes();
    let name = if name.is_empty() { b"a program".as_slice() } else { name };
    for part in [b"uzswap: ".as_slice(), name, why, b", so it runs without a limit\n"] {
        // SAFETY: the part is readable.
        let _ = unsafe { sys!(libc::SYS_write, 2, part.as_ptr(), part.len()) };
    }
}

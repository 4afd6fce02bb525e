//! Programs that are about to be executed and cannot be managed: static ones, into which nothing can be preloaded.
//! They run all the same; the group says so once.
//!
//! The wrappers may run in a vfork child: they allocate nothing and touch no state but the group's flag.

use crate::next::Next;
use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::Ordering::*;
use uzswap_pager::group::unmanaged;
use uzswap_sys::{raw, sys};

static EXECVE: Next = Next::new(c"execve");
static EXECV: Next = Next::new(c"execv");
static EXECVP: Next = Next::new(c"execvp");
static POSIX_SPAWN: Next = Next::new(c"posix_spawn");
static POSIX_SPAWNP: Next = Next::new(c"posix_spawnp");

/// Finds the wrapped functions, in the constructor: a vfork child should not have to.
pub fn init() {
    for f in [&EXECVE, &EXECV, &EXECVP, &POSIX_SPAWN, &POSIX_SPAWNP] {
        f.find();
    }
}

fn header(path: &[u8]) -> Option<[u8; 4096]> {
    // (The kernel executes regular files only. A pipe is not waited for.)
    let fd = raw::open(path, libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY).ok()?;
    let mut head = [0u8; 4096];
    let got = raw::pread(fd, &mut head, 0);
    raw::close(fd);
    got.ok().filter(|n| *n >= 64).map(|_| head)
}

/// Whether the file is a 64-bit ELF program without an interpreter (PT_INTERP = 3).
fn is_static(head: &[u8; 4096]) -> bool {
    if head[..5] != *b"\x7fELF\x02" {
        return false;
    }
    let half = |at: usize| usize::from(u16::from_le_bytes([head[at], head[at + 1]]));
    let (table, size, count) = (u64::from_le_bytes(core::array::from_fn(|i| head[32 + i])), half(54), half(56));
    let Ok(table) = usize::try_from(table) else { return false };
    // A table beyond the first page is not looked at: no warning is better than a wrong one.
    let entries = (0..count).map(|i| table.saturating_add(i * size));
    let mut all_seen = true;
    let has_interp = entries.into_iter().any(|at| {
        let Some(kind) = head.get(at..at.saturating_add(4)) else {
            all_seen = false;
            return false;
        };
        kind == [3, 0, 0, 0]
    });
    all_seen && count > 0 && !has_interp
}

fn warn_if_static(path: *const c_char, search: bool) {
    let Some(p) = crate::pager() else { return };
    if path.is_null() || p.group.warned_unmanaged.load(Relaxed) & unmanaged::STATIC != 0 {
        return;
    }
    // (A bad address is an error of the call's, which is to say so.)
    // SAFETY: the kernel checks the address.
    if unsafe { sys!(libc::SYS_access, path, libc::F_OK) } == Err(libc::EFAULT) {
        return;
    }
    // SAFETY: the caller of exec passes a string.
    let name = unsafe { CStr::from_ptr(path) }.to_bytes_with_nul();
    let head = if !search || name.contains(&b'/') { header(name) } else { in_path(name) };
    if head.is_some_and(|h| is_static(&h)) && p.group.warns_first(unmanaged::STATIC) {
        for part in
            [b"uzswap: ".as_slice(), &name[..name.len() - 1], b" is statically linked, so it runs without a limit\n"]
        {
            // SAFETY: the part is readable.
            let _ = unsafe { sys!(libc::SYS_write, 2, part.as_ptr(), part.len()) };
        }
    }
}

fn in_path(name: &[u8]) -> Option<[u8; 4096]> {
    // SAFETY: getenv of a constant; exec itself reads it now too.
    let dirs = unsafe { libc::getenv(c"PATH".as_ptr()) };
    if dirs.is_null() {
        return None;
    }
    // SAFETY: an environment string.
    let dirs = unsafe { CStr::from_ptr(dirs) }.to_bytes();
    dirs.split(|c| *c == b':').find_map(|dir| {
        let mut full = [0u8; 1024];
        let len = dir.len() + 1 + name.len();
        if len > full.len() {
            return None;
        }
        full[..dir.len()].copy_from_slice(dir);
        full[dir.len()] = b'/';
        full[dir.len() + 1..len].copy_from_slice(name);
        header(&full[..len])
    })
}

type Argv = *const *const c_char;

/// execve(2), after the warning.
// SAFETY: libc's name on purpose, with its signature: programs are to call this instead.
#[unsafe(no_mangle)]
pub extern "C" fn execve(path: *const c_char, argv: Argv, envp: Argv) -> c_int {
    warn_if_static(path, false);
    // SAFETY: the real function, with the caller's arguments.
    unsafe {
        core::mem::transmute::<usize, extern "C" fn(*const c_char, Argv, Argv) -> c_int>(EXECVE.find())(
            path, argv, envp,
        )
    }
}

/// execv(3), after the warning.
// SAFETY: libc's name on purpose, with its signature: programs are to call this instead.
#[unsafe(no_mangle)]
pub extern "C" fn execv(path: *const c_char, argv: Argv) -> c_int {
    warn_if_static(path, false);
    // SAFETY: as above.
    unsafe { core::mem::transmute::<usize, extern "C" fn(*const c_char, Argv) -> c_int>(EXECV.find())(path, argv) }
}

/// execvp(3), after the warning.
// SAFETY: libc's name on purpose, with its signature: programs are to call this instead.
#[unsafe(no_mangle)]
pub extern "C" fn execvp(file: *const c_char, argv: Argv) -> c_int {
    warn_if_static(file, true);
    // SAFETY: as above.
    unsafe { core::mem::transmute::<usize, extern "C" fn(*const c_char, Argv) -> c_int>(EXECVP.find())(file, argv) }
}

type Spawn = extern "C" fn(*mut libc::pid_t, *const c_char, *const c_void, *const c_void, Argv, Argv) -> c_int;

/// posix_spawn(3), after the warning.
// SAFETY: libc's name on purpose, with its signature: programs are to call this instead.
#[unsafe(no_mangle)]
pub extern "C" fn posix_spawn(
    pid: *mut libc::pid_t,
    path: *const c_char,
    actions: *const c_void,
    attr: *const c_void,
    argv: Argv,
    envp: Argv,
) -> c_int {
    warn_if_static(path, false);
    // SAFETY: as above.
    unsafe { core::mem::transmute::<usize, Spawn>(POSIX_SPAWN.find())(pid, path, actions, attr, argv, envp) }
}

/// posix_spawnp(3), after the warning.
// SAFETY: libc's name on purpose, with its signature: programs are to call this instead.
#[unsafe(no_mangle)]
pub extern "C" fn posix_spawnp(
    pid: *mut libc::pid_t,
    file: *const c_char,
    actions: *const c_void,
    attr: *const c_void,
    argv: Argv,
    envp: Argv,
) -> c_int {
    warn_if_static(file, true);
    // SAFETY: as above.
    unsafe { core::mem::transmute::<usize, Spawn>(POSIX_SPAWNP.find())(pid, file, actions, attr, argv, envp) }
}

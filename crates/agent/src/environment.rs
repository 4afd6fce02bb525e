//! The environment that programs are started with: what they need to be under the limit is there whatever the program that
//! starts them makes of it.
//!
//! The limit is for a program and its children together. A child that is given an environment of its own (`env -i`, a server
//! that cleans up, a script that preloads another allocator and forgets what was there) would otherwise run without a limit,
//! unsaid. libc makes all its `exec…` and `posix_spawn` calls by one `execve`, whose system call is wrapped (`patch`).
//!
//! A program that is linked with musl gets one without this library instead, which its loader would fail to load and the program with it.
//!
//! The hook may run in a vfork child, whose memory is its parent's: it allocates nothing, and what it makes is on the stack.

use crate::pager;
use core::ffi::{CStr, c_char, c_void};
use core::sync::atomic::{AtomicPtr, Ordering::*};
use uzswap_pager::group::{ENV_GROUP, ENV_NODE, unmanaged};
use uzswap_pager::swap::clusters::ENV_SWAP;
use uzswap_sys::{raw, sys};

/// Variables of an environment that can be completed, and bytes of an `LD_PRELOAD`.
const VARIABLES: usize = 1020;
const PRELOAD_BYTES: usize = 4096;
const PRELOAD: &[u8] = b"LD_PRELOAD=";

/// Where another environment is made.
#[repr(C)]
pub struct Room {
    variables: [*const c_char; VARIABLES + 4],
    preload: [u8; PRELOAD_BYTES],
}

/// The variables that name the group, its node, and the swap file: `NAME=value` each, null where there is none.
static OWN: [AtomicPtr<c_char>; 3] = [const { AtomicPtr::new(core::ptr::null_mut()) }; 3];
/// The path of this library.
static LIBRARY: AtomicPtr<c_char> = AtomicPtr::new(core::ptr::null_mut());

/// Notes what children need, in the constructor (programs write over their environment's memory later).
pub fn init() {
    for (own, name) in OWN.iter().zip([ENV_GROUP, ENV_NODE, ENV_SWAP]) {
        let mut text = Vec::from(name);
        text.push(0);
        // SAFETY: a string with its end; getenv in a constructor, before other threads.
        let value = unsafe { libc::getenv(text.as_ptr().cast()) };
        if !value.is_null() {
            text[name.len()] = b'=';
            // SAFETY: the environment's string.
            own.store(kept(text, unsafe { CStr::from_ptr(value) }), Release);
        }
    }
    // SAFETY: zeros are such a structure; the call fills it.
    let mut found: libc::Dl_info = unsafe { core::mem::zeroed() };
    let inside: extern "C" fn(*const *const c_char, *mut Room, *const c_char) -> *const *const c_char = completed;
    // SAFETY: an address of this library.
    if unsafe { libc::dladdr(inside as *const c_void, &raw mut found) } != 0 && !found.dli_fname.is_null() {
        // SAFETY: the loader's string.
        LIBRARY.store(kept(Vec::new(), unsafe { CStr::from_ptr(found.dli_fname) }), Release);
    }
}

/// A string that stays.
fn kept(mut text: Vec<u8>, end: &CStr) -> *mut c_char {
    text.extend_from_slice(end.to_bytes_with_nul());
    text.leak().as_mut_ptr().cast()
}

/// What one of these strings says, without its end.
fn text<'a>(at: &AtomicPtr<c_char>) -> Option<&'a [u8]> {
    let at = at.load(Acquire);
    // SAFETY: null, or a string that stays.
    (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) }.to_bytes())
}

/// The environment to start the program in the file `path` with that was given `given`: that one, or one in `room`.
pub extern "C" fn completed(given: *const *const c_char, room: *mut Room, path: *const c_char) -> *const *const c_char {
    let (Some(group), Some(library)) = (text(&OWN[0]), text(&LIBRARY)) else { return given };
    if is_musl(path) {
        say_lost(b"uzswap: a program was started that is linked with musl, and uzswap's library with glibc, so it runs without a limit\n");
        // SAFETY: the thunk's room on the stack.
        return unsafe { without(given, room, library) };
    }
    let name_bytes = ENV_GROUP.len() + 1;
    let (mut count, mut has_group, mut preload) = (0, false, None);
    // SAFETY: the caller of exec passes strings, and a null pointer behind them (or none at all).
    while let Some(variable) = unsafe { nth(given, count) } {
        has_group |= variable.starts_with(&group[..name_bytes]);
        if let Some(value) = variable.strip_prefix(PRELOAD) {
            // (The loader goes by the last.)
            preload = Some((count, value));
        }
        count += 1;
    }
    let others = preload.map_or(&[][..], |(_, value)| value);
    let has_library = others.split(|c| b": ".contains(c)).any(|path| path == library);
    if has_group && has_library {
        return given;
    }
    let bytes = PRELOAD.len() + library.len() + 1 + others.len() + 1;
    // (Where this library is not to be found the loader would complain, and load nothing.)
    if count > VARIABLES || bytes > PRELOAD_BYTES || !can_be_loaded() {
        say_lost(b"uzswap: a program was started that cannot load uzswap's library (it has another root directory, or an environment without room), so it runs without a limit\n");
        return given;
    }
    // SAFETY: the thunk's room on the stack, which nobody else uses; all that is written to it fits, as was asked above.
    unsafe {
        let variables = (&raw mut (*room).variables).cast::<*const c_char>();
        if count > 0 {
            variables.copy_from_nonoverlapping(given, count);
        }
        if !has_group {
            for own in OWN.iter().map(|own| own.load(Acquire)).filter(|own| !own.is_null()) {
                variables.add(count).write(own);
                count += 1;
            }
        }
        if !has_library {
            let line = (&raw mut (*room).preload).cast::<u8>();
            let mut end = 0;
            let separator: &[u8] = if others.is_empty() { b"" } else { b":" };
            for part in [PRELOAD, library, separator, others, b"\0"] {
                line.add(end).copy_from_nonoverlapping(part.as_ptr(), part.len());
                end += part.len();
            }
            let at = preload.map_or(count, |(at, _)| at);
            variables.add(at).write(line.cast());
            count = count.max(at + 1);
        }
        variables.add(count).write(core::ptr::null());
        variables
    }
}

/// The variable `n` of an environment.
///
/// # Safety
/// There are at least `n`, all of them strings.
unsafe fn nth<'a>(given: *const *const c_char, n: usize) -> Option<&'a [u8]> {
    if given.is_null() {
        return None;
    }
    // SAFETY: as the caller says.
    unsafe {
        let variable = *given.add(n);
        (!variable.is_null()).then(|| CStr::from_ptr(variable).to_bytes())
    }
}

fn can_be_loaded() -> bool {
    let path = LIBRARY.load(Acquire);
    // SAFETY: a string that stays.
    unsafe { sys!(libc::SYS_access, path, libc::R_OK) }.is_ok()
}

fn say_lost(why: &[u8]) {
    let Some(p) = pager() else { return };
    if p.group.warns_first(unmanaged::STARTED) {
        p.say(why);
    }
}

/// Whether a program's loader is musl's (PT_INTERP = 3, in a 64-bit ELF file). `path` is as exec was given it, perhaps no string at
/// all: only the kernel reads it.
fn is_musl(path: *const c_char) -> bool {
    const ENTRY: usize = 56;
    let mut head = [0u8; 1024];
    let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
    // SAFETY: the kernel says EFAULT of what it cannot read.
    let Ok(fd) = (unsafe { sys!(libc::SYS_openat, libc::AT_FDCWD, path, flags, 0) }) else { return false };
    let fd = fd as i32;
    let read = |to: &mut [u8], at: usize| raw::pread(fd, to, at as u64).unwrap_or(0);
    let got = read(&mut head, 0);
    let number = |at: usize| usize::from_le_bytes(core::array::from_fn(|i| head[at + i]));
    let mut loader = [0u8; 128];
    if got >= 64 && head[..5] == *b"\x7fELF\x02" {
        let (table, count) = (number(32), usize::from(u16::from_le_bytes([head[56], head[57]])));
        let mut entries = (0..count).map(|n| table.saturating_add(n * ENTRY)).take_while(|at| at + ENTRY <= got);
        if let Some(entry) = entries.find(|at| head[*at..*at + 4] == [3, 0, 0, 0]) {
            let len = number(entry + 32).min(loader.len());
            read(&mut loader[..len], number(entry + 8));
        }
    }
    raw::close(fd);
    loader.windows(8).any(|name| name == b"/ld-musl")
}

/// The environment without this library.
///
/// # Safety
/// `given` is an environment; nobody else uses `room`.
unsafe fn without(given: *const *const c_char, room: *mut Room, library: &[u8]) -> *const *const c_char {
    let (mut count, mut from) = (0, 0);
    // SAFETY: as the caller says; all that is written fits, as is asked before.
    unsafe {
        let variables = (&raw mut (*room).variables).cast::<*const c_char>();
        while let Some(variable) = nth(given, from) {
            if count == VARIABLES {
                return given;
            }
            variables.add(count).write(*given.add(from));
            from += 1;
            let Some(value) = variable.strip_prefix(PRELOAD) else {
                count += 1;
                continue;
            };
            if variable.len() + 1 > PRELOAD_BYTES {
                return given;
            }
            let line = (&raw mut (*room).preload).cast::<u8>();
            let mut end = 0;
            let mut add = |part: &[u8]| {
                line.add(end).copy_from_nonoverlapping(part.as_ptr(), part.len());
                end += part.len();
            };
            let mut separator = PRELOAD;
            for path in value.split(|c| b": ".contains(c)).filter(|path| !path.is_empty() && *path != library) {
                add(separator);
                add(path);
                separator = b":";
            }
            if separator != PRELOAD {
                add(b"\0");
                variables.add(count).write(line.cast());
                count += 1;
            }
        }
        variables.add(count).write(core::ptr::null());
        variables
    }
}

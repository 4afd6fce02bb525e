//! The environment of programs that the program executes: whatever the program makes of it, it has what they need to be
//! under the limit.
//!
//! The limit is for a program and its children together. A child that gets an environment of its own (`env -i`, a
//! server that cleans up, a script that preloads another allocator and drops what was there) would otherwise run
//! without a limit, and without a message. libc makes all its `exec…` and `posix_spawn` calls by one `execve`, whose
//! system call is wrapped (`patch`). `fexecve` and `execveat` make another one, and are interposed.
//!
//! A program linked with musl gets an environment without this library instead, as its loader would fail to load the
//! library and so the program.
//!
//! The hook may run in a vfork child, which shares its parent's memory and whose mappings stay when another program
//! runs. So it allocates nothing. It builds the environment on the stack, of which it takes no more than it needs.

use crate::next::Next;
use crate::pager;
use crate::program::{self, Kind};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering::*};
use uzswap_pager::group::{ENV_GROUP, ENV_NODE, unmanaged};
use uzswap_pager::swap::clusters::ENV_SWAP;
use uzswap_sys::sys;

/// An environment, or arguments.
type Strings = *const *const c_char;

/// Most variables of an environment that can be completed, and most bytes of an `LD_PRELOAD`.
const VARIABLES: usize = 1020;
const PRELOAD_BYTES: usize = 4096;
const PRELOAD: &[u8] = b"LD_PRELOAD=";

static FEXECVE: Next = Next::new(c"fexecve");
static EXECVEAT: Next = Next::new(c"execveat");

/// The variables that name the group, its node, and the swap file: each `NAME=value`, or null if there is none.
static OWN: [AtomicPtr<c_char>; 3] = [const { AtomicPtr::new(core::ptr::null_mut()) }; 3];
/// The path of this library.
static LIBRARY: AtomicPtr<c_char> = AtomicPtr::new(core::ptr::null_mut());

/// Records what children need. Called in the constructor, as programs later write over their environment's memory.
pub fn init() {
    FEXECVE.find();
    EXECVEAT.find();
    for (own, name) in OWN.iter().zip([ENV_GROUP, ENV_NODE, ENV_SWAP]) {
        let mut text = Vec::from(name);
        text.push(0);
        // SAFETY: the string ends with NUL; getenv in a constructor, before other threads.
        let value = unsafe { libc::getenv(text.as_ptr().cast()) };
        if !value.is_null() {
            text[name.len()] = b'=';
            // SAFETY: the environment's string.
            own.store(kept(text, unsafe { CStr::from_ptr(value) }), Release);
        }
    }
    // SAFETY: zeros are a valid Dl_info; the call fills it.
    let mut found: libc::Dl_info = unsafe { core::mem::zeroed() };
    let inside: extern "C" fn(Strings, *mut Strings, usize) -> Strings = completed;
    // SAFETY: an address of this library.
    if unsafe { libc::dladdr(inside as *const c_void, &raw mut found) } != 0 && !found.dli_fname.is_null() {
        // SAFETY: the loader's string.
        LIBRARY.store(kept(Vec::new(), unsafe { CStr::from_ptr(found.dli_fname) }), Release);
    }
}

/// A string that is never freed.
fn kept(mut text: Vec<u8>, end: &CStr) -> *mut c_char {
    text.extend_from_slice(end.to_bytes_with_nul());
    text.leak().as_mut_ptr().cast()
}

/// The text of one of these strings, without its NUL.
fn text<'a>(at: &AtomicPtr<c_char>) -> Option<&'a [u8]> {
    let at = at.load(Acquire);
    // SAFETY: null, or a string that stays.
    (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) }.to_bytes())
}

/// The given environment will do.
const NOTHING: usize = 0;
/// What programs need to be under the limit must be added.
const ADDED: usize = 1;
/// This library must be removed.
const REMOVED: usize = 2;
/// The bits that say which of these.
const WHAT: usize = 15;
/// The bits that hold the number of bytes of room needed.
pub const ROOM: isize = !(WHAT as isize);

/// Whether a seccomp filter may forbid the system calls that this module makes.
static FILTERED: AtomicBool = AtomicBool::new(false);

/// This process is about to restrict its system calls: from now on this module makes none.
pub fn filters() {
    FILTERED.store(true, Relaxed);
}

/// What must be done with environment `given` to start the program in file `path`, and how many bytes of room that
/// takes. Warns if the program cannot be managed. It is called before any room is taken, because most environments are
/// complete, and the stack may be small: in a signal handler on a stack of its own.
///
/// The story: whether the library can be loaded was asked for environments only that lack it. A program with another root
/// directory (`chroot`) mostly keeps its environment, so it ran without a limit and without a message but the loader's.
///
/// The story: each `exec` took 14 KiB of stack. On an alternate stack of 8 KiB it wrote over what lay below. A thread
/// with the smallest stack there is, 16 KiB, ended by SIGSEGV when it gave a program an environment of its own, as room
/// for the largest one was taken.
pub extern "C" fn asks(given: Strings, path: *const c_char) -> usize {
    asks_at(libc::AT_FDCWD, path, given)
}

fn asks_at(dir: c_int, path: *const c_char, given: Strings) -> usize {
    if let Some(p) = pager() {
        p.starts_program();
    }
    let (Some(group), Some(library)) = (text(&OWN[0]), text(&LIBRARY)) else { return NOTHING };
    // Under a filter, no file is examined, and nothing is said.
    let filtered = FILTERED.load(Relaxed);
    match if filtered { Kind::Other } else { program::kind(dir, path) } {
        Kind::Musl => {
            say_lost(b"uzswap: a program was started that is linked with musl, and uzswap's library with glibc, so it runs without a limit\n");
            leaves_its_place();
            // SAFETY: the caller of exec passes an environment.
            let found = unsafe { Given::look(given, group, library) };
            return found.room(REMOVED, library).map_or(NOTHING, |room| room.takes(REMOVED));
        }
        Kind::Other => {}
        kind => {
            program::warn(kind, path);
            leaves_its_place();
        }
    }
    // SAFETY: the caller of exec passes an environment.
    let found = unsafe { Given::look(given, group, library) };
    let loads = filtered || can_be_loaded();
    if found.has_group && found.has_library && loads {
        return NOTHING;
    }
    let added = found.room(ADDED, library).map(|room| room.takes(ADDED));
    if filtered {
        return added.unwrap_or(NOTHING);
    }
    if let Some(added) = added.filter(|_| loads) {
        return added;
    }
    say_lost(b"uzswap: a program was started that cannot load uzswap's library (it has another root directory, may not read it, or has no room in its environment), so it runs without a limit\n");
    leaves_its_place();
    if loads {
        return NOTHING;
    }
    // The loader would load nothing, and complain, in each program from here on.
    found.room(REMOVED, library).filter(|_| found.has_library).map_or(NOTHING, |room| room.takes(REMOVED))
}

/// The room that a new environment takes.
struct Room {
    /// Variables, including the null pointer behind them.
    variables: usize,
    /// Bytes of an `LD_PRELOAD`, which comes behind those.
    preload: usize,
}

impl Room {
    /// Its bytes, combined with what it is for.
    fn takes(&self, what: usize) -> usize {
        (self.variables * size_of::<Strings>() + self.preload).next_multiple_of(WHAT + 1) | what
    }
}

/// What was found in an environment.
struct Given<'a> {
    /// Number of variables.
    count: usize,
    has_group: bool,
    /// Which of them is `LD_PRELOAD`.
    preload: Option<usize>,
    /// The value of that one.
    others: &'a [u8],
    /// Bytes of the longest variable of that name, with its NUL.
    longest: usize,
    has_library: bool,
}

impl Given<'_> {
    /// # Safety
    /// `given` is null, or strings with a null pointer behind them, which do not change meanwhile.
    unsafe fn look(given: Strings, group: &[u8], library: &[u8]) -> Self {
        let mut found = Self { count: 0, has_group: false, preload: None, others: &[], longest: 0, has_library: false };
        // SAFETY: the caller promises such strings.
        while let Some(variable) = unsafe { nth(given, found.count) } {
            found.has_group |= variable.starts_with(&group[..ENV_GROUP.len() + 1]);
            if let Some(value) = variable.strip_prefix(PRELOAD) {
                // The loader goes by the last one.
                (found.preload, found.others) = (Some(found.count), value);
                found.longest = found.longest.max(variable.len() + 1);
            }
            found.count += 1;
        }
        found.has_library = found.others.split(|c| b": ".contains(c)).any(|path| path == library);
        found
    }

    /// The room for another environment made from this one; `None` if that is too much.
    fn room(&self, what: usize, library: &[u8]) -> Option<Room> {
        let Self { count, others, longest, .. } = *self;
        let room = match what {
            ADDED => {
                Room { variables: count + OWN.len() + 2, preload: PRELOAD.len() + library.len() + 1 + others.len() + 1 }
            }
            _ => Room { variables: count + 1, preload: longest },
        };
        (count <= VARIABLES && room.preload <= PRELOAD_BYTES).then_some(room)
    }
}

/// Builds in `room` the environment that [`asks`] called for, from `given`.
pub extern "C" fn completed(given: Strings, room: *mut Strings, asked: usize) -> Strings {
    let (Some(group), Some(library)) = (text(&OWN[0]), text(&LIBRARY)) else { return given };
    // SAFETY: the caller of exec passes an environment.
    let found = unsafe { Given::look(given, group, library) };
    let what = asked & WHAT;
    // If another thread changes the environment meanwhile, the given one is used.
    let fits = |takes: &Room| takes.takes(what) <= asked;
    let Some(takes) = found.room(what, library).filter(fits) else { return given };
    let variables = room.cast::<*const c_char>();
    // SAFETY: the room is that large.
    let line = unsafe { variables.add(takes.variables) }.cast::<u8>();
    if what == REMOVED {
        // SAFETY: the caller's room on the stack, and an environment.
        return unsafe { without(given, variables, line, library) };
    }
    let Given { mut count, has_group, preload, others, has_library, .. } = found;
    // SAFETY: the caller's room on the stack, which nobody else uses; all that is written fits.
    unsafe {
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
            let mut end = 0;
            let separator: &[u8] = if others.is_empty() { b"" } else { b":" };
            for part in [PRELOAD, library, separator, others, b"\0"] {
                line.add(end).copy_from_nonoverlapping(part.as_ptr(), part.len());
                end += part.len();
            }
            let at = preload.unwrap_or(count);
            variables.add(at).write(line.cast());
            count = count.max(at + 1);
        }
        variables.add(count).write(core::ptr::null());
        variables
    }
}

/// Variable `n` of an environment.
///
/// # Safety
/// There are at least `n`, all of them strings.
unsafe fn nth<'a>(given: *const *const c_char, n: usize) -> Option<&'a [u8]> {
    if given.is_null() {
        return None;
    }
    // SAFETY: the caller promises that there are that many strings.
    unsafe {
        let variable = *given.add(n);
        (!variable.is_null()).then(|| CStr::from_ptr(variable).to_bytes())
    }
}

/// The program that is about to replace this one will not be a member.
fn leaves_its_place() {
    if let Some(p) = pager() {
        p.executes();
    }
}

/// The call that should have started a program has returned.
pub extern "C" fn goes_on() {
    if let Some(p) = pager() {
        p.goes_on();
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

/// The environment without this library.
///
/// # Safety
/// `given` is an environment. Nobody else uses the room for as many variables, nor that for the longest `LD_PRELOAD`.
unsafe fn without(given: Strings, variables: *mut *const c_char, line: *mut u8, library: &[u8]) -> Strings {
    let (mut count, mut from) = (0, 0);
    // SAFETY: the caller promises the environment and the room; all that is written fits, as `asks` computed.
    unsafe {
        while let Some(variable) = nth(given, from) {
            variables.add(count).write(*given.add(from));
            from += 1;
            let Some(value) = variable.strip_prefix(PRELOAD) else {
                count += 1;
                continue;
            };
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

/// Makes a call that starts the program at `path`, relative to directory `dir`, with the environment that it must have
/// instead of `given`.
pub fn start<R>(dir: c_int, path: *const c_char, given: Strings, call: impl FnOnce(Strings) -> R) -> R {
    let returned = match asks_at(dir, path, given) {
        NOTHING => call(given),
        asked @ ..0x400 => start_with_room::<0x80, R>(given, asked, call),
        asked @ ..0x1000 => start_with_room::<0x200, R>(given, asked, call),
        asked => start_with_room::<MOST_WORDS, R>(given, asked, call),
    };
    goes_on();
    returned
}

/// Words of the largest room possible.
const MOST_WORDS: usize = VARIABLES + 8 + PRELOAD_BYTES / size_of::<Strings>();

#[inline(never)]
fn start_with_room<const WORDS: usize, R>(given: Strings, asked: usize, call: impl FnOnce(Strings) -> R) -> R {
    let mut room = [const { MaybeUninit::<Strings>::uninit() }; WORDS];
    call(completed(given, room.as_mut_ptr().cast(), asked))
}

/// fexecve(3), with the environment completed.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fexecve(fd: c_int, argv: Strings, envp: Strings) -> c_int {
    type Real = unsafe extern "C" fn(c_int, Strings, Strings) -> c_int;
    // SAFETY: the function found under this name, with the caller's arguments.
    start(fd, c"".as_ptr(), envp, |envp| unsafe { core::mem::transmute::<usize, Real>(FEXECVE.find())(fd, argv, envp) })
}

/// execveat(2), with the environment completed.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execveat(
    dir: c_int,
    path: *const c_char,
    argv: Strings,
    envp: Strings,
    flags: c_int,
) -> c_int {
    type Real = unsafe extern "C" fn(c_int, *const c_char, Strings, Strings, c_int) -> c_int;
    // SAFETY: as above.
    start(dir, path, envp, |envp| unsafe {
        core::mem::transmute::<usize, Real>(EXECVEAT.find())(dir, path, argv, envp, flags)
    })
}

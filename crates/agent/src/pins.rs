//! Watches for calls after which a device may write to the program's memory, where that matters (why:
//! `uzswap_pager::discover::pins`).
//!
//! These are files opened for direct I/O, devices, file systems that do direct I/O unasked, io_uring, and sockets that
//! decrypt in place. The libc functions that open them are interposed, and so are liburing's, which makes system calls
//! with instructions of its own.
//!
//! With MOVE, pins matter only for memory that becomes read-only while it is pinned. That takes a long pin, or chance.
//! File systems that do direct I/O unasked pin for one call only, so they are not looked for. And a function that opens
//! a file asks the kernel about it only if it is opened for direct I/O, or has a device's name: programs that open
//! files all the time would be slower for it.

use crate::next::Next;
use crate::{fails, lent, pager, set_mask};
use core::ffi::{c_char, c_int, c_long, c_uint, c_void};
use core::sync::atomic::Ordering::Relaxed;
use uzswap_pager::pager::Pager;
use uzswap_sys::raw::Errno;
use uzswap_sys::sys;

/// Most inherited descriptors that are examined.
const INHERITED: i32 = 256;
/// With MOVE the search ends behind this many closed descriptors: to examine all takes 32 µs, of the 850 that the
/// smallest program takes.
const CLOSED_MOST: i32 = 16;
/// Major numbers of character devices that never write to a program's memory by themselves: memory, terminals, small
/// devices (except VFIO), input, sound, and pseudo-terminals.
const HARMLESS: [u32; 7] = [1, 4, 5, 10, 13, 14, 116];
const PTYS: core::ops::RangeInclusive<u32> = 136..=143;
const VFIO: (u32, u32) = (10, 196);
const MAGIC_9P: c_long = 0x0102_1997;
const MAGIC_FUSE: c_long = 0x6573_5546;
const SOL_TLS: c_int = 282;

static OPEN: Next = Next::new(c"open");
static OPEN64: Next = Next::new(c"open64");
static OPENAT: Next = Next::new(c"openat");
static OPENAT64: Next = Next::new(c"openat64");
static FOPEN: Next = Next::new(c"fopen");
static FOPEN64: Next = Next::new(c"fopen64");
static MKSTEMP: Next = Next::new(c"mkstemp");
static MKSTEMP64: Next = Next::new(c"mkstemp64");
static MKOSTEMP: Next = Next::new(c"mkostemp");
static MKOSTEMP64: Next = Next::new(c"mkostemp64");
static MKSTEMPS: Next = Next::new(c"mkstemps");
static MKSTEMPS64: Next = Next::new(c"mkstemps64");
static MKOSTEMPS: Next = Next::new(c"mkostemps");
static MKOSTEMPS64: Next = Next::new(c"mkostemps64");
static FCNTL: Next = Next::new(c"fcntl");
static FCNTL64: Next = Next::new(c"fcntl64");
static SOCKET: Next = Next::new(c"socket");
static SETSOCKOPT: Next = Next::new(c"setsockopt");
/// liburing's function, if the library is there at all.
static RING_PARAMS: Next = Next::new(c"io_uring_queue_init_params");

/// Finds the interposed functions of libc. Called in the constructor.
pub fn init() {
    for f in [&OPEN, &OPEN64, &OPENAT, &OPENAT64, &FOPEN, &FOPEN64, &FCNTL, &FCNTL64, &SOCKET, &SETSOCKOPT] {
        f.find();
    }
    for f in [&MKSTEMP, &MKSTEMP64, &MKOSTEMP, &MKOSTEMP64, &MKSTEMPS, &MKSTEMPS64, &MKOSTEMPS, &MKOSTEMPS64] {
        f.find();
    }
}

/// The program may pin memory from now on.
pub fn may_pin() {
    if let Some(p) = pager().filter(|p| !p.pins.load(Relaxed)) {
        let mask = set_mask(!0);
        p.may_pin();
        set_mask(mask);
    }
}

/// Examines the descriptors that a program begins with.
pub fn look_at_inherited() {
    let most = if pager().is_some_and(|p| p.without_move) { INHERITED } else { CLOSED_MOST };
    let mut closed = 0;
    for fd in 0..INHERITED {
        // SAFETY: numbers only.
        if unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFD) }.is_ok() {
            closed = 0;
            if pins(fd) {
                return may_pin();
            }
        } else if closed < most {
            closed += 1;
        } else {
            return;
        }
    }
}

/// Examines a descriptor that was just opened; passes an error on. With MOVE only if `may` says that it could pin.
fn opened(fd: c_int, may: impl FnOnce() -> bool) -> c_int {
    let matters = |p: &Pager| !p.pins.load(Relaxed) && (p.without_move || may());
    if fd >= 0 && pager().is_some_and(matters) && pins(fd) {
        may_pin();
    }
    fd
}

/// Whether a file was opened by a device's name.
///
/// # Safety
/// `path` must be a string.
unsafe fn is_device(path: *const c_char) -> bool {
    // SAFETY: the caller promises a string, and the kernel has read it.
    unsafe { core::ffi::CStr::from_ptr(path) }.to_bytes().starts_with(b"/dev/")
}

/// Whether a read from a descriptor may have a device write to memory, or another program behind a file system.
fn pins(fd: c_int) -> bool {
    // SAFETY: numbers only.
    let flags: Result<usize, Errno> = unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFL) };
    let Ok(flags) = flags else { return false };
    // SAFETY: zeros are a stat; the call fills it.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: as above.
    if unsafe { sys!(libc::SYS_fstat, fd, &raw mut stat) }.is_err() || flags as i32 & libc::O_PATH != 0 {
        return false;
    }
    match stat.st_mode & libc::S_IFMT {
        libc::S_IFBLK => true,
        libc::S_IFCHR => {
            let (major, minor) = (libc::major(stat.st_rdev), libc::minor(stat.st_rdev));
            (major, minor) == VFIO || !(HARMLESS.contains(&major) || PTYS.contains(&major))
        }
        libc::S_IFREG => {
            flags as i32 & libc::O_DIRECT != 0 || pager().is_some_and(|p| p.without_move) && is_read_in_place(fd)
        }
        // For pipes O_DIRECT means something else.
        _ => false,
    }
}

/// Whether a file's system does direct I/O unasked: 9P may, and FUSE if it refuses shared mappings.
fn is_read_in_place(fd: c_int) -> bool {
    // SAFETY: zeros are a statfs; the call fills it.
    let mut fs: libc::statfs = unsafe { core::mem::zeroed() };
    // SAFETY: as above.
    if unsafe { sys!(libc::SYS_fstatfs, fd, &raw mut fs) }.is_err() {
        return false;
    }
    match fs.f_type {
        MAGIC_9P => true,
        MAGIC_FUSE => {
            // SAFETY: a new mapping, of which nothing is touched.
            let mapped = unsafe { sys!(libc::SYS_mmap, 0, 4096, libc::PROT_READ, libc::MAP_SHARED, fd, 0) };
            if let Ok(at) = mapped {
                // SAFETY: the mapping just made.
                let _ = unsafe { sys!(libc::SYS_munmap, at, 4096) };
            }
            mapped == Err(libc::ENODEV)
        }
        _ => false,
    }
}

macro_rules! interpose_open {
    ($name:ident, $which:expr $(, $dir:ident)?) => {
        /// Replaces the libc function of this name.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($dir: c_int,)? path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
            type Real = unsafe extern "C" fn($(interpose_open!(@int $dir),)? *const c_char, c_int, c_uint) -> c_int;
            // SAFETY: the function found under this name, with the caller's arguments. (The last is passed in a
            // register, whether the caller gave it or not.)
            let fd = unsafe { core::mem::transmute::<usize, Real>($which.find())($($dir,)? path, flags, mode) };
            // SAFETY: `path` is the string by which it was opened.
            opened(fd, || flags & libc::O_DIRECT != 0 || unsafe { is_device(path) })
        }
    };
    (@int $dir:ident) => { c_int };
}

interpose_open!(open, OPEN);
interpose_open!(open64, OPEN64);
interpose_open!(openat, OPENAT, dir);
interpose_open!(openat64, OPENAT64, dir);

macro_rules! interpose_checked_open {
    ($name:ident, $to:ident $(, $dir:ident)?) => {
        /// Replaces the libc function of this name, which programs built with `_FORTIFY_SOURCE` call.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($dir: c_int,)? path: *const c_char, flags: c_int) -> c_int {
            // SAFETY: the caller's arguments. (If a mode is needed, libc ends the program; this does not.)
            unsafe { $to($($dir,)? path, flags, 0) }
        }
    };
}

interpose_checked_open!(__open_2, open);
interpose_checked_open!(__open64_2, open64);
interpose_checked_open!(__openat_2, openat, dir);
interpose_checked_open!(__openat64_2, openat64, dir);

macro_rules! interpose_fopen {
    ($name:ident, $which:expr) => {
        /// Replaces the libc function of this name.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char, mode: *const c_char) -> *mut libc::FILE {
            type Real = unsafe extern "C" fn(*const c_char, *const c_char) -> *mut libc::FILE;
            // SAFETY: the function found under this name, with the caller's arguments.
            let file = unsafe { core::mem::transmute::<usize, Real>($which.find())(path, mode) };
            if !file.is_null() {
                // SAFETY: an open file, and the string by which it was opened.
                opened(unsafe { libc::fileno(file) }, || unsafe { is_device(path) });
            }
            file
        }
    };
}

/// libc's `syscall` made call `nr`, which returned `ret`: if it opens files, that is a descriptor.
pub fn called(nr: c_long, ret: isize) {
    let opens = [libc::SYS_open, libc::SYS_openat, libc::SYS_openat2].contains(&nr);
    if let Some(fd) = c_int::try_from(ret).ok().filter(|_| opens) {
        opened(fd, || true);
    }
}

macro_rules! interpose_temporary {
    ($name:ident, $which:expr) => {
        /// Replaces the libc function of this name. Each of them opens a file by itself.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(template: *mut c_char, second: c_int, third: c_int) -> c_int {
            type Real = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
            // SAFETY: the function found under this name, with the caller's arguments. (They are in registers, given or
            // not.)
            let fd = unsafe { core::mem::transmute::<usize, Real>($which.find())(template, second, third) };
            // Those that take flags have them in different places, and few files are made this way.
            opened(fd, || true)
        }
    };
}

interpose_temporary!(mkstemp, MKSTEMP);
interpose_temporary!(mkstemp64, MKSTEMP64);
interpose_temporary!(mkostemp, MKOSTEMP);
interpose_temporary!(mkostemp64, MKOSTEMP64);
interpose_temporary!(mkstemps, MKSTEMPS);
interpose_temporary!(mkstemps64, MKSTEMPS64);
interpose_temporary!(mkostemps, MKOSTEMPS);
interpose_temporary!(mkostemps64, MKOSTEMPS64);
interpose_fopen!(fopen, FOPEN);
interpose_fopen!(fopen64, FOPEN64);

macro_rules! interpose_fcntl {
    ($name:ident, $which:expr) => {
        /// Replaces the libc function of this name.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(fd: c_int, command: c_int, argument: usize) -> c_int {
            type Real = unsafe extern "C" fn(c_int, c_int, usize) -> c_int;
            // SAFETY: the function found under this name, with the caller's arguments.
            let done = unsafe { core::mem::transmute::<usize, Real>($which.find())(fd, command, argument) };
            if command == libc::F_SETFL && done == 0 && argument as c_int & libc::O_DIRECT != 0 {
                opened(fd, || true);
            }
            done
        }
    };
}

interpose_fcntl!(fcntl, FCNTL);
interpose_fcntl!(fcntl64, FCNTL64);

/// socket(2): the kernel's ciphers and XDP pin the memory that they will write to.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    type Real = unsafe extern "C" fn(c_int, c_int, c_int) -> c_int;
    if domain == libc::AF_ALG || domain == libc::AF_XDP {
        may_pin();
    }
    // SAFETY: the function found under this name, with the caller's arguments.
    unsafe { core::mem::transmute::<usize, Real>(SOCKET.find())(domain, kind, protocol) }
}

/// setsockopt(2): TLS in the kernel decrypts in place, and sockets may send memory that is lent to them (`lent`).
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: c_uint) -> c_int {
    type Real = unsafe extern "C" fn(c_int, c_int, c_int, *const c_void, c_uint) -> c_int;
    if lent::is_refused(level, name) {
        let args = [fd as usize, level as usize, name as usize, value as usize, len as usize, 0];
        return lent::refuse(args).map_or_else(fails, |()| 0);
    }
    if level == SOL_TLS {
        may_pin();
    }
    // SAFETY: the function found under this name, with the caller's arguments.
    unsafe { core::mem::transmute::<usize, Real>(SETSOCKOPT.find())(fd, level, name, value, len) }
}

/// liburing's function that makes a ring.
///
/// # Safety
/// As liburing's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_uring_queue_init_params(entries: c_uint, ring: *mut c_void, params: *mut c_void) -> c_int {
    type Real = unsafe extern "C" fn(c_uint, *mut c_void, *mut c_void) -> c_int;
    let own: Real = io_uring_queue_init_params;
    let real = RING_PARAMS.find_anywhere(own as usize);
    if real == 0 {
        return -libc::ENOSYS;
    }
    may_pin();
    // SAFETY: the function found under this name, with the caller's arguments.
    unsafe { core::mem::transmute::<usize, Real>(real)(entries, ring, params) }
}

/// liburing's function that makes a ring without parameters.
///
/// # Safety
/// As liburing's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_uring_queue_init(entries: c_uint, ring: *mut c_void, flags: c_uint) -> c_int {
    // struct io_uring_params: sq_entries, cq_entries, flags, …
    let mut params = [0u32; 30];
    params[2] = flags;
    // SAFETY: the caller passes liburing's arguments, and the parameters are ours.
    unsafe { io_uring_queue_init_params(entries, ring, params.as_mut_ptr().cast()) }
}

//! The preloaded library: its entry, the hooks in libc, and an allocator of its own.
//!
//! LD_PRELOAD loads it into every process of the tree. Without a group in the environment it does nothing. The hooks
//! run on the program's threads, and block signals while they hold the pager's lock: a signal handler could touch
//! managed memory, and serving that fault needs the lock.
//!
//! | of the program | followed in |
//! |---|---|
//! | libc itself | `symbols` (what it defines), `next`, `patch` (system calls that it makes inside itself), `sites`, `near` |
//! | other libcs | `others` |
//! | mapping calls | `calls`; `remap`, with `pieces`, `parts` and `locked`; `populated`, `segments`, `relocated` |
//! | memory that must not leave | `locked`, `lockall`, `pins` (devices), `lent` (pipes and sockets), `futexes`, `userfaults` |
//! | threads | `threads`, `unwind` |
//! | forks, and programs executed | `rawfork`, `program`, `environment` |
//! | what ends its being managed, or the process | `leaving`, `users`; `ends` |
//!
//! `heap` and `bytes` replace what libc would do.

mod bytes;
mod calls;
mod ends;
mod environment;
mod futexes;
mod heap;
mod leaving;
mod lent;
mod lockall;
mod locked;
mod near;
mod next;
mod others;
mod parts;
mod patch;
mod pieces;
mod pins;
mod populated;
mod program;
mod rawfork;
mod relocated;
mod remap;
mod segments;
mod sites;
mod symbols;
mod threads;
mod unwind;
mod userfaults;
mod users;

use core::ffi::c_int;
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::*};
use patch::PatchError;
use uzswap_pager::frames::arena::Layout;
use uzswap_pager::group::member::Chain;
use uzswap_pager::group::{ENV_GROUP, ENV_NODE, GroupPage, MAGIC, NO_LIMIT, NODES, OBJECT, unmanaged};
use uzswap_pager::pager::Pager;
use uzswap_pager::says;
use uzswap_pager::swap::clusters::{self as swap_books, ClusterMap, ENV_SWAP};
use uzswap_pager::ticker;
use uzswap_pager::trace::{OBJECT_BYTES, RINGS_AT, Rings};
use uzswap_sys::thread::set_signal_mask as set_mask;
use uzswap_sys::{memfd, process, raw, sys, thread};

static PAGER: AtomicPtr<Pager> = AtomicPtr::new(core::ptr::null_mut());

fn pager() -> Option<&'static Pager> {
    // SAFETY: null, or the leaked pager.
    unsafe { PAGER.load(Acquire).as_ref() }
}

/// Fails like a libc function: returns -1, with the reason in `errno`.
fn fails(errno: raw::Errno) -> c_int {
    // SAFETY: the calling thread is one of libc's, so it has an `errno`.
    unsafe { *libc::__errno_location() = errno };
    -1
}

#[used]
// SAFETY: the function has C's calling convention, as the loader expects there.
#[unsafe(link_section = ".init_array")]
static INIT: extern "C" fn() = init;

#[used]
// SAFETY: as above.
#[unsafe(link_section = ".fini_array")]
static FINI: extern "C" fn() = fini;

extern "C" fn init() {
    // SAFETY: getenv in a constructor, before other threads.
    let path = unsafe { libc::getenv(c"UZSWAP_GROUP".as_ptr()) };
    debug_assert_eq!(ENV_GROUP, "UZSWAP_GROUP");
    if path.is_null() || !PAGER.load(Relaxed).is_null() {
        return;
    }
    if let Err(why) = start(path) {
        // SAFETY: a constant string.
        let _ = unsafe { sys!(libc::SYS_write, 2, why.as_ptr(), why.len()) };
    }
}

/// Makes this process a member of the group whose object `path` names. The error is the text for stderr.
fn start(path: *const libc::c_char) -> Result<(), &'static str> {
    says::begin();
    let (node, inode) = numbers().ok_or(WRONG_NUMBER)?;
    let (group, rings) = group_at(path, inode)?;
    if !is_beside_its_group(path) {
        // Otherwise each process of a container would say it.
        let first = group.warns_first(unmanaged::APART);
        return Err(if first {
            "uzswap: this process runs without a limit: it is in a PID namespace (without a /proc of its own) or a time namespace that its group is not in\n"
        } else {
            ""
        });
    }
    // Before the reservation, which may take all addresses within reach of libc. Without a pager the hooks do nothing.
    // SAFETY: a preload constructor: no other thread of libc's runs.
    unsafe { patch::install() }.map_err(|why| match why {
        PatchError::Pattern => {
            "uzswap: this process runs without a limit: its C library is not one that uzswap knows how to hook (glibc 2.34 or later)\n"
        }
        PatchError::Memory(_) => {
            "uzswap: this process runs without a limit: it may not make code of its C library writable to hook it (lift what forbids it: \
             systemd's MemoryDenyWriteExecute, or a security module)\n"
        }
    })?;
    others::init()?;
    if node >= NODES || !group.nodes[node].is_ready() {
        return Err(WRONG_NUMBER);
    }
    let layout = Layout::reserve(arena_limit(group, node)).map_err(
        |_| match bounds_itself() {
            _ if process::never_overcommits() => "uzswap: this process runs without a limit: the kernel never overcommits memory (vm.overcommit_memory is 2), and uzswap reserves 73 GiB of addresses; set it to 0 or 1\n",
            true => "uzswap: this process runs without a limit: no address space could be reserved (raise `ulimit -v` and `ulimit -d`)\n",
            false => "uzswap: this process runs without a limit: it does not have 73 GiB of address space left (as under valgrind's tools)\n",
        },
    )?;
    heap::init(layout.base);
    ends::init();
    environment::init();
    rawfork::init();
    threads::init();
    userfaults::init();
    users::init();
    pins::init();
    leaving::init(&layout);
    lent::init();
    segments::init();
    let mut pager = Pager::new(group, node, layout)
        .map_err(|_| "uzswap: this process runs without a limit: its group has too many members\n")?;
    pager.tracks = group.track_writes.load(Relaxed) != 0;
    if let Some(bytes) = threads::control_block() {
        pager.control_block.store(bytes, Relaxed);
    }
    if let Some(rings) = rings {
        pager.record_in(rings);
    }
    if let Some(map) = swap() {
        pager.swap_to(map);
    }
    let pager: &'static Pager = Box::leak(Box::new(pager));
    {
        let mut s = pager.state.lock();
        let _ = pager.exclude_old(&mut s, thread::pointer());
        s.relocated = relocated::tables();
    }
    if pager.without_move {
        // `mremap` must be followed from the first managed page on.
        pager.calls.order_always();
    }
    PAGER.store(core::ptr::from_ref(pager).cast_mut(), Release);
    pins::look_at_inherited();
    pager.spawn_ticker(ticker::start).map_err(|_| {
        // A caller that asks the ticker for something would wait for ever.
        PAGER.store(core::ptr::null_mut(), Release);
        pager.leave();
        "uzswap: this process runs without a limit: no thread could be started\n"
    })
}

/// Whether this process and the rest of the group, whose object `path` names, see each other's pids and start times
/// alike.
///
/// The story: a program in a new PID namespace still had the old /proc, and took the numbers there for its own. It took
/// a living member's slot, and clusters of the swap file that held that member's pages.
fn is_beside_its_group(path: *const libc::c_char) -> bool {
    // SAFETY: the environment's string.
    let path = unsafe { core::ffi::CStr::from_ptr(path) }.to_bytes();
    // `path` is `/proc/PID/fd/N` of the command's process.
    let command = path.strip_prefix(b"/proc/").and_then(|rest| rest.split(|c| *c == b'/').next());
    process::is_in_own_proc() && command.is_none_or(process::has_clocks_of)
}

/// Maps the group's page from the object that `path` names, and the rings behind it if the group records.
///
/// The story: a command was killed, and the kernel gave its pid to another process. If that was a `uzswap run` as well,
/// what the first command's program started then joined that one's group; if it had an empty file at that descriptor,
/// the program ended by SIGBUS.
fn group_at(
    path: *const libc::c_char,
    inode: Option<u64>,
) -> Result<(&'static GroupPage, Option<&'static Rings>), &'static str> {
    const GONE: &str = "uzswap: this process runs without a limit: its group is out of reach (was `uzswap run` killed, or has it a /proc of its own, as containers have?)\n";
    const DENIED: &str = "uzswap: this process runs without a limit: its group belongs to another user (start `uzswap run` as the user whom the program runs as)\n";
    const OTHER_VERSION: &str = "uzswap: this process runs without a limit: the command and the library are of different versions; rebuild both\n";
    // SAFETY: the environment's string.
    let path = unsafe { core::ffi::CStr::from_ptr(path) }.to_bytes_with_nul();
    let why = |e| match e {
        libc::EACCES | libc::EPERM => DENIED,
        _ => GONE,
    };
    let fd = memfd::open(path, OBJECT).map_err(why)?;
    let sealed = memfd::sealed(fd);
    let bytes = sealed.as_ref().map_or(0, |object| object.bytes);
    let group = match sealed {
        Some(object) if inode.is_some_and(|inode| inode != object.inode) => Err(GONE),
        // SAFETY: it is that large for good, and all atomics.
        Some(object) if object.bytes >= size_of::<GroupPage>() => unsafe { shared::<GroupPage>(fd, 0) }.ok_or(GONE),
        _ => Err(OTHER_VERSION),
    };
    let rings = group.ok().and_then(|group| rings(group, fd, bytes));
    raw::close(fd);
    let group = group?;
    if group.magic.load(Acquire) != MAGIC {
        return Err(OTHER_VERSION);
    }
    Ok((group, rings))
}

/// Maps what an object has at a multiple of the page size, for good; `None` if the kernel refuses.
///
/// # Safety
/// The object must have a whole `T` there for good, in which everything is atomic.
unsafe fn shared<T>(fd: i32, at: usize) -> Option<&'static T> {
    let rw = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, which is page-aligned, as large as the value, and stays.
    unsafe { sys!(libc::SYS_mmap, 0, size_of::<T>(), rw, libc::MAP_SHARED, fd, at).ok().map(|at| &*(at as *const T)) }
}

/// The books of the run's swap file, if it has one. Without them the process runs without swap.
///
/// The story: a command that had joined another's group was killed, and its pid given to another process. What its program
/// started then opened whatever that process had at the descriptor, and ended by SIGBUS if it was shorter than the books.
fn swap() -> Option<&'static ClusterMap> {
    // SAFETY: getenv in a constructor, before other threads.
    let path = unsafe { libc::getenv(c"UZSWAP_SWAP".as_ptr()) };
    debug_assert_eq!(ENV_SWAP, "UZSWAP_SWAP");
    if path.is_null() {
        return None;
    }
    // SAFETY: the environment's string.
    let path = unsafe { core::ffi::CStr::from_ptr(path) }.to_bytes_with_nul();
    let fd = memfd::open(path, swap_books::OBJECT).ok()?;
    let object = memfd::sealed(fd).filter(|object| object.bytes >= size_of::<ClusterMap>());
    // SAFETY: it is that large for good, and all atomics.
    let map = object.and_then(|_| unsafe { shared::<ClusterMap>(fd, 0) });
    raw::close(fd);
    map.filter(|map| map.magic.load(Acquire) == swap_books::MAGIC)
}

/// The rings to record in, if the group records. Without them the process runs as usual.
///
/// The story: that the group records was read from a word that any member can write to. After a stray write each new process of a
/// group that does not record mapped rings behind the end of the object, and ended by SIGBUS.
fn rings(group: &GroupPage, fd: i32, bytes: usize) -> Option<&'static Rings> {
    if group.magic.load(Acquire) != MAGIC || group.recording.load(Relaxed) == 0 || bytes < OBJECT_BYTES {
        return None;
    }
    // SAFETY: the group's object is that large for good, and all atomics.
    unsafe { shared(fd, RINGS_AT) }
}

/// Whether a limit of the process (`ulimit -v`, `ulimit -d`) may be why it cannot reserve memory.
///
/// The story: programs under Valgrind were told to raise limits that they did not have.
fn bounds_itself() -> bool {
    [libc::RLIMIT_AS, libc::RLIMIT_DATA].into_iter().any(|which| {
        let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: an out-parameter of the right type.
        unsafe { libc::getrlimit(which, &raw mut limit) };
        limit.rlim_cur != libc::RLIM_INFINITY
    })
}

const WRONG_NUMBER: &str = "uzswap: this process runs without a limit: its group's number is wrong\n";

/// The group of the tree that this process must join, and the inode of the tree's object if the environment has it.
fn numbers() -> Option<(usize, Option<u64>)> {
    // SAFETY: getenv in a constructor, before other threads.
    let numbers = unsafe { libc::getenv(c"UZSWAP_GROUP_NODE".as_ptr()) };
    debug_assert_eq!(ENV_NODE, "UZSWAP_GROUP_NODE");
    if numbers.is_null() {
        return Some((0, None));
    }
    // SAFETY: the environment's string.
    let numbers = unsafe { core::ffi::CStr::from_ptr(numbers) }.to_str().ok()?;
    let (node, inode) = numbers.split_once('@').map_or((numbers, None), |(node, inode)| (node, Some(inode)));
    Some((node.parse().ok()?, inode.map(str::parse).transpose().ok()?))
}

/// The limit for which the arena is made. If the limit is raised later, the arena stays as it is: it only ever holds a
/// share of the resident set, and does with the slots it has.
fn arena_limit(group: &GroupPage, node: usize) -> usize {
    const MOST: u64 = 4 << 30;
    let chain = Chain::of(group, node);
    let limit = chain.nodes().iter().map(|n| group.nodes[*n].target()).min().unwrap_or(NO_LIMIT);
    if limit >= NO_LIMIT { MOST as usize } else { limit as usize }
}

extern "C" fn fini() {
    ends::noted();
    if let Some(p) = pager() {
        p.leave();
    }
}

/// The signal mask from before the fork under way (in the thread that holds the pager's lock).
static MASK: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(0);

extern "C" fn before_fork() {
    if let Some(p) = pager() {
        let old = set_mask(!0);
        leaving::before_fork(p);
        if pager().is_none() {
            set_mask(old);
            return;
        }
        p.before_fork();
        if pager().is_none() {
            // Another thread has had the process let go of meanwhile. From here on none does before the fork has ended.
            p.after_fork_in_parent(-1);
            set_mask(old);
            return;
        }
        MASK.store(old, Relaxed);
        heap::stop();
    }
}

extern "C" fn after_fork(ret: isize) {
    let Some(p) = pager() else { return };
    // SAFETY: `before_fork` stopped the heap in this thread; otherwise the process has been let go of and there is no
    // pager.
    unsafe { heap::go_on() };
    let old = MASK.load(Relaxed);
    if ret != 0 {
        p.after_fork_in_parent(ret);
    } else if !p.after_fork_in_child() {
        p.say(b"uzswap: a forked child could not be given its memory; it is ended rather than read wrong data\n");
        thread::end_process(125);
    } else if p.has_gone() {
        // The thread that had the process let go of does not exist here.
        PAGER.store(core::ptr::null_mut(), Release);
    }
    set_mask(old);
}

/// For `mmap`: memory that the kernel may drop and that forked children do not get (Linux 6.11). It is not managed.
///
/// The story: kernels before 6.17 let it be registered, against their intention. Children got what was out of it:
/// libc's state of the vDSO's `getrandom`, from which parent and child would draw the same random numbers.
const MAP_DROPPABLE: i32 = 8;

fn mapped(ret: usize, len: usize, prot: i32, flags: i32) {
    const MUCH: usize = 1 << 20;
    let droppable = flags & libc::MAP_TYPE == MAP_DROPPABLE;
    let private = flags & libc::MAP_PRIVATE != 0 || droppable;
    if flags & libc::MAP_ANONYMOUS == 0 || !private || raw::check(ret as isize).is_err() {
        return;
    }
    let Some(p) = pager() else { return };
    let stack = flags & (libc::MAP_STACK | libc::MAP_GROWSDOWN) != 0;
    let end = ret + len.next_multiple_of(4096);
    if (stack || droppable) && !p.is_of_this_process() {
        // Like `is_no_stack`.
        return;
    }
    if stack || droppable {
        let old = set_mask(!0);
        p.exclude(&mut p.lock_in_hook(), ret, end);
        // If it was found meanwhile, it is managed; then children must check what they do not get.
        if droppable && !p.is_excluded(ret, end) {
            p.wipes.store(true, Relaxed);
        }
        set_mask(old);
        return;
    }
    is_no_stack(p, ret, end);
    p.growth.noted.note(ret, len);
    if prot & libc::PROT_WRITE != 0 {
        // If it will not fit any more, management starts before it is filled. (Reserved memory tells nothing.)
        if flags & libc::MAP_NORESERVE == 0 {
            p.plan(len);
        }
        grew(p, len);
    } else if prot == libc::PROT_NONE && flags & libc::MAP_FIXED == 0 {
        // Memory reserved in small pieces is about to be opened by mprotect and filled. V8 allocates its heap this way,
        // 256 KiB at a time: four threads that filled theirs took tens of MiB from the kernel before any of it was
        // found.
        grew(p, len.min(MUCH));
    }
}

/// A range has new memory that is no stack, though it may have been one before.
///
/// A child that shares this memory does not take the pager's lock: if it were killed with it, no thread would ever get it again.
/// What it maps here stays unmanaged then, as a stack does.
fn is_no_stack(p: &Pager, start: usize, end: usize) {
    if (p.may_be_excluded(start, end) || p.thp.may_know(start, end)) && p.is_of_this_process() {
        let old = set_mask(!0);
        p.include(&mut p.lock_in_hook(), start, end);
        set_mask(old);
    }
}

/// Bytes mapped since the ticker was last asked to look.
static UNSEEN: AtomicUsize = AtomicUsize::new(0);
/// The program break as last seen.
static BREAK: AtomicUsize = AtomicUsize::new(0);

extern "C" fn after_brk(now: usize) {
    let before = BREAK.swap(now, Relaxed);
    if before != 0
        && now > before
        && let Some(p) = pager()
    {
        p.plan(now - before);
        p.growth.noted.note(before, now - before);
        grew(p, now - before);
    }
}

/// The program has `bytes` more to fill: asks the ticker to look, and waits for it once memory is managed. Otherwise
/// much could be filled at the kernel's speed, unmanaged, before another thread runs.
fn grew(p: &Pager, bytes: usize) {
    let engaged = p.engaged.load(Acquire);
    // In a group of many small processes none maps much.
    let enough = if engaged { 1 << 20 } else { (p.limit() / 64).clamp(1 << 20, 4 << 20) };
    if UNSEEN.fetch_add(bytes, Relaxed) + bytes < enough {
        return;
    }
    let unseen = UNSEEN.swap(0, Relaxed);
    // Huge pages fill faster than the ticker looks.
    p.ask_look(p.outruns_looks(unseen) || engaged || bytes >= p.limit() / 64);
    if engaged {
        p.throttle_allocation();
    }
}

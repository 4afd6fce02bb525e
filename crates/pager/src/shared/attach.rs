//! The other side of a shared region: a process that maps it.
//!
//! Each process has a *watcher*, a thread with a descriptor table of its own that holds a second descriptor of the userfaultfd,
//! so that the registration outlives the owner: between the owner's death and the watcher's reaction threads wait, and do not
//! read zeros. When the owner's end of the watcher's socket closes, the watcher says so on standard error, maps an empty memory
//! object over the region (from then on every touch raises SIGBUS), and lets the waiting threads go by closing the userfaultfd.
//!
//! A madvise call on the region waits until the owner has read its event (`removes`). That includes the call that drops PTEs for
//! ageing, so a thread of its own makes that one: the watcher is then free when the owner ends. It reads the events that the
//! owner did not, until that thread has let go of the region's place.
//!
//! fork: the region is not inherited (`MADV_DONTFORK`), since the kernel would drop its registration in the child, where pages
//! that are out would read as zeros. Instead the child attaches by itself at the same address, before the program's code runs in
//! it (`pthread_atfork`), and its mapping has the soft-dirty bits that the parent's had. If that fails (also because another region
//! is served there by now), the child gets SIGBUS in the region's place, and no connection: to the owner the parent's connection
//! is the parent's mapping. A child made by a raw `clone` has nothing there and gets SIGSEGV.

use super::line;
use super::owner::{isolate_descriptors, spawn};
use super::view::{Asker, View};
use super::wire::{self, FOR_CONTROL, FOR_MAPPING, HELLO, op};
use crate::frames::arena::{self, PAGE};
use crate::page_state::mapfile::MapFile;
use crate::says;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, Once, OnceLock, PoisonError, TryLockError};
use std::time::Duration;
use uzswap_sys::lock::Lock;
use uzswap_sys::uffd::{FEATURE_EVENT_REMOVE, Uffd};
use uzswap_sys::uffd_shared::FEATURES_SHARED;
use uzswap_sys::{memfd, socket, sys};

fn os(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

/// One end of a connection after the greeting, with the region's page map.
pub(super) struct Control {
    pub socket: OwnedFd,
    pub pages: u64,
    pub map: Arc<MapFile>,
    /// The connection by which readers of the map ask the owner.
    pub asker: Arc<Asker>,
    /// Whether `madvise(MADV_REMOVE)` is seen: by the owner at all; for a mapping, in that mapping.
    pub sees_removes: bool,
}

/// Whether the other end of a connection may be trusted: it is of this user, or root's.
fn check_owner(socket: &OwnedFd) -> io::Result<()> {
    if socket::is_trusted(socket)? { Ok(()) } else { Err(os(libc::EACCES)) }
}

/// Connects to the region served at `path`.
pub(super) fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket = socket::connect(path)?;
    check_owner(&socket)?;
    Ok(socket)
}

/// Greets on a connection that has no mapping.
pub(super) fn control(socket: OwnedFd) -> io::Result<Control> {
    let (welcome, fds) = wire::call(&socket, &[HELLO, FOR_CONTROL])?;
    let [map, look] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| os(libc::EPROTO))?;
    let map = MapFile::open(map.into_raw_fd()).map_err(os)?;
    if map.pages() != welcome[1] {
        return Err(os(libc::EPROTO));
    }
    let asker = Arc::new(Asker::new(look));
    Ok(Control { socket, pages: welcome[1], map: Arc::new(map), asker, sees_removes: welcome[2] != 0 })
}

/// A process's attachment; a forked child gets another.
struct Attachment {
    /// None in a forked child that could not attach again, and so has no mapping that the owner knows of.
    socket: Option<OwnedFd>,
    map: Arc<MapFile>,
    asker: Arc<Asker>,
    sees_removes: bool,
    markers: Arc<MapFile>,
    id: u64,
    place: Arc<Mutex<Place>>,
    kernel_faults: bool,
}

/// Bytes of the mapping behind the region, which nobody uses: see `WATCH_AGE` in `wire`.
const SPARE: usize = PAGE;

/// Where the region is, shared with the watcher: once it is given up nobody advises or maps there.
struct Place {
    base: usize,
    len: usize,
    /// Whether the program has unmapped it.
    gone: bool,
}

impl Place {
    /// The place of a region of `len` bytes.
    fn new(base: usize, len: usize) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self { base, len: len + SPARE, gone: false }))
    }
}

/// A mapped shared region: see [`SharedMapping`](super::SharedMapping).
pub(super) struct Attached {
    pub base: usize,
    pub len: usize,
    object: Object,
    path: Arc<OnceLock<PathBuf>>,
    now: Lock<Attachment>,
    token: AtomicU64,
}

/// Identity of a memory object: device and inode, which no other object has while it is mapped.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Object(u64, u64);

impl Object {
    fn of(object: &OwnedFd) -> io::Result<Self> {
        let known = File::from(object.try_clone()?).metadata()?;
        Ok(Self(known.dev(), known.ino()))
    }
}

/// Maps the object such that nobody can touch it before it is registered: see [`arena::open`].
fn map_object(object: &OwnedFd, len: usize, at: Option<usize>) -> io::Result<usize> {
    // SAFETY: if a place is wanted, it was reserved for this: see `in_child`.
    let base = unsafe { memfd::map(object, len, libc::PROT_NONE, at) }?;
    // SAFETY: advice on our own mapping, before anybody uses it.
    unsafe {
        sys!(libc::SYS_madvise, base, len, libc::MADV_DONTFORK).map_err(os)?;
        let _ = sys!(libc::SYS_madvise, base, len, libc::MADV_NOHUGEPAGE);
    }
    Ok(base)
}

/// Puts an error in a region's place: every touch raises SIGBUS.
///
/// A forked child must not inherit it: the child takes the place before it attaches, or has an error of its own there. The story:
/// the error was mapped in place first, and then excepted from forks. A child that another thread forked in between found its
/// place taken, and was ended.
fn map_error(base: usize, len: usize) {
    let except = |at: usize| {
        // SAFETY: advice on a mapping of our own.
        unsafe { sys!(libc::SYS_madvise, at, len, libc::MADV_DONTFORK) }.map_err(os)
    };
    let done = memfd::create(c"uzswap-gone", 0).and_then(|empty| {
        // SAFETY: a new mapping that replaces nothing.
        let at = unsafe { memfd::map(&empty, len, memfd::WRITABLE, None) }?;
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: the place is the region's, whose users get what they are promised, at once; nobody knows yet of the mapping
        // that moves there.
        let moved = except(at).and_then(|_| unsafe { sys!(libc::SYS_mremap, at, len, len, flags, base) }.map_err(os));
        if moved.is_err() {
            // SAFETY: as above.
            let _ = unsafe { sys!(libc::SYS_munmap, at, len) };
        }
        moved
    });
    if done.is_err() {
        // What is there may be a child's reservation.
        let _ = except(base);
        // SAFETY: as above. Touches raise SIGSEGV then, but never read zeros.
        let none = unsafe { sys!(libc::SYS_mprotect, base, len, libc::PROT_NONE) };
        if none.is_err() {
            std::process::abort();
        }
    }
}

fn open_uffd(features: u64) -> io::Result<(OwnedFd, bool)> {
    let (uffd, kernel_faults) = match Uffd::open(features) {
        Ok((uffd, _)) => (uffd, true),
        Err(_) => (Uffd::open_for_program(features).map_err(os)?, false),
    };
    // SAFETY: just made, owned by nobody.
    Ok((unsafe { OwnedFd::from_raw_fd(uffd.fd()) }, kernel_faults))
}

/// Maps the region, hands its faults to the owner, and starts the watcher. `again`: the address where it must be, and the object
/// that it was.
fn attach(
    socket: OwnedFd,
    token: u64,
    again: Option<(usize, Object)>,
) -> io::Result<(usize, usize, Object, Attachment)> {
    let (welcome, fds) = wire::call(&socket, &[HELLO, FOR_MAPPING, token])?;
    let [object, map, markers, watch, look] = <[OwnedFd; 5]>::try_from(fds).map_err(|_| os(libc::EPROTO))?;
    let pages = welcome[1];
    let (identity, at) = (Object::of(&object)?, again.map(|(at, _)| at));
    if again.is_some_and(|(_, was)| was != identity) {
        return Err(io::Error::other("another region is served in its place"));
    }
    let map = MapFile::open(map.into_raw_fd()).map_err(os)?;
    let markers = MapFile::open(markers.into_raw_fd()).map_err(os)?;
    if map.pages() != pages || markers.pages() != pages {
        return Err(os(libc::EPROTO));
    }
    let len = pages as usize * PAGE;
    let with_removes = if welcome[2] != 0 { open_uffd(FEATURES_SHARED | FEATURE_EVENT_REMOVE).ok() } else { None };
    let sees_removes = with_removes.is_some();
    let (uffd, kernel_faults) = with_removes.map_or_else(|| open_uffd(FEATURES_SHARED), Ok)?;
    let base = map_object(&object, len + SPARE, at)?;
    drop(object);
    let rest = (|| {
        Uffd::from_raw(uffd.as_raw_fd()).register_shared(base, len + SPARE).map_err(os)?;
        arena::open(base, len + SPARE).map_err(os)?;
        wire::send(&socket, &wire::words(&[0, base as u64]), &[uffd.as_raw_fd()])?;
        let (answer, _) = wire::receive(&socket)?;
        if answer[0] != 0 {
            return Err(os(answer[0] as i32));
        }
        let place = Place::new(base, len);
        start_watcher(place.clone(), uffd, watch)?;
        Ok((answer[1], place))
    })();
    match rest {
        Ok((id, place)) => {
            let (map, markers, asker) = (Arc::new(map), Arc::new(markers), Arc::new(Asker::new(look)));
            let socket = Some(socket);
            let made = Attachment { socket, map, asker, sees_removes, markers, id, place, kernel_faults };
            Ok((base, len, identity, made))
        }
        Err(e) => {
            // The owner may have the mapping by now, and would look after it as long as this process lives.
            let _ = wire::send(&socket, &wire::words(&[op::DETACH]), &[]);
            give_up(base, len + SPARE, at.is_some());
            Err(e)
        }
    }
}

/// Ends a mapping that was just made. A reserved place stays reserved: otherwise what another thread maps there meanwhile would
/// be overwritten.
fn give_up(base: usize, len: usize, reserved: bool) {
    // SAFETY: our mapping, of which nobody else in this process knows yet.
    let _ = unsafe {
        match reserved {
            true => sys!(libc::SYS_mmap, base, len, libc::PROT_NONE, RESERVED | libc::MAP_FIXED, -1isize, 0),
            false => sys!(libc::SYS_munmap, base, len),
        }
    };
}

fn lock(place: &Mutex<Place>) -> MutexGuard<'_, Place> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

fn start_watcher(place: Arc<Mutex<Place>>, uffd: OwnedFd, watch: OwnedFd) -> io::Result<()> {
    let numbers: [RawFd; 2] = [uffd.as_raw_fd(), watch.as_raw_fd()];
    let (said, heard) = std::sync::mpsc::channel();
    spawn("uzswap-watcher", move || {
        let alone = isolate_descriptors(&numbers);
        let ok = alone.is_ok();
        let _ = said.send(alone);
        if ok {
            // SAFETY: open in this thread's own table, and owned by nobody in it.
            let [uffd, watch] = numbers.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
            watcher(&place, uffd, &Arc::new(watch));
        }
    })?;
    let done = heard.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()));
    // The program's table closes its copies: from here on the program can neither see nor close the watcher's.
    drop((uffd, watch));
    done
}

fn watcher(place: &Arc<Mutex<Place>>, uffd: OwnedFd, watch: &Arc<OwnedFd>) {
    let (ask, asked) = channel();
    let (aging, answers) = (place.clone(), watch.clone());
    // Without it no page is known to be idle, and that is all.
    let _ = spawn("uzswap-ager", move || ager(&asked, &aging, &answers));
    while let Ok((words, _)) = wire::receive(watch) {
        if words[0] == wire::WATCH_AGE {
            let _ = ask.send(words[1]);
        }
    }
    let handle = Uffd::from_raw(uffd.as_raw_fd());
    let p = loop {
        match place.try_lock() {
            Ok(p) => break p,
            Err(TryLockError::Poisoned(p)) => break p.into_inner(),
            // A thread waits in madvise until its event is read. (A fault that is read is answered when the descriptor closes.)
            Err(TryLockError::WouldBlock) => {
                if handle.wait(10) {
                    let _ = handle.read_shared();
                }
            }
        }
    };
    if !p.gone {
        // Give the message first: the signal may end the process before anything else can be said.
        says::say(b"uzswap: the owner of a shared region has ended; the region is lost, and touching it is SIGBUS\n");
        map_error(p.base, p.len);
    }
    drop(p);
    // This is the last descriptor in the process: waiting threads go on, and meet the error.
    drop(uffd);
}

/// Drops the mapping's PTEs for each round of ageing that is asked for.
fn ager(asked: &Receiver<u64>, place: &Mutex<Place>, watch: &OwnedFd) {
    while let Ok(round) = asked.recv() {
        let p = lock(place);
        if !p.gone {
            // SAFETY: it is shared memory, so only the mapping's PTEs go, no contents.
            let _ = unsafe { sys!(libc::SYS_madvise, p.base, p.len, libc::MADV_DONTNEED) };
        }
        drop(p);
        let _ = wire::send(watch, &wire::words(&[wire::WATCH_AGE, round]), &[]);
    }
}

/// The attachments of this process, for fork. Lock order: this, then each attachment's `now`.
static ALL: Lock<Vec<usize>> = Lock::new(Vec::new());

impl Attachment {
    fn call(&self, request: &[u64]) -> io::Result<wire::Words> {
        let socket = self.socket.as_ref().ok_or_else(|| os(libc::ENOTCONN))?;
        wire::call(socket, request).map(|(words, _)| words)
    }
}

impl Attached {
    /// Maps the region at the other end of a connection. `path` is where a forked child finds it, once that is known.
    pub fn new(socket: OwnedFd, path: Arc<OnceLock<PathBuf>>) -> io::Result<Box<Self>> {
        see_forks();
        let (base, len, object, now) = attach(socket, 0, None)?;
        let attached = Box::new(Self { base, len, object, path, now: Lock::new(now), token: AtomicU64::new(0) });
        ALL.lock().push(core::ptr::from_ref(&*attached) as usize);
        Ok(attached)
    }

    /// Makes a call. `ENOTCONN`: in a forked child that could not attach again.
    pub fn call(&self, request: &[u64]) -> io::Result<wire::Words> {
        self.now.lock().call(request)
    }

    /// Makes a call on a range of bytes, widened to pages.
    pub fn call_range(&self, what: u64, range: Range<usize>, more: u64) -> io::Result<wire::Words> {
        let (from, to) = pages_of(range, self.len)?;
        self.call(&[what, from, to, more])
    }

    /// The page map as this mapping sees it.
    pub fn view(&self) -> View {
        let now = self.now.lock();
        View::new(now.map.clone(), Some(now.markers.clone()), now.asker.clone())
    }

    /// The number that the owner gave the mapping.
    pub fn id(&self) -> u64 {
        self.now.lock().id
    }

    /// Whether system calls may be given pointers to its memory.
    pub fn kernel_faults(&self) -> bool {
        self.now.lock().kernel_faults
    }

    /// Whether `madvise(MADV_REMOVE)` drops pages that are out, too.
    pub fn sees_removes(&self) -> bool {
        self.now.lock().sees_removes
    }
}

/// A range of bytes as pages: first and end.
pub(super) fn pages_of(range: Range<usize>, len: usize) -> io::Result<(u64, u64)> {
    if range.start > range.end || range.end > len {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the range is not within the region"));
    }
    let pages = arena::pages_of(&range);
    Ok((pages.start, pages.end))
}

impl Drop for Attached {
    fn drop(&mut self) {
        let me = core::ptr::from_ref(self) as usize;
        ALL.lock().retain(|a| *a != me);
        let now = self.now.lock();
        let mut place = lock(&now.place);
        place.gone = true;
        // SAFETY: our mapping, whose user gives it up.
        let _ = unsafe { sys!(libc::SYS_munmap, self.base, self.len + SPARE) };
        drop(place);
        if let Some(socket) = &now.socket {
            detach(socket);
        }
    }
}

/// Tells the owner that the mapping at this end of the connection is gone.
fn detach(socket: &OwnedFd) {
    let _ = socket::time_out(socket, 5);
    let _ = wire::call(socket, &[op::DETACH]);
}

/// Installs the fork handlers, once.
pub(super) fn see_forks() {
    static FORK: Once = Once::new();
    FORK.call_once(|| {
        // SAFETY: the handlers live as long as the program.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    });
}

extern "C" fn before_fork() {
    let all = ALL.lock();
    for a in all.iter() {
        // SAFETY: an attachment is in the list as long as it lives, and the list is locked.
        let a = unsafe { &*(*a as *const Attached) };
        let now = a.now.lock();
        let token = now.call(&[op::FORK]).map_or(0, |words| words[1]);
        a.token.store(token, Relaxed);
        core::mem::forget(now);
    }
    core::mem::forget(all);
}

fn after_fork(each: impl Fn(&Attached)) {
    // SAFETY: before_fork took the lock, in this thread.
    let all = unsafe { ALL.assume_locked() };
    for a in all.iter() {
        // SAFETY: as in before_fork, which took the lock.
        let a = unsafe { &*(*a as *const Attached) };
        each(a);
        // SAFETY: taken in before_fork.
        unsafe { a.now.force_unlock() };
    }
    // SAFETY: as above.
    unsafe { ALL.force_unlock() };
}

extern "C" fn in_parent() {
    after_fork(|_| {});
}

/// Flags of a mapping that reserves a place.
const RESERVED: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// Takes a region's place, which fork left empty, before anything else can be mapped there.
fn reserve(base: usize, len: usize) {
    let flags = RESERVED | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: a new mapping that replaces nothing.
    let at = unsafe { sys!(libc::SYS_mmap, base, len, libc::PROT_NONE, flags, -1isize, 0) };
    if at != Ok(base) {
        says::say(b"uzswap: another library took a shared region's place in a forked child, which therefore ends\n");
        std::process::abort();
    }
}

extern "C" fn in_child() {
    says::forget_others();
    line::close_all();
    // SAFETY: before_fork took the lock, in this thread; the attachments in the list are alive.
    unsafe { ALL.assume_locked().iter().map(|a| &*(*a as *const Attached)) }
        .for_each(|a| reserve(a.base, a.len + SPARE));
    after_fork(|a| {
        let path = a.path.get().ok_or_else(|| os(libc::ENOTCONN));
        let attached = path.and_then(|path| connect(path)).and_then(|socket| {
            socket::time_out(&socket, 10)?;
            let done = attach(socket, a.token.load(Relaxed), Some((a.base, a.object)))?;
            done.3.socket.iter().try_for_each(|socket| socket::time_out(socket, 0))?;
            Ok(done)
        });
        // SAFETY: the lock is held since before_fork; the parent's attachment ends here only in the child.
        let now = unsafe { a.now.assume_locked() };
        match attached {
            // Only the old one's descriptors go: the mapping was not inherited, and the owner must not be told.
            Ok((_, _, _, attachment)) => *now = attachment,
            Err(e) => {
                // To the owner the socket is the parent's mapping, and a parent's thread may have held the place's lock.
                (now.socket, now.place) = (None, Place::new(a.base, a.len));
                let text = format!(
                    "uzswap: a forked child could not attach a shared region again ({e}); touching it is SIGBUS\n"
                );
                says::say(text.as_bytes());
                map_error(a.base, a.len + SPARE);
            }
        }
    });
}

/// How long a call may wait at the owner (milliseconds).
pub(super) fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: when a forked child could not attach a region again, the region's place was free for a moment, and was then
    /// overwritten.
    #[test]
    fn a_reserved_place_is_not_free_between_mapping_and_error() {
        const LEN: usize = 16 * PAGE;
        let object = memfd::create(c"uzswap-test", LEN as u64).unwrap();
        let base = map_object(&object, LEN, None).unwrap();
        let free = || {
            let flags = RESERVED | libc::MAP_FIXED_NOREPLACE;
            // SAFETY: a new mapping that replaces nothing.
            unsafe { sys!(libc::SYS_mmap, base + 3 * PAGE, PAGE, libc::PROT_NONE, flags, -1isize, 0) }
        };
        give_up(base, LEN, true);
        assert_eq!(free(), Err(libc::EEXIST));
        map_error(base, LEN);
        assert_eq!(free(), Err(libc::EEXIST));
        give_up(base, LEN, false);
        // Unless another test's thread was there first.
        assert!(matches!(free(), Ok(_) | Err(libc::EEXIST)));
    }
}

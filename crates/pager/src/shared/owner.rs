//! The owner's threads.
//!
//! They have *a descriptor table of their own*. So the program does not close what they hold (the object, the others'
//! userfaultfds, and sockets whose closing tells the others that the owner has ended), and a forked child does not inherit it,
//! which would keep the others from seeing that end.
//!
//! | thread | does |
//! |---|---|
//! | server | takes connections and the owner's own orders |
//! | one for each connection | its calls; a caller that stalls stalls nobody else. (Each process has one more, for `View`) |
//! | one for each mapping | its faults (`serve`) |
//! | a second one for some | the same, beside the thread that faults (`near`) |
//! | reclaim | pages out ahead of demand |
//! | gate | holds the object's lock for whoever closes the gate (`gate`) |
//!
//! There is one lock, the engine's. No thread waits for another process while it holds it: sockets and standard error are written
//! without the lock or without blocking, and ioctls on a userfaultfd need nothing of its process but its memory map. If they
//! answer `EAGAIN`, because a madvise call waits for its event to be read, the thread with the lock reads that event
//! ([`Engine::wait_out`]).

use super::engine::Engine;
use super::evict::Batch;
use super::mapping::Mapping;
use super::near::Guard;
use super::wire::{self, FOR_CONTROL, FOR_MAPPING, HELLO, op};
use super::{SharedOptions, calls};
use crate::page_state::mapfile::{Kind, MapFile};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;
use uzswap_mm::pagemap::WRITE_PROTECTED;
use uzswap_sys::raw::Errno;
use uzswap_sys::uffd_shared;
use uzswap_sys::{socket, sys, thread};

/// How long the server ignores connection requests when it has no descriptor for them (milliseconds).
const FULL_MS: i32 = 100;
/// Errors that mean this.
const SCARCE: [Errno; 4] = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];

/// Everything that the threads share.
pub(super) struct Server {
    engine: Mutex<Engine>,
    /// Signalled when a client has writes to be told of; used with the engine's lock.
    pub news: Condvar,
    /// Whether the reclaim thread is wanted.
    wanted: (Mutex<bool>, Condvar),
    pub stopping: AtomicBool,
    /// Open connections by number.
    connections: Mutex<Vec<(u64, Arc<OwnedFd>)>>,
    next_connection: AtomicU64,
    pub held: Held,
    /// For tests: see `wire::INJECT_NEAR`.
    pub always_near: AtomicBool,
}

/// For tests: threads stopped at certain places in their work.
#[derive(Default)]
pub(super) struct Held {
    state: Mutex<HeldState>,
    changed: Condvar,
}

#[derive(Default)]
struct HeldState {
    /// Page-outs are to stop between reading and storing.
    evictions: bool,
    /// Number of page-outs stopped there.
    waiting: u64,
    /// Mappings' threads must not read messages.
    deaf: bool,
    /// Where the threads that serve beside faulting ones are stopped.
    starving: u64,
}

impl Held {
    fn state(&self) -> MutexGuard<'_, HeldState> {
        self.state.lock().expect("no thread of the owner has panicked")
    }

    fn wait_while(&self, state: MutexGuard<'_, HeldState>, still: impl Fn(&HeldState) -> bool) {
        drop(self.changed.wait_while(state, |s| still(s)).expect("no thread of the owner has panicked"));
    }

    /// Sets what is stopped.
    pub fn set(&self, what: u64, n: u64) {
        let mut state = self.state();
        match what {
            wire::INJECT_HOLD => state.evictions = n != 0,
            wire::INJECT_STARVE => state.starving = n,
            _ => state.deaf = n != 0,
        }
        self.changed.notify_all();
    }

    /// Returns once a page-out is stopped.
    pub fn wait(&self) {
        self.wait_while(self.state(), |s| s.waiting == 0);
    }

    /// A page-out between reading and storing.
    fn eviction(&self) {
        let mut state = self.state();
        if state.evictions {
            state.waiting += 1;
            self.changed.notify_all();
            self.wait_while(state, |s| s.evictions);
            self.state().waiting -= 1;
        }
    }

    /// A thread before it reads messages.
    pub fn reading(&self) {
        self.wait_while(self.state(), |s| s.deaf);
    }

    /// A thread that serves beside a faulting one, at `place`.
    pub fn beside(&self, place: u64) {
        self.wait_while(self.state(), |s| s.starving == place);
    }
}

/// Gives the calling thread a descriptor table of its own, with only `keep` open and /dev/null as the three standard descriptors.
pub(crate) fn isolate_descriptors(keep: &[RawFd]) -> io::Result<()> {
    let os = io::Error::from_raw_os_error;
    let mut keep = keep.to_vec();
    keep.sort_unstable();
    // SAFETY: descriptors only. It closes this thread's copies, to which no owner in this thread refers.
    unsafe {
        sys!(libc::SYS_unshare, libc::CLONE_FILES).map_err(os)?;
        let null = uzswap_sys::raw::open(b"/dev/null\0", libc::O_RDWR).map_err(os)?;
        for fd in (0..3).filter(|fd| !keep.contains(fd)) {
            sys!(libc::SYS_dup2, null, fd).map_err(os)?;
        }
        let mut from = 3u32;
        for fd in keep.into_iter().filter(|fd| *fd >= 3).map(|fd| fd as u32).chain([u32::MAX]) {
            let to = if fd == u32::MAX { fd } else { fd - 1 };
            if from <= to && fd >= 3 {
                sys!(libc::SYS_close_range, from, to, 0).map_err(os)?;
            }
            from = fd.wrapping_add(1);
        }
    }
    Ok(())
}

/// Starts a thread that gets no signals of the program's.
pub(super) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // The thread inherits the mask.
    let old = thread::set_signal_mask(!0);
    let made = std::thread::Builder::new().name(name.to_owned()).stack_size(1 << 20).spawn(work);
    thread::set_signal_mask(old);
    made.map(drop)
}

/// Starts an owner; returns the socket for its orders.
pub(super) fn start(size: usize, options: SharedOptions) -> io::Result<OwnedFd> {
    let (ours, theirs) = socket::pair()?;
    let (said, heard) = mpsc::channel();
    // The number is the same in both tables, and each side closes its own.
    let number = theirs.as_raw_fd();
    spawn("uzswap-shared", move || {
        let made = isolate_descriptors(&[number]).and_then(|()| {
            // SAFETY: open in this table, and owned by nobody here: the caller's owner belongs to another table.
            let orders = unsafe { OwnedFd::from_raw_fd(number) };
            Ok((Arc::new(Server::new(size, options)?), orders))
        });
        match made {
            Ok((server, orders)) => {
                let reclaiming = server.clone();
                let started = spawn("uzswap-reclaim", move || reclaiming.reclaim());
                let ok = started.is_ok();
                let _ = said.send(started);
                if ok {
                    server.listen(&orders);
                }
            }
            Err(e) => drop(said.send(Err(e))),
        }
    })?;
    heard.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))?;
    drop(theirs);
    Ok(ours)
}

impl Server {
    fn new(size: usize, options: SharedOptions) -> io::Result<Self> {
        Ok(Self {
            engine: Mutex::new(Engine::new(size, options)?),
            news: Condvar::new(),
            wanted: (Mutex::new(false), Condvar::new()),
            stopping: AtomicBool::new(false),
            connections: Mutex::new(Vec::new()),
            next_connection: AtomicU64::new(1),
            held: Held::default(),
            always_near: AtomicBool::new(false),
        })
    }

    /// The tables. (A thread that panics ends the process where panics abort. Elsewhere the tables may be half changed, and
    /// nobody is served wrong data from them.)
    pub fn engine(&self) -> MutexGuard<'_, Engine> {
        self.engine.lock().expect("no thread of the owner has panicked")
    }

    fn connections(&self) -> MutexGuard<'_, Vec<(u64, Arc<OwnedFd>)>> {
        self.connections.lock().expect("no thread of the owner has panicked")
    }

    /// Waits for news, and releases the lock meanwhile.
    pub fn wait_for_news<'a>(&self, engine: MutexGuard<'a, Engine>, time: Duration) -> MutexGuard<'a, Engine> {
        self.news.wait_timeout(engine, time).expect("no thread of the owner has panicked").0
    }

    /// The server thread.
    fn listen(self: &Arc<Self>, orders: &OwnedFd) {
        let mut listening: Vec<(OwnedFd, Place)> = Vec::new();
        let mut full = false;
        loop {
            // While there is no descriptor, a waiting client would make every poll return at once.
            let open = if full { &[][..] } else { &listening };
            let mut polls: Vec<_> = std::iter::once(orders).chain(open.iter().map(|l| &l.0)).map(poll_in).collect();
            wait(&mut polls, if full { FULL_MS } else { -1 });
            full = false;
            for (_, (socket, _)) in polls[1..].iter().zip(open).filter(|(p, _)| p.revents != 0) {
                match socket::accept(socket) {
                    Ok(connection) => self.take(connection, false),
                    Err(e) => full |= SCARCE.contains(&errno_of(&e)),
                }
            }
            if polls[0].revents == 0 {
                continue;
            }
            match wire::receive(orders) {
                Ok((words, _)) if words[0] == op::CONNECT => self.order_connect(orders),
                Ok((words, _)) if words[0] == op::SERVE => {
                    let result = path_of(&words, orders).and_then(|path| Ok((socket::listen(&path)?, Place::of(path))));
                    let answer = result.map(|l| listening.push(l)).map_or_else(|e| errno_of(&e), |()| 0);
                    let _ = wire::send(orders, &wire::words(&[answer as u64]), &[]);
                }
                Ok((words, _)) if words[0] == op::LIMIT => {
                    self.engine().set_limit(words[1] as usize);
                    self.want_reclaim();
                    let _ = wire::send(orders, &wire::words(&[0]), &[]);
                }
                // STOP, or the process of the handle is gone.
                _ => break,
            }
        }
        self.stopping.store(true, SeqCst);
        self.news.notify_all();
        self.want_reclaim();
        listening.iter().for_each(|(_, place)| place.clear());
        // The others learn of the end by their sockets, which close with the last thread of this table.
        for m in &self.engine().mappings {
            shut(&m.watch);
        }
        for (_, connection) in self.connections().iter() {
            shut(connection);
        }
        let _ = wire::send(orders, &wire::words(&[0]), &[]);
    }

    fn order_connect(self: &Arc<Self>, orders: &OwnedFd) {
        match socket::pair() {
            Ok((ours, theirs)) => {
                let _ = wire::send(orders, &wire::words(&[0]), &[theirs.as_raw_fd()]);
                self.take(ours, false);
            }
            Err(e) => drop(wire::send(orders, &wire::words(&[errno_of(&e) as u64]), &[])),
        }
    }

    /// Serves a connection in a thread of its own. `greeted`: it is for questions, of a client that was let in already.
    fn take(self: &Arc<Self>, connection: OwnedFd, greeted: bool) {
        let (server, connection) = (self.clone(), Arc::new(connection));
        let number = self.next_connection.fetch_add(1, Relaxed);
        self.connections().push((number, connection.clone()));
        let registered = self.clone();
        let started = spawn("uzswap-client", move || {
            let mapping = if greeted { Ok(None) } else { server.greet(&connection) };
            if let Err(e) = mapping.and_then(|mapping| server.serve(&connection, number, mapping)) {
                let _ = wire::send(&connection, &wire::words(&[errno_of(&e) as u64]), &[]);
            }
            server.connections().retain(|c| c.0 != number);
            calls::disconnected(&server, number);
        });
        if started.is_err() {
            // The socket closes with its last holder; so shut it down, for clients that wait for an answer.
            registered.connections().retain(|c| c.0 != number);
        }
    }

    /// A second connection, for readers of the page map, for a client that has one.
    fn look(self: &Arc<Self>) -> io::Result<OwnedFd> {
        let (ours, theirs) = socket::pair()?;
        self.take(ours, true);
        Ok(theirs)
    }

    /// Handles the greeting of a connection; returns its mapping if it is for one.
    fn greet(self: &Arc<Self>, connection: &OwnedFd) -> io::Result<Option<u64>> {
        // A client that stalls in the greeting must not keep a thread.
        socket::time_out(connection, 10)?;
        let (hello, _) = wire::receive(connection)?;
        if !socket::is_trusted(connection).is_ok_and(|is| is) {
            return Err(io::Error::from_raw_os_error(libc::EACCES));
        }
        if hello[0] != HELLO {
            return Err(io::Error::from_raw_os_error(libc::EPROTO));
        }
        let mapping = match hello[1] {
            FOR_MAPPING => Some(self.attach(connection, hello[2])?),
            FOR_CONTROL => {
                let look = self.look()?;
                let engine = self.engine();
                let sees_removes = u64::from(engine.removes.gate.is_some());
                let (welcome, map) = (wire::words(&[0, engine.pages, sees_removes]), engine.map.fd());
                drop(engine);
                wire::send(connection, &welcome, &[map, look.as_raw_fd()])?;
                None
            }
            _ => return Err(io::Error::from_raw_os_error(libc::EPROTO)),
        };
        socket::time_out(connection, 0)?;
        Ok(mapping)
    }

    /// Serves a connection from its greeting to its end.
    fn serve(&self, connection: &OwnedFd, number: u64, mapping: Option<u64>) -> io::Result<()> {
        while let Ok((request, _)) = wire::receive(connection) {
            let answer = calls::answer(self, &request, mapping, (number, connection));
            wire::send(connection, &answer, &[])?;
        }
        Ok(())
    }

    /// Gives a process what it needs to map the region, and takes over its faults.
    fn attach(self: &Arc<Self>, connection: &OwnedFd, token: u64) -> io::Result<u64> {
        let os = io::Error::from_raw_os_error;
        let ((watch, theirs), look) = (socket::pair()?, self.look()?);
        let (pages, object, map, markers, sees_removes) = {
            let engine = self.engine();
            let markers = MapFile::create(Kind::Markers, 0, engine.pages, 0).map_err(os)?;
            let sees_removes = u64::from(engine.removes.gate.is_some());
            (engine.pages, engine.object.as_raw_fd(), engine.map.fd(), markers, sees_removes)
        };
        let fds = [object, map, markers.fd(), theirs.as_raw_fd(), look.as_raw_fd()];
        wire::send(connection, &wire::words(&[0, pages, sees_removes]), &fds)?;
        drop((theirs, look));
        let (words, fds) = wire::receive(connection)?;
        let uffd =
            fds.into_iter().next().filter(|fd| uffd_shared::is_uffd(fd.as_raw_fd())).ok_or_else(|| os(libc::EBADF))?;
        nonblocking(&watch)?;
        let base = words[1] as usize;
        if !base.is_multiple_of(4096) || base.checked_add((pages as usize + 1) * 4096).is_none() {
            return Err(os(libc::EINVAL));
        }
        markers.set_base(base);
        let mut engine = self.engine();
        let id = engine.next_id;
        engine.next_id += 1;
        let mapping = Mapping::new(id, uffd, watch, base, markers, &engine)?;
        // The whole range must be registered with this very descriptor; this checks it.
        mapping.uffd().write_protect(base, pages as usize * 4096, false).map_err(os)?;
        inherit_markers(&mut engine, &mapping, token);
        let guard = Guard::new(&mapping, (pages as usize + 1) * 4096)?;
        engine.mappings.push(mapping);
        drop(engine);
        let server = self.clone();
        if let Err(e) = spawn("uzswap-faults", move || server.serve_faults(id, guard)) {
            self.engine().detach(id);
            return Err(e);
        }
        wire::send(connection, &wire::words(&[0, id]), &[])?;
        Ok(id)
    }

    /// Wakes the reclaim thread.
    pub fn want_reclaim(&self) {
        let mut wanted = self.wanted.0.lock().expect("no thread of the owner has panicked");
        if !*wanted {
            *wanted = true;
            self.wanted.1.notify_one();
        }
    }

    fn reclaim(&self) {
        let mut batch = self.engine().new_batch();
        while !self.stopping.load(SeqCst) {
            {
                let wanted = self.wanted.0.lock().expect("no thread of the owner has panicked");
                let mut wanted =
                    self.wanted.1.wait_while(wanted, |w| !*w).expect("no thread of the owner has panicked");
                *wanted = false;
            }
            self.reclaim_while(&mut batch, Engine::nears_limit);
        }
    }

    /// Pages out as long as that is `wanted` and makes progress.
    fn reclaim_while(&self, batch: &mut Batch, wanted: impl Fn(&Engine) -> bool) {
        let (mut engine, mut fruitless) = (self.engine(), 0);
        while wanted(&engine) && !self.stopping.load(SeqCst) {
            let taken = engine.begin_coldest(batch);
            drop(engine);
            let _ = batch.compress();
            engine = self.engine();
            fruitless = if engine.finish(batch) == 0 { fruitless + 1 } else { 0 };
            engine.tidy_lists();
            if taken == 0 || fruitless > 50 || engine.at_floor() {
                break;
            }
        }
    }

    /// Makes room beside the reclaim thread until the limit is kept or nothing more can leave; returns the charge then (bytes).
    pub fn reclaim_to_limit(&self) -> usize {
        let mut batch = self.engine().new_batch();
        self.reclaim_while(&mut batch, |engine| engine.charged() > engine.options.limit);
        self.engine().charged()
    }

    /// Pages out a range; returns how many pages left.
    pub fn page_out(&self, pages: impl Fn(&Engine) -> Vec<u64>) -> usize {
        let (mut left, mut rounds) = (0, 0);
        let mut engine = self.engine();
        let mut batch = engine.new_batch();
        let mut wanted = pages(&engine);
        loop {
            while !wanted.is_empty() {
                engine.begin(&mut batch, &mut wanted);
                drop(engine);
                let _ = batch.compress();
                self.held.eviction();
                engine = self.engine();
                left += engine.finish(&mut batch);
                engine.tidy_lists();
            }
            // What another thread was paging out is out by now, or was rescued by a fault.
            rounds += 1;
            wanted = pages(&engine);
            if wanted.is_empty() || rounds == 3 {
                return left;
            }
        }
    }
}

/// Gives a new mapping the markers of the one that its process was forked from, and those that hold everywhere.
fn inherit_markers(engine: &mut Engine, mapping: &Mapping, token: u64) {
    let map = mapping.markers.writer();
    if let Some(at) = engine.forks.iter().position(|f| f.token == token && token != 0)
        && let Some(fork) = engine.forks.remove(at)
    {
        mapping.markers.set_tracking(fork.tracking);
        for (page, byte) in fork.markers.into_iter().enumerate().filter(|(_, b)| *b != 0) {
            map.set(page as u64, uzswap_mm::pagemap::PageState(byte));
        }
    }
    if let Some(watch) = &engine.watch {
        for page in (0..engine.pages).filter(|p| watch.everywhere.has(*p)) {
            map.change(page, WRITE_PROTECTED, 0);
        }
    }
}

/// Where a socket was made.
struct Place {
    path: PathBuf,
    /// Device and inode of the socket.
    socket: Option<(u64, u64)>,
}

impl Place {
    fn of(path: PathBuf) -> Self {
        let socket = Self::found(&path);
        Self { path, socket }
    }

    fn found(path: &Path) -> Option<(u64, u64)> {
        std::fs::symlink_metadata(path).ok().map(|m| (m.dev(), m.ino()))
    }

    /// Removes the socket if it is still this one: another owner may have put its own there.
    fn clear(&self) {
        if self.socket.is_some() && Self::found(&self.path) == self.socket {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn path_of(words: &wire::Words, orders: &OwnedFd) -> io::Result<PathBuf> {
    let mut bytes = vec![0u8; words[1].min(4096) as usize];
    let (n, _) = socket::receive(orders, &mut bytes)?;
    bytes.truncate(n);
    let text: std::ffi::OsString = std::os::unix::ffi::OsStringExt::from_vec(bytes);
    Ok(text.into())
}

/// The error number to put in a message.
pub(super) fn errno_of(e: &io::Error) -> Errno {
    e.raw_os_error().unwrap_or(if e.kind() == io::ErrorKind::InvalidInput { libc::EINVAL } else { libc::EIO })
}

pub(super) fn poll_in(fd: &OwnedFd) -> libc::pollfd {
    libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 }
}

pub(super) fn wait(polls: &mut [libc::pollfd], timeout_ms: i32) {
    // SAFETY: pollfds of ours.
    unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, timeout_ms) };
}

/// Shuts a socket down for both sides, whoever else has it open.
pub(super) fn shut(socket: &OwnedFd) {
    // SAFETY: no memory is involved.
    unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) };
}

fn nonblocking(socket: &OwnedFd) -> io::Result<()> {
    // SAFETY: no memory is involved.
    let done = unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

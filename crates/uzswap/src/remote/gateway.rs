//! The gateway: takes the members' requests at a Unix socket and carries them out on the server.
//!
//! Members' helper threads cannot use a client library: they have no TLS (thread-local storage), and must not allocate from the
//! program. The command is an ordinary process that outlives its program, so it does that for them. Its socket has no name:
//! members reach it as `/proc/PID/fd/N`, which only a process that may trace the command can open.
//!
//! One thread waits for connections. Most are never used (each process has two). A connection that is used gets a thread of its
//! own; each request takes a connection to the server that no other request uses. If no thread can be started, the waiting thread
//! carries out the request itself. A third kind of thread, the keeper, looks after the keys.
//!
//! Half of our descriptors are for members. If members have more connections, or there is no descriptor for one more, the gateway
//! closes connections that were never used, and those that have been quiet for a moment; a member that comes to use one finds it
//! closed, and asks again on a new one. Idle connections to the server are closed before any of these.

use super::{Server, Session};
use crate::descriptors;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};
use uzswap_mm::swapfile::Geometry;
use uzswap_pager::swap::backend::{OP_READ, OP_WRITE, Request};
use uzswap_pager::swap::clusters::ClusterMap;
use uzswap_sys::eventfd;

/// How often the keeper runs.
const LOOK: Duration = Duration::from_secs(1);
/// How long a used connection must be quiet before it is closed for another, when there are too many.
const QUIET: Duration = Duration::from_secs(1);
/// Bytes of a thread's stack: a TLS handshake takes some.
const STACK: usize = 1 << 20;

/// The gateway's socket, before anybody is served.
pub struct Gateway {
    listener: UnixListener,
    /// The file of the socket, whose name has been removed.
    file: File,
    server: Arc<Server>,
}

impl Gateway {
    /// Makes the socket.
    pub fn new(server: Server) -> io::Result<Self> {
        Self::in_dir(server, tempfile::tempdir()?.path())
    }

    /// Makes the socket in a directory, which may be removed afterwards.
    ///
    /// The story: a socket's path has 107 bytes at most, and with a long `TMPDIR` the run was refused.
    fn in_dir(server: Server, dir: &Path) -> io::Result<Self> {
        let dir = File::open(dir)?;
        let path = format!("/proc/self/fd/{}/swap", dir.as_raw_fd());
        let listener = UnixListener::bind(&path)?;
        // A member may have given up its rights. What is guarded is the way to the socket, not the socket itself.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666))?;
        let file = File::options().read(true).custom_flags(libc::O_PATH).open(&path)?;
        Ok(Self { listener, file, server: Arc::new(server) })
    }

    /// The descriptor that members connect to.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Starts to serve. The caller must have blocked signals, as the threads inherit that.
    pub fn serve(&self, map: &'static ClusterMap) -> io::Result<Keeper> {
        let geometry = map.geometry().ok_or(io::ErrorKind::InvalidInput)?;
        let (listener, server, crowd) = (self.listener.try_clone()?, Arc::clone(&self.server), Arc::new(Crowd::new()?));
        let door = Door { server, map, geometry, crowd, unused: Vec::new(), starved: false };
        thread("uzswap-gateway", move || accept(&listener, door))?;
        let keeper = Keeper { stop: Arc::default(), server: Arc::clone(&self.server) };
        let (stop, server) = (Arc::clone(&keeper.stop), Arc::clone(&self.server));
        thread("uzswap-keeper", move || keep(&server, map, &stop))?;
        Ok(keeper)
    }
}

fn thread(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).stack_size(STACK).spawn(body).map(drop)
}

/// Ends the run on the server.
pub struct Keeper {
    stop: Arc<(Mutex<bool>, Condvar)>,
    server: Arc<Server>,
}

impl Keeper {
    /// Drops all that is on the server. Returns how many keys may be left there, and after how many seconds they expire.
    pub fn finish(&self) -> (usize, u64) {
        *self.stop.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = true;
        self.stop.1.notify_all();
        (self.server.end(), self.server.address().ttl)
    }
}

fn keep(server: &Server, map: &ClusterMap, (stop, wake): &(Mutex<bool>, Condvar)) {
    let (mut session, mut renewed) = (Session::new(server), Instant::now());
    let every = Duration::from_secs(server.address().ttl / 3);
    loop {
        let guard = stop.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (guard, _) =
            wake.wait_timeout_while(guard, LOOK, |stop| !*stop).unwrap_or_else(std::sync::PoisonError::into_inner);
        if *guard {
            return;
        }
        drop(guard);
        let renew = renewed.elapsed() >= every;
        if renew {
            renewed = Instant::now();
        }
        server.keep(&mut session, |cluster| map.is_free(cluster), renew);
    }
}

/// Waits until a descriptor is readable or at its end, or the time is over. Returns which are.
fn readable<const N: usize>(fds: [RawFd; N], within: Option<Duration>) -> io::Result<[bool; N]> {
    let mut polls = fds.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    let ms = within.map_or(-1, |within| within.as_millis() as libc::c_int);
    // SAFETY: `N` pollfds of ours, which outlive the call.
    match unsafe { libc::poll(polls.as_mut_ptr(), N as libc::nfds_t, ms) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(polls.map(|poll| poll.revents != 0)),
    }
}

/// The body of a thread.
type Body = Box<dyn FnOnce() + Send>;

fn start(body: Body) -> io::Result<()> {
    thread("uzswap-swap", body)
}

fn accept(listener: &UnixListener, mut door: Door) {
    loop {
        let fds = std::iter::once(listener.as_raw_fd()).chain(door.unused.iter().map(|unused| unused.0.as_raw_fd()));
        let mut polls: Vec<_> = fds.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
        // SAFETY: as many pollfds as said, all ours.
        if unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, -1) } < 0 {
            continue;
        }
        for i in (0..door.unused.len()).rev().filter(|i| polls[i + 1].revents != 0) {
            door.serve(i, start);
        }
        let comes = polls[0].revents != 0;
        door.starved &= comes;
        let full = door.is_full();
        if comes && !door.admit(full, || listener.accept().map(|(stream, _)| stream)) {
            // Until a connection is quiet for a moment, or ends.
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Admits connections and hands them to threads.
struct Door {
    server: Arc<Server>,
    map: &'static ClusterMap,
    geometry: Geometry,
    crowd: Arc<Crowd>,
    /// Connections without a thread, and since when each has been quiet. Most were never used.
    unused: Vec<(UnixStream, Instant)>,
    /// There was no descriptor for the last one that came, and no idle one to close.
    starved: bool,
}

impl Door {
    /// Gives an unused connection on which a request has come to a thread of its own. If the thread cannot be started, answers
    /// here and keeps the connection for its next request.
    ///
    /// The story: if no thread could be started the connection was closed. Where the program had all the threads that it may have
    /// (`pids.max`), its processes' requests failed on each new connection as well: a read failed four times within milliseconds,
    /// and its page was lost.
    fn serve(&mut self, i: usize, start: impl FnOnce(Body) -> io::Result<()>) {
        let (map, geometry, stream) = (self.map, self.geometry, self.unused.remove(i).0);
        let (server, crowd) = (Arc::clone(&self.server), Arc::clone(&self.crowd));
        let (give, take) = mpsc::channel();
        self.crowd.used.fetch_add(1, Relaxed);
        let started = start(Box::new(move || {
            if let Ok(stream) = take.recv() {
                let _ = Member { stream, session: Session::new(&server), map, geometry, crowd: &crowd }.serve();
            }
            crowd.used.fetch_sub(1, Relaxed);
        }));
        if started.is_ok() {
            let _ = give.send(stream);
        } else {
            self.crowd.used.fetch_sub(1, Relaxed);
            self.unused.extend(self.answer_here(stream).ok().map(|stream| (stream, Instant::now())));
        }
    }

    /// Carries out one request and hands the connection back. Closes it if the member is stopped in the middle of the request.
    fn answer_here(&self, stream: UnixStream) -> io::Result<UnixStream> {
        let (map, geometry, crowd) = (self.map, self.geometry, &*self.crowd);
        let within =
            |stream: &UnixStream, limit| stream.set_read_timeout(limit).and_then(|()| stream.set_write_timeout(limit));
        within(&stream, Some(self.server.address().timeout))?;
        let mut member = Member { stream, session: Session::new(&self.server), map, geometry, crowd };
        member.answer(&mut Vec::new())?;
        within(&member.stream, None)?;
        Ok(member.stream)
    }

    /// Whether there are as many connections as there may be; tells the threads that use one.
    fn is_full(&self) -> bool {
        let full = self.starved || self.unused.len() + self.crowd.used.load(Relaxed) >= descriptors::most() / 2;
        self.crowd.set_full(full);
        full
    }

    /// Admits a connection; returns false if it has to wait.
    ///
    /// If there are too many, this closes one that was never used, but not one that has just come: its member is about to use it,
    /// and takes a second closed connection for an error.
    ///
    /// The story: idle connections to the server took more than their half of the descriptors. The members had not too many, so
    /// none was told to leave: each had a quiet connection, and waited for an answer on its next one, which could not be
    /// admitted.
    fn admit(&mut self, full: bool, accept: impl FnOnce() -> io::Result<UnixStream>) -> bool {
        if full && self.unused.first().is_some_and(|unused| unused.1.elapsed() >= QUIET) {
            self.unused.remove(0);
        } else if full && !self.starved {
            return false;
        }
        match accept() {
            Ok(stream) => {
                self.unused.push((stream, Instant::now()));
                self.starved = false;
            }
            Err(_) => self.starved = !self.server.give_back(),
        }
        !self.starved
    }
}

/// The connections of all members.
struct Crowd {
    /// Connections in use, each with a thread.
    used: AtomicUsize,
    /// Whether there are as many as there may be.
    full: AtomicBool,
    /// Readable while `full`: threads with quiet connections wait for it.
    told: OwnedFd,
}

impl Crowd {
    fn new() -> io::Result<Self> {
        let told = eventfd::create().map_err(io::Error::from_raw_os_error)?;
        // SAFETY: the kernel has just returned this descriptor to us; nobody else owns it.
        let told = unsafe { OwnedFd::from_raw_fd(told) };
        Ok(Self { used: AtomicUsize::new(0), full: AtomicBool::new(false), told })
    }

    /// Only one thread calls this.
    fn set_full(&self, full: bool) {
        match (self.full.swap(full, Relaxed), full) {
            (false, true) => eventfd::raise(self.told.as_raw_fd()),
            (true, false) => _ = eventfd::take(self.told.as_raw_fd()),
            _ => {}
        }
    }
}

/// A member's connection.
struct Member<'a> {
    crowd: &'a Crowd,
    stream: UnixStream,
    session: Session<'a>,
    map: &'static ClusterMap,
    geometry: Geometry,
}

impl Member<'_> {
    /// Waits until a request comes or the member ends; returns false if there are too many connections and the member stays quiet
    /// for a moment.
    ///
    /// The story: each thread with a used connection woke once a second to see whether there were too many.
    fn is_asked(&self) -> io::Result<bool> {
        let stream = self.stream.as_raw_fd();
        loop {
            let [asked, _] = readable([stream, self.crowd.told.as_raw_fd()], None)?;
            if asked || readable([stream], Some(QUIET))? == [true] {
                return Ok(true);
            }
            if self.crowd.full.load(Relaxed) {
                return Ok(false);
            }
        }
    }

    /// Serves requests until the member ends or makes an invalid one.
    fn serve(&mut self) -> io::Result<()> {
        let mut buffer = Vec::new();
        while self.is_asked()? {
            self.answer(&mut buffer)?;
        }
        Ok(())
    }

    /// Carries out the next request.
    fn answer(&mut self, buffer: &mut Vec<u8>) -> io::Result<()> {
        let mut request = [0; Request::BYTES];
        self.stream.read_exact(&mut request)?;
        let request = Request::from_bytes(&request);
        let (len, shift) = (request.len as usize, self.geometry.cluster_shift);
        let (cluster, within) = (request.at >> shift, (request.at & ((1 << shift) - 1)) as usize);
        let fits = cluster < u64::from(self.geometry.clusters) && len > 0 && within + len <= 1 << shift;
        if !fits {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let cluster = cluster as u32;
        buffer.resize(len, 0);
        let bytes = &mut buffer[..];
        let done = match request.op {
            OP_READ => self.session.read(cluster, within, bytes),
            OP_WRITE => {
                self.stream.read_exact(bytes)?;
                let (row, owner) = (request.row as usize, request.owner);
                self.session.write(cluster, within, bytes, || self.map.is_claimed_by(cluster, row, owner))
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        };
        let status = done.err().unwrap_or(0);
        self.stream.write_all(&status.to_ne_bytes())?;
        if status == 0 && request.op == OP_READ {
            self.stream.write_all(bytes)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::address::Address;
    use crate::remote::nodes::lock;
    use crate::remote::server::tests::{answering, answering_by};
    use std::net::TcpListener;
    use uzswap_sys::thread::gettid;

    /// How often a thread has gone to sleep, and whether it is asleep.
    fn sleeps(tid: i32) -> (u64, bool) {
        let status = std::fs::read_to_string(format!("/proc/self/task/{tid}/status")).unwrap();
        let field = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).unwrap().trim();
        (field("voluntary_ctxt_switches:").parse().unwrap(), field("State:").starts_with('S'))
    }

    fn server_at(port: u16) -> Server {
        Server::unasked(Address::parse(&format!("redis://127.0.0.1:{port}/0?size=1G")).unwrap()).unwrap()
    }

    fn no_clusters() -> &'static ClusterMap {
        // SAFETY: the map consists of atomics, for which zeros are valid.
        Box::leak(unsafe { Box::<ClusterMap>::new_zeroed().assume_init() })
    }

    /// A door with connections that have been quiet for a while.
    fn door(server: &Arc<Server>, crowd: &Arc<Crowd>, unused: Vec<UnixStream>) -> Door {
        let unused = unused.into_iter().map(|stream| (stream, Instant::now() - QUIET)).collect();
        let (server, crowd, geometry) = (Arc::clone(server), Arc::clone(crowd), Geometry::of(1 << 30).unwrap());
        Door { server, map: no_clusters(), geometry, crowd, unused, starved: false }
    }

    /// See [`Gateway::in_dir`].
    #[test]
    fn a_socket_is_made_however_long_its_directorys_name_is() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("long".repeat(50));
        std::fs::create_dir(&dir).unwrap();
        let gateway = Gateway::in_dir(server_at(1), &dir).unwrap();
        drop(top);
        let member = UnixStream::connect(format!("/proc/self/fd/{}", gateway.fd())).unwrap();
        assert!(gateway.listener.accept().is_ok());
        drop(member);
    }

    /// See [`Door::serve`].
    #[test]
    fn what_is_asked_where_there_is_no_thread_for_it_is_answered() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Arc::new(server_at(listener.local_addr().unwrap().port()));
        answering_by(listener, |command| if command.starts_with("GETRANGE") { "$4\r\npage\r\n" } else { ":1\r\n" });
        let (crowd, (stream, member)) = (Arc::new(Crowd::new().unwrap()), UnixStream::pair().unwrap());
        let mut door = door(&server, &crowd, vec![stream]);
        let ask = |door: &mut Door, mut member: &UnixStream, op: u32, has_thread: bool| {
            let request = Request { op, len: 4, at: 0, owner: 0, row: 0 };
            member.write_all(&request.to_bytes()).unwrap();
            door.serve(
                0,
                |body| if has_thread { start(body) } else { Err(io::Error::from_raw_os_error(libc::EAGAIN)) },
            );
            let mut answer = [0; 8];
            member.read_exact(&mut answer).map(|()| answer)
        };
        let page = *b"\0\0\0\0page";
        for _ in 0..2 {
            assert_eq!(ask(&mut door, &member, OP_READ, false).unwrap(), page);
            assert_eq!((door.unused.len(), crowd.used.load(Relaxed)), (1, 0));
        }
        // Once threads can be started again, the connection gets one.
        assert_eq!(ask(&mut door, &member, OP_READ, true).unwrap(), page);
        assert_eq!((door.unused.len(), crowd.used.load(Relaxed)), (0, 1));
        // An invalid request ends the connection.
        let (stream, other) = UnixStream::pair().unwrap();
        door.unused.push((stream, Instant::now()));
        assert!(ask(&mut door, &other, 7, false).is_err() && door.unused.is_empty());
    }

    /// See [`Door::admit`].
    #[test]
    fn who_is_not_asked_leaves_when_there_is_no_descriptor_for_another() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Arc::new(server_at(listener.local_addr().unwrap().port()));
        answering(listener);
        Session::new(&server).on(&server.nodes.named()[0], false, |con| redis::cmd("PING").query::<i64>(con)).unwrap();
        assert_eq!(lock(&server.idle).len(), 1, "a connection that nobody uses any more");
        let crowd = Arc::new(Crowd::new().unwrap());
        let (pair, unused) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let mut door = door(&server, &crowd, vec![pair.0, unused.0]);
        let (mut quiet, mut unused) = (pair.1, unused.1);
        door.serve(0, start);
        assert!(!door.is_full());
        let none = || Err(io::Error::from_raw_os_error(libc::EMFILE));
        // First an idle connection to the server is closed, and admission is tried again at once.
        assert!(door.admit(false, none));
        assert!(lock(&server.idle).is_empty() && !door.is_full());
        // Then the one that was never used.
        assert!(!door.admit(false, none));
        assert!(door.is_full() && !door.admit(true, none));
        assert_eq!((unused.read(&mut [0]).unwrap(), door.unused.len()), (0, 0));
        // Then the used one, after it was quiet for a moment.
        assert_eq!((quiet.read(&mut [0]).unwrap(), crowd.full.load(Relaxed)), (0, true));
        // Now a connection is admitted.
        let pair = UnixStream::pair().unwrap();
        assert!(door.admit(true, || Ok(pair.0)));
        assert!(!door.is_full() && !crowd.full.load(Relaxed));
        // One that has just come does not leave for the next one.
        assert!(!door.admit(true, || unreachable!()));
        assert_eq!(door.unused.len(), 1);
    }

    /// See [`Member::is_asked`].
    #[test]
    fn who_is_not_asked_sleeps_until_there_are_too_many() {
        let crowd = Crowd::new().unwrap();
        let (server, map) = (server_at(1), no_clusters());
        let (stream, mut other) = UnixStream::pair().unwrap();
        let geometry = Geometry::of(1 << 30).unwrap();
        let member = Member { crowd: &crowd, stream, session: Session::new(&server), map, geometry };
        let (send, receive) = mpsc::channel();
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                send.send(gettid()).unwrap();
                let first = member.is_asked().unwrap();
                (&member.stream).read_exact(&mut [0]).unwrap();
                (first, member.is_asked().unwrap())
            });
            let tid = receive.recv().unwrap();
            while !sleeps(tid).1 {
                std::thread::yield_now();
            }
            let before = sleeps(tid);
            // The test: nothing happens meanwhile.
            std::thread::sleep(QUIET * 5 / 2);
            assert_eq!(sleeps(tid), before);
            other.write_all(b"x").unwrap();
            crowd.set_full(true);
            assert_eq!(thread.join().unwrap(), (true, false));
            crowd.set_full(false);
            assert_eq!(readable([crowd.told.as_raw_fd()], Some(Duration::ZERO)).unwrap(), [false]);
        });
    }
}

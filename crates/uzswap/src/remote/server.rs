//! The server: what of the swap file is in which key, and what is done when it does not answer.
//!
//! ```text
//! uzswap:RUN:N      cluster N, a string as long as what was written to it        SETRANGE, GETRANGE, UNLINK
//! ```
//! `RUN` is drawn for each run, so runs share a server. Each write renews the key's time to live; the keeper renews it for
//! keys that are not written to (`Server::keep`), drops those of clusters that nobody has any more, and at the end all.
//!
//! A connection that failed or did not answer is not used again, and the operation is tried by a new one, with pauses that
//! double, until its time is over; from then on the server is taken for dead, and each operation is tried once only, until
//! one succeeds. What the server refuses (no memory, no permission) is not tried again. A block that is not there or too
//! short is an error, never zeros; what else may be wrong with it, its process finds out.
//!
//! A write given up may still be under way: the server may be asleep with the command in its buffer. It must not overtake
//! a later write to the same place, so before anything else is written the connection it was on is ended (CLIENT KILL):
//! then it has been carried out by then, or never is. (Where that is not permitted such a write would be found out as a
//! wrong block.)

use super::address::Address;
use redis::{Connection, ErrorKind, RedisError, RedisResult, ServerErrorKind};
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::time::{Duration, Instant};

/// Keys in one round trip of the keeper.
const BATCH: usize = 500;
/// First pause between tries, and the longest.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long the server is asked to forget everything, at the end.
const FAREWELL: Duration = Duration::from_secs(3);

/// What all connections to the server share.
pub struct Server {
    client: redis::Client,
    address: Address,
    run: String,
    /// It was given up: operations are tried once.
    down: AtomicBool,
    /// The run is over: nothing more is written.
    over: AtomicBool,
    /// Clusters that have a key.
    written: Mutex<BTreeSet<u32>>,
    /// Held while a cluster is written to or its key dropped, by the cluster's number.
    locks: Vec<Mutex<()>>,
    /// Connections with a write that was given up.
    abandoned: Mutex<Vec<i64>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Server {
    /// Tries the server out. The error is one sentence.
    pub fn new(address: Address) -> Result<Self, String> {
        let client = redis::Client::open(address.url.as_str())
            .map_err(|e| format!("the address of the swap server is wrong: {}", said(&e)))?;
        let mut run = [0; 8];
        uzswap_sys::raw::random(&mut run).map_err(|_| "the kernel gives no random numbers".to_owned())?;
        let run = run.iter().map(|b| format!("{b:02x}")).collect();
        let locks = (0..256).map(|_| Mutex::new(())).collect();
        let server = Self {
            client,
            address,
            run,
            down: AtomicBool::new(false),
            over: AtomicBool::new(false),
            written: Mutex::default(),
            locks,
            abandoned: Mutex::default(),
        };
        server.try_out()?;
        Ok(server)
    }

    fn try_out(&self) -> Result<(), String> {
        let mut session = Session::new(self);
        let failed = |e: &RedisError| format!("the swap server cannot be used: {}", said(e));
        let con = session.connection(self.address.timeout).map_err(|e| failed(&e))?;
        let info: String = redis::cmd("INFO").arg("memory").query(con).map_err(|e| failed(&e))?;
        let field = |name: &str| info.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
        let (most, policy) = (field("maxmemory").unwrap_or("0"), field("maxmemory_policy").unwrap_or("noeviction"));
        if most != "0" && policy != "noeviction" {
            return Err(format!(
                "the swap server throws keys away when its memory is full (maxmemory-policy {policy}), and pages would be lost: set it to noeviction"
            ));
        }
        let key = format!("uzswap:{}:try", self.run);
        let (_, _, back): (i64, i64, Vec<u8>) = redis::pipe()
            .cmd("SETRANGE")
            .arg(&key)
            .arg(3)
            .arg(b"try")
            .cmd("EXPIRE")
            .arg(&key)
            .arg(60)
            .cmd("GETRANGE")
            .arg(&key)
            .arg(3)
            .arg(5)
            .query(con)
            .map_err(|e| failed(&e))?;
        let _: RedisResult<i64> = redis::cmd("UNLINK").arg(&key).query(con);
        if back == b"try" { Ok(()) } else { Err("the swap server does not keep what it is given".to_owned()) }
    }

    /// What it was asked to take.
    pub fn address(&self) -> &Address {
        &self.address
    }

    fn key(&self, cluster: u32) -> String {
        format!("uzswap:{}:{cluster}", self.run)
    }

    fn lock_of(&self, cluster: u32) -> &Mutex<()> {
        &self.locks[cluster as usize % self.locks.len()]
    }

    /// The keeper's round: drops keys of clusters that are free, and renews the others' time when `renew`. What fails is
    /// done the next time.
    pub fn keep(&self, session: &mut Session, is_free: impl Fn(u32) -> bool, renew: bool) {
        let all: Vec<u32> = lock(&self.written).iter().copied().collect();
        for cluster in all.iter().copied().filter(|c| is_free(*c)) {
            let _held = lock(self.lock_of(cluster));
            // (Who claims it from now on writes to it after us.)
            if is_free(cluster)
                && session.once(|con| redis::cmd("UNLINK").arg(self.key(cluster)).query::<i64>(con)).is_ok()
            {
                lock(&self.written).remove(&cluster);
            }
        }
        for some in all.chunks(BATCH).filter(|_| renew) {
            let mut pipe = redis::pipe();
            some.iter().for_each(|c| {
                pipe.cmd("EXPIRE").arg(self.key(*c)).arg(self.address.ttl).ignore();
            });
            let _ = session.once(|con| pipe.query::<()>(con));
        }
    }

    /// The run is over: drops all keys. Returns how many may be left, to expire.
    pub fn end(&self) -> usize {
        self.over.store(true, SeqCst);
        // Writes under way end before we go on; others see that it is over.
        self.locks.iter().for_each(|l| drop(lock(l)));
        let (mut session, until) = (Session::new(self), Instant::now() + FAREWELL);
        let mut left: Vec<u32> = std::mem::take(&mut *lock(&self.written)).into_iter().collect();
        while !left.is_empty() && Instant::now() < until {
            let some = left.len() - left.len().min(BATCH);
            let keys: Vec<String> = left[some..].iter().map(|c| self.key(*c)).collect();
            if session.once(|con| redis::cmd("UNLINK").arg(&keys).query::<i64>(con)).is_ok() {
                left.truncate(some);
            } else {
                std::thread::sleep(PAUSE * 10);
            }
        }
        left.len()
    }
}

/// A connection to the server, or none just now.
pub struct Session<'a> {
    server: &'a Server,
    con: Option<(Connection, i64)>,
}

impl<'a> Session<'a> {
    /// Not connected yet.
    pub fn new(server: &'a Server) -> Self {
        Self { server, con: None }
    }

    fn connection(&mut self, within: Duration) -> RedisResult<&mut Connection> {
        if self.con.is_none() {
            let mut con = self.server.client.get_connection_with_timeout(within)?;
            con.set_read_timeout(Some(within))?;
            con.set_write_timeout(Some(within))?;
            let id = redis::cmd("CLIENT").arg("ID").query(&mut con).unwrap_or(-1);
            self.con = Some((con, id));
        }
        Ok(&mut self.con.as_mut().expect("made above").0)
    }

    /// One try.
    fn once<T>(&mut self, op: impl FnOnce(&mut Connection) -> RedisResult<T>) -> RedisResult<T> {
        let within = (self.server.address.timeout / 3).max(Duration::from_millis(200));
        let con = self.connection(within)?;
        let done = op(con);
        if done.as_ref().is_err_and(|e| !is_refusal(e)) {
            self.con = None;
        }
        done
    }

    /// Tries until it succeeds, is refused, or the time is over. The error is an error number.
    fn persist<T>(&mut self, mut op: impl FnMut(&mut Session) -> Result<T, Failure>) -> Result<T, i32> {
        let until = Instant::now() + self.server.address.timeout;
        let mut pause = PAUSE;
        loop {
            match op(self) {
                Ok(value) => {
                    self.server.down.store(false, Relaxed);
                    return Ok(value);
                }
                Err(Failure::Refused(errno)) => return Err(errno),
                Err(Failure::Broken) => {}
            }
            let give_up = self.server.over.load(SeqCst) || self.server.down.load(Relaxed);
            if give_up || Instant::now() + pause >= until {
                self.server.down.store(true, Relaxed);
                return Err(libc::EIO);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Reads a part of a cluster into `out`.
    pub fn read(&mut self, cluster: u32, at: usize, out: &mut [u8]) -> Result<(), i32> {
        let (key, last) = (self.server.key(cluster), at + out.len() - 1);
        let get = |con: &mut Connection| redis::cmd("GETRANGE").arg(&key).arg(at).arg(last).query::<Vec<u8>>(con);
        let got = self.persist(|s| s.once(get).map_err(Failure::from))?;
        if got.len() != out.len() {
            return Err(libc::EIO);
        }
        out.copy_from_slice(&got);
        Ok(())
    }

    /// Writes a part of a cluster, if `may`: asked each time it is tried.
    pub fn write(&mut self, cluster: u32, at: usize, bytes: &[u8], may: impl Fn() -> bool) -> Result<(), i32> {
        let server = self.server;
        let _held = lock(server.lock_of(cluster));
        let mut pipe = redis::pipe();
        pipe.cmd("SETRANGE").arg(server.key(cluster)).arg(at).arg(bytes).ignore();
        pipe.cmd("EXPIRE").arg(server.key(cluster)).arg(server.address.ttl).ignore();
        self.persist(|s| {
            if server.over.load(SeqCst) || !may() {
                return Err(Failure::Refused(libc::EIO));
            }
            s.end_abandoned()?;
            lock(&server.written).insert(cluster);
            let id = s.con.as_ref().map(|(_, id)| *id);
            let done = s.once(|con| pipe.query::<()>(con));
            if let (None, Some(id)) = (&s.con, id) {
                lock(&server.abandoned).push(id);
            }
            done.map_err(Failure::from)
        })
    }

    /// Ends the connections on which a write was given up.
    fn end_abandoned(&mut self) -> Result<(), Failure> {
        // (There is a connection from here on, so its number is known when the write fails.)
        self.once(|_| Ok(()))?;
        let ids: Vec<i64> = lock(&self.server.abandoned).iter().copied().filter(|id| *id >= 0).collect();
        for id in ids {
            match self.once(|con| redis::cmd("CLIENT").arg("KILL").arg("ID").arg(id).query::<i64>(con)) {
                Err(e) if !is_refusal(&e) => return Err(e.into()),
                _ => lock(&self.server.abandoned).retain(|i| *i != id),
            }
        }
        Ok(())
    }
}

/// Why a try failed.
enum Failure {
    /// For good, with this error number.
    Refused(i32),
    /// It may go better the next time.
    Broken,
}

impl From<RedisError> for Failure {
    fn from(e: RedisError) -> Self {
        let refusal = is_refusal(&e);
        let errors = e.into_server_errors().unwrap_or_default();
        match refusal {
            true if errors.iter().any(|(_, e)| e.code() == "OOM") => Self::Refused(libc::ENOSPC),
            true => Self::Refused(libc::EIO),
            false => Self::Broken,
        }
    }
}

/// Whether the server answered, and the answer is no. (Not while it loads its data, or changes its role.)
fn is_refusal(e: &RedisError) -> bool {
    use ServerErrorKind as Kind;
    match e.kind() {
        ErrorKind::Server(
            Kind::BusyLoading | Kind::TryAgain | Kind::MasterDown | Kind::ClusterDown | Kind::ReadOnly,
        ) => false,
        ErrorKind::Server(_) | ErrorKind::Extension => true,
        _ => false,
    }
}

/// What went wrong, in a half-sentence.
fn said(e: &RedisError) -> String {
    let text = e.to_string();
    text.split(" (os error").next().unwrap_or_default().trim_end_matches('.').to_owned()
}

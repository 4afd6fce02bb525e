//! A session: tries an operation until it succeeds or must be given up.
//!
//! ```text
//! persist   until it succeeds, is refused, or its time is over; with pauses that double
//!   once      the node that has the key, and wherever it sends us
//!     on        one try at one node, by a connection that nobody else uses just then, and not again when it failed
//! ```
//! When an operation's time is over its node is taken for dead: each operation there is tried only once, until one succeeds. What
//! the server refuses (no memory, no permission) is not tried again. After each failure a cluster is asked for its slots anew, as
//! nodes take over from each other.
//!
//! A write that was given up may still be under way: the server may be asleep with the command in its buffer. It must not
//! overtake a later write to the same place. So before anything else is written to that node, the write's connection is ended
//! (CLIENT KILL): it has been carried out by then, or never will be. (If CLIENT KILL is not permitted, such a write would show as
//! a wrong block. A node that has lost a slot to another refuses late writes to it.)

use super::nodes::{Name, Node, lock, redirect_of};
use super::server::Server;
use redis::{Connection, ErrorKind, Pipeline, RedisError, RedisResult, ServerErrorKind, Value};
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

/// First pause between tries, and the longest.
pub(super) const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The most redirects in a row that an operation follows.
const MOST_REDIRECTS: usize = 8;
/// The error code of a server that runs a script; the client library has no name for it.
const BUSY: &str = "BUSY";
/// How many nodes may fail to tell the slots before the operation itself is tried again.
const MOST_IN_VAIN: usize = 2;

/// Commands for one key, sent together to the node that has its slot or is to take it over.
pub(super) struct Commands {
    commands: Vec<redis::Cmd>,
    /// Whether they change the key.
    pub changes: bool,
}

impl Commands {
    /// A command that only reads.
    pub fn reading(command: redis::Cmd) -> Self {
        Self { commands: vec![command], changes: false }
    }

    /// Commands that write.
    pub fn writing(commands: impl Into<Vec<redis::Cmd>>) -> Self {
        Self { commands: commands.into(), changes: true }
    }

    /// Sends them, each after ASKING if the slot is still on its way to the node. Returns the answer to the first.
    fn send(&self, con: &mut Connection, asking: bool) -> RedisResult<Value> {
        let mut pipe = Pipeline::with_capacity(2 * self.commands.len());
        for command in &self.commands {
            if asking {
                pipe.cmd("ASKING").ignore();
            }
            pipe.add_command(command.clone());
        }
        let answers: Vec<Value> = pipe.query(con)?;
        answers.into_iter().next().ok_or_else(|| (ErrorKind::UnexpectedReturnType, "no answer").into())
    }
}

/// A user of the nodes. Sessions share connections: as many are open as were ever used at once.
pub struct Session<'a> {
    server: &'a Server,
    /// How long one try may take.
    within: Duration,
}

/// A connection that nobody uses at the moment.
pub(super) struct Idle {
    node: Arc<Node>,
    con: Connection,
    /// Its name at the server, if the server tells.
    name: Option<Name>,
}

impl<'a> Session<'a> {
    /// A session that is not connected yet.
    pub fn new(server: &'a Server) -> Self {
        Self { server, within: (server.address().timeout / 3).max(Duration::from_millis(200)) }
    }

    /// Limits each try to this time. Existing connections keep their timeout, so the caller must have closed them.
    pub(super) fn of_tries(self, most: Duration) -> Self {
        Self { within: self.within.min(most), ..self }
    }

    fn connection(&self, node: &Arc<Node>) -> RedisResult<Idle> {
        let mut idle = lock(&self.server.idle);
        if let Some(i) = idle.iter().rposition(|idle| Arc::ptr_eq(&idle.node, node)) {
            return Ok(idle.swap_remove(i));
        }
        drop(idle);
        let mut con = self.server.nodes.connect(node, self.within)?;
        let mut name = None;
        // Before Redis 6.2 there is only the second.
        for what in ["INFO", "ID"] {
            match redis::cmd("CLIENT").arg(what).query::<String>(&mut con) {
                Err(e) if !is_refusal(&e) => return Err(e),
                said => name = name.or_else(|| Name::parse(&said.ok()?)),
            }
            if name.is_some() {
                break;
            }
        }
        Ok(Idle { node: Arc::clone(node), con, name })
    }

    /// Runs `op` on a connection to a node. If it fails, drops this and all idle connections to the node; otherwise others may
    /// use this one afterwards.
    fn by_connection<T>(
        &self,
        node: &Arc<Node>,
        op: impl FnOnce(&mut Connection) -> RedisResult<T>,
        failed: impl FnOnce(Option<Name>),
    ) -> RedisResult<T> {
        let mut taken = self.connection(node)?;
        let done = op(&mut taken.con);
        let mut idle = lock(&self.server.idle);
        if done.as_ref().is_err_and(|e| !is_refusal(e)) {
            idle.retain(|idle| !Arc::ptr_eq(&idle.node, node));
            failed(taken.name);
        } else {
            idle.push(taken);
        }
        done
    }

    /// One try at a node.
    pub(super) fn on<T>(
        &mut self,
        node: &Arc<Node>,
        changes: bool,
        op: impl FnOnce(&mut Connection) -> RedisResult<T>,
    ) -> RedisResult<T> {
        if changes {
            self.end_abandoned(node)?;
        }
        self.by_connection(node, op, |name| lock(&node.abandoned).extend(name.filter(|_| changes)))
    }

    /// Ends the connections to a node on which a write was given up.
    fn end_abandoned(&mut self, node: &Arc<Node>) -> RedisResult<()> {
        let names = lock(&node.abandoned).clone();
        for name in names {
            let mut kill = redis::cmd("CLIENT");
            kill.arg("KILL").arg("ID").arg(name.id);
            if let Some(addr) = &name.addr {
                kill.arg("ADDR").arg(addr);
            }
            match self.by_connection(node, |con| kill.query::<i64>(con), |_| {}) {
                Err(e) if !is_refusal(&e) => return Err(e),
                _ => lock(&node.abandoned).retain(|n| *n != name),
            }
        }
        Ok(())
    }

    /// One try at the node that has a key, and at the nodes that it redirects us to.
    pub(super) fn once(&mut self, key: &str, commands: &Commands) -> RedisResult<Value> {
        let (mut node, mut asking) = (self.server.nodes.of(key), false);
        let mut done = self.on(&node, commands.changes, |con| commands.send(con, asking));
        for _ in 0..MOST_REDIRECTS {
            let Some(to) = done.as_ref().err().and_then(redirect_of) else { break };
            (node, asking) = (self.server.nodes.redirected(&node, &to), to.ask);
            done = self.on(&node, commands.changes, |con| commands.send(con, asking));
        }
        done
    }

    /// Asks a cluster for its slots, unless that was just done.
    pub(super) fn look(&mut self) {
        let mut in_vain = 0;
        let nodes = if self.server.nodes.is_cluster() { self.server.nodes.to_be_asked() } else { Vec::new() };
        for node in nodes {
            if self.ask(&node).is_ok_and(|says| says) {
                return;
            }
            in_vain += 1;
            if in_vain == MOST_IN_VAIN {
                return;
            }
        }
    }

    /// Asks a node for the slots; returns whether it knows any.
    pub(super) fn ask(&mut self, node: &Arc<Node>) -> RedisResult<bool> {
        let answer = self.on(node, false, |con| redis::cmd("CLUSTER").arg("SLOTS").query::<Value>(con))?;
        Ok(self.server.nodes.learn(node, &answer))
    }

    /// Tries until the commands succeed, are refused, or the time is over; only while `may`, which is called before each try. The
    /// error is an errno.
    fn persist(&mut self, key: &str, commands: &Commands, may: impl Fn() -> bool) -> Result<Value, i32> {
        let server = self.server;
        let until = Instant::now() + server.address().timeout;
        let mut pause = PAUSE;
        loop {
            if !may() {
                return Err(libc::EIO);
            }
            match self.once(key, commands).map_err(Failure::from) {
                Ok(value) => {
                    server.nodes.of(key).down.store(false, Relaxed);
                    return Ok(value);
                }
                Err(Failure::Refused(errno)) => return Err(errno),
                // Without a time limit: the node is well, and other sessions will give back their connections. The idle
                // connections are to other nodes.
                Err(Failure::Starved) if !server.is_over() => {
                    if !server.give_back() {
                        std::thread::sleep(PAUSE);
                    }
                    continue;
                }
                Err(Failure::Starved | Failure::Broken) => {}
            }
            let node = server.nodes.of(key);
            self.look();
            let give_up = server.is_over() || node.down.load(Relaxed);
            if give_up || Instant::now() + pause >= until {
                node.down.store(true, Relaxed);
                return Err(libc::EIO);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Reads a part of a cluster into `out`. The error is an errno.
    pub fn read(&mut self, cluster: u32, at: usize, out: &mut [u8]) -> Result<(), i32> {
        let (key, last) = (self.server.key(cluster), at + out.len() - 1);
        let mut get = redis::cmd("GETRANGE");
        get.arg(&key).arg(at).arg(last);
        match self.persist(&key, &Commands::reading(get), || true)? {
            Value::BulkString(got) if got.len() == out.len() => {
                out.copy_from_slice(&got);
                Ok(())
            }
            _ => Err(libc::EIO),
        }
    }

    /// Writes a part of a cluster while `may`, which is called before each try. The error is an errno.
    pub fn write(&mut self, cluster: u32, at: usize, bytes: &[u8], may: impl Fn() -> bool) -> Result<(), i32> {
        let (server, key) = (self.server, self.server.key(cluster));
        let _held = server.hold(cluster);
        let (mut set, mut expire) = (redis::cmd("SETRANGE"), redis::cmd("EXPIRE"));
        set.arg(&key).arg(at).arg(bytes);
        expire.arg(&key).arg(server.address().ttl);
        let may = || !server.is_over() && may() && server.note_written(cluster);
        self.persist(&key, &Commands::writing([set, expire]), may).map(drop)
    }
}

/// Why a try failed.
enum Failure {
    /// The server refuses; with the errno to report.
    Refused(i32),
    /// The next try may succeed.
    Broken,
    /// This process has as many descriptors as it may have.
    Starved,
}

impl From<RedisError> for Failure {
    fn from(e: RedisError) -> Self {
        if is_starved(&e) {
            return Self::Starved;
        }
        if !is_refusal(&e) || redirect_of(&e).is_some() {
            return Self::Broken;
        }
        let errors = e.into_server_errors().unwrap_or_default();
        Self::Refused(if errors.iter().any(|(_, e)| e.code() == "OOM") { libc::ENOSPC } else { libc::EIO })
    }
}

/// Whether the server answered, and the answer is no. (It is not while it loads its data, changes its role, or runs a script.)
///
/// The story: while a script runs, a server answers everything else with BUSY. That counted as a refusal; four came within some
/// milliseconds, and pages were lost to a script that ran for a second.
fn is_refusal(e: &RedisError) -> bool {
    use ServerErrorKind as Kind;
    match e.kind() {
        ErrorKind::Server(
            Kind::BusyLoading | Kind::TryAgain | Kind::MasterDown | Kind::ClusterDown | Kind::ReadOnly,
        ) => false,
        ErrorKind::Server(_) => true,
        ErrorKind::Extension => {
            !e.clone().into_server_errors().is_some_and(|all| all.iter().any(|(_, e)| e.code() == BUSY))
        }
        _ => false,
    }
}

/// Whether there was no descriptor for a connection.
///
/// The story: a run with a hundred processes had none left, and the node that could not be connected to was taken for dead. Reads
/// there failed, and their pages were lost.
fn is_starved(e: &RedisError) -> bool {
    // The client wraps the cause in this way.
    let cause = e.source().and_then(|e| e.downcast_ref::<Arc<dyn Error + Send + Sync>>());
    let cause = cause.and_then(|e| e.downcast_ref::<std::io::Error>()).and_then(std::io::Error::raw_os_error);
    matches!(cause, Some(libc::EMFILE | libc::ENFILE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::address::Address;
    use crate::remote::server::tests::answering_by;
    use std::net::TcpListener;
    use std::sync::atomic::AtomicUsize;

    /// See [`is_refusal`].
    #[test]
    fn a_server_that_runs_a_script_is_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let address = Address::parse(&format!("redis://127.0.0.1:{port}?size=1G&timeout=60")).unwrap();
        let asked = Arc::new(AtomicUsize::new(0));
        let of_read = Arc::clone(&asked);
        let told = answering_by(listener, move |command| match command {
            _ if !command.starts_with("GETRANGE") => ":1\r\n",
            _ if of_read.fetch_add(1, Relaxed) < 3 => "-BUSY Redis is busy running a script.\r\n",
            _ => "$4\r\npage\r\n",
        });
        let (server, mut out) = (Server::unasked(address).unwrap(), [0; 4]);
        assert_eq!((Session::new(&server).read(7, 0, &mut out), &out), (Ok(()), b"page"));
        assert_eq!(asked.load(Relaxed), 4, "{:?}", lock(&told));
    }

    /// See [`Name`].
    #[test]
    fn of_a_write_that_was_given_up_the_connection_is_ended_and_no_other_with_its_number() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = Server::unasked(Address::parse(&format!("redis://127.0.0.1:{port}?size=1G")).unwrap()).unwrap();
        let told = answering_by(listener, |command| match command {
            "CLIENT INFO" => "$37\r\nid=7 addr=10.0.0.1:5000 laddr=x fd=8\n\r\n",
            _ => ":1\r\n",
        });
        let (node, mut session) = (server.nodes.named()[0].clone(), Session::new(&server));
        let gone = || RedisError::from(std::io::Error::from_raw_os_error(libc::ECONNRESET));
        assert!(session.on(&node, false, |_| Err::<(), _>(gone())).is_err());
        assert_eq!(*lock(&node.abandoned), [], "nothing was changed");
        assert!(session.on(&node, true, |_| Err::<(), _>(gone())).is_err());
        assert_eq!(session.on(&node, true, |con| redis::cmd("PING").query::<i64>(con)).unwrap(), 1);
        let kills: Vec<String> = lock(&told).iter().filter(|c| c.contains("KILL")).cloned().collect();
        assert_eq!((kills, lock(&node.abandoned).len()), (vec!["CLIENT KILL ID 7 ADDR 10.0.0.1:5000".to_owned()], 0));
        assert_eq!(Name::parse("7"), Some(Name { id: 7, addr: None }));
        assert_eq!(Name::parse(""), None);
    }

    #[test]
    fn that_there_are_no_descriptors_is_not_the_node_s_fault() {
        let of = |errno| Failure::from(RedisError::from(std::io::Error::from_raw_os_error(errno)));
        assert!([libc::EMFILE, libc::ENFILE].into_iter().all(|errno| matches!(of(errno), Failure::Starved)));
        assert!([libc::ECONNREFUSED, libc::ETIMEDOUT].into_iter().all(|errno| matches!(of(errno), Failure::Broken)));
    }
}

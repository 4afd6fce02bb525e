//! The server or cluster as a swap file: which part of the file is in which key, and what happens to keys that are no longer
//! needed.
//!
//! ```text
//! uzswap:RUN:N      cluster N, a string as long as what was written to it        SETRANGE, GETRANGE, UNLINK
//! ```
//! `RUN` is random for each run, so runs can share a server. Each write renews the key's time to live. The keeper
//! (`Server::keep`) renews it for keys that are not written to, and drops keys of free clusters; at the end it drops all of them.
//! "Cluster" here means one of the swap file, except in "Redis cluster", which spreads the keys over all nodes by their names.
//!
//! `session` handles nodes that do not answer, `nodes` knows which node has which key. A missing or short block is an error,
//! never zeros; the member's process finds out whatever else may be wrong with it.

use super::address::Address;
use super::nodes::{Node, Nodes, lock, redirect_of, said};
use super::session::{Commands, Idle, PAUSE, Session};
use redis::{Connection, RedisError};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Keys in one round trip of the keeper.
const BATCH: usize = 500;
/// How long, at the end, the server is asked to drop all keys; and how long it may take for each answer.
const FAREWELL: Duration = Duration::from_secs(3);
const LAST_TRY: Duration = Duration::from_secs(1);

/// State that all connections to the server share.
pub struct Server {
    pub(super) nodes: Nodes,
    address: Address,
    run: String,
    /// The run is over: write nothing more.
    over: AtomicBool,
    /// Connections that no session uses at the moment.
    pub(super) idle: Mutex<Vec<Idle>>,
    /// Clusters that have a key.
    written: Mutex<BTreeSet<u32>>,
    /// Clusters that are being written to, or whose keys are being dropped.
    held: Mutex<BTreeSet<u32>>,
    /// Signalled when a cluster leaves `held`.
    freed: Condvar,
}

/// Holds a cluster: while it lives, nobody else writes to the cluster or drops its key.
pub(super) struct Held<'a> {
    server: &'a Server,
    cluster: u32,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        lock(&self.server.held).remove(&self.cluster);
        self.server.freed.notify_all();
    }
}

impl Server {
    /// Connects to the server, or to all nodes of the cluster, and tries it out. The error is one sentence.
    pub fn new(address: Address) -> Result<Self, String> {
        let nodes = Nodes::new(&address)?;
        let mut run = [0; 8];
        uzswap_sys::raw::random(&mut run).map_err(|_| "the kernel gives no random numbers".to_owned())?;
        let run = run.iter().map(|b| format!("{b:02x}")).collect();
        let server = Self::of(nodes, address, run);
        server.try_out()?;
        Ok(server)
    }

    /// A server that nobody has connected to yet.
    fn of(nodes: Nodes, address: Address, run: String) -> Self {
        Self {
            nodes,
            address,
            run,
            over: AtomicBool::new(false),
            idle: Mutex::default(),
            written: Mutex::default(),
            held: Mutex::default(),
            freed: Condvar::new(),
        }
    }

    /// The same, from an address, for tests.
    #[cfg(test)]
    pub(super) fn unasked(address: Address) -> Result<Self, String> {
        Ok(Self::of(Nodes::new(&address)?, address, "run".to_owned()))
    }

    fn try_out(&self) -> Result<(), String> {
        let mut session = Session::new(self);
        let named = self.nodes.named();
        let mut reached = Err("no swap server is named".to_owned());
        for node in &named {
            // The other nodes are named in case this one cannot be reached.
            reached = self.is_cluster(&mut session, node).map(|is_one| (node, is_one)).map_err(|e| failed(&e));
            if reached.is_ok() {
                break;
            }
        }
        match reached? {
            (node, true) => {
                session.ask(node).map_err(|e| failed(&e))?;
                let unserved = self.nodes.unserved();
                if unserved > 0 || !self.nodes.is_cluster() {
                    return Err(format!(
                        "the swap servers' cluster is incomplete: {unserved} of its slots have no node"
                    ));
                }
            }
            (_, false) if named.len() > 1 => {
                return Err("several swap servers are named, but they are not a cluster: name one".to_owned());
            }
            _ => {}
        }
        self.nodes.serving().iter().try_for_each(|node| self.try_node(&mut session, node))
    }

    fn is_cluster(&self, session: &mut Session, node: &Arc<Node>) -> redis::RedisResult<bool> {
        let info: String = session.on(node, false, |con| redis::cmd("INFO").arg("cluster").query(con))?;
        Ok(info.lines().any(|line| line.trim_end() == "cluster_enabled:1"))
    }

    /// Checks that a node keeps what it is given.
    fn try_node(&self, session: &mut Session, node: &Arc<Node>) -> Result<(), String> {
        let info = |con: &mut Connection| redis::cmd("INFO").arg("memory").query::<String>(con);
        let info = session.on(node, false, info).map_err(|e| failed(&e))?;
        let field = |name: &str| info.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
        let (most, policy) = (field("maxmemory").unwrap_or("0"), field("maxmemory_policy").unwrap_or("noeviction"));
        if most != "0" && policy != "noeviction" {
            return Err(format!(
                "the swap server throws keys away when its memory is full (maxmemory-policy {policy}), and pages would be lost: set it to noeviction"
            ));
        }
        let keys = (0u32..).map(|i| format!("uzswap:{}:try{i}", self.run));
        let mut own = keys.filter(|key| Arc::ptr_eq(&self.nodes.of(key), node));
        let key = own.next().expect("a node that has slots has keys");
        let mut pipe = redis::pipe();
        pipe.cmd("SETRANGE").arg(&key).arg(3).arg(b"try").cmd("EXPIRE").arg(&key).arg(60);
        pipe.cmd("GETRANGE").arg(&key).arg(3).arg(5).cmd("UNLINK").arg(&key);
        let back = session.on(node, true, |con| pipe.query::<(i64, i64, Vec<u8>, i64)>(con)).map_err(|e| failed(&e))?;
        if back.2 == b"try" { Ok(()) } else { Err("the swap server does not keep what it is given".to_owned()) }
    }

    /// The address that it was made from.
    pub fn address(&self) -> &Address {
        &self.address
    }

    pub(super) fn key(&self, cluster: u32) -> String {
        format!("uzswap:{}:{cluster}", self.run)
    }

    /// Waits until nobody writes to a cluster or drops its key, and holds it.
    ///
    /// The story: all clusters shared 256 locks. A write to a node that did not answer held up writes to other nodes with the
    /// same lock, for the whole time limit.
    pub(super) fn hold(&self, cluster: u32) -> Held<'_> {
        let mut held = lock(&self.held);
        while !held.insert(cluster) {
            held = self.freed.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        Held { server: self, cluster }
    }

    /// Waits until all clusters held now have been released.
    fn await_held(&self) {
        let clusters = lock(&self.held).clone();
        clusters.into_iter().for_each(|cluster| drop(self.hold(cluster)));
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(SeqCst)
    }

    /// Called when there are no descriptors: closes an idle connection; returns whether there was one.
    pub(super) fn give_back(&self) -> bool {
        lock(&self.idle).pop().is_some()
    }

    /// Notes that a cluster is about to be written to. Returns true, for use in a condition.
    pub(super) fn note_written(&self, cluster: u32) -> bool {
        lock(&self.written).insert(cluster);
        true
    }

    /// The keeper's round: renews the keys' time to live if `renew`, and drops the keys of free clusters. What fails is done in
    /// the next round.
    ///
    /// The story: keys of free clusters came first, one by one. If a node did not answer, each of its keys took a third of the
    /// time limit, and meanwhile the keys on all other nodes expired.
    pub fn keep(&self, session: &mut Session, is_free: impl Fn(u32) -> bool, renew: bool) {
        let all: Vec<u32> = lock(&self.written).iter().copied().collect();
        let (free, used): (Vec<u32>, Vec<u32>) = all.into_iter().partition(|c| is_free(*c));
        if renew {
            self.renew(session, &used);
        }
        let mut silent: Vec<Arc<Node>> = Vec::new();
        for cluster in free {
            let node = self.nodes.of(&self.key(cluster));
            let given_up = node.down.load(Relaxed) && !renew;
            if given_up || silent.iter().any(|n| Arc::ptr_eq(n, &node)) {
                continue;
            }
            let _held = self.hold(cluster);
            // Whoever claims the cluster from now on writes to it after us.
            if !is_free(cluster) {
                continue;
            }
            if self.unlink(session, cluster) {
                lock(&self.written).remove(&cluster);
            } else {
                silent.push(node);
            }
        }
    }

    /// Renews the time to live of these clusters' keys.
    fn renew(&self, session: &mut Session, clusters: &[u32]) {
        let expire = |key: &String| {
            let mut expire = redis::cmd("EXPIRE");
            expire.arg(key).arg(self.address.ttl);
            expire
        };
        for (node, keys) in self.nodes.divide(clusters.iter().map(|c| self.key(*c))) {
            for some in keys.chunks(BATCH) {
                let mut pipe = redis::pipe();
                for key in some {
                    pipe.add_command(expire(key)).ignore();
                }
                // A connection that was idle for long may have been closed by the server; the second try uses a new one.
                let mut renewed = session.on(&node, false, |con| pipe.query::<()>(con));
                if renewed.as_ref().is_err_and(|e| redirect_of(e).is_none()) {
                    renewed = session.on(&node, false, |con| pipe.query::<()>(con));
                }
                match renewed {
                    Ok(()) => {}
                    // Some keys have moved to other nodes.
                    Err(e) if redirect_of(&e).is_some() => {
                        some.iter().for_each(|key| drop(session.once(key, &Commands::reading(expire(key)))));
                    }
                    // It would not answer for the other keys either.
                    Err(_) => break,
                }
            }
        }
    }

    fn unlink(&self, session: &mut Session, cluster: u32) -> bool {
        let key = self.key(cluster);
        let mut unlink = redis::cmd("UNLINK");
        unlink.arg(&key);
        session.once(&key, &Commands::writing([unlink])).is_ok()
    }

    /// Ends the run: drops all keys. Returns how many may be left, to expire.
    ///
    /// The story: each batch of keys was tried at a node that did not answer, for a third of the time limit, before the time was
    /// looked at. A command with a gigabyte there ended half a minute after its program.
    pub fn end(&self) -> usize {
        self.over.store(true, SeqCst);
        // Wait for writes under way; later ones see that the run is over.
        self.await_held();
        // Existing connections have the timeout that they were made with.
        lock(&self.idle).clear();
        let (mut session, until) = (Session::new(self).of_tries(LAST_TRY), Instant::now() + FAREWELL);
        let mut left: Vec<String> =
            std::mem::take(&mut *lock(&self.written)).into_iter().map(|c| self.key(c)).collect();
        while !left.is_empty() && Instant::now() < until {
            let mut failed = Vec::new();
            for (node, keys) in self.nodes.divide(left) {
                let mut parts = keys.chunks(BATCH);
                while let Some(some) = parts.next() {
                    let Err(e) = unlink_all(&mut session, &node, some) else { continue };
                    failed.extend_from_slice(some);
                    if redirect_of(&e).is_none() {
                        // It would not answer for the other keys either; nodes that do come first the next time.
                        node.down.store(true, Relaxed);
                        failed.extend(parts.by_ref().flatten().cloned());
                    }
                }
            }
            left = failed;
            if !left.is_empty() {
                session.look();
                std::thread::sleep(PAUSE * 10);
            }
        }
        left.len()
    }
}

fn unlink_all(session: &mut Session, node: &Arc<Node>, keys: &[String]) -> redis::RedisResult<()> {
    let mut pipe = redis::pipe();
    for key in keys {
        pipe.cmd("UNLINK").arg(key).ignore();
    }
    session.on(node, false, |con| pipe.query(con))
}

fn failed(e: &RedisError) -> String {
    format!("the swap server cannot be used: {}; look at the address after --swap, and whether it runs", said(e))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use redis::Value;
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    /// A node that accepts every command, and the commands it was sent.
    pub fn answering(listener: TcpListener) -> Arc<Mutex<Vec<String>>> {
        answering_by(listener, |_| ":1\r\n")
    }

    /// A node that answers by this function, and the commands it was sent.
    pub fn answering_by(
        listener: TcpListener,
        answer: impl Fn(&str) -> &'static str + Clone + Send + 'static,
    ) -> Arc<Mutex<Vec<String>>> {
        let told: Arc<Mutex<Vec<String>>> = Arc::default();
        let all = Arc::clone(&told);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut answers, told, answer) = (stream.unwrap(), Arc::clone(&all), answer.clone());
                let mut lines = BufReader::new(answers.try_clone().unwrap()).lines();
                std::thread::spawn(move || {
                    // *WORDS, and $LENGTH and the word for each.
                    while let Some(Ok(words)) = lines.next() {
                        let words: usize = words.trim_start_matches('*').parse().unwrap();
                        let all: Vec<String> = (0..2 * words).map(|_| lines.next().unwrap().unwrap()).collect();
                        let command = all.iter().skip(1).step_by(2).cloned().collect::<Vec<_>>().join(" ");
                        let answer = answer(&command);
                        lock(&told).push(command);
                        answers.write_all(answer.as_bytes()).unwrap();
                    }
                });
            }
        });
        told
    }

    /// A cluster of two nodes at these ports, each with half of the slots, and this timeout in seconds.
    fn cluster_of(ports: [u16; 2], timeout: u32) -> Server {
        let urls = ports.map(|port| format!("127.0.0.1:{port}")).join(",");
        let address = Address::parse(&format!("redis://{urls}?size=1G&timeout={timeout}&ttl=60")).unwrap();
        let nodes = Nodes::new(&address).unwrap();
        let part = |first: i64, last: i64, port: u16| {
            let node = Value::Array(vec![Value::BulkString(b"127.0.0.1".to_vec()), Value::Int(port.into())]);
            Value::Array(vec![Value::Int(first), Value::Int(last), node])
        };
        let slots = Value::Array(vec![part(0, 8191, ports[0]), part(8192, 16_383, ports[1])]);
        assert!(nodes.learn(&nodes.named()[0], &slots));
        Server::of(nodes, address, "run".to_owned())
    }

    /// See [`Server::keep`].
    #[test]
    fn a_node_that_does_not_answer_does_not_keep_the_others_keys_from_being_renewed() {
        let listeners = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let server = cluster_of([0, 1].map(|i| listeners[i].local_addr().unwrap().port()), 1);
        let [silent, other] = listeners;
        let told = answering(other);
        (0..40).for_each(|cluster| assert!(server.note_written(cluster)));
        let is_silent = |c: u32| Arc::ptr_eq(&server.nodes.of(&server.key(c)), &server.nodes.named()[0]);
        let of_silent = (0..40).filter(|c| is_silent(*c)).count();
        assert!((5..35).contains(&of_silent));
        let free = |c: u32| is_silent(c) || c.is_multiple_of(2);
        let mut session = Session::new(&server);
        server.keep(&mut session, free, true);
        silent.set_nonblocking(true).unwrap();
        let tries = || std::iter::from_fn(|| silent.accept().ok()).count();
        assert_eq!(tries(), 1, "for {of_silent} free clusters there");
        let commands = std::mem::take(&mut *lock(&told));
        let of = |name: &str| commands.iter().filter(|c| c.starts_with(name)).count();
        let expected = |freed: bool| (0..40).filter(|c| !is_silent(*c) && free(*c) == freed).count();
        assert_eq!((of("EXPIRE"), of("UNLINK")), (expected(false), expected(true)));
        assert_eq!(lock(&server.written).len(), 40 - expected(true), "those of the silent one are tried again");
        // A node that was given up is left alone until keys are renewed the next time.
        server.nodes.named()[0].down.store(true, Relaxed);
        server.keep(&mut session, free, false);
        assert_eq!(tries(), 0);
        server.keep(&mut session, free, true);
        assert_eq!(tries(), 1);
    }

    /// See [`Server::hold`].
    #[test]
    fn a_write_to_a_node_that_does_not_answer_holds_up_none_to_another() {
        let listeners = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let server = cluster_of([0, 1].map(|i| listeners[i].local_addr().unwrap().port()), 60);
        let [silent, other] = listeners;
        answering(other);
        let is_silent = |c: &u32| Arc::ptr_eq(&server.nodes.of(&server.key(*c)), &server.nodes.named()[0]);
        let held_up = (0..).find(is_silent).unwrap();
        // Those that shared a lock with it.
        let others: Vec<u32> = (held_up..4000).step_by(256).filter(|c| !is_silent(c)).collect();
        assert!(!others.is_empty());
        std::thread::scope(|threads| {
            let write = |cluster: u32| Session::new(&server).write(cluster, 0, b"page", || true);
            let first = threads.spawn(move || write(held_up));
            let asked = silent.accept().unwrap();
            others.iter().for_each(|cluster| assert_eq!(write(*cluster), Ok(()), "cluster {cluster}"));
            assert!(!first.is_finished(), "it was waited for");
            server.over.store(true, SeqCst);
            drop((asked, silent));
            assert_eq!(first.join().unwrap(), Err(libc::EIO));
        });
        assert!(lock(&server.held).is_empty());
    }

    /// See [`Server::end`].
    #[test]
    fn a_node_that_does_not_answer_is_not_waited_for_at_the_end() {
        let listeners = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let server = cluster_of([0, 1].map(|i| listeners[i].local_addr().unwrap().port()), 60);
        let [silent, other] = listeners;
        let told = answering(other);
        // Several batches for each node.
        (0..8 * BATCH as u32).for_each(|cluster| assert!(server.note_written(cluster)));
        let of = |node: usize| {
            let is_there = |c: &u32| Arc::ptr_eq(&server.nodes.of(&server.key(*c)), &server.nodes.named()[node]);
            (0..8 * BATCH as u32).filter(is_there).count()
        };
        let began = Instant::now();
        assert_eq!(server.end(), of(0));
        assert!(began.elapsed() < Duration::from_secs(15), "it took {:?}", began.elapsed());
        assert_eq!(lock(&told).iter().filter(|c| c.starts_with("UNLINK")).count(), of(1));
        silent.set_nonblocking(true).unwrap();
        let tries = std::iter::from_fn(|| silent.accept().ok()).count();
        assert!((1..=4).contains(&tries), "{tries}");
    }
}

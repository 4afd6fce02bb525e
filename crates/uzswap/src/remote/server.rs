//! The server, or the cluster: what of the swap file is in which key, and what is done with keys nobody needs.
//!
//! ```text
//! uzswap:RUN:N      cluster N, a string as long as what was written to it        SETRANGE, GETRANGE, UNLINK
//! ```
//! `RUN` is drawn for each run, so runs share a server. Each write renews the key's time to live; the keeper renews it for
//! keys that are not written to (`Server::keep`), drops those of clusters that nobody has any more, and at the end all.
//! In a Redis cluster (otherwise a cluster is one of the swap file here) the keys are spread over all nodes by their names.
//!
//! What is done when a node does not answer is in `session`, which node has which key in `nodes`. A block that is not there or
//! too short is an error, never zeros; what else may be wrong with it, its process finds out.

use super::address::Address;
use super::nodes::{Node, Nodes, lock, redirect_of, said};
use super::session::{Commands, PAUSE, Session};
use redis::{Connection, RedisError};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Keys in one round trip of the keeper.
const BATCH: usize = 500;
/// How long the server is asked to forget everything, at the end.
const FAREWELL: Duration = Duration::from_secs(3);

/// What all connections to the server share.
pub struct Server {
    pub(super) nodes: Nodes,
    address: Address,
    run: String,
    /// The run is over: nothing more is written.
    over: AtomicBool,
    /// Clusters that have a key.
    written: Mutex<BTreeSet<u32>>,
    /// Held while a cluster is written to or its key dropped, by the cluster's number.
    locks: Vec<Mutex<()>>,
}

impl Server {
    /// Tries the server out, or all nodes of the cluster. The error is one sentence.
    pub fn new(address: Address) -> Result<Self, String> {
        let nodes = Nodes::new(&address)?;
        let mut run = [0; 8];
        uzswap_sys::raw::random(&mut run).map_err(|_| "the kernel gives no random numbers".to_owned())?;
        let run = run.iter().map(|b| format!("{b:02x}")).collect();
        let locks = (0..256).map(|_| Mutex::new(())).collect();
        let server = Self { nodes, address, run, over: AtomicBool::new(false), written: Mutex::default(), locks };
        server.try_out()?;
        Ok(server)
    }

    fn try_out(&self) -> Result<(), String> {
        let mut session = Session::new(self);
        let named = self.nodes.named();
        let mut reached = Err("no swap server is named".to_owned());
        for node in &named {
            // (The others are named for when this one cannot be reached.)
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
                        "the swap servers' cluster is not whole: {unserved} of its slots have no node"
                    ));
                }
            }
            (_, false) if named.len() > 1 => {
                return Err("several swap servers are named, but they are no cluster: name one".to_owned());
            }
            _ => {}
        }
        self.nodes.serving().iter().try_for_each(|node| self.try_node(&mut session, node))
    }

    fn is_cluster(&self, session: &mut Session, node: &Arc<Node>) -> redis::RedisResult<bool> {
        let info: String = session.on(node, false, |con| redis::cmd("INFO").arg("cluster").query(con))?;
        Ok(info.lines().any(|line| line.trim_end() == "cluster_enabled:1"))
    }

    /// Whether a node keeps what it is given.
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

    /// What it was asked to take.
    pub fn address(&self) -> &Address {
        &self.address
    }

    pub(super) fn key(&self, cluster: u32) -> String {
        format!("uzswap:{}:{cluster}", self.run)
    }

    pub(super) fn lock_of(&self, cluster: u32) -> &Mutex<()> {
        &self.locks[cluster as usize % self.locks.len()]
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(SeqCst)
    }

    /// A cluster is about to be written to.
    pub(super) fn note_written(&self, cluster: u32) -> bool {
        lock(&self.written).insert(cluster);
        true
    }

    /// The keeper's round: drops keys of clusters that are free, and renews the others' time when `renew`. What fails is
    /// done the next time.
    pub fn keep(&self, session: &mut Session, is_free: impl Fn(u32) -> bool, renew: bool) {
        let all: Vec<u32> = lock(&self.written).iter().copied().collect();
        for cluster in all.iter().copied().filter(|c| is_free(*c)) {
            let _held = lock(self.lock_of(cluster));
            // (Who claims it from now on writes to it after us.)
            if is_free(cluster) && self.unlink(session, cluster) {
                lock(&self.written).remove(&cluster);
            }
        }
        if !renew {
            return;
        }
        let expire = |key: &String| {
            let mut expire = redis::cmd("EXPIRE");
            expire.arg(key).arg(self.address.ttl);
            expire
        };
        for (node, keys) in self.nodes.divide(all.iter().map(|c| self.key(*c))) {
            for some in keys.chunks(BATCH) {
                let mut pipe = redis::pipe();
                for key in some {
                    pipe.add_command(expire(key)).ignore();
                }
                let done = session.on(&node, false, |con| pipe.query::<()>(con));
                if done.is_err_and(|e| redirect_of(&e).is_some()) {
                    // (Some are elsewhere by now.)
                    some.iter().for_each(|key| drop(session.once(key, &Commands::reading(expire(key)))));
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

    /// The run is over: drops all keys. Returns how many may be left, to expire.
    pub fn end(&self) -> usize {
        self.over.store(true, SeqCst);
        // Writes under way end before we go on; others see that it is over.
        self.locks.iter().for_each(|l| drop(lock(l)));
        let (mut session, until) = (Session::new(self), Instant::now() + FAREWELL);
        let mut left: Vec<String> =
            std::mem::take(&mut *lock(&self.written)).into_iter().map(|c| self.key(c)).collect();
        while !left.is_empty() && Instant::now() < until {
            let mut failed = Vec::new();
            for (node, keys) in self.nodes.divide(left) {
                for some in keys.chunks(BATCH) {
                    let mut pipe = redis::pipe();
                    for key in some {
                        pipe.cmd("UNLINK").arg(key).ignore();
                    }
                    if session.on(&node, false, |con| pipe.query::<()>(con)).is_err() {
                        failed.extend_from_slice(some);
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

fn failed(e: &RedisError) -> String {
    format!("the swap server cannot be used: {}; look at the address after --swap, and whether it runs", said(e))
}

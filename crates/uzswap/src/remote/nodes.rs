//! The nodes: one server, or those of a cluster, each with a part of the keys.
//!
//! ```text
//! key ─ CRC16 ─▶ slot, one of 16,384 ─ who has it: CLUSTER SLOTS, or what a node answers ─▶ node
//!                                        MOVED slot node: it has the slot now
//!                                        ASK slot node:   this once, while the slot is on its way there
//! ```
//! The client library talks to each node by itself; this module chooses the node. The library's own cluster connection would
//! retry by itself, on new connections. But for a write that was given up we must know its connection, to end that before the
//! next write (see `session`).

use super::address::{Address, Tls};
use super::redirect::{Redirect, SLOTS};
use redis::{Client, ClientTlsConfig, Connection, ConnectionAddr, ConnectionInfo, RedisError, RedisResult};
use redis::{IntoConnectionInfo, TlsCertificates, Value};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The shortest time between two questions to a cluster about its slots.
const ASK_EVERY: Duration = Duration::from_millis(200);

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A server.
#[derive(Debug)]
pub(super) struct Node {
    host: String,
    port: u16,
    /// The node was given up: operations on it are tried once.
    pub down: AtomicBool,
    /// Connections with a write that was given up.
    pub abandoned: Mutex<Vec<Name>>,
}

/// A connection, as its server knows it.
///
/// The story: the name was the number alone. A server that is restarted counts from one again. So a write given up when the
/// server ended had the number that another program's connection had later, and that one was ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Name {
    pub id: i64,
    /// The address that the connection comes from, if the server says so.
    pub addr: Option<String>,
}

impl Name {
    /// Parses the answer to CLIENT INFO or CLIENT ID.
    pub fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| text.split_ascii_whitespace().find_map(|field| field.strip_prefix(name));
        let id = field("id=").unwrap_or(text).parse().ok()?;
        Some(Self { id, addr: field("addr=").map(str::to_owned) })
    }
}

/// The redirect in an error, if it is one; if several commands were sent at once, the first redirect.
pub(super) fn redirect_of(e: &RedisError) -> Option<Redirect> {
    let errors = e.clone().into_server_errors()?;
    errors.iter().find_map(|(_, e)| Redirect::parse(e.code(), e.details()?))
}

/// All known nodes, and their slots.
pub(super) struct Nodes {
    /// How to connect, except for the address.
    info: ConnectionInfo,
    /// The nodes, those of the address first.
    all: Mutex<Vec<Arc<Node>>>,
    named: usize,
    /// The node of each slot; empty if the server is no cluster.
    slots: Mutex<Vec<Option<Arc<Node>>>>,
    /// When a cluster was last asked for its slots; `next` is the node to ask next.
    asked: Mutex<Option<Instant>>,
    next: AtomicUsize,
}

impl Nodes {
    /// The nodes that the address names. The error is one sentence.
    pub fn new(address: &Address) -> Result<Self, String> {
        let wrong = |e: RedisError| format!("the address of the swap server is wrong: {}", said(&e));
        let infos = address.urls.iter().map(|url| match &address.tls {
            None => url.as_str().into_connection_info().map_err(wrong),
            Some(tls) => {
                let client = Client::build_with_tls(url.as_str(), certificates(tls)?).map_err(wrong)?;
                Ok(client.get_connection_info().clone())
            }
        });
        let infos = infos.collect::<Result<Vec<ConnectionInfo>, String>>()?;
        let of = |info: &ConnectionInfo| match info.addr() {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => Some(node(host, *port)),
            _ => None,
        };
        let all: Vec<_> = infos.iter().filter_map(of).collect();
        let info = infos.into_iter().next().ok_or("no swap server is named")?;
        let named = all.len();
        let (slots, asked) = (Mutex::default(), Mutex::default());
        Ok(Self { info, all: Mutex::new(all), named, slots, asked, next: AtomicUsize::new(0) })
    }

    /// The nodes that the address names.
    pub fn named(&self) -> Vec<Arc<Node>> {
        lock(&self.all)[..self.named].to_vec()
    }

    /// Connects to a node.
    pub fn connect(&self, node: &Node, within: Duration) -> RedisResult<Connection> {
        let (host, port) = (node.host.clone(), node.port);
        let addr = match self.info.addr() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        let con = Client::open(self.info.clone().set_addr(addr))?.get_connection_with_timeout(within)?;
        con.set_read_timeout(Some(within))?;
        con.set_write_timeout(Some(within))?;
        Ok(con)
    }

    /// Whether it is a cluster.
    pub fn is_cluster(&self) -> bool {
        !lock(&self.slots).is_empty()
    }

    /// The node that has a key as far as is known; the first node if that of the slot is not known.
    pub fn of(&self, key: &str) -> Arc<Node> {
        let of_slot = lock(&self.slots).get(usize::from(slot(key))).cloned().flatten();
        of_slot.unwrap_or_else(|| Arc::clone(&lock(&self.all)[0]))
    }

    /// The nodes that have slots, or the one server.
    pub fn serving(&self) -> Vec<Arc<Node>> {
        let slots = lock(&self.slots);
        let mut found: Vec<Arc<Node>> = Vec::new();
        for node in slots.iter().flatten() {
            if !found.iter().any(|n| Arc::ptr_eq(n, node)) {
                found.push(Arc::clone(node));
            }
        }
        if slots.is_empty() { vec![Arc::clone(&lock(&self.all)[0])] } else { found }
    }

    /// The number of slots that no node has.
    pub fn unserved(&self) -> usize {
        lock(&self.slots).iter().filter(|node| node.is_none()).count()
    }

    /// Divides keys by node; nodes that were given up come last.
    pub fn divide(&self, keys: impl IntoIterator<Item = String>) -> Vec<(Arc<Node>, Vec<String>)> {
        let mut parts: BTreeMap<(bool, usize), (Arc<Node>, Vec<String>)> = BTreeMap::new();
        for key in keys {
            let node = self.of(&key);
            let order = (node.down.load(Relaxed), Arc::as_ptr(&node) as usize);
            parts.entry(order).or_insert_with(|| (node, Vec::new())).1.push(key);
        }
        parts.into_values().collect()
    }

    /// The node that `from` redirected us to, noted as the slot's unless this is for one time only.
    pub fn redirected(&self, from: &Node, to: &Redirect) -> Arc<Node> {
        let node = self.known(if to.host.is_empty() { &from.host } else { &to.host }, to.port);
        if let Some(owner) = lock(&self.slots).get_mut(usize::from(to.slot)).filter(|_| !to.ask) {
            *owner = Some(Arc::clone(&node));
        }
        node
    }

    /// The nodes to ask for the slots, if that is due: in turn, those given up last.
    pub fn to_be_asked(&self) -> Vec<Arc<Node>> {
        let mut asked = lock(&self.asked);
        if asked.is_some_and(|at| at.elapsed() < ASK_EVERY) {
            return Vec::new();
        }
        *asked = Some(Instant::now());
        let mut all = lock(&self.all).clone();
        let first = self.next.fetch_add(1, Relaxed) % all.len();
        all.rotate_left(first);
        all.sort_by_key(|node| node.down.load(Relaxed));
        all
    }

    /// Takes over what `from` says about the slots; returns whether it says anything.
    pub fn learn(&self, from: &Node, answer: &Value) -> bool {
        let mut slots = vec![None; usize::from(SLOTS)];
        for (first, last, host, port) in parts(answer) {
            let node = self.known(if host.is_empty() { &from.host } else { &host }, port);
            slots[usize::from(first)..=usize::from(last)].fill(Some(node));
        }
        let says = slots.iter().any(Option::is_some);
        if says {
            *lock(&self.slots) = slots;
        }
        says
    }

    fn known(&self, host: &str, port: u16) -> Arc<Node> {
        let mut all = lock(&self.all);
        let known = all.iter().find(|node| node.host == host && node.port == port).cloned();
        known.unwrap_or_else(|| {
            all.push(node(host, port));
            Arc::clone(&all[all.len() - 1])
        })
    }
}

fn node(host: &str, port: u16) -> Arc<Node> {
    Arc::new(Node { host: host.to_owned(), port, down: AtomicBool::new(false), abandoned: Mutex::default() })
}

/// Parses the answer to CLUSTER SLOTS: of each range the first and last slot, and the host and port of its node.
fn parts(answer: &Value) -> Vec<(u16, u16, String, u16)> {
    let list = |value: &Value| match value {
        Value::Array(values) => Some(values.clone()),
        _ => None,
    };
    let number = |value: Option<&Value>| match value {
        Some(Value::Int(n)) => u16::try_from(*n).ok(),
        _ => None,
    };
    let part = |value: &Value| {
        let range = list(value)?;
        let (first, last) = (number(range.first())?, number(range.get(1)).filter(|last| *last < SLOTS)?);
        let owner = list(range.get(2)?)?;
        let host = match owner.first() {
            Some(Value::BulkString(bytes)) => String::from_utf8(bytes.clone()).ok()?,
            Some(Value::SimpleString(text)) => text.clone(),
            _ => String::new(),
        };
        // `?` means that the node does not know its own name.
        let host = if host == "?" { String::new() } else { host };
        (first <= last).then_some((first, last, host, number(owner.get(1))?))
    };
    list(answer).unwrap_or_default().iter().filter_map(part).collect()
}

/// The slot of a key that has no braces.
pub(super) fn slot(key: &str) -> u16 {
    let crc = key.bytes().fold(0u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(byte) << 8, |crc, _| if crc & 0x8000 != 0 { crc << 1 ^ 0x1021 } else { crc << 1 })
    });
    crc % SLOTS
}

/// Reads the certificates for TLS. The error is one sentence.
fn certificates(tls: &Tls) -> Result<TlsCertificates, String> {
    let read = |path: &Path| {
        let file = std::fs::read(path);
        file.map_err(|e| {
            format!(
                "`{}`, named in the address of the swap server, cannot be read: {}",
                path.display(),
                crate::config::plain(&e)
            )
        })
    };
    let client_tls = match (&tls.cert, &tls.key) {
        (Some(cert), Some(key)) => Some(ClientTlsConfig { client_cert: read(cert)?, client_key: read(key)? }),
        _ => None,
    };
    Ok(TlsCertificates { client_tls, root_cert: tls.ca.as_deref().map(read).transpose()? })
}

/// What went wrong, as a clause.
pub(super) fn said(e: &RedisError) -> String {
    // The kind of error is a name in the client's code, which tells users nothing.
    let text = e.to_string().replacen(&format!(" - {:?}", e.kind()), "", 1);
    text.split(" (os error").next().unwrap_or_default().trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(text: &str) -> Nodes {
        Nodes::new(&Address::parse(text).unwrap()).unwrap()
    }

    fn at(node: &Node) -> (&str, u16) {
        (&node.host, node.port)
    }

    /// Published values.
    #[test]
    fn slots_of_keys() {
        for (key, want) in [("123456789", 0x31c3), ("foo", 12182), ("hello", 866), ("", 0)] {
            assert_eq!(slot(key), want, "{key}");
        }
    }

    #[test]
    fn redirects() {
        let of = |code, details| Redirect::parse(code, details);
        let moved = |ask, host: &str| Some(Redirect { ask, slot: 3999, host: host.to_owned(), port: 6381 });
        assert_eq!(of("MOVED", "3999 127.0.0.1:6381"), moved(false, "127.0.0.1"));
        assert_eq!(of("ASK", "3999 node.example:6381"), moved(true, "node.example"));
        assert_eq!(of("MOVED", "3999 :6381"), moved(false, ""));
        assert_eq!(of("MOVED", "3999 ::1:6381"), moved(false, "::1"));
        for wrong in ["", "3999", "3999 host", "16384 host:1", "x host:1", "3999 host:99999"] {
            assert_eq!(of("MOVED", wrong), None, "{wrong}");
        }
        assert_eq!(of("ERR", "3999 127.0.0.1:6381"), None);
    }

    #[test]
    fn who_has_what() {
        let int = |n: u16| Value::Int(i64::from(n));
        let text = |t: &str| Value::BulkString(t.as_bytes().to_vec());
        let range = |first, last, host: Value, port| {
            Value::Array(vec![int(first), int(last), Value::Array(vec![host, int(port), text("id")])])
        };
        let nodes = nodes("redis://named:7000,other:7001?size=1G");
        assert!(!nodes.is_cluster());
        assert_eq!(at(&nodes.of("foo")), ("named", 7000));
        assert_eq!(nodes.serving().len(), 1);
        let first = nodes.named()[0].clone();
        for nothing in [Value::Nil, Value::Array(vec![]), Value::Array(vec![range(5, 4, text("a"), 1)])] {
            assert!(!nodes.learn(&first, &nothing) && !nodes.is_cluster());
        }
        // "foo" is 12182; the second range has no name for its node, the third is cut off.
        let answer = [
            range(0, 8191, text("a"), 7002),
            range(8192, 16_000, Value::Nil, 7003),
            range(16_001, 20_000, text("c"), 1),
        ];
        assert!(nodes.learn(&first, &Value::Array(answer.to_vec())) && nodes.is_cluster());
        assert_eq!((at(&nodes.of("foo")), at(&nodes.of("hello"))), (("named", 7003), ("a", 7002)));
        assert_eq!((nodes.serving().len(), nodes.unserved()), (2, 383));
        // A redirect: for one time, or from now on.
        let from = nodes.of("foo");
        let to = |ask| Redirect { ask, slot: 12_182, host: String::new(), port: 7009 };
        assert_eq!(at(&nodes.redirected(&from, &to(true))), ("named", 7009));
        assert_eq!(at(&nodes.of("foo")), ("named", 7003));
        nodes.redirected(&from, &to(false));
        assert_eq!(at(&nodes.of("foo")), ("named", 7009));
        assert_eq!(lock(&nodes.all).len(), 5, "each node is known once");
        let parts = nodes.divide(["foo", "hello", "foo"].map(str::to_owned));
        assert_eq!(parts.iter().map(|(_, keys)| keys.len()).sum::<usize>(), 3);
        assert!(parts.iter().all(|(node, keys)| keys.iter().all(|key| Arc::ptr_eq(node, &nodes.of(key)))));
    }

    #[test]
    fn it_is_asked_now_and_then_who_answers_first() {
        let nodes = nodes("redis://a,b,c?size=1G");
        nodes.named()[1].down.store(true, Relaxed);
        let asked = nodes.to_be_asked();
        assert_eq!((asked.len(), at(&asked[2])), (3, ("b", 6379)));
        assert!(nodes.to_be_asked().is_empty(), "just asked");
    }

    #[test]
    fn certificates_that_are_not_there_are_said() {
        let of = |text: &str| Nodes::new(&Address::parse(text).unwrap()).err().expect("an error");
        let error = of("rediss://:secret@host?size=1G&ca=/no/such");
        assert!(error.contains("/no/such") && error.contains("no such file") && !error.contains("secret"), "{error}");
        assert!(of("redis://host:99999?size=1G").contains("address of the swap server is wrong"));
    }
}

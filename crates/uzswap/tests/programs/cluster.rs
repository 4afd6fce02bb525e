//! The remote tier over a Redis cluster, and over TLS, against real servers on loopback: keys are spread over the nodes, a node
//! that dies or gives its slots away is handled like a failing disk, and nobody without the right certificate is trusted.

use crate::harness::*;
use crate::redis::{self, Client};
use crate::remote::ended_well;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const SLOTS: usize = 16_384;

/// A free port whose cluster bus port is free, too.
fn cluster_port() -> u16 {
    loop {
        let port = redis::free_port();
        let bus = port.checked_add(10_000).map(|bus| std::net::TcpListener::bind(("127.0.0.1", bus)));
        if bus.is_some_and(|bus| bus.is_ok()) {
            return port;
        }
    }
}

struct Node {
    running: Running,
    client: Client,
    port: u16,
}

impl Node {
    fn start(name: &str, more: &[&str]) -> Self {
        let port = cluster_port();
        // By default, all nodes refuse service if one lacks slots.
        let options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "5000"];
        let options = [&options[..], &["--cluster-require-full-coverage", "no"], more].concat();
        let running = redis::subject_with(&scratch(name), port, &options).start_plain();
        Self { client: Client::connect(port, &running), running, port }
    }

    fn one(&mut self, words: &[&str]) -> String {
        String::from_utf8_lossy(&self.client.one(words)).into_owned()
    }

    fn keys(&mut self) -> usize {
        self.one(&["DBSIZE"]).parse().expect("a number")
    }

    fn id(&mut self) -> String {
        self.one(&["CLUSTER", "MYID"])
    }

    /// How often it answered with an error that begins like this.
    fn answered(&mut self, error: &str) -> u64 {
        let stats = self.one(&["INFO", "errorstats"]);
        let prefix = format!("errorstat_{error}:count=");
        stats.lines().find_map(|line| line.strip_prefix(&prefix)?.trim().parse().ok()).unwrap_or(0)
    }
}

/// Three nodes, each with a third of the slots.
struct Cluster {
    nodes: Vec<Node>,
}

impl Cluster {
    fn start(name: &str, more: &[&str]) -> Option<Self> {
        need("redis-server")?;
        let mut nodes: Vec<Node> = (0..3).map(|i| Node::start(&format!("{name}-{i}"), more)).collect();
        let first = nodes[0].port.to_string();
        for (i, node) in nodes.iter_mut().enumerate() {
            let part = |i: usize| i * SLOTS / 3;
            let slots: Vec<String> = (part(i)..part(i + 1)).map(|slot| slot.to_string()).collect();
            let words: Vec<&str> =
                ["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str)).collect();
            assert_eq!(node.one(&words), "OK");
            assert_eq!(node.one(&["CLUSTER", "SET-CONFIG-EPOCH", &(i + 1).to_string()]), "OK");
            if i > 0 {
                assert_eq!(node.one(&["CLUSTER", "MEET", "127.0.0.1", &first]), "OK");
            }
        }
        let mut cluster = Self { nodes };
        cluster.wait(|node| {
            let info = node.one(&["CLUSTER", "INFO"]);
            info.contains("cluster_state:ok")
                && info.contains("cluster_slots_ok:16384")
                && info.contains("cluster_known_nodes:3")
        });
        Some(cluster)
    }

    fn wait(&mut self, is_so: impl Fn(&mut Node) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !self.nodes.iter_mut().all(&is_so) {
            assert!(Instant::now() < deadline, "the cluster does not form");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn swap(&self, options: &str) -> String {
        format!("redis://127.0.0.1:{}?size=1G{options}", self.nodes[0].port)
    }

    /// Starts `disk` in 32 MiB, swapping to the cluster, and waits until it has written to every node.
    fn start_run(&mut self, name: &'static str, disk: &Path, args: [&str; 2], options: &str) -> Running {
        let subject = Subject::new(name, &[&disk, &args[0], &args[1]]).with(&["--swap", &self.swap(options)]);
        let run = subject.start_limited(32 * MIB);
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.nodes.iter_mut().any(|node| node.keys() < 5) {
            assert!(run.is_running() && Instant::now() < deadline, "the run does not use all nodes");
            std::thread::sleep(Duration::from_millis(10));
        }
        run
    }

    fn keys(&mut self) -> usize {
        self.nodes.iter_mut().map(Node::keys).sum()
    }

    fn stop(self) {
        self.nodes.into_iter().for_each(|node| drop(redis::stop(node.client, node.running)));
    }
}

#[test]
fn a_cluster_has_the_keys_on_all_nodes() {
    let _beside = beside();
    let Some(disk) = compile_c("disk") else { return };
    let Some(mut cluster) = Cluster::start("cluster", &[]) else { return };
    let running = cluster.start_run("cluster", &disk, ["96", "1"], "");
    let run = running.finish();
    run.say("cluster", "three nodes", None);
    assert_eq!(ended_well(&run), 0);
    assert!(number(&run, "pswpin") > 1000 && number(&run, "pswpout") > 1000, "{}", run.describe());
    assert_eq!(cluster.keys(), 0, "nothing is left there");
    // The address names a node that does not exist, then one that does; failures are injected, too.
    let nowhere = redis::free_port();
    let swap = format!("redis://127.0.0.1:{nowhere},127.0.0.1:{}?size=1G", cluster.nodes[2].port);
    let faults = ("UZSWAP_TEST_FAULTS", "seed=9,swap_read=1/10,swap_write=1/10");
    let subject = Subject::new("cluster", &[&disk, &"64", &"1"]).with(&["--swap", &swap]);
    let run = subject.start_limited_with(32 * MIB, &[faults]).finish();
    run.say(subject.name, faults.1, None);
    ended_well(&run);
    assert!(number(&run, "swap_read_errors") > 0 && number(&run, "reject_reclaim_fail") > 0, "{}", run.describe());
    // A cluster whose node lacks slots is refused at the start.
    assert_eq!(cluster.nodes[1].one(&["CLUSTER", "DELSLOTS", "8000"]), "OK");
    let run = Subject::new("cluster", &[&disk, &"1", &"1"])
        .with(&["--swap", &format!("redis://127.0.0.1:{}?size=1G", cluster.nodes[1].port)]);
    let run = run.start_limited(32 * MIB).finish();
    assert!(!run.status.success() && run.stderr.text().contains("is incomplete: 1 of its slots"), "{}", run.describe());
    cluster.stop();
}

/// One of three nodes is killed while it is in use: its data is lost, and reported; the other nodes go on.
#[test]
fn a_node_of_a_cluster_that_dies() {
    let _beside = beside();
    let Some(disk) = compile_c("disk") else { return };
    let Some(mut cluster) = Cluster::start("cluster-dies", &[]) else { return };
    let running = cluster.start_run("node dies", &disk, ["64", "3"], "&timeout=1");
    let dead = cluster.nodes.remove(0);
    redis::stop(dead.client, dead.running);
    let run = running.finish();
    run.say("node dies", "1 of 3", None);
    let lost = ended_well(&run);
    // The node had a third of the data, and the program has half of that there: far from all.
    assert!(lost > 0 && lost < 64 * 256 / 2, "{lost} pages are lost\n{}", run.describe());
    let told = "uzswap: a page could not be read back from the swap server and is lost";
    assert!(run.stderr.text().contains(told), "{}", run.describe());
    assert_eq!(cluster.keys(), 0, "the nodes that are left have nothing left");
    cluster.stop();
}

/// Slots move to another node, with their keys, while they are in use. Clients are redirected there: once (ASK) while the slot
/// moves, for good (MOVED) afterwards. No page is lost.
#[test]
fn slots_that_move_are_followed() {
    let _beside = beside();
    let Some(disk) = compile_c("disk") else { return };
    let Some(mut cluster) = Cluster::start("cluster-moves", &[]) else { return };
    let running = cluster.start_run("slots move", &disk, ["64", "6"], "");
    let (mut moved, mut asked) = (0, 0);
    while moved < 60 && running.is_running() {
        let (from, to) = (moved % 3, (moved + 1) % 3);
        let key = cluster.nodes[from].one(&["RANDOMKEY"]);
        if !key.starts_with("uzswap:") {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        let slot = cluster.nodes[from].one(&["CLUSTER", "KEYSLOT", &key]);
        let (from_id, to_id) = (cluster.nodes[from].id(), cluster.nodes[to].id());
        assert_eq!(cluster.nodes[to].one(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]), "OK");
        assert_eq!(cluster.nodes[from].one(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]), "OK");
        let port = cluster.nodes[to].port.to_string();
        // Move all keys in the slot. The story: if by chance a slot had two keys, one stayed. Its node dropped it, as Redis does
        // without a message, when it heard that the slot was another's: 169 pages were lost.
        let mut next = key;
        while !next.is_empty() {
            let gone = cluster.nodes[from].one(&["MIGRATE", "127.0.0.1", &port, &next, "0", "5000"]);
            assert!(["OK", "NOKEY"].contains(&&*gone), "{next} stays: {gone}");
            asked += usize::from(gone == "OK");
            next = cluster.nodes[from].one(&["CLUSTER", "GETKEYSINSLOT", &slot, "1"]);
        }
        // Meanwhile each request for the key is redirected.
        std::thread::sleep(Duration::from_millis(20));
        for node in [to, from, 3 - from - to] {
            assert_eq!(cluster.nodes[node].one(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]), "OK");
        }
        moved += 1;
    }
    let run = running.finish();
    run.say("slots move", &format!("{moved} slots, {asked} keys"), None);
    assert!(asked >= 20, "only {asked} keys moved\n{}", run.describe());
    assert_eq!(ended_well(&run), 0, "{}", run.describe());
    for answer in ["ASK", "MOVED"] {
        assert!(cluster.nodes.iter_mut().any(|node| node.answered(answer) > 0), "nobody was answered {answer}");
    }
    let errors = (number(&run, "swap_read_errors"), number(&run, "swap_write_errors"));
    assert_eq!((errors, cluster.keys()), ((0, 0), 0), "{}", run.describe());
    cluster.stop();
}

/// A replica takes over from its master at the replica's request: writers are told that the old master is read-only now, or
/// redirected.
#[test]
fn a_replica_that_takes_over_is_followed() {
    let _beside = beside();
    let Some(disk) = compile_c("disk") else { return };
    let Some(mut cluster) = Cluster::start("cluster-fails-over", &[]) else { return };
    let mut replica = Node::start("cluster-replica", &[]);
    let (first, master) = (cluster.nodes[0].port.to_string(), cluster.nodes[0].id());
    assert_eq!(replica.one(&["CLUSTER", "MEET", "127.0.0.1", &first]), "OK");
    let mut wait = |what: &[&str], is_so: &dyn Fn(&str) -> bool| {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !is_so(&replica.one(what)) {
            assert!(Instant::now() < deadline, "{what:?} is {}", replica.one(what));
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    wait(&["CLUSTER", "REPLICATE", &master], &|said| said == "OK");
    wait(&["INFO", "replication"], &|said| said.contains("role:slave") && said.contains("master_link_status:up"));
    wait(&["CLUSTER", "INFO"], &|said| said.contains("cluster_state:ok"));
    let running = cluster.start_run("takes over", &disk, ["64", "3"], "");
    // The servers give up a takeover that makes no progress for five seconds: request it again.
    let (deadline, mut asked) = (Instant::now() + Duration::from_secs(60), None::<Instant>);
    while !replica.one(&["INFO", "replication"]).contains("role:master") {
        assert!(Instant::now() < deadline, "the replica does not take over");
        if asked.is_none_or(|at| at.elapsed() > Duration::from_secs(6)) {
            replica.one(&["CLUSTER", "FAILOVER"]);
            asked = Some(Instant::now());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(running.is_running(), "it took over while it was used");
    let run = running.finish();
    run.say("takes over", "1 of 3", None);
    assert_eq!(ended_well(&run), 0, "{}", run.describe());
    assert_eq!(replica.keys() + cluster.nodes[1].keys() + cluster.nodes[2].keys(), 0);
    redis::stop(replica.client, replica.running);
    cluster.stop();
}

/// A node does not answer for a while: its operations wait, those on other nodes do not.
#[test]
fn a_node_of_a_cluster_that_stalls() {
    let _beside = beside();
    let Some(disk) = compile_c("disk") else { return };
    let Some(mut cluster) = Cluster::start("cluster-stalls", &[]) else { return };
    let running = cluster.start_run("node stalls", &disk, ["48", "3"], "&timeout=9");
    assert_eq!(cluster.nodes[1].one(&["CLIENT", "PAUSE", "4000", "ALL"]), "OK");
    let run = running.finish();
    run.say("node stalls", "4 s", None);
    assert_eq!(ended_well(&run), 0, "{}", run.describe());
    cluster.stop();
}

/// Certificates that a test makes: a self-signed one, the server's and ours signed by it, and a stranger's.
struct Certificates(PathBuf);

impl Certificates {
    fn make() -> Option<Self> {
        let openssl = need("openssl")?;
        let dir = scratch("tls");
        let run = |words: &[&str]| {
            let done = Command::new(&openssl).args(words).current_dir(&dir).output().expect("openssl");
            assert!(done.status.success(), "openssl {words:?}: {}", String::from_utf8_lossy(&done.stderr));
        };
        let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
        let by = |who: &str, more: &[&str]| {
            let (file, subject) = (|end: &str| format!("{who}.{end}"), format!("/CN={who}"));
            let (pem, out) = (file("key"), file("crt"));
            let words = ["req", "-x509", "-days", "2", "-subj", &subject, "-keyout", &pem, "-out", &out];
            run(&[&words[..], &key, more].concat());
        };
        by("ca", &["-addext", "keyUsage=critical,keyCertSign"]);
        by("stranger", &["-addext", "keyUsage=critical,keyCertSign"]);
        let signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE"];
        by("server", &[&signed[..], &["-addext", "subjectAltName=IP:127.0.0.1"]].concat());
        by("other", &[&signed[..], &["-addext", "subjectAltName=DNS:elsewhere.example"]].concat());
        by("client", &signed);
        Some(Self(dir))
    }

    fn path(&self, file: &str) -> String {
        self.0.join(file).display().to_string()
    }
}

/// A server that speaks TLS, and to the test also without.
struct TlsServer {
    running: Running,
    client: Client,
    tls: u16,
}

impl TlsServer {
    fn start(name: &str, files: &Certificates, cert: &str, clients: &str) -> Self {
        let (port, tls) = (redis::free_port(), redis::free_port());
        let (cert, key) = (files.path(&format!("{cert}.crt")), files.path(&format!("{cert}.key")));
        let (tls_port, ca) = (tls.to_string(), files.path("ca.crt"));
        let options =
            ["--tls-port", &tls_port, "--tls-cert-file", &cert, "--tls-key-file", &key, "--tls-ca-cert-file", &ca];
        let options = [&options[..], &["--tls-auth-clients", clients]].concat();
        let running = redis::subject_with(&scratch(&format!("tls-{name}")), port, &options).start_plain();
        Self { client: Client::connect(port, &running), running, tls }
    }

    /// Runs a program that uses it, with these options in the address.
    fn used(&self, disk: &Path, mib: &str, options: &str) -> Outcome {
        let swap = format!("rediss://127.0.0.1:{}/0?size=1G{options}", self.tls);
        Subject::new("TLS", &[&disk, &mib, &"1"]).with(&["--swap", &swap]).start_limited(32 * MIB).finish()
    }

    fn refused(&self, disk: &Path, options: &str, why: &str) {
        let run = self.used(disk, "1", options);
        let said = run.stderr.text();
        let refusal =
            said.contains("the swap server cannot be used") || said.contains("the address of the swap server");
        assert!(!run.status.success() && refusal && said.contains(why), "{options}: {}", run.describe());
    }

    fn stop(self) {
        redis::stop(self.client, self.running);
    }
}

#[test]
fn by_tls_with_those_who_can_show_who_they_are() {
    let _beside = beside();
    let Some(disk) = compile_c("disk") else { return };
    let (Some(_), Some(files)) = (need("redis-server"), Certificates::make()) else { return };
    let (ca, stranger) = (format!("&ca={}", files.path("ca.crt")), format!("&ca={}", files.path("stranger.crt")));
    let own = format!("{ca}&cert={}&key={}", files.path("client.crt"), files.path("client.key"));

    let mut server = TlsServer::start("any", &files, "server", "no");
    let run = server.used(&disk, "64", &ca);
    run.say("TLS", "its certificate is signed by whom we trust", None);
    assert_eq!(ended_well(&run), 0);
    assert!(number(&run, "pswpin") > 1000, "{}", run.describe());
    assert_eq!(server.client.one(&["DBSIZE"]), b"0");
    server.refused(&disk, &stranger, "certificate");
    server.refused(&disk, "", "certificate");
    server.refused(&disk, &format!("&ca={}", files.path("none")), "no such file");
    server.stop();

    let server = TlsServer::start("elsewhere", &files, "other", "no");
    server.refused(&disk, &ca, "certificate");
    server.stop();

    let server = TlsServer::start("mutual", &files, "server", "yes");
    server.refused(&disk, &ca, "");
    let run = server.used(&disk, "48", &own);
    run.say("TLS", "and so is ours", None);
    assert_eq!(ended_well(&run), 0);
    server.stop();
}

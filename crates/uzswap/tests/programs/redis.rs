//! redis-server under load, with BGSAVE: the snapshot is that of one instant while the parent goes on changing.
//!
//! The test speaks RESP itself. Each key has a version, and a value is made from key and version, so both the server's answers
//! and the saved snapshot can be checked completely. To check the snapshot, a second server that runs plain loads it.

use crate::harness::*;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

const KEYS: u32 = 120_000;
/// Commands sent before the answers are read.
const BATCH: usize = 500;

/// A connection to a server.
pub struct Client {
    stream: BufReader<TcpStream>,
}

impl Client {
    /// Connects as soon as the server listens and has loaded its data.
    pub fn connect(port: u16, server: &Running) -> Self {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            assert!(server.is_running(), "redis-server ended before it listened");
            assert!(Instant::now() < deadline, "redis-server does not listen on {port}");
            if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
                let limit = Some(Duration::from_secs(60));
                stream.set_read_timeout(limit).expect("a timeout");
                stream.set_nodelay(true).expect("no delay");
                let mut client = Client { stream: BufReader::new(stream) };
                if client.one(&["PING"]) == b"PONG" {
                    return client;
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn send(buffer: &mut Vec<u8>, words: &[&str]) {
        write!(buffer, "*{}\r\n", words.len()).expect("memory");
        for word in words {
            write!(buffer, "${}\r\n{word}\r\n", word.len()).expect("memory");
        }
    }

    fn answer(&mut self) -> Vec<u8> {
        let mut line = Vec::new();
        self.stream.read_until(b'\n', &mut line).expect("an answer from redis-server");
        assert!(line.ends_with(b"\r\n"), "redis-server closed the connection");
        line.truncate(line.len() - 2);
        let number =
            |line: &[u8]| -> i64 { std::str::from_utf8(&line[1..]).expect("digits").parse().expect("a length") };
        match line[0] {
            b'$' => {
                let length = number(&line);
                let mut value = vec![0; (length + 2).max(0) as usize];
                if length < 0 {
                    return b"(nil)".to_vec();
                }
                self.stream.read_exact(&mut value).expect("a value");
                value.truncate(length as usize);
                value
            }
            b'+' | b':' => line.split_off(1),
            // One per line.
            b'*' => (0..number(&line)).map(|_| self.answer()).collect::<Vec<_>>().join(&b'\n'),
            // An error keeps its sign, so it equals no expected answer.
            _ => line,
        }
    }

    /// Sends one command; returns the answer.
    pub fn one(&mut self, words: &[&str]) -> Vec<u8> {
        let mut buffer = Vec::new();
        Self::send(&mut buffer, words);
        self.stream.get_mut().write_all(&buffer).expect("a request");
        self.answer()
    }

    /// Sends one command for each key, in batches, and hands each answer to `check`.
    fn all(&mut self, keys: &[u32], command: impl Fn(u32, &mut Vec<u8>), check: impl Fn(u32, Vec<u8>)) {
        for batch in keys.chunks(BATCH) {
            let mut buffer = Vec::new();
            batch.iter().for_each(|&key| command(key, &mut buffer));
            self.stream.get_mut().write_all(&buffer).expect("a request");
            for &key in batch {
                let answer = self.answer();
                check(key, answer);
            }
        }
    }

    fn set(&mut self, keys: &[u32], versions: &[u32]) {
        let set = |key: u32, buffer: &mut Vec<u8>| {
            let value = value(key, versions[key as usize]);
            Self::send(buffer, &["SET", &format!("key:{key}"), &value]);
        };
        self.all(keys, set, |key, answer| {
            assert_eq!(answer, b"OK", "SET key:{key}");
        });
    }

    fn verify(&mut self, versions: &[u32], what: &str) {
        let keys: Vec<u32> = (0..KEYS).collect();
        let get = |key: u32, buffer: &mut Vec<u8>| Self::send(buffer, &["GET", &format!("key:{key}")]);
        self.all(&keys, get, |key, answer| {
            let expected = value(key, versions[key as usize]);
            assert!(
                answer == expected.as_bytes(),
                "{what}: key:{key} is {:?}, not {expected:?}",
                String::from_utf8_lossy(&answer)
            );
        });
    }

    fn info(&mut self, field: &str) -> String {
        let text = self.one(&["INFO", "persistence"]);
        let text = String::from_utf8_lossy(&text).into_owned();
        text.lines()
            .find_map(|l| l.strip_prefix(field)?.strip_prefix(':'))
            .unwrap_or_else(|| panic!("INFO without {field}"))
            .to_owned()
    }
}

fn value(key: u32, version: u32) -> String {
    let row = format!("{{\"key\":{key},\"version\":{version},\"state\":\"open\",\"score\":{}}};", key % 1000);
    row.repeat(4 + (key % 8) as usize)
}

/// A server that keeps nothing on disk.
pub fn subject(dir: &Path, port: u16) -> Subject {
    subject_with(dir, port, &[])
}

/// The same with more options.
pub fn subject_with(dir: &Path, port: u16, more: &[&str]) -> Subject {
    let server = need("redis-server").expect("checked by the caller");
    let mut subject = Subject::new(
        "redis",
        &[
            &server,
            &"--port",
            &port.to_string(),
            &"--bind",
            &"127.0.0.1",
            &"--save",
            &"",
            &"--appendonly",
            &"no",
            &"--dbfilename",
            &"dump.rdb",
            &"--rdb-del-sync-files",
            &"no",
            &"--daemonize",
            &"no",
            &"--dir",
            &dir,
        ],
    );
    subject.argv.extend(more.iter().map(std::ffi::OsString::from));
    subject.dir = dir.to_owned();
    subject
}

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// A series of keys, the same each time.
fn some_keys(seed: u32, count: u32) -> Vec<u32> {
    (0..count).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 3) % KEYS).collect()
}

/// The load: fills, changes, saves while changing, and reads everything back. Returns what the snapshot must hold.
fn load(client: &mut Client) -> Vec<u32> {
    let mut versions = vec![0u32; KEYS as usize];
    let keys: Vec<u32> = (0..KEYS).collect();
    client.set(&keys, &versions);
    let change = |client: &mut Client, seed: u32, versions: &mut Vec<u32>| {
        let keys = some_keys(seed, 15_000);
        keys.iter().for_each(|&k| versions[k as usize] = seed);
        client.set(&keys, versions);
    };
    change(client, 1, &mut versions);
    let answer = client.one(&["BGSAVE"]);
    assert_eq!(String::from_utf8_lossy(&answer), "Background saving started");
    let saved = versions.clone();
    let deadline = Instant::now() + RUN_TIMEOUT;
    let mut seed = 2;
    loop {
        change(client, seed, &mut versions);
        seed += 1;
        if client.info("rdb_bgsave_in_progress") == "0" {
            break;
        }
        assert!(Instant::now() < deadline, "BGSAVE does not end");
    }
    assert_eq!(client.info("rdb_last_bgsave_status"), "ok");
    client.verify(&versions, "read back");
    saved
}

/// Ends a server.
pub fn stop(mut client: Client, server: Running) -> Outcome {
    let mut buffer = Vec::new();
    Client::send(&mut buffer, &["SHUTDOWN", "NOSAVE"]);
    client.stream.get_mut().write_all(&buffer).expect("a request");
    server.finish()
}

fn verify_snapshot(dir: &Path, saved: &[u32]) {
    let port = free_port();
    let server = subject(dir, port).start_plain();
    let mut client = Client::connect(port, &server);
    client.verify(saved, "snapshot");
    stop(client, server);
}

#[test]
fn redis_under_load_with_bgsave() {
    // At a quarter, 26 MiB, the child takes half a minute to save, and everything written to meanwhile is copied.
    saves_what_it_had("redis", &[100, 50, 30], |subject| subject);
}

/// Runs a server plain, which must come first, and at limits; `change` says how.
pub fn saves_what_it_had(name: &str, percents: &[u64], change: impl Fn(Subject) -> Subject) {
    let _alone = alone();
    if need("redis-server").is_none() {
        return;
    }
    let dir = scratch(name);
    let mut peak = 0;
    for percent in percents.iter().copied() {
        let _ = std::fs::remove_file(dir.join("dump.rdb"));
        let port = free_port();
        let subject = change(subject(&dir, port));
        let limit = limit_of(peak, percent);
        let server = match percent {
            100 => subject.start_plain(),
            _ => subject.start_limited(limit),
        };
        let mut client = Client::connect(port, &server);
        let saved = load(&mut client);
        let outcome = stop(client, server);
        let at = format!("redis at {percent} %");
        assert!(outcome.status.success(), "{at}: exit status\n{}", outcome.describe());
        verify_snapshot(&dir, &saved);
        if percent == 100 {
            outcome.say("redis", "plain", None);
            // The server, and about half of it again, which is copied while the child saves: how much depends on the moment.
            peak = outcome.rss_max_bytes * 3 / 2;
        } else {
            outcome.say("redis", &format!("{percent} %"), Some(limit));
            // When the server writes to what the saving child still has, the kernel copies it, and reports that to nobody: see
            // the known gaps.
            assert_limited(&at, &outcome, None);
            let (largest, files) = (outcome.rss_max_bytes, 8 * MIB);
            assert!(largest <= with_slack(limit) + files, "{at}: {} MiB\n{}", largest / MIB, outcome.describe());
        }
    }
}

//! The remote tier against a real server on loopback: it works, what leaves the process is unreadable, and a server that dies,
//! lies, forgets, is full or does not answer is handled like a failing disk.

use crate::harness::*;
use crate::redis::{self, Client};
use std::time::{Duration, Instant};

/// The word that `secret.py` has in each page.
const WORD: &[u8] = b"a word that only this program has to know";

/// A running server, and its address for a run.
struct Server {
    running: Running,
    client: Client,
    port: u16,
}

impl Server {
    fn start(name: &str) -> Option<Self> {
        need("redis-server")?;
        let port = redis::free_port();
        let running = redis::subject(&scratch(name), port).start_plain();
        let client = Client::connect(port, &running);
        Some(Self { running, client, port })
    }

    fn swap(&self, options: &str) -> String {
        format!("redis://127.0.0.1:{}/0?size=1G{options}", self.port)
    }

    fn one(&mut self, words: &[&str]) -> String {
        String::from_utf8_lossy(&self.client.one(words)).into_owned()
    }

    fn keys(&mut self) -> usize {
        self.one(&["DBSIZE"]).parse().expect("a number")
    }

    /// Waits until the run has written some clusters.
    fn wait_for_keys(&mut self, run: &Running) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.keys() < 20 {
            assert!(run.is_running() && Instant::now() < deadline, "the run does not use the server");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The number of a cluster of the run that still has a key.
    fn some_key(&mut self) -> Option<String> {
        Some(self.one(&["RANDOMKEY"])).filter(|key| key.starts_with("uzswap:"))
    }

    fn stop(self) {
        redis::stop(self.client, self.running);
    }
}

/// Checks that it ended well: no page is wrong, and as many are lost as it says.
pub fn ended_well(run: &Outcome) -> u64 {
    let lost = number(run, "poisoned");
    assert!(run.status.success() && !run.timed_out, "{}", run.describe());
    assert_eq!(run.stdout.text(), format!("lost {lost}, wrong 0\n"), "{}", run.describe());
    assert!(run.report.as_deref().unwrap_or_default().contains("\"swap_io\": \"redis\""), "{}", run.describe());
    lost
}

#[test]
fn what_does_not_fit_goes_to_a_server_and_comes_back() {
    let _beside = beside();
    let (Some(python), Some(disk)) = (need("python3"), compile_c("disk")) else { return };
    let Some(mut server) = Server::start("remote") else { return };
    let swap = ["--swap", &server.swap("")];
    let subject = Subject::new("remote", &[&disk, &"96", &"1"]).with(&swap);
    let run = subject.start_limited(32 * MIB).finish();
    run.say(subject.name, "disk", None);
    assert_eq!(ended_well(&run), 0);
    assert!(number(&run, "pswpin") > 1000 && number(&run, "pswpout") > 1000, "{}", run.describe());
    assert_eq!(server.keys(), 0, "nothing is left there");
    let faults = ("UZSWAP_TEST_FAULTS", "seed=9,swap_read=1/10,swap_write=1/10");
    let run = subject.start_limited_with(32 * MIB, &[faults]).finish();
    run.say(subject.name, faults.1, None);
    ended_well(&run);
    assert!(number(&run, "swap_read_errors") > 0 && number(&run, "reject_reclaim_fail") > 0, "{}", run.describe());
    let forks = Subject::new("forks over a server", &[&python, &fixture("forkdisk.py"), &"40"]);
    let plain = forks.start_plain().finish();
    let run = forks.with(&swap).start_limited(32 * MIB).finish();
    run.say("forks", "remote", None);
    assert_eq!((run.status, run.stdout.hash), (plain.status, plain.stdout.hash), "{}", run.describe());
    assert_eq!((number(&run, "poisoned"), server.keys()), (0, 0));
    server.stop();
}

/// The story: when nothing may be in the pool (`memory.zswap.max=0`) only zero pages went to a server, and the limit was exceeded
/// by everything else. Now pages go there directly, as to a swap file.
#[test]
fn what_the_pool_may_not_hold_goes_to_a_server() {
    let _beside = beside();
    let Some(disk) = compile_c("disk") else { return };
    let Some(mut server) = Server::start("remote-directly") else { return };
    let name = format!("directly{}", std::process::id());
    let program = format!("{} ctl {name} memory.zswap.max=0 && exec {} 64 1", uzswap().display(), disk.display());
    let options = ["--group", &name, "--swap", &server.swap("")];
    let run = Subject::new("directly", &[&"sh", &"-c", &program]).with(&options).start_limited(32 * MIB).finish();
    run.say("directly", "remote", Some(32 * MIB));
    assert_eq!(ended_well(&run), 0);
    assert!(number(&run, "pswpout") > 1000 && number(&run, "pswpin") > 1000, "{}", run.describe());
    assert_eq!(number(&run, "zswpwb"), 0, "nothing went through the pool\n{}", run.describe());
    assert!(run.peak_anon_bytes <= with_slack(32 * MIB), "{} bytes\n{}", run.peak_anon_bytes, run.describe());
    assert_eq!(server.keys(), 0, "nothing is left there");
    server.stop();
}

/// No key contains the word that is in each page of the program, and every key expires if the command cannot drop it.
#[test]
fn what_leaves_is_sealed_and_expires() {
    let _beside = beside();
    let Some(python) = need("python3") else { return };
    let Some(mut server) = Server::start("remote-sealed") else { return };
    let secret = Subject::new("secret", &[&python, &fixture("secret.py"), &"64"]).with(&["--swap", &server.swap("")]);
    let running = secret.start_limited(32 * MIB);
    server.wait_for_keys(&running);
    let mut seen = 0;
    for _ in 0..20 {
        let Some(key) = server.some_key() else { continue };
        let value = server.client.one(&["GET", &key]);
        assert!(!value.windows(WORD.len()).any(|w| w == WORD), "{key} can be read");
        let ttl: i64 = server.one(&["TTL", &key]).parse().expect("seconds");
        // -2: dropped since.
        assert!(ttl == -2 || (3000..=3600).contains(&ttl), "{key} expires in {ttl} s");
        seen += value.len();
    }
    assert!(seen > 100_000, "only {seen} bytes were looked at");
    let run = running.finish();
    assert_eq!(run.stdout.text(), "0 files unreadable 0 wrong\n", "{}", run.describe());
    server.stop();
}

/// The server is killed in the middle: what it had is lost, and reported; what would have gone there stays in memory.
#[test]
fn a_server_that_dies() {
    let _beside = beside();
    let Some(disk) = compile_c("disk") else { return };
    let Some(mut server) = Server::start("remote-dies") else { return };
    let subject = Subject::new("server dies", &[&disk, &"48", &"8"]).with(&["--swap", &server.swap("&timeout=1")]);
    let running = subject.start_limited(32 * MIB);
    server.wait_for_keys(&running);
    server.stop();
    let run = running.finish();
    run.say(subject.name, "1 s", None);
    assert!(ended_well(&run) > 0, "{}", run.describe());
    let told = "uzswap: a page could not be read back from the swap server and is lost";
    assert!(run.stderr.text().contains(told), "{}", run.describe());
}

/// The command is killed, so nobody talks to the server for its program. What was there is lost, nothing hangs, and the keys
/// expire by themselves.
#[test]
fn a_command_that_is_killed() {
    let _beside = beside();
    let Some(disk) = compile_c("disk") else { return };
    let Some(mut server) = Server::start("remote-orphan") else { return };
    let said = scratch("remote-orphan-said").join("result");
    let subject = Subject::new("orphan", &[&disk, &"48", &"1", &said]).with(&["--swap", &server.swap("&ttl=600")]);
    let run = subject.start_limited(32 * MIB).finish();
    assert!(!run.status.success(), "the command was to be killed\n{}", run.describe());
    let key = server.some_key().expect("keys that nobody dropped");
    let ttl: i64 = server.one(&["TTL", &key]).parse().expect("seconds");
    assert!((500..=600).contains(&ttl), "{key} expires in {ttl} s");
    let text = line_in(&said);
    let lost: Option<u64> = text.strip_prefix("lost ").and_then(|t| t.strip_suffix(", wrong 0\n")?.parse().ok());
    assert!(lost.is_some_and(|lost| lost > 0), "{text}");
    server.stop();
}

/// Bytes changed, blocks exchanged, keys dropped: each is found out.
#[test]
fn a_server_that_lies_or_forgets() {
    let _beside = beside();
    let Some(disk) = compile_c("disk") else { return };
    for how in ["changed", "exchanged", "dropped"] {
        let Some(mut server) = Server::start("remote-lies") else { return };
        let subject = Subject::new("server lies", &[&disk, &"48", &"2"]).with(&["--swap", &server.swap("&timeout=2")]);
        let running = subject.start_limited(32 * MIB);
        server.wait_for_keys(&running);
        for _ in 0..10 {
            let (Some(one), Some(other)) = (server.some_key(), server.some_key()) else { continue };
            match how {
                "changed" => {
                    (0..60)
                        .for_each(|i| drop(server.one(&["SETRANGE", &one, &(i * 4096 + 100).to_string(), "changed"])));
                }
                "exchanged" => {
                    // Under another name: values need not be text, so the server copies them.
                    drop(server.one(&["COPY", &other, &one, "REPLACE"]));
                }
                _ => drop(server.one(&["DEL", &one])),
            }
        }
        let run = running.finish();
        run.say(subject.name, how, None);
        assert!(ended_well(&run) > 0, "{how}: nothing was lost\n{}", run.describe());
        assert!(number(&run, "swap_read_errors") > 0, "{how}\n{}", run.describe());
        server.stop();
    }
}

/// Operations wait, with new connections, for a server that does not answer for a while; no page is lost.
#[test]
fn a_server_that_stalls() {
    let _beside = beside();
    let Some(disk) = compile_c("disk") else { return };
    let Some(mut server) = Server::start("remote-stalls") else { return };
    let subject = Subject::new("server stalls", &[&disk, &"64", &"4"]).with(&["--swap", &server.swap("&timeout=9")]);
    let running = subject.start_limited(32 * MIB);
    server.wait_for_keys(&running);
    // Longer than one try takes, shorter than all.
    assert_eq!(server.one(&["CLIENT", "PAUSE", "4500", "ALL"]), "OK");
    let run = running.finish();
    run.say(subject.name, "4.5 s", None);
    assert_eq!(ended_well(&run), 0, "{}", run.describe());
    server.stop();
}

/// A server without memory refuses to write: its pages stay here. A server that would evict keys is refused.
#[test]
fn a_server_without_memory() {
    let _beside = beside();
    let Some(disk) = compile_c("disk") else { return };
    let Some(mut server) = Server::start("remote-full") else { return };
    let subject = Subject::new("server full", &[&disk, &"64", &"1"]).with(&["--swap", &server.swap("")]);
    assert_eq!(server.one(&["CONFIG", "SET", "maxmemory", "16mb"]), "OK");
    let run = subject.start_limited(32 * MIB).finish();
    run.say(subject.name, "16 MB", None);
    assert_eq!(ended_well(&run), 0);
    assert!(number(&run, "pswpout") > 0 && number(&run, "swap_write_errors") > 0, "{}", run.describe());
    assert_eq!(
        run.stderr.text().matches("uzswap: the swap server has no memory left").count(),
        1,
        "{}",
        run.describe()
    );
    assert_eq!(server.one(&["CONFIG", "SET", "maxmemory-policy", "volatile-lru"]), "OK");
    let run = subject.start_limited(32 * MIB).finish();
    assert!(!run.status.success() && run.stderr.text().contains("maxmemory-policy volatile-lru"), "{}", run.describe());
    server.stop();
}

/// The story: a hundred processes took all the descriptors that the command may have. New connections were never accepted, and
/// processes that had made a request on one stood still. And if none was left for the server, the server was taken for dead, and
/// pages were lost.
#[test]
fn many_processes_and_few_descriptors() {
    let _beside = beside();
    let Some(python) = need("python3") else { return };
    let Some(server) = Server::start("remote-many") else { return };
    let subject = Subject::new("many processes", &[&python, &fixture("manyforks.py"), &"10", &"12"]);
    // The second may not have more: connections come and go.
    for limit in ["ulimit -Sn 64", "ulimit -n 64"] {
        let mut subject = subject.clone().with(&["--swap", &server.swap("")]);
        subject.before = ["sh", "-c", &format!("{limit} && exec \"$@\""), "sh"].map(Into::into).to_vec();
        let run = subject.start_limited(96 * MIB).finish();
        run.say(subject.name, limit, None);
        assert!(run.status.success() && !run.timed_out, "{}", run.describe());
        assert_eq!(
            run.stdout.text(),
            "descriptors 64\nchildren [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]\n",
            "{}",
            run.describe()
        );
        assert!(number(&run, "pswpout") > 0 && number(&run, "pswpin") > 0, "{}", run.describe());
        assert_eq!(number(&run, "poisoned"), 0, "{}", run.describe());
    }
    server.stop();
}

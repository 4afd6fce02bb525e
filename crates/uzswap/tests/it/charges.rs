//! What is charged to a member's group, and what an idle member costs.

use crate::cli::{python, skip};
use crate::place::{MIB, Place, eventually, rss_anon, slack};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Duration;

/// CPU time of a process with all its threads, in nanoseconds.
fn cpu_ns(pid: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let of = |task: std::io::Result<fs::DirEntry>| fs::read_to_string(task.unwrap().path().join("schedstat")).unwrap();
    tasks.map(|task| of(task).split_whitespace().next().unwrap().parse::<u64>().unwrap()).sum()
}

/// Most of the program's memory is out, and it waits for input. When work under way is done, nothing of uzswap runs in it.
#[test]
fn an_idle_program_costs_no_cpu() {
    // Looks every 16 ms, as while it faults, are 125 in two seconds, of at least some 50 us each.
    const MOST_NS: u64 = 2_000_000;
    let place = Place::new();
    let mut member = place.start(&["--group", "g", "-m", "48M"]);
    member.tell("c 100");
    member.tell("v");
    let pid = member.pid();
    assert!(place.event("g", "memory.stat", "zswapped") > 0);
    // The pool may still be recompressed, so wait until two windows in a row are quiet.
    let mut quiet = 0;
    eventually("it uses no CPU for four seconds of the second's CPU time", || {
        let before = cpu_ns(pid);
        std::thread::sleep(Duration::from_secs(2));
        quiet = if cpu_ns(pid) - before <= MOST_NS { quiet + 1 } else { 0 };
        quiet == 2
    });
    member.tell("v");
    member.ends_well();
}

/// The story: a program that had filled 47 MiB executed a statically linked one, which is no member, and stayed charged with them
/// for as long as that ran. An exec that fails changes nothing.
#[test]
fn what_a_program_held_is_not_charged_to_what_it_executes() {
    let dir = tempfile::TempDir::new().unwrap();
    let (source, program, other) = (dir.path().join("s.c"), dir.path().join("static"), dir.path().join("other"));
    fs::write(&source, "#include <unistd.h>\nint main(void) { char c; return read(0, &c, 1) != 0; }\n").unwrap();
    let built = Command::new("cc").arg("-static").arg(&source).arg("-o").arg(&program).status();
    if !built.is_ok_and(|status| status.success()) {
        return skip("no statically linked program can be made here");
    }
    fs::copy(&program, &other).unwrap();
    fs::set_permissions(&other, fs::Permissions::from_mode(0o600)).unwrap();
    let place = Place::new();
    for (memory, limit) in [("c 40", "256M"), ("c 60", "48M")] {
        let mut member = place.start(&["--group", "g", "-m", limit]);
        member.tell(memory);
        let charged = || place.number("g", "memory.current");
        eventually("its charge is known", || charged() > 40 * MIB);
        member.tell(&format!("x {}", other.display()));
        eventually("it is charged still", || charged() > 40 * MIB);
        member.tell("v");
        member.send(&format!("x {}", program.display()));
        eventually("nothing is charged any more", || charged() == 0);
        member.ends_well();
    }
}

/// A7: the pool's bytes are charged to the group that stored them, beside its resident bytes, and to the groups above it.
#[test]
fn a7_the_pool_is_charged_to_the_group_that_stored_it() {
    let place = Place::new();
    let mut one = place.start(&["--group", "p/one", "-m", "48M"]);
    let mut two = place.start(&["--group", "p/two", "-m", "48M"]);
    one.tell("c 100");
    two.tell("c 8");
    let pool = |group: &str| place.number(group, "memory.zswap.current");
    eventually("they are at rest", || {
        let (current, real) = (place.number("p/one", "memory.current"), rss_anon(one.pid()));
        // Resident pages, pool and metadata together are all of the process's memory.
        let charged = pool("p/one");
        // The group that stored it, and the one above.
        current.abs_diff(real) <= MIB && charged > 8 * MIB && (pool("p/two"), pool("p")) == (0, charged)
    });
    let current = place.number("p/one", "memory.current");
    let stat = |name: &str| place.event("p/one", "memory.stat", name);
    let parts = stat("anon") + stat("zswap") + place.event("p/one", "uzswap.stat", "metadata");
    assert!(current.abs_diff(parts) <= MIB && current <= 49 * MIB, "{current} charged, {parts} in parts");
    // Freeing memory removes its charge.
    one.tell("f");
    place.ctl(&["p/one", "memory.zswap.max=max"]);
    eventually("its charge is returned", || pool("p/one") < MIB / 2 && pool("p") < MIB / 2);
    one.ends_well();
    two.ends_well();
}

/// The story: a program joined a group whose other member held 85 of their 100 MiB and was busy with them. It had 14, of the 90
/// that it used, for as long as the test ran. With a little less in the other one, it had most after some seconds, and the other
/// next to nothing.
#[test]
fn who_joins_a_full_group_gets_a_share_and_leaves_one() {
    // Uses 70 MiB at random, part of it noise, until its input ends.
    const USES: &str = "
import os, random, select, sys
size = 70 << 20
random.seed(1)
memory = bytearray(b'words, ' * (size // 7))
memory[::64] = random.randbytes(len(memory[::64]))
print(os.getpid(), flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(500):
        at = random.randrange(size - 8)
        memory[at] = (memory[at] + 1) & 255
";
    const LIMIT: u64 = 80 * MIB;
    const LEAST: u64 = 28 * MIB;
    let Some(python) = python() else { return };
    let place = Place::new();
    let run = ["run", "-q", "--group", "g", "-m", "80M", "--", python.to_str().unwrap(), "-I", "-c", USES];
    let start = || {
        let mut child = place.command(&run).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut pid = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut pid).unwrap();
        (child, pid.trim().parse::<u32>().unwrap())
    };
    let first = start();
    eventually("it has filled the group", || place.number("g", "memory.current") > 60 * MIB);
    let both = [first, start()];
    // What each holds changes all the time; and on the way there both once held the same for a moment.
    let mut since = cpu_ns(both[1].1);
    eventually("both have had a third of the limit for four seconds of the second's CPU time", || {
        let now = cpu_ns(both[1].1);
        let held = [0, 1].map(|i| rss_anon(both[i].1));
        if held.iter().any(|each| *each < LEAST) || held.iter().sum::<u64>() > LIMIT + slack(LIMIT) {
            since = now;
        }
        now - since > 4_000_000_000
    });
    for (mut child, _) in both {
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }
}

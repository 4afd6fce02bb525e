//! Groups: joined, limited live, nested, shown; and what happens to the charges of killed members.

use crate::cli::state_and_parent;
use crate::place::{MIB, Member, Place, eventually, rss_anon, slack};
use serde_json::Value;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

#[test]
fn limits_are_shown_and_set_live() {
    let place = Place::new();
    let mut member = place.start(&["--group", "web", "-m", "256M"]);
    member.tell("c 120");
    // Far below its limit nothing is managed, and the program is idle.
    eventually("its charge is known", || place.number("web", "memory.current") > 100 * MIB);
    assert_eq!(place.number("web", "memory.max"), 256 * MIB);
    assert_eq!(place.file("web", "memory.high"), "max\n");
    let said = place.ctl(&["web", "memory.max=64M"]);
    assert_eq!(said, "");
    // The command has waited until the idle program was below it, and so it is when seen from outside. (Stored data takes room
    // before its frames are freed, so while reclaim goes on below the limit, it may be above for a moment.)
    eventually("it is down to it", || place.number("web", "memory.current") <= 64 * MIB);
    let rss = rss_anon(member.pid());
    assert!(rss <= 64 * MIB + slack(64 * MIB), "{rss}");
    assert!(place.number("web", "memory.zswap.current") > 0);
    member.tell("v");
    assert!(place.event("web", "memory.stat", "zswpin") > 0);
    assert!(place.ctl(&["web", "memory.max=256M", "memory.zswap.writeback=0", "uzswap.on_full=wait"]).is_empty());
    let shown = String::from_utf8(place.call(&["ctl", "web"]).stdout).unwrap();
    assert_eq!(
        shown,
        format!(
            "memory.high max\nmemory.max {}\nmemory.zswap.max max\nmemory.swap.max max\nmemory.zswap.writeback 0\n\
             uzswap.on_full wait\n",
            256 * MIB
        )
    );
    member.ends_well();
}

/// The list shows present usage, whenever members last published it.
#[test]
fn the_list_tells_what_idle_members_use() {
    let place = Place::new();
    let mut member = place.start(&["--group", "web/worker", "-m", "512M"]);
    member.tell("c 120");
    let output = String::from_utf8(place.call(&["stat"]).stdout).unwrap();
    let used: Vec<u64> =
        output.lines().skip(1).map(|l| l.split_whitespace().nth(2).unwrap().parse().unwrap()).collect();
    assert!(used.len() == 2 && used.iter().all(|used| *used > 100 * MIB), "{output}");
    member.tell("c 60");
    let listed: Value = serde_json::from_slice(&place.call(&["stat", "--json"]).stdout).unwrap();
    let used = listed.as_array().unwrap().iter().map(|group| group["files"]["memory.current"].as_u64().unwrap());
    assert!(used.clone().count() == 2 && used.clone().all(|used| used > 160 * MIB), "{listed}");
    member.ends_well();
}

#[test]
fn shrinking_never_kills_and_says_what_stays() {
    let place = Place::new();
    let mut member = place.start(&["--group", "noise", "-m", "256M", "--on-full", "kill"]);
    member.tell("r 70");
    let said = place.ctl(&["noise", "memory.max=32M"]);
    assert!(said.contains("memory.max of `noise` is 32 MiB") && said.contains("still used"), "{said}");
    member.tell("v");
    eventually("the group is full", || place.event("noise", "memory.events", "oom") > 0);
    assert_eq!(place.event("noise", "memory.events", "oom_kill"), 0);
    let said = member.ends_well();
    assert!(said.contains("the group `noise` is full") && said.contains("too much"), "{said}");
}

#[test]
fn on_full_exceed_goes_on() {
    let place = Place::new();
    let mut member = place.start(&["--group", "g", "-m", "32M"]);
    member.tell("r 60");
    member.tell("v");
    // Reclaim has to find out first.
    eventually("the group is full", || place.event("g", "memory.events", "oom") > 0);
    assert!(place.number("g", "memory.current") > 40 * MIB);
    let said = member.ends_well();
    assert!(said.contains("is full") && said.contains("(--on-full=exceed)"), "{said}");
    assert_eq!(said.lines().count(), 1, "said once: {said}");
}

#[test]
fn on_full_kill_kills_the_largest() {
    let place = Place::new();
    let mut small = place.start(&["--group", "g", "-m", "64M", "--on-full", "kill"]);
    small.tell("r 8");
    let mut large = place.start(&["--group", "g"]);
    large.send("r 120");
    // It may have finished filling by then, as reclaim has to find out first.
    eventually("a member is killed", || place.event("g", "memory.events", "oom_kill") > 0);
    // Do not tell it to end: it might end before it is killed.
    let (said, status) = (large.stderr(), large.child.wait().unwrap());
    assert_eq!(status.signal(), Some(libc::SIGKILL), "{said}");
    small.tell("v");
    assert_eq!(place.event("g", "memory.events", "oom_kill"), 1);
    let said = said + &small.ends_well();
    assert!(said.contains("is full") && said.contains("is killed, which holds"), "{said}");
}

/// A stopped member has plenty to give, and gives nothing: the group is full all the same, until the member goes on.
#[test]
fn a_group_is_full_whose_largest_member_is_stopped() {
    let place = Place::new();
    let mut large = place.start(&["--group", "g", "-m", "64M"]);
    large.tell("c 45");
    eventually("its charge is known", || place.number("g", "memory.current") > 45 * MIB);
    let signal = |pid: u32, signal: i32| {
        // SAFETY: a signal to a process of this test's.
        assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
    };
    signal(large.pid(), libc::SIGSTOP);
    let mut small = place.start(&["--group", "g"]);
    small.tell("r 35");
    eventually("the group is full", || place.event("g", "memory.events", "oom") > 0);
    // The command stops with its program.
    [large.pid(), large.command()].into_iter().for_each(|pid| signal(pid, libc::SIGCONT));
    eventually("it gives what it can", || place.number("g", "memory.current") <= 64 * MIB);
    small.tell("v");
    large.tell("v");
    let said = small.ends_well() + &large.ends_well();
    assert_eq!(said.matches("the group `g` is full").count(), 1, "{said}");
}

/// The story: members keep 8 MiB beside what cannot be evicted, also those that slept. The group exceeded its limit for as long, and
/// a small member that worked had next to nothing.
#[test]
fn a_member_that_sleeps_gives_all_before_the_group_is_full() {
    let place = Place::new();
    let mut sleeper = place.start(&["--group", "g", "-m", "40M", "--on-full", "kill"]);
    sleeper.tell("r 18");
    sleeper.tell("c 18");
    let mut other = place.start(&["--group", "g"]);
    other.tell("r 10");
    eventually("the limit is kept", || place.number("g", "memory.current") <= 40 * MIB);
    // What verifies works, and keeps its floor: one after the other has gone.
    for mut member in [other, sleeper] {
        member.tell("v");
        member.ends_well();
    }
}

#[test]
fn on_full_wait_waits_for_room() {
    let place = Place::new();
    let mut member = place.start(&["--group", "g", "-m", "32M", "--on-full", "wait"]);
    member.tell("c 1");
    member.send("r 80");
    // The member waits once the group has said that it is full, until there is room.
    eventually("the group is full", || place.event("g", "memory.events", "oom") > 0);
    let faults = || place.event("g", "memory.stat", "pgfault");
    let mut before = faults();
    eventually("no fault is served", || {
        std::thread::sleep(Duration::from_millis(200));
        std::mem::replace(&mut before, faults()) == before
    });
    assert!(place.number("g", "memory.current") < 70 * MIB, "it waits");
    place.ctl(&["g", "memory.max=256M"]);
    assert_eq!(member.answer(), "ok");
    member.tell("v");
    let said = member.ends_well();
    assert!(said.contains("wait until there is room"), "{said}");
}

#[test]
fn above_high_members_are_held_back_and_reclaimed() {
    let place = Place::new();
    let mut member = place.start(&["--group", "g", "-m", "512M"]);
    member.tell("c 1");
    place.ctl(&["g", "memory.high=40M"]);
    member.tell("c 150");
    assert!(place.event("g", "memory.events", "high") > 0);
    assert_eq!(place.event("g", "memory.events", "max"), 0);
    member.tell("v");
    let used = place.number("g", "memory.current");
    assert!(used <= 40 * MIB + slack(40 * MIB), "{used}");
    // Incompressible memory may exceed it, slowly, and the member is not ended for that.
    member.tell("r 1");
    assert_eq!(place.event("g", "memory.events", "oom"), 0);
    member.ends_well();
}

#[test]
fn the_pools_limit_is_kept_and_zeros_need_none() {
    let place = Place::new();
    let mut member = place.start(&["--group", "g", "-m", "48M"]);
    member.tell("c 1");
    place.ctl(&["g", "memory.zswap.max=0"]);
    member.tell("z 100");
    member.tell("v");
    assert_eq!(place.number("g", "memory.zswap.current"), 0);
    assert!(place.number("g", "memory.current") <= 48 * MIB + slack(48 * MIB), "zeros need no pool");
    place.ctl(&["g", "memory.zswap.max=4M"]);
    member.tell("c 100");
    let pool = place.number("g", "memory.zswap.current");
    assert!(pool <= 4 * MIB + MIB / 2, "{pool}");
    assert!(place.event("g", "memory.swap.events", "fail") > 0);
    assert!(place.number("g", "zswap/pool_limit_hit") > 0);
    // Without a limit on the pool, the group's limit can be kept.
    place.ctl(&["g", "memory.zswap.max=max"]);
    place.ctl(&["g", "memory.max=48M"]);
    assert!(place.number("g", "memory.current") <= 48 * MIB + slack(48 * MIB));
    member.tell("v");
    let said = member.ends_well();
    assert!(said.contains("memory.zswap.max is full too"), "{said}");
}

#[test]
fn limits_of_a_parent_bound_its_children() {
    let place = Place::new();
    let mut one = place.start(&["--group", "p/one", "-m", "512M"]);
    one.tell("c 1");
    assert_eq!(place.file("p", "memory.max"), "max\n", "a parent made on the way has no limit");
    place.ctl(&["p", "memory.max=80M"]);
    let mut two = place.start(&["--group", "p/two", "-m", "512M", "-c", "zstd"]);
    one.tell("c 90");
    two.tell("c 90");
    eventually("the parent's limit is kept", || place.number("p", "memory.current") <= 80 * MIB + MIB);
    let (a, b) = (place.number("p/one", "memory.current"), place.number("p/two", "memory.current"));
    assert!(a > MIB && b > MIB && a + b <= 96 * MIB, "{a} {b}");
    let outside = rss_anon(one.pid()) + rss_anon(two.pid());
    assert!(outside <= 80 * MIB + slack(80 * MIB), "{outside}");
    // Events at the parent's limit are not events of the children; those of the children count for the parent.
    assert!(place.event("p", "memory.events", "max") > 0);
    assert_eq!(place.event("p/one", "memory.events", "max") + place.event("p/two", "memory.events", "max"), 0);
    place.ctl(&["p/one", "memory.high=32M"]);
    one.tell("c 10");
    // In this order, as more may happen between the two reads.
    let own = place.event("p/one", "memory.events", "high");
    assert!(own > 0 && place.event("p", "memory.events", "high") >= own);
    two.tell("v");
    let list = String::from_utf8(place.call(&["stat"]).stdout).unwrap();
    let names: Vec<&str> = list.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["GROUP", "p", "p/one", "p/two"]);
    one.ends_well();
    two.ends_well();
}

/// Charges and uncharges balance. (A4: upstream once uncharged pages that were never charged, when a store stopped half way, and
/// the counter fell below zero.) Here each charge is what its owner holds; when everything is given back, nothing
/// must be left, and no counter may be below zero.
#[test]
fn what_is_freed_is_uncharged_exactly() {
    let place = Place::new();
    let mut member = place.start(&["--group", "g", "-m", "64M"]);
    for round in 0..3 {
        member.tell("c 100");
        // In a pool that is too small for it, stores stop half way.
        place.ctl(&["g", if round == 1 { "memory.zswap.max=8M" } else { "memory.zswap.max=max" }]);
        member.tell("c 50");
        assert!(place.number("g", "memory.zswap.current") > 0);
        assert!(place.event("g", "memory.stat", "zswapped") > 0);
        member.tell("f");
        // This wakes the member, which publishes what it holds.
        place.ctl(&["g", "memory.zswap.max=max"]);
        // Except for a few pages of the C library's own.
        eventually("nothing is left in the pool", || {
            place.event("g", "memory.stat", "zswapped") < MIB && place.number("g", "memory.zswap.current") < MIB / 2
        });
        let (charge, real) = (place.number("g", "memory.current"), rss_anon(member.pid()));
        assert!(charge.abs_diff(real) <= MIB, "charged {charge}, has {real}");
    }
    member.ends_well();
}

/// Members are killed at any instruction: their charges must be returned, and nothing of the living be lost.
#[test]
fn killed_members_are_uncharged() {
    let place = Place::new();
    let mut keeper = place.start(&["--group", "g", "-m", "96M"]);
    keeper.tell("c 60");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = now.as_nanos() as u64 | 1;
    println!("seed {seed}");
    let mut x = seed;
    let mut random = |n: u64| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x % n
    };
    let mut members: Vec<Member> = Vec::new();
    for _ in 0..40 {
        let mut member = place.start(&["--group", "g"]);
        member.send(&format!("c {}", 1 + random(60)));
        members.push(member);
        // Killed while it starts, grows, is swapped out or waits; sometimes its command instead, which leaves it behind.
        std::thread::sleep(Duration::from_micros(random(60_000)));
        while members.len() > random(4) as usize {
            let mut member = members.swap_remove(random(members.len() as u64) as usize);
            let (program, command) = (member.pid(), random(4) == 0);
            let pid = if command { member.child.id() } else { program };
            // SAFETY: no memory is involved; the process is this test's and not waited for.
            assert_eq!(unsafe { libc::kill(pid as i32, libc::SIGKILL) }, 0);
            drop(member.input.take());
            member.child.wait().unwrap();
            if command {
                // The program is an orphan now, and ends when its input does.
                eventually("the orphan ends", || state_and_parent(program).is_none_or(|(state, _)| state == 'Z'));
            }
        }
    }
    for mut member in members {
        member.child.kill().unwrap();
        drop(member.input.take());
        member.child.wait().unwrap();
    }
    eventually("only the keeper is left", || place.file("g", "cgroup.procs").lines().count() == 1);
    keeper.tell("v");
    place.ctl(&["g", "memory.max=96M"]);
    let (charge, real) = (place.number("g", "memory.current"), rss_anon(keeper.pid()));
    assert!(charge.abs_diff(real) <= MIB, "charged {charge}, has {real}");
    assert_eq!(place.file("g", "cgroup.procs"), format!("{}\n", keeper.pid()));
    keeper.ends_well();
    assert!(place.refusal(&["stat", "g"]).contains("no such group"));
}

#[test]
fn a_group_outlives_the_command_that_made_it() {
    let place = Place::new();
    let mut first = place.start(&["--group", "g", "-m", "64M"]);
    first.tell("c 1");
    let mut second = place.start(&["--group", "g"]);
    second.tell("c 1");
    // When killed, it leaves its link behind.
    first.child.kill().unwrap();
    first.child.wait().unwrap();
    drop(first.input.take());
    let mut third = place.start(&["--group", "g"]);
    third.tell("c 100");
    assert!(place.number("g", "memory.current") <= 64 * MIB + slack(64 * MIB));
    second.ends_well();
    third.ends_well();
    assert!(place.refusal(&["stat", "g"]).contains("no such group"));
    assert_eq!(fs::read_dir(place.path().join("uzswap")).unwrap().count(), 0, "nothing is left behind");
}

/// `memory.zswap.writeback` and `memory.swap.max` apply to the disk, and the counters say what was done.
#[test]
fn what_goes_to_disk_is_bounded_by_the_group() {
    let place = Place::new();
    for policy in ["balanced", "second-chance", "reuse"] {
        let mut member = place.start(&["--group", "g", "-m", "64M", "--swap", "1G", "--swap-policy", policy]);
        member.tell("c 1");
        place.ctl(&["g", "memory.zswap.writeback=0"]);
        member.tell("r 100");
        member.tell("v");
        assert!(place.number("g", "memory.zswap.current") > 0);
        assert_eq!(place.number("g", "memory.swap.current"), 0, "{policy}: written back though it was forbidden");
        place.ctl(&["g", "memory.swap.max=8M", "memory.zswap.writeback=1"]);
        member.tell("v");
        let used = || place.number("g", "memory.swap.current");
        eventually("some is on disk", || used() > 4 * MIB);
        eventually("memory.swap.max is met", || place.event("g", "memory.swap.events", "max") > 0);
        member.tell("v");
        assert!(used() <= 8 * MIB, "{policy}: {}", used());
        place.ctl(&["g", "memory.swap.max=max"]);
        member.tell("v");
        // Do not wait forever for a disk that others keep busy.
        eventually("more is on disk", || used() > 16 * MIB);
        let limit = 64 * MIB;
        eventually("the limit is kept", || place.number("g", "memory.current") <= limit + slack(limit));
        for counter in ["zswpwb", "pswpin", "pswpout"] {
            assert!(place.event("g", "memory.stat", counter) > 0, "{policy}: {counter}");
        }
        // Writing may go on between two looks.
        eventually("one counter has two names", || {
            place.number("g", "zswap/written_back_pages") == place.event("g", "memory.stat", "zswpwb")
        });
        assert_eq!(place.number("g", "zswap/reject_reclaim_fail"), 0);
        member.ends_well();
    }
}

#[test]
fn one_sentence_for_each_mistake() {
    let place = Place::new();
    let run = |args: &[&str]| place.refusal(&[&["run", "-q"], args, &["--", "/bin/true"]].concat());
    assert!(run(&["--group", "web"]).contains("no such group: `web` is not running; add --memory"));
    assert!(run(&["--group", "a b", "-m", "64M"]).contains("not a name for a group"));
    assert!(run(&["--group", "17", "-m", "64M"]).contains("add a letter"));
    assert!(run(&["--group", "web", "-m", "1M"]).contains("minimum is 16 MiB"));
    assert!(run(&["-m", "64M", "--on-full", "panic"]).contains("choose exceed, wait or kill"));
    assert!(place.refusal(&["stat", "web"]).contains("no such group: `web` is not running (running: none)"));
    assert!(place.refusal(&["ctl", "web", "memory.max=64M"]).contains("no such group"));
    let mut web = place.start(&["--group", "web", "-m", "64M"]);
    web.tell("c 1");
    assert!(run(&["--group", "web", "-m", "65M"]).contains("the name `web` is taken"));
    assert!(run(&["--group", "web", "-c", "zstd"]).contains("the name `web` is taken"));
    assert!(run(&["--group", "web", "--on-full", "kill"]).contains("the name `web` is taken"));
    assert!(run(&["--group", "web/one"]).contains("no such group: `web/one`"));
    assert!(place.refusal(&["ctl", "web/one"]).contains("running: web"));
    for (setting, part) in [
        ("memory.low=64M", "the keys are memory.high"),
        ("memory.high", "has no value"),
        ("memory.high=much", "`much` is not a size"),
        ("memory.max=1M", "the minimum is 16 MiB"),
    ] {
        // If one setting is wrong, none is made.
        assert!(place.refusal(&["ctl", "web", "memory.max=128M", setting]).contains(part), "{setting}");
        assert_eq!(place.number("web", "memory.max"), 64 * MIB);
    }
    let unknown = place.refusal(&["stat", "web", "memory.low"]);
    assert!(unknown.contains("no file is called `memory.low`") && unknown.contains("zswap/stored_pages"), "{unknown}");
    // A counter for each folio size made this a sentence of 3,700 characters once.
    assert!(unknown.contains("hugepages-16kB/stats/FILE") && unknown.len() < 1000, "{unknown}");
    fs::set_permissions(place.path().join("uzswap"), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    assert!(place.refusal(&["stat"]).contains("not yours alone, so it is not trusted: chmod 700"));
    // A run without a name needs no directory.
    assert!(place.call(&["run", "-q", "-m", "64M", "--", "/bin/true"]).status.success());
    fs::set_permissions(place.path().join("uzswap"), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    web.ends_well();
}

#[test]
fn stat_in_the_kernels_formats_and_json() {
    let place = Place::new();
    let mut member = place.start(&["--group", "g", "-m", "32M"]);
    member.tell("c 80");
    member.tell("v");
    // Reclaim goes on for a while: if a counter left zero between the listing and the JSON, take both again.
    let (mut all, mut json) = (String::new(), Value::Null);
    eventually("the listing and JSON have the same files", || {
        all = String::from_utf8(place.call(&["stat", "g"]).stdout).unwrap();
        json = serde_json::from_slice(&place.call(&["stat", "g", "--json"]).stdout).unwrap();
        // The listing omits counters of orders that are zero.
        let idle = |(name, content): (&String, &Value)| name.starts_with("hugepages-") && *content == 0;
        let files = json["files"].as_object().unwrap();
        files.iter().all(|file| all.contains(&format!("==> {} <==", file.0)) != idle(file))
    });
    assert!(all.starts_with("==> memory.current <==\n") && all.contains("\n\n==> memory.events <==\nlow 0\nhigh "));
    let files = json["files"].as_object().unwrap();
    assert_eq!(json["name"], "g");
    assert_eq!(files["memory.max"], 32 * MIB);
    assert!(files["memory.high"].is_null());
    assert!(all.contains("==> hugepages-"));
    for counter in ["zswpin", "zswpout", "pgfault", "pgmajfault", "anon", "zswap"] {
        assert!(files["memory.stat"][counter].as_u64().unwrap() > 0, "{counter}: {}", files["memory.stat"]);
    }
    assert_eq!(files["cgroup.procs"], serde_json::json!([member.pid()]));
    let list: Value = serde_json::from_slice(&place.call(&["stat", "--json"]).stdout).unwrap();
    assert_eq!(list.as_array().unwrap().len(), 1);
    // A run without a name is known by the pid of its command.
    let mut unnamed = place.start(&["-m", "32M"]);
    unnamed.tell("c 1");
    let name = unnamed.child.id().to_string();
    assert_eq!(place.number(&name, "memory.max"), 32 * MIB);
    place.ctl(&[&name, "memory.max=16M"]);
    unnamed.ends_well();
    member.ends_well();
}

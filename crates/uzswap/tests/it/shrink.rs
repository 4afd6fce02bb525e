//! When pools are full, all members of all groups below the full one write back, in turn.

use crate::place::{MIB, Member, Place, eventually, slack};
use std::process::Command;

const SWAP: [&str; 2] = ["--swap", "1G"];

/// Pages all of a member out, as on a command's request: none of it is in use afterwards.
fn put_out(place: &Place, member: &Member) {
    let output = place.call(&["pagemap", &member.pid().to_string(), "--page-out", "all"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Two processes in groups of one tree, which have paged everything out.
fn two(place: &Place) -> [Member; 2] {
    ["p/a", "p/b"].map(|group| {
        let mut member = place.start(&[&["--group", group, "-m", "512M"][..], &SWAP].concat());
        member.tell("r 24");
        put_out(place, &member);
        member
    })
}

/// Three processes, two of them in one group, have paged everything out and are idle. Then their parent's pools may take half of
/// what they do, and one of the three stores something. Once only that one wrote: nobody woke the others, whose memory was as
/// cold, and the pools stayed above their limit.
#[test]
fn idle_members_of_other_groups_write_when_it_is_their_turn() {
    let place = Place::new();
    let create = ["-m", "512M"];
    let start = |group: &str, more: &[&str]| place.start(&[&["--group", group], more, &SWAP].concat());
    let mut members = [("p/a", &create[..]), ("p/a", &[]), ("p/b", &create)].map(|(group, more)| {
        let mut member = start(group, more);
        member.tell("r 24");
        put_out(&place, &member);
        member
    });
    let pools = || place.number("p", "memory.zswap.current");
    let written = || ["p/a", "p/b"].map(|group| place.event(group, "memory.stat", "zswpwb"));
    let (before, held) = (written(), pools());
    let most = held / 2 / MIB * MIB;
    assert!(most > 8 * MIB, "{held}");
    place.ctl(&["p", &format!("memory.zswap.max={most}")]);
    members[0].tell("r 1");
    put_out(&place, &members[0]);
    eventually("the pools are as small as they are to be", || pools() <= most / 100 * 95);
    eventually("the idle group has written", || written()[1] > before[1]);
    let gave = [0, 1].map(|i| written()[i] - before[i]);
    println!("{} MiB in the pools, then {}; pages that each group wrote: {gave:?}", held / MIB, pools() / MIB);
    assert!(gave.iter().all(|pages| *pages >= (gave[0] + gave[1]) / 8), "{gave:?}");
    for member in &mut members {
        member.tell("v");
    }
    members.into_iter().for_each(|member| _ = member.ends_well());
}

/// The story: when `memory.zswap.max` was set below what pools held, nobody woke the threads that write, and idle programs kept
/// their pools.
#[test]
fn pools_of_idle_members_are_written_when_their_limit_is_set() {
    let place = Place::new();
    let mut members = two(&place);
    let pools = || place.number("p", "memory.zswap.current");
    let most = pools() / 2 / MIB * MIB;
    assert!(most > 8 * MIB, "{most}");
    place.ctl(&["p", &format!("memory.zswap.max={most}")]);
    eventually("the pools are as small as they are to be", || pools() <= most / 100 * 95);
    members.iter_mut().for_each(|member| member.tell("v"));
    members.into_iter().for_each(|member| _ = member.ends_well());
}

/// Others do not wait for the turn of a stopped member.
#[test]
fn a_stopped_member_holds_nobody_up() {
    let place = Place::new();
    let mut members = two(&place);
    // A command stops with its program, and does not go on with it.
    let (program, command) = (members[1].pid().to_string(), members[1].command().to_string());
    let send = |signal: &str, to: &str| {
        let done = Command::new("kill").args([signal, to]).status();
        assert!(done.is_ok_and(|status| status.success()));
    };
    send("-STOP", &program);
    let held = place.number("p/a", "memory.zswap.current");
    let stopped = place.number("p/b", "memory.zswap.current");
    // Everything that goes must be the other one's.
    let most = (stopped + held / 4) / 95 * 100;
    place.ctl(&["p", &format!("memory.zswap.max={most}")]);
    members[0].tell("r 1");
    put_out(&place, &members[0]);
    eventually("the other has made all the room", || place.number("p", "memory.zswap.current") <= most / 100 * 95);
    assert_eq!(place.number("p/b", "memory.zswap.current"), stopped);
    send("-CONT", &program);
    send("-CONT", &command);
    for member in &mut members {
        member.tell("v");
    }
    members.into_iter().for_each(|member| _ = member.ends_well());
}

/// The story: if nothing may be in the pool, only zero pages left, as if there were no swap file. Memory that the pool refuses
/// goes to swap directly, as in the kernel.
#[test]
fn what_the_pool_may_not_hold_goes_to_the_swap_file() {
    let place = Place::new();
    let mut member = place.start(&[&["--group", "g", "-m", "48M"][..], &SWAP].concat());
    let limit = 48 * MIB;
    member.tell("c 1");
    place.ctl(&["g", "memory.zswap.max=0"]);
    for data in ["c 60", "r 60"] {
        member.tell(data);
        let (used, disk) = (place.number("g", "memory.current"), place.number("g", "memory.swap.current"));
        let pool = place.number("g", "memory.zswap.current");
        println!("{data}: {} of 48 MiB used, {} KiB on disk, {} KiB in the pool", used / MIB, disk >> 10, pool >> 10);
        assert!(used <= limit + slack(limit) && disk > 0, "{data}: {used} bytes used, {disk} on disk");
    }
    member.tell("v");
    eventually("what waits has been written, and what was read back has gone", || {
        place.number("g", "memory.zswap.current") <= 8 * MIB
    });
    place.ctl(&["g", "memory.zswap.max=max"]);
    member.tell("v");
    member.ends_well();
}

/// The same with less room on disk than needed: what finds none is in the pool, and no more follows it. (36 MiB find no room; up
/// to 10 were in the pool in some 70 runs.)
#[test]
fn what_finds_no_room_on_disk_does_not_fill_a_pool_that_may_hold_nothing() {
    let place = Place::new();
    let mut member = place.start(&["--group", "g", "-m", "48M", "--swap", "16M"]);
    member.tell("c 1");
    place.ctl(&["g", "memory.zswap.max=0"]);
    member.tell("r 100");
    for _ in 0..3 {
        // All of it was just in the program, and leaves when that is tried again.
        eventually("the disk is nearly full", || {
            let (pool, disk) = (place.number("g", "memory.zswap.current"), place.number("g", "memory.swap.current"));
            println!("{} KiB on disk, {} KiB in the pool", disk >> 10, pool >> 10);
            assert!(pool <= 14 * MIB, "{pool} bytes in the pool, {disk} on disk");
            disk >= 10 * MIB
        });
        member.tell("v");
    }
    let said = member.ends_well();
    assert!(said.contains("is full"), "{said}");
}

//! QEMU, emulating a guest that fills and verifies its RAM (`fixtures/guest.c`), at half of that RAM and at a quarter.
//!
//! It is emulated in software: with KVM inside a virtual machine, nested page tables may make a guest like this take minutes,
//! without uzswap too.

use crate::harness::*;
use std::path::PathBuf;
use std::process::Command;

/// The guest's RAM.
const RAM_MIB: u64 = 128;
/// QEMU's status if the guest found every word right: twice what the guest wrote to isa-debug-exit, plus one.
const RIGHT: i32 = 2 * 0x10 + 1;

/// The guest: 32-bit, without libraries, so any C compiler for x86 builds it.
fn guest() -> Option<PathBuf> {
    let cc = need("cc")?;
    let out = scratch("guest").join("guest.elf");
    build(
        Command::new(cc)
            .args(["-m32", "-O2", "-ffreestanding", "-nostdlib", "-static", "-fno-pic", "-no-pie"])
            .args(["-fno-stack-protector", "-fno-asynchronous-unwind-tables", "-Wall", "-Wextra", "-Werror"])
            .args(["-Wl,-Ttext=0x100000,--build-id=none", "-o"])
            .arg(&out)
            .arg(fixture("guest.c")),
    );
    Some(out)
}

#[test]
fn qemu_guest_verifies_its_memory() {
    let _beside = beside();
    let Some(qemu) = need("qemu-system-x86_64") else { return };
    let Some(guest) = guest() else { return };
    let ram = RAM_MIB.to_string();
    let arguments = "-accel tcg,tb-size=8 -nodefaults -no-reboot -display none -serial stdio \
                     -device isa-debug-exit,iobase=0xf4,iosize=4";
    let mut subject = Subject::new("qemu guest", &[&qemu, &"-m", &ram, &"-kernel", &guest]);
    subject.argv.extend(arguments.split_whitespace().map(Into::into));
    let plain = subject.start_plain().finish();
    plain.say(subject.name, "plain", None);
    let said = plain.stdout.text();
    let works = plain.status.code() == Some(RIGHT) && said.contains(" 0 wrong");
    assert!(works, "it does not work without uzswap\n{}", plain.describe());
    // Nearly all of its RAM is filled, except the firmware's, the guest's own, and what lies below them.
    let pages: u64 = said.split_once("guest: ").and_then(|(_, s)| s.split(' ').next()?.parse().ok()).unwrap_or(0);
    assert!(pages * 4096 > (RAM_MIB - 8) * MIB && plain.peak_anon_bytes > RAM_MIB * MIB, "{}", plain.describe());
    for percent in [50, 25] {
        let limit = RAM_MIB * MIB * percent / 100;
        let limited = subject.start_limited(limit).finish();
        limited.say(subject.name, &format!("{percent} %"), Some(limit));
        let at = format!("a guest at {percent} % of its RAM");
        assert!(!limited.timed_out && limited.status == plain.status, "{at}\n{}", limited.describe());
        let same = limited.stdout.hash == plain.stdout.hash && limited.stdout.bytes == plain.stdout.bytes;
        assert!(same, "{at}: it said\n{said}\n{}", limited.describe());
        assert_limited(&at, &limited, Some(with_slack(limit)));
    }
}

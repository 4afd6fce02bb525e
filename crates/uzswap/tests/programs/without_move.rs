//! Programs as on a kernel without UFFDIO_MOVE (before 6.8), where pages are taken by `mremap` and come back by copies: a
//! selection of what runs with MOVE. `move=never` does that on any kernel, and leaves out whatever else such a kernel lacks. If a
//! package of such a kernel can be had, it is booted.

use crate::harness::*;
use crate::injected::{survives, with_faults};
use crate::{python, python_with_numpy, redis};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

fn compiled(name: &'static str, arguments: &[&dyn AsRef<std::ffi::OsStr>]) -> Option<Subject> {
    let program = compile_c(name)?;
    let mut argv: Vec<&dyn AsRef<std::ffi::OsStr>> = vec![&program];
    argv.extend(arguments);
    Some(Subject::new(name, &argv).without_move())
}

#[test]
fn without_move_arrays_are_right() {
    let _beside = beside();
    let Some(python) = python_with_numpy() else { return };
    for what in ["sort", "random"] {
        Subject::new("numpy", &[&python, &fixture("arrays.py"), &what]).keeps_limit().without_move().check();
    }
}

#[test]
fn without_move_forked_children_are_right() {
    let _beside = beside();
    let Some(python) = python() else { return };
    Subject::new("multiprocessing", &[&python, &fixture("forks.py")]).without_move().check();
    for (name, seed) in [("rawfork", "1"), ("forkstorm", "1"), ("ownstack", "1")] {
        let Some(program) = compiled(name, &[&seed]) else { return };
        program.check();
    }
}

#[test]
fn without_move_redis_saves_what_it_had() {
    redis::saves_what_it_had("redis-without-move", &[100, 50], Subject::without_move);
}

/// The story: the kernel unregisters a whole mapping when a part of it came by `mremap`. Evicted pages beside the part that had
/// moved read as zeros, in one of ten runs of `model`.
#[test]
fn without_move_every_memory_call_is_followed() {
    let _beside = beside();
    let new = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_secs()).to_string();
    say(&format!("model: seed {new}"));
    for (name, seed) in
        [("mix", "1"), ("remaps", "1"), ("frames", "1"), ("model", "3"), ("model", &new), ("segments", "")]
    {
        let Some(program) = compiled(name, &[&seed]) else { return };
        program.check();
    }
}

#[test]
fn without_move_stress_ng_verifies() {
    let _beside = beside();
    let Some(stress) = need("stress-ng") else { return };
    let dir = env!("CARGO_TARGET_TMPDIR");
    let mut subject = Subject::new("stress-ng", &[&stress, &"--temp-path", &dir]).prints_anything().without_move();
    let arguments = "--vm 1 --vm-bytes 96M --vm-method rand-set --verify -t 2";
    subject.argv.extend(arguments.split_whitespace().map(Into::into));
    subject.check();
}

#[test]
fn without_move_failures_are_survived() {
    let _beside = beside();
    let Some(mix) = compiled("mix", &[&"1"]) else { return };
    let all = "move=never,move_out=1/20,move_in=1/10,copy=1/10,pool=1/10,event=1/50";
    survives(&mix, 40 * MIB, &[(&["move_out", "move_in", "copy", "pool", "event"], all)]);
}

/// Such a kernel cannot poison a page either.
#[test]
fn without_move_lost_pages_raise_sigbus() {
    let _beside = beside();
    let Some(lost) = compile_c("lost") else { return };
    let run = with_faults(&Subject::new("damage, caught", &[&lost, &"catch"]), 32 * MIB, "move=never,damage=1/100");
    let poisoned = number(&run, "poisoned");
    assert!(run.status.success() && poisoned > 0, "{}", run.describe());
    assert_eq!(run.stdout.text(), format!("lost {poisoned}, wrong 0\n"), "{}", run.describe());
    let run = with_faults(&Subject::new("damage", &[&lost]), 32 * MIB, "move=never,damage=1/20");
    let ended = run.status.signal() == Some(libc::SIGBUS) || run.status.code() == Some(128 + libc::SIGBUS);
    assert!(ended && run.stdout.bytes == 0, "{}", run.describe());
}

/// What a device writes to a page that was taken would be lost. So nothing is taken from then on, which is reported once. Locked
/// memory stays, and stays locked. (Descriptors from `mkostemp`, or from libc's `syscall`, went unnoticed once.)
#[test]
fn without_move_pinned_and_locked_memory_stays() {
    const TOLD: &str = "its memory is no longer limited";
    let _beside = beside();
    let Some(pinned) = compile_c("pinned") else { return };
    let pins = ["direct", "setfl", "syscall", "temporary", "ring"].map(|how| (how, true));
    for (how, told) in pins.into_iter().chain([("locked", false), ("plain", false)]) {
        let file = scratch("pinned-file").join("data");
        let subject = Subject::new("pinned", &[&pinned, &how, &file]).without_move();
        let run = subject.start_limited(32 * MIB).finish();
        run.say("pinned", how, Some(32 * MIB));
        if run.status.code() == Some(77) {
            say(&format!("SKIPPED {how}: {}", run.stdout.text().trim()));
            continue;
        }
        assert!(run.status.success() && run.stdout.text() == "0 wrong\n", "{how}\n{}", run.describe());
        assert_eq!(run.stderr.text().matches(TOLD).count(), usize::from(told), "{how}\n{}", run.describe());
        // All 64 MiB, as the kernel saw it: samples miss the end of so short a run.
        let right = if told { run.rss_max_bytes >= 64 * MIB } else { run.peak_anon_bytes < 62 * MIB };
        assert!(right, "{how}\n{}", run.describe());
    }
}

#[test]
fn without_move_writes_are_not_tracked() {
    let run = Subject::new("true", &[&"/bin/true"]).with(&["--track-writes"]).without_move().start_limited(32 * MIB);
    let run = run.finish();
    assert!(
        !run.status.success() && run.stderr.text().contains("--track-writes needs UFFDIO_MOVE"),
        "{}",
        run.describe()
    );
}

/// Linux 5.10, the oldest that is not refused, and 6.1, with `uzswap` and what it needs in their first file system.
#[test]
fn kernels_without_move_are_booted() {
    let _beside = beside();
    let Some(qemu) = need("qemu-system-x86_64") else { return };
    let kernels = old_kernels();
    if kernels.is_empty() {
        // A skip even if everything is required: not every machine has such a package.
        return say(
            "SKIPPED kernels_without_move_are_booted: no kernel in target/old-kernel (./test fetches them where it may)",
        );
    }
    let (Some(lost), Some(keys), Some(cc)) = (compile_c("lost"), compile_c("keys"), need("cc")) else { return };
    let dir = scratch("old-kernel");
    let init = dir.join("init");
    build(Command::new(cc).args(["-O2", "-static", "-Wall", "-Werror", "-o"]).arg(&init).arg(fixture("init.c")));
    let run = |program: &str| format!("/bin/uzswap run --memory {GUEST_LIMIT} -- /bin/{program}\n");
    let commands = format!("/bin/uzswap doctor\n{}{}", run("lost"), run("keys"));
    let initrd = dir.join("initrd");
    let programs = [("bin/lost", &*lost), ("bin/keys", &*keys)];
    std::fs::write(&initrd, first_file_system(&dir, &init, &programs, &commands)).expect("the first file system");
    kernels.iter().for_each(|kernel| boot(&qemu, kernel, &initrd));
}

/// The limit inside the guest.
const GUEST_LIMIT: &str = "24M";

fn boot(qemu: &Path, kernel: &Path, initrd: &Path) {
    let name = kernel.file_name().expect("the name of an image").to_string_lossy();
    let began = Instant::now();
    let mut boot = Subject::new("old kernel", &[&qemu, &"-kernel", &kernel, &"-initrd", &initrd]);
    let arguments = "-accel tcg -cpu max -smp 2 -m 512 -nodefaults -no-reboot -display none -serial stdio";
    boot.argv.extend(arguments.split_whitespace().map(Into::into));
    boot.argv.extend(["-append", "console=ttyS0 quiet panic=-1"].map(Into::into));
    let run = boot.start_plain().finish();
    run.say(&name, "booted", None);
    let said = run.stdout.text();
    for line in [
        "✗ move",
        "uzswap can work here.",
        "lost 0, wrong 0",
        "guest: doctor ended with 0000",
        "guest: /bin/lost ended with 0000",
        // The emulated CPU has protection keys. The story: uzswap's threads read what they had taken through the program's
        // mapping, without its rights, and the program ended with SIGSEGV.
        "keys, wrong 0",
        "guest: /bin/keys ended with 0000",
    ] {
        assert!(said.contains(line), "`{line}` is missing under {name}\n{}", run.describe());
    }
    // 64 MiB were filled and read, and pages were out meanwhile. (When the limit is noticed depends on how much time an emulated
    // CPU gives the thread that looks: the peak was 24 to 67 MiB. The tests above check limits without MOVE.)
    let faults = said.split_once("uzswap: faults").and_then(|(_, rest)| rest.split_once(':'));
    let decompressed =
        faults.and_then(|(_, rest)| rest.trim_start().split(' ').next()?.replace(',', "").parse::<u64>().ok());
    assert!(decompressed.is_some_and(|pages| pages > 0), "{decompressed:?}\n{}", run.describe());
    assert!(began.elapsed() < RUN_TIMEOUT + Duration::from_secs(5));
}

/// The images of kernels before 6.8 that packages have installed.
fn old_kernels() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().map(|target| target.join("old-kernel/boot"));
    let images = dir.and_then(|dir| std::fs::read_dir(dir).ok()).into_iter().flatten().flatten();
    let images = images.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"vmlinuz"));
    let mut paths: Vec<_> = images.map(|entry| entry.path()).collect();
    paths.sort_unstable();
    paths
}

/// An archive (cpio, newc) with what the guest needs.
fn first_file_system(dir: &Path, init: &Path, programs: &[(&str, &Path)], commands: &str) -> Vec<u8> {
    const DIRECTORY: u32 = 0o040_755;
    const FILE: u32 = 0o100_755;
    let mut out = Vec::new();
    let mut number = 0;
    let mut add = |name: &str, mode: u32, data: &[u8]| {
        number += 1;
        let fields = [number, mode, 0, 0, 1, 0, data.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        out.extend_from_slice(b"070701");
        fields.iter().for_each(|field| out.extend_from_slice(format!("{field:08x}").as_bytes()));
        for part in [[name.as_bytes(), b"\0"].concat().as_slice(), data] {
            out.extend_from_slice(part);
            out.resize(out.len().next_multiple_of(4), 0);
        }
    };
    for name in ["proc", "sys", "dev", "tmp", "bin", "lib", "lib64"] {
        add(name, DIRECTORY, b"");
    }
    add("init", FILE, &std::fs::read(init).expect("init"));
    add("commands", FILE, commands.as_bytes());
    let command = uzswap();
    let agent = command.with_file_name("libuzswap_agent.so");
    let own = [("bin/uzswap", &*command), ("bin/libuzswap_agent.so", &*agent)];
    for (name, path) in own.iter().chain(programs) {
        let stripped = dir.join("stripped");
        build(Command::new("strip").arg("-o").arg(&stripped).arg(path));
        add(name, FILE, &std::fs::read(&stripped).expect("a program"));
    }
    // What the dynamic loader will look for: "NAME => PATH (…)", and the loader itself.
    let needed = Command::new("ldd").arg(uzswap()).output().expect("ldd");
    for line in String::from_utf8_lossy(&needed.stdout).lines() {
        let Some(path) = line.split_whitespace().find(|word| word.starts_with('/')) else { continue };
        let name = path.rsplit('/').next().expect("a name");
        let place = if name.starts_with("ld-linux") { format!("lib64/{name}") } else { format!("lib/{name}") };
        add(&place, FILE, &std::fs::read(path).expect("a library"));
    }
    add("TRAILER!!!", 0, b"");
    out
}

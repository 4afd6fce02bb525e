//! `uzswap doctor`: whether this machine can run programs under uzswap, and what to change if not.

use crate::check;
use crate::cli::DoctorArgs;
use crate::config::plain;
use crate::machine;
use crate::output::print;
use serde::Serialize;
use std::fs;
use std::io;
use std::process::ExitCode;
use uzswap_mm::size::human;
use uzswap_sys::probe;
use uzswap_sys::process::is_in_own_proc;

/// One thing that was checked.
#[derive(Debug, Serialize)]
struct Check {
    /// Its name.
    name: &'static str,
    /// Whether it is as it should be.
    ok: bool,
    /// Whether uzswap cannot work without it.
    required: bool,
    /// What was found.
    found: String,
    /// What to change, if it is not ok.
    change: Option<String>,
}

impl Check {
    fn new(name: &'static str, required: bool, ok: bool, found: impl Into<String>, change: &str) -> Check {
        Check { name, ok, required, found: found.into(), change: (!ok).then(|| change.to_owned()) }
    }
}

/// All that was found.
#[derive(Serialize)]
struct Findings {
    works: bool,
    features: Vec<&'static str>,
    checks: Vec<Check>,
}

/// Prints the findings; success if uzswap can work here.
pub fn doctor(args: &DoctorArgs) -> ExitCode {
    let findings = examine();
    let text =
        if args.json { serde_json::to_string_pretty(&findings).unwrap_or_default() + "\n" } else { text(&findings) };
    if let Err(sentence) = print(text.as_bytes()) {
        say!("uzswap: {sentence}");
        return ExitCode::FAILURE;
    }
    if findings.works { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn examine() -> Findings {
    let mut checks = vec![kernel(&machine::kernel_release())];

    let device = probe::by_device();
    let syscall = probe::by_syscall();
    let user_mode_only = probe::by_syscall_user_mode_only();
    checks.push(Check::new(
        "/dev/userfaultfd",
        false,
        device.is_ok(),
        said(&device),
        "Linux 6.1 or newer has it: chmod 0666 /dev/userfaultfd (lasting: a udev rule), or for a container \
         --device /dev/userfaultfd",
    ));
    checks.push(Check::new(
        "system call",
        false,
        syscall.is_ok(),
        said(&syscall),
        "sysctl vm.unprivileged_userfaultfd=1, or run as root or with CAP_SYS_PTRACE",
    ));
    checks.push(Check::new(
        "user mode only",
        false,
        user_mode_only.is_ok(),
        format!("{} (not enough for `run`: system calls on evicted buffers would fail)", said(&user_mode_only)),
        "nothing needs it where one of the two above works",
    ));

    let full = device.or(syscall);
    let granted = full.is_ok();
    let features = full.or(user_mode_only).and_then(|uffd| probe::features(&uffd));
    let bits = *features.as_ref().unwrap_or(&0);
    checks.push(Check::new(
        "access",
        true,
        granted,
        if granted { "faults of system calls are covered too" } else { "no way to a full userfaultfd" },
        check::GRANT,
    ));
    checks.push(Check::new(
        "handshake",
        true,
        features.is_ok(),
        features.as_ref().map_or_else(plain, |_| format!("{} features", names(bits).len())),
        "the kernel refuses its own interface: look at `dmesg` and at the container's seccomp profile",
    ));
    checks.extend(what_the_kernel_can(bits, &probe::pagemap_scan(), &probe::mremap_keeps()));
    checks.push(numbers());
    checks.push(addresses());
    checks.push(confinement(granted));
    let agent = check::agent();
    checks.push(Check::new(
        "agent library",
        true,
        agent.is_ok(),
        agent.as_ref().map_or("not found".to_owned(), |path| path.display().to_string()),
        agent.as_ref().map_or_else(|refused| refused.sentence.as_str(), |_| ""),
    ));
    checks.push(memory());
    let works = checks.iter().all(|check| check.ok || !check.required);
    Findings { works, features: names(bits), checks }
}

/// Checks of the kernel's calls that move, find and protect pages.
fn what_the_kernel_can(features: u64, scan: &io::Result<()>, mremap: &io::Result<()>) -> [Check; 3] {
    let has = |bit| features & bit != 0;
    let found = |bit, yes: &str, no: &str| if has(bit) { yes.to_owned() } else { no.to_owned() };
    let moves = has(probe::FEATURE_MOVE);
    let slower = "not there: pages are taken by mremap and copied back, which is slower; a program that uses direct I/O or \
                  io_uring is not limited, and --track-writes cannot be had";
    let neither = "not there, nor an mremap that could do instead: nothing could be evicted";
    [
        Check::new(
            "move",
            mremap.is_err(),
            moves,
            match mremap {
                _ if moves => "there: pages can be moved out of a program",
                Ok(()) => slower,
                Err(_) => neither,
            },
            "upgrade to Linux 6.8 or newer, which has UFFDIO_MOVE",
        ),
        Check::new(
            "PAGEMAP_SCAN",
            moves,
            scan.is_ok(),
            scan.as_ref().map_or_else(plain, |()| "there: a program's pages can be found".to_owned()),
            "Linux 6.7 or newer has it, with /proc mounted and CONFIG_PROC_PAGE_MONITOR",
        ),
        Check::new(
            "write-protect",
            false,
            has(probe::FEATURE_WP),
            found(probe::FEATURE_WP, "there, for shared regions", "not there, so there are no shared regions"),
            "Linux 5.19 or newer has it for shared memory, on x86-64 or 64-bit Arm",
        ),
    ]
}

fn kernel(release: &str) -> Check {
    let version = machine::version_of(release);
    let steps = [
        ((4, 11), "userfaultfd (4.11)"),
        ((5, 7), "write-protect, mremap that keeps its source (5.7)"),
        ((5, 9), "close_range (5.9)"),
        ((6, 1), "/dev/userfaultfd (6.1)"),
        ((6, 7), "PAGEMAP_SCAN (6.7)"),
        ((6, 8), "move (6.8)"),
    ];
    let brings: Vec<_> = steps.iter().filter(|(since, _)| version >= *since).map(|(_, what)| *what).collect();
    let brings = if brings.is_empty() { "nothing uzswap needs".to_owned() } else { brings.join(", ") };
    let ok = version >= check::KERNEL;
    // Not required because of its number alone: what counts is whether the calls are there.
    let change = "upgrade to Linux 5.10 or newer, best 6.8, with which uzswap is fastest";
    Check::new("kernel", !ok, ok, format!("{release} brings {brings}"), change)
}

fn numbers() -> Check {
    let own = is_in_own_proc();
    let whose = if own { "this one" } else { "another one" };
    Check::new("PID namespace", true, own, format!("/proc is of {whose}"), check::OWN_PROC)
}

fn addresses() -> Check {
    let can = check::addresses_can_be_reserved();
    let found = match can {
        true => "the kernel allows large reservations of addresses",
        false => "the kernel never overcommits memory (vm.overcommit_memory is 2)",
    };
    Check::new("overcommit", true, can, found, check::OVERCOMMIT)
}

fn confinement(granted: bool) -> Check {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let filtered = status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == "2"));
    let container = ["/.dockerenv", "/run/.containerenv"].iter().any(|path| fs::exists(path).unwrap_or(false));
    let found = match (container, filtered) {
        (true, true) => "in a container, with a seccomp filter",
        (true, false) => "in a container, without a seccomp filter",
        (false, true) => "a seccomp filter is on",
        (false, false) => "no container and no seccomp filter",
    };
    Check::new(
        "confinement",
        false,
        granted || !(container || filtered),
        found,
        "start the container with --device /dev/userfaultfd (which no seccomp profile forbids), or with \
         --cap-add SYS_PTRACE and a seccomp profile that allows userfaultfd",
    )
}

fn memory() -> Check {
    let total = machine::total_memory();
    let found = match machine::cgroup_limit().filter(|&limit| limit < total) {
        Some(limit) => format!("{}, of which the cgroup allows {}", human(total), human(limit)),
        None => format!("{}, no lower limit by a cgroup", human(total)),
    };
    let enough = machine::available_memory() >= check::MINIMUM;
    Check::new("memory", true, enough, found, "uzswap needs 16 MiB at the least")
}

fn said<T>(result: &io::Result<T>) -> String {
    result.as_ref().map_or_else(plain, |_| "opened".to_owned())
}

fn names(bits: u64) -> Vec<&'static str> {
    probe::FEATURE_NAMES.iter().enumerate().filter(|(i, _)| bits & (1 << i) != 0).map(|(_, name)| *name).collect()
}

fn text(findings: &Findings) -> String {
    let mut out = String::new();
    for check in &findings.checks {
        let mark = if check.ok { '✓' } else { '✗' };
        out += &format!("{mark} {:<17} {}\n", check.name, check.found);
        if let Some(change) = &check.change {
            let weight = if check.required { "to change" } else { "not needed, but" };
            out += &format!("  {:<17} {weight}: {change}\n", "");
        }
    }
    if !findings.features.is_empty() {
        out += &format!("  {:<17} {}\n", "features", findings.features.join(" "));
    }
    out += if findings.works {
        "uzswap can work here.\n"
    } else {
        "uzswap cannot work here until the ✗ above is changed.\n"
    };
    out
}

#[cfg(test)]
mod tests {
    use super::{Findings, kernel, probe, text, what_the_kernel_can};
    use std::io::Error;

    #[test]
    fn kernels() {
        assert!(kernel("6.18.1").ok && kernel("6.18.1").found.ends_with("move (6.8)"));
        assert!(kernel("6.8.0").ok && kernel("5.15.0").ok && !kernel("5.9.16").ok && kernel("5.9.16").required);
        let old = kernel("4.19.0");
        assert!(!old.ok && old.found.ends_with("brings userfaultfd (4.11)"));
        let text = text(&Findings { works: false, features: vec![], checks: vec![old] });
        assert!(text.starts_with("✗ kernel") && text.contains("upgrade to Linux 5.10") && text.contains("cannot work"));
    }

    #[test]
    fn move_or_mremap_is_required() {
        let refused = || Err(Error::from_raw_os_error(libc::ENOTTY));
        let missing = |features, scan, mremap| {
            let checks = what_the_kernel_can(features, &scan, &mremap);
            let bad: Vec<_> = checks.iter().filter(|c| c.required && !c.ok).map(|c| c.name).collect();
            (bad, text(&Findings { works: false, features: vec![], checks: checks.into() }))
        };
        assert_eq!(
            missing(probe::FEATURE_MOVE, Ok(()), Ok(())).0,
            [""; 0],
            "write-protect is for shared regions alone"
        );
        assert_eq!(missing(probe::FEATURE_MOVE, refused(), Ok(())).0, ["PAGEMAP_SCAN"]);
        let (bad, text) = missing(probe::FEATURE_WP, refused(), Ok(()));
        assert_eq!(bad, [""; 0], "a kernel before 6.8");
        assert!(text.contains("slower") && text.contains("upgrade to Linux 6.8"), "{text}");
        let (bad, text) = missing(probe::FEATURE_WP, refused(), refused());
        assert_eq!(bad, ["move"]);
        assert!(text.contains("nothing could be evicted"), "{text}");
    }
}

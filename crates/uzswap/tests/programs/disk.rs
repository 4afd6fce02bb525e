//! The disk tier: programs with `--swap` whose data does not compress into the limit; and disks that fail.

use crate::harness::*;
use std::process::Command;

const SWAP: [&str; 2] = ["--swap", "1G"];
/// The most pages that may be lost if one read in three fails for good: some 100 of the 12,288 are.
const MOST_LOST: u64 = 300;

/// The output is as without uzswap, the limit is kept, and pages are written to disk and read back.
fn check(subject: &Subject, limit: u64, one_process: bool) -> Outcome {
    let plain = subject.start_plain().finish();
    assert!(plain.status.success(), "{}", plain.describe());
    let run = subject.clone().with(&SWAP).start_limited(limit).finish();
    run.say(subject.name, "disk", Some(limit));
    assert!(!run.timed_out && run.status.success(), "{}", run.describe());
    assert_eq!((plain.stdout.bytes, plain.stdout.hash), (run.stdout.bytes, run.stdout.hash), "{}", run.describe());
    assert_eq!((number(&run, "poisoned"), number(&run, "swap_write_errors")), (0, 0), "{}", run.describe());
    assert!(number(&run, "pswpout") > 0 && number(&run, "pswpin") > 0, "the disk was not used\n{}", run.describe());
    assert_eq!(number(&run, "pswpout"), number(&run, "zswpwb"));
    bytes_fit_pages(&run);
    assert!(
        !one_process || run.peak_anon_bytes <= with_slack(limit),
        "anonymous memory reached {} bytes of {limit}\n{}",
        run.peak_anon_bytes,
        run.describe()
    );
    run
}

/// Transfers are whole blocks, at least as many bytes as are in use, and not many more than the pages that went. One fault in
/// eight is timed, and some of those waited.
fn bytes_fit_pages(run: &Outcome) {
    let [written, read] = ["swap_write_bytes", "swap_read_bytes"].map(|name| number(run, name));
    let out = number(run, "pswpout");
    assert!(written.is_multiple_of(4096) && read.is_multiple_of(4096), "{}", run.describe());
    // A page written by itself takes two blocks at most.
    assert!(written >= number(run, "swap_used_size") && written <= 8192 * out, "{}", run.describe());
    assert!(number(run, "stall_ns") > 0, "{}", run.describe());
}

#[test]
fn data_that_does_not_compress() {
    let _alone = alone();
    let Some(python) = need("python3") else { return };
    for (mib, limit) in [("96", 48 * MIB), ("128", 32 * MIB)] {
        let run = check(&Subject::new("random bytes", &[&python, &fixture("noise.py"), &mib]), limit, true);
        assert!(
            number(&run, "swap_read_bytes") >= 2048 * number(&run, "pswpin"),
            "nearly all is noise\n{}",
            run.describe()
        );
    }
}

/// A forked child shares its parent's pages on disk: neither may free what the other still reads.
#[test]
fn children_read_what_their_parent_put_on_disk() {
    let _beside = beside();
    let Some(python) = need("python3") else { return };
    check(&Subject::new("forks over disk", &[&python, &fixture("forkdisk.py"), &"48"]), 32 * MIB, false);
}

/// The story: a program that outlived the command could not fork once it had a page on disk. Its child opened the swap file
/// through the command's descriptor, which was gone, or belonged to another file of a process that had got the command's pid.
#[test]
fn a_program_that_outlives_the_command_forks() {
    let _beside = beside();
    let Some(python) = need("python3") else { return };
    let said = scratch("disk-orphan").join("result");
    let subject = Subject::new("orphan forks", &[&python, &fixture("orphanfork.py"), &"48", &said]).with(&SWAP);
    let run = subject.start_limited(32 * MIB).finish();
    assert!(!run.status.success(), "the command was to be killed\n{}", run.describe());
    let text = line_in(&said);
    assert_eq!(text, "children [0, 0, 0] wrong 0\n", "{}", run.stderr.text());
}

#[test]
fn sort_of_random_lines() {
    let _alone = alone();
    let (Some(sort), Some(python)) = (need("sort"), need("python3")) else { return };
    let input = scratch("sort-random").join("lines");
    // Base 85: hex digits would compress to half.
    let program = "import base64, random\nr = random.Random(3)\n\
                   for _ in range(170_000): print(base64.b85encode(r.randbytes(48)).decode())";
    let made = Command::new(python).args(["-c", program]).stdout(std::fs::File::create(&input).unwrap()).status();
    assert!(made.is_ok_and(|s| s.success()));
    check(&Subject::new("sort, random", &[&sort, &"--parallel=1", &"-S", &"200M", &input]), 16 * MIB, true);
}

/// (Of real programs, xz -6 was tried here in 16 MiB. It faults without end on what the pool still holds, so it hardly used the
/// disk and tested little of it.)
#[test]
fn arrays_of_five_times_the_limit() {
    let _alone = alone();
    let Some(python) = crate::python_with_numpy() else { return };
    check(&Subject::new("numpy sort", &[&python, &fixture("arrays.py"), &"sort"]), 24 * MIB, true);
}

/// Data on disk can be read there; with `--encrypt-swap` it cannot. A forked child has the key to what it inherits.
#[test]
fn an_encrypted_swap_file_says_nothing() {
    const ENCRYPTED: [&str; 3] = [SWAP[0], SWAP[1], "--encrypt-swap"];
    let _beside = beside();
    let Some(python) = need("python3") else { return };
    let secret = Subject::new("a secret on disk", &[&python, &fixture("secret.py"), &"64"]);
    for (options, readable) in [(&SWAP[..], "readable"), (&ENCRYPTED[..], "unreadable")] {
        let run = secret.clone().with(options).start_limited(32 * MIB).finish();
        run.say(secret.name, readable, None);
        assert!(run.status.success() && number(&run, "pswpout") > 0, "{}", run.describe());
        assert_eq!(run.stdout.text(), format!("1 file {readable} 0 wrong\n"), "{}", run.describe());
    }
    let forks = Subject::new("forks, encrypted", &[&python, &fixture("forkdisk.py"), &"48"]);
    check(&forks.with(&["--encrypt-swap"]), 32 * MIB, false);
    let Some(disk) = compile_c("disk") else { return };
    let lying = Subject::new("lying disk, encrypted", &[&disk, &"48", &"1"]).with(&ENCRYPTED);
    let run = lying.start_limited_with(32 * MIB, &[("UZSWAP_TEST_FAULTS", "seed=6,swap_damage=1/2")]).finish();
    let lost = number(&run, "poisoned");
    assert!(lost > 0, "{}", run.describe());
    assert_eq!(run.stdout.text(), format!("lost {lost}, wrong 0\n"), "{}", run.describe());
}

/// Runs a program with incompressible data in random order while at least 10,000 transfers fail: completely, partly, or in one
/// bit. No byte may be wrong, and lost pages are counted and reported. Prints the seed; returns the lost pages.
fn ten_thousand_failures(name: &'static str, faults: &str, variables: &[(&str, &str)]) -> u64 {
    const TOLD: &str = "uzswap: a page could not be read back from the swap file";
    let Some(disk) = compile_c("disk") else { return 0 };
    let subject = Subject::new(name, &[&disk, &"48", &"4"]).with(&SWAP);
    let new = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_secs());
    let faults = &format!("seed={new},{faults}");
    let variables = [variables, &[("UZSWAP_TEST_FAULTS", faults)]].concat();
    let run = subject.start_limited_with(32 * MIB, &variables).finish();
    run.say(subject.name, faults, None);
    let failed = number(&run, "swap_read") + number(&run, "swap_write") + number(&run, "swap_space");
    assert!(!run.timed_out && run.status.success(), "{}", run.describe());
    assert!(failed >= 10_000, "only {failed} failures\n{}", run.describe());
    assert!(number(&run, "reject_reclaim_fail") > 0 && number(&run, "swap_read_errors") > 0, "{}", run.describe());
    let lost = number(&run, "poisoned");
    assert_eq!(run.stdout.text(), format!("lost {lost}, wrong 0\n"), "{}", run.describe());
    assert_eq!(run.stderr.text().contains(TOLD), lost > 0, "{}", run.describe());
    assert_eq!(run.stderr.text().matches("uzswap: writing to the swap file failed").count(), 1, "told once");
    lost
}

/// Transfers that fail once are tried again, and nothing is lost; what cannot be written stays in memory. By io_uring, and by
/// threads.
#[test]
fn ten_thousand_failures_that_pass_lose_nothing() {
    let _beside = beside();
    // A full disk is left alone for a second each time: at a higher rate the run would mostly rest.
    let faults = "failures=pass,swap_read=1/3,swap_write=1/3,swap_space=1/300";
    for io in [&[][..], &[("UZSWAP_TEST_SWAP_IO", "plain")]] {
        assert_eq!(ten_thousand_failures("failures that pass", faults, io), 0);
    }
}

/// If one read in three fails for good, one page in 81 fails all four tries and is lost: those raise SIGBUS, and no others.
#[test]
fn a_disk_that_fails_loses_nothing_in_silence() {
    let _beside = beside();
    let faults = "swap_read=1/3,swap_write=1/3,swap_space=1/300";
    let lost = ten_thousand_failures("failing disk", faults, &[]);
    assert!(lost <= MOST_LOST, "{lost} pages lost");
}

/// A disk that returns other bytes than it was given is found out, page by page.
#[test]
fn a_disk_that_lies_is_found_out() {
    let _alone = alone();
    let Some(disk) = compile_c("disk") else { return };
    let subject = Subject::new("lying disk", &[&disk, &"48", &"1"]).with(&SWAP);
    let run = subject.start_limited_with(32 * MIB, &[("UZSWAP_TEST_FAULTS", "seed=5,swap_damage=1/2")]).finish();
    let lost = number(&run, "poisoned");
    assert!(number(&run, "swap_damage") > 0 && lost > 0, "{}", run.describe());
    assert_eq!(run.stdout.text(), format!("lost {lost}, wrong 0\n"), "{}", run.describe());
}

/// A disk that stands still is reported once, and each time is counted; the program goes on when the disk does.
#[test]
fn a_disk_that_stands_still_is_told() {
    let _alone = alone();
    let Some(disk) = compile_c("disk") else { return };
    let subject = Subject::new("still disk", &[&disk, &"40", &"1"]).with(&SWAP);
    let run = subject.start_limited_with(32 * MIB, &[("UZSWAP_TEST_FAULTS", "seed=9,swap_stall=1/1500")]).finish();
    run.say(subject.name, "disk", None);
    assert!(run.status.success(), "{}", run.describe());
    assert_eq!(run.stdout.text(), "lost 0, wrong 0\n", "{}", run.describe());
    // A stall is not counted if other reads end meanwhile; and the disk may stall by itself.
    let (stalled, told) = (number(&run, "swap_stall"), number(&run, "swap_stalls"));
    assert!(stalled > 0 && told > 0, "{told} of {stalled} were counted\n{}", run.describe());
    assert_eq!(run.stderr.text().matches("has not answered for 10 seconds").count(), 1, "{}", run.describe());
}

/// The story: see `Handler::waits_for_slow_disk`. A process that waits for a disk with slow writes is not killed. If the disk
/// stands still for as long as it takes to be reported, nothing more can be taken out.
#[test]
fn a_slow_disk_is_waited_for_and_one_that_stands_still_is_not() {
    let _beside = beside();
    let Some(disk) = compile_c("disk") else { return };
    let subject = Subject::new("slow disk", &[&disk, &"20", &"0"]).with(&SWAP).with(&["--on-full", "kill"]);
    // With `swap_stall` a stall is reported after 0.7 s instead of 10, whatever reads do.
    for (faults, killed) in [("seed=1,swap_slow=1/2", false), ("seed=1,swap_slow=1/1,swap_stall=1/1000000", true)] {
        let run = subject.start_limited_with(16 * MIB, &[("UZSWAP_TEST_FAULTS", faults)]).finish();
        run.say(subject.name, faults, None);
        assert!(!run.timed_out && number(&run, "swap_slow") > 0, "{}", run.describe());
        assert_eq!(run.status.success(), !killed, "{}", run.describe());
        assert_eq!(number(&run, "oom_kill"), u64::from(killed), "{}", run.describe());
        assert_eq!(run.stderr.text().contains("has not answered for 10 seconds"), killed, "{}", run.describe());
        if !killed {
            assert_eq!(run.stdout.text(), "lost 0, wrong 0\n", "{}", run.describe());
            assert!(number(&run, "pswpout") > 0 && !run.stderr.text().contains("is full"), "{}", run.describe());
        }
    }
}

/// On a file system without direct I/O everything works the same; the report and the summary say which it is.
#[test]
fn without_direct_io() {
    const BUFFERED: (&str, &str) = ("UZSWAP_TEST_SWAP_IO", "buffered");
    const FAULTS: &str = "seed=11,swap_read=1/20,swap_write=1/20";
    let _alone = alone();
    let Some(disk) = compile_c("disk") else { return };
    let subject = Subject::new("direct or not", &[&disk, &"64", &"1"]).with(&SWAP);
    // If the tests themselves run on such a file system there is nothing to choose from.
    let first = subject.start_limited(32 * MIB).finish();
    let natural =
        if first.report.as_deref().unwrap_or_default().contains("\"direct\"") { "direct" } else { "buffered" };
    for (variables, io) in [(&[][..], natural), (&[BUFFERED][..], "buffered")] {
        for faults in [None, Some(("UZSWAP_TEST_FAULTS", FAULTS))] {
            let variables: Vec<_> = variables.iter().copied().chain(faults).collect();
            let run = subject.start_limited_with(32 * MIB, &variables).finish();
            run.say(subject.name, io, None);
            let report = run.report.as_deref().unwrap_or_default();
            assert!(report.contains(&format!("\"swap_io\": \"{io}\"")), "{}", run.describe());
            assert_eq!(run.stderr.text().contains("through the page cache"), io == "buffered", "{}", run.describe());
            let lost = number(&run, "poisoned");
            assert_eq!(run.stdout.text(), format!("lost {lost}, wrong 0\n"), "{}", run.describe());
            assert!(number(&run, "pswpin") > 0 && (faults.is_some() || lost == 0), "{}", run.describe());
        }
    }
}

/// Reads go by io_uring, or by threads if that is refused; writes by two threads. With and without failing writes, some of them
/// cut short.
#[test]
fn with_io_uring_and_where_it_is_refused() {
    const FAULTS: &str = "seed=12,swap_write=1/4";
    let _beside = beside();
    let (Some(disk), Some(nouring)) = (compile_c("disk"), compile_c("nouring")) else { return };
    let with = Subject::new("io_uring", &[&disk, &"64", &"1"]).with(&SWAP);
    let refused = Subject::new("no io_uring", &[&nouring, &disk, &"64", &"1"]).with(&SWAP);
    // It may be refused here in any case: sysctl kernel.io_uring_disabled.
    let here = number(&with.start_limited(32 * MIB).finish(), "swap_uring_reads") > 0;
    for (subject, variables, used) in [
        (&with, &[][..], here),
        (&with, &[("UZSWAP_TEST_FAULTS", FAULTS)], here),
        (&with, &[("UZSWAP_TEST_SWAP_IO", "plain"), ("UZSWAP_TEST_FAULTS", FAULTS)], false),
        (&refused, &[], false),
        (&refused, &[("UZSWAP_TEST_FAULTS", FAULTS)], false),
    ] {
        let run = subject.start_limited_with(32 * MIB, variables).finish();
        run.say(subject.name, "disk", None);
        assert!(run.status.success() && !run.timed_out, "{}", run.describe());
        assert_eq!(run.stdout.text(), "lost 0, wrong 0\n", "{}", run.describe());
        assert_eq!(number(&run, "swap_uring_reads") > 0, used, "{}", run.describe());
        assert!(number(&run, "swap_side_writes") > 0, "{}", run.describe());
        assert!(number(&run, "pswpout") > 0 && number(&run, "pswpin") > 0, "{}", run.describe());
        let injected = variables.iter().any(|(name, _)| *name == "UZSWAP_TEST_FAULTS");
        let failed = number(&run, "swap_write_errors");
        assert_eq!((failed > 0, number(&run, "reject_reclaim_fail") > 0), (injected, injected), "{}", run.describe());
        assert!(!injected || failed < number(&run, "swap_write"), "those in two transfers are no failures");
    }
}

/// Several threads read pages from disk while the pages are moved, dropped, unmapped and inherited, and some reads fail: by
/// io_uring, and by threads if that is refused. A hook holds reads back until something else has happened.
#[test]
fn what_happens_to_pages_while_they_are_read() {
    let _beside = beside();
    let Some(reads) = compile_c("reads") else { return };
    let subject = Subject::new("reads under way", &[&reads, &"4", &"40", &"1200"]).with(&SWAP);
    // io_uring may be refused here in any case.
    let here = number(&subject.start_limited(24 * MIB).finish(), "swap_uring_reads") > 0;
    for (plain, faults) in [
        (false, "seed=21,swap_hold=1/3"),
        (true, "seed=22,swap_hold=1/3"),
        (false, "seed=23,swap_hold=1/3,swap_read=1/10"),
        (true, "seed=24,swap_hold=1/3,swap_read=1/10"),
    ] {
        let io = plain.then_some(("UZSWAP_TEST_SWAP_IO", "plain"));
        let variables: Vec<_> = io.into_iter().chain([("UZSWAP_TEST_FAULTS", faults)]).collect();
        let run = subject.start_limited_with(24 * MIB, &variables).finish();
        run.say(subject.name, faults, None);
        assert!(run.status.success() && !run.timed_out, "{}", run.describe());
        let text = run.stdout.text();
        // A page lost in the parent is also lost in children that fault on it.
        assert!(text.starts_with("lost ") && text.ends_with(", wrong 0, bad children 0\n"), "{}", run.describe());
        assert!(text.starts_with("lost 0,") || number(&run, "poisoned") > 0, "{}", run.describe());
        assert_eq!(number(&run, "swap_uring_reads") > 0, here && !plain, "{}", run.describe());
        assert!(number(&run, "swap_hold") > 100 && number(&run, "pswpin") > 1000, "{}", run.describe());
        assert_eq!(number(&run, "swap_read_errors") > 0, faults.contains("swap_read"), "{}", run.describe());
    }
}

/// A full disk is no error for the program: it goes on in memory, and is told.
#[test]
fn a_full_disk_is_survived() {
    let _alone = alone();
    let Some(disk) = compile_c("disk") else { return };
    for (options, faults, told) in [
        (SWAP, "swap_space=1/1", "the disk of the swap file is full"),
        (["--swap", "4M"], "seed=1", "the swap file is full"),
    ] {
        let subject = Subject::new("full disk", &[&disk, &"40", &"1"]).with(&options);
        let run = subject.start_limited_with(32 * MIB, &[("UZSWAP_TEST_FAULTS", faults)]).finish();
        run.say(subject.name, faults, None);
        assert!(run.status.success(), "{}", run.describe());
        assert_eq!(run.stdout.text(), "lost 0, wrong 0\n", "{}", run.describe());
        assert_eq!(run.stderr.text().matches(told).count(), 1, "{}", run.describe());
    }
}

/// Nor is a limit on the size of files (`ulimit -f`), which also applies to the swap file. It was once reported as a full disk.
#[test]
fn a_limit_on_files_is_survived() {
    let _alone = alone();
    let Some(disk) = compile_c("disk") else { return };
    let program = format!("ulimit -f 1024; exec {} 40 1", disk.display());
    let run = Subject::new("a limit on files", &[&"sh", &"-c", &program]).with(&SWAP).start_limited(32 * MIB).finish();
    run.say("a limit on files", "disk", None);
    assert!(run.status.success(), "{}", run.describe());
    assert_eq!(run.stdout.text(), "lost 0, wrong 0\n", "{}", run.describe());
    let said = run.stderr.text();
    assert!(
        said.matches("(`ulimit -f`)").count() == 1 && !said.contains("disk of the swap file is full"),
        "{}",
        run.describe()
    );
}

/// A program that has freed each second page of what is on disk has room there for as much again, and is not told otherwise. Also
/// where the pool refuses some of what is read, and where reads and writes fail.
///
/// The story: see `swap/sparse.rs`. The file was full with half of it free, and the program held 90 MiB in 32.
#[test]
fn a_file_full_of_gaps_takes_as_much_again() {
    let _alone = alone();
    let Some(halves) = compile_c("halves") else { return };
    let failing = "seed=5,pool=1/20,swap_read=1/20,swap_write=1/20,failures=pass";
    for (faults, encrypt) in [("seed=1", &[][..]), (failing, &["--encrypt-swap"][..])] {
        let limit = 32 * MIB;
        let subject = Subject::new("gaps", &[&halves, &"96"]).with(&["--swap", "96M"]).with(encrypt);
        let run = subject.start_limited_with(limit, &[("UZSWAP_TEST_FAULTS", faults)]).finish();
        run.say(subject.name, faults, Some(limit));
        assert!(run.status.success() && run.stdout.text() == "wrong 0\n", "{}", run.describe());
        if faults != failing {
            assert!(!run.stderr.text().contains("swap file is full"), "{}", run.describe());
            assert!(run.peak_anon_bytes <= with_slack(limit), "{} bytes\n{}", run.peak_anon_bytes, run.describe());
        }
        assert!(number(&run, "swap_compacted") > 0 && number(&run, "poisoned") == 0, "{}", run.describe());
    }
}

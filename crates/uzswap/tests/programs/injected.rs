//! The pager's error paths: what a program sees when operations fail that hardly ever do (see `inject.rs` of the pager).
//!
//! Rates are chosen so that a run of seconds enters every path hundreds of times; each test checks in the report that it did.

use crate::harness::*;
use std::os::unix::process::ExitStatusExt;

const MIB: u64 = 1 << 20;

/// Runs `subject` with faults injected.
pub fn with_faults(subject: &Subject, limit: u64, faults: &str) -> Outcome {
    let run = subject.start_limited_with(limit, &[("UZSWAP_TEST_FAULTS", faults)]).finish();
    run.say(subject.name, faults, Some(limit));
    assert!(!run.timed_out, "{faults}: not done\n{}", run.describe());
    run
}

/// Failures that can be made good must not show in the program.
pub fn survives(subject: &Subject, limit: u64, cases: &[(&[&str], &str)]) {
    let plain = subject.start_plain().finish();
    for (sites, faults) in cases {
        let run = with_faults(subject, limit, faults);
        for site in *sites {
            assert!(number(&run, site) > 0, "{faults}: {site} never failed\n{}", run.describe());
        }
        assert!(
            run.status == plain.status
                && run.stdout.hash == plain.stdout.hash
                && run.stdout.bytes == plain.stdout.bytes,
            "{faults}: differs from the run without uzswap:\n{}\n{}",
            plain.stdout.text(),
            run.describe()
        );
        assert_eq!(number(&run, "poisoned"), 0, "{faults}: a page was lost\n{}", run.describe());
    }
}

#[test]
fn threads_survive_failures_of_every_operation() {
    let _beside = beside();
    let Some(mix) = compile_c("mix") else { return };
    survives(
        &Subject::new("memory calls", &[&mix, &"1"]),
        40 * MIB,
        &[
            (&["pool"], "pool=1/5"),
            (&["move_out"], "move_out=1/20"),
            (&["move_in"], "move_in=1/5"),
            (&["copy"], "move_in=1/10,copy=1/5"),
            (&["move_out", "copy"], "flushes=dear,move_out=1/10,copy=1/5"),
            (&["event"], "event=1/50"),
            (&["register"], "register=1/5"),
            (&["register", "unregister"], "flushes=dear,register=3/4,unregister=1/5"),
        ],
    );
    let Some(remaps) = compile_c("remaps") else { return };
    survives(&Subject::new("remaps", &[&remaps, &"1"]), 16 * MIB, &[(&["event"], "event=1/50")]);
}

#[test]
fn forks_survive_failures_of_moves_and_stores() {
    let _beside = beside();
    let Some(storm) = compile_c("forkstorm") else { return };
    survives(
        &Subject::new("fork storm", &[&storm, &"1"]),
        48 * MIB,
        &[
            (&["pool"], "pool=1/5"),
            (&["move_out", "move_in", "copy", "event"], "move_out=1/100,move_in=1/20,copy=1/20,event=1/100"),
        ],
    );
}

#[test]
fn the_flat_model_survives_failures_of_everything_at_once() {
    let _beside = beside();
    let Some(model) = compile_c("model") else { return };
    let all = "pool=1/10,move_out=1/100,move_in=1/20,copy=1/20,event=1/100";
    survives(
        &Subject::new("flat model", &[&model, &"3"]),
        24 * MIB,
        &[
            (&["pool", "move_out", "move_in", "copy", "event"], all),
            (&["pool", "move_out", "copy", "event"], &format!("flushes=dear,{all}")),
        ],
    );
}

/// Damaged memory cannot be made good: the program gets SIGBUS and a line that says why, never other bytes.
#[test]
fn damaged_pages_raise_sigbus_and_are_told() {
    const TOLD: &str = "uzswap: a compressed page was found damaged in memory";
    let _beside = beside();
    let Some(lost) = compile_c("lost") else { return };
    let run = with_faults(&Subject::new("damage, caught", &[&lost, &"catch"]), 32 * MIB, "damage=1/100");
    let poisoned = number(&run, "poisoned");
    assert!(run.status.success() && number(&run, "damage") > 0 && poisoned > 0, "{}", run.describe());
    assert_eq!(run.stdout.text(), format!("lost {poisoned}, wrong 0\n"), "{}", run.describe());
    assert!(run.stderr.text().contains(TOLD), "{}", run.describe());

    let run = with_faults(&Subject::new("damage", &[&lost]), 32 * MIB, "damage=1/20");
    let ended = run.status.signal() == Some(libc::SIGBUS) || run.status.code() == Some(128 + libc::SIGBUS);
    assert!(ended && run.stdout.bytes == 0, "{}", run.describe());
    assert!(run.stderr.text().contains(TOLD), "{}", run.describe());
}

/// A child whose memory cannot be managed would read zeros where its parent has data: it is ended, and told why. The parent goes
/// on.
#[test]
fn children_that_cannot_be_managed_end_with_a_message() {
    const TOLD: &str = "uzswap: a forked child could not be given its memory";
    const RIGHT: &str = "child: executable 0, read-only 0, moved 0, much 0 wrong\n\
                         child: at the same address 1, not zero 0\n\
                         child ended with 0; parent: 0, 0, 0, 0, 0 wrong\n";
    let _beside = beside();
    let Some(ways) = compile_c("forkways") else { return };
    let ways = Subject::new("ways to fork", &[&ways]);
    assert_eq!(ways.start_plain().finish().stdout.text(), RIGHT);
    let check = |faults: &str, must_end: bool| {
        let run = with_faults(&ways, 32 * MIB, faults);
        let ended = run.stdout.text() == "child ended with 32000; parent: 0, 0, 0, 0, 0 wrong\n";
        assert!(run.status.success() && (ended || run.stdout.text() == RIGHT), "{faults}\n{}", run.describe());
        assert_eq!(run.stderr.text().contains(TOLD), ended, "{faults}\n{}", run.describe());
        assert!(ended || !must_end, "{faults}: the child went on\n{}", run.describe());
        ended
    };
    assert!(!check("seed=1", false), "without any failure");
    check("uffd=1/1", true);
    let ended = (1..=6).filter(|seed| check(&format!("seed={seed},register=1/3"), false)).count();
    assert!(ended > 0, "no registration in a child failed in six runs");
}

/// If the group has no room, a program is not ended: it runs, and is told that it has no limit.
#[test]
fn a_process_without_a_slot_runs_without_a_limit() {
    let _beside = beside();
    let Some(lost) = compile_c("lost") else { return };
    let run = with_faults(&Subject::new("no slot", &[&lost]), 32 * MIB, "slot=1/1");
    assert!(run.status.success(), "{}", run.describe());
    assert_eq!(run.stdout.text(), "lost 0, wrong 0\n");
    assert!(run.stderr.text().contains("runs without a limit: its group has too many members"), "{}", run.describe());
    assert_eq!(number(&run, "engaged"), 0);
}

/// The story: a process could have no thread of uzswap's, as none more could be started (RLIMIT_NPROC, pids.max). It was told
/// that it ran without a limit, and waited for that thread forever when it changed its user, filtered its system calls or locked
/// its memory.
#[test]
fn a_process_without_a_ticker_waits_for_none() {
    let _beside = beside();
    let Some(leaves) = compile_c("leaves") else { return };
    for how in ["filter", "user", "lock"] {
        let run = with_faults(&Subject::new("no thread", &[&leaves, &how]), 32 * MIB, "thread=1/1");
        if run.status.code() == Some(77) {
            say(&format!("SKIPPED {how}: {}", run.stdout.text().trim()));
            continue;
        }
        assert!(run.status.success() && run.stdout.text().starts_with("right\n"), "{how}\n{}", run.describe());
        assert!(run.stderr.text().contains("runs without a limit: no thread could be started"), "{}", run.describe());
        assert_eq!(number(&run, "engaged"), 0);
    }
}

/// The story: a child that could have no thread of uzswap's, or no slot, was ended although none of its memory was managed yet.
#[test]
fn children_that_need_not_be_managed_go_on_without_a_limit() {
    const TOLD: &str = "uzswap: a forked child found no place in its group";
    let _beside = beside();
    let Some(sh) = need("sh") else { return };
    let subject = Subject::new("children", &[&sh, &"-c", &"(exit 3); echo $?; (exit 4); echo $?"]);
    for site in ["thread", "slot"] {
        let mut told = 0;
        for seed in 1..=8 {
            let run = with_faults(&subject, 32 * MIB, &format!("seed={seed},{site}=1/2"));
            assert!(run.status.success() && run.stdout.text() == "3\n4\n", "{site}\n{}", run.describe());
            told += run.stderr.text().matches(TOLD).count();
        }
        assert!(told > 0, "{site}: no child had to do without in eight runs");
    }
}

/// The story: of the threads that managing memory takes, one could be started and the next could not. The first went on without a
/// userfaultfd. It was tried again at once, and once there could be threads again a second one was started on the first one's
/// stack.
#[test]
fn threads_that_cannot_be_started_leave_none_behind() {
    let _beside = beside();
    let Some(mix) = compile_c("mix") else { return };
    for options in [&[][..], &["--swap", "256M"][..]] {
        let subject = Subject::new("memory calls", &[&mix, &"1"]).with(options);
        let plain = subject.start_plain().finish();
        let mut managed_later = 0;
        for seed in 1..=8 {
            let run = with_faults(&subject, 40 * MIB, &format!("seed={seed},thread=1/2"));
            let same = run.status == plain.status && run.stdout.hash == plain.stdout.hash;
            assert!(same && number(&run, "poisoned") == 0, "{}", run.describe());
            managed_later += u64::from(number(&run, "thread") > 0 && number(&run, "engaged") > 0);
        }
        assert!(managed_later > 0, "no process was managed at a later try");
    }
}

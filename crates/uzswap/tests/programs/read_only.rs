//! Memory that a program made read-only after filling it.

use crate::harness::*;
use crate::same_under;

const LIMIT: u64 = 48 * MIB;

/// The story: MOVE takes no read-only memory. A program with 96 MiB of tables in 48 did little but fault on the rest, half a
/// million times, and exceeded its limit by as much again.
#[test]
fn what_is_read_only_leaves_for_what_is_used() {
    let _alone = alone();
    let Some(constants) = compile_c("constants") else { return };
    let most = (with_slack(LIMIT) / MIB).to_string();
    let subject = Subject::new("constants", &[&constants, &"96", &most, &"30"]);
    // Without a limit it would wait in vain.
    let plain = Subject::new("constants", &[&constants, &"96", &"1000", &"30"]).start_plain().finish();
    let run = subject.start_limited(LIMIT).finish();
    run.say(subject.name, "", Some(LIMIT));
    assert!(run.status.success(), "{}", run.describe());
    assert!(run.stdout.text().starts_with("fits "), "{}", run.describe());
    let sum = |run: &Outcome| run.stdout.text().split_whitespace().last().map(str::to_owned);
    assert_eq!(sum(&run), sum(&plain), "{}", run.describe());
    // What it makes writable and writes to comes back completely; and everything once, at the end.
    assert!(number(&run, "pgmajfault") < 200_000, "{}", run.describe());
}

/// The same when it can be copied, or dropped, only in part or not at all.
#[test]
fn what_is_read_only_is_right_where_it_cannot_leave() {
    let _beside = beside();
    let Some(constants) = compile_c("constants") else { return };
    let subject = Subject::new("constants", &[&constants, &"64", &"1000", &"30"]);
    let faults = ("UZSWAP_TEST_FAULTS", "seed=11,drop=1/3,copy=1/30,move_out=1/50,move_in=1/50,pool=1/50");
    let plain = subject.start_plain().finish();
    let run = subject.start_limited_with(32 * MIB, &[faults]).finish();
    assert!(run.status.success(), "{}", run.describe());
    assert_eq!(run.stdout.hash, plain.stdout.hash, "{}", run.describe());
    assert!(number(&run, "drop") > 0, "{}", run.describe());
}

/// The story: nobody managed tables that the linker relocates. They were half of what a browser's processes hold when they get
/// half of what they use.
#[test]
fn what_the_linker_relocated_leaves_and_stays_read_only() {
    let _beside = beside();
    let Some(relocated) = compile_c("relocated") else { return };
    let subject = Subject::new("relocated", &[&relocated, &"30"]);
    for faults in ["", "seed=5,drop=1/5,move_out=1/50,pool=1/50"] {
        let faults = (!faults.is_empty()).then_some(("UZSWAP_TEST_FAULTS", faults));
        let run = subject.start_limited_with(24 * MIB, faults.as_slice()).finish();
        assert!(run.status.success(), "{}", run.describe());
        let said = run.stdout.text();
        let lines: Vec<_> = said.lines().collect();
        assert_eq!((lines[0], lines[2]), ("r--p of a file", "who writes ends by signal 11, who reads by 0"), "{said}");
        if faults.is_none() {
            assert_eq!(lines[1], "r--p of nothing, little in memory", "{}", run.describe());
        }
    }
}

/// The story: a program that hooked functions by changing such a table at the moment when it was taken over lost the change, or
/// got SIGSEGV.
#[test]
fn what_is_changed_in_a_table_while_it_is_taken_over_stays_changed() {
    let _beside = beside();
    let Some(relocated) = compile_c("relocated") else { return };
    let subject = Subject::new("relocated, with hooks", &[&relocated, &"1", &"hooks"]);
    let plain = subject.start_plain().finish();
    assert!(plain.status.success(), "fails without uzswap\n{}", plain.describe());
    // What is writable when it is looked at stays as it was.
    let (mut taken, mut runs) = (0, 0);
    while taken < 3 {
        runs += 1;
        assert!(runs <= 20, "of {runs} tables {taken} were taken over");
        let run = subject.start_limited(24 * MIB).finish();
        let said = run.stdout.text();
        assert!(run.status.success() && said.ends_with("by signal 11, who reads by 0\n"), "{}", run.describe());
        taken += usize::from(said.contains("r--p of nothing"));
    }
}

/// The story: MOVE answers that memory is read-only before it looks whether a device may write to it. Memory that was registered
/// with an io_uring and then made read-only was copied out and dropped. When the program had filled it anew, the ring wrote the
/// former contents to a file.
#[test]
fn what_may_be_pinned_does_not_leave_when_it_is_read_only() {
    let _beside = beside();
    let Some(registered) = compile_c("registered") else { return };
    for (how, leaves) in [("plain", "some"), ("ring", "none"), ("direct", "none"), ("inherited", "none")] {
        let file = scratch("registered-file").join("data");
        let subject = Subject::new("registered", &[&registered, &how, &file]);
        let run = subject.start_limited(16 * MIB).finish();
        if run.status.code() == Some(77) {
            say(&format!("SKIPPED {how}: {}", run.stdout.text().trim()));
            continue;
        }
        let said = run.stdout.text();
        assert!(run.status.success() && said == format!("{leaves} left, 0 wrong\n"), "{how}\n{}", run.describe());
    }
}

/// The story: with `--on-full=wait` a thread waited for room in a mapping call whose argument was on a page that was out. Only
/// read-only memory could make room, and it leaves between such calls: the program hung.
#[test]
fn who_faults_in_a_mapping_call_does_not_keep_what_is_read_only() {
    let _beside = beside();
    let Some(waits) = compile_c("waitcall") else { return };
    let subject = Subject::new("waits in a call", &[&waits, &"48", &"12"]).with(&["--on-full", "wait"]);
    same_under(&subject, 32 * MIB, "32 MiB");
}

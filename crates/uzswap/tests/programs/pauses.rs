//! Pauses of the handlers, which give others a CPU beside processes that fault all the time.

use crate::harness::*;

/// Three processes that fault all the time on whatever CPUs there are: at least three tasks run, or wait for a CPU. (No test
/// measures how long others waited: ARCHITECTURE.md, *Pauses*.)
#[test]
fn handlers_of_several_processes_leave_their_cpus_now_and_then() {
    let _beside = beside();
    let Some(random) = compile_c("random") else { return };
    let three = "for i in 1 2 3; do \"$0\" 32 150000 & done; wait";
    let subject = Subject::new("three at random", &[&"sh", &"-c", &three, &random]);
    let alone = subject.start_plain().finish();
    let run = subject.start_limited(48 * MIB).finish();
    run.say("three at random", "", Some(48 * MIB));
    assert!(alone.status.success() && run.status.success(), "{}", run.describe());
    assert_eq!(run.stdout.text(), alone.stdout.text(), "{}", run.describe());
    assert!(number(&run, "handler_paused") > 0, "{}", run.describe());
}

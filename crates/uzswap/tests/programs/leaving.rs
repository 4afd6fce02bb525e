//! Programs that give up what the management of their memory takes: they are let go of, and said to be.

use crate::harness::*;

/// The story: a filter for system calls that was for all threads held for uzswap's as well. They were killed by it, or could
/// serve no fault any more, and the program waited for ever; one for a single thread killed it in the next hook; and with a
/// strict one the process never ended, as uzswap's threads were still there. A program that changed its user or its root
/// forked children that could not manage what they were given, and were ended. One that locked all its memory (`mlockall`) had the
/// kernel fill what uzswap had reserved, 72 GiB.
#[test]
fn programs_that_give_up_rights_are_let_go() {
    let _alone = alone();
    let Some(leaves) = compile_c("leaves") else { return };
    for how in ["filter", "strict", "lock", "user", "root"] {
        for options in [&[][..], &["--swap", "256M"][..]] {
            let subject = Subject::new("leaves", &[&leaves, &how]).with(options);
            let run = subject.start_limited(24 * MIB).finish();
            run.say("leaves", how, Some(24 * MIB));
            if run.status.code() == Some(77) {
                say(&format!("SKIPPED {how}: {}", run.stdout.text().trim()));
                continue;
            }
            let said = run.stdout.text();
            assert!(run.status.success() && said.starts_with("right\n"), "{how}\n{}", run.describe());
            let forks = if ["lock", "user", "root"].contains(&how) { 2 } else { 0 };
            assert_eq!(said.matches("the child was right\n").count(), forks, "{how}\n{}", run.describe());
            let told = "without a limit from now on";
            assert_eq!(run.stderr.text().matches(told).count(), 1, "{how}\n{}", run.describe());
        }
    }
}

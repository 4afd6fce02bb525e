//! Processes end as soon as without uzswap, also on a busy machine: no thread has idle policy when a process ends.

use crate::harness::*;
use crate::leaving::without_nice;

const NONE_IDLE: &str = "none idle";

/// What a run of `policies` found: whether threads had idle policy in the end. None if programs cannot be traced here.
fn at_the_end(subject: &Subject, how: &str) -> Option<String> {
    let run = subject.start_limited(24 * MIB).finish();
    run.say(subject.name, how, Some(24 * MIB));
    if run.status.code() == Some(77) {
        say("SKIPPED policies: programs cannot be traced here");
        return None;
    }
    let said = run.stdout.text();
    let end = said.lines().find_map(|line| line.strip_prefix(how)?.strip_prefix(": "));
    assert!(run.status.success() && end.is_some(), "{how}\n{}", run.describe());
    end.map(Into::into)
}

/// The story: the last thread of a process to end gives back the memory of all. It was a thread of idle policy, and beside four
/// programs that compute on each CPU a process of 48 MiB ended after 1 to 18 s. Before it executed another program the kernel
/// ended that thread, too, and waited for it.
#[test]
fn no_thread_has_idle_policy_when_a_process_ends() {
    let _beside = beside();
    let Some(policies) = compile_c("policies") else { return };
    for how in ["exit", "_exit", "_Exit", "quick_exit", "exit_group", "exec", "quiet"] {
        let Some(found) = at_the_end(&Subject::new("policies", &[&policies, &how]), how) else { return };
        assert_eq!(found, NONE_IDLE, "{how}");
    }
}

/// The same where threads cannot leave the idle policy: the handler is relieved. On a machine that is busy enough that takes longer
/// than a process waits for it.
#[test]
fn a_handler_that_stays_idle_is_relieved_when_a_process_ends() {
    let _beside = beside();
    let (Some(policies), Some(setpriv)) = (compile_c("policies"), need("setpriv")) else { return };
    for how in ["exit", "_exit", "quiet"] {
        let subject = without_nice(Subject::new("policies", &[&policies, &how]), &setpriv);
        let mut found = (0..3).map_while(|_| at_the_end(&subject, how)).peekable();
        if found.peek().is_none() {
            return;
        }
        assert!(found.any(|found| found == NONE_IDLE), "{how}: in none of three runs");
    }
}

//! Programs that give up what the management of their memory takes: they are let go of, and said to be.

use crate::harness::*;
use std::path::Path;
use std::process::{Child, Command};

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
            if how == "user" {
                assert!(said.contains("all threads are nobody's\n"), "{}", run.describe());
            }
            let told = "without a limit from now on";
            assert_eq!(run.stderr.text().matches(told).count(), 1, "{how}\n{}", run.describe());
        }
    }
}

/// The story: uzswap's threads kept the credentials that the program began with, so a server that gave up root's still had
/// threads of root's in its process. And what it then was not allowed to do (to leave the idle policy) uzswap counted on.
#[test]
fn a_server_that_gives_up_root_is_limited_by_threads_that_did_too() {
    let _alone = alone();
    let Some(leaves) = compile_c("leaves") else { return };
    for options in [&[][..], &["--swap", "256M"][..]] {
        let run = Subject::new("server", &[&leaves, &"server"]).with(options).start_limited(24 * MIB).finish();
        run.say("leaves", "server", Some(24 * MIB));
        if run.status.code() == Some(77) {
            return say(&format!("SKIPPED server: {}", run.stdout.text().trim()));
        }
        let said = "right\nall threads are nobody's\nthe child was right\nthe child was right\n";
        assert!(run.status.success() && run.stdout.text() == said, "{}", run.describe());
        assert_limited("server", &run, 24 * MIB, false);
    }
}

/// Options of `setpriv` that take CAP_SYS_NICE, as most containers do.
const WITHOUT_NICE: [&str; 5] = ["--bounding-set", "-sys_nice", "--inh-caps", "-sys_nice", "--"];

/// `subject` without CAP_SYS_NICE.
fn without_nice(mut subject: Subject, setpriv: &Path) -> Subject {
    subject.before.push(setpriv.into());
    subject.before.extend(WITHOUT_NICE.map(Into::into));
    subject
}

/// Two processes that want all of one CPU, until this is dropped. (Of the others nothing is known: on the machine of somebody else
/// they may idle, or what this process may use of them be limited in other ways.)
struct Hogs {
    cpu: String,
    them: Vec<Child>,
}

impl Hogs {
    /// None where processes cannot be kept on a CPU.
    fn new() -> Option<Self> {
        need("taskset")?;
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
        let cpu = allowed.split(['-', ',']).next().unwrap().to_owned();
        let one = || Command::new("taskset").args(["-c", &cpu, "sh", "-c", "while :; do :; done"]).spawn().unwrap();
        let them = (0..2).map(|_| one()).collect();
        Some(Self { cpu, them })
    }

    /// `subject`, on the same CPU.
    fn with(&self, mut subject: Subject) -> Subject {
        subject.before.extend(["taskset", "-c", &self.cpu].map(Into::into));
        subject
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        for hog in &mut self.them {
            let _ = hog.kill().and_then(|()| hog.wait());
        }
    }
}

/// The story: only who has CAP_SYS_NICE (or a limit on niceness that says so) may leave the idle policy. The thread that
/// serves faults takes it, and is taken out of it where the CPUs are wanted by others; who could not do that, so everybody in most
/// containers, had programs stand still beside any that computed. Now another thread relieves it.
#[test]
fn beside_programs_that_compute_the_handler_is_lifted_or_relieved() {
    let _alone = alone();
    let (Some(leaves), Some(setpriv), Some(hogs)) = (compile_c("leaves"), need("setpriv"), Hogs::new()) else { return };
    let subject = || hogs.with(Subject::new("leaves", &[&leaves, &"nothing"]));
    for (how, relieved) in [("lifted", false), ("relieved", true)] {
        for options in [&[][..], &["--swap", "256M"][..]] {
            let subject = subject().with(options);
            let subject = if relieved { without_nice(subject, &setpriv) } else { subject };
            let run = subject.start_limited(24 * MIB).finish();
            run.say("leaves", how, Some(24 * MIB));
            let said = "right\nthe child was right\nthe child was right\n";
            assert!(run.status.success() && run.stdout.text() == said, "{how}\n{}", run.describe());
            let lifted = run.report.as_deref().and_then(|report| report_number(report, "handler_lifted"));
            assert!(lifted.is_some_and(|n| n > 0.0), "{how}\n{}", run.describe());
        }
    }
}

/// Also a process whose handler was relieved, or is about to be, can be let go of.
#[test]
fn who_cannot_leave_the_idle_policy_is_let_go_of() {
    let _alone = alone();
    let (Some(leaves), Some(setpriv)) = (compile_c("leaves"), need("setpriv")) else { return };
    for busy in [false, true] {
        let hogs = if busy { Hogs::new() } else { None };
        let subject = Subject::new("leaves", &[&leaves, &"filter"]);
        let subject = hogs.iter().fold(subject, |subject, hogs| hogs.with(subject));
        let run = without_nice(subject, &setpriv).start_limited(24 * MIB).finish();
        run.say("leaves", "filter", Some(24 * MIB));
        assert!(run.status.success() && run.stdout.text().starts_with("right\n"), "{}", run.describe());
        assert_eq!(run.stderr.text().matches("without a limit from now on").count(), 1, "{}", run.describe());
    }
}

/// The story: in a root directory without /proc a child could not see what it holds. What was said of that, if anything, was that
/// a userfaultfd had been refused, by each process anew.
#[test]
fn a_cell_without_proc_is_told_to_have_no_limit() {
    let _alone = alone();
    let Some(leaves) = compile_c("leaves") else { return };
    let run = Subject::new("cell", &[&leaves, &"cell"]).start_limited(24 * MIB).finish();
    run.say("leaves", "cell", Some(24 * MIB));
    if run.status.code() == Some(77) {
        return say(&format!("SKIPPED cell: {}", run.stdout.text().trim()));
    }
    assert!(run.status.success() && run.stdout.text() == "right\n", "{}", run.describe());
    assert_eq!(run.stderr.text().matches("it runs without a limit").count(), 1, "{}", run.describe());
}

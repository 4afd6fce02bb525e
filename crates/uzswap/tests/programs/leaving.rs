//! Programs that give up what managing their memory takes: they are let go of, and told.

use crate::harness::*;
use crate::injected::with_faults;
use std::path::Path;
use std::process::{Child, Command};

/// The message, once in a group, about a process that was let go of.
const TOLD_OF_NO_LIMIT: &str = "without a limit from now on";

/// The story: a seccomp filter for all threads applied to uzswap's as well. They were killed by it, or could serve no more
/// faults, and the program waited forever. A filter for a single thread killed that thread in the next hook, and with a strict
/// one the process never ended, as uzswap's threads remained. A program that changed its user or its root forked children that
/// could not manage what they were given, and were ended. For one that locked all its memory (`mlockall`), the kernel filled what
/// uzswap had reserved, 72 GiB. One that made a user namespace (`unshare -U`) was refused because of uzswap's threads.
#[test]
fn programs_that_give_up_rights_are_let_go() {
    let _beside = beside();
    let Some(leaves) = compile_c("leaves") else { return };
    for how in ["filter", "strict", "lock", "rawlock", "user", "caps", "root", "namespace", "mounts"] {
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
            let forks = if ["filter", "strict"].contains(&how) { 0 } else { 2 };
            assert_eq!(said.matches("the child was right\n").count(), forks, "{how}\n{}", run.describe());
            let others = said.contains("threads of another user\n") || said.contains("capable threads\n");
            let none = said.contains("all threads are nobody's\n") || said.contains("no capable thread\n");
            assert_eq!((none, others), (["user", "caps"].contains(&how), false), "{how}\n{}", run.describe());
            assert_eq!(run.stderr.text().matches(TOLD_OF_NO_LIMIT).count(), 1, "{how}\n{}", run.describe());
        }
    }
}

/// The story: a thread of uzswap that had a message to write waited for room in a full pipe that nobody read. So the program was
/// refused a user namespace, or killed by its own filter when somebody read the pipe.
#[test]
fn who_gives_up_rights_is_not_held_up_by_what_is_said() {
    let _beside = beside();
    let Some(full) = compile_c("fullpipe") else { return };
    for how in ["namespace", "filter"] {
        let run = Subject::new("full pipe", &[&full, &how]).start_limited(24 * MIB).finish();
        run.say("full pipe", how, Some(24 * MIB));
        if run.status.code() == Some(77) {
            say(&format!("SKIPPED {how}: {}", run.stdout.text().trim()));
            continue;
        }
        assert!(run.status.success() && run.stdout.text() == "right\n", "{how}\n{}", run.describe());
        assert_limited("full pipe", &run, None);
    }
}

/// The story: Firefox asks by `prctl`, without a filter, whether the kernel knows filters. It was let go of as if it had set one.
#[test]
fn who_only_asks_for_filters_is_limited() {
    let _beside = beside();
    let Some(asks) = compile_c("asks") else { return };
    let run = Subject::new("asks", &[&asks]).start_limited(32 * MIB).finish();
    run.say("asks", "", Some(32 * MIB));
    let said = "prctl: known\nprctl by number: known\nseccomp: known\n";
    assert!(run.status.success() && run.stdout.text() == said, "{}", run.describe());
    assert_limited("asks", &run, None);
}

/// The story: uzswap's threads kept the credentials that the program began with. So a server that gave up root still had root's
/// threads in its process. And uzswap relied on something that it was then no longer allowed to do (leave the idle policy).
#[test]
fn a_server_that_gives_up_root_is_limited_by_threads_that_did_too() {
    let _beside = beside();
    let Some(leaves) = compile_c("leaves") else { return };
    for (how, none) in [("server", "all threads are nobody's"), ("capless", "no capable thread")] {
        for options in [&[][..], &["--swap", "256M"][..]] {
            let run = Subject::new("server", &[&leaves, &how]).with(options).start_limited(24 * MIB).finish();
            run.say("leaves", how, Some(24 * MIB));
            if run.status.code() == Some(77) {
                say(&format!("SKIPPED {how}: {}", run.stdout.text().trim()));
                continue;
            }
            let said = format!("right\n{none}\nthe child was right\nthe child was right\n");
            assert!(run.status.success() && run.stdout.text() == said, "{how}\n{}", run.describe());
            assert_limited(how, &run, None);
        }
    }
}

/// Options of `setpriv` that take CAP_SYS_NICE away, as most containers do.
const WITHOUT_NICE: [&str; 5] = ["--bounding-set", "-sys_nice", "--inh-caps", "-sys_nice", "--"];

/// `subject` without CAP_SYS_NICE.
pub fn without_nice(mut subject: Subject, setpriv: &Path) -> Subject {
    subject.before.push(setpriv.into());
    subject.before.extend(WITHOUT_NICE.map(Into::into));
    subject
}

/// Two processes that want all of one CPU, until this is dropped. (Nothing is known about the other CPUs: on somebody else's
/// machine they may be idle, or this process's use of them may be limited in other ways.)
struct Hogs {
    cpu: String,
    them: Vec<Child>,
}

impl Hogs {
    /// None if processes cannot be pinned to a CPU.
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

/// The story: only a process with CAP_SYS_NICE (or a sufficient limit on niceness) may leave the idle policy. The handler uses
/// that policy, and is lifted out of it when other programs want the CPUs. Without that right, as in most containers, programs
/// stood still beside any that computed. Now another thread relieves the handler.
#[test]
fn beside_programs_that_compute_the_handler_is_lifted_or_relieved() {
    let _beside = beside();
    let (Some(leaves), Some(setpriv), Some(hogs)) = (compile_c("leaves"), need("setpriv"), Hogs::new()) else { return };
    // Scattered, as a sequential fault brings so much that the little CPU time of an idle-policy thread is enough.
    let subject = || hogs.with(Subject::new("leaves", &[&leaves, &"nothing", &"scattered"]));
    for (how, relieved) in [("lifted", false), ("relieved", true)] {
        for options in [&[][..], &["--swap", "256M"][..]] {
            let subject = subject().with(options);
            let subject = if relieved { without_nice(subject, &setpriv) } else { subject };
            // Once in hundreds of runs the handler is never late, by luck.
            let lifted = (0..3).any(|_| {
                let run = subject.start_limited(24 * MIB).finish();
                run.say("leaves", how, Some(24 * MIB));
                let said = "right\nthe child was right\nthe child was right\n";
                assert!(run.status.success() && run.stdout.text() == said, "{how}\n{}", run.describe());
                number(&run, "handler_lifted") > 0
            });
            assert!(lifted, "{how}: not lifted in three runs");
        }
    }
}

/// A process whose handler was relieved, or is about to be, can be let go of, too.
#[test]
fn who_cannot_leave_the_idle_policy_is_let_go_of() {
    let _beside = beside();
    let (Some(leaves), Some(setpriv)) = (compile_c("leaves"), need("setpriv")) else { return };
    for busy in [false, true] {
        let hogs = if busy { Hogs::new() } else { None };
        let subject = Subject::new("leaves", &[&leaves, &"filter"]);
        let subject = hogs.iter().fold(subject, |subject, hogs| hogs.with(subject));
        let run = without_nice(subject, &setpriv).start_limited(24 * MIB).finish();
        run.say("leaves", "filter", Some(24 * MIB));
        assert!(run.status.success() && run.stdout.text().starts_with("right\n"), "{}", run.describe());
        assert_eq!(run.stderr.text().matches(TOLD_OF_NO_LIMIT).count(), 1, "{}", run.describe());
    }
}

/// The story: in a root directory without /proc a child could not see what it holds. The message, if there was one, said that a
/// userfaultfd had been refused, once for each process.
#[test]
fn a_cell_without_proc_is_told_to_have_no_limit() {
    let _beside = beside();
    let Some(leaves) = compile_c("leaves") else { return };
    let run = Subject::new("cell", &[&leaves, &"cell"]).start_limited(24 * MIB).finish();
    run.say("leaves", "cell", Some(24 * MIB));
    if run.status.code() == Some(77) {
        return say(&format!("SKIPPED cell: {}", run.stdout.text().trim()));
    }
    assert!(run.status.success() && run.stdout.text() == "right\n", "{}", run.describe());
    assert_eq!(run.stderr.text().matches("it runs without a limit").count(), 1, "{}", run.describe());
}

/// The story: where a process may not make written memory executable (as with systemd's MemoryDenyWriteExecute), the message said
/// that its C library was an unknown one.
#[test]
fn who_may_not_change_code_is_told_so() {
    let _beside = beside();
    // PR_SET_MDWE, before an exec.
    let script = "import ctypes, os, sys\nif ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) != 0: sys.exit(77)\nos.execvp('echo', ['echo', 'right'])";
    let run = Subject::new("python", &[&"python3", &"-c", &script]).start_limited(24 * MIB).finish();
    if run.status.code() == Some(77) {
        return say("SKIPPED PR_SET_MDWE: the kernel does not know it (since 6.3)");
    }
    assert!(run.status.success() && run.stdout.text() == "right\n", "{}", run.describe());
    let said = run.stderr.text();
    assert!(said.contains("runs without a limit") && said.contains("MemoryDenyWriteExecute"), "{}", run.describe());
}

/// The number of pages that a run of `leaves` with failures says that it lost.
fn lost_of(said: &str) -> u64 {
    said.lines().find_map(|line| line.strip_prefix("lost ")).map_or(0, |n| n.parse().expect("a number"))
}

/// The story: no failures were injected while a process was let go of, and three bugs went unseen. On a kernel without MOVE
/// nobody handled a page that was lost then: its thread waited forever, or it read as zeros afterwards. Pages on disk behind a
/// mapping that may not be read (PROT_NONE) never came back, so a server could not change its user. And a filter was let through
/// although the process could not be let go of.
#[test]
fn what_fails_while_a_process_is_let_go_of_is_made_good_or_told() {
    const TRANSFERS: &str = "let_go=1/20,move_in=1/10,copy=1/5,event=1/10";
    let _beside = beside();
    let Some(leaves) = compile_c("leaves") else { return };
    let mut lost_somewhere = 0;
    for (faults, options, content, sites) in [
        ("seed=31".into(), &["--swap", "256M"][..], &["noise", "closed"][..], &["pswpin"][..]),
        (TRANSFERS.to_owned(), &[], &["closed"], &["let_go", "move_in", "copy", "event"]),
        (format!("{TRANSFERS},swap_read=3/4"), &["--swap", "256M"], &["noise", "closed"], &["let_go", "swap_read"]),
        ("seed=32,damage=1/50".into(), &[], &["closed"], &["damage"]),
        ("seed=33,move=never,damage=1/50".into(), &[], &["closed"], &["damage"]),
        (
            "seed=34,move=never,swap_read=3/4,let_go=1/20".into(),
            &["--swap", "256M"],
            &["noise"],
            &["let_go", "swap_read"],
        ),
    ] {
        let mut failed = vec![0; sites.len()];
        for how in ["filter", "user", "lock", "root"] {
            let mut subject = Subject::new("leaves", &[&leaves, &how]).with(options);
            subject.argv.extend(content.iter().map(Into::into));
            let run = with_faults(&subject, 24 * MIB, &faults);
            if run.status.code() == Some(77) {
                say(&format!("SKIPPED {how}: {}", run.stdout.text().trim()));
                continue;
            }
            let said = run.stdout.text();
            assert!(run.status.success() && said.starts_with("right\n"), "{how}\n{}", run.describe());
            assert!(!said.contains("wrong") && !said.contains("another user"), "{how}\n{}", run.describe());
            assert_eq!(run.stderr.text().matches(TOLD_OF_NO_LIMIT).count(), 1, "{how}\n{}", run.describe());
            sites.iter().zip(&mut failed).for_each(|(site, n)| *n += number(&run, site));
            // With `root` it is let go of at its first fork, after it has printed what it lost, and may lose more.
            let (lost, counted) = (lost_of(&said), number(&run, "poisoned"));
            assert!(lost == counted || (how == "root" && lost < counted), "{how}\n{}", run.describe());
            lost_somewhere += lost;
        }
        // A run is short, so not each one enters every path.
        assert!(failed.iter().all(|n| *n > 0), "{faults}: {sites:?} failed {failed:?} times");
    }
    assert!(lost_somewhere > 0, "nothing was lost in any run");
}

/// If pages do not come back at all, the process stays as it is. Its request is refused, or carried out without letting it go.
#[test]
fn who_cannot_be_let_go_of_is_told() {
    const TOLD: &str = "its memory cannot be given back now";
    const ENDED: &str = "uzswap: a forked child could not be given its memory";
    let _beside = beside();
    let Some(leaves) = compile_c("leaves") else { return };
    let children = |how| format!("the child was {how}\nthe child was {how}\n");
    for (how, said) in [
        ("filter", "refused\nright\n".to_owned()),
        ("strict", "refused\nright\n".to_owned()),
        ("user", format!("refused\nright\nthreads of another user\n{}", children("right"))),
        ("caps", format!("refused\nright\ncapable threads\n{}", children("right"))),
        ("lock", format!("right\n{}", children("right"))),
        ("root", format!("right\n{}", children("wrong"))),
    ] {
        let run = with_faults(&Subject::new("stays", &[&leaves, &how]), 24 * MIB, "let_go=1/1");
        if run.status.code() == Some(77) {
            say(&format!("SKIPPED {how}: {}", run.stdout.text().trim()));
            continue;
        }
        assert!(run.status.success() && run.stdout.text() == said, "{how}\n{}", run.describe());
        let told = run.stderr.text();
        assert_eq!(
            (told.matches(TOLD).count(), told.contains(TOLD_OF_NO_LIMIT)),
            (1, false),
            "{how}\n{}",
            run.describe()
        );
        // A child without /proc cannot be managed.
        assert_eq!(told.contains(ENDED), how == "root", "{how}\n{}", run.describe());
        assert!(number(&run, "let_go") > 0, "{how}\n{}", run.describe());
    }
}

/// The helpers may not follow a change of user, or it comes in the very moment in which memory comes to be managed. The process
/// is let go of or, if that is impossible and the call was made already, ended.
#[test]
fn helpers_that_cannot_follow_a_change_of_user_do_not_remain() {
    const ENDED: &str = "it is ended rather than keep threads of the former user";
    let _beside = beside();
    let Some(leaves) = compile_c("leaves") else { return };
    let (mut gone, mut ended) = (0, 0);
    let ways = [("server", "all threads are nobody's"), ("capless", "no capable thread")];
    for (seed, (how, none)) in (5..=8).flat_map(|seed| ways.map(|way| (seed, way))) {
        let right = format!("right\n{none}\nthe child was right\nthe child was right\n");
        for more in ["", ",let_go=1/1"] {
            let subject = Subject::new("cannot follow", &[&leaves, &how]);
            let run = with_faults(&subject, 24 * MIB, &format!("seed={seed},follow=1/1{more}"));
            if run.status.code() == Some(77) {
                say(&format!("SKIPPED {how}: {}", run.stdout.text().trim()));
                continue;
            }
            assert!(number(&run, "follow") > 0, "{}", run.describe());
            let told = run.stderr.text();
            if run.status.code() == Some(125) {
                assert!(!more.is_empty() && told.contains(ENDED) && run.stdout.bytes == 0, "{}", run.describe());
                ended += 1;
                continue;
            }
            assert!(run.status.success() && run.stdout.text() == right, "{}", run.describe());
            assert_eq!(told.matches(TOLD_OF_NO_LIMIT).count(), 1, "{}", run.describe());
            gone += 1;
        }
    }
    assert!(gone > 0 && ended > 0, "{gone} were let go of, {ended} ended");
}

/// The story: a thread that was inside a mapping call or a fork while its process was let go of came out of it with all signals
/// blocked, and held the lock of mapping calls forever. And mappings that others unmapped meanwhile made `mlockall` fail.
#[test]
fn threads_that_map_and_fork_meanwhile_go_on_as_before() {
    let _beside = beside();
    let Some(leaves) = compile_c("leaves") else { return };
    for round in 0..5 {
        let run = Subject::new("busy", &[&leaves, &"busy"]).start_limited(24 * MIB).finish();
        if run.status.code() == Some(77) {
            return say(&format!("SKIPPED busy: {}", run.stdout.text().trim()));
        }
        run.say("busy", "lock", Some(24 * MIB));
        let right = "right\nthe child was right\nthe child was right\n";
        assert!(run.status.success() && run.stdout.text() == right, "round {round}\n{}", run.describe());
        assert_eq!(run.stderr.text().matches(TOLD_OF_NO_LIMIT).count(), 1, "{}", run.describe());
    }
}

/// The story: a program that may not lock all its memory asked that all future mappings be locked. The call was refused, but then
/// it could map nothing any more. And it ran without a limit.
#[test]
fn what_may_not_be_locked_changes_nothing() {
    let _beside = beside();
    let Some(refused) = compile_c("lockrefused") else { return };
    let subject = Subject::new("lock refused", &[&refused]);
    let (plain, run) = (subject.start_plain().finish(), subject.start_limited(16 * MIB).finish());
    run.say(subject.name, "", Some(16 * MIB));
    assert!(plain.status.success() && plain.stdout.text().contains("mlockall 3: ENOMEM\n"), "{}", plain.describe());
    assert!(run.status.success() && run.stdout.text() == plain.stdout.text(), "{}", run.describe());
    assert_eq!(run.stderr.text().matches(TOLD_OF_NO_LIMIT).count(), 0, "{}", run.describe());
}

//! What the kernel does with a program's memory behind its page tables: pages that pipes and sockets hold, guard pages, and the
//! mutexes of threads that are gone.

use crate::harness::*;

/// Half of what the programs use.
const LIMIT: u64 = 40 * MIB;

/// A fixture with arguments, run plainly and under a limit, which must come to the same; None where the kernel cannot do it.
fn same(name: &'static str, arguments: &str, options: &[&str]) -> Option<Outcome> {
    let program = compile_c(name)?;
    let mut subject = Subject::new(name, &[&program]).with(options);
    subject.argv.extend(arguments.split_whitespace().map(Into::into));
    let plain = subject.start_plain().finish();
    if plain.status.code() == Some(77) {
        say(&format!("SKIPPED {name} {arguments}: {}", plain.stderr.text().trim()));
        return None;
    }
    assert!(plain.status.success(), "{}", plain.describe());
    let run = subject.start_limited(LIMIT).finish();
    run.say(name, arguments, Some(LIMIT));
    assert_eq!(run.stdout.text(), plain.stdout.text(), "{name} {arguments}\n{}", run.describe());
    assert!(run.status.success(), "{name} {arguments}\n{}", run.describe());
    Some(run)
}

/// The story: a pipe holds what it is given by `vmsplice` by a reference, which MOVE does not see. The page was moved out, its
/// frame used for another, and a quarter of what was read from the pipe were other pages' bytes; from a socket (MSG_ZEROCOPY) a
/// third. A copy that waited for room for all of it would hang where the caller empties the pipe; and where it waits it can be cancelled,
/// as the call can.
#[test]
fn what_is_lent_to_pipes_and_sockets() {
    let _beside = beside();
    for how in ["pipe", "pipe raw", "narrow", "narrow raw", "full", "full raw", "cancel", "socket", "socket raw"] {
        for options in [&[][..], &["--swap", "256M"]] {
            same("lends", how, options);
        }
    }
}

/// The story: the kernel tells nobody of guard pages that are made. What was out there came back when they were removed, where
/// there should be zeros; and a guard within what a fault brought by a copy was replaced by it, so that nobody met it any more. Those that are made before the call is refused for what follows are guards, too.
#[test]
fn guard_pages_stay_guards_and_end_as_zeros() {
    let _beside = beside();
    for how in ["8", "2 raw", "3 process", "33 rawprocess", "513"] {
        for options in [&[][..], &["--swap", "256M"], &["--track-writes"]] {
            same("guards", how, options);
        }
    }
    for how in ["", "process"] {
        same("refused", how, &[]);
    }
}

/// The story: the kernel brings the word of a futex that it is to write to in a way that waits for no userfaultfd. FUTEX_WAKE_OP and locks
/// with priority inheritance on pages that were out failed with EFAULT.
#[test]
fn futexes_that_the_kernel_writes_to() {
    let _beside = beside();
    for options in [&[][..], &["--swap", "256M"], &["--track-writes"]] {
        same("futexes", "", options);
    }
}

/// The story: the kernel serves no fault for a thread that is ending. A robust mutex that it held, and that was out, was not marked
/// as a dead owner's, and who wanted it next waited for ever.
#[test]
fn robust_mutexes_of_threads_that_end() {
    let _beside = beside();
    for options in [&[][..], &["--swap", "256M"], &["--track-writes"]] {
        same("robust", "", options);
    }
}

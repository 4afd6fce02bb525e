//! What the kernel does with a program's memory behind its page tables: pages in pipes and sockets, guard pages, and mutexes of
//! threads that have ended.

use crate::harness::*;

/// Half of what the programs use.
const LIMIT: u64 = 40 * MIB;

/// Runs a fixture with arguments plainly and under a limit, with the same result; None if the kernel does not have what it needs.
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

/// The story: a pipe holds pages given by `vmsplice` by reference, which MOVE does not see. A page was moved out and its frame
/// used for another, so a quarter of what was read from the pipe was other pages' bytes; from a socket (MSG_ZEROCOPY) a third.
/// Now the data is copied. A copy that waited for room for all of it would hang if the caller empties the pipe itself; and the
/// wait can be cancelled, like the call.
#[test]
fn what_is_lent_to_pipes_and_sockets() {
    let _beside = beside();
    for how in ["pipe", "pipe raw", "narrow", "narrow raw", "full", "full raw", "cancel", "socket", "socket raw"] {
        for options in [&[][..], &["--swap", "256M"]] {
            same("lends", how, options);
        }
    }
}

/// The story: the kernel reports no guard pages. Evicted contents came back when guards were removed, where there should have
/// been zeros. A guard among the pages that a fault brought by a copy was replaced, and never hit again. Guards made before the
/// call is refused for the rest of its range also count.
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

/// The story: the kernel brings in the word of a futex that it writes to in a way that waits for no userfaultfd. FUTEX_WAKE_OP
/// and locks with priority inheritance on pages that were out failed with EFAULT.
#[test]
fn futexes_that_the_kernel_writes_to() {
    let _beside = beside();
    for options in [&[][..], &["--swap", "256M"], &["--track-writes"]] {
        same("futexes", "", options);
    }
}

/// The story: the kernel serves no faults for a thread that is ending. A robust mutex that it held, on a page that was out, was
/// not marked as a dead owner's, and the next thread that wanted it waited forever.
#[test]
fn robust_mutexes_of_threads_that_end() {
    let _beside = beside();
    for options in [&[][..], &["--swap", "256M"], &["--track-writes"]] {
        same("robust", "", options);
    }
}

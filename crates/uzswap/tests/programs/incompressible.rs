//! A program whose memory does not compress, without a disk: nothing is won by putting it out, so it stays until it compresses.

use crate::harness::*;
use crate::python;

const LIMIT: u64 = 64 * MIB;
/// What is used at random of what was wanted back: so many accesses, of which each was a fault before.
const ACCESSES: u64 = 100_000;

fn stays_until_it_compresses(bits: &str) {
    let _alone = alone();
    let Some(python) = python() else { return };
    let most = (with_slack(LIMIT) / MIB).to_string();
    let subject = Subject::new("incompressible", &[&python, &fixture("incompressible.py"), &most, &bits]);
    // (The least of three, as the machine may be busy: before, it was one for each access in all.)
    let mut least = u64::MAX;
    for _ in 0..3 {
        least = least.min(faults_of(&subject, bits));
        if least < ACCESSES / 2 {
            return;
        }
    }
    panic!("{least} pages were brought one by one");
}

/// Runs it, which is right; the faults that brought something back.
fn faults_of(subject: &Subject, bits: &str) -> u64 {
    let run = subject.start_limited(LIMIT).finish();
    run.say(subject.name, bits, Some(LIMIT));
    assert!(run.status.success(), "{}", run.describe());
    assert_limited(subject.name, &run, Some(120 * MIB));
    // (All of it comes once, when it is first read; and what text is brought back.)
    number(&run, "pgmajfault")
}

/// The story: what does not compress went in and out of the pool, a fault each time. And once that stayed, it stayed when it had been
/// overwritten, at 103 MiB of 64.
#[test]
fn what_does_not_compress_stays_and_goes_when_it_does() {
    stays_until_it_compresses("8");
}

/// The story: ImageMagick with 96 MiB that compress to seven eighths in 72 took 150 s for 2.5, with five million faults, and 110 MiB.
#[test]
fn what_hardly_compresses_stays_where_the_limit_cannot_be_kept() {
    stays_until_it_compresses("7");
}

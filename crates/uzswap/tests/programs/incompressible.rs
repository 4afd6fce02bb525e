//! A program with incompressible memory and no disk: evicting that gains nothing, so it stays until it compresses.

use crate::harness::*;
use crate::python;

const LIMIT: u64 = 64 * MIB;
/// Random accesses to memory that was wanted back; each used to be a fault.
const ACCESSES: u64 = 100_000;

fn stays_until_it_compresses(bits: &str) {
    let _alone = alone();
    let Some(python) = python() else { return };
    let most = (with_slack(LIMIT) / MIB).to_string();
    let subject = Subject::new("incompressible", &[&python, &fixture("incompressible.py"), &most, &bits]);
    // The least of three runs, as the machine may be busy. There used to be one fault per access.
    let mut least = u64::MAX;
    for _ in 0..3 {
        least = least.min(faults_of(&subject, bits));
        if least < ACCESSES / 2 {
            return;
        }
    }
    panic!("{least} pages were brought one by one");
}

/// Runs the program, which must be right; returns the faults that brought something back.
fn faults_of(subject: &Subject, bits: &str) -> u64 {
    let run = subject.start_limited(LIMIT).finish();
    run.say(subject.name, bits, Some(LIMIT));
    assert!(run.status.success(), "{}", run.describe());
    assert_limited(subject.name, &run, Some(120 * MIB));
    // Everything comes back once, when it is first read; so does text.
    number(&run, "pgmajfault")
}

/// The story: incompressible memory went in and out of the pool, a fault each time. And once it stayed, it also stayed when it
/// had been overwritten with text: 103 MiB of 64.
#[test]
fn what_does_not_compress_stays_and_goes_when_it_does() {
    stays_until_it_compresses("8");
}

/// The story: ImageMagick in 72 MiB, with 96 MiB that compress to seven eighths, took 150 s instead of 2.5, with five million
/// faults, and held 110 MiB.
#[test]
fn what_hardly_compresses_stays_where_the_limit_cannot_be_kept() {
    stays_until_it_compresses("7");
}

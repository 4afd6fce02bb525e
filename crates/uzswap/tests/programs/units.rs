//! `--unit` larger than 64 KiB: blocks of up to 2 MiB are written to, dropped, moved and inherited in part, and go to disk and
//! come back.

use crate::harness::*;

/// The value of `counter` in a report for folios of a size.
fn of_size(run: &Outcome, size: &str, counter: &str) -> u64 {
    let report: serde_json::Value = serde_json::from_str(run.report.as_deref().expect("a report")).expect("JSON");
    report["folios"][format!("hugepages-{size}kB")][counter].as_u64().expect("a counter")
}

/// Runs the program, one in `noise` of its words being noise, at half of its memory. Nothing may be wrong, and units of this size
/// must have occurred.
fn check(mib: u64, unit: (&str, &str), noise: &str, options: &[&str], faults: &str) -> Option<Outcome> {
    let units = compile_c("units")?;
    let subject = Subject::new("units", &[&units, &mib.to_string(), &"1", &noise]);
    let subject = subject.with(&["--unit", unit.0]).with(options);
    let variables: &[_] = if faults.is_empty() { &[] } else { &[("UZSWAP_TEST_FAULTS", faults)] };
    let run = subject.start_limited_with(mib / 2 * MIB, variables).finish();
    let [stored, cut] = [of_size(&run, unit.1, "block_write"), number(&run, "block_cut")];
    run.say("units", &format!("{} {options:?} {faults}: {stored} units, {cut} cut", unit.0), Some(mib / 2 * MIB));
    assert!(!run.timed_out && run.status.success(), "{}", run.describe());
    assert_eq!(run.stdout.text(), "0 wrong\n", "{}", run.describe());
    assert_eq!(number(&run, "poisoned"), 0, "{}", run.describe());
    assert!(stored > 20 && number(&run, "block_read") > 0, "{stored} units\n{}", run.describe());
    Some(run)
}

#[test]
fn units_of_2_mib_and_of_256_kib() {
    let _beside = beside();
    for (mib, unit) in [(256, ("2M", "2048")), (96, ("256K", "256"))] {
        for codec in ["lz4", "zstd"] {
            let Some(run) = check(mib, unit, "8", &["--verify-compression", "-c", codec], "") else { return };
            assert!(number(&run, "block_partial_write") > 0 && number(&run, "block_cut") > 0, "{}", run.describe());
            assert_eq!(number(&run, "reject_verify_fail"), 0);
        }
    }
}

#[test]
fn large_units_and_a_disk() {
    let _beside = beside();
    for (mib, unit) in [(256, ("2M", "2048")), (96, ("256K", "256"))] {
        // What compresses to half is more than the pools may take.
        let Some(run) = check(mib, unit, "3", &["--swap", "1G"], "") else { return };
        assert!(number(&run, "pswpout") > 0 && number(&run, "pswpin") > 0, "the disk was not used\n{}", run.describe());
        assert!(number(&run, "block_cut") > 0);
    }
}

/// Every step of storing and loading a large unit fails at times, and nothing is wrong. (Reads fail so seldom that no page fails
/// four in a row, which would lose it. A rate of one in 20 lost one in about 60 runs.)
#[test]
fn large_units_under_injected_failures() {
    const FAULTS: &str = "pool=1/20,limit=1/40,index=1/5000,compress=1/10,frames=1/4,charge=1/4,copy=1/50,move_out=1/100,\
                          move_in=1/100,swap_read=1/150,swap_write=1/20";
    let _beside = beside();
    for (mib, unit) in [(256, ("2M", "2048")), (96, ("256K", "256"))] {
        let faults = format!("seed={mib},{FAULTS}");
        let Some(run) = check(mib, unit, "3", &["--verify-compression", "--swap", "1G"], &faults) else { return };
        for site in ["pool", "limit", "index", "compress", "frames", "charge"] {
            assert!(number(&run, site) > 0, "{site} never failed\n{}", run.describe());
        }
        assert!(number(&run, "reject_verify_fail") > 0, "{}", run.describe());
    }
}

//! Programs whose pages are paged out from outside, all the time, while they map, unmap, fork and verify.

use crate::harness::*;
use std::process::Command;

/// Runs a subject while every process of it is paged out again and again; its output must be that of a run without uzswap.
fn under_page_outs(subject: &Subject, limits: &[u64]) {
    let plain = subject.start_plain().finish();
    for limit in limits {
        let run = subject.start_limited(limit * MIB);
        let (mut asked, mut done) = (0, 0);
        while run.is_running() {
            for pid in run.processes() {
                asked += 1;
                // Refused for processes that have ended or become another program meanwhile, and for the command itself.
                let moved = Command::new(uzswap()).args(["pagemap", &pid.to_string(), "--page-out", "all"]).output();
                done += u32::from(moved.expect("the command").status.success());
            }
        }
        let run = run.finish();
        run.say(subject.name, &format!("{done} page-outs of {asked}"), Some(limit * MIB));
        assert!(done > 0, "no page-out moved anything\n{}", run.describe());
        let same = (run.stdout.bytes, run.stdout.hash) == (plain.stdout.bytes, plain.stdout.hash);
        assert!(!run.timed_out && run.status == plain.status && same, "at {limit} MiB\n{}", run.describe());
    }
}

#[test]
fn every_memory_call_under_page_outs() {
    let _beside = beside();
    let Some(mix) = compile_c("mix") else { return };
    // At a limit that presses, and at one that is never reached.
    under_page_outs(&Subject::new("memory calls", &[&mix, &"3"]), &[40, 1024]);
}

#[test]
fn forks_under_page_outs() {
    let _beside = beside();
    let Some(storm) = compile_c("forkstorm") else { return };
    under_page_outs(&Subject::new("fork storm", &[&storm, &"1"]), &[48, 1024]);
}

/// The story: see `Pager::lock_in_hook`. A program stood still forever, once in hundreds of runs of another test.
#[test]
fn who_maps_on_a_stack_that_is_put_out_waits_for_nobody() {
    let _beside = beside();
    let Some(depths) = compile_c("depths") else { return };
    under_page_outs(&Subject::new("depths", &[&depths]), &[1024]);
}

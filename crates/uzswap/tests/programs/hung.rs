//! Shows where a program hangs before it is killed, as it may be long before that happens again.

use crate::harness::*;
use std::fs;
use std::process::Command;

/// Prints where each thread of a session's processes is and what it waits for, and uzswap's counters; then kills all of them.
pub fn end_hung(leader: i32) {
    say(&format!("    not done after {RUN_TIMEOUT:?}:"));
    for pid in session(leader) {
        let of = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        say(&format!("      process {pid}: {}", of("cmdline").replace('\0', " ")));
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        for tid in tasks.filter_map(|task| task.file_name().into_string().ok()) {
            let of = |file: &str| of(&format!("task/{tid}/{file}"));
            let stat = of("stat");
            // After the name: the state; 11 and 12 fields on, the CPU time in ticks.
            let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
            let field = |n: usize| fields.get(n).copied().unwrap_or("?");
            let stack: Vec<String> = of("stack").lines().map(|line| line.replace("[<0>] ", "")).collect();
            say(&format!(
                "        thread {tid}: {} used {} + {}, in {}, system call {}, stack: {}",
                field(0),
                field(11),
                field(12),
                of("wchan"),
                of("syscall").trim(),
                stack.join(" < ")
            ));
        }
    }
    let stat = Command::new(uzswap()).args(["stat", &leader.to_string()]).output();
    say(&stat.map_or_else(|e| e.to_string(), |out| String::from_utf8_lossy(&out.stdout).into_owned()));
    end_all(leader);
}

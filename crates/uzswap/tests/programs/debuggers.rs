//! Programs under a debugger, which does not control uzswap's threads.

use crate::harness::*;

/// Functions that compilers call, and libc functions whose names uzswap also uses.
const NAMES: [&str; 10] =
    ["memcpy", "memmove", "memset", "memcmp", "bcmp", "strlen", "write", "read", "close", "gettid"];

/// The story: uzswap's threads hit a breakpoint at `memmove` in libc, and one at `write` in uzswap functions that the compiler
/// had inlined and gdb found by the library's symbols. gdb does not control those threads, so the program ended (SIGTRAP).
#[test]
fn breakpoints_are_not_met_by_other_threads() {
    let _alone = alone();
    let (Some(gdb), Some(random)) = (need("gdb"), compile_c("random")) else { return };
    let dir = scratch("debugged");
    let (script, out) = (dir.join("script"), dir.join("out"));
    let mut lines = String::from("set breakpoint pending on\nset confirm off\n");
    for (n, name) in NAMES.iter().enumerate() {
        lines += &format!("break {name}\nignore {} 1000000000\n", n + 1);
    }
    lines += &format!("run 96 20000 > {}\nprint $_exitcode\n", out.display());
    std::fs::write(&script, lines).expect("the script");
    let plain = Subject::new("random", &[&random, &"96", &"20000"]).start_plain().finish();
    let argv: [&dyn AsRef<std::ffi::OsStr>; 6] = [&gdb, &"-nx", &"-batch", &"-x", &script, &random];
    let run = Subject::new("debugged", &argv).start_limited(64 * MIB).finish();
    run.say("debugged", "", Some(64 * MIB));
    if run.stderr.text().contains("ptrace") {
        return skip(&format!("programs cannot be traced here: {}", run.stderr.text()));
    }
    assert!(run.status.success() && run.stdout.text().ends_with("$1 = 0\n"), "{}", run.describe());
    assert_eq!(std::fs::read_to_string(out).unwrap_or_default(), plain.stdout.text(), "{}", run.describe());
    assert!(number(&run, "peak_held") > 90 * MIB, "{}", run.describe());
}

//! Programs in which not all calls come through the libc functions that uzswap's library replaces: another libc is loaded, or a
//! library that calls libc's own functions whatever replaces them.

use crate::harness::*;
use crate::preloads::compile_with;
use crate::same_under;
use std::path::{Path, PathBuf};

/// Room for the address of the program's memory.
const ADDRESS: &str = "0000000000000000";

/// Runs `otherlibc` without a limit and with one, with an auditor if one is given: both print the same.
fn runs(how: &str, library: &Path, auditor: Option<&Path>) -> Option<Outcome> {
    let (Some(program), Some(env)) = (compile_c("otherlibc"), need("env")) else { return None };
    let audit = format!("LD_AUDIT={}", auditor.unwrap_or(Path::new("")).display());
    let subject = Subject::new("other libc", &[&env, &audit, &program, &how, &library, &ADDRESS]);
    Some(same_under(&subject, 16 * MIB, how))
}

/// The library that is built from the same file.
fn library(name: &str) -> Option<PathBuf> {
    compile_with("otherlibc.c", name, &["-shared", "-fPIC", "-pthread", "-DLIBRARY"])
}

/// Whether it stayed managed, and said nothing about it.
fn was_managed(run: &Outcome) {
    assert!(!run.stderr.text().contains("without a limit"), "{}", run.describe());
}

/// The story: the libc that comes with a namespace of its own (`dlmopen`) was not followed. A child that it forked, even when a
/// library's constructor did, read zeros where its parent's pages were out, and so on.
#[test]
fn another_libc_forks_and_maps() {
    let _beside = beside();
    let Some(library) = library("namespace.so") else { return };
    for how in ["namespace", "constructor"] {
        let Some(run) = runs(how, &library, None) else { return };
        was_managed(&run);
    }
}

/// The story: the same with the libc of an auditor (LD_AUDIT), which is there before uzswap's library.
#[test]
fn an_auditor_forks_and_maps() {
    let _beside = beside();
    let Some(library) = library("auditor.so") else { return };
    let Some(run) = runs("audit", Path::new("libm.so.6"), Some(&library)) else { return };
    was_managed(&run);
    assert_eq!(run.stdout.text().matches("fork: 0 words wrong").count(), 4, "{}", run.describe());
}

/// The story: a library that prefers the libraries that it needs (RTLD_DEEPBIND) calls libc's own `clone`, `syscall`, `prctl` and
/// `mlockall`. Children read zeros, and the kernel filled all that uzswap reserves.
#[test]
fn libcs_own_functions_are_followed() {
    let _beside = beside();
    let Some(library) = library("deep.so") else { return };
    let Some(run) = runs("deep", &library, None) else { return };
    was_managed(&run);
    for (how, told) in [("filter", "restricts its system calls"), ("lock", "locks all its memory")] {
        let Some(run) = runs(how, &library, None) else { return };
        assert_eq!(run.stderr.text().matches(told).count(), 1, "{how}: {}", run.describe());
    }
}

/// A libc that cannot be followed, here one by its name only: the process is told, and runs without a limit, before anything can
/// read wrong data.
#[test]
fn who_loads_a_libc_of_which_nothing_is_known_is_let_go_of() {
    let _beside = beside();
    let versions = scratch("libc-versions").join("versions");
    std::fs::write(&versions, "GLIBC_PRIVATE { global: *; };\n").expect("a file");
    let versions = format!("-Wl,-soname,libc.so.6,--version-script={}", versions.display());
    let fake = ["-shared", "-fPIC", "-nostdlib", "-DFAKE", &versions];
    let Some(fake) = compile_with("otherlibc.c", "fake.so", &fake) else { return };
    let Some(run) = runs("fake", &fake, None) else { return };
    let told = "loads another C library, whose calls cannot be followed; it runs without a limit from now on";
    assert_eq!(run.stderr.text().matches(told).count(), 1, "{}", run.describe());
    let Some(run) = runs("none", Path::new("libm.so.6"), Some(&fake)) else { return };
    let told = "runs without a limit: it has another C library (of an auditor), whose calls cannot be followed";
    assert_eq!(run.stderr.text().matches(told).count(), 1, "{}", run.describe());
}

/// A debugger has its own breakpoint in the loader's function by which uzswap is told of other libcs. The program runs as without
/// it, if without a limit.
#[test]
fn another_libc_under_a_debugger() {
    let _alone = alone();
    let (Some(gdb), Some(program), Some(library)) = (need("gdb"), compile_c("otherlibc"), library("debugged.so"))
    else {
        return;
    };
    let dir = scratch("debugged-libc");
    let (script, out) = (dir.join("script"), dir.join("out"));
    let arguments = format!("namespace {} {ADDRESS} > {}", library.display(), out.display());
    std::fs::write(&script, format!("set confirm off\nrun {arguments}\nprint $_exitcode\n")).expect("the script");
    let plain = Subject::new("other libc", &[&program, &"namespace", &library, &ADDRESS]).start_plain().finish();
    let argv: [&dyn AsRef<std::ffi::OsStr>; 6] = [&gdb, &"-nx", &"-batch", &"-x", &script, &program];
    let run = Subject::new("debugged", &argv).start_limited(16 * MIB).finish();
    if run.stderr.text().contains("ptrace") {
        return skip(&format!("programs cannot be traced here: {}", run.stderr.text()));
    }
    assert!(run.status.success() && run.stdout.text().ends_with("$1 = 0\n"), "{}", run.describe());
    assert_eq!(std::fs::read_to_string(out).unwrap_or_default(), plain.stdout.text(), "{}", run.describe());
}

//! Programs that bring libraries of their own where uzswap has hooks: other allocators, sanitizers, another environment.

use crate::harness::*;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file of the system's; skips the test if it does not exist.
fn need_file(path: &str) -> Option<PathBuf> {
    let found = PathBuf::from(path);
    if !found.is_file() {
        missing(&format!("there is no {path}"));
        return None;
    }
    Some(found)
}

/// A C program of the fixtures, compiled with more options; None if this compiler does not have what they ask for.
pub fn compile_with(source: &str, name: &str, options: &[&str]) -> Option<PathBuf> {
    let cc = need("cc")?;
    let out = scratch(name).join(name);
    let mut command = Command::new(cc);
    command.args(["-O1", "-g", "-pthread", "-Wall", "-Werror"]).args(options).arg("-o").arg(&out);
    let made = command.arg(fixture(source)).output().expect("the compiler starts");
    if !made.status.success() {
        missing(&format!("{name} cannot be built: {}", String::from_utf8_lossy(&made.stderr)));
        return None;
    }
    Some(out)
}

/// The story: if another library had an `mmap` of its own (tcmalloc, the sanitizers), that was taken for libc's, which "uzswap
/// does not know how to hook", and the program ran without a limit. A program started with another environment (`env -i`, or a
/// script that preloads another allocator) also ran without one, and nothing said so.
#[test]
fn another_allocator_in_an_environment_of_its_own() {
    let _beside = beside();
    let Some(mallocs) = compile_with("mallocs.c", "mallocs", &[]) else { return };
    let Some(library) = compile_with("ownmmap.c", "ownmmap.so", &["-shared", "-fPIC"]) else { return };
    let Some(env) = need("env") else { return };
    let preload = format!("LD_PRELOAD={}", library.display());
    Subject::new("own allocator", &[&env, &"-i", &preload, &mallocs]).check();
}

/// The story: AddressSanitizer refused to run if its library was not the first one. Once it did run, the program waited forever
/// when its memory was to be managed: sanitizers have a `memcpy` of their own, which reads shadow memory of the program's, and
/// the uzswap thread that should serve its faults called it.
#[test]
fn programs_built_with_sanitizers() {
    let _beside = beside();
    for sanitizer in ["address", "thread"] {
        let option = format!("-fsanitize={sanitizer}");
        let Some(program) = compile_with("mallocs.c", sanitizer, &[&option]) else { continue };
        let mut subject = Subject::new("sanitized", &[&program]);
        // If addresses are more random than it expects, ThreadSanitizer ends some of its programs at once: vm.mmap_rnd_bits.
        let plain = subject.start_plain().finish();
        if !plain.status.success() {
            skip(&format!("a program with the {sanitizer} sanitizer does not work here: {}", plain.stderr.text()));
            continue;
        }
        subject.percents = &[50];
        subject.check();
    }
}

/// The story: every process under uzswap loaded libgcc's unwinder, which the standard library names and the agent never calls: a
/// sixth of the cost of starting a process. Now a program loads it when it wants it, and its threads unwind through the agent.
#[test]
fn the_unwinder_is_the_programs_own() {
    let _beside = beside();
    let Some(program) = compile_c("unwinds") else { return };
    let mut subject = Subject::new("unwinds", &[&program]);
    subject.percents = &[50];
    subject.check();
}

/// The story: LeakSanitizer, which runs in AddressSanitizer when a program ends, stops all threads of the process by ptrace,
/// including those that serve its faults, and reads all memory: it waited forever for what was out.
#[test]
fn programs_that_look_for_their_leaks() {
    let _beside = beside();
    for (sanitizer, name) in [("address", "leaks-address"), ("leak", "leaks-leak")] {
        let option = format!("-fsanitize={sanitizer}");
        let Some(program) = compile_with("leaks.c", name, &[&option]) else { continue };
        let subject = Subject::new("leaks", &[&program]);
        let plain = subject.start_plain().finish();
        let found = "624 byte(s) leaked in 3 allocation(s)";
        if plain.stderr.text().matches(found).count() != 2 {
            skip(&format!(
                "leaks are not found here without uzswap (may processes trace others?)\n{}",
                plain.describe()
            ));
            continue;
        }
        for percent in [50, 25] {
            let limit = limit_of(plain.peak_anon_bytes / 2, percent);
            let run = subject.start_limited(limit).finish();
            run.say("leaks", sanitizer, Some(limit));
            assert!(!run.timed_out && run.status == plain.status, "{sanitizer}\n{}", run.describe());
            assert_eq!(run.stdout.text(), plain.stdout.text(), "{sanitizer}\n{}", run.describe());
            assert_eq!(run.stderr.text().matches(found).count(), 2, "{sanitizer}\n{}", run.describe());
            assert_limited(sanitizer, &run, None);
            let told = run.stderr.text().matches("is searched for leaks").count();
            assert_eq!(told, 1, "{sanitizer}\n{}", run.describe());
        }
    }
}

/// The story: a child linked with musl got an `LD_PRELOAD` that musl's loader cannot load, and ended before it began (127).
#[test]
fn a_child_whose_loader_is_musls() {
    let _beside = beside();
    let (Some(sh), Some(loader)) = (need("sh"), need_file("/lib64/ld-linux-x86-64.so.2")) else { return };
    let Some(library) = compile_with("ownmmap.c", "foreign.so", &["-shared", "-fPIC"]) else { return };
    // It is glibc's loader under musl's name: what counts is what the program is given.
    let dir = scratch("foreign-loader");
    let musl = dir.join("ld-musl-x86_64.so.1");
    std::os::unix::fs::symlink(loader, &musl).expect("a link");
    let option = format!("-Wl,--dynamic-linker={}", musl.display());
    let Some(program) = compile_with("foreign.c", "foreign", &[&option]) else { return };
    let (program, library) = (program.display(), library.display());
    let script = format!("{program}; LD_PRELOAD={library} {program}; LD_PRELOAD=\"$LD_PRELOAD:{library}\" {program}");
    // Scripts for it, too.
    let (one, two) =
        (executable(&dir.join("script"), &program), executable(&dir.join("of-script"), &dir.join("script").display()));
    let script = format!("{script}; {}; {}", one.display(), two.display());
    let run = Subject::new("foreign", &[&sh, &"-c", &script]).start_limited(24 * MIB).finish();
    let said = format!("none, right\n{library}, right\n{library}, right\nnone, right\nnone, right\n");
    assert!(run.status.success() && run.stdout.text() == said, "{}", run.describe());
    assert_eq!(run.stderr.text().matches("linked with musl").count(), 1, "{}", run.describe());
}

/// The story: see `loader` of the agent's `program`.
#[test]
fn loaders_that_are_run_by_their_name() {
    let _beside = beside();
    let (Some(sh), Some(loader)) = (need("sh"), need_file("/lib64/ld-linux-x86-64.so.2")) else { return };
    let Some(program) = compile_with("foreign.c", "loaded", &[]) else { return };
    // It is glibc's loader under musl's name: what counts is what it is given.
    let musl = scratch("musls-loader").join("ld-musl-x86_64.so.1");
    std::fs::copy(&loader, &musl).expect("a copy");
    let script = format!("{} {program}; {} {program}", musl.display(), loader.display(), program = program.display());
    let said = format!("none, right\n{}, right\n", agent().display());
    let run = Subject::new("loaders", &[&sh, &"-c", &script]).start_limited(24 * MIB).finish();
    assert!(run.status.success() && run.stdout.text() == said, "{}", run.describe());
    assert_eq!(run.stderr.text().matches("linked with musl").count(), 1, "{}", run.describe());
    assert_eq!(run.stderr.text().matches("statically linked").count(), 0, "{}", run.describe());
    // Also as the program of the command itself.
    let run = Subject::new("loader", &[&loader, &program]).start_limited(24 * MIB).finish();
    let said = format!("{}, right\n", agent().display());
    assert!(run.status.success() && run.stdout.text() == said, "{}", run.describe());
}

/// Writes a script for an interpreter.
fn executable(script: &Path, interpreter: &impl std::fmt::Display) -> PathBuf {
    std::fs::write(script, format!("#! {interpreter} \n")).expect("a script");
    std::fs::set_permissions(script, std::fs::Permissions::from_mode(0o755)).expect("its mode");
    script.to_owned()
}

/// The library of the command under test.
fn agent() -> PathBuf {
    uzswap().with_file_name("libuzswap_agent.so")
}

/// The story: in a process that has the library loaded but is not managed, libc's `clone` failed (EINVAL), and a child on a new
/// stack returned into a frame of the library's that was not on that stack. The code in front of libc's functions had not looked
/// for them.
#[test]
fn who_is_in_no_group_clones_as_ever() {
    let _beside = beside();
    let (Some(clones), Some(env)) = (compile_c("clones"), need("env")) else { return };
    let preload = format!("LD_PRELOAD={}", agent().display());
    let run = Subject::new("clones", &[&env, &preload, &clones]).start_plain().finish();
    assert_eq!(run.stdout.text(), "clone: made, 700\nsyscall: made, 800\n", "{}", run.describe());
}

/// The story: each `exec` took 14 KiB of stack for an environment, although most programs' environment is complete and needs no
/// addition. In a signal handler on a small stack of its own that overwrote what lay below; and so it did for a program that gave
/// a small environment of its own.
#[test]
fn exec_takes_little_of_a_small_stack() {
    use std::os::unix::fs::PermissionsExt;
    let _beside = beside();
    let Some(program) = compile_c("smallstack") else { return };
    let file = scratch("not-executable").join("program");
    std::fs::copy(&program, &file).expect("a copy");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).expect("its mode");
    let run = Subject::new("small stack", &[&program, &file]).start_limited(24 * MIB).finish();
    assert_eq!(run.stdout.text(), "refused 6 times, 0 bytes below the stack are others\n", "{}", run.describe());
}

/// The story: programs started by a descriptor (`fexecve`, `execveat`), or by libc's `syscall`, with an environment of their own
/// ran without a limit, and nothing said so. And nobody was told of static programs started by `execl`, which the warning did not
/// cover.
#[test]
fn programs_are_started_in_every_way_with_what_they_need() {
    let _beside = beside();
    let (Some(python), Some(grep), Some(cc)) = (crate::python(), need("grep"), need("cc")) else { return };
    let script = "import ctypes, os, sys\n\
        libc, grep = ctypes.CDLL(None), sys.argv[1]\n\
        argv = ['grep', '-q', 'libuzswap_agent', '/proc/self/maps']\n\
        strings = lambda list: (ctypes.c_char_p * (len(list) + 1))(*[text.encode() for text in list], None)\n\
        fd = os.open(grep, os.O_RDONLY)\n\
        for exec in [\n\
        \x20   lambda: os.execve(grep, argv, {}),\n\
        \x20   lambda: os.execve(fd, argv, {}),\n\
        \x20   lambda: libc.execveat(-100, grep.encode(), strings(argv), strings([]), 0),\n\
        \x20   lambda: libc.execveat(fd, b'', strings(argv), strings([]), 0x1000),\n\
        \x20   lambda: libc.syscall(59, grep.encode(), strings(argv), strings([]), 0, 0, 0),\n\
        \x20   lambda: libc.syscall(322, -100, grep.encode(), strings(argv), strings([]), 0, 0),\n\
        \x20   lambda: libc.execle(sys.argv[2].encode(), b'static', None, strings([])),\n\
        ]:\n\
        \x20   child = os.fork()\n\
        \x20   if child == 0: exec(), os._exit(99)\n\
        \x20   print(os.waitpid(child, 0)[1])";
    let dir = scratch("static");
    let program = dir.join("static");
    std::fs::write(dir.join("static.c"), "int main(void) { return 0; }\n").expect("a source");
    let made = Command::new(cc).arg("-static").arg(dir.join("static.c")).arg("-o").arg(&program).output();
    if !made.is_ok_and(|made| made.status.success()) {
        return skip("static programs cannot be built here");
    }
    let run = Subject::new("started", &[&python, &"-c", &script, &grep, &program]).start_limited(64 * MIB).finish();
    assert!(run.status.success() && run.stdout.text() == "0\n".repeat(7), "{}", run.describe());
    assert_eq!(run.stderr.text().matches("is statically linked").count(), 1, "{}", run.describe());
}

/// A 32-bit program that only ends: the file header, one segment, and the system call.
fn ends_in_32_bits() -> Vec<u8> {
    const AT: u32 = 0x0804_8000;
    let code = [0x31, 0xdb, 0x31, 0xc0, 0x40, 0xcd, 0x80];
    let (head, entry) = (52u32, 32u32);
    let size = head + entry + code.len() as u32;
    let mut file = b"\x7fELF\x01\x01\x01".to_vec();
    file.resize(16, 0);
    let words = |file: &mut Vec<u8>, words: &[u32]| words.iter().for_each(|word| file.extend(word.to_le_bytes()));
    // Kind (a program) and machine (x86); version, entry point, tables and flags; sizes and numbers of the tables.
    words(&mut file, &[3 << 16 | 2, 1, AT + head + entry, head, 0, 0, entry << 16 | head, 1, 0]);
    words(&mut file, &[1, 0, AT, AT, size, size, 5, 0x1000]);
    file.extend(code);
    file
}

/// The story: only static programs were reported to run without a limit, and not if a script named them. Nothing was said of
/// programs with other rights than their caller's, or of 32-bit ones.
#[test]
fn who_cannot_be_preloaded_into_is_told_of() {
    let _beside = beside();
    let (Some(sh), Some(cc), Some(echo)) = (need("sh"), need("cc"), need("echo")) else { return };
    let dir = scratch("unloaded");
    let run = |program: &Path, told: &str, says: &str| {
        let script = format!("{0}; {0}; true", program.display());
        let run = Subject::new("unloaded", &[&sh, &"-c", &script]).start_limited(24 * MIB).finish();
        assert!(run.status.success() && run.stdout.text() == says, "{}", run.describe());
        assert_eq!(run.stderr.text().matches("runs without a limit").count(), 1, "{}", run.describe());
        assert!(run.stderr.text().contains(told), "{}", run.describe());
    };
    std::fs::write(dir.join("static.c"), "int main(void) { return 0; }\n").expect("a source");
    let made = Command::new(cc).arg("-static").arg(dir.join("static.c")).arg("-o").arg(dir.join("static")).output();
    if made.is_ok_and(|made| made.status.success()) {
        let script = executable(&dir.join("script"), &dir.join("static").display());
        run(&script, &format!("{} is statically linked", script.display()), "");
    } else {
        skip("static programs cannot be built here");
    }
    let short = executable(&dir.join("short"), &"");
    std::fs::write(&short, ends_in_32_bits()).expect("a program");
    run(&short, "short is a 32-bit program", "");
    let nobodys = dir.join("nobodys");
    std::fs::copy(echo, &nobodys).expect("a copy");
    if std::os::unix::fs::chown(&nobodys, Some(65534), None).is_err() {
        return skip("files cannot be given away here");
    }
    std::fs::set_permissions(&nobodys, std::fs::Permissions::from_mode(0o4755)).expect("its mode");
    run(&nobodys, "nobodys runs with other rights than its caller (setuid", "\n\n");
}

/// The story: a program that could not find the library (under `chroot`) ran without a limit, and nothing said so if it had kept
/// its environment. The loader complained in each program from there on.
#[test]
fn who_cannot_find_the_library_is_told() {
    let _beside = beside();
    let (Some(sh), Some(env)) = (need("sh"), need("env")) else { return };
    let dir = scratch("no-library");
    let (command, library) = (dir.join("uzswap"), dir.join("libuzswap_agent.so"));
    std::fs::copy(uzswap(), &command).expect("a copy");
    std::fs::copy(agent(), &library).expect("a copy");
    let script = "rm \"$0\"; \"$1\" echo one; \"$1\" \"$1\" echo two";
    let mut run = Command::new(&command);
    run.args(["run", "--memory", "24M", "--"]).arg(sh).args(["-c", script]).arg(&library).arg(&env);
    let run = run.output().expect("the command starts");
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success() && run.stdout == b"one\ntwo\n", "{run:?}");
    assert_eq!(said.matches("cannot load uzswap's library").count(), 1, "{said}");
    assert!(!said.contains("LD_PRELOAD"), "{said}");
}

/// The story: a plugin uses liburing, which then only the plugin sees. It got the agent's functions, which did not find
/// liburing's where all libraries look: each call failed with ENOSYS, in Python too.
#[test]
fn a_plugin_gets_the_ring_of_a_library_that_it_alone_sees() {
    let _beside = beside();
    let Some(plugin) = compile_with("plugin.c", "plugin.so", &["-shared", "-fPIC", "-DPLUGIN"]) else { return };
    let Some(program) = compile_c("plugin") else { return };
    let subject = Subject::new("plugin", &[&program, &plugin]);
    for run in [subject.start_plain().finish(), subject.start_limited(24 * MIB).finish()] {
        assert_eq!(run.stdout.text(), "8 entries, flags 2\n8 entries, flags 2\n", "{}", run.describe());
    }
}

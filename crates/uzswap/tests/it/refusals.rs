//! What is refused before anything is started: one sentence each, with a status that says whose fault it is.

use crate::cli::{
    AGENT, UZSWAP, agent_built, copy, file, for_programs, refused, run, sentence, sentence_of, skip, uzswap,
};
use crate::place::eventually;
use assert_cmd::Command;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tempfile::TempDir;

/// A statically linked program: compiled, or if libc.a is missing, its ELF header.
fn static_program(dir: &TempDir) -> PathBuf {
    let path = dir.path().join("static");
    let source = file(dir, "static.c", b"int main(void) { return 0; }\n", 0o644);
    let built = std::process::Command::new("cc").arg("-static").arg(source).arg("-o").arg(&path).output();
    if !built.is_ok_and(|output| output.status.success()) {
        let mut elf = fs::read("/bin/true").unwrap()[..64].to_vec();
        elf[56] = 0;
        file(dir, "static", &elf, 0o755);
    }
    path
}

#[test]
fn bad_options_are_refused() {
    refused(&[], &["no limit", "--memory"]);
    refused(&["-m", "lots"], &["`lots` is not a size", "512M"]);
    refused(&["-m", "101%"], &["out of range"]);
    refused(&["-m", "1M"], &["too small", "minimum is 16 MiB"]);
    refused(&["-m", "256M", "-c", "lzo"], &["no compressor is called `lzo`", "zstd"]);
    refused(&["-m", "256M", "-c", "zstd:99"], &["1 to 22"]);
    refused(&["-m", "256M", "--config", "/no/such/file"], &["/no/such/file", "cannot be read"]);
    refused(&["-m", "256M", "--report", "/no/such/dir/r"], &["report", "cannot be written"]);
    let dir = TempDir::new().unwrap();
    let config = file(&dir, "c.toml", b"memory = '1G'\nmemroy = '1G'\n", 0o644);
    refused(&["--config", config.to_str().unwrap()], &["line 2", "memroy"]);
    for (options, parts) in [
        (&["--memory="][..], &["`` is not a size"][..]),
        (&["-m", "0"], &["too small", "minimum is 16 MiB"]),
        (&["-m=-64M"], &["`-64M` is not a size"]),
        (&["-m", "200%"], &["out of range", "at most 100%"]),
        (&["-m", "٦٤M"], &["`٦٤M` is not a size"]),
        (&["-m", "99999999999999999999T"], &["out of range"]),
        (&["-m", "64M", "--unit", "64K:16K,64K:32K"], &["`64K:32K` in --unit", "second unit for the same folios"]),
        (&["-m", "64M", "--large-folios", "16K,16K"], &["`16K` in --large-folios is named twice"]),
        (&["-m", "64M", "--large-folios="], &["not a size of a large folio"]),
        (&["-m", "64M", "--compaction="], &["no rule of compaction"]),
        (&["-m", "64M", "--group="], &["not a name for a group"]),
        (&["-m", "64M", "--on-full="], &["choose exceed, wait or kill"]),
        (&["-m", "64M", "--swap="], &["not a size for the swap file"]),
        (&["-m", "64M", "--swap", "0"], &["0 bytes", "256 KiB to 256 GiB"]),
        (&["-m", "64M", "--swap", "50%"], &["not a size for the swap file"]),
        (&["-m", "64M", "--swap", "64M", "--swap-policy="], &["no policy is called ``"]),
        (&["-m", "64M", "--swap", "redis://h?size=1G&size=2G"], &["`size`", "twice"]),
        (&["-m", "64M", "--encrypt-swap"], &["add --swap SIZE"]),
    ] {
        refused(options, parts);
    }
    for text in ["memory = '64M'\nmemory = '128M'\n", "memory = '64M'\nswap = '64M'\nswap-dir = ''\n", "memory = ''\n"]
    {
        let config = file(&dir, "d.toml", text.as_bytes(), 0o644);
        refused(&["--config", config.to_str().unwrap()], &["`"]);
    }
    let binary = file(&dir, "b.toml", b"memory = '\xff'\n", 0o644);
    refused(&["--config", binary.to_str().unwrap()], &["not a text file (UTF-8)"]);
    refused(&["--config", "/dev/zero"], &["is larger than 1 MiB"]);
}

/// The story: mistyped options, or options with an attached value, were taken for the program.
#[test]
fn mistyped_options_are_no_programs() {
    for args in [
        &["-m", "64M", "--sawp", "4G", "--", "/bin/true"][..],
        &["--memroy", "64M", "--", "/bin/true"],
        &["-m", "64M", "--no-such-option", "/bin/true"],
        &["-m64M", "-x", "/bin/true"],
    ] {
        let output = uzswap().arg("run").args(args).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(125) && text.contains("unexpected argument"), "{args:?}: {text}");
    }
    for args in [
        &["-m64M", "-q", "--", "echo", "-l"][..],
        &["-m64M", "-czstd", "-q", "echo", "-l"],
        &["-q", "-m", "64M", "echo", "-l"],
        &["-qm64M", "--", "echo", "-l"],
    ] {
        let output = uzswap().arg("run").args(args).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && text.is_empty() && output.stdout == b"-l\n", "{args:?}: {text}");
    }
}

/// The story: an overlay on a tmpfs, as live systems have for their root, was taken for a disk.
#[test]
fn swap_on_an_overlay_on_memory_is_refused() {
    agent_built();
    let dir = TempDir::new().unwrap();
    // In a mount namespace, which disappears with it.
    let run = |below: &str, options: &str| {
        let script = format!(
            "cd '{}' && mkdir -p m && mount -t tmpfs none m && mkdir -p {below}/l {below}/u {below}/w m/o && \
            mount -t overlay -o lowerdir={below}/l,upperdir={below}/u,workdir={below}/w none m/o || exit 99; \
            exec '{UZSWAP}' run -q -m 64M --swap 64M --swap-dir m/o {options} -- echo ran",
            dir.path().display()
        );
        std::process::Command::new("unshare").args(["-m", "sh", "-c", &script]).output()
    };
    let memory = match run("m", "") {
        Ok(output) if matches!(output.status.code(), Some(0 | 125)) => output,
        other => return skip(&format!("no overlay can be mounted: {other:?}")),
    };
    assert!(sentence(&memory).contains("`m/o` is in memory, where a swap file frees nothing"), "{memory:?}");
    assert_eq!(run("m", "--swap-in-ram").unwrap().stdout, b"ran\n");
    // If the test's directory is itself on an overlay, or in memory, there is no telling.
    let below = run("d", "").unwrap();
    let is_disk = std::process::Command::new("stat").args(["-fc", "%T"]).arg(dir.path()).output().unwrap();
    if !["tmpfs", "overlayfs"].contains(&String::from_utf8_lossy(&is_disk.stdout).trim()) {
        assert_eq!(below.stdout, b"ran\n", "{below:?}");
    }
}

/// A group's members find it, and each other, by the pids in /proc.
#[test]
fn a_proc_of_another_pid_namespace_is_refused() {
    agent_built();
    let apart = |args: &[&str]| std::process::Command::new("unshare").args(["--pid", "--fork"]).args(args).output();
    if !apart(&["true"]).is_ok_and(|output| output.status.success()) {
        return skip("unshare --pid is not allowed here");
    }
    let said = sentence(&apart(&[UZSWAP, "run", "-m", "64M", "--", "echo", "ran"]).unwrap());
    assert!(said.contains("/proc belongs to another PID namespace") && said.contains("--mount-proc"), "{said}");
    let doctor = apart(&[UZSWAP, "doctor"]).unwrap();
    let said = String::from_utf8_lossy(&doctor.stdout);
    assert!(doctor.status.code() == Some(1) && said.contains("✗ PID namespace"), "{said}");
    let run = ["--mount-proc", UZSWAP, "run", "-q", "-m", "64M", "--", "echo", "ran"];
    assert_eq!(apart(&run).unwrap().stdout, b"ran\n");
}

/// The test cannot change the kernel's setting for the whole machine: another file stands in for it, and `ulimit -v` for the
/// kernel's refusal.
#[test]
fn a_kernel_that_never_overcommits_is_refused() {
    agent_built();
    let dir = TempDir::new().unwrap();
    let two = file(&dir, "two", b"2\n", 0o644);
    let strict = format!("mount --bind '{}' /proc/sys/vm/overcommit_memory || exit 99;", two.display());
    let run = |script: &str| std::process::Command::new("unshare").args(["-m", "sh", "-c", script]).output();
    let (tight, says) = ("ulimit -v 50000000;", "vm.overcommit_memory is 2");
    let enough = match run(&format!("{strict} exec '{UZSWAP}' run -q -m 64M -- echo ran")) {
        Ok(output) if matches!(output.status.code(), Some(0 | 125)) => output,
        other => return skip(&format!("nothing can be mounted: {other:?}")),
    };
    assert!(enough.stdout == b"ran\n" && enough.stderr.is_empty(), "{enough:?}");
    let said = sentence(&run(&format!("{strict} {tight} exec '{UZSWAP}' run -q -m 64M -- echo ran")).unwrap());
    assert!(said.contains(says) && said.contains("to 0"), "{said}");
    let doctor = run(&format!("{strict} {tight} exec '{UZSWAP}' doctor")).unwrap();
    let said = String::from_utf8_lossy(&doctor.stdout);
    assert!(doctor.status.code() == Some(1) && said.contains("✗ overcommit") && said.contains(says), "{said}");
    let program = format!("{strict} {tight} exec echo ran");
    let child = run(&format!("exec '{UZSWAP}' run -q -m 64M -- sh -c \"{program}\"")).unwrap();
    let said = String::from_utf8_lossy(&child.stderr);
    assert!(child.stdout == b"ran\n" && said.contains(says), "{said}");
}

#[test]
fn missing_programs_are_refused() {
    for (program, status, part) in [
        ("/no/such/program", 127, "no such program"),
        ("no-such-program-at-all", 127, "PATH"),
        ("", 127, "no such program"),
        ("/etc/passwd", 126, "chmod +x"),
        ("/etc/passwd/program", 126, "not a directory"),
        ("/", 126, "`/` cannot be run: it is a directory"),
    ] {
        let text = sentence_of(&run(&["--", program]), status);
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn programs_that_cannot_be_preloaded_are_refused() {
    let dir = for_programs();
    let said = |path: &Path, part: &str| {
        let text = sentence(&run(&["--", path.to_str().unwrap()]));
        assert!(text.contains(part), "{text}");
    };
    let program = static_program(&dir);
    said(&program, "statically linked");
    let script = file(&dir, "script", format!("#!{}\n", program.display()).as_bytes(), 0o755);
    said(&script, "the interpreter of");
    let orphan = file(&dir, "orphan", b"#!/no/such/interpreter\n", 0o755);
    assert!(sentence_of(&run(&["--", orphan.to_str().unwrap()]), 127).contains("interpreter is missing"));

    let own = fs::read("/bin/true").unwrap();
    // For its owner it is a program like any other: its rights are those that the owner has anyway.
    let runs = |path: &Path| {
        let output = run(&["-q", "--", path.to_str().unwrap()]);
        assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let (setuid, setgid) = (file(&dir, "setuid", &own, 0o4755), file(&dir, "setgid", &own, 0o2755));
    runs(&setuid);
    let is_root = std::os::unix::fs::MetadataExt::uid(&fs::metadata("/proc/self").unwrap()) == 0;
    if is_root {
        runs(&setgid);
        for (path, mode, what) in [(&setuid, 0o4755, "is setuid"), (&setgid, 0o2755, "is setgid")] {
            std::os::unix::fs::chown(path, Some(65534), Some(65534)).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
            said(path, what);
        }
    }
    let mut foreign = own.clone();
    foreign[18..20].copy_from_slice(&243u16.to_le_bytes());
    said(&file(&dir, "foreign", &foreign, 0o755), "built for RISC-V");

    let capable = file(&dir, "capable", &own, 0o755);
    let set = std::process::Command::new("setcap").arg("cap_net_raw+ep").arg(&capable).output();
    if set.is_ok_and(|output| output.status.success()) {
        if is_root { runs(&capable) } else { said(&capable, "capabilities") }
    }
}

#[test]
fn what_the_kernel_refuses_is_said_after_a_shells_fashion() {
    let dir = for_programs();
    let nonsense = file(&dir, "nonsense", b"\x01\x02\x00nonsense", 0o755);
    let output = run(&["--", nonsense.to_str().unwrap()]);
    let text = String::from_utf8(output.stderr).unwrap();
    // execvp may hand it to the shell, which also refuses it with 126 or 127.
    assert!(matches!(output.status.code(), Some(126 | 127)), "{:?} {text}", output.status);
}

#[test]
fn nesting_is_refused() {
    let output = run(&["-q", "--", UZSWAP, "run", "-m", "128M", "--", "/bin/true"]);
    assert!(sentence(&output).contains("nested"));
    let stale =
        uzswap().args(["run", "-q", "-m", "128M", "/bin/true"]).env("UZSWAP_GROUP", "/proc/1/fd/99999").output();
    assert!(stale.unwrap().status.success(), "a group that is gone is no nesting");
}

#[test]
fn a_missing_agent_is_refused_and_found_by_the_environment() {
    agent_built();
    let dir = for_programs();
    let alone = dir.path().join("uzswap");
    copy(Path::new(UZSWAP), &alone);
    let start = || {
        let mut command = Command::new(&alone);
        command.env_remove("UZSWAP_AGENT").args(["run", "-q", "-m", "64M", "/bin/true"]);
        command
    };
    let text = sentence(&start().output().unwrap());
    assert!(text.contains(AGENT) && text.contains("cargo build --release"), "{text}");
    let named = sentence(&start().env("UZSWAP_AGENT", "/nope/x.so").output().unwrap());
    assert!(named.contains("UZSWAP_AGENT names `/nope/x.so`, which is no file"), "{named}");
    let agent = Path::new(UZSWAP).with_file_name(AGENT);
    assert!(start().env("UZSWAP_AGENT", &agent).output().unwrap().status.success());
    fs::create_dir(dir.path().join("with space")).unwrap();
    let spaced = dir.path().join("with space").join(AGENT);
    fs::copy(&agent, &spaced).unwrap();
    assert!(sentence(&start().env("UZSWAP_AGENT", &spaced).output().unwrap()).contains("space or colon"));
}

#[test]
fn without_access_all_ways_to_grant_it_are_said() {
    // SAFETY: no memory is involved.
    let root = unsafe { libc::geteuid() } == 0;
    let denied_to_others = fs::metadata("/dev/userfaultfd").map_or(true, |m| m.permissions().mode() & 0o006 == 0);
    let sysctl = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    if !root || !denied_to_others || sysctl.trim() != "0" {
        return skip("this machine grants userfaultfd to everybody, or we are not root");
    }
    agent_built();
    let dir = tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o755)).tempdir().unwrap();
    let its = dir.path().join("uzswap");
    copy(Path::new(UZSWAP), &its);
    copy(&Path::new(UZSWAP).with_file_name(AGENT), &dir.path().join(AGENT));
    let as_nobody = |args: &[&str]| {
        std::process::Command::new(&its).args(args).current_dir("/").uid(65534).gid(65534).output().unwrap()
    };
    let text = sentence(&as_nobody(&["run", "-m", "64M", "/bin/true"]));
    for way in ["/dev/userfaultfd", "vm.unprivileged_userfaultfd=1", "CAP_SYS_PTRACE"] {
        assert!(text.contains(way), "{text}");
    }
    let output = as_nobody(&["doctor"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().contains("✗ access"));
}

/// The story: for users other than root, a run had CAP_SYS_PTRACE. The user's own shell called a command without it, which took
/// the run's link for a leftover and removed it. The group was not found any more, and another could take its name.
#[test]
fn who_may_not_look_into_a_group_leaves_it_alone() {
    // SAFETY: no memory is involved.
    if unsafe { libc::geteuid() } != 0 {
        return skip("only root can start a run as another user with capabilities");
    }
    agent_built();
    let dir = tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o755)).tempdir().unwrap();
    let (its, runtime) = (dir.path().join("uzswap"), dir.path().join("runtime"));
    for name in ["uzswap", AGENT] {
        copy(&Path::new(UZSWAP).with_file_name(name), &dir.path().join(name));
    }
    fs::create_dir(&runtime).unwrap();
    std::os::unix::fs::chown(&runtime, Some(65534), Some(65534)).unwrap();
    let as_nobody = |capabilities: &[&str], args: &[&str]| {
        let mut command = std::process::Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).args(capabilities).arg(&its).args(args);
        command.current_dir("/").env("XDG_RUNTIME_DIR", &runtime).env_remove("UZSWAP_AGENT").env_remove("UZSWAP_GROUP");
        command
    };
    let ptrace = ["--inh-caps=+sys_ptrace", "--ambient-caps=+sys_ptrace"];
    let mut run = as_nobody(&ptrace, &["run", "-q", "-g", "g", "-m", "64M", "--", "/bin/cat"]);
    let mut run = run.stdin(Stdio::piped()).spawn().unwrap();
    let call = |capabilities: &[&str], args: &[&str]| {
        let output = as_nobody(capabilities, args).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.success(), text(output.stdout), text(output.stderr))
    };
    eventually("it runs", || call(&ptrace, &["stat", "g", "memory.max"]) == (true, "67108864\n".into(), String::new()));
    let (_, listed, said) = call(&[], &["stat"]);
    assert!(!listed.contains("g ") && said.contains("not shown") && said.ends_with(": g\n"), "{listed}{said}");
    for args in [&["stat", "g"][..], &["ctl", "g", "memory.max=32M"]] {
        let (done, _, said) = call(&[], args);
        assert!(
            !done && said.contains("capabilities that this command does not have") && said.lines().count() == 1,
            "{said}"
        );
    }
    assert!(call(&ptrace, &["stat", "g"]).0, "it is still found");
    drop(run.stdin.take());
    assert!(run.wait().unwrap().success());
    assert!(call(&[], &["stat", "g"]).2.contains("no such group"));
}

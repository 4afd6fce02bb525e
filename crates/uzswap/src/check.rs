//! The checks before the program is started. Each error is one sentence: what is wrong, why, and what to do.

use crate::config::{Compressor, Config, on_full, plain};
use crate::elf::{self, Kind};
use crate::groups::{self, Group, Registry, Wanted};
use crate::{EXIT_CANNOT_RUN, EXIT_NO_PROGRAM, EXIT_OWN_FAILURE, machine};
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use uzswap::group_file;
use uzswap_mm::size::{Size, human};
use uzswap_pager::frames::arena::Layout;
use uzswap_pager::group::ENV_GROUP;
use uzswap_sys::probe;
use uzswap_sys::process::{is_in_own_proc, never_overcommits};
use uzswap_sys::rights::{has_capabilities, is_privileged};
use uzswap_sys::uffd::{FEATURE_EVENT_REMOVE, FEATURE_EVENT_UNMAP, FEATURE_THREAD_ID};

/// The least usable `--memory`, in bytes.
pub const MINIMUM: u64 = 16 << 20;
/// File name of the agent.
pub const AGENT: &str = "libuzswap_agent.so";
/// Environment variable with the agent's path, for installations where it is not found by itself.
pub const ENV_AGENT: &str = "UZSWAP_AGENT";

/// Why a program was not run.
#[derive(Debug, PartialEq)]
pub struct Refused {
    /// One sentence.
    pub sentence: String,
    /// The command's exit status.
    pub status: u8,
}

impl From<String> for Refused {
    fn from(sentence: String) -> Refused {
        Refused { sentence, status: EXIT_OWN_FAILURE }
    }
}

/// Refuses to run inside a program that runs under uzswap.
pub fn nested() -> Result<(), Refused> {
    match env::var_os(ENV_GROUP) {
        Some(path) if group_file::is_group(&path) => Err("this already runs under uzswap, and two cannot be nested: \
             run the program directly, it shares the outer limit"
            .to_owned()
            .into()),
        _ => Ok(()),
    }
}

/// What to change if /proc is of another PID namespace.
pub const OWN_PROC: &str = "mount one of this namespace (`unshare --mount-proc` does)";

/// Refuses to run if /proc is of another PID namespace: by the pids there a program finds its group, and its processes find each
/// other.
///
/// The story: the program of `unshare --pid --fork uzswap run …` ran without a limit, and said that its group belonged to another
/// user.
pub fn numbers() -> Result<(), Refused> {
    if is_in_own_proc() {
        return Ok(());
    }
    let why = "/proc belongs to another PID namespace than this process, so the program would not find its group there";
    Err(format!("{why}: {OWN_PROC}").into())
}

/// What to change if the kernel never overcommits memory.
pub const OVERCOMMIT: &str = "set sysctl vm.overcommit_memory to 0 (the default) or 1";

/// Whether the kernel lets a pager reserve its addresses. It does not if it never overcommits memory and has less than that to
/// promise. (Limits that processes have on their address space are another matter.)
pub fn addresses_can_be_reserved() -> bool {
    !never_overcommits() || Layout::can_be_reserved(MINIMUM as usize)
}

/// Refuses to run if the kernel does not.
///
/// The story: where `vm.overcommit_memory` is 2, as is advised for PostgreSQL, programs ran without a limit and said that they had
/// no addresses left, as under Valgrind.
pub fn addresses() -> Result<(), Refused> {
    if addresses_can_be_reserved() {
        return Ok(());
    }
    let why = "the kernel never overcommits memory (vm.overcommit_memory is 2), and uzswap reserves 73 GiB of addresses a process";
    Err(format!("{why}: {OVERCOMMIT}").into())
}

/// The limit in bytes. None where `--memory` is left out, which only joining a group allows.
pub fn limit(config: &Config) -> Result<Option<u64>, Refused> {
    let Some(text) = &config.memory else {
        if config.group.is_some() {
            return Ok(None);
        }
        return Err("no limit is given: add --memory SIZE, such as --memory 512M or --memory 50%".to_owned().into());
    };
    let bytes = Size::parse(text)?.resolve(machine::available_memory());
    if bytes < MINIMUM {
        return Err(
            format!("`{text}` is too small a limit to run a program in: the minimum is {}", human(MINIMUM)).into()
        );
    }
    Ok(Some(bytes))
}

/// What the run wants of its group.
pub fn wanted(config: &Config) -> Result<Wanted, Refused> {
    Ok(Wanted {
        max: limit(config)?,
        compressor: config.compressor.as_deref().map(Compressor::parse).transpose()?,
        on_full: config.on_full.as_deref().map(on_full).transpose()?,
        record: config.record.is_some(),
        track_writes: config.track_writes == Some(true),
        folios: config.folios.parse()?,
    })
}

/// The run's group: the named one, joined or created, or an unnamed one for this run alone.
pub fn group(config: &Config, wanted: &Wanted) -> Result<Group, Refused> {
    match &config.group {
        Some(name) => Ok(Registry::open()?.join(name, wanted)?),
        None => Ok(groups::unnamed(wanted)
            .map_err(|e| format!("the memory shared with the program cannot be created: {}", plain(&e)))?),
    }
}

/// Finds a program as execvp does, and refuses it if nothing can be preloaded into it.
pub fn program(name: &OsStr) -> Result<PathBuf, Refused> {
    let shown = name.to_string_lossy();
    let path = find(name).map_err(|e| not_found(name, &e))?;
    let (loaded, kind) = match elf::resolve(&path) {
        Ok(found) => found,
        // The program may be executable but not readable: leave it to the kernel.
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return Ok(path),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let sentence =
                format!("`{shown}` cannot be run: it is a script whose interpreter is missing; correct its first line");
            return Err(Refused { sentence, status: EXIT_NO_PROGRAM });
        }
        Err(e) => {
            return Err(format!("`{shown}` cannot be read: {}; check the file", plain(&e)).into());
        }
    };
    let what = if loaded == path {
        format!("`{shown}`")
    } else {
        format!("`{}`, the interpreter of `{shown}`,", loaded.display())
    };
    linked(&kind, &shown, &what)?;
    rights(&loaded, &what)?;
    Ok(path)
}

/// The refusal for a program that was not found, with the exit status that shells, `env` and `timeout` use.
fn not_found(name: &OsStr, e: &io::Error) -> Refused {
    let shown = name.to_string_lossy();
    let sentence = match e.kind() {
        io::ErrorKind::IsADirectory => format!("`{shown}` cannot be run: it is a directory; name a program"),
        io::ErrorKind::PermissionDenied => {
            format!("`{shown}` cannot be run: it is not an executable file; give it the x permission with chmod +x")
        }
        io::ErrorKind::NotFound if name.as_bytes().contains(&b'/') => {
            format!("no such program: there is no file `{shown}`; check the path")
        }
        io::ErrorKind::NotFound => {
            format!("no such program: `{shown}` is in no directory of PATH; check the name or give a path")
        }
        _ => format!("`{shown}` cannot be run: {}; check the path", plain(e)),
    };
    let missing = e.kind() == io::ErrorKind::NotFound;
    Refused { sentence, status: if missing { EXIT_NO_PROGRAM } else { EXIT_CANNOT_RUN } }
}

/// The advice for a program that nothing can be preloaded into.
const ELSEWHERE: &str = "run it without uzswap";

/// Refuses a file of a kind that the library cannot be loaded into. `what` is its description for the user, `shown` the program.
fn linked(kind: &Kind, shown: &str, what: &str) -> Result<(), Refused> {
    let why = match kind {
        Kind::Dynamic(loader) if loader.file_name().is_some_and(|n| n.as_bytes().starts_with(b"ld-musl")) => {
            format!("{what} is linked with musl, and uzswap's library with glibc: use a glibc build or {ELSEWHERE}")
        }
        Kind::Dynamic(_) | Kind::Unknown => return Ok(()),
        Kind::Static => format!(
            "{what} is statically linked, so nothing can be preloaded into it: link it dynamically or {ELSEWHERE}"
        ),
        Kind::Foreign(machine) => format!(
            "{what} is built for {machine}, and uzswap's library for {}: use a build for this machine",
            env::consts::ARCH
        ),
        Kind::Script(_) => {
            format!("`{shown}` is a script of a script more than four levels deep: name the interpreter instead")
        }
    };
    Err(why.into())
}

/// Refuses a file that the system preloads nothing into. `what` is its description for the user.
///
/// The story: a setuid program owned by root was refused to root, too, whose rights it does not change.
fn rights(file: &Path, what: &str) -> Result<(), Refused> {
    let Ok(opened) = fs::File::open(file) else { return Ok(()) };
    if !is_privileged(opened.as_raw_fd()) {
        return Ok(());
    }
    let mode = opened.metadata().map_or(0, |m| m.permissions().mode());
    let setgid = mode & libc::S_ISGID != 0 && mode & libc::S_IXGRP != 0;
    let (has, copy) = match mode & libc::S_ISUID != 0 {
        true => ("is setuid", "run a copy without that bit"),
        _ if setgid => ("is setgid", "run a copy without that bit"),
        _ if has_capabilities(opened.as_raw_fd()) => ("has file capabilities", "run a copy without them"),
        _ => {
            return Err(
                "uzswap itself was started with other rights than yours, and the system preloads nothing then: \
                 run it as one user"
                    .to_owned()
                    .into(),
            );
        }
    };
    let why = "and the system preloads nothing into programs that run with other rights than yours";
    Err(format!("{what} {has}, {why}: {copy} or {ELSEWHERE}").into())
}

/// Finds a program as execvp does.
fn find(name: &OsStr) -> io::Result<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return runnable(Path::new(name).to_path_buf());
    }
    if name.is_empty() {
        return Err(io::ErrorKind::NotFound.into());
    }
    let path = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let mut denied = None;
    for dir in env::split_paths(&path) {
        let dir = if dir.as_os_str().is_empty() { PathBuf::from(".") } else { dir };
        match runnable(dir.join(name)) {
            Ok(path) => return Ok(path),
            Err(e) if matches!(e.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::IsADirectory) => {
                denied = Some(e);
            }
            Err(_) => {}
        }
    }
    Err(denied.unwrap_or_else(|| io::ErrorKind::NotFound.into()))
}

fn runnable(path: PathBuf) -> io::Result<PathBuf> {
    let found = fs::metadata(&path)?;
    if found.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    let c_path = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `c_path` is a C string that outlives the call.
    let denied = unsafe { libc::faccessat(libc::AT_FDCWD, c_path.as_ptr(), libc::X_OK, libc::AT_EACCESS) } != 0;
    if !found.is_file() || denied { Err(io::ErrorKind::PermissionDenied.into()) } else { Ok(path) }
}

/// Refuses a machine on which memory cannot be managed. Otherwise returns whether it lacks UFFDIO_MOVE.
pub fn machine() -> Result<bool, Refused> {
    let (opened, user_mode_only) = match probe::by_device() {
        Ok(uffd) => (Ok(uffd), false),
        Err(_) => match probe::by_syscall() {
            Ok(uffd) => (Ok(uffd), false),
            Err(e) => (Err(e), probe::by_syscall_user_mode_only().is_ok()),
        },
    };
    let features = |uffd: OwnedFd| probe::features(&uffd);
    let features = opened.and_then(features);
    let calls = Calls { scan: probe::pagemap_scan(), mremap: probe::mremap_keeps() };
    verdict(&machine::kernel_release(), features, calls, user_mode_only).map_err(Refused::from)
}

/// The first kernel version that has all that uzswap needs.
pub const KERNEL: (u32, u32) = (5, 10);

/// Results of trying other calls.
struct Calls {
    scan: io::Result<()>,
    mremap: io::Result<()>,
}

/// The sentence that refuses the machine, or whether its kernel lacks UFFDIO_MOVE: pages then leave a program by `mremap`, and
/// come back by copies.
fn verdict(release: &str, features: io::Result<u64>, calls: Calls, user_mode_only: bool) -> Result<bool, String> {
    let old = machine::version_of(release) < KERNEL;
    match features {
        Ok(features) if features & probe::FEATURE_MOVE != 0 => calls.scan.map(|()| false).map_err(|e| {
            format!(
                "PAGEMAP_SCAN does not work ({}), by which uzswap finds a program's pages: mount /proc, and use a \
                 kernel built with CONFIG_PROC_PAGE_MONITOR",
                plain(&e)
            )
        }),
        Ok(features) if !old && features & NEEDED == NEEDED && calls.mremap.is_ok() => Ok(true),
        _ if old => Err(format!(
            "kernel {release} is too old to take pages out of a program: upgrade to Linux 5.10 or newer (6.8 is faster)"
        )),
        Ok(_) => Err(format!(
            "kernel {release} can take pages out of a program neither by UFFDIO_MOVE nor by mremap, though Linux 5.10 and \
             newer can: boot a distribution's own kernel of that age"
        )),
        Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => Err(format!(
            "kernel {release} has no userfaultfd: use one built with CONFIG_USERFAULTFD=y (`uzswap doctor` says more)"
        )),
        Err(_) => {
            let only = if user_mode_only {
                "no userfaultfd access that also covers system calls (user-mode-only is not enough)"
            } else {
                "no userfaultfd access"
            };
            Err(format!("{only}: {GRANT} (`uzswap doctor` says more)"))
        }
    }
}

/// The userfaultfd features that uzswap needs with or without MOVE.
const NEEDED: u64 = FEATURE_THREAD_ID | FEATURE_EVENT_REMOVE | FEATURE_EVENT_UNMAP;

/// Refuses options that do not work without UFFDIO_MOVE.
pub fn without_move(config: &Config) -> Result<(), Refused> {
    if config.track_writes == Some(true) {
        let release = machine::kernel_release();
        return Err(format!(
            "--track-writes needs UFFDIO_MOVE, which kernel {release} does not have: leave it out, or use Linux 6.8 or newer"
        )
        .into());
    }
    Ok(())
}

/// The three ways to grant access, as part of a sentence.
pub const GRANT: &str = "either allow /dev/userfaultfd (chmod or a udev rule; --device /dev/userfaultfd for a container), \
     or set sysctl vm.unprivileged_userfaultfd=1, or run as root or with CAP_SYS_PTRACE";

/// The agent's path: looked for beside the executable, in `deps/`, in `../lib/`, then where the environment says.
pub fn agent() -> Result<PathBuf, Refused> {
    let own = env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent).into_iter();
    let named = env::var_os(ENV_AGENT).map(PathBuf::from);
    let found = beside
        .flat_map(|dir| ["", "deps", "../lib"].map(|sub| dir.join(sub).join(AGENT)))
        .chain(named.clone())
        .find(|path| path.is_file())
        .ok_or_else(|| match named {
            Some(path) => {
                format!("{ENV_AGENT} names `{}`, which is no file: correct it, or put {AGENT} beside the command", path.display())
            }
            None => format!(
                "{AGENT} is missing beside the command: build it with `cargo build --release`, or name it in {ENV_AGENT}"
            ),
        })?;
    let found = found.canonicalize().unwrap_or(found);
    // The loader splits LD_PRELOAD at these characters.
    if found.as_os_str().as_bytes().iter().any(|b| b" :\t\n".contains(b)) {
        return Err(format!(
            "the loader cannot preload `{}`, a path with a space or colon: move uzswap to another directory",
            found.display()
        )
        .into());
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::io::Error;
    use uzswap_sys::probe;

    use super::{Calls, NEEDED, verdict};

    #[test]
    fn machines() {
        let errno = |e| Err(Error::from_raw_os_error(e));
        let errno_of = |e| Err(Error::from_raw_os_error(e));
        let calls = || Calls { scan: errno_of(libc::ENOTTY), mremap: Ok(()) };
        let all_calls = || Calls { scan: Ok(()), mremap: Ok(()) };
        let wp = probe::FEATURE_WP | NEEDED;
        assert_eq!(verdict("6.8.0", Ok(wp | probe::FEATURE_MOVE), all_calls(), false), Ok(false));
        // Kernels without MOVE were once accepted although nothing could be evicted there, and later refused.
        for release in ["5.10.0", "5.15.0", "6.1.0-18-amd64", "6.7.12", "6.12.0"] {
            assert_eq!(verdict(release, Ok(wp), calls(), false), Ok(true));
            let moves = verdict(release, Ok(wp | probe::FEATURE_MOVE), all_calls(), false);
            assert_eq!(moves, Ok(false), "back-ported");
            let broken = Calls { scan: Ok(()), mremap: errno_of(libc::EINVAL) };
            let odd = verdict(release, Ok(wp), broken, false).unwrap_err();
            assert!(odd.contains("UFFDIO_MOVE") && odd.contains("own kernel"), "{odd}");
        }
        for release in ["4.4.0", "5.4.0", "5.9.16"] {
            let text = verdict(release, Ok(wp), calls(), false).unwrap_err();
            assert!(text.contains("too old") && text.contains("5.10"), "{text}");
        }
        assert!(verdict("4.4.0", errno(libc::ENOSYS), calls(), false).unwrap_err().contains("too old"));
        assert!(verdict("6.8.0", errno(libc::ENOSYS), calls(), false).unwrap_err().contains("CONFIG_USERFAULTFD"));
        let denied = verdict("6.8.0", errno(libc::EPERM), calls(), false).unwrap_err();
        for way in ["/dev/userfaultfd", "vm.unprivileged_userfaultfd=1", "CAP_SYS_PTRACE"] {
            assert!(denied.contains(way), "{denied}");
        }
        assert!(verdict("6.8.0", errno(libc::EPERM), calls(), true).unwrap_err().contains("user-mode-only"));
        let scan = verdict("6.8.0", Ok(wp | probe::FEATURE_MOVE), calls(), false).unwrap_err();
        assert!(scan.contains("PAGEMAP_SCAN") && scan.contains("/proc"), "{scan}");
    }
}

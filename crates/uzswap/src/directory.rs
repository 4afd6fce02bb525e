//! The directory of running groups: `$XDG_RUNTIME_DIR/uzswap`, else `/tmp/uzswap-UID`, with one symbolic link for each command
//! and tree. The command's module `groups` says how they are made.
//!
//! A link is named `ROOT@PID.NAMESPACE`, where the last is the command's namespace of process numbers: what it leads to says
//! nothing elsewhere (a container that shares the directory), so it is nobody's there to use or to remove.

use crate::group_file::GroupFile;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use uzswap_pager::group::Slot;

/// Finds the directory of this user, made if need be. The error is one sentence.
///
/// # Errors
/// It is not this user's alone, or cannot be made.
pub fn open() -> Result<PathBuf, String> {
    let me = uzswap_sys::thread::user();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let own = |dir: &PathBuf| dir.is_absolute() && fs::metadata(dir).is_ok_and(|m| m.is_dir() && m.uid() == me);
    let dir = match runtime.filter(own) {
        Some(runtime) => runtime.join("uzswap"),
        None => PathBuf::from(format!("/tmp/uzswap-{me}")),
    };
    at(dir, me)
}

/// The same, at a place and for a user.
///
/// # Errors
/// As [`open`].
pub fn at(dir: PathBuf, me: u32) -> Result<PathBuf, String> {
    let shown = dir.display().to_string();
    let plain = |e: &io::Error| e.to_string().split(" (os error").next().unwrap_or_default().to_lowercase();
    match DirBuilder::new().mode(0o700).create(&dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            return Err(format!("the directory of groups `{shown}` cannot be created: {}", plain(&e)));
        }
        _ => {}
    }
    let found = fs::symlink_metadata(&dir)
        .map_err(|e| format!("the directory of groups `{shown}` cannot be read: {}", plain(&e)))?;
    if found.is_dir() && found.uid() == me && found.mode() & 0o077 != 0 {
        return Err(format!(
            "the directory of groups `{shown}` is not yours alone, so it is not trusted: chmod 700 it, or remove it"
        ));
    }
    if !found.is_dir() || found.uid() != me {
        return Err(format!(
            "the directory of groups `{shown}` is not yours alone (a directory of yours with mode 0700), so it is not trusted: remove it"
        ));
    }
    Ok(dir)
}

/// The name of this command's link to a tree.
#[must_use]
pub fn entry_name(root: &str) -> String {
    let namespace = own_namespace().map_or_else(String::new, |number| format!(".{number}"));
    format!("{root}@{}{namespace}", std::process::id())
}

/// The number of our namespace of process numbers, where /proc shows it.
fn own_namespace() -> Option<u64> {
    fs::metadata("/proc/self/ns/pid").ok().map(|found| found.ino())
}

/// What the links of a directory lead to.
#[derive(Default)]
pub struct Found {
    /// The running trees, each once, sorted by name.
    pub trees: Vec<(String, GroupFile)>,
    /// The names of trees of other versions of this command, which are neither ours to use nor to remove.
    pub foreign: Vec<String>,
    /// The names of trees of this user's that this command may not open, as theirs have capabilities that it lacks.
    pub closed: Vec<String>,
}

/// The running trees, each once, sorted by name; what is left of killed commands is removed.
#[must_use]
pub fn list(dir: &Path) -> Vec<(String, GroupFile)> {
    look(dir).trees
}

/// The same, and those that are there and cannot be had.
#[must_use]
pub fn look(dir: &Path) -> Found {
    let mut found = Found::default();
    let own = own_namespace();
    let mut entries: Vec<_> = fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect();
    entries.sort();
    for path in entries {
        let Some((root, of)) = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.rsplit_once('@')) else {
            continue;
        };
        let namespace = of.split_once('.').and_then(|(_, number)| number.parse().ok());
        if namespace.is_some() && namespace != own {
            continue;
        }
        let known = found.trees.iter().any(|(name, _)| name == root);
        match open_entry(&path, root) {
            Entered::Tree(file) if !known => found.trees.push((root.to_owned(), file)),
            Entered::Tree(_) => {}
            Entered::Foreign => found.foreign.push(root.to_owned()),
            Entered::Closed => found.closed.push(root.to_owned()),
            Entered::Nothing => {
                let _ = fs::remove_file(&path);
            }
        }
    }
    found
}

/// The tree of which a process is a member, and its slot there.
#[must_use]
pub fn member(dir: &Path, pid: u32) -> Option<(GroupFile, usize)> {
    let is = |slot: &Slot| slot.owner().is_some_and(|owner| owner.pid() == pid && !owner.is_dead());
    list(dir).into_iter().find_map(|(_, file)| {
        let index = file.page().used().iter().position(is)?;
        Some((file, index))
    })
}

/// What an entry leads to.
enum Entered {
    /// The tree that is named.
    Tree(GroupFile),
    /// A tree of another version of uzswap.
    Foreign,
    /// A process of ours that may not be looked into.
    Closed,
    /// None of these: what a killed command left.
    Nothing,
}

fn open_entry(path: &Path, root: &str) -> Entered {
    let Some(target) = fs::read_link(path).ok().filter(|target| target.starts_with("/proc")) else {
        return Entered::Nothing;
    };
    match GroupFile::open(&target) {
        Ok(file) if file.page().nodes[0].is_named(root.as_bytes()) => Entered::Tree(file),
        Err(_) if GroupFile::is_at(&target) => Entered::Foreign,
        Err(_) if is_closed(&target) => Entered::Closed,
        _ => Entered::Nothing,
    }
}

/// Whether a process of this user's has `target` (`/proc/PID/fd/N`), or not, and we may not see which.
///
/// The story: a command with CAP_SYS_PTRACE, as another user than root needs it, was not to be looked into by one without. Its entry
/// was taken for left over and removed, and nobody found its group any more.
fn is_closed(target: &Path) -> bool {
    let denied = fs::read_link(target).is_err_and(|e| e.kind() == io::ErrorKind::PermissionDenied);
    let process = target.ancestors().nth(2);
    denied && process.is_some_and(|dir| fs::metadata(dir).is_ok_and(|m| m.uid() == uzswap_sys::thread::user()))
}

//! The directory of running groups: `$XDG_RUNTIME_DIR/uzswap`, else `/tmp/uzswap-UID`, with one symbolic link for each command
//! and tree. The command's module `groups` says how the links are made.
//!
//! A link is named `ROOT@PID.NAMESPACE`; the last part is the command's PID namespace. In another namespace (a container that
//! shares the directory) the link's target means nothing, so nobody there may use or remove the link.

use crate::group_file::GroupFile;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use uzswap_pager::group::Slot;

/// Finds the directory of this user, or makes it. The error is one sentence.
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

/// Like [`open`], for a given path and user.
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

/// The number of our PID namespace, if /proc shows it.
fn own_namespace() -> Option<u64> {
    fs::metadata("/proc/self/ns/pid").ok().map(|found| found.ino())
}

/// What the links of a directory lead to.
#[derive(Default)]
pub struct Found {
    /// The running trees, each once, sorted by name.
    pub trees: Vec<(String, GroupFile)>,
    /// The names of trees of other versions of this command. We may neither use nor remove them.
    pub foreign: Vec<String>,
    /// The names of trees of this user's that this command may not open, as their commands have capabilities that it lacks.
    pub closed: Vec<String>,
}

/// The running trees, each once, sorted by name. Removes the links that killed commands left.
#[must_use]
pub fn list(dir: &Path) -> Vec<(String, GroupFile)> {
    look(dir).trees
}

/// Like [`list`], but also returns the trees that exist and cannot be opened.
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

/// The tree that a process is a member of, and its slot there.
#[must_use]
pub fn member(dir: &Path, pid: u32) -> Option<(GroupFile, usize)> {
    let is = |slot: &Slot| slot.owner().is_some_and(|owner| owner.pid() == pid && !owner.is_dead());
    list(dir).into_iter().find_map(|(_, file)| {
        let index = file.page().used().iter().position(is)?;
        Some((file, index))
    })
}

/// What a link leads to.
enum Entered {
    /// The tree of the link's name.
    Tree(GroupFile),
    /// A tree of another version of uzswap.
    Foreign,
    /// A process of ours that we may not inspect.
    Closed,
    /// None of these: a killed command left the link.
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

/// Whether the process of `target` (`/proc/PID/fd/N`) is this user's and we may not look at its descriptors, so the tree may be
/// there.
///
/// The story: a command with CAP_SYS_PTRACE, which users other than root need, could not be inspected by a command without it.
/// Its link was taken for a leftover and removed, and nobody found its group any more.
fn is_closed(target: &Path) -> bool {
    let denied = fs::read_link(target).is_err_and(|e| e.kind() == io::ErrorKind::PermissionDenied);
    let process = target.ancestors().nth(2);
    denied && process.is_some_and(|dir| fs::metadata(dir).is_ok_and(|m| m.uid() == uzswap_sys::thread::user()))
}

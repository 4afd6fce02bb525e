//! The directory of running groups: `$XDG_RUNTIME_DIR/uzswap`, else `/tmp/uzswap-UID`, with one symbolic link for each command
//! and tree. The command's module `groups` says how they are made.

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
            return Err(format!("the directory of groups `{shown}` cannot be made: {}", plain(&e)));
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

/// The running trees, each once, sorted by name; what is left of killed commands is removed.
#[must_use]
pub fn list(dir: &Path) -> Vec<(String, GroupFile)> {
    look(dir).0
}

/// The same, and the names of trees of other versions of this command, which are neither ours to use nor to remove.
#[must_use]
pub fn look(dir: &Path) -> (Vec<(String, GroupFile)>, Vec<String>) {
    let (mut trees, mut foreign): (Vec<(String, GroupFile)>, _) = (Vec::new(), Vec::new());
    let mut entries: Vec<_> = fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect();
    entries.sort();
    for path in entries {
        let Some((root, _)) = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.rsplit_once('@')) else {
            continue;
        };
        let known = trees.iter().any(|(name, _)| name == root);
        match open_entry(&path, root) {
            Entered::Tree(file) if !known => trees.push((root.to_owned(), file)),
            Entered::Tree(_) => {}
            Entered::Foreign => foreign.push(root.to_owned()),
            Entered::Nothing => {
                let _ = fs::remove_file(&path);
            }
        }
    }
    (trees, foreign)
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
    /// Neither: what a killed command left.
    Nothing,
}

fn open_entry(path: &Path, root: &str) -> Entered {
    let Some(target) = fs::read_link(path).ok().filter(|target| target.starts_with("/proc")) else {
        return Entered::Nothing;
    };
    match GroupFile::open(&target) {
        Ok(file) if file.page().nodes[0].is_named(root.as_bytes()) => Entered::Tree(file),
        Err(_) if GroupFile::is_at(&target) => Entered::Foreign,
        _ => Entered::Nothing,
    }
}

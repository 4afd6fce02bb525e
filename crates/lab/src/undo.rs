//! Undoes what the lab changes on the machine, whatever happens.
//!
//! The lab writes down every change *before* it makes it, as the step that undoes it, and tells a *guard*: a process of its own
//! (this binary again) that only waits. A [`Todo`] undoes its step when dropped, and tells the guard. If the lab dies without
//! that (a panic, a `SIGKILL`), its end of the pipe closes, and the guard undoes what is left, last change first. Steps are
//! harmless if the change was never made.

use serde::{Deserialize, Serialize};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::io::{self, BufRead, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// A step that undoes a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// Kill a process group that the lab started.
    KillGroup(i32),
    /// Kill what is left in a cgroup that the lab made, and remove it.
    RemoveCgroup(PathBuf),
    /// Stop swapping to a file or device.
    SwapOff(PathBuf),
    /// Write its former value to a sysfs file.
    Restore(PathBuf, String),
    /// Remove a directory of the lab's own, with its files.
    RemoveDir(PathBuf),
}

impl Step {
    /// Undoes the change. It is no error if there is nothing left to undo.
    ///
    /// # Errors
    /// When the machine refuses, in one sentence.
    pub fn run(&self) -> Result<(), String> {
        match self {
            Self::KillGroup(group) => {
                // SAFETY: kill has no memory effects; the group is one that the lab started and has not waited for.
                unsafe { libc::kill(-*group, libc::SIGKILL) };
                Ok(())
            }
            Self::RemoveCgroup(path) => remove_cgroup(path),
            Self::SwapOff(path) => swap_off(path),
            // If the change was refused, this would be refused, too.
            Self::Restore(path, value) if fs::read_to_string(path).is_ok_and(|now| now.trim() == value) => Ok(()),
            Self::Restore(path, value) => {
                patiently(|| fs::write(path, value), |e| e.raw_os_error() == Some(libc::EBUSY))
                    .map_err(|e| format!("cannot write `{value}` to {}: {e}", path.display()))
            }
            Self::RemoveDir(path) => match fs::remove_dir_all(path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => Err(format!("cannot remove {}: {e}", path.display())),
                _ => Ok(()),
            },
        }
    }
}

/// Calls `act` for up to ten seconds while `again` returns true for its error.
fn patiently(mut act: impl FnMut() -> io::Result<()>, again: impl Fn(&io::Error) -> bool) -> io::Result<()> {
    let start = Instant::now();
    loop {
        match act() {
            Err(e) if again(&e) && start.elapsed() < Duration::from_secs(10) => {
                std::thread::sleep(Duration::from_millis(10));
            }
            result => return result,
        }
    }
}

fn remove_cgroup(path: &Path) -> Result<(), String> {
    if !path.exists() {
        return Ok(());
    }
    let kill_and_remove = || {
        for line in fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default().lines() {
            if let Ok(pid) = line.parse::<i32>() {
                // SAFETY: kill has no memory effects; a cgroup that the lab made contains only processes that the lab started.
                unsafe { libc::kill(pid, libc::SIGKILL) };
            }
        }
        fs::remove_dir(path)
    };
    match patiently(kill_and_remove, |e| e.raw_os_error() == Some(libc::EBUSY)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(format!("cannot remove the cgroup {}: {e}", path.display()))
        }
        _ => Ok(()),
    }
}

fn swap_off(path: &Path) -> Result<(), String> {
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
    let act = || {
        // SAFETY: the name is a valid C string.
        if unsafe { libc::swapoff(name.as_ptr()) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    match patiently(act, |e| e.raw_os_error() == Some(libc::EINTR)) {
        // EINVAL: it is no swap area, or no longer one.
        Err(e) if !matches!(e.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => {
            Err(format!("cannot stop swapping to {}: {e}", path.display()))
        }
        _ => Ok(()),
    }
}

#[derive(Serialize, Deserialize)]
enum Line {
    Todo(u64, Step),
    Done(u64),
}

/// Keeps the guard, and gives out [`Todo`]s. There can be one lab at a time on a machine.
pub struct Keeper {
    inner: Rc<Inner>,
    guard: Option<Child>,
}

struct Inner {
    pipe: RefCell<Option<ChildStdin>>,
    next: Cell<u64>,
}

impl Inner {
    fn tell(&self, line: &Line) -> io::Result<()> {
        match self.pipe.borrow_mut().as_mut() {
            Some(pipe) => pipe.write_all(format!("{}\n", serde_json::to_string(line)?).as_bytes()),
            None => Ok(()),
        }
    }
}

/// A change that is undone when this value is dropped.
#[must_use = "dropping it undoes the change at once"]
pub struct Todo {
    inner: Rc<Inner>,
    id: u64,
    step: Option<Step>,
}

impl Keeper {
    /// Starts the guard.
    ///
    /// # Errors
    /// When another lab runs on this machine, or the guard cannot be started.
    pub fn start() -> Result<Self, String> {
        let address = SocketAddr::from_abstract_name(b"uzswap-lab").map_err(|e| e.to_string())?;
        let lock = UnixListener::bind_addr(&address)
            .map_err(|_| "another uzswap lab is running on this machine; let it finish first".to_owned())?;
        let exe = std::env::current_exe().map_err(|e| e.to_string())?;
        let mut command = Command::new(exe);
        command.args(["lab", "worker", "--guard"]).stdin(Stdio::piped()).stdout(Stdio::from(OwnedFd::from(lock)));
        // SAFETY: only async-signal-safe calls between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
                    libc::signal(signal, libc::SIG_IGN);
                }
                Ok(())
            });
        }
        let mut guard = command.spawn().map_err(|e| format!("cannot start the lab's guard: {e}"))?;
        let inner = Rc::new(Inner { pipe: RefCell::new(guard.stdin.take()), next: Cell::new(0) });
        Ok(Self { inner, guard: Some(guard) })
    }

    /// A keeper without a guard.
    #[cfg(test)]
    pub(crate) fn unguarded() -> Self {
        Self { inner: Rc::new(Inner { pipe: RefCell::new(None), next: Cell::new(0) }), guard: None }
    }

    /// Writes a step down. The change that it undoes may be made after this.
    ///
    /// # Errors
    /// When the guard is gone: then nothing may be changed.
    pub fn will_undo(&self, step: Step) -> Result<Todo, String> {
        let id = self.inner.next.get();
        self.inner.next.set(id + 1);
        self.inner
            .tell(&Line::Todo(id, step.clone()))
            .map_err(|e| format!("the lab's guard is gone ({e}); changing nothing"))?;
        Ok(Todo { inner: Rc::clone(&self.inner), id, step: Some(step) })
    }

    /// Makes a directory of the lab's own, in `parent` or in the system's temporary directory. It is removed with the [`Todo`].
    ///
    /// # Errors
    /// When the guard is gone, there is no such parent, or the directory cannot be made.
    pub fn make_dir(&self, parent: Option<&Path>) -> Result<(PathBuf, Todo), String> {
        let parent = parent.map_or_else(std::env::temp_dir, Path::to_path_buf);
        if !parent.is_dir() {
            return Err(format!("{} is no directory", parent.display()));
        }
        let dir = parent.join(format!("uzswap-lab-{}", std::process::id()));
        let todo = self.will_undo(Step::RemoveDir(dir.clone()))?;
        fs::create_dir_all(&dir).map_err(|e| format!("cannot make {}: {e}", dir.display()))?;
        Ok((dir, todo))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.inner.pipe.borrow_mut().take();
        if let Some(guard) = &mut self.guard {
            let _ = guard.wait();
        }
    }
}

thread_local! {
    static LEFT: Cell<bool> = const { Cell::new(false) };
}

/// Whether a change made by this thread could not be undone, which was reported.
#[must_use]
pub fn is_left() -> bool {
    LEFT.get()
}

impl Drop for Todo {
    fn drop(&mut self) {
        if let Some(step) = self.step.take()
            && let Err(error) = step.run()
        {
            LEFT.set(true);
            tell!("uzswap lab: {error}");
        }
        let _ = self.inner.tell(&Line::Done(self.id));
    }
}

/// Runs the guard: listens until the lab ends, then undoes what was left. Its standard output is the lock that keeps a second lab
/// out until then.
#[must_use]
pub fn guard() -> i32 {
    for step in left_over(io::stdin().lock()).into_iter().rev() {
        if let Err(error) = step.run() {
            tell!("uzswap lab: {error}");
        }
    }
    0
}

/// The steps that were written down and not undone, in the order in which they were written.
fn left_over(journal: impl BufRead) -> Vec<Step> {
    let mut todo = BTreeMap::new();
    for line in journal.lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(Line::Todo(id, step)) => {
                todo.insert(id, step);
            }
            Ok(Line::Done(id)) => {
                todo.remove(&id);
            }
            Err(_) => {}
        }
    }
    todo.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guard_is_left_with_what_was_not_done() {
        let steps = [Step::SwapOff("/x".into()), Step::Restore("/y".into(), "1".into()), Step::RemoveDir("/z".into())];
        let mut journal = String::new();
        for (id, step) in steps.iter().enumerate() {
            journal += &format!("{}\n", serde_json::to_string(&Line::Todo(id as u64, step.clone())).unwrap());
        }
        journal += &format!("{}\n", serde_json::to_string(&Line::Done(1)).unwrap());
        journal += "{\"Todo\":[3,{\"SwapO";
        assert_eq!(left_over(journal.as_bytes()), [steps[0].clone(), steps[2].clone()]);
    }

    #[test]
    fn undoing_what_never_happened_is_harmless() {
        let dir = std::env::temp_dir().join("uzswap-lab-never-made");
        Step::RemoveDir(dir.clone()).run().unwrap();
        Step::RemoveCgroup(dir.clone()).run().unwrap();
        // As for users other than root: what could not be set is as it was, and cannot be set again.
        let kernel = PathBuf::from("/proc/sys/kernel/osrelease");
        let release = fs::read_to_string(&kernel).unwrap().trim().to_owned();
        Step::Restore(kernel.clone(), release).run().unwrap();
        assert!(Step::Restore(kernel, "another".to_owned()).run().is_err());
    }

    #[test]
    fn what_is_left_is_known() {
        let undone = |path: &str| drop(Keeper::unguarded().will_undo(Step::Restore(path.into(), "another".to_owned())));
        undone("/dev/null");
        assert!(!is_left());
        undone("/proc/sys/kernel/osrelease");
        assert!(is_left());
    }

    /// The story: a mistyped `--dir` made that directory and its parents, and left them behind.
    #[test]
    fn a_directory_is_made_in_one_that_is_there() {
        let keeper = Keeper::unguarded();
        let missing = std::env::temp_dir().join("uzswap-lab-no-such-parent");
        assert!(keeper.make_dir(Some(&missing.join("below"))).is_err_and(|error| error.ends_with("is no directory")));
        assert!(!missing.exists());
        let (made, todo) = keeper.make_dir(None).unwrap();
        assert!(made.is_dir());
        drop(todo);
        assert!(!made.exists());
    }
}

//! Groups by name: finds, joins and creates them.
//!
//! A directory of the user's (`$XDG_RUNTIME_DIR/uzswap`, else `/tmp/uzswap-UID`) holds one symbolic link for each command and
//! tree: `ROOT@PID.NAMESPACE`, to the object in `/proc/PID/fd`. A tree exists as long as one of its commands runs. Links of
//! killed commands lead nowhere; whoever meets one removes it. Access is that of the directory (0700) and of `/proc/PID/fd`: the
//! same user. A lock on the directory keeps two commands from creating the same name at once.

use crate::config::{Compressor, plain};
use crate::folios::FolioWanted;
use crate::group_name::components;
use crate::stat_files::Usage;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::time::{Duration, Instant};
use uzswap::directory;
use uzswap::group_file::GroupFile;
use uzswap_mm::size::human;
use uzswap_pager::group::member::wake_member;
use uzswap_pager::group::{CODEC_LZ4, GroupPage, NO_LIMIT, NODES, Node, ON_FULL_EXCEED, Slot};
use uzswap_pager::swap::turns::wake_writer;

/// The directory of running groups.
pub struct Registry {
    dir: PathBuf,
}

/// A command's link in the directory; removed when dropped.
pub struct Entry(PathBuf);

impl Drop for Entry {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// A group of a tree.
pub struct Group {
    /// The tree.
    pub file: Arc<GroupFile>,
    /// The group's node number in the tree.
    pub node: usize,
    /// Whether the group existed before.
    pub joined: bool,
    /// The link that makes the group known; none if nobody can join it.
    _entry: Option<Entry>,
}

impl Group {
    /// The shared page of the tree.
    pub fn page(&self) -> &GroupPage {
        self.file.page()
    }

    /// The slots of the group's living members.
    fn members(&self) -> impl Iterator<Item = &Slot> {
        let page = self.page();
        let within = |slot: &&Slot| page.is_within(slot.node.load(Relaxed) as usize, self.node);
        page.used().iter().filter(within).filter(|slot| slot.owner().is_some_and(|o| !o.is_dead()))
    }

    /// Wakes all members: they check their limits and publish their charge.
    pub fn wake(&self) {
        self.members().for_each(|slot| wake_member(slot, true));
    }

    /// Like [`Group::wake`], and also wakes the members' threads that write pools to disk.
    ///
    /// The story: after `memory.zswap.max` was set, idle programs kept what they had in the pool, however far above it, until one
    /// of them put out something more.
    pub fn tell_of_limits(&self) {
        self.members().for_each(wake_writer);
        self.wake();
    }

    /// Changes limits by what the members charge now, and tells the members. If a new limit is too small as well, a new message
    /// says so.
    pub fn change(&self, change: impl FnOnce()) {
        self.refresh();
        change();
        self.page().nodes[self.node].full_said.store(0, SeqCst);
        self.tell_of_limits();
    }

    /// Has the members publish their charge, and waits for them: see [`refresh`].
    pub fn refresh(&self) {
        refresh(core::slice::from_ref(self));
    }

    /// The whole name: `web/worker`.
    pub fn name(&self) -> String {
        name_of(self.page(), self.node)
    }
}

/// Has the members of groups publish their charge, and waits until they have; not forever, as a member may be stopped.
pub fn refresh(groups: &[Group]) {
    let members = groups.iter().flat_map(Group::members);
    let members: Vec<(&Slot, u32)> = members.map(|slot| (slot, slot.said.load(Acquire))).collect();
    groups.iter().for_each(Group::wake);
    let start = Instant::now();
    let silent = || members.iter().any(|(slot, said)| slot.said.load(Acquire) == *said);
    while silent() && start.elapsed() < Duration::from_millis(300) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The whole name of a group: `web/worker`.
pub fn name_of(page: &GroupPage, node: usize) -> String {
    let mut parts: Vec<String> = page
        .chain(node)
        .map(|at| {
            let (name, len) = page.nodes[at].name();
            // Whatever a member has written there, it must not steer a terminal.
            String::from_utf8_lossy(&name[..len]).replace(char::is_control, "?")
        })
        .collect();
    parts.reverse();
    parts.join("/")
}

/// What a run wants of its group.
pub struct Wanted {
    /// `memory.max`, if given.
    pub max: Option<u64>,
    /// The compressor, if given.
    pub compressor: Option<Compressor>,
    /// As in `Node::on_full`, if given.
    pub on_full: Option<u32>,
    /// Whether to record what happens to pages; of the whole tree.
    pub record: bool,
    /// Whether to track which pages are written to; of the whole tree.
    pub track_writes: bool,
    /// Folio settings; of the whole tree.
    pub folios: FolioWanted,
}

impl Registry {
    /// Opens this user's directory, or makes it. The error is one sentence.
    pub fn open() -> Result<Registry, String> {
        Ok(Registry { dir: directory::open()? })
    }

    #[cfg(test)]
    fn at(dir: PathBuf, me: u32) -> Result<Registry, String> {
        Ok(Registry { dir: directory::at(dir, me)? })
    }

    /// Locks the directory until the file is dropped.
    fn lock(&self) -> Result<File, String> {
        let sentence = |e: io::Error| format!("the directory of groups cannot be locked: {}", plain(&e));
        let file = File::open(&self.dir).map_err(sentence)?;
        // SAFETY: no memory is involved.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) } < 0 {
            return Err(sentence(io::Error::last_os_error()));
        }
        Ok(file)
    }

    /// The names of this user's running trees that this command may not inspect.
    pub fn closed(&self) -> Vec<String> {
        directory::look(&self.dir).closed
    }

    /// The running trees, each once, sorted by name. Removes the links that killed commands left.
    pub fn list(&self) -> Vec<(String, GroupFile)> {
        directory::list(&self.dir)
    }

    /// The root groups of the running trees, in the same order.
    pub fn roots(&self) -> Vec<Group> {
        let root = |(_, file): (String, GroupFile)| Group { file: file.into(), node: 0, joined: true, _entry: None };
        self.list().into_iter().map(root).collect()
    }

    /// Finds a running group. The error is one sentence.
    pub fn find(&self, name: &str) -> Result<Group, String> {
        let parts = components(name)?;
        let missing = || {
            let found = directory::look(&self.dir);
            if found.closed.iter().any(|root| root == parts[0]) {
                return closed(parts[0]);
            }
            let foreign = found.foreign.into_iter().map(|name| format!("{name} by another version of uzswap"));
            let closed = found.closed.into_iter().map(|name| format!("{name} with other capabilities"));
            let running: Vec<String> =
                found.trees.into_iter().map(|(name, _)| name).chain(foreign).chain(closed).collect();
            let running = if running.is_empty() { "none".to_owned() } else { running.join(", ") };
            format!("no such group: `{name}` is not running (running: {running})")
        };
        let (_, file) = self.list().into_iter().find(|(root, _)| root == parts[0]).ok_or_else(missing)?;
        let page = file.page();
        let node = parts[1..].iter().try_fold(0, |at, part| page.child(at, part.as_bytes())).ok_or_else(missing)?;
        Ok(Group { file: file.into(), node, joined: true, _entry: None })
    }

    fn register(&self, root: &str, file: &GroupFile) -> Result<Entry, String> {
        let path = self.dir.join(directory::entry_name(root));
        let _ = fs::remove_file(&path);
        std::os::unix::fs::symlink(file.path(), &path)
            .map_err(|e| format!("the group `{root}` cannot be made known: {}", plain(&e)))?;
        Ok(Entry(path))
    }

    /// Joins a group, or creates it. The error is one sentence.
    pub fn join(&self, name: &str, wanted: &Wanted) -> Result<Group, String> {
        let parts = components(name)?;
        if parts[0].bytes().all(|b| b.is_ascii_digit()) {
            return Err(format!(
                "`{name}` is not a name for a group: digits alone are those of runs without a name; add a letter"
            ));
        }
        let _held = self.lock()?;
        let directory::Found { trees, foreign, closed: not_ours } = directory::look(&self.dir);
        if not_ours.iter().any(|root| root == parts[0]) {
            return Err(closed(parts[0]));
        }
        if foreign.iter().any(|root| root == parts[0]) {
            return Err(format!(
                "a group `{}` of another version of uzswap runs: use that version's command, or choose another name",
                parts[0]
            ));
        }
        let running = trees.into_iter().find(|(root, _)| root == parts[0]);
        let there = running
            .as_ref()
            .and_then(|(_, file)| parts[1..].iter().try_fold(0, |at, part| file.page().child(at, part.as_bytes())));
        if there.is_none() && wanted.max.is_none() {
            return Err(format!("no such group: `{name}` is not running; add --memory SIZE to create it"));
        }
        if wanted.record && running.is_some() {
            return Err(format!(
                "the group `{name}` runs already, and only the run that creates a group can record it: leave out --record"
            ));
        }
        let tracks = |file: &uzswap::group_file::GroupFile| file.page().track_writes.load(Relaxed) != 0;
        if wanted.track_writes && running.as_ref().is_some_and(|(_, file)| !tracks(file)) {
            return Err(format!(
                "the group `{name}` runs already and does not track writes: leave out --track-writes, or choose another name"
            ));
        }
        let differs = running.as_ref().and_then(|(_, file)| wanted.folios.differs(&file.page().folios));
        if let Some(option) = differs {
            return Err(format!(
                "the name `{}` is taken by a running group with other folio settings: leave out {option} to join it, or choose another name",
                parts[0]
            ));
        }
        let file = match running {
            Some((_, file)) => file,
            None => GroupFile::create(parts[0], wanted.record)
                .map_err(|e| format!("the memory shared with the program cannot be created: {}", plain(&e)))?,
        };
        let (page, joined) = (file.page(), there.is_some());
        let mut named = false;
        let node = match there {
            Some(node) => {
                agrees(page, node, name, wanted)?;
                named = is_open(&page.nodes[node]);
                node
            }
            None => {
                let full = || format!("the group `{name}` cannot be made: `{}` has {NODES} groups already", parts[0]);
                let mut at = 0;
                for part in &parts[1..] {
                    let part = part.as_bytes();
                    at = page.child(at, part).or_else(|| page.make_child(at, part)).ok_or_else(full)?;
                }
                set_up(page, at, wanted);
                at
            }
        };
        let entry = self.register(parts[0], &file)?;
        let group = Group { file: file.into(), node, joined, _entry: Some(entry) };
        if named {
            name_now(&group, wanted);
        }
        Ok(group)
    }
}

/// The sentence for a tree that exists and cannot be opened.
fn closed(root: &str) -> String {
    format!(
        "the group `{root}` was started with capabilities that this command does not have, so it cannot be opened: use the same, or choose another name"
    )
}

/// Creates a tree without a name for one run: known by the command's pid, if a link can be made.
pub fn unnamed(wanted: &Wanted) -> io::Result<Group> {
    let name = std::process::id().to_string();
    let file = GroupFile::create(&name, wanted.record)?;
    set_up(file.page(), 0, wanted);
    let entry = Registry::open().and_then(|registry| registry.register(&name, &file)).ok();
    Ok(Group { file: file.into(), node: 0, joined: false, _entry: entry })
}

fn set_up(page: &GroupPage, node: usize, wanted: &Wanted) {
    page.track_writes.fetch_or(u32::from(wanted.track_writes), Relaxed);
    wanted.folios.tell(&page.folios);
    let node = &page.nodes[node];
    if let Some(max) = wanted.max {
        node.max.store(max, Relaxed);
    }
    say_how(node, wanted);
}

/// Gives a group its settings, except the limit.
fn say_how(node: &Node, wanted: &Wanted) {
    if let Some(compressor) = wanted.compressor {
        node.codec.store(compressor.codec, Relaxed);
        node.level.store(compressor.level, Relaxed);
    }
    if let Some(on_full) = wanted.on_full {
        node.on_full.store(on_full, Relaxed);
    }
    if wanted.max.is_some() {
        node.named.store(1, Relaxed);
    }
}

/// Whether no run has given the group its settings yet: it exists only because a group below it does.
///
/// The story: `--group web --memory 1G` was refused once `web/worker` ran, because `web` had no limit. Nobody had asked for that.
fn is_open(node: &Node) -> bool {
    node.named.load(Relaxed) == 0
}

/// Gives such a group its settings. Its members are told, as if `uzswap ctl` had set the limit.
fn name_now(group: &Group, wanted: &Wanted) {
    let node = &group.page().nodes[group.node];
    say_how(node, wanted);
    if let Some(max) = wanted.max.filter(|max| *max != node.max.load(Relaxed)) {
        group.change(|| node.set_max(max, Usage::of(group.page(), group.node).charge));
    }
}

/// Refuses to join a group whose settings contradict those wanted.
fn agrees(page: &GroupPage, node: usize, name: &str, wanted: &Wanted) -> Result<(), String> {
    let n = &page.nodes[node];
    let taken = |what: String, change: String| {
        Err(format!("the name `{name}` is taken by a running group with {what}: {change}, or choose another name"))
    };
    // Settings that no run has given, and nobody has changed since, agree with anything.
    let open = is_open(n);
    let max = n.max.load(Relaxed);
    if wanted.max.is_some_and(|wanted| wanted != max) && !(open && max >= NO_LIMIT) {
        let is = if max >= NO_LIMIT { "no limit".to_owned() } else { human(max) };
        return taken(
            format!("a memory.max of {is}"),
            format!("leave out --memory to join it (`uzswap ctl {name} memory.max=SIZE` changes it)"),
        );
    }
    let compressor = Compressor { codec: n.codec.load(Relaxed), level: n.level.load(Relaxed) };
    let usual = compressor == Compressor { codec: CODEC_LZ4, level: 0 };
    if wanted.compressor.is_some_and(|wanted| wanted != compressor) && !(open && usual) {
        return taken(format!("the compressor {}", compressor.name()), "leave out --compressor to join it".to_owned());
    }
    let on_full = n.on_full.load(Relaxed);
    if wanted.on_full.is_some_and(|wanted| wanted != on_full) && !(open && on_full == ON_FULL_EXCEED) {
        return taken("another --on-full".to_owned(), "leave out --on-full to join it".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{NO_LIMIT, Registry, Relaxed, Wanted};
    use crate::folios::{FolioOptions, FolioWanted};
    use crate::group_name::components;
    use std::fs;
    use std::os::fd::{AsRawFd, FromRawFd};
    use std::os::unix::fs::PermissionsExt;
    use uzswap_pager::group::ON_FULL_KILL;

    fn registry() -> (tempfile::TempDir, Registry) {
        let dir = tempfile::tempdir().unwrap();
        let me = uzswap_sys::thread::user();
        let registry = Registry::at(dir.path().join("groups"), me).unwrap();
        (dir, registry)
    }

    const ANY: Wanted = Wanted {
        max: None,
        compressor: None,
        on_full: None,
        record: false,
        track_writes: false,
        folios: FolioWanted::NONE,
    };
    const LIMIT: Wanted = Wanted { max: Some(64 << 20), ..ANY };

    #[test]
    fn names() {
        for good in ["a", "web", "web/worker", "A-1_b.c", "a/b/c/d/e/f/g/h"] {
            assert!(components(good).is_ok(), "{good}");
        }
        for bad in ["", "/", "a/", "/a", "a//b", ".", "..", "a/..", "a b", "a@b", "ä", "a/b/c/d/e/f/g/h/i"] {
            let sentence = components(bad).unwrap_err();
            assert!(sentence.contains("is not a name") && !sentence.contains('\n'), "{bad}: {sentence}");
        }
        assert!(components(&"x".repeat(65)).is_err());
    }

    #[test]
    fn created_joined_and_found() {
        let (_dir, registry) = registry();
        let error = |name: &str, wanted: &Wanted| registry.join(name, wanted).map(|_| ()).unwrap_err();
        assert!(error("web", &ANY).contains("add --memory"));
        assert!(error("123", &LIMIT).contains("digits"));
        let web = registry.join("web", &LIMIT).unwrap();
        let again = registry.join("web", &ANY).unwrap();
        again.page().nodes[0].max.store(32 << 20, std::sync::atomic::Ordering::Relaxed);
        assert!(error("web", &LIMIT).contains("taken"));
        assert_eq!(web.page().nodes[0].max.load(std::sync::atomic::Ordering::Relaxed), 32 << 20);
        let worker = registry.join("web/worker", &LIMIT).unwrap();
        assert_eq!((worker.node, worker.name()), (1, "web/worker".to_owned()));
        assert_eq!(registry.find("web/worker").unwrap().node, 1);
        assert!(registry.find("web/other").map(|_| ()).unwrap_err().contains("running: web"));
        assert_eq!(registry.list().len(), 1);
        drop((web, again, worker));
        assert!(registry.find("web").is_err());
        assert_eq!(fs::read_dir(&registry.dir).unwrap().count(), 0);
    }

    /// The story: a run that joined a group with folio options changed them for all others in it, without a message.
    #[test]
    fn folios_are_as_the_group_was_made() {
        let (_dir, registry) = registry();
        let unit = |unit: &str| Wanted {
            folios: FolioOptions { unit: Some(unit.to_owned()), ..FolioOptions::default() }.parse().unwrap(),
            ..LIMIT
        };
        let web = registry.join("web", &unit("64K")).unwrap();
        for name in ["web", "web/worker"] {
            let sentence = registry.join(name, &unit("16K")).map(|_| ()).unwrap_err();
            assert!(sentence.contains("leave out --unit") && !sentence.contains('\n'), "{sentence}");
        }
        assert!(web.page().child(0, b"worker").is_none());
        let _others = [registry.join("web", &ANY).unwrap(), registry.join("web/worker", &unit("64K")).unwrap()];
        assert_eq!(web.page().folios.unit(9), Some(4));
    }

    #[test]
    fn writes_are_tracked_where_the_group_was_made_so() {
        let (_dir, registry) = registry();
        let tracks = |file: &uzswap::group_file::GroupFile| {
            file.page().track_writes.load(std::sync::atomic::Ordering::Relaxed) != 0
        };
        let _web = registry.join("web", &LIMIT).unwrap();
        let late = registry.join("web", &Wanted { track_writes: true, ..ANY }).map(|_| ()).unwrap_err();
        assert!(late.contains("does not track writes") && !late.contains('\n'), "{late}");
        // Dropping one of them would remove the entry of all, as they are of one process.
        let _db = registry.join("db", &Wanted { track_writes: true, ..LIMIT }).unwrap();
        let _others = [registry.join("db", &ANY).unwrap(), registry.join("db/inner", &LIMIT).unwrap()];
        let all: Vec<_> = registry.list().iter().map(|(name, file)| (name.clone(), tracks(file))).collect();
        assert_eq!(all, [("db".to_owned(), true), ("web".to_owned(), false)]);
    }

    /// See [`super::is_open`].
    #[test]
    fn a_group_made_on_the_way_is_what_the_first_wants_who_names_it() {
        let (_dir, registry) = registry();
        let wants = |max: u64| Wanted { max: Some(max), ..ANY };
        let refused = |name: &str, wanted: &Wanted| registry.join(name, wanted).map(|_| ()).unwrap_err();
        let below = registry.join("web/worker", &LIMIT).unwrap();
        let root = &below.page().nodes[0];
        assert!(root.max.load(Relaxed) >= NO_LIMIT);
        // A run that joins without a limit does not give it one.
        // (A group that is dropped takes the directory's entry with it.)
        let _joined = registry.join("web", &ANY).unwrap();
        let first = registry.join("web", &Wanted { on_full: Some(ON_FULL_KILL), ..wants(128 << 20) }).unwrap();
        assert_eq!((root.max.load(Relaxed), root.on_full.load(Relaxed)), (128 << 20, ON_FULL_KILL));
        assert!(refused("web", &LIMIT).contains("a memory.max of 128 MiB"));
        assert!(registry.join("web", &wants(128 << 20)).is_ok());
        assert_eq!(first.page().nodes[below.node].max.load(Relaxed), 64 << 20);
        // A limit set in the meantime stands. A group that was named, and then lost its limit by `ctl`, is not open again.
        let below = registry.join("db/worker", &LIMIT).unwrap();
        below.page().nodes[0].max.store(96 << 20, Relaxed);
        assert!(refused("db", &LIMIT).contains("a memory.max of 96 MiB"));
        let _named = registry.join("db", &wants(96 << 20)).unwrap();
        below.page().nodes[0].max.store(NO_LIMIT, Relaxed);
        assert!(refused("db", &LIMIT).contains("a memory.max of no limit"));
    }

    /// A command that is killed leaves its link. It must not be found, keep the name, or stay.
    #[test]
    fn what_killed_commands_leave_is_removed() {
        let (_dir, registry) = registry();
        let stale = registry.dir.join("web@1");
        std::os::unix::fs::symlink("/proc/1/fd/99999", &stale).unwrap();
        assert!(registry.find("web").is_err());
        assert!(fs::symlink_metadata(&stale).is_err());
        // The pid may be another process's by now, with another object or a tree of another name at that descriptor.
        let group = registry.join("other", &LIMIT).unwrap();
        std::os::unix::fs::symlink(group.file.path(), registry.dir.join("web@2")).unwrap();
        std::os::unix::fs::symlink("/proc/self/fd/0", registry.dir.join("web@3")).unwrap();
        assert!(registry.find("web").is_err());
        assert_eq!(fs::read_dir(&registry.dir).unwrap().count(), 1);
        assert!(registry.join("web", &LIMIT).is_ok());
    }

    /// The story: in a container that shared the directory in the machine's `/tmp` every link led nowhere, and `uzswap stat`
    /// removed them all.
    #[test]
    fn what_runs_in_another_namespace_is_left_alone() {
        let (_dir, registry) = registry();
        let web = registry.join("web", &LIMIT).unwrap();
        let own = fs::read_dir(&registry.dir).unwrap().flatten().next().unwrap().file_name().into_string().unwrap();
        let namespace: u64 = own.rsplit_once('.').expect("it names the namespace").1.parse().unwrap();
        let entry = |namespace: u64| registry.dir.join(format!("db@1.{namespace}"));
        for namespace in [namespace, namespace + 1] {
            std::os::unix::fs::symlink("/proc/1/fd/99999", entry(namespace)).unwrap();
        }
        assert_eq!(registry.list().len(), 1);
        assert!([namespace, namespace + 1].map(|n| entry(n).is_symlink()) == [false, true]);
        let db = registry.join("db", &LIMIT).unwrap();
        assert_eq!((registry.list().len(), db.name().as_str()), (2, "db"));
        drop((web, db));
    }

    /// Two versions on one machine: each took the other's links for leftovers and removed them, so `stat`, `ctl` and `pagemap` no
    /// longer found running groups.
    #[test]
    fn what_another_version_runs_is_left_alone() {
        let (_dir, registry) = registry();
        // SAFETY: a C string; the descriptor is owned at once.
        let low =
            unsafe { std::fs::File::from_raw_fd(libc::memfd_create(c"uzswap-group".as_ptr(), libc::MFD_CLOEXEC)) };
        low.set_len(4096).unwrap();
        // At a number that no other test is given by chance. Otherwise the object of a test that runs at the same time may get
        // the number of the one closed below, and be taken for the other version's.
        // SAFETY: no memory is involved; the descriptor is owned at once.
        let other = unsafe { std::fs::File::from_raw_fd(libc::fcntl(low.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 500)) };
        drop(low);
        let entry = registry.dir.join("web@2");
        let target = format!("/proc/{}/fd/{}", std::process::id(), other.as_raw_fd());
        std::os::unix::fs::symlink(target, &entry).unwrap();
        let said = registry.find("web").map(|_| ()).unwrap_err();
        assert!(said.contains("web by another version"), "{said}");
        assert!(registry.list().is_empty());
        let said = registry.join("web", &LIMIT).map(|_| ()).unwrap_err();
        assert!(said.contains("another version"), "{said}");
        assert!(fs::symlink_metadata(&entry).is_ok());
        drop(other);
        assert!(registry.join("web", &LIMIT).is_ok());
    }

    #[test]
    fn directories_of_others_are_not_trusted() {
        let (dir, registry) = registry();
        let me = uzswap_sys::thread::user();
        fs::set_permissions(&registry.dir, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(
            Registry::at(registry.dir.clone(), me)
                .map(|_| ())
                .unwrap_err()
                .contains("not yours alone, so it is not trusted: chmod 700")
        );
        fs::set_permissions(&registry.dir, fs::Permissions::from_mode(0o700)).unwrap();
        assert!(Registry::at(registry.dir.clone(), me + 1).is_err());
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&registry.dir, &link).unwrap();
        assert!(Registry::at(link, me).is_err());
        assert!(Registry::at(dir.path().join("no/such"), me).map(|_| ()).unwrap_err().contains("cannot be created"));
    }
}

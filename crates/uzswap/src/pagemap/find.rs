//! Finds page maps: among the descriptors of a process, or at a shared region's socket.

use crate::config::plain;
use std::collections::HashSet;
use std::fs;
use std::os::fd::IntoRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use uzswap::shared::{SharedControl, View};
use uzswap_mm::pagemap::{PageMap, Query, Run, SOFT_DIRTY};
use uzswap_pager::page_state::mapfile::{Kind, MapFile};

/// A page map that was found.
pub struct Found {
    /// What it is the map of, for people.
    pub what: String,
    /// The address of its first page; 0 for a shared region, whose pages go by number.
    pub base: usize,
    /// The map.
    pub map: Source,
    /// The parts of it about which anything is known.
    pub parts: Vec<Part>,
    /// The pages that were soft-dirty when the bits were last cleared, if that is known.
    pub cleared: Vec<Run>,
}

impl Found {
    /// Whether it is the map of a whole process.
    pub fn is_process(&self) -> bool {
        matches!(&self.map, Source::Own(map, _) if map.kind() == Some(Kind::Process))
    }

    /// Whether its memory is paged by the process that has it, not by the owner of a shared region.
    pub fn is_private(&self) -> bool {
        matches!(&self.map, Source::Own(map, _) if matches!(map.kind(), Some(Kind::Process | Kind::Region)))
    }
}

/// The pages `[from, to)`.
pub struct Part {
    /// The first page.
    pub from: u64,
    /// One past the last page.
    pub to: u64,
}

/// Where a map is mapped.
pub enum Source {
    /// In this command. The second map has soft-dirty and write-protected bits, if they are kept apart.
    Own(MapFile, Option<MapFile>),
    /// By a connection to the region.
    Shared(View),
}

impl Source {
    /// The map itself.
    pub fn map(&self) -> PageMap<'_> {
        match self {
            Self::Own(file, None) => file.map(),
            Self::Own(file, Some(markers)) => file.map().with_markers(markers.map(), !markers.tracking()),
            Self::Shared(view) => view.map(),
        }
    }
    /// Whether writes to its pages are tracked.
    pub fn tracks_writes(&self) -> bool {
        match self {
            Self::Own(file, markers) => file.tracking() || markers.is_some(),
            Self::Shared(_) => false,
        }
    }
    /// The number of pages.
    pub fn pages(&self) -> u64 {
        self.map().pages()
    }
    /// The limit in bytes.
    pub fn limit(&self) -> u64 {
        match self {
            Self::Own(file, _) => file.limit(),
            Self::Shared(view) => view.limit(),
        }
    }
}

/// The map of a shared region.
pub fn of_region(path: &Path, region: &SharedControl) -> Result<Vec<Found>, String> {
    let view = region.page_map().clone();
    let parts = vec![Part { from: 0, to: view.pages() }];
    let stats =
        region.stats().map_err(|e| format!("the owner of `{}` does not answer: {}", path.display(), plain(&e)))?;
    let what = format!("shared region {} ({} mappings)", path.display(), stats.mappings);
    Ok(vec![Found { what, base: 0, map: Source::Shared(view), parts, cleared: Vec::new() }])
}

/// The maps of a process: of its whole memory under `uzswap run`, of its regions, and of the shared regions that it owns.
///
/// uzswap's threads have descriptor tables of their own, so this searches those of all threads.
pub fn of_process(pid: u32) -> Result<Vec<Found>, String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).map_err(|_| format!("there is no process {pid}"))?;
    let (mut seen, mut maps, mut denied) = (HashSet::new(), Vec::new(), false);
    for task in tasks.flatten() {
        let descriptors = match fs::read_dir(task.path().join("fd")) {
            Ok(descriptors) => descriptors,
            Err(e) => {
                denied |= e.kind() == std::io::ErrorKind::PermissionDenied;
                continue;
            }
        };
        for entry in descriptors.flatten() {
            let name = fs::read_link(entry.path()).unwrap_or_default();
            if !name.to_string_lossy().starts_with("/memfd:uzswap-pagemap") {
                continue;
            }
            let Ok(file) = fs::File::open(entry.path()) else { continue };
            if file.metadata().is_ok_and(|m| seen.insert((m.dev(), m.ino())))
                && let Ok(map) = MapFile::open(file.into_raw_fd())
            {
                maps.push(map);
            }
        }
    }
    maps.retain(|map| is_of(pid, map));
    // A mapping's own bits mean nothing without the map of its pages.
    let (cleared, maps): (Vec<_>, Vec<_>) = maps.into_iter().partition(|map| map.kind() == Some(Kind::Cleared));
    let (mut markers, maps): (Vec<_>, Vec<_>) = maps.into_iter().partition(|map| map.kind() == Some(Kind::Markers));
    let mut found: Vec<Found> = maps.into_iter().filter_map(|map| describe(pid, map, &mut markers)).collect();
    for f in found.iter_mut().filter(|f| f.is_process()) {
        for map in &cleared {
            let parts = map.written_ranges().into_iter();
            parts.for_each(|(from, to)| {
                map.map().scan(from, to, Query::having(SOFT_DIRTY), |run| f.cleared.push(run));
            });
        }
    }
    if denied && found.is_empty() {
        return Err(format!("process {pid} is another user's"));
    }
    if found.is_empty() {
        return Err(format!(
            "process {pid} has no page map: it has no region, and is not managed by `uzswap run` (or not yet: below \
             its limit memory is left alone)"
        ));
    }
    found.sort_by_key(|f| f.base);
    Ok(found)
}

/// Whether a map is of memory of this process.
///
/// The story: for a forked child, `uzswap pagemap` showed the regions of its parent: it has their descriptors but not their memory.
/// For a child that had made a region at the same address, it showed its parent's markers for that.
fn is_of(pid: u32, map: &MapFile) -> bool {
    // A shared region may be known to others too.
    !matches!(map.kind(), Some(Kind::Region | Kind::Markers)) || has_number(pid, map.maker())
}

/// Whether the process that is `pid` here has this pid in its own PID namespace.
fn has_number(pid: u32, number: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let own = numbers.and_then(|numbers| numbers.split_whitespace().last()?.parse().ok());
    own.unwrap_or(pid) == number
}

fn describe(pid: u32, map: MapFile, markers: &mut Vec<MapFile>) -> Option<Found> {
    let base = map.base();
    let what = match map.kind()? {
        Kind::Process => format!("process {pid}"),
        Kind::Region => format!("region of process {pid} at {base:#x}"),
        // Only the owner can say whether what it saw a process drop is really gone; it answers at its socket.
        Kind::Shared if map.doubts() != 0 => format!("shared region known to process {pid} (removals may be missing)"),
        Kind::Shared => format!("shared region known to process {pid}"),
        Kind::Markers | Kind::Cleared => return None,
    };
    let own = |m: &MapFile| map.kind() == Some(Kind::Region) && (m.base(), m.pages()) == (base, map.pages());
    let own = markers.iter().position(own).map(|i| markers.swap_remove(i));
    let parts = map.parts(own.as_ref()).into_iter().map(|(from, to)| Part { from, to }).collect();
    Some(Found { what, base, map: Source::Own(map, own), parts, cleared: Vec::new() })
}

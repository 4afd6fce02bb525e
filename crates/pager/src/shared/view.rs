//! The page map of a region, or of a shared region as one mapping sees it: readable without asking anybody.

use super::wire::{self, op};
use crate::page_state::mapfile::MapFile;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use uzswap_mm::pagemap::{PageMap, PageState, Query, Run, Summary};

/// A connection on which the only request is that the owner settle its doubts.
#[derive(Debug)]
pub(super) struct Asker {
    socket: Mutex<OwnedFd>,
    process: u32,
}

impl Asker {
    /// An asker that uses this connection to the owner.
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket: Mutex::new(socket), process: std::process::id() }
    }

    fn settle(&self) {
        // A forked child has a copy, and would take its parent's answers.
        if std::process::id() == self.process {
            // If the owner is gone the map stays as it was last.
            let _ = wire::call(&self.socket.lock().unwrap_or_else(PoisonError::into_inner), &[op::SETTLE]);
        }
    }
}

/// A page map to read from. [`uzswap_mm::pagemap`] says what a reader may rely on while it changes.
///
/// For a shared region it is exact even about what `madvise(MADV_REMOVE)` has just removed: while it is open what such a call has
/// done (after MADV_DONTNEED this may last as long as its mapping), reading begins with a question to the owner.
#[derive(Clone, Debug)]
pub struct View {
    map: Arc<MapFile>,
    markers: Option<Arc<MapFile>>,
    asker: Option<Arc<Asker>>,
}

impl View {
    pub(super) fn new(map: Arc<MapFile>, markers: Option<Arc<MapFile>>, asker: Arc<Asker>) -> Self {
        Self { map, markers, asker: Some(asker) }
    }

    /// The map of a region that is not shared; a forked child does not have it.
    pub(crate) fn of_private(map: Arc<MapFile>, markers: Option<Arc<MapFile>>) -> Self {
        Self { map, markers, asker: None }
    }

    /// The map itself, with everything removed before this call. (Later removals appear once the owner has seen them; call this
    /// again to see them.)
    #[must_use]
    pub fn map(&self) -> PageMap<'_> {
        if let Some(asker) = self.asker.as_ref().filter(|_| self.map.doubts() != 0) {
            asker.settle();
        }
        match &self.markers {
            Some(markers) => self.map.map().with_markers(markers.map(), !markers.tracking()),
            None => self.map.map(),
        }
    }

    /// Number of pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.map.pages()
    }

    /// The state of a page.
    #[must_use]
    pub fn get(&self, page: u64) -> PageState {
        self.map().get(page)
    }

    /// The runs of pages that a query finds.
    #[must_use]
    pub fn runs(&self, query: Query) -> Vec<Run> {
        let (map, mut runs, mut at) = (self.map(), Vec::<Run>::new(), 0);
        let mut add = |run: Run| match runs.last_mut() {
            Some(last) if last.to == run.from && last.state == run.state => last.to = run.to,
            _ => runs.push(run),
        };
        for (from, to) in self.parts().into_iter().chain([(self.pages(), self.pages())]) {
            // Of the pages between two parts nothing is known.
            if at < from && query.finds(0) {
                add(Run { from: at, to: from, state: PageState(query.inverted & query.report) });
            }
            map.scan(from, to, query, &mut add);
            at = to;
        }
        runs
    }

    /// Pages by state.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let (map, mut sum) = (self.map(), Summary::default());
        for (from, to) in self.parts() {
            map.scan(from, to, Query::EVERYTHING, |run| sum.add(run.state, run.to - run.from));
        }
        sum.add(PageState::default(), self.pages() - sum.pages);
        sum
    }

    /// The parts of the map that may say anything.
    fn parts(&self) -> Vec<(u64, u64)> {
        self.map.parts(self.markers.as_deref())
    }

    /// The limit of the region (bytes).
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.map.limit()
    }
}

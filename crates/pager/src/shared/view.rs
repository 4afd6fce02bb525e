//! The page map of a region, of a shared one as one mapping sees it: read without asking anybody.

use super::wire::{self, op};
use crate::page_state::mapfile::MapFile;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use uzswap_mm::pagemap::{PageMap, PageState, Query, Run, Summary};

/// A connection on which nothing is asked but that the owner settle its doubts.
#[derive(Debug)]
pub(super) struct Asker {
    socket: Mutex<OwnedFd>,
    process: u32,
}

impl Asker {
    /// Asks the owner, at the other end of a connection.
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket: Mutex::new(socket), process: std::process::id() }
    }

    fn settle(&self) {
        // A forked child has this too, and would take its parent's answers.
        if std::process::id() == self.process {
            // (When the owner is gone the map is what it was last.)
            let _ = wire::call(&self.socket.lock().unwrap_or_else(PoisonError::into_inner), &[op::SETTLE]);
        }
    }
}

/// A page map to read from. What may be relied on while it changes is said at [`uzswap_mm::pagemap`].
///
/// Of a shared region it is exact also for what was just removed by `madvise(MADV_REMOVE)`: while it is open what such a call has done
/// (after one of MADV_DONTNEED this may be for as long as its mapping exists), reading begins with a question to the owner.
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

    /// The map of a region that is not shared: no forked child has it.
    pub(crate) fn of_private(map: Arc<MapFile>, markers: Option<Arc<MapFile>>) -> Self {
        Self { map, markers, asker: None }
    }

    /// The map itself, with all that was removed before the call. (What is removed later is in it when the owner has seen it: who
    /// wants to know calls this again.)
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

    /// Pages.
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
        let mut runs = Vec::new();
        self.map().scan(0, self.pages(), query, |run| runs.push(run));
        runs
    }

    /// Pages by state.
    #[must_use]
    pub fn summary(&self) -> Summary {
        self.map().summary(0, self.pages())
    }

    /// The limit of the region, in bytes.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.map.limit()
    }
}

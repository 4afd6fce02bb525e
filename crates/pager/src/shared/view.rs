//! The page map of a region, of a shared one as one mapping sees it: read without asking anybody.

use crate::mapfile::MapFile;
use std::sync::Arc;
use uzswap_mm::pagemap::{PageMap, PageState, Query, Run, Summary};

/// A page map to read from. What may be relied on while it changes is said at [`uzswap_mm::pagemap`].
#[derive(Clone, Debug)]
pub struct View {
    map: Arc<MapFile>,
    markers: Option<Arc<MapFile>>,
}

impl View {
    pub(super) fn new(map: Arc<MapFile>, markers: Option<Arc<MapFile>>) -> Self {
        Self { map, markers }
    }

    /// The map of a region that is not shared.
    pub(crate) fn of_private(map: Arc<MapFile>, markers: Option<Arc<MapFile>>) -> Self {
        Self { map, markers }
    }

    /// The map itself.
    #[must_use]
    pub fn map(&self) -> PageMap<'_> {
        match &self.markers {
            Some(markers) => self.map.map().with_markers(markers.map().words(), !markers.tracking()),
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

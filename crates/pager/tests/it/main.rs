//! The pager's integration tests, one binary.
#[path = "../../src/testing/alone.rs"]
mod alone;
mod folio;
mod limits;
mod pagemap;
mod region;
mod sequences;
mod shared;
mod surroundings;
mod tracking;

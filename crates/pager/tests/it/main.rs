//! The pager's integration tests, one binary.
#[path = "../../src/testing/alone.rs"]
mod alone;
mod folio;
mod region;
mod shared;
mod tracking;

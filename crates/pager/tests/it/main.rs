//! The pager's integration tests, one binary.
mod folio;
mod region;
mod shared;
mod tracking;

//! See Cargo.toml.
pub mod probe;

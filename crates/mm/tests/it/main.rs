//! The engine's integration tests, one binary.

mod codec;
mod zsmalloc;

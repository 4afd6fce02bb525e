//! The engine's integration tests, one binary.

mod codec;
mod lru;
mod pagetable;
mod zone;
mod zsmalloc;

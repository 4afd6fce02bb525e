//! The engine's integration tests, one binary.

mod codec;
mod compaction;
mod lru;
mod pagetable;
mod swapfile;
mod trace;
mod zone;
mod zsmalloc;

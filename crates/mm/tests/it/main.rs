//! The engine's integration tests, one binary.

mod codec;
mod compaction;
mod lru;
mod pagemap;
mod pagetable;
mod passes;
mod swapfile;
mod trace;
mod zone;
mod zsmalloc;
mod zswap;

//! The engine's integration tests, one binary.

mod codec;
mod lru;
mod pagetable;
mod swapfile;
mod trace;
mod zone;
mod zsmalloc;
mod zswap;

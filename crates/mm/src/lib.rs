//! The engine: all that uzswap knows and decides, without a single OS call.
//!
//! It never calls up. It returns values, and the crate that owns threads and memory (`uzswap-pager`) acts on them.
//! `unsafe` is denied except in the bindings of the C codecs, in [`codec`].
#![deny(unsafe_code)]

pub mod codec;
pub mod compaction;
pub mod lru;
pub mod pagemap;
pub mod pageset;
pub mod pagetable;
pub mod readahead;
pub mod replay;
pub mod shrinker;
pub mod size;
pub mod swapfile;
pub mod trace;
pub mod zone;
pub mod zsmalloc;
pub mod zswap;

//! The compressed pool: the format of its objects, how blocks are compressed into it and decompressed, and how objects are made
//! smaller, denser, or moved.
//!
//! The engine's allocator (`uzswap_mm::zsmalloc`) finds room for an object.

pub mod batch;
pub mod compress;
pub(crate) mod cut;
pub(crate) mod decompress;
pub mod densify;
pub mod object;
pub(crate) mod relocate;

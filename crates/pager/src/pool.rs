//! The compressed pool: what an object in it is, how blocks are compressed into it and decompressed, and how objects change there:
//! smaller, denser, or elsewhere.
//!
//! Where it finds room for an object the engine knows (`uzswap_mm::zsmalloc`).

pub mod batch;
pub mod compress;
pub(crate) mod cut;
pub(crate) mod decompress;
pub mod densify;
pub mod object;
pub(crate) mod relocate;

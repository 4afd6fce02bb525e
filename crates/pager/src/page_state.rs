//! Page state that others can ask for: which pages are out, were written to, or are write-protected.
//!
//! The modules: the memory object that tells whoever maps it, its marks, how writes are noticed, and the client that they wait
//! for.

pub mod mapfile;
pub mod marks;
pub mod notify;
pub(crate) mod writes;

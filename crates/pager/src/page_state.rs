//! Page state that can be queried: which pages are out, were written to, or are write-protected.
//!
//! The modules: the memory object that publishes it, the marks in it, how writes are detected, and how a client is told of writes
//! first.

pub mod mapfile;
pub mod marks;
pub mod notify;
pub(crate) mod writes;

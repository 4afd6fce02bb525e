//! Page state that can be asked for: which pages are out, were written to, or are write-protected.
//!
//! What a memory object says to whoever maps it, the marks in it, how writes come to be seen, and whom they wait for.

pub mod mapfile;
pub mod marks;
pub mod notify;
pub(crate) mod writes;

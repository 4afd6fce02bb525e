//! Page state that others can ask for: which pages are out, were written to, or are write-protected.
//!
//! `mapfile` publishes it in a memory object that others map, `marks` keeps marks in that object, `writes` notices writes, and
//! `notify` makes them wait for a client.

pub mod mapfile;
pub mod marks;
pub mod notify;
pub(crate) mod writes;

//! Frames: the arena that holds them, how they move into the program and out of it, and how they go back to the kernel.
//!
//! Frames move page by page or as huge pages, with UFFDIO_MOVE and without it. The engine's zone (`uzswap_mm::zone`) knows which
//! frames are free, and where runs of them are.

pub mod arena;
pub mod compact;
pub(crate) mod giveback;
pub mod huge;
pub mod shootdown;
pub mod thp;
pub(crate) mod transfer;
pub(crate) mod without_move;

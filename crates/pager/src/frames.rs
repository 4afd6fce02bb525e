//! Frames: the range of addresses that holds them, how they get into the program and out of it, and how they go back to the kernel.
//!
//! Page by page, or as huge pages, where UFFDIO_MOVE is there and where it is not. Which of them are free, and where runs of them are, the
//! engine's zone knows (`uzswap_mm::zone`).

pub mod arena;
pub mod compact;
pub(crate) mod giveback;
pub mod huge;
pub mod shootdown;
pub mod thp;
pub(crate) mod transfer;
pub(crate) mod without_move;

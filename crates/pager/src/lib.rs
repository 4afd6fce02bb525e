//! Everything that owns threads and memory: faults, reclaim, events, fork, and the group that a process tree shares.
//!
//! All of it runs inside the program that it serves, in threads that use no libc (see [`uzswap_sys::thread`]).
//!
//! | what | where |
//! |---|---|
//! | a page comes back | [`fault`]: which thread serves the fault, how much it brings, how long it takes |
//! | a page leaves | [`reclaim`]: what leaves, how it is staged and stored |
//! | where pages are in between | [`frames`] uncompressed, [`pool`] compressed, [`swap`] on disk or a server |
//! | which memory is managed | [`discover`]; and [`calls`], as the program maps, moves and unmaps it |
//! | what processes share | [`fork`], and [`group`]: one limit for many processes |
//! | what others may learn | [`page_state`], [`trace`]; and what they may ask for: [`request`] |
//! | one process as a whole | [`pager`], with the tables in [`state`] under one lock; [`ticker`] does what is due |
//! | the library's memory | [`region`] in one process, [`shared`] by several |
pub mod calls;
mod chance;
pub mod discover;
pub mod fault;
pub mod fork;
pub mod frames;
pub mod group;
pub mod inject;
pub mod page_state;
pub mod pager;
pub mod pool;
pub mod reclaim;
pub mod region;
pub mod request;
pub mod says;
pub mod shared;
pub mod state;
pub mod swap;
pub mod ticker;
pub mod trace;

#[cfg(test)]
mod counter_tests;
#[cfg(test)]
mod testing;

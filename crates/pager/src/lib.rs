//! What owns threads: fault, reclaim, events, fork; and the group shared by a process tree.
//!
//! Everything here runs in the program it serves, in threads without libc (see [`uzswap_sys::thread`]).
//!
//! | what | where |
//! |---|---|
//! | a page comes back | [`fault`]: who serves it, how much it brings, how long it takes |
//! | a page leaves | [`reclaim`]: what leaves, how it is staged and stored |
//! | where pages are meanwhile | [`frames`] not compressed, [`pool`] compressed, [`swap`] on disk or a server |
//! | which memory it is | [`discover`]; and [`calls`], as the program maps, moves and unmaps it |
//! | who shares it | [`fork`], and [`group`]: one limit for many processes |
//! | what others may know of it | [`page_state`], [`trace`], and what they may ask: [`request`] |
//! | all of one process | [`pager`], with the tables in [`state`] under one lock; [`ticker`] sees to what is due |
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

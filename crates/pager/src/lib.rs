//! What owns threads: fault, reclaim, events, fork; and the group shared by a process tree.
//!
//! Everything here runs in the program it serves, in threads without libc (see [`uzswap_sys::thread`]).
pub mod arena;
pub mod batch;
pub mod calls;
pub mod ceded;
mod chance;
pub mod compact;
pub mod compress;
pub mod credentials;
mod cut;
pub mod deliver;
pub mod densify;
pub mod discover;
pub mod events;
pub mod fault;
pub mod folio;
pub mod fork;
pub mod full;
pub mod group;
mod handler;
pub mod holder;
pub mod huge;
pub mod inject;
pub mod letgo;
pub mod limits;
mod lost;
pub mod mapfile;
pub mod marks;
pub mod member;
pub mod notify;
pub mod object;
pub mod pageout;
pub mod pager;
mod pins;
pub mod placement;
pub mod reclaim;
pub mod region;
mod relocate;
pub mod remapped;
pub mod request;
pub mod shared;
pub mod stage;
mod stall;
pub mod state;
pub mod store;
pub mod streams;
pub mod swap;
pub mod ticker;
pub mod trace;
mod transfer;
mod watch;
mod without_move;
mod writes;

#[cfg(test)]
mod testing;

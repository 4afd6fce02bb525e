//! Behaviour of the pager, seen from outside.
mod region;
mod shared;

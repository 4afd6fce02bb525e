//! What owns threads: fault, reclaim, events, fork; and the group shared by a process tree.
pub mod group;

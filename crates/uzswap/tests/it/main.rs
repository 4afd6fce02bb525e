//! Integration tests of the command.

mod charges;
mod cli;
mod folios;
mod groups;
mod handed;
mod handover;
mod lab;
mod leftovers;
mod pagemap;
mod pageout;
mod place;
mod protect;
mod record;
mod refusals;
mod shrink;
mod terminal;

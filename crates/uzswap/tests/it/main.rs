//! Integration tests of the command.

mod cli;
mod groups;
mod handover;
mod pagemap;
mod record;

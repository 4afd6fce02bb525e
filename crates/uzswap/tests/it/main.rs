//! Integration tests of the command.

mod cli;
mod groups;
mod pagemap;
mod record;

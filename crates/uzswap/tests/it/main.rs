//! Integration tests of the command.

mod cli;
mod groups;
mod record;

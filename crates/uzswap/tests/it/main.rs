//! Integration tests of the command.

mod cli;
mod record;

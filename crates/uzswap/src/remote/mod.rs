//! The remote tier: `--swap redis://…`, what does not compress into the limit goes to another machine's memory.
//!
//! ```text
//! member: pager ─ sealed blocks ─ Unix socket ─▶ command: gateway ─ client ─▶ server, or the nodes of a cluster
//!                                                `gateway`, `session` (tries), `server` (keys), `nodes`, `address`
//! ```
//! Everything above the member's block I/O is as with a file: clusters, runs, checksums, and what is done about errors.
//! What leaves the process is always encrypted and authenticated there, with the place it is for, so neither the command
//! nor the server can read it, change it, or give back another block for it unnoticed.

pub mod address;
pub mod gateway;
mod nodes;
mod redirect;
mod server;
mod session;

pub use server::Server;
pub use session::Session;

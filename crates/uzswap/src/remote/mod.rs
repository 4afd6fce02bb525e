//! The remote tier: `--swap redis://…` keeps what does not compress into the limit in another machine's memory.
//!
//! ```text
//! member: pager ─ sealed blocks ─ Unix socket ─▶ command: gateway ─ client ─▶ server, or the nodes of a cluster
//!                                                `gateway`, `session` (tries), `server` (keys), `nodes`, `address`
//! ```
//! Above the member's block I/O everything is as with a file: clusters, runs, checksums, and the handling of errors. A member
//! encrypts and authenticates each block, together with its place, before the block leaves the process. So neither the command
//! nor the server can read it, change it, or return another block for it unnoticed.

pub mod address;
pub mod gateway;
mod nodes;
mod redirect;
mod server;
mod session;

pub use server::Server;
pub use session::Session;

//! uzswap's kernel interfaces, one module each: preconditions, errors, the version each came with.
pub mod blockio;
pub mod crew;
pub mod eventfd;
pub mod lock;
pub mod maps;
pub mod memfd;
pub mod pagemap;
pub mod probe;
pub mod process;
pub mod raw;
pub mod rwlock;
pub mod socket;
pub mod stream;
pub mod thread;
pub mod uffd;
pub mod uffd_shared;
pub mod uring;

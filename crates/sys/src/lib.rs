//! uzswap's kernel interfaces, one module for each, and synchronisation on futexes. Each module states its
//! preconditions and errors, and the kernel version that it needs.
pub mod blockio;
pub mod crew;
pub mod eventfd;
pub mod loader;
pub mod lock;
pub mod maps;
pub mod memfd;
pub mod noted;
pub mod owner;
pub mod pagemap;
pub mod probe;
pub mod process;
pub mod raw;
pub mod rights;
pub mod rwlock;
pub mod socket;
pub mod stream;
pub mod thp;
pub mod thread;
pub mod transfer;
pub mod uffd;
pub mod uffd_shared;
pub mod uring;

/// Prints why a test cannot run here, if the test runner shows output.
#[cfg(test)]
pub(crate) fn skip(reason: &str) {
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("    SKIPPED {test}: {reason}\n"));
}

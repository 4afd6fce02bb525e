//! The command `uzswap`.
fn main() {}

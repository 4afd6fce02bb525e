//! The stack that the command was given, which may be a small one (`ulimit -s 64`).

use std::thread;

/// The stack on which clap describes the command (bytes).
const ROOM: usize = 1 << 20;

/// Does what takes much stack, as clap's descriptions do: on another where ours is small, and there can be a thread.
///
/// The story: with a stack of 64 KiB the command ended by SIGSEGV before it did anything. And while a thread was started in any case, a
/// signal that libc takes for itself then, 33, was not ignored by the program any more where it had been.
pub fn roomy<T: Send>(work: impl Fn() -> T + Sync) -> T {
    if !is_small() {
        return work();
    }
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(ROOM).spawn_scoped(scope, &work);
        thread.ok().and_then(|thread| thread.join().ok()).unwrap_or_else(&work)
    })
}

/// Whether our stack may not grow as large (or nobody knows).
fn is_small() -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: an out-parameter of the right type.
    unsafe { libc::getrlimit(libc::RLIMIT_STACK, &raw mut limit) };
    limit.rlim_cur < ROOM as u64
}

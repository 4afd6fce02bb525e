//! The command's own stack, which may be small (`ulimit -s 64`).

use std::thread;

/// Bytes of stack that clap needs to describe the command.
const ROOM: usize = 1 << 20;

/// Calls `work`, which needs much stack, such as clap's descriptions: on another thread if our stack is small and a thread can be
/// started.
///
/// The story: with a stack of 64 KiB the command ended by SIGSEGV before it did anything. When a thread was always started, libc
/// took signal 33 for itself, so a program no longer ignored it where its caller had set that.
pub fn roomy<T: Send>(work: impl Fn() -> T + Sync) -> T {
    if !is_small() {
        return work();
    }
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(ROOM).spawn_scoped(scope, &work);
        thread.ok().and_then(|thread| thread.join().ok()).unwrap_or_else(&work)
    })
}

/// Whether our stack may not grow to [`ROOM`] bytes, or that is unknown.
fn is_small() -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the out-parameter is of the right type and outlives the call.
    unsafe { libc::getrlimit(libc::RLIMIT_STACK, &raw mut limit) };
    limit.rlim_cur < ROOM as u64
}

//! The program's end of a connection for questions and orders.
//!
//! A forked child has a copy of it. There the copy would take answers that the parent waits for, and keep what ends with the
//! connection (protection, pins) as long as the child lives. So it is closed before the program's code runs in the child. No lock
//! is held over the fork for that: a question may wait for hours, and other libraries' fork handlers may make connections and end
//! them.

use super::attach::see_forks;
use super::owner::shut;
use super::wire::{self, Words};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering::*};
use std::sync::{Mutex, PoisonError};
use uzswap_sys::raw;

/// A connection that carries one call at a time.
pub(super) struct Line {
    socket: ManuallyDrop<OwnedFd>,
    entry: &'static Entry,
    /// Held by the calling thread. In a forked child the holder may not exist.
    turn: Mutex<()>,
}

/// An entry in the list of connections, which is never freed.
struct Entry {
    /// The connection's descriptor, [`FREE`] or [`CLOSED`].
    fd: AtomicI32,
    next: AtomicPtr<Entry>,
}

/// The entry is free.
const FREE: i32 = -1;
/// The connection of a forked child, which has no part in it.
const CLOSED: i32 = -2;

/// The connections of this process.
static FIRST: AtomicPtr<Entry> = AtomicPtr::new(core::ptr::null_mut());

fn entries() -> impl Iterator<Item = &'static Entry> {
    let entry = |at: &AtomicPtr<Entry>| {
        // SAFETY: null, or an entry, which is whole before it is put here, and is never freed.
        unsafe { at.load(Acquire).as_ref::<'static>() }
    };
    std::iter::successors(entry(&FIRST), move |e| entry(&e.next))
}

/// Puts a descriptor into the list.
fn list(fd: i32) -> &'static Entry {
    let free = entries().find(|e| e.fd.compare_exchange(FREE, fd, AcqRel, Relaxed).is_ok());
    free.unwrap_or_else(|| {
        let new = Box::leak(Box::new(Entry { fd: AtomicI32::new(fd), next: AtomicPtr::default() }));
        let at = core::ptr::from_mut(new);
        // SAFETY: just made; from here on it is only shared.
        let new = unsafe { &*at };
        let first = |next| {
            new.next.store(next, Relaxed);
            Some(at)
        };
        let _ = FIRST.fetch_update(AcqRel, Acquire, first);
        new
    })
}

impl Line {
    /// Takes ownership of a connection.
    pub fn new(socket: OwnedFd) -> Self {
        see_forks();
        Self { entry: list(socket.as_raw_fd()), socket: ManuallyDrop::new(socket), turn: Mutex::new(()) }
    }

    /// Makes a call. `ENOTCONN`: in a forked child.
    pub fn call(&self, request: &[u64]) -> io::Result<Words> {
        if self.entry.fd.load(Acquire) == CLOSED {
            return Err(io::Error::from_raw_os_error(libc::ENOTCONN));
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        wire::call(&self.socket, request).map(|(words, _)| words)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let fd = self.entry.fd.swap(FREE, AcqRel);
        if fd >= 0 {
            // This also serves a child that is forked just now, and does not find the connection in the list.
            shut(&self.socket);
            raw::close(fd);
        }
    }
}

/// In a forked child: closes all connections of the parent.
pub(super) fn close_all() {
    for entry in entries() {
        let fd = entry.fd.load(Acquire);
        if fd >= 0 {
            raw::close(fd);
            entry.fd.store(CLOSED, Release);
        }
    }
}

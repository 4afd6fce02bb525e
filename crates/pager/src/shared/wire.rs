//! What owner and others say to each other: messages of sixteen words, some with descriptors.
//!
//! A call is `[op, arguments…]`, its answer `[0 or an error number, results…]`. Every message is checked for its length
//! and every argument for its range: the other end may be anything.

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use uzswap_sys::socket;

/// A message.
pub(super) type Words = [u64; 16];

/// First word of a connection: protocol and version.
pub(super) const HELLO: u64 = 0x757a_7368_0000_0002;

/// What a connection is for: the second word of HELLO.
pub(super) const FOR_MAPPING: u64 = 1;
/// Questions and orders without a mapping.
pub(super) const FOR_CONTROL: u64 = 2;

/// Calls.
pub(super) mod op {
    /// Page a range out: first, end → pages that went.
    pub const PAGEOUT: u64 = 1;
    /// Bring a range in: first, end → pages that came.
    pub const PAGEIN: u64 = 2;
    /// Drop a range's contents: first, end.
    pub const REMOVE: u64 = 3;
    /// Clear soft-dirty bits of the connection's mapping: first, end.
    pub const CLEAR_SOFT_DIRTY: u64 = 4;
    /// Write-protect: first, end, mapping or [`ALL`](super::ALL).
    pub const PROTECT: u64 = 5;
    /// End that: first, end, mapping or [`ALL`](super::ALL).
    pub const UNPROTECT: u64 = 6;
    /// Wait for a write to a protected page: milliseconds → 1, page (or 0: none came).
    pub const NEXT_WRITE: u64 = 7;
    /// Figures.
    pub const STATS: u64 = 8;
    /// The mapping's process is about to fork: → a token for the child.
    pub const FORK: u64 = 9;
    /// A round of ageing begins.
    pub const AGE: u64 = 10;
    /// Page out what was not touched for: milliseconds → pages.
    pub const IDLE: u64 = 11;
    /// Pages touched within: milliseconds → pages, known.
    pub const WORKING_SET: u64 = 12;
    /// The mapping is gone.
    pub const DETACH: u64 = 13;
    /// Set a mapping's marker byte, to see what an unknown one does: page, byte.
    pub const INJECT_MARKER: u64 = 14;
    /// Keep a range in memory: first, end → a number.
    pub const PIN: u64 = 16;
    /// End that: the number.
    pub const UNPIN: u64 = 17;
    /// See whether doubtful ranges were removed.
    pub const SETTLE: u64 = 18;
    /// More figures → whether removes are seen, doubts, pages lost for one, faults served beside who faulted.
    pub const MORE_STATS: u64 = 19;
    /// Of the owner only: a new connection, as a descriptor.
    pub const CONNECT: u64 = 20;
    /// Of the owner only: listen at a path, whose bytes follow.
    pub const SERVE: u64 = 21;
    /// Of the owner only: end.
    pub const STOP: u64 = 22;
    /// Of the owner only: another limit, in bytes.
    pub const LIMIT: u64 = 23;
    /// Make room down to the limit → bytes that count against it then.
    pub const SHRINK: u64 = 24;
    /// For tests: what is to happen, and how often or whether. See [`INJECT_BLIND`](super::INJECT_BLIND) and those after it.
    pub const INJECT: u64 = 30;
}

/// Every mapping, also those to come.
pub(super) const ALL: u64 = u64::MAX;

/// To a mapping's watcher: forget all PTEs and answer with the number. It drops them together with that of the page behind the
/// region, which no program uses: so the event that this raises is known for what it is.
pub(super) const WATCH_AGE: u64 = 1;

/// So many events are read without having been expected.
pub(super) const INJECT_BLIND: u64 = 1;
/// So many closings of the gate fail.
pub(super) const INJECT_GATE: u64 = 2;
/// Page-outs on request stop (1) between reading their pages and storing them, until they may go on (0).
pub(super) const INJECT_HOLD: u64 = 3;
/// Answers when a page-out is held.
pub(super) const INJECT_HELD: u64 = 4;
/// No thread of a mapping reads its messages (1), until they may again (0).
pub(super) const INJECT_DEAF: u64 = 5;
/// With the gate closed the kernel has no memory for some of what is asked next: a bit for each, the lowest for the first.
pub(super) const INJECT_REFUSE: u64 = 6;
/// Mappings' faults are served beside who faults from the first fault on, whatever that costs (1), or as it is best (0).
pub(super) const INJECT_NEAR: u64 = 7;
/// The threads that do so stop before they read ([`BEFORE_READING`]) or before they wake ([`BEFORE_WAKING`]), until they may go on (0).
pub(super) const INJECT_STARVE: u64 = 8;
/// See [`INJECT_STARVE`].
pub(super) const BEFORE_READING: u64 = 1;
/// See [`INJECT_STARVE`].
pub(super) const BEFORE_WAKING: u64 = 2;

/// Bytes of a message.
pub(super) const BYTES: usize = size_of::<Words>();

/// Sends a message.
pub(super) fn send(socket: &OwnedFd, words: &Words, fds: &[RawFd]) -> io::Result<()> {
    let mut bytes = [0u8; BYTES];
    for (to, word) in bytes.chunks_mut(8).zip(words) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    socket::send(socket, &bytes, fds)
}

/// Receives a message; `UnexpectedEof` when the other end is gone.
pub(super) fn receive(socket: &OwnedFd) -> io::Result<(Words, Vec<OwnedFd>)> {
    let mut bytes = [0u8; BYTES];
    let (n, fds) = socket::receive(socket, &mut bytes)?;
    match n {
        BYTES => Ok((std::array::from_fn(|i| u64::from_ne_bytes(std::array::from_fn(|k| bytes[8 * i + k]))), fds)),
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not a message of uzswap's")),
    }
}

/// A message of a few words.
pub(super) fn words(given: &[u64]) -> Words {
    let mut all = [0; 16];
    all[..given.len()].copy_from_slice(given);
    all
}

/// Makes a call and waits for its answer; `UnexpectedEof` when the owner is gone.
pub(super) fn call(socket: &OwnedFd, request: &[u64]) -> io::Result<(Words, Vec<OwnedFd>)> {
    let (answer, fds) =
        send(socket, &words(request), &[]).and_then(|()| receive(socket)).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                io::Error::new(io::ErrorKind::UnexpectedEof, "the owner of the shared region has ended")
            }
            _ => e,
        })?;
    match answer[0] {
        0 => Ok((answer, fds)),
        errno => Err(io::Error::from_raw_os_error(errno as i32)),
    }
}

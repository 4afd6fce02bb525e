//! Messages between the owner and attached processes: sixteen words each, some with descriptors.
//!
//! A call is `[op, arguments…]`, its answer `[0 or an error number, results…]`. The length of every message and the range of
//! every argument are checked: the other end may be anything.

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use uzswap_sys::socket;

pub(super) type Words = [u64; 16];

/// First word of a connection: protocol and version.
pub(super) const HELLO: u64 = 0x757a_7368_0000_0002;

/// Purpose of a connection, the second word of HELLO: a mapping.
pub(super) const FOR_MAPPING: u64 = 1;
/// The same: questions and orders without a mapping.
pub(super) const FOR_CONTROL: u64 = 2;

/// The calls: arguments → results.
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
    /// End write-protection: first, end, mapping or [`ALL`](super::ALL).
    pub const UNPROTECT: u64 = 6;
    /// Wait for a write to a protected page: milliseconds → 1, page (or 0: none came).
    pub const NEXT_WRITE: u64 = 7;
    /// Figures of the region.
    pub const STATS: u64 = 8;
    /// The mapping's process is about to fork: → a token for the child.
    pub const FORK: u64 = 9;
    /// Begin a round of ageing → its number.
    pub const AGE: u64 = 10;
    /// Page out what was not touched for some time: milliseconds → pages.
    pub const IDLE: u64 = 11;
    /// Count pages touched within some time: milliseconds → pages.
    pub const WORKING_SET: u64 = 12;
    /// The mapping is gone.
    pub const DETACH: u64 = 13;
    /// For tests: set a mapping's marker byte to see what an unknown one does: page, byte.
    pub const INJECT_MARKER: u64 = 14;
    /// Keep a range in memory: first, end → a number.
    pub const PIN: u64 = 16;
    /// End a pin: its number.
    pub const UNPIN: u64 = 17;
    /// Determine whether doubtful ranges were removed.
    pub const SETTLE: u64 = 18;
    /// More figures → whether removes are seen, doubts, pages lost for one, faults served beside the faulting thread.
    pub const MORE_STATS: u64 = 19;
    /// From the owner's handle only: a new connection, as a descriptor.
    pub const CONNECT: u64 = 20;
    /// From the owner's handle only: listen at a path, whose bytes follow.
    pub const SERVE: u64 = 21;
    /// From the owner's handle only: end.
    pub const STOP: u64 = 22;
    /// From the owner's handle only: another limit, in bytes.
    pub const LIMIT: u64 = 23;
    /// Make room down to the limit → bytes charged then.
    pub const SHRINK: u64 = 24;
    /// For tests: what is to happen, and how often or whether. See [`INJECT_BLIND`](super::INJECT_BLIND) and those after it.
    pub const INJECT: u64 = 30;
}

/// Every mapping, those made later included.
pub(super) const ALL: u64 = u64::MAX;

/// To a mapping's watcher: drop all PTEs and answer with the number. The watcher drops them together with that of the page behind
/// the region, which no program uses; so the owner recognises the event that this raises.
pub(super) const WATCH_AGE: u64 = 1;

/// This many events are read without having been expected.
pub(super) const INJECT_BLIND: u64 = 1;
/// This many closings of the gate fail.
pub(super) const INJECT_GATE: u64 = 2;
/// Page-outs on request stop between reading their pages and storing them (1), until they may go on (0).
pub(super) const INJECT_HOLD: u64 = 3;
/// Answers once a page-out is stopped there.
pub(super) const INJECT_HELD: u64 = 4;
/// No mapping's thread reads its messages (1), until they may again (0).
pub(super) const INJECT_DEAF: u64 = 5;
/// With the gate closed the kernel has no memory for some of the next questions: a bit for each, the lowest for the first.
pub(super) const INJECT_REFUSE: u64 = 6;
/// Faults are served beside the faulting thread from the first fault on, whatever that costs (1), or where it is faster (0).
pub(super) const INJECT_NEAR: u64 = 7;
/// The threads that do so stop before they read ([`BEFORE_READING`]) or before they wake ([`BEFORE_WAKING`]), until they may go
/// on (0).
pub(super) const INJECT_STARVE: u64 = 8;
/// See [`INJECT_STARVE`].
pub(super) const BEFORE_READING: u64 = 1;
/// See [`INJECT_STARVE`].
pub(super) const BEFORE_WAKING: u64 = 2;

pub(super) const BYTES: usize = size_of::<Words>();

/// Sends a message.
pub(super) fn send(socket: &OwnedFd, words: &Words, fds: &[RawFd]) -> io::Result<()> {
    let mut bytes = [0u8; BYTES];
    for (to, word) in bytes.chunks_mut(8).zip(words) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    socket::send(socket, &bytes, fds)
}

/// Receives a message; `UnexpectedEof` if the other end is gone.
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

/// Makes a call and waits for its answer; `UnexpectedEof` if the owner is gone.
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

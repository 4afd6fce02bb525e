//! A pin on a range of a shared region, as its holder sees it.

use super::wire::op;
use super::{SharedControl, SharedMapping};
use std::io;
use std::ops::Range;

/// The connection that holds a pin.
#[derive(Debug)]
enum Holder<'a> {
    Mapping(&'a SharedMapping),
    Control(&'a SharedControl),
}

/// Keeps a range of a shared region in memory, until it is dropped or its process ends.
///
/// Without a pin a device's data can be lost: a page may be evicted between the moment at which the kernel pins it (a read by
/// direct I/O begins, a buffer of io_uring is registered, VFIO maps guest memory) and the device's last write, and the device
/// then writes to a page that is no longer the region's. So the order is: `pin`, then have the kernel pin, let the device write,
/// have the kernel unpin, drop this. Pins add up: a page may be evicted once the last is gone.
#[derive(Debug)]
#[must_use = "the range is kept in memory as long as this lives"]
pub struct SharedPin<'a> {
    holder: Holder<'a>,
    id: u64,
    process: u32,
}

fn no_room(e: io::Error) -> io::Error {
    let text = "the region's limit has no room for so much pinned at once: pin less, or have its owner raise it";
    if e.kind() == io::ErrorKind::OutOfMemory { io::Error::new(e.kind(), text) } else { e }
}

impl SharedMapping {
    /// Brings a range into memory, pages never touched included, and keeps it there and mapped: see [`SharedPin`]. Neither the
    /// limit nor a request evicts it, and [`SharedMapping::remove`] refuses it. (`madvise(MADV_REMOVE)` and unmapping do not ask,
    /// as elsewhere.) A forked child's mapping has no pins.
    ///
    /// # Errors
    /// `OutOfMemory`: the limit has no room for it and the other pins. As [`SharedControl::page_out`].
    pub fn pin(&self, range: Range<usize>) -> io::Result<SharedPin<'_>> {
        let id = self.attached.call_range(op::PIN, range, 0).map_err(no_room)?[1];
        Ok(SharedPin { holder: Holder::Mapping(self), id, process: std::process::id() })
    }
}

impl SharedControl {
    /// Keeps a range in memory, for whoever maps it: see [`SharedMapping::pin`]. The pin ends with this connection.
    ///
    /// # Errors
    /// As there.
    pub fn pin(&self, range: Range<usize>) -> io::Result<SharedPin<'_>> {
        let id = self.call_range(op::PIN, range, 0).map_err(no_room)?[1];
        Ok(SharedPin { holder: Holder::Control(self), id, process: std::process::id() })
    }
}

impl Drop for SharedPin<'_> {
    fn drop(&mut self) {
        // A forked child has a copy of this value, but not the pin.
        if std::process::id() != self.process {
            return;
        }
        // If the owner is gone so is the pin.
        let _ = match self.holder {
            Holder::Mapping(m) => m.attached.call(&[op::UNPIN, self.id]),
            Holder::Control(c) => c.call(&[op::UNPIN, self.id]),
        };
    }
}

//! Keeps pages in memory that a device may write to past every page table.
//!
//! A pin is a range of pages that belongs to a connection. It ends when it is given up, or with its connection, and so with its
//! process. The owner neither evicts nor drops pinned pages; they are not on the lists. User space cannot see the kernel's pins,
//! so a program that has pages pinned there (direct I/O, registered buffers, VFIO) must say so here first.

use super::calls::{BRING, hold_mapped};
use super::engine::Engine;
use super::mapping::Pages;
use super::owner::Server;
use crate::frames::arena::PAGE;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use uzswap_mm::pagetable::Tag;

struct Pin {
    id: u64,
    connection: u64,
    from: u64,
    to: u64,
}

/// The pins, and the pages that have one. Owner: the engine's lock.
pub(super) struct Pins {
    list: Vec<Pin>,
    pages: Pages,
    /// Number of pinned pages.
    pinned: usize,
    /// For pages with several pins: how many more than one.
    more: HashMap<u64, u32>,
}

impl Pins {
    /// No pins, on a region of so many pages.
    pub fn new(pages: u64) -> Self {
        Self { list: Vec::new(), pages: Pages::new(pages), pinned: 0, more: HashMap::new() }
    }

    pub fn has(&self, page: u64) -> bool {
        self.pinned != 0 && self.pages.has(page)
    }

    pub fn metadata_bytes(&self) -> usize {
        self.pages.bytes()
    }
}

impl Engine {
    /// Pins a range; pages of it that are out stay out for now. Returns the pin's number.
    ///
    /// # Errors
    /// `ENOMEM`: the limit has no room for it.
    fn pin(&mut self, from: u64, to: u64, connection: u64) -> io::Result<u64> {
        let more = (from..to).filter(|p| !self.pins.pages.has(*p)).count();
        if (self.pins.pinned + more) * PAGE + self.margin() > self.options.limit {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        self.pins.pinned += more;
        for page in from..to {
            if self.pins.pages.has(page) {
                *self.pins.more.entry(page).or_default() += 1;
            }
            self.pins.pages.put(page, true);
            // A page on its way out stays.
            self.rescue(page);
        }
        let id = self.next_id;
        self.next_id += 1;
        self.pins.list.push(Pin { id, connection, from, to });
        Ok(id)
    }

    /// Ends one pin of a connection, or all of them.
    pub fn unpin(&mut self, connection: u64, id: Option<u64>) -> bool {
        let is_meant = |p: &mut Pin| p.connection == connection && id.is_none_or(|id| p.id == id);
        let ended: Vec<Pin> = self.pins.list.extract_if(.., is_meant).collect();
        for page in ended.iter().flat_map(|p| p.from..p.to) {
            if let Entry::Occupied(mut more) = self.pins.more.entry(page) {
                *more.get_mut() -= 1;
                if *more.get() == 0 {
                    more.remove();
                }
                continue;
            }
            self.pins.pages.put(page, false);
            self.pins.pinned -= 1;
            let pte = self.pt.get(page);
            if pte.tag() == Tag::Resident {
                self.list_resident(page, 1, true, |_| pte.copy());
            }
        }
        !ended.is_empty()
    }
}

/// Pins a range, and brings all of it into memory, and into the caller's mapping if it has one. Returns the pin's number.
pub(super) fn pin(server: &Server, from: u64, to: u64, connection: u64, mapping: Option<u64>) -> io::Result<u64> {
    let id = server.engine().pin(from, to, connection)?;
    let mut at = from;
    while at < to {
        let mut engine = server.engine();
        engine.make_room(BRING);
        match hold_mapped(&mut engine, at, to.min(at + BRING), mapping) {
            Ok(n) => at += n,
            Err(e) => {
                engine.unpin(connection, Some(id));
                return Err(e);
            }
        }
    }
    server.want_reclaim();
    Ok(id)
}

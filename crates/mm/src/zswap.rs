//! zswap: how a folio enters the compressed pool, whole or not at all.
//!
//! A folio of any order (4 KiB to 2 MiB) is stored as the units in which it was compressed, one entry for each. It
//! succeeds or fails as one:
//!
//! ```text
//! older entries go ─▶ admit (limits, once) ─▶ put every unit ─▶ index every page ─▶ stored
//!                          │ refused              │ no place         │ no entry
//!                          ▼                      ▼                  ▼
//!                       refused ◀──────── units put are taken back, pages indexed are un-indexed
//! ```
//! The entries of earlier contents at the folio's pages go *first*, whatever becomes of the store: also if the folio is
//! refused, or is not to enter the pool at all. So a page's entry names what was stored there last, or nothing. (The
//! kernel once invalidated after its early returns, and stale data could be read.)
//!
//! The pool's own limit is checked once, when the folio begins, so the pool exceeds it by one folio at most: 2 MiB of
//! contents and their headers. While units are put, only checks without such slack can refuse one: the groups'
//! `memory.zswap.max`, and the pool when it has no place.
//!
//! Charges balance by construction. A unit is charged where it is put and uncharged where it is taken back, by the same
//! [`Store`], and for a store under way only this file calls the two. (When a store stopped half way, the kernel once
//! uncharged pages that it had never charged, and the counter underflowed.)
//!
//! Nothing here does I/O or knows memory. The pager implements [`Store`] over its tables; a test implements one that
//! fails at any step. Owner: the pager's lock, held by the caller.

use crate::pageset::PageSet;

/// Why a folio was not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Folios of this order must not enter the pool.
    SwitchedOff,
    /// It would exceed a limit.
    Limit,
    /// The compressor failed on a unit, or its output did not decompress to the input.
    Compressor,
    /// The pool had no place.
    NoPlace,
    /// No entry could be made for a page.
    NoIndex,
}

/// A unit of compression of the folio that is being stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Its first page.
    pub vpn: u64,
    /// Pages as a power of two.
    pub order: u8,
    /// The pages whose contents are still what was compressed, a bit each. The program has taken back the others
    /// meanwhile.
    pub live: PageSet,
}

impl Unit {
    /// The pages to store: index in the unit, and page number.
    pub fn pages(self) -> impl Iterator<Item = (usize, u64)> {
        (0..1usize << self.order).filter(move |i| self.live.has(*i)).map(move |i| (i, self.vpn + i as u64))
    }
}

/// The result of compressing a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packed {
    /// All zeros: it needs no place.
    Zero,
    /// Bytes, which the [`Store`] finds by the unit's number.
    Bytes,
    /// The compressor failed.
    Failed,
}

/// The tables that a folio is stored into.
pub trait Store {
    /// Drops the earlier entry of a page, if it has one.
    fn invalidate(&mut self, vpn: u64);
    /// Whether limits let a folio in, whatever its size. May shrink the pool once to make room.
    ///
    /// # Errors
    /// The reason why not.
    fn admit(&mut self) -> Result<(), Refused>;
    /// Gives unit number `at` a place, copies its bytes there, and charges it.
    ///
    /// # Errors
    /// The reason why not; then nothing is charged.
    fn put(&mut self, at: usize, unit: Unit) -> Result<u32, Refused>;
    /// Takes back a unit that was [put](Store::put) and that no page refers to, and uncharges it.
    fn take_back(&mut self, handle: u32);
    /// Makes the entry of a page: page `index` of the unit at `handle`, or zeros.
    ///
    /// # Errors
    /// The reason why not; then the page is as before.
    fn index(&mut self, vpn: u64, place: Option<(u32, usize)>) -> Result<(), Refused>;
    /// Undoes [`Store::index`]: the page's contents are where they were, and its entry refers neither to a unit nor to
    /// a kept copy.
    fn unindex(&mut self, vpn: u64);
}

/// Begins the store of a folio, before anything is compressed: drops the older entries of its pages, and checks the
/// limits once.
///
/// # Errors
/// The reason why the folio may not enter. Its older entries are gone all the same.
pub fn begin(store: &mut impl Store, pages: impl Iterator<Item = u64>, allowed: bool) -> Result<(), Refused> {
    pages.for_each(|vpn| store.invalidate(vpn));
    if !allowed {
        return Err(Refused::SwitchedOff);
    }
    store.admit()
}

/// Ends the store of a folio whose units are compressed: places and entries for all of them, or for none.
///
/// `places` is scratch space for the handles of the units.
///
/// # Errors
/// The reason why not. Then nothing of the folio is in the pool, and its contents are where they were. The pager may
/// have lost what it kept of these pages besides: a copy in the pool (which [`Store::index`] ends), or a place on disk
/// with the same contents (which the unit that was put took over). Either would have saved work, but was nobody's only
/// copy.
pub fn finish(store: &mut impl Store, units: &[(Unit, Packed)], places: &mut Vec<Option<u32>>) -> Result<(), Refused> {
    places.clear();
    for (at, (unit, packed)) in units.iter().enumerate() {
        let put = match packed {
            Packed::Failed if !unit.live.is_empty() => Err(Refused::Compressor),
            Packed::Bytes if !unit.live.is_empty() => store.put(at, *unit).map(Some),
            _ => Ok(None),
        };
        match put {
            Ok(place) => places.push(place),
            Err(why) => {
                places.drain(..).flatten().for_each(|handle| store.take_back(handle));
                return Err(why);
            }
        }
    }
    let mut indexed = 0;
    for ((unit, _), place) in units.iter().zip(places.iter()) {
        for (i, vpn) in unit.pages() {
            if let Err(why) = store.index(vpn, place.map(|handle| (handle, i))) {
                let pages = units.iter().flat_map(|(unit, _)| unit.pages());
                pages.take(indexed).for_each(|(_, vpn)| store.unindex(vpn));
                places.drain(..).flatten().for_each(|handle| store.take_back(handle));
                return Err(why);
            }
            indexed += 1;
        }
    }
    Ok(())
}

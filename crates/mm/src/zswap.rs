//! zswap: how a folio enters the compressed pool, whole or not at all.
//!
//! A folio of any order (4 KiB to 2 MiB) is stored as the units it was compressed in, one entry for each. It succeeds
//! or fails as one:
//!
//! ```text
//! older entries go ─▶ admit (limits, once) ─▶ put every unit ─▶ index every page ─▶ stored
//!                          │ refused              │ no place         │ no entry
//!                          ▼                      ▼                  ▼
//!                       refused ◀──────── units put are taken back, pages indexed are un-indexed
//! ```
//! The entries that earlier contents left at the folio's pages go *first*, whatever comes of the store: also when the
//! folio is refused, or is not to enter the pool at all. So what is found at a page's entry is what was stored there
//! last, or nothing. (In the kernel the invalidation came after the early returns once, and stale data could be read.)
//!
//! The pool's own limit is asked for once, when the folio begins, so it is overshot by one folio at most: 2 MiB of contents and their
//! headers. While its units are put only what has no such slack can say no, for each: the groups' `memory.zswap.max`, and the pool
//! when it has no place.
//!
//! Charges balance by construction: a unit is charged where it is put and uncharged where it is taken back, by the same
//! [`Store`], and this file is the only caller of both for a store under way. (The kernel once uncharged pages of a
//! store that stopped half way which it had never charged, and the counter underflowed.)
//!
//! Nothing here does I/O or knows memory: [`Store`] is what the pager gives its tables as, and what a test can let fail
//! at every step. Owner: the pager's lock, held by the caller.

use crate::pageset::PageSet;

/// Why a folio was not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Folios of this order are not to enter the pool.
    SwitchedOff,
    /// A limit would be exceeded.
    Limit,
    /// The compressor failed on a unit, or its result did not decompress to what went in.
    Compressor,
    /// The pool had no place.
    NoPlace,
    /// A page's entry could not be made.
    NoIndex,
}

/// A unit of compression of the folio being stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Its first page.
    pub vpn: u64,
    /// Pages as a power of two.
    pub order: u8,
    /// Which of its pages still are what was compressed: a bit each. The others were taken back by the program meanwhile.
    pub live: PageSet,
}

impl Unit {
    /// Its pages that are to be stored.
    pub fn pages(self) -> impl Iterator<Item = (usize, u64)> {
        (0..1usize << self.order).filter(move |i| self.live.has(*i)).map(move |i| (i, self.vpn + i as u64))
    }
}

/// What became of a unit when it was compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packed {
    /// All zeros: it needs no place.
    Zero,
    /// It has bytes, which the [`Store`] finds by the unit's number.
    Bytes,
    /// The compressor failed.
    Failed,
}

/// The tables a folio is stored into.
pub trait Store {
    /// Drops the older entry of a page, if there is one.
    fn invalidate(&mut self, vpn: u64);
    /// Whether limits let a folio in, whatever its size. May shrink once to make it so.
    ///
    /// # Errors
    /// Why not.
    fn admit(&mut self) -> Result<(), Refused>;
    /// Gives unit number `at` a place, copies its bytes there, and charges it.
    ///
    /// # Errors
    /// Why not; nothing is charged then.
    fn put(&mut self, at: usize, unit: Unit) -> Result<u32, Refused>;
    /// Takes a unit back that was [put](Store::put) and to which no page refers, and uncharges it.
    fn take_back(&mut self, handle: u32);
    /// Makes the entry of a page: page `index` of the unit at `handle`, or zeros.
    ///
    /// # Errors
    /// Why not; the page is as before then.
    fn index(&mut self, vpn: u64, place: Option<(u32, usize)>) -> Result<(), Refused>;
    /// Undoes [`Store::index`]: the page's contents are where they were, and its entry refers to no unit, nor to a kept copy any more.
    fn unindex(&mut self, vpn: u64);
}

/// Begins the store of a folio, before anything is compressed: older entries go, and limits are asked for, once.
///
/// # Errors
/// Why the folio may not enter. Its older entries are gone all the same.
pub fn begin(store: &mut impl Store, pages: impl Iterator<Item = u64>, allowed: bool) -> Result<(), Refused> {
    pages.for_each(|vpn| store.invalidate(vpn));
    if !allowed {
        return Err(Refused::SwitchedOff);
    }
    store.admit()
}

/// Ends the store of a folio, when its units are compressed: places and entries for all, or for none.
///
/// `places` is scratch, for the handles of the units.
///
/// # Errors
/// Why not. Nothing of the folio is in the pool then, and its contents are where they were. What the pager kept of its pages beside them
/// may be gone: a copy in the pool ([`Store::index`] ends it), or a place on disk that holds the same (which the unit that was put took
/// over). It would have saved work, and was nobody's only copy.
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

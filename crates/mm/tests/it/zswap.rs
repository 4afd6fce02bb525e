//! The store of folios, compared with a flat model: a map from page to contents.
//!
//! The tables are the engine's own (page table, pool, codecs), and every step of a store can be made to fail.

use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::HashMap;
use uzswap_mm::codec::{Algorithm, Compressor, Decompressor, Encoding};
use uzswap_mm::pageset::PageSet;
use uzswap_mm::pagetable::{PageTable, Pte, Tag};
use uzswap_mm::zsmalloc::{Handle, ZsPool};
use uzswap_mm::zswap::{self, Packed, Refused, Store, Unit};

const PAGE: usize = 4096;
/// Pages of the model's memory.
const SPACE: u64 = 1024;

/// The step of the next store that fails: the `at`-th call of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fail {
    Nothing,
    SwitchedOff,
    Limit,
    Compressor(usize),
    Put(usize),
    Index(usize),
}

/// A pool with memory, like the pager's: an object is its length, its encoding, its live pages, and bytes.
struct Tables {
    pt: PageTable,
    pool: ZsPool,
    memory: Vec<u8>,
    objects: HashMap<u32, (usize, Encoding, PageSet, u8)>,
    /// Bytes charged: put minus taken back or released.
    charged: isize,
    fail: Fail,
    puts: usize,
    indexes: usize,
    admits: usize,
    packed: Vec<(Encoding, Vec<u8>)>,
    /// Scratch of all stores, as in the pager: what the last store left in it has no meaning.
    places: Vec<Option<u32>>,
    /// The object decompressed last, until any object goes.
    plain: RefCell<Option<(u32, Vec<u8>)>>,
}

impl Tables {
    fn new() -> Self {
        Self {
            pt: PageTable::new(),
            pool: ZsPool::new(64 << 20),
            memory: vec![0; 64 << 20],
            objects: HashMap::new(),
            charged: 0,
            fail: Fail::Nothing,
            puts: 0,
            indexes: 0,
            admits: 0,
            packed: Vec::new(),
            places: Vec::new(),
            plain: RefCell::new(None),
        }
    }

    fn release(&mut self, handle: u32, index: usize) {
        let object = self.objects.get_mut(&handle).expect("a page refers to a live object");
        assert!(object.2.has(index), "released twice");
        object.2.put(index, false);
        if object.2.is_empty() {
            self.free(handle);
        }
    }

    fn free(&mut self, handle: u32) {
        self.objects.remove(&handle).unwrap();
        self.plain.take();
        self.charged -= self.pool.usable(Handle::from_raw(handle)) as isize;
        self.pool.free(Handle::from_raw(handle));
    }

    /// The contents of a page by its entry; None if the pool has nothing of it.
    fn load(&self, vpn: u64) -> Option<Vec<u8>> {
        let pte = self.pt.get(vpn);
        match pte.tag() {
            Tag::Zero => Some(vec![0; PAGE]),
            Tag::Compressed => {
                let (len, encoding, live, order) = self.objects[&pte.handle()];
                assert!(live.has(pte.index()));
                let mut plain = self.plain.borrow_mut();
                let (_, out) = match plain.take_if(|(handle, _)| *handle == pte.handle()) {
                    Some(known) => plain.insert(known),
                    None => {
                        let at = Handle::from_raw(pte.handle()).offset();
                        let mut out = vec![0; PAGE << order];
                        Decompressor::new().decompress(encoding, &self.memory[at..at + len], &mut out).unwrap();
                        plain.insert((pte.handle(), out))
                    }
                };
                Some(out[pte.index() * PAGE..][..PAGE].to_vec())
            }
            _ => None,
        }
    }

    /// Stores a folio in units of an order. `lost` are the pages that the program took back while they were compressed.
    fn store(&mut self, vpn: u64, order: u8, unit: u8, bytes: &[u8], lost: u64, fail: Fail) -> Result<(), Refused> {
        (self.fail, self.puts, self.indexes, self.admits) = (fail, 0, 0, 0);
        let pages = 1u64 << order;
        zswap::begin(self, vpn..vpn + pages, fail != Fail::SwitchedOff)?;
        let unit = unit.min(order);
        let mut compressor = Compressor::with_source_max(Algorithm::Lz4, PAGE << unit);
        let mut units = Vec::new();
        self.packed.clear();
        for (i, source) in bytes.chunks(PAGE << unit).enumerate() {
            let mut out = vec![0; source.len()];
            let (encoding, len) = compressor.compress(source, &mut out).unwrap_or_else(|| {
                out.copy_from_slice(source);
                (Encoding::Raw, source.len())
            });
            out.truncate(len);
            let packed = match fail {
                Fail::Compressor(at) if at == i => Packed::Failed,
                _ if source.iter().all(|b| *b == 0) => Packed::Zero,
                _ => Packed::Bytes,
            };
            self.packed.push((encoding, out));
            let first = vpn + ((i as u64) << unit);
            let live = (0..1usize << unit).filter(|p| lost & (1 << ((first + *p as u64) % 64)) == 0).collect();
            units.push((Unit { vpn: first, order: unit, live }, packed));
        }
        let mut places = std::mem::take(&mut self.places);
        let stored = zswap::finish(self, &units, &mut places);
        self.places = places;
        stored
    }

    /// Everything balances: the pool holds what entries refer to, and nothing else is charged.
    fn check(&self) {
        let mut live: HashMap<u32, PageSet> = HashMap::new();
        self.pt.for_each(|_, pte| {
            if pte.tag() == Tag::Compressed {
                live.entry(pte.handle()).or_default().put(pte.index(), true);
            }
        });
        assert_eq!(live.len(), self.objects.len(), "objects nobody refers to");
        for (handle, (_, _, bits, _)) in &self.objects {
            assert_eq!(live[handle], *bits);
        }
        assert_eq!(self.charged, self.pool.used_bytes() as isize, "the charge is what the pool uses");
    }
}

impl Store for Tables {
    fn invalidate(&mut self, vpn: u64) {
        let pte = self.pt.get(vpn);
        self.pt.set(vpn, Pte::NONE);
        if pte.tag() == Tag::Compressed {
            self.release(pte.handle(), pte.index());
        }
    }
    fn admit(&mut self) -> Result<(), Refused> {
        self.admits += 1;
        if self.fail == Fail::Limit { Err(Refused::Limit) } else { Ok(()) }
    }
    fn put(&mut self, at: usize, unit: Unit) -> Result<u32, Refused> {
        self.puts += 1;
        if matches!(self.fail, Fail::Put(n) if n + 1 == self.puts) {
            return Err(Refused::NoPlace);
        }
        let (encoding, bytes) = &self.packed[at];
        let handle = self.pool.alloc(bytes.len()).ok_or(Refused::NoPlace)?;
        self.charged += self.pool.usable(handle) as isize;
        self.memory[handle.offset()..][..bytes.len()].copy_from_slice(bytes);
        self.objects.insert(handle.raw(), (bytes.len(), *encoding, unit.live, unit.order));
        Ok(handle.raw())
    }
    fn take_back(&mut self, handle: u32) {
        self.free(handle);
    }
    fn index(&mut self, vpn: u64, place: Option<(u32, usize)>) -> Result<(), Refused> {
        self.indexes += 1;
        if matches!(self.fail, Fail::Index(n) if n + 1 == self.indexes) {
            return Err(Refused::NoIndex);
        }
        self.pt.set(vpn, place.map_or(Pte::new(Tag::Zero, 0), |(handle, i)| Pte::compressed(handle, i, 0)));
        Ok(())
    }
    fn unindex(&mut self, vpn: u64) {
        assert_ne!(self.pt.get(vpn), Pte::NONE, "what was not indexed cannot be un-indexed");
        self.pt.set(vpn, Pte::NONE);
    }
}

/// Contents: zeros, compressible, or not.
fn contents(kind: u8, seed: u64, pages: usize) -> Vec<u8> {
    let mut x = seed | 1;
    let mut out = vec![0u8; pages * PAGE];
    for (i, page) in out.chunks_mut(PAGE).enumerate() {
        match (kind as usize + i) % 4 {
            0 => {}
            1 => page.iter_mut().for_each(|b| {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                *b = x as u8;
            }),
            _ => page.fill(seed as u8 ^ i as u8),
        }
    }
    if kind == 4 {
        out.fill(0);
    }
    out
}

fn fails() -> impl Strategy<Value = Fail> {
    prop_oneof![
        4 => Just(Fail::Nothing),
        1 => Just(Fail::SwitchedOff),
        1 => Just(Fail::Limit),
        1 => (0usize..4).prop_map(Fail::Compressor),
        2 => (0usize..8).prop_map(Fail::Put),
        2 => (0usize..16).prop_map(Fail::Index),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// A1, A2, A4, A9: whatever is stored, refused or taken back, a page reads as what was stored there last or as nothing, and
    /// charges are what the pool uses.
    #[test]
    fn store_agrees_with_flat_memory(
        steps in prop::collection::vec((0u64..SPACE, 0u8..10, 0u8..10, 0u8..5, any::<u64>(), fails(), any::<bool>()), 1..40)
    ) {
        let mut tables = Tables::new();
        let mut model: HashMap<u64, Vec<u8>> = HashMap::new();
        for (at, order, unit, kind, seed, fail, some_lost) in steps {
            let vpn = (at >> order) << order;
            let bytes = contents(kind, seed, 1 << order);
            let lost = if some_lost { seed & seed.rotate_left(7) } else { 0 };
            let stored = tables.store(vpn, order, unit, &bytes, lost, fail);
            for (i, page) in bytes.chunks(PAGE).enumerate() {
                let at = vpn + i as u64;
                if stored.is_ok() && lost & (1 << (at % 64)) == 0 {
                    model.insert(at, page.to_vec());
                } else {
                    model.remove(&at);
                }
            }
            prop_assert_eq!(tables.admits, usize::from(fail != Fail::SwitchedOff), "limits are asked for once a folio (A3)");
            tables.check();
            for at in (0..SPACE).step_by(7).chain(vpn..vpn + (1 << order).min(32)) {
                prop_assert!(tables.load(at) == model.get(&at).cloned(), "page {} differs", at);
            }
        }
        for at in 0..SPACE {
            prop_assert!(tables.load(at) == model.get(&at).cloned(), "page {} differs in the end", at);
            tables.invalidate(at);
        }
        prop_assert_eq!(tables.charged, 0);
    }
}

/// A1: folios of every order are stored whole, in units of every order, and come back.
#[test]
fn a1_every_order_is_stored_whole() {
    for order in 0..=9u8 {
        for unit in [0, 2, 3, 4, 5, 6, 7, 8, 9] {
            let mut tables = Tables::new();
            let bytes = contents(1, 99, 1 << order);
            tables.store(512, order, unit, &bytes, 0, Fail::Nothing).unwrap();
            tables.check();
            let nonzero = bytes.chunks(PAGE << unit.min(order)).filter(|u| u.iter().any(|b| *b != 0)).count();
            assert_eq!(tables.objects.len(), nonzero, "one entry per unit of compression");
            for (i, page) in bytes.chunks(PAGE).enumerate() {
                assert!(tables.load(512 + i as u64).unwrap() == page);
            }
        }
    }
}

/// A2: whichever step fails, nothing of the folio stays, and nothing older either.
///
/// The fix: with large folios switched off, the original returned before it invalidated. A page that had been stored, brought
/// back and written to then still had its old entry in the pool; the folio went to disk, and the next swap-in found the stale
/// entry first.
#[test]
fn a2_a_refused_folio_leaves_no_older_entry() {
    let every: Vec<Fail> = [Fail::SwitchedOff, Fail::Limit]
        .into_iter()
        .chain((0..4).map(Fail::Compressor))
        .chain((0..4).map(Fail::Put))
        .chain((0..16).map(Fail::Index))
        .collect();
    for fail in every {
        let mut tables = Tables::new();
        let (old, new) = (contents(2, 7, 16), contents(2, 8, 16));
        tables.store(0, 4, 2, &old, 0, Fail::Nothing).unwrap();
        let other = contents(2, 9, 4);
        tables.store(16, 2, 2, &other, 0, Fail::Nothing).unwrap();
        // Every fourth page of these contents is zero, so a folio has units of both kinds.
        let why = tables.store(0, 4, 2, &new, 0, fail).unwrap_err();
        let expected = match fail {
            Fail::SwitchedOff => Refused::SwitchedOff,
            Fail::Limit => Refused::Limit,
            Fail::Compressor(_) => Refused::Compressor,
            Fail::Put(_) => Refused::NoPlace,
            Fail::Index(_) => Refused::NoIndex,
            Fail::Nothing => unreachable!("it is refused"),
        };
        assert_eq!(why, expected);
        for vpn in 0..16 {
            assert_eq!(tables.load(vpn), None, "{fail:?}: page {vpn} has an entry");
        }
        assert!(tables.load(16).unwrap() == other[..PAGE], "{fail:?}: a neighbour is as it was");
        tables.check();
    }
}

/// A4, the fix: upstream, a store that stopped half way uncharged all pages of the folio, including those never charged, and the
/// group's counter underflowed to nearly 2^64: from then on every store was refused.
#[test]
fn a4_a_store_that_stops_half_way_uncharges_what_it_charged() {
    for at in 0..4 {
        let mut tables = Tables::new();
        tables.store(64, 2, 2, &contents(2, 3, 4), 0, Fail::Nothing).unwrap();
        let before = tables.charged;
        assert!(before > 0);
        tables.store(0, 4, 2, &contents(2, 5, 16), 0, Fail::Put(at)).unwrap_err();
        assert_eq!(tables.charged, before, "stopped at unit {at}");
        tables.store(0, 4, 2, &contents(2, 5, 16), 0, Fail::Index(4 * at)).unwrap_err();
        assert_eq!(tables.charged, before, "stopped at page {}", 4 * at);
        tables.check();
    }
}

/// The program took all of a unit back while it was compressed, and exactly that unit failed.
#[test]
fn a_unit_that_nobody_needs_stored_refuses_no_folio() {
    let (mut tables, bytes) = (Tables::new(), contents(2, 5, 8));
    let taken_back = 0b1111_0000;
    assert_eq!(tables.store(0, 3, 2, &bytes, taken_back, Fail::Compressor(1)), Ok(()));
    assert!((0..4).all(|vpn| tables.load(vpn).unwrap() == bytes[vpn as usize * PAGE..][..PAGE]));
    assert!((4..8).all(|vpn| tables.load(vpn).is_none()));
    tables.check();
    assert_eq!(
        tables.store(0, 3, 2, &bytes, 0, Fail::Compressor(1)),
        Err(Refused::Compressor),
        "and if they are needed"
    );
}

/// A9: zeros take no memory, at any order.
#[test]
fn a9_zero_folios_take_no_memory() {
    for order in 0..=9 {
        let mut tables = Tables::new();
        tables.store(0, order, 2, &vec![0; PAGE << order], 0, Fail::Nothing).unwrap();
        assert_eq!((tables.charged, tables.pool.held_bytes(), tables.puts), (0, 0, 0));
        assert!((0..1 << order).all(|vpn| tables.pt.get(vpn).tag() == Tag::Zero));
    }
}

/// A3: a limit is checked once per folio, at its start, with all its pages; if it refuses, nothing is stored.
#[test]
fn a3_limits_are_asked_for_once_a_folio() {
    let mut tables = Tables::new();
    tables.store(0, 9, 2, &contents(2, 1, 512), 0, Fail::Nothing).unwrap();
    assert_eq!(tables.admits, 1);
    assert_eq!(tables.store(0, 9, 2, &contents(2, 1, 512), 0, Fail::Limit), Err(Refused::Limit));
    assert_eq!((tables.admits, tables.puts), (1, 0));
}

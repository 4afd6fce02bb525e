//! The trace format: what is written can be read, and damage is reported.

use proptest::prelude::*;
use std::collections::BTreeSet;
use uzswap_mm::trace::*;

fn any_record() -> impl Strategy<Value = Record> {
    let vpn = 0u64..1 << 35;
    prop_oneof![
        (vpn.clone(), 1usize..70_000, 0usize..8).prop_map(|(v, n, k)| {
            let kinds = [
                Kind::Refault,
                Kind::Fresh,
                Kind::Evict,
                Kind::Clean,
                Kind::Free,
                Kind::Drop,
                Kind::MoveFrom,
                Kind::MoveTo,
            ];
            Record::pages(kinds[k], v, n)
        }),
        (vpn.clone(), 0u8..=9, 1usize..2 << 20, 0usize..4).prop_map(|(v, order, len, k)| {
            let kinds = [Kind::Store, Kind::Resize, Kind::WriteBack, Kind::DiskRead];
            Record::of_object(kinds[k], v, order, len.min(4096 << order))
        }),
        (vpn.clone(), 1usize..=16, any::<bool>(), any::<u16>()).prop_map(|(v, n, w, k)| Record::load(v, n, w, k)),
        vpn.prop_map(|v| Record::number(Kind::Fork, v)),
    ]
}

fn file(blocks: &[(BlockHead, Vec<Record>)]) -> Vec<u8> {
    let mut out = Header { limit: 64 << 20, codec: 1 }.write().to_vec();
    for (head, records) in blocks {
        write_block(&mut out, *head, &records.iter().map(Record::pack).collect::<Vec<_>>());
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn records_round_trip(r in any_record()) {
        prop_assert_eq!(Record::unpack(r.pack()), Some(r));
        prop_assert!(r.pack() != 0);
    }

    #[test]
    fn lengths_are_right_to_the_unit(order in 0u8..=9, len in 1usize..=2 << 20) {
        let len = len.min(4096 << order);
        let told = Record::of_object(Kind::Store, 7, order, len).object_bytes();
        let unit = 1usize << order.saturating_sub(3);
        prop_assert!((len..len + unit).contains(&told), "{} {}", told, len);
    }

    #[test]
    fn files_round_trip(
        blocks in prop::collection::vec(
            ((0u32..1024, any::<u64>(), any::<u64>()), prop::collection::vec(any_record(), 0..50)),
            0..8,
        ),
        cut in any::<prop::sample::Index>(),
        flip in any::<prop::sample::Index>(),
    ) {
        let blocks: Vec<(BlockHead, Vec<Record>)> = blocks
            .into_iter()
            .map(|((slot, time_ns, lost), records)| (BlockHead { slot, time_ns, lost }, records))
            .collect();
        let bytes = file(&blocks);
        let trace = Trace::parse(&bytes).unwrap();
        prop_assert_eq!(trace.header, Header { limit: 64 << 20, codec: 1 });
        let read: Vec<_> = trace.blocks().map(|b| b.map(|b| (b.head, b.records().collect::<Vec<_>>())).unwrap()).collect();
        prop_assert_eq!(&read, &blocks);

        // Cut anywhere: the blocks before the cut are read, then the cut is reported.
        let at = cut.index(bytes.len() + 1);
        match Trace::parse(&bytes[..at]) {
            Err(e) => prop_assert!(at < HEADER_BYTES && matches!(e, Error::Cut | Error::NotATrace)),
            Ok(trace) => {
                let mut good = 0;
                let mut error = None;
                for block in trace.blocks() {
                    match block {
                        Ok(b) => { prop_assert_eq!(b.head, blocks[good].0); good += 1; }
                        Err(e) => error = Some(e),
                    }
                }
                let whole = file(&blocks[..good]).len();
                prop_assert_eq!(error, (whole != at).then_some(Error::Cut));
            }
        }

        // With one bit of a record flipped, that block is damaged, and nothing after it is trusted.
        let total: usize = blocks.iter().map(|(_, r)| r.len()).sum();
        if total > 0 {
            let (mut nth, mut block, mut at) = (flip.index(total), 0, HEADER_BYTES);
            while nth >= blocks[block].1.len() {
                nth -= blocks[block].1.len();
                at += BLOCK_BYTES + blocks[block].1.len() * 8;
                block += 1;
            }
            let mut bad = bytes.clone();
            bad[at + BLOCK_BYTES + nth * 8] ^= 32;
            let read: Vec<_> = Trace::parse(&bad).unwrap().blocks().collect();
            prop_assert_eq!(read.len(), block + 1);
            prop_assert_eq!(read.last().unwrap().as_ref().err(), Some(&Error::Damaged(at)));
        }
    }
}

#[test]
fn what_is_no_trace_is_told() {
    assert_eq!(Trace::parse(b"").unwrap_err(), Error::NotATrace);
    assert_eq!(Trace::parse(b"ELF").unwrap_err(), Error::NotATrace);
    let mut other = Header { limit: 1, codec: 0 }.write();
    other[8] = 9;
    assert_eq!(Trace::parse(&other).unwrap_err(), Error::Version(9));
    assert!(Trace::parse(&other).unwrap_err().to_string().contains("version 9"));
}

/// The format as described, byte for byte: this build reads a trace of an earlier build of this version.
#[test]
fn the_format_is_as_described() {
    let records = [
        Record::number(Kind::Start, 4711),
        Record::of_object(Kind::Store, 0x1234, 2, 8000),
        Record::load(0x1234, 4, true, 0b101),
        Record::pages(Kind::MoveTo, (1 << 35) - 1, 70_000),
    ];
    let words = records.map(|r| r.pack());
    assert_eq!(
        words,
        [1 | 4711 << 5, 8 | 0x1234 << 5 | 2 << 40 | 8000 << 48, 4 | 0x1234 << 5 | 131 << 40 | 5 << 48, {
            17 | ((1 << 35) - 1) << 5 | 0xffff << 48
        }]
    );
    let bytes = file(&[(BlockHead { slot: 3, time_ns: 5, lost: 7 }, records.to_vec())]);
    let mut want = b"uzswaptr".to_vec();
    [1u32, 4096].iter().for_each(|n| want.extend(n.to_le_bytes()));
    want.extend((64u64 << 20).to_le_bytes());
    [1u32, 0].iter().for_each(|n| want.extend(n.to_le_bytes()));
    [0x6b6c_6275u32, 3].iter().for_each(|n| want.extend(n.to_le_bytes()));
    [5u64, 7].iter().for_each(|n| want.extend(n.to_le_bytes()));
    [4u32, CHECK].iter().for_each(|n| want.extend(n.to_le_bytes()));
    words.iter().for_each(|w| want.extend(w.to_le_bytes()));
    assert_eq!(bytes, want);
    // The fields of each.
    assert_eq!(records.map(|r| r.count()), [0, 4, 4, 0xffff]);
    assert_eq!(records.map(|r| (r.small, r.wide)), [(0, 0), (2, 8000), (131, 5), (0, 0xffff)]);
    assert_eq!(Record::pages(Kind::Evict, 0, 5).count(), 5);
    assert_eq!(
        [1, 2, 16].map(|n| Record::load(0, n, false, 0)).map(|r| (r.small, r.count())),
        [(0, 1), (1, 2), (15, 16)]
    );
    assert_eq!(Record::load(0, 1, true, 0), Record { small: 128, ..Record::load(0, 1, false, 0) });
    assert_eq!(Record::number(Kind::Born, 5).count(), 0, "it is about no page");
    assert_eq!([0, 17].map(|n| Record::load(0, n, false, 0).count()), [1, 16], "cut to what a record can hold");
    assert_eq!(Record::number(Kind::Fork, u64::MAX).vpn, (1 << 35) - 1);
    for (order, len, told) in
        [(0, 70_000, 65_535), (3, 32_767, 32_767), (4, 65_535, 65_536), (9, 1, 64), (9, 65, 128), (9, 2 << 20, 2 << 20)]
    {
        let r = Record::of_object(Kind::Store, 0, order, len);
        assert_eq!((r.object_bytes(), r.count()), (told, 1 << order));
    }
    let trace = Trace::parse(&bytes).unwrap();
    let block = trace.blocks().next().unwrap().unwrap();
    assert_eq!((block.len(), block.is_empty()), (4, false));
    let lost = file(&[(BlockHead { slot: 3, time_ns: 5, lost: 7 }, vec![])]);
    let block = Trace::parse(&lost).unwrap().blocks().next().unwrap().unwrap();
    assert_eq!((block.len(), block.is_empty()), (0, true));
}

/// The checksum of the block above.
const CHECK: u32 = 0x77fc_bfdc;

/// Each kind has a name of its own in reports.
#[test]
fn kinds_are_called_differently() {
    let kinds: Vec<Kind> =
        (0..32).filter_map(|k| Some(Record::unpack(k | 1 << 48).or(Record::unpack(k))?.kind)).collect();
    let names: BTreeSet<&str> = kinds.iter().map(|kind| kind.name()).collect();
    assert!(kinds.len() + 1 == Kind::COUNT && names.len() == kinds.len() && !names.contains(""), "{names:?}");
}

/// Words with a field that their kind does not have.
#[test]
fn what_no_record_says_is_damage() {
    let word = |kind: Kind, small: u64, wide: u64| kind as u64 | 7 << 5 | small << 40 | wide << 48;
    for (kind, small, wide) in [
        (Kind::Store, 10, 5),
        (Kind::Store, 0, 0),
        (Kind::DiskRead, 9, 0),
        (Kind::Load, 16, 0),
        (Kind::Load, 64, 1),
        (Kind::Start, 1, 0),
        (Kind::Fork, 0, 1),
        (Kind::Born, 1, 1),
        (Kind::Evict, 0, 0),
        (Kind::Evict, 1, 1),
    ] {
        let bad = word(kind, small, wide);
        assert_eq!(Record::unpack(bad), None, "{kind:?} {small} {wide}");
        let mut bytes = Header { limit: 1, codec: 0 }.write().to_vec();
        write_block(&mut bytes, BlockHead { slot: 0, time_ns: 0, lost: 0 }, &[bad]);
        let read: Vec<_> = Trace::parse(&bytes).unwrap().blocks().map(|b| b.err()).collect();
        assert_eq!(read, [Some(Error::Damaged(HEADER_BYTES))]);
    }
    assert!((0..18).all(|kind| Record::unpack(kind | 1 << 48).is_some() == !matches!(kind, 0..=3)));
    assert!((18..32).all(|kind| Record::unpack(kind | 1 << 48).is_none()));
    for (kind, small, wide) in [(Kind::Store, 9, 1), (Kind::Load, 143, 0), (Kind::Start, 0, 0), (Kind::Evict, 0, 1)] {
        assert_eq!(
            Record::unpack(word(kind, small, wide)),
            Some(Record { kind, vpn: 7, small: small as u8, wide: wide as u16 })
        );
    }
}

#[test]
fn what_a_header_cannot_say_is_damage() {
    let mut other = Header { limit: 1, codec: 0 }.write();
    other[13] = 0x40;
    assert_eq!(Trace::parse(&other).unwrap_err(), Error::Damaged(12), "pages of another size");
    let block = |count: usize| {
        let mut bytes = Header { limit: 1, codec: 0 }.write().to_vec();
        write_block(
            &mut bytes,
            BlockHead { slot: 0, time_ns: 0, lost: 0 },
            &vec![Record::pages(Kind::Evict, 0, 1).pack(); count],
        );
        bytes
    };
    let read = |bytes: &[u8]| Trace::parse(bytes).unwrap().blocks().next().unwrap().map(|b| b.len());
    let mut most = block(MOST_RECORDS);
    assert_eq!((MOST_RECORDS, read(&most)), (1 << 20, Ok(1 << 20)));
    most[HEADER_BYTES + 24..][..4].copy_from_slice(&(MOST_RECORDS as u32 + 1).to_le_bytes());
    assert_eq!(read(&most), Err(Error::Damaged(HEADER_BYTES)), "no block is so long");
    let mut marker = block(1);
    marker[HEADER_BYTES] ^= 1;
    assert_eq!(read(&marker), Err(Error::Damaged(HEADER_BYTES)));
}

#[test]
#[should_panic(expected = "a block of 1048577 records")]
fn a_block_holds_no_more_than_it_may() {
    write_block(&mut Vec::new(), BlockHead { slot: 0, time_ns: 0, lost: 0 }, &vec![0; MOST_RECORDS + 1]);
}

#[test]
fn no_record_is_zero() {
    // A slot of the ring that was never written must not look like an event.
    assert_eq!(Record::unpack(0), None);
}

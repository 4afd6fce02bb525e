//! The trace format: what is written is read, and what is damaged is told.

use proptest::prelude::*;
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
        // All of 2 MiB needs one more than 16 bits: it is told as 64 bytes less.
        prop_assert!(told.abs_diff(len) < unit || (len > unit * 0xffff && told == unit * 0xffff), "{} {}", told, len);
        prop_assert!(order > 3 || told == len || len > 0xffff);
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

        // Cut anywhere: the blocks before the cut, then the news of it.
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

        // One bit of a record flipped: that block is damaged, and nothing after it is believed.
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

#[test]
fn no_record_is_zero() {
    // A slot of the ring that was never written must not look like an event.
    assert_eq!(Record::unpack(0), None);
}

//! Codecs: round trips, destinations that are too short, corrupt objects, names.

use proptest::prelude::*;
use uzswap_mm::codec::{Algorithm, Compressor, Corrupt, Decompressor, Encoding};

const ALGORITHMS: [Algorithm; 8] = [
    Algorithm::Lz4,
    Algorithm::Zstd(-7),
    Algorithm::Zstd(1),
    Algorithm::Zstd(3),
    Algorithm::Zstd(19),
    Algorithm::Zstd(22),
    Algorithm::Deflate(1),
    Algorithm::Deflate(12),
];

fn random(len: usize, mut seed: u64) -> Vec<u8> {
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Roughly what heaps look like: pointers into one region, small integers, text, and this very program.
fn samples(len: usize) -> Vec<Vec<u8>> {
    let words = |word: fn(u64) -> u64| (0..len as u64 / 8).flat_map(|i| word(i).to_le_bytes()).collect::<Vec<_>>();
    let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let mut samples = vec![
        vec![0; len],
        vec![0xa5; len],
        words(|i| 0x7f12_3456_0000 + i * i % 4093 * 16),
        words(|i| i % 100),
        b"lorem ipsum dolor sit amet ".iter().copied().cycle().take(len).collect(),
    ];
    samples.extend(program.chunks_exact(len).step_by((program.len() / len / 16).max(1)).map(<[u8]>::to_vec));
    samples
}

#[test]
fn round_trips() {
    let mut decompressor = Decompressor::new();
    for algorithm in ALGORITHMS {
        // One compressor for all, in this order: what a call leaves behind must not matter to the next.
        let mut compressor = Compressor::new(algorithm);
        for len in [4096, 65_536, 16_384, 4096, 32_768] {
            for sample in samples(len) {
                let mut object = vec![0; len * 15 / 16];
                let Some((encoding, written)) = compressor.compress(&sample, &mut object) else {
                    continue;
                };
                let mut back = vec![1; len];
                assert_eq!(decompressor.decompress(encoding, &object[..written], &mut back), Ok(()), "{algorithm}");
                assert!(back == sample, "{algorithm} of {len}");
            }
            let zero = compressor.compress(&vec![0; len], &mut vec![0; len / 8]);
            assert!(zero.is_some(), "{algorithm}");
            assert_eq!(compressor.compress(&random(len, 7), &mut vec![0; len * 15 / 16]), None, "{algorithm}");
        }
    }
}

/// Empty input has an object too, even for a compressor that takes nothing else.
#[test]
fn nothing_round_trips() {
    for algorithm in ALGORITHMS {
        let (mut compressor, mut object) = (Compressor::with_source_max(algorithm, 0), [0; 64]);
        let (encoding, written) = compressor.compress(&[], &mut object).unwrap();
        assert_eq!(Decompressor::new().decompress(encoding, &object[..written], &mut []), Ok(()), "{algorithm}");
    }
}

/// Only the wanted start of an object needs to be decoded, and it is right.
#[test]
fn the_start_of_an_object_alone() {
    let mut decompressor = Decompressor::new();
    for algorithm in ALGORITHMS {
        let mut compressor = Compressor::new(algorithm);
        for sample in samples(16_384) {
            let mut object = vec![0; 16_384];
            let Some((encoding, written)) = compressor.compress(&sample, &mut object) else { continue };
            for wanted in [0, 1, 4096, 8192, 12_288, 16_384, 20_000] {
                let mut back = vec![1; 16_384];
                let there = decompressor.decompress_start(encoding, &object[..written], &mut back, wanted).unwrap();
                assert!((wanted.min(16_384)..=16_384).contains(&there), "{algorithm}: {there} of {wanted}");
                assert!(back[..there] == sample[..there], "{algorithm}: the first {wanted}");
            }
        }
    }
}

/// If all bytes are wanted, a wrong length is reported. If fewer are wanted of an lz4 object, decoding stops soon after them.
#[test]
fn no_more_is_decoded_than_is_wanted() {
    let (mut compressor, mut decompressor) = (Compressor::new(Algorithm::Lz4), Decompressor::new());
    let sample = &samples(16_384)[5];
    let mut object = vec![0; 16_384];
    let (encoding, written) = compressor.compress(sample, &mut object).unwrap();
    let mut back = vec![0; 16_384];
    let there = decompressor.decompress_start(encoding, &object[..written], &mut back, 4096).unwrap();
    assert!((4096..8192).contains(&there), "{there}");
    let short = decompressor.decompress_start(encoding, &object[..written], &mut back[..8192], 8192);
    assert_eq!(short, Err(Corrupt), "it decodes to twice as much");
}

#[test]
#[should_panic(expected = "more than 1 GiB")]
fn no_source_is_larger_than_c_can_say() {
    Compressor::with_source_max(Algorithm::Lz4, 1 << 30);
    Compressor::with_source_max(Algorithm::Lz4, (1 << 30) + 1);
}

#[test]
#[should_panic(expected = "source of 65537 bytes: more than 65536")]
fn no_source_is_larger_than_was_said() {
    let mut compressor = Compressor::new(Algorithm::Lz4);
    assert!(compressor.compress(&vec![0; 65_536], &mut [0; 4096]).is_some());
    compressor.compress(&vec![0; 65_537], &mut [0; 4096]);
}

/// What C libraries were given for their states is freed. In a child process, whose address space no other test uses.
#[test]
fn what_workspaces_took_is_given_back() {
    const CHILD: &str = "UZSWAP_TEST_WORKSPACES";
    if std::env::var_os(CHILD).is_none() {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "codec::what_workspaces_took_is_given_back", "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
        return;
    }
    let pages = || -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').next().unwrap().parse().unwrap()
    };
    let grows = |what: &dyn Fn()| {
        what();
        let before = pages();
        (0..10_000).for_each(|_| what());
        pages().saturating_sub(before) * 4096
    };
    // The smallest takes 10 KiB, so leaks would add up to 100 MiB. (A thread's heap grows by 64 MiB of address space at a time.)
    let compressors = [Algorithm::Lz4, Algorithm::Zstd(1), Algorithm::Deflate(1)]
        .map(|algorithm| grows(&|| drop(Compressor::with_source_max(algorithm, 4096))));
    let decompressors =
        [Encoding::Zstd, Encoding::Deflate].map(|encoding| grows(&|| Decompressor::new().prepare(encoding)));
    assert!(
        compressors.iter().chain(&decompressors).all(|grown| *grown < 32 << 20),
        "{compressors:?} {decompressors:?}"
    );
}

/// As for whole objects: whatever the bytes, nothing outside is touched, and a short result is an error.
#[test]
fn the_start_of_a_damaged_object() {
    let mut decompressor = Decompressor::new();
    let mut compressor = Compressor::new(Algorithm::Lz4);
    let sample = &samples(16_384)[5];
    let mut object = vec![0; 16_384];
    let (encoding, written) = compressor.compress(sample, &mut object).unwrap();
    let mut back = vec![0; 16_384];
    for cut in 0..written / 8 {
        // Here an eighth of the object holds less than half of what all of it holds.
        let short = decompressor.decompress_start(encoding, &object[..cut], &mut back, 8192);
        assert_eq!(short, Err(Corrupt), "{cut} bytes");
    }
    for (i, seed) in (0..written).step_by(7).zip(1..) {
        let mut damaged = object[..written].to_vec();
        damaged[i] ^= random(1, seed)[0] | 1;
        let _ = decompressor.decompress_start(encoding, &damaged, &mut back, 4096 * (1 + i % 4));
    }
    assert_eq!(decompressor.decompress_start(Encoding::Raw, &object[..100], &mut back, 10), Err(Corrupt));
}

/// Numbers of some bits in ascending order, a letter for each bit, and then some of them again. zstd looks for earlier
/// occurrences in a tree, which this makes a chain; its highest levels differ in how far along that they look.
fn chain(bits: u32) -> Vec<u8> {
    let letters = |number: u32| (0..bits).rev().map(move |bit| b'a' + (number >> bit & 1) as u8);
    let again = random(1200, 1);
    let again = again.chunks(2).map(|n| u32::from(u16::from_le_bytes([n[0], n[1]])) % (1 << bits));
    (0..1 << bits).chain(again).flat_map(letters).collect()
}

/// Levels 20 to 22 were once taken for 19. (An earlier test compressed parts of this very program; in some builds two levels gave
/// the same size.)
#[test]
fn the_best_levels_of_zstd_are_used() {
    let stored = |level: i32, samples: &[Vec<u8>]| {
        let mut compressor = Compressor::new(Algorithm::Zstd(level));
        let mut object = vec![0; 64 << 10];
        let len = |s: &Vec<u8>| compressor.compress(s, &mut object).map_or(s.len(), |(_, len)| len);
        samples.iter().map(len).sum::<usize>()
    };
    let chains = [chain(11), chain(12)];
    let all = [19, 20, 22].map(|level| (level, stored(level, &chains)));
    println!("level, bytes stored: {all:?}");
    assert!(all[1..].iter().all(|high| high.1 < all[0].1), "{all:?}");
    let samples = samples(64 << 10);
    let one = stored(1, &samples);
    assert!([19, 20, 22].iter().all(|level| stored(*level, &samples) < one));
}

#[test]
fn a_large_source_needs_a_compressor_made_for_it() {
    let mut decompressor = Decompressor::new();
    for algorithm in ALGORITHMS {
        let mut compressor = Compressor::with_source_max(algorithm, 2 << 20);
        // zstd gives up a workspace that was too large 128 times running; it must not do so with a static one.
        for _ in 0..300 {
            assert!(compressor.compress(&[7; 4096], &mut [0; 1024]).is_some());
        }
        for len in [2 << 20, 4096, 100_000, 131_073, 262_145, 1 << 20] {
            let sample = &samples(2 << 20)[2][..len];
            let mut object = vec![0; len];
            let (encoding, written) = compressor.compress(sample, &mut object).expect("pointers compress");
            let mut back = vec![1; len];
            assert_eq!(decompressor.decompress(encoding, &object[..written], &mut back), Ok(()));
            assert!(back == sample, "{algorithm} of {len}");
        }
    }
}

#[test]
fn compress_stays_within_its_destination() {
    let sample = samples(4096).pop().unwrap();
    for algorithm in ALGORITHMS {
        let mut compressor = Compressor::new(algorithm);
        let mut whole = vec![0; 8192];
        let (_, needed) = compressor.compress(&sample, &mut whole).unwrap();
        for room in [0, 1, 2, 10, needed / 2, needed - 1] {
            let mut object = vec![0xee; room + 64];
            // A codec may find a shorter form when space is tight, but only within its room.
            let fits = compressor.compress(&sample, &mut object[..room]);
            assert!(fits.is_none_or(|(_, len)| len <= room), "{algorithm} in {room}");
            assert!(object[room..].iter().all(|&byte| byte == 0xee), "{algorithm} wrote past {room}");
        }
    }
}

#[test]
fn the_wrong_length_is_corrupt() {
    let mut decompressor = Decompressor::new();
    let sample = samples(4096).swap_remove(4);
    for algorithm in ALGORITHMS {
        let mut object = vec![0; 4096];
        let (encoding, len) = Compressor::new(algorithm).compress(&sample, &mut object).unwrap();
        for (object_len, target) in [(len, 4095), (len, 4097), (len, 0), (len - 1, 4096), (len + 1, 4096), (0, 4096)] {
            let mut back = vec![0; target];
            let result = decompressor.decompress(encoding, &object[..object_len], &mut back);
            assert_eq!(result, Err(Corrupt), "{algorithm}: {object_len} to {target}");
        }
    }
    assert_eq!(decompressor.decompress(Encoding::Raw, &[1, 2, 3], &mut [0; 3]), Ok(()));
    assert_eq!(decompressor.decompress(Encoding::Raw, &[1, 2, 3], &mut [0; 2]), Err(Corrupt));
    assert_eq!(decompressor.decompress(Encoding::Raw, &[1, 2, 3], &mut [0; 4]), Err(Corrupt));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_round_trip(sample in proptest::collection::vec(0u8..4, 1..9000), which in 0..ALGORITHMS.len()) {
        let mut object = vec![0; sample.len() + 1000];
        let (encoding, len) = Compressor::new(ALGORITHMS[which]).compress(&sample, &mut object).unwrap();
        let mut back = vec![9; sample.len()];
        prop_assert_eq!(Decompressor::new().decompress(encoding, &object[..len], &mut back), Ok(()));
        prop_assert_eq!(back, sample);
    }

    #[test]
    fn corruption_harms_nobody(
        which in 0..ALGORITHMS.len(),
        seed in any::<u64>(),
        flips in proptest::collection::vec((any::<prop::sample::Index>(), 1u8..), 1..8),
        cut in any::<prop::sample::Index>(),
        truncate in any::<bool>(),
    ) {
        let samples = samples(4096);
        let sample = &samples[seed as usize % samples.len()];
        let mut object = vec![0; 5000];
        let (encoding, mut len) = Compressor::new(ALGORITHMS[which]).compress(sample, &mut object).unwrap();
        for (index, flip) in flips {
            object[index.index(len)] ^= flip;
        }
        if truncate {
            len = cut.index(len);
        }
        let mut decompressor = Decompressor::new();
        let mut back = vec![0xee; 4096 + 64];
        // It is chance whether this is noticed; bytes behind dst are not touched.
        let _ = decompressor.decompress(encoding, &object[..len], &mut back[..4096]);
        prop_assert!(back[4096..].iter().all(|&byte| byte == 0xee));
        // And the decompressor still works.
        let (encoding, len) = Compressor::new(ALGORITHMS[which]).compress(sample, &mut object).unwrap();
        prop_assert_eq!(decompressor.decompress(encoding, &object[..len], &mut back[..4096]), Ok(()));
        prop_assert!(&back[..4096] == sample);
    }

    #[test]
    fn noise_harms_nobody(noise in proptest::collection::vec(any::<u8>(), 0..3000), encoding in 0u8..4) {
        let encoding = Encoding::try_from(encoding).unwrap();
        let _ = Decompressor::new().decompress(encoding, &noise, &mut [0; 4096]);
    }
}

#[test]
fn names() {
    for (text, algorithm) in [
        ("lz4", Algorithm::Lz4),
        ("zstd", Algorithm::Zstd(1)),
        ("zstd:3", Algorithm::Zstd(3)),
        ("zstd:-7", Algorithm::Zstd(-7)),
        ("zstd:19", Algorithm::Zstd(19)),
        ("zstd:22", Algorithm::Zstd(22)),
        ("deflate", Algorithm::Deflate(1)),
        ("deflate:12", Algorithm::Deflate(12)),
    ] {
        assert_eq!(text.parse(), Ok(algorithm), "{text}");
        assert_eq!(algorithm.to_string().parse(), Ok(algorithm), "{text}");
    }
    for text in
        ["", "LZ4", "lz4:1", "lzo", "zstd:", "zstd:0", "zstd:23", "zstd:-8", "zstd:x", "deflate:0", "deflate:13"]
    {
        let error = text.parse::<Algorithm>().unwrap_err().to_string();
        assert!(error.contains(&format!("\"{text}\"")) && error.contains("lz4, zstd"), "{error}");
    }
    for number in 0..=255u8 {
        assert_eq!(Encoding::try_from(number).map(|encoding| encoding as u8).ok(), (number < 4).then_some(number));
    }
}

/// A7: workspaces are charged by the size that they report: only zstd's grows with the data to compress.
#[test]
fn a_workspace_that_grows_is_zstds() {
    for algorithm in ALGORITHMS {
        let [small, large] = [64 << 10, 2 << 20].map(|max| Compressor::workspace_bytes(algorithm, max));
        match algorithm {
            Algorithm::Zstd(_) => assert!(0 < small && small < large, "{algorithm}: {small} and {large}"),
            _ => assert_eq!((small, large), (0, 0), "{algorithm}"),
        }
        // Once made larger, it takes larger data.
        let mut compressor = Compressor::new(algorithm);
        [1 << 20, 4096, 64 << 10].into_iter().for_each(|max| compressor.reserve(max));
        let mut object = vec![0; 1 << 20];
        assert!(compressor.compress(&vec![7; 1 << 20], &mut object).is_some(), "{algorithm}");
    }
}

//! Every fuzz target for a moment: noise, and seeds with a few bytes changed.
//!
//! `UZSWAP_FUZZ_SEED` repeats a run, `UZSWAP_FUZZ_RUNS` makes it longer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use uzswap_mm::codec::{Algorithm, Compressor};
use uzswap_mm::trace::{self, BlockHead, Header, Kind, Record};

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
    fn byte(&mut self) -> u8 {
        self.next() as u8
    }
    fn input(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        if self.below(4) == 0 {
            let len = self.below(300);
            return (0..len).map(|_| self.byte()).collect();
        }
        let mut data = seeds[self.below(seeds.len())].clone();
        for _ in 0..self.below(6) {
            let at = self.below(data.len() + 1);
            match self.below(6) {
                0 => data.insert(at, self.byte()),
                1 => data.truncate(at),
                2 if at < data.len() => {
                    data.remove(at);
                }
                3 if at < data.len() => data[at] ^= 1 << self.below(8),
                4 if at < data.len() => data[at] = [0, 1, 0x7f, 0x80, 0xff][self.below(5)],
                _ => {
                    let other = &seeds[self.below(seeds.len())];
                    let from = self.below(other.len());
                    data.truncate(at);
                    data.extend_from_slice(&other[from..]);
                }
            }
        }
        data
    }
}

fn run(name: &str, target: fn(&[u8]), seeds: &[Vec<u8>]) {
    run_so_often(name, target, seeds, 20_000);
}

fn run_so_often(name: &str, target: fn(&[u8]), seeds: &[Vec<u8>], runs: u64) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    let seed = number("UZSWAP_FUZZ_SEED").unwrap_or(now);
    println!("{name}: UZSWAP_FUZZ_SEED={seed}");
    seeds.iter().for_each(|data| target(data));
    let mut random = Random(seed);
    for i in 0..number("UZSWAP_FUZZ_RUNS").unwrap_or(runs) {
        let data = random.input(seeds);
        let ended = catch_unwind(AssertUnwindSafe(|| target(&data)));
        assert!(ended.is_ok(), "{name}: input {i} of UZSWAP_FUZZ_SEED={seed}: {data:02x?}");
    }
}

fn texts(texts: &[&str]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

#[test]
fn algorithm() {
    run("algorithm", uzswap_fuzz::algorithm, &texts(&["lz4", "zstd", "zstd:-7", "zstd:19", "deflate:12", "deflate"]));
}

#[test]
fn address() {
    let seeds = [
        "redis://user:secret@host:7000/3?size=4G&timeout=2&ttl=60",
        "rediss://a,b:7000,[::1]:7001/0?size=1G&ca=/x/ca.pem&cert=c&key=k",
        "valkey://host?size=1M",
        "http://host",
    ];
    run("address", uzswap_fuzz::address, &texts(&seeds));
}

#[test]
fn redirect() {
    let seeds = ["MOVED 3999 127.0.0.1:6381", "ASK 16383 [::1]:6381", "MOVED 1 :7000", "MOVED 16384 a:1"];
    run("redirect", uzswap_fuzz::redirect, &texts(&seeds));
}

#[test]
fn guest() {
    let seeds = [
        r#"[{"base_host_virt_addr":140000000000000,"size":134217728,"offset":0,"page_size":4096}]"#,
        r#"[{"base_host_virt_addr":4096,"size":4096,"offset":18446744073709547520,"page_size_kib":4096},{}]"#,
    ];
    run("guest", uzswap_fuzz::guest, &texts(&seeds));
}

#[test]
fn group() {
    run("group", uzswap_fuzz::group, &texts(&["web", "web/worker", "../a", "a/./b", "a//b", "-x_1.y/z"]));
}

#[test]
fn owner() {
    if uzswap_sys::uffd::Uffd::open_for_program(0).is_err() {
        return println!("owner: skipped, as there is no userfaultfd here");
    }
    // Steps of `uzswap_fuzz::owner`: connect (0), call (2: connection, op, four arguments), write (10), touch (13), hang up (9).
    let (control, mapping) = ([0, 1, 0], [0, 0, 0, 11]);
    let write = |page: u8| [10, page, page + 1];
    let call = |which: u8, op: u8, from: u8, to: u8| [2, which, op, from, to, 0xc0, 0];
    let all_ops = (0..36).flat_map(|op| call(0, op, 3, 9)).collect::<Vec<_>>();
    let written = (0..32).flat_map(write).collect::<Vec<_>>();
    let seeds = [
        [&control[..], &written, &all_ops].concat(),
        [&mapping[..], &written, &call(0, 1, 0, 32), &[13, 5], &all_ops, &[13, 6, 13, 7]].concat(),
        [&written[..], &mapping, &call(0, 9, 0, 0), &[0, 2, 3, 11], &call(1, 1, 0, 32), &call(1, 2, 4, 20), &[9, 0]]
            .concat(),
        [
            &written[..],
            &control,
            &call(0, 5, 0, 8),
            &mapping,
            &call(1, 4, 0, 32),
            &call(0, 7, 0, 0),
            &[9, 0],
            &write(3),
        ]
        .concat(),
        // Lies about its address and its descriptors.
        [&written[..], &[0, 0, 0, 5], &call(0, 1, 0, 32), &call(0, 2, 0, 9), &call(0, 3, 1, 4), &[15, 8]].concat(),
        (0..12).flat_map(|how| [0, 0, 0, how, 9, 0]).collect(),
        [&mapping[..], &control, &[8, 0, 4, 2, 0, 8, 1, 7, 0, 1], &written].concat(),
    ];
    run_so_often("owner", uzswap_fuzz::owner, &seeds, 1_500);
}

#[test]
fn protect() {
    let seeds =
        ["protect all", "release 7f0000001000", "protect 0x1000-0x3000", "end", "7f0000001fff-800000000000", "all"];
    run("protect", uzswap_fuzz::protect, &texts(&seeds));
}

#[test]
fn codec() {
    let page: Vec<u8> = (0..4096u32).flat_map(|i| (i * i % 977 / 8).to_le_bytes()).take(4096).collect();
    let mut seeds = vec![vec![0, 4, 0, 1, 2, 3, 4]];
    for (number, algorithm) in [(1, Algorithm::Lz4), (2, Algorithm::Zstd(1)), (3, Algorithm::Deflate(1))] {
        let mut object = vec![0; 8192];
        let (encoding, len) = Compressor::new(algorithm).compress(&page, &mut object).unwrap();
        assert_eq!(encoding as u8, number);
        seeds.push([&[number, 0, 16], &object[..len]].concat());
    }
    run("codec", uzswap_fuzz::codec, &seeds);
}

#[test]
fn config() {
    let files =
        ["memory = '1G'\ncompressor = \"zstd:3\"\nquiet = true\nreport = 'r.json'\n", "[a]\nb = [1, {c = 2}]\n"];
    run("config", uzswap_fuzz::config, &texts(&[&files[..], &["zstd:3", "deflate:12", "lz4"]].concat()));
}

#[test]
fn elf() {
    let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let mut seeds = texts(&["#! /usr/bin/python3 -u\nx", "echo hello\n"]);
    // The headers, and the loader's name, as that is in the first kilobytes.
    seeds.push(program[..2048].to_vec());
    run("elf", uzswap_fuzz::elf, &seeds);
}

#[test]
fn maps() {
    let mut seeds = vec![std::fs::read("/proc/self/maps").unwrap()];
    seeds.extend(texts(&[
        "55d0-66e0 rw-p 00000000 00:00 0                          [heap]\n",
        "7ffc0000-7ffd0000 rw-p 00000000 00:00 0 [stack]\nffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 \n",
    ]));
    run("maps", uzswap_fuzz::maps, &seeds);
}

#[test]
fn replay() {
    let record = |r: Record, what: u8| [&r.pack().to_le_bytes()[..], &[what]].concat();
    // A page stored, moved and read back, on either side of a fork; and so much stored that the oldest goes to disk.
    let mut seeds = vec![
        [
            record(Record::number(Kind::Start, 1), 4),
            record(Record::of_object(Kind::Store, 8, 2, 5432), 1),
            record(Record::number(Kind::Fork, 1), 8),
            record(Record::number(Kind::Born, 1), 1),
            record(Record::pages(Kind::MoveFrom, 8, 4), 1),
            record(Record::pages(Kind::MoveTo, 12, 4), 1),
            record(Record::load(12, 4, true, 0b101), 1),
            record(Record::pages(Kind::Clean, 12, 4), 0),
        ]
        .concat(),
    ];
    let stores = (0..32).map(|i| record(Record::of_object(Kind::Store, i * 7 % 32, 0, 1000), 1));
    seeds.push(stores.chain((0..16).map(|i| record(Record::load(i * 2, 2, false, 1), 1))).flatten().collect());
    seeds.push([&seeds[1][..], &seeds[0][..], &seeds[1][..]].concat());
    run("replay", uzswap_fuzz::replay, &seeds);
}

#[test]
fn size() {
    run("size", uzswap_fuzz::size, &texts(&["512M", "1.5GiB", "50%", "12.5 %", ".5G", "4096", "2TB", " 1 kB "]));
}

#[test]
fn trace() {
    let mut seed = Header { limit: 64 << 20, codec: 0 }.write().to_vec();
    let records = [
        Record::number(Kind::Start, 4711),
        Record::pages(Kind::Evict, 0x7_f000_1000, 16),
        Record::of_object(Kind::Store, 0x7_f000_1000, 2, 5432),
        Record::load(0x7_f000_1000, 4, true, 0b101),
        Record::pages(Kind::Free, 0x7_f000_1000, 16),
    ];
    for slot in 0..3 {
        let head = BlockHead { slot, time_ns: u64::from(slot) * 1_000_000, lost: 0 };
        trace::write_block(&mut seed, head, &records.map(|r| r.pack())[..slot as usize * 2]);
    }
    run("trace", uzswap_fuzz::trace, &[seed[..32].to_vec(), seed]);
}

#[test]
fn zone() {
    // Fill, thin out, compact: from several places.
    let seeds = [(0u8, 0u8), (1, 1), (1, 5), (200, 3)].map(|(start, policy)| {
        let mut data = vec![start, 100, policy];
        (0..900u16).for_each(|i| data.extend([0, (i % 50) as u8, 0]));
        (0..600u16).for_each(|i| data.extend([5, (i * 7) as u8, (i >> 7) as u8]));
        (0..8).for_each(|_| data.extend([7, 9, 255]));
        data
    });
    run("zone", uzswap_fuzz::zone, &seeds);
}

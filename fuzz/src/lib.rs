//! The bodies of the fuzz targets: each takes any bytes, and panics if a promise is broken.
//!
//! libFuzzer drives them from `fuzz_targets/`; `tests/brief.rs` runs each for a moment on a stable toolchain.

// The command is a binary without a library, so its modules are compiled here again.
#[allow(dead_code, missing_docs)]
#[path = "../../crates/uzswap/src/cli.rs"]
mod cli;
#[allow(dead_code)]
#[path = "../../crates/uzswap/src/config.rs"]
mod config_file;
#[allow(dead_code)]
#[path = "../../crates/uzswap/src/folios.rs"]
mod folios;
#[allow(dead_code)]
#[path = "../../crates/uzswap/src/elf.rs"]
mod program_file;

#[allow(dead_code)]
#[path = "../../crates/uzswap/src/group_name.rs"]
mod group_name;
#[allow(dead_code)]
#[path = "../../crates/uzswap/src/protect/lines.rs"]
mod lines;
#[allow(dead_code)]
#[path = "../../crates/uzswap/src/remote/address.rs"]
mod server_address;
#[allow(dead_code)]
#[path = "../../crates/uzswap/src/remote/redirect.rs"]
mod server_redirect;
#[allow(dead_code)]
#[path = "../../crates/uzswap/src/pagemap"]
mod pagemap {
    //! (The name that the included modules use.)
    pub const PAGE: u64 = 4096;
    pub mod process;
}

mod owner;

pub use owner::owner;
use std::io::Cursor;
use uzswap_mm::codec::{Algorithm, Decompressor, Encoding};
use uzswap_mm::compaction::policy::{Emptiest, Linear, Policy};
use uzswap_mm::compaction::{Compactor, Goal, Migrate};
use uzswap_mm::replay::{Cost, Replay, Settings};
use uzswap_mm::shrinker;
use uzswap_mm::size::{self, Size};
use uzswap_mm::trace::{self, BLOCK_BYTES, BlockHead, HEADER_BYTES, Header, Record, Trace};
use uzswap_mm::zone::{Kind, MigrateType, Zone};

/// Names of codecs: a name that parses is displayed as one that parses to the same.
pub fn algorithm(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    match text.parse::<Algorithm>() {
        Ok(algorithm) => assert_eq!(algorithm.to_string().parse(), Ok(algorithm)),
        Err(error) => assert!(error.to_string().contains("allowed are")),
    }
}

/// Objects of the pool: one byte of encoding, two of the decoded length, the rest is the object. Nothing is written past the
/// destination, and afterwards the decompressor works like a new one.
pub fn codec(data: &[u8]) {
    const GUARD: usize = 64;
    let [encoding, low, high, object @ ..] = data else { return };
    let encoding = Encoding::try_from(encoding % 4).expect("there are four");
    let len = usize::from(u16::from_le_bytes([*low, *high]));
    let mut decode = Decompressor::new();
    let mut first = vec![0xee; len + GUARD];
    let one = decode.decompress(encoding, object, &mut first[..len]);
    let mut second = vec![0xee; len + GUARD];
    let two = decode.decompress(encoding, object, &mut second[..len]);
    assert_eq!(one, two);
    assert!(one.is_err() || first == second, "the same object decoded to different bytes");
    for buffer in [first, second] {
        assert!(buffer[len..].iter().all(|byte| *byte == 0xee), "wrote past the destination");
    }
}

/// Configuration files and the compressor's name: an error is one line.
pub fn config(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Err(error) = config_file::Config::parse(&text) {
        assert!(error.starts_with("line ") && !error.contains('\n'), "{error}");
    }
    if let Ok(compressor) = config_file::Compressor::parse(&text) {
        assert!(text.starts_with(compressor.name()));
    }
}

/// Program files: reading from memory cannot fail, so this must not fail either.
pub fn elf(data: &[u8]) {
    program_file::kind(&mut Cursor::new(data)).expect("nothing to fail");
}

/// Addresses of swap servers: a valid one has a server and a size; an error is one line, and contains no password.
pub fn address(data: &[u8]) {
    const PASSWORD: &str = "s3cr3tpassw0rd";
    let text = String::from_utf8_lossy(data);
    // Whatever is around it, this puts a password before the hosts.
    let with = text.replacen("://", &format!("://user:{PASSWORD}@"), 1);
    for text in [&*text, &with] {
        match server_address::Address::parse(text) {
            Ok(address) => assert!(address.size > 0 && !address.urls.is_empty() && !address.timeout.is_zero()),
            Err(error) => assert!(!error.is_empty() && !error.contains(PASSWORD), "{error}"),
        }
    }
}

/// A server's redirect, a word and the rest: the slot exists, and the host has no brackets.
pub fn redirect(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (code, details) = text.split_once(' ').unwrap_or((&text, ""));
    if let Some(to) = server_redirect::Redirect::parse(code, details) {
        assert!(to.slot < server_redirect::SLOTS && to.ask == (code == "ASK"));
        assert!(!to.host.starts_with('[') && !to.host.ends_with(']'));
    }
}

/// Descriptions of guests: regions consist of whole pages, and all of them can exist.
pub fn guest(data: &[u8]) {
    match uzswap::handover::parse_regions(data) {
        Ok(regions) => {
            assert!(!regions.is_empty());
            for r in regions {
                assert!(r.size > 0 && r.base_host_virt_addr + r.size < 1 << 47);
                assert!([r.base_host_virt_addr, r.size, r.offset].iter().all(|n| n.is_multiple_of(4096)));
                assert!(r.offset.checked_add(r.size).is_some());
            }
        }
        Err(error) => assert!(!error.is_empty()),
    }
}

/// Names of groups: no component leads elsewhere in the file system.
pub fn group(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(parts) = group_name::components(&text) {
        assert_eq!(parts.join("/"), text);
        assert!(parts.iter().all(|part| !part.is_empty() && !part.starts_with('.') && !part.contains(['/', '\0'])));
    }
}

/// Lines of clients of `uzswap protect`, and ranges of a process: within the address space.
pub fn protect(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(pages) = pagemap::process::parse_range(&text) {
        assert!(pages.start < pages.end && pages.end <= 1 << 35);
    }
    match lines::parse(&text) {
        Ok(lines::Wanted::Protect(range) | lines::Wanted::Release(range)) => {
            assert!(range.start < range.end && range.end <= 1 << 47);
        }
        Ok(lines::Wanted::End) => assert_eq!(text.trim(), "end"),
        Err(error) => assert!(!error.is_empty()),
    }
}

/// /proc/PID/maps: every mapping is a range.
pub fn maps(data: &[u8]) {
    for m in uzswap_sys::maps::parse(data) {
        assert!(m.start < m.end);
        assert!(!m.is_private_anonymous() || (m.inode == 0 && m.perms[2] != b'x' && m.perms[3] == b'p'));
    }
}

/// Sizes: a share is whole pages, and not more than the whole.
pub fn size(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    for total in [0, 4097, 1 << 34, 1 << 50] {
        if let Ok(size) = Size::parse(&text) {
            let bytes = size.resolve(total);
            assert!(bytes.is_multiple_of(4096));
            assert!(!matches!(size, Size::Percent(_)) || bytes <= total);
            assert!(!size::human(bytes).is_empty());
        }
    }
}

/// Replays: each nine bytes are a record and what happens to it (it is another slot's, records were lost before it). There are
/// few pages and few forks, so that they meet. Any trace can be played.
pub fn replay(data: &[u8]) {
    let mut bytes = Header { limit: 1 << 20, codec: 0 }.write().to_vec();
    let (mut words, mut head) = (Vec::new(), BlockHead { slot: 0, time_ns: 0, lost: 0 });
    for [word @ .., what] in data.as_chunks::<9>().0 {
        let word = u64::from_le_bytes(*word);
        let Some(record) = Record::unpack(word) else { continue };
        let few = Record { vpn: record.vpn % 64, wide: record.wide % 64, ..record };
        words.extend(Some(few.pack()).filter(|word| Record::unpack(*word).is_some()));
        if what & 3 == 0 {
            trace::write_block(&mut bytes, head, &words);
            words.clear();
            head = BlockHead { slot: u32::from(what >> 2 & 3), time_ns: 0, lost: u64::from(what >> 6) };
        }
    }
    trace::write_block(&mut bytes, head, &words);
    play(&Trace::parse(&bytes).expect("it was just written"));
}

/// Plays a trace under every policy, with a pool of a few pages.
fn play(trace: &Trace<'_>) {
    for policy in shrinker::Policy::ALL {
        let limit = usize::try_from(trace.header.limit).unwrap_or(usize::MAX);
        let settings = Settings { policy, pool: 1 << 14, accept_percent: 90, limit, cost: Cost::default() };
        let mut replay = Replay::new(settings);
        trace.blocks().map_while(Result::ok).for_each(|block| replay.block(&block));
        let played = replay.finish();
        assert!(played.unknown <= played.loads && played.loads <= played.records);
    }
}

/// Traces: whatever is read would be written in the same way, reading ends, and what was read can be played.
pub fn trace(data: &[u8]) {
    let read = match Trace::parse(data) {
        Ok(read) => read,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let mut at = HEADER_BYTES;
    for block in read.blocks() {
        let Ok(block) = block else { break };
        assert_eq!(block.records().count(), block.len());
        assert!(block.records().all(|r| Record::unpack(r.pack()) == Some(r)));
        let words: Vec<u64> = block.records().map(|r| r.pack()).collect();
        let mut again = Vec::new();
        trace::write_block(&mut again, block.head, &words);
        assert_eq!(again, data[at..at + BLOCK_BYTES + 8 * block.len()]);
        at += again.len();
    }
    assert!(at <= data.len());
    play(&read);
}

/// The zone and its compaction: each three bytes are a step (what, and which). Frames are neither lost nor handed out twice, and
/// compaction keeps the pages that it moves.
pub fn zone(data: &[u8]) {
    let [start, ends, policy, steps @ ..] = data else { return };
    let (start, end) = (u32::from(*start), 600 + u32::from(*ends) * 5);
    let mut zone = Zone::spanning(start, end, Kind::Frame);
    zone.keep_ready(usize::from(*policy) % 3 * 8);
    if policy % 2 == 0 {
        Pages::new(&zone, Emptiest::new()).run(zone, steps);
    } else {
        Pages::new(&zone, Linear::starting_at(usize::from(policy / 2), true)).run(zone, steps);
    }
}

struct Frames {
    start: u32,
    page: Vec<Option<u32>>,
    pinned: Vec<bool>,
}

impl Migrate for Frames {
    fn isolate(&mut self, _: &Zone, frame: u32) -> bool {
        let at = (frame - self.start) as usize;
        assert!(self.page[at].is_some(), "isolated a free frame");
        !self.pinned[at]
    }
    fn migrate(&mut self, _: &mut Zone, from: u32, to: u32) -> bool {
        let page = self.page[(from - self.start) as usize].take();
        assert!(self.page[(to - self.start) as usize].replace(page.expect("in use")).is_none(), "moved over a page");
        true
    }
    fn putback(&mut self, _frame: u32) {}
}

struct Pages<P> {
    frames: Frames,
    compactor: Compactor<P>,
    /// Whether a page is allocated, by its number.
    live: Vec<bool>,
}

impl<P: Policy> Pages<P> {
    fn new(zone: &Zone, policy: P) -> Self {
        let n = (zone.end() - zone.start()) as usize;
        let frames = Frames { start: zone.start(), page: vec![None; n], pinned: vec![false; n] };
        Self { frames, compactor: Compactor::new(policy), live: Vec::new() }
    }

    fn run(mut self, mut zone: Zone, steps: &[u8]) {
        let total = zone.free_slots(Kind::Frame);
        let (blocks, _) = steps.as_chunks::<3>();
        let mut used = 0;
        for [what, low, high] in blocks {
            let which = usize::from(u16::from_le_bytes([*low, *high]));
            match what % 8 {
                0..4 => {
                    let mt = MigrateType::ALL[which % 3];
                    let Some(frame) = zone.alloc_typed(Kind::Frame, mt, 0) else { continue };
                    let at = (frame - zone.start()) as usize;
                    assert!(self.frames.page[at].replace(self.live.len() as u32).is_none(), "handed out twice");
                    self.frames.pinned[at] = mt == MigrateType::Unmovable;
                    self.live.push(true);
                    used += 1;
                }
                4..7 => {
                    let n = self.frames.page.len();
                    let Some(at) = (0..n).map(|i| (i + which) % n).find(|at| self.frames.page[*at].is_some()) else {
                        continue;
                    };
                    let page = self.frames.page[at].take().expect("found");
                    self.live[page as usize] = false;
                    self.frames.pinned[at] = false;
                    zone.free(Kind::Frame, zone.start() + at as u32, 0);
                    used -= 1;
                }
                _ => {
                    let (order, budget) = (low % 10, u64::from(*high) * 16);
                    let goal = Goal { kind: Kind::Frame, order, score: None, budget };
                    self.compactor.direct(&mut zone, goal, &mut self.frames);
                    assert_eq!(self.compactor.counters.migrated_twice, 0);
                }
            }
            assert_eq!(zone.free_slots(Kind::Frame), total - used);
        }
        let mut left: Vec<_> = self.frames.page.iter().flatten().copied().collect();
        left.sort_unstable();
        let kept = self.live.iter().enumerate().filter(|(_, live)| **live).map(|(page, _)| page as u32);
        assert!(left.into_iter().eq(kept), "compaction lost a page, or made one");
    }
}

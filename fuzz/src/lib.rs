//! The bodies of the fuzz targets: each takes any bytes and panics when a promise is broken.
//!
//! libFuzzer drives them from `fuzz_targets/`; `tests/brief.rs` runs each for a moment on a stable toolchain.

// The command is a binary without a library: its modules are compiled here again.
#[allow(dead_code, missing_docs)]
#[path = "../../crates/uzswap/src/cli.rs"]
mod cli;
#[allow(dead_code)]
#[path = "../../crates/uzswap/src/config.rs"]
mod config_file;
#[allow(dead_code)]
#[path = "../../crates/uzswap/src/elf.rs"]
mod program_file;
#[allow(dead_code)]
#[path = "../../crates/uzswap/src/size.rs"]
mod size_text;

use size_text::Size;
use std::io::Cursor;
use uzswap_mm::codec::{Algorithm, Decompressor, Encoding};
use uzswap_mm::trace::{BLOCK_BYTES, HEADER_BYTES, Record, Trace};

/// Names of codecs: what parses displays as something that parses to the same.
pub fn algorithm(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    match text.parse::<Algorithm>() {
        Ok(algorithm) => assert_eq!(algorithm.to_string().parse(), Ok(algorithm)),
        Err(error) => assert!(error.to_string().contains("allowed are")),
    }
}

/// Objects of the pool: one byte of encoding, two of the decoded length, the rest is the object. Nothing is written
/// past the destination, and the decompressor is as good as a new one afterwards.
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

/// Program files: reading from memory cannot fail, so neither may this.
pub fn elf(data: &[u8]) {
    program_file::kind(&mut Cursor::new(data)).expect("nothing to fail");
}

/// /proc/PID/maps: every mapping is a range.
pub fn maps(data: &[u8]) {
    for m in uzswap_sys::maps::parse(data) {
        assert!(m.start < m.end);
        assert!(!m.is_private_anonymous() || (m.inode == 0 && m.perms[2] != b'x' && m.perms[3] == b'p'));
    }
}

/// Sizes: whole pages, and within what there is when it is a share.
pub fn size(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    for total in [0, 4097, 1 << 34, 1 << 50] {
        if let Ok(size) = Size::parse(&text) {
            let bytes = size.resolve(total);
            assert!(bytes.is_multiple_of(4096));
            assert!(!matches!(size, Size::Percent(_)) || bytes <= total);
            assert!(!size_text::human(bytes).is_empty());
        }
    }
}

/// Traces: whatever is read would be written the same, and reading ends.
pub fn trace(data: &[u8]) {
    let trace = match Trace::parse(data) {
        Ok(trace) => trace,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let mut at = HEADER_BYTES;
    for block in trace.blocks() {
        let Ok(block) = block else { break };
        assert_eq!(block.records().count(), block.len());
        assert!(block.records().all(|r| Record::unpack(r.pack()) == Some(r)));
        let words: Vec<u64> = block.records().map(|r| r.pack()).collect();
        let mut again = Vec::new();
        uzswap_mm::trace::write_block(&mut again, block.head, &words);
        assert_eq!(again, data[at..at + BLOCK_BYTES + 8 * block.len()]);
        at += again.len();
    }
    assert!(at <= data.len());
}

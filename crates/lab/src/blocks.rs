//! `uzswap lab blocks`: what larger units of compression gain, on memory of real programs.
//!
//! The lab cuts each image into blocks of each size. It compresses each block by itself with each codec, decompresses it, and
//! compares. A block that does not save a sixteenth counts as stored raw, as in the pool. All on one thread.

use crate::experiment::{Common, Runs, Stop, at_least, go_on};
use crate::images::{self, Image};
use crate::json::{Findings, Row, Verdict};
use crate::size::{MIB, mib};
use crate::stats::median;
use crate::undo::Keeper;
use serde_json::{Map, json};
use std::time::Instant;
use uzswap_mm::codec::{Algorithm, Compressor, Decompressor, Encoding};

/// `uzswap lab blocks`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Size of each image [default: 32M, 6M with --quick]
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse)]
    image: Option<u64>,
    #[command(flatten)]
    runs: Runs,
}

const SIZES: [(&str, usize); 8] = [
    ("4K", 4 << 10),
    ("16K", 16 << 10),
    ("32K", 32 << 10),
    ("64K", 64 << 10),
    ("128K", 128 << 10),
    ("256K", 256 << 10),
    ("1M", 1 << 20),
    ("2M", 2 << 20),
];
const CODECS: [(&str, Algorithm); 3] =
    [("lz4", Algorithm::Lz4), ("zstd", Algorithm::Zstd(1)), ("deflate", Algorithm::Deflate(1))];

/// One image, one codec, one block size.
#[derive(Clone, Copy, Default)]
struct Figure {
    stored: usize,
    compress: f64,
    decompress: f64,
}

/// Runs the experiment. Returns whether everything read back was right.
///
/// # Errors
/// Why it ended early.
pub fn run(args: &Args) -> Result<bool, Stop> {
    let len = args.image.unwrap_or(if args.common.quick { 6 * MIB } else { 32 * MIB });
    at_least("image", len, 2 * MIB)?;
    let len = len as usize;
    let runs = args.runs.count(&args.common);
    let (images, missing) = {
        let keeper = Keeper::start()?;
        let (dir, _dir) = keeper.make_dir(None)?;
        images::all(&keeper, &dir, len)
    };
    go_on()?;
    if images.is_empty() {
        return Err(Stop::Failed("no image could be made".to_owned()));
    }
    let mut rows = Vec::new();
    let mut totals = [[Figure::default(); SIZES.len()]; CODECS.len()];
    for image in &images {
        for (codec, (name, algorithm)) in CODECS.iter().enumerate() {
            let mut of_sizes = [Figure::default(); SIZES.len()];
            for (size, (_, bytes)) in SIZES.iter().enumerate() {
                go_on()?;
                of_sizes[size] = measure(image, *algorithm, *bytes, runs)?;
                totals[codec][size].stored += of_sizes[size].stored;
                totals[codec][size].compress += of_sizes[size].compress;
                totals[codec][size].decompress += of_sizes[size].decompress;
            }
            add_rows(&mut rows, image.name, name, image.bytes.len(), &of_sizes);
        }
    }
    let whole: usize = images.iter().map(|i| i.bytes.len()).sum();
    for ((name, _), of_sizes) in CODECS.iter().zip(&totals) {
        add_rows(&mut rows, "all", name, whole, of_sizes);
    }
    let zstd = &totals[1];
    let denser = 100.0 * (1.0 - zstd[3].stored as f64 / zstd[0].stored as f64);
    let mut settings = Map::new();
    for image in &images {
        settings.insert(image.name.to_owned(), json!(image.bytes.len()));
    }
    settings.insert("runs".to_owned(), json!(runs));
    settings.insert("missing".to_owned(), json!(missing));
    let findings = Findings {
        rows,
        verdicts: vec![Verdict::at_least("zstd: 64K blocks denser than 4K blocks, in percent", 14.0, denser)],
        ..Findings::new("blocks", settings.into())
    };
    let mut notes: Vec<_> =
        images.iter().map(|i| format!("{}: {} without zero pages", i.name, mib(i.bytes.len() as u64))).collect();
    notes.extend(missing.iter().map(|name| format!("{name}: not made on this machine, left out")));
    notes.push("Every block was decompressed and compared.".to_owned());
    findings.publish(&SIZES.map(|(name, _)| (name, name)), &notes, args.common.json.as_deref())?;
    Ok(true)
}

fn add_rows(rows: &mut Vec<Row>, image: &str, codec: &str, len: usize, of_sizes: &[Figure]) {
    let mut row = |what: &str, unit: &'static str, of: &dyn Fn(&Figure) -> f64| {
        let mut row = Row::new(format!("{image}, {codec}: {what}"), unit);
        SIZES.iter().zip(of_sizes).for_each(|((name, _), figure)| row.put(name, Some(of(figure))));
        rows.push(row);
    };
    row("stored", "%", &|f| 100.0 * f.stored as f64 / len as f64);
    row("compress", "s", &|f| f.compress);
    row("decompress", "s", &|f| f.decompress);
}

fn measure(image: &Image, algorithm: Algorithm, size: usize, runs: u32) -> Result<Figure, String> {
    let (mut stored, mut compress, mut decompress) = (0, Vec::new(), Vec::new());
    let mut compressor = Compressor::with_source_max(algorithm, size);
    let mut decompressor = Decompressor::new();
    let mut out = vec![0; image.bytes.len()];
    let mut back = vec![0; size];
    for _ in 0..runs {
        let mut packed: Vec<(Encoding, usize)> = Vec::with_capacity(image.bytes.len() / size + 1);
        let start = Instant::now();
        for (block, to) in image.bytes.chunks(size).zip(out.chunks_mut(size)) {
            let room = block.len() - block.len() / 16;
            packed.push(compressor.compress(block, &mut to[..room]).unwrap_or_else(|| {
                to.copy_from_slice(block);
                (Encoding::Raw, block.len())
            }));
        }
        compress.push(start.elapsed().as_secs_f64());
        stored = packed.iter().map(|(_, len)| len).sum();
        let mut took = 0.0;
        for ((block, from), (encoding, len)) in image.bytes.chunks(size).zip(out.chunks(size)).zip(&packed) {
            let start = Instant::now();
            let done = decompressor.decompress(*encoding, &from[..*len], &mut back[..block.len()]);
            took += start.elapsed().as_secs_f64();
            if done.is_err() || back[..block.len()] != *block {
                return Err(format!("{}: a block of {size} bytes came back wrong", image.name));
            }
        }
        decompress.push(took);
    }
    let of = |times: &[f64]| median(times).unwrap_or(f64::NAN);
    Ok(Figure { stored, compress: of(&compress), decompress: of(&decompress) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_and_codec_gives_the_bytes_back() {
        let bytes: Vec<u8> = (0..3 << 20).map(|i: u32| (i / 7 % 251) as u8 ^ (i >> 13) as u8).collect();
        let image = Image { name: "test", bytes };
        for (_, algorithm) in CODECS {
            let small = measure(&image, algorithm, 4 << 10, 1).unwrap();
            let large = measure(&image, algorithm, 2 << 20, 1).unwrap();
            assert!(large.stored < small.stored && small.stored < image.bytes.len());
        }
    }
}

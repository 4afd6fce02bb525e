//! Codecs: compress the bytes of a folio into a smaller object, and decompress it.
//!
//! They run in the agent: in raw-cloned threads that have no TLS of their own, while the program's malloc may hold its
//! lock. So nothing here calls libc's malloc or uses a thread-local. Each [`Compressor`] takes its workspace from
//! Rust's global allocator in `new` (the agent has its own); each [`Decompressor`] does so at the first object of a
//! codec, as most processes end before they have stored anything. Neither allocates per call.
//!
//! All three libraries are C. Each has its wall, a submodule with the FFI, and these are all the `unsafe` there is:
//! `lz4` (`LZ4_compress_fast_extState_fastReset` on our state), `zstd` (`ZSTD_initStatic*`: never allocates) and
//! `deflate` (libdeflate with our allocator). gcc's stack protector reads `%fs:0x28`. Where it is on by default
//! (Ubuntu, not Debian) and the fs base of such a thread is not valid, build with `CFLAGS=-fno-stack-protector`.
//!
//! An object has no header. The caller keeps its [`Encoding`] and its exact length, and knows the length of the decoded
//! bytes from where they go.
//!
//! Invariants:
//! - Compression never writes past `dst`, and succeeds only if the object fits there.
//! - Decompression fills `dst` exactly or returns [`Corrupt`]. Whatever the bytes, it reads nothing outside `src` and
//!   writes nothing outside `dst`. There is no checksum: altered bytes that decode to the right length go unnoticed.
//!
//! Ownership: a compressor or decompressor belongs to one thread at a time (`Send`, `&mut self`).
//!
//! # Measured
//!
//! 2026-11-21, 2 vCPU VM, release, single thread, best of 2 passes. MB/s are of uncompressed bytes (10^6); a block that
//! does not fit 15/16 counts as raw in the ratio. *so*: 64 MiB of shared libraries. *py*: 64 MiB of a Python heap
//! (ASTs, small dicts), zero pages left out. Cells: compress MB/s / decompress MB/s / ratio.
//!
//! | codec        | so 4K               | so 16K              | so 64K              | py 4K               | py 16K              | py 64K              |
//! |--------------|---------------------|---------------------|---------------------|---------------------|---------------------|---------------------|
//! | lz4          | 654 / 2775 / 1.64   | 638 / 3462 / 1.77   | 544 / 3698 / 1.86   | 1146 / 3235 / 3.49  | 1297 / 4085 / 3.74  | 1314 / 4302 / 3.86  |
//! | lz4_flex     | 634 / 2535 / 1.63   | 615 / 3021 / 1.76   | 731 / 3219 / 1.81   | 1056 / 2899 / 3.49  | 1204 / 3550 / 3.73  | 1233 / 3818 / 3.85  |
//! | zstd:-1      | 444 / 1150 / 1.86   | 496 / 1531 / 2.08   | 550 / 1780 / 2.17   | 672 / 1389 / 6.61   | 843 / 1991 / 7.82   | 996 / 2333 / 8.02   |
//! | zstd:1       | 298 / 636 / 2.11    | 389 / 997 / 2.35    | 499 / 1267 / 2.42   | 437 / 1032 / 6.92   | 684 / 1539 / 8.42   | 911 / 2000 / 8.55   |
//! | zstd:3       | 244 / 602 / 2.16    | 301 / 952 / 2.42    | 368 / 1253 / 2.53   | 422 / 1102 / 7.11   | 645 / 1546 / 8.68   | 787 / 1929 / 8.72   |
//! | deflate:1    | 200 / 506 / 2.12    | 220 / 662 / 2.34    | 209 / 752 / 2.46    | 310 / 936 / 5.76    | 418 / 1554 / 6.62   | 483 / 1871 / 6.64   |
//! | deflate:6    | 104 / 487 / 2.20    | 114 / 662 / 2.46    | 99 / 748 / 2.61     | 166 / 973 / 6.50    | 206 / 1787 / 7.54   | 205 / 1989 / 7.76   |
//!
//! The libraries were called directly (zstd and deflate with contexts they allocated), each pass once over the data.
//! The same lz4 work varied by 10 % between runs, so smaller differences are noise.
//!
//! lz4 is the C library at acceleration 1. `lz4_flex` 0.14 without its safe features and with a reused table
//! decompresses 9-13 % slower and compresses 3-8 % slower, including a copy of the result, as it wants a destination of
//! the worst-case size. The exception is 64K of *so*, which it compresses 20-34 % faster at 3 % less ratio. Its fast
//! decoder is unchecked, so it must not see bytes that may be corrupt. Acceleration 4 gains 19-34 % of compression
//! speed on *so* and nothing on *py*, and costs 9-11 % and 2-3 % of the ratio: not taken. `_fastReset` was no faster
//! than the plain call here; it is used all the same, as clearing the state for each block can cost more than
//! compressing a page.

mod deflate;
mod lz4;
mod workspace;
mod zstd;

use core::fmt;
use core::str::FromStr;

/// The largest source that [`Compressor::new`] sizes its workspace for: 64 KiB.
pub const DEFAULT_SOURCE_MAX: usize = 64 << 10;

/// A codec and its level.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Algorithm {
    /// LZ4 at acceleration 1.
    Lz4,
    /// Zstandard at a level: -7 to -1 or 1 to 22.
    Zstd(i32),
    /// Deflate without a wrapper, at a level: 1 to 12.
    Deflate(i32),
}

/// Text that names no [`Algorithm`]; displays as a sentence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParseAlgorithmError(String);

impl fmt::Display for ParseAlgorithmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "unknown codec \"{}\": allowed are lz4, zstd or zstd:LEVEL (-7 to -1, 1 to 22), deflate or deflate:LEVEL \
             (1 to 12)",
            self.0
        )
    }
}

impl core::error::Error for ParseAlgorithmError {}

impl FromStr for Algorithm {
    type Err = ParseAlgorithmError;

    /// Parses `lz4`, `zstd`, `zstd:LEVEL`, `deflate` or `deflate:LEVEL`; the default level is 1.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = || ParseAlgorithmError(text.to_owned());
        let (name, level) = match text.split_once(':') {
            Some((name, level)) => (name, Some(level.parse().map_err(|_| refuse())?)),
            None => (text, None),
        };
        let algorithm = match (name, level) {
            ("lz4", None) => Self::Lz4,
            ("zstd", level) => Self::Zstd(level.unwrap_or(1)),
            ("deflate", level) => Self::Deflate(level.unwrap_or(1)),
            _ => return Err(refuse()),
        };
        if algorithm.level_is_allowed() { Ok(algorithm) } else { Err(refuse()) }
    }
}

impl fmt::Display for Algorithm {
    /// As [`FromStr`] reads it, always with the level.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lz4 => write!(f, "lz4"),
            Self::Zstd(level) => write!(f, "zstd:{level}"),
            Self::Deflate(level) => write!(f, "deflate:{level}"),
        }
    }
}

impl Algorithm {
    /// Whether the codec has this level. No compressor is made for a level that it does not have.
    #[must_use]
    pub fn level_is_allowed(self) -> bool {
        match self {
            Self::Lz4 => true,
            Self::Zstd(level) => level != 0 && (-7..=22).contains(&level),
            Self::Deflate(level) => (1..=12).contains(&level),
        }
    }
}

/// How a stored object is encoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Encoding {
    /// The bytes themselves.
    Raw = 0,
    /// An LZ4 block.
    Lz4 = 1,
    /// A Zstandard frame with its content size and no checksum.
    Zstd = 2,
    /// A deflate stream without a wrapper.
    Deflate = 3,
}

/// A number that is no [`Encoding`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnknownEncoding(pub u8);

impl fmt::Display for UnknownEncoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown encoding {}: known are 0 (raw), 1 (lz4), 2 (zstd) and 3 (deflate)", self.0)
    }
}

impl core::error::Error for UnknownEncoding {}

impl TryFrom<u8> for Encoding {
    type Error = UnknownEncoding;

    fn try_from(number: u8) -> Result<Self, UnknownEncoding> {
        match number {
            0 => Ok(Self::Raw),
            1 => Ok(Self::Lz4),
            2 => Ok(Self::Zstd),
            3 => Ok(Self::Deflate),
            other => Err(UnknownEncoding(other)),
        }
    }
}

/// A stored object that does not decode to the length it should.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Corrupt;

impl fmt::Display for Corrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a compressed object is corrupt: it does not decode to its length")
    }
}

impl core::error::Error for Corrupt {}

enum Encoder {
    Lz4(lz4::Compressor),
    Zstd(zstd::Compressor),
    Deflate(deflate::Compressor),
}

/// Compresses, with its own workspace.
pub struct Compressor {
    encoder: Encoder,
    algorithm: Algorithm,
    /// Largest source, in bytes.
    source_max: usize,
}

impl Compressor {
    /// A compressor of sources up to [`DEFAULT_SOURCE_MAX`].
    ///
    /// # Panics
    /// When the level is not one that [`Algorithm`] allows.
    pub fn new(algorithm: Algorithm) -> Self {
        Self::with_source_max(algorithm, DEFAULT_SOURCE_MAX)
    }

    /// A compressor of sources up to `source_max` bytes, at most 1 GiB. Only zstd's workspace grows with it.
    ///
    /// # Panics
    /// When the level is not one that [`Algorithm`] allows, or `source_max` is more than 1 GiB.
    pub fn with_source_max(algorithm: Algorithm, source_max: usize) -> Self {
        assert!(algorithm.level_is_allowed(), "{algorithm} is not an allowed level");
        // Also keeps every length within C's int.
        assert!(source_max <= 1 << 30, "sources of {source_max} bytes: more than 1 GiB");
        let encoder = match algorithm {
            Algorithm::Lz4 => Encoder::Lz4(lz4::Compressor::new()),
            Algorithm::Zstd(level) => Encoder::Zstd(zstd::Compressor::new(level, source_max)),
            Algorithm::Deflate(level) => Encoder::Deflate(deflate::Compressor::new(level)),
        };
        Self { encoder, algorithm, source_max }
    }

    /// Bytes of the workspace for `source_max`, if it depends on that: zstd's; 0 for the others.
    pub fn workspace_bytes(algorithm: Algorithm, source_max: usize) -> usize {
        match algorithm {
            Algorithm::Zstd(level) => zstd::context_bytes(level, source_max),
            Algorithm::Lz4 | Algorithm::Deflate(_) => 0,
        }
    }

    /// Makes it accept sources up to `source_max` bytes, too. If the workspace must grow for that, it is replaced.
    ///
    /// # Panics
    /// As [`Compressor::with_source_max`].
    pub fn reserve(&mut self, source_max: usize) {
        if source_max > self.source_max {
            *self = Self::with_source_max(self.algorithm, source_max);
        }
    }

    /// Compresses `src` into the start of `dst`, and returns the encoding and length. `None` when it does not fit; then
    /// the contents of `dst` are undefined. Pass a `dst` shorter than `src` (15/16 of it, say) to demand a saving, and
    /// store `src` as [`Encoding::Raw`] if it is not met.
    ///
    /// # Panics
    /// When `src` is longer than the compressor was made for.
    pub fn compress(&mut self, src: &[u8], dst: &mut [u8]) -> Option<(Encoding, usize)> {
        assert!(src.len() <= self.source_max, "source of {} bytes: more than {}", src.len(), self.source_max);
        let (encoding, len) = match &mut self.encoder {
            Encoder::Lz4(lz4) => (Encoding::Lz4, lz4.compress(src, dst)?),
            Encoder::Zstd(zstd) => (Encoding::Zstd, zstd.compress(src, dst)?),
            Encoder::Deflate(deflate) => (Encoding::Deflate, deflate.compress(src, dst)?),
        };
        assert!(len <= dst.len());
        Some((encoding, len))
    }
}

/// Decompresses every [`Encoding`], with its own workspaces: about 100 KiB from zstd's first object on, 10 KiB from
/// deflate's first.
#[derive(Default)]
pub struct Decompressor {
    zstd: Option<zstd::Decompressor>,
    deflate: Option<deflate::Decompressor>,
}

impl Decompressor {
    /// A decompressor.
    pub fn new() -> Self {
        Self::default()
    }

    /// Allocates the workspace that an encoding needs, unless it is there already. Decoding then allocates nothing.
    pub fn prepare(&mut self, encoding: Encoding) {
        match encoding {
            Encoding::Raw | Encoding::Lz4 => {}
            Encoding::Zstd => _ = self.zstd.get_or_insert_with(zstd::Decompressor::new),
            Encoding::Deflate => _ = self.deflate.get_or_insert_with(deflate::Decompressor::new),
        }
    }

    /// Decodes all of `src` into `dst`, and fills it.
    ///
    /// # Errors
    /// [`Corrupt`]: `src` is not in this encoding, or does not decode to the length of `dst`. The contents of `dst` are
    /// undefined then.
    pub fn decompress(&mut self, encoding: Encoding, src: &[u8], dst: &mut [u8]) -> Result<(), Corrupt> {
        let len = match encoding {
            Encoding::Raw if src.len() == dst.len() => {
                dst.copy_from_slice(src);
                Some(src.len())
            }
            Encoding::Raw => None,
            Encoding::Lz4 => lz4::decompress(src, dst),
            Encoding::Zstd => self.zstd.get_or_insert_with(zstd::Decompressor::new).decompress(src, dst),
            Encoding::Deflate => self.deflate.get_or_insert_with(deflate::Decompressor::new).decompress(src, dst),
        };
        if len == Some(dst.len()) { Ok(()) } else { Err(Corrupt) }
    }

    /// Decodes `src`, which decodes to as many bytes as `dst` has, until at least the first `wanted` bytes are there.
    /// Returns how many are: all, if the codec cannot stop half way. The contents of `dst` behind them are undefined.
    ///
    /// # Errors
    /// As [`Decompressor::decompress`].
    pub fn decompress_start(
        &mut self,
        encoding: Encoding,
        src: &[u8],
        dst: &mut [u8],
        wanted: usize,
    ) -> Result<usize, Corrupt> {
        let wanted = wanted.min(dst.len());
        if encoding != Encoding::Lz4 || wanted == dst.len() {
            return self.decompress(encoding, src, dst).map(|()| dst.len());
        }
        lz4::decompress_start(src, dst, wanted).filter(|len| *len >= wanted).ok_or(Corrupt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Preparing an encoding makes what it takes to decode it, and nothing else, as most processes need no other.
    #[test]
    fn workspaces_are_made_when_they_are_asked_for() {
        let has = |encodings: &[Encoding]| {
            let mut decompressor = Decompressor::new();
            encodings.iter().for_each(|encoding| decompressor.prepare(*encoding));
            (decompressor.zstd.is_some(), decompressor.deflate.is_some())
        };
        assert_eq!(has(&[Encoding::Raw, Encoding::Lz4]), (false, false));
        assert_eq!(has(&[Encoding::Zstd]), (true, false));
        assert_eq!(has(&[Encoding::Deflate]), (false, true));
        assert_eq!(has(&[Encoding::Deflate, Encoding::Zstd, Encoding::Zstd]), (true, true));
    }
}

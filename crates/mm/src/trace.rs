//! The trace format: what happened to pages, as `uzswap run --record` writes it and `uzswap replay` reads it.
//!
//! A record is one 64-bit word, written by one store, so a process killed at any instruction leaves whole records only.
//! Records do not hold time and process; the blocks do, which the drainer makes of them.
//!
//! ```text
//! file    header, block, block, ...                                            all numbers little-endian
//! header  magic "uzswaptr" │ version u32 │ bytes of a page u32 │ limit u64 │ codec u32 │ reserved u32      32 bytes
//! block   marker u32 │ slot u32 │ time ns u64 │ lost u64 │ count u32 │ check u32 │ count × record         32 + 8n
//! record  kind 5 bits │ page 35 bits │ small 8 bits │ wide 16 bits                                         8 bytes
//! ```
//! `slot` says whose records follow: those of a member of the group, which writes [`Kind::Start`] or [`Kind::Born`]
//! when the slot gets a new owner. `time` is in nanoseconds, from the start of the recording to when the block was
//! drained. `lost` counts the records of the slot that found no place since the previous block. Records that wait to be
//! drained stay and the newest are lost, so the missing ones come from before, within or behind this block. `check` is
//! over the records.
//!
//! If the recorder is killed, the file ends in the middle of a block; everything before that is good ([`Error::Cut`]).

use core::fmt;

/// First bytes of a trace.
pub const MAGIC: [u8; 8] = *b"uzswaptr";
/// Version of the format.
pub const VERSION: u32 = 1;
/// Bytes of the file header.
pub const HEADER_BYTES: usize = 32;
/// Bytes of a block header.
pub const BLOCK_BYTES: usize = 32;
/// Most records of a block.
pub const MOST_RECORDS: usize = 1 << 20;
const MARKER: u32 = 0x6b6c_6275;
/// Bits of a page number in a 47-bit address space.
const VPN_BITS: u32 = 35;
const KIND_BITS: u32 = 5;

/// What happened. `n` is a number of pages from the page on. The fields are those of [`Record`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The slot has a new owner with nothing in its pool; page: its pid.
    Start = 1,
    /// The owner is about to fork; page: a number for the child to name.
    Fork = 2,
    /// The slot has a new owner, forked where the record [`Kind::Fork`] with this number (page) stands.
    Born = 3,
    /// A fault brought pages from the pool or disk; small: `n` − 1 (at most 16 pages), plus 128 if it was a write;
    /// wide: a bit for each page that keeps its object as a clean copy.
    Load = 4,
    /// A fault brought staged pages back; wide: `n`.
    Refault = 5,
    /// A fault brought pages that are zero or were never touched; wide: `n`.
    Fresh = 6,
    /// Pages left the program, not compressed yet; wide: `n`.
    Evict = 7,
    /// An object was stored; small: order; wide: its bytes, see [`Record::object_bytes`].
    Store = 8,
    /// Evicted pages turned out to be unchanged, and their kept copies serve again; wide: `n`.
    Clean = 9,
    /// Evicted pages turned out to be all zeros; wide: `n`.
    Zero = 10,
    /// Pages were unmapped, or their contents dropped; wide: `n`.
    Free = 11,
    /// Pages gave up their objects, but still exist; wide: `n`.
    Drop = 12,
    /// An object was replaced by a denser one; as [`Kind::Store`].
    Resize = 13,
    /// An object was written to disk; as [`Kind::Store`].
    WriteBack = 14,
    /// An object was read from disk; as [`Kind::Store`].
    DiskRead = 15,
    /// Pages moved to another address (mremap), namely the page of the [`Kind::MoveTo`] that follows; wide: `n`.
    MoveFrom = 16,
    /// Where the pages of [`Kind::MoveFrom`] moved to; wide: `n`.
    MoveTo = 17,
}

impl Kind {
    const ALL: [Self; 17] = [
        Self::Start,
        Self::Fork,
        Self::Born,
        Self::Load,
        Self::Refault,
        Self::Fresh,
        Self::Evict,
        Self::Store,
        Self::Clean,
        Self::Zero,
        Self::Free,
        Self::Drop,
        Self::Resize,
        Self::WriteBack,
        Self::DiskRead,
        Self::MoveFrom,
        Self::MoveTo,
    ];

    /// Number of kinds, plus one: for tables indexed by kind.
    pub const COUNT: usize = 18;

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Fork => "fork",
            Self::Born => "born",
            Self::Load => "load",
            Self::Refault => "refault",
            Self::Fresh => "fresh",
            Self::Evict => "evict",
            Self::Store => "store",
            Self::Clean => "clean",
            Self::Zero => "zero",
            Self::Free => "free",
            Self::Drop => "drop",
            Self::Resize => "resize",
            Self::WriteBack => "write-back",
            Self::DiskRead => "disk read",
            Self::MoveFrom => "move from",
            Self::MoveTo => "move to",
        }
    }
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// What happened.
    pub kind: Kind,
    /// Page number (35 bits), or another number, depending on the kind.
    pub vpn: u64,
    /// Depends on the kind.
    pub small: u8,
    /// Depends on the kind.
    pub wide: u16,
}

/// Bytes in one unit of a stored length: 1 up to orders of 32 KiB, so that 2 MiB fit 16 bits.
fn unit(order: u8) -> usize {
    1 << order.saturating_sub(3)
}

impl Record {
    /// A record of `n` pages from `vpn` on. More than 65535 need several records.
    pub fn pages(kind: Kind, vpn: u64, n: usize) -> Self {
        Self { kind, vpn, small: 0, wide: n.min(0xffff) as u16 }
    }

    /// A record of an object of `len` bytes: stored, resized, written back or read from disk.
    pub fn of_object(kind: Kind, vpn: u64, order: u8, len: usize) -> Self {
        Self { kind, vpn, small: order, wide: len.div_ceil(unit(order)).min(0xffff) as u16 }
    }

    /// A record of pages that one fault brought from the pool, at most 16. Those in `kept` keep their copies.
    pub fn load(vpn: u64, n: usize, write: bool, kept: u16) -> Self {
        let small = (n.clamp(1, 16) - 1) as u8 | if write { 128 } else { 0 };
        Self { kind: Kind::Load, vpn, small, wide: kept }
    }

    /// A record of a number: a pid, or the number of a fork.
    pub fn number(kind: Kind, number: u64) -> Self {
        Self { kind, vpn: number & ((1 << VPN_BITS) - 1), small: 0, wide: 0 }
    }

    /// How many pages the record is about.
    pub fn count(&self) -> usize {
        match self.kind {
            Kind::Load => (self.small & 15) as usize + 1,
            Kind::Store | Kind::Resize | Kind::WriteBack | Kind::DiskRead => 1 << self.small,
            _ => self.wide as usize,
        }
    }

    /// The bytes of an object: exact for up to 32 KiB of pages, else rounded up by at most 64.
    pub fn object_bytes(&self) -> usize {
        self.wide as usize * unit(self.small)
    }

    /// The record as a word; never 0.
    pub fn pack(&self) -> u64 {
        debug_assert!(self.vpn >> VPN_BITS == 0, "page {:x} has more than 35 bits", self.vpn);
        self.kind as u64
            | (self.vpn & ((1 << VPN_BITS) - 1)) << KIND_BITS
            | u64::from(self.small) << 40
            | u64::from(self.wide) << 48
    }

    /// The record that a word holds; `None` if no record looks like that.
    pub fn unpack(word: u64) -> Option<Self> {
        let kind = *Kind::ALL.get(((word & ((1 << KIND_BITS) - 1)) as usize).checked_sub(1)?)?;
        let (vpn, small, wide) = (word >> KIND_BITS & ((1 << VPN_BITS) - 1), (word >> 40) as u8, (word >> 48) as u16);
        let fits = match kind {
            Kind::Store | Kind::Resize | Kind::WriteBack | Kind::DiskRead => small <= 9 && wide > 0,
            Kind::Load => small & 0x70 == 0,
            Kind::Start | Kind::Fork | Kind::Born => small == 0 && wide == 0,
            _ => small == 0 && wide > 0,
        };
        fits.then_some(Self { kind, vpn, small, wide })
    }
}

/// What a trace says about its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The group's limit (bytes).
    pub limit: u64,
    /// The pool's codec, as a number in the group's page.
    pub codec: u32,
}

impl Header {
    /// The header as bytes.
    pub fn write(&self) -> [u8; HEADER_BYTES] {
        let mut b = [0; HEADER_BYTES];
        b[0..8].copy_from_slice(&MAGIC);
        b[8..12].copy_from_slice(&VERSION.to_le_bytes());
        b[12..16].copy_from_slice(&4096u32.to_le_bytes());
        b[16..24].copy_from_slice(&self.limit.to_le_bytes());
        b[24..28].copy_from_slice(&self.codec.to_le_bytes());
        b
    }
}

/// The header of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHead {
    /// Slot of the records' owner.
    pub slot: u32,
    /// When they were drained, in nanoseconds from the start.
    pub time_ns: u64,
    /// Records that found no place since the previous block.
    pub lost: u64,
}

/// Appends a block to `out`.
///
/// # Panics
/// When there are more records than a block may have.
pub fn write_block(out: &mut Vec<u8>, head: BlockHead, words: &[u64]) {
    assert!(words.len() <= MOST_RECORDS, "a block of {} records", words.len());
    out.extend(MARKER.to_le_bytes());
    out.extend(head.slot.to_le_bytes());
    out.extend(head.time_ns.to_le_bytes());
    out.extend(head.lost.to_le_bytes());
    out.extend((words.len() as u32).to_le_bytes());
    out.extend(words.iter().fold(CHECK_SEED, |c, w| check(c, *w)).to_le_bytes());
    out.extend(words.iter().flat_map(|w| w.to_le_bytes()));
}

const CHECK_SEED: u32 = 0x811c_9dc5;

/// An FNV-like checksum, a word at a time.
fn check(so_far: u32, word: u64) -> u32 {
    let mixed = (u64::from(so_far) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 32) as u32
}

/// What is wrong with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// It does not begin like a trace.
    NotATrace,
    /// It has another version.
    Version(u32),
    /// It ends within a header or a block, as the recording was cut short. Everything before that was read.
    Cut,
    /// The block at this byte offset is damaged.
    Damaged(usize),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotATrace => f.write_str("it is not a trace of uzswap run --record"),
            Self::Version(v) => write!(f, "it is a trace of version {v}, and this uzswap reads version {VERSION}"),
            Self::Cut => f.write_str("it ends in the middle: the recording was cut short"),
            Self::Damaged(at) => write!(f, "it is damaged at byte {at}"),
        }
    }
}

impl std::error::Error for Error {}

/// A parsed trace.
#[derive(Clone, Copy, Debug)]
pub struct Trace<'a> {
    /// The file's header.
    pub header: Header,
    bytes: &'a [u8],
}

/// A parsed block.
#[derive(Clone, Debug)]
pub struct Block<'a> {
    /// Owner, time and losses.
    pub head: BlockHead,
    bytes: &'a [u8],
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(core::array::from_fn(|i| b[at + i]))
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(core::array::from_fn(|i| b[at + i]))
}

impl<'a> Trace<'a> {
    /// Parses the header.
    ///
    /// # Errors
    /// When it is not a trace of this version.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Error> {
        if !bytes.starts_with(&MAGIC) {
            return Err(Error::NotATrace);
        }
        if bytes.len() < HEADER_BYTES {
            return Err(Error::Cut);
        }
        if u32_at(bytes, 8) != VERSION {
            return Err(Error::Version(u32_at(bytes, 8)));
        }
        if u32_at(bytes, 12) != 4096 {
            return Err(Error::Damaged(12));
        }
        Ok(Self { header: Header { limit: u64_at(bytes, 16), codec: u32_at(bytes, 24) }, bytes })
    }

    /// The blocks, in the order in which they were drained. The iterator ends after an error.
    pub fn blocks(&self) -> Blocks<'a> {
        Blocks { bytes: self.bytes, at: HEADER_BYTES, ended: false }
    }
}

/// Iterator over blocks.
pub struct Blocks<'a> {
    bytes: &'a [u8],
    at: usize,
    ended: bool,
}

impl<'a> Blocks<'a> {
    fn read(&self) -> Result<Block<'a>, Error> {
        let rest = &self.bytes[self.at..];
        if rest.len() < BLOCK_BYTES {
            return Err(Error::Cut);
        }
        let count = u32_at(rest, 24) as usize;
        if u32_at(rest, 0) != MARKER || count > MOST_RECORDS {
            return Err(Error::Damaged(self.at));
        }
        let bytes = rest.get(BLOCK_BYTES..BLOCK_BYTES + count * 8).ok_or(Error::Cut)?;
        let block = Block {
            head: BlockHead { slot: u32_at(rest, 4), time_ns: u64_at(rest, 8), lost: u64_at(rest, 16) },
            bytes,
        };
        let sum = block.words().fold(CHECK_SEED, check);
        let good = sum == u32_at(rest, 28) && block.words().all(|w| Record::unpack(w).is_some());
        if good { Ok(block) } else { Err(Error::Damaged(self.at)) }
    }
}

impl<'a> Iterator for Blocks<'a> {
    type Item = Result<Block<'a>, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended || self.at == self.bytes.len() {
            return None;
        }
        let block = self.read();
        match &block {
            Ok(block) => self.at += BLOCK_BYTES + block.bytes.len(),
            Err(_) => self.ended = true,
        }
        Some(block)
    }
}

impl<'a> Block<'a> {
    fn words(&self) -> impl Iterator<Item = u64> + use<'a> {
        self.bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b))
    }

    /// Number of records.
    pub fn len(&self) -> usize {
        self.bytes.len() / 8
    }

    /// Whether it has no records and only reports lost ones.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Its records.
    pub fn records(&self) -> impl Iterator<Item = Record> + use<'a> {
        self.words().filter_map(Record::unpack)
    }
}

//! A process that uses memory in bursts: the case that the shrinker is made for.
//!
//! It has three kinds of memory, all with real contents. Whenever it reads a page, it verifies all of it:
//!
//! - *warm*: each round uses it by Zipf's law, and writes to a third of what it uses;
//! - *cold*: written once; each round reads a few pages of it;
//! - a *burst*: each round fills fresh memory, reads it once and gives it back.
//!
//! So the pool gets a mixture of pages that are wanted soon, much later, or never.

use crate::data::Source;
use crate::memory::{self, Memory, Origin};
use crate::size::{self, PAGE};
use crate::workload::{Random, Zipf};
use std::path::PathBuf;

/// `uzswap lab bursts`.
#[derive(clap::Args)]
pub struct Args {
    /// File of real contents
    #[arg(long)]
    source: PathBuf,
    /// Bytes used again and again
    #[arg(long, value_parser = size::parse, default_value = "32M")]
    warm: u64,
    /// Bytes seldom used
    #[arg(long, value_parser = size::parse, default_value = "64M")]
    cold: u64,
    /// Bytes of a burst
    #[arg(long, value_parser = size::parse, default_value = "16M")]
    burst: u64,
    /// Rounds
    #[arg(long, default_value_t = 20)]
    rounds: u32,
}

/// Printed, with details behind it, when memory did not hold what was written.
pub const NOT_KEPT: &str = "MEMORY WAS NOT KEPT";

/// Runs the process; returns 0 if everything read was what was written.
#[must_use]
pub fn main(args: &Args) -> i32 {
    match work(args) {
        Ok(sum) => {
            println!("{sum:016x}");
            0
        }
        Err(error) => {
            eprintln!("error: {error}");
            1
        }
    }
}

/// Pages of one kind, with the number of times each was written.
struct Pages<'a> {
    memory: Box<dyn Memory>,
    source: &'a Source,
    versions: Vec<u32>,
    salt: u64,
}

impl<'a> Pages<'a> {
    fn take(bytes: u64, source: &'a Source, salt: u64) -> Result<Self, String> {
        let len = (bytes as usize / PAGE).max(1) * PAGE;
        let memory = memory::take(Origin::Anonymous, len, 0, false)?;
        let mut pages = Self { memory, source, versions: vec![0; len / PAGE], salt };
        (0..pages.len()).for_each(|page| pages.write(page));
        Ok(pages)
    }

    fn len(&self) -> u64 {
        self.versions.len() as u64
    }

    fn bytes(&mut self, page: u64) -> &mut [u8] {
        // SAFETY: this value alone uses the memory, and the page is within it.
        unsafe { std::slice::from_raw_parts_mut(self.memory.base().add(page as usize * PAGE), PAGE) }
    }

    /// The contents of a page: a page of the source, except for eight bytes that say which page this is and how often it was
    /// written.
    fn expected(&self, page: u64) -> (u64, &'a [u8]) {
        let version = u64::from(self.versions[page as usize]);
        let source = Random::new(page ^ version << 40 ^ self.salt << 56).below(self.source.pages() as u64);
        (page << 24 | version | self.salt << 60, self.source.page(source as usize))
    }

    fn write(&mut self, page: u64) {
        self.versions[page as usize] += 1;
        let (stamp, contents) = self.expected(page);
        let bytes = self.bytes(page);
        bytes.copy_from_slice(contents);
        bytes[..8].copy_from_slice(&stamp.to_ne_bytes());
    }

    fn verify(&mut self, page: u64) -> Result<u64, String> {
        let (stamp, contents) = self.expected(page);
        let bytes = self.bytes(page);
        if bytes[..8] == stamp.to_ne_bytes() && bytes[8..] == contents[8..] {
            Ok(stamp)
        } else {
            Err(format!("{NOT_KEPT}: page {page} differs from what was written"))
        }
    }
}

fn work(args: &Args) -> Result<u64, String> {
    let source = Source::open(&args.source).map_err(|e| format!("cannot read the source of contents: {e}"))?;
    let mut cold = Pages::take(args.cold, &source, 1)?;
    let mut warm = Pages::take(args.warm, &source, 2)?;
    let (mut random, zipf) = (Random::new(42), Zipf::new(warm.len(), 0.8));
    let mut sum = 0u64;
    for _ in 0..args.rounds {
        for i in 0..warm.len() {
            let page = zipf.draw(&mut random);
            sum = sum.wrapping_mul(31).wrapping_add(warm.verify(page)?);
            if i % 3 == 0 {
                warm.write(page);
            }
        }
        let mut burst = Pages::take(args.burst, &source, 3)?;
        for page in 0..burst.len() {
            sum = sum.wrapping_add(burst.verify(page)?);
        }
        drop(burst);
        for _ in 0..cold.len() / 64 {
            let page = random.below(cold.len());
            sum = sum.wrapping_mul(31).wrapping_add(cold.verify(page)?);
        }
    }
    for kept in [&mut warm, &mut cold] {
        for page in 0..kept.len() {
            sum = sum.wrapping_mul(31).wrapping_add(kept.verify(page)?);
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_found_and_a_changed_byte_is_too() {
        let source = Source::of_bytes((0..8 * PAGE).map(|i| (i * 7 / 3) as u8).collect());
        let mut pages = Pages::take(1 << 20, &source, 1).unwrap();
        assert_eq!(pages.len(), 256);
        pages.write(5);
        assert!((0..256).all(|page| pages.verify(page).is_ok()));
        pages.bytes(7)[100] ^= 1;
        assert!(pages.verify(7).is_err() && pages.verify(8).is_ok());
    }
}

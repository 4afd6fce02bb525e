//! Churn: ages memory before it is measured.
//!
//! It writes, reads back and drops runs of 1 to 512 pages, all sizes alike, anywhere and in any order. So pages leave and come
//! back in other pieces than they came in, and frames and compressed objects of all sizes are taken and freed. Churn verifies
//! what it reads. It leaves the memory empty, but its frames and its pool in the state that the churn left them in.

use crate::data::Source;
use crate::memory::Memory;
use crate::size::PAGE;
use crate::workload::{Corrupt, Random};

/// Touches in one hour of a program that touches 2,000 cold pages a second.
pub const HOUR: u64 = 3600 * 2000;

/// The order of the largest run: 2 MiB.
const MAX_ORDER: u64 = 9;

/// Memory under churn, and the model of what it holds.
struct Churn<'a> {
    memory: &'a dyn Memory,
    source: &'a Source,
    /// For each page, the number of the source's page that it holds, plus one; 0 if it was dropped.
    held: Vec<u32>,
    random: Random,
}

/// Churns until `touches` pages have been written, read or dropped, then drops all.
///
/// # Errors
/// When something read is not what was written.
pub fn churn(memory: &dyn Memory, source: &Source, touches: u64) -> Result<(), Corrupt> {
    let pages = memory.len() / PAGE;
    let mut churn = Churn { memory, source, held: vec![0; pages], random: Random::new(0xc4) };
    let mut done = 0;
    while done < touches {
        let n = (1usize << churn.random.below(MAX_ORDER + 1)).min(pages);
        let first = churn.random.below((pages - n + 1) as u64) as usize;
        match churn.random.below(10) {
            0..5 => churn.write(first, n),
            5..8 => churn.read(first, n)?,
            _ => churn.drop_run(first, n),
        }
        done += n as u64;
    }
    churn.read(0, pages)?;
    churn.drop_run(0, pages);
    Ok(())
}

impl Churn<'_> {
    fn word(&self, page: usize, word: usize) -> *mut u64 {
        // SAFETY: the page is one of the memory's, and the word one of the page's.
        unsafe { self.memory.base().add(page * PAGE).cast::<u64>().add(word) }
    }

    fn write(&mut self, first: usize, n: usize) {
        let from = self.random.below(self.source.pages() as u64) as usize;
        for page in first..first + n {
            let at = (from + page - first) % self.source.pages();
            // SAFETY: both are whole pages that do not overlap; the memory is this worker's alone.
            unsafe { std::ptr::copy_nonoverlapping(self.source.page(at).as_ptr(), self.word(page, 0).cast(), PAGE) };
            self.held[page] = at as u32 + 1;
        }
    }

    fn read(&mut self, first: usize, n: usize) -> Result<(), Corrupt> {
        for page in first..first + n {
            for word in [0, self.random.below(PAGE as u64 / 8) as usize] {
                let held = self.held[page] as usize;
                let expected = if held == 0 { 0 } else { self.source.word(held - 1, word) };
                // SAFETY: an aligned word of this worker's memory.
                let found = unsafe { self.word(page, word).read_volatile() };
                if found != expected {
                    return Err(Corrupt { workload: "churn", page, offset: word * 8, expected, found });
                }
            }
        }
        Ok(())
    }

    fn drop_run(&mut self, first: usize, n: usize) {
        self.memory.drop_range(first * PAGE..(first + n) * PAGE);
        self.held[first..first + n].fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{self, Origin};

    #[test]
    fn churn_verifies_and_leaves_nothing() {
        let source = Source::of_bytes((0..64 * PAGE).map(|i| (i * 31 + i / PAGE) as u8 | 1).collect());
        let memory = memory::take(Origin::Anonymous, 1024 * PAGE, 0, false).unwrap();
        churn(&*memory, &source, 20_000).unwrap();
        // SAFETY: the memory is this test's own, and nobody writes to it meanwhile.
        let bytes = unsafe { std::slice::from_raw_parts(memory.base(), memory.len()) };
        assert!(bytes.iter().all(|b| *b == 0));
    }

    /// Memory that does not drop what it is told to drop is detected.
    #[test]
    fn what_is_not_as_it_should_be_is_told() {
        struct Keeps(Box<dyn Memory>);
        impl Memory for Keeps {
            fn base(&self) -> *mut u8 {
                self.0.base()
            }
            fn len(&self) -> usize {
                self.0.len()
            }
            fn drop_range(&self, _: std::ops::Range<usize>) {}
        }
        let source = Source::of_bytes((0..64 * PAGE).map(|i| (i * 31 + i / PAGE) as u8 | 1).collect());
        let memory = Keeps(memory::take(Origin::Anonymous, 1024 * PAGE, 0, false).unwrap());
        assert!(churn(&memory, &source, 20_000).is_err());
    }
}

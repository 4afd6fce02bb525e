//! What is done to memory, and how every read is verified.
//!
//! Page `p` holds a page of the [`Source`] with its first eight bytes replaced by a *stamp*. `p` and the *generation*, the number
//! of times that all memory was written, determine which page of the source. The stamp is the page number, the generation, and
//! the number of times the stamp itself was rewritten. So a page that comes back stale, zero, shifted or from somewhere else
//! differs.

mod threads;

use crate::data::Source;
use crate::size::PAGE;
use std::fmt;
use std::time::Instant;

/// Words of eight bytes in a page.
const WORDS: usize = PAGE / 8;

/// The workloads, in the order a worker does them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Workload {
    /// Writes every page for the first time, in order.
    Fill,
    /// Reads every byte, in order.
    SequentialRead,
    /// `UMap`'s pattern: reads eight bytes of each page, in order.
    Umap,
    /// Writes every page anew, in order.
    SequentialWrite,
    /// Reads eight bytes of uniformly random pages, as many as there are pages.
    RandomRead,
    /// Rewrites eight bytes of uniformly random pages, as many as there are pages.
    RandomWrite,
    /// Reads eight bytes of pages drawn by Zipf's law (theta 0.99), the popular ones scattered.
    ZipfRead,
    /// [`Workload::RandomRead`] by two threads, half of the pages each.
    TwoThreads,
    /// [`Workload::RandomRead`] while another thread of the process computes.
    Beside,
    /// Compares every page whole. Not a measurement: the last word on whether memory was kept.
    Verify,
}

impl Workload {
    /// All of them, in order.
    pub const ALL: [Self; 10] = [
        Self::Fill,
        Self::SequentialRead,
        Self::Umap,
        Self::SequentialWrite,
        Self::RandomRead,
        Self::RandomWrite,
        Self::ZipfRead,
        Self::TwoThreads,
        Self::Beside,
        Self::Verify,
    ];

    /// The name in tables and files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fill => "fill",
            Self::SequentialRead => "sequential read",
            Self::Umap => "8 bytes per page (UMap)",
            Self::SequentialWrite => "sequential write",
            Self::RandomRead => "random read",
            Self::RandomWrite => "random write",
            Self::ZipfRead => "zipf read",
            Self::TwoThreads => "random read, two threads",
            Self::Beside => "random read, one computes",
            Self::Verify => "verify",
        }
    }

    /// Whether its figure is nanoseconds per access, not MB/s of memory.
    #[must_use]
    pub const fn per_access(self) -> bool {
        matches!(self, Self::RandomRead | Self::RandomWrite | Self::ZipfRead) || !self.is_of_one_thread()
    }

    /// Whether the process has only one thread meanwhile.
    #[must_use]
    pub const fn is_of_one_thread(self) -> bool {
        !matches!(self, Self::TwoThreads | Self::Beside)
    }

    /// The unit of its figure.
    #[must_use]
    pub const fn unit(self) -> &'static str {
        if self.per_access() { "ns" } else { "MB/s" }
    }

    /// The workload of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|w| w.name() == name)
    }
}

/// Memory that did not hold what was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Corrupt {
    /// The workload under way.
    pub workload: &'static str,
    /// The page's number.
    pub page: usize,
    /// The byte of the page where the difference begins, or was noticed.
    pub offset: usize,
    /// The eight bytes there, as written.
    pub expected: u64,
    /// The eight bytes there, as read.
    pub found: u64,
}

impl fmt::Display for Corrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: page {} differs at byte {}: wrote {:#018x}, read {:#018x}",
            self.workload, self.page, self.offset, self.expected, self.found
        )
    }
}

/// The timing of one workload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Seconds of `CLOCK_MONOTONIC`.
    pub seconds: f64,
    /// Accesses: whole pages, or single reads and writes.
    pub accesses: u64,
}

impl Timing {
    /// The figure shown: MB/s (10^6 bytes) of pages passed over, or nanoseconds per access.
    #[must_use]
    pub fn figure(&self, workload: Workload) -> f64 {
        if workload.per_access() {
            self.seconds * 1e9 / self.accesses as f64
        } else {
            self.accesses as f64 * PAGE as f64 / 1e6 / self.seconds
        }
    }
}

/// Memory under test: the pages, and the model of what they hold.
pub struct Pages<'a> {
    base: *mut u8,
    pages: usize,
    source: &'a Source,
    generation: u64,
    /// How often each stamp was rewritten since the page was written.
    rewrites: Vec<u16>,
    workload: &'static str,
}

impl<'a> Pages<'a> {
    /// Takes the `len` bytes of memory at `base`, for as long as this value lives.
    ///
    /// # Safety
    /// `base` is page-aligned, the memory is readable and writable, and nobody else touches it meanwhile.
    #[must_use]
    pub unsafe fn new(base: *mut u8, len: usize, source: &'a Source) -> Self {
        let pages = len / PAGE;
        Self { base, pages, source, generation: 0, rewrites: vec![0; pages], workload: "" }
    }

    /// Does one workload, and times it.
    ///
    /// # Errors
    /// When something read is not what was written.
    pub fn run(&mut self, workload: Workload) -> Result<Timing, Corrupt> {
        self.workload = workload.name();
        let pages = self.pages as u64;
        let zipf = (workload == Workload::ZipfRead).then(|| Zipf::new(pages, 0.99));
        let mut random = Random::new(0x5eed + workload as u64);
        let start = Instant::now();
        match workload {
            Workload::Fill => self.write_all(),
            Workload::SequentialWrite => {
                self.generation += 1;
                self.rewrites.fill(0);
                self.write_all();
            }
            Workload::SequentialRead => {
                for page in 0..self.pages {
                    self.read_whole(page)?;
                    self.check_some(page, &mut random)?;
                }
            }
            Workload::Umap => {
                for page in 0..self.pages {
                    self.check_stamp(page)?;
                }
            }
            Workload::RandomRead => self.read_at_random(pages, &mut random)?,
            Workload::RandomWrite => {
                for _ in 0..pages {
                    let page = random.below(pages) as usize;
                    self.check_stamp(page)?;
                    self.rewrites[page] = self.rewrites[page].wrapping_add(1);
                    let stamp = self.stamp(page);
                    // SAFETY: the page is inside the memory that `new` was given.
                    unsafe { self.page(page).cast::<u64>().write_volatile(stamp) };
                }
            }
            Workload::ZipfRead => {
                if let Some(zipf) = &zipf {
                    for _ in 0..pages {
                        let page = zipf.draw(&mut random) as usize;
                        self.check_stamp(page)?;
                        self.check_some(page, &mut random)?;
                    }
                }
            }
            Workload::TwoThreads => threads::read_by_two(self, [random.next(), random.next()])?,
            Workload::Beside => threads::read_beside(self, &mut random)?,
            Workload::Verify => {
                for page in 0..self.pages {
                    self.compare(page)?;
                }
            }
        }
        Ok(Timing { seconds: start.elapsed().as_secs_f64(), accesses: pages })
    }

    /// Reads the stamp and eight more bytes of `times` random pages.
    fn read_at_random(&self, times: u64, random: &mut Random) -> Result<(), Corrupt> {
        for _ in 0..times {
            let page = random.below(self.pages as u64) as usize;
            self.check_stamp(page)?;
            self.check_some(page, random)?;
        }
        Ok(())
    }

    fn page(&self, page: usize) -> *mut u8 {
        debug_assert!(page < self.pages);
        // SAFETY: the page is inside the memory that `new` was given.
        unsafe { self.base.add(page * PAGE) }
    }

    /// Eight bytes of a page as they are in memory now.
    fn word(&self, page: usize, word: usize) -> u64 {
        // SAFETY: `word` is below WORDS, so inside the page; pages are aligned.
        unsafe { self.page(page).cast::<u64>().add(word).read_volatile() }
    }

    fn stamp(&self, page: usize) -> u64 {
        u64::from(self.rewrites[page]) << 48 | (self.generation + 1) << 40 | page as u64
    }

    fn source_of(&self, page: usize) -> usize {
        (page + self.generation as usize * 7919) % self.source.pages()
    }

    fn corrupt(&self, page: usize, offset: usize, expected: u64, found: u64) -> Corrupt {
        Corrupt { workload: self.workload, page, offset, expected, found }
    }

    fn write_all(&self) {
        for page in 0..self.pages {
            let from = self.source.page(self.source_of(page));
            let to = self.page(page);
            // SAFETY: both are whole pages and do not overlap.
            unsafe {
                to.cast::<u64>().write_volatile(self.stamp(page));
                std::ptr::copy_nonoverlapping(from[8..].as_ptr(), to.add(8), PAGE - 8);
            }
        }
    }

    fn check_stamp(&self, page: usize) -> Result<(), Corrupt> {
        let (expected, found) = (self.stamp(page), self.word(page, 0));
        if expected == found { Ok(()) } else { Err(self.corrupt(page, 0, expected, found)) }
    }

    /// Compares eight bytes somewhere behind the stamp.
    fn check_some(&self, page: usize, random: &mut Random) -> Result<(), Corrupt> {
        let word = 1 + random.below(WORDS as u64 - 1) as usize;
        let expected = self.source.word(self.source_of(page), word);
        let found = self.word(page, word);
        if expected == found { Ok(()) } else { Err(self.corrupt(page, word * 8, expected, found)) }
    }

    /// Reads every byte of a page, and compares the stamp and the exclusive or of the rest.
    fn read_whole(&self, page: usize) -> Result<(), Corrupt> {
        // SAFETY: the page is inside the memory that `new` was given, and nobody writes to it meanwhile.
        let words = unsafe { std::slice::from_raw_parts(self.page(page).cast::<u64>(), WORDS) };
        let folded = words[1..].iter().fold(0, |all, word| all ^ word);
        self.check_stamp(page)?;
        let expected = self.source.folded(self.source_of(page));
        if folded == expected {
            return Ok(());
        }
        // Report where, if the difference is still there.
        self.compare(page)?;
        Err(self.corrupt(page, 8, expected, folded))
    }

    /// Compares a page whole.
    fn compare(&self, page: usize) -> Result<(), Corrupt> {
        self.check_stamp(page)?;
        // SAFETY: the page is inside the memory that `new` was given, and nobody writes to it meanwhile.
        let found = unsafe { std::slice::from_raw_parts(self.page(page), PAGE) };
        let from = self.source_of(page);
        if found[8..] == self.source.page(from)[8..] {
            return Ok(());
        }
        let differs = |w: &usize| self.source.word(from, *w) != self.word(page, *w);
        let word = (1..WORDS).find(differs).unwrap_or(1);
        Err(self.corrupt(page, word * 8, self.source.word(from, word), self.word(page, word)))
    }
}

/// A small fast generator (splitmix64): the same sequence for every subject.
pub struct Random(u64);

impl Random {
    /// The sequence for this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform below `n`.
    pub const fn below(&mut self, n: u64) -> u64 {
        ((self.next() as u128 * n as u128) >> 64) as u64
    }

    /// Uniform in 0..1.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Zipf's law over `n` pages (Gray et al., as in YCSB). Ranks are scattered over the memory one to one.
pub struct Zipf {
    n: u64,
    theta: f64,
    zeta: f64,
    alpha: f64,
    eta: f64,
    stride: u64,
}

impl Zipf {
    /// The distribution over `n` pages; `theta` between 0 and 1.
    #[must_use]
    pub fn new(n: u64, theta: f64) -> Self {
        let zeta_of = |n: u64| (1..=n).map(|i| (i as f64).powf(-theta)).sum::<f64>();
        let zeta = zeta_of(n);
        let eta = (1.0 - (2.0 / n as f64).powf(1.0 - theta)) / (1.0 - zeta_of(2) / zeta);
        let mut stride = (n as f64 * 0.618_033_988_75) as u64 | 1;
        while gcd(stride, n) != 1 {
            stride += 2;
        }
        Self { n, theta, zeta, alpha: 1.0 / (1.0 - theta), eta, stride }
    }

    /// A rank: 0 the most popular.
    pub fn rank(&self, random: &mut Random) -> u64 {
        let u = random.unit();
        let scaled = u * self.zeta;
        if scaled < 1.0 {
            return 0;
        }
        if scaled < 1.0 + 0.5f64.powf(self.theta) {
            return 1;
        }
        let rank = self.n as f64 * (self.eta * u - self.eta + 1.0).powf(self.alpha);
        (rank as u64).min(self.n - 1)
    }

    /// A page.
    pub fn draw(&self, random: &mut Random) -> u64 {
        self.scatter(self.rank(random))
    }

    fn scatter(&self, rank: u64) -> u64 {
        (u128::from(rank) * u128::from(self.stride) % u128::from(self.n)) as u64
    }
}

const fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{self, Origin};

    #[test]
    fn zipf_is_skewed_as_it_should_be() {
        let n = 10_000;
        let zipf = Zipf::new(n, 0.99);
        let mut random = Random::new(1);
        let mut counts = vec![0u32; n as usize];
        for _ in 0..200_000 {
            counts[zipf.rank(&mut random) as usize] += 1;
        }
        let share = |ranks: std::ops::Range<usize>| f64::from(counts[ranks].iter().sum::<u32>()) / 200_000.0;
        // zeta(10000, 0.99) = 10.22…: the first rank draws 9.8 %, the first hundred 50 %.
        assert!((share(0..1) - 0.098).abs() < 0.01, "{}", share(0..1));
        assert!((share(0..100) - 0.50).abs() < 0.04, "{}", share(0..100));
        assert!(share(5_000..10_000) > 0.03);
    }

    #[test]
    fn zipf_scatters_one_to_one() {
        for n in [7, 4096, 10_000, 131_072] {
            let zipf = Zipf::new(n, 0.99);
            let mut seen = vec![false; n as usize];
            for rank in 0..n {
                assert!(!std::mem::replace(&mut seen[zipf.scatter(rank) as usize], true));
            }
        }
    }

    #[test]
    fn uniform_stays_below_and_covers() {
        let mut random = Random::new(3);
        let mut seen = [false; 10];
        for _ in 0..1000 {
            seen[random.below(10) as usize] = true;
        }
        assert_eq!(seen, [true; 10]);
        assert!((0..1000).all(|_| (0.0..1.0).contains(&random.unit())));
    }

    fn each_page(check: impl Fn(&mut Pages<'_>, *mut u8)) {
        let source = Source::of_bytes((0..PAGE * 8).map(|i| (i * i / 7) as u8).collect());
        let memory = memory::take(Origin::Anonymous, PAGE * 32, 0, false).unwrap();
        // SAFETY: the mapping is this test's own.
        let mut pages = unsafe { Pages::new(memory.base(), memory.len(), &source) };
        check(&mut pages, memory.base());
    }

    #[test]
    fn every_workload_passes_on_sound_memory_in_any_number_of_rounds() {
        each_page(|pages, _| {
            for _ in 0..2 {
                for workload in Workload::ALL {
                    pages.run(workload).unwrap();
                }
            }
        });
    }

    #[test]
    fn a_flipped_bit_is_seen_by_full_reads_and_named() {
        for at in [PAGE * 5, PAGE * 5 + 100, PAGE * 6 - 1] {
            for workload in [Workload::SequentialRead, Workload::Verify] {
                each_page(|pages, base| {
                    pages.run(Workload::Fill).unwrap();
                    // SAFETY: inside the test's mapping.
                    unsafe { *base.add(at) ^= 0x10 };
                    let corrupt = pages.run(workload).unwrap_err();
                    assert_eq!((corrupt.page, corrupt.offset), (5, at % PAGE / 8 * 8));
                    assert!(corrupt.to_string().contains("page 5"), "{corrupt}");
                });
            }
        }
    }

    #[test]
    fn a_zero_a_stale_and_a_foreign_page_are_seen_by_reads_of_eight_bytes() {
        // What a bug could leave in page 9.
        type Bug = fn(&mut Pages<'_>, *mut u8);
        let zero: Bug = |_, base| {
            // SAFETY: page 9 is inside the test's mapping.
            unsafe { base.add(PAGE * 9).write_bytes(0, PAGE) }
        };
        let foreign: Bug = |_, base| {
            // SAFETY: pages 9 and 17 are inside the test's mapping.
            unsafe { std::ptr::copy_nonoverlapping(base.add(PAGE * 17), base.add(PAGE * 9), PAGE) }
        };
        let stale: Bug = |pages, base| {
            let mut old = vec![0; PAGE];
            // SAFETY: page 9 is inside the test's mapping.
            unsafe { std::ptr::copy_nonoverlapping(base.add(PAGE * 9), old.as_mut_ptr(), PAGE) };
            pages.run(Workload::SequentialWrite).unwrap();
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(old.as_ptr(), base.add(PAGE * 9), PAGE) };
        };
        for bug in [zero, foreign, stale] {
            each_page(|pages, base| {
                pages.run(Workload::Fill).unwrap();
                bug(pages, base);
                assert_eq!(pages.run(Workload::Umap).unwrap_err().page, 9);
                assert_eq!(pages.run(Workload::Verify).unwrap_err().page, 9);
            });
        }
    }

    #[test]
    fn figures_are_in_their_units() {
        let timing = Timing { seconds: 2.0, accesses: 1_000_000 };
        assert!((timing.figure(Workload::Fill) - 2048.0).abs() < 1e-9);
        assert!((timing.figure(Workload::RandomRead) - 2000.0).abs() < 1e-9);
        assert!(Workload::ALL.into_iter().all(|w| Workload::named(w.name()) == Some(w)));
    }
}

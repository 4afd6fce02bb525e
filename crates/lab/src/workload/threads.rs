//! Random reads in a process of two threads: both read, or one reads and the other computes. Taking a page from such a process
//! needs a TLB flush on the other thread's CPU.

use super::{Corrupt, Pages, Random};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Pages that several threads read.
struct Shared<'a>(&'a Pages<'a>);
// SAFETY: memory and model are only read while this is shared: `Pages::run`, the only writer, is in here meanwhile.
unsafe impl Sync for Shared<'_> {}

impl Shared<'_> {
    fn read(&self, times: u64, random: &mut Random) -> Result<(), Corrupt> {
        self.0.read_at_random(times, random)
    }
}

/// Has two threads read as many pages as there are, each with its own seed.
///
/// # Errors
/// When something read is not what was written.
pub(super) fn read_by_two(pages: &Pages<'_>, seeds: [u64; 2]) -> Result<(), Corrupt> {
    let shared = Shared(pages);
    let (shared, half) = (&shared, pages.pages as u64 / 2);
    std::thread::scope(|scope| {
        let threads = seeds.map(|seed| scope.spawn(move || shared.read(half, &mut Random::new(seed))));
        threads.map(|thread| thread.join().expect("a reader does not panic")).into_iter().collect()
    })
}

/// Has one thread read as many pages as there are, while another thread computes.
///
/// # Errors
/// As above.
pub(super) fn read_beside(pages: &Pages<'_>, random: &mut Random) -> Result<(), Corrupt> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut other = Random::new(1);
            while !done.load(Relaxed) {
                std::hint::black_box((0..1000).fold(0, |all, _| all ^ other.next()));
            }
        });
        let read = pages.read_at_random(pages.pages as u64, random);
        done.store(true, Relaxed);
        read
    })
}

#[cfg(test)]
mod tests {
    use super::super::{PAGE, Workload};
    use super::*;
    use crate::data::Source;
    use crate::memory::{self, Origin};

    /// 32 random reads of 32 pages in a round meet each page in some of a hundred rounds.
    #[test]
    fn a_wrong_page_is_seen_by_whichever_thread_reads_it() {
        let source = Source::of_bytes((0..PAGE * 8).map(|i| (i * i / 7) as u8).collect());
        let memory = memory::take(Origin::Anonymous, PAGE * 32, 0, false).unwrap();
        // SAFETY: the mapping is this test's own.
        let mut pages = unsafe { Pages::new(memory.base(), memory.len(), &source) };
        pages.run(Workload::Fill).unwrap();
        for seed in 0..100 {
            read_by_two(&pages, [seed, !seed]).unwrap();
            read_beside(&pages, &mut Random::new(seed)).unwrap();
        }
        // SAFETY: page 9 is inside the test's mapping.
        unsafe { memory.base().add(PAGE * 9).write_bytes(0, PAGE) };
        let seen =
            |read: &dyn Fn(u64) -> Result<(), Corrupt>| (0..100).find_map(|seed| read(seed).err()).expect("seen");
        assert_eq!(seen(&|seed| read_by_two(&pages, [seed, !seed])).page, 9);
        assert_eq!(seen(&|seed| read_beside(&pages, &mut Random::new(seed))).page, 9);
    }
}

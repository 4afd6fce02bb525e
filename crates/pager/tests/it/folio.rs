//! Folios and blocks in a region of the library: lines A and B of the acceptance list. Each test names its line.

use crate::alone::by_itself;
use crate::region::{Rng, against_model, alone, rss_anon, seed};
use std::sync::atomic::{AtomicU64, Ordering::*};
use uzswap_pager::group::counters::Counters;
use uzswap_pager::group::folio::{FolioCounters, LARGE_ORDERS, OrderCounters};
use uzswap_pager::region::{Options, Region};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
/// The default size and limit of a region: more than half of it must be out.
const SIZE: usize = 40 * MIB;
const LIMIT: usize = 18 * MIB;

fn region(faults: &str) -> Region {
    let region = Region::new(SIZE, &Options::new(LIMIT)).unwrap();
    if !faults.is_empty() {
        region.group().faults.set(faults, 1).unwrap();
    }
    region
}

fn counters(region: &Region) -> &Counters {
    &region.group().slots[0].counters
}

fn folios(region: &Region) -> &FolioCounters {
    &counters(region).folios
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Relaxed)
}

/// The sum of a counter over the orders.
fn over_orders(region: &Region, counter: impl Fn(&OrderCounters) -> &AtomicU64) -> u64 {
    (0..LARGE_ORDERS).map(|i| get(counter(&folios(region).orders[i]))).sum()
}

/// The contents of page `i` in round `round`; they compress well.
fn word(i: usize, round: u64) -> u64 {
    (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ round
}

fn write_page(page: &mut [u8], i: usize, round: u64) {
    let mut x = word(i, round) | 1;
    for (k, chunk) in page.chunks_mut(8).enumerate() {
        if k % 8 == 0 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
        }
        chunk.copy_from_slice(&x.to_le_bytes());
    }
}

fn is_page(page: &[u8], i: usize, round: u64) -> bool {
    let mut want = vec![0; PAGE];
    write_page(&mut want, i, round);
    page == want
}

fn fill(region: &mut Region, round: u64) {
    // SAFETY: nobody else uses the region, and no system call gets the memory.
    let memory = unsafe { region.as_slice_mut() };
    memory.chunks_mut(PAGE).enumerate().for_each(|(i, page)| write_page(page, i, round));
}

fn verify(region: &Region, round: u64) {
    // SAFETY: nobody writes meanwhile.
    let memory = unsafe { region.as_slice() };
    memory.chunks(PAGE).enumerate().for_each(|(i, page)| assert!(is_page(page, i, round), "page {i}, round {round}"));
}

/// A1, A6: memory written in sequence leaves as large folios and comes back as such, counted under the kernel's names.
#[test]
fn a1_what_is_written_in_sequence_leaves_and_returns_as_large_folios() {
    let _one = alone();
    let mut region = region("");
    fill(&mut region, 1);
    let new = over_orders(&region, |o| &o.zswpin);
    assert!(new < 10, "what was never there did not come from the pool: {new}");
    verify(&region, 1);
    let (out, back) = (over_orders(&region, |o| &o.zswpout), over_orders(&region, |o| &o.zswpin));
    let whole: u64 = (2..).zip(&folios(&region).orders).map(|(order, o)| get(&o.zswpout) << order).sum();
    let small = get(&counters(&region).zswpout);
    println!("{out} large folios out, {back} back; {small} pages out, {whole} of them in large folios");
    assert!(whole <= small + get(&counters(&region).swpout_zero), "each folio is counted once");
    assert!(out > 100, "{out} large folios stored");
    assert!(back > 20, "{back} large folios came back whole");
    assert!(over_orders(&region, |o| &o.anon_fault_alloc) >= back);
}

/// A1, B3: memory read at random comes and goes page by page. The blocks in which it was stored stay as they are, and a page that
/// was not written to leaves again without being compressed.
#[test]
fn a1_what_is_read_at_random_comes_page_by_page() {
    let _one = alone();
    let mut region = region("");
    fill(&mut region, 1);
    verify(&region, 1);
    let mut rng = Rng::new(seed());
    // SAFETY: nobody writes meanwhile.
    let memory = unsafe { region.as_slice() };
    let read = |rng: &mut Rng| {
        let i = rng.below(SIZE / PAGE);
        assert_eq!(memory[i * PAGE..i * PAGE + 8], {
            let mut page = vec![0; PAGE];
            write_page(&mut page, i, 1);
            page[..8].to_vec()
        });
    };
    (0..30_000).for_each(|_| read(&mut rng));
    let c = counters(&region);
    let now = || [&c.pgmajfault, &c.zswpin, &c.zswpout, &folios(&region).block_partial_read].map(get);
    let before = now();
    // Many, as by chance one fault follows another and is taken for a sequence: in 10,000 reads some 4 % of the pages came like
    // that, and more than a tenth in one run of a hundred.
    (0..80_000).for_each(|_| read(&mut rng));
    let after = now();
    let [faults, pages, stored, partial] = std::array::from_fn(|i| after[i] - before[i]);
    println!("{faults} random faults: {pages} pages came, {stored} were stored, {partial} parts of blocks");
    assert!(faults > 1000 && pages * 10 < faults * 11, "{pages} pages came in {faults} random faults");
    assert!(stored * 10 < faults, "{stored} pages stored though nothing was written");
    assert!(partial > 0, "blocks stay as they are");
}

/// A2, A4: the pool, the index and the limit refuse at every step, and every byte is still right. What is charged to the limit is
/// what is there.
#[test]
fn a2_a4_refused_stores_lose_nothing_and_leak_nothing() {
    let _one = alone();
    if !by_itself("folio::a2_a4_refused_stores_lose_nothing_and_leak_nothing") {
        return;
    }
    for site in ["pool=1/40", "index=1/300", "limit=1/8", "pool=1/60,index=1/500,limit=1/20"] {
        let before = rss_anon();
        let mut region = region(site);
        against_model(&mut region, 2, seed(), 2000);
        let stats = region.stats();
        let held = stats.resident + stats.staged + stats.free + stats.pool;
        assert_eq!(stats.charged, held, "{site}: the charge is what is held");
        let seen = rss_anon().saturating_sub(before);
        println!("{site}: held {held}, the kernel says {seen}");
        assert!(seen < held + 12 * MIB, "{site}: {seen} bytes resident, of which {held} are accounted for");
        let refused = get(&counters(&region).reject_alloc_fail) + get(&folios(&region).pool_limit_hit);
        assert!(refused > 0, "{site}: nothing was refused");
        assert_eq!(get(&counters(&region).poisoned), 0);
        // Entries that a refused store had made would remain, as nobody refers to them.
        region.remove(0..SIZE);
        assert_eq!(region.stats().pool, 0, "{site}: the pool holds what is nobody's");
    }
}

/// A5: with large folios switched off none enters the pool; each is split, and that is counted.
#[test]
fn a5_the_switch_keeps_large_folios_out_of_the_pool() {
    let _one = alone();
    let mut region = region("");
    region.group().folios.large_off.store(u32::MAX << 2, Relaxed);
    fill(&mut region, 1);
    verify(&region, 1);
    fill(&mut region, 2);
    verify(&region, 2);
    assert_eq!(over_orders(&region, |o| &o.zswpout), 0);
    assert!(over_orders(&region, |o| &o.swpout_fallback) > 100);
    assert_eq!(get(&folios(&region).block_write), 0, "units are pages");
    // Switched on again while it runs, for some orders only.
    region.group().folios.large_off.store(1 << 2, Relaxed);
    fill(&mut region, 3);
    verify(&region, 3);
    assert_eq!(get(&folios(&region).orders[0].zswpout), 0);
    assert!(over_orders(&region, |o| &o.zswpout) > 0);
    // Up to 64 KiB: larger folios are split into the largest that may enter. (Once they were split into pages: most of what a
    // program writes in sequence was then compressed 4 KiB at a time.)
    region.group().folios.large_off.store(u32::MAX << 5, Relaxed);
    // Afterwards everything that was on its way into the pool is there.
    fill(&mut region, 5);
    let stored = |region: &Region| folios(region).orders.each_ref().map(|o| get(&o.zswpout));
    let before = stored(&region);
    fill(&mut region, 4);
    verify(&region, 4);
    let now = stored(&region);
    println!("folios stored, 16K to 2M: {before:?}, then {now:?}");
    assert_eq!(now[3..], before[3..], "none larger than 64 KiB enters");
    let pages = [0, 1, 2].map(|o| (now[o] - before[o]) << (o + 2));
    assert!(pages[2] > 1000 && pages[2] > pages[0] + pages[1], "most enter as folios of 64 KiB: {pages:?}");
}

/// A8: a codec that errs is found out before the folio's memory is given up: mismatches are refused and counted, and no byte is
/// lost.
#[test]
fn a8_verification_refuses_what_does_not_decompress_to_what_it_was() {
    let _one = alone();
    let mut region = region("compress=1/50");
    region.group().folios.verify.store(1, Relaxed);
    for round in 1..4 {
        fill(&mut region, round);
        verify(&region, round);
    }
    let refused = get(&folios(&region).reject_verify_fail);
    println!("{refused} folios refused");
    assert!(refused > 10);
    assert!(get(&folios(&region).reject_compress_fail) >= refused);
    assert!(
        over_orders(&region, |o| &o.swpout_fallback) > 0,
        "those that were refused whole are split, and that is counted"
    );
    assert_eq!(get(&counters(&region).poisoned), 0);
}

/// A8: what is read in sequence comes as a batch by one fault, ahead of the accesses that would fault on it, even if the unit of
/// compression is a page. A folio's units leave as a batch, stored whole although there are many.
#[test]
fn a8_units_come_and_go_in_batches() {
    let _one = alone();
    let mut region = region("");
    region.group().folios.units.iter().for_each(|u| u.store(1, Relaxed));
    fill(&mut region, 1);
    let c = counters(&region);
    let now = || [&c.pgmajfault, &c.zswpin].map(get);
    let before = now();
    verify(&region, 1);
    let after = now();
    let [faults, pages] = std::array::from_fn(|i| after[i] - before[i]);
    assert!(pages > 4000, "{pages} pages came back");
    assert!(faults * 8 <= pages, "{faults} faults for {pages} pages");
    assert_eq!(get(&folios(&region).block_write), 0, "each page is a unit");
    assert!(over_orders(&region, |o| &o.zswpout) > 100, "folios leave whole");
}

/// A9: zero folios take no pool memory, whatever their order.
#[test]
fn a9_zero_folios_take_no_pool_memory() {
    let _one = alone();
    let mut region = region("");
    // SAFETY: the only user, and no system call gets it.
    unsafe { region.as_slice_mut() }.fill(1);
    // SAFETY: as above.
    unsafe { region.as_slice_mut() }.fill(0);
    // SAFETY: as above.
    assert!(unsafe { region.as_slice() }.iter().all(|b| *b == 0));
    let stats = region.stats();
    println!("{stats:?}");
    assert!(stats.zeros > 16 * MIB, "{stats:?}");
    assert!(stats.pool < MIB, "{stats:?}");
    assert!(get(&counters(&region).swpout_zero) > 0 && get(&folios(&region).swpin_zero) > 0);
}

/// B1: the unit of compression is selectable.
#[test]
fn b1_the_unit_of_compression_is_selectable() {
    let _one = alone();
    let mut pages_per_block = Vec::new();
    // A folio is at most a 64th of the limit: larger ones are tested below.
    for unit in [0u8, 2, 3, 4, 5, 6] {
        let mut region = region("");
        region.group().folios.units.iter().for_each(|u| u.store(unit + 1, Relaxed));
        fill(&mut region, 1);
        verify(&region, 1);
        let blocks = get(&folios(&region).block_write);
        let pages = get(&counters(&region).zswpout);
        println!("order {unit}: {blocks} blocks, {pages} pages");
        pages_per_block.push(pages / blocks.max(1));
        assert_eq!(blocks == 0, unit == 0);
        let of_this_size = unit.checked_sub(2).map(|i| get(&folios(&region).orders[i as usize].block_write));
        assert!(of_this_size.is_none_or(|n| n > blocks / 4), "{of_this_size:?} of {blocks} blocks are that large");
        let mut rng = Rng::new(seed());
        against_model(&mut region, 1, rng.next(), 500);
    }
    assert!(pages_per_block[1..].is_sorted_by(|a, b| a < b), "{pages_per_block:?}");
}

/// A region whose folios and units are up to 2 MiB.
fn large(faults: &str, unit: u8, verify: bool) -> Region {
    let region = Region::new(224 * MIB, &Options::new(128 * MIB)).unwrap();
    let settings = &region.group().folios;
    settings.units.iter().for_each(|u| u.store(unit + 1, Relaxed));
    settings.verify.store(u32::from(verify), Relaxed);
    if !faults.is_empty() {
        region.group().faults.set(faults, 1).unwrap();
    }
    region
}

/// B1, B3: units of up to 2 MiB are stored whole, come back whole, and are written to and read in part.
#[test]
fn b1_units_of_up_to_2_mib() {
    let _one = alone();
    for unit in [7u8, 8, 9] {
        let mut region = large("", unit, false);
        fill(&mut region, 1);
        verify(&region, 1);
        let f = folios(&region);
        let [written, whole] = [&f.orders[unit as usize - 2].block_write, &f.orders[unit as usize - 2].zswpin].map(get);
        println!("order {unit}: {written} written, {whole} came back whole; {} read", get(&f.block_read));
        assert!(written as usize * (PAGE << unit) > 64 * MIB, "{written} units of order {unit}");
        assert!(whole > 0);
        assert_eq!(get(&f.block_read_again), 0, "no block is decompressed twice for one use");
        against_model(&mut region, 2, seed(), 3000);
        assert!(get(&folios(&region).block_partial_write) > 0);
    }
}

/// A2, A8, B2: stores and loads of large units fail at every step, and no byte is lost. A unit is stored completely or not at
/// all; if there are no frames for it, it is decompressed once and comes as small folios.
#[test]
fn a2_b2_large_units_fail_at_every_step() {
    let _one = alone();
    if !by_itself("folio::a2_b2_large_units_fail_at_every_step") {
        return;
    }
    let steps = [
        ("pool=1/4,limit=1/20", 9),
        ("index=1/2000,limit=1/20", 9),
        ("compress=1/4", 9),
        ("frames=1/2,charge=1/2", 9),
        ("pool=1/8,index=1/5000,compress=1/8,frames=1/3,charge=1/7,copy=1/20,move_out=1/50,move_in=1/50", 7),
    ];
    for (faults, unit) in steps {
        let before = rss_anon();
        let mut region = large(faults, unit, faults.contains("compress"));
        fill(&mut region, 1);
        verify(&region, 1);
        against_model(&mut region, 2, seed(), 1000);
        let f = folios(&region);
        let written = get(&f.orders[unit as usize - 2].block_write);
        let [refused, wrong, failed, small] =
            [&f.pool_limit_hit, &f.reject_verify_fail, &f.block_failed, &f.block_fallback].map(get);
        println!("{faults}: {written} units; {refused} at a limit, {wrong} wrong, {failed} failed, {small} in parts");
        assert!(written > 10, "{faults}");
        assert!(!faults.contains("limit") || refused > 0, "{faults}");
        assert!(!faults.contains("compress") || wrong > 0, "{faults}");
        assert!(!faults.contains("pool") && !faults.contains("index") || failed > 0, "{faults}");
        assert!(!faults.contains("frames") || small > 0, "{faults}");
        assert_eq!(get(&counters(&region).poisoned), 0, "{faults}");
        let stats = region.stats();
        let held = stats.resident + stats.staged + stats.free + stats.pool;
        assert_eq!(stats.charged, held, "{faults}: the charge is what is held");
        // The test's model takes as much.
        let seen = rss_anon().saturating_sub(before);
        assert!(seen < held + 24 * MIB, "{faults}: {seen} bytes resident, of which {held} are accounted for");
    }
}

/// B2: if there are no contiguous frames, a block is decompressed once and comes as small folios, all in one fault, which counts
/// as one major fault.
#[test]
fn b2_without_contiguous_frames_a_block_comes_as_small_folios_in_one_fault() {
    let _one = alone();
    let mut region = region("");
    fill(&mut region, 1);
    region.group().folios.scarce.store(u32::MAX, Relaxed);
    let (c, f) = (counters(&region), folios(&region));
    let (faults, majors, blocks) = (get(&c.pgfault), get(&c.pgmajfault), get(&f.block_read));
    verify(&region, 1);
    let (faults, majors) = (get(&c.pgfault) - faults, get(&c.pgmajfault) - majors);
    let blocks = get(&f.block_read) - blocks;
    println!("{faults} faults, {majors} major, {blocks} blocks");
    let (fell_back, wanted) = (get(&f.block_fallback), over_orders(&region, |o| &o.anon_fault_fallback));
    println!("{fell_back} fell back, {wanted} by orders");
    assert!(fell_back * 2 > majors && wanted >= fell_back);
    assert!(majors <= faults);
    assert!(majors * 4 <= (SIZE / PAGE) as u64, "a fault brings four pages at least");
    assert_eq!(get(&f.block_read_again), 0, "no block is decompressed twice for one use");
    assert_eq!(get(&f.block_fallback_single), 0);
}

/// The story: zeros that came in pieces counted as blocks: 121 blocks had fallen back, and none had been read.
#[test]
fn zeros_that_come_in_pieces_are_no_block_that_falls_back() {
    let _one = alone();
    let mut region = region("");
    // SAFETY: the only user, and no system call gets it.
    unsafe { region.as_slice_mut() }.chunks_mut(PAGE).for_each(|page| page.fill(0));
    region.page_out(0..SIZE);
    region.group().folios.scarce.store(u32::MAX, Relaxed);
    let wanted = over_orders(&region, |o| &o.anon_fault_fallback);
    // SAFETY: nobody writes meanwhile.
    assert!(unsafe { region.as_slice() }.iter().all(|byte| *byte == 0));
    let fell_back = over_orders(&region, |o| &o.anon_fault_fallback) - wanted;
    let f = folios(&region);
    println!("{fell_back} faults, {} zeros", get(&f.swpin_zero));
    assert!(fell_back > 0 && get(&f.swpin_zero) > 0);
    assert_eq!((get(&f.block_read), get(&f.block_fallback)), (0, 0));
}

/// B2 without the fall-back, for comparison in the lab: a fault for each page, and blocks are decompressed again and again.
#[test]
fn b2_without_the_fallback_blocks_are_decompressed_again() {
    let _one = alone();
    let mut region = region("");
    fill(&mut region, 1);
    region.group().folios.scarce.store(u32::MAX, Relaxed);
    region.group().folios.fallback_off.store(1, Relaxed);
    verify(&region, 1);
    let f = folios(&region);
    println!("{} partial, {} again", get(&f.block_partial_read), get(&f.block_read_again));
    assert!(get(&f.block_partial_read) > 100 && get(&f.block_read_again) > 100);
}

/// B2, the first fix: the original gave up (out of memory) if four small folios could not be had either. Now a single page comes,
/// and the program goes on.
///
/// The second: a page whose charge failed was leaked. Here frames and charges fail all the time, and what is held is still what
/// is accounted for.
///
/// The third: an error path kept the lock of the decompression buffer, and the next fault on that CPU waited forever. Here
/// threads fault at once while every step fails now and then.
#[test]
fn b2_frames_and_charges_fail_at_every_step() {
    let _one = alone();
    if !by_itself("folio::b2_frames_and_charges_fail_at_every_step") {
        return;
    }
    for faults in ["frames=1/1,charge=1/1", "frames=1/2,charge=1/2", "frames=1/3,charge=1/7,pool=1/50,copy=1/20"] {
        let before = rss_anon();
        let mut region = region(faults);
        fill(&mut region, 1);
        verify(&region, 1);
        // If charges seldom fail, a page comes alone some three times in so many steps, and in one run of twenty not at all.
        for _ in 0..10 {
            against_model(&mut region, 4, seed(), 1000);
            if get(&folios(&region).block_fallback_single) > 0 {
                break;
            }
        }
        let f = folios(&region);
        println!("{faults}: {} fall-backs, {} single", get(&f.block_fallback), get(&f.block_fallback_single));
        assert!(get(&f.block_fallback) > 0 && get(&f.block_fallback_single) > 0, "{faults}");
        let stats = region.stats();
        let held = stats.resident + stats.staged + stats.free + stats.pool;
        let seen = rss_anon().saturating_sub(before);
        assert!(seen < held + 12 * MIB, "{faults}: {seen} bytes resident, of which {held} are accounted for");
        assert_eq!(get(&counters(&region).poisoned), 0);
    }
}

/// B2, the fourth fix: all four pages got the flags of the page that faulted. A write to a page of a block makes only that page
/// dirty: the others leave again as the clean copies that they are.
#[test]
fn b2_only_the_page_written_to_becomes_dirty() {
    let _one = alone();
    for scarce in [0, u32::MAX] {
        let mut region = region("");
        fill(&mut region, 1);
        region.page_out(0..SIZE);
        region.group().folios.scarce.store(scarce, Relaxed);
        let counts = |region: &Region| [&counters(region).zswpin, &counters(region).swpout_clean].map(get);
        let before = counts(&region);
        // Go through a part that fits and write to the first page of each 64 KiB, where most faults are. Then all of it leaves
        // again, and nothing else does. (Pages that come at random keep no copy of their block.)
        {
            // SAFETY: the only user, and no system call gets it.
            let memory = unsafe { region.as_slice_mut() };
            for i in 0..SIZE / 4 / PAGE {
                match i % 16 {
                    0 => write_page(&mut memory[i * PAGE..(i + 1) * PAGE], i, 2),
                    _ => _ = std::hint::black_box(memory[i * PAGE]),
                }
            }
        }
        region.page_out(0..SIZE / 4);
        let after = counts(&region);
        let [came, clean] = std::array::from_fn(|i| after[i] - before[i]);
        println!("{came} pages came, {clean} left clean");
        assert!(came as usize * PAGE >= SIZE / 5 && clean * 2 > came, "{clean} left clean of {came}");
        // SAFETY: nobody writes meanwhile.
        let memory = unsafe { region.as_slice() };
        for i in 0..SIZE / PAGE {
            let round = if i < SIZE / 4 / PAGE && i % 16 == 0 { 2 } else { 1 };
            assert!(is_page(&memory[i * PAGE..(i + 1) * PAGE], i, round), "page {i}");
        }
    }
}

/// The story: a block whose kept copies had turned out stale never kept one again. A program that changed its data while making
/// it, and then only read it, compressed every page anew whenever it left.
#[test]
fn what_was_written_once_and_is_only_read_from_then_on_leaves_clean() {
    let _one = alone();
    let mut region = region("");
    fill(&mut region, 1);
    verify(&region, 1);
    fill(&mut region, 2);
    verify(&region, 2);
    let c = counters(&region);
    let mut last = (0, 1);
    for pass in 0..8 {
        let (clean, stored) = (get(&c.swpout_clean), get(&c.zswpout));
        verify(&region, 2);
        last = (get(&c.swpout_clean) - clean, get(&c.zswpout) - stored);
        println!("pass {pass}: {} pages left clean, {} were stored anew", last.0, last.1);
    }
    assert!(last.0 > 10 * last.1, "in the end {} left clean, {} were stored anew", last.0, last.1);
}

/// B3, B4: incompressible blocks are stored raw; a write to a part of a block stores that page anew; a block goes with its last
/// page. Each is counted.
#[test]
fn b3_partial_writes_and_incompressible_blocks() {
    let _one = alone();
    let mut region = Region::new(24 * MIB, &Options::new(16 * MIB)).unwrap();
    let mut rng = Rng::new(seed());
    {
        // SAFETY: the only user, and no system call gets it.
        let memory = unsafe { region.as_slice_mut() };
        for (i, page) in memory.chunks_mut(PAGE).enumerate() {
            if i % 64 < 4 {
                page.chunks_mut(8).for_each(|c| c.copy_from_slice(&rng.next().to_le_bytes()));
            } else {
                write_page(page, i, 1);
            }
        }
    }
    verify_mixed(&region, 1);
    assert!(get(&folios(&region).reject_compress_poor) > 0, "random contents are stored raw");
    assert!(get(&counters(&region).stored_incompressible_pages) > 0);
    {
        // SAFETY: as above. Sequential reads keep the compressed blocks; then one page in four changes.
        let memory = unsafe { region.as_slice_mut() };
        for i in 0..memory.len() / PAGE {
            std::hint::black_box(memory[i * PAGE]);
            if i % 4 == 1 && i % 64 >= 16 {
                write_page(&mut memory[i * PAGE..(i + 1) * PAGE], i, 2);
            }
        }
    }
    verify_mixed(&region, 2);
    assert!(get(&folios(&region).block_partial_write) > 0);
    // SAFETY: as above.
    unsafe { region.as_slice_mut() }.fill(0);
    // SAFETY: as above.
    assert!(unsafe { region.as_slice() }.iter().all(|b| *b == 0));
    let stats = region.stats();
    assert!(stats.pool < 2 * MIB, "blocks go with their last page: {stats:?}");
}

fn verify_mixed(region: &Region, round: u64) {
    // SAFETY: nobody writes meanwhile.
    let memory = unsafe { region.as_slice() };
    for (i, page) in memory.chunks(PAGE).enumerate().filter(|(i, _)| i % 64 >= 16) {
        let round = if i % 4 == 1 { round } else { 1 };
        assert!(is_page(page, i, round), "page {i}");
    }
}

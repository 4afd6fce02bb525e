//! `uzswap lab pagemap`: page state: whether it is exact, what it costs, how fast it is read.

use crate::experiment::{Common, Stop, at_least, go_on};
use crate::json::{Findings, Row, Verdict};
use crate::size::{self, MIB, PAGE, mib};
use crate::stats::median;
use crate::undo::Keeper;
use serde_json::json;
use std::hint::black_box;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;
use uzswap_mm::pagemap::{PRESENT, PageMapWriter, PageState, SWAPPED};
use uzswap_pager::region::{Options, Region};
use uzswap_pager::shared::{SharedMapping, SharedOptions, SharedRegion};

/// `uzswap lab pagemap`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Memory to fault in and scan [default: 1G, 128M with --quick]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    size: Option<u64>,
}

/// Loops of the fault-in experiment, as published.
const LOOPS: usize = 5;
/// Pages that a sequential fault brings to a private region and publishes at once. (The owner of a shared region publishes page
/// by page.)
const RUN: u64 = 128;
/// How often each scan is done; the median counts.
const SCANS: usize = 21;
/// The page on which the sequence of steps is done.
const SUBJECT: usize = 5;

/// Runs the experiment. Returns whether everything read back was right.
///
/// # Errors
/// Why it ended early.
pub fn run(args: &Args) -> Result<bool, Stop> {
    let size = args.size.unwrap_or(if args.common.quick { 128 << 20 } else { 1 << 30 });
    at_least("size", size, MIB)?;
    let size = size as usize / PAGE * PAGE;
    let mut notes = Vec::new();
    let mut lab = Lab { rows: Vec::new(), verdicts: Vec::new(), wrong: 0, asked: 0, blind: false };
    let keeper = Keeper::start()?;
    let (dir, _dir) = keeper.make_dir(None)?;
    lab.sequences(&dir.join("socket"), &mut notes)?;
    let shared_size = (size / 8).max(16 << 20);
    go_on()?;
    lab.fault_in_private(size)?;
    lab.fault_in_shared(shared_size)?;
    go_on()?;
    lab.scans(size)?;
    let wrong = lab.wrong;
    notes.push(format!("sequences: {} answers asked for, {wrong} wrong", lab.asked));
    notes.push(
        "off is a region without a page map, in the same program: one without the code at all is not built".to_owned(),
    );
    let settings =
        json!({ "size_bytes": size, "shared_size_bytes": shared_size, "loops": LOOPS, "scans": SCANS, "notes": notes });
    let findings = Findings { rows: lab.rows, verdicts: lab.verdicts, ..Findings::new("pagemap", settings) };
    show!("uzswap lab pagemap: {} (shared: {})\n", mib(size as u64), mib(shared_size as u64));
    let subjects =
        [("off", "off"), ("on", "on"), ("map", "page map"), ("pagemap", "pagemap file"), ("scan", "PAGEMAP_SCAN")];
    findings.publish(&subjects, &notes, args.common.json.as_deref())?;
    Ok(wrong == 0)
}

struct Lab {
    rows: Vec<Row>,
    verdicts: Vec<Verdict>,
    wrong: u64,
    asked: u64,
    /// MADV_REMOVE could not be tried: owners may not serve the kernel's faults here, so they do not see it.
    blind: bool,
}

fn words_at(base: *mut u8, page: usize) -> &'static AtomicU64 {
    // SAFETY: callers pass pages of regions that outlive the use; only atomics are used on them.
    unsafe { &*base.add(page * PAGE).cast::<AtomicU64>() }
}

impl Lab {
    /// Asks for the state after a step; reports a wrong answer on stderr.
    fn expect(&mut self, who: &str, step: &str, state: PageState, present: bool, swapped: bool) {
        self.asked += 1;
        if (state.present(), state.swapped()) != (present, swapped) {
            self.wrong += 1;
            tell!(
                "{who}, {step}: {}/{} instead of {}/{}",
                u8::from(state.present()),
                u8::from(state.swapped()),
                u8::from(present),
                u8::from(swapped)
            );
        }
    }

    /// The functional test of acceptance D.
    fn sequences(&mut self, socket: &Path, notes: &mut Vec<String>) -> Result<(), String> {
        for markers in [true, false] {
            self.shared_sequence(socket, markers, false)?;
        }
        if self.shared_sequence(socket, true, true)? {
            notes.push("after THP: done on a collapsed huge page".to_owned());
        } else {
            notes.push("after THP: not done, the kernel makes no huge page of the object here".to_owned());
        }
        let removes =
            if self.blind { "not done, as removes are not seen here" } else { "done on pages out and in memory" };
        notes.push(format!("MADV_REMOVE: {removes}"));
        self.private_sequence()?;
        let wrong = self.wrong as f64;
        self.verdicts.push(Verdict::at_most("wrong answers in the functional sequences", 0.0, wrong));
        Ok(())
    }

    /// The sequence on a shared region: processes A and B (two mappings), a mapping made anew at each step, a forked child.
    /// Returns false if a huge page was wanted and could not be had.
    fn shared_sequence(&mut self, socket: &Path, markers: bool, huge: bool) -> Result<bool, String> {
        let failed = |e: std::io::Error| format!("shared region: {e}");
        let options = SharedOptions { markers, ..SharedOptions::new(16 << 20) };
        let region = SharedRegion::create(8 << 20, &options).map_err(failed)?;
        region.serve(socket).map_err(failed)?;
        let (a, b) = (region.map().map_err(failed)?, SharedMapping::attach(socket).map_err(failed)?);
        if huge && !collapse(&a) {
            return Ok(false);
        }
        let range = SUBJECT * PAGE..(SUBJECT + 1) * PAGE;
        let who = format!("shared{}{}", if markers { "" } else { ", markers off" }, if huge { ", huge" } else { "" });
        let step = |lab: &mut Self, name: &str, present: bool, swapped: bool| -> Result<(), String> {
            let later = region.map().map_err(failed)?;
            for (which, m) in [("A", &a), ("B", &b), ("a later mapping", &later)] {
                let state = m.page_map().get(SUBJECT as u64);
                lab.expect(&format!("{who}: {which}"), name, state, present, swapped && markers);
            }
            let in_child = in_forked_child(|| a.page_map().get(SUBJECT as u64).0)?;
            lab.expect(&format!("{who}: a forked child"), name, PageState(in_child), present, swapped && markers);
            Ok(())
        };
        let touch = |m: &SharedMapping, v: u64| words_at(m.as_mut_ptr(), SUBJECT).store(v, Relaxed);
        touch(&a, 1);
        step(self, "FAULT1", true, false)?;
        a.page_out(range.clone()).map_err(failed)?;
        step(self, "PAGEOUT", false, true)?;
        let read = words_at(b.as_mut_ptr(), SUBJECT).load(Relaxed);
        step(self, "FAULT2", true, false)?;
        b.remove(range.clone()).map_err(failed)?;
        step(self, "REMOVE", false, false)?;
        touch(&b, 2);
        a.page_out(range.clone()).map_err(failed)?;
        step(self, "PAGEOUT", false, true)?;
        a.remove(range.clone()).map_err(failed)?;
        step(self, "REMOVE", false, false)?;
        // The same by the kernel's own call, for a page that is out and for one in memory.
        let remove = |m: &SharedMapping| {
            // SAFETY: a page of the mapping, which is used as atomics only.
            match unsafe { libc::madvise(m.as_mut_ptr().add(range.start).cast(), PAGE, libc::MADV_REMOVE) } {
                0 => Ok(()),
                _ => Err(failed(std::io::Error::last_os_error())),
            }
        };
        if a.sees_removes() {
            for out in [true, false] {
                touch(&b, 3);
                step(self, "FAULT", true, false)?;
                if out {
                    a.page_out(range.clone()).map_err(failed)?;
                    step(self, "PAGEOUT", false, true)?;
                }
                remove(&b)?;
                step(self, "MADV_REMOVE", false, false)?;
            }
        } else {
            self.blind = true;
        }
        self.asked += 2;
        self.wrong += u64::from(read != 1) + u64::from(words_at(b.as_mut_ptr(), SUBJECT).load(Relaxed) != 0);
        Ok(true)
    }

    fn private_sequence(&mut self) -> Result<(), String> {
        let region = Region::new(4 << 20, &Options::new(16 << 20)).map_err(|e| e.to_string())?;
        let map = region.page_map().ok_or("a region without a page map")?;
        let range = SUBJECT * PAGE..(SUBJECT + 1) * PAGE;
        let word = words_at(region.as_mut_ptr(), SUBJECT);
        let step = |lab: &mut Self, name: &str, present, swapped| {
            lab.expect("private", name, map.get(SUBJECT as u64), present, swapped);
        };
        step(self, "nothing", false, false);
        word.store(1, Relaxed);
        step(self, "FAULT1", true, false);
        region.page_out(range.clone());
        step(self, "PAGEOUT", false, true);
        let read = word.load(Relaxed);
        step(self, "FAULT2", true, false);
        region.remove(range.clone());
        step(self, "REMOVE", false, false);
        word.store(2, Relaxed);
        region.page_out(range.clone());
        step(self, "PAGEOUT", false, true);
        region.remove(range);
        step(self, "REMOVE", false, false);
        self.asked += 2;
        self.wrong += u64::from(read != 1) + u64::from(word.load(Relaxed) != 0);
        Ok(())
    }

    /// The fault-in experiment: only the time of the faults counts. Runs with and without the page map alternate.
    fn fault_in(
        &mut self,
        name: &str,
        pages: usize,
        run: u64,
        mut once: impl FnMut(bool) -> Result<f64, String>,
    ) -> Result<(), Stop> {
        let mut times = [Vec::new(), Vec::new()];
        for turn in 0..LOOPS {
            for i in 0..2 {
                go_on()?;
                let on = (turn + i) % 2 == 1;
                times[usize::from(on)].push(once(on)?);
            }
        }
        let [off, on] = times.map(|t| median(&t).unwrap_or(f64::NAN));
        let mut row = Row::new(format!("{name}: fault-in, median of {LOOPS}"), "s");
        row.put("off", Some(off));
        row.put("on", Some(on));
        self.rows.push(row);
        self.verdicts.push(Verdict::at_most(
            &format!("{name}: cost of the page map by the clock, %"),
            0.5,
            (on / off - 1.0) * 100.0,
        ));
        let fault_ns = off * 1e9 / pages as f64;
        let publish_ns = publish_cost(run);
        let mut row = Row::new(format!("{name}: a fault, and publishing a page"), "ns");
        row.put("off", Some(fault_ns));
        row.put("on", Some(publish_ns));
        self.rows.push(row);
        let share = publish_ns / fault_ns * 100.0;
        self.verdicts.push(Verdict::at_most(&format!("{name}: cost of publishing alone, % of a fault"), 0.5, share));
        Ok(())
    }

    fn fault_in_private(&mut self, size: usize) -> Result<(), Stop> {
        self.fault_in("private region", size / PAGE, RUN, |on| {
            let options = Options { page_map: on, ..Options::new(size + size / 4 + (64 << 20)) };
            let region = Region::new(size, &options).map_err(|e| e.to_string())?;
            let start = Instant::now();
            (0..size / PAGE).for_each(|p| words_at(region.as_mut_ptr(), p).store(p as u64 + 1, Relaxed));
            let time = start.elapsed().as_secs_f64();
            let right = (0..size / PAGE).all(|p| words_at(region.as_mut_ptr(), p).load(Relaxed) == p as u64 + 1);
            if right { Ok(time) } else { Err("memory did not hold what was written".to_owned()) }
        })
    }

    fn fault_in_shared(&mut self, size: usize) -> Result<(), Stop> {
        self.fault_in("shared region", size / PAGE, 1, |on| {
            let options = SharedOptions { markers: on, ..SharedOptions::new(size + size / 4 + (64 << 20)) };
            let failed = |e: std::io::Error| format!("shared region: {e}");
            let region = SharedRegion::create(size, &options).map_err(failed)?;
            let m = region.map().map_err(failed)?;
            let start = Instant::now();
            (0..size / PAGE).for_each(|p| words_at(m.as_mut_ptr(), p).store(p as u64 + 1, Relaxed));
            let time = start.elapsed().as_secs_f64();
            let right = (0..size / PAGE).all(|p| words_at(m.as_mut_ptr(), p).load(Relaxed) == p as u64 + 1);
            if right { Ok(time) } else { Err("memory did not hold what was written".to_owned()) }
        })
    }

    /// Scans the page map and, on the same region, in the kernel's two ways. All ask which pages are present.
    fn scans(&mut self, size: usize) -> Result<(), String> {
        let options = Options::new(size + size / 4 + (64 << 20));
        let region = Region::new(size, &options).map_err(|e| e.to_string())?;
        let pages = size / PAGE;
        (0..pages).for_each(|p| words_at(region.as_mut_ptr(), p).store(p as u64 + 1, Relaxed));
        self.scan("all in memory", &region, pages)?;
        for page in (0..pages).step_by(8) {
            region.page_out(page * PAGE..(page + 1) * PAGE);
        }
        self.scan("every eighth page out", &region, pages - pages.div_ceil(8))
    }

    fn scan(&mut self, what: &str, region: &Region, expected: usize) -> Result<(), String> {
        let map = region.page_map().ok_or("a region without a page map")?;
        let base = region.as_mut_ptr() as usize;
        let fd = uzswap_sys::raw::open(b"/proc/self/pagemap\0", libc::O_RDONLY)
            .map_err(|e| format!("pagemap: error {e}"))?;
        let pages = region.len() / PAGE;
        let mut words = vec![0u8; pages * 8];
        let ours = timed(|| {
            let mut n = 0;
            map.map()
                .scan(0, pages as u64, uzswap_mm::pagemap::Query::having(PRESENT), |r| n += (r.to - r.from) as usize);
            n
        });
        let file = timed(|| {
            let mut done = 0;
            while done < words.len() {
                match uzswap_sys::raw::pread(fd, &mut words[done..], (base / PAGE * 8 + done) as u64) {
                    Ok(n) if n > 0 => done += n,
                    _ => return 0,
                }
            }
            words.chunks_exact(8).filter(|w| w[7] & 0x80 != 0).count()
        });
        let scan = timed(|| {
            let mut n = 0;
            let end = base + pages * PAGE;
            match uzswap_sys::pagemap::present_runs(fd, base, end, |from, to| n += (to - from) / PAGE) {
                Ok(()) => n,
                Err(_) => 0,
            }
        });
        uzswap_sys::raw::close(fd);
        if ours.1 != expected {
            return Err(format!("the page map counts {} pages present, {expected} are", ours.1));
        }
        let mut row = Row::new(format!("scan, {what}"), "µs");
        row.put("map", Some(ours.0));
        // The kernel counts the zero frames that uzswap keeps out, so only its time is compared, if it answered.
        row.put("pagemap", (file.1 > 0).then_some(file.0));
        row.put("scan", (scan.1 > 0).then_some(scan.0));
        self.rows.push(row);
        if file.1 == expected {
            self.verdicts.push(Verdict::at_least(
                &format!("scan, {what}: times faster than the pagemap file"),
                10.0,
                file.0 / ours.0,
            ));
        }
        Ok(())
    }
}

/// The median time in µs, and the answer.
fn timed(mut work: impl FnMut() -> usize) -> (f64, usize) {
    let (mut times, mut answer) = (Vec::new(), 0);
    for _ in 0..SCANS {
        let start = Instant::now();
        answer = black_box(work());
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    (median(&times).unwrap_or(f64::NAN), answer)
}

/// The time to publish one page's state in ns, over a table larger than a first-level cache, in runs of `run` pages.
fn publish_cost(run: u64) -> f64 {
    const PAGES: u64 = 1 << 18;
    let words: Vec<AtomicU64> = (0..PAGES / 8).map(|_| AtomicU64::new(0)).collect();
    let sequence = AtomicU64::new(0);
    let map = PageMapWriter::new(&sequence, &words, PAGES);
    let start = Instant::now();
    for round in 0..8 {
        let state = PageState(if round % 2 == 0 { PRESENT } else { SWAPPED });
        for page in (0..PAGES).step_by(run as usize) {
            match run {
                1 => map.publish(black_box(page), state),
                _ => map.publish_run(black_box(page), run, |_| black_box(state)),
            }
        }
    }
    start.elapsed().as_secs_f64() * 1e9 / (8 * PAGES) as f64
}

/// Fills a region and has the kernel make one huge page of its object's first 2 MiB. Returns false if the kernel does not.
///
/// The region's own mappings lie anywhere and ask for small pages. So this uses another mapping of the object, which the owner's
/// threads have open.
fn collapse(m: &SharedMapping) -> bool {
    const MADV_COLLAPSE: i32 = 25;
    const HUGE: usize = 2 << 20;
    (0..m.len() / PAGE).for_each(|p| words_at(m.as_mut_ptr(), p).store(1, Relaxed));
    let Some(object) = object_of(m) else { return false };
    let rw = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a reservation of twice the size, a mapping of the object at an aligned place in it, and advice on that; contents
    // stay, and all of it is unmapped again.
    unsafe {
        let (none, flags) = (std::ptr::null_mut(), libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        let room = libc::mmap(none, 2 * HUGE, libc::PROT_NONE, flags, -1, 0);
        if room == libc::MAP_FAILED {
            return false;
        }
        let place = (room as usize).next_multiple_of(HUGE) as *mut libc::c_void;
        let fd = object.as_raw_fd();
        let mapped = libc::mmap(place, HUGE, rw, libc::MAP_SHARED | libc::MAP_FIXED, fd, 0) == place;
        // The page is touched, as the kernel needs a page table.
        let done = mapped
            && place.cast::<u64>().read_volatile() == 1
            && libc::madvise(place, HUGE, libc::MADV_HUGEPAGE) == 0
            && libc::madvise(place, HUGE, MADV_COLLAPSE) == 0;
        libc::munmap(room, 2 * HUGE);
        done
    }
}

/// The memory object behind a mapping, wherever in this process it is open.
fn object_of(m: &SharedMapping) -> Option<std::fs::File> {
    let start = format!("{:x}-", m.as_mut_ptr() as usize);
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| line.trim_start_matches('0').starts_with(&start))?;
    let inode: u64 = line.split_whitespace().nth(4)?.parse().ok()?;
    let tasks = std::fs::read_dir("/proc/self/task").ok()?.flatten();
    let descriptors = tasks.filter_map(|task| std::fs::read_dir(task.path().join("fd")).ok()).flatten().flatten();
    let is_it = |path: &std::path::PathBuf| std::fs::metadata(path).is_ok_and(|m| m.ino() == inode);
    let path = descriptors.map(|entry| entry.path()).find(is_it)?;
    std::fs::File::options().read(true).write(true).open(path).ok()
}

/// The answer of a forked child.
fn in_forked_child(ask: impl Fn() -> u8) -> Result<u8, String> {
    // SAFETY: the child only asks, and leaves at once with the answer as its status.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: the call ends the child.
        unsafe { libc::_exit(i32::from(ask())) };
    }
    let mut status = 0;
    // SAFETY: `child` is ours and not reaped; `status` outlives the call.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    if child < 0 || waited != child || !libc::WIFEXITED(status) {
        return Err("a forked child did not answer".to_owned());
    }
    Ok(libc::WEXITSTATUS(status) as u8)
}

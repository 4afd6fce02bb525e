//! The pager: everything of one process, shared by its helper threads.

use crate::arena::{Layout, PAGE};
use crate::group::{Counters, GroupPage, SLOTS, Slot};
use crate::inject::Site;
use crate::state::State;
use crate::trace::{Recorder, Rings};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use uzswap_mm::codec::Algorithm;
use uzswap_mm::trace::{Kind, Record};
use uzswap_sys::lock::{self, Lock};
use uzswap_sys::raw::{self, Errno};
use uzswap_sys::thread;
use uzswap_sys::uffd::{self, Uffd};

/// The features every pager asks for.
pub const FEATURES: u64 =
    uffd::FEATURE_THREAD_ID | uffd::FEATURE_EVENT_REMAP | uffd::FEATURE_EVENT_REMOVE | uffd::FEATURE_EVENT_UNMAP;

/// The pager of a process.
pub struct Pager {
    /// The engine's tables.
    pub state: Lock<State>,
    /// Where uzswap's memory is.
    pub layout: Layout,
    /// The group's page.
    pub group: &'static GroupPage,
    /// This process's slot in the group.
    pub slot: AtomicUsize,
    /// The userfaultfd, in the helpers' own descriptor table; -1 before engaging.
    pub uffd: AtomicI32,
    /// /proc/self/pagemap, likewise.
    pub pagemap: AtomicI32,
    /// /proc/self/statm, likewise.
    pub statm: AtomicI32,
    /// /proc/self/smaps_rollup, likewise.
    pub rollup: AtomicI32,
    /// Whether memory may be shared with a parent or child (after fork).
    pub kin: AtomicBool,
    /// What RssAnon counts and another process counts too (bytes), as last measured.
    pub shared: AtomicUsize,
    /// When `shared` is to be measured again (monotonic nanoseconds).
    pub shared_due: AtomicU64,
    /// Whether memory is registered and helpers run.
    pub engaged: AtomicBool,
    /// The ticker's thread id.
    pub ticker: AtomicI32,
    /// The fault thread's id.
    pub handler: AtomicI32,
    /// The reclaim thread's id.
    pub reclaimer: AtomicI32,
    /// Faults handled: the ticker's evidence that the handler gets to run.
    pub progress: AtomicU64,
    /// Whether the handler sleeps in poll.
    pub asleep: AtomicBool,
    /// Whether the ticker looks after the handler now.
    pub watched: AtomicBool,
    /// Looks of the ticker that program threads asked for, having mapped much memory.
    pub looks_wanted: AtomicU32,
    /// The last request that a whole look has followed (a futex word): what was mapped before it is found.
    pub looks_done: AtomicU32,
    /// Whether the reclaim thread runs (it need not be woken).
    pub reclaiming: AtomicBool,
    /// Bytes of the largest mapping made since the ticker last looked, before engaging.
    pub planned: AtomicUsize,
    /// Set when a forked child's helpers are ready (a futex word).
    pub ready: AtomicU32,
    /// A region of the library: what it holds is counted here, not asked of the kernel.
    pub own_frames: bool,
    /// Ends the reclaim thread of a region.
    pub stopping: AtomicBool,
    /// Where events are recorded, when the group records.
    pub rings: Option<&'static Rings>,
}

impl Pager {
    /// A pager that does nothing yet.
    ///
    /// # Errors
    /// `ENOMEM` when no address space can be reserved; `EAGAIN` when the group is full.
    pub fn new(group: &'static GroupPage, layout: Layout) -> Result<Self, Errno> {
        let level = group.level.load(Relaxed) as i32;
        let algorithm = match group.codec.load(Relaxed) {
            crate::group::CODEC_ZSTD => Algorithm::Zstd(if level == 0 { 1 } else { level.clamp(-7, 19) }),
            crate::group::CODEC_DEFLATE => Algorithm::Deflate(if level == 0 { 1 } else { level.clamp(1, 12) }),
            _ => Algorithm::Lz4,
        };
        let pager = Self {
            state: Lock::new(State::new(layout, algorithm)),
            layout,
            group,
            slot: AtomicUsize::new(0),
            uffd: AtomicI32::new(-1),
            pagemap: AtomicI32::new(-1),
            statm: AtomicI32::new(-1),
            rollup: AtomicI32::new(-1),
            kin: AtomicBool::new(false),
            shared: AtomicUsize::new(0),
            shared_due: AtomicU64::new(0),
            engaged: AtomicBool::new(false),
            ticker: AtomicI32::new(0),
            handler: AtomicI32::new(0),
            reclaimer: AtomicI32::new(0),
            progress: AtomicU64::new(0),
            asleep: AtomicBool::new(false),
            watched: AtomicBool::new(false),
            looks_wanted: AtomicU32::new(0),
            looks_done: AtomicU32::new(0),
            reclaiming: AtomicBool::new(false),
            planned: AtomicUsize::new(0),
            ready: AtomicU32::new(0),
            own_frames: false,
            stopping: AtomicBool::new(false),
            rings: None,
        };
        pager.claim_slot()?;
        Ok(pager)
    }

    /// Takes a slot of the group: this pid's own (after exec), a free one, or a dead member's.
    ///
    /// # Errors
    /// `EAGAIN` when all are taken by live processes.
    pub fn claim_slot(&self) -> Result<(), Errno> {
        if self.inject(Site::Slot).is_some() {
            return Err(libc::EAGAIN);
        }
        let pid = thread::getpid() as u32;
        let slots = &self.group.slots;
        let own = slots.iter().position(|s| s.pid.load(Relaxed) == pid);
        let index = own.or_else(|| {
            (0..SLOTS).find(|i| {
                let old = slots[*i].pid.load(Relaxed);
                (old == 0 || !alive(old)) && slots[*i].pid.compare_exchange(old, pid, AcqRel, Relaxed).is_ok()
            })
        });
        let index = index.ok_or(libc::EAGAIN)?;
        retire(&slots[index].counters, &self.group.dead);
        slots[index].rss.store(0, Relaxed);
        slots[index].swapped.store(0, Relaxed);
        self.slot.store(index, Release);
        self.group.joined.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Records from now on, as the slot's new owner. Before other threads know of the pager.
    pub fn record_in(&mut self, rings: &'static Rings) {
        self.rings = Some(rings);
        let mut s = self.state.lock();
        s.recorder = Some(Recorder::new(rings, self.slot.load(Relaxed)));
        s.note(Record::number(Kind::Start, u64::from(thread::getpid() as u32)));
    }

    /// This process's slot.
    pub fn me(&self) -> &Slot {
        &self.group.slots[self.slot.load(Relaxed)]
    }

    /// This process's counters.
    pub fn counters(&self) -> &Counters {
        &self.me().counters
    }

    /// The userfaultfd.
    pub fn uffd(&self) -> Uffd {
        Uffd::from_raw(self.uffd.load(Relaxed))
    }

    /// The limit in bytes.
    pub fn limit(&self) -> usize {
        self.group.limit.load(Relaxed) as usize
    }

    /// Reads what this process holds and publishes it; 0 when it cannot be read.
    ///
    /// That is RssAnon; after fork less its share of what other processes map too (RssAnon − Pss_Anon), or every page
    /// shared copy-on-write would count once for each process. Pss is dear (the kernel walks the page tables), so it is
    /// measured now and then.
    pub fn read_rss(&self) -> usize {
        let mut text = [0u8; 128];
        let Ok(n) = raw::pread(self.statm.load(Relaxed), &mut text, 0) else { return 0 };
        let mut numbers = text[..n]
            .split(|c| *c == b' ')
            .map(|f| f.iter().take_while(|c| c.is_ascii_digit()).fold(0usize, |v, c| v * 10 + (c - b'0') as usize));
        let resident = numbers.nth(1).unwrap_or(0);
        let shared = numbers.next().unwrap_or(0);
        let mut rss = resident.saturating_sub(shared) * PAGE;
        if self.kin.load(Relaxed) {
            if thread::now_ns() >= self.shared_due.load(Relaxed) {
                self.measure_shared(rss);
            }
            rss = rss.saturating_sub(self.shared.load(Relaxed));
        }
        self.me().rss.store(rss as u64, Relaxed);
        rss
    }

    /// What is held now, for [`State::rss`]: a region knows exactly, a process asks the kernel.
    pub fn rss_now(&self, s: &State) -> usize {
        if !self.own_frames {
            return self.read_rss();
        }
        let rss = s.known_bytes();
        self.me().rss.store(rss as u64, Relaxed);
        rss
    }

    fn measure_shared(&self, rss: usize) {
        let mut text = [0u8; 2048];
        let start = thread::now_ns();
        let n = raw::pread(self.rollup.load(Relaxed), &mut text, 0).unwrap_or(0);
        let pss = text[..n].split(|c| *c == b'\n').find_map(|l| {
            let kib = core::str::from_utf8(l.strip_prefix(b"Pss_Anon:")?.trim_ascii()).ok()?.strip_suffix(" kB")?;
            kib.parse::<usize>().ok()
        });
        let shared = pss.map_or(0, |kib| rss.saturating_sub(kib << 10));
        self.shared.store(shared, Relaxed);
        let end = thread::now_ns();
        // At most a twentieth of the time goes into measuring; where nothing is shared, one look a second.
        let pause = if shared < 1 << 20 { 1_000_000_000 } else { ((end - start) * 20).max(20_000_000) };
        self.shared_due.store(end + pause, Relaxed);
    }

    /// The members' slots that were ever used.
    fn members(&self) -> &[Slot] {
        &self.group.slots[..(self.group.joined.load(Relaxed) as usize + 1).min(SLOTS)]
    }

    /// The other members' slots.
    fn others(&self) -> impl Iterator<Item = &Slot> {
        let mine = self.slot.load(Relaxed);
        self.members().iter().enumerate().filter(move |(i, _)| *i != mine).map(|(_, s)| s)
    }

    /// RssAnon of the other members together, as they last said it.
    pub fn others_rss(&self) -> usize {
        self.others().filter(|s| s.pid.load(Relaxed) != 0).map(|s| s.rss.load(Relaxed) as usize).sum()
    }

    /// Wakes the reclaim threads of the other members that hold something worth while.
    pub fn wake_others(&self) {
        for other in self.others().filter(|o| o.pid.load(Relaxed) != 0 && o.rss.load(Relaxed) > 4 << 20) {
            other.wake.fetch_add(1, Release);
            lock::futex_wake(&other.wake, 1, true);
        }
    }

    /// Clears the slots of members that died without a word.
    pub fn bury_the_dead(&self) {
        for s in self.members() {
            let pid = s.pid.load(Relaxed);
            if pid != 0 && s.rss.load(Relaxed) != 0 && !alive(pid) {
                s.rss.store(0, Relaxed);
                s.swapped.store(0, Relaxed);
            }
        }
    }

    /// Bytes that count against the limit in this process, when `rss` is resident.
    pub fn charged(&self, s: &State) -> usize {
        let held = if self.own_frames { s.known_bytes() } else { s.rss };
        if self.group.pool_uncharged.load(Relaxed) != 0 { held.saturating_sub(s.pool.held_bytes()) } else { held }
    }

    /// Bytes the group is over (positive) or under its limit.
    pub fn excess(&self, s: &State) -> isize {
        (self.charged(s) + self.others_rss()) as isize - self.limit() as isize
    }

    /// Whether the thread that serves faults also reclaims: see `placement`. Not after fork: what is shared must first be
    /// un-shared by another thread, and the children compete for the CPUs anyway.
    pub fn handler_reclaims(&self, s: &State) -> bool {
        s.placement.alone() && !self.kin.load(Relaxed)
    }

    /// Frames kept free ahead of demand: (low, high), in pages.
    pub fn watermarks(&self) -> (usize, usize) {
        let high = (self.limit() / PAGE / 64).clamp(256, 2048);
        (high / 2, high)
    }

    /// Bytes kept below the limit for what is found out late.
    pub fn margin(&self) -> usize {
        (self.limit() / 64).clamp(2 << 20, 16 << 20)
    }

    /// Has the ticker look at what was mapped; with `wait`, returns when it has (or is too late: 200 ms).
    pub fn ask_look(&self, wait: bool) {
        let ticket = self.looks_wanted.fetch_add(1, AcqRel) + 1;
        self.poke_ticker();
        for _ in 0..4 {
            let done = self.looks_done.load(Acquire);
            if !wait || (done.wrapping_sub(ticket) as i32) >= 0 {
                return;
            }
            lock::futex_wait(&self.looks_done, done, Some(50_000_000), false);
        }
    }

    /// Wakes the reclaim thread.
    pub fn wake_reclaim(&self) {
        let word = &self.me().wake;
        word.fetch_add(1, SeqCst);
        // Running, it looks at the word before it sleeps.
        if !self.reclaiming.load(SeqCst) {
            lock::futex_wake(word, 1, true);
        }
    }

    /// Publishes what the summary shows.
    pub fn publish(&self, s: &State) {
        let c = self.counters();
        // The figures of the moment when most was stored: at the end there is nothing left to show.
        if s.swapped as u64 >= c.stored_pages.load(Relaxed) {
            c.stored_pages.store(s.swapped as u64, Relaxed);
            c.pool_total_size.store(s.pool.held_bytes() as u64, Relaxed);
            c.pool_used_size.store(s.pool.used_bytes() as u64, Relaxed);
        }
        c.metadata_size.fetch_max(s.metadata_bytes() as u64, Relaxed);
        self.me().swapped.store(((s.swapped + s.zeros) * PAGE) as u64, Relaxed);
        let others = self.others_rss();
        let total = (self.charged(s) + others) as u64;
        self.group.peak.fetch_max(total, Relaxed);
        let others_out: u64 = self.others().map(|m| m.swapped.load(Relaxed)).sum();
        let held =
            (s.rss.saturating_sub(s.pool.held_bytes()) + (s.swapped + s.zeros) * PAGE + others) as u64 + others_out;
        self.group.peak_held.fetch_max(held, Relaxed);
    }

    /// Writes a line to the program's standard error, whatever the caller's descriptor table is.
    pub fn say(&self, text: &[u8]) {
        let Ok(fd) = raw::open(b"/proc/self/fd/2\0", libc::O_WRONLY) else { return };
        // SAFETY: the text is readable.
        let _ = unsafe { uzswap_sys::sys!(libc::SYS_write, fd, text.as_ptr(), text.len()) };
        raw::close(fd);
    }
}

fn alive(pid: u32) -> bool {
    // SAFETY: signal 0 only asks.
    let asked = unsafe { uzswap_sys::sys!(libc::SYS_kill, pid, 0) };
    asked != Err(libc::ESRCH)
}

/// Adds a dead member's cumulative counters to the group's and clears them.
fn retire(from: &Counters, to: &Counters) {
    let all = |c: &Counters| {
        [
            core::ptr::from_ref(&c.pgfault),
            &c.pgmajfault,
            &c.refault_staged,
            &c.fault_zero,
            &c.zswpout,
            &c.zswpin,
            &c.swpout_zero,
            &c.swpout_clean,
            &c.recompressed_pages,
            &c.pages_compacted,
            &c.stall_ns,
            &c.direct_reclaim,
            &c.move_refused,
            &c.move_concealed,
            &c.reject_alloc_fail,
            &c.poisoned,
        ]
    };
    for (f, t) in all(from).into_iter().zip(all(to)) {
        // SAFETY: the pointers were references a moment ago, to memory that lives as long as the group.
        unsafe { (*t).fetch_add((*f).swap(0, Relaxed), Relaxed) };
    }
    for now in [
        &from.stored_incompressible_pages,
        &from.stored_pages,
        &from.pool_total_size,
        &from.pool_used_size,
        &from.metadata_size,
    ] {
        now.store(0, Relaxed);
    }
}

//! Injected failures. For tests only.
//!
//! Most error paths of the pager are entered once in millions of operations, or never on the kernel at hand. A test enters them
//! by the hundred: it sets [`ENV_FAULTS`] for `uzswap run`, which puts the rates into the group's page, and each site asks
//! [`Pager::inject`] whether to fail this time.
//!
//! ```text
//! UZSWAP_TEST_FAULTS="seed=7,pool=1/50,move_out=1/100"     one store in 50 fails, and one MOVE out in 100
//! ```
//! `move=never` makes all members page without MOVE, as on a kernel that has none (see `without_move`), and `flushes=dear` as if
//! each TLB flush interrupted another CPU (see `shootdown`). With `failures=pass` the last try of a read of the swap file never
//! fails, so no page is lost by that.
//!
//! A draw is a hash of how many were drawn before in the whole group, not state of a process, so a forked child goes on where its
//! parent was. Each site counts how often it failed, and the report shows it: a test must see that what it is about has happened.
//! When nothing is injected, a site costs one load.

use crate::chance::mix;
use crate::pager::Pager;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// Environment variable of `uzswap run` that says what is to fail.
pub const ENV_FAULTS: &str = "UZSWAP_TEST_FAULTS";

/// [`Faults::on`]: failures are injected. Nothing that a stray write by a member is likely to leave there.
pub const ON: u32 = 0x6661_696c;

/// A place that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Site {
    /// The pool finds no place for an object.
    Pool,
    /// A limit refuses a folio before it is stored.
    Limit,
    /// The compressor's result is wrong in one bit: verification must see it, or the hash when the page comes back.
    Compress,
    /// The entry of a page being stored cannot be made.
    Index,
    /// There are no contiguous frames for a folio that comes in.
    Frames,
    /// Incoming pages cannot be charged.
    Charge,
    /// A stored object changes in memory.
    Damage,
    /// MOVE of the program's pages into the arena: EBUSY, EAGAIN after a part, or EEXIST although a page was moved.
    MoveOut,
    /// MOVE of the arena's frames into the program: the same answers.
    MoveIn,
    /// COPY answers EAGAIN.
    Copy,
    /// Read-only memory that was copied is dropped in part, or not at all.
    Drop,
    /// Reading a message of the userfaultfd fails.
    Event,
    /// A range of the program or of the arena cannot be registered.
    Register,
    /// A page block of the arena cannot be taken out of the registration.
    Unregister,
    /// A forked child gets no userfaultfd.
    Uffd,
    /// A process gets no slot in the group.
    Slot,
    /// A thread of uzswap's cannot be started: the one that is there from the start, or one of those that manage memory.
    Thread,
    /// A process is let go of: an unread event keeps a page from coming back, or a lost one from being marked.
    LetGo,
    /// A range is ceded to a userfaultfd of the program's: an unread event keeps a page from coming back, or the kernel has no
    /// memory to end the registration.
    Cede,
    /// The helpers cannot follow a change of user: they may not, or memory has become managed meanwhile.
    Follow,
    /// Reading from the swap file: EIO, EIO after a part, another bit than was written, or two short reads.
    SwapRead,
    /// Writing to the swap file: EIO, ENOSPC, EIO after a part, or two short writes.
    SwapWrite,
    /// The disk has no room for another cluster.
    SwapSpace,
    /// The disk keeps something other than what was written.
    SwapDamage,
    /// A read of the swap file is found to have ended only after some more messages of the userfaultfd were read (faults, or what
    /// the program did to its mappings), or after 3 ms. So what can happen while a read is under way happens in each such read.
    SwapHold,
    /// A read of the swap file stands still until after that was reported. (Where any may stand still, it is reported soon.)
    SwapStall,
    /// Writing to the swap file takes as much longer as a slow disk takes: 1.5 s.
    SwapSlow,
    /// The command can start no process beside the program, as its witness of signals.
    Witness,
}

/// How long a slow write takes (nanoseconds): longer than a fault waits before it lets others be served.
pub(crate) const SLOW_NS: u64 = 1_500_000_000;

/// Every site and its name.
pub const SITES: [(Site, &str); 28] = [
    (Site::Pool, "pool"),
    (Site::Damage, "damage"),
    (Site::MoveOut, "move_out"),
    (Site::MoveIn, "move_in"),
    (Site::Copy, "copy"),
    (Site::Drop, "drop"),
    (Site::Event, "event"),
    (Site::Register, "register"),
    (Site::Unregister, "unregister"),
    (Site::Uffd, "uffd"),
    (Site::Slot, "slot"),
    (Site::Thread, "thread"),
    (Site::LetGo, "let_go"),
    (Site::Cede, "cede"),
    (Site::Follow, "follow"),
    (Site::Limit, "limit"),
    (Site::Compress, "compress"),
    (Site::Index, "index"),
    (Site::Frames, "frames"),
    (Site::Charge, "charge"),
    (Site::SwapRead, "swap_read"),
    (Site::SwapWrite, "swap_write"),
    (Site::SwapSpace, "swap_space"),
    (Site::SwapDamage, "swap_damage"),
    (Site::SwapHold, "swap_hold"),
    (Site::SwapStall, "swap_stall"),
    (Site::SwapSlow, "swap_slow"),
    (Site::Witness, "witness"),
];

/// What is to fail, and what has failed: part of the group's page.
#[repr(C)]
#[derive(Default)]
pub struct Faults {
    /// [`ON`] if anything is injected.
    pub on: AtomicU32,
    /// Whether members must page as on a kernel without MOVE.
    pub never_move: AtomicU32,
    /// Whether members must act as where TLB flushes are expensive: see `shootdown`.
    pub dear_flushes: AtomicU32,
    /// Whether a page's last try of a read of the swap file is spared.
    pub pass: AtomicU32,
    /// The start of the draws.
    pub seed: AtomicU64,
    /// Draws so far, in the whole group.
    pub draws: AtomicU64,
    /// How often each site fails, in 2^-32 (2^32: always).
    pub rates: [AtomicU64; SITES.len()],
    /// How often each site has failed (events).
    pub fired: [AtomicU64; SITES.len()],
}

impl Faults {
    /// Sets rates in the format of [`ENV_FAULTS`]; `seed` is used where the text names none.
    ///
    /// # Errors
    /// One sentence.
    pub fn set(&self, text: &str, seed: u64) -> Result<(), String> {
        self.seed.store(seed, Relaxed);
        for item in text.split(',') {
            let wrong = || {
                format!(
                    "`{item}` in {ENV_FAULTS} is not SITE=N/M with N at most M, seed=N, move=never, flushes=dear or failures=pass"
                )
            };
            let (name, value) = item.split_once('=').ok_or_else(wrong)?;
            if name == "seed" {
                self.seed.store(value.parse().map_err(|_| wrong())?, Relaxed);
                continue;
            }
            if item == "move=never" {
                self.never_move.store(1, Relaxed);
                continue;
            }
            if item == "flushes=dear" {
                self.dear_flushes.store(1, Relaxed);
                continue;
            }
            if item == "failures=pass" {
                self.pass.store(1, Relaxed);
                continue;
            }
            let site = SITES.iter().position(|(_, n)| *n == name).ok_or_else(wrong)?;
            let (n, m) = value.split_once('/').ok_or_else(wrong)?;
            let (n, m): (u32, u32) = (n.parse().map_err(|_| wrong())?, m.parse().map_err(|_| wrong())?);
            if m == 0 || n > m {
                return Err(wrong());
            }
            self.rates[site].store((u64::from(n) << 32) / u64::from(m), Relaxed);
        }
        self.on.store(ON, Release);
        Ok(())
    }

    /// Whether anything is injected.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.load(Relaxed) == ON
    }

    /// Whether a site is to fail now.
    pub fn fails(&self, site: Site) -> bool {
        self.is_on() && self.draw(site).is_some()
    }

    /// Whether a site can fail at all.
    #[cold]
    fn may_fail(&self, site: Site) -> bool {
        SITES.iter().zip(&self.rates).any(|((s, _), rate)| *s == site && rate.load(Relaxed) > 0)
    }

    /// Draws for a site: random bits if it is to fail.
    #[cold]
    fn draw(&self, site: Site) -> Option<u64> {
        let i = SITES.iter().position(|(s, _)| *s == site)?;
        let rate = self.rates[i].load(Relaxed);
        if rate == 0 {
            return None;
        }
        let bits = mix(mix(self.seed.load(Relaxed)) ^ self.draws.fetch_add(1, Relaxed));
        if bits >> 32 >= rate {
            return None;
        }
        self.fired[i].fetch_add(1, Relaxed);
        Some(mix(bits))
    }
}

impl Pager {
    /// Whether a test wants this site to fail now; then random bits, to choose how.
    #[inline]
    pub(crate) fn inject(&self, site: Site) -> Option<u64> {
        let faults = &self.group.faults;
        if faults.is_on() { faults.draw(site) } else { None }
    }

    /// The same for a read of the swap file; `last` says that it is the last try.
    pub(super) fn inject_read(&self, last: bool) -> Option<u64> {
        if last && self.group.faults.pass.load(Relaxed) != 0 { None } else { self.inject(Site::SwapRead) }
    }

    /// Whether a test wants this site to fail at times.
    pub(crate) fn is_injected(&self, site: Site) -> bool {
        let faults = &self.group.faults;
        faults.is_on() && faults.may_fail(site)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_kept() {
        let faults = Faults::default();
        faults.set("seed=3,pool=1/4,copy=1/1,slot=0/1", 9).unwrap();
        assert_eq!((faults.is_on(), faults.seed.load(Relaxed)), (true, 3));
        let fired = |site| (0..10_000).filter(|_| faults.draw(site).is_some()).count();
        assert!((2300..2700).contains(&fired(Site::Pool)), "about one in four");
        assert_eq!((fired(Site::Copy), fired(Site::Slot), fired(Site::Event)), (10_000, 0, 0));
        assert_eq!(faults.fired[4].load(Relaxed), 10_000);
    }

    #[test]
    fn what_a_machine_is_taken_for_is_set() {
        let told = |text: &str| {
            let faults = Faults::default();
            faults.set(text, 0).unwrap();
            [&faults.never_move, &faults.dear_flushes, &faults.pass].map(|set| set.load(Relaxed))
        };
        let texts = ["seed=1", "move=never", "flushes=dear,pool=1/2", "failures=pass"];
        assert_eq!(texts.map(told), [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]);
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for text in ["", "pool", "pool=1", "pool=2/1", "pool=1/0", "pol=1/2", "seed=x", "pool=1/2,", "pool=-1/2"] {
            let faults = Faults::default();
            assert!(faults.set(text, 0).is_err(), "{text}");
            assert_eq!(faults.on.load(Relaxed), 0, "{text}");
        }
    }
}

//! Makes the helpers give up the rights that the program gives up when it changes its user.
//!
//! Credentials belong to threads. libc has every thread that it knows make the system call, but it does not know the helpers. A
//! server that began as root and became another user would have kept root's threads in its process for good. So:
//!
//! - Before memory is managed the ticker is the only helper, and makes the same call. By then it has opened what it will not be
//!   allowed to open any more (the userfaultfd). The helpers that it starts later have its credentials. A forked child's ticker
//!   has the credentials of the thread that forked.
//! - Once memory is managed the process is let go of before the call is made (`letgo`), as its helpers are in the midst of work.
//!
//! Either way the program's call returns when no thread is left with more rights than were asked for. If that cannot be achieved,
//! the call fails (EAGAIN); if it was already made, the process is ended.

use crate::inject::Site;
use crate::pager::Pager;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering::*};
use uzswap_sys::lock::{self, Lock};
use uzswap_sys::raw::Errno;
use uzswap_sys::{sys, thread};

const NOTHING: u32 = 0;
const ASKED: u32 = 1;
const DONE: u32 = 2;
const REFUSED: u32 = 3;

/// A system call that changes the credentials of the calling thread.
#[derive(Clone, Copy, Debug)]
pub struct Change {
    /// The number: `setresuid`, `setgroups`, …, or `capset`, whose second argument is the structure with the capabilities.
    pub nr: i64,
    /// The arguments; what they point to stays valid while the caller waits.
    pub args: [usize; 3],
}

/// A request to the ticker to change its credentials.
pub struct Following {
    /// The program's thread that changes its user holds this.
    pub one: Lock<()>,
    /// How far the request has come (a futex word).
    state: AtomicU32,
    nr: AtomicI32,
    args: [AtomicUsize; 3],
}

impl Default for Following {
    fn default() -> Self {
        Self { one: Lock::new(()), state: AtomicU32::new(NOTHING), nr: AtomicI32::new(0), args: Default::default() }
    }
}

impl Following {
    /// The ticker ends: the asking thread gets a refusal.
    pub(crate) fn refuse(&self) {
        if self.state.compare_exchange(ASKED, REFUSED, SeqCst, SeqCst).is_ok() {
            lock::futex_wake(&self.state, u32::MAX >> 1, false);
        }
    }

    /// Whether a request waits for the ticker.
    #[cfg(test)]
    pub(crate) fn is_asked(&self) -> bool {
        self.state.load(SeqCst) == ASKED
    }

    /// In a forked child: no request is pending.
    pub(crate) fn forget(&self) {
        self.state.store(NOTHING, Relaxed);
        // SAFETY: the thread that held it in the parent does not exist here.
        unsafe { self.one.force_unlock() };
    }
}

impl Pager {
    /// Whether the helpers can change their user along with the program, as far as is known: only before memory is managed.
    pub fn can_follow(&self) -> bool {
        // With a server, connections are yet to be made, which another user may not make.
        !self.engaged.load(Acquire) && self.tier.link.load(Acquire) < 0
    }

    /// Has the ticker make the call that the calling thread has made; false if the ticker could not, or if memory is managed by
    /// now. The caller holds [`Following::one`].
    pub fn change_helpers(&self, change: Change) -> bool {
        let f = &self.following;
        f.nr.store(change.nr as i32, Relaxed);
        f.args.iter().zip(change.args).for_each(|(to, arg)| to.store(arg, Relaxed));
        f.state.store(ASKED, SeqCst);
        if self.has_gone() {
            // The ticker may have ended before it saw the request.
            f.refuse();
        }
        self.poke_ticker();
        while f.state.load(SeqCst) == ASKED {
            lock::futex_wait(&f.state, ASKED, None, false);
        }
        f.state.swap(NOTHING, SeqCst) == DONE
    }

    /// In the ticker: makes the requested call.
    pub(crate) fn change_ticker(&'static self) {
        let f = &self.following;
        if f.state.load(SeqCst) != ASKED {
            return;
        }
        let change = Change { nr: i64::from(f.nr.load(Relaxed)), args: [0, 1, 2].map(|n| f.args[n].load(Relaxed)) };
        let injected = self.inject(Site::Follow);
        if injected.is_some_and(|bits| bits % 2 == 0) && !self.engaged.load(Acquire) {
            let _ = self.engage();
        }
        let done = injected.is_none() && self.can_follow() && {
            self.open_ahead();
            makes(change).is_ok()
        };
        f.state.store(if done { DONE } else { REFUSED }, SeqCst);
        lock::futex_wake(&f.state, u32::MAX >> 1, false);
    }

    /// Whether the calling thread belongs to the process whose memory this is, rather than to a vfork child, which has
    /// credentials of its own.
    pub fn is_of_this_process(&self) -> bool {
        self.me().owner().is_some_and(|owner| owner.pid() == thread::getpid() as u32)
    }

    /// Opens what another user may not open. (If that fails, memory cannot be managed later, and a message then says so.)
    fn open_ahead(&self) {
        if self.uffd.load(Relaxed) < 0 {
            let _ = self.open_uffd();
        }
    }
}

/// Makes the call in the calling thread.
fn makes(change: Change) -> Result<(), Errno> {
    if change.nr == libc::SYS_capset {
        return caps_within(change.args[1]);
    }
    let [a, b, c] = change.args;
    // SAFETY: a call that changes credentials; its arguments are numbers, or a list that the caller keeps meanwhile.
    unsafe { sys!(change.nr, a, b, c) }.map(drop)
}

/// Gives up all capabilities except those in the structure at `asked`. (The thread need not have those: it may have fewer.)
fn caps_within(asked: usize) -> Result<(), Errno> {
    let own = thread::capabilities()?;
    // SAFETY: the asking thread passed it to the kernel, which has read as many bytes from it.
    let asked = unsafe { (asked as *const [u32; 6]).read_unaligned() };
    let within: [u32; 6] = core::array::from_fn(|n| own[n] & asked[n]);
    thread::set_capabilities(within)
}

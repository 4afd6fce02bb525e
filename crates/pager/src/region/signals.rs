//! Finds the region that a SIGBUS belongs to, and serves the fault in the thread that got it.
//!
//! A region's userfaultfd turns an access to a missing page into a SIGBUS. The handler finds the region by the address, serves
//! the fault as a process's handler thread would, and returns: the access is repeated. Signals that belong to no region, and
//! accesses to lost pages, go to the handler that was there before ours.
//!
//! The handler interrupts whatever the thread was doing, so it uses only what signal handlers may: atomics ([`Registry`]), the
//! pager's lock, which no thread of the program holds while it may fault or be interrupted ([`SignalsBlocked`]), and the pager's
//! own memory. A region that a thread touches is not being dropped; that is up to the caller.

use crate::fault::Request;
use crate::fault::placement::Helpers;
use crate::frames::arena::PAGE;
use crate::page_state::marks::Write;
use crate::pager::Pager;
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::*};
use std::sync::OnceLock;
use uzswap_mm::pagetable::Tag;
use uzswap_sys::thread;

use super::MOST_REGIONS;

/// Blocks every signal in this thread but SIGBUS and SIGSEGV while it lives.
pub(crate) struct SignalsBlocked(u64);

impl SignalsBlocked {
    pub(crate) fn new() -> Self {
        // SIGBUS and SIGSEGV stay unblocked: a fault of the thread's own must not be put off.
        let mask = !((1u64 << (libc::SIGBUS - 1)) | (1 << (libc::SIGSEGV - 1)));
        Self(thread::block_signals(mask))
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        thread::set_signal_mask(self.0);
    }
}

/// The addresses of all regions. The signal handler reads it, so it is all atomics.
pub(super) struct Registry {
    places: [Place; MOST_REGIONS],
    used: AtomicUsize,
}

struct Place {
    /// 0: the place is free.
    start: AtomicUsize,
    end: AtomicUsize,
    pager: AtomicPtr<Pager>,
}

pub(super) static REGISTRY: Registry = Registry {
    places: [const {
        Place { start: AtomicUsize::new(0), end: AtomicUsize::new(0), pager: AtomicPtr::new(core::ptr::null_mut()) }
    }; MOST_REGIONS],
    used: AtomicUsize::new(0),
};

impl Registry {
    pub(super) fn add(&self, start: usize, len: usize, pager: *mut Pager) -> Option<usize> {
        let takes = |p: &Place| p.start.compare_exchange(0, start, SeqCst, SeqCst).is_ok();
        let index = self.places.iter().position(takes)?;
        let place = &self.places[index];
        place.end.store(start + len, SeqCst);
        place.pager.store(pager, SeqCst);
        self.used.fetch_max(index + 1, SeqCst);
        Some(index)
    }

    pub(super) fn remove(&self, index: usize) {
        let place = &self.places[index];
        place.pager.store(core::ptr::null_mut(), SeqCst);
        place.start.store(0, SeqCst);
    }

    fn find(&self, at: usize) -> Option<&'static Pager> {
        self.places[..self.used.load(SeqCst)].iter().find_map(|p| {
            let pager = p.pager.load(SeqCst);
            let inside = !pager.is_null() && (p.start.load(SeqCst)..p.end.load(SeqCst)).contains(&at);
            // Read it again: the place may have changed hands in between.
            if !inside || p.pager.load(SeqCst) != pager {
                return None;
            }
            // SAFETY: a thread touches the region, so it is not being dropped.
            Some(unsafe { &*pager })
        })
    }
}

/// In a forked child: the parent's regions do not exist here, and other memory may be in their places. (No parent thread that was
/// about to add one exists here either, so all places are given up.)
///
/// The story: a child made a region of its own, at the address of one of its parent's. Faults on it were taken for the parent's,
/// and the child ended by SIGSEGV at its first touch.
extern "C" fn forget_parents() {
    (0..MOST_REGIONS).for_each(|index| REGISTRY.remove(index));
}

static EARLIER: OnceLock<libc::sigaction> = OnceLock::new();

pub(super) fn install_handler() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: zero is a sigaction.
        let mut old: libc::sigaction = unsafe { core::mem::zeroed() };
        // SAFETY: asks only.
        unsafe { libc::sigaction(libc::SIGBUS, core::ptr::null(), &raw mut old) };
        // Stored before our handler can run.
        let _ = EARLIER.set(old);
        // SAFETY: as above.
        let mut new: libc::sigaction = unsafe { core::mem::zeroed() };
        new.sa_sigaction = on_sigbus as *const () as usize;
        new.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        // SAFETY: a sigaction of ours; the handler obeys the rules of handlers.
        unsafe {
            libc::sigfillset(&raw mut new.sa_mask);
            libc::sigaction(libc::SIGBUS, &raw const new, core::ptr::null_mut());
            // If that fails, for want of memory, a child has to do without regions.
            libc::pthread_atfork(None, None, Some(forget_parents));
        }
    });
}

extern "C" fn on_sigbus(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel's siginfo; si_addr is set for a SIGBUS of the kernel's, and is only compared here.
    let (at, code) = unsafe { ((*info).si_addr() as usize, (*info).si_code) };
    // A signal sent by a process has a code of zero or less, and no address.
    let served = code > 0
        && REGISTRY.find(at).is_some_and(|pager| {
            // SAFETY: the kernel's ucontext; bit 1 of the page fault's error code says that it was a write.
            let write = unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_ERR as usize] & 2 };
            // SAFETY: the thread's errno.
            let errno = unsafe { *libc::__errno_location() };
            let served = pager.serve_signal((at / PAGE) as u64, write != 0);
            // SAFETY: as above.
            unsafe { *libc::__errno_location() = errno };
            served
        });
    if !served {
        chain(signal, info, context);
    }
}

/// Does what would happen without regions.
fn chain(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(earlier) = EARLIER.get() else { return };
    match earlier.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // A fault cannot be ignored. Returning repeats the access, which then ends the process; a signal that was sent is
            // sent again.
            // SAFETY: zero is SIG_DFL; plain calls.
            unsafe {
                if earlier.sa_sigaction == libc::SIG_IGN && (*info).si_code <= 0 {
                    return;
                }
                let default: libc::sigaction = core::mem::zeroed();
                libc::sigaction(signal, &raw const default, core::ptr::null_mut());
                if (*info).si_code <= 0 {
                    libc::raise(signal);
                }
            }
        }
        handler => {
            // The earlier handler expects the mask that it asked for, on top of the thread's own.
            // SAFETY: the kernel's ucontext, and the earlier handler called as it was installed.
            unsafe {
                let mut mask = (*context.cast::<libc::ucontext_t>()).uc_sigmask;
                for n in 1..=64 {
                    if libc::sigismember(&raw const earlier.sa_mask, n) == 1 {
                        libc::sigaddset(&raw mut mask, n);
                    }
                }
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, core::ptr::null_mut());
                if earlier.sa_flags & libc::SA_SIGINFO != 0 {
                    let call: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
                        core::mem::transmute(handler);
                    call(signal, info, context);
                } else {
                    let call: extern "C" fn(i32) = core::mem::transmute(handler);
                    call(signal);
                }
            }
        }
    }
}

impl Pager {
    /// Serves a fault in the thread that got it; false if the page is lost.
    fn serve_signal(&self, vpn: u64, write: bool) -> bool {
        let mut s = self.state.lock();
        if write && let Some(marks) = &self.marks {
            match self.note_write(&mut s, marks, vpn) {
                Write::Missing => {}
                Write::Allowed => return true,
                Write::Waits(word) => {
                    drop(s);
                    marks.wait(word);
                    return true;
                }
            }
        }
        if s.placement.due() {
            // SAFETY: no arguments; read from the thread's own data.
            let cpu = unsafe { libc::sched_getcpu() };
            let reclaimer = self.reclaimer.load(Relaxed);
            let helpers = Helpers {
                reclaimer,
                idles: self.may_leave_idle.load(Relaxed),
                crew: self.crew_tids(),
                ..Helpers::default()
            };
            let tid = uzswap_sys::thread::gettid() as u32;
            s.placement.fault_on(usize::try_from(cpu).unwrap_or(0), tid, helpers, false);
        }
        let _ = self.make_room(&mut s, vpn);
        // What cannot be done now (the kernel's EAGAIN) is tried again by the access itself, which faults again.
        let _ = self.serve(&mut s, Request { vpn, write, protected: false });
        let tag = s.pt.get(vpn).tag();
        let wake = self.needs_reclaim(&s);
        drop(s);
        if wake {
            self.wake_reclaim();
        }
        // A resident page is checked too if it may still be write-protected.
        let asks = tag != Tag::Resident || (write && self.marks.is_some());
        tag != Tag::Poisoned && !(asks && self.is_cut_off(vpn))
    }
}

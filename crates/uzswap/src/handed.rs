//! Process attributes that survive exec but not fork: timers (`alarm`), the signal sent when the parent ends, and whether orphans
//! below become its children. The program is the command's child, so the command hands them over.
//!
//! The story: a script gave a program so many seconds by `alarm` and `exec`, or a supervisor had it end with itself. The command
//! got the alarm and did nothing with it; or it was killed, and its program went on for good.

use std::mem::MaybeUninit;

const TIMERS: [libc::c_int; 3] = [libc::ITIMER_REAL, libc::ITIMER_VIRTUAL, libc::ITIMER_PROF];
const NEVER: libc::timeval = libc::timeval { tv_sec: 0, tv_usec: 0 };
static UNSET: libc::itimerval = libc::itimerval { it_interval: NEVER, it_value: NEVER };

/// The attributes that the program is to get: see the file's head.
#[derive(Clone, Copy)]
pub struct Handed {
    timers: [libc::itimerval; 3],
    parent_ends: libc::c_int,
    has_orphans: bool,
    /// Our pid: that of the program's parent.
    parent: libc::pid_t,
}

impl Handed {
    /// Takes the attributes that this process was given, and stops its timers.
    pub fn take() -> Handed {
        let mut timers = [UNSET, UNSET, UNSET];
        let (mut parent_ends, mut has_orphans): (libc::c_int, libc::c_int) = (0, 0);
        // SAFETY: all out-parameters are ours and outlive the calls.
        let parent = unsafe {
            for (which, timer) in TIMERS.into_iter().zip(&mut timers) {
                let mut was = MaybeUninit::uninit();
                if libc::setitimer(which as _, &raw const UNSET, was.as_mut_ptr()) == 0 {
                    *timer = was.assume_init();
                }
            }
            libc::prctl(libc::PR_GET_PDEATHSIG, &raw mut parent_ends);
            libc::prctl(libc::PR_GET_CHILD_SUBREAPER, &raw mut has_orphans);
            libc::getpid()
        };
        Handed { timers, parent_ends, has_orphans: has_orphans != 0, parent }
    }

    /// Gives the attributes to the calling process, our child. Makes only async-signal-safe calls: used between fork and exec.
    pub fn give(&self) {
        // SAFETY: the calls read our timers, which outlive them, and touch no other memory.
        unsafe {
            for (which, timer) in TIMERS.into_iter().zip(&self.timers) {
                libc::setitimer(which as _, timer, std::ptr::null_mut());
            }
            if self.has_orphans {
                libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1);
            }
            if self.parent_ends != 0 {
                libc::prctl(libc::PR_SET_PDEATHSIG, self.parent_ends);
                // If the parent ended before the call, no signal comes.
                if libc::getppid() != self.parent {
                    libc::raise(self.parent_ends);
                }
            }
        }
    }
}

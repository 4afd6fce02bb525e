//! Changes of user and capabilities: uzswap's threads follow, or the process is let go of
//! (`uzswap_pager::calls::credentials`).
//!
//! libc's functions are interposed. Changes that a program makes by system calls of its own hold for the calling thread
//! alone, and uzswap does not follow them (some servers act for their clients that way).

use crate::leaving::changes_user;
use crate::next::Next;
use crate::{fails, pager};
use core::ffi::{c_char, c_int, c_void};
use libc::{gid_t, uid_t};
use uzswap_pager::calls::credentials::Change;
use uzswap_pager::pager::Pager;
use uzswap_sys::{raw, sys, thread};

static SETUID: Next = Next::new(c"setuid");
static SETEUID: Next = Next::new(c"seteuid");
static SETREUID: Next = Next::new(c"setreuid");
static SETRESUID: Next = Next::new(c"setresuid");
static SETGID: Next = Next::new(c"setgid");
static SETEGID: Next = Next::new(c"setegid");
static SETREGID: Next = Next::new(c"setregid");
static SETRESGID: Next = Next::new(c"setresgid");
static SETGROUPS: Next = Next::new(c"setgroups");
static INITGROUPS: Next = Next::new(c"initgroups");

/// As an argument: leave the id as it is.
const SAME: u32 = u32::MAX;
/// Finds the interposed functions. Called in the constructor.
pub fn init() {
    let users = [&SETUID, &SETEUID, &SETREUID, &SETRESUID];
    let groups = [&SETGID, &SETEGID, &SETREGID, &SETRESGID, &SETGROUPS, &INITGROUPS];
    users.into_iter().chain(groups).for_each(|f| {
        f.find();
    });
}

/// The real, effective and saved user (`SYS_getresuid`) or group (`SYS_getresgid`) ids of the calling thread.
fn own(nr: i64) -> [u32; 3] {
    let mut ids = [0u32; 3];
    let [real, effective, saved] = &mut ids;
    // SAFETY: the kernel fills three numbers of ours.
    let _ = unsafe { sys!(nr, core::ptr::from_mut(real), core::ptr::from_mut(effective), core::ptr::from_mut(saved)) };
    ids
}

/// Whether the ids asked for are those that the thread has.
fn already(get: i64, asked: [u32; 3]) -> bool {
    own(get).iter().zip(asked).all(|(own, asked)| asked == SAME || asked == *own)
}

/// What `setreuid` and `setregid` ask for. (If only a real id is given they change the saved one, too; `SAME - 1`
/// equals no id.)
fn pair(real: u32, effective: u32) -> [u32; 3] {
    let saved = if effective == SAME && real != SAME { SAME - 1 } else { effective };
    [real, effective, saved]
}

fn numbers(nr: i64, ids: [u32; 3]) -> Change {
    Change { nr, args: ids.map(|id| id as usize) }
}

macro_rules! interpose {
    ($name:ident, $which:expr, $id:ty, $get:expr, $set:expr, ($($arg:ident),+), $asked:expr, $ids:expr) => {
        /// Replaces the libc function of this name.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $id),+) -> c_int {
            type Real = unsafe extern "C" fn($(interpose!(@one $arg $id)),+) -> c_int;
            // SAFETY: the function found under this name, with the caller's arguments.
            let real = || unsafe { core::mem::transmute::<usize, Real>($which.find())($($arg),+) };
            if pager().is_none() || already($get, $asked) {
                return real();
            }
            changes_user(real, |p| p.change_helpers(numbers($set, $ids)))
        }
    };
    (@one $arg:ident $id:ty) => { $id };
}

use libc::{
    SYS_getresgid, SYS_getresuid, SYS_setgid, SYS_setregid, SYS_setresgid, SYS_setresuid, SYS_setreuid, SYS_setuid,
};

interpose!(setuid, SETUID, uid_t, SYS_getresuid, SYS_setuid, (id), [id; 3], [id, 0, 0]);
interpose!(seteuid, SETEUID, uid_t, SYS_getresuid, SYS_setresuid, (id), [SAME, id, SAME], [SAME, id, SAME]);
interpose!(
    setreuid,
    SETREUID,
    uid_t,
    SYS_getresuid,
    SYS_setreuid,
    (id, effective),
    pair(id, effective),
    [id, effective, 0]
);
interpose!(
    setresuid,
    SETRESUID,
    uid_t,
    SYS_getresuid,
    SYS_setresuid,
    (id, effective, saved),
    [id, effective, saved],
    [id, effective, saved]
);
interpose!(setgid, SETGID, gid_t, SYS_getresgid, SYS_setgid, (id), [id; 3], [id, 0, 0]);
interpose!(setegid, SETEGID, gid_t, SYS_getresgid, SYS_setresgid, (id), [SAME, id, SAME], [SAME, id, SAME]);
interpose!(
    setregid,
    SETREGID,
    gid_t,
    SYS_getresgid,
    SYS_setregid,
    (id, effective),
    pair(id, effective),
    [id, effective, 0]
);
interpose!(
    setresgid,
    SETRESGID,
    gid_t,
    SYS_getresgid,
    SYS_setresgid,
    (id, effective, saved),
    [id, effective, saved],
    [id, effective, saved]
);

/// Makes uzswap's threads take the groups that the calling thread has now.
fn follow_groups(p: &Pager) -> bool {
    let get = |most: usize, list: usize| {
        // SAFETY: the kernel fills a list of ours, which has room for as many.
        unsafe { sys!(libc::SYS_getgroups, most, list) }
    };
    let Ok(most) = get(0, 0) else { return false };
    let (bytes, rw) = ((most * size_of::<gid_t>()).max(1), libc::PROT_READ | libc::PROT_WRITE);
    // There may be 65,536 of them, too many for a stack.
    // SAFETY: a new mapping.
    let list = unsafe { sys!(libc::SYS_mmap, 0, bytes, rw, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1isize, 0) };
    let Ok(list) = list else { return false };
    let count = get(most, list);
    let done = count.is_ok_and(|n| p.change_helpers(Change { nr: libc::SYS_setgroups, args: [n, list, 0] }));
    // SAFETY: the mapping just made.
    let _ = unsafe { sys!(libc::SYS_munmap, list, bytes) };
    done
}

/// setgroups(2).
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setgroups(count: usize, list: *const gid_t) -> c_int {
    type Real = unsafe extern "C" fn(usize, *const gid_t) -> c_int;
    // SAFETY: the function found under this name, with the caller's arguments.
    let real = || unsafe { core::mem::transmute::<usize, Real>(SETGROUPS.find())(count, list) };
    if pager().is_none() { real() } else { changes_user(real, follow_groups) }
}

/// initgroups(3).
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn initgroups(user: *const c_char, group: gid_t) -> c_int {
    type Real = unsafe extern "C" fn(*const c_char, gid_t) -> c_int;
    // SAFETY: the function found under this name, with the caller's arguments.
    let real = || unsafe { core::mem::transmute::<usize, Real>(INITGROUPS.find())(user, group) };
    if pager().is_none() { real() } else { changes_user(real, follow_groups) }
}

/// capset(2).
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capset(header: *mut c_void, data: *const c_void) -> c_int {
    let real = || {
        // SAFETY: the caller's arguments.
        let done = raw::check(unsafe { raw::syscall(libc::SYS_capset, [header as usize, data as usize, 0, 0, 0, 0]) });
        done.map_or_else(fails, |_| 0)
    };
    if pager().is_none() {
        return real();
    }
    changes_user(real, |p| {
        // The structure may be an older version, of half the size; so use what the thread has now.
        thread::capabilities()
            .is_ok_and(|now| p.change_helpers(Change { nr: libc::SYS_capset, args: [0, now.as_ptr() as usize, 0] }))
    })
}

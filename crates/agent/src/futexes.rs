//! Futexes in memory that is out.
//!
//! A futex that the kernel only reads is brought in like any other memory. For one that it writes to (the second of
//! `FUTEX_WAKE_OP`, and those with priority inheritance) it faults in a way that waits for nobody: if a userfaultfd
//! would have to bring the page, the call fails with EFAULT. So `syscall` brings the page, and repeats the call.
//! (glibc's own such calls, for mutexes with priority inheritance, come right after the thread has written to the word
//! itself.)

use core::ffi::{c_int, c_long};
use uzswap_pager::discover::populate;
use uzswap_pager::frames::arena::PAGE;
use uzswap_sys::{raw, thread};

/// How often to bring a page that is out again by the time the kernel writes to it.
const TRIES: u32 = 100;

/// Which of its two words the operation writes to; 0 for neither.
fn written(op: usize, first: usize, second: usize) -> [usize; 2] {
    match op as c_int & libc::FUTEX_CMD_MASK {
        libc::FUTEX_WAKE_OP => [0, second],
        libc::FUTEX_LOCK_PI | libc::FUTEX_UNLOCK_PI | libc::FUTEX_TRYLOCK_PI | libc::FUTEX_LOCK_PI2 => [first, 0],
        libc::FUTEX_WAIT_REQUEUE_PI | libc::FUTEX_CMP_REQUEUE_PI => [first, second],
        _ => [0, 0],
    }
}

/// futex(2).
///
/// # Safety
/// As the system call's.
pub unsafe fn call(args: [usize; 6]) -> isize {
    let words = written(args[1], args[0], args[4]);
    for _ in 0..TRIES {
        // SAFETY: the caller passes the system call's arguments.
        let ret = unsafe { raw::syscall(libc::SYS_futex as c_long, args) };
        let is_out = ret == -(libc::EFAULT as isize) && words != [0, 0];
        // If a word cannot be read, it is no memory.
        if !is_out || !words.iter().filter(|word| **word != 0).all(|word| bring(*word)) {
            return ret;
        }
    }
    -(libc::EFAULT as isize)
}

/// Brings a word's page in for writing; false if there is no memory.
fn bring(word: usize) -> bool {
    let page = word & !(PAGE - 1);
    page.checked_add(PAGE).is_some_and(|end| {
        populate(page, end);
        thread::reads(word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_are_written_to_are_those_of_futex_2() {
        let private = libc::FUTEX_PRIVATE_FLAG as usize;
        for op in [0, 1, 3, 4, 9, 10] {
            assert_eq!(written(op | private, 4, 8), [0, 0], "{op}");
        }
        assert_eq!(written(libc::FUTEX_WAKE_OP as usize, 4, 8), [0, 8]);
        for op in [libc::FUTEX_LOCK_PI, libc::FUTEX_UNLOCK_PI, libc::FUTEX_TRYLOCK_PI, libc::FUTEX_LOCK_PI2] {
            assert_eq!(written(op as usize | private, 4, 8), [4, 0], "{op}");
        }
        for op in [libc::FUTEX_WAIT_REQUEUE_PI | libc::FUTEX_CLOCK_REALTIME, libc::FUTEX_CMP_REQUEUE_PI] {
            assert_eq!(written(op as usize, 4, 8), [4, 8], "{op}");
        }
    }

    #[test]
    fn what_is_no_memory_is_no_futex() {
        let lock = |word: usize| {
            // SAFETY: the kernel checks the address.
            unsafe { call([word, libc::FUTEX_LOCK_PI as usize, 0, 0, 0, 0]) }
        };
        assert_eq!([8, usize::MAX - 7].map(lock), [-(libc::EFAULT as isize); 2]);
        let word = core::sync::atomic::AtomicU32::new(0);
        assert_eq!((lock(word.as_ptr() as usize), lock(word.as_ptr() as usize)), (0, -(libc::EDEADLK as isize)));
    }
}

//! Tracks which process holds something that one process at a time may have of a member: its request slot (`request`), or the
//! watch over its writes (`notify`).
//!
//! The holder is a word of shared memory with an [`Identity`], so everybody can see whether it is still alive. Nothing waits for
//! the word and nobody maintains it: a killed holder leaves its name, and the next one takes the hold from the dead. It does so
//! by compare-exchange, so of several that find the same dead holder one succeeds, and a late release takes nothing from the next
//! holder.

use core::sync::atomic::{AtomicU64, Ordering::*};
use uzswap_sys::process::Identity;

/// The word: the holder as `Identity::raw`; 0: none.
#[repr(transparent)]
#[derive(Default)]
pub struct Holder(AtomicU64);

impl Holder {
    /// The holder, alive or dead.
    pub fn get(&self) -> Option<Identity> {
        Identity::from_raw(self.0.load(Acquire))
    }

    /// Takes the hold unless a living process has it; false if one has, perhaps `me`.
    pub fn take(&self, me: Identity) -> bool {
        let holder = self.0.load(Acquire);
        let free = Identity::from_raw(holder).is_none_or(Identity::is_dead);
        free && self.0.compare_exchange(holder, me.raw(), AcqRel, Relaxed).is_ok()
    }

    /// Gives the hold back. Does nothing if another process has it by now.
    pub fn give_up(&self, me: Identity) {
        let _ = self.0.compare_exchange(me.raw(), 0, AcqRel, Relaxed);
    }

    /// What was held no longer exists, whoever holds it.
    pub(crate) fn forsake(&self) {
        self.0.store(0, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::sync::Barrier;

    /// A process that has ended.
    fn dead() -> Identity {
        let mut child = Command::new("/bin/true").spawn().unwrap();
        child.wait().unwrap();
        Identity::from_raw(child.id().into()).unwrap()
    }

    /// A process that lives as long as this test, named by its pid alone.
    fn other() -> Identity {
        Identity::from_raw(1).unwrap()
    }

    #[test]
    fn the_living_keep_it_until_they_give_it_up() {
        let (holder, me) = (Holder::default(), Identity::own());
        assert!(holder.get().is_none() && holder.take(me));
        assert!(!holder.take(me) && !holder.take(other()));
        holder.give_up(other());
        assert_eq!(holder.get(), Some(me), "it was not theirs to give up");
        holder.give_up(me);
        assert!(holder.get().is_none() && holder.take(other()));
        holder.give_up(me);
        assert_eq!(holder.get(), Some(other()), "giving up twice takes nothing from the next holder");
        holder.forsake();
        assert!(holder.take(me));
    }

    /// Threads of this process, each under a name of its own: its thread id, which the kernel accepts as a pid too.
    #[test]
    fn of_many_who_find_the_holder_dead_one_takes_it() {
        const TAKERS: usize = 4;
        let dead = dead();
        for _ in 0..200 {
            let (holder, start, end) = (Holder::default(), Barrier::new(TAKERS), Barrier::new(TAKERS));
            holder.0.store(dead.raw(), Relaxed);
            let takes = || {
                // SAFETY: it only asks.
                let me = Identity::from_raw(unsafe { libc::gettid() } as u64).unwrap();
                start.wait();
                let took = holder.take(me);
                // No thread ends, and so becomes dead, while another looks.
                end.wait();
                took.then_some(me)
            };
            let took: Vec<Identity> = std::thread::scope(|scope| {
                let takers: Vec<_> = (0..TAKERS).map(|_| scope.spawn(takes)).collect();
                takers.into_iter().filter_map(|taker| taker.join().unwrap()).collect()
            });
            assert_eq!(took.len(), 1);
            assert_eq!(holder.get(), Some(took[0]));
        }
    }
}

//! Who holds what one process at a time may have of a member: the request that is asked of it (`request`), the watch over its
//! writes (`notify`).
//!
//! A word of shared memory with the holder's [`Identity`], by which everybody can see whether it is still there. Nothing waits
//! for it and nobody keeps it up: who is killed leaves its name, and the next one takes the hold from the dead. By
//! compare-exchange, so of several who find the same one dead one succeeds, and who gave up late takes nothing from the next.

use core::sync::atomic::{AtomicU64, Ordering::*};
use uzswap_sys::process::Identity;

/// The word: the holder as `Identity::raw`; 0: none.
#[repr(transparent)]
#[derive(Default)]
pub struct Holder(AtomicU64);

impl Holder {
    /// Who has it, or had it when it died.
    pub fn get(&self) -> Option<Identity> {
        Identity::from_raw(self.0.load(Acquire))
    }

    /// Takes it, when nobody has it who is alive. False: somebody has, perhaps `me`.
    pub fn take(&self, me: Identity) -> bool {
        let holder = self.0.load(Acquire);
        let free = Identity::from_raw(holder).is_none_or(Identity::is_dead);
        free && self.0.compare_exchange(holder, me.raw(), AcqRel, Relaxed).is_ok()
    }

    /// Gives it back. Nothing happens when another one has it by now.
    pub fn give_up(&self, me: Identity) {
        let _ = self.0.compare_exchange(me.raw(), 0, AcqRel, Relaxed);
    }

    /// What was held is no more, whoever has it.
    pub(crate) fn forsake(&self) {
        self.0.store(0, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::sync::Barrier;

    /// Somebody who has ended.
    fn dead() -> Identity {
        let mut child = Command::new("/bin/true").spawn().unwrap();
        child.wait().unwrap();
        Identity::from_raw(child.id().into()).unwrap()
    }

    /// One who is there as long as this test is: by its pid alone.
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
        assert_eq!(holder.get(), Some(other()), "who gives up twice takes nothing from the next");
        holder.forsake();
        assert!(holder.take(me));
    }

    /// Threads of this process, each by the name of its own: its thread id, which is a pid to the kernel too.
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
                // (Nobody ends, and is dead, while another looks.)
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

//! The thread that serves a mapping's faults, from its beginning until its process ends. `fault` says how one is served, `near`
//! which other thread may serve.

use super::engine::Engine;
use super::fault::Served;
use super::near::Guard;
use super::owner::{Server, poll_in, wait};
use super::wire;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use uzswap_sys::uffd_shared::SharedFault;

/// Outcome of serving what waited.
#[derive(Default)]
struct Round {
    /// Faults that were served.
    served: u32,
    /// Whether something could not be served now.
    later: bool,
    /// Whether it can be soon.
    soon: bool,
}

impl Server {
    /// The thread of a mapping's faults; it runs until the process is gone or has detached.
    pub fn serve_faults(self: &Arc<Self>, id: u64, mut guard: Guard) {
        let mut polls = {
            let mut engine = self.engine();
            let Some(m) = engine.mapping(id) else { return };
            [&*m.uffd, &*m.kick, &m.watch].map(poll_in)
        };
        let (mut closed, mut round) = (false, Round::default());
        loop {
            let timeout = match (round.soon, round.later, closed) {
                (true, ..) => 1,
                (_, true, _) => 10,
                (_, _, true) => 5,
                _ => -1,
            };
            let hears = timeout < 0;
            // While the second thread serves, a fault does not wake this one.
            wait_for(&mut polls, [!guard.is_on(), true, hears], guard.patience(timeout));
            if self.stopping.load(SeqCst) {
                // Closing the descriptor here would end the registration. The process's own copy must outlive it, until its
                // watcher has put an error in the region's place.
                return;
            }
            if guard.is_on() {
                wait(&mut polls[..1], 0);
            }
            if polls[0].revents & (libc::POLLERR | libc::POLLNVAL) != 0 {
                closed = true;
                self.engine().mapping(id).expect("removed here only").dead = true;
            }
            if polls[1].revents != 0 {
                uzswap_sys::eventfd::take(polls[1].fd);
            }
            if polls[2].revents != 0 {
                closed |= !self.hear_watcher(id);
            }
            self.held.reading();
            let readable = polls[0].revents & libc::POLLIN != 0;
            let serves = !guard.look(self, readable) || closed;
            round = self.serve_all(id, readable && serves);
            if serves && !closed {
                guard.consider(self, id, round.served);
            }
            if closed {
                let mut engine = self.engine();
                let m = engine.mapping(id).expect("removed here only");
                // A process that ends stops answering a moment after its sockets close.
                if m.dead || !m.is_alive() {
                    engine.detach(id);
                    return;
                }
            }
        }
    }

    /// Serves what waits, and one more message if the descriptor is `readable`.
    fn serve_all(&self, id: u64, mut readable: bool) -> Round {
        let (mut told, mut tries, mut round) = (false, None, Round::default());
        round.later = loop {
            // Messages are read under the lock: what an event says must not change before we have noted it.
            let mut engine = self.engine();
            let Some(k) = engine.mappings.iter().position(|m| m.id == id) else { return Round::default() };
            let waiting = engine.mappings[k].later.len();
            let tries = tries.get_or_insert(waiting);
            let mut next = engine.mappings[k].kept.pop_front();
            if core::mem::take(&mut readable) && next.is_none() {
                next = engine.next_fault(k);
            }
            if next.is_none() && *tries > 0 {
                *tries -= 1;
                next = engine.mappings[k].later.pop_front();
            }
            let Some(fault) = next else { break waiting > 0 };
            match engine.serve_waiting(k, fault) {
                Served::Later => {}
                Served::Soon => round.soon = true,
                served => {
                    told |= served == Served::Told;
                    round.served += 1;
                }
            }
            let (near, many) = (engine.nears_limit(), engine.mappings[k].later.len() > 64);
            drop(engine);
            if near {
                self.want_reclaim();
            }
            if many {
                break true;
            }
        };
        if told {
            self.news.notify_all();
        }
        round
    }

    /// Reads the watcher's messages; false if the watcher is gone.
    fn hear_watcher(&self, id: u64) -> bool {
        let mut engine = self.engine();
        let Some(m) = engine.mapping(id) else { return false };
        match wire::receive(&m.watch) {
            Ok((words, _)) => {
                // It has dropped its PTEs in this round: from now on every touch faults.
                m.aged = m.aged.max(words[1] as u32);
                m.seen.clear();
                true
            }
            Err(e) => e.kind() == io::ErrorKind::WouldBlock,
        }
    }
}

impl Engine {
    /// Serves a fault of the `k`-th mapping in the list that was just read, or that waits among the later ones.
    pub fn serve_waiting(&mut self, k: usize, fault: SharedFault) -> Served {
        // It waits with the others while it is served, so that what wakes its thread on the way removes it.
        self.mappings[k].later.push_back(fault);
        let served = self.serve(k, fault);
        if !matches!(served, Served::Later | Served::Soon) {
            self.mappings[k].later.retain(|f| *f != fault);
        }
        served
    }

    /// Whether the reclaim thread is wanted.
    pub fn nears_limit(&self) -> bool {
        self.charged() + self.margin() > self.options.limit
    }
}

/// Waits for the `wanted` ones of several descriptors; afterwards nothing is known about the others.
fn wait_for<const N: usize>(polls: &mut [libc::pollfd; N], wanted: [bool; N], timeout_ms: i32) {
    let fds: [RawFd; N] = core::array::from_fn(|i| polls[i].fd);
    for (poll, wanted) in polls.iter_mut().zip(wanted) {
        // poll skips negative descriptors.
        (poll.fd, poll.revents) = (if wanted { poll.fd } else { -1 }, 0);
    }
    wait(polls, timeout_ms);
    polls.iter_mut().zip(fds).for_each(|(poll, fd)| poll.fd = fd);
}

//! The keeper: protects the data of a region whose descriptors the program has closed (`close_range`, a daemon's loop over all
//! numbers).
//!
//! Closing the last descriptor of a userfaultfd ends its registrations, and pages that are out then read as zeros. So a thread
//! with a descriptor table of its own, the *keeper*, holds another descriptor: the memory stays registered as long as the region
//! lives. A thread that touches a page that is out gets SIGBUS, finds that it can do nothing, says so, and leaves the signal to
//! the handler that was there before.

use super::SignalsBlocked;
use crate::frames::arena::PAGE;
use crate::pager::Pager;
use crate::shared::isolate_descriptors;
use core::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// The keeper thread; it ends when this is dropped.
#[derive(Debug)]
pub(super) struct Keeper {
    /// Dropping it ends the thread.
    lives: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Starts a keeper, which holds the userfaultfd `uffd` when this returns; None if that is refused; the region then works the
    /// same, as long as the program closes nothing.
    pub(super) fn start(uffd: i32) -> Option<Self> {
        let ((lives, waits), (said, heard)) = (channel::<()>(), channel());
        let quiet = SignalsBlocked::new();
        let thread =
            std::thread::Builder::new().name("uzswap-keeper".to_owned()).stack_size(64 << 10).spawn(move || {
                let _ = said.send(isolate_descriptors(&[uffd]).is_ok());
                let _ = waits.recv();
            });
        drop(quiet);
        let keeper = Self { lives: Some(lives), thread: Some(thread.ok()?) };
        heard.recv().is_ok_and(|alone| alone).then_some(keeper)
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.lives.take());
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

impl Pager {
    /// Whether the program has closed the userfaultfd, so that this page cannot be brought in any more. Gives a message the first
    /// time.
    pub(super) fn is_cut_off(&self, vpn: u64) -> bool {
        static SAID: AtomicBool = AtomicBool::new(false);
        if self.uffd().is_registered(vpn as usize * PAGE, PAGE, self.layout.unreadable()) != Ok(false) {
            return false;
        }
        if !SAID.swap(true, AcqRel) {
            self.say(b"uzswap: the program has closed a region's descriptors; what of the region is out is lost, and touching it is SIGBUS\n");
        }
        true
    }
}

//! Tests of reads under way, and of what happens to their pages meanwhile: no thread, and a disk that is a piece of memory. Each
//! step is made when the test wants it; a read ends when and as the test says.

use super::reads::{Read, Reads};
use super::swapin::Waiting;
use super::writeback::{Block, RUN_BYTES, Round, blocks, bytes_of};
use super::*;
use crate::calls::events;
use crate::fault::Request;
use crate::fault::deliver::decode;
use crate::testing::{self, half_noise};
use std::io::Read as _;
use std::os::fd::IntoRawFd;
use std::os::unix::net::UnixStream;
use uzswap_mm::pagetable::Pte;
use uzswap_mm::swapfile::BLOCK;
use uzswap_sys::uffd::Message;

pub(super) const LIMIT: usize = 8 << 20;
pub(super) const FIRST: u64 = 0x1_0000;
pub(super) const EIO: i32 = libc::EIO;

/// A process with memory on disk.
pub(super) struct Scene {
    pub(super) pager: &'static Pager,
    pub(super) reads: Reads,
    pub(super) waiting: Vec<Waiting>,
    pub(super) disk: Vec<u8>,
    pub(super) buffer: Vec<Block>,
}

impl Scene {
    /// A process with `pages` single pages on disk, from [`FIRST`] on.
    pub(super) fn new(pages: u64) -> Self {
        let pager = testing::pager_with_swap(LIMIT);
        let mut scene = Self {
            pager,
            reads: Reads::by_hand(),
            waiting: Vec::new(),
            disk: vec![0; 1 << 20],
            buffer: blocks(RUN_BYTES),
        };
        let s = &mut *pager.state.lock();
        (0..pages).for_each(|i| scene.store(s, FIRST + i, half_noise));
        scene.write_out(s);
        assert!((0..pages).all(|i| s.pt.get(FIRST + i).tag() == Tag::Disk));
        scene
    }

    pub(super) fn store(&self, s: &mut State, vpn: u64, content: fn(u64) -> [u8; PAGE]) {
        self.store_block(s, vpn, 0, content);
    }

    /// Stores a block that is not tried with another codec.
    pub(super) fn store_block(&self, s: &mut State, vpn: u64, order: u8, content: fn(u64) -> [u8; PAGE]) {
        let handle = testing::store(s, vpn, order, 0, content);
        object::set_flags(s.object(handle), object::TRIED, 0);
    }

    /// Writes back everything in the pool.
    pub(super) fn write_out(&mut self, s: &mut State) {
        while let Round::Write(at, len) = self.plan(s) {
            self.write(s, at, len);
        }
    }

    /// Plans a write of what is in the pool, all of which is due.
    fn plan(&mut self, s: &mut State) -> Round {
        let round = self.plan_with_little_room(s);
        assert!(!matches!(round, Round::Extend(_)), "the file has all its room");
        round
    }

    /// The same where the file may need more room.
    pub(super) fn plan_with_little_room(&mut self, s: &mut State) -> Round {
        s.swap.as_mut().unwrap().shrinker.press(1 << 20, 1, 1 << 20, 1 << 20, &DiskReads::new());
        self.pager.plan_round(s, 0, bytes_of(&mut self.buffer))
    }

    /// What was planned reaches the disk.
    pub(super) fn write(&mut self, s: &mut State, at: u64, len: usize) {
        self.disk[at as usize..][..len].copy_from_slice(&bytes_of(&mut self.buffer)[..len]);
        self.pager.complete(s, 0, Ok(()));
    }

    /// A fault on a page.
    pub(super) fn fault(&mut self, s: &mut State, vpn: u64) {
        self.waiting.push(Waiting::new(Request { vpn, write: false, protected: false }));
        self.ask(s);
    }

    /// Asks for what the faults need; returns whether any must ask again later.
    pub(super) fn ask(&mut self, s: &mut State) -> bool {
        let Self { pager, reads, waiting, .. } = self;
        waiting.iter_mut().filter_map(|w| pager.want(s, reads, w)).count() > 0
    }

    /// Begins what is planned.
    pub(super) fn begin(&mut self) -> Vec<Read> {
        self.reads.begin_by_hand()
    }

    /// Ends a read with `result`, and what the disk has.
    pub(super) fn end(&mut self, s: &mut State, read: &Read, result: Result<(), i32>) {
        self.reads.end_by_hand(read.at, &self.disk, result);
        self.pager.land(s, &mut self.reads, &mut self.waiting);
    }

    /// Reads one page, by a new fault; returns in how many reads.
    pub(super) fn read(&mut self, s: &mut State, vpn: u64) -> usize {
        self.waiting.clear();
        self.fault(s, vpn);
        let reads = self.begin();
        reads.iter().for_each(|read| self.end(s, read, Ok(())));
        reads.len()
    }

    /// Reads pages in a given order, each read ending with `result`; returns how many faults waited for the disk.
    pub(super) fn walk(
        &mut self,
        s: &mut State,
        pages: impl Iterator<Item = u64>,
        mut result: impl FnMut(&Read) -> Result<(), i32>,
    ) -> usize {
        let mut asked = 0;
        for vpn in pages {
            self.waiting.clear();
            if s.pt.get(vpn).tag() == Tag::Disk {
                self.fault(s, vpn);
                asked += 1;
            }
            self.pager.read_ahead(s, &mut self.reads);
            for read in self.begin() {
                let result = result(&read);
                self.end(s, &read, result);
            }
            check(s, vpn, vpn);
            let handle = s.pt.get(vpn).handle();
            if Header::read(s.object(handle)).flags & object::AHEAD != 0 {
                s.wanted_ahead(handle);
            }
        }
        asked
    }

    pub(super) fn count(
        &self,
        what: impl Fn(&crate::group::counters::Counters) -> &core::sync::atomic::AtomicU64,
    ) -> u64 {
        what(self.pager.counters()).load(Relaxed)
    }
}

/// Checks that the page is in the pool by itself, with the contents of page `of`.
pub(super) fn check(s: &mut State, vpn: u64, of: u64) {
    check_contents(s, vpn, &half_noise(of));
    assert_eq!(Header::read(s.object(s.pt.get(vpn).handle())).order, 0, "page {vpn:x}");
}

/// Checks that the page is in the pool, by itself or in a block, with these contents.
pub(super) fn check_contents(s: &mut State, vpn: u64, contents: &[u8; PAGE]) {
    let pte = s.pt.get(vpn);
    assert_eq!(pte.tag(), Tag::Compressed, "page {vpn:x}");
    let mut out = vec![0; PAGE << Header::read(s.object(pte.handle())).order];
    assert!(decode(s, pte.handle(), &mut out) && out[pte.index() * PAGE..][..PAGE] == *contents, "page {vpn:x}");
}

/// Checks that nothing is left once all pages have gone.
pub(super) fn end(s: &mut State, pages: core::ops::Range<u64>) {
    events::forget_range(s, pages.start, pages.end);
    let swap = s.swap.as_ref().unwrap();
    assert_eq!((s.pool.used_bytes(), s.swapped, swap.on_disk(), swap.books.used_bytes()), (0, 0, 0, 0));
}

/// Makes the window narrow: an object's own blocks and nothing else.
pub(super) fn narrow(s: &mut State) {
    let swap = s.swap.as_mut().unwrap();
    (0..64u64).for_each(|i| swap.readahead.read(i << 24, 4096, 7));
}

#[test]
fn several_are_under_way_and_end_in_any_order() {
    let mut scene = Scene::new(64);
    let s = &mut *scene.pager.state.lock();
    narrow(s);
    let pages = [FIRST, FIRST + 20, FIRST + 40];
    for vpn in pages {
        scene.fault(s, vpn);
    }
    // A second thread's fault on a page that is being read needs no read.
    scene.fault(s, pages[1]);
    let reads = scene.begin();
    assert_eq!(reads.len(), 3);
    for (read, vpn) in [(&reads[2], pages[2]), (&reads[0], pages[0]), (&reads[1], pages[1])] {
        assert_eq!(s.pt.get(vpn).tag(), Tag::Disk);
        scene.end(s, read, Ok(()));
        check(s, vpn, vpn);
    }
    scene.ask(s);
    assert!(scene.begin().is_empty());
    end(s, FIRST..FIRST + 64);
}

/// No more reads than slots; the others get their turn when one ends.
#[test]
fn who_finds_no_slot_waits_for_one() {
    let mut scene = Scene::new(64);
    let s = &mut *scene.pager.state.lock();
    narrow(s);
    (0..10).for_each(|i| scene.fault(s, FIRST + 6 * i));
    let mut ended = 0;
    loop {
        let reads = scene.begin();
        assert!(reads.len() <= super::readers::READERS);
        let Some(read) = reads.first() else { break };
        reads[1..].iter().for_each(|read| scene.end(s, read, Ok(())));
        scene.end(s, read, Ok(()));
        ended += reads.len();
        scene.ask(s);
    }
    assert!(ended <= 10);
    (0..10).for_each(|i| check(s, FIRST + 6 * i, FIRST + 6 * i));
}

#[test]
fn what_is_unmapped_meanwhile_is_not_brought_back() {
    let mut scene = Scene::new(8);
    let s = &mut *scene.pager.state.lock();
    scene.fault(s, FIRST);
    let reads = scene.begin();
    assert_eq!(reads.len(), 1, "the window has all of them");
    events::forget_range(s, FIRST, FIRST + 4);
    // Something new is there meanwhile, which is not the page that was read.
    testing::store(s, FIRST + 1, 0, 0, |_| [7; PAGE]);
    let new = s.pt.get(FIRST + 1);
    scene.end(s, &reads[0], Ok(()));
    assert_eq!((s.pt.get(FIRST), s.pt.get(FIRST + 1)), (Pte::NONE, new));
    (4..8).for_each(|i| check(s, FIRST + i, FIRST + i));
    assert_eq!((scene.count(|c| &c.poisoned), scene.count(|c| &c.swap_read_errors)), (0, 0));
    end(s, FIRST..FIRST + 8);
}

#[test]
fn what_is_moved_meanwhile_is_installed_where_it_is() {
    let mut scene = Scene::new(8);
    let s = &mut *scene.pager.state.lock();
    scene.fault(s, FIRST);
    let reads = scene.begin();
    let to = FIRST + 0x1000;
    let page = |vpn: u64| vpn as usize * PAGE;
    scene.pager.event(s, Message::Remap { from: page(FIRST), to: page(to), len: 8 * PAGE });
    // The kernel repeats the fault there, and the read under way serves it.
    scene.fault(s, to);
    assert!(scene.begin().is_empty());
    scene.end(s, &reads[0], Ok(()));
    assert_eq!(s.pt.get(FIRST), Pte::NONE);
    check(s, to, FIRST);
    // The object that came along names the place where it was when written; it stays on disk until it is wanted.
    assert_eq!(s.pt.get(to + 1).tag(), Tag::Disk);
    assert_eq!(scene.read(s, to + 1), 1);
    check(s, to + 1, FIRST + 1);
    end(s, to..to + 8);
}

/// The story: a read brought its object for the first of the faults that waited, and only to where that page said it belongs. If
/// mremap had taken the pages apart the others read it again. Each such failure was reported, and after four the page was lost.
#[test]
fn pages_of_one_object_that_are_apart_are_brought_together() {
    let mut scene = Scene::new(0);
    let s = &mut *scene.pager.state.lock();
    let handle = testing::store(s, FIRST, 4, 0, half_noise);
    object::set_flags(s.object(handle), object::TRIED, 0);
    scene.write_out(s);
    let to = |i: u64| FIRST + 0x1000 * i + i;
    let page = |vpn: u64| vpn as usize * PAGE;
    for i in 1..=6 {
        scene.pager.event(s, Message::Remap { from: page(FIRST + i), to: page(to(i)), len: PAGE });
    }
    (1..=6).for_each(|i| scene.fault(s, to(i)));
    let mut reads = 0;
    for _ in 0..10 {
        while scene.ask(s) {}
        for read in scene.begin() {
            reads += 1;
            scene.end(s, &read, Ok(()));
        }
    }
    for i in 1..=6 {
        let pte = s.pt.get(to(i));
        assert_eq!((pte.tag(), pte.index()), (Tag::Compressed, i as usize));
        assert_eq!(Header::read(s.object(pte.handle())).vpn, to(i) - i, "it can be found, and moved");
        let mut out = vec![0; 16 * PAGE];
        assert!(decode(s, pte.handle(), &mut out) && out[i as usize * PAGE..][..PAGE] == half_noise(FIRST + i));
    }
    assert_eq!((reads, scene.count(|c| &c.poisoned)), (1, 0));
    let told = scene.pager.clusters.unwrap().told.load(Relaxed);
    assert_eq!(told & 1 << io::Trouble::Read as u32, 0);
    (1..=6).for_each(|i| events::forget_range(s, to(i), to(i) + 1));
    end(s, FIRST..FIRST + 16);
}

/// The story: a thread could not be started for a second read, so the handler made it by itself, over the connection on which the
/// first thread was in the middle of a request. From then on each got the other's answers, and pages were lost.
#[test]
fn where_a_reader_cannot_be_started_nobody_uses_another_s_connection() {
    let mut scene = Scene::new(64);
    let p = scene.pager;
    let (link, mut peer) = UnixStream::pair().unwrap();
    peer.set_nonblocking(true).unwrap();
    // A thread that waits for an answer finds the end.
    peer.shutdown(std::net::Shutdown::Write).unwrap();
    p.clusters.unwrap().remote.store(1, Relaxed);
    p.tier.file.store(link.into_raw_fd(), Relaxed);
    [1, -1].iter().enumerate().for_each(|(i, tid)| p.tier.readers.set_tid(i, *tid));
    let s = &mut *p.state.lock();
    narrow(s);
    let pages = [FIRST, FIRST + 20];
    pages.iter().for_each(|vpn| scene.fault(s, *vpn));
    scene.reads.begin(p);
    assert_eq!(peer.read(&mut [0; 64]).map_err(|e| e.kind()), Err(std::io::ErrorKind::WouldBlock), "it was asked");
    assert!(p.tier.file.load(Relaxed) >= 0);
    // The second is asked for again once the first, whose thread exists, has ended.
    let under_way: Vec<Read> = scene.reads.iter().copied().collect();
    assert_eq!((under_way.len(), scene.reads.free()), (1, super::readers::READERS - 2));
    scene.end(s, &under_way[0], Ok(()));
    scene.ask(s);
    let reads = scene.begin();
    assert_eq!(reads.len(), 1);
    scene.end(s, &reads[0], Ok(()));
    pages.iter().for_each(|vpn| check(s, *vpn, *vpn));
    end(s, FIRST..FIRST + 64);
}

/// A place is given up while it is read, and another page's object is written there: what was read before is not that object.
#[test]
fn what_was_read_of_a_place_that_is_another_s_now_is_not_believed() {
    let mut scene = Scene::new(1);
    let s = &mut *scene.pager.state.lock();
    scene.fault(s, FIRST);
    let reads = scene.begin();
    let (place, before) = (s.pt.get(FIRST).handle(), scene.disk.clone());
    events::forget_range(s, FIRST, FIRST + 1);
    let other = FIRST + 5;
    scene.store(s, other, half_noise);
    scene.write_out(s);
    assert_eq!((s.pt.get(other).tag(), s.pt.get(other).handle()), (Tag::Disk, place), "the test wants the same place");
    // A fault on it waits for the read under way, which has the former contents.
    scene.fault(s, other);
    assert!(scene.begin().is_empty());
    let now = core::mem::replace(&mut scene.disk, before);
    scene.end(s, &reads[0], Ok(()));
    assert_eq!((s.pt.get(FIRST), s.pt.get(other).tag()), (Pte::NONE, Tag::Disk));
    scene.disk = now;
    scene.ask(s);
    let reads = scene.begin();
    scene.end(s, &reads[0], Ok(()));
    check(s, other, other);
    assert_eq!(scene.count(|c| &c.poisoned), 0);
    end(s, FIRST..FIRST + 8);
}

/// After four tries that page is lost, and no other.
#[test]
fn a_page_whose_reads_all_fail_is_lost_alone() {
    let mut scene = Scene::new(8);
    let s = &mut *scene.pager.state.lock();
    scene.fault(s, FIRST);
    for tried in 1..=4 {
        while scene.ask(s) {}
        let reads = scene.begin();
        assert_eq!((reads.len(), s.pt.get(FIRST).tag()), (1, Tag::Disk), "try {tried}");
        scene.end(s, &reads[0], Err(EIO));
    }
    assert_eq!((s.pt.get(FIRST).tag(), scene.count(|c| &c.poisoned)), (Tag::Poisoned, 1));
    assert!((1..8).all(|i| s.pt.get(FIRST + i).tag() == Tag::Disk));
    assert_eq!(scene.read(s, FIRST + 1), 1);
    (1..8).for_each(|i| check(s, FIRST + i, FIRST + i));
    end(s, FIRST..FIRST + 8);
}

/// Data that was read and is right waits for room in the pool, as often as it takes. (It counted as a failed read, and was lost
/// after four.)
#[test]
fn a_page_for_which_the_pool_has_no_room_is_not_lost() {
    let mut scene = Scene::new(1);
    let s = &mut *scene.pager.state.lock();
    scene.pager.group.faults.set("pool=1/1", 1).unwrap();
    scene.fault(s, FIRST);
    for tried in 1..=9 {
        while scene.ask(s) {}
        let reads = scene.begin();
        assert_eq!((reads.len(), s.pt.get(FIRST).tag()), (1, Tag::Disk), "try {tried}");
        scene.end(s, &reads[0], Ok(()));
    }
    assert_eq!((scene.count(|c| &c.poisoned), scene.count(|c| &c.reject_alloc_fail)), (0, 9));
    scene.pager.group.faults.set("pool=0/1", 1).unwrap();
    while scene.ask(s) {}
    let reads = scene.begin();
    scene.end(s, &reads[0], Ok(()));
    check(s, FIRST, FIRST);
    end(s, FIRST..FIRST + 1);
}

/// A block next to the page's own cannot be read, so a read of its window fails; then the page is read by itself. (It was tried
/// with its window each time, and lost.)
#[test]
fn a_page_is_not_lost_for_its_neighbour_s_block() {
    let mut scene = Scene::new(16);
    let s = &mut *scene.pager.state.lock();
    let bad = offset(s.pt.get(FIRST + 8).handle());
    scene.fault(s, FIRST + 2);
    let mut tried = 0;
    while s.pt.get(FIRST + 2).tag() == Tag::Disk {
        for read in scene.begin() {
            tried += 1;
            let result = if read.covers(bad, 1) { Err(EIO) } else { Ok(()) };
            scene.end(s, &read, result);
        }
        scene.ask(s);
        assert!(tried < 4, "it is tried with its window each time");
    }
    assert_eq!(tried, 2);
    check(s, FIRST + 2, FIRST + 2);
    end(s, FIRST..FIRST + 16);
}

/// Signals interrupt a waiting thread, which faults again and again, each time with a first try. Its page is not lost before the
/// last try of one of these faults, which comes after pauses.
#[test]
fn a_page_is_not_lost_by_first_tries_of_faults_that_came_later() {
    let mut scene = Scene::new(1);
    let s = &mut *scene.pager.state.lock();
    for _ in 0..20 {
        scene.fault(s, FIRST);
        for read in scene.begin() {
            assert!(!read.lasts(), "none has waited");
            scene.end(s, &read, Err(EIO));
        }
        assert_eq!(s.pt.get(FIRST).tag(), Tag::Disk);
    }
    let mut last = false;
    while s.pt.get(FIRST).tag() == Tag::Disk {
        scene.ask(s);
        for read in scene.begin() {
            last |= read.lasts();
            scene.end(s, &read, Err(EIO));
        }
    }
    assert!(last, "it is lost in the end");
    assert_eq!(s.pt.get(FIRST).tag(), Tag::Poisoned);
    end(s, FIRST..FIRST + 1);
}

/// The file, or a server's key, may end where something is just being written: a window does not reach there. (A server said four
/// times that there was less than was asked for, and a page was lost that it had.)
#[test]
fn what_is_just_being_written_is_not_read_along() {
    let mut scene = Scene::new(4);
    let s = &mut *scene.pager.state.lock();
    (4..8).for_each(|i| scene.store(s, FIRST + i, half_noise));
    let (at, len) = loop {
        match scene.plan(s) {
            Round::Write(at, len) => break (at, len),
            Round::Again => {}
            _ => panic!("there is something to write"),
        }
    };
    scene.fault(s, FIRST + 1);
    let read = scene.begin()[0];
    assert!(read.end() <= at && at - read.end() < BLOCK as u64, "{} to {}, written from {at} on", read.at, read.end());
    scene.end(s, &read, Ok(()));
    scene.write(s, at, len);
    scene.waiting.clear();
    scene.write_out(s);
    scene.fault(s, FIRST + 1);
    let read = scene.begin()[0];
    assert!(read.end() > at, "it is read along when it is there");
    scene.end(s, &read, Ok(()));
    (0..8).for_each(|i| check(s, FIRST + i, FIRST + i));
    end(s, FIRST..FIRST + 8);
}

/// A window brings what another fault waits for; if it does not (the data is damaged there), that fault has a read of its own.
#[test]
fn who_waits_for_another_s_window_is_brought_or_reads_for_itself() {
    let mut scene = Scene::new(8);
    let s = &mut *scene.pager.state.lock();
    scene.fault(s, FIRST);
    scene.fault(s, FIRST + 2);
    scene.fault(s, FIRST + 3);
    let reads = scene.begin();
    assert_eq!(reads.len(), 1);
    let (place, right) = (s.pt.get(FIRST + 3).handle(), scene.disk.clone());
    scene.disk[uzswap_mm::swapfile::offset(place) as usize + 99] ^= 4;
    scene.end(s, &reads[0], Ok(()));
    check(s, FIRST, FIRST);
    check(s, FIRST + 2, FIRST + 2);
    assert_eq!(s.pt.get(FIRST + 3).tag(), Tag::Disk);
    scene.ask(s);
    scene.disk = right;
    let reads = scene.begin();
    assert_eq!((reads.len(), reads[0].place), (1, Some(place)));
    scene.end(s, &reads[0], Ok(()));
    check(s, FIRST + 3, FIRST + 3);
    end(s, FIRST..FIRST + 8);
}

/// A forked child has its parent's pages on disk and none of its reads, and makes its own.
#[test]
fn a_child_has_none_of_its_parent_s_reads() {
    let mut scene = Scene::new(8);
    let s = &mut *scene.pager.state.lock();
    scene.fault(s, FIRST);
    assert_eq!(scene.begin().len(), 1);
    // As in the child: the state is its parent's, the handler's list and reads are not.
    s.end_flights();
    scene.pager.tier.began[0].store(1, Relaxed);
    scene.pager.tier.forget_transfers();
    assert_eq!(scene.pager.until_stall_ns(), None, "the child has none that could stall");
    (scene.reads, scene.waiting) = (Reads::by_hand(), Vec::new());
    assert_eq!(scene.read(s, FIRST), 1);
    check(s, FIRST, FIRST);
    end(s, FIRST..FIRST + 8);
}

/// Two members of a group: what one reads back from disk keeps the other's shrinker from taking as much, once.
#[test]
fn what_one_member_reads_back_another_weighs() {
    let group = testing::group();
    group.nodes[0].max.store(LIMIT as u64, Relaxed);
    let child = group.make_child(0, b"below").unwrap();
    let member = |node: usize| {
        let mut pager = testing::member(group, node, LIMIT);
        pager.swap_to(testing::books());
        &*Box::leak(Box::new(pager))
    };
    let (one, two, elsewhere) = (member(0), member(0), member(child));
    let reads = &group.nodes[0].nr_disk_swapins;
    // Without threads the reading is only counted, not done.
    one.state.lock().swap.as_ref().unwrap().disk_reads.add(30);
    let due_of = |pager: &Pager| {
        let s = &mut *pager.state.lock();
        s.swapped = 20;
        (0..20).for_each(|i| _ = testing::store(s, FIRST + i, 0, 0, half_noise));
        s.swapped = 20;
        s.press_pool(1);
        s.swap.as_ref().unwrap().shrinker.due()
    };
    assert!(due_of(elsewhere) > 0 && reads.get() == 30, "another group's reads do not matter");
    assert_eq!((due_of(two), reads.get()), (0, 10));
    let due = due_of(one);
    assert!(due > 0 && reads.get() == 0, "{due}");
}

/// A6: blocks that go to disk and come back whole are counted by their size. (The counters existed, and stayed 0 whatever was
/// written.) A block that lost a page before counts as neither.
#[test]
fn a6_blocks_are_counted_by_their_size_as_they_go_to_disk_and_come_back() {
    let mut scene = Scene::new(0);
    let s = &mut *scene.pager.state.lock();
    for (vpn, order) in [(FIRST, 2), (FIRST + 16, 4), (FIRST + 32, 2), (FIRST + 40, 0)] {
        let handle = testing::store(s, vpn, order, 0, half_noise);
        object::set_flags(s.object(handle), object::TRIED, 0);
    }
    events::forget_range(s, FIRST + 33, FIRST + 34);
    let pager = scene.pager;
    let counted = |what: fn(&crate::group::folio::OrderCounters) -> &core::sync::atomic::AtomicU64| {
        pager.counters().folios.orders.each_ref().map(|o| what(o).load(Relaxed))
    };
    let (none, one_each) = ([0; 8], [1, 0, 1, 0, 0, 0, 0, 0]);
    assert_eq!((counted(|o| &o.swpout), counted(|o| &o.swpin)), (none, none));
    scene.write_out(s);
    assert_eq!((counted(|o| &o.swpout), counted(|o| &o.swpin)), (one_each, none));
    [FIRST, FIRST + 16, FIRST + 32, FIRST + 40].iter().for_each(|vpn| _ = scene.read(s, *vpn));
    assert_eq!((counted(|o| &o.swpout), counted(|o| &o.swpin)), (one_each, one_each));
    assert_eq!(scene.count(|c| &c.pswpin), 4 + 16 + 3 + 1);
    end(s, FIRST..FIRST + 41);
}

/// C2: pages read from disk are counted, with those that came along. Zeros, which are out at no cost, are counted neither as
/// freeable nor in what that is scaled by. (The original counted them: with many of them, reads held nothing back.)
#[test]
fn c2_reads_are_counted_with_what_came_along_and_zeros_are_left_out() {
    let mut scene = Scene::new(8);
    let s = &mut *scene.pager.state.lock();
    let reads = &scene.pager.group.nodes[0].nr_disk_swapins;
    assert_eq!((scene.read(s, FIRST + 2), reads.get()), (1, 8));
    (8..400).for_each(|i| scene.store(s, FIRST + i, half_noise));
    let due = |s: &mut State| {
        reads.add(200 - reads.get() as usize);
        s.press_pool(1);
        let shrinker = &mut s.swap.as_mut().unwrap().shrinker;
        let due = shrinker.due();
        shrinker.met(due + 1);
        due
    };
    let pool = s.pool.used_bytes() / PAGE;
    // Half of the pages are spoken for; the others are met, as all of the program has left.
    let without = due(s);
    s.zeros += 4000;
    let with = due(s);
    s.zeros -= 4000;
    assert!(pool > 100 && without.abs_diff(pool / 2) <= 1, "{without} of {pool}");
    assert_eq!(with, without);
    end(s, FIRST..FIRST + 400);
}

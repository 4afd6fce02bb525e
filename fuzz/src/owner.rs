//! What clients tell the owner of a shared region: [`owner`].

use std::cell::Cell;
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use uzswap_pager::shared::{SharedControl, SharedMapping, SharedOptions, SharedRegion};
use uzswap_sys::uffd::Uffd;
use uzswap_sys::{memfd, socket, sys, uffd_shared};

const PAGE: usize = 4096;
const PAGES: usize = 32;
const WORDS: usize = 16;
/// Connections that the hostile client has at a time.
const MOST: usize = 4;
/// Mappings left behind that their process does not have.
const MOST_LEFT: u64 = 32;
/// After this time something hangs.
const LONGEST: Duration = Duration::from_secs(60);

/// The protocol, as in `uzswap_pager::shared::wire`.
const HELLO: u64 = 0x757a_7368_0000_0002;
const FOR_MAPPING: u64 = 1;
const REMOVE: u64 = 3;
const PROTECT: u64 = 5;
const NEXT_WRITE: u64 = 7;
const DETACH: u64 = 13;

/// Clients of a shared region that send anything, two bytes or more per step: greetings, whole and broken, false userfaultfds,
/// calls with any arguments. Each call is answered. An honest client reads what was written, or zeros where somebody removed it,
/// and can write as soon as the hostile ones are gone.
pub fn owner(data: &[u8]) {
    // Thread-local, so that it ends with the thread and removes its socket; a static would leave it behind.
    thread_local! {
        static HONEST: Cell<Option<Honest>> = const { Cell::new(None) };
    }
    // If an input broke a promise, or much was left behind, the next one gets another owner.
    let mut one = HONEST.take().filter(|one| one.left < MOST_LEFT).unwrap_or_else(Honest::new);
    Hostile { honest: &mut one, bytes: data.iter().copied().collect(), connections: Vec::new(), protected: false }
        .run();
    one.check_all();
    HONEST.set(Some(one));
}

/// The owner, and a process (this one) that maps its region and does nothing wrong.
struct Honest {
    region: SharedRegion,
    path: PathBuf,
    /// What each page holds; 0: nothing.
    model: [u64; PAGES],
    /// The thread that waits for the owner: what it is to do, and what it read.
    ask: mpsc::Sender<(usize, Option<u64>)>,
    answers: mpsc::Receiver<u64>,
    /// Mappings left behind in a way that nobody sees before the process ends.
    left: u64,
}

fn word(m: &SharedMapping, page: usize, i: usize) -> &AtomicU64 {
    assert!((page + 1) * PAGE <= m.len() && i < PAGE / 8);
    // SAFETY: within the mapping, aligned, alive as long as it; others also use it as atomics.
    unsafe { &*m.as_mut_ptr().add(page * PAGE + i * 8).cast::<AtomicU64>() }
}

impl Honest {
    fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let name = format!("uzswap-fuzz-{}-{}", std::process::id(), NUMBER.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        // A killed process left its socket, and pids come again.
        let _ = std::fs::remove_file(&path);
        let region = SharedRegion::create(PAGES * PAGE, &SharedOptions::new(8 << 20)).expect("an owner");
        region.serve(&path).expect("a socket");
        let m = SharedMapping::attach(&path).expect("a mapping");
        let ((ask, asked), (answer, answers)) = (mpsc::channel::<(usize, Option<u64>)>(), mpsc::channel());
        std::thread::spawn(move || {
            while let Ok((page, value)) = asked.recv() {
                let words = [0, 7, PAGE / 8 - 1].map(|i| word(&m, page, i));
                value.into_iter().for_each(|value| words.iter().for_each(|w| w.store(value, Relaxed)));
                let read = words.map(|w| w.load(Relaxed));
                assert!(read.iter().all(|word| *word == read[0]), "page {page} is {read:x?}");
                let state = m.page_map().get(page as u64);
                let written = state.present() && !state.write_protected();
                assert!(value.is_none() || written, "a page that was just written to is {state:?}");
                if answer.send(read[0]).is_err() {
                    return;
                }
            }
        });
        Self { region, path, model: [0; PAGES], ask, answers, left: 0 }
    }

    fn does(&self, page: usize, value: Option<u64>) -> u64 {
        self.ask.send((page, value)).expect("the honest one is alive");
        self.answers.recv_timeout(LONGEST).unwrap_or_else(|e| panic!("the honest one waits for page {page}: {e}"))
    }

    fn read(&self, page: usize) {
        let (read, wrote) = (self.does(page, None), self.model[page]);
        assert_eq!(read, wrote, "page {page}");
    }

    fn write(&mut self, page: usize, value: u64) {
        assert_eq!(self.does(page, Some(value)), value);
        self.model[page] = value;
    }

    /// After all others have gone, nothing of theirs is left but what they removed.
    fn check_all(&mut self) {
        let control = SharedControl::connect(&self.path).expect("the owner listens");
        let end = Instant::now() + LONGEST;
        // Their end is noticed a moment later.
        while control.stats().expect("the owner").mappings > 1 + self.left || control.protect(0..0, None).is_err() {
            assert!(Instant::now() < end, "somebody who is gone is not missed: {:?}", control.stats());
            std::thread::yield_now();
        }
        drop(control);
        (0..PAGES).for_each(|page| self.read(page));
        for page in [0, PAGES / 2, PAGES - 1] {
            self.write(page, self.model[page] + 1);
        }
        // Pins end with the client that had them.
        let control = self.region.control();
        while control.stats().expect("the owner").resident > 0 {
            assert!(Instant::now() < end, "a pin of somebody's who is gone: {:?}", control.stats());
            control.page_out(0..PAGES * PAGE).expect("the owner");
        }
        (0..PAGES).step_by(7).for_each(|page| self.read(page));
    }
}

/// A hostile connection.
struct Connection {
    socket: OwnedFd,
    /// Whether it greeted the owner correctly, which then answers.
    greeted: bool,
    /// Whether the owner serves its mapping.
    served: bool,
    /// Whether it told the truth about its mapping.
    honest: bool,
    /// Address and length of its mapping.
    mapping: Option<(usize, usize)>,
    /// The descriptors that it got, and its own userfaultfd.
    kept: Vec<OwnedFd>,
}

struct Hostile<'a> {
    honest: &'a mut Honest,
    bytes: VecDeque<u8>,
    connections: Vec<Connection>,
    /// Whether writers may wait.
    protected: bool,
}

fn message(words: &[u64]) -> Vec<u8> {
    words.iter().chain(std::iter::repeat(&0)).take(WORDS).flat_map(|word| word.to_ne_bytes()).collect()
}

/// An answer, and its descriptors. None: the owner has hung up.
fn answer(socket: &OwnedFd) -> Option<([u64; WORDS], Vec<OwnedFd>)> {
    let mut bytes = [0u8; WORDS * 8];
    let (n, fds) = match socket::receive(socket, &mut bytes) {
        Ok(received) => received,
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => panic!("the owner does not answer"),
        Err(_) => return None,
    };
    if n == 0 {
        return None;
    }
    assert_eq!(n, bytes.len(), "an answer is a message");
    let (words, _) = bytes.as_chunks::<8>();
    Some((std::array::from_fn(|i| u64::from_ne_bytes(words[i])), fds))
}

impl Hostile<'_> {
    fn byte(&mut self) -> u8 {
        self.bytes.pop_front().unwrap_or(0)
    }

    /// A word; mostly one that is nearly right.
    fn argument(&mut self) -> u64 {
        match self.byte() {
            byte @ 0..0xc0 => u64::from(byte) % (PAGES as u64 + 2),
            0xc0..0xd0 => u64::MAX,
            0xd0..0xe0 => u64::from(self.byte()) << 56,
            byte => u64::from_le_bytes(std::array::from_fn(|_| self.byte())) >> (byte & 0x1f),
        }
    }

    fn run(mut self) {
        while !self.bytes.is_empty() {
            match self.byte() % 16 {
                0 | 1 => self.connect(),
                2..8 => self.call(),
                8 => self.babble(),
                9 => {
                    let which = usize::from(self.byte());
                    if !self.connections.is_empty() {
                        let which = which % self.connections.len();
                        let gone = self.connections.swap_remove(which);
                        self.leave(gone);
                    }
                }
                10 | 11 if !self.protected => {
                    let (page, value) = (usize::from(self.byte()) % PAGES, u64::from(self.byte()) * 0x0101_0001);
                    self.honest.write(page, value);
                }
                12 => {
                    let page = usize::from(self.byte()) % PAGES;
                    let _ = self.honest.region.control().page_out(page * PAGE..(page + 1) * PAGE);
                }
                13 => self.touch(),
                _ => {
                    let page = usize::from(self.byte()) % PAGES;
                    self.honest.read(page);
                }
            }
        }
        for gone in std::mem::take(&mut self.connections) {
            self.leave(gone);
        }
    }

    /// Greets the owner, correctly or not.
    fn connect(&mut self) {
        if self.connections.len() == MOST {
            return;
        }
        let socket = socket::connect(&self.honest.path).expect("the owner listens");
        socket::time_out(&socket, LONGEST.as_secs() as i64).expect("a time");
        let mut one =
            Connection { socket, greeted: false, served: false, honest: true, mapping: None, kept: Vec::new() };
        let how = self.byte();
        let hello = if how & 0xf0 == 0xf0 { self.argument() } else { HELLO };
        let wants = [FOR_MAPPING, 2, FOR_MAPPING, self.argument()][usize::from(how & 3)];
        let token = self.argument();
        if socket::send(&one.socket, &message(&[hello, wants, token]), &[]).is_ok()
            && let Some((welcome, fds)) = answer(&one.socket)
            && welcome[0] == 0
        {
            assert_eq!((hello, welcome[1]), (HELLO, PAGES as u64));
            one.kept = fds;
            one.served = wants == FOR_MAPPING && self.attach(&mut one);
            one.greeted = wants != FOR_MAPPING || one.served;
        }
        self.connections.push(one);
    }

    /// The second half of a mapping's greeting; returns whether the owner accepted it.
    fn attach(&mut self, one: &mut Connection) -> bool {
        let how = self.byte();
        let len = (PAGES + 1) * PAGE;
        // SAFETY: a new mapping.
        let base = unsafe { memfd::map(&one.kept[0], len, memfd::WRITABLE, None) }.expect("the region's object");
        one.mapping = Some((base, len));
        let Ok((uffd, _)) = Uffd::open(uffd_shared::FEATURES_SHARED) else { return false };
        // SAFETY: the descriptor was just made, and nobody owns it.
        let uffd = unsafe { OwnedFd::from_raw_fd(uffd.fd()) };
        let handle = Uffd::from_raw(uffd.as_raw_fd());
        let (registered, at, fds): (usize, u64, Vec<RawFd>) = match how % 12 {
            0 => (len, base as u64, vec![]),
            1 => (len, base as u64, vec![one.socket.as_raw_fd()]),
            2 => (0, base as u64, vec![uffd.as_raw_fd()]),
            3 => (len - 2 * PAGE, base as u64, vec![uffd.as_raw_fd()]),
            4 => (len, self.argument(), vec![uffd.as_raw_fd()]),
            5 => (len, base as u64 + PAGE as u64, vec![uffd.as_raw_fd()]),
            6 => (len, base as u64, vec![uffd.as_raw_fd(), one.socket.as_raw_fd(), 0]),
            _ => (len, base as u64, vec![uffd.as_raw_fd()]),
        };
        one.honest = how % 12 != 5;
        if registered > 0 {
            handle.register_shared(base, registered).expect("a mapping of ours");
        }
        let sent = socket::send(&one.socket, &message(&[0, at]), &fds).is_ok();
        let taken = sent && answer(&one.socket).is_some_and(|(words, _)| words[0] == 0);
        assert!(taken || how % 12 < 6, "a mapping in order is refused");
        assert!(!taken || how % 12 > 3, "a mapping that cannot be served is taken");
        one.kept.push(uffd);
        taken
    }

    /// Makes a call.
    fn call(&mut self) {
        let (which, op) = (usize::from(self.byte()), u64::from(self.byte()) % 36);
        let arguments = [self.argument(), self.argument(), self.argument(), self.argument()];
        let n = self.connections.len();
        let Some(one) = self.connections.get(which % n.max(1)).filter(|one| one.greeted) else { return };
        let mut request = vec![op];
        request.extend(arguments);
        if op == NEXT_WRITE {
            request[1] = request[1].min(1);
        }
        if socket::send(&one.socket, &message(&request), &[]).is_err() {
            return;
        }
        let Some((answer, _)) = answer(&one.socket) else { return };
        assert!(answer[0] < 4096, "an error number: {answer:?}");
        let range = request[1] as usize..request[2] as usize;
        // From then on nobody serves it: a thread that touches it waits forever.
        self.connections[which % n].served &= op != DETACH;
        match op {
            // If another process must run first, the owner tries in vain for a while, and removes the range all the same.
            REMOVE if answer[0] == 0 || answer[0] == libc::EAGAIN as u64 => self.honest.model[range].fill(0),
            PROTECT => self.protected = true,
            // Even a claim to what a fork that never happened inherited.
            _ => {}
        }
    }

    /// Sends what is no message, or one with unwanted descriptors, and waits for nothing.
    fn babble(&mut self) {
        let (which, len, fds) = (usize::from(self.byte()), usize::from(self.byte()), usize::from(self.byte() % 9));
        // These are no calls. An order to remove with unknown effect would count as a call.
        let first = [0xff, 22, 7][usize::from(self.byte() % 3)];
        let mut bytes = vec![first, 0, 0, 0, 0, 0, 0, 0];
        bytes.extend((0..self.bytes.len().min(120)).map(|i| self.bytes[i]));
        bytes.resize(if len % 4 == 0 { WORDS * 8 } else { len }, 0);
        let n = self.connections.len();
        let Some(one) = self.connections.get_mut(which % n.max(1)) else { return };
        let _ = socket::send(&one.socket, &bytes, &vec![0; fds.min(socket::MOST_FDS)]);
        // Its answers no longer belong to its calls.
        one.greeted = false;
    }

    /// Reads a page through a mapping that the owner serves, if there is one.
    fn touch(&mut self) {
        let page = usize::from(self.byte()) % PAGES;
        let mapped = |one: &&Connection| one.served && one.honest;
        let Some((base, _)) = self.connections.iter().find(mapped).and_then(|one| one.mapping) else { return };
        // SAFETY: within the mapping, which is served; used as an atomic.
        let read = unsafe { &*((base + page * PAGE) as *const AtomicU64) }.load(Relaxed);
        assert_eq!(read, self.honest.model[page], "page {page}, through another mapping");
    }

    /// Hangs up. If there is a mapping, it first tells the owner that it is gone, as the mapping would otherwise live as long as
    /// this process.
    fn leave(&mut self, gone: Connection) {
        if gone.mapping.is_some() {
            let told = socket::send(&gone.socket, &message(&[DETACH]), &[]).is_ok();
            // An earlier message may have ended the connection.
            self.honest.left += u64::from(gone.served && !(told && gone.greeted));
        }
        drop(gone.socket);
        if let Some((base, len)) = gone.mapping {
            // SAFETY: our mapping, which nobody uses any more.
            let _ = unsafe { sys!(libc::SYS_munmap, base, len) };
        }
    }
}

//! Page-fault handler for virtual machine monitors, in Firecracker's protocol.
//!
//! When a monitor restores a guest, it connects to the handler's Unix stream socket and sends one message: a JSON array of its
//! guest's regions, and as a descriptor the userfaultfd in which it has registered them for missing pages.
//! ```text
//! [{"base_host_virt_addr": 139638218973184, "size": 268435456, "offset": 0, "page_size": 4096}, …]
//! ```
//! `offset` is where the region begins in the snapshot's memory file; `page_size` is in bytes (older monitors say
//! `page_size_kib`, and mean bytes too). From then on the handler serves the guest's missing pages. It holds the snapshot
//! compressed, in blocks of 16 KiB. When the guest first touches a page, the handler decompresses its block and copies in that
//! page, then the others of the block. Memory that the balloon gives back (a *remove* event) reads as zeros afterwards.
//!
//! The handler does not put pages of a running guest out again: the guest's memory is the monitor's private memory, and Linux
//! lets no other process drop it. A monitor that attaches its guest's memory as a shared region has that: [`crate::shared`].
//! Cloud Hypervisor and QEMU hand nothing over; HANDOVER.md says what to do instead.
//!
//! Each guest has a thread. If the guest ends, or its monitor sends nonsense, only that thread ends. Once the last descriptor of
//! a userfaultfd is closed, pages that nobody serves read as zeros. So the handler serves a guest until its process has ended,
//! whatever the monitor does with its connection.

use serde::Deserialize;
use serde::de::IgnoredAny;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;
use uzswap_mm::codec::{Algorithm, Compressor, Decompressor, Encoding};
use uzswap_sys::uffd::{Message, Uffd};
use uzswap_sys::{socket, uffd_shared};

const PAGE: usize = 4096;
/// Bytes compressed as one unit.
const BLOCK: usize = 16 << 10;
/// The largest message in bytes: some thousand regions.
const MOST_JSON: usize = 256 << 10;
/// How often to check that a guest still exists whose monitor has closed its connection (milliseconds).
const LOOK_MS: i32 = 200;
/// How long a connecting monitor waits before the next try when there is no descriptor for it.
const FULL: Duration = Duration::from_millis(100);

/// One region of a guest, as its monitor describes it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub struct GuestRegion {
    /// Its address in the monitor.
    pub base_host_virt_addr: u64,
    /// Its size in bytes.
    pub size: u64,
    /// Its offset in the snapshot's memory file, in bytes.
    pub offset: u64,
    /// The size of its pages, in bytes.
    #[serde(alias = "page_size_kib", default = "small_pages")]
    pub page_size: u64,
}

fn small_pages() -> u64 {
    PAGE as u64
}

/// Parses a monitor's description of its guest.
///
/// # Errors
/// A sentence: not such an array, pages not of 4 KiB, or regions that make no sense.
pub fn parse_regions(json: &[u8]) -> Result<Vec<GuestRegion>, String> {
    let regions: Vec<GuestRegion> =
        serde_json::from_slice(json).map_err(|e| format!("not a description of guest regions: {e}"))?;
    if regions.is_empty() {
        return Err("a guest without regions".to_owned());
    }
    for r in &regions {
        if r.page_size != PAGE as u64 {
            return Err(format!("pages of {} bytes are not served, only of {PAGE}", r.page_size));
        }
        let aligned = [r.base_host_virt_addr, r.size, r.offset].iter().all(|n| n.is_multiple_of(PAGE as u64));
        let fits = r.base_host_virt_addr.checked_add(r.size).is_some_and(|end| end < 1 << 47);
        if !aligned || !fits || r.size == 0 || r.offset.checked_add(r.size).is_none() {
            return Err("a region that is not of whole pages, or lies nowhere".to_owned());
        }
    }
    Ok(regions)
}

/// The memory of a snapshot, compressed.
pub struct Image {
    blocks: Vec<(Encoding, Box<[u8]>)>,
    len: u64,
}

impl Image {
    /// Reads and compresses a memory file.
    ///
    /// # Errors
    /// The kernel's; also if it is a directory, or became shorter meanwhile. (An empty file makes an empty image, and so does a
    /// device, which has no length: see [`Image::is_empty`].)
    pub fn read(file: &File) -> io::Result<Self> {
        let len = file.metadata()?.len();
        let mut compressor = Compressor::new(Algorithm::Zstd(1));
        let (mut block, mut out) = (vec![0; BLOCK], vec![0; BLOCK]);
        let mut blocks = Vec::with_capacity(len.div_ceil(BLOCK as u64) as usize);
        for at in (0..len).step_by(BLOCK) {
            let n = BLOCK.min((len - at) as usize);
            file.read_exact_at(&mut block[..n], at)?;
            block[n..].fill(0);
            blocks.push(match compressor.compress(&block, &mut out[..BLOCK - BLOCK / 16]) {
                Some((encoding, n)) => (encoding, out[..n].into()),
                None => (Encoding::Raw, block[..].into()),
            });
        }
        Ok(Self { blocks, len })
    }

    /// The size of the file in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the file was empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many bytes the image takes here.
    #[must_use]
    pub fn held(&self) -> usize {
        self.blocks.iter().map(|b| b.1.len() + size_of::<(Encoding, Box<[u8]>)>()).sum()
    }
}

/// Serves every monitor that connects, forever.
///
/// # Errors
/// When it can no longer accept connections.
pub fn serve(listener: &UnixListener, image: &Arc<Image>) -> io::Result<()> {
    const SCARCE: [i32; 4] = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            // Go on, for the guests that are served.
            Err(e) if e.raw_os_error().is_some_and(|errno| SCARCE.contains(&errno)) => {
                std::thread::sleep(FULL);
                continue;
            }
            Err(e) if e.raw_os_error() == Some(libc::ECONNABORTED) => continue,
            Err(e) => return Err(e),
        };
        let image = image.clone();
        let started = std::thread::Builder::new().name("uzswap-guest".to_owned()).spawn(move || {
            if let Err(sentence) = serve_guest(stream, &image) {
                say(&format!("uzswap: a monitor was refused: {sentence}\n"));
            }
        });
        if let Err(e) = started {
            say(&format!("uzswap: a monitor was refused: {e}\n"));
        }
    }
}

/// Prints to stderr. If nothing can be written there, guests are served all the same.
fn say(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Serves one guest until it ends.
///
/// # Errors
/// A sentence, if what the monitor sent cannot be served.
pub fn serve_guest(stream: UnixStream, image: &Image) -> Result<(), String> {
    let socket = OwnedFd::from(stream);
    // A peer that may connect may read the snapshot.
    if !socket::is_trusted(&socket).map_err(|e| e.to_string())? {
        return Err("it is another user's, and the snapshot is not".to_owned());
    }
    socket::time_out(&socket, 10).map_err(|e| e.to_string())?;
    let (json, fds) = description(&socket).map_err(|e| format!("nothing was received: {e}"))?;
    let uffd = fds.into_iter().next().filter(|fd| uffd_shared::is_uffd(fd.as_raw_fd()));
    let uffd = uffd.ok_or("no userfaultfd came with the description")?;
    let regions = parse_regions(&json)?;
    if let Some(r) = regions.iter().find(|r| r.offset + r.size > image.len()) {
        return Err(format!("a region ends at {} of a memory file of {} bytes", r.offset + r.size, image.len()));
    }
    Guest::new(uffd, &socket, regions, image).run();
    Ok(())
}

/// Receives a monitor's message and its descriptors. (The kernel delivers a long message in pieces.)
fn description(socket: &OwnedFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let is_cut_off = |json: &[u8]| serde_json::from_slice::<IgnoredAny>(json).is_err_and(|e| e.is_eof());
    let (mut json, mut at, mut fds) = (vec![0; MOST_JSON], 0, Vec::new());
    while at < MOST_JSON {
        let (n, came) = socket::receive(socket, &mut json[at..])?;
        fds.extend(came);
        at += n;
        if n == 0 || !is_cut_off(&json[..at]) {
            break;
        }
    }
    json.truncate(at);
    Ok((json, fds))
}

/// A guest being served.
struct Guest<'a> {
    uffd: OwnedFd,
    socket: &'a OwnedFd,
    /// Whether the monitor has closed the socket.
    hung_up: bool,
    regions: Vec<GuestRegion>,
    /// Bitmaps of the pages given back, by region.
    removed: Vec<Vec<u64>>,
    image: &'a Image,
    decompressor: Decompressor,
    /// The block decompressed last.
    block: (usize, Vec<u8>),
    /// Addresses of faults not served yet, as an event must be read first.
    waiting: Vec<usize>,
    lost: bool,
}

impl<'a> Guest<'a> {
    fn new(uffd: OwnedFd, socket: &'a OwnedFd, regions: Vec<GuestRegion>, image: &'a Image) -> Self {
        let bits = |r: &GuestRegion| vec![0; (r.size / PAGE as u64).div_ceil(64) as usize];
        let removed = regions.iter().map(bits).collect();
        let block = (usize::MAX, vec![0; BLOCK]);
        let decompressor = Decompressor::new();
        Self {
            uffd,
            socket,
            hung_up: false,
            regions,
            removed,
            image,
            decompressor,
            block,
            waiting: Vec::new(),
            lost: false,
        }
    }

    fn run(&mut self) {
        let handle = Uffd::from_raw(self.uffd.as_raw_fd());
        while !self.lost {
            match handle.read() {
                Ok(Some(Message::Fault { address, .. })) => self.waiting.push(address),
                Ok(Some(Message::Removed { start, end } | Message::Unmapped { start, end })) => {
                    self.removed(start, end)
                }
                Ok(Some(_)) => {}
                Ok(None) if self.waiting.is_empty() => {
                    if !self.sleep(&handle) {
                        return;
                    }
                    continue;
                }
                Ok(None) => {}
                Err(_) => return,
            }
            while let Some(address) = self.waiting.last().copied() {
                if !self.bring(&handle, address) {
                    break;
                }
                self.waiting.pop();
            }
        }
    }

    /// Sleeps until something happens; returns false if the guest is gone.
    fn sleep(&mut self, handle: &Uffd) -> bool {
        let socket = if self.hung_up { -1 } else { self.socket.as_raw_fd() };
        let mut polls = [self.uffd.as_raw_fd(), socket].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        // SAFETY: two pollfds of ours, which outlive the call.
        unsafe { libc::poll(polls.as_mut_ptr(), 2, if self.hung_up { LOOK_MS } else { -1 }) };
        if polls[0].revents & (libc::POLLERR | libc::POLLNVAL) != 0 {
            return false;
        }
        if polls[1].revents != 0 {
            // Whatever else the monitor says means nothing here.
            self.hung_up = !matches!(socket::receive(self.socket, &mut [0; 512]), Ok((1.., _)));
        }
        polls[0].revents != 0 || !self.hung_up || self.is_there(handle)
    }

    /// Whether the process with the guest's memory still exists. (CONTINUE has nothing to map in private memory, but the kernel
    /// looks for the process before it refuses.)
    fn is_there(&self, handle: &Uffd) -> bool {
        let at = self.regions[0].base_host_virt_addr as usize;
        !matches!(handle.continue_pages(at, PAGE, false, true), Err((_, libc::ESRCH)))
    }

    fn place(&self, address: usize) -> Option<(usize, u64)> {
        let address = address as u64;
        self.regions.iter().enumerate().find_map(|(i, r)| {
            let inside = address.checked_sub(r.base_host_virt_addr).filter(|at| *at < r.size)?;
            Some((i, inside / PAGE as u64))
        })
    }

    fn removed(&mut self, start: usize, end: usize) {
        for address in (start..end).step_by(PAGE) {
            if let Some((i, page)) = self.place(address) {
                self.removed[i][(page / 64) as usize] |= 1 << (page % 64);
            }
        }
    }

    /// Whether a page of region `i` was given back.
    fn is_removed(&self, i: usize, page: u64) -> bool {
        self.removed[i][(page / 64) as usize] & (1 << (page % 64)) != 0
    }

    /// Copies a page in; returns false if an event must be read first.
    fn bring(&mut self, handle: &Uffd, address: usize) -> bool {
        let Some((i, page)) = self.place(address) else {
            handle.wake(address, PAGE);
            return true;
        };
        let gone = self.is_removed(i, page);
        let Some(bytes) = self.page(self.regions[i].offset + page * PAGE as u64, gone) else {
            // The compressed copy is damaged: report an error, not wrong data.
            let _ = handle.poison(address, PAGE);
            handle.wake(address, PAGE);
            return true;
        };
        let from = bytes.as_ptr() as usize;
        // SAFETY: `bytes` is a page of our memory.
        match unsafe { handle.copy(address, from, PAGE) } {
            Err((_, libc::EAGAIN)) => false,
            Err((_, libc::ESRCH)) => {
                self.lost = true;
                true
            }
            Err(_) => {
                handle.wake(address, PAGE);
                true
            }
            Ok(()) => {
                if !gone {
                    self.bring_rest(handle, i, page);
                }
                true
            }
        }
    }

    /// Copies in the rest of the block decompressed last, around a page of region `i`, as far as the nearest page that was given
    /// back on either side. (Pages beyond one that is already there, and pages whose copy fails, are copied in when touched.)
    fn bring_rest(&self, handle: &Uffd, i: usize, page: u64) {
        let r = &self.regions[i];
        let (first, in_block) = (r.offset / PAGE as u64, (BLOCK / PAGE) as u64);
        let place = (first + page) % in_block;
        let gone = |page: &u64| self.is_removed(i, *page);
        let end = (page + in_block - place).min(r.size / PAGE as u64);
        let end = (page + 1..end).find(gone).unwrap_or(end);
        let start = page.saturating_sub(place);
        let start = (start..page).rfind(gone).map_or(start, |gone| gone + 1);
        for (from, to) in [(page + 1, end), (start, page)].into_iter().filter(|(from, to)| from < to) {
            let at = ((first + from) % in_block) as usize * PAGE;
            let bytes = &self.block.1[at..at + (to - from) as usize * PAGE];
            // SAFETY: `bytes` is our memory.
            let _ = unsafe {
                handle.copy((r.base_host_virt_addr + from * PAGE as u64) as usize, bytes.as_ptr() as usize, bytes.len())
            };
        }
    }

    /// The bytes of the snapshot's page at `offset`; zeros if the page is `gone`. None if the compressed copy is damaged.
    fn page(&mut self, offset: u64, gone: bool) -> Option<&[u8]> {
        static ZEROS: [u8; PAGE] = [0; PAGE];
        if gone {
            return Some(&ZEROS);
        }
        let index = (offset / BLOCK as u64) as usize;
        if self.block.0 != index {
            self.block.0 = usize::MAX;
            let (encoding, bytes) = self.image.blocks.get(index)?;
            self.decompressor.decompress(*encoding, bytes, &mut self.block.1).ok()?;
            self.block.0 = index;
        }
        let at = (offset % BLOCK as u64) as usize;
        Some(&self.block.1[at..at + PAGE])
    }
}

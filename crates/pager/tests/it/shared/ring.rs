//! io_uring with plain buffers, from and into pages of a shared region that are out.

use super::*;
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicU32;

const OP_READ: u8 = 22;
const OP_WRITE: u8 = 23;
/// Has a worker thread of the kernel's do the request from the start.
const ASYNC: u8 = 1 << 4;
const ENTRIES: u32 = 64;

/// A ring, made by system calls. One thread uses it.
pub struct Ring {
    fd: i32,
    rings: *mut u8,
    requests: *mut [u64; 8],
    parameters: [u32; 30],
}

impl Ring {
    /// None if io_uring is refused, which is printed.
    pub fn new() -> Option<Self> {
        let mut parameters = [0u32; 30];
        // SAFETY: the structure has 120 bytes.
        let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, ENTRIES, parameters.as_mut_ptr()) } as i32;
        if fd < 0 {
            crate::alone::skip(&format!("io_uring is refused here: {}", std::io::Error::last_os_error()));
            return None;
        }
        // IORING_FEAT_SINGLE_MMAP, since 5.4: one mapping has both queues.
        assert!(parameters[5] & 1 != 0);
        let map = |len: usize, offset: i64| {
            let (rw, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_POPULATE);
            // SAFETY: a new mapping.
            let at = unsafe { libc::mmap(std::ptr::null_mut(), len, rw, flags, fd, offset) };
            assert!(at != libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
            at
        };
        // The first queue ends with the array of indices, the second with the completions (of 16 bytes).
        let len = (parameters[16] as usize + 4 * parameters[0] as usize)
            .max(parameters[25] as usize + 16 * parameters[1] as usize);
        let (rings, requests) = (map(len, 0).cast(), map(64 * parameters[0] as usize, 0x1000_0000).cast());
        Some(Self { fd, rings, requests, parameters })
    }

    fn word(&self, offset: u32) -> &AtomicU32 {
        // SAFETY: within the rings, aligned.
        unsafe { &*self.rings.add(offset as usize).cast() }
    }

    /// Submits requests `(operation, flags, file, offset, address, length)` together, and waits for all. Returns the results in
    /// order.
    pub fn run(&self, requests: &[(u8, u8, i32, u64, usize, usize)]) -> Vec<i32> {
        let [tail, mask, array] = [self.parameters[11], self.parameters[12], self.parameters[16]];
        let mask = self.word(mask).load(Relaxed);
        let mut at = self.word(tail).load(Relaxed);
        for (i, (op, flags, file, offset, address, len)) in requests.iter().enumerate() {
            let slot = at & mask;
            let head = u64::from(*op) | u64::from(*flags) << 8 | (*file as u64) << 32;
            // SAFETY: one of the ring's entries, which the kernel does not read before the tail moves.
            unsafe {
                *self.requests.add(slot as usize) = [head, *offset, *address as u64, *len as u64, i as u64, 0, 0, 0]
            };
            self.word(array + 4 * slot).store(slot, Relaxed);
            at = at.wrapping_add(1);
        }
        self.word(tail).store(at, Release);
        let n = requests.len();
        let wait = 1; // IORING_ENTER_GETEVENTS
        // SAFETY: buffers in the requests are mapped, and as long as they say.
        let done = unsafe { libc::syscall(libc::SYS_io_uring_enter, self.fd, n, n, wait, 0usize, 0usize) };
        assert_eq!(done, n as i64, "{}", std::io::Error::last_os_error());
        let mut results = vec![i32::MIN; n];
        let [head, tail, mask, entries] =
            [self.parameters[20], self.parameters[21], self.parameters[22], self.parameters[25]];
        let (mut at, mask) = (self.word(head).load(Relaxed), self.word(mask).load(Relaxed));
        while at != self.word(tail).load(Acquire) {
            let entry = entries + 16 * (at & mask);
            results[self.word(entry).load(Relaxed) as usize] = self.word(entry + 8).load(Relaxed) as i32;
            at = at.wrapping_add(1);
        }
        self.word(head).store(at, Release);
        results
    }

    /// Registers a buffer with number 0: the kernel pins its pages as long as the ring lives.
    pub fn register(&self, at: *mut u8, len: usize) {
        let buffer = libc::iovec { iov_base: at.cast(), iov_len: len };
        // SAFETY: one buffer, mapped as long as the ring lives.
        let done = unsafe { libc::syscall(libc::SYS_io_uring_register, self.fd, 0, &raw const buffer, 1) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the ring's own descriptor. (Its mappings go with the process.)
        unsafe { libc::close(self.fd) };
    }
}

#[test]
fn a_ring_reads_and_writes_pages_that_are_out() {
    const PAGES: usize = 256;
    /// Pages in a request.
    const EACH: usize = 8;
    let Some(ring) = Ring::new() else { return };
    let region = region(4 * MIB, 8 * MIB);
    let (m, other) = (region.map().unwrap(), region.map().unwrap());
    if !m.kernel_faults() {
        return crate::alone::skip("the kernel's own faults may not be served here");
    }
    let content = |round: u64, page: usize, i: usize| (round << 32 | page as u64) * 0x9e37 + i as u64 / 16;
    let file = tempfile();
    for round in 0..4u64 {
        // In the submitting thread if the kernel can, or by the kernel's workers.
        let flags = if round % 2 == 0 { 0 } else { ASYNC };
        for page in 0..PAGES {
            words(&m, page).iter().enumerate().for_each(|(i, w)| w.store(content(round, page, i), Relaxed));
        }
        let all = |op: u8, m: &SharedMapping| {
            let request = |k: usize| {
                let at = k * EACH * PAGE;
                (op, flags, file.as_raw_fd(), at as u64, m.as_mut_ptr() as usize + at, EACH * PAGE)
            };
            ring.run(&(0..PAGES / EACH).map(request).collect::<Vec<_>>())
        };
        assert_eq!(region.control().page_out(0..PAGES * PAGE).unwrap(), PAGES as u64);
        assert_eq!(all(OP_WRITE, &m), [(EACH * PAGE) as i32; PAGES / EACH], "round {round}");
        for page in 0..PAGES {
            words(&m, page).iter().for_each(|w| w.store(0, Relaxed));
        }
        assert_eq!(region.control().page_out(0..PAGES * PAGE).unwrap(), PAGES as u64);
        // Into its other mapping, while pages are evicted again under the kernel's hands.
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    region.control().page_out(0..PAGES * PAGE).unwrap();
                }
            });
            let read = all(OP_READ, &other);
            stop.store(true, Relaxed);
            assert_eq!(read, [(EACH * PAGE) as i32; PAGES / EACH], "round {round}");
        });
        for page in 0..PAGES {
            let right = |(i, w): (usize, &AtomicU64)| w.load(Relaxed) == content(round, page, i);
            assert!(words(&m, page).iter().enumerate().all(right), "round {round}, page {page}");
        }
    }
    // A page that is protected for a snapshot also holds up the kernel.
    let control = region.control();
    control.protect(0..PAGE, None).unwrap();
    control.page_out(0..PAGE).unwrap();
    std::thread::scope(|scope| {
        let (m, file) = (&m, &file);
        scope.spawn(move || {
            let ring = Ring::new().expect("another ring");
            assert_eq!(ring.run(&[(OP_READ, 0, file.as_raw_fd(), PAGE as u64, m.as_mut_ptr() as usize, 64)]), [64]);
        });
        assert_eq!(control.next_write(std::time::Duration::from_secs(20)).unwrap(), Some(0));
        assert_eq!(words(&other, 0)[0].load(Relaxed), content(3, 0, 0), "written while it was protected");
        control.unprotect(0..PAGE, None).unwrap();
    });
    assert_eq!(words(&other, 0)[0].load(Relaxed), content(3, 1, 0));
}

//! The pool of a shared region: compressed objects in the owner's own memory.

use crate::frames::arena::{self, discard};
use crate::pool::object::{self, Header};
use uzswap_mm::zsmalloc::{Handle, ZsPool};
use uzswap_sys::raw::Errno;
use uzswap_sys::sys;

/// Places in the pool, and the memory behind them. Owner: the engine's lock.
pub(super) struct Store {
    pool: ZsPool,
    base: usize,
    len: usize,
}

impl Store {
    /// A pool with room for `bytes` of objects.
    pub fn new(bytes: usize) -> Result<Self, Errno> {
        let len = bytes.next_multiple_of(4096);
        let store = Self { pool: ZsPool::new(len), base: arena::reserve(len)?, len };
        // SAFETY: advice on a new mapping.
        unsafe {
            let _ = sys!(libc::SYS_madvise, store.base, len, libc::MADV_DONTFORK);
            let _ = sys!(libc::SYS_madvise, store.base, len, libc::MADV_NOHUGEPAGE);
        }
        arena::open(store.base, len)?;
        Ok(store)
    }

    /// Bytes held from the kernel.
    pub fn held(&self) -> usize {
        self.pool.held_bytes()
    }

    pub fn metadata_bytes(&self) -> usize {
        self.pool.metadata_bytes()
    }

    /// Stores an object that the pages `live` refer to; `hashes` are those of its pages. None if the pool is full.
    pub fn put(&mut self, head: Header, live: u16, hashes: &[u128], bytes: &[u8]) -> Option<u32> {
        let at = object::head_bytes(head.order);
        let handle = self.pool.alloc(at + bytes.len())?;
        // SAFETY: the place was just given to us, inside our mapping, and self is borrowed mutably.
        let place =
            unsafe { core::slice::from_raw_parts_mut((self.base + handle.offset()) as *mut u8, at + bytes.len()) };
        head.write(place);
        object::set_live(place, live.into());
        for (i, hash) in hashes.iter().enumerate() {
            object::set_hash(place, i, *hash);
        }
        place[at..].copy_from_slice(bytes);
        Some(handle.raw())
    }

    /// The object of a handle, header first.
    pub fn object(&self, handle: u32) -> &[u8] {
        let at = (self.base + Handle::from_raw(handle).offset()) as *const u8;
        // SAFETY: handles in page-table entries are live objects in our mapping; the header has the length.
        unsafe {
            let head = Header::read(core::slice::from_raw_parts(at, object::HEADER_BYTES));
            core::slice::from_raw_parts(at, object::head_bytes(head.order) + head.len)
        }
    }

    /// Drops the reference of page `index`; frees the object with the last one, and returns whether it did.
    pub fn release(&mut self, handle: u32, index: usize) -> bool {
        let len = self.object(handle).len();
        let at = (self.base + Handle::from_raw(handle).offset()) as *mut u8;
        // SAFETY: a live object to which no slice is left, and self is borrowed mutably.
        if object::leave(unsafe { core::slice::from_raw_parts_mut(at, len) }, index) {
            return false;
        }
        if let Some(freed) = self.pool.free(Handle::from_raw(handle)) {
            // SAFETY: the pool says that no object is left in the range.
            unsafe { discard(self.base + freed.offset, freed.len) };
        }
        true
    }

    /// The index of a page in its object: objects are aligned to their pages.
    pub fn index(&self, page: u64, handle: u32) -> usize {
        (page & ((1 << Header::read(self.object(handle)).order) - 1)) as usize
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: our mapping; nobody else knows of it.
        let _ = unsafe { sys!(libc::SYS_munmap, self.base, self.len) };
    }
}

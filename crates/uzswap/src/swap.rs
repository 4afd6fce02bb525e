//! The swap file: its size, its place, and how it is kept from others. Or, in its place, a server (`remote`).
//!
//! The file has no name (an unlinked temporary file) and mode 0600, and goes with the last process that has it open.

use crate::config::{Config, plain};
use crate::remote::Server;
use crate::remote::address::{Address, is_address};
use crate::remote::gateway::{Gateway, Keeper};
use std::ffi::CString;
use std::fs::{File, Permissions};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Relaxed, Release};
use uzswap_mm::shrinker::Policy;
use uzswap_mm::size::{Size, human};
use uzswap_mm::swapfile::{BLOCK, Geometry, LEAST_CLUSTER, MOST_BYTES};
use uzswap_pager::swap::clusters::{ClusterMap, IN_THE_CLEAR, MAGIC, OBJECT};
use uzswap_sys::{blockio, memfd};

/// Directories tried in order if none is named. The second one is often in memory.
const DIRS: [&str; 2] = ["/var/tmp", "/tmp"];
/// The share of the limit that the compressed pools may take before the coldest data goes to disk, and the share of that to which
/// they are then shrunk (percent).
const MAX_POOL_PERCENT: u32 = 60;
/// See [`MAX_POOL_PERCENT`].
const ACCEPT_THRESHOLD_PERCENT: u32 = 90;

/// Magic numbers of file systems in memory: tmpfs, ramfs, hugetlbfs.
const MEMORY: [i64; 3] = [0x0102_1994, 0x8584_58f6, 0x9584_58f6];
/// overlayfs, which stores where its upper directory is: on a disk, or in memory (live systems, some containers).
const OVERLAY: i64 = 0x794c_7630;
/// Bytes written to a file on an overlay to find out where its pages are.
const TRIED_BYTES: usize = 64 << 10;
/// For tests: environment variable with fall-backs to use although they are not needed, separated by commas: `buffered` for no
/// direct I/O, `plain` for no io_uring.
const ENV_SWAP_IO: &str = "UZSWAP_TEST_SWAP_IO";

/// Where the data is stored.
enum Store {
    File(File),
    Remote(Gateway),
}

/// An open swap file, or a server, with its books.
pub struct Swap {
    store: Store,
    /// The memory object with the books.
    object: OwnedFd,
    map: NonNull<ClusterMap>,
}

impl Swap {
    /// Creates the swap file, or connects to the server, if one is asked for. The error is one sentence.
    pub fn of(config: &Config) -> Result<Option<Swap>, String> {
        let ram = config.swap_in_ram == Some(true);
        let Some(text) = &config.swap else {
            if config.encrypt_swap == Some(true) {
                return Err("--encrypt-swap encrypts what goes to disk, but there is none: add --swap SIZE".to_owned());
            }
            return match (&config.swap_dir, &config.swap_policy, ram) {
                (None, None, false) => Ok(None),
                (Some(_), ..) => {
                    Err("--swap-dir names a place for swap, but none is asked for: add --swap SIZE".to_owned())
                }
                (_, Some(_), _) => {
                    Err("--swap-policy says what goes to disk, but there is none: add --swap SIZE".to_owned())
                }
                _ => Err("--swap-in-ram is about a place for swap, but none is asked for: add --swap SIZE".to_owned()),
            };
        };
        let policy = config.swap_policy.as_deref().map_or(Ok(Policy::default()), str::parse)?;
        if is_address(text) {
            return Swap::remote(config, text, policy).map(Some);
        }
        let bytes = size(text)?;
        let file = match &config.swap_dir {
            Some(dir) => file_in(dir, ram)?,
            None => DIRS.iter().find_map(|dir| file_in(Path::new(dir), false).ok()).ok_or(
                "no directory for the swap file was found: /var/tmp and /tmp are in memory or cannot be written; name one on a disk with --swap-dir",
            )?,
        };
        // Where a file can be made without a name it has the permissions of any new file.
        let private = file.set_permissions(Permissions::from_mode(0o600));
        private.map_err(|e| format!("the swap file cannot be made private: {}", plain(&e)))?;
        let direct = env_allows("buffered") && is_direct(&file);
        let punches = blockio::punch(file.as_raw_fd(), 0, BLOCK as u64).is_ok();
        let swap = Swap::share(Store::File(file), bytes, policy, config.encrypt_swap == Some(true));
        if let Ok(swap) = &swap {
            swap.map().direct.store(u32::from(direct), Relaxed);
            // A direct write may outlive its process: see `await_late` in the pager.
            let plain = !env_allows("plain") || (direct && !punches);
            swap.map().plain.store(u32::from(plain), Relaxed);
        }
        Ok(Some(swap.map_err(|e| format!("the swap file's books cannot be created: {}", plain(&e)))?))
    }

    /// Connects to a server.
    fn remote(config: &Config, text: &str, policy: Policy) -> Result<Swap, String> {
        let address = Address::parse(text)?;
        if config.swap_dir.is_some() {
            return Err("--swap-dir names a place for a swap file, but --swap names a server: leave one out".to_owned());
        }
        if config.swap_in_ram == Some(true) {
            return Err(
                "--swap-in-ram is about a place for a swap file, but --swap names a server: leave it out".to_owned()
            );
        }
        usable(address.size)?;
        let bytes = address.size;
        let gateway = Gateway::new(Server::new(address)?);
        let gateway =
            gateway.map_err(|e| format!("the socket for the swap server cannot be created: {}", plain(&e)))?;
        let swap = Swap::share(Store::Remote(gateway), bytes, policy, true);
        let swap = swap.map_err(|e| format!("the books of what is swapped cannot be created: {}", plain(&e)))?;
        swap.map().remote.store(1, Relaxed);
        Ok(swap)
    }

    /// Starts to take the members' requests, if this is a server. The caller must have blocked signals, as threads inherit that.
    pub fn serve(&self) -> Result<Option<Keeper>, String> {
        let Store::Remote(gateway) = &self.store else { return Ok(None) };
        // SAFETY: with a server the mapping is never unmapped (see `drop`).
        let map: &'static ClusterMap = unsafe { self.map.as_ref() };
        let keeper = gateway.serve(map);
        keeper.map(Some).map_err(|e| format!("the threads for the swap server cannot be started: {}", plain(&e)))
    }

    /// Creates the books.
    fn share(store: Store, bytes: u64, policy: Policy, encrypt: bool) -> io::Result<Swap> {
        let size = size_of::<ClusterMap>();
        let object = memfd::create(&std::ffi::CString::new(OBJECT)?, size as u64)?;
        memfd::seal(&object, memfd::SEAL_SIZE)?;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing of ours.
        let map = unsafe { memfd::map(&object, size, memfd::WRITABLE, None) }?;
        let map = NonNull::new(map as *mut ClusterMap).ok_or(io::ErrorKind::OutOfMemory)?;
        let swap = Swap { store, object, map };
        let map = swap.map();
        map.bytes.store(bytes, Relaxed);
        map.pid.store(std::process::id(), Relaxed);
        let fd = match &swap.store {
            Store::File(file) => file.as_raw_fd(),
            Store::Remote(gateway) => gateway.fd(),
        };
        map.fd.store(fd, Relaxed);
        let identity = blockio::identity(fd).map_err(io::Error::from_raw_os_error)?;
        map.file.iter().zip(identity).for_each(|(to, part)| to.store(part, Relaxed));
        map.policy.store(policy.number(), Relaxed);
        map.clear.store(if encrypt { 0 } else { IN_THE_CLEAR }, Relaxed);
        map.max_pool_percent.store(MAX_POOL_PERCENT, Relaxed);
        map.accept_threshold_percent.store(ACCEPT_THRESHOLD_PERCENT, Relaxed);
        map.magic.store(MAGIC, Release);
        Ok(swap)
    }

    fn map(&self) -> &ClusterMap {
        // SAFETY: the mapping is of this size, aligned, zero-filled (valid for atomics) and lives as long as `self`; all fields
        // are atomics, so writes by others are no data race.
        unsafe { self.map.as_ref() }
    }

    /// The path at which processes find the books for as long as this process lives.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.object.as_raw_fd())
    }

    /// How transfers are made: `direct` bypasses the page cache, `buffered` does not (the file system cannot), `redis` is a
    /// server.
    pub fn io(&self) -> &'static str {
        if matches!(self.store, Store::Remote(_)) {
            "redis"
        } else if self.map().direct.load(Relaxed) != 0 {
            "direct"
        } else {
            "buffered"
        }
    }

    /// The size asked for, in bytes.
    pub fn bytes(&self) -> u64 {
        self.map().bytes.load(Relaxed)
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        self.map().geometry().map_or(0, |g| (self.map().clusters_used() as u64) << g.cluster_shift)
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        if matches!(self.store, Store::Remote(_)) {
            // The gateway's threads use it.
            return;
        }
        // SAFETY: this is our mapping, of this size; what is handed out borrows from `self`, so no reference is left.
        unsafe { libc::munmap(self.map.as_ptr().cast(), size_of::<ClusterMap>()) };
    }
}

/// Parses the size of a swap file. The error is one sentence.
fn size(text: &str) -> Result<u64, String> {
    match Size::parse(text) {
        Ok(Size::Bytes(bytes)) => usable(bytes).map(|()| bytes),
        Err(_) if text.contains('/') => Err(format!(
            "`{text}` is not a size for the swap file: --swap takes a size or redis://HOST:PORT/DB?size=4G; where the file goes is --swap-dir"
        )),
        _ => Err(format!(
            "`{text}` is not a size for the swap file: give bytes, such as --swap 4G, or the address of a server"
        )),
    }
}

/// Refuses sizes for which books cannot be kept.
fn usable(bytes: u64) -> Result<(), String> {
    match Geometry::of(bytes) {
        Some(_) => Ok(()),
        None => Err(format!(
            "a size of {} cannot be used for swap: choose {} to {}",
            human(bytes),
            human(LEAST_CLUSTER as u64),
            human(MOST_BYTES)
        )),
    }
}

/// For tests: whether [`ENV_SWAP_IO`] does not ask for this fall-back.
fn env_allows(fallback: &str) -> bool {
    !std::env::var(ENV_SWAP_IO).is_ok_and(|words| words.split(',').any(|word| word == fallback))
}

/// Whether a file can be written and read past the page cache. This tries it, as file systems refuse at different times (some
/// when the file is opened, some at the first transfer), and some need another alignment. Leaves the file empty.
fn is_direct(file: &File) -> bool {
    #[repr(C, align(4096))]
    struct Block([u8; BLOCK]);
    if is_memory(file) {
        // tmpfs accepts the flag, but there is no disk.
        return false;
    }
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let opened = File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(path);
    let (wrote, mut read) = (Block([0x5a; BLOCK]), Block([0; BLOCK]));
    let at = BLOCK as u64;
    let same = opened.is_ok_and(|f| {
        f.write_all_at(&wrote.0, at).is_ok() && f.read_exact_at(&mut read.0, at).is_ok() && read.0 == wrote.0
    });
    file.set_len(0).is_ok() && same
}

/// Creates a file without a name in a directory. Refuses a directory in memory, where swap frees nothing, unless `ram_too`.
fn file_in(dir: &Path, ram_too: bool) -> Result<File, String> {
    let shown = dir.display();
    let path = CString::new(dir.as_os_str().as_bytes()).map_err(|_| format!("`{shown}` is no directory"))?;
    let mut found = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: a C string, and an out-parameter of the right type, for which zeros are valid; both outlive the call.
    let (ret, found) = unsafe { (libc::statfs(path.as_ptr(), found.as_mut_ptr()), found.assume_init()) };
    if ret != 0 {
        let why = plain(&std::io::Error::last_os_error());
        return Err(format!(
            "the swap file cannot be created in `{shown}`: {why}; name another directory with --swap-dir"
        ));
    }
    let in_memory = || {
        format!(
            "`{shown}` is in memory, where a swap file frees nothing: name a directory on a disk, or add --swap-in-ram if you mean it"
        )
    };
    if !ram_too && MEMORY.contains(&found.f_type) {
        return Err(in_memory());
    }
    let file = tempfile::tempfile_in(dir).map_err(|e| {
        format!("no swap file can be created in `{shown}`: {}; name another directory with --swap-dir", plain(&e))
    })?;
    if !ram_too && is_memory(&file) { Err(in_memory()) } else { Ok(file) }
}

/// Whether an empty file is in memory: its file system is, or is an overlay of one that is.
fn is_memory(file: &File) -> bool {
    let mut found = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: an out-parameter of the right type, for which zeros are valid; it outlives the call.
    let (ret, found) = unsafe { (libc::fstatfs(file.as_raw_fd(), found.as_mut_ptr()), found.assume_init()) };
    if ret != 0 || found.f_type != OVERLAY {
        return ret == 0 && MEMORY.contains(&found.f_type);
    }
    let tried = || {
        file.write_all_at(&[0; TRIED_BYTES], 0)?;
        memfd::is_shared_memory(&file.try_clone()?.into(), TRIED_BYTES)
    };
    let is_memory = tried().unwrap_or(false);
    file.set_len(0).is_ok() && is_memory
}

#[cfg(test)]
mod tests {
    use super::{Store, Swap};
    use crate::config::Config;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;
    use std::sync::atomic::Ordering::Relaxed;

    fn of(swap: Option<&str>, dir: Option<&str>, ram: bool) -> Result<Option<Swap>, String> {
        let (swap, swap_dir) = (swap.map(str::to_owned), dir.map(Into::into));
        Swap::of(&Config { swap, swap_dir, swap_in_ram: Some(ram), ..Config::default() })
    }

    #[test]
    fn the_file_is_ours_alone() {
        let dir = env!("CARGO_MANIFEST_DIR");
        // The sources may be in memory.
        let swap = of(Some("64M"), Some(dir), true).unwrap().unwrap();
        let Store::File(file) = &swap.store else { panic!("no file") };
        let meta = file.metadata().unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.nlink()), (0o600, 0));
        assert_eq!(swap.map().geometry().unwrap().clusters, 256);
        assert_eq!((swap.bytes(), swap.used()), (64 << 20, 0));
        assert_eq!(swap.map().fd.load(Relaxed), file.as_raw_fd());
        assert_eq!(meta.len(), 0, "what was tried out is gone");
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        assert!(of(None, None, false).unwrap().is_none());
        let refused = |swap, dir, ram| of(swap, dir, ram).err().expect("it was not refused");
        assert!(refused(None, Some("/"), false).contains("--swap SIZE"));
        let lru = |swap: Option<&str>| Config {
            swap: swap.map(str::to_owned),
            swap_policy: Some("lru".to_owned()),
            ..Config::default()
        };
        let refusal = |config| Swap::of(&config).err().expect("it was not refused");
        assert!(refusal(lru(None)).contains("add --swap SIZE"));
        assert!(refusal(lru(Some("64M"))).contains("no policy is called `lru`"));
        let key = Config { encrypt_swap: Some(true), ..Config::default() };
        assert!(refusal(key).contains("--encrypt-swap") && Swap::of(&Config::default()).unwrap().is_none());
        assert!(refused(Some("50%"), None, false).contains("give bytes"));
        assert!(refused(Some("1x"), None, false).contains("such as --swap 4G, or the address"));
        assert!(refused(Some("/dev/sda"), None, false).contains("where the file goes is --swap-dir"));
        assert!(refused(Some("http://h"), None, false).contains("`http` is not a swap server"));
        assert!(refused(Some("redis://h?size=1K"), None, false).contains("a size of 1 KiB cannot be used for swap"));
        assert!(refused(None, None, true).contains("--swap-in-ram"));
        assert!(refused(Some("redis://h?size=1G"), None, true).contains("--swap-in-ram"));
        assert!(refused(Some("redis://h"), None, false).contains("?size=4G"));
        assert!(refused(Some("redis://h?size=1G"), Some("/"), false).contains("names a server"));
        // Nobody listens at port 1.
        assert!(refused(Some("redis://127.0.0.1:1?size=1G"), None, false).contains("the swap server cannot be used"));
        assert!(refused(Some("1K"), None, false).contains("256 KiB"));
        assert!(refused(Some("1T"), None, false).contains("256 GiB"));
        assert!(refused(Some("1G"), Some("/no/such"), false).contains("no such file"));
        assert!(refused(Some("1G"), Some("/proc"), true).contains("no swap file can be created"));
    }

    #[test]
    fn memory_is_refused_unless_asked_for() {
        let shm = "/dev/shm";
        if std::fs::read_to_string("/proc/mounts").unwrap().lines().any(|l| l.split(' ').nth(1) == Some(shm)) {
            assert!(of(Some("1G"), Some(shm), false).err().unwrap().contains("--swap-in-ram"));
            assert_eq!(of(Some("1G"), Some(shm), true).unwrap().map(|swap| swap.io()), Some("buffered"));
        }
    }
}

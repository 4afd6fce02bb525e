//! Several processes: this test program, started again as workers.

use super::removes::NEAR;
use super::*;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use uzswap_mm::pagemap::{PageState, SOFT_DIRTY};
use uzswap_pager::shared::SharedControl;

const ROLE: &str = "UZSWAP_TEST_ROLE";

/// Starts a worker in a role, and passes what it needs to know.
pub fn worker(role: &str, path: &std::path::Path, number: usize) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "shared::processes::be_a_worker", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, role).env("UZSWAP_TEST_PATH", path).env("UZSWAP_TEST_NUMBER", number.to_string());
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

/// Lines that a worker prints, without those of the test harness.
pub struct Lines(BufReader<std::process::ChildStdout>);

impl Lines {
    pub fn of(child: &mut Child) -> Self {
        Self(BufReader::new(child.stdout.take().unwrap()))
    }
    pub fn next(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            // The harness begins a line with the test's name, and leaves it open.
            if let Some(said) = line.trim_end().split_once("> ") {
                return Some(said.1.to_owned());
            }
        }
    }
}

pub fn say(text: &str) {
    println!("> {text}");
}

/// Waits for a byte on standard input, or its end.
pub fn wait_for_word() {
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
fn be_a_worker() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let path = PathBuf::from(std::env::var_os("UZSWAP_TEST_PATH").unwrap());
    let number: usize = std::env::var("UZSWAP_TEST_NUMBER").unwrap().parse().unwrap();
    match role.as_str() {
        "stress" => stress(&path, number),
        "own" => {
            let region = region(8 * MIB, 8 * MIB);
            region.serve(&path).unwrap();
            say("serving");
            wait_for_word();
        }
        "read" => {
            let m = SharedMapping::attach(&path).unwrap();
            say(&format!("{}", words(&m, number)[7].load(Relaxed)));
            wait_for_word();
            // The page is out, or its owner is gone.
            say(&format!("{}", words(&m, number)[7].load(Relaxed)));
        }
        "marked" => {
            let m = SharedMapping::attach(&path).unwrap();
            touch(&m, number);
            m.inject_marker(number as u64, 0x80 | SOFT_DIRTY).unwrap();
            m.page_out(at(number)).unwrap();
            say("marked");
            say(&format!("{}", touch(&m, number)));
        }
        "fork" => fork(&path),
        "watch" => {
            let control = SharedControl::connect(&path).unwrap();
            control.protect(0..number * PAGE, None).unwrap();
            say("protected");
            // Longer than any test takes.
            let next = || control.next_write(Duration::from_secs(3000)).unwrap();
            say(&format!("told {}", next().unwrap() / PAGE));
            // After all have been reported it waits for more.
            while next().is_some() {}
        }
        "pin" => {
            let m = SharedMapping::attach(&path).unwrap();
            let _pins = (m.pin(0..number * PAGE).unwrap(), m.pin(0..PAGE).unwrap());
            say("pinned");
            wait_for_word();
        }
        "refused" => {
            // SAFETY: a plain call: from here on this is another user.
            assert_eq!(unsafe { libc::setuid(65534) }, 0);
            say(&format!("{:?}", SharedMapping::attach(&path).map(|_| ()).unwrap_err().kind()));
        }
        other
            if [super::forks::be, super::scarce::be, super::errors::be, super::locked::be]
                .iter()
                .any(|be| be(other, &path, number)) => {}
        other => super::removes::be(other, &path, number),
    }
}

pub fn wait_within(child: &mut Child, time: Duration) -> std::process::ExitStatus {
    let end = Instant::now() + time;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > end {
            let _ = child.kill();
            panic!("a worker hangs");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// How long a test may wait for something to happen.
pub const LONGEST: Duration = Duration::from_secs(100);
const WORKERS: usize = 4;
const PART: usize = 2048;
const COUNTERS: usize = 16;

/// A word of a page in version `v`: in every other page half of them are noise.
fn word(page: usize, i: usize, v: u64) -> u64 {
    if v == 0 {
        return 0;
    }
    let noise = (page as u64 ^ (i as u64) << 20 ^ v << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    v << 32 | if page.is_multiple_of(2) { noise } else { 7 }
}

/// What workers have certainly done, in plain shared memory: the least version of each page, and what each worker added to the
/// counters.
fn progress(path: &std::path::Path) -> &'static [AtomicU64] {
    let file = std::fs::File::options().read(true).write(true).open(path.with_extension("progress")).unwrap();
    let len = (WORKERS * PART + WORKERS) * 8;
    let (prot, fd) = (libc::PROT_READ | libc::PROT_WRITE, std::os::fd::AsRawFd::as_raw_fd(&file));
    // SAFETY: a new mapping of a file that is at least as long, and is not truncated.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, libc::MAP_SHARED, fd, 0) };
    assert!(base != libc::MAP_FAILED);
    // SAFETY: the mapping stays; only used as atomics.
    unsafe { std::slice::from_raw_parts(base.cast(), len / 8) }
}

/// Checks a page that its worker may be writing to. Words are written in ascending order, so when they are read in descending
/// order versions never decrease.
fn check(m: &SharedMapping, page: usize, least: u64) -> u64 {
    let mut version = 0;
    for (i, w) in words(m, page).iter().enumerate().rev() {
        let value = w.load(Acquire);
        let v = value >> 32;
        assert!(v >= version, "page {page}, word {i}: version {v} after {version}: a write was lost");
        assert_eq!(value, word(page, i, v), "page {page}, word {i}: torn");
        version = v;
    }
    assert!(version >= least, "page {page}: version {version}, but {least} was written before");
    version
}

fn stress(path: &std::path::Path, number: usize) {
    let m = SharedMapping::attach(path).unwrap();
    let done = progress(path);
    let mut rng = crate::region::Rng::new(crate::region::seed().wrapping_add(number as u64));
    say("begun");
    loop {
        let page = number * PART + rng.below(PART);
        // The last writer may have been killed half way: then one part of the page has one version, and the rest the next.
        let least = done[page].load(Acquire);
        let v = check(&m, page, least) + 1;
        words(&m, page).iter().enumerate().for_each(|(i, w)| w.store(word(page, i, v), Release));
        done[page].store(v, Release);
        let other = rng.below(WORKERS * PART);
        let least = done[other].load(Acquire);
        check(&m, other, least);
        let counter = WORKERS * PART + rng.below(COUNTERS);
        words(&m, counter)[9].fetch_add(1, Relaxed);
        done[WORKERS * PART + number].fetch_add(1, Relaxed);
        match rng.below(2000) {
            0 => drop(m.page_out(page * PAGE..(page + 1) * PAGE).unwrap()),
            1 => m.clear_soft_dirty(0..m.len()).unwrap(),
            _ => {}
        }
    }
}

#[test]
fn processes_that_are_killed_and_stopped_at_random_lose_no_write_and_harm_nobody() {
    let _one = crate::region::alone();
    let mut rng = crate::region::Rng::new(crate::region::seed());
    let path = socket_path("stress");
    let progress_path = path.with_extension("progress");
    let len = (WORKERS * PART + WORKERS) * 8;
    std::fs::write(&progress_path, vec![0u8; len]).unwrap();
    let done = progress(&path);
    let region = region((WORKERS * PART + COUNTERS) * PAGE, 16 * MIB);
    region.serve(&path).unwrap();
    let start = |i: usize| {
        let mut child = worker("stress", &path, i).spawn().unwrap();
        let mut lines = Lines::of(&mut child);
        assert_eq!(lines.next().as_deref(), Some("begun"));
        (child, lines)
    };
    let mut workers: Vec<_> = (0..WORKERS).map(start).collect();
    let mut kills = 0;
    let end = Instant::now() + Duration::from_secs(8);
    // If others want the CPUs as well it takes longer until enough is out.
    let few = || region.control().stats().unwrap().swpout <= 1000 && end.elapsed() < LONGEST;
    while Instant::now() < end || few() {
        std::thread::sleep(Duration::from_millis(20 + rng.below(200) as u64));
        region.control().inject(NEAR, rng.below(2) as u64).unwrap();
        let i = rng.below(WORKERS);
        let pid = workers[i].0.id() as i32;
        assert_eq!(workers[i].0.try_wait().unwrap(), None, "worker {i} failed");
        if rng.below(2) == 0 {
            // While one is stopped, the others go on.
            let before: u64 = (0..WORKERS).filter(|k| *k != i).map(|k| done[WORKERS * PART + k].load(Relaxed)).sum();
            // SAFETY: signals to a child of ours.
            unsafe { libc::kill(pid, libc::SIGSTOP) };
            let limit = Instant::now() + Duration::from_secs(20);
            while (0..WORKERS).filter(|k| *k != i).map(|k| done[WORKERS * PART + k].load(Relaxed)).sum::<u64>()
                == before
            {
                assert!(Instant::now() < limit, "a stopped process holds the others up");
                std::thread::yield_now();
            }
            // SAFETY: as above.
            unsafe { libc::kill(pid, libc::SIGCONT) };
        } else {
            workers[i].0.kill().unwrap();
            workers[i].0.wait().unwrap();
            kills += 1;
            workers[i] = start(i);
        }
    }
    for (child, _) in &mut workers {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let m = SharedMapping::attach(&path).unwrap();
    for (page, least) in done.iter().enumerate().take(WORKERS * PART) {
        check(&m, page, least.load(Acquire));
    }
    let counted: u64 = (0..COUNTERS).map(|c| words(&m, WORKERS * PART + c)[9].load(Relaxed)).sum();
    let said: u64 = (0..WORKERS).map(|k| done[WORKERS * PART + k].load(Relaxed)).sum();
    let stats = region.control().stats().unwrap();
    println!("{kills} kills, {said} rounds, {stats:?}");
    // A worker can be killed between adding and noting it.
    assert!((said..=said + kills + WORKERS as u64).contains(&counted), "{counted} added, {said} said");
    assert!(stats.charged <= 16 * MIB && stats.swpout > 1000, "{stats:?}");
    let gone = Instant::now() + Duration::from_secs(10);
    while region.control().stats().unwrap().mappings > 1 {
        assert!(Instant::now() < gone, "mappings of the dead stay");
        std::thread::sleep(Duration::from_millis(5));
    }
    std::fs::remove_file(progress_path).unwrap();
}

#[test]
fn when_the_owner_is_killed_the_others_get_an_error_and_no_zeros() {
    let path = socket_path("owner");
    let mut owner = worker("own", &path, 0).spawn().unwrap();
    let mut said = Lines::of(&mut owner);
    assert_eq!(said.next().as_deref(), Some("serving"));
    let control = SharedControl::connect(&path).unwrap();
    {
        let m = SharedMapping::attach(&path).unwrap();
        write(&m, 3, 77);
        write(&m, 4, 78);
    }
    // One page is out and one in memory when the owner dies.
    control.page_out(at(3)).unwrap();
    let mut readers: Vec<_> = [3, 4]
        .into_iter()
        .map(|page| {
            let mut child = worker("read", &path, page).stderr(Stdio::piped()).spawn().unwrap();
            let mut lines = Lines::of(&mut child);
            assert_eq!(lines.next(), Some(format!("{}", 74 + page)));
            (child, lines)
        })
        .collect();
    control.page_out(at(3)).unwrap();
    owner.kill().unwrap();
    owner.wait().unwrap();
    assert!(control.stats().is_err());
    for (child, lines) in &mut readers {
        drop(child.stdin.take());
        let status = wait_within(child, Duration::from_secs(20));
        let mut error = String::new();
        child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
        let answer = lines.next();
        // Until the watcher has noticed, pages in memory can be read; zeros never come.
        assert!(answer.is_none() || answer.as_deref() == Some("78"), "{answer:?}");
        if answer.is_none() {
            assert_eq!(status.signal(), Some(libc::SIGBUS), "{error}");
            assert!(error.contains("the owner of a shared region has ended"), "{error}");
        }
    }
    let _ = std::fs::remove_file(path);
}

#[test]
fn an_unknown_marker_is_an_error_for_its_process_alone() {
    let path = socket_path("unknown");
    let region = region(4 * MIB, 8 * MIB);
    region.serve(&path).unwrap();
    let mine = region.map().unwrap();
    write(&mine, 9, 5);
    let mut child = worker("marked", &path, 9).spawn().unwrap();
    let mut lines = Lines::of(&mut child);
    assert_eq!(lines.next().as_deref(), Some("marked"));
    let status = wait_within(&mut child, Duration::from_secs(20));
    assert_eq!((status.signal(), lines.next()), (Some(libc::SIGBUS), None));
    assert_eq!(words(&mine, 9)[7].load(Relaxed), 5);
    assert_eq!(mine.page_map().get(9).0 & 0x80, 0);
}

/// The story: a client that was killed while it waited for a notification was not missed before its time was up. Until then the
/// writers waited, and nobody else could protect anything.
#[test]
fn nobody_waits_for_a_client_that_was_killed_while_it_waited() {
    for told_before in [true, false] {
        let path = socket_path("killed-client");
        let region = region(MIB, 8 * MIB);
        region.serve(&path).unwrap();
        let m = region.map().unwrap();
        (0..8).for_each(|page| write(&m, page, 1));
        let mut client = worker("watch", &path, 8).spawn().unwrap();
        let mut lines = Lines::of(&mut client);
        assert_eq!(lines.next().as_deref(), Some("protected"));
        std::thread::scope(|scope| {
            let writers = [3, 4].map(|page| {
                let m = &m;
                scope.spawn(move || write(m, page, 2))
            });
            if told_before {
                let told = lines.next().unwrap();
                assert!(["told 3", "told 4"].contains(&&*told), "{told}");
                assert!(writers.iter().any(|w| !w.is_finished()));
            }
            // A zombie until it is waited for, below.
            client.kill().unwrap();
        });
        assert!([3, 4].iter().all(|page| words(&m, *page)[7].load(Relaxed) == 2));
        let begun = Instant::now();
        while let Err(e) = region.control().protect(0..PAGE, None) {
            assert_eq!(e.kind(), std::io::ErrorKind::ResourceBusy);
            assert!(begun.elapsed() < Duration::from_secs(20), "the dead client keeps the protection");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!((1..8).all(|page| !m.page_map().get(page).write_protected()));
        client.wait().unwrap();
    }
}

#[test]
fn another_user_is_refused() {
    // SAFETY: no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return crate::alone::skip("only root can become another user");
    }
    let path = socket_path("refused");
    let region = region(4 * MIB, 8 * MIB);
    region.serve(&path).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    // Also if the socket's own permissions would let everybody in.
    for mode in [0o600, 0o666] {
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        let mut child = worker("refused", &path, 0).spawn().unwrap();
        let mut lines = Lines::of(&mut child);
        assert_eq!(lines.next().as_deref(), Some("PermissionDenied"));
        assert!(wait_within(&mut child, Duration::from_secs(20)).success());
    }
}

fn fork(path: &std::path::Path) {
    let m = SharedMapping::attach(path).unwrap();
    for page in 0..8 {
        write(&m, page, 50 + page as u64);
    }
    m.clear_soft_dirty(0..m.len()).unwrap();
    write(&m, 6, 99);
    m.page_out(0..8 * PAGE).unwrap();
    let before: Vec<PageState> = (0..10).map(|p| m.page_map().get(p)).collect();
    // SAFETY: the child uses the region, and leaves without the harness.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let same = (0..10).all(|p| m.page_map().get(p) == before[p as usize]);
        let value = words(&m, 2)[7].load(Relaxed);
        write(&m, 4, 1000);
        let own = m.page_map().get(4).soft_dirty();
        let ok = same && value == 52 && own;
        if !ok {
            let now: Vec<PageState> = (0..10).map(|p| m.page_map().get(p)).collect();
            eprintln!("child: {before:?}, then {now:?}; read {value}, own bit {own}");
        }
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(if ok { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: a child of ours.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0, "the forked child saw something else");
    assert_eq!(words(&m, 4)[7].load(Relaxed), 1000);
    assert!(!m.page_map().get(4).soft_dirty(), "written through the child's mapping only");
    say("same");
}

#[test]
fn a_forked_child_has_the_region_and_its_markers() {
    let path = socket_path("fork");
    let region = region(4 * MIB, 8 * MIB);
    region.serve(&path).unwrap();
    let mut child = worker("fork", &path, 0).spawn().unwrap();
    let mut lines = Lines::of(&mut child);
    assert_eq!(lines.next().as_deref(), Some("same"));
    assert!(wait_within(&mut child, Duration::from_secs(20)).success());
}

#[test]
fn pins_of_a_process_end_with_it() {
    let path = socket_path("pin");
    let region = region(4 * MIB, 8 * MIB);
    region.serve(&path).unwrap();
    let mut child = worker("pin", &path, 8).spawn().unwrap();
    let mut lines = Lines::of(&mut child);
    assert_eq!(lines.next().as_deref(), Some("pinned"));
    let control = region.control();
    assert_eq!((control.page_out(0..4 * MIB).unwrap(), control.stats().unwrap().resident), (0, 8 * PAGE));
    child.kill().unwrap();
    child.wait().unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while control.stats().unwrap().resident > 0 {
        assert!(Instant::now() < end, "a dead process keeps pages in memory");
        control.page_out(0..4 * MIB).unwrap();
    }
}

/// The story: an owner that ended removed the socket of the next one, which had replaced its own.
#[test]
fn an_owner_that_ends_leaves_the_next_ones_socket() {
    let path = socket_path("replaced");
    let first = region(MIB, 8 * MIB);
    first.serve(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let second = region(MIB, 8 * MIB);
    second.serve(&path).unwrap();
    drop(first);
    write(&second.map().unwrap(), 3, 5);
    assert_eq!(words(&SharedMapping::attach(&path).unwrap(), 3)[7].load(Relaxed), 5);
    drop(second);
    assert!(!path.exists());
}

#[test]
fn nonsense_at_the_socket_is_answered_and_forgotten() {
    let path = socket_path("nonsense");
    let region = region(4 * MIB, 8 * MIB);
    region.serve(&path).unwrap();
    let mut rng = crate::region::Rng::new(crate::region::seed());
    for _ in 0..200 {
        let socket = uzswap_sys::socket::connect(&path).unwrap();
        let mut message = vec![0u8; if rng.below(3) == 0 { rng.below(200) } else { 128 }];
        message.iter_mut().for_each(|b| *b = rng.next() as u8);
        if rng.below(2) == 0 && message.len() == 128 {
            // A valid beginning.
            message[..8].copy_from_slice(&0x757a_7368_0000_0002u64.to_ne_bytes());
            message[8..16].copy_from_slice(&(1 + rng.next() % 2).to_ne_bytes());
        }
        let _ = uzswap_sys::socket::send(&socket, &message, &[0, 1][..rng.below(3)]);
        message.iter_mut().for_each(|b| *b = rng.next() as u8);
        let _ = uzswap_sys::socket::send(&socket, &message, &[2][..rng.below(2)]);
    }
    let m = region.map().unwrap();
    write(&m, 1, 5);
    m.page_out(0..m.len()).unwrap();
    assert_eq!(words(&m, 1)[7].load(Relaxed), 5);
}

//! `uzswap run --record`: writes what the members' rings hold to a file while the program runs.
//!
//! One thread of the command does it. Members wake it when a quarter of a ring is full; otherwise it looks ten times a second. If
//! the file cannot be written (a full disk), the recording ends, not the program, and the file is cut back to its last whole
//! block.

use crate::config::plain;
use serde::Serialize;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::thread::JoinHandle;
use std::time::Instant;
use uzswap::group_file::GroupFile;
use uzswap_mm::trace::{self, BlockHead, Header};
use uzswap_pager::trace::Rings;
use uzswap_sys::lock;

/// The time between two looks if nobody wakes the thread, in nanoseconds.
const LOOK_NS: u64 = 100_000_000;

/// The result of a recording.
#[derive(Debug, Default, Clone, Serialize, PartialEq)]
pub struct Recorded {
    /// Records in the file.
    pub records: u64,
    /// Records lost because they came faster than they could be written.
    pub lost: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// Why the recording ended before the program, if it did.
    pub error: Option<String>,
}

/// A recording under way.
pub struct Recording {
    thread: JoinHandle<Recorded>,
    stop: Arc<AtomicBool>,
    group: Arc<GroupFile>,
}

impl Recording {
    /// Starts to write to `file`. The caller must have blocked signals, as the thread inherits that.
    pub fn start(group: &Arc<GroupFile>, node: usize, file: File) -> io::Result<Recording> {
        let page = group.page();
        let n = &page.nodes[node];
        let header = Header { limit: n.max.load(Relaxed), codec: n.codec.load(Relaxed) };
        let mut drain = Drain { file, whole: 0, start: Instant::now(), done: Recorded::default() };
        drain.write(&header.write())?;
        let stop = Arc::new(AtomicBool::new(false));
        let (theirs, stopped) = (Arc::clone(group), Arc::clone(&stop));
        let thread = std::thread::Builder::new().name("uzswap-record".to_owned()).spawn(move || {
            drain.until(&theirs, &stopped);
            drain.done
        })?;
        Ok(Recording { thread, stop, group: Arc::clone(group) })
    }

    /// Writes what is left in the rings, and ends the file.
    pub fn finish(self) -> Recorded {
        self.stop.store(true, Release);
        if let Some(rings) = self.group.rings() {
            rings.wake_reader();
        }
        self.thread.join().unwrap_or_default()
    }
}

struct Drain {
    file: File,
    /// Bytes of whole blocks written so far.
    whole: u64,
    start: Instant,
    done: Recorded,
}

impl Drain {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self.file.write_all(bytes) {
            Ok(()) => {
                self.whole += bytes.len() as u64;
                self.done.bytes = self.whole;
                Ok(())
            }
            Err(e) => {
                // A pipe cannot be cut back.
                let _ = self.file.set_len(self.whole);
                let _ = self.file.seek(io::SeekFrom::End(0));
                Err(e)
            }
        }
    }

    fn until(&mut self, group: &GroupFile, stop: &AtomicBool) {
        let Some(rings) = group.rings() else { return };
        let (mut words, mut bytes) = (Vec::new(), Vec::new());
        loop {
            let word = rings.wake.load(Acquire);
            let last = stop.load(Acquire);
            let members = group.page().used().len().max(1);
            self.sweep(rings, members, &mut words, &mut bytes);
            if let Err(e) = self.write(&bytes) {
                self.done.error = Some(plain(&e));
                return;
            }
            if last {
                return;
            }
            lock::futex_wait(&rings.wake, word, Some(LOOK_NS), true);
        }
    }

    /// Writes the contents of the rings as blocks.
    fn sweep(&mut self, rings: &Rings, members: usize, words: &mut Vec<u64>, bytes: &mut Vec<u8>) {
        bytes.clear();
        for slot in 0..members {
            words.clear();
            let lost = rings.of(slot).drain(words);
            if words.is_empty() && lost == 0 {
                continue;
            }
            let head = BlockHead { slot: slot as u32, time_ns: self.start.elapsed().as_nanos() as u64, lost };
            trace::write_block(bytes, head, words);
            self.done.records += words.len() as u64;
            self.done.lost = self.done.lost.saturating_add(lost);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Recording;
    use std::fs::File;
    use std::sync::Arc;
    use std::sync::atomic::Ordering::Relaxed;
    use uzswap::group_file::GroupFile;
    use uzswap_mm::trace::{Header, Kind, Record, Trace};
    use uzswap_pager::trace::{RING_RECORDS, Recorder};

    /// A writing end for a test; the group lives as long as the test.
    fn recorder(group: &Arc<GroupFile>, slot: usize) -> Recorder {
        Recorder::new(Box::leak(Box::new(Arc::clone(group))).rings().unwrap(), slot)
    }

    #[test]
    fn what_members_note_is_in_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace");
        let group = Arc::new(GroupFile::create("web", true).unwrap());
        group.page().nodes[0].max.store(1 << 30, Relaxed);
        group.page().nodes[0].codec.store(1, Relaxed);
        group.page().used.store(3, Relaxed);
        recorder(&group, 1).note(Record::number(Kind::Start, 77));
        let recording = Recording::start(&group, 0, File::create(&path).unwrap()).unwrap();
        let two = recorder(&group, 2);
        (0..9).for_each(|i| two.note(Record::pages(Kind::Evict, i, 1)));
        let done = recording.finish();
        assert_eq!((done.records, done.lost, done.error.as_deref()), (10, 0, None));
        let bytes = std::fs::read(path).unwrap();
        assert_eq!(bytes.len() as u64, done.bytes);
        let trace = Trace::parse(&bytes).unwrap();
        assert_eq!(trace.header, Header { limit: 1 << 30, codec: 1 });
        let all: Vec<_> =
            trace.blocks().map(Result::unwrap).flat_map(|b| b.records().map(move |r| (b.head.slot, r))).collect();
        assert_eq!(all.len(), 10);
        assert!(
            all.contains(&(1, Record::number(Kind::Start, 77))) && all.contains(&(2, Record::pages(Kind::Evict, 8, 1)))
        );
    }

    /// A full disk costs the recording, never the program. What was written before stays readable.
    #[test]
    fn a_full_disk_ends_the_recording_only() {
        let group = Arc::new(GroupFile::create("web", true).unwrap());
        let full = File::options().write(true).open("/dev/full").unwrap();
        assert!(Recording::start(&group, 0, full).is_err(), "told before the program is started");
    }

    #[test]
    fn lost_records_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace");
        let group = Arc::new(GroupFile::create("web", true).unwrap());
        let one = recorder(&group, 0);
        (0..RING_RECORDS as u64 + 5).for_each(|i| one.note(Record::pages(Kind::Evict, i, 1)));
        let done = Recording::start(&group, 0, File::create(&path).unwrap()).unwrap().finish();
        assert_eq!((done.records, done.lost), (RING_RECORDS as u64, 5));
        let bytes = std::fs::read(path).unwrap();
        let lost: u64 = Trace::parse(&bytes).unwrap().blocks().map(|b| b.unwrap().head.lost).sum();
        assert_eq!(lost, 5);
    }
}

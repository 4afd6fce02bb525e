//! Output of the command: files that options name, and standard output.

use crate::config::plain;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Prints to standard output. The error is one sentence: see [`seen`].
pub fn print(bytes: &[u8]) -> Result<(), String> {
    let mut out = io::stdout().lock();
    seen(out.write_all(bytes).and_then(|()| out.flush()))
}

/// The result of printing to standard output. A reader that has closed its end is no error. The error is one sentence.
pub fn seen(printed: io::Result<()>) -> Result<(), String> {
    match printed {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(format!("nothing can be written to standard output: {}", plain(&e)))
        }
        _ => Ok(()),
    }
}

/// How long a pipe's reader, which may have just been started, has time to open it.
const READER_MAY_TAKE: Duration = Duration::from_secs(1);

/// A file that the command writes. The command opens it before it does anything else, so it reports in time what cannot be
/// written. A file that is new is removed again, unless it is kept.
pub struct Output {
    path: PathBuf,
    file: File,
    /// Whether the file is new and not kept yet. (What existed before, such as a device, is never removed.)
    is_new: bool,
}

impl Output {
    /// Opens `path` for a file called `what` in messages. Its contents stay for now. The error is one sentence.
    pub fn open(what: &str, path: &Path) -> Result<Output, String> {
        let (file, is_new) = match File::create_new(path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => (at_once(path), false),
            file => (file, true),
        };
        let file = file.map_err(|e| match e.raw_os_error() {
            Some(libc::ENXIO) => format!(
                "the {what} cannot be written: nobody reads the pipe `{}`; start its reader first, or choose another file",
                path.display()
            ),
            _ => format!("the {what} `{}` cannot be written: {}; choose another file", path.display(), plain(&e)),
        })?;
        Ok(Output { path: path.to_path_buf(), file, is_new })
    }

    /// The path as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file, after emptying it.
    pub fn emptied(&self) -> io::Result<&File> {
        if self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
        }
        Ok(&self.file)
    }

    /// Keeps the file from being removed.
    pub fn keep(&mut self) {
        self.is_new = false;
    }

    /// Whether both are the same file or pipe, so their contents would mix. (A device such as `/dev/null` may be both.)
    pub fn is_same(&self, other: &Output) -> bool {
        let (Ok(one), Ok(other)) = (self.file.metadata(), other.file.metadata()) else { return false };
        (one.dev(), one.ino()) == (other.dev(), other.ino()) && !one.file_type().is_char_device()
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if self.is_new {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Opens an existing file. Does not wait forever for a pipe's reader.
fn at_once(path: &Path) -> io::Result<File> {
    let begun = Instant::now();
    let file = loop {
        // `create`, as it may be a link to a file that does not exist.
        let open = File::options().write(true).create(true).truncate(false).custom_flags(libc::O_NONBLOCK).open(path);
        match open {
            Err(e) if e.raw_os_error() == Some(libc::ENXIO) && begun.elapsed() < READER_MAY_TAKE => {
                std::thread::sleep(Duration::from_millis(10));
            }
            open => break open?,
        }
    };
    // Writes are to wait for a slow reader.
    // SAFETY: no memory is involved.
    let cleared = unsafe {
        let flags = libc::fcntl(file.as_raw_fd(), libc::F_GETFL);
        libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_NONBLOCK)
    };
    if cleared < 0 { Err(io::Error::last_os_error()) } else { Ok(file) }
}

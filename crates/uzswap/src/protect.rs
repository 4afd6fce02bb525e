//! `uzswap protect`: write-protect notification as lines of text, for clients in any language.
//!
//! ```text
//! stdout: protected PAGES      once what was asked for is done      stdin: protect RANGE
//!         write ADDRESS        somebody waits to write there                release RANGE      (or one ADDRESS, or all)
//!         released PAGES                                                    end, or its end: everything is released
//!         ended                the process has ended
//! ```
//! However this command ends, everything is released.

mod lines;

use crate::Failed;
use crate::cli::ProtectArgs;
use lines::{Wanted, bytes, parse};
use std::io::{BufRead, Write};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use uzswap::WriteWatch;

/// The longest time until it is seen that the client has finished.
const LOOK: Duration = Duration::from_millis(20);

/// Does what the client's lines say until it has finished. The error is one sentence.
pub fn protect(args: &ProtectArgs) -> Result<(), Failed> {
    let at_first = match args.range.as_str() {
        "none" => None,
        range => Some(bytes(range).map_err(Failed::Wrongly)?),
    };
    let watch = Arc::new(WriteWatch::of(args.pid).map_err(|e| e.to_string())?);
    if let Some(range) = at_first {
        obey(&watch, Wanted::Protect(range))?;
    }
    // A thread of its own obeys the lines, so that neither the notifications nor the requests wait for the other.
    let (say_end, end) = mpsc::channel();
    let obeyed = watch.clone();
    std::thread::spawn(move || {
        let result = obey_all(&obeyed);
        drop(obeyed);
        let _ = say_end.send(result);
    });
    loop {
        if let Ok(result) = end.try_recv() {
            return Ok(result?);
        }
        match watch.next_write(LOOK) {
            Ok(Some(address)) => say(&format!("write {address:x}"))?,
            Ok(None) => {}
            Err(e) => {
                say("ended")?;
                say!("uzswap: {e}");
                return Ok(());
            }
        }
    }
}

/// Obeys the lines of standard input until they end.
fn obey_all(watch: &WriteWatch) -> Result<(), String> {
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match parse(&line)? {
            Wanted::End => break,
            wanted => obey(watch, wanted)?,
        }
    }
    Ok(())
}

fn obey(watch: &WriteWatch, wanted: Wanted) -> Result<(), String> {
    match wanted {
        Wanted::Protect(range) => {
            let protected = watch.protect(range).map_err(|e| e.to_string())?;
            if protected.stayed > 0 {
                say!("uzswap: {} pages can be written to all the same", protected.stayed);
            }
            say(&format!("protected {}", protected.pages))
        }
        Wanted::Release(range) => {
            let released = watch.release(range).map_err(|e| e.to_string())?;
            say(&format!("released {released}"))
        }
        Wanted::End => Ok(()),
    }
}

fn say(line: &str) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(|_| "nobody listens any more".to_owned())
}

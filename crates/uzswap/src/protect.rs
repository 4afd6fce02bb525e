//! `uzswap protect`: write-protect notification by lines, for clients in any language.
//!
//! ```text
//! stdout: protected PAGES      once what was asked for is done      stdin: protect RANGE
//!         write ADDRESS        somebody waits to write there                release RANGE      (or one ADDRESS, or all)
//!         released PAGES                                                    end, or its end: everything is released
//!         ended                the process has ended
//! ```
//! However this command ends, everything is released.

use crate::cli::ProtectArgs;
use crate::pagemap::process::parse_range;
use std::io::{BufRead, Write};
use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use uzswap::WriteWatch;

/// How long it takes at most to see that the client wants no more.
const LOOK: Duration = Duration::from_millis(20);
const PAGE: usize = 4096;

/// What a client can want.
#[derive(Debug, PartialEq)]
enum Wanted {
    Protect(Range<usize>),
    Release(Range<usize>),
    End,
}

/// Does what the client's lines say until it wants no more. The error is one sentence.
pub fn protect(args: &ProtectArgs) -> Result<(), String> {
    let at_first = match args.range.as_str() {
        "none" => None,
        range => Some(bytes(range)?),
    };
    let watch = Arc::new(WriteWatch::of(args.pid).map_err(|e| e.to_string())?);
    if let Some(range) = at_first {
        obey(&watch, Wanted::Protect(range))?;
    }
    // (A thread obeys, so that neither what is told nor what is wanted waits for the other.)
    let (say_end, end) = mpsc::channel();
    let obeyed = watch.clone();
    std::thread::spawn(move || {
        let result = obey_all(&obeyed);
        drop(obeyed);
        let _ = say_end.send(result);
    });
    loop {
        if let Ok(result) = end.try_recv() {
            return result;
        }
        match watch.next_write(LOOK) {
            Ok(Some(address)) => say(&format!("write {address:x}"))?,
            Ok(None) => {}
            Err(e) => {
                say("ended")?;
                eprintln!("uzswap: {e}");
                return Ok(());
            }
        }
    }
}

/// Does what the lines of standard input say, until they end.
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
                eprintln!("uzswap: {} pages can be written to all the same", protected.stayed);
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

fn parse(line: &str) -> Result<Wanted, String> {
    match line.trim().split_once(' ') {
        None if line.trim() == "end" => Ok(Wanted::End),
        Some(("protect", range)) => bytes(range.trim()).map(Wanted::Protect),
        Some(("release", range)) => bytes(range.trim()).map(Wanted::Release),
        _ => Err(format!("`{line}` is not understood: write protect RANGE, release RANGE or end")),
    }
}

/// `all`, START-END, or one address, which is a page.
fn bytes(text: &str) -> Result<Range<usize>, String> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    if let Ok(address) = usize::from_str_radix(digits, 16)
        && digits.bytes().all(|b| b.is_ascii_hexdigit())
        && address < 1 << 47
    {
        return Ok(address..address + 1);
    }
    let pages = parse_range(text)?;
    Ok(pages.start as usize * PAGE..pages.end as usize * PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_understood() {
        assert_eq!(parse("release 7f0000001000"), Ok(Wanted::Release(0x7f00_0000_1000..0x7f00_0000_1001)));
        assert_eq!(parse(" protect 0x1000-0x3000 "), Ok(Wanted::Protect(0x1000..0x3000)));
        assert_eq!(parse("release all"), Ok(Wanted::Release(0..1 << 47)));
        assert_eq!(parse("end"), Ok(Wanted::End));
        for wrong in ["", "release", "write 1000", "release +1", "release fffffffffffffff", "protect 2000-1000", "ends"]
        {
            let sentence = parse(wrong).unwrap_err();
            assert!(!sentence.is_empty() && !sentence.contains('\n'), "{wrong}: {sentence}");
        }
    }
}

//! Parses a client's lines.

use crate::pagemap::process::parse_range;
use std::ops::Range;

const PAGE: usize = 4096;

/// A request of a client.
#[derive(Debug, PartialEq)]
pub enum Wanted {
    /// Report writes to these bytes.
    Protect(Range<usize>),
    /// Release these bytes.
    Release(Range<usize>),
    /// Release everything, and end.
    End,
}

/// Parses a line. The error is one sentence.
pub fn parse(line: &str) -> Result<Wanted, String> {
    match line.trim().split_once(' ') {
        None if line.trim() == "end" => Ok(Wanted::End),
        Some(("protect", range)) => bytes(range.trim()).map(Wanted::Protect),
        Some(("release", range)) => bytes(range.trim()).map(Wanted::Release),
        _ => Err(format!("`{line}` is not understood: write protect RANGE, release RANGE or end")),
    }
}

/// Parses `all`, START-END, or one address, which stands for its page.
pub fn bytes(text: &str) -> Result<Range<usize>, String> {
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

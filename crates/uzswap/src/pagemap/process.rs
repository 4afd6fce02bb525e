//! Ranges of pages of a process under `uzswap run`.

use std::ops::Range;

/// Parses a range: `all`, or `START-END` in hexadecimal, widened to whole pages.
pub fn parse_range(text: &str) -> Result<Range<u64>, String> {
    const ALL: u64 = 1 << 47;
    if text == "all" {
        return Ok(0..ALL / super::PAGE);
    }
    let address = |side: &str| {
        let digits = side.strip_prefix("0x").unwrap_or(side);
        let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_hexdigit());
        u64::from_str_radix(digits, 16).ok().filter(|at| plain && *at <= ALL)
    };
    text.split_once('-')
        .and_then(|(from, to)| Some(address(from)?..address(to)?))
        .filter(|bytes| bytes.start < bytes.end)
        .map(|bytes| bytes.start / super::PAGE..bytes.end.div_ceil(super::PAGE))
        .ok_or_else(|| {
            format!("`{text}` is not a range of a process: write START-END in hexadecimal, as --runs and /proc/PID/maps show it, or all")
        })
}

#[cfg(test)]
mod tests {
    use super::parse_range;

    #[test]
    fn ranges_of_a_process_are_read() {
        assert_eq!(parse_range("7f0000001000-7f0000003000"), Ok(0x7_f000_0001..0x7_f000_0003));
        assert_eq!(parse_range("0x7f0000001fff-0x7f0000002001"), Ok(0x7_f000_0001..0x7_f000_0003));
        assert_eq!(parse_range("all"), Ok(0..1 << 35));
        for wrong in ["", "-", "1000", "2000-1000", "1000-1000", "0..64M", "+1-2000", "1000-ffffffffffffffff", "x-y"] {
            assert!(parse_range(wrong).is_err(), "{wrong}");
        }
    }
}

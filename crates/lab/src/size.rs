//! Reads and writes the sizes of experiments.

use uzswap_mm::size::Size;

/// Bytes of one page.
pub const PAGE: usize = 4096;
/// Bytes of one MiB.
pub const MIB: u64 = 1 << 20;

/// Parses an absolute size, such as `512M`, `1.5GiB` or `65536`, like [`Size::parse`].
///
/// # Errors
/// When the text is no size, or is a share or zero.
pub fn parse(text: &str) -> Result<u64, String> {
    match Size::parse(text)? {
        Size::Bytes(0) => Err(format!("`{text}` is nothing to work on: write more than zero, as 512M or 1.5GiB")),
        Size::Bytes(bytes) => Ok(bytes),
        Size::Percent(_) => Err(format!("`{text}` is a share: write an amount, as 512M or 1.5GiB")),
    }
}

/// Writes a size in whole or in tenths of MiB.
#[must_use]
pub fn mib(bytes: u64) -> String {
    let value = bytes as f64 / MIB as f64;
    if (value - value.round()).abs() < 0.05 { format!("{value:.0} MiB") } else { format!("{value:.1} MiB") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_parse_and_shares_and_nonsense_do_not() {
        assert_eq!(parse("65536"), Ok(65536));
        assert_eq!(parse("512M"), Ok(512 << 20));
        assert_eq!(parse("1.5GiB"), Ok(3 << 29));
        assert_eq!(parse("4k"), Ok(4096));
        assert_eq!((parse("4kB"), parse("2TB"), parse("1TiB")), (Ok(4000), Ok(2_000_000_000_000), Ok(1 << 40)));
        for bad in ["", "M", "0", "0.5", "50%", "12X", "-5M", "1e3q", "nan", "1..2M"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert_eq!(mib(256 << 20), "256 MiB");
    }
}

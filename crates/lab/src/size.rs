//! Sizes as a person writes them.

/// Bytes of one page.
pub const PAGE: usize = 4096;
/// Bytes of one MiB.
pub const MIB: u64 = 1 << 20;

/// Parses `512M`, `1.5GiB`, `65536`: `K M G T` and `KiB MiB GiB TiB` are powers of 1024, `kB MB GB TB` of 1000, as with all
/// commands of uzswap.
///
/// # Errors
/// When the text is no number, has an unknown unit, or is not above zero.
pub fn parse(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number.parse().map_err(|_| format!("`{text}` is not a size; write one as 512M or 1.5GiB"))?;
    let (base, power) = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => (1024, 0),
        "k" | "kib" => (1024, 1),
        "m" | "mib" => (1024, 2),
        "g" | "gib" => (1024, 3),
        "t" | "tib" => (1024, 4),
        "kb" => (1000, 1),
        "mb" => (1000, 2),
        "gb" => (1000, 3),
        "tb" => (1000, 4),
        _ => return Err(format!("`{unit}` is not a unit of size; use K, M, G or T")),
    };
    let bytes = number * f64::from(base).powi(power);
    if (1.0..9e18).contains(&bytes) { Ok(bytes as u64) } else { Err(format!("`{text}` is not a usable size")) }
}

/// Writes a size in whole or tenths of MiB.
#[must_use]
pub fn mib(bytes: u64) -> String {
    let value = bytes as f64 / MIB as f64;
    if (value - value.round()).abs() < 0.05 { format!("{value:.0} MiB") } else { format!("{value:.1} MiB") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_and_nonsense_does_not() {
        assert_eq!(parse("65536"), Ok(65536));
        assert_eq!(parse("512M"), Ok(512 << 20));
        assert_eq!(parse("1.5GiB"), Ok(3 << 29));
        assert_eq!(parse("4k"), Ok(4096));
        assert_eq!((parse("4kB"), parse("2TB"), parse("1TiB")), (Ok(4000), Ok(2_000_000_000_000), Ok(1 << 40)));
        for bad in ["", "M", "0", "12X", "-5M", "1e3q", "nan", "1..2M"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert_eq!(mib(256 << 20), "256 MiB");
    }
}

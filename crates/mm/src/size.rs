//! Sizes as people write them: `512M`, `1.5GiB`, `50%`.

/// A size as the user gave it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Size {
    /// A number of bytes.
    Bytes(u64),
    /// A percentage of the total, above 0 and at most 100.
    Percent(f64),
}

impl Size {
    /// Parses a size. `K M G T` and `KiB MiB GiB TiB` are powers of 1024, `kB MB GB TB` powers of 1000. Case does not
    /// matter, and a bare number is bytes.
    ///
    /// # Errors
    /// A sentence without a full stop that quotes the text and says what is wrong with it: no number, an unknown unit,
    /// a percentage not above 0 and at most 100, or 2^62 bytes or more.
    pub fn parse(text: &str) -> Result<Size, String> {
        let text = text.trim();
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        // (Only digits and points: no `nan`, no `1e3`. Too many digits make it infinite, which is too large.)
        let Ok(value) = number.parse::<f64>() else {
            return Err(format!("`{text}` is not a size: write it as 512M, 1.5GiB or 50%"));
        };
        let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "%" if value > 0.0 && value <= 100.0 => return Ok(Size::Percent(value)),
            "%" => {
                return Err(format!("`{text}` is out of range: a share is above 0% and at most 100%"));
            }
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            other => {
                return Err(format!("`{text}` is not a size: no unit is called `{other}`, write 512M, 1.5GiB or 50%"));
            }
        };
        let bytes = value * factor as f64;
        if bytes >= (1u64 << 62) as f64 {
            return Err(format!("`{text}` is out of range: no machine has that much memory"));
        }
        Ok(Size::Bytes(bytes as u64))
    }

    /// The size in bytes, for a total of `total` bytes, rounded down to whole pages of 4 KiB.
    #[must_use]
    pub fn resolve(self, total: u64) -> u64 {
        let bytes = match self {
            Size::Bytes(bytes) => bytes,
            Size::Percent(percent) => (total as f64 * percent / 100.0) as u64,
        };
        bytes & !4095
    }
}

/// A number of bytes in readable form: `498.2 MiB`.
#[must_use]
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let shown = if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.1}") };
    format!("{shown} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::{Size, human};
    use proptest::prelude::*;

    #[test]
    fn table() {
        let bytes = |n| Ok(Size::Bytes(n));
        for (text, want) in [
            ("0", bytes(0)),
            ("4096", bytes(4096)),
            ("17b", bytes(17)),
            ("512M", bytes(512 << 20)),
            ("512m", bytes(512 << 20)),
            ("512 MiB", bytes(512 << 20)),
            ("1.5GiB", bytes(3 << 29)),
            (".5G", bytes(1 << 29)),
            ("1.G", bytes(1 << 30)),
            ("2T", bytes(2 << 40)),
            ("2TiB", bytes(2 << 40)),
            ("4194303T", bytes(4_194_303 << 40)),
            ("1TB", bytes(1_000_000_000_000)),
            ("3kib", bytes(3 << 10)),
            ("64K", bytes(64 << 10)),
            ("1kB", bytes(1000)),
            ("2MB", bytes(2_000_000)),
            ("1GB", bytes(1_000_000_000)),
            (" 1G ", bytes(1 << 30)),
            ("50%", Ok(Size::Percent(50.0))),
            ("12.5 %", Ok(Size::Percent(12.5))),
            ("100%", Ok(Size::Percent(100.0))),
        ] {
            assert_eq!(Size::parse(text), want, "{text}");
        }
        for bad in [
            "",
            " ",
            "M",
            ".",
            ".M",
            "1.2.3M",
            "-1M",
            "+1M",
            "1e3",
            "nan",
            "inf",
            "0%",
            "101%",
            "1X",
            "1Gi B",
            "1M 2",
            "٣M",
            "99999999T",
            "4194304T",
        ] {
            let error = Size::parse(bad).unwrap_err();
            assert!(!error.contains('\n') && error.starts_with('`'), "{bad}: {error}");
        }
    }

    #[test]
    fn resolves_to_whole_pages() {
        assert_eq!(Size::Bytes(10_000).resolve(0), 8192);
        assert_eq!(Size::Percent(50.0).resolve(1 << 30), 1 << 29);
        assert_eq!(Size::Percent(100.0).resolve(u64::from(u32::MAX)), u64::from(u32::MAX) & !4095);
    }

    #[test]
    fn said_for_people() {
        assert_eq!(human(512), "512 bytes");
        assert_eq!(human(512 << 20), "512 MiB");
        assert_eq!(human(3 << 29), "1.5 GiB");
        assert_eq!((human(1023), human(1024), human(1 << 40)), ("1023 bytes".into(), "1 KiB".into(), "1 TiB".into()));
        assert_eq!(human(5 << 50), "5120 TiB");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn never_panics(text in ".{0,24}") {
            let _ = Size::parse(&text).map(|size| size.resolve(u64::MAX));
        }

        #[test]
        fn numbers_with_units_never_panic(text in "[0-9.]{0,30}[ ]?[kmgtKMGT]?(iB|B|%)?") {
            let _ = Size::parse(&text).map(|size| size.resolve(1 << 34));
        }

        #[test]
        fn whole_mebibytes_are_exact(n in 0u64..(1 << 30)) {
            prop_assert_eq!(Size::parse(&format!("{n}M")), Ok(Size::Bytes(n << 20)));
        }
    }
}

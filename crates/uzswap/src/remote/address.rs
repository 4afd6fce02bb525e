//! The address of a swap server: `redis://[USER:PASSWORD@]HOST[:PORT][/DB]?size=4G[&timeout=10][&ttl=3600]`.

use crate::size::Size;
use std::time::Duration;

/// Seconds an operation is tried for, and seconds after which blocks expire when the command has died.
const TIMEOUT: u64 = 10;
const TTL: u64 = 3600;

/// Where the server is, and what it is to do.
#[derive(Debug, Clone, PartialEq)]
pub struct Address {
    /// What the client connects to.
    pub url: String,
    /// Bytes it is to take at most.
    pub size: u64,
    /// How long a read or a write is tried before it fails.
    pub timeout: Duration,
    /// After what time blocks expire that are not refreshed (seconds).
    pub ttl: u64,
}

/// Whether the text of `--swap` means a server.
pub fn is_address(text: &str) -> bool {
    text.contains("://")
}

impl Address {
    /// Parses an address. The error is one sentence, and has no password in it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (url, options) = text.split_once('?').unwrap_or((text, ""));
        match url.split_once("://").map(|(scheme, _)| scheme) {
            Some("redis" | "valkey") => {}
            Some("rediss" | "valkeys") => {
                return Err("TLS to a swap server is not supported: write redis://, blocks are encrypted before they leave (but a password is not; use a tunnel where the network is not trusted)".to_owned());
            }
            _ => return Err("the address of a swap server is redis://HOST:PORT/DB?size=4G".to_owned()),
        }
        let mut found = Self { url: url.to_owned(), size: 0, timeout: Duration::from_secs(TIMEOUT), ttl: TTL };
        for option in options.split('&').filter(|o| !o.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            let seconds = |least: u64| {
                let number = value.parse().ok().filter(|n| (least..=1_000_000).contains(n));
                number.ok_or(format!("`{option}` in the address of the swap server: give seconds, at least {least}"))
            };
            match name {
                "size" => match Size::parse(value)? {
                    Size::Bytes(bytes) => found.size = bytes,
                    Size::Percent(_) => return Err(format!("`{option}`: give bytes, such as size=4G")),
                },
                "timeout" => found.timeout = Duration::from_secs(seconds(1)?),
                "ttl" => found.ttl = seconds(60)?,
                _ => {
                    return Err(format!(
                        "the address of a swap server has no option `{name}`: it has size, timeout and ttl"
                    ));
                }
            }
        }
        if found.size == 0 {
            return Err("say how much the swap server is to take: add ?size=4G to its address".to_owned());
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let of = |text: &str| Address::parse(text);
        let all = of("redis://user:secret@host:7000/3?size=4G&timeout=2&ttl=60").unwrap();
        assert_eq!((all.url.as_str(), all.size, all.ttl), ("redis://user:secret@host:7000/3", 4 << 30, 60));
        assert_eq!(all.timeout, Duration::from_secs(2));
        let least = of("valkey://host?size=1M").unwrap();
        assert_eq!((least.size, least.timeout, least.ttl), (1 << 20, Duration::from_secs(10), 3600));
        for (text, want) in [
            ("redis://:secret@host", "?size=4G"),
            ("redis://host?size=50%", "give bytes"),
            ("redis://host?size=x", "not a size"),
            ("redis://host?size=1G&timeout=0", "give seconds"),
            ("redis://host?size=1G&ttl=5", "at least 60"),
            ("redis://host?size=1G&db=3", "no option `db`"),
            ("rediss://host?size=1G", "TLS"),
            ("http://host?size=1G", "redis://HOST"),
        ] {
            let error = of(text).unwrap_err();
            assert!(error.contains(want) && !error.contains("secret"), "{error}");
        }
        assert!(is_address("redis://x") && !is_address("4G"));
    }
}

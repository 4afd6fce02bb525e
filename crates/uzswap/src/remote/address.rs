//! The address of a swap server or cluster:
//! `redis://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]…][/DB]?size=4G[&timeout=10][&ttl=3600]`; `rediss://` for TLS, with
//! `[&ca=FILE][&cert=FILE&key=FILE]`.

use std::path::PathBuf;
use std::time::Duration;
use uzswap_mm::size::Size;

/// Defaults, in seconds: how long an operation is tried, and when blocks expire after the command has died.
const TIMEOUT: u64 = 10;
const TTL: u64 = 3600;

/// A parsed address.
#[derive(Debug, Clone, PartialEq)]
pub struct Address {
    /// The URLs that the client connects to: one for each host named.
    pub urls: Vec<String>,
    /// The most bytes that the server may be given.
    pub size: u64,
    /// How long a read or a write is tried before it fails.
    pub timeout: Duration,
    /// When blocks that are not refreshed expire, in seconds.
    pub ttl: u64,
    /// The certificates for TLS; None without TLS.
    pub tls: Option<Tls>,
}

/// Certificate and key files (PEM) for TLS.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tls {
    /// Who signed the server's certificate; by default, those that the system trusts.
    pub ca: Option<PathBuf>,
    /// The certificate that we show the server.
    pub cert: Option<PathBuf>,
    /// Its key.
    pub key: Option<PathBuf>,
}

/// Whether the value of `--swap` is the address of a server.
pub fn is_address(text: &str) -> bool {
    text.contains("://")
}

impl Address {
    /// Parses an address. The error is one sentence, and never contains a password.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (url, options) = text.split_once('?').unwrap_or((text, ""));
        let tls = match url.split_once("://").map(|(scheme, _)| scheme) {
            Some("redis" | "valkey") => None,
            Some("rediss" | "valkeys") => Some(Tls::default()),
            other => {
                return Err(format!(
                    "`{}` is not a swap server: its address is redis://HOST:PORT/DB?size=4G, or by TLS rediss://…",
                    other.unwrap_or_default()
                ));
            }
        };
        if url.contains('#') {
            return Err("the address of a swap server has no part behind `#` (in a password write %23)".to_owned());
        }
        let mut found = Self { urls: urls(url)?, size: 0, timeout: Duration::from_secs(TIMEOUT), ttl: TTL, tls };
        let options: Vec<&str> = options.split('&').filter(|o| !o.is_empty()).collect();
        let name = |option: &'_ str| option.split('=').next().unwrap_or_default().to_owned();
        for (i, option) in options.iter().enumerate() {
            if options[..i].iter().any(|earlier| name(earlier) == name(option)) {
                return Err(format!("`{}` is in the address of the swap server twice: give it once", name(option)));
            }
            found.set(option)?;
        }
        if found.size == 0 {
            return Err("say how much the swap server is to take: add ?size=4G to its address".to_owned());
        }
        if found.tls.as_ref().is_some_and(|tls| tls.cert.is_some() != tls.key.is_some()) {
            return Err(
                "a certificate for the swap server needs its key, and a key its certificate: give cert= and key="
                    .to_owned(),
            );
        }
        Ok(found)
    }

    fn set(&mut self, option: &str) -> Result<(), String> {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        let seconds = |least: u64| {
            let number = value.parse().ok().filter(|n| (least..=1_000_000).contains(n));
            number.ok_or(format!("`{option}` in the address of the swap server: give seconds, at least {least}"))
        };
        match name {
            "size" => match Size::parse(value)? {
                Size::Bytes(bytes) => self.size = bytes,
                Size::Percent(_) => return Err(format!("`{option}`: give bytes, such as size=4G")),
            },
            "timeout" => self.timeout = Duration::from_secs(seconds(1)?),
            "ttl" => self.ttl = seconds(60)?,
            "ca" | "cert" | "key" => {
                let Some(tls) = &mut self.tls else {
                    return Err(format!(
                        "`{name}` is for TLS: the address of the swap server then begins with rediss://"
                    ));
                };
                let file = match name {
                    "ca" => &mut tls.ca,
                    "cert" => &mut tls.cert,
                    _ => &mut tls.key,
                };
                *file = Some(PathBuf::from(value));
            }
            _ => {
                return Err(format!(
                    "the address of a swap server has no option `{name}`: the options are size, timeout and ttl, and with TLS ca, cert and key"
                ));
            }
        }
        Ok(())
    }
}

/// Splits a URL into one for each host: `redis://u:p@a,b:7000/3` becomes `redis://u:p@a/3` and `redis://u:p@b:7000/3`.
fn urls(url: &str) -> Result<Vec<String>, String> {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let (user, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
    if hosts.split(',').any(str::is_empty) {
        return Err("the address of a swap server has a host: redis://HOST:PORT/DB?size=4G".to_owned());
    }
    Ok(hosts.split(',').map(|host| format!("{scheme}://{user}{host}{path}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let of = |text: &str| Address::parse(text);
        let all = of("redis://user:secret@host:7000/3?size=4G&timeout=2&ttl=60").unwrap();
        assert_eq!((all.urls, all.size, all.ttl), (vec!["redis://user:secret@host:7000/3".to_owned()], 4 << 30, 60));
        assert_eq!((all.timeout, all.tls), (Duration::from_secs(2), None));
        let least = of("valkey://host?size=1M").unwrap();
        assert_eq!((least.size, least.timeout, least.ttl), (1 << 20, Duration::from_secs(10), 3600));
        for (text, want) in [
            ("redis://:secret@host", "?size=4G"),
            ("redis://host?size=50%", "give bytes"),
            ("redis://host?size=x", "not a size"),
            ("redis://host?size=1G&timeout=0", "give seconds"),
            ("redis://host?size=1G&ttl=5", "at least 60"),
            ("redis://host?size=1G&db=3", "no option `db`"),
            ("redis://host?size=0", "?size=4G"),
            ("redis://host?size=", "not a size"),
            ("redis://host?size=-1G", "not a size"),
            ("redis://host?size=99999999T", "out of range"),
            ("redis://host?size=1G&timeout=99999999999999999999", "give seconds"),
            ("redis://host?size=1G&timeout=", "give seconds"),
            ("redis://:secret@host?size=1G&size=2G", "`size` is in the address of the swap server twice"),
            ("rediss://host?size=1G&ca=a&ca=a", "`ca` is in the address of the swap server twice"),
            ("redis://host?size=1G&ca=x", "rediss://"),
            ("rediss://host?size=1G&cert=x", "its key"),
            ("rediss://:secret@host#insecure?size=1G", "behind `#`"),
            ("redis://:secret@a,,b?size=1G", "has a host"),
            ("redis:///3?size=1G", "has a host"),
            ("http://host?size=1G", "redis://HOST"),
        ] {
            let error = of(text).unwrap_err();
            assert!(error.contains(want) && !error.contains("secret"), "{error}");
        }
        assert!(is_address("redis://x") && !is_address("4G"));
    }

    #[test]
    fn several_hosts_and_tls() {
        let several = Address::parse("redis://u:p@ss@a,b:7000,[::1]:7001/0?size=1G").unwrap();
        assert_eq!(several.urls, ["redis://u:p@ss@a/0", "redis://u:p@ss@b:7000/0", "redis://u:p@ss@[::1]:7001/0"]);
        assert_eq!(Address::parse("rediss://a?size=1G").unwrap().tls, Some(Tls::default()));
        let tls = Address::parse("valkeys://a?size=1G&ca=/x/ca.pem&cert=c&key=k").unwrap().tls.unwrap();
        let path = |text: &str| Some(PathBuf::from(text));
        assert_eq!(tls, Tls { ca: path("/x/ca.pem"), cert: path("c"), key: path("k") });
    }
}

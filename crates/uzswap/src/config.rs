//! The options of `uzswap run`: the command line, over those of a configuration file.

use crate::cli::RunArgs;
use crate::folios::FolioOptions;
use serde::Deserialize;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use uzswap_mm::size::human;
use uzswap_pager::group::{CODEC_DEFLATE, CODEC_LZ4, CODEC_ZSTD, ON_FULL_EXCEED, ON_FULL_KILL, ON_FULL_WAIT};

/// The largest configuration file, in bytes.
const MOST_BYTES: u64 = 1 << 20;

/// The contents of a configuration file. Names are those of the options.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// As `--memory`.
    pub memory: Option<String>,
    /// As `--group`.
    pub group: Option<String>,
    /// As `--on-full`.
    pub on_full: Option<String>,
    /// As `--compressor`.
    pub compressor: Option<String>,
    /// The table with `--large-folios`, `--unit`, `--compaction`, `--verify-compression`.
    #[serde(default)]
    pub folios: FolioOptions,
    /// As `--swap`.
    pub swap: Option<String>,
    /// As `--swap-dir`.
    pub swap_dir: Option<PathBuf>,
    /// As `--swap-policy`.
    pub swap_policy: Option<String>,
    /// As `--encrypt-swap`.
    pub encrypt_swap: Option<bool>,
    /// As `--swap-in-ram`.
    pub swap_in_ram: Option<bool>,
    /// As `--track-writes`.
    pub track_writes: Option<bool>,
    /// As `--quiet`.
    pub quiet: Option<bool>,
    /// As `--report`.
    pub report: Option<PathBuf>,
    /// As `--record`.
    pub record: Option<PathBuf>,
}

impl Config {
    /// Reads a file. The error is one sentence.
    ///
    /// The story: `/dev/zero`, or a disk, was read until the machine had no memory left.
    pub fn read(path: &Path) -> Result<Config, String> {
        let mut text = String::new();
        let read = File::open(path).and_then(|file| file.take(MOST_BYTES + 1).read_to_string(&mut text));
        if text.len() as u64 > MOST_BYTES {
            return Err(format!(
                "the configuration file `{}` is wrong: it is larger than {}",
                path.display(),
                human(MOST_BYTES)
            ));
        }
        read.map_err(|e| match e.kind() {
            std::io::ErrorKind::InvalidData => {
                format!("the configuration file `{}` is wrong: it is not a text file (UTF-8)", path.display())
            }
            _ => format!("the configuration file `{}` cannot be read: {}", path.display(), plain(&e)),
        })?;
        Config::parse(&text).map_err(|e| format!("the configuration file `{}` is wrong: {e}", path.display()))
    }

    /// Parses the text of a file. The error is a clause that names the line.
    pub fn parse(text: &str) -> Result<Config, String> {
        toml::from_str(text).map_err(|e| {
            let at = e.span().map_or(0, |span| span.start.min(text.len()));
            let line = 1 + text.as_bytes()[..at].iter().filter(|&&b| b == b'\n').count();
            let message = e.message().replace('\n', ", ").replace("struct FolioOptions", "a table, [folios]");
            format!("line {line}: {message}{}", hint(&message))
        })
    }

    /// The options of the file named on the command line, if any, overridden by those of the command line itself.
    pub fn of(args: &RunArgs) -> Result<Config, String> {
        let file = args.config.as_deref().map_or(Ok(Config::default()), Config::read)?;
        Ok(Config {
            memory: args.memory.clone().or(file.memory),
            group: args.group.clone().or(file.group),
            on_full: args.on_full.clone().or(file.on_full),
            swap: args.swap.clone().or(file.swap),
            swap_dir: args.swap_dir.clone().or(file.swap_dir),
            swap_policy: args.swap_policy.clone().or(file.swap_policy),
            encrypt_swap: args.encrypt_swap.or(file.encrypt_swap),
            swap_in_ram: args.swap_in_ram.or(file.swap_in_ram),
            compressor: args.compressor.clone().or(file.compressor),
            folios: args.folios.over(&file.folios),
            track_writes: args.track_writes.or(file.track_writes),
            quiet: args.quiet.or(file.quiet),
            report: args.report.clone().or(file.report),
            record: args.record.clone().or(file.record),
        })
    }
}

/// Advice on mistakes that are easily made in a file.
fn hint(message: &str) -> String {
    let field = message.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next());
    match field {
        Some(field @ ("large-folios" | "unit" | "compaction" | "verify-compression")) => {
            format!(" (`{field}` belongs in the table `[folios]`)")
        }
        None if message.starts_with("invalid type: integer") && message.ends_with("expected a string") => {
            "; write sizes in quotes, as memory = \"64M\"".to_owned()
        }
        None if message.starts_with("invalid type: sequence") && message.ends_with("expected a string") => {
            "; write several in one pair of quotes, as large-folios = \"16K,64K\"".to_owned()
        }
        _ => String::new(),
    }
}

/// A codec of the pool, and its level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Compressor {
    /// As in `GroupPage::codec`.
    pub codec: u32,
    /// As in `GroupPage::level`; 0 is the default.
    pub level: u32,
}

impl Compressor {
    /// Parses `lz4`, `zstd`, `zstd:3`, `deflate`. The error is one sentence.
    pub fn parse(text: &str) -> Result<Compressor, String> {
        let (name, level) = text.split_once(':').map_or((text, None), |(name, level)| (name, Some(level)));
        let (codec, highest) = match name {
            "lz4" => (CODEC_LZ4, 0),
            "zstd" => (CODEC_ZSTD, 22),
            "deflate" => (CODEC_DEFLATE, 12),
            _ => {
                return Err(format!("no compressor is called `{name}`: choose lz4, zstd[:LEVEL] or deflate[:LEVEL]"));
            }
        };
        match level.map(str::parse::<u32>) {
            None => Ok(Compressor { codec, level: 0 }),
            Some(_) if highest == 0 => Err(format!("{name} has no levels: write just `{name}`")),
            Some(Ok(level)) if (1..=highest).contains(&level) => Ok(Compressor { codec, level }),
            Some(_) => Err(format!("`{text}` has no such level: {name} has 1 to {highest}")),
        }
    }

    /// The name without the level.
    pub fn name(self) -> &'static str {
        match self.codec {
            CODEC_LZ4 => "lz4",
            CODEC_ZSTD => "zstd",
            _ => "deflate",
        }
    }
}

/// Parses `--on-full` into a value of `Node::on_full`. The error is one sentence.
pub fn on_full(text: &str) -> Result<u32, String> {
    let known = [("exceed", ON_FULL_EXCEED), ("wait", ON_FULL_WAIT), ("kill", ON_FULL_KILL)];
    let found = known.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
    found.ok_or_else(|| format!("`{text}` is not an action for a full group: choose exceed, wait or kill"))
}

/// The word for a value of `Node::on_full`.
pub fn on_full_name(value: u32) -> &'static str {
    match value {
        ON_FULL_WAIT => "wait",
        ON_FULL_KILL => "kill",
        _ => "exceed",
    }
}

/// An I/O error in words, without the number.
pub fn plain(error: &std::io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default().to_lowercase();
    match error.kind() {
        std::io::ErrorKind::FileTooLarge => format!("{text} (raise `ulimit -f`)"),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::{Compressor, Config};
    use crate::cli::RunArgs;
    use clap::{Args, Command, FromArgMatches};
    use proptest::prelude::*;
    use uzswap_pager::group::algorithm;

    #[test]
    fn all_names() {
        let config = Config::parse(
            "memory = '1G'\ncompressor = 'zstd:3'\nquiet = true\nreport = 'r.json'\ngroup = 'web'\non-full = 'wait'\n",
        )
        .unwrap();
        assert_eq!((config.group.as_deref(), config.on_full.as_deref()), (Some("web"), Some("wait")));
        assert_eq!(config.memory.as_deref(), Some("1G"));
        assert_eq!(config.compressor.as_deref(), Some("zstd:3"));
        assert_eq!(config.quiet, Some(true));
        assert_eq!(config.report.as_deref(), Some("r.json".as_ref()));
        assert_eq!(Config::parse("track-writes = true\n").unwrap().track_writes, Some(true));
        let config = Config::parse("swap = '4G'\nswap-dir = '/d'\nswap-in-ram = true\nencrypt-swap = true\n").unwrap();
        assert_eq!(
            (config.swap.as_deref(), config.swap_in_ram, config.encrypt_swap),
            (Some("4G"), Some(true), Some(true))
        );
        assert_eq!(config.swap_dir.as_deref(), Some("/d".as_ref()));
        assert_eq!(Config::parse("").unwrap(), Config::default());
    }

    /// The story: the command line could not switch off what the file switched on.
    #[test]
    fn the_command_line_wins_over_what_the_file_switches_on() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("uzswap.toml");
        let on = "quiet = true\nswap-in-ram = true\nencrypt-swap = true\ntrack-writes = true\n";
        std::fs::write(&path, format!("{on}[folios]\nverify-compression = true\n")).unwrap();
        let of = |args: &[&str]| {
            let line = [&["run", "--config", path.to_str().unwrap()], args, &["--", "true"]].concat();
            let args = RunArgs::augment_args(Command::new("run")).try_get_matches_from(line).unwrap();
            let c = Config::of(&RunArgs::from_arg_matches(&args).unwrap()).unwrap();
            [c.quiet, c.swap_in_ram, c.encrypt_swap, c.track_writes, c.folios.verify_compression]
        };
        assert_eq!(of(&[]), [Some(true); 5]);
        let off = ["--quiet=false", "--swap-in-ram=false", "--encrypt-swap=false", "--track-writes=false"];
        assert_eq!(of(&[&off[..], &["--verify-compression=false"]].concat()), [Some(false); 5]);
        assert_eq!(of(&["-q=false", "-m64M"])[0], Some(false));
        std::fs::write(&path, on.replace("true", "false")).unwrap();
        let all = ["-qm64M", "--swap-in-ram", "--encrypt-swap", "--track-writes", "--verify-compression=true"];
        assert_eq!(of(&all), [Some(true); 5]);
    }

    #[test]
    fn wrong_files() {
        for (text, want) in [
            ("memory = '1G'\nmemroy = '2G'\n", "line 2: unknown field `memroy`"),
            ("quiet = 'yes'\n", "line 1: invalid type"),
            ("memory = \n", "line 1"),
            ("memory = '1G'\nmemory = '2G'\n", "line 2: duplicate key"),
            ("[folios]\nunit = '4K'\nunit = '16K'\n", "line 3: duplicate key"),
            ("[folios]\nunit = '4K'\n[folios]\nlarge-folios = 'off'\n", "line 3: duplicate key"),
            ("folios.unit = '4K'\n[folios]\nlarge-folios = 'off'\n", "line 2: duplicate key"),
            ("folios = '4K'\n", "line 1: invalid type: string \"4K\", expected a table, [folios]"),
            ("memory = -5\n", "line 1: invalid type: integer `-5`"),
            ("memory = 99999999999999999999999\n", "line 1: invalid type: integer"),
            ("mémoire = '1G'\n", "line 1: "),
            ("'' = '1G'\n", "line 1: unknown field ``"),
            ("\"me\\nmory\" = '1G'\n", "line 1: unknown field `me, mory`"),
            ("memory = '1G'\0\n", "line 1"),
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(error.starts_with(want) && !error.contains('\n'), "{error}");
        }
        for (text, want) in [
            ("unit = '64K'\n", "(`unit` belongs in the table `[folios]`)"),
            ("verify-compression = true\n", "in the table `[folios]`)"),
            ("memory = 64\n", "; write sizes in quotes, as memory = \"64M\""),
            ("memory = -64\n", "; write sizes in quotes, as memory = \"64M\""),
            (
                "[folios]\nlarge-folios = ['16K', '64K']\n",
                "; write several in one pair of quotes, as large-folios = \"16K,64K\"",
            ),
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(error.ends_with(want) && !error.contains('\n'), "{error}");
        }
        let known = Config::parse("[folios]\nmemory = '1G'\n").unwrap_err();
        assert!(!known.contains("in the table"), "{known}");
    }

    #[test]
    fn compressors() {
        let of = |text| Compressor::parse(text).map(|c| (c.name(), c.level));
        assert_eq!(of("lz4"), Ok(("lz4", 0)));
        assert_eq!(of("zstd"), Ok(("zstd", 0)));
        assert_eq!(of("zstd:19"), Ok(("zstd", 19)));
        assert_eq!(of("deflate"), Ok(("deflate", 0)));
        assert_eq!(of("deflate:12"), Ok(("deflate", 12)));
        assert_eq!(of("zstd:22"), Ok(("zstd", 22)));
        // The engine takes all that is accepted here, and makes it at that level, not at a lower one.
        for (text, codec) in [("lz4", "lz4"), ("zstd", "zstd:1"), ("deflate", "deflate:1")] {
            let own = Compressor::parse(text).unwrap();
            assert_eq!(algorithm(own.codec, own.level).unwrap().to_string(), codec);
        }
        for (name, highest) in [("zstd", 22), ("deflate", 12)] {
            for text in (1..=highest).map(|level| format!("{name}:{level}")) {
                let own = Compressor::parse(&text).unwrap();
                assert_eq!(algorithm(own.codec, own.level).map(|a| a.to_string()), Some(text));
            }
        }
        for bad in ["", "lzo", "LZ4", "lz4:1", "zstd:", "zstd:0", "zstd:23", "zstd:-1", "zstd:x", "deflate:13"] {
            assert!(of(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn never_panics(text in "\\PC{0,40}") {
            let _ = Config::parse(&text);
            let _ = Compressor::parse(&text);
        }
    }
}

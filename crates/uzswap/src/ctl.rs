//! `uzswap ctl`: shows and sets the limits of a running group.
//!
//! Settings take effect at once: members read their limits each time, and are woken. All settings are checked before the first
//! one is made.

use crate::Failed;
use crate::check::MINIMUM;
use crate::cli::CtlArgs;
use crate::config::{on_full, on_full_name};
use crate::group_name::components;
use crate::groups::{Group, Registry};
use crate::machine;
use crate::output::print;
use crate::stat_files::Usage;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::time::{Duration, Instant};
use uzswap_mm::size::{Size, human};
use uzswap_pager::group::{NO_LIMIT, Node};

/// The settings, by name.
const KEYS: [&str; 6] =
    ["memory.high", "memory.max", "memory.zswap.max", "memory.swap.max", "memory.zswap.writeback", "uzswap.on_full"];
/// Reclaim that has gained nothing for this long is taken to be done.
const PATIENCE: Duration = Duration::from_millis(1500);

/// A setting.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Setting {
    /// A limit: its key and its value in bytes.
    Limit(&'static str, u64),
    Writeback(bool),
    OnFull(u32),
}

impl Setting {
    /// Which of [`KEYS`] this sets.
    fn key(&self) -> &'static str {
        match self {
            Setting::Limit(key, _) => key,
            Setting::Writeback(_) => "memory.zswap.writeback",
            Setting::OnFull(_) => "uzswap.on_full",
        }
    }
}

/// Shows or sets limits. The error is one sentence.
pub fn ctl(args: &CtlArgs) -> Result<(), Failed> {
    let settings = parse_all(&args.settings).map_err(Failed::Wrongly)?;
    components(&args.name).map_err(Failed::Wrongly)?;
    let group = Registry::open()?.find(&args.name)?;
    if settings.is_empty() {
        return Ok(print(shown(&group).as_bytes())?);
    }
    group.change(|| settings.iter().for_each(|setting| apply(&group, *setting)));
    if settings.iter().any(|s| matches!(s, Setting::Limit("memory.high" | "memory.max", _))) {
        report_what_stays(&group);
    }
    Ok(())
}

fn shown(group: &Group) -> String {
    let n = &group.page().nodes[group.node];
    KEYS.iter().map(|key| format!("{key} {}\n", value(n, key))).collect()
}

fn value(n: &Node, key: &str) -> String {
    match key {
        "memory.zswap.writeback" => n.zswap_writeback.load(Relaxed).to_string(),
        "uzswap.on_full" => on_full_name(n.on_full.load(Relaxed)).to_owned(),
        _ => match limit(n, key).load(Relaxed) {
            NO_LIMIT.. => "max".to_owned(),
            bytes => bytes.to_string(),
        },
    }
}

fn limit<'a>(n: &'a Node, key: &str) -> &'a AtomicU64 {
    match key {
        "memory.high" => &n.high,
        "memory.zswap.max" => &n.zswap_max,
        "memory.swap.max" => &n.swap_max,
        _ => &n.max,
    }
}

/// Parses all settings. No two may have the same key. The error is one sentence.
fn parse_all(texts: &[String]) -> Result<Vec<Setting>, String> {
    let settings: Vec<Setting> = texts.iter().map(|text| parse(text)).collect::<Result<_, _>>()?;
    for (i, setting) in settings.iter().enumerate() {
        if settings[..i].iter().any(|earlier| earlier.key() == setting.key()) {
            return Err(format!("{} is set twice: set it once", setting.key()));
        }
    }
    Ok(settings)
}

/// Parses `KEY=VALUE`. The error is one sentence.
fn parse(text: &str) -> Result<Setting, String> {
    let (key, value) = text.split_once('=').unwrap_or((text, ""));
    let Some(key) = KEYS.into_iter().find(|known| *known == key.trim()) else {
        return Err(format!("`{key}` cannot be set: the keys are {}", KEYS.join(", ")));
    };
    let value = value.trim();
    if value.is_empty() {
        return Err(format!("`{text}` has no value: write `{key}=VALUE`"));
    }
    match key {
        "memory.zswap.writeback" => match value {
            "0" => Ok(Setting::Writeback(false)),
            "1" => Ok(Setting::Writeback(true)),
            _ => Err(format!("`{value}` is no value for {key}: write 0 or 1")),
        },
        "uzswap.on_full" => on_full(value).map(Setting::OnFull),
        _ if value == "max" => Ok(Setting::Limit(key, NO_LIMIT)),
        _ => {
            let bytes = Size::parse(value)
                .map_err(|e| format!("{e}, or `max` for no limit"))?
                .resolve(machine::available_memory());
            if matches!(key, "memory.high" | "memory.max") && bytes < MINIMUM {
                let least = human(MINIMUM);
                return Err(format!("`{value}` is too small a {key} to run a program in: the minimum is {least}"));
            }
            Ok(Setting::Limit(key, bytes.min(NO_LIMIT)))
        }
    }
}

fn apply(group: &Group, setting: Setting) {
    let n = &group.page().nodes[group.node];
    match setting {
        // Lowering a limit never kills.
        Setting::Limit("memory.max", bytes) => n.set_max(bytes, Usage::of(group.page(), group.node).charge),
        Setting::Limit(key, bytes) => limit(n, key).store(bytes, SeqCst),
        Setting::Writeback(on) => n.zswap_writeback.store(u32::from(on), SeqCst),
        Setting::OnFull(what) => n.on_full.store(what, SeqCst),
    }
}

/// Waits until the members keep the limits, or reclaim gains nothing more, and prints what cannot be taken out.
fn report_what_stays(group: &Group) {
    let n = &group.page().nodes[group.node];
    let (mut least, mut since) = (u64::MAX, Instant::now());
    loop {
        let used = Usage::of(group.page(), group.node).charge;
        let over = KEYS[..2].iter().find(|key| used > limit(n, key).load(Relaxed));
        let Some(key) = over else { return };
        // A little less is no progress: the charge varies.
        if used < least - least / 256 {
            (least, since) = (used, Instant::now());
        } else if since.elapsed() > PATIENCE {
            let limit = limit(n, key).load(Relaxed);
            say!(
                "uzswap: {key} of `{}` is {}, but {} are still used, {} too much, and for {} s that has not become less: no more can be taken out of memory now, or it is used again as soon",
                group.name(),
                human(limit),
                human(used),
                human(used - limit),
                PATIENCE.as_secs_f64()
            );
            return;
        }
        group.wake();
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    use super::{KEYS, Setting, parse, parse_all};
    use proptest::prelude::*;
    use uzswap_pager::group::{NO_LIMIT, ON_FULL_KILL};

    #[test]
    fn settings() {
        assert_eq!(parse("memory.high=300M"), Ok(Setting::Limit("memory.high", 300 << 20)));
        assert_eq!(parse("memory.max=max"), Ok(Setting::Limit("memory.max", NO_LIMIT)));
        assert_eq!(parse("memory.zswap.max=0"), Ok(Setting::Limit("memory.zswap.max", 0)));
        assert_eq!(parse("memory.swap.max = 1GiB"), Ok(Setting::Limit("memory.swap.max", 1 << 30)));
        assert_eq!(parse("memory.zswap.writeback=0"), Ok(Setting::Writeback(false)));
        assert_eq!(parse("uzswap.on_full=kill"), Ok(Setting::OnFull(ON_FULL_KILL)));
        for (bad, part) in [
            ("memory.low=1M", "`memory.low` cannot be set: the keys are memory.high,"),
            ("memory.current", "cannot be set"),
            ("", "cannot be set"),
            ("memory.high", "has no value"),
            ("memory.high=", "has no value"),
            ("memory.high=lots", "`lots` is not a size"),
            ("memory.max=-1", "is not a size"),
            ("memory.max=101%", "out of range"),
            ("memory.max=0%", "out of range"),
            ("memory.max=99999999T", "out of range"),
            ("memory.max=٣M", "is not a size"),
            ("memory.zswap.writeback=-1", "write 0 or 1"),
            ("memory.max=8M", "the minimum is 16 MiB"),
            ("memory.high=0", "the minimum is 16 MiB"),
            ("memory.zswap.writeback=yes", "write 0 or 1"),
            ("uzswap.on_full=panic", "choose exceed, wait or kill"),
        ] {
            let sentence = parse(bad).unwrap_err();
            assert!(sentence.contains(part) && !sentence.contains('\n'), "{bad}: {sentence}");
        }
    }

    /// The story: of two values for one key the last one was taken, without a message.
    #[test]
    fn a_key_is_set_once() {
        let all = |texts: &[&str]| parse_all(&texts.iter().map(|text| text.to_string()).collect::<Vec<_>>());
        let one_each = KEYS.map(|key| format!("{key}={}", if key == "uzswap.on_full" { "wait" } else { "0" }));
        let one_each =
            one_each.map(|text| text.replace("high=0", "high=max").replace("memory.max=0", "memory.max=max"));
        let set = all(&one_each.each_ref().map(String::as_str)).unwrap();
        assert!(set.iter().map(Setting::key).eq(KEYS));
        for (twice, key) in [
            (["memory.high=300M", "memory.high=200M"], "memory.high"),
            (["memory.max=max", " memory.max =max"], "memory.max"),
            (["memory.zswap.writeback=0", "memory.zswap.writeback=1"], "memory.zswap.writeback"),
            (["uzswap.on_full=kill", "uzswap.on_full=wait"], "uzswap.on_full"),
        ] {
            assert_eq!(
                all(&[twice[0], "memory.swap.max=1G", twice[1]]),
                Err(format!("{key} is set twice: set it once"))
            );
        }
    }

    proptest! {
        #[test]
        fn never_panics(text in "(memory\\.(high|max|zswap\\.max))?=?.{0,20}") {
            let _ = parse(&text);
        }
    }
}

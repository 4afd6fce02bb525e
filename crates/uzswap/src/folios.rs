//! Folio options of `uzswap run`, and the folio counters it reports.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use uzswap_mm::compaction::rule::Rule;
use uzswap_mm::size::Size;
use uzswap_pager::group::folio::{
    FolioCounters, FolioSettings, LARGE_ORDER, LARGE_ORDERS, MAX_ORDER, OrderCounters, directory,
};
use uzswap_pager::group::{GroupPage, NODES};

/// Options about folios: the same on the command line and in the configuration file.
#[derive(clap::Args, Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct FolioOptions {
    /// Large folios that enter the compressed pool whole: on (the default), off, or sizes, such as 16K,64K,2M
    #[arg(long, value_name = "WHICH")]
    pub large_folios: Option<String>,
    /// Unit of compression: 4K or 16K to 2M for all folios, FOLIO:UNIT pairs such as 64K:16K,2M:512K, or both. A folio, and so a
    /// unit, is at most a 64th of the limit, and a unit of a process's share of that
    #[arg(long, value_name = "SIZE")]
    pub unit: Option<String>,
    /// How frames are moved together for large folios: emptiest (emptiest page blocks first; the default), pivot (scanners that
    /// start at a pivot, which moves), or zone-ends (like the kernel)
    #[arg(long, value_name = "RULE")]
    pub compaction: Option<String>,
    /// Decompress and compare before the original is given up
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch, value_name = "true|false")]
    pub verify_compression: Option<bool>,
}

/// Parses the value of a switch, as in `--quiet=false`. (With clap's own parser, completions would offer `true` and `false`
/// behind `--quiet`, where the program belongs.)
///
/// # Errors
/// A sentence that names the values allowed.
pub fn switch(value: &str) -> Result<bool, String> {
    value.parse().map_err(|_| "it is true or false".to_owned())
}

impl FolioOptions {
    /// These options, with those of a configuration file where they say nothing.
    pub fn over(&self, file: &FolioOptions) -> FolioOptions {
        FolioOptions {
            large_folios: self.large_folios.clone().or_else(|| file.large_folios.clone()),
            unit: self.unit.clone().or_else(|| file.unit.clone()),
            compaction: self.compaction.clone().or_else(|| file.compaction.clone()),
            verify_compression: self.verify_compression.or(file.verify_compression),
        }
    }

    /// Parses the options. The error is one sentence.
    pub fn parse(&self) -> Result<FolioWanted, String> {
        Ok(FolioWanted {
            off: self.large_folios.as_deref().map(orders_off).transpose()?,
            units: self.unit.as_deref().map(units).transpose()?,
            compaction: self.compaction.as_deref().map(str::parse).transpose()?,
            verify: self.verify_compression == Some(true),
        })
    }
}

/// What a run wants of a tree of groups; what it does not mention stays as it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct FolioWanted {
    /// As in `FolioSettings::large_off`.
    off: Option<u32>,
    /// As in `FolioSettings::units`.
    units: Option<[u8; MAX_ORDER as usize + 1]>,
    /// The compaction rule of the arena.
    compaction: Option<Rule>,
    /// Whether to verify compressed data.
    verify: bool,
}

impl FolioWanted {
    /// Nothing is asked for.
    #[cfg(test)]
    pub const NONE: FolioWanted = FolioWanted { off: None, units: None, compaction: None, verify: false };

    /// Applies this to a new tree.
    pub fn tell(&self, group: &FolioSettings) {
        self.off.iter().for_each(|off| group.large_off.store(*off, Relaxed));
        self.units.iter().flatten().zip(&group.units).for_each(|(set, unit)| unit.store(*set, Relaxed));
        self.compaction.iter().for_each(|rule| group.compaction.store(rule.number(), Relaxed));
        if self.verify {
            group.verify.store(1, Relaxed);
        }
    }

    /// The first option in which a running tree has another setting, if any.
    pub fn differs(&self, group: &FolioSettings) -> Option<&'static str> {
        let units = |set: [u8; MAX_ORDER as usize + 1]| group.units.iter().zip(set).any(|(u, s)| u.load(Relaxed) != s);
        if self.off.is_some_and(|off| off != group.large_off.load(Relaxed)) {
            Some("--large-folios")
        } else if self.units.is_some_and(units) {
            Some("--unit")
        } else if self.compaction.is_some_and(|rule| rule.number() != group.compaction.load(Relaxed)) {
            Some("--compaction")
        } else {
            (self.verify && group.verify.load(Relaxed) == 0).then_some("--verify-compression")
        }
    }
}

/// The order of a size that is a power of two and at least 4 KiB.
fn order(text: &str) -> Option<u8> {
    let Ok(Size::Bytes(bytes)) = Size::parse(text) else { return None };
    (bytes.is_power_of_two() && bytes >= 4096).then(|| (bytes.ilog2() - 12) as u8)
}

/// The orders that `--large-folios` keeps out, one bit each.
fn orders_off(text: &str) -> Result<u32, String> {
    let all = u32::MAX << LARGE_ORDER;
    match text {
        "on" => Ok(0),
        "off" => Ok(all),
        sizes => sizes.split(',').try_fold(all, |off, one| {
            let order = order(one).filter(|o| (LARGE_ORDER..=MAX_ORDER).contains(o));
            let order = order.ok_or_else(|| {
                format!("`{one}` in --large-folios is not a size of a large folio: write on, off, or powers of two from 16K to 2M")
            })?;
            if off & 1 << order == 0 {
                return Err(format!("`{one}` in --large-folios is named twice: write each size once"));
            }
            Ok(off & !(1 << order))
        }),
    }
}

/// What `--unit` means, as in `FolioSettings::units`: a unit for all folios, units for single sizes, or both in any order.
fn units(text: &str) -> Result<[u8; MAX_ORDER as usize + 1], String> {
    let wrong = |one: &str| {
        format!(
            "`{one}` in --unit is not a unit of compression: write 4K, or a power of two from 16K to 2M, or FOLIO:UNIT"
        )
    };
    let unit = |text: &str| order(text).filter(|o| *o <= MAX_ORDER && *o != 1);
    let (mut all, mut set) = (0, [0; MAX_ORDER as usize + 1]);
    for one in text.split(',') {
        let (place, of) = match one.split_once(':') {
            None => (&mut all, unit(one).ok_or_else(|| wrong(one))?),
            Some((folio, of)) => {
                let (folio, of) = (order(folio).filter(|o| *o <= MAX_ORDER), unit(of));
                let (Some(folio), Some(of)) = (folio, of) else { return Err(wrong(one)) };
                if of > folio {
                    return Err(format!("`{one}` in --unit: a unit cannot be larger than its folio"));
                }
                (&mut set[folio as usize], of)
            }
        };
        if *place != 0 {
            return Err(format!("`{one}` in --unit is a second unit for the same folios: write one for each"));
        }
        *place = of + 1;
    }
    Ok(set.map(|of| if of == 0 { all } else { of }))
}

/// Counters of folios and blocks, summed over a group.
#[derive(Debug, Default, Serialize)]
pub struct FolioTotals {
    /// Counters by order: the kernel's directory name, such as `hugepages-64kB`, then the counter.
    #[serde(flatten)]
    pub orders: BTreeMap<String, BTreeMap<&'static str, u64>>,
    /// All other counters.
    #[serde(flatten)]
    pub all: BTreeMap<&'static str, u64>,
}

impl FolioTotals {
    /// Sums the counters of a group in a tree.
    pub fn of(page: &GroupPage, node: usize) -> FolioTotals {
        let mut totals = FolioTotals::default();
        let nodes = (0..NODES).filter(|i| page.nodes[*i].is_ready() && page.is_within(*i, node));
        nodes.for_each(|i| totals.add(&page.nodes[i].dead.folios));
        let slots = page.used().iter().filter(|slot| page.is_within(slot.node.load(Acquire) as usize, node));
        slots.for_each(|slot| totals.add(&slot.counters.folios));
        totals
    }

    fn add(&mut self, counters: &FolioCounters) {
        let add = |sum: &mut u64, counter: &AtomicU64| *sum = sum.saturating_add(counter.load(Relaxed));
        for (i, order) in (0..LARGE_ORDERS).zip(&counters.orders) {
            let of = self.orders.entry(directory(i as u8 + LARGE_ORDER)).or_default();
            for (name, counter) in OrderCounters::NAMES.into_iter().zip(order.all()) {
                add(of.entry(name).or_default(), counter);
            }
        }
        for (name, counter) in FolioCounters::NAMES.into_iter().zip(counters.all()) {
            add(self.all.entry(name).or_default(), counter);
        }
        // What the largest folios did has names of its own in the kernel.
        let largest = &counters.orders[LARGE_ORDERS - 1];
        add(self.all.entry("thp_swpout").or_default(), &largest.swpout);
        add(self.all.entry("thp_swpout_fallback").or_default(), &largest.swpout_fallback);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a5_switch_by_words_and_sizes() {
        assert_eq!(orders_off("on"), Ok(0));
        assert_eq!(orders_off("off"), Ok(u32::MAX << 2));
        let off = orders_off("64K,2M").unwrap();
        assert!([4, 9].iter().all(|o| off & (1 << o) == 0) && [2, 3, 5, 8].iter().all(|o| off & (1 << o) != 0));
        for bad in [
            "",
            ",",
            "yes",
            "0",
            "-16K",
            "4K",
            "48K",
            "4M",
            "200%",
            "99999999T",
            "64K,",
            "64K;2M",
            "on,64K",
            "64K,off",
            "١٦K",
        ] {
            let error = orders_off(bad).unwrap_err();
            assert!(error.contains("is not a size of a large folio") && !error.contains('\n'), "{bad}: {error}");
        }
        for twice in ["16K,16K", "64K,2M,65536"] {
            assert!(orders_off(twice).unwrap_err().contains("--large-folios is named twice"), "{twice}");
        }
    }

    #[test]
    fn b1_units_for_all_and_by_order() {
        assert_eq!(units("16K").unwrap(), [3; 10]);
        assert_eq!((units("128K").unwrap(), units("2M").unwrap()), ([6; 10], [10; 10]));
        let some = units("16K:4K,2M:64K,1M:512K").unwrap();
        assert_eq!((some[2], some[9], some[8], some[4]), (1, 5, 8, 0));
        for bad in [
            "",
            ",",
            "0",
            "0:0",
            "-4K",
            "8K",
            "48K",
            "4M",
            "2M:8K",
            "4M:4K",
            "16K:",
            ":16K",
            "16K:4K:4K",
            "50%",
            "9999999999T",
            "x",
            "٤K",
        ] {
            let error = units(bad).unwrap_err();
            assert!(error.contains("is not a unit of compression") && !error.contains('\n'), "{bad}: {error}");
        }
        assert!(units("64K:2M").unwrap_err().contains("larger than its folio"));
    }

    /// The story: the last of two units for the same folios won, and a unit for all overrode units for single folios that stood
    /// before it.
    #[test]
    fn b1_a_folio_has_one_unit_whatever_the_order() {
        let both = units("16K,2M:512K").unwrap();
        assert_eq!((both[4], both[9]), (3, 8));
        assert_eq!(units("2M:512K,16K"), Ok(both));
        for twice in ["64K:16K,64K:32K", "64K:16K,64K:16K", "64K:16K,2M:64K,65536:4K", "64K,16K", "64K:16K,16K,4K"] {
            let error = units(twice).unwrap_err();
            assert!(error.ends_with("is a second unit for the same folios: write one for each"), "{twice}: {error}");
        }
    }

    #[test]
    fn the_command_line_wins() {
        let file = FolioOptions {
            large_folios: Some("off".into()),
            unit: Some("4K".into()),
            compaction: Some("pivot".into()),
            verify_compression: Some(true),
        };
        let line = FolioOptions { unit: Some("64K".into()), ..FolioOptions::default() };
        let both = line.over(&file);
        assert_eq!((both.large_folios.as_deref(), both.unit.as_deref()), (Some("off"), Some("64K")));
        let group = FolioSettings::default();
        both.parse().unwrap().tell(&group);
        assert!(!group.allows(9) && group.allows(0));
        assert_eq!(Rule::from_number(group.compaction.load(Relaxed)), Rule::Pivot);
        assert_eq!((group.unit(9), group.verify.load(Relaxed)), (Some(4), 1));
        let differs = |options: FolioOptions| options.parse().unwrap().differs(&group);
        assert_eq!((differs(both), differs(FolioOptions::default())), (None, None));
        let other = FolioOptions { compaction: Some("emptiest".into()), ..FolioOptions::default() };
        assert_eq!(differs(other), Some("--compaction"));
        assert_eq!(differs(FolioOptions { unit: Some("16K".into()), ..FolioOptions::default() }), Some("--unit"));
    }
}

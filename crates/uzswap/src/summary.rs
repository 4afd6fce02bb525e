//! The summary on stderr at the end of a run.

use crate::machine;
use crate::record::Recorded;
use crate::totals::Totals;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;
use uzswap_mm::size::human;
use uzswap_pager::group::NO_LIMIT;

/// A program was slow if its threads stalled for this share of its time, and it ran for at least this long (seconds). (A program
/// that only reads at random from memory that is out stalls for half of its time. The rest are its faults in the kernel, and the
/// switches to the handler and back.)
const SLOW_SHARE: f64 = 0.4;
const SLOW_SECONDS: f64 = 5.0;
/// By how many bytes the limit may be exceeded before the summary mentions it; a twentieth of the limit if that is more.
const TOLERANCE: u64 = 16 << 20;

/// Prints the summary of a group. `wall` is how long ago this run created it; None if the run joined it.
pub fn print(totals: &Totals, wall: Option<Duration>) {
    let too_high = totals.limit.and_then(|limit| too_high(limit, machine::total_memory(), machine::cgroup_limit()));
    say(&(text(totals, wall) + &too_high.unwrap_or_default()));
}

/// A line about a limit above the memory there is; None if it is not.
///
/// The story: a program in a container had a limit above the container's. The kernel killed it for want of memory long before
/// anything had to leave, and nobody could tell why from a summary with a peak of a quarter of the limit.
fn too_high(limit: u64, machine: u64, cgroup: Option<u64>) -> Option<String> {
    let (there_is, whose) = match cgroup {
        Some(allowed) if allowed < machine => (allowed, "this cgroup allows"),
        _ => (machine, "this machine has"),
    };
    (limit > there_is).then(|| {
        format!(
            "uzswap: too high     the limit is more than the {} that {whose}: the kernel may kill the program before anything leaves memory; \
             choose a lower one\n",
            human(there_is)
        )
    })
}

/// Prints what was recorded; if `quiet`, only what went wrong.
pub fn print_trace(path: &Path, recorded: &Recorded, quiet: bool) {
    if !quiet || recorded.error.is_some() || recorded.lost > 0 {
        say(&trace_line(path, recorded));
    }
}

fn trace_line(path: &Path, recorded: &Recorded) -> String {
    let mut line = format!("uzswap: trace        {} records in `{}`", grouped(recorded.records), path.display());
    if recorded.lost > 0 {
        let _ = write!(line, ", {} lost: they came faster than they could be written", grouped(recorded.lost));
    }
    if let Some(error) = &recorded.error {
        let _ = write!(line, "; it ends before the program did: {error}");
    }
    line.push('\n');
    line
}

/// Writes to stderr in one call; ignores errors.
pub fn say(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// The lines of the summary.
///
/// The story: a program ran for 0.3 s in a group with others, and the summary said that it had stalled for 156 % of that.
pub fn text(totals: &Totals, wall: Option<Duration>) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(out, "uzswap: {name:<12} {value}");
    };
    if totals.joined == 0 {
        line("not managed", "the program did not load uzswap's library, so no limit was kept");
        return out;
    }
    if !totals.group.bytes().all(|b| b.is_ascii_digit()) {
        line("group", &format!("{} (what follows is about all that ran in it)", totals.group));
    }
    if let Some(limit) = totals.limit {
        line("peak", &peak(totals, limit));
        let times = totals.peak_held as f64 / limit.max(1) as f64;
        line("most held", &format!("{} ({times:.2} x the limit)", human(totals.peak_held)));
    } else {
        line("peak", &human(totals.peak));
        line("most held", &human(totals.peak_held));
    }
    if totals.engaged == 0 {
        line("compression", "nothing had to be compressed");
        line("cost", "nothing");
    } else {
        line("compression", &compression(totals));
        line("faults", &faults(totals));
        if totals.swap > 0 {
            line("disk", &disk(totals));
        }
        let stalled = totals.counters.stall_ns as f64 / 1e9;
        let (mut cost, mut slow) = (format!("threads stalled for {stalled:.2} s"), false);
        if let Some(seconds) = wall.map(|wall| wall.as_secs_f64()) {
            let _ = write!(cost, ", {} of the {seconds:.2} s it ran", percent(stalled, seconds));
            slow = stalled >= SLOW_SHARE * seconds && seconds >= SLOW_SECONDS;
        }
        line("cost", &cost);
        if slow {
            line("slow", &why_slow(totals));
        }
    }
    if totals.joined > 1 {
        line("processes", &format!("{}, {} of them managed", totals.joined, totals.engaged));
    }
    what_went_wrong(totals, line);
    out
}

/// The highest charge, and the limit when it was seen.
///
/// The story: a group's limit was lowered from 300 to 60 MiB, and the summary said that 234 of 60 allowed had been used.
fn peak(totals: &Totals, limit: u64) -> String {
    let then = totals.peak_limit.unwrap_or(limit);
    let share = percent(totals.peak as f64, then as f64);
    match then {
        _ if then == limit => format!("{} of {} allowed ({share})", human(totals.peak), human(limit)),
        NO_LIMIT.. => format!("{}, without a limit then; {} now", human(totals.peak), human(limit)),
        _ => format!("{} of {} allowed then ({share}); {} now", human(totals.peak), human(then), human(limit)),
    }
}

/// Whether the limit at the time of the peak was exceeded by more than the tolerance.
fn was_exceeded(totals: &Totals) -> bool {
    let limit = totals.peak_limit.or(totals.limit).unwrap_or(u64::MAX);
    totals.peak > limit.saturating_add((limit / 20).max(TOLERANCE))
}

/// Why a program that did little but fault was slow, and what to do.
fn why_slow(totals: &Totals) -> String {
    let limit = totals.limit.unwrap_or_default();
    let mut text =
        "it spent most of its time on page faults, as it works on more memory than the limit has room for".to_owned();
    if limit > 0 {
        let _ = write!(text, "; give it more than {}", human(limit));
    }
    // Memory held is resident + pool x ratio, and resident + pool is the limit.
    let beyond = totals.peak_held.saturating_sub(limit) as f64;
    let pool = totals.compression_ratio.map_or(0.0, |ratio| beyond / (ratio - 1.0).max(0.01));
    if totals.swap == 0 && limit > 0 && pool > limit as f64 / 2.0 {
        text.push_str(", or `--swap` (`--swap 4G`, say): what was compressed took most of it");
    }
    text
}

fn what_went_wrong(totals: &Totals, mut line: impl FnMut(&str, &str)) {
    if totals.unmanaged {
        line("unmanaged", "a process could not be managed and ran outside the limit");
    }
    if totals.over_limit > 0 {
        let often = match totals.over_limit {
            1 => "once".to_owned(),
            n => format!("{} times", grouped(n)),
        };
        let limit = totals.limit.unwrap_or(u64::MAX);
        // The held memory is sampled.
        let advice = match totals.peak < limit - limit / 10 {
            true => "it was lower then".to_owned(),
            false => format!("give it more than {}", human(limit)),
        };
        let why = format!("the limit could not be kept {often}: nothing more could be taken out of memory; {advice}");
        line("over limit", &why);
    } else if was_exceeded(totals) {
        line(
            "over limit",
            "for a time: what processes fill at once, or copy after a fork, leaves when it has been seen",
        );
    }
    if totals.oom_kill > 0 {
        line("killed", &format!("{}, for that", counted(totals.oom_kill, "process", "processes")));
    }
    let lost = totals.counters.poisoned;
    if lost > 0 {
        let pages = counted(lost, "page", "pages");
        line("lost", &format!("{pages} could not be read back{}", why_lost(totals)));
    }
}

/// Why pages were lost, as far as uzswap knows.
///
/// The story: users who had restarted their swap server, or had a bad disk, were asked to report that to uzswap's authors.
fn why_lost(totals: &Totals) -> &'static str {
    match totals.swap_io {
        _ if totals.counters.swap_read_errors == 0 => ", please report this",
        Some("redis") => {
            ": the swap server was away for too long, or no longer has the data; check whether it was restarted or evicts keys"
        }
        _ => ": the disk of the swap file failed or returned other data than was written; the kernel's log may say why",
    }
}

/// A number with its noun in singular or plural.
fn counted(n: u64, one: &str, many: &str) -> String {
    format!("{} {}", grouped(n), if n == 1 { one } else { many })
}

fn compression(totals: &Totals) -> String {
    match totals.compression_ratio {
        Some(ratio) => format!("{ratio:.2} to 1"),
        None if totals.counters.zswpout == 0 => "nothing had to be compressed".to_owned(),
        None => {
            format!("{} went through the pool, empty at the end", human(totals.counters.zswpout.saturating_mul(4096)))
        }
    }
}

fn faults(totals: &Totals) -> String {
    let c = &totals.counters;
    format!(
        "{}: {} decompressed, {} taken back in time, {} on new or zero memory",
        grouped(c.pgfault),
        grouped(c.pgmajfault),
        grouped(c.refault_staged),
        grouped(c.fault_zero)
    )
}

/// The swap file's counters.
fn disk(totals: &Totals) -> String {
    let c = &totals.counters;
    if c.swap_write_bytes == 0 && c.swap_write_errors == 0 {
        return "nothing had to be written".to_owned();
    }
    let mut text = format!(
        "at most {} of the program in {} {}; {} written, {} read back",
        human(c.swap_pages.saturating_mul(4096)),
        human(c.swap_used_size),
        if totals.swap_io == Some("redis") { "on the swap server" } else { "of the swap file" },
        human(c.swap_write_bytes),
        human(c.swap_read_bytes)
    );
    if totals.swap_io == Some("buffered") {
        text.push_str(", through the page cache");
    }
    if c.swap_write_errors.max(c.swap_read_errors) > 0 {
        let _ =
            write!(text, "; {} writes and {} reads failed", grouped(c.swap_write_errors), grouped(c.swap_read_errors));
    }
    text
}

fn percent(part: f64, whole: f64) -> String {
    if whole > 0.0 { format!("{:.0} %", part / whole * 100.0) } else { "0 %".to_owned() }
}

/// `1234567` as `1,234,567`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::{NO_LIMIT, grouped, text, trace_line};
    use crate::record::Recorded;
    use crate::totals::{Sums, Totals};
    use std::time::Duration;

    #[test]
    fn numbers() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }

    #[test]
    fn what_was_recorded() {
        let mut recorded = Recorded { records: 1234, ..Recorded::default() };
        assert_eq!(trace_line("t".as_ref(), &recorded), "uzswap: trace        1,234 records in `t`\n");
        (recorded.lost, recorded.error) = (5, Some("no space left on device".to_owned()));
        let line = trace_line("t".as_ref(), &recorded);
        assert!(line.contains("5 lost") && line.contains("no space left"), "{line}");
    }

    #[test]
    fn under_the_limit() {
        let totals =
            Totals { limit: Some(512 << 20), peak: 128 << 20, peak_held: 128 << 20, joined: 1, ..Totals::default() };
        assert_eq!(
            text(&totals, Some(Duration::from_secs(1))),
            "uzswap: peak         128 MiB of 512 MiB allowed (25 %)\n\
             uzswap: most held    128 MiB (0.25 x the limit)\n\
             uzswap: compression  nothing had to be compressed\n\
             uzswap: cost         nothing\n"
        );
    }

    #[test]
    fn on_disk() {
        let counters = Sums {
            swap_pages: 1 << 18,
            swap_used_size: 1 << 29,
            swap_write_bytes: 3 << 29,
            swap_read_bytes: 5 << 20,
            ..Sums::default()
        };
        let mut totals = Totals { swap: 1 << 30, counters, ..Totals::default() };
        assert_eq!(
            super::disk(&totals),
            "at most 1 GiB of the program in 512 MiB of the swap file; 1.5 GiB written, 5 MiB read back"
        );
        totals.swap_io = Some("buffered");
        assert!(super::disk(&totals).ends_with("5 MiB read back, through the page cache"));
        totals.counters.swap_read_errors = 2;
        assert!(super::disk(&totals).ends_with("; 0 writes and 2 reads failed"));
        assert_eq!(super::disk(&Totals::default()), "nothing had to be written");
    }

    /// See [`super::too_high`].
    #[test]
    fn a_limit_above_what_there_is() {
        let said = |limit, cgroup| super::too_high(limit, 8 << 30, cgroup).unwrap_or_default();
        assert_eq!(said(8 << 30, None) + &said(1 << 30, Some(1 << 30)), "");
        assert!(said(9 << 30, None).contains("more than the 8 GiB that this machine has"));
        assert!(said(9 << 30, Some(1 << 40)).contains("more than the 8 GiB that this machine has"));
        assert!(said(2 << 30, Some(1 << 30)).contains("more than the 1 GiB that this cgroup allows"));
    }

    /// See [`super::why_lost`].
    #[test]
    fn lost_pages() {
        let said = |swap_read_errors, swap_io| {
            let counters = Sums { poisoned: 2, swap_read_errors, ..Sums::default() };
            text(&Totals { joined: 1, swap_io, counters, ..Totals::default() }, None)
        };
        assert!(said(0, Some("redis")).contains("2 pages could not be read back, please report this\n"));
        assert!(said(4, Some("redis")).contains("2 pages could not be read back: the swap server"));
        assert!(said(4, Some("direct")).contains("2 pages could not be read back: the disk of the swap file"));
    }

    #[test]
    fn slow() {
        let counters = Sums { stall_ns: 8_000_000_000, ..Sums::default() };
        let limit = Some(64 << 20);
        let mut totals = Totals {
            limit,
            peak_held: 112 << 20,
            engaged: 1,
            joined: 1,
            compression_ratio: Some(2.0),
            counters,
            ..Totals::default()
        };
        let said = |totals: &Totals, seconds| {
            text(totals, Some(Duration::from_secs(seconds)))
                .lines()
                .find_map(|l| l.strip_prefix("uzswap: slow         ").map(str::to_owned))
        };
        let line = said(&totals, 10).expect("it stalled for most of the time");
        assert!(line.contains("more than 64 MiB, or `--swap`"), "{line}");
        assert_eq!(said(&totals, 21), None, "it did something else too");
        assert_eq!(said(&totals, 4), None, "it was soon over");
        // At four to one, the pool takes a quarter of the limit.
        totals.compression_ratio = Some(4.0);
        assert!(!said(&totals, 10).unwrap().contains("--swap"));
        (totals.compression_ratio, totals.swap) = (Some(2.0), 1 << 30);
        assert!(!said(&totals, 10).unwrap().contains("--swap"), "it has one");
        totals.limit = None;
        assert!(!said(&totals, 10).unwrap().contains("more than "), "there is none to raise");
    }

    #[test]
    fn over_the_limit() {
        let counters = Sums { pgfault: 4000, pgmajfault: 3000, stall_ns: 1_500_000_000, ..Sums::default() };
        let totals = Totals {
            limit: Some(1 << 30),
            peak: 1 << 30,
            joined: 3,
            engaged: 2,
            over_limit: 2,
            unmanaged: true,
            compression_ratio: Some(2.5),
            counters,
            ..Totals::default()
        };
        let said = text(&totals, Some(Duration::from_secs(3)));
        for part in [
            "2.50 to 1",
            "4,000: 3,000 decompressed",
            "1.50 s, 50 % of the 3.00 s",
            "3, 2 of them",
            "2 times",
            "give it more than 1 GiB",
            "outside",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        // A run that joined a group does not know how long the group has run.
        let joined = text(&totals, None);
        assert!(joined.contains("threads stalled for 1.50 s\n") && !joined.contains("slow"), "{joined}");
        assert!(!said.contains("for a time"), "it is said why");
        // The story: the summary advised raising a limit, which had been lowered and raised again, above what it was.
        let raised = text(&Totals { limit: Some(2 << 30), ..totals }, None);
        assert!(raised.contains("it was lower then") && !raised.contains("more than 2 GiB"), "{raised}");
    }

    /// See [`peak`] and [`was_exceeded`].
    #[test]
    fn the_peak_is_told_by_what_was_allowed_when_it_was_seen() {
        let said = |peak: u64, then: Option<u64>, limit: u64| {
            let [peak, limit] = [peak, limit].map(|mib| mib << 20);
            let peak_limit = then.map(|mib| mib << 20);
            text(&Totals { limit: Some(limit), peak, peak_limit, joined: 1, engaged: 1, ..Totals::default() }, None)
        };
        let lowered = said(234, Some(300), 60);
        assert!(lowered.contains("peak         234 MiB of 300 MiB allowed then (78 %); 60 MiB now\n"), "{lowered}");
        assert!(!lowered.contains("over limit"), "{lowered}");
        // The story: a group that first had no limit was said to have exceeded the one that it had later.
        let limited = said(234, Some(NO_LIMIT >> 20), 60);
        assert!(limited.contains("peak         234 MiB, without a limit then; 60 MiB now\n"), "{limited}");
        assert!(!limited.contains("over limit"), "{limited}");
        let steady = said(65, Some(64), 64);
        assert!(steady.contains("peak         65 MiB of 64 MiB allowed (102 %)\n"), "{steady}");
        for (peak, then, limit, over) in
            [(79, Some(64), 64, false), (81, Some(64), 64, true), (81, Some(64), 1024, true), (81, None, 64, true)]
        {
            assert_eq!(said(peak, then, limit).contains("over limit   for a time"), over, "{peak} {then:?} {limit}");
        }
    }
}
